"""`spiritlevel audit`: which numbers survive when the function stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, tell_notes
from spiritlevel.cli.measure import OnData
from spiritlevel.cli.parsing import listed, optional


@dataclass(frozen=True, kw_only=True)
class Audit(OnData):
    """Measure a model before and after transforms that keep its function, and show which numbers stay.

    For example: spiritlevel audit net.py:make --weights net.safetensors --data train.npz --samples 500

    With nothing but what is built in: spiritlevel audit mlp --data fashion-mini --samples 200
    """

    NAME = "audit"

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model, written as for `spiritlevel measure`."""
    weights: Annotated[Path | None, optional("FILE")] = None
    """Its weights: .safetensors, a .pt file that holds nothing but tensors, or a .ckpt file of Lightning."""
    transforms: Annotated[str | None, optional("NAME,NAME,...")] = None
    """Only these transforms, such as rescale_layers,shift_logits; `all` adds rescale_all to the default ones."""

    def run(self) -> Outcome:
        """Load, audit, show the table."""
        from spiritlevel.answers.auditing import audit
        from spiritlevel.cli.show import show_audit
        from spiritlevel.loading import load_loss, load_samples, read_model

        with ProgressBar() as progress:
            progress("loading", 0, 0)
            model, about = read_model(self.model, self.weights, device=self.device, dtype=self.dtype, seed=self.seed)
            samples = load_samples(self.data, target=self.target, model=model)
            data, reading, population = self.drawn(samples, model)
            wanted = self.transforms
            found = audit(
                model,
                data,
                measures=self.names,
                transforms=wanted if wanted in (None, "all") else listed(wanted),
                loss=load_loss(self.loss),
                batch_norm=self.batch_norm,
                progress=progress,
                seed=self.seed,
                **self.means,
                **reading,
            )
        name = self.model if self.weights is None else f"{self.model} ({self.weights.name})"
        few = f"all {population:,}" if found.samples == population else f"{found.samples:,} of {population:,}"
        whole = sum(parameter.numel() for parameter in model.parameters())
        extent = f"{found.parameters:,} of {whole:,}" if self.params is not None else f"{found.parameters:,}"
        tell_notes([f"{name}: {extent} parameters, {few} samples", about, *samples.notes])
        show_audit(found)
        return Outcome({"audit": found.to_dict()})
