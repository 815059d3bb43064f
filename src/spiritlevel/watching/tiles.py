"""Convolutions of 3×3 places in tiles of 4×4: a quarter of the multiplications, for cotangents and for norms.

A product of polynomials of degree 2 and 3 is known from its values at six points (Toom and Cook; for convolutions
Winograd 1980, doi:10.1137/1.9781611970364, and Lavin and Gray 2016, arXiv:1509.09308). Here the points are 0, ±1, ±2
and ∞, in both directions. With Bᵀ taking the 6×6 window of a cotangent δ around each tile to its 36 values, and G and
G′ doing the same with the 3×3 kernel and with a 4×4 tile of the input x,

    δ taken back to the input:  Aᵀ [G w ⊙ Bᵀδ]        a sum over the channels of δ,
    gradient of the kernel:     A′ᵀ [Σ_tiles G′x ⊙ Bᵀδ]    for all pairs of channels,

so the values of δ serve both. Rounding errors are about four times those of the plain form (mathematics 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spiritlevel.binding.blas import bmm, mm
from spiritlevel.watching.norm_rules import squared

SIDE = 4  # of a tile
TOLERANCE = 1e-4  # of what is compared with the library, relative to its size
_POINTS = 36
_NEAR = 450_000  # numbers at a time that stay in the cache of a core
_LEAST_CHANNELS = 64
_WORTH = 384  # places of cotangents below which taking the kernel to its values costs more than it gains
_MOST = 2**26  # numbers of all kernels at the points, four times as many as they have themselves

_WINDOW = [
    [4, 0, -5, 0, 1, 0],
    [0, -4, -4, 1, 1, 0],
    [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0],
    [0, 2, -1, -2, 1, 0],
    [0, 4, 0, -5, 0, 1],
]
_POWERS = [  # of the points, divided by the products of their distances
    [1 / 4, 0, 0, 0],
    [-1 / 6, -1 / 6, -1 / 6, -1 / 6],
    [-1 / 6, 1 / 6, -1 / 6, 1 / 6],
    [1 / 24, 1 / 12, 1 / 6, 1 / 3],
    [1 / 24, -1 / 12, 1 / 6, -1 / 3],
    [0, 0, 0, 1],
]
_VALUES = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 0]]


def _to_values(size: int) -> Tensor:
    """From `size` numbers in a row to the values at the points: G of three, G′ of four."""
    powers = torch.tensor(_POWERS, dtype=torch.float64)[:, :size].clone()
    powers[-1] = torch.eye(size, dtype=torch.float64)[-1]
    return powers.float()


def _from_values(size: int) -> Tensor:
    """From the values at the points to `size` numbers in a row: Aᵀ to four, A′ᵀ to three."""
    values = torch.tensor(_VALUES, dtype=torch.float64)[:size].clone()
    values[-1, -1] = 1
    return values.float()


WINDOWS = torch.tensor(_WINDOW, dtype=torch.float32)
KERNELS, INPUTS = _to_values(3), _to_values(4)
PLACES, GRADIENTS = _from_values(4), _from_values(3)


def fits(input: Tensor, weight: Tensor, stride: object, dilation: object, groups: int) -> bool:
    """Whether a convolution with a margin of 1 has the form treated here, and enough channels to gain by it."""
    plain = weight.shape[2:] == (3, 3) and stride == dilation == (1, 1) and groups == 1
    wide = min(weight.shape[:2]) >= _LEAST_CHANNELS
    single = input.dtype == weight.dtype == torch.float32 and input.device.type == weight.device.type == "cpu"
    return plain and wide and single and not any(size % SIDE or not size for size in input.shape[2:])


class Kernels:
    """The values of kernels at the points, by name, once made; and whether what they give has been compared."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.compared: set[str] = set()
        self.usable = True
        self._most, self._kept = _MOST, dict[str, int]()

    def restrict(self, memory: int) -> None:
        """Take no more than an eighth of these bytes."""
        self._most = min(_MOST, memory // 32)
        if sum(self._kept.values()) > self._most:
            self._kept.clear()
            self.values.clear()

    def keep_room(self, name: str, numbers: int) -> bool:
        """Keep room for the values of a kernel, if there is any."""
        if name not in self._kept and sum(self._kept.values()) + numbers <= self._most:
            self._kept[name] = numbers
        return name in self._kept


class Misfit(RuntimeError):
    """What comes out of the tiles is not what the library gives."""


class Tiles:
    """A convolution in this form: its name, its input (N, C, H, W) and its kernel."""

    def __init__(self, name: str, input: Tensor, weight: Tensor, kernels: Kernels) -> None:
        self.name, self.input, self.weight, self.kernels = name, input, weight, kernels

    def worthwhile(self, passes: int) -> bool:
        """Whether the cotangents of this many passes are worth making the values of the kernel for."""
        if self.name in self.kernels.values:
            return True
        enough = passes * self.input[:, 0].numel() >= _WORTH
        return enough and self.kernels.keep_room(self.name, 4 * self.weight.numel())

    @property
    def kernel(self) -> Tensor:
        """(36, channels of the output, channels of the input)."""
        known = self.kernels.values.get(self.name)
        if known is None:
            turned = torch.kron(KERNELS, KERNELS).flip(1)  # by half a turn, as the kernel is on the way back
            known = mm(turned, self.weight.reshape(-1, 9).mT).view(_POINTS, *self.weight.shape[:2])
            self.kernels.values[self.name] = known
        return known

    @property
    def norms_pay(self) -> bool:
        """Whether the norms are quicker in this form: where tiles are many, and the gradients at the points few."""
        return 2 * self.input[0, 0].numel() >= SIDE**2 * self.weight.shape[0]

    def through(
        self, cotangents: Tensor, back: bool, norms: bool, owned: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """For cotangents (passes, N, C, H, W): those of the input, if wanted `back`; squared `norms` (N, passes).

        The norms are those of each sample's gradient of the kernel. Cotangents that are `owned` are overwritten if
        the result has their shape. Raises `Misfit` if results are not the library's.
        """
        passes, count, channels, height, width = cotangents.shape
        rows, first = cotangents.permute(0, 1, 3, 4, 2), cotangents[0, :1]
        across, down = width // SIDE, height // SIDE
        found = None
        if back:  # an image is read before it is written, and fresh memory costs as much as a product
            in_place = owned and self.weight.shape[1] == channels
            first = first.clone() if in_place and self.name not in self.kernels.compared else first
            found = rows if in_place else rows.new_empty(passes, count, height, width, self.weight.shape[1])
        table = torch.empty(count, passes, dtype=torch.float64) if norms else None
        room, inputs = _Room(rows), rows
        for samples, some in self._chunks(cotangents):
            part = rows[some, samples]
            (k, n), tiles = part.shape[:2], down * across
            windows = room.windows(part)
            values = room.along_both(WINDOWS, windows, 1)
            if found is not None:
                shape = _POINTS, n * tiles * k, found.shape[-1]
                products = bmm(values.view(_POINTS, -1, channels), self.kernel, out=room(0, *shape))
                places = room.along_both(PLACES, products, 2)
                target = found[some, samples].view(k, n, down, SIDE, across, SIDE, -1)
                target.permute(3, 5, 1, 2, 4, 0, 6).copy_(places.view(SIDE, SIDE, n, down, across, k, -1))
            if table is not None:
                inputs = self._inputs(samples) if not some.start else inputs
                deltas = values.view(_POINTS * n, tiles, k * channels)
                pairs = bmm(deltas.mT, inputs, out=room(0, _POINTS * n, k * channels, inputs.shape[2]))
                gradients = room.along_both(GRADIENTS, pairs, 2)
                table[samples, some] = squared(gradients.view(9, n * k, -1), 2).sum(0).view(n, k)
        found = None if found is None else found.permute(0, 1, 4, 2, 3)
        if self.name not in self.kernels.compared:
            self._compare(first, found, table)
        return found, table

    def _compare(self, cotangent: Tensor, found: Tensor | None, table: Tensor | None) -> None:
        """Raise `Misfit` unless the first image has what the library gives it."""
        options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        wanted = [found is not None, table is not None, False]
        back, gradient, _ = torch.ops.aten.convolution_backward(
            cotangent, self.input[:1], self.weight, None, *options, wanted
        )
        right = found is None or float((found[0, :1] - back).norm()) <= TOLERANCE * float(back.norm())
        if table is not None:
            square = float(gradient.norm().double()) ** 2
            right &= abs(float(table[0, 0]) - square) <= TOLERANCE * square
        if not right:
            raise Misfit(self.name)
        self.kernels.compared.add(self.name)

    def _chunks(self, cotangents: Tensor) -> Iterator[tuple[slice, slice]]:
        """Samples and passes at a time: few enough for the cache, but not few next to the kernel's own values."""
        passes, count, channels, height, width = cotangents.shape
        image = _POINTS * channels * height * width // SIDE**2
        most = max(1, max(_NEAR, _POINTS * self.weight.shape[:2].numel() // 2) // image)
        samples, some = (max(1, most // passes), passes) if most >= passes else (1, most)
        for start in range(0, count, samples):
            for first in range(0, passes, some):
                yield slice(start, start + samples), slice(first, first + some)

    def _inputs(self, samples: slice) -> Tensor:
        """The values of the tiles of the input, (36 · N, tiles, channels).

        In memory the tiles lie side by side, as in the input: that way they are gathered in a quarter of the time.
        """
        part = self.input[samples]
        n, channels, height, width = part.shape
        tiles = part.reshape(n, channels, height // SIDE, SIDE, width // SIDE, SIDE).permute(3, 5, 0, 1, 2, 4)
        values = mm(torch.kron(INPUTS, INPUTS), tiles.reshape(SIDE**2, -1))
        return values.view(_POINTS * n, channels, -1).mT


class _Room:
    """Memory that is reused for one chunk after another: new memory would push the old out of the cache."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._places = like, dict[int, Tensor]()
        self._padded: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, place: int, *shape: int) -> Tensor:
        size = math.prod(shape)
        if place not in self._places or self._places[place].numel() < size:
            self._places[place] = self._like.new_empty(size)
        return self._places[place][:size].view(shape)

    def along_both(self, matrix: Tensor, values: Tensor, place: int) -> Tensor:
        """M along the first axis and along the second of (36, …), in a third of the work of M ⊗ M."""
        rows, columns = matrix.shape
        first = mm(matrix, values.view(columns, -1), out=self(3, rows, values.numel() // columns))
        first = first.view(rows, columns, -1)
        found = self(place, rows, rows, first.shape[2])
        return bmm(matrix.expand(rows, rows, columns), first, out=found).view(rows**2, -1)

    def windows(self, rows: Tensor) -> Tensor:
        """Every 6×6 window around a tile, with zeros beyond the margin: (36, N · tiles · passes · channels)."""
        k, n, height, width, channels = rows.shape
        if (k, n) not in self._padded:
            self._padded[k, n] = rows.new_zeros(k, n, height + 2, width + 2, channels)
        padded = self._padded[k, n]
        padded[:, :, 1:-1, 1:-1] = rows
        a, b, c, d, e = padded.stride()
        shape = SIDE + 2, SIDE + 2, n, height // SIDE, width // SIDE, k, channels
        every = padded.as_strided(shape, (c, d, b, SIDE * c, SIDE * d, a, e))
        return self(0, *shape).copy_(every).view(_POINTS, -1)
