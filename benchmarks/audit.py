"""The audit of a fitted LeNet-5 on 1,000 images of MNIST: seconds for the default measures and for all of them.

`python benchmarks/audit.py` runs it alone, with the dearest measures and the cells that did not converge.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from harness import FULL, Row, Scale, images, trained_lenet

import spiritlevel as sl
from spiritlevel.results import Audit

BARS = {"default": 60.0, "all": 300.0}
_POINTS = 1000
_SILENT = ("not converged", "unstable")


class Clock:
    """A progress callback that adds up the seconds of every measure, over the network and all its transforms."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.name, self.since = "preparation", time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[self.name] += now - self.since
        self.name, self.since = what.split(" after ")[0], now

    def dearest(self, count: int) -> str:
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in ordered[:count])


def open_cells(audit: Audit) -> list[str]:
    """The cells that say nothing: not converged, or differences within their errors."""
    return [f"{row.measure} under {row.transform}: {row.verdict}" for row in audit.rows if row.verdict in _SILENT]


def audits(scale: Scale) -> list[Row]:
    """One row a set of measures. Wall-clock seconds count; processor seconds tell how busy the machine was."""
    full = scale is FULL
    name, inputs, targets = images(60_000 if full else _POINTS)
    model = trained_lenet(inputs, targets, steps=1500 if full else 20)
    data = (inputs[:_POINTS], targets[:_POINTS]) if full else (inputs[:100], targets[:100])
    rows = []
    for measures, bar in BARS.items() if full else [("default", BARS["default"])]:
        clock, start, busy = Clock(), time.perf_counter(), time.process_time()
        audit = sl.audit(model, data, measures=measures, progress=clock)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        silent = open_cells(audit)
        cells = f"{len(audit.rows)} cells, {len(silent)} of them open"
        what = f"audit of LeNet-5 on {len(data[1]):,} points of {name}, {measures} measures: seconds"
        note = f"{cells}; {busy:.0f} processor seconds; dearest: {clock.dearest(4)}"
        rows.append(Row("audit", what, seconds, None, f"≤ {bar:g}", seconds <= bar if full else None, note))
        if __name__ == "__main__":
            print(audit, *(f"open: {cell}" for cell in silent), rows[-1], sep="\n", flush=True)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(0 if all(row.met for row in audits(FULL)) else 1)
