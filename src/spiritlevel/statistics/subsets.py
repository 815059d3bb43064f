"""The error of a number that was measured on a random subset of the data, as a statement about all of them.

A number T of N out of M samples moves, to first order, by the mean of its *influences*: ψₙ says how T changes if more
of the data are like sample n. So its error is that of a mean, sd(ψ)/√N · √(1 − N/M), and so are its limits. Those of
quantiles come from order statistics; what has no influence function is recomputed without each of ten groups of the
samples. What is known to fit the noise of a subset (a maximum, a norm) is too large on average: its lower limit is
lowered by that much. Coverage of all of these in simulation: docs/coverage.md. Nothing here computes on a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiritlevel.results import Estimate
from spiritlevel.results.intervals import FEWEST, share_limits, subset_mean
from spiritlevel.results.quantiles import normal, student

GROUPS = 10  # of the jackknife, and of the estimates of bias
_Z = normal(0.975)


class SubsetError(NamedTuple):
    """Standard error and 95% limits, NaN where they are not known; `reason` then says why."""

    stderr: float
    low: float
    high: float
    reason: str = ""


def unknown(reason: str) -> SubsetError:
    """Nothing is known, for this reason."""
    return SubsetError(math.nan, math.nan, math.nan, reason)


def few(count: int, least: int = FEWEST) -> SubsetError | None:
    """Why so few samples say nothing about all of the data; None if there are enough."""
    if count >= least:
        return None
    return unknown(f"it takes at least {least} samples, got {count}")


def mean_of(values: Tensor, population: int) -> Estimate:
    """The mean over samples, with the error of a random subset if the population is larger."""
    error, limits = subset_mean(values, population)
    return Estimate(float(values.mean()), data_stderr=error, data_limits=limits)


def share_of(correct: Tensor, population: int) -> Estimate:
    """The mean of zeros and ones; for a subset with limits, and an error that no outcome makes 0."""
    value, count = float(correct.mean()), len(correct)
    if population <= count:
        return Estimate(value)
    pulled = (float(correct.sum()) + 0.5 * _Z**2) / (count + _Z**2)
    error = math.sqrt(pulled * (1 - pulled) / (count + _Z**2) * (1 - count / population))
    return Estimate(value, data_stderr=error, data_limits=share_limits(value, count, population))


def by_influences(value: float, influences: Tensor, population: int, bias: float = 0.0) -> SubsetError:
    """For a number that moves with the mean of these, one per sample; `bias` is how much too large it is on average."""
    influences = influences.double().cpu()
    if too_few := few(len(influences)):
        return too_few
    if not bool(influences.isfinite().all()):
        return unknown("a sample's contribution to it is not finite")
    error, limits = subset_mean(influences, population)
    if error is None or limits is None:
        return SubsetError(0.0, value, value)
    shift = value - float(influences.mean())
    return SubsetError(error, limits[0] + shift - max(bias, 0.0), limits[1] + shift)


def by_order(value: float, values: Tensor, share: float, population: int) -> SubsetError:
    """For the quantile at this share, from the values of all samples.

    How many of N samples lie below the quantile of the population is binomial, so the limits are values at the ranks
    N·q + ½ ± 1.96 √(N q (1−q) (1−N/M)), between two by interpolation. The standard error is that of a normal
    distribution with these limits.
    """
    ordered = np.sort(values.double().cpu().numpy())
    count = len(ordered)
    if too_few := few(count):
        return too_few
    half = _Z * math.sqrt(count * share * (1 - share) * (1 - count / population))
    ranks = count * share + 0.5 - half, count * share + 0.5 + half
    if ranks[0] < 1 or ranks[1] > count:
        return unknown(f"{count} samples do not reach far enough beyond their {share:.0%} quantile")
    low, high = np.interp(ranks, np.arange(1, count + 1), ordered)
    if not (math.isfinite(low) and math.isfinite(high)):
        return unknown("samples near this quantile are infinite")
    return SubsetError((high - low) / (2 * _Z), float(low), float(high))


def by_jackknife(value: float, without: Sequence[float], count: int, population: int) -> SubsetError:
    """From the values without each of the groups; Student's t with one degree of freedom fewer than groups.

    The jackknife is blind to much that is not smooth, and its own bias is not subtracted from either limit.
    """
    if too_few := few(count):
        return too_few
    found = torch.tensor(without, dtype=torch.float64)
    if not bool(found.isfinite().all()):
        return unknown("it is not defined without some of the samples")
    groups = len(found)
    error = math.sqrt((groups - 1) * float(found.var(correction=0)) * (1 - count / population))
    half = error * float(student(0.975, groups - 1))
    return SubsetError(error, value - half, value + half)


def of_owners(values: Tensor, owners: Tensor | None) -> Tensor:
    """A column of units, such as the tokens of sequences, as one with an entry for each of their owners.

    Units of one owner resemble each other, owners are independent. The entries have the same mean, and their spread is
    that of the mean, to first order in how much the owners differ in size: mean + (G/N) Σ (value − mean) of the owner's
    units, for G owners of N units. Without owners the column stays as it is.

    >>> of_owners(torch.tensor([1.0, 1.0, 5.0, 5.0]), torch.tensor([3, 3, 8, 8]))
    tensor([1., 5.], dtype=torch.float64)
    """
    if owners is None:
        return values
    values, mean = values.double(), float(values.double().mean())
    distinct, place = owners.unique(return_inverse=True)
    sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, place, values - mean)
    return mean + sums * (len(distinct) / len(values))


def groups(count: int, seed: int, number: int = GROUPS) -> list[Tensor]:
    """The numbers of all samples in random groups of nearly equal size, each in order."""
    order = np.random.default_rng((seed, 4)).permutation(count)
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, min(number, count))]
