"""Rulings as text, Markdown and one self-contained HTML page. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from spiritlevel import results
from spiritlevel.errors import counted, needs
from spiritlevel.papers.claims.base import PAPERS, PASSES, Kind, Verdict

Record = dict[str, Any]


def figure(name: str, value: Any) -> str:
    """A number of the evidence to four digits; a rounding error as a bound, which is the same on every machine.

    >>> figure("largest error", 3.1e-15), figure("trace", 12.3456), figure("points", 40000)
    ('< 1e-9', '12.35', '40,000')
    """
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "[" + ", ".join(figure(name, item) for item in value) + "]"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "< 1e-9" if "error" in name and abs(value) < 1e-9 else results.figure(value)
    return str(value)


def numbers(record: Record, *, facts: bool = False, volatile: bool = True) -> list[str]:
    """`name: number` for the evidence; with or without what passed, and what differs between machines."""
    return [
        _fact(name, value) if name.endswith(PASSES) else f"{name}: {figure(name, value)}"
        for name, value in record["evidence"].items()
        if (facts or not name.endswith(PASSES)) and (volatile or name not in record["volatile"])
    ]


_FACTS = {
    "printed": "As printed it {}.",
    "agree": "The comparison of the records {}.",
    "mended": "With its symbols put right it {}.",
    "within": "Under the condition it {}.",
    "instead": "What holds in its place {}.",
}


def _fact(name: str, passed: bool) -> str:
    """What was tested, as a sentence.

    >>> _fact("printed passes", True), _fact("mended passes", False)
    ('As printed it passes.', 'With its symbols put right it fails.')
    """
    return _FACTS[name.removesuffix(PASSES)].format("passes" if passed else "fails")


def story(record: Record) -> str:
    """Everything about one claim: statement, correction, rule, numbers, reference.

    >>> from spiritlevel.papers.claims import run
    >>> print(story(run(id="C-4-split")[0].record()))
    C-4-split: inconsistent
    ...
    """
    parts = [
        f"{record['id']}: {record['verdict']}",
        f"Reference: {record['reference']}.",
        f"Kind: {record['kind']} ({Kind(record['kind']).meaning}).",
        f"Printed: {record['statement']}",
        f"What holds: {record['corrected']}" if record["corrected"] else "",
        f"Rule: {record['rule']}",
        f"Found (seed {record['seed']}): {record['text']}",
        "\n".join(f"  {line}" for line in numbers(record, facts=True)),
    ]
    return "\n".join(part for part in parts if part)


def counts(records: Iterable[Record]) -> str:
    """`12 hold, 3 misprints`, in the order of `Verdict`."""
    found = [record["verdict"] for record in records]
    return ", ".join(_several(found.count(verdict), verdict) for verdict in Verdict if verdict in found)


_PLURALS = {Verdict.HOLDS: "hold", Verdict.CONDITIONS: "hold under conditions", Verdict.MISPRINT: "misprints"}


def _several(count: int, verdict: Verdict) -> str:
    return f"{count} {verdict if count == 1 else _PLURALS.get(verdict, verdict)}"


def kinds(records: Iterable[Record]) -> str:
    """`12 formulas, 1 record`, in the order of `Kind`."""
    found = [record["kind"] for record in records]
    return ", ".join(counted(found.count(kind), kind) for kind in Kind if kind in found)


def evidence(record: Record) -> str:
    """What a check found, in words and numbers, without the numbers that differ between machines."""
    shown = "; ".join(numbers(record, volatile=False))
    return f"{record['text']} ({shown})" if shown else record["text"]


def cell(text: str) -> str:
    """A text, escaped for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("\n", " ")


_MEANINGS = {
    Verdict.CONDITIONS: "passes only under the stated condition",
    Verdict.MISPRINT: "fails as printed, passes with its symbols put right",
    Verdict.FALSE: "the statement itself fails",
    Verdict.INCONSISTENT: "two places of the document, or document and public fact, disagree",
}


def to_markdown(records: Sequence[Record]) -> str:
    """The document `docs/claims.md`: one table per paper. Numbers that differ between machines are left out."""
    lines = [
        "# Claims",
        "",
        "Every formula, theorem, inequality and count of the three papers, checked by a program. This page is written "
        "by `make docs` from a run of `spiritlevel claims`; do not edit it. `spiritlevel claims --id ID` shows the "
        "whole story of a claim, and the rule by which it is decided; `--seed` changes the random instances, not the "
        "verdicts.",
        "",
        "Verdicts: **holds**; "
        + "; ".join(f"**{verdict}** ({meaning})" for verdict, meaning in _MEANINGS.items())
        + ". They follow from the numbers by one rule, "
        "`spiritlevel.claims.decide`. Numbers of trained networks differ in their digits between machines and are left "
        "out here.",
        "",
        "Kinds: " + "; ".join(f"**{kind}** ({kind.meaning})" for kind in Kind) + ".",
        "",
        f"{counted(len(records), 'claim')}: {counts(records)}. By kind: {kinds(records)}.",
    ]
    for paper, title in PAPERS.items():
        rows = [record for record in records if record["paper"] == paper]
        if not rows:
            continue
        summary = f"{counted(len(rows), 'claim')}: {counts(rows)}. By kind: {kinds(rows)}."
        lines += ["", f"## Paper {paper}: {title}", "", summary, ""]
        lines += [
            "| Claim | Kind | Place | Printed | Verdict | What holds | Evidence |",
            "|---|---|---|---|---|---|---|",
        ]
        for record in rows:
            cells = [record[name] for name in ("kind", "place", "statement", "verdict", "corrected")]
            lines.append(f"| `{record['id']}` | " + " | ".join(map(cell, [*cells, evidence(record)])) + " |")
    return "\n".join(lines) + "\n"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Claims</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
article { border-top: 1px solid #ccc; padding: .6rem 0; }
h3 { font-size: 1rem; margin: 0; display: flex; gap: .8rem; align-items: baseline; flex-wrap: wrap; }
.verdict { border-radius: .3rem; padding: 0 .5rem; color: #fff; background: #555; }
.holds { background: #1b6e3c; } .holds-under-conditions { background: #2a5d9f; } .misprint { background: #8a5a00; }
.false { background: #a32020; } .inconsistent { background: #6b3fa0; }
.place { font-weight: normal; color: #555; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .1rem 1rem; margin: .4rem 0 0; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } article { border-color: #444; }
  .place, dt { color: #aaa; } }
</style>
</head>
<body>
<h1>Claims</h1>
<p>{{ total }} of the papers, checked by a program. Seed {{ seed }}: {{ summary }}.</p>
{% for verdict, meaning in meanings.items() %}
{{ "<p>" | safe if loop.first }}<b>{{ verdict }}</b>: {{ meaning }}{{ ".</p>" | safe if loop.last else ";" }}
{% endfor %}
{% for paper, title in papers.items() %}
{% set rows = records | selectattr("paper", "equalto", paper) | list %}
{% if rows %}
<h2>Paper {{ paper }}: {{ title }}</h2>
{% for record in rows %}
<article id="{{ record.id }}">
<h3><span>{{ record.id }}</span>
<span class="verdict {{ record.verdict | replace(' ', '-') }}">{{ record.verdict }}</span>
<span class="place">{{ record.place }}</span></h3>
<dl>
<dt>Kind</dt><dd>{{ record.kind }}</dd>
<dt>Printed</dt><dd>{{ record.statement }}</dd>
{% if record.corrected %}<dt>What holds</dt><dd>{{ record.corrected }}</dd>{% endif %}
<dt>Found</dt><dd>{{ record.text }}</dd>
{% for line in numbers(record) %}<dt></dt><dd>{{ line }}</dd>{% endfor %}
<dt>Rule</dt><dd>{{ record.rule }}</dd>
</dl>
</article>
{% endfor %}
{% endif %}
{% endfor %}
</body>
</html>
"""


def to_html(records: Sequence[Record], seed: int) -> str:
    """One page that needs no network; all texts are escaped."""
    with needs("a page of claims"):
        from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    found = {record["verdict"] for record in records}
    meanings = {str(verdict): meaning for verdict, meaning in _MEANINGS.items() if verdict in found}
    heading = {"total": counted(len(records), "claim"), "seed": seed, "summary": counts(records), "meanings": meanings}
    return template.render(records=records, papers=PAPERS, numbers=numbers, **heading) + "\n"
