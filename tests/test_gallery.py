"""The scripts of docs/gallery run, and show what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import polars as pl
import pytest

import spiritlevel as sl

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
PROMISES = {
    "own_model": ("trace", "It classifies", "The page:"),
    "compare_two_models": ("Trust long", "not comparable", "no reason to trust one"),
    "before_you_round": (
        "predictions should flip",
        "measured alone",
        "bits per weight",
        "has the lowest loss",
        "The page:",
    ),
    "track_training": ("8 measurements", "largest_eigenvalue"),
    "audit_measures": ("fisher_rao_norm", "trace can be moved at least", "rescale_layers preserves"),
    "audit_transformer": ("mix_heads preserves", "The network does not have:", "describe the parametrisation"),
}


def test_every_script_is_listed_and_tested() -> None:
    page = (GALLERY / "README.md").read_text(encoding="utf-8")
    scripts = {path.stem for path in GALLERY.glob("*.py")}
    assert scripts == set(PROMISES)
    assert all(f"({name}.py)" in page for name in scripts)


@pytest.mark.parametrize("name", PROMISES)
def test_the_script_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    runpy.run_path(str(GALLERY / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert all(text in shown for text in PROMISES[name])
    if name == "own_model":
        assert sl.Report.from_json(tmp_path / "report.json").left_out == {}
        assert (tmp_path / "report.html").is_file()
    if name == "track_training":
        assert pl.read_parquet(tmp_path / "curves.parquet").height == 8
        assert (tmp_path / "curves.svg").is_file()
