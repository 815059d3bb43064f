"""Trace, Frobenius norm and diagonal by random sign vectors, with their errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.estimators.operator import Product, columns_at_once, identity_blocks, in_full_precision
from spiritlevel.estimators.probes import SKETCH, check_probes, sign_blocks
from spiritlevel.results import DiagonalEstimate, Estimate, figure
from spiritlevel.results.intervals import standard_error
from spiritlevel.results.quantiles import chi_squared

_PILOT = 16  # probes that decide how many a relative error needs
_MOST_PROBES = 4096  # where the search for a relative error gives up


@in_full_precision
@checked
def operator_trace(
    op: Any, *, probes: int = 64, rel_err: float | None = None, method: str = "hutchinson", seed: int = 0
) -> Estimate:
    """The trace Tr H, unbiased, with its standard error.

    "hutchinson": the mean of vᵀHv over sign vectors v, variance 2(‖H‖_F² − Σ Hᵢᵢ²) per probe. "hutch++": a third of the
    products sketch the range of H with an orthonormal Q, a third give Tr QᵀHQ exactly, and the rest estimate the trace
    of (I − QQᵀ)H(I − QQᵀ), whose spread is the standard error; far better where a few eigenvalues dominate.

    Cost: `probes` products in all. With `rel_err` instead, 16 pilot probes decide how many more are needed for
    stderr ≤ rel_err · |Tr H| (from the upper 90% bound of their variance), at most 4096; where that was not enough,
    `reason` says so. Exact, from the unit vectors, where that takes no more products.

    References: Hutchinson, Commun. Stat. Simul. Comput. 18 (1989), doi:10.1080/03610918908812806; Meyer, Musco, Musco
    & Woodruff, SOSA 2021, arXiv:2010.09649.

    >>> matrix = torch.ones(100, 100, dtype=torch.float64) + torch.diag(torch.arange(100.0, dtype=torch.float64))
    >>> estimate = operator_trace(matrix, probes=50)
    >>> abs(estimate.value - 5050) < 4 * estimate.stderr
    True
    >>> operator_trace(matrix, probes=100).value
    5050.0
    """
    product = Product(op)
    if method not in ("hutchinson", "hutch++"):
        raise unknown_name("trace method", method, ("hutchinson", "hutch++"))
    check_probes("operator_trace", probes, rel_err, seed, least=2 if method == "hutchinson" else 4)
    if method == "hutchinson" or product.written or product.size <= (probes if rel_err is None else _PILOT):
        found = _expected_form(product, product, _dots, probes, rel_err, seed)
        return with_tolerance(found, product.size * product.form_error)
    if product.space.parted:
        raise InputError("hutch++ needs whole vectors, but those of a sharded model come in parts; use 'hutchinson'.")
    rank = probes // 3 if rel_err is None else _PILOT
    sketch = torch.cat([product(v) for v in sign_blocks(product, range(rank), seed, SKETCH)], dim=1)
    q = torch.linalg.qr(sketch).Q
    captured = sum(float(_dots(v, product(v)).sum()) for v in q.split(columns_at_once(product.size), dim=1))

    def multiply_rest(v: Tensor) -> Tensor:
        v = v - q @ (q.T @ v)
        hv = product(v)
        return hv - q @ (q.T @ hv)

    return _expected_form(product, multiply_rest, _dots, probes - 2 * rank, rel_err, seed, captured)


@in_full_precision
@checked
def frobenius_norm(op: Any, *, probes: int = 64, rel_err: float | None = None, seed: int = 0) -> Estimate:
    """The Frobenius norm ‖H‖_F = √(Tr H²) from ‖Hv‖² over sign vectors v.

    The mean square is unbiased for Tr H²; the root and its error follow by the delta method, stderr(√x) =
    stderr(x)/(2√x). Cost: `probes` products; `rel_err` as in `operator_trace`. Exact where that costs no more.
    Reference: Hutchinson, doi:10.1080/03610918908812806, applied to H².

    >>> print(frobenius_norm(torch.diag(torch.tensor([3.0, 4.0]))))
    5
    """
    product = Product(op)
    check_probes("frobenius_norm", probes, rel_err, seed)
    found = root_of(_expected_form(product, product, _squares, probes, rel_err, seed, power=2))
    return with_tolerance(found, math.sqrt(product.size) * product.error)


@in_full_precision
def norm_around(op: Any, q: Tensor, *, probes: int, seed: int) -> Estimate:
    """‖H‖_F where a unit vector q near a dominant eigenvector is known: ‖H‖_F² = ‖Hq‖² + E ‖H(v − q(q·v))‖².

    Unbiased whatever q is, never below ‖Hq‖, and without the chance that the largest eigenvalue makes up most of.
    Cost: one product more than `frobenius_norm`.
    """
    product, column = Product(op), q[:, None]
    known = float(product.space.norm(product(q), torch.float64)) ** 2

    def multiply_rest(v: Tensor) -> Tensor:
        return product(v - column * product.space.sum(column.T @ v))

    found = root_of(_expected_form(product, multiply_rest, _squares, probes, None, seed, known))
    return with_tolerance(found, math.sqrt(product.size) * product.error)


@in_full_precision
@checked
def diagonal(op: Any, *, probes: int = 64, seed: int = 0) -> DiagonalEstimate:
    """The diagonal of H: the mean of v ∘ Hv over sign vectors v, unbiased, with a standard error per entry.

    The variance of entry i is Σ_{j≠i} Hᵢⱼ² per probe. Cost: `probes` products and two vectors of memory; exact, from
    the unit vectors, if `probes` ≥ size. Reference: Bekas, Kokiopoulou & Saad, Appl. Numer. Math. 57 (2007),
    doi:10.1016/j.apnum.2007.01.003.

    >>> diagonal(torch.tensor([[2.0, 1.0], [1.0, 3.0]])).values
    tensor([2., 3.], dtype=torch.float64)
    """
    product = Product(op)
    check_probes("diagonal", probes, None, seed)
    size = product.size
    if product.space.parted:
        raise InputError("the diagonal is not available for a sharded model; operator_trace gives its sum.")
    if size <= probes:
        blocks = identity_blocks(product.space, product.dtype, product.device)
        entries = [(block * product(block)).sum(1) for block in blocks]
        values = torch.stack(entries).sum(0).double().cpu()
        return DiagonalEstimate(values, torch.zeros_like(values), matvecs=product.count, seed=seed, status="exact")
    mean = torch.zeros(size, dtype=torch.float64, device=product.device)
    scatter = torch.zeros_like(mean)  # Σ (draw − mean)², updated draw by draw (Welford)
    count = 0
    for v in sign_blocks(product, range(probes), seed):
        for draw in (v * product(v)).T:
            count += 1
            step = draw - mean
            mean += step / count
            scatter += step * (draw - mean)
    stderr = (scatter / (count - 1) / count).sqrt()
    return DiagonalEstimate(mean.cpu(), stderr.cpu(), float(count - 1), product.count, seed, "estimated")


def _dots(v: Tensor, hv: Tensor) -> Tensor:
    """vᵀHv of every column."""
    return (v * hv).sum(0, dtype=torch.float64)


def _squares(v: Tensor, hv: Tensor) -> Tensor:
    """‖Hv‖² of every column."""
    return torch.linalg.vector_norm(hv, dim=0, dtype=torch.float64).square()  # squares in float32 end at 1e-45 and 3e38


def with_tolerance(estimate: Estimate, tolerance: float) -> Estimate:
    """An estimate from products with an error of their own; unchanged where they have none."""
    return replace(estimate, tolerance=estimate.tolerance + tolerance) if tolerance else estimate


def _expected_form(
    product: Product,
    multiply: Callable[[Tensor], Tensor],
    form: Callable[[Tensor, Tensor], Tensor],
    probes: int,
    rel_err: float | None,
    seed: int,
    offset: float = 0.0,
    power: int = 1,
) -> Estimate:
    """`offset` + Tr M for a quadratic `form` vᵀMv of v and its product: its mean over signs, or its sum over eᵢ.

    `rel_err` is meant for its root of order `power`.
    """

    def draw(indices: range) -> Tensor:
        blocks = sign_blocks(product, indices, seed)
        return torch.cat([product.space.sum(form(v, multiply(v))).cpu() for v in blocks])

    def exact() -> Estimate:
        blocks = identity_blocks(product.space, product.dtype, product.device)
        total = sum(float(product.space.sum(form(v, multiply(v)).sum())) for v in blocks)
        return Estimate(offset + total, matvecs=product.count, seed=seed)

    if product.written or product.size <= (probes if rel_err is None else _PILOT):
        return exact()
    reason = ""
    if rel_err is None:
        draws = draw(range(probes))
    else:
        draws = draw(range(_PILOT))
        error = power * rel_err * abs(offset + float(draws.mean()))
        variance = float(draws.var()) * (_PILOT - 1) / chi_squared(0.1, _PILOT - 1)
        needed = variance / error**2 if error > 0 else (math.inf if variance > 0 else 0.0)
        if needed - _PILOT >= product.size and product.size <= _MOST_PROBES:
            return exact()
        if needed > _MOST_PROBES:
            reason = f"rel_err={rel_err:g} would take about {figure(needed, 2)} probes; stopped at {_MOST_PROBES:,}"
        total = math.ceil(min(max(needed, _PILOT), _MOST_PROBES))
        draws = torch.cat([draws, draw(range(_PILOT, total))]) if total > _PILOT else draws
        error = power * rel_err * abs(offset + float(draws.mean()))
        if not reason and float(standard_error(draws)) > error:  # to draw on until it is reached would bias the mean
            needed = float(draws.var()) / error**2 if error > 0 else math.inf
            wanted = f"rel_err={rel_err:g} would take about {figure(needed, 2)} probes"
            reason = f"{wanted}; a pilot of {_PILOT} asked for {total:,}"
    mean = Estimate.from_draws(draws, matvecs=product.count, seed=seed)
    return replace(mean, value=offset + mean.value, reason=reason)


def root_of(square: Estimate) -> Estimate:
    """√x with its error by the delta method; its limits are the roots of x's limits."""
    value = math.sqrt(max(square.value, 0.0))
    return replace(square, value=value, stderr=square.stderr / (2 * value) if value else 0.0, power=2.0)
