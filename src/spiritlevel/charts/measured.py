"""Charts of results: spectra, landscapes, audits."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from spiritlevel.charts.axes import LABEL, Chart, chart_of, with_title
from spiritlevel.charts.columns import lines, stems
from spiritlevel.charts.surfaces import contours
from spiritlevel.errors import InputError
from spiritlevel.results import Audit, AuditRow, Landscape, SmoothedDensity, SpectralDensity, figure, mark


def ritz_values(spectrum: SpectralDensity, *, floor: float | None = None, title: str = "") -> Chart:
    """Stem plot of all Ritz values and their weights, as in paper C's figures.

    The weights of all probes add up to 1: the height of a stem is the share of the spectrum that it stands for.
    """
    name = "eigenvalue" if spectrum.exact else "Ritz value"
    columns = {name: spectrum.nodes.reshape(-1), "weight": spectrum.weights.reshape(-1)}
    return stems(columns, name, "weight", floor=floor, title=title)


def density(curve: SmoothedDensity, *, level: float = 0.95, title: str = "") -> Chart:
    """A smoothed spectral density with its pointwise error band, on a logarithmic axis.

    The axis ends six decades below the peak, where the smoothing hides what is there.
    """
    low, high = curve.band(level)
    floor = float(curve.values.max()) * 1e-6
    columns = {
        "eigenvalue": curve.grid,
        "density": curve.values.clamp(min=floor),
        "low": low.clamp(min=floor),
        "high": high.clamp(min=floor),
    }
    chart = lines(columns, "eigenvalue", "density", low="low", high="high", log_y=True)
    band = "" if not bool(curve.stderr.any()) else f", band: {level:.0%} pointwise"
    return with_title(chart, title, f"smoothed by a Gaussian of width {figure(curve.width, 2)}{band}")


def step_name(direction: str) -> str:
    """The name of an axis of steps.

    >>> step_name("eigenvector 1"), step_name("to the other model")
    ('step along eigenvector 1', 'step to the other model')
    """
    return f"step {'' if direction.startswith('to ') else 'along '}{direction}"


def landscape_line(surface: Landscape, *, title: str = "") -> Chart:
    """The loss along one direction, and the parabola λt²/2 that slope and curvature at the model predict."""
    if len(surface.steps) != 1:
        raise InputError(f"landscape_line draws one direction, got {len(surface.steps)}: use landscape_contours.")
    steps = surface.steps[0].tolist()
    measured, predicted = surface.losses.tolist(), surface.quadratic.tolist()
    step = step_name(surface.directions[0])
    columns = {
        step: steps + steps,
        "loss": measured + predicted,
        "curve": ["measured"] * len(steps) + ["quadratic prediction"] * len(steps),
    }
    finite = [loss for loss in measured if math.isfinite(loss)]
    chart = lines(columns, step, "loss", series="curve", title=title)
    # the parabola may leave the picture, the measured line may not
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low) or 1.0
    for layer in chart.layer:
        layer.encoding.y.scale = alt.Scale(domain=[max(low - room, 0.0) if low >= 0 else low - room, high + room])
        layer.encoding.color.legend = alt.Legend(title=None)
        layer.encoding.strokeDash = alt.StrokeDash("series:N", sort=None, legend=None)
    return chart


def landscape_contours(surface: Landscape, *, title: str = "") -> Chart:
    """The loss on a plane through the model, colours and contour lines on a logarithmic scale; a cross is the model."""
    if len(surface.steps) != 2:
        raise InputError(f"landscape_contours draws two directions, got {len(surface.steps)}: use landscape_line.")
    names = (step_name(surface.directions[0]), step_name(surface.directions[1]), "loss")
    chart = contours(
        surface.steps[0].tolist(), surface.steps[1].tolist(), surface.losses, names=names, log=True, title=title
    )
    model = chart_of([{"x": 0.0, "y": 0.0}])
    cross = model.mark_point(shape="cross", size=90, filled=True, color="#ffffff", stroke="#000000", opacity=1)
    return (chart + cross.encode(x="x:Q", y="y:Q", tooltip=alt.value("the model"))).properties(width=420, height=400)


def audit_map(audit: Audit, *, title: str = "") -> Chart:
    """Measures × transforms: the colour is log₁₀ of after / before, the text the verdict.

    "=" invariant, "×3.2" the ratio of a value that changes, "?" nothing can be said within the errors, "…" an
    iteration did not converge; the last two are shown on a framed, empty cell, because their colour would mean nothing.
    """
    if not audit.rows:
        raise InputError("audit_map needs an audit with at least one row, got none.")
    cells = [_audit_cell(row) for row in audit.rows]
    largest = math.ceil(max([abs(cell["log"]) for cell in cells if cell["log"] is not None] + [1.0]))
    base = chart_of(cells).encode(
        x=alt.X(
            "transform:N",
            title=None,
            sort=None,
            axis=alt.Axis(orient="top", labelAngle=-35, labelLimit=150, labelOverlap=False),
        ),
        y=alt.Y("measure:N", title=None, sort=None, axis=alt.Axis(labelLimit=200, labelOverlap=False)),
        tooltip=[alt.Tooltip(f"{key}:N", title=key) for key in ("measure", "transform", "before", "after", "verdict")]
        + [alt.Tooltip("note:N", title="note")],
    )
    scale = alt.Scale(domain=[-largest, largest], domainMid=0, range="diverging", interpolate="rgb")
    colour = alt.Color(
        "log:Q", title="log₁₀(after / before)", scale=scale, legend=alt.Legend(labelExpr=LABEL, gradientLength=160)
    )
    sure = base.transform_filter("isValid(datum.log)").mark_rect(cornerRadius=2).encode(color=colour)
    unsure = base.transform_filter("!isValid(datum.log)").mark_rect(
        cornerRadius=2, fillOpacity=0, strokeDash=[3, 3], stroke="#8a94a0", strokeWidth=1
    )
    # white on the two saturated ends, the theme's ink elsewhere
    strong = alt.when(f"isValid(datum.log) && abs(datum.log) > {0.6 * largest}").then(alt.value("#ffffff"))
    text = base.mark_text(fontSize=11).encode(text="text:N", color=strong)
    return with_title(alt.layer(sure, unsure, text).properties(width=alt.Step(64)), title)


def _audit_cell(row: AuditRow) -> dict[str, Any]:
    known = row.verdict in ("invariant", "changes") and math.isfinite(row.ratio) and row.ratio > 0
    return {
        "measure": row.measure,
        "transform": row.transform,
        "before": str(row.before),
        "after": str(row.after),
        "verdict": row.verdict,
        "note": row.note,
        "log": math.log10(row.ratio) if known else (0.0 if row.verdict == "invariant" else None),
        "text": mark(row, 3),
    }
