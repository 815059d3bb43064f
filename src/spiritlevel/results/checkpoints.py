"""Many checkpoints side by side."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, counted, enumerated, unknown_name
from spiritlevel.results.codec import Misfit, Result
from spiritlevel.results.estimates import Estimate
from spiritlevel.results.formatting import aligned, figure, left_out_lines
from spiritlevel.results.pages import Shown
from spiritlevel.results.perturbations import Prediction
from spiritlevel.results.tables import Columns


@dataclass(frozen=True)
class Checkpoint(Result):
    """One checkpoint: its fit, its measures, and for each change the predicted and the measured rise of the loss.

    `behind` is how much higher its mean loss is than the lowest, `behind_low` and `behind_high` are the 95% limits of
    that over samples of the same kind, paired: an interval that holds 0 is a tie. `flips` is, for each change, the
    number of predictions that flipped.
    """

    _renamed: ClassVar[dict[str, str]] = {"foretold": "predicted", "found": "measured"}

    name: str
    loss: Estimate
    accuracy: Estimate
    measures: dict[str, Estimate] = field(default_factory=dict)
    predicted: dict[str, Prediction] = field(default_factory=dict)
    measured: dict[str, Estimate] = field(default_factory=dict)
    flips: dict[str, Estimate] = field(default_factory=dict)
    behind: float = math.nan
    behind_low: float = math.nan
    behind_high: float = math.nan

    @property
    def tied(self) -> bool:
        """Whether these samples cannot distinguish its loss from the lowest."""
        return not self.behind_low > 0


@dataclass(frozen=True)
class Checkpoints(Shown):
    """Many checkpoints on the same samples, in the order given; `order(by)` sorts them.

    `measures` and `changes` name the columns beside accuracy and loss; `directions` says what a larger value of each
    measure means.
    """

    rows: tuple[Checkpoint, ...]
    measures: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    directions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    name: str = "Checkpoints"

    def _check(self) -> None:
        for row in self.rows:
            if not set(self.measures) >= set(row.measures) or not set(self.changes) >= set(row.predicted):
                raise Misfit(f"the row {row.name!r} has columns that the table does not have")

    @property
    def columns(self) -> tuple[str, ...]:
        """What the checkpoints can be ordered by."""
        rises = [f"{change}, {kind}" for change in self.changes for kind in ("predicted", "measured", "flips")]
        return ("accuracy", "loss", *self.measures, *rises)

    @checked
    def values(self, column: str) -> list[float]:
        """One column, NaN where a checkpoint has no such number."""
        change, _, kind = column.rpartition(", ")
        if kind in Checkpoint._renamed:  # columns are named after the fields
            old, kind = column, Checkpoint._renamed[kind]
            column = f"{change}, {kind}"
            warnings.warn(f"the column {old!r} is deprecated, use {column!r}.", DeprecationWarning, stacklevel=2)
        if column not in self.columns:
            raise unknown_name("column", column, self.columns)
        none = Estimate(math.nan)
        if column in ("accuracy", "loss"):
            return [getattr(row, column).value for row in self.rows]
        if column in self.measures:
            return [row.measures.get(column, none).value for row in self.rows]
        return [getattr(row, kind).get(change, none).value for row in self.rows]

    @checked
    def order(self, by: str = "loss") -> list[str]:
        """The names, best first: the largest for accuracy and where larger is wider or flatter, else the smallest."""
        sign = -1 if by == "accuracy" or self.directions.get(by) in ("wider", "flatter") else 1
        pairs = [(sign * value, row.name) for value, row in zip(self.values(by), self.rows, strict=True)]
        known = sorted(pair for pair in pairs if not math.isnan(pair[0]))
        return [name for _, name in known] + [name for value, name in pairs if math.isnan(value)]

    @checked
    def row(self, name: str) -> Checkpoint:
        """The row of one checkpoint."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"there is no checkpoint {name!r}, only {', '.join(row.name for row in self.rows)}.")

    def sentences(self) -> list[str]:
        """Which checkpoint is best as it is, and which after each change."""
        best = self.row(self.order("loss")[0])
        tied = [row.name for row in self.rows if row is not best and row.tied]
        others = f"; these {self.samples:,} samples cannot tell {_listed(tied)} from it" if tied else ""
        said = [f"{best.name} has the lowest loss, {figure(best.loss.value)}{others}."]
        if not all(math.isnan(value) for value in self.values("accuracy")):
            highest = self.row(self.order("accuracy")[0]).accuracy.value
            first = [row.name for row in self.rows if row.accuracy.value == highest]
            has = "have" if len(first) > 1 else "has"
            said.append(f"{_listed(first)} {has} the highest accuracy, {highest:.2%}.")
        for change in self.changes:
            totals = [
                (row.loss.value + row.measured[change].value, row.name)
                for row in self.rows
                if change in row.measured and not math.isnan(row.measured[change].value)
            ]
            if totals:
                value, _ = min(totals)
                first = [name for total, name in totals if math.isclose(total, value, rel_tol=1e-6)]  # rounding
                has = "have" if len(first) > 1 else "has"
                said.append(f"After {change}, {_listed(first)} {has} the lowest loss, {figure(value)}.")
            elif change in self.rows[0].predicted:
                said.append(f"{change} is predicted to cost least for {self.order(f'{change}, predicted')[0]}.")
        return said

    def _columns(self) -> Columns:
        limits = ("behind", "behind_low", "behind_high")
        return {
            "checkpoint": (str, [row.name for row in self.rows]),
            **{name: (float, self.values(name)) for name in self.columns},
            **{name: (float, [getattr(row, name) for row in self.rows]) for name in limits},
        }

    def __str__(self) -> str:
        table = [["checkpoint", *self.columns]]
        values = [self.values(name) for name in self.columns]
        for number, row in enumerate(self.rows):
            table.append([row.name, *(figure(column[number], 4) for column in values)])
        return "\n".join([*aligned(table), *left_out_lines(self.left_out), *self.sentences()])


def _listed(names: list[str]) -> str:
    """Up to three names in a sentence, or the first two and how many more there are.

    >>> _listed(["a", "b", "c"]), _listed(["a", "b", "c", "d"])
    ('a, b and c', 'a, b and 2 others')
    """
    shown = names if len(names) <= 3 else [*names[:2], counted(len(names) - 2, "other")]
    return enumerated(shown)
