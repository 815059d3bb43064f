"""Eigenvalues and norms of the Hessian."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from spiritlevel.errors import InputError
from spiritlevel.estimators import eigenvalues
from spiritlevel.measures.ends import Ends
from spiritlevel.measures.registry import UNSEEN, register
from spiritlevel.measures.sampling import end_sampling, norm_sampling, not_known
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.transforms import Transformed

_TOP = 10  # eigenvalues in the log volume
_OF_HESSIAN: dict[str, Any] = {
    "family": "curvature",
    "cost": "matvecs",
    "guide": "curvature",
    "invariant_to": UNSEEN,
}
_RESOLVED = 1e-3  # of an eigenvalue: a residual up to this leaves its logarithm right to the same accuracy


def _register_end(name: str, get: Callable[[Ends], Estimate], meaning: str, formula: str, **fields: Any) -> None:
    def predict(setting: Setting, transformed: Transformed) -> float | None:
        after = setting.spectrum_after(transformed)
        found = None if after is None else get(after)
        # nothing is predicted from an unfinished iteration, nor a ratio from a value that may be 0
        known = found is not None and found.status != "not converged" and found.sign
        return found.value if found is not None and known else None

    add = register(name, meaning, formula, "paper C", **_OF_HESSIAN, predict=predict, in_shards=True, **fields)
    add(lambda setting: get(setting.spectrum))


_register_end(
    "spectral_norm",
    lambda ends: ends.norm,
    "largest absolute eigenvalue of the Hessian",
    "max |λ|",
    worth="to a tolerance",
    passes=70,
    sampling=end_sampling(lambda setting: setting.spectrum, "magnitude"),
)
_register_end(
    "largest_eigenvalue",
    lambda ends: ends.largest,
    "largest eigenvalue (paper C's 'spectral norm')",
    "λ₁",
    worth="to a tolerance",
    passes=70,
    keeps_sign=True,
    sampling=end_sampling(lambda setting: setting.spectrum, "largest"),
    also_called=("lambda_max", "top_eigenvalue"),
)
_register_end(
    "smallest_eigenvalue",
    lambda ends: ends.smallest,
    "smallest eigenvalue of the Hessian, negative away from a minimum",
    "λ_P",
    worth="to a tolerance",
    passes=400,
    direction="flatter",
    keeps_sign=True,
    sampling=not_known("its eigenvector fits the noise of a subset: the interval would not hold"),
)
_register_end(
    "frobenius_norm",
    lambda ends: ends.frobenius,
    "Frobenius norm of the Hessian",
    "√Tr(H²)",
    worth="estimated",
    passes=220,
    sampling=norm_sampling(lambda setting: 0.5 / setting.spectrum.frobenius.value),
)


@register(
    "mean_square_eigenvalue",
    "mean square of the eigenvalues (what paper C prints as 'Frobenius norm')",
    "Tr(H²)/P",
    "paper C",
    **_OF_HESSIAN,
    worth="estimated",
    passes=220,
    sampling=norm_sampling(lambda setting: 1 / setting.problem.size),
)
def _mean_square_eigenvalue(setting: Setting) -> Estimate:
    norm, size = setting.spectrum.frobenius, setting.problem.size
    error = 2 * norm.value * norm.stderr / size
    return dataclasses.replace(norm, value=norm.value**2 / size, stderr=error, power=1.0)


@register(
    "log_volume",
    f"log of the product of those among the {_TOP} largest eigenvalues that are positive beyond rounding",
    "Σ_{i≤k} log λ_i",
    "Wu, Zhu & E 2017, arXiv:1706.10239",
    **_OF_HESSIAN,
    worth="to a tolerance",
    passes=180,
    sampling=not_known("small eigenvalues of a subset are not those of all data: the interval would not hold"),
)
def _log_volume(setting: Setting) -> Estimate:
    """A logarithm needs every value to relative accuracy, while eigenvalues promise one relative to the largest."""
    op, size, unit = setting.hessian, setting.problem.size, torch.finfo(setting.problem.dtype).eps
    tol, finest, matvecs = 1e-4, 32 * unit, 0
    while True:
        found = eigenvalues(op, min(_TOP, size), tol=tol, vectors=False, seed=setting.seed)
        matvecs += found.matvecs
        largest = float(found.values.abs().max())
        noise = unit * size * largest
        counted = found.values > noise
        values, residuals = found.values[counted].double(), found.residuals[counted].double()
        if not len(values):
            raise InputError("log_volume: none of the largest eigenvalues is positive.")
        open_ones = int((residuals > _RESOLVED * values).sum())
        if not open_ones or not found.converged or tol <= finest:
            break
        tol = max(finest, min(tol / 10, _RESOLVED * float(values.min()) / largest))
    reasons = [] if found.converged else [found.reason]
    if found.converged and open_ones:
        reasons.append(f"{open_ones} of {len(values)} eigenvalues are not known to {_RESOLVED:.1%}")
    lost = int((found.values.abs() <= noise).sum())
    if lost:
        reasons.append(f"{lost} of {len(found.values)} are indistinguishable from zero in this precision and left out")
    tolerance = float((residuals / values).sum())  # of the sum of the logarithms, to first order
    if reasons:
        status, tolerance = "not converged", 0.0
    else:
        status = "converged"
    return Estimate(
        float(values.log().sum()),
        matvecs=matvecs,
        seed=setting.seed,
        reason="; ".join(reasons),
        tolerance=tolerance,
        status=status,
    )
