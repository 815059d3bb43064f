"""What matrix-vector products alone tell about a symmetric matrix: its ends, trace, norms, diagonal and density.

Every function takes anything symmetric with `shape` and `@`: an `Operator`, a dense tensor, a NumPy array, a SciPy
matrix or linear operator. Real float32 and float64; vectors and bases keep the operator's dtype, everything small is
float64. Random numbers come from local generators keyed by (seed, index): the same for every chunking, and the global
random states stay untouched. Whatever costs no more products than the estimate is computed exactly instead, with
standard error 0.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh, eigh_tridiagonal, eigvalsh
from scipy.sparse.linalg import LinearOperator
from scipy.stats import chi2
from torch import Tensor

from spiritlevel.errors import InputError, unknown_name
from spiritlevel.results import DiagonalEstimate, Eigenpairs, Estimate, Spectrum, SpectrumSummary

__all__ = [
    "Operator",
    "diagonal",
    "eigenvalues",
    "frobenius_norm",
    "operator_trace",
    "spectral_density",
    "spectral_norm",
    "spectrum",
]

Array = NDArray[np.float64]
_Arguments = ParamSpec("_Arguments")
_Found = TypeVar("_Found")

_DENSE_EIGENVALUES = 128  # up to this size all eigenvalues are computed at once
_DENSE_LATER = 2048  # up to this size the same where it saves products
_PILOT = 16  # probes that decide how many a relative error needs
_MOST_PROBES = 4096  # where a relative error gives up
_MISS = 1e-3  # chance that an eigenvalue stays hidden
_SETTLED = 128  # products after which an end of the spectrum is as well known as it will be


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """No reduced precision inside, whatever the caller has switched on."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _in_full_precision(function: Callable[_Arguments, _Found]) -> Callable[_Arguments, _Found]:
    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Found:
        with _full_precision():
            return function(*args, **kwargs)

    return call


class Operator:
    """A symmetric matrix H known by its products, over named parameters laid end to end.

    `matmat` maps a (P, k) tensor to H times it. `shapes` gives the parameters' names and shapes in order; without it
    the operator has no names and cannot `split`. Exact; `op @ v` costs one product a column.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> op = Operator(lambda block: matrix @ block, 2, dtype=torch.float32, shapes={"weight": (1, 1), "bias": (1,)})
    >>> op @ torch.tensor([1.0, 0.0])
    tensor([2., 1.])
    >>> op.split(op @ torch.tensor([1.0, 0.0]))
    {'weight': tensor([[2.]]), 'bias': tensor([1.])}
    """

    def __init__(
        self,
        matmat: Callable[[Tensor], Tensor],
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.size = size
        self.shape = (size, size)
        self.dtype = dtype
        self.device = torch.device(device)
        self.shapes = {name: torch.Size(shape) for name, shape in (shapes or {}).items()}
        self._matmat = matmat
        total = sum(shape.numel() for shape in self.shapes.values())
        if self.shapes and total != size:
            raise InputError(f"the parameters' shapes hold {total} numbers, but the operator has size {size}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names in the order of the vector."""
        return tuple(self.shapes)

    def __matmul__(self, v: Tensor) -> Tensor:
        if not isinstance(v, Tensor):
            raise InputError(f"an operator multiplies tensors, got {type(v).__name__}; use .to_scipy() for arrays.")
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise InputError(
                f"an operator of size {self.size} multiplies vectors of shape ({self.size},) or ({self.size}, k), "
                f"got {tuple(v.shape)}."
            )
        if v.dtype != self.dtype or v.device.type != self.device.type:
            raise InputError(
                f"the operator is {self.dtype} on {self.device}, the vector {v.dtype} on {v.device}; "
                f"convert it with v.to(op.device, op.dtype)."
            )
        block = v[:, None] if v.ndim == 1 else v
        with _full_precision():
            return _checked(self._matmat(block), block).reshape(v.shape)

    def dense(self) -> Tensor:
        """The matrix itself, by `size` products."""
        return torch.cat([self @ block for block in _identity_blocks(self.size, self.dtype, self.device)], dim=1)

    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A vector cut into the parameters' shapes, as views."""
        if not self.shapes:
            raise InputError("this operator was built without parameter shapes, so it cannot split a vector.")
        if v.shape != (self.size,):
            raise InputError(f"split needs a vector of shape ({self.size},), got {tuple(v.shape)}.")
        parts = v.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def to_scipy(self) -> LinearOperator:
        """The operator for SciPy, for example `scipy.sparse.linalg.eigsh(op.to_scipy(), k=3)`."""

        def multiply(x: NDArray[Any]) -> NDArray[Any]:
            return (self @ torch.tensor(x, dtype=self.dtype, device=self.device)).cpu().numpy()

        dtype = np.float64 if self.dtype == torch.float64 else np.float32
        return LinearOperator(
            self.shape, matvec=multiply, rmatvec=multiply, matmat=multiply, rmatmat=multiply, dtype=dtype
        )

    def __repr__(self) -> str:
        return f"Operator(size={self.size}, dtype={self.dtype}, device={self.device}, parameters={len(self.shapes)})"


@_in_full_precision
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
    the rounding unit of the dtype, k products measure them anew.

    One start vector sees every eigenvalue once, however often it is repeated. So when k values have converged, the
    iteration starts again from a random vector orthogonal to all it has seen, until such a round brings no new value.
    The round ends when each found value that could push another one out is excluded: if one of its eigenvectors z had
    been missed, then |zᵀq| of the random start q would have to be below 1/‖g‖, where g are the components of z in
    the round's basis that H and its products dictate (the Christoffel function of the round), and that has probability
    below 0.001. Eigenvalues closer than tol · max|Ritz value| count as equal. Usually this takes 4 to 10 products.

    A small residual does not tell that no eigenvalue lies further out: the start vector may hardly have contained its
    eigenvector. That is excluded in the same way, for eigenvalues further out by min(50 tol, 5 %) of max|Ritz value|
    or more; what the first round has made for its residual usually suffices.

    Up to size max(128, 4k) all eigenvalues are computed from the dense matrix, and up to size 2048 once the iteration
    has made as many products as the matrix has columns, unless `max_matvecs` forbids it.

    Args:
        op: the symmetric matrix.
        k: how many.
        which: "largest", "smallest" (both with sign) or "magnitude"; the values come from that end inwards.
        tol: the relative residual to reach.
        max_matvecs: where to stop unconverged; 500 + 50k unless given.
        vectors: whether to return the eigenvectors, as columns (P, k) in the operator's dtype.
        seed: of the start vectors.
        basis: how many vectors to hold in memory; max(2k + 20, k + 40) unless given.
        start: a vector (P,) near the one eigenvector that is wanted, such as that of the last look at a network that
            trains. A few products then reach the residual, and nothing is excluded: `reach` is infinite, and of the
            largest eigenvalue `outermost()` is a lower bound.

    References: Wu & Simon, SIAM J. Matrix Anal. Appl. 22 (2000), doi:10.1137/S0895479898334605; Kuczyński &
    Woźniakowski, ibid. 13 (1992), doi:10.1137/0613066 (random starts); Golub & Meurant, Matrices, Moments and
    Quadrature (2010).

    >>> values = torch.linspace(0, 1, 500, dtype=torch.float64)
    >>> values[:3] = torch.tensor([3.0, 3.0, 2.0])
    >>> top = eigenvalues(torch.diag(values), k=3)
    >>> [round(value, 4) for value in top.values.tolist()], top.converged
    ([3.0, 3.0, 2.0], True)
    """
    product = _Product(op)
    _check_end(product, k, which, tol, seed)
    limit = 500 + 50 * k if max_matvecs is None else max_matvecs
    if limit < k:
        raise InputError(f"eigenvalues needs max_matvecs >= k = {k}, got {limit}.")
    if basis is not None and basis < k + 4:
        raise InputError(f"eigenvalues needs basis >= k + 4 = {k + 4} vectors to restart with, got {basis}.")
    size, spare = product.size, math.inf if max_matvecs is None else max_matvecs
    if size <= max(_DENSE_EIGENVALUES, 4 * k) and size <= spare:
        return _dense_eigenpairs(product, _dense(product), k, which, tol, vectors, seed)
    if start is not None:
        space = _Krylov(product, _capacity(size, k, basis), seed, _given(product, k, start))
        coordinates, reason = _converge(space, _ENDS[which], k, tol, limit, exclude=False)
        return replace(_eigenpairs(space, coordinates, reason, which, tol, vectors), reach=math.inf)
    may_go_dense = size <= _DENSE_LATER and 2 * size <= spare
    space = _Krylov(product, _capacity(size, k, basis), seed, _gaussian(product, seed, 0), uniform=True)
    coordinates, reason = _converge(space, _ENDS[which], k, tol, min(limit, size) if may_go_dense else limit)
    if reason and may_go_dense:
        return _dense_eigenpairs(product, _dense(product), k, which, tol, vectors, seed)
    return _eigenpairs(space, coordinates, reason, which, tol, vectors)


@_in_full_precision
def outermost(
    op: Any, which: str = "largest", *, tol: float = 1e-4, max_matvecs: int | None = None, seed: int = 0
) -> Estimate:
    """The eigenvalue at one end of the spectrum ± what is not known of it, with its sign wherever that can be told.

    `eigenvalues` promises a residual, which tells that some eigenvalue is near its value, and that none lies further
    out by 50 tol · max|λ| or more. At the edge of a bulk of small eigenvalues both are far more than the value itself.
    So the first round goes on, without restarts, until the eigenvalues that it cannot exclude (but for a chance of
    0.001) lie within tol · max|λ| of the value and 0 is not among them, up to 128 products or as many as fit into 256
    MB. What is left is the `tolerance`. Usually that takes 2 products more than `eigenvalues` for the end that
    dominates, and 60 to 120 in all for the other one.

    Args:
        op: the symmetric matrix.
        which: "largest", "smallest" (both with sign) or "magnitude".
        tol: the relative tolerance to reach.
        max_matvecs: where to stop; 550 unless given.
        seed: of the start vectors.

    >>> values = torch.linspace(0, 1e-3, 500, dtype=torch.float64)
    >>> values[:2] = torch.tensor([3.0, -1e-4])
    >>> low = outermost(torch.diag(values), "smallest")
    >>> low.sign, abs(low.value + 1e-4) <= low.tolerance
    (-1, True)
    """
    product = _Product(op)
    _check_end(product, 1, which, tol, seed)
    limit = 550 if max_matvecs is None else max_matvecs
    if limit < 1:
        raise InputError(f"outermost needs max_matvecs >= 1, got {limit}.")
    space = _roomy(product, seed)
    may_go_dense = product.size <= _DENSE_LATER and (max_matvecs is None or 2 * product.size <= max_matvecs)
    reason = "small"
    if product.size > _DENSE_EIGENVALUES or not may_go_dense:
        allowed = min(limit, product.size) if may_go_dense else limit
        coordinates, reason = _converge(space, _ENDS[which], 1, tol, allowed)
    if reason and may_go_dense:
        return _dense_eigenpairs(product, _dense(product), 1, which, tol, False, seed).outermost()
    if not reason and space.knows_first:
        _settle(space, _ENDS[which], tol, limit)
        (end,) = _ENDS[which]
        values, vectors = space.ritz()
        coordinates = vectors[:, [int(np.argmax(end(values)))]]
    return _eigenpairs(space, coordinates, reason, which, tol, vectors=False).outermost()


def _roomy(product: _Product, seed: int) -> _Krylov:
    """A Krylov space of a random start that need not restart before an end is as well known as it will be."""
    room = max(_capacity(product.size, 1, None), min(_SETTLED, 2**26 // product.size))
    return _Krylov(product, min(product.size, room), seed, _gaussian(product, seed, 0), uniform=True)


def _settle(space: _Krylov, ends: tuple[Callable[[Array], Array], ...], tol: float, limit: int) -> None:
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
            signed = ends == _ENDS["magnitude"] or all(np.abs(values[outer]) > 3 * np.array(unknown))
            if signed and max(unknown) <= tol * space.norm:
                return
        space.extend()


def _with_reach(pairs: dict[str, Eigenpairs], product: _Product, tol: float, seed: int) -> dict[str, Eigenpairs]:
    """Converged ends with how far an eigenvalue may lie beyond them, and the better outermost value, from a new start.

    Where eigenvectors were asked for, the values stay as they are.
    """
    space = _roomy(product, seed)
    space.extend()
    _settle(space, _ENDS["both"], tol, product.count + _SETTLED)
    values, vectors = space.ritz()
    found = {}
    for which, pair in pairs.items():
        (end,) = _ENDS[which]
        best = int(np.argmax(end(values)))
        outer = float(end(values[best]))
        limit = outer + space.reach(end, outer)
        residual = math.hypot(float(space.residuals(vectors[:, [best]])[0]), space.noise)
        if pair.vectors is None and outer > float(end(pair.values.numpy())[0]) and residual <= tol * space.norm:
            pair.values[0], pair.residuals[0] = float(values[best]), residual
        found[which] = replace(pair, reach=max(0.0, limit - float(end(pair.values.numpy())[0])))
    return found


@_in_full_precision
def spectral_norm(op: Any, *, tol: float = 1e-4, max_matvecs: int | None = None, seed: int = 0) -> Estimate:
    """The spectral norm ‖H‖₂ = max|λ|, by `eigenvalues(op, 1, which="magnitude")`.

    Known to ± `tolerance`, about tol · ‖H‖₂, beyond which a larger one is excluded but for a chance of 0.001; in
    practice to far less. No random error, so `stderr` is 0; if the iteration did not converge, `status` says so and
    `reason` why. Usually 10 to 30 products. Reference: see `eigenvalues`.

    >>> print(spectral_norm(torch.diag(torch.tensor([1.0, -3.0, 2.0]))))
    3
    """
    found = outermost(op, "magnitude", tol=tol, max_matvecs=max_matvecs, seed=seed)
    return replace(found, value=abs(found.value))


@_in_full_precision
def operator_trace(
    op: Any, *, probes: int = 64, rel_err: float | None = None, method: str = "hutchinson", seed: int = 0
) -> Estimate:
    """The trace Tr H, unbiased, with its standard error.

    "hutchinson": the mean of vᵀHv over sign vectors v, variance 2(‖H‖_F² − Σ Hᵢᵢ²) a probe. "hutch++": a third of the
    products sketch the range of H with an orthonormal Q, a third give Tr QᵀHQ exactly, and the rest estimate the trace
    of (I − QQᵀ)H(I − QQᵀ), whose spread is the standard error; far better where few eigenvalues dominate.

    Cost: `probes` products in all. With `rel_err` instead, 16 pilot probes decide how many more are needed for
    stderr ≤ rel_err · |Tr H| (from the upper 90 % bound of their variance), at most 4096. Exact, from the unit
    vectors, where that takes no more products.

    References: Hutchinson, Commun. Stat. Simul. Comput. 18 (1989), doi:10.1080/03610918908812806; Meyer, Musco, Musco
    & Woodruff, SOSA 2021, arXiv:2010.09649.

    >>> matrix = torch.ones(100, 100, dtype=torch.float64) + torch.diag(torch.arange(100.0, dtype=torch.float64))
    >>> estimate = operator_trace(matrix, probes=50)
    >>> abs(estimate.value - 5050) < 4 * estimate.stderr
    True
    >>> operator_trace(matrix, probes=100).value
    5050.0
    """
    product = _Product(op)
    if method not in ("hutchinson", "hutch++"):
        raise unknown_name("trace method", method, ("hutchinson", "hutch++"))
    _check_probes("operator_trace", probes, rel_err, seed, least=2 if method == "hutchinson" else 4)
    if method == "hutchinson" or product.size <= (probes if rel_err is None else _PILOT):
        return _expected_form(product, product, _dots, probes, rel_err, seed)
    rank = probes // 3 if rel_err is None else _PILOT
    sketch = torch.cat([product(v) for v in _sign_blocks(product, range(rank), seed, _SKETCH)], dim=1)
    q = torch.linalg.qr(sketch).Q
    captured = sum(float(_dots(v, product(v)).sum()) for v in q.split(_columns(product.size), dim=1))

    def multiply_rest(v: Tensor) -> Tensor:
        v = v - q @ (q.T @ v)
        hv = product(v)
        return hv - q @ (q.T @ hv)

    return _expected_form(product, multiply_rest, _dots, probes - 2 * rank, rel_err, seed, captured)


@_in_full_precision
def frobenius_norm(op: Any, *, probes: int = 64, rel_err: float | None = None, seed: int = 0) -> Estimate:
    """The Frobenius norm ‖H‖_F = √(Tr H²) from ‖Hv‖² over sign vectors v.

    The mean square is unbiased for Tr H²; the root and its error follow by the delta method, stderr(√x) =
    stderr(x)/(2√x). Cost: `probes` products; `rel_err` as in `operator_trace`. Exact where that is no dearer.
    Reference: Hutchinson, doi:10.1080/03610918908812806, applied to H².

    >>> print(frobenius_norm(torch.diag(torch.tensor([3.0, 4.0]))))
    5
    """
    product = _Product(op)
    _check_probes("frobenius_norm", probes, rel_err, seed)
    square_err = None if rel_err is None else 2 * rel_err
    return _root(_expected_form(product, product, _squares, probes, square_err, seed))


@_in_full_precision
def diagonal(op: Any, *, probes: int = 64, seed: int = 0) -> DiagonalEstimate:
    """The diagonal of H: the mean of v ∘ Hv over sign vectors v, unbiased, with a standard error an entry.

    The variance of entry i is Σ_{j≠i} Hᵢⱼ² a probe. Cost: `probes` products and two vectors of memory; exact, from the
    unit vectors, if `probes` ≥ size. Reference: Bekas, Kokiopoulou & Saad, Appl. Numer. Math. 57 (2007),
    doi:10.1016/j.apnum.2007.01.003.

    >>> diagonal(torch.tensor([[2.0, 1.0], [1.0, 3.0]])).values
    tensor([2., 3.], dtype=torch.float64)
    """
    product = _Product(op)
    _check_probes("diagonal", probes, None, seed)
    size = product.size
    if size <= probes:
        entries = [(block * product(block)).sum(1) for block in _identity_blocks(size, product.dtype, product.device)]
        values = torch.stack(entries).sum(0).double().cpu()
        return DiagonalEstimate(values, torch.zeros_like(values), matvecs=product.count, seed=seed)
    mean = torch.zeros(size, dtype=torch.float64, device=product.device)
    scatter = torch.zeros_like(mean)  # Σ (draw − mean)², updated draw by draw (Welford)
    count = 0
    for v in _sign_blocks(product, range(probes), seed):
        for draw in (v * product(v)).T:
            count += 1
            step = draw - mean
            mean += step / count
            scatter += step * (draw - mean)
    stderr = (scatter / (count - 1) / count).sqrt()
    return DiagonalEstimate(mean.cpu(), stderr.cpu(), float(count - 1), product.count, seed)


@_in_full_precision
def spectral_density(op: Any, *, probes: int = 8, steps: int = 80, seed: int = 0) -> Spectrum:
    """The distribution of all eigenvalues, by stochastic Lanczos quadrature.

    From each of `probes` sign vectors, `steps` Lanczos steps give a tridiagonal T (float64); the eigenvalues of T are
    the nodes and the squared first components of its eigenvectors the weights, a Gauss quadrature that reproduces
    vᵀHᵏv/P for k = 0 … 2·steps − 1. A run that exhausts its Krylov space ends early, exact, and is filled up with
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
    product = _Product(op)
    _check_density("spectral_density", probes, steps, seed)
    steps = min(steps, product.size)
    if product.size <= min(probes * steps, _DENSE_LATER):
        return _dense_spectrum(_dense(product), product, seed)

    def run(index: int) -> tuple[Array, Array]:
        return _quadrature(_lanczos(_Krylov(product, steps, seed, _signs(product, seed, index)), steps), steps)

    return _quadrature_spectrum([run(index) for index in range(probes)], product, seed)


@_in_full_precision
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
    with errors from the spread over the probes. The first run goes on until the `k` values at both ends have
    converged as in `eigenvalues`, within `max_matvecs` further products (500 + 100k unless given), and up to 128 more
    from a random start tell how far beyond them another eigenvalue may lie (`Eigenpairs.reach`).

    Cost: probes · steps products and the few that the ends still need. Sizes up to min(probes · steps, 2048) go dense
    and are exact. References: see `eigenvalues` and `spectral_density`.

    >>> values = torch.linspace(-1, 3, 50, dtype=torch.float64)
    >>> print(spectrum(torch.diag(values)))
    spectrum of size 50: from -1 to 3, trace 50, Frobenius norm 10.9265, 50 products
    """
    product = _Product(op)
    _check_density("spectrum", probes, steps, seed)
    _check_end(product, k, "largest", tol, seed)
    named = op if isinstance(op, Operator) and op.names else None
    steps = min(steps, product.size)
    if product.size <= min(probes * steps, _DENSE_LATER):
        return _dense_summary(product, named, k, tol, vectors, seed)
    layers: dict[str, list[float]] = {name: [] for name in named.names} if named else {}

    def run(index: int, capacity: int) -> _Krylov:
        space = _Krylov(product, capacity, seed, _signs(product, seed, index))
        first_product = space.extend()
        if named:
            for name, part in named.split(space.basis[0] * first_product).items():
                layers[name].append(product.size * float(part.sum(dtype=torch.float64)))
        return _lanczos(space, steps)

    space = run(0, max(steps, _capacity(product.size, 2 * k, None)))
    rows = [_quadrature(space, steps)]
    limit = product.count + (500 + 100 * k if max_matvecs is None else max_matvecs)
    coordinates, reason = _converge(space, _ENDS["both"], k, tol, limit)
    largest = _eigenpairs(space, coordinates[:, :k], reason, "largest", tol, vectors)
    smallest = _eigenpairs(space, coordinates[:, k:], reason, "smallest", tol, vectors)
    del space  # its basis, before the next one is allocated
    if not reason:
        ends = _with_reach({"largest": largest, "smallest": smallest}, product, tol, seed)
        largest, smallest = ends["largest"], ends["smallest"]
    rows += [_quadrature(run(index, steps), steps) for index in range(1, probes)]

    density = _quadrature_spectrum(rows, product, seed)
    trace = _scaled(density.moment(1), product.size, probes)
    mean_square = _scaled(density.moment(2), 1.0, probes)
    return SpectrumSummary(
        largest=largest,
        smallest=smallest,
        trace=trace,
        frobenius_norm=_root(_scaled(mean_square, product.size, probes)),
        mean_square=mean_square,
        density=density,
        layers={
            name: Estimate.from_draws(torch.tensor(draws, dtype=torch.float64), seed=seed)
            for name, draws in layers.items()
        },
        size=product.size,
        matvecs=product.count,
        seed=seed,
    )


# --- products and probes ----------------------------------------------------------------------------------------------


def _checked(product: Tensor, v: Tensor) -> Tensor:
    if product.shape != v.shape:
        raise InputError(
            f"a product with the operator must keep the shape of the vectors, {tuple(v.shape)}, "
            f"got {tuple(product.shape)}."
        )
    if not math.isfinite(torch.linalg.vector_norm(product, ord=math.inf)):  # the quickest look at every number
        raise InputError(
            "a product with the operator holds NaN or infinity; check the model's outputs and loss, or use float64."
        )
    return product


class _Product:
    """Anything with `shape` and `@` as checked and counted products with (P,) or (P, k) tensors."""

    def __init__(self, op: Any) -> None:
        shape = getattr(op, "shape", None)
        if shape is None or not hasattr(op, "__matmul__"):
            raise InputError(f"estimators need an operator with `shape` and `@`, got {type(op).__name__}.")
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
            raise InputError(f"estimators need a square operator, got shape {tuple(shape)}.")
        given = getattr(op, "dtype", None)
        self._speaks_torch = isinstance(given, torch.dtype)
        known = {"float32": torch.float32, "float64": torch.float64, "None": torch.float64}
        dtype = known.get(str(given).removeprefix("torch."))
        if dtype is None:
            raise InputError(f"estimators need a float32 or float64 operator, got {given}; convert it first.")
        self.op = op
        self.size = int(shape[0])
        self.dtype = dtype
        self.device = torch.device(op.device) if self._speaks_torch else torch.device("cpu")
        self.count = 0
        if isinstance(op, np.ndarray) or (isinstance(op, Tensor) and op.layout == torch.strided):
            entries: Any = op.detach() if isinstance(op, Tensor) else op
            difference, largest = float(abs(entries - entries.T).max()), float(abs(entries).max())
            if difference > 1e-4 * largest:
                raise InputError(
                    f"estimators need a symmetric matrix, got one with entries that differ by {difference:.2g} from "
                    f"their mirror images; use (A + A.T)/2 if that is what you mean."
                )

    def __call__(self, v: Tensor) -> Tensor:
        first = not self.count
        self.count += v[0].numel()
        if isinstance(self.op, Operator):
            product = self.op @ v  # has checked it
        elif self._speaks_torch:
            product = _checked((self.op @ v).detach(), v)
        else:
            product = _checked(torch.tensor(np.asarray(self.op @ v.numpy()), dtype=self.dtype), v)
        if first:
            size = float(torch.linalg.vector_norm(product, ord=math.inf))
            if size and not 1e-140 < size < 1e140:
                raise InputError(
                    f"the products with this operator are of size {size:.1g}, beyond what can be squared in float64; "
                    "multiply the loss by a constant and divide the results by it."
                )
        return product


def _columns(size: int) -> int:
    """How many vectors to multiply at once: up to 16, and fewer where they would fill more than 2²⁵ numbers."""
    return max(1, min(16, 2**25 // size))


def _identity_blocks(size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    width = _columns(size)
    for first in range(0, size, width):
        block = torch.zeros(size, min(width, size - first), dtype=dtype, device=device)
        block[first : first + width].fill_diagonal_(1.0)
        yield block


_SIGNS, _SKETCH, _STARTS = range(3)  # independent streams of random numbers


def _signs(product: _Product, seed: int, index: int, stream: int = _SIGNS) -> Tensor:
    """Sign vector number `index`, the same whatever else is drawn."""
    bits = np.random.default_rng((seed, stream, index)).integers(0, 2, product.size, dtype=np.int8)
    return torch.from_numpy(2 * bits - 1).to(product.device, product.dtype)


def _sign_blocks(product: _Product, indices: range, seed: int, stream: int = _SIGNS) -> Iterator[Tensor]:
    width = _columns(product.size)
    for first in range(0, len(indices), width):
        yield torch.stack([_signs(product, seed, index, stream) for index in indices[first : first + width]]).T


def _dots(v: Tensor, hv: Tensor) -> Tensor:
    """vᵀHv of every column."""
    return (v * hv).sum(0, dtype=torch.float64)


def _squares(v: Tensor, hv: Tensor) -> Tensor:
    """‖Hv‖² of every column."""
    return torch.linalg.vector_norm(hv, dim=0, dtype=torch.float64).square()  # float32 squares end at 1e-45 and 3e38


def _expected_form(
    product: _Product,
    multiply: Callable[[Tensor], Tensor],
    form: Callable[[Tensor, Tensor], Tensor],
    probes: int,
    rel_err: float | None,
    seed: int,
    offset: float = 0.0,
) -> Estimate:
    """`offset` + Tr M for a quadratic `form` vᵀMv of v and its product: its mean over signs, or its sum over eᵢ."""

    def draw(indices: range) -> Tensor:
        return torch.cat([form(v, multiply(v)).cpu() for v in _sign_blocks(product, indices, seed)])

    def exact() -> Estimate:
        blocks = _identity_blocks(product.size, product.dtype, product.device)
        total = sum(float(form(v, multiply(v)).sum()) for v in blocks)
        return Estimate(offset + total, matvecs=product.count, seed=seed)

    if product.size <= (probes if rel_err is None else _PILOT):
        return exact()
    reason = ""
    if rel_err is None:
        draws = draw(range(probes))
    else:
        draws = draw(range(_PILOT))
        error = rel_err * abs(offset + float(draws.mean()))
        variance = float(draws.var()) * (_PILOT - 1) / float(chi2.ppf(0.1, _PILOT - 1))
        needed = variance / error**2 if error > 0 else (math.inf if variance > 0 else 0.0)
        if needed - _PILOT >= product.size and product.size <= _MOST_PROBES:
            return exact()
        if needed > _MOST_PROBES:
            reason = f"rel_err={rel_err:g} would take about {needed:.2g} probes, stopped at {_MOST_PROBES}"
        total = math.ceil(min(max(needed, _PILOT), _MOST_PROBES))
        draws = torch.cat([draws, draw(range(_PILOT, total))]) if total > _PILOT else draws
    mean = Estimate.from_draws(draws, matvecs=product.count, seed=seed)
    return replace(mean, value=offset + mean.value, reason=reason)


def _scaled(estimate: Estimate, factor: float, matvecs: int) -> Estimate:
    return replace(estimate.scaled(factor), matvecs=matvecs)


def _root(square: Estimate) -> Estimate:
    """√x with its error by the delta method; its limits are the roots of those of x."""
    value = math.sqrt(max(square.value, 0.0))
    return replace(square, value=value, stderr=square.stderr / (2 * value) if value else 0.0, power=2.0)


# --- Krylov spaces ----------------------------------------------------------------------------------------------------


@dataclass
class _Edge:
    """A unit vector outside of a Krylov space, with its shares in H times the basis vectors (see `_Krylov`)."""

    vector: Tensor
    shares: Array
    shadows: Array


class _Krylov:
    """An orthonormal basis q₀, q₁, … (rows of `basis`), extended by one product with H at a time.

    With w = `width`, A = `projected` (float64) and up to rounding, for every i < w

        H qᵢ = Σ_{j<w} A[j, i] q_j + Σ_r c_r[i] u_r,      u_r orthogonal to the basis.

    The u_r and c_r are the vectors and shares of the `edges`. A fresh space has one, the next vector of its Lanczos
    recursion, and A is tridiagonal; every `begin` adds one, a random vector, as the edge number `rounds`.

    `begin(points)` also follows what an eigenvector z that is orthogonal to everything so far would look like, for
    each eigenvalue μ in `points`: as μ zᵀq = zᵀHq, its components along all later vectors are fixed multiples, the
    `shadows`, of zᵀq for the random q. They cannot exceed ‖z‖ = 1 together, so |zᵀq| ≤ 1/‖shadows‖; and for q uniform
    on the sphere P(|zᵀq| ≤ t) ≤ t √(2P/π). So a point is dropped, ruled out but for the chance _MISS, once its
    shadows are long enough. The chances of rounds for the same points multiply, since their q are independent.

    `uniform` tells that the direction of `first` is uniform on the sphere.
    """

    def __init__(self, product: _Product, capacity: int, seed: int, first: Tensor, uniform: bool = False) -> None:
        self.product = product
        self.capacity = capacity
        self.seed = seed
        self.basis = torch.empty(capacity, product.size, dtype=product.dtype, device=product.device)
        self.width = 0
        self.projected: Array = np.zeros((capacity, capacity))
        first = first / torch.linalg.vector_norm(first)
        self.edges: dict[int, _Edge] = {0: _Edge(first, np.zeros(capacity), np.zeros(0))}
        self.rounds = 0
        self.points: Array = np.zeros(0)
        self.chances: Array = np.zeros(0)  # that the earlier rounds for these points have missed them
        self.missed: Array = np.zeros(0)  # that these and the present round have
        self.knows_first = uniform  # the basis still is that of a first vector which was uniform on the sphere
        self.shadows: Array = np.zeros((0, capacity))
        self.norm = 0.0  # largest |Ritz value| seen
        self.noise = 0.0  # largest ‖qᵢᵀHq − qᵀHqᵢ‖ seen: rounding, or products that change from call to call
        self._scale = 0.0
        self._eps = torch.finfo(product.dtype).eps

    def _outside(self, v: Tensor) -> tuple[Tensor, Array]:
        """`v` less its part in the span of the basis, and its coefficients there. Twice is enough."""
        basis = self.basis[: self.width]
        first = basis @ v
        v = torch.addmv(v, basis.T, first, alpha=-1)
        second = basis @ v
        v.addmv_(basis.T, second, alpha=-1)
        return v, (first.double() + second.double()).cpu().numpy()

    def extend(self, number: int = 0) -> Tensor:
        """Take an edge into the basis; what its product leaves outside becomes the edge. Returns the product."""
        j = self.width
        edge = self.edges.pop(number)
        q = self.basis[j] = edge.vector
        self.shadows[:, j] = edge.shadows
        self.width = j + 1
        expected = edge.shares[:j]  # what the earlier products say about qᵢᵀHq
        for other in list(self.edges):
            expected = expected + self._clear_edge(other, q, edge.shadows)[:j]

        product = self.product(q)
        remainder, h = self._outside(product)
        beta = float(torch.linalg.vector_norm(remainder, dtype=torch.float64))  # below 1e-23 float32 would give 0
        self._scale = max(self._scale, beta, float(np.linalg.norm(h)))
        self.noise = max(self.noise, float(np.linalg.norm(h[:j] - expected)))
        self.projected[: j + 1, j] = self.projected[j, : j + 1] = h
        floor = max(self._eps * self._scale, 1e-300)
        following = (self.points * edge.shadows - self.shadows[:, : j + 1] @ h) / max(beta, floor)
        if beta > 10 * floor and self.width < self.product.size:
            shares = np.zeros(self.capacity)
            shares[j] = beta
            self.edges[number] = _Edge(remainder / beta, shares, following)
        else:  # H maps the space of this edge into the basis
            self.noise = max(self.noise, beta)
        self._rule_out(np.square(self.shadows[:, : j + 1]).sum(1) + np.square(following))
        return product

    def _clear_edge(self, number: int, q: Tensor, shadows: Array) -> Array:
        """Make an edge orthogonal to the new basis vector q. Returns its share in H qᵢ along q."""
        edge = self.edges[number]
        overlap = float(edge.vector @ q)
        given = overlap * edge.shares
        vector = edge.vector - overlap * q
        length = float(torch.linalg.vector_norm(vector))
        if length < 0.5:
            vector, _ = self._outside(vector)
            length = float(torch.linalg.vector_norm(vector))
        if length > 10 * self._eps:
            self.edges[number] = _Edge(
                vector / length, length * edge.shares, (edge.shadows - overlap * shadows) / length
            )
        else:
            del self.edges[number]
        return given

    def _rule_out(self, lengths: Array) -> None:
        """Drop the points whose shadows have grown so long, and remember the chance of the others."""
        self.missed = self.chances * np.minimum(1.0, math.sqrt(2 * self.product.size / math.pi) / np.sqrt(lengths))
        hidden = self.missed > _MISS
        self.points, self.chances, self.missed = self.points[hidden], self.chances[hidden], self.missed[hidden]
        self.shadows = self.shadows[hidden]
        for edge in self.edges.values():
            edge.shadows = edge.shadows[hidden]

    def overlooks(self, point: float) -> bool:
        """Whether the first vector may have hidden an eigenvector z of this eigenvalue, with a chance above _MISS.

        For z with components c in the basis and e along the edge u, (μ − A) c = e · shares and ‖c‖² + e² ≤ 1: that
        bounds the component c₀ along the first vector.
        """
        if not self.knows_first:
            return True
        w = self.width
        shares = np.zeros(w)
        shares[-1] = self.noise
        if 0 in self.edges:
            shares = self.edges[0].shares[:w]
        c = np.linalg.solve(point * np.eye(w) - self.projected[:w, :w], shares)
        most = abs(float(c[0])) / math.hypot(1.0, float(np.linalg.norm(c)))
        return most * math.sqrt(2 * self.product.size / math.pi) > _MISS

    def reach(self, end: Callable[[Array], Array], size: float) -> float:
        """How far beyond `size` an eigenvalue may lie, measured by `end`, with a chance above _MISS; at most the norm.

        Products with H are known up to `noise`, which moves eigenvalues by as much.
        """

        def open_at(margin: float) -> bool:
            points = np.array([size + margin, -(size + margin)])
            return any(self.overlooks(point) for point in points[end(points) >= size + margin])

        low, high = 0.0, self.norm
        if not high or open_at(high):
            return math.inf if high else self.noise
        while high - low > max(0.01 * high, 1e-14 * self.norm):
            middle = (low + high) / 2
            low, high = (middle, high) if open_at(middle) else (low, middle)
        return high + self.noise

    def begin(self, points: Array) -> bool:
        """Add a random edge, orthogonal to the basis, and look for more eigenvectors with eigenvalues `points`.

        Returns whether that can help: not if the last round for the same points has told next to nothing about one
        of them, because what it leaves of the edge cannot be told from rounding.
        """
        again = points is self.points
        if again and points.size and self.missed.max() > 0.5 * self.chances.max():
            return False
        self.chances = self.missed if again else np.ones(points.size)
        self.missed = self.chances
        self.knows_first = False
        self.rounds += 1
        self.points = points
        self.shadows = np.zeros((points.size, self.capacity))
        for edge in self.edges.values():
            edge.shadows = np.zeros(points.size)
        v, _ = self._outside(_gaussian(self.product, self.seed, self.rounds))
        v /= torch.linalg.vector_norm(v)
        self.edges[self.rounds] = _Edge(v, np.zeros(self.capacity), np.ones(points.size))
        return True

    def ritz(self) -> tuple[Array, Array]:
        """The Ritz values, ascending, and their coordinates in the basis, as columns."""
        values, coordinates = eigh(self.projected[: self.width, : self.width])
        self.norm = max(self.norm, -float(values[0]), float(values[-1]))
        return values, coordinates

    def leaks(self, coordinates: Array) -> dict[int, Array]:
        """How far H carries each of these vectors along every edge: parts of the residuals of Ritz vectors."""
        return {number: np.abs(edge.shares[: self.width] @ coordinates) for number, edge in self.edges.items()}

    def vectors(self, coordinates: Array) -> Tensor:
        """Combinations of the basis vectors, as rows."""
        return torch.from_numpy(coordinates.T.copy()).to(self.basis) @ self.basis[: self.width]

    def residuals(self, coordinates: Array) -> Array:
        """‖Hy − θy‖ of Ritz vectors y, from the products already made, without their asymmetry (`noise`)."""
        vectors = [edge.vector for edge in self.edges.values()]
        shares = np.array([edge.shares[: self.width] @ coordinates for edge in self.edges.values()])
        if not vectors:
            return np.zeros(coordinates.shape[1])
        overlaps = np.eye(len(vectors))  # edges are unit vectors, but not orthogonal to each other
        for i, j in itertools.combinations(range(len(vectors)), 2):
            overlaps[i, j] = overlaps[j, i] = float(vectors[i] @ vectors[j])
        return np.sqrt(np.maximum(np.einsum("ik,ij,jk->k", shares, overlaps, shares), 0.0))

    def restart(self, values: Array, coordinates: Array) -> None:
        """Keep these Ritz vectors and all edges, forget the rest (thick restart)."""
        self.knows_first = False
        w, keep = coordinates.shape
        rotation = torch.from_numpy(coordinates.T.copy()).to(self.basis)
        for columns in self.basis.split(2**16, dim=1):
            columns[:keep] = rotation @ columns[:w]
        self.projected[:] = 0.0
        self.projected[range(keep), range(keep)] = values
        self.shadows[:, :keep] = self.shadows[:, :w] @ coordinates
        for edge in self.edges.values():
            edge.shares[:keep], edge.shares[keep:] = edge.shares[:w] @ coordinates, 0.0
        self.width = keep


def _gaussian(product: _Product, seed: int, index: int) -> Tensor:
    kind = np.float64 if product.dtype == torch.float64 else np.float32
    draws = np.random.default_rng((seed, _STARTS, index)).standard_normal(product.size, dtype=kind)
    return torch.from_numpy(draws).to(product.device)


def _given(product: _Product, k: int, start: Tensor) -> Tensor:
    start = torch.as_tensor(start).detach().reshape(-1).to(product.device, product.dtype)
    length = float(torch.linalg.vector_norm(start))
    if start.numel() != product.size or not 0 < length < math.inf:
        raise InputError(
            f"eigenvalues needs a start of {product.size} finite numbers, not all of them 0, got {start.numel()} of "
            f"length {length:.3g}."
        )
    if k > 1:
        raise InputError(f"eigenvalues takes a start for one eigenvalue, got k={k}; leave start= out.")
    return start


def _capacity(size: int, k: int, basis: int | None) -> int:
    return min(size, max(2 * k + 20, k + 40) if basis is None else basis)


_ENDS: dict[str, tuple[Callable[[Array], Array], ...]] = {  # what is large at each wanted end
    "largest": (np.positive,),
    "smallest": (np.negative,),
    "magnitude": (np.abs,),
    "both": (np.positive, np.negative),
}


def _converge(
    space: _Krylov, ends: tuple[Callable[[Array], Array], ...], k: int, tol: float, limit: int, exclude: bool = True
) -> tuple[Array, str]:
    """Extend `space` until the k Ritz pairs at each end have converged and none is missing (see `eigenvalues`).

    Unless `exclude`, whether one is missing is left open. Returns the coordinates of the pairs, end by end, and an
    empty string or why it stopped early.
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
                hidden = [point for point in np.concatenate([*beyond, []]) if space.overlooks(point)]
                points = np.concatenate([*repeats, hidden])
                begin = settled is None or bool(np.abs(found - settled).sum() > distance)
                if not (points.size if begin else space.points.size):
                    return coordinates[:, wanted], ""
                if len(hidden) == points.size and space.knows_first and 0 in space.edges:
                    begin = False  # the first round goes on until it excludes them
            if exhausted:
                what = "eigenvalues that are repeated or lie further out were not ruled out"
                if not converged:
                    what = f"residual {residual:.2g} > tol · max|Ritz value| = {distance:.2g}"
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
                    f"repetitions of an eigenvalue as small as {least:.2g} cannot be told from rounding in "
                    f"{product.dtype}; use float64"
                )
            number = space.rounds
        space.extend(number)


def _beyond(end: Callable[[Array], Array], values: Array, margin: float) -> Array:
    """The nearest places of an eigenvalue that lies further out than all `values` by `margin`."""
    edge = float(end(values).max()) + margin
    points = np.array([edge, -edge])
    return points[end(points) >= edge]


def _repeatable(end: Callable[[Array], Array], values: Array, distance: float) -> Array:
    """The values that a repetition of themselves would push inwards: all that differ from the last one."""
    return values[end(values) > end(values).min() + distance]


def _eigenpairs(space: _Krylov, coordinates: Array, reason: str, which: str, tol: float, vectors: bool) -> Eigenpairs:
    projected = space.projected[: space.width, : space.width]
    values = np.einsum("ij,ik,kj->j", coordinates, projected, coordinates)
    columns = space.vectors(coordinates).T
    if not reason and tol < 100 * torch.finfo(space.product.dtype).eps:
        residuals = _measured_residuals(space.product, columns, values)
    else:
        residuals = np.hypot(space.residuals(coordinates), space.noise)
    bound, reach = tol * space.norm, None
    if not reason and space.knows_first:
        (end,) = _ENDS[which]
        reach = space.reach(end, float(end(values[0])))
    elif not reason:
        reach = min(50 * tol, 0.05) * space.norm
    if not reason and residuals.max() > bound:
        reason = (
            f"residual {residuals.max():.2g} > tol · max|Ritz value| = {bound:.2g}, and the products are asymmetric by "
            f"{space.noise:.2g}: they change from call to call, or {space.product.dtype} allows no better"
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


def _measured_residuals(product: _Product, columns: Tensor, values: Array) -> Array:
    rests = [product(v).double() - value * v.double() for v, value in zip(columns.T, values, strict=True)]
    return np.array([float(torch.linalg.vector_norm(rest)) for rest in rests])


def _lanczos(space: _Krylov, steps: int) -> _Krylov:
    while space.width < steps and space.edges:
        space.extend()
    return space


def _quadrature(space: _Krylov, steps: int) -> tuple[Array, Array]:
    """Gauss nodes and weights of a fresh Krylov space, filled up to `steps` with nodes of weight 0."""
    w = space.width
    nodes, vectors = eigh_tridiagonal(space.projected.diagonal()[:w], space.projected.diagonal(1)[: w - 1])
    return np.pad(nodes, (0, steps - w), mode="edge"), np.pad(vectors[0] ** 2, (0, steps - w))


def _quadrature_spectrum(rows: list[tuple[Array, Array]], product: _Product, seed: int) -> Spectrum:
    nodes = torch.from_numpy(np.stack([nodes for nodes, _ in rows]))
    weights = torch.from_numpy(np.stack([weights for _, weights in rows])) / len(rows)
    return Spectrum(nodes, weights, product.size, matvecs=product.count, seed=seed)


# --- small operators --------------------------------------------------------------------------------------------------


def _dense(product: _Product) -> Array:
    """The matrix in float64, by `size` products."""
    blocks = [product(block).double().cpu() for block in _identity_blocks(product.size, product.dtype, product.device)]
    return torch.cat(blocks, dim=1).numpy()


def _symmetric(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2


def _dense_eigenpairs(
    product: _Product, matrix: Array, k: int, which: str, tol: float, vectors: bool, seed: int
) -> Eigenpairs:
    values, columns = eigh(_symmetric(matrix))
    (end,) = _ENDS[which]
    wanted = np.argsort(-end(values), kind="stable")[:k]
    bound = tol * float(np.abs(values).max())
    values, columns = values[wanted], columns[:, wanted]
    residuals = np.linalg.norm(matrix @ columns - columns * values, axis=0)
    reason = ""
    if residuals.max() > bound:
        asymmetry = float(np.abs(matrix - matrix.T).max())
        reason = (
            f"residual {residuals.max():.2g} > tol · max|λ| = {bound:.2g}, and the products are asymmetric by "
            f"{asymmetry:.2g}: they change from call to call, or {product.dtype} allows no better"
        )
    return Eigenpairs(
        values=torch.from_numpy(values),
        vectors=torch.from_numpy(columns).to(product.device, product.dtype) if vectors else None,
        residuals=torch.from_numpy(residuals),
        converged=not reason,
        matvecs=product.count,
        which=which,
        tol=tol,
        seed=seed,
        reason=reason,
        reach=0.0,
    )


def _dense_spectrum(matrix: Array, product: _Product, seed: int) -> Spectrum:
    nodes = torch.from_numpy(eigvalsh(_symmetric(matrix)))[None]
    weights = torch.full_like(nodes, 1 / product.size)
    return Spectrum(nodes, weights, product.size, exact=True, matvecs=product.count, seed=seed)


def _dense_summary(
    product: _Product, named: Operator | None, k: int, tol: float, vectors: bool, seed: int
) -> SpectrumSummary:
    matrix = _dense(product)
    largest = _dense_eigenpairs(product, matrix, k, "largest", tol, vectors, seed)
    smallest = _dense_eigenpairs(product, matrix, k, "smallest", tol, vectors, seed)
    cost = product.count

    def known(value: float) -> Estimate:
        return Estimate(value, matvecs=cost, seed=seed)

    square = float(np.square(matrix).sum())
    layers = named.split(torch.from_numpy(matrix.diagonal().copy())) if named else {}
    return SpectrumSummary(
        largest=largest,
        smallest=smallest,
        trace=known(float(matrix.trace())),
        frobenius_norm=known(math.sqrt(square)),
        mean_square=known(square / product.size),
        density=_dense_spectrum(matrix, product, seed),
        layers={name: known(float(part.sum())) for name, part in layers.items()},
        size=product.size,
        matvecs=cost,
        seed=seed,
    )


# --- arguments --------------------------------------------------------------------------------------------------------


def _whole(who: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{who} needs a whole number for {name}, got {value!r}.") from None


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or _whole("an estimator", "its seed", seed) < 0:
        raise InputError(f"a seed must be a whole number >= 0, got {seed!r}.")


def _check_end(product: _Product, k: int, which: str, tol: float, seed: int) -> None:
    public = tuple(name for name in _ENDS if name != "both")
    if which not in public:
        raise unknown_name("end of the spectrum", which, public)
    if not 1 <= _whole("eigenvalues", "k", k) <= product.size:
        raise InputError(f"eigenvalues needs k between 1 and the operator's size {product.size}, got {k}.")
    if not tol > 0:
        raise InputError(f"eigenvalues needs a tolerance tol > 0, got {tol}.")
    _check_seed(seed)


def _check_probes(who: str, probes: int, rel_err: float | None, seed: int, least: int = 2) -> None:
    if _whole(who, "probes", probes) < least:
        raise InputError(f"{who} needs probes >= {least} to report a standard error, got {probes}.")
    if rel_err is not None and not rel_err > 0:
        raise InputError(f"{who} needs rel_err > 0, got {rel_err}.")
    _check_seed(seed)


def _check_density(who: str, probes: int, steps: int, seed: int) -> None:
    _check_probes(who, probes, None, seed)
    if _whole(who, "steps", steps) < 1:
        raise InputError(f"{who} needs steps >= 1, got {steps}.")
