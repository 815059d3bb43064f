"""Training: update rules against their formulas, resuming to the last bit, and all that can go wrong on a disk."""

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

from spiritlevel import data, storage
from spiritlevel.errors import InputError
from spiritlevel.papers import networks as models
from spiritlevel.papers import training
from spiritlevel.papers.training import Job, Recipe, evaluate, fit, parts, train
from spiritlevel.storage import lock

SMALL = Job(
    network="mlp",
    options={"width": 0.1},
    data="digits",
    train_size=200,
    validation=50,
    recipe=Recipe(lr=0.3, momentum=0.9, weight_decay=1e-3, batch_size=64, epochs=6),
    keep=(0, 5),
)


def images(count: int = 50, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(count, 2, size, size, generator=generator)
    return inputs, torch.randint(3, (count,), generator=generator)


def network() -> nn.Module:
    """Small, with all that makes resuming hard: batch statistics and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(4 * 36, 3),
        )


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("recipe", "rates"),
    [
        (Recipe(lr=0.1, epochs=300), {0: 0.1, 150: 0.1, 299: 0.1}),
        (
            Recipe(lr=0.1, epochs=300, schedule="paper_c"),
            {0: 0.1, 150: 0.1, 210: 0.0505, 270: 0.001, 271: 0.001, 299: 0.001},
        ),
        (
            Recipe(lr=0.1, epochs=300, schedule="averaging", average_from=200),
            {0: 0.1, 100: 0.1, 140: 0.075, 180: 0.05, 181: 0.05, 250: 0.05},
        ),
        (
            Recipe(lr=0.1, epochs=300, schedule="averaging", average_from=200, averaged_lr=2.0),
            {0: 0.1, 100: 0.1, 140: 0.15, 180: 0.2, 250: 0.2},
        ),
    ],
)
def test_schedules(recipe: Recipe, rates: dict[int, float]) -> None:
    assert {epoch: recipe.rate(epoch, 300) for epoch in rates} == pytest.approx(rates, rel=1e-12)


def test_the_rate_of_a_schedule_is_the_one_that_is_used() -> None:
    """Gradient descent on a linear function moves by the learning rate."""
    recipe = Recipe(lr=0.1, epochs=10, schedule="paper_c", loss="exponential", batch_size=4)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), -10.0, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            # The exponential loss exp(−φ) of this output is 1 − weight.
            return -torch.log(1 - self.weight).expand(len(inputs))

    model = Linear()
    history = fit(model, (torch.zeros(8, 1), torch.ones(8)), recipe, keep=range(21))
    moves = [float(history.weights[step + 1]["weight"] - history.weights[step]["weight"]) for step in range(20)]
    assert moves == pytest.approx([recipe.rate(step // 2, 10) for step in range(20)], rel=1e-9)
    assert [row["lr"] for row in history.rows[1:]] == [recipe.rate(epoch, 10) for epoch in range(10)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "either steps or epochs"),
        ({"steps": 1, "epochs": 1}, "either steps or epochs"),
        ({"steps": -1}, "steps must be a whole number of at least 0, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"steps": 1, "lr": 0.0}, "positive lr, got 0"),
        ({"steps": 1, "lr": float("nan")}, "positive lr, got nan"),
        ({"steps": 1, "momentum": 1.0}, r"momentum in \[0, 1\)"),
        ({"steps": 1, "momentum": 0.9, "optimizer": "adam"}, "for optimizer='sgd'"),
        ({"steps": 1, "weight_decay": -1e-4}, "weight_decay >= 0"),
        ({"steps": 1, "batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"steps": 1, "schedule": "averaging"}, "needs average_from"),
        ({"steps": 1, "schedule": "cosine"}, "unknown schedule 'cosine'"),
        ({"steps": 1, "optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"steps": 1, "average_every": "batch"}, "unknown average_every"),
        ({"steps": 1, "loss": "cross-entropy"}, "did you mean 'cross_entropy'"),
    ],
)
def test_recipes_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Recipe(**arguments)


# ---------------------------------------------------------------- updates


def sgd(w: Tensor, g: Tensor, state: dict[str, Any], recipe: Recipe) -> Tensor:
    g = g + (0 if recipe.decoupled else recipe.weight_decay) * w
    state["v"] = recipe.momentum * state.get("v", 0) + g
    return w - recipe.lr * state["v"] - (recipe.lr * recipe.weight_decay * w if recipe.decoupled else 0)


def adam(w: Tensor, g: Tensor, state: dict[str, Any], recipe: Recipe) -> Tensor:
    g = g + (0 if recipe.decoupled else recipe.weight_decay) * w
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["s"] = 0.999 * state.get("s", 0) + 0.001 * g**2
    step = state["m"] / (1 - 0.9**t) / ((state["s"] / (1 - 0.999**t)).sqrt() + 1e-8)
    return w - recipe.lr * step - (recipe.lr * recipe.weight_decay * w if recipe.decoupled else 0)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (sgd, {"lr": 0.3}),
        (sgd, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1}),
        (sgd, {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1, "decoupled": True}),
        (adam, {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.1}),
        (adam, {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.35, "decoupled": True}),
    ],
)
def test_optimisers_follow_their_formulas(rule: Callable[..., Tensor], options: dict[str, Any]) -> None:
    """Softmax regression in float64 on all of the data, with its gradient written out."""
    inputs, targets = torch.rand(30, 4, dtype=torch.float64), torch.arange(30) % 3
    recipe = Recipe(steps=12, batch_size=100, **options)
    model = nn.Linear(4, 3, bias=False).double()
    w, state = model.weight.detach().clone(), dict[str, Any]()
    for _ in range(12):
        errors = torch.softmax(inputs @ w.T, 1) - nn.functional.one_hot(targets, 3)
        w = rule(w, errors.T @ inputs / 30, state, recipe)
    fit(model, (inputs, targets), recipe)
    torch.testing.assert_close(model.weight.detach(), w, rtol=1e-10, atol=1e-12)


class Seen(nn.Module):
    """Remembers the first input value of every sample that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.batches: list[list[int]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.batches.append(inputs[:, 0].int().tolist())
        return self.linear(inputs)


@pytest.mark.parametrize(("count", "sizes"), [(12, [5, 5, 2]), (11, [5, 5]), (3, [3]), (1, [1])])
def test_an_epoch_is_a_new_order_of_all_samples(count: int, sizes: list[int]) -> None:
    model = Seen()
    inputs = torch.arange(count)[:, None].float()
    fit(model, (inputs, torch.zeros(count, dtype=torch.long)), Recipe(lr=1e-9, epochs=3, batch_size=5))
    assert [len(batch) for batch in model.batches] == sizes * 3
    groups = [model.batches[i : i + len(sizes)] for i in range(0, 3 * len(sizes), len(sizes))]
    orders = [[sample for batch in group for sample in batch] for group in groups]
    assert all(len(set(order)) == len(order) == sum(sizes) for order in orders)
    if count > 10:
        assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_the_average_is_the_mean_of_the_iterates(every: Any) -> None:
    pair = images()
    recipe = Recipe(lr=0.05, momentum=0.9, batch_size=16, epochs=6)
    model = network()
    plain = fit(model, pair, recipe, keep=range(25)).weights
    model = network()
    averaged = fit(
        model,
        pair,
        dataclasses.replace(recipe, average_from=3, average_every=every),
        keep=range(25),
        evaluate={"train": pair},
    )
    begin = 13 if every == "step" else 16
    for step in (12, begin - 1, begin, 20, 24):
        iterates = range(begin, step + 1) if every == "step" else range(16, step + 1, 4)
        for name in ("0.weight", "5.bias"):
            wanted = torch.stack([plain[i][name].double() for i in iterates or (step,)]).mean(0)
            torch.testing.assert_close(averaged.weights[step][name].double(), wanted, rtol=0, atol=1e-6)
    # The statistics belong to the averaged weights: over batches of (nearly) equal size, the mean is the mean of all.
    last = averaged.weights[24]
    assert equal(dict(model.state_dict()), last)
    assert not model.training
    values = nn.functional.conv2d(pair[0], last["0.weight"], last["0.bias"])
    torch.testing.assert_close(last["1.running_mean"], values.mean((0, 2, 3)), rtol=0, atol=2e-3)
    assert not torch.allclose(plain[24]["1.running_mean"], values.mean((0, 2, 3)), rtol=0, atol=2e-3)
    assert averaged.rows[-1]["train_loss"] == evaluate(model, pair)["loss"]


@pytest.mark.parametrize(("every", "steps"), [("step", 12), ("epoch", 15)])
def test_an_average_that_would_never_begin_is_refused(every: Any, steps: int) -> None:
    with pytest.raises(InputError, match="choose an earlier epoch"):
        fit(network(), images(), Recipe(batch_size=16, steps=steps, average_from=3, average_every=every))
    history = fit(network(), images(), Recipe(batch_size=16, steps=steps + 1, average_from=3, average_every=every))
    assert history.step == steps + 1


def test_augmented_images_are_crops_and_mirror_images() -> None:
    image = torch.rand(2, 5, 5)
    padded = nn.functional.pad(image, (4,) * 4)
    crops = [padded[:, i : i + 5, j : j + 5] for i in range(9) for j in range(9)]
    candidates = torch.stack([*crops, *(crop.flip(2) for crop in crops)])
    found = training._augmented(image.expand(2000, 2, 5, 5), 4, training._generator(0, "augment"))
    matches = (found[:, None] == candidates).flatten(2).all(2)
    assert bool(matches.any(1).all())
    counts = matches.double().sum(0)
    assert int(counts.min()) > 0  # 162 cases, 12.3 draws each
    again = training._augmented(image.expand(2000, 2, 5, 5), 4, training._generator(0, "augment"))
    assert torch.equal(found, again)


def test_only_what_requires_grad_is_trained_and_outer_modes_do_not_matter() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        fit(model, images(), Recipe(steps=3))
    after = model.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["5.weight"], after["5.weight"])
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(InputError, match="no parameter that requires grad"):
        fit(model.requires_grad_(False), images(), Recipe(steps=3))


def test_squared_error_of_numbers_has_no_accuracy() -> None:
    inputs = torch.rand(20, 2)
    pair = inputs, inputs @ torch.tensor([[1.0], [-2.0]])
    history = fit(nn.Linear(2, 1), pair, Recipe(lr=0.5, epochs=300, loss="squared_error"), evaluate={"train": pair})
    assert history.rows[-1]["train_loss"] < 1e-6
    assert "train_accuracy" not in history.rows[-1]


@pytest.mark.parametrize(
    ("pair", "options", "sentence"),
    [
        ((torch.rand(3, 2, 8, 8), torch.arange(4)), {}, "as many inputs as targets, got 3 and 4"),
        ((torch.rand(0, 2, 8, 8), torch.arange(0)), {}, "training needs at least one sample, got none; look at"),
        (images(), {"evaluate": {"some": images(0)}}, "the evaluation on 'some' needs at least one sample, got none"),
        ((torch.rand(4, 2, 8, 8), torch.arange(4)), {}, "target 3 .* is outside the model's 3 classes"),
        ((torch.rand(4, 2, 8, 8), torch.zeros(4)), {}, "needs one integer class per sample"),
        ((torch.full((3, 2, 8, 8), torch.nan), torch.arange(3)), {}, "cannot begin: .* before any update"),
        (images(), {"keep": (4,)}, "keep asks for step 4 of a training of 3 steps"),
        (images(), {"keep": (-1,)}, "keep asks for step -1"),
        (images(), {"evaluate_every": 0}, "evaluate_every must be a whole number"),
        (images(size=7), {}, r"the model Sequential fails on inputs of shape \(50, 2, 7, 7\): mat1 and mat2"),
    ],
)
def test_arguments_that_do_not_fit(pair: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        fit(network(), pair, Recipe(steps=3), **options)


def test_data_of_any_number_format_can_be_trained_on() -> None:
    inputs, targets = images()
    wanted = fit(network(), (inputs, targets), Recipe(steps=3), evaluate={"some": (inputs, targets)})
    for pair in ((inputs.double(), targets), (inputs, targets.int()), (inputs.double(), targets.to(torch.uint8))):
        assert fit(network(), pair, Recipe(steps=3), evaluate={"some": pair}).rows == wanted.rows


def test_until_loss_reads_no_other_set() -> None:
    recipe, others = Recipe(steps=3, until_loss=0.5), images(8)
    with pytest.raises(InputError, match="the set to evaluate that is called 'train' is another one"):
        fit(network(), images(), recipe, evaluate={"train": others})
    assert fit(network(), images(), recipe, evaluate={"train": images()}).step == 3


def test_an_average_needs_a_copy() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(128, 3)))
    with pytest.raises(InputError, match=r"averaging needs a copy of Sequential, .* take the form in torch"):
        fit(model, images(), Recipe(steps=6, batch_size=16, average_from=0))


def test_an_average_of_half_precision_does_not_stand_still() -> None:
    model = nn.Linear(1, 2, bias=False).to(torch.bfloat16)
    run = training._Run(model, (torch.ones(2, 1), torch.arange(2)), Recipe(steps=1000, average_from=0), 0)
    for value in [1.0] * 500 + [2.0] * 500:
        with torch.no_grad():
            model.weight.fill_(value)
        run._average(0, last=True)
    assert run.average[0].flatten().tolist() == pytest.approx([1.5, 1.5], rel=1e-3)


def test_a_divergence_ends_with_a_sentence(tmp_path: Path) -> None:
    job = dataclasses.replace(SMALL, recipe=Recipe(lr=1e20, steps=50))
    with pytest.raises(InputError, match=r"diverged after \d+ steps: .* at learning rate 1e\+20; lower lr, .* 1e\+19"):
        train(job, cache=tmp_path)


@pytest.mark.parametrize("training", [True, False])
def test_a_divergence_leaves_mode_and_gradients_as_they_should_be(training: bool) -> None:
    model = network().train(training)
    model[1].eval()  # as somebody does who freezes the statistics
    modes = [module.training for module in model.modules()]
    with pytest.raises(InputError, match="diverged after"):
        fit(model, images(), Recipe(lr=1e20, weight_decay=1.0, steps=50))
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (images(0), "evaluate needs at least one sample, got none"),
        ((images(4)[0], images(5)[1]), "evaluate needs as many inputs as targets, got 4 and 5"),
        ((images(4)[0], images(2000)[1]), "evaluate needs as many inputs as targets, got 4 and 2000"),
    ],
)
def test_evaluation_on_data_that_do_not_fit(pair: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        evaluate(network(), pair)


# ---------------------------------------------------------------- history and stopping


def test_rows_hold_what_can_be_recomputed() -> None:
    pair, model = images(), network()
    history = fit(model, pair, Recipe(lr=0.1, batch_size=16, steps=10), keep=range(11), evaluate={"some": pair})
    assert [row["step"] for row in history.rows] == [0, 4, 8, 10]
    assert [row["epoch"] for row in history.rows] == [0, 1, 2, 2.5]
    for row in history.rows:
        model.load_state_dict(history.weights[int(row["step"])])
        with torch.no_grad():
            outputs = model(pair[0])
        assert row["some_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, pair[1])), rel=1e-5)
        assert row["some_accuracy"] == pytest.approx(float((outputs.argmax(1) == pair[1]).double().mean()))
        norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm()
        assert row["weight_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert "loss" not in history.rows[0]
    assert all(row["loss"] > 0 for row in history.rows[1:])


def test_stopping_rules() -> None:
    digits = data.load("digits")
    recipe = Recipe(lr=0.5, epochs=30)
    rows = fit(models.softmax_regression(inputs=64), digits.train, recipe, evaluate={"train": digits.train}).rows
    goal = (rows[10]["train_loss"] + rows[11]["train_loss"]) / 2

    def stopped(recipe: Recipe, **options: Any) -> tuple[int, bool]:
        history = fit(models.softmax_regression(inputs=64), digits.train, recipe, **options)
        assert max(history.weights) == history.step
        return history.step, history.stopped

    step, early = stopped(dataclasses.replace(recipe, until_loss=goal))
    assert (step, early) == (pytest.approx(11 * 12, abs=12), True)  # other first weights
    assert stopped(dataclasses.replace(recipe, until_loss=goal, until_step=300)) == (300, True)
    assert stopped(dataclasses.replace(recipe, until_loss=1e-9)) == (360, False)
    assert stopped(recipe, until=lambda row: row["step"] >= 24) == (24, True)
    assert stopped(recipe, until=lambda row: row["step"] >= 24, evaluate_every=10) == (30, True)
    assert stopped(Recipe(steps=0)) == (0, False)


def test_progress_names_loss_accuracy_and_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training, "_REPORT_SECONDS", -1.0)
    calls: list[tuple[str, int, int]] = []
    train(SMALL, cache=tmp_path, progress=lambda *call: calls.append(call))
    assert [call[1:] for call in calls] == [(step, 24) for step in range(1, 25)]
    form = r"training mlp on digits: loss [\d.]+, accuracy \d+%, [\d.e+]+ steps/s"
    assert all(re.fullmatch(form, what) for what, _, _ in calls)


# ---------------------------------------------------------------- jobs and their data


def test_parts_are_disjoint_and_follow_the_split_seed() -> None:
    found = parts(SMALL)
    assert found.validation is not None
    whole = data.load("digits")
    rows = {tuple(image.flatten().tolist()): i for i, image in enumerate(whole.train[0])}
    train_rows, validation_rows = (
        [rows[tuple(image.flatten().tolist())] for image in pair[0]] for pair in (found.train, found.validation)
    )
    assert (len(train_rows), len(validation_rows)) == (200, 50)
    assert not set(train_rows) & set(validation_rows)
    assert torch.equal(found.train[1], whole.train[1][train_rows])
    larger = parts(dataclasses.replace(SMALL, train_size=None))
    assert larger.validation is not None
    assert torch.equal(larger.validation[0], found.validation[0])
    assert len(larger.train[0]) == len(rows) - 50
    other = parts(dataclasses.replace(SMALL, split_seed=1))
    assert not torch.equal(other.train[0], found.train[0])
    assert torch.equal(parts(dataclasses.replace(SMALL, seed=1)).train[0], found.train[0])
    assert len(parts(dataclasses.replace(SMALL, test_size=7)).test[1]) == 7
    assert parts(dataclasses.replace(SMALL, validation=0)).validation is None


def test_standard_pixels_come_from_the_training_part(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = torch.rand(300, 3, 4, 4) * torch.tensor([1.0, 0.5, 0.0])[:, None, None]
    whole = data.Data((colour, torch.arange(300) % 10), (colour[:20] + 1, torch.arange(20) % 10), ("a",) * 10, "digits")
    monkeypatch.setattr(data, "load", lambda name: whole)
    job = dataclasses.replace(SMALL, pixels="standard")
    found, unit = parts(job), parts(dataclasses.replace(job, pixels="unit"))
    double = unit.train[0].double()
    mean, std = double.mean((0, 2, 3)), double.var((0, 2, 3), correction=0).sqrt()
    std[2] = 1.0  # a constant channel stays finite
    for name in ("train", "validation", "test"):
        wanted = (getattr(unit, name)[0].double() - mean[:, None, None]) / std[:, None, None]
        torch.testing.assert_close(getattr(found, name)[0].double(), wanted, rtol=0, atol=1e-5)
    grey = parts(dataclasses.replace(job, grey=True, pixels="unit")).train[0]
    wanted = 0.299 * unit.train[0][:, 0] + 0.587 * unit.train[0][:, 1] + 0.114 * unit.train[0][:, 2]
    torch.testing.assert_close(grey[:, 0], wanted)
    assert float(whole.train[0].max()) <= 1.0  # the loaded set itself is left alone


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"network": "fcn_bn", "data": "mnist", "options": {}}, 935_434),
        ({"network": "fcn_bn", "data": "cifar10", "options": {}}, 2_106_890),
        ({"network": "fcn_bn", "data": "cifar10", "options": {}, "grey": True}, 1_058_314),
        ({"network": "lenet5", "data": "cifar10", "options": {}}, 62_006),
        ({"network": "lenet5", "data": "cifar10", "options": {}, "grey": True}, 61_706),
        ({"network": "lenet5", "data": "mnist", "options": {"classes": 3}}, 61_111),
        ({"network": "all_cnn_c", "data": "cifar100", "options": {}}, 1_387_108),
    ],
)
def test_networks_fit_their_data(changes: dict[str, Any], count: int) -> None:
    assert models.count(training._build(dataclasses.replace(SMALL, **changes))) == count


def test_the_key_sees_every_field_but_keep() -> None:
    changes: dict[str, Any] = {
        "network": "printed_mlp",
        "options": {"width": 0.2},
        "data": "mnist",
        "train_size": 100,
        "validation": 0,
        "test_size": 5,
        "pixels": "standard",
        "grey": True,
        "pool": 2,
        "channels_last": True,
        "recipe": dataclasses.replace(SMALL.recipe, lr=0.1),
        "seed": 1,
        "split_seed": 1,
        "evaluate": ("train",),
        "evaluate_every": 3,
    }
    assert {field.name for field in dataclasses.fields(Job)} == {*changes, "keep"}
    keys = {dataclasses.replace(SMALL, **{name: value}).key for name, value in changes.items()}
    keys.add(dataclasses.replace(SMALL, recipe=dataclasses.replace(SMALL.recipe, crop=2)).key)
    assert len(keys | {SMALL.key}) == len(changes) + 2
    assert dataclasses.replace(SMALL, keep=(1,)).key == SMALL.key
    assert dataclasses.replace(SMALL, options=(("width", 0.1),)).key == SMALL.key


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"network": "mpl"}, "unknown network 'mpl': did you mean 'mlp'"),
        ({"data": "mnits"}, "did you mean 'mnist'"),
        ({"pixels": "raw"}, "unknown form of the pixels 'raw'"),
        ({"evaluate": ("tests",)}, "did you mean 'test'"),
        ({"validation": -1}, "validation must be"),
        ({"train_size": 0}, "train_size must be"),
        ({"train_size": 1400}, "digits has 1,437 training points, .* train_size=1400 and validation=50"),
        ({"test_size": 361}, "digits has 360 test points"),
        ({"options": {"widht": 1}}, "did you mean 'width'"),
        ({"keep": (25,)}, "step 25 of a training of 24 steps"),
    ],
)
def test_jobs_that_make_no_sense(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        train(dataclasses.replace(SMALL, **changes), cache=tmp_path)


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
    assert equal(training._build(SMALL).state_dict(), first.model(0).state_dict())
    with pytest.raises(InputError, match="step 7 were not kept; kept: 0, 5, 24"):
        first.model(7)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training._Run, "batches", lambda self: pytest.fail("trained again"))


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
        with pytest.raises(InputError, match="is gone or was changed"):
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

        monkeypatch.setattr(training, "write_atomically", refuse)
    with pytest.raises(InputError, match=r"cannot keep the training in .* \(.*\): free some space, or"):
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
    assert calls == ["training mlp on digits: waiting for another process that does the same"] * 3


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
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(training, "_REPORT_SECONDS", -1.0)
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
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(training, "_REPORT_SECONDS", -1.0)
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
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "_REPORT_SECONDS", -1.0)
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


def at(step: int) -> Callable[[training.Row], bool]:
    return lambda row: row["step"] >= step


@pytest.mark.parametrize("name", HARD)
def test_a_training_that_the_caller_stopped_goes_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever calls came before, each one returns what it would have returned alone."""
    pair, recipe = images(), HARD[name]
    options: dict[str, Any] = {"evaluate": {"train": pair}, "evaluate_every": 3}
    trained: list[int] = []
    batches = training._Run.batches

    def counted(run: training._Run) -> Any:
        trained.append(run.step)
        return batches(run)

    monkeypatch.setattr(training._Run, "batches", counted)
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
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "_CHECKPOINT_SHARE", float("inf"))
    monkeypatch.setattr(training, "_REPORT_SECONDS", -1.0)

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
        earlier.setattr(training._Folder, "suspend", training._Folder.finish)
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
from spiritlevel.papers import training
from spiritlevel.papers.training import Job, Recipe
for line in sys.stdin:  # every line in a process of its own, all from one that has imported torch already
    folder, steps, seconds = line.split()
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    training._CHECKPOINT_SECONDS = float(seconds)
    training._CHECKPOINT_SHARE = float("inf")
    recipe = Recipe(optimizer="adam", lr=1e-3, batch_size=100, steps=int(steps), average_from=1)
    job = Job(network="fcn_bn", options={"width": 0.1}, data="digits", train_size=500, recipe=recipe, keep=(0, 7, 60))
    training.train(job, cache=folder)
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


# ---------------------------------------------------------------- speed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax_regression", "lenet5", "fcn_bn"])
def test_speed_beside_a_bare_loop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the ratio of the times of a step; fails only beyond any noise, since it runs on busy machines too."""
    inputs, targets = data.load("fashion-mini").train
    steps = {"softmax_regression": 1500, "lenet5": 100, "fcn_bn": 100}[name]

    def bare() -> float:
        model = models.build(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        model.train()
        begin, done = time.perf_counter(), 0
        while done < steps:
            for batch in torch.randperm(len(inputs)).split(128):
                loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break
        return time.perf_counter() - begin

    def ours() -> float:
        recipe = Recipe(lr=0.01, momentum=0.9, weight_decay=1e-4, steps=steps)
        model = models.build(name)
        begin = time.perf_counter()
        fit(model, (inputs, targets), recipe, evaluate_every=steps, progress=lambda *_: None)
        return time.perf_counter() - begin

    ratios = []
    for _ in range(5):  # in turns: whatever else the machine does hits both
        theirs = bare()
        ratios.append(ours() / theirs)
    ratio = sorted(ratios)[2]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{name}: a step takes {ratio:.2f} of a bare PyTorch loop's time ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    assert ratio < 2
