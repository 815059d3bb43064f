"""The sections of a page about many checkpoints: which to take, the curves, the table."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spiritlevel import charts
from spiritlevel.page.parts import Cell, Section, Table, number
from spiritlevel.page.words import as_figure, left_out_table
from spiritlevel.results import Checkpoints


def checkpoint_sections(found: Checkpoints, key: str) -> Iterator[Section]:
    """The best in words and as a table, a curve for each column, and how it was measured."""
    section = Section(f"{key}-summary", "Which checkpoint", found.sentences())
    names = [row.name for row in found.rows]
    columns = [found.values(name) for name in found.columns]
    rows: list[tuple[Cell, ...]] = []
    for place, row in enumerate(found.rows):
        behind = number(row.behind, 3)
        if row.behind_low < row.behind_high:
            behind += f" ({number(row.behind_low, 3)} to {number(row.behind_high, 3)})"
        rows.append((row.name, *(column[place] for column in columns), behind))
    titles = ["checkpoint", *found.columns, "loss above the lowest (95 %)"]
    section.tables.append(Table(f"{key}-table", f"{len(names)} checkpoints on {found.samples:,} samples", titles, rows))
    yield section
    section = Section(f"{key}-curves", "Curves", ["In the order in which the checkpoints were given."])
    for name, values in zip(found.columns, columns, strict=True):
        if any(math.isfinite(value) for value in values):
            data = {"checkpoint": list(range(1, len(names) + 1)), name: values}
            alt = f"Line chart of {name} over {len(names)} checkpoints."
            chart = charts.lines(data, "checkpoint", name, points=True)
            title = f"{name[:1].upper()}{name[1:]}"
            section.figures.append(as_figure(f"{key}-{len(section.figures)}", title, alt, chart, inset="xy"))
    yield section
    section = Section(f"{key}-how", "How this was measured")
    section.tables.append(
        Table(f"{key}-settings", "Settings and versions", ["setting", "value"], list(found.settings.items()))
    )
    if found.left_out:
        section.tables.append(left_out_table(found.left_out, key))
    yield section
