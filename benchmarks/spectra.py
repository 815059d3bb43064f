"""What is estimated from many products: the trace of a data set, the density, and the memory they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from harness import FULL, Row, Scale, alone, at_most, images, peak_of, print_peak, ratio, take_turns, trained_lenet
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl

Batch = tuple[Tensor, Tensor]


def spectra(scale: Scale) -> list[Row]:
    count, steps = (1000, 200) if scale is FULL else (100, 5)
    _, inputs, targets = images(count)
    model = trained_lenet(inputs, targets, steps)
    batch = inputs, targets
    exact = sl.trace(model, batch).value
    rows = [*traces(model, batch, exact, scale), *densities(model, batch, exact, scale)]
    return [*rows, memory_row()] if scale is FULL else rows


def compare(
    area: str, rounds: int, ours: Callable[[], float], right: float, peers: dict[str, Callable[[], float]], note: str
) -> list[Row]:
    """Each peer's time over ours, with the relative error of both; a peer that is missing or fails says so."""
    rows = []
    for what, theirs in peers.items():
        found: dict[str, float] = {}

        def turn(name: str, function: Callable[[], float], found: dict[str, float] = found) -> Callable[[], None]:
            return lambda: found.update({name: function()})

        try:
            our_times, their_times = take_turns(rounds, turn("ours", ours), turn("theirs", theirs))
        except ImportError as missing:
            rows.append(Row(area, what, None, note=f"{missing.name} is not installed"))
            continue
        except Exception as problem:  # a peer that fails is a result
            rows.append(Row(area, what, None, note=f"failed: {type(problem).__name__}: {str(problem).split('. ')[0]}"))
            continue
        errors = {name: abs(value / right - 1) for name, value in found.items()}
        told = f"relative error: theirs {errors['theirs']:.1e}, ours {errors['ours']:.1e}; {note}"
        rows.append(alone(area, what, ratio(their_times, our_times), told))
    return rows


def curvlinops_hessian(model: nn.Module, batch: Batch) -> Any:
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [batch], check_deterministic=False
    )


def eigenthings_hessian(model: nn.Module, batch: Batch) -> Any:
    from hessian_eigenthings import HessianOperator, supervised_loss

    return HessianOperator(model, [batch], supervised_loss(F.cross_entropy))


def traces(model: nn.Module, batch: Batch, exact: float, scale: Scale) -> list[Row]:
    """To the standard error that `operator_trace(rel_err=0.1)` asks for, and exactly."""
    area, rounds = "trace of a data set, LeNet-5", min(2, scale.rounds)
    aim: dict[str, Any] = {"rel_err": 0.1} if scale is FULL else {"probes": 4}
    estimate = sl.operator_trace(sl.hessian(model, batch), **aim)
    probes = estimate.matvecs

    def pyhessian() -> float:
        from pyhessian import hessian

        torch.manual_seed(0)
        draws = hessian(model, nn.CrossEntropyLoss(), data=batch, cuda=False).trace()
        return sum(draws) / len(draws)

    def curvlinops() -> float:
        from curvlinops import hutchinson_trace

        return float(hutchinson_trace(curvlinops_hessian(model, batch), probes))

    def eigenthings() -> float:
        from hessian_eigenthings import hutchinson

        return float(hutchinson(eigenthings_hessian(model, batch), num_samples=probes, seed=0).estimate)

    peers = {
        f"curvlinops, {probes} probes / operator_trace, as many": curvlinops,
        f"hessian-eigenthings, {probes} probes / operator_trace, as many": eigenthings,
    }
    rows = compare(
        area,
        rounds,
        lambda: sl.operator_trace(sl.hessian(model, batch), probes=probes).value,
        exact,
        peers,
        f"standard error {estimate.stderr / estimate.value:.1%} for both",
    )
    peers = {"PyHessian trace(), which stops by itself / trace, exact": pyhessian}
    return rows + compare(area, rounds, lambda: sl.trace(model, batch).value, exact, peers, "ours is exact")


def densities(model: nn.Module, batch: Batch, exact: float, scale: Scale) -> list[Row]:
    """The same quadrature for all; its accuracy is judged by the mean eigenvalue, which is the trace over the size."""
    area = "spectral density, LeNet-5"
    probes, steps = (2, 40) if scale is FULL else (2, 5)
    size = sl.models.count(model)

    def ours() -> float:
        return sl.spectral_density(sl.hessian(model, batch), probes=probes, steps=steps).moment(1).value * size

    def pyhessian() -> float:
        from pyhessian import hessian

        values, weights = hessian(model, nn.CrossEntropyLoss(), data=batch, cuda=False).density(iter=steps, n_v=probes)
        return size / probes * float((torch.tensor(values) * torch.tensor(weights)).sum())

    def eigenthings() -> float:
        from hessian_eigenthings import spectral_density

        found = spectral_density(eigenthings_hessian(model, batch), num_runs=probes, lanczos_steps=steps, seed=0)
        return size * float(torch.trapezoid(found.grid * found.density, found.grid))

    peers = {"PyHessian density() / ours": pyhessian, "hessian-eigenthings / ours": eigenthings}
    return compare(area, min(2, scale.rounds), ours, exact, peers, f"of the trace, from {probes} runs of {steps} steps")


def memory_row() -> Row:
    """Peak memory of a fresh process that multiplies over a tenth or all of the points, under a memory budget."""
    count = 20_000
    tenth, everything = (peak_of("spectra.py", some, count) for some in (count // 10, count))
    note = f"{tenth:.0f} and {everything:.0f} MB; budget 64 MB"
    return at_most("operators, LeNet-5", "peak memory, tenfold data", (everything / tenth,) * 2, 1.2, note)


if __name__ == "__main__":
    torch.set_num_threads(2)
    some, count = map(int, sys.argv[1:])
    _, inputs, targets = images(count)
    operator = sl.hessian(sl.models.lenet5(), (inputs[:some], targets[:some]), memory="64MB")
    for _ in range(2):
        operator @ torch.ones(operator.size)
    print_peak()
