"""The distribution of all eigenvalues by stochastic Lanczos quadrature, and a whole spectrum from one set of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.estimators.eigenpairs import (
    DENSE_LATER,
    ENDS,
    capacity_for,
    check_end,
    converge,
    dense_eigenpairs,
    ritz_pairs,
    with_reach,
)
from spiritlevel.estimators.entries import Entries
from spiritlevel.estimators.krylov import Array, Krylov, lanczos
from spiritlevel.estimators.operator import Operator, Product, entries_of, in_full_precision
from spiritlevel.estimators.probes import check_probes, signs
from spiritlevel.estimators.trace import root_of, with_tolerance
from spiritlevel.results import Eigenpairs, Estimate, SpectralDensity, SpectrumSummary


@in_full_precision
@checked
def spectral_density(op: Any, *, probes: int = 8, steps: int = 80, seed: int = 0) -> SpectralDensity:
    """The distribution of all eigenvalues, by stochastic Lanczos quadrature.

    From each of `probes` sign vectors, `steps` Lanczos steps give a tridiagonal T (float64); the eigenvalues of T are
    the nodes and the squared first components of its eigenvectors the weights, a Gauss quadrature that reproduces
    vᵀHᵏv/P for k = 0 … 2·steps − 1. A run that exhausts its Krylov space ends early, is exact, and is padded with
    nodes of weight 0.

    Cost: probes · steps products and `steps` vectors of memory. Sizes up to min(probes · steps, 2048) go dense: the
    nodes are then all eigenvalues and nothing is random. References: Golub & Welsch, Math. Comp. 23 (1969),
    doi:10.1090/S0025-5718-69-99647-1; Ubaru, Chen & Saad, SIAM J. Matrix Anal. Appl. 38 (2017),
    doi:10.1137/16M1104974; Ghorbani, Krishnan & Xiao, ICML 2019, arXiv:1901.10159.

    >>> density = spectral_density(torch.diag(torch.arange(400.0, dtype=torch.float64)), probes=4, steps=20)
    >>> density.nodes.shape, round(float(density.weights.sum()), 12)
    (torch.Size([4, 20]), 1.0)
    >>> moment = density.moment(1)
    >>> abs(moment.value - 199.5) < 4 * max(moment.stderr, 1e-9)
    True
    """
    product = Product(op)
    _check_density("spectral_density", probes, steps, seed)
    steps = min(steps, product.size)
    if product.written or product.size <= min(probes * steps, DENSE_LATER):
        return _dense_spectrum(entries_of(product), product, seed)

    def run(index: int) -> tuple[Array, Array]:
        return _quadrature(lanczos(Krylov(product, steps, seed, signs(product, seed, index)), steps), steps)

    return _quadrature_spectrum([run(index) for index in range(probes)], product, seed)


@in_full_precision
@checked
def spectrum(
    op: Any,
    *,
    k: int = 1,
    probes: int = 8,
    steps: int = 80,
    tol: float = 1e-4,
    max_matvecs: int | None = None,
    vectors: bool = False,
    seed: int = 0,
) -> SpectrumSummary:
    """Both ends, trace, Frobenius norm, Tr(H²)/P, layer traces and density from one set of Lanczos runs.

    The runs are those of `spectral_density`. Their first products give vᵀHv, its parts v_l·(Hv)_l for every parameter
    tensor l (if the operator can `split`) and ‖Hv‖², all unbiased: the trace, the traces of the layers and Tr H²,
    with errors from the spread over the probes. The first run continues until the `k` values at both ends have
    converged as in `eigenvalues`, within `max_matvecs` further products (by default 500 + 100k), and up to 128 more
    from a random start show how far beyond them another eigenvalue may lie (`Eigenpairs.reach`). What these values
    contribute is then known and has no part in the errors, and ‖H‖_F is not below them.

    Cost: probes · steps products and the few more that the ends need. Sizes up to min(probes · steps, 2048) go dense
    and are exact. References: see `eigenvalues` and `spectral_density`.

    >>> values = torch.linspace(-1, 3, 50, dtype=torch.float64)
    >>> print(spectrum(torch.diag(values)))
    spectrum of size 50: from -1 to 3, trace 50, Frobenius norm 10.9265, 50 products
    """
    product = Product(op)
    _check_density("spectrum", probes, steps, seed)
    check_end(product, k, "largest", tol, seed)
    named = op if isinstance(op, Operator) and op.names else None
    steps = min(steps, product.size)
    if product.written or product.size <= min(probes * steps, DENSE_LATER):
        return _dense_summary(product, named, k, tol, vectors, seed)
    forms: dict[str, list[float]] = {name: [] for name in named.names} if named else {}

    def run(index: int, capacity: int) -> Krylov:
        space = Krylov(product, capacity, seed, signs(product, seed, index))
        first_product = space.extend()
        if named:
            for name, part in named.split(space.basis[0] * first_product).items():
                forms[name].append(product.size * float(product.space.sum(part.sum(dtype=torch.float64))))
        return lanczos(space, steps)

    space = run(0, max(steps, capacity_for(product.size, 2 * k, None)))
    rows = [_quadrature(space, steps)]
    limit = product.count + (500 + 100 * k if max_matvecs is None else max_matvecs)
    coordinates, reason = converge(space, ENDS["both"], k, tol, limit)
    largest = ritz_pairs(space, coordinates[:, :k], reason, "largest", tol, True)
    smallest = ritz_pairs(space, coordinates[:, k:], reason, "smallest", tol, True)
    del space  # its basis, before the next one is allocated
    if not reason:
        ends = with_reach({"largest": largest, "smallest": smallest}, product, tol, seed)
        largest, smallest = ends["largest"], ends["smallest"]
    rows += [_quadrature(run(index, steps), steps) for index in range(1, probes)]

    forms[""] = [product.size * float(weights @ nodes) for nodes, weights in rows]
    draws = {name: torch.tensor(each, dtype=torch.float64) for name, each in forms.items()}
    squares = torch.tensor([product.size * float(weights @ nodes**2) for nodes, weights in rows], dtype=torch.float64)
    if largest.converged and smallest.converged:
        _take_out((largest, smallest), product, named, seed, draws, squares)
    traces = {name: Estimate.from_draws(each, matvecs=probes, seed=seed) for name, each in draws.items()}
    square = Estimate.from_draws(squares, matvecs=probes, seed=seed)
    if not vectors:
        largest, smallest = replace(largest, vectors=None), replace(smallest, vectors=None)
    return SpectrumSummary(
        largest=largest,
        smallest=smallest,
        trace=with_tolerance(traces.pop(""), product.size * product.form_error),
        frobenius_norm=with_tolerance(root_of(square), math.sqrt(product.size) * product.error),
        mean_square=square.scaled(1 / product.size),
        density=_quadrature_spectrum(rows, product, seed),
        layers=traces,
        size=product.size,
        matvecs=product.count,
        seed=seed,
    )


def _take_out(
    ends: Sequence[Eigenpairs],
    product: Product,
    named: Operator | None,
    seed: int,
    draws: dict[str, Tensor],
    squares: Tensor,
) -> None:
    """Take out of every draw what chance makes of known eigenpairs: λ(q·v)² is λ on average, and λ²(q·v)² is λ².

    In layer l, λ(q·v)(q_l·v_l) is λ‖q_l‖². A few large eigenvalues make up most of the spread.
    """
    for index in range(len(squares)):
        v = signs(product, seed, index).double()
        for end in ends:
            assert end.vectors is not None
            for value, q in zip(end.values.tolist(), end.vectors.T.double(), strict=True):
                along = float(product.space.sum((q * v).sum()))
                squares[index] -= value**2 * (along**2 - 1)
                chance = q * (along * v - q)
                for name, part in {"": chance, **(named.split(chance) if named else {})}.items():
                    draws[name][index] -= value * float(product.space.sum(part.sum()))


def _quadrature(space: Krylov, steps: int) -> tuple[Array, Array]:
    """Gauss nodes and weights of a fresh Krylov space, padded to `steps` with nodes of weight 0."""
    w = space.width
    nodes, vectors = eigh_tridiagonal(space.projected.diagonal()[:w], space.projected.diagonal(1)[: w - 1])
    return np.pad(nodes, (0, steps - w), mode="edge"), np.pad(vectors[0] ** 2, (0, steps - w))


def _quadrature_spectrum(rows: list[tuple[Array, Array]], product: Product, seed: int) -> SpectralDensity:
    nodes = torch.from_numpy(np.stack([nodes for nodes, _ in rows]))
    weights = torch.from_numpy(np.stack([weights for _, weights in rows])) / len(rows)
    return SpectralDensity(nodes, weights, product.size, matvecs=product.count, seed=seed)


def _dense_spectrum(entries: Entries, product: Product, seed: int) -> SpectralDensity:
    nodes = torch.from_numpy(entries.values.copy())[None]
    weights = torch.full_like(nodes, 1 / product.size)
    return SpectralDensity(nodes, weights, product.size, exact=True, matvecs=product.count, seed=seed)


def _dense_summary(
    product: Product, named: Operator | None, k: int, tol: float, vectors: bool, seed: int
) -> SpectrumSummary:
    entries = entries_of(product)
    largest = dense_eigenpairs(product, entries, k, "largest", tol, vectors, seed)
    smallest = dense_eigenpairs(product, entries, k, "smallest", tol, vectors, seed)
    cost = product.count

    def known(value: float) -> Estimate:
        return Estimate(value, matvecs=cost, seed=seed)

    square = float(np.square(entries.matrix).sum())
    layers = {}
    if named is not None and not named.space.parted:
        layers = named.split(torch.from_numpy(entries.matrix.diagonal().copy()))
    return SpectrumSummary(
        largest=largest,
        smallest=smallest,
        trace=known(float(entries.matrix.trace())),
        frobenius_norm=known(math.sqrt(square)),
        mean_square=known(square / product.size),
        density=_dense_spectrum(entries, product, seed),
        layers={name: known(float(part.sum())) for name, part in layers.items()},
        size=product.size,
        matvecs=cost,
        seed=seed,
    )


def _check_density(who: str, probes: int, steps: int, seed: int) -> None:
    check_probes(who, probes, None, seed)
    if steps < 1:
        raise InputError(f"{who} needs steps >= 1, got {steps}.")
