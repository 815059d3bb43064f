"""What all commands share: options, exit codes, the progress bar, the sentence on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from spiritlevel.cli.parsing import optional
from spiritlevel.errors import InputError, printable, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LONGEST = 300  # characters in a word: somebody has passed a file's content in place of its name
DONE, CHECK_FAILED, BAD_INPUT, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 70, 130, 141


class Outcome(NamedTuple):
    """What a command found, as plain values for JSON, and whether all its checks passed.

    A process that leaves the reporting to rank 0 found nothing (None).
    """

    payload: dict[str, Any] | None
    passed: bool = True


@dataclass(frozen=True, kw_only=True)
class Command(ABC):
    """What all commands share."""

    NAME: ClassVar[str]  # as it is written on the command line
    RENAMED: ClassVar[Mapping[str, str]] = {}  # options that had another name: old → new; the old ones work and warn

    json: Annotated[Path | None, optional("FILE")] = None
    """Also write the result to FILE, as strict JSON."""
    debug: Annotated[bool, optional()] = False
    """Show the traceback of an error."""

    @abstractmethod
    def run(self) -> Outcome:
        """Do the work and show it."""


@dataclass(frozen=True, kw_only=True)
class Seeded(Command):
    """A command that draws random numbers."""

    seed: int = 0
    """Random seed."""


class ProgressBar:
    """A callable `(what, done, total)` that shows how far the work has come.

    On a terminal that is a bar, once the work has taken two seconds. Elsewhere, in a log, it is a line every ten
    seconds, even while the work reports nothing: quick work leaves no line, and slow work never looks dead.
    """

    PATIENCE = 2.0
    BETWEEN_LINES = 10.0

    def __init__(self) -> None:
        self._begin = self._said = time.monotonic()
        self._state: tuple[str, int, int] = ("", 0, 0)
        self._since = (self._begin, 0)  # when this work was first heard of, and how much of it was done by then
        self._over = threading.Event()
        self._bar: Progress | None = None
        self._total = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report progress; `total` is 0 where unknown."""
        if self._bar is None:
            if not sys.stderr.isatty():
                if (what.partition(":")[0], total) != (self._state[0].partition(":")[0], self._state[2]):
                    self._since = (time.monotonic(), done)
                self._state = what, done, total
                self._log()
                return
            if time.monotonic() - self._begin < self.PATIENCE:
                return
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what)
            self._bar.start()
        if total != self._total:  # it counts other things now: the bar and its clock start again, under a new name
            self._bar.reset(self._task, completed=done, total=total or None, description=what)
            self._total = total
        self._bar.update(self._task, description=what, completed=done, total=total or None)

    def _log(self) -> None:
        now, (what, done, total) = time.monotonic(), self._state
        if now - self._said < self.BETWEEN_LINES or not what:
            return
        self._said = now
        since, before = self._since
        times = [_duration(now - self._begin)]
        if total and done > before:
            times.append(f"about {_duration((now - since) * (total - done) / (done - before))} left")
        say(f"{what}{f', {done:,} of {total:,}' if total else ''} ({', '.join(times)})")

    def _watch(self) -> None:
        while not self._over.wait(self.BETWEEN_LINES / 10):
            self._log()

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min" if seconds < 7200 else f"{int(seconds // 3600)} h"


def say(sentence: str) -> None:
    """One sentence on standard error."""
    words = (
        word if len(word) <= _LONGEST else f"{word[: _LONGEST // 2]}…{word[-2:]}"
        for word in printable(sentence).split()
    )
    print(f"spiritlevel: {' '.join(words)}", file=sys.stderr, flush=True)


def tell(line: str) -> None:
    """A line on standard output that holds names from elsewhere: no terminal obeys anything in them."""
    print(printable(line))


def tell_notes(notes: Iterable[str]) -> None:
    """Sentences on standard output, broken between words; each once, and none that is empty."""
    to = console()
    for note in filter(None, dict.fromkeys(notes)):
        to.print(note, markup=False)


def console() -> Console:
    """A console for texts and tables of texts that hold names from elsewhere."""
    from rich.console import Console
    from rich.text import Text

    class Harmless(Console):
        def render_str(self, text: str, *rest: Any, **more: Any) -> Text:
            return super().render_str(printable(text), *rest, **more)

    return Harmless(highlight=False)


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuse a bad place for the result before the work is done, not after."""
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()  # `exists` would say only that it is not there
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    except (OSError, ValueError) as error:  # too long for a name, or with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{option} needs the path of a file that can be written, got {shown(str(path))}: {reason}."
        ) from error
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option} needs the path of a file that can be written, got {str(path)!r}.")
    if not path.exists():
        _try_folder(folder, option, path)


def _try_folder(folder: Path, option: str, path: Path) -> None:
    """Make a folder where the result will be: some places that look writable, such as /proc, take nothing."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix=".spiritlevel-", dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{option} needs the path of a file that can be written, got {str(path)!r}: nothing can be made in "
            f"{str(folder)!r} ({reason})."
        ) from error


def check_folder(folder: Path) -> None:
    """Refuse a bad place for a run before the work is done, not after."""
    a_file = False
    with contextlib.suppress(OSError, ValueError):  # the next check says what is wrong with the name
        a_file = folder.exists() and not folder.is_dir()
    if a_file:
        raise InputError(f"--out needs a folder, but {str(folder)!r} is a file.")
    if folder.suffix in (".html", ".json", ".pdf") and not folder.is_dir():
        name = str(folder.with_suffix(""))
        raise InputError(
            f"--out needs a folder, but {str(folder)!r} is named like a file; write --out {name!r}, and the page will "
            "be report.html in there."
        )
    check_writable(folder / "report.html", "--out")
