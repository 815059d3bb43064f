"""Results that have a page of their own."""

from __future__ import annotations

from pathlib import Path

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.results.tables import Table
from spiritlevel.storage import write_atomically


class Shown(Table):
    """A table with a page of its own. `page` is a higher layer: it is looked up only when a page is asked for."""

    @checked
    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page; with `path` also written there, atomically."""
        from spiritlevel.page import page

        text = page(self)
        if path is not None:
            write_atomically(path, text)
        return text

    def _repr_html_(self) -> str | None:
        """What a notebook shows; where the packages of a page are missing, it shows the text."""
        try:
            from spiritlevel.page import notebook
        except InputError:
            return None
        return notebook(self)
