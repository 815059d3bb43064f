"""What the checks share: random instances from a seed, small networks with flat parameters, dense Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn.functional import softplus

from spiritlevel.binding.losses import CrossEntropy

Rng = np.random.Generator
TOLERANCE = 1e-9
"""An identity passes if its largest error, relative to the largest entry, is below this: float64 leaves some 1e-14."""


def generator(seed: int) -> Rng:
    """The only source of randomness of a check; NumPy's, since its numbers are the same on every machine."""
    return np.random.default_rng(seed)


def normal(rng: Rng, *shape: int, spread: float = 1.0) -> Tensor:
    """Independent normal numbers in float64."""
    return torch.from_numpy(spread * rng.standard_normal(shape))


def error(found: Any, expected: Any) -> float:
    """The largest deviation relative to the largest expected entry; raises where a number is not finite.

    >>> error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    """
    found, expected = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    if found.shape != expected.shape:
        raise ArithmeticError(f"shapes {tuple(found.shape)} and {tuple(expected.shape)} cannot be compared")
    size = float(expected.abs().max())
    value = float((found - expected).abs().max()) / (size or 1.0)
    if not math.isfinite(value):
        raise ArithmeticError("a number to be compared is not finite")
    return value


def exact(*errors: float) -> bool:
    """Whether every error is rounding."""
    return all(value < TOLERANCE for value in errors)


def vanishes(sizes: Sequence[float]) -> bool:
    """Whether a sequence goes to zero, as far as numbers can show: it ends falling, and below 1e-6 of its start."""
    return sizes[-1] < sizes[-2] < sizes[-3] and sizes[-1] < 1e-6 * sizes[0]


def diverges(sizes: Sequence[float]) -> bool:
    """Whether a sequence grows at every step, and by more than a hundred in all."""
    return all(a < b for a, b in pairwise(sizes)) and sizes[-1] > 100 * sizes[0]


def settles(sizes: Sequence[float]) -> bool:
    """Whether a sequence tends to a limit that is not zero: its last two values agree to 1e-3."""
    return sizes[-1] > 0 and abs(sizes[-1] / sizes[-2] - 1) < 1e-3


@dataclass(frozen=True)
class Mlp:
    """A dense network as a function of one flat parameter vector: W₁, b₁, W₂, b₂, … with W of shape (out, in).

    >>> net = Mlp((3, 4, 2))
    >>> net.size, net(net.draw(generator(0)), torch.ones(5, 3, dtype=torch.float64)).shape
    (26, torch.Size([5, 2]))
    """

    sizes: tuple[int, ...]
    bias: bool = True
    activation: Callable[[Tensor], Tensor] = torch.relu
    last: Callable[[Tensor], Tensor] | None = None

    @property
    def depth(self) -> int:
        """The number of weight layers, K."""
        return len(self.sizes) - 1

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Weights and biases of every layer."""
        return [(a * b, b if self.bias else 0) for a, b in pairwise(self.sizes)]

    @property
    def size(self) -> int:
        """The number of parameters, P."""
        return sum(weights + biases for weights, biases in self.counts)

    def split(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """W and b of every layer; an empty b without biases."""
        parts = theta.split([count for pair in self.counts for count in pair])
        shapes = [(b, a) for a, b in pairwise(self.sizes)]
        return [(parts[2 * k].reshape(shape), parts[2 * k + 1]) for k, shape in enumerate(shapes)]

    def join(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The inverse of `split`."""
        return torch.cat([part.reshape(-1) for layer in layers for part in layer])

    def factors(self, weights: Sequence[float], biases: Sequence[float] | None = None) -> Tensor:
        """One factor per parameter, from one factor for the weights and one for the biases of every layer."""
        pairs = zip(self.counts, weights, weights if biases is None else biases, strict=True)
        return torch.cat(
            [torch.full((n,), float(f), dtype=torch.float64) for (a, b), v, w in pairs for n, f in ((a, v), (b, w))]
        )

    def where(self, layer: int, kind: str = "both") -> Tensor:
        """A mask of the weights, the biases or both of one layer, counted from 1."""
        masks = []
        for k, (weights, biases) in enumerate(self.counts, 1):
            masks += [torch.full((weights,), k == layer and kind != "biases")]
            masks += [torch.full((biases,), k == layer and kind != "weights")]
        return torch.cat(masks)

    def draw(self, rng: Rng, spread: float = 1.0) -> Tensor:
        """Normal weights of standard deviation spread·√(2/inputs), normal biases of half the spread."""
        layers = [
            (normal(rng, b, a, spread=spread * math.sqrt(2 / a)), normal(rng, b if self.bias else 0, spread=spread / 2))
            for a, b in pairwise(self.sizes)
        ]
        return self.join(layers)

    def hidden(self, theta: Tensor, x: Tensor) -> Tensor:
        """The inputs of the last layer."""
        for weight, bias in self.split(theta)[:-1]:
            x = self.activation(x @ weight.T + bias) if self.bias else self.activation(x @ weight.T)
        return x

    def at(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        """The outputs at fixed inputs, as a function of the parameters."""
        return lambda theta: self(theta, x)

    def loss(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        """The mean cross entropy at fixed inputs and labels, as a function of the parameters."""
        return lambda theta: cross_entropy(self(theta, x), y)

    def __call__(self, theta: Tensor, x: Tensor) -> Tensor:
        """Outputs (N, C) of inputs (N, d)."""
        weight, bias = self.split(theta)[-1]
        z = self.hidden(theta, x) @ weight.T
        z = z + bias if self.bias else z
        return z if self.last is None else self.last(z)


def second_derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """All second derivatives, reverse mode over reverse mode."""
    return jacrev(jacrev(function))


def dense(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """The Hessian of a scalar function by automatic differentiation; raises unless it is symmetric."""
    matrix = second_derivative(function)(theta).detach()
    if error(matrix.T, matrix) > 1e-8:
        raise ArithmeticError("automatic differentiation returned a Hessian that is not symmetric")
    return (matrix + matrix.T) / 2


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """−log S_y = log(1 + Σ_{k≠y} e^{φ_k − φ_y}) of every row, accurate for tiny losses too."""
    rivals = torch.logsumexp(logits.scatter(1, y[:, None], -math.inf), 1)
    return softplus(rivals - logits.gather(1, y[:, None])[:, 0])


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean of log Σ_k e^{φ_k} − φ_y."""
    return (torch.logsumexp(logits, 1) - logits.gather(1, y[:, None])[:, 0]).mean()


def softmax_hessian(net: Callable[[Tensor], Tensor], theta: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """∇²_θ of the mean cross entropy of scale·φ(θ), φ = net(θ) of shape (N, C), accurate at any margin.

    scale²·JᵀAJ + scale·Σ_c g_c∇²φ_c, A and g from the closed forms of `losses`: only the outputs are differentiated.
    """
    outputs = net(theta).detach()
    jacobian = jacrev(net)(theta).detach()
    loss = CrossEntropy()
    curvature, slope = loss.hessian(scale * outputs, y), loss.gradient(scale * outputs, y)
    matrix = scale**2 * torch.einsum("ncp,ncd,ndq->pq", jacobian, curvature, jacobian)
    return (matrix + scale * second_derivative(lambda t: (slope * net(t)).sum())(theta).detach()) / len(y)


def gauss_newton(net: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """The square root J/√N of the Hessian JᵀJ/N of ½‖φ − y‖², averaged over N inputs, where the loss is zero."""
    jacobian = jacrev(net)(theta).detach()
    return jacobian.reshape(-1, theta.numel()) / math.sqrt(jacobian.shape[0])


def rank(matrix: Tensor, cut: float = 1e-9) -> int:
    """The number of singular values above `cut` times the largest."""
    if not matrix.numel():
        return 0
    values = torch.linalg.svdvals(matrix)
    return int((values > cut * values[0]).sum())


def alive(net: Mlp, rng: Rng, x: Tensor) -> Tensor:
    """Parameters of a rectified network without dead units: each is active for part of the inputs.

    Every unit is drawn until it is active for a quarter to three quarters of the inputs, or the best of 60 draws is
    used; layers are scaled to outputs of unit variance. The rank of the Hessian then hardly depends on the seed.
    """
    layers, h = [], x
    for k, (fan_in, fan_out) in enumerate(pairwise(net.sizes), 1):
        units = []
        for _ in range(fan_out):
            best, lowest = None, math.inf
            for _ in range(60):
                weight = normal(rng, fan_in)
                shift = normal(rng, 1, spread=0.5 * float(h.std())) if net.bias else torch.zeros(1, dtype=torch.float64)
                away = abs(float((h @ weight + shift > 0).double().mean()) - 0.5)
                if away < lowest:
                    best, lowest = (weight, shift), away
                if lowest < 0.25 or k == net.depth:
                    break
            assert best is not None
            units.append(best)
        weights, biases = torch.stack([w for w, _ in units]), torch.cat([b for _, b in units])
        outputs = h @ weights.T + biases
        size = outputs.std()
        layers.append((weights / size, biases / size if net.bias else biases[:0]))
        h = torch.relu(outputs / size)
    return net.join(layers)


def simplex(rng: Rng, count: int, classes: int) -> tuple[Tensor, Tensor]:
    """Random logits of all temperatures, from nearly uniform to nearly one-hot, and random labels."""
    logits = normal(rng, count, classes) * torch.exp(normal(rng, count, 1))
    return logits, torch.from_numpy(rng.integers(0, classes, count))
