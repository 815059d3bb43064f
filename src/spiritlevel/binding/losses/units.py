"""Single positions of sequences and images as samples by themselves: `unit="token"`.

A unit is a sequence and a place in it; its outputs are the row of logits there. Rows of one sequence share everything
before them, so each unit runs its whole sequence: only that gives its gradient a norm of its own. Means over
units need no such copies, see `CrossEntropy.per`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from spiritlevel.binding.losses.base import Loss
from spiritlevel.binding.losses.cross_entropy import CrossEntropy
from spiritlevel.binding.losses.heads import Head
from spiritlevel.errors import InputError

_UNITS = 1024  # units whose sequences are copied at once by default


class Unit(NamedTuple):
    """The inputs of units: those of their samples, one for each unit; which sample that is, and where in it."""

    inputs: Any
    sample: Tensor  # (M,) number of the sample in the data
    place: Tensor  # (M,) number of the position, counted through all its dimensions
    positions: tuple[int, ...]  # shape of a sample's positions


class OfPositions(CrossEntropy):
    """The cross entropy of single positions, (M, C), for a loss that is a mean over positions."""

    def __init__(self, whole: CrossEntropy) -> None:
        super().__init__(whole.weight, whole.label_smoothing, ignore_index=whole.ignore_index)
        self.whole, self.name, self.weighted_mean = whole, whole.name, whole.weighted_mean  # type: ignore[misc]

    def split(self, inputs: Any, targets: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        """The sample (M,) and the place (M,) of each position that counts, their targets, the shape of positions."""
        if targets.is_floating_point():
            axis = targets.ndim - 1 if self.whole.classes == "last" else 1
            rows = targets.movedim(axis, -1) if targets.ndim > 2 else targets[:, None]
            labels, counted = rows.flatten(1, -2), torch.ones(rows.flatten(1, -2).shape[:2], dtype=torch.bool)
            positions = rows.shape[1:-1]
        else:
            labels, positions = targets.long().reshape(len(targets), -1), targets.shape[1:]
            if self.whole.shifted:
                labels = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
            counted = labels != self.ignore_index
        if targets.ndim < 2:
            raise InputError(
                f"unit='token' measures single positions of sequences or images, and the targets of shape "
                f"{tuple(targets.shape)} have one for each sample; leave unit= out."
            )
        sample, place = counted.nonzero().unbind(1)
        return sample, place, labels[sample, place], positions

    def pick(self, outputs: Tensor, unit: Unit) -> Tensor:
        """The rows of the units, (M, C), in the outputs of their samples."""
        if outputs.ndim < 3:
            raise InputError(
                f"unit='token' measures single positions of sequences or images, and the model's outputs of shape "
                f"{tuple(outputs.shape)} have none; leave unit= out."
            )
        axis = self.whole.axis(outputs.shape, unit.positions)
        rows = outputs.movedim(axis, -1).flatten(1, -2)
        if rows.shape[1] != math.prod(unit.positions):
            raise InputError(
                f"{self.name} of outputs {tuple(outputs.shape)} needs one target for each position, got targets of "
                f"shape {(len(outputs), *unit.positions)}."
            )
        return _at(unit.place, rows)

    def pick_head(self, head: Head, unit: Unit) -> Head:
        """The same for outputs that are not multiplied out."""
        self.pick(head.stand_in(), unit)  # that it fits
        return head._replace(hidden=_at(unit.place, head.hidden.flatten(1, -2)))


def _at(place: Tensor, rows: Tensor) -> Tensor:
    """One of the rows (M, T, C) of every unit."""
    return rows.gather(1, place[:, None, None].expand(-1, 1, rows.shape[2]))[:, 0]


def of_units(loss: Loss) -> OfPositions:
    """The loss of the units, for a loss that is a mean over positions; `InputError` for others."""
    if isinstance(loss, OfPositions):
        return loss
    if not isinstance(loss, CrossEntropy):
        raise InputError(
            f"unit='token' is for cross_entropy over positions, token_cross_entropy and causal_lm; the loss "
            f"{loss.name} is one number for each sample."
        )
    return OfPositions(loss)


def unit_batches(
    loss: Loss, inputs: Any, targets: Tensor, size: int | None = None, first: int = 0
) -> Iterator[tuple[Unit, Tensor]]:
    """Every position of some samples that counts, as a sample of its own, in batches of this many.

    `first` is the number of the first of the samples in the data.
    """
    sample, place, labels, positions = of_units(loss).split(inputs, targets)
    size = size or _UNITS
    for start in range(0, len(labels), size):
        part = slice(start, start + size)

        def copies(leaf: Any, rows: Tensor = sample[part]) -> Any:
            return leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf

        yield Unit(tree_map(copies, inputs), first + sample[part], place[part], positions), labels[part]
