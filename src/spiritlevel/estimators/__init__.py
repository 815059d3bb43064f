"""What matrix-vector products alone reveal about a symmetric matrix: its ends, trace, norms, diagonal and density.

Every function takes anything symmetric with `shape` and `@`: an `Operator`, a dense tensor, a NumPy array, a SciPy
matrix or linear operator. Real float32 and float64; vectors and bases keep the operator's dtype, everything small is
float64. Random numbers come from local generators keyed by (seed, index): the same for every chunking, and the global
random states stay untouched. What an exact computation gives for no more products than an estimate is computed exactly,
with standard error 0.
"""

from __future__ import annotations

from spiritlevel.estimators.density import spectral_density, spectrum
from spiritlevel.estimators.eigenpairs import eigenvalues, outermost, outermost_pair, spectral_norm
from spiritlevel.estimators.operator import Operator
from spiritlevel.estimators.trace import diagonal, frobenius_norm, norm_around, operator_trace

__all__ = [
    "Operator",
    "diagonal",
    "eigenvalues",
    "frobenius_norm",
    "norm_around",
    "operator_trace",
    "outermost",
    "outermost_pair",
    "spectral_density",
    "spectral_norm",
    "spectrum",
]
