"""Models that FSDP2 has sharded over two real processes: equal to one process, left bit for bit as they were.

The file is also the program that the processes run: `python test_sharded.py CHECK RANK RANKS STORE`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_distributed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import spiritlevel as sl
from spiritlevel.errors import InputError


class Net(nn.Module):
    """Layers in blocks of their own, a parameter of the root, and sizes that two ranks cannot halve."""

    def __init__(self, dtype: torch.dtype, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 9), activation())
        self.second = nn.Sequential(nn.Linear(9, 7), activation())
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x))) * self.scale


def pair(dtype: torch.dtype = torch.float64, activation: type[nn.Module] = nn.Tanh) -> tuple[nn.Module, nn.Module, Any]:
    """A whole model, the same one sharded, and data of which a rank's last batch is empty."""
    whole, sharded = Net(dtype, activation), Net(dtype, activation)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (sharded.first, sharded.second):
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(21, 6, generator=generator, dtype=dtype)
    with torch.no_grad():
        targets = whole(inputs).argmax(1)
    targets[:2] = (targets[:2] + 1) % 3
    return whole, sharded, (inputs, targets)


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Shards, gradients, modes and random states are the same afterwards, bit for bit."""
    before, modes = values_of(model), [module.training for module in model.modules()]
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    yield
    assert all(torch.equal(a, b) for a, b in zip(before, values_of(model), strict=True))
    assert modes == [module.training for module in model.modules()]
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def close(found: Any, expected: Any, relative: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative)


def refused(match: str, measure: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=match):
        measure()


# ---------------------------------------------------------------- what the processes check


def check_forward(rank: int) -> None:
    """Margins, losses and noise: the numbers of one process."""
    whole, sharded, data = pair()
    sharded.train()
    (sharded(data[0]).sum()).backward()  # gradients of the caller's
    with untouched(sharded):
        found, expected = sl.margins(sharded, data, batch_size=4), sl.margins(whole, data)
        close(found.signed, expected.signed)
        assert found.fingerprint == expected.fingerprint
        compare(sharded, whole, data, ["average_sharpness", "adaptive_sharpness_average", "margin_q50"])


def compare(sharded: nn.Module, whole: nn.Module, data: Any, names: list[str]) -> None:
    """The report of a sharded model says what that of a whole one does."""
    found, expected = (sl.measure(model, data, measures=names, parts=[]) for model in (sharded, whole))
    for name in names:
        close(found.row(name).value.value, expected.row(name).value.value)
        close(found.row(name).value.stderr, expected.row(name).value.stderr, 1e-4)
    close(found.fits["train"].loss.value, expected.fits["train"].loss.value)
    assert found.fits["train"].accuracy.value == expected.fits["train"].accuracy.value


def check_single(rank: int) -> None:
    """The same in single precision, with other batches, and how much noise the error bears."""
    whole, sharded, data = pair(torch.float32)
    with untouched(sharded):
        for options in ({}, {"batch_size": 4}, {"batch_size": 100}):
            close(sl.margins(sharded, data, **options).signed, sl.margins(whole, data).signed)
        compare(sharded, whole, data, ["average_sharpness", "pac_bayes_magnitude", "mean_confidence_gap"])
    _, sharded, data = pair(torch.float32)
    exact = sl.hessian(Net(torch.float64), (data[0].double(), data[1]))
    with untouched(sharded):
        op = sl.hessian(sharded, data)
        stated(op, exact, torch.randn(op.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        assert 0 < op.error < 2e-2 * float(sl.spectral_norm(exact).value)


def stated(op: Any, exact: Any, columns: Tensor) -> None:
    """Products with these vectors are within the error that the operator states."""
    for column in columns.T:
        unit = column / column.norm()
        product = op @ op.space.part(unit[:, None])[:, 0].to(op.dtype)
        off = float((op.space.whole(product[:, None])[:, 0].double() - exact @ unit).norm())
        assert off <= op.error, "within the stated error"


def check_products(rank: int) -> None:
    """Products are within their stated error, and estimators say the same as of whole vectors."""
    whole, sharded, data = pair()
    exact = sl.hessian(whole, data)
    with untouched(sharded):
        op = sl.hessian(sharded, data)
        assert op.size == exact.size
        stated(op, exact, torch.randn(op.size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
        found, expected = sl.eigenvalues(op), sl.eigenvalues(exact)
        trace, twin = sl.operator_trace(op, probes=4, seed=3), sl.operator_trace(exact, probes=4, seed=3)
    assert 0 < op.error < 1e-6 * float(expected.values[0])
    assert found.converged, found.reason
    assert abs(float(found.values - expected.values)) <= float(found.residuals) + 1e-5
    assert found.vectors is not None
    assert found.vectors.shape == (op.space.length, 1), "each rank has its entries"
    top = op.space.whole(found.vectors)
    stated(op, exact, top)
    assert abs(float(top[:, 0] @ expected.vectors[:, 0])) > 1 - 1e-3
    assert trace.tolerance > 0
    assert abs(trace.value - twin.value) <= trace.tolerance, "the same probes"


def check_spectrum(rank: int) -> None:
    """All that is said of a spectrum in one set of runs, layer by layer, and of a matrix that is written down."""
    whole, sharded, data = pair()
    op, exact = sl.hessian(sharded, data, batch_size=4), sl.hessian(whole, data)
    found, expected = (sl.spectrum(each, probes=2, steps=12) for each in (op, exact))
    close(found.largest.values, expected.largest.values, 1e-3)
    close(found.trace.value, expected.trace.value, 1e-5)
    for name in expected.layers:
        close(found.layers[name].value, expected.layers[name].value, 1e-5)
    density = [sl.spectral_density(each, probes=2, steps=6).moment(2).value for each in (op, exact)]
    close(density[0], density[1], 1e-4)
    norm, twin = sl.frobenius_norm(op, probes=8), sl.frobenius_norm(exact, probes=8)
    assert abs(norm.value - twin.value) <= norm.tolerance
    last = sl.hessian(sharded, data, params="last"), sl.hessian(whole, data, params="last")  # small enough to go dense
    close(last[0].dense(), last[1].dense())
    close(sl.eigenvalues(last[0]).values, sl.eigenvalues(last[1]).values)
    shifted = sl.hessian(sharded, data, params="last", weight_decay=2.0)
    close(sl.operator_trace(shifted, probes=64).value, float(last[1].dense().trace()) + 2.0 * shifted.size)


def check_report(rank: int) -> None:
    """A report of a sharded model holds what can be measured in shards, and names the rest with a reason."""
    whole, sharded, data = pair()
    with untouched(sharded):
        names = ["trace", "largest_eigenvalue", "frobenius_norm", "path_norm"]
        report = sl.measure(sharded, data, measures=names, parts=["audit"])
    exact = sl.hessian(whole, data)
    top = report.row("largest_eigenvalue").value
    assert abs(top.value - float(sl.eigenvalues(exact).values[0])) <= top.tolerance
    norm = report.row("frobenius_norm").value
    assert top.value - top.tolerance <= norm.value
    assert abs(norm.value - float(exact.dense().norm())) < 4 * norm.stderr + norm.tolerance
    trace = report.row("trace").value
    assert abs(trace.value - float(exact.dense().trace())) < 4 * trace.stderr
    assert "sharded over processes" in report.row("path_norm").value.reason
    assert "sharded over processes" in report.left_out["audit"]


def check_kinks(rank: int) -> None:
    """With ReLU the error of a product says what the kinks between the two points do to it."""
    _, sharded, data = pair(torch.float64, nn.ReLU)
    exact, op = sl.hessian(Net(torch.float64, nn.ReLU), data), sl.hessian(sharded, data)
    unit = torch.ones(op.size, dtype=torch.float64) / op.size**0.5
    product = op.space.whole((op @ op.space.part(unit[:, None])[:, 0])[:, None])[:, 0]
    assert float((product - exact @ unit).norm()) <= op.error


def check_critical(rank: int) -> None:
    """Forward passes along the optimiser's update, of which every rank sees a batch of its own or the same."""
    whole, sharded, (inputs, targets) = pair()
    found = []
    for model in (whole, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def closure(model: nn.Module = model) -> Tensor:
            return nn.functional.cross_entropy(model(inputs), targets)

        closure().backward()
        before = values_of(sharded)
        found.append(sl.critical_sharpness(closure, optimizer))
        assert all(torch.equal(a, b) for a, b in zip(before, values_of(sharded), strict=True))
    assert (found[0].low, found[0].high, found[0].forwards) == (found[1].low, found[1].high, found[1].forwards)


def check_refusals(rank: int) -> None:
    """What cannot be measured in shards is said in a sentence, on every rank; an error leaves the model as it was."""
    ranks = dist.get_world_size()
    _, sharded, data = pair()
    for function in (sl.sample_traces, sl.gauss_newton, sl.audit, sl.landscape, sl.input_curvature):
        refused("parameter scale is sharded over processes .* load the full", lambda f=function: f(sharded, data))
    refused("leave out distance=", lambda: sl.margins(sharded, data, distance=2))
    refused("only be measured with batch_norm='eval'", lambda: sl.hessian(sharded, data, batch_norm="batch"))
    refused("hutch", lambda: sl.operator_trace(sl.hessian(sharded, data), method="hutch++"))
    broken = data[0].clone(), data[1]
    broken[0][12] = torch.nan
    with untouched(sharded):
        refused("input of sample 12 is NaN", lambda: sl.margins(sharded, broken, batch_size=4))
    mesh = init_device_mesh("cpu", (ranks,))
    parallel = parallelize_module(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), mesh, {"0": ColwiseParallel()})
    refused("tensor-parallel plans", lambda: sl.margins(parallel, (data[0].float(), data[1])))
    grid = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicate", "shard"))
    replicated = fully_shard(Net(torch.float32), mesh=grid)
    refused("HSDP", lambda: sl.hessian(replicated, (data[0].float(), data[1])))
    half = fully_shard(Net(torch.float32), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    refused("computes in half precision", lambda: sl.margins(half, (data[0].float(), data[1])))
    refused("sharded in bfloat16", lambda: sl.margins(fully_shard(Net(torch.bfloat16), mesh=mesh), data))
    part = Net(torch.float64)
    fully_shard(part.first, mesh=mesh)
    refused("scale is whole on every rank while others are sharded", lambda: sl.hessian(part, data))
    odd = pair()[1]
    for module in odd.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    refused("set_gradient_divide_factor", lambda: sl.hessian(odd, data))


def check_death(rank: int) -> None:
    """Rank 1 is killed in the middle of a pass, where fully_shard gathers parameters: the other says so."""
    _, sharded, data = pair()
    passes = 0

    def die(*_: object) -> None:
        nonlocal passes
        passes += 1
        if rank == 1 and passes == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    sharded.second.register_forward_pre_hook(die)
    sl.hessian(sharded, data)


# ---------------------------------------------------------------- starting them


def run(checks: str, folder: Path) -> list[tuple[int, str]]:
    return test_distributed.run(checks, 2, folder, seconds=900, program=__file__)  # a busy machine takes its time


def test_sharded_models_equal_whole_ones(tmp_path: Path) -> None:
    results = run("forward,products,critical", tmp_path)
    assert [code for code, _ in results] == [0, 0], "\n\n".join(said for _, said in results)


@pytest.mark.slow
def test_sharded_models_that_are_refused_and_all_that_takes_longer(tmp_path: Path) -> None:
    results = run("refusals,kinks,single,spectrum,report", tmp_path)
    assert [code for code, _ in results] == [0, 0], "\n\n".join(said for _, said in results)


@pytest.mark.slow
def test_a_lost_rank_of_a_sharded_model_is_said_in_a_sentence(tmp_path: Path) -> None:
    (code, said), *_ = run("death", tmp_path)
    assert code == 1
    assert "ConnectionError: rank 0 of 2 has lost another rank, which died or does not answer" in said


if __name__ == "__main__":
    test_distributed.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], globals())
