"""`spiritlevel demo`: a small network, trained, measured and audited, with its page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from spiritlevel.cli.base import Outcome, ProgressBar, Seeded, check_folder, tell
from spiritlevel.cli.measure import finish, shown_in_any_case, write_run
from spiritlevel.cli.parsing import optional
from spiritlevel.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.data import Data as Images

_STEPS = 47  # of a pass over the 6,000 built-in images; larger sets get as many steps, not as many passes

_MOST_EPOCHS = 1_000_000  # months
_WEIGHTS = "lenet5.safetensors"


@dataclass(frozen=True, kw_only=True)
class Demo(Seeded):
    """Train LeNet-5 on MNIST if it is on this machine, else on built-in images; measure it and write its page.

    For example: spiritlevel demo --seed 1
    """

    NAME = "demo"

    epochs: Annotated[int, arg(metavar="N")] = 8
    """Length of the training in units of 47 steps: one pass over the built-in images."""
    samples: Annotated[int, arg(metavar="N")] = 1000
    """Training images to measure, drawn at random."""
    data: Annotated[str | None, optional("NAME")] = None
    """Train on this data set instead."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("spiritlevel-demo")
    """The folder for report.html, report.json and the weights, lenet5.safetensors."""

    def run(self) -> Outcome:
        """Train, measure, write the page, show the numbers."""
        if not 1 <= self.epochs <= _MOST_EPOCHS:
            raise InputError(f"demo needs --epochs from 1 to {_MOST_EPOCHS:,}, got {self.epochs}.")
        if self.samples < 1:
            raise InputError(f"demo measures at least 1 training image, got --samples {self.samples}.")
        check_folder(self.out)
        from safetensors.torch import save

        from spiritlevel.answers.measuring import measure

        name = self.data or _best_data()
        with ProgressBar() as progress:
            model, images = demo_network(name, epochs=self.epochs, seed=self.seed, progress=progress)
            report = measure(
                model,
                images.train,
                test=images.test,
                samples=self.samples,
                name=f"LeNet-5 on {images.name}",
                classes=images.classes,
                progress=progress,
                seed=self.seed,
            )
            trained = {"model": "lenet5", "train data": images.name, "training": f"Adam, {_STEPS * self.epochs} steps"}
            report = dataclasses.replace(report, settings={**trained, **report.settings})
        with shown_in_any_case(report), ProgressBar() as progress:
            progress("writing the page", 0, 0)
            write_run(report, self.out, {_WEIGHTS: save(model.state_dict())})
        tell(f"The page: {self.out / 'report.html'}")
        tell(f"The weights: {self.out / _WEIGHTS}")
        finish(report)
        return Outcome({"report": report.to_dict()})


def _best_data() -> str:
    from spiritlevel import data

    return "mnist" if data.path("mnist") is not None else "fashion-mini"


def demo_network(
    name: str = "fashion-mini", *, epochs: int = 8, seed: int = 0, progress: ProgressBar
) -> tuple[nn.Module, Images]:
    """The network that `spiritlevel demo` trains, and its data; the same weights for the same seed."""
    import torch

    from spiritlevel import data
    from spiritlevel.papers import networks as models
    from spiritlevel.papers.training import Recipe, fit

    torch.set_num_threads(2)  # a different number would sum in a different order and round differently
    images = data.load(name)
    if images.train[0].shape[2:] not in ((28, 28), (32, 32)):
        raise InputError(f"demo needs images of 28×28 or 32×32 pixels, but {name} has another size; try fashion-mini.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.lenet5(channels=images.train[0].shape[1], classes=len(images.classes))
    recipe = Recipe(optimizer="adam", lr=3e-3, batch_size=128, steps=_STEPS * epochs)
    fit(model, images.train, recipe, seed=seed, progress=progress, label="training LeNet-5")
    return model, images
