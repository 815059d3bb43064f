"""Every chart draws, shows the numbers it was given, and says what it leaves out."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import vl_convert
from PIL import Image

from spiritlevel import charts
from spiritlevel.charts.surfaces import isolines
from spiritlevel.errors import InputError
from spiritlevel.results import Audit, AuditRow, Estimate, Landscape, SmoothedDensity, SpectralDensity
from spiritlevel.statistics.correlation import skewness

STEPS = torch.linspace(-1, 1, 9, dtype=torch.float64)


def audit() -> Audit:
    def row(measure: str, transform: str, ratio: float, verdict: str) -> AuditRow:
        return AuditRow(measure, transform, Estimate(1.0), Estimate(ratio), ratio, math.nan, verdict, False)

    return Audit(
        (
            row("trace", "scale", 100.0, "changes"),
            row("trace", "fold", 1.0, "invariant"),
            row("norm", "scale", 1.1, "unstable"),
            row("norm", "fold", math.nan, "not converged"),
        )
    )


def plane() -> Landscape:
    losses = 0.1 + STEPS[:, None] ** 2 + 2 * STEPS[None, :] ** 2
    curvatures = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    return Landscape(("eigenvector 1", "eigenvector 2"), (STEPS, STEPS), losses, None, 0.1, zero, curvatures, zero + 1)


def line() -> Landscape:
    one = torch.ones(1, dtype=torch.float64)
    return Landscape(("eigenvector 1",), (STEPS,), 0.1 + STEPS**2, None, 0.1, 0 * one, 2 * one[:, None], one)


def lattice(n: int) -> dict[str, list[float]]:
    points = [(i / n, j / n, (n - i - j) / n) for i in range(n + 1) for j in range(n + 1 - i)]
    return {
        **{name: [point[k] for point in points] for k, name in enumerate("abc")},
        "gap": [1 - sum(p * p for p in point) for point in points],
    }


TABLE = pl.DataFrame({"step [1.5]": [1, 10, 100], "loss": [2.0, 0.5, -0.1], "run": ["a", "b", "a"]})
SPECTRUM = SpectralDensity(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), torch.tensor([[0.4, 0.1], [0.45, 0.05]]), size=9)
CURVED, LEVEL = np.meshgrid(np.linspace(0, 1, 5) ** 2, np.linspace(0, 1, 4), indexing="ij")

CHARTS: dict[str, Callable[[], Any]] = {
    "scatter": lambda: charts.scatter(TABLE, "step [1.5]", "loss", colour="run", fit=(-0.01, 1.0), log_x=True),
    "lines": lambda: charts.lines(TABLE, "step [1.5]", "loss", series="run", low="loss", high="loss"),
    "stems": lambda: charts.stems({"λ": [0.0, 1.0], "weight": [0.99, 0.01]}, "λ", "weight"),
    "distribution": lambda: charts.distribution(torch.randn(500), "margin", skewness=0.25),
    "bars": lambda: charts.bars({"layer": ["1", "2"], "share": [0.3, 0.7], "to": [0.4, 0.8]}, "layer", "share"),
    "intervals": lambda: charts.intervals(
        {"measure": ["a", "b"], "τ": [0.5, -0.1], "from": [0.3, -0.4], "to": [0.6, 0.2], "family": ["x", "y"]},
        *("measure", "τ", "from", "to"),
        colour="family",
        order=["y", "x"],
    ),
    "contours": lambda: charts.contours([0, 1, 2], [0, 1], [[1, 2], [2, 3], [3, 4]], names=("x", "y", "loss")),
    "triangle": lambda: charts.triangle(lattice(6), ("a", "b", "c"), "gap"),
    "grid": lambda: charts.grid(CURVED, LEVEL),
    "panels": lambda: charts.panels([[CHARTS["bars"](), CHARTS["lines"]()], [CHARTS["stems"]()]], title="Three"),
    "ritz_values": lambda: charts.ritz_values(SPECTRUM),
    "density": lambda: charts.density(SPECTRUM.density()),
    "landscape_line": lambda: charts.landscape_line(line()),
    "landscape_contours": lambda: charts.landscape_contours(plane()),
    "audit_map": lambda: charts.audit_map(audit()),
}


def rows(chart: Any) -> list[dict[str, Any]]:
    """All rows of all layers; they are strict JSON."""
    spec = json.loads(json.dumps(chart.to_dict(), allow_nan=False))
    return [row for values in spec.get("datasets", {}).values() for row in values] + [
        row for part in [spec, *spec.get("layer", [])] for row in part.get("data", {}).get("values", [])
    ]


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_draws_in_both_themes(name: str) -> None:
    light, dark = (charts.svg(CHARTS[name](), dark=dark) for dark in (False, True))
    assert light.count("<path") > 3
    assert charts.theme()["background"] in light
    assert charts.theme(dark=True)["background"] in dark
    for colour in ("#1f2933", "#52606d"):  # ink of the light theme would be lost on dark ground
        assert colour not in dark


@pytest.mark.parametrize("last", [1, 2, 3, 4, 7, 12])
def test_an_axis_of_whole_numbers_has_no_fractions(last: int) -> None:
    steps = list(range(1, last + 1))
    drawn = charts.svg(charts.lines({"checkpoint": steps, "loss": [1 / k for k in steps]}, "checkpoint", "loss"))
    across = drawn[drawn.index("X-axis") : drawn.index("Y-axis")]
    labels = re.findall(r">([\d.]+)</text>", across)
    assert labels
    assert all(label.isdigit() for label in labels)


def test_the_axis_of_bars_leaves_room_for_the_number_beside_the_longest() -> None:
    spec = charts.bars({"layer": ["1", "2"], "share": [36.5, 5.0]}, "layer", "share").to_dict()
    assert spec["layer"][0]["encoding"]["x"]["scale"]["domainMax"] > 1.1 * 36.5
    assert charts.bars({"layer": ["1"], "share": [0.0]}, "layer", "share").to_dict()["layer"]


def test_every_public_chart_is_drawn_above() -> None:
    assert set(CHARTS) == set(charts.__all__) - {"save", "specification", "svg", "svg_file", "theme"}


def test_saved_files_are_whole_and_beside_each_other(tmp_path: Path) -> None:
    vector, pixels = charts.save(CHARTS["bars"](), tmp_path / "new" / "layers v1.5")
    assert vector.name == "layers v1.5.svg"
    assert vector.read_text(encoding="utf-8").endswith("</svg>")
    assert pixels.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in vector.parent.iterdir()) == ["layers v1.5.png", "layers v1.5.svg"]


@pytest.mark.parametrize("name", CHARTS)
def test_a_file_looks_like_the_chart_that_it_is_made_of(name: str) -> None:
    def pixels(text: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(vl_convert.svg_to_png(text, scale=2))).convert("RGB"), dtype=int)

    chart = CHARTS[name]()
    difference = np.abs(pixels(charts.svg(chart)) - pixels(charts.svg_file(chart))).max(-1)
    assert difference.max() < 80  # edges of marks, moved by a hundredth of a pixel; a mark that is lost has 100 to 255
    assert (difference > 24).mean() < 2e-3


def test_a_file_writes_equal_marks_once() -> None:
    data = {"x": np.linspace(0, 1, 3000) ** 2, "y": np.linspace(0, 1, 3000) ** 3}
    chart = charts.scatter(data, "x", "y")
    text = charts.svg_file(chart)
    assert text.count("<use ") == 3000
    assert len(text) < len(charts.svg(chart)) / 5


def test_the_fitted_line_has_the_slope_and_intercept_it_was_given() -> None:
    chart = charts.scatter({"x": [1.0, 100.0], "y": [1.0, 5.0]}, "x", "y", fit=(2.0, -1.0), log_x=True, log_y=True)
    (fit,) = [row for row in rows(chart) if "x2" in row]
    for x, y in ((fit["x"], fit["y"]), (fit["x2"], fit["y2"])):
        assert math.log10(y) == pytest.approx(2 * math.log10(x) - 1)


def test_what_a_logarithmic_axis_cannot_show_is_counted() -> None:
    chart = charts.scatter(TABLE, "step [1.5]", "loss", log_y=True)
    assert "1 of 3 values of 'loss' are not positive and not shown" in charts.svg(chart)
    assert len(rows(chart)) == 2


def test_a_crowd_is_counted_and_its_rare_and_extreme_members_are_drawn() -> None:
    n = 10_000
    values = torch.randn(n, generator=torch.Generator().manual_seed(0)).double()
    kind = ["wrong" if k % 200 == 7 else "correct" for k in range(n)]
    data = {"x": values, "y": values.exp(), "kind": kind, "sample": list(range(n))}
    chart = charts.scatter(data, "x", "y", colour="kind", hover=["sample"], log_y=True, most=1000, keep=[4321])
    cells = [row for row in rows(chart) if "count" in row]
    points = {row["hover0"]: row for row in rows(chart) if "series" in row}
    assert sum(cell["count"] for cell in cells) == n
    assert 500 < len(points) <= 1000
    assert {4321, int(values.argmin()), int(values.argmax()), *range(7, n, 200)} <= points.keys()
    assert f"{len(points):,} of 10,000 drawn as points" in charts.svg(chart)


def test_undefined_numbers_become_null_and_are_counted() -> None:
    chart = charts.distribution([1.0, math.nan, 2.0, math.inf], "margin")
    assert "2 of 4 values are not finite" in charts.svg(chart)
    assert sum(row.get("count", 0) for row in rows(chart)) == 2


def test_the_box_is_that_of_the_values() -> None:
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    (box,) = [row for row in rows(charts.distribution(values, "x")) if "median" in row]
    assert (box["median"], box["quarter"], box["three"]) == (2.5, 1.25, 3.75)
    assert (box["low"], box["high"]) == (0.0, 4.0)  # 100 lies beyond 1.5 boxes
    assert f"skewness {skewness(values):.3g}" in charts.svg(charts.distribution(values, "x"))


def test_contour_lines_lie_on_their_level() -> None:
    steps = np.linspace(-1, 1, 41)
    heights = steps[:, None] ** 2 + steps[None, :] ** 2
    segments = isolines(steps, steps, heights, 0.4321)
    ends = np.array(segments).reshape(-1, 2)
    assert len(segments) > 40
    assert np.hypot(*ends.T) == pytest.approx(math.sqrt(0.4321), abs=2e-3)
    _, counts = np.unique(ends.round(9), axis=0, return_counts=True)
    assert set(counts) == {2}  # every segment goes on in another: the line is closed


def test_the_audit_shows_a_colour_only_where_a_ratio_is_known() -> None:
    cells = {(row["measure"], row["transform"]): row for row in rows(charts.audit_map(audit())) if "log" in row}
    assert cells["trace", "scale"]["log"] == pytest.approx(2)
    assert cells["trace", "scale"]["text"] == "×100"
    assert cells["trace", "fold"]["text"] == "="
    assert (cells["norm", "scale"]["log"], cells["norm", "scale"]["text"]) == (None, "?")
    assert (cells["norm", "fold"]["log"], cells["norm", "fold"]["text"]) == (None, "…")


def test_the_density_reaches_six_decades_down_and_not_to_zero() -> None:
    flat = SmoothedDensity(STEPS, torch.exp(-100 * STEPS**2), torch.zeros_like(STEPS), 0.1)
    heights = [row["y"] for row in rows(charts.density(flat)) if "y" in row]
    assert min(heights) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: charts.lines(TABLE, "stepp", "loss"), "unknown column 'stepp'"),
        (lambda: charts.lines(TABLE, "step [1.5]", "loss", low="loss"), "needs both ends of a band"),
        (lambda: charts.scatter({"x": [1], "y": [1, 2]}, "x", "y"), "must have the same length"),
        (lambda: charts.distribution([math.nan], "margin"), "needs at least one finite value"),
        (lambda: charts.contours([0, 1], [0, 1], [[1, 2]], names=("x", "y", "z")), "needs 2 x 2 values"),
        (lambda: charts.grid([1.0], [2.0]), "two matrices of the same shape"),
        (lambda: charts.triangle({"a": [1], "b": [0], "c": [0], "v": [1]}, ("a", "b", "c"), "v"), "on a lattice"),
        (lambda: charts.landscape_line(plane()), "use landscape_contours"),
        (lambda: charts.landscape_contours(line()), "use landscape_line"),
        (lambda: charts.audit_map(Audit(())), "at least one row"),
        (lambda: charts.save(CHARTS["bars"](), "layers.png"), "give the name without '.png'"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(draw: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw()


HOSTILE = ["C:\\users\\net.py", "\\", "a\"b'c", "two\nlines", "\u2028", "\x1b[31m\x07\u202e", "caf\udce9", "[x].y${z}"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_name_can_be_drawn(name: str) -> None:
    """Vega-Lite pastes titles into expressions: a backslash in one broke the chart; an escape ended the process."""
    columns = {name: [1.0, 2.0], "v": [1.0, 2.0], "n": [name, "z"], "low": [0.0, 1.0], "high": [2.0, 3.0]}
    for chart in (
        charts.scatter(columns, name, "v", colour="n", order=["z", name], hover=["n"], title=name),
        charts.lines(columns, "v", name, series="n"),
        charts.distribution([1.0, 2.0, 3.0], f"margin of {name}"),
        charts.intervals(columns, "n", name, "low", "high"),
        charts.contours([0, 1, 2], [0, 1, 2], [[1.0, 2.0, 3.0]] * 3, names=(name, name, name)),
    ):
        assert charts.svg(chart).startswith("<svg")


def test_factors_are_drawn_as_factors() -> None:
    """A reader wants × 5, not the logarithm 0.7; what did not change stands on the line at × 1."""
    columns = {"what": ["a", "b"], "ratio": [1.2, 38.0], "low": [1.1, 30.0], "high": [1.3, 45.0]}
    drawn = charts.svg(charts.intervals(columns, "what", "ratio", "low", "high", ratios=True))
    assert all(f">× {factor}<" in drawn for factor in (1, 2, 5, 10, 20))
    assert ">× 0" not in drawn
    empty = {key: list[float]() for key in columns}
    assert charts.svg(charts.intervals(empty, "what", "ratio", "low", "high", ratios=True)).startswith("<svg")


def test_names_stay_readable() -> None:
    drawn = charts.svg(charts.lines({"x": [1.0, 2.0], "C:\\users\\net.py": [1.0, 2.0]}, "x", "C:\\users\\net.py"))
    assert ">C:∖users∖net.py<" in drawn


def test_a_legend_is_stacked_where_the_names_that_nothing_bears_need_the_room() -> None:
    order = ["stays", "flip predicted", "flip not predicted", "predicted, stayed"]
    data = {"x": [1.0, 2.0], "y": [1.0, 2.0], "kind": ["stays", "stays"]}
    found = charts.scatter(data, "x", "y", colour="kind", order=order).to_dict()
    assert '"columns": 1' in json.dumps(found)


def test_more_series_than_a_legend_can_name_have_none() -> None:
    """Vega would name the first thirty and say so in the console of every reader."""
    for count, named in ((30, True), (31, False)):
        data = {"x": [0.0] * count, "y": [1.0] * count, "run": [f"run {k}" for k in range(count)]}
        spec = charts.lines(data, "x", "y", series="run").to_dict()
        assert (spec["layer"][0]["encoding"]["color"]["legend"] is not None) == named


def test_cells_of_a_surface_overlap_only_where_the_next_is_drawn_over_them() -> None:
    """Seams show between cells that merely touch; one that reached into a gap would show a value that is not there."""
    heights = [[1.0, 2.0, 3.0], [2.0, math.nan, 4.0], [3.0, 4.0, 5.0]]
    chart = charts.contours([0, 1, 2], [0, 1, 2], heights, names=("x", "y", "z")).to_dict()
    drawn = chart["datasets"][chart["layer"][0]["data"]["name"]]
    cells = {(round(cell["x"] + 0.5), round(cell["y"] + 0.5)): cell for cell in drawn}
    assert len(cells) == 8
    reach = {place: (c["x2"] - c["x"] > 1.01, c["y2"] - c["y"] > 1.01) for place, c in cells.items()}
    assert reach[0, 0] == (True, True)
    assert reach[0, 1] == (False, True)
    assert reach[1, 0] == (True, False)
    assert reach[2, 2] == (False, False)
    assert reach[2, 1] == (False, True)
    assert reach[1, 2] == (True, False)


def test_contours_of_heights_near_the_largest_float() -> None:
    """Their differences overflow; the lines are those of the same surface in other units. Warnings are errors here."""

    def lines(unit: float) -> list[dict[str, Any]]:
        heights = [[-1.7 * unit, 1.7 * unit], [1.7 * unit, -1.7 * unit]]
        chart = charts.contours([0, 1], [0, 1], heights, names=("x", "y", "z")).to_dict()
        (found,) = [rows for rows in chart["datasets"].values() if "value" not in rows[0]]
        return list(found)

    for huge, plain in zip(lines(1e308), lines(1.0), strict=True):
        assert huge == pytest.approx(plain)


def test_contours_pass_over_places_without_a_finite_height() -> None:
    """One infinite loss, far out, took all lines away and printed warnings, which are errors here."""
    line = [0.0, 1.0, 2.0, 3.0]
    whole = [[1.0 + x + y for y in line] for x in line]
    holes = [row.copy() for row in whole]
    holes[3][3], holes[0][3] = math.inf, math.nan

    def drawn(heights: list[list[float]]) -> list[Any]:
        chart = charts.contours(line, line, heights, names=("x", "y", "z"), log=True, domain=(1.0, 7.0)).to_dict()
        return [row for rows in chart["datasets"].values() for row in rows if "value" not in row]

    free = [row for row in drawn(whole) if max(row["x"], row["x2"]) < 2 and max(row["y"], row["y2"]) < 2]
    assert len(free) > 10
    assert all(row in drawn(holes) for row in free)
    chart = charts.contours(line, line, holes, names=("x", "y", "z")).to_dict()
    assert any("value" not in rows[0] for rows in chart["datasets"].values())
    with pytest.raises(InputError, match="contours needs values that are finite numbers"):
        charts.contours(line, line, [[math.nan] * 4] * 4, names=("x", "y", "z"))
