"""`spiritlevel measure`: a model of your own, one command, one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, Seeded, check_folder, tell
from spiritlevel.cli.parsing import listed, optional
from spiritlevel.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.binding.ranks import Ranks
    from spiritlevel.binding.reading import Reading
    from spiritlevel.loading import Samples
    from spiritlevel.results import Report
    from spiritlevel.results.pages import Shown


@dataclass(frozen=True, kw_only=True)
class RunOnData(Seeded):
    """What the commands that run models on data share."""

    data: Annotated[
        str,
        arg(
            metavar="DATA",
            help=(
                "A built-in name, an .npz or .safetensors file with x and y, a .csv, .tsv or .parquet table (with "
                "--target), a folder of images with one subfolder per class, a data set that `datasets` saved "
                "(FOLDER or FOLDER:part), or file.py:function."
            ),
        ),
    ]
    target: Annotated[str | None, optional("NAME")] = None
    """The column to predict, of a table or a saved data set; or the key of the targets in batches that are dicts."""
    loss: Annotated[
        str,
        arg(
            metavar="NAME",
            help=(
                "cross_entropy, causal_lm, binary_cross_entropy, squared_error (½‖φ − y‖² per sample), huber, "
                "poisson, exponential, or file.py:function of (outputs, targets) with one loss per sample."
            ),
        ),
    ] = "cross_entropy"
    output: Annotated[str | None, optional("NAME")] = None
    """Which part of the model's output to measure: a key or a number; by default its logits."""
    unit: Annotated[str, arg(metavar="sample|token")] = "sample"
    """What counts as one item: a sample, or each of its tokens."""
    batches: Annotated[str, arg(metavar="free|fixed")] = "free"
    """fixed if the loss of a sample depends on the rest of its batch: batches are then never split."""
    samples: Annotated[int | None, optional("N")] = None
    """Measure N samples drawn at random, by default all; ± then covers all of the data, or the report says why not."""
    batch_norm: Annotated[str, arg(metavar="eval|batch")] = "eval"
    """Running statistics, or those of each batch."""
    device: Annotated[str | None, optional("DEVICE")] = None
    """cpu, or an accelerator as PyTorch names it (cuda, cuda:1, xpu, mps); by default where the model is."""
    dtype: Annotated[str | None, optional("float32|float64")] = None
    """Convert the model to this number format first."""
    batch_size: Annotated[int | None, optional("N")] = None
    """How many samples to pass at once; by default as many as suit the network and the memory."""
    memory: Annotated[str | None, optional("SIZE")] = None
    """How much memory to use, such as 2GB; by default half of what is free."""

    def reading(self, samples: Samples) -> Reading:
        """How batches of these samples and the outputs of the model are read."""
        number = self.output is not None and self.output.lstrip("-").isdigit()
        output = int(str(self.output)) if number else self.output
        return {"target": samples.target, "output": output, "unit": self.unit, "batches": self.batches}

    def drawn(self, samples: Samples, model: nn.Module) -> tuple[Any, Reading, int]:
        """The samples asked for, drawn at random if there are more; how to read them; and how many there are in all."""
        from spiritlevel.binding.batches import Batches, subset
        from spiritlevel.binding.reading import form_of
        from spiritlevel.loading import check_classes

        form = form_of(self.reading(samples))
        check_classes(samples, None, model, form.options())
        whole = self.batch_norm == "batch" or self.batches == "fixed"
        data, drawn, population = subset(Batches(samples.data, whole=whole, form=form), self.samples, self.seed)
        return data, (form if drawn is None else form.of_pairs()).options(), population


@dataclass(frozen=True, kw_only=True)
class OnData(RunOnData):
    """What the commands that measure models share."""

    measures: Annotated[str | None, optional("NAME,NAME,...")] = None
    """Only these measures, or all; about a dozen by default."""
    params: Annotated[str | None, optional("NAME,NAME,...")] = None
    """Only these parameters: names, prefixes, or patterns such as '*.bias'; by default all that are trained."""

    @property
    def means(self) -> Means:
        """Which parameters and in what pieces, as the functions take them."""
        params = None if self.params is None else listed(self.params)
        return {"params": params, "batch_size": self.batch_size, "memory": self.memory}

    @property
    def names(self) -> str | list[str] | None:
        """The measures asked for."""
        if self.measures is None:
            return None
        names = listed(self.measures)
        if not names:
            raise InputError("--measures names no measure; `spiritlevel measures` lists them all.")
        if "all" in names:
            return "all"
        if "default" in names:
            from spiritlevel.measures import DEFAULT

            names = [each for name in names for each in (DEFAULT if name == "default" else [name])]
        return list(dict.fromkeys(names))


class Means(TypedDict):
    """The keywords of the functions for which parameters, and in what pieces."""

    params: list[str] | None
    batch_size: int | None
    memory: str | None


@dataclass(frozen=True, kw_only=True)
class Measure(OnData):
    """Measure a model of your own: how flat, how wide its margins, how sure that is, how much is only parametrisation.

    For example: spiritlevel measure net.py:make --weights net.safetensors --data train.npz --test test.npz

    With nothing but what is built in: spiritlevel measure mlp --data fashion-mini --samples 200

    Or a model that another library saved: spiritlevel measure hf:my-bert --data my-data --samples 500

    A table: spiritlevel measure net.py:make --weights last.ckpt --data train.parquet --test test.parquet --target label
    """

    NAME = "measure"

    model: Annotated[
        Positional[str],
        arg(
            metavar="MODEL",
            help=(
                "file.py:function, package.module:function, hf:FOLDER (saved by transformers), timm:NAME or "
                "timm:NAME:num_classes=10, a .pt2 file of torch.export, or a built-in name such as lenet5 or "
                "lenet5:channels=3."
            ),
        ),
    ]
    weights: Annotated[Path | None, optional("FILE")] = None
    """Its weights: .safetensors, a .pt file that holds nothing but tensors, or a .ckpt file of Lightning."""
    test: Annotated[str | None, optional("DATA")] = None
    """Other data, for the test accuracy; by default the test part of a built-in data set."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("report")
    """The folder for report.html and report.json."""
    time_limit: Annotated[float | None, optional("SECONDS")] = None
    """Measure what fits into this time, and list the rest."""

    def run(self) -> Outcome:
        """Load, measure, write the page, show the numbers; under torchrun all ranks measure and rank 0 does the rest.

        What one rank refuses, all refuse; rank 0 says so.
        """
        check_folder(self.out)
        from spiritlevel.answers.measuring import silent
        from spiritlevel.binding.ranks import Ranks, job

        with job() as group, ProgressBar() as bar:
            ranks = Ranks(group)
            progress = silent if ranks.rank else bar
            try:
                report = self._measured(ranks, progress)
            except InputError:  # on all ranks: rank 0 says so, and gives the job its exit code
                if ranks.rank == 0:
                    raise
            if ranks.rank:
                return Outcome(None)
        with shown_in_any_case(report), ProgressBar() as bar:
            bar("writing the page", 0, 0)
            write_run(report, self.out)
        tell(f"The page: {self.out / 'report.html'}")
        finish(report)
        return Outcome({"report": report.to_dict()})

    def _measured(self, ranks: Ranks, progress: Callable[[str, int, int], None]) -> Report:
        from spiritlevel import data as named
        from spiritlevel.answers.measuring import measure
        from spiritlevel.loading import check_classes, load_loss, load_samples, read_model

        with ranks.together():
            kind, _, number = (self.device or "").partition(":")
            if ranks.count > 1 and number and kind != "cpu":
                raise InputError(f"--device must be {kind} without a number under torchrun: each process has its own.")
            progress("loading", 0, 0)
            model, note = read_model(self.model, self.weights, device=self.device, dtype=self.dtype, seed=self.seed)
            loss = load_loss(self.loss)
            train = load_samples(self.data, target=self.target, model=model)
            test: Samples | None = None
            if self.test is not None or self.data in named.names():
                test = load_samples(self.test or self.data, "test", target=self.target, like=train, model=model)
            check_classes(train, test, model, self.reading(train))
        report = measure(
            model,
            train.data,
            test=None if test is None else test.data,
            loss=loss,
            measures=self.names,
            samples=self.samples,
            batch_norm=self.batch_norm,
            time_limit=self.time_limit,
            name=self.model if self.weights is None else f"{self.model} ({self.weights.name})",
            classes=train.classes,
            progress=progress,
            group=ranks.group,
            seed=self.seed,
            **self.means,
            **self.reading(train),
        )
        sources = {"model": self.model, "weights": str(self.weights or "as built"), "train data": train.name}
        sources |= {} if test is None else {"test data": test.name}
        read = dict.fromkeys([*train.notes, *(() if test is None else test.notes)])  # how tables were read
        first, rest = report.headline[:1], report.headline[1:]  # the page shows the first above its numbers
        headline = (*first, *filter(None, [note]), *rest, *read)
        return dataclasses.replace(report, settings={**sources, **report.settings}, headline=headline)


def finish(report: Report) -> None:
    """End an interrupted measurement as interrupted, once its page is written."""
    if report.partial:
        raise KeyboardInterrupt(f"{report.partial}; the page holds what had been measured by then.")


@contextmanager
def shown_in_any_case(result: Shown) -> Iterator[None]:
    """Show the numbers after the block, even if it fails: a full disk must not cost us the numbers."""
    from spiritlevel.cli.show import show

    try:
        yield
    finally:
        show(result)


def write_run(result: Shown, folder: Path, beside: Mapping[str, bytes] | None = None) -> None:
    """The result as JSON and as a page, both or neither: a page beside the numbers of another run would mislead.

    `beside` are other files that belong to it, by name.
    """
    from spiritlevel.storage import write_together

    files: dict[str, str | bytes] = {"report.json": result.to_json() + "\n", "report.html": result.to_html()}
    write_together({folder / name: content for name, content in {**files, **(beside or {})}.items()})
