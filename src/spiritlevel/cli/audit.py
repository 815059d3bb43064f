"""`spiritlevel audit`: which numbers survive when the function stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, tell
from spiritlevel.cli.measure import OnData
from spiritlevel.cli.parsing import optional


@dataclass(frozen=True, kw_only=True)
class Audit(OnData):
    """Measure a model before and after transforms that keep its function, and show which numbers stay.

    For example: spiritlevel audit net.py:make --weights net.safetensors --data train.npz --samples 500
    """

    NAME = "audit"

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A model, written as for `spiritlevel measure`."""
    weights: Annotated[Path | None, optional("FILE")] = None
    """Its weights: .safetensors, or a .pt file that holds nothing but tensors."""
    transforms: Annotated[str | None, optional("NAME,NAME,...")] = None
    """Only these transforms, or all."""

    def run(self) -> Outcome:
        """Load, audit, show the table."""
        from spiritlevel.answers.auditing import audit
        from spiritlevel.binding.batches import Batches, subset
        from spiritlevel.cli.show import show_audit
        from spiritlevel.loading import about_weights, check_classes, load_model, load_samples

        with ProgressBar() as progress:
            progress("loading", 0, 0)
            model = load_model(self.model, self.weights, device=self.device, dtype=self.dtype, seed=self.seed)
            samples = load_samples(self.data)
            check_classes(samples, None, model)
            data, _, population = subset(
                Batches(samples.data, whole=self.batch_norm == "batch"), self.samples, self.seed
            )
            wanted = self.transforms
            found = audit(
                model,
                data,
                measures=self.names,
                transforms=wanted if wanted in (None, "all") else wanted.split(","),
                loss=self.loss,
                batch_norm=self.batch_norm,
                progress=progress,
                seed=self.seed,
            )
        tell(f"{self.model}: {found.parameters:,} parameters, {found.samples:,} of {population:,} samples")
        for note in filter(None, [about_weights(self.model, self.weights), *samples.notes]):
            tell(note)
        show_audit(found)
        return Outcome({"audit": found.to_dict()})
