"""A function of the parameters at many points: several at once where a single pass is too small to fill the machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap

from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem

_CACHE = 4 * 2**20  # bytes of parameters, or of one activation, that stay in cache together; more makes nothing faster
_MOST = 64  # points at once
_ACTIVATION = 8 * 2**20  # bytes of the largest activation of a pass on a CPU; four times as much doubled the time


def points_at_once(problem: Problem, activation: int) -> int:
    """How many points to take at once if the largest activation of the batch takes this many bytes at each."""
    size = sum(tensor.nbytes for tensor in problem.params.values())
    return max(1, min(_MOST, _CACHE // max(activation, size, 1)))


def samples_at_once(problem: Problem, activation: int) -> int:
    """How many samples to pass at once if the largest activation takes this many bytes for each.

    On a CPU what one layer leaves should still be in the cache when the next one reads it; a device wants to be filled.
    """
    return max(1, _ACTIVATION // max(activation, 1)) if problem.device.type == "cpu" else sys.maxsize


def at_points(problem: Problem, function: Callable[[Params], Tensor], points: Params, at_once: int) -> Tensor:
    """`function` of the parameters at each of k points, given as tensors (k, …); use it inside `problem.active()`.

    Several at once go through `vmap`, whose rules cannot all be trusted: the first point is also taken by itself, and
    where the two differ, or an operation has no such rule, all points are taken one after the other from then on.
    """
    count = len(next(iter(points.values())))

    def alone(index: int) -> Tensor:
        return function({name: tensor[index] for name, tensor in points.items()})

    key = "points at once"
    with torch.no_grad():
        first = alone(0)
        if at_once > 1 and count > 2 and problem.facts.get(key, True) and not problem.keeps_state:
            try:
                found = vmap(function, chunk_size=at_once)(points)
            except Exception:  # not every operation can be vectorised; if it fails alone too, that error says why
                found = None
            if found is not None and _same(found[0], first):
                return found
            problem.facts[key] = False
        return torch.stack([first, *(alone(index) for index in range(1, count))])


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    finite = b[torch.isfinite(b)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=math.sqrt(torch.finfo(b.dtype).eps) * scale, equal_nan=True)
