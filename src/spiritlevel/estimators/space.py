"""Where the vectors of an operator live: all of them here, or a part of every vector in each process.

Estimators need three things of a space besides its size: sums over all parts (of products of entries: inner products),
their own part of a random vector, and, for small matrices, whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Space:
    """Vectors of `size` entries, of which `length` are here, along the first dimension: in this class, all.

    >>> space = Space(3)
    >>> float(space.norm(torch.tensor([0.0, 3.0, 4.0])))
    5.0
    """

    parted = False  # whether other processes hold other parts

    def __init__(self, size: int) -> None:
        self.size = self.length = size

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all parts of what was summed over the entries that are here."""
        return partial

    def drawn(self, draw: Callable[[int], Any]) -> Any:
        """The entries here of a random array: `draw` gives the next numbers of its stream."""
        return draw(self.size)

    def whole(self, block: Tensor) -> Tensor:
        """All entries of vectors, (size, k), from those that are here."""
        return block

    def part(self, block: Tensor) -> Tensor:
        """The entries here of vectors (size, k)."""
        return block

    def norm(self, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """‖v‖ of a vector, or of every column."""
        return torch.linalg.vector_norm(v, dim=0, dtype=dtype)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """aᵀb."""
        return float(self.sum(a @ b))
