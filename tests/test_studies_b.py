"""What the studies of paper B compute themselves, against slow twins."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from spiritlevel import charts
from spiritlevel.papers.coordinates import bend, earth_mover, unbend
from spiritlevel.papers.studies import Verdict, decide, radial
from spiritlevel.papers.studies import input_representation as inputs
from spiritlevel.papers.studies.input_representation import SYSTEMS, Mixture, coordinates
from spiritlevel.papers.studies.rescaling import Rescaling, _measure


def mixture(size: int, seed: int = 0) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(2, size, size, dtype=torch.float64, generator=generator)
    covariances = roots @ roots.mT + 0.3 * torch.eye(size, dtype=torch.float64)
    means = torch.randn(2, size, dtype=torch.float64, generator=generator)
    return Mixture(torch.tensor([0.3, 0.7], dtype=torch.float64), means, covariances)


def scipy_density(model: Mixture, points: np.ndarray, noise: float = 0.0) -> np.ndarray:
    size = points.shape[1]
    return sum(
        float(w) * stats.multivariate_normal(m.numpy(), c.numpy() + noise**2 * np.eye(size)).pdf(points)
        for w, m, c in zip(*model, strict=True)
    )


def test_the_bend_and_its_inverse() -> None:
    x = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    torch.testing.assert_close(unbend(bend(x)), x, rtol=1e-13, atol=1e-13)


def test_densities() -> None:
    model, points = mixture(3), np.random.default_rng(0).normal(size=(20, 3))
    expected = np.log(scipy_density(model, points))
    np.testing.assert_allclose(model.log_density(torch.from_numpy(points)).numpy(), expected, rtol=1e-12)


def test_the_denoiser_is_the_posterior_mean() -> None:
    """Against numerical integration of x p(x) N(y − x) on the line."""
    model, noise = mixture(1), 0.7

    def weight(x: float, y: float) -> float:
        return float(scipy_density(model, np.array([[x]]))[()]) * stats.norm.pdf(y, x, noise)

    for y in (-2.0, 0.3, 1.5):
        whole, _ = integrate.quad(weight, -20, 20, args=(y,), limit=200)
        mean, _ = integrate.quad(lambda x, y=y: x * weight(x, y), -20, 20, limit=200)
        found = model.denoised(torch.tensor([[y]], dtype=torch.float64), noise)
        assert float(found) == pytest.approx(mean / whole, rel=1e-6)


def test_the_denoiser_in_several_dimensions() -> None:
    """One component: the textbook Σ(Σ + σ²I)⁻¹, with a covariance that is not diagonal."""
    model = mixture(3)
    single = Mixture(torch.ones(1, dtype=torch.float64), model.means[:1], model.covariances[:1])
    y = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gain = single.covariances[0] @ torch.linalg.inv(single.covariances[0] + 0.25 * torch.eye(3, dtype=torch.float64))
    expected = single.means[0] + (y - single.means[0]) @ gain.T
    torch.testing.assert_close(single.denoised(y, 0.5), expected)


@pytest.mark.parametrize("name", SYSTEMS)
def test_densities_in_other_coordinates_integrate_to_one(name: str) -> None:
    model = mixture(1)
    system = coordinates(model.sample(500, torch.Generator().manual_seed(0)))[name]
    x = torch.linspace(-40, 40, 200_001, dtype=torch.float64)[:, None]
    u = system.forward(x)
    total = torch.trapezoid(system.log_density(model, u).exp(), u[:, 0])
    assert float(total) == pytest.approx(1, abs=1e-6)


def test_the_earth_mover_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(6, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    costs = [(first - second[list(order)]).norm(dim=1).mean() for order in itertools.permutations(range(6))]
    assert earth_mover(first, second) == pytest.approx(float(min(costs)))


@pytest.mark.parametrize("bias", [False, True])
def test_rescaled_spectra(bias: bool) -> None:
    """The Gauss–Newton matrix along the path against D⁻¹HD⁻¹ of the matrix at the start."""
    found = _measure(Rescaling(scale="smoke", betas=(1.0, 1024.0, 2048.0)), "3-4-3", bias)
    start, later = found["spectra"][0], found["spectra"][1]
    assert found["rank"] == int((start > 1e-11 * start[0]).sum())
    assert found["growing"] == int((found["spectra"][2] / later)[: found["rank"]].gt(2.0).sum())
    assert found["output difference"] < 1e-12
    assert found["growing"] + found["staying"] < found["rank"] + 1
    assert (found["staying"] > 0) is bias


def test_rules_of_input_representation() -> None:
    def judged(euclidean: float, invariant: float, change: float = 0.0) -> set[Verdict]:
        flips = [
            {
                "score": score,
                "case": case,
                "coordinates": name,
                "reversed": euclidean if score in inputs.EUCLIDEAN else invariant,
                "change": change,
            }
            for score, case in inputs.STATEMENTS
            for name in ("standardised", "whitened", "bent")
        ]
        rulings = list(inputs.judge(flips))
        return {decide(ruling.statement, [ruling.record()] * 3).verdict for ruling in rulings}

    assert judged(0.2, 0.0) == {Verdict.REPRODUCED}
    assert judged(0.01, 0.1) == {Verdict.NOT}
    assert judged(0.01, 0.0, change=1e-3) == {Verdict.NOT}


@pytest.mark.parametrize(("rho", "verdict"), [(0.2, Verdict.REPRODUCED), (0.5, Verdict.NOT)])
def test_a_map_that_moves_nothing_inside_the_ball_is_not_local(
    monkeypatch: pytest.MonkeyPatch, rho: float, verdict: Verdict
) -> None:
    """With ρ = r̂ the map is the identity: outside nothing moves, as stated, but neither does anything inside."""
    monkeypatch.setattr(charts, "lines", lambda *given, **more: None)
    monkeypatch.setattr(charts, "grid", lambda *given, **more: None)
    kept: Any = SimpleNamespace(table=lambda name, rows: rows, chart=lambda name, chart: None)
    ruling = next(radial._figure(radial.Radial(points=7, rho=rho, r_hat=0.5), kept))
    assert decide(radial.LOCAL, [ruling.record()]).verdict is verdict
