"""How the error of a measure is found if only a random subset of the data was measured.

What every sample contributes to a measure: mathematics 10.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.measures.ends import Ends, layer_norms
from spiritlevel.results import FEWEST, figure
from spiritlevel.statistics.subsets import (
    GROUPS,
    SubsetError,
    by_influences,
    by_jackknife,
    by_order,
    few,
    groups,
    unknown,
)

if TYPE_CHECKING:
    from spiritlevel.measures.registry import Compute, Measure
    from spiritlevel.measures.setting import Setting

MORE = 100  # samples that the error of a subset needs where a few of them may make up most of the value
SHARED = 8  # probes that all samples share where only the error of a subset is wanted


class Parts(NamedTuple):
    """How every sample bears on a number: it moves with the mean of `values`, (N,), or is a quantile of them.

    The quantile is that at `share`, which is NaN for a mean. `bias` is how much too large the number is on average.
    """

    values: Tensor
    share: float
    bias: float


@dataclass(frozen=True)
class Sampling:
    """How the error of a measure is found if only a random subset of the data was measured.

    `how`: "no data" (the samples do not matter), "mean" (of `values`, one per sample), "influence" (`values` gives
    what every sample contributes, to first order), "order" (the quantile at `share` of `values`), "jackknife"
    (recomputed without each of ten groups: nine times the cost of the measure; `limits` if there is a cheaper way),
    "bracket" (`limits` finds them) or "unknown", and `reason` says why. `bias` is how much too large the measure is on
    average. Finding the error takes about `passes` forward passes over the data and `repeats` times the measure itself.
    `least` is how many samples an interval needs to hold, which is more where a few of them decide the value. What
    `grows` with the root of the number of samples can be compared on the same samples, but says nothing about others.
    """

    how: str
    values: Callable[[Setting], Tensor] | None = None
    share: float = math.nan
    bias: Callable[[Setting, int], float] = lambda setting, population: 0.0
    limits: Callable[[Setting, float, int], SubsetError] | None = None
    reason: str = ""
    passes: float | Callable[[Setting], float] = 0.0
    repeats: float = 0.0
    least: int = FEWEST
    grows: bool = False

    def parts(self, setting: Setting, population: int) -> Parts | None:
        """How every sample bears on a value that the measure has given; None where it is not split up that way."""
        if self.values is None:
            return None
        values = self.values(setting).double().cpu()
        if len(values) < self.least:
            return None
        return Parts(values, self.share, self.bias(setting, population))

    def error(self, measure: Measure, setting: Setting, value: float, population: int) -> SubsetError:
        """By the declared method, for a value that the measure has given in this setting."""
        if self.how == "no data":
            return SubsetError(0.0, value, value)
        if self.how == "unknown":
            return unknown(self.reason)
        if self.grows:
            times = math.sqrt(population / setting.count)
            return unknown(
                "it grows with the square root of the number of samples, and would be "
                f"{figure(times, 3)} times as large on all {population:,}"
            )
        if too_few := few(setting.count, self.least):
            return too_few
        if self.how == "jackknife" and self.limits is None:
            return self._without_groups(measure, setting, value, population)
        if self.limits is not None:
            return self.limits(setting, value, population)
        assert self.values is not None
        values = self.values(setting)
        if self.how == "order":
            return by_order(value, values, self.share, population)
        return by_influences(value, values, population, self.bias(setting, population))

    def forward_passes(self, measure: Measure, setting: Setting) -> float:
        """What finding the error takes, roughly, in forward passes over the data."""
        own = self.passes(setting) if callable(self.passes) else self.passes
        return own + (self.repeats * measure.forward_passes(setting) if self.repeats else 0.0)

    def _without_groups(self, measure: Measure, setting: Setting, value: float, population: int) -> SubsetError:
        found = []
        for group in groups(setting.count, setting.seed):
            others = torch.ones(setting.count, dtype=torch.bool)
            others[group] = False
            found.append(measure.compute(setting.part(others.nonzero()[:, 0])).value)
        return by_jackknife(value, found, setting.count, population)


NO_DATA = Sampling("no data")
PRODUCT = 4.0
"""Forward passes that a Hessian product takes."""


def mean_of(
    values: Callable[[Setting], Tensor], passes: float | Callable[[Setting], float] = 0.0, least: int = FEWEST
) -> Sampling:
    """For a mean over samples: that of these values, which take this many forward passes."""
    return Sampling("mean", values, passes=passes, least=least)


def unless_exact(passes: float) -> Callable[[Setting], float]:
    """This many passes where the traces of the samples are estimated; none where they are exact."""
    return lambda setting: 0.0 if setting.structure.exact and setting.problem.loss.closed_form else passes


def kept(name: str) -> Callable[[Setting], Tensor]:
    """What a measure has itself kept for every sample under this name."""
    return lambda setting: setting.kept[name]


def quantile_of(values: Callable[[Setting], Tensor], share: float) -> Sampling:
    """For a quantile of these values."""
    return Sampling("order", values, share)


def recomputed() -> Sampling:
    """By recomputing the measure without each of ten groups: nine times its cost."""
    return Sampling("jackknife", repeats=GROUPS - 1.0)


def not_known(reason: str) -> Sampling:
    """Not at all, for this reason."""
    return Sampling("unknown", reason=reason)


def shared_signs(setting: Setting) -> list[Tensor]:
    """Sign vectors that all samples share."""
    size = setting.problem.size
    draws = (torch.randint(0, 2, (size,), generator=setting.generator(i, 11)) for i in range(SHARED))
    return [draw.mul(2).sub(1).to(setting.theta) for draw in draws]


def _rest(setting: Setting, population: int) -> float:
    """1 − N/M, the share of the population that was not measured."""
    return 1 - setting.count / population


def end_sampling(get: Callable[[Setting], Ends], which: str, in_norms: bool = False) -> Sampling:
    """For an end λ with eigenvector v: ψₙ = vᵀHₙv, one forward-mode pass for all samples.

    The eigenvector fits the noise of the subset, so λ is too large by about Σ_j Var(v_jᵀHₙv)/(N(λ−λ_j)) over the other
    eigenvectors; the variance follows from the products with ten groups of the samples, and λ_j is taken as 0.
    """

    def vectors(setting: Setting) -> tuple[Tensor, Tensor | float]:
        return get(setting).vector(which), layer_norms(setting) if in_norms else 1.0

    def values(setting: Setting) -> Tensor:
        vector, unit = vectors(setting)
        sign = -1.0 if which == "magnitude" and get(setting).dominant.value < 0 else 1.0
        return sign * setting.forms(unit * vector)[:, 0]

    def bias(setting: Setting, population: int) -> float:
        vector, unit = vectors(setting)
        end = get(setting).norm if which == "magnitude" else get(setting).largest
        if not end.value > 0:
            raise InputError("the bias of an end of the spectrum that is not positive is unknown.")
        noise = 0.0
        for product in setting.group_products(unit * vector):
            moved = (unit * product).double()
            moved -= (moved @ vector.double()) * vector.double()
            noise += float(moved.square().sum())
        return noise / GROUPS / (GROUPS - 1) / end.value * _rest(setting, population)

    return Sampling("influence", values, bias=bias, passes=2 * PRODUCT)


def _squared_norm_values(setting: Setting) -> Tensor:
    """⟨Hₙ, H⟩ of every sample, the mean of vᵀHₙHv over shared probes, by forms along Hv + v and Hv − v."""
    if "squared norm" in setting.kept:
        return setting.kept["squared norm"]
    total = torch.zeros(setting.count, dtype=torch.float64)
    for v in shared_signs(setting):
        w = setting.hessian @ v
        size = float(w.double().norm()) / math.sqrt(len(v))
        if size > 0:
            above, below = setting.forms(v + w / size, v - w / size).unbind(1)
            total += (above - below) * size / 4
    setting.kept["squared norm"] = total / SHARED
    return setting.kept["squared norm"]


def _squared_norm_bias(setting: Setting, population: int) -> float:
    """E‖Hₙ − H‖_F²/N, from the products with ten groups of the samples."""
    key = "noise of the squared norm"
    if key in setting.kept:
        return float(setting.kept[key]) * _rest(setting, population)
    noise, probes = 0.0, shared_signs(setting)[: SHARED // 2]
    for v in probes:
        products = torch.stack([product.double() for product in setting.group_products(v)])
        noise += float((products - products.mean(0)).square().sum()) / GROUPS / (GROUPS - 1)
    setting.kept[key] = torch.tensor(noise / len(probes), dtype=torch.float64)
    return float(setting.kept[key]) * _rest(setting, population)


def norm_sampling(factor: Callable[[Setting], float]) -> Sampling:
    """For a function of ‖H‖_F² with this slope."""
    return Sampling(
        "influence",
        lambda setting: 2 * factor(setting) * _squared_norm_values(setting),
        bias=lambda setting, population: factor(setting) * _squared_norm_bias(setting, population),
        passes=24 * PRODUCT,
    )


def bracket(name: str, compute: Compute, percent: bool = False) -> Sampling:
    """For a maximum of the rise of the loss over displacements δ; `percent`: 100 rise/(1+L).

    At the maximiser δ* the influence is the rise of every sample (envelope theorem), which gives the upper limit. But
    δ* fits the noise of the subset: the maximum is too large on average. A δ found on one half of the samples is not
    fitted to the other half, so there its mean rise is on average at most the maximum over all data: this gives
    the lower limit. Both hold, so the interval is conservative.
    """

    def parts(setting: Setting, rises: Tensor, value: float) -> Tensor:
        if not percent:
            return rises
        base = float(setting.losses.mean())
        return (100 * rises - value * setting.losses) / (1 + base)

    def limits(setting: Setting, value: float, population: int) -> SubsetError:
        rises = setting.losses_at(setting.theta + setting.along[name][0]) - setting.losses
        above = by_influences(value, parts(setting, rises, value), population)
        crossed, halves = torch.zeros_like(rises), groups(setting.count, setting.seed, 2)
        for own, other in (halves, halves[::-1]):
            half, rest = setting.part(own), setting.part(other)
            compute(half)
            crossed[other] = rest.losses_at(setting.theta + half.along[name][0]) - rest.losses
        scale = 100 / (1 + float(setting.losses.mean())) if percent else 1.0
        lower = scale * float(crossed.mean())
        below = by_influences(lower, parts(setting, crossed, lower), population)
        low = max(0.0, min(below.low, value))
        return SubsetError((above.high - low) / (2 * 1.96), low, above.high)

    return Sampling("bracket", limits=limits, repeats=1.0)
