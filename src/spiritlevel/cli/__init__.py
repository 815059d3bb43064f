"""The command line: options come from dataclasses (tyro), tables and progress from Rich. The only place that prints.

A command is a dataclass with a `run` method that shows its result and returns it as plain values, one file each; `main`
writes those as JSON if asked and turns what happened into an exit code. PyTorch is imported inside `run`, so `--help`
is quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, arg, subcommand

from spiritlevel import __version__
from spiritlevel.cli import reproduce
from spiritlevel.cli.audit import Audit
from spiritlevel.cli.base import (
    BAD_INPUT,
    BUG,
    CHECK_FAILED,
    DONE,
    INTERRUPTED,
    PIPE_CLOSED,
    Command,
    check_writable,
    say,
)
from spiritlevel.cli.claims import Claims
from spiritlevel.cli.compare import Compare
from spiritlevel.cli.data import Data
from spiritlevel.cli.demo import Demo
from spiritlevel.cli.measure import Measure
from spiritlevel.cli.report import Report
from spiritlevel.cli.reproduce import Reproduce
from spiritlevel.errors import InputError, NotExactError, unknown_name


@dataclass(frozen=True)
class Spiritlevel:
    """A spirit level for loss surfaces. Try `spiritlevel COMMAND --help`, or `spiritlevel --version`."""

    command: Annotated[
        Annotated[Demo, subcommand("demo")]
        | Annotated[Measure, subcommand("measure")]
        | Annotated[Compare, subcommand("compare")]
        | Annotated[Audit, subcommand("audit")]
        | Annotated[Reproduce, subcommand("reproduce")]
        | Annotated[Claims, subcommand("claims")]
        | Annotated[Data, subcommand("data")]
        | Annotated[Report, subcommand("report")],
        arg(name=""),
    ]


def _sentence(box: str) -> str:
    """The sections of tyro's boxed complaint as sentences, without its title and the help text."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    sections = re.split(r"^(?:[-─]{3,}|[╭╰].*)$", "\n".join(lines), flags=re.MULTILINE)[1:]
    sentences = [_plain(" ".join(text.split()).rstrip(".")) for text in sections]
    wanted = [text for text in sentences if text and not text.startswith(("For full helptext", "Argument helptext"))]
    text = ". ".join(wanted)
    if misspelt := re.match(r"Unrecognized options: (\w+)\S*.*Available subcommands: (.*)", text):
        return str(unknown_name("command", misspelt[1], misspelt[2].split(", ")))
    return f"{text}. See `spiritlevel --help`." if wanted else box


def _plain(complaint: str) -> str:
    """A union's complaint, which names Python's types, as what the option takes and what it got.

    >>> _plain("Error parsing --weights: no type matching {None}|{PATH PATH} could be instantiated from ['a.pt']. Got")
    "--weights takes PATH PATH, got ['a.pt']"
    """
    union = re.match(r"Error parsing (\S+): no type matching (.*) could be instantiated from (\[.*?\])", complaint)
    if union is None:
        return complaint
    wanted = " or ".join(kind for kind in re.findall(r"{(.*?)}", union[2]) if kind != "None")
    return f"{union[1]} takes {wanted}, got {union[3]}"


def _parse(args: list[str]) -> Command | int:
    """The command that was asked for, or an exit code if there is nothing left to do."""
    if args in (["--version"], ["-V"]):
        print(f"spiritlevel {__version__}")
        return DONE
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if args[:1] == ["reproduce"]:
                return reproduce.parse(args[1:])
            parsed = tyro.cli(Spiritlevel, prog="spiritlevel", args=args or ["--help"], config=(FlagCreatePairsOff,))
    except InputError as error:
        say(str(error))
        return BAD_INPUT
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return DONE
        lists = [option for option in ("--measures", "--transforms") if option in args]
        hint = f"{lists[0]} takes one list, with commas and no spaces." if lists else ""
        say(f"{_sentence(complaint.getvalue())} {hint}")
        return BAD_INPUT
    return parsed.command.command if isinstance(parsed.command, Data) else parsed.command


def _run(command: Command) -> int:
    try:
        if command.json is not None:
            check_writable(command.json)
        payload, passed = command.run()
        if command.json is not None and payload is not None:
            from spiritlevel.results import write_atomically

            heading = {"command": type(command).__name__, "version": __version__, "seed": command.seed}
            text = json.dumps({**heading, **payload}, allow_nan=False, ensure_ascii=False, indent=2)
            write_atomically(command.json, text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (InputError, NotExactError, OSError) as error:
        if command.debug:
            traceback.print_exc()
        say(f"{error.strerror}: {error.filename}." if isinstance(error, OSError) and error.strerror else str(error))
        return BAD_INPUT
    return DONE if passed else CHECK_FAILED


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 ran and a check failed, 2 bad input, 70 a bug in spiritlevel, 130 interrupted.

    >>> main(["--version"])
    spiritlevel ...
    0
    """
    # Threads that wait for each other must not spin: on a busy machine that made the demo thirteen times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    try:
        command = _parse(list(sys.argv[1:] if args is None else args))
        return command if isinstance(command, int) else _run(command)
    except KeyboardInterrupt:
        say("interrupted.")
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the reader of a pipe has gone (Rich exits): stop without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception:
        traceback.print_exc()
        say("this is a bug in spiritlevel; please report it with the lines above.")
        return BUG
