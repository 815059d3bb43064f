"""Benchmarks: ratios against a forward pass, a gradient or a peer, measured in one run, interleaved.

`make bench` runs all of it in an environment that holds the peers; `python benchmarks/run.py --smoke` takes seconds and
needs none. Absolute times are noise, so every row is a ratio: best and median over several rounds, in which both sides
take turns. A row whose peer is not installed says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("pyhessian", "backpack-for-pytorch", "curvlinops-for-pytorch", "hessian-eigenthings")


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


def images(count: int) -> tuple[str, Tensor, Tensor]:
    """MNIST, or the built-in images repeated where MNIST cannot be had."""
    try:
        loaded = sl.data.load("mnist")
    except sl.InputError:
        loaded = sl.data.load("fashion-mini")
    inputs, targets = loaded.train
    times = -(-count // len(inputs))
    return loaded.name, inputs.repeat(times, 1, 1, 1)[:count], targets.repeat(times)[:count]


def trained_lenet(inputs: Tensor, targets: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = sl.models.lenet5()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (128,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimiser.step()
    return model.eval()


def forward(model: nn.Module, inputs: Tensor, size: int = 512) -> None:
    with torch.no_grad():
        for start in range(0, len(inputs), size):
            model(inputs[start : start + size])


# ---------------------------------------------------------------- per-sample traces


def per_sample(scale: Scale) -> list[Row]:
    area = "per-sample traces, LeNet-5"
    name, inputs, targets = images(scale.whole)
    model = trained_lenet(inputs, targets, 1500 if scale is FULL else 20)
    some = inputs[: scale.points], targets[: scale.points]
    rows = []

    best = min((256, 512, 1024), key=lambda size: min(timed(lambda: forward(model, some[0], size)) for _ in range(3)))
    exact, sampled, plain, margins = take_turns(
        scale.rounds,
        lambda: sl.sample_traces(model, some),
        lambda: sl.sample_traces(model, some, passes=2),
        lambda: forward(model, some[0], best),
        lambda: sl.margins(model, some),
    )
    rows.append(at_most(area, "exact / forward pass", ratio(exact, plain), 10, f"{name}, {scale.points} points"))
    rows.append(at_most(area, "passes=2 / forward pass", ratio(sampled, plain), 4))
    rows.append(at_most(area, "flatness / margins", ratio(exact, margins), 12, "the paper: 1.5 h / 5 s = 1080"))

    whole = inputs, targets
    start = time.perf_counter()
    values = sl.sample_traces(model, whole)
    seconds = time.perf_counter() - start
    rough = sl.sample_traces(model, whole, passes=2)
    start = time.perf_counter()
    sl.margins(model, whole)
    margin_seconds = time.perf_counter() - start
    note = f"{len(targets)} points: traces {seconds:.1f} s, margins {margin_seconds:.1f} s"
    rows.append(at_most(area, "whole set, flatness / margins", (seconds / margin_seconds,) * 2, 12, note))
    off = abs(rough.mean().value / values.mean().value - 1) * 100
    rows.append(at_most(area, "passes=2, error of the mean in %", (off, off), 1))
    r = float(torch.corrcoef(torch.stack([values.values, rough.values]))[0, 1])
    rows.append(at_least(area, "passes=2, r with the exact values", (r, r), 0.985))
    rows.append(against_backpack(area, model, some, scale))
    rows.append(against_pyhessian(area, model, some, scale))
    rows.append(memory_row(area, scale))
    return rows


def against_backpack(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> Row:
    what = "BackPACK BatchDiagGGNExact / ours"
    try:
        from backpack import backpack, extend
        from backpack.extensions import BatchDiagGGNExact
    except ImportError:
        return Row(area, what, None, bar="≥ 10", note="BackPACK is not installed")
    inputs, targets = batch[0][: scale.peer_points], batch[1][: scale.peer_points]
    layers = [module for module in model.modules() if not list(module.children())]
    sequential = extend(nn.Sequential(*layers))
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    found: list[Tensor] = []

    def theirs() -> None:
        found.clear()
        for start in range(0, len(targets), 32):
            part = slice(start, start + 32)
            sequential.zero_grad()
            with backpack(BatchDiagGGNExact()):
                loss(sequential(inputs[part]), targets[part]).backward()
            found.append(sum(p.diag_ggn_exact_batch.flatten(1).sum(1) for p in sequential.parameters()))

    ours_time, theirs_time = take_turns(scale.rounds, lambda: sl.sample_traces(model, (inputs, targets)), theirs)
    # a long call of ours, because a short one is mostly its fixed cost
    long = min(timed(lambda: sl.sample_traces(model, batch)) for _ in range(scale.rounds)) / len(batch[1])
    exact = sl.sample_traces(model, (inputs, targets)).values
    error = float(((torch.cat(found).double() - exact) / exact).abs().median())
    value = min(theirs_time) / len(targets) / long
    note = (
        f"same values to {error:.1e} (median); {min(theirs_time) / min(ours_time):.1f} for {len(targets)} points alone"
    )
    return at_least(area, what, (value, value), 10, note)


def against_pyhessian(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> Row:
    what = "PyHessian trace(), point by point / ours"
    try:
        from pyhessian import hessian
    except ImportError:
        return Row(area, what, None, bar="≥ 250", note="PyHessian is not installed")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(batch[1]), generator=generator)[: scale.pyhessian_points]
    exact = sl.sample_traces(model, (batch[0][chosen], batch[1][chosen])).values
    found = []
    start = time.perf_counter()
    for index in chosen.tolist():
        point = batch[0][index : index + 1], batch[1][index : index + 1]
        draws = hessian(model, nn.CrossEntropyLoss(), data=point, cuda=False).trace()
        found.append(sum(draws) / len(draws))
    theirs = (time.perf_counter() - start) / len(chosen)
    ours = min(timed(lambda: sl.sample_traces(model, batch)) for _ in range(scale.rounds)) / len(batch[1])
    error = float(((torch.tensor(found).double() - exact) / exact).abs().median()) * 100
    hours = theirs * 60_000 / 3600
    note = f"from {len(chosen)} points; median error {error:.0f} %; 60,000 points would take {hours:.1f} h"
    return at_least(area, what, (theirs / ours,) * 2, 250, note)


def memory_row(area: str, scale: Scale) -> Row:
    """Peak memory of a fresh process that measures a tenth or all of the points."""
    peaks = []
    for count in (scale.whole // 10, scale.whole):
        command = [sys.executable, __file__, "--peak-of", str(count), "--of", str(scale.whole)]
        peaks.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
    note = f"{peaks[0]:.0f} and {peaks[1]:.0f} MB"
    return at_most(area, "peak memory, all points / a tenth", (peaks[1] / peaks[0],) * 2, 1.2, note)


def print_peak(count: int, whole: int) -> None:
    _, inputs, targets = images(whole)
    sl.sample_traces(sl.models.lenet5(), (inputs[:count], targets[:count]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# ---------------------------------------------------------------- operators and spectra


def operators(scale: Scale) -> list[Row]:
    count = 2000 if scale is FULL else 200
    _, inputs, targets = images(count)
    torch.manual_seed(0)
    widths = (784, 512, 512, 512, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    mlp = nn.Sequential(*layers[:-1])
    rows = []
    for label, model, bar in (
        ("MLP 784-512-512-512-10", mlp, 1.9),
        ("LeNet-5", trained_lenet(inputs, targets, 200 if scale is FULL else 5), 1.3),
    ):
        rows += product_rows(label, model, (inputs, targets), bar, scale)
    return rows


def product_rows(label: str, model: nn.Module, batch: tuple[Tensor, Tensor], bar: float, scale: Scale) -> list[Row]:
    area = f"operators, {label}"
    inputs, targets = batch
    operator = sl.hessian(model, batch)
    vector = torch.randn(operator.size)
    parameters = list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(F.cross_entropy(model(inputs), targets), parameters)

    functions: list[Callable[[], Any]] = [gradient, lambda: operator @ vector]
    try:
        from curvlinops import HessianLinearOperator

        theirs = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [batch], check_deterministic=False)
        functions.append(lambda: theirs @ vector)
    except ImportError:
        theirs = None
    times = take_turns(scale.rounds, *functions)
    rows = [at_most(area, "Hessian product / gradient", ratio(times[1], times[0]), bar, f"{len(targets)} points")]
    if theirs is None:
        rows.append(Row(area, "curvlinops product / ours", None, bar="≥ 1.6", note="curvlinops is not installed"))
    else:
        error = float((theirs @ vector - operator @ vector).norm() / (operator @ vector).norm())
        pair = ratio(times[2], times[1])
        rows.append(at_least(area, "curvlinops product / ours", pair, 1.6, f"same product to {error:.1e}"))
    rows += [largest_eigenvalue(area, model, batch, scale), five_eigenvalues(area, model, batch, scale)]
    return rows


def largest_eigenvalue(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> Row:
    what = "PyHessian, largest eigenvalue / ours at residual 1e-3"
    try:
        from pyhessian import hessian
    except ImportError:
        return Row(area, what, None, bar="≥ 3", note="PyHessian is not installed")
    found: dict[str, float] = {}

    def theirs() -> None:
        found["theirs"] = hessian(model, nn.CrossEntropyLoss(), data=batch, cuda=False).eigenvalues()[0][0]

    def ours() -> None:
        pairs = sl.eigenvalues(sl.hessian(model, batch), which="magnitude", tol=1e-3)
        found["ours"] = float(pairs.values[0])

    ours_times, theirs_times = take_turns(max(2, scale.rounds // 2), ours, theirs)
    right = float(sl.eigenvalues(sl.hessian(model, batch), which="magnitude", tol=1e-6).values[0])
    errors = {key: abs(value / right - 1) for key, value in found.items()}
    note = f"relative error: theirs {errors['theirs']:.1e}, ours {errors['ours']:.1e}"
    return at_least(area, what, ratio(theirs_times, ours_times), 3, note)


def five_eigenvalues(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> Row:
    what = "hessian-eigenthings, top 5 / ours"
    try:
        from hessian_eigenthings.algorithms.lanczos import lanczos
        from hessian_eigenthings.loss_fns import supervised_loss
        from hessian_eigenthings.operators.hessian import HessianOperator
    except ImportError:
        return Row(area, what, None, bar="≥ 1.5", note="hessian-eigenthings is not installed, or has another shape")
    right = sl.eigenvalues(sl.hessian(model, batch), 5, tol=1e-6).values
    state: dict[str, Any] = {}

    def ours() -> None:
        state["ours"] = sl.eigenvalues(sl.hessian(model, batch), 5, tol=1e-4).values

    def theirs() -> None:
        operator = HessianOperator(model, [batch], supervised_loss(F.cross_entropy))
        state["theirs"] = lanczos(operator, k=5, which="LA", max_iter=state.get("steps", 20)).eigenvalues

    def error(values: Tensor) -> float:
        return float(((values.double().sort(descending=True).values - right) / right).abs().max())

    try:
        ours()
        for steps in (10, 15, 20, 30, 40, 60):  # as few of their steps as reach our accuracy
            state["steps"] = steps
            theirs()
            if error(state["theirs"]) <= max(error(state["ours"]), 1e-4):
                break
        ours_times, theirs_times = take_turns(max(2, scale.rounds // 2), ours, theirs)
    except Exception as problem:
        return Row(
            area, what, None, bar="≥ 1.5", note=f"hessian-eigenthings failed: {type(problem).__name__}: {problem}"
        )
    errors = f"theirs {error(state['theirs']):.1e}, ours {error(state['ours']):.1e}"
    note = f"{state['steps']} of their steps; largest error: {errors}"
    return at_least(area, what, ratio(theirs_times, ours_times), 1.5, note)


# ---------------------------------------------------------------- showing


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in ("torch", "spiritlevel", *PEERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def as_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The page docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Ratios within one run, both sides in turns: best over best, and the median of the "
        "rounds. A row that misses its bar says so.",
        "",
        "| | what | best | median | bar | met | |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for row in rows:
        value, median = (("–" if item is None else f"{item:.3g}") for item in (row.value, row.median))
        met = {True: "yes", False: "**no**", None: "–"}[row.met]
        lines.append(f"| {row.area} | {row.what} | {value} | {median} | {row.bar} | {met} | {row.note} |")
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in about.items()) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that the benchmarks still run")
    parser.add_argument("--only", choices=("per-sample", "operators"), help="one part alone")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--page", type=Path, help="also write the page docs/benchmarks.md there")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.peak_of:
        print_peak(arguments.peak_of, arguments.of)
        return 0
    scale = SMOKE if arguments.smoke else FULL
    parts: dict[str, Callable[[Scale], list[Row]]] = {"per-sample": per_sample, "operators": operators}
    rows = [row for name, part in parts.items() if arguments.only in (None, name) for row in part(scale)]
    text = as_markdown(rows, versions())
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "versions": versions()}, indent=1))
    if arguments.page:
        arguments.page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
