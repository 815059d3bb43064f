"""Every measure against a brute-force evaluation of its formula on a tiny net, and every declared invariance."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable

import naive
import numpy as np
import pytest
import torch
import zoo
from conftest import Untouched
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from spiritlevel import transforms
from spiritlevel.answers.auditing import audit
from spiritlevel.errors import InputError
from spiritlevel.measures import (
    DEFAULT,
    MEASURES,
    TRANSFORMS,
    Setting,
    evaluate,
    pac_bayes,
    select,
    spectral,
    spectral_margin,
)
from spiritlevel.results import Estimate, Result
from spiritlevel.transforms import Transformed
from spiritlevel.watching.layers import Call

Data = tuple[Tensor, Tensor]


def randomised(net: nn.Module, seed: int = 0, size: float = 0.8) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    net = net.double().eval()
    with torch.no_grad():
        for module in net.modules():
            shift = 1.0 if isinstance(module, nn.BatchNorm1d) else 0.0
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(size * draw(parameter.shape) + (shift if name == "weight" else 0.0))
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.copy_(0.5 + draw(buffer.shape).abs())
    return net


def labelled(net: nn.Module, inputs: Tensor, classes: int = 3) -> Data:
    """The network's own labels, every fifth one wrong."""
    with torch.no_grad():
        targets = net(inputs).argmax(1)
    targets[::5] = (targets[::5] + 1) % classes
    return inputs, targets


def normal(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def mlp() -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)))


@pytest.fixture(scope="module")
def data(mlp: nn.Module) -> Data:
    return labelled(mlp, normal(20, 3))


@pytest.fixture(scope="module")
def dense(mlp: nn.Module, data: Data) -> Tensor:
    return naive.mean_hessian(mlp, *data)


@pytest.fixture(scope="module")
def here(mlp: nn.Module, data: Data) -> Setting:
    return Setting(mlp, data)


def value(setting: Setting, name: str) -> float:
    found = MEASURES[name].compute(setting)
    assert not found.reason
    return found.value


def close(found: float, wanted: float, tolerance: float = 1e-8) -> bool:
    return abs(found - float(wanted)) <= tolerance * max(abs(float(wanted)), 1e-12)


def blocks(net: nn.Module) -> dict[str, slice]:
    result, start = {}, 0
    for name, parameter in net.named_parameters():
        result[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return result


def jacobians(net: nn.Module, inputs: Tensor) -> Tensor:
    """∂φ/∂θ of every sample, (N, C, P)."""
    params = dict(net.named_parameters())
    rows = []
    for row in inputs:
        parts = jacrev(lambda p, x: functional_call(net, p, (x,))[0])(params, row[None])
        rows.append(torch.cat([part.reshape(part.shape[0], -1) for part in parts.values()], 1).detach())
    return torch.stack(rows)


def dense_gauss_newton(net: nn.Module, inputs: Tensor) -> Tensor:
    """E_x E_{c~S} ∇ℓ ∇ℓᵀ, label by label."""
    total = torch.zeros(())
    for jacobian, logits in zip(jacobians(net, inputs), net(inputs).detach(), strict=True):
        softmax = logits.softmax(0)
        for label, share in enumerate(softmax):
            gradient = (softmax - torch.eye(len(softmax)).double()[label]) @ jacobian
            total = total + share * torch.outer(gradient, gradient)
    return total / len(inputs)


# ---------------------------------------------------------------- closed forms and operators


def test_spectral_measures_are_those_of_the_dense_hessian(here: Setting, dense: Tensor) -> None:
    eigen = torch.linalg.eigvalsh(dense)
    size = len(eigen)
    assert size < 64  # small enough for every estimate to be exact
    assert close(value(here, "trace"), eigen.sum())
    assert close(value(here, "mean_eigenvalue"), eigen.mean())
    assert close(value(here, "spectral_norm"), eigen.abs().max())
    assert close(value(here, "largest_eigenvalue"), eigen.max())
    assert close(value(here, "smallest_eigenvalue"), eigen.min())
    assert close(value(here, "frobenius_norm"), dense.norm())
    assert close(value(here, "mean_square_eigenvalue"), dense.square().sum() / size)
    top = eigen.flip(0)[:10]
    assert close(value(here, "log_volume"), top[top > 1e-12].log().sum())


def test_fisher_measures_enumerate_the_labels(here: Setting, mlp: nn.Module, data: Data) -> None:
    fisher = dense_gauss_newton(mlp, data[0])
    assert close(value(here, "fisher_trace"), fisher.trace())
    theta = here.theta
    assert close(value(here, "fisher_rao_norm"), theta @ fisher @ theta)
    squares = [naive.gradient(mlp, data[0][n : n + 1], data[1][n : n + 1]).square().sum() for n in range(20)]
    assert close(value(here, "empirical_fisher_trace"), sum(squares) / 20)


def test_fisher_trace_of_a_smooth_net_is_not_the_hessians() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    points = labelled(net, normal(10, 3))
    setting = Setting(net, points)
    assert close(value(setting, "fisher_trace"), dense_gauss_newton(net, points[0]).trace())
    assert close(value(setting, "trace"), naive.mean_hessian(net, *points).trace())
    assert not close(value(setting, "trace"), value(setting, "fisher_trace"), 1e-3)


def test_fisher_rao_norm_of_a_net_without_bias_is_read_off_its_outputs() -> None:
    layers = [nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)]
    net, inputs = randomised(nn.Sequential(*layers)), normal(10, 3)
    logits = net(inputs).detach()
    softmax = logits.softmax(1)
    inner = (softmax * logits).sum(1, keepdim=True) - logits  # ⟨∂ℓ/∂φ, φ⟩ for every label
    wanted = 2**2 * (softmax * inner.square()).sum(1).mean()
    assert close(MEASURES["fisher_rao_norm"](net, labelled(net, inputs)).value, wanted)


def test_measures_in_units_of_the_layers(here: Setting, mlp: nn.Module, dense: Tensor) -> None:
    norms = {name: float(p.detach().norm()) for name, p in mlp.named_parameters()}
    units = torch.cat(
        [torch.full((p.numel(),), norms[name], dtype=torch.float64) for name, p in mlp.named_parameters()]
    )
    total = sum(norms[name] ** 2 * float(dense[part, part].trace()) for name, part in blocks(mlp).items())
    assert close(value(here, "layer_scaled_trace"), total)
    assert close(value(here, "quotient_norm"), torch.linalg.eigvalsh(units[:, None] * dense * units).abs().max())


def brute_relative_flatness(weight: Tensor, block: Tensor, groups: int = 1) -> float:
    """Neurons of different groups read different inputs, so they have no weights in common to multiply."""
    rows = weight.detach().reshape(len(weight), -1)
    width, size, total = rows.shape[1], len(rows) // groups, 0.0
    for s, t in itertools.product(range(len(rows)), repeat=2):
        if s // size != t // size:
            continue
        inner = block[s * width : (s + 1) * width, t * width : (t + 1) * width]
        total += float(rows[s] @ rows[t]) * float(inner.trace())
    return total


def brute_each(net: nn.Module, matrix: Tensor) -> list[float]:
    """The relative flatness of every weight, from the matrix of all parameters."""
    parts = blocks(net)
    return [
        brute_relative_flatness(parameter, matrix[parts[name], parts[name]])
        for name, parameter in net.named_parameters()
        if parameter.ndim > 1
    ]


def test_relative_flatness(here: Setting, mlp: nn.Module, dense: Tensor) -> None:
    each = brute_each(mlp, dense)
    assert close(value(here, "relative_flatness"), each[-1])
    assert close(value(here, "relative_flatness_sum"), sum(each))
    assert MEASURES["relative_flatness_sum"].compute(here).exact


def test_relative_flatness_of_convolutions() -> None:
    net = randomised(nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2), nn.Flatten()))
    points = labelled(net, normal(10, 1, 3, 3))
    each = brute_each(net, naive.mean_hessian(net, *points))
    assert close(MEASURES["relative_flatness"](net, points).value, each[-1])
    assert close(MEASURES["relative_flatness_sum"](net, points).value, sum(each))


def test_relative_flatness_of_a_smooth_net_is_estimated() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    points = labelled(net, normal(10, 3))
    each = brute_each(net, naive.mean_hessian(net, *points))
    assert close(MEASURES["relative_flatness"](net, points).value, each[-1])  # affine in the last layer
    found = MEASURES["relative_flatness_sum"](net, points)
    assert found.stderr > 0
    assert abs(found.value - sum(each)) < 4 * found.stderr


class Twice(nn.Module):
    """One layer that runs twice, in between a convolution of groups and a layer over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 2, groups=2, padding=1, padding_mode="circular")
        self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).transpose(1, 2).relu()
        return self.last(self.middle(self.middle(x).relu_()).mean(1))


def test_blocks_of_layers_that_run_twice_or_over_positions() -> None:
    net = randomised(Twice())
    inputs, targets = labelled(net, normal(8, 2, 3))
    fisher, parts = dense_gauss_newton(net, inputs), blocks(net)
    found = Setting(net, (inputs, targets)).blocks
    assert set(found) == {"conv.weight", "middle.weight", "last.weight"}
    for name, block in found.items():
        part = fisher[parts[name], parts[name]]
        weight = net.get_parameter(name)
        torch.testing.assert_close(block.diagonal.reshape(-1), part.diagonal(), rtol=1e-9, atol=1e-15)
        groups = 2 if name == "conv.weight" else 1
        assert close(float(block.relative.mean()), brute_relative_flatness(weight, part, groups)), name


class Recurrent(nn.Module):
    """The last layer runs twice, so that the outputs are not linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.last(torch.tanh(self.first(x)))))


class Curved(nn.Module):
    """An exponential linear unit at the outputs, which does nothing to a sample whose outputs are all positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.elu(self.last(torch.relu(self.first(x))))


@pytest.mark.parametrize("make", [Recurrent, Curved])
def test_relative_flatness_is_no_gauss_newton_sum_where_the_outputs_curve_in_the_last_weight(
    make: type[nn.Module],
) -> None:
    net = randomised(make())
    inputs, targets = labelled(net, normal(30, 3))
    positive = (net(inputs) > 0).all(1)
    if make is Curved:
        assert 2 <= positive.sum() < 30
        order = torch.argsort(positive.int(), descending=True)
        inputs, targets = inputs[order], targets[order]
    wanted = brute_each(net, naive.mean_hessian(net, inputs, targets))[-1]
    wrong = brute_each(net, dense_gauss_newton(net, inputs))[-1]
    found = MEASURES["relative_flatness"](net, (inputs, targets))
    assert found.stderr > 0
    assert abs(found.value - wanted) < 4 * found.stderr
    assert not close(wanted, wrong, 1e-2)


class Siamese(nn.Module):
    """Two modules with one weight, as two calls of modules, one of them a function, or only functions."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.a, self.b, self.o = form, nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x[:, :3]) if self.form != "functions" else nn.functional.linear(x[:, :3], self.a.weight)
        second = self.b(x[:, 3:]) if self.form == "modules" else x[:, 3:] @ self.a.weight.t()
        return self.o(torch.relu(first) + torch.relu(second))


class Doubled(nn.Linear):
    """A linear layer that is not what its class is."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Tokens(nn.Module):
    """Linear layers over tokens, which are folded into the samples, stand in front of them, or behind."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.a, self.o = form, nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "folded":
            return self.o(torch.relu(self.a(x.reshape(-1, 2))).reshape(len(x), -1, 4).mean(1))
        tokens = x.reshape(len(x), -1, 2)
        if self.form == "in front":
            return self.o(torch.relu(self.a(tokens.transpose(0, 1))).mean(0))
        return self.o(torch.relu(self.a(tokens)).mean(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Siamese("modules"),
        lambda: Siamese("mixed"),
        lambda: Siamese("functions"),
        lambda: Tokens("folded"),
        lambda: Tokens("in front"),
        lambda: nn.Sequential(Doubled(6, 4), nn.ReLU(), nn.Linear(4, 3)),
    ],
)
@pytest.mark.parametrize("count", [3, 8])  # there are 3 tokens, too
def test_blocks_count_every_use_of_a_weight(make: Callable[[], nn.Module], count: int) -> None:
    net = randomised(make())
    inputs, targets = labelled(net, normal(count, 6))
    hessian, parts = naive.mean_hessian(net, inputs, targets), blocks(net)
    setting = Setting(net, (inputs, targets))
    assert set(setting.blocks) == {name for name, parameter in net.named_parameters() if parameter.ndim > 1}
    for name, block in setting.blocks.items():
        diagonal = hessian[parts[name], parts[name]].diagonal()
        torch.testing.assert_close(block.diagonal.reshape(-1), diagonal, rtol=1e-8, atol=1e-14)
    found = MEASURES["relative_flatness_sum"].compute(setting)
    assert found.exact
    assert close(found.value, sum(brute_each(net, hessian)))
    assert math.isfinite(value(setting, "normalised_sharpness"))


def test_the_last_layer_is_the_last_one_whether_frozen_or_not() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    points = labelled(net, normal(10, 3))
    wanted = value(Setting(net, points), "relative_flatness")
    net[0].requires_grad_(False)  # type: ignore[index]
    assert close(value(Setting(net, points), "relative_flatness"), wanted)
    net.requires_grad_(True)[2].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(InputError, match="weight of '2' is frozen"):
        MEASURES["relative_flatness"](net, points)
    with pytest.raises(InputError, match="bare operation 'linear'"):
        MEASURES["relative_flatness"](randomised(FunctionalHead()), points)


class Auxiliary(nn.Module):
    """A second head that runs last and is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.aside = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        outputs = self.head(x)
        self.aside(x)
        return outputs


def test_the_last_layer_is_one_that_the_outputs_depend_on() -> None:
    net = randomised(Auxiliary())
    points = labelled(net, normal(10, 3))
    plain = nn.Sequential(net.first, nn.ReLU(), net.head)  # type: ignore[arg-type]
    for name in ("relative_flatness", "hidden_margin_median", "spectral_margin_mean"):
        assert close(value(Setting(net, points), name), value(Setting(plain, points), name)), name


class Graph(nn.Module):
    """A fixed matrix behind the last layer, which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("mix", torch.eye(3) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) @ self.mix


def test_a_fixed_matrix_is_no_layer() -> None:
    net = randomised(Graph())
    points = labelled(net, normal(10, 3))
    wanted = brute_each(net, naive.mean_hessian(net, *points))
    assert close(value(Setting(net, points), "relative_flatness"), wanted[-1])
    assert close(value(Setting(net, points), "relative_flatness_sum"), sum(wanted))


class FunctionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(self.first(x)), self.head)


def test_normalised_sharpness_is_the_minimum_over_scalings(here: Setting, mlp: nn.Module, dense: Tensor) -> None:
    total = 0.0
    for name, part in blocks(mlp).items():
        weight = mlp.get_parameter(name).detach()
        if weight.ndim != 2:
            continue
        h = dense.diagonal()[part].reshape(weight.shape).clamp_min(0)
        logs = torch.zeros(sum(weight.shape), dtype=torch.float64, requires_grad=True)
        search = torch.optim.LBFGS(
            [logs], max_iter=2000, tolerance_grad=1e-14, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def objective(logs: Tensor = logs, h: Tensor = h, weight: Tensor = weight) -> Tensor:
            scale = torch.exp(logs[: len(weight), None] + logs[len(weight) :])
            return (h * scale + weight.square() / scale).sum()

        def closure(search: torch.optim.LBFGS = search, objective: object = objective) -> Tensor:
            search.zero_grad()
            result = objective()  # type: ignore[operator]
            result.backward()
            return result

        search.step(closure)  # type: ignore[arg-type]
        total += float(objective().detach())
    assert close(value(here, "normalised_sharpness"), total, 1e-5)


class Split(nn.Module):
    """A grouped convolution as what it is: one convolution for each group, side by side."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        kind, groups = type(conv), conv.groups
        self.parts = nn.ModuleList(
            kind(conv.in_channels // groups, conv.out_channels // groups, conv.kernel_size[0]) for _ in range(groups)
        )
        weights, biases = conv.weight.detach().chunk(groups), conv.bias.detach().chunk(groups)  # type: ignore[union-attr]
        for part, weight, bias in zip(self.parts, weights, biases, strict=True):
            part.weight, part.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(len(self.parts), 1)
        return torch.cat([part(chunk) for part, chunk in zip(self.parts, chunks, strict=True)], 1)


def turned(conv: nn.ConvTranspose1d) -> nn.Conv1d:
    """A transposed convolution of stride 1 as the convolution that it is."""
    size = conv.kernel_size[0]
    plain = nn.Conv1d(conv.in_channels, conv.out_channels, size, padding=size - 1)
    plain.weight = nn.Parameter(conv.weight.detach().transpose(0, 1).flip(2).contiguous())
    plain.bias = nn.Parameter(conv.bias.detach().clone())  # type: ignore[union-attr]
    return plain


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])  # exact blocks, and probes
@pytest.mark.parametrize(
    ("conv", "same", "length"),
    [
        (lambda: nn.Conv1d(4, 6, 2, groups=2), Split, 2),
        (lambda: nn.Conv1d(4, 4, 2, groups=4), Split, 2),
        (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2), Split, 4),
        (lambda: nn.ConvTranspose1d(4, 3, 2), turned, 4),
    ],
    ids=["grouped", "depthwise", "transposed, grouped", "transposed"],
)
def test_a_layer_is_measured_alike_however_it_is_written(
    conv: Callable[[], nn.Module], same: Callable[[nn.Module], nn.Module], length: int, act: type[nn.Module]
) -> None:
    layer = conv()
    net = nn.Sequential(
        nn.Conv1d(1, 4, 1), act(), layer, act(), nn.Flatten(), nn.Linear(layer.out_channels * length, 3)
    )
    net = randomised(net)
    other = copy.deepcopy(net)
    other[2] = same(net[2])
    points = labelled(net, normal(10, 1, 3))
    assert torch.allclose(net(points[0]), other(points[0]), rtol=1e-12)
    for name in ("normalised_sharpness", "relative_flatness_sum"):
        first, second = (MEASURES[name](each, points) for each in (net, other))
        assert abs(first.value - second.value) <= 4 * math.hypot(first.stderr, second.stderr) + 1e-8 * first.value
    assert first.exact == (act is nn.ReLU)


def least_sum(h: Tensor, w: Tensor, rows: Tensor, columns: Tensor) -> float:
    """The minimum of Σ h s + w/s, the s of an entry the product of a factor of its row and one of its column."""
    logs = torch.zeros(2, 64, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([logs], max_iter=3000, history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        scale = torch.exp(logs[0, rows] + logs[1, columns])
        result = (h * scale + w / scale).sum()
        result.backward()
        return result

    for _ in range(4):
        search.step(closure)  # type: ignore[arg-type]
    return float(closure().detach())


@pytest.mark.parametrize(
    ("conv", "length"), [(nn.Conv1d, 2), (nn.ConvTranspose1d, 4)], ids=["convolution", "transposed"]
)
def test_normalised_sharpness_scales_every_channel_of_every_group(conv: type[nn.Module], length: int) -> None:
    """The minimum over one factor for each real input and output channel."""
    net = nn.Sequential(conv(4, 6, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * length, 3))
    points = labelled(randomised(net), normal(10, 4, 3))
    diagonal, total = naive.mean_hessian(net, *points).diagonal().clamp_min(0), 0.0
    for name, groups in (("0.weight", 2), ("3.weight", 1)):
        weight = net.get_parameter(name).detach()
        first, second, _ = torch.meshgrid(*(torch.arange(size) for size in (*weight.shape, 1)[:3]), indexing="ij")
        second = second + weight.shape[1] * (first // (len(weight) // groups))  # counted over all groups
        cells = (diagonal[blocks(net)[name]], weight.square(), first, second)
        total += least_sum(*(cell.reshape(-1) for cell in cells))
    assert close(MEASURES["normalised_sharpness"](net, points).value, total, 1e-5)


def test_relative_flatness_by_probes_reads_weights_in_any_layout() -> None:
    net = randomised(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten()))
    net.append(randomised(nn.Linear(8, 3)))  # type: ignore[operator]
    points = labelled(net, normal(6, 2, 4, 4))
    first = MEASURES["relative_flatness_sum"](net, points)
    second = MEASURES["relative_flatness_sum"](net.to(memory_format=torch.channels_last), points)  # type: ignore[call-overload]
    assert first.stderr > 0
    assert close(second.value, first.value)


@torch.no_grad()
def test_weight_norm_and_path_norm_enumerate_weights_and_paths(here: Setting, mlp: nn.Module) -> None:
    squares = sum(float(p.detach().square().sum()) for p in mlp.parameters())
    assert close(value(here, "weight_norm"), math.sqrt(squares))
    first, second, third = (mlp[i] for i in (0, 2, 4))  # type: ignore[index]
    total = 0.0
    for c in range(3):
        total += float(third.bias[c]) ** 2
        for j in range(3):
            last = float(third.weight[c, j]) ** 2
            total += last * float(second.bias[j]) ** 2
            for i in range(4):
                middle = last * float(second.weight[j, i]) ** 2
                total += middle * float(first.bias[i]) ** 2
                total += sum(middle * float(first.weight[i, k]) ** 2 for k in range(3))
    assert close(value(here, "path_norm"), math.sqrt(total))


@torch.no_grad()
def test_path_norm_squares_the_weights_of_average_pooling() -> None:
    conv, head = nn.Conv2d(1, 2, 2, bias=False), nn.Linear(2, 3, bias=False)
    net = randomised(nn.Sequential(conv, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), head))
    points = labelled(net, normal(6, 1, 3, 3))
    linear = nn.Sequential(net[0], net[2], net[3])  # type: ignore[index]
    paths = 0.0
    units = torch.eye(9).double().reshape(9, 1, 3, 3)
    for unit in units:  # every input pixel, every position and channel behind the convolution
        for channel, position in itertools.product(range(2), range(4)):
            response = float(net[0](unit[None])[0, channel].reshape(-1)[position]) / 4  # type: ignore[index]
            paths += sum(response**2 * float(head.weight[c, channel]) ** 2 for c in range(3))
    assert linear(units).shape == (9, 2)
    assert close(MEASURES["path_norm"](net, points).value, math.sqrt(paths))


class Circle(nn.Module):
    """A circular convolution in one of three ways, all of which read each entry by the same weights."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Conv1d(1, 2, 1)
        self.conv = nn.Conv1d(2, 2, 3, padding=1 if form == "circular" else 0, padding_mode="circular")
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.form == "joined":
            x = torch.cat([x[..., -1:], x, x[..., :1]], 2)
        if self.form == "listed":
            x = x[..., torch.tensor([3, 0, 1, 2, 3, 0])]
        return self.last(self.conv(x).relu().flatten(1))


def test_path_norm_follows_what_padding_writes() -> None:
    nets = [randomised(Circle(form)) for form in ("circular", "joined", "listed")]
    points = labelled(nets[0], normal(6, 1, 4))
    wanted, *others = (value(Setting(net, points), "path_norm") for net in nets)
    assert all(close(other, wanted, 1e-12) for other in others)


class Pooled(nn.Module):
    """A convolution, some map of the images to 4 channels, a linear layer."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.head, self.between = nn.Conv2d(2, 4, 3), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(torch.relu(self.conv(x))))


@torch.no_grad()
@pytest.mark.parametrize(
    "between",
    [
        lambda h: nn.functional.adaptive_avg_pool2d(h, 1).flatten(1),
        lambda h: h.mean((2, 3)),
        lambda h: h.flatten(2).mean(-1),
        lambda h: h.sum((2, 3)) / 36,
        lambda h: h.sum(3).sum(2).mul_(1 / 36),
        lambda h: nn.functional.avg_pool2d(h, 6).flatten(1),
        lambda h: nn.functional.avg_pool2d(h, 6, divisor_override=36).flatten(1),
        lambda h: nn.functional.avg_pool2d(nn.functional.avg_pool2d(h, 2), 3).flatten(1),
    ],
)
def test_path_norm_is_the_same_however_a_mean_is_written(between: Callable[[Tensor], Tensor]) -> None:
    net = randomised(Pooled(between))
    conv, head = net.conv, net.head
    ones = torch.ones(1, 2, 8, 8).double()
    behind = nn.functional.conv2d(ones, conv.weight.square(), conv.bias.square())  # type: ignore[union-attr, operator]
    total = behind.sum((2, 3))[0] / 36**2 @ head.weight.square().T + head.bias.square()  # type: ignore[union-attr, operator]
    points = labelled(net, normal(5, 2, 8, 8))
    assert close(MEASURES["path_norm"](net, points).value, math.sqrt(float(total.sum())))


class Wired(nn.Module):
    """Two linear layers and a function of the inputs and both."""

    def __init__(self, form: Callable[[Wired, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.form = nn.Linear(3, 3), nn.Linear(3, 3), form
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def _sums(net: Wired) -> tuple[Tensor, Tensor]:
    """Σ w² + b² of every output of each layer."""
    a, b = ((m.weight.square().sum(1) + m.bias.square()).detach() for m in (net.a, net.b))
    return a, b


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "paths"),
    [
        (lambda net, x: net.a(x) - net.b(x), lambda net: sum(_sums(net))),
        (lambda net, x: 3 - net.a(x), lambda net: _sums(net)[0] + 9),
        (lambda net, x: torch.sub(net.a(x), net.b(x), alpha=2), lambda net: _sums(net)[0] + 4 * _sums(net)[1]),
        (lambda net, x: net.a(x) / 4 * torch.tensor(8), lambda net: 4 * _sums(net)[0]),
        (lambda net, x: net.a(x).clamp(min=0), lambda net: _sums(net)[0]),
        (
            lambda net, x: torch.cat([net.a(x)[:, :1], -net.b(x)[:, 1:]], 1),
            lambda net: torch.cat([_sums(net)[0][:1], _sums(net)[1][1:]]),
        ),
        (
            lambda net, x: net.a((x - net.shift) / 2),
            lambda net: net.a.weight.square() @ (1 + net.shift.square()) / 4 + net.a.bias.square(),
        ),
        (
            lambda net, x: net.a(torch.relu(net.a(x))),  # a weight at two depths
            lambda net: net.a.weight.square() @ _sums(net)[0] + net.a.bias.square(),
        ),
    ],
)
def test_path_norm_of_sums_and_constants(
    form: Callable[[Wired, Tensor], Tensor], paths: Callable[[Wired], Tensor]
) -> None:
    net = randomised(Wired(form))
    assert isinstance(net, Wired)
    found = MEASURES["path_norm"](net, labelled(net, normal(5, 3))).value
    assert close(found, math.sqrt(float(paths(net).sum())))


@torch.no_grad()
@pytest.mark.parametrize(
    ("pooling", "size"),
    [
        (nn.AdaptiveAvgPool1d(4), 4),  # cells that overlap
        (nn.AvgPool1d(2, padding=1, count_include_pad=False), 4),
        (nn.AvgPool1d(2, padding=1), 4),
        (nn.AvgPool1d(4, stride=3, ceil_mode=True), 2),
        (nn.ConstantPad1d(1, 0.0), 8),
    ],
)
def test_path_norm_squares_the_matrix_of_every_average(pooling: nn.Module, size: int) -> None:
    net = randomised(nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), pooling, nn.Flatten(), nn.Linear(size, 3)))
    matrix = pooling(torch.eye(6).double()[:, None])[:, 0].T
    kernel, head = net[0].weight.square().reshape(()), net[3]  # type: ignore[index]
    paths = head.weight.square() @ matrix.square().sum(1) * kernel + head.bias.square()
    found = MEASURES["path_norm"](net, labelled(net, normal(5, 1, 6))).value
    assert close(found, math.sqrt(float(paths.sum())))


@pytest.mark.parametrize(
    ("form", "operation"),
    [
        (lambda net, x: nn.functional.relu6(net.a(x)), "hardtanh"),
        (lambda net, x: net.a(x).clamp(min=0, max=1), "clamp"),
        (lambda net, x: torch.maximum(net.a(x), torch.ones(3)), "maximum"),
        (lambda net, x: net.a(x) * net.b(x), "mul"),
        (lambda net, x: net.b(x) / net.a(x), "div"),
        (lambda net, x: torch.where(net.a(x) > 0, net.b(x), 0.0), "gt"),
        (lambda net, x: net.a(x).gather(1, net.b(x).argsort(1)), "sort"),
        (lambda net, x: nn.functional.leaky_relu(net.a(x), 2.0), "leaky_relu"),
        (lambda net, x: nn.functional.layer_norm(net.a(x), (3,)), "native_layer_norm"),
    ],
)
def test_path_norm_names_the_operation_that_it_has_no_rule_for(
    form: Callable[[Wired, Tensor], Tensor], operation: str
) -> None:
    net = randomised(Wired(form))
    with pytest.raises(InputError, match=f"no rule for the operation '{operation}'"):
        MEASURES["path_norm"](net, (normal(5, 3), torch.tensor([0, 1, 2, 0, 1])))


def spread_spectrum(dtype: torch.dtype) -> tuple[nn.Module, Data]:
    """A linear map whose squared error has the Hessian eigenvalues 1, 0.1, …, 1e-12, 1e-13, 1e-13, … of 200."""
    values = (10.0 ** -torch.arange(200).double()).clamp_min(1e-13)
    basis = torch.linalg.qr(normal(200, 200)).Q
    inputs = (basis * (200 * values).sqrt()).T.to(dtype)
    return nn.Linear(200, 1, bias=False).to(dtype), (inputs, torch.zeros(200, 1, dtype=dtype))


def test_log_volume_knows_every_logarithm() -> None:
    found = MEASURES["log_volume"](*spread_spectrum(torch.float64), **AFFINE_LOSS)
    assert not found.reason
    assert found.value == pytest.approx(-math.log(10) * sum(range(10)), abs=0.01)


def test_log_volume_says_which_eigenvalues_a_precision_loses() -> None:
    found = MEASURES["log_volume"](*spread_spectrum(torch.float32), **AFFINE_LOSS)
    assert "cannot be told from zero" in found.reason
    assert found.value == pytest.approx(-math.log(10) * sum(range(5)), abs=0.01)


def test_log_volume_says_what_its_products_do_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "_RESOLVED", 1e-14)
    found = MEASURES["log_volume"](*spread_spectrum(torch.float64), **AFFINE_LOSS)
    assert found.status == "not converged"


# ---------------------------------------------------------------- perturbations

AFFINE_LOSS = {"loss": "squared_error"}


@pytest.fixture(scope="module")
def affine() -> tuple[nn.Module, Data]:
    net = randomised(nn.Linear(3, 2))
    return net, (normal(12, 3), normal(12, 2, seed=6))


def largest_on_ball(hessian: Tensor, slope: Tensor, radius: float) -> float:
    """max gᵀδ + ½δᵀHδ, ‖δ‖ ≤ radius, H ≥ 0: (μI − H)δ = g with μ ≥ λ₁, by bisection on ‖δ‖ = radius."""
    eigen, basis = torch.linalg.eigh(hessian)
    g = basis.T @ slope
    low, high = float(eigen.max()), float(eigen.max()) + float(g.norm()) / radius + 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((g / (middle - eigen)).norm()) > radius else (low, middle)
    delta = g / (high - eigen)
    return float(g @ delta + 0.5 * (eigen * delta.square()).sum())


def test_ball_and_ellipsoid_reach_the_maximum_of_a_quadratic(affine: tuple[nn.Module, Data]) -> None:
    net, points = affine
    matrix, slope = naive.mean_hessian(net, *points, **AFFINE_LOSS), naive.gradient(net, *points, **AFFINE_LOSS)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    size = theta.abs()
    for name, wanted in (
        ("ball_sharpness", largest_on_ball(matrix, slope, 0.05)),
        ("adaptive_sharpness_l2", largest_on_ball(size[:, None] * matrix * size, size * slope, 0.5)),
    ):
        found = MEASURES[name](net, points, **AFFINE_LOSS).value
        assert MEASURES[name].lower_bound
        assert 0.999 * wanted <= found <= wanted * (1 + 1e-9), name


def test_ball_sharpness_moves_off_a_critical_point() -> None:
    net, inputs = nn.Linear(2, 1, bias=False).double(), normal(10, 2)
    points = inputs, net(inputs).detach()
    top = float(torch.linalg.eigvalsh(inputs.T @ inputs / 10).max())
    found = MEASURES["ball_sharpness"](net, points, **AFFINE_LOSS).value
    assert 0.99 * 0.5 * 0.05**2 * top <= found <= 0.5 * 0.05**2 * top * (1 + 1e-9)


def test_boxes_reach_the_best_corner() -> None:
    net = randomised(nn.Linear(3, 2))  # cross entropy is convex in an affine net: the maximum is at a corner
    points = labelled(net, normal(15, 3), classes=2)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    flat = naive.Flat(net, "cross_entropy")
    base = float(flat(theta, *points))
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8))).double()

    def best(half: Tensor, basis: Tensor | None = None) -> float:
        moves = corners * half if basis is None else corners * half @ basis.T
        return max(float(flat(theta + move, *points)) for move in moves)

    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    for name, wanted in (
        ("box_sharpness", 100 * (best(1e-3 * (theta.abs() + 1)) - base) / (1 + base)),
        ("box_sharpness_narrow", 100 * (best(5e-4 * (theta.abs() + 1)) - base) / (1 + base)),
        ("box_sharpness_subspace", 100 * (best(1e-3 * ((basis.T @ theta).abs() + 1), basis) - base) / (1 + base)),
        ("adaptive_sharpness_linf", best(0.01 * theta.abs()) - base),
    ):
        found = MEASURES[name](net, points).value
        assert 0.999 * wanted <= found <= wanted * (1 + 1e-9), name


def test_the_curvature_bound_of_the_box_holds_at_a_minimum() -> None:
    net, inputs = nn.Linear(2, 1, bias=False).double(), normal(10, 2)
    points = inputs, net(inputs).detach()
    top = float(torch.linalg.eigvalsh(inputs.T @ inputs / 10).max())
    wanted = 100 * 0.5e-6 * float((net.weight.detach().abs() + 1).square().sum()) * top
    assert close(MEASURES["box_sharpness_curvature"](net, points, **AFFINE_LOSS).value, wanted)
    assert 0 < MEASURES["box_sharpness"](net, points, **AFFINE_LOSS).value <= wanted


def test_average_sharpness_of_a_quadratic_is_half_the_trace(affine: tuple[nn.Module, Data]) -> None:
    net, points = affine
    curvature = naive.mean_hessian(net, *points, **AFFINE_LOSS).diagonal()
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    plain = MEASURES["average_sharpness"](net, points, **AFFINE_LOSS)
    assert abs(plain.value - 0.5 * 0.01**2 * float(curvature.sum())) < 4 * plain.stderr
    adaptive = MEASURES["adaptive_sharpness_average"](net, points, **AFFINE_LOSS)
    assert abs(adaptive.value - 0.5 * 0.05**2 * float((curvature * theta.square()).sum())) < 4 * adaptive.stderr


def test_pac_bayes_finds_the_largest_allowed_standard_deviation(mlp: nn.Module, data: Data) -> None:
    setting = Setting(mlp, data)
    base = float((mlp(data[0]).argmax(1) != data[1]).double().mean())

    def rise(deviation: Tensor, purpose: int) -> float:
        total = 0.0
        for index in range(10):
            moved = setting.theta + deviation * setting.normal(index, purpose)
            outputs = functional_call(mlp, setting.split(moved), (data[0],))
            total += float((outputs.argmax(1) != data[1]).double().mean()) - base
        return total / 10

    for name, purpose in (("pac_bayes_flatness", 3), ("pac_bayes_magnitude", 4)):
        sigma = 1 / math.sqrt(MEASURES[name].compute(setting).value)

        def deviation(sigma: float, name: str = name) -> Tensor:
            square = setting.theta.square() if name == "pac_bayes_magnitude" else torch.ones_like(setting.theta)
            return (sigma**2 * square + (1e-6 if name == "pac_bayes_magnitude" else 0.0)).sqrt()

        assert rise(deviation(sigma), purpose) <= 0.1 < rise(deviation(1.01 * sigma), purpose)


def test_pac_bayes_noise_is_a_standard_deviation_and_not_a_variance() -> None:
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(0.01)
    inputs = normal(10, 1)
    points = inputs, (inputs[:, 0] > 0).long()
    found = MEASURES["pac_bayes_flatness"](net, points, loss="binary_cross_entropy")
    wanted = (1.2815515655446004 / 0.01) ** 2  # all labels flip once u < −0.01: Φ(−0.01/σ) = 0.1
    assert wanted / 6 < found.value < wanted * 6


def test_pac_bayes_says_so_where_no_noise_is_enough(mlp: nn.Module, data: Data) -> None:
    wrong = data[0], mlp(data[0]).argmin(1)  # all wrong already: the error cannot rise
    with pytest.raises(InputError, match="never crosses the allowed rise"):
        MEASURES["pac_bayes_flatness"](mlp, wrong)


# ---------------------------------------------------------------- margins


def test_margin_measures_sample_by_sample(here: Setting, mlp: nn.Module, data: Data) -> None:
    signed, gaps, bounds, printed = [], [], [], []
    for x, logits, y in zip(data[0], mlp(data[0]).detach(), data[1], strict=True):
        others = [logits[j] for j in range(3) if j != y]
        signed.append(float(logits[y] - max(others)))
        softmax = logits.softmax(0)
        gamma = abs(float(softmax[y] - max(softmax[j] for j in range(3) if j != y)))
        gaps.append((float(x @ x) + 1) * (1 - float(softmax @ softmax)))
        bounds.append((float(x @ x) + 1) * (1 - gamma**2))
        printed.append(float(x.norm()) * (1 - gamma**2))
    margin = np.array(signed)
    assert close(value(here, "mean_aceht"), np.mean(gaps))
    assert close(value(here, "margin_bound"), np.mean(bounds))
    assert close(value(here, "printed_margin_bound"), np.mean(printed))
    assert close(value(here, "margin_mean"), margin.mean())
    assert close(value(here, "margin_min"), margin.min())
    for share in (10, 25, 50, 75, 90):
        assert close(value(here, f"margin_q{share}"), np.quantile(margin, share / 100))
    assert close(value(here, "margin_skewness"), (((margin - margin.mean()) / margin.std()) ** 3).mean())


def test_distances_to_the_boundary(here: Setting, mlp: nn.Module, data: Data) -> None:
    def distances(head: nn.Module, points: Tensor, dual: float) -> np.ndarray:
        found = []
        for x, y in zip(points, data[1], strict=True):
            rows = jacrev(lambda x: head(x[None])[0])(x).detach()
            logits = head(x[None])[0].detach()
            ratios = [
                float((logits[y] - logits[j]) / torch.linalg.vector_norm(rows[y] - rows[j], dual))
                for j in range(3)
                if j != y
            ]
            found.append(min(ratios))
        return np.array(found)

    assert close(value(here, "input_distance"), np.quantile(distances(mlp, data[0], 2), 0.5))
    assert close(value(here, "input_distance_inf"), np.quantile(distances(mlp, data[0], 1), 0.5))
    hidden = mlp[:4](data[0]).detach()  # type: ignore[index]
    spread = math.sqrt(float(hidden.var(0, correction=0).sum()))
    margins = distances(mlp[4], hidden, 2) / spread  # type: ignore[index]
    low, middle, high = np.quantile(margins, [0.25, 0.5, 0.75])
    for name, wanted in (
        ("median", middle),
        ("q1", low),
        ("q3", high),
        ("low_fence", low - 1.5 * (high - low)),
        ("high_fence", high + 1.5 * (high - low)),
    ):
        assert close(value(here, f"hidden_margin_{name}"), wanted), name


class Functional(nn.Module):
    """The same network without a module for the activation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.a, self.b = net[0], net[2]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=torch.relu(self.a(x)))


def test_hidden_margins_are_taken_at_the_last_layers_input() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    points = labelled(net, normal(20, 3))
    wanted = value(Setting(net, points), "hidden_margin_median")  # the output of the module nn.ReLU is that input
    assert close(value(Setting(Functional(net), points), "hidden_margin_median"), wanted)
    head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Identity(), nn.ReLU(), nn.Linear(4, 3)).double()
    head.append(nn.Softplus())  # what follows the last layer does not move the place
    assert value(Setting(head, labelled(head, normal(20, 3))), "hidden_margin_q1")
    again = randomised(Recurrent())
    with pytest.raises(InputError, match="runs repeatedly"):
        MEASURES["hidden_margin_median"](again, labelled(again, normal(6, 3)))


def test_spectral_margin_counts_frozen_layers() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    points = labelled(net, normal(20, 3))
    wanted = value(Setting(net, points), "spectral_margin_mean")
    net[0].requires_grad_(False)  # type: ignore[index]
    assert close(value(Setting(net, points), "spectral_margin_mean"), wanted)
    assert not net[0].weight.requires_grad  # type: ignore[index]
    smooth = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    smooth[0].requires_grad_(False)  # type: ignore[index]
    for name in ("spectral_margin_mean", "path_norm"):  # a frozen layer makes no ReLU network of it
        with pytest.raises(InputError, match="ReLU networks only"):
            MEASURES[name](smooth, points)
    with pytest.raises(InputError, match="plain nn"):
        MEASURES["spectral_margin_mean"](randomised(FunctionalHead()), points)


@pytest.mark.parametrize("count", [1, 7])
def test_spectral_margin_counts_the_tokens_of_a_sample_wherever_they_stand(count: int) -> None:
    forms = [randomised(Tokens(form)) for form in ("behind", "in front", "folded")]
    points = labelled(forms[0], normal(count, 6))
    wanted, *others = (value(Setting(net, points), "spectral_margin_mean") for net in forms)
    assert all(close(other, wanted) for other in others)
    first, last = (net.weight.detach() for net in (forms[0].a, forms[0].o))  # type: ignore[union-attr]
    first = torch.block_diag(*[first] * 3)
    sizes = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (first, last)]
    ratios = [float(matrix.norm(dim=1).sum()) / size for matrix, size in zip((first, last), sizes, strict=True)]
    complexity = math.prod(sizes) * sum(ratio ** (2 / 3) for ratio in ratios) ** 1.5
    margin = value(Setting(forms[0], points), "margin_mean")
    assert close(wanted, margin / (complexity * float(points[0].norm()) / count))


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


def test_spectral_margin_takes_convolutions_as_matrices_and_folds_batch_norm() -> None:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4), nn.BatchNorm1d(4), nn.ReLU()]
    net = randomised(nn.Sequential(*layers, nn.Linear(4, 3)))
    inputs, targets = labelled(net, normal(10, 1, 3, 3))
    conv, norm = copy.deepcopy(net[0]), net[4]  # type: ignore[index]
    conv.bias = None
    units = torch.eye(9).double().reshape(9, 1, 3, 3)
    matrices = [
        conv(units).detach().reshape(9, -1).T,
        (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None] * net[3].weight,  # type: ignore[index]
        net[6].weight,  # type: ignore[index]
    ]
    matrices = [matrix.detach() for matrix in matrices]
    sizes = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in matrices]
    ratios = [float(m.norm(dim=1).sum()) / size for m, size in zip(matrices, sizes, strict=True)]
    complexity = math.prod(sizes) * sum(ratio ** (2 / 3) for ratio in ratios) ** 1.5
    logits = net(inputs).detach()
    rivals = logits.scatter(1, targets[:, None], -math.inf).amax(1)
    margin = (logits.gather(1, targets[:, None])[:, 0] - rivals) / (complexity * float(inputs.norm()) / 10)
    found = {name: MEASURES[f"spectral_margin_{name}"](net, (inputs, targets)).value for name in ("mean", "median")}
    assert close(found["mean"], margin.mean(), 1e-6)
    assert close(found["median"], np.quantile(margin.numpy(), 0.5), 1e-6)


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    **{
        f"{mode}, padded by {padding}": (nn.Conv2d(2, 3, 3, padding=padding, padding_mode=mode), (2, 4, 4))
        for mode in ("zeros", "circular", "reflect", "replicate")
        for padding in (1, 2, "same")
    },
    "1d": (nn.Conv1d(2, 3, 4, padding=3, padding_mode="reflect"), (2, 5)),
    "3d": (nn.Conv3d(1, 2, 3, padding=1, padding_mode="circular"), (1, 2, 2, 3)),
    "3d, replicate": (nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate", groups=2), (2, 2, 3, 2)),
    "strided": (nn.Conv2d(2, 2, (3, 2), stride=(2, 3), padding=(2, 1), padding_mode="replicate"), (2, 5, 4)),
    "dilated": (nn.Conv2d(2, 2, 3, dilation=(2, 1), padding=(3, 2), padding_mode="reflect"), (2, 5, 4)),
    "grouped": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", groups=2), (4, 3, 3)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 3)),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, dilation=2, groups=2), (4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_norms_of_a_convolution_are_those_of_its_matrix(name: str) -> None:
    conv, shape = randomised(CONVOLUTIONS[name][0]), CONVOLUTIONS[name][1]
    matrix = torch.func.jacrev(lambda x: conv(x[None]).flatten())(normal(*shape)).flatten(1).detach()
    call = Call("conv", conv, "weight", conv.weight.detach(), torch.Size((2 * 3, *shape)))  # 3 in a sample
    norm, rows = spectral_margin._operator_norms(call, seed=0)
    assert norm.status in ("exact", "converged")
    assert close(norm.value, torch.linalg.matrix_norm(matrix, 2), 1e-6)
    assert close(rows, 3 * float(matrix.norm(dim=1).sum()), 1e-9)


class Diamond(nn.Module):
    """Paths of one, two and three layers from a first layer to a head, and past both."""

    PATHS = ("first short head", "first long deep head", "first head", "aside")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(8, 3)
        self.long, self.deep, self.aside = nn.Linear(4, 2), nn.Linear(2, 4, bias=False), nn.Linear(3, 3)
        self.unused = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_()
        self.unused(y)
        z = self.deep(self.long(y).relu()).view(-1, 2, 2)
        z[:, 1].relu_()  # writes into a view
        both = torch.cat([torch.maximum(self.short(y), z.flatten(1)), y], 1)
        return self.head(both) - self.aside(x)


def test_spectral_margin_adds_up_what_parallel_paths_stretch() -> None:
    net = randomised(Diamond())
    inputs, targets = labelled(net, normal(10, 3))
    matrices = {name: module.weight.detach() for name, module in net.named_children()}
    sizes = {name: float(torch.linalg.matrix_norm(matrix, 2)) for name, matrix in matrices.items()}
    paths = [path.split() for path in Diamond.PATHS]
    total = 0.0
    for name in {name for path in paths for name in path}:
        through = [path for path in paths if name in path]
        before = {tuple(path[: path.index(name)]) for path in through}
        behind = {tuple(path[path.index(name) + 1 :]) for path in through}
        stretch = [sum(math.prod(sizes[each] for each in part) for part in parts) for parts in (before, behind)]
        total += (math.prod(stretch) * float(matrices[name].norm(dim=1).sum())) ** (2 / 3)
    margin = value(Setting(net, (inputs, targets)), "margin_mean")
    wanted = margin / (total**1.5 * float(inputs.norm()) / 10)
    assert close(value(Setting(net, (inputs, targets)), "spectral_margin_mean"), wanted, 1e-6)
    bound = sum(math.prod(sizes[name] for name in path) for path in paths)
    for row in inputs:  # no path sum means anything unless it bounds the slope of the network
        slope = jacrev(lambda x: net(x[None])[0])(row).detach()
        assert float(torch.linalg.matrix_norm(slope, 2)) <= bound


def test_a_branch_of_zeros_leaves_the_spectral_margin() -> None:
    """As residual networks are often initialised."""
    net = randomised(Diamond())
    points = labelled(net, normal(10, 3))
    nn.init.zeros_(net.deep.weight)  # type: ignore[union-attr, arg-type]
    assert math.isfinite(value(Setting(net, points), "spectral_margin_mean"))


# ---------------------------------------------------------------- the contract battery


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


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


SAME_OUTPUTS = {name for name in MEASURES if name.startswith(("margin_m", "margin_q", "margin_s", "hidden_margin_"))}


@pytest.mark.parametrize("name", MEASURES)
def test_what_an_affine_map_of_the_inputs_leaves(name: str) -> None:
    """What sees only the outputs or the last layer stays, and θᵀFθ: W'x' + b' = Wx + b along θ itself, too."""
    net = randomised(plain_net(), seed=3)
    inputs, targets = labelled(net, normal(40, 4, seed=9))
    result = transforms.input_map(net, normal(4, 4, seed=1) + 5 * torch.eye(4), normal(4, seed=2), data=inputs)
    assert result.inputs is not None
    before = MEASURES[name](net, (inputs, targets)).value
    after = MEASURES[name](result.model, (result.inputs(inputs), targets)).value
    assert math.isfinite(after)
    stays = name in SAME_OUTPUTS | {"fisher_rao_norm", "relative_flatness"}
    assert name in COUNTED or close(after, before, 1e-6) == stays, f"{before} became {after}"


def test_pac_bayes_magnitude_is_not_quite_invariant() -> None:
    """ε = 1e-3 is an absolute amount of noise: weights of that size drown in it."""
    net = randomised(plain_net(), seed=3)
    points = labelled(net, normal(40, 4, seed=9))
    small = transforms.rescale_layers(net, {"2": 2.0**-14, "4": 2.0**14}, data=points).model
    before = MEASURES["pac_bayes_magnitude"](net, points).value
    with pytest.raises(InputError, match="never crosses"):
        MEASURES["pac_bayes_magnitude"](small, points)
    assert before > 0


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


@pytest.mark.slow
def test_the_battery_on_convolutions_and_residual_sums() -> None:
    """All measures, all transforms, by the audit itself."""
    net = randomised(Wide(), size=0.4)
    for buffer in (net.norm.running_mean, net.norm.running_var):  # type: ignore[union-attr]
        buffer.fill_(0.7)  # type: ignore[operator, union-attr]
    found = audit(net, labelled(net, normal(40, 1, 4, 4)), measures="all", transforms="all")
    assert not found.skipped
    assert {(row.measure, row.transform) for row in found.rows} == set(itertools.product(MEASURES, TRANSFORMS))
    for row in found.rows:
        if row.measure in COUNTED:
            assert not row.declared
        elif row.declared:
            assert row.verdict == "invariant", str(row)
        else:
            assert row.verdict in (("changes", "unstable") if row.before.stderr else ("changes",)), str(row)
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


@pytest.mark.parametrize("name", ["path_norm", "spectral_margin_mean"])
def test_norms_of_relu_nets_refuse_others(name: str) -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    with pytest.raises(InputError, match="ReLU networks only"):
        MEASURES[name](net, labelled(net, normal(6, 3)))


def test_measures_that_need_more_than_the_network_has_say_so(mlp: nn.Module, data: Data) -> None:
    with pytest.raises(InputError, match="a layer in front of its last one"):
        MEASURES["hidden_margin_median"](randomised(nn.Linear(3, 3)), data)
    normed = randomised(normed_net())
    points = labelled(normed, normal(8, 4))
    with pytest.raises(InputError, match="eval mode only"):
        MEASURES["path_norm"](normed, points, batch_norm="batch")
    with pytest.raises(InputError, match="no gradient of its own"):
        MEASURES["normalised_sharpness"](normed, points, batch_norm="batch")


@pytest.mark.parametrize("critical", [0.003, 0.02, 0.07, 0.4, 3.0])
def test_the_search_of_pac_bayes_ends_at_the_crossing(critical: float) -> None:
    """Whatever number of halvings or doublings leads to it: the rise is 0.1·(σ/critical)² for every draw."""

    class Stub:
        theta, seed = torch.zeros(4, dtype=torch.float64), 0

        def __init__(self) -> None:
            self.kept: dict[str, Tensor] = {}

        def wrong_at(self, theta: Tensor) -> Tensor:
            return 0.1 * theta.square() / critical**2

        def normal(self, index: int, purpose: int) -> Tensor:
            return torch.ones(4, dtype=torch.float64)

    found = pac_bayes._pac_bayes(Stub(), lambda sigma: sigma, 3)  # type: ignore[arg-type]
    assert found.value == pytest.approx(critical**-2, rel=0.03)


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


def test_fisher_rao_norm_without_forward_derivatives() -> None:
    """θᵀFθ then comes from a product with F, by reverse mode alone."""

    class Squared(nn.Module):
        def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.inner, self.head, self.square = nn.Linear(3, 4), nn.Linear(4, 2), square

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.square(self.inner(x)))

    reverse, plain = Squared(zoo.ReverseOnly.apply).double(), Squared(torch.square).double()
    plain.load_state_dict(reverse.state_dict())
    data = torch.randn(4, 3).double(), torch.tensor([0, 1, 0, 1])
    found, wanted = (MEASURES["fisher_rao_norm"](net, data).value for net in (reverse, plain))
    assert found == pytest.approx(wanted, rel=1e-9)
