"""Per-sample traces: exact against dense autodiff and high precision arithmetic, estimates against their own errors."""

from __future__ import annotations

import math
import threading
import warnings
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

from spiritlevel import data
from spiritlevel.binding import losses
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.papers import networks as models
from spiritlevel.samples import collecting
from spiritlevel.samples.probing import along_forward, along_reverse, probe
from spiritlevel.samples.traces import sample_traces, trace
from spiritlevel.watching import chains


def dense_total(model: nn.Module, inputs: Any, targets: Tensor, loss: Any = "cross_entropy") -> Tensor:
    return torch.stack(list(naive.block_traces(model, inputs, targets, loss).values())).sum(0)


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
    torch.testing.assert_close(result.values, dense_total(model, inputs, targets, loss), rtol=1e-10, atol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_binary_cross_entropy_of_one_logit(flat: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1), *([nn.Flatten(0)] if flat else [])).double()
    inputs, targets = zoo.sample_data(zoo.FLAT, classes=2)
    result = sample_traces(model, (inputs, targets), loss="binary_cross_entropy")
    assert result.exact
    expected = dense_total(model, inputs, targets, "binary_cross_entropy")
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
    expected = dense_total(model, inputs[chosen].double(), targets[chosen])
    torch.testing.assert_close(result.values, expected, rtol=1e-10, atol=0)


# ---------------------------------------------------------------- passes=k


def many_classes(count: int = 30, classes: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes)).double()
    with torch.no_grad():
        model[2].weight *= 4
    return model, zoo.sample_data(zoo.FLAT, count, classes)


def test_enough_passes_are_exact() -> None:
    model, batch = many_classes()
    exact = sample_traces(model, batch)
    for passes in (10, 11, 50):
        result = sample_traces(model, batch, passes=passes)
        assert result.exact
        torch.testing.assert_close(result.values, exact.values)


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_passes_are_unbiased_and_their_intervals_cover(passes: int) -> None:
    model, batch = many_classes()
    exact = sample_traces(model, batch)
    runs = [sample_traces(model, batch, passes=passes, seed=seed) for seed in range(100)]
    values = torch.stack([run.values for run in runs])
    assert not runs[0].exact
    error = values.mean(0) - exact.values
    assert float((error / (values.std(0) / 10).clamp_min(1e-12 * exact.values)).abs().max()) < 4.5
    several = many_classes(count=60)
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
    expected = dense_total(model, inputs, targets)
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
    expected = dense_total(twin, inputs, targets)
    assert float(((result.values - expected) / result.stderr).abs().max()) < 4.5


@pytest.mark.parametrize(
    ("runs", "low", "high"), [(80, 0.89, 1.0), pytest.param(300, 0.92, 0.98, marks=pytest.mark.slow)]
)
def test_intervals_of_the_mean_and_of_samples_cover(runs: int, low: float, high: float) -> None:
    model, (inputs, targets) = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 3)), zoo.sample_data(zoo.FLAT, 10)
    model = model.double()
    expected = dense_total(model, inputs, targets)
    draws = sample_traces(model, (inputs, targets), probes=20 * runs, method="hutchinson").draws
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
    assert torch.equal(result.values, again.values)  # the pilot's probes are the first of all


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


# ---------------------------------------------------------------- bad input


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
        (nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3))), lambda x, y: (x, y), {}, r"\(samples, outputs\)"),
        (MixesSamples(), lambda x, y: (x, y), {}, "depends on other samples"),
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


def test_shuffled_loader_is_refused() -> None:
    loader = DataLoader(TensorDataset(*zoo.sample_data(zoo.FLAT)), shuffle=True)
    with pytest.raises(InputError, match="loader shuffles"):
        sample_traces(nn.Linear(6, 3).double(), loader)


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


# ---------------------------------------------------------------- what once was called exact and was not


class Written(nn.Module):
    """A forward pass written out in a test."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def dense_in_reverse(model: nn.Module, inputs: Any, targets: Tensor, loss: Any = F.cross_entropy) -> Tensor:
    """Tr ∇²ℓₙ by reverse over reverse mode of the module itself, one sample and one parameter after the other."""
    values = []
    for n in range(len(targets)):
        outputs = model(*(leaf[n : n + 1] for leaf in (inputs if isinstance(inputs, tuple) else (inputs,))))
        params = list(model.parameters())
        gradients = torch.autograd.grad(loss(outputs, targets[n : n + 1]), params, create_graph=True, allow_unused=True)
        total = 0.0
        for parameter, gradient in zip(params, gradients, strict=True):
            for index, slope in enumerate(() if gradient is None else gradient.reshape(-1)):
                if slope.requires_grad:
                    (row,) = torch.autograd.grad(slope, parameter, retain_graph=True, allow_unused=True)
                    total += 0.0 if row is None else float(row.reshape(-1)[index])
        values.append(total)
    return torch.tensor(values, dtype=torch.float64)


def flat_net(activation: nn.Module, first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(6, 5), activation, nn.Linear(5, 3)).double()


def layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(6, 5), "b": nn.Linear(5, 3)}


def agrees(result: Any, expected: Tensor) -> bool:
    """To rounding if the result calls itself exact, within its errors otherwise."""
    if result.exact:
        return bool(torch.allclose(result.values, expected, rtol=1e-9, atol=1e-12))
    return float(((result.values - expected) / result.stderr.clamp_min(1e-12)).abs().max()) < 5


def _tanh_(x: Tensor) -> Tensor:
    return x.tanh_()


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


with warnings.catch_warnings():  # deprecated, and still in many a model
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_tanh_, scripted_mean = torch.jit.script(_tanh_), torch.jit.script(_mean)


def part_overwritten(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, :2] = 0.5
    return self.b(torch.tanh(h))


def foreach_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    torch._foreach_tanh_([h])
    return self.b(h)


def partly_without_graph(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(self.a(x))
    return self.b(h)


@pytest.mark.parametrize(
    "forward",
    [part_overwritten, foreach_in_place, lambda self, x: self.b(scripted_tanh_(self.a(x)))],
    ids=["part overwritten", "foreach", "scripted"],
)
def test_a_chain_that_is_written_to_in_place_is_not_taken_for_one(forward: Callable[..., Tensor]) -> None:
    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets), probes=300)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))


def test_a_hook_that_ablates_in_place_is_part_of_the_network() -> None:
    def ablate(module: nn.Module, arguments: Any, output: Tensor) -> None:
        output[:, [0, 3]] = 0

    (inputs, targets) = zoo.sample_data(zoo.FLAT)
    for activation in (nn.GELU(), nn.LeakyReLU()):
        model = flat_net(activation)
        model[1].register_forward_hook(ablate)
        result = sample_traces(model, (inputs, targets), probes=300)
        assert result.exact == isinstance(activation, nn.LeakyReLU)
        assert agrees(result, dense_in_reverse(model, inputs, targets))


def test_a_chain_that_ends_on_a_later_batch() -> None:
    """Only large batches pass another layer: seen in the outputs, not in the first few samples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h if len(x) <= 5 else h * h)

    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets))
    assert not result.exact
    assert any("sample 0 the model's outputs are not those of the layers" in note for note in result.notes)
    with pytest.raises(NotExactError, match="outputs are not those of the layers that were seen at first"):
        sample_traces(model, (inputs, targets), method="exact")


def test_a_chain_partly_under_no_grad_is_refused_by_name() -> None:
    model, batch = Written(partly_without_graph, **layers()), zoo.sample_data(zoo.FLAT)
    for method in ("auto", "hutchinson"):
        with pytest.raises(InputError, match=r"forward under torch.no_grad\(\)"):
            sample_traces(model, batch, method=method)


def test_the_size_of_a_complex_number_is_curved() -> None:
    model = Written(lambda self, x: self.b(torch.fft.rfft(self.a(x)).abs()), a=nn.Linear(6, 5), b=nn.Linear(3, 3))
    model, (inputs, targets) = model.double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets), probes=600)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))
    split = Written(
        lambda self, x: self.b(torch.view_as_real(torch.fft.rfft(self.a(x))).flatten(1)),
        a=nn.Linear(6, 5),
        b=nn.Linear(6, 3),
    ).double()
    assert agrees(sample_traces(split, (inputs, targets), method="exact"), dense_in_reverse(split, inputs, targets))


class Recurrent(nn.Module):
    """Linear in every weight for one step, of degree two and more in `again` for three."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x[:, 0]))
        for t in range(1, x.shape[1]):
            h = torch.relu(self.enter(x[:, t]) + self.again(h))
        return self.head(h)


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
def test_batches_of_another_length_are_looked_at_anew(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, targets = Recurrent().double(), torch.tensor([0, 1, 2, 1, 0, 2])
    pieces = [torch.randn(6, length, 2, dtype=torch.float64) for length in lengths]
    result = sample_traces(model, [(piece, targets) for piece in pieces], probes=400)
    assert not result.exact
    assert agrees(result, torch.cat([dense_in_reverse(model, piece, targets) for piece in pieces]))
    with pytest.raises(NotExactError):
        sample_traces(model, [(piece, targets) for piece in pieces], method="exact")


def test_lengths_that_change_nothing_stay_exact() -> None:
    torch.manual_seed(0)
    model = Written(lambda self, x: self.b(torch.relu(self.a(x)).mean(1)), a=nn.Linear(2, 4), b=nn.Linear(4, 3))
    model, targets = model.double(), torch.tensor([0, 1, 2, 1, 0, 2])
    pieces = [torch.randn(6, length, 2, dtype=torch.float64) for length in (1, 3, 20, 2)]
    result = sample_traces(model, [(piece, targets) for piece in pieces], method="exact")
    assert agrees(result, torch.cat([dense_in_reverse(model, piece, targets) for piece in pieces]))


def test_another_branch_on_a_later_batch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if float(x.abs().max()) < 3 else torch.tanh(h))

    torch.manual_seed(0)
    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    inputs = inputs.clamp(-2, 2)
    inputs[6:] *= 4
    inputs[6:, 0] = 5
    pieces = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    result = sample_traces(model, pieces, probes=400)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))
    with pytest.raises(NotExactError, match="makes a Python value of one that parameters or inputs decide"):
        sample_traces(model, pieces, method="exact")


def test_another_branch_for_batches_of_another_size() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if len(x) < 6 else torch.tanh(h))

    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    assert sample_traces(model, (inputs, targets), batch_size=5).exact
    with pytest.raises(InputError, match="depends on other samples of the batch"):
        sample_traces(model, (inputs, targets), batch_size=6)


def sorted_by_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = torch.argsort(lengths, descending=True, stable=True)
    return self.b(torch.relu(self.a(x[order]))[torch.argsort(order)])


def test_rows_in_another_order_than_the_samples() -> None:
    model, (inputs, targets) = Written(sorted_by_length, **layers()).double(), zoo.sample_data(zoo.FLAT)
    lengths = torch.tensor([5, 5, 5, 2, 7, 9, 1, 4, 4, 8, 3, 6])  # the first three are in order
    result = sample_traces(model, ((inputs, lengths), targets), method="exact")
    assert agrees(result, dense_in_reverse(model, (inputs, lengths), targets))
    pieces = [((inputs[:1], lengths[:1]), targets[:1]), ((inputs[1:], lengths[1:]), targets[1:])]
    torch.testing.assert_close(sample_traces(model, pieces, method="exact").values, result.values)


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "earlier samples": lambda h: h.cumsum(0),
    "later samples": lambda h: h.flip(0).cumsum(0).flip(0),
    "the place": lambda h: h + torch.arange(len(h))[:, None],
    "batch statistics": nn.BatchNorm1d(5, track_running_stats=False, affine=False),
    "the mean": lambda h: torch.softmax(h, 1) - h.mean(0),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("method", ["auto", "hutchinson", "pyhessian"])
def test_outputs_that_depend_on_other_samples_have_no_traces(name: str, method: str) -> None:
    model = Written(lambda self, x: self.b(torch.relu(COUPLED[name](self.a(x)))), **layers()).double()
    with pytest.raises(InputError, match="depends on other samples of the batch"):
        sample_traces(model, zoo.sample_data(zoo.FLAT), method=method)


def test_pyhessian_with_batch_statistics_keeps_the_batch() -> None:
    model = flat_net(nn.Sequential(nn.BatchNorm1d(5), nn.ReLU()))
    batch = zoo.sample_data(zoo.FLAT, 20)
    found = sample_traces(model, batch, method="pyhessian", batch_norm="batch")
    draws = sample_traces(model, batch, method="hutchinson", batch_norm="batch", probes=100).draws
    assert draws is not None
    assert found.probes is not None
    assert len(found.probes.unique()) > 1
    wanted = torch.stack([row[: int(count)].mean() for row, count in zip(draws, found.probes, strict=True)])
    torch.testing.assert_close(found.values, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("alpha", [1e10, 1e20, 1e25])
@pytest.mark.parametrize("kind", ["dense", "conv", "pooled"])
def test_float32_norms_of_rescaled_layers_neither_overflow_nor_vanish(kind: str, alpha: float) -> None:
    torch.manual_seed(0)
    model, shape = {
        "dense": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
        "conv": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 4), nn.Flatten()), (2, 6, 6)),
        "pooled": lambda: (
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
            (2, 6, 6),
        ),
    }[kind]()
    first, second = (module for module in model if hasattr(module, "weight"))
    with torch.no_grad():
        first.weight *= alpha
        first.bias *= alpha
        second.weight /= alpha
    batch = torch.randn(5, *shape), torch.tensor([0, 1, 2, 1, 0])
    single = sample_traces(model, batch, per_layer=True)
    double = sample_traces(model.double(), batch, per_layer=True)
    for name, values in double.layers.items():
        torch.testing.assert_close(single.layers[name], values, rtol=1e-5, atol=0)


def test_norms_beyond_float32_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        for module, factor in zip((model[0], model[2], model[3]), (1e-30, 1e25, 1e25), strict=True):
            module.weight *= factor
        model[0].bias *= 1e-30
    with pytest.raises(InputError, match=r"beyond float32 for sample \d+; measure model.double\(\)"):
        sample_traces(model, (torch.randn(9, 6), torch.zeros(9).long()), batch_size=3)


@pytest.mark.parametrize("kind", ["tokens", "conv"])
def test_float32_inputs_far_from_zero_keep_their_digits(kind: str) -> None:
    """Gradients of differences: the inputs cancel in them, and products of the inputs would cancel twice as much."""
    torch.manual_seed(0)
    signs = torch.tensor([1.0, -1, 1, -1])
    if kind == "tokens":
        inputs, layer, dim = torch.randn(30, 4, 40), nn.Linear(40, 50), 1
    else:
        inputs, layer, dim = torch.randn(30, 40, 3, 3), nn.Conv2d(40, 50, 2), 2

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x) if dim == 1 else self.a(x).flatten(2)
        return self.b((h * (signs[:, None] if dim == 1 else signs).to(h)).sum(dim))

    model = Written(forward, a=layer, b=nn.Linear(50, 5))
    inputs, targets = inputs + 100, torch.randint(0, 5, (30,))
    single = sample_traces(model, (inputs, targets), method="exact")
    double = sample_traces(model.double(), (inputs, targets), method="exact")
    assert not single.notes
    torch.testing.assert_close(single.values, double.values, rtol=1e-5, atol=0)


def test_mse_of_whole_numbers_is_that_of_torch() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inputs, targets = zoo.sample_data(zoo.FLAT)[0], torch.arange(12) % 3
    result = sample_traces(model, (inputs, targets), loss=nn.MSELoss())
    expected = dense_in_reverse(model, inputs, targets, lambda o, t: F.mse_loss(o, t.to(o)[:, None]))
    assert result.exact
    assert agrees(result, expected)


# ---------------------------------------------------------------- what once crashed, or said something else


def test_memory_holds_for_the_recursion_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def spy(problem: Problem, chain: Any, inputs: Tensor, *rest: Any) -> Any:
        sizes.append(len(inputs))
        return chains.chain_traces(problem, chain, inputs, *rest)

    monkeypatch.setattr(collecting, "chain_traces", spy)
    model, batch = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3)), zoo.sample_data(zoo.FLAT, 64)
    sample_traces(model, batch, memory="20MB")
    assert max(sizes) * 200**2 * 8 <= 5e6  # three more of these exist at a time
    assert sum(sizes) == 64


def test_no_error_needs_no_more_probes() -> None:
    result = sample_traces(nn.Linear(6, 3), zoo.sample_data(zoo.FLAT), loss=lambda o, t: o.sum(1), rel_err=0.1)
    assert result.probes is not None
    assert int(result.probes.max()) == 16
    assert not result.values.any()


def test_samples_are_numbered_through_all_batches() -> None:
    inputs, targets = zoo.sample_data(zoo.FLAT, 18)
    inputs[13] = math.nan
    for model in (flat_net(nn.Tanh()), flat_net(nn.ReLU()), zoo.Tied().double()):
        with pytest.raises(InputError, match="input of sample 13 is NaN"):
            sample_traces(model, (inputs, targets), batch_size=4)
    inputs, targets = zoo.sample_data(zoo.FLAT, 18)
    targets[13] = 7
    with pytest.raises(InputError, match="target 7 of sample 13 is outside"):
        sample_traces(flat_net(nn.ReLU()), (inputs, targets), batch_size=4)


def pooled_with_a_script(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.cat([F.max_pool2d(h, 2).flatten(1), scripted_mean(h)], 1))


def frozen_and_written_to(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h += torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    return self.b(F.max_pool2d(h, 2).flatten(1))


@pytest.mark.parametrize(
    ("forward", "modules", "shape"),
    [
        (lambda self, x: self.b(torch.relu(input=self.a(x))), layers, (6,)),
        (lambda self, x: self.b(torch.where((h := self.a(x)) > 0, h, torch.zeros_like(h))), layers, (6,)),
        (lambda self, x: self.b(F.max_pool2d(input=self.a(x), kernel_size=2).flatten(1)),
         lambda: {"a": nn.Conv2d(2, 3, 3), "b": nn.Linear(12, 3)}, (2, 6, 6)),
        (pooled_with_a_script, lambda: {"a": nn.Conv2d(2, 3, 3), "b": nn.Linear(15, 3)}, (2, 6, 6)),
        (frozen_and_written_to,
         lambda: {"a": nn.Conv2d(2, 3, 3).requires_grad_(False), "b": nn.Linear(12, 3)}, (2, 6, 6)),
    ],
    ids=["keyword", "where", "pooling by keyword", "script", "frozen"],
)  # fmt: skip
def test_unusual_ways_to_write_an_exact_network(
    forward: Callable[..., Tensor], modules: Callable[[], dict[str, nn.Module]], shape: tuple[int, ...]
) -> None:
    model, (inputs, targets) = Written(forward, **modules()).double(), zoo.sample_data(shape)
    expected = dense_total(model, inputs, targets)
    assert agrees(sample_traces(model, (inputs, targets), method="exact"), expected)


def test_forward_hooks_see_what_the_layers_return() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    for module in model[:2]:
        module.register_forward_hook(lambda module, arguments, output: seen.append(output))
    sample_traces(model, (torch.randn(4, 2, 6, 6), torch.zeros(4).long()))
    assert {output.shape[1:] for output in seen} == {(3, 4, 4)}


def test_one_number_a_sample_is_an_input() -> None:
    model = Written(lambda self, x: self.b(torch.tanh(self.a(x.view(-1, 1)))), a=nn.Linear(1, 5), b=nn.Linear(5, 3))
    model, (inputs, targets) = model.double(), (torch.randn(7, dtype=torch.float64), torch.arange(7) % 3)
    assert agrees(sample_traces(model, (inputs, targets), method="exact"), dense_in_reverse(model, inputs, targets))


def test_many_outputs_of_any_loss() -> None:
    model, batch = nn.Linear(3, 2300), (torch.randn(4, 3), torch.arange(4))
    assert sample_traces(model, batch, loss="exponential", probes=2).method == "hutchinson"
    with pytest.raises(InputError, match="of 2300 outputs take 2299 backward passes a batch; pass passes=2299 to"):
        sample_traces(model, batch, loss="exponential", method="exact")
    with pytest.raises(InputError, match="of 2300 outputs take 2300 backward passes a batch; pass passes=8 for a"):
        sample_traces(model, batch, loss="squared_error", method="exact")


def ranked(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.relu(h)) * F.multilabel_margin_loss(h, (h > 0).long(), reduction="none")[:, None]


def writes_into_chunks(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.chunk(2, 1)[0].mul_(2)
    return self.b(torch.tanh(h))


def test_what_cannot_be_differentiated_is_named() -> None:
    with pytest.raises(InputError, match="the model Written cannot be differentiated: Output 0 of Split"):
        sample_traces(Written(writes_into_chunks, **layers()).double(), zoo.sample_data(zoo.FLAT))
    with pytest.raises(InputError, match=r"no forward derivative .*multilabel.* and no second derivative either"):
        sample_traces(Written(ranked, **layers()).double(), zoo.sample_data(zoo.FLAT))

    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multilabel_margin_loss(outputs, targets[:, None].expand(outputs.shape), reduction="none")

    with pytest.raises(InputError, match="the loss hinge cannot be differentiated twice"):
        sample_traces(nn.Linear(6, 3).double(), zoo.sample_data(zoo.FLAT), loss=hinge)

    def overwrites(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h += 1
        return self.b(h)

    with pytest.raises(InputError, match="the model Written cannot be differentiated: one of the variables"):
        sample_traces(Written(overwrites, **layers()).double(), zoo.sample_data(zoo.FLAT))


def test_whole_numbers_of_numpy_are_numbers() -> None:
    model, batch = many_classes()
    three: Any = np.int64(3)
    found = sample_traces(model, batch, passes=three, seed=three, batch_size=three)
    torch.testing.assert_close(found.values, sample_traces(model, batch, passes=3, seed=3).values)
    assert sample_traces(model, batch, method="hutchinson", probes=three).probes.unique().tolist() == [3]
    with pytest.raises(InputError, match="seed must be"):
        sample_traces(model, batch, seed=0.5)  # type: ignore[arg-type]


def test_a_comparison_does_not_stand_in_the_way() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.where(h > 0, torch.tanh(h), h).flatten(1))

    model = Written(forward, a=nn.Conv1d(2, 3, 3), b=nn.Linear(21, 3)).double()
    batch = zoo.sample_data(zoo.LINE)
    assert sample_traces(model, batch, probes=2).method == "gauss-newton + remainder"
    with pytest.raises(NotExactError, match="'tanh'"):
        sample_traces(model, batch, method="exact")
