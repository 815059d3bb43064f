"""Correlation against NumPy, SciPy and scikit-learn, its interval by simulation, and what is undefined."""

from __future__ import annotations

import dataclasses
import math
import random
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import LocalOutlierFactor
from torch import nn

from spiritlevel.binding.losses import aceht
from spiritlevel.errors import InputError
from spiritlevel.results import Correlation, Estimate, Margins, SampleTraces, quantiles
from spiritlevel.samples.margins import margin_bound, margins
from spiritlevel.statistics import correlation, outliers
from spiritlevel.statistics.correlation import correlate, kendall, skewness


def cloud(count: int, rho: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    a, noise = np.random.default_rng(seed).standard_normal((2, count))
    return a, rho * a + math.sqrt(1 - rho**2) * noise


def traces(draws: np.ndarray, *, fingerprint: str = "", exact: bool = False) -> SampleTraces:
    tensor = torch.from_numpy(draws)
    return SampleTraces(
        values=tensor.mean(1),
        stderr=tensor.std(1) / math.sqrt(tensor.shape[1]),
        exact=exact,
        method="hutchinson",
        targets=torch.zeros(len(draws)).long(),
        draws=tensor,
        fingerprint=fingerprint,
    )


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_values_equal_those_of_scipy(scale: float) -> None:
    a, b = cloud(300, 0.7)
    found = correlate(a * scale, torch.from_numpy(3 * b + 5), outliers="none")
    line = scipy_stats.linregress(a, 3 * b + 5)
    assert found.r == pytest.approx(line.rvalue, rel=1e-12)
    assert found.r_all == found.r
    assert found.slope * scale == pytest.approx(line.slope, rel=1e-12)
    assert found.intercept == pytest.approx(line.intercept, rel=1e-12)
    assert found.spearman == pytest.approx(scipy_stats.spearmanr(a, b).statistic, rel=1e-12)
    assert (found.n, found.removed, found.reason) == (300, 0, "")
    assert found.low < found.r < found.high
    assert math.isnan(found.disattenuated)


@pytest.mark.parametrize(("outliers", "count"), [("lof", 400), ("lof-standardised", 400), ("lof", 12)])
def test_outliers_are_those_of_scikit_learn(outliers: str, count: int) -> None:
    a, b = cloud(count, 0.9)
    a, b = np.append(a, [8.0, -9.0]), np.append(b, [-8.0, 9.0]) * 1e3
    points = np.stack([a, b], 1)
    if outliers == "lof-standardised":
        points = (points - points.mean(0)) / points.std(0)
    kept = LocalOutlierFactor(n_neighbors=min(20, count + 1)).fit_predict(points) == 1
    found = correlate(a, b, outliers=outliers)
    assert found.removed == int((~kept).sum())
    assert found.removed > 0 or count < 20  # where all are neighbours of all, none stands out
    assert found.n == int(kept.sum())
    assert found.r == pytest.approx(np.corrcoef(a[kept], b[kept])[0, 1], rel=1e-12)
    assert found.r_all == pytest.approx(np.corrcoef(a, b)[0, 1], rel=1e-12)
    assert found.spearman == pytest.approx(scipy_stats.spearmanr(a[kept], b[kept]).statistic, rel=1e-12)


def test_many_equal_points_are_handled_without_a_warning() -> None:
    a, b = cloud(200, 0.8)
    a[:60], b[:60] = 0.0, 0.0  # LocalOutlierFactor alone rejects the neighbours of such a heap
    found = correlate(a, b)
    assert "60 points coincide" in found.notes[0]
    distinct = np.unique(np.stack([a, b], 1), axis=0)
    rejected = distinct[LocalOutlierFactor().fit_predict(distinct) == -1]
    assert found.removed == len(rejected)
    assert correlate(a.round(), b.round()).removed >= 0
    assert correlate([0.0] * 30 + [1.0] * 30, [0.0] * 30 + [1.0] * 30).r == 1.0


def test_dense_heaps_give_the_verdict_of_scikit_learn_without_its_warning() -> None:
    a, b = cloud(100, 0.8)
    a[:50] *= 1e-14
    b[:50] *= 1e-14
    found = correlate(a, b)
    with pytest.warns(UserWarning, match="Duplicate values"):
        kept = LocalOutlierFactor().fit_predict(np.stack([a, b], 1)) == 1
    assert found.n == int(kept.sum())


def test_a_group_is_seen_by_itself() -> None:
    a, b = cloud(200, 0.5)
    group = a > 0
    found = correlate(a, b, where=torch.from_numpy(group))
    alone = correlate(a[group], b[group])
    assert found == alone
    assert correlate(a, b, where=a > 100).reason == "r needs at least 3 points, and there are 0 in this group"


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize(("count", "rho"), [(20, 0.0), (60, 0.9), (300, 0.5)])
def test_the_interval_covers_the_true_correlation(count: int, rho: float) -> None:
    hits = 0
    for seed in range(300):
        found = correlate(*cloud(count, rho, seed), outliers="none", resamples=300, seed=seed)
        hits += found.low <= rho <= found.high
    assert 0.92 <= hits / 300 <= 0.98


def test_the_interval_agrees_with_fishers_for_normal_data() -> None:
    found = correlate(*cloud(2000, 0.8), outliers="none")
    width = np.tanh(np.arctanh(found.r) + 1.96 / math.sqrt(1997)) - np.tanh(
        np.arctanh(found.r) - 1.96 / math.sqrt(1997)
    )
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    narrow = correlate(*cloud(2000, 0.8), outliers="none", level=0.5)
    assert (narrow.high - narrow.low) / (found.high - found.low) == pytest.approx(0.6745 / 1.96, rel=0.02)


def noisy(count: int, probes: int, size: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A quantity, a correlate of it, and draws by probes that all samples share in part, like Hutchinson's."""
    generator = np.random.default_rng(seed)
    a, b = cloud(count, 0.9, seed)
    shared, own = generator.standard_normal(probes), generator.standard_normal((count, probes))
    return a, b, a[:, None] + size * np.exp(0.3 * a)[:, None] * (shared + own) / math.sqrt(2)


def test_noisy_probes_widen_the_interval() -> None:
    _, b, draws = noisy(300, 16, 3.0)
    points, both = correlate(draws.mean(1), b, outliers="none"), correlate(traces(draws), b, outliers="none")
    assert both.r == pytest.approx(points.r, rel=1e-12)
    assert both.high - both.low > 1.3 * (points.high - points.low)
    quiet = correlate(traces(draws, exact=True), b, outliers="none")
    assert (quiet.low, quiet.high) == pytest.approx((points.low, points.high), rel=1e-12)


def test_joint_resampling_covers_where_points_alone_do_not() -> None:
    reference = [noisy(4000, 16, 3.0, seed) for seed in range(1000, 1040)]
    target = math.tanh(np.mean([np.arctanh(np.corrcoef(d.mean(1), b)[0, 1]) for _, b, d in reference]))
    hits = {"points": 0, "both": 0}
    for seed in range(60):
        _, b, draws = noisy(400, 16, 3.0, seed)
        for name, a in (("points", draws.mean(1)), ("both", traces(draws))):
            found = correlate(a, b, outliers="none", resamples=200)
            hits[name] += found.low <= target <= found.high
    assert hits["both"] >= 0.9 * 60
    assert hits["points"] < 0.85 * 60


def test_disattenuation_recovers_the_noiseless_correlation() -> None:
    found, other, plain = [], [], []
    for seed in range(20):
        a, b, draws = noisy(500, 16, 3.0, seed)
        result = correlate(traces(draws), b, outliers="none", resamples=100)
        plain.append(result.r)
        found.append(result.disattenuated)
        # two estimates that share probes: their noise is correlated, which the plain r takes for a relation
        other.append(correlate(traces(draws), traces(draws - a[:, None] + b[:, None]), outliers="none").disattenuated)
    assert np.mean(plain) < 0.8
    assert np.mean(found) == pytest.approx(0.9, abs=0.02)
    assert np.mean(other) == pytest.approx(0.9, abs=0.03)
    part = dataclasses.replace(traces(draws - 7 * b[:, None]), values=torch.from_numpy(draws.mean(1)))
    assert correlate(part, b, outliers="none", resamples=100).disattenuated == pytest.approx(found[-1], rel=1e-9)
    hopeless = np.random.default_rng(0).standard_normal((4, 3)) * [[1], [-1], [1], [-1]]
    assert not abs(correlate(traces(hopeless), [1.0, 2.0, 3.0, 5.0], outliers="none").disattenuated) > 1


def test_probes_of_different_number_and_broken_probes() -> None:
    _, b, draws = noisy(100, 16, 1.0)
    found = correlate(traces(draws), traces(np.repeat(b[:, None], 5, 1)), outliers="none")
    assert found.low < found.r < found.high
    broken = traces(draws.copy())
    assert broken.draws is not None
    broken.draws[3, 2] = math.nan
    found = correlate(broken, b, outliers="none")
    assert "the probes of a are not all finite" in found.notes[0]
    assert found.low == pytest.approx(correlate(draws.mean(1), b, outliers="none").low, rel=1e-12)


def test_perfect_correlation_has_a_tight_interval() -> None:
    a = np.linspace(1, 2, 50)
    up, down = correlate(a, 2 * a + 1), correlate(a, -a)
    assert (up.r, down.r) == pytest.approx((1.0, -1.0), abs=1e-15)
    assert up.low > 1 - 1e-12
    assert down.high < -1 + 1e-12


def test_the_result_depends_on_the_seed_alone_and_is_quick() -> None:
    a, b = cloud(1000, 0.5)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = correlate(a, b, seed=1)
    start = time.perf_counter()
    again = correlate(a, b, seed=1)
    assert time.perf_counter() - start < 5  # 0.1 s on an idle core
    assert first == again
    assert first.low != correlate(a, b, seed=2).low
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (np.random.get_state()[1].tolist(), random.getstate())


# ---------------------------------------------------------------- what is undefined, and what is refused


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ([], [], "r needs at least 3 points, and there are 0"),
        ([1.0], [1.0], "there is 1"),
        ([1.0, 2.0], [1.0, 2.0], "there are 2"),
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], "all values of a are equal"),
        ([1.0, 2.0, 3.0], [0.1 + 0.2, 0.3, 0.3], "all values of b are equal"),
        ([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], "all values of a are equal"),
        (
            [1.0, math.nan, math.inf],
            [1.0, 2.0, 3.0],
            "a is NaN or infinite for 2 of the samples, the first being number 1",
        ),
    ],
)
def test_undefined_is_nan_with_a_reason(a: list[float], b: list[float], reason: str) -> None:
    found = correlate(a, b)
    assert reason in found.reason
    assert all(math.isnan(v) for v in (found.r, found.low, found.high, found.spearman, found.slope, found.r_all))
    assert "undefined" in str(found)
    again = Correlation.from_json(found.to_json())
    assert math.isnan(again.r)
    assert again.reason == found.reason


def test_undefined_after_removal_keeps_what_is_known() -> None:
    a = np.append(np.zeros(40), 50.0)
    b = np.append(np.linspace(0, 1, 40), 50.0)
    found = correlate(a, b)
    assert found.reason == "all values of a are equal after removal of 1 outliers"
    assert math.isnan(found.r)
    assert found.r_all > 0.9
    assert (found.n, found.removed) == (40, 1)


def test_orders_that_differ_are_refused() -> None:
    draws = np.random.default_rng(0).standard_normal((10, 4))
    values = torch.arange(10.0)
    margin = Margins(values, values, values, values, values > 0, values.long(), fingerprint="two")
    with pytest.raises(InputError, match="in a different order"):
        correlate(traces(draws, fingerprint="one"), margin)
    same = correlate(traces(draws, fingerprint="two"), margin, outliers="none")
    assert same.r == pytest.approx(np.corrcoef(draws.mean(1), np.arange(10))[0, 1])
    assert correlate(traces(draws, fingerprint="one"), values, outliers="none").r == same.r


@pytest.mark.parametrize(
    ("a", "options", "message"),
    [
        ([1.0, 2.0], {}, "the same samples, got 2 and 3 values"),
        (torch.zeros(3, 1), {}, r"a must hold one number per sample, got an array of shape \(3, 1\)"),
        (Estimate(1.0), {}, "a must hold one number per sample, got a result of type Estimate"),
        ("abc", {}, "a must hold one number per sample, got str"),
        ([1.0, 2.0, 3.0], {"outliers": "lofs"}, "unknown outlier rule 'lofs': did you mean 'lof'"),
        ([1.0, 2.0, 3.0], {"level": 95}, "a level between 0 and 1, got 95"),
        ([1.0, 2.0, 3.0], {"resamples": 3}, "resamples must be a whole number from 100 to 1,000,000, got 3"),
        ([1.0, 2.0, 3.0], {"seed": -1}, "seed must be a whole number from 0 to 4,000,000,000, got -1"),
        ([1.0, 2.0, 3.0], {"where": [0, 1, 1]}, "where must be a mask of 3 booleans, got int64 values"),
        ([1.0, 2.0, 3.0], {"where": [True]}, r"where must be a mask of 3 booleans, got bool values of shape \(1,\)"),
    ],
)
def test_bad_arguments_are_named(a: object, options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError, match=message):
        correlate(a, [1.0, 2.0, 4.0], **options)


# ---------------------------------------------------------------- the small ones


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30))
def test_kendall_and_skewness_equal_those_of_scipy(values: list[int]) -> None:
    others = [v * v - v for v in values]
    if len(set(values)) > 1:
        assert skewness(values) == pytest.approx(scipy_stats.skew(values), abs=1e-12)
    else:
        assert math.isnan(skewness(values))
    if len(set(values)) > 1 and len(set(others)) > 1:
        assert kendall(values, others) == pytest.approx(scipy_stats.kendalltau(values, others).statistic)
    else:
        assert math.isnan(kendall(values, others))


def test_skewness_and_kendall_are_nan_where_undefined() -> None:
    assert all(math.isnan(skewness(v)) for v in ([], [1.0], [2.0, 2.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]))
    assert math.isnan(kendall([1.0], [1.0]))
    assert math.isnan(kendall([1.0, math.nan, 2.0], [1.0, 2.0, 3.0]))
    with pytest.raises(InputError, match="the same samples, got 1 and 2"):
        kendall([1.0], [1.0, 2.0])


# ---------------------------------------------------------------- real data


def test_margins_of_a_softmax_regression_on_digits() -> None:
    x, y = load_digits(return_X_y=True)
    x = x / 16
    fitted = LogisticRegression(C=0.05, max_iter=500).fit(x[:1200], y[:1200])
    net = nn.Linear(64, 10).double()
    net.weight.data, net.bias.data = torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    found = margins(net, (inputs, targets), distance=2)
    assert torch.equal(found.correct, torch.from_numpy(fitted.predict(x) == y))
    logits = net(inputs).detach()
    trace, bound = aceht(inputs, logits), margin_bound(inputs, logits, targets)
    assert bool((trace <= bound).all())
    for group in (found.correct, ~found.correct):
        result = correlate(trace, bound, where=group)
        assert result.low <= result.r <= result.high
        assert result.n + result.removed == int(group.sum())
    right = correlate(trace, bound, where=found.correct)
    assert right.r > 0.9
    assert correlate(trace, found, where=found.correct).r < -0.8  # wide margins are flat
    assert found.distance is not None
    assert correlate(found.distance, found, outliers="none").r > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, r"seed must be a whole number from 0 to .*, got -1"),
        ({"seed": 0.5}, r"seed must be a whole number from 0 to .*, got 0.5"),
        ({"level": "x"}, "level must be a finite number, got 'x'"),
        ({"resamples": "x"}, "resamples must be a whole number, got 'x'"),
    ],
)
def test_bad_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        correlate([1.0, 2, 3, 4], [1.0, 2, 4, 3], **options)
    assert correlate([1.0, 2, 3, 4], [1.0, 2, 4, 3], seed=np.int64(3)).seed == 3  # type: ignore[arg-type]


def test_complex_numbers_are_not_cut_to_their_real_part() -> None:
    for numbers in (np.array([1j, 2, 3]), torch.tensor([1j, 2, 3])):
        with pytest.raises(InputError, match="b holds complex numbers"):
            correlate([1.0, 2, 3], numbers)


def test_values_at_the_ends_of_the_numbers() -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(size=100)
    b = a + 0.5 * generator.normal(size=100)
    expected = correlate(a, b)
    huge = correlate(a * 1e200, b * 1e200)
    assert huge.r == pytest.approx(expected.r)
    assert huge.outliers == expected.outliers
    half = torch.tensor(a).bfloat16()
    assert correlate(half, b).r == correlate(half.double(), b).r


# ---------------------------------------------------------------- many points


@pytest.mark.parametrize("count", [5, 22, 400])
@pytest.mark.parametrize("at_once", [7, 2**15])
def test_factors_are_those_of_scikit_learn_however_many_are_taken_at_once(
    count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outliers, "_AT_ONCE", at_once)
    cloud = np.random.default_rng(count).standard_normal((count, 2)) * [1.0, 30.0]
    cloud[: count // 4] = cloud[count // 4 : 2 * (count // 4)]  # some coincide
    fitted = LocalOutlierFactor(n_neighbors=min(20, count - 1), novelty=True).fit(cloud)
    assert np.allclose(outliers.factors(cloud), -fitted.negative_outlier_factor_, rtol=1e-9)


def test_outliers_of_many_points_take_no_tables_of_their_neighbours() -> None:
    """scikit-learn's own takes about a kilobyte a point."""
    cloud = np.random.default_rng(0).standard_normal((100_000, 2))
    outliers.inliers(cloud[:100])  # imports
    tracemalloc.start()
    kept, _ = outliers.inliers(cloud)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.9 < kept.mean() < 1
    assert peak < 350 * len(cloud)


def test_many_points_are_resampled_by_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is as wide as that of resampled points: 2,000 of them tell it to some 3 %."""
    draw = np.random.default_rng(1)
    x = draw.standard_normal(4000)
    y = 0.5 * x + draw.standard_t(6, 4000)
    whole = correlate(x, y, outliers="none")
    monkeypatch.setattr(correlation, "_MANY", 300)
    limit = correlate(x, y, outliers="none")
    assert limit.r == whole.r
    assert limit.high - limit.low == pytest.approx(whole.high - whole.low, rel=0.1)
    assert limit.high - limit.low != whole.high - whole.low


def _tokens(seed: int, sequences: int = 40, positions: int = 25) -> tuple[SampleTraces, torch.Tensor]:
    """Two columns of tokens without any correlation; each sequence has a level of its own in both."""
    draw = np.random.default_rng(seed)
    levels = draw.standard_normal((2, sequences, 1))
    x, y = torch.from_numpy((levels + 0.3 * draw.standard_normal((2, sequences, positions))).reshape(2, -1))
    owners = torch.arange(sequences).repeat_interleave(positions)
    return dataclasses.replace(traces(x[:, None].expand(-1, 2).numpy(), exact=True), sample=owners), y


@pytest.mark.parametrize("many", [False, True])
def test_tokens_are_resampled_by_whole_sequences(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    if many:
        monkeypatch.setattr(correlation, "_MANY", 300)
    together, apart = 0, 0
    for seed in range(150):
        column, other = _tokens(seed)
        found = correlate(column, other, outliers="none", resamples=200, seed=seed)
        together += found.low <= 0 <= found.high
        alone = correlate(column.values, other, outliers="none", resamples=200, seed=seed)
        apart += alone.low <= 0 <= alone.high
    assert together >= 0.9 * 150
    assert apart <= 0.5 * 150  # what was said of the positions


def test_three_sequences_leave_a_correlation_open() -> None:
    found = correlate(*_tokens(0, sequences=3), outliers="none")
    assert (found.low, found.high) == (-1, 1)
    assert found.notes == ("with 3 sequences, r may lie anywhere between -1 and 1",)


@pytest.mark.parametrize("share", [1e-6, 0.1, 0.5, 0.8413447, 0.975, 0.9999, 1 - 1e-9])
def test_quantiles_are_those_of_scipy_stats(share: float) -> None:
    degrees = np.array([0.3, 1.0, 1.5, 2.0, 5.5, 15.0, 999.0, 1e5, 1e8, 1e12, np.inf])
    np.testing.assert_allclose(
        quantiles.student(share, degrees), scipy_stats.t.ppf(share, degrees), rtol=1e-9, atol=1e-12
    )
    assert quantiles.normal(share) == pytest.approx(scipy_stats.norm.ppf(share), rel=1e-9, abs=1e-12)
    for dof in (1, 15, 1000, 1e6):
        assert quantiles.chi_squared(share, dof) == pytest.approx(scipy_stats.chi2.ppf(share, dof), rel=1e-8)
    for a, b in [(0.5, 0.7), (1.0, 2.0), (3.2, 1e6), (1e5, 2.0)]:
        assert quantiles.beta(share, a, b) == pytest.approx(scipy_stats.beta.ppf(share, a, b), rel=1e-8)
    assert np.isnan(quantiles.student(share, [0.0, -1.0, np.nan])).all()


def test_ranks_are_those_of_scipy_stats() -> None:
    values = np.random.default_rng(0).integers(0, 9, 50)
    np.testing.assert_array_equal(quantiles.ranks(values), scipy_stats.rankdata(values))
