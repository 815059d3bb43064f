"""Networks of fewer than 300 parameters, whose curvature matrices can be written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel import estimators
from spiritlevel.binding.context import Context
from spiritlevel.operators.averaging import MeanMatrix
from spiritlevel.operators.products import hessian_product


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.reshape(len(x), 3, 4)).mean(1))


class Tied(nn.Module):
    """One weight at two depths, and its transpose at a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(x[:, :6]))))
        return (hidden @ self.layer.weight)[:, :3]


class Assigning(nn.Module):
    """Writes into a tensor of zeros, slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros(len(x), 3, dtype=x.dtype)
        hidden = torch.tanh(self.layer(x))
        result[:, :2] = hidden[:, :2] * hidden[:, 2:4]
        result[:, 2] += hidden[:, 5] ** 2
        return result


class Unused(nn.Module):
    """Has a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2, 2))
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "affine": lambda: nn.Linear(12, 3),
    "tanh": lambda: nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)),
    "relu in place": lambda: nn.Sequential(nn.Linear(12, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "gelu, dropout": lambda: nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Dropout(0.5), nn.Linear(5, 3)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 2, 2),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 3),
    ),
    "layer norm": lambda: nn.Sequential(nn.Linear(12, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 3)),
    "group norm": lambda: nn.Sequential(nn.Linear(12, 6), nn.GroupNorm(2, 6), nn.SiLU(), nn.Linear(6, 3)),
    "attention": Attention,
    "tied weights": Tied,
    "assignments": Assigning,
    "unused parameter": Unused,
}


def with_statistics(net: nn.Module) -> nn.Module:
    """The same network, its batch statistics and slopes away from their defaults."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
            with torch.no_grad():
                if module.affine:
                    module.weight.uniform_(0.5, 2)
    return net


def network(name: str) -> nn.Module:
    """A float64 network with batch statistics and slopes away from their defaults."""
    torch.manual_seed(3)
    return with_statistics(NETWORKS[name]().double())


def some_data(samples: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def rows(inputs: Tensor, targets: Tensor, *sizes: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True))


def products(op: estimators.Operator) -> Tensor:
    """The matrix from products with one vector at a time."""
    return torch.stack([op @ column for column in torch.eye(op.size, dtype=op.dtype)], dim=1)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    error = float((actual.double() - expected).abs().max())
    assert error <= tolerance * max(1e-30, float(expected.abs().max())), f"off by {error:.2e}"


def not_traceable(*_: Any) -> Any:
    raise RuntimeError("recorded operations cannot be cut in two")


def mean_hessian(net: nn.Module, data: Any, **options: Any) -> MeanMatrix:
    return MeanMatrix(hessian_product, Context(net, data, ordered=False, **options))
