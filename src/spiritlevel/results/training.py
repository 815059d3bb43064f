"""What is found while a network trains: critical sharpness, the side of stability, samples to look at, curves."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import unknown_name, whole_number
from spiritlevel.results.codec import Result
from spiritlevel.results.estimates import Estimate
from spiritlevel.results.formatting import aligned, figure
from spiritlevel.results.pages import Shown
from spiritlevel.results.reports import Pictures
from spiritlevel.results.tables import Columns


@dataclass(frozen=True)
class CriticalSharpness(Estimate):
    """2/η_c, with η_c the first step along the optimiser's own update at which the loss is no longer lower.

    `low` and `high` are the ends of the bracket to which the search narrowed it, 0 or infinite where an end is open;
    `step` is η_c, to pass to the next call as `start=`; `scale` is η_c in units of the optimiser's own step;
    `forwards` counts the forward passes. Where several learning rates are in use, η is the largest of them.
    """

    low: float = math.nan
    high: float = math.nan
    step: float = math.nan
    scale: float = math.nan
    forwards: int = 0

    def scaled(self, factor: float) -> CriticalSharpness:
        """The same number times a positive constant."""
        found = super().scaled(factor)
        assert isinstance(found, CriticalSharpness)
        return dataclasses.replace(found, low=self.low * factor, high=self.high * factor, step=self.step / factor)


@dataclass(frozen=True)
class Stability(Result):
    """Whether the curvature is within what the optimiser's steps can follow.

    `curvature` is the largest eigenvalue of the Hessian, or of D^(-1/2) H D^(-1/2) where the optimiser divides by D;
    `limit` the value above which steps on that quadratic grow; `formula` says which. `side` is "stable", "unstable"
    or "open" where the eigenvalue is not known well enough. `vector` is the start for the next call.
    """

    curvature: Estimate
    limit: float
    formula: str
    matrix: str
    side: str
    vector: Tensor | None = None

    @property
    def ratio(self) -> float:
        """The curvature in units of the limit: above 1 is unstable."""
        return self.curvature.value / self.limit

    def __str__(self) -> str:
        words = {
            "stable": "below: steps on this quadratic settle",
            "unstable": "above: steps on this quadratic grow, until the curvature or the steps give way",
            "open": "too near the limit, or not known well enough, to tell which side",
        }
        return (
            f"largest eigenvalue of {self.matrix} {self.curvature}, limit {self.formula} = {figure(self.limit, 4)}: "
            f"{figure(self.ratio, 3)} of it, {words[self.side]}"
        )


@dataclass(frozen=True)
class SuspiciousSamples(Shown):
    """The samples of a recorded training to look at first, those with the most suspicious `by` at the top.

    `table` has the columns of these samples, in the order of `ids`; `everything` those of all samples that were seen.
    `never_learned` samples were never classified as labelled, `forgotten` ones were at first and later were not.
    `visits` is how often a sample was seen on average, in `steps` calls.
    """

    by: str
    ids: Tensor
    table: dict[str, Tensor]
    everything: dict[str, Tensor]
    samples: int
    seen: int
    visits: float
    steps: int
    never_learned: int
    forgotten: int
    classes: tuple[str, ...] = ()
    pictures: Pictures | None = None
    texts: tuple[str, ...] = ()
    name: str = "Samples to look at"

    @checked
    def class_name(self, label: int) -> str:
        """The name of a class, or its number; "?" where it is not known."""
        return "?" if label < 0 else self.classes[label] if label < len(self.classes) else str(label)

    @property
    def headline(self) -> str:
        """The record in a sentence."""
        return (
            f"{self.seen:,} of {self.samples:,} samples were seen, {figure(self.visits, 3)} times on average; "
            f"{self.never_learned:,} were never classified as labelled, {self.forgotten:,} were learnt and forgotten "
            "at least once."
        )

    def __str__(self) -> str:
        numbers = list(dict.fromkeys([self.by, "aum", "cumulative_loss", "loss", "forgetting", "first_learned"]))
        rows = [["sample", "label", "predicted", *numbers, *(["text"] if self.texts else [])]]
        for k, sample in enumerate(self.ids.tolist()):
            classes = [self.class_name(int(self.table[name][k])) for name in ("label", "predicted")]
            values = [self.cell(name, k) for name in numbers]
            rows.append([str(sample), *classes, *values, *([self.texts[k][:60]] if self.texts else [])])
        return "\n".join([self.headline, *aligned(rows)])

    def _columns(self) -> Columns:
        numbers = {name: (float, column.tolist()) for name, column in self.table.items()}
        return {"id": (int, self.ids.tolist()), **numbers, **({"text": (str, self.texts)} if self.texts else {})}

    @checked
    def cell(self, name: str, k: int) -> str:
        """One number of the k-th of these samples, to a few digits."""
        if name not in self.table:
            raise unknown_name("column", name, self.table)
        value = float(self.table[name][whole_number(k, "k", 0, len(self.ids) - 1)])
        if name == "first_learned" and value < 0:
            return "never"
        return "undefined" if math.isnan(value) else f"{value:.0f}" if value.is_integer() else figure(value, 4)


@dataclass(frozen=True)
class TrainingCurves(Shown):
    """The rows of a tracker for its page: `rows` of numbers by name, `sentences` on the last row, `notes` on failures.

    While the training runs, `refresh` is the number of seconds after which the page loads itself again.
    """

    rows: tuple[dict[str, Any], ...]
    sentences: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    refresh: int = 0
    name: str = "Training"

    def __post_init__(self) -> None:
        """What is null in a file stands for an undefined number."""
        rows = ({name: math.nan if value is None else value for name, value in row.items()} for row in self.rows)
        object.__setattr__(self, "rows", tuple(rows))

    def _columns(self) -> Columns:
        names = dict.fromkeys(
            name for row in self.rows for name, value in row.items() if isinstance(value, int | float)
        )
        return {name: (float, [row.get(name, math.nan) for row in self.rows]) for name in names}

    def __str__(self) -> str:
        return "\n".join([f"{len(self.rows)} measurements", *self.sentences])
