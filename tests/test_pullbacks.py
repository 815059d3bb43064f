"""Several backward passes at once against autograd's, one after the other, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.watching import pullbacks
from spiritlevel.watching.recording import FEW


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
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(torch.add(self.plain_norm(self.body(x)), self.shortcut(x), alpha=0.5) + self.shift)
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
    pullbacks.pull_back(outputs, values, vectors, found.__setitem__)
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


def test_a_value_that_nothing_reads_is_not_reached() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    read, unread = x * 2, x * 3
    found: dict[int, Tensor] = {}
    pullbacks.pull_back(read.sum(1), [read, unread], torch.ones(1, 2), found.__setitem__)
    assert [*found] == [0]


def test_traces_do_not_depend_on_how_passes_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, count = Residual().double().eval(), FEW + 5
    data = torch.randn(count, 3, 8, 8, dtype=torch.float64), torch.arange(count) % 4
    calls: list[int] = []
    pull_back = pullbacks.pull_back

    def counted(outputs: Tensor, *args: Any) -> None:
        calls.append(len(outputs))
        pull_back(outputs, *args)

    monkeypatch.setattr("spiritlevel.watching.recording.pull_back", counted)
    few = sl.sample_traces(model, data, batch_size=7)
    assert few.exact
    assert 7 in calls
    calls.clear()
    many = sl.sample_traces(model, data, batch_size=count)
    assert count not in calls
    torch.testing.assert_close(few.values, many.values, rtol=1e-10, atol=0)


class _Doubled(torch.autograd.Function):
    """A node that Python alone can call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def test_a_node_that_cannot_be_called_leaves_it_to_autograd() -> None:
    torch.manual_seed(0)
    first, last = nn.Conv2d(1, 3, 3), nn.Linear(3, 4)

    class Net(nn.Module):
        def __init__(self, double: bool) -> None:
            super().__init__()
            self.first, self.last, self.double_it = first, last, double

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(x))
            x = _Doubled.apply(x) if self.double_it else 2 * x
            return self.last(x.mean((2, 3)))

    x = torch.randn(4, 1, 6, 6)
    taps = [F.relu(first(x))]
    outputs = last(_Doubled.apply(taps[0]).mean((2, 3)))
    with pytest.raises(TypeError):
        pullbacks.pull_back(outputs, taps, torch.ones(2, 4, 4), lambda position, found: None)
    data = x, torch.arange(4)
    own, plain = (sl.sample_traces(Net(double), data, probes=4) for double in (True, False))
    assert plain.exact
    if own.exact:  # an operation that nobody knows may be taken for a curved one
        torch.testing.assert_close(own.values, plain.values)
