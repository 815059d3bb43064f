"""When a statement of a paper counts as reproduced: one rule for all experiments, applied to numbers and never stored.

A study gives one number per seed for each of its statements, and the statement says beforehand in which range that
number must lie, and so what would make it fail. An experiment is decided by the 95 % interval of Student's t over the
seeds (the numbers are differences or ratios of networks with the same seed, so the interval is a paired one):

- *reproduced* if the interval lies inside the range, *not reproduced* if it lies outside;
- *undecided* if it contains an end of the range; *sign only* if all seeds nevertheless lie on the same side of it;
- *undecided* with fewer than three seeds, if a run could not tell, or if a network that it rests on predicts
  held-out data less than five times as well as chance.

Several numbers can be judged together: all of them must lie in their ranges, and one that lies outside makes the
statement fail. Identities and theorems need no seeds: their number lies in its range or it does not.

>>> sharper = Statement("λ₁", "L2 makes solutions sharper", "rises", "the ratio is above 1", "below 1", Range.RISES)
>>> seeds = [sharper.judge(ratio, accuracy=0.5, chance=0.01).record() for ratio in (1.8, 2.0, 2.2)]
>>> str(decide(sharper, seeds).verdict), str(decide(sharper, seeds[:2]).verdict)
('reproduced', 'undecided')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from spiritlevel.results.quantiles import student

SEEDS = 3
"""The fewest seeds that can decide."""
TIMES_CHANCE = 5
"""How many times as well as chance a network must predict held-out data."""
CONFIDENCE = 0.95


class Verdict(StrEnum):
    """How a statement of a paper fared here."""

    REPRODUCED = "reproduced"
    NOT = "not reproduced"
    SIGN = "undecided (sign only)"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Range:
    """Where a number must lie; for a ratio the interval over the seeds is taken on a logarithmic scale."""

    low: float = -math.inf
    high: float = math.inf
    ratio: bool = False

    POSITIVE: ClassVar[Range]
    NEGATIVE: ClassVar[Range]
    RISES: ClassVar[Range]
    FALLS: ClassVar[Range]

    def holds(self, number: float) -> bool:
        """Whether a single number lies in it, ends included."""
        return self.low <= number <= self.high

    def side(self, low: float, high: float) -> int:
        """1 if all from `low` to `high` lies strictly inside, −1 or −2 if it lies below or above, 0 if it straddles."""
        if self.low < low and high < self.high:
            return 1
        return -1 if high < self.low else -2 if low > self.high else 0


Range.POSITIVE, Range.NEGATIVE = Range(low=0.0), Range(high=0.0)
Range.RISES, Range.FALLS = Range(low=1.0, ratio=True), Range(high=1.0, ratio=True)

Number = float | Mapping[str, float | None] | None


@dataclass(frozen=True)
class Statement:
    """What a paper says, what will be called reproduced and what will not, all fixed before the run.

    Attributes:
        id: A short name, unique in its study.
        text: The paper's statement in a few words.
        paper: The paper's own number or picture, as text.
        reproduced: When it counts as reproduced.
        fails: What makes it fail.
        within: The range of our number; for several numbers judged together, each by its name.
        kind: An experiment needs seeds. An identity (or a theorem, or a bound) follows from a proof, so it can
            fail only if the proof or the program is wrong; these are counted separately.
        trained: Whether it is about trained networks, which must then do much better than chance.
        limits: The limits of what our number can be, if it is a correlation or a share.
    """

    id: str
    text: str
    paper: str
    reproduced: str
    fails: str
    within: Range | Mapping[str, Range]
    kind: Literal["experiment", "identity"] = "experiment"
    trained: bool = True
    limits: tuple[float, float] | None = None

    @property
    def ranges(self) -> Mapping[str, Range]:
        """The ranges by name; a single number has the empty name."""
        return {"": self.within} if isinstance(self.within, Range) else self.within

    def judge(
        self,
        ours: Number | Sequence[Number],
        *,
        undecided: str = "",
        accuracy: float | None = None,
        chance: float | None = None,
        remark: str = "",
    ) -> Ruling:
        """Our number for one seed, with what decides whether it counts.

        Args:
            ours: The number, or the numbers by name; None where there is none. A run that holds several seeds itself
                gives a list.
            undecided: Why this run cannot decide, for example `not fitted`.
            accuracy: The lowest held-out accuracy of the networks that the number rests on.
            chance: The accuracy of guessing.
            remark: Anything else worth knowing.
        """
        return Ruling(self, _plain(ours), undecided, accuracy, chance, remark)


class Ruling(NamedTuple):
    """What one run says about a statement: numbers, from which `decide` draws the verdict."""

    statement: Statement
    ours: Any
    undecided: str = ""
    accuracy: float | None = None
    chance: float | None = None
    remark: str = ""

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        return {"id": self.statement.id, **{name: getattr(self, name) for name in self._fields[1:]}}


class Part(NamedTuple):
    """The mean over the seeds (geometric for a ratio) and its interval, None where there is none."""

    mean: float
    low: float | None
    high: float | None
    ratio: bool


class Decision(NamedTuple):
    """The verdict over all seeds, the reason where it is undecided, and the numbers by name."""

    verdict: Verdict
    reason: str
    parts: dict[str, Part]
    seeds: int
    agree: int
    """Seeds whose numbers all lie in their ranges."""


def decide(statement: Statement, records: Sequence[Mapping[str, Any]]) -> Decision:
    """The verdict on the records of a statement's rulings, one for each seed."""
    each = [(record, ours) for record in records for ours in _each_seed(record.get("ours"))]
    numbers = [_numbers(statement, ours) for _, ours in each]
    known = [number for number in numbers if number is not None]
    ranges = statement.ranges
    agree = sum(all(ranges[name].holds(value) for name, value in number.items()) for number in known)
    parts = {
        name: _interval([number[name] for number in known], ranges[name], statement.limits) for name in ranges if known
    }

    def decision(verdict: Verdict, reason: str = "") -> Decision:
        return Decision(verdict, reason, parts, len(each), agree)

    said = list(dict.fromkeys(filter(None, (record.get("undecided", "") for record in records))))
    if statement.kind == "identity":
        if not known:
            return decision(Verdict.UNDECIDED, "; ".join(said))
        if agree == len(known) < len(numbers):
            return decision(Verdict.UNDECIDED, "; ".join(said or ["not every seed has a number"]))
        return decision(Verdict.REPRODUCED if agree == len(known) else Verdict.NOT)
    reasons = said or _reasons(statement, records, numbers)
    if reasons:
        return decision(Verdict.UNDECIDED, "; ".join(reasons))
    sides = [ranges[name].side(*_ends(part)) for name, part in parts.items()]
    if min(sides) < 0:
        return decision(Verdict.NOT)
    if all(side == 1 for side in sides):
        return decision(Verdict.REPRODUCED)
    seen = {name: {range_.side(number[name], number[name]) for number in known} for name, range_ in ranges.items()}
    alike = len(known) >= SEEDS and all(len(found) == 1 and 0 not in found for found in seen.values())
    wide = ", ".join(name or "it" for (name, _), side in zip(parts.items(), sides, strict=True) if side == 0)
    reason = f"the interval over the seeds does not decide {wide}"
    return decision(Verdict.SIGN if alike else Verdict.UNDECIDED, reason)


def least_accuracy(chance: float) -> float:
    """The held-out accuracy that a network needs to count: five times chance, or half-way to perfect for few classes.

    >>> least_accuracy(0.01), least_accuracy(0.1), least_accuracy(0.5)
    (0.05, 0.5, 0.75)
    """
    return min(TIMES_CHANCE * chance, (1 + chance) / 2)


def _reasons(
    statement: Statement, records: Sequence[Mapping[str, Any]], numbers: Sequence[Mapping[str, float] | None]
) -> list[str]:
    """Why these records cannot decide, though none of their runs said so."""
    found = []
    if any(number is None for number in numbers):
        found.append("no number was kept" if len(numbers) == 1 else "not every seed has a number")
    if len(numbers) < SEEDS:
        found.append(f"only {len(numbers)} of the {SEEDS} seeds needed")
    if statement.trained and not found:
        pairs: list[tuple[Any, Any]] = [(record.get("accuracy"), record.get("chance")) for record in records]
        if any(accuracy is None or chance is None for accuracy, chance in pairs):
            found.append("the held-out accuracy was not kept")
        else:
            poor = [(accuracy, chance) for accuracy, chance in pairs if accuracy < least_accuracy(chance)]
            if poor:
                accuracy, chance = min(poor)
                text = f"held-out accuracy {accuracy:.1%}, below {least_accuracy(chance):.1%} (chance is {chance:.1%})"
                found.append(text.replace("%", " %"))
    return found


def _each_seed(ours: Any) -> list[Any]:
    return list(ours) if isinstance(ours, list | tuple) and ours else [ours]


def _numbers(statement: Statement, ours: Any) -> dict[str, float] | None:
    """The numbers of a seed by name; None unless there is one for every range (and positive where it is a ratio)."""
    if isinstance(ours, str):  # runs kept before there were rules stated shares in words
        share = re.match(r"(\d+) of (\d+)\b", ours)
        ours = int(share[1]) / int(share[2]) if share else None
    found = ours if isinstance(ours, Mapping) else {"": ours}
    ranges = statement.ranges
    if found.keys() != ranges.keys():
        return None
    fine = {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not ranges[name].ratio)
    }
    return fine if len(fine) == len(ranges) else None


def _interval(values: Sequence[float], range_: Range, limits: tuple[float, float] | None) -> Part:
    """Mean and 95 % interval of Student's t over the seeds, clipped to its possible range."""
    scaled = [math.log(value) for value in values] if range_.ratio else list(values)
    mean = math.fsum(scaled) / len(scaled)
    back = _exp if range_.ratio else float
    if len(scaled) < 2:
        return Part(back(mean), None, None, range_.ratio)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1) / len(scaled))
    half = float(student((1 + CONFIDENCE) / 2, len(scaled) - 1)) * spread
    low, high = back(mean - half), back(mean + half)
    if limits is not None:
        low, high = max(low, limits[0]), min(high, limits[1])
    return Part(back(mean), low, high, range_.ratio)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _ends(part: Part) -> tuple[float, float]:
    return (part.mean if part.low is None else part.low, part.mean if part.high is None else part.high)


def _plain(value: Any) -> Any:
    """A number, numbers by name, or a list of them, with None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None:
        return None
    return float(value) if math.isfinite(value) else None
