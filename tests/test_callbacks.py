"""Trackers and recorders in the real trainers: Hugging Face's and Lightning's, in one process and in two.

The file is also the program that the processes of a training run: `python test_callbacks.py KIND FOLDER`.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import spiritlevel as sl

SAMPLES, BATCH, EPOCHS = 48, 8, 2


def points() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


# ---------------------------------------------------------------- Hugging Face


class Items(Dataset[dict[str, Any]]):
    """Samples as dicts, as transformers wants them."""

    def __init__(self) -> None:
        self.inputs, self.targets = points()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.inputs[index], "labels": self.targets[index]}


class Classifier(nn.Module):
    """A model in the manner of transformers: labels in, a loss and logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        logits = self.net(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def trainer_of(folder: Path, numbered: bool = True, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    data = sl.Recorder.numbered(Items()) if numbered else Items()
    options = {"num_train_epochs": EPOCHS, "logging_steps": 2, "save_strategy": "no", "report_to": "none"} | settings
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=0.05,
        seed=1,
        **options,
    )
    return Trainer(Classifier(), arguments, train_dataset=data)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def watched(trainer: Any, data: Any = None, recorder: sl.Recorder | None = None, **options: Any) -> Any:
    callback = sl.hugging_face_callback(trainer, data, recorder=recorder, **options)
    trainer.add_callback(callback)
    return callback


@pytest.mark.integrations
def test_hugging_face_trains_as_without_and_logs_what_was_measured(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path, numbered=False)
    plain.train()
    trainer = trainer_of(tmp_path)
    recorder = sl.Recorder(SAMPLES, path=tmp_path / "record")
    callback = watched(trainer, points(), recorder, every=4, share=math.inf, samples=16)
    trainer.train()
    assert torch.equal(weights(plain.model), weights(trainer.model))
    assert [row["step"] for row in callback.tracker.rows] == [4, 8, 12]
    assert not math.isnan(callback.tracker.rows[0]["critical_sharpness"])
    assert "update of AdamW is zero" in callback.tracker.rows[-1]["reason"], "as the rate is by then"
    ours = [entry for entry in trainer.state.log_history if "spiritlevel/trace" in entry]
    assert [entry["step"] for entry in ours] == [4, 8, 12]
    assert ours[0]["spiritlevel/loss"] == callback.tracker.rows[0]["loss"]

    def losses(of: Any) -> list[Any]:
        return [entry["loss"] for entry in of.state.log_history if "loss" in entry]

    assert losses(trainer) == losses(plain), "a log of ours swallows none of the trainer's"
    assert len(losses(plain)) == 6
    assert recorder.frame()["seen"].to_list() == [EPOCHS] * SAMPLES
    assert sl.Recorder.load(tmp_path / "record").frame().equals(recorder.frame())
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks


@pytest.mark.integrations
def test_hugging_face_records_what_the_model_said(tmp_path: Path) -> None:
    """With accumulated gradients the weights stand still for a step: the record is that of the first weights."""
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=6, num_train_epochs=1)
    recorder = sl.Recorder(SAMPLES)
    callback = watched(trainer, recorder=recorder)
    with torch.no_grad():
        logits = Classifier().net(points()[0])
    trainer.train()
    assert callback.tracker is None, "nothing was said of measurements"
    expected = F.cross_entropy(logits, points()[1], reduction="none")
    torch.testing.assert_close(torch.tensor(recorder.frame()["loss"].to_list()), expected, rtol=1e-5, atol=1e-6)
    assert set(recorder.history()["step"].to_list()) == {0}


@pytest.mark.integrations
def test_hugging_face_measures_the_batch_of_the_step_in_mixed_precision(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, numbered=False, bf16=True)
    callback = watched(trainer, every=6, share=math.inf, quantities=("loss", "margins", "trace"))
    trainer.train()
    assert [row["step"] for row in callback.tracker.rows] == [6, 12]
    for row in callback.tracker.rows:
        assert not row["reason"]
        assert 0 < row["loss"] < 5
        assert row["accuracy"] * BATCH == pytest.approx(round(row["accuracy"] * BATCH)), "of a batch of eight"


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_keeps_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, offline: what its run wrote to disk holds every number of every row."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="watched", settings=wandb.Settings(console="off")) as run:
        net, data = nn.Linear(2, 3), (torch.randn(6, 2), torch.arange(6) % 3)
        tracker = sl.Tracker(net, data, every=1, share=math.inf, logger=run, quantities=["loss", "margins"])
        for _ in range(3):
            with torch.no_grad():
                net.weight.mul_(1.5)
            tracker.step()
    (file,) = tmp_path.rglob("*.wandb")
    assert len({row["loss"] for row in tracker.rows}) == 3
    last, deadline = json.dumps(tracker.rows[-1]["loss"]).encode(), time.monotonic() + 60
    while last not in (kept := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.2)  # a service of wandb's writes, which on a busy machine may be later than the end of the run
    for row in tracker.rows:
        for name in ("loss", "accuracy", "margin_mean", "margin_median"):
            assert f"spiritlevel/{name}".encode() in kept
            assert json.dumps(row[name]).encode() in kept, name


@pytest.mark.integrations
def test_hugging_face_resumes_the_record_and_the_rows(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    def run(folder: Path, steps: int, resume: bool) -> tuple[Any, sl.Recorder]:
        trainer = trainer_of(folder, save_strategy="steps", save_steps=4, save_total_limit=1)
        recorder = sl.Recorder(SAMPLES, path=folder / "record")
        callback = watched(trainer, points(), recorder, every=2, share=math.inf, path=folder / "rows.csv", samples=16)

        class Stop(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
                if state.global_step == steps < 12:
                    raise KeyboardInterrupt

        trainer.add_callback(Stop())
        with contextlib.suppress(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        return callback, recorder

    whole, expected = run(tmp_path / "whole", 12, False)
    run(tmp_path / "cut", 7, False)
    again, recorder = run(tmp_path / "cut", 12, True)
    assert recorder.history().equals(expected.history())
    assert [row["step"] for row in again.tracker.rows] == [2, 4, 6, 8, 10, 12]
    for found, wanted in zip(again.tracker.rows, whole.tracker.rows, strict=True):
        assert found["trace"] == pytest.approx(wanted["trace"], rel=1e-6)


@pytest.mark.integrations
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_writer_of_tensorboard_gets_every_row_of_a_loop(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    net, data = nn.Linear(2, 3), (torch.randn(6, 2), torch.arange(6) % 3)
    with SummaryWriter(str(tmp_path)) as writer:
        tracker = sl.Tracker(net, data, every=2, share=math.inf, logger=writer, quantities=["loss", "trace"])
        for _ in range(4):
            tracker.step()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    for name in ("loss", "trace"):
        events = board.Scalars(f"spiritlevel/{name}")
        assert [event.step for event in events] == [2, 4]
        assert [event.value for event in events] == pytest.approx([row[name] for row in tracker.rows])


@pytest.mark.integrations
def test_hugging_face_reports_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = trainer_of(tmp_path, numbered=False, report_to="tensorboard")
    callback = watched(trainer, points(), every=6, share=math.inf, quantities="loss")
    trainer.train()
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    events = board.Scalars("train/spiritlevel/loss")
    assert [event.step for event in events] == [6, 12]
    assert [event.value for event in events] == pytest.approx([row["loss"] for row in callback.tracker.rows])


@pytest.mark.integrations
def test_hugging_face_refusals(tmp_path: Path) -> None:
    with pytest.raises(sl.InputError, match=r"needs the transformers.Trainer that it is added to, got Sequential"):
        sl.hugging_face_callback(network(), points())
    trainer = trainer_of(tmp_path, numbered=False)
    with pytest.raises(sl.InputError, match=r"recorder= needs a spiritlevel.Recorder, got int"):
        sl.hugging_face_callback(trainer, recorder=SAMPLES)  # type: ignore[arg-type]
    watched(trainer, recorder=sl.Recorder(SAMPLES))
    with pytest.raises(sl.InputError, match="the batches have no key 'id'"):
        trainer.train()
    other = trainer_of(tmp_path)
    other.compute_loss_func = lambda outputs, labels, **_: F.cross_entropy(outputs["logits"], labels)
    watched(other, recorder=sl.Recorder(SAMPLES))
    with pytest.raises(sl.InputError, match="the batches that reach the model have no key 'labels'"):
        other.train()


# ---------------------------------------------------------------- Lightning


def module_of(says: bool = True) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            return {"loss": loss, "logits": logits, "targets": batch[1], "ids": batch[2]} if says else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(sl.Recorder.numbered(TensorDataset(*points())), BATCH, shuffle=True, generator=generator)


def lightning_of(folder: Path, *watching: Any, **settings: Any) -> Any:
    import lightning.pytorch as pl

    options = {"max_epochs": EPOCHS, "logger": False, "enable_checkpointing": False} | settings
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=list(watching),
        **options,
    )


@pytest.fixture
def quiet() -> Any:
    """Lightning's advice (more workers, few batches) is no error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.integrations
@pytest.mark.usefixtures("quiet")
def test_lightning_trains_as_without_and_logs_what_was_measured(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    plain = module_of(says=False)
    lightning_of(tmp_path).fit(plain, loader())
    recorder, model = sl.Recorder(SAMPLES, path=tmp_path / "record"), module_of()
    callback = sl.lightning_callback(points(), recorder=recorder, every=4, share=math.inf, samples=16)
    logger = CSVLogger(tmp_path / "log")
    lightning_of(tmp_path, callback, logger=logger).fit(model, loader())
    assert torch.equal(weights(plain), weights(model))
    assert [row["step"] for row in callback.tracker.rows] == [4, 8, 12]
    assert not math.isnan(callback.tracker.rows[-1]["critical_sharpness"])
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        logged = {int(row["step"]): row["spiritlevel/trace"] for row in csv.DictReader(file)}
    assert {step: float(value) for step, value in logged.items() if value} == pytest.approx(
        {row["step"]: row["trace"] for row in callback.tracker.rows}
    )
    assert recorder.frame()["seen"].to_list() == [EPOCHS] * SAMPLES
    assert sl.Recorder.load(tmp_path / "record").frame().equals(recorder.frame())


@pytest.mark.integrations
@pytest.mark.usefixtures("quiet")
def test_lightning_accumulates_and_measures_the_batch_of_the_step(tmp_path: Path) -> None:
    recorder = sl.Recorder(SAMPLES)
    callback = sl.lightning_callback(recorder=recorder, every=1, share=math.inf, quantities=("loss", "margins"))
    trainer = lightning_of(tmp_path, callback, accumulate_grad_batches=3, precision="bf16-mixed")
    trainer.fit(module_of(), loader())
    assert [row["step"] for row in callback.tracker.rows] == [1, 2, 3, 4]
    assert not any(row["reason"] for row in callback.tracker.rows)
    assert sorted(set(recorder.history()["step"].to_list())) == [0, 1, 2, 3]
    assert recorder.frame()["seen"].to_list() == [EPOCHS] * SAMPLES
    silent = sl.lightning_callback(recorder=sl.Recorder(SAMPLES))
    with pytest.raises(sl.InputError, match="training_step must return a dict with 'loss', 'logits', 'targets'"):
        lightning_of(tmp_path, silent).fit(module_of(says=False), loader())


@pytest.mark.integrations
@pytest.mark.usefixtures("quiet")
def test_lightning_resumes_the_record_and_the_rows(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(folder: Path, steps: int, resume: Path | None = None) -> tuple[Any, sl.Recorder]:
        recorder = sl.Recorder(SAMPLES, path=folder / "record")
        options = {"every": 2, "share": math.inf, "path": folder / "rows.parquet", "samples": 16}
        callback = sl.lightning_callback(points(), recorder=recorder, **options)
        kept = ModelCheckpoint(folder, "kept", every_n_train_steps=6, save_on_train_epoch_end=False)
        trainer = lightning_of(folder, callback, kept, max_epochs=3, max_steps=steps, enable_checkpointing=True)
        torch.manual_seed(0)
        trainer.fit(module_of(), loader(), ckpt_path=resume)
        return callback, recorder

    run(tmp_path, 9)
    seen = sl.Recorder.load(tmp_path / "record")
    assert seen.steps == 9
    again, recorder = run(tmp_path, 12, tmp_path / "kept.ckpt")
    assert sorted(set(recorder.history()["step"].to_list())) == list(range(12))
    assert recorder.history().height == 12 * BATCH
    assert [row["step"] for row in again.tracker.rows] == [2, 4, 6, 8, 10, 12]


# ---------------------------------------------------------------- two processes


def hugging_face_rank(folder: Path) -> dict[str, Any]:
    plain = trainer_of(folder, numbered=False)
    plain.train()
    trainer = trainer_of(folder)
    recorder = sl.Recorder(SAMPLES, path=folder / "record")
    callback = watched(trainer, points(), recorder, every=2, share=math.inf, samples=16, path=folder / "rows.csv")
    trainer.train()
    return told(callback, trainer.args.process_index, plain.model, trainer.model)


def lightning_rank(folder: Path) -> dict[str, Any]:
    plain, model, recorder = module_of(says=False), module_of(), sl.Recorder(SAMPLES, path=folder / "record")
    callback = sl.lightning_callback(
        points(), recorder=recorder, every=2, share=math.inf, samples=16, path=folder / "rows.csv"
    )
    lightning_of(folder, devices=2, strategy="ddp").fit(plain, loader())
    trainer = lightning_of(folder, callback, devices=2, strategy="ddp")
    trainer.fit(model, loader())
    return told(callback, trainer.global_rank, plain, model)


def told(callback: Any, rank: int, plain: nn.Module, model: nn.Module) -> dict[str, Any]:
    rows = None if callback.tracker is None else [row["step"] for row in callback.tracker.rows]
    found = {"weights": weights(model).tolist(), "without": weights(plain).tolist()}
    return {"rank": rank, "rows": rows, "seen": callback.recorder.frame()["seen"].to_list(), **found}


def two(kind: str, folder: Path) -> list[dict[str, Any]]:
    """The words of two processes of one training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
        where |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, "-W", "ignore", __file__, kind, str(folder)]
        processes.append(subprocess.Popen(command, env={**os.environ, **where}, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=280)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return sorted((json.loads(file.read_text()) for file in folder.glob("told-*")), key=lambda each: each["rank"])


@pytest.mark.integrations
@pytest.mark.parametrize("kind", ["hugging_face", "lightning"])
def test_two_processes_train_as_without_and_record_every_sample_once(kind: str, tmp_path: Path) -> None:
    first, second = two(kind, tmp_path)
    assert first["weights"] == second["weights"] == first["without"]
    assert first["rows"] == [2, 4, 6]
    assert second["rows"] is None, "the first process measures"
    assert [a + b for a, b in zip(first["seen"], second["seen"], strict=True)] == [EPOCHS] * SAMPLES
    assert sum(first["seen"]) == sum(second["seen"]), "each its own half"
    files = sorted(file.name for file in (tmp_path / "record").iterdir())
    assert files == ["samples-0.safetensors", "samples-1.safetensors"]
    assert sl.Recorder.load(tmp_path / "record").frame()["seen"].to_list() == [EPOCHS] * SAMPLES


# ---------------------------------------------------------------- without the packages


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sl.InputError, match=r"needs transformers, .* pip install 'spiritlevel\[integrations\]'"):
        sl.hugging_face_callback(None)
    with pytest.raises(sl.InputError, match=r"needs lightning, .* pip install 'spiritlevel\[integrations\]'"):
        sl.lightning_callback()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    found = {"hugging_face": hugging_face_rank, "lightning": lightning_rank}[kind](folder)
    (folder / f"told-{found['rank']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
