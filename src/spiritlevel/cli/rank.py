"""`spiritlevel rank`: which of many checkpoints to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, check_folder, tell
from spiritlevel.cli.measure import OnData, shown_in_any_case, write_run
from spiritlevel.cli.parsing import optional
from spiritlevel.errors import InputError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Rank(OnData):
    """Rank the checkpoints of a run: accuracy, margins, measures, and what a change of the weights does to each.

    For example: spiritlevel rank checkpoints/*.safetensors --model net.py:make --data test.npz --out ranks/

    What two demos left (`spiritlevel demo --data fashion-mini --out one/`, then with `--seed 1 --out two/`):
    spiritlevel rank one/*.safetensors two/*.safetensors --model lenet5 --data fashion-mini
    """

    NAME = "rank"

    checkpoints: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE ...", help_behavior_hint="(at least one)")]
    """Files of weights, in training order."""
    model: Annotated[str, arg(metavar="MODEL")]
    """The model they belong to, written as for `spiritlevel measure`."""
    under: Annotated[str, arg(metavar="CHANGE,CHANGE,...")] = "int4"
    """Changes of the weights to predict and to make, as for `spiritlevel perturb`; `none` to leave them out."""
    out: Annotated[Path | None, optional("DIR")] = None
    """Also write report.html and report.json to DIR."""

    def run(self) -> Outcome:
        """Load one after another, measure, show the table."""
        if not self.checkpoints:
            raise InputError("rank needs at least one file of weights.")
        if self.out is not None:
            check_folder(self.out)
        from spiritlevel.answers.checkpoints import rank
        from spiritlevel.loading import check_classes, load_loss, load_samples, read_model

        with ProgressBar() as progress:
            progress("loading", 0, 0)
            first, _ = read_model(self.model, self.checkpoints[0], device=self.device, dtype=self.dtype, seed=self.seed)
            samples = load_samples(self.data, "test", target=self.target, model=first)
            check_classes(samples, None, first, self.reading(samples))
            total = len(self.checkpoints)
            found = rank(
                self._models(),
                samples.data,
                loss=load_loss(self.loss),
                measures=self.names,
                under=() if self.under == "none" else self.under,
                samples=self.samples,
                batch_norm=self.batch_norm,
                progress=lambda what, done, _: progress(what, done, total),
                seed=self.seed,
                **self.means,
                **self.reading(samples),
            )
            sources = {"model": self.model, "data": samples.name}
            found = dataclasses.replace(found, settings={**sources, **found.settings, **sources})
        with shown_in_any_case(found), ProgressBar() as progress:
            if self.out is not None:
                progress("writing the page", 0, 0)
                write_run(found, self.out)
        if self.out is not None:
            tell(f"The page: {self.out / 'report.html'}")
        return Outcome({"checkpoints": found.to_dict()})

    def _models(self) -> Iterator[tuple[str, nn.Module]]:
        from spiritlevel.loading import read_model

        stems = [path.stem for path in self.checkpoints]
        for path in self.checkpoints:
            model, _ = read_model(self.model, path, device=self.device, dtype=self.dtype, seed=self.seed)
            yield path.stem if stems.count(path.stem) == 1 else str(path), model
