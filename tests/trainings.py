"""A small job, a small network that is hard to resume, and its data: what the tests of training share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spiritlevel.papers.training import Job, Recipe

SMALL = Job(
    network="mlp",
    options={"width": 0.1},
    data="digits",
    train_size=200,
    validation=50,
    recipe=Recipe(lr=0.3, momentum=0.9, weight_decay=1e-3, batch_size=64, epochs=6),
    keep=(0, 5),
)


def images(count: int = 50, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, 2, size, size, generator=generator)
    return inputs, torch.randint(3, (count,), generator=generator)


def network() -> nn.Module:
    """Small, with all that makes resuming hard: batch statistics and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * 36, 3),
        )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
