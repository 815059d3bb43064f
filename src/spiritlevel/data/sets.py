"""Named data sets as tensors, and where each of them lies."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, unknown_name

if TYPE_CHECKING:  # torch takes a second to import, and `spiritlevel data list` does not need it
    from torch import Tensor
from spiritlevel.data.decoders import Blob, Bytes, decode_digits
from spiritlevel.data.downloads import Progress, fetch_into_cache
from spiritlevel.data.reading import Unusable, cache_file, in_folder, read_file
from spiritlevel.data.table import ASSETS, SETS, Entry, Form


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set: `train` and `test` are pairs (inputs, targets), `classes` the names of the targets.

    Inputs are float32 in [0, 1] of shape (N, C, H, W), targets int64 of shape (N,), both on the CPU.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]
    name: str

    def __iter__(self) -> Iterator[Tensor]:  # called by whatever takes batches, as all measurements do
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


def _open(name: str, progress: Progress) -> tuple[Path, Form, list[Blob]]:
    """Where a set of files lies, in which form, and its checked content."""
    entry = _entry(name)
    found: tuple[Form, list[Path]] | None
    if entry.folders:
        found, way_out = in_folder(entry), "replace the file, or unset SPIRITLEVEL_DATA to use the cache or a download"
    else:
        form = entry.forms[0]
        found, way_out = (form, [ASSETS / file.name for file in form.files]), "install spiritlevel again"
    if found is None:
        path, blobs = fetch_into_cache(name, entry, progress)
        return path, entry.forms[0], blobs
    form, paths = found
    try:
        blobs = [read_file(path, file) for path, file in zip(paths, form.files, strict=True)]
    except (Unusable, OSError) as error:
        raise InputError(f"data set {name!r}: {error}: {way_out}.") from None
    return paths[0] if len(paths) == 1 else paths[0].parent, form, blobs


def _entry(name: str) -> Entry:
    if not isinstance(name, str) or name not in SETS:
        raise unknown_name("data set", name, SETS)
    return SETS[name]


def _silent(what: str, done: int, total: int) -> None:
    pass


def names() -> tuple[str, ...]:
    """The names that `load` knows.

    >>> names()
    ('digits', 'fashion-mini', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100')
    """
    return tuple(SETS)


@checked
def load(name: str) -> Data:
    """The data set called `name`, as tensors on the CPU.

    - `digits`: 8×8 digits of scikit-learn, pixels / 16. The last 36 images of every class, in the order of the file,
      are the test set (360), the others (1,437) the training set.
    - `fashion-mini`: the first 600 training and the first 100 test images of every class of Fashion-MNIST, in the
      original order. Built in, the default of the command line.
    - `mnist`, `fashion-mnist`, `cifar10`, `cifar100` (fine labels): complete, with their original split and order. One
      exception: the WebP sheets of CIFAR-100 that a data folder may hold have an order of their own, so an index
      means a different image there than in a download.

    Where a set is looked for, and what is checked, is explained at the top of `spiritlevel.data`.

    Args:
        name: one of `names()`.

    Returns:
        `Data` with `.train`, `.test`, `.classes`, `.name`. Cost: 4 bytes per pixel (188 MB for MNIST's training images,
        614 MB for CIFAR's), plus the file while reading. The first call may download up to 170 MB.

    Raises:
        InputError: the name is unknown; a file is damaged; or the set cannot be found anywhere, with what was tried.

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
        arrays = decode_digits()
    else:
        _, form, blobs = _open(name, _silent)
        arrays = form.decode(blobs)

    def tensors(images: Bytes, targets: Bytes) -> tuple[Tensor, Tensor]:
        pixels = images.astype(np.float32, order="C")
        pixels /= entry.top
        return torch.from_numpy(pixels), torch.from_numpy(targets.astype(np.int64))

    return Data(tensors(*arrays[:2]), tensors(*arrays[2:]), entry.classes, name)


@checked
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


@checked
def path(name: str) -> Path | None:
    """Where the set lies on this machine, None if it would have to be fetched. Looks, but reads and checks nothing.

    >>> path("fashion-mini").name
    'fashion-mini.npz'
    """
    return _where(name)[1]


def describe() -> list[Listing]:
    """A row for every set: sizes, where it is now, and its licence and authors. Needs no network.

    >>> for row in describe()[:2]:
    ...     print(row.name, row.train, row.test, row.shape, row.classes, row.where)
    digits 1437 360 (1, 8, 8) 10 built-in
    fashion-mini 6000 1000 (1, 28, 28) 10 built-in
    """
    return [
        Listing(name, entry.train, entry.test, entry.shape, len(entry.classes), _where(name)[0], entry.licence)
        for name, entry in SETS.items()
    ]


def _where(name: str) -> tuple[str, Path | None]:
    entry = _entry(name)
    if name == "digits":
        return "built-in", _sklearn()
    if not entry.folders:
        return "built-in", ASSETS / entry.forms[0].files[0].name
    found = in_folder(entry)
    if found:
        return "folder", found[1][0].parent
    cached = cache_file(name)
    try:
        whole = cached.stat().st_size == sum(file.size for file in entry.forms[0].files)
    except OSError:
        whole = False
    return ("cache", cached) if whole else ("not here", None)


def _sklearn() -> Path:
    """Where scikit-learn, which carries the digits, is installed (found without importing it)."""
    return Path(str(importlib.metadata.distribution("scikit-learn").locate_file("sklearn")))
