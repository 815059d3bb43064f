"""Squared norms of the gradients of convolutions: ‖δUᵀ‖² with U the unfolded input (mathematics 4.5).

There are three forms: δ times the windows of the input; where positions are few and windows large, ‖δL‖² with L the
Cholesky factor of UᵀU; and for a first convolution followed by a max pooling, one product over the cells of the
pooling.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.blas import bmm, mm
from spiritlevel.watching import tiles
from spiritlevel.watching.norm_rules import GRAM_COST, Names, Rule, ScaleAndShift, Stacking, gram_of, squared
from spiritlevel.watching.tiles import Kernels, Tiles

_TALL = 64  # rows of an unfolded input beyond which several passes share one product
_PLACES = 4  # in a cell of a pooling; each costs a product of its own
_BLOCK, _BLOCKS = 32, 4  # fewest columns in a block of a triangle, and most blocks
_SINGULAR = 1e-14  # of the trace of a Gram matrix, added to its diagonal
_NEAR = 2**21  # numbers at a time: few enough to stay in cache, enough for all cores


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
        return ScaleAndShift(None, bias_name, torch.Size([weight.shape[0]] + [1] * dims), None)

    windows = Windows(input, pads, kernel, stride, dilation, groups)
    rule = ConvolutionRule(name, bias_name, windows, passes, weight[0].numel())
    if dims == 2 and groups == 1 and set(dilation) == {1}:
        rule.pooled = lambda cell: PooledConvolution(
            name, bias_name, windows.padded(slice(None)), weight, bias, stride, cell
        )
    if dims == 2 and pads == [(1, 1), (1, 1)] and tiles.fits(input, weight, stride, dilation, groups):
        rule.tiled = lambda kernels: Tiles(name, input, weight, kernels)
    return rule


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
            yield name, squared(bmm(rows, patches.mT).view(count, -1))
        if bias_name:
            yield bias_name, squared(delta.flatten(2).sum(2))

    return rule


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


class Windows:
    """What a convolution sees of its padded input: the windows side by side, or the products between them."""

    def __init__(
        self,
        input: Tensor,
        pads: Sequence[tuple[int, int]],
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        self.input, self.pads, self.groups = input, pads, groups
        self.kernel, self.stride, self.dilation = kernel, stride, dilation

    def padded(self, samples: slice) -> Tensor:
        some = self.input[samples]
        return F.pad(some, [p for pair in reversed(self.pads) for p in pair]) if any(map(any, self.pads)) else some

    def patches(self, samples: slice) -> Tensor:
        """U, (N · groups, numbers of a window, windows)."""
        return _patches(self.padded(samples), self.kernel, self.stride, self.dilation, self.groups)

    def _by_places(self, fan_in: int, positions: int) -> float:
        """What the products of all places of the input cost, and their sums along the kernel."""
        places = math.prod(self.kernel)
        single = math.prod(self.input.shape[2:]) ** 2 / math.prod(self.stride) * (fan_in / places)
        return single + places * positions**2 if self.groups == 1 else math.inf

    def gram_cost(self, fan_in: int, positions: int) -> float:
        """Multiply-adds of a sample's `gram`."""
        return min(self._by_places(fan_in, positions), self.groups * positions**2 * fan_in)

    def gram(self, samples: slice) -> Tensor:
        """UᵀU in float64, (N · groups, windows, windows).

        Neighbouring windows share most of their places: ⟨u_p, u_q⟩ = Σ_k ⟨x_{p+k}, x_{q+k}⟩ over the places k of the
        kernel, so that the products of single places, taken once, serve them all. With strides, both places of a
        product leave the same remainder, so one remainder is taken after the other.
        """
        some, dims = self.input[samples], len(self.kernel)
        positions = math.prod(self._count(d) for d in range(dims))
        fan_in = some.shape[1] // self.groups * math.prod(self.kernel)
        if self._by_places(fan_in, positions) >= self.groups * positions**2 * fan_in:
            return gram_of(self.patches(samples).mT)
        every = itertools.product(*map(range, self.stride))
        tables = (self._of_remainders(some, remainders) for remainders in every)
        return functools.reduce(Tensor.add_, tables).reshape(len(some), positions, positions)

    def _of_remainders(self, some: Tensor, remainders: tuple[int, ...]) -> Tensor:
        """The part of `gram` from places with these remainders modulo the strides, (N, *windows, *windows).

        Products of places are summed along one axis after the other (3 + 3 sums for a kernel of 3 × 3), without those
        beyond the margin, which are zero.
        """
        dims = len(remainders)
        for d, (first, step) in enumerate(zip(remainders, self.stride, strict=True)):
            some = some[(slice(None),) * (2 + d) + (slice(first, None, step),)]
        total = gram_of(some.flatten(2).mT).view(len(some), *some.shape[2:], *some.shape[2:])
        for d in range(dims):
            shape = list(total.shape)
            shape[1 + d] = shape[1 + dims + d] = self._count(d)
            sums = total.new_zeros(shape)
            for place in range(self.kernel[d]):
                if (to_and_of := self._met(d, place, remainders[d])) is not None:
                    to, of = to_and_of
                    _of_axes(sums, d, dims, to).add_(_of_axes(total, d, dims, of))
            total = sums
        return total

    def _count(self, d: int) -> int:
        """The number of windows along an axis."""
        size = self.input.shape[2 + d] + sum(self.pads[d])
        return (size - self.dilation[d] * (self.kernel[d] - 1) - 1) // self.stride[d] + 1

    def _met(self, d: int, place: int, remainder: int) -> tuple[slice, slice] | None:
        """The windows whose place of the kernel lies inside the input along an axis, and where it lies.

        Counted among the places with this remainder modulo the stride; `None` if it has another.
        """
        first, step = place * self.dilation[d] - self.pads[d][0], self.stride[d]
        shift, other = divmod(first - remainder, step)
        if other:
            return None
        low = max(0, -(first // step))
        high = max(low, min(self._count(d), (self.input.shape[2 + d] - 1 - first) // step + 1))
        return slice(low, high), slice(low + shift, max(0, high + shift))


def _of_axes(table: Tensor, d: int, dims: int, part: slice) -> Tensor:
    """The same part of axis d among the rows and among the columns of (N, *rows, *columns)."""
    everything = (slice(None),)
    return table[everything * (1 + d) + (part,)][everything * (1 + dims + d) + (part,)]


def _triangular(gram: Tensor, dtype: torch.dtype) -> Tensor | None:
    """L with LLᵀ = UᵀU for every sample, lower triangular, in this precision; `None` where there is none.

    A sum of squares of δL loses no more to rounding than one of δUᵀ, whereas the terms of ⟨δᵀδ, UᵀU⟩ cancel and would
    have to be summed in float64. What is added to the diagonal lets most singular products have a factor; it is about
    the square of what float32 rounds off.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(_SINGULAR * diagonal.sum(1, keepdim=True))
    factor, info = torch.linalg.cholesky_ex(gram)
    return None if bool(info.any()) else factor.to(dtype)


class ConvolutionRule(Stacking):
    """‖δUᵀ‖² with U the unfolded input; where positions are few and windows large, ‖δL‖² with LLᵀ = UᵀU.

    If U is tall, the cotangents of several passes go through one product together, a few samples at a time so that
    everything stays in the cache; otherwise U is made at the first pass and kept for the others.
    """

    def __init__(self, name: str, bias: str | None, windows: Windows, passes: int, fan_in: int) -> None:
        self.name, self.bias, self.windows, self.groups, self.passes = name, bias, windows, windows.groups, passes
        self.fan_in, self.stacks = fan_in, fan_in >= _TALL
        self.kept: tuple[Tensor | None, Tensor | None] | None = None
        self.pooled: Callable[[Cell], PooledConvolution] | None = None
        """The same convolution together with a max pooling, where that can be one product."""
        self.tiled: Callable[[Kernels], Tiles] | None = None
        """The same convolution in tiles, where that is possible."""

    def __call__(self, delta: Tensor) -> Iterator[tuple[str, Tensor]]:
        if self.kept is None:
            self.kept = self._patches_or_factor(slice(None), delta)
        for name, norms in self._norms([delta], *self.kept):
            yield name, norms[:, 0]

    def _patches_or_factor(self, samples: slice, delta: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Whichever method takes less work over all passes."""
        channels, positions = delta.shape[1], math.prod(delta.shape[2:])
        gram = GRAM_COST * self.windows.gram_cost(self.fan_in, positions) + self.groups * positions**3
        if gram + self.passes * channels * positions**2 < self.passes * channels * self.fan_in * positions:
            factor = _triangular(self.windows.gram(samples), delta.dtype)
            if factor is not None:
                return None, factor
        return self.windows.patches(samples), None

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) for the cotangents of several passes."""
        unfolded = self.groups * self.fan_in * math.prod(deltas[0].shape[2:])
        chunk = max(1, _NEAR // (unfolded + sum(delta[0].numel() for delta in deltas)))
        found: dict[str, list[Tensor]] = {}
        for start in range(0, len(deltas[0]), chunk):
            samples = slice(start, start + chunk)
            made = self._patches_or_factor(samples, deltas[0])
            for name, norms in self._norms([delta[samples] for delta in deltas], *made):
                found.setdefault(name, []).append(norms)
        for name, tables in found.items():
            yield name, torch.cat(tables)

    def bias_norms(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) of the bias alone, if there is one."""
        if self.bias:
            yield self.bias, torch.stack([squared(delta.flatten(2).sum(2)) for delta in deltas], 1)

    def _norms(
        self, deltas: list[Tensor], patches: Tensor | None, factor: Tensor | None
    ) -> Iterator[tuple[str, Tensor]]:
        count, groups, depth = len(deltas[0]), self.groups, len(deltas)
        rows = [delta.reshape(count * groups, delta.shape[1] // groups, -1) for delta in deltas]
        if factor is not None:
            yield self.name, _through(factor, rows).reshape(count, groups, depth).sum(1)
        else:
            assert patches is not None
            if groups == 1 and deltas[0].stride(1) == 1 and deltas[0].shape[1] > 1:  # the channels lie side by side
                stacked = torch.cat([row.mT for row in rows], 2).mT
            else:
                stacked = rows[0] if depth == 1 else torch.cat(rows, 1)
            gradients = bmm(stacked, patches.mT).view(count, groups, depth, -1)
            yield self.name, squared(gradients, 3).sum(1)
        yield from self.bias_norms(deltas)


def _through(factor: Tensor, rows: list[Tensor]) -> Tensor:
    """‖δL‖² (N, passes) for the δ of several passes, (N, channels, positions) each.

    A block of columns of L at a time, without the zeros above it.
    """
    count, channels, size = rows[0].shape
    width = max(_BLOCK, -(-size // _BLOCKS))
    products = factor.new_empty(len(rows), count, size, channels)
    for row, product in zip(rows, products, strict=True):
        for start in range(0, size, width):
            block = slice(start, start + width)
            bmm(factor[:, start:, block].mT, row.mT[:, start:], out=product[:, block])
    return squared(products, 3).sum(2).T  # sums in float64 of short ones in float32


class PooledConvolution(Stacking):
    """A first convolution and the max pooling that is its only reader, as one product over the cells of the pooling.

    A cell of p×p outputs looks at one window of the input; the kernel at each place of the cell is a row of a bank over
    that window. Windows times bank gives all outputs of all cells, and each channel keeps its largest: fewer
    copies than a convolution and a pooling, and the same windows serve the gradients. Only the chosen places carry a
    cotangent: with δ of the pooled values spread over the places, δ·windows is the gradient of the bank, and the map
    from kernel to bank, transposed, turns that into the gradient of the kernel.
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

    def several(self, deltas: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, squared norms (N, passes)) for the cotangents of several passes."""
        count, depth = len(self.windows), len(deltas)
        chunk = max(1, _NEAR // (self.windows[0].numel() + depth * self.chosen[0].numel()))
        weights, biases = [], []
        for start in range(0, count, chunk):
            some = slice(start, start + chunk)
            rows = torch.stack([delta[some].flatten(2) for delta in deltas], 1)  # (n, passes, channels, cells)
            spread = rows[:, :, :, None] * self.chosen[some, None]
            products = bmm(spread.flatten(1, 3), self.windows[some])
            gradients = mm(products.view(-1, self.at_place.shape[1]), self.at_place.T)
            weights.append(squared(gradients.view(len(rows), depth, -1), 2))
            biases.append(squared(rows.sum(3), 2))
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


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return tuple(value) * (dims // len(value)) if isinstance(value, list | tuple) else (value,) * dims
