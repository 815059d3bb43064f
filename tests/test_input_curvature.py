"""Tr ∇²ₓℓ against dense Hessians in the input, float64; exact where it says so, right within its errors elsewhere."""

from __future__ import annotations

import math
from typing import Any

import naive
import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.errors import InputError, NotExactError


def dense(model: nn.Module, inputs: Tensor, targets: Tensor, loss: str = "cross_entropy") -> Tensor:
    """The trace of every sample's Hessian in its input, from the whole matrix."""
    model = model.eval()
    found = []
    for x, y in zip(inputs, targets, strict=True):

        def one(point: Tensor, shape: Any = x.shape, y: Tensor = y) -> Tensor:
            return naive.LOSSES[loss](model(point.reshape(1, *shape)), y[None])[0]

        matrix = torch.autograd.functional.hessian(one, x.reshape(-1))
        assert torch.allclose(matrix, matrix.T, atol=1e-10)
        found.append(matrix.trace())
    return torch.stack(found).detach()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.1), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def seeded(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.35)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.abs_().add_(0.5)
    return model


EXACT: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "dense": (seeded(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)), (7,)),
    "affine": (seeded(nn.Linear(6, 4)), (6,)),
    "convolution": (
        seeded(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)),
        (1, 6, 6),
    ),
    "batch norm": (
        seeded(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)
        ),
        (2, 5, 5),
    ),
    "residual": (seeded(Residual(6), nn.Hardtanh(), nn.Linear(6, 4)), (6,)),
}


def samples(shape: tuple[int, ...], count: int = 9, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (count,), generator=generator)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "exponential"])
@pytest.mark.parametrize("name", EXACT)
def test_exact_for_piecewise_linear_networks(name: str, loss: str, untouched: Untouched) -> None:
    model, shape = EXACT[name]
    data = samples(shape)
    with untouched(model):
        found = sl.input_curvature(model, data, loss=loss, method="exact")
    assert found.exact
    assert found.method == "exact"
    assert not found.stderr.any()
    torch.testing.assert_close(found.values, dense(model, *data, loss), rtol=1e-10, atol=1e-12)


def test_a_single_logit() -> None:
    model = seeded(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 1))
    data = samples((5,), classes=2)
    found = sl.input_curvature(model, data, loss="binary_cross_entropy")
    assert found.exact
    torch.testing.assert_close(found.values, dense(model, *data, "binary_cross_entropy"), rtol=1e-10, atol=1e-14)


class Squares(nn.Module):
    """Linear in its parameters, not in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(80, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * x)


def test_degrees_in_the_input_count_not_those_in_the_parameters() -> None:
    torch.manual_seed(0)
    model, data = Squares(), samples((80,))
    assert sl.sample_traces(model, data).exact, "the trap: the parameters alone say exact"
    with pytest.raises(NotExactError, match=r"the operation 'mul' makes the outputs more than linear .* probes=80"):
        sl.input_curvature(model, data, method="exact")
    truth = dense(model, *data)
    found = sl.input_curvature(model, data, probes=79)
    assert not found.exact
    assert bool(((found.values - truth).abs() <= 4.5 * found.stderr + 1e-12).all())
    assert "'mul'" in found.notes[0]
    axes = sl.input_curvature(model, data, probes=80)
    assert (axes.exact, axes.method) == (True, "axes")
    torch.testing.assert_close(axes.values, truth, rtol=1e-9, atol=1e-12)


SMOOTH: dict[str, nn.Module] = {
    "tanh": seeded(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4)),
    "gelu": seeded(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 4)),
    "layer norm": seeded(nn.Linear(12, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 4)),
    "softmax": seeded(nn.Linear(12, 9), nn.Softmax(1), nn.Linear(9, 4)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_networks_by_axes_and_by_probes(name: str, untouched: Untouched) -> None:
    model, data = SMOOTH[name], samples((12,), 40)
    truth = dense(model, *data)
    with untouched(model):
        axes = sl.input_curvature(model, data, method="exact")
        probed = sl.input_curvature(model, data, method="hutchinson", probes=200, seed=3)
    assert (axes.exact, axes.method, axes.matvecs) == (True, "axes", 12)
    torch.testing.assert_close(axes.values, truth, rtol=1e-8, atol=1e-10)
    assert not probed.exact
    assert probed.draws is not None
    assert probed.draws.shape == (40, 50)  # groups of four
    z = (probed.values - truth) / probed.stderr
    assert float(z.abs().max()) < 5
    low, high = probed.mean().interval(0.999)
    assert low <= float(truth.mean()) <= high


def test_batches_loaders_and_seeds_do_not_matter() -> None:
    model, shape = EXACT["convolution"]
    data = samples(shape, 23)
    whole = sl.input_curvature(model, data)
    torch.testing.assert_close(sl.input_curvature(model, data, batch_size=4).values, whole.values)
    loader = DataLoader(TensorDataset(*data), batch_size=5)
    found = sl.input_curvature(model, loader)
    torch.testing.assert_close(found.values, whole.values)
    assert found.fingerprint == whole.fingerprint == sl.sample_traces(model, data).fingerprint
    smooth, points = SMOOTH["gelu"], samples((12,), 23)
    first = sl.input_curvature(smooth, points, probes=6, batch_size=5)
    second = sl.input_curvature(smooth, points, probes=6)
    torch.testing.assert_close(first.values, second.values)
    assert not torch.equal(sl.input_curvature(smooth, points, probes=6, seed=1).values, first.values)


def test_right_at_tiny_losses() -> None:
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        model.bias.zero_()
    for margin in (5.0, 40.0, 80.0):
        x = torch.tensor([[margin / 2, 0.3]], dtype=torch.float64)
        found = float(sl.input_curvature(model, (x, torch.tensor([0]))).values)
        sigma = 1 / (1 + math.exp(margin))
        assert found == pytest.approx(4 * sigma * (1 - sigma), rel=1e-12)
        single = sl.input_curvature(model.float(), (x.float(), torch.tensor([0])))
        assert float(single.values) == pytest.approx(4 * sigma * (1 - sigma), rel=1e-5)
        model.double()


class Product(nn.Module):
    """Two floating inputs and one of indices; bilinear in the floating ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, a: Tensor, b: Tensor, index: Tensor) -> Tensor:
        return torch.relu(a) * b + self.table(index)


def test_several_inputs_and_their_blocks() -> None:
    torch.manual_seed(0)
    model = Product().double()
    a, b = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    index, targets = torch.tensor([0, 1, 2, 3, 4, 0]), torch.tensor([0, 1, 2, 3, 0, 1])
    found = sl.input_curvature(model, [((a, b, index), targets)])
    assert found.method == "exact"
    for n in range(6):

        def one(point: Tensor, n: int = n) -> Tensor:
            outputs = model(point[None, :4], point[None, 4:], index[n : n + 1])
            return nn.functional.cross_entropy(outputs, targets[n : n + 1])

        matrix = torch.autograd.functional.hessian(one, torch.cat([a[n], b[n]]))
        assert float(found.values[n]) == pytest.approx(float(matrix.trace()), rel=1e-9, abs=1e-12)


class Turns(nn.Module):
    """Squares its inputs only where one of them is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        large = (x[:, :1] > 5).double()
        rows = large[:, 0].nonzero()[:, 0]
        if len(rows):
            x = x.index_copy(0, rows, x[rows].square())
        return self.linear(x)


def test_a_later_batch_that_is_curved_is_not_called_exact() -> None:
    torch.manual_seed(0)
    model, (inputs, targets) = Turns(), samples((6,), 12)
    inputs[11, 0] = 7.0
    with pytest.raises(NotExactError):
        sl.input_curvature(model, (inputs, targets), batch_size=4, method="exact", probes=2)
    found = sl.input_curvature(model, (inputs, targets), batch_size=4)
    assert found.method == "axes"
    torch.testing.assert_close(found.values, dense(model, inputs, targets), rtol=1e-8, atol=1e-10)


class Mean(nn.Module):
    """The mean over the places of a sequence of any length."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@pytest.mark.parametrize("lengths", [(2, 4), (4, 2)])
def test_later_batches_may_have_longer_sequences(lengths: tuple[int, ...]) -> None:
    model = seeded(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), Mean())
    batches = [samples((length, 3), 3) for length in lengths]
    found = sl.input_curvature(model, batches)
    assert (found.exact, found.method) == (True, "axes")
    truth = torch.cat([dense(model, *batch) for batch in batches])
    torch.testing.assert_close(found.values, truth, rtol=1e-9, atol=1e-12)
    with pytest.raises(NotExactError, match="probes=12 to move each of a sample's 12 numbers"):
        sl.input_curvature(model, batches, method="exact", probes=11)


def test_printing_json_and_correlation() -> None:
    model, shape = EXACT["dense"]
    data = samples(shape, 40)
    found = sl.input_curvature(model, data)
    assert str(found).startswith("40 per-sample Hessian traces in the input, exact: mean")
    assert sl.Result.from_json(found.to_json()).wrt == "input"
    assert sl.correlate(found, sl.sample_traces(model, data).values).n > 30


def test_what_is_refused() -> None:
    model, shape = EXACT["dense"]
    data = samples(shape)
    with pytest.raises(InputError, match="unknown method 'best'"):
        sl.input_curvature(model, data, method="best")
    with pytest.raises(InputError, match="probes must be a whole number of at least 2, got 1"):
        sl.input_curvature(model, data, probes=1)
    tokens = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(InputError, match="needs floating-point inputs, got int64; convert them"):
        sl.input_curvature(tokens, (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)))

    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sl.input_curvature(nn.Sequential(nn.Linear(7, 4).double(), Mixes()), data)

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -2 * gradient

    class Hooked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Reversed.apply(x)

    with pytest.raises(InputError, match="is not the derivative of its forward pass"):
        sl.input_curvature(nn.Sequential(Hooked(), *model), data)
