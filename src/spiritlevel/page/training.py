"""The sections of a page about a training run: the samples to look at, the curves of a tracker."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spiritlevel import charts
from spiritlevel.page.parts import Card, Cell, Gallery, Section, Sheet, Table, Thumbnail, number, sheet
from spiritlevel.page.words import as_figure
from spiritlevel.results.training import SuspiciousSamples, TrainingCurves

_WORDS = {
    "aum": "area under the margin",
    "cumulative_loss": "cumulative loss",
    "first_learned": "first learned at step",
    "forgetting": "times forgotten",
}
_COLUMNS = ("aum", "cumulative_loss", "loss", "margin", "entropy", "confidence", "variability")


def pictures_of(found: SuspiciousSamples) -> Sheet | None:
    """The pictures of the samples on one sheet."""
    return None if found.pictures is None else sheet(found.pictures.images.numpy(), found.pictures.indices.tolist())


def suspects(found: SuspiciousSamples, key: str) -> Iterator[Section]:
    """What was recorded, the samples themselves, and where they lie among all."""
    by = _WORDS.get(found.by, found.by)
    section = Section(f"{key}-summary", "Summary", [found.headline])
    section.cards = [
        Card("Samples seen", number(found.seen), "", f"Of {number(found.samples)}, in {number(found.steps)} steps."),
        Card("Never learned", number(found.never_learned), "", "Never classified as labelled, at any visit."),
        Card("Forgotten", number(found.forgotten), "", "Classified as labelled once, and wrongly at a later visit."),
    ]
    yield section
    section = Section(f"{key}-samples", "Samples to look at", [_about(by)])
    if found.pictures is not None:
        tiles = tuple(Thumbnail(k, sample, _lines(found, k)) for k, sample in enumerate(found.ids.tolist()))
        section.galleries.append(Gallery(f"By {by}", tiles))
    columns = ["sample", "label", "predicted", *(_WORDS.get(name, name) for name in _COLUMNS), "times forgotten"]
    columns += ["first learned at step", *(["text"] if found.texts else [])]
    rows = [_row(found, k) for k in range(len(found.ids))]
    section.tables.append(
        Table(f"{key}-table", "The same in numbers", columns, rows, folded=found.pictures is not None)
    )
    yield section
    yield _map(found, key)


def _about(by: str) -> str:
    return (
        f"Ordered by {by}, the most suspicious first. A wrong label is fitted late and against the samples "
        "around it, so it comes early in this list; so do rare and difficult samples whose labels are right. The "
        "list says where to look, not what is wrong."
    )


def _lines(found: SuspiciousSamples, k: int) -> tuple[str, ...]:
    kind = "" if found.classes else "class "
    label, predicted = (found.class_name(int(found.table[name][k])) for name in ("label", "predicted"))
    first = f"{kind}{label}" if predicted in (label, "?") else f"{kind}{label}, taken for {kind}{predicted}"
    short = "AUM" if found.by == "aum" else _WORDS.get(found.by, found.by)
    return first, f"{short} {found.cell(found.by, k).replace('-', '−')}"


def _row(found: SuspiciousSamples, k: int) -> list[Cell]:
    classes = [found.class_name(int(found.table[name][k])) for name in ("label", "predicted")]
    numbers = [float(found.table[name][k]) for name in _COLUMNS]
    forgotten, first = int(found.table["forgetting"][k]), int(found.table["first_learned"][k])
    text = [found.texts[k]] if found.texts else []
    return [int(found.ids[k]), *classes, *numbers, forgotten, "never" if first < 0 else first, *text]


def _map(found: SuspiciousSamples, key: str) -> Section:
    section = Section(f"{key}-map", "All samples")
    chosen = set(found.ids.tolist())
    ids = found.everything["id"].tolist()
    confidence, variability = "mean probability of the label", "its standard deviation over time"
    columns = {
        "sample": [str(sample) for sample in ids],
        confidence: found.everything["confidence"],
        variability: found.everything["variability"],
        "list": ["to look at" if sample in chosen else "others" for sample in ids],
    }
    keep = [k for k, sample in enumerate(ids) if sample in chosen]
    chart = charts.scatter(
        columns, variability, confidence, colour="list", order=["others", "to look at"], hover=["sample"], keep=keep
    )
    section.texts.append(
        "Each point is a sample. At the top are samples that were easy from the start, on the right those that the "
        "network changed its mind about, at the bottom left those that it never believed."
    )
    alt = f"Scatter plot of the mean probability of the label against its variability, {len(ids):,} samples."
    section.figures.append(as_figure(f"{key}-cartography", "Every sample", alt, chart, inset="xy"))
    return section


def curves(found: TrainingCurves, key: str) -> Iterator[Section]:
    """The last numbers in words, a curve for each quantity, and all of them as a table."""
    section = Section(f"{key}-summary", "Summary", list(found.sentences) or ["Nothing has been measured yet."])
    yield section
    if not found.rows:
        return
    section = Section(f"{key}-curves", "Curves")
    names = [name for name in found.labels if any(_drawn(row.get(name)) for row in found.rows)]
    for name in names:
        label = found.labels[name]
        columns = {"step": [row["step"] for row in found.rows], label: [row.get(name, math.nan) for row in found.rows]}
        alt = f"Line chart of the {label} against the step, {len(found.rows)} measurements."
        chart = charts.lines(columns, "step", label, points=True)
        section.figures.append(as_figure(f"{key}-{name}", label, alt, chart, inset="xy"))
    if names:
        yield section
    section = Section(f"{key}-rows", "All measurements")
    keys = list(dict.fromkeys(name for row in found.rows for name in row))
    rows = [[_value(row.get(name, "–")) for name in keys] for row in found.rows]
    section.tables.append(Table(f"{key}-table", "Measurements", keys, rows))
    yield section


def _drawn(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(value: object) -> Cell:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, int | float | str) else str(value)
