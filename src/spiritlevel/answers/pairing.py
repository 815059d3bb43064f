"""The rows of a comparison: a number for two models on the same samples, the difference, and its interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiritlevel.answers.measuring import RESAMPLES
from spiritlevel.measures import TRANSFORMS, Measure, Setting
from spiritlevel.measures.registry import SAME
from spiritlevel.results import (
    FEWEST,
    ComparisonRow,
    Estimate,
    mean_skewness,
    ratio_of,
    signed_limits,
    skewed_limits,
    standard_error,
)
from spiritlevel.results.quantiles import student
from spiritlevel.statistics.subsets import of_owners

KEEP_FUNCTION = frozenset(name for name in TRANSFORMS if name in SAME)
_ROUNDING = {torch.float64: 1e-10}  # what counts as rounding, relative to the values; 1e-5 in single precision
_ENDLESS = 10**12  # the population from which samples of the same kind come
_BETTER = {"wider": 1, "flatter": 1, "sharper": -1, "larger": 0}  # the sign of a difference b - a that favours b


class Plain(NamedTuple):
    """What a row needs to know about a number that is not in the registry of measures."""

    name: str
    meaning: str
    direction: str
    invariant_to: Collection[str]
    advice: str  # as `Measure.advice`; with the size of the difference


def precision_of(*settings: Setting) -> float:
    """What counts as rounding, relative to the values."""
    return max(_ROUNDING.get(setting.problem.dtype, 1e-5) for setting in settings)


def owners_of(*settings: Setting) -> tuple[Tensor | None, str]:
    """What the samples belong to where they are not independent of each other, and what the independent units are.

    Single positions belong to their sequences; samples that the loss or one of the models couples, to their batches.
    """
    first = settings[0]
    if first.form.unit == "token":
        return first.margins.sample, "sequences"
    if any(setting.coupling for setting in settings):
        sizes = torch.tensor([len(targets) for _, targets in first.batches])
        return torch.arange(len(sizes)).repeat_interleave(sizes), "batches"
    return None, "samples"


@dataclass(frozen=True)
class Pairing:
    """Two models on the same samples: makes the rows of their comparison, before any audit.

    `same` is what both give for every sample: "outputs", "probabilities" or nothing. `looks` is how many of the numbers
    the advice looks at: a row is sure if its interval excludes 0 at that part of the chance of error. `owners` are what
    the samples belong to where they are not independent (see `owners_of`), and `units` what is.
    """

    a: Setting
    b: Setting
    level: float
    seed: int
    same: str = ""
    looks: int = 1
    owners: Tensor | None = None
    units: str = "samples"

    def row(self, each: Measure) -> ComparisonRow:
        """A measure of both models: paired by samples where its parts are known, else by the errors of both values."""
        a, b = each.attempt(self.a), each.attempt(self.b)
        if not math.isnan(b.value - a.value) and {a.status, b.status}.isdisjoint(("lower bound", "not converged")):
            of_a, of_b = each.parts(self.a, _ENDLESS), each.parts(self.b, _ENDLESS)
            if of_a is not None and of_b is not None:
                biases = of_a.bias, of_b.bias
                return self._paired(each, (a, b), of_a.values, of_b.values, of_a.share, biases)
        limits, how, note = self._known(a, b)
        ratio = ratio_of(b.interval(self.level), a.interval(self.level))
        rounding = precision_of(self.a, self.b) * max(abs(a.value), abs(b.value))
        return self._verdict(each, a, b, limits, how, rounding, note, not math.isnan(ratio[0]))

    def _known(self, a: Estimate, b: Estimate) -> tuple[tuple[float, float], str, str]:
        """The interval of the difference of two numbers for the whole data set, where it comes from, and a remark."""
        nothing = math.nan, math.nan
        statuses = {a.status, b.status}
        if "not converged" in statuses:
            return nothing, "not converged", f"not converged: {a.reason or b.reason}"
        if "lower bound" in statuses:
            return nothing, "lower bounds", "both are lower bounds that an optimiser found"
        difference, spread, tolerance = b.value - a.value, math.hypot(a.stderr, b.stderr), a.tolerance + b.tolerance
        if "estimated" in statuses:
            half = spread * float(student(0.5 + self.level / 2, max(1.0, min(a.dof, b.dof)))) + tolerance
            note = "the interval is that of the probes, on these samples"
            return (difference - half, difference + half), "probes", note
        if tolerance and abs(difference) <= tolerance:
            note = "they differ by no more than the tolerances to which they are known"
            return (difference - tolerance, difference + tolerance), "tolerance", note
        return nothing, "tolerance" if tolerance else "exact", ""

    def plain(self, each: Plain, a: Tensor, b: Tensor, exact: bool = False) -> ComparisonRow:
        """A mean over the samples that is not in the registry of measures."""
        return self._paired(each, (Estimate(float(a.mean())), Estimate(float(b.mean()))), a, b, exact=exact)

    def _paired(
        self,
        each: Measure | Plain,
        values: tuple[Estimate, Estimate],
        a: Tensor,
        b: Tensor,
        share: float = math.nan,
        biases: tuple[float, float] = (0.0, 0.0),
        exact: bool = False,
    ) -> ComparisonRow:
        """One number over all samples for both models, from each sample's value; `exact` ones have no rounding."""
        difference, tolerance = values[1].value - values[0].value, values[0].tolerance + values[1].tolerance
        strict = 1 - (1 - self.level) / self.looks
        if exact:
            limits, how = self._of_shares(of_owners(b - a, self.owners)), "paired t"
        elif math.isnan(share):
            limits, how = self._of_means(values, of_owners(b - a, self.owners)), "paired t"
        else:
            limits, how = self._of_quantiles(a, b, share), "bootstrap of the pairs"
        if len(a if self.owners is None else self.owners.unique()) < FEWEST:
            how = f"too few {self.units}"
            found, sure, in_proportion = (math.nan, math.nan), False, False
        else:
            low, high = limits(self.level)
            found = low - biases[1] - tolerance, high + biases[0] + tolerance
            least, most = limits(strict)
            sure = bool(difference) and (least - tolerance) * (most + tolerance) > 0
            own = [self._alone(value, of, share) for value, of in zip(values, (a, b), strict=True)]
            in_proportion = not math.isnan(ratio_of(own[1], own[0])[0])
        both = torch.cat((a, b))
        size = float(both[both.isfinite()].abs().mean())  # per sample: in a mean they cancel, their rounding does not
        rounding = 0.0 if exact else precision_of(self.a, self.b) * size
        return dataclasses.replace(self._verdict(each, *values, found, how, rounding, "", in_proportion), sure=sure)

    def _of_means(self, values: tuple[Estimate, Estimate], apart: Tensor) -> Callable[[float], tuple[float, float]]:
        """The interval of a difference of means, at a level; with the error of the probes, if there were any."""
        difference, dof = values[1].value - values[0].value, len(apart) - 1
        error, probes = float(standard_error(apart)), math.hypot(*(value.stderr for value in values))
        both = math.hypot(error, probes)
        skew = mean_skewness(apart) * (error / both) ** 3 if both else 0.0
        return lambda level: signed_limits(difference, both, dof, skew, level)

    def _of_shares(self, apart: Tensor) -> Callable[[float], tuple[float, float]]:
        """The interval of a difference of shares of right decisions, at a level.

        A few samples may make all of the difference, and then their spread and skewness say little: three against none
        would exclude 0. So two samples are added, one in favour of each model, that differ as much as any does. For
        samples that are right or wrong this is the interval of Bonett & Price 2012, J. Educ. Behav. Stat. 37.
        """
        most = apart.abs().max()
        added = torch.cat([apart, torch.stack([most, -most])])
        mean, error = float(added.mean()), float(standard_error(added))

        def limits(level: float) -> tuple[float, float]:
            low, high = skewed_limits(mean, error, len(added) - 1, 0.0, level)
            return max(low, -1.0), min(high, 1.0)

        return limits

    def _alone(self, value: Estimate, samples: Tensor, share: float) -> tuple[float, float]:
        """The interval of one of the two numbers by itself, which shows whether their ratio means anything."""
        if math.isnan(share):
            samples = of_owners(samples, self.owners)
            error = math.hypot(float(standard_error(samples)), value.stderr)
            return skewed_limits(value.value, error, len(samples) - 1, mean_skewness(samples), self.level)
        draws = self._quantiles(samples, share)
        low, high = np.quantile(draws, [0.5 - self.level / 2, 0.5 + self.level / 2]).tolist()
        return low, high

    def _of_quantiles(self, a: Tensor, b: Tensor, share: float) -> Callable[[float], tuple[float, float]]:
        """The interval of a difference of quantiles, at a level."""
        with np.errstate(invalid="ignore"):  # infinite distances
            draws = self._quantiles(b, share) - self._quantiles(a, share)

        def limits(level: float) -> tuple[float, float]:
            low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2]).tolist()
            return low, high

        return limits

    def _quantiles(self, samples: Tensor, share: float) -> Any:
        """Of resampled samples, the same ones for both models; with all of its positions where sequences are drawn."""
        generator, values = np.random.default_rng((self.seed, 2)), samples.numpy()
        parts = None
        if self.owners is not None:
            ends = self.owners.unique(return_counts=True)[1].cumsum(0)[:-1]
            parts = np.split(values[self.owners.argsort(stable=True).numpy()], ends.numpy())
        count = len(parts or values)
        with np.errstate(invalid="ignore"):  # one at a time: all at once would be a thousand times the data
            rows = (generator.integers(count, size=count) for _ in range(RESAMPLES))
            drawn = (np.concatenate([parts[i] for i in row]) if parts else values[row] for row in rows)
            return np.array([np.quantile(each, share) for each in drawn])

    def _verdict(
        self,
        each: Measure | Plain,
        a: Estimate,
        b: Estimate,
        limits: tuple[float, float],
        how: str,
        rounding: float,
        note: str,
        in_proportion: bool,
    ) -> ComparisonRow:
        difference, sign = b.value - a.value, _BETTER[each.direction]
        invariant = frozenset(each.invariant_to).issuperset(KEEP_FUNCTION)
        if math.isnan(difference):
            verdict, note = "undefined", a.reason or b.reason or "the values are not finite"
        elif math.isfinite(difference) and abs(difference) <= rounding:
            verdict, note = "equal", "they differ by rounding only" if difference else ""
        elif math.isnan(limits[0]):
            verdict = "no interval"
        elif not limits[0] * limits[1] > 0 or (self.same and how == "probes"):
            verdict = "equal"
        elif sign == 0:
            verdict = "no preference"
        else:
            verdict = "b" if difference * sign > 0 else "a"
        if verdict in ("undefined", "no interval"):
            limits = math.nan, math.nan
        return ComparisonRow(
            name=each.name,
            a=a,
            b=b,
            difference=difference,
            low=limits[0],
            high=limits[1],
            how=how,
            ratio=b.value / a.value if in_proportion and a.value else math.nan,
            factor=1.0 if invariant else math.nan,
            verdict=verdict,
            direction=each.direction,
            meaning=each.meaning,
            invariant=invariant,
            note=note,
            decides=bool(each.advice),
        )
