"""A report, several reports or comparisons as one HTML file that needs no network, now or later."""

from __future__ import annotations

import functools
import hashlib
import html
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import resources
from importlib.metadata import version
from typing import Any

import numpy as np
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spiritlevel import __version__, charts
from spiritlevel.errors import InputError, counted, printable
from spiritlevel.page.parts import (
    Card,
    Cell,
    Figure,
    Gallery,
    Section,
    Sheet,
    Table,
    Thumbnail,
    number,
    packed,
    sheet,
)
from spiritlevel.results import (
    Comparison,
    ComparisonRow,
    Estimate,
    Fit,
    Report,
    ReportRow,
    Result,
    WorstFactor,
    largest,
)
from spiritlevel.results.training import SuspiciousSamples, TrainingCurves
from spiritlevel.storage import cache_folder, write_atomically

__all__ = ["notebook", "page"]

# The page asks for nothing, and this line makes the browser see to it. Vega compiles its expressions: 'unsafe-eval'.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

_SHOWN = Report | Comparison | SuspiciousSamples | TrainingCurves


def page(*results: Result) -> str:
    """One self-contained HTML page about one model, several models, comparisons of two, or a training.

    Everything that came from outside (names of classes, files and layers) is escaped. Charts are drawn by Vega from
    data inside the file. Of very many samples all are counted and a part is drawn; the page says how many.

    >>> print(page(Report("my net", ()))[:15])
    <!DOCTYPE html>
    """
    from spiritlevel.page import training

    if not results or not all(isinstance(result, _SHOWN) for result in results):
        kinds = ", ".join(type(result).__name__ for result in results) or "nothing"
        raise InputError(f"page shows reports and comparisons, got {kinds}.")
    reports = [result for result in results if isinstance(result, Report)]
    runs: list[dict[str, Any]] = []
    if len(reports) > 1:
        runs.append(_run("side", "Side by side", [_side_by_side(reports)]))
    numbers = {Report: itertools.count(), Comparison: itertools.count(), Result: itertools.count()}
    for result in results:  # in the order in which they were given
        if isinstance(result, SuspiciousSamples):
            key = f"s{next(numbers[Result])}"
            runs.append(
                _run(key, result.name, list(training.suspects(result, key)), pictures=training.pictures_of(result))
            )
        elif isinstance(result, TrainingCurves):
            key = f"t{next(numbers[Result])}"
            runs.append(_run(key, result.name, list(training.curves(result, key))))
        elif isinstance(result, Comparison):
            key = f"c{next(numbers[Comparison])}"
            runs.append(_run(key, " and ".join(result.names), list(_comparison(result, key))))
        elif isinstance(result, Report):
            key, pictures = f"r{next(numbers[Report])}", _sheet(result)
            sections = list(_report(result, key, pictures))
            runs.append(_run(key, result.name, sections, result.partial, pictures, _samples(result)))
    figures = {figure.key: figure.spec for run in runs for section in run["sections"] for figure in section.figures}
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=_title(runs),
            runs=runs,
            policy=_POLICY,
            refresh=min((each.refresh for each in results if isinstance(each, TrainingCurves)), default=0),
            style=Markup(_static("page.css")),
            vega=Markup(_vega()),
            script=Markup(_static("page.js")),
            data=_json(
                {
                    "charts": figures,
                    "themes": {"light": charts.theme(), "dark": charts.theme(dark=True)},
                    "runs": {run["key"]: {"samples": run["samples"], "sheet": _places(run["sheet"])} for run in runs},
                }
            ),
            version=__version__,
        )
    )


def _title(runs: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(run["title"] for run in runs if run["key"] != "side"))
    return " · ".join(names) if len(names) < 3 else f"{len(names)} runs"


def notebook(result: Result) -> str:
    """The page inside a notebook's cell, in a frame of its own that can neither see nor style the notebook."""
    return (
        '<iframe sandbox="allow-scripts allow-downloads" style="width:100%;height:46rem;border:1px solid #8886" '
        f'title="spiritlevel" srcdoc="{html.escape(page(result))}"></iframe>'
    )


def _run(
    key: str,
    title: str,
    sections: list[Section],
    partial: str = "",
    pictures: Sheet | None = None,
    samples: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "key": key,
        "title": title,
        "sections": sections,
        "partial": partial,
        "sheet": pictures,
        "samples": samples or {},
    }


# ---------------------------------------------------------------------------------------------------------------------
# The file


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("spiritlevel.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,  # what is Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment


def _static(name: str) -> str:
    return resources.files("spiritlevel.page").joinpath("static", name).read_text(encoding="utf-8")


# What the library bundles, by its version. The cache folder is no part of the program: what lies there goes into every
# page, so it is compared with this before it does. A test says which line is missing.
_BUNDLES = {"1.9.0.post1": "373b1f84072b31010f15ceb787be6b415c53936411aae267c8c2b2b6ccde46e7"}


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, kept in the cache folder because bundling takes seconds.

    What is kept counts only if it is what the library would bundle; of a version that is not known here nothing is
    kept. A damaged file is replaced.
    """
    release = version("vl-convert-python")
    file, pin = cache_folder() / f"vega-{release}.js", _BUNDLES.get(release)
    with suppress(OSError):
        kept = file.read_bytes()
        if hashlib.sha256(kept).hexdigest() == pin:
            return kept.decode("utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if hashlib.sha256(script.encode("utf-8")).hexdigest() == pin:
        with suppress(OSError):  # a read-only home is no reason not to have a page
            write_atomically(file, script)
    return script


def _json(value: Any) -> Markup:
    """JSON that no browser can mistake for markup, wherever it stands in the file."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _places(pictures: Sheet | None) -> dict[str, Any] | None:
    if pictures is None:
        return None
    return {"columns": pictures.columns, "width": pictures.width, "height": pictures.height, "places": pictures.places}


# ---------------------------------------------------------------------------------------------------------------------
# One report


def _report(report: Report, key: str, pictures: Sheet | None) -> Iterator[Section]:
    yield _summary(report, key)
    yield _trace_against_margin(report, key)
    yield _pictures(report, key, pictures)
    yield _margins(report, key)
    yield _spectrum(report, key)
    yield _landscape(report, key)
    yield _layers(report, key)
    yield _audit(report, key)
    yield _measures(report, key)
    yield _how(report, key)


def _missing(report: Report, what: str, *names: str) -> str:
    """Why a part is not there, in a sentence."""
    for name, reason in report.left_out.items():
        if name in names:
            return f"{what} was left out: {reason.rstrip('.')}."
    return f"{what} was not measured."


def _find(report: Report, *names: str) -> ReportRow | None:
    rows = {row.name: row for row in report.rows}
    return next((rows[name] for name in names if name in rows and not math.isnan(rows[name].value.value)), None)


def _interval(report: Report, row: ReportRow) -> tuple[float, float]:
    """The 95 % interval, not a number where a subset was measured and its error is not known.

    JSON knows one null for an error that does not apply and for one that is not known, so a report that was read
    back says `None` for both; only a norm of the weights does not depend on the samples.
    """
    subset = any(fit.population > fit.samples for name, fit in report.fits.items() if name == "train")
    if subset and row.value.data_stderr is None and row.family != "norm":
        return math.nan, math.nan
    return row.interval


_WORTH = {
    "exact": "exact on the samples measured",
    "estimated": "estimated on the samples measured",
    "lower bound": "a lower bound: the best that an optimiser found",
    "not converged": "not converged, so its error is not known",
}


def _certainty(report: Report, row: ReportRow) -> str:
    low, high = _interval(report, row)
    if row.kind in ("lower bound", "not converged"):
        return _WORTH[row.kind]
    if math.isnan(low):
        why = f": {row.subset_error}" if row.subset_error else ""
        return f"{row.kind} on the samples measured; for all data the error is not known{why}"
    if row.kind == "converged" and not row.value.data_stderr:
        return f"± {number((high - low) / 2, 2)}, to which an iteration found it"
    if low == high:
        return _WORTH.get(row.kind, row.kind)
    return f"95 % interval {number(low, 3)} to {number(high, 3)}"


def _card(report: Report, label: str, names: tuple[str, ...]) -> Card:
    row = _find(report, *names)
    if row is None:
        return Card(label, "–", "", _missing(report, "It", *names))
    meaning = f"{row.meaning[:1].upper()}{row.meaning[1:]}. Larger is {row.direction}."
    bound = "≥ " if row.kind == "lower bound" else ""
    return Card(label, bound + number(row.value.value), _certainty(report, row), meaning)


def _artefact_card(report: Report) -> Card:
    label = "How much of it is parametrisation"
    factors = {} if report.audit is None else {item.measure: item.factor for item in report.audit.worst}
    known = {name: factor for name, factor in factors.items() if math.isfinite(factor)}
    if not known:
        return Card(label, "–", "", _missing(report, "The audit's search", "audit"))
    name = next((name for name in ("trace", "largest_eigenvalue") if name in known), next(iter(known)))
    return Card(
        label,
        f"× {number(known[name], 3)}",
        "at least; found by a short search",
        f"Scaling layers moved ‘{name}’ this far while every output stayed the same. A larger scaling moves it "
        "further, so its size alone does not tell two models apart.",
    )


def _summary(report: Report, key: str) -> Section:
    # the banner above has said already that a report is partial
    lead, *rest = [text for text in report.headline if not (report.partial and report.partial in text)] or [""]
    section = Section(f"{key}-summary", "Summary", [lead] if lead else [], notes=rest)
    section.cards = [
        _card(report, "How sharp", ("trace", "largest_eigenvalue", "frobenius_norm")),
        _card(report, "How wide the margins", ("margin_q50", "margin_mean", "input_distance")),
        _artefact_card(report),
    ]
    if report.fits:
        columns = ["data", "samples", "of", "accuracy (%)", "95 % interval", "loss"]
        rows = [
            (name, fit.samples, fit.population, 100 * fit.accuracy.value, _accuracy_limits(fit), fit.loss.value)
            for name, fit in report.fits.items()
        ]
        section.tables.append(Table(f"{key}-fit", "How well it fits", columns, rows))
    if not report.headline:
        section.texts.append(f"{report.name} has {report.parameters:,} parameters.")
    return section


def _accuracy_limits(fit: Fit) -> str:
    """The 95 % interval in percent where a random subset was measured: an accuracy of 100 % has an error, too."""
    if math.isnan(fit.accuracy.value) or not 0 < fit.samples < fit.population:
        return "–" if math.isnan(fit.accuracy.value) else "exact"
    low, high = fit.accuracy_limits()
    return f"{number(100 * low, 3)} to {number(100 * high, 3)}"


def _sample_names(report: Report, count: int) -> list[int]:
    """The places of the samples in the data, which is how a reader can find them again."""
    return list(range(count)) if report.indices is None else [int(index) for index in report.indices.tolist()]


def _class(report: Report, target: float) -> str:
    known = 0 <= target < len(report.classes) and float(target).is_integer()
    return report.classes[int(target)] if known else number(target)


def _both(report: Report) -> bool:
    return report.traces is not None and report.margins is not None and len(report.traces) == len(report.margins)


def _trace_against_margin(report: Report, key: str) -> Section:
    section = Section(f"{key}-samples", "Every sample: trace against margin")
    traces, margins = report.traces, report.margins
    if traces is None or margins is None or not _both(report) or not len(traces):
        section.texts.append(_missing(report, "The trace or the margin of every sample", "traces", "trace", "margins"))
        return section
    count = len(traces)
    names = _sample_names(report, count)
    columns: dict[str, Any] = {
        "sample": [str(name) for name in names],
        "label": [_class(report, target) for target in margins.targets.tolist()],
        "output margin": margins.signed,
        "Hessian trace": traces.values,
        "prediction": ["correct" if correct else "wrong" for correct in margins.correct.tolist()],
    }
    hover = ["sample", "label"]
    if report.predicted is not None:
        columns["predicted"] = [_class(report, target) for target in report.predicted.tolist()]
        hover.append("predicted")
    chart = charts.scatter(
        columns,
        "output margin",
        "Hessian trace",
        colour="prediction",
        order=["correct", "wrong"],
        hover=hover,
        log_y=True,
        keep=[] if report.pictures is None else report.pictures.indices.tolist(),
    )
    wrong = int((~margins.correct).sum())
    section.texts.append(
        f"One point is one of {counted(count, 'sample')}, {wrong:,} of which are classified wrongly (margin below 0). "
        "A sample with a small margin lies near a decision boundary, one with a large trace makes the minimum sharp. "
        "Point at a sample to see it."
    )
    section.notes += [_correlation(name, found) for name, found in report.correlations.items()]
    alt = f"Scatter plot of the Hessian trace against the output margin of {count:,} samples, coloured by prediction."
    section.figures.append(_figure(f"{key}-scatter", "Trace against margin", alt, chart, inset="xy"))
    section.samples = key
    return section


def _correlation(name: str, found: Any) -> str:
    if math.isnan(found.r):
        return f"Correlation of {name}: undefined, {found.reason}."
    r, low, high, rank = (
        f"{value:.3f}".replace("-", "−") for value in (found.r, found.low, found.high, found.spearman)
    )
    return (
        f"Correlation of {name}: r = {r} ({found.level:.0%} interval {low} to {high}), rank correlation {rank}, "
        f"over {counted(found.n, 'sample')}; {counted(found.removed, 'outlier')} removed."
    )


def _samples(report: Report) -> dict[str, Any]:
    """The per-sample columns for download."""
    if not _both(report) or report.traces is None or report.margins is None:
        return {}
    traces, margins = report.traces, report.margins
    columns: dict[str, Any] = {"sample": _sample_names(report, len(traces)), "target": margins.targets.numpy()}
    if report.predicted is not None:
        columns["predicted"] = report.predicted.numpy()
    columns["correct"] = margins.correct.numpy().astype(np.int32)
    columns["signed_output_margin"] = margins.signed.numpy()
    columns["softmax_margin"] = margins.softmax.numpy()
    columns["hessian_trace"] = traces.values.numpy()
    if not traces.exact:
        columns["hessian_trace_stderr"] = traces.stderr.numpy()
    return {name: packed(column) for name, column in columns.items()}


def _sheet(report: Report) -> Sheet | None:
    if report.pictures is None or not len(report.pictures.indices):
        return None
    count = int(report.pictures.indices.max()) + 1
    names = _sample_names(report, count)
    return sheet(report.pictures.images.numpy(), [names[k] for k in report.pictures.indices.tolist()])


def _pictures(report: Report, key: str, pictures: Sheet | None) -> Section:
    section = Section(f"{key}-pictures", "Samples to look at")
    if pictures is None or report.pictures is None:
        section.texts.append("There are no pictures: the samples are no images, or were not kept.")
        return section
    for group, places in report.pictures.groups.items():
        if group == "others":  # shown on the chart of all samples only
            continue
        thumbnails = tuple(_thumbnail(report, place) for place in places)
        section.galleries.append(Gallery(f"{group[:1].upper()}{group[1:]}", thumbnails))
    return section


def _thumbnail(report: Report, place: int) -> Thumbnail:
    assert report.pictures is not None
    row = int(report.pictures.indices[place])
    lines = []
    if report.margins is not None and row < len(report.margins):
        kind = "" if report.classes else "class "  # a number alone says nothing
        label = kind + _class(report, report.margins.targets[row].item())
        found = None if report.predicted is None else kind + _class(report, report.predicted[row].item())
        lines.append(label if found in (None, label) else f"{label}, taken for {found}")
        lines.append(f"margin {number(float(report.margins.signed[row]), 3)}")
    if report.traces is not None and row < len(report.traces):
        lines.append(f"trace {number(float(report.traces.values[row]), 3)}")
    return Thumbnail(place, _sample_names(report, row + 1)[row], tuple(lines))


def _margins(report: Report, key: str) -> Section:
    section = Section(f"{key}-margins", "Margins")
    for name, margins in (("train", report.margins), ("test", report.test_margins)):
        if margins is None or not len(margins):
            continue
        row = _find(report, "margin_skewness") if name == "train" else None
        skewness = None if row is None else row.value.value  # as measured, if it was
        chart = charts.distribution(margins.signed, "output margin", skewness=skewness)
        low, middle, high = np.quantile(margins.signed.numpy(), [0.1, 0.5, 0.9])
        text = f"median {number(float(middle), 3)}, 80 % between {number(float(low), 3)} and {number(float(high), 3)}"
        alt = f"Histogram with box plot of {len(margins):,} output margins ({name} data): {text}."
        section.figures.append(_figure(f"{key}-margins-{name}", f"Output margins, {name} data", alt, chart))
    if section.figures:
        section.texts.append(
            "The output margin of a sample is the output of its own class minus the largest of the others. Below 0 it "
            "is classified wrongly. The box holds the middle half of the samples, its line the median."
        )
    else:
        section.texts.append(_missing(report, "The margins", "margins"))
    return section


def _spectrum(report: Report, key: str) -> Section:
    section = Section(f"{key}-spectrum", "Spectrum of the Hessian")
    found = report.spectrum
    if found is None:
        section.texts.append(_missing(report, "The spectrum", "spectrum"))
        return section
    top, bottom = found.largest.outermost(), found.smallest.outermost()
    ends = f"{_estimate(bottom)} to {_estimate(top)}"
    unsure = list(_open_ends(bottom, top))
    section.texts.append(
        " ".join(
            [
                *_few(report),
                f"The {found.size:,} eigenvalues reach from {ends}; their sum, the trace, "
                f"is {_estimate(found.trace)}, the root of their summed squares {_estimate(found.frobenius_norm)}. Few "
                "large values and very many near 0 are usual: the loss is flat in most directions.",
                *unsure,
            ]
        )
    )
    spectrum = found.density
    curve = spectrum.density()
    probes = "all eigenvalues" if spectrum.exact else f"{spectrum.nodes.shape[0]} probes"
    alt = f"Smoothed density of the eigenvalues from {ends} on a logarithmic axis, {probes}."
    section.figures.append(_figure(f"{key}-density", "Density of eigenvalues", alt, charts.density(curve)))
    alt = f"Stem plot of Ritz values against their weights on a logarithmic axis, {probes}."
    chart = charts.ritz_values(spectrum, floor=1e-12)
    note = "One stem is one Ritz value of a probe, its height the share of the spectrum that it stands for"
    section.figures.append(_figure(f"{key}-ritz", "Ritz values and their weights", alt, chart, inset="x", note=note))
    rows = [
        (side, k + 1, v, r)
        for side, pairs in (("largest", found.largest), ("smallest", found.smallest))
        for k, (v, r) in enumerate(_pairs(pairs.values, pairs.residuals))
    ]
    columns = ["end", "rank", "eigenvalue", "residual ‖Hv − λv‖"]
    section.tables.append(Table(f"{key}-eigenvalues", "Outermost eigenvalues", columns, rows, True))
    return section


def _open_ends(bottom: Estimate, top: Estimate) -> Iterator[str]:
    """What the numbers of both ends leave open."""
    if "not converged" in (bottom.status, top.status):
        yield "An end of it did not converge, so that more of it may lie further out."
    elif not bottom.sign:
        yield "Whether the smallest of them lies below 0 cannot be told: its error is larger than its value."


def _pairs(a: Any, b: Any) -> Iterable[tuple[float, float]]:
    return zip(a.tolist(), b.tolist(), strict=True)


def _estimate(estimate: Estimate) -> str:
    """A value and its 95 % limits, where they are wider than the digits shown."""
    low, high = estimate.interval()
    text = number(estimate.value)
    if estimate.status in ("not converged", "lower bound"):
        return f"{text} (not converged)" if estimate.status == "not converged" else f"≥ {text}"
    if math.isnan(low):
        return text if math.isnan(estimate.value) else f"{text} ± unknown"
    half = (high - low) / 2
    if not half > (5e-5 if estimate.status == "converged" else 0.0) * abs(estimate.value):
        return text
    digits = math.ceil(math.log10(max(abs(estimate.value) / half, 1))) + 1  # no more than the error leaves
    return f"{number(estimate.value, min(4, max(2, digits)))} ± {number(half, 2)}"


def _cell(estimate: Estimate) -> Cell:
    """The same for a table, whose bare numbers can be downloaded with all digits."""
    text = _estimate(estimate)
    return estimate.value if text == number(estimate.value) else text


def _few(report: Report) -> list[str]:
    """That a part was computed on fewer samples than the measures, whose values may differ from it."""
    few = report.settings.get("audit, spectrum and landscape")
    return [f"Computed on {few}, so the values differ from those of all samples."] if few else []


def _landscape(report: Report, key: str) -> Section:
    section = Section(f"{key}-landscape", "The loss around the minimum")
    surface = report.landscape
    if surface is None:
        section.texts.append(_missing(report, "The landscape", "landscape"))
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
    section.figures.append(_figure(f"{key}-landscape-chart", f"Loss along {axes}", alt, chart, square=square))
    return section


def _layers(report: Report, key: str) -> Section:
    section = Section(f"{key}-layers", "Which layers hold the trace")
    if not report.layers:
        section.texts.append(_missing(report, "The share of each layer", "layers"))
        return section
    column = "share of the trace (%)"
    shares = {name: 100 * share for name, share in report.layers.items()}
    largest = max(shares, key=lambda name: shares[name])
    section.texts.append(
        f"Each bar is the share of one parameter tensor; the largest is {largest} with {number(shares[largest], 3)} %. "
        "These shares change when layers are rescaled at the same function."
    )
    chart = charts.bars({"layer": list(shares), column: list(shares.values())}, "layer", column)
    alt = (
        f"Bar chart of the shares of the trace by parameter tensor; largest: {largest}, {number(shares[largest], 3)} %."
    )
    section.figures.append(_figure(f"{key}-layers-chart", "Shares of the trace", alt, chart))
    section.tables.append(
        Table(f"{key}-layers-table", "Shares of the trace", ["tensor", column], list(shares.items()), True)
    )
    return section


def _audit(report: Report, key: str) -> Section:
    section = Section(f"{key}-audit", "Audit: what the numbers are worth")
    audit = report.audit
    if audit is None or not audit.rows:
        section.texts.append(_missing(report, "The audit", "audit"))
        return section
    section.texts += _few(report)
    section.texts.append(
        "Each column changes the parameters and keeps what the network computes or predicts. A measure that moves "
        "there (× the factor) describes the parametrisation as much as the model, and its size tells no two models "
        "apart; one that stays (=) can be compared between models. ‘?’: nothing can be said within the errors; ‘…’: an "
        "iteration did not converge."
    )
    if not audit.moved():
        section.texts.append("Not tested: none of the transforms that keep the outputs applies to this network.")
    section.texts += [
        f"The map below shows one fixed scaling. A short search for a worse one moved ‘{item.measure}’ "
        f"at least {number(item.factor, 3)}-fold at the same outputs, from {_journey(item)}; larger scalings move it "
        "further."
        for item in audit.worst
        if math.isfinite(item.factor)
    ]
    changed = sum(row.verdict == "changes" for row in audit.rows)
    same = sum(row.verdict == "invariant" for row in audit.rows)
    alt = f"Heat map of measures against transforms: {changed} of {len(audit.rows)} change, {same} are invariant."
    section.figures.append(_figure(f"{key}-audit-map", "Measures under transforms", alt, charts.audit_map(audit)))
    columns = ["measure", "transform", "before", "after", "after / before", "predicted ratio", "verdict", "note"]
    rows = [
        (r.measure, r.transform, _cell(r.before), _cell(r.after), r.ratio, r.predicted, r.verdict, r.note)
        for r in audit.rows
    ]
    section.tables.append(Table(f"{key}-audit-table", "The audit in numbers", columns, rows, True))
    kept = [
        (name, found.preserves, found.relative_difference, found.data) for name, found in audit.certificates.items()
    ]
    if kept:
        columns = ["transform", "keeps", "largest relative difference of the outputs", "checked on"]
        section.tables.append(Table(f"{key}-certificates", "What each transform keeps", columns, kept, True))
    if audit.skipped:
        rows_ = list(audit.skipped.items())
        section.tables.append(Table(f"{key}-skipped", "Left out of the audit", ["name", "reason"], rows_, True))
    return section


def _journey(item: WorstFactor) -> str:
    """Where the search began and how far it came, in each direction in which it came anywhere."""
    ends = [f"down to {number(item.lowest)}"] if item.lowest < item.before else []
    ends += [f"up to {number(item.highest)}"] if item.highest > item.before else []
    return f"{number(item.before)} {' and '.join(ends)}"


def _fate(factor: float | None) -> str:
    """What the audit saw of a measure where the outputs stayed the same: a factor is as far as it went, no limit."""
    if factor is None:
        return "not tested"
    if math.isnan(factor):
        return "undecided"
    moves = "moves at least\u00a0×\u00a0"
    return "stays" if factor == 1 else "moves" if math.isinf(factor) else f"{moves}{number(factor, 3)}"


def _measures(report: Report, key: str) -> Section:
    section = Section(f"{key}-measures", "All measures")
    if not report.rows:
        section.texts.append("No measure was taken.")
        return section
    columns = ["measure", "value", "95 % interval", "kind", "larger is", "at the same outputs", "meaning"]
    rows = []
    moved = {} if report.audit is None else report.audit.moved()
    for row in report.rows:
        low, high = _interval(report, row)
        why = row.value.reason if row.kind in ("undefined", "not converged") else ""
        meaning = f"{row.meaning} ({row.kind}: {why})" if why else row.meaning
        # the error of a subset is not known for every measure
        ends = f"{number(low, 3)} to {number(high, 3)}" if low < high else "unknown" if math.isnan(low) else "–"
        if row.kind == "converged" and not row.value.data_stderr:
            ends = "–" if row.value.settled else f"±\u00a0{number((high - low) / 2, 2)}"
        ends = f"{number(row.value.value)} or more" if math.isinf(high) else ends
        rows.append((row.name, row.value.value, ends, row.kind, row.direction, _fate(moved.get(row.name)), meaning))
    section.tables.append(Table(f"{key}-measures-table", "Measures", columns, rows))
    return section


def _how(report: Report, key: str) -> Section:
    section = Section(f"{key}-how", "How this was measured")
    if math.isfinite(report.seconds):
        section.texts.append(f"{report.parameters:,} parameters, measured in {number(report.seconds, 3)} s.")
    if report.settings:
        section.tables.append(
            Table(f"{key}-settings", "Settings and versions", ["setting", "value"], list(report.settings.items()))
        )
    if report.rows:
        columns = ["measure", "formula", "reference", "dearest step", "products", "seed", "seconds", "unchanged by"]
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
        section.tables.append(_left_out(report.left_out, key))
    if not (section.texts or section.tables):
        section.texts.append("The report does not say.")
    return section


def _left_out(reasons: dict[str, str], key: str) -> Table:
    """One row for all that was left out for the same reason."""
    rows = [
        (", ".join(name for name in reasons if reasons[name] == reason), reason)
        for reason in dict.fromkeys(reasons.values())
    ]
    return Table(f"{key}-left-out", "Left out, and why", ["what", "reason"], rows)


def _figure(
    key: str, title: str, alt: str, chart: Any, *, square: bool = False, inset: str = "", note: str = ""
) -> Figure:
    """A chart without its colours, as wide as the page allows; what it says below its title becomes a text.

    `inset` names the axes that leave room between the frame and the outermost marks, which lie half outside without.
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


# ---------------------------------------------------------------------------------------------------------------------
# Several


def _comparison(found: Comparison, key: str) -> Iterator[Section]:
    a, b = found.names
    section = Section(f"{key}-advice", "Which to trust", [found.advice], notes=list(found.reasons))
    favours = {"a": a, "b": b, "equal": "neither", "no interval": "none, as the difference has no interval"}
    decisive = {row.name: row for row in found.rows if row.verdict in ("a", "b", "equal")}
    for name in ("accuracy", "input_distance", "loss"):  # what the advice rests on
        if name in decisive:
            row = decisive[name]
            section.cards.append(
                Card(
                    row.name.replace("_", " ").capitalize(),
                    f"{number(row.a.value, 3)} → {number(row.b.value, 3)}",
                    f"for {favours[row.verdict]}; difference {_difference(row)}",
                    f"{row.meaning[:1].upper()}{row.meaning[1:]}, {a} → {b}.",
                )
            )
    columns = ["measure", a, b, f"difference ({found.level:.0%} interval)", "favours"]
    rows = []
    for row in found.rows:
        verdict = favours.get(row.verdict, row.verdict) + (f": {row.note}" if row.note else "")
        rows.append((row.name, _cell(row.a), _cell(row.b), _difference(row), verdict))
    section.tables.append(Table(f"{key}-comparison", f"{a} and {b} on {found.samples:,} samples", columns, rows))
    columns = ["measure", "difference", "low", "high", "interval from", f"ratio {b} / {a}", "moved at least"]
    details = [(row.name, row.difference, row.low, row.high, row.how, row.ratio, row.factor) for row in found.rows]
    section.tables.append(Table(f"{key}-details", "Differences, intervals and ratios", columns, details, True))
    yield section
    if found.margins is not None:
        first, second = found.margins
        change = second.signed - first.signed
        section = Section(f"{key}-pairs", "Sample by sample")
        section.texts.append(_wider(found, change))
        chart = charts.distribution(change, f"margin of {b} minus margin of {a}")
        alt = f"Histogram of the differences of the margins, {b} minus {a}, of {len(change):,} samples."
        section.figures.append(_figure(f"{key}-pairs-chart", "Differences of the margins", alt, chart))
        yield section
    section = Section(f"{key}-how", "How this was measured")
    if found.settings:
        rows_ = list(found.settings.items())
        section.tables.append(Table(f"{key}-settings", "Settings and versions", ["setting", "value"], rows_))
    if found.left_out:
        section.tables.append(_left_out(found.left_out, key))
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
        yield f"{kind} accuracy (%)", ["–" if fit is None else _accuracy(fit) for fit in fits]
        yield f"{kind} loss", ["–" if fit is None else number(fit.loss.value) for fit in fits]
    yield "parameters", [f"{report.parameters:,}" for report in reports]


def _accuracy(fit: Fit) -> str:
    limits = _accuracy_limits(fit)
    text = number(100 * fit.accuracy.value)
    return text if limits in ("exact", "–") else f"{text} ({limits})"


def _with_limits(report: Report, row: ReportRow) -> Cell:
    """A value with its 95 % limits; a number alone where it has none."""
    low, high = _interval(report, row)
    value = row.value.value
    if row.kind in ("lower bound", "not converged"):
        return _estimate(row.value)
    if math.isnan(low) and not math.isnan(value):
        return f"{number(value)} ± unknown"
    return f"{number(value)} ± {number((high - low) / 2, 2)}" if low < high else value


def _side_by_side(reports: list[Report]) -> Section:
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
        rows.append((measure, *values, first.direction, _fate(largest(factors) if factors else None)))
    section.texts.append(
        "What stays while the outputs stay the same can be compared as it stands, within its limits (±, 95 %). What "
        "the audits moved cannot: the factor is as far as they went, and larger scalings move it further."
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
        section.figures.append(_figure("side-margins", "Margins: this share of the samples lies below", alt, chart))
    return section
