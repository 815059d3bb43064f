"""The error of a subset: influences against dense Hessians, limits against closed forms, and what says *unknown*."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.func import functional_call

import spiritlevel as sl
from spiritlevel.measures import DEFAULT, MEASURES, Measure, Setting
from spiritlevel.statistics.subsets import by_influences, by_jackknife, by_order, groups, mean_of, share_of


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long() + (inputs[:, 1] > 1).long()


def net(act: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 3)).double()


def dense(setting: Setting) -> Tensor:
    """The Hessian of every sample's own loss, (N, P, P), by autodiff twice."""
    inputs, labels = setting.data

    def loss(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(setting.model, setting.split(theta), (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    each = zip(inputs, labels, strict=True)
    found = [torch.autograd.functional.hessian(functools.partial(loss, x=x, y=y), setting.theta) for x, y in each]
    return torch.stack(found)


def influences(setting: Setting, name: str) -> Tensor:
    MEASURES[name].attempt(setting)
    values = MEASURES[name].sampling.values
    assert values is not None
    return values(setting)


def moved(name: str, sample: int, weight: float = 1e-4) -> float:
    """How a measure changes, by definition, if a little more of the data are like one sample."""
    inputs, labels = data()
    more = 200
    inputs, labels = inputs.repeat(more, 1), labels.repeat(more)
    extra = round(weight * len(labels))
    grown = torch.cat([inputs, inputs[sample].expand(extra, -1)]), torch.cat([labels, labels[sample].expand(extra)])
    before = MEASURES[name].attempt(Setting(net(), (inputs, labels))).value
    after = MEASURES[name].attempt(Setting(net(), grown)).value
    return (after - before) * len(grown[1]) / extra


def test_every_measure_says_how_the_error_of_a_subset_is_found() -> None:
    for each in MEASURES.values():
        assert each.sampling.how in ("no data", "mean", "influence", "order", "jackknife", "bracket", "unknown"), (
            each.name
        )
        assert bool(each.sampling.reason) == (each.sampling.how == "unknown"), each.name
    with pytest.raises(TypeError, match="sampling"):
        Measure("new", "", "", "", "forward", compute=lambda setting: sl.Estimate(0.0))  # type: ignore[call-arg]


def test_forms_and_products_of_groups_are_those_of_the_dense_hessians() -> None:
    setting = Setting(net(), data())
    each = dense(setting)
    v = torch.linspace(-1, 1, setting.problem.size, dtype=torch.float64)
    assert torch.allclose(setting.forms(v, 2 * v)[:, 1], 4 * torch.einsum("i,nij,j->n", v, each, v), atol=1e-10)
    found = list(setting.group_products(v))
    expected = [each[chosen].mean(0) @ v for chosen in groups(60, 0)]
    assert len(found) == 10
    assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-10)
    assert sorted(torch.cat(groups(60, 0)).tolist()) == list(range(60))


def test_the_influence_on_an_eigenvalue_and_its_bias_follow_from_the_dense_hessians() -> None:
    setting = Setting(net(), data())
    each = dense(setting)
    values, vectors = torch.linalg.eigh(each.mean(0))
    v = vectors[:, -1]
    found = influences(setting, "largest_eigenvalue")
    assert torch.allclose(found, torch.einsum("i,nij,j->n", v, each, v), atol=1e-8)
    products = torch.stack([each[chosen].mean(0) @ v for chosen in groups(60, 0)])
    across = products - torch.outer(products @ v, v)
    bias = float(across.square().sum()) / 10 / 9 / float(values[-1]) * (1 - 60 / 100)
    assert MEASURES["largest_eigenvalue"].sampling.bias(setting, 100) == pytest.approx(bias)
    plain = by_influences(float(values[-1]), found, 100)
    error = MEASURES["largest_eigenvalue"].subset_error(setting, float(values[-1]), 100)
    assert (error.low, error.high) == pytest.approx((plain.low - bias, plain.high))


def test_the_influence_on_the_frobenius_norm_is_the_product_with_the_mean() -> None:
    setting = Setting(net(), data())
    each = dense(setting)
    mean = each.mean(0)
    exact = torch.einsum("nij,ij->n", each, mean) / mean.norm()
    found = influences(setting, "frobenius_norm")
    assert np.corrcoef(found, exact)[0, 1] > 0.8  # from eight probes that all samples share
    assert 0.8 < float(found.std() / exact.std()) < 2
    wanted = float((each - mean).square().sum((1, 2)).mean()) / 59 / (2 * float(mean.norm()))
    assert MEASURES["frobenius_norm"].sampling.bias(setting, 10**9) == pytest.approx(wanted, rel=0.5)


@pytest.mark.parametrize(
    "name",
    [
        "trace",
        "mean_eigenvalue",
        "largest_eigenvalue",
        "spectral_norm",
        "quotient_norm",
        "box_sharpness_curvature",
        "empirical_fisher_trace",
        "fisher_rao_norm",
        "mean_aceht",
        "margin_bound",
        "margin_mean",
    ],
)
def test_influences_are_the_derivative_by_the_weight_of_a_sample(name: str) -> None:
    found = influences(Setting(net(), data()), name)
    for sample in (0, 7):
        assert float(found[sample] - found.mean()) == pytest.approx(moved(name, sample), rel=2e-2, abs=1e-4)


def test_influences_of_piecewise_linear_networks() -> None:
    setting = Setting(net(nn.ReLU), data())
    for name in ("layer_scaled_trace", "relative_flatness", "relative_flatness_sum", "fisher_trace"):
        value = MEASURES[name].attempt(setting).value
        assert float(influences(setting, name).mean()) == pytest.approx(value, rel=1e-9)


def test_limits_of_a_mean_of_a_quantile_and_of_the_jackknife() -> None:
    values = torch.linspace(0, 1, 101, dtype=torch.float64)
    error = stats.sem(values.numpy()) * math.sqrt(1 - 101 / 404)
    expected = stats.t.interval(0.95, 100, 7.0, error)
    assert by_influences(7.0, values, 404) == pytest.approx((error, *expected, ""))
    assert by_influences(7.0, values, 404, bias=0.5).low == pytest.approx(expected[0] - 0.5)
    half = stats.norm.ppf(0.975) * math.sqrt(101 * 0.25)
    found = by_order(0.5, values, 0.5, 10**12)
    assert (found.low, found.high) == pytest.approx((0.5 - half / 100, 0.5 + half / 100))
    without = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    error = math.sqrt(9 / 10 * sum((value - 5.5) ** 2 for value in without))
    assert by_jackknife(5.5, without, 100, 10**12).stderr == pytest.approx(error)
    assert by_jackknife(5.5, [math.nan, *without], 100, 200).reason


def test_what_is_not_known_says_why() -> None:
    report = sl.measure(net(), data(200), measures="all", parts=[], samples=40)
    for row in report.rows:
        low, high = row.interval
        assert math.isnan(low) == math.isnan(high) == bool(row.subset_error) or math.isnan(row.value.value), row.name
    reasons = {row.name: row.subset_error for row in report.rows}
    assert "may have a margin smaller by any amount" in reasons["margin_min"]
    assert not reasons["margin_q10"]
    thirty = sl.measure(net(), data(10**4), measures=["margin_q10", "margin_q50"], parts=[], samples=30)
    assert "30 samples do not reach far enough" in thirty.row("margin_q10").subset_error
    assert not thirty.row("margin_q50").subset_error
    few = sl.measure(net(), data(), measures=["trace", "weight_norm"], parts=[], samples=20)
    assert "it takes at least 30 samples, got 20" in few.row("trace").subset_error
    assert few.row("weight_norm").interval[0] == few.row("weight_norm").value.value
    assert math.isnan(few.fits["train"].loss.interval(data=True)[0])


def test_every_default_measure_of_a_subset_has_its_error() -> None:
    report = sl.measure(net(nn.ReLU).float(), (data(400)[0].float(), data(400)[1]), parts=[], samples=100)
    assert [row.name for row in report.rows] == list(DEFAULT)
    for row in report.rows:
        low, high = row.interval
        stated = low < row.value.value < high or row.name in ("weight_norm", "path_norm")
        assert stated != bool(row.subset_error), row.name
    unknown = [row.name for row in report.rows if row.subset_error]
    assert unknown == ["spectral_margin_mean"]
    assert "2 times as large on all 400" in report.row("spectral_margin_mean").subset_error


def test_a_maximum_lies_between_a_half_seen_from_the_other_and_its_own_samples() -> None:
    setting = Setting(net(), data())
    measure = MEASURES["ball_sharpness"]
    value = measure.attempt(setting).value
    delta = setting.along["ball_sharpness"][0]
    assert float(delta.norm()) == pytest.approx(0.05)
    assert setting.loss_at(setting.theta + delta) - setting.loss_at(setting.theta) == pytest.approx(value)
    error = measure.subset_error(setting, value, 600)
    rises = setting.losses_at(setting.theta + delta) - setting.losses
    assert error.high == pytest.approx(by_influences(value, rises, 600).high)
    assert 0 <= error.low < value


@pytest.mark.parametrize("name", ["input_distance", "input_distance_inf", "margin_q50"])
def test_a_quantile_of_a_subset_has_an_interval_in_a_report_as_in_a_comparison(name: str) -> None:
    """It was (nan, nan) in a report while `compare` drew one."""
    model, other, all_of_them = net(nn.ReLU), net(nn.Tanh), data(400)
    report = sl.measure(model, all_of_them, samples=100, measures=[name], parts=[])
    low, high = report.row(name).interval
    assert low < report.row(name).value.value < high
    assert low <= MEASURES[name](model, all_of_them).value <= high
    assert report.row(name).subset_error == ""
    row = sl.compare(model, other, all_of_them, samples=100, measures=[name], audit=False).row(name)
    assert row.low < row.difference < row.high
    few = sl.measure(model, all_of_them, samples=20, measures=[name], parts=[]).row(name)
    assert all(map(math.isnan, few.interval))
    assert "it takes at least 30 samples, got 20" in few.subset_error


def test_shares_and_means_of_a_subset_carry_its_error() -> None:
    correct = torch.tensor([1.0] * 50 + [0.0] * 10, dtype=torch.float64)
    found = share_of(correct, 240)
    right = 50 / 60 * 80  # only the other 180 of 240 are unknown, so 60 count as 60 / (1 − 1/4)
    assert found.data_limits == pytest.approx(
        (stats.beta.ppf(0.025, right, 80 - right + 1), stats.beta.ppf(0.975, right + 1, 80 - right))
    )
    assert found.data_stderr == pytest.approx(math.sqrt(50 / 60 * 10 / 60 / 60 * (1 - 60 / 240)), rel=0.1)
    assert share_of(torch.ones(60), 240).data_stderr  # none wrong among sixty does not make all right
    assert share_of(correct, 60) == sl.Estimate(50 / 60)
    values = torch.linspace(0, 1, 60, dtype=torch.float64)
    assert mean_of(values, 240).data_stderr == pytest.approx(stats.sem(values.numpy()) * math.sqrt(1 - 60 / 240))
    assert mean_of(values, 60).data_limits is None


def test_the_cost_of_an_error_is_a_number_that_the_time_limit_counts() -> None:
    inputs, labels = data()
    exact, estimated = Setting(net(nn.ReLU), (inputs, labels)), Setting(net(), (inputs, labels))
    for name in ("layer_scaled_trace", "fisher_trace", "empirical_fisher_trace"):
        assert MEASURES[name].subset_passes(exact) == 0 < MEASURES[name].subset_passes(estimated), name
    assert MEASURES["margin_mean"].subset_passes(exact) == 0
    for measure in MEASURES.values():
        repeats = {"jackknife": 9.0, "bracket": 1.0}.get(measure.sampling.how, 0.0)
        if measure.sampling.limits is not None:  # all groups from the same passes
            repeats = min(repeats, 1.0)
        assert measure.subset_passes(estimated) >= repeats * measure.forward_passes(estimated)
    assert MEASURES["frobenius_norm"].subset_passes(estimated) >= 24 * 4
