"""What a comparison of two models advises, in words: from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spiritlevel.results import ComparisonRow, figure, times


class Sides(NamedTuple):
    """What is known about the two models as a whole, besides the rows."""

    names: tuple[str, str]
    samples: int
    whole: bool  # whether accuracies count samples, not shares of each sample's decisions
    level: float
    twice: Sequence[str]  # the models whose outputs look like probabilities
    same: str  # what both give for every sample: "outputs", "probabilities" or nothing
    movers: Mapping[str, str]  # the transform that moved a measure furthest


def advise(rows: Sequence[ComparisonRow], phrases: Mapping[str, str], sides: Sides) -> tuple[str, list[str]]:
    """One sentence, and what it rests on: only the verdicts of the rows and whether they are sure."""
    decisive = []
    for row in rows:
        if row.decides and row.verdict in ("a", "b") and row.sure:
            size = abs(row.difference)
            numbers = {"difference": figure(size, 3), "count": size * sides.samples, "samples": sides.samples}
            decisive.append((row, phrases[row.name].format(**numbers)))
    reasons = _reasons(rows, sides)
    nothing = "These samples give no reason to trust one of the two models more than the other"
    if sides.twice:
        return (
            f"No advice: the outputs of {' and '.join(sides.twice)} all lie in [0, 1] and sum to 1. They look like "
            "probabilities, but the loss expects logits: compare again without the last softmax."
        ), reasons
    if decisive:
        return _trust(decisive, sides), reasons
    if sides.same:
        nothing += (
            f": both give the same {sides.same}, up to rounding. Numbers that differ describe the parametrisation"
        )
    else:
        nothing += _not_sure(rows, sides)
    return f"{nothing}.", reasons


def _not_sure(rows: Sequence[ComparisonRow], sides: Sides) -> str:
    """Why rows that favour one model are no reason to trust it; nothing if there are none."""
    looked = [row for row in rows if row.decides]
    near = [f"{row.name} favours {sides.names[row.verdict == 'b']}" for row in looked if row.verdict in ("a", "b")]
    if near:
        needed = 1 - (1 - sides.level) / len(looked)
        return f"; {' and '.join(near)} at {sides.level:.0%}, but {len(looked)} rows decide, each at {needed:.1%}"
    if looked and any(row.verdict in ("a", "b") for row in rows):
        *first, last = sorted(row.name for row in looked)
        return f"; only {', '.join(first)} and {last} decide that" if first else f"; only {last} decides that"
    return ""


def _trust(decisive: Sequence[tuple[ComparisonRow, str]], sides: Sides) -> str:
    """Which of the two, and why; and what speaks in favour of the other."""
    first, phrase = decisive[0]
    winner = first.verdict
    low, high = sorted((abs(first.low), abs(first.high)))
    if first.name == "accuracy" and sides.whole:  # in samples, as the phrase counts
        limits = f"{low * sides.samples:,.0f} to {high * sides.samples:,.0f}"
    else:
        limits = f"{figure(low, 3)} to {figure(high, 3)}"
    text = f"{phrase} ({sides.level:.0%} interval {limits})"
    text += "".join(f", and {more}" for row, more in decisive[1:] if row.verdict == winner)
    other = [more for row, more in decisive[1:] if row.verdict != winner]
    if other:
        text += f"; {sides.names[winner == 'a']} has in its favour that " + " and ".join(other)
    return f"Trust {sides.names[winner == 'b']}: {text}."


def _reasons(rows: Sequence[ComparisonRow], sides: Sides) -> list[str]:
    """Which rows favour which model, and which favour none."""
    texts = []
    for side, name in zip("ab", sides.names, strict=True):
        favours = [row.name for row in rows if row.verdict == side]
        if favours:
            texts.append(f"In favour of {name}: {', '.join(favours)}.")
    unsure = [row.name for row in rows if row.verdict == "no interval"]
    if unsure:
        texts.append(f"No verdict, because the difference has no interval: {', '.join(unsure)}.")
    apart = [row for row in rows if row.verdict == "not comparable"]
    moved = [
        f"{row.name} (at least {times(row.factor)}-fold by {sides.movers[row.name]})" for row in apart if row.factor > 1
    ]
    if moved:
        texts.append(
            "Not comparable, because the parametrisation alone moves them at the same outputs or probabilities, "
            f"without a known limit: {', '.join(moved)}."
        )
    for note in dict.fromkeys(row.note for row in apart if not row.factor > 1):
        names = ", ".join(row.name for row in apart if row.note == note and not row.factor > 1)
        texts.append(f"Not comparable: {names} ({note}).")
    return texts
