"""The sections of a page about a change of the weights: what was predicted, what was measured, layers and samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from spiritlevel import charts
from spiritlevel.page.parts import Card, Cell, Gallery, Section, Sheet, Table, Thumbnail, number, packed, sheet
from spiritlevel.page.words import as_figure
from spiritlevel.results import Perturbation, Prediction
from spiritlevel.results.perturbations import PREDICTORS, limits_in_words

_SCORES = {
    "gap": "the gap between the two largest outputs",
    "linearised gap": "the gap that is left in the linearised outputs",
    "trace": "the trace of the sample's Hessian",
}
_KINDS = ("stays", "flip predicted", "flip not predicted", "predicted, stayed")


def pictures_of_change(found: Perturbation) -> Sheet | None:
    """The pictures of the samples on one sheet."""
    if found.pictures is None or not len(found.pictures.indices):
        return None
    return sheet(found.pictures.images.numpy(), found.samples["index"][found.pictures.indices].tolist())


def change_sections(found: Perturbation, key: str) -> Iterator[Section]:
    """The outcome, the loss along the way, layers, samples, and how it was measured."""
    yield _summary(found, key)
    yield _way(found, key)
    if found.layers:
        yield _layers(found, key)
    if "gap" in found.samples:
        yield _samples(found, key)
    section = Section(f"{key}-how", "How this was measured", notes=list(found.notes))
    rows = list(found.settings.items())
    section.tables.append(Table(f"{key}-settings", "Settings and versions", ["setting", "value"], rows))
    yield section


def _summary(found: Perturbation, key: str) -> Section:
    section = Section(f"{key}-summary", "Predicted and measured", [f"{found.meaning[:1].upper()}{found.meaning[1:]}."])
    section.texts += found.sentences()
    section.cards.append(
        Card(
            "Change of the loss, predicted",
            number(found.predicted.value, 3),
            _limits(found.predicted),
            "From slope and curvature along the change; for a random change, the mean over all draws.",
        )
    )
    if not math.isnan(found.measured.value):
        off = "" if math.isnan(found.ratio) else f"slope and curvature predict {number(found.ratio, 3)} of this change"
        meaning = f"The mean loss was {number(found.loss.value, 4)} before."
        section.cards.append(Card("Change of the loss, measured", number(found.measured.value, 3), off, meaning))
    if not math.isnan(found.flips_predicted.value):
        flips = [number(round(each.value, 1), 3) for each in (found.flips_predicted, found.flips_measured)]
        came = "not made" if math.isnan(found.flips_measured.value) else flips[1]
        meaning = f"Of {found.decisions:,} predictions; a flip is a change of class."
        section.cards.append(
            Card("Flips, predicted → measured", f"{flips[0]} → {came}", _limits(found.flips_predicted), meaning)
        )
    before, after = found.accuracy
    if not math.isnan(before.value + after.value):
        text = f"{number(100 * before.value, 4)} → {number(100 * after.value, 4)}"
        section.cards.append(Card("Accuracy (%)", text, "", "Before and after the change."))
    rows: list[tuple[Cell, ...]] = []
    for name, predicted in (("change of the loss", found.predicted), ("flips", found.flips_predicted)):
        for source, (below, above) in predicted.sources.items():
            rows.append((name, source, predicted.value - below, predicted.value + above))
    columns = ["prediction", "source", "low", "high"]
    section.tables.append(Table(f"{key}-sources", "Where the intervals come from, by source", columns, rows, True))
    return section


def _limits(predicted: Prediction) -> str:
    low, high = predicted.interval()
    if math.isnan(low):
        return f"95% interval not known: {limits_in_words(predicted)}"
    if not low < high:
        return "no error of its own"
    return f"95% interval {number(low, 3)} to {number(high, 3)}: {limits_in_words(predicted).replace('-', '−')}"


def _way(found: Perturbation, key: str) -> Section:
    section = Section(f"{key}-way", "The loss along the way")
    if found.suffices:
        section.texts.append("The parabola of slope and curvature follows the loss: second order is enough.")
    else:
        beyond = (
            "trust the prediction no further than its interval"
            if math.isnan(found.measured.value)
            else "higher orders matter"
            if math.isnan(found.predicted.interval()[0])
            else "the interval of the prediction allowed for that, and holds what was measured"
            if found.held
            else "second order is not enough for a change of this size, and the interval misses what was measured"
        )
        section.texts.append(f"The parabola of slope and curvature departs from the loss: {beyond}.")
    steps, count = found.steps.tolist(), len(found.steps)
    share, loss = "share of the change", "mean loss"
    columns = {
        share: steps + steps,
        loss: found.losses.tolist() + found.quadratic.tolist(),
        "curve": ["measured"] * count + ["slope and curvature"] * count,
    }
    chart = charts.lines(columns, share, loss, series="curve", points=True)
    alt = f"Line chart of the mean loss from the model to the changed one, {count} points, beside its parabola."
    section.figures.append(as_figure(f"{key}-way-chart", "From the model to the changed one", alt, chart, inset="xy"))
    return section


def _layers(found: Perturbation, key: str) -> Section:
    section = Section(f"{key}-layers", "Layer by layer")
    measured = not any(math.isnan(row.measured) for row in found.layers)
    rank = {name: value for name, value in found.rank_agreement().items() if not math.isnan(value)}
    if rank:
        words = ", ".join(f"{PREDICTORS[name]}: {number(value, 2)}" for name, value in rank.items())
        section.notes.append(f"Rank correlation with what changing the layer alone did (Spearman): {words}.")
    rows = sorted(found.layers, key=lambda row: -(row.measured if measured else row.second_order))
    costs = [row.measured if measured else row.second_order for row in rows]
    value = "measured change of the loss" if measured else "predicted change of the loss"
    columns = {"layer": [row.name for row in rows], value: costs}
    raised = any(cost > 0 for cost in costs)
    most = "Those at the top raise the loss most: they should keep more bits." if raised else "None raises the loss."
    section.texts.append(f"Each tensor that moves, changed alone. {most}")
    chart = charts.bars(columns, "layer", value)
    alt = f"Bar chart of the change of the loss for each of {len(rows)} layers changed alone."
    section.figures.append(as_figure(f"{key}-layers-chart", "Layers changed alone", alt, chart))
    names = {
        "layer": "name",
        "parameters": "size",
        "measured alone": "measured",
        "predicted alone": "second_order",
        "g·δ": "slope",
        "½ δᵀHδ": "curvature",
        "with the others": "with_others",
        "‖δ‖²": "square",
        "Tr H": "trace",
        "Tr H · ‖δ‖²": "trace_times_square",
    }
    table = [tuple(getattr(row, name) for name in names.values()) for row in rows]
    section.tables.append(Table(f"{key}-layers-table", "Layers", list(names), table))
    return section


def _samples(found: Perturbation, key: str) -> Section:
    section = Section(f"{key}-samples", "Which samples flip")
    if found.best:
        tried = ", ".join(f"{_SCORES[name]} {number(value, 3)}" for name, value in found.agreement.items())
        section.texts.append(
            f"Samples are ordered by {_SCORES[found.best]}, which best tells which of them flipped: the chance that "
            f"one that flipped comes before one that did not (AUROC) is {number(found.agreement[found.best], 3)}. "
            f"Scores tried: {tried}."
        )
    else:
        section.texts.append(
            f"Samples are ordered by {_SCORES['linearised gap']}; as no prediction flipped, or all did, or the change "
            "was not made, there is no telling which order is best."
        )
    if found.pictures is not None:
        for group, places in found.pictures.groups.items():
            if places:
                tiles = tuple(_thumbnail(found, place) for place in places)
                section.galleries.append(Gallery(f"{group[:1].upper()}{group[1:]}", tiles))
    gap, left = "gap of the two largest outputs", "gap left in the linearised outputs"
    columns: dict[str, Any] = {
        "sample": [str(index) for index in found.samples["index"].tolist()],
        gap: found.samples["gap"],
        left: found.samples["linearised_gap"],
        "prediction": _kinds(found),
    }
    keep = [] if found.pictures is None else found.pictures.indices.tolist()
    chart = charts.scatter(columns, gap, left, colour="prediction", order=list(_KINDS), hover=["sample"], keep=keep)
    count = len(columns["sample"])
    alt = f"Scatter plot of the gap left after the linearised change against the gap before, {count:,} samples."
    note = "below 0 a flip is predicted"
    section.figures.append(as_figure(f"{key}-gaps", "What is left of the gap", alt, chart, inset="xy", note=note))
    section.samples = key
    return section


def _kinds(found: Perturbation) -> list[str]:
    predicted = (found.samples["flips_predicted"] > 0).tolist()
    if "flips_measured" not in found.samples:
        return [_KINDS[1] if told else _KINDS[0] for told in predicted]
    came = (found.samples["flips_measured"] > 0).tolist()
    names = {(True, True): _KINDS[1], (False, True): _KINDS[2], (True, False): _KINDS[3], (False, False): _KINDS[0]}
    return [names[pair] for pair in zip(predicted, came, strict=True)]


def _thumbnail(found: Perturbation, place: int) -> Thumbnail:
    assert found.pictures is not None
    row = int(found.pictures.indices[place])
    lines = []
    if "before" in found.samples:
        before = _class(found, "before", row)
        after = _class(found, "after" if "after" in found.samples else "linearised", row)
        lines.append(before if before == after else f"{before} → {after}")
    lines.append(f"gap {number(float(found.samples['gap'][row]), 2)}")
    lines.append(f"left {number(float(found.samples['linearised_gap'][row]), 2)}")
    return Thumbnail(place, int(found.samples["index"][row]), tuple(lines))


def _class(found: Perturbation, column: str, row: int) -> str:
    label = int(found.samples[column][row])
    return found.classes[label] if 0 <= label < len(found.classes) else f"class {label}"


def change_columns(found: Perturbation) -> dict[str, Any]:
    """The columns of the samples for download."""
    return {name: packed(column.numpy()) for name, column in found.samples.items()}
