"""A matrix with all its entries, formed by products: the best way to know a small one."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
_FEW_ROWS = 128  # of which all vectors take no time
_BEYOND = 1e-9  # of the norm: how far outside an eigenvalue its vector is looked for
_ROUNDING = 1e-14  # of the norm: a residual that all vectors at once have too


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
    def _pairs(self) -> tuple[Array, Array]:
        """All eigenvalues, ascending, and their vectors as columns.

        By PyTorch: the threads of SciPy's library spin while they wait, and on a machine whose cores are busy a matrix
        of 800 rows took five seconds there instead of 0.06.
        """
        found = torch.linalg.eigh(torch.from_numpy(self.symmetric))
        return found.eigenvalues.numpy(), found.eigenvectors.numpy()

    def decompose(self) -> None:
        """Find all vectors with the values, for a caller that wants several."""
        if "values" not in vars(self):
            self._pairs  # noqa: B018 (kept)

    @functools.cached_property
    def values(self) -> Array:
        """All eigenvalues, ascending; without their vectors, unless these are known, in half the time."""
        if self.size <= _FEW_ROWS or "_pairs" in vars(self):
            return self._pairs[0]
        found: Array = torch.linalg.eigvalsh(torch.from_numpy(self.symmetric)).numpy()
        return found

    def vectors(self, wanted: NDArray[np.intp]) -> Array:
        """The eigenvectors at these places in `values`, as columns."""
        alone = len(wanted) == 1 and "_pairs" not in vars(self)
        vector = self._at_an_end(int(wanted[0])) if alone else None
        return self._pairs[1][:, wanted] if vector is None else vector

    def _at_an_end(self, place: int) -> Array | None:
        """The vector of the first or last eigenvalue λ, by a tenth of the work for all; `None` for any other.

        A little beyond λ, |μI − M| is positive definite, and each solution of a system with it leaves of all other
        vectors only the share (μ − λ)/(μ − λ'). What comes out counts if its residual is rounding.
        """
        if place not in (0, self.size - 1):
            return None
        value, norm = float(self.values[place]), float(np.abs(self.values).max())
        sign = -1 if place else 1
        matrix = torch.from_numpy(self.symmetric)
        shifted = sign * matrix
        shifted.diagonal().sub_(sign * value - _BEYOND * norm)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if int(failed):
            return None
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(self.size, 1, generator=generator, dtype=torch.float64)
        for _ in range(3):
            vector = torch.cholesky_solve(vector / torch.linalg.vector_norm(vector), factor)
        vector /= torch.linalg.vector_norm(vector)
        residual = float(torch.linalg.vector_norm(matrix @ vector - value * vector))
        return vector.numpy() if residual <= _ROUNDING * norm else None
