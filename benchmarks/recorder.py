"""What watching a training costs: the recorder and critical sharpness, as shares of the training's own time.

Both sides are timed in one loop of one process, in processor time, so that other work on the machine hardly matters.
`python benchmarks/recorder.py` runs it alone.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from harness import FULL, Row, Scale, alone, at_most, dense_net, images, small_resnet
from torch import nn
from torch.nn import functional as F

import spiritlevel as sl

SHARE, BYTES, BATCH = 0.01, 16.0, 128
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LeNet-5": sl.models.lenet5,
    "784-100-10": lambda: dense_net(784, 100, 10),
    "ResNet-8": small_resnet,
}


def recorded(make: Callable[[], nn.Module], samples: int, epochs: int) -> tuple[float, float, float, float]:
    """Processor time of `record` over that of the steps (all calls, median of epochs); bytes a visit; a yardstick.

    The yardstick is the same share of one call of PyTorch's cross entropy on the same logits, which gives one of the
    three numbers that are recorded: where that alone is above the bar, no recorder can be below it.
    """
    _, inputs, targets = images(samples)
    torch.manual_seed(0)
    model = make()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    recorder, shares = sl.Recorder(samples), []
    trained = watched = least = 0.0
    for epoch in range(epochs + 1):
        steps = calls = loss = 0.0
        for ids in torch.randperm(samples).split(BATCH):
            begin = time.process_time()
            optimiser.zero_grad()
            x, y = inputs[ids], targets[ids]
            logits = model(x)
            F.cross_entropy(logits, y).backward()
            optimiser.step()
            middle = time.process_time()
            recorder.record(logits, y, ids)
            after = time.process_time()
            with torch.no_grad():
                F.cross_entropy(logits, y, reduction="none")
            loss += time.process_time() - after
            calls += after - middle
            steps += middle - begin
        begin = time.process_time()
        recorder.state_dict()  # all that waits is looked at
        calls += time.process_time() - begin
        if epoch:  # the first warms up
            trained, watched, least = trained + steps, watched + calls, least + loss
            shares.append(calls / steps)
    size = recorder.nbytes / samples / (epochs + 1)
    return watched / trained, statistics.median(shares), size, least / trained


def critical(samples: int, looks: int) -> tuple[float, float]:
    """Processor time of a look with a warm start over that of a step of the training, and the median over looks."""
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


def recorder(scale: Scale) -> list[Row]:
    """One row a network for the share of the time, one for the bytes, one for critical sharpness."""
    full = scale is FULL
    samples, epochs = (scale.points, 3) if full else (1024, 2)
    rows = []
    for name, make in NETWORKS.items() if full else [next(iter(NETWORKS.items()))]:
        share, median, size, least = recorded(make, samples, epochs)
        what = f"Recorder / training step, {name}, batches of {BATCH}"
        note = f"processor time; one call of cross_entropy takes {least:.1%}"
        rows.append(at_most("recorder", what, (share, median), SHARE, note))
    rows.append(at_most("recorder", "bytes a sample and epoch", (size, size), BYTES))
    what = "critical sharpness with a warm start / training step, LeNet-5"
    rows.append(alone("critical sharpness", what, critical(samples, 30 if full else 4), "at most 6 forward passes"))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in (found := recorder(FULL)):
        print(row)
    sys.exit(0 if all(row.met is not False for row in found) else 1)
