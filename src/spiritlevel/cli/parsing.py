"""Arguments → a command. What tyro refuses is explained in one sentence: the culprit, the nearest name, where to look.

tyro decides what is valid; this module reads the arguments a second time only where it has refused them, since its own
complaint is a page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from spiritlevel.errors import InputError

T = TypeVar("T")

_POSITIONAL = typing.get_args(Positional[int])[1]
# What Python says about a value of the wrong kind, and what a user can understand.
_PYTHON = {
    r"'\S+' not supported between instances of '\w+' and '\w+'": "one of the values is not a number",
    r"invalid literal for int\(\) with base 10: ('.*?')": r"\1 is not a whole number",
    r"could not convert string to float: ('.*?')": r"\1 is not a number",
}
_NUMBERS = {int: "a whole number", float: "a number"}


def parse(kind: type[T], prog: str, args: Sequence[str]) -> T:
    """The command of that kind that the arguments ask for; `--help` prints the help and exits.

    >>> from spiritlevel.cli.demo import Demo
    >>> parse(Demo, "spiritlevel demo", ["--epoch", "3"])
    Traceback (most recent call last):
    spiritlevel.errors.InputError: unknown option '--epoch': did you mean '--epochs'? See `spiritlevel demo --help`.
    """
    complaint = io.StringIO()
    args = _in_places(kind, _by_new_names(kind, args))
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, prog=prog, args=args, config=(FlagCreatePairsOff,))
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            raise
        reason = _explained(_arguments(kind), list(args)) or _plain(complaint.getvalue())
        raise InputError(f"{reason.rstrip('.')}{'' if reason.endswith('?') else '.'} See `{prog} --help`.") from None


def _by_new_names(kind: type, args: Sequence[str]) -> list[str]:
    """The arguments, with renamed options under their new names."""
    from spiritlevel.cli.base import say  # which imports this module

    words, renamed = list(args), getattr(kind, "RENAMED", {})
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        old = name.replace("_", "-")
        if old in renamed:
            say(f"{old} is deprecated, use {renamed[old]}.")
            words[place] = f"{renamed[old]}{equals}{value}"
    return words


def _in_places(kind: type, args: Sequence[str]) -> list[str]:
    """The arguments; a positional one that was given by name, as `--model lenet5`, is put in its place."""
    words = list(args)
    names = [argument.name for argument in _arguments(kind) if argument.positional and argument.values == 1]
    found = [name for name in names if words.count(name) == 1 and words.index(name) + 1 < len(words)]
    if found != names:
        return words
    values = []
    for name in names:
        place = words.index(name)
        values.append(words[place + 1])
        del words[place : place + 2]
    return [*values, *words]


def optional(metavar: str | None = None, help: str | None = None) -> Any:
    """How to show an option that does nothing unless given: without "(default: None)"."""
    return arg(metavar=metavar, help=help, help_behavior_hint="")


@dataclass(frozen=True)
class Argument:
    """What a command takes: `kind` is the type of one value, `values` how many (0 for a flag, None for any number)."""

    name: str
    metavar: str
    kind: Any
    values: int | None
    required: bool
    positional: bool

    def __str__(self) -> str:
        return self.metavar if self.positional else f"{self.name} {self.metavar}"

    @property
    def wanted(self) -> str:
        """What it takes, in words."""
        return _NUMBERS.get(self.kind, self.metavar)


def _arguments(command: type) -> list[Argument]:
    hints = typing.get_type_hints(command, include_extras=True)
    return [_argument(field, hints[field.name]) for field in dataclasses.fields(command)]


def _argument(field: dataclasses.Field[Any], hint: Any) -> Argument:
    marks: tuple[Any, ...] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *rest = typing.get_args(hint)
        marks = tuple(rest)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    count: int | None = 0 if hint is bool else 1
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        hint, count = inner[0], None if Ellipsis in inner else len(inner)
    metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
    positional = any(mark is _POSITIONAL for mark in marks)
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    default = {int: "N", float: "X", Path: "PATH"}.get(hint, "NAME")
    return Argument(f"--{field.name.replace('_', '-')}", metavar or default, hint, count, required, positional)


def _explained(arguments: Sequence[Argument], words: list[str]) -> str:
    """What is wrong with the arguments, or nothing if no fault is found."""
    options = {argument.name: argument for argument in arguments if not argument.positional}
    places = [argument for argument in arguments if argument.positional]
    given: set[str] = set()
    loose: list[str] = []
    while words:
        word = words.pop(0)
        if not re.match(r"--?[A-Za-z]", word):
            loose.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in options:
            plain = [option.lstrip("-") for option in options]  # dashes are alike in all of them
            near = difflib.get_close_matches(name.lstrip("-"), plain, n=1, cutoff=0.6)
            return f"unknown option {name!r}" + (f": did you mean '--{near[0]}'?" if near else "")
        option = options[name]
        values = [value] if equals else []
        while words and len(values) < (option.values or 0) and not words[0].startswith("--"):
            values.append(words.pop(0))
        if len(values) != option.values:
            got = " ".join(values) or "nothing"
            return f"{name} takes {option.wanted}, got {got}"
        if option.kind in _NUMBERS:
            try:
                option.kind(values[0])
            except ValueError:
                return f"{name} takes {option.wanted}, got {values[0]!r}"
        given.add(name)
    missing = [str(place) for place in places[len(loose) :] if place.required]
    missing += [str(option) for option in options.values() if option.required and option.name not in given]
    if missing:
        return f"{' and '.join(missing)} must be given"
    if len(loose) > len(places) and all(place.values == 1 for place in places):
        lists = [name for name in ("--measures", "--transforms") if name in given]
        hint = f": {lists[0]} takes one list, with commas and no spaces" if lists else ""
        return f"unexpected argument {loose[len(places)]!r}{hint}"
    return ""


def _plain(box: str) -> str:
    """The sections of tyro's boxed complaint as sentences, without its title and the help text."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    sections = re.split(r"^(?:[-─]{3,}|[╭╰].*)$", "\n".join(lines), flags=re.MULTILINE)[1:]
    sentences = [" ".join(text.split()).rstrip(".") for text in sections]
    wanted = [text for text in sentences if text and not text.startswith(("For full helptext", "Argument helptext"))]
    return ". ".join(wanted) or box


def in_options(message: str, command: object) -> str:
    """A message of the library, which names keywords of Python, in the words of the command line.

    >>> from spiritlevel.cli.demo import Demo
    >>> in_options("samples= is too large; use data='mnist', or name the layers with params=.", Demo())
    '--samples is too large; use --data mnist, or name the layers with params= (in a program).'
    >>> in_options("lenet5 cannot be built with width=x: invalid literal for int() with base 10: 'x'.", Demo())
    "lenet5 cannot be built with width=x: 'x' is not a whole number."
    >>> in_options("epochs must be at least 1, got 0.", Demo())
    '--epochs must be at least 1, got 0.'
    """
    for python, plain in _PYTHON.items():
        message = re.sub(python, plain, message)
    own = {field.name for field in dataclasses.fields(command)}  # type: ignore[arg-type]
    if (subject := re.match(r"(\w+) must ", message)) and subject[1] in own:
        message = f"--{subject[1].replace('_', '-')}{message[subject.end(1) :]}"

    def option(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in own:
            return f"{match[0]} (in a program)" if not value else match[0]
        return f"--{name.replace('_', '-')}{f' {value}' if value else ''}"

    return re.sub(r"(?<![\w:,])(?P<name>[a-z_]+)=(?:['\"](?P<value>[^'\"]*)['\"]|(?=[\s.,;:)]|$))", option, message)


def listed(text: str) -> list[str]:
    """The names in a list with commas; spaces around them are no part of a name.

    >>> listed("0.weight, 2 ,")
    ['0.weight', '2']
    """
    return [name.strip() for name in text.split(",") if name.strip()]
