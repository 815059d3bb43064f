"""The benchmarks still run: the smallest of them, without peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_smoke(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/run.py", "--smoke", "--json", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    parts = json.loads((tmp_path / "rows.json").read_text())
    rows = [row for part in parts.values() for row in part["rows"]]
    assert {"exact / forward pass", "Hessian product / gradient"} <= {row["what"] for row in rows}
    areas = "per-sample traces", "operators", "trace of a data set", "spectral density", "growth"
    assert all(any(row["area"].startswith(area) for row in rows) for area in areas)
    measured = [row for row in rows if row["value"] is not None]
    assert all(row["value"] >= 0 for row in measured)
    assert all("not installed" in row["note"] or "failed" in row["note"] for row in rows if row["value"] is None)
