"""Streams that cannot show every letter, names that mean mischief, disks without room, signals to end."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from reports import comparison, report

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli import measure as measure_command
from spiritlevel.cli import show
from spiritlevel.cli.measure import Measure
from spiritlevel.cli.streams import forgiving

MEASURE = ["measure", "mlp:inputs=48,classes=2", "--measures", "trace,path_norm"]


def images(folder: Path, *names: bytes) -> Path:
    for name in names:
        place = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
        place.mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 6), 60 * number).save(place / f"{number}.png")
    return folder


# ---------------------------------------------------------------- encodings


class Output:
    """Standard output in an encoding of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self.bytes, self.encoding = io.BytesIO(), encoding
        self.stream = io.TextIOWrapper(self.bytes, encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, "stdout", self.stream)

    @property
    def text(self) -> str:
        self.stream.flush()
        return self.bytes.getvalue().decode(self.encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("args", [["measures"], ["measures", "path_norm"], ["data", "list"], ["--help"]], ids=" ".join)
def test_tables_print_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, args: list[str]) -> None:
    output = Output(monkeypatch, encoding)
    assert cli.main(args) == 0
    assert len(output.text) > 200
    assert output.stream.errors == "strict", "and the stream is left as it was"


def test_reports_and_comparisons_print_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(monkeypatch, "ascii")
    with forgiving():
        show.show_report(report(30, name="réseau λ₁ 木 caf\udce9"))
        show.show_comparison(dataclasses.replace(comparison(), names=("café 木", "b")))
    assert r"reseau lambda1 ? caf\xe9: 61,706 parameters" in output.text
    assert "+- (95%)" in output.text


def test_a_real_process_with_ascii_output_ends_well() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "spiritlevel", "measures", "path_norm"], env=environment, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_class_folders_whose_names_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found after the whole measurement, by the first file or line that could not be written."""
    folder = images(tmp_path / "pictures", b"caf\xe9", b"\x1b[31mtea")
    args = [*MEASURE, "--data", str(folder), "--out", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")]
    assert cli.main(args) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert sl.Report.from_json(tmp_path / "run" / "report.json").classes == (r"\x1b[31mtea", r"caf\xe9")
    assert r"caf\xe9" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


# ---------------------------------------------------------------- names


def test_no_name_reaches_a_terminal_as_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b]0;title\x07\x1b[31m\u202enet"
    show.show_report(report(30, name=bad, left_out={bad: bad}, headline=(bad,), partial=bad))
    show.show_comparison(dataclasses.replace(comparison(), names=(bad, "b")))
    shown = "".join(capsys.readouterr().out.split())
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert shown.count(r"\x1b]0;title\x07\x1b[31m\u202enet") >= 4
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", bad]) == 2
    report(30, name=bad).to_json(tmp_path / "run" / "report.json")
    assert cli.main(["report", "run", "--out", f"{bad}.html"]) == 0
    streams = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e"} & set(streams.out + streams.err)


def test_a_page_does_not_overwrite_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run" / "report.json"
    report(30).to_json(file)
    before = file.read_bytes()
    for run in (file.parent, file):
        assert cli.main(["report", str(run), "--out", str(file)]) == 2
        assert "is the run itself" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (None, None),
        ("all", "all"),
        ("trace,all", "all"),
        ("default", list(sl.measures.DEFAULT)),
        ("weight_norm, default", ["weight_norm", *(name for name in sl.measures.DEFAULT if name != "weight_norm")]),
        ("trace,trace", ["trace"]),
    ],
)
def test_default_is_a_name_for_measures(asked: str | None, names: object) -> None:
    """It was unknown, with the advice to try 'default'."""
    assert Measure(model="mlp", data="digits", measures=asked).names == names


# ---------------------------------------------------------------- a full disk


def test_numbers_are_shown_though_the_page_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(measure_command, "write_run", full)
    folder = images(tmp_path / "pictures", b"a", b"b")
    assert cli.main([*MEASURE, "--data", str(folder), "--out", str(tmp_path / "run")]) == 2
    streams = capsys.readouterr()
    assert "trace" in streams.out
    assert "The page" not in streams.out
    assert streams.err == "spiritlevel: No space left on device.\n"


# ---------------------------------------------------------------- signals

NET = """
import os, signal
from torch import nn
class Net(nn.Sequential):
    calls = 0
    def forward(self, x):
        Net.calls += 1
        if Net.calls == 40:
            os.kill(os.getpid(), signal.{name})
        return super().forward(x)
def make():
    return Net(nn.Flatten(), nn.Linear(48, 2))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_both_signals_leave_the_page_of_what_is_done(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "net.py").write_text(NET.format(name=name))
    images(tmp_path / "pictures", b"a", b"b")
    command = [sys.executable, "-m", "spiritlevel", "measure", "net.py:make", "--data", "pictures", "--out", "run"]
    command += ["--measures", "trace,largest_eigenvalue"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    *progress, last = done.stderr.splitlines()  # on a busy machine there is a line of it every ten seconds
    assert last.startswith("spiritlevel: interrupted at step ")
    assert all(line.startswith("spiritlevel: ") and line.endswith(" s)") for line in progress)
    assert "interrupted at step" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert sl.Report.from_json(tmp_path / "run" / "report.json").partial


TWICE = """
import os, signal, time
from spiritlevel.cli.streams import Signals
with Signals() as signals:
    try:
        os.kill(os.getpid(), signal.SIG{first})
        time.sleep(60)
    except KeyboardInterrupt:
        print(signals.received, flush=True)
        os.kill(os.getpid(), signal.SIG{second})
        time.sleep(60)
"""


@pytest.mark.parametrize(("first", "second"), [("TERM", "TERM"), ("INT", "TERM"), ("TERM", "INT")])
def test_a_second_signal_ends_at_once(first: str, second: str) -> None:
    code = TWICE.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout == f"{getattr(signal, f'SIG{first}'):d}\n"
    assert (done.returncode, done.stderr) == (-getattr(signal, f"SIG{second}"), "")


def test_signals_are_left_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["--version"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


START = """
import builtins, os, runpy, signal, sys
really, sent = builtins.__import__, []
def importing(name, *rest, **more):
    if name == {name!r} and not sent:
        sent.append(name)
        os.kill(os.getpid(), signal.SIGINT)
    return really(name, *rest, **more)
builtins.__import__ = importing
sys.argv = ["spiritlevel", "audit", "mlp:inputs=64", "--data", "digits", "--samples", "5", "--measures", "trace"]
runpy.run_module("spiritlevel", run_name="__main__", alter_sys=True)
"""


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("spiritlevel.cli", "torch", "torch._C", "torch.nn")]


@pytest.mark.parametrize("name", ["tyro", "numpy.linalg", *SLOW])
def test_control_c_while_it_starts_is_one_line(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", START.format(name=name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "spiritlevel: interrupted.\n")
