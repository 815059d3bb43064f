"""Results → one self-contained HTML page. Shows what was measured and computes nothing."""

from __future__ import annotations

from spiritlevel.errors import needs

with needs("a page"):
    from spiritlevel.page.document import notebook, page

__all__ = ["notebook", "page"]
