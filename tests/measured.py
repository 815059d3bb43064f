"""Networks, data and brute-force references that the tests of measures share."""

from __future__ import annotations

import naive
import pytest
import torch
from torch import Tensor, nn

from spiritlevel.measures import (
    MEASURES,
    Setting,
)

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


class Recurrent(nn.Module):
    """The last layer runs twice, so that the outputs are not linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.last(torch.tanh(self.first(x)))))


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


class FunctionalHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(self.first(x)), self.head)


AFFINE_LOSS = {"loss": "squared_error"}


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
