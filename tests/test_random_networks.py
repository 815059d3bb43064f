"""Random networks before every way to measure, the counterexamples that were mended, and the fuzzer itself.

`make fuzz` does the same for as long as it is given; this is its quick pass, and the proof that it can find something.
"""

from __future__ import annotations

import copy
import json
import math
import threading
from pathlib import Path
from typing import Any

import comparisons
import pytest
import random_networks
import torch
from comparisons import WAYS, compare, differences
from random_networks import BLOCKS, Program, data, draw, network, simpler, words
from scripts import script

import spiritlevel as sl

ROOT = Path(__file__).resolve().parent.parent
KEPT = sorted((Path(__file__).parent / "counterexamples").glob("*.json"))

fuzz = script("fuzz")


def plain(*steps: dict[str, Any], **more: Any) -> Program:
    """A small program of the given steps."""
    return {
        "seed": 0,
        "dtype": "float64",
        "samples": 3,
        "outputs": 3,
        "inputs": {"kind": "numbers", "shape": [3], "scale": 1.0},
        "loss": "cross_entropy",
        "head": "linear",
        "steps": list(steps),
    } | more


RELU = {"do": "elementwise", "name": "relu"}
TANH = {"do": "elementwise", "name": "tanh"}
LINEAR = {"do": "linear", "width": 2, "bias": True}

# ---------------------------------------------------------------- the library


@pytest.mark.parametrize("index", range(8))
def test_random_networks_are_measured_as_differences_of_their_loss_say(index: int) -> None:
    outcome = compare(draw(18, index))
    assert outcome.compared + len(outcome.refusals) >= 8
    assert not outcome.findings


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_random_networks_are_measured_as_differences_of_their_loss_say(tmp_path: Path) -> None:
    run = fuzz.Run(tmp_path, 22)
    try:
        for index in range(200):
            run.one(index)
    finally:
        run.child.stop()
    assert run.networks == 200
    assert not run.kept, run.summary()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_counterexamples_stay_mended(path: Path) -> None:
    """Each of these networks was measured wrongly once, or broke the library."""
    case = json.loads(path.read_text(encoding="utf-8"))
    if case["kind"] in ("died", "hangs"):
        child = fuzz.Child()
        try:
            outcome = child.compare(case["program"], [fuzz.way_of(case)])
        finally:
            child.stop()
        assert outcome is not None
        assert not outcome["findings"]
    else:
        outcome = compare(case["program"], [fuzz.way_of(case)])
        assert outcome.compared or outcome.refusals
        assert not outcome.findings


# ---------------------------------------------------------------- the programs


def test_programs_are_plain_data_and_the_same_for_the_same_seed() -> None:
    program = draw(3, 5)
    assert draw(3, 5) == program != draw(3, 6)
    read = json.loads(json.dumps(program))
    assert read == program
    inputs, _ = data(program)
    assert torch.equal(network(read)(inputs.clone()), network(program)(inputs.clone()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_takes_what_it_is_given(name: str) -> None:
    """In every choice of every option, behind vectors, sequences and images."""
    kind, choices, _, _ = BLOCKS[name]
    simplest = {"do": name} | {key: values[0] for key, values in choices.items()}
    steps = [simplest | {key: value} for key, values in choices.items() for value in values] or [simplest]
    with torch.no_grad():
        for step in steps[:: max(1, len(steps) // 30)]:
            for shape in ([3], [2, 3], [2, 3, 3]) if kind != "tokens" else ([3],):
                program = plain(step, inputs={"kind": "numbers", "shape": shape, "scale": 1.0})
                if kind == "tokens":
                    program = plain(inputs={"kind": "tokens", "shape": shape, "embedding": step})
                found = network(program)(data(program)[0])
                assert found.shape == (3, 3)
                assert bool(torch.isfinite(found).all())


def test_a_simpler_program_runs_and_is_another_one() -> None:
    for index in range(3):
        program = draw(7, index)
        for candidate in list(simpler(program))[:12]:
            assert candidate != program
            with torch.no_grad():
                network(candidate)(data(candidate)[0])


# ---------------------------------------------------------------- the truth


def test_differences_are_sharp_where_a_function_is_smooth_and_say_so_where_not() -> None:
    found = differences(lambda t: torch.tensor([math.exp(1 + t), math.sin(2 * t), abs(t), t * t], dtype=torch.float64))
    wanted = [math.e, 0.0, 0.0, 2.0]
    for index in (0, 1, 3):
        assert float(found.second[index]) == pytest.approx(wanted[index], abs=1e-7)
        assert float(found.second_error[index]) < 1e-7
    assert float(found.second_error[2]) > 1  # the kink of |t|
    assert float(found.first[0]) == pytest.approx(math.e, abs=1e-10)


def test_the_truth_does_not_believe_a_gradient_that_is_none() -> None:
    """A reversed gradient: the trace by differences, without a dense Hessian."""
    program = plain(LINEAR, TANH, {"do": "own_gradient", "name": "reversed"}, loss="squared_error of numbers")
    honest = plain(LINEAR, TANH, loss="squared_error of numbers")
    assert comparisons.Truth(honest).dense
    lied = comparisons.Truth(program)
    assert not lied.dense
    torch.testing.assert_close(lied.diagonals, comparisons.Truth(honest).diagonals, atol=1e-7, rtol=1e-7)


# ---------------------------------------------------------------- the fuzzer finds what is wrong


@pytest.mark.parametrize("way", ["sample traces", "hessian", "gauss newton", "margins", "measures of gradients"])
def test_a_number_that_is_off_by_a_thousandth_is_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to measure is made wrong in turn."""
    program = plain(LINEAR, RELU)
    assert not compare(program, [way]).findings
    real: Any = {
        "sample traces": (sl, "sample_traces"),
        "hessian": (sl, "hessian"),
        "gauss newton": (sl, "gauss_newton"),
        "margins": (sl, "margins"),
        "measures of gradients": (comparisons.MEASURES["fisher_rao_norm"], "compute"),
    }[way]
    original = getattr(*real)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if isinstance(found, sl.Operator):
            return sl.Operator(lambda block: 1.001 * (found @ block), found.size, dtype=found.dtype)
        for field in ("values", "signed", "value"):
            if hasattr(found, field):
                changed = copy.copy(found)
                object.__setattr__(changed, field, getattr(found, field) * 1.001)
                return changed
        raise AssertionError(type(found))

    if way == "measures of gradients":
        object.__setattr__(real[0], "compute", wrong)
    else:
        monkeypatch.setattr(*real, wrong)
    try:
        outcome = compare(program, [way])
    finally:
        if way == "measures of gradients":
            object.__setattr__(real[0], "compute", original)
    assert [finding.kind for finding in outcome.findings][:1] == ["wrong"]


def test_a_counterexample_is_shrunk_to_what_makes_it_fail() -> None:
    """Whatever contains a tanh inside a branch fails: all the rest goes."""
    program = plain(
        LINEAR,
        {"do": "branch", "how": "max", "paths": [[RELU, LINEAR], [LINEAR, TANH, LINEAR]]},
        {"do": "residual", "path": [LINEAR]},
        samples=6,
        loss="focal",
    )

    def fails(candidate: Program, ways: list[str]) -> Any:
        found = {"way": "hessian", "kind": "wrong", "said": "1", "truth": "2"}
        return {"findings": [found] if "elementwise tanh" in words(candidate) else []}

    small, _ = fuzz.shrink(program, {"way": "hessian", "kind": "wrong", "said": "", "truth": ""}, fails, 20)
    assert small["steps"] == [TANH]
    assert small["samples"] == 1


def test_an_interpreter_that_dies_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    child = fuzz.Child()
    try:
        threading.Timer(0.3, child.process.kill).start()  # while it still imports torch
        outcome = child.compare(plain(LINEAR), ["hessian"])
        assert outcome["findings"][0]["kind"] == "died"
        monkeypatch.setattr(fuzz, "PATIENCE", 0.0)
        assert child.compare(plain(LINEAR), ["hessian"])["findings"][0]["kind"] == "hangs"
        monkeypatch.setattr(fuzz, "PATIENCE", 120.0)
        outcome = child.compare(plain(LINEAR), ["hessian"])
        assert (outcome["compared"], outcome["findings"]) == (1, [])
    finally:
        child.stop()


def test_every_way_is_tried() -> None:
    outcome_of = {name: compare(plain(LINEAR, RELU), [name]) for name in WAYS if name != "batch statistics"}
    outcome_of["batch statistics"] = compare(plain({"do": "norm", "kind": "batch"}, LINEAR), ["batch statistics"])
    silent = {name for name, outcome in outcome_of.items() if not outcome.compared}
    assert silent == {"nothing is touched"}
    assert not any(outcome.findings for outcome in outcome_of.values())
    assert random_networks.MOST_PARAMETERS < 128  # all eigenvalues come from the dense matrix up to there
