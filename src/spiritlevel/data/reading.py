"""Files of bounded size that are compared with their pins, in the user's folder or in the cache."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np

from spiritlevel.data.decoders import Blob
from spiritlevel.data.table import Entry, Form, PinnedFile
from spiritlevel.errors import InputError
from spiritlevel.storage import cache_folder


class Unusable(Exception):
    """A source did not deliver; says why in a few words. Becomes an `InputError` or one entry of what was tried."""


_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


def checked_content(blob: Blob, file: PinnedFile, place: object) -> Blob:
    """`blob`, if it is the pinned content of `file`."""
    if len(blob) != file.size:
        got = "more" if len(blob) > file.size else f"{len(blob):,}"
        raise Unusable(f"{place} is damaged (expected {file.size:,} bytes of data, got {got})")
    if hashlib.sha256(blob).hexdigest() != file.sha256:
        raise Unusable(f"{place} is not the published file (its SHA-256 should begin with {file.sha256[:12]})")
    return blob


def _read(stream: IO[bytes], size: int, place: object, *, zipped: bool = False) -> bytes:
    """At most one byte more than `size`, so that a file that unpacks to gigabytes costs no more than the real one."""
    try:
        with gzip.GzipFile(fileobj=stream) if zipped else stream as content:
            return content.read(size + 1)
    except _READ_ERRORS as error:
        raise Unusable(f"{place} is damaged ({error})") from None


def read_file(path: Path, file: PinnedFile) -> Blob:
    """The content of a file on the disk, unzipped and compared with its pin."""
    with path.open("rb") as stream:
        return checked_content(_read(stream, file.size, path, zipped=path.name == f"{file.name}.gz"), file, path)


def members_of(content: bytes, files: Sequence[PinnedFile], place: str) -> list[Blob]:
    """The named files (or their gzipped forms) from a tar or a wheel, wherever they lie in it, bounded in size."""
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
        raise Unusable(f"{place} is damaged ({error})") from None
    missing = [file.name for file in files if file.name not in found]
    if missing:
        raise Unusable(f"{place} has no {missing[0]}")
    return [found[file.name] for file in files]


def in_folder(entry: Entry) -> tuple[Form, list[Path]] | None:
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


def cache_file(name: str) -> Path:
    """Where the cache keeps a set."""
    return cache_folder() / f"{name}.bin"


def read_cache(path: Path, files: Sequence[PinnedFile]) -> list[Blob] | None:
    """The files of a set out of its cached form; None if it is not there, or damaged."""
    size = sum(file.size for file in files)
    try:
        with path.open("rb") as stream:
            content = memoryview(_read(stream, size, path))
        if len(content) != size:
            return None
        ends = np.cumsum([file.size for file in files]).tolist()
        return [
            checked_content(content[end - file.size : end], file, path) for file, end in zip(files, ends, strict=True)
        ]
    except (FileNotFoundError, NotADirectoryError, Unusable):
        return None
