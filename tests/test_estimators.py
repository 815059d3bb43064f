"""Estimators against matrices whose spectra are prescribed.

Matrices are rotated at random: on a diagonal one sign vectors give the trace exactly and a test would prove nothing.
"""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, aslinearoperator, eigsh
from threadpoolctl import threadpool_limits

from spiritlevel import estimators
from spiritlevel.errors import InputError
from spiritlevel.estimators import (
    Operator,
    diagonal,
    eigenpairs,
    eigenvalues,
    frobenius_norm,
    norm_around,
    operator,
    operator_trace,
    probes,
    spectral_density,
    spectral_norm,
    spectrum,
    trace,
)
from spiritlevel.estimators.density import _quadrature
from spiritlevel.estimators.entries import Entries
from spiritlevel.estimators.krylov import Krylov, lanczos
from spiritlevel.estimators.operator import Product
from spiritlevel.estimators.probes import gaussian, sign_blocks, signs
from spiritlevel.results import DiagonalEstimate, Eigenpairs, Result, SpectralDensity, SpectrumSummary

WHICH = ("largest", "smallest", "magnitude")


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices on a busy machine are many times faster without threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def rotated(values, seed=0):
    """A symmetric float64 matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    noise = torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = torch.linalg.qr(noise).Q
    matrix = q @ (values[:, None] * q.T)
    return (matrix + matrix.T) / 2


def bulk(size, low=-1.0, high=1.0):
    return torch.linspace(low, high, size, dtype=torch.float64)


def sorted_end(values, which):
    values = torch.as_tensor(values, dtype=torch.float64)
    if which == "smallest":
        return values.sort().values
    return values[(values.abs() if which == "magnitude" else values).argsort(descending=True)]


def true_residuals(matrix, pairs):
    return (matrix @ pairs.vectors - pairs.vectors * pairs.values).norm(dim=0)


def wrap(matrix, **shapes):
    return Operator(lambda block: matrix @ block, len(matrix), dtype=matrix.dtype, shapes=shapes or None)


SPECTRA = {
    "decaying": 1 / torch.arange(1.0, 301.0, dtype=torch.float64),
    "outliers": torch.cat([torch.tensor([9.0, 7.0, 4.0, -5.0, -3.0]), bulk(295)]),
    "threefold top": torch.cat([torch.tensor([2.0, 2.0, 2.0, -1.5, -1.5]), bulk(295, -0.95, 0.95)]),
    "fivefold": torch.cat([torch.tensor([2.0] * 5 + [-2.0] * 5), bulk(290)]),
    "cluster": torch.cat([torch.tensor([2.0, 2 - 1e-10, 2 - 1e-7, 2 - 1e-3, 1.5]).double(), bulk(295)]),
    "rank three": torch.cat([torch.tensor([3.0, 2.0, -1.0]), torch.zeros(297)]),
    "mostly zero": torch.cat([torch.tensor([1.0, 1.0]), torch.zeros(298)]),
    "zero": torch.zeros(300),
    "identity": torch.ones(300),
    "dense edge": bulk(300),
}


# --- eigenvalues ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("k", [1, 4])
def test_eigenvalues_and_residuals_are_those_of_the_dense_matrix(name, which, k):
    matrix = rotated(SPECTRA[name])
    pairs = eigenvalues(matrix, k, which=which, tol=1e-9)
    scale = float(SPECTRA[name].abs().max()) or 1.0
    expected = sorted_end(SPECTRA[name], which)[:k]
    got = pairs.values.abs() if which == "magnitude" else pairs.values  # ±λ may come in either order
    assert pairs.converged, pairs.reason
    torch.testing.assert_close(
        got, expected.abs() if which == "magnitude" else expected, rtol=0, atol=1e-8 * scale, check_dtype=False
    )
    residuals = true_residuals(matrix, pairs)
    torch.testing.assert_close(pairs.residuals, residuals, rtol=1e-3, atol=1e-13 * scale)
    assert residuals.max() <= 1e-9 * scale
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-12)


def test_lanczos_path_uses_far_fewer_products_than_the_size():
    matrix = rotated(SPECTRA["outliers"])
    assert eigenvalues(matrix, 1).matvecs <= 15
    assert eigenvalues(matrix, 3).matvecs <= 30


def test_every_copy_of_a_repeated_eigenvalue_is_found_whatever_the_seed():
    matrix = rotated(SPECTRA["threefold top"])
    for seed in range(30):
        values = eigenvalues(matrix, 3, seed=seed).values
        torch.testing.assert_close(values, torch.full_like(values, 2.0), rtol=0, atol=1e-6)


def test_no_ghost_copies_of_simple_eigenvalues_after_many_steps():
    values = torch.cat([torch.tensor([10.0, 5.0]).double(), bulk(298)])
    pairs = eigenvalues(rotated(values), 6, tol=1e-10, basis=120)
    torch.testing.assert_close(pairs.values, sorted_end(values, "largest")[:6], rtol=0, atol=1e-8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    outliers=st.lists(st.integers(-6, 6).map(float), min_size=0, max_size=12),
    size=st.integers(129, 170),
    k=st.integers(1, 6),
    which=st.sampled_from(WHICH),
    seed=st.integers(0, 10**6),
)
def test_eigenvalues_of_any_spectrum(outliers, size, k, which, seed):
    values = torch.cat([torch.tensor(outliers, dtype=torch.float64), bulk(size - len(outliers), -0.5, 0.5)])
    pairs = eigenvalues(rotated(values, seed), k, which=which, tol=1e-8, seed=seed)
    expected = sorted_end(values, which)[:k]
    if which == "magnitude":
        assert torch.allclose(pairs.values.abs(), expected.abs(), rtol=0, atol=1e-6)
    else:
        assert torch.allclose(pairs.values, expected, rtol=0, atol=1e-6)
    assert pairs.converged
    assert len(pairs) == k


def test_memory_stays_bounded_by_the_basis(monkeypatch):
    spaces = []

    class Spy(Krylov):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            spaces.append(self)

    monkeypatch.setattr(eigenpairs, "Krylov", Spy)
    values = bulk(400, 0, 1) ** 0.5
    pairs = eigenvalues(rotated(values), 3, basis=14, tol=1e-6, max_matvecs=2000)
    (space,) = spaces
    assert pairs.converged
    assert pairs.matvecs > 5 * 14  # it did restart
    assert space.basis.shape == (14, 400)
    assert len(space.edges) <= 1 + space.rounds <= 4
    torch.testing.assert_close(pairs.values, sorted_end(values, "largest")[:3], rtol=0, atol=1e-8)


@pytest.mark.parametrize(("size", "more"), [(10**6, 0.09), (10**4, 0.009)])
@pytest.mark.parametrize("k", [1, 2])
def test_a_small_residual_cannot_hide_a_larger_eigenvalue(size: int, more: float, k: int) -> None:
    """Of a random vector e₁ is so small a part that the vector looks like an eigenvector itself."""
    values = torch.ones(size, dtype=torch.float64)
    values[size // 3] += more
    op = Operator(lambda block: values[:, None] * block, size, dtype=torch.float64)
    for seed in range(3):
        found = eigenvalues(op, k, seed=seed, vectors=False)
        assert found.converged
        assert float(found.values[0]) == pytest.approx(1 + more, abs=1e-9)
        smallest = eigenvalues(
            Operator(lambda block: -values[:, None] * block, size, dtype=torch.float64),
            k,
            which="smallest",
            seed=seed,
            vectors=False,
        )
        assert float(smallest.values[0]) == pytest.approx(-1 - more, abs=1e-9)


def test_a_random_start_that_misses_the_largest_eigenvector_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the chance allows once in a thousand times, but for the second vector; the space has restarted by then."""
    size = 3000
    values = torch.cat([torch.tensor([1.2]), torch.linspace(0.0, 1.0, size - 1)]).double()

    def unlucky(product: object, seed: int, index: int) -> torch.Tensor:
        drawn = gaussian(product, seed, index)
        if index == 0:
            drawn[0] = 0.0
        return drawn

    monkeypatch.setattr(eigenpairs, "gaussian", unlucky)
    op = Operator(lambda block: values[:, None] * block, size, dtype=torch.float64)
    found = eigenvalues(op, basis=14, tol=1e-3)
    assert found.converged
    assert float(found.values[0]) == pytest.approx(1.2, abs=1e-5)


@pytest.mark.parametrize("values", [[1.0, 0.1, 0.01, 0.001], [1.0, 0.5, 0.3]])
def test_a_matrix_of_low_rank_takes_few_products_in_float32(values: list[float]) -> None:
    """What is left of a random vector is rounding: rounds that see nothing add up, they do not start again for ever."""
    diagonal = torch.zeros(3000)
    diagonal[: len(values)] = torch.tensor(values)
    op = Operator(lambda block: diagonal[:, None] * block, 3000)
    found = eigenvalues(op, len(values) + 1)
    assert found.converged
    assert found.matvecs < 20
    torch.testing.assert_close(found.values[:-1], torch.tensor(values).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", [18, 28, 29, 31])
def test_edges_that_are_not_orthogonal_add_up_rightly(seed: int) -> None:
    values = torch.zeros(2696, dtype=torch.float64)
    values[:8] = torch.tensor([1.0, 2, 3, 1, 2, 3, 2, 1]).double()
    op = Operator(lambda block: values[:, None] * block, 2696, dtype=torch.float64)
    assert eigenvalues(op, 6, which="smallest", tol=1e-2, seed=seed).converged


def test_small_operators_are_dense_and_exact():
    matrix = rotated(bulk(40))
    pairs = eigenvalues(matrix, 40)
    assert pairs.matvecs == 40
    torch.testing.assert_close(pairs.values, bulk(40).flip(0), rtol=0, atol=1e-13)
    assert eigenvalues(matrix, 1, max_matvecs=30).matvecs <= 30


@pytest.mark.parametrize("second", [2.9, 3.0, 3.0 - 1e-13], ids=["apart", "repeated", "all but repeated"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_vector_at_an_end_comes_alone(second, place):
    ends = torch.tensor([3.0, second, -3.0, -second])
    matrix = rotated(torch.cat([ends, bulk(200)])).numpy()
    one, every = Entries(matrix), Entries(matrix)
    every.decompose()
    vector = one.vectors(np.array([place % one.size]))[:, 0]
    assert "_pairs" not in vars(one)
    np.testing.assert_allclose(one.values, every.values, rtol=0, atol=1e-13)
    np.testing.assert_allclose(one.symmetric @ vector, one.values[place] * vector, rtol=0, atol=1e-13)
    if second == 2.9:
        other = every.vectors(np.array([place % one.size]))[:, 0]
        np.testing.assert_allclose(vector * np.sign(vector @ other), other, rtol=0, atol=1e-12)


def test_a_vector_inside_a_spectrum_comes_with_all_others():
    entries = Entries(rotated(bulk(200)).numpy())
    (vector,) = entries.vectors(np.array([100])).T
    np.testing.assert_allclose(entries.symmetric @ vector, entries.values[100] * vector, rtol=0, atol=1e-13)


def test_an_iteration_as_long_as_the_matrix_is_wide_ends_dense():
    matrix = rotated(SPECTRA["decaying"])
    pairs = eigenvalues(matrix, 4, which="smallest", tol=1e-12)
    assert pairs.matvecs == 600
    assert pairs.converged
    bounded = eigenvalues(matrix, 4, which="smallest", tol=1e-12, max_matvecs=500)
    assert bounded.matvecs == 500
    assert not bounded.converged


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["outliers", "dense edge"])
def test_no_product_is_made_beyond_the_tolerance(name: str, tol: float) -> None:
    matrix = rotated(SPECTRA[name])
    pairs = eigenvalues(matrix, tol=tol, which="magnitude")
    fewer = eigenvalues(matrix, tol=tol, which="magnitude", max_matvecs=pairs.matvecs - 1)
    assert pairs.converged
    assert float(pairs.residuals[0]) <= tol * abs(float(pairs.values[0]))
    assert not fewer.converged
    if pairs.matvecs < 20 and "ruled out" not in fewer.reason:  # beyond, it looks at every second product only
        assert float(fewer.residuals[0]) > tol * abs(float(fewer.values[0]))


def test_running_out_of_products_is_said():
    pairs = eigenvalues(rotated(SPECTRA["dense edge"]), 2, max_matvecs=10)
    assert pairs.matvecs == 10
    assert not pairs.converged
    assert "raise max_matvecs" in pairs.reason
    pairs = eigenvalues(rotated(SPECTRA["outliers"]), 2, max_matvecs=14)
    assert not pairs.converged
    assert "repeated or lie further out were not ruled out" in pairs.reason
    norm = spectral_norm(rotated(SPECTRA["dense edge"]), max_matvecs=5)
    assert (norm.status, norm.exact) == ("not converged", False)
    assert "raise max_matvecs" in norm.reason


@pytest.mark.parametrize("k", [1, 4])
def test_float32_reaches_what_float32_allows_and_says_when_more_is_asked(k):
    values = torch.cat([torch.tensor([5.0, 5.0, 3.0, 2.5]).double(), bulk(296)])
    matrix = rotated(values).float()
    pairs = eigenvalues(matrix, k)
    assert pairs.converged
    assert pairs.vectors.dtype == torch.float32
    torch.testing.assert_close(pairs.values, sorted_end(values, "largest")[:k], rtol=0, atol=3e-6)
    impossible = eigenvalues(matrix, k, tol=1e-9)
    assert not impossible.converged
    assert impossible.matvecs < 60
    assert "float32 allows no better" in impossible.reason
    assert 1e-9 * 5 < float(impossible.residuals.max()) < 1e-5


def test_products_that_change_from_call_to_call_never_converge():
    matrix, generator = rotated(SPECTRA["outliers"]), torch.Generator().manual_seed(0)

    def noisy(block):
        return matrix @ block + 0.01 * torch.randn(block.shape, generator=generator, dtype=torch.float64)

    pairs = eigenvalues(Operator(noisy, 300, dtype=torch.float64), 2)
    assert not pairs.converged
    assert "change from call to call" in pairs.reason
    assert pairs.matvecs < 100


def test_spectral_norm_is_the_largest_magnitude():
    values = torch.cat([torch.tensor([3.0, -4.0]).double(), bulk(298)])
    norm = spectral_norm(rotated(values), tol=1e-7)
    assert norm.value == pytest.approx(4.0, abs=1e-10)
    assert norm.stderr == 0
    assert norm.reason == ""


# --- the Krylov space -------------------------------------------------------------------------------------------------


def krylov(matrix, capacity, start, seed=0):
    return Krylov(Product(matrix), capacity, seed, start)


def identity_error(matrix, space):
    w = space.width
    q = space.basis[:w].T
    rest = matrix @ q - q @ torch.from_numpy(space.projected[:w, :w])
    for edge in space.edges.values():
        rest -= edge.vector[:, None] * torch.from_numpy(edge.shares[:w])
    return float(rest.abs().max()), float((q.T @ q - torch.eye(w, dtype=torch.float64)).abs().max())


def test_lanczos_identity_holds_through_rounds_and_restarts():
    matrix = rotated(SPECTRA["outliers"])
    space = krylov(matrix, 30, torch.ones(300, dtype=torch.float64))
    lanczos(space, 12)
    tridiagonal = np.triu(np.tril(space.projected, 1), -1)
    assert abs(space.projected - tridiagonal).max() < 1e-13
    assert max(identity_error(matrix, space)) < 1e-13
    space.begin(np.array([9.0]))
    for _ in range(6):
        space.extend(1)
    assert max(identity_error(matrix, space)) < 1e-12
    values, coordinates = space.ritz()
    space.restart(values[-10:], coordinates[:, -10:])
    assert max(identity_error(matrix, space)) < 1e-12
    for number in (1, 0, 1, 1, 0):
        space.extend(number)
    assert max(identity_error(matrix, space)) < 1e-12
    assert space.noise < 1e-13


def test_shadows_are_the_components_of_a_hidden_eigenvector():
    """With z repeated and unseen, zᵀu of every later vector u must be its shadow times zᵀq, restarts included."""
    matrix = torch.diag(torch.cat([torch.tensor([2.0, 2.0]).double(), bulk(198)]))
    start = torch.ones(200, dtype=torch.float64)
    start[1] = 0.0  # sees only one of the two eigenvectors with eigenvalue 2
    space = krylov(matrix, 30, start)
    lanczos(space, 10)
    first = space.width
    space.begin(np.array([2.0]))
    q = space.edges[1].vector.clone()
    for number in (1, 1, 0, 1, 1, 0):
        space.extend(number)
    values, coordinates = space.ritz()
    space.restart(values[-12:], coordinates[:, -12:])
    space.extend(1)
    assert space.points.size == 1  # the eigenvector exists, so nothing rules it out
    assert first == 10
    shadows = space.shadows[0, : space.width] * float(q[1])
    np.testing.assert_allclose(shadows, space.basis[: space.width, 1].numpy(), atol=1e-10)


def test_a_repetition_that_does_not_exist_is_ruled_out_soon():
    matrix = rotated(SPECTRA["outliers"])
    space = krylov(matrix, 60, torch.ones(300, dtype=torch.float64))
    lanczos(space, 20)
    space.begin(np.array([9.0, 7.0]))
    for _ in range(12):
        space.extend(1)
    assert space.points.size == 0


def test_kaniel_paige_bounds():
    """λ₁ − (λ₁−λₙ)(tan φ₁/c_{m−1}(1+2ρ₁))² ≤ θ₁ ≤ λ₁, and the mirrored bound with φₙ, ρₙ at the lower end."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        size, steps = int(generator.integers(8, 20)), int(generator.integers(2, 7))
        values = np.sort(generator.standard_normal(size))[::-1].copy()
        vectors = np.linalg.qr(generator.standard_normal((size, size)))[0]
        matrix = (vectors * values) @ vectors.T
        start = generator.standard_normal(size)
        space = krylov((matrix + matrix.T) / 2, steps, torch.from_numpy(start))
        ritz, _ = _quadrature(lanczos(space, steps), steps)
        cosines = abs(vectors.T @ start) / np.linalg.norm(start)
        spread = values[0] - values[-1]
        for end, theta, cosine in ((values, ritz.max(), cosines[0]), (-values[::-1], -ritz.min(), cosines[-1])):
            rho = (end[0] - end[1]) / (end[1] - end[-1])
            chebyshev = math.cosh((steps - 1) * math.acosh(1 + 2 * rho))
            slack = spread * (math.tan(math.acos(min(cosine, 1.0))) / chebyshev) ** 2
            assert end[0] - slack - 1e-10 <= theta <= end[0] + 1e-10


def test_lanczos_reproduces_moments_up_to_twice_the_steps():
    matrix, steps = rotated(SPECTRA["outliers"]), 7
    v = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v /= v.norm()
    nodes, weights = _quadrature(lanczos(krylov(matrix, steps, v), steps), steps)
    assert weights.sum() == pytest.approx(1.0, abs=1e-13)
    power, norm = v.clone(), 9.0
    errors = []
    for k in range(2 * steps + 1):
        errors.append(abs(float(weights @ nodes**k) - float(v @ power)) / norm**k)
        power = matrix @ power
    assert max(errors[: 2 * steps]) < 1e-13
    assert errors[2 * steps] > 1e-12  # and no further: the next one is only approximate


# --- traces, norms, diagonals -----------------------------------------------------------------------------------------

TRUE = {"trace": lambda m: float(m.trace()), "frobenius": lambda m: float(m.norm())}
ESTIMATE = {
    "hutchinson": ("trace", lambda m, **kw: operator_trace(m, **kw)),
    "hutch++": ("trace", lambda m, **kw: operator_trace(m, method="hutch++", **kw)),
    "frobenius": ("frobenius", lambda m, **kw: frobenius_norm(m, **kw)),
}


@pytest.mark.parametrize("name", ESTIMATE)
def test_t_intervals_cover_what_they_promise(name):
    quantity, estimate = ESTIMATE[name]
    matrix = rotated(torch.linspace(0.5, 2.0, 80), seed=3)
    truth = TRUE[quantity](matrix)
    hits = 0
    for seed in range(300):
        low, high = estimate(matrix, probes=66 if name == "hutch++" else 22, seed=seed).interval(0.95)
        hits += low <= truth <= high
    assert 0.92 <= hits / 300 <= 0.98


@pytest.mark.parametrize("name", ESTIMATE)
def test_estimates_are_exact_where_that_costs_no_more(name):
    quantity, estimate = ESTIMATE[name]
    matrix = rotated(bulk(50))
    for arguments in ({"probes": 50}, {"rel_err": 1e-6}):
        result = estimate(matrix, **arguments)
        assert result.exact
        assert result.value == pytest.approx(TRUE[quantity](matrix), abs=1e-12)
        assert 50 <= result.matvecs <= 50 + 48


@pytest.mark.parametrize("name", ESTIMATE)
def test_rel_err_is_reached_and_the_cost_follows(name):
    quantity, estimate = ESTIMATE[name]
    matrix = rotated(torch.cat([torch.tensor([4.0, 3.0]).double(), torch.linspace(0.2, 2, 398)]))
    truth = TRUE[quantity](matrix)
    results = [estimate(matrix, rel_err=0.01, seed=seed) for seed in range(10)]
    assert sum(result.stderr <= 0.01 * result.value for result in results) >= 8
    assert all(abs(result.value - truth) < 4.5 * result.stderr for result in results)
    assert max(result.matvecs for result in results) < 400
    assert estimate(matrix, rel_err=0.1).matvecs == (48 if name == "hutch++" else 16)


@pytest.mark.parametrize("name", ESTIMATE)
def test_a_relative_error_that_the_pilot_misjudged_is_said_to_be_missed(name):
    """With one outlier the first 16 draws show too small a variance, or too large a mean, in a quarter of cases."""
    _, estimate = ESTIMATE[name]
    matrix = rotated(torch.cat([torch.tensor([10.0]).double(), torch.linspace(0, 0.1, 399)]))
    results = [estimate(matrix, rel_err=0.05, seed=seed) for seed in range(20)]
    missed = [result.stderr > 0.05 * result.value for result in results]
    assert [bool(result.reason) for result in results] == missed
    assert any(missed) or name == "hutch++"  # which takes the outlier out
    assert all("rel_err=0.05" in result.reason for result in results if result.reason)


def test_rel_err_of_a_vanishing_trace_gives_up_and_says_so(monkeypatch):
    monkeypatch.setattr(trace, "_MOST_PROBES", 100)
    values = bulk(300)
    result = operator_trace(rotated(values), rel_err=1e-3)
    assert result.matvecs == 100
    assert "stopped at 100" in result.reason


def test_hutchinson_variance_is_the_formula():
    matrix = rotated(SPECTRA["outliers"])
    expected = 2 * float(matrix.square().sum() - matrix.diagonal().square().sum())
    estimate = operator_trace(matrix, probes=299)
    assert estimate.stderr**2 * 299 == pytest.approx(expected, rel=0.25)


def test_hutch_plus_plus_beats_hutchinson_on_decaying_spectra():
    values = torch.arange(1.0, 401.0, dtype=torch.float64) ** -2
    matrix = rotated(values)
    errors = {
        method: math.sqrt(
            sum((operator_trace(matrix, probes=60, method=method, seed=s).value - values.sum()) ** 2 for s in range(10))
        )
        for method in ("hutchinson", "hutch++")
    }
    assert errors["hutch++"] < errors["hutchinson"] / 10
    assert operator_trace(matrix, probes=60, method="hutch++").matvecs == 60


def test_diagonal_within_its_errors_and_exact_when_dense():
    matrix = rotated(SPECTRA["outliers"])
    estimate = diagonal(matrix, probes=100)
    assert estimate.matvecs == 100
    scores = (estimate.values - matrix.diagonal()) / estimate.stderr
    assert float(scores.abs().max()) < 5
    assert 0.85 < float(scores.square().mean()) < 1.2
    exact = diagonal(matrix, probes=300)
    assert exact.exact
    torch.testing.assert_close(exact.values, matrix.diagonal(), rtol=0, atol=1e-14)


def test_probes_that_agree_do_not_make_a_diagonal_exact():
    """On a diagonal matrix every sign vector gives the same values; nothing but the unit vectors proves them."""
    found = diagonal(torch.diag(torch.arange(50.0)), probes=4)
    assert not found.stderr.any()
    assert (found.status, found.exact) == ("estimated", False)
    assert " exact" not in str(found)
    again = DiagonalEstimate.from_json(found.to_json())
    assert again.status == "estimated"
    assert diagonal(torch.diag(torch.arange(50.0)), probes=50).status == "exact"
    with pytest.raises(InputError, match="status of a diagonal must be exact or estimated, got 'nearly'"):
        DiagonalEstimate(found.values, found.stderr, status="nearly")


# --- densities --------------------------------------------------------------------------------------------------------


def test_density_integrates_to_one_and_its_band_holds_the_truth():
    values = torch.cat([torch.tensor([6.0]).double(), bulk(599)])
    result = spectral_density(rotated(values), probes=6, steps=40)
    assert result.nodes.shape == result.weights.shape == (6, 40)
    assert float(result.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert result.matvecs == 240
    density = result.density(width=0.1)
    area = torch.trapezoid(density.values, density.grid)
    assert float(area) == pytest.approx(1.0, abs=1e-4)
    bells = torch.exp(-0.5 * ((density.grid[:, None] - values) / 0.1) ** 2).mean(1) / (0.1 * math.sqrt(2 * math.pi))
    low, high = density.band(0.99)
    inside = (low - 1e-3 <= bells) & (bells <= high + 1e-3)
    assert float(inside.double().mean()) > 0.95
    for k, power in enumerate((values**0, values, values**2, values**3)):
        moment = result.moment(k)
        assert abs(moment.value - float(power.mean())) <= 4.5 * moment.stderr + 1e-12


def test_quadrature_of_an_exhausted_space_is_filled_up_with_nothing():
    matrix = torch.diag(torch.cat([torch.ones(300), -torch.ones(300)]).double())
    matrix[0, 0] = -1.0
    result = spectral_density(matrix, probes=3, steps=10)
    assert result.matvecs == 6
    assert int((result.weights > 0).sum()) == 6
    assert float(result.weights.sum()) == pytest.approx(1.0, abs=1e-12)
    assert result.moment(2).value == pytest.approx(1.0, abs=1e-12)


def test_small_densities_are_all_eigenvalues():
    values = bulk(200)
    result = spectral_density(rotated(values))
    assert result.exact
    assert result.matvecs == 200
    torch.testing.assert_close(result.nodes[0], values, rtol=0, atol=1e-13)
    assert result.moment(2).exact
    assert not bool(result.density().stderr.any())


@pytest.mark.parametrize("size", [200, 700])
def test_spectrum_answers_everything_from_one_set_of_runs(size):
    values = torch.cat([torch.tensor([6.0, 6.0, 3.0, -2.0]).double(), bulk(size - 4)])
    matrix = rotated(values)
    op = wrap(matrix, first=(10, 10), second=(size - 100,))
    result = spectrum(op, k=2, probes=10, steps=30, vectors=True)
    assert result.largest.converged
    assert result.smallest.converged
    torch.testing.assert_close(result.largest.values, torch.tensor([6.0, 6.0]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.smallest.values, torch.tensor([-2.0, -1.0]).double(), rtol=0, atol=1e-4)
    for pairs in (result.largest, result.smallest):
        torch.testing.assert_close(pairs.residuals, true_residuals(matrix, pairs), rtol=1e-3, atol=1e-12)
    blocks = matrix.diagonal().split([100, size - 100])
    truths = {
        "trace": (result.trace, float(matrix.trace())),
        "frobenius": (result.frobenius_norm, float(matrix.norm())),
        "mean square": (result.mean_square, float(matrix.square().sum()) / size),
        "first": (result.layers["first"], float(blocks[0].sum())),
        "second": (result.layers["second"], float(blocks[1].sum())),
    }
    for estimate, truth in truths.values():
        assert abs(estimate.value - truth) <= 4.5 * estimate.stderr + 1e-10
    if size == 200:
        assert result.matvecs == 200
        assert result.trace.exact
    else:
        assert 300 < result.matvecs < 500
        assert sum(layer.value for layer in result.layers.values()) == pytest.approx(result.trace.value, rel=1e-12)
        assert result.trace.value == pytest.approx(size * result.density.moment(1).value, rel=0.5)
        q = torch.cat([result.largest.vectors, result.smallest.vectors], 1)
        rest = wrap(matrix - q @ torch.diag(torch.tensor([6.0, 6.0, -2.0, -1.0]).double()) @ q.T)
        without = operator_trace(rest, probes=10)
        assert result.trace.value == pytest.approx(without.value + 9, rel=1e-3)
        assert result.trace.stderr == pytest.approx(without.stderr, rel=1e-3)
        squares = frobenius_norm(rest, probes=10)
        assert result.frobenius_norm.value == pytest.approx(math.hypot(squares.value, math.sqrt(77)), rel=1e-3)
    assert result.spectral_norm == pytest.approx(6.0, abs=1e-6)


def test_a_spectrum_of_few_probes_knows_what_its_ends_contribute():
    """One eigenvalue is nearly all of H: two probes alone would leave the norm below it in half of all cases."""
    values = torch.cat([torch.tensor([10.0]).double(), torch.linspace(-0.01, 0.01, 1_999)])
    matrix = rotated(values)
    for seed in range(5):
        result = spectrum(wrap(matrix, weights=(2_000,)), probes=2, steps=12, seed=seed)
        assert result.frobenius_norm.value >= result.spectral_norm
        assert result.frobenius_norm.value == pytest.approx(float(values.norm()), rel=1e-4)
        assert result.trace.value == pytest.approx(float(values.sum()), abs=1.5)  # without, ± 10
        assert result.layers["weights"].value == pytest.approx(result.trace.value)


@pytest.mark.parametrize("near", [True, False], ids=["near the eigenvector", "anywhere"])
def test_the_norm_around_a_vector_is_unbiased_and_never_below_its_image(near):
    values = torch.cat([torch.tensor([10.0]).double(), torch.linspace(-1, 1, 199)])
    matrix = rotated(values)
    q = eigenvalues(matrix, 1).vectors[:, 0] if near else torch.nn.functional.normalize(matrix[:, 3] + 1, dim=0)
    found = [norm_around(matrix, q, probes=8, seed=seed) for seed in range(300)]
    squares = torch.tensor([each.value**2 for each in found]).double()
    truth = float(values.square().sum())
    assert abs(float(squares.mean()) - truth) < 4.5 * float(squares.std()) / math.sqrt(300)
    assert min(each.value for each in found) >= float((matrix @ q).norm())
    plain = torch.tensor([frobenius_norm(matrix, probes=8, seed=seed).value ** 2 for seed in range(300)]).double()
    if near:
        assert float(squares.std()) < 0.3 * float(plain.std())
    exact = norm_around(matrix, q, probes=200, seed=0)
    assert exact.exact
    assert exact.value == pytest.approx(math.sqrt(truth), rel=1e-12)


def test_a_matrix_whose_entries_are_known_is_not_estimated():
    matrix = rotated(bulk(200))
    op = wrap(matrix)
    op.materialise()
    for method in ("hutchinson", "hutch++"):
        trace = operator_trace(op, probes=8, method=method)
        assert trace.exact
        assert trace.value == pytest.approx(float(matrix.trace()), rel=1e-12)
    norm = frobenius_norm(op, probes=8)
    assert norm.exact
    assert norm.value == pytest.approx(float(matrix.norm()), rel=1e-12)


# --- operators, randomness, results -----------------------------------------------------------------------------------


def test_operator_multiplies_splits_and_shows_itself_dense():
    matrix = rotated(bulk(30))
    op = wrap(matrix, weight=(4, 5), bias=(10,))
    v = torch.arange(60.0, dtype=torch.float64).reshape(30, 2)
    torch.testing.assert_close(op @ v, matrix @ v)
    torch.testing.assert_close(op @ v[:, 0], matrix @ v[:, 0])
    torch.testing.assert_close(op.dense(), matrix)
    parts = op.split(v[:, 0])
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"weight": (4, 5), "bias": (10,)}
    torch.testing.assert_close(torch.cat([part.reshape(-1) for part in parts.values()]), v[:, 0])
    assert op.names == ("weight", "bias")
    assert op.shape == (30, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_scipy_works_with_eigsh(dtype):
    op = wrap(rotated(SPECTRA["outliers"]).to(dtype))
    found = eigsh(op.to_scipy(), k=3, which="LA", return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(found), [4.0, 7.0, 9.0], rtol=1e-5)


def test_anything_with_shape_and_matmul_will_do():
    matrix = rotated(SPECTRA["outliers"])
    forms = [matrix, wrap(matrix), matrix.numpy(), aslinearoperator(matrix.numpy()), wrap(matrix).to_scipy()]
    forms.append(matrix.to_sparse())
    forms.append(matrix.clone().requires_grad_())
    expected = eigenvalues(matrix, 2)
    for form in forms:
        got = eigenvalues(form, 2)
        torch.testing.assert_close(got.values, expected.values, rtol=1e-9, atol=0)
        assert operator_trace(form, probes=8).value == pytest.approx(operator_trace(matrix, probes=8).value)


def test_chunks_do_not_change_the_probes(monkeypatch):
    matrix = rotated(SPECTRA["outliers"])
    runs = []
    for columns in (1, 3, 7, 16):
        for module in (operator, probes, trace):
            monkeypatch.setattr(module, "columns_at_once", lambda size, columns=columns: columns)
        runs.append(
            [
                operator_trace(matrix, probes=20).value,
                operator_trace(matrix, probes=20, method="hutch++").value,
                frobenius_norm(matrix, probes=20).value,
                float(diagonal(matrix, probes=20).values[7]),
            ]
        )
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-12)
    product = Product(matrix)
    blocks = [torch.cat(list(sign_blocks(product, range(5, 9), 0)), dim=1) for _ in range(2)]
    assert torch.equal(blocks[0][:, 2], signs(product, 0, 7))
    assert set(blocks[0].unique().tolist()) == {-1.0, 1.0}


def test_results_depend_on_the_seed_alone_and_global_random_states_stay():
    matrix = rotated(SPECTRA["outliers"])
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    calls = [
        lambda seed: eigenvalues(matrix, 2, seed=seed).vectors,
        lambda seed: torch.tensor(operator_trace(matrix, probes=10, seed=seed).value),
        lambda seed: torch.tensor(operator_trace(matrix, probes=10, method="hutch++", seed=seed).value),
        lambda seed: torch.tensor(frobenius_norm(matrix, probes=10, seed=seed).value),
        lambda seed: diagonal(matrix, probes=10, seed=seed).values,
        lambda seed: spectral_density(matrix, probes=2, steps=5, seed=seed).nodes,
        lambda seed: spectrum(matrix, probes=2, steps=5, seed=seed).density.nodes,
    ]
    for call in calls:
        assert torch.equal(call(1), call(1))
        assert not torch.equal(call(1), call(2))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()
    assert states[2] == random.getstate()


@pytest.mark.parametrize("kind", [Eigenpairs, DiagonalEstimate, SpectralDensity, SpectrumSummary])
def test_results_survive_json(kind):
    op = wrap(rotated(torch.cat([torch.tensor([5.0]).double(), bulk(139)])), a=(100,), b=(40,))
    result = {
        Eigenpairs: lambda: eigenvalues(op, 2),
        DiagonalEstimate: lambda: diagonal(op, probes=4),
        SpectralDensity: lambda: spectral_density(op, probes=2, steps=6),
        SpectrumSummary: lambda: spectrum(op, probes=2, steps=6),
    }[kind]()
    back = Result.from_json(result.to_json())
    assert type(back) is kind
    assert str(back) == str(result)
    assert Result.from_json(back.to_json()).to_json() == back.to_json()
    for field in dataclasses.fields(kind):
        value = getattr(result, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(back, field.name), value)


def test_density_survives_json():
    density = spectral_density(rotated(bulk(140)), probes=2, steps=6).density(width=0.1)
    assert Result.from_json(density.to_json()).to_json() == density.to_json()


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = rotated(bulk(10))
WRONG = {
    "size of a vector": (lambda: wrap(GOOD) @ torch.ones(9).double(), r"multiplies vectors of shape \(10,\) or"),
    "shape of a vector": (lambda: wrap(GOOD) @ torch.ones(10, 1, 1).double(), r"got \(10, 1, 1\)"),
    "dtype of a vector": (lambda: wrap(GOOD) @ torch.ones(10), "the operator is torch.float64 on cpu, the vector"),
    "array for a vector": (lambda: wrap(GOOD) @ np.ones(10), "multiplies tensors, got ndarray"),
    "split": (lambda: wrap(GOOD, a=(10,)).split(torch.ones(9)), r"split needs a vector of shape \(10,\)"),
    "split without names": (lambda: wrap(GOOD).split(torch.ones(10)), "without parameter shapes"),
    "shapes": (lambda: wrap(GOOD, a=(3,)), "hold 3 numbers, but the operator has size 10"),
    "k too large": (lambda: eigenvalues(GOOD, 11), "k between 1 and the operator's size 10, got 11"),
    "k of zero": (lambda: eigenvalues(GOOD, 0), "got 0"),
    "k in spectrum": (lambda: spectrum(GOOD, k=11), "got 11"),
    "tolerance": (lambda: eigenvalues(GOOD, tol=0.0), "tolerance tol > 0, got 0.0"),
    "negative tolerance": (lambda: spectral_norm(GOOD, tol=-1.0), "got -1.0"),
    "which": (lambda: eigenvalues(GOOD, which="larges"), "did you mean 'largest'"),
    "internal which": (lambda: eigenvalues(GOOD, which="both"), "unknown end of the spectrum 'both'"),
    "budget": (lambda: eigenvalues(GOOD, 3, max_matvecs=2), "max_matvecs >= k = 3, got 2"),
    "basis": (lambda: eigenvalues(GOOD, 3, basis=5), "basis >= k [+] 4 = 7 vectors"),
    "not square": (lambda: operator_trace(torch.ones(3, 4)), r"square operator, got shape \(3, 4\)"),
    "not symmetric": (lambda: operator_trace(torch.ones(3, 3).triu()), "need a symmetric matrix"),
    "no operator": (lambda: operator_trace([1.0]), "`shape` and `@`, got list"),
    "integers": (lambda: operator_trace(torch.ones(3, 3).long()), "float32 or float64 operator, got torch.int64"),
    "half": (lambda: eigenvalues(torch.ones(3, 3).half()), "convert it first"),
    "one probe": (lambda: operator_trace(GOOD, probes=1), "operator_trace needs probes >= 2 .* got 1"),
    "few for hutch++": (lambda: operator_trace(GOOD, probes=3, method="hutch++"), "probes >= 4"),
    "norm of one probe": (lambda: frobenius_norm(GOOD, probes=1), "frobenius_norm needs probes >= 2"),
    "diagonal of one probe": (lambda: diagonal(GOOD, probes=1), "diagonal needs probes >= 2"),
    "density of one probe": (lambda: spectral_density(GOOD, probes=1), "spectral_density needs probes >= 2"),
    "no steps": (lambda: spectral_density(GOOD, steps=0), "needs steps >= 1, got 0"),
    "relative error": (lambda: operator_trace(GOOD, rel_err=0.0), "rel_err > 0, got 0.0"),
    "trace method": (lambda: operator_trace(GOOD, method="hutch"), "unknown trace method 'hutch'"),
    "seed": (lambda: operator_trace(GOOD, seed=-1), "seed must be a whole number from 0 to 4,000,000,000, got -1"),
    "width": (lambda: spectral_density(GOOD).density(width=0.0), "width > 0, got 0.0"),
    "moment": (lambda: spectral_density(GOOD).moment(-1), "k >= 0, got -1"),
    "band": (lambda: spectral_density(GOOD).density().band(1.0), "level between 0 and 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_gets_one_clear_sentence(case):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize("size", [10, 200])
@pytest.mark.parametrize(
    "estimate", [eigenvalues, operator_trace, frobenius_norm, diagonal, spectral_density, spectrum, spectral_norm]
)
def test_products_with_nan_are_refused(estimate, size):
    def broken(block):
        return torch.full_like(block, math.nan)

    for op in (Operator(broken, size), aslinearoperator_of(broken, size)):
        with pytest.raises(
            InputError, match=r"holds NaN or infinity; check the data, the model's outputs and the loss"
        ):
            estimate(op)


def aslinearoperator_of(matmat, size):
    def multiply(x):
        return matmat(torch.tensor(x)).numpy()

    return LinearOperator((size, size), matvec=multiply, matmat=multiply, dtype=np.float64)


def test_a_product_of_the_wrong_shape_is_refused():
    with pytest.raises(InputError, match="must keep the shape"):
        operator_trace(Operator(lambda block: block[:-1], 200))


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, -100), (torch.float32, -60), (torch.float32, 110), (torch.float64, -450), (torch.float64, 450)],
)
def test_nothing_depends_on_the_scale_of_the_matrix(dtype: torch.dtype, exponent: int) -> None:
    """A fitted network's Hessian may be 1e-30, a rescaled one's 1e30: their squares are beyond float32."""
    basis = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    matrix = (basis * torch.linspace(-0.3, 1, 300, dtype=torch.float64) ** 3) @ basis.T
    matrix = ((matrix + matrix.T) / 2).to(dtype)

    def measured(op: torch.Tensor) -> list[float]:
        summary = estimators.spectrum(op, probes=2, steps=30)
        top, bottom = estimators.eigenvalues(op, 2), estimators.eigenvalues(op, which="smallest")
        frobenius = estimators.frobenius_norm(op, probes=10)
        assert top.converged
        assert bottom.converged
        return [
            *top.values.tolist(),
            *bottom.values.tolist(),
            estimators.spectral_norm(op).value,
            frobenius.value,
            frobenius.stderr,
            estimators.operator_trace(op, probes=10).value,
            estimators.operator_trace(op, probes=12, method="hutch++").value,
            float(estimators.diagonal(op, probes=5).values.double().norm()),
            float(summary.largest.values[0]),
            summary.frobenius_norm.value,
            summary.trace.value,
            estimators.spectral_density(op, probes=2, steps=20).moment(1).value,
        ]

    factor = 2.0**exponent
    assert [value / factor for value in measured(matrix * factor)] == pytest.approx(measured(matrix), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [8, 36, 100])
def test_the_rounding_of_a_singular_matrix_has_no_sign(size: int, dtype: torch.dtype) -> None:
    for seed in range(20):
        factor = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        found = eigenvalues(factor @ factor.T, which="smallest", tol=1e-3, seed=seed).outermost()
        assert found.sign == 0, f"{found} at {seed}"
