"""What a claim is, how a verdict follows from what was computed, and how claims are collected.

A check computes numbers, turns them into named facts (did the printed form pass? the corrected one?) and passes these
to `judge`. The verdict follows from the facts by one rule, `decide`, the same for all claims: no check knows a verdict.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PASSES = " passes"  # ends the name of a fact among the evidence
PAPERS = {
    "A": "On flat minima, large margins and generalizability",
    "B": "Sharp minima can generalize for deep nets, supplementary material",
    "C": "Flatness is a false friend",
}


class Verdict(StrEnum):
    """What a check can find.

    >>> print(Verdict.CONDITIONS)
    holds under conditions
    """

    HOLDS = "holds"
    CONDITIONS = "holds under conditions"
    MISPRINT = "misprint"
    FALSE = "false"
    INCONSISTENT = "inconsistent"
    UNDECIDED = "undecided"


class Kind(StrEnum):
    """What a verdict rests on: claims of different kinds are counted separately.

    >>> Kind.RECORD.meaning
    'numbers and names as printed, against each other or a public fact; nothing is measured'
    """

    FORMULA = "formula"
    RECORD = "record"
    EXPERIMENT = "experiment"
    CONVENTION = "convention"

    @property
    def meaning(self) -> str:
        """One line for the reader."""
        return {
            Kind.FORMULA: "a formula, theorem, bound or count, computed at instances drawn from the seed",
            Kind.RECORD: "numbers and names as printed, against each other or a public fact; nothing is measured",
            Kind.EXPERIMENT: "observed on small networks that the check builds, not on those of the paper",
            Kind.CONVENTION: "a choice, neither true nor false; what is tested is where it leads",
        }[self]


@dataclass(frozen=True)
class Finding:
    """What a check found: the verdict, the named numbers it follows from, and one sentence about them.

    `volatile` names the numbers that another machine may round differently (those of trained networks): the
    document leaves them out.
    """

    verdict: Verdict
    evidence: dict[str, Any]
    text: str
    volatile: tuple[str, ...] = ()


Check = Callable[[int], Finding]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, with the check that decides it.

    `statement` is what the paper prints, `corrected` the form that holds where that differs. `check(seed)` draws its
    random instances from the seed; its docstring is the rule by which it decides. `kind` says what that rests on.
    """

    id: str
    paper: str
    place: str
    statement: str
    corrected: str
    check: Check = field(repr=False)
    kind: Kind = Kind.FORMULA

    @property
    def rule(self) -> str:
        """When the printed form passes, and what else is tested: the docstring of the check."""
        return " ".join((inspect.getdoc(self.check) or "").split())


def decide(
    *,
    printed: bool | None = None,
    agree: bool | None = None,
    mended: bool | None = None,
    within: bool | None = None,
    instead: bool | None = None,
) -> Verdict:
    """The verdict that follows from what passed; a fact that is None was not tested.

    - `printed`: the statement as printed, in everything it covers. Passed: *holds*.
    - `agree`: two printed records, or a record and a public fact, agree. Passed: *holds*; failed: *inconsistent*.
    - `mended`: the same statement with its symbols put right. Passed while the printed one failed: *misprint*.
    - `within`: the statement restricted by a condition. Passed while the printed one failed: *holds under conditions*.
    - `instead`: another statement that takes its place. It must pass, but the printed one stays *false*.

    Where the printed form failed and a correction that was tested failed as well, nothing is *decided*.

    >>> print(decide(printed=False, mended=True))
    misprint
    >>> print(decide(printed=False, mended=False))
    undecided
    """
    first = agree if printed is None else printed
    if first is None or (printed is not None and agree is not None):
        return Verdict.UNDECIDED  # exactly one of the two must be asked
    if first:
        return Verdict.HOLDS
    if False in (mended, within, instead):
        return Verdict.UNDECIDED
    if printed is None:
        return Verdict.INCONSISTENT
    if mended:
        return Verdict.MISPRINT
    return Verdict.CONDITIONS if within else Verdict.FALSE


OUTCOMES = {
    Verdict.HOLDS: "It passes as it is printed.",
    Verdict.CONDITIONS: "It fails in general and passes under the condition.",
    Verdict.MISPRINT: "It fails as printed and passes with its symbols put right.",
    Verdict.FALSE: "It fails.",
    Verdict.INCONSISTENT: "The records disagree.",
    Verdict.UNDECIDED: "The printed form fails, and so does a correction that was tested.",
}


def judge(evidence: dict[str, Any], remark: str, *, volatile: tuple[str, ...] = (), **facts: bool | None) -> Finding:
    """A finding whose verdict `decide` takes from the facts; they join the evidence, so that a reader can follow.

    The remark explains why the statement passes or, where a correction or a second record is tested, why it fails. If
    the numbers say otherwise, a plain sentence takes its place.

    >>> judge({"largest error": 0.5}, "The formula is exact.", printed=0.5 < 1e-9)
    Finding(verdict=<Verdict.FALSE: 'false'>, evidence={...'printed passes': False}, text='It fails.', volatile=())
    """
    tested = {name: bool(fact) for name, fact in facts.items() if fact is not None}
    verdict = decide(**tested)
    expected = (
        verdict is Verdict.HOLDS if set(tested) == {"printed"} else verdict not in (Verdict.HOLDS, Verdict.UNDECIDED)
    )
    passes = {f"{name}{PASSES}": fact for name, fact in tested.items()}
    return Finding(verdict, {**plain(evidence), **passes}, remark if expected else OUTCOMES[verdict], volatile)


def plain(value: Any) -> Any:
    """Evidence as plain values for strict JSON: NaN becomes None, an infinite number is refused.

    >>> plain({"r": float("nan"), "counts": (1, 2)})
    {'r': None, 'counts': [1, 2]}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    if math.isinf(number):
        raise ArithmeticError("a number of the evidence is infinite")
    return None if math.isnan(number) else number


def registrar(paper: str, claims: list[Claim]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator that adds its function to `claims` as the check of a claim of `paper`.

    >>> known: list[Claim] = []
    >>> @registrar("A", known)("A-0", "nowhere", "1 + 1 = 2")
    ... def _sum(seed: int) -> Finding:
    ...     "Passes if the sum is 2."
    ...     return judge({"sum": 1 + 1}, "Counted on fingers.", printed=1 + 1 == 2)
    >>> known[0].rule, str(known[0].check(0).verdict)
    ('Passes if the sum is 2.', 'holds')
    """

    def claim(
        id: str, place: str, statement: str, corrected: str = "", kind: Kind = Kind.FORMULA
    ) -> Callable[[Check], Check]:
        def register(check: Check) -> Check:
            claims.append(Claim(id, paper, place, statement, corrected, check, kind))
            return check

        return register

    return claim
