"""One theme for all charts, and the files that they become."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import vl_convert
from altair.utils.schemapi import debug_mode

from spiritlevel.charts.axes import Chart
from spiritlevel.errors import InputError, printable
from spiritlevel.storage import write_atomically

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
# Okabe and Ito's colours, distinguishable with every common kind of colour blindness; brighter on a dark background.
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
    """The Vega-Lite configuration that all charts share, for a light or dark background.

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


@contextmanager
def unchecked() -> Iterator[None]:
    """Charts made inside are not checked against Vega-Lite's schema, which would take half the time of a page.

    The tests check every kind of chart.
    """
    with debug_mode(False):
        yield


def specification(chart: Chart) -> dict[str, Any]:
    """The chart as Vega-Lite, with all texts from elsewhere made harmless.

    Vega-Lite pastes titles into expressions, where a backslash would begin an escape: they get a character that looks
    like one. Control characters are spelled out, since no SVG file may hold them.
    """
    found: dict[str, Any] = _harmless(chart.to_dict(validate=False))
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


def svg_file(chart: Chart, *, dark: bool = False) -> str:
    """The chart as an SVG file a tenth to a half as large, which looks the same.

    It does not describe every single mark, which would double the size of a scatter plot, and is `compact`. Not for a
    page that holds several: the names of the marks are the same in all files.
    """
    config = {**theme(dark=dark), "aria": False}
    return compact(vl_convert.vegalite_to_svg(specification(chart), config=config))


_MARK = re.compile(r'<path transform="translate\(([^,()]+),([^()]+)\)" ([^>]*)/>')
_PLACE = re.compile(r' (?:transform|d|[xy][12]?|width|height)="[^"]*"')
_DIGITS = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")


def compact(text: str) -> str:
    """An SVG whose equal marks are written once, and placed to a hundredth of a pixel.

    >>> point = '<path transform="translate({},2)" d="M1,0" fill="red"/>'
    >>> print(compact("<svg >" + "".join(point.format(x) for x in (0.123456, 1, 2)) + "</svg>"))
    <svg ><defs><path id="m0" d="M1,0" fill="red"/></defs><use xlink:href="#m0" x="0.12" y="2"/>...
    """
    text = _PLACE.sub(lambda place: _DIGITS.sub(lambda digits: f"{round(float(digits[0]), 2):.12g}", place[0]), text)
    counts = Counter(mark[3] for mark in _MARK.finditer(text))
    names = {mark: f"m{number}" for number, mark in enumerate(mark for mark, count in counts.items() if count > 2)}
    if not names:
        return text

    def placed(mark: re.Match[str]) -> str:
        return f'<use xlink:href="#{names[mark[3]]}" x="{mark[1]}" y="{mark[2]}"/>' if mark[3] in names else mark[0]

    marks = "".join(f'<path id="{name}" {mark}/>' for mark, name in names.items())
    opening, closing, rest = _MARK.sub(placed, text).partition(">")
    return f"{opening}{closing}<defs>{marks}</defs>{rest}"


def save(chart: Chart, stem: str | Path, *, dark: bool = False) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png (two pixels per point), each whole or not at all; returns both paths."""
    stem = Path(stem)
    if stem.suffix in (".svg", ".png"):
        raise InputError(f"save writes both an SVG and a PNG file: give the name without {stem.suffix!r}, got {stem}.")
    vector, pixels = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    spec, config = specification(chart), {**theme(dark=dark), "aria": False}
    write_atomically(vector, svg_file(chart, dark=dark))
    write_atomically(pixels, vl_convert.vegalite_to_png(spec, config=config, scale=2))
    return vector, pixels
