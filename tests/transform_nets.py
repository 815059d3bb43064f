"""Small networks for the tests of transforms, and the naive twins they share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import naive
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.papers import networks as models
from spiritlevel.transforms import (
    scaling_groups,
)

BATCH_NORM = nn.BatchNorm1d | nn.BatchNorm2d


def outputs(model: nn.Module, x: Tensor, batch_statistics: bool = False) -> Tensor:
    """The outputs of a copy in eval mode, or with the statistics of the batch."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if batch_statistics and isinstance(module, BATCH_NORM):
            module.train()
    with torch.no_grad():
        return model(x)


def apart(first: Tensor, second: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    return float((first - second).abs().max() / second.abs().max().clamp(min=1e-300))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def cross_entropy(phi: Tensor, y: Tensor) -> Tensor:
    """log(1 + Σ_{j≠y} e^{φ_j − φ_y}): autodiff through it is right at any margin of a correct point."""
    others = 1 - F.one_hot(y, phi.shape[1]).double()
    return torch.log1p((others * torch.exp(phi - phi.gather(1, y[:, None]))).sum(1))


def loss_of(y: Tensor, alpha: float = 1.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy of α·φ, or squared error for targets that are no classes."""
    loss = naive.squared_error if y.is_floating_point() else cross_entropy
    return lambda phi, target: loss(alpha * phi, target)


def hessian(model: nn.Module, x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """The dense Hessian of the mean loss of α·φ in all parameters."""
    return naive.mean_hessian(model, x, y, loss_of(y, alpha))


def blocks(model: nn.Module) -> dict[str, slice]:
    ends, result = 0, {}
    for name, p in model.named_parameters():
        result[name] = slice(ends, ends := ends + p.numel())
    return result


def norms(matrix: Tensor) -> tuple[float, float, float]:
    """Trace, spectral norm, Frobenius norm."""
    return float(matrix.trace()), float(torch.linalg.matrix_norm(matrix, 2)), float(matrix.norm())


def mlp(*sizes: int, bias: bool = True, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), act()]
    return nn.Sequential(*layers[:-1]).double()


def with_statistics(model: nn.Module) -> nn.Module:
    """Random statistics and affine parts for every batch norm."""
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.3, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
    return model


class Joined(nn.Module):
    """Two convolutions side by side, one depthwise behind them, a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 2, 1)
        self.deep = nn.Conv2d(5, 10, 3, padding=1, groups=5)
        self.act = nn.PReLU(10)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([F.leaky_relu(self.left(x), 0.1), self.right(x).relu()], 1)
        deep = 0.5 * self.act(self.deep(F.max_pool2d(joined, 2)))
        return self.head(F.dropout(deep.mean((2, 3)), training=self.training))


def residual_net() -> nn.Sequential:
    body = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        models.Residual(body, nn.Identity()),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2, padding=1),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


SMALL: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(3, 4, 3, 2), torch.randn(6, 3)),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3, bias=False), nn.ReLU()).append(
            nn.Linear(3, 2)
        ),
        torch.randn(6, 3),
    ),
    "residual": lambda: (residual_net(), torch.randn(4, 2, 4, 4)),
    "joined": lambda: (Joined(), torch.randn(4, 2, 6, 6)),
}


def small_net(name: str) -> tuple[nn.Module, Tensor]:
    model, x = SMALL[name]()
    return with_statistics(model).double().eval(), x.double()


def all_factors(model: nn.Module, x: Tensor, *, per_channel: bool = False, seed: int = 0) -> dict[str, Any]:
    """Factors for all groups of a network at once."""
    generator, result = torch.Generator().manual_seed(seed), {}
    for group in scaling_groups(model, data=x):
        if per_channel and group.channels is None:
            continue
        beta = 0.3 + 3 * torch.rand((group.channels,) if per_channel else (), generator=generator, dtype=torch.float64)
        for name, factor in group.factors(beta if per_channel else float(beta)).items():
            result[name] = result.get(name, 1.0) * factor
    return result
