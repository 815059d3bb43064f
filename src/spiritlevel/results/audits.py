"""What transforms that keep the function do to measures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.results.codec import Result
from spiritlevel.results.estimates import Estimate, with_status
from spiritlevel.results.formatting import aligned, at_least, figure, in_short, times, with_limits
from spiritlevel.results.quantiles import student
from spiritlevel.results.tables import Columns, Table

EFFECTS: dict[str, str] = {
    "rescale_layers": "one factor for each layer, with product 1 along every path; the function stays",
    "rescale_channels": "one factor for each channel, undone in the next layer; the function stays",
    "scale_before_batchnorm": "a factor that the following batch norm undoes; the function stays",
    "fold_batchnorm": "batch norm folded into the layer in front of it; the function stays in eval mode",
    "shift_logits": "the same linear function of the last hidden layer added to all logits; the probabilities stay",
    "mix_heads": "an invertible matrix in each attention head, Q against K and V against O; the function stays",
    "shift_attention_biases": "key biases that no softmax sees, value biases undone further on; the function stays",
    "shift_norm_gain": "gain and bias of norms, channel by channel, undone in the next layers; the function stays",
    "scale_gate": "a factor for each unit of a gated layer's linear half, undone in the next layer; the function stays",
    "mix_linear": "an invertible matrix between two linear maps with nothing between them; the function stays",
    "rotate_stream": "RMS-norm gains folded, and the residual stream rotated; the function stays",
    "split_units": "hidden units become two that share their outgoing weights: more parameters; the function stays",
    "permute_units": "hidden units in another order; the function stays, and so must every measure",
    "scale_last_layer": "outputs times a number, by the last layer; the predictions stay",
    "rescale_all": "outputs times a number, by all layers; the predictions stay",
}
"""What the transforms of `spiritlevel.transforms` do that an audit tries, and what each keeps."""
SYMMETRIES = tuple(name for name in EFFECTS if name not in ("scale_last_layer", "rescale_all"))
"""The transforms of `spiritlevel.transforms` that keep the outputs of a network, or its probabilities."""


@dataclass(frozen=True)
class Certificate(Result):
    """What a transform of a network keeps, and how that was checked.

    `preserves` says it in words, `scale` is the α in new outputs = α · old outputs (1: the function is the same).
    `modes` are the batch-norm modes in which it holds exactly, "eval" and "batch" (statistics of the batch). The
    outputs of both networks were compared in these modes on `samples` samples, described by `data`: they differ by at
    most `largest_difference`, and by `relative_difference` of the largest output. `keeps` is "outputs", or
    "probabilities" where the logits move and their softmax does not: then logarithms of probabilities were compared.

    `factors` gives the diagonal map T for which the Hessian H of the loss of α·φ becomes T⁻¹HT⁻¹ (mathematics 7.1): for
    each parameter tensor a number, or a float64 tensor that broadcasts to its shape. It is `None` where the transform
    is not such a map.
    """

    transform: str
    preserves: str
    scale: float
    modes: tuple[str, ...]
    largest_difference: float
    relative_difference: float
    samples: int
    data: str
    factors: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    keeps: str = "outputs"

    def __str__(self) -> str:
        compared = "outputs" if self.keeps == "outputs" else f"log {self.keeps}"
        apart, relative = figure(self.largest_difference, 2), figure(self.relative_difference, 2)
        return (
            f"{self.transform} preserves: {self.preserves} (batch norm: {' and '.join(self.modes)}); {compared} differ "
            f"by at most {apart}, relatively {relative}, on {self.data}{''.join(f'; {note}' for note in self.notes)}"
        )


@dataclass(frozen=True)
class AuditRow(Result):
    """One measure before and after one transform.

    `ratio` is after / before, NaN where that says nothing: where the error of either leaves its sign open, or the
    signs differ. `predicted` is the ratio that theory gives, NaN where it gives none; `declared` whether the measure is
    declared invariant. `ratio_error` is the standard error of the ratio where both values were estimated along the same
    random vectors, NaN elsewhere. Verdicts: "invariant"; "changes"; "unstable": the difference is within the errors,
    or the value is no longer defined, so nothing can be said; "not converged": an iteration stopped before its
    tolerance. `note` says why.
    """

    measure: str
    transform: str
    before: Estimate
    after: Estimate
    ratio: float
    predicted: float
    verdict: str
    declared: bool
    note: str = ""
    ratio_error: float = math.nan

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        name = str(data.get("measure"))
        data = {key: item for key, item in data.items() if key != "lower_bound"}  # it is the status of the values now
        return {**data, **{key: with_status(data[key], name) for key in ("before", "after") if key in data}}

    @property
    def lower_bound(self) -> bool:
        """Whether the values are the best that an optimiser found."""
        return self.before.status == "lower bound"

    @property
    def factor(self) -> float:
        """How far, at least, the transform moved the value.

        1 where it stayed; infinite where it became 0 or changed its sign; NaN where nothing can be said. Values with
        errors count with the ends of their 95% intervals that lie nearest to each other, and so does the ratio where
        its own error is known.
        """
        if self.verdict != "changes":
            return 1.0 if self.verdict == "invariant" else math.nan
        if self.before.sign * self.after.sign < 0:
            return math.inf
        if math.isfinite(self.ratio) and not math.isnan(self.ratio_error):
            half = self.ratio_error * float(student(0.975, self.after.dof))
            return moved_at_least((1.0, 1.0), (self.ratio - half, self.ratio + half))
        return moved_at_least(_around(self.before), _around(self.after))

    def __str__(self) -> str:
        bound = " (lower bound)" if self.lower_bound else ""
        text = f"{self.measure}{bound} under {self.transform}: {self.before} → {self.after}, {self.verdict}"
        return f"{text} ({self.note})" if self.note else text


def _around(estimate: Estimate) -> tuple[float, float]:
    """The 95% interval on the given data; for a lower bound, the value that was found."""
    return (estimate.value, estimate.value) if estimate.status == "lower bound" else estimate.interval()


def moved_at_least(before: tuple[float, float], after: tuple[float, float]) -> float:
    """The smallest factor between two sizes that are known to lie in these intervals; NaN where they overlap.

    >>> moved_at_least((2.0, 2.0), (6.0, 6.0)), moved_at_least((1.0, 2.0), (6.0, 8.0))
    (3.0, 3.0)
    >>> moved_at_least((1.0, 2.0), (0.2, 0.5)), moved_at_least((1.0, 2.0), (1.5, 9.0))
    (2.0, nan)
    """
    (low, high), (new_low, new_high) = _sizes(*before), _sizes(*after)
    if new_low > high:
        return new_low / high if high else math.inf
    if low > new_high:
        return low / new_high if new_high else math.inf
    return math.nan


def _sizes(low: float, high: float) -> tuple[float, float]:
    """The range of |x| for x in an interval."""
    ends = sorted((abs(low), abs(high)))
    return (0.0 if low < 0 < high else ends[0]), ends[1]


def ratio_of(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    """The range of after / before for numbers in two intervals; NaN unless both lie on the same side of 0.

    >>> ratio_of((6.0, 8.0), (1.0, 2.0)), ratio_of((6.0, 8.0), (-0.1, 2.0)), ratio_of((-1.0, -1.0), (2.0, 2.0))
    ((3.0, 8.0), (nan, nan), (nan, nan))
    """
    ends = [*after, *before]
    if not (all(end > 0 for end in ends) or all(end < 0 for end in ends)):
        return math.nan, math.nan
    (low, high), (first, last) = _sizes(*before), _sizes(*after)
    return first / high, last / low


def fate(factor: float | None) -> str:
    """What the audit saw of a measure where outputs or probabilities stayed the same.

    >>> fate(657.2), fate(1.0), fate(None)
    ('moves ≥ ×657', 'stays', 'not tested')
    """
    if factor is None:
        return "not tested"
    if math.isnan(factor):
        return "undecided"
    return "stays" if factor == 1 else "moves" if math.isinf(factor) else f"moves ≥ ×{times(factor)}"


def kept_by(transform: str) -> str:
    """What a symmetry leaves as it is.

    >>> kept_by("rescale_layers"), kept_by("shift_logits")
    ('outputs', 'probabilities')
    """
    return "probabilities" if transform == "shift_logits" else "outputs"


@dataclass(frozen=True)
class WorstFactor(Result):
    """How far, at least, one transform can move a measure at the same outputs or probabilities: what a search found.

    `lowest` and `highest` were measured on networks that were really transformed. With them come the factors
    of their layers for "rescale_layers", and the `size` and `seed` of the draw for other transforms. `errors` are the
    half-widths of the 95% intervals of `before`, `lowest` and `highest`. `difference` is the largest relative
    difference of the outputs.
    """

    measure: str
    before: float
    lowest: float
    highest: float
    lowest_factors: dict[str, float]
    highest_factors: dict[str, float]
    difference: float
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)
    transform: str = "rescale_layers"

    @property
    def factor(self) -> float:
        """At least this far: the larger of highest / before and before / lowest, with the errors taken against it.

        NaN where the errors leave no factor to speak of.
        """
        values = zip((self.before, self.lowest, self.highest), self.errors, strict=True)
        before, lowest, highest = ((value - error, value + error) for value, error in values)
        if not before[0] > 0 or not self.lowest > 0:
            return math.nan
        found = [moved_at_least(before, end) for end in (lowest, highest)]
        return max((factor for factor in found if not math.isnan(factor)), default=math.nan)

    def __str__(self) -> str:
        kept = kept_by(self.transform)
        if math.isnan(self.factor):
            return f"its error is too large to tell how far {self.measure} can be moved at the same {kept}"
        before, lowest, highest = map(with_limits, (self.before, self.lowest, self.highest), self.errors)
        return (
            f"{self.measure} can be moved {at_least(self.factor)} at the same {kept}: {self.transform} "
            f"took it from {before} to anything between {lowest} and {highest}"
        )


@dataclass(frozen=True)
class Audit(Table):
    """Measures × transforms: which numbers survive when the function, or the prediction, does not change.

    `skipped` names the transforms that this network does not allow and the measures that are not defined for it, each
    with the reason. `certificates` says what every transform kept. Printed as a table: "=" invariant, "×3.2" the
    ratio of a value that changes, "?" unstable, "…" not converged.
    """

    rows: tuple[AuditRow, ...]
    worst: tuple[WorstFactor, ...] = ()
    certificates: dict[str, Certificate] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    parameters: int = 0
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    seed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """Which symmetries were tried, and which the network does not have: no number is tested under any others.

        >>> Audit((), skipped={"mix_heads": "no attention"}).scope
        'No symmetry of this network was tried. The network does not have: mix_heads.'
        """
        said = f"Tried, outputs or probabilities kept: {', '.join(self.tried)}."
        said = said if self.tried else "No symmetry of this network was tried."
        said = f"{said} The network does not have: {', '.join(self.absent)}." if self.absent else said
        others = [name for name, certificate in self.certificates.items() if name not in self.tried]
        return f"{said} Changes the outputs, so what it moves does not count: {', '.join(others)}." if others else said

    @checked
    def row(self, measure: str, transform: str) -> AuditRow:
        """The row of one measure and one transform."""
        for row in self.rows:
            if (row.measure, row.transform) == (measure, transform):
                return row
        raise InputError(f"the audit holds no row for measure {measure!r} under transform {transform!r}.")

    def moved(self) -> dict[str, float]:
        """How far each measure was moved while outputs or probabilities stayed, by a transform or by the search.

        1 where it stayed under all that were tried; infinite where it became 0 or changed its sign; NaN where it was
        not seen to move but something could not be decided. Transforms that change outputs and probabilities do not
        count. Where values have errors, this is what is left of the factor when the errors are taken against it.

        >>> Audit(()).moved()
        {}
        """
        return {name: largest(found.values()) for name, found in self._factors().items()}

    @checked
    def moved_by(self, measure: str) -> str:
        """The transform that moved a measure furthest while outputs or probabilities stayed; "" if none did.

        >>> Audit(()).moved_by("trace")
        ''
        """
        found = {name: factor for name, factor in self._factors().get(measure, {}).items() if factor > 1}
        return max(found, key=lambda name: found[name], default="")

    @property
    def tried(self) -> tuple[str, ...]:
        """The transforms that were tried and keep outputs or probabilities."""
        return tuple(name for name, certificate in self.certificates.items() if certificate.scale == 1.0)

    @property
    def absent(self) -> tuple[str, ...]:
        """The symmetries that were looked for and that this network does not have; `skipped` says why."""
        return tuple(name for name in self.skipped if name in SYMMETRIES)

    def _factors(self) -> dict[str, dict[str, float]]:
        """How far every measure was moved by every transform that was tried, the search included."""
        factors: dict[str, dict[str, float]] = {}
        tried = self.tried
        for row in self.rows:
            if row.transform in tried:
                factors.setdefault(row.measure, {})[row.transform] = row.factor
        for worst in self.worst:
            found = factors.setdefault(worst.measure, {})
            found[worst.transform] = largest((found.get(worst.transform, 1.0), worst.factor))
        return factors

    def _columns(self) -> Columns:
        """One row per measure and transform."""
        rows = self.rows
        return {
            "measure": (str, [row.measure for row in rows]),
            "transform": (str, [row.transform for row in rows]),
            "before": (float, [row.before.value for row in rows]),
            "before_status": (str, [row.before.status for row in rows]),
            "after": (float, [row.after.value for row in rows]),
            "after_status": (str, [row.after.status for row in rows]),
            "ratio": (float, [row.ratio for row in rows]),
            "predicted": (float, [row.predicted for row in rows]),
            "factor": (float, [row.factor for row in rows]),
            "verdict": (str, [row.verdict for row in rows]),
            "declared": (bool, [row.declared for row in rows]),
            "note": (str, [row.note for row in rows]),
        }

    def __str__(self) -> str:
        measures = list(dict.fromkeys(row.measure for row in self.rows))
        transforms = list(dict.fromkeys(row.transform for row in self.rows))
        cells = {(row.measure, row.transform): row for row in self.rows}
        words = [["measure"], ["value"], *(name.split("_") for name in transforms)]
        height = max(map(len, words))
        table = [list(line) for line in zip(*([""] * (height - len(name)) + name for name in words), strict=True)]
        for name in measures:
            present = [cells[name, transform] for transform in transforms if (name, transform) in cells]
            shown = [mark(cells[name, t]) if (name, t) in cells else "" for t in transforms]
            table.append([name, in_short(present[0].before), *shown])
        notes = ["= invariant, ×r changes, ? within the error, … not converged, ≥ lower bound found by an optimiser"]
        notes += [*self.notes, self.scope]
        notes += [str(item) for item in self.worst]
        notes += [f"left out: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(
            [*aligned(table, height), *(textwrap.fill(note, 100, subsequent_indent="  ") for note in notes)]
        )


def largest(factors: Iterable[float]) -> float:
    """The largest factor; an undecided one (NaN) counts only if none is above 1.

    >>> largest([1.0, math.nan, 3.0]), largest([1.0, math.nan]), largest([1.0])
    (3.0, nan, 1.0)
    """
    every = list(factors)
    known = [factor for factor in every if not math.isnan(factor)]
    return max(known) if known and (len(known) == len(every) or max(known) > 1) else math.nan


def mark(row: AuditRow, digits: int = 2) -> str:
    """The row, short enough for a cell: "=" invariant, "×3.2" the ratio of a value that changes, "?" or "…" unsettled.

    >>> one = Estimate(1.0)
    >>> mark(AuditRow("trace", "rescale_layers", one, Estimate(64.0), 64.0, 64.0, "changes", False))
    '×64'
    >>> mark(AuditRow("trace", "split_units", one, Estimate(1.02), 1.02, 1.0, "changes", False))
    '×1.02'
    """
    if row.verdict == "changes" and 0.95 < row.ratio < 1.05:
        return f"×{times(row.ratio)}"  # ×1 would look as if nothing had changed
    if row.verdict == "changes":
        return f"×{figure(row.ratio, digits)}" if math.isfinite(row.ratio) else "changes"
    return {"invariant": "=", "unstable": "?"}.get(row.verdict, "…")
