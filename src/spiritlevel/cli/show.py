"""Reports and comparisons on a terminal of 80 columns."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from spiritlevel.cli import base
from spiritlevel.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

    from spiritlevel.results import Audit, Checkpoints, Comparison, Estimate, Perturbation, Report, ReportRow, Result


def show(result: Result) -> None:
    """Whatever a command found."""
    from spiritlevel.results import Checkpoints, Comparison, Perturbation, Report

    if isinstance(result, Comparison):
        show_comparison(result)
    elif isinstance(result, Perturbation):
        show_perturbation(result)
    elif isinstance(result, Checkpoints):
        show_checkpoints(result)
    elif isinstance(result, Report):
        show_report(result)


def show_report(report: Report, console: Console | None = None) -> None:
    """The measures with their errors, what the audit did to each, and the headline."""
    from spiritlevel.results import fate, left_out_lines

    console = console or base.console()
    known = report.settings.get("samples", "an unknown number of")  # a report made by hand may lack it
    noun = "tokens" if report.settings.get("unit") else "samples"
    samples = f"{known} {noun} {'measured' if report.rows else 'given, nothing measured'}"
    console.print(f"{report.name}: {report.extent}, {samples}", markup=False)
    if report.partial:
        console.print(f"Not complete: {report.partial}.", style="bold red", markup=False)
    moved = report.audit.moved() if report.audit is not None else {}
    table = columns("measure", "value", "± (95%)", "larger is", "at the same\noutputs", right=(1, 2), whole=(4,))
    for row in report.rows:
        table.add_row(Name(row.name), _value(row.value), _limits(row), row.direction, fate(moved.get(row.name)))
    if report.rows:
        print_table(console, table)
    for names, reason in report.unknown_errors().items():
        console.print(f"± unknown: {names}: {reason}", style="dim", markup=False)
    for line in left_out_lines(report.left_out):
        console.print(line, style="dim", markup=False)
    for sentence in report.headline:
        console.print(sentence, style="bold", markup=False)


def _value(estimate: Estimate, digits: int = 4) -> str:
    """A value whose error is shown elsewhere, with the mark of one that is a bound or did not converge."""
    from spiritlevel.results import figure

    before, after = {"lower bound": ("≥ ", ""), "not converged": ("", " …")}.get(estimate.status, ("", ""))
    return f"{before}{figure(estimate.value, digits)}{after}"


def _limits(row: ReportRow) -> str:
    """How far the limits of the 95% interval are from the value, or the word for a number that has none."""
    low, high = row.interval
    if row.kind in ("undefined", "lower bound", "not converged"):
        return "" if row.kind == "undefined" else row.kind
    if math.isnan(low):
        return "unknown"
    known = low == high or (row.value.settled and not row.value.data_stderr)
    return row.kind if known else _apart(row.value.value, low, high)


def _apart(value: float, low: float, high: float) -> str:
    """One number, or two where the distances of the limits from the value differ by more than a quarter.

    >>> _apart(5.0, 4.0, 6.1), _apart(5.0, 4.0, 8.0), _apart(5.0, 5.5, 8.0)
    ('1', '-1 +3', '5.5 to 8')
    """
    from spiritlevel.results import figure

    below, above = value - low, high - value
    if min(below, above) < 0:  # resampled limits need not hold the value
        return f"{figure(low, 2)} to {figure(high, 2)}"
    if max(below, above) <= 1.25 * min(below, above):
        return figure((high - low) / 2, 2)
    return f"-{figure(below, 2)} +{figure(above, 2)}"


def show_comparison(comparison: Comparison) -> None:
    """The rows in their order and the advice."""
    from spiritlevel.results import figure, left_out_lines, times

    console = base.console()
    a, b = comparison.names
    samples = f"{comparison.samples:,} samples"
    if comparison.samples < comparison.population:
        samples += " drawn at random"
    title = f"{a} and {b} on {samples}; change: from {a} to {b}, {comparison.level:.0%} limits"
    console.print(title, markup=False)
    headings = ("\n".join(textwrap.wrap(name, _LABEL)) for name in (a, b))
    table = columns("measure", *headings, "change", "±", "favours", right=(1, 2, 3, 4))
    for row in comparison.rows:
        spread = "" if math.isnan(row.low) or row.low == row.high else _apart(row.difference, row.low, row.high)
        favours = {"a": a, "b": b, "equal": "neither", "no preference": "-"}.get(row.verdict, row.verdict)
        if row.verdict == "not comparable" and not math.isnan(row.factor):
            favours = f"(×{times(row.factor)})"
        if row.verdict == "undefined":
            table.add_row(Name(row.name), "", "", "undefined", "", "")
            continue
        sign = "+" if row.difference > 0 else ""
        change = sign + figure(row.difference, 3)
        values = (_value(value, 3) for value in (row.a, row.b))
        table.add_row(Name(row.name), *values, change, spread, Name(favours))
    print_table(console, table)
    for line in left_out_lines(comparison.left_out):
        console.print(line, style="dim", markup=False)
    for row in comparison.rows:
        if row.verdict == "undefined":
            console.print(f"Not defined here: {row.name} ({row.note.rstrip('.')}).", style="dim", markup=False)
    if any(row.verdict == "not comparable" for row in comparison.rows):
        legend = "(×n): not comparable; the audit moved it at least n-fold at the same outputs or probabilities"
        console.print(legend, style="dim", markup=False)
    for sentence in (comparison.advice, *comparison.under):
        console.print(sentence, style="bold", markup=False)


def show_perturbation(found: Perturbation) -> None:
    """What was predicted and what was measured, and the layers, the costliest first."""
    from spiritlevel.results import figure
    from spiritlevel.results.perturbations import PREDICTORS, limits_in_words

    console = base.console()
    console.print(f"{found.name}, {found.change}: {found.meaning}", markup=False)
    if found.layers:
        keys = ["second_order", "trace_times_square", "square", "measured"]
        heads = ("predicted", "Tr H·‖δ‖²", "‖δ‖²", "measured")
        table = columns("layer, changed alone", "size", *heads, right=range(1, 6))
        known = not any(math.isnan(row.measured) for row in found.layers)
        for row in sorted(found.layers, key=lambda row: -(row.measured if known else row.second_order)):
            numbers = ("" if math.isnan(getattr(row, key)) else figure(getattr(row, key), 3) for key in keys)
            table.add_row(Name(row.name), f"{row.size:,}", *numbers)
        print_table(console, table)
        ranks = {name: value for name, value in found.rank_agreement().items() if not math.isnan(value)}
        if ranks:
            said = ", ".join(f"{PREDICTORS[name]} {value:.2f}" for name, value in ranks.items())
            console.print(f"rank correlation with measured: {said}", style="dim", markup=False)
    console.print(f"the interval of the loss comes from: {limits_in_words(found.predicted)}", style="dim", markup=False)
    for note in found.notes:
        console.print(note, style="dim", markup=False)
    for sentence in found.sentences():
        console.print(sentence, style="bold", markup=False)


def show_checkpoints(found: Checkpoints) -> None:
    """A row for each checkpoint in the order given, what the changes do to each, and the best in words."""
    from spiritlevel.results import figure, left_out_lines

    console = base.console()
    after = [name for name in found.columns if ", " in name]
    for names in ([name for name in found.columns if name not in after], after):
        if not names:
            continue
        heads = ("\n".join(name.replace("_", " ").replace(", ", " ").split(" ")) for name in names)
        table = columns("checkpoint", *heads, right=range(1, len(names) + 1))
        values = [found.values(name) for name in names]
        for number, row in enumerate(found.rows):
            cells = ("" if math.isnan(column[number]) else figure(column[number], 3) for column in values)
            table.add_row(Name(row.name), *cells)
        print_table(console, table)
    if after:
        legend = "predicted, measured: what the change adds to the loss; flips: predictions that it changes"
        console.print(legend, style="dim", markup=False)
    for line in left_out_lines(found.left_out):
        console.print(line, style="dim", markup=False)
    for sentence in found.sentences():
        console.print(sentence, style="bold", markup=False)


def show_audit(audit: Audit) -> None:
    """Measures × transforms, and how far a search got."""
    from spiritlevel.results import in_short, left_out_lines, mark

    console = base.console()
    transforms = list(dict.fromkeys(row.transform for row in audit.rows))
    words = [name.replace("_", "\n").replace("batchnorm", "batch\nnorm") for name in transforms]
    table = columns("measure", "value", *words, right=(1,), whole=range(2, 2 + len(words)))
    for measure in dict.fromkeys(row.measure for row in audit.rows):
        rows = {row.transform: row for row in audit.rows if row.measure == measure}
        first = next(iter(rows.values()))
        cells = [mark(rows[name]) if name in rows else "" for name in transforms]
        table.add_row(Name(measure), in_short(first.before), *cells)
    print_table(console, table)
    console.print("= invariant, ×r changes by that factor, ? within the error, … not converged", style="dim")
    console.print(audit.scope, markup=False)
    for worst in audit.worst:
        console.print(str(worst), markup=False)
    for line in left_out_lines(audit.skipped):
        console.print(line, style="dim", markup=False)


class Name:
    """A name in a column that may be folded: it breaks after an underscore, a hyphen or a space, not inside a word."""

    def __init__(self, text: str) -> None:
        self.text = printable(text)

    def folded(self, width: int) -> str:
        """The name in lines of this width, longer only where a word is.

        >>> Name("adaptive_sharpness_average").folded(20).splitlines()
        ['adaptive_sharpness_', 'average']
        """
        lines = [""]
        for word in re.findall(r"[^\s_-]*[\s_-]?", self.text):
            if lines[-1] and len(lines[-1] + word.rstrip()) > width:
                lines.append("")
            lines[-1] += word
        return "\n".join(line.rstrip() for line in lines)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement
        from rich.text import Text

        widest = Measurement.get(console, options, Text(self.text)).maximum
        return Measurement(Measurement.get(console, options, Text(self.folded(1))).maximum, widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self.folded(options.max_width), overflow="fold")


def columns(*headings: str, right: Iterable[int] = (), whole: Iterable[int] = ()) -> Table:
    """An empty table; the columns `right` (numbers) and `whole` are never broken or cut, the others may be folded."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        kept = number in (*right, *whole)
        justify: Literal["left", "right"] = "right" if number in right else "left"
        table.add_column(Text(printable(heading)), justify=justify, no_wrap=kept, overflow="fold")
    return table


_LABEL = 14  # characters of a model's name in one line of a heading
_NARROWEST, _LONG = 8, 16  # characters that a folded column keeps: at least, and at most for the sake of a word


def print_table(console: Console, table: Table) -> None:
    """Show a table in the width of the console, or wider where columns that must stay whole do not fit into it.

    Rich would cut them, and a cut number is a wrong one; a terminal breaks a line that is too long.
    """
    from rich.measure import Measurement

    wide = console.options.update(width=10_000)
    needed = 2 * len(table.columns)
    for column in table.columns:
        sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
        if column.no_wrap:
            needed += max(size.maximum for size in sizes)
        else:
            needed += max(_NARROWEST, *(size.minimum for size in sizes if size.minimum <= _LONG))
    width = console.width
    console.width = max(width, needed)
    console.print(table)
    console.width = width
