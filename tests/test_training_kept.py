"""Trainings on the disk: found again, resumed to the last bit, and all that can go wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from trainings import SMALL, equal, images, network

from spiritlevel import data, storage
from spiritlevel.errors import InputError
from spiritlevel.papers.training import Job, Recipe, Row, checkpoints, evaluate, fit, fitting, parts, train
from spiritlevel.papers.training.jobs import build_network
from spiritlevel.papers.training.running import Run
from spiritlevel.storage import lock

# ---------------------------------------------------------------- the cache


def test_a_job_is_a_function_of_its_config(tmp_path: Path, untouched: Untouched) -> None:
    with untouched():
        first = train(SMALL, cache=tmp_path / "a")
        second = train(SMALL, cache=tmp_path / "b")
        other = train(dataclasses.replace(SMALL, seed=1), cache=tmp_path / "a")
        model = first.model()
    assert first.history == second.history
    assert first.steps == (0, 5, 24)
    for step in (0, 5, None):
        assert equal(first.model(step).state_dict(), second.model(step).state_dict())
    assert not equal(first.model(0).state_dict(), other.model(0).state_dict())
    assert not model.training
    assert evaluate(model, first.test)["accuracy"] == first.history[-1]["test_accuracy"]
    assert first.validation is not None
    assert evaluate(model, first.validation)["loss"] == first.history[-1]["validation_loss"]
    assert equal(build_network(SMALL).state_dict(), first.model(0).state_dict())
    with pytest.raises(InputError, match="step 7 were not kept; kept: 0, 5, 24"):
        first.model(7)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "batches", lambda self: pytest.fail("trained again"))


def test_what_is_trained_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(SMALL, cache=tmp_path)
    forbid(monkeypatch)
    again = train(SMALL, cache=tmp_path)
    assert (again.history, again.steps, again.seconds) == (first.history, first.steps, first.seconds)
    assert equal(again.model().state_dict(), first.model().state_dict())
    assert torch.equal(again.train[0], first.train[0])
    assert train(dataclasses.replace(SMALL, keep=(5,)), cache=tmp_path).steps == (5, 24)
    names = {path.name for path in again.folder.iterdir()}
    assert names == {".lock", "state.json", "step-0.safetensors", "step-5.safetensors", "step-24.safetensors"}
    state = json.loads((again.folder / "state.json").read_text())
    assert state["config"]["recipe"]["lr"] == 0.3


def test_other_steps_are_added_to_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(SMALL, cache=tmp_path)
    more = train(dataclasses.replace(SMALL, keep=(7,)), cache=tmp_path)
    assert more.steps == (7, 24)
    assert more.history == first.history
    assert equal(first.model(5).state_dict(), train(SMALL, cache=tmp_path).model(5).state_dict())
    forbid(monkeypatch)
    assert train(dataclasses.replace(SMALL, keep=(0, 5, 7)), cache=tmp_path).steps == (0, 5, 7, 24)


@pytest.mark.parametrize("damage", ["byte", "cut", "gone", "state", "seal", "empty", "list", "other"])
def test_a_damaged_entry_is_trained_again(tmp_path: Path, damage: str) -> None:
    first = train(SMALL, cache=tmp_path)
    wanted, history = first.model().state_dict(), first.history
    file, state = first.folder / "step-24.safetensors", first.folder / "state.json"
    content = file.read_bytes()
    if damage == "byte":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(content[:-9])
    elif damage == "gone":
        file.unlink()
    elif damage == "state":
        state.write_bytes(state.read_bytes()[:-30])
    elif damage == "seal":
        state.write_text(re.sub(r'"train_loss": 0', '"train_loss": 1', state.read_text(), count=1))
    elif damage == "other":
        state.write_text(re.sub(r'"key": "\w', '"key": "x', state.read_text()))
    else:
        state.write_text({"empty": "", "list": "[1]"}[damage])
    if damage in ("byte", "cut", "gone"):
        with pytest.raises(InputError, match="is missing or was changed"):
            first.model()
    again = train(SMALL, cache=tmp_path)
    assert again.history == history
    assert equal(again.model().state_dict(), wanted)


@pytest.mark.parametrize("what", ["full", "read-only", "a file"])
def test_a_disk_that_cannot_be_written_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    cache = tmp_path / "cache"
    if what == "a file":
        cache.write_text("")
    else:
        number = {"full": errno.ENOSPC, "read-only": errno.EROFS}[what]

        def refuse(*_: object) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr(checkpoints, "write_atomically", refuse)
    with pytest.raises(InputError, match=r"cannot keep the training run in .* \(.*\): free some space, or"):
        train(SMALL, cache=cache)
    if what == "full":
        monkeypatch.undo()
        assert train(SMALL, cache=cache).steps == (0, 5, 24)


def test_the_second_process_waits_and_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_POLL_SECONDS", 0.01)
    done = train(SMALL, cache=tmp_path / "other")
    folder = tmp_path / "cache" / done.folder.name
    held = lock(folder)
    held.__enter__()
    calls: list[str] = []

    def progress(what: str, *_: int) -> None:
        calls.append(what)
        if len(calls) == 3:  # the holder finishes
            for file in done.folder.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            held.__exit__(None, None, None)

    forbid(monkeypatch)
    assert train(SMALL, cache=tmp_path / "cache", progress=progress).history == done.history
    assert calls == ["training mlp on digits: waiting for another process that is doing the same"] * 3


# ---------------------------------------------------------------- going on


class Stop(Exception):
    pass


HARD = {
    "momentum": Recipe(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=16, steps=21, augment=True),
    "adam": Recipe(optimizer="adam", lr=0.01, weight_decay=0.1, decoupled=True, batch_size=16, steps=21),
    "average": Recipe(lr=0.1, batch_size=16, steps=21, average_from=2, schedule="averaging", augment=True),
    "epochs": Recipe(lr=0.1, momentum=0.5, batch_size=16, epochs=5, average_from=1, average_every="epoch"),
}


STOPS = [(1,), (4, 5, 13), (12, 19), pytest.param(range(1, 20), marks=pytest.mark.slow)]


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("name", HARD)
def test_an_interrupted_training_ends_where_the_whole_one_ends(
    name: str, stops: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(fitting, "_REPORT_SECONDS", -1.0)
    pair, recipe = images(), HARD[name]
    options: dict[str, Any] = {"seed": 5, "keep": (0, 3, 17), "evaluate": {"train": pair}, "evaluate_every": 3}
    whole = fit(network(), pair, recipe, **options)
    for stop in stops:

        def interrupt(what: str, step: int, total: int, stop: int = stop) -> None:
            if step > stop:  # when the checkpoint of `stop` has been written
                raise Stop

        torch.rand(stop)  # resuming does not depend on the global state
        with pytest.raises(Stop):
            fit(network(), pair, recipe, **options, checkpoint=tmp_path, progress=interrupt)
        state = json.loads((tmp_path / "state.json").read_text())
        assert (state["step"], state["finished"]) == (stop, False)
        assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    model = network()
    ended = fit(model, pair, recipe, **options, checkpoint=tmp_path)
    assert ended.rows == whole.rows
    assert ended.weights.keys() == whole.weights.keys() == {0, 3, 17, whole.step}
    assert all(equal(ended.weights[step], whole.weights[step]) for step in whole.weights)
    assert equal(model.state_dict(), whole.weights[whole.step])
    assert not list(tmp_path.glob("checkpoint-*"))


class Counting(nn.Module):
    """Keeps in a buffer that is no part of its state how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x) / (1 + 0.1 * self.calls)


RESUMED: dict[str, Callable[[], nn.Module]] = {
    "channels last": lambda: network().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "passing buffer": Counting,
}


@pytest.mark.parametrize("kind", RESUMED)
@pytest.mark.parametrize("name", ["momentum", "adam", "average"])
def test_unusual_networks_resume_to_the_last_bit(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(fitting, "_REPORT_SECONDS", -1.0)
    wanted = fit(RESUMED[kind](), images(), HARD[name])

    def interrupt(what: str, step: int, total: int) -> None:
        if step > 13:
            raise Stop

    with pytest.raises(Stop):
        fit(RESUMED[kind](), images(), HARD[name], checkpoint=tmp_path, progress=interrupt)
    ended = fit(RESUMED[kind](), images(), HARD[name], checkpoint=tmp_path)
    assert equal(ended.weights[ended.step], wanted.weights[wanted.step])


def test_data_in_another_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(SMALL, cache=tmp_path)
    load = data.load

    def reversed_order(name: str) -> data.Data:
        found = load(name)
        return dataclasses.replace(found, train=(found.train[0].flip(0), found.train[1].flip(0)))

    monkeypatch.setattr(data, "load", reversed_order)
    found = train(SMALL, cache=tmp_path)
    with pytest.raises(InputError, match="was trained on digits in another order"):
        _ = found.validation


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(fitting, "_REPORT_SECONDS", -1.0)
    wanted = train(SMALL, cache=tmp_path / "whole")

    def interrupt(what: str, step: int, total: int) -> None:
        if step > 10:
            raise Stop

    with pytest.raises(Stop):
        train(SMALL, cache=tmp_path, progress=interrupt)
    (file,) = tmp_path.glob("mlp-*/checkpoint-*")
    file.write_bytes(file.read_bytes()[:-4] + b"oops")
    (file.parent / ".step-24.safetensors.0123456789abcdef").write_text("half")  # left by a killed process
    steps: list[int] = []
    again = train(SMALL, cache=tmp_path, progress=lambda what, step, total: steps.append(step))
    assert steps[0] == 1
    assert equal(again.model().state_dict(), wanted.model().state_dict())
    assert not list(file.parent.glob(".step*"))


def test_a_checkpoint_of_another_training_is_not_used(tmp_path: Path) -> None:
    pair = images()
    for seed in (0, 1):
        model = network()
        fit(model, pair, Recipe(steps=4), seed=seed, checkpoint=tmp_path)
        alone = network()
        fit(alone, pair, Recipe(steps=4), seed=seed)
        assert equal(model.state_dict(), alone.state_dict())


def at(step: int) -> Callable[[Row], bool]:
    return lambda row: row["step"] >= step


@pytest.mark.parametrize("name", HARD)
def test_a_training_that_the_caller_stopped_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever calls came before, each one returns what it would have returned alone."""
    pair, recipe = images(), HARD[name]
    options: dict[str, Any] = {"evaluate": {"train": pair}, "evaluate_every": 3}
    trained: list[int] = []
    batches = Run.batches

    def counted(run: Run) -> Any:
        trained.append(run.step)
        return batches(run)

    monkeypatch.setattr(Run, "batches", counted)
    for until, begins in (
        (at(0), []),  # at once
        (at(6), [0]),
        (at(6), []),  # found
        (at(5), []),  # the same row
        (at(15), [6]),
        (at(0), []),  # it had gone further: begins again, and stops at once
        (at(9), [0]),
        (None, [9]),
        (None, []),
        (at(100), []),
        (at(12), [0]),
        (None, [12]),
    ):
        alone, model = network(), network()
        wanted = fit(alone, pair, recipe, **options, until=until)
        trained.clear()
        found = fit(model, pair, recipe, **options, until=until, checkpoint=tmp_path)
        assert trained == begins
        assert (found.rows, found.step, found.stopped) == (wanted.rows, wanted.step, wanted.stopped)
        assert found.weights.keys() == wanted.weights.keys()
        assert all(equal(found.weights[step], wanted.weights[step]) for step in wanted.weights)
        assert equal(model.state_dict(), alone.state_dict())
        assert not model.training


def test_a_checkpoint_may_lie_where_the_caller_wants_to_stop_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(fitting, "_REPORT_SECONDS", -1.0)

    def interrupt(what: str, step: int, total: int) -> None:
        if step > 6:
            raise Stop

    for recipe in HARD.values():
        with pytest.raises(Stop):
            fit(network(), images(), recipe, evaluate_every=3, checkpoint=tmp_path, progress=interrupt)
        for _ in range(2):
            found = fit(network(), images(), recipe, evaluate_every=3, checkpoint=tmp_path, until=at(6))
            wanted = fit(network(), images(), recipe, evaluate_every=3, until=at(6))
            assert found.rows == wanted.rows
            assert equal(found.weights[6], wanted.weights[6])


def test_a_folder_without_a_way_on_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions called a training finished that the caller had stopped."""
    recipe = Recipe(steps=8)
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoints.Folder, "suspend", checkpoints.Folder.finish)
        fit(network(), images(), recipe, evaluate_every=2, checkpoint=tmp_path, until=at(4))
    assert fit(network(), images(), recipe, evaluate_every=2, checkpoint=tmp_path, until=at(4)).step == 4
    found = fit(network(), images(), recipe, evaluate_every=2, checkpoint=tmp_path)
    assert found.step == 8
    assert found.weights.keys() == {8}


def test_other_sets_to_evaluate_are_another_training(tmp_path: Path) -> None:
    pair, recipe = images(), Recipe(steps=4)
    inputs, targets = images(20)
    for some in ((inputs, targets), (inputs, (targets + 1) % 3), (inputs.flip(1), targets), pair, (inputs, targets)):
        wanted = fit(network(), pair, recipe, evaluate={"some": some}).rows
        assert fit(network(), pair, recipe, evaluate={"some": some}, checkpoint=tmp_path).rows == wanted


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = (".gitignore", ".env", "checkpoint-best.pt", "notes.txt", "checkpoint-7.safetensors", ".step-1.txt")
    for name in others:
        (tmp_path / name).write_text("mine")
    for name in (".git", "checkpoint-500"):
        (tmp_path / name).mkdir()
    fit(network(), images(), Recipe(steps=2), checkpoint=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *others, ".git", "checkpoint-500", ".lock", "state.json", "step-2.safetensors",
    }  # fmt: skip


class Named(nn.Module):
    """A parameter with the name of what the data are called elsewhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3] * self.inputs


def frozen(model: nn.Module) -> nn.Module:
    model.get_submodule("0").requires_grad_(False)
    return model


def with_tanh(model: nn.Module) -> nn.Module:
    model.set_submodule("2", nn.Tanh())
    return model


def test_another_network_with_the_same_weights_is_another_training(tmp_path: Path) -> None:
    pair, recipe = images(), Recipe(steps=4)
    for make in (
        network,
        lambda: with_tanh(network()),
        lambda: frozen(network()),
        lambda: Named(1.0),
        lambda: Named(5.0),
    ):
        wanted = fit(make(), pair, recipe, evaluate={"some": pair}).rows
        assert fit(make(), pair, recipe, evaluate={"some": pair}, checkpoint=tmp_path).rows == wanted


def test_keys_stay(tmp_path: Path) -> None:
    """Long trainings lie in folders with these keys, which must be found again."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.zero_()
    pair = torch.eye(2), torch.arange(2)
    fit(model, pair, Recipe(steps=2, until_loss=0.1), checkpoint=tmp_path, evaluate={"train": pair}, evaluate_every=1)
    assert json.loads((tmp_path / "state.json").read_text())["key"] == "23a878bed7792864"
    assert SMALL.key == "727aaf50b0d403c8"


LAYOUTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "transposed": lambda: (network(), (images()[0].transpose(2, 3), images()[1])),
    "every second": lambda: (network(), (images(100)[0][::2], images(100)[1][::2])),
    "expanded": lambda: (network(), (images(1)[0].expand(50, -1, -1, -1), images()[1])),
    "channels last": lambda: (network().to(memory_format=torch.channels_last), images()),  # type: ignore[call-overload]
    "with gradient": lambda: (network(), (images()[0].requires_grad_(), images()[1])),
}


def test_pooled_images_are_means_of_their_pixels() -> None:
    job = Job(network="mlp", data="digits", train_size=20, validation=5, recipe=Recipe(steps=1))
    whole, small = parts(job).train[0], parts(dataclasses.replace(job, pool=2)).train[0]
    assert small.shape == (20, 1, 4, 4)
    assert torch.allclose(small[:, :, 1, 2], whole[:, :, 2:4, 4:6].mean((2, 3)))


def test_channels_last_trains_the_same_network(tmp_path: Path) -> None:
    job = Job(network="lenet5", data="fashion-mini", train_size=64, options={"width": 0.5}, recipe=Recipe(steps=5))
    plain, other = train(job, cache=tmp_path), train(dataclasses.replace(job, channels_last=True), cache=tmp_path)
    assert any(
        weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
        for weight in other.model().parameters()
    )
    for one, two in zip(plain.model().parameters(), other.model().parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_any_layout_can_be_kept(name: str, tmp_path: Path) -> None:
    for _ in range(2):
        (model, pair), (alone, _) = LAYOUTS[name](), LAYOUTS[name]()
        found = fit(model, pair, Recipe(steps=4), evaluate={"some": pair}, checkpoint=tmp_path)
        assert found.rows == fit(alone, pair, Recipe(steps=4), evaluate={"some": pair}).rows
        assert equal(model.state_dict(), alone.state_dict())


TRAIN = """
import os, sys
import torch
torch.set_num_threads(1)
from spiritlevel.papers.training import Job, Recipe, checkpoints, train
for line in sys.stdin:  # every line in a process of its own, all from one that has imported torch already
    folder, steps, seconds = line.split()
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    checkpoints._CHECKPOINT_SECONDS = float(seconds)
    checkpoints._CHECKPOINT_SHARE = float("inf")
    recipe = Recipe(optimizer="adam", lr=1e-3, batch_size=100, steps=int(steps), average_from=1)
    job = Job(network="fcn_bn", options={"width": 0.1}, data="digits", train_size=500, recipe=recipe, keep=(0, 7, 60))
    train(job, cache=folder)
    os._exit(0)
"""


def killed(tmp_path: Path, steps: int, kills: int) -> None:
    """Kill the same training again and again, each time after it got further, and compare it with one that was not."""
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"

    def state(folder: Path) -> dict[str, Any]:
        found = list(folder.glob("*/state.json"))
        return dict(json.loads(found[0].read_text())) if found else {"step": -1}

    draw, last = random.Random(kills), -1
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout

        def begin(folder: Path, seconds: float) -> int:
            process.stdin.write(f"{folder} {steps} {seconds}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        for _ in range(kills):
            child = begin(resumed, 0.0)
            deadline = time.monotonic() + 60
            while state(resumed)["step"] <= last:
                assert time.monotonic() < deadline, "the training gets no further"
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert int(process.stdout.readline()) == -signal.SIGKILL  # else it was too short to be killed
            last = state(resumed)["step"]
        for folder, seconds in ((resumed, 0.0), (whole, 1e9)):
            begin(folder, seconds)
            assert int(process.stdout.readline()) == 0
        process.stdin.close()
    assert 0 < last < steps
    assert state(resumed)["rows"] == state(whole)["rows"]
    assert state(resumed)["files"] == state(whole)["files"]  # with the SHA-256 of all tensors
    names = [{path.name for path in folder.glob("*/*")} for folder in (resumed, whole)]
    assert names[0] == names[1]


def test_a_killed_training_ends_where_the_whole_one_ends(tmp_path: Path) -> None:
    killed(tmp_path, steps=70, kills=1)


@pytest.mark.slow
def test_a_training_killed_again_and_again_ends_where_the_whole_one_ends(tmp_path: Path) -> None:
    killed(tmp_path, steps=600, kills=20)
