"""Two models side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.results.codec import Result, same_length
from spiritlevel.results.estimates import WERE_BOUNDS, WERE_ITERATED, Estimate, with_status
from spiritlevel.results.formatting import aligned, figure, left_out_lines
from spiritlevel.results.pages import Shown
from spiritlevel.results.samples import Margins, SampleTraces
from spiritlevel.results.tables import Columns

UNDER = " under "
"""In the names of rows: the quantity before it was measured after the change of the weights named behind it."""
_DECIDED = ("accuracy", "input_distance", "loss")  # the rows that the advice of version 0.1 looked at


@dataclass(frozen=True)
class ComparisonRow(Result):
    """One measure of two models: `difference` is b − a, with `low` and `high` its interval where there is one.

    `how` says where the interval comes from: "paired t", "bootstrap of the pairs", "probes"; or why there is none:
    "exact" (no error on the data given), "tolerance" (known to within that of an iteration), "lower bounds", "not
    converged", "too few samples", "too few sequences" or "too few batches". `ratio` is b / a, NaN where the interval of
    either leaves its sign open or the signs differ. `factor` is how far the audit moved this measure at the same
    outputs, 1 for an invariant one and NaN where that is not known. Verdicts: "a" or "b", the model that the measure
    favours; "equal": the interval holds 0; "not comparable": the parametrisation moves it, so the difference may be an
    artefact of that; "no interval": there is no telling how certain the difference is; "no preference": neither
    direction is better; "undefined". `note` says why. `sure`: whether the difference excludes 0 even at the stricter
    level that the advice, which looks at up to three rows, needs. `decides`: whether this row is one that the advice
    looks at.
    """

    name: str
    a: Estimate
    b: Estimate
    difference: float
    low: float
    high: float
    how: str
    ratio: float
    factor: float
    verdict: str
    direction: str
    meaning: str
    invariant: bool
    note: str = ""
    sure: bool = False
    decides: bool = False

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        name, how = str(data.get("name")), data.get("how")
        data = {"decides": name in _DECIDED, **data}
        silent = any(isinstance(data.get(key), dict) and "status" not in data[key] for key in ("a", "b"))
        if silent and how == "exact" and name in WERE_BOUNDS | WERE_ITERATED:
            how = "lower bounds" if name in WERE_BOUNDS else "tolerance"
        return {**data, "how": how, **{key: with_status(data[key], name) for key in ("a", "b") if key in data}}

    def __str__(self) -> str:
        text = f"{self.name}: {self.a} and {self.b}, difference {figure(self.difference)}, {self.verdict}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Comparison(Shown):
    """Two models on the same samples: which to trust, and why. Rows that no parametrisation can move come first.

    `margins`, `traces` (where available) and `losses` each hold a pair, a and b, in the order of the samples.
    `advice` is one sentence that follows from the rows alone; `reasons` are the rows that it rests on, in words.
    `samples` were compared out of `population`, drawn at random if there are more. `under` says, for each change of the
    weights that was tried, which model is better after it.
    """

    names: tuple[str, str]
    rows: tuple[ComparisonRow, ...]
    advice: str
    reasons: tuple[str, ...] = ()
    margins: tuple[Margins, Margins] | None = None
    traces: tuple[SampleTraces, SampleTraces] | None = None
    losses: tuple[Tensor, Tensor] | None = None
    samples: int = 0
    level: float = 0.95
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    population: int = 0
    under: tuple[str, ...] = ()

    def _check(self) -> None:
        pairs = [self.margins, self.traces, self.losses]
        columns = [each for pair in pairs if pair is not None for each in pair]
        same_length(**{f"column {number}": each for number, each in enumerate(columns, 1)})

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "population" in data:
            return data
        # "500 of 1,797, drawn at random"
        said = str(data.get("settings", {}).get("samples", "")).replace(",", "").split()
        known = len(said) > 2 and said[1] == "of" and said[2].isdigit()
        return {**data, "population": int(said[2]) if known else data.get("samples", 0)}

    def row(self, name: str) -> ComparisonRow:
        """The row of one measure."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"the comparison holds no measure {name!r}, only {', '.join(row.name for row in self.rows)}.")

    def _columns(self) -> Columns:
        """One row per measure; a and b are the two models in the order of `names`."""
        rows = self.rows
        return {
            "measure": (str, [row.name for row in rows]),
            "a": (float, [row.a.value for row in rows]),
            "a_status": (str, [row.a.status for row in rows]),
            "b": (float, [row.b.value for row in rows]),
            "b_status": (str, [row.b.status for row in rows]),
            "difference": (float, [row.difference for row in rows]),
            "low": (float, [row.low for row in rows]),
            "high": (float, [row.high for row in rows]),
            "how": (str, [row.how for row in rows]),
            "ratio": (float, [row.ratio for row in rows]),
            "factor": (float, [row.factor for row in rows]),
            "verdict": (str, [row.verdict for row in rows]),
            "sure": (bool, [row.sure for row in rows]),
            "direction": (str, [row.direction for row in rows]),
            "invariant": (bool, [row.invariant for row in rows]),
            "note": (str, [row.note for row in rows]),
            "meaning": (str, [row.meaning for row in rows]),
        }

    def __str__(self) -> str:
        a, b = self.names
        table = [["measure", a, b, "difference", f"{self.level:.0%} interval", "from", "favours"]]
        for row in self.rows:
            interval = (
                "" if math.isnan(row.low) or row.low == row.high else f"{figure(row.low, 3)} to {figure(row.high, 3)}"
            )
            favours = {"a": a, "b": b, "equal": "neither"}.get(row.verdict, row.verdict)
            values = [figure(each.value, 5) for each in (row.a, row.b)]
            table.append([row.name, *values, figure(row.difference, 3), interval, row.how, favours])
        lines = [f"{a} and {b} on {self.samples:,} samples", *aligned(table)]
        lines += left_out_lines(self.left_out)
        return "\n".join([*lines, self.advice, *self.under])
