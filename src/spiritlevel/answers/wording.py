"""What a report says in words: every sentence follows from its numbers, by the rules written down here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spiritlevel.errors import counted
from spiritlevel.measures import TRANSFORMS
from spiritlevel.results import (
    Audit,
    Estimate,
    Fit,
    Report,
    ReportRow,
    SampleTraces,
    at_least,
    figure,
    kept_by,
    median,
    ratio_of,
    times,
    with_error,
)
from spiritlevel.statistics.correlation import skewness

_TWICE = (
    "The outputs all lie in [0, 1] and sum to 1: they look like probabilities, but the loss expects logits. If the "
    "network ends in a softmax, measure it without one: otherwise every number here is that of a softmax taken twice."
)


def headline(report: Report, probabilities: bool) -> Iterator[str]:
    """What the numbers say; each sentence only if its numbers are there."""
    if report.partial:
        yield f"This report is not complete: {report.partial}."
    if probabilities:
        yield _TWICE
    fits = [_about_fit(name, fit) for name, fit in report.fits.items() if not math.isnan(fit.accuracy.value)]
    if fits:
        yield f"It classifies {' and '.join(fits)} correctly."
    explained = [_about_regression(name, fit) for name, fit in report.fits.items() if fit.quality()[0] == "R²"]
    if explained:
        yield f"R², the share of the targets' variance that it explains, is {' and '.join(explained)}."
    values = {row.name: row for row in report.rows}
    if "trace" in values and not math.isnan(values["trace"].value.value):
        yield about_trace(report, values["trace"])
        notes = () if report.traces is None else report.traces.notes
        if own := [note for note in notes if note not in report.settings.get("data", "")]:
            yield f"About the traces: {'; '.join(own)}."
    margin = report.margins
    if margin is not None:
        skew = skewness(margin.signed)
        shape = "" if math.isnan(skew) else f", their skewness {figure(skew, 3, typeset=True)}"
        mean, middle = (figure(float(of(margin.signed)), 3, typeset=True) for of in (torch.mean, median))
        whose = f"of the {_unit(report)}s measured " if _partly(report) else ""
        several = "" if margin.decisions is None else ", each the mean over a sample's decisions,"
        yield (
            f"The output margins{several} {whose}are {mean} on average and {middle} in the median{shape}."
            + about_correlation(report)
        )
    if report.audit is not None:
        yield from about_audit(report.audit)
    undefined = {row.name: row.value.reason.rstrip(".") for row in report.rows if row.kind == "undefined"}
    for reason in dict.fromkeys(undefined.values()):
        yield f"Not defined here: {', '.join(name for name in undefined if undefined[name] == reason)} ({reason})."


def _unit(report: Report) -> str:
    """What every sample of the report is: a sample, or a token."""
    return next((found.unit for found in (report.traces, report.margins) if found is not None), "sample")


def _about_fit(name: str, fit: Fit) -> str:
    noun = "tokens" if fit.of == "tokens" else "samples"
    share, samples = fit.accuracy.value, f"{fit.population:,} {name} {noun}"
    if fit.of not in ("samples", "tokens"):
        samples = f"{fit.of} of {samples}"
    if fit.population == 1:
        return f"{share:.1%} of the one {name} {noun[:-1]}"
    if fit.samples == fit.population:
        return f"{share:.1%} of the {samples}"
    low, high = fit.accuracy_limits()
    limits = f"95% interval {low:.1%} to {high:.1%}"
    limits = f"at least {low:.1%}" if share == 1 else f"at most {high:.1%}" if share == 0 else limits
    return f"{share:.1%} ({limits}) of the {samples} ({fit.samples:,} measured)"


def _about_regression(name: str, fit: Fit) -> str:
    few = f"{fit.samples:,} of the {fit.population:,}" if fit.samples < fit.population else f"the {fit.population:,}"
    return f"{fit.quality()[1]} on {few} {name} samples"


def _partly(report: Report) -> bool:
    """Whether a random subset of the data was measured."""
    return any(fit.population > fit.samples for name, fit in report.fits.items() if name == "train")


def about_trace(report: Report, row: ReportRow) -> str:
    """How curved the loss is, where, and how much more where the model errs."""
    found = row.value
    error = math.hypot(found.stderr, found.data_stderr or 0.0)
    whose = f" of the {_unit(report)}s measured" if math.isnan(error) else ""
    low, high = found.interval(data=not whose)
    text = f"The mean Hessian trace{whose} is {with_error(found.value, (high - low) / 2, 4, typeset=True)}"
    if report.layers and (whose or found.interval(data=True)[0] > 0):
        layer, share = max(report.layers.items(), key=lambda item: item[1])
        text += f", {share:.0%} of it in {layer}"
    return f"{text}{about_mistakes(report)}."


def about_mistakes(report: Report) -> str:
    """How curved the loss is where the model errs, as far as the errors of both means allow."""
    traces, found = report.traces, report.margins
    if traces is None or found is None or len(traces) != len(found) or not 0 < int(found.correct.sum()) < len(found):
        return ""
    if found.decisions is not None:  # a sample is rarely right or wrong as a whole
        return ""
    right, wrong = (_mean_trace(traces, where) for where in (found.correct, ~found.correct))
    count = int((~found.correct).sum())
    unit = _unit(report)
    where = f"at the {count:,} misclassified {unit}s" if count > 1 else f"at the one misclassified {unit}"
    open_question = f"; whether the loss is more or less curved {where} than at the correct ones cannot be told"
    low, high = ratio_of(wrong.interval(data=True), right.interval(data=True))
    if not low > 0 or right.value < 0 or (low <= 1 <= high and low < high):
        return open_question
    ratio = float(f"{wrong.value / right.value:.2g}")
    size = "" if ratio == 1 else f"{times(ratio)} times "
    limits = f" ({times(low)} to {times(high)} times, within the errors)" if high - low > 0.05 * ratio else ""
    return f"; the loss is {size}as curved {where} as at the correct ones{limits}"


def _mean_trace(traces: SampleTraces, where: Tensor) -> Estimate:
    """The mean over some of the samples, which make up the same share of the population."""
    count, share = int(where.sum()), int(where.sum()) / len(where)
    population = None if traces.population is None else max(count, round(traces.population * share))
    return dataclasses.replace(
        traces,
        values=traces.values[where],
        stderr=traces.stderr[where],
        targets=traces.targets[where],
        draws=None if traces.draws is None else traces.draws[where],
        probes=None,
        layers={},
        population=population,
    ).mean()


def about_correlation(report: Report) -> str:
    """Whether curvature and margin are related among correct samples, as far as that is certain."""
    found = report.correlations.get("trace and margin, correct samples")
    if found is None or math.isnan(found.r):
        return ""
    unit = _unit(report)
    rest = f", {counted(found.removed, 'outlier')} left out" if found.removed else ""
    size = f"(rank correlation {figure(found.spearman, 2, typeset=True)}, {found.n:,} {unit}s{rest})"
    if not found.low * found.high > 0 or found.spearman * found.r < 0:
        return f" Among correct {unit}s no relation between curvature and margin is certain {size}."
    way = "falls" if found.spearman < 0 else "grows"
    return f" Among correct {unit}s the curvature {way} with the margin {size}."


def about_audit(found: Audit) -> Iterator[str]:
    """What the audit moved, what it left, and what it did not try."""
    moved = found.moved()
    if not moved:
        reason = next((f": {text}" for name, text in found.skipped.items() if name in TRANSFORMS), "")
        yield f"What the parametrisation does to these numbers was not tested{reason.rstrip('.')}."
    if moved.get("trace", 1.0) > 1:
        size = at_least(moved["trace"])
        size = "to 0 or to the other sign" if math.isinf(moved["trace"]) else size
        by = found.moved_by("trace")
        yield (
            f"The symmetry {by} moves the trace {size} while the {kept_by(by)} stay the same, "
            "and no limit is known: its size does not tell two networks apart."
        )
    kept = [name for name, factor in moved.items() if factor == 1]
    if kept:
        tried = ", ".join(found.tried)
        yield f"None of the symmetries tried ({tried}) moved the following, though others might: {', '.join(kept)}."
    if moved and found.absent:
        count = len(found.absent)
        names = f"{count} other known symmetries do" if count > 1 else f"{found.absent[0]} does"
        yield f"{names} not apply to this network; the audit says why."
