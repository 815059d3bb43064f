"""`spiritlevel perturb`: predict what rounding, pruning, noise or another checkpoint does to a model, then measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, check_folder, tell
from spiritlevel.cli.measure import RunOnData, shown_in_any_case, write_run
from spiritlevel.cli.parsing import listed, optional
from spiritlevel.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Perturb(RunOnData):
    """Predict what a change of the weights will do to the loss and to every prediction, then make the change and look.

    For example: spiritlevel perturb net.py:make --weights net.safetensors --change int4 --data test.npz --out int4/

    With nothing but what is built in: spiritlevel perturb mlp --change int4 --data fashion-mini

    On the way to another checkpoint: spiritlevel perturb lenet5 --weights a.pt --change b.pt --data mnist
    """

    NAME = "perturb"
    RENAMED: ClassVar[Mapping[str, str]] = {"--foretell": "--predict-only"}

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model, written as for `spiritlevel measure`."""
    change: Annotated[
        str,
        arg(
            metavar="CHANGE",
            help=(
                "int8, int4, int4:channel:asymmetric, int4:random, prune:0.5, prune:0.5:layer, noise:0.01, "
                "noise:0.01:absolute, bfloat16, float16, lora, a file of other weights for the same model, or "
                "file.py:function from tensor to tensor."
            ),
        ),
    ]
    weights: Annotated[Path | None, optional("FILE")] = None
    """Its weights."""
    params: Annotated[str | None, optional("NAME,NAME,...")] = None
    """Change only these parameters: names, prefixes or globs."""
    predict_only: Annotated[bool, optional()] = False
    """Predict but do not measure: at most half of the change is ever made."""
    no_layers: Annotated[bool, optional()] = False
    """Leave out the layers, which cost three gradients each."""
    out: Annotated[Path | None, optional("DIR")] = None
    """Also write report.html and report.json to DIR."""

    def run(self) -> Outcome:
        """Load, predict, change, show."""
        if self.out is not None:
            check_folder(self.out)
        from spiritlevel.answers.perturbing import perturb
        from spiritlevel.loading import check_classes, load_loss, load_samples, read_model

        with ProgressBar() as progress:
            progress("loading", 0, 0)
            model, note = read_model(self.model, self.weights, device=self.device, dtype=self.dtype, seed=self.seed)
            samples = load_samples(self.data, "test", target=self.target, model=model)
            check_classes(samples, None, model, self.reading(samples))
            found = perturb(
                model,
                samples.data,
                self._change(),
                loss=load_loss(self.loss),
                samples=self.samples,
                apply=not self.predict_only,
                layers=not self.no_layers,
                params=None if self.params is None else listed(self.params),
                batch_norm=self.batch_norm,
                batch_size=self.batch_size,
                memory=self.memory,
                classes=samples.classes,
                name=self.model if self.weights is None else f"{self.model} ({self.weights.name})",
                progress=progress,
                seed=self.seed,
                **self.reading(samples),
            )
            sources = {"model": self.model, "weights": str(self.weights or "as built"), "data": samples.name}
            notes = tuple(filter(None, dict.fromkeys([note, *samples.notes, *found.notes])))
            name = found.change if self._is_named() else Path(self.change).name
            found = dataclasses.replace(found, change=name, settings={**sources, **found.settings}, notes=notes)
        with shown_in_any_case(found), ProgressBar() as progress:
            if self.out is not None:
                progress("writing the page", 0, 0)
                write_run(found, self.out)
        if self.out is not None:
            tell(f"The page: {self.out / 'report.html'}")
        return Outcome({"perturbation": found.to_dict()})

    def _is_named(self) -> bool:
        return Path(self.change).suffix not in (".safetensors", ".pt", ".pth", ".ckpt") and ".py:" not in self.change

    def _change(self) -> Any:
        """The change: its name, a function of a file, or other weights of the same model."""
        if self._is_named():
            return self.change
        from spiritlevel.loading import load_change, read_model

        if ".py:" in self.change:
            return load_change(self.change)
        if not Path(self.change).is_file():
            raise InputError(f"--change {self.change} is a file of weights that does not exist.")
        other, _ = read_model(self.model, Path(self.change), device=self.device, dtype=self.dtype, seed=self.seed)
        return other
