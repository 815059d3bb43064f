"""A chart as a figure for print: SVG, PDF or PNG, as wide as a column or a page, with its fonts inside."""

from __future__ import annotations

import base64
import functools
import re
import textwrap
from pathlib import Path
from typing import Any

import vl_convert

from spiritlevel.charts.axes import Chart
from spiritlevel.charts.drawing import compact, specification, theme
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.storage import write_together

SIZES = {"column": 85.0, "page": 178.0}  # millimetres
FORMATS = (".svg", ".pdf", ".png")
_POINTS = 72 / 25.4  # in a millimetre
_PPI = 300  # of a PNG
_FONTS = Path(__file__).parent / "fonts"
_FAMILY = "DejaVu Sans Condensed"
_FACES = {"normal": "DejaVuSansCondensed.ttf", "bold": "DejaVuSansCondensed-Bold.ttf"}
_SMALLER = {"fontSize": 0.62, "strokeWidth": 0.6, "size": 0.4, "step": 0.5, "gradientLength": 0.5, "thickness": 0.6}
_AXIS = 46  # points beside a panel that its axis takes, about
_BELOW = 28  # and below it
_LETTERS = {"text": 4.7, "subtitle": 3.7}  # points that a letter of a heading takes, and of the notes below it


def publish(
    chart: Chart, path: str | Path, *, size: str = "column", titles: bool = True, dark: bool = False
) -> tuple[Path, ...]:
    """Write a chart as a figure and return the files: the ending says which; without one, all three are written.

    Texts are 7 and 8 points high at the width of the figure, 85 mm for a "column" and 178 mm for a "page". A PDF embeds
    the letters it uses, an SVG the font; a PNG has 300 pixels per inch. All are written, or none.

    Args:
        chart: any Altair chart.
        path: `figure.svg`, `figure.pdf`, `figure.png`, or `figure` for all three.
        size: "column" or "page".
        titles: whether headings and the notes below them are drawn; a paper has captions for that.
        dark: for a dark background.
    """
    path = Path(path)
    if path.suffix not in ("", *FORMATS):
        raise InputError(f"a figure needs the ending .svg, .pdf or .png, or none for all three, got {path.name!r}.")
    endings = FORMATS if not path.suffix else (path.suffix,)
    drawn = drawing(chart, size=size, titles=titles, dark=dark)
    contents: dict[Path, str | bytes] = {}
    for ending in endings:
        file = path.with_name(path.name.removesuffix(path.suffix) + ending)
        if ending == ".svg":
            contents[file] = _with_fonts(compact(drawn))
        elif ending == ".pdf":
            contents[file] = vl_convert.svg_to_pdf(drawn)
        else:
            contents[file] = vl_convert.svg_to_png(drawn, scale=_PPI / 72, ppi=72)
    write_together(contents)
    return tuple(contents)


def drawing(chart: Chart, *, size: str = "column", titles: bool = True, dark: bool = False) -> str:
    """The chart as an SVG whose units are points, exactly as wide as asked."""
    if size not in SIZES:
        raise unknown_name("figure size", size, SIZES)
    _register()
    width = SIZES[size] * _POINTS
    spec = _smaller(specification(chart))
    if not titles:
        _without_titles(spec)
    _fit(spec, width, _columns(spec))
    _wrap_titles(spec, width)
    text = vl_convert.vegalite_to_svg(spec, config=_config(dark))
    return _scaled(text, width)


@functools.cache
def _register() -> None:
    vl_convert.register_font_directory(str(_FONTS))


def _config(dark: bool) -> dict[str, Any]:
    """The theme of all charts in the sizes of print."""
    config = {**theme(dark=dark), "font": f"'{_FAMILY}'", "padding": 2, "aria": False}
    text = {"labelFontSize": 7, "titleFontSize": 8, "titleFontWeight": "normal", "labelFontWeight": "normal"}
    config["title"] = {**config["title"], "fontSize": 8, "fontWeight": "bold", "subtitleFontSize": 7, "offset": 4}
    config["axis"] = {**config["axis"], **text, "titlePadding": 4, "labelSeparation": 4, "tickSize": 3}
    config["axis"] |= {"gridWidth": 0.5, "domainWidth": 0.5, "tickWidth": 0.5, "labelPadding": 2}
    config["legend"] = {**config["legend"], **text, "symbolSize": 40, "offset": 4, "padding": 0, "rowPadding": 1}
    config["legend"] |= {"gradientThickness": 8, "columnPadding": 6, "symbolStrokeWidth": 1}
    config["line"] = {"strokeWidth": 1.2}
    config["point"] = {"size": 18}
    config["text"] = {**config["text"], "fontSize": 7}
    config["axisX"] = {**config["axisX"], "tickCount": 5}
    config["view"] = {**config["view"], "discreteHeight": {"step": 13}}
    return config


def _smaller(part: Any) -> Any:
    """Explicit sizes of letters, lines and marks, chosen for a screen, in proportion to the letters of print."""
    if isinstance(part, list):
        return [_smaller(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {
        key: value
        if key in ("data", "datasets")
        else value * _SMALLER[key]
        if key in _SMALLER and isinstance(value, int | float)
        else _smaller(value)
        for key, value in part.items()
    }


def _without_titles(spec: dict[str, Any]) -> None:
    """Take the headings out; the titles of axes and legends stay."""
    spec.pop("title", None)
    for several in ("layer", "hconcat", "vconcat", "concat"):
        for child in spec.get(several, ()):
            _without_titles(child)


def _wrap_titles(spec: dict[str, Any], width: float) -> None:
    """Break headings, and the notes below them, into lines that are no wider than the figure."""
    if title := spec.get("title"):
        parts = {"text": title} if isinstance(title, str | list) else title
        for key, letter in _LETTERS.items():
            if given := parts.get(key):
                lines = [given] if isinstance(given, str) else given
                parts[key] = [part for line in lines for part in textwrap.wrap(line, int(width / letter)) or [""]]
        spec["title"] = parts
    for several in ("hconcat", "vconcat"):
        for child in spec.get(several, ()):
            _wrap_titles(child, child.get("width", width))


def _columns(spec: dict[str, Any]) -> int:
    """The largest number of charts side by side."""
    inside = [_columns(child) for several in ("hconcat", "vconcat") for child in spec.get(several, ())]
    return max([len(spec.get("hconcat", ())) or 1, *inside])


def _fit(spec: dict[str, Any], width: float, columns: int, top: bool = True) -> None:
    """Give every view its part of the width, and the matching height."""
    for several in ("hconcat", "vconcat"):
        if several in spec:
            spec["spacing"] = 10
            across = columns if several == "hconcat" else 1
            for child in spec[several]:
                _fit(child, (width - 10 * (across - 1)) / across, columns, top=False)
            return
    given, height = spec.get("width"), spec.get("height")
    if isinstance(given, dict) or isinstance(height, dict):
        return  # steps of categories: what they need, scaled afterwards
    inner = width if top else max(width - _AXIS, 40.0)
    ratio = height / given if isinstance(given, int | float) and isinstance(height, int | float) else 0.62
    if given is None and isinstance(height, int | float):
        spec["height"] = height * 0.55 + _BELOW  # rows of bars, which a short chart must not squeeze
    else:
        spec["height"] = inner * min(ratio, 1.0)
    spec["width"] = inner
    if top:
        spec["autosize"] = {"type": "fit", "contains": "padding"}


_OPENING = re.compile(r"<svg\b[^>]*>")


def _scaled(text: str, width: float) -> str:
    """The drawing at exactly this width, in points."""
    found = _OPENING.search(text)
    sizes = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert found is not None
    assert sizes is not None
    drawn_width, drawn_height = float(sizes[1]), float(sizes[2])
    high = width * drawn_height / drawn_width
    opening = re.sub(r' (width|height)="[^"]*"', "", found[0])
    opening = opening.replace("<svg", f'<svg width="{width:.2f}" height="{high:.2f}"', 1)
    return opening + text[found.end() :]


def _with_fonts(text: str) -> str:
    """An SVG for other programs: its size in points, and the font that it uses inside."""
    faces = [weight for weight in _FACES if weight == "normal" or 'font-weight="bold"' in text]
    rules = "".join(
        f"@font-face{{font-family:'{_FAMILY}';font-weight:{weight};"
        f"src:url(data:font/ttf;base64,{base64.b64encode((_FONTS / _FACES[weight]).read_bytes()).decode()})}}"
        for weight in faces
    )
    found = _OPENING.search(text)
    assert found is not None
    opening = re.sub(r'(width|height)="([\d.]+)"', r'\1="\2pt"', found[0], count=2)
    return f"{opening}<style>{rules}</style>{text[found.end() :]}"
