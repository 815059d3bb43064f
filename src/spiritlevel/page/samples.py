"""What a page shows of single samples: traces against margins, pictures, margins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spiritlevel import charts
from spiritlevel.errors import counted
from spiritlevel.page.parts import Gallery, Section, Sheet, Thumbnail, number, packed, sheet
from spiritlevel.page.words import as_figure, found_row, why_missing
from spiritlevel.results import Margins, Report


def _sample_names(report: Report, count: int) -> list[int]:
    """The places of the samples in the data, where a reader can find them; for tokens, those of their samples."""
    units = report.margins if report.margins is not None else report.traces
    if units is not None and units.sample is not None:
        return [int(sample) for sample in units.sample[:count].tolist()]
    return list(range(count)) if report.indices is None else [int(index) for index in report.indices.tolist()]


def _sample_name(report: Report, row: int) -> int:
    """The place of one sample; a file may name any row, so no list is built up to it."""
    return row if report.indices is None else int(report.indices[row])


def _class(report: Report, target: float) -> str:
    known = 0 <= target < len(report.classes) and float(target).is_integer()
    return report.classes[int(target)] if known else number(target)


def _label_column(report: Report, margins: Margins) -> dict[str, list[str]]:
    """The label of every sample; for samples with several decisions, the share of them that are right."""
    if margins.decisions is not None:
        return {"right (%)": [number(100 * share, 3) for share in margins.shares.tolist()]}
    return {"label": [_class(report, target) for target in margins.targets.tolist()]}


def _both(report: Report) -> bool:
    return report.traces is not None and report.margins is not None and len(report.traces) == len(report.margins)


def trace_against_margin(report: Report, key: str) -> Section:
    """Every sample as a point: how sharp the loss is there, how wide its margin."""
    section = Section(f"{key}-samples", "Every sample: trace against margin")
    traces, margins = report.traces, report.margins
    if traces is None or margins is None or not _both(report) or not len(traces):
        section.texts.append(
            why_missing(report, "The trace or the margin of every sample", "traces", "trace", "margins")
        )
        if margins is None and traces is not None and len(finite := traces.values[traces.values.isfinite()]):
            low, middle, high = np.quantile(finite.numpy(), [0.1, 0.5, 0.9])  # of a regression, say
            ends = (
                f"median {number(float(middle), 3)}, 80% between {number(float(low), 3)} and {number(float(high), 3)}"
            )
            alt = f"Histogram with box plot of {len(traces):,} Hessian traces: {ends}."
            chart = charts.distribution(traces.values, "Hessian trace")
            section.figures.append(as_figure(f"{key}-traces", "The trace of every sample", alt, chart))
        return section
    count = len(traces)
    names = _sample_names(report, count)
    columns: dict[str, Any] = {
        "sample": [str(name) for name in names],
        **({} if margins.position is None else {"position": [str(place) for place in margins.position.tolist()]}),
        **_label_column(report, margins),
        "output margin": margins.signed,
        "Hessian trace": traces.values,
        "prediction": ["correct" if correct else "wrong" for correct in margins.correct.tolist()],
    }
    hover: list[str] = [name for name in ("sample", "position", "label", "right (%)") if name in columns]
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
    whose = f"{wrong:,} of which are classified wrongly (margin below 0)"
    if margins.decisions is not None:
        whose = f"{wrong:,} of which have at least one wrong decision (at a position or for a label); margins are means"
    section.texts.append(
        f"Each point is one of {counted(count, 'sample' if margins.position is None else 'token')}, {whose}. "
        "A sample with a small margin lies near a decision boundary; one with a large trace makes the minimum sharp."
    )
    section.hint = "Point at a sample to see it."
    section.notes += [_correlation(name, found) for name, found in report.correlations.items()]
    alt = f"Scatter plot of the Hessian trace against the output margin of {count:,} samples, coloured by prediction."
    section.figures.append(as_figure(f"{key}-scatter", "Trace against margin", alt, chart, inset="xy"))
    section.samples = key
    return section


def _correlation(name: str, found: Any) -> str:
    if math.isnan(found.r):
        return f"Correlation of {name}: undefined, {found.reason}."
    r, low, high, rank = (number(value, 3) for value in (found.r, found.low, found.high, found.spearman))
    return (
        f"Correlation of {name}: r = {r} ({found.level:.0%} interval {low} to {high}), rank correlation {rank}, "
        f"over {counted(found.n, 'sample')}; {counted(found.removed, 'outlier')} removed."
    )


def sample_columns(report: Report) -> dict[str, Any]:
    """The per-sample columns for download."""
    if not _both(report) or report.traces is None or report.margins is None:
        return {}
    traces, margins = report.traces, report.margins
    columns: dict[str, Any] = {"sample": _sample_names(report, len(traces))}
    if margins.position is not None:
        columns["position"] = margins.position.numpy()
    if margins.decisions is None:
        columns["target"] = margins.targets.numpy()
    else:
        columns["decisions"], columns["right"] = margins.decisions.numpy(), margins.shares.numpy()
    if report.predicted is not None:
        columns["predicted"] = report.predicted.numpy()
    columns["correct"] = margins.correct.numpy().astype(np.int32)
    columns["signed_output_margin"] = margins.signed.numpy()
    columns["softmax_margin"] = margins.softmax.numpy()
    columns["hessian_trace"] = traces.values.numpy()
    if not traces.exact:
        columns["hessian_trace_stderr"] = traces.stderr.numpy()
    return {name: packed(column) for name, column in columns.items()}


def picture_sheet(report: Report) -> Sheet | None:
    """The pictures that the report kept, on one sheet; None if it has none."""
    if report.pictures is None or not len(report.pictures.indices):
        return None
    names = [_sample_name(report, row) for row in report.pictures.indices.tolist()]
    return sheet(report.pictures.images.numpy(), names)


def pictures_section(report: Report, key: str, pictures: Sheet | None) -> Section:
    """The samples with the largest traces, the narrowest margins, and so on, to look at."""
    section = Section(f"{key}-pictures", "Samples to look at")
    if pictures is None or report.pictures is None:
        section.texts.append("There are no pictures: the samples are not images, or were not kept.")
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
        lines.append(_verdict(report, report.margins, row))
        lines.append(f"margin {number(float(report.margins.signed[row]), 3)}")
    if report.traces is not None and row < len(report.traces):
        lines.append(f"trace {number(float(report.traces.values[row]), 3)}")
    return Thumbnail(place, _sample_name(report, row), tuple(lines))


def _verdict(report: Report, margins: Margins, row: int) -> str:
    """The label of a sample and what it was taken for, or the share of it that is right."""
    if margins.decisions is not None:
        return f"{float(margins.shares[row]):.0%} right"
    kind = "" if report.classes else "class "  # a number alone says nothing
    label = kind + _class(report, margins.targets[row].item())
    found = None if report.predicted is None else kind + _class(report, report.predicted[row].item())
    return label if found in (None, label) else f"{label}, taken for {found}"


def margins_section(report: Report, key: str) -> Section:
    """How the margins of the training and the test samples are distributed."""
    section = Section(f"{key}-margins", "Margins")
    for name, margins in (("train", report.margins), ("test", report.test_margins)):
        if margins is None or not len(margins):
            continue
        row = found_row(report, "margin_skewness") if name == "train" else None
        skewness = None if row is None else row.value.value  # as measured, if it was
        chart = charts.distribution(margins.signed, "output margin", skewness=skewness)
        low, middle, high = np.quantile(margins.signed.numpy(), [0.1, 0.5, 0.9])
        text = f"median {number(float(middle), 3)}, 80% between {number(float(low), 3)} and {number(float(high), 3)}"
        alt = f"Histogram with box plot of {len(margins):,} output margins ({name} data): {text}."
        section.figures.append(as_figure(f"{key}-margins-{name}", f"Output margins, {name} data", alt, chart))
    if section.figures:
        section.texts.append(
            "The output margin of a sample is the output of its own class minus the largest of the others. Below 0 the "
            "sample is classified wrongly. The box holds the middle half of the samples; its line is the median."
        )
    else:
        section.texts.append(why_missing(report, "The margins", "margins"))
    return section
