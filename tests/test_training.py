"""Training: update rules against their formulas, history, jobs and their data."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainings import SMALL, equal, images, network

from spiritlevel import data
from spiritlevel.errors import InputError
from spiritlevel.papers import networks as models
from spiritlevel.papers.training import Job, Recipe, evaluate, fit, fitting, parts, train
from spiritlevel.papers.training.jobs import build_network
from spiritlevel.papers.training.running import Run, _augmented, seeded_generator

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
    found = _augmented(image.expand(2000, 2, 5, 5), 4, seeded_generator(0, "augment"))
    matches = (found[:, None] == candidates).flatten(2).all(2)
    assert bool(matches.any(1).all())
    counts = matches.double().sum(0)
    assert int(counts.min()) > 0  # 162 cases, 12.3 draws each
    again = _augmented(image.expand(2000, 2, 5, 5), 4, seeded_generator(0, "augment"))
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
        ((torch.rand(0, 2, 8, 8), torch.arange(0)), {}, "training needs at least one sample, got none; check how"),
        (images(), {"evaluate": {"some": images(0)}}, "the evaluation on 'some' needs at least one sample, got none"),
        ((torch.rand(4, 2, 8, 8), torch.arange(4)), {}, "target 3 .* is outside the model's 3 classes"),
        ((torch.rand(4, 2, 8, 8), torch.zeros(4)), {}, "needs one integer class per sample"),
        ((torch.full((3, 2, 8, 8), torch.nan), torch.arange(3)), {}, "cannot begin: .* before any update"),
        (images(), {"keep": (4,)}, "keep asks for step 4, but the training run has steps 0 to 3"),
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
    with pytest.raises(InputError, match="the evaluation set called 'train' is a different one"):
        fit(network(), images(), recipe, evaluate={"train": others})
    assert fit(network(), images(), recipe, evaluate={"train": images()}).step == 3


def test_an_average_needs_a_copy() -> None:
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(128, 3)))
    with pytest.raises(InputError, match=r"averaging needs a copy of Sequential, .* use the form in torch"):
        fit(model, images(), Recipe(steps=6, batch_size=16, average_from=0))


def test_an_average_of_half_precision_does_not_stand_still() -> None:
    model = nn.Linear(1, 2, bias=False).to(torch.bfloat16)
    run = Run(model, (torch.ones(2, 1), torch.arange(2)), Recipe(steps=1000, average_from=0), 0)
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


def test_a_check_between_evaluations_stops_where_an_evaluation_would() -> None:
    digits = data.load("digits")

    def trained(recipe: Recipe, every: int) -> Any:
        torch.manual_seed(0)
        return fit(models.softmax_regression(inputs=64), digits.train, recipe, evaluate_every=every, seed=1)

    for recipe in (
        Recipe(lr=0.5, epochs=30, until_loss=0.2),
        Recipe(lr=0.5, epochs=30, average_from=3, until_loss=0.3),
    ):
        often, seldom = trained(recipe, 7), trained(dataclasses.replace(recipe, check_every=7), 91)
        assert often.stopped
        assert often.step % 91
        assert often.step == seldom.step
        assert seldom.rows[-1] == pytest.approx({**often.rows[-1], "loss": seldom.rows[-1]["loss"]})
        assert {row["step"] for row in seldom.rows} == {*range(0, often.step, 91), often.step}
        for name, tensor in often.weights[often.step].items():
            assert torch.equal(seldom.weights[often.step][name], tensor)
    late = trained(Recipe(lr=0.5, epochs=30, until_loss=0.3, until_step=200, check_every=7), 1_000)
    assert late.step == 203
    with pytest.raises(InputError, match="check_every"):
        Recipe(steps=1, check_every=0)


def test_progress_names_loss_accuracy_and_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fitting, "_REPORT_SECONDS", -1.0)
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
    assert models.count(build_network(dataclasses.replace(SMALL, **changes))) == count


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
        ({"pixels": "raw"}, "unknown form of pixels 'raw'"),
        ({"evaluate": ("tests",)}, "did you mean 'test'"),
        ({"validation": -1}, "validation must be"),
        ({"train_size": 0}, "train_size must be"),
        ({"train_size": 1400}, "digits has 1,437 training points, .* train_size=1400 and validation=50"),
        ({"test_size": 361}, "digits has 360 test points"),
        ({"options": {"widht": 1}}, "did you mean 'width'"),
        ({"keep": (25,)}, "step 25, but the training run has steps 0 to 24"),
    ],
)
def test_jobs_that_make_no_sense(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        train(dataclasses.replace(SMALL, **changes), cache=tmp_path)


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
