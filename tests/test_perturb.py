"""`perturb` against brute force: every number beside a copy of the model that was changed, or a dense Hessian."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import naive
import numpy as np
import pytest
import torch
from conftest import Untouched
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.answers.changes import as_change, rounded, several
from spiritlevel.answers.expanding import Spread, _cumulants, reach
from spiritlevel.answers.perturbing import _Perturbed
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.results import Perturbation, Prediction, subset_mean
from spiritlevel.results.perturbations import HIGHER, RANDOM, SUBSET, limits_in_words
from spiritlevel.statistics.ranking import auroc


def network(kind: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), kind(), nn.Linear(6, 3)).double()


def samples(count: int = 80, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs @ torch.randn(5, 3, generator=generator, dtype=torch.float64)).argmax(1)


def trained(net: nn.Module, data: tuple[Tensor, Tensor], steps: int = 60) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()
    return net.eval()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def loss_of(net: nn.Module, data: tuple[Tensor, Tensor]) -> Callable[[Tensor], Tensor]:
    """The mean loss as a function of one vector, by plain PyTorch."""
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([math.prod(shape) for shape in shapes.values()])
        params = {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, params, (data[0],)), data[1])

    return loss


def changed(net: nn.Module, change: Callable[[Tensor], Tensor], least: int = 0) -> nn.Module:
    """A copy whose parameters of at least this many dimensions went through a function."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim >= least:
                parameter.copy_(change(parameter))
    return other


def rise(before: nn.Module, after: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(after(DATA[0]), DATA[1]) - F.cross_entropy(before(DATA[0]), DATA[1]))


def int4(weight: Tensor) -> Tensor:
    step = weight.abs().max() / 7
    return (weight / step).round() * step


NET = trained(network(), samples())
DATA = samples()
BEFORE, AFTER = flat(NET), flat(changed(NET, int4, 2))
DELTA = AFTER - BEFORE


# ---------------------------------------------------------------- one change, brute force


def test_the_two_terms_are_those_of_the_dense_hessian() -> None:
    loss = loss_of(NET, DATA)
    gradient = torch.func.grad(loss)(BEFORE)
    hessian = torch.func.hessian(loss)(BEFORE)
    torch.testing.assert_close(hessian, hessian.T)
    found = sl.perturb(NET, DATA, "int4")
    assert found.slope == pytest.approx(float(gradient @ DELTA), rel=1e-9)
    assert found.curvature == pytest.approx(0.5 * float(DELTA @ hessian @ DELTA), rel=1e-9)
    assert found.predicted.value == pytest.approx(found.slope + found.curvature, rel=1e-12)
    assert found.measured.value == pytest.approx(float(loss(AFTER) - loss(BEFORE)), rel=1e-9)
    assert found.loss.value == pytest.approx(float(loss(BEFORE)), rel=1e-12)
    for step, value in zip(found.steps.tolist(), found.losses.tolist(), strict=True):
        assert value == pytest.approx(float(loss(BEFORE + step * DELTA)), rel=1e-12)
    low, high = found.predicted.interval()
    assert low <= found.measured.value <= high


def test_layers_are_blocks_of_the_dense_hessian() -> None:
    net = trained(network(nn.ReLU), DATA)
    here, loss = flat(net), loss_of(net, DATA)
    gradient, hessian = torch.func.grad(loss)(here), naive.symmetric(torch.func.hessian(loss)(here))
    scaled = sl.perturb(net, DATA, lambda weight: 1.1 * weight)
    assert [row.name for row in scaled.layers] == [name for name, _ in net.named_parameters()]
    traces = hessian.diagonal().split([parameter.numel() for parameter in net.parameters()])
    start = 0
    for row, trace in zip(scaled.layers, traces, strict=True):
        delta = torch.zeros_like(here)
        part = slice(start, start + row.size)
        delta[part] = 0.1 * here[part]
        start += row.size
        assert row.square == pytest.approx(float(delta @ delta), rel=1e-9)
        assert row.slope == pytest.approx(float(gradient @ delta), rel=1e-8, abs=1e-15)
        assert row.curvature == pytest.approx(0.5 * float(delta @ hessian @ delta), rel=1e-8)
        assert row.with_others == pytest.approx(0.5 * float(delta @ hessian @ (0.1 * here)), rel=1e-8, abs=1e-15)
        assert row.measured == pytest.approx(float(loss(here + delta) - loss(here)), rel=1e-8, abs=1e-15)
        assert row.trace == pytest.approx(float(trace.sum()), rel=1e-8)
        assert row.trace_times_square == row.trace * row.square
    assert sum(row.with_others for row in scaled.layers) == pytest.approx(scaled.curvature, rel=1e-9)
    assert scaled.layer("0.bias") is scaled.layers[1]


def test_layers_whose_traces_have_no_exact_form() -> None:
    found = sl.perturb(NET, DATA, "int3")
    hessian = torch.func.hessian(loss_of(NET, DATA))(BEFORE)
    assert any("estimated" in note for note in found.notes)
    trace = float(hessian.diagonal()[:30].sum())  # 0.weight
    error = math.sqrt(2 * float(hessian[:30].square().sum()) / 16)
    assert found.layers[0].trace == pytest.approx(trace, abs=3 * error)


def test_flips_are_those_of_the_linearised_outputs_and_of_a_changed_copy() -> None:
    net = trained(network(), DATA, 20)
    other = changed(net, lambda weight: rounded(weight, 2), 2)
    outputs, after = net(DATA[0]), other(DATA[0])
    names = [name for name, _ in net.named_parameters()]
    delta = {name: dict(other.named_parameters())[name] - parameter for name, parameter in net.named_parameters()}

    def call(params: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(net, params, (DATA[0],))

    here = {name: parameter.detach() for name, parameter in net.named_parameters()}
    _, moved = torch.func.jvp(call, (here,), ({name: delta[name].detach() for name in names},))
    linear = (outputs + moved).argmax(1) != outputs.argmax(1)
    true = after.argmax(1) != outputs.argmax(1)
    found = sl.perturb(net, DATA, "int2")
    assert found.flips_predicted.value == int(linear.sum())
    assert found.flips_measured.value == int(true.sum())
    assert found.flips_measured.value > 0
    assert found.samples["flips_predicted"].bool().equal(linear)
    assert found.samples["flips_measured"].bool().equal(true)
    assert found.samples["after"].equal(after.argmax(1))
    top = outputs.topk(2, 1).values
    torch.testing.assert_close(found.samples["gap"], (top[:, 0] - top[:, 1]).detach())
    low, high = found.flips_predicted.interval()
    assert low <= found.flips_measured.value <= high
    per_sample = F.cross_entropy(after, DATA[1], reduction="none") - F.cross_entropy(outputs, DATA[1], reduction="none")
    torch.testing.assert_close(found.samples["measured"], per_sample.detach())
    accuracies = [float((each.argmax(1) == DATA[1]).double().mean()) for each in (outputs, after)]
    assert [accuracy.value for accuracy in found.accuracy] == pytest.approx(accuracies)
    assert found.agreement["gap"] == pytest.approx(auroc(-found.samples["gap"], true))
    assert found.best in found.agreement
    assert found.agreement[found.best] == max(found.agreement.values())


def test_a_quadratic_loss_is_predicted_exactly() -> None:
    net = nn.Linear(4, 2).double()
    data = torch.randn(50, 4).double(), torch.randn(50, 2).double()
    found = sl.perturb(net, data, "prune:0.5", loss="squared_error")
    assert found.suffices
    assert found.predicted.value == pytest.approx(found.measured.value, rel=1e-12)
    assert found.predicted.interval()[1] - found.predicted.interval()[0] < 1e-9
    assert found.flips_predicted.status == found.flips_measured.status == "undefined"
    assert found.ratio == pytest.approx(1)
    torch.testing.assert_close(found.losses, found.quadratic)


def test_where_two_terms_do_not_suffice_it_says_so() -> None:
    found = sl.perturb(NET, DATA, lambda weight: 30 * weight)
    assert not found.suffices
    assert found.held  # the interval is wide enough, so the prediction as a whole did not fail
    assert "not enough" not in str(found)
    assert "the interval allowed for them" in str(found)
    missed = dataclasses.replace(found, predicted=dataclasses.replace(found.predicted, sources={}))
    assert not missed.held
    assert any("Second order is not enough" in sentence for sentence in missed.sentences())
    assert "not enough" in str(missed)
    before = sl.perturb(NET, DATA, lambda weight: 30 * weight, apply=False)
    assert not before.suffices
    assert before.measured.status == "undefined"
    assert float(before.steps[-1]) == 0.5
    assert not before.held
    assert "was not made" in str(before)
    assert "may not be enough" in str(before)
    assert sl.perturb(NET, DATA, "int8").suffices


def test_a_draw_whose_terms_are_small_by_chance_is_no_failure_of_the_second_order() -> None:
    """What is left out is measured against a usual draw of a random change, and against its own terms otherwise."""
    losses = torch.tensor([[1.0, 1.001]], dtype=torch.float64)  # 0.001 came, of which a third is left out
    usual = Spread(torch.zeros(1), True, 0.0, below=0.02, above=0.02, rest=(0.0, 0.0), flips=None)
    for chance, enough in ((usual, True), (usual._replace(below=0.001, above=0.001), False), (None, False)):
        drawn = SimpleNamespace(
            columns={"losses": losses, "size": torch.zeros(1)},
            apply=True,
            _left_out=lambda: torch.tensor([0.0003]),
            here=SimpleNamespace(problem=SimpleNamespace(dtype=torch.float64)),
            chance=chance,
            slope=0.0004,
            curvature=0.0003,
        )
        assert _Perturbed._suffices(cast(_Perturbed, drawn)) is enough


def test_what_is_left_out_is_carried_to_the_end() -> None:
    steps = [0.125, 0.25, 0.375, 0.5]
    for order in (3, 3.5, 4):
        rests = [step**order for step in steps]
        assert reach(steps, rests) == pytest.approx((0.5, 1.5))
        assert reach(steps, [-rest for rest in rests]) == pytest.approx((1.5, 0.5))
    kinks = [step**2 for step in steps]
    assert reach(steps, kinks) == pytest.approx((1.0, 3.0))  # of second order, taken for third
    assert reach(steps, [1.0, -1.0, 1.0, 1.0]) == (256.0, 256.0)  # nothing can be told
    assert reach([0.25, 0.5], [0.0, 0.0]) == (0.0, 0.0)


def test_deterministic_changes_end_within_reach() -> None:
    """Two dozen changes of networks with and without kinks, most of them far beyond the second order."""
    hits = []
    for kind in (nn.ReLU, nn.Tanh, nn.GELU):
        net = trained(network(kind), DATA)
        for change in (
            "int8",
            "int4",
            "int4:channel",
            "int3",
            "int2",
            "prune:0.2",
            "prune:0.5",
            "prune:0.8",
            "bfloat16",
        ):
            found = sl.perturb(net, DATA, change, layers=False)
            low, high = found.predicted.interval()
            hits.append(low <= found.measured.value <= high)
    assert sum(hits) >= 0.9 * len(hits)


# ---------------------------------------------------------------- kinds of changes


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_puts_weights_on_the_nearest_point_of_a_grid(bits: int, channel: bool, asymmetric: bool) -> None:
    weight = torch.randn(4, 3, 2, 2).double() + 0.3
    found = rounded(weight, bits, channel, asymmetric)
    for row, original in zip(found if channel else [found], weight if channel else [weight], strict=True):
        low, high = (original.min().clamp(max=0), original.max().clamp(min=0)) if asymmetric else (0, 0)
        step = (high - low) / (2**bits - 1) if asymmetric else original.abs().max() / (2 ** (bits - 1) - 1)
        places = row / step
        torch.testing.assert_close(places, places.round(), atol=1e-9, rtol=0)
        assert len(row.unique()) <= 2**bits
        assert float((row - original).abs().max()) <= float(step) * (1.0 if asymmetric else 0.5) + 1e-12


def test_rounding_agrees_with_that_of_torch() -> None:
    weight = torch.randn(6, 5)
    step = float(weight.abs().max()) / 127
    theirs = torch.fake_quantize_per_tensor_affine(weight, step, 0, -127, 127)
    torch.testing.assert_close(rounded(weight, 8), theirs, atol=1e-6, rtol=0)
    steps = weight.abs().amax(1) / 127
    theirs = torch.fake_quantize_per_channel_affine(weight, steps, torch.zeros(6, dtype=torch.int32), 0, -127, 127)
    torch.testing.assert_close(rounded(weight, 8, channel=True), theirs, atol=1e-6, rtol=0)


def test_zero_and_empty_weights_can_be_rounded() -> None:
    assert rounded(torch.zeros(2, 2), 4).equal(torch.zeros(2, 2))
    assert rounded(torch.zeros(2, 2), 4, asymmetric=True).equal(torch.zeros(2, 2))
    assert rounded(torch.zeros(0, 2), 4, channel=True).shape == (0, 2)


def applied(text: str, net: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    change = as_change(text)
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    assert change.move is not None
    return change.move(change.chosen(params, False), torch.Generator().manual_seed(seed)).after


def test_pruning_removes_the_smallest() -> None:
    weights = {name: parameter for name, parameter in NET.named_parameters() if parameter.ndim > 1}
    everywhere = applied("prune:0.5", NET)
    assert everywhere.keys() == weights.keys()
    kept = torch.cat([tensor.reshape(-1) for tensor in everywhere.values()])
    before = torch.cat([tensor.detach().reshape(-1) for tensor in weights.values()])
    assert int((kept == 0).sum()) == len(kept) // 2
    assert before[kept == 0].abs().max() <= before[kept != 0].abs().min()
    for tensor in applied("prune:0.25:layer", NET).values():
        assert int((tensor == 0).sum()) == tensor.numel() // 4
    assert all(not bool(tensor.any()) for tensor in applied("prune:1", NET).values())
    assert int((applied("prune:0.5", nn.Linear(2, 2))["weight"] == 0).sum()) == 2


def test_casts_are_those_of_torch() -> None:
    for name in ("bfloat16", "float16"):
        found = sl.perturb(NET, DATA, name)
        dtype = getattr(torch, name)
        other = changed(NET, lambda weight, dtype=dtype: weight.to(dtype).to(weight.dtype))
        assert found.measured.value == pytest.approx(rise(NET, other), rel=1e-6)
        assert len(found.layers) == 4


@pytest.mark.parametrize("options", ["", ":asymmetric", ":channel:asymmetric"])
@pytest.mark.parametrize("bits", [2, 3])
def test_random_rounding_keeps_to_its_bits(bits: int, options: str) -> None:
    """A grid through 0 that ends between two points had 2^b + 1 of them."""
    weights = torch.randn(3, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[1] = weights[1].abs()
    change = as_change(f"int{bits}{options}:random")
    assert change.move is not None
    draws = torch.stack([change.move({"w": weights}, torch.Generator().manual_seed(i)).after["w"] for i in range(400)])
    groups = draws.unbind(1) if "channel" in options else [draws]
    for group in groups:
        assert len(group.unique()) <= 2**bits
    spread = change.move({"w": weights}, torch.Generator()).spread
    assert spread is not None
    off = (draws.mean(0) - weights).abs() / (spread["w"] / 20).clamp_min(1e-12)
    assert float(off[spread["w"] > 1e-9].max()) < 6  # unbiased


def test_random_rounding_leaves_weights_where_they_are_on_average() -> None:
    change = as_change("int3:random")
    weight = {"weight": torch.tensor([[0.9, -0.35, 0.1, 0.0]])}
    assert change.move is not None
    draws = [change.move(weight, torch.Generator().manual_seed(seed)) for seed in range(4000)]
    values = torch.stack([draw.after["weight"] for draw in draws]).double()
    assert draws[0].spread is not None
    spread = draws[0].spread["weight"]
    assert bool(((values.mean(0) - weight["weight"]).abs() <= 4.5 * spread / math.sqrt(4000) + 1e-7).all())
    torch.testing.assert_close(values.std(0), spread, atol=0.004, rtol=0.05)


def test_noise_has_the_size_that_was_asked_for() -> None:
    net = nn.Linear(200, 300)
    relative = sl.perturb(net, (torch.randn(4, 200), torch.tensor([0, 1, 2, 3])), "noise:0.01", layers=True)
    for row, parameter in zip(relative.layers, net.parameters(), strict=True):
        wanted = 0.01**2 * float(parameter.detach().square().sum())
        assert row.square == pytest.approx(wanted, rel=5 / math.sqrt(row.size))
    absolute = applied("noise:0.01:absolute", net)["weight"] - net.weight.detach()
    assert float(absolute.std()) == pytest.approx(0.01, rel=0.02)


def test_the_way_to_another_model_moves_running_statistics_too() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    second = copy.deepcopy(first)
    for net, shift in ((first, 0.0), (second, 0.3)):
        net.train()
        net(DATA[0] + shift)
        net.eval()
    with torch.no_grad():
        second[0].weight.mul_(1.02)
    found = sl.perturb(first, DATA, second)
    assert found.measured.value == pytest.approx(rise(first, second), rel=1e-9)
    assert {"1.running_mean", "1.running_var", "0.weight"} == {row.name for row in found.layers}
    state = sl.perturb(first, DATA, second.state_dict())
    assert state.predicted.value == found.predicted.value

    def at(step: Tensor) -> Tensor:
        states = [net.state_dict() for net in (first, second)]
        point = {
            name: here + step * (states[1][name] - here) if here.is_floating_point() else here
            for name, here in states[0].items()
        }
        normal = (DATA[0] @ point["0.weight"].T + point["0.bias"] - point["1.running_mean"]) / (
            point["1.running_var"] + 1e-5
        ).sqrt()
        hidden = torch.tanh(normal * point["1.weight"] + point["1.bias"])
        return F.cross_entropy(hidden @ point["3.weight"].T + point["3.bias"], DATA[1])

    zero = torch.zeros((), dtype=torch.float64)
    assert found.slope == pytest.approx(float(torch.func.grad(at)(zero)), rel=1e-8)
    assert found.curvature == pytest.approx(0.5 * float(torch.func.grad(torch.func.grad(at))(zero)), rel=1e-8)


class LoRA(nn.Module):
    """A layer as peft makes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def test_a_lora_merge(untouched: Untouched) -> None:
    plain = copy.deepcopy(NET)
    adapted = nn.Sequential(LoRA(copy.deepcopy(plain[0])), nn.Tanh(), LoRA(copy.deepcopy(plain[2]))).double()
    with untouched(adapted):
        found = sl.perturb(adapted, DATA, "lora")
    assert found.measured.value == pytest.approx(rise(plain, adapted), rel=1e-9)
    assert [row.name for row in found.layers] == ["0.weight", "2.weight"]
    with pytest.raises(InputError, match="needs a model with LoRA layers"):
        sl.perturb(plain, DATA, "lora")


def test_parameters_can_be_named() -> None:
    assert [row.name for row in sl.perturb(NET, DATA, "int4", params="0").layers] == ["0.weight", "0.bias"]
    frozen = copy.deepcopy(NET)
    frozen[0].requires_grad_(False)
    assert [row.name for row in sl.perturb(frozen, DATA, "int4").layers] == ["0.weight", "2.weight"]


def test_a_change_that_moves_nothing() -> None:
    found = sl.perturb(NET, DATA, lambda weight: weight)
    assert found.predicted.value == found.measured.value == found.flips_measured.value == 0
    assert found.suffices
    assert found.agreement == {}
    assert sl.perturb(NET, DATA, "noise:0").predicted.interval() == (0.0, 0.0)


# ---------------------------------------------------------------- random changes and subsets


def noise_sizes(net: nn.Module, share: float) -> Tensor:
    """The standard deviation of every parameter under noise of this relative size."""
    roots = [(parameter.numel(), float(parameter.detach().square().mean().sqrt())) for parameter in net.parameters()]
    return torch.cat([torch.full((size,), share * root, dtype=torch.float64) for size, root in roots])


def test_the_mean_over_random_changes_is_that_of_the_diagonal() -> None:
    net = trained(network(nn.ReLU), DATA)
    hessian = torch.func.hessian(loss_of(net, DATA))(flat(net))
    mean = 0.5 * float((hessian.diagonal() * noise_sizes(net, 0.02).square()).sum())
    found = sl.perturb(net, DATA, "noise:0.02")
    assert found.predicted.value == pytest.approx(mean, rel=1e-6)
    assert found.predicted.stderr == 0
    assert set(found.predicted.sources) == {RANDOM, HIGHER}
    again = sl.perturb(net, DATA, "noise:0.02", seed=1)
    assert again.predicted.value == pytest.approx(found.predicted.value, rel=1e-12)
    assert again.measured.value != found.measured.value


def test_the_limits_of_a_random_change_are_those_of_its_distribution() -> None:
    hessian, slope = torch.func.hessian(loss_of(NET, DATA))(BEFORE), torch.func.grad(loss_of(NET, DATA))(BEFORE)
    sizes = noise_sizes(NET, 0.3)
    a, matrix = sizes * slope, sizes[:, None] * hessian * sizes
    draws = torch.randn(100_000, len(a), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = draws @ a + 0.5 * ((draws @ matrix) * draws).sum(1)
    op = Operator(lambda block: hessian @ block, len(a), dtype=torch.float64)
    variance, third = _cumulants(op, sizes, a, 0)
    exact = (
        float(a @ a + 0.5 * (matrix @ matrix).trace()),
        float(3 * a @ matrix @ a + (matrix @ matrix @ matrix).trace()),
    )
    assert variance == pytest.approx(exact[0], rel=0.25)
    assert third == pytest.approx(exact[1], rel=0.5)
    skew = exact[1] / exact[0] ** 1.5
    low, high = 0.5 * float(matrix.trace()) + math.sqrt(exact[0]) * stats.pearson3.ppf([0.025, 0.975], skew)
    inside = float(((values >= low) & (values <= high)).double().mean())
    assert inside == pytest.approx(0.95, abs=0.01)


def test_a_random_rounding_is_estimated() -> None:
    found = sl.perturb(NET, DATA, "int4:random")
    assert found.predicted.stderr > 0
    assert RANDOM in found.predicted.sources
    assert "chance" in found.samples


def test_intervals_of_random_changes_cover() -> None:
    """A quick look; tests/test_coverage.py and docs/coverage.md have the whole."""
    hits = 0
    for seed in range(20):
        found = sl.perturb(NET, DATA, "noise:0.05", layers=False, seed=seed)
        low, high = found.predicted.interval()
        hits += low <= found.measured.value <= high
        assert found.suffices
    assert hits >= 16  # fewer have a chance of 1 in 400 at 95 %


@pytest.mark.parametrize("change", ["int4", "int2", "noise:0.05"])
def test_limits_are_unknown_from_a_few_samples(change: str) -> None:
    found = sl.perturb(NET, samples(100), change, samples=8, layers=False)
    assert all(math.isnan(limit) for limit in found.predicted.interval())
    text = str(found)
    assert "(limits unknown from so few samples); it changed by" in text
    assert "predictions should flip (limits unknown from so few samples)" in text
    assert "Second order is not enough" not in text
    assert limits_in_words(found.predicted).startswith("subset of samples unknown, ")
    page = found.to_html()
    assert "95% interval not known: subset of samples unknown" in page
    assert "misses what was measured" not in page
    again = Perturbation.from_json(found.to_json())
    assert str(again) == text


def test_a_subset_predicts_what_happens_to_all() -> None:
    data = samples(600)
    found = sl.perturb(NET, data, "int4", samples=100)
    whole = sl.perturb(NET, data, "int4")
    assert found.measured.value == pytest.approx(whole.measured.value, rel=1e-12)
    assert found.flips_measured.value == whole.flips_measured.value
    assert found.decisions == 600
    assert SUBSET in found.predicted.sources
    assert SUBSET in found.flips_predicted.sources
    assert len(found.samples["index"]) == 100
    indices = found.samples["index"]
    torch.testing.assert_close(found.samples["predicted"], whole.samples["predicted"][indices])
    narrow, wide = found.predicted.interval(data=False), found.predicted.interval()
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
    hits = 0
    for seed in range(20):
        low, high = sl.perturb(NET, data, "int4", samples=100, layers=False, seed=seed).predicted.interval()
        hits += low <= whole.measured.value <= high
    assert hits >= 16


def test_the_interval_from_a_subset_holds_where_changes_are_large_to_either_side() -> None:
    """As those of a fitted network are: corrected for the skewness of the subset alone, it holds in 88 % of cases."""
    generator = np.random.default_rng(0)
    half = torch.from_numpy(generator.normal(size=500) ** 3)
    changes = torch.cat([half, -half])
    held = []
    for differences in (False, True):
        draws = (changes[generator.permutation(1000)[:60]] for _ in range(600))
        found = [subset_mean(draw, 1000, differences=differences)[1] for draw in draws]
        held.append(np.mean([limits is not None and limits[0] <= changes.mean() <= limits[1] for limits in found]))
    assert held[0] < 0.92
    assert held[1] > 0.93
    here, there = (torch.zeros(90, 2, dtype=torch.float64) for _ in range(2))
    there[:9, 0] = 6.0
    table = nn.Embedding.from_pretrained(here, freeze=False)
    data = torch.arange(90), torch.zeros(90).long()
    predicted = sl.perturb(table, data, {"weight": there}, samples=60, layers=False)
    _, limits = subset_mean(predicted.samples["predicted"], 90, differences=True)
    assert predicted.predicted.data_limits == pytest.approx(limits)


def test_intervals_add_their_sources() -> None:
    predicted = Prediction(1.0, sources={RANDOM: (3.0, 3.0), SUBSET: (4.0, 4.0), HIGHER: (0.0, 1.0)})
    assert predicted.interval() == (-4.0, 7.0)
    assert predicted.interval(data=False) == (-2.0, 5.0)
    wider = predicted.interval(0.99)
    assert wider[0] < -4
    assert wider[1] > 7
    assert limits_in_words(predicted).startswith("subset of samples ±4, random change ±3")


# ---------------------------------------------------------------- other outputs, other forms


def test_one_logit_several_positions_and_half_precision() -> None:
    inputs, targets = DATA
    one = nn.Linear(5, 1)
    found = sl.perturb(one, (inputs.float(), (targets > 0).float()), "int2", loss="binary_cross_entropy")
    after = changed(one, lambda weight: rounded(weight, 2), 2)
    truth = ((after(inputs.float()) > 0) != (one(inputs.float()) > 0)).sum()
    assert found.flips_measured.value == int(truth)
    tokens = torch.randint(0, 7, (12, 6))
    language = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    several_choices = sl.perturb(language, (tokens, tokens), "int2", loss="token_cross_entropy")
    after = changed(language, lambda weight: rounded(weight, 2), 2)
    flips = (after(tokens).argmax(-1) != language(tokens).argmax(-1)).sum(1)
    assert several_choices.samples["flips_measured"].long().equal(flips)
    assert several_choices.decisions == 72
    half = copy.deepcopy(NET).to(torch.bfloat16)
    assert sl.perturb(half, DATA, "int8").settings["dtype"].startswith("float32")


def test_batch_statistics_and_losses_of_ones_own() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    batch = sl.perturb(net, DATA, "int8", batch_norm="batch")
    assert batch.suffices
    plain, mine = sl.perturb(net, DATA, "int8"), sl.perturb(net, DATA, "int8", loss=own)
    assert mine.predicted.value == pytest.approx(plain.predicted.value, rel=1e-6)
    with pytest.raises(InputError, match="couples the samples"):
        sl.perturb(net, DATA, "int8", loss=lambda o, t: own(o, t).mean(), batches="fixed")


def test_no_trace_is_left(untouched: Untouched) -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().train()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight.add_(0.01)
    for change in ("int4", "noise:0.01", other, lambda weight: weight.mul_(2)):
        with untouched(net, other):
            sl.perturb(net, DATA, change)


def test_it_repeats_and_leaves_as_json() -> None:
    first, second = (sl.perturb(NET, DATA, "noise:0.01", seed=5) for _ in range(2))
    assert first.to_json() == second.to_json()
    back = Perturbation.from_json(first.to_json())
    assert back.to_json() == first.to_json()
    assert back.predicted.interval() == first.predicted.interval()
    assert back.frame().equals(first.frame())
    assert back.frame().columns[0] == "layer"


def test_files_that_do_not_fit_are_refused() -> None:
    plain = sl.perturb(NET, DATA, "int8", layers=False).to_dict()
    wrong = {
        "best": "the moon",
        "samples": {},
        "steps": {"type": "tensor", "dtype": "float64", "shape": [1], "data": [0.5]},
    }
    for key, value in wrong.items():
        with pytest.raises(InputError, match="not a whole Perturbation"):
            Perturbation.from_dict({**plain, key: value})


def test_rank_agreement_is_spearmans() -> None:
    found = sl.perturb(NET, DATA, lambda weight: 1.1 * weight)
    truth = [row.measured for row in found.layers]
    squares = [row.square for row in found.layers]
    assert found.rank_agreement()["square"] == pytest.approx(float(stats.spearmanr(squares, truth).statistic))
    assert math.isnan(sl.perturb(NET, DATA, "int4").rank_agreement()["square"])  # of two layers


def test_auroc_is_that_of_all_pairs() -> None:
    generator = np.random.default_rng(0)
    scores, positive = generator.integers(0, 5, 40), generator.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert auroc(scores, positive) == pytest.approx(np.mean(pairs))
    assert math.isnan(auroc(scores, np.ones(40)))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("int40", "2 to 16 are possible"),
        ("int4:wide", "has the option 'wide', but int takes"),
        ("int4:channel:tensor", "cannot be both tensor and channel"),
        ("prune", "needs the share of the weights"),
        ("prune:1.5", "a number from 0 to 1"),
        ("noise:-1", "a number of at least 0"),
        ("noise:much", "needs its size"),
        ("fp8", "there is no change 'fp8'; write int8"),
        (7, "a change must be a string such as"),
        ({}, "a dict needs a tensor"),
        ({"nowhere": torch.zeros(2)}, "absent here"),
        (nn.Linear(5, 3).double(), "must have the same architecture"),
        (lambda weight: weight[:1], "must return a tensor of the shape"),
        (lambda weight: None, "got NoneType"),
        (lambda weight: weight * math.nan, "NaN or infinite"),
        (lambda weight: weight.nothing(), "fails on the parameter 0.weight"),
    ],
)
def test_bad_changes(change: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        sl.perturb(NET, DATA, change)


def test_other_bad_input() -> None:
    with pytest.raises(InputError, match="leave it out"):
        sl.perturb(NET, DATA, copy.deepcopy(NET), params="0")
    with pytest.raises(InputError, match="samples"):
        sl.perturb(NET, DATA, "int4", samples=0)
    with pytest.raises(InputError, match=r"moves no layer 'x', only 0\.weight"):
        sl.perturb(NET, DATA, "int4").layer("x")
    with pytest.raises(InputError, match="the model has none"):
        sl.perturb(nn.BatchNorm1d(5).double(), DATA, "int4")
    with pytest.raises(InputError, match="does not fit into float16"):
        sl.perturb(changed(NET, lambda weight: weight * 1e6), DATA, "float16")
    with pytest.raises(InputError, match="there is no change to make"):
        several(" , ")
    assert [change.name for change in several("int4, prune:0.5,int4")] == ["int4", "prune:0.5"]


def test_the_page_asks_for_bits_only_where_a_layer_raises_the_loss() -> None:
    net = nn.Linear(3, 2, bias=False)
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    labels = (net(points)[:, 0] < net(points)[:, 1]).long()  # as it predicts, so that larger weights are better
    better, worse = (sl.perturb(net, (points, labels), lambda w, f=f: f * w) for f in (1.1, -1.0))
    assert "None raises the loss." in better.to_html()
    assert "they should keep more bits" in worse.to_html()
