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
_REASONS = 5  # that are written out below the curves
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
        Card("Forgotten", number(found.forgotten), "", "Classified as labelled at one visit, wrongly at a later one."),
    ]
    yield section
    section = Section(f"{key}-samples", "Samples to look at", [_about(by)])
    if found.pictures is not None:
        tiles = tuple(Thumbnail(k, sample, _lines(found, k)) for k, sample in enumerate(found.ids.tolist()))
        section.galleries.append(Gallery(f"By {by}", tiles))
    if found.texts:  # what it is about first, not as the last of a dozen columns
        value = [found.cell(found.by, k).replace("-", "−") for k in range(len(found.texts))]
        listed: list[list[Cell]] = [
            [str(int(found.ids[k])), *_classes(found, k), value[k], text] for k, text in enumerate(found.texts)
        ]
        section.tables.append(Table(f"{key}-texts", f"By {by}", ["sample", "label", "predicted", by, "text"], listed))
    columns = ["sample", "label", "predicted", *(_WORDS.get(name, name) for name in _COLUMNS), "times forgotten"]
    columns += ["first learned at step"]
    rows = [_row(found, k) for k in range(len(found.ids))]
    shown = found.pictures is not None or bool(found.texts)
    caption = "The same in numbers" if shown else f"By {by}"
    section.tables.append(Table(f"{key}-table", caption, columns, rows, folded=shown))
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
    label, predicted = _classes(found, k)
    first = f"{kind}{label}" if predicted in (label, "?") else f"{kind}{label}, taken for {kind}{predicted}"
    short = "AUM" if found.by == "aum" else _WORDS.get(found.by, found.by)
    return first, f"{short} {found.cell(found.by, k).replace('-', '−')}"


def _row(found: SuspiciousSamples, k: int) -> list[Cell]:
    numbers = [float(found.table[name][k]) for name in _COLUMNS]
    forgotten, first = int(found.table["forgetting"][k]), int(found.table["first_learned"][k])
    return [str(int(found.ids[k])), *_classes(found, k), *numbers, forgotten, "never" if first < 0 else first]


def _classes(found: SuspiciousSamples, k: int) -> tuple[str, str]:
    """Label and prediction of the k-th sample by name."""
    return found.class_name(int(found.table["label"][k])), found.class_name(int(found.table["predicted"][k]))


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
    section.notes = _gaps(found)
    if names or section.notes:
        yield section
    section = Section(f"{key}-rows", "All measurements")
    keys = list(dict.fromkeys(name for row in found.rows for name in row))
    rows = [[_value(row.get(name, "–")) for name in keys] for row in found.rows]
    section.tables.append(Table(f"{key}-table", "Measurements", keys, rows))
    yield section


def _gaps(found: TrainingCurves) -> list[str]:
    """Why numbers are missing: each reason once, with its steps."""
    steps: dict[str, list[str]] = {}
    for row in found.rows:
        if row.get("reason"):
            steps.setdefault(str(row["reason"]).rstrip("."), []).append(f"{row['step']:,}")
    notes = [
        f"Not everything could be measured at step{'s' * (len(at) > 1)} {', '.join(at)}: {reason}."
        for reason, at in steps.items()
    ]
    more = [f"{len(notes) - _REASONS} other reasons are in the table."] if len(notes) > _REASONS else []
    return notes[:_REASONS] + more


def _drawn(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(value: object) -> Cell:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, int | float | str) else str(value)
