"""Small networks, fitted in seconds, on which the tools count how often intervals hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def fitted(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor, rate: float) -> nn.Module:
    """A network after 400 steps of Adam on batches of 64, in eval mode; the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = make()
        optimiser = torch.optim.Adam(net.parameters(), rate)
        for _ in range(400):
            chosen = torch.randint(0, len(inputs), (64,))
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen]).backward()
            optimiser.step()
    return net.eval()
