"""Every study at smoke scale, and the folder that keeps its run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from spiritlevel.errors import InputError
from spiritlevel.papers.studies import (
    Config,
    Range,
    Ruling,
    Run,
    Statement,
    Study,
    Verdict,
    catalogue,
    combine,
    correlation,
    execute,
    find,
)
from spiritlevel.papers.studies.base import SUMMARY, read_summary

LARGE = Statement("large", "the number is large", "3", "above 2", "it is below", Range(low=2.0), trained=False)


@dataclass(frozen=True, kw_only=True)
class Numbers(Config):
    """A study of a number."""

    number: float = 3.0
    kind: str = "a"


class Interrupted(Exception):
    """Stands for a kill."""


def study(calls: list[str] | None = None, *, stop: bool = False) -> Study:
    calls = [] if calls is None else calls

    def measure(config: Numbers) -> dict[str, float]:
        calls.append("measure")
        return {"number": config.number, "third": 1 / 3, "nothing": float("nan")}

    def run(config: Numbers, run: Run) -> Iterator[Ruling]:
        found = run.once("first", lambda: measure(config))
        if stop:
            raise Interrupted
        run.table("numbers", [found])
        run.report(third=found["third"])
        yield LARGE.judge(found["number"])

    return Study(
        "numbers",
        "A number",
        "nowhere",
        Numbers,
        (LARGE,),
        run,
        scales={"smoke": {"number": 2.5}, "laptop": {"number": 4.0}},
        adapted={"laptop": {"kind": {"b": {"number": 5.0}}}},
        sweep={"kind": ("a", "b")},
    )


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_smoke(name: str, tmp_path: Path) -> None:
    found = find(name)
    assert all((found.title, found.source, found.statements))
    assert len({statement.id for statement in found.statements}) == len(found.statements)
    judged = set()
    for config in found.jobs("smoke", seeds=[0]):
        summary = execute(found, config, tmp_path / "out", cache=tmp_path / "networks")
        folder = found.folder(config, tmp_path / "out")
        ids = [ruling["id"] for ruling in summary["rulings"]]
        judged |= set(ids)
        assert len(set(ids)) == len(ids), "one verdict a statement"
        assert all((folder / name).stat().st_size > 0 for name in summary["files"])
        assert any(name.endswith(".svg") for name in summary["files"]), "a study shows a chart"
        assert any(name.endswith(".parquet") for name in summary["files"]), "a study keeps its numbers"
        assert read_summary(folder) == summary
    assert judged == {statement.id for statement in found.statements}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    calls: list[str] = []
    first = execute(study(calls), Numbers(), tmp_path)
    assert execute(study(calls), Numbers(), tmp_path) == first
    assert calls == ["measure"]


def test_a_finished_run_is_judged_by_the_rules_of_today(tmp_path: Path) -> None:
    """Of what an older program kept, a verdict counts for nothing, and fields that came later have their defaults."""
    execute(study(), Numbers(), tmp_path)
    path = study().folder(Numbers(), tmp_path) / SUMMARY
    summary = json.loads(path.read_text())
    old = {"id": "large", "text": "", "ours": 3.0, "low": None, "high": None, "verdict": "reproduced", "remark": "Old."}
    del summary["config"]["kind"]
    path.write_text(json.dumps({**summary, "rulings": [old]}))
    again = execute(study(), Numbers(), tmp_path)
    assert again["config"]["kind"] == "a"
    (row,) = combine([again], [LARGE])
    assert (row["verdict"], row["reason"], row["remark"]) == (Verdict.UNDECIDED, "only 1 of the 3 seeds needed", "Old.")


def test_a_killed_run_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(Interrupted):
        execute(study(calls, stop=True), Numbers(), tmp_path)
    resumed = execute(study(calls), Numbers(), tmp_path)
    assert calls == ["measure"], "the piece was kept"
    whole = execute(study(), Numbers(), tmp_path / "other")
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}


@pytest.mark.parametrize("damage", ["summary cut", "table cut", "table gone"])
def test_a_damaged_run_is_not_read_as_whole(tmp_path: Path, damage: str) -> None:
    whole = execute(study(), Numbers(), tmp_path)
    folder = study().folder(Numbers(), tmp_path)
    path = folder / (SUMMARY if damage == "summary cut" else "numbers.parquet")
    if damage == "table gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
    assert read_summary(folder) is None
    assert {**execute(study(), Numbers(), tmp_path), "seconds": 0} == {**whole, "seconds": 0}


@pytest.mark.parametrize("damage", ["cut", "edited"])
def test_a_damaged_piece_is_computed_again(tmp_path: Path, damage: str) -> None:
    calls: list[str] = []
    with pytest.raises(Interrupted):
        execute(study(calls, stop=True), Numbers(), tmp_path)
    (path,) = study().folder(Numbers(), tmp_path).glob("pieces/*.json")
    content = path.read_text()
    path.write_text(content[:-2] if damage == "cut" else "7.5")
    execute(study(calls), Numbers(), tmp_path)
    assert calls == ["measure", "measure"]
    assert path.read_text() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"numbers could not write to .*file.*--out"):
        execute(study(), Numbers(), tmp_path / "file")


def test_jobs_are_every_combination() -> None:
    jobs = study().jobs("smoke", seeds=[0, 1], number=[1.0, 2.0])
    assert len(jobs) == 2 * 2 * 2
    assert len({study().key(job) for job in jobs}) == 8
    assert [job.seed for job in study().jobs("laptop", kind="a")] == [0, 1, 2, 3, 4]
    found = [vars(job)["number"] for job in study().jobs("laptop", seeds=[0])]
    assert found == [4.0, 5.0]  # one kind has a size of its own
    assert vars(study().at("laptop", kind="b", number=6.0))["number"] == 6.0
    (single,) = study().jobs("smoke", kind="a")
    assert single == Numbers(scale="smoke", number=2.5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"numbr": 1}, "unknown option of numbers 'numbr': did you mean 'number'"),
        ({"number": []}, "at least one value"),
        ({"seeds": [0, 1, 0]}, "numbers: seed 0 is given twice; give each value once"),
        ({"number": [1.0, 1.0]}, "numbers: number 1.0 is given twice"),
        ({"seeds": [-1]}, "seed must be a whole number from 0 to 4,000,000,000, got -1"),
        ({"scale": "papr"}, "unknown scale 'papr': did you mean 'paper'"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        study().jobs(**given)


def test_seeds_are_combined(tmp_path: Path) -> None:
    numbers = [2.5, 1.5, 3.5, 0.5, 1.75]
    configs = [Numbers(number=number, seed=seed) for seed, number in enumerate(numbers)]
    summaries = [execute(study(), config, tmp_path) for config in configs]
    for summary in summaries:
        summary["config"].pop("number")  # the seeds of one setting
    (row,) = combine(json.loads(json.dumps(summaries)), [LARGE])
    mean = sum(numbers) / 5
    assert row["verdict"] == Verdict.UNDECIDED
    assert (row["seeds"], row["agree"]) == (5, 2)
    part = row["parts"][""]
    assert part["mean"] == pytest.approx(mean)
    spread = (sum((number - mean) ** 2 for number in numbers) / 4 / 5) ** 0.5
    assert part["high"] - part["mean"] == pytest.approx(2.7764451 * spread)
    assert "verdict" not in summaries[0]["rulings"][0], "numbers are kept, verdicts are not"
    assert combine(summaries, []) == [], "statements that a study has no more are left out"


def test_the_interval_of_a_correlation_stays_within_one() -> None:
    affine = find("affine")
    statement = next(statement for statement in affine.statements if statement.id == "pyhessian")
    summaries = [
        {
            "study": "affine",
            "config": {"seed": seed},
            "rulings": [statement.judge(r, remark="Two seeds.").record()],
        }
        for seed, r in enumerate((0.9695, 0.9825))
    ]
    (row,) = combine(summaries, affine.statements)
    assert row["parts"][""]["high"] == 1
    assert row["parts"][""]["low"] == pytest.approx(0.893, abs=1e-3)
    assert row["remark"] == "Two seeds."


def test_a_correlation_over_one_checkpoint_says_so() -> None:
    rows = [
        {"step": 0, "trace": way, "quantity": quantity, "points": points, "r": 0.5, "n": 40, "removed": 0}
        for way in correlation.WAYS
        for quantity in correlation.QUANTITIES
        for points in ("correct", "incorrect")
    ]
    found = {ruling.statement.id: ruling.remark for ruling in correlation.judge(rows, {0: 0.6}, 0.6, 0.1)}
    assert found["incorrect"].endswith("there. So this rests on a single checkpoint.")


@pytest.mark.parametrize("divisions", [0, 10, -3])
def test_the_triangle_has_its_middle_on_the_grid(divisions: int) -> None:
    with pytest.raises(InputError, match=r"confidence needs a multiple of 3|divisions must be .* of at least 0"):
        find("confidence").at("smoke", divisions=divisions)


def test_statements_of_a_study_can_be_told_apart() -> None:
    for each in catalogue().values():
        texts = [statement.text for statement in each.statements]
        assert len(set(texts)) == len(texts), each.name


def results_tool() -> Any:
    return script("make_results_doc")


def test_the_page_of_findings_shows_the_results_that_are_kept() -> None:
    page = (Path(__file__).parents[1] / "docs" / "findings.md").read_text(encoding="utf-8")
    findings = script("make_findings_doc")
    summaries = findings.kept()
    assert findings.text(summaries) == page, "run `make docs`"
    drawn = (Path(__file__).parents[1] / "docs" / findings.PICTURE).read_text(encoding="utf-8")
    labels = re.findall(r">([^<>]+)</text>", findings.picture(findings.judged(summaries)))
    assert re.findall(r">([^<>]+)</text>", drawn) == labels, "run `make docs`"


@pytest.mark.parametrize(
    ("ratios", "status"),
    [
        ((1.8, 2.0, 2.2), "survives"),
        ((0.5, 0.4, 0.45), "fails"),
        ((1.1, 2.0, 9.0), "untested here"),
        ((1.8, 2.0), "untested here"),
        ((), "untested here"),
    ],
)
def test_a_finding_can_survive_fail_and_be_untested(ratios: tuple[float, ...], status: str) -> None:
    findings, modes = script("make_findings_doc"), find("batchnorm-mode")
    (statement,) = (each for each in modes.statements if each.id == "evaluation mode")
    summaries = [
        {
            "study": modes.name,
            "config": {**vars(modes.at("small")), "seed": seed},
            "rulings": [statement.judge(ratio, accuracy=0.3, chance=0.01).record()],
        }
        for seed, ratio in enumerate(ratios)
    ]
    lines = findings.conclusions(findings.judged(summaries))
    short, found = (line for line in lines if statement.text in line)
    assert f" | {status} | " in short
    assert found.startswith(f"| {status} |")
    assert ("width 0.1 (paper 1.0)" in found) == bool(ratios), "a reduced scale is named"


def test_the_verdict_of_a_conclusion_counts_its_settings() -> None:
    findings = script("make_findings_doc")
    (statement,) = (each for each in find("batchnorm-mode").statements if each.id == "evaluation mode")
    tried = {word: findings.Tried(statement, "", word, "", "", "") for word in findings.WORDS}
    survives, fails, untested = tried.values()
    assert findings.verdict([survives]) == findings.verdict([survives, survives]) == "survives"
    assert findings.verdict([untested, survives, untested]) == "survives in 1 of 3, untested in 2"
    assert findings.verdict([untested, fails, survives]) == "survives in 1 of 3, fails in 1, untested in 1"
    assert findings.counted([[fails], [survives, survives]]) == "2 survive, 1 fails"


def test_the_page_of_results_shows_the_results_that_are_kept() -> None:
    page = (Path(__file__).parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    assert results_tool().text() == page, "run `make docs`"


def test_the_page_of_results_says_which_rule_gave_a_verdict() -> None:
    tool = results_tool()
    row = {"verdict": "undecided", "kind": "experiment", "reproduced": "above 2", "fails": "it is below"}
    row |= {"seeds": 1, "agree": 0, "reason": "only 1 of the 3 seeds needed"}
    assert tool.rule(row) == "Reproduced if above 2; fails if it is below."
    assert tool.reason(row) == "Only 1 of the 3 seeds needed."
    assert tool.verdict({**row, "seeds": 5, "agree": 2}) == "undecided, 2 of 5 seeds"
    assert tool.verdict({**row, "kind": "identity", "verdict": "not reproduced"}) == "does not hold"
    page = tool.text()
    assert not any(text in page for text in ("(1 minutes", "(0 minutes", "e-323", "):  ", "so does the trace"))
    listed = page[page.index("What was not run") : page.index("## ")]
    for text in ("lenet-tanh-mnist | ", "Fig. 7 (CIFAR-10) | ", "9,960 parameters | ", "grid of learning rates"):
        assert text in listed or text.split(" | ")[0] not in listed


def test_what_was_not_run_is_listed_setting_by_setting() -> None:
    tool = results_tool()
    studies = [find("optimizers"), find("correlation"), find("weight-decay")]
    nothing: dict[str, list[Any]] = {each.name: [] for each in studies}
    everything = "\n".join(tool.not_run(studies, nothing))
    for text in ("Fig. 7 (CIFAR-10) | not run", "lenet-tanh-mnist | not run", "9,960 parameters | not run"):
        assert text in everything
    assert everything.count("the grid of learning rates of App. A.1 | not run") == 2
    runs = [{"config": {"data": "cifar10", "scale": "small", "seed": seed, "grid": True}} for seed in (0, 1)]
    some = "\n".join(tool.not_run(studies, {**nothing, "optimizers": runs}))
    assert "Fig. 7 (CIFAR-10) | 2 of 3 seeds" in some
    runs += [{"config": {"data": "cifar10", "scale": "small", "seed": 2, "grid": True}}]
    assert "Fig. 7" not in "\n".join(tool.not_run(studies, {**nothing, "optimizers": runs}))
