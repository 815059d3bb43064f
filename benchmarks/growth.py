"""How the cost grows with samples, parameters and classes, and how long the command takes to start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import FULL, Row, Scale, alone, dense_net, forward, images, ratio, take_turns
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl


def growth(scale: Scale) -> list[Row]:
    rows = [*samples(scale), *parameters(scale), *classes(scale)]
    return [*rows, *start_up(scale.rounds)] if scale is FULL else rows


def samples(scale: Scale) -> list[Row]:
    """Time per sample against that of the smallest set, so that 1 is linear growth."""
    sizes = (1000, 10_000, 60_000) if scale is FULL else (100, 200)
    _, inputs, targets = images(sizes[-1])
    model = sl.models.lenet5().eval()

    def measured(function: Callable[[tuple[Tensor, Tensor]], Any]) -> list[list[float]]:
        jobs = [lambda size=size: function((inputs[:size], targets[:size])) for size in sizes]
        return take_turns(1, *jobs)

    def product(batch: tuple[Tensor, Tensor]) -> None:
        operator = sl.hessian(model, batch)
        operator @ torch.ones(operator.size)

    rows = []
    for what, function in (
        ("per-sample traces", lambda batch: sl.sample_traces(model, batch)),
        ("first Hessian product", product),
    ):
        times = measured(function)
        for size, time in zip(sizes[1:], times[1:], strict=True):
            pair = ratio(time, times[0], sizes[0] / size)
            label = f"{what}: time per sample, {size:,} / {sizes[0]:,} samples"
            rows.append(alone("growth with samples, LeNet-5", label, pair, f"{min(time):.2g} s"))
    return rows


def parameters(scale: Scale) -> list[Row]:
    """A replayed product against a gradient, from 10⁴ to 3.6·10⁷ parameters."""
    _, inputs, targets = images(500 if scale is FULL else 50)
    batch = inputs, targets
    nets: list[tuple[str, nn.Module, tuple[Tensor, Tensor]]] = [
        ("softmax regression", sl.models.softmax_regression(), batch),
        ("LeNet-5", sl.models.lenet5(), batch),
        ("MLP 784-512-512-512-10", dense_net(784, 512, 512, 512, 10), batch),
    ]
    if scale is FULL:
        colour = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        nets.append(("WideResNet-28×10, 4 samples", sl.models.wide_resnet_28_10(), (colour, torch.arange(4))))
    rows = []
    for name, model, (x, y) in nets:
        model.eval()
        leaves = list(model.parameters())
        operator = sl.hessian(model, (x, y))
        vector = torch.ones(operator.size)

        def gradient(model: nn.Module = model, x: Tensor = x, y: Tensor = y, leaves: Any = leaves) -> None:
            torch.autograd.grad(F.cross_entropy(model(x), y), leaves)

        plain, ours = take_turns(scale.rounds, gradient, lambda operator=operator, vector=vector: operator @ vector)
        what = f"Hessian product / gradient, {operator.size:,} parameters"
        rows.append(alone("growth with parameters", what, ratio(ours, plain), name))
    return rows


def classes(scale: Scale) -> list[Row]:
    _, inputs, _ = images(256 if scale is FULL else 32)
    rows = []
    for count in (10, 100, 1000) if scale is FULL else (10, 20):
        model = dense_net(784, 256, 256, count).eval()
        batch = inputs, torch.arange(len(inputs)) % count
        exact, sampled, plain = take_turns(
            scale.rounds,
            lambda model=model, batch=batch: sl.sample_traces(model, batch),
            lambda model=model, batch=batch: sl.sample_traces(model, batch, passes=2),
            lambda model=model: forward(model, inputs),
        )
        for how, times in (("exact", exact), ("passes=2", sampled)):
            what = f"per-sample traces, {how} / forward pass, {count:,} classes"
            rows.append(alone("growth with classes, MLP 784-256-256", what, ratio(times, plain)))
    return rows


def start_up(rounds: int) -> list[Row]:
    def run(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    torch_alone, library, command = take_turns(
        rounds,
        run("-c", "import torch"),
        run("-c", "import spiritlevel"),
        run("-m", "spiritlevel", "--help"),
    )
    area, note = "start", f"import torch: {min(torch_alone):.2g} s"
    return [
        alone(area, "import spiritlevel / import torch", ratio(library, torch_alone), note),
        alone(area, "spiritlevel --help / import torch", ratio(command, torch_alone), note),
    ]
