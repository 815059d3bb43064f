"""The command line: options come from dataclasses (tyro), tables and progress from Rich. The only place that prints.

A command is a dataclass with a `run` method that shows its result and returns it as plain values; `main` writes those
as JSON if asked and turns what happened into an exit code. PyTorch is imported inside `run`, so `--help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from spiritlevel import __version__
from spiritlevel.errors import InputError, NotExactError

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor, nn

    from spiritlevel.data import Data as Images

DONE, CHECK_FAILED, BAD_INPUT, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 70, 130, 141


class Outcome(NamedTuple):
    """What a command found, as plain values for JSON, and whether all its checks passed."""

    payload: dict[str, Any]
    passed: bool = True


@dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands share."""

    json: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also write the result to FILE, as strict JSON."""
    seed: int = 0
    """Start of everything random."""
    debug: bool = False
    """Show the traceback of an error."""

    def run(self) -> Outcome:
        """Do the work and show it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train LeNet-5 on the built-in Fashion-MNIST images, then show its margins and its curvature image by image.

    For example: spiritlevel demo --seed 1
    """

    epochs: int = 8
    """Passes over the 6,000 training images."""
    points: int = 6000
    """Training images to measure, the first so many."""

    def run(self) -> Outcome:
        """Train, measure, show."""
        if self.epochs < 1:
            raise InputError(f"demo needs at least 1 epoch, got {self.epochs}.")
        if not 1 <= self.points <= 6000:
            raise InputError(f"demo measures 1 to 6000 training images, got --points {self.points}.")
        from spiritlevel import models

        with ProgressBar() as progress:
            model, images = demo_network(epochs=self.epochs, seed=self.seed, progress=progress)
            progress("measuring the training images", 0, 2)
            inputs, targets = images.train
            train = _Measured(model, inputs[: self.points], targets[: self.points])
            progress("measuring the test images", 1, 2)
            test = _Measured(model, *images.test)
            columns = {
                "train": train.row(),
                "train, correct": train.row(train.margins.correct),
                "train, wrong": train.row(~train.margins.correct),
                "test": test.row(),
            }
        size = models.count(model)
        _show_demo(
            f"LeNet-5 ({size:,} parameters) on {images.name}, epochs: {self.epochs}, seed: {self.seed}", columns, train
        )
        return Outcome(
            {
                "network": "lenet5",
                "parameters": size,
                "data": images.name,
                "epochs": self.epochs,
                "traces": {"exact": train.traces.exact, "backward passes": train.traces.matvecs},
                "measures": columns,
            }
        )


def demo_network(*, epochs: int = 8, seed: int = 0, progress: ProgressBar) -> tuple[nn.Module, Images]:
    """The network that `spiritlevel demo` trains, and its data; the same weights for the same seed."""
    import torch

    from spiritlevel import data, models

    torch.set_num_threads(2)  # another number would add up in another order and round differently
    images = data.load("fashion-mini")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.lenet5()
        _train(model, *images.train, epochs=epochs, seed=seed, progress=progress)
    return model, images


class _Measured:
    """What the demo measures of every sample; `row` sums up all of them or a group."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        import torch

        from spiritlevel.losses import aceht
        from spiritlevel.margins import margins
        from spiritlevel.per_sample import sample_traces

        begin = time.perf_counter()
        self.traces = sample_traces(model, (inputs, targets), method="exact", per_layer=True)
        self.seconds = time.perf_counter() - begin
        self.margins = margins(model, (inputs, targets))
        with torch.no_grad():
            self.aceht = aceht(inputs, torch.cat([model(batch) for batch in inputs.split(1000)]))

    def row(self, where: Tensor | None = None) -> dict[str, Any]:
        """Plain values for the table and for JSON; undefined ones are None."""
        from spiritlevel.stats import correlate

        group = slice(None) if where is None else where
        traces, signed = self.traces.values[group], self.margins.signed[group]
        weight, bias = list(self.traces.layers.values())[-2:]
        total = float(traces.sum())
        some = len(traces) > 0
        return {
            "samples": len(traces),
            **({"reason": "there are no such samples"} if not some else {}),
            "accuracy": float((signed > 0).double().mean()) if some else None,
            "mean output margin": float(signed.mean()) if some else None,
            "median output margin": float(signed.median()) if some else None,
            "smallest output margin": float(signed.min()) if some else None,
            "mean Hessian trace": float(traces.mean()) if some else None,
            "median Hessian trace": float(traces.median()) if some else None,
            "last layer's share": float((weight + bias)[group].sum()) / total if total > 0 else None,
            "trace and ACEHT": correlate(self.traces, self.aceht, where=where).to_dict(),
            "trace and margin": correlate(self.traces, self.margins.output, where=where).to_dict(),
        }


def _show_demo(title: str, columns: dict[str, dict[str, Any]], train: _Measured) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    def show(style: str, value: Any) -> str:
        return "-" if value is None else style.format(value)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("training\nimages", "of these\ncorrect", "\nwrong", "test\nimages"):
        table.add_column(heading, justify="right")
    sections = (
        {"samples": "{:,}", "accuracy": "{:.1%}"},
        {"mean output margin": "{:.2f}", "median output margin": "{:.2f}", "smallest output margin": "{:.2f}"},
        {"mean Hessian trace": "{:.4g}", "median Hessian trace": "{:.4g}", "last layer's share": "{:.1%}"},
    )
    for section in sections:
        for measure, style in section.items():
            cells = [show(style, row[measure]) for row in columns.values()]
            if measure == "accuracy":
                cells[1:3] = "", ""  # all of the correct, none of the wrong
            table.add_row(measure, *cells)
        table.add_row()
    linear = [row["trace and ACEHT"] for row in columns.values()]
    ranks = [row["trace and margin"]["spearman"] for row in columns.values()]
    table.add_row("r(trace, ACEHT)", *(show("{:.3f}", found["r"]) for found in linear))
    limits = [(found["low"], found["high"]) for found in linear]
    table.add_row("  95% interval", *("-" if low is None else f"{low:.2f}..{high:.2f}" for low, high in limits))
    table.add_row("rank r(trace, margin)", *(show("{:.3f}", rank) for rank in ranks))

    console = Console()
    console.print(title)
    how = f"{train.seconds:.1f} s: exact, no sampling error."
    console.print(f"Hessian traces of {len(train.traces):,} images, one by one, in {how}")
    console.print(table)
    console.print(_headline(columns), style="bold")
    legend = (
        "Output margin: the right class's logit less the best other's; negative if wrong.\n"
        "Hessian trace: curvature of one image's own loss, summed over all parameters.\n"
        "ACEHT: what that trace would be for a linear classifier with the same outputs.\n"
        "r: Pearson's; rank r: Spearman's, with the margin's size; both without outliers."
    )
    console.print()
    console.print(legend, style="dim")


def _headline(columns: dict[str, dict[str, Any]]) -> str:
    """What the numbers say, in words; true for any seed and any number of epochs."""
    right, wrong = columns["train, correct"], columns["train, wrong"]
    sentences = []
    if wrong["samples"] and right["mean Hessian trace"]:
        ratio = wrong["mean Hessian trace"] / right["mean Hessian trace"]
        sentences.append(f"The loss is {ratio:.1f} times as curved at a misclassified image as at a correct one.")
    if right["trace and margin"]["r"] is not None:
        margin, linear = right["trace and margin"]["spearman"], right["trace and ACEHT"]["r"]
        sentences.append(
            f"Among correct images the curvature {'falls' if margin < 0 else 'grows'} with the margin (rank "
            f"correlation {margin:.2f})"
            + (
                "."
                if linear is None
                else f", and ACEHT, which costs one forward pass, follows it with r = {linear:.2f}."
            )
        )
    return " ".join(sentences) or "Too few images were measured to say more."


def _train(model: nn.Module, inputs: Tensor, targets: Tensor, *, epochs: int, seed: int, progress: ProgressBar) -> None:
    """A plain training loop, enough for the demo."""
    import torch

    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for epoch in range(epochs):
        batches = torch.randperm(len(inputs), generator=generator).split(128)
        for step, batch in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            progress("training LeNet-5", epoch * len(batches) + step + 1, epochs * len(batches))
    model.eval()


@dataclass(frozen=True, kw_only=True)
class Claims(Command):
    """Run the formulas, theorems and counts of the three papers and say which hold; exit code 1 if one is undecided.

    For example: spiritlevel claims --paper B --json claims.json
    """

    paper: Annotated[str | None, arg(metavar="A|B|C")] = None
    """Only the claims of this paper."""
    id: Annotated[str | None, arg(metavar="ID")] = None
    """Only this claim, with its whole story."""
    html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Also write a page to FILE."""

    def run(self) -> Outcome:
        """Run the checks, show the verdicts."""
        if self.html is not None:
            _check_writable(self.html, "--html")
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from spiritlevel import claims
        from spiritlevel.claims import show
        from spiritlevel.results import write_atomically

        with ProgressBar() as progress:
            rulings = claims.run(paper=self.paper, id=self.id, seed=self.seed, progress=progress)
        records = [ruling.record() for ruling in rulings]
        if self.id is not None:
            print(*(show.story(record) for record in records), sep="\n")
        else:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("claim", no_wrap=True)
            table.add_column("verdict", width=12)
            table.add_column("evidence", overflow="fold")
            for record in records:
                evidence = "; ".join([record["text"].rstrip("."), *show.numbers(record)[:2]])
                table.add_row(*(Text(cell) for cell in (record["id"], record["verdict"], evidence)))
            Console().print(table)
            print(f"{len(records)} claims, seed {self.seed}: {show.counts(records)}.")
        if self.html is not None:
            write_atomically(self.html, show.to_html(records, self.seed))
        return Outcome({"verdicts": claims.tally(rulings), "claims": records}, passed=claims.decided(rulings))


@dataclass(frozen=True, kw_only=True)
class DataList(Command):
    """List the data sets by name, and where each one is.

    For example: spiritlevel data list
    """

    def run(self) -> Outcome:
        """One row a data set."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        from spiritlevel import data

        rows = [row._asdict() for row in data.describe()]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, value in rows[0].items():
            number = isinstance(value, int)
            table.add_column(
                heading, justify="right" if number else "left", overflow="fold", no_wrap=heading != "licence"
            )
        for row in rows:
            table.add_row(*(_cell(value) for value in row.values()))
        Console().print(table)
        return Outcome({"data": rows})


@dataclass(frozen=True, kw_only=True)
class DataGet(Command):
    """Fetch a data set, check its hashes, keep it in the cache and print where it lies.

    For example: spiritlevel data get mnist
    """

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
    """Print where a data set lies on this machine; exit code 1 if it is not here yet.

    For example: spiritlevel data path mnist
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """One of the names that `spiritlevel data list` shows."""

    def run(self) -> Outcome:
        """Look, but fetch nothing."""
        from spiritlevel import data

        where = data.path(self.name)
        if where is None:
            _say(f"{self.name} is not on this machine; `spiritlevel data get {self.name}` fetches it.")
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


@dataclass(frozen=True)
class Spiritlevel:
    """A spirit level for loss surfaces. Try `spiritlevel COMMAND --help`, or `spiritlevel --version`."""

    command: Annotated[
        Annotated[Demo, subcommand("demo")]
        | Annotated[Claims, subcommand("claims")]
        | Annotated[Data, subcommand("data")],
        arg(name=""),
    ]


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


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return "×".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _say(sentence: str) -> None:
    print(f"spiritlevel: {' '.join(sentence.split())}", file=sys.stderr)


def _sentence(box: str) -> str:
    """The sections of tyro's boxed complaint as sentences, without its title and the help text."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    sections = re.split(r"^(?:[-─]{3,}|[╭╰].*)$", "\n".join(lines), flags=re.MULTILINE)[1:]
    sentences = [" ".join(text.split()).rstrip(".") for text in sections]
    wanted = [text for text in sentences if text and not text.startswith(("For full helptext", "Argument helptext"))]
    return ". ".join([*wanted, "See `spiritlevel --help`."]) if wanted else box


def _parse(args: list[str]) -> Command | int:
    """The command that was asked for, or an exit code if there is nothing left to do."""
    if args in (["--version"], ["-V"]):
        print(f"spiritlevel {__version__}")
        return DONE
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(Spiritlevel, prog="spiritlevel", args=args or ["--help"], config=(FlagCreatePairsOff,))
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return DONE
        _say(_sentence(complaint.getvalue()))
        return BAD_INPUT
    return parsed.command.command if isinstance(parsed.command, Data) else parsed.command


def _check_writable(path: Path, option: str = "--json") -> None:
    """Refuse a place for the result before the work is done, not after."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option} needs the path of a file that can be written, got {str(path)!r}.")


def _run(command: Command) -> int:
    try:
        if command.json is not None:
            _check_writable(command.json)
        payload, passed = command.run()
        if command.json is not None:
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
        _say(f"{error.strerror}: {error.filename}." if isinstance(error, OSError) and error.strerror else str(error))
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
        _say("interrupted.")
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # the reader of a pipe has gone (Rich exits): stop without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception:
        traceback.print_exc()
        _say("this is a bug in spiritlevel; please report it with the lines above.")
        return BUG
