"""Paper C, "Flatness is a false friend": its formulas, theorems, counts and records as checks.

Notation: H = ∇²L with eigenvalues λ₁ ≥ … ≥ λ_P, α learning rate, ρ momentum, γ the factor of the L2 term.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev

from spiritlevel import data
from spiritlevel.binding.losses import CrossEntropy
from spiritlevel.papers import networks as models
from spiritlevel.papers.claims import symmetry
from spiritlevel.papers.claims.base import Claim, Finding, Kind, judge, registrar
from spiritlevel.papers.claims.tools import (
    Mlp,
    Rng,
    cross_entropy,
    dense,
    diverges,
    error,
    exact,
    gauss_newton,
    generator,
    losses,
    normal,
    second_derivative,
    softmax_hessian,
    vanishes,
)
from spiritlevel.papers.training.recipe import Recipe
from spiritlevel.results import SYMMETRIES
from spiritlevel.samples.margins import signed_margin

CLAIMS: list[Claim] = []
claim = registrar("C", CLAIMS)

SLACK = 1e-12


def _symmetric(rng: Rng, size: int) -> Tensor:
    matrix = normal(rng, size, size)
    return (matrix + matrix.T) / 2


# ---------------------------------------------------------------- section 1: sharpness


@claim(
    "C-eq1",
    "Equation 1",
    "L(w* + Δw) − L(w*) ≈ ΔwᵀHΔw ≈ Σ_i λ_i|φ_iᵀΔw|² ≈ Tr(H)/P |Δw|² ≤ λ₁|Δw|².",
    "A factor ½ in every term: ½ΔwᵀHΔw = ½Σλ_i(φ_iᵀΔw)² ≈ Tr(H)/(2P)|Δw|² ≤ ½λ₁|Δw|², at a critical point.",
)
def _equation_one(seed: int) -> Finding:
    """Passes if the quadratic form is the loss increase of 200 small steps from a minimum, to 1 %.

    Also required: the mean of ΔwᵀHΔw is Tr(H)/P|Δw|² within 5 standard errors.
    """
    rng = generator(seed)
    net, x = Mlp((3, 4, 2), activation=torch.tanh), normal(rng, 20, 3)
    theta = net.draw(rng)
    targets = net(theta, x)
    root = gauss_newton(net.at(x), theta)
    steps = normal(rng, 200, net.size)
    steps = 1e-4 * steps / steps.norm(dim=1, keepdim=True)
    increase = torch.stack([0.5 * (net(theta + step, x) - targets).square().sum(1).mean() for step in steps])
    form = (steps @ root.T).square().sum(1)
    ratios = increase / form
    mean = float(root.square().sum()) / net.size * 1e-8
    stderr = float(form.std()) / math.sqrt(200)
    printed, mended = (float((ratios / factor - 1).abs().max()) for factor in (1.0, 0.5))
    return judge(
        {"increase / ΔwᵀHΔw": [ratios.min(), ratios.max()], "error as printed": printed, "error with ½": mended},
        "The second-order term of Taylor's series has a ½.",
        printed=printed < 0.01,
        mended=mended < 0.01 and abs(float(form.mean()) - mean) < 5 * stderr,
    )


@claim(
    "C-1-norm",
    "Section 1 and appendix C",
    "The spectral norm is given by the largest eigenvalue λ₁ of H.",
    "Where λ₁ ≥ −λ_P, as at a minimum. In general it is max(λ₁, −λ_P).",
)
def _spectral_norm(seed: int) -> Finding:
    """Printed: |H| = λ₁ for 10 zero-loss minima and for L = exp(w₁w₂w₃X) at w = (1, 1, 1), X = −0.1.

    Condition: the minima.
    """
    rng = generator(seed)
    off = 0.0
    for _ in range(10):
        net, x = Mlp((3, 4, 2)), normal(rng, 20, 3)
        root = gauss_newton(net.at(x), net.draw(rng))
        matrix = root.T @ root
        off = max(off, error(torch.linalg.eigvalsh(matrix)[-1], torch.linalg.matrix_norm(matrix, 2)))
    other = dense(partial(_product_loss, x=-0.1), torch.ones(3, dtype=torch.float64))
    largest, norm = torch.linalg.eigvalsh(other)[-1], torch.linalg.matrix_norm(other, 2)
    return judge(
        {"error at minima": off, "λ₁ elsewhere": largest, "spectral norm there": norm},
        "Negative curvature counts for the norm.",
        printed=exact(off, error(largest, norm)),
        within=exact(off),
    )


def _box(matrix: Tensor, w: Tensor, eps: float, slope: Tensor | None = None) -> float:
    """The maximum of ½yᵀHy (+ slope·y) over Keskar's box |y_i| ≤ ε(|w_i| + 1).

    For H ⪰ 0 it lies at a corner, and all are tried.
    """
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=len(w))), dtype=torch.float64)
    corners = signs * eps * (w.abs() + 1)
    rise = 0.5 * torch.einsum("kp,pq,kq->k", corners, matrix, corners)
    return float((rise if slope is None else rise + corners @ slope).max())


@claim(
    "C-eq2-bound",
    "Equation 2",
    "Φ_{w,L}(ε, A) := (max_{y∈C_ε} L(w + Ay) − L(w))/(1 + L(w)) ≤ κ(ε)λ₁.",
    "At a critical point, to second order, with A = I and κ = ½ε²Σ(|w_i|+1)²/(1+L): as printed, nothing bounds the "
    "slope of L, or A.",
)
def _keskar_bound(seed: int) -> Finding:
    """Printed: none of 100 random quadratic functions in 8 dimensions violates the bound at a random point.

    Nor with A = 2I at its minimum. Condition: at the minimum, with A = I. All corners of the box are searched.
    """
    rng = generator(seed)
    found: dict[str, list[float]] = {"minimum": [], "A = 2I": [], "slope": []}
    for _ in range(100):
        factor = normal(rng, 4, 8)
        matrix, w, away = factor.T @ factor, normal(rng, 8), normal(rng, 8)
        bound = 0.5 * 1e-6 * float((w.abs() + 1).square().sum()) * float(torch.linalg.eigvalsh(matrix)[-1])
        found["minimum"].append(_box(matrix, w, 1e-3) / bound)
        found["A = 2I"].append(_box(4 * matrix, w, 1e-3) / bound)
        found["slope"].append(_box(matrix, w, 1e-3, matrix @ away) / bound)  # 1 + L divides both
    largest = {name: max(ratios) for name, ratios in found.items()}
    return judge(
        {
            "Φ/(κλ₁) at a minimum": [min(found["minimum"]), largest["minimum"]],
            "largest with A = 2I": largest["A = 2I"],
            "largest elsewhere": largest["slope"],
        },
        "Away from a minimum the slope decides, which λ₁ does not know.",
        printed=max(largest.values()) <= 1 + SLACK,
        within=largest["minimum"] <= 1 + SLACK,
    )


@claim(
    "C-eq2-ball",
    "Section 1, after equation 2",
    "This definition of sharpness is approximately given by λ₁ε²/2(1 + L(w)), proportional to the largest eigenvalue.",
    "For the ball |y|₂ ≤ ε at a critical point, and read as λ₁ε²/(2(1+L)). Not for Keskar's box.",
)
def _keskar_ball(seed: int) -> Finding:
    """Printed: the formula is the maximum over ball and box, to 1 %, for 20 quadratic minima. Condition: the ball."""
    rng = generator(seed)
    ball, box = [], []
    for _ in range(20):
        factor = normal(rng, 6, 6)
        matrix = factor.T @ factor
        formula = 0.5 * float(torch.linalg.eigvalsh(matrix)[-1]) * 1e-6
        steps = normal(rng, 6, 50)
        for _ in range(500):  # uphill from 50 starts, back to the sphere after each step
            steps = matrix @ steps
            steps = 1e-3 * steps / steps.norm(dim=0)
        highest = 0.5 * (steps * (matrix @ steps)).sum(0).max()
        ball.append(float(highest) / formula)
        box.append(_box(matrix, torch.zeros(6, dtype=torch.float64), 1e-3) / formula)
    return judge(
        {"ball / formula": [min(ball), max(ball)], "box / formula": [min(box), max(box)]},
        "Corners of the box lie further away than its faces, and their direction matters.",
        printed=max(abs(r - 1) for r in (*ball, *box)) < 0.01,
        within=max(abs(r - 1) for r in ball) < 0.01,
    )


# ---------------------------------------------------------------- section 2: the thought experiment


def _product_loss(w: Tensor, x: float) -> Tensor:
    return (w.prod() * x).exp()


def _outer(w: Tensor) -> Tensor:
    """uuᵀ with u = (w₂w₃, w₁w₃, w₁w₂): the matrix that is printed in equation 3."""
    u = w.prod() / w
    return torch.outer(u, u)


def _mixed(w: Tensor) -> Tensor:
    """M, the matrix that is missing: the third weight off the diagonal."""
    a, b, c = w
    zero = torch.zeros_like(a)
    return torch.stack([torch.stack(row) for row in ((zero, c, b), (c, zero, a), (b, a, zero))])


def _weights(rng: Rng, count: int = 20) -> list[tuple[Tensor, float]]:
    found = []
    for _ in range(count):
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], 3))
        found.append(
            (signs * torch.from_numpy(rng.uniform(0.3, 1.5, 3)), float(rng.choice([-1, 1]) * rng.uniform(0.3, 2)))
        )
    return found


@claim(
    "C-eq3",
    "Equation 3",
    "H of L = exp(w₁w₂w₃X) is [[w₂²w₃², w₁w₂w₃², w₂²w₁w₃], …] X exp(w₁w₂w₃X).",
    "H = (X² uuᵀ + X M) exp(w₁w₂w₃X), u = (w₂w₃, w₁w₃, w₁w₂), M = [[0,w₃,w₂],[w₃,0,w₁],[w₂,w₁,0]].",
)
def _equation_three(seed: int) -> Finding:
    """Passes if the formula is the Hessian by automatic differentiation at 20 random points, to rounding."""
    printed, mended = [], []
    for w, x in _weights(generator(seed)):
        loss, true = _product_loss(w, x), dense(partial(_product_loss, x=x), w)
        printed.append(error(_outer(w) * x * loss, true))
        mended.append(error((x**2 * _outer(w) + x * _mixed(w)) * loss, true))
    return judge(
        {"smallest deviation as printed": min(printed), "largest error as corrected": max(mended)},
        "X for X², and the matrix of second derivatives of the product is missing.",
        printed=exact(*printed),
        mended=exact(*mended),
    )


@claim(
    "C-eq4",
    "Equation 4, the trace",
    "Tr(H) = (w₂²w₃² + w₂²w₁² + w₁²w₃²) X exp(w₁w₂w₃X).",
    "X² for X: the trace is never negative.",
)
def _equation_four(seed: int) -> Finding:
    """Passes if the formula is the trace of the Hessian at 20 random points, to rounding."""
    printed, mended = [], []
    for w, x in _weights(generator(seed)):
        trace = dense(partial(_product_loss, x=x), w).trace()
        polynomial = _outer(w).trace() * _product_loss(w, x)
        printed.append(error(polynomial * x, trace))
        mended.append(error(polynomial * x**2, trace))
    return judge(
        {"largest deviation as printed": max(printed), "largest error as corrected": max(mended)},
        "As printed the trace is negative wherever X is.",
        printed=exact(*printed),
        mended=exact(*mended),
    )


@claim(
    "C-eq4-norm",
    "Equation 4, the spectral norm",
    "Tr(H) = λ₁(H).",
    "That is a property of the rank-one part X²uuᵀ. λ₁/Tr tends to 1 along w → tw.",
)
def _trace_is_norm(seed: int) -> Finding:
    """Printed: Tr = λ₁ at 20 random points and at w = (1, 1, 1), X = −1, where the three eigenvalues are equal.

    Instead: λ₁/Tr rises to 1 along w = t(1, 1, 1).
    """
    off = 0.0
    for w, x in _weights(generator(seed)):
        matrix = dense(partial(_product_loss, x=x), w)
        off = max(off, error(torch.linalg.eigvalsh(matrix)[-1], matrix.trace()))
    ratios, formula = [], 0.0
    for t in (1.0, 2.0, 3.0, 4.0, 10.0):
        w = torch.full((3,), t, dtype=torch.float64)
        matrix = _outer(w) - _mixed(w)  # times the loss, which underflows for large t
        ratios.append(float(torch.linalg.eigvalsh(matrix)[-1] / matrix.trace()))
        if t < 4:
            formula = max(formula, error(matrix * _product_loss(w, -1.0), dense(partial(_product_loss, x=-1.0), w)))
    rising = all(a < b for a, b in itertools.pairwise(ratios))
    return judge(
        {"largest deviation": off, "λ₁/Tr at t = 1, 2, 3, 4, 10": ratios},
        "At w = (1, 1, 1) the trace is three times the largest eigenvalue.",
        printed=exact(off, abs(ratios[0] - 1)),
        instead=exact(formula) and rising and abs(ratios[-1] - 1) < 1e-2 and exact(abs(ratios[0] - 1 / 3)),
    )


@claim(
    "C-2-flatter",
    "Section 2",
    "Smaller losses imply flatter Hessians: as the optimiser drives the loss L → 0 we expect the exponential to "
    "dominate the polynomial.",
    "Along rays w → tw, in the end. Not in general: w = (e^t, −te^{−t}, 1), X = 1 has L = e^{−t} → 0 and Tr → ∞.",
)
def _smaller_losses(seed: int) -> Finding:
    """Printed: λ₁ of exp(w₁w₂w₃X) vanishes with the loss along 10 random rays and along the path. Condition: rays."""
    rays = []
    for w, x in _weights(generator(seed), 10):
        sign = -torch.sign(w.prod() * x)  # the loss falls along the ray
        start = w * torch.tensor([float(sign), 1.0, 1.0], dtype=torch.float64)
        reach = (1 / float((start.prod() * x).abs())) ** (1 / 3)
        norms = []
        for size in (1.0, 5.0, 20.0, 80.0):  # −log L
            point = start * reach * size ** (1 / 3)
            norms.append(float(torch.linalg.eigvalsh(x**2 * _outer(point) + x * _mixed(point))[-1]) * math.exp(-size))
        rays.append(vanishes(norms))
    path, values = [], []
    for t in (5.0, 10.0, 15.0, 20.0):
        w = torch.tensor([math.exp(t), -t * math.exp(-t), 1.0], dtype=torch.float64)
        values.append(float(_product_loss(w, 1.0)))
        path.append(float(torch.linalg.eigvalsh(dense(partial(_product_loss, x=1.0), w))[-1]))
    return judge(
        {
            "rays along which λ₁ vanishes": sum(rays),
            "loss on the path, t = 5, 10, 15, 20": values,
            "λ₁ on the path": path,
        },
        "The loss alone does not say how flat it is.",
        printed=all(rays) and vanishes(path),
        within=all(rays) and vanishes(values) and diverges(path),
    )


@claim(
    "C-2-footnote",
    "Footnote 2",
    "xⁿ exp(−x^m) → 0 for all n, m as x → ∞.",
    "For m > 0.",
)
def _footnote(seed: int) -> Finding:
    """Printed: n·log x − x^m falls below −100 by x = 10^60 for n = 1…5 and m from −2 to 2. Condition: m > 0."""
    x = 1e60
    ends = {(n, m): n * math.log(x) - x**m for n in range(1, 6) for m in (-2, -1, 0, 0.5, 1, 2)}
    falls = {key: value < -100 for key, value in ends.items()}
    return judge(
        {
            "pairs (n, m)": len(falls),
            "pairs that go to 0": sum(falls.values()),
            "of them with m > 0": sum(v for (_, m), v in falls.items() if m > 0),
        },
        "With m ≤ 0 the power wins.",
        printed=all(falls.values()),
        within=all(value for (_, m), value in falls.items() if m > 0),
    )


def _aligned(net: Mlp, theta: Tensor, x: Tensor) -> Tensor:
    """Layers of the same norms that make the most of x: each of rank one, and its input along its only direction."""
    layers, direction = [], x[0] / x.norm()
    for k, (weight, bias) in enumerate(net.split(theta), 1):
        out = torch.ones(len(weight), dtype=torch.float64)
        out[1:] = 1.0 if k < net.depth else -0.5  # positive for the ReLU; in the end one class against the others
        out = out / out.norm()
        layers.append((torch.linalg.matrix_norm(weight, 2) * torch.outer(out, direction), bias))
        direction = out
    return net.join(layers)


@claim(
    "C-1-weights",
    "Section 1, contributions",
    "In order for the loss to go to 0, the weight vector components must tend to infinity.",
    "Some of them must, in a bias-free network: ℓ ≥ log(1 + (C−1)exp(−2|x|Π|W_k|)). The others may stay where they "
    "are, a whole layer of them.",
)
def _weights_grow(seed: int) -> Finding:
    """Printed: every component grows by more than a hundred as the loss vanishes with the scale of the last layer.

    Condition: some of them do; and none of 200 random bias-free ReLU networks, and of 200 whose layers are aligned,
    has a loss below the bound.
    """
    rng = generator(seed)
    net, lowest = Mlp((3, 4, 4, 3), bias=False), math.inf
    for aligned in 200 * (False, True):
        x, theta = normal(rng, 1, 3), net.draw(rng, float(rng.uniform(0.3, 1.2)))
        theta = _aligned(net, theta, x) if aligned else theta
        reach = float(x.norm()) * math.prod(float(torch.linalg.matrix_norm(w, 2)) for w, _ in net.split(theta))
        bound = math.log1p(2 * math.exp(-2 * reach))
        lowest = min(lowest, min(float(losses(net(theta, x), torch.tensor([c]))) / bound for c in range(3)))
    label = net(theta, x).argmax(1)  # of the last, aligned one
    margin = float(signed_margin(net(theta, x), label))
    start, values, sizes = net.split(theta), [], []
    for size in (0.1, 1.0, 10.0, 40.0):  # the margin
        moved = net.join([*start[:-1], (size / margin * start[-1][0], start[-1][1])])
        values.append(float(losses(net(moved, x), label)))
        sizes.append(moved.abs())
    growth = sizes[-1] / sizes[0]
    grown, vanished = int((growth > 100).sum()), values[-1] < 1e-6 * values[0]
    return judge(
        {"smallest loss / bound": lowest, "components": net.size, "components that grow": grown, "loss": values},
        "Bounded weights bound the loss from below; one layer of growing weights will do.",
        printed=grown == net.size and vanished,
        within=lowest >= 1 - SLACK and grown > 0 and vanished,
    )


# ---------------------------------------------------------------- section 3: the theorem


@claim(
    "C-eq5",
    "Equation 5",
    "z(x; w)_q = f(W_H f(W_{H−1} … f(W₁x))) = Σ_i Σ_{j≤γ} x_i A_ij Π_k w_ij^(k), with γ = Π_{q=1}^{H−1} n_q paths.",
    "Holds; γ counts the paths for one input and one output, and A is 0 or 1, not in [0, 1].",
)
def _paths(seed: int) -> Finding:
    """Passes if the sum over all paths is the output of 20 ReLU networks (ReLU at the output too), to rounding."""
    rng = generator(seed)
    off, count = 0.0, 0
    sizes = (3, 4, 5, 2)
    for _ in range(20):
        net, x = Mlp(sizes, bias=False, last=torch.relu), normal(rng, 1, 3)
        theta = net.draw(rng)
        layers = [w for w, _ in net.split(theta)]
        states, h = [], x[0]
        for w in layers:
            states.append((w @ h > 0).double())
            h = torch.relu(w @ h)
        total = torch.zeros(2, dtype=torch.float64)
        count = 0
        for q in range(2):
            for i, a, b in itertools.product(range(3), range(4), range(5)):
                active = states[0][a] * states[1][b] * states[2][q]
                total[q] += x[0, i] * active * layers[0][a, i] * layers[1][b, a] * layers[2][q, b]
                count += int(q == 0 and i == 0)
        off = max(off, error(total, h))
    return judge(
        {"largest error": off, "paths for one input and output": count, "n₁n₂": 4 * 5},
        "The network is a sum over paths.",
        printed=exact(off) and count == 20,
    )


@claim(
    "C-eq6",
    "Equation 6",
    "ℓ = −Σ_c (1 − 1[h_c = y_c]) log h_c, where 1 takes the value 1 for the incorrect class and 0 for the correct "
    "class.",
    "Holds as the sentence says: −log h of the correct class.",
)
def _equation_six(seed: int) -> Finding:
    """Passes if the sum, with the indicator of the sentence, is the cross entropy of 100 points, to rounding."""
    rng = generator(seed)
    z, y = normal(rng, 100, 5), torch.from_numpy(rng.integers(0, 5, 100))
    h = torch.softmax(z, 1)
    incorrect = (torch.arange(5) != y[:, None]).double()
    off = error(-((1 - incorrect) * h.log()).sum(1), torch.nn.functional.cross_entropy(z, y, reduction="none"))
    return judge({"largest error": off}, "One term is left.", printed=exact(off))


@claim(
    "C-eq7",
    "Equation 7",
    "h_c = σ(z)_c = exp z_c/Σ_k exp z_k = (1 + Σ_{k≠c} exp(z_k − z_c)).",
    "(1 + Σ_{k≠c} exp(z_k − z_c))⁻¹. (The exponent may have been lost when the text was extracted.)",
)
def _equation_seven(seed: int) -> Finding:
    """Passes if the last expression is the softmax of 100 points, to rounding."""
    z = normal(generator(seed), 100, 5)
    bracket = 1 + (z[:, None, :] - z[:, :, None]).exp().sum(2) - 1  # the term k = c is 1
    softmax = torch.softmax(z, 1)
    printed, mended = error(bracket, softmax), error(1 / bracket, softmax)
    return judge(
        {"error as printed": printed, "error as corrected": mended},
        "Without the exponent it is larger than 1.",
        printed=exact(printed),
        mended=exact(mended),
    )


@claim("C-eq8", "Equation 8", "ℓ(h(x_i; w), y_i) = log(1 + Σ_{k≠c(i)} exp(z_{k,c(i)})), z_{k,c} = z_k − z_c.")
def _equation_eight(seed: int) -> Finding:
    """Passes if the formula is the cross entropy of 100 points, to rounding."""
    rng = generator(seed)
    z, y = normal(rng, 100, 5), torch.from_numpy(rng.integers(0, 5, 100))
    gaps = z - z.gather(1, y[:, None])
    off = error(gaps.exp().sum(1).log(), torch.nn.functional.cross_entropy(z, y, reduction="none"))
    return judge({"largest error": off}, "The loss is a function of differences of outputs.", printed=exact(off))


@claim(
    "C-eq9",
    "Equation 9",
    "∂²ℓ/∂w_l∂w_m = Σ_k e^{z_kc}[∂²z_kc/∂w_l∂w_m + ∂_l z_kc ∂_m z_kc]/Z − Σ_{k,u} e^{z_kc} ∂_l z_kc e^{z_uc} ∂_m "
    "z_uc/Z², Z = 1 + Σ_{k≠c} e^{z_kc}.",
)
def _equation_nine(seed: int) -> Finding:
    """Passes if the formula is the dense Hessian of 5 tanh networks, to rounding."""
    rng = generator(seed)
    off = 0.0
    for _ in range(5):
        net, x, label = Mlp((3, 4, 3), activation=torch.tanh), normal(rng, 1, 3), int(rng.integers(0, 3))
        theta = net.draw(rng)

        def gaps(t: Tensor, net: Mlp = net, x: Tensor = x, label: int = label) -> Tensor:
            z = net(t, x)[0]
            return z - z[label]

        others = torch.arange(3) != label
        first, second = jacrev(gaps)(theta)[others], second_derivative(gaps)(theta)[others]
        weights = gaps(theta)[others].exp()
        total = 1 + weights.sum()
        mean = weights @ first
        formula = torch.einsum("k,klm->lm", weights, second) + torch.einsum("k,kl,km->lm", weights, first, first)
        formula = formula / total - torch.outer(mean, mean) / total**2
        true = dense(net.loss(x, torch.tensor([label])), theta)
        off = max(off, error(formula, true))
    return judge({"largest error": off}, "Right, read with its indices restored.", printed=exact(off))


@claim(
    "C-eq10",
    "Equation 10",
    "After differentiation by a weight of layer m, γ/Π n_m paths remain.",
    "A weight between hidden layers m−1 and m leaves γ/(n_{m−1}n_m) paths; one of the first layer, for one input, "
    "γ/n₁; one of the last, for one output, γ/n_{H−1}.",
)
def _remaining_paths(seed: int) -> Finding:
    """Passes if the count, by enumeration in five random networks of three hidden layers, is γ/n_m as printed.

    As corrected: the three stated counts.
    """
    rng = generator(seed)
    printed = mended = True
    example: list[int] = []
    for _ in range(5):
        n = [int(size) for size in rng.integers(2, 7, 3)]
        total = math.prod(n)
        every = list(itertools.product(*(range(size) for size in n)))
        through = {
            "first": sum(path[0] == 0 for path in every),
            "middle": sum(path[0] == 0 and path[1] == 1 for path in every),
            "last": sum(path[2] == 0 for path in every),
        }
        printed &= through["middle"] == total // n[1]
        expected = {"first": total // n[0], "middle": total // (n[0] * n[1]), "last": total // n[2]}
        mended &= through == expected
        example = [total, through["middle"], total // n[1]]
    return judge(
        {"γ, paths through one hidden weight, printed count": example},
        "A weight fixes both of its ends.",
        printed=printed,
        mended=mended,
    )


def _cancelling(m: float) -> tuple[Mlp, Tensor, Tensor]:
    """Two hidden units whose paths cancel: W₁ = (e^m, e^m), W₂ = [[1 + m e^{−m}, −1], [−1, −1]], all |w| ≥ 1, x = 1.

    Outputs (m, 0), the ReLU at the output included.
    """
    net = Mlp((1, 2, 2), bias=False, last=torch.relu)
    size = math.exp(m)
    theta = torch.tensor([size, size, 1 + m / size, -1.0, -1.0, -1.0], dtype=torch.float64)
    return net, theta, torch.ones(1, 1, dtype=torch.float64)


@claim(
    "C-eq11",
    "Equations 11 and 12",
    "The m-fold derivative of an output by weights |w| ≥ ε is bounded by |z|/(ε^m Π n_m), hence times exp(z) by "
    "|z| exp(z)/(ε^m Π n_m).",
    "It fails where paths cancel: then z is small and its derivatives are large.",
)
def _derivative_bound(seed: int) -> Finding:
    """Printed: |∂z/∂w| ≤ |z|/ε in a network with weights of at least ε = 1 whose paths cancel.

    The factor 1/Πn_m, which would only make the bound smaller, is left out. Instead: it holds where all weights and
    inputs are positive, so that no paths cancel.
    """
    rng = generator(seed)
    excess = []
    for m in (2.0, 5.0, 10.0):
        net, theta, x = _cancelling(m)
        z, slopes = net(theta, x)[0, 0], jacrev(net.at(x))(theta)[0, 0]
        excess.append(float(slopes.abs().max() / z))
    kept = 0.0
    for _ in range(20):
        net, x = Mlp((2, 3, 2), bias=False, last=torch.relu), normal(rng, 1, 2).abs()
        theta = 1 + net.draw(rng).abs()
        slopes = jacrev(net.at(x))(theta)[0].abs().amax(1)
        kept = max(kept, float((slopes / net(theta, x)[0]).max()))
    return judge(
        {"largest |∂z/∂w|/|z|, m = 2, 5, 10": excess, "the same without cancellation": kept},
        "The ratio is unbounded.",
        printed=max(excess) <= 1,
        instead=kept <= 1 + SLACK,
    )


@claim(
    "C-T1",
    "Theorem 1",
    "For any feed forward network with ReLU, softmax and cross entropy, in the limit that the training loss L(w) → 0 "
    "the spectral norm λ₁ of the Hessian also tends to 0.",
    "Not without control of the weights. Per sample |∇²ℓ| ≤ ℓ(2|J|² + 2max_c|∇²z_c|), so H → 0 if ℓ times that bracket "
    "does: for instance along w → tw for a bias-free network that separates the data.",
)
def _theorem_one(seed: int) -> Finding:
    """Printed: λ₁ vanishes with the loss in a network of six weights, all with |w| ≥ 1, whose paths cancel.

    Instead: the bound holds for 60 random networks and labels, and λ₁ vanishes along a ray.
    """
    rng = generator(seed)
    values, norms = [], []
    for m in (2.0, 5.0, 10.0, 15.0):
        net, theta, x = _cancelling(m)
        label = torch.tensor([0])
        values.append(float(losses(net(theta, x), label)))
        norms.append(float(torch.linalg.eigvalsh(softmax_hessian(net.at(x), theta, label))[-1]))
    ratio = 0.0
    for _ in range(60):
        net, x = Mlp((3, 4, 3), activation=torch.tanh if rng.random() < 0.5 else torch.relu), normal(rng, 1, 3)
        theta, label = net.draw(rng, 1.5), torch.from_numpy(rng.integers(0, 3, 1))
        first, second = jacrev(net.at(x))(theta)[0], second_derivative(net.at(x))(theta)[0]
        bracket = 2 * torch.linalg.matrix_norm(first, 2) ** 2 + 2 * torch.linalg.matrix_norm(second, 2).max()
        norm = torch.linalg.matrix_norm(softmax_hessian(net.at(x), theta, label), 2)
        ratio = max(ratio, float(norm / (bracket * losses(net(theta, x), label)[0])))
    net, x = Mlp((3, 4, 3), bias=False), normal(rng, 1, 3)
    theta = net.draw(rng)
    while float(net(theta, x)[0].topk(2).values.diff().abs()) < 0.2:
        theta, x = net.draw(rng), normal(rng, 1, 3)
    label, margin = net(theta, x).argmax(1), float(net(theta, x)[0].topk(2).values.diff().abs())
    ray = []
    for size in (2.0, 10.0, 20.0, 40.0):
        t = math.sqrt(size / margin)
        ray.append(float(torch.linalg.matrix_norm(softmax_hessian(net.at(x), t * theta, label), 2)))
    return judge(
        {"loss, m = 2, 5, 10, 15": values, "λ₁": norms, "largest norm / bound": ratio, "norm along a ray": ray},
        "The loss goes to zero, the curvature to infinity.",
        printed=vanishes(norms),
        instead=ratio <= 1 + SLACK and vanishes(ray) and diverges(norms),
    )


@claim(
    "C-eq13",
    "Equation 13",
    "H_jk = (1/N) Σ_n [Σ_{c,l} ∂²σ/∂f_l∂f_c · ∂f_l/∂w_j · ∂f_c/∂w_c + Σ_c ∂σ/∂w_j · ∂²f_c/∂w_j∂w_k].",
    "∂f_c/∂w_k for ∂f_c/∂w_c, and ∂σ/∂f_c for ∂σ/∂w_j.",
)
def _equation_thirteen(seed: int) -> Finding:
    """Passes if the formula, taken literally, is the dense Hessian of a tanh network over 4 points, to rounding."""
    rng = generator(seed)
    net, x, y = Mlp((3, 4, 3), activation=torch.tanh), normal(rng, 4, 3), torch.from_numpy(rng.integers(0, 3, 4))
    theta = net.draw(rng)
    true = dense(net.loss(x, y), theta)
    printed = torch.zeros_like(true)
    mended = torch.zeros_like(true)
    for n in range(4):

        def outputs(t: Tensor, n: int = n) -> Tensor:
            return net(t, x[n : n + 1])[0]

        def loss(f: Tensor, n: int = n) -> Tensor:
            return cross_entropy(f[None], y[n : n + 1])

        f, first, second = outputs(theta), jacrev(outputs)(theta), second_derivative(outputs)(theta)
        slope, curvature = grad(loss)(f), second_derivative(loss)(f)
        by_class = torch.stack([first[c, c] for c in range(3)])  # ∂f_c/∂w_c, class and parameter of the same number
        by_weight = slope @ first  # ∂σ/∂w_j
        printed += torch.einsum("lc,lj,c->j", curvature, first, by_class)[:, None] + by_weight[:, None] * second.sum(0)
        mended += torch.einsum("lc,lj,ck->jk", curvature, first, first) + torch.einsum("c,cjk->jk", slope, second)
    off, mended_off = error(printed / 4, true), error(mended / 4, true)
    return judge(
        {"error as printed": off, "error as corrected": mended_off},
        "Two derivatives are taken by the wrong variable.",
        printed=exact(off),
        mended=exact(mended_off),
    )


@claim(
    "C-eq13-zero",
    "Remark after equation 13",
    "For the cross-entropy loss and softmax output at exactly 0 loss, ∂σ/∂f = 0 and ∂²σ/∂f∂f = 0.",
)
def _zero_loss(seed: int) -> Finding:
    """Passes if first and second derivatives by the outputs vanish with the loss as 1,000 random outputs are scaled."""
    z = normal(generator(seed), 1000, 4)
    y, sharp = z.argmax(1), z.topk(2).values.diff().abs()
    values, slopes, curvatures = [], [], []
    for size in (1.0, 10.0, 30.0, 60.0):
        scaled = size * z / sharp
        values.append(float(losses(scaled, y).max()))
        slopes.append(float(CrossEntropy().gradient(scaled, y).abs().max()))
        curvatures.append(float(CrossEntropy().hessian(scaled, y).abs().max()))
    return judge(
        {"loss": values, "largest first derivative": slopes, "largest second derivative": curvatures},
        "Both are of the order of the loss.",
        printed=vanishes(values) and vanishes(slopes) and vanishes(curvatures),
    )


# ---------------------------------------------------------------- section 4: weight decay, counts, stability


@claim(
    "C-4-gamma",
    "Section 4",
    "L2 regularisation γ|w|² naturally adds γ to each eigenvalue, as H → H + γI.",
    "γ|w|² adds 2γ; (γ/2)|w|², as in appendix C and in PyTorch's weight_decay, adds γ.",
)
def _gamma(seed: int) -> Finding:
    """Passes if the Hessian of the printed term is γI; as corrected, that of (γ/2)|w|²."""
    rng = generator(seed)
    w, gamma = normal(rng, 6), float(rng.uniform(0.1, 1.0))
    eye = gamma * torch.eye(6, dtype=torch.float64)
    printed = error(dense(lambda v: gamma * v.square().sum(), w), eye)
    mended = error(dense(lambda v: gamma / 2 * v.square().sum(), w), eye)
    return judge(
        {"added / γ as printed": 1 + printed, "error with γ/2": mended},
        "Twice as much is added.",
        printed=exact(printed),
        mended=exact(mended),
    )


@claim(
    "C-4-convex",
    "Section 4",
    "By the diagonal dominance theorem the Hessian of the Softmax Regressor is positive semi-definite.",
    "Holds: diag(S) − SSᵀ is diagonally dominant, with equality, and its product with xxᵀ is semi-definite (though not "
    "dominant).",
)
def _convex(seed: int) -> Finding:
    """Passes if diag(S) − SSᵀ of 200 points is weakly dominant, and none of 10 dense Hessians has an eigenvalue < 0."""
    rng = generator(seed)
    softmax = torch.softmax(2 * normal(rng, 200, 5), 1)
    matrices = torch.diag_embed(softmax) - softmax[:, :, None] * softmax[:, None, :]
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    slack = float((diagonal - (matrices.abs().sum(2) - diagonal.abs())).min())
    smallest = 0.0
    for _ in range(10):
        net, x, y = Mlp((4, 3)), normal(rng, 8, 4), torch.from_numpy(rng.integers(0, 3, 8))
        values = torch.linalg.eigvalsh(dense(net.loss(x, y), net.draw(rng)))
        smallest = min(smallest, float(values[0] / values[-1]))
    return judge(
        {"error of dominance": max(0.0, -slack), "error of positivity": max(0.0, -smallest)},
        "Dominant in the outputs, semi-definite in the weights.",
        printed=slack > -SLACK and smallest > -1e-9,
    )


def _count(build: Callable[..., nn.Module], **options: int) -> int:
    with torch.device("meta"):
        return models.count(build(**options))


@claim("C-4-softmax", "Section 4, logistic regression", "The total parameter count is 7850.")
def _count_softmax(seed: int) -> Finding:
    """Passes if softmax regression of 784 inputs on 10 classes, with biases, has the printed number of parameters."""
    found, printed = _count(models.softmax_regression), 7850
    return judge({"printed": printed, "counted": found}, "784·10 + 10.", printed=found == printed)


@claim(
    "C-4-mlp",
    "Section 4, MLP",
    "A single hidden layer MLP on the MNIST dataset, with a hidden layer of 100 units, parameter count 9960.",
    "784-100-10 has 79,510 parameters (79,400 without biases). 9960 is 784-10-100-10, two hidden layers.",
)
def _count_mlp(seed: int) -> Finding:
    """The record agrees if 784-100-10 has 9960 parameters, with or without biases.

    Networks that do are searched for: one hidden layer of up to 3,000 units, or two of up to 400.
    """
    printed = 9960
    counts = {"with biases": _count(models.mlp), "without": 784 * 100 + 100 * 10}
    one = [h for h in range(1, 3001) if printed in (784 * h + h + 10 * h + 10, 784 * h + 10 * h)]
    first, second = np.meshgrid(np.arange(1, 401), np.arange(1, 401), indexing="ij")
    biased = 785 * first + (first + 1) * second + (second + 1) * 10
    two = [[int(a) + 1, int(b) + 1] for a, b in np.argwhere(biased == printed)]
    return judge(
        {
            "printed": printed,
            "784-100-10": counts["with biases"],
            "one hidden layer with 9960": one,
            "two hidden layers with 9960": two,
        },
        "No network of one hidden layer has 9960 parameters; 784-10-100-10 is the only one of two, with biases.",
        agree=printed in counts.values(),
        instead=not one and two == [[10, 100]] and _count(models.printed_mlp) == printed,
    )


@claim(
    "C-4-cnn",
    "Section 4, CNN",
    "A 9 layer simple convolutional neural network on CIFAR-100, parameter count 1,387,108.",
)
def _count_cnn(seed: int) -> Finding:
    """Passes if All-CNN-C with biases and 100 classes has the printed number of parameters."""
    found, printed = _count(models.all_cnn_c), 1_387_108
    return judge(
        {"printed": printed, "All-CNN-C": found}, "All-CNN-C, nine convolutions with biases.", printed=found == printed
    )


@claim(
    "C-4-preresnet",
    "Section 4, PreResNet-164",
    "A pre-activated residual network on CIFAR-100 with parameter count 1,726,388.",
)
def _count_preresnet(seed: int) -> Finding:
    """Passes if PreResNet-164 with bias-free convolutions and shortcuts has the printed number of parameters."""
    found, printed = _count(models.preresnet164), 1_726_388
    return judge(
        {"printed": printed, "PreResNet-164": found},
        "Bottlenecks, no biases in convolutions.",
        printed=found == printed,
    )


@claim(
    "C-4-wrn",
    "Section 4, WideResNet-28×10",
    "A wide residual network on CIFAR-100, with parameter count 36,546,980.",
    "Holds if all convolutions have biases; the usual version without them has 36,536,884.",
)
def _count_wrn(seed: int) -> Finding:
    """Passes if Wide ResNet 28×10, convolutions with biases, has the printed number of parameters."""
    with torch.device("meta"):
        model = models.wide_resnet_28_10()
    found, printed = models.count(model), 36_546_980
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, nn.Conv2d) and m.bias is not None)
    return judge(
        {"printed": printed, "with biases": found, "without": found - biases},
        f"{biases:,} of the parameters are biases of convolutions.",
        printed=found == printed,
    )


@claim(
    "C-4-split",
    "Section 4, logistic regression",
    "On MNIST, splitting the training set into 45,000 training and 5,000 validation samples.",
    "MNIST has 60,000 training samples; 50,000 is the size of CIFAR.",
    kind=Kind.RECORD,
)
def _split(seed: int) -> Finding:
    """The record agrees with the public data set if the two parts make all of MNIST's training samples."""
    parts, mnist = (45_000, 5_000), next(row.train for row in data.describe() if row.name == "mnist")
    return judge({"sum of the parts": sum(parts), "MNIST": mnist}, "10,000 are missing.", agree=sum(parts) == mnist)


@claim(
    "C-4-epochs",
    "Section 4 and appendix A.2",
    "Logistic regression on MNIST ran for 1000 epochs (section 4, Figure 1); there 'we used T = 50' (appendix A.2).",
    "Unresolved; 50 is the MLP's number.",
    kind=Kind.RECORD,
)
def _epochs(seed: int) -> Finding:
    """The two places agree if they name the same number of epochs."""
    places = {"section 4": 1000, "appendix A.2": 50}
    return judge(places, "Two numbers for one run.", agree=len(set(places.values())) == 1)


@claim(
    "C-4-mlp-training",
    "Section 4, MLP",
    "Validation accuracy 94.4 → 96.46 → 96.7, generalisation gap 0.48, 0.51, 0.04; the training accuracy increases "
    "slightly with regularisation, but decreases over the unregularised network when γ is increased to 0.0005.",
    "Accuracy plus gap is 94.88, 96.97, 96.74: at γ = 0.0005 training accuracy is above that of the unregularised "
    "network.",
    kind=Kind.RECORD,
)
def _mlp_training(seed: int) -> Finding:
    """The numbers agree with the sentence if validation accuracy plus gap rises first and ends below its start."""
    training = [validation + gap for validation, gap in zip((94.4, 96.46, 96.7), (0.48, 0.51, 0.04), strict=True)]
    return judge(
        {"training accuracy": training},
        "It ends 1.86 points above its start.",
        agree=training[1] > training[0] and training[2] < training[0],
    )


@claim(
    "C-4-gap",
    "Section 4, PreResNet-164 and WideResNet-28×10",
    "The generalisation gap decreases as we increase the regularisation (training 99.987, 99.985, 99.87 and test "
    "72.78, 75.56, 76.76; 99.984, 99.984, 99.982 and 75.2, 79.5, 80.6).",
    kind=Kind.RECORD,
)
def _gap(seed: int) -> Finding:
    """Passes if training minus test accuracy falls at each step, for both networks."""
    records = {
        "PreResNet-164": ((99.987, 99.985, 99.87), (72.78, 75.56, 76.76)),
        "WideResNet-28×10": ((99.984, 99.984, 99.982), (75.2, 79.5, 80.6)),
    }
    gaps = {name: [a - b for a, b in zip(*pair, strict=True)] for name, pair in records.items()}
    falls = all(a > b for row in gaps.values() for a, b in itertools.pairwise(row))
    return judge(gaps, "Both gaps fall.", printed=falls)


@claim(
    "C-4-preresnet-accuracy",
    "Section 4 and Figure 4a",
    "PreResNet-164 without regularisation has a test accuracy of 72.78 % (text) and Val = 73.12 (Figure 4a).",
    "Unresolved.",
    kind=Kind.RECORD,
)
def _preresnet_accuracy(seed: int) -> Finding:
    """The two places agree if the accuracies are equal to the printed digits."""
    text, figure = 72.78, 73.12
    return judge({"text": text, "figure": figure}, "They differ by 0.34 points.", agree=abs(text - figure) < 0.005)


def _largest_stable(step: Callable[[float], float]) -> float:
    """The largest λ for which the spectral radius `step(λ)` of an iteration is at most 1, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if step(middle) <= 1 + 1e-13 else (low, middle)
    return low


def _momentum_radius(curvature: float, rate: float, momentum: float) -> float:
    """Of w, z ↦ w − α(ρz + λw), ρz + λw."""
    matrix = np.array([[1 - rate * curvature, -rate * momentum], [curvature, momentum]])
    return float(np.abs(np.linalg.eigvals(matrix)).max())


@claim("C-4-gd", "Section 4, note on the learning rate", "Gradient descent must find λ₁ ≤ 2/α.")
def _gradient_descent(seed: int) -> Finding:
    """Passes if the largest λ for which the iteration does not grow, by bisection, is 2/α to 1e-6, for 5 random α."""
    rates = generator(seed).uniform(1e-3, 1.0, 5)
    found = [_largest_stable(partial(_momentum_radius, rate=float(rate), momentum=0.0)) for rate in rates]
    off = error(found, 2 / rates)
    return judge({"largest error": off}, "Gradient descent without momentum.", printed=off < 1e-6)


@claim(
    "C-4-limits",
    "Section 4, note on the learning rate",
    "For our ResNet experiments, with initial learning rate α = 0.1, even the GD bound of 20 is over-reached; after a "
    "decrease by a factor of 100 the new bound is 2000.",
    "Without momentum. The paper trains with ρ = 0.9, and then λ₁ ≤ 2(1+ρ)/α: 38 and 3800.",
)
def _limits(seed: int) -> Finding:
    """Printed: the limits of the iteration, at momentum 0.9 and α = 0.1 and 0.001, by bisection, are 20 and 2000.

    Condition: momentum 0. Also required: with momentum they are 2(1+ρ)/α, to 1e-6.
    """
    rates = (0.1, 0.001)
    found = {
        rho: [_largest_stable(partial(_momentum_radius, rate=rate, momentum=rho)) for rate in rates]
        for rho in (0.0, 0.9)
    }
    rule = error(found[0.9], [2 * 1.9 / rate for rate in rates])
    return judge(
        {"limits without momentum": found[0.0], "limits at ρ = 0.9": found[0.9]},
        "Momentum nearly doubles the limit.",
        printed=error(found[0.9], [20.0, 2000.0]) < 1e-6,
        within=error(found[0.0], [20.0, 2000.0]) < 1e-6 and rule < 1e-6,
    )


@claim(
    "C-4-sgd",
    "Section 4, note on the learning rate",
    "SGD satisfies λ₁ ≤ 1 + √(1 − α²λ₁(Var(H))).",
    "λ₁ ≤ (1 + √(1 − α²s²))/α, s² = λ₁(Var H): without 1/α the dimensions do not fit.",
)
def _sgd(seed: int) -> Finding:
    """Passes if the bound is the largest mean curvature a with E(1 − αh)² ≤ 1, h = a ± s, by bisection, to 1e-6.

    In one dimension, with batches of one, for 5 random α and s.
    """
    rng = generator(seed)
    printed = mended = 0.0
    for _ in range(5):
        rate = float(rng.uniform(0.02, 0.3))
        spread = float(rng.uniform(0.2, 0.9)) / rate
        found = _largest_above(rate, spread)
        root = math.sqrt(1 - (rate * spread) ** 2)
        printed = max(printed, error(1 + root, found))
        mended = max(mended, error((1 + root) / rate, found))
    return judge(
        {"deviation as printed": printed, "error as corrected": mended},
        "The factor 1/α is missing.",
        printed=printed < 1e-6,
        mended=mended < 1e-6,
    )


def _largest_above(rate: float, spread: float) -> float:
    """The upper end of the stable interval of mean curvatures, by bisection from its middle, 1/α."""
    low, high = 1 / rate, 3 / rate
    for _ in range(100):
        middle = (low + high) / 2
        growth = 0.5 * ((1 - rate * (middle - spread)) ** 2 + (1 - rate * (middle + spread)) ** 2)
        low, high = (middle, high) if growth <= 1 else (low, middle)
    return low


# ---------------------------------------------------------------- section 5, abstract: adaptive optimisation


@claim(
    "C-5-times",
    "Abstract and section 5",
    "Adam with iterate averaging is '30× sharper' (abstract), its spectral norm 'almost 40× larger' (section 5).",
    "387.8/10.11 = 38.4.",
    kind=Kind.RECORD,
)
def _times(seed: int) -> Finding:
    """The two places agree if both are within 10 % of the ratio of the printed norms, 387.8 and 10.11."""
    ratio, places = 387.8 / 10.11, {"abstract": 30.0, "section 5": 40.0}
    return judge(
        {"ratio": ratio, **places},
        f"The ratio is {ratio:.1f}.",
        agree=all(abs(value / ratio - 1) < 0.1 for value in places.values()),
    )


@claim(
    "C-5-frobenius",
    "Section 5",
    "The spectral norm of Adam is 387.8 (SGD: 10.11), its Frobenius norm 0.02 (0.0001).",
    "|H|_F ≥ λ₁. The numbers fit Tr(H²)/P, P = 15,299,748, which is at least λ₁²/P = 0.0098 (6.7e-6): an inference.",
    kind=Kind.RECORD,
)
def _frobenius(seed: int) -> Finding:
    """The two records agree if |H|_F ≥ λ₁, which must hold for 100 random matrices. Instead: both are ≥ λ₁²/P."""
    rng = generator(seed)
    ordered = True
    for _ in range(100):
        matrix = _symmetric(rng, 8)
        ordered &= bool(torch.linalg.matrix_norm(matrix) >= torch.linalg.eigvalsh(matrix)[-1] * (1 - SLACK))
    if not ordered:
        raise ArithmeticError("a Frobenius norm was found below the largest eigenvalue")
    records = {"Adam": (387.8, 0.02), "SGD": (10.11, 0.0001)}
    size = _count(models.vgg16_bn)
    least = {f"{name}: λ₁²/P": norm**2 / size for name, (norm, _) in records.items()}
    return judge(
        {"parameters of VGG-16BN": size, **least},
        "As Frobenius norms the numbers are impossible.",
        agree=all(frobenius >= norm for norm, frobenius in records.values()),
        instead=all(frobenius >= norm**2 / size for norm, frobenius in records.values()),
    )


# ---------------------------------------------------------------- appendix A: schedules


@claim(
    "C-eq14",
    "Equation 14 and section 4",
    "α₀ if t/T ≤ 0.5; α₀[1 − (1−r)(t/T − 0.5)/0.4] if 0.5 < t/T ≤ 0.9; α₀r otherwise, r = 0.01: 'a linear decay "
    "schedule with a terminal learning rate of 0.01 the initial'.",
    "Holds as reconstructed; the second line is garbled in the text at hand.",
)
def _equation_fourteen(seed: int) -> Finding:
    """Passes if the schedule never rises, has no jump, is linear between 0.5 and 0.9 and ends at 0.01 of its start."""
    recipe = Recipe(lr=1.0, epochs=1000, schedule="paper_c")  # of the trainings here
    shares = np.linspace(0, 1, 1001)
    rates = np.array([recipe.rate(epoch, 1000) for epoch in range(1001)])
    decay = rates[(shares > 0.5) & (shares <= 0.9)]
    bent = float(np.abs(np.diff(decay, 2)).max())
    jump = float(np.abs(np.diff(rates)).max())
    return judge(
        {"last / first": rates[-1], "largest step of 1001": jump, "error of linearity": bent},
        "Continuous, and linear where it falls.",
        printed=bool((np.diff(rates) <= 1e-12).all())
        and jump < 0.003
        and exact(bent)
        and abs(rates[-1] - 0.01) < 1e-12,
    )


@claim(
    "C-eq15",
    "Equation 15",
    "α_avg = 2α₀, reached 'through a similar linear decay mechanism'.",
    "Almost surely ½α₀, a lost fraction: a decay to 2α₀ is impossible.",
)
def _equation_fifteen(seed: int) -> Finding:
    """Passes if the schedule with r = α_avg/α₀ never rises and falls in the end: r = 2 as printed, ½ as corrected."""

    def rates(ratio: float) -> list[float]:
        recipe = Recipe(lr=1.0, epochs=100, schedule="averaging", average_from=100, averaged_lr=ratio)
        return [recipe.rate(epoch, 100) for epoch in range(101)]

    def decays(ratio: float) -> bool:
        found = rates(ratio)
        return all(b <= a + 1e-12 for a, b in itertools.pairwise(found)) and found[-1] < found[0]

    ends = {f"last / first with r = {ratio}": rates(ratio)[-1] for ratio in (2.0, 0.5)}
    return judge(ends, "With r = 2 the rate rises.", printed=decays(2.0), mended=decays(0.5))


@claim(
    "C-A-average",
    "Appendix A.2",
    "T_avg is the epoch after which iterate averaging is activated, and the methods to determine T_avg was described "
    "in the main text.",
    "The main text does not mention T_avg, nor when averaging starts.",
    kind=Kind.RECORD,
)
def _average_epoch(seed: int) -> Finding:
    """The sentence agrees with the document if T_avg occurs in the main text, before appendix A (counted by hand)."""
    mentions = {"main text (sections 1 to 6)": 0, "appendix A.2": 3}
    return judge(mentions, "It is in the appendix only.", agree=mentions["main text (sections 1 to 6)"] > 0)


@claim(
    "C-A-grid",
    "Appendix A.1",
    "For Adam a grid searched initial learning rate range of [10⁻⁴, 3×10⁻³, 10⁻³] (SGD: [0.01, 0.03, 0.1]).",
    "Probably [10⁻⁴, 3×10⁻⁴, 10⁻³]: then both grids are the same up to a factor.",
    kind=Kind.RECORD,
)
def _grid(seed: int) -> Finding:
    """Passes if the grid rises, in the same steps as SGD's; as corrected, with 3e-4."""
    sgd = [0.01, 0.03, 0.1]

    def fits(grid: list[float]) -> bool:
        return grid == sorted(grid) and exact(error([v / grid[0] for v in grid], [v / sgd[0] for v in sgd]))

    printed, mended = [1e-4, 3e-3, 1e-3], [1e-4, 3e-4, 1e-3]
    return judge(
        {"printed": printed, "corrected": mended},
        "The middle value is the largest.",
        printed=fits(printed),
        mended=fits(mended),
    )


# ---------------------------------------------------------------- appendix B: Lanczos


def _lanczos(matrix: np.ndarray, start: np.ndarray, steps: int) -> np.ndarray:
    """The tridiagonal matrix after `steps` steps with full re-orthogonalisation."""
    basis = np.zeros((steps, len(start)))
    basis[0] = start / np.linalg.norm(start)
    diagonal, side = np.zeros(steps), np.zeros(max(steps - 1, 0))
    for k in range(steps):
        vector = matrix @ basis[k]
        diagonal[k] = basis[k] @ vector
        for _ in range(2):
            vector = vector - basis[: k + 1].T @ (basis[: k + 1] @ vector)
        if k + 1 < steps:
            side[k] = np.linalg.norm(vector)
            basis[k + 1] = vector / side[k]
    return np.diag(diagonal) + np.diag(side, 1) + np.diag(side, -1)


def _known(rng: Rng, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A symmetric matrix with eigenvalues in falling order and its eigenvectors as columns."""
    values = np.sort(rng.uniform(-1.0, 3.0, size))[::-1]
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return (vectors * values) @ vectors.T, values, vectors


@claim(
    "C-T3",
    "Theorem 3",
    "The eigenvalues of T_k are the nodes of the Gauss quadrature rule, the weights are the squares of the first "
    "elements of the normalised eigenvectors of T_k.",
)
def _quadrature(seed: int) -> Finding:
    """Passes if the rule, k = 6, integrates all monomials up to degree 11 against the spectral measure, to rounding."""
    rng = generator(seed)
    matrix, values, vectors = _known(rng, 40)
    start = rng.standard_normal(40)
    start /= np.linalg.norm(start)
    nodes, frame = np.linalg.eigh(_lanczos(matrix, start, 6))
    weights, measure = frame[0] ** 2, (vectors.T @ start) ** 2
    off = max(error(weights @ nodes**k, measure @ values**k) for k in range(12))
    return judge(
        {"largest error": off, "sum of the weights": weights.sum()},
        "A Gauss rule.",
        printed=exact(off, abs(weights.sum() - 1)),
    )


@claim(
    "C-B-moments",
    "Appendix B, after theorem 3",
    "A discrete approximation to the spectral density matching the first m moments vᵀH^m v.",
    "Holds, and is an understatement: m steps match the moments 0 … 2m−1.",
)
def _moments(seed: int) -> Finding:
    """Passes if m = 6 steps reproduce the moments 0 … m; reported: how many are right to 1e-9."""
    rng = generator(seed)
    matrix, _, _ = _known(rng, 40)
    start = rng.standard_normal(40)
    start /= np.linalg.norm(start)
    nodes, frame = np.linalg.eigh(_lanczos(matrix, start, 6))
    power, errors = start, []
    for k in range(14):
        errors.append(error(frame[0] ** 2 @ nodes**k, start @ power))
        power = matrix @ power
    right = next(k for k, off in enumerate(errors) if not exact(off))
    return judge(
        {"steps": 6, "moments that are right": right, "error of the next one": errors[right]},
        f"Moments 0 to {right - 1} are right.",
        printed=right > 6,
    )


def _chebyshev(degree: int, x: float) -> float:
    return math.cosh(degree * math.acosh(x))


@claim(
    "C-T2-upper",
    "Theorem 2, equation 17, upper end",
    "λ₁ ≥ θ₁ ≥ λ₁ − (λ₁−λ_n) tan²(θ₁)/(c_{k−1}(1+2ρ₁))², θ₁ ≥ … ≥ θ_m the eigenvalues of T_m.",
    "tan²(φ₁), cos φ₁ = |q₁ᵀz₁| with the start vector q₁, ρ₁ = (λ₁−λ₂)/(λ₂−λ_n): the angle is not the Ritz value.",
)
def _kaniel_upper(seed: int) -> Finding:
    """Passes if none of 300 random cases violates the bound; as printed, with the Ritz value as the angle."""
    rng = generator(seed)
    printed = mended = 0
    for _ in range(300):
        size, steps = int(rng.integers(6, 16)), int(rng.integers(2, 6))
        matrix, values, vectors = _known(rng, size)
        start = rng.standard_normal(size)
        start /= np.linalg.norm(start)
        ritz = np.linalg.eigvalsh(_lanczos(matrix, start, steps))[-1]
        gap = (values[0] - values[1]) / (values[1] - values[-1])
        damping = _chebyshev(steps - 1, 1 + 2 * gap) ** 2
        width = values[0] - values[-1]
        angle = math.acos(min(1.0, abs(float(start @ vectors[:, 0]))))
        printed += int(ritz < values[0] - width * math.tan(ritz) ** 2 / damping - 1e-10)
        mended += int(ritz < values[0] - width * math.tan(angle) ** 2 / damping - 1e-10 or ritz > values[0] + 1e-10)
    return judge(
        {"cases": 300, "violations as printed": printed, "violations as corrected": mended},
        "The angle and the Ritz value share a letter.",
        printed=printed == 0,
        mended=mended == 0,
    )


@claim(
    "C-T2-lower",
    "Theorem 2, equation 17, lower end",
    "λ_n ≤ θ_k ≤ λ_m + (λ₁−λ_n) tan²(θ₁)/(c_{k−1}(1+2ρ₁))².",
    "λ_n ≤ θ_k ≤ λ_n + (λ₁−λ_n)(tan φ_n/c_{k−1}(1+2ρ_n))², cos φ_n = |q₁ᵀz_n|, ρ_n = (λ_{n−1}−λ_n)/(λ₁−λ_{n−1}).",
)
def _kaniel_lower(seed: int) -> Finding:
    """Passes if none of 600 random cases violates the bound; as printed, with λ_n for λ_m and the angle of z₁."""
    rng = generator(seed)
    printed = mended = 0
    for _ in range(600):
        size, steps = int(rng.integers(6, 16)), int(rng.integers(2, 6))
        matrix, values, vectors = _known(rng, size)
        start = rng.standard_normal(size)
        start /= np.linalg.norm(start)
        ritz = np.linalg.eigvalsh(_lanczos(matrix, start, steps))[0]
        width = values[0] - values[-1]
        for column, gap in (
            (0, (values[0] - values[1]) / (values[1] - values[-1])),
            (-1, (values[-2] - values[-1]) / (values[0] - values[-2])),
        ):
            angle = math.acos(min(1.0, abs(float(start @ vectors[:, column]))))
            bound = values[-1] + width * (math.tan(angle) / _chebyshev(steps - 1, 1 + 2 * gap)) ** 2
            broken = int(ritz > bound + 1e-10 or ritz < values[-1] - 1e-10)
            printed, mended = (printed + broken, mended) if column == 0 else (printed, mended + broken)
    return judge(
        {"cases": 600, "violations as printed": printed, "violations as corrected": mended},
        "The lower end has its own angle and its own gap.",
        printed=printed == 0,
        mended=mended == 0,
    )


@claim(
    "C-eq18",
    "Equation 18",
    "E_v Tr(vᵀH^m v) = Tr(H^m) = Σ_i λ_i = N∫λ dμ(λ).",
    "Σ_i λ_i^m = N∫λ^m dμ(λ): the power was lost, perhaps when the text was extracted.",
)
def _equation_eighteen(seed: int) -> Finding:
    """Passes if the mean over all 256 sign vectors v of vᵀH^m v is the sum, m = 1…4, to rounding."""
    matrix = _symmetric(generator(seed), 8)
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)), dtype=torch.float64)
    values = torch.linalg.eigvalsh(matrix)
    means = [(signs @ torch.linalg.matrix_power(matrix, m) * signs).sum(1).mean() for m in range(1, 5)]
    printed = error(torch.stack(means), values.sum().expand(4))
    mended = error(torch.stack(means), torch.stack([values.pow(m).sum() for m in range(1, 5)]))
    return judge(
        {"deviation as printed": printed, "error as corrected": mended},
        "Right for m = 1 only.",
        printed=exact(printed),
        mended=exact(mended),
    )


@claim(
    "C-B-overlap",
    "Appendix B",
    "For zero mean, unit variance vectors v we expect the squared overlap |vᵀφ_i|² ≈ 1/N for all i, with high "
    "probability.",
    "For normalised v, and on average: for raw Rademacher vectors it is 1, and its spread is as large as its mean.",
)
def _overlap(seed: int) -> Finding:
    """Printed: the mean of |vᵀφ|² over all 1024 sign vectors is 1/N, N = 10, to rounding. Condition: v normalised."""
    vectors = torch.linalg.qr(normal(generator(seed), 10, 10)).Q
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=10)), dtype=torch.float64)
    overlaps = (signs @ vectors).square()
    raw, unit = overlaps.mean(0), (overlaps / 10).mean(0)
    wanted = torch.full((10,), 0.1, dtype=torch.float64)
    return judge(
        {
            "mean of raw vectors": raw.mean(),
            "mean of unit vectors": unit.mean(),
            "1/N": 0.1,
            "standard deviation / mean": (overlaps.std(0) / overlaps.mean(0)).mean(),
        },
        "The vectors must have length 1.",
        printed=exact(error(raw, wanted)),
        within=exact(error(unit, wanted)),
    )


@claim(
    "C-B-cost",
    "Appendix B",
    "For m steps the total computational complexity including re-orthogonalisation is O(NPm).",
    "O(NPm + Pm²): as long as m is not much larger than N.",
)
def _cost(seed: int) -> Finding:
    """Printed: the multiplications of m steps over NPm stay below 10, N from 10 to 1000 and m from 10 to 10,000.

    Products at 2NP and full re-orthogonalisation are counted. Condition: m ≤ N.
    """
    ratios = {}
    for n, m in itertools.product((10, 100, 1000), (10, 100, 1000, 10_000)):
        orthogonal = sum(2 * (k + 1) for k in range(m))  # times P: coefficients and subtraction against k + 1 vectors
        ratios[n, m] = (2 * n * m + orthogonal) / (n * m)
    return judge(
        {
            "N = 10, m = 10": ratios[10, 10],
            "N = 1000, m = 1000": ratios[1000, 1000],
            "N = 10, m = 10,000": ratios[10, 10_000],
        },
        "Re-orthogonalisation takes over once m exceeds N.",
        printed=max(ratios.values()) < 10,
        within=max(value for (n, m), value in ratios.items() if m <= n) < 10,
    )


# ---------------------------------------------------------------- appendix C: batch norm


@claim(
    "C-C-mode",
    "Appendix C",
    "Changing batch normalisation to the evaluation mode, we find a somewhat different curvature profile.",
)
def _mode(seed: int) -> Finding:
    """Passes if the spectrum of a network with batch norm moves by more than 1 % of λ₁ between the two modes.

    The constants of evaluation mode are the batch's own statistics: outputs and loss are equal, curvature is not.
    """
    rng = generator(seed)
    net, x, y = Mlp((3, 5, 3)), normal(rng, 16, 3), torch.from_numpy(rng.integers(0, 3, 16))
    theta = net.draw(rng)

    def normalised(t: Tensor) -> Tensor:
        """The inputs of the batch norm, which has no weights of its own here."""
        weight, bias = net.split(t)[0]
        return x @ weight.T + bias

    fixed = normalised(theta)

    def loss(t: Tensor, evaluation: bool) -> Tensor:
        z = normalised(t)
        source = fixed if evaluation else z
        z = (z - source.mean(0)) / (source.var(0, correction=0) + 1e-5).sqrt()
        weight, bias = net.split(t)[1]
        return cross_entropy(torch.relu(z) @ weight.T + bias, y)

    same = error(loss(theta, True), loss(theta, False))
    constant, batch = (torch.linalg.eigvalsh(dense(partial(loss, evaluation=mode), theta)) for mode in (True, False))
    moved = error(batch, constant)
    return judge(
        {"λ₁, evaluation mode": constant[-1], "λ₁, batch statistics": batch[-1], "largest move / λ₁": moved},
        "The derivative of the statistics is a part of the curvature.",
        printed=exact(same) and moved > 0.01,
    )


@claim(
    "C-C-order",
    "Appendix C",
    "The Frobenius norm for the regularised solution is 4.9×10⁻⁵ as opposed to 9.8×10⁻¹², so O(10⁷) larger.",
    "5.0×10⁶: right as an order of magnitude, by a factor of 2.",
    kind=Kind.RECORD,
)
def _order_of_magnitude(seed: int) -> Finding:
    """Passes if 10⁷ is the power of ten nearest to the ratio (on a logarithmic scale)."""
    ratio = 4.9e-5 / 9.8e-12
    return judge(
        {"ratio": ratio, "nearest power": round(math.log10(ratio))},
        "Half of 10⁷.",
        printed=round(math.log10(ratio)) == 7,
    )


@claim(
    "C-C-regularised",
    "Appendix C",
    "The sharpness of the regularised solution in terms of the spectral norm is nearly 1000 times larger than that of "
    "the regularised, better generalising solution.",
    "Than that of the unregularised solution. The next sentence's 'Frobenius norms', if they are Tr(H²)/P as in "
    "section 5, go with the square of λ₁ and say the same: √(5.0×10⁶) is 2,200.",
    kind=Kind.RECORD,
)
def _regularised(seed: int) -> Finding:
    """Passes if the named solutions' ratio, from the next sentence's norms, is within a factor of 3 of 1000.

    The norms are read as Tr(H²)/P, whose root goes with λ₁. As corrected: the two different solutions.
    """
    norms = {"regularised": 4.9e-5, "unregularised": 9.8e-12}
    ratios = {f"√ of the ratio to the {name} norm": math.sqrt(norms["regularised"] / norms[name]) for name in norms}
    printed, mended = (1000 / 3 < ratio < 3 * 1000 for ratio in ratios.values())
    return judge(
        {**norms, **ratios},
        "No solution is sharper than itself.",
        printed=printed,
        mended=mended,
    )


# ---------------------------------------------------------------- a trained network


class _Separated(NamedTuple):
    net: Mlp
    theta: Tensor
    x: Tensor
    y: Tensor
    margin: float  # the smallest, positive


def _separated(seed: int) -> _Separated:
    """A bias-free ReLU network trained until it separates three classes of digits, reduced to 4×4 pixels."""
    rng = generator(seed)
    inputs, targets = data.load("digits").train
    chosen = (targets < 3).nonzero()[:, 0][:60]
    x = torch.nn.functional.avg_pool2d(inputs[chosen].double(), 2).flatten(1)
    y = targets[chosen]
    net = Mlp((16, 8, 3), bias=False)
    for _ in range(5):  # a start with too many dead units does not get there
        theta = net.draw(rng).requires_grad_()
        optimiser = torch.optim.Adam([theta], lr=0.03)
        for _ in range(300):
            optimiser.zero_grad()
            cross_entropy(net(theta, x), y).backward()
            optimiser.step()
        margin = float(signed_margin(net(theta, x), y).min())
        if margin > 0:
            return _Separated(net, theta.detach(), x, y, margin)
    raise ArithmeticError("no network separates the digits")


@claim(
    "C-4-digits",
    "Sections 2 to 4, on a trained network",
    "Smaller losses imply flatter Hessians.",
    "For a network that fits its data, along w → tw. At a smaller loss the same function, rescaled, can be sharper by "
    "any factor.",
    kind=Kind.EXPERIMENT,
)
def _trained_flatness(seed: int) -> Finding:
    """Printed: λ₁ of a ReLU network trained on digits vanishes with the loss along two paths with outputs αφ.

    They are the ray √α·w, and W₁/β, αβW₂ with β = e^{αΔ}, Δ the smallest margin. Condition: the ray.
    """
    net, theta, x, y, margin = _separated(seed)
    found: dict[str, list[list[float]]] = {"ray": [], "stretched": []}
    for size in (1.0, 5.0, 10.0, 20.0, 40.0):
        scale = size / margin
        root, beta = math.sqrt(scale), math.exp(size)
        for name, weights in (("ray", [root, root]), ("stretched", [1 / beta, scale * beta])):
            moved = theta * net.factors(weights)
            matrix = softmax_hessian(net.at(x), moved, y)
            found[name].append([float(losses(net(moved, x), y).mean()), float(torch.linalg.eigvalsh(matrix)[-1])])
    norms = {name: [row[1] for row in rows] for name, rows in found.items()}
    values = [row[0] for row in found["ray"]]
    numbers = {
        "loss, αΔ = 1, 5, 10, 20, 40": values,
        "λ₁ along the ray": norms["ray"],
        "λ₁ along the other path": norms["stretched"],
    }
    return judge(
        numbers,
        "Flat or sharp, at the same outputs.",
        printed=vanishes(norms["ray"]) and vanishes(norms["stretched"]),
        within=vanishes(norms["ray"]) and vanishes(values) and diverges(norms["stretched"]),
        volatile=tuple(numbers),
    )


# ---------------------------------------------------------------- do its measures survive the symmetries of networks?

_ORDER = {"permute_units"}


@claim(
    "C-1-symmetries-trace",
    "Section 1",
    "In this paper we will exclusively consider the Hessian trace, spectral and Frobenius norm as measures of "
    "sharpness [of these the trace: one number for one function, whatever its parametrisation].",
    "It is one per parametrisation: of 13 maps of the parameters that keep the function or its probabilities, it "
    "survives permutations and the shift of logits.",
)
def _trace_under_symmetries(seed: int) -> Finding:
    """Passes if the value stays, to 1e-6, under all 13 symmetries of two small networks that have all of them.

    Instead: it stays under the shift of logits and under permutations of units alone.
    """
    evidence, kept = symmetry.survival(seed, symmetry.trace)
    return judge(
        evidence,
        "A linear map T of the parameters turns H into T⁻ᵀHT⁻¹, which has another spectrum.",
        printed=len(kept) == len(SYMMETRIES),
        instead=kept == symmetry.HESSIAN_STAYS,
    )


@claim(
    "C-1-symmetries-spectral",
    "Section 1",
    "In this paper we will exclusively consider the Hessian trace, spectral and Frobenius norm as measures of "
    "sharpness [of these the largest eigenvalue: one number for one function, whatever its parametrisation].",
    "It is one per parametrisation: of 13 maps of the parameters that keep the function or its probabilities, it "
    "survives permutations and the shift of logits.",
)
def _spectral_under_symmetries(seed: int) -> Finding:
    """Passes if the value stays, to 1e-6, under all 13 symmetries of two small networks that have all of them.

    Instead: it stays under the shift of logits and under permutations of units alone.
    """
    evidence, kept = symmetry.survival(seed, symmetry.largest)
    return judge(
        evidence,
        "A linear map T of the parameters turns H into T⁻ᵀHT⁻¹, which has another spectrum.",
        printed=len(kept) == len(SYMMETRIES),
        instead=kept == symmetry.HESSIAN_STAYS,
    )


@claim(
    "C-1-symmetries-frobenius",
    "Section 1",
    "In this paper we will exclusively consider the Hessian trace, spectral and Frobenius norm as measures of "
    "sharpness [of these the Frobenius norm: one number for one function, whatever its parametrisation].",
    "It is one per parametrisation: of 13 maps of the parameters that keep the function or its probabilities, it "
    "survives permutations and the shift of logits.",
)
def _frobenius_under_symmetries(seed: int) -> Finding:
    """Passes if the value stays, to 1e-6, under all 13 symmetries of two small networks that have all of them.

    Instead: it stays under the shift of logits and under permutations of units alone.
    """
    evidence, kept = symmetry.survival(seed, symmetry.frobenius)
    return judge(
        evidence,
        "A linear map T of the parameters turns H into T⁻ᵀHT⁻¹, which has another spectrum.",
        printed=len(kept) == len(SYMMETRIES),
        instead=kept == symmetry.HESSIAN_STAYS,
    )


@claim(
    "C-1-symmetries-volume",
    "Section 1",
    "Wu et al. (2017) consider the logarithm of the product of the top k eigenvalues as a proxy measure of the "
    "volume of the minimum [one number for one function, whatever its parametrisation].",
    "It is one per parametrisation: of 13 maps of the parameters that keep the function or its probabilities, it "
    "survives permutations and the shift of logits.",
)
def _volume_under_symmetries(seed: int) -> Finding:
    """Passes if the value stays, to 1e-6, under all 13 symmetries of two small networks that have all of them.

    Instead: it stays under the shift of logits and under permutations of units alone.
    """
    evidence, kept = symmetry.survival(seed, symmetry.log_volume)
    return judge(
        evidence,
        "The top k eigenvalues of T⁻ᵀHT⁻¹ differ from those of H.",
        printed=len(kept) == len(SYMMETRIES),
        instead=kept == symmetry.HESSIAN_STAYS,
    )


@claim(
    "C-eq2-symmetries",
    "Section 1, Equation 2",
    "The metric that Keskar et al. (2016) propose is at most κ(ε)λ₁ [one number for one function, whatever its "
    "parametrisation].",
    "It survives permutations only: κ contains the size of every parameter, which even the shift of logits changes.",
)
def _box_under_symmetries(seed: int) -> Finding:
    """Passes if the value stays, to 1e-6, under all 13 symmetries of two small networks that have all of them.

    Instead: it stays under permutations of units alone.
    """
    evidence, kept = symmetry.survival(seed, symmetry.box_bound)
    return judge(
        evidence,
        "Both κ and λ₁ depend on the parametrisation.",
        printed=len(kept) == len(SYMMETRIES),
        instead=kept == _ORDER,
    )


@claim(
    "C-1-symmetries-norm",
    "Section 1, motivation",
    "However such transformations [that make a minimum sharp and keep its function] alter other properties, such as "
    "the weight norm.",
    "Not all of them do: the factor β = |W₂|/|W₁| between two layers exchanges their norms, keeps the norm of all "
    "weights and moves the trace.",
)
def _norm_under_rescaling(seed: int) -> Finding:
    """Passes if no rescaling of 100 bias-free ReLU networks keeps the norm of the weights and moves the trace.

    Moved: by more than a tenth in half of them. Instead: with β = |W₂|/|W₁| the outputs and the norm stay, to rounding.
    """
    rng, net = generator(seed), Mlp((3, 5, 3), bias=False)
    apart, norms, moved = 0.0, 0.0, 0
    for _ in range(100):
        x, (first, none) = normal(rng, 6, 3), net.split(net.draw(rng))[0]
        second = 3 * net.split(net.draw(rng))[1][0]
        theta = net.join([(first, none), (second, none)])
        beta = float(second.norm() / first.norm())
        scaled = net.join([(beta * first, none), (second / beta, none)])
        label = net(theta, x).argmax(1)
        apart = max(apart, error(net(scaled, x), net(theta, x)))
        norms = max(norms, error(scaled.norm(), theta.norm()))
        before, after = (float(softmax_hessian(net.at(x), each, label).trace()) for each in (theta, scaled))
        moved += abs(after / before - 1) > 0.1
    return judge(
        {"difference of the outputs": apart, "difference of the norms": norms, "traces that move, of 100": moved},
        "There is a sharper network of the same function and of the same weight norm.",
        printed=not (exact(norms) and moved >= 50),
        instead=exact(apart, norms) and moved >= 50,
    )
