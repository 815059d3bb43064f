"""The tracker: right numbers, training that continues as it would without it, a bounded share of the time."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.answers import quantities
from spiritlevel.answers.tracking import Tracker
from spiritlevel.errors import InputError
from spiritlevel.results import codec
from spiritlevel.results.training import TrainingCurves


def points(count: int = 90) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def net(width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3)).double()


def train(model: nn.Module, steps: int, tracker: Tracker | None = None) -> None:
    inputs, targets = points()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
        if tracker is not None:
            tracker.step()


def test_rows_hold_what_the_functions_say_and_the_start_is_warm() -> None:
    model = net()
    tracker = Tracker(model, points(), every=20, share=math.inf)
    train(model, 60, tracker)
    assert [row["step"] for row in tracker.rows] == [20, 40, 60]
    row, data = tracker.rows[-1], points()
    assert row["trace"] == pytest.approx(sl.trace(model, data).value)
    assert row["margin_mean"] == pytest.approx(float(sl.margins(model, data).signed.mean()))
    assert row["margin_median"] == pytest.approx(float(sl.margins(model, data).signed.quantile(0.5)))
    exact = float(torch.linalg.eigvalsh(sl.hessian(model, data).dense())[-1])
    assert row["largest_eigenvalue"] == pytest.approx(exact, rel=0.02)
    assert row["converged"]
    assert row["products"] <= tracker.rows[0]["products"]
    model.eval()
    with torch.no_grad():
        assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(model(data[0]), data[1])))


def test_looks_start_from_the_last_eigenvector_and_every_fourth_afresh() -> None:
    """Products are counted, and compared with those of a start from nothing at the same weights."""
    model, data = net(), points()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    names = ["largest_eigenvalue", "stability"]
    tracker = Tracker(model, data, every=1, share=math.inf, quantities=names, optimizer=optimiser)
    for _ in range(9):
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model.eval()(data[0]), data[1]).backward()
            optimiser.step()
        row = tracker.measure()
        op = sl.hessian(model, data)
        exact = float(torch.linalg.eigvalsh(op.dense())[-1])
        assert row["largest_eigenvalue"] == pytest.approx(exact, rel=0.02)
        assert row["stability_curvature"] == pytest.approx(exact, rel=0.02)
        cold = sl.eigenvalues(op, tol=0.02, max_matvecs=24).matvecs
        if row["afresh"]:
            assert row["products"] == cold
        else:
            assert max(row["products"], row["stability_products"]) <= min(6, cold - 2)
    assert [row["afresh"] for row in tracker.rows] == [True, False, False, False] * 2 + [True]
    assert [row["stability_side"] for row in tracker.rows][::4] == ["stable"] * 3
    assert "λ₁" in str(tracker)


def test_training_goes_on_as_without_it(untouched: Untouched) -> None:
    alone, watched = net(), net()
    torch.manual_seed(5)
    train(alone, 12)
    torch.manual_seed(5)
    train(watched, 12, Tracker(watched, points(), every=3, share=math.inf))
    assert all(map(torch.equal, alone.state_dict().values(), watched.state_dict().values()))
    tracker = Tracker(watched, points(), every=1, share=math.inf)
    with untouched(watched):
        tracker.step()


def test_a_measurement_waits_until_it_can_be_afforded() -> None:
    tracker = Tracker(net(), points(), every=1, share=0.1)
    tracker._cost = 0.05
    assert tracker.step() is None
    assert "it waits, as a measurement takes about 0.05 s and 10% of" in str(tracker)
    while tracker.step() is None:
        time.sleep(0.02)
        assert tracker.training_seconds < 30
    assert tracker.rows[0]["training_seconds"] >= 0.5
    assert tracker.spent == pytest.approx(tracker.rows[0]["seconds"])


def test_files_are_whole_and_curves_are_drawn(tmp_path: Path) -> None:
    model = net()
    tracker = Tracker(model, points(), every=5, share=math.inf, path=tmp_path / "run" / "curves.parquet")
    assert "nothing measured yet; it waits, as the first measurement comes after 5 steps" in str(tracker)
    with pytest.raises(InputError, match="no rows yet"):
        tracker.chart()
    train(model, 10, tracker)
    table = pl.read_parquet(tmp_path / "run" / "curves.parquet")
    assert table["step"].to_list() == [5, 10]
    assert list((tmp_path / "run").iterdir()) == [tmp_path / "run" / "curves.parquet"]
    text = tracker.to_json(tmp_path / "rows.json")
    written = json.loads(text)
    assert [row["step"] for row in written["rows"]] == [5, 10]
    assert (written["type"], written["format"]) == ("TrainingCurves", codec.FORMAT)
    again = sl.Result.from_json(tmp_path / "rows.json")
    assert isinstance(again, TrainingCurves)
    assert str(again.rows) == str(tuple(tracker.rows))  # NaN too
    assert again.to_json() == text
    vector, pixels = tracker.save(tmp_path / "curves")
    assert vector.read_text().startswith("<svg")
    assert pixels.stat().st_size > 1000
    assert "of the training time" in str(tracker)


def test_targets_without_classes_and_batch_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    regression = Tracker(model, (torch.rand(8, 6), torch.rand(8, 2)), every=1, share=math.inf, loss="squared_error")
    row = regression.measure()
    assert math.isnan(row["accuracy"])
    assert row["trace"] > 0
    json.loads(regression.to_json())
    regression.chart()
    batches = [(points(8)[0], points(8)[1] % 2)]
    assert Tracker(model.double(), batches, every=1, batch_norm="batch").measure()["products"] > 0


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="every must be a whole number of at least 1, got 0"):
        Tracker(net(), points(), every=0)
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 4,000,000,000, got -1"):
        Tracker(net(), points(), seed=-1)
    with pytest.raises(InputError, match="above 0, got 0"):
        Tracker(net(), points(), share=0)
    with pytest.raises(InputError, match="fails on inputs"):
        Tracker(net(), (torch.rand(4, 5), torch.zeros(4, dtype=torch.int64)))


def test_what_cannot_be_measured_does_not_end_the_training() -> None:
    model = net()
    tracker = Tracker(model, points(), every=1, share=math.inf)
    tracker.step()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    row = tracker.step()
    assert row is not None
    assert math.isnan(row["trace"])
    assert math.isnan(row["loss"])
    assert (
        row["reason"]
        == "the model's output for sample 0 is NaN or infinite although its input is finite; check the weights."
    )
    assert tracker.rows[0]["reason"] == ""
    assert tracker.frame()["reason"].to_list()[0] == ""
    json.loads(tracker.to_json())


class Ranked(nn.Module):
    """Multiplies by a loss that torch can differentiate once only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        loss = nn.functional.multilabel_margin_loss(hidden, (hidden > 0).long(), reduction="none")
        return self.last(torch.relu(hidden)) * loss[:, None]


def test_a_network_without_second_derivatives_is_refused_before_the_training() -> None:
    inputs, targets = torch.randn(9, 4), torch.arange(9) % 3
    with pytest.raises(InputError, match="the model Ranked cannot be differentiated twice"):
        Tracker(Ranked(), (inputs, targets))


def test_under_autocast_the_same_is_measured() -> None:
    model = net().float()
    inputs, targets = points()
    expected = Tracker(model, (inputs.float(), targets), every=1, share=math.inf).measure()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Tracker(model, (inputs.float(), targets), every=1, share=math.inf).measure()
    same = set(expected) - {"seconds", "training_seconds"}
    assert {key: expected[key] for key in same} == {key: found[key] for key in same}


def test_a_disk_that_takes_nothing_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, full = tmp_path / "curves.parquet", [True]
    tracker = Tracker(net(), points(), every=1, share=math.inf, path=path)
    really = os.fsync

    def fsync(descriptor: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(RuntimeWarning, match=r"could not write at step 1: OSError: .*No space left on device") as caught:
        rows = [tracker.step() for _ in range(3)]
    assert all(rows)
    assert len(caught) == 1, "said once"
    full[0] = False
    tracker.step()
    assert pl.read_parquet(path)["step"].to_list() == [1, 2, 3, 4], "and nothing is lost"


def test_a_folder_as_path_is_refused_before_the_training_and_warned_of_later(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs the path of a file for its rows, but .* is a folder"):
        Tracker(net(), points(), path=tmp_path)
    tracker = Tracker(net(), points(), every=1, share=math.inf, path=tmp_path / "rows")
    (tmp_path / "rows").mkdir()
    with pytest.warns(RuntimeWarning, match=r"could not write at step 1: .* is a folder"):
        assert tracker.step() is not None


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), KeyError("a bug")])
def test_a_measurement_that_fails_does_not_end_the_training(
    error: Exception, untouched: Untouched, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    tracker = Tracker(model, points(), every=1, share=math.inf)

    def fail(setting: object) -> None:
        raise error

    monkeypatch.setattr(quantities, "outcomes", fail)
    with untouched(model), pytest.warns(RuntimeWarning, match="Tracker could not measure at step 1") as caught:
        _, row = tracker.step(), tracker.step()
    assert len(caught) == 1
    assert row is not None
    assert row["reason"].startswith(type(error).__name__)
    assert math.isnan(row["trace"])
    monkeypatch.undo()
    recovered = tracker.step()
    assert recovered is not None
    assert recovered["trace"] > 0


def test_only_what_was_asked_for_is_measured() -> None:
    model = net()
    tracker = Tracker(model, points(), every=1, share=math.inf, quantities=["loss", "layers"])
    row = tracker.measure()
    layers = sl.sample_traces(model, points(), per_layer=True).layers
    assert {name for name in row if name.startswith("trace/")} == {f"trace/{name}" for name in layers}
    for name, values in layers.items():
        assert row[f"trace/{name}"] == pytest.approx(float(values.mean()))
    assert "largest_eigenvalue" not in row
    assert "accuracy" not in row
    assert "mean loss" in json.dumps(tracker.chart().to_dict())
    text = tracker.to_html()
    assert "trace of 0.weight" in text
    smooth = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    row = Tracker(smooth, points(), every=1, quantities="layers").measure()
    assert sum(name.startswith("trace/") for name in row) == 6
    assert row["reason"] == ""


def test_critical_sharpness_and_stability_beside_the_others(untouched: Untouched) -> None:
    model, data = net(), points()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = ["loss", "critical_sharpness", "stability"]
    tracker = Tracker(model, data, every=1, share=math.inf, quantities=names, optimizer=optimiser)
    early = tracker.measure()
    assert "the optimiser has made no step with the parameter 0.weight yet" in early["reason"]
    assert early["critical_sharpness"] > 0
    assert math.isnan(early["stability_ratio"])
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()
    state = [{k: v.clone() for k, v in values.items()} for values in optimiser.state.values()]
    with untouched(model):
        row = tracker.measure()
    for before, after in zip(state, optimiser.state.values(), strict=True):
        assert all(torch.equal(before[key], after[key]) for key in before)
    assert row["critical_forwards"] <= 6, "a warm start"
    found = sl.stability(optimiser, model, data, tol=0.02)
    assert row["stability_ratio"] == pytest.approx(found.ratio)
    assert row["stability_side"] == found.side
    model.eval()
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    again = sl.critical_sharpness(lambda: nn.functional.cross_entropy(model(data[0]), data[1]), optimiser)
    assert row["critical_low"] <= again.high
    assert again.low <= row["critical_high"]
    text = tracker.to_html()
    assert "Critical sharpness" in text
    assert "Largest eigenvalue of D^(-1/2) H D^(-1/2)" in text
    assert "critical sharpness" in str(tracker)
    assert Tracker(model, data, optimizer=optimiser).quantities.names[-1] == "critical_sharpness"


def test_training_goes_on_as_without_critical_sharpness() -> None:
    nets = [net(), net()]
    for watched, model in enumerate(nets):
        torch.manual_seed(5)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        tracker = Tracker(model, points(), every=2, share=math.inf, optimizer=optimiser) if watched else None
        for _ in range(6):
            nn.functional.cross_entropy(model(points()[0]), points()[1]).backward()  # gradients add up
            optimiser.step()
            if tracker is not None:
                tracker.step()
    assert all(map(torch.equal, nets[0].state_dict().values(), nets[1].state_dict().values()))


def test_an_undefined_critical_sharpness_says_why() -> None:
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    tracker = Tracker(model, points(), quantities=["critical_sharpness"], optimizer=optimiser)
    row = tracker.measure()
    assert math.isnan(row["critical_sharpness"])
    assert row["reason"].startswith("critical sharpness is undefined: the update does not go downhill: gᵀu = -")
    tracker.steps = 1200
    tracker.measure()
    assert "Not everything could be measured at steps 0, 1,200: critical sharpness is undefined" in tracker.to_html()


def test_a_critical_sharpness_that_moved_far_is_searched_anew() -> None:
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(model, points(), quantities=["critical_sharpness"], optimizer=optimiser)
    first = tracker.measure()["critical_sharpness"]
    with torch.no_grad():
        model[3].weight.mul_(20), model[3].bias.mul_(20)
    second = tracker.measure()
    assert second["critical_sharpness"] > 5 * first
    assert second["reason"] == ""
    flat = Tracker(
        model, points(), quantities=["critical_sharpness"], optimizer=optimiser, loss=lambda out, y: out[:, 0]
    )
    row = flat.measure()
    assert math.isnan(row["critical_sharpness"])
    assert row["reason"].startswith("critical sharpness is not converged: the loss is still lower")
    assert row["critical_high"] > 0


def test_the_current_batch_in_place_of_a_fixed_set() -> None:
    model, data = net(), points()
    tracker = Tracker(model, every=2, share=math.inf)
    with pytest.raises(InputError, match=r"without data measures the current batch: call step\(batch="):
        tracker.step()
    batch = data[0][:30], data[1][:30]
    assert tracker.step(batch) is None
    row = tracker.step(batch)
    assert row is not None
    assert row["trace"] == pytest.approx(sl.trace(model, batch).value)
    fixed = Tracker(model, data, every=1, share=math.inf)
    assert fixed.measure(batch)["loss"] == pytest.approx(row["loss"])
    broken = tracker.measure((torch.rand(3, 5), torch.zeros(3, dtype=torch.int64)))
    assert "fails on inputs" in broken["reason"]


class Board:
    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))


class Run:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((values, step))


def test_the_same_row_goes_to_file_page_and_logger(tmp_path: Path) -> None:
    model, board, run = net(), Board(), Run()
    options = {"every": 1, "share": math.inf}
    tracker = Tracker(model, points(), path=tmp_path / "rows.csv", page=tmp_path / "live.html", logger=board, **options)
    other = Tracker(model, points(), logger=run, **options)
    for _ in range(2):
        row = tracker.step()
        other.step()
    assert row is not None
    table = pl.read_csv(tmp_path / "rows.csv")
    assert table["step"].to_list() == [1, 2]
    assert table["trace"][1] == pytest.approx(row["trace"])
    text = (tmp_path / "live.html").read_text()
    assert '<meta http-equiv="refresh" content="15">' in text
    assert "mean Hessian trace" in text
    assert 'http-equiv="refresh"' not in tracker.to_html(tmp_path / "live.html")
    assert ("spiritlevel/trace", row["trace"], 2) in board.seen
    assert all(math.isfinite(value) for _, value, _ in board.seen)
    assert [step for _, step in run.seen] == [1, 2]
    assert run.seen[-1][0]["spiritlevel/trace"] == pytest.approx(row["trace"])
    assert tracker.spent > sum(row["seconds"] for row in tracker.rows), "what is written counts"


def test_a_logger_that_fails_does_not_end_the_training() -> None:
    class Fails:
        def log(self, values: object, step: int) -> None:
            raise ConnectionError("the server has gone")

    tracker = Tracker(net(), points(), every=1, share=math.inf, logger=Fails())
    with pytest.warns(RuntimeWarning, match="Tracker could not log at step 1: ConnectionError: the server") as caught:
        rows = [tracker.step() for _ in range(3)]
    assert all(rows)
    assert len(caught) == 1


def test_a_page_before_the_first_row() -> None:
    assert "nothing measured yet" in Tracker(net(), points()).to_html()


def test_more_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown quantity 'sharpness'"):
        Tracker(net(), points(), quantities=["sharpness"])
    with pytest.raises(InputError, match="needs optimizer= to measure 'stability'"):
        Tracker(net(), points(), quantities=["stability"])
    with pytest.raises(InputError, match="needs at least one of the quantities loss, margins"):
        Tracker(net(), points(), quantities=[])
    with pytest.raises(InputError, match=r"needs a logger with add_scalar.* got dict"):
        Tracker(net(), points(), logger={})
    with pytest.raises(InputError, match=r"needs the path of a file for its page, but .* is a folder"):
        Tracker(net(), points(), page=tmp_path)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_training_that_resumes_keeps_the_rows_up_to_its_checkpoint(name: str, tmp_path: Path) -> None:
    options = {"every": 5, "share": math.inf, "path": tmp_path / name, "quantities": ("loss", "critical_sharpness")}
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Tracker(model, points(), optimizer=optimiser, **options)  # type: ignore[arg-type]
    train(model, 20, first)
    again = Tracker(model, points(), optimizer=optimiser, **options)  # type: ignore[arg-type]
    again.resume(12)
    assert str(again.rows) == str(first.rows[:2])
    train(model, 8, again)
    assert [row["step"] for row in again.rows] == [5, 10, 15, 20]
    table = pl.read_csv(tmp_path / name) if name.endswith("csv") else pl.read_parquet(tmp_path / name)
    assert table["step"].to_list() == [5, 10, 15, 20]
    again.resume(0)
    assert (again.steps, again.rows) == (0, [])
    (tmp_path / name).write_text("no,table\n1,2\n")
    with pytest.raises(InputError, match="holds no rows of a tracker"):
        again.resume(12)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_training_that_resumes_may_measure_more_than_before(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 1, "share": math.inf, "path": tmp_path / name}
    Tracker(net(), points(), quantities="loss", **options).step()
    more = Tracker(net(), points(), quantities=["loss", "trace"], page=tmp_path / "page.html", **options)
    more.resume(1)
    row = more.step()
    assert row is not None
    assert f"trace {row['trace']:.3g}"[:8] in str(more)
    assert (tmp_path / "page.html").exists()
    again = Tracker(net(), points(), quantities="loss", **options)
    again.resume(2)
    assert [row["step"] for row in again.rows] == [1, 2]
    assert "loss" in str(again)


def test_a_file_of_texts_holds_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("step,loss,reason\n1,low,\n")
    with pytest.raises(InputError, match="holds no rows of a tracker: its column 'loss' holds texts"):
        Tracker(net(), points(), path=tmp_path / "rows.csv").resume(1)


def test_a_row_that_says_why_survives_the_file(tmp_path: Path) -> None:
    model = net()
    tracker = Tracker(model, points(), every=1, share=math.inf, path=tmp_path / "rows.csv", quantities="trace")
    tracker.step()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    tracker.step()
    assert math.isnan(tracker.rows[1]["trace"])
    assert tracker.rows[1]["reason"]
    again = Tracker(net(), points(), every=1, path=tmp_path / "rows.csv", quantities="trace")
    again.resume(2)
    assert str(again.rows) == str(tracker.rows)
