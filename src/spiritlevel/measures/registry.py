"""The registry: what is known about a measure, and all measures by name."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import nn

from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, NotExactError, first_line, unknown_name
from spiritlevel.measures.sampling import Parts, Sampling
from spiritlevel.measures.setting import Setting
from spiritlevel.results import EFFECTS, SYMMETRIES, Estimate
from spiritlevel.statistics.subsets import SubsetError, unknown
from spiritlevel.transforms import Transformed

TRANSFORMS = EFFECTS
"""The transforms that invariances are declared for (`spiritlevel.transforms`)."""

SAME = frozenset(SYMMETRIES)
SCALED = frozenset({"scale_last_layer", "rescale_all"})
UNSEEN = frozenset({"shift_logits", "permute_units"})  # gradient and Hessian are unchanged but for the order of entries
BY_TENSOR = frozenset({"rescale_layers", "scale_before_batchnorm", "permute_units"})  # one number for each tensor
DIAGONAL = BY_TENSOR | {"rescale_channels", "shift_norm_gain", "scale_gate"}  # one number for each parameter
LINEAR = DIAGONAL | {"mix_heads", "mix_linear", "split_units"}  # θ → Tθ, T any matrix

Compute = Callable[[Setting], Estimate]
Predict = Callable[[Setting, Transformed], float | None]


@dataclass(frozen=True)
class Measure:
    """A number that is said to measure flatness or width, and what is known about it.

    `family` is the kind of number: "curvature", "margin" or "norm"; `direction` says what a larger value means:
    "sharper", "flatter", "wider" (margins) or "larger" (norms). `worth` says what the value is worth, see `WORTH`.
    `cost` is the most expensive thing it does: "forward", "backward", "matvecs" or "optimiser"; `passes` what it takes
    by itself, roughly, in forward passes over the data: a number, or a function of the setting. `sampling` says how the
    error of a random subset of the data is found, and with it whether the measure is a mean over samples and whether it
    needs data at all. `of_margins`: it is a statistic of the output margins, free once these are known. `invariant_to`
    are the names of the transforms that leave it unchanged; `predict` gives the value after a transform where theory
    knows it. `keeps_sign` says that no linear reparametrisation θ → Tθ can change its sign (Sylvester's law of inertia
    for T⁻ᵀHT⁻¹). `guide` is what the audit's search climbs to move it, see `GUIDES`. `advice` is what a comparison may
    say in favour of a model that is clearly better by this measure; without it the measure has no say in the advice.
    `in_shards` says that it can be taken for a model that is sharded over processes. `also_called` are the names that
    others use.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    >>> MEASURES["trace"](net, data).exact, sorted(MEASURES["trace"].invariant_to)
    (True, ['permute_units', 'shift_logits'])
    """

    name: str
    meaning: str
    formula: str
    reference: str
    cost: str
    compute: Compute = field(repr=False)
    sampling: Sampling = field(repr=False)
    family: str = field(kw_only=True)
    worth: str = field(kw_only=True)
    passes: float | Callable[[Setting], float] = field(kw_only=True, repr=False)
    direction: str = "sharper"
    invariant_to: frozenset[str] = frozenset()
    predict: Predict | None = field(default=None, repr=False)
    keeps_sign: bool = False
    of_margins: bool = False
    in_shards: bool = False
    guide: str = "length"
    advice: str = ""
    also_called: tuple[str, ...] = ()

    def __call__(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Any = "cross_entropy",
        batch_norm: str = "eval",
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> Estimate:
        """The measure of a model on data, with its error; the model is left as it was."""
        setting = Setting(
            model, data, loss=loss, batch_norm=batch_norm, seed=seed, sharded=self.takes_shards, **reading
        )
        setting.check()
        return self.compute(setting)

    @property
    def takes_shards(self) -> bool:
        """Whether it can be taken for a sharded model: it says so, or it is a statistic of the output margins."""
        return self.in_shards or self.of_margins

    def attempt(self, setting: Setting) -> Estimate:
        """The measure, or NaN with the reason why there is none.

        A computation that breaks down (a division by zero, an operation that PyTorch refuses, no memory left) makes
        this one number undefined, under the name of its error, and spares the others in a report. Errors of other
        kinds are mistakes in the program and propagate, as does a failure of one rank among several.
        """
        return setting.once(("measure", self.name), lambda: self._attempted(setting))

    def _attempted(self, setting: Setting) -> Estimate:
        if setting.problem.sharded and not self.takes_shards:
            reason = "this measure needs the whole model, which is sharded over processes"
            return Estimate(math.nan, seed=setting.seed, reason=reason)
        try:
            found = self.compute(setting)
        except (InputError, NotExactError) as error:
            return Estimate(math.nan, seed=setting.seed, reason=str(error))
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            if setting.group is not None:  # the other ranks may still be waiting for this one
                raise
            first = first_line(error)
            return Estimate(math.nan, seed=setting.seed, reason=f"failed with {type(error).__name__}: {first}")
        if math.isnan(found.value) and not found.reason:
            return dataclasses.replace(found, reason="the value is not a number")
        return found

    def subset_error(self, setting: Setting, value: float, population: int) -> SubsetError:
        """The error of `value`, measured in this setting on a random subset of `population` samples; see `Sampling`.

        An error that cannot be found is unknown, and says why.
        """
        if setting.coupling:
            return unknown(setting.why_coupled)
        try:
            return self.sampling.error(self, setting, value, population)
        except (InputError, NotExactError) as error:
            return unknown(str(error).rstrip("."))
        except (ArithmeticError, RuntimeError, ValueError) as error:
            first = first_line(error)
            return unknown(f"failed with {type(error).__name__}: {first}")

    def parts(self, setting: Setting, population: int) -> Parts | None:
        """How every sample bears on the value that this setting gave; None where that is not known."""
        if setting.coupling:
            return None
        try:
            return self.sampling.parts(setting, population)
        except (InputError, NotExactError, RuntimeError):
            return None

    def forward_passes(self, setting: Setting) -> float:
        """What the measure takes by itself, roughly, in forward passes over the data; a backward pass counts as two.

        Where it is not defined it takes nothing: a first look at the network shows that.
        """
        try:
            return float(self.passes(setting) if callable(self.passes) else self.passes)
        except (ArithmeticError, RuntimeError, ValueError):
            return 0.0

    def subset_passes(self, setting: Setting) -> float:
        """What finding the error of a random subset takes on top of the measure, also in forward passes."""
        try:
            return self.sampling.forward_passes(self, setting) if setting.batch_norm != "batch" else 0.0
        except (ArithmeticError, RuntimeError, ValueError):
            return 0.0

    @property
    def needs_data(self) -> bool:
        """Whether the samples matter, and not just their shape."""
        return self.sampling.how != "no data"

    @property
    def mean_over_samples(self) -> bool:
        """Whether the value is the mean of one number per sample."""
        return self.sampling.how == "mean"

    @property
    def lower_bound(self) -> bool:
        """Whether an optimiser found the value, so that the true one may be larger."""
        return self.worth == "lower bound"

    def __str__(self) -> str:
        bound = " (a lower bound)" if self.lower_bound else ""
        return f"{self.name}{bound}: {self.meaning}; {self.formula} [{self.reference}]"


FAMILIES = ("curvature", "margin", "norm")
"""The kinds of number that a measure can be."""

WORTH: dict[str, tuple[str, ...]] = {
    "exact": ("exact",),
    "exact or estimated": ("exact", "estimated"),
    "estimated": ("exact", "estimated"),  # exact where there are as many probes as parameters
    "to a tolerance": ("exact", "converged", "not converged"),
    "lower bound": ("lower bound",),
}
"""What a measure's value is worth, in words, and the status that an `Estimate` of it can have."""

GUIDES = ("length", "curvature", "curvature in sizes", "curvature in norms")
"""What stands in for a measure in a search: the length of all parameters, or the curvature along random signs, with
every parameter as it is, in units of its own size, or in units of the norm of its tensor."""

MEASURES: dict[str, Measure] = {}
"""All measures by name."""

MOST_PASSES = 10_000  # forward passes over the data that a measure takes at most unless it is named

DEFAULT = (
    "trace",
    "largest_eigenvalue",
    "fisher_rao_norm",
    "layer_scaled_trace",
    "quotient_norm",
    "relative_flatness",
    "adaptive_sharpness_average",
    "signal_sharpness",
    "weight_norm",
    "path_norm",
    "mean_aceht",
    "margin_mean",
    "input_distance",
    "spectral_margin_mean",
)
"""The measures that are taken by default: cheap, and one or two of every kind."""

LEADING = {
    "curvature": ("trace", "largest_eigenvalue", "frobenius_norm"),
    "margin": ("margin_q50", "margin_mean", "input_distance"),
}
"""The measures that stand for their family in a summary: the first one present."""


@checked
def select(names: str | Iterable[str] | None = None) -> tuple[Measure, ...]:
    """Measures by their names: "default" (the same as None), "all", or the ones listed.

    >>> [measure.name for measure in select(["trace", "path_norm"])]
    ['trace', 'path_norm']
    """
    if names is None or isinstance(names, str):
        sets = {None: DEFAULT, "default": DEFAULT, "all": tuple(MEASURES)}
        names = sets.get(names) or (str(names),)
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in MEASURES:
            others = {other: each.name for each in MEASURES.values() for other in each.also_called}
            raise unknown_name("measure", name, [*MEASURES, "default", "all"], others)
    return tuple(MEASURES[name] for name in wanted)


def affordable(
    names: str | Iterable[str] | None, chosen: Iterable[Measure], setting: Setting
) -> tuple[tuple[Measure, ...], dict[str, str]]:
    """The chosen measures that take a bearable number of passes, and why the others are left out.

    Exact terms of 100,000 classes take as many backward passes per batch: whoever wants them must name them.
    """
    found, expensive = tuple(chosen), {}
    for each in found if names is None or names in ("default", "all") else ():
        if (passes := each.forward_passes(setting)) > MOST_PASSES:
            expensive[each.name] = (
                f"it takes about {passes:,.0f} forward passes over the data, and more than {MOST_PASSES:,} are made "
                "only for a measure that measures= names"
            )
    return tuple(each for each in found if each.name not in expensive), expensive


@torch.inference_mode(False)  # measures add up in place, which inference tensors do not allow outside that mode
@checked
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    measures: str | Iterable[str] | None = None,
    loss: Any = "cross_entropy",
    batch_norm: str = "eval",
    seed: int = 0,
    **reading: Unpack[Reading],
) -> list[dict[str, Any]]:
    """Several measures of one model as plain rows, for tables of many models; what they share is computed once.

    A row has name, value, stderr, tolerance, seconds (not counting what an earlier row had computed), direction, kind
    (the status of the number, see `Estimate`) and reason. The model is left as it was.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> rows = evaluate(net, (torch.ones(4, 2), torch.tensor([0, 1, 0, 1])), measures=["trace", "ball_sharpness"])
    >>> [(row["name"], row["kind"]) for row in rows]
    [('trace', 'exact'), ('ball_sharpness', 'lower bound')]
    """
    chosen = select(measures)
    setting = Setting(model, data, loss=loss, batch_norm=batch_norm, seed=seed, **reading)
    setting.check()
    rows = []
    for measure in chosen:
        start = time.perf_counter()
        found = measure.attempt(setting)
        rows.append(
            {
                "name": measure.name,
                "value": found.value,
                "stderr": found.stderr,
                "tolerance": found.tolerance,
                "seconds": time.perf_counter() - start,
                "direction": measure.direction,
                "kind": found.status,
                "reason": found.reason,
            }
        )
    return rows


def register(name: str, meaning: str, formula: str, reference: str, **fields: Any) -> Callable[[Compute], Compute]:
    """Make the decorated function a measure, with everything that is declared here."""

    def add(compute: Compute) -> Compute:
        MEASURES[name] = Measure(name, meaning, formula, reference, compute=compute, **fields)
        return compute

    return add
