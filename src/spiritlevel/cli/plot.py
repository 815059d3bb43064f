"""`spiritlevel plot`: a figure for a paper in one command, from a model or from a run that was kept."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Outcome, ProgressBar, check_writable, tell
from spiritlevel.cli.measure import OnData
from spiritlevel.cli.parsing import listed, optional
from spiritlevel.cli.report import read_result
from spiritlevel.errors import InputError, enumerated, unknown_name

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.results import Result

KINDS = ("landscape", "spectrum", "density", "margins", "traces", "layers", "audit", "training")


@dataclass(frozen=True, kw_only=True)
class Plot(OnData):
    """Draw a figure for print: landscape, spectrum, density, margins, traces, layers, audit or training.

    For example: spiritlevel plot landscape net.py:make --weights net.safetensors --data train.npz --out surface.pdf

    With nothing but what is built in: spiritlevel plot landscape mlp --data fashion-mini --samples 200 --out loss.pdf

    From a kept run: spiritlevel plot margins run/ --out margins.svg --size page
    """

    NAME = "plot"

    kind: Annotated[Positional[str], arg(metavar="FIGURE")]
    """landscape, spectrum, density, margins, traces, layers, audit or training."""
    source: Annotated[
        Positional[str],
        arg(
            metavar="MODEL|RUN",
            help=(
                "A model, written as for `spiritlevel measure`; or what was kept: a folder that measure wrote, a "
                "--json file, or a tracker's file."
            ),
        ),
    ]
    data: Annotated[str, arg(metavar="DATA", help_behavior_hint="(for a model)")] = ""
    """The data of a model, written as for `spiritlevel measure`."""
    weights: Annotated[Path | None, optional("FILE")] = None
    """The weights of the model."""
    beside: Annotated[str | None, optional("WEIGHTS|RUN")] = None
    """What else to draw on the same scale: other weights for the model, or another run."""
    out: Annotated[Path | None, optional("FILE")] = None
    """Where to write it, as .svg, .pdf or .png; a name without an ending writes all three. FIGURE.svg unless given."""
    size: Annotated[str, arg(metavar="column|page")] = "column"
    """The width of a column, 85 mm, or of a page, 178 mm."""
    title: Annotated[str, arg(metavar="TEXT", help_behavior_hint="")] = ""
    """A heading."""
    no_titles: Annotated[bool, optional()] = False
    """Leave out headings and the notes below them, for a figure that has a caption."""
    directions: Annotated[str | None, optional("eigenvectors|random")] = None
    """For a landscape: the Hessian's eigenvectors (the default), or random directions with normalised filters."""
    to: Annotated[Path | None, optional("WEIGHTS")] = None
    """For a landscape: follow the straight line to this checkpoint of the same model instead."""
    along: Annotated[
        str | None,
        optional(
            "WEIGHTS,...|DIR",
            help=(
                "For a landscape: the plane nearest to these checkpoints of a training, in the order of the "
                "numbers in their names, or as given."
            ),
        ),
    ] = None
    dimensions: Annotated[int | None, optional("1|2")] = None
    """For a landscape: a line or a plane."""
    points: Annotated[int | None, optional("N")] = None
    """For a landscape: points per direction; 41 on a line and 21 on a plane unless given."""
    radius: Annotated[float | None, optional("X")] = None
    """For a landscape: the largest step, in lengths of the direction; by default 1, or by curvature (eigenvectors)."""
    accuracy: Annotated[bool, optional()] = False
    """For a landscape: also draw the accuracy."""
    band: Annotated[int | None, optional("N")] = None
    """For a line: show how much the loss of batches of N samples scatters, in place of the error of the mean."""
    log: Annotated[bool, optional()] = False
    """For a landscape or a training: logarithmic axes; the colours of a plane are logarithmic anyway."""
    batch: Annotated[int | None, optional("N")] = None
    """For a spectrum: the largest eigenvalues of mini-batches of N samples."""

    def run(self) -> Outcome:
        """Read or measure, draw, write."""
        if self.kind not in KINDS:
            raise unknown_name("figure", self.kind, KINDS)
        out = self.out or Path(f"{self.kind}.svg")
        check_writable(out, "--out")
        from spiritlevel.answers import plotting
        from spiritlevel.charts.publishing import FORMATS, SIZES
        from spiritlevel.results import Landscape

        if out.suffix not in ("", *FORMATS):
            raise InputError(f"--out needs the ending .svg, .pdf or .png, or none for all three, got {out.name!r}.")
        if self.size not in SIZES:
            raise unknown_name("figure size", self.size, SIZES)
        if self.band is not None and self.band < 1:
            raise InputError(f"--band takes a number of samples, at least 1, got {self.band}.")
        if self.batch is not None and self.batch < 1:
            raise InputError(f"--batch takes a number of samples, at least 1, got {self.batch}.")
        self._check_figure()
        keep = out.with_name(f"{out.stem}.kept")
        found = self._from_runs() if _is_run(self.source) else self._from_models(keep)
        planes = [each for each in found.values() if isinstance(each, Landscape) and len(each.steps) == 2]
        if self.band is not None and planes:
            raise InputError(_NO_BAND)
        drawn: dict[str, Any] = {"title": self.title}
        if self.kind == "landscape":
            drawn |= {"accuracy": self.accuracy, "band": self.band, "log": self.log}
        elif self.kind == "training":
            drawn |= {"log": self.log}
        with ProgressBar() as bar:
            bar("drawing", 0, 0)
            chart = getattr(plotting, self.kind)(found, **drawn)
            files = plotting.save(chart, out, size=self.size, titles=not self.no_titles)
        if self.kind == "landscape":
            _forget(keep)
        tell(f"The figure: {', '.join(map(str, files))}")
        payload: dict[str, Any] = {"figures": [str(file) for file in files]}
        if len(found) == 1:
            payload["result"] = next(iter(found.values())).to_dict()
        return Outcome(payload)

    def _check_figure(self) -> None:
        """Refuse the options of other figures, and those that contradict each other."""
        for name, kinds in _FIGURES.items():
            if self._given(name) and self.kind not in kinds:
                raise InputError(f"{_option(name)} belongs to {enumerated(kinds)}, not to {self.kind}; leave it out.")
        if self.beside is not None and self.kind in ("audit", "layers"):
            raise InputError(f"--beside puts two on one scale, and {self.kind} draws one at a time; leave it out.")
        ways = [f"--{name}" for name in ("directions", "to", "along") if self._given(name)]
        if len(ways) > 1:
            raise InputError(
                f"{' and '.join(ways)} each choose the directions of a landscape; leave all but one of them out."
            )
        if self.to is not None and self.dimensions not in (None, 1):
            raise InputError("--to draws a line, so it does not go with --dimensions 2; leave one of them out.")
        if self.batch is not None and self.batch_size is not None:
            raise InputError("--batch says how large the mini-batches are that are measured; leave --batch-size out.")
        if self.band is not None and (self.dimensions or (1 if self.along is None else 2)) == 2:
            raise InputError(_NO_BAND)

    def _given(self, name: str) -> bool:
        """Whether an option was set to something else than what it is without."""
        (default,) = (field.default for field in dataclasses.fields(self) if field.name == name)
        return bool(getattr(self, name) != default)

    def _from_runs(self) -> dict[str, Result]:
        from spiritlevel.answers.tracking import curves_in
        from spiritlevel.results import Report

        measuring = [field.name for field in dataclasses.fields(OnData) if field.name not in ("json", "debug")]
        for name in (*measuring, *_MEASURING):
            if self._given(name):
                raise InputError(
                    f"{_option(name)} belongs to a model, but a kept run already holds its numbers; leave it out."
                )
        found: dict[str, Result] = {}
        for place in filter(None, (self.source, self.beside)):
            path = Path(place)
            rows = path.suffix in (".parquet", ".csv")
            result = curves_in(path) if rows else read_result(path)
            name = result.name if isinstance(result, Report) else path.stem
            found[f"{name} ({path.name})" if name in found else name] = result
        return found

    def _from_models(self, keep: Path) -> dict[str, Result]:
        from spiritlevel.loading import load_samples, read_model

        if self.kind == "training":
            raise InputError(
                "training draws what a Tracker wrote, a .parquet, .csv or .json file; a model has no curves."
            )
        if not self.data:
            raise InputError(f"--data must be given to measure the model {self.source!r}; {_HINT}")
        with ProgressBar() as progress:
            progress("loading", 0, 0)

            def model_of(weights: Path | None) -> nn.Module:
                return read_model(self.source, weights, device=self.device, dtype=self.dtype, seed=self.seed)[0]

            model = model_of(self.weights)
            samples = load_samples(self.data, target=self.target, model=model)
            data, reading, _ = self.drawn(samples, model)
            models = {"": model}
            if self.beside:
                other = Path(self.beside)
                alike = _stem(self.weights) == _stem(other)  # checkpoints of two runs, say, which differ in the folder
                names = [str(path) if alike and path else _stem(path) for path in (self.weights, other)]
                models = dict(zip(names, (model, model_of(other)), strict=True))
            try:
                return {
                    name: self._measured(each, data, reading, progress, keep / str(number), model_of)
                    for number, (name, each) in enumerate(models.items())
                }
            except KeyboardInterrupt as error:
                if keep.exists():
                    told = f"interrupted; the points so far are in {keep}, and the same command resumes from there."
                    raise KeyboardInterrupt(told) from error
                raise

    def _measured(
        self,
        model: nn.Module,
        data: Any,
        reading: Any,
        progress: ProgressBar,
        keep: Path,
        model_of: Callable[[Path | None], nn.Module],
    ) -> Result:
        """The result that the figure shows, and nothing else."""
        from spiritlevel.answers.auditing import audit
        from spiritlevel.answers.measuring import measure
        from spiritlevel.answers.minibatches import batch_eigenvalues
        from spiritlevel.answers.surface import landscape
        from spiritlevel.estimators import spectral_density
        from spiritlevel.loading import load_loss
        from spiritlevel.operators.matrices import hessian
        from spiritlevel.samples.margins import margins
        from spiritlevel.samples.traces import sample_traces

        means = {name: value for name, value in self.means.items() if value is not None}
        shared: dict[str, Any] = {"loss": load_loss(self.loss), "batch_norm": self.batch_norm, **means, **reading}
        if self.kind == "landscape":
            where: dict[str, Any] = {"directions": self.directions or "eigenvectors"}
            if self.to is not None:
                where = {"directions": model_of(self.to)}
            if self.along is not None:
                where = {"trajectory": [model_of(file) for file in _checkpoints(self.along)]}
            size: dict[str, Any] = {"dimensions": self.dimensions, "points": self.points, "radius": self.radius}
            return landscape(model, data, **where, **size, keep=keep, progress=progress, seed=self.seed, **shared)
        progress(self.kind, 0, 0)
        if self.kind == "spectrum" and self.batch is not None:
            shared["batch_size"] = self.batch
            return batch_eigenvalues(model, data, progress=progress, seed=self.seed, **shared)
        if self.kind in ("spectrum", "density"):
            return spectral_density(hessian(model, data, **shared), seed=self.seed)
        if self.kind == "margins":
            return margins(model, data, **shared)
        if self.kind == "audit":
            return audit(model, data, measures=self.names, progress=progress, seed=self.seed, **shared)
        if self.kind == "layers":
            return sample_traces(model, data, per_layer=True, seed=self.seed, **shared)
        return measure(model, data, measures="trace", parts=[], seed=self.seed, progress=progress, **shared)


_FIGURES = {  # options that belong to some figures only
    **dict.fromkeys(
        ("directions", "to", "along", "dimensions", "points", "radius", "accuracy", "band"), ("landscape",)
    ),
    "log": ("landscape", "training"),
    "batch": ("spectrum",),
    "measures": ("audit",),
    **dict.fromkeys(("params", "memory"), ("landscape", "spectrum", "density", "traces", "layers", "audit")),
}
_MEASURING = ("weights", "directions", "to", "along", "dimensions", "points", "radius", "batch")  # of a model
_NO_BAND = "--band is drawn along a line, and this landscape is a plane; leave it out, or ask for --dimensions 1."
_HINT = "or, in place of the model, name a folder that `spiritlevel measure` wrote."


def _option(name: str) -> str:
    """As it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def _is_run(source: str) -> bool:
    path = Path(source)
    try:
        return path.is_dir() or (path.suffix in (".json", ".parquet", ".csv") and ":" not in source)
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _forget(keep: Path) -> None:
    """Remove what a surface that is now drawn has kept, and nothing that somebody else has put there."""
    with contextlib.suppress(OSError):
        for folder in (keep / "0", keep / "1"):
            for file in folder.glob("*.safetensors"):
                file.unlink()
            if folder.is_dir():
                folder.rmdir()
        keep.rmdir()


def _stem(weights: Path | None) -> str:
    return "as built" if weights is None else weights.stem


def _checkpoints(given: str) -> list[Path]:
    """The files in the order given; from a folder, those that hold weights, by the numbers in their names."""
    import re

    endings = (".safetensors", ".pt", ".pth", ".ckpt")
    if given and Path(given).is_dir():
        files = [file for file in Path(given).iterdir() if file.suffix in endings]
        files.sort(key=lambda file: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)])
    else:
        files = [Path(name) for name in listed(given)]
    if not files:
        raise InputError(f"--along needs files of weights, or a folder of them ({', '.join(endings)}), got {given!r}.")
    return files
