"""All that was measured of one model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, counted
from spiritlevel.results.audits import SYMMETRIES, Audit, fate
from spiritlevel.results.codec import Misfit, Result, same_length
from spiritlevel.results.estimates import Estimate, with_status
from spiritlevel.results.formatting import aligned, figure, left_out_lines
from spiritlevel.results.intervals import share_limits
from spiritlevel.results.pages import Shown
from spiritlevel.results.samples import Correlation, Margins, SampleTraces
from spiritlevel.results.spectra import SpectrumSummary
from spiritlevel.results.surfaces import Landscape
from spiritlevel.results.tables import Columns, of_estimates

_LARGEST = 1e30  # what can be drawn: beyond it the ends of an axis overflow


@dataclass(frozen=True)
class Fit(Result):
    """How well a model fits some samples: `accuracy` and mean `loss`, with their errors if these are a random subset.

    `samples` were measured out of `population`. `accuracy` is undefined where the targets are not classes. `of` says
    what is right or wrong: "samples" ("tokens", where those are the unit), or their "positions" or "labels"; the
    accuracy is then the mean of every sample's share. For a regression `r_squared` is 1 − Σ‖y − ŷ‖²/Σ‖y − ȳ‖², with ȳ
    the mean target of each output.
    """

    samples: int
    population: int
    accuracy: Estimate
    loss: Estimate
    of: str = "samples"
    r_squared: Estimate | None = None

    def quality(self) -> tuple[str, str]:
        """What, besides the loss, says how well the model fits, and its value in words; both empty if nothing does.

        >>> Fit(60, 60, Estimate(0.5), Estimate(0.0), of="positions").quality()
        ('accuracy of positions', '50.00%')
        """
        if self.r_squared is not None and not math.isnan(self.r_squared.value):
            return "R²", figure(self.r_squared.value)
        if math.isnan(self.accuracy.value):
            return "", ""
        return "accuracy" + ("" if self.of == "samples" else f" of {self.of}"), f"{self.accuracy.value:.2%}"

    def _check(self) -> None:
        if not 0 <= self.samples <= self.population:
            raise Misfit(f"{self.samples:,} of {self.population:,} samples is impossible")
        if not (math.isnan(self.accuracy.value) or 0 <= self.accuracy.value <= 1):
            raise Misfit(f"an accuracy must lie between 0 and 1, but here it is {self.accuracy.value:g}")

    def accuracy_limits(self) -> tuple[float, float]:
        """Clopper and Pearson's 95% interval for the accuracy on the whole population, of which a subset was measured.

        >>> [f"{limit:.3f}" for limit in Fit(60, 10**9, Estimate(1.0), Estimate(0.0)).accuracy_limits()]
        ['0.940', '1.000']
        """
        if self.of not in ("samples", "tokens"):
            return self.accuracy.interval(data=True)
        return share_limits(self.accuracy.value, self.samples, self.population)

    def __str__(self) -> str:
        fit = " ".join(self.quality())
        return f"{fit}{', ' * bool(fit)}loss {self.loss} on {self.samples:,} of {self.population:,} samples"


@dataclass(frozen=True)
class ReportRow(Result):
    """One measure of a report: its value and all that is known about it.

    `kind` is the status of `value`, see `Estimate`; `direction` what a larger value means: "sharper", "flatter",
    "wider" or "larger". `invariant_to` are the transforms that leave it unchanged; `family` is "curvature", "margin" or
    "norm"; `cost` the most expensive thing it does and `seconds` the time it took, not counting what other measures
    had computed. Where a subset was measured and the resulting error is not known, `subset_error` says why.
    `needs_data` is false where the weights alone determine the value.
    """

    name: str
    value: Estimate
    direction: str
    family: str
    meaning: str
    formula: str
    reference: str
    invariant_to: tuple[str, ...]
    cost: str
    seconds: float = math.nan
    subset_error_unknown: bool = False
    subset_error: str = ""
    needs_data: bool = True

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = {"needs_data": data.get("family") != "norm", **data}
        data = {key: item for key, item in data.items() if key != "kind"}  # it is the status of the value now
        return {**data, "value": with_status(data["value"], str(data.get("name")))} if "value" in data else data

    @property
    def kind(self) -> str:
        """What the value is worth: its status."""
        return self.value.status

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval, with the error of a random subset where the data were one; NaN where that is not known."""
        return (math.nan, math.nan) if self.subset_error_unknown else self.value.interval(data=True)

    @property
    def invariant(self) -> bool:
        """Whether, in theory, the value stays the same under every symmetry that this library knows, `SYMMETRIES`."""
        return set(SYMMETRIES) <= set(self.invariant_to)

    def __str__(self) -> str:
        said = f"{self.name}: {self.value} ({self.kind})"
        if self.subset_error_unknown:
            said += " for the samples measured, unknown for all of the data"
        elif self.value.data_stderr:
            said += f" for the samples measured, {' to '.join(map(figure, self.interval))} for all of the data"
        return f"{said}; {self.meaning}"


@dataclass(frozen=True)
class Pictures(Result):
    """Some samples as pictures: `images` (K, C, H, W) uint8, C = 1 or 3, of the samples `indices` (K,) of the report.

    `groups` says why: each name ("sharpest", "least certain", "others") has the positions of its pictures in `indices`.
    """

    indices: Tensor
    images: Tensor
    groups: dict[str, tuple[int, ...]]

    def _check(self) -> None:
        same_length(indices=self.indices, images=self.images)
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or self.images.shape[1] not in (1, 3):
            raise Misfit("its pictures need 1 or 3 channels of bytes")
        if self.indices.ndim != 1 or self.indices.dtype != torch.int64:
            raise Misfit("its indices need one row of whole numbers")
        for name, places in self.groups.items():
            if any(isinstance(place, bool) or not 0 <= place < len(self.indices) for place in places):
                raise Misfit(f"the group {name!r} names pictures that are not there")

    def __str__(self) -> str:
        counts = ", ".join(f"{len(places)} {name}" for name, places in self.groups.items())
        return f"{self.indices.numel()} pictures: {counts}"


@dataclass(frozen=True)
class Report(Shown):
    """Everything that `measure` found about one model: prints as a table, shows itself in a notebook, has a page.

    Per-sample results (`traces`, `margins`, `predicted`) are in the order of the samples measured; `indices` are their
    places in the data if they are a random subset, else `None`. `fits` and `correlations` are keyed by name ("train",
    "test"; "trace and margin", "trace and ACEHT"), and an undefined correlation says why. `layers` is each parameter
    tensor's share of the trace. `spectrum` holds no vectors. `settings` says how all this was measured: versions, seed,
    device, dtype, data, batch norm. `left_out` names what was not measured, with the reason; `partial` is empty unless
    the measurement was interrupted. `headline` puts the most important findings into words, from the numbers alone;
    `leads` names the measures that stand for their family ("curvature", "margin") in a summary, the best first.
    """

    name: str
    rows: tuple[ReportRow, ...]
    headline: tuple[str, ...] = ()
    fits: dict[str, Fit] = field(default_factory=dict)
    traces: SampleTraces | None = None
    margins: Margins | None = None
    test_margins: Margins | None = None
    predicted: Tensor | None = None
    indices: Tensor | None = None
    correlations: dict[str, Correlation] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)
    spectrum: SpectrumSummary | None = None
    landscape: Landscape | None = None
    audit: Audit | None = None
    pictures: Pictures | None = None
    classes: tuple[str, ...] = ()
    parameters: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    partial: str = ""
    seconds: float = math.nan
    leads: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def _check(self) -> None:
        per_sample = {"traces": self.traces and self.traces.values, "margins": self.margins and self.margins.signed}
        same_length(**per_sample, predicted=self.predicted, indices=self.indices)
        known = [each for each in (*per_sample.values(), self.predicted, self.indices) if each is not None]
        count = max(map(len, known), default=None)
        if self.indices is not None and (self.indices.ndim != 1 or self.indices.dtype != torch.int64):
            raise Misfit("its indices need one row of whole numbers")
        if self.pictures is not None and count is not None and len(self.pictures.indices):
            low, high = int(self.pictures.indices.min()), int(self.pictures.indices.max())
            if low < 0 or high >= count:
                raise Misfit(f"it shows a picture of sample {high if low >= 0 else low}, but has {count:,} samples")
        for what in (self.margins, self.test_margins):
            if what is not None and len(what) and float(what.signed.abs().nan_to_num().max()) > _LARGEST:
                raise Misfit(f"margins beyond {_LARGEST:g} cannot be drawn")

    @property
    def extent(self) -> str:
        """How many parameters were measured; of how many, and which, if some were chosen."""
        return self.settings.get("parameters", counted(self.parameters, "parameter"))

    @checked
    def row(self, name: str) -> ReportRow:
        """The row of one measure."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"the report holds no measure {name!r}, only {', '.join(row.name for row in self.rows)}.")

    def unknown_errors(self) -> dict[str, str]:
        """Why the error of a random subset is not known, for the names of the measures that share a reason."""
        reasons = {row.name: row.subset_error for row in self.rows if row.subset_error}
        return {
            ", ".join(name for name in reasons if reasons[name] == reason): reason
            for reason in dict.fromkeys(reasons.values())
        }

    def _columns(self) -> Columns:
        """One row per measure; the limits are those of `ReportRow.interval`."""
        rows = self.rows
        return {
            "measure": (str, [row.name for row in rows]),
            **of_estimates([row.value for row in rows], [row.interval for row in rows]),
            "direction": (str, [row.direction for row in rows]),
            "family": (str, [row.family for row in rows]),
            "invariant_to": (str, [", ".join(row.invariant_to) for row in rows]),
            "subset_error": (str, [row.subset_error for row in rows]),
            "products": (int, [row.value.matvecs for row in rows]),
            "seconds": (float, [row.seconds for row in rows]),
            "meaning": (str, [row.meaning for row in rows]),
            "formula": (str, [row.formula for row in rows]),
            "reference": (str, [row.reference for row in rows]),
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.extent}"]
        lines += [f"PARTIAL: {self.partial}"] if self.partial else []
        for name, fit in self.fits.items():
            of = f" of {fit.population:,}" if fit.population > fit.samples else ""
            quality = " ".join(filter(None, fit.quality()))
            noun = "tokens" if fit.of == "tokens" else "samples"
            known = [f"{fit.samples:,}{of} {noun}", quality, f"loss {figure(fit.loss.value)}"]
            lines.append(f"{name}: {', '.join(filter(None, known))}")
        table = [["measure", "value", "95% interval", "kind", "larger is", "at the same outputs"]]
        moved = self.audit.moved() if self.audit is not None else {}
        for row in self.rows:
            low, high = row.interval
            interval = "" if row.kind == "undefined" or low == high else f"{figure(low)} to {figure(high)}"
            if row.kind == "converged":
                interval = "" if row.value.settled and not row.value.data_stderr else f"± {figure((high - low) / 2, 2)}"
            interval = "unknown" if math.isnan(low) and row.kind != "undefined" else interval
            interval = f"{figure(low)} or more" if math.isinf(high) else interval
            table.append(
                [
                    row.name,
                    figure(row.value.value, 6),
                    interval,
                    row.kind,
                    row.direction,
                    fate(moved.get(row.name)),
                ]
            )
        lines += aligned(table)
        lines += [f"95% interval unknown: {names}: {reason}" for names, reason in self.unknown_errors().items()]
        lines += [f"{name}: {found}" for name, found in self.correlations.items()]
        lines += left_out_lines(self.left_out)
        return "\n".join([*lines, *self.headline])
