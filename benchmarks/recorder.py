"""What watching a training run costs: recorder, critical sharpness and tracker, as shares of the run's own time.

Both sides are timed in one loop of one process, in processor time, so that other work on the machine hardly matters.
`python benchmarks/recorder.py` runs it alone.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from harness import FULL, Row, Scale, alone, at_most, dense_net, images, small_resnet
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl

SHARE, BYTES, BATCH = 0.01, 16.0, 128
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-5": sl.models.lenet5,
    "784-100-10": lambda: dense_net(784, 100, 10),
    "ResNet-8": small_resnet,
}
ROUNDS = {"LeNet-5": 12, "784-100-10": 60, "ResNet-8": 3}


class Watched(NamedTuple):
    """What one way of watching adds to a training run, as shares of its processor time, one per round."""

    calls: list[float]
    """The time in the calls themselves."""
    steps: list[float]
    """How much longer steps with it are than without: this includes its effect on the caches, and more noise."""


def recorded(make: Callable[[], nn.Module], rounds: int, calls: int = 64) -> tuple[dict[str, Watched], float]:
    """What each way of watching costs, and the seconds of a step without any.

    A round trains `calls` steps with each, in turns of eight steps, so that other work on the machine slows all alike.
    64 calls fill the recorder's buffer, so that each round includes one pass over all that was waiting. Beside it, to
    show what could be achieved: copies of logits, targets and ids alone, and one call of PyTorch's cross entropy, which
    gives one of the three numbers that are recorded.
    """
    _, inputs, targets = images(8192)
    torch.manual_seed(0)
    model = make()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    recorder = sl.Recorder(len(inputs))
    kept: deque[tuple[Tensor, ...]] = deque(maxlen=calls)

    def copies(logits: Tensor, y: Tensor, ids: Tensor) -> None:
        kept.append((logits.detach().clone(), y.clone(), ids.clone()))

    def cross_entropy(logits: Tensor, y: Tensor, ids: Tensor) -> None:
        with torch.no_grad():
            F.cross_entropy(logits, y, reduction="none")

    ways: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
        "nothing": lambda logits, y, ids: None,
        "recorder": recorder.record,
        "copies": copies,
        "cross entropy": cross_entropy,
    }
    batches = (ids for _ in itertools.count() for ids in torch.randperm(len(inputs)).split(BATCH))
    found, lengths = {name: Watched([], []) for name in ways}, []
    for turn in range(rounds + 1):
        spent, called = (dict.fromkeys(ways, 0.0) for _ in range(2))
        for block in range(calls // 8):
            for name in list(ways)[:: 1 if block % 2 else -1]:
                begin = time.process_time()
                for ids in itertools.islice(batches, 8):
                    optimiser.zero_grad()
                    x, y = inputs[ids], targets[ids]
                    logits = model(x)
                    F.cross_entropy(logits, y).backward()
                    optimiser.step()
                    before = time.process_time()
                    ways[name](logits, y, ids)
                    called[name] += time.process_time() - before
                spent[name] += time.process_time() - begin
        if turn:  # the first warms up
            lengths.append(spent["nothing"] / calls)
            for name, watched in found.items():
                watched.calls.append((called[name] - called["nothing"]) / (spent[name] - called[name]))
                watched.steps.append(spent[name] / spent["nothing"] - 1)
    return found, statistics.median(lengths)


def bytes_a_visit(samples: int, epochs: int) -> float:
    """Bytes of the record per sample and epoch."""
    recorder = sl.Recorder(samples)
    for _ in range(epochs):
        for ids in torch.randperm(samples).split(BATCH):
            recorder.record(torch.randn(len(ids), 10), ids % 10, ids)
    return recorder.nbytes / samples / epochs


def critical(samples: int, looks: int) -> tuple[float, float]:
    """Processor time of a look with a warm start over that of a training step, and the median over looks."""
    _, inputs, targets = images(samples)
    torch.manual_seed(0)
    model = sl.models.lenet5()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps, spent, last = [], [], None
    for ids in itertools.islice(itertools.cycle(torch.randperm(samples).split(BATCH)), looks):
        begin = time.process_time()
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[ids]), targets[ids]).backward()
        middle = time.process_time()

        def closure(ids: torch.Tensor = ids) -> torch.Tensor:
            return F.cross_entropy(model(inputs[ids]), targets[ids])

        last = sl.critical_sharpness(closure, optimiser, start=last)
        spent.append(time.process_time() - middle)
        after = time.process_time()
        optimiser.step()
        steps.append(middle - begin + time.process_time() - after)
    pairs = zip(spent[1:], steps[1:], strict=True)
    return sum(spent[1:]) / sum(steps[1:]), statistics.median(a / b for a, b in pairs)


def tracked(samples: int, steps: int, share: float) -> tuple[float, int]:
    """Processor time that a tracker with this share adds to that of training LeNet-5, and how often it measured."""
    _, inputs, targets = images(samples)
    torch.manual_seed(0)
    model = sl.models.lenet5()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    tracker = sl.Tracker(model, (inputs, targets), every=20, optimizer=optimiser, share=share)
    trained = watched = 0.0
    for ids in itertools.islice(itertools.cycle(torch.randperm(samples).split(BATCH)), steps):
        begin = time.process_time()
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[ids]), targets[ids]).backward()
        optimiser.step()
        middle = time.process_time()
        tracker.step()
        watched += time.process_time() - middle
        trained += middle - begin
    return watched / trained, len(tracker.rows)


def recorder(scale: Scale) -> list[Row]:
    """One row per network for the share of the time, one for the bytes, one each for critical sharpness and tracker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other would take processor time, too
    try:
        return _rows(scale)
    finally:
        torch.set_num_threads(threads)


def _rows(scale: Scale) -> list[Row]:
    full = scale is FULL
    rows = []
    for name, make in NETWORKS.items() if full else [next(iter(NETWORKS.items()))]:
        found, step = recorded(make, ROUNDS[name] if full else 2, 64 if full else 8)
        share = {way: statistics.median(watched.calls) for way, watched in found.items()}
        low, middle, high = statistics.quantiles(found["recorder"].steps, n=4)
        note = (
            f"processor time of one thread; {1e6 * step * share['recorder']:.0f} µs per batch; copies alone "
            f"{share['copies']:.2%}, one call of cross_entropy {share['cross entropy']:.2%}; steps with it are longer "
            f"by {middle:.2%} (quartiles {low:.2%}, {high:.2%})"
        )
        what = f"Recorder / training step, {name}, batches of {BATCH}"
        pair = statistics.mean(found["recorder"].calls), share["recorder"]
        rows.append(at_most("recorder", what, pair, SHARE, note))
    size = bytes_a_visit(scale.points if full else 1024, 2)
    rows.append(at_most("recorder", "bytes per sample and epoch, after two epochs", (size, size), BYTES))
    what = "critical sharpness with a warm start / training step, LeNet-5"
    samples = scale.points if full else 1024
    rows.append(alone("critical sharpness", what, critical(samples, 30 if full else 4), "at most 6 forward passes"))
    if full:
        added, looks = tracked(samples, 2000, 0.05)
        note = f"five quantities, looks in 2,000 steps: {looks}; share=0.05"
        rows.append(at_most("tracker", "Tracker / training, LeNet-5", (added, added), 0.05, note))
    return rows


if __name__ == "__main__":
    for row in (found := recorder(FULL)):
        print(row)
    sys.exit(0 if all(row.met is not False for row in found) else 1)
