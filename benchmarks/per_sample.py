"""Per-sample traces against a forward pass, the margins, BackPACK and PyHessian."""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from harness import (
    FULL,
    Row,
    Scale,
    alone,
    at_least,
    at_most,
    forward,
    images,
    peak_of,
    print_peak,
    ratio,
    take_turns,
    timed,
    trained_lenet,
)
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.binding import cores


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
    fresh = sl.models.lenet5().eval()
    pair = ratio(
        *take_turns(scale.rounds, lambda: sl.sample_traces(fresh, some), lambda: forward(fresh, some[0], best))
    )
    rows.append(Row(area, "exact / forward pass, untrained", *pair, note="no term is skipped in either network"))

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
    rows += side_by_side_rows(area, model, some, scale)
    return rows


def side_by_side_rows(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> list[Row]:
    """What giving every core a batch of its own is worth, on an idle machine and beside a busy process."""

    def one_by_one() -> None:
        most, cores._MOST = cores._MOST, 1
        try:
            sl.sample_traces(model, batch)
        finally:
            cores._MOST = most

    what, rows = "all cores on one batch / one batch per core", []
    for busy in (False, True):
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
        try:
            pair = ratio(*take_turns(scale.rounds, one_by_one, lambda: sl.sample_traces(model, batch)))
        finally:
            if other is not None:
                other.kill()
                other.wait()
        rows.append(alone(area, f"{what}, beside a busy process" if busy else what, pair, "exact traces, same values"))
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

    def theirs(size: int) -> None:
        found.clear()
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            sequential.zero_grad()
            with backpack(BatchDiagGGNExact()):
                loss(sequential(inputs[part]), targets[part]).backward()
            found.append(sum(p.diag_ggn_exact_batch.flatten(1).sum(1) for p in sequential.parameters()))

    sizes = (8, 32, 128, 256)
    each = {size: min(timed(lambda size=size: theirs(size)) for _ in range(2)) for size in sizes}
    best = min(sizes, key=each.__getitem__)
    ours_time, theirs_time = take_turns(
        scale.rounds, lambda: sl.sample_traces(model, (inputs, targets)), lambda: theirs(best)
    )
    # a long call of ours, because a short one is mostly its fixed cost
    long = min(timed(lambda: sl.sample_traces(model, batch)) for _ in range(scale.rounds)) / len(batch[1])
    exact = sl.sample_traces(model, (inputs, targets)).values
    error = float(((torch.cat(found).double() - exact) / exact).abs().median())
    value = min(theirs_time) / len(targets) / long
    slower = ", ".join(f"{each[size] / each[best]:.1f} at {size}" for size in sizes if size != best)
    note = (
        f"same values to {error:.1e} (median); {min(theirs_time) / min(ours_time):.1f} for {len(targets)} points "
        f"alone; BackPACK at its best batch size, {best} (times slower: {slower})"
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
    tenth, all_points = (peak_of("per_sample.py", count, scale.whole) for count in (scale.whole // 10, scale.whole))
    note = f"{tenth:.0f} and {all_points:.0f} MB"
    return at_most(area, "peak memory, all points / a tenth", (all_points / tenth,) * 2, 1.2, note)


if __name__ == "__main__":
    torch.set_num_threads(2)
    count, whole = map(int, sys.argv[1:])
    _, inputs, targets = images(whole)
    sl.sample_traces(sl.models.lenet5(), (inputs[:count], targets[:count]))
    print_peak()
