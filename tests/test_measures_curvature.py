"""Measures of curvature against a brute-force evaluation of their formulas on tiny nets."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import measured
import naive
import pytest
import torch
import zoo
from measured import AFFINE_LOSS, Data, FunctionalHead, Recurrent, Tokens, close, labelled, normal, randomised, value
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, Setting, spectral
from spiritlevel.measures.relative import _balanced

mlp, data, dense, here = measured.mlp, measured.data, measured.dense, measured.here  # fixtures


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


def test_the_frobenius_norm_is_never_below_the_largest_eigenvalue() -> None:
    """One eigenvalue is nearly all of this H; probes alone left the norm below it for every second seed."""
    torch.manual_seed(0)
    net = nn.Linear(200, 1, bias=False).double()
    inputs = torch.ones(40, 200).double() + 0.01 * torch.randn(40, 200).double()
    for seed in range(6):
        setting = Setting(net, (inputs, torch.zeros(40, 1).double()), loss=nn.MSELoss(), seed=seed)
        norm, largest = value(setting, "frobenius_norm"), value(setting, "largest_eigenvalue")
        assert norm >= largest
        assert close(norm, torch.linalg.matrix_norm(2 * inputs.T @ inputs / 40), 1e-6)


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


def test_a_chain_of_weights_that_can_be_scaled_away_one_after_the_other_has_the_infimum_0() -> None:
    """As strong pruning leaves them: each row or column without one of the two sets another one free."""
    assert _balanced(torch.eye(8).double(), torch.ones(7).double().diag(1)) == (0.0, 0.0, True)


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
    assert "are indistinguishable from zero" in found.reason
    assert found.value == pytest.approx(-math.log(10) * sum(range(5)), abs=0.01)


def test_log_volume_says_what_its_products_do_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "_RESOLVED", 1e-14)
    found = MEASURES["log_volume"](*spread_spectrum(torch.float64), **AFFINE_LOSS)
    assert found.status == "not converged"


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
