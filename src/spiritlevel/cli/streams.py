"""What lies between a command and its surroundings: streams that cannot show every character, and signals to stop."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_ASCII = {
    **{"−": "-", "–": "-", "—": "-", "─": "-", "━": "-", "│": "|", "┃": "|", "‖": "||", "∖": "\\"},
    **{"×": "x", "±": "+-", "≥": ">=", "≤": "<=", "≠": "!=", "≈": "~", "→": "->", "…": "...", "·": "*", "∞": "inf"},
    **{"‘": "'", "’": "'", "“": '"', "”": '"', "½": "1/2", "√": "sqrt", "Σ": "sum", "∑": "sum", "∇": "grad"},
}


def spelled_out(letter: str) -> str:
    """A character in ASCII: a sign that means the same, the name of a Greek letter, and a question mark for the rest.

    >>> [spelled_out(letter) for letter in "−×₁λ½é╭木"]
    ['-', 'x', '1', 'lambda', '1/2', 'e', '+', '?']
    """
    if 0xDC80 <= ord(letter) <= 0xDCFF:  # how Python keeps a byte of a name that is not UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    name = unicodedata.name(letter, "")
    if "GREEK" in name and " LETTER " in name:
        return name.split(" LETTER ")[1].split()[0].lower().replace("lamda", "lambda")
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return _ASCII.get(letter) or plain or ("+" if name.startswith("BOX DRAWINGS") else "?")


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(spelled_out, error.object[error.start : error.end])), error.end


codecs.register_error("spiritlevel", _replace)


@contextmanager
def forgiving() -> Iterator[None]:
    """Make standard output and error take every character, in whatever form their encoding allows."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="spiritlevel")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=errors)


class Signals:
    """The first SIGINT or SIGTERM ends the work in good order, by a `KeyboardInterrupt`; the second ends it at once.

    Signals that the environment ignores or uses itself are left alone: a process of torchrun that waited for
    the others after a SIGTERM would wait forever.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            wanted = [signal.SIGINT] if os.environ.get("WORLD_SIZE", "1") != "1" else [signal.SIGINT, signal.SIGTERM]
            for number in wanted:
                before = signal.getsignal(number)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = before
                    signal.signal(number, self._end)
        return self

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._before:  # the system's own way, which does not wait for Python
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
