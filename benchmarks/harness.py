"""What all benchmarks share: rows, timing in turns, peak memory, and the data and networks they measure."""

from __future__ import annotations

import functools
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.memory import peak_memory


@dataclass(frozen=True)
class Row:
    """One ratio and its bar; `median` over the rounds tells how steady it is."""

    area: str
    what: str
    value: float | None
    median: float | None = None
    bar: str = ""
    met: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """How much work a run does."""

    points: int  # samples for most rows
    whole: int  # samples for the whole-set rows
    rounds: int
    peer_points: int
    pyhessian_points: int


SMOKE = Scale(points=256, whole=512, rounds=1, peer_points=32, pyhessian_points=1)
FULL = Scale(points=6000, whole=60_000, rounds=3, peer_points=256, pyhessian_points=20)


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def take_turns(rounds: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Times of each function, one turn each per round, after one turn to warm up."""
    for function in functions:
        function()
    table = [[timed(function) for function in functions] for _ in range(rounds)]
    return [list(column) for column in zip(*table, strict=True)]


def ratio(ours: list[float], theirs: list[float], scale: float = 1.0) -> tuple[float, float]:
    """Best over best, and the median of the rounds' own ratios."""
    each = [a / b * scale for a, b in zip(ours, theirs, strict=True)]
    return min(ours) / min(theirs) * scale, statistics.median(each)


def at_most(area: str, what: str, pair: tuple[float, float], bar: float, note: str = "") -> Row:
    return Row(area, what, pair[0], pair[1], f"≤ {bar:g}", pair[0] <= bar, note)


def at_least(area: str, what: str, pair: tuple[float, float], bar: float, note: str = "") -> Row:
    return Row(area, what, pair[0], pair[1], f"≥ {bar:g}", pair[0] >= bar, note)


def alone(area: str, what: str, pair: tuple[float, float], note: str = "") -> Row:
    """A row without a bar."""
    return Row(area, what, *pair, note=note)


@functools.cache
def _loaded() -> tuple[str, Tensor, Tensor]:
    try:
        found = sl.data.load("mnist")
    except sl.InputError:
        found = sl.data.load("fashion-mini")
    return found.name, *found.train


def images(count: int) -> tuple[str, Tensor, Tensor]:
    """MNIST, or the built-in images repeated where MNIST is not available."""
    name, inputs, targets = _loaded()
    times = -(-count // len(inputs))
    return name, inputs.repeat(times, 1, 1, 1)[:count], targets.repeat(times)[:count]


def trained(model: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> nn.Module:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (128,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimiser.step()
    return model.eval()


def trained_lenet(inputs: Tensor, targets: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    return trained(sl.models.lenet5(), inputs, targets, steps)


def dense_net(*widths: int) -> nn.Module:
    """A ReLU network of these widths for images, the input's first."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def small_resnet(channels: int = 1, classes: int = 10, width: int = 16) -> nn.Module:
    """ResNet-8: a convolution, three residual blocks of 16, 32 and 64 channels, an average; 77,850 parameters."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        shortcut: nn.Module = nn.Identity()
        if stride > 1:
            shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        layers += [sl.models.Residual(body, shortcut), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def forward(model: nn.Module, inputs: Tensor, size: int = 512) -> None:
    with torch.no_grad():
        for start in range(0, len(inputs), size):
            model(inputs[start : start + size])


def peak_of(script: str, *arguments: object) -> float:
    """Peak memory in MB of a fresh process that runs a benchmark script, which must end in `print_peak()`."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak() -> None:
    print(peak_memory() / 2**20)
