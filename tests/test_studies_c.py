"""What the studies of paper C compute themselves, and that each of their verdicts can occur."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from spiritlevel.studies import deep_linear, optimizers, recipes, weight_decay
from spiritlevel.studies.base import Verdict


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
        "train accuracy": [1.0, 1.0, 1.0],
        "train loss": [0.01, 0.01, 0.01],
        "bound of momentum": [38000.0] * 3,
        "bound of descent": [20000.0] * 3,
        **changes,
    }
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{"pixels": form, **row} for form in ("unit", "standard") for row in rows]


@pytest.mark.parametrize(
    ("changes", "id", "verdict"),
    [
        ({}, "λ₁ rises", Verdict.REPRODUCED),
        ({"λ₁": [12.0, 17.0, 16.0]}, "λ₁ rises", Verdict.DIRECTION),
        ({"λ₁": [18.0, 17.0, 16.0]}, "λ₁ rises", Verdict.NOT),
        ({}, "values of λ₁", Verdict.REPRODUCED),
        ({"λ₁": [12.0, 17.0, 16.0]}, "values of λ₁", Verdict.DIRECTION),
        ({"λ₁": [1.0, 2.0, 3.0]}, "values of λ₁", Verdict.NOT),
        ({"gap": [0.01, 0.02, 0.03]}, "gap falls", Verdict.NOT),
        ({"gap": [0.02, 0.03, 0.01]}, "gap falls", Verdict.DIRECTION),
        ({}, "accuracies", Verdict.REPRODUCED),
        ({"validation accuracy": [0.91, 0.92, 0.93]}, "accuracies", Verdict.DIRECTION),
        ({"validation accuracy": [0.5, 0.6, 0.7]}, "accuracies", Verdict.NOT),
        ({"λ₁": [12.0, 14.0, 39000.0]}, "stability", Verdict.NOT),
        ({"λ₁": [12.0, 14.0, 4000.0]}, "not tight", Verdict.DIRECTION),
    ],
)
def test_verdicts_on_weight_decay(changes: dict[str, list[float]], id: str, verdict: Verdict) -> None:
    config = weight_decay.WeightDecay(scale="paper", network="softmax")
    rulings = {ruling.statement.id: ruling for ruling in weight_decay.judge(config, solutions(**changes))}
    assert rulings[id].verdict is verdict
    assert set(rulings) == {statement.id for statement in weight_decay.STATEMENTS}


@pytest.mark.parametrize(
    ("network", "accuracy", "expected"),
    [
        ("mlp", 0.9, Verdict.UNDECIDED),
        ("cnn", 0.9, Verdict.REPRODUCED),  # the paper's own stopped at 86 to 88 %
        ("cnn", 0.8, Verdict.UNDECIDED),
        ("softmax", 0.5, Verdict.REPRODUCED),  # convex
    ],
)
def test_a_network_that_does_not_fit_decides_nothing(network: str, accuracy: float, expected: Verdict) -> None:
    rows = solutions(**{"train accuracy": [0.99, accuracy, 0.99]})
    config = weight_decay.WeightDecay(scale="laptop", network=network)
    form = weight_decay.NETWORKS[network].pixels[0]
    if len(weight_decay.NETWORKS[network].pixels) == 1:
        rows = [{**row, "pixels": form} for row in rows if row["pixels"] == "unit"]
    rulings = weight_decay.judge(config, rows)
    assert {r.statement.id: r.verdict for r in rulings}["λ₁ rises"] is expected


def test_the_pixels_nearer_to_the_paper_decide() -> None:
    rows = solutions()
    for row in rows:
        row["λ₁"] *= 1 if row["pixels"] == "standard" else 10
    config = weight_decay.WeightDecay(scale="paper", network="softmax")
    rulings = {ruling.statement.id: ruling for ruling in weight_decay.judge(config, rows)}
    assert "Pixels: standard" in rulings["λ₁ rises"].remark
    assert rulings["values of λ₁"].verdict is Verdict.REPRODUCED


def optimised(**adam: float) -> dict[str, dict[str, Any]]:
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
    return {"SGD": sgd, "Adam, averaged": {**sgd, **better, **adam}, "Adam": sgd, "SGD, averaged": sgd}


@pytest.mark.parametrize(
    ("adam", "id", "verdict"),
    [
        ({}, "sharper", Verdict.REPRODUCED),
        ({"λ₁": 20.0}, "sharper", Verdict.DIRECTION),
        ({"λ₁": 5.0}, "sharper", Verdict.NOT),
        ({}, "ends of the spectra", Verdict.REPRODUCED),
        ({"λ_min": -10.0}, "ends of the spectra", Verdict.DIRECTION),
        ({"λ_min": 10.0}, "ends of the spectra", Verdict.NOT),
        ({}, "better", Verdict.REPRODUCED),
        ({"validation_accuracy": 0.736}, "better", Verdict.DIRECTION),
        ({"validation_accuracy": 0.7}, "better", Verdict.NOT),
        ({"train_accuracy": 0.95}, "training", Verdict.NOT),
    ],
)
def test_verdicts_on_optimisers(adam: dict[str, float], id: str, verdict: Verdict) -> None:
    config = optimizers.Optimizers(scale="paper")
    rulings = {ruling.statement.id: ruling for ruling in optimizers.judge(config, optimised(**adam))}
    assert rulings[id].verdict is verdict
    unfit = optimizers.judge(optimizers.Optimizers(scale="laptop"), optimised(train_accuracy=0.9))
    assert {r.statement.id: r.verdict for r in unfit}["sharper"] is Verdict.UNDECIDED


def test_studies_share_their_trainings() -> None:
    """`weight-decay` and `batchnorm-mode` ask for the same WideResNets."""
    from spiritlevel.studies import batchnorm_mode

    for scale in ("laptop", "paper"):
        (one,), (two,) = (
            weight_decay.STUDY.jobs(scale, seeds=[0], network="wideresnet"),
            batchnorm_mode.STUDY.jobs(scale, seeds=[0]),
        )
        assert weight_decay.job(one, 5e-4, "standard").key == batchnorm_mode.job(two, 5e-4).key


def test_the_recipes_of_paper_c() -> None:
    sgd = recipes.paper_c("vgg16_bn", "cifar100", lr=0.1, epochs=300, weight_decay=5e-4).recipe
    assert (sgd.optimizer, sgd.momentum, sgd.schedule, sgd.decoupled) == ("sgd", 0.9, "paper_c", False)
    assert sgd.augment
    few = recipes.paper_c("vgg16_bn", "cifar100", lr=0.1, epochs=300, train_size=512, validation=1000)
    assert (few.recipe.augment, few.test_size, few.evaluate_every) == (False, 1000, 25 * 4)
    assert [sgd.rate(epoch, 300) for epoch in (0, 150, 270, 299)] == pytest.approx([0.1, 0.1, 0.001, 0.001])
    adam = recipes.paper_c(
        "vgg16_bn", "cifar100", lr=5e-4, epochs=300, weight_decay=0.25, adam=True, average_from=161
    ).recipe
    assert (adam.optimizer, adam.decoupled, adam.schedule, adam.average_from) == ("adam", True, "averaging", 161)
    assert adam.rate(299, 300) == pytest.approx(2.5e-4)
