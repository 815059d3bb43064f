"""`spiritlevel reproduce`: options from the configs, several jobs, one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spiritlevel.cli import main
from spiritlevel.cli.reproduce import number, parse
from spiritlevel.papers.studies import catalogue


def test_the_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in catalogue())


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_every_study_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"For example: spiritlevel reproduce {name}" in shown
    assert "--scale smoke|laptop|small|paper" in shown
    own = shown[shown.index("--out DIR") :]  # the study's options come last
    assert not any(word in own for word in ("None", "tuple[", "str |"))


def test_a_list_of_values_makes_independent_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["reproduce", "confidence", "--scale", "smoke", "--divisions", "6,9", "--out", str(tmp_path / "out")]
    assert main([*args, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["config"]["divisions"] for row in found["rows"]] == [6, 6, 9, 9]
    assert {row["verdict"] for row in found["rows"]} == {"reproduced"}
    assert (found["command"], found["study"]) == ("reproduce", "confidence")
    assert all((Path(folder) / "summary.json").exists() for folder in found["runs"])
    shown = capsys.readouterr().out
    assert "reproduced if the largest value at the three corners is below 1e-12" in shown
    assert "divisions" in shown
    assert "scale, 2 jobs." in " ".join(shown.split())
    assert "6, middle: The largest deviation; the value is 0.6667." in shown  # remarks stand below the table, not in it
    assert "\n  fails if it is not." in shown  # a rule is indented as a whole
    assert "middle: 1 − η is" in shown  # a row goes by the name that its rule and its remark go by


def test_help_names_the_defaults_of_the_scales(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "confidence", "--help"]) == 0
    assert "(default: 120; smoke 30)" in " ".join(capsys.readouterr().out.replace("│", "").split())


def test_seeds() -> None:
    command = parse(["--scale", "smoke", "confidence", "--seeds", "3,5"])
    assert (command.scale, command.seeds) == ("smoke", "3,5")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["confidenc"], "unknown study 'confidenc': did you mean 'confidence'?"),
        (["confidence", "--scale", "papr"], "unknown scale 'papr': did you mean 'paper'?"),
        (
            ["confidence", "--divisions", "ten"],
            "--divisions takes a whole number, or several separated by commas, got 'ten'.",
        ),
        (["confidence", "--divisions", "10"], "confidence needs a multiple of 3 as --divisions, so that"),
        (["confidence", "--seeds", "1;2"], "--seeds takes a whole number, or several separated by commas, got '1;2'."),
        (["confidence", "--seeds", "0,0"], "confidence: seed 0 is given twice; give each value once."),
        (["confidence", "--divisions", "6,9,6"], "confidence: divisions 6 is given twice"),
        (["confidence", "--seeds", "-1"], "--seeds must be a whole number from 0 to 4,000,000,000, got -1."),
        (["confidence", "--seed", "-1"], "--seed must be a whole number from 0 to 4,000,000,000, got -1."),
        (["confidence", "--out", __file__], "--out needs a folder, but"),
        (
            ["confidence", "--divison", "4"],
            "did you mean '--divisions'? See `spiritlevel reproduce confidence --help`.",
        ),
        (["confidence", "--scale", "small"], "confidence has no scale small; choose smoke, laptop or paper."),
        (["weight-decay", "--gammas", "a,b"], "--gammas takes a number, or several separated by commas, got 'a,b'."),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *args]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_numbers_are_shown_with_their_interval() -> None:
    def shown(mean: float, low: float | None = None, high: float | None = None, *, ratio: bool = False) -> str:
        return number({"ours": mean, "parts": {"": {"mean": mean, "low": low, "high": high, "ratio": ratio}}})

    assert shown(0.97123, 0.9, 1.0) == "0.9712 [0.9, 1]"
    assert shown(2.0, 1.5, 3.0, ratio=True) == "× 2 [1.5, 3]"
    assert shown(1.976e-323) == "below 1e-300"
    assert number({"ours": None, "parts": {}}) == "undefined"
    assert number({"ours": "12 and 13", "parts": {}}) == "12 and 13"
    parts = {"λ₁": {"mean": 2.0, "low": None, "high": None, "ratio": True}}
    parts["gap"] = {"mean": -3.0, "low": -4.0, "high": -2.0, "ratio": False}
    assert number({"ours": None, "parts": parts}) == "λ₁ × 2; gap -3 [-4, -2]"
