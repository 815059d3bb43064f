"""The sections of a page about two models or many."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from spiritlevel import charts
from spiritlevel.page.parts import Card, Cell, Section, Table, number
from spiritlevel.page.words import (
    as_figure,
    estimate_cell,
    estimate_text,
    fate,
    fit_cells,
    interval_of,
    left_out_table,
)
from spiritlevel.results import Comparison, ComparisonRow, Fit, Report, ReportRow, largest
from spiritlevel.results.comparisons import UNDER
from spiritlevel.results.formatting import with_error


def comparison_sections(found: Comparison, key: str) -> Iterator[Section]:
    """Two models: advice, its reasons, every measure of both, and the samples one by one."""
    a, b = found.names
    section = Section(f"{key}-advice", "Which to trust", [found.advice, *found.under], notes=list(found.reasons))
    favours = {"a": a, "b": b, "equal": "neither", "no interval": "none, as the difference has no interval"}
    for row in found.rows:
        if row.decides and row.verdict in ("a", "b", "equal"):
            section.cards.append(
                Card(
                    row.name.replace("_", " ").capitalize(),
                    f"{number(row.a.value, 3)} → {number(row.b.value, 3)}",
                    f"favours {favours[row.verdict]}; difference {_difference(row)}",
                    f"{row.meaning[:1].upper()}{row.meaning[1:]}, {a} → {b}.",
                )
            )
    columns = ["measure", a, b, f"difference ({found.level:.0%} interval)", "favours"]
    rows: list[tuple[Cell, ...]] = []
    after: list[tuple[Cell, ...]] = []
    for row in found.rows:
        verdict = favours.get(row.verdict, row.verdict)
        cells = (estimate_cell(row.a), estimate_cell(row.b), _difference(row))
        what, _, made = row.name.partition(UNDER)
        if made:
            after.append((made, what, *cells, verdict))
        else:
            rows.append((row.name, *cells, verdict + (f": {row.note}" if row.note else "")))
    section.tables.append(Table(f"{key}-comparison", f"{a} and {b} on {found.samples:,} samples", columns, rows))
    if after:
        title = "After a change of these weights (other weights of the same function may change differently)"
        section.tables.append(Table(f"{key}-under", title, ["change", *columns], after))
    columns = ["measure", "difference", "low", "high", "interval from", f"ratio {b} / {a}", "moved at least"]
    details = [(row.name, row.difference, row.low, row.high, row.how, row.ratio, row.factor) for row in found.rows]
    section.tables.append(Table(f"{key}-details", "Differences, intervals and ratios", columns, details, True))
    yield section
    if found.margins is not None:
        first, second = found.margins
        moved = second.signed - first.signed
        section = Section(f"{key}-pairs", "Sample by sample")
        section.texts.append(_wider(found, moved))
        chart = charts.distribution(moved, f"margin of {b} minus margin of {a}")
        alt = f"Histogram of the differences of the margins, {b} minus {a}, of {len(moved):,} samples."
        section.figures.append(as_figure(f"{key}-pairs-chart", "Differences of the margins", alt, chart))
        yield section
    section = Section(f"{key}-how", "How this was measured")
    if found.settings:
        rows_ = list(found.settings.items())
        section.tables.append(Table(f"{key}-settings", "Settings and versions", ["setting", "value"], rows_))
    if found.left_out:
        section.tables.append(left_out_table(found.left_out, key))
    if section.tables:
        yield section


def _wider(found: Comparison, change: Any) -> str:
    """On how many samples each model has the wider margin; what rounding can explain counts for neither."""
    assert found.margins is not None
    a, b = found.names
    rounding = 1e-5 * max(float(each.output.max()) if len(each) else 0.0 for each in found.margins)
    first, second = (float((sign * change > rounding).double().mean()) for sign in (-1, 1))
    if first == second == 0:
        return "The margins of all samples are the same up to rounding."
    rest = "" if first + second > 1 - 1e-12 else "; on the others they are the same up to rounding"
    return f"{b} has the wider margin on {second:.1%} of these samples, {a} on {first:.1%}{rest}."


def _difference(row: ComparisonRow) -> str:
    """The difference, and its interval where it has one."""
    text = number(row.difference, 3)
    return f"{text} ({number(row.low, 3)} to {number(row.high, 3)})" if row.low < row.high else text


def _facts(reports: list[Report]) -> Iterator[tuple[str, list[str]]]:
    """What the runs measured, before what they found: rows that differ here make the others hard to compare."""
    for kind in ("train", "test"):
        fits = [report.fits.get(kind) for report in reports]
        if not any(fits):
            continue
        named = [report.settings.get(f"{kind} data", "not named") for report in reports]
        yield f"{kind} data", ["–" if fit is None else name for fit, name in zip(fits, named, strict=True)]
        counts = [None if fit is None else (number(fit.samples), number(fit.population)) for fit in fits]
        yield f"{kind} samples", ["–" if c is None else c[0] if c[0] == c[1] else f"{c[0]} of {c[1]}" for c in counts]
        for name in dict.fromkeys(fit.quality()[0] for fit in fits if fit is not None):
            if name:
                title = f"{kind} {name}" + (" (%)" if name.startswith("accuracy") else "")
                yield title, ["–" if fit is None or fit.quality()[0] != name else _quality(fit) for fit in fits]
        yield f"{kind} loss", ["–" if fit is None else number(fit.loss.value) for fit in fits]
    yield "parameters", [report.settings.get("parameters", f"{report.parameters:,}") for report in reports]


def _quality(fit: Fit) -> str:
    value, limits = (str(cell) if isinstance(cell, str) else number(cell) for cell in fit_cells(fit))
    return value if limits in ("exact", "–") else f"{value} ({limits})"


def _with_limits(report: Report, row: ReportRow) -> Cell:
    """A value with its 95% limits; a number alone where it has none."""
    low, high = interval_of(report, row)
    value = row.value.value
    if row.kind in ("lower bound", "not converged"):
        return estimate_text(row.value)
    if math.isnan(low) and not math.isnan(value):
        return f"{number(value)} ± unknown"
    return with_error(value, (high - low) / 2, 4, typeset=True) if low < high else value


def side_by_side(reports: list[Report]) -> Section:
    """Several reports in one table, and their margins in one chart."""
    section = Section("side-by-side", "All runs")
    names = [f"{k + 1}: {report.name}" for k, report in enumerate(reports)]
    measures = list(dict.fromkeys(row.name for report in reports for row in report.rows))
    tables = [{row.name: row for row in report.rows} for report in reports]
    moved = [report.audit.moved() for report in reports if report.audit is not None]
    rows: list[tuple[Cell, ...]] = []
    for label, found in _facts(reports):
        rows.append((label, *found, "", ""))
    for measure in measures:
        pairs = zip(reports, tables, strict=True)
        values = [_with_limits(report, table[measure]) if measure in table else "–" for report, table in pairs]
        first = next(table[measure] for table in tables if measure in table)
        factors = [audit[measure] for audit in moved if measure in audit]
        rows.append((measure, *values, first.direction, fate(largest(factors) if factors else None)))
    section.texts.append(
        "What stays under the symmetries that the audits tried can be compared as it stands, within its limits (±, "
        "95%). What they moved cannot: the factor is how far they got, and larger changes move it further."
    )
    columns = ["measure", *names, "larger is", "at the same outputs"]
    section.tables.append(Table("side-table", "Measures of all runs", columns, rows))
    shares = np.linspace(0, 1, 101)
    curves: dict[str, list[Any]] = {"share of the samples (%)": [], "output margin": [], "run": []}
    for name, report in zip(names, reports, strict=True):
        if report.margins is not None and len(report.margins):
            curves["share of the samples (%)"] += (100 * shares).tolist()
            curves["output margin"] += np.quantile(report.margins.signed.numpy(), shares).tolist()
            curves["run"] += [name] * len(shares)
    if curves["run"]:
        chart = charts.lines(curves, "share of the samples (%)", "output margin", series="run")
        alt = "Line chart of the quantiles of the output margins of every run."
        section.figures.append(as_figure("side-margins", "Margins: this share of the samples lies below", alt, chart))
    return section
