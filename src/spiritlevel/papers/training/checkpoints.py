"""A training run on disk: complete at every moment, and identified by its contents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.storage import digest, plain, write_atomically

if TYPE_CHECKING:
    from spiritlevel.papers.training.running import Run


_CHECKPOINT_SECONDS = 20.0
_CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints
# What a training run may remove from its folder, which may hold other files too: its checkpoints, and what
# `write_atomically` leaves of a file that a killed process was writing.
_OWN = re.compile(
    r"checkpoint-\d+-[0-9a-f]{8}\.safetensors|\.(?:state\.json|(?:step|checkpoint)-[0-9a-f-]+\.safetensors)\.[0-9a-f]{16}"
)


class Folder:
    """One training run on disk: `state.json`, and the tensor files that it names with their SHA-256."""

    def __init__(self, path: Path, key: str, config: Any) -> None:
        self.path, self.key, self.config = path, key, config
        self.files: dict[str, str] = {}
        self.last_write, self.cost = time.monotonic(), 0.0

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot keep the training run in {self.path} ({error.strerror or error}): free some space, or set "
                "SPIRITLEVEL_CACHE to a writable folder."
            ) from error

    def read(self) -> dict[str, Any] | None:
        """The state, if all of it is there and undamaged."""
        try:
            state = json.loads((self.path / "state.json").read_bytes())
            seal = state.pop("sha256")
            if seal != digest(state, 64) or state["key"] != self.key:
                return None
            for name, sha256 in state["files"].items():
                with (self.path / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                        return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        self.files = dict(state["files"])
        return dict(state)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, which is first compared with its SHA-256."""
        try:
            content = (self.path / name).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != self.files[name]:
            raise InputError(f"{self.path / name} is missing or was changed after it was written; train again.")
        return safetensors.torch.load(content)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        content = safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
        with self.speaking():
            write_atomically(self.path / name, content)
        self.files[name] = hashlib.sha256(content).hexdigest()

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Make the files written so far, together with `facts`, the current state."""
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        state = {**facts, "key": self.key, "config": plain(self.config), "files": self.files, "versions": versions}
        with self.speaking():
            write_atomically(self.path / "state.json", json.dumps({"sha256": digest(state, 64), **state}, indent=1))
            self.clean()

    def clean(self) -> None:
        """Remove old checkpoints and what a killed process left half-written."""
        for file in self.path.iterdir():
            if _OWN.fullmatch(file.name) and file.name not in self.files:
                file.unlink(missing_ok=True)

    def checkpoint(self, run: Run) -> None:
        """Write a checkpoint and forget the last one, if it is time to."""
        now = time.monotonic()
        if now - self.last_write < max(_CHECKPOINT_SECONDS, self.cost / _CHECKPOINT_SHARE):
            return
        self.suspend(run)
        self.last_write = time.monotonic()
        self.cost = self.last_write - now

    def suspend(self, run: Run) -> None:
        """Write a checkpoint from which another call can continue."""
        self._forget_checkpoint()
        name = f"checkpoint-{run.step}-{secrets.token_hex(4)}.safetensors"  # never the name of the one in use
        self.write(name, run.tensors())
        self.commit({**run.facts(), "checkpoint": name, "finished": False})

    def finish(self, run: Run) -> None:
        self._forget_checkpoint()
        self.commit({**run.facts(), "finished": True})

    def _forget_checkpoint(self) -> None:
        self.files = {name: seal for name, seal in self.files.items() if not name.startswith("checkpoint-")}


def sealed(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's shape, type and values."""
    content = safetensors.torch.save({"": tensor.detach().cpu().contiguous()})
    return hashlib.sha256(content).hexdigest()


def kept_name(step: int) -> str:
    """The name of the file that holds the weights of a step."""
    return f"step-{step}.safetensors"


def kept_steps(files: Iterable[str]) -> set[int]:
    """The steps whose weights are among the files."""
    return {int(name[len("step-") : -len(".safetensors")]) for name in files if name.startswith("step-")}
