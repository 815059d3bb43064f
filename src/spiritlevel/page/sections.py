"""The sections of a page about one report, in their order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from spiritlevel import charts
from spiritlevel.page.parts import Card, Section, Sheet, Table, number
from spiritlevel.page.samples import margins_section, pictures_section, trace_against_margin
from spiritlevel.page.words import (
    as_figure,
    certainty,
    estimate_cell,
    estimate_text,
    fate,
    fewer_samples,
    fit_cells,
    fit_columns,
    found_row,
    interval_of,
    leading,
    left_out_table,
    why_missing,
)
from spiritlevel.results import EFFECTS, Estimate, Report, WorstFactor, at_least, kept_by, with_limits


def report_sections(report: Report, key: str, pictures: Sheet | None) -> Iterator[Section]:
    """All sections about one report; one that was not measured says why."""
    yield _summary(report, key)
    yield trace_against_margin(report, key)
    yield pictures_section(report, key, pictures)
    yield margins_section(report, key)
    yield _spectrum(report, key)
    yield _landscape(report, key)
    yield _layers(report, key)
    yield _audit(report, key)
    yield _measures(report, key)
    yield _how(report, key)


def _card(report: Report, label: str, names: tuple[str, ...]) -> Card:
    row = found_row(report, *names)
    if row is None:
        return Card(label, "–", "", why_missing(report, "It", *names))
    meaning = f"{row.meaning[:1].upper()}{row.meaning[1:]}. Larger is {row.direction}."
    bound = "≥ " if row.kind == "lower bound" else ""
    return Card(label, bound + number(row.value.value), certainty(report, row), meaning)


def _artefact_card(report: Report) -> Card:
    label = "How much of it is parametrisation"
    factors = {} if report.audit is None else report.audit.moved()
    known = {name: factor for name, factor in factors.items() if 1 < factor < math.inf}
    if report.audit is None or not known:
        return Card(label, "–", "", why_missing(report, "A factor from the audit", "audit"))
    name = next((name for name in leading(report, "curvature") if name in known), next(iter(known)))
    return Card(
        label,
        f"× {number(known[name], 3)}",
        "at least; no upper limit is known",
        f"{report.audit.moved_by(name)} moved ‘{name}’ this far while outputs or probabilities stayed the same, so its "
        "size alone does not tell two models apart.",
    )


def _summary(report: Report, key: str) -> Section:
    # the banner above has said already that a report is partial
    lead, *rest = [text for text in report.headline if not (report.partial and report.partial in text)] or [""]
    section = Section(f"{key}-summary", "Summary", [lead] if lead else [], notes=rest)
    section.cards = [
        _card(report, "How sharp", leading(report, "curvature")),
        _card(report, "How wide the margins", leading(report, "margin")),
        _artefact_card(report),
    ]
    if report.fits:
        columns = ["data", "samples", "of", *fit_columns(report.fits), "loss"]
        rows = [
            (name, fit.samples, fit.population, *fit_cells(fit), fit.loss.value) for name, fit in report.fits.items()
        ]
        section.tables.append(Table(f"{key}-fit", "How well it fits", columns, rows))
    if not report.headline:
        section.texts.append(f"{report.name} has {report.extent}.")
    return section


def _spectrum(report: Report, key: str) -> Section:
    section = Section(f"{key}-spectrum", "Spectrum of the Hessian")
    found = report.spectrum
    if found is None:
        section.texts.append(why_missing(report, "The spectrum", "spectrum"))
        return section
    top, bottom = found.largest.outermost(), found.smallest.outermost()
    ends = f"{estimate_text(bottom)} to {estimate_text(top)}"
    unsure = list(_open_ends(bottom, top))
    section.texts.append(
        " ".join(
            [
                *fewer_samples(report),
                f"The {found.size:,} eigenvalues range from {ends}; their sum, the trace, "
                f"is {estimate_text(found.trace)}{_by_probes(report)}; the square root of the sum of their squares is "
                f"{estimate_text(found.frobenius_norm)}. A few large values and very many near 0 are usual: the "
                "loss is flat in most directions.",
                *unsure,
            ]
        )
    )
    spectrum = found.density
    curve = spectrum.density()
    probes = "all eigenvalues" if spectrum.exact else f"{spectrum.nodes.shape[0]} probes"
    alt = f"Smoothed density of the eigenvalues from {ends} on a logarithmic axis, {probes}."
    section.figures.append(as_figure(f"{key}-density", "Density of eigenvalues", alt, charts.density(curve)))
    alt = f"Stem plot of Ritz values against their weights on a logarithmic axis, {probes}."
    chart = charts.ritz_values(spectrum, floor=1e-12)
    note = "Each stem is one Ritz value of a probe; its height is the share of the spectrum that it stands for"
    section.figures.append(as_figure(f"{key}-ritz", "Ritz values and their weights", alt, chart, inset="x", note=note))
    rows = [
        (side, k + 1, v, r)
        for side, pairs in (("largest", found.largest), ("smallest", found.smallest))
        for k, (v, r) in enumerate(_pairs(pairs.values, pairs.residuals))
    ]
    columns = ["end", "rank", "eigenvalue", "residual ‖Hv − λv‖"]
    section.tables.append(Table(f"{key}-eigenvalues", "Outermost eigenvalues", columns, rows, True))
    return section


def _by_probes(report: Report) -> str:
    """That the trace beside the spectrum is a rough one, and where a better one is."""
    found = report.spectrum
    if found is None or found.trace.status == "exact":
        return ""
    exact = any(row.name == "trace" and row.value.status == "exact" for row in report.rows)
    better = "; its exact value is among the measures" if exact else ""
    return f" (estimated from {found.density.nodes.shape[0]} probes{better})"


def _open_ends(bottom: Estimate, top: Estimate) -> Iterator[str]:
    """What the values at the two ends leave open."""
    if "not converged" in (bottom.status, top.status):
        yield "One end of the spectrum did not converge, so it may reach further out."
    elif not bottom.sign:
        yield "Whether the smallest lies below 0 cannot be told: its error is larger than its value."


def _pairs(a: Any, b: Any) -> Iterable[tuple[float, float]]:
    return zip(a.tolist(), b.tolist(), strict=True)


def _landscape(report: Report, key: str) -> Section:
    section = Section(f"{key}-landscape", "The loss around the minimum")
    surface = report.landscape
    if surface is None:
        section.texts.append(why_missing(report, "The landscape", "landscape"))
        return section
    axes = " and ".join(surface.directions)
    square = len(surface.steps) > 1
    if not square:
        chart = charts.landscape_line(surface)
        alt = f"Line chart of the loss along {axes}, with the parabola that the curvature predicts."
        text = "The dashed parabola is what slope and curvature at the minimum predict."
    else:
        chart = charts.landscape_contours(surface)
        alt = f"Contour map of the loss on the plane of {axes}."
        text = "Colours and lines are on a logarithmic scale. The cross is the model."
    curvature = ", ".join(number(float(value), 3) for value in surface.curvatures.diagonal())
    section.texts.append(
        f"Loss of {surface.samples:,} samples when the parameters move along {axes} (curvature {curvature}). {text}"
    )
    section.texts += list(surface.notes)
    section.figures.append(as_figure(f"{key}-landscape-chart", f"Loss along {axes}", alt, chart, square=square))
    return section


def _layers(report: Report, key: str) -> Section:
    section = Section(f"{key}-layers", "Which layers hold the trace")
    if not report.layers:
        section.texts.append(why_missing(report, "The share of each layer", "layers"))
        return section
    column = "share of the trace (%)"
    shares = {name: 100 * share for name, share in report.layers.items()}
    largest = max(shares, key=lambda name: shares[name])
    section.texts.append(
        f"Each bar is the share of one parameter tensor; the largest is {largest} with {number(shares[largest], 3)}%. "
        "These shares change when layers are rescaled, although the function does not."
    )
    chart = charts.bars({"layer": list(shares), column: list(shares.values())}, "layer", column)
    alt = (
        f"Bar chart of the shares of the trace by parameter tensor; largest: {largest}, {number(shares[largest], 3)}%."
    )
    section.figures.append(as_figure(f"{key}-layers-chart", "Shares of the trace", alt, chart))
    section.tables.append(
        Table(f"{key}-layers-table", "Shares of the trace", ["tensor", column], list(shares.items()), True)
    )
    return section


def _audit(report: Report, key: str) -> Section:
    section = Section(f"{key}-audit", "Audit: what the numbers are worth")
    audit = report.audit
    if audit is None or not audit.rows:
        section.texts.append(why_missing(report, "The audit", "audit"))
        return section
    section.texts += fewer_samples(report)
    section.texts.append(
        "Each column changes the parameters and keeps what the network computes or predicts. A measure that moves "
        "there (× the factor) describes the parametrisation as much as the model, so its size cannot tell two "
        "models apart; one that stays (=) under all those that keep the function can be compared between models, as "
        "far as these symmetries go. ‘?’: nothing can be said within the errors; ‘…’: an iteration did not converge."
    )
    section.texts.append(audit.scope)
    searched = [
        f"A short search for the worst {item.transform} moved ‘{item.measure}’ {at_least(item.factor)} at the same "
        f"{kept_by(item.transform)}, from {_journey(item)}; larger ones move it further."
        for item in audit.worst
        if math.isfinite(item.factor)
    ]
    section.texts += [f"The map below shows one draw of each. {searched[0]}", *searched[1:]] if searched else []
    changed = sum(row.verdict == "changes" for row in audit.rows)
    same = sum(row.verdict == "invariant" for row in audit.rows)
    alt = f"Heat map of measures against transforms: {changed} of {len(audit.rows)} change, {same} are invariant."
    section.figures.append(as_figure(f"{key}-audit-map", "Measures under transforms", alt, charts.audit_map(audit)))
    kept = [
        (name, EFFECTS.get(name, "").partition(";")[0], found.preserves, found.relative_difference, found.data)
        for name, found in audit.certificates.items()
    ]
    if kept:
        columns = ["transform", "what it does", "keeps", "largest relative difference of the outputs", "checked on"]
        section.tables.append(Table(f"{key}-certificates", "What each transform does and keeps", columns, kept))
    columns = ["measure", "transform", "before", "after", "after / before", "predicted ratio", "verdict", "note"]
    rows = [
        (
            r.measure,
            r.transform,
            estimate_cell(r.before),
            estimate_cell(r.after),
            r.ratio,
            r.predicted,
            r.verdict,
            r.note,
        )
        for r in audit.rows
    ]
    section.tables.append(Table(f"{key}-audit-table", "The audit in numbers", columns, rows, True))
    if audit.skipped:
        rows_ = list(audit.skipped.items())
        section.tables.append(Table(f"{key}-skipped", "Left out of the audit", ["name", "reason"], rows_, True))
    return section


def _journey(item: WorstFactor) -> str:
    """Where the search began and how far it got, in each direction in which it got anywhere."""
    values = zip((item.before, item.lowest, item.highest), item.errors, strict=True)
    before, lowest, highest = (with_limits(*value, typeset=True) for value in values)
    ends = [f"down to {lowest}"] if item.lowest < item.before else []
    ends += [f"up to {highest}"] if item.highest > item.before else []
    return f"{before} {' and '.join(ends)}"


def _measures(report: Report, key: str) -> Section:
    section = Section(f"{key}-measures", "All measures")
    if not report.rows:
        section.texts.append("No measure was taken.")
        return section
    columns = ["measure", "value", "95% interval", "kind", "larger is", "at the same outputs", "meaning"]
    rows = []
    moved = {} if report.audit is None else report.audit.moved()
    for row in report.rows:
        low, high = interval_of(report, row)
        why = row.value.reason if row.kind in ("undefined", "not converged") else ""
        meaning = f"{row.meaning} ({row.kind}: {why})" if why else row.meaning
        # the error of a subset is not known for every measure
        ends = f"{number(low, 3)} to {number(high, 3)}" if low < high else "unknown" if math.isnan(low) else "–"
        if row.kind == "converged" and not row.value.data_stderr and not math.isnan(low):
            ends = "–" if row.value.settled else f"±\u00a0{number((high - low) / 2, 2)}"
        ends = f"{number(row.value.value)} or more" if math.isinf(high) else ends
        rows.append((row.name, row.value.value, ends, row.kind, row.direction, fate(moved.get(row.name)), meaning))
    section.tables.append(Table(f"{key}-measures-table", "Measures", columns, rows))
    return section


def _how(report: Report, key: str) -> Section:
    section = Section(f"{key}-how", "How this was measured")
    if math.isfinite(report.seconds):
        section.texts.append(f"{report.extent}, measured in {number(report.seconds, 3)} s.")
    if report.settings:
        section.tables.append(
            Table(f"{key}-settings", "Settings and versions", ["setting", "value"], list(report.settings.items()))
        )
    if report.rows:
        columns = ["measure", "formula", "reference", "most expensive step"]
        columns += ["products", "seed", "seconds", "unchanged by"]
        rows = [
            (
                row.name,
                row.formula,
                row.reference,
                row.cost,
                row.value.matvecs,
                "–" if row.value.seed is None else str(row.value.seed),
                row.seconds,
                ", ".join(row.invariant_to) or "nothing",
            )
            for row in report.rows
        ]
        section.tables.append(Table(f"{key}-costs", "How each number was computed", columns, rows, True))
    if report.left_out:
        section.tables.append(left_out_table(report.left_out, key))
    if not (section.texts or section.tables):
        section.texts.append("The report does not say.")
    return section
