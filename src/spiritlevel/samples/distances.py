"""Distances of samples to the decision boundary, to first order: along the gradient of every other class's margin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.losses import Unit
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.ranks import Ranks
from spiritlevel.errors import InputError, first_line, unknown_name

_ROUNDING = 1e-14  # of a mean in float64
_DUAL = {"2": 2.0, "inf": 1.0}  # norm of the distance: norm of the gradient


def norm_of(distance: int | float | str | None) -> str:
    """The name of the norm that distance= asks for, or nothing if no distance is wanted."""
    if distance is None:
        return ""
    name = f"{distance:g}" if isinstance(distance, int | float) else str(distance)
    if name not in _DUAL:
        raise unknown_name("distance norm", name, _DUAL)
    return name


def linearised(problem: Problem, inputs: Any, layer: str | None) -> tuple[Tensor, list[Tensor]]:
    """Outputs as a differentiable function of the points whose distance is wanted, and these points."""
    points: list[Tensor] = []

    def watch(tensor: Any) -> Any:
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            return tensor
        points.append(tensor.detach().requires_grad_())
        return points[-1].clone()  # the network may work in place

    if layer is None:
        inputs = tree_map(watch, inputs)
        if not points:
            kinds = {str(leaf.dtype).removeprefix("torch.") for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
            tables = (name for name, module in problem.model.named_modules() if isinstance(module, nn.Embedding))
            raise InputError(
                f"a distance in input space needs floating-point inputs, got {', '.join(sorted(kinds))}; "
                f"`sl.margins(model, data, distance=2, layer={next(tables, 'NAME')!r})` measures it at the output of a "
                "layer instead."
            )
        return problem.outputs(problem.params, inputs), points

    modules = dict(problem.model.named_modules())
    if layer not in modules or not layer:
        raise unknown_name("layer", layer, filter(None, modules))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = type(output).__name__
            raise InputError(f"layer {layer!r} must return a floating-point tensor to measure a distance, got {kind}.")
        return watch(output)

    handle = modules[layer].register_forward_hook(hook)
    try:
        outputs = problem.outputs(problem.params, inputs)
    finally:
        handle.remove()
    if len(points) != 1 or points[0].ndim == 0 or points[0].shape[0] != outputs.shape[0]:
        times = f"it ran {len(points)} times" if len(points) != 1 else f"its output has shape {tuple(points[0].shape)}"
        raise InputError(
            f"a distance at layer {layer!r} needs a module that runs once and returns the samples in its first "
            f"dimension, but {times} for {outputs.shape[0]} samples; name another layer."
        )
    return outputs, points


def distances(
    outputs: Tensor,
    labels: Tensor,
    points: list[Tensor],
    norm: str,
    start: int,
    watch: Callable[[list[Tensor]], None] = lambda gradients: None,
) -> Tensor:
    """The least (φ_y−φ_j)/‖∇(φ_y−φ_j)‖ over j≠y, by one backward pass for each of the C−1 other classes.

    `watch` is given the gradients of each.
    """
    count, classes = outputs.shape
    logits, label, dual = outputs.detach().double(), labels[:, None], _DUAL[norm]
    nearest = torch.full((count,), math.inf, dtype=torch.float64, device=outputs.device)
    for j in range(classes - 1):
        other = j + (label <= j).long()  # the j-th class, not counting the label
        gap = (logits.gather(1, label) - logits.gather(1, other))[:, 0]
        size = torch.zeros_like(gap)
        if outputs.requires_grad:
            direction = torch.zeros_like(outputs).scatter_(1, label, 1.0).scatter_(1, other, -1.0)
            try:
                gradients = torch.autograd.grad(
                    outputs, points, direction, retain_graph=j < classes - 2, allow_unused=True, materialize_grads=True
                )
            except RuntimeError as error:
                raise InputError(
                    f"the outputs cannot be differentiated with respect to the inputs: {first_line(error)}; write that "
                    "part of the model in other operations, or leave out distance=."
                ) from error
            watch(list(gradients))
            norms = [
                torch.linalg.vector_norm(gradient.reshape(count, -1), dual, dim=1, dtype=torch.float64)
                for gradient in gradients
            ]
            size = torch.linalg.vector_norm(torch.stack(norms), dual, dim=0)
            if not bool(torch.isfinite(size).all()):
                sample = start + int((~torch.isfinite(size)).nonzero()[0])
                raise InputError(f"the gradient of the outputs is NaN or infinite for sample {sample}.")
        ratio = torch.where(size > 0, gap / size, gap * math.inf)
        nearest = torch.minimum(nearest, torch.where(gap == 0, gap, ratio))
    return nearest


WHOLE, LEADING, TRAILING = "whole", "places in front", "places behind"  # where the places of a sequence stand


def layouts(units: bool) -> tuple[str, ...]:
    """The ways in which a layer may hold the points of samples, or of single positions."""
    return (LEADING, TRAILING) if units else (WHOLE,)


def own(point: Tensor, inputs: Any, layout: str) -> Tensor | None:
    """What a layer holds for every sample, (M, d); for units, at their own places, if it has these in that layout."""
    if layout == WHOLE or not isinstance(inputs, Unit):
        return point.flatten(1) if point.ndim > 1 else point[:, None]
    shape, sides = point.shape[1:], len(inputs.positions)
    if (shape[:sides] if layout == LEADING else shape[len(shape) - sides :]) != inputs.positions:
        return None
    count, length = len(point), math.prod(inputs.positions)
    rows = point.reshape(count, length, -1) if layout == LEADING else point.reshape(count, -1, length).transpose(1, 2)
    return rows[torch.arange(count, device=point.device), inputs.place.to(point.device)]


class Spreads:
    """The total variance of the points over all batches: of samples, or of single positions in their own places.

    A position's outputs may depend on all of its sequence. What they read of a layer is its point there; only if that
    is nothing but what the layer holds at the same place, whichever of the layer's dimensions are places, do points of
    all positions lie in one space, and only then do they have a spread: that of the same points without their
    sequences. Else it is NaN.
    """

    def __init__(self, units: bool) -> None:
        self.of = {layout: Spread() for layout in layouts(units)}
        self.lost: set[str] = set()

    def update(self, points: list[Tensor], inputs: Any) -> None:
        """Take in the points of the next batch."""
        for layout, spread in self.of.items():
            alone = layout == WHOLE or len(points) == 1
            found = [own(point.detach(), inputs, layout) for point in points] if alone else [None]
            parts = [part for part in found if part is not None]
            if len(parts) < len(found):
                self.lost.add(layout)
            else:
                spread.update(parts)

    def watch(self, gradients: list[Tensor], inputs: Any) -> None:
        """Rule out the layouts in which a unit's outputs read other places than its own."""
        for layout in self.of.keys() - self.lost - {WHOLE}:
            part = own(gradients[0], inputs, layout)
            if part is None or int(gradients[0].count_nonzero()) != int(part.count_nonzero()):
                self.lost.add(layout)

    def over(self, ranks: Ranks) -> tuple[str, float]:
        """The layout that is left, and the root of the total variance there, of all ranks together."""
        left = [layout for layout in self.of if ranks.least(int(layout not in self.lost))]
        layout = left[0] if left else ""
        return layout, self.of[layout].over(ranks).root() if left else math.nan


class Spread:
    """The total variance of the points over all batches: means and squared deviations, merged (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), 0.0

    def update(self, points: list[Tensor]) -> None:
        if not points:
            return
        count = len(points[0])
        flat = torch.cat([point.reshape(count, -1) for point in points], 1)
        if self.count and flat.shape[1] != self.mean.numel():
            self.squares = math.nan  # the space is not the same for all batches
            return
        mean = flat.mean(0, dtype=torch.float64)
        self.squares += float((flat - mean).square().sum())
        if self.count:
            shift = mean - self.mean
            self.squares += float(shift.square().sum()) * self.count * count / (self.count + count)
            mean = self.mean + shift * (count / (self.count + count))
        self.count, self.mean = self.count + count, mean

    def over(self, ranks: Ranks) -> Spread:
        """The spread of the points of all ranks."""
        if ranks.count == 1:
            return self
        size = -ranks.least(-self.mean.numel())
        mean, total = torch.zeros(size, dtype=torch.float64), Spread()
        if self.count and self.mean.numel() == size:
            mean += self.mean.reshape(-1).cpu()
        sums = torch.cat([self.count * mean, torch.tensor([self.count], dtype=torch.float64)])
        ranks.add([sums])
        total.count, total.mean = int(sums[-1]), sums[:-1] / sums[-1]
        own = self.squares + self.count * float((mean - total.mean).square().sum())
        squares = torch.tensor([own], dtype=torch.float64)
        if self.count and self.mean.numel() != size:
            squares.fill_(math.nan)  # the space is not the same on all ranks
        ranks.add([squares])
        total.squares = float(squares)
        return total

    def root(self) -> float:
        """The root of the total variance; 0 where it is nothing but the rounding of the mean."""
        if not self.count:
            return math.nan
        found = math.sqrt(self.squares / self.count)
        return 0.0 if found <= _ROUNDING * float(self.mean.norm()) else found
