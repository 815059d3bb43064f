"""What a change of the weights was predicted to do, what it did, and where the two differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.results.codec import Misfit, Result, same_length
from spiritlevel.results.estimates import Estimate
from spiritlevel.results.formatting import aligned, figure
from spiritlevel.results.pages import Shown
from spiritlevel.results.quantiles import normal, ranks
from spiritlevel.results.reports import Pictures
from spiritlevel.results.tables import Columns, Table

HIGHER, RANDOM, SUBSET = "higher orders", "random change", "subset of samples"
"""Where the interval of a prediction may come from."""

PREDICTORS = {
    "second_order": "g·δ + ½ δᵀHδ",
    "curvature": "½ δᵀHδ",
    "trace_times_square": "Tr H · ‖δ‖²",
    "square": "‖δ‖²",
}
"""What may predict how much changing one layer alone raises the loss, by the name of its column."""
COSTS = {"measured": "the measured rise of each layer alone", **PREDICTORS}
"""What rounding a layer may be taken to cost."""
_UNKNOWN = "limits unknown from so few samples"


@dataclass(frozen=True)
class Prediction(Estimate):
    """A predicted number, with an interval for what will be measured.

    `sources` says where the interval comes from: how far below and above the value each source alone sets the 95%
    limits. "random change": another draw of the change would do something else; "subset of samples": the rest of the
    data is not like these; "higher orders": what the terms that were used leave out, as half of the change shows. The
    first two are independent and add in squares; the third is added to them.
    """

    sources: dict[str, tuple[float, float]] = field(default_factory=dict)

    @checked
    def interval(self, level: float = 0.95, *, data: bool = True) -> tuple[float, float]:
        """The limits for what will be measured; at levels other than 95% the random ones scale like normal errors.

        `data=False` leaves out the error of a subset and gives the limits for these samples.
        """
        if not 0 < level < 1:
            raise InputError(f"interval needs a level between 0 and 1, got {level}.")
        stretch = normal(0.5 + level / 2) / normal(0.975)
        chance = [self.sources[name] for name in (RANDOM, SUBSET) if name in self.sources and (data or name != SUBSET)]
        known = self.sources.get(HIGHER, (0.0, 0.0))
        below, above = (stretch * math.hypot(*(part[side] for part in chance)) + known[side] for side in (0, 1))
        return self.value - below, self.value + above

    def __str__(self) -> str:
        if math.isnan(self.value):
            return super().__str__()
        return self.said()

    def said(self, *, typeset: bool = False) -> str:
        """The value and its interval in words; `typeset` as for `figure`."""
        low, high = self.interval()
        value = figure(self.value, typeset=typeset)
        if math.isnan(low):
            return f"{value} ({_UNKNOWN})"
        limits = f"{figure(low, 3, typeset=typeset)} to {figure(high, 3, typeset=typeset)}"
        return f"{value} ({limits})" if low < high else value


@dataclass(frozen=True)
class LayerChange(Result):
    """One tensor of parameters that the change moves, by itself.

    `square` is ‖δ‖² and `size` the number of parameters. `slope` is g·δ of this layer and `curvature` ½ δᵀHδ of it
    alone; `with_others` is its part ½ δ_lᵀ(Hδ) of the whole, to which the other layers' changes contribute. `trace` is
    the trace of its block of H. `measured` is the change of the mean loss if this layer alone is changed. What was not
    asked for is NaN.
    """

    name: str
    size: int
    square: float
    slope: float = math.nan
    curvature: float = math.nan
    with_others: float = math.nan
    trace: float = math.nan
    measured: float = math.nan

    @property
    def second_order(self) -> float:
        """What the change of this layer alone is predicted to do to the mean loss: g·δ + ½ δᵀHδ."""
        return self.slope + self.curvature

    @property
    def trace_times_square(self) -> float:
        """Tr H · ‖δ‖², as HAWQ orders layers."""
        return self.trace * self.square


@dataclass(frozen=True)
class Perturbation(Shown):
    """What `perturb` predicted for a change of the weights, and what the change did.

    `predicted` and `measured` are the change of the mean loss; `flips_predicted` and `flips_measured` the number of
    predictions whose class changes. For a random change `predicted` is the mean over all draws, with the interval for
    a single one, and what was measured is one draw; `slope` and `curvature`, g·δ and ½ δᵀHδ, are those of the change
    that was made. `suffices` says whether these two terms explain what happened, to a fifth of the largest of them, or
    of the standard deviation over draws. `steps` and `losses` trace the way: the mean loss of the samples at θ + tδ.

    `layers` has a row for every tensor that moves; `rank_agreement()` says how well each of their columns orders them
    as the measured one does. `samples` are columns for the samples that were looked at, `index` their places in the
    data: "gap" is the distance between the two largest outputs, "linearised_gap" what is left of it in the linearised
    outputs (negative: predicted to flip), "flips_predicted" how many of its decisions flip in these (0 or 1 for a
    sample that makes one), "flips_measured" how many did, "predicted" and "measured" the change of its loss, "chance"
    how many flip on average over draws of a random change. `agreement` is, for each score that may tell which samples
    flip, the chance that a sample that flipped comes before one that did not (AUROC), and `best` is the score with the
    largest, by which the page orders samples.
    """

    change: str
    meaning: str
    predicted: Prediction
    measured: Estimate
    flips_predicted: Prediction
    flips_measured: Estimate
    slope: float
    curvature: float
    loss: Estimate
    accuracy: tuple[Estimate, Estimate]
    suffices: bool
    steps: Tensor
    losses: Tensor
    samples: dict[str, Tensor]
    layers: tuple[LayerChange, ...] = ()
    agreement: dict[str, float] = field(default_factory=dict)
    best: str = ""
    decisions: int = 0
    population: int = 0
    classes: tuple[str, ...] = ()
    pictures: Pictures | None = None
    settings: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    name: str = "Change of the weights"

    def _check(self) -> None:
        same_length(steps=self.steps, losses=self.losses)
        same_length(**self.samples)
        if "index" not in self.samples:
            raise Misfit("its samples have no index")
        if not self.steps.numel() or float(self.steps[0]) != 0.0:
            raise Misfit("the way does not begin at the model")
        if self.best and self.best not in self.agreement:
            raise Misfit(f"its best predictor {self.best!r} is not one of those that were tried")

    @property
    def second_order(self) -> float:
        """g·δ + ½ δᵀHδ of the change that was made."""
        return self.slope + self.curvature

    @property
    def ratio(self) -> float:
        """What the two terms predict for this change, in units of what was measured."""
        return self.second_order / self.measured.value if self.measured.value else math.nan

    @property
    def held(self) -> bool:
        """Whether the interval of the prediction holds the change of the loss that was measured."""
        low, high = self.predicted.interval()
        return low <= self.measured.value <= high

    @property
    def quadratic(self) -> Tensor:
        """The mean loss along the way, as the two terms predict it."""
        return self.losses[0] + self.steps * self.slope + self.steps.square() * self.curvature

    @checked
    def layer(self, name: str) -> LayerChange:
        """The row of one tensor."""
        for row in self.layers:
            if row.name == name:
                return row
        raise InputError(
            f"the change moves no layer {name!r}, only {', '.join(row.name for row in self.layers) or 'none'}."
        )

    def rank_agreement(self) -> dict[str, float]:
        """Spearman's correlation of each predictor of a layer's damage with what changing that layer alone did.

        NaN where it is not defined: fewer than three layers, or equal numbers. Reference: Dong et al. 2019,
        arXiv:1905.03696 (Tr H · ‖δ‖²).
        """
        truth = [row.measured for row in self.layers]
        return {name: _spearman([getattr(row, name) for row in self.layers], truth) for name in PREDICTORS}

    def _columns(self) -> Columns:
        """One row per tensor that moves."""
        numbers = ("square", "slope", "curvature", "second_order", "with_others", "trace", "trace_times_square")
        rows = self.layers
        return {
            "layer": (str, [row.name for row in rows]),
            "size": (int, [row.size for row in rows]),
            **{name: (float, [getattr(row, name) for row in rows]) for name in (*numbers, "measured")},
        }

    def sentences(self) -> list[str]:
        """The outcome in words."""
        said = [f"The loss is predicted to change by {self.predicted.said(typeset=True)}"]
        if not math.isnan(self.measured.value):
            said[0] += f"; it changed by {figure(self.measured.value, typeset=True)}."
        else:
            said[0] += f"; {self.measured.reason or 'the change was not made'}."
        if not math.isnan(self.flips_predicted.value):
            of = f" of {self.decisions:,}" if self.decisions else ""
            limits = _range(self.flips_predicted)
            text = f"{_count(self.flips_predicted.value)}{of} predictions should flip ({limits})"
            if not math.isnan(self.flips_measured.value):
                text += f"; {_count(self.flips_measured.value)} did"
            said.append(text + ".")
        before, after = self.accuracy
        if not math.isnan(before.value + after.value):
            said.append(f"The accuracy went from {before.value:.2%} to {after.value:.2%}.")
        if not self.suffices:
            said.append(self._beyond())
        if self.best and len(self.agreement) > 1:
            share = self.agreement[self.best]
            said.append(f"The {self.best} best tells which samples flip (AUROC {share:.3f}, 1 is perfect, 0.5 chance).")
        return said

    def _beyond(self) -> str:
        """What a change does that slope and curvature do not tell, and whether the interval allowed for it."""
        value = figure(self.second_order, typeset=True)
        terms, alone = f"slope and curvature predict {value}", f"Slope and curvature alone predict {value}"
        look = "Look at the loss along the way."
        if math.isnan(self.measured.value) and "measured" in self.samples:
            return f"Second order is not enough for this change: {terms}, and {self.measured.reason}. {look}"
        if math.isnan(self.measured.value):
            return f"Second order may not be enough: {terms}, and half of the change does not follow them. {look}"
        came = f"{figure(self.measured.value, typeset=True)} was measured"
        if math.isnan(self.predicted.interval()[0]):
            return f"{alone}, but {came}: higher orders matter. {look}"
        if self.held:
            return f"{alone}, but {came}: higher orders matter, and the interval allowed for them. {look}"
        return f"Second order is not enough for this change: {terms}, but {came}. {look}"

    def __str__(self) -> str:
        lines = [f"{self.change}: {self.meaning}", *self.sentences()]
        if self.layers:
            keys = ["second_order", "curvature", "trace_times_square", "square", "measured"]
            titles = [PREDICTORS.get(key, "measured alone") for key in keys]
            rows = [["layer", "size", *titles]]
            rows += [
                [row.name, f"{row.size:,}", *(figure(getattr(row, key), 3) for key in keys)] for row in self.layers
            ]
            lines += aligned(rows)
        return "\n".join([*lines, *self.notes])


def _spearman(values: list[float], truth: list[float]) -> float:
    both = np.array([values, truth], dtype=float)
    if both.shape[1] < 3 or not np.isfinite(both).all() or np.ptp(both[0]) == 0 or np.ptp(both[1]) == 0:
        return math.nan
    return float(np.corrcoef(ranks(both[0]), ranks(both[1]))[0, 1])


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or float(value).is_integer() else f"{value:.1f}"


def _range(predicted: Prediction) -> str:
    low, high = predicted.interval()
    if math.isnan(low):
        return _UNKNOWN
    return f"{_count(max(0.0, math.floor(low)))} to {_count(math.ceil(high))}"


def limits_in_words(predicted: Prediction) -> str:
    """The sources of an interval, the widest first, with how far each reaches.

    >>> limits_in_words(Prediction(1.0, sources={HIGHER: (0.25, 0.25), RANDOM: (0.5, 1.0)}))
    'random change −0.5 +1, higher orders ±0.25'
    """
    parts: list[tuple[float, str]] = []
    for name, (below, above) in predicted.sources.items():
        if math.isnan(below + above):
            parts.append((math.inf, f"{name} unknown"))
            continue
        same = math.isclose(below, above, rel_tol=1e-6)
        width = f"±{figure(above, 2)}" if same else f"−{figure(below, 2)} +{figure(above, 2)}"
        parts.append((below + above, f"{name} {width}"))
    return ", ".join(text for _, text in sorted(parts, key=lambda part: -part[0])) or "none"


@dataclass(frozen=True)
class LayerBits(Result):
    """The bits that one layer gets, what rounding to them is taken to cost, and what uniform bits would cost."""

    name: str
    size: int
    bits: int
    cost: float
    uniform_cost: float


@dataclass(frozen=True)
class BitPlan(Table):
    """How many bits each layer gets within a budget, and how the plan compares with the same number for all.

    `budget` is the number of bits per weight that may be used on average, `uniform` the largest single number of bits
    within it. `losses` and `accuracies` are those of the model, of the plan and of uniform bits.
    """

    rows: tuple[LayerBits, ...]
    budget: float
    by: str
    uniform: int
    losses: tuple[Estimate, Estimate, Estimate]
    accuracies: tuple[Estimate, Estimate, Estimate]
    samples: int = 0

    @property
    def bits(self) -> dict[str, int]:
        """The bits of each layer by its name."""
        return {row.name: row.bits for row in self.rows}

    @property
    def mean_bits(self) -> float:
        """Bits per weight, on average."""
        return sum(row.size * row.bits for row in self.rows) / max(1, sum(row.size for row in self.rows))

    def _columns(self) -> Columns:
        return {
            "layer": (str, [row.name for row in self.rows]),
            "size": (int, [row.size for row in self.rows]),
            "bits": (int, [row.bits for row in self.rows]),
            "cost": (float, [row.cost for row in self.rows]),
            "uniform_cost": (float, [row.uniform_cost for row in self.rows]),
        }

    def __str__(self) -> str:
        table = [["layer", "size", "bits", "cost", f"cost of {self.uniform} bits"]]
        table += [
            [row.name, f"{row.size:,}", str(row.bits), figure(row.cost, 3), figure(row.uniform_cost, 3)]
            for row in self.rows
        ]
        said = [f"{figure(self.mean_bits, 3)} bits per weight, by {COSTS[self.by]}."]
        if set(self.bits.values()) == {self.uniform}:
            said.append(f"It gives all layers the same {self.uniform} bits: nothing else within the budget costs less.")
        uniform = f"with {self.uniform} bits for all"
        whole, plan, alike = (figure(each.value) for each in self.losses)
        said.append(f"Loss: {whole} unrounded, {plan} with this plan, {alike} {uniform}.")
        if not math.isnan(self.accuracies[0].value):
            whole, plan, alike = (f"{each.value:.2%}" for each in self.accuracies)
            said.append(f"Accuracy: {whole} unrounded, {plan} with this plan, {alike} {uniform}.")
        return "\n".join([*aligned(table), *said])
