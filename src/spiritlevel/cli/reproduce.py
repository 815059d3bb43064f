"""`spiritlevel reproduce STUDY`: one of the papers' experiments re-run, our numbers beside theirs, with verdicts.

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

from tyro.conf import arg

from spiritlevel.cli import parsing
from spiritlevel.cli.base import Command, Outcome, ProgressBar, Seeded, check_folder
from spiritlevel.errors import InputError, checked_seed, counted, unknown_name
from spiritlevel.memory import keep_freed_memory


@dataclass(frozen=True, kw_only=True)
class Reproduce(Seeded):
    """Re-run one of the papers' experiments and set our numbers beside theirs, with a verdict on each.

    For example: spiritlevel reproduce affine --scale laptop --seeds 0,1,2
    """

    NAME = "reproduce"

    scale: Annotated[
        str,
        arg(
            metavar="smoke|laptop|small|paper",
            help=(
                "smoke: seconds; laptop: minutes, on narrowed networks and subsets; small (some studies): hours, on "
                "narrowed networks that generalise; paper: the full recipe."
            ),
        ),
    ] = "laptop"
    seed: int = 0
    """The first seed; laptop scale runs five and small scale three, counting up from here."""
    seeds: Annotated[str | None, arg(metavar="S,S,...", help_behavior_hint="(default: those of the scale)")] = None
    """Run these seeds instead, each an independent job."""
    cluster: Annotated[str | None, parsing.optional("ray|ray://HOST:PORT")] = None
    """Run the jobs on a Ray cluster: one started on this machine for this command, or one already running."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("results")
    """Each run keeps its summary, tables and charts in a folder below DIR; a finished run is not repeated."""

    def run(self) -> Outcome:
        """Show the rules, run the jobs, show the verdicts."""
        from rich.console import Console

        from spiritlevel.papers.studies import combine, execute, find

        keep_freed_memory()
        check_folder(self.out)
        study, given = find(type(self).__name__), _given(self)
        count = study.seeds.get(self.scale, 1)
        seeds = list(range(self.seed, self.seed + count)) if self.seeds is None else _values("--seeds", self.seeds, int)
        for seed in seeds:
            checked_seed(seed, "--seeds")
        jobs = study.jobs(self.scale, seeds=seeds, **given)
        console = Console()
        heading = f"{study.title} ({study.source}), {self.scale} scale, {counted(len(jobs), 'job')}."
        console.print(heading, highlight=False)
        for statement in study.statements:
            rule = f"reproduced if {statement.reproduced}; fails if {statement.fails}"
            aside(f"{statement.id}: {rule}.", console)
        with ProgressBar() as progress:
            if self.cluster is not None:
                from spiritlevel.papers.cluster import run_jobs

                summaries = run_jobs(study.name, jobs, self.out, address=self.cluster, progress=progress)
            else:
                summaries = []
                for number, config in enumerate(jobs, 1):
                    where = f"{study.name} {number}/{len(jobs)}: " if len(jobs) > 1 else ""
                    report = lambda what, done, total, where=where: progress(where + what, done, total)  # noqa: E731
                    summaries.append(execute(study, config, self.out, progress=report))
        said = {config: study.reduced(config) for config in jobs}
        for text in dict.fromkeys(filter(None, said.values())):
            aside(f"Reduced: {text}.", console)
        rows = combine(summaries, study.statements)
        folders = [str(study.folder(config, self.out)) for config in jobs]
        show(rows, varied(summaries), console)
        console.print(f"Tables and charts: {folders[0] if len(folders) == 1 else self.out / study.name}", markup=False)
        return Outcome({"study": study.name, "scale": self.scale, "rows": rows, "runs": folders})


@dataclass(frozen=True, kw_only=True)
class Listing(Command):
    """The experiments that can be run again."""

    NAME = "reproduce"

    def run(self) -> Outcome:
        """One line per study."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from spiritlevel.papers.studies import catalogue

        print("usage: spiritlevel reproduce STUDY [--scale smoke|laptop|small|paper] [--seeds S,S,...] [--out DIR]")
        rows = [{"study": s.name, "paper": s.source, "shows": s.title} for s in catalogue().values()]
        table = Table(*rows[0], box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*row.values())
        Console().print(table)
        print("For example: spiritlevel reproduce affine --scale laptop")
        print("Options of a study: spiritlevel reproduce STUDY --help")
        return Outcome({"studies": rows})


def show(rows: Sequence[Mapping[str, Any]], settings: Sequence[str], console: Any) -> None:
    """One row for each statement and setting: paper, ours, verdict; the remarks, which are long, come below."""
    from rich.text import Text

    from spiritlevel.cli.show import columns, print_table

    table = columns(*settings, "statement", "paper", "ours", "verdict", whole=range(len(settings)))
    colours = {"reproduced": "green", "not reproduced": "red"}
    remarks = []
    for row in rows:
        cells = [str(row["config"][name]) for name in settings]
        style = colours.get(row["verdict"], "")
        ours = Text(number(row).replace(" [", "\n["))  # the interval below its number: neither is broken
        statement = f"{row['id']}: {row['text']}"  # the rules above and the remarks below go by this name
        table.add_row(*map(Text, cells), Text(statement), Text(row["paper"]), ours, Text(verdict(row), style=style))
        if row["remark"] or row["reason"]:
            reason = f"{row['reason'][:1].upper()}{row['reason'][1:]}." if row["reason"] else ""
            remarks.append(f"{', '.join([*cells, row['id']])}: {' '.join(filter(None, [reason, row['remark']]))}")
    print_table(console, table)
    for remark in remarks:
        aside(remark, console)


def aside(text: str, console: Any) -> None:
    """A text in small print, all its lines indented."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding.indent(Text(text, style="dim"), 2))


def verdict(row: Mapping[str, Any]) -> str:
    """The verdict in the words of its kind, with the number of seeds that agree with the paper."""
    if row["kind"] == "identity":
        return {"reproduced": "holds", "not reproduced": "does not hold"}.get(row["verdict"], row["verdict"])
    return row["verdict"] + (f", {row['agree']} of {row['seeds']} seeds" if row["seeds"] > 1 else "")


SMALLEST = 1e-300  # below it a number has lost its digits (and soon is zero)


def number(row: Mapping[str, Any]) -> str:
    """Our numbers with their intervals over the seeds, as text; × marks a ratio."""
    if not row["parts"]:
        return row["ours"] if isinstance(row["ours"], str) else "undefined"
    return "; ".join(f"{name} {_part(**part)}".lstrip() for name, part in row["parts"].items())


def _part(mean: float, low: float | None, high: float | None, ratio: bool) -> str:
    from spiritlevel.results.formatting import figure

    limits = "" if low is None or high is None else f" [{figure(low, 3)}, {figure(high, 3)}]"
    ours = f"below {SMALLEST:.0e}" if 0 < abs(mean) < SMALLEST else figure(mean)
    return f"{'× ' if ratio else ''}{ours}{limits}"


def varied(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which the jobs differ, apart from the seed."""
    first = summaries[0]["config"]
    return [name for name in first if name != "seed" and any(s["config"][name] != first[name] for s in summaries)]


def _subcommand(study: Any) -> type:
    """A command with the study's own options; each takes one value, or several separated by commas for as many jobs."""
    hints = typing.get_type_hints(study.config)
    notes = _notes(study.config)
    fields = []
    for field in dataclasses.fields(study.config):
        if field.name in ("scale", "seed"):
            continue
        shown = arg(
            metavar=_metavar(hints[field.name]),
            help=notes.get(field.name, ""),
            help_behavior_hint=f"(default: {_defaults(study, field)})",
        )
        fields.append((field.name, Annotated[str | None, shown], None))
    renamed = {"RENAMED": {_option(old): _option(new) for old, new in study.renamed.items()}}
    made = dataclasses.make_dataclass(
        study.name, fields, bases=(Reproduce,), namespace=renamed, frozen=True, kw_only=True
    )
    made.__doc__ = f"{study.title} ({study.source}).\n\nFor example: spiritlevel reproduce {study.name} --scale smoke"
    return made


def _option(field: str) -> str:
    """What a field is called on the command line."""
    return f"--{field.replace('_', '-')}"


def _defaults(study: Any, field: dataclasses.Field[Any]) -> str:
    """The default of a field, and the scales at which it is different."""
    swept = study.sweep.get(field.name)
    usual = ",".join(map(str, swept)) if swept else _shown(field.default)
    others = [f"{scale} {_shown(values[field.name])}" for scale, values in study.scales.items() if field.name in values]
    return "; ".join([usual, *others])


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value)) or "none"
    return "none" if value is None else str(value)


def _given(command: Reproduce) -> dict[str, Any]:
    """The study's options that were given, as values of the types that its config declares."""
    from spiritlevel.papers.studies import find

    study = find(type(command).__name__)
    hints = typing.get_type_hints(study.config)
    own = {field.name for field in dataclasses.fields(study.config)} - {"scale", "seed"}
    texts = {name: getattr(command, name) for name in sorted(own)}
    return {name: _values(_option(name), text, hints[name]) for name, text in texts.items() if text is not None}


def _values(option: str, text: str, kind: Any) -> list[Any]:
    """The comma-separated values of an option: several for a plain field, one tuple for a field that is a tuple.

    >>> _values("--width", "0.5,1", float), _values("--gammas", "0,1e-4", tuple[float, ...])
    ([0.5, 1.0], [(0.0, 0.0001)])
    >>> _values("--width", "wide", float)
    Traceback (most recent call last):
    spiritlevel.errors.InputError: --width takes a number, or several separated by commas, got 'wide'.
    """
    try:
        if typing.get_origin(kind) is tuple:
            (inner, *_) = typing.get_args(kind)
            return [tuple(_value(part, inner) for part in text.split(",") if part)]
        return [_value(part, kind) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{option} takes {_words(kind)}, or several separated by commas, got {text!r}.") from error


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


def _plain(hint: Any) -> Any:
    """The type of one value: without None, and for a tuple that of its items."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return _plain(next(kind for kind in typing.get_args(hint) if kind is not type(None)))
    return _plain(typing.get_args(hint)[0]) if typing.get_origin(hint) is tuple else hint


def _metavar(hint: Any) -> str:
    """How an option's value is written: `N`, `X,X,...`, `NAME`, `on|off`."""
    kind = _plain(hint)
    if typing.get_origin(kind) is typing.Literal:
        one = "|".join(map(str, typing.get_args(kind)))
    else:
        one = {int: "N", float: "X", bool: "true|false"}.get(kind, "NAME")
    return f"{one},{one},..." if typing.get_origin(hint) is tuple else one


def _words(hint: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(_plain(hint), _metavar(hint))


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
    from spiritlevel.papers.studies import catalogue, find

    studies = catalogue()
    place = next((place for place, word in enumerate(args) if word in studies), None)
    if place is None:
        if args and not args[0].startswith("-"):
            find(args[0])  # its error lists the names
        rest = [word for word in args if word not in ("-h", "--help")]
        return parsing.parse(Listing, "spiritlevel reproduce", rest)
    kind, prog = _subcommand(studies[args[place]]), f"spiritlevel reproduce {args[place]}"
    found: Command = parsing.parse(kind, prog, [*args[:place], *args[place + 1 :]])
    return found
