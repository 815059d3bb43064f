"""Products of curvature operators against dense matrices, closed forms and themselves."""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import mpmath
import naive
import pytest
import torch
from small_networks import NETWORKS, assert_close, mean_hessian, network, not_traceable, products, rows, some_data
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.problem import Problem
from spiritlevel.binding.state import _load_forward_mode
from spiritlevel.errors import InputError
from spiritlevel.operators import replay
from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian

_load_forward_mode()  # torch warns where its forward derivatives are first used


# ---------------------------------------------------------------- dense references


@pytest.mark.parametrize("name", NETWORKS)
def test_hessian_is_the_dense_one(name: str) -> None:
    net, data = network(name), some_data()
    expected = naive.mean_hessian(net, *data)
    op = hessian(net, data)
    assert op.size < 300
    assert list(op.names) == [name for name, _ in net.named_parameters()]
    assert_close(op.dense(), expected)
    assert_close(products(op), expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_traced_and_equal_the_differentiated_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = network(name), some_data(6)
    problem = Problem(net)
    vectors = torch.randn(4, problem.size, dtype=torch.float64)
    replaying = mean_hessian(net, data, batch_size=3)
    recomputing = mean_hessian(net, data, batch_size=3, memory=1)
    first, again, anew = (
        torch.cat([matrix.multiply(vector[None]) for vector in vectors])
        for matrix in (replaying, replaying, recomputing)
    )
    assert len(replaying.kept) == 2
    assert len(recomputing.kept) == 0
    assert torch.equal(first, again)
    assert torch.equal(first, anew)
    assert_close(replaying.multiply(vectors), first, 1e-12)  # all at once
    assert all(trace is not None for trace in replaying.traces.values())
    monkeypatch.setattr(replay, "_cut", not_traceable)
    differentiating = mean_hessian(net, data, batch_size=3)
    assert_close(differentiating.multiply(vectors), first, 1e-12)
    assert not differentiating.kept


def test_the_constants_of_a_kept_batch_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    cut = replay._cut

    def counting(*arguments: Any, **options: Any) -> Any:
        trace, values = cut(*arguments, **options)

        def prepare(*tensors: Tensor) -> tuple[Tensor, ...]:
            prepared.append(1)
            return trace.prepare(*tensors)

        return dataclasses.replace(trace, prepare=prepare), values

    monkeypatch.setattr(replay, "_cut", counting)
    matrix = mean_hessian(network("tanh"), some_data(6), batch_size=3)
    for _ in range(2):
        matrix.multiply(torch.ones(1, matrix.problem.size, dtype=torch.float64))
    assert len(matrix.kept) == len(prepared) == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_the_product_that_is_traced_is_the_one_that_is_replayed(name: str) -> None:
    """Beyond 128 samples a trace is tried on a few, and the first product comes from the tracing itself."""
    data, problem = some_data(150), Problem(network(name))
    matrix = mean_hessian(problem.model, data, batch_size=150)
    vector = torch.randn(1, problem.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, again = matrix.multiply(vector), matrix.multiply(vector.clone())
    assert matrix.kept
    assert torch.equal(first, again)
    assert_close(first[0], naive.mean_hessian(problem.model, *data) @ vector[0])


def test_a_trace_keeps_no_tensor_but_its_constants() -> None:
    matrix = mean_hessian(network("tanh"), some_data(150), batch_size=150)
    matrix.multiply(torch.ones(1, matrix.problem.size, dtype=torch.float64))
    (trace,) = matrix.traces.values()
    assert trace is not None
    nodes = [*trace.prepare.nodes, *trace.multiply.nodes]
    assert nodes
    assert not any(isinstance(value, Tensor) for node in nodes for value in tree_leaves((node.args, node.kwargs)))
    assert not any(argument.tensor is not None for node in nodes for argument in node.inputs)


def test_several_vectors_do_not_have_the_kept_tensors_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vmap` asks for the name of what it is given, and takes its `repr` if it has none."""
    op = hessian(network("tanh"), some_data(30), batch_size=10)
    vectors = torch.randn(op.size, 3, dtype=torch.float64)
    wanted = op @ vectors

    def refuse(tensor: Tensor, **_: Any) -> str:
        raise AssertionError("printed")

    monkeypatch.setattr(Tensor, "__repr__", refuse)
    assert torch.equal(op @ vectors, wanted)


def test_operators_leave_no_tensor_behind() -> None:
    """Not even where Python's collector cannot see a circle: inside autograd."""
    model, data = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3)).double(), some_data(8)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(item), Tensor) for item in gc.get_objects())

    for matrix in (hessian, gauss_newton, empirical_fisher):
        matrix(model, data) @ torch.ones(115, dtype=torch.float64)
    before = alive()
    for matrix in (hessian, gauss_newton, empirical_fisher):
        matrix(model, data) @ torch.ones(115, dtype=torch.float64)
    assert alive() == before


# ---------------------------------------------------------------- what would give a wrong matrix unnoticed


class Scaled(nn.Module):
    """Divides by a length that its gradient does not see."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last, self.way = nn.Linear(12, 5), nn.Linear(5, 3), way

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "detach":
            length = h.norm(dim=1, keepdim=True).detach()
        elif self.way == "data":
            length = h.norm(dim=1, keepdim=True).data
        else:
            with torch.no_grad():
                length = h.norm(dim=1, keepdim=True)
        out: Tensor = self.last(torch.tanh(h / length))
        return out


@pytest.mark.parametrize("way", ["no_grad", "detach", "data"])
@pytest.mark.parametrize("matrix", [hessian, gauss_newton])
def test_a_gradient_that_is_cut_is_refused(matrix: Any, way: str) -> None:
    """What autograd then returns is the derivative of another function, with the length held constant."""
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"not the derivative of its forward pass.*no_grad\(\) or behind .detach"):
        matrix(Scaled(way).double(), some_data(40))


class Centred(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5, track_running_stats=False), Centred()])
def test_a_network_that_mixes_its_samples_is_refused_unless_batches_are_meant(layer: nn.Module) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 5), layer, nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(InputError, match=r"depends on the other samples.*batch_norm='batch'"):
        hessian(net, some_data(40))
    hessian(net, some_data(40), batch_norm="batch", batch_size=10)


class Masked(nn.Module):
    """Adds a class that is ruled out by a very small logit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x[:, :1], -1e9)], 1)


def test_a_masked_logit_does_not_hide_that_samples_mix() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3), Masked()
    hessian(nn.Sequential(*layers).double(), some_data(40))
    with pytest.raises(InputError, match="depends on the other samples"):
        hessian(nn.Sequential(Centred(), *layers).double(), some_data(40))


class Spectral(nn.Module):
    """A filter in frequency space, whose complex weights are pairs of numbers."""

    def __init__(self, as_complex: Any) -> None:
        super().__init__()
        self.filter, self.layer = nn.Parameter(torch.randn(7, 2)), nn.Linear(12, 3)
        self.as_complex = as_complex

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.fft.irfft(torch.fft.rfft(x) * self.as_complex(self.filter), n=12).tanh())


def test_pairs_of_numbers_may_be_read_as_complex_ones() -> None:
    """With an odd number of parameters, every other row of some vectors begins at an odd place in memory."""
    net, data = Spectral(torch.view_as_complex).double(), some_data()
    written = Spectral(lambda pairs: torch.complex(pairs[..., 0], pairs[..., 1])).double()
    written.load_state_dict(net.state_dict())
    expected = naive.mean_hessian(written, *data)
    assert len(expected) % 2
    assert_close(hessian(net, data).dense(), expected)
    assert_close(products(hessian(net, data)), expected)


def test_data_that_are_written_to_are_refused() -> None:
    inputs, targets = some_data(30)
    op = hessian(network("tanh"), (inputs, targets))
    vector = torch.ones(op.size, dtype=torch.float64)
    op @ vector
    inputs.mul_(2)
    with pytest.raises(InputError, match=r"written to in place.*new operator"):
        op @ vector


class Config:
    """Options of a forward pass, all with the same name."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Config"


class Configured(nn.Module):
    """Has an option."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor, config: Config) -> Tensor:
        out: Tensor = torch.tanh(config.factor * self.layer(x))
        return out


def test_what_only_looks_the_same_is_not_traced_as_the_same() -> None:
    torch.manual_seed(0)
    net = Configured().double()
    inputs, targets = some_data(20)
    batches = [({"x": inputs[i : i + 10], "config": Config(c)}, targets[i : i + 10]) for i, c in ((0, 1.0), (10, 3.0))]
    parts = [hessian(net, [batch]).dense() for batch in batches]
    assert_close(hessian(net, batches).dense(), (parts[0] + parts[1]) / 2)


def test_batches_of_other_strides_are_traced_anew() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    inputs, targets = some_data(20)
    first, second = inputs.reshape(2, 10, 3, 4)
    turned = second.transpose(1, 2).contiguous().transpose(1, 2)
    expected = hessian(net, (inputs.reshape(20, 3, 4), targets)).dense()
    assert_close(hessian(net, [(first, targets[:10]), (turned, targets[10:])]).dense(), expected)


LOSSES: dict[str, tuple[Any, Any]] = {  # what the library gets, and the same written out
    "cross_entropy": ("cross_entropy", "cross_entropy"),
    "weighted": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 3.0]), reduction="none"),
        lambda out, y: torch.tensor([0.5, 1.0, 3.0])[y] * naive.cross_entropy(out, y),
    ),
    "smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda out, y: 0.8 * naive.cross_entropy(out, y) - 0.2 / 3 * out.log_softmax(1).sum(1),
    ),
    "squared_error": ("squared_error", "squared_error"),
    "mse": (nn.MSELoss(), lambda out, y: 2 / 3 * naive.squared_error(out, y)),
    "exponential": ("exponential", "exponential"),
    "callable": (lambda out, y: (out - 0.5).pow(4).sum(1),) * 2,
    "binary_cross_entropy": ("binary_cross_entropy", "binary_cross_entropy"),
    "one exponential": ("exponential", "exponential"),
    "one number": ("squared_error", lambda out, y: (out.reshape(y.shape) - y) ** 2 / 2),  # outputs of shape (N,)
}


def loss_case(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], Any, Any]:
    ours, plain = LOSSES[name]
    net, (inputs, targets) = network("tanh"), some_data()
    if name in ("binary_cross_entropy", "one exponential"):
        net = nn.Sequential(net, nn.Linear(3, 1).double())
        targets = targets % 2
    elif name == "one number":
        net, targets = nn.Sequential(net, nn.Linear(3, 1).double(), nn.Flatten(0)), targets.double()
    elif name == "mse":
        targets = torch.randn(7, 3, dtype=torch.float64)
    return net, (inputs, targets), ours, plain


@pytest.mark.parametrize("name", LOSSES)
def test_hessian_of_every_loss(name: str) -> None:
    net, data, ours, plain = loss_case(name)
    assert_close(products(hessian(net, data, loss=ours)), naive.mean_hessian(net, *data, plain))


def jacobians(net: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, C) and their Jacobians (N, C, P)."""
    flat = naive.Flat(net)

    def outputs(point: Tensor) -> Tensor:
        return flat.outputs(point, inputs).reshape(len(inputs), -1)

    return outputs(flat.point), jacrev(outputs)(flat.point)


@pytest.mark.parametrize("name", LOSSES)
def test_gauss_newton_is_the_dense_one(name: str) -> None:
    net, (inputs, targets), ours, plain = loss_case(name)
    outputs, jacobian = jacobians(net, inputs)
    loss = naive.LOSSES[plain] if isinstance(plain, str) else plain
    bend = torch.stack(
        [
            torch.func.hessian(lambda out, y=y: loss(out[None], y[None])[0])(out)
            for out, y in zip(outputs, targets, strict=True)
        ]
    )
    expected = torch.einsum("ncp,ncd,ndq->pq", jacobian, bend, jacobian) / len(targets)
    assert_close(products(gauss_newton(net, (inputs, targets), loss=ours)), expected)
    assert_close(gauss_newton(net, rows(inputs, targets, 3, 4), loss=ours).dense(), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_empirical_fisher_is_the_dense_one(name: str) -> None:
    net, (inputs, targets), ours, plain = loss_case(name)
    gradients = torch.stack([naive.gradient(net, inputs[n : n + 1], targets[n : n + 1], plain) for n in range(7)])
    expected = gradients.T @ gradients / 7
    assert_close(products(empirical_fisher(net, (inputs, targets), loss=ours)), expected)
    assert_close(empirical_fisher(net, rows(inputs, targets, 3, 4), loss=ours).dense(), expected)


def test_a_loss_of_sequences() -> None:
    """A callable may take outputs of any shape."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x.reshape(len(x), 3, 4)))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (
            F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").reshape(len(targets), -1).sum(1)
        )

    net, inputs = Tokens().double(), some_data()[0]
    targets = torch.randint(0, 5, (7, 3))
    assert_close(hessian(net, (inputs, targets), loss=loss).dense(), naive.mean_hessian(net, inputs, targets, loss))
    gradients = torch.stack([naive.gradient(net, inputs[n : n + 1], targets[n : n + 1], loss) for n in range(7)])
    assert_close(empirical_fisher(net, (inputs, targets), loss=loss).dense(), gradients.T @ gradients / 7)


def test_weight_norm() -> None:
    class Normed(nn.Module):
        def __init__(self, source: nn.Module) -> None:
            super().__init__()
            for name, parameter in source.named_parameters():
                setattr(self, name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))

        def forward(self, x: Tensor) -> Tensor:
            direction = self.parametrizations_weight_original1
            length = direction.square().sum(1, keepdim=True).sqrt()
            return torch.tanh(F.linear(x, direction * self.parametrizations_weight_original0 / length, self.bias))

    layer = parametrizations.weight_norm(nn.Linear(12, 3).double())
    net, data = nn.Sequential(layer, nn.Tanh()), some_data()
    assert_close(products(hessian(net, data)), naive.mean_hessian(Normed(layer), *data))


# ---------------------------------------------------------------- closed forms


def test_linear_regression() -> None:
    inputs, _ = some_data(20)
    targets = torch.randn(20, 1, dtype=torch.float64)
    net = nn.Linear(12, 1, bias=False).double()
    assert_close(hessian(net, (inputs, targets), loss=nn.MSELoss()).dense(), 2 / 20 * inputs.T @ inputs)


def test_logistic_regression() -> None:
    inputs, targets = some_data(20)
    net = nn.Linear(12, 1, bias=False).double()
    s = torch.sigmoid(net(inputs)).detach()
    expected = inputs.T @ (s * (1 - s) * inputs) / 20
    assert_close(hessian(net, (inputs, targets % 2), loss="binary_cross_entropy").dense(), expected)


def test_softmax_regression() -> None:
    inputs, targets = some_data(20)
    net = nn.Linear(12, 3, bias=False).double()
    s = torch.softmax(net(inputs), 1).detach()
    bend = torch.diag_embed(s) - s[:, :, None] * s[:, None, :]
    expected = torch.einsum("ncd,ni,nj->cidj", bend, inputs, inputs).reshape(36, 36) / 20
    assert_close(hessian(net, (inputs, targets)).dense(), expected)


@pytest.mark.parametrize("right", [True, False], ids=["correct", "misclassified"])
@pytest.mark.parametrize("margin", [2.0, 8.0, 17.0, 25.0, 40.0, 80.0])
def test_products_stay_right_at_tiny_losses(margin: float, right: bool) -> None:
    """Float32 against 60 digits: an affine model whose logits are known exactly."""
    logits = [margin, 0.0, -1.0, -0.5]
    inputs, label = torch.tensor([[1.0, -2.0, 0.5]]), 0 if right else 2
    net = nn.Linear(3, 4)
    with torch.no_grad():
        net.weight.zero_()
        net.bias.copy_(torch.tensor(logits))
    vector = torch.linspace(-1, 2, 16)
    extended = [*inputs[0].tolist(), 1.0]
    weights, bias = vector[:12].reshape(4, 3).tolist(), vector[12:].tolist()
    with mpmath.workdps(60):
        powers = [mpmath.exp(z) for z in logits]
        s = [p / mpmath.fsum(powers) for p in powers]
        u = [
            mpmath.fsum(a * b for a, b in zip([*w, c], extended, strict=True))
            for w, c in zip(weights, bias, strict=True)
        ]
        mean = mpmath.fsum(a * b for a, b in zip(s, u, strict=True))
        bend = [float(p * (d - mean)) for p, d in zip(s, u, strict=True)]
        slope = [p - (c == label) for c, p in enumerate(s)]
        along = mpmath.fsum(a * b for a, b in zip(slope, u, strict=True))
        fisher = [float(g * along) for g in slope]
    data = inputs, torch.tensor([label])

    def expected(factor: list[float]) -> Tensor:
        outer = torch.tensor(factor, dtype=torch.float64)[:, None] * torch.tensor(extended, dtype=torch.float64)
        return torch.cat([outer[:, :3].reshape(-1), outer[:, 3]])

    assert_close(hessian(net, data) @ vector, expected(bend), 1e-5)
    assert_close(gauss_newton(net, data) @ vector, expected(bend), 1e-5)
    if margin <= 40 or not right:  # the square of exp(-80) is no float32
        assert_close(empirical_fisher(net, data) @ vector, expected(fisher), 1e-5)


@pytest.mark.parametrize("right", [True, False], ids=["correct", "misclassified"])
def test_deep_products_stay_right_at_tiny_losses(right: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs, _ = some_data(20)
    with torch.no_grad():
        net[2].weight.mul_(30 / float(net(inputs).topk(2).values.diff().abs().max()))
        inputs = inputs.float().double()
        for parameter in net.parameters():
            parameter.copy_(parameter.float())
        targets = net(inputs).argmax(1)
    if not right:
        targets = (targets + 1) % 3
    vector = torch.randn(131, dtype=torch.float64).float()
    exact = hessian(net, (inputs, targets)) @ vector.double()
    single = hessian(copy.deepcopy(net).float(), (inputs.float(), targets)) @ vector
    assert_close(single, exact, 1e-4)
