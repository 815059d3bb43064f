"""All maps of one kind that a network allows, as points: drawn at random, or climbed to along the slope of a number.

A `Move` is one place where a map is free: a matrix between two layers, factors of channels, a vector added to biases.
Its point is a tensor, its limit the `size` of the transform. A `Family` has all moves of one kind in a network, which
was recorded once, and turns points into certified transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.maps import LinearMap, Step, invertible, rotation, spread
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.channels import Block

Objective = Callable[[LinearMap, Tensor], Tensor]
"""A number to make large, as a function of T and of a shift of the whole state, with a graph."""

_OVERSHOOT = 1.5  # steps together reach this many times the limit, since a slope turns on the way


class Move(Protocol):
    """One place where a map is free."""

    def drawn(self, source: torch.Generator) -> Tensor:
        """A random point at the limit."""

    @property
    def identity(self) -> Tensor:
        """The point that changes nothing."""

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        """A step uphill that is this share of the limit, kept within it."""

    def steps(self, point: Tensor) -> list[Step]:
        """The map of the parameters, T."""

    def shift(self, point: Tensor) -> tuple[Tensor, Tensor] | None:
        """Entries of the state and what is added to each."""


@dataclass(frozen=True)
class Mixing:
    """An invertible matrix A where a block is written, A⁻ᵀ where it is read; its condition is at most `size`.

    A step is A → exp(ηX)A, X the orthogonal factor of the slope along the group, ∇f Aᵀ.
    """

    block: Block
    size: float

    def drawn(self, source: torch.Generator) -> Tensor:
        return invertible(self.block.units, self.size, source)

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.block.units, dtype=torch.float64)

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        reach = math.log(self.size) / 2
        left, sizes, right = torch.linalg.svd(slope @ point.T)
        if not float(sizes[0]) > 0:
            return point
        moved = torch.linalg.matrix_exp(share * reach * left @ right) @ point
        left, sizes, right = torch.linalg.svd(moved)
        return left * sizes.log().clamp(-reach, reach).exp() @ right

    def steps(self, point: Tensor) -> list[Step]:
        return block_steps(self.block, point)

    def shift(self, point: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Scaling:
    """One factor for each unit of a block, the largest at most `size` times the smallest, signs aside."""

    block: Block
    size: float
    signed: bool = False

    def drawn(self, source: torch.Generator) -> Tensor:
        return spread(self.block.units, self.size, source, signed=self.signed)

    @property
    def identity(self) -> Tensor:
        return torch.ones(self.block.units, dtype=torch.float64)

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        reach = math.log(self.size) / 2
        powers = point.abs().log() + share * reach * (slope * point).sign()
        return point.sign() * powers.clamp(-reach, reach).exp()

    def steps(self, point: Tensor) -> list[Step]:
        return block_steps(self.block, point)

    def shift(self, point: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Turning:
    """A number times a rotation of every pair of rows that a rotary embedding turns together, or a number alone.

    The point is (logarithm of the number, angle).
    """

    block: Block
    size: float

    def drawn(self, source: torch.Generator) -> Tensor:
        power = (torch.rand((), generator=source, dtype=torch.float64) - 0.5) * math.log(self.size)
        angle = 2 * math.pi * torch.rand((), generator=source, dtype=torch.float64)
        return torch.stack([power, angle])

    @property
    def identity(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        reach = math.log(self.size) / 2
        moved = point + share * torch.tensor([reach, math.pi / 2], dtype=torch.float64) * slope.sign()
        return torch.stack([moved[0].clamp(-reach, reach), moved[1]])

    def steps(self, point: Tensor) -> list[Step]:
        factor = point[0].exp()
        rows = sum(len(slot.entries) for slot in self.block.slots)
        if 2 * len(self.block.pairs) != rows:  # not every row has one partner
            return block_steps(self.block, factor[None])
        cos, sin = point[1].cos(), point[1].sin()
        turn = torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])
        return [Step(pair.entries, turn * (factor if pair.side > 0 else 1 / factor)) for pair in self.block.pairs]

    def shift(self, point: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Rotating:
    """An orthogonal matrix, the same where a block is written and where it is read; `size` has no meaning."""

    block: Block

    def drawn(self, source: torch.Generator) -> Tensor:
        return rotation(self.block.units, source)

    @property
    def identity(self) -> Tensor:
        return torch.eye(self.block.units, dtype=torch.float64)

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        along = slope @ point.T
        turn = along - along.T
        length = float(torch.linalg.matrix_norm(turn, 2))
        return torch.linalg.matrix_exp(share * math.pi / 2 / length * turn) @ point if length else point

    def steps(self, point: Tensor) -> list[Step]:
        return [Step(slot.entries, point) for slot in self.block.slots]

    def shift(self, point: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Shifting:
    """A vector u added to the state: u[i] to all `entries[i]`, of length at most `limit` as a change of the state.

    `undone` are the rows of layers that read what is shifted, and the biases in which −Wu undoes it.
    """

    entries: tuple[Tensor, ...]
    limit: float
    undone: tuple[tuple[Tensor, Tensor], ...] = ()
    lengths: tuple[int, ...] = ()  # of what is drawn one after another; by default all at once

    @property
    def _counts(self) -> Tensor:
        return torch.tensor([len(entries) for entries in self.entries], dtype=torch.float64)

    def drawn(self, source: torch.Generator) -> Tensor:
        parts = [
            torch.randn(length, generator=source, dtype=torch.float64) for length in self.lengths or [len(self.entries)]
        ]
        return self._within(torch.cat(parts), always=True)

    def _within(self, point: Tensor, always: bool = False) -> Tensor:
        length = float((self._counts * point.square()).sum().sqrt())
        return point * (self.limit / length) if length > self.limit or (always and length) else point

    @property
    def identity(self) -> Tensor:
        return torch.zeros(len(self.entries), dtype=torch.float64)

    def climbed(self, point: Tensor, slope: Tensor, share: float) -> Tensor:
        """All the way: the climbed function is convex in u, so where its tangent is highest it is at least as high."""
        del share
        return self._within(slope / self._counts, always=True) if bool(slope.any()) else point

    def steps(self, point: Tensor) -> list[Step]:
        found = []
        for rows, bias in self.undone:
            count = len(rows)
            matrix = torch.eye(count + 1, dtype=torch.float64)
            below = torch.cat([-point, torch.zeros(1, dtype=torch.float64)])
            found.append(Step(torch.cat([rows, bias[None]]), matrix + matrix[-1][:, None] * below))
        return found

    def shift(self, point: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat(self.entries), torch.repeat_interleave(point, self._counts.long())


@dataclass
class Family:
    """All moves of one kind in a recorded network, and what a certificate of their maps needs to know."""

    watched: Watched
    moves: Sequence[Move]
    notes: tuple[str, ...] = ()
    keeps: str = "outputs"
    start: nn.Module | None = None
    shapes: dict[str, torch.Size] = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = {name: tensor.shape for name, tensor in self.watched.graph.state.items()}

    def drawn(self) -> Transformed:
        """A transform at random, at the limit of its size."""
        return self.at([move.drawn(self.watched.source) for move in self.moves])

    def at(self, points: Sequence[Tensor]) -> Transformed:
        """The certified transform of a point of each move."""
        steps, shift = self._made(points)
        moved = None
        if shift is not None:
            parts = shift.split([shape.numel() for shape in self.shapes.values()])
            state = self.watched.graph.state
            named = zip(state.items(), parts, strict=True)
            moved = {name: part.reshape(tensor.shape).to(tensor.device) for (name, tensor), part in named if part.any()}
        return self.watched.mapped(steps, shift=moved, notes=self.notes, keeps=self.keeps, start=self.start)

    def climb(self, objective: Objective, count: int) -> list[Tensor]:
        """Points uphill from the identity, by this many steps along the slope of a number; each within its limit."""
        points = [move.identity for move in self.moves]
        for _ in range(count):
            leaves = [point.clone().requires_grad_() for point in points]
            with torch.enable_grad():
                steps, shift = self._made(leaves)
                mapping = LinearMap(self.shapes, steps)
                nothing = torch.zeros(mapping.layout.size, dtype=torch.float64)
                value = objective(mapping, nothing if shift is None else shift)
                if not value.requires_grad:  # nothing that is measured moves
                    break
                slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            if not all(bool(slope.isfinite().all()) for slope in slopes):
                break
            points = [
                move.climbed(point, slope, _OVERSHOOT / count)
                for move, point, slope in zip(self.moves, points, slopes, strict=True)
            ]
        return points

    def _made(self, points: Sequence[Tensor]) -> tuple[list[Step], Tensor | None]:
        both = list(zip(self.moves, points, strict=True))
        steps = [step for move, point in both for step in move.steps(point)]
        shifts = [found for move, point in both if (found := move.shift(point)) is not None]
        if not shifts:
            return steps, None
        flat = torch.zeros(sum(shape.numel() for shape in self.shapes.values()), dtype=torch.float64)
        for entries, values in shifts:
            flat = flat.index_add(0, entries, values)
        return steps, flat


def block_steps(block: Block, matrix: Tensor) -> list[Step]:
    """The map of one block: a matrix (a vector if diagonal) where it is written, the inverse transpose where read."""
    undo = 1 / matrix if matrix.ndim == 1 else torch.linalg.inv(matrix).T
    return [Step(slot.entries, matrix if slot.side > 0 else undo) for slot in block.slots]
