"""`spiritlevel compare`: which of two models to trust."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, check_folder, tell
from spiritlevel.cli.measure import OnData, shown_in_any_case, write_run
from spiritlevel.cli.parsing import optional


@dataclass(frozen=True, kw_only=True)
class Compare(OnData):
    """Compare two models on the same samples: which to trust, why, and which differences say nothing.

    For example: spiritlevel compare net.py:small net.py:large --weights small.pt large.pt --data test.npz

    Rounded as well: spiritlevel compare net.py:make net.py:make --weights a.pt b.pt --under int4 --data test.npz
    """

    NAME = "compare"

    a: Annotated[Positional[str], arg(metavar="A")]
    """A model, written as for `spiritlevel measure`."""
    b: Annotated[Positional[str], arg(metavar="B")]
    """The other one."""
    weights: Annotated[tuple[Path, Path] | None, optional("FILE FILE")] = None
    """The weights of both, in the same order."""
    under: Annotated[str | None, optional("CHANGE,CHANGE,...")] = None
    """Also change the weights of both, and say which is better afterwards: int4, prune:0.5, noise:0.01 and so on."""
    out: Annotated[Path | None, optional("DIR")] = None
    """Also write report.html and report.json to DIR."""

    def run(self) -> Outcome:
        """Load both, compare, show the rows and the advice."""
        if self.out is not None:
            check_folder(self.out)
        from spiritlevel.answers.comparing import compare
        from spiritlevel.loading import check_classes, load_loss, load_samples, read_model

        with ProgressBar() as progress:
            progress("loading", 0, 0)
            files = self.weights or (None, None)
            a, about_a = read_model(self.a, files[0], device=self.device, dtype=self.dtype, seed=self.seed)
            b, about_b = read_model(self.b, files[1], device=self.device, dtype=self.dtype, seed=self.seed)
            samples = load_samples(self.data, "test", target=self.target, model=a)
            for model in (a, b):
                check_classes(samples, None, model, self.reading(samples))
            comparison = compare(
                a,
                b,
                samples.data,
                names=self._labels(),
                loss=load_loss(self.loss),
                measures=self.names,
                samples=self.samples,
                under=self.under or (),
                batch_norm=self.batch_norm,
                progress=progress,
                seed=self.seed,
                **self.reading(samples),
            )
            sources = {"models": f"{self.a} and {self.b}", "data": samples.name}
            sources["weights"] = " and ".join(str(file or "as built") for file in files)
            notes = [about_a, about_b, *samples.notes]
            reasons = (*filter(None, dict.fromkeys(notes)), *comparison.reasons)
            settings = sources | comparison.settings | sources  # first, and as given
            comparison = dataclasses.replace(comparison, settings=settings, reasons=reasons)
        with shown_in_any_case(comparison), ProgressBar() as progress:
            if self.out is not None:
                progress("writing the page", 0, 0)
                write_run(comparison, self.out)
        for note in filter(None, dict.fromkeys(notes)):
            tell(note)
        if self.out is not None:
            tell(f"The page: {self.out / 'report.html'}")
        return Outcome({"comparison": comparison.to_dict()})

    def _labels(self) -> tuple[str, str]:
        """Short names that tell the two apart: the files of the weights, the models, or first and second."""
        candidates = [(self.a, self.b)]
        if self.weights is not None:
            candidates.insert(0, (self.weights[0].stem, self.weights[1].stem))
        return next(((first, second) for first, second in candidates if first != second), ("first", "second"))
