"""The loss on a line or a plane through the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.results.codec import Result


@dataclass(frozen=True)
class Landscape(Result):
    """The loss, and the accuracy, on a line or a plane through a model's parameters θ.

    `losses` (n,) or (n, m) holds L(θ + t·d₁) or L(θ + t·d₁ + s·d₂) for t in `steps[0]` and s in `steps[1]`; the model
    itself is at step 0. `lengths` are the norms ‖dᵢ‖, so that t·‖dᵢ‖ is a distance. `value` is L(θ), `slopes` (d,) the
    derivatives ∇L·dᵢ and `curvatures` (d, d) the second derivatives dᵢᵀ∇²L dⱼ there. `accuracies` is `None` where
    the targets are no classes. `barrier` belongs to a path to another model, at step 1: the largest excess of L over
    the straight line between the losses of both ends, max over t in [0, 1] of L(t) − (1−t)·L(0) − t·L(1).
    """

    directions: tuple[str, ...]
    steps: tuple[Tensor, ...]
    losses: Tensor
    accuracies: Tensor | None
    value: float
    slopes: Tensor
    curvatures: Tensor
    lengths: Tensor
    barrier: float | None = None
    samples: int = 0
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    seed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def quadratic(self) -> Tensor:
        """What slope and curvature at the model predict on the same grid: L(θ) + g·t + ½ tᵀHt."""
        grid = torch.stack(torch.meshgrid(*self.steps, indexing="ij"), dim=-1)
        return self.value + grid @ self.slopes + 0.5 * (grid @ self.curvatures * grid).sum(-1)

    def __str__(self) -> str:
        shape = " x ".join(str(len(steps)) for steps in self.steps)
        axes = ", ".join(
            f"{name} (curvature {float(self.curvatures[i, i]):.4g})" for i, name in enumerate(self.directions)
        )
        low, high = float(self.losses.min()), float(self.losses.max())
        barrier = "" if self.barrier is None else f"; barrier {self.barrier:.4g}"
        return (
            f"loss on {shape} points along {axes}: {self.value:.4g} at the model, from {low:.4g} to {high:.4g}{barrier}"
        )
