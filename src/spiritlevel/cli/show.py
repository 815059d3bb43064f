"""Reports and comparisons on a terminal of 80 columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spiritlevel.results import Audit, Comparison, Report


def show_report(report: Report, console: Console | None = None) -> None:
    """The measures with their errors, what the audit did to each, and the headline."""
    from rich.console import Console

    from spiritlevel.measuring import moved_by, times

    console = console or Console(highlight=False)
    console.print(
        f"{report.name}: {report.parameters:,} parameters, {report.settings['samples']} samples measured", markup=False
    )
    if report.partial:
        console.print(f"Not complete: {report.partial}.", style="bold red", markup=False)
    moved = moved_by(report.audit) if report.audit is not None else {}
    judged = {row.measure for row in report.audit.rows} if report.audit is not None else set()
    table = _table("measure", "value", "± (95 %)", "larger is", "at the same\noutputs", right=(1, 2))
    for row in report.rows:
        low, high = row.interval
        interval = "unknown" if math.isnan(low) else "exact" if low == high else f"{(high - low) / 2:.2g}"
        value = f"{'≥ ' if row.kind == 'lower bound' else ''}{row.value.value:.4g}"
        same = f"moves ×{times(moved[row.name])}" if row.name in moved else "stays" if row.name in judged else ""
        if row.kind == "undefined":
            value, interval = "undefined", ""
        table.add_row(row.name, value, interval, row.direction, same)
    console.print(table)
    for name, reason in report.left_out.items():
        console.print(f"left out: {name}: {reason}", style="dim", markup=False)
    for sentence in report.headline:
        console.print(sentence, style="bold", markup=False)


def show_comparison(comparison: Comparison) -> None:
    """The rows in their order and the advice."""
    from rich.console import Console

    from spiritlevel.measuring import times

    console = Console(highlight=False)
    a, b = comparison.names
    console.print(f"{a} and {b} on {comparison.samples:,} samples", markup=False)
    table = _table("measure", a, b, "difference", f"± ({comparison.level:.0%})", "favours", right=(1, 2, 3, 4))
    for row in comparison.rows:
        spread = "" if math.isnan(row.low) or row.low == row.high else f"{(row.high - row.low) / 2:.2g}"
        favours = {"a": a, "b": b, "equal": "neither", "no preference": "-"}.get(row.verdict, row.verdict)
        if row.verdict == "not comparable" and not math.isnan(row.factor):
            favours = f"within ×{times(row.factor)}"
        if row.verdict == "undefined":
            table.add_row(row.name, "", "", "undefined", "", "")
            continue
        table.add_row(row.name, f"{row.a.value:.3g}", f"{row.b.value:.3g}", f"{row.difference:+.3g}", spread, favours)
    console.print(table)
    for name, reason in comparison.left_out.items():
        console.print(f"left out: {name}: {reason}", style="dim", markup=False)
    if any(row.verdict == "not comparable" for row in comparison.rows):
        legend = "within ×n: not comparable, as the audit moved it n-fold at the same outputs"
        console.print(legend, style="dim", markup=False)
    console.print(comparison.advice, style="bold", markup=False)


def show_audit(audit: Audit) -> None:
    """Measures × transforms, and how far a search went."""
    from rich.console import Console

    console = Console(highlight=False)
    transforms = list(dict.fromkeys(row.transform for row in audit.rows))
    table = _table("measure", "value", *(name.replace("_", "\n") for name in transforms), right=(1,))
    for measure in dict.fromkeys(row.measure for row in audit.rows):
        rows = {row.transform: row for row in audit.rows if row.measure == measure}
        first = next(iter(rows.values()))
        table.add_row(
            measure, f"{first.before.value:.4g}", *(_cell(rows[name].verdict, rows[name].ratio) for name in rows)
        )
    console.print(table)
    console.print("= invariant, ×r changes by that factor, ? within the error, … not converged", style="dim")
    for worst in audit.worst:
        console.print(str(worst), markup=False)
    for name, reason in audit.skipped.items():
        console.print(f"left out: {name}: {reason}", style="dim", markup=False)


def _cell(verdict: str, ratio: float) -> str:
    if verdict == "changes":
        return "changes" if math.isnan(ratio) else f"×{ratio:.3g}"
    return {"invariant": "=", "unstable": "?"}.get(verdict, "…")


def _table(*headings: str, right: tuple[int, ...]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if number in right else "left", no_wrap=True)
    return table
