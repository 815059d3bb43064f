"""Products of curvature operators against dense matrices, closed forms and themselves."""

from __future__ import annotations

import copy
import gc
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpmath
import naive
import pytest
import torch
import zoo
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from spiritlevel import estimators
from spiritlevel.binding.context import Context
from spiritlevel.binding.losses import CrossEntropy
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.state import _load_forward_mode
from spiritlevel.errors import InputError
from spiritlevel.operators import averaging, replay
from spiritlevel.operators.averaging import MeanMatrix
from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian, hessian_variance
from spiritlevel.operators.products import _slope, hessian_product
from spiritlevel.samples import traces as per_sample
from spiritlevel.samples.margins import margins

_load_forward_mode()  # torch warns where its forward derivatives are first used


def mean_hessian(net: nn.Module, data: Any, **options: Any) -> MeanMatrix:
    return MeanMatrix(hessian_product, Context(net, data, ordered=False, **options))


# ---------------------------------------------------------------- networks of fewer than 300 parameters


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.reshape(len(x), 3, 4)).mean(1))


class Tied(nn.Module):
    """One weight at two depths, and its transpose at a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(x[:, :6]))))
        return (hidden @ self.layer.weight)[:, :3]


class Assigning(nn.Module):
    """Writes into a tensor of zeros, slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros(len(x), 3, dtype=x.dtype)
        hidden = torch.tanh(self.layer(x))
        result[:, :2] = hidden[:, :2] * hidden[:, 2:4]
        result[:, 2] += hidden[:, 5] ** 2
        return result


class Unused(nn.Module):
    """Has a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2, 2))
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "affine": lambda: nn.Linear(12, 3),
    "tanh": lambda: nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)),
    "relu in place": lambda: nn.Sequential(nn.Linear(12, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "gelu, dropout": lambda: nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Dropout(0.5), nn.Linear(5, 3)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 2, 2),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 3),
    ),
    "layer norm": lambda: nn.Sequential(nn.Linear(12, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(12, 6), nn.GroupNorm(2, 6), nn.SiLU(), nn.Linear(6, 3)),
    "attention": Attention,
    "tied weights": Tied,
    "assignments": Assigning,
    "unused parameter": Unused,
}


def network(name: str) -> nn.Module:
    """A float64 network with batch statistics and slopes away from their defaults."""
    torch.manual_seed(3)
    net = NETWORKS[name]().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            with torch.no_grad():
                module.weight.uniform_(0.5, 2)
    return net


def some_data(samples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def rows(inputs: Tensor, targets: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def products(op: estimators.Operator) -> Tensor:
    """The matrix from products with one vector at a time."""
    return torch.stack([op @ column for column in torch.eye(op.size, dtype=op.dtype)], dim=1)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    error = float((actual.double() - expected).abs().max())
    assert error <= tolerance * max(1e-30, float(expected.abs().max())), f"off by {error:.2e}"


def not_traceable(*_: Any) -> Any:
    raise RuntimeError("recorded operations cannot be cut in two")


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

    def counting(*arguments: Any) -> Any:
        trace, values = cut(*arguments)
        trace.prepare.register_forward_hook(lambda *_: prepared.append(1))
        return trace, values

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
    nodes = [*trace.prepare.graph.nodes, *trace.multiply.graph.nodes]
    assert not any(isinstance(value, Tensor) for node in nodes for value in node.meta.values())


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
}


def loss_case(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], Any, Any]:
    ours, plain = LOSSES[name]
    net, (inputs, targets) = network("tanh"), some_data()
    if name in ("binary_cross_entropy", "one exponential"):
        net = nn.Sequential(net, nn.Linear(3, 1).double())
        targets = targets % 2
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
    return flat.outputs(flat.point, inputs), jacrev(lambda point: flat.outputs(point, inputs))(flat.point)


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


# ---------------------------------------------------------------- data


class Pairs:
    """Batches that can be read again; `change` edits what comes in later passes."""

    def __init__(self, batches: list[Any], change: Callable[[int, list[Any]], list[Any]] = lambda _, b: b) -> None:
        self.batches, self.change, self.passes = batches, change, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.change(self.passes, self.batches))


def test_batches_are_weighted_by_their_size() -> None:
    net, data = network("tanh"), some_data()
    expected = naive.mean_hessian(net, *data)
    for batches in (rows(*data, 3, 4), rows(*data, 6, 1), rows(*data, 2, 2, 3)):
        assert_close(hessian(net, batches).dense(), expected)
    for batch_size in (1, 2, 3, 100):
        assert_close(hessian(net, data, batch_size=batch_size).dense(), expected)
        assert_close(hessian(net, rows(*data, 3, 4), batch_size=batch_size).dense(), expected)


def test_kinds_of_data() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    expected = naive.mean_hessian(net, inputs, targets)
    dataset = TensorDataset(inputs, targets)
    for data in (
        dataset,
        DataLoader(dataset, batch_size=3),
        DataLoader(dataset, batch_size=3, shuffle=True),  # read in the order of its data set
        (inputs.numpy(), targets.numpy()),
        Pairs(rows(inputs, targets, 3, 4)),
    ):
        assert_close(hessian(net, data).dense(), expected)
        assert_close(hessian(net, data, memory=1).dense(), expected)


def test_inputs_with_names_and_with_settings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor, power: int = 1, mask: Tensor | None = None) -> Tensor:
            hidden = torch.tanh(self.layer(x))
            return hidden**power if mask is None else hidden * mask

    net, (inputs, targets) = Named().double(), some_data()

    def cube(weight: Tensor, bias: Tensor) -> Tensor:
        return naive.cross_entropy(torch.tanh(F.linear(inputs, weight, bias)) ** 3, targets).mean()

    blocks = torch.func.hessian(cube, (0, 1))(net.layer.weight.detach(), net.layer.bias.detach())
    expected = torch.cat(
        [torch.cat([b.reshape(n, -1) for b in row], 1) for row, n in zip(blocks, (36, 3), strict=True)]
    )
    batches = [({"x": x, "power": 3, "mask": None}, y) for x, y in rows(inputs, targets, 3, 3, 1)]
    assert_close(hessian(net, batches).dense(), expected)
    mixed = [({"x": x, "power": power}, y) for power, (x, y) in zip((3, 1), rows(inputs, targets, 3, 4), strict=True)]
    assert not torch.allclose(hessian(net, mixed).dense(), expected)


def test_data_are_read_once_if_they_fit() -> None:
    data = Pairs(rows(*some_data(), 3, 4))
    op = hessian(network("tanh"), data)
    op @ torch.ones(op.size, dtype=op.dtype)
    passes = data.passes
    op @ torch.ones(op.size, dtype=op.dtype)
    assert data.passes == passes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda n, b: b if n < 5 else b[:-1], r"the data changed between two passes \(7 samples, then 3\)"),
        (lambda n, b: [b[0], (b[1][0] + n, b[1][1])], r"the data changed between two passes \(7 samples, then 7\)"),
        (lambda n, b: [(b[0][0] + n, b[0][1]), b[1]], "the data change between two passes"),
    ],
)
def test_data_that_change_are_refused(change: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):  # noqa: PT012
        op = hessian(network("tanh"), Pairs(rows(*some_data(), 3, 4), change), memory=1)
        for _ in range(3):
            op @ torch.ones(op.size, dtype=op.dtype)


# ---------------------------------------------------------------- parameters, precision, decay


def test_parameters_can_be_chosen() -> None:
    net, data = network("tanh"), some_data()
    full = naive.mean_hessian(net, *data)
    assert_close(hessian(net, data, params="2").dense(), full[-18:, -18:])
    assert_close(
        hessian(net, data, params=["*.bias"]).dense(), naive.mean_hessian(net, *data, params=["0.bias", "2.bias"])
    )
    net[2].weight.requires_grad_(False)
    assert hessian(net, data).names == ("0.weight", "0.bias", "2.bias")


def test_the_operator_keeps_its_point() -> None:
    net, data = network("tanh"), some_data()
    expected = naive.mean_hessian(net, *data)
    op = hessian(net, data)
    with torch.no_grad():
        net[0].weight.add_(1)
    assert_close(op.dense(), expected)


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
def test_weight_decay_adds_to_the_diagonal(kind: Any) -> None:
    net, data = network("tanh"), some_data()
    plain, decayed = kind(net, data).dense(), kind(net, data, weight_decay=0.3).dense()
    assert_close(decayed, plain + 0.3 * torch.eye(len(plain), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_as_float32(dtype: torch.dtype) -> None:
    net, (inputs, targets) = network("tanh").to(dtype), some_data()
    op = hessian(net, (inputs.to(dtype), targets))
    assert op.dtype == torch.float32
    assert_close(op.dense(), naive.mean_hessian(net, inputs.to(dtype), targets), 1e-5)


def test_float32_sums_over_many_batches_do_not_drift() -> None:
    net, (inputs, targets) = network("tanh"), some_data(500)
    expected = naive.mean_hessian(net, inputs, targets)
    op = hessian(copy.deepcopy(net).float(), (inputs.float(), targets), batch_size=1)
    assert_close(op @ torch.ones(op.size), expected @ torch.ones(op.size, dtype=torch.float64), 2e-6)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return torch.tanh(hidden) if hidden.sum() > 0 else hidden


def test_a_model_that_branches_is_differentiated_every_time() -> None:
    net, data = Branching().double(), some_data()
    with torch.no_grad():
        net.layer.bias.fill_(5.0)
    expected = naive.mean_hessian(nn.Sequential(net.layer, nn.Tanh()), *data)
    matrix = mean_hessian(net, data)
    assert_close(matrix.multiply(torch.eye(39, dtype=torch.float64)), expected)
    assert list(matrix.traces.values()) == [None]  # a branch holds for one batch only


def test_batches_of_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "_MOST_SHAPES", 2)
    net, data = network("tanh"), some_data(15)
    batches = rows(*data, 1, 2, 3, 4, 5)
    matrix = mean_hessian(net, batches)
    assert_close(matrix.multiply(torch.eye(83, dtype=torch.float64)), naive.mean_hessian(net, *data))
    assert [trace is not None for trace in matrix.traces.values()] == [True, True, False, False, False]


def test_operations_that_cannot_be_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no batching rule")

    monkeypatch.setattr(averaging, "vmap", fail)
    net, data = network("tanh"), some_data()
    assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data))


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class WithFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused, self.function = nn.Linear(12, 4), nn.Linear(4, 3), nn.Linear(2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
@pytest.mark.parametrize("loss", ["cross_entropy", lambda o, t: F.cross_entropy(o, t, reduction="none")])
def test_functions_without_forward_derivatives(kind: Any, loss: Any) -> None:
    net, data = WithFunction(zoo.ReverseOnly.apply).double(), some_data()
    op = kind(net, data, batch_size=3, loss=loss)
    assert_close(op.dense(), kind(WithFunction(torch.square).double(), data, loss=loss).dense(), 1e-12)
    if kind is hessian:
        assert_close(op.dense(), naive.mean_hessian(WithFunction(torch.square).double(), *data))


def test_a_function_that_cannot_be_differentiated_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"the (gradient|second derivative) that autograd returns .* is not the deriv"):
        _ = hessian(WithFunction(OnceOnly.apply).double(), some_data()).dense()


def test_autocast_of_the_caller_does_not_lower_the_precision() -> None:
    net = WithFunction(torch.tanh)
    inputs, targets = some_data()
    op = hessian(net, (inputs.float(), targets))
    vector = torch.randn(op.size, generator=torch.Generator().manual_seed(0))
    expected = [op @ vector, *(find(op) for find in FINDERS)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [op @ vector, *(find(op) for find in FINDERS)]
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


FINDERS: list[Any] = [
    lambda op: estimators.eigenvalues(op, max_matvecs=20).values,
    lambda op: torch.tensor(estimators.operator_trace(op, probes=20).value),
    lambda op: torch.tensor(estimators.frobenius_norm(op, probes=20).value),
    lambda op: estimators.diagonal(op, probes=20).values,
    lambda op: estimators.spectral_density(op, probes=2, steps=8).nodes,
]


def test_a_model_that_reads_its_data_is_not_traced() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(torch.tensor(x.tolist(), dtype=x.dtype) ** 2))

    net, (inputs, targets) = Hidden().double(), some_data(8)
    expected = naive.mean_hessian(nn.Sequential(net.layer, nn.Tanh()), inputs**2, targets)
    matrix = mean_hessian(net, (inputs, targets), batch_size=2)
    assert_close(matrix.multiply(torch.eye(39, dtype=torch.float64)), expected)
    assert list(matrix.traces.values()) == [None]


# ---------------------------------------------------------------- batch norm


def test_batch_statistics() -> None:
    net, (inputs, targets) = network("batch norm"), some_data(8)
    whole = naive.mean_hessian(net, inputs, targets, batch_norm="batch")
    assert_close(products(hessian(net, (inputs, targets), batch_norm="batch")), whole)
    assert_close(hessian(net, (inputs, targets), batch_norm="batch", memory=1).dense(), whole)
    batches = rows(inputs, targets, 3, 5)
    parts = [naive.mean_hessian(net, *batch, batch_norm="batch") * len(batch[1]) / 8 for batch in batches]
    assert_close(hessian(net, batches, batch_norm="batch").dense(), parts[0] + parts[1])
    with pytest.raises(InputError, match="batch_size=2 does not fit data that come in batches of 3"):
        hessian(net, batches, batch_norm="batch", batch_size=2)


def test_batch_statistics_of_gauss_newton_and_fisher() -> None:
    net, (inputs, targets) = network("batch norm"), some_data(8)
    flat = naive.Flat(net, batch_norm="batch")
    outputs = flat.outputs(flat.point, inputs)
    jacobian = jacrev(lambda point: flat.outputs(point, inputs))(flat.point)
    s = torch.softmax(outputs, 1)
    bend = torch.diag_embed(s) - s[:, :, None] * s[:, None, :]
    expected = torch.einsum("ncp,ncd,ndq->pq", jacobian, bend, jacobian) / 8
    assert_close(gauss_newton(net, (inputs, targets), batch_norm="batch").dense(), expected)
    gradients = jacrev(lambda point: naive.cross_entropy(flat.outputs(point, inputs), targets))(flat.point)
    assert_close(empirical_fisher(net, (inputs, targets), batch_norm="batch").dense(), gradients.T @ gradients / 8)


def test_eval_mode_equals_the_folded_network() -> None:
    net, data = network("batch norm"), some_data()
    convolution, norm = net[1], net[2]
    folded = copy.deepcopy(nn.Sequential(*[layer for layer in net if layer is not norm]))
    scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    with torch.no_grad():
        folded[1].weight.mul_(scale[:, None, None, None])
        folded[1].bias.copy_(scale * (convolution.bias - norm.running_mean) + norm.bias)
    expected = hessian(folded, data)
    d = torch.cat([scale.repeat_interleave(4), scale, torch.ones(9, dtype=torch.float64)])  # dθ'/dθ
    assert_close(hessian(net, data, params=["1", "6"]).dense(), d[:, None] * expected.dense() * d)


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
@pytest.mark.parametrize("batch_norm", ["eval", "batch"])
def test_nothing_is_touched(kind: Any, batch_norm: str, untouched: Any) -> None:
    net, data = network("batch norm").train(), some_data(8)
    net[1].register_forward_hook(lambda *_: None)
    net[1].weight.grad = torch.ones_like(net[1].weight)
    net[1].bias.requires_grad_(False)
    with untouched(net):
        op = kind(net, data, batch_norm=batch_norm)
        for memory in (None, 1):
            op = kind(net, DataLoader(TensorDataset(*data), batch_size=4), batch_norm=batch_norm, memory=memory)
            op @ torch.ones(op.size, 2, dtype=op.dtype)


def test_inside_no_grad_and_with_inputs_that_require_grad() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    expected = naive.mean_hessian(net, inputs, targets)
    with torch.no_grad():
        assert_close(hessian(net, (inputs, targets)).dense(), expected)
    with torch.inference_mode():
        assert_close(hessian(net, (inputs.clone(), targets)).dense(), expected)
    op = hessian(net, (inputs.requires_grad_(), targets))
    result = op @ torch.ones(op.size, dtype=op.dtype, requires_grad=True)
    assert not result.requires_grad


def test_scipy_finds_the_same_eigenvalues() -> None:
    op = hessian(network("tanh"), some_data())
    expected = torch.linalg.eigvalsh(op.dense())
    found = eigsh(op.to_scipy(), k=3, which="LA", return_eigenvectors=False)
    assert_close(torch.as_tensor(found), expected[-3:], 1e-8)


def test_both_ends_of_the_spectrum() -> None:
    net, data = network("attention"), some_data()
    expected = torch.linalg.eigvalsh(naive.mean_hessian(net, *data))
    op = hessian(net, data)
    for which, index in (("largest", -1), ("smallest", 0)):
        value = estimators.eigenvalues(op, which=which, tol=1e-6).values[0]
        assert abs(float(value - expected[index])) <= 1e-8 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["relu in place", "convolutions", "batch norm"])
def test_the_trace_is_that_of_the_samples(name: str) -> None:
    net, data = network(name), some_data()
    exact = per_sample.trace(net, data)
    assert exact.exact
    assert float(hessian(net, data).dense().trace()) == pytest.approx(exact.value, rel=1e-10)
    estimate = estimators.operator_trace(hessian(net, data), probes=20)
    assert abs(estimate.value - exact.value) <= 4 * estimate.stderr + 1e-10 * exact.value


def test_the_variance_of_the_batches() -> None:
    net, data = network("tanh"), some_data()
    batches = rows(*data, 3, 4)
    parts = [naive.mean_hessian(net, *batch) for batch in batches]
    mean = (3 * parts[0] + 4 * parts[1]) / 7
    expected = (3 * parts[0] @ parts[0] + 4 * parts[1] @ parts[1]) / 7 - mean @ mean
    for op in (hessian_variance(net, batches), hessian_variance(net, batches, memory=1)):
        assert_close(op.dense(), expected)
        assert_close(products(op), expected)


def test_the_variance_of_batches_drawn_without_replacement() -> None:
    """Averaged over all partitions it is (n − B)/(B(n − 1)) times that of single samples."""
    net, (inputs, targets) = nn.Linear(12, 3, bias=False).double(), some_data(4)
    single = hessian_variance(net, (inputs, targets), batch_size=1).dense()
    orders = [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]]
    pairs = [hessian_variance(net, (inputs[order], targets[order]), batch_size=2).dense() for order in orders]
    assert_close(sum(pairs) / 3, (4 - 2) / (2 * 3) * single)  # type: ignore[arg-type]


def test_memory_decides_how_much_is_kept() -> None:
    net, data = network("tanh"), some_data(64)
    problem = Problem(net)
    vector = torch.ones(1, problem.size, dtype=torch.float64)

    def kept(memory: int | None) -> tuple[int, int, Tensor]:
        matrix = mean_hessian(net, data, batch_size=8, memory=memory)
        result = matrix.multiply(vector)
        return len(matrix.kept), sum(tape.size(matrix.owned) for tape in matrix.kept.values()), result

    everything, size, first = kept(None)
    assert everything == 8
    some, half, second = kept(size)
    assert 2 <= some <= 4
    assert half <= size / 2
    assert torch.equal(first, second)


PEAK = """
import sys, torch
from torch import nn
from spiritlevel.operators.matrices import hessian

class Stream:
    def __iter__(self):
        for seed in range(int(sys.argv[1])):
            generator = torch.Generator().manual_seed(seed)
            yield torch.rand(100, 784, generator=generator), torch.randint(0, 10, (100,), generator=generator)

def megabytes():
    with open("/proc/self/status") as status:  # getrusage would start from the parent's peak
        return next(int(line.split()[1]) / 1000 for line in status if line.startswith("VmHWM"))

net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
vector = torch.ones(sum(parameter.numel() for parameter in net.parameters()))
hessian(net, (torch.rand(4, 784), torch.zeros(4, dtype=torch.long))) @ vector
before = megabytes()
op = hessian(net, Stream(), memory="60MB")
op @ vector
op @ vector
print(megabytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_data() -> None:
    """Far beyond the budget, ten times the data take at most 1.2 times the memory, and never more than the budget."""
    small, large = (
        float(subprocess.run([sys.executable, "-c", PEAK, batches], capture_output=True, text=True, check=True).stdout)
        for batches in ("100", "1000")
    )
    assert small < 60
    assert large < min(60, 1.2 * small)


# ---------------------------------------------------------------- bad input


def test_bad_input_in_one_sentence() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    with pytest.raises(InputError, match="weight_decay must be at least 0, got -1"):
        hessian(net, (inputs, targets), weight_decay=-1)
    with pytest.raises(InputError, match="weight_decay must be at least 0, got nan"):
        hessian(net, (inputs, targets), weight_decay=math.nan)
    with pytest.raises(InputError, match="unknown loss 'cross_entrop': did you mean 'cross_entropy'"):
        hessian(net, (inputs, targets), loss="cross_entrop")
    with pytest.raises(InputError, match="unknown batch_norm mode 'train'"):
        hessian(net, (inputs, targets), batch_norm="train")
    with pytest.raises(InputError, match="batch_size must be a whole number of at least 1, got 0"):
        hessian(net, (inputs, targets), batch_size=0)
    with pytest.raises(InputError, match="memory must be a number of bytes"):
        hessian(net, (inputs, targets), memory="much")
    with pytest.raises(InputError, match="the data are empty"):
        hessian(net, (inputs[:0], targets[:0]))
    with pytest.raises(InputError, match=r"target 7 .* is outside the model's 3 classes"):
        hessian(net, (inputs, targets * 0 + 7))
    with pytest.raises(InputError, match="hessian_variance needs to know the batches: pass batch_size="):
        hessian_variance(net, (inputs, targets))
    with pytest.raises(InputError, match=r"group= needs torch\.distributed\.init_process_group first"):
        hessian(net, (inputs, targets), group=object())


def test_numbers_that_are_none() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    spoilt = inputs.clone()
    spoilt[5, 2] = math.nan
    with pytest.raises(InputError, match="the input of sample 5 is NaN or infinite"):
        hessian(net, (spoilt, targets), batch_size=3)
    with torch.no_grad():
        net[2].weight[0, 0] = math.inf
    with pytest.raises(InputError, match="the model's output for sample 0 is NaN or infinite although"):
        hessian(net, (inputs, targets))
    with torch.no_grad():
        net[2].weight[0, 0] = 1e300
    op = hessian(net, (inputs, targets))
    with pytest.raises(InputError, match="holds NaN or infinity"):
        op @ torch.full((op.size,), 1e300, dtype=op.dtype)


def test_losses_of_ones_own_may_be_loss_objects() -> None:
    net, data = network("tanh"), some_data()
    assert_close(hessian(net, data, loss=CrossEntropy()).dense(), naive.mean_hessian(net, *data))
    assert_close(
        hessian(net, data, loss=lambda out, y: F.cross_entropy(out, y, reduction="none")).dense(),
        naive.mean_hessian(net, *data),
    )


# ---------------------------------------------------------------- the page


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """The code blocks of a page, with the label in their first line."""
    blocks = re.findall(r"```python\n# (\w+)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == page.read_text(encoding="utf-8").count("```python")
    return blocks


def test_the_page_for_those_who_come_from_other_libraries() -> None:
    names: dict[str, Any] = {}
    for label, code in blocks_of(Path(__file__).parent.parent / "docs" / "coming-from.md"):
        if label in ("all", "spiritlevel"):
            exec(code, names)
    model, batches = names["model"], names["batches"]
    parts = [naive.mean_hessian(model, *batch) * len(batch[1]) / 100 for batch in batches]
    expected = parts[0] + parts[1]
    assert_close(names["product"], expected.sum(1), 1e-5)
    assert float(names["largest"]) == pytest.approx(float(torch.linalg.eigvalsh(expected)[-1]), rel=1e-4)
    assert abs(names["trace"] - float(expected.trace())) < 4 * names["error"]


# ---------------------------------------------------------------- several processes

WORKER = """
import sys, torch, torch.distributed as dist
from torch import nn
from spiritlevel.operators.matrices import hessian, hessian_variance

rank, file = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
alone = hessian(net, (inputs, targets))
apart = hessian_variance(net, (inputs, targets), batch_size=3)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
group = dist.group.WORLD
vector = torch.randn(27, 2, dtype=torch.float64)
for kind in ({}, {"memory": 1}, {"batch_size": 100}, {"batch_size": 2}):
    op = hessian(net, (inputs, targets), group=group, weight_decay=0.5, **kind)
    torch.testing.assert_close(op @ vector, alone @ vector + 0.5 * vector, rtol=1e-12, atol=1e-14)
op = hessian_variance(net, (inputs, targets), batch_size=3, group=group)
torch.testing.assert_close(op @ vector, apart @ vector, rtol=1e-10, atol=1e-13)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_data(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors


def test_a_gradient_of_the_reference_agrees() -> None:
    """The slope that the products differentiate is the gradient of the loss."""
    net, (inputs, targets) = network("tanh"), some_data()
    for name in ("cross_entropy", "squared_error", "exponential"):
        problem = Problem(net, loss=name)
        outputs = net(inputs).detach()
        expected = grad(lambda out, name=name: naive.LOSSES[name](out, targets).sum())(outputs)
        assert_close(_slope(problem.loss, outputs, targets), expected)


def test_a_circular_convolution_is_multiplied_by_several_vectors_at_once() -> None:
    """Its backward pass views memory by strides, which `vmap` lays out otherwise: it was 0.6 off, one by one right."""
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1, padding_mode="circular"), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    data = torch.randn(2, 1, 1, 2, dtype=torch.float64), torch.tensor([0, 1])
    torch.testing.assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data), atol=1e-12, rtol=0)


@pytest.mark.parametrize("traced", [True, False])
def test_a_wrong_rule_of_vmap_is_noticed(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with several vectors are compared with one of them alone before any is believed."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    right = averaging.vmap

    def wrong(function: Any) -> Any:
        return lambda *parts: [1.1 * part for part in right(function)(*parts)]

    monkeypatch.setattr(averaging, "vmap", wrong)
    if not traced:
        monkeypatch.setattr(replay, "_cut", not_traceable)
    torch.testing.assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data), atol=1e-12, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_samples_that_depend_on_each_other_are_refused_in_small_batches_too(batch_size: int) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x - x.mean(0))

    data = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    for measure in (hessian, per_sample.sample_traces):
        with pytest.raises(InputError, match="other samples"):
            measure(Centred(), data, batch_size=batch_size)


def test_a_model_that_overwrites_its_parameters_is_refused() -> None:
    """An embedding with max_norm cuts its rows in the forward pass: there is no fixed point to measure at."""
    net = nn.Sequential(nn.Embedding(5, 2, max_norm=0.5), nn.Flatten(), nn.Linear(6, 2))
    data = torch.arange(9).reshape(3, 3) % 5, torch.tensor([0, 1, 0])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for measure in (hessian, per_sample.sample_traces, margins):
        with pytest.raises(InputError, match=r"overwrites its own parameter 0\.weight"):
            measure(net, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
