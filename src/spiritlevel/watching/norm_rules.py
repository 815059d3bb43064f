"""Squared norms of per-sample gradients without the gradients: one rule per operation.

Each turns the cotangent δ that arrives at an operation's output into ‖∇_p (vᵀφₙ)‖² of every sample n and of the
parameters p that the operation was given: a linear layer needs only ‖a‖²‖δ‖² (mathematics 4.5). Convolutions are in
`convolution_norms`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.blas import bmm
from spiritlevel.watching.pullbacks import channels_last

Norms = dict[str, Tensor]
Rule = Callable[[Tensor], Iterator[tuple[str, Tensor]]]
"""From the cotangent δ at an operation's output to (parameter name, squared norm per sample)."""
Names = dict[int, str]
_NEAR = 2**17  # numbers of a pass at a time


def squared(tensor: Tensor, dim: int = 1) -> Tensor:
    """‖·‖² over all dimensions from `dim` on, in float64: of every sample by default.

    `vector_norm` is several times faster than square and sum on the CPU. Its squares leave the range of float32 where
    the norms do not; those norms are taken again in float64. Looking for them would stall an accelerator, so there
    everything is taken in float64 at once.
    """
    rows = tensor.flatten(dim)
    if rows.device.type != "cpu":
        return torch.linalg.vector_norm(rows, dim=dim, dtype=torch.float64).square()
    norms = torch.linalg.vector_norm(rows, dim=dim)
    if rows.dtype != torch.float64:
        least, most = torch.aminmax(norms) if norms.numel() else (norms.new_ones(()),) * 2
        if not (least > 1e-15 and most < 1e18):
            unsafe = ~((norms > 1e-15) & (norms < 1e18))
            norms = norms.double()
            norms[unsafe] = torch.linalg.vector_norm(rows[unsafe], dim=1, dtype=torch.float64)
    return norms.double().square()


def gram_of(rows: Tensor) -> Tensor:
    """All products of the rows of every sample, in float64: they are squares, most of which may cancel later."""
    rows = rows.double()
    return torch.bmm(rows, rows.mT)


GRAM_COST = 2  # a product in float64 costs twice that in float32


def _product_rule(weight: str | None, bias: str | None, inputs: Tensor, passes: int) -> Rule:
    """Weight gradient δᵀa over positions: inputs a (N, P, k), cotangents δ (N, P, o)."""
    positions, fan_in = inputs.shape[1], inputs.shape[2]
    if positions == 1:
        size = squared(inputs)

        def single(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
            norms = squared(delta)
            if weight:
                yield weight, norms * size
            if bias:
                yield bias, norms

        return single
    gram: list[Tensor] = []

    def several(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        fan_out = delta.shape[2]
        if weight:
            direct = passes * fan_in * fan_out
            if direct > GRAM_COST * positions * (fan_in + passes * fan_out):
                if not gram:
                    gram.append(gram_of(inputs))
                yield weight, (gram_of(delta) * gram[0]).flatten(1).sum(1)
            else:
                yield weight, squared(bmm(delta.mT, inputs))
        if bias:
            yield bias, squared(delta.sum(1))

    return several


def linear(names: Names, passes: int, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Rule:
    """A linear layer, x Wᵀ + b over the last axis."""
    shape = input.shape[0], math.prod(input.shape[1:-1])  # even if there are no rows at all
    rule = _product_rule(names.get(id(weight)), names.get(id(bias)), input.reshape(*shape, input.shape[-1]), passes)
    return lambda delta: rule(delta.reshape(*shape, delta.shape[-1]))


def matmul(names: Names, passes: int, input: Tensor, other: Tensor) -> Rule | None:
    """A product x W with a parameter W that is a matrix."""
    return linear(names, passes, input, other) if other.ndim == 2 and id(input) not in names else None


def addmm(names: Names, passes: int, bias: Tensor, input: Tensor, other: Tensor) -> Rule | None:
    """A product with a bias, b + x W."""
    if id(input) in names or bias.ndim != 1:
        return None
    return linear(names, passes, input, other, bias)


class Stacking(ABC):
    """A rule that takes the cotangents of several passes together, where they are available together."""

    stacks = False
    """Whether that gains so much that they should be kept until all have arrived."""

    @abstractmethod
    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) for the cotangents of several passes."""

    def __call__(self, delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, norms in self.several([delta]):
            yield name, norms[:, 0]


class ScaleAndShift(Stacking):
    """Parameters of `shape`, broadcast against (N, …): gradients Σδ·x̂ and Σδ over what was broadcast."""

    def __init__(self, weight: str | None, bias: str | None, shape: torch.Size, normalised: Tensor | None) -> None:
        self.weight, self.bias, self.shape, self.normalised = weight, bias, shape, normalised

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        scaled = self.normalised if self.weight else None
        sums: dict[str, list[Tensor]] = {}
        for some in _few_at_a_time(deltas[0]):
            parts: dict[str, list[Tensor]] = {}
            for delta in deltas:  # both sums while it is in the cache
                part = delta[some]
                if self.weight and scaled is not None:
                    parts.setdefault(self.weight, []).append(self._reduced(part * scaled[some]))
                if self.bias:
                    parts.setdefault(self.bias, []).append(self._reduced(part))
            for name, each in parts.items():
                sums.setdefault(name, []).append(torch.stack(each, 1))
        for name, tables in sums.items():
            yield name, squared(torch.cat(tables), 2)

    def _reduced(self, product: Tensor) -> Tensor:
        full = (1,) * (product.ndim - len(self.shape)) + tuple(self.shape)
        dims = [d for d in range(1, product.ndim) if full[d] == 1 and product.shape[d] > 1]
        return product.sum(dims, keepdim=True) if dims else product


def _few_at_a_time(values: Tensor) -> Iterator[slice]:
    """Parts of the samples: few enough that what is made of them is still in a core's cache when it is read."""
    count = len(values)
    chunk = max(1, _NEAR * count // max(1, values.numel())) if values.device.type == "cpu" else count
    return (slice(start, start + chunk) for start in range(0, max(1, count), max(1, chunk)))  # one part of no samples


class _BatchNorm(Stacking):
    """Scale and shift after running statistics; what is scaled is made at the first pass.

    It then has the order of δ in memory, which is known only now.
    """

    def __init__(
        self, weight: str | None, bias: str | None, input: Tensor, mean: Tensor, var: Tensor, eps: float
    ) -> None:
        self.weight, self.bias, self.input, self.version = weight, bias, input, input._version
        self.mean, self.var, self.eps = mean, var, eps
        self.made: ScaleAndShift | None = None

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        if self.made is None:
            if self.input._version != self.version:
                raise RuntimeError("the input of a batch norm has been modified by an inplace operation")
            last = deltas[0].ndim == 4 and not deltas[0].is_contiguous()
            values = channels_last(self.input) if last else self.input
            normalised = F.batch_norm(values, self.mean, self.var, eps=self.eps)
            shape = torch.Size([values.shape[1]] + [1] * (values.ndim - 2))
            self.made = ScaleAndShift(self.weight, self.bias, shape, normalised)
        yield from self.made.several(deltas)


def batch_norm(
    names: Names,
    passes: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Rule | None:
    """Batch norm by running statistics."""
    if training or running_mean is None or running_var is None:
        return None
    return _BatchNorm(names.get(id(weight)), names.get(id(bias)), input, running_mean, running_var, eps)


def group_norm(
    names: Names,
    passes: int,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Rule:
    """Scale and shift of each channel after the groups' own statistics."""
    shape = torch.Size([input.shape[1]] + [1] * (input.ndim - 2))
    normalised = F.group_norm(input, num_groups, eps=eps)
    return ScaleAndShift(names.get(id(weight)), names.get(id(bias)), shape, normalised)


def prelu(names: Names, passes: int, input: Tensor, weight: Tensor) -> Rule:
    """A slope for what is negative, shared or one per channel."""
    shape = weight.shape if weight.numel() == 1 else torch.Size([weight.numel()] + [1] * (input.ndim - 2))
    return ScaleAndShift(names.get(id(weight)), None, shape, input.clamp(max=0))


def embedding(
    names: Names, passes: int, input: Tensor, weight: Tensor, padding_idx: int | None = None, *options: Any, **more: Any
) -> Rule | None:
    """Rows of a table: uses of the same token in a sample meet in one row."""
    if options or any(more.get(option) for option in ("max_norm", "scale_grad_by_freq")):
        return None
    tokens = input.reshape(input.shape[0], -1)
    # a token that occurs twice adds up its two gradients
    same = tokens[:, :, None] == tokens[:, None, :]
    if padding_idx is not None:
        same = same & (tokens != padding_idx % weight.shape[0])[:, :, None]
    name = names[id(weight)]

    def rule(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        rows = delta.reshape(delta.shape[0], tokens.shape[1], -1)
        yield name, (gram_of(rows) * same).flatten(1).sum(1)

    return rule


def broadcast(*, scales: bool) -> Callable[..., Rule | None]:
    """The rule of a sum, or of a product if it `scales`, of a bare parameter and values (N, …)."""

    def build(names: Names, passes: int, first: Any, second: Any) -> Rule | None:
        parameter, other = (first, second) if id(first) in names else (second, first)
        if not isinstance(other, Tensor) or id(other) in names or other.ndim < 2:
            return None
        shape = parameter.shape
        if len(shape) > other.ndim or (len(shape) == other.ndim and shape[0] != 1):
            return None  # it would be broadcast over the samples, or hold a row for each of them
        if torch.broadcast_shapes(shape, other.shape) != other.shape:
            return None
        name = names[id(parameter)]
        return ScaleAndShift(name, None, shape, other) if scales else ScaleAndShift(None, name, shape, None)

    return build
