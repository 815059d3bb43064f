"""How much noise in the parameters it takes to raise the error."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy.optimize import toms748
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.measures.registry import UNSEEN, register
from spiritlevel.measures.sampling import MORE, Sampling, kept
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.statistics.subsets import SubsetError, by_influences

_ALLOWED = 0.1  # rise of the error
_PAC_DRAWS = 10
_PAC_WIDTH = 0.0099  # of the final bracket of log σ


def _pac_bayes(setting: Setting, deviation: Callable[[float], Tensor | float], purpose: int) -> Estimate:
    """1/σ² on fixed draws: σ is doubled or halved until the rise crosses the limit, and the crossing enclosed to 1%.

    The error of log σ follows by the delta method, from the spread of the draws and the slope of the rise in log σ over
    the first bracket. `deviation` maps σ to the standard deviation of every parameter.
    """
    base = setting.wrong_at(setting.theta)
    seen: dict[float, Tensor] = {}

    def rises(sigma: float) -> Tensor:
        spread = deviation(sigma)

        def points(some: range) -> Tensor:
            return torch.stack([setting.theta + spread * setting.normal(index, purpose) for index in some])

        return setting.wrong_at_each(_PAC_DRAWS, points) - base

    def excess(log_sigma: float) -> float:
        """How far the mean rise is above what is allowed; never 0, so that the search ends on both sides of it."""
        sigma = math.exp(log_sigma)
        seen[log_sigma] = rises(sigma).mean(1)
        return float(seen[log_sigma].mean()) - _ALLOWED - 1e-9

    point = math.log(0.1)
    first = excess(point)
    step = math.log(2) if first < 0 else -math.log(2)
    for _ in range(24):
        before, point = point, point + step
        if excess(point) * first < 0:
            break
    else:
        raise InputError(
            f"the error never crosses the allowed rise of {_ALLOWED}, however {'large' if first < 0 else 'small'} the "
            "noise; the model's own error is too close to chance, or the network too fragile."
        )
    ends = sorted((before, point))  # the points themselves: point − step would round to another number
    slope = float(seen[ends[1]].mean() - seen[ends[0]].mean()) / math.log(2)
    toms748(excess, *ends, xtol=_PAC_WIDTH, rtol=1e-12, k=1)
    sigma = max(point for point, rises in seen.items() if float(rises.mean()) <= _ALLOWED + 1e-9)
    spread = float(seen[sigma].std()) / math.sqrt(_PAC_DRAWS)
    value = math.exp(-2 * sigma)
    of_samples = rises(math.exp(sigma)).mean(0)
    setting.kept[f"pac-bayes {purpose}"] = 2 * value / slope * of_samples  # more rise, less noise allowed
    return Estimate(
        value,
        2 * value * spread / slope,
        _PAC_DRAWS - 1,
        len(seen) * _PAC_DRAWS,
        setting.seed,
        tolerance=2 * _PAC_WIDTH * value,  # the crossing lies within the final bracket
        status="estimated",
        power=0.0,
    )


def _sampling(purpose: int) -> Sampling:
    """The error of a subset: limits of the logarithm, which the rises of the samples move."""
    values = kept(f"pac-bayes {purpose}")

    def limits(setting: Setting, value: float, population: int) -> SubsetError:
        found = by_influences(math.log(value), values(setting) / value, population)
        return found._replace(stderr=value * found.stderr, low=math.exp(found.low), high=math.exp(found.high))

    return Sampling("influence", values, limits=limits, least=MORE)


@register(
    "pac_bayes_flatness",
    "how little noise it takes to raise the error by 0.1",
    "1/σ², σ the largest standard deviation with E_{u~N(0,σ²I)} err(θ+u) − err(θ) ≤ 0.1",
    "Neyshabur et al. 2017, arXiv:1706.08947; Jiang et al. 2019, arXiv:1912.02178",
    family="curvature",
    worth="estimated",
    cost="forward",
    guide="curvature",
    passes=10 * _PAC_DRAWS,
    sampling=_sampling(3),
    in_shards=True,
    invariant_to=UNSEEN,
)
def _pac_bayes_flatness(setting: Setting) -> Estimate:
    return _pac_bayes(setting, lambda sigma: sigma, 3)


@register(
    "pac_bayes_magnitude",
    "how little relative noise it takes to raise the error by 0.1",
    "1/σ², σ the largest with u_i ~ N(0, σ²θ_i² + ε²), E err(θ+u) − err(θ) ≤ 0.1, ε = 1e-3",
    "Jiang, Neyshabur, Mobahi, Krishnan & Bengio 2019, arXiv:1912.02178",
    family="curvature",
    worth="estimated",
    cost="forward",
    guide="curvature in sizes",
    passes=10 * _PAC_DRAWS,
    sampling=_sampling(4),
    in_shards=True,
    invariant_to=frozenset({"permute_units"}),
)
def _pac_bayes_magnitude(setting: Setting) -> Estimate:
    return _pac_bayes(setting, lambda sigma: (sigma**2 * setting.theta.square() + 1e-6).sqrt(), 4)
