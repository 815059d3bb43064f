"""The sections of a page about many checkpoints: which to take, the curves, the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from spiritlevel import charts
from spiritlevel.page.parts import Cell, Section, Table, number
from spiritlevel.page.words import as_figure, left_out_table
from spiritlevel.results import Checkpoints, Prediction

_LEGEND = (
    "‘Loss above the lowest’ is paired, sample by sample: an interval that holds 0 is a tie. ‘spiritlevel measures "
    "NAME’ explains a measure."
)
_FLIPS = " Flips are predictions that the change of the weights alters."


def checkpoint_sections(found: Checkpoints, key: str) -> Iterator[Section]:
    """The best in words and as tables, curves, and how it was measured."""
    yield _summary(found, key)
    yield _curves(found, key)
    section = Section(f"{key}-how", "How this was measured")
    section.tables.append(
        Table(f"{key}-settings", "Settings and versions", ["setting", "value"], list(found.settings.items()))
    )
    if found.left_out:
        section.tables.append(left_out_table(found.left_out, key))
    yield section


def _summary(found: Checkpoints, key: str) -> Section:
    section = Section(f"{key}-summary", "Which checkpoint", found.sentences())
    section.notes.append(_LEGEND + (_FLIPS if found.changes else ""))
    names = ("accuracy", "loss", *found.measures)
    columns = [found.values(name) for name in names]
    rows: list[tuple[Cell, ...]] = []
    after: list[tuple[Cell, ...]] = []
    for place, row in enumerate(found.rows):
        behind = number(row.behind, 3)
        if row.behind_low < row.behind_high:
            behind += f" ({number(row.behind_low, 3)} to {number(row.behind_high, 3)})"
        rows.append((row.name, *(column[place] for column in columns), behind))
    for change in found.changes:
        for row in found.rows:
            came = [found.values(f"{change}, {kind}")[found.rows.index(row)] for kind in ("measured", "flips")]
            after.append((change, row.name, _prediction(row.predicted.get(change)), *came))
    titles = ["checkpoint", *(_words(name) for name in names), "loss above the lowest (95%)"]
    title = f"{len(found.rows)} checkpoints on {found.samples:,} samples"
    section.tables.append(Table(f"{key}-table", title, titles, rows))
    if after:
        titles = ["change", "checkpoint", "rise of the loss, predicted", "rise of the loss, measured", "flips"]
        section.tables.append(Table(f"{key}-changes", "After each change of the weights", titles, after))
    return section


def _curves(found: Checkpoints, key: str) -> Section:
    section = Section(f"{key}-curves", "Curves", ["In the order in which the checkpoints were given."])
    count = len(found.rows)
    places = list(range(1, count + 1))

    def draw(title: str, axis: str, curves: dict[str, list[float]]) -> None:
        known = {name: values for name, values in curves.items() if any(math.isfinite(value) for value in values)}
        if not known:
            return
        several = len(curves) > 1
        data: dict[str, list[Any]] = {
            "checkpoint": places * len(known),
            axis: [value for values in known.values() for value in values],
        }
        if several:
            data["curve"] = [name for name in known for _ in places]
        chart = charts.lines(data, "checkpoint", axis, series="curve" if several else None, points=True)
        alt = f"Line chart of {title} over {count} checkpoints."
        section.figures.append(as_figure(f"{key}-{len(section.figures)}", title, alt, chart, inset="xy"))

    for name in ("accuracy", "loss", *found.measures):
        draw(_words(name), _words(name), {name: found.values(name)})
    for change in found.changes:
        rises = {kind: found.values(f"{change}, {kind}") for kind in ("predicted", "measured")}
        draw(f"What {change} adds to the loss", "rise of the loss", rises)
        draw(f"Predictions that {change} flips", "flips", {"flips": found.values(f"{change}, flips")})
    return section


def _prediction(predicted: Prediction | None) -> str:
    if predicted is None or math.isnan(predicted.value):
        return "–"
    low, high = predicted.interval()
    if math.isnan(low):
        return f"{number(predicted.value, 3)} ± unknown"
    return f"{number(predicted.value, 3)} ({number(low, 3)} to {number(high, 3)})"


def _words(name: str) -> str:
    return name.replace("_", " ")
