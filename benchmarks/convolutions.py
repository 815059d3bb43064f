"""Exact per-sample traces of convolution nets in forward passes: ResNet-18 on images of CIFAR's size, beside BackPACK.

Processor time on one thread, against a forward pass under `no_grad` of the same batch in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from harness import FULL, Row, Scale, alone, at_most
from probes import processor_time, resnet18
from torch import Tensor, nn

import spiritlevel as sl


def _images(count: int, classes: int) -> tuple[Tensor, Tensor]:
    """CIFAR-10 where it is available, else noise: what a trace costs does not depend on it."""
    try:
        inputs, targets = sl.data.load("cifar10").test
        inputs, targets = inputs[:count], targets[:count]
    except sl.InputError:
        inputs, targets = torch.randn(count, 3, 32, 32), torch.arange(count)
    return inputs, targets % classes


def _forward(model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            model(inputs)

    return forward


def ratio(function: Callable[[], Any], forward: Callable[[], None], rounds: int) -> tuple[float, float]:
    """A function's processor time in forward passes, timed before and after it: best and median."""
    ratios = []
    for _ in range(rounds):
        before = min(processor_time(forward) for _ in range(3))
        spent = processor_time(function)
        ratios.append(spent / min(before, *(processor_time(forward) for _ in range(3))))
    return min(ratios), statistics.median(ratios)


def _multiply_adds(model: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """Per sample: in the convolutions of a forward pass, and in the products behind the norms of 9 backward passes."""
    through, norms = 0.0, 0.0

    def count(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal through, norms
        assert isinstance(module, nn.Conv2d)
        fan_in, positions, channels = module.weight[0].numel(), output[0, 0].numel(), output.shape[1]
        direct = fan_in * positions * channels
        places = given[0].shape[1] * (given[0].shape[2] + 2 * int(module.padding[0])) ** 4
        gram = min(places, fan_in * positions**2) + 9 * channels * positions**2
        through, norms = through + direct, norms + min(9 * direct, 2 * gram)  # in float64, at half the rate

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, nn.Conv2d)]
    _forward(model, inputs[:1])()
    for hook in hooks:
        hook.remove()
    return through, norms


def against_backpack(area: str, scale: Scale, rounds: int) -> Row:
    """BackPACK takes plain sequences of layers: three convolutions and a linear layer on the same images."""
    what = "BackPACK BatchDiagGGNExact / ours, processor time"
    try:
        from backpack import backpack, extend
        from backpack.extensions import BatchDiagGGNExact
    except ImportError:
        return Row(area, what, None, note="BackPACK is not installed")
    torch.manual_seed(0)
    width = 32 if scale is FULL else 4
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(2 * width, 10))
    inputs, targets = _images(32 if scale is FULL else 4, 10)
    extended, loss = extend(model), extend(nn.CrossEntropyLoss(reduction="sum"))
    found: list[Tensor] = []

    def theirs() -> None:
        extended.zero_grad()
        with backpack(BatchDiagGGNExact()):
            loss(extended(inputs), targets).backward()
        found[:] = [sum(p.diag_ggn_exact_batch.flatten(1).sum(1) for p in extended.parameters())]  # type: ignore[list-item]

    plain = nn.Sequential(*[type(m)() if isinstance(m, nn.ReLU) else m for m in model])
    ours = sl.sample_traces(plain, (inputs, targets))
    theirs()
    error = float(((found[0].double() - ours.values) / ours.values).abs().median())
    pairs = [
        (processor_time(theirs), processor_time(lambda: sl.sample_traces(plain, (inputs, targets))))
        for _ in range(max(2, rounds))
    ]
    value = min(a for a, _ in pairs) / min(b for _, b in pairs)
    middle = statistics.median(a / b for a, b in pairs)
    return alone(area, what, (value, middle), f"three convolutions in sequence; same values to {error:.1e} (median)")


def convolutions(scale: Scale) -> list[Row]:
    full = scale is FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples, rounds = 64 if full else 4, 2 if full else 1
    area, rows = "exact traces, ResNet-18", []
    try:
        model = resnet18(64 if full else 4, nn.ReLU).eval()
        data = _images(samples, 10)
        forward = _forward(model, data[0])
        sl.sample_traces(model, (data[0][:2], data[1][:2]))  # what is loaded at the first call
        through, norms = _multiply_adds(model, data[0])
        least = f"multiply-adds without tiles: 1 forward + 9 backward + {norms / through:.1f} for the norms"
        size = sum(parameter.numel() for parameter in model.parameters())
        note = f"{size / 1e6:.1f} M parameters, 10 classes, {samples} images; {least}"
        exact = ratio(lambda: sl.sample_traces(model, data), forward, rounds)
        rows.append(at_most(area, "10 classes, exact / forward pass", exact, 12, note))
        few = ratio(lambda: sl.sample_traces(model, data, passes=2), forward, rounds)
        rows.append(at_most(area, "10 classes, passes=2 / forward pass", few, 5))
        one = data[0][:5], data[1][:5]
        setup = ratio(lambda: sl.sample_traces(model, one, passes=0), forward, rounds)
        # a call on five samples is all set-up but for their own share
        share = max(0.0, 5 / samples * (few[0] - setup[0]) / (1 - 5 / samples))
        values = tuple(max(0.0, each - share) * samples / 256 for each in setup)
        rows.append(at_most(area, "set-up / forward pass of 256 images", (values[0], values[1]), 0.5))
        many = resnet18(64 if full else 4, nn.ReLU, 100).eval()
        hundred = _images(samples, 100)
        sl.sample_traces(many, (hundred[0][:2], hundred[1][:2]), passes=2)
        pair = ratio(lambda: sl.sample_traces(many, hundred, passes=2), _forward(many, hundred[0]), rounds)
        rows.append(at_most(area, "100 classes, passes=2 / forward pass", pair, 6))
        rows.append(against_backpack("exact traces, convolutions", scale, rounds))
    finally:
        torch.set_num_threads(threads)
    return rows
