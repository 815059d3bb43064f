"""Results that are tables leave as Polars frames and as CSV that no spreadsheet runs."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from reports import comparison as made_up_comparison
from reports import report as made_up
from torch import nn

import spiritlevel as sl
from spiritlevel.errors import InputError, needs
from spiritlevel.results import (
    Audit,
    BitPlan,
    Checkpoint,
    Checkpoints,
    Estimate,
    LayerBits,
    Margins,
    Report,
    ReportRow,
    Result,
    SampleTraces,
)
from spiritlevel.results.tables import Table, as_csv
from spiritlevel.results.training import SuspiciousSamples, TrainingCurves

REPORT, COMPARISON = made_up(12), made_up_comparison(12)
MATRIX = torch.diag(torch.arange(40.0, dtype=torch.float64)) + 0.1


def line(dimensions: int) -> sl.Landscape:
    data = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 3)
    return sl.landscape(nn.Linear(2, 2), data, points=3, dimensions=dimensions)


def suspects() -> SuspiciousSamples:
    columns = {name: torch.tensor([0.5, 0.25, 0.125]) for name in ("aum", "loss", "label", "predicted")}
    return SuspiciousSamples("aum", torch.tensor([7, 1, 4]), columns, columns, 9, 9, 2.0, 4, 1, 0)


def perturbation() -> sl.Perturbation:
    data = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 3)
    return sl.perturb(nn.Linear(2, 2), data, "int4")


TABLES: dict[str, Table] = {
    "report": REPORT,
    "comparison": COMPARISON,
    "audit": REPORT.audit,
    "traces": REPORT.traces,
    "margins": REPORT.margins,
    "line": line(1),
    "plane": line(2),
    "eigenpairs": sl.eigenvalues(MATRIX, k=3),
    "diagonal": sl.diagonal(MATRIX, probes=4),
    "batches": sl.BatchEigenvalues(torch.ones(2, 3), torch.zeros(2, 3), torch.tensor([True, False]), 4, 9),
    "density": sl.spectral_density(MATRIX, probes=2, steps=5),
    "smoothed": sl.spectral_density(MATRIX, probes=2, steps=5).density(),
    "spectrum": sl.spectrum(MATRIX, probes=2, steps=10),
    "suspects": suspects(),
    "perturbation": perturbation(),
    "bits": BitPlan((LayerBits("=0", 4, 2, 0.5, 0.25),), 2.0, "square", 2, (Estimate(0.5),) * 3, (Estimate(0.9),) * 3),
    "checkpoints": Checkpoints(
        (Checkpoint("=1", Estimate(0.5), Estimate(0.9)), Checkpoint("2", Estimate(1), Estimate(1)))
    ),
    "curves": TrainingCurves(({"step": 1, "loss": 0.5, "reason": ""}, {"step": 2, "loss": 0.25, "reason": "=late"})),
}
ROWS = {
    "report": len(REPORT.rows),
    "comparison": len(COMPARISON.rows),
    "traces": 12,
    "margins": 12,
    "line": 3,
    "plane": 9,
    "eigenpairs": 3,
    "diagonal": 40,
    "batches": 6,
    "density": 10,
    "smoothed": 512,
    "spectrum": 5,
    "suspects": 3,
    "perturbation": 1,
    "bits": 1,
    "checkpoints": 2,
    "curves": 2,
}


def test_every_result_that_is_a_table_is_tried_here() -> None:
    kinds = {type(table) for table in TABLES.values()}
    assert {
        kind for kind in Result._types.values() if issubclass(kind, Table) and dataclasses.is_dataclass(kind)
    } == kinds


@pytest.mark.parametrize("name", TABLES)
def test_a_table_becomes_a_frame_and_the_same_table_in_csv(name: str, tmp_path: Path) -> None:
    table, path = TABLES[name], tmp_path / "new" / f"{name}.csv"
    frame = table.frame()
    assert frame.height == ROWS.get(name, frame.height) > 0
    text = table.to_csv(path)
    assert path.read_text(encoding="utf-8") == text
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == frame.columns
    assert len(rows) == frame.height + 1
    for column, kind in frame.schema.items():
        cells = [row[rows[0].index(column)] for row in rows[1:]]
        if kind == pl.Float64:
            for cell, value in zip(cells, frame[column], strict=True):
                assert math.isnan(float(cell)) if math.isnan(value) else float(cell) == value
        elif kind == pl.String:
            assert [cell.removeprefix("'") for cell in cells] == [value.removeprefix("'") for value in frame[column]]


def test_the_rows_of_a_report_hold_what_it_prints() -> None:
    frame = REPORT.frame()
    assert frame["measure"].to_list() == [row.name for row in REPORT.rows]
    assert frame["value"].to_list() == pytest.approx([row.value.value for row in REPORT.rows], nan_ok=True)
    assert frame["status"].to_list() == [row.kind for row in REPORT.rows]
    assert frame["low"].to_list() == pytest.approx([row.interval[0] for row in REPORT.rows], nan_ok=True)


def test_a_plane_keeps_each_loss_at_its_steps() -> None:
    plane = TABLES["plane"]
    assert isinstance(plane, sl.Landscape)
    for row in plane.frame().iter_rows(named=True):
        i, j = (steps.tolist().index(row[f"step_{k}"]) for k, steps in enumerate(plane.steps, 1))
        assert row["loss"] == float(plane.losses[i, j])
        assert row["quadratic"] == float(plane.quadratic[i, j])


def test_nodes_keep_their_weights_and_traces_their_layers() -> None:
    density = TABLES["density"]
    assert isinstance(density, sl.SpectralDensity)
    frame = density.frame()
    mean = sum(row["node"] * row["weight"] for row in frame.iter_rows(named=True))
    assert mean == pytest.approx(density.moment(1).value)
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    traces = SampleTraces(values, 0 * values, True, "exact", torch.tensor([3, 4]), {"0.weight": values / 2})
    assert traces.frame().row(1, named=True) == {
        "sample": 1,
        "trace": 2.0,
        "stderr": 0.0,
        "target": 4,
        "trace of 0.weight": 1.0,
    }
    several = dataclasses.replace(traces, targets=torch.zeros(2, 3))  # no place in a table of samples
    assert "target" not in several.frame().columns


@pytest.mark.parametrize(
    "empty",
    [
        Report("net", ()),
        sl.Comparison(("a", "b"), (), "none"),
        Audit(()),
        SampleTraces(torch.empty(0), torch.empty(0), True, "exact", torch.empty(0, dtype=torch.int64)),
        Margins(
            *(torch.empty(0) for _ in range(4)), torch.empty(0, dtype=torch.bool), torch.empty(0, dtype=torch.int64)
        ),
    ],
    ids=lambda result: type(result).__name__,
)
def test_an_empty_table_has_its_columns_and_their_kinds(empty: Table) -> None:
    frame = empty.frame()
    assert frame.height == 0
    assert pl.Float64 in frame.dtypes
    assert pl.Null not in frame.dtypes
    assert empty.to_csv() == ",".join(frame.columns) + "\n"


# ---------------------------------------------------------------- spreadsheets

HARMFUL = ['=HYPERLINK("http://x","y")', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1"]


@pytest.mark.parametrize("text", HARMFUL)
def test_no_spreadsheet_runs_a_text(text: str) -> None:
    row = ReportRow(text, Estimate(-2.5), "sharper", "curvature", text, text, text, (), "forward")
    found = Report("net", (row,))
    assert found.frame()["measure"].to_list() == [text]  # the frame says what is there
    (shown,) = list(csv.DictReader(io.StringIO(found.to_csv(), newline="")))
    for column in ("measure", "meaning", "formula", "reference"):
        assert shown[column] == f"'{text}"
    assert shown["value"] == "-2.5"  # a number is one


def test_no_spreadsheet_runs_a_heading() -> None:
    text = as_csv(pl.DataFrame({"=1+1": [1], "a=1": ["b=2"]}))
    assert text == "'=1+1,a=1\n1,b=2\n"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.csv"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        REPORT.to_csv(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- the tracker, and a missing package


def tracker() -> sl.Tracker:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    found = sl.Tracker(net, (torch.randn(8, 2), torch.tensor([0, 1] * 4)), every=1, share=math.inf)
    found.step()
    return found


def test_a_tracker_writes_its_rows(tmp_path: Path) -> None:
    found = tracker()
    found.rows[0]["reason"] = "=1+1"
    text = found.to_csv(tmp_path / "rows.csv")
    (shown,) = list(csv.DictReader((tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()))
    assert text == (tmp_path / "rows.csv").read_text(encoding="utf-8")
    assert float(shown["loss"]) == found.rows[0]["loss"]
    assert shown["reason"] == "'=1+1"


def test_a_recorder_writes_its_samples(tmp_path: Path) -> None:
    recorder = sl.Recorder(3)
    recorder.record(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]), [0, 2])
    text = recorder.to_csv(tmp_path / "samples.csv")
    shown = list(csv.DictReader((tmp_path / "samples.csv").read_text(encoding="utf-8").splitlines()))
    assert text == (tmp_path / "samples.csv").read_text(encoding="utf-8")
    assert [row["margin"] for row in shown] == ["2.0", "", "-1.0"]
    assert [list(row) for row in shown] == [recorder.frame().columns] * 3


def test_without_polars_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, recorder = tracker(), sl.Recorder(3)
    monkeypatch.setitem(sys.modules, "polars", None)
    calls: list[Any] = [REPORT.frame, REPORT.to_csv, TABLES["eigenpairs"].frame, found.frame, found.to_csv]
    calls += [recorder.frame, recorder.to_csv, recorder.history]
    for call in calls:
        with pytest.raises(InputError, match=r"a table needs polars, .* pip install 'spiritlevel\[report\]'"):
            call()


def test_only_the_package_that_is_needed_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"), needs("a table"):
        import nowhere  # noqa: F401
    with pytest.raises(ZeroDivisionError), needs("a table"):
        _ = 1 / 0
