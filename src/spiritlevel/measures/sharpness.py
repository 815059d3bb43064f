"""How far perturbations of the parameters raise the loss."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, minimize
from torch import Tensor

from spiritlevel.measures.registry import DIAGONAL, UNSEEN, register
from spiritlevel.measures.sampling import MORE, PRODUCT, Sampling, bracket, end_sampling, kept, mean_of
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate

_DRAWS = 16  # random perturbations, each with its mirror image
_STEPS = 20  # of projected ascent
_GAIN = 1e-4  # relative gain of an ascent step; less ends it


def _ascent(setting: Setting, name: str, unit: Tensor, radius: float, norm: float) -> Estimate:
    """Maximum of L(θ + unit∘u) − L over ‖u‖ ≤ radius: projected ascent along the unit gradient, the best point seen.

    `norm` is 2 or infinity. At most 20 steps, until one gains less than 0.01%. The iteration knows only u, so scaling
    θ and `unit` alike changes no step.
    """
    base, slope = setting.start

    def uphill(gradient: Tensor) -> Tensor:
        moved = unit * gradient
        if norm == math.inf:
            return radius * moved.sign()
        return moved * (radius / length(moved))

    def length(moved: Tensor) -> float:  # in float64: the squares of a fitted network's gradient leave float32
        return max(float(torch.linalg.vector_norm(moved, dtype=torch.float64)), torch.finfo(moved.dtype).tiny)

    step = uphill(slope)
    if not bool(step.any()):  # a critical point: any direction will do
        step = uphill(setting.normal(0, 7) / unit.clamp_min(torch.finfo(unit.dtype).tiny) * (unit > 0))
    u, best, gradients, where = step, 0.0, 1, step
    for _ in range(_STEPS):
        gradients += 1
        value, gradient = setting.gradient_at(setting.theta + unit * u)
        if 0 < value - base <= best * (1 + _GAIN):
            break
        if value - base > best:
            best, where = value - base, u
        moved = u + uphill(gradient)
        u = moved.clamp(-radius, radius) if norm == math.inf else moved * min(1.0, radius / length(moved))
    else:
        value = setting.loss_at(setting.theta + unit * u)
    if value - base > best:
        best, where = value - base, u
    setting.along[name] = [unit * where]
    return Estimate(best, matvecs=gradients, seed=setting.seed, status="lower bound")


@register(
    "ball_sharpness",
    "largest rise of the loss that 20 steps of projected ascent find within a ball",
    "max_{‖δ‖₂≤ρ} L(θ+δ) − L, ρ = 0.05",
    "Foret, Kleiner, Mobahi & Neyshabur 2021, arXiv:2010.01412",
    family="curvature",
    worth="lower bound",
    cost="optimiser",
    guide="curvature",
    passes=50,
    sampling=bracket("ball_sharpness", lambda setting: _ball_sharpness(setting)),
    also_called=("sam",),
    invariant_to=UNSEEN,
)
def _ball_sharpness(setting: Setting) -> Estimate:
    return _ascent(setting, "ball_sharpness", torch.ones_like(setting.theta), 0.05, 2)


@register(
    "adaptive_sharpness_l2",
    "largest rise of the loss that 20 steps of projected ascent find within an ellipsoid with axes ρ|θ_i|",
    "max_{‖δ/|θ|‖₂≤ρ} L(θ+δ) − L, ρ = 0.5",
    "Kwon, Kim, Park & Choi 2021, arXiv:2102.11600",
    family="curvature",
    worth="lower bound",
    cost="optimiser",
    guide="curvature in sizes",
    passes=50,
    sampling=bracket("adaptive_sharpness_l2", lambda setting: _adaptive_sharpness_l2(setting)),
    also_called=("asam",),
    invariant_to=DIAGONAL,
)
def _adaptive_sharpness_l2(setting: Setting) -> Estimate:
    return _ascent(setting, "adaptive_sharpness_l2", setting.theta.abs(), 0.5, 2)


@register(
    "adaptive_sharpness_linf",
    "largest rise of the loss that 20 steps of projected ascent find when every weight may move by 1%",
    "max_{|δ_i|≤ρ|θ_i|} L(θ+δ) − L, ρ = 0.01",
    "Kwon et al. 2021, arXiv:2102.11600; Andriushchenko et al. 2023, arXiv:2302.07011",
    family="curvature",
    worth="lower bound",
    cost="optimiser",
    guide="curvature in sizes",
    passes=50,
    sampling=bracket("adaptive_sharpness_linf", lambda setting: _adaptive_sharpness_linf(setting)),
    invariant_to=DIAGONAL | {"split_units"},  # copies of a unit have equal slopes, and ascent moves them alike
)
def _adaptive_sharpness_linf(setting: Setting) -> Estimate:
    return _ascent(setting, "adaptive_sharpness_linf", setting.theta.abs(), 0.01, math.inf)


def _average(setting: Setting, name: str, spread: Tensor | float, purpose: int) -> Estimate:
    """E L(θ+δ) − L, δ = spread∘z, over normal z, each with its mirror image, which cancels the slope."""
    means, total = list[Tensor](), torch.zeros(setting.count, dtype=torch.float64)
    at_once = max(1, setting.at_once // 2) * setting.ranks.count
    for first in range(0, _DRAWS, at_once):

        def points(some: range, first: int = first) -> Tensor:  # a draw is followed by its mirror image
            deltas = {n: spread * setting.normal(n, purpose) for n in {first + place // 2 for place in some}}
            return torch.stack([setting.theta + (-1) ** place * deltas[first + place // 2] for place in some])

        there = setting.losses_at_each(2 * min(at_once, _DRAWS - first), points)
        rises = (there[0::2] + there[1::2]).div_(2).sub_(setting.losses)
        means.append(rises.mean(1))
        total += rises.sum(0)
    setting.kept[f"average {purpose}"] = total / _DRAWS
    setting.draws[name] = torch.cat(means)
    return Estimate.from_draws(setting.draws[name], matvecs=2 * _DRAWS, seed=setting.seed)


@register(
    "average_sharpness",
    "mean rise of the loss under normal noise on the parameters",
    "E_{δ~N(0,σ²I)} L(θ+δ) − L ≈ ½σ² Tr H, σ = 0.01 the standard deviation",
    "mathematics 8.4",
    family="curvature",
    worth="estimated",
    cost="forward",
    guide="curvature",
    passes=2 * _DRAWS + 1,
    sampling=mean_of(kept("average 1"), least=MORE),
    in_shards=True,
    invariant_to=UNSEEN,
)
def _average_sharpness(setting: Setting) -> Estimate:
    return _average(setting, "average_sharpness", 0.01, 1)


@register(
    "adaptive_sharpness_average",
    "mean rise of the loss when every weight gets 5% normal noise",
    "E L(θ+δ) − L, δ_i ~ N(0, ρ²θ_i²), ρ = 0.05",
    "Andriushchenko, Croce, Müller, Hein & Flammarion 2023, arXiv:2302.07011",
    family="curvature",
    worth="estimated",
    cost="forward",
    guide="curvature in sizes",
    passes=2 * _DRAWS + 1,
    sampling=mean_of(kept("average 2"), least=MORE),
    in_shards=True,
    invariant_to=DIAGONAL,
)
def _adaptive_sharpness_average(setting: Setting) -> Estimate:
    return _average(setting, "adaptive_sharpness_average", 0.05 * setting.theta.abs(), 2)


def _box(setting: Setting, name: str, epsilon: float, columns: int | None) -> Estimate:
    """Bounded L-BFGS in the coordinates of the box; the best point seen, which is inside.

    It starts at the corner that the gradient points to, which is far better than a random point unless the gradient is
    0.
    """
    base, slope = setting.start
    size, basis = setting.problem.size, None
    if columns is not None:
        generator = torch.Generator().manual_seed(setting.seed)
        basis = torch.linalg.qr(torch.randn(size, min(columns, size), generator=generator, dtype=torch.float64)).Q
        basis = basis.to(setting.theta)
    inner = setting.theta if basis is None else basis.T @ setting.theta
    half = epsilon * (inner.abs() + 1)
    best, evaluations, where = base, 0, torch.zeros_like(setting.theta)

    def outward(u: Tensor) -> Tensor:
        return half * u if basis is None else basis @ (half * u)

    def inward(gradient: Tensor) -> Tensor:
        return half * (gradient if basis is None else basis.T @ gradient)

    def negative(u: Any) -> tuple[float, Any]:
        nonlocal best, evaluations, where
        evaluations += 1
        delta = outward(torch.from_numpy(u).to(half))
        value, gradient = setting.gradient_at(setting.theta + delta)
        if value > best:
            best, where = value, delta
        return (base - value) / scale, -(inward(gradient).double() / scale).cpu().numpy()

    uphill, scale = inward(slope).double().cpu().numpy(), 1.0
    start = np.sign(uphill)
    if not np.any(start):
        generator = torch.Generator().manual_seed(setting.seed + 1)
        start = torch.rand(len(half), generator=generator, dtype=torch.float64).mul(2).sub(1).numpy()
        uphill = negative(start)[1]
    scale = max(float(np.abs(uphill).max()), float(torch.finfo(setting.problem.dtype).tiny))
    options = {"maxiter": 10, "maxfun": 30, "ftol": 0.0, "gtol": 0.0}
    minimize(negative, start, jac=True, bounds=Bounds(-1, 1), method="L-BFGS-B", options=options)
    setting.along[name] = [where]
    rise = 100 * (best - base) / (1 + base)
    return Estimate(rise, matvecs=evaluations, seed=setting.seed, status="lower bound")


_KESKAR = "Keskar, Mudigere, Nocedal, Smelyanskiy & Tang 2016, arXiv:1609.04836"


def _register_box(name: str, epsilon: float, columns: int | None) -> None:
    where = "" if columns is None else f" of a random subspace of {columns} dimensions"
    compute = functools.partial(_box, name=name, epsilon=epsilon, columns=columns)
    register(
        name,
        f"largest rise of the loss that bounded L-BFGS finds within a box{where} (ε = {epsilon:g}), in percent",
        f"100 (max_{{|y_i|≤ε(|(A⁺θ)_i|+1)}} L(θ+Ay) − L)/(1+L), ε = {epsilon:g}, "
        + ("A = I" if columns is None else f"A orthonormal with {columns} columns"),
        _KESKAR,
        family="curvature",
        worth="lower bound",
        cost="optimiser",
        guide="curvature",
        passes=50,
        sampling=bracket(name, compute, percent=True),
        invariant_to=frozenset() if columns else frozenset({"permute_units"}),  # a subspace depends on the order
    )(compute)


_register_box("box_sharpness", 1e-3, None)
_register_box("box_sharpness_narrow", 5e-4, None)
_register_box("box_sharpness_subspace", 1e-3, 100)


def _kappa(setting: Setting) -> float:
    """100 κ."""
    return 0.5e-4 * float((setting.theta.double().abs() + 1).square().sum()) / (1 + setting.start[0])


def _box_curvature_values(setting: Setting) -> Tensor:
    """The influence on κ, by the loss, and on λ₁."""
    curvatures, end = _OF_LARGEST.values, setting.spectrum.largest.value
    assert curvatures is not None
    return _kappa(setting) * (curvatures(setting) - end * setting.losses / (1 + setting.start[0]))


_OF_LARGEST = end_sampling(lambda setting: setting.spectrum, "largest")
_box_curvature_sampling = Sampling(
    "influence",
    _box_curvature_values,
    bias=lambda setting, population: _kappa(setting) * _OF_LARGEST.bias(setting, population),
    passes=2 * PRODUCT,
)


@register(
    "box_sharpness_curvature",
    "upper bound on box_sharpness by the largest eigenvalue, to second order at a critical point",
    "100 κλ₁, κ = ½ε² Σ(|θ_i|+1)²/(1+L), ε = 1e-3",
    "paper C, Eq. 2, in the form of mathematics 8.4",
    family="curvature",
    worth="to a tolerance",
    cost="matvecs",
    passes=73,
    sampling=_box_curvature_sampling,
    invariant_to=frozenset({"permute_units"}),
)
def _box_sharpness_curvature(setting: Setting) -> Estimate:
    return setting.spectrum.largest.scaled(_kappa(setting))
