from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli import base
from spiritlevel.errors import InputError

COMMANDS = [["demo"], ["claims"], ["data"], ["data", "list"], ["data", "get"], ["data", "path"]]


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "spiritlevel", *args], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"For example: spiritlevel {command[0]}" in text
    if command != ["data"]:
        assert all(option in text for option in ("--json FILE", "--seed INT", "--debug"))


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_lists_the_commands_that_work_and_no_others(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 0
    assert "usage: spiritlevel [-h] {demo,claims,data}" in capsys.readouterr().out


def test_help_is_quick_and_does_without_torch() -> None:
    code = "import sys; from spiritlevel.cli import main; main(['--help']); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.endswith("False\n")
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        assert run("--help").returncode == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"spiritlevel {sl.__version__}\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["dmo"], "Unrecognized options: dmo. Available subcommands: "),
        (["demo", "--sede", "1"], "Unrecognized options: --sede"),
        (["demo", "--seed", "one"], "--seed: invalid literal for int"),
        (["demo", "--epochs", "0"], "demo needs at least 1 epoch, got 0."),
        (["demo", "--points", "6001"], "demo measures 1 to 6000 training images, got --points 6001."),
        (["data"], "Expected one of {list, get, path}"),
        (["data", "get"], "NAME"),
        (["data", "get", "mnits"], "unknown data set 'mnits': did you mean 'mnist'"),
        (["data", "path", "fashion"], "did you mean 'fashion-mini'"),
        (["data", "list", "--json", "."], "--json needs the path of a file that can be written, got '.'"),
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
    assert streams.err.count("\n") == 1
    assert streams.err.startswith("spiritlevel: ")
    assert sentence in streams.err


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
    assert list(file.parent.iterdir()) == [file]


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


def test_demo_learns_measures_and_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        args = ["demo", "--epochs", "1", "--points", "600", "--seed", "3", "--json", str(tmp_path / name)]
        assert cli.main(args) == 0
        texts.append((tmp_path / name).read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert found["traces"] == {"exact": True, "backward passes": 9}
    whole, right, wrong, test = found["measures"].values()
    assert test["accuracy"] > 0.6
    assert test["smallest output margin"] < 0
    assert right["samples"] + wrong["samples"] == whole["samples"] == 600
    for row in found["measures"].values():
        assert 0 < row["last layer's share"] < 1
        assert row["trace and ACEHT"]["low"] < row["trace and ACEHT"]["r"] < row["trace and ACEHT"]["high"]
    total = sum(part["samples"] * part["mean Hessian trace"] for part in (right, wrong))
    assert total / 600 == pytest.approx(whole["mean Hessian trace"])
    assert right["trace and margin"]["spearman"] < -0.5
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("accuracy", "mean output margin", "r(trace, ACEHT)", "exact, no sampling"))
    assert "Among correct images the curvature falls with the margin" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_demo_says_null_and_why_where_a_number_is_undefined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--epochs", "1", "--points", "1", "--json", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["measures"]
    assert found["train"]["trace and ACEHT"]["r"] is None
    assert found["train"]["trace and ACEHT"]["reason"] == "r needs at least 3 points, there is 1"
    (empty,) = [row for row in found.values() if row["samples"] == 0]
    assert empty["reason"] == "there are no such samples"
    assert empty["mean Hessian trace"] is None
    assert "Too few images were measured to say more." in capsys.readouterr().out


@pytest.mark.slow
def test_control_c_stops_the_demo_with_one_line() -> None:
    command = [sys.executable, "-m", "spiritlevel", "demo", "--epochs", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, b"", b"spiritlevel: interrupted.\n")
