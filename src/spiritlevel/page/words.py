"""How the numbers of a report are worded, and what is said where there are none: shared by all sections."""

from __future__ import annotations

import math
from typing import Any

from spiritlevel import charts
from spiritlevel.page.parts import Cell, Figure, Table, number
from spiritlevel.results import Estimate, Fit, Report, ReportRow
from spiritlevel.results.formatting import with_error


def why_missing(report: Report, what: str, *names: str) -> str:
    """Why a part is not there, in a sentence."""
    verb = "were" if what.endswith("margins") else "was"
    for name, reason in report.left_out.items():
        if name in names:
            return f"{what} {verb} left out: {reason.rstrip('.')}."
    return f"{what} {verb} not measured."


def found_row(report: Report, *names: str) -> ReportRow | None:
    """The first of these measures that has a value."""
    rows = {row.name: row for row in report.rows}
    return next((rows[name] for name in names if name in rows and not math.isnan(rows[name].value.value)), None)


def leading(report: Report, family: str) -> tuple[str, ...]:
    """The measures that stand for their family, the best first; in a report of version 0.1 as they stand there."""
    if report.leads:
        return report.leads.get(family, ())
    return tuple(row.name for row in report.rows if row.family == family)


def interval_of(report: Report, row: ReportRow) -> tuple[float, float]:
    """The 95% interval, NaN where a subset was measured and its error is not known.

    JSON has one and the same null for an error that does not apply and for one that is not known, so a report that
    was read back says `None` for both.
    """
    subset = any(fit.population > fit.samples for name, fit in report.fits.items() if name == "train")
    if subset and row.value.data_stderr is None and row.needs_data:
        return math.nan, math.nan
    return row.interval


_WORTH = {
    "exact": "exact on the samples measured",
    "estimated": "estimated on the samples measured",
    "lower bound": "a lower bound: the best that an optimiser found",
    "not converged": "not converged, so its error is not known",
}


def certainty(report: Report, row: ReportRow) -> str:
    """How sure a number is, for the line below it."""
    low, high = interval_of(report, row)
    if row.kind in ("lower bound", "not converged"):
        return _WORTH[row.kind]
    if math.isnan(low):
        why = f": {row.subset_error}" if row.subset_error else ""
        return f"{row.kind} on the samples measured; for all data the error is not known{why}"
    if row.kind == "converged" and not row.value.data_stderr:
        return f"± {number((high - low) / 2, 2)}, the tolerance of its iteration"
    if low == high:
        return _WORTH.get(row.kind, row.kind)
    return f"95% interval {number(low, 3)} to {number(high, 3)}"


def accuracy_limits(fit: Fit) -> str:
    """The 95% interval in percent where a random subset was measured: even an accuracy of 100% has an error."""
    if math.isnan(fit.accuracy.value) or not 0 < fit.samples < fit.population:
        return "–" if math.isnan(fit.accuracy.value) else "exact"
    low, high = fit.accuracy_limits()
    return f"{number(100 * low, 3)} to {number(100 * high, 3)}"


def fit_columns(fits: dict[str, Fit]) -> tuple[str, ...]:
    """The column titles that go with `fit_cells`."""
    names = dict.fromkeys(name for name, _ in (fit.quality() for fit in fits.values()) if name)
    if not names:
        return ()
    name = " or ".join(names)
    return (f"{name} (%)" if name.startswith("accuracy") else name, "95% interval")


def fit_cells(fit: Fit) -> tuple[float | str, ...]:
    """How well a model fits, beside the loss: an accuracy in percent, or R², and its limits; empty if neither."""
    name, _ = fit.quality()
    if name == "R²":
        assert fit.r_squared is not None
        return fit.r_squared.value, "exact" if fit.samples == fit.population else "not known"
    return (100 * fit.accuracy.value, accuracy_limits(fit)) if name else ()


def estimate_text(estimate: Estimate) -> str:
    """A value and its 95% limits, where they are wider than the digits shown."""
    low, high = estimate.interval()
    text = number(estimate.value)
    if estimate.status in ("not converged", "lower bound"):
        return f"{text} (not converged)" if estimate.status == "not converged" else f"≥ {text}"
    if math.isnan(low):
        return text if math.isnan(estimate.value) else f"{text} ± unknown"
    half = (high - low) / 2
    if not half > (5e-5 if estimate.status == "converged" else 0.0) * abs(estimate.value):
        return text
    return with_error(estimate.value, half, 4, typeset=True)


def estimate_cell(estimate: Estimate) -> Cell:
    """The same for a table, whose bare numbers can be downloaded with all digits."""
    text = estimate_text(estimate)
    return estimate.value if text == number(estimate.value) else text


def fewer_samples(report: Report) -> list[str]:
    """Says that a part was computed on fewer samples than the measures, so its values may differ."""
    few = report.settings.get("audit, spectrum and landscape")
    return [f"Computed on {few}, so the values differ from those of all samples."] if few else []


def fate(factor: float | None) -> str:
    """What the audit saw of a measure where outputs or probabilities stayed: a factor is how far it got."""
    if factor is None:
        return "not tested"
    if math.isnan(factor):
        return "undecided"
    moves = "moves at least\u00a0×\u00a0"
    return "stays" if factor == 1 else "moves" if math.isinf(factor) else f"{moves}{number(factor, 3)}"


def left_out_table(reasons: dict[str, str], key: str) -> Table:
    """One row for all that was left out for the same reason."""
    rows = [
        (", ".join(name for name in reasons if reasons[name] == reason), reason)
        for reason in dict.fromkeys(reasons.values())
    ]
    return Table(f"{key}-left-out", "Left out, and why", ["what", "reason"], rows)


def as_figure(
    key: str, title: str, alt: str, chart: Any, *, square: bool = False, inset: str = "", note: str = ""
) -> Figure:
    """A chart without its colours, as wide as the page allows; its subtitle becomes a text.

    `inset` names the axes that leave room between the frame and the outermost marks, which would otherwise lie half
    outside.
    """
    whole = charts.specification(chart)
    spec = {name: value for name, value in whole.items() if name not in ("$schema", "config", "title")}
    heading = whole.get("title", {})
    said = heading.get("subtitle") or heading.get("text", "") if isinstance(heading, dict) else ""
    note = "; ".join(filter(None, (said, note)))
    for part in [spec, *spec.get("layer", [])]:
        for axis in inset:
            if "scale" in part.get("encoding", {}).get(axis, {}):
                part["encoding"][axis]["scale"] |= {"padding": 8}  # pixels
    if square or "width" not in spec:
        spec["width"] = "container"
    return Figure(key, title, alt, spec, f"{note[:1].upper()}{note[1:]}." if note else "", square)
