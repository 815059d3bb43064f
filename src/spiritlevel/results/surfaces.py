"""The loss on a line or a plane through the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.results.codec import Misfit, same_length
from spiritlevel.results.formatting import figure
from spiritlevel.results.tables import Columns, Table


@dataclass(frozen=True)
class Landscape(Table):
    """The loss, and the accuracy, on a line or a plane through a model's parameters θ.

    `losses` (n,) or (n, m) holds L(θ + t·d₁) or L(θ + t·d₁ + s·d₂) for t in `steps[0]` and s in `steps[1]`; the model
    itself is at step 0. `lengths` are the norms ‖dᵢ‖, so that t·‖dᵢ‖ is a distance. `value` is L(θ), `slopes` (d,) the
    derivatives ∇L·dᵢ and `curvatures` (d, d) the second derivatives dᵢᵀ∇²L dⱼ there. `accuracies` is `None` where
    the targets are not classes. `barrier` belongs to a path to another model, at step 1: the largest excess of L over
    the straight line between the losses of both ends, max over t in [0, 1] of L(t) − (1−t)·L(0) − t·L(1).

    `spread` is the standard deviation of a sample's loss at every point, so that the mean over B of these samples,
    drawn at random, scatters by spread/√B around `losses`; `None` where the samples of a batch depend on each other.
    Along a training run, `track` (checkpoints, d) holds the places of its checkpoints, and `explained` the share of
    their squared distances from the model that lies along each direction.
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
    spread: Tensor | None = None
    track: Tensor | None = None
    explained: tuple[float, ...] = ()

    def _check(self) -> None:
        count = len(self.steps)
        same_length(directions=self.directions, steps=self.steps, slopes=self.slopes, lengths=self.lengths)
        if not 1 <= count <= 2 or any(each.ndim != 1 or not len(each) for each in self.steps):
            raise Misfit("it needs the steps along one direction or two")
        shape = tuple(len(each) for each in self.steps)
        surfaces = [each for each in (self.losses, self.accuracies, self.spread) if each is not None]
        if any(tuple(each.shape) != shape for each in surfaces) or tuple(self.curvatures.shape) != (count, count):
            raise Misfit("its losses do not fit its steps")
        if self.track is not None and (self.track.ndim != 2 or self.track.shape[1] != count):
            raise Misfit("its track does not fit its directions")
        if not all(bool(torch.isfinite(each).all()) for each in self.steps):
            raise Misfit("its steps are not all numbers")
        if not all(bool(torch.isfinite(4 * each).all()) for each in self.steps):
            raise Misfit("its steps are too long to be drawn")

    notes: tuple[str, ...] = ()

    @property
    def quadratic(self) -> Tensor:
        """What slope and curvature at the model predict on the same grid: L(θ) + g·t + ½ tᵀHt."""
        grid = torch.stack(torch.meshgrid(*self.steps, indexing="ij"), dim=-1)
        return self.value + grid @ self.slopes + 0.5 * (grid @ self.curvatures * grid).sum(-1)

    def _columns(self) -> Columns:
        """One row per point: the steps along the directions, what was measured, and what the quadratic predicts."""
        grid = torch.meshgrid(*self.steps, indexing="ij")
        columns: dict[str, tuple[type, Any]] = {
            f"step_{number}": (float, steps.reshape(-1).tolist()) for number, steps in enumerate(grid, 1)
        }
        columns["loss"] = (float, self.losses.reshape(-1).tolist())
        if self.accuracies is not None:
            columns["accuracy"] = (float, self.accuracies.reshape(-1).tolist())
        if self.spread is not None:
            columns["spread"] = (float, self.spread.reshape(-1).tolist())
        return columns | {"quadratic": (float, self.quadratic.reshape(-1).tolist())}

    def __str__(self) -> str:
        shape = " x ".join(str(len(steps)) for steps in self.steps)
        axes = ", ".join(
            f"{name} (curvature {figure(float(self.curvatures[i, i]))})" for i, name in enumerate(self.directions)
        )
        low, high = float(self.losses.min()), float(self.losses.max())
        barrier = "" if self.barrier is None else f"; barrier {figure(self.barrier)}"
        return (
            f"loss on {shape} points along {axes}: {figure(self.value)} at the model, from {figure(low)} to "
            f"{figure(high)}{barrier}"
        )
