from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from spiritlevel import storage
from spiritlevel.errors import InputError
from spiritlevel.storage import cache_folder, check_readable, digest, lock, plain, write_atomically


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    sizes: tuple[int, ...] = (1, 2)
    name: str = "ü"


def test_a_config_becomes_plain_values() -> None:
    assert plain(Outer()) == {
        "class": "Outer",
        "inner": {"class": "Inner", "rate": 0.1},
        "sizes": [1, 2],
        "name": "ü",
    }
    for bad in ({1: 2}, {"a": 1j}, [object()]):
        with pytest.raises(InputError, match="config"):
            plain(bad)


def test_the_digest_sees_every_value_and_is_the_same_in_every_process() -> None:
    digests = {digest(config) for config in (Outer(), Outer(Inner(0.2)), Outer(sizes=(1,)), Outer(name="u"), Inner())}
    assert len(digests) == 5
    code = "from spiritlevel.storage import digest; print(digest({'a': [1, 0.1], 'b': None}))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.stdout.strip() == digest({"b": None, "a": (1, 0.1)})


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "file", b"\x00\r\n\xff")
    assert (tmp_path / "new" / "file").read_bytes() == b"\x00\r\n\xff"


def test_names_that_are_no_text_are_written_and_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_atomically(tmp_path / "a.json", json.dumps([name], ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == [name]


def test_what_cannot_be_read_is_neither_missing_nor_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.pt"
    file.write_bytes(b"x")
    check_readable(file)
    for path, sentence in (
        (tmp_path / "no.pt", "there is no file"),
        (file / "below.pt", "there is no file"),
        (tmp_path, "is a folder, but a file is needed"),
        (Path("/dev/null"), "is a pipe or a device"),
        (Path("a\0b"), "cannot be read: embedded null byte"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_readable(path)

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "w.pt")

    monkeypatch.setattr(Path, "open", denied)  # the rights of a file do not bind root
    with pytest.raises(InputError, match=r"the file '.*w\.pt' cannot be read: Permission denied\.$"):
        check_readable(file)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*result\.json'"):
        write_atomically(tmp_path / "result.json", "{}")


def test_a_file_that_cannot_be_written_is_the_only_one_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/page\.html'$"):  # and not: -> None
        write_atomically(tmp_path / "file" / "page.html", "text")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SPIRITLEVEL_CACHE")
    assert "spiritlevel" in str(cache_folder())


def test_a_lock_waits_and_dies_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_POLL_SECONDS", 0.01)
    code = (
        "import sys, time; from spiritlevel.storage import lock\n"
        "with lock(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with lock(tmp_path, seconds=0.05) as held:
            assert not held
        calls = []

        def waiting() -> None:
            calls.append(time.monotonic())
            if len(calls) == 3:
                holder.kill()

        with lock(tmp_path, waiting=waiting, seconds=30) as held:
            assert held
        assert len(calls) >= 3
    with lock(tmp_path, seconds=0) as held:  # the file that is left over means nothing
        assert held
