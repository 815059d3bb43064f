"""The benchmarks still run: the smallest of them, without peers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


_QUICK = ["probes", "operators", "spectra"]


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(["--only", *_QUICK], id="some"), pytest.param([], id="all", marks=pytest.mark.slow)],
)
def test_smoke(tmp_path: Path, chosen: list[str]) -> None:
    command = [sys.executable, "benchmarks/run.py", "--smoke", *chosen, "--json", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    parts = json.loads((tmp_path / "rows.json").read_text())
    rows = [row for part in parts.values() for row in part["rows"]]
    assert "Hessian product / gradient" in {row["what"] for row in rows}
    areas = ["probes", "operators", "trace of a data set", "spectral density"]
    if not chosen:
        assert "exact / forward pass" in {row["what"] for row in rows}
        areas += ["per-sample traces", "growth"]
    assert all(any(row["area"].startswith(area) for row in rows) for area in areas)
    measured = [row for row in rows if row["value"] is not None]
    assert all(row["value"] >= 0 for row in measured)
    assert all("not installed" in row["note"] or "failed" in row["note"] for row in rows if row["value"] is None)


@pytest.mark.slow
def test_the_benchmark_of_wrong_labels_resumes_and_names_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/labels.py", "--smoke", "--out", str(tmp_path / "pieces")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=250)
    pieces = sorted((tmp_path / "pieces").glob("*.json"))
    assert len(pieces) == 2
    before = [piece.stat().st_mtime_ns for piece in pieces]
    again = [*command, "--page", str(tmp_path / "labels.md")]
    subprocess.run(again, cwd=ROOT, check=True, capture_output=True, timeout=100)
    assert [piece.stat().st_mtime_ns for piece in pieces] == before, "what is done is not done again"
    page = (tmp_path / "labels.md").read_text()
    for row in ("loss", "margin", "AUM", "cumulative loss", "forgetting", "per-sample trace", "gradient norm"):
        assert f"| {row} | 0." in page
    assert "2 of 2 pieces are in. AUM, without further training, has a higher AUROC" in page
    for package in ("cleanlab", "kronfluence"):
        missing = importlib.util.find_spec(package) is None
        assert (f"{package} is not installed" in page) == missing
    found = json.loads(pieces[0].read_text())["rows"]
    assert found["AUM"]["auroc"] > 0.8
    assert found["per-sample trace"]["auroc"] < 0.7
