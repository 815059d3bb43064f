"""A matrix with all its entries, formed by products: the best way to know a small one."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, eigvalsh

Array = NDArray[np.float64]


class Entries:
    """The entries of a symmetric matrix in float64, as products gave them, and the eigenvalues of its symmetric part.

    >>> entries = Entries(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> entries.values.round(9).tolist(), entries.asymmetry
    ([1.0, 3.0], 0.0)
    """

    def __init__(self, matrix: Array) -> None:
        self.matrix, self.size = matrix, len(matrix)

    @functools.cached_property
    def symmetric(self) -> Array:
        """(M + Mᵀ)/2."""
        return (self.matrix + self.matrix.T) / 2

    @functools.cached_property
    def asymmetry(self) -> float:
        """‖M − Mᵀ‖_F / 2: no eigenvector of the symmetric part has a larger residual."""
        return float(np.linalg.norm(self.matrix - self.matrix.T)) / 2

    @functools.cached_property
    def values(self) -> Array:
        """All eigenvalues, ascending."""
        values: Array = eigvalsh(self.symmetric, check_finite=False)
        return values

    def vectors(self, wanted: NDArray[np.intp]) -> Array:
        """The eigenvectors with these places in `values`, as columns."""
        low, high = int(wanted.min()), int(wanted.max())
        if high - low < self.size // 4:
            columns: Array = eigh(self.symmetric, subset_by_index=[low, high], check_finite=False)[1]
            return columns[:, wanted - low]
        columns = eigh(self.symmetric, driver="evd", check_finite=False)[1]
        return columns[:, wanted]
