"""What all commands share: options, exit codes, the progress bar, the sentence on standard error."""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from tyro.conf import arg

from spiritlevel.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

DONE, CHECK_FAILED, BAD_INPUT, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 70, 130, 141


class Outcome(NamedTuple):
    """What a command found, as plain values for JSON, and whether all its checks passed.

    Nothing (None) was found by a process whose rank 0 tells it.
    """

    payload: dict[str, Any] | None
    passed: bool = True


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """What all commands share."""

    json: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also write the result to FILE, as strict JSON."""
    seed: int = 0
    """Start of everything random."""
    debug: bool = False
    """Show the traceback of an error."""

    @abstractmethod
    def run(self) -> Outcome:
        """Do the work and show it."""


class ProgressBar:
    """A callable `(what, done, total)` that shows a bar on a terminal once the work has taken two seconds."""

    PATIENCE = 2.0

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report progress; `total` is 0 where unknown."""
        if self._bar is None:
            if time.monotonic() - self._begin < self.PATIENCE or not sys.stderr.isatty():
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what)
            self._bar.start()
        self._bar.update(self._task, description=what, completed=done, total=total or None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def say(sentence: str) -> None:
    """One sentence on standard error."""
    print(f"spiritlevel: {' '.join(sentence.split())}", file=sys.stderr)


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuse a place for the result before the work is done, not after."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option} needs the path of a file that can be written, got {str(path)!r}.")
