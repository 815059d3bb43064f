"""Errors and limits of means of draws, skewed ones too, and of a random subset of the data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spiritlevel.results.quantiles import beta, student


def standard_error(draws: Tensor) -> Tensor:
    """The standard error of the mean over the last dimension, even of draws so small that their squares vanish.

    One draw has none: NaN.
    """
    if draws.shape[-1] < 2:
        return draws.new_full(draws.shape[:-1], math.nan)
    scale = draws.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(draws.dtype).tiny)
    return (draws / scale).std(-1) * scale.squeeze(-1) / math.sqrt(draws.shape[-1])


def median(values: Tensor) -> float:
    """For an even number of values, the mean of the middle two; `torch.median` takes the lower."""
    with np.errstate(invalid="ignore"):  # between infinities of both signs lies no number
        return float(np.median(values.double().cpu().numpy()))


def mean_skewness(draws: Tensor) -> float:
    """The skewness of the error of the mean of draws (one dimension): theirs over √n, from the usual estimate of it."""
    count = draws.numel()
    deviations = draws.double() - draws.double().mean()
    size = float(deviations.abs().max()) if count > 2 else 0.0
    if not 0 < size < math.inf:
        return 0.0
    unit = deviations / size
    spread = float(unit.square().mean())
    return float(unit.pow(3).mean()) / spread**1.5 * math.sqrt(count - 1) / (count - 2)


def skewed_limits(value: float, error: float, dof: float, skew: float, level: float = 0.95) -> tuple[float, float]:
    """Student's t interval for a mean, corrected for the skewness of its error by Hall's transformation.

    T = (mean − truth)/error is not Student's t where the draws are skewed: the interval would lie too low, or too
    high. g(T) = T + aT² + a²T³/3 + s/6, with a = s/3 and s the skewness of the mean, nearly is, and is monotone. A
    few draws show less skewness than their distribution has, hence the factor 1.25, under which means of exponential,
    χ² and log-normal draws, and of the losses of networks, are covered as they should be (docs/coverage.md); the
    spread of skewed draws is less well known too, and the skewness of few draws hardly at all, so there are fewer
    degrees of freedom, ν/(1+s²+3/ν) in place of ν. Where the skewness is given as 0 this is Student's interval.
    Reference: Hall, On the removal of skewness by transformation, J. R. Stat. Soc. B 54 (1992).

    >>> [round(limit, 3) for limit in skewed_limits(1.0, 0.1, math.inf, 0.0)]
    [0.804, 1.196]
    >>> [round(limit, 3) for limit in skewed_limits(1.0, 0.1, math.inf, 0.4)]
    [0.852, 1.767]
    """
    if not error:
        return value, value
    below, above = errors_off(np.float64(skew), dof, level)
    return value - float(below) * error, value + float(above) * error


def signed_limits(value: float, error: float, dof: float, skew: float, level: float = 0.95) -> tuple[float, float]:
    """An interval for a mean of differences: on each side the wider of `skewed_limits` and Student's.

    Differences may be large to either side. Where a few are, those that came make mean and skewness agree in sign, and
    the corrected interval alone would exclude 0 twice as often as it should.

    >>> [round(limit, 3) for limit in signed_limits(1.0, 0.1, math.inf, 0.4)]
    [0.804, 1.767]
    """
    lows, highs = zip(*(skewed_limits(value, error, dof, each, level) for each in (skew, 0.0)), strict=True)
    return min(lows), max(highs)


def errors_off(skew: Any, dof: float, level: float) -> tuple[Any, Any]:
    """How many standard errors the limits of `skewed_limits` lie below and above the value, for every skewness."""
    skew = _SEEN * skew
    a = skew / 3
    flat = np.abs(a) < 1e-9
    t = student(0.5 + level / 2, dof / (1 + skew**2 + np.where(flat, 0.0, 3 / dof if dof else 0.0)))
    safe = np.where(flat, 1.0, a)
    below, above = (np.where(flat, u, (np.cbrt(1 + 3 * a * (u - skew / 6)) - 1) / safe) for u in (t, -t))
    return below, -above


def subset_mean(
    values: Tensor, population: int | None, *, differences: bool = False
) -> tuple[float | None, tuple[float, float] | None]:
    """Standard error and 95% limits of a mean over the population of which the values are a random subset.

    Of `differences`, which may be large to either side, the limits are `signed_limits`.

    None for the whole population, NaN for fewer than 30 values: the losses of 20 samples of a fitted network show too
    little of the rest for any interval to hold (docs/coverage.md).
    """
    count, mean = len(values), float(values.mean())
    if population is None or population <= count:
        return None, None
    if count < FEWEST:
        return math.nan, (math.nan, math.nan)
    share = math.sqrt(1 - count / population)
    error = float(standard_error(values.double())) * share
    limits = signed_limits if differences else skewed_limits
    return error, limits(mean, error, count - 1, mean_skewness(values) * share)


def share_limits(share: float, count: int, population: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval for a share of the population, of which a random subset was counted.

    It covers 95% or more, even for a share near 0 or 1, where shorter intervals fall short.

    >>> [f"{limit:.3f}" for limit in share_limits(1.0, 60, 10**9)]
    ['0.940', '1.000']
    """
    worth = count / (1 - count / population)  # the rest alone is unknown
    right = share * worth
    low = beta(0.025, right, worth - right + 1) if right > 0 else 0.0
    high = beta(0.975, right + 1, worth - right) if right < worth else 1.0
    return low, high


FEWEST = 30  # samples needed for a subset error to be stated
_SEEN = 1.25  # how much larger the skewness of a population is than that of a few draws of it
