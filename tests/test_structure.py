"""Exactness is decided by degrees, and never claimed where the outputs do curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from spiritlevel.binding.problem import Problem
from spiritlevel.papers import networks as models
from spiritlevel.watching.structure import Structure, analyse


def structure_of(model: nn.Module, inputs: Any) -> Structure:
    problem = Problem(model)
    with problem.active():
        return analyse(problem, inputs[:2], 2)


def second_differences(problem: Problem, inputs: Any, seed: int) -> dict[str, float]:
    """For every parameter tensor max |φ(θ+hv) + φ(θ−hv) − 2φ(θ)| along a random direction v inside it."""
    generator = torch.Generator().manual_seed(seed)
    base = problem.outputs(problem.params, inputs)
    result = {}
    for name, tensor in problem.params.items():
        step = 1e-6 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        ends = [problem.outputs({**problem.params, name: tensor + sign * step}, inputs) for sign in (1, -1)]
        result[name] = float((ends[0] + ends[1] - 2 * base).abs().max() / base.abs().max())
    return result


@pytest.mark.parametrize("name", zoo.EXACT)
def test_outputs_of_exact_networks_do_not_curve_inside_one_parameter(name: str) -> None:
    make, shape = zoo.EXACT[name]
    model, (inputs, _) = zoo.randomised(make()), zoo.sample_data(shape)
    assert structure_of(model, inputs).exact
    problem = Problem(model)
    with problem.active():
        for seed in range(3):
            # curvature would show as about 1e-12; a kink met by chance would show as about 1e-6
            assert max(second_differences(problem, inputs, seed).values()) < 1e-14


@pytest.mark.parametrize("name", zoo.PROBED)
def test_the_operation_in_the_way_is_named(name: str) -> None:
    make, shape, culprit = zoo.PROBED[name]
    model, (inputs, _) = zoo.randomised(make()), zoo.sample_data(shape)
    structure = structure_of(model, inputs)
    assert not structure.exact
    assert culprit in structure.reason


@pytest.mark.parametrize("name", zoo.CHAINS)
def test_smooth_chains_are_not_called_exact_but_smooth(name: str) -> None:
    make, shape = zoo.CHAINS[name]
    model, (inputs, _) = zoo.randomised(make()), zoo.sample_data(shape)
    structure = structure_of(model, inputs)
    assert not structure.exact
    assert structure.smooth


def test_batch_statistics_are_not_exact() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    problem = Problem(model, batch_norm="batch")
    with problem.active():
        assert not analyse(problem, torch.randn(4, 6).double(), 4).exact


def test_a_parameter_that_nothing_uses_has_degree_zero() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    model.register_parameter("unused", nn.Parameter(torch.randn(3)))
    structure = structure_of(model, torch.randn(2, 6))
    assert structure.degrees["unused"] == 0
    assert structure.exact


@pytest.mark.parametrize("name", ["lenet5", "all_cnn_c", "preresnet164", "wide_resnet_28_10", "vgg16_bn", "fcn_bn"])
def test_the_papers_networks_are_exact(name: str) -> None:
    model = models.build(name, width=0.125 if name != "wide_resnet_28_10" else 0.05)
    shape = (1, 28, 28) if name in ("lenet5", "fcn_bn") else (3, 32, 32)
    assert structure_of(model, torch.rand(2, *shape)).exact


def test_tanh_lenet_is_not() -> None:
    assert "tanh" in structure_of(models.lenet5(activation="tanh"), torch.rand(2, 1, 28, 28)).reason


class Decides(nn.Module):
    """Takes a Python value out of what its parameters computed, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.way == "item":
            return y * y.sum().item()
        if self.way == "comparison" and (y > 0).any():
            return y
        if self.way == "equal" and torch.equal(y, y + 1):
            return y
        return y if self.way == "list" and (y > 0).int().tolist() else 2 * y


@pytest.mark.parametrize("way", ["item", "comparison", "equal", "list"])
def test_a_python_value_that_parameters_decide_is_never_exact(way: str) -> None:
    structure = structure_of(Decides(way), torch.randn(2, 6))
    assert not structure.exact
    assert "cannot be traced" in structure.reason


class WritesIntoAView(nn.Module):
    """Squares its layer's outputs through a view that it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[:, :2].mul_(y[:, 2:])
        return self.head(y)


def test_what_is_written_into_a_view_reaches_its_base() -> None:
    structure = structure_of(WritesIntoAView(), torch.randn(2, 6))
    assert structure.degrees["inner.weight"] > 1
    assert structure.degrees["head.weight"] == 1
    assert "'mul'" in structure.reason


class ReadsItsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.abs().max() < 3 else torch.tanh(self.inner(x))


def test_a_python_value_that_inputs_decide_is_never_exact() -> None:
    structure = structure_of(ReadsItsInputs(), torch.zeros(2, 6))
    assert not structure.exact
    assert "that depends on parameters or inputs" in structure.reason


class Modulus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.inner(x)).abs()


def test_the_size_of_a_complex_number_is_not_piecewise_linear() -> None:
    structure = structure_of(Modulus(), torch.randn(2, 6))
    assert structure.degrees["inner.weight"] > 1
    assert "'abs'" in structure.reason


class OwnReLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.head(torch.where(y > 0, y, torch.zeros_like(y)))


def test_comparisons_and_constants_are_no_obstacles() -> None:
    structure = structure_of(OwnReLU(), torch.randn(2, 6))
    assert structure.exact
    assert not structure.obstacles


def test_weights_are_no_activations() -> None:
    """A batch is as large as the activations allow; a weight that is transposed for its product is not one."""
    problem = Problem(nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 3)))
    with problem.active():
        floats = analyse(problem, torch.randn(2, 100), 2).floats_per_sample
    assert 50 + 50 + 3 <= floats <= 100 + 50 + 50 + 3  # and a copy of the inputs
