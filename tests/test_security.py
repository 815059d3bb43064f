"""What SECURITY.md promises: files are data, never programs.

Every payload here would leave a file behind if it ran; each is shown to be live first, so that the tests can fail.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
import stat
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spiritlevel as sl
from spiritlevel.data.reading import Unusable, members_of
from spiritlevel.data.table import SETS, PinnedFile
from spiritlevel.errors import InputError
from spiritlevel.loading import arrays, load_samples, load_weights

SOURCE = Path(sl.__file__).parent


class Payload:
    """Unpickling this creates the file named."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch {self.trace}",)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Where the payload leaves its trace; the payload has been seen to work."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    return tmp_path / "ran"


# ---------------------------------------------------------------- nothing in the source can unpickle or evaluate

FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def keywords(call: ast.Call) -> dict[str, Any]:
    return {word.arg: word.value.value for word in call.keywords if word.arg and isinstance(word.value, ast.Constant)}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_unpickles_or_runs_a_shell(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            found = {name.split(".")[0] for name in names} & FORBIDDEN
            named = isinstance(node, ast.Import) and found == {"pickle"}  # to name its error, which is checked below
            assert not found or named, f"line {node.lineno} imports {found}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
            assert node.attr == "UnpicklingError", f"line {node.lineno} uses pickle.{node.attr}"
    for call in calls(path):
        words, name = keywords(call), ast.unparse(call.func)
        where = f"line {call.lineno}: {ast.unparse(call)[:80]}"
        if name == "torch.load":
            assert words.get("weights_only") is True, where
        if name in ("np.load", "numpy.load") or (name == "partial" and ast.unparse(call.args[0]) == "np.load"):
            assert words.get("allow_pickle") is False, where
        if name == "Image.open":
            assert any(word.arg == "formats" for word in call.keywords), where
        assert name not in ("eval", "os.system", "os.popen"), where
        assert words.get("shell") is not True, where
        assert not name.endswith((".extractall", "_object", "_object_list")), where


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.load(f)",
        "from pickle import load",
        "from joblib import load",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run('x', shell=True)",
        "eval('1')",
        "tar.extractall()",
        "dist.all_gather_object(a, b)",
        "Image.open(f)",
    ],
)
def test_the_check_of_the_source_sees_what_it_looks_for(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.py").write_text(line)
    with pytest.raises(AssertionError):
        test_no_module_unpickles_or_runs_a_shell(tmp_path / "bad.py")


# ---------------------------------------------------------------- archives


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped-spiritlevel", "a/../../../escaped", "link"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_members_of_an_archive_are_read_and_never_written(tmp_path: Path, name: str, kind: str) -> None:
    """Names with .. or a root, and links, only ever name what is read into memory."""
    content, buffer = b"abc", io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo(f"{name}/wanted")
            if name == "link":
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        with zipfile.ZipFile(buffer, "w") as archive:
            member_of_zip = zipfile.ZipInfo(f"{name}/wanted")
            if name == "link":
                member_of_zip.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(member_of_zip, b"/etc/passwd" if name == "link" else content)
    before = sorted(tmp_path.parent.rglob("*"))
    wanted = [PinnedFile("wanted", len(content), "-")]
    if name == "link" and kind == "tar":
        with pytest.raises(Unusable, match="has no wanted"):
            members_of(buffer.getvalue(), wanted, "archive")
    else:
        (found,) = members_of(buffer.getvalue(), wanted, "archive")
        assert found == content or name == "link"
        assert len(found) <= len(content) + 1, "never more than the pinned size and one byte"
    assert sorted(tmp_path.parent.rglob("*")) == before
    assert not Path("/tmp/escaped-spiritlevel").exists()


def test_every_download_has_a_pin() -> None:
    """Sets that are fetched name the SHA-256 of every file; packages are pinned as a whole, or file by file."""
    for name, entry in SETS.items():
        files = [file for form in entry.forms for file in form.files]
        assert name == "digits" or files
        for file in files:
            assert len(file.sha256) == 64, f"{name}: {file.name}"
            assert file.size > 0
        for package in entry.packages:
            if package.archive is not None:
                assert len(package.archive.sha256) == 64, f"{name}: {package.spec}"
            else:
                assert not package.members, f"{name}: {package.spec} has files that no pin covers"


# ---------------------------------------------------------------- files of the user


def hostile_files(folder: Path, trace: Path) -> dict[str, Path]:
    """Files of every kind that a user may pass, each with a payload."""
    payload = Payload(trace)
    array = np.array([payload], dtype=object)
    torch.save({"weight": payload}, folder / "model.pt")
    (folder / "plain.pt").write_bytes(pickle.dumps(payload))
    np.save(folder / "inputs.npy", array, allow_pickle=True)
    np.savez(folder / "data.npz", inputs=array, targets=array)
    (folder / "weights.safetensors").write_bytes(pickle.dumps(payload))
    return {path.name: path for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["model.pt", "plain.pt", "weights.safetensors"])
def test_weights_never_run(tmp_path: Path, trace: Path, name: str) -> None:
    path = hostile_files(tmp_path, trace)[name]
    with pytest.raises(InputError, match=r"not opened, because that could run a program|is not a safetensors file"):
        load_weights(torch.nn.Linear(1, 1), path)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["inputs.npy", "data.npz"])
def test_data_never_run(tmp_path: Path, trace: Path, name: str) -> None:
    path = hostile_files(tmp_path, trace)[name]
    with pytest.raises(InputError, match=r"holds Python objects, which are not opened|expected an .npz"):
        load_samples(str(path))
    assert not trace.exists()


def test_the_command_line_never_runs_a_file_of_data(tmp_path: Path, trace: Path) -> None:
    files = hostile_files(tmp_path, trace)
    for arguments in (["lenet5", "--weights", files["model.pt"]], ["lenet5", "--data", files["data.npz"]]):
        command = [sys.executable, "-m", "spiritlevel", "measure", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not trace.exists()


def bomb(path: Path, promised: int, held: int) -> None:
    """An .npz whose arrays are `held` zeros, packed a thousandfold, under a header that promises `promised`."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (promised,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x.npy", "y.npy"):
            with archive.open(name, "w", force_zip64=True) as stream:
                stream.write(header.getvalue())
                for _ in range(held >> 20):
                    stream.write(bytes(1 << 20))


@pytest.mark.parametrize(
    ("promised", "held", "message"),
    [(1 << 40, 1 << 20, "is damaged: x.npy says it holds"), (1 << 10, 1 << 26, "is damaged: x.npy says it holds")],
    ids=["promises more than it holds", "holds more than it promises"],
)
def test_arrays_that_lie_about_their_size_are_refused(tmp_path: Path, promised: int, held: int, message: str) -> None:
    bomb(tmp_path / "bomb.npz", promised, held)
    with pytest.raises(InputError, match=message):
        load_samples(str(tmp_path / "bomb.npz"))


def test_a_zip_bomb_is_refused_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest headers, a thousandfold packed: refused by the size that they state, with nothing unpacked."""
    bomb(tmp_path / "bomb.npz", 1 << 26, 1 << 26)
    assert (tmp_path / "bomb.npz").stat().st_size < 1_000_000
    monkeypatch.setattr(arrays, "available_memory", lambda: 1 << 26)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"bomb.npz unpacks to 0.1 GB, but only 0.0 GB of memory can be spared"):
        load_samples(str(tmp_path / "bomb.npz"))
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_the_payloads_would_work_without_the_promise(tmp_path: Path, trace: Path) -> None:
    files = hostile_files(tmp_path, trace)
    torch.load(files["model.pt"], weights_only=False)
    assert trace.exists()
    trace.unlink()
    np.load(files["inputs.npy"], allow_pickle=True)
    assert trace.exists()
