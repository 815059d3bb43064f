"""`spiritlevel demo`: a small network, trained and measured in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spiritlevel.cli.base import Command, Outcome, ProgressBar
from spiritlevel.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from spiritlevel.data import Data as Images


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
