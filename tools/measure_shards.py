"""Measures the memory that calls on a sharded model take per parameter, and writes the table into docs/scaling.md.

Two Gloo processes on this machine, `fully_shard` on every layer; the slope between two sizes of the model leaves out
what does not grow with it (activations, libraries).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import spiritlevel as sl
from spiritlevel.memory import peak_memory

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- shards: begin -->", "<!-- shards: end -->"
RANKS, LAYERS = 2, 16
WIDTHS = (512, 1024)


def held() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def calls(net: nn.Module, data: Any) -> dict[str, Callable[[], object]]:
    names = ["average_sharpness", "adaptive_sharpness_average"]

    def critical() -> object:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

        def closure() -> torch.Tensor:
            return nn.functional.cross_entropy(net(data[0]), data[1])

        closure().backward()
        found = sl.critical_sharpness(closure, optimizer)
        optimizer.zero_grad()
        return found

    op: list[Any] = []

    def product() -> object:
        op[:] = [sl.hessian(net, data)]
        return op[0] @ torch.ones(op[0].space.length)

    return {
        "`margins`": lambda: sl.margins(net, data),
        "`measure`: loss, average and adaptive sharpness": lambda: sl.measure(net, data, measures=names, parts=[]),
        "`critical_sharpness`, SGD": critical,
        "`hessian`, one product": product,
        "`operator_trace`": lambda: sl.operator_trace(op[0], probes=2),
        "`eigenvalues(basis=8)`": lambda: sl.eigenvalues(op[0], basis=8, max_matvecs=12, vectors=False),
    }


def worker(rank: int, width: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    torch.manual_seed(1)
    data = torch.randn(8, width), torch.randint(0, 10, (8,))
    sl.margins(net, data)  # what libraries do on their first call
    found = {}
    for name, work in calls(net, data).items():
        forget_peak()
        before = held()
        work()
        found[name] = peak_memory() - before
    if rank == 0:
        sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


def measured(width: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(width), f"{folder}/store"], stdout=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        said = [worker.communicate()[0] for worker in workers]
    found: dict[str, int] = json.loads(said[0])
    return found


def table() -> str:
    small, large = (measured(width) for width in WIDTHS)
    here = [LAYERS * width**2 / RANKS for width in WIDTHS]  # parameters that a rank holds
    rows = ["| call | bytes per parameter that a rank holds, beside the model's own 4 |", "|---|---|"]
    rows += [f"| {name} | {(large[name] - small[name]) / (here[1] - here[0]):.1f} |" for name in large]
    sizes = " and ".join(f"{LAYERS * width**2:,}" for width in WIDTHS)
    return "\n".join(
        [
            *rows,
            "",
            f"Peak memory of a process above what it held before the call, the slope between models of {sizes} "
            f"parameters in {LAYERS} equal layers, float32, {RANKS} Gloo processes on CPUs, torch {torch.__version__}. "
            "One gathered layer, a sixteenth of the model here, is part of it.",
        ]
    )


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, rest = text.split(BEGIN)
    PAGE.write_text(f"{start}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 1 else main()
