"""Inputs and targets from files of arrays, none read before its size is known to fit."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from spiritlevel.errors import InputError, named_error
from spiritlevel.memory import available_memory
from spiritlevel.results import figure

_PAIRS = (
    ("x", "y"),
    ("X", "Y"),
    ("inputs", "targets"),
    ("images", "labels"),
    ("data", "targets"),
    ("x_train", "y_train"),
)
FAINT = 17  # byte images that stay below this were stored on another scale, like the 16 levels of scanned digits


class Samples(NamedTuple):
    """Data to measure: what `measure` takes, the names of the classes (empty if unknown), and where they came from.

    `name` also says, in brackets, what was done to the numbers of a file: a network that was trained on other numbers
    would silently be measured wrongly.
    """

    data: Any
    classes: tuple[str, ...]
    name: str
    notes: tuple[str, ...] = ()
    """What was done to the numbers of the file on the way, as sentences."""
    codes: Mapping[str, tuple[str, ...]] = {}
    """For a table: its columns with the names of their codes, in the order of the codes; none for numbers."""
    target: str | None = None
    """The key of the targets in the batches, where finding them is left to the reader of batches."""


def as_pair(arrays: Mapping[str, Any], path: Path) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    """Inputs and targets among the arrays of a file, and what was done to them, in words."""
    for first, second in _PAIRS:
        if first in arrays and second in arrays:
            break
    else:
        listed = ", ".join(sorted(arrays)) or "nothing"
        raise InputError(f"{path.name} must hold the inputs as x and the targets as y; it holds {listed}.")
    inputs, targets = torch.as_tensor(arrays[first]), torch.as_tensor(arrays[second])
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise InputError(f"{path.name} must hold as many targets as inputs; it holds shapes {shapes}.")
    if targets.ndim == 2 and targets.shape[1] == 1 and not targets.is_floating_point():
        targets = targets[:, 0]
    converted, notes = as_inputs(inputs)
    return (converted, targets.float() if targets.is_floating_point() else targets.long()), notes


def as_inputs(inputs: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Bytes are pictures, channels last or first; anything else stays as it is, floats in single precision.

    Also what was done, in words.
    """
    if inputs.dtype != torch.uint8:
        return inputs.float() if inputs.is_floating_point() else inputs.long(), ()
    notes, before = ["bytes divided by 255"], tuple(inputs.shape[1:])
    highest = int(inputs.max()) if inputs.numel() else 255
    if 0 < highest < FAINT:
        reach = f"the largest byte is {highest}, so all inputs lie in [0, {figure(highest / 255, 2)}]"
        notes.append(f"{reach}: save floats if the network was trained on another scale")
    if inputs.ndim == 3:
        inputs = inputs[:, None]
        notes.append(f"a channel axis added, {before} to {tuple(inputs.shape[1:])}")
    elif inputs.ndim == 4 and inputs.shape[3] in (1, 3) and inputs.shape[1] not in (1, 3):
        inputs = inputs.permute(0, 3, 1, 2)
        notes.append(f"channels moved to the front, {before} to {tuple(inputs.shape[1:])}")
    return inputs.contiguous().float() / 255, tuple(notes)


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of the file; none is read before its size, as the file states it, is known to fit in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            wanted = {name for pair in _PAIRS for name in pair}
            sizes = 0
            for member in members:
                with archive.open(member) as stream:
                    _check_member(member, stream, path)
                sizes += member.file_size if member.filename.removesuffix(".npy") in wanted else 0
            check_size(sizes, path)
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in wanted:
                    with archive.open(member) as stream:
                        array = npy.read_array(stream, allow_pickle=False)
                        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
            return arrays or {member.filename.removesuffix(".npy"): np.empty(0) for member in members}
    except InputError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        raise InputError(f"{path} is not an .npz file that can be read: {named_error(error)}.") from error


def _check_member(member: zipfile.ZipInfo, stream: IO[bytes], path: Path) -> None:
    """Refuse arrays of Python objects, and headers that promise another size than the archive holds."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise InputError(f"{path.name}: {member.filename} holds Python objects, which are not opened; save numbers.")
    if dtype.kind in "SU":
        raise InputError(f"{path.name}: {member.filename} holds texts; save classes as whole numbers from 0.")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InputError(f"{path.name}: {member.filename} holds {dtype}, not real numbers of at most 64 bits.")
    promised = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if promised != member.file_size - stream.tell():
        raise InputError(
            f"{path.name} is damaged: {member.filename} says it holds {promised:,} bytes of shape {shape}, "
            f"but the archive has {member.file_size - stream.tell():,}."
        )


def check_size(size: int, path: Path) -> None:
    """Refuse what would not fit in memory."""
    limit = available_memory() // 4  # the numbers are held twice while they are converted, and the work needs memory
    if size > limit:
        raise InputError(
            f"{path.name} unpacks to {size / 1e9:,.1f} GB, but only {limit / 1e9:,.1f} GB of memory can be spared; "
            "pass fewer samples, or a function that returns a loader (file.py:function)."
        )
