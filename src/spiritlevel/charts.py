"""Numbers → charts: results, Polars frames and plain columns drawn by Altair, in one theme. Computes nothing.

Columns are named as their axis should read. A chart has no colours of its own: `theme` gives them, for light or dark
ground, when the chart is saved or put on a page, so one specification serves both.

>>> curve = lines({"step": [1, 10, 100], "loss": [2.0, 0.5, 0.1]}, "step", "loss", log_x=True)
>>> svg(curve)[:4]
'<svg'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import altair as alt
import numpy as np
import polars as pl
import vl_convert

from spiritlevel.errors import InputError, printable, unknown_name
from spiritlevel.results import Audit, AuditRow, Landscape, SmoothedDensity, SpectralDensity, figure, mark
from spiritlevel.storage import write_atomically

__all__ = [
    "audit_map",
    "bars",
    "contours",
    "density",
    "distribution",
    "grid",
    "intervals",
    "landscape_contours",
    "landscape_line",
    "lines",
    "panels",
    "ritz_values",
    "save",
    "scatter",
    "specification",
    "stems",
    "svg",
    "theme",
    "triangle",
]

Columns = Mapping[str, Any] | pl.DataFrame
Chart = alt.Chart | alt.LayerChart

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"

# Okabe and Ito's colours, told apart with every common kind of colour blindness; brighter on dark ground.
_LIGHT = {
    "ground": "#ffffff",
    "ink": "#1f2933",
    "quiet": "#52606d",
    "rule": "#e4e7eb",
    "series": ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b07d00", "#3a9bd9", "#666666"],
    "diverging": ["#0b5c94", "#8fbcdb", "#f4f5f7", "#e8ab85", "#b04a00"],
    "ramp": ["#eef4fa", "#a9cfe8", "#5aa5d2", "#1f6fa8", "#0b3c6b"],
}
_DARK = {
    "ground": "#14181d",
    "ink": "#e6eaee",
    "quiet": "#a3adb8",
    "rule": "#2d343c",
    "series": ["#5ab4ec", "#ff8f52", "#35c79d", "#e09ad0", "#e6bc4a", "#9cc3ff", "#b0b0b0"],
    "diverging": ["#2f86c5", "#1d4f76", "#262c34", "#74401f", "#bf5a1c"],
    "ramp": ["#1b2530", "#1d4466", "#22699f", "#4a9bd4", "#b5defa"],
}


def theme(*, dark: bool = False) -> dict[str, Any]:
    """The Vega-Lite configuration that all charts share, for light or dark ground.

    >>> theme()["background"], theme(dark=True)["background"]
    ('#ffffff', '#14181d')
    """
    colours: dict[str, Any] = _DARK if dark else _LIGHT
    first = colours["series"][0]
    return {
        "background": colours["ground"],
        "font": FONT,
        "view": {"stroke": None, "continuousWidth": 560, "continuousHeight": 320, "discreteHeight": {"step": 26}},
        "title": {
            "color": colours["ink"],
            "subtitleColor": colours["quiet"],
            "anchor": "start",
            "fontSize": 14,
            "fontWeight": 600,
            "subtitleFontSize": 12,
            "offset": 10,
        },
        "axis": {
            "labelColor": colours["quiet"],
            "titleColor": colours["ink"],
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 8,
            "gridColor": colours["rule"],
            "domainColor": colours["quiet"],
            "tickColor": colours["quiet"],
            "labelLimit": 260,
            "labelOverlap": True,
            "labelSeparation": 8,
        },
        "axisX": {"grid": False, "tickCount": 6},
        "axisY": {"domain": False, "ticks": False, "tickCount": 6},
        "legend": {
            "labelColor": colours["ink"],
            "titleColor": colours["ink"],
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "orient": "top",
            "symbolOpacity": 1,
            "labelLimit": 400,
        },
        "range": {
            "category": colours["series"],
            "diverging": colours["diverging"],
            "heatmap": colours["ramp"],
            "ramp": colours["ramp"],
        },
        "mark": {"color": first},
        "line": {"strokeWidth": 2},
        "rule": {"color": colours["quiet"]},
        "rect": {"color": colours["quiet"]},
        "text": {"color": colours["ink"], "fontSize": 12},
        "tick": {"color": colours["ink"]},
    }


def specification(chart: Chart) -> dict[str, Any]:
    """The chart as Vega-Lite, with all texts from elsewhere made harmless.

    Vega-Lite pastes titles into expressions, where a backslash would begin an escape: they get a character that looks
    like one. Control characters are spelled out, since no SVG file may hold them.
    """
    found: dict[str, Any] = _harmless(chart.to_dict())
    return found


def _harmless(part: Any, *, title: bool = False) -> Any:
    if isinstance(part, str):
        text = printable(part)
        return " ".join(text.replace("\\", "∖").split()) if title else text
    if isinstance(part, list):
        return [_harmless(item, title=title) for item in part]
    if isinstance(part, dict):
        return {key: _harmless(item, title=title or key in ("title", "subtitle")) for key, item in part.items()}
    return part


def svg(chart: Chart, *, dark: bool = False) -> str:
    """The chart as the text of an SVG file, made offline."""
    return vl_convert.vegalite_to_svg(specification(chart), config=theme(dark=dark))


def save(chart: Chart, stem: str | Path, *, dark: bool = False) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png (two pixels a point), each whole or not at all; returns both paths.

    The files carry no description of every single mark, which would double the size of a scatter plot.
    """
    stem = Path(stem)
    if stem.suffix in (".svg", ".png"):
        raise InputError(f"save writes both an SVG and a PNG file: give the name without {stem.suffix!r}, got {stem}.")
    vector, pixels = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    spec, config = specification(chart), {**theme(dark=dark), "aria": False}
    write_atomically(vector, vl_convert.vegalite_to_svg(spec, config=config))
    write_atomically(pixels, vl_convert.vegalite_to_png(spec, config=config, scale=2))
    return vector, pixels


# ---------------------------------------------------------------------------------------------------------------------
# From columns


def _plain(values: Any) -> list[Any]:
    """A column as JSON knows it: seven digits, and null for what is not a finite number."""
    items: Iterable[Any] = values.tolist() if hasattr(values, "tolist") else values
    return [
        (float(f"{item:.7g}") if math.isfinite(item) else None) if isinstance(item, float) else item for item in items
    ]


Rows = list[dict[str, Any]]


class _Inline(alt.InlineData):
    """Rows that Altair takes as they are; it would check each number of them against its schema, for many seconds."""

    _class_is_valid_at_instantiation = False


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(_Inline(values=rows))


def _table(data: Columns, **fields: str | None) -> Rows:
    """Rows for Vega under short names that cannot hold a dot or a bracket, which Vega would read as a path."""
    columns = {}
    for field, name in fields.items():
        if name is None:
            continue
        if name not in (data.columns if isinstance(data, pl.DataFrame) else data):
            raise unknown_name("column", name, data.columns if isinstance(data, pl.DataFrame) else data)
        columns[field] = _plain(data[name])
    lengths = {fields[field]: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the columns of a chart must have one length, got {lengths}.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _kind(data: Columns, name: str) -> Literal["nominal", "quantitative"]:
    return "nominal" if any(isinstance(item, str) for item in _plain(data[name])) else "quantitative"


def _axis(channel: Any, field: str, data: Columns, name: str, *, log: bool, zero: bool = False, **more: Any) -> Any:
    kind = _kind(data, name)
    if kind == "nominal":
        return channel(field, type=kind, title=name, sort=None, axis=alt.Axis(labelAngle=0), **more)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=zero)
    return channel(field, type=kind, title=name, scale=scale, axis=_DECADES if log else _NUMBERS, **more)


def _tooltip(data: Columns, **fields: str | None) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(field, title=name, type=kind, format=".4~g" if kind == "quantitative" else alt.Undefined)
        for field, name in fields.items()
        if name is not None
        for kind in [_kind(data, name)]
    ]


def _colour(
    series: str | None, data: Columns, *, ordered: bool = False, order: Sequence[str] | None = None
) -> dict[str, Any]:
    if series is None:
        return {}
    gradual = ordered and _kind(data, series) == "quantitative"
    if gradual and len(set(_plain(data[series]))) > 12:  # a legend with a name for each would dwarf the chart
        colour = alt.Color("series:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title=series))
        return {"color": colour, "detail": alt.Detail("series:O")}
    kind: Literal["ordinal", "nominal"] = "ordinal" if gradual else "nominal"
    scale = alt.Scale(scheme="viridis") if gradual else alt.Scale(domain=list(order) if order else alt.Undefined)
    names = {str(name) for name in _plain(data[series])}
    stacked = not gradual and sum(map(len, names)) > 40  # side by side they would not fit on a phone
    legend = alt.Legend(title=series, columns=1, labelLimit=280) if stacked else alt.Legend(title=series)
    return {"color": alt.Color("series", type=kind, sort=None, scale=scale, legend=legend)}


# Plain decimals where they are short, 2e-7 elsewhere. Vega leaves labels empty where a logarithmic axis has no room.
_LABEL = (
    "datum.label === '' ? '' : datum.value === 0 ? '0' : abs(datum.value) < 1e-3 || abs(datum.value) >= 1e6 "
    "? format(datum.value, '.2~e') : format(datum.value, ',.6~r')"
)
_NUMBERS = alt.Axis(labelExpr=_LABEL)
# a logarithmic axis has lines between the powers of ten too; those stay in the background
_DECADES = alt.Axis(
    labelExpr=_LABEL,
    gridOpacity={
        "condition": {"test": "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) > 1e-6", "value": 0.3},
        "value": 1,
    },
)


def _left_out(data: Columns, *axes: tuple[str, bool]) -> str:
    """What a logarithmic axis cannot show, in words."""
    texts = []
    for name, log in axes:
        count = sum(isinstance(item, int | float) and item <= 0 for item in _plain(data[name])) if log else 0
        if count:
            texts.append(f"{count:,} of {len(data[name]):,} values of '{name}' are not positive and not shown")
    return "; ".join(texts)


def _finish(chart: Any, title: str, subtitle: str = "") -> Any:
    heading: Any = alt.TitleParams(title, subtitle=subtitle) if subtitle else title
    if not title:  # Vega draws no subtitle without a title
        heading = alt.TitleParams(subtitle, fontSize=12, fontWeight="normal")
    return chart.properties(title=heading) if title or subtitle else chart


def scatter(
    data: Columns,
    x: str,
    y: str,
    *,
    colour: str | None = None,
    order: Sequence[str] | None = None,
    hover: Sequence[str] = (),
    fit: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    most: int = 4000,
    keep: Iterable[int] = (),
    title: str = "",
) -> Chart:
    """Points, coloured by a column, and a fitted line.

    Of more than `most` rows all are counted in cells behind the points, and a part is drawn as points: the rows `keep`,
    those at the ends of both axes, all of a rare colour, and every so-manieth of the others. What is not drawn is
    said below the title, also what a logarithmic axis cannot show.

    Args:
        data: The columns.
        x: The column across.
        y: The column upwards.
        colour: The column of groups.
        order: The groups in the order of the palette, by default that of their first appearance.
        hover: Further columns that are shown where the pointer is.
        fit: Slope and intercept of a line in the coordinates of the axes: on a logarithmic axis those of log₁₀.
        log_x: Whether the axis across is logarithmic.
        log_y: Whether the axis upwards is logarithmic.
        most: How many points are drawn, about.
        keep: Rows that are drawn in any case.
        title: The heading.
    """
    extra = {f"hover{k}": name for k, name in enumerate(hover)}
    rows = _table(data, x=x, y=y, series=colour, **extra)
    encoding = {
        "x": _axis(alt.X, "x", data, x, log=log_x),
        "y": _axis(alt.Y, "y", data, y, log=log_y),
        "tooltip": _tooltip(data, **extra, x=x, y=y, series=colour),
        **_colour(colour, data, order=order),
    }
    logs = {"x": log_x, "y": log_y}
    shown = {
        k: row
        for k, row in enumerate(rows)
        if all(row[axis] is not None and (row[axis] > 0 or not log) for axis, log in logs.items())
    }
    notes = [note] if (note := _left_out(data, (x, log_x), (y, log_y))) else []
    layers: list[Any] = []
    drawn = list(shown.values())
    if len(shown) > most:
        drawn = [shown[k] for k in _selection(shown, most, set(keep))]
        notes.insert(0, f"{len(drawn):,} of {len(rows):,} drawn as points, all counted in the cells behind them")
        cells = _chart(_crowd(list(shown.values()), logs)).mark_rect(strokeWidth=0)
        opacity = alt.Opacity("count:Q", scale=alt.Scale(type="log", range=[0.12, 0.5]), legend=None)
        layers.append(cells.encode(x=encoding["x"], y=encoding["y"], x2="x2:Q", y2="y2:Q", opacity=opacity))
    points = _chart(drawn).mark_circle(size=20, opacity=0.6)
    layers.append(points.encode(**encoding))
    if fit is not None and drawn:
        ends = [min(row["x"] for row in drawn), max(row["x"] for row in drawn)]
        heights = [fit[0] * (math.log10(end) if log_x else end) + fit[1] for end in ends]
        low, high = [10**height if log_y else height for height in heights]
        line = _chart([{"x": ends[0], "y": low, "x2": ends[1], "y2": high}])
        rule = line.mark_rule(strokeWidth=2, strokeDash=[6, 3], clip=True)
        layers.append(rule.encode(x=encoding["x"], y=encoding["y"], x2="x2:Q", y2="y2:Q"))
    return _finish(alt.layer(*layers), title, "; ".join(notes))


def _selection(rows: dict[int, dict[str, Any]], most: int, keep: set[int]) -> list[int]:
    """Which rows are drawn as points, see `scatter`; the most frequent colour first, so that rare ones lie above."""
    chosen = keep & rows.keys()
    for axis in ("x", "y"):
        ranked = sorted(rows, key=lambda k: rows[k][axis])
        chosen.update(ranked[: most // 100], ranked[-(most // 100) :])
    groups: dict[Any, list[int]] = {}
    for k, row in rows.items():
        groups.setdefault(row.get("series"), []).append(k)
    for members in groups.values():
        if len(members) <= most // 4:
            chosen.update(members)
    rest = [k for k in rows if k not in chosen]
    stride = max(1, math.ceil(len(rest) / max(1, most - len(chosen))))
    chosen.update(rest[::stride])
    return sorted(chosen, key=lambda k: (-len(groups[rows[k].get("series")]), k))


def _crowd(rows: list[dict[str, Any]], logs: dict[str, bool]) -> list[dict[str, Any]]:
    """How many rows lie in each cell of a grid that is even in the coordinates of the axes; empty cells left out."""
    columns = [np.array([row[axis] for row in rows], dtype=float) for axis in logs]
    across, up = [np.log10(column) if log else column for column, log in zip(columns, logs.values(), strict=True)]
    counts, *edges = np.histogram2d(across, up, bins=[80, 50])
    x, y = [10**edge if log else edge for edge, log in zip(edges, logs.values(), strict=True)]
    return [
        {"x": float(x[i]), "x2": float(x[i + 1]), "y": float(y[j]), "y2": float(y[j + 1]), "count": int(counts[i, j])}
        for i, j in np.argwhere(counts)
    ]


def lines(
    data: Columns,
    x: str,
    y: str,
    *,
    series: str | None = None,
    low: str | None = None,
    high: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
    points: bool = False,
    title: str = "",
) -> Chart:
    """A line for every value of the column `series`, with the band between the columns `low` and `high`.

    A numeric series is ordered and gets a gradual palette, a series of texts gets separate colours.
    """
    if (low is None) != (high is None):
        raise InputError("lines needs both ends of a band: give low and high, or neither.")
    rows = _table(data, x=x, y=y, series=series, low=low, high=high)
    across = _axis(alt.X, "x", data, x, log=log_x)
    up = _axis(alt.Y, "y", data, y, log=log_y)
    colour = _colour(series, data, ordered=True)
    base = _chart(rows)
    layers: list[Any] = []
    if low is not None:
        layers.append(base.mark_area(opacity=0.2, clip=True).encode(x=across, y=up, y2="high:Q", **colour))
        layers[0].encoding.y = _axis(alt.Y, "low", data, low, log=log_y)
        layers[0].encoding.y.title = y
    tooltip = _tooltip(data, series=series, x=x, y=y, low=low, high=high)
    layers.append(base.mark_line(point=points, clip=True).encode(x=across, y=up, tooltip=tooltip, **colour))
    return _finish(alt.layer(*layers), title, _left_out(data, (x, log_x), (y, log_y)))


def stems(data: Columns, x: str, y: str, *, floor: float | None = None, title: str = "") -> Chart:
    """A stem for every row, as high as `y`, on a logarithmic axis that begins at `floor`.

    Without `floor` the axis begins at the smallest power of ten that shows every positive value.
    """
    heights = [item for item in _plain(data[y]) if item is not None and item > 0]
    if floor is None:
        floor = 10.0 ** math.floor(math.log10(min(heights))) if heights else 1e-3
    top = max([*heights, floor * 10])
    rows = [
        {**row, "floor": floor}
        for row in _table(data, x=x, y=y)
        if row["x"] is not None and row["y"] is not None and row["y"] >= floor
    ]
    up = alt.Y("y:Q", title=y, scale=alt.Scale(type="log", domain=[floor, top * 2], nice=False), axis=_NUMBERS)
    base = _chart(rows).encode(x=_axis(alt.X, "x", data, x, log=False), y=up, tooltip=_tooltip(data, x=x, y=y))
    stem = base.mark_rule(strokeWidth=1.2, opacity=0.7).encode(y2="floor:Q")
    head = base.mark_circle(size=26, opacity=1)
    return _finish(alt.layer(stem, head), title)


def distribution(values: Any, name: str, *, bins: int = 40, skewness: float | None = None, title: str = "") -> Chart:
    """A histogram with a box plot above it: median, quartiles, whiskers to the furthest value within 1.5 box lengths.

    The skewness is written below the title, by default E((x−μ)/σ)³ of the values. Values that are not finite are left
    out and counted there.
    """
    column = np.asarray(_plain(values), dtype=float)
    finite = np.sort(column[np.isfinite(column)])
    if skewness is None and len(finite) > 2 and finite[0] < finite[-1]:
        skewness = float(np.mean(((finite - finite.mean()) / finite.std()) ** 3))
    notes = (
        [f"skewness {figure(skewness, 3, typeset=True)}"] if skewness is not None and math.isfinite(skewness) else []
    )
    if len(finite) < len(column):
        notes.append(f"{len(column) - len(finite):,} of {len(column):,} values are not finite and not shown")
    if not len(finite):
        raise InputError(f"distribution needs at least one finite value of {name!r}, got none.")
    counts, edges = np.histogram(finite, bins=bins)
    quarter, median, three = np.quantile(finite, [0.25, 0.5, 0.75])
    reach = 1.5 * (three - quarter)
    within = finite[(finite >= quarter - reach) & (finite <= three + reach)]
    bars_ = _table({"from": edges[:-1], "to": edges[1:], "samples": counts}, low="from", high="to", count="samples")
    box = dict(zip(_BOX, map(float, (within[0], quarter, median, three, within[-1])), strict=True))
    # 18 pixels at the top belong to the box plot
    scale = alt.Scale(domain=[0, float(counts.max()) * 1.18], nice=False)
    across = alt.Scale(zero=False, nice=True)
    histogram = (
        _chart(bars_)
        .mark_bar(binSpacing=1)
        .encode(
            x=alt.X("low:Q", bin="binned", title=name, scale=across, axis=_NUMBERS),
            x2="high:Q",
            y=alt.Y("count:Q", title="samples", scale=scale, axis=_NUMBERS),
            tooltip=[
                alt.Tooltip("low:Q", title="from", format=".4~g"),
                alt.Tooltip("high:Q", title="to", format=".4~g"),
                alt.Tooltip("count:Q", title="samples", format=","),
            ],
        )
    )
    shown = [alt.Tooltip(f"{key}:Q", title=text, format=".4~g") for key, text in _BOX.items()]
    base = _chart([{"kind": "box", **box}]).encode(y=alt.value(10), tooltip=shown)
    whisker = base.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q")
    middle = base.mark_bar(size=14, cornerRadius=2).encode(
        x=alt.X("quarter:Q"),
        x2="three:Q",
        color=alt.Color("kind:N", scale=alt.Scale(domain=["", "wrong", "box"]), legend=None),
    )
    line = base.mark_tick(size=14, thickness=2.5).encode(x=alt.X("median:Q"))
    return _finish(alt.layer(histogram, whisker, middle, line), title, "; ".join(notes))


_BOX = {"low": "lower whisker", "quarter": "quartile", "median": "median", "three": "third quartile", "high": "whisker"}


def bars(
    data: Columns, name: str, value: str, *, low: str | None = None, high: str | None = None, title: str = ""
) -> Chart:
    """Horizontal bars in the order of the rows, with an error bar from `low` to `high`, and each value as a number."""
    rows = _table(data, name=name, value=value, low=low, high=high)
    across = alt.X("value:Q", title=value, axis=_NUMBERS)
    base = _chart(rows).encode(
        y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelLimit=180, labelOverlap=False)),
        tooltip=_tooltip(data, name=name, value=value, low=low, high=high),
    )
    layers: list[Any] = [base.mark_bar(cornerRadiusEnd=2, size=16).encode(x=across)]
    if low is not None and high is not None:
        layers.append(base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q"))
    end = alt.X("high:Q") if high is not None else across
    layers.append(base.mark_text(align="left", dx=5).encode(x=end, text=alt.Text("value:Q", format=".3~g")))
    return _finish(alt.layer(*layers).properties(height=26 * len(rows)), title)


def intervals(
    data: Columns,
    name: str,
    value: str,
    low: str,
    high: str,
    *,
    colour: str | None = None,
    order: Sequence[str] | None = None,
    title: str = "",
) -> Chart:
    """A point with its interval from `low` to `high` for every row, in the order of the rows, and a line at 0.

    `order` has the groups of the column `colour` in the order of the palette.
    """
    rows = _table(data, name=name, value=value, low=low, high=high, series=colour)
    names = [row["name"] for row in rows]  # in their order even where an interval is missing
    across = alt.X("value:Q", title=value, axis=_NUMBERS)
    base = _chart(rows).encode(
        y=alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=240, labelOverlap=False, grid=True)),
        tooltip=_tooltip(data, name=name, value=value, low=low, high=high, series=colour),
        **_colour(colour, data, order=order),
    )
    zero = _chart([{"value": 0}]).mark_rule(strokeDash=[4, 3]).encode(x=across)
    whisker = base.mark_rule(strokeWidth=2, opacity=0.55).encode(x=alt.X("low:Q", title=value), x2="high:Q")
    point = base.mark_circle(size=60, opacity=1).encode(x=across)
    return _finish(alt.layer(zero, whisker, point).properties(width=460, height=18 * len(rows)), title)


def contours(
    x: Sequence[float],
    y: Sequence[float],
    values: Any,
    *,
    names: tuple[str, str, str],
    log: bool = False,
    levels: int = 10,
    title: str = "",
) -> Chart:
    """A surface over a grid: one cell for each `values[i][j]` at (x[i], y[j]), with contour lines between them.

    The lines join points found by linear interpolation between neighbouring grid points; `log` spaces the levels and
    colours logarithmically. `names` are those of x, y and value.
    """
    heights = np.asarray(_plain(values), dtype=float)
    across, up = np.asarray(_plain(x), dtype=float), np.asarray(_plain(y), dtype=float)
    if heights.shape != (len(across), len(up)):
        raise InputError(f"contours needs {len(across)} x {len(up)} values, got an array of shape {heights.shape}.")
    log = log and bool(np.nanmin(heights) > 0)
    scaled = np.log10(heights) if log else heights
    cells = [
        {"x": left, "x2": right + wide, "y": bottom, "y2": top + high, "value": float(f"{heights[i, j]:.7g}")}
        for i, (left, right) in enumerate(_edges(across))
        for j, (bottom, top) in enumerate(_edges(up))
        # the next cell lies over a hundredth of this one, so that no seam is seen between them
        for wide, high in [(0.01 * (right - left) * (i + 1 < len(across)), 0.01 * (top - bottom) * (j + 1 < len(up)))]
        if math.isfinite(heights[i, j])
    ]
    cuts = np.linspace(np.nanmin(scaled), np.nanmax(scaled), levels + 2)[1:-1]
    segments = [
        dict(zip(("x", "y", "x2", "y2"), map(float, segment), strict=True))
        for cut in cuts
        for segment in _isoline(across, up, scaled, cut)
    ]
    horizontal = alt.X("x:Q", title=names[0], scale=alt.Scale(zero=False, nice=False), axis=_NUMBERS)
    vertical = alt.Y("y:Q", title=names[1], scale=alt.Scale(zero=False, nice=False), axis=_NUMBERS)
    scale = alt.Scale(type="log" if log else "linear", scheme="viridis")
    legend = alt.Legend(labelExpr=_LABEL, gradientLength=200)
    surface = (
        _chart(cells)
        .mark_rect(strokeWidth=0)
        .encode(
            x=horizontal,
            x2="x2:Q",
            y=vertical,
            y2="y2:Q",
            color=alt.Color("value:Q", title=names[2], scale=scale, legend=legend),
            tooltip=[alt.Tooltip("value:Q", title=names[2], format=".4~g")],
        )
    )
    rules = (
        _chart(segments)
        .mark_rule(color="#ffffff", opacity=0.7, strokeWidth=1, strokeCap="round")
        .encode(x=horizontal, y=vertical, x2="x2:Q", y2="y2:Q")
    )
    return _finish(alt.layer(surface, rules), title)


def _edges(centres: np.ndarray) -> list[tuple[float, float]]:
    """The borders of cells around sorted centres, half-way between neighbours."""
    middles = (centres[1:] + centres[:-1]) / 2
    ends = (centres[:1] * 2 - middles[:1], centres[-1:] * 2 - middles[-1:]) if len(centres) > 1 else ([-0.5], [0.5])
    borders = np.concatenate([ends[0], middles, ends[1]])
    return [(float(a), float(b)) for a, b in pairwise(borders)]


def _isoline(x: np.ndarray, y: np.ndarray, heights: np.ndarray, level: float) -> list[tuple[float, ...]]:
    """Segments of the line height = level. Each cell is cut in two triangles: a triangle has one segment or none."""
    grid_x, grid_y = np.meshgrid(x, y, indexing="ij")
    vertices = np.stack([grid_x, grid_y, heights], -1)
    a, b, c, d = vertices[:-1, :-1], vertices[1:, :-1], vertices[1:, 1:], vertices[:-1, 1:]
    corners = np.stack([np.stack([a, b, c], 2), np.stack([a, c, d], 2)]).reshape(-1, 3, 3)
    segments = []
    for triangle_ in corners[np.isfinite(corners).all((1, 2))]:
        above = triangle_[:, 2] > level
        if above.all() or not above.any():
            continue
        alone = int(np.flatnonzero(above == (above.sum() == 1))[0])
        points: list[float] = []
        for other in {0, 1, 2} - {alone}:
            p, q = triangle_[alone], triangle_[other]
            share = (level - p[2]) / (q[2] - p[2])
            points += [p[0] + share * (q[0] - p[0]), p[1] + share * (q[1] - p[1])]
        segments.append(tuple(points))
    return segments


def triangle(data: Columns, corners: tuple[str, str, str], value: str, *, width: int = 420, title: str = "") -> Chart:
    """A heat map over the simplex of three probabilities, given on a regular lattice; `corners` are their columns.

    Every point is drawn as a hexagon, the set of places that are nearest to it.
    """
    table = _table(data, a=corners[0], b=corners[1], c=corners[2], value=value)
    first = sorted({round(float(row["a"]), 9) for row in table})
    if len(first) < 2:
        raise InputError(f"triangle needs points on a lattice, got {len(first)} different value of {corners[0]!r}.")
    step = min(np.diff(first))
    height = width * math.sqrt(3) / 2
    for row in table:  # corner a at the left, b at the right, c at the top
        row["x"], row["y"] = row["b"] + row["c"] / 2, row["c"]
    # Vega draws a path of inner radius 1 with inner radius √size / 2; 2 % more hide the seams
    inner = step * width / 2
    outer = [
        (math.sin(k * math.pi / 3) * 2 / math.sqrt(3), math.cos(k * math.pi / 3) * 2 / math.sqrt(3)) for k in range(6)
    ]
    path = "M" + "L".join(f"{px:.5f},{py:.5f}" for px, py in outer) + "Z"
    scale = alt.Scale(domain=[0, 1], nice=False)
    across, up = alt.X("x:Q", scale=scale, axis=None), alt.Y("y:Q", scale=scale, axis=None)
    cells = (
        _chart(table)
        .mark_point(shape=path, filled=True, size=(2 * inner * 1.02) ** 2, opacity=1, strokeWidth=0)
        .encode(
            x=across,
            y=up,
            color=alt.Color(
                "value:Q", title=value, scale=alt.Scale(scheme="viridis"), legend=alt.Legend(labelExpr=_LABEL)
            ),
            tooltip=_tooltip(data, a=corners[0], b=corners[1], c=corners[2], value=value),
        )
    )
    places = [{"x": 0, "y": 0, "text": corners[0]}, {"x": 1, "y": 0, "text": corners[1]}]
    below = _chart(places).mark_text(dy=inner + 18).encode(x=across, y=up, text="text:N")
    top = _chart([{"x": 0.5, "y": 1, "text": corners[2]}])
    above = top.mark_text(dy=-inner - 12).encode(x=across, y=up, text="text:N")
    return _finish(alt.layer(cells, below, above).properties(width=width, height=round(height)), title)


def grid(x: Any, y: Any, *, names: tuple[str, str] = ("x", "y"), title: str = "", size: int = 360) -> Chart:
    """A deformed grid: the points (x[i][j], y[i][j]) joined along both indices, with equal units on both axes."""
    across, up = np.asarray(_plain(x), dtype=float), np.asarray(_plain(y), dtype=float)
    if across.ndim != 2 or across.shape != up.shape:
        raise InputError(f"grid needs x and y as two matrices of one shape, got {across.shape} and {up.shape}.")
    threads = [
        (f"{way}{k}", way, row)
        for way, matrix in (("i", (across, up)), ("j", (across.T, up.T)))
        for k, row in enumerate(zip(*matrix, strict=True))
    ]
    rows = [
        {"thread": thread, "way": way, "order": k, "x": float(px), "y": float(py)}
        for thread, way, (xs, ys) in threads
        for k, (px, py) in enumerate(zip(xs, ys, strict=True))
    ]
    half = max(np.ptp(across), np.ptp(up)) / 2 * 1.03 or 1.0

    def scale(values: np.ndarray) -> alt.Scale:
        middle = float((values.max() + values.min()) / 2)
        return alt.Scale(domain=[middle - half, middle + half], nice=False)

    chart = (
        _chart(rows)
        .mark_line(strokeWidth=1)
        .encode(
            x=alt.X("x:Q", title=names[0], scale=scale(across), axis=_NUMBERS),
            y=alt.Y("y:Q", title=names[1], scale=scale(up), axis=_NUMBERS),
            detail="thread:N",
            order="order:Q",
            color=alt.Color("way:N", legend=None),
        )
    )
    return _finish(chart.properties(width=size, height=size), title)


def panels(
    rows: Sequence[Sequence[Chart]], *, title: str = "", width: int = 300, height: int = 220
) -> alt.VConcatChart:
    """Charts beside and below each other, each `width` by `height` points, with legends of their own."""
    if not rows or not all(rows):
        raise InputError("panels needs at least one chart in every row.")
    sized = [alt.hconcat(*(chart.properties(width=width, height=height) for chart in row)) for row in rows]
    return _finish(alt.vconcat(*sized).resolve_scale(color="independent"), title)


# ---------------------------------------------------------------------------------------------------------------------
# From results


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
    return _finish(chart, title, f"smoothed by a Gaussian of width {figure(curve.width, 2)}{band}")


def landscape_line(surface: Landscape, *, title: str = "") -> Chart:
    """The loss along one direction, and the parabola λt²/2 that slope and curvature at the model predict."""
    if len(surface.steps) != 1:
        raise InputError(f"landscape_line draws one direction, got {len(surface.steps)}: use landscape_contours.")
    steps = surface.steps[0].tolist()
    measured, predicted = surface.losses.tolist(), surface.quadratic.tolist()
    step = f"step along {surface.directions[0]}"
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
    names = (f"step along {surface.directions[0]}", f"step along {surface.directions[1]}", "loss")
    chart = contours(
        surface.steps[0].tolist(), surface.steps[1].tolist(), surface.losses, names=names, log=True, title=title
    )
    model = _chart([{"x": 0.0, "y": 0.0}])
    cross = model.mark_point(shape="cross", size=90, filled=True, color="#ffffff", stroke="#000000", opacity=1)
    return (chart + cross.encode(x="x:Q", y="y:Q", tooltip=alt.value("the model"))).properties(width=420, height=400)


def audit_map(audit: Audit, *, title: str = "") -> Chart:
    """Measures × transforms: the colour is log₁₀ of after / before, the text the verdict.

    "=" invariant, "×3.2" the ratio of a value that changes, "?" nothing can be said within the errors, "…" an
    iteration did not converge; the last two stand on a framed, empty cell, because their colour would mean nothing.
    """
    if not audit.rows:
        raise InputError("audit_map needs an audit with at least one row, got none.")
    cells = [_audit_cell(row) for row in audit.rows]
    largest = math.ceil(max([abs(cell["log"]) for cell in cells if cell["log"] is not None] + [1.0]))
    base = _chart(cells).encode(
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
        "log:Q", title="log₁₀(after / before)", scale=scale, legend=alt.Legend(labelExpr=_LABEL, gradientLength=160)
    )
    sure = base.transform_filter("isValid(datum.log)").mark_rect(cornerRadius=2).encode(color=colour)
    unsure = base.transform_filter("!isValid(datum.log)").mark_rect(
        cornerRadius=2, fillOpacity=0, strokeDash=[3, 3], stroke="#8a94a0", strokeWidth=1
    )
    # white on the two saturated ends, the theme's ink elsewhere
    strong = alt.when(f"isValid(datum.log) && abs(datum.log) > {0.6 * largest}").then(alt.value("#ffffff"))
    text = base.mark_text(fontSize=11).encode(text="text:N", color=strong)
    return _finish(alt.layer(sure, unsure, text).properties(width=alt.Step(64)), title)


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
