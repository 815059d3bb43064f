"""Two models on the same samples: intervals that cover, verdicts that the parametrisation cannot turn."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.comparing import compare
from spiritlevel.errors import InputError

FAST = ["trace", "margin_mean", "input_distance"]


def trained(steps: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = points(200, seed=9)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
    return model


def points(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def test_the_better_model_is_advised_whatever_the_order() -> None:
    bad, good, data = trained(2), trained(150), points(200)
    one = compare(bad, good, data, names=("early", "late"), measures=FAST)
    two = compare(good, bad, data, names=("late", "early"), measures=FAST)
    assert one.advice.startswith("Trust late: it classifies")
    assert two.advice == one.advice
    assert one.row("accuracy").verdict == "b"
    assert one.row("accuracy").difference == pytest.approx(-two.row("accuracy").difference)
    assert one.rows[0].name == "accuracy"
    assert [row.name for row in one.rows][-1] == "trace"  # what the parametrisation moves comes last
    assert sl.Comparison.from_json(one.to_json()).to_json() == one.to_json()


def test_the_interval_of_a_mean_is_students_t_of_the_pairs() -> None:
    a, b, data = trained(2), trained(150), points(80)
    row = compare(a, b, data, measures=["margin_mean"]).row("margin_mean")
    first, second = sl.margins(a, data).signed.numpy(), sl.margins(b, data).signed.numpy()
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((expected.low, expected.high))
    assert row.how == "paired t"
    assert row.difference == pytest.approx(second.mean() - first.mean())


def test_the_same_function_in_other_coordinates_is_no_evidence() -> None:
    model, data = trained(150), points(100)
    scaled = sl.transforms.rescale_layers(model, {"0": 4.0, "2": 0.25}, data=data).model
    found = compare(model, scaled, data, measures=[*FAST, "layer_scaled_trace", "fisher_rao_norm"])
    trace = found.row("trace")
    assert not 0.5 < trace.ratio < 2
    assert trace.verdict == "not comparable"
    assert trace.factor > max(trace.ratio, 1 / trace.ratio)
    assert "no reason to trust one" in found.advice
    for name in ("accuracy", "loss", "margin_mean", "input_distance"):
        assert found.row(name).difference == pytest.approx(0, abs=1e-9)
    assert any(reason.startswith("Not comparable") and "trace (moved" in reason for reason in found.reasons)


def test_without_the_audit_nothing_that_can_be_moved_is_compared() -> None:
    a, b, data = trained(2), trained(150), points(60)
    row = compare(a, b, data, measures=["trace"], audit=False).row("trace")
    assert row.verdict == "not comparable"
    assert "the audit was left out" in row.note


def test_a_model_and_itself_are_equal() -> None:
    model, data = trained(20), points(50)
    found = compare(model, copy.deepcopy(model), data, measures=["margin_mean"])
    assert {row.verdict for row in found.rows} == {"equal"}


def test_paired_intervals_cover_the_truth() -> None:
    a, b, everything = trained(2), trained(30), points(4000)
    truth = float((sl.margins(b, everything).signed - sl.margins(a, everything).signed).mean())
    hits = 0
    for seed in range(40):
        row = compare(a, b, everything, measures=["margin_mean"], samples=60, seed=seed).row("margin_mean")
        hits += row.low <= truth <= row.high
    assert hits >= 33  # 38 expected; fewer than 33 has a chance below 1 in 100


def test_models_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="model 'second': the model Linear fails on inputs"):
        compare(trained(1), nn.Linear(3, 2), points(8), names=("first", "second"))
    with pytest.raises(InputError, match="two different names"):
        compare(trained(1), trained(1), points(8), names=("x", "x"))
    with pytest.raises(InputError, match="level between 0 and 1"):
        compare(trained(1), trained(1), points(8), level=95)
