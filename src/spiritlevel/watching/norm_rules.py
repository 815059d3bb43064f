"""Squared norms of per-sample gradients without the gradients: one rule per operation.

Each turns the cotangent δ that arrives at an operation's output into ‖∇_p (vᵀφₙ)‖² of every sample n and of the
parameters p that the operation was given: a linear layer needs only ‖a‖²‖δ‖², a convolution ‖δUᵀ‖² with U its unfolded
input (mathematics 4.5).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Norms = dict[str, Tensor]
Rule = Callable[[Tensor], Iterator[tuple[str, Tensor]]]
"""From the cotangent δ at an operation's output to (parameter name, squared norm per sample)."""
Names = dict[int, str]


def _squared(tensor: Tensor, dim: int = 1) -> Tensor:
    """‖·‖² over all dimensions from `dim` on, in float64: of every sample by default.

    `vector_norm` is several times faster than square and sum on the CPU. Its squares leave the range of float32 where
    the norms do not; those norms are taken again in float64. Looking for them would stall an accelerator, which
    takes all in float64 at once.
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


def _gram(rows: Tensor) -> Tensor:
    """All products of the rows of every sample, in float64: they are squares, most of which may cancel later."""
    rows = rows.double()
    return torch.bmm(rows, rows.mT)


_GRAM_COST = 2  # a product in float64 costs twice that in float32


def _product_rule(weight: str | None, bias: str | None, inputs: Tensor, passes: int) -> Rule:
    """Weight gradient δᵀa over positions: inputs a (N, P, k), cotangents δ (N, P, o)."""
    positions, fan_in = inputs.shape[1], inputs.shape[2]
    if positions == 1:
        size = _squared(inputs)

        def single(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
            norms = _squared(delta)
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
            if direct > _GRAM_COST * positions * (fan_in + passes * fan_out):
                if not gram:
                    gram.append(_gram(inputs))
                yield weight, (_gram(delta) * gram[0]).flatten(1).sum(1)
            else:
                yield weight, _squared(torch.bmm(delta.mT, inputs))
        if bias:
            yield bias, _squared(delta.sum(1))

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


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) * (dims // len(value)) if isinstance(value, list | tuple) else (value,) * dims


def _patches(
    input: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """The unfolded input (N·groups, channels·kernel, positions): one strided copy, faster than im2col on the CPU."""
    dims = len(kernel)
    for d in range(dims):
        input = input.unfold(2 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])
        input = input[..., :: dilation[d]]
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    count, channels = input.shape[:2]
    size = channels // groups * math.prod(kernel)
    return input.permute(order).reshape(count * groups, size, math.prod(input.shape[2 : 2 + dims]))


def convolution(
    names: Names,
    passes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Rule | None:
    """A convolution, grouped or not; without its weight, the bias alone."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:
        return None
    kernel = weight.shape[2:]
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(0, 0)] * dims if padding == "valid" else [(p, p) for p in _tuple(padding, dims)]
    name, bias_name = names.get(id(weight)), names.get(id(bias))
    if name is None:
        return _scale_and_shift(None, bias_name, torch.Size([weight.shape[0]] + [1] * dims), None)

    def padded(samples: slice) -> Tensor:
        some = input[samples]
        return F.pad(some, [p for pair in reversed(pads) for p in pair]) if any(map(any, pads)) else some

    sizes = [size + sum(pair) for size, pair in zip(input.shape[2:], pads, strict=True)]
    windows = Windows(padded, kernel, stride, dilation, groups, sizes)
    rule = ConvolutionRule(name, bias_name, windows, passes, weight[0].numel())
    if dims == 2 and groups == 1 and set(dilation) == {1}:
        rule.pooled = lambda cell: PooledConvolution(name, bias_name, padded(slice(None)), weight, bias, stride, cell)
    return rule


_TALL = 64  # rows of an unfolded input beyond which several passes share one product
_PLACES = 4  # in a cell of a pooling; each costs a product of its own
_NEAR = 2**21  # numbers at a time: few enough to stay in cache, enough for all cores


class Windows:
    """What a convolution sees of its padded input: the windows side by side, or the products between them."""

    def __init__(
        self,
        padded: Callable[[slice], Tensor],
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        sizes: Sequence[int],
    ) -> None:
        self.padded, self.kernel, self.stride, self.dilation, self.groups = padded, kernel, stride, dilation, groups
        self.sizes = sizes  # of the padded input

    def patches(self, samples: slice) -> Tensor:
        """U, (N · groups, numbers of a window, windows)."""
        return _patches(self.padded(samples), self.kernel, self.stride, self.dilation, self.groups)

    def _by_places(self, fan_in: int, positions: int) -> float:
        """What the products of all places of the input cost, and their sums along the kernel."""
        places = math.prod(self.kernel)
        return math.prod(self.sizes) ** 2 * (fan_in / places) + places * positions**2 if self.groups == 1 else math.inf

    def gram_cost(self, fan_in: int, positions: int) -> float:
        """Multiply-adds of a sample's `gram`."""
        return min(self._by_places(fan_in, positions), self.groups * positions**2 * fan_in)

    def gram(self, samples: slice) -> Tensor:
        """UᵀU in float64, (N · groups, windows, windows).

        Neighbouring windows share most of their places: ⟨u_p, u_q⟩ = Σ_k ⟨x_{p+k}, x_{q+k}⟩ over the places k of the
        kernel, so that the products of single places, taken once, serve them all.
        """
        input, dims = self.padded(samples), len(self.kernel)
        counts = [
            (size - d * (k - 1) - 1) // s + 1
            for size, d, k, s in zip(self.sizes, self.dilation, self.kernel, self.stride, strict=True)
        ]
        positions, fan_in = math.prod(counts), input.shape[1] // self.groups * math.prod(self.kernel)
        if self._by_places(fan_in, positions) >= self.groups * positions**2 * fan_in:
            return _gram(self.patches(samples).mT)
        products = _gram(input.flatten(2).mT).view(len(input), *self.sizes, *self.sizes)
        total = products.new_zeros(len(input), *counts, *counts)
        for place in itertools.product(*map(range, self.kernel)):
            part = products
            for axis in range(2 * dims):
                d = axis % dims
                first = place[d] * self.dilation[d]
                last = first + (counts[d] - 1) * self.stride[d] + 1
                part = part[(slice(None),) * (1 + axis) + (slice(first, last, self.stride[d]),)]
            total += part
        return total.view(len(input), positions, positions)


class ConvolutionRule:
    """‖δUᵀ‖² with U the unfolded input; where positions are few and channels many, ⟨δᵀδ, UᵀU⟩.

    If U is tall, the cotangents of several passes go through one product together, a few samples at a time so that
    everything stays in the cache; otherwise U is made at the first pass and kept for the others.
    """

    def __init__(self, name: str, bias: str | None, windows: Windows, passes: int, fan_in: int) -> None:
        self.name, self.bias, self.windows, self.groups, self.passes = name, bias, windows, windows.groups, passes
        self.fan_in, self.stacks = fan_in, fan_in >= _TALL
        self.kept: tuple[Tensor | None, Tensor | None] | None = None
        self.pooled: Callable[[Cell], PooledConvolution] | None = None
        """The same convolution together with a max pooling, where that can be one product."""

    def __call__(self, delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.kept is None:
            self.kept = self._patches_or_gram(slice(None), delta)
        for name, norms in self._norms([delta], *self.kept):
            yield name, norms[:, 0]

    def _patches_or_gram(self, samples: slice, delta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Whichever method takes less work over all passes."""
        channels, positions = delta.shape[1], math.prod(delta.shape[2:])
        gram = self.windows.gram_cost(self.fan_in, positions) + self.passes * channels * positions**2
        if _GRAM_COST * gram < self.passes * channels * self.fan_in * positions:
            return None, self.windows.gram(samples)
        return self.windows.patches(samples), None

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) for the cotangents of several passes."""
        unfolded = self.groups * self.fan_in * math.prod(deltas[0].shape[2:])
        chunk = max(1, _NEAR // (unfolded + sum(delta[0].numel() for delta in deltas)))
        found: dict[str, list[Tensor]] = {}
        for start in range(0, len(deltas[0]), chunk):
            samples = slice(start, start + chunk)
            made = self._patches_or_gram(samples, deltas[0])
            for name, norms in self._norms([delta[samples] for delta in deltas], *made):
                found.setdefault(name, []).append(norms)
        for name, tables in found.items():
            yield name, torch.cat(tables)

    def _norms(self, deltas: list[Tensor], patches: Tensor | None, gram: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        count, groups, depth = len(deltas[0]), self.groups, len(deltas)
        channels = deltas[0].shape[1] // groups
        positions = math.prod(deltas[0].shape[2:])
        rows = [delta.reshape(count * groups, channels, positions) for delta in deltas]
        stacked = rows[0] if depth == 1 else torch.cat(rows, 1)
        if gram is not None and channels < positions:
            double = stacked.double()
            yield self.name, torch.bmm(double, gram).mul_(double).view(count, groups, depth, -1).sum((1, 3))
        elif gram is not None:
            yield self.name, torch.stack([_gram(row.mT).mul_(gram).view(count, -1).sum(1) for row in rows], 1)
        else:
            assert patches is not None
            gradients = torch.bmm(stacked, patches.mT).view(count, groups, depth, -1)
            yield self.name, _squared(gradients, 3).sum(1)
        if self.bias:
            sums = stacked.sum(2).view(count, groups, depth, channels)
            yield self.bias, _squared(sums, 3).sum(1)


class PooledConvolution:
    """A first convolution and the max pooling that is its only reader, as one product over the cells of the pooling.

    A cell of p×p outputs looks at one window of the input; the kernel at each place of the cell is a row of a bank over
    that window. Windows times bank gives all outputs of all cells, and each channel keeps its largest: fewer
    copies than a convolution and a pooling, and the same windows serve the gradients. Only the chosen places carry
    one: with δ of the pooled values spread over the places, δ·windows is the gradient of the bank, and the map from
    kernel to bank, transposed, turns that into the gradient of the kernel.
    """

    stacks = True

    def __init__(
        self,
        name: str,
        bias_name: str | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        cell: Cell,
    ) -> None:
        self.name, self.bias = name, bias_name
        places = list(itertools.product(*map(range, cell.size)))
        kernel = weight.shape[1:].numel()
        reach = [weight.shape[2 + d] + (cell.size[d] - 1) * stride[d] for d in range(2)]
        at_place = weight.new_zeros(kernel, len(places), weight.shape[1], *reach)  # from a kernel to its rows
        units = torch.eye(kernel).view(kernel, *weight.shape[1:]).to(weight)
        for place, (i, j) in enumerate(places):
            rows = slice(i * stride[0], i * stride[0] + weight.shape[2])
            columns = slice(j * stride[1], j * stride[1] + weight.shape[3])
            at_place[:, place, :, rows, columns] = units
        self.at_place = at_place.flatten(1)
        for d in range(2):
            input = input.unfold(2 + d, reach[d], cell.step[d] * stride[d])
        count, _, *cells = input.shape[:4]
        self.windows = input.permute(0, 2, 3, 1, 4, 5).reshape(count, math.prod(cells), -1)
        bank = (weight.flatten(1) @ self.at_place).view(-1, self.windows.shape[2])
        values = torch.matmul(bank, self.windows.mT).view(count, len(weight), len(places), -1)
        top = values.amax(2)
        self.chosen = torch.empty_like(values)  # one at the first largest of each cell, zero elsewhere
        free = torch.ones_like(top)  # in floating point, which is twice as fast as with truth values
        for value, chosen in zip(values.unbind(2), self.chosen.unbind(2), strict=True):
            torch.eq(value, top, out=chosen)
            free.sub_(chosen.mul_(free))
        self.output = (top if bias is None else top.add_(bias[:, None])).view(count, -1, *cells)

    def __call__(self, delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, norms in self.several([delta]):
            yield name, norms[:, 0]

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) for the cotangents of several passes."""
        count, depth = len(self.windows), len(deltas)
        chunk = max(1, _NEAR // (self.windows[0].numel() + depth * self.chosen[0].numel()))
        weights, biases = [], []
        for start in range(0, count, chunk):
            some = slice(start, start + chunk)
            rows = torch.stack([delta[some].flatten(2) for delta in deltas], 1)  # (n, passes, channels, cells)
            spread = rows[:, :, :, None] * self.chosen[some, None]
            products = torch.bmm(spread.flatten(1, 3), self.windows[some])
            gradients = products.view(-1, self.at_place.shape[1]) @ self.at_place.T
            weights.append(_squared(gradients.view(len(rows), depth, -1), 2))
            biases.append(_squared(rows.sum(3), 2))
        yield self.name, torch.cat(weights)
        if self.bias:
            yield self.bias, torch.cat(biases)


class Cell(NamedTuple):
    """The `size` of a cell, from which a max pooling keeps one value, and the `step` from one cell to the next."""

    size: tuple[int, ...]
    step: tuple[int, ...]


def cell_of(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Cell | None:
    """The cell of a max pooling called with these arguments, if it has the plain form and is small."""
    plain = _tuple(padding, 2) == (0, 0) and _tuple(dilation, 2) == (1, 1) and not ceil_mode and not return_indices
    size = _tuple(kernel_size, 2)
    if not plain or math.prod(size) > _PLACES:
        return None
    return Cell(size, size if stride is None or stride == [] else _tuple(stride, 2))


def transposed_convolution(
    names: Names,
    passes: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Rule | None:
    """A transposed convolution: the windows are those of the cotangent."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:
        return None
    kernel = weight.shape[2:]
    stride, padding, dilation = _tuple(stride, dims), _tuple(padding, dims), _tuple(dilation, dims)
    name, bias_name = names.get(id(weight)), names.get(id(bias))
    sizes = input.shape[2:]

    def rule(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        count = delta.shape[0]
        if name:
            padded = F.pad(delta, [p for pad in reversed(padding) for p in (pad, pad)])
            for d in range(dims):  # the windows that an input position reaches; output_padding adds room beyond them
                padded = padded.narrow(2 + d, 0, (sizes[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1)
            patches = _patches(padded, kernel, stride, dilation, groups)
            rows = input.reshape(count * groups, -1, patches.shape[2])
            yield name, _squared(torch.bmm(rows, patches.mT).view(count, -1))
        if bias_name:
            yield bias_name, _squared(delta.flatten(2).sum(2))

    return rule


def _scale_and_shift(weight: str | None, bias: str | None, shape: torch.Size, normalised: Tensor | None) -> Rule:
    """Parameters of `shape`, broadcast against (N, …): gradients Σδ·x̂ and Σδ over what was broadcast."""

    def reduced(product: Tensor) -> Tensor:
        full = (1,) * (product.ndim - len(shape)) + tuple(shape)
        dims = [d for d in range(1, product.ndim) if full[d] == 1 and product.shape[d] > 1]
        return product.sum(dims, keepdim=True) if dims else product

    def rule(delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        if weight and normalised is not None:
            yield weight, _squared(reduced(delta * normalised))
        if bias:
            yield bias, _squared(reduced(delta))

    return rule


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
    shape = torch.Size([input.shape[1]] + [1] * (input.ndim - 2))
    normalised = (input - running_mean.view(shape)) * (running_var.view(shape) + eps).rsqrt()
    return _scale_and_shift(names.get(id(weight)), names.get(id(bias)), shape, normalised)


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
    return _scale_and_shift(names.get(id(weight)), names.get(id(bias)), shape, normalised)


def prelu(names: Names, passes: int, input: Tensor, weight: Tensor) -> Rule:
    """A slope for what is negative, shared or one per channel."""
    shape = weight.shape if weight.numel() == 1 else torch.Size([weight.numel()] + [1] * (input.ndim - 2))
    return _scale_and_shift(names.get(id(weight)), None, shape, input.clamp(max=0))


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
        yield name, (_gram(rows) * same).flatten(1).sum(1)

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
        return _scale_and_shift(name, None, shape, other) if scales else _scale_and_shift(None, name, shape, None)

    return build
