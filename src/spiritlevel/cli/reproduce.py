"""`spiritlevel reproduce STUDY`: an experiment of the papers again, our numbers beside theirs, with verdicts.

Each study is a subcommand whose options come from its config. Building one imports every study, so it is done only when
this command is asked for.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
from tyro.conf import arg

from spiritlevel.cli.base import Command, Outcome, ProgressBar
from spiritlevel.errors import InputError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Reproduce(Command):
    """Run an experiment of the papers again and set our numbers beside theirs, with a verdict on each.

    For example: spiritlevel reproduce affine --scale laptop --seeds 0,1,2
    """

    scale: Annotated[str, arg(metavar="smoke|laptop|paper")] = "laptop"
    """smoke: seconds; laptop: minutes, on narrowed networks and subsets; paper: the full recipe."""
    seed: int = 0
    """The first seed; laptop scale runs five of them, from here."""
    seeds: Annotated[str | None, arg(metavar="S,S,...")] = None
    """Run these seeds instead, each an independent job."""
    cluster: Annotated[str | None, arg(metavar="ray|ray://HOST:PORT")] = None
    """Run the jobs on a Ray cluster: one on this machine for the time of the command, or a running one."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("results")
    """Each run keeps its summary, tables and charts in a folder below DIR; a finished run is not run again."""

    def run(self) -> Outcome:
        """Show the rules, run the jobs, show the verdicts."""
        from rich.console import Console

        from spiritlevel.studies import combine, execute, find

        study, given = find(type(self).__name__), _given(self)
        count = study.seeds.get(self.scale, 1)
        seeds = list(range(self.seed, self.seed + count)) if self.seeds is None else _values("--seeds", self.seeds, int)
        jobs = study.jobs(self.scale, seeds=seeds, **given)
        console = Console()
        console.print(f"{study.title} ({study.source}), {self.scale} scale, {len(jobs)} jobs.", highlight=False)
        for statement in study.statements:
            middle = f"; in direction if {statement.direction}" if statement.direction else ""
            console.print(f"  {statement.id}: reproduced if {statement.reproduced}{middle}.", style="dim", markup=False)
        with ProgressBar() as progress:
            if self.cluster is not None:
                from spiritlevel.cluster import run_jobs

                summaries = run_jobs(study.name, jobs, self.out, address=self.cluster, progress=progress)
            else:
                summaries = []
                for number, config in enumerate(jobs, 1):
                    where = f"{study.name} {number}/{len(jobs)}: " if len(jobs) > 1 else ""
                    report = lambda what, done, total, where=where: progress(where + what, done, total)  # noqa: E731
                    summaries.append(execute(study, config, self.out, progress=report))
        rows = combine(summaries)
        folders = [str(study.folder(config, self.out)) for config in jobs]
        show(rows, varied(summaries), console)
        console.print(f"Tables and charts: {folders[0] if len(folders) == 1 else self.out / study.name}", markup=False)
        return Outcome({"study": study.name, "scale": self.scale, "rows": rows, "runs": folders})


@dataclass(frozen=True, kw_only=True)
class Listing(Command):
    """The experiments that can be run again."""

    def run(self) -> Outcome:
        """One line a study."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from spiritlevel.studies import catalogue

        print("usage: spiritlevel reproduce STUDY [--scale smoke|laptop|paper] [--seeds S,S,...] [--out DIR]")
        rows = [{"study": s.name, "paper": s.source, "shows": s.title} for s in catalogue().values()]
        table = Table(*rows[0], box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row.values())
        Console().print(table)
        print("For example: spiritlevel reproduce affine --scale laptop")
        print("Options of a study: spiritlevel reproduce STUDY --help")
        return Outcome({"studies": rows})


def show(rows: Sequence[Mapping[str, Any]], settings: Sequence[str], console: Any) -> None:
    """One row for each statement and setting: paper, ours, verdict."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (*settings, "statement", "paper", "ours", "verdict"):
        table.add_column(heading, overflow="fold")
    colours = {"reproduced": "green", "reproduced in direction": "yellow", "not reproduced": "red"}
    for row in rows:
        verdict = row["verdict"] + (f" ({row['agree']} of {row['seeds']} seeds)" if row["seeds"] > 1 else "")
        cells = [str(row["config"][name]) for name in settings]
        style = colours.get(row["verdict"], "")
        said = row["text"] + (f" — {row['remark']}" if row["remark"] else "")
        table.add_row(*cells, Text(said), Text(row["paper"]), Text(number(row)), Text(verdict, style=style))
    console.print(table)


def number(row: Mapping[str, Any]) -> str:
    """Our value with its interval, as text."""
    if row["ours"] is None or isinstance(row["ours"], str):
        return row["ours"] or "undefined"
    limits = "" if row["low"] is None else f" [{row['low']:.3g}, {row['high']:.3g}]"
    return f"{row['ours']:.4g}{limits}"


def varied(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which the jobs differ, seeds apart."""
    first = summaries[0]["config"]
    return [name for name in first if name != "seed" and any(s["config"][name] != first[name] for s in summaries)]


def _subcommand(study: Any) -> type:
    """A command with the study's own options; each takes one value, or several between commas for as many jobs."""
    hints = typing.get_type_hints(study.config)
    notes = _notes(study.config)
    fields = [
        (field.name, Annotated[str | None, arg(metavar=_kind(hints[field.name]), help=notes.get(field.name, ""))], None)
        for field in dataclasses.fields(study.config)
        if field.name not in ("scale", "seed")
    ]
    made = dataclasses.make_dataclass(study.name, fields, bases=(Reproduce,), frozen=True, kw_only=True)
    made.__doc__ = f"{study.title} ({study.source}).\n\nFor example: spiritlevel reproduce {study.name} --scale smoke"
    return made


def _given(command: Reproduce) -> dict[str, Any]:
    """The study's options that were given, as values of the types that its config declares."""
    from spiritlevel.studies import find

    study = find(type(command).__name__)
    hints = typing.get_type_hints(study.config)
    own = {field.name for field in dataclasses.fields(study.config)} - {"scale", "seed"}
    texts = {name: getattr(command, name) for name in sorted(own)}
    return {
        name: _values(f"--{name.replace('_', '-')}", text, hints[name])
        for name, text in texts.items()
        if text is not None
    }


def _values(option: str, text: str, kind: Any) -> list[Any]:
    """The values between the commas of an option: several for a plain field, one tuple for a field that is a tuple.

    >>> _values("--width", "0.5,1", float), _values("--gammas", "0,1e-4", tuple[float, ...])
    ([0.5, 1.0], [(0.0, 0.0001)])
    >>> _values("--width", "wide", float)
    Traceback (most recent call last):
    spiritlevel.errors.InputError: --width takes float, or several between commas, got 'wide'.
    """
    try:
        if typing.get_origin(kind) is tuple:
            (inner, *_) = typing.get_args(kind)
            return [tuple(_value(part, inner) for part in text.split(",") if part)]
        return [_value(part, kind) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{option} takes {_kind(kind)}, or several between commas, got {text!r}.") from error


def _value(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if text.lower() == "none" else _value(text, options[0])
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise unknown_name("value", text, typing.get_args(kind))
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text)


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(map(str, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _notes(config: type) -> dict[str, str]:
    """The string below each field of a config class and of its bases: the help text of its option."""
    notes: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
        for field, note in itertools.pairwise(body):
            text = note.value.value if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, str):
                notes[field.target.id] = text
    return notes


def parse(args: Sequence[str]) -> Command:
    """The command for `spiritlevel reproduce ARGS`; without a study, one that lists them."""
    from spiritlevel.studies import catalogue, find

    studies = catalogue()
    place = next((place for place, word in enumerate(args) if word in studies), None)
    if place is None:
        if args and not args[0].startswith("-"):
            find(args[0])  # says which names there are
        return tyro.cli(
            Listing, prog="spiritlevel reproduce", args=[word for word in args if word not in ("-h", "--help")]
        )
    kind, prog = _subcommand(studies[args[place]]), f"spiritlevel reproduce {args[place]}"
    rest = [*args[:place], *args[place + 1 :]]
    return tyro.cli(kind, prog=prog, args=rest, config=(tyro.conf.FlagCreatePairsOff,))
