"""Work that must survive a kill: tensors kept in a folder under the key of what is computed."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.results import Result
from spiritlevel.storage import write_atomically

Found = TypeVar("Found", bound=Result)
Progress = Callable[[str, int, int], None]
_NAMES = ("directions", "sums", "derivatives", "result")
_PRODUCT = "product "
_BETWEEN = 5.0  # seconds between two writes
_WORTH = 1.0  # seconds that a product must take to be kept: it is as large as all parameters


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
            raise InputError(f"keep= needs a folder, but {str(self.folder)!r} is a file.")
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.stem in _NAMES or path.stem.startswith(_PRODUCT):  # also those that this surface never reads
                self._content(path, values=False)
        self._last = time.monotonic()

    def read(self, name: str) -> tuple[dict[str, Tensor], str] | None:
        """Tensors and text as they were written; None where they were not."""
        path = self.folder / f"{name}.safetensors"
        return self._content(path) if path.is_file() else None

    def _content(self, path: Path, values: bool = True) -> tuple[dict[str, Tensor], str]:
        """Tensors, unless only asked whose they are, and text of a file; another computation's is refused."""
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in (file.keys() if values else ())}
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
        self.forget("directions", "sums", "derivatives", f"{_PRODUCT}*")

    def forget(self, *names: str) -> None:
        """Delete files that are no longer needed; a name may hold the wildcard `*`."""
        for name in names:
            for path in self.folder.glob(f"{name}.safetensors"):
                path.unlink(missing_ok=True)


def remembered(op: Operator, keeper: Keeper | None, progress: Progress | None) -> Operator:
    """The same operator, which reports each product and keeps those that take long.

    Lanczos asks for the same products in the same order every time, so after a kill it runs at the speed of the disk
    through those that were made.
    """
    if (keeper is None and progress is None) or op.entries is not None or type(op) is not Operator:
        return op
    made = itertools.count(1)

    def matmat(block: Tensor) -> Tensor:
        number, of = next(made), "" if keeper is None else fingerprint_of({"block": block})
        name = f"{_PRODUCT}{number}"
        kept = None if keeper is None else keeper.read(name)
        if kept is not None and kept[1] == of:
            return kept[0]["product"].to(block)
        if progress is not None:
            progress(f"eigenvectors: product {number} of the Hessian", 0, 0)
        begin = time.monotonic()
        product = op @ block
        if keeper is not None and time.monotonic() - begin >= _WORTH:
            keeper.write(name, {"product": product}, of)
        return product

    return Operator(matmat, op.size, dtype=op.dtype, device=op.device, shapes=op.shapes, notes=op.notes)
