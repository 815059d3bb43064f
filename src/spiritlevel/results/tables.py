"""Results that are tables: a Polars frame, and a CSV file that no spreadsheet mistakes for a program."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiritlevel.arguments import checked
from spiritlevel.errors import needs
from spiritlevel.results.codec import Result
from spiritlevel.storage import write_atomically

if TYPE_CHECKING:
    import polars as pl

    from spiritlevel.results.estimates import Estimate

Columns = Mapping[str, tuple[type, Iterable[Any]]]
"""The columns of a table: what kind of value each holds (`float`, `int`, `bool`, `str`), and the values."""


class Table(Result):
    """A result that is a table, also available as a Polars frame and as CSV."""

    @abstractmethod
    def _columns(self) -> Columns:
        """The table, column by column."""

    def frame(self) -> pl.DataFrame:
        """The table as a Polars frame; an undefined number is NaN, what does not apply is null."""
        with needs("a table"):
            import polars as pl

        columns = self._columns()
        kinds = {name: kind for name, (kind, _) in columns.items()}
        return pl.DataFrame({name: list(values) for name, (_, values) in columns.items()}, schema=kinds, strict=False)

    @checked
    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV; with `path` also written there, atomically.

        Texts that a spreadsheet would run as a formula, those that begin with = + - or @, get an apostrophe in front.
        """
        return as_csv(self.frame(), path)


def as_csv(frame: pl.DataFrame, path: str | Path | None = None) -> str:
    """A frame as CSV in which no text is a formula; with `path` also written there, atomically."""
    with needs("a table"):
        import polars as pl

    guarded = pl.col(pl.String).str.replace(_FORMULA, "'$0")
    text = frame.with_columns(guarded).rename(_harmless).write_csv()
    if path is not None:
        write_atomically(path, text)
    return text


_FORMULA = r"\A[=+\-@\t\r\n]"  # how a cell begins that a spreadsheet runs, or may run after trimming blanks


def _harmless(name: str) -> str:
    return f"'{name}" if name[:1] in tuple("=+-@\t\r\n") else name


def of_estimates(estimates: Sequence[Estimate], limits: Iterable[tuple[float, float]] | None = None) -> Columns:
    """The columns of numbers with their errors; the 95% `limits` are by default those on the given data."""
    ends = [estimate.interval() for estimate in estimates] if limits is None else list(limits)
    return {
        "value": (float, [estimate.value for estimate in estimates]),
        "stderr": (float, [estimate.stderr for estimate in estimates]),
        "tolerance": (float, [estimate.tolerance for estimate in estimates]),
        "low": (float, [low for low, _ in ends]),
        "high": (float, [high for _, high in ends]),
        "status": (str, [estimate.status for estimate in estimates]),
        "reason": (str, [estimate.reason for estimate in estimates]),
    }
