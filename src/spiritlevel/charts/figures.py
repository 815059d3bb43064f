"""Charts of several results on one scale, as papers show them: surfaces, spectra, margins, traces, training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
from torch import Tensor

from spiritlevel.charts.axes import NUMBERS, Chart, chart_of, plain_values, with_title
from spiritlevel.charts.columns import lines, scatter
from spiritlevel.charts.measured import step_name
from spiritlevel.charts.surfaces import contours, isolines, panels
from spiritlevel.errors import InputError
from spiritlevel.results import BatchEigenvalues, Landscape, Margins, SampleTraces, SmoothedDensity, TrainingCurves

_LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
_ACCURACY = "#ff9d3c"  # lines on the blue, green and yellow of a surface


def surface_lines(
    surfaces: Mapping[str, Landscape],
    *,
    band: int | None = None,
    accuracy: bool = False,
    quadratic: bool | None = None,
    log: bool = False,
    title: str = "",
) -> Chart:
    """The loss along a direction for one model or several, with its error band; accuracy on an axis on the right.

    The band is the 95% interval of the mean over the data from which these samples were drawn; with `band` B it is one
    standard deviation of the loss of a mini-batch of B samples, up and down. The parabola that slope and curvature
    predict is drawn for a single model, unless it is on the way to another.
    """
    one = len(surfaces) == 1
    rows, predicted, right = [], [], []
    for name, surface in surfaces.items():
        steps, losses = surface.steps[0].tolist(), surface.losses.tolist()
        low, high = _band(surface, band)
        rows += [
            {"x": x, "y": y, "low": a, "high": b, "series": name}
            for x, y, a, b in zip(steps, *map(plain_values, (losses, low, high)), strict=True)
        ]
        predicted += [{"x": x, "y": y} for x, y in zip(steps, plain_values(surface.quadratic), strict=True)]
        if surface.accuracies is not None:
            right += [
                {"x": x, "y": y, "series": name} for x, y in zip(steps, plain_values(surface.accuracies), strict=True)
            ]
    kinds = {surface.directions[0] for surface in surfaces.values()}
    across = alt.X("x:Q", title=step_name(kinds.pop()) if len(kinds) == 1 else "step", axis=NUMBERS)
    ends = [row[key] for row in rows for key in ("low", "y", "high") if row[key] is not None]
    if not ends:
        raise InputError("the surface has no finite loss to draw.")
    positive = [end for end in ends if end > 0]
    room = 0.05 * (max(ends) - min(ends)) or 1.0
    domain = [min(positive or [1e-12]), max(ends)] if log else [max(0.0, min(ends) - room), max(ends) + room]
    scale = alt.Scale(type="log", domain=domain) if log else alt.Scale(domain=domain, nice=False)
    up = alt.Y("y:Q", title="loss", scale=scale, axis=NUMBERS)
    colour: dict[str, Any] = {} if one else {"color": alt.Color("series:N", sort=None, title=None)}
    layers: list[Any] = []
    if any(row["low"] is not None for row in rows):
        area = alt.Y("low:Q", title="loss", scale=scale, axis=NUMBERS)
        layers.append(chart_of(rows).mark_area(opacity=0.2, clip=True).encode(x=across, y=area, y2="high:Q", **colour))
    layers.append(chart_of(rows).mark_line(clip=True).encode(x=across, y=up, **colour))
    paths = any(surface.barrier is not None or surface.track is not None for surface in surfaces.values())
    if quadratic if quadratic is not None else one and not paths:
        layers.append(chart_of(predicted).mark_line(strokeDash=[4, 3], clip=True, opacity=0.7).encode(x=across, y=up))
    chart = alt.layer(*layers)
    if accuracy and right:
        share = alt.Y(
            "y:Q", title="accuracy (dotted)", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(orient="right", format="%")
        )
        dotted = chart_of(right).mark_line(strokeDash=[1, 3]).encode(x=across, y=share, **colour)
        chart = alt.layer(chart, dotted).resolve_scale(y="independent")
    return with_title(chart, title, _band_note(surfaces, band, layers))


def _band(surface: Landscape, batch: int | None) -> tuple[list[float], list[float]]:
    """The lower and the upper end of the band, NaN where the scatter of the samples is not known."""
    losses = surface.losses
    if surface.spread is None or not surface.samples:
        return [math.nan] * len(losses), [math.nan] * len(losses)
    half = surface.spread / math.sqrt(batch) if batch else 1.96 * surface.spread / math.sqrt(surface.samples)
    return (losses - half).clamp(min=0).tolist(), (losses + half).tolist()


def _band_note(surfaces: Mapping[str, Landscape], batch: int | None, layers: Sequence[Any]) -> str:
    if all(surface.spread is None for surface in surfaces.values()):
        return ""
    if batch:
        return f"band: one standard deviation of the loss of mini-batches of {batch:,} samples"
    counts = sorted({surface.samples for surface in surfaces.values()})
    return f"band: 95% interval of the mean, {' and '.join(f'{count:,}' for count in counts)} samples"


def surface_maps(
    surfaces: Mapping[str, Landscape], *, accuracy: bool = False, track: bool = True, title: str = ""
) -> Any:
    """The loss on a plane for one model or several, in the same colours; a cross is the model, a line its training.

    With `accuracy` the lines on the surface are those of equal accuracy, with their percentages, else of equal loss.
    """
    finite = np.concatenate([np.asarray(surface.losses.reshape(-1), dtype=float) for surface in surfaces.values()])
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        raise InputError("the surface has no finite loss to draw.")
    domain = (float(finite.min()), float(finite.max()))
    charts = []
    for name, surface in surfaces.items():
        across, up = (_axis_name(surface, k) for k in (0, 1))
        drawn = accuracy and surface.accuracies is not None
        chart: Any = contours(
            surface.steps[0].tolist(),
            surface.steps[1].tolist(),
            surface.losses,
            names=(across, up, "loss"),
            log=True,
            levels=0 if drawn else 10,
            domain=domain,
        )
        if drawn:
            chart = chart + _accuracy_lines(surface)
        if surface.track is not None and track:
            chart = chart + _track(surface.track)
        model = chart_of([{"x": 0.0, "y": 0.0}])
        cross = model.mark_point(
            shape="cross", size=90, filled=True, color="#ffffff", stroke="#000000", strokeWidth=1, opacity=1
        )
        chart = chart + cross.encode(x="x:Q", y="y:Q", tooltip=alt.value("the model"))
        charts.append(with_title(chart.properties(width=420, height=400), name if len(surfaces) > 1 else ""))
    notes = "lines: accuracy" if accuracy and any(s.accuracies is not None for s in surfaces.values()) else ""
    if len(charts) == 1:
        return with_title(charts[0], title, notes)
    return with_title(alt.hconcat(*charts).resolve_scale(color="shared"), title, notes)


def _axis_name(surface: Landscape, k: int) -> str:
    share = f" ({surface.explained[k]:.0%})" if len(surface.explained) > k else ""
    return f"{step_name(surface.directions[k])}{share}"


def _accuracy_lines(surface: Landscape) -> Any:
    assert surface.accuracies is not None
    x, y = (np.asarray(steps, dtype=float) for steps in surface.steps)
    heights = np.asarray(surface.accuracies, dtype=float)
    segments: list[dict[str, float]] = []
    texts: list[dict[str, Any]] = []
    for level in _LEVELS:
        found = isolines(x, y, heights, level)
        segments += [dict(zip(("x", "y", "x2", "y2"), map(float, each), strict=True)) for each in found]
        if len(found) > 3:  # labelled where it passes below the model, or as near to that as it gets
            middle = min(found, key=lambda place: abs(place[0]) / np.ptp(x) + max(0.0, place[1]) / np.ptp(y))
            texts.append({"x": float(middle[0]), "y": float(middle[1]), "text": f"{level:.1%}".replace(".0%", "%")})
    rules = (
        chart_of(segments).mark_rule(color=_ACCURACY, strokeWidth=1.2).encode(x="x:Q", y="y:Q", x2="x2:Q", y2="y2:Q")
    )
    words = chart_of(texts).mark_text(color=_ACCURACY, fontSize=11, dy=-6).encode(x="x:Q", y="y:Q", text="text:N")
    return rules + words


def _track(places: Tensor) -> Any:
    rows = [{"x": x, "y": y, "order": k} for k, (x, y) in enumerate(places.tolist())]
    rows.append({"x": 0.0, "y": 0.0, "order": len(rows)})
    base = chart_of(rows).encode(x="x:Q", y="y:Q", order="order:Q")
    return base.mark_line(color="#ffffff", strokeWidth=1.5) + base.mark_circle(color="#ffffff", size=26, opacity=1)


def histograms(
    groups: Mapping[str, Any], name: str, *, bins: int = 40, log_x: bool = False, log_y: bool = False, title: str = ""
) -> Chart:
    """Shares of one or several groups of values in the same bins, as steps; what cannot be shown is counted."""
    columns = {group: np.asarray(plain_values(values), dtype=float) for group, values in groups.items()}
    shown = {group: column[np.isfinite(column) & ((column > 0) | (not log_x))] for group, column in columns.items()}
    everything = np.concatenate([*shown.values(), np.empty(0)])
    if not len(everything):
        raise InputError(f"there is no {'positive ' if log_x else ''}value of {name!r} to draw.")
    scaled = np.log10(everything) if log_x else everything
    edges = np.histogram_bin_edges(scaled, bins=bins)
    borders = 10**edges if log_x else edges
    rows = []
    for group, column in shown.items():
        counts, _ = np.histogram(np.log10(column) if log_x else column, bins=edges)
        shares = counts / max(1, len(columns[group]))
        rows += [
            {"x": float(x), "y": float(y), "series": group}
            for x, y in zip([*borders, borders[-1]], [*shares, shares[-1], 0.0], strict=True)
        ]
    lost = sum(len(column) for column in columns.values()) - len(everything)
    kind = "not positive or not finite" if log_x else "not finite"
    note = f"{lost:,} values are {kind} and not shown" if lost else ""
    across = alt.Scale(type="log", nice=False) if log_x else alt.Scale(zero=False)
    colour: dict[str, Any] = {} if len(groups) == 1 else {"color": alt.Color("series:N", sort=None, title=None)}
    base = chart_of(rows).encode(
        x=alt.X("x:Q", title=name, scale=across, axis=NUMBERS),
        y=alt.Y(
            "y:Q",
            title="share",
            stack=None,
            axis=NUMBERS,
            scale=alt.Scale(type="symlog", constant=1e-3) if log_y else alt.Undefined,
        ),
        **colour,
    )
    area = base.mark_area(interpolate="step-after", opacity=0.25)
    return with_title(alt.layer(area, base.mark_line(interpolate="step-after", strokeWidth=1.5)), title, note)


def batch_spectra(found: Mapping[str, BatchEigenvalues], *, title: str = "") -> Chart:
    """The largest Hessian eigenvalues of mini-batches, for one model or several, logarithmic if that helps."""
    groups = {name: each.values.reshape(-1) for name, each in found.items()}
    values = np.concatenate([np.asarray(each, dtype=float) for each in groups.values()])
    wide = bool((values > 0).all()) and values.max() > 30 * values.min()
    first = next(iter(found.values()))
    name = f"{first.values.shape[1]} largest eigenvalues of mini-batches of {first.batch_size}"
    return histograms(groups, name, bins=30, log_x=wide, title=title)


def densities(curves: Mapping[str, SmoothedDensity], *, level: float = 0.95, title: str = "") -> Chart:
    """Smoothed spectral densities of several models, with their error bands, six decades down from the highest."""
    floor = max(float(curve.values.max()) for curve in curves.values()) * 1e-6
    columns: dict[str, list[Any]] = {"eigenvalue": [], "density": [], "low": [], "high": [], "model": []}
    for name, curve in curves.items():
        low, high = curve.band(level)
        columns["eigenvalue"] += curve.grid.tolist()
        for key, values in (("density", curve.values), ("low", low), ("high", high)):
            columns[key] += values.clamp(min=floor).tolist()
        columns["model"] += [name] * len(curve.grid)
    return lines(columns, "eigenvalue", "density", series="model", low="low", high="high", log_y=True, title=title)


def traces_and_margins(traces: SampleTraces, margins: Margins, *, title: str = "") -> Chart:
    """Every sample as a point: the trace of its Hessian against its output margin."""
    if len(traces) != len(margins):
        raise InputError(f"traces of {len(traces):,} samples and margins of {len(margins):,} do not belong together.")
    columns = {
        "output margin": margins.signed,
        "Hessian trace": traces.values,
        "prediction": ["correct" if right else "wrong" for right in margins.correct.tolist()],
    }
    return scatter(
        columns,
        "output margin",
        "Hessian trace",
        colour="prediction",
        order=["correct", "wrong"],
        log_y=True,
        title=title,
    )


def training_panels(runs: Mapping[str, TrainingCurves], *, across: int = 2, log: bool = False, title: str = "") -> Any:
    """A panel for each quantity of one training run or several, against the step."""
    labels: dict[str, str] = {}
    for run in runs.values():
        labels |= {name: label for name, label in run.labels.items() if any(_known(row.get(name)) for row in run.rows)}
    if not labels:
        raise InputError("nothing has been measured that could be drawn against the step.")
    charts = []
    for name, label in labels.items():
        columns: dict[str, list[Any]] = {"step": [], label: [], "training": []}
        for run_name, run in runs.items():
            rows = [row for row in run.rows if _known(row.get(name))]
            columns["step"] += [row["step"] for row in rows]
            columns[label] += [row[name] for row in rows]
            columns["training"] += [run_name] * len(rows)
        positive = all(value > 0 for value in columns[label])
        series = "training" if len(runs) > 1 else None
        charts.append(lines(columns, "step", label, series=series, log_y=log and positive, points=True))
    rows_of = [charts[start : start + across] for start in range(0, len(charts), across)]
    return panels(rows_of, title=title)


def _known(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
