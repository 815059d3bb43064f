"""What a loss offers for measuring curvature: values, slopes, products, and factors of its output Hessian."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from spiritlevel.binding.losses.heads import Head
from spiritlevel.errors import InputError

Factor = tuple[Tensor, Tensor]
"""One term of A: weights d (N,) in float64 and vectors v, shaped like the outputs and of order 1."""


class Decisions(NamedTuple):
    """Choices between classes: outputs (R, C ≥ 2), the labels (R,), and how many of them each sample made, (N,).

    The decisions of a sample follow each other; `counts` is None where every sample made one.
    """

    logits: Tensor | Head
    labels: Tensor
    counts: Tensor | None = None


class Loss(ABC):
    """A per-sample loss ℓ(φ, y) of a network's outputs φ (N, …).

    Losses of a single output also take φ of shape (N,). Gradients, products and vectors are shaped like φ.
    """

    name: ClassVar[str] = ""
    closed_form: ClassVar[bool] = True  # whether `factors` is available
    can_sample: ClassVar[bool] = False  # whether `sampled_factors` is

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        """Raise `InputError` unless outputs and targets, from sample number `start` on, fit this loss."""
        if outputs.ndim != 2:
            raise InputError(
                f"{self.name} needs model outputs of shape (samples, outputs), got {tuple(outputs.shape)}; "
                "flatten them, or pass a loss of your own that returns one value per sample."
            )

    def couples(self, outputs: Tensor, targets: Tensor) -> str:
        """In words, how the loss of a sample depends on the rest of its batch; nothing where it does not."""
        return ""

    def class_axis(self, outputs: Tensor, targets: Tensor) -> int | None:
        """The dimension of the classes, where the loss may see no more of outputs than their softmax along it."""
        return None

    @abstractmethod
    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ of every sample, (N,), differentiable."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient ∂ℓ/∂φ, float64."""

    @abstractmethod
    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        """A·u of every sample, float64, for directions u shaped like the outputs."""

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        """uᵀA u of every sample, (N,), float64."""
        product = self.product(outputs, targets, direction)
        return (direction.double() * product).reshape(len(outputs), -1).sum(1)

    def slope_along(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        """gᵀu of every sample, (N,), float64."""
        slope = self.gradient(outputs, targets).reshape(outputs.shape)
        return (slope * direction.double()).reshape(len(outputs), -1).sum(1)

    def rank(self, outputs: Tensor, targets: Tensor) -> int:
        """How many factors A has for these samples."""
        return math.prod(outputs.shape[1:])

    @abstractmethod
    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        """The terms d_j, v_j of A = Σ_j d_j v_j v_jᵀ, one at a time."""

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        """The first `exact` terms as in `factors`, then one random combination Σ_j ±√d_j v_j of all the others.

        `signs` are random ±1, as many as there are outputs and independent for every sample, so that d‖vᵀJ‖² of the
        last term is an unbiased estimate of what the others contribute to the trace.
        """
        raise InputError(f"passes= is for losses that can sample their factors; {self.name} is measured without it.")

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A of every sample, (N, C, C), float64, with C the number of a sample's outputs."""
        count, size = len(outputs), math.prod(outputs.shape[1:])
        total = outputs.new_zeros((count, size, size), dtype=torch.float64)
        for weight, vector in self.factors(outputs, targets):
            vector = vector.double().reshape(count, size)
            total += weight[:, None, None] * vector[:, :, None] * vector[:, None, :]
        return total

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """ΣA over the samples, (C, C), float64, where that takes one product of matrices; None elsewhere."""
        return None

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        """The choices between classes that samples make, for their margins; `InputError` where they make none.

        A single output φ is a choice between 0 and φ.
        """
        if outputs.ndim == 1 or outputs.shape[1:] == (1,):
            return _of_one_output(outputs, targets, start)
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise InputError(
                f"margins needs logits of shape (samples, classes >= 2), got {tuple(outputs.shape)}; the loss "
                f"{self.name} does not say which of them are classes; loss='cross_entropy' or a "
                "torch.nn.CrossEntropyLoss does."
            )
        class_targets("margins", outputs, targets, start)
        return Decisions(outputs, targets.long())

    def prediction(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """The numbers that the outputs predict for these targets; None where they are not numbers."""
        return None

    def _check_exact(self, exact: int, outputs: Tensor, targets: Tensor) -> None:
        rank = self.rank(outputs, targets)
        if not 0 <= exact < max(rank, 1):
            raise InputError(
                f"{self.name} of {math.prod(outputs.shape[1:])} outputs has {rank} factors; "
                f"at least one of those must be left to sample, but {exact} are to be exact."
            )


def _of_one_output(outputs: Tensor, targets: Tensor, start: int) -> Decisions:
    targets = targets.reshape(-1, 1).double()
    strange = (targets != 0) & (targets.abs() != 1)
    if bool(strange.any()):
        sample = int(strange[:, 0].nonzero()[0])
        raise InputError(
            f"margins of one output need labels 0 and 1, or -1 and 1, got {targets[sample].item():g} for sample "
            f"{start + sample}; a regression has no margins."
        )
    outputs = outputs.reshape(-1, 1)
    return Decisions(torch.cat([torch.zeros_like(outputs), outputs], 1), (targets[:, 0] > 0).long())


def class_targets(name: str, outputs: Tensor, targets: Tensor, start: int) -> None:
    """Raise `InputError` unless there is one integer class for each row of the outputs (N, C)."""
    count, classes = outputs.shape
    if targets.is_floating_point() or targets.ndim != 1:
        raise InputError(
            f"{name} needs one integer class per sample, got targets of shape {tuple(targets.shape)} and type "
            f"{str(targets.dtype).removeprefix('torch.')}{way_to_classes(outputs, targets)}."
        )
    if targets.shape[0] != count:
        raise InputError(f"{name} got {count} outputs for {targets.shape[0]} targets.")
    within(name, classes, targets, torch.ones_like(targets, dtype=torch.bool), start)


def way_to_classes(outputs: Tensor, targets: Tensor) -> str:
    """How to turn other targets into integer classes, where that can be told."""
    if targets.ndim == 2 and targets.shape[1] == 1:
        return "; pass targets.squeeze(1)"
    if targets.shape == outputs.shape and targets.ndim == 2:
        return "; pass targets.argmax(1) of one-hot vectors"
    if targets.ndim == 1 and targets.is_floating_point():
        return "; classes are targets.long(), and numbers to predict need loss='squared_error'"
    return ""


def within(name: str, classes: int, targets: Tensor, counted: Tensor, start: int) -> None:
    """Raise `InputError` unless the targets that count are classes of the model; (N,) or (N, …), as are `counted`."""
    targets = targets.long()  # not all integer types can be compared
    wrong = ((targets < 0) | (targets >= classes)) & counted
    if not bool(wrong.any()):
        return
    place = wrong.nonzero()[0].tolist()
    where = f"sample {start + place[0]}"
    where += f", position {place[1] if len(place) == 2 else tuple(place[1:])}," if place[1:] else ""
    raise InputError(
        f"{name}: target {int(targets[tuple(place)])} of {where} is outside the model's {classes} classes "
        f"0 to {classes - 1}; check the labels or the size of the last layer."
    )
