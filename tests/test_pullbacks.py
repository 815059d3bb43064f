"""Several backward passes at once against autograd's, one after the other, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_networks import with_statistics
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.watching import pullbacks


class Residual(nn.Module):
    """Strides, groups, a shortcut, a sum that is spread, functions in place, and statistics that are not trivial."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        inner = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.body = nn.Sequential(*inner, nn.Conv2d(6, 6, 3, 1, 1, groups=2))
        self.plain_norm = nn.BatchNorm2d(6, affine=False)
        self.shortcut, self.shift = nn.Conv2d(4, 6, 1, 2), nn.Parameter(torch.randn(6, 1, 1))
        self.up, self.head = nn.ConvTranspose2d(6, 5, 3, 2, 1, 1), nn.Linear(5, 4)
        with_statistics(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(torch.add(self.plain_norm(self.body(x)), self.shortcut(x), alpha=0.5) + self.shift)
        x = x + F.relu(x)  # both of which get the same cotangents
        x = F.max_pool2d(self.up(x), 2)
        parts = torch.split(x, 2, dim=2)  # a node with several results, of which one is not read
        return self.head(parts[0].mean((2, 3)))


def _twin(model: nn.Module, inputs: Tensor, passes: int) -> tuple[dict[int, Tensor], list[list[Tensor | None]]]:
    values: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: values.append(output))
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)
    ]
    outputs = model(inputs.requires_grad_())
    for hook in hooks:
        hook.remove()
    values.append(inputs)
    vectors = torch.randn(passes, *outputs.shape, dtype=outputs.dtype)
    found: dict[int, Tensor] = {}
    pullbacks.pull_back(outputs, values, vectors, lambda position, each: found.__setitem__(position, each.clone()))
    return found, [list(torch.autograd.grad(outputs, values, v, retain_graph=True)) for v in vectors]


@pytest.mark.parametrize("passes", [1, 3])
def test_cotangents_are_those_of_one_pass_after_the_other(passes: int) -> None:
    torch.manual_seed(0)
    model = Residual().double().eval().requires_grad_(False)
    found, wanted = _twin(model, torch.randn(2, 3, 8, 8, dtype=torch.float64), passes)
    assert len(found) == len(wanted[0])
    for position, cotangents in found.items():
        expected = torch.stack([each[position] for each in wanted])  # type: ignore[misc]
        torch.testing.assert_close(cotangents, expected, rtol=1e-12, atol=1e-13)


class Shortcuts(nn.Module):
    """Kernels of one place with strides: alone, beside another, beside a value that others hold, and beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.alone = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1, 2)
        self.left, self.right = nn.Conv2d(4, 5, 1, (2, 3)), nn.Conv2d(4, 5, 1, (3, 2))
        self.beside, self.body = nn.Conv2d(4, 5, 1, 2), nn.Conv2d(4, 5, 3, 2, 1)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alone(self.first(x))
        several = self.left(x).mean((2, 3)) + self.right(x).mean((2, 3))
        y = x + x.flip(3)
        return self.head(several + (self.beside(y) * F.relu(self.body(y))).mean((2, 3)) + y.mean((1, 2, 3))[:, None])


@pytest.mark.parametrize("size", [(12, 12), (13, 9)])
def test_shortcuts_leave_zeros_where_they_do_not_read(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Shortcuts().double().eval().requires_grad_(False)
    found, wanted = _twin(model, torch.randn(2, 3, *size, dtype=torch.float64), 3)
    assert len(found) == len(wanted[0])
    for position, cotangents in found.items():
        expected = torch.stack([each[position] for each in wanted])  # type: ignore[misc]
        torch.testing.assert_close(cotangents, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 2, 5, 16, 16), (2, 5, 20, 20), (2, 5, 3, 3), (0, 2, 16, 16), (4, 7)])
def test_channels_last_changes_the_memory_alone(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    turned = pullbacks.channels_last(values)
    assert torch.equal(turned, values)
    assert values.ndim < 4 or turned.movedim(-3, -1).is_contiguous()
    assert pullbacks.channels_last(turned) is turned


def test_a_sum_hands_its_cotangents_on_without_a_copy() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    node, cotangents = (x.exp() + x.relu()).grad_fn, torch.randn(4, 2, 3)
    found = pullbacks._sum(node, pullbacks._Parcel(cotangents, True))
    assert found is not None
    assert [parcel is not None and (parcel.cotangents is cotangents, parcel.owned) for parcel in found] == [
        (True, False),
        (True, False),
    ]
    assert pullbacks._sum((x.exp() + x[0]).grad_fn, pullbacks._Parcel(cotangents, True)) is None  # which is spread


def test_a_value_that_nothing_reads_is_not_reached() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    read, unread = x * 2, x * 3
    found: dict[int, Tensor] = {}
    pullbacks.pull_back(read.sum(1), [read, unread], torch.ones(1, 2), found.__setitem__)
    assert [*found] == [0]


def test_what_takes_the_place_of_a_node_gets_its_cotangents() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    weight = torch.randn(5, 3, 3, 3)
    inner = F.conv2d(x, weight, padding=1)
    outputs = inner.relu().mean((2, 3))
    seen: list[tuple[Tensor, bool]] = []

    def own(cotangents: Tensor, back: bool, owned: bool) -> Tensor:
        seen.append((cotangents, back))
        return torch.ones(2, *x.shape)

    found: dict[int, Tensor] = {}
    vectors = torch.randn(2, *outputs.shape)
    pullbacks.pull_back(outputs, [inner, x], vectors, found.__setitem__, {inner.grad_fn: own})
    assert len(seen) == 1
    assert seen[0][1]
    torch.testing.assert_close(seen[0][0], found[0])
    wanted = torch.stack([torch.autograd.grad(outputs, inner, v, retain_graph=True)[0] for v in vectors])
    torch.testing.assert_close(found[0], wanted)
    assert bool((found[1] == 1).all())


class _Doubled(torch.autograd.Function):
    """A node that Python alone can call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def test_a_node_that_python_alone_can_call_raises() -> None:
    x = torch.randn(4, 1, 6, 6, requires_grad=True)
    outputs = _Doubled.apply(x).mean((2, 3))
    with pytest.raises(TypeError):
        pullbacks.pull_back(outputs, [x], torch.ones(2, 4, 1), lambda position, found: None)
