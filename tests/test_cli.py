from __future__ import annotations

import ast
import io
import itertools
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli import base, show
from spiritlevel.cli.measures import describe, to_markdown
from spiritlevel.cli.show import show_report
from spiritlevel.errors import InputError
from spiritlevel.loading import load_model, load_weights
from spiritlevel.papers.training import Recipe, fit
from spiritlevel.results import figure

COMMANDS = [
    ["demo"],
    ["measure"],
    ["compare"],
    ["audit"],
    ["plot"],
    ["report"],
    ["claims"],
    ["measures"],
    ["data"],
    ["data", "list"],
    ["data", "get"],
    ["data", "path"],
]


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "spiritlevel", *args], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"For example: spiritlevel {command[0]}" in text
    if command != ["data"]:
        assert all(option in text for option in ("--json FILE", "--debug"))
    draws = command[0] in ("demo", "measure", "compare", "audit", "plot", "claims")
    assert ("--seed INT" in text) == draws  # where nothing is random there is no seed
    assert "(default: )" not in text


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_lists_the_commands_that_work_and_no_others(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 0
    assert (
        "{demo,measure,compare,perturb,rank,audit,samples,plot,reproduce,claims,measures,data,report}"
        in capsys.readouterr().out
    )


def test_help_is_quick_and_does_without_torch_and_numpy() -> None:
    code = "import sys; from spiritlevel.cli import main; main(['--help']); print({'torch', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("set()\n")
    seconds = []
    for _ in range(3):  # time of the processor, which other work on the machine does not lengthen
        begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        assert run("--help").returncode == 0
        seconds.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - begin)
    assert 0 < min(seconds) < 0.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"spiritlevel {sl.__version__}\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["dmo"], "unknown command 'dmo': did you mean 'demo'?"),
        (["mesure", "mlp", "--data", "digits"], "unknown command 'mesure': did you mean 'measure'"),
        (["--seed", "1", "demo"], "the command comes first, then its options, got '--seed'"),
        (["data", "lst"], "unknown command 'lst': did you mean 'list'?"),
        (["measure", "mlp", "--data", "digits", "--measures", "trace", "path_norm"], "--measures takes one list, with"),
        (
            ["compare", "mlp", "mlp", "--data", "digits", "--weights", "a.pt"],
            "--weights takes FILE FILE, got a.pt. See",
        ),
        (["measure", "net.py", "--data", "digits"], "lacks the function that makes it: write net.py:function."),
        (
            ["demo", "--sede", "1"],
            "unknown option '--sede': did you mean '--seed'? See `spiritlevel demo --help`.",
        ),
        (["measure", "--version"], "unknown option '--version'. See `spiritlevel measure --help`."),
        (
            ["measure", "mlp", "--weight", "a.pt", "--data", "digits"],
            "did you mean '--weights'? See `spiritlevel measure",
        ),
        (["demo", "--seed", "one"], "--seed takes a whole number, got 'one'. See `spiritlevel demo --help`."),
        (["measure", "mlp", "--data", "digits", "--samples", "abc"], "--samples takes a whole number, got 'abc'. See"),
        (["measure", "mlp", "--data", "digits", "--time-limit", "x"], "--time-limit takes a number, got 'x'. See"),
        (["data", "list", "--json"], "--json takes FILE, got nothing. See `spiritlevel data list --help`."),
        (["demo", "--seed", "-1"], "--seed must be a whole number from 0 to 4,000,000,000, got -1."),
        (["claims", "--seed", str(10**30)], "--seed must be a whole number from 0 to 4,000,000,000, got 1000"),
        (["measure", "mlp", "--data", "digits", "--seed", "-1"], "--seed must be a whole number from 0 to"),
        (["measure"], "spiritlevel: MODEL and --data DATA must be given. See `spiritlevel measure --help`."),
        (["measures", "trce"], "unknown measure 'trce': did you mean 'trace'"),
        (["measure", "mlp:inputs=64,classes=1", "--data", "digits"], "use --loss binary_cross_entropy for a single"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--loss", "mse"], "did you mean 'squared_error'?"),
        (["demo", "--epochs", "0"], "demo needs --epochs from 1 to 1,000,000, got 0."),
        (["demo", "--samples", "0"], "demo measures at least 1 training image, got --samples 0."),
        (
            ["demo", "--data", "digits"],
            "demo needs images of 28×28 or 32×32 pixels, but digits has another size",
        ),
        (["demo", "--out", "pyproject.toml"], "--out needs a folder, but 'pyproject.toml' is a file."),
        (["measure", "--data", "digits"], "MODEL"),
        (["measure", "lenet", "--data", "digits"], "did you mean 'lenet5'?"),
        (["measure", "lenet5", "--data", "digit"], "did you mean 'digits'?"),
        (["measure", "lenet5", "--data", "digits"], "the model Sequential fails on inputs of shape (2, 1, 8, 8)"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--measures", "trce"], "did you mean 'trace'?"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--samples", "0"], "--samples must be a whole number"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--batch-norm", "evil"], "did you mean 'eval'?"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--loss", "crossentropy"], "did you mean 'cross_entropy'"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--weights", "none.pt"], "there is no file 'none.pt'."),
        (["measure", "mlp:inputs=64,classes=4", "--data", "digits"], "has 10 classes (0, 1, 2, ...) but the model has"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--time-limit", "-1"], "--time-limit must be a positive"),
        (["compare", "mlp:inputs=64", "mlp", "--data", "digits"], "fails on inputs of shape"),
        (["measure", "mlp:inputs=64", "--data", "digits", "--memory", "lots"], "--memory must be a number of bytes"),
        (["audit", "mlp:inputs=64", "--data", "digits", "--batch-size", "0"], "--batch-size must be a whole number"),
        (["compare", *["mlp:inputs=64"] * 2, "--data", "digits", "--params", "9"], "unknown parameter '9'. Known: "),
        (["measure", "mlp:inputs=64", "--data", "digits", "--measures", ","], "--measures names no measure"),
        (["audit", "mlp:inputs=64", "--data", "digits", "--transforms", "rescale"], "unknown transform 'rescale'"),
        (["demo", "--epochs", "999999999999"], "demo needs --epochs from 1 to 1,000,000, got 999999999999."),
        (["measure", "mlp:inputs=64", "--data", "digits", "--device", "hpu"], "cannot be moved to device 'hpu'"),
        (["report", "nowhere"], "'nowhere' is not a run folder: there is no file 'nowhere'"),
        (["report", "tests"], "there is no file 'tests/report.json'"),
        (["report", "pyproject.toml"], "pyproject.toml is not a run"),
        (["data"], "data needs one of list, get, path. See `spiritlevel data --help`."),
        (["data", "list", "--seed", "1"], "unknown option '--seed'"),
        (["data", "get"], "NAME"),
        (["data", "get", "mnits"], "unknown data set 'mnits': did you mean 'mnist'"),
        (["data", "path", "fashion"], "did you mean 'fashion-mini'"),
        (["data", "list", "--json", "."], "--json needs the path of a file that can be written, got '.'"),
        (["data", "list", "--json", "/proc/x/y"], "nothing can be made in '/proc'"),  # looks writable, takes nothing
        (["measure", "mlp", "--data", "digits", "--out", "/proc/x"], "nothing can be made in '/proc'"),
        (
            ["measure", "mlp", "--data", "digits", "--out", "page.html"],
            "is named like a file; write --out 'page'",
        ),
        (["data", "list", "--json", "pyproject.toml/x"], "--json needs the path of a file that can be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert cli.main(args) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.endswith("\n")
    (said,) = [line for line in streams.err.splitlines() if not line.endswith(" s)")]  # a busy machine says how far
    assert said.startswith("spiritlevel: ")
    assert sentence in said


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "path", "mnits", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_data_list_names_every_set_and_writes_strict_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "list.json"
    assert cli.main(["data", "list", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in sl.data.names())
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [row["name"] for row in found["data"]] == list(sl.data.names())
    assert found["version"] == sl.__version__
    assert found["command"] == "data list"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("width", [80, 140])
def test_the_list_of_data_sets_breaks_no_line(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert sum("CC BY-SA 3.0, Y. LeCun and C. Cortes" in line for line in lines) == 1
    assert sum("built-in" in line for line in lines) == 2


def test_data_get_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sl.data, "fetch", lambda name, progress: tmp_path / name)
    assert cli.main(["data", "get", "mnist"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mnist'}\n"
    monkeypatch.setattr(sl.data, "path", lambda name: tmp_path / name)
    assert cli.main(["data", "path", "mnist"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mnist'}\n"


def test_data_path_of_a_missing_set_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sl.data, "path", lambda name: None)
    assert cli.main(["data", "path", "mnist", "--json", str(tmp_path / "out.json")]) == 1
    assert "`spiritlevel data get mnist` fetches it." in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())["path"] is None


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "spiritlevel: interrupted.\n"),
        (InputError("a sentence\nin two lines."), 2, "spiritlevel: a sentence in two lines.\n"),
        (PermissionError(13, "Permission denied", "cache"), 2, "spiritlevel: Permission denied: cache.\n"),
        (RuntimeError("oops"), 70, "this is a bug in spiritlevel"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(sl.data, "describe", fail)
    assert cli.main(["data", "list"]) == code
    assert text in capsys.readouterr().err


def test_nothing_is_written_when_the_result_is_not_strict_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.data.DataList, "run", lambda self: base.Outcome({"x": float("nan")}))
    assert cli.main(["data", "list", "--json", str(tmp_path / "out.json")]) == 70
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "spiritlevel", "data", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (141, b"")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "patience", "shown"), [(Terminal, 0, 1), (Terminal, 60, 0), (io.StringIO, 0, 0)])
def test_progress_only_beyond_the_patience_and_on_a_terminal(
    stream: type[io.StringIO], patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(base.ProgressBar, "PATIENCE", patience)
    with base.ProgressBar() as progress:
        for step in range(3):
            progress("weighing", step, 3)
        progress("of unknown length", 5, 0)
    assert ("weighing" in sys.stderr.getvalue()) == bool(shown)  # type: ignore[attr-defined]


def test_narrow_terminals_cut_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for width in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["data", "list"]) == 0
        shown = capsys.readouterr().out
        assert "60,000" in shown
        assert "10,000" in shown
        assert max(map(len, shown.splitlines())) <= width


def test_names_are_broken_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    table = show.columns("measure", "value", right=(1,))
    table.add_row(show.Name("adaptive_sharpness_average"), "123,456,789")
    table.add_row(show.Name("a" * 30), "1")  # a word that is too long for a line is cut
    show.print_table(base.console(), table)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "─" not in line and line.strip()]
    assert lines[:3] == [["measure", "value"], ["adaptive_", "123,456,789"], ["sharpness_"]]
    assert "".join(line[0] for line in lines[3:]) == "average" + "a" * 30


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock = io.StringIO(), [0]
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr("spiritlevel.cli.base.time.monotonic", lambda: clock[0])
    with base.ProgressBar() as progress:
        for clock[0] in range(0, 25, 5):
            progress(f"training: loss 0.{clock[0]}", 100 + clock[0], 1000)  # it went on from 100 that were there
        for clock[0] in range(200, 215, 5):
            progress("measuring", 0, 0)
    assert log.getvalue().splitlines() == [
        "spiritlevel: training: loss 0.10, 110 of 1,000 (10 s, about 14 min left)",
        "spiritlevel: training: loss 0.20, 120 of 1,000 (20 s, about 14 min left)",
        "spiritlevel: measuring (3 min)",
        "spiritlevel: measuring (3 min)",
    ]


def test_a_log_gets_lines_while_the_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(base.ProgressBar, "BETWEEN_LINES", 0.02)
    with base.ProgressBar() as progress:
        progress("a long product", 1, 3)
        end = time.monotonic() + 20
        while log.getvalue().count("\n") < 3 and time.monotonic() < end:
            time.sleep(0.01)
    lines = log.getvalue().splitlines()
    assert len(lines) >= 3
    assert {line[:40] for line in lines} == {"spiritlevel: a long product, 1 of 3 (0 s)"[:40]}


def test_the_bar_begins_anew_where_other_things_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(base.ProgressBar, "PATIENCE", 0)
    with base.ProgressBar() as progress:
        progress("training", 65, 100)
        assert progress._bar is not None
        bar, drawn = progress._bar, []
        (task,) = bar.tasks
        again = bar.reset
        reset = lambda *args, **more: (again(*args, **more), drawn.append((task.description, task.completed)))  # noqa: E731
        monkeypatch.setattr(bar, "reset", reset)
        progress("trace", 1, 14)
        assert drawn == [("trace", 1)]  # never the old name with nothing done, which looks like a fresh start
        assert (task.description, task.completed, task.total) == ("trace", 1, 14)


NET = """
from torch import nn
def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's own model, two sets of weights and data."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "net.py").write_text(NET)
    digits = sl.data.load("digits")
    for name, steps in (("early", 5), ("late", 200)):
        model = load_model(f"{folder}/net.py:small")
        fit(model, digits.train, Recipe(optimizer="adam", lr=0.01, steps=steps))
        save_file(model.state_dict(), folder / f"{name}.safetensors")
    np.savez_compressed(folder / "train.npz", x=digits.train[0][:300].numpy(), y=digits.train[1][:300].numpy())
    np.savez_compressed(folder / "test.npz", x=digits.test[0].numpy(), y=digits.test[1].numpy())
    return folder


def test_numbers_are_never_cut(own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(own)
    args = ["measure", "net.py:small", "--weights", "late.safetensors", "--data", "train.npz", "--out", "narrow"]
    args += ["--samples", "60", "--measures", "trace,largest_eigenvalue,adaptive_sharpness_average,path_norm"]
    assert cli.main(args) == 0
    report, shown = sl.Report.from_json(own / "narrow" / "report.json"), capsys.readouterr().out
    for width in (60, 30):
        monkeypatch.setenv("COLUMNS", str(width))
        show_report(report)
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert all(figure(row.value.value, 4) in shown for row in report.rows)
        assert "unknown" in shown


def test_measures_are_listed_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["measures", "--json", str(tmp_path / "all.json")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in sl.measures.MEASURES)
    rows = {row["measure"]: row for row in json.loads((tmp_path / "all.json").read_text())["measures"]}
    assert set(rows) == set(sl.measures.MEASURES)
    worth = {
        name: rows[name]["value"] for name in ("ball_sharpness", "quotient_norm", "average_sharpness", "margin_min")
    }
    assert list(worth.values()) == ["lower bound", "to a tolerance", "estimated", "exact"]
    assert cli.main(["measures", "path_norm"]) == 0
    assert f"formula: {sl.measures.MEASURES['path_norm'].formula}" in capsys.readouterr().out


def test_what_a_measure_is_worth_is_what_is_found(own: Path) -> None:
    digits = sl.data.load("digits")
    cheap = [each.name for each in sl.measures.MEASURES.values() if each.cost in ("forward", "backward")]
    data = digits.train[0][:50], digits.train[1][:50]
    model = load_model(f"{own}/net.py:small", own / "late.safetensors")
    rows = [row for row in sl.measures.evaluate(model, data, measures=cheap) if row["kind"] != "undefined"]
    assert len(rows) > 25
    for row in rows:
        said = {"converged": "to a tolerance"}.get(row["kind"], row["kind"])
        assert said in describe(sl.measures.MEASURES[row["name"]])["value"], row["name"]


def test_the_page_of_measures_is_up_to_date() -> None:
    page = Path(__file__).parents[1] / "docs" / "measures.md"
    assert page.read_text(encoding="utf-8") == to_markdown()


def test_measure_compare_and_report_end_in_pages(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own)
    measures = "trace,largest_eigenvalue,margin_mean,path_norm"
    for name in ("early", "late"):
        args = ["measure", "net.py:small", "--weights", f"{name}.safetensors", "--data", "train.npz", "--test"]
        args += ["test.npz", "--out", name, "--samples", "80", "--measures", measures, "--json", f"{name}.json"]
        assert cli.main(args) == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in ("a random subset of 80 of 300", "moves ≥ ×", "stays", "It classifies"))
        assert max(map(len, shown.splitlines())) <= 80
        report = sl.Report.from_json(own / name / "report.json")
        assert report.settings["train data"] == "train.npz"
        assert report.traces is not None
        assert len(report.traces) == 80
        assert (own / name / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
        written = json.loads((own / f"{name}.json").read_text())
        assert (written["command"], written["report"]["type"]) == ("measure", "Report")
    assert cli.main(["report", "early", "late.json", "--out", "both.html"]) == 0  # a folder, and what --json wrote
    page = (own / "both.html").read_text(encoding="utf-8")
    assert "early.safetensors" in page
    assert "late.safetensors" in page
    models = ["net.py:small", "net.py:small", "--weights", "early.safetensors", "late.safetensors"]
    assert cli.main(["compare", *models, "--data", "test.npz", "--measures", measures, "--out", "pair"]) == 0
    shown = capsys.readouterr().out
    assert "Trust late: it classifies" in shown
    assert "(×" in shown
    assert "…" not in shown  # nothing is cut off
    assert max(map(len, shown.splitlines())) <= 80
    assert sl.Comparison.from_json(own / "pair" / "report.json").names == ("early", "late")


def test_audit_shows_what_stays(own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    args = ["audit", "net.py:small", "--weights", "late.safetensors", "--data", "test.npz", "--samples", "50"]
    assert cli.main([*args, "--measures", "trace,path_norm", "--transforms", "rescale_layers"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("net.py:small (late.safetensors): ")  # as measure heads its table
    assert "parameters, 50 of 360 samples" in shown
    assert "trace can be moved at least" in shown
    assert any(line.split()[:1] == ["path_norm"] and line.split()[-1] == "=" for line in shown.splitlines())


def test_chosen_parameters_are_measured_in_batches_of_the_size_that_is_asked_for(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own)
    args = ["--data", "test.npz", "--measures", "trace", "--memory", "50MB", "--batch-size", "32"]
    args += ["--params", "*.bias", "--samples", "60", "--json"]
    for command in (["measure"], ["audit", "--transforms", "shift_logits"], ["compare", "net.py:small"]):
        assert cli.main([*command, "net.py:small", *args, f"{command[0]}.part"]) == 0
    capsys.readouterr()
    report, audit, comparison = (
        json.loads((own / f"{name}.part").read_text(encoding="utf-8"))[key]
        for name, key in (("measure", "report"), ("audit", "audit"), ("compare", "comparison"))
    )
    assert report["layers"].keys() == {"1.bias", "3.bias"}
    value = report["rows"][0]["value"]["value"]
    assert value == pytest.approx(audit["rows"][0]["before"]["value"], rel=1e-6)
    assert [row["a"]["value"] for row in comparison["rows"] if row["name"] == "trace"] == [pytest.approx(value)]


def test_an_interrupt_leaves_a_page_that_says_so(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: base.ProgressBar, what: str, done: int, total: int) -> None:
        if what == "largest_eigenvalue":
            raise KeyboardInterrupt

    monkeypatch.chdir(own)
    monkeypatch.setattr(base.ProgressBar, "__call__", interrupt)
    args = ["measure", "net.py:small", "--data", "train.npz", "--measures", "trace,largest_eigenvalue"]
    assert cli.main([*args, "--out", str(tmp_path), "--samples", "20"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("spiritlevel: interrupted at step ")
    assert said.endswith("the page holds what had been measured by then.\n")
    assert said.count("\n") == 1
    assert "interrupted at step" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sl.Report.from_json(tmp_path / "report.json").row("trace").value.value > 0


def test_damaged_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    for content in (
        '{"type": "Report"}',
        '{"type": "Report", "name": 1, "rows": 2}',
        '{"type": "Estimate", "value": 1}',
        "[]",
        '{"command": "data list", "data": []}',
        '{"command": "audit", "audit": {"type": "Estimate", "value": 1}}',
    ):
        file.write_text(content)
        assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2, content
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "Shown" not in said
    assert not (tmp_path / "page.html").exists()


def test_demo_learns_and_ends_in_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["demo", "--data", "fashion-mini", "--epochs", "1", "--samples", "40", "--seed", "3", "--out", str(tmp_path)]
    assert cli.main(args) == 0
    report = sl.Report.from_json(tmp_path / "report.json")
    assert report.fits["test"].accuracy.value > 0.6
    assert report.row("trace").kind == "exact"
    assert report.left_out == {}
    shown = capsys.readouterr().out
    assert f"The page: {tmp_path}" in shown.replace("\n", "")
    assert load_weights(sl.models.lenet5(), tmp_path / "lenet5.safetensors") == ""
    assert "Among correct samples the curvature falls with the margin" in " ".join(shown.split())


@pytest.mark.slow
def test_control_c_stops_the_demo_with_one_line() -> None:
    command = [sys.executable, "-m", "spiritlevel", "demo", "--data", "fashion-mini", "--epochs", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, b"", b"spiritlevel: interrupted.\n")


def test_the_help_of_an_option_is_one_flowing_text() -> None:
    """Line breaks of a docstring below a field would be kept on the screen; a longer text is given as `help=`."""
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field, below in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert "\n" not in ast.literal_eval(below.value), f"{path.name}:{below.lineno}"
