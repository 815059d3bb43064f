"""`spiritlevel compare`: which of two models to trust."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, check_folder, tell, tell_notes
from spiritlevel.cli.measure import OnData, shown_in_any_case, write_run
from spiritlevel.cli.parsing import optional
from spiritlevel.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Compare(OnData):
    """Compare two models on the same samples: which to trust, why, and which differences say nothing.

    For example: spiritlevel compare net.py:small net.py:large --weights small.pt large.pt --data test.npz

    With nothing but what is built in: spiritlevel compare softmax_regression mlp --data fashion-mini --samples 100

    Rounded as well: spiritlevel compare a.pt b.pt --model net.py:make --under int4,noise:0.01 --data test.npz
    """

    NAME = "compare"

    a: Annotated[Positional[str], arg(metavar="A")]
    """A model, written as for `spiritlevel measure`; or a file of weights for the network that --model names."""
    b: Annotated[Positional[str], arg(metavar="B")]
    """The other one."""
    weights: Annotated[tuple[Path, Path] | None, optional("FILE FILE")] = None
    """The weights of both, in the same order."""
    model: Annotated[str | None, optional("MODEL")] = None
    """The network of both, if A and B are files of weights."""
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
            specs, files = self._sources()
            (a, about_a), (b, about_b) = (
                read_model(spec, file, device=self.device, dtype=self.dtype, seed=self.seed)
                for spec, file in zip(specs, files, strict=True)
            )
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
                **self.means,
                **self.reading(samples),
            )
            sources = {"models": " and ".join(dict.fromkeys(specs)), "data": samples.name}
            sources["weights"] = " and ".join(str(file or "as built") for file in files)
            notes = [about_a, about_b, *samples.notes]
            reasons = (*filter(None, dict.fromkeys(notes)), *comparison.reasons)
            settings = sources | comparison.settings | sources  # first, and as given
            comparison = dataclasses.replace(comparison, settings=settings, reasons=reasons)
        with shown_in_any_case(comparison), ProgressBar() as progress:
            if self.out is not None:
                progress("writing the page", 0, 0)
                write_run(comparison, self.out)
        tell_notes(notes)
        if self.out is not None:
            tell(f"The page: {self.out / 'report.html'}")
        return Outcome({"comparison": comparison.to_dict()})

    def _sources(self) -> tuple[tuple[str, ...], tuple[Path | None, ...]]:
        """The network of each, and the file of its weights."""
        from spiritlevel.loading import is_file_of_weights, is_program

        alone = [each for each in (self.a, self.b) if is_file_of_weights(each) and not is_program(each)]
        if alone and self.weights is not None:
            raise InputError(
                f"{alone[0]} is already a file of weights, but --weights names others; name the network once, with "
                "--model, or write it in place of this file."
            )
        if self.model is not None and not alone:
            raise InputError("--model names the network of two files of weights, but neither A nor B is one.")
        if alone and self.model is None:
            raise InputError(
                f"{alone[0]} holds weights, which do not say what network they belong to; name it once for both: "
                f"spiritlevel compare {self.a} {self.b} --model file.py:function. A program that torch.export.save() "
                "wrote needs no --model."
            )
        specs = tuple(str(self.model) if each in alone else each for each in (self.a, self.b))
        return specs, self.weights or tuple(Path(each) if each in alone else None for each in (self.a, self.b))

    def _labels(self) -> tuple[str, str]:
        """Short names that tell the two apart: the files of the weights, the models, or first and second."""
        candidates = [(self.a, self.b)]
        if self.weights is not None:
            candidates.insert(0, (self.weights[0].stem, self.weights[1].stem))
        if self.model is not None:
            candidates.insert(0, (Path(self.a).stem, Path(self.b).stem))
        return next(((first, second) for first, second in candidates if first != second), ("first", "second"))
