"""What the studies of paper C compute themselves, and that each of their verdicts can occur."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from spiritlevel.papers.studies import (
    Ruling,
    Run,
    Verdict,
    batchnorm_mode,
    decide,
    deep_linear,
    execute,
    find,
    optimizers,
    recipes,
    weight_decay,
)


@pytest.mark.parametrize(("w", "x"), [((1.0, 1.0, 1.0), -1.0), ((0.5, -2.0, 1.5), 0.7)])
def test_the_deep_linear_hessian_is_the_corrected_equation_three(w: tuple[float, ...], x: float) -> None:
    """H = (X²uuᵀ + XM)e^{w₁w₂w₃X} with u = (w₂w₃, w₁w₃, w₁w₂)."""
    a, b, c = w
    u = torch.tensor([b * c, a * c, a * b], dtype=torch.float64)
    m = torch.tensor([[0, c, b], [c, 0, a], [b, a, 0]], dtype=torch.float64)
    expected = torch.linalg.eigvalsh((x**2 * torch.outer(u, u) + x * m) * math.exp(a * b * c * x))
    found = deep_linear.measure(torch.tensor(w, dtype=torch.float64), x)
    assert found["λ₁"] == pytest.approx(float(expected[-1]), rel=1e-12)
    assert found["trace"] == pytest.approx(float(expected.sum()), rel=1e-12)
    assert found["‖H‖_F"] == pytest.approx(float(expected.norm()), rel=1e-12)


def test_descent_follows_the_gradient() -> None:
    config = deep_linear.DeepLinear(steps=3, lr=0.1)
    w = 1 + 0.1 * torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        w = w.detach().requires_grad_()
        objective = deep_linear.loss(w, -1.0) + 0.3 * w.square().sum() / 2
        (gradient,) = torch.autograd.grad(objective, w)
        w = w - 0.1 * gradient
    assert deep_linear.descend(config, 0.3)[-1]["‖w‖"] == pytest.approx(float(w.detach().norm()), rel=1e-12)


def solutions(**changes: list[float]) -> list[dict[str, Any]]:
    columns = {
        "λ₁": [12.0, 14.0, 16.0],
        "validation accuracy": [0.9348, 0.94, 0.9408],
        "gap": [0.03, 0.02, 0.01],
        "weight norm": [3.0, 2.0, 1.0],
        "trace": [1.0, 2.0, 3.0],
        "Frobenius norm": [1.0, 2.0, 3.0],
        "Tr(H²)/P": [1.0, 4.0, 9.0],
        "γ": [0.0, 1e-4, 5e-4],
        "train accuracy": [1.0, 1.0, 1.0],
        "train loss": [0.01, 0.01, 0.01],
        "bound of momentum": [38000.0] * 3,
        "bound of descent": [20000.0] * 3,
        **changes,
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{"pixels": form, **row} for form in ("unit", "standard") for row in rows]


def verdicts(rulings: Iterable[Ruling]) -> dict[str, Verdict]:
    """As if three seeds had found the same."""
    return {ruling.statement.id: decide(ruling.statement, [ruling.record()] * 3).verdict for ruling in rulings}


@pytest.mark.parametrize(
    ("changes", "id", "verdict"),
    [
        ({}, "λ₁ rises", Verdict.REPRODUCED),
        ({"λ₁": [12.0, 17.0, 11.0]}, "λ₁ rises", Verdict.NOT),
        ({}, "sharper and better, exposure of 1e-4", Verdict.REPRODUCED),
        ({"gap": [0.01, 0.02, 0.03]}, "sharper and better, exposure of 1e-4", Verdict.NOT),
        ({"Tr(H²)/P": [9.0, 4.0, 1.0]}, "sharper and better, exposure of 5e-4", Verdict.NOT),
        ({"λ₁": [18.0, 17.0, 16.0]}, "sharper and better, exposure of 5e-4", Verdict.NOT),
        ({}, "values of λ₁", Verdict.REPRODUCED),
        ({"λ₁": [12.0, 17.0, 16.0]}, "values of λ₁", Verdict.NOT),
        ({}, "gap falls", Verdict.REPRODUCED),
        ({"gap": [0.01, 0.02, 0.03]}, "gap falls", Verdict.NOT),
        ({}, "accuracies", Verdict.REPRODUCED),
        ({"validation accuracy": [0.91, 0.92, 0.93]}, "accuracies", Verdict.NOT),
        ({"validation accuracy": [0.4, 0.92, 0.93]}, "λ₁ rises", Verdict.UNDECIDED),  # 5 times chance is 50 %
        # a network counts for what rests on it alone
        ({"validation accuracy": [0.93, 0.92, 0.4]}, "sharper and better, exposure of 1e-4", Verdict.REPRODUCED),
        ({"validation accuracy": [0.93, 0.92, 0.4]}, "sharper and better, exposure of 5e-4", Verdict.UNDECIDED),
        ({"validation accuracy": [0.93, 0.4, 0.92]}, "λ₁ rises", Verdict.REPRODUCED),
        ({"validation accuracy": [0.93, 0.92, 0.91]}, "validation rises", Verdict.NOT),
        ({"weight norm": [1.0, 2.0, 3.0]}, "weights shrink", Verdict.NOT),
        ({"trace": [3.0, 2.0, 1.0]}, "trace rises", Verdict.NOT),
        ({"Frobenius norm": [3.0, 2.0, 1.0]}, "‖H‖_F rises", Verdict.NOT),
        ({"λ₁": [12.0, 14.0, 39000.0]}, "stability", Verdict.NOT),
        ({"λ₁": [12.0, 14.0, 4000.0]}, "not tight", Verdict.NOT),
    ],
)
def test_verdicts_on_weight_decay(changes: dict[str, list[float]], id: str, verdict: Verdict) -> None:
    config = weight_decay.WeightDecay(scale="paper", network="softmax")
    found = verdicts(weight_decay.judge(config, solutions(**changes)))
    assert found[id] is verdict
    at_other_scales = {"sharper and better, 5e-4 as printed"}
    assert set(found) == {statement.id for statement in weight_decay.STATEMENTS} - at_other_scales


def test_the_pixels_nearer_to_the_paper_decide() -> None:
    rows = solutions()
    for row in rows:
        row["λ₁"] *= 1 if row["pixels"] == "standard" else 10
    config = weight_decay.WeightDecay(scale="paper", network="softmax")
    rulings = list(weight_decay.judge(config, rows))
    assert "Pixels: standard" in rulings[0].remark
    assert verdicts(rulings)["values of λ₁"] is Verdict.REPRODUCED


def optimised(**adam: float) -> list[dict[str, Any]]:
    sgd = {
        "λ₁": 10.0,
        "λ_min": -1.5,
        "weight norm": 1.0,
        "Tr(H²)/P": 1e-4,
        "validation_accuracy": 0.735,
        "train_accuracy": 0.996,
        "train_loss": 0.02,
    }
    better = {"λ₁": 380.0, "λ_min": -60.0, "weight norm": 2.0, "Tr(H²)/P": 0.02, "validation_accuracy": 0.758}
    rows = {"SGD": sgd, "Adam, averaged": {**sgd, **better, **adam}, "Adam": sgd, "SGD, averaged": sgd}
    return [{"optimiser": name, **row} for name, row in rows.items()]


@pytest.mark.parametrize(
    ("adam", "id", "verdict"),
    [
        ({}, "sharper and better", Verdict.REPRODUCED),
        ({"λ₁": 5.0}, "sharper and better", Verdict.NOT),
        ({"validation_accuracy": 0.7}, "sharper and better", Verdict.NOT),
        ({"Tr(H²)/P": 1e-5}, "sharper and better", Verdict.NOT),
        ({}, "sharper", Verdict.REPRODUCED),
        ({"λ₁": 5.0}, "sharper", Verdict.NOT),
        ({}, "mean square", Verdict.REPRODUCED),
        ({"Tr(H²)/P": 1e-5}, "mean square", Verdict.NOT),
        ({}, "higher norm", Verdict.REPRODUCED),
        ({"weight norm": 0.9}, "higher norm", Verdict.NOT),
        ({}, "ends of the spectra", Verdict.REPRODUCED),
        ({"λ_min": -10.0}, "ends of the spectra", Verdict.NOT),
        ({"λ_min": 10.0}, "ends of the spectra", Verdict.NOT),
        ({}, "better", Verdict.REPRODUCED),
        ({"validation_accuracy": 0.7}, "better", Verdict.NOT),
        ({"validation_accuracy": 0.04}, "sharper", Verdict.UNDECIDED),
        ({}, "training", Verdict.REPRODUCED),
        ({"train_accuracy": 0.95}, "training", Verdict.NOT),
    ],
)
def test_verdicts_on_optimisers(adam: dict[str, float], id: str, verdict: Verdict) -> None:
    assert verdicts(optimizers.judge(optimizers.Optimizers(scale="paper"), optimised(**adam)))[id] is verdict


@pytest.mark.parametrize("accuracy", [0.7, 0.758])
def test_a_smaller_gap_at_a_lower_accuracy_is_called_that(accuracy: float) -> None:
    """By the rule it generalises better; the row says what that rests on."""
    fitted_less = {"validation_accuracy": accuracy, "train_accuracy": accuracy + 0.1}
    ruling, *_ = optimizers.judge(optimizers.Optimizers(scale="paper"), optimised(**fitted_less))
    assert decide(optimizers.TOGETHER, [ruling.record()] * 3).verdict is Verdict.REPRODUCED
    assert ("better by the gap alone" in ruling.remark) == (accuracy < 0.735)


def test_verdicts_on_modes_of_batch_norm() -> None:
    def judged(training: float, evaluation: float, square: float = 2.0, accuracy: float = 0.8) -> dict[str, Verdict]:
        rows = [
            {"γ": gamma, "mode": mode, "λ₁": value, "Tr(H²)/P": mean_square, "validation accuracy": share}
            for gamma, share, factors in (
                (0.0, 0.75, (1.0, 2.0, 1.0)),
                (5e-4, accuracy, (training, evaluation, square)),
            )
            for mode, value, mean_square in zip(
                batchnorm_mode.MODES.values(), factors[:2], factors[2:] * 2, strict=True
            )
        ]
        return verdicts(batchnorm_mode.judge(batchnorm_mode.BatchnormMode(scale="paper"), rows))

    assert set(judged(2.0, 20.0).values()) == {Verdict.REPRODUCED}
    assert set(judged(0.5, 0.5, square=0.5, accuracy=0.7).values()) == {Verdict.NOT}
    assert set(judged(2.0, 20.0, accuracy=0.03).values()) == {Verdict.UNDECIDED}


def test_studies_share_their_trainings() -> None:
    """`weight-decay` and `batchnorm-mode` ask for the same WideResNets."""
    for scale in ("laptop", "small", "paper"):
        (one,), (two,) = (
            weight_decay.STUDY.jobs(scale, seeds=[0], network="wideresnet"),
            batchnorm_mode.STUDY.jobs(scale, seeds=[0]),
        )
        assert weight_decay.job(one, 5e-4, "standard").key == batchnorm_mode.job(two, 5e-4).key
        assert {*batchnorm_mode.strengths(two)} <= {0.0, *weight_decay.strengths(one).values(), 5e-4}


def test_the_recipes_of_paper_c() -> None:
    sgd = recipes.paper_c("vgg16_bn", "cifar100", lr=0.1, epochs=300, weight_decay=5e-4).recipe
    assert (sgd.optimizer, sgd.momentum, sgd.schedule, sgd.decoupled) == ("sgd", 0.9, "paper_c", False)
    assert sgd.augment
    few = recipes.paper_c("vgg16_bn", "cifar100", lr=0.1, epochs=300, train_size=512, validation=1000)
    assert (few.recipe.augment, few.test_size, few.evaluate_every) == (False, 1000, 25 * 4)
    small = recipes.paper_c("vgg16_bn", "cifar100", lr=0.1, epochs=60, train_size=10_000, small=True, pool=2, seed=2)
    assert (small.recipe.augment, small.recipe.crop, small.pool, small.test_size) == (True, 2, 2, None)
    assert (small.validation, small.split_seed, small.evaluate_every) == (5000, 2, 10 * 79)
    assert [sgd.rate(epoch, 300) for epoch in (0, 150, 270, 299)] == pytest.approx([0.1, 0.1, 0.001, 0.001])
    adam = recipes.paper_c(
        "vgg16_bn", "cifar100", lr=5e-4, epochs=300, weight_decay=0.25, adam=True, average_from=161
    ).recipe
    assert (adam.optimizer, adam.decoupled, adam.schedule, adam.average_from) == ("adam", True, "averaging", 161)
    assert adam.rate(299, 300) == pytest.approx(2.5e-4)


@pytest.mark.parametrize("name", ["weight-decay", "optimizers", "batch-size"])
def test_what_was_measured_of_a_network_needs_the_network_no_more(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are kept in the repository, networks are not: a run resumes from the pieces alone."""
    study = find(name)
    config = study.at("smoke")
    first = execute(study, config, tmp_path / "out", cache=tmp_path / "networks")
    folder = study.folder(config, tmp_path / "out")
    if name == "batch-size":  # all four trainings have a course
        assert pl.read_parquet(folder / "time.parquet")["run"].n_unique() == 4
    for path in folder.iterdir():
        if path.name != "pieces" and path.is_file():
            path.unlink()
    assert all(path.name.startswith(("solution-", "grid-")) for path in (folder / "pieces").iterdir()), ".gitignore"
    monkeypatch.setattr(Run, "train", lambda run, job: pytest.fail("trained again"))
    again = execute(study, config, tmp_path / "out", cache=tmp_path / "gone")
    assert again["rulings"] == first["rulings"]


@pytest.mark.parametrize("name", ["correlation", "batch-size"])
def test_long_runs_that_are_kept_are_found_again(name: str) -> None:
    """A field that comes later must not make hours of kept runs unknown."""
    study, root = find(name), Path(__file__).parents[1] / "results"
    folders = [path.parent for path in (root / name).glob("*/summary.json")]
    assert folders
    for folder in folders:
        config = study.restored(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        assert study.folder(config, root) == folder
