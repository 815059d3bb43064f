"""One measurement over several processes, with real ones: equal to one process, silent without `group`, never hanging.

The file is also the program that the processes run: `python test_distributed.py CHECK RANK RANKS STORE`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.answers import measuring
from spiritlevel.errors import InputError

OPERATORS = [sl.hessian, sl.gauss_newton, sl.empirical_fisher]


def problem(samples: int = 7) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small network in float64 and data, the same in every process."""
    generator = torch.Generator().manual_seed(samples)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3)).double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return net, (inputs, torch.randint(0, 3, (samples,), generator=generator))


def ragged(data: tuple[Tensor, Tensor], *sizes: int) -> list[tuple[Tensor, ...]]:
    return list(zip(data[0].split(list(sizes)), data[1].split(list(sizes)), strict=True))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def refused(match: str, measure: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=match):
        measure()


# ---------------------------------------------------------------- what the processes check


def check_products(rank: int, ranks: int, group: Any) -> None:
    """Uneven shards, empty shards, ragged batches, other batch sizes and memory on every rank."""
    for samples in (7, ranks - 1):
        net, data = problem(samples)
        vectors = torch.randn(len(nn.utils.parameters_to_vector(net.parameters())), 3, dtype=torch.float64)
        ways: list[tuple[Any, dict[str, Any]]] = [
            (data, {"batch_size": 2 + rank}),
            (data, {}),
            (data, {"batch_size": 100}),
            (data, {"memory": 1 if rank else None}),
            (DataLoader(TensorDataset(*data), batch_size=3), {}),
        ]
        if samples == 7:
            ways += [(ragged(data, 1, 4, 2), {}), (TensorDataset(*data), {"batch_size": 2})]
        for operator in OPERATORS:
            expected = operator(net, data, weight_decay=0.5) @ vectors
            for given, options in ways if operator is sl.hessian else ways[:1]:
                found = operator(net, given, weight_decay=0.5, group=group, **options) @ vectors
                close(found, expected)

    net, data = problem(16)
    vectors = torch.randn(27 + 6, 2, dtype=torch.float64)
    for options in ({"batch_norm": "batch", "batch_size": 6}, {"batch_norm": "batch", "batch_size": 8}):
        close(sl.hessian(net, data, group=group, **options) @ vectors, sl.hessian(net, data, **options) @ vectors)
    from spiritlevel.operators.matrices import hessian_variance

    close(
        hessian_variance(net, data, batch_size=3, group=group) @ vectors,
        hessian_variance(net, data, batch_size=3) @ vectors,
    )


def check_estimators(rank: int, ranks: int, group: Any) -> None:
    """Whatever is built on products: the same numbers as alone, and the vectors of rank 0."""
    net, data = problem(16)
    alone, shared = sl.hessian(net, data), sl.hessian(net, data, group=group, batch_size=2)
    close(shared.dense(), alone.dense())
    for ask in (
        lambda op: sl.eigenvalues(op, 2, tol=1e-10).values,
        lambda op: sl.operator_trace(op, probes=8, seed=1).value,
        lambda op: sl.spectral_density(op, probes=2, steps=10).moment(2).value,
    ):
        found, expected = ask(shared), ask(alone)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    vector = torch.arange(33, dtype=torch.float64)
    mine = vector.clone() if rank == 0 else torch.full_like(vector, torch.nan)
    close(shared @ mine, alone @ vector)
    if rank:
        assert mine.isnan().all(), "the caller's vector is not written to"


def check_samples(rank: int, ranks: int, group: Any) -> None:
    """Per-sample results: whole on every rank, and those of one process, also what is random."""
    for samples in (7, ranks - 1):
        net, data = problem(samples)
        smooth = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5, bias=False), nn.LayerNorm(5)).double()
        many = nn.Sequential(nn.Linear(4, 8)).double()
        ways: list[tuple[nn.Module, dict[str, Any]]] = [
            (net, {"per_layer": True}),
            (many, {"passes": 2, "seed": 3}),
            (smooth[:3], {}),  # by recursion
            (smooth, {"probes": 4}),
            (smooth, {"rel_err": 9.0}),
            (net, {"method": "pyhessian"}),
        ]
        for model, options in ways if samples == 7 else ways[:2]:
            nn.utils.vector_to_parameters(torch.linspace(-1, 1, 99)[: size(model)].double(), model.parameters())
            alone = sl.sample_traces(model, data, **options)
            for given, how in [(data, {"batch_size": 2 + rank}), (DataLoader(TensorDataset(*data), 3), {})]:
                shared = sl.sample_traces(model, given, group=group, **how, **options)
                close(shared.values, alone.values)
                close(shared.stderr.nan_to_num(), alone.stderr.nan_to_num())
                assert (shared.fingerprint, shared.method, shared.matvecs) == (
                    alone.fingerprint,
                    alone.method,
                    alone.matvecs,
                )
                assert torch.equal(shared.targets, alone.targets)
                assert shared.layers.keys() == alone.layers.keys()
                for name in alone.layers:
                    close(shared.layers[name], alone.layers[name])
        close(sl.trace(net, data, group=group, batch_size=1).value, sl.trace(net, data).value)
        for model in (net, smooth[:2]):
            alone = sl.input_curvature(model, data, probes=4)
            close(sl.input_curvature(model, data, probes=4, group=group, batch_size=2 + rank).values, alone.values)
        for options in ({}, {"distance": 2}, {"distance": "inf", "layer": "0"}):
            one, all_of_us = (
                sl.margins(net, data, **options),
                sl.margins(net, data, group=group, batch_size=2, **options),
            )
            for name in ("output", "signed", "softmax", "softmax_gap", "correct", "targets", "distance"):
                close(getattr(all_of_us, name), getattr(one, name))
            assert all_of_us.fingerprint == one.fingerprint
            assert all_of_us.spread == pytest.approx(one.spread, rel=1e-12, nan_ok=True)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_measure(rank: int, ranks: int, group: Any) -> None:
    """A report of all ranks: the numbers of one, by the clock of rank 0, and refused if the ranks would differ."""
    net, data = problem(16)
    options: dict[str, Any] = {"measures": ["trace", "largest_eigenvalue", "average_sharpness", "ball_sharpness"]}
    options["parts"] = ["spectrum"]
    alone, shared = sl.measure(net, data, **options), sl.measure(net, data, group=group, **options)
    assert not list(differences(alone.to_dict(), shared.to_dict()))
    with pytest.MonkeyPatch.context() as patch:
        if rank:  # a clock that runs fast: alone this rank would find no time for anything
            patch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: 1e6 * time.monotonic()))
        assert len(sl.measure(net, data, time_limit=1000, group=group, **options).rows) == 4
    refused(
        "ranks of group= differ in their options",
        lambda: sl.measure(net, data, measures=["trace", "weight_norm"][: 1 + min(rank, 1)], group=group),
    )
    refused("ranks of group= differ in their data", lambda: sl.measure(net, (data[0] + rank, data[1]), group=group))
    data[0][13] = torch.nan  # in the half of rank 1
    refused("input of sample 13 is NaN", lambda: sl.measure(net, data, group=group, **options))
    refused("input of sample 13 is NaN", lambda: sl.audit(net, data, measures=["trace"], group=group))


SEEN = [0]  # by `Counting`; what a module holds itself is given back


class Counting(nn.Module):
    """Passes its inputs on and counts the samples that it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN[0] += len(x)
        return x


EVERY_KIND = (
    "trace,largest_eigenvalue,pac_bayes_flatness,adaptive_sharpness_average,adaptive_sharpness_l2,relative_flatness,"
    "empirical_fisher_trace,fisher_rao_norm,signal_sharpness,input_sensitivity,mean_aceht,input_distance"
).split(",")


def check_shares(rank: int, ranks: int, group: Any) -> None:
    """Every step of a report is shared: the numbers of one process, and each rank sees its part of the samples."""
    net, data = problem(240)
    net = nn.Sequential(Counting(), *net)

    def seen_by_step(group: Any) -> tuple[Any, dict[str, int]]:
        begun: list[tuple[str, int]] = []

        def note(what: str, done: int, total: int) -> None:
            begun.append((what.split(":")[0], SEEN[0]))

        report = sl.measure(net, data, measures=EVERY_KIND, samples=160, group=group, progress=note)
        found: dict[str, int] = {}
        for (what, first), (_, last) in itertools.pairwise([*begun, ("", SEEN[0])]):
            found[what] = found.get(what, 0) + last - first
        return report, found

    several, mine = seen_by_step(group)
    every = torch.tensor(list(mine.values()))
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    if rank:
        return
    one, alone = seen_by_step(None)
    assert not list(differences(one.to_dict(), several.to_dict()))
    assert one.audit is not None
    assert len(one.audit.certificates) >= 4
    assert one.landscape is not None
    most = dict(zip(mine, every.tolist(), strict=True))
    for name, whole in alone.items():  # a look at a few samples is taken by every rank
        assert most[name] <= whole * (1 / ranks + 0.1) + 150, (name, whole, most[name])


def check_refusals(rank: int, ranks: int, group: Any) -> None:
    """What one rank refuses all refuse, and what the ranks disagree on is refused: nobody waits for ever."""
    net, (inputs, targets) = problem()
    last = torch.tensor([0] * 6 + [3])
    refused(r"target 3 .* is outside the model's 3 classes", lambda: sl.hessian(net, (inputs, last), group=group))
    broken = inputs.clone()
    broken[5] = torch.nan
    rolled = inputs.roll(rank, 0)

    def refuses(measure: Callable[..., Any]) -> None:
        refused("input of sample 5 is NaN", lambda: measure(net, (broken, targets), group=group, batch_size=1))
        refused("ranks of group= differ in their data", lambda: measure(net, (rolled, targets), group=group))

    for measure in (sl.hessian, sl.sample_traces, sl.margins):
        refuses(measure)
    options: dict[str, Any] = {"batch_norm": "batch", "batch_size": 4 + min(rank, 1)}
    refused(
        "ranks of group= differ in their data or batches",
        lambda: sl.hessian(net, (inputs, targets), group=group, **options),
    )
    if rank:
        with torch.no_grad():
            net[0].weight[0, 0] += 1e-3
    refused("ranks of group= differ in their models", lambda: sl.hessian(net, (inputs, targets), group=group))

    class Changing:
        """Data that change after the first pass, on one rank only."""

        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            shift = rank if self.passes > 5 else 0
            yield from ragged((inputs + shift, targets), 2, 2, 2, 1)

    op = sl.hessian(problem()[0], Changing(), group=group, memory=1)
    refused("the data changed between two passes", lambda: [op @ torch.ones(op.size).double() for _ in range(4)])


def check_silence(rank: int, ranks: int, group: Any) -> None:
    """Without `group` rank 0 measures while the others do nothing at all."""
    if rank == 0:
        net, data = problem()
        (sl.hessian(net, data) @ torch.ones(33, dtype=torch.float64)).sum()
        sl.sample_traces(net, data), sl.trace(net, data), sl.margins(net, data, distance=2)
        sl.eigenvalues(sl.hessian(net, data))


def check_death(rank: int, ranks: int, group: Any) -> None:
    """Rank 1 is killed between two products: the others say so."""
    op = sl.hessian(*problem(), group=group, batch_size=1)
    vector = torch.ones(33, dtype=torch.float64)
    op @ vector
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    within_a_minute(lambda: op @ vector)


def check_standstill(rank: int, ranks: int, group: Any) -> None:
    """Rank 1 stands still: the others give up after the group's own timeout."""
    op = sl.hessian(*problem(), group=group, batch_size=1)
    if rank == 1:
        time.sleep(30)
        return
    within_a_minute(lambda: op @ torch.ones(33, dtype=torch.float64))


def within_a_minute(measure: Callable[[], Any]) -> None:
    started = time.monotonic()
    try:
        measure()
    finally:
        assert time.monotonic() - started < 60


# ---------------------------------------------------------------- starting them


def run(check: str, ranks: int, folder: Path, seconds: float = 900, program: str = __file__) -> list[tuple[int, str]]:
    """Exit code and last words of every process."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(sl.__file__).parents[1])])  # the library under test
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error::UserWarning:spiritlevel", program, check]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder / f"store-{check}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        return [(worker.returncode, said) for worker in workers for said in [worker.communicate(timeout=seconds)[0]]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_equal_one(tmp_path: Path, ranks: int) -> None:
    results = run("products,estimators,samples,measure,shares,refusals,silence", ranks, tmp_path)
    assert [code for code, _ in results] == [0] * ranks, "\n\n".join(said for _, said in results)


@pytest.mark.slow  # the command is killed in the quick form too, below
@pytest.mark.parametrize("check", ["death", "standstill"])
def test_a_lost_rank_ends_the_job_with_a_sentence(tmp_path: Path, check: str) -> None:
    (code, said), *_ = run(check, 2, tmp_path)
    assert code == 1
    assert "ConnectionError: rank 0 of 2 has lost another rank, which died or does not answer" in said
    assert "start the job again." in said.strip().splitlines()[-1]


# ---------------------------------------------------------------- the command, under torchrun

NETWORK = """
import os, pathlib, signal
import torch
from torch import nn

class Mortal(nn.Module):
    calls = 0

    def forward(self, x):
        Mortal.calls += 1
        if Mortal.calls == 40 and os.environ.get("RANK") == os.environ.get("VICTIM", "nobody"):
            pathlib.Path(os.environ["HARMED"]).touch()
            os.kill(os.getpid(), getattr(signal, os.environ["HARM"]))
        return x

def make():
    torch.manual_seed(0)
    return nn.Sequential(Mortal(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
"""


def command(folder: Path, *options: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    """`spiritlevel measure` on 101 samples, alone or with this many ranks."""
    generator = np.random.default_rng(0)
    for name, samples in (("train", 101), ("test", 37)):
        x, y = generator.normal(size=(samples, 6)), generator.integers(0, 3, samples)
        np.savez(folder / f"{name}.npz", x=x, y=y)
    (folder / "net.py").write_text(NETWORK)
    start = (
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    )
    data = ["--data", "train.npz", "--test", "test.npz", "--dtype", "float64"]
    return subprocess.run(
        [*start, "-m", "spiritlevel", "measure", "net.py:make", *data, *options],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The places at which two JSON values differ by more than 1e-10; times apart."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            if key != "seconds":
                yield from differences(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}/{index}")
    elif isinstance(one, float) and isinstance(other, float):
        if not math.isclose(one, other, rel_tol=1e-10, abs_tol=1e-12):
            yield f"{where}: {one} and {other}"
    elif one != other:
        yield f"{where}: {one} and {other}"


FEW = "trace,largest_eigenvalue,margin_mean,adaptive_sharpness_average"


@pytest.mark.parametrize(
    ("measures", "ranks"),
    [(FEW, 2), *(pytest.param("all", ranks, marks=pytest.mark.slow) for ranks in (2, 3))],
)
def test_the_report_of_several_processes_is_that_of_one(tmp_path: Path, measures: str, ranks: int) -> None:
    options = ["--measures", measures]
    alone = command(tmp_path, *options, "--out", "one", "--json", "one.json")
    shared = command(tmp_path, *options, "--out", "many", "--json", "many.json", ranks=ranks)
    assert (alone.returncode, shared.returncode) == (0, 0), alone.stderr + shared.stderr
    one, many = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "many.json"))
    assert len(one["report"]["rows"]) >= 4
    assert not list(differences(one, many))
    assert shared.stdout.count("The page: ") == 1, "only rank 0 prints"
    assert (tmp_path / "many" / "report.html").exists()


@pytest.mark.slow
def test_bad_input_of_a_job_is_said_once(tmp_path: Path) -> None:
    done = command(tmp_path, "--measures", "tracce", ranks=2)
    assert done.returncode == 1, "torchrun's own"
    assert done.stderr.count("spiritlevel: unknown measure 'tracce': did you mean 'trace'?") == 1
    assert "exitcode: 2" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("harm", "victim"),
    [("SIGKILL", "1"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("SIGKILL", "0"), ("SIGSTOP", "1")])],
)
def test_a_lost_rank_ends_the_command_within_a_minute(tmp_path: Path, harm: str, victim: str) -> None:
    harmed = tmp_path / "harmed"
    done = command(tmp_path, ranks=2, VICTIM=victim, HARM=harm, HARMED=str(harmed))
    seconds = time.time() - harmed.stat().st_mtime
    assert done.returncode == 1
    survivor = 1 - int(victim)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("spiritlevel: rank")]  # others say how far
    assert re.match(rf"spiritlevel: rank {survivor} of 2 (has lost another rank|was told to stop)", said)
    assert "see what that one said last, and start the job again." in said
    assert ("Set SPIRITLEVEL_PATIENCE" in said) == (harm == "SIGSTOP")
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("torch/distributed/elastic")[0]
    assert not (tmp_path / "report").exists()
    assert seconds < 60


def test_group_without_a_process_group_is_refused() -> None:
    with pytest.raises(InputError, match=r"group= needs torch\.distributed\.init_process_group first"):
        sl.hessian(*problem(), group=object())


def main(checks: str, rank: int, ranks: int, store: str, known: dict[str, Any] | None = None) -> None:
    """Run some checks of this file, or of another with ranks in place of a group, in one of the processes."""
    timeout = datetime.timedelta(seconds=4 if checks == "standstill" else 60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)  # the same vectors everywhere
    for check in checks.split(","):
        if known is None:
            globals()[f"check_{check}"](rank, ranks, dist.group.WORLD)
        else:
            known[f"check_{check}"](rank)
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all checks have passed; Gloo's threads now and then abort an interpreter that shuts down


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
