"""The page of formulas: its citations lead somewhere, its tests exist, and what no other test holds is held here."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import naive
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from spiritlevel.binding.losses import confidence_gap
from spiritlevel.estimators import Operator
from spiritlevel.estimators.krylov import Krylov, lanczos
from spiritlevel.estimators.operator import Product
from spiritlevel.measures import MEASURES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mathematics.md"
PLACES = ("src", "tests", "docs", "tools", "benchmarks")

# ---------------------------------------------------------------- the page


def sections(text: str) -> dict[str, str]:
    """The text under every numbered heading, by its number."""
    parts = re.split(r"^#{2,3} (\d+(?:\.\d+)?)\.? .*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def citations(text: str) -> Iterator[str]:
    """The numbers cited as 'mathematics 4.2', also in 'mathematics 2.3, 4.4 and 4.5'."""
    number = r"\d+(?:\.\d+)?"
    for found in re.finditer(rf"\bmathematics ({number}(?:(?:, | and | to ){number})*)", text):
        yield from re.findall(number, found[1])


def missing_tests(text: str) -> list[str]:
    """The tests that a text names as `tests/file.py::test` and that do not exist."""
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    return [f"{name}::{test}" for name, test in named if test not in functions_of(ROOT / name)]


@functools.cache
def functions_of(path: Path) -> frozenset[str]:
    """The names of the functions that a file defines."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def texts() -> Iterator[tuple[Path, str]]:
    """All sources and pages that may cite the mathematics."""
    files = [path for place in PLACES for path in sorted((ROOT / place).rglob("*"))]
    for path in [*files, *sorted(ROOT.glob("*.md"))]:
        if path.suffix in (".py", ".md"):
            yield path, path.read_text(encoding="utf-8")


def dead_links(path: Path, text: str) -> list[str]:
    """The links of a page to files, or to headings, that do not exist."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(target)
    return found


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_sections_are_numbered_without_gaps() -> None:
    numbers = [tuple(map(int, number.split("."))) for number in sections(PAGE.read_text(encoding="utf-8"))]
    before = (0,)
    for number in numbers:
        nexts = [(before[0] + 1,), (*before, 1) if len(before) == 1 else (before[0], before[1] + 1)]
        assert number in nexts, f"section {number} follows {before}"
        before = number


def test_every_section_names_tests_and_all_of_them_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    parts = sections(text)
    leaves = [number for number in parts if not any(other.startswith(f"{number}.") for other in parts)]
    assert [n for n in leaves if n != "1" and "Held by: `tests/" not in parts[n]] == []  # notation needs none
    assert missing_tests(text) == []


def test_every_citation_leads_to_a_section() -> None:
    known = sections(PAGE.read_text(encoding="utf-8"))
    cited = [(path, number) for path, text in texts() if path != Path(__file__) for number in citations(text)]
    assert [f"{path.relative_to(ROOT)}: mathematics {number}" for path, number in cited if number not in known] == []
    assert len(cited) >= 20  # they are found at all


def test_nothing_cites_the_notes_that_do_not_ship() -> None:
    old = re.compile(r"(?<!\.)\bMA" + r"TH\b|_ma" + r"th_\d")  # not SDPBackend's
    assert [str(path.relative_to(ROOT)) for path, text in texts() if old.search(text)] == []


def test_every_measure_is_defined() -> None:
    parts = sections(PAGE.read_text(encoding="utf-8"))
    defined = re.findall(r"`(\w+)`", "".join(text for number, text in parts.items() if number.startswith("8.")))
    assert [name for name in MEASURES if name not in defined] == []


def test_every_link_between_pages_leads_somewhere() -> None:
    dead = {str(path.relative_to(ROOT)): dead_links(path, text) for path, text in texts() if path.suffix == ".md"}
    assert {name: links for name, links in dead.items() if links} == {}


def test_the_checks_notice() -> None:
    assert list(sections("## 1. One\na\n### 1.1 Two\nb\n")) == ["1", "1.1"]
    assert list(citations("paper B; mathematics 7.1. And mathematics 2.3, 4.4 and 5, but not 6.")) == [
        "7.1",
        "2.3",
        "4.4",
        "5",
    ]
    assert missing_tests("`tests/test_mathematics.py::test_that_is_not_there`, `tests/test_nowhere.py::test_a`") == [
        "tests/test_mathematics.py::test_that_is_not_there",
        "tests/test_nowhere.py::test_a",
    ]
    links = "[a](mathematics.md#1-notation) [b](mathematics.md#notation) [c](none.md) [d](https://example.org/x)"
    assert dead_links(PAGE, links) == ["mathematics.md#notation", "none.md"]


# ---------------------------------------------------------------- losses and probes


def test_the_variance_of_a_random_combination() -> None:
    """Section 2.4, over all signs: mean T, variance 2Σ⟨u_i,u_j⟩² ≤ cT², and an error that is not too small."""
    generator = np.random.default_rng(0)
    for terms, size in itertools.product((2, 3, 6), (1, 2, 9)):
        equal = size == 1  # equal vectors reach the bound
        lengths = generator.exponential(size=(terms, 1))
        u = np.ones((terms, 1)) if equal else lengths * generator.standard_normal((terms, size))
        signs = np.array(list(itertools.product((-1, 1), repeat=terms)))
        draws = np.square(signs @ u).sum(1)
        total, gram, c = np.square(u).sum(), u @ u.T, 2 * (1 - 1 / terms)
        variance = 2 * (np.square(gram).sum() - np.square(gram.diagonal()).sum())
        assert draws.mean() == pytest.approx(total, rel=1e-12)
        assert draws.var() == pytest.approx(variance, rel=1e-12, abs=1e-12 * total**2)
        assert variance <= c * total**2 * (1 + 1e-12)
        assert not equal or variance == pytest.approx(c * total**2, rel=1e-12)
        assert np.square(draws).mean() * c / (1 + c) >= variance * (1 - 1e-12)


@given(st.lists(st.floats(-40, 40), min_size=2, max_size=8), st.integers(0, 7))
def test_small_losses_bound_the_curvature(row: list[float], label: int) -> None:
    """Section 3.4: Tr A ≤ 2ℓ and ‖S − e_y‖₁ ≤ 2ℓ."""
    logits, y = torch.tensor([row], dtype=torch.float64), label % len(row)
    loss = float(naive.cross_entropy(logits, torch.tensor([y])))
    distance = float((torch.softmax(logits, 1)[0] - torch.eye(len(row)).double()[y]).abs().sum())
    assert float(confidence_gap(logits)) <= 2 * loss * (1 + 1e-9) + 1e-14
    assert distance <= 2 * loss * (1 + 1e-9) + 1e-14


@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_small_losses_bound_the_hessian_of_a_network(label: int, scale: float) -> None:
    """Section 3.4: ‖∇²ℓ‖ ≤ ℓ(2‖J‖² + 2 max‖∇²φ_c‖)."""
    torch.manual_seed(label)
    flat = naive.Flat(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    x, target = torch.randn(1, 3).double(), torch.tensor([label])
    point = flat.point * scale
    jacobian = torch.func.jacrev(lambda v: flat.outputs(v, x)[0])(point)
    bends = torch.func.hessian(lambda v: flat.outputs(v, x)[0])(point)
    whole = torch.func.hessian(lambda v: flat(v, x, target))(point)
    bound = 2 * spectral(jacobian) ** 2 + 2 * max(spectral(bend) for bend in bends)
    assert spectral(whole) <= float(flat(point, x, target)) * bound * (1 + 1e-9) + 1e-12


def spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


# ---------------------------------------------------------------- eigenvalues


@pytest.mark.parametrize("size", [3, 10, 1000, 10**6])
def test_a_random_start_is_rarely_nearly_orthogonal(size: int) -> None:
    """Section 6.2: Pr(|qᵀz| ≤ t) ≤ t√(2P/π) for q uniform on the sphere, (qᵀz)² ~ Beta(½, (P−1)/2); nearly sharp."""
    for chance in (1e-3, 1e-2, 0.3):
        t = chance / math.sqrt(2 * size / math.pi)
        exact = float(stats.beta(0.5, (size - 1) / 2).cdf(t**2))
        assert exact <= chance
        if size >= 10 and chance < 0.1:
            assert exact > 0.9 * chance  # not a bound that is true for being loose


def test_the_start_cannot_contain_more_of_a_hidden_eigenvector() -> None:
    """Section 6.2: |q₀ᵀz| ≤ |x₀|/√(1+‖x‖²), which is 1/√Σp_i(μ)², for every eigenvector, as `overlooks` says."""
    generator = np.random.default_rng(1)
    size, steps = 60, 9
    values = np.sort(generator.standard_normal(size))
    values[-1] = 1.5 * values[-2]
    op = Operator(lambda block: torch.from_numpy(values)[:, None] * block, size, dtype=torch.float64)
    start = torch.from_numpy(generator.standard_normal(size))
    space = Krylov(Product(op), size, 0, start, uniform=True)
    lanczos(space, steps)
    tridiagonal = space.projected[:steps, :steps]
    beta = space.edges[0].shares[steps - 1]
    components = np.abs(start.numpy()) / np.linalg.norm(start.numpy())
    previous = math.inf
    for component, value in zip(components, values, strict=True):
        x = np.linalg.solve(value * np.eye(steps) - tridiagonal, beta * np.eye(steps)[-1])
        most = abs(x[0]) / math.hypot(1, np.linalg.norm(x))
        assert component <= most * (1 + 1e-9)
        assert most == pytest.approx(1 / np.linalg.norm(polynomials(tridiagonal, beta, value)), rel=1e-6)
    for value in np.linspace(1.01, 4, 20) * float(np.linalg.eigvalsh(tridiagonal)[-1]):  # falls beyond all Ritz values
        most = 1 / float(np.linalg.norm(polynomials(tridiagonal, beta, value)))
        assert most < previous
        assert space.overlooks(np.array([value]))[0] == (most * math.sqrt(2 * size / math.pi) > 1e-3)
        previous = most
    assert not space.overlooks(np.array([100.0]))[0]


def polynomials(tridiagonal: np.ndarray, beta: float, value: float) -> np.ndarray:
    """p₀ = 1, …, p_w at a value, by the three-term recursion of Lanczos."""
    diagonal, off = tridiagonal.diagonal(), [*tridiagonal.diagonal(1), beta]
    found = [1.0]
    for i in range(len(diagonal)):
        before = off[i - 1] * found[i - 1] if i else 0.0
        found.append(((value - diagonal[i]) * found[i] - before) / off[i])
    return np.array(found)


# ---------------------------------------------------------------- reparametrisations


def curvature(loss: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.grad(loss)(point), naive.symmetric(torch.func.hessian(loss)(point))


def test_any_linear_reparametrisation_moves_gradient_and_hessian_by_its_inverse() -> None:
    """Section 7.1, for a map that is not diagonal: two linear layers B A = (BG)(G⁻¹A)."""
    torch.manual_seed(0)
    x, y = torch.randn(7, 3).double(), torch.arange(7) % 2
    mix = torch.randn(4, 4).double()

    def loss(theta: Tensor) -> Tensor:
        first, second = theta[:12].reshape(4, 3), theta[12:].reshape(2, 4)
        return naive.cross_entropy(x @ first.T @ second.T, y).mean()

    def moved(theta: Tensor) -> Tensor:
        first, second = theta[:12].reshape(4, 3), theta[12:].reshape(2, 4)
        return torch.cat([torch.linalg.solve(mix, first).reshape(-1), (second @ mix).reshape(-1)])

    theta = torch.randn(20).double()
    inverse = torch.linalg.inv(torch.func.jacrev(moved)(theta))
    gradient, hessian = curvature(loss, theta)
    new_gradient, new_hessian = curvature(loss, moved(theta))
    torch.testing.assert_close(loss(moved(theta)), loss(theta), rtol=1e-12, atol=0)
    torch.testing.assert_close(new_gradient, inverse.T @ gradient, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(new_hessian, inverse.T @ hessian @ inverse, rtol=1e-9, atol=1e-11)
    before, after = (torch.linalg.eigvalsh(matrix) for matrix in (hessian, new_hessian))
    signs = [(int((v > 1e-9).sum()), int((v < -1e-9).sum())) for v in (before, after)]
    assert signs[0] == signs[1]  # Sylvester's law of inertia
    assert min(signs[0]) > 0
    assert not torch.allclose(before, after, rtol=0.1)


def test_a_shift_of_all_logits_leaves_gradient_and_hessian() -> None:
    """Section 7.2: the same affine function of the last hidden layer, added to every logit, is a null direction."""
    torch.manual_seed(1)
    flat = naive.Flat(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)))
    x, y = torch.randn(6, 3).double(), torch.arange(6) % 5
    shift = {name: torch.zeros(shape).double() for name, shape in flat.shapes.items()}
    shift["2.weight"] += torch.randn(4).double()  # one row for all
    shift["2.bias"] += 0.7
    direction = torch.cat([part.reshape(-1) for part in shift.values()])
    gradient, hessian = curvature(lambda v: flat(v, x, y), flat.point)
    there = curvature(lambda v: flat(v, x, y), flat.point + 3 * direction)
    torch.testing.assert_close(there[0], gradient, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(there[1], hessian, rtol=1e-9, atol=1e-13)
    assert float((gradient @ direction).abs()) < 1e-14
    assert float((hessian @ direction).abs().max()) < 1e-14
    other = direction.clone()
    other[-1] += 1.0  # one logit alone
    assert float((hessian @ other).abs().max()) > 1e-3


# ---------------------------------------------------------------- step sizes


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rate", [0.1, 1e-3])
def test_momentum_raises_the_limit_of_the_step_size(momentum: float, rate: float) -> None:
    """Section 9.1: steps on ½λw² end near zero just below λ = 2(1+ρ)/α and run away just above."""

    def size_after(curvature: float) -> float:
        w = torch.ones(1, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.SGD([w], lr=rate, momentum=momentum)
        for _ in range(600):
            w.grad = curvature * w.detach()
            optimiser.step()
        return abs(float(w.detach()))

    limit = 2 * (1 + momentum) / rate
    assert size_after(0.98 * limit) < 1e-2
    assert size_after(1.02 * limit) > 1e2


def test_the_limit_of_stochastic_steps() -> None:
    """Section 9.2: the growth of E w² is (1−αa)² + α²s²; and the matrix condition suffices for the exact one."""
    for rate, spread in ((0.1, 4.0), (0.5, 1.9), (0.02, 0.0)):
        limit = (1 + math.sqrt(1 - (rate * spread) ** 2)) / rate
        growth = [np.mean([(1 - rate * (a + s)) ** 2 for s in (spread, -spread)]) for a in (limit, limit * 1.001)]
        assert growth[0] == pytest.approx(1, abs=1e-12)
        assert growth[1] > 1
    generator = np.random.default_rng(0)
    for _ in range(20):
        roots = generator.standard_normal((6, 3, 2))
        parts = roots @ roots.transpose(0, 2, 1)
        mean = parts.mean(0)
        variance = (parts @ parts).mean(0) - mean @ mean
        rates = np.geomspace(1e-3, 1, 60)
        enough = [np.linalg.eigvalsh(square(np.eye(3) - a * mean) + a**2 * variance)[-1] <= 1 + 1e-12 for a in rates]
        steps = [np.eye(3) - a * parts for a in rates]
        exact = [np.abs(np.linalg.eigvals(np.mean([np.kron(m, m) for m in s], 0))).max() <= 1 + 1e-9 for s in steps]
        assert all(e for s, e in zip(enough, exact, strict=True) if s)
        assert 0 < sum(enough) <= sum(exact) < len(rates)


def square(matrix: np.ndarray) -> np.ndarray:
    return matrix @ matrix


# ---------------------------------------------------------------- errors of subsets


def population(count: int, size: int, noise: float = 1.0) -> np.ndarray:
    """Symmetric matrices of samples around a mean with separate eigenvalues."""
    generator = np.random.default_rng(3)
    parts = generator.standard_normal((count, size, size)) * noise
    parts = parts + parts.transpose(0, 2, 1)
    return parts - parts.mean(0) + np.diag(np.arange(size, 0, -1.0) ** 1.5)


def test_influences_are_derivatives() -> None:
    """Section 10.3: d/dε F((1−ε)H + εH_n) by central differences."""
    parts = population(5, 4)
    mean = parts.mean(0)
    values, vectors = np.linalg.eigh(mean)
    top, norm = vectors[:, -1], float(np.linalg.norm(mean))
    cases: list[tuple[Callable[[np.ndarray], float], Callable[[np.ndarray], float]]] = [
        (lambda m: float(np.linalg.eigvalsh(m)[-1]), lambda part: float(top @ part @ top - values[-1])),
        (lambda m: float(np.linalg.norm(m)), lambda part: float((part * mean).sum() / norm - norm)),
        (lambda m: float(np.square(m).sum() / 4), lambda part: float(2 * ((part * mean).sum() - norm**2) / 4)),
    ]
    for number, influence in cases:
        found = [influence(part) for part in parts]
        for part, wanted in zip(parts, found, strict=True):
            ends = [number((1 - step) * mean + step * part) for step in (1e-5, -1e-5)]
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(wanted, rel=1e-6, abs=1e-8)
        assert np.mean(found) == pytest.approx(0, abs=1e-12)


def test_the_largest_eigenvalue_of_a_subset_is_too_large_on_average() -> None:
    """Section 10.3: error and bias over *all* subsets of 4 of 8, in the limit of little noise; also of Tr(H²)/P."""
    parts = population(8, 3, noise=1e-3)
    mean = parts.mean(0)
    values, vectors = np.linalg.eigh(mean)
    subsets = [parts[list(chosen)].mean(0) for chosen in itertools.combinations(range(8), 4)]
    share = (1 - 4 / 8) / 4
    tops = np.array([np.linalg.eigvalsh(subset)[-1] for subset in subsets])
    leaks = np.einsum("ia,nij,j->na", vectors, parts, vectors[:, -1]).var(0, ddof=1)
    assert tops.std() == pytest.approx(math.sqrt(leaks[-1] * share), rel=1e-3)
    bias = float(tops.mean() - values[-1])
    assert bias == pytest.approx(share * float((leaks[:-1] / (values[-1] - values[:-1])).sum()), rel=1e-2)
    assert bias > 0
    squares = np.mean([np.square(subset).sum() / 3 for subset in subsets]) - np.square(mean).sum() / 3
    spread = np.square(parts - mean).sum() / (len(parts) - 1)
    assert squares == pytest.approx(share * spread / 3, rel=1e-6)


def test_the_maximiser_does_not_move_to_first_order() -> None:
    """Section 10.3: the derivative of max_{‖δ‖≤ρ} of a mixture of two losses is the difference at δ* alone."""
    generator = np.random.default_rng(0)
    slopes, radius = generator.standard_normal((2, 3)), 0.3

    def largest(weight: float) -> tuple[float, np.ndarray]:
        slope = (1 - weight) * slopes[0] + weight * slopes[1]
        return radius * float(np.linalg.norm(slope)), radius * slope / np.linalg.norm(slope)

    best = largest(0.4)[1]
    derivative = (largest(0.4 + 1e-6)[0] - largest(0.4 - 1e-6)[0]) / 2e-6
    assert derivative == pytest.approx(float((slopes[1] - slopes[0]) @ best), rel=1e-7)
