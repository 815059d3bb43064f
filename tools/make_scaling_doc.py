"""Measures how time and memory grow, and writes the table into docs/scaling.md between its two marks."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # growth, not speed: one thread is the quietest
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor, nn

import spiritlevel as sl

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def network(width: int = 128, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def data(samples: int = 1024, classes: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 64), torch.randint(0, classes, (samples,))


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def seconds(work: Callable[[], object], repeat: int = 3) -> float:
    """CPU seconds of the quickest of a few runs, so that other programs do not count."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def product(net: nn.Module, pair: tuple[Tensor, Tensor], memory: int | None = None) -> Callable[[], object]:
    op = sl.hessian(net, pair, memory=memory, batch_size=512)
    vector = torch.ones(op.size)
    op @ vector  # the first product traces
    return lambda: op @ vector


def lanczos(net: nn.Module, pair: tuple[Tensor, Tensor], matvecs: int) -> Callable[[], object]:
    op = sl.hessian(net, pair)
    return lambda: sl.spectral_density(op, probes=2, steps=matvecs)


Row = tuple[str, str, list[int], Callable[[int], float], float]
"""What is measured, what grows, its values, the cost at a value, and the expected power."""

SAMPLES, CLASSES, WIDTHS = [1024, 2048, 4096, 8192], [16, 32, 64, 128], [128, 256, 512, 1024]

TIMES: list[Row] = [
    (
        "`sample_traces`, exact",
        "samples N",
        SAMPLES,
        lambda n: seconds(lambda: sl.sample_traces(network(), data(n))),
        1,
    ),
    (
        "`sample_traces`, exact",
        "classes C",
        CLASSES,
        lambda c: seconds(lambda: sl.sample_traces(network(classes=c), data(512, c))),
        1,
    ),
    (
        "`sample_traces`, `passes=3`",
        "classes C",
        [2_000, 4_000, 8_000, 16_000],
        lambda c: seconds(lambda: sl.sample_traces(network(16, c), data(256, c), passes=3), 2),
        1,
    ),
    (
        "`sample_traces`, exact",
        "width (P grows as its square)",
        WIDTHS,
        lambda w: seconds(lambda: sl.sample_traces(network(w), data(512)), 2),
        2,
    ),
    ("`margins`", "samples N", [n * 8 for n in SAMPLES], lambda n: seconds(lambda: sl.margins(network(), data(n))), 1),
    ("`hessian @ v`, replayed", "samples N", SAMPLES, lambda n: seconds(product(network(), data(n))), 1),
    ("`hessian @ v`, recomputed", "samples N", SAMPLES, lambda n: seconds(product(network(), data(n), 1), 2), 1),
    (
        "`hessian @ v`, replayed",
        "width (P grows as its square)",
        WIDTHS,
        lambda w: seconds(product(network(w), data(512))),
        2,
    ),
    (
        "Lanczos, two probes",
        "steps m (products, and m² P to re-orthogonalise)",
        [10, 20, 40, 80],
        lambda m: seconds(lanczos(network(256), data(64), m), 1),
        1,
    ),
]

PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from make_scaling_doc import data, lanczos, network
from spiritlevel.memory import peak_memory
lanczos(network(), data(64), 4)()
before = peak_memory()
lanczos(network(1024), data(64), int(sys.argv[2]))()
print(peak_memory() - before)
"""


def peak(steps: int) -> float:
    """The most bytes that a process takes, beyond what it took for a small run."""
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parent), str(steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


MEMORY: list[Row] = [("Lanczos, two probes", "steps m (m vectors of P floats)", [16, 64], peak, 1)]


def power(values: list[int], costs: list[float]) -> float:
    """The slope of a straight line through the logarithms."""
    xs, ys = [math.log(value) for value in values], [math.log(max(cost, 1e-9)) for cost in costs]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def lines() -> list[str]:
    found = [
        "| what | grows with | values | cost | expected power | measured power |",
        "|---|---|---|---|---|---|",
    ]
    for rows, unit, scale in ((TIMES, "ms", 1e3), (MEMORY, "MB", 1e-6)):
        for what, grows, values, cost, expected in rows:
            costs = [cost(value) for value in values]
            shown = ", ".join(f"{value:,}" for value in values), ", ".join(f"{cost * scale:.3g}" for cost in costs)
            slope = power(values, costs)
            found.append(f"| {what} | {grows} | {shown[0]} | {shown[1]} {unit} | {expected:g} | {slope:.2f} |")
            print(found[-1], flush=True)
    vector = torch.ones(size(network(1024)))
    found += [
        "",
        f"CPU time of one thread, the best of a few runs, and peak memory above a warm process; torch "
        f"{torch.__version__.split('+')[0]}, Python {platform.python_version()}, {platform.machine()}. The network: "
        "three dense layers, 64 inputs, width 128 unless varied "
        f"(P = {size(network()):,}; {len(vector):,} at width 1,024).",
    ]
    return found


def main() -> None:
    start = time.monotonic()
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines()) + f"\n{END}{after}", encoding="utf-8")
    print(f"{PAGE.name} written in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
