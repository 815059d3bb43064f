"""Results → one self-contained HTML page. Shows what was measured and computes nothing."""

from __future__ import annotations

from spiritlevel.page.document import notebook, page

__all__ = ["notebook", "page"]
