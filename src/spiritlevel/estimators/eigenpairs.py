"""The ends of a spectrum, by thick-restarted Lanczos: eigenvalues with their residuals, and how well they are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, checked_seed, unknown_name
from spiritlevel.estimators.entries import Entries
from spiritlevel.estimators.krylov import Array, Krylov
from spiritlevel.estimators.operator import Product, entries_of, in_full_precision
from spiritlevel.estimators.probes import gaussian
from spiritlevel.results import Eigenpairs, Estimate, figure

_DENSE_EIGENVALUES = 128  # up to this size all eigenvalues are computed at once
DENSE_LATER = 2048  # up to this size too, where it saves products
_SETTLED = 128  # products after which an end of the spectrum is as well known as it will be


@in_full_precision
@checked
def eigenvalues(
    op: Any,
    k: int = 1,
    *,
    which: str = "largest",
    tol: float = 1e-4,
    max_matvecs: int | None = None,
    vectors: bool = True,
    seed: int = 0,
    basis: int | None = None,
    start: Tensor | None = None,
) -> Eigenpairs:
    """The k eigenvalues at one end of the spectrum, by thick-restarted Lanczos with full re-orthogonalisation.

    A pair (λ, v) has converged if ‖Hv − λv‖ ≤ tol · max|Ritz value|; then an eigenvalue lies within the residual of λ,
    and within residual²/gap for a simple one. The residuals come from the products already made, with their measured
    asymmetry (rounding, or products that change from call to call) added, and cost nothing extra; only below 100 times
    the rounding unit of the dtype, k more products measure them.

    One start vector sees every eigenvalue once, however often it is repeated. So when k values have converged, the
    iteration starts again from a random vector orthogonal to all it has seen, until such a round brings no new value.
    The round ends once repetitions are excluded for each found value that could push another one out: if one of its
    eigenvectors z had been missed, then |zᵀq| of the random start q would have to be below 1/‖g‖, where g are the
    components of z in the round's basis that H and its products dictate (the Christoffel function of the round), and
    that has probability below 0.001. Eigenvalues closer than tol · max|Ritz value| count as equal. Usually this takes
    4 to 10 products.

    A small residual does not show that no eigenvalue lies further out: the start vector may hardly have contained its
    eigenvector. That is excluded in the same way, for eigenvalues further out by min(50 tol, 5%) of max|Ritz value|
    or more; the products that the first round made for its residual usually suffice.

    Up to size max(128, 4k) all eigenvalues are computed from the dense matrix, and up to size 2048 once the iteration
    has made as many products as the matrix has columns, unless `max_matvecs` forbids it.

    Args:
        op: the symmetric matrix.
        k: how many.
        which: "largest", "smallest" (both with sign) or "magnitude"; the values come from that end inwards.
        tol: the relative residual to reach.
        max_matvecs: where to stop unconverged; by default 500 + 50k.
        vectors: whether to return the eigenvectors, as columns (P, k) in the operator's dtype.
        seed: for the start vectors.
        basis: how many vectors to hold in memory; by default max(2k + 20, k + 40).
        start: a vector (P,) near the one eigenvector that is wanted, such as that of the last look at a network
            in training. A few products then reach the residual, but nothing is excluded: `reach` is infinite, and
            `outermost()` is a lower bound on the largest eigenvalue.

    References: Wu & Simon, SIAM J. Matrix Anal. Appl. 22 (2000), doi:10.1137/S0895479898334605; Kuczyński &
    Woźniakowski, ibid. 13 (1992), doi:10.1137/0613066 (random starts); Golub & Meurant, Matrices, Moments and
    Quadrature (2010).

    >>> values = torch.linspace(0, 1, 500, dtype=torch.float64)
    >>> values[:3] = torch.tensor([3.0, 3.0, 2.0])
    >>> top = eigenvalues(torch.diag(values), k=3)
    >>> [round(value, 4) for value in top.values.tolist()], top.converged
    ([3.0, 3.0, 2.0], True)
    """
    product = Product(op)
    check_end(product, k, which, tol, seed)
    limit = 500 + 50 * k if max_matvecs is None else max_matvecs
    if limit < k:
        raise InputError(f"eigenvalues needs max_matvecs >= k = {k}, got {limit}.")
    if basis is not None and basis < k + 4:
        raise InputError(f"eigenvalues needs basis >= k + 4 = {k + 4} vectors to restart with, got {basis}.")
    size, spare = product.size, math.inf if max_matvecs is None else max_matvecs
    if product.written or (size <= max(_DENSE_EIGENVALUES, 4 * k) and size <= spare):
        return dense_eigenpairs(product, entries_of(product), k, which, tol, vectors, seed)
    if start is not None:
        space = Krylov(product, capacity_for(size, k, basis), seed, _given(product, k, start))
        coordinates, reason = converge(space, ENDS[which], k, tol, limit, exclude=False)
        return replace(ritz_pairs(space, coordinates, reason, which, tol, vectors), reach=math.inf)
    may_go_dense = size <= DENSE_LATER and 2 * size <= spare
    space = Krylov(product, capacity_for(size, k, basis), seed, gaussian(product, seed, 0), uniform=True)
    coordinates, reason = converge(space, ENDS[which], k, tol, min(limit, size) if may_go_dense else limit)
    if reason and may_go_dense:
        return dense_eigenpairs(product, entries_of(product), k, which, tol, vectors, seed)
    return ritz_pairs(space, coordinates, reason, which, tol, vectors)


def _given(product: Product, k: int, start: Tensor) -> Tensor:
    start = torch.as_tensor(start).detach().reshape(-1).to(product.device, product.dtype)
    length = float(product.space.norm(start))
    if start.numel() != product.space.length or not 0 < length < math.inf:
        raise InputError(
            f"eigenvalues needs a start of {product.space.length} finite numbers, not all of them 0, "
            f"got {start.numel()} of length {figure(length, 3)}."
        )
    if k > 1:
        raise InputError(f"eigenvalues takes a start for one eigenvalue, got k={k}; leave start= out.")
    return start


@in_full_precision
def outermost(
    op: Any, which: str = "largest", *, tol: float = 1e-4, max_matvecs: int | None = None, seed: int = 0
) -> Estimate:
    """The eigenvalue at one end of the spectrum ± its uncertainty, with its sign wherever that can be determined.

    `eigenvalues` promises a residual, which shows that some eigenvalue is near its value, and that none lies further
    out by 50 tol · max|λ| or more. At the edge of a bulk of small eigenvalues both are far more than the value itself.
    So the first round continues, without restarts, until the eigenvalues that it cannot exclude (except with a chance
    of 0.001) lie within tol · max|λ| of the value and 0 is not among them, up to 128 products or as many as fit into
    256 MB. What is left is the `tolerance`. Usually that takes 2 products more than `eigenvalues` for the end that
    dominates, and 60 to 120 in all for the other one.

    Args:
        op: the symmetric matrix.
        which: "largest", "smallest" (both with sign) or "magnitude".
        tol: the relative tolerance to reach.
        max_matvecs: where to stop; by default 550.
        seed: of the start vectors.

    >>> values = torch.linspace(0, 1e-3, 500, dtype=torch.float64)
    >>> values[:2] = torch.tensor([3.0, -1e-4])
    >>> low = outermost(torch.diag(values), "smallest")
    >>> low.sign, abs(low.value + 1e-4) <= low.tolerance
    (-1, True)
    """
    return outermost_pair(op, which, tol=tol, max_matvecs=max_matvecs, vectors=False, seed=seed).outermost()


@in_full_precision
def outermost_pair(
    op: Any,
    which: str = "largest",
    *,
    tol: float = 1e-4,
    max_matvecs: int | None = None,
    vectors: bool = True,
    seed: int = 0,
) -> Eigenpairs:
    """The pair that `outermost` finds, with its eigenvector, at no further product."""
    product = Product(op)
    check_end(product, 1, which, tol, seed)
    limit = 550 if max_matvecs is None else max_matvecs
    if limit < 1:
        raise InputError(f"outermost needs max_matvecs >= 1, got {limit}.")
    if product.written:
        return dense_eigenpairs(product, product.written, 1, which, tol, vectors, seed)
    space = _roomy(product, seed)
    may_go_dense = product.size <= DENSE_LATER and (max_matvecs is None or 2 * product.size <= max_matvecs)
    reason = "small"
    if product.size > _DENSE_EIGENVALUES or not may_go_dense:
        allowed = min(limit, product.size) if may_go_dense else limit
        coordinates, reason = converge(space, ENDS[which], 1, tol, allowed)
    if reason and may_go_dense:
        return dense_eigenpairs(product, entries_of(product), 1, which, tol, vectors, seed)
    if not reason and space.knows_first:
        _settle(space, ENDS[which], tol, limit)
        (end,) = ENDS[which]
        values, columns = space.ritz()
        coordinates = columns[:, [int(np.argmax(end(values)))]]
    return ritz_pairs(space, coordinates, reason, which, tol, vectors)


def _roomy(product: Product, seed: int) -> Krylov:
    """A Krylov space from a random start that need not restart before an end is as well known as it will be."""
    room = max(capacity_for(product.size, 1, None), min(_SETTLED, 2**26 // product.size))
    return Krylov(product, min(product.size, room), seed, gaussian(product, seed, 0), uniform=True)


def _settle(space: Krylov, ends: tuple[Callable[[Array], Array], ...], tol: float, limit: int) -> None:
    """Extend a first round until its outermost values are known to `tol` and have a sign, while there is room."""
    while 0 in space.edges and space.width < space.capacity and space.product.count < limit:
        if space.width % (1 + space.width // 20) == 0:  # wastes few products and little time on small matrices
            values, vectors = space.ritz()
            outer = [int(np.argmax(end(values))) for end in ends]
            residuals = space.residuals(vectors[:, outer])
            unknown = [
                max(float(residual), space.reach(end, float(end(values[index]))))
                for end, index, residual in zip(ends, outer, residuals, strict=True)
            ]
            signed = ends == ENDS["magnitude"] or all(np.abs(values[outer]) > 3 * np.array(unknown))
            if signed and max(unknown) <= tol * space.norm:
                return
        space.extend()


def with_reach(pairs: dict[str, Eigenpairs], product: Product, tol: float, seed: int) -> dict[str, Eigenpairs]:
    """Converged ends with how far an eigenvalue may lie beyond them, and a better outermost value, from a new start.

    If eigenvectors were asked for, the values stay as they are.
    """
    space = _roomy(product, seed)
    space.extend()
    _settle(space, ENDS["both"], tol, product.count + _SETTLED)
    values, vectors = space.ritz()
    found = {}
    for which, pair in pairs.items():
        (end,) = ENDS[which]
        best = int(np.argmax(end(values)))
        outer = float(end(values[best]))
        limit = outer + space.reach(end, outer)
        residual = math.hypot(float(space.residuals(vectors[:, [best]])[0]), space.noise)
        if pair.vectors is None and outer > float(end(pair.values.numpy())[0]) and residual <= tol * space.norm:
            pair.values[0], pair.residuals[0] = float(values[best]), residual
        found[which] = replace(pair, reach=max(0.0, limit - float(end(pair.values.numpy())[0])))
    return found


@in_full_precision
@checked
def spectral_norm(op: Any, *, tol: float = 1e-4, max_matvecs: int | None = None, seed: int = 0) -> Estimate:
    """The spectral norm ‖H‖₂ = max|λ|, by `eigenvalues(op, 1, which="magnitude")`.

    Known to ± `tolerance`, about tol · ‖H‖₂, beyond which a larger one is excluded except with a chance of 0.001; in
    practice much more closely. There is no random error, so `stderr` is 0; if the iteration did not converge, `status`
    says so and `reason` why. Usually 10 to 30 products. Reference: see `eigenvalues`.

    >>> print(spectral_norm(torch.diag(torch.tensor([1.0, -3.0, 2.0]))))
    3
    """
    found = outermost(op, "magnitude", tol=tol, max_matvecs=max_matvecs, seed=seed)
    return replace(found, value=abs(found.value))


def capacity_for(size: int, k: int, basis: int | None) -> int:
    """How many vectors a space for k eigenpairs holds."""
    return min(size, max(2 * k + 20, k + 40) if basis is None else basis)


ENDS: dict[str, tuple[Callable[[Array], Array], ...]] = {  # what is large at each wanted end
    "largest": (np.positive,),
    "smallest": (np.negative,),
    "magnitude": (np.abs,),
    "both": (np.positive, np.negative),
}


def converge(
    space: Krylov, ends: tuple[Callable[[Array], Array], ...], k: int, tol: float, limit: int, exclude: bool = True
) -> tuple[Array, str]:
    """Extend `space` until the k Ritz pairs at each end have converged and none is missing (see `eigenvalues`).

    Without `exclude`, whether one is missing is left open. Returns the coordinates of the pairs, end by end, and why it
    stopped early, or an empty string.
    """
    product = space.product
    reserve = max(1, (space.capacity - k * len(ends)) // 2)  # room for new vectors after a restart
    settled: Array | None = None  # the wanted values when the last round began
    number = 0  # the edge that the wanted residuals lie in
    while True:
        stride = max(1, space.width // 20)  # wastes few products and keeps the cost of `ritz` low
        exhausted = product.count >= limit
        if space.width >= k and (
            exhausted or space.width % stride == 0 or space.width == space.capacity or number not in space.edges
        ):
            values, coordinates = space.ritz()
            distance = tol * space.norm
            order = [np.argsort(-end(values), kind="stable") for end in ends]
            wanted = np.concatenate([indices[:k] for indices in order])
            leaks = space.leaks(coordinates[:, wanted])
            residual = float(space.residuals(coordinates[:, wanted]).max())
            converged = residual <= space.noise or math.hypot(residual, space.noise) <= distance
            begin = False
            if converged:
                if space.width == product.size or not exclude:
                    return coordinates[:, wanted], ""
                found = np.sort(values[wanted])
                margin = min(50 * tol, 0.05) * space.norm
                repeats = [_repeatable(end, values[i[:k]], distance) for end, i in zip(ends, order, strict=True)]
                beyond = [_beyond(end, values, margin) for end in ends] if margin else []
                outside = np.concatenate([*beyond, []])
                hidden = outside[space.overlooks(outside)]
                points = np.concatenate([*repeats, hidden])
                begin = settled is None or bool(np.abs(found - settled).sum() > distance)
                if not (points.size if begin else space.points.size):
                    return coordinates[:, wanted], ""
                if len(hidden) == points.size and space.knows_first and 0 in space.edges:
                    begin = False  # the first round continues until it excludes them
            if exhausted:
                what = "eigenvalues that are repeated or lie further out were not ruled out"
                if not converged:
                    what = f"residual {figure(residual, 2)} > tol · max|Ritz value| = {figure(distance, 2)}"
                return coordinates[:, wanted], f"{what} after {product.count} products; raise max_matvecs"
            if space.width == space.capacity or (begin and space.width + reserve > space.capacity):
                share = (space.capacity - reserve) // len(ends)
                kept = np.unique(np.concatenate([indices[:share] for indices in order]))
                space.restart(values[kept], coordinates[:, kept])
            if begin:
                settled = found
                space.begin(points)
            number = space.rounds if converged or not leaks else max(leaks, key=lambda edge: float(leaks[edge].max()))
        if number not in space.edges:
            if not space.begin(space.points):
                least = float(np.abs(space.points).min())
                return coordinates[:, wanted], (
                    f"repetitions of an eigenvalue as small as {figure(least, 2)} cannot be distinguished from "
                    f"rounding in {product.dtype}; use float64"
                )
            number = space.rounds
        space.extend(number)


def _beyond(end: Callable[[Array], Array], values: Array, margin: float) -> Array:
    """The nearest places where an eigenvalue would lie further out than all `values` by `margin`."""
    edge = float(end(values).max()) + margin
    points = np.array([edge, -edge])
    return points[end(points) >= edge]


def _repeatable(end: Callable[[Array], Array], values: Array, distance: float) -> Array:
    """The values that a repetition of themselves would push inwards: all that differ from the last one."""
    return values[end(values) > end(values).min() + distance]


def ritz_pairs(space: Krylov, coordinates: Array, reason: str, which: str, tol: float, vectors: bool) -> Eigenpairs:
    """The Ritz pairs with these coordinates; `reason` says why they have not converged."""
    projected = space.projected[: space.width, : space.width]
    values = np.einsum("ij,ik,kj->j", coordinates, projected, coordinates)
    columns = space.vectors(coordinates).T
    if not reason and tol < 100 * torch.finfo(space.product.dtype).eps and not space.product.error:
        residuals = _measured_residuals(space.product, columns, values)
    else:
        residuals = np.hypot(space.residuals(coordinates), space.noise)
    bound, reach = tol * space.norm, None
    if not reason and space.knows_first:
        (end,) = ENDS[which]
        reach = space.reach(end, float(end(values[0])))
    elif not reason:
        reach = min(50 * tol, 0.05) * space.norm
    if not reason and residuals.max() > bound:
        reason = (
            f"residual {figure(float(residuals.max()), 2)} > tol · max|Ritz value| = {figure(bound, 2)}, and the "
            f"products are asymmetric by {figure(space.noise, 2)}: they change from call to call, or "
            f"{space.product.dtype} allows no better"
        )
    return Eigenpairs(
        values=torch.from_numpy(values),
        vectors=columns if vectors else None,
        residuals=torch.from_numpy(residuals),
        converged=not reason,
        matvecs=space.product.count,
        which=which,
        tol=tol,
        seed=space.seed,
        reason=reason,
        reach=reach,
    )


def _measured_residuals(product: Product, columns: Tensor, values: Array) -> Array:
    rests = [product(v).double() - value * v.double() for v, value in zip(columns.T, values, strict=True)]
    return np.array([float(product.space.norm(rest)) for rest in rests])


def dense_eigenpairs(
    product: Product, entries: Entries, k: int, which: str, tol: float, vectors: bool, seed: int
) -> Eigenpairs:
    """The k eigenpairs at one end of a matrix that was formed by products.

    Their residuals are measured where there are vectors; otherwise they are at most the asymmetry of the products.
    """
    (end,) = ENDS[which]
    if vectors and k > 1:
        entries.decompose()
    wanted = np.argsort(-end(entries.values), kind="stable")[:k]
    norm = float(np.abs(entries.values).max())
    bound = tol * norm
    values, columns, residuals = entries.values[wanted], None, np.full(k, entries.asymmetry)
    if vectors or residuals.max() > bound:
        columns = entries.vectors(wanted)
        residuals = np.linalg.norm(entries.matrix @ columns - columns * values, axis=0)
    reason = ""
    if residuals.max() > bound:
        asymmetry = float(np.abs(entries.matrix - entries.matrix.T).max())
        reason = (
            f"residual {figure(float(residuals.max()), 2)} > tol · max|λ| = {figure(bound, 2)}, and the products are "
            f"asymmetric by {figure(asymmetry, 2)}: they change from call to call, or {product.dtype} allows no better"
        )
    residuals = np.maximum(residuals, product.error)
    kept = None
    if vectors and columns is not None:
        kept = product.space.part(torch.from_numpy(columns).to(product.device, product.dtype))
    return Eigenpairs(
        values=torch.from_numpy(values),
        vectors=kept,
        residuals=torch.from_numpy(residuals),
        converged=not reason,
        matvecs=product.count or entries.size,
        which=which,
        tol=tol,
        seed=seed,
        reason=reason,
        reach=4 * torch.finfo(product.dtype).eps * norm,  # the entries are rounded, however symmetric they came out
    )


def check_end(product: Product, k: int, which: str, tol: float, seed: int) -> None:
    """Raise `InputError` if these arguments ask for no eigenvalues at all."""
    public = tuple(name for name in ENDS if name != "both")
    if which not in public:
        raise unknown_name("end of the spectrum", which, public)
    if not 1 <= k <= product.size:
        raise InputError(f"eigenvalues needs k between 1 and the operator's size {product.size}, got {k}.")
    if not tol > 0:
        raise InputError(f"eigenvalues needs a tolerance tol > 0, got {tol}.")
    checked_seed(seed)
