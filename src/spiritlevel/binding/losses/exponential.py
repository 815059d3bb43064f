"""The exponential loss of boosting."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spiritlevel.binding.losses.base import Factor, Loss, class_targets
from spiritlevel.errors import InputError

_LARGEST_EXPONENT = 690.0  # exp(709.8) is the largest float64; what multiplies it needs room


class Exponential(Loss):
    """ℓ = Σ_{j≠y} exp(φ_j − φ_y); for a single output with targets 0/1 or ±1, ℓ = exp(∓φ)."""

    name = "exponential"

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if outputs.ndim == 2 and outputs.shape[1] > 1:
            class_targets(self.name, outputs, targets, start)
        else:
            self._check_single(outputs, targets)
        exponents = self._differences(outputs.detach().double(), targets)
        if exponents.numel() and float(exponents.max()) > _LARGEST_EXPONENT:
            where = int((exponents > _LARGEST_EXPONENT).any(1).nonzero()[0])
            raise InputError(
                f"the exponential loss of sample {start + where}, exp({float(exponents[where].max()):.4g}), is "
                "beyond floating-point numbers; scale the outputs down, or use another loss."
            )

    def _check_single(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.ndim > 2:
            super().check(outputs, targets)
        if targets.numel() != outputs.shape[0]:
            raise InputError(f"exponential got {outputs.shape[0]} outputs for {targets.numel()} targets.")
        known = (targets == 0) | (targets == 1) | (targets == -1)
        if not bool(known.all()):
            raise InputError(
                f"exponential with one output needs targets 0 and 1, or -1 and 1, got "
                f"{targets.flatten()[~known.flatten()][0].item():g}."
            )

    def class_axis(self, outputs: Tensor, targets: Tensor) -> int | None:
        return 1 if outputs.ndim == 2 and outputs.shape[1] > 1 else None

    @staticmethod
    def _differences(outputs: Tensor, targets: Tensor) -> Tensor:
        """The exponents, (N, C) with −∞ at the label, or (N, 1)."""
        outputs = outputs.reshape(len(outputs), -1)
        if outputs.shape[1] == 1:
            return outputs * _signs(targets).to(outputs)
        label = targets.long()[:, None]
        return (outputs - outputs.gather(1, label)).scatter(1, label, -math.inf)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._differences(outputs.double(), targets).exp().sum(1)  # float32 ends at exp(88)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        if terms.shape[1] == 1:
            return (terms * _signs(targets)).reshape(outputs.shape)
        return terms.scatter(1, targets.long()[:, None], -terms.sum(1, keepdim=True))

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        direction = direction.double().reshape(terms.shape)
        if terms.shape[1] == 1:
            return (terms * direction).reshape(outputs.shape)
        label = targets.long()[:, None]
        moved = terms * (direction - direction.gather(1, label))
        return moved.scatter(1, label, -moved.sum(1, keepdim=True))

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        direction = direction.double().reshape(terms.shape)
        if terms.shape[1] > 1:
            direction = direction - direction.gather(1, targets.long()[:, None])
        return (terms * direction.square()).sum(1)

    def rank(self, outputs: Tensor, targets: Tensor) -> int:
        return max(1, math.prod(outputs.shape[1:]) - 1)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        terms = self._differences(outputs.double(), targets).exp()
        classes = terms.shape[1]
        if classes == 1:
            yield terms[:, 0], torch.ones_like(outputs, dtype=torch.float64)
            return
        label = targets.long()[:, None]
        for j in range(classes - 1):
            other = j + (label <= j).long()
            vector = torch.zeros_like(terms).scatter_(1, other, 1.0).scatter_(1, label, -1.0)
            yield terms.gather(1, other)[:, 0], vector


def _signs(targets: Tensor) -> Tensor:
    """−1 for the label 1, +1 for 0 or −1, (N, 1)."""
    return torch.where(targets.reshape(-1, 1) > 0, -1.0, 1.0)
