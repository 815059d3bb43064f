"""Charts of columns: points, lines, stems, histograms, bars, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import numpy as np

from spiritlevel.charts.axes import (
    NUMBERS,
    Chart,
    Columns,
    axis_of,
    chart_of,
    colour_of,
    left_out,
    plain_values,
    table_of,
    tooltip_of,
    with_title,
)
from spiritlevel.errors import InputError
from spiritlevel.results import figure


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

    If there are more than `most` rows, all are counted in cells behind the points, and some are drawn as points: the
    rows `keep`, those at the ends of both axes, all of a rare colour, and evenly spaced ones of the others. What is
    not drawn is stated below the title, as is what a logarithmic axis cannot show.

    Args:
        data: The columns.
        x: The column across.
        y: The column upwards.
        colour: The column of groups.
        order: The groups in the order of the palette, by default that of their first appearance.
        hover: Further columns, shown under the pointer.
        fit: Slope and intercept of a line in the coordinates of the axes: on a logarithmic axis those of log₁₀.
        log_x: Whether the axis across is logarithmic.
        log_y: Whether the axis upwards is logarithmic.
        most: Roughly how many points are drawn.
        keep: Rows that are drawn in any case.
        title: The heading.
    """
    extra = {f"hover{k}": name for k, name in enumerate(hover)}
    rows = table_of(data, x=x, y=y, series=colour, **extra)
    encoding = {
        "x": axis_of(alt.X, "x", data, x, log=log_x),
        "y": axis_of(alt.Y, "y", data, y, log=log_y),
        "tooltip": tooltip_of(data, **extra, x=x, y=y, series=colour),
        **colour_of(colour, data, order=order),
    }
    logs = {"x": log_x, "y": log_y}
    shown = {
        k: row
        for k, row in enumerate(rows)
        if all(row[axis] is not None and (row[axis] > 0 or not log) for axis, log in logs.items())
    }
    notes = [note] if (note := left_out(data, (x, log_x), (y, log_y))) else []
    layers: list[Any] = []
    drawn = list(shown.values())
    if len(shown) > most:
        drawn = [shown[k] for k in _selection(shown, most, set(keep))]
        notes.insert(0, f"{len(drawn):,} of {len(rows):,} drawn as points, all counted in the cells behind them")
        cells = chart_of(_crowd(list(shown.values()), logs)).mark_rect(strokeWidth=0)
        opacity = alt.Opacity("count:Q", scale=alt.Scale(type="log", range=[0.12, 0.5]), legend=None)
        layers.append(cells.encode(x=encoding["x"], y=encoding["y"], x2="x2:Q", y2="y2:Q", opacity=opacity))
    points = chart_of(drawn).mark_circle(size=20, opacity=0.6)
    layers.append(points.encode(**encoding))
    if fit is not None and drawn:
        ends = [min(row["x"] for row in drawn), max(row["x"] for row in drawn)]
        heights = [fit[0] * (math.log10(end) if log_x else end) + fit[1] for end in ends]
        low, high = [10**height if log_y else height for height in heights]
        line = chart_of([{"x": ends[0], "y": low, "x2": ends[1], "y2": high}])
        rule = line.mark_rule(strokeWidth=2, strokeDash=[6, 3], clip=True)
        layers.append(rule.encode(x=encoding["x"], y=encoding["y"], x2="x2:Q", y2="y2:Q"))
    return with_title(alt.layer(*layers), title, "; ".join(notes))


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
    rows = table_of(data, x=x, y=y, series=series, low=low, high=high)
    across = axis_of(alt.X, "x", data, x, log=log_x)
    up = axis_of(alt.Y, "y", data, y, log=log_y)
    colour = colour_of(series, data, ordered=True)
    base = chart_of(rows)
    layers: list[Any] = []
    if low is not None:
        layers.append(base.mark_area(opacity=0.2, clip=True).encode(x=across, y=up, y2="high:Q", **colour))
        layers[0].encoding.y = axis_of(alt.Y, "low", data, low, log=log_y)
        layers[0].encoding.y.title = y
    tooltip = tooltip_of(data, series=series, x=x, y=y, low=low, high=high)
    layers.append(base.mark_line(point=points, clip=True).encode(x=across, y=up, tooltip=tooltip, **colour))
    return with_title(alt.layer(*layers), title, left_out(data, (x, log_x), (y, log_y)))


def stems(data: Columns, x: str, y: str, *, floor: float | None = None, title: str = "") -> Chart:
    """A stem for every row, as high as `y`, on a logarithmic axis that begins at `floor`.

    Without `floor` the axis begins at the smallest power of ten that shows every positive value.
    """
    heights = [item for item in plain_values(data[y]) if item is not None and item > 0]
    if floor is None:
        floor = 10.0 ** math.floor(math.log10(min(heights))) if heights else 1e-3
    top = max([*heights, floor * 10])
    rows = [
        {**row, "floor": floor}
        for row in table_of(data, x=x, y=y)
        if row["x"] is not None and row["y"] is not None and row["y"] >= floor
    ]
    up = alt.Y("y:Q", title=y, scale=alt.Scale(type="log", domain=[floor, top * 2], nice=False), axis=NUMBERS)
    base = chart_of(rows).encode(x=axis_of(alt.X, "x", data, x, log=False), y=up, tooltip=tooltip_of(data, x=x, y=y))
    stem = base.mark_rule(strokeWidth=1.2, opacity=0.7).encode(y2="floor:Q")
    head = base.mark_circle(size=26, opacity=1)
    return with_title(alt.layer(stem, head), title)


def distribution(values: Any, name: str, *, bins: int = 40, skewness: float | None = None, title: str = "") -> Chart:
    """A histogram with a box plot above it: median, quartiles, whiskers to the furthest value within 1.5 box lengths.

    The skewness is written below the title, by default E((x−μ)/σ)³ of the values. Values that are not finite are left
    out and counted there.
    """
    column = np.asarray(plain_values(values), dtype=float)
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
    bars_ = table_of({"from": edges[:-1], "to": edges[1:], "samples": counts}, low="from", high="to", count="samples")
    box = dict(zip(_BOX, map(float, (within[0], quarter, median, three, within[-1])), strict=True))
    # 18 pixels at the top belong to the box plot
    scale = alt.Scale(domain=[0, float(counts.max()) * 1.18], nice=False)
    across = alt.Scale(zero=False, nice=True)
    histogram = (
        chart_of(bars_)
        .mark_bar(binSpacing=1)
        .encode(
            x=alt.X("low:Q", bin="binned", title=name, scale=across, axis=NUMBERS),
            x2="high:Q",
            y=alt.Y("count:Q", title="samples", scale=scale, axis=NUMBERS),
            tooltip=[
                alt.Tooltip("low:Q", title="from", format=".4~g"),
                alt.Tooltip("high:Q", title="to", format=".4~g"),
                alt.Tooltip("count:Q", title="samples", format=","),
            ],
        )
    )
    shown = [alt.Tooltip(f"{key}:Q", title=text, format=".4~g") for key, text in _BOX.items()]
    base = chart_of([{"kind": "box", **box}]).encode(y=alt.value(10), tooltip=shown)
    whisker = base.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q"), x2="high:Q")
    middle = base.mark_bar(size=14, cornerRadius=2).encode(
        x=alt.X("quarter:Q"),
        x2="three:Q",
        color=alt.Color("kind:N", scale=alt.Scale(domain=["", "wrong", "box"]), legend=None),
    )
    line = base.mark_tick(size=14, thickness=2.5).encode(x=alt.X("median:Q"))
    return with_title(alt.layer(histogram, whisker, middle, line), title, "; ".join(notes))


_BOX = {"low": "lower whisker", "quarter": "quartile", "median": "median", "three": "third quartile", "high": "whisker"}


_BESIDE = 1.15  # how much longer than the longest bar an axis is, for the number beside it


def bars(
    data: Columns,
    name: str,
    value: str,
    *,
    low: str | None = None,
    high: str | None = None,
    log: bool = False,
    title: str = "",
) -> Chart:
    """Horizontal bars in the order of the rows, with an error bar from `low` to `high`, and each value as a number.

    With `log` they are bars of factors, from 1 to the left or to the right.
    """
    rows = table_of(data, name=name, value=value, low=low, high=high)
    last, least = "value" if high is None else "high", 1.0 if log else 0.0  # numbers stand beside bars, never inside
    rows = [{**row, "end": None if row[last] is None else max(least, row[last])} for row in rows]
    furthest = max((row["end"] for row in rows if row["end"] is not None), default=0.0)
    beyond = alt.Scale(domainMax=_BESIDE * furthest) if furthest > 0 else alt.Undefined  # on a narrow page, too
    across = alt.X("value:Q", title=value, axis=NUMBERS, scale=alt.Scale(type="log") if log else beyond)
    axis = alt.Axis(labelLimit=380 if log else 180, labelOverlap=False, labelPadding=6)  # clear of bars to the left
    base = chart_of(rows).encode(
        y=alt.Y("name:N", title=None, sort=None, axis=axis),
        tooltip=tooltip_of(data, name=name, value=value, low=low, high=high),
    )
    start = {"x2": alt.datum(1)} if log else {}
    layers: list[Any] = [base.mark_bar(cornerRadiusEnd=2, size=16).encode(x=across, **start)]
    if low is not None and high is not None:
        layers.append(base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q"))
    layers.append(
        base.mark_text(align="left", dx=5).encode(
            x=alt.X("end:Q", title=value), text=alt.Text("value:Q", format=".3~g")
        )
    )
    return with_title(alt.layer(*layers).properties(height=26 * len(rows)), title)


def intervals(
    data: Columns,
    name: str,
    value: str,
    low: str,
    high: str,
    *,
    colour: str | None = None,
    order: Sequence[str] | None = None,
    ratios: bool = False,
    title: str = "",
) -> Chart:
    """A point with its interval from `low` to `high` for every row, in the order of the rows, and a line at 0.

    `order` has the groups of the column `colour` in the order of the palette. `ratios` says that the values are
    factors: the axis is logarithmic, and the line is at 1.
    """
    rows = table_of(data, name=name, value=value, low=low, high=high, series=colour)
    names = [row["name"] for row in rows]  # in their order even where an interval is missing
    across = alt.X("value:Q", title=value, axis=NUMBERS)
    if ratios:
        ends = [row[key] for row in rows for key in ("value", "low", "high") if row[key]]
        low_end, high_end = math.floor(math.log10(min(ends, default=1))), math.ceil(math.log10(max(ends, default=1)))
        marks = [digit * 10.0**power for power in range(low_end, high_end + 1) for digit in (1, 2, 5)]
        axis = alt.Axis(values=marks, labelExpr="'× ' + format(datum.value, '~g')")
        across = alt.X("value:Q", title=value, scale=alt.Scale(type="log", nice=False, padding=12), axis=axis)
    base = chart_of(rows).encode(
        y=alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=240, labelOverlap=False, grid=True)),
        tooltip=tooltip_of(data, name=name, value=value, low=low, high=high, series=colour),
        **colour_of(colour, data, order=order),
    )
    same = chart_of([{"value": 1 if ratios else 0}]).mark_rule(strokeDash=[4, 3]).encode(x=across)
    whisker = base.mark_rule(strokeWidth=2, opacity=0.55).encode(x=alt.X("low:Q", title=value), x2="high:Q")
    point = base.mark_circle(size=60, opacity=1).encode(x=across)
    return with_title(alt.layer(same, whisker, point).properties(width=460, height=18 * len(rows)), title)
