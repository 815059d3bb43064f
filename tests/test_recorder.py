"""The recorder against a plain twin that keeps everything; its file, its merges, a training that is killed.

The file is also the program that some tests run: `python test_recorder.py train FOLDER` and `... rank RANK STORE OUT`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import polars as pl
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import spiritlevel as sl
from spiritlevel.answers import callbacks, observing
from spiritlevel.answers import recorder as recording
from spiritlevel.answers.observing import observed
from spiritlevel.answers.recorder import Recorder
from spiritlevel.binding.losses import CrossEntropy
from spiritlevel.cli import main
from spiritlevel.errors import InputError

CONTRACT = ["id", "loss", "margin", "aum", "cumulative_loss", "forgetting", "first_learned"]


class Twin:
    """Keeps every visit in lists, and takes each number by its definition."""

    def __init__(self) -> None:
        self.visits: dict[int, list[tuple[int, np.ndarray, int]]] = defaultdict(list)
        self.steps = 0

    def record(self, logits: Tensor, targets: Tensor, ids: Tensor) -> None:
        for row, y, i in zip(logits.double().numpy(), targets.tolist(), ids.tolist(), strict=True):
            self.visits[i].append((self.steps, row, y))
        self.steps += 1

    def row(self, i: int) -> dict[str, Any]:
        losses, margins, entropies, right = [], [], [], []
        for _, z, y in self.visits[i]:
            p = np.exp(z - z.max())
            p /= p.sum()
            losses.append(-math.log(p[y]))
            margins.append(z[y] - np.delete(z, y).max())
            entropies.append(-float((p * np.log(p)).sum()))
            right.append(margins[-1] > 0)
        chances = np.exp(-np.array(losses))
        steps = [step for step, _, _ in self.visits[i]]
        return {
            "seen": len(losses),
            "label": self.visits[i][-1][2],
            "predicted": int(self.visits[i][-1][1].argmax()),
            "loss": losses[-1],
            "margin": margins[-1],
            "entropy": entropies[-1],
            "correct": right[-1],
            "aum": float(np.mean(margins)),
            "cumulative_loss": float(np.sum(losses)),
            "forgetting": sum(a and not b for a, b in itertools.pairwise(right)),
            "first_learned": next((step for step, ok in zip(steps, right, strict=True) if ok), None),
            "confidence": float(chances.mean()),
            "variability": float(chances.std()),
            "accuracy": float(np.mean(right)),
        }


def random_batches(samples: int, classes: int, calls: int, size: int, seed: int = 0) -> list[tuple[Tensor, ...]]:
    """Batches in which samples come back now and then, some of them twice in one batch."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    found = []
    for _ in range(calls):
        ids = torch.randint(0, samples - 1, (size,), generator=generator)  # the last one is never seen
        found.append((2 * torch.randn(size, classes, generator=generator), labels[ids], ids))
    return found


@pytest.mark.parametrize("rows", [1, 37, 8192])
def test_every_column_is_what_its_definition_says(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "_ROWS", rows)  # however the calls are put together
    recorder, twin = Recorder(30), Twin()
    for batch in random_batches(30, 4, 40, 11):
        recorder.record(*batch)
        twin.record(*batch)
    frame = recorder.frame()
    assert set(CONTRACT) <= set(frame.columns)
    assert frame["id"].to_list() == list(range(30))
    for row in frame.iter_rows(named=True):
        if row["id"] not in twin.visits:
            assert all(value is None for key, value in row.items() if key not in ("id", "seen"))
            continue
        for key, value in twin.row(row["id"]).items():
            assert row[key] == pytest.approx(value, rel=5e-3 if key == "entropy" else 2e-6, abs=1e-6), key
    assert frame["seen"].sum() == 440
    assert frame["seen"][29] == 0


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_losses_margins_and_entropies_are_right_at_any_margin(dtype: torch.dtype, rel: float) -> None:
    mpmath.mp.dps = 60
    for margin in (0.0, 1.0, 17.0, 40.0, 80.0, *[300.0] * (dtype == torch.float64), -80.0):
        z = [margin, 0.0, -1.0]
        loss, signed, entropy, top = observed(torch.tensor([z], dtype=dtype), torch.tensor([0]))
        shares = [mpmath.exp(v) for v in z]
        total = sum(shares)
        assert float(loss) == pytest.approx(float(mpmath.log(total / shares[0])), rel=rel)
        exact = -sum(s / total * mpmath.log(s / total) for s in shares)
        assert float(entropy) == pytest.approx(float(exact), rel=rel)
        assert float(signed) == margin
        assert int(top) == (0 if margin >= 0 else 1)
    logits, labels = 5 * torch.randn(200, 7, dtype=dtype), torch.randint(0, 7, (200,))
    logits[7] = logits[7, 0]  # all equal
    loss, signed, _, top = observed(logits, labels)
    torch.testing.assert_close(loss.double(), CrossEntropy().values(logits.double(), labels), rtol=10 * rel, atol=0)
    torch.testing.assert_close(signed.double(), sl.signed_margin(logits, labels).double(), rtol=rel, atol=0)
    assert torch.equal(logits.gather(1, top[:, None])[:, 0], logits.amax(1))


@pytest.mark.parametrize("piece", [1, 70, 2**15])
def test_what_is_kept_does_not_depend_on_what_is_looked_at_together(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = 6 * torch.randn(501, 10, generator=torch.Generator().manual_seed(1)), torch.arange(501) % 10
    alone = [observed(logits[i : i + 1], labels[i : i + 1]) for i in range(501)]
    monkeypatch.setattr(observing, "_PIECE", piece)
    for found, single in zip(observed(logits, labels), zip(*alone, strict=True), strict=True):
        assert torch.equal(found.float(), torch.cat(single).float())


def test_logits_that_are_infinite_or_equal_or_no_numbers() -> None:
    inf = math.inf
    rows = [[2.0, -inf, 1.0], [-inf, 3.0, 1.0], [5.0, 5.0, 5.0], [math.nan, 0.0, 0.0], [0.0, 0.0, 900.0]]
    loss, margin, entropy, top = observed(torch.tensor(rows), torch.tensor([0, 0, 1, 1, 2]))
    pair = math.log1p(math.exp(-1))  # of two classes one apart
    assert loss[:3].tolist() == pytest.approx([pair, inf, math.log(3)])
    assert margin[:3].tolist() == [1.0, -inf, 0.0]
    assert float(entropy[0]) == pytest.approx(pair + math.exp(-1) / (1 + math.exp(-1)))
    assert float(entropy[2]) == pytest.approx(math.log(3))
    assert math.isnan(loss[3])
    assert math.isnan(margin[3])
    assert top.tolist() == [0, 1, 0, 0, 2]
    assert [float(values[4].float()) for values in (loss, margin, entropy)] == [0.0, 900.0, 0.0]


def test_tiny_losses_survive_the_record() -> None:
    recorder = Recorder(1)
    recorder.record(torch.tensor([[80.0, 0.0]]), torch.tensor([0]), [0])
    row = recorder.frame().row(0, named=True)
    assert row["loss"] == pytest.approx(math.exp(-80), rel=1e-6)
    assert row["cumulative_loss"] == pytest.approx(math.exp(-80), rel=1e-6)
    assert row["entropy"] == pytest.approx(81 * math.exp(-80), rel=5e-3)


def test_a_loop_in_mixed_precision_with_a_scaler() -> None:
    torch.manual_seed(0)
    net, inputs, labels = nn.Linear(5, 3), torch.randn(32, 5), torch.arange(32) % 3
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    recorder, twin = Recorder(32), Twin()
    for ids in [part for _ in range(3) for part in torch.randperm(32).split(8)]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(inputs[ids])
            loss = F.cross_entropy(logits, labels[ids])
        assert logits.dtype == torch.bfloat16
        recorder.record(logits, labels[ids], ids)
        twin.record(logits.detach(), labels[ids], ids)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for row in recorder.frame().iter_rows(named=True):
        wanted = twin.row(row["id"])
        assert [row[name] for name in ("loss", "margin", "aum", "cumulative_loss")] == pytest.approx(
            [wanted[name] for name in ("loss", "margin", "aum", "cumulative_loss")], rel=1e-6, abs=1e-6
        )


def test_any_number_of_classes_keeps_its_names(tmp_path: Path) -> None:
    for classes, kind in ((10, torch.int8), (128, torch.int8), (129, torch.int16), (40_000, torch.int32)):
        recorder = Recorder(3, path=tmp_path / str(classes))
        recorder.record(
            F.one_hot(torch.tensor([classes - 1, 0]), classes).float(), torch.tensor([classes - 2, 0]), [0, 2]
        )
        recorder.save()
        again = Recorder.load(tmp_path / str(classes))
        for found in (recorder, again, Recorder(3).merge(again)):
            assert found.state_dict()["label"].dtype == kind
            assert found.frame()["label"].to_list() == [classes - 2, None, 0]
            assert found.frame()["predicted"].to_list() == [classes - 1, None, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mixed_precision_is_recorded_as_the_loop_sees_it(dtype: torch.dtype) -> None:
    logits = torch.tensor([[5.0, -30.0, 2.0]]).to(dtype)
    recorder = Recorder(1)
    recorder.record(logits, torch.tensor([0]), torch.tensor([0]))
    exact = F.cross_entropy(logits.double(), torch.tensor([0])).item()
    assert recorder.frame()["loss"][0] == pytest.approx(exact, rel=1e-6)


def test_one_logit_and_outputs_with_logits() -> None:
    class Output:
        logits = torch.tensor([3.0, -2.0], requires_grad=True)

    recorder = Recorder(2)
    recorder.record(Output(), torch.tensor([1.0, 1.0]), [0, 1])
    frame = recorder.frame()
    assert frame["margin"].to_list() == [3.0, -2.0]
    assert frame["loss"][1] == pytest.approx(math.log1p(math.exp(2)), rel=1e-6)
    column = Recorder(2)
    column.record(torch.tensor([[3.0], [-2.0]]), torch.tensor([[1], [1]]), [0, 1])
    assert column.frame().equals(frame)
    mixed = Recorder(2)
    mixed.record(torch.tensor([0.0]), torch.tensor([True]), [1])  # looked at by itself, the others together
    for place, (z, y) in enumerate([(torch.tensor([3.0]), [[1.0]]), (torch.tensor([[-2.0]]), [1.0])]):
        mixed.record(z, torch.tensor(y, requires_grad=place == 0), [place])
    assert mixed.frame().select("loss", "margin", "label").equals(frame.select("loss", "margin", "label"))
    mixed.record(torch.tensor([3.0]), torch.tensor([0.5]), [0])
    with pytest.raises(InputError, match=r"got the class 0\.5, but the model's one output stands for"):
        mixed.frame()


def test_what_the_loop_writes_over_later_does_not_matter() -> None:
    recorder = Recorder(4)
    recorder.record(torch.zeros(1, 2), torch.tensor([0]), [3])
    logits, targets, ids = torch.tensor([[1.0, 0.0]]), torch.tensor([0]), torch.tensor([0])
    recorder.record(logits, targets, ids)
    logits.fill_(9.0), targets.fill_(1), ids.fill_(2)
    assert recorder.frame()["margin"].to_list() == [1.0, None, None, 0.0]


def test_shuffled_loaders_accumulation_and_weighted_sampling() -> None:
    inputs = torch.randn(40, 5)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    net = nn.Linear(5, 3)
    plain, shuffled = Recorder(40), Recorder(40)
    for _ in range(2):
        plain.record(net(inputs), data.tensors[1], torch.arange(40))
        for pieces in DataLoader(Recorder.numbered(data), batch_size=8, shuffle=True):
            for part in range(2):  # accumulation: two pieces a step of the optimiser
                x, y, ids = (column[4 * part : 4 * part + 4] for column in pieces)
                shuffled.record(net(x), y, ids, step=shuffled.steps // 2 * 2)
    columns = ["id", "seen", "loss", "margin", "aum", "cumulative_loss", "forgetting", "correct"]
    first, second = plain.frame().select(columns), shuffled.frame().select(columns)
    assert first.select("id", "seen", "forgetting", "correct").equals(
        second.select("id", "seen", "forgetting", "correct")
    )
    for name in ("loss", "margin", "aum", "cumulative_loss"):
        assert np.allclose(first[name], second[name], rtol=1e-4, atol=1e-6)
    weighted = Recorder(40)
    sampler = WeightedRandomSampler([100.0] + [1.0] * 39, 400)
    for x, y, ids in DataLoader(Recorder.numbered(data), batch_size=16, sampler=sampler):
        weighted.record(net(x), y, ids)
    assert weighted.frame()["seen"].sum() == 400
    assert weighted.frame()["seen"][0] > 200
    assert weighted.nbytes < 16 * 400, "a sample that comes often takes no room for the others"
    texts = Recorder.numbered([{"text": "a", "label": 0}, {"text": "b", "label": 1}])
    assert texts[1] == {"text": "b", "label": 1, "id": 1}
    assert len(texts) == 2


def test_at_most_sixteen_bytes_a_sample_and_epoch(tmp_path: Path) -> None:
    recorder = Recorder(5000)
    for epoch in range(1, 6):
        for ids in torch.randperm(5000).split(64):
            recorder.record(torch.randn(len(ids), 10), torch.zeros(len(ids), dtype=torch.int64), ids)
        if epoch >= 2:
            assert recorder.nbytes <= 16 * 5000 * epoch
            assert recorder.save(tmp_path / "run").stat().st_size <= 16 * 5000 * epoch + 2048
    held = sum(tensor.nbytes for log in recorder._logs for tensor in log.columns().values())
    assert held + recorder._label.nbytes + recorder._predicted.nbytes <= 16 * 5000 * 5, "in memory too"


def test_the_loop_is_left_alone(untouched: Untouched) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    logits = net(torch.randn(6, 4))
    recorder = Recorder(6)
    with untouched(net):
        for _ in range(3):
            recorder.record(logits, torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6))
        recorder.frame(), str(recorder)
    assert logits.requires_grad
    logits.sum().backward()


def test_history_and_order() -> None:
    recorder = Recorder(4)
    for step, gap in enumerate([-1.0, 2.0, -3.0]):
        recorder.record(torch.tensor([[gap, 0.0], [5.0, 0.0]]), torch.tensor([0, 0]), [1, 0], step=10 * step)
    history = recorder.history([1])
    assert history["step"].to_list() == [0, 10, 20]
    assert history["margin"].to_list() == [-1.0, 2.0, -3.0]
    assert history["correct"].to_list() == [False, True, False]
    assert recorder.history().height == 6
    row = recorder.frame().row(1, named=True)
    assert (row["forgetting"], row["first_learned"]) == (1, 10)
    recorder.record(torch.tensor([[-9.0, 0.0]]), torch.tensor([0]), [2])
    for by in recording.SCORES:
        assert recorder.order(by).tolist()[0] in (1, 2), by
        assert sorted(recorder.order(by).tolist()) == [0, 1, 2], "what was not seen is not suspected"
    assert recorder.order("forgetting").tolist() == [2, 1, 0], "never learnt counts as worse than forgotten"
    assert recorder.order("first_learned").tolist() == [2, 1, 0]
    recorder.record(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), [0])
    assert recorder.order("aum")[0] == 0, "what is not a number is looked at first"
    assert math.isnan(recorder.frame()["aum"][0])


# ---------------------------------------------------------------- keeping


def filled(samples: int = 50, calls: int = 30, seed: int = 0) -> Recorder:
    recorder = Recorder(samples, classes=["cat", "dog", "rat"])
    for batch in random_batches(samples, 3, calls, 16, seed):
        recorder.record(*batch)
    return recorder


def test_the_file_holds_everything_and_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = filled()
    file = recorder.save(tmp_path / "run")
    assert file == tmp_path / "run" / "samples.safetensors"
    for where in (file, tmp_path / "run"):
        again = Recorder.load(where)
        assert again.frame().equals(recorder.frame())
        assert again.history().equals(recorder.history())
        assert (again.steps, again.classes) == (30, ("cat", "dog", "rat"))
    before = file.read_bytes()
    assert b"pickle" not in before

    def fails(descriptor: int) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr(os, "fsync", fails)
    recorder.record(torch.zeros(1, 3), torch.tensor([0]), [0])
    with pytest.raises(OSError, match="disk full"):
        recorder.save(tmp_path / "run")
    assert file.read_bytes() == before
    assert list((tmp_path / "run").iterdir()) == [file]


def test_a_full_disk_ends_no_training_that_a_callback_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = filled()
    recorder.path = tmp_path
    watch = callbacks._Watch(None, recorder, {})

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path), None, "elsewhere")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.warns(RuntimeWarning, match=rf"at step 30: No space left on device: {tmp_path}.*; the training"):
            watch.keep()
    assert list(tmp_path.iterdir()) == []
    watch.keep()  # there is room again
    assert Recorder.load(tmp_path).steps == 30


def test_going_on_from_a_file_or_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    batches = random_batches(50, 3, 30, 16)
    whole = filled()
    first = Recorder(50, path=tmp_path)
    for batch in batches[:13]:
        first.record(*batch)
    first.save()
    state = first.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    for batch in batches[13:20]:
        first.record(*batch)  # lost when the process dies
    second, third = Recorder(50, path=tmp_path), Recorder(50)
    third.load_state_dict(state)
    for recorder in (second, third):
        assert recorder.steps == 13
        for batch in batches[13:]:
            recorder.record(*batch)
        assert recorder.frame().equals(whole.frame())
    first.rewind(13)
    for batch in batches[13:]:
        first.record(*batch)
    assert first.frame().equals(whole.frame()), "a record that is ahead of the checkpoint is wound back"


def test_winding_back_forgets_predictions() -> None:
    recorder = Recorder(2)
    recorder.record(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0]), [0, 1])
    recorder.record(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), [1])
    recorder.rewind(1)
    frame = recorder.frame()
    assert frame["predicted"].to_list() == [0, None]
    assert frame["seen"].to_list() == [1, 1]
    assert recorder.steps == 1


def test_processes_resume_from_files_of_their_own(tmp_path: Path) -> None:
    """What a callback does: each rank reads and writes its own file, and forgets what came after the checkpoint."""
    logits, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    for rank in range(2):
        recorder = Recorder(2, path=tmp_path)
        recorder.resume(0, rank)
        for step in range(6):
            recorder.record(logits, targets, [rank], step)
        assert recorder.save() == tmp_path / f"samples-{rank}.safetensors"
    assert Recorder.load(tmp_path).frame()["seen"].to_list() == [6, 6]
    for rank in range(2):
        recorder = Recorder(2, path=tmp_path)
        recorder.resume(4, rank)
        assert recorder.steps == 4
        recorder.record(logits, targets, [rank], 4)
        recorder.save()
    whole = Recorder.load(tmp_path)
    assert whole.frame()["seen"].to_list() == [5, 5]
    assert whole.history([1])["step"].to_list() == [0, 1, 2, 3, 4]
    other = Recorder(3, path=tmp_path)
    with pytest.raises(InputError, match="holds a record of 2 samples, not of 3"):
        other.resume(4, 0)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("step", [0, 4])
def test_another_number_of_processes_counts_no_visit_twice(before: int, after: int, step: int, tmp_path: Path) -> None:
    """What the callbacks do: a run goes on, or starts again, with more or fewer processes than it had."""

    def run(ranks: int, start: int) -> None:
        for rank in range(ranks):
            recorder = Recorder(6, path=tmp_path)
            recorder.resume(start, rank if ranks > 1 else None, ranks)
            mine = list(range(rank, 6, ranks))
            for at in range(start, 6):
                recorder.record(torch.zeros(len(mine), 2), torch.zeros(len(mine), dtype=torch.long), mine, at)
            recorder.save()

    run(before, 0)
    run(after, step)
    whole = Recorder.load(tmp_path)
    assert whole.frame()["seen"].to_list() == [6] * 6
    assert whole.history([5])["step"].to_list() == list(range(6))
    assert len(list(tmp_path.iterdir())) == after


def test_merged_records_are_those_of_one_process(tmp_path: Path) -> None:
    batches = random_batches(50, 3, 30, 16)
    whole, parts = Recorder(50), [Recorder(50), Recorder(50)]
    for step, (logits, targets, ids) in enumerate(batches):
        keep = np.unique(ids.numpy(), return_index=True)[1]  # one visit a step: the order within one is not defined
        logits, targets, ids = logits[keep], targets[keep], ids[keep]
        whole.record(logits, targets, ids)
        for rank, part in enumerate(parts):
            part.record(logits[rank::2], targets[rank::2], ids[rank::2], step=step)
    merged = parts[0].merge(parts[1])
    assert merged.frame().equals(whole.frame())
    assert parts[1].merge(parts[0]).frame().equals(whole.frame())
    for rank, part in enumerate(parts):
        part.save(tmp_path / f"samples-{rank}.safetensors")
    assert Recorder.load(tmp_path).frame().equals(whole.frame())
    assert parts[0].frame()["seen"].sum() < whole.frame()["seen"].sum(), "the parts stay as they are"
    with pytest.raises(InputError, match="records of 3 and 50 samples cannot be merged"):
        whole.merge(Recorder(3))
    empty = Recorder(50).merge(Recorder(50))
    assert empty.frame()["seen"].sum() == 0


def test_all_of_a_sample_at_its_last_visit_is_of_one_visit() -> None:
    """A sampler that fills up the last batch gives a sample to two processes in one step."""
    parts = [Recorder(2), Recorder(2)]
    for part, logits in zip(parts, ([[0.0, 2.0, 1.0]], [[3.0, 1.0, 0.0]]), strict=True):
        part.record(torch.tensor(logits), torch.tensor([1]), [0], step=7)
    for first, second, predicted in ((*parts, 0), (*reversed(parts), 1)):
        row = first.merge(second).frame().row(0, named=True)
        assert (row["predicted"], row["correct"], row["seen"]) == (predicted, predicted == row["label"], 2)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_samples_is_no_visit(first: bool) -> None:
    recorder, logits, labels = Recorder(3), torch.randn(2, 4), torch.tensor([1, 3])
    sizes = (0, 2) if first else (2, 0)
    for size in sizes:
        recorder.record(logits[:size], labels[:size], torch.arange(size))
    assert recorder.frame()["seen"].to_list() == [1, 1, 0]
    assert recorder.steps == 2
    with pytest.raises(InputError, match="got 3 logits per sample, but 4 before"):
        recorder.record(logits[:0, :3], labels[:0], torch.arange(0))


def test_two_processes_merge_by_their_group(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(sl.__file__).parents[1]))),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(rank), str(tmp_path / "store"), str(tmp_path)], env=environment
        )
        for rank in range(2)
    ]
    assert [worker.wait(timeout=200) for worker in workers] == [0, 0]
    first, second = (Recorder.load(tmp_path / f"whole{rank}.safetensors").frame() for rank in range(2))
    assert first.equals(second)
    assert first["seen"].to_list() == [4] * 41
    assert first["label"].to_list() == [i % 3 for i in range(41)]


def rank_main(rank: int, store: str, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    recorder = Recorder(41)
    for epoch in range(4):
        order = torch.randperm(41, generator=torch.Generator().manual_seed(epoch))[rank::2]  # 21 and 20 of them
        for ids in order.split(5):
            recorder.record(torch.randn(len(ids), 3), ids % 3, ids)
    recorder.merge(group=dist.group.WORLD).save(out / f"whole{rank}.safetensors")
    dist.destroy_process_group()


# ---------------------------------------------------------------- a training that is killed


def train(folder: Path, epochs: int = 6, slow: bool = False) -> None:
    """Record a training that resumes from its last checkpoint, whenever it was killed."""
    inputs = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    data = inputs, inputs[:, :3].argmax(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    recorder, begin = Recorder(96, path=folder), 0
    if (folder / "net.safetensors").exists():
        weights = safetensors.torch.load_file(folder / "net.safetensors")
        begin = int(weights.pop("epoch"))
        net.load_state_dict(weights)
    recorder.rewind(6 * begin)  # the record may be ahead of the weights
    for epoch in range(begin, epochs):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(16):
            optimizer.zero_grad()
            logits = net(data[0][ids])
            F.cross_entropy(logits, data[1][ids]).backward()
            optimizer.step()
            recorder.record(logits, data[1][ids], ids)
            if slow:
                recorder.save()
                time.sleep(0.02)
        recorder.save()
        state = {**net.state_dict(), "epoch": torch.tensor(epoch + 1)}
        (folder / "net.part").write_bytes(safetensors.torch.save(state))
        (folder / "net.part").replace(folder / "net.safetensors")


@pytest.mark.parametrize("wanted", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_training_that_is_killed_and_resumed_leaves_the_same_record(tmp_path: Path, wanted: int) -> None:
    train(tmp_path / "whole")
    folder = tmp_path / "killed"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parent, Path(sl.__file__).parents[1]))),
    }
    worker = subprocess.Popen([sys.executable, __file__, "train", str(folder)], env=environment)
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline and worker.poll() is None:
            file = folder / "samples.safetensors"
            if file.exists() and Recorder.load(file).steps > 6 * wanted + 2:  # in the middle of an epoch
                break
            time.sleep(0.005)
    finally:
        worker.send_signal(signal.SIGKILL)
        assert worker.wait() == -signal.SIGKILL, "it was killed while it trained"
    left = Recorder.load(folder)
    assert 0 < left.steps < 36
    train(folder)
    assert Recorder.load(folder).frame().equals(Recorder.load(tmp_path / "whole").frame())
    assert Recorder.load(folder).history().equals(Recorder.load(tmp_path / "whole").history())


# ---------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused() -> None:
    labels = torch.tensor([0, 1])
    with pytest.raises(InputError, match="got the id 5, but the ids of 5 samples are 0 to 4; pass places"):
        Recorder(5).record(torch.zeros(2, 3), labels, [0, 5])
    with pytest.raises(InputError, match="got the id 1, but the ids of 1 sample are 0 to 0"):
        Recorder(1).record(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([True]))
    with pytest.raises(InputError, match="got the class 3, but the model's 3 outputs stand for the classes 0 to 2"):
        Recorder(5).record(torch.zeros(2, 3), torch.tensor([0, 3]), [0, 1])
    with pytest.raises(InputError, match="whole numbers as classes, got float32"):
        Recorder(5).record(torch.zeros(2, 3), labels.float(), [0, 1])
    with pytest.raises(InputError, match="whole numbers as ids, got float32"):
        Recorder(5).record(torch.zeros(2, 3), labels, torch.tensor([0.0, 1.0]))
    with pytest.raises(InputError, match=r"got shapes \(2, 3, 4\), \(2,\) and \(2,\); flatten the tokens"):
        Recorder(5).record(torch.zeros(2, 3, 4), labels, [0, 1])
    with pytest.raises(InputError, match=r"got shapes \(2, 3\), \(2,\) and \(3,\)"):
        Recorder(5).record(torch.zeros(2, 3), labels, [0, 1, 2])
    recorder = Recorder(5)
    recorder.record(torch.zeros(2, 3), labels, [0, 1], step=7)
    with pytest.raises(InputError, match=r"record got step 3 after step 7, .* calls rewind\(3\) first"):
        recorder.record(torch.zeros(2, 3), labels, [0, 1], step=3)
    with pytest.raises(InputError, match="record got 4 logits per sample, but 3 before"):
        recorder.record(torch.zeros(2, 4), labels, [0, 1])
    recorder.record(torch.zeros(2, 3), labels, [0, 9])  # waits, and is refused when it is looked at
    with pytest.raises(InputError, match="got the id 9"):
        recorder.frame()
    assert recorder.frame()["seen"].sum() == 2, "once"
    with pytest.raises(InputError, match="unknown score 'auc'"):
        recorder.order("auc")
    with pytest.raises(InputError, match=r"samples must be a whole number from 1 to .*, got 0"):
        Recorder(0)
    with pytest.raises(InputError, match="data that have a length, got generator"):
        Recorder(x for x in ())
    with pytest.raises(InputError, match="save needs a path"):
        recorder.save()
    for ids in ([0.5], [2**32], -1):
        with pytest.raises(InputError, match="ids must be whole numbers from 0 to 4, got"):
            recorder.history(ids)
    with pytest.raises(InputError, match="merge got the same recorder twice"):
        recorder.merge(recorder)
    other: Any = recorder.state_dict()
    with pytest.raises(InputError, match="merge takes recorders, got an object of type dict"):
        recorder.merge(other)


def test_files_that_are_no_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        Recorder.load(tmp_path / "nothing.safetensors")
    with pytest.raises(InputError, match=r"holds no record; Recorder\.save writes samples\.safetensors"):
        Recorder.load(tmp_path)
    file = tmp_path / "samples.safetensors"
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(InputError, match="is not the record of a training"):
        Recorder.load(file)
    safetensors.torch.save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(InputError, match="but some other safetensors file"):
        Recorder.load(file)
    good = filled()
    metadata = {"format": recording.FORMAT, "version": "99"}
    file.write_bytes(safetensors.torch.save(good.state_dict(), metadata))
    with pytest.raises(InputError, match=r"written by a later spiritlevel \(format 99\); upgrade this one"):
        Recorder.load(file)
    metadata["version"] = "1"
    for harm in (
        {"ids": torch.full_like(good.state_dict()["ids"], 50)},
        {"loss": good.state_dict()["loss"][:-1]},
        {"margin": good.state_dict()["margin"].double()},
        {"steps": good.state_dict()["steps"].flip(0)},
        {"rows": -good.state_dict()["rows"]},
        {"label": torch.zeros(0, dtype=torch.int16)},
        {"predicted": torch.zeros(3, dtype=torch.int16)},
        {"label": torch.tensor(3)},
        {"label": torch.zeros(50)},
        {"label": torch.zeros(50, 2, dtype=torch.int8)},
        {"steps": good.state_dict()["steps"] - 1_000},
        {"next": torch.tensor([1, 2])},
        {"next": torch.tensor([0])},
        {"next": torch.tensor([float("nan")])},
    ):
        file.write_bytes(safetensors.torch.save({**good.state_dict(), **harm}, metadata))
        with pytest.raises(InputError, match="is damaged"):
            Recorder.load(file)
    good.save(tmp_path / "other")
    with pytest.raises(InputError, match="holds a record of 50 samples, not of 7; name another path"):
        Recorder(7, path=tmp_path / "other")
    with pytest.raises(InputError, match="this is not the state of a recorder"):
        good.load_state_dict({})


# ---------------------------------------------------------------- the page and the command


def test_the_page_shows_pictures_and_names(tmp_path: Path) -> None:
    images = torch.rand(50, 1, 8, 8)
    recorder = filled()
    text = recorder.to_html(tmp_path / "page.html", count=5, data=(images, torch.zeros(50, dtype=torch.int64)))
    assert (tmp_path / "page.html").read_text() == text
    assert text.count('role="img" aria-label="Sample ') == 5
    assert "taken for" in text
    assert "data:image/webp" in text
    assert "samples were never" in recorder.suspects().headline or "were never classified" in text
    with pytest.raises(InputError, match="the data hold 3 samples, but the record holds 50"):
        recorder.to_html(data=(images[:3], torch.zeros(3, dtype=torch.int64)))


def test_the_page_shows_texts_and_obeys_none(tmp_path: Path) -> None:
    texts = [f"<script>alert({i})</script> a text" for i in range(50)]
    recorder = Recorder(texts)
    for batch in random_batches(50, 3, 30, 16):
        recorder.record(*batch)
    text = recorder.to_html(tmp_path / "page.html", count=4)
    assert "<script>alert(" not in text
    assert text.count("a text") == 4
    assert text.index("a text") < text.index("The same in numbers"), "the texts come first"
    rows = [{"text": f"row {i}", "label": 0} for i in range(50)]
    assert "row " in recorder.suspects(3, data=rows).texts[0]
    assert recorder.suspects(3, data=[(torch.rand(4), 0)] * 50).pictures is None
    shown = str(recorder.suspects(3))
    assert "sample" in shown.splitlines()[1]
    assert "a text" in shown
    assert recorder.suspects(3)._repr_html_().startswith("<iframe")


def test_pictures_of_pillow_and_of_a_data_set() -> None:
    from PIL import Image

    pictures = [(Image.new("L", (9, 9), i), i % 3) for i in range(50)]
    found = filled().suspects(4, data=pictures).pictures
    assert found is not None
    assert found.images.shape == (4, 3, 9, 9)
    data = TensorDataset(torch.rand(50, 3, 8, 8), torch.zeros(50, dtype=torch.int64))
    assert filled().suspects(4, data=data).pictures is not None


def test_the_command_lists_the_suspicious_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = filled(samples=1437)
    recorder.save(tmp_path / "run")
    assert main(["samples", str(tmp_path / "run"), "--count", "7", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert f"{int(recorder.order()[0])}" in shown
    assert "samples were seen" in shown
    found = sl.Result.from_dict(json.loads((tmp_path / "out.json").read_text())["samples"])
    assert found.ids.tolist() == recorder.order()[:7].tolist()
    page = tmp_path / "page.html"
    assert main(["samples", str(tmp_path / "run"), "--by", "forgetting", "--html", str(page), "--data", "digits"]) == 0
    assert "The page:" in capsys.readouterr().out
    assert "data:image/webp" in page.read_text()
    assert main(["samples", str(tmp_path / "nowhere")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["samples", str(tmp_path / "run"), "--by", "auc"]) == 2
    assert "unknown score 'auc'" in capsys.readouterr().err
    assert main(["samples", str(tmp_path / "run"), "--data", "fashion-mini"]) == 2
    assert "the data hold 6,000 samples, but the record holds 1,437; pass those" in capsys.readouterr().err
    assert main(["samples", str(tmp_path / "run"), "--data", "train.csv"]) == 2
    assert "--data train.csv is a table, whose rows cannot be shown; name images" in capsys.readouterr().err
    np.savez(tmp_path / "flat.npz", x=np.zeros((1437, 4), np.float32), y=np.zeros(1437, int))
    assert main(["samples", str(tmp_path / "run"), "--data", str(tmp_path / "flat.npz")]) == 0
    assert "flat.npz holds neither images of one size nor texts" in capsys.readouterr().err


def test_flipped_labels_come_first() -> None:
    inputs, targets = sl.data.load("digits").train
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randperm(len(targets), generator=generator)[:140]
    labels = targets.clone()
    labels[wrong] = (targets[wrong] + torch.randint(1, 10, (140,), generator=generator)) % 10
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, recorder = torch.optim.Adam(net.parameters(), lr=5e-3), Recorder(len(targets))
    for _ in range(12):
        for ids in torch.randperm(len(targets), generator=generator).split(64):
            optimizer.zero_grad()
            logits = net(inputs[ids])
            F.cross_entropy(logits, labels[ids]).backward()
            optimizer.step()
            recorder.record(logits, labels[ids], ids)
    for by in ("aum", "cumulative_loss"):
        first = set(recorder.order(by)[:140].tolist())
        assert len(first & set(wrong.tolist())) > 0.9 * 140, by
    assert isinstance(recorder.frame(), pl.DataFrame)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
        train(Path(sys.argv[2]), slow=True)
    else:
        rank_main(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))


def test_a_batch_that_does_not_fit_takes_no_other_with_it() -> None:
    recorder, logits, targets = Recorder(10), torch.randn(2, 3), torch.tensor([0, 1])
    recorder.record(logits, targets, torch.tensor([0, 1]))
    recorder.record(logits, targets, torch.tensor([2, 3]))
    recorder.record(logits, targets, torch.tensor([4, 10]))
    recorder.record(logits, targets, torch.tensor([6, 7]))
    with pytest.raises(InputError, match="10"):
        recorder.frame()
    seen = recorder.frame()["seen"].to_list()
    assert [place for place, count in enumerate(seen) if count] == [0, 1, 2, 3, 6, 7]
