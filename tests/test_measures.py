"""The registry and what all measures have in common: declared invariances, repetition, refusals, rows."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math

import measured
import pytest
import torch
from conftest import Untouched
from measured import Data, close, labelled, normal, plain_net, randomised, value
from torch import Tensor, nn

from spiritlevel import transforms
from spiritlevel.answers.auditing import audit
from spiritlevel.errors import InputError
from spiritlevel.measures import DEFAULT, MEASURES, TRANSFORMS, Setting, evaluate, select
from spiritlevel.results import Estimate, Result
from spiritlevel.transforms import Transformed

mlp, data = measured.mlp, measured.data  # fixtures


def test_a_head_of_zeros_leaves_the_rest_of_the_report() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    nn.init.zeros_(net[2].weight)  # type: ignore[index]
    points = normal(10, 3), torch.arange(10) % 3
    with pytest.raises(InputError, match="all weights of layer '2' are zero"):
        MEASURES["spectral_margin_mean"](net, points)
    rows = {row["name"]: row for row in evaluate(net, points, measures="all")}
    assert rows["spectral_margin_mean"]["kind"] == "undefined"
    assert "infinite distances" in rows["hidden_margin_median"]["reason"]
    assert rows["trace"]["kind"] == rows["relative_flatness"]["kind"] == "exact"


def test_a_measure_that_breaks_down_is_undefined_by_the_name_of_its_error(
    mlp: nn.Module, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (ZeroDivisionError("division by zero"), RuntimeError("no such kernel\nmore"), ValueError("domain")):

        def broken(setting: Setting, error: Exception = error) -> Estimate:
            raise error

        monkeypatch.setitem(MEASURES, "trace", dataclasses.replace(MEASURES["trace"], compute=broken))
        first, second = evaluate(mlp, data, measures=["trace", "weight_norm"])
        assert first["kind"] == "undefined"
        assert first["reason"] == f"failed with {type(error).__name__}: {str(error).splitlines()[0]}"
        assert second["kind"] == "exact"
        shared = Setting(mlp, data)
        shared.group = object()  # other ranks may wait
        with pytest.raises(type(error)):
            MEASURES["trace"].attempt(shared)

    def mistaken(setting: Setting) -> Estimate:
        raise KeyError("a mistake in the program")

    monkeypatch.setitem(MEASURES, "trace", dataclasses.replace(MEASURES["trace"], compute=mistaken))
    with pytest.raises(KeyError):
        evaluate(mlp, data, measures=["trace"])


@pytest.mark.parametrize("name", ["trace", "largest_eigenvalue", "margin_mean", "hidden_margin_q1", "input_distance"])
def test_a_setting_does_not_mix_two_states_of_a_model(name: str, mlp: nn.Module, data: Data) -> None:
    """It measures the parameters that it copied; what has to look at the module itself says that they differ."""
    net = copy.deepcopy(mlp)
    setting = Setting(net, data)
    norm = value(setting, "weight_norm")
    net[0].weight.data.mul_(2)  # type: ignore[index]
    assert close(value(setting, "weight_norm"), norm)
    if name.startswith("hidden"):
        with pytest.raises(InputError, match=r"0.weight of the model has changed"):
            MEASURES[name].compute(setting)
    else:
        assert close(value(setting, name), value(Setting(mlp, data), name))
    assert not close(value(Setting(net, data), name), value(Setting(mlp, data), name))


def normed_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


Case = tuple[Setting, dict[str, tuple[Transformed, Setting]]]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    result = []
    for make, hidden, last in ((plain_net, "2", "4"), (normed_net, "1", "3")):
        net = randomised(make(), seed=3)
        points = labelled(net, normal(40, 4, seed=9))
        channels = 2.0 ** torch.tensor([12.0, -9, 3, -2, -10, 5][: 5 if hidden == "2" else 6])
        changed = {
            "rescale_layers": transforms.rescale_layers(net, {hidden: 2.0**-10, last: 2.0**10}, data=points),
            "rescale_channels": transforms.rescale_layers(net, {hidden: channels}, data=points),
            "scale_last_layer": transforms.scale_last_layer(net, 2.0**-12, data=points),
            "rescale_all": transforms.rescale_all(net, 2.0**-30, data=points),
            "shift_logits": transforms.shift_logits(net, data=points, size=10.0),
            "split_units": transforms.split_units(net, data=points, size=0.5),
        }
        if hidden == "1":
            changed["scale_before_batchnorm"] = transforms.scale_before_batchnorm(net, {"0": 2.0**-10}, data=points)
            changed["fold_batchnorm"] = transforms.fold_batchnorm(net, data=points)
            changed["shift_norm_gain"] = transforms.shift_norm_gain(net, data=points, size=100.0)
        settings = {name: (item, Setting(item.model, points)) for name, item in changed.items()}
        result.append((Setting(net, points), settings))
    return result


def test_the_battery_leaves_no_transform_out(cases: list[Case]) -> None:
    elsewhere = {"mix_heads", "shift_attention_biases", "scale_gate", "mix_linear", "rotate_stream", "permute_units"}
    assert set(cases[1][1]) == set(TRANSFORMS) - elsewhere  # tests/test_audit_symmetries.py
    assert set(cases[0][1]) == set(cases[1][1]) - {"scale_before_batchnorm", "fold_batchnorm", "shift_norm_gain"}


# errors are counted: noise that is a little larger or smaller may misclassify the same points
COUNTED = {"pac_bayes_flatness", "pac_bayes_magnitude"}


@pytest.mark.parametrize("name", MEASURES)
def test_declared_invariance_is_what_is_measured(name: str, cases: list[Case]) -> None:
    measure = MEASURES[name]
    for setting, changed in cases:
        found = measure.compute(setting)
        before, moved = found.value, set()
        assert math.isfinite(before)
        for transform, (transformed, there) in changed.items():
            try:
                after = measure.compute(there).value
            except InputError:  # no noise of any size does it any more
                assert name in COUNTED, f"{name} is not defined after {transform}"
                moved.add(transform)
                continue
            assert math.isfinite(after), transform
            if not close(after, before, 1e-6):
                moved.add(transform)
            predicted = None if measure.predict is None else measure.predict(setting, transformed)
            if predicted is not None and not found.stderr:
                assert close(predicted, after, 1e-5), f"{transform}: predicted {predicted}, became {after}"
        declared = set(changed) - measure.invariant_to
        assert moved == declared if name not in COUNTED else {"rescale_layers", "scale_last_layer"} & moved


SAME_OUTPUTS = {
    name for name in MEASURES if name.startswith(("margin_m", "margin_q", "margin_s", "hidden_margin_", "variance_m"))
}


@pytest.mark.parametrize("name", MEASURES)
def test_what_an_affine_map_of_the_inputs_leaves(name: str) -> None:
    """What sees only the outputs of layers stays, and θᵀFθ: W'x' + b' = Wx + b along θ itself, too."""
    net = randomised(plain_net(), seed=3)
    inputs, targets = labelled(net, normal(40, 4, seed=9))
    result = transforms.input_map(net, normal(4, 4, seed=1) + 5 * torch.eye(4), normal(4, seed=2), data=inputs)
    assert result.inputs is not None
    before = MEASURES[name](net, (inputs, targets)).value
    after = MEASURES[name](result.model, (result.inputs(inputs), targets)).value
    assert math.isfinite(after)
    stays = name in SAME_OUTPUTS | {"fisher_rao_norm", "relative_flatness", "mean_confidence_gap"}
    stays |= name.startswith("signal_sharpness")
    assert name in COUNTED or close(after, before, 1e-6) == stays, f"{before} became {after}"


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_repeats_splits_and_leaves_no_trace(name: str, untouched: Untouched) -> None:
    measure = MEASURES[name]
    net = randomised(normed_net(), seed=1).train()
    inputs, targets = labelled(copy.deepcopy(net).eval(), normal(24, 4))
    with untouched(net):
        whole = measure(net, (inputs, targets), seed=2)
    pieces = [(inputs[:7], targets[:7]), (inputs[7:8], targets[7:8]), (inputs[8:], targets[8:])]
    parts = measure(net, pieces, seed=2)
    assert whole == measure(net, (inputs, targets), seed=2)
    assert math.isfinite(whole.value)
    assert not whole.reason
    assert close(parts.value, whole.value, 1e-6)
    assert isinstance(Result.from_json(whole.to_json()), Estimate)


class Wide(nn.Module):
    """Convolutions, batch norm, a residual sum, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.inner, self.outer = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = (x + self.outer(self.inner(x).relu())).relu()
        return self.last(nn.functional.max_pool2d(x, 2).flatten(1))


OF_OTHER_NETWORKS = {"mix_heads", "shift_attention_biases", "mix_linear", "scale_gate", "rotate_stream"}


@pytest.mark.slow
def test_the_battery_on_convolutions_and_residual_sums() -> None:
    """All measures, all transforms, by the audit itself."""
    net = randomised(Wide(), size=0.4)
    for buffer in (net.norm.running_mean, net.norm.running_var):  # type: ignore[union-attr]
        buffer.fill_(0.7)  # type: ignore[operator, union-attr]
    found = audit(net, labelled(net, normal(40, 1, 4, 4)), measures="all", transforms="all")
    assert set(found.skipped) == OF_OTHER_NETWORKS
    applied = TRANSFORMS.keys() - OF_OTHER_NETWORKS
    assert {(row.measure, row.transform) for row in found.rows} == set(itertools.product(MEASURES, applied))
    for row in found.rows:
        if row.declared:
            assert row.verdict == "invariant", str(row)
        elif row.measure not in COUNTED:
            unknown = row.before.status != "exact"  # what is known to a tolerance may move by less
            little = unknown and row.ratio == pytest.approx(1, rel=1e-3)
            assert little or row.verdict in (("changes", "unstable") if unknown else ("changes",)), str(row)
        if not math.isnan(row.predicted) and row.verdict == "changes":
            assert row.ratio == pytest.approx(row.predicted, rel=1e-4), str(row)


@pytest.mark.parametrize("name", MEASURES)
def test_every_entry_is_complete(name: str) -> None:
    measure = MEASURES[name]
    assert measure.name == name
    assert measure.meaning
    assert measure.formula
    assert measure.reference
    assert measure.cost in ("forward", "backward", "matvecs", "optimiser")
    assert measure.direction in ("sharper", "flatter", "wider", "larger")
    assert measure.invariant_to <= set(TRANSFORMS)
    assert measure.lower_bound == (measure.cost == "optimiser")
    assert ("lower bound" in str(measure)) >= measure.lower_bound


def test_selection() -> None:
    assert {measure.name for measure in select()} < set(MEASURES)
    assert [measure.name for measure in select("default")] == list(DEFAULT) == [measure.name for measure in select()]
    assert len(select("all")) == len(MEASURES)
    assert [measure.name for measure in select(["trace", "weight_norm", "trace"])] == ["trace", "weight_norm"]
    with pytest.raises(InputError, match="did you mean 'trace'"):
        select("trce")


def test_evaluate_gives_plain_rows_of_what_each_measure_says_alone(untouched: Untouched) -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    points = labelled(net, normal(12, 3))
    chosen = ["trace", "path_norm", "average_sharpness", "adaptive_sharpness_linf", "spectral_norm"]
    with untouched(net):
        rows = evaluate(net, points, measures=chosen, seed=3)
    assert [row["name"] for row in rows] == chosen
    assert [row["kind"] for row in rows] == ["exact", "undefined", "estimated", "lower bound", "converged"]
    assert math.isnan(rows[1]["value"])
    assert "ReLU networks only" in rows[1]["reason"]
    for row in rows[:1] + rows[2:]:
        alone = MEASURES[row["name"]](net, points, seed=3)
        assert (row["value"], row["stderr"]) == (alone.value, alone.stderr)
        assert row["seconds"] > 0


def test_measures_that_need_more_than_the_network_has_say_so(mlp: nn.Module, data: Data) -> None:
    with pytest.raises(InputError, match="a layer in front of its last one"):
        MEASURES["hidden_margin_median"](randomised(nn.Linear(3, 3)), data)
    normed = randomised(normed_net())
    points = labelled(normed, normal(8, 4))
    with pytest.raises(InputError, match="eval mode only"):
        MEASURES["path_norm"](normed, points, batch_norm="batch")
    with pytest.raises(InputError, match="no gradient of its own"):
        MEASURES["normalised_sharpness"](normed, points, batch_norm="batch")


def test_a_measure_alone_refuses_a_gradient_that_is_none() -> None:
    """Reports looked at the derivatives first; a measure that was called by itself did not."""

    class HalfDetached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return self.head(y * y.detach())

    data = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    for name in ("fisher_rao_norm", "empirical_fisher_trace"):
        with pytest.raises(InputError, match="not the derivative of its forward pass"):
            MEASURES[name](HalfDetached(), data)
