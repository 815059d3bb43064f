"""Two counters: how many wrong arguments, command lines and files were tried, and how many were answered badly.

`make test` tries some of each, drawn with a fixed seed, `make test-full` five thousand; both print how many. A right
answer is one sentence, or a result.
"""

from __future__ import annotations

import collections
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import wrong_commands
import wrong_files
import wrong_values
from reports import report
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel import cli, memory
from spiritlevel.answers import measuring
from spiritlevel.arguments import by_type, checked, names, number
from spiritlevel.cli.measure import write_run
from spiritlevel.errors import InputError, place_of
from spiritlevel.loading import load_weights
from spiritlevel.results import Estimate, Result

pytestmark = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Say something that is seen although the output of tests is not."""

    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text} ")

    return say


def count(failures: dict[str, str]) -> None:
    assert not failures, "\n".join(f"{what}: {how}" for what, how in failures.items())


# ---------------------------------------------------------------- the counters


def test_every_required_argument_has_an_example() -> None:
    """A new public function whose argument has a name of its own gets a line in `wrong_values.GOOD`."""
    unknown = [
        f"{target.name}({name})"
        for target in wrong_values.targets()
        for name, default in target.parameters.items()
        if default is wrong_values.EMPTY and name not in target.good
    ]
    assert set(unknown) <= {
        "Recorder.load(path)",
        "Report.row(name)",
        "Audit.row(measure)",
    }


@pytest.mark.parametrize("tried", [600, pytest.param(5000, marks=pytest.mark.slow)])
def test_wrong_arguments(
    tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[str], None]
) -> None:
    failures = {}
    for index, each in enumerate(wrong_values.tries(tried)):
        (tmp_path / str(index)).mkdir()
        monkeypatch.chdir(tmp_path / str(index))
        if fault := each.failure():
            failures[str(each)] = fault
    told(f"{tried:,} wrong arguments of {len(wrong_values.targets())} functions tried, {len(failures)} answered badly.")
    count(failures)


@pytest.mark.parametrize("tried", [60, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_wrong_command_lines(
    tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[str], None]
) -> None:
    wrong_commands.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    failures = {str(each): fault for each in wrong_commands.tries(tried) if (fault := each.failure())}
    commands = len(list(wrong_commands.commands()))
    told(f"{tried:,} wrong lines of {commands} commands and studies tried, {len(failures)} answered badly.")
    count(failures)


@pytest.mark.parametrize("tried", [50, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_wrong_files(tried: int, tmp_path: Path, told: Callable[[str], None]) -> None:
    failures = {str(each): fault for each in wrong_files.tries(tried) if (fault := each.failure(tmp_path))}
    told(f"{tried:,} changed files tried, {len(failures)} answered badly.")
    count(failures)


def test_the_counters_notice(tmp_path: Path) -> None:
    """A function that lets everything pass or fails as it likes is counted."""

    def careless(size: int) -> list[int]:
        return [0] * size

    target = wrong_values.Target("careless", careless, {}, {"size": wrong_values.EMPTY}, {"size": int})
    faults = {kind: wrong_values.Try(target, "size", kind).failure() for kind in ("a half", "True", "zero", "a class")}
    assert faults["a half"].startswith("TypeError")
    assert faults["True"] == "taken without a word"
    assert not faults["zero"]
    assert wrong_values.fault_of_sentence("two\nlines.")
    with mock.patch.object(cli, "_run", side_effect=KeyError("lost")):
        assert "exit code 70" in wrong_commands.Try(("measures", "trace")).failure()

    def broken(path: Path) -> None:
        raise IndexError

    assert "IndexError" in wrong_files.Try("a file", "", lambda folder: folder, broken).failure(tmp_path)


# ---------------------------------------------------------------- the checkers


def test_numbers_of_every_kind_are_numbers_and_tensors_are_not() -> None:
    assert [number(each, "x") for each in (1, np.float32(0.5), np.int8(3))] == [1.0, 0.5, 3.0]
    for wrong in (math.nan, math.inf, True, "1", torch.tensor(1.0), None, 10**400, 1j):
        with pytest.raises(InputError, match=r"^x must be a finite number, got "):
            number(wrong, "x")
    assert number(math.inf, "x", infinite=True) == math.inf
    with pytest.raises(InputError, match=r"x must be a finite number above 0 and of at most 1, got 2\."):
        number(2, "x", above=0, most=1)


def test_declared_types_are_checked_wherever_they_stand() -> None:
    class Thing:
        @checked
        def method(self, counts: tuple[int, ...] = (), *, where: Path | str | None = None, **more: Any) -> Any:
            return counts, where, more

    assert Thing().method([1, np.int64(2)], where="here", other=1) == ((1, 2), "here", {"other": 1})
    with pytest.raises(InputError, match=r"counts must be a list of whole numbers, got \[0\.5\]"):
        Thing().method([0.5])
    with pytest.raises(InputError, match=r"where must be a path or a string, got 3\."):
        Thing().method(where=3)
    with pytest.raises(InputError, match=r"f must be a function of 2 arguments"):
        by_type(lambda x: x, Callable[[int, int], int], "f")
    with pytest.raises(InputError, match=r"measures must be a name or a list of names, got \[\]"):
        names([], "measures")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, d: sl.hessian(m, d, weight_decay=None), "weight_decay must be a finite number, got None"),
        (lambda m, d: sl.measure(m, d, measures=0.5), "measures must be a string or a list of strings, got 0.5"),
        (lambda m, d: sl.hessian(m, d, params=torch.tensor(2)), "params must be a name or a list of names"),
        (lambda m, d: sl.eigenvalues(sl.hessian(m, d), tol=math.nan), "tol must be a finite number, got nan"),
        (lambda m, d: sl.trace(m, d, seed=torch.ones(2)), "seed must be a whole number.*, got a tensor"),
        (lambda m, d: sl.trace(m, d, per_layer="yes"), "per_layer must be True or False, got 'yes'"),
    ],
)
def test_mistakes_that_were_met(call: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(nn.Linear(2, 3), (torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))


@pytest.mark.parametrize(
    "words",
    [
        "correlation --lr nan",
        "correlation --width nan",
        "affine --points -3",
        "scaling --width 1e400",
        "weight-decay --gammas ",
        "rescaling --betas ",
    ],
)
def test_studies_refuse_numbers_that_are_none(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, option, value = words.split(" ", 2)
    assert cli.main(["reproduce", study, "--scale", "smoke", "--out", str(tmp_path), option, value]) == 2
    assert f"{option} must " in capsys.readouterr().err


# ---------------------------------------------------------------- files of others


@pytest.mark.parametrize("kind", sorted(wrong_files.strange_weights()))
def test_strange_weights_are_refused_or_fit(kind: str, tmp_path: Path) -> None:
    (tmp_path / "strange.pt").write_bytes(wrong_files.strange_weights()[kind]())
    model, message = nn.Linear(3, 2), ""
    try:
        load_weights(model, tmp_path / "strange.pt")
    except InputError as error:
        message = str(error)
    assert not message or not wrong_values.fault_of_sentence(message)
    assert message or model(torch.ones(1, 3)).shape == (1, 2)


NOTHING = {"type": "tensor", "dtype": "float64", "shape": [0], "data": []}


def _set(content: Any, path: str, value: Any) -> None:
    *places, last = path.split(".")
    for place in places:
        content = content[int(place) if isinstance(content, list) else place]
    content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("margins.signed.shape", [12, 2], "signed needs one row|differ in length"),
        ("predicted.data", [0], "damaged|differ in length"),
        (
            "spectrum.largest.values",
            {"type": "tensor", "dtype": "float64", "shape": [0], "data": []},
            "differ in length",
        ),
        ("fits.train.accuracy.value", 7, "an accuracy must lie between 0 and 1, but here it is 7"),
        ("pictures.indices.data", [0, 1, 2, 2**40], "it shows a picture of sample 1099511627776, but has 24 samples"),
        ("pictures.groups.sharpest", [2**40], "the group 'sharpest' names pictures that are not there"),
        ("pictures.images.shape", [4, 2, 28, 14], "its pictures need 1 or 3 channels of bytes"),
        ("landscape.steps", [], "differ in length"),
        ("landscape.steps.0.data", [*range(16), 1e308], "its steps are too long to be drawn"),
        ("spectrum.density.weights.data", [1e308] * 120, "its weights, the shares of a spectrum, do not all lie"),
        ("settings", "nonsense", "expected dict, got str"),
    ],
)
def test_an_edited_report_is_not_a_whole_report(path: str, value: Any, message: str) -> None:
    content = report(24, pictured=4).to_dict()
    _set(content, path, value)
    with pytest.raises(InputError, match=message):
        Result.from_json(json.dumps(content))


def test_margins_that_no_axis_holds_are_refused() -> None:
    content = report(24, pictured=4).to_dict()
    content["margins"]["signed"]["data"][0] = 1e308
    with pytest.raises(InputError, match=r"this is not a whole Report: margins beyond 1e\+30 cannot be drawn"):
        Result.from_json(json.dumps(content))


def test_a_page_of_other_numbers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kill between two renames can leave numbers and page of different age."""
    first, second = (report(24, pictured=4, name=name) for name in ("first", "second"))
    value = Estimate(1.0, 0.1, dof=15)  # read back as 15.0
    write_run(replace(first, rows=(replace(first.rows[0], value=value), *first.rows[1:])), tmp_path / "run")
    for place in ("page.html", "run/report.html", "page.html"):  # the second is what the sentence below recommends
        assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / place)]) == 0
        assert "does not match" not in capsys.readouterr().err
    second.to_json(tmp_path / "run" / "report.json")
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "report.html does not match the numbers beside it" in capsys.readouterr().err


# ---------------------------------------------------------------- models of others


class Unspeakable(Exception):
    """Fails even to say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Failing(nn.Module):
    """Does something that a model should not do."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(2, 3), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner(x))


def _used(measure: Callable[..., Any], model: nn.Module, data: Any) -> None:
    found = measure(model, data)
    if isinstance(found, sl.Operator):
        found @ torch.ones(found.size)


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda out: _raise(Unspeakable()),
            r"fails on inputs of shape .*: Unspeakable: .*test_wrong\.py, line \d+",
        ),
        (lambda out: _raise(KeyError("width")), r"fails on inputs .*KeyError: 'width' \(test_wrong\.py, line \d+\)"),
        (lambda out: _raise(SystemExit(3)), r"fails on inputs of shape .*: SystemExit: 3"),
        (lambda out: out.argmax(1), "outputs"),
        (lambda out: out.round().long(), "whole numbers|outputs"),
        (lambda out: out.to_sparse(), "sparse|outputs"),
    ],
    ids=["no words", "key error", "exit", "classes", "whole numbers", "sparse"],
)
def test_a_model_that_fails_is_named(how: Callable[[Tensor], Any], message: str) -> None:
    data = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    for measure in (sl.trace, sl.margins, sl.hessian):
        with pytest.raises(InputError, match=message) as caught:
            _used(measure, Failing(how), data)
        assert not wrong_values.fault_of_sentence(str(caught.value))


def test_the_place_of_an_error_is_a_line_of_the_user() -> None:
    with pytest.raises(ValueError, match="here") as caught:
        _raise(ValueError("here"))
    assert place_of(caught.value).startswith(" (test_wrong.py, line ")
    assert not place_of(ValueError("nowhere"))


# ---------------------------------------------------------------- no memory


def _no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to")


@pytest.mark.parametrize("step", ["audit_in", "spectrum", "landscape_in"])
@pytest.mark.parametrize("error", [_no_memory, mock.Mock(side_effect=MemoryError)], ids=["torch", "python"])
def test_a_step_without_memory_is_left_out_and_the_rest_is_kept(
    step: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, step, error)
    found = sl.measure(nn.Linear(2, 3), (torch.randn(6, 2), torch.arange(6) % 3), measures=["trace"])
    assert [row.name for row in found.rows] == ["trace"]
    assert "there was not enough memory for it" in found.left_out[step.removesuffix("_in")]


def test_what_would_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_memory", lambda device: 100)
    monkeypatch.setattr(measuring, "spectrum", mock.Mock(side_effect=AssertionError("begun")))
    found = sl.measure(nn.Linear(2, 3), (torch.randn(6, 2), torch.arange(6) % 3), measures=["trace"])
    assert "vectors of 9 numbers" in found.left_out["spectrum"]
    assert "needs about" in found.left_out["landscape"]
    assert found.rows[0].value.exact


@pytest.mark.parametrize(
    "ask",
    [
        lambda op: sl.eigenvalues(op),
        lambda op: sl.spectral_norm(op, max_matvecs=40),
        lambda op: sl.spectral_density(op),
        lambda op: sl.spectrum(op),
        lambda op: op.dense(),
    ],
    ids=["eigenvalues", "norm", "density", "spectrum", "dense"],
)
def test_estimators_say_what_they_would_need_before_they_ask(
    ask: Callable[[sl.Operator], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that gives more than it has ends the process later, without a word."""
    monkeypatch.setattr(memory, "available_memory", lambda: 10**8)
    op = sl.Operator(mock.Mock(side_effect=AssertionError("begun")), 2_000_000)
    sentence = r"not enough memory for a .*: it needs about [\d,.]+ GB, but 0\.1 GB are free"
    with pytest.raises(InputError, match=sentence):
        ask(op)


def test_a_picture_of_a_far_sample_takes_no_list_of_all_before_it() -> None:
    """It was a list of as many numbers: 2.3 GB for one place in a file of 41 kB."""
    content = report(24, pictured=4).to_dict() | dict.fromkeys(("margins", "traces", "predicted", "indices"))
    content["pictures"]["indices"]["data"] = [1, 2, 3, 2**40]
    text = Result.from_json(json.dumps(content)).to_html()
    assert str(2**40) in text


def test_the_command_line_says_that_memory_is_short(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cli, "_run", mock.Mock(side_effect=MemoryError))
    assert cli.main(["measures"]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_names_in_the_counters_are_different() -> None:
    for kinds in (list(wrong_values.WRONG), list(wrong_commands.WRONG)):
        assert len(kinds) >= 30
        assert not [name for name, times in collections.Counter(kinds).items() if times > 1]
