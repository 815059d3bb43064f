"""The Hessian of a sharded model: central differences of gradients, with a step and an error of their own.

H u ≈ D(ε) = (g(θ + εu) − g(θ − εu)) / 2ε for a unit vector u. Its error has two parts (mathematics 4.12): a
bias that grows as ε² where the loss is smooth and as ε across kinks, and the rounding of the two gradients, σ/(√2 ε).
σ is measured by fourth differences of gradients at neighbouring points; the bias by D(2ε) − D(ε), for the first,
second, fourth, eighth … product, along whatever is multiplied then. The step minimises the sum of the two parts, and
shrinks when a direction turns out to be more strongly curved than those before.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.context import IDLE, Context
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.shards import ShardedProblem
from spiritlevel.errors import InputError
from spiritlevel.estimators.operator import Operator
from spiritlevel.estimators.space import Space
from spiritlevel.results import figure

_FINE = 32  # the first step is divided by this to look for noise
_FOURTH = torch.tensor([1.0, -4.0, 6.0, -4.0, 1.0], dtype=torch.float64)
_SAMPLES = 256  # per pass, by default


class Parts(Space):
    """Vectors sharded like the parameters: every rank has the entries that belong to its shards."""

    parted = True

    def __init__(self, problem: ShardedProblem, ranks: Ranks) -> None:
        super().__init__(problem.size)
        self.problem, self.ranks = problem, ranks
        self.length = sum(run.length for run in problem.runs)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in float64."""
        total = partial.detach().double().clone()
        self.ranks.add([total])
        return total.to(partial.dtype)

    def drawn(self, draw: Any) -> Any:
        """This rank's entries of a vector that all draw, piece by piece."""
        return self.problem.drawn(draw).numpy()

    def whole(self, block: Tensor) -> Tensor:
        """All entries, on every rank: for small matrices."""
        found = torch.zeros(self.size, block.shape[1], dtype=block.dtype, device=block.device)
        start = 0
        for run in self.problem.runs:
            found[run.start : run.start + run.length] = block[start : start + run.length]
            start += run.length
        self.ranks.add([found])
        return found

    def part(self, block: Tensor) -> Tensor:
        """The entries of this rank."""
        return torch.cat([block[run.start : run.start + run.length] for run in self.problem.runs])

    def norm(self, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """‖v‖ of a vector, or of every column, over all ranks."""
        squares = torch.linalg.vector_norm(v, dim=0, dtype=torch.float64).square()
        return self.sum(squares).sqrt().to(dtype or v.dtype)


class DifferencedHessian(Operator):
    """H of the mean loss of a sharded model, plus weight_decay · I; vectors hold this rank's entries.

    `error` and `form_error` grow with what the checks find; `step` is ε, `noise` σ.
    """

    def __init__(self, context: Context, weight_decay: float = 0.0) -> None:
        problem = context.problem
        assert isinstance(problem, ShardedProblem)
        if not weight_decay >= 0:
            raise InputError(f"weight_decay must be at least 0, got {weight_decay}.")
        self._context, self._problem, self._decay = context, problem, weight_decay
        super().__init__(self._multiply, problem.size, dtype=problem.dtype, device=problem.device)
        self.space = Parts(problem, context.ranks)
        self.shapes = {name: shard.shape for name, shard in problem.params.items()}
        self._pieces = context.batches.cut(context.batch_size or context.fair(context.fitting(_SAMPLES)))
        self._gradients = self._products = 0
        self._error = self._form_error = 0.0
        self._calibrate()

    @property
    def error(self) -> float:
        """The largest error of a product with a unit vector that the checks have found, with the noise."""
        return self._error

    @property
    def form_error(self) -> float:
        """The same for vᵀHv; noise has hardly any component along v."""
        return self._form_error

    @property
    def gradients(self) -> int:
        """How many gradients over all the data have been computed."""
        return self._gradients

    def _gradient(self, unit: Tensor, step: float) -> tuple[float, Tensor]:
        """L and this rank's part of ∇L at θ + step · unit."""
        context, problem = self._context, self._problem
        self._gradients += 1
        params = context.split(torch.add(context.theta, unit, alpha=step))
        with context.ranks.together(), problem.active():
            share = 1 / context.count
            batches = (
                (0.0 if start == IDLE else share, inputs, targets)
                for start, inputs, targets in context.mine(self._pieces)
            )
            value, gradient = problem.gradient(params, batches)
        context.ranks.add([value])
        return float(value), gradient

    def _difference(self, unit: Tensor, step: float) -> tuple[float, Tensor]:
        """The slope of L along a unit vector and D(ε)."""
        (above, high), (below, low) = self._gradient(unit, step), self._gradient(unit, -step)
        return (above - below) / (2 * step), high.sub_(low).div_(2 * step)  # in place: three vectors would be too many

    def _calibrate(self) -> None:
        """Find σ and a first step along one random direction, and check that gradients are those of the loss."""
        problem, context = self._problem, self._context
        generator = torch.Generator().manual_seed(context.seed)
        unit = problem.drawn(lambda count: torch.randn(count, generator=generator, dtype=torch.float64))
        unit = (unit / self.space.norm(unit)).to(context.theta)
        size = float(self.space.norm(context.theta, torch.float64))
        epsilon = torch.finfo(problem.dtype).eps
        self.step = epsilon ** (1 / 3) * (size or 1.0)
        table = torch.zeros(self.space.length, dtype=torch.float64, device=unit.device)
        for weight, place in zip(_FOURTH.tolist(), range(-2, 3), strict=True):
            value, gradient = self._gradient(unit, place * self.step / _FINE)
            table += weight * gradient.double()
            if place == 0:
                here, first = value, gradient
        self.noise = float(self.space.norm(table)) / math.sqrt(70)  # Σ of the squares of the weights
        slope, coarse = self._difference(unit, self.step)
        self._check_slope(slope, self.space.dot(first, unit), coarse, here)
        self._begin(unit, coarse, size or 1.0)

    def _check_slope(self, measured: float, expected: float, product: Tensor, value: float) -> None:
        """Refuse gradients that are not those of the loss: another divisor, a hook, or a detached part."""
        curvature = float(self.space.norm(product))
        rounding = torch.finfo(self.dtype).eps * abs(value) / self.step
        allowed = 0.05 * max(abs(measured), abs(expected)) + self.step * curvature + 64 * rounding
        if not abs(measured - expected) <= allowed:
            raise InputError(
                f"the gradient of this sharded model says that the loss changes by {figure(expected, 3)} along a "
                f"direction, but it changes by {figure(measured, 3)}: set_gradient_divide_factor, a hook or a detached "
                "part makes it the gradient of something else; remove that for the measurement."
            )

    def _begin(self, unit: Tensor, found: Tensor, size: float) -> None:
        """The first step: longer ones are tried until a bias shows beside the noise, or they are a tenth of ‖θ‖."""
        change = self._bias(unit, found)
        while float(self.space.norm(change)) < 4 * self._rounding and 40 * self.step < size:
            self.step *= 4
            change = self._bias(unit, self._difference(unit, self.step)[1])
        self._choose(change)

    @property
    def _rounding(self) -> float:
        """The noise of a product."""
        return self.noise / (math.sqrt(2) * self.step)

    def _bias(self, unit: Tensor, found: Tensor) -> Tensor:
        """D(2ε) − D(ε): three times the bias of D(ε) where the loss is smooth, as much as the bias across kinks."""
        return self._difference(unit, 2 * self.step)[1].sub_(found)

    def _choose(self, change: Tensor) -> bool:
        """Take the step that minimises bias plus noise, given the change at the present one; was that too large?

        The part of the change due to noise, √(1 + ¼) times a product's, is not bias.
        """
        rounding = self._rounding
        bias = math.sqrt(max(0.0, float(self.space.norm(change)) ** 2 - 1.25 * rounding**2)) / 3
        if not bias or not self.noise:
            return False
        best = self.step * (rounding / (2 * bias)) ** (1 / 3)
        shrinks = best < self.step / 1.5
        if shrinks or not self._products:
            self.step = min(max(best, self.step / 64), 16 * self.step)
        return shrinks

    def _multiply(self, block: Tensor) -> Tensor:
        columns = [self._product(column) for column in block.T]
        found = columns[0][:, None] if len(columns) == 1 else torch.stack(columns, 1)
        return found.add_(block, alpha=self._decay) if self._decay else found

    def _product(self, vector: Tensor) -> Tensor:
        length = float(self.space.norm(vector, torch.float64))
        if not length:
            return torch.zeros_like(vector)
        unit = vector / length
        _, found = self._difference(unit, self.step)
        self._products += 1
        if self._products & (self._products - 1) == 0:  # 1, 2, 4, 8 …
            change = self._bias(unit, found)
            while self._choose(change):
                _, found = self._difference(unit, self.step)
                change = self._bias(unit, found)
            noise = self._rounding
            self._error = max(self._error, float(self.space.norm(change)) + noise)
            along = abs(self.space.dot(change, unit)) + 3 * noise / math.sqrt(self.size)
            self._form_error = max(self._form_error, along)
        return found.mul_(length)

    def __repr__(self) -> str:
        return f"DifferencedHessian(size={self.size}, here={self.space.length}, step={figure(self.step, 2)})"
