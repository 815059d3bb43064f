"""`spiritlevel data`: list, fetch and find data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg, subcommand

from spiritlevel.cli import parsing
from spiritlevel.cli.base import Command, Outcome, ProgressBar, say
from spiritlevel.errors import InputError, unknown_name

_WITH_LICENCES = 124  # columns of a terminal in which licences stand beside the sets, and not below


@dataclass(frozen=True, kw_only=True)
class DataList(Command):
    """List the data sets by name, and where each one is.

    For example: spiritlevel data list
    """

    NAME = "data list"

    def run(self) -> Outcome:
        """One row per data set."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from spiritlevel import data

        rows = [row._asdict() for row in data.describe()]
        console = Console()
        beside = console.width >= _WITH_LICENCES
        shown = [heading for heading in rows[0] if heading != "licence" or beside]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in shown:
            number = isinstance(rows[0][heading], int)
            whole = heading != "where"  # a truncated number would be a different number
            table.add_column(heading, justify="right" if number else "left", overflow="fold", no_wrap=whole)
        for row in rows:
            table.add_row(*(_cell(row[heading]) for heading in shown))
        console.print(table)
        if not beside:
            console.print("Licences:", style="dim")
            for row in rows:
                console.print(f"{row['name']}: {row['licence']}", style="dim", highlight=False)
        return Outcome({"data": rows})


@dataclass(frozen=True, kw_only=True)
class DataGet(Command):
    """Fetch a data set, check its hashes, keep it in the cache and print where it is.

    For example: spiritlevel data get mnist
    """

    NAME = "data get"

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """One of the names that `spiritlevel data list` shows."""

    def run(self) -> Outcome:
        """Fetch once; a second call finds it in the cache."""
        from spiritlevel import data

        with ProgressBar() as progress:
            where = data.fetch(self.name, progress)
        print(where)
        return Outcome({"name": self.name, "path": str(where)})


@dataclass(frozen=True, kw_only=True)
class DataPath(Command):
    """Print where a data set is on this machine; exit code 1 if it is not here yet.

    For example: spiritlevel data path mnist
    """

    NAME = "data path"

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """One of the names that `spiritlevel data list` shows."""

    def run(self) -> Outcome:
        """Look, but fetch nothing."""
        from spiritlevel import data

        where = data.path(self.name)
        if where is None:
            say(f"{self.name} is not on this machine; `spiritlevel data get {self.name}` fetches it.")
            return Outcome({"name": self.name, "path": None}, passed=False)
        print(where)
        return Outcome({"name": self.name, "path": str(where)})


@dataclass(frozen=True)
class Data:
    """List, fetch and find data sets.

    For example: spiritlevel data list
    """

    command: Annotated[
        Annotated[DataList, subcommand("list")]
        | Annotated[DataGet, subcommand("get")]
        | Annotated[DataPath, subcommand("path")],
        arg(name=""),
    ]


COMMANDS: dict[str, type[Command]] = {"list": DataList, "get": DataGet, "path": DataPath}


def parse(args: Sequence[str]) -> Command:
    """The command for `spiritlevel data ARGS`."""
    if not args:
        raise InputError(f"data needs one of {', '.join(COMMANDS)}. See `spiritlevel data --help`.")
    if args[0] in COMMANDS:
        return parsing.parse(COMMANDS[args[0]], f"spiritlevel data {args[0]}", args[1:])
    if not args[0].startswith("-"):
        raise InputError(f"{unknown_name('command', args[0], COMMANDS)} See `spiritlevel data --help`.")
    return parsing.parse(Data, "spiritlevel data", args).command


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return "×".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
