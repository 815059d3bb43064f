"""Gradients that are not the derivative of the forward pass are found out, by every way to measure; kinks are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import naive
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spiritlevel as sl
from spiritlevel import measures
from spiritlevel.binding.problem import Problem
from spiritlevel.watching.derivatives import _Comparison, check_derivatives


class Net(nn.Module):
    """Two layers and what a function makes of them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], hidden: int = 5) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(6, 5), nn.Linear(hidden, 3)
        self.words = nn.Embedding(3, 5, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def _hooked(net: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(net.a(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 1.01 * gradient)
    return net.b(hidden)


def _without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = torch.tanh(net.a(x))
    return net.b(hidden)


def _straight_through(net: Any, x: Tensor) -> Tensor:
    hidden = net.a(x)
    return net.b(hidden + (hidden.round() - hidden).detach())


FAULTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "tensor hook": _hooked,
    "gradient reversal": lambda net, x: net.b(Reversed.apply(torch.relu(net.a(x)))),
    "scale_grad_by_freq": lambda net, x: net.b(torch.tanh(net.words((x[:, :2] > 0).long()).sum(1) + net.a(x))),
    "no_grad": _without_gradient,
    "straight-through": _straight_through,
    "detach": lambda net, x: net.b(torch.relu(net.a(x)).detach()),
}
WAYS: dict[str, Callable[..., Any]] = {
    "traces": sl.sample_traces,
    "hutchinson": lambda net, data: sl.sample_traces(net, data, method="hutchinson"),
    "hessian": sl.hessian,
    "gauss_newton": sl.gauss_newton,
    "empirical_fisher": sl.empirical_fisher,
    "measure": lambda net, data: sl.measure(net, data, measures=["fisher_rao_norm"]),
    "compare": lambda net, data: sl.compare(net, net, data),
    "audit": lambda net, data: sl.audit(net, data, measures=["trace"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_gradients_are_refused_by_every_way_to_measure(fault: str, way: str) -> None:
    torch.manual_seed(0)
    net, data = Net(FAULTS[fault]), (torch.randn(20, 6), torch.arange(20) % 3)
    with pytest.raises(sl.InputError, match=r"gradient that autograd returns .* not the derivative of"):
        WAYS[way](net, data)


def test_a_loss_of_ones_own_is_looked_at_too() -> None:
    class Hooked:
        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if outputs.requires_grad:
                outputs = outputs.clone()
                outputs.register_hook(lambda gradient: 2 * gradient)
            return F.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(sl.InputError, match="not the derivative"):
        sl.hessian(nn.Linear(6, 3), (torch.randn(20, 6), torch.arange(20) % 3), loss=Hooked())


def test_the_way_out_works() -> None:
    net, data = Net(_without_gradient).double(), (torch.randn(20, 6).double(), torch.arange(20) % 3)
    net.a.requires_grad_(False)
    net.words.requires_grad_(False)
    frozen = nn.Sequential(nn.Linear(5, 3)).double()
    frozen[0].load_state_dict(net.b.state_dict())
    wanted = sl.trace(frozen, (torch.tanh(net.a(data[0])).detach(), data[1]))
    assert sl.trace(net, data).value == pytest.approx(wanted.value, rel=1e-9)


class WrongForward(torch.autograd.Function):
    """x² with a right gradient and a forward derivative that is 0, as that of scatter_reduce with "prod" was."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient

    @staticmethod
    def jvp(ctx: Any, moved: Tensor) -> Tensor:
        return 0 * moved


def test_an_operation_whose_forward_derivative_is_wrong_is_measured_without_it() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, x: net.b(WrongForward.apply(net.a(x)))).double()
    x, y = torch.randn(20, 6).double(), torch.arange(20) % 3
    net.words.requires_grad_(False)
    plain = Net(lambda net, x: net.b(net.a(x).square())).double()
    plain.load_state_dict(net.state_dict())
    plain.words.requires_grad_(False)
    wanted = naive.mean_hessian(plain, x, y)
    torch.testing.assert_close(sl.hessian(net, (x, y)).dense(), wanted, rtol=1e-8, atol=1e-10)
    traces = sl.sample_traces(net, (x, y), probes=400)
    assert any("reverse mode" in note for note in traces.notes)
    mean = traces.mean()
    assert abs(mean.value - float(wanted.trace())) < 5 * mean.stderr
    values = [measures.evaluate(each, (x, y), measures="fisher_rao_norm")[0]["value"] for each in (net, plain)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_the_fisher_rao_norm_needs_no_forward_derivative() -> None:
    torch.manual_seed(0)
    own, plain = Net(lambda net, x: net.b(zoo.ReverseOnly.apply(net.a(x)))), Net(lambda net, x: net.b(net.a(x) ** 2))
    plain.load_state_dict(own.state_dict())
    data = torch.randn(20, 6), torch.arange(20) % 3
    (found,), (wanted,) = (measures.evaluate(net, data, measures="fisher_rao_norm") for net in (own, plain))
    assert found["value"] == pytest.approx(wanted["value"], rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_no_number(reentrant: bool) -> None:
    """While gradients are computed a checkpoint runs again, with the parameters that the module then holds."""
    torch.manual_seed(0)

    def parts(net: Any, x: Tensor) -> Tensor:
        return net.b(checkpoint(lambda y: torch.tanh(net.a(y)), x, use_reentrant=reentrant))

    net, x, y = Net(parts).double(), torch.randn(20, 6).double(), torch.arange(20) % 3
    plain = Net(lambda net, x: net.b(torch.tanh(net.a(x)))).double()
    plain.load_state_dict(net.state_dict())
    for each in (net, plain):
        each.words.requires_grad_(False)
    torch.testing.assert_close(sl.hessian(net, (x, y)).dense(), sl.hessian(plain, (x, y)).dense())
    torch.testing.assert_close(sl.sample_traces(net, (x, y)).values, sl.sample_traces(plain, (x, y)).values)
    for name in ("ball_sharpness", "adaptive_sharpness_l2", "fisher_trace"):
        values = [measures.evaluate(each, (x, y), measures=name)[0]["value"] for each in (net, plain)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)
    before = net.a.weight.grad
    loss = net(x.requires_grad_()).sum()
    loss.backward()  # the user's own checkpoints work as before
    assert before is None
    assert net.a.weight.grad is not None


# ---------------------------------------------------------------- what must not be taken for a fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*zoo.EXACT, *zoo.PROBED, *zoo.CHAINS])
def test_no_network_with_right_derivatives_is_refused(name: str, dtype: torch.dtype) -> None:
    make, shape, *_ = {**zoo.EXACT, **zoo.PROBED, **zoo.CHAINS}[name]
    (inputs, targets) = zoo.sample_data(shape)
    problem = Problem(zoo.randomised(make()).to(dtype))
    with problem.active():
        inputs, targets = problem.place(inputs, targets)
        for _ in range(2):
            check_derivatives(problem, inputs, targets, twice=True)
    assert not problem.reverse_only


class HalfInside(nn.Module):
    """Casts to reduced precision inside: no difference of so few digits may be taken for a fault."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b, self.dtype = nn.Linear(6, 5), nn.Linear(5, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(self.dtype).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduced_precision_inside_is_no_fault(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sl.hessian(HalfInside(dtype), (torch.randn(20, 6), torch.arange(20) % 3))


def test_padding_of_embeddings_is_no_fault() -> None:
    net = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3))
    with torch.no_grad():
        net[0].weight[0] = 1.0  # as after loading weights
    tokens = torch.randint(0, 3, (20, 3))
    sl.hessian(net, (tokens, torch.arange(20) % 3))


def test_networks_on_a_kink_are_measured_and_say_so() -> None:
    """Two layers of which the first is zero: every pre-activation is 0, and moves with the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    data = torch.randn(20, 6).double(), torch.arange(20) % 3
    assert not sl.sample_traces(net, data).notes
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    (note,) = sl.sample_traces(net, data).notes
    assert "100% of the samples looked at sit exactly on a kink" in note


def test_zeros_that_no_weight_moves_are_no_kinks() -> None:
    """A ReLU of a ReLU is given zeros, and so is one behind inputs that are zero; neither has a kink there."""
    torch.manual_seed(0)
    data = torch.randn(20, 6).double(), torch.arange(20) % 3
    twice = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.ReLU(), nn.Linear(5, 3)).double()
    black = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)).double()
    assert not sl.sample_traces(twice, data).notes
    assert not sl.sample_traces(black, (0 * data[0], data[1])).notes


class Residual(nn.Module):
    """relu(x + branch(x)) as in a ResNet; the gain of the branch's last norm may begin at zero."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
        nn.init.constant_(self.norms[1].weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norms[1](self.last(torch.relu(self.norms[0](self.first(x))))))


@pytest.mark.parametrize("gain", [0.0, 1e-3])
def test_a_residual_network_whose_branches_begin_at_zero_sits_on_kinks(gain: float) -> None:
    """Where the shortcut is cut off, what goes into the next ReLU is exactly 0 and moves with the branch's gain."""
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), Residual(gain), Residual(gain), *head)
    traces = sl.sample_traces(net, (torch.randn(20, 1, 8, 8), torch.arange(20) % 3))
    assert traces.exact
    assert [note[:37] for note in traces.notes] == ["100% of the samples looked at sit exa"] * (gain == 0)


def test_the_share_is_that_of_the_samples_on_a_kink() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    nn.init.zeros_(net[0].bias)
    inputs = torch.randn(20, 6)
    inputs[:10] = 0  # there a fresh network is given its bias of 0
    (note,) = sl.sample_traces(net, (inputs, torch.arange(20) % 3)).notes
    assert note.startswith("40% of the samples")
    report = sl.measure(net, (inputs, torch.arange(20) % 3), measures=["trace"], parts=())
    assert f"About the traces: {note}." in report.headline


def test_zeros_that_come_and_go_or_that_nobody_reads_are_no_kinks() -> None:
    """Of 4000 units some are cut off by so little that a step of the weights brings them back."""
    torch.manual_seed(0)
    data = torch.randn(20, 6), torch.arange(20) % 3
    wide = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.ReLU(), nn.Linear(4000, 3))
    pooled = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.AvgPool1d(4), nn.ReLU(), nn.Linear(1000, 3))
    unread = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        unread[0].weight[0], unread[0].bias[0], unread[2].weight[:, 0] = 0, 0, 0
    for net in (wide, pooled, unread):
        assert not sl.sample_traces(net, data, passes=0).notes


def test_padding_that_is_masked_or_ignored_is_no_kink() -> None:
    """A padded token is embedded as 0, and layers without bias keep it there."""

    class Padded(nn.Module):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.words, self.masked = nn.Embedding(5, 4, padding_idx=0), masked
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)
            nn.init.zeros_(self.a.bias)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = torch.relu(self.a(self.words(tokens)))
            if not self.masked:
                return self.b(hidden)
            return self.b((hidden * (tokens != 0)[..., None]).sum(1))

    torch.manual_seed(0)
    tokens = torch.randint(1, 5, (12, 4))
    tokens[:, 2:] = 0
    labels = torch.randint(0, 3, (12, 4))
    ignored = torch.where(tokens == 0, -100, labels)
    assert not sl.sample_traces(Padded(True), (tokens, labels[:, 0])).notes
    assert not sl.sample_traces(Padded(False), (tokens, ignored)).notes
    (note,) = sl.sample_traces(Padded(False), (tokens, labels)).notes  # the loss reads them
    assert note.startswith("100% of the samples")


def test_a_model_that_runs_only_undifferentiated_is_refused_in_one_sentence() -> None:
    """Parts of a split may not be written to while autograd watches: it was torch's bare exception."""

    def written(net: Any, x: Tensor) -> Tensor:
        hidden = net.a(x)
        for part in hidden.chunk(2, 1):
            part.mul_(2)
        return net.b(hidden)

    data = torch.randn(4, 6), torch.arange(4) % 3
    net = Net(written)
    net.words.requires_grad_(False)
    for measured in (sl.sample_traces, sl.hessian, lambda *a: measures.evaluate(*a, measures="fisher_rao_norm")):
        with pytest.raises(sl.InputError, match="is being modified inplace"):
            measured(net, data)


@pytest.mark.parametrize("fault", [1.0, 1.01])
def test_kinks_as_close_as_those_of_a_large_network_hide_no_fault(fault: float) -> None:
    """A kink every 2.5e-7, as among a million units: a step of 1e-7 crosses some, and says nothing any more."""

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8) + 1)

        def forward(self, x: Tensor) -> Tensor:
            moved = 2e6 * self.weight
            waves = 1e-6 * (moved - moved.round()).abs() + self.weight
            if waves.requires_grad:
                waves.register_hook(lambda gradient: fault * gradient)
            return x * waves

    torch.manual_seed(0)
    problem = Problem(Waves())
    inputs, targets = torch.randn(5, 8), torch.arange(5)
    with problem.active():
        comparison = _Comparison(problem, inputs, targets, torch.float64)
        assert comparison.verdicts(set()) == {"reverse": fault == 1.0}
        comparison.steps = {"reverse": 1e-7}
        assert comparison._from(0, set(), aside=True) == {"reverse": None}


class Changed(nn.Module):
    """Changes a gradient on its way; some classes are ruled out by a very small logit."""

    def __init__(self, masked: int, mask: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3 + masked)
        self.mask = torch.where(torch.arange(3 + masked) < 3, 0.0, mask)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda slope: 1.01 * slope)
        outputs: Tensor = self.last(hidden) + self.mask
        return outputs


@pytest.mark.parametrize("masked", [2, 30, 300])
@pytest.mark.parametrize("mask", [-1e3, -1e6, -1e9])
def test_masked_logits_do_not_hide_a_wrong_gradient(mask: float, masked: int) -> None:
    torch.manual_seed(0)
    data, model = (torch.randn(7, 4).double(), torch.arange(7) % 3), Changed(masked, mask).double()
    for function in (sl.sample_traces, sl.gauss_newton):
        with pytest.raises(sl.InputError, match=r"gradient .* is not the derivative of its forward pass"):
            function(model, data)
