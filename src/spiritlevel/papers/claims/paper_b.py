"""Paper B, the supplement of "Sharp minima can generalize for deep nets": its maps, theorems and counts as checks.

Notation: θ_k and b_k weights and biases of layer k ≤ K, n_k the number of its parameters, n = Σ n_k, H = ∇²L, r its
rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev

from spiritlevel.papers.claims.base import Claim, Finding, judge, registrar
from spiritlevel.papers.claims.tools import (
    Mlp,
    Rng,
    alive,
    cross_entropy,
    dense,
    diverges,
    error,
    exact,
    gauss_newton,
    generator,
    normal,
    rank,
)
from spiritlevel.papers.coordinates import bend, earth_mover, reversed_pairs, unbend

CLAIMS: list[Claim] = []
claim = registrar("B", CLAIMS)


# ---------------------------------------------------------------- A: radial transformations


class _Radii(NamedTuple):
    delta: float
    rho: float
    hat: float

    @property
    def swapped(self) -> _Radii:
        return _Radii(self.delta, self.hat, self.rho)


def psi(r: Tensor, radii: _Radii) -> Tensor:
    """ψ(r, r̂, δ, ρ) as printed: linear to (r̂, ρ), linear on to (δ, δ), the identity beyond."""
    delta, rho, hat = radii
    middle = (rho - delta) * (r - delta) / (hat - delta) + delta
    return torch.where(r > delta, r, torch.where(r <= hat, rho * r / hat, middle))


def psi_slope(r: Tensor, radii: _Radii) -> Tensor:
    """ψ′(r, r̂, δ, ρ) as printed."""
    delta, rho, hat = radii
    inner, middle = torch.full_like(r, rho / hat), torch.full_like(r, (rho - delta) / (hat - delta))
    return torch.where(r > delta, 1.0, torch.where(r <= hat, inner, middle))


def radial(theta: Tensor, centre: Tensor, radii: _Radii) -> Tensor:
    """g⁻¹(θ) = θ̂ + ψ(r)/r·(θ − θ̂), r = |θ − θ̂|; at θ̂, where the printed quotient is 0/0, its limit."""
    away = theta - centre
    square = away.square().sum()
    inner = square <= radii.hat**2
    r = torch.where(inner, 1.0, square).sqrt()
    return centre + torch.where(inner, radii.rho / radii.hat, psi(r, radii) / r) * away


def radial_jacobian(theta: Tensor, centre: Tensor, radii: _Radii, product: Callable[[Tensor], Tensor]) -> Tensor:
    """∇g⁻¹ as printed; `product` says what (θ − θ̂)ᵀ(θ − θ̂) means."""
    delta, rho, hat = radii
    away = theta - centre
    r = away.norm()
    eye = torch.eye(len(theta), dtype=torch.float64)
    matrix = psi_slope(r, radii) * eye
    if hat < r <= delta:
        constant = delta * (hat - rho) / (hat - delta)
        matrix = matrix - constant / r**3 * product(away) + constant / r * eye
    return matrix


def _radii(rng: Rng) -> _Radii:
    delta = float(rng.uniform(0.5, 3.0))
    rho, hat = (float(share) * delta for share in rng.uniform(0.1, 0.9, 2))
    return _Radii(delta, rho, hat)


def _shells(rng: Rng, radii: _Radii, centre: Tensor) -> list[Tensor]:
    """One point inside the small ball, one between, one outside."""
    found = []
    for low, high in ((0.0, radii.hat), (radii.hat, radii.delta), (radii.delta, 2 * radii.delta)):
        direction = normal(rng, len(centre))
        r = low + (high - low) * float(rng.uniform(0.1, 0.9))
        found.append(centre + r * direction / direction.norm())
    return found


@claim(
    "B-A-psi",
    "Section A",
    "ψ(r, r̂, δ, ρ), for all δ > 0 and ρ, r̂ ∈ ]0, δ[ [continuous and increasing: it maps ℝ₊ onto itself].",
    "Holds; it is not differentiable at r̂ and δ unless ρ = r̂.",
)
def _psi(seed: int) -> Finding:
    """Passes if ψ of 200 random triples rises on a fine grid, has no jump at r̂ and δ, and maps 0, r̂, δ to 0, ρ, δ."""
    rng = generator(seed)
    rising, jump, ends = True, 0.0, 0.0
    for _ in range(200):
        radii = _radii(rng)
        values = psi(torch.linspace(0, 1.5 * radii.delta, 400, dtype=torch.float64), radii)
        rising &= bool((values.diff() > 0).all())
        for kink in (radii.hat, radii.delta):
            below, above = torch.tensor([kink, math.nextafter(kink, math.inf)], dtype=torch.float64)
            jump = max(jump, error(psi(above, radii), psi(below, radii)))
        corners = torch.tensor([0.0, radii.hat, radii.delta], dtype=torch.float64)
        ends = max(ends, error(psi(corners, radii), [0.0, radii.rho, radii.delta]))
    return judge(
        {"rises": rising, "largest error at the kinks": jump, "largest error at 0, r̂ and δ": ends},
        "Continuous and increasing, hence a bijection of ℝ₊.",
        printed=rising and exact(jump, ends),
    )


def _total(r: Tensor, radii: _Radii) -> Tensor:
    return psi(r, radii).sum()


@claim("B-A-slope", "Section A", "ψ′(r, r̂, δ, ρ) = 1(r ∉ [0, δ]) + 1(r ∈ [0, r̂]) ρ/r̂ + 1(r ∈ ]r̂, δ]) (ρ−δ)/(r̂−δ).")
def _psi_slope(seed: int) -> Finding:
    """Passes if ψ′ is the derivative of ψ by automatic differentiation at 20 points for each of 100 triples."""
    rng = generator(seed)
    off = 0.0
    for _ in range(100):
        radii = _radii(rng)
        r = torch.from_numpy(rng.uniform(0, 2 * radii.delta, 20))
        off = max(off, error(psi_slope(r, radii), grad(partial(_total, radii=radii))(r)))
    return judge({"largest error": off}, "Right away from the kinks.", printed=exact(off))


@claim(
    "B-A-map",
    "Section A",
    "g⁻¹(θ) = ψ(|θ−θ̂|, r̂, δ, ρ)/|θ−θ̂| · (θ−θ̂) + θ̂ [an invertible map].",
    "Holds, with g⁻¹(θ̂) = θ̂ where the formula is 0/0. The inverse, not printed: swap r̂ and ρ.",
)
def _map(seed: int) -> Finding:
    """Passes if swapping r̂ and ρ undoes g⁻¹ at 300 points in all shells, and g⁻¹(θ̂ + t·v) → θ̂ as t → 0."""
    rng = generator(seed)
    off, limit = 0.0, 0.0
    for _ in range(100):
        radii, centre = _radii(rng), normal(rng, 5)
        for theta in _shells(rng, radii, centre):
            off = max(off, error(radial(radial(theta, centre, radii), centre, radii.swapped), theta))
        near = 1e-12 * normal(rng, 5)
        limit = max(limit, error(radial(centre + near, centre, radii), centre))
    return judge(
        {"error of the round trip": off, "error of the limit at θ̂": limit},
        "The inverse has the same form.",
        printed=exact(off, limit),
    )


@claim(
    "B-A-jacobian",
    "Section A",
    "(∇g⁻¹)(θ) = ψ′(r)I − 1(r ∈ ]r̂, δ]) δ(r̂−ρ)/(r³(r̂−δ)) (θ−θ̂)ᵀ(θ−θ̂) + 1(r ∈ ]r̂, δ]) δ(r̂−ρ)/(r(r̂−δ)) I.",
    "Holds with θ a row: (θ−θ̂)ᵀ(θ−θ̂) is the outer product. The determinant is ψ′(ψ/r)^{n−1}.",
)
def _jacobian(seed: int) -> Finding:
    """Passes if the formula, with an outer product, is the derivative at 90 points in all shells, to rounding."""
    rng = generator(seed)
    outer = scalar = determinant = 0.0
    for _ in range(30):
        radii, centre = _radii(rng), normal(rng, 5)
        for theta in _shells(rng, radii, centre):
            true = jacrev(partial(radial, centre=centre, radii=radii))(theta)
            outer = max(outer, error(radial_jacobian(theta, centre, radii, lambda v: torch.outer(v, v)), true))
            number = radial_jacobian(theta, centre, radii, lambda v: (v @ v) * torch.eye(5, dtype=torch.float64))
            scalar = max(scalar, error(number, true))
            r = (theta - centre).norm()
            predicted = psi_slope(r, radii) * (psi(r, radii) / r) ** 4
            determinant = max(determinant, error(torch.linalg.det(true), predicted))
    return judge(
        {"error, outer product": outer, "error, scalar product": scalar, "error of the determinant": determinant},
        "Right for row vectors.",
        printed=exact(outer, determinant),
    )


@claim(
    "B-A-local",
    "Section A, Figure 1",
    "These transformations are purely local: they only have an effect inside the ball B₂(θ̂, δ).",
)
def _local(seed: int) -> Finding:
    """Passes if 300 points outside the ball move by no more than rounding, and 300 inside move unless ρ = r̂."""
    rng = generator(seed)
    outside, inside = 0, 0
    for _ in range(300):
        radii, centre = _radii(rng), normal(rng, 5)
        inner, _, outer = _shells(rng, radii, centre)
        outside += int((radial(outer, centre, radii) - outer).abs().max() > 1e-14 * outer.norm())
        inside += int((radial(inner, centre, radii) - inner).norm() > 0)
    return judge({"moved outside": outside, "moved inside": inside}, "Local.", printed=outside == 0 and inside == 300)


def _bowl(rng: Rng, centre: Tensor, size: float) -> Callable[[Tensor], Tensor]:
    """A smooth function, not quadratic, with a minimum of value 0 at `centre`."""
    factor = normal(rng, len(centre), len(centre)) * math.sqrt(size)
    return lambda theta: (factor @ (theta - centre)).square().sum() + size * (theta - centre).pow(4).sum()


def _around(loss: Callable[[Tensor], Tensor], centre: Tensor, radii: _Radii) -> Callable[[Tensor], Tensor]:
    """L∘g."""
    return lambda theta: loss(radial(theta, centre, radii.swapped))


@claim(
    "B-A-hessian",
    "Section A",
    "Radial transformations affect the relative flatness of minima, in terms of the spectral norm of the Hessian.",
    "At a critical point θ̂: ∇²(L∘g) = (r̂/ρ)² ∇²L.",
)
def _radial_hessian(seed: int) -> Finding:
    """Passes if the Hessian of L∘g at the minimum is (r̂/ρ)² times that of L, to rounding, for 10 functions."""
    rng = generator(seed)
    off = 0.0
    for _ in range(10):
        radii, centre = _radii(rng), normal(rng, 5)
        loss = _bowl(rng, centre, 1.0)
        moved = dense(_around(loss, centre, radii), centre)
        off = max(off, error(moved, (radii.hat / radii.rho) ** 2 * dense(loss, centre)))
    return judge({"largest error": off}, "One number, r̂/ρ, sets the sharpness.", printed=exact(off))


@claim(
    "B-A-ranking",
    "Section A",
    "Through these transformations, you can arbitrarily perturb the ranking between several minima in terms of "
    "flatness.",
)
def _ranking(seed: int) -> Finding:
    """Passes if every order of three minima of one function, by spectral norm, is reached by maps around each.

    The losses at the minima must not change.
    """
    rng = generator(seed)
    centres = [torch.tensor([10.0 * k, 0.0, 0.0], dtype=torch.float64) for k in range(3)]
    bowls = [_bowl(rng, centre, size) for centre, size in zip(centres, (1.0, 3.0, 9.0), strict=True)]

    def loss(theta: Tensor) -> Tensor:
        return torch.stack([bowl(theta) for bowl in bowls]).amin()

    plain = [float(torch.linalg.matrix_norm(dense(loss, centre), 2)) for centre in centres]
    reached, values = set(), []
    for order in itertools.permutations(range(3)):
        found = []
        for k, centre in enumerate(centres):
            wanted = 10.0 ** order.index(k) / plain[k]  # the factor (r̂/ρ)² that makes its norm 1, 10 or 100
            ratio = math.sqrt(wanted)
            radii = _Radii(1.0, 0.5 / max(ratio, 1.0), 0.5 * min(ratio, 1.0))

            moved = _around(loss, centre, radii)
            values.append(float(moved(centre)))
            found.append(float(torch.linalg.matrix_norm(dense(moved, centre), 2)))
        reached.add(tuple(int(k) for k in np.argsort(found)))
    return judge(
        {"orders reached": len(reached), "of": 6, "largest loss at a minimum": max(values)},
        "All six orders of three minima, at the same losses.",
        printed=len(reached) == 6 and max(values) == 0,
    )


# ---------------------------------------------------------------- B: rescaling with biases


def _alphas(rng: Rng, depth: int) -> list[float]:
    """Positive factors, from 0.2 to 5, whose product is 1."""
    logs = rng.uniform(-1.0, 1.0, depth)
    return [float(value) for value in np.exp(logs - logs.mean())]


@claim(
    "B-B-one",
    "Section B, one hidden layer",
    "φ_rect(x·θ₁ + b₁)·θ₂ + b₂ = φ_rect(x·αθ₁ + αb₁)·α⁻¹θ₂ + b₂.",
)
def _one_hidden(seed: int) -> Finding:
    """Passes if the outputs of 50 inputs are equal to rounding for α from 1e-3 to 1e3."""
    rng = generator(seed)
    net, x = Mlp((4, 6, 3)), normal(rng, 50, 4)
    theta = net.draw(rng)
    off = max(
        error(net(theta * net.factors([alpha, 1 / alpha], [alpha, 1]), x), net(theta, x)) for alpha in (1e-3, 0.5, 1e3)
    )
    return judge({"largest error": off}, "The function is the same.", printed=exact(off))


@claim(
    "B-B-deep",
    "Section B, K layers",
    "With Π α_k = 1: θ_k → α_kθ_k, b₁ → α₁b₁, …, b_{K−1} → Π_{k<K} α_k · b_{K−1}, b_K → b_K.",
    "Holds; the rule behind it is b_k → (Π_{j≤k} α_j) b_k. The product is of the α alone.",
)
def _deep(seed: int) -> Finding:
    """Passes if the outputs of a network of 5 layers are equal to rounding; scaling each bias by α_k must not do."""
    rng = generator(seed)
    net, x = Mlp((4, 5, 5, 5, 5, 3)), normal(rng, 50, 4)
    theta, alphas = net.draw(rng), _alphas(rng, 5)
    products = [float(p) for p in np.cumprod(alphas)]
    off = error(net(theta * net.factors(alphas, products), x), net(theta, x))
    naive = error(net(theta * net.factors(alphas), x), net(theta, x))
    return judge(
        {"error": off, "error with b_k → α_k b_k": naive},
        "Each bias takes the product of all factors up to its layer.",
        printed=exact(off) and not exact(naive),
    )


def _growing(net: Mlp, exponents: tuple[int, ...]) -> Tensor:
    """A mask of what grows in curvature with β if α_k = β^{a_k}: weights with a_k < 0, biases with Σ_{j≤k} a_j < 0."""
    sums = np.cumsum(exponents)
    return torch.cat(
        [
            torch.full((n,), bool(a < 0))
            for (weights, biases), first, second in zip(net.counts, exponents, sums, strict=True)
            for n, a in ((weights, first), (biases, second))
        ]
    )


def _reached(net: Mlp, root: Tensor) -> int:
    """The most eigenvalues that diverge along any α_k = β^{a_k}, a_k from −2 to 2, Σ a_k = 0."""
    choices = (a for a in itertools.product(range(-2, 3), repeat=net.depth) if sum(a) == 0)
    masks = {tuple(_growing(net, a).tolist()) for a in choices}
    return max(rank(root[:, torch.tensor(mask)]) for mask in masks)


@claim(
    "B-B-fewer",
    "Section B",
    "This can decrease the amount of eigenvalues of the Hessian that can be arbitrarily influenced.",
    "Holds: the Hessian's factors are 1/α_k for θ_k and 1/Π_{j≤k} α_j for b_k, so b_K's is always 1.",
)
def _fewer(seed: int) -> Finding:
    """Passes if a network with biases has fewer diverging eigenvalues, over all exponents tried, than r − min n_k.

    Also required: the Hessian's factors are the stated ones, to rounding.
    """
    rng = generator(seed)
    net, x = Mlp((1, 3, 3, 12)), normal(rng, 120, 1)
    theta = alive(net, rng, x)
    root = gauss_newton(net.at(x), theta)
    alphas = _alphas(rng, 3)
    factors = net.factors(alphas, [float(p) for p in np.cumprod(alphas)])
    off = error(gauss_newton(net.at(x), theta * factors), root / factors)
    total, smallest = rank(root), min(sum(counts) for counts in net.counts)
    reached = _reached(net, root)
    return judge(
        {"rank": total, "r − min n_k": total - smallest, "diverging at most": reached, "error of the factors": off},
        f"{reached} eigenvalues can be made large, {total - smallest} could if biases scaled with their layers.",
        printed=reached < total - smallest and exact(off),
    )


# ---------------------------------------------------------------- C: no Lipschitz constant


def _gradient_along(net: Mlp, theta: Tensor, x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
    return grad(net.loss(x, y))(theta * factors)


@claim(
    "B-C-gradient",
    "Section C, proof of Theorem 1",
    "(∇L)(αθ₁, α⁻¹θ₂) = [α⁻¹(∇_θ₁L)(θ₁, θ₂), α(∇_θ₂L)(θ₁, θ₂)].",
)
def _gradient(seed: int) -> Finding:
    """Passes if the gradient at the rescaled parameters is the rescaled gradient, to rounding, α from 1e-3 to 1e3."""
    rng = generator(seed)
    net, x, y = Mlp((4, 6, 3), bias=False), normal(rng, 20, 4), torch.from_numpy(rng.integers(0, 3, 20))
    theta = net.draw(rng)
    here = _gradient_along(net, theta, x, y, torch.ones(net.size, dtype=torch.float64))
    off = 0.0
    for alpha in (1e-3, 0.1, 10.0, 1e3):
        factors = net.factors([alpha, 1 / alpha])
        off = max(off, error(_gradient_along(net, theta, x, y, factors), here / factors))
    return judge({"largest error": off}, "Gradients scale inversely.", printed=exact(off))


@claim(
    "B-C-theorem",
    "Theorem 1",
    "For y = φ_rect(x·θ₁)·θ₂, if L is not constant, it is not Lipschitz continuous.",
    "Holds; 'without loss of generality' means α → 0 if ∇₁L ≠ 0 and α → ∞ if ∇₂L ≠ 0.",
)
def _theorem_one(seed: int) -> Finding:
    """Passes if |∇L(αθ₁, θ₂/α)| diverges at constant loss, as √(α⁻²|∇₁|² + α²|∇₂|²) says to rounding, at both ends."""
    rng = generator(seed)
    net, x, y = Mlp((4, 6, 3), bias=False), normal(rng, 20, 4), torch.from_numpy(rng.integers(0, 3, 20))
    theta = net.draw(rng)
    first, second = _gradient_along(net, theta, x, y, net.factors([1, 1])).split([24, 18])
    off, loss = 0.0, 0.0
    sizes: dict[int, list[float]] = {}
    for end in (-1, 1):
        sizes[end] = []
        for power in (1, 2, 3, 4):
            alpha = 10.0 ** (end * power)
            factors = net.factors([alpha, 1 / alpha])
            size = float(_gradient_along(net, theta, x, y, factors).norm())
            off = max(off, error(size, (first.square().sum() / alpha**2 + second.square().sum() * alpha**2).sqrt()))
            loss = max(loss, error(cross_entropy(net(theta * factors, x), y), cross_entropy(net(theta, x), y)))
            sizes[end].append(size)
    return judge(
        {"gradient at α = 0.1, 0.01, 0.001, 0.0001": sizes[-1], "error of the formula": off, "error of the loss": loss},
        "The gradient is unbounded at constant loss.",
        printed=exact(off, loss) and all(diverges(values) for values in sizes.values()),
    )


@claim(
    "B-C-deeper",
    "Section C",
    "This result can be generalized to several other models containing a one-hidden layer rectified neural network, "
    "including deeper rectified networks.",
)
def _deeper(seed: int) -> Finding:
    """Passes if the gradient diverges at constant loss when any two neighbouring layers are rescaled.

    In networks of 3 to 5 layers, with and without biases.
    """
    rng = generator(seed)
    paths = failed = 0
    loss = 0.0
    for depth in (3, 4, 5):
        for bias in (False, True):
            net, x = Mlp((4, *[5] * (depth - 1), 3), bias=bias), normal(rng, 40, 4)
            theta, y = alive(net, rng, x), torch.from_numpy(rng.integers(0, 3, 40))
            for layer in range(depth - 1):
                sizes = []
                for alpha in (1e-1, 1e-3, 1e-5):
                    weights = [1.0] * depth
                    weights[layer], weights[layer + 1] = alpha, 1 / alpha
                    factors = net.factors(weights, [float(p) for p in np.cumprod(weights)])
                    sizes.append(float(_gradient_along(net, theta, x, y, factors).norm()))
                    loss = max(loss, error(cross_entropy(net(theta * factors, x), y), cross_entropy(net(theta, x), y)))
                paths += 1
                failed += int(not diverges(sizes))
    return judge(
        {"paths": paths, "paths without divergence": failed, "largest error of the loss": loss},
        "Every pair of neighbouring layers will do.",
        printed=failed == 0 and loss < 1e-8,
    )


# ---------------------------------------------------------------- D: the representation of the inputs


def _maps(reference: Tensor) -> dict[str, Tensor]:
    """Standardization and whitening of the reference points as matrices (shifts do not matter to differences)."""
    standard = torch.diag(1 / reference.std(0))
    covariance = torch.cov(reference.T)
    values, vectors = torch.linalg.eigh(covariance)
    return {"standardization": standard, "whitening": torch.diag(values.rsqrt()) @ vectors.T}


def _cloud(rng: Rng, count: int) -> Tensor:
    """Points in three dimensions of very different spreads, mixed a little."""
    return (
        normal(rng, count, 3)
        @ torch.diag(torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64))
        @ (torch.eye(3, dtype=torch.float64) + 0.02 * normal(rng, 3, 3))
    )


@claim(
    "B-D-mse",
    "Section D",
    "Metrics relying on the Euclidean metric like mean square error will rank very differently models depending on the "
    "input representation; feature standardization or whitening can change the metric significantly.",
)
def _mean_square_error(seed: int) -> Finding:
    """Passes if standardization and whitening each reverse more than a twentieth of the pairs of 30 models."""
    rng = generator(seed)
    points = _cloud(rng, 200)
    noise = [normal(rng, 200, 3) * torch.exp(normal(rng, 3)) for _ in range(30)]  # what each model gets wrong
    scores = [float(part.square().sum(1).mean()) for part in noise]
    flips = {}
    for name, matrix in _maps(points).items():
        moved = [float((part @ matrix.T).square().sum(1).mean()) for part in noise]
        flips[name] = reversed_pairs(scores, moved)
    return judge(
        {f"pairs reversed by {name}": share for name, share in flips.items()},
        "The ranking depends on the coordinates.",
        printed=min(flips.values()) > 0.05,
    )


@claim(
    "B-D-earth",
    "Section D",
    "Metrics relying on the Euclidean metric like Earth-mover distance will rank very differently models depending on "
    "the input representation.",
)
def _earth_mover_distance(seed: int) -> Finding:
    """Passes if standardization and whitening each reverse more than a twentieth of the pairs of 30 models."""
    rng = generator(seed)
    points = _cloud(rng, 60)
    samples = [points + 0.1 * normal(rng, 60, 3) + normal(rng, 3) * torch.exp(normal(rng, 3)) for _ in range(30)]
    scores = [earth_mover(points, sample) for sample in samples]
    flips = {}
    for name, matrix in _maps(points).items():
        moved = [earth_mover(points @ matrix.T, sample @ matrix.T) for sample in samples]
        flips[name] = reversed_pairs(scores, moved)
    return judge(
        {f"pairs reversed by {name}": share for name, share in flips.items()},
        "The ranking depends on the coordinates.",
        printed=min(flips.values()) > 0.05,
    )


class _Mixture(NamedTuple):
    """A density on the line: two normal components."""

    means: Tensor
    spreads: Tensor
    weights: Tensor

    def log_density(self, x: Tensor) -> Tensor:
        parts = -0.5 * ((x[:, None] - self.means) / self.spreads).square() - self.spreads.log() + self.weights.log()
        return torch.logsumexp(parts, 1) - 0.5 * math.log(2 * math.pi)

    def distribution(self, x: Tensor) -> Tensor:
        return torch.special.ndtr((x[:, None] - self.means) / self.spreads) @ self.weights


def _mixture(rng: Rng) -> _Mixture:
    share = float(rng.uniform(0.3, 0.7))
    weights = torch.tensor([share, 1 - share], dtype=torch.float64)
    return _Mixture(normal(rng, 2), torch.from_numpy(rng.uniform(0.6, 1.4, 2)), weights)


F_DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "Kullback–Leibler": lambda t: t * t.log(),
    "reverse Kullback–Leibler": lambda t: -t.log(),
    "squared Hellinger": lambda t: (t.sqrt() - 1).square(),
    "total variation": lambda t: (t - 1).abs() / 2,
    "Jensen–Shannon": lambda t: t * (2 * t / (1 + t)).log() + (2 / (1 + t)).log(),
}


@claim(
    "B-D-divergence",
    "Section D",
    "Ranking resulting from metrics like f-divergence are not perturbed by bijective transformations because of the "
    "change of variables formula.",
)
def _f_divergence(seed: int) -> Finding:
    """Passes if five f-divergences of 6 models from a target keep their values to 1e-5 and order under u = x + x³/3.

    Each side is integrated in its own coordinates, on its own grid.
    """
    rng = generator(seed)
    target, candidates = _mixture(rng), [_mixture(rng) for _ in range(6)]
    x = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    u = torch.sinh(torch.linspace(-7.5, 7.5, 20_001, dtype=torch.float64))  # its own grid, in the new coordinates
    back = unbend(u)
    stretch = (1 + back.square()).log()  # the logarithm of du/dx
    off, flips = 0.0, 0.0
    for function in F_DIVERGENCES.values():
        values = []
        for grid, logs in (
            (x, [m.log_density(x) for m in (target, *candidates)]),
            (u, [m.log_density(back) - stretch for m in (target, *candidates)]),
        ):
            base = logs[0].exp()
            terms = [base * function((log - logs[0]).clamp(-60, 60).exp()) for log in logs[1:]]
            values.append(torch.stack([torch.trapezoid(term, grid) for term in terms]))
        off = max(off, error(values[1], values[0]))
        flips = max(flips, reversed_pairs(values[0].tolist(), values[1].tolist()))
    return judge(
        {"largest change": off, "pairs reversed": flips},
        "Ratios of densities do not depend on coordinates.",
        printed=off < 1e-5 and flips == 0,
    )


@claim(
    "B-D-likelihood",
    "Section D",
    "Ranking resulting from metrics like log-likelihood are not perturbed by bijective transformations because of the "
    "change of variables formula.",
    "Holds: every model's log-likelihood changes by the same number, the mean log-determinant of the Jacobian.",
)
def _log_likelihood(seed: int) -> Finding:
    """Passes if the log-likelihoods of 20 models at 200 points change by one number, to rounding, under u = x + x³/3.

    The density in u is the derivative of the distribution function there, P(X ≤ x(u)): the formula is not used. The
    number must be minus the mean of log du/dx.
    """
    rng = generator(seed)
    points = normal(rng, 200)
    candidates = [_mixture(rng) for _ in range(20)]
    u = bend(points)
    before = torch.stack([model.log_density(points).mean() for model in candidates])
    densities = [grad(partial(_total_probability, model=model))(u) for model in candidates]
    shift = torch.stack([density.log().mean() for density in densities]) - before
    off = error(shift, -(1 + points.square()).log().mean().expand(20))
    flips = reversed_pairs(before.tolist(), (before + shift).tolist())
    return judge(
        {"common shift": shift.mean(), "largest error of the shift": off, "pairs reversed": flips},
        "All models shift alike.",
        printed=exact(off) and flips == 0,
    )


def _total_probability(u: Tensor, model: _Mixture) -> Tensor:
    """Σ P(X ≤ x(u)) over the points: its derivative by one of them is the density of u there."""
    return model.distribution(unbend(u)).sum()


# ---------------------------------------------------------------- E: the whole spectrum


@claim(
    "B-E-map",
    "Section E",
    "T_α: (θ_k)_{k≤K} ↦ (α_kθ_k)_{k∈K} with Π_{k=1}^K α_k = 1 [observationally equivalent].",
    "(α_kθ_k)_{k≤K}.",
)
def _index_set(seed: int) -> Finding:
    """Passes if the outputs are unchanged to rounding; as printed, with the number K as the set {0, …, K−1}."""
    rng = generator(seed)
    depth = 4
    net, x = Mlp((4, 5, 5, 5, 3), bias=False), normal(rng, 30, 4)
    theta = net.draw(rng)
    alphas = [2.0, 3.0, 0.5, 1 / 3]
    errors = {}
    for name, indices in (("k ∈ K", range(depth)), ("k ≤ K", range(1, depth + 1))):
        weights = [alphas[k - 1] if k in indices else 1.0 for k in range(1, depth + 1)]
        errors[name] = error(net(theta * net.factors(weights), x), net(theta, x))
    return judge(
        {f"error with {name}": value for name, value in errors.items()},
        "K is a number, not a set; as a set of numbers it misses the last layer.",
        printed=exact(errors["k ∈ K"]),
        mended=exact(errors["k ≤ K"]),
    )


@claim(
    "B-E-gradient",
    "Section E",
    "(∇L)(T_α(θ)) = (∇L)(θ) D_α, D_α = diag(α_k⁻¹ I_{n_k}).",
    "Holds, with n_k the number of parameters of layer k.",
)
def _gradient_rule(seed: int) -> Finding:
    """Passes if the gradient obeys the rule to rounding in a network of 3 layers; with α for α⁻¹ it must not."""
    rng = generator(seed)
    net, x, y = Mlp((4, 5, 5, 3), bias=False), normal(rng, 20, 4), torch.from_numpy(rng.integers(0, 3, 20))
    theta, factors = net.draw(rng), net.factors(_alphas(rng, 3))
    here = _gradient_along(net, theta, x, y, torch.ones_like(theta))
    there = _gradient_along(net, theta, x, y, factors)
    off, other = error(there, here / factors), error(there, here * factors)
    return judge(
        {"error": off, "error with α for α⁻¹": other}, "α⁻¹ is right.", printed=exact(off) and not exact(other)
    )


@claim("B-E-hessian", "Section E", "(∇²L)(T_α(θ)) = D_α (∇²L)(θ) D_α.")
def _hessian_rule(seed: int) -> Finding:
    """Passes if dense Hessians obey the rule to rounding in a network of 3 layers; with α for α⁻¹ they must not."""
    rng = generator(seed)
    net, x, y = Mlp((4, 5, 5, 3), bias=False), normal(rng, 20, 4), torch.from_numpy(rng.integers(0, 3, 20))
    theta, factors = net.draw(rng), net.factors(_alphas(rng, 3))
    here, there = (dense(net.loss(x, y), point) for point in (theta, theta * factors))
    scale = torch.outer(factors, factors)
    off, other = error(there, here / scale), error(there, here * scale)
    return judge(
        {"error": off, "error with α for α⁻¹": other}, "α⁻¹ is right.", printed=exact(off) and not exact(other)
    )


@claim(
    "B-E-singular",
    "Section E, Definition 1",
    "If A is symmetric positive semi-definite, λ(A) [the sorted singular values] is also the vector of its sorted "
    "eigenvalues.",
)
def _singular(seed: int) -> Finding:
    """Passes if singular values and eigenvalues of 20 random semi-definite matrices agree to rounding."""
    rng = generator(seed)
    off = 0.0
    for _ in range(20):
        factor = normal(rng, 5, 8)
        matrix = factor.T @ factor
        off = max(off, error(torch.linalg.svdvals(matrix), torch.linalg.eigvalsh(matrix).flip(0)))
    return judge({"largest error": off}, "They agree.", printed=exact(off))


class _Minimum(NamedTuple):
    """A zero-loss minimum of ½‖φ − y‖² of a rectified network, and the square root of the Hessian there."""

    net: Mlp
    root: Tensor

    @property
    def rank(self) -> int:
        return rank(self.root)

    @property
    def sizes(self) -> list[int]:
        return [sum(counts) for counts in self.net.counts]

    def stretched(self, layer: int, beta: float) -> Tensor:
        """The root at the proof's α: layer `layer` times β^{K−1}, all others times 1/β."""
        depth = self.net.depth
        factors = self.net.factors([beta ** (depth - 1) if k == layer else 1 / beta for k in range(1, depth + 1)])
        return self.root / factors


THEOREM_NETS = ((3, 4, 4, 1), (3, 4, 4, 3), (6, 4, 3), (4, 3, 3, 6), (2, 5, 5, 2))


def _minimum(rng: Rng, sizes: tuple[int, ...], points: int = 60) -> _Minimum:
    net, x = Mlp(sizes, bias=False), normal(rng, points, sizes[0])
    return _Minimum(net, gauss_newton(net.at(x), alive(net, rng, x)))


def _above(root: Tensor, level: float) -> int:
    return int((torch.linalg.svdvals(root).square() > level).sum())


def _bound(minimum: _Minimum) -> int:
    """What Theorem 2 promises: r − min_k n_k."""
    return minimum.rank - min(minimum.sizes)


@claim(
    "B-E-theorem",
    "Theorem 2",
    "At a minimum with r = rank ∇²L, for all M > 0 there is an α > 0 such that (r − min_k n_k) eigenvalues are greater "
    "than M.",
    "Holds, and is conservative: exactly rank(H without layer k) eigenvalues diverge, the others go to 0. With n_k "
    "read as a width it would be false.",
)
def _theorem_two(seed: int) -> Finding:
    """Passes if at zero-loss minima of five networks at least r − min n_k eigenvalues exceed M = 10⁶.

    Also required: their number is the rank of H without the enlarged layer, and at least once below r − min width.
    """
    rng = generator(seed)
    table, enough, sharp, narrow = [], True, True, False
    for sizes in THEOREM_NETS:
        minimum = _minimum(rng, sizes)
        layer = 1 + int(np.argmin(minimum.sizes))
        level = 1e6
        smallest = float(torch.linalg.svdvals(minimum.root)[minimum.rank - 1]) ** 2
        kept = minimum.root[:, ~minimum.net.where(layer)]
        floor = float(torch.linalg.svdvals(kept)[rank(kept) - 1]) ** 2
        count = _above(minimum.stretched(layer, 2 * math.sqrt(level / min(smallest, floor))), level)
        table.append([minimum.rank, _bound(minimum), count])
        enough &= count >= _bound(minimum)
        sharp &= count == rank(kept)
        narrow |= count < minimum.rank - min(sizes[1:])
    return judge(
        {f"{'-'.join(map(str, s))}: r, r − min n_k, reached": row for s, row in zip(THEOREM_NETS, table, strict=True)},
        "More eigenvalues diverge than the theorem promises.",
        printed=enough and sharp and narrow,
    )


@claim(
    "B-E-horn",
    "Section E, proof of Theorem 2",
    "For all i ≤ n, j ≤ n − n_K: λ_{i+j−n}(∇²L · D_α²) ≥ λ_i(∇²L) β².",
    "Holds; the same is true of D H D, which is the matrix that is meant: λ was defined by singular values, and those "
    "of H·D² are not the eigenvalues of D H D.",
)
def _horn(seed: int) -> Finding:
    """Passes if no pair (i, j) violates it, for H·D² and for D H D, in 20 random semi-definite matrices.

    Also shown: how far the singular values of H·D² are from the eigenvalues of D H D.
    """
    rng = generator(seed)
    n, last, depth, beta = 12, 4, 3, 2.5
    violations = 0
    apart = 0.0
    factors = torch.cat([torch.full((n - last,), beta), torch.full((last,), beta ** (1 - depth))]).double()
    for _ in range(20):
        half = normal(rng, 9, n)
        matrix = half.T @ half
        base = torch.linalg.svdvals(matrix)
        product = torch.linalg.svdvals(matrix * factors.square())
        middle = torch.linalg.eigvalsh(matrix * torch.outer(factors, factors)).flip(0)
        apart = max(apart, error(product, middle))
        for i, j in itertools.product(range(1, n + 1), range(1, n - last + 1)):
            if i + j > n:
                least = base[i - 1] * beta**2 - 1e-9 * product[0]
                violations += int(product[i + j - n - 1] < least) + int(middle[i + j - n - 1] < least)
    return judge(
        {"violations": violations, "distance of the two spectra": apart},
        "Both inequalities are true, for different numbers.",
        printed=violations == 0,
    )


@claim(
    "B-E-beta",
    "Section E, proof of Theorem 2",
    "By choosing β > √(M/λ_r(∇²L)), λ_i ≥ λ_r β² > M for all i ≤ r − n_K.",
    "Holds, for β < 1 too.",
)
def _beta(seed: int) -> Finding:
    """Passes if at least r − min n_k eigenvalues exceed M at β = 1.01·√(M/λ_r), for M from 1e-6 λ_r to 1e6 λ_r."""
    rng = generator(seed)
    cases = failed = 0
    for sizes in THEOREM_NETS:
        minimum = _minimum(rng, sizes)
        layer = 1 + int(np.argmin(minimum.sizes))
        smallest = float(torch.linalg.svdvals(minimum.root)[minimum.rank - 1]) ** 2
        for ratio in (1e-6, 0.3, 1.0, 1e3, 1e6):
            count = _above(minimum.stretched(layer, 1.01 * math.sqrt(ratio)), ratio * smallest)
            cases += 1
            failed += int(count < _bound(minimum))
    return judge({"cases": cases, "cases with too few": failed}, "Any such β does.", printed=failed == 0)


GRID = tuple(itertools.product((2, 4, 6), (2, 4, 8)))  # depth, width
DRAWS = {2: 40, 4: 12, 8: 3}  # by width: narrow networks vary more, and cost less


class _Share(NamedTuple):
    """The best of several minima of one shape, as shares of the number of parameters."""

    promised: float  # (r − min n_k)/n
    reached: float  # eigenvalues that diverge when the best layer is enlarged
    cap: float  # what the rescaling of every hidden unit leaves of the promise


def _share(rng: Rng, depth: int, width: int, *, bias: bool, points: int) -> _Share:
    net = Mlp((3, *[width] * (depth - 1), 3), bias=bias)
    smallest = min(sum(counts) for counts in net.counts)
    cap = net.size - (depth - 1) * width - smallest
    patterns = [tuple(depth - 1 if k == layer else -1 for k in range(depth)) for layer in range(depth)]
    promised = reached = 0
    for _ in range(DRAWS[width]):
        x = normal(rng, points, 3)
        root = torch.linalg.qr(gauss_newton(net.at(x), alive(net, rng, x)), mode="r").R  # the same H, fewer rows
        promised = max(promised, rank(root) - smallest)
        reached = max(reached, *(rank(root[:, _growing(net, pattern)]) for pattern in patterns))
        if promised == cap:
            break
    return _Share(promised / net.size, reached / net.size, cap / net.size)


def _table(shares: dict[tuple[int, int], _Share]) -> dict[str, Any]:
    rows = {f"{depth}×{width}": [share.promised, share.reached] for (depth, width), share in shares.items()}
    return {"at depth×width": "(r − min n_k)/n and diverging eigenvalues/n", **rows}


@claim(
    "B-E-thin",
    "Section E, last paragraph",
    "One could conjecture that (r − min_k n_k) can be high for thin and deep neural networks, resulting in a majority "
    "of large eigenvalues.",
    "Depth helps, thinness does not: every hidden unit costs one eigenvalue (rescaling), which at width 2 leaves about "
    "a half of them, and more at larger widths, as long as there are more data than parameters. (The eigenvalues that "
    "do diverge are more than r − min n_k, and a majority from depth 4 on.)",
)
def _thin(seed: int) -> Finding:
    """Printed: (r − min n_k)/n > ½ for depths 4 and 6 and widths 2, 4 and 8, without biases. Condition: width ≥ 4.

    Each is the best of several zero-loss minima. Also required: at width 8 the share collapses where parameters
    outnumber the data.
    """
    rng = generator(seed)
    shares = {(depth, width): _share(rng, depth, width, bias=False, points=200) for depth, width in GRID}
    crowded = _share(rng, 6, 8, bias=False, points=15).promised
    majority = {shape: share.promised > 0.5 for shape, share in shares.items() if shape[0] > 2}
    return judge(
        {**_table(shares), "6×8, only 15 points: (r − min n_k)/n": crowded},
        "The share grows with depth and width; at width 2, with 3 inputs and outputs, it cannot exceed a half.",
        printed=all(majority.values()),
        within=all(passed for (_, width), passed in majority.items() if width >= 4) and crowded < 0.25,
    )


@claim(
    "B-E-biases",
    "Section E, last paragraph, with the biases of section B",
    "(r − min_k n_k) can be high for thin and deep neural networks, resulting in a majority of large eigenvalues.",
    "Holds with biases, for thin networks too, and more so for wide ones; networks of two layers have no majority.",
)
def _thin_with_biases(seed: int) -> Finding:
    """Passes if (r − min n_k)/n > ½ for depths 4 and 6 and widths 2, 4 and 8, with biases, the best of several minima.

    Also required: a majority of eigenvalues diverges along one of the α that enlarge one layer.
    """
    rng = generator(seed)
    shares = {(depth, width): _share(rng, depth, width, bias=True, points=200) for depth, width in GRID}
    deep = [share for (depth, _), share in shares.items() if depth > 2]
    return judge(
        _table(shares),
        "Biases add eigenvalues that rescaling does not take away.",
        printed=all(share.promised > 0.5 and share.reached > 0.5 for share in deep),
    )
