"""Thirty kinds of wrong word for every option of every command and of every study, taken from their dataclasses.

A try is a command line that is right but for one option. It passes if it ends with exit code 2 and one sentence, or
runs. What would take minutes if it ran (a study, the training of the demo) is stopped where its work would begin, with
everything checked that is checked before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from wrong_values import fault_of_sentence, network

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.cli import data as data_commands
from spiritlevel.cli import parsing, reproduce
from spiritlevel.errors import InputError
from spiritlevel.papers.studies import catalogue

WRONG: tuple[str, ...] = (
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0",
    "-1",
    "0.5",
    "1e30",
    "999999999999",
    "9" * 400,
    "1,2",
    ",",
    "0,nan",
    "nonsense",
    "None",
    "true",
    "é",
    "\udcff",
    "\x00",
    "\x1b[31m",
    "a" * 5000,
    "[]",
    "{}",
    ":",
    "nowhere.py:make",
    "net.py:nothing",
    "net.py",
    "net.py:make",
    ".",
    "/",
    "/dev/null",
    "/dev/null/file",
    "nowhere/at/all",
    "data.npz",
    "weights.safetensors",
    "hpu",
    "privateuseone",
    "--seed",
    "-",
    "*",
)
"""The wrong words."""

_NET = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
"""


def prepare(folder: Path) -> None:
    """The files that the right command lines name."""
    (folder / "net.py").write_text(_NET)
    inputs, targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    np.savez(folder / "data.npz", x=inputs.numpy(), y=targets.numpy())
    safetensors.torch.save_file(torch.nn.Sequential(*list(network())[::2]).state_dict(), folder / "weights.safetensors")
    report = sl.measure(network(), (inputs, targets), measures=["margin_mean"], parts=[])
    (folder / "run").mkdir()
    report.to_json(folder / "run" / "report.json")
    recorder = sl.Recorder(6)
    recorder.record(torch.randn(6, 3), targets, torch.arange(6))
    recorder.save(folder / "record")


_ON_DATA = ["--data", "data.npz", "--measures", "margin_mean"]
# A right command line for each: what stands without a name, and options that are needed or make it quick.
_RIGHT: dict[str, list[str]] = {
    "demo": ["--epochs", "1", "--samples", "4", "--data", "fashion-mini", "--out", "made"],
    "measure": ["net.py:make", *_ON_DATA, "--out", "made", "--time-limit", "0.001"],
    "compare": ["net.py:make", "net.py:make", *_ON_DATA],
    "perturb": ["net.py:make", "--change", "int4", "--data", "data.npz"],
    "rank": ["weights.safetensors", "--model", "net.py:make", *_ON_DATA],
    "audit": ["net.py:make", *_ON_DATA, "--transforms", "scale_last_layer"],
    "samples": ["record"],
    "plot": ["landscape", "net.py:make", "--data", "data.npz", "--points", "3", "--out", "made.svg"],
    "claims": ["--id", "C-4-softmax"],
    "measures": ["trace"],
    "report": ["run", "--out", "page.html"],
    "data list": [],
    "data path": ["digits"],
}
_LEFT_OUT = {"data get": "would download", "debug": "is a flag", "help": "is a flag", "cluster": "would start Ray"}


class Begun(InputError):
    """Raised where the work of a study would begin."""


def commands() -> Iterator[tuple[str, type, list[str]]]:
    """Every command and every study: how it is called, its dataclass, and the rest of a right command line."""
    for name, parse in cli.COMMANDS.items():
        if isinstance(parse, partial):
            yield name, parse.args[0], _RIGHT[name]
    for name, kind in data_commands.COMMANDS.items():
        if f"data {name}" not in _LEFT_OUT:
            yield f"data {name}", kind, _RIGHT[f"data {name}"]
    for study in catalogue().values():
        yield f"reproduce {study.name}", reproduce._subcommand(study), ["--scale", "smoke", "--out", "made"]


@dataclasses.dataclass(frozen=True)
class Try:
    """A command line that is right but for one option."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return (
            " ".join(word if len(word) < 40 else word[:40] + "…" for word in self.words)
            .encode("unicode_escape")
            .decode()
        )

    def failure(self) -> str:
        """Nothing if it is answered as it should be, else what happened instead."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(), quick():
            warnings.simplefilter("ignore")
            code = cli.main(list(self.words))
        told = err.getvalue()
        if code not in (0, 1, 2) or "Traceback" in told:
            return f"exit code {code}: {told.strip().splitlines()[-2:]}"
        if code == 2:
            lines = [line for line in told.splitlines() if line.strip()]
            if not lines or not lines[-1].startswith("spiritlevel: "):
                return f"no sentence: {told[:150]!r}"
            return fault_of_sentence(lines[-1])
        return ""


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Studies end where they would begin; the demo trains one step and measures what it can in no time."""
    from spiritlevel.answers import measuring
    from spiritlevel.cli import demo
    from spiritlevel.papers import studies

    def begun(*_: object, **__: object) -> None:
        raise Begun("the study has begun.")

    measure = partial(measuring.measure, time_limit=0.001)
    with (
        mock.patch.object(studies, "execute", begun),
        mock.patch.object(demo, "_STEPS", 1),
        mock.patch.object(demo, "_MOST_EPOCHS", 3),
        mock.patch.object(measuring, "measure", measure)
        if not isinstance(measuring.measure, partial)
        else contextlib.nullcontext(),
    ):
        yield


def tries(count: int | None = None, seed: int = 0) -> list[Try]:
    """Every option of every command with every wrong word, or as many of them."""
    every = []
    for name, kind, right in commands():
        arguments = [each for each in parsing._arguments(kind) if each.name[2:] not in _LEFT_OUT and each.values != 0]
        places = [each for each in arguments if each.positional]
        for word in WRONG:
            for argument in arguments:
                if argument.positional:
                    at = places.index(argument)
                    words = [*right[:at], word, *right[at + 1 :]]
                else:
                    words = _without(right, argument.name)
                    words += [argument.name, *[word] * (argument.values or 1)]
                every.append(Try((*name.split(), *words)))
    return every if count is None or count >= len(every) else random.Random(seed).sample(every, count)


def _without(words: list[str], option: str) -> list[str]:
    if option not in words:
        return list(words)
    at = words.index(option)
    return [*words[:at], *words[at + 2 :]]


def kinds() -> int:
    """How many options there are."""
    return len({re.sub(r"\s.*", "", name) + str(kind) for name, kind, _ in commands()})
