"""Columns → rows, axes, colours and tooltips: what every kind of chart is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import altair as alt
import polars as pl

from spiritlevel.errors import InputError, unknown_name

Columns = Mapping[str, Any] | pl.DataFrame
Chart = alt.Chart | alt.LayerChart


def plain_values(values: Any) -> list[Any]:
    """A column as JSON knows it: seven digits, and null for what is not a finite number."""
    items: Iterable[Any] = values.tolist() if hasattr(values, "tolist") else values
    return [
        (float(f"{item:.7g}") if math.isfinite(item) else None) if isinstance(item, float) else item for item in items
    ]


Rows = list[dict[str, Any]]


class _Inline(alt.InlineData):
    """Rows that Altair takes as they are; checking each number against its schema would take it many seconds."""

    _class_is_valid_at_instantiation = False


def chart_of(rows: Rows) -> alt.Chart:
    """A chart of rows, as yet without marks."""
    return alt.Chart(_Inline(values=rows))


def table_of(data: Columns, **fields: str | None) -> Rows:
    """Rows for Vega under short names that cannot hold a dot or a bracket, which Vega would read as a path."""
    columns = {}
    for field, name in fields.items():
        if name is None:
            continue
        if name not in (data.columns if isinstance(data, pl.DataFrame) else data):
            raise unknown_name("column", name, data.columns if isinstance(data, pl.DataFrame) else data)
        columns[field] = plain_values(data[name])
    lengths = {fields[field]: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the columns of a chart must have the same length, got {lengths}.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _kind(data: Columns, name: str) -> Literal["nominal", "quantitative"]:
    return "nominal" if any(isinstance(item, str) for item in plain_values(data[name])) else "quantitative"


def axis_of(channel: Any, field: str, data: Columns, name: str, *, log: bool, zero: bool = False, **more: Any) -> Any:
    """The channel of a column: its own words in their order, or numbers on a linear or logarithmic scale."""
    kind = _kind(data, name)
    if kind == "nominal":
        return channel(field, type=kind, title=name, sort=None, axis=alt.Axis(labelAngle=0), **more)
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=zero)
    axis = DECADES if log else _linear(plain_values(data[name]))
    return channel(field, type=kind, title=name, scale=scale, axis=axis, **more)


def _linear(values: list[Any]) -> alt.Axis:
    """An axis of numbers; if all are whole, so are its ticks: there is no checkpoint 1.2."""
    if not values or not all(isinstance(value, int) for value in values):
        return NUMBERS
    low, high = min(values), max(values)
    if high - low < 3:  # Vega's smallest step lets halves through
        return alt.Axis(labelExpr=LABEL, values=list(range(low, high + 1)))
    return alt.Axis(labelExpr=LABEL, tickMinStep=1)


def tooltip_of(data: Columns, **fields: str | None) -> list[alt.Tooltip]:
    """What is shown under the pointer."""
    return [
        alt.Tooltip(field, title=name, type=kind, format=".4~g" if kind == "quantitative" else alt.Undefined)
        for field, name in fields.items()
        if name is not None
        for kind in [_kind(data, name)]
    ]


_NAMED = 30  # series that a legend names at most


def colour_of(
    series: str | None, data: Columns, *, ordered: bool = False, order: Sequence[str] | None = None
) -> dict[str, Any]:
    """The channels that distinguish series: colours of the theme, or a gradual scale for ordered numbers."""
    if series is None:
        return {}
    gradual = ordered and _kind(data, series) == "quantitative"
    if gradual and len(set(plain_values(data[series]))) > 12:  # a legend with a name for each would dwarf the chart
        colour = alt.Color("series:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title=series))
        return {"color": colour, "detail": alt.Detail("series:O")}
    kind: Literal["ordinal", "nominal"] = "ordinal" if gradual else "nominal"
    scale = alt.Scale(scheme="viridis") if gradual else alt.Scale(domain=list(order) if order else alt.Undefined)
    names = {str(name) for name in (*plain_values(data[series]), *(order or ()))}  # the legend has them all
    stacked = not gradual and sum(map(len, names)) > 40  # side by side they would not fit on a phone
    legend: alt.Legend | None = alt.Legend(title=series)
    if len(names) > _NAMED:  # Vega would name the first of them alone; the pointer names each
        legend = None
    elif stacked:
        legend = alt.Legend(title=series, columns=1, labelLimit=280)
    return {"color": alt.Color("series", type=kind, sort=None, scale=scale, legend=legend)}


# Plain decimals where they are short, otherwise 2e-7. Vega leaves labels empty where a logarithmic axis has no room.
LABEL = (
    "datum.label === '' ? '' : datum.value === 0 ? '0' : abs(datum.value) < 1e-3 || abs(datum.value) >= 1e6 "
    "? format(datum.value, '.2~e') : format(datum.value, ',.6~r')"
)
NUMBERS = alt.Axis(labelExpr=LABEL)
# a logarithmic axis has lines between the powers of ten too; those stay in the background
DECADES = alt.Axis(
    labelExpr=LABEL,
    gridOpacity={
        "condition": {"test": "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) > 1e-6", "value": 0.3},
        "value": 1,
    },
)


def left_out(data: Columns, *axes: tuple[str, bool]) -> str:
    """What a logarithmic axis cannot show, in words."""
    texts = []
    for name, log in axes:
        count = sum(isinstance(item, int | float) and item <= 0 for item in plain_values(data[name])) if log else 0
        if count:
            texts.append(f"{count:,} of {len(data[name]):,} values of '{name}' are not positive and not shown")
    return "; ".join(texts)


def with_title(chart: Any, title: str, subtitle: str = "") -> Any:
    """The chart with its heading, and remarks below it."""
    heading: Any = alt.TitleParams(title, subtitle=subtitle) if subtitle else title
    if not title:  # Vega draws no subtitle without a title
        heading = alt.TitleParams(subtitle, fontSize=12, fontWeight="normal")
    return chart.properties(title=heading) if title or subtitle else chart
