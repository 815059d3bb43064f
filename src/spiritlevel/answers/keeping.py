"""Work that must survive a kill: tensors kept in a folder under the key of what is computed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.results import Result
from spiritlevel.storage import write_atomically

Found = TypeVar("Found", bound=Result)
_BETWEEN = 5.0  # seconds between two writes


def fingerprint_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and every byte of the values.

    >>> fingerprint_of({"a": torch.zeros(2)}) == fingerprint_of({"a": torch.zeros(2)})
    True
    >>> fingerprint_of({"a": torch.zeros(2)}) == fingerprint_of({"a": torch.zeros(3)})
    False
    """
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Keeper:
    """A folder of files that each hold tensors, a string, and the key of the computation that they belong to.

    Files are written whole or not at all, and read without executing anything. A file with another key is refused: two
    computations would mix in one folder.
    """

    def __init__(self, folder: str | Path, key: str, between: float = _BETWEEN) -> None:
        self.folder, self.key, self.between = Path(folder), key, between
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"keep= needs a folder, and {str(self.folder)!r} is a file.")
        self._last = time.monotonic()

    def read(self, name: str) -> tuple[dict[str, Tensor], str] | None:
        """Tensors and text as they were written; None where they were not."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{str(path)!r} cannot be read: {error}. Delete it to start again.") from error
        if about.get("key") != self.key:
            raise InputError(
                f"{str(self.folder)!r} keeps another surface (other model, data, directions or options); name another "
                "folder, or delete it to start again."
            )
        return tensors, about.get("text", "")

    def write(self, name: str, tensors: Mapping[str, Tensor], text: str = "") -> None:
        """Write a file now."""
        held = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        content = safetensors.torch.save(held, metadata={"key": self.key, "text": text})
        write_atomically(self.folder / f"{name}.safetensors", content)
        self._last = time.monotonic()

    def now_and_then(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a file unless the last one was written within a few seconds."""
        if time.monotonic() - self._last >= self.between:
            self.write(name, tensors)

    def result(self, kind: type[Found]) -> Found | None:
        """The finished result, if it is there."""
        kept = self.read("result")
        found = None if kept is None else Result.from_json(kept[1])
        return found if isinstance(found, kind) else None

    def finish(self, result: Result) -> None:
        """Keep the result; what led to it is no longer needed."""
        self.write("result", {}, result.to_json())
        for name in ("directions", "sums"):
            (self.folder / f"{name}.safetensors").unlink(missing_ok=True)
