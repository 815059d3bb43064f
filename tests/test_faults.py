"""What is killed, or finds no room, leaves nothing half-written that would be read as whole, and ends the same later.

Processes are killed with SIGKILL at moments spread over the time that an undisturbed run takes: one to three in
`make test`, twenty in `make test-full`. Trainings are killed in test_training.py.
"""

from __future__ import annotations

import errno
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reports
import test_data
import torch

from spiritlevel import data, storage
from spiritlevel.cli.measure import write_run
from spiritlevel.errors import InputError
from spiritlevel.results import Estimate, Report, Result

MOMENTS = pytest.mark.parametrize("moments", [3, pytest.param(20, marks=pytest.mark.slow)])
ESTIMATE = Estimate.from_draws(torch.arange(10.0))


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that says `ready` when its imports are done."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def killed_at_random_moments(
    moments: int, begin: Callable[[], subprocess.Popen[str]], check: Callable[[], None], seconds: float = 0.5
) -> int:
    """Kill this many runs, each later in the seconds that one takes; how many had not ended by themselves."""
    rng, killed = random.Random(0), 0
    for moment in range(moments):
        process = begin()
        time.sleep(seconds * (moment + rng.random()) / moments)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        check()
    return killed


# ---------------------------------------------------------------- kills

FETCH = """
import sys
from spiritlevel import data
from spiritlevel.data.table import SETS, _read_table
import pooch
SETS.update(_read_table(open(sys.argv[1]).read()))
print("ready", flush=True)
print(data.fetch("tiny"), flush=True)
"""


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[test_data.Mirror]:
    monkeypatch.delenv("SPIRITLEVEL_DATA", raising=False)
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    test_data.write_folder(tmp_path / "mirror", test_data.idx_files())
    mirror = test_data.Mirror(tmp_path / "mirror")
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()


@MOMENTS
def test_a_download_killed_at_random_moments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: test_data.Mirror, moments: int
) -> None:
    mirror.delay = 0.1  # four files: an undisturbed run takes about half a second
    text = test_data.table(test_data.idx_files(), mirror=mirror.address)
    (tmp_path / "table").write_text(text)
    whole, cached = b"".join(test_data.idx_files().values()), tmp_path / "cache" / "tiny.bin"

    def check() -> None:
        assert not cached.exists() or cached.read_bytes() == whole
        cached.unlink(missing_ok=True)

    killed = killed_at_random_moments(moments, lambda: start(FETCH, tmp_path / "table"), check)
    assert killed >= moments // 2, "most moments lay inside the run"
    test_data.register(monkeypatch, text)
    mirror.delay = 0
    test_data.check_tiny(data.load("tiny"))
    assert sorted(path.name for path in cached.parent.iterdir()) == [".tiny.lock", "tiny.bin"], "remains are swept"


WRITE = """
import json, sys
from pathlib import Path
from spiritlevel.storage import write_atomically
for version in range(10**9):
    write_atomically(Path(sys.argv[1]), json.dumps([version] * 300_000))
    if not version:
        print("ready", flush=True)
"""


@MOMENTS
def test_a_result_file_killed_while_it_is_written(tmp_path: Path, moments: int) -> None:
    """The reader sees one whole version, whatever happens to the writer."""
    path = tmp_path / "result.json"
    path.write_text("[-1]")
    seen = set()

    def check() -> None:
        content = json.loads(path.read_text())
        assert len(set(content)) == 1
        seen.add(content[0])

    assert killed_at_random_moments(moments, lambda: start(WRITE, path), check) == moments
    assert len(seen) > 1, "some versions were finished before the kill"


STUDY = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
import polars, random
from spiritlevel.papers.studies import Config, Statement, Study, execute
from spiritlevel.papers.studies.rules import Range

@dataclass(frozen=True, kw_only=True)
class Sums(Config):
    pass

STATEMENT = Statement("sum", "the sum is large", "3", "above 2", "2 or below", Range(low=2.0), trained=False)

def run(config, run):
    def piece(index):
        time.sleep(0.02)
        with open(sys.argv[1] + ".log", "a") as log:
            print(index, file=log)
        return {"value": random.Random(index).random(), "third": 1 / 3}
    rows = [run.once(f"piece-{index}", lambda: piece(index)) for index in range(20)]
    run.table("rows", rows)
    total = sum(row["value"] for row in rows)
    yield STATEMENT.judge(total)

study = Study("sums", "Sums", "nowhere", Sums, (STATEMENT,), run)
print("ready", flush=True)
execute(study, Sums(), sys.argv[1])
"""


@MOMENTS
def test_a_study_killed_at_random_moments_goes_on_to_the_same_numbers(tmp_path: Path, moments: int) -> None:
    process = start(STUDY, tmp_path / "whole")
    assert process.communicate(timeout=60)[1] == ""

    def summary(folder: str) -> dict[str, Any]:
        (path,) = (tmp_path / folder).rglob("summary.json")
        return {**json.loads(path.read_text()), "seconds": 0}

    expected = summary("whole")

    def check() -> None:
        for path in (tmp_path / "killed").rglob("[!.]*.json"):
            json.loads(path.read_text())

    assert killed_at_random_moments(moments, lambda: start(STUDY, tmp_path / "killed"), check)
    process = start(STUDY, tmp_path / "killed")
    assert process.communicate(timeout=60)[1] == ""
    assert summary("killed") == expected


REPORT = """
import sys
from pathlib import Path
import altair, torch, vl_convert
from spiritlevel.answers import measuring
from spiritlevel import page as report
from spiritlevel.cli.measure import write_run
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).double()
data = torch.randn(30, 4).double(), torch.arange(30) % 2
print("ready", flush=True)
write_run(measuring.measure(net, data, measures=["trace", "largest_eigenvalue"], parts=["spectrum"]), Path(sys.argv[1]))
"""

COMMAND = """
import sys
import altair, torch, vl_convert
from spiritlevel import cli
from spiritlevel.answers import measuring
print("ready", flush=True)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("moments", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_report_killed_at_random_moments_is_whole_or_not_there(tmp_path: Path, moments: int) -> None:

    def numbers(folder: str) -> tuple[Any, ...]:
        found = Result.from_json(tmp_path / folder / "report.json")
        assert isinstance(found, Report)
        assert found.traces is not None
        return [(row.name, row.value) for row in found.rows], found.traces.values.tolist(), found.headline

    process = start(REPORT, tmp_path / "whole")
    ready = time.monotonic()
    assert process.communicate(timeout=100)[1] == ""
    assert process.returncode == 0
    seconds = time.monotonic() - ready

    def check() -> None:
        folder = tmp_path / "killed"
        if (folder / "report.json").exists():
            assert numbers("killed") == numbers("whole")
        if (folder / "report.html").exists():
            assert (folder / "report.html").read_text().rstrip().endswith("</html>")

    within = seconds if moments > 1 else seconds / 3  # the first run was slower than the next, and one kill has to hit
    assert killed_at_random_moments(moments, lambda: start(REPORT, tmp_path / "killed"), check, within)
    process = start(REPORT, tmp_path / "killed")
    assert process.communicate(timeout=100)[1] == ""
    check()
    assert numbers("killed") == numbers("whole")


def _complaints(told: str) -> list[str]:
    """What a command said beside how far it is, which it says when it takes long."""
    return [line for line in told.splitlines() if not re.fullmatch(r"spiritlevel: .* \(\d+ (s|min)\)", line)]


@pytest.mark.parametrize("moments", [pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_a_study_of_the_papers_killed_at_random_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: int
) -> None:
    """Two trainings, their measurements and charts."""

    def begin(folder: str) -> subprocess.Popen[str]:
        monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / f"{folder} cache"))
        options = ["--scale", "smoke", "--steps", 20, "--json", tmp_path / f"{folder}.json", "--out", tmp_path / folder]
        return start(COMMAND, "reproduce", "radial", *options)

    process = begin("whole")
    ready = time.monotonic()
    assert _complaints(process.communicate(timeout=200)[1]) == []
    seconds = time.monotonic() - ready

    def check() -> None:
        for path in tmp_path.glob("killed*/**/[!.]*.json"):
            json.loads(path.read_text())

    assert killed_at_random_moments(moments, lambda: begin("killed"), check, seconds)
    process = begin("killed")
    assert _complaints(process.communicate(timeout=200)[1]) == []
    whole, killed = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("whole", "killed"))
    assert whole == killed


def test_two_processes_that_want_the_same_run_take_turns(tmp_path: Path) -> None:
    processes = [start(STUDY, tmp_path / "shared") for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=60)[1] == ""
        assert process.returncode == 0
    computed = (tmp_path / "shared.log").read_text().split()
    assert computed == [str(index) for index in range(20)], "one of them computed, the other read"


# ---------------------------------------------------------------- full and read-only disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB, where the system lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    try:
        allowed = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    if not allowed:
        pytest.skip("mounting a small disk needs root; the stand-in below covers the same paths")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@pytest.mark.parametrize("harm", [fill, read_only])
def test_a_result_on_a_disk_that_takes_nothing(disk: Path, harm: Callable[[Path], None]) -> None:
    path = disk / "result.json"
    ESTIMATE.to_json(path)
    harm(disk)
    larger = Estimate.from_draws(torch.arange(20.0))
    with pytest.raises(OSError, match=r"No space left|Read-only file system"):
        storage.write_atomically(path, larger.to_json() * 1000)
    assert Result.from_json(path) == ESTIMATE, "the old result is still there, and whole"
    assert not [item for item in disk.iterdir() if item.name.startswith(".")], "nothing half-written is left"


@pytest.mark.parametrize("harm", [fill, read_only])
def test_a_download_to_a_disk_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, disk: Path, mirror: test_data.Mirror, harm: Callable[[Path], None]
) -> None:
    test_data.register(monkeypatch, test_data.table(test_data.idx_files(), mirror=mirror.address))
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(disk))
    harm(disk)
    with pytest.raises(
        InputError, match=r"cannot use the cache folder .*(No space left on device|Read-only file system)"
    ):
        data.fetch("tiny")
    assert not (disk / "tiny.bin").exists()


@pytest.mark.parametrize("harm", [fill, read_only])
def test_a_command_on_a_disk_that_takes_nothing(disk: Path, harm: Callable[[Path], None]) -> None:
    harm(disk)
    command = [sys.executable, "-m", "spiritlevel", "data", "list", "--json", str(disk / "list.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(disk) in done.stderr or "No space left" in done.stderr
    assert not (disk / "list.json").exists()


def test_a_full_disk_as_a_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ESTIMATE.to_json(path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Estimate.from_draws(torch.arange(20.0)).to_json(path)
    assert Result.from_json(path) == ESTIMATE
    assert [item.name for item in tmp_path.iterdir()] == ["result.json"]


def test_a_run_is_replaced_as_a_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The disk is full when the second file comes: the first one must not stand beside an old page."""
    old, new = reports.report(20, name="the old run"), reports.report(20, name="the new run")
    write_run(old, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls, really = [], storage.os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        really(descriptor)

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*report\.html'"):
        write_run(new, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_run(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    assert all("the new run" in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())


PAIR = """
import sys
from pathlib import Path
from spiritlevel.storage import write_together
folder = Path(sys.argv[1])
print("ready", flush=True)
for number in range(150):
    write_together({folder / "a": sys.argv[2], folder / "b": sys.argv[2]})
"""


def test_two_processes_that_write_one_run_leave_that_of_one(tmp_path: Path) -> None:
    processes = [start(PAIR, tmp_path, name) for name in ("first", "second")]
    for process in processes:
        assert process.communicate(timeout=60)[1] == ""
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert len(list(tmp_path.iterdir())) == 2
