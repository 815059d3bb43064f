"""Figures in one call: `sl.plot.landscape(model, data)`, `sl.plot.margins(report)`, `sl.plot.save(chart, "fig.pdf")`.

Every function takes an existing result, a model with its data, or several of either: a list, or a dict whose keys name
them, drawn on one scale. It returns an Altair chart, which can be changed like any other. `save` makes it a figure for
print.

>>> import spiritlevel as sl
>>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
>>> data = torch.randn(8, 2), torch.tensor([0, 1] * 4)
>>> chart = landscape(net, data, directions="random", points=5)
>>> chart.to_dict()["layer"][0]["mark"]["type"]
'area'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spiritlevel.answers.auditing import audit as audited
from spiritlevel.answers.surface import landscape as measured_landscape
from spiritlevel.answers.tracking import Tracker
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, shown, whole_number
from spiritlevel.estimators import spectral_density
from spiritlevel.operators.matrices import hessian
from spiritlevel.results import (
    Audit,
    BatchEigenvalues,
    Landscape,
    Margins,
    Report,
    Result,
    SampleTraces,
    SmoothedDensity,
    SpectralDensity,
    SpectrumSummary,
    TrainingCurves,
)
from spiritlevel.samples.margins import margins as measured_margins
from spiritlevel.samples.traces import sample_traces

if TYPE_CHECKING:
    from spiritlevel.charts.axes import Chart

_OF_BOTH = ("loss", "batch_norm", "batch_size", "group", *Reading.__annotations__)  # options of traces and margins

_MOST_SAMPLES = 10**15  # in a mini-batch, which need not exist

__all__ = ["audit", "density", "landscape", "layers", "margins", "save", "spectrum", "traces", "training"]


@checked
def landscape(
    of: Any,
    data: Any = None,
    *,
    accuracy: bool = False,
    band: int | None = None,
    quadratic: bool | None = None,
    log: bool = False,
    title: str = "",
    **options: Any,
) -> Chart:
    """The loss along a line, or on a plane, through one model or several.

    A line has a band, the 95% interval of the mean over the data from which the samples were drawn, and the parabola
    that slope and curvature predict. A plane has contour lines, a cross for the model, and the path of its training if
    the landscape was made with `trajectory=`. Several planes have the same colours.

    Args:
        of: a `Landscape`, a `Report`, a model, or several of them.
        data: for a model, as in `sl.landscape`.
        accuracy: also draw the accuracy: on an axis on the right, or as the lines of a plane.
        band: along a line, draw one standard deviation of the loss of mini-batches of this many samples instead.
        quadratic: whether to draw the parabola of a line; by default only for a single model.
        log: a logarithmic axis for the loss along a line; a plane has one anyway.
        title: a heading.
        options: of `sl.landscape`, where it is measured here: directions, trajectory, dimensions, points, keep, ...
    """
    from spiritlevel.charts.figures import surface_lines, surface_maps

    band = None if band is None else whole_number(band, "band", 1, _MOST_SAMPLES)
    found: dict[str, Landscape] = _found(
        of, data, options, Landscape, "landscape", lambda report: report.landscape, measured_landscape
    )
    counts = {len(surface.steps) for surface in found.values()}
    if len(counts) > 1:
        raise InputError("lines and planes cannot be drawn on one scale; give landscapes of one kind.")
    if counts == {2}:
        if band is not None or quadratic:
            option = "quadratic=" if band is None else "band="
            raise InputError(f"{option} is drawn along a line, and this landscape is a plane; leave it out.")
        return surface_maps(found, accuracy=accuracy, title=title)
    return surface_lines(found, accuracy=accuracy, band=band, quadratic=quadratic, log=log, title=title)


@checked
def spectrum(of: Any, data: Any = None, *, title: str = "", **options: Any) -> Chart:
    """The Ritz values of the Hessian and their weights; for mini-batches, a histogram of their largest eigenvalues.

    Args:
        of: a `SpectralDensity`, `SpectrumSummary`, `Report` or model; or one or several `BatchEigenvalues`.
        data: for a model, as in `sl.hessian`.
        title: a heading.
        options: of `sl.hessian` and `sl.spectral_density`, where it is measured here.
    """
    from spiritlevel.charts import ritz_values
    from spiritlevel.charts.figures import batch_spectra

    batches = {name: each for name, each in _several(of).items() if isinstance(each, BatchEigenvalues)}
    if batches:
        if len(batches) < len(_several(of)):
            raise InputError("spectra of mini-batches and of all data cannot be drawn on one scale; give one kind.")
        _check_used(batches, data, options)
        return batch_spectra(batches, title=title)
    found = _densities(of, data, options)
    if len(found) > 1:
        raise InputError("spectrum draws the Ritz values of one model; sl.plot.density draws several.")
    return ritz_values(next(iter(found.values())), title=title)


@checked
def density(of: Any, data: Any = None, *, width: float | None = None, title: str = "", **options: Any) -> Chart:
    """The smoothed density of the Hessian's eigenvalues with its error band, for one model or several.

    Args:
        of: a `SmoothedDensity`, `SpectralDensity`, `SpectrumSummary`, `Report` or model, or several of them.
        data: for a model, as in `sl.hessian`.
        width: of the smoothing Gaussian; by default 1/100 of the span of the eigenvalues.
        title: a heading.
        options: of `sl.hessian` and `sl.spectral_density`, where it is measured here.
    """
    from spiritlevel.charts import density as one_density
    from spiritlevel.charts.figures import densities

    ready = {name: each for name, each in _several(of).items() if isinstance(each, SmoothedDensity)}
    if len(ready) == len(_several(of)):
        _check_used(ready, data, options)
        if width is not None:
            raise InputError("width= smooths a spectral density, but this one is smooth already; leave it out.")
    rest = {name: each for name, each in _several(of).items() if name not in ready}
    curves = ready | {
        name: each.density(width=width) for name, each in (_densities(rest, data, options) if rest else {}).items()
    }
    if len(curves) == 1:
        return one_density(next(iter(curves.values())), title=title)
    return densities({name: curves[name] for name in _several(of)}, title=title)


@checked
def margins(of: Any, data: Any = None, *, title: str = "", **options: Any) -> Chart:
    """How the output margins of the samples are distributed: a histogram and a box, or the shares of several groups.

    Args:
        of: `Margins`, a `Report` (training and test data where it has both), a model, or several of them.
        data: for a model, as in `sl.margins`.
        title: a heading.
        options: of `sl.margins`, where it is measured here.
    """
    from spiritlevel.charts import distribution
    from spiritlevel.charts.figures import histograms

    given = _several(of)
    if len(given) == 1 and isinstance(report := next(iter(given.values())), Report) and report.test_margins is not None:
        given = {"train": report.margins, "test": report.test_margins}
    found: dict[str, Margins] = _found(
        given, data, options, Margins, "margins", lambda report: report.margins, measured_margins
    )
    if len(found) == 1:
        return distribution(next(iter(found.values())).signed, "output margin", title=title)
    return histograms({name: each.signed for name, each in found.items()}, "output margin", title=title)


@checked
def traces(of: Any, data: Any = None, *, title: str = "", **options: Any) -> Chart:
    """The trace of every sample's Hessian: against its margin where that is known, else the distribution of traces.

    Args:
        of: a `Report`, a model, or one or several `SampleTraces`.
        data: for a model, as in `sl.sample_traces`.
        title: a heading.
        options: of `sl.sample_traces`, where it is measured here.
    """
    from spiritlevel.charts.figures import histograms, traces_and_margins

    given = _several(of)
    _check_used(given, data, options)
    alone = next(iter(given.values())) if len(given) == 1 else None
    if isinstance(alone, Report) and alone.traces is not None and alone.margins is not None:
        return traces_and_margins(alone.traces, alone.margins, title=title)
    found: dict[str, SampleTraces] = _found(
        of, data, options, SampleTraces, "traces", lambda report: report.traces, sample_traces
    )
    if isinstance(alone, nn.Module):
        shared = {key: value for key, value in options.items() if key in _OF_BOTH}
        return traces_and_margins(found[next(iter(found))], measured_margins(alone, data, **shared), title=title)
    return histograms({name: each.values for name, each in found.items()}, "Hessian trace", log_x=True, title=title)


@checked
def layers(of: Any, data: Any = None, *, title: str = "", **options: Any) -> Chart:
    """The share of each parameter tensor in the trace of the Hessian, as bars.

    The shares change when layers are rescaled, although the function does not.

    Args:
        of: a `Report`, `SampleTraces` with `per_layer=True`, a `SpectrumSummary`, or a model.
        data: for a model, as in `sl.sample_traces`.
        title: a heading.
        options: of `sl.sample_traces`, where it is measured here.
    """
    from spiritlevel.charts import bars

    found = _one(of, "layers")
    _check_used({"": found}, data, options)
    if isinstance(found, nn.Module):
        found = sample_traces(found, _needed(data), **{**options, "per_layer": True})
    if isinstance(found, SampleTraces):
        held = {name: float(values.mean()) for name, values in found.layers.items()}
    elif isinstance(found, SpectrumSummary):
        held = {name: each.value for name, each in found.layers.items()}
    elif isinstance(found, Report):
        held = dict(found.layers)
    else:
        raise InputError(f"layers draws a Report, SampleTraces, a SpectrumSummary or a model, got {shown(found)}.")
    total = sum(held.values())
    if not held or not total:
        raise InputError("it holds no traces by layer; sl.sample_traces(..., per_layer=True) computes them.")
    column = "share of the trace (%)"
    shares = {"layer": list(held), column: [100 * part / total for part in held.values()]}
    return bars(shares, "layer", column, title=title)


@checked
def audit(of: Any, data: Any = None, *, title: str = "", **options: Any) -> Chart:
    """What happens to each measure when the parameters change and the function does not: a map of factors.

    Args:
        of: an `Audit`, a `Report` or a model.
        data: for a model, as in `sl.audit`.
        title: a heading.
        options: of `sl.audit`, where it is measured here.
    """
    from spiritlevel.charts import audit_map

    found = _found({"": _one(of, "audit")}, data, options, Audit, "audit", lambda report: report.audit, audited)
    return audit_map(next(iter(found.values())), title=title)


@checked
def training(of: Any, *, log: bool = False, title: str = "") -> Any:
    """The curves of a tracked training run, a panel for each quantity; several runs share the same axes.

    Args:
        of: a `Tracker`, its `TrainingCurves`, or several of them.
        log: logarithmic axes, where all values are positive.
        title: a heading.
    """
    from spiritlevel.charts.figures import training_panels

    found = {name: each.curves() if isinstance(each, Tracker) else each for name, each in _several(of).items()}
    for each in found.values():
        if not isinstance(each, TrainingCurves):
            raise InputError(
                f"training draws a Tracker or its curves, also from the file that it wrote, got {shown(each)}."
            )
    return training_panels(found, log=log, title=title)


@checked
def save(
    chart: Any, path: str | Path, *, size: str = "column", titles: bool = True, dark: bool = False
) -> tuple[Path, ...]:
    """Write a chart as a figure for print, with its fonts inside, and return the files.

    The ending of the path says which file: .svg, .pdf or .png; without one, all three. A "column" is 85 mm wide,
    a "page" 178 mm, and letters are 7 and 8 points high in both.

    Args:
        chart: what a function of this module returned, changed as you like, or any Altair chart.
        path: the file.
        size: "column" or "page".
        titles: whether headings and the notes below them are drawn; a paper has captions for that.
        dark: for a dark background.
    """
    from spiritlevel.charts.publishing import publish

    if not hasattr(chart, "to_dict"):
        raise InputError(f"save needs an Altair chart, got {shown(chart)}.")
    return publish(chart, path, size=size, titles=titles, dark=dark)


# ---------------------------------------------------------------- what was given


def _several(of: Any) -> dict[str, Any]:
    """What was given, by name: a dict as it is, a report by its own, others by number."""
    if isinstance(of, Mapping | list | tuple) and not of:
        raise InputError("a figure needs something to draw, got nothing; pass a model, a report or another result.")
    if isinstance(of, Mapping):
        return {str(name): each for name, each in of.items()}
    items = list(of) if isinstance(of, list | tuple) else [of]
    names = [each.name if isinstance(each, Report) else str(number) for number, each in enumerate(items, 1)]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return dict(zip(names, items, strict=True))


def _one(of: Any, what: str) -> Any:
    items = _several(of)
    if len(items) != 1:
        raise InputError(f"{what} draws one model at a time, got {len(items)}.")
    return next(iter(items.values()))


def _needed(data: Any) -> Any:
    if data is None:
        raise InputError("a model needs data= to be measured; a result can be drawn without it.")
    return data


def _found(
    of: Any,
    data: Any,
    options: dict[str, Any],
    kind: type[Result],
    name: str,
    part: Callable[[Report], Any],
    measured: Callable[..., Any],
) -> dict[str, Any]:
    """Results of that kind: those that were given, parts of reports, and what is measured of models."""
    given = _several(of)
    _check_used(given, data, options)
    found: dict[str, Any] = {}
    for key, each in given.items():
        if isinstance(each, kind):
            found[key] = each
        elif isinstance(each, Report):
            found[key] = _held(each, part(each), name)
        elif isinstance(each, nn.Module):
            found[key] = measured(each, _needed(data), **options)
        else:
            raise InputError(f"{name} draws a {kind.__name__}, a Report or a model with its data, got {shown(each)}.")
    return found


def _check_used(given: Mapping[str, Any], data: Any, options: Mapping[str, Any]) -> None:
    """Refuse data and options of a measurement where nothing is measured."""
    named = [*options, *([] if data is None else ["data"])]
    if named and not any(isinstance(each, nn.Module) for each in given.values()):
        raise InputError(
            f"{named[0]}= is an option of a measurement, but the result is already there; leave it out or pass a model."
        )


def _held(report: Report, part: Any, name: str) -> Any:
    if part is None:
        why = report.left_out.get(name, "it was measured without")
        raise InputError(f"the report of {report.name} holds no {name}: {why.rstrip('.')}.")
    return part


def _densities(of: Any, data: Any, options: dict[str, Any]) -> dict[str, SpectralDensity]:
    def measured(model: nn.Module, data: Any, **options: Any) -> SpectralDensity:
        own = {key: options.pop(key) for key in ("probes", "steps", "seed") if key in options}
        with torch.inference_mode(False):
            return spectral_density(hessian(model, data, **options), **own)

    summaries = {
        name: each.density if isinstance(each, SpectrumSummary) else each for name, each in _several(of).items()
    }

    def part(report: Report) -> Any:
        return None if report.spectrum is None else report.spectrum.density

    return _found(summaries, data, options, SpectralDensity, "spectrum", part, measured)
