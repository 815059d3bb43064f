"""The command line: options come from dataclasses (tyro), tables and progress from Rich. The only place that prints.

A command is a dataclass with a `run` method that shows its result and returns it as plain values, one file each; `main`
writes those as JSON if asked and turns what happened into an exit code. PyTorch is imported inside `run`, so `--help`
is quick.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, arg, subcommand

from spiritlevel import __version__
from spiritlevel.cli import data, reproduce
from spiritlevel.cli.audit import Audit
from spiritlevel.cli.base import (
    BAD_INPUT,
    BUG,
    CHECK_FAILED,
    DONE,
    INTERRUPTED,
    PIPE_CLOSED,
    Command,
    Seeded,
    check_writable,
    say,
)
from spiritlevel.cli.claims import Claims
from spiritlevel.cli.compare import Compare
from spiritlevel.cli.data import Data
from spiritlevel.cli.demo import Demo
from spiritlevel.cli.measure import Measure
from spiritlevel.cli.measures import Measures
from spiritlevel.cli.parsing import in_options, parse
from spiritlevel.cli.perturb import Perturb
from spiritlevel.cli.plot import Plot
from spiritlevel.cli.rank import Rank
from spiritlevel.cli.report import Report
from spiritlevel.cli.reproduce import Reproduce
from spiritlevel.cli.samples import Samples
from spiritlevel.cli.streams import Signals, forgiving
from spiritlevel.errors import (
    InputError,
    NotExactError,
    checked_seed,
    is_out_of_memory,
    named_error,
    unknown_name,
)

COMMANDS: dict[str, Callable[[Sequence[str]], Command]] = {
    **{
        kind.NAME: partial(parse, kind, f"spiritlevel {kind.NAME}")
        for kind in (Demo, Measure, Compare, Perturb, Rank, Audit, Samples, Plot, Claims, Measures, Report)
    },
    "reproduce": reproduce.parse,  # one kind per study, built on demand
    "data": data.parse,
}


@dataclass(frozen=True)
class Spiritlevel:
    """A spirit level for loss surfaces. Try `spiritlevel COMMAND --help`, or `spiritlevel --version`."""

    command: Annotated[
        Annotated[Demo, subcommand("demo")]
        | Annotated[Measure, subcommand("measure")]
        | Annotated[Compare, subcommand("compare")]
        | Annotated[Perturb, subcommand("perturb")]
        | Annotated[Rank, subcommand("rank")]
        | Annotated[Audit, subcommand("audit")]
        | Annotated[Samples, subcommand("samples")]
        | Annotated[Plot, subcommand("plot")]
        | Annotated[Reproduce, subcommand("reproduce")]
        | Annotated[Claims, subcommand("claims")]
        | Annotated[Measures, subcommand("measures")]
        | Annotated[Data, subcommand("data")]
        | Annotated[Report, subcommand("report")],
        arg(name=""),
    ]


def _parse(args: list[str]) -> Command | int:
    """The command to run, or an exit code if there is nothing left to do."""
    if args in (["--version"], ["-V"]):
        print(f"spiritlevel {__version__}")
        return DONE
    try:
        if not args or args[0] in ("-h", "--help"):
            tyro.cli(Spiritlevel, prog="spiritlevel", args=["--help"], config=(FlagCreatePairsOff,))
        if args[0].startswith("-"):
            raise InputError(f"the command comes first, then its options, got {args[0]!r}. See `spiritlevel --help`.")
        if args[0] not in COMMANDS:
            raise InputError(f"{unknown_name('command', args[0], COMMANDS)} See `spiritlevel --help`.")
        return COMMANDS[args[0]](args[1:])
    except InputError as error:
        say(str(error))
        return BAD_INPUT
    except SystemExit:  # of --help
        return DONE


def _run(command: Command) -> int:
    try:
        if command.json is not None:
            check_writable(command.json)
        if isinstance(command, Seeded):
            checked_seed(command.seed, "--seed")
        payload, passed = command.run()
        if command.json is not None and payload is not None:
            from spiritlevel.results import write_atomically

            heading: dict[str, object] = {"command": command.NAME, "version": __version__}
            heading |= {"seed": command.seed} if isinstance(command, Seeded) else {}
            text = json.dumps({**heading, **payload}, allow_nan=False, ensure_ascii=False, indent=2)
            write_atomically(command.json, text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (InputError, NotExactError, OSError) as error:
        if command.debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.strerror:
            say(f"{error.strerror}{'' if error.filename is None else f': {error.filename}'}.")
        else:
            say(in_options(str(error), command))
        return BAD_INPUT
    return DONE if passed else CHECK_FAILED


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 ran but a check failed, 2 bad input, 70 a bug in spiritlevel, 130 interrupted (143 by SIGTERM), 141 the
    reader has gone.

    >>> main(["--version"])
    spiritlevel ...
    0
    """
    # Threads that wait for each other must not spin: on a busy machine that made the demo thirteen times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # likewise by NumPy and SciPy, whose second thread would spin
    with forgiving(), Signals() as signals:
        try:
            command = _parse(list(sys.argv[1:] if args is None else args))
            return command if isinstance(command, int) else _run(command)
        except (BrokenPipeError, SystemExit):  # the reader of a pipe has gone (Rich exits): stop without a word
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        except (Exception, KeyboardInterrupt) as error:
            if is_out_of_memory(error):
                say(
                    f"there is not enough memory for this ({named_error(error)}); measure fewer samples (--samples), "
                    "smaller batches or a smaller model."
                )
                return BAD_INPUT
            if signals.received or isinstance(error, KeyboardInterrupt):  # or what a library made of the interrupt
                told = str(error) if isinstance(error, KeyboardInterrupt) else ""
                say(told or "interrupted.")  # a command that stops in good order says what it has left behind
                return 128 + signals.received if signals.received else INTERRUPTED
            traceback.print_exc()
            say("this is a bug in spiritlevel; please report it with the lines above.")
            return BUG
