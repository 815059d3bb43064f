"""Whether a product is that of a symmetric matrix: two random vectors show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError

_PIECE = 2**16  # numbers of a vector that are converted at once
_ROUNDING = 10  # times the change between parameters that are the same but for rounding


def random_pair(problem: Problem) -> Tensor:
    """Room for two vectors, of which the first is random."""
    generator = torch.Generator().manual_seed(1)
    pair = torch.empty(2, problem.size, dtype=problem.dtype, device=problem.device)
    pair[0] = torch.randn(problem.size, generator=generator, dtype=problem.dtype)
    return pair


def turned(pair: Tensor) -> Tensor:
    """Write the first vector backwards into the second: another one that need not be drawn."""
    for start in range(0, pair.shape[1], _PIECE):
        piece = pair[0, start : start + _PIECE]
        pair[1, pair.shape[1] - start - len(piece) : pair.shape[1] - start] = piece.flip(0)
    return pair


def check_symmetry(
    pair: Tensor, products: Tensor, elsewhere: Callable[[], Iterator[Tensor]], *, rounding: float
) -> None:
    """Refuse a product that is not symmetric: uᵀHv = vᵀHu for two random vectors, whose size is about ‖Hv‖.

    Where terms cancel, Hv is nothing but their rounding, and so is its asymmetry: products at parameters that are
    the same but for rounding, `elsewhere`, then differ as much. `rounding` is the relative precision to which the model
    itself rounds, where that is coarser than its type.
    """
    largest = float(torch.linalg.vector_norm(products, ord=math.inf))
    if largest < 1e8 * torch.finfo(products.dtype).tiny:  # so small that rounding is no longer relative
        return
    # all divided by it, as their squares may be too small to represent
    difference = abs(_dot(products[0], pair[1], largest) - _dot(products[1], pair[0], largest))
    size = math.sqrt(max(_dot(product, product, largest, largest) for product in products))
    tolerance = 1e-2 if products.dtype == torch.float32 else 1e-6
    if difference <= max(tolerance, _ROUNDING * rounding) * size:
        return
    changes = [
        math.sqrt(max(_dot(row, row, largest, largest) for row in other.sub_(products))) for other in elsewhere()
    ]
    if difference > _ROUNDING * median(changes):
        raise InputError(
            "the second derivatives of this model are not symmetric, so no curvature of it can be trusted: a part "
            "of its forward runs under torch.no_grad() or on .data, or an operation has a wrong double backward."
        )


def _dot(a: Tensor, b: Tensor, scale: float, other: float = 1.0) -> float:
    """(a/scale)ᵀ(b/other), piece by piece and summed in float64: a copy of a large vector would not fit."""
    pieces = zip(a.split(_PIECE), b.split(_PIECE), strict=True)
    return math.fsum(float((x / scale) @ (y / other)) for x, y in pieces)
