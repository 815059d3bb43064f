"""Results that have a page of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from spiritlevel.results.tables import Table
from spiritlevel.storage import write_atomically

if TYPE_CHECKING:
    from spiritlevel.results.comparisons import Comparison
    from spiritlevel.results.reports import Report


class Shown(Table):
    """A table with a page of its own. `page` lies above: it is looked up when a page is asked for, never before."""

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page; with `path` also written there, atomically."""
        from spiritlevel.page import page

        text = page(cast("Report | Comparison", self))
        if path is not None:
            write_atomically(path, text)
        return text

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from spiritlevel.page import notebook

        return notebook(cast("Report | Comparison", self))
