"""A million samples through `measure`: time and memory per sample, against a tenth as many.

`python benchmarks/large.py` runs it alone, in a few minutes; each size in a process of its own, whose peak is taken.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import FULL, Row, Scale, at_most, print_peak
from torch import nn

import spiritlevel as sl

MEMORY = "200MB"  # what a measurement may take besides its results: recorded products would fill half of the machine
FEATURES, LONGER, BYTES = (
    10,
    1.25,
    512,
)  # the bars: time per sample, and bytes per sample, of which the report keeps 120


def measured(samples: int) -> None:
    """Measure this many samples with the default measures, and print the processor time and the peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(samples, FEATURES)
    targets = net(inputs).argmax(1)
    begin = time.process_time()
    found = sl.measure(net, (inputs, targets), memory=MEMORY)
    assert found.fits["train"].samples == samples
    print(time.process_time() - begin)
    print_peak()


def _of(samples: int) -> tuple[float, float]:
    """Seconds, and bytes of the peak, of a fresh process."""
    command = [sys.executable, str(Path(__file__)), str(samples)]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(words[0]), float(words[1]) * 2**20


def large(scale: Scale) -> list[Row]:
    few, many = (100_000, 1_000_000) if scale is FULL else (20_000, 40_000)
    (short, low), (long, high) = _of(few), _of(many)
    data = 4 * FEATURES + 8
    growth, room = long / short * few / many, (high - low) / (many - few) - data
    area, sizes = "a million samples of 10 features", f"{many:,} / {few:,} samples"
    note = f"{long:.0f} s of one thread, peak {high / 2**20:,.0f} MB; memory={MEMORY!r}"
    return [
        at_most(area, f"`measure`, all by default: time per sample, {sizes}", (growth, growth), LONGER, note),
        at_most(area, f"`measure`: bytes per further sample, beyond the data, {sizes}", (room, room), BYTES),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measured(int(sys.argv[1]))
        sys.exit(0)
    for row in (found := large(FULL)):
        print(row)
    sys.exit(0 if all(row.met is not False for row in found) else 1)
