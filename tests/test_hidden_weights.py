"""Models that keep, list, share or write what is measured: caches, aliases, inputs, and calls with other tensors."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.binding.modules import called_with, twin_of
from spiritlevel.binding.parameters import select_parameters
from spiritlevel.errors import InputError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Merging(nn.Module):
    """Merges a low-rank update into its weight at the first call, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.left, self.right = (nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (3, 2), (2, 4)))
        self.merged: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is None:
            self.merged = self.weight + self.left @ self.right
        return nn.functional.linear(x, self.merged)


def test_what_a_model_keeps_from_one_pass_is_not_used_in_the_next() -> None:
    torch.manual_seed(0)
    net = Merging().double()
    inputs, targets = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    traces = sl.sample_traces(net, (inputs, targets))

    def loss(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return nn.functional.cross_entropy(inputs @ (weight + left @ right).T, targets)

    blocks = torch.autograd.functional.hessian(loss, (net.weight, net.left, net.right))
    expected = sum(
        float(blocks[i][i].reshape(p.numel(), -1).trace())  # type: ignore[index]
        for i, p in enumerate((net.weight, net.left, net.right))
    )
    assert sl.hessian(net, (inputs, targets)).dense().trace().item() == pytest.approx(expected, rel=1e-10)
    mean = traces.mean()
    assert abs(mean.value - expected) <= max(6 * mean.stderr, 1e-8 * abs(expected))
    assert net.merged is None


class Listing(nn.Module):
    """Reads its weights from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.weights = [self.first.weight, self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(nn.functional.linear(x, self.weights[0])), self.weights[1])


@pytest.mark.parametrize("measure", [sl.sample_traces, sl.hessian])
def test_parameters_that_are_read_elsewhere_are_refused(measure: Any) -> None:
    data = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with pytest.raises(InputError, match=r"Listing reads parameters that it does not hold under.*attributes"):
        measure(Listing(), data)


class Forces(nn.Module):
    """Minus the slope of an energy, taken in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_a_model_may_differentiate_in_its_forward_pass() -> None:
    torch.manual_seed(0)
    net, inputs, targets = Forces().double(), torch.randn(5, 4).double(), torch.randn(5, 4).double()
    flat = naive.Flat(net)
    expected = torch.autograd.functional.hessian(
        lambda point: (flat.outputs(point, inputs) - targets).square().sum() / 10, flat.point
    )
    found = sl.hessian(net, (inputs, targets), loss="squared_error").dense()
    torch.testing.assert_close(found, expected)


class Clamping(nn.Module):
    """Writes to its inputs, but only where one of them is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 5).any()):
            x.clamp_(-5, 5)
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("measure", [sl.sample_traces, sl.hessian, sl.margins])
def test_data_stay_as_they_are_also_if_a_late_sample_makes_the_model_write_to_them(measure: Any) -> None:
    inputs = torch.randn(9, 4)
    inputs[7] = 100.0
    before = inputs.clone()
    measure(Clamping(), (inputs, torch.arange(9) % 3), batch_size=3)
    assert torch.equal(inputs, before)


def test_a_plain_tensor_attribute_gets_its_values_back() -> None:
    net = nn.Linear(4, 3)
    net.calls = torch.zeros(())
    net.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)
    sl.sample_traces(net, (torch.randn(5, 4), torch.arange(5) % 3))
    assert net.calls == 0


def test_a_shared_parameter_has_all_its_names() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "head": nn.Linear(5, 7)})
    net["head"].weight = net["embedding"].weight
    assert select_parameters(net, "head") == ["embedding.weight", "head.bias"]
    assert select_parameters(net, "head.weight") == ["embedding.weight"]


class Twice(nn.Module):
    """One weight under two names, a module met twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight
        self.again = self.second
        self.kept, self.empty = OrderedDict(a=torch.ones(1)), OrderedDict[str, int]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(self.norm(self.second(self.first(x))))
        if found.isnan().any():
            raise RuntimeError("not a number")
        return found


def test_a_call_with_other_tensors_is_that_of_torch_and_leaves_the_model_its_own() -> None:
    """Torch's own leaves a module that is met twice with a new tensor: it is called on copies here."""
    model = Twice().eval()
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    other = {name: torch.randn_like(t) if t.is_floating_point() else t + 1 for name, t in own.items()}
    other["norm.running_var"] = torch.rand(4) + 1
    for given in (other, {"second.bias": other["second.bias"]}, {"first.weight": other["first.weight"]}):
        expected = torch.func.functional_call(copy.deepcopy(model), dict(given), (X,))
        assert torch.equal(called_with(model, given, (X,), {}), expected)
    with pytest.raises(RuntimeError, match="not a number"):
        called_with(model, {"first.weight": torch.full((4, 4), math.nan)}, (X,), {})
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert now.keys() == own.keys()
    assert all(now[name] is tensor for name, tensor in own.items())
    assert model.second.weight is model.first.weight


def test_a_twin_is_a_deep_copy() -> None:
    model = Twice()
    twin = twin_of(model)
    assert isinstance(twin, Twice)
    assert twin.again is twin.second
    assert twin.second.weight is twin.first.weight is not model.first.weight
    assert torch.equal(twin.kept["a"], model.kept["a"])
    assert twin.kept["a"] is not model.kept["a"]
    assert twin.empty == {}
    assert twin.empty is not model.empty
    handle = model.first.register_forward_hook(lambda *_: None)
    assert len(twin_of(model).first._forward_hooks) == 1
    twin.second.register_forward_hook(lambda *_: None)
    handle.remove()
    assert not model.first._forward_hooks
    assert not model.second._forward_hooks
