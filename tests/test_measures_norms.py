"""Norms of weights and paths against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import measured
import pytest
import torch
from measured import close, labelled, normal, randomised, value
from torch import Tensor, nn

from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, Setting

mlp, data, here = measured.mlp, measured.data, measured.here  # fixtures


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


OF_ONE_SHAPE = ("path_norm", "spectral_margin_mean", "spectral_margin_median")


@pytest.mark.parametrize("name", OF_ONE_SHAPE)
def test_the_shape_that_came_first_decides_nothing(name: str) -> None:
    """They took the first samples for all, so that the order of the batches decided."""
    net = randomised(Pooled(lambda h: h.mean((2, 3))))
    small, large = labelled(net, normal(6, 2, 5, 5)), labelled(net, normal(4, 2, 8, 6))
    for several in ([small, large], [large, small]):
        with pytest.raises(InputError, match=r"inputs of one shape, and these have 2, from \(2, 5, 5\) to \(2, 8, 6\)"):
            MEASURES[name](net, several)
    whole = MEASURES[name](net, small).value
    parts = [(small[0][:4], small[1][:4]), (small[0][:0], small[1][:0]), (small[0][4:], small[1][4:])]
    assert close(MEASURES[name](net, parts).value, whole)
    assert not close(MEASURES[name](net, large).value, whole)


def test_every_other_measure_is_the_same_in_whatever_order_the_shapes_come() -> None:
    net = randomised(Pooled(lambda h: h.mean((2, 3))))
    small, large = labelled(net, normal(6, 2, 5, 5)), labelled(net, normal(4, 2, 8, 6))
    by_chance = {"variance_margin", "pac_bayes_flatness", "pac_bayes_magnitude"}  # halves of classes; a rare error
    for name in sorted(MEASURES.keys() - {*OF_ONE_SHAPE, *by_chance}):
        one, other = (MEASURES[name](net, several).value for several in ([small, large], [large, small]))
        assert close(one, other, 1e-6), name


@pytest.mark.parametrize("name", ["path_norm", "spectral_margin_mean"])
def test_norms_of_relu_nets_refuse_others(name: str) -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    with pytest.raises(InputError, match="ReLU networks only"):
        MEASURES[name](net, labelled(net, normal(6, 3)))
