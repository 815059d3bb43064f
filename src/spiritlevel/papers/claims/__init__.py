"""The three papers as programs: every formula, theorem, inequality and count is a `Claim` that finds its verdict.

A claim's check computes numbers from a seed; the verdict follows from them by one rule for all claims (`decide`):
holds, holds under conditions, misprint, false, inconsistent, or undecided where a check could not be completed. Where
a statement fails as printed, the check shows the failure and tests the corrected form as well.

>>> ruling = run(id="C-4-softmax")[0]
>>> str(ruling.finding.verdict), ruling.finding.evidence["counted"]
('holds', 7850)
"""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spiritlevel.arguments import checked
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, checked_seed
from spiritlevel.papers.claims import paper_a, paper_b, paper_c
from spiritlevel.papers.claims.base import PAPERS as PAPERS
from spiritlevel.papers.claims.base import Claim as Claim
from spiritlevel.papers.claims.base import Finding as Finding
from spiritlevel.papers.claims.base import Kind as Kind
from spiritlevel.papers.claims.base import Verdict as Verdict
from spiritlevel.papers.claims.base import decide as decide

CLAIMS: tuple[Claim, ...] = (*paper_a.CLAIMS, *paper_b.CLAIMS, *paper_c.CLAIMS)
"""All claims, in the order of the papers."""


@dataclass(frozen=True)
class Ruling:
    """A claim and what its check found."""

    claim: Claim
    finding: Finding
    seed: int

    def record(self) -> dict[str, Any]:
        """Plain values for JSON, tables and pages."""
        claim, finding = self.claim, self.finding
        return {
            "id": claim.id,
            "paper": claim.paper,
            "kind": str(claim.kind),
            "place": claim.place,
            "statement": claim.statement,
            "corrected": claim.corrected,
            "rule": claim.rule,
            "verdict": str(finding.verdict),
            "evidence": finding.evidence,
            "text": finding.text,
            "volatile": list(finding.volatile),
            "reference": f"paper {claim.paper}, “{PAPERS[claim.paper]}”, {claim.place}",
            "seed": self.seed,
        }


@checked
def select(paper: str | None = None, id: str | None = None) -> tuple[Claim, ...]:
    """The claims of one paper, the claim with an id (in upper or lower case), or all.

    >>> [claim.id for claim in select(id="a-3.1")]
    ['A-3.1']
    >>> select(id="A-3.11")
    Traceback (most recent call last):
    ...
    spiritlevel.errors.InputError: unknown claim 'A-3.11': did you mean 'A-3.1' ...
    """
    if paper is not None and paper not in PAPERS:
        raise InputError(f"unknown paper {paper!r}: the papers are {', '.join(PAPERS)}.")
    chosen = tuple(claim for claim in CLAIMS if paper in (None, claim.paper))
    if id is None:
        return chosen
    found = tuple(claim for claim in chosen if claim.id.casefold() == id.casefold())
    if not found:
        names = {claim.id.casefold(): claim.id for claim in chosen}
        below = [name for name in names if name.startswith(f"{id.casefold()}-")]
        near = below or difflib.get_close_matches(id.casefold(), names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(repr(names[name]) for name in near)}? " if near else ""
        where = "" if paper is None else f" of paper {paper}"
        raise InputError(f"unknown claim{where} {id!r}: {hint}`spiritlevel claims` lists all {len(CLAIMS)}.")
    return found


@checked
def examine(claim: Claim, seed: int = 0) -> Ruling:
    """Run one check. One that raises leaves its claim undecided, with the reason; random states stay as they were."""
    try:
        with preserved_random_state(), _one_thread():
            finding = claim.check(seed)
    except Exception as reason:  # whatever went wrong, the other claims can still be decided
        text = f"The check could not be completed: {type(reason).__name__}: {reason}"
        finding = Finding(Verdict.UNDECIDED, {}, text)
    return Ruling(claim, finding, seed)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices are quicker with one thread, and sums then run in the same order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@checked
def run(
    *,
    paper: str | None = None,
    id: str | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Ruling]:
    """Run the checks of all claims, of one paper's, or of one, and return what they found.

    `progress(what, done, total)` is called after every claim. Cost: some 15 s for all of them on one core.
    """
    checked_seed(seed)
    chosen = select(paper, id)
    rulings = []
    for done, claim in enumerate(chosen, 1):
        rulings.append(examine(claim, seed))
        if progress is not None:
            progress(f"claim {claim.id}", done, len(chosen))
    return rulings


def tally(rulings: Sequence[Ruling]) -> dict[str, int]:
    """How many claims got each verdict, in the order of `Verdict`, zeros left out."""
    counts = Counter(ruling.finding.verdict for ruling in rulings)
    return {str(verdict): counts[verdict] for verdict in Verdict if counts[verdict]}


def decided(rulings: Sequence[Ruling]) -> bool:
    """Whether every claim got a verdict."""
    return all(ruling.finding.verdict is not Verdict.UNDECIDED for ruling in rulings)
