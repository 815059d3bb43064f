"""Charts of surfaces and grids, and several charts on one sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np

from spiritlevel.charts.axes import (
    LABEL,
    NUMBERS,
    Chart,
    Columns,
    chart_of,
    plain_values,
    table_of,
    tooltip_of,
    with_title,
)
from spiritlevel.errors import InputError

_HUGE = 1e307  # of a height; the differences of larger ones are no longer numbers
_UNDER = 0.15  # of a cell; at fifty cells that is a pixel


def contours(
    x: Sequence[float],
    y: Sequence[float],
    values: Any,
    *,
    names: tuple[str, str, str],
    log: bool = False,
    levels: int = 10,
    domain: tuple[float, float] | None = None,
    title: str = "",
) -> Chart:
    """A surface over a grid: one cell for each `values[i][j]` at (x[i], y[j]), with contour lines between them.

    The lines join points found by linear interpolation between neighbouring grid points; `log` spaces the levels and
    colours logarithmically. `names` are those of x, y and value; `domain` gives the ends of the colours and of the
    levels where several surfaces share them.
    """
    heights = np.asarray(plain_values(values), dtype=float)
    across, up = np.asarray(plain_values(x), dtype=float), np.asarray(plain_values(y), dtype=float)
    if heights.shape != (len(across), len(up)):
        raise InputError(f"contours needs {len(across)} x {len(up)} values, got an array of shape {heights.shape}.")
    finite = heights[np.isfinite(heights)]
    if not len(finite):
        raise InputError("contours needs values that are finite numbers, got none.")
    low, high = domain or (float(finite.min()), float(finite.max()))
    log = log and low > 0
    scaled = np.log10(heights) if log else heights
    known = np.pad(np.isfinite(heights), (0, 1))
    cells = [
        {"x": left, "x2": right + wide, "y": bottom, "y2": top + high, "value": float(f"{heights[i, j]:.7g}")}
        for i, (left, right) in enumerate(_edges(across))
        for j, (bottom, top) in enumerate(_edges(up))
        # the next cell, if there is one, is drawn over a part of this one, so that no seam is seen between them
        for wide, high in [(_UNDER * (right - left) * known[i + 1, j], _UNDER * (top - bottom) * known[i, j + 1])]
        if known[i, j]
    ]
    ends = (math.log10(low), math.log10(high)) if log else (low, high)
    if not log and max(map(abs, ends)) > _HUGE:  # the difference of two of them would overflow
        scaled, ends = scaled / 4, (low / 4, high / 4)
    cuts = np.linspace(*ends, levels + 2)[1:-1]
    segments = [
        dict(zip(("x", "y", "x2", "y2"), map(float, segment), strict=True))
        for cut in cuts
        for segment in isolines(across, up, scaled, cut)
    ]
    horizontal = alt.X("x:Q", title=names[0], scale=alt.Scale(zero=False, nice=False), axis=NUMBERS)
    vertical = alt.Y("y:Q", title=names[1], scale=alt.Scale(zero=False, nice=False), axis=NUMBERS)
    shared: dict[str, Any] = {"domain": list(domain)} if domain else {}
    scale = alt.Scale(type="log" if log else "linear", scheme="viridis", **shared)
    legend = alt.Legend(labelExpr=LABEL.replace(".6~r", ".3~r"), gradientLength=200, labelSeparation=6)
    surface = (
        chart_of(cells)
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
        chart_of(segments)
        .mark_rule(color="#ffffff", opacity=0.7, strokeWidth=1, strokeCap="round")
        .encode(x=horizontal, y=vertical, x2="x2:Q", y2="y2:Q")
    )
    return with_title(alt.layer(surface, rules), title)


def _edges(centres: np.ndarray) -> list[tuple[float, float]]:
    """The borders of cells around sorted centres, half-way between neighbours."""
    middles = (centres[1:] + centres[:-1]) / 2
    ends = (centres[:1] * 2 - middles[:1], centres[-1:] * 2 - middles[-1:]) if len(centres) > 1 else ([-0.5], [0.5])
    borders = np.concatenate([ends[0], middles, ends[1]])
    return [(float(a), float(b)) for a, b in pairwise(borders)]


def isolines(x: np.ndarray, y: np.ndarray, heights: np.ndarray, level: float) -> list[tuple[float, ...]]:
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

    Every point is drawn as a hexagon, the set of places nearest to it.
    """
    table = table_of(data, a=corners[0], b=corners[1], c=corners[2], value=value)
    first = sorted({round(float(row["a"]), 9) for row in table})
    if len(first) < 2:
        raise InputError(f"triangle needs points on a lattice, got {len(first)} different value of {corners[0]!r}.")
    step = min(np.diff(first))
    height = width * math.sqrt(3) / 2
    for row in table:  # corner a at the left, b at the right, c at the top
        row["x"], row["y"] = row["b"] + row["c"] / 2, row["c"]
    # Vega draws a path of inner radius 1 with inner radius √size / 2; 2% more hide the seams
    inner = step * width / 2
    outer = [
        (math.sin(k * math.pi / 3) * 2 / math.sqrt(3), math.cos(k * math.pi / 3) * 2 / math.sqrt(3)) for k in range(6)
    ]
    path = "M" + "L".join(f"{px:.5f},{py:.5f}" for px, py in outer) + "Z"
    scale = alt.Scale(domain=[0, 1], nice=False)
    across, up = alt.X("x:Q", scale=scale, axis=None), alt.Y("y:Q", scale=scale, axis=None)
    cells = (
        chart_of(table)
        .mark_point(shape=path, filled=True, size=(2 * inner * 1.02) ** 2, opacity=1, strokeWidth=0)
        .encode(
            x=across,
            y=up,
            color=alt.Color(
                "value:Q", title=value, scale=alt.Scale(scheme="viridis"), legend=alt.Legend(labelExpr=LABEL)
            ),
            tooltip=tooltip_of(data, a=corners[0], b=corners[1], c=corners[2], value=value),
        )
    )
    places = [{"x": 0, "y": 0, "text": corners[0]}, {"x": 1, "y": 0, "text": corners[1]}]
    below = chart_of(places).mark_text(dy=inner + 18).encode(x=across, y=up, text="text:N")
    top = chart_of([{"x": 0.5, "y": 1, "text": corners[2]}])
    above = top.mark_text(dy=-inner - 12).encode(x=across, y=up, text="text:N")
    return with_title(alt.layer(cells, below, above).properties(width=width, height=round(height)), title)


def grid(x: Any, y: Any, *, names: tuple[str, str] = ("x", "y"), title: str = "", size: int = 360) -> Chart:
    """A deformed grid: the points (x[i][j], y[i][j]) joined along both indices, with equal units on both axes."""
    across, up = np.asarray(plain_values(x), dtype=float), np.asarray(plain_values(y), dtype=float)
    if across.ndim != 2 or across.shape != up.shape:
        raise InputError(f"grid needs x and y as two matrices of the same shape, got {across.shape} and {up.shape}.")
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
        chart_of(rows)
        .mark_line(strokeWidth=1)
        .encode(
            x=alt.X("x:Q", title=names[0], scale=scale(across), axis=NUMBERS),
            y=alt.Y("y:Q", title=names[1], scale=scale(up), axis=NUMBERS),
            detail="thread:N",
            order="order:Q",
            color=alt.Color("way:N", legend=None),
        )
    )
    return with_title(chart.properties(width=size, height=size), title)


def panels(
    rows: Sequence[Sequence[Chart]], *, title: str = "", width: int = 300, height: int = 220
) -> alt.VConcatChart:
    """Charts beside and below each other, each `width` by `height` points, with legends of their own."""
    if not rows or not all(rows):
        raise InputError("panels needs at least one chart in every row.")
    sized = [alt.hconcat(*(chart.properties(width=width, height=height) for chart in row)) for row in rows]
    return with_title(alt.vconcat(*sized).resolve_scale(color="independent"), title)
