"""What is looked at before a large network is measured: fewer samples, and no gradient twice.

The limits are lowered, so that small networks, whose numbers are known, are taken for large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from naive import per_sample_traces
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.binding import coupling
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError
from spiritlevel.watching import derivatives, recording
from spiritlevel.watching.convolution_norms import ConvolutionRule
from spiritlevel.watching.derivatives import check_derivatives, known_gradient
from spiritlevel.watching.recording import GradientNorms, analyse_few


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coupling, derivatives, recording):
        monkeypatch.setattr(module, "LARGE", 1)
    for module in (derivatives, recording):
        monkeypatch.setattr(module, "VERY_LARGE", 1)


def convolutions(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)]
    return nn.Sequential(*layers).to(dtype).eval()


def images(count: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, 4, 4, generator=generator, dtype=dtype), torch.arange(count) % 4


def no_gradient(*_: Any) -> Tensor:
    raise AssertionError("a gradient that is known was computed again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_differences_serves_the_rules(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = convolutions(dtype), images(dtype=dtype)
    monkeypatch.setattr(GradientNorms, "_by_autograd", no_gradient)
    found = sl.sample_traces(model, data)
    assert found.exact
    exact = per_sample_traces(model.double(), data[0].double(), data[1])
    torch.testing.assert_close(found.values, exact, rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=0)


def test_a_wrong_rule_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ConvolutionRule.bias_norms

    def wrong(self: Any, deltas: Any) -> Any:
        return [(name, 1.01 * norms) for name, norms in real(self, deltas)]

    monkeypatch.setattr(ConvolutionRule, "bias_norms", wrong)
    model, data = convolutions(), images()
    found = sl.sample_traces(model, data)
    torch.testing.assert_close(found.values, per_sample_traces(model, *data), rtol=1e-9, atol=0)


def test_a_gradient_belongs_to_its_parameters_and_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images()
    first, second = Problem(convolutions()), Problem(convolutions())
    for tensor in second.params.values():
        tensor.mul_(2)
    with first.active():
        check_derivatives(first, *data, twice=False, forward=False)
        assert known_gradient(first) is not None
    second.facts = {**first.facts}
    assert known_gradient(second) is None
    monkeypatch.setattr(GradientNorms, "_by_autograd", no_gradient)
    few = data[0][5:8]  # the sample looked at is not among them
    with first.active(), pytest.raises(AssertionError, match="computed again"):
        GradientNorms(first, few, analyse_few(first, few), 2)


class TwoBiases(nn.Module):
    """Autograd returns one and the same tensor as the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(*shape)) for shape in ((4, 32), (4,), (4,)))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T + (self.a + self.b)


def test_gradients_that_share_their_memory_are_not_overwritten() -> None:
    model, data = TwoBiases().double(), images()
    torch.testing.assert_close(sl.sample_traces(model, data).values, per_sample_traces(model, *data), rtol=1e-9, atol=0)


def by_the_largest(x: Tensor) -> Tensor:
    return x / x.abs().max()


def by_the_mean(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def after_others(x: Tensor) -> Tensor:
    return x.cumsum(0)


def before_others(x: Tensor) -> Tensor:
    return x.flip(0).cumsum(0).flip(0)


@pytest.mark.parametrize("mix", [by_the_largest, by_the_mean, after_others, before_others])
@pytest.mark.parametrize("largest", [0, 1, 2])
def test_samples_that_depend_on_others_are_still_found(mix: Callable[[Tensor], Tensor], largest: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = convolutions()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(mix(x))

    inputs, targets = images(3)
    inputs[largest] *= 10
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sl.sample_traces(Mixed(), (inputs, targets))
