"""Per-sample traces: exact against dense autodiff and high precision arithmetic, estimates against their own errors."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import mpmath
import naive
import numpy as np
import pytest
import torch
import zoo
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel import data
from spiritlevel.binding import losses
from spiritlevel.binding.context import Context
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.papers import networks as models
from spiritlevel.samples import traces
from spiritlevel.samples.probing import along_forward, along_reverse, probe
from spiritlevel.samples.traces import sample_traces, trace
from spiritlevel.watching import convolution_norms, norm_rules, taps

# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("name", {**zoo.EXACT, **zoo.CHAINS})
def test_exact_traces_equal_dense_hessians(name: str) -> None:
    make, shape = {**zoo.EXACT, **zoo.CHAINS}[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape)
    result = sample_traces(model, (inputs, targets), per_layer=True, method="exact", batch_size=5)
    expected = naive.block_traces(model, inputs, targets)
    assert result.exact
    assert set(result.layers) == set(expected)
    total = torch.stack(list(expected.values())).sum(0)
    for parameter, values in expected.items():
        torch.testing.assert_close(result.layers[parameter], values, rtol=1e-10, atol=1e-12 * float(total.max()))
    torch.testing.assert_close(result.values, total, rtol=1e-10, atol=0)
    assert result.mean().stderr == 0


@pytest.mark.parametrize("loss", ["squared_error", "exponential"])
@pytest.mark.parametrize("name", ["residual", "pooled", "tanh"])
def test_other_losses(name: str, loss: str) -> None:
    make, shape = {**zoo.EXACT, **zoo.CHAINS}[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape)
    result = sample_traces(model, (inputs, targets), loss=loss)
    torch.testing.assert_close(result.values, naive.total_traces(model, inputs, targets, loss), rtol=1e-10, atol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_binary_cross_entropy_of_one_logit(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1), *([nn.Flatten(0)] if flat else [])).double()
    inputs, targets = zoo.sample_data(zoo.FLAT, classes=2)
    result = sample_traces(model, (inputs, targets), loss="binary_cross_entropy")
    assert result.exact
    expected = naive.total_traces(model, inputs, targets, "binary_cross_entropy")
    torch.testing.assert_close(result.values, expected, rtol=1e-10, atol=0)


def test_a_loss_of_ones_own_with_factors_is_exact() -> None:
    class Half:
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 0.5 * losses.CrossEntropy().values(outputs, targets)

        def factors(self, outputs: Tensor, targets: Tensor) -> Any:
            for weight, vector in losses.CrossEntropy().factors(outputs, targets):
                yield 0.5 * weight, vector

    model, batch = nn.Linear(6, 3).double(), zoo.sample_data(zoo.FLAT)
    half, full = sample_traces(model, batch, loss=Half()), sample_traces(model, batch)
    assert half.exact
    torch.testing.assert_close(2 * half.values, full.values)


def test_subset_of_parameters() -> None:
    model, (inputs, targets) = zoo.randomised(zoo.Residual()), zoo.sample_data(zoo.FLAT)
    expected = naive.block_traces(model, inputs, targets)
    result = sample_traces(model, (inputs, targets), params=["first", "scale"], per_layer=True)
    assert list(result.layers) == ["scale", "first.weight", "first.bias"]
    for name, values in result.layers.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-10, atol=0)


def test_frozen_parameters_are_left_out_and_unused_ones_are_zero() -> None:
    model, batch = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double(), zoo.sample_data(zoo.FLAT)
    model.register_parameter("unused", nn.Parameter(torch.randn(3).double()))
    model[0].requires_grad_(False)
    result = sample_traces(model, batch, per_layer=True)
    assert list(result.layers) == ["unused", "2.weight", "2.bias"]
    assert not result.layers["unused"].any()


def exact_aceht(inputs: Tensor, logits: Tensor) -> float:
    """(‖x‖² + 1)(1 − ΣS²) of one sample in 60 digits."""
    with mpmath.workdps(60):
        exponentials = [mpmath.exp(mpmath.mpf(value)) for value in logits.double().tolist()]
        total = mpmath.fsum(exponentials)
        pairs = mpmath.fsum(
            a * b for i, a in enumerate(exponentials) for j, b in enumerate(exponentials) if i != j
        )  # 1 − ΣS² as a sum of positive terms
        norm = mpmath.fsum(mpmath.mpf(value) ** 2 for value in inputs.double().tolist())
        return float((norm + 1) * pairs / total**2)


@pytest.mark.parametrize("margin", [8, 15, 18, 25, 40, 80])
def test_float32_is_right_at_large_margins_given_the_logits(margin: int) -> None:
    model = nn.Linear(4, 10)
    inputs = torch.randn(6, 4)
    with torch.no_grad():
        model.bias[3] += margin + float((inputs @ model.weight.T).max() - (inputs @ model.weight.T).min())
    logits = model(inputs).detach()
    for targets in (torch.full((6,), 3), torch.arange(6) % 3):  # correct and misclassified
        result = sample_traces(model, (inputs, targets))
        expected = torch.tensor([exact_aceht(x, z) for x, z in zip(inputs, logits, strict=True)], dtype=torch.float64)
        torch.testing.assert_close(result.values, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("margin", [5, 20, 40])
def test_float32_deep_networks_follow_float64_to_margin_40(margin: int) -> None:
    model = models.lenet5(width=0.5)
    inputs, targets = (tensor[:40] for tensor in data.load("fashion-mini").train)
    logits = model(inputs)
    spread = logits.sort(1, descending=True).values
    with torch.no_grad():
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        factor = margin / float((spread[:, 0] - spread[:, 1]).max())
        last.weight *= factor
        last.bias *= factor
    single = sample_traces(model, (inputs, targets)).values
    double = sample_traces(model.double(), (inputs, targets)).values
    torch.testing.assert_close(single, double, rtol=1e-4, atol=0)


def test_autodiff_fails_where_we_do_not() -> None:
    """The trap itself: float32 autodiff gives half the trace at a margin of 25."""
    model, inputs, targets = nn.Linear(1, 2), torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([25.0, 0.0]))
    hessian = torch.func.hessian(lambda b: F.cross_entropy(b[None], targets))(model.bias.detach())
    ours = sample_traces(model, (inputs, targets)).values
    assert hessian.trace() == pytest.approx(0.5 * float(ours), rel=1e-3)


def test_real_data_trained_network() -> None:
    inputs, targets = data.load("digits").train
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.double()
    confident = model(inputs.double()).softmax(1).max(1).values
    chosen = torch.cat([confident.argsort()[:12], confident.argsort()[400:412]])  # misclassified ones among them
    assert (model(inputs[chosen].double()).argmax(1) != targets[chosen]).any()
    result = sample_traces(model, (inputs[chosen], targets[chosen]))
    expected = naive.total_traces(model, inputs[chosen].double(), targets[chosen])
    torch.testing.assert_close(result.values, expected, rtol=1e-10, atol=0)


# ---------------------------------------------------------------- passes=k


def test_enough_passes_are_exact() -> None:
    model, batch = zoo.many_classes()
    exact = sample_traces(model, batch)
    for passes in (10, 11, 50):
        result = sample_traces(model, batch, passes=passes)
        assert result.exact
        torch.testing.assert_close(result.values, exact.values)


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_passes_are_unbiased_and_their_intervals_cover(passes: int) -> None:
    model, batch = zoo.many_classes()
    exact = sample_traces(model, batch)
    runs = [sample_traces(model, batch, passes=passes, seed=seed) for seed in range(100)]
    values = torch.stack([run.values for run in runs])
    assert not runs[0].exact
    error = values.mean(0) - exact.values
    assert float((error / (values.std(0) / 10).clamp_min(1e-12 * exact.values)).abs().max()) < 4.5
    several = zoo.many_classes(count=60)
    truth = float(sample_traces(*several).mean())
    means = [sample_traces(*several, passes=passes, seed=seed).mean() for seed in range(100)]
    limits = [mean.interval(0.95) for mean in means if not math.isnan(mean.stderr)]
    assert len(limits) >= 90
    assert np.mean([low <= truth <= high for low, high in limits]) >= 0.94
    actual = values.std(0)
    claimed = torch.stack([run.stderr.square() for run in runs]).mean(0).sqrt()
    assert bool((claimed >= 0.8 * actual).all())  # a bound on the error, not a guess


def test_more_than_two_thousand_classes_need_passes() -> None:
    model = nn.Linear(3, 2500)
    batch = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(InputError, match="2500 outputs take 2499 backward passes"):
        sample_traces(model, batch, method="exact")
    result = sample_traces(model, batch)
    assert result.method == "passes=8"
    assert bool((sample_traces(model, batch, method="exact", passes=2).stderr > 0).all())


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("name", ["tanh conv", "tied", "layer norm", "attention", "branching"])
def test_estimates_agree_with_dense_hessians_within_their_errors(name: str) -> None:
    make, shape, _ = zoo.PROBED[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 8)
    result = sample_traces(model, (inputs, targets), probes=400, batch_size=8)
    expected = naive.total_traces(model, inputs, targets)
    assert not result.exact
    assert float(((result.values - expected) / result.stderr).abs().max()) < 4.5
    mean = result.mean()
    assert abs(mean.value - float(expected.mean())) < 4.5 * mean.stderr


def test_probing_layer_by_layer() -> None:
    make, shape, _ = zoo.PROBED["tied"]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 6)
    result = sample_traces(model, (inputs, targets), probes=200, per_layer=True)
    hessian, start = naive.mean_hessian(model, inputs, targets), 0
    for name, parameter in model.named_parameters():
        block = hessian[start : start + parameter.numel(), start : start + parameter.numel()]
        start += parameter.numel()
        # the variance of a Rademacher probe is twice the squares off the diagonal
        stderr = math.sqrt(2 * float(block.square().sum() - block.diagonal().square().sum()) / 200)
        assert abs(float(result.layers[name].mean() - block.trace())) < 4.5 * stderr + 1e-12
    torch.testing.assert_close(sum(result.layers.values()), result.values)


def test_padding_of_an_embedding_has_no_gradient() -> None:
    model = zoo.Words().double()
    model.embed.padding_idx = 2
    inputs, targets = torch.tensor([[2, 2, 2]]), torch.tensor([0])
    layers = sample_traces(model, (inputs, targets), per_layer=True).layers
    assert float(layers["embed.weight"]) == 0
    assert float(layers["head.weight"]) > 0


@pytest.mark.parametrize("name", ["tanh conv", "attention", "layer norm"])
def test_forward_and_reverse_mode_agree(name: str) -> None:
    make, shape, _ = zoo.PROBED[name]
    model, (inputs, _) = zoo.randomised(make()), zoo.sample_data(shape, 5)
    problem = Problem(model)
    with problem.active():
        direction = probe(problem.params, 3, 0)
        for ours, other in zip(
            along_forward(problem, inputs, direction), along_reverse(problem, inputs, direction), strict=True
        ):
            torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-11)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(zoo.ReverseOnly.apply(self.inner(x)))


def test_operations_without_forward_derivatives_fall_back_to_reverse_mode_and_say_so() -> None:
    model, (inputs, targets) = Squares().double(), zoo.sample_data(zoo.FLAT, 6)
    result = sample_traces(model, (inputs, targets), probes=200)
    assert any("reverse mode" in note for note in result.notes)

    class Written(Squares):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x) ** 2)

    twin = Written().double()
    twin.load_state_dict(model.state_dict())
    expected = naive.total_traces(twin, inputs, targets)
    assert float(((result.values - expected) / result.stderr).abs().max()) < 4.5


@pytest.mark.parametrize(
    ("runs", "low", "high"), [(80, 0.89, 1.0), pytest.param(300, 0.92, 0.98, marks=pytest.mark.slow)]
)
def test_intervals_of_the_mean_and_of_samples_cover(runs: int, low: float, high: float) -> None:
    model, (inputs, targets) = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)), zoo.sample_data(zoo.FLAT, 10)
    model = model.double()
    expected = naive.total_traces(model, inputs, targets)
    draws = sample_traces(model, (inputs, targets), probes=4 * 20 * runs, method="hutchinson").draws  # groups of four
    assert draws is not None
    means = draws.mean(0).view(runs, 20)
    half = stats.t.ppf(0.975, 19) * means.std(1) / math.sqrt(20)
    assert low <= float(((means.mean(1) - expected.mean()).abs() <= half).double().mean()) <= high
    count = 20 * runs // 64
    several = draws[:, : 64 * count].view(len(targets), count, 64)
    half = stats.t.ppf(0.975, 63) * several.std(2) / 8
    assert float(((several.mean(2) - expected[:, None]).abs() <= half).double().mean()) >= 0.90


def test_relative_error_drives_the_number_of_probes() -> None:
    make, shape, _ = zoo.PROBED["tied"]
    model, batch = zoo.randomised(make()), zoo.sample_data(shape, 8)
    result = sample_traces(model, batch, rel_err=0.15)
    mean = result.mean()
    assert mean.stderr < 0.3 * abs(mean.value)
    assert result.probes is not None
    assert int(result.probes[0]) >= 16
    again = sample_traces(model, batch, probes=int(result.probes[0]))
    torch.testing.assert_close(
        result.values, again.values, rtol=1e-12, atol=1e-12
    )  # the pilot's probes are the first of all
    seeds = [sample_traces(model, batch, rel_err=0.15, seed=seed) for seed in range(12)]
    missed = [found.mean().stderr > 0.15 * abs(found.mean().value) for found in seeds]
    assert [any("rel_err=0.15 was missed" in note for note in found.notes) for found in seeds] == missed
    assert any(missed)
    assert not all(missed)


def test_batch_statistics_by_probes() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
    inputs, targets = zoo.sample_data(zoo.FLAT, 10)
    result = trace(model, (inputs, targets), batch_norm="batch", probes=600)
    expected = naive.mean_hessian(model, inputs, targets, batch_norm="batch").trace()
    assert abs(result.value - float(expected)) < 4.5 * result.stderr
    pieces = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    assert sample_traces(model, pieces, batch_norm="batch", probes=2).batches == (6, 4)  # they define the result
    assert sample_traces(model, pieces, probes=2, method="hutchinson").batches is None
    with pytest.raises(NotExactError, match="couples the samples"):
        sample_traces(model, (inputs, targets), batch_norm="batch", method="exact")


# ---------------------------------------------------------------- PyHessian's rule


def test_pyhessian_rule_sample_by_sample() -> None:
    """The rule written out for one sample after the other, on the same probes."""
    make, shape, _ = zoo.PROBED["tanh conv"]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 10)
    result = sample_traces(model, (inputs, targets), method="pyhessian", seed=5, batch_size=4)
    hessians = naive.dense_hessian(model, inputs, targets)
    problem = Problem(model)
    negative = 0
    for n, hessian in enumerate(hessians):
        running, values = 0.0, []
        for index in range(100):
            v = torch.cat([part.reshape(-1) for part in probe(problem.params, 5, index).values()])
            values.append(float(v @ hessian @ v))
            if abs(np.mean(values) - running) / (running + 1e-6) < 1e-3:
                negative += running + 1e-6 < 0
                break
            running = float(np.mean(values))
        assert float(result.values[n]) == pytest.approx(np.mean(values), rel=1e-8)
        assert int(result.probes[n]) == len(values)
    assert result.negative_stops == negative / len(targets)
    assert math.isnan(result.mean().stderr)


# ---------------------------------------------------------------- what must not matter


def test_a_first_convolution_is_recorded_together_with_its_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the promise of an output in between makes it real, and a recording takes half as long again."""
    recorders: list[taps.Recorder] = []
    before = taps.Recorder.__init__

    def noted(self: taps.Recorder, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        recorders.append(self)

    monkeypatch.setattr(taps.Recorder, "__init__", noted)
    torch.manual_seed(0)
    net, x = sl.models.lenet5(), torch.randn(8, 1, 28, 28)
    sl.sample_traces(net, (x, torch.arange(8)))
    assert len(recorders) >= 3  # as it is, with promises, and the data
    assert not any(each.spoiled for each in recorders)
    assert recorders[-1].pooled == {"0.weight"}
    assert recorders[-1].made == {"0.weight": None}


@pytest.mark.parametrize("name", ["residual", "pooled", "tanh", "tied"])
def test_batch_size_split_order_and_threads_change_nothing(name: str) -> None:
    make, shape = ({**zoo.EXACT, **zoo.CHAINS} | {k: v[:2] for k, v in zoo.PROBED.items()})[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 11)
    base = sample_traces(model, (inputs, targets))
    order = torch.randperm(11)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = sample_traces(model, (inputs, targets))
    finally:
        torch.set_num_threads(threads)
    shuffled = sample_traces(model, (inputs[order], targets[order]))
    others = [
        sample_traces(model, (inputs, targets), batch_size=1),
        sample_traces(model, DataLoader(TensorDataset(inputs, targets), batch_size=4)),
        sample_traces(model, [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]),
        sample_traces(model, TensorDataset(inputs, targets)),
        single,
    ]
    for other in others:
        torch.testing.assert_close(other.values, base.values, rtol=1e-11, atol=1e-13)
        assert other.fingerprint == base.fingerprint
        assert torch.equal(other.targets, targets)
    torch.testing.assert_close(shuffled.values, base.values[order], rtol=1e-11, atol=1e-13)
    assert shuffled.fingerprint != base.fingerprint


@pytest.mark.parametrize("passes", [None, 1])
@pytest.mark.parametrize("name", zoo.EXACT)
def test_batches_side_by_side_are_those_one_by_one_and_the_model_is_called_in_one_thread(
    name: str, passes: int | None
) -> None:
    make, shape = zoo.EXACT[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 12)
    callers: set[int] = set()
    model.register_forward_pre_hook(lambda *_: callers.add(threading.get_ident()))
    found = []
    threads = torch.get_num_threads()
    for number in (1, 4):
        torch.set_num_threads(number)
        try:
            found.append(sample_traces(model, (inputs, targets), batch_size=2, passes=passes, per_layer=True))
        finally:
            torch.set_num_threads(threads)
    torch.testing.assert_close(found[1].values, found[0].values, rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1].stderr, found[0].stderr, rtol=1e-13, atol=0)
    for layer, values in found[0].layers.items():
        torch.testing.assert_close(found[1].layers[layer], values, rtol=1e-13, atol=1e-300)
    assert callers == {threading.get_ident()}


def test_one_sample_and_duplicated_samples() -> None:
    model, (inputs, targets) = zoo.randomised(zoo.Residual()), zoo.sample_data(zoo.FLAT)
    alone = sample_traces(model, (inputs[:1], targets[:1])).values
    twice = sample_traces(model, (inputs[:1].repeat(4, 1), targets[:1].repeat(4))).values
    torch.testing.assert_close(twice, alone.repeat(4))


def test_the_trace_of_the_mean_takes_the_same_options_and_hands_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inspect.signature(trace).parameters == inspect.signature(sample_traces).parameters
    given = {name: object() for name in inspect.signature(trace).parameters}
    handed_on: dict[str, Any] = {}
    context = Context(nn.Linear(6, 3).double(), zoo.sample_data(zoo.FLAT, 4))
    own = traces.trace_in

    def bound(model: Any, data: Any, **options: Any) -> Context:
        handed_on.update(options, model=model, data=data)
        return context

    def spy(found: Context, **options: Any) -> Any:
        handed_on.update(options)
        return own(found)

    monkeypatch.setattr(traces, "Context", bound)
    monkeypatch.setattr(traces, "trace_in", spy)
    handing_on = inspect.unwrap(trace)  # the arguments are not what their types say
    assert handing_on(given.pop("model"), given.pop("data"), **given).exact
    assert {name: handed_on[name] for name in given} == given


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("function", [sl.sample_traces, sl.trace, sl.hessian, sl.margins, sl.measure])
@pytest.mark.parametrize("bad", [0, 7, 11])
def test_the_sample_that_cannot_be_measured_is_named_by_its_place_in_the_data(function: Any, bad: int) -> None:
    """Also where a look at a few samples from all over the data finds it first."""
    inputs, labels = torch.randn(12, 4, 3), torch.arange(48).reshape(12, 4) % 3
    per_position = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Transposed())
    spoilt = inputs.clone()
    spoilt[bad, 1, 2] = math.nan
    with pytest.raises(InputError, match=rf"the input of sample {bad} is NaN or infinite"):
        function(per_position, (spoilt, labels))
    labels[bad] = -100
    with pytest.raises(InputError, match=rf"sample {bad} has no label that counts"):
        function(per_position, (inputs, labels))


def test_a_sample_that_is_no_number_is_no_wrong_derivative() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
    for bad in range(12):
        inputs = torch.randn(12, 3)
        inputs[bad, 1] = math.nan
        for method in ("hutchinson", "pyhessian"):
            with pytest.raises(InputError, match=rf"the input of sample {bad} is NaN or infinite"):
                sample_traces(model, (inputs, torch.arange(12) % 3), method=method)


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class MixesSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.head(torch.relu(y - y.mean(0)))


@pytest.mark.parametrize(
    ("model", "change", "options", "message"),
    [
        (nn.Linear(6, 3), lambda x, y: (x, y + 5), {}, r"target \d+ .* outside the model's 3 classes"),
        (nn.Linear(6, 3), lambda x, y: (x / 0, y), {}, "input of sample 0 is NaN or infinite"),
        (nn.Linear(6, 3), lambda x, y: (x[:0], y[:0]), {}, "data are empty"),
        (nn.Linear(6, 1), lambda x, y: (x, y), {}, "use loss='binary_cross_entropy'"),
        (nn.Linear(6, 3).requires_grad_(False), lambda x, y: (x, y), {}, "no parameter that requires grad"),
        (nn.Unflatten(1, (2, 3)), lambda x, y: (x, y), {}, "has no parameters"),
        (nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3))), lambda x, y: (x, y), {}, "class for each pos"),
        (MixesSamples(), lambda x, y: (x, y), {}, "depends on the other samples"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"method": "exat"}, "did you mean 'exact'"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"loss": "cross-entropy"}, "did you mean 'cross_entropy'"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"probes": 1}, "at least 2"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"passes": -1}, "passes must be"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"passes": 1, "method": "hutchinson"}, "passes= belongs to exact"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"rel_err": 0.0}, "rel_err must be"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"rel_err": 0.1, "probes": 5}, "not both"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"seed": -1}, "seed must be"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"batch_size": 0}, "batch_size must be"),
        (nn.Linear(6, 3), lambda x, y: (x, y), {"memory": "lots"}, "memory must be"),
        (nn.Linear(6, 3), lambda x, y: iter([(x, y)]), {}, "only once"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(model: nn.Module, change: Any, options: dict[str, Any], message: str) -> None:
    inputs, targets = zoo.sample_data(zoo.FLAT)
    with pytest.raises(InputError, match=message) as caught:
        sample_traces(model, change(inputs.float(), targets), **options)
    assert "\n" not in str(caught.value)


def test_a_shuffling_loader_is_read_in_the_order_of_its_data_set() -> None:
    net, data = nn.Linear(6, 3).double(), zoo.sample_data(zoo.FLAT)
    found = sample_traces(net, DataLoader(TensorDataset(*data), shuffle=True))
    torch.testing.assert_close(found.values, sample_traces(net, data).values)
    assert found.fingerprint == sample_traces(net, data).fingerprint
    assert any("the data loader shuffles" in note for note in found.notes)


@pytest.mark.parametrize("name", zoo.PROBED)
def test_not_exact_names_the_culprit(name: str) -> None:
    make, shape, culprit = zoo.PROBED[name]
    model, batch = zoo.randomised(make()), zoo.sample_data(shape)
    with pytest.raises(NotExactError, match=culprit):
        sample_traces(model, batch, method="exact")
    with pytest.raises(NotExactError, match="passes= needs exact terms"):
        sample_traces(model, batch, passes=1)


class _ReadsTwice(nn.Module):
    """The first convolution feeds a pooling and something else."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.conv, self.head, self.second = nn.Conv2d(2, 3, 3), nn.Linear(3 * 4, 3), second

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.conv(inputs)
        pooled = F.max_pool2d(torch.relu(hidden), 2)
        if self.second == "mean":
            pooled = pooled + hidden.mean((2, 3), keepdim=True)
        elif self.second == "pooling":
            pooled = pooled + F.max_pool2d(hidden, 2, 2)
        elif self.second == "shape":
            pooled = pooled * hidden.shape[1]
        return self.head(pooled.flatten(1))


POOLED: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "plain": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)), (2, 6, 6)),
    "relu, padding, no bias": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)
        ),
        (2, 6, 7),
    ),
    "overlapping, strided, oblong": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 2, (3, 2), stride=(1, 2)), nn.MaxPool2d((2, 2), stride=(2, 1)), nn.Flatten(), nn.Linear(12, 3)
        ),
        (1, 6, 9),
    ),
    "two of them": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 3, 2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        (1, 8, 8),
    ),
    "large cells, padded pooling": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(18, 3)),
        (1, 6, 6),
    ),
    "read by a mean too": lambda: (_ReadsTwice("mean"), (2, 6, 6)),
    "pooled twice": lambda: (_ReadsTwice("pooling"), (2, 6, 6)),
    "asked for its shape": lambda: (_ReadsTwice("shape"), (2, 6, 6)),
}


@pytest.mark.parametrize("name", POOLED)
def test_a_first_convolution_and_its_pooling_as_one_product(name: str) -> None:
    torch.manual_seed(0)
    model, shape = POOLED[name]()
    model = model.double()
    inputs, targets = torch.randn(5, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    inputs[0, :, 2:] = 0  # a blank part: equal values in a cell
    found = sample_traces(model, (inputs, targets), method="exact", per_layer=True)
    expected = naive.block_traces(model, inputs, targets)
    for parameter, values in expected.items():
        torch.testing.assert_close(found.layers[parameter], values, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "padding"),
    [
        ((3, 3), 1, 1, 1), ((3, 2), 1, 1, (1, 0)), ((3, 3), 2, 1, 1), ((2, 3), 1, 2, 2), ((3,), 2, 1, 1),
        ((2, 2), 3, 1, 3), ((5,), 1, 2, 6), ((3, 3), 1, 1, 0), ((2, 2), 1, 1, "same"),
    ],
)  # fmt: skip
def test_products_of_windows_from_those_of_places(kernel: Any, stride: int, dilation: int, padding: Any) -> None:
    inputs = torch.randn(2, 3, *(7, 6)[: len(kernel)], dtype=torch.float64)
    weight = torch.randn(4, 3, *kernel, dtype=torch.float64)
    rule = convolution_norms.convolution({id(weight): "weight"}, 9, inputs, weight, None, stride, padding, dilation)
    assert isinstance(rule, convolution_norms.ConvolutionRule)
    patches = rule.windows.patches(slice(None))
    rule.windows._by_places = lambda *_: 0.0  # type: ignore[method-assign]
    torch.testing.assert_close(rule.windows.gram(slice(None)), patches.mT @ patches)


@pytest.mark.parametrize("near", [1, 2**17])
@pytest.mark.parametrize("last", [False, True])
def test_norms_of_a_batch_norm_take_several_passes_together(
    near: int, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_rules, "_NEAR", near)  # one sample at a time, or all
    torch.manual_seed(0)
    norm, inputs, deltas = (
        nn.BatchNorm2d(4).double().eval(),
        torch.randn(3, 4, 5, 6).double(),
        torch.randn(2, 3, 4, 5, 6),
    )
    deltas = deltas.double().contiguous(memory_format=torch.channels_last_3d) if last else deltas.double()
    norm.running_mean, norm.running_var = torch.randn(4).double(), torch.rand(4).double() + 0.5
    names = {id(norm.weight): "weight", id(norm.bias): "bias"}
    statistics = norm.running_mean, norm.running_var
    rule = norm_rules.batch_norm(names, 2, inputs, *statistics, norm.weight, norm.bias, eps=norm.eps)
    assert isinstance(rule, norm_rules.Stacking)
    found = dict(rule.several(list(deltas.unbind(0))))
    for k, n in itertools.product(range(2), range(3)):
        wanted = torch.autograd.grad(norm(inputs[n : n + 1]), [norm.weight, norm.bias], deltas[k, n : n + 1])
        for name, gradient in zip(("weight", "bias"), wanted, strict=True):
            torch.testing.assert_close(found[name][n, k], gradient.square().sum())
    for name, norms in rule(deltas[1]):
        torch.testing.assert_close(norms, found[name][:, 1])


@pytest.mark.parametrize("kind", ["usual", "dark corner", "constant", "nothing", "cancelling", "groups"])
@pytest.mark.parametrize(("size", "stride"), [((12, 12), 1), ((5, 7), 2), ((2, 2), 1)])
def test_float32_norms_through_the_factor_of_windows_follow_float64(
    kind: str, size: tuple[int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of columns or one; windows that are zero or alike, whose product is singular, as well."""
    torch.manual_seed(0)
    groups = 2 if kind == "groups" else 1
    inputs, weight = torch.randn(3, 32, *size).relu(), torch.randn(24, 32 // groups, 3, 3)
    if kind == "dark corner":
        inputs[:, :, : size[0] // 2 + 1] = 0
    elif kind in ("constant", "nothing"):
        inputs[1:] = float(kind == "constant")
    shape = nn.functional.conv2d(inputs, weight, None, stride, 1, 1, groups).shape
    deltas = [torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(4)]
    if kind == "cancelling":  # the windows have a large part in common, which such cotangents do not see
        inputs += 30
        deltas = [delta - delta.mean((2, 3), keepdim=True) for delta in deltas]
    monkeypatch.setattr(convolution_norms, "GRAM_COST", 0)
    names = {id(weight): "weight"}
    rule = convolution_norms.convolution(names, 10**6, inputs, weight, None, stride, 1, 1, groups)
    assert isinstance(rule, convolution_norms.ConvolutionRule)
    (name, found), *_ = rule.several(deltas)
    wanted = torch.zeros(len(inputs), len(deltas), dtype=torch.float64)
    for n, (k, delta) in itertools.product(range(len(inputs)), enumerate(deltas)):
        kernel = weight.double().requires_grad_()
        output = nn.functional.conv2d(inputs[n : n + 1].double(), kernel, None, stride, 1, 1, groups)
        wanted[n, k] = torch.autograd.grad(output, kernel, delta[n : n + 1].double())[0].square().sum()
    assert name == "weight"
    torch.testing.assert_close(found, wanted, rtol=1e-5 if kind == "cancelling" else 1e-6, atol=0)


@pytest.mark.parametrize(("width", "groups"), [(4, 1), (24, 1), (12, 2), (24, 2)])
def test_wide_convolutions_on_few_positions_equal_dense_hessians(width: int, groups: int) -> None:
    """Networks in which the products of windows are taken, by both ways to sum them, and direct ones beside."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, width, 3, padding=1, groups=groups), nn.ReLU(),
        nn.AvgPool2d(3), nn.Flatten(), nn.Linear(width, 12),
    ).double()  # fmt: skip
    inputs, targets = torch.randn(3, 2, 3, 3, dtype=torch.float64), torch.tensor([0, 5, 11])
    taken: list[str] = []
    make = convolution_norms.Windows.gram
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_norms.Windows, "gram", lambda self, some: (taken.append("gram"), make(self, some))[1])
        found = sample_traces(net, (inputs, targets), per_layer=True)
    assert taken
    assert found.exact
    params = dict(net.named_parameters())
    for n in range(3):
        probabilities = net(inputs[n : n + 1]).softmax(1)[0].detach()
        for name, parameter in params.items():
            expected = 0.0
            for c, share in enumerate(probabilities):  # E over labels of the squared gradient (mathematics 4.2)
                loss = nn.functional.cross_entropy(net(inputs[n : n + 1]), torch.tensor([c]))
                expected += float(share * torch.autograd.grad(loss, parameter)[0].square().sum())
            assert float(found.layers[name][n]) == pytest.approx(expected, rel=1e-9)
