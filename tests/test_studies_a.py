"""The studies of paper A: their own formulas against brute force, and rules under which each verdict can occur."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spiritlevel import papers
from spiritlevel.errors import InputError
from spiritlevel.papers.studies import Ruling, Verdict, affine, batch_size, correlation, cost, decide, outliers, scaling
from spiritlevel.papers.studies.base import Run

YES, NO, OPEN = Verdict.REPRODUCED, Verdict.NOT, Verdict.UNDECIDED


def verdicts(rulings: Iterable[Ruling]) -> dict[str, Verdict]:
    """As if three seeds had found the same."""
    return {ruling.statement.id: decide(ruling.statement, [ruling.record()] * 3).verdict for ruling in rulings}


# ------------------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize(
    ("setting", "parameters"),
    [
        ("lenet-mnist", 61_706),
        ("lenet-tanh-mnist", 61_706),
        ("fcn-mnist", 935_434),
        ("fcn-mnist-4096", 935_434),
        ("lenet-cifar10", 62_006),
        ("fcn-cifar10-grey", 1_058_314),
        ("fcn-cifar10", 2_106_890),
    ],
)
def test_the_paper_s_networks(setting: str, parameters: int) -> None:
    from spiritlevel.papers import networks as models
    from spiritlevel.papers.training.jobs import build_network

    job = correlation.job(correlation.Correlate(scale="paper", setting=setting))
    assert models.count(build_network(job)) == parameters
    assert job.keep == tuple(range(0, 10_001, 500))
    recipe = job.recipe
    assert (recipe.steps, recipe.momentum, recipe.weight_decay, recipe.optimizer) == (10_000, 0.0, 0.0, "sgd")
    assert recipe.lr == (0.05 if "lenet" in setting else 0.1)
    assert recipe.batch_size == (4096 if "4096" in setting else 256)


def test_no_network_is_trained_twice() -> None:
    def common(setting: str, **more: Any) -> str:
        return correlation.job(correlation.Correlate(scale="paper", setting=setting, **more)).key

    config = batch_size.BatchSize(scale="paper")
    assert batch_size.job(config, 256).key == common("fcn-mnist")
    assert batch_size.job(config, 4096).key == common("fcn-mnist-4096")
    assert batch_size.job(config, 4096, 16.0).key != common("fcn-mnist-4096")
    for name in ("fcn", "lenet"):
        assert scaling.job(scaling.Scaling(scale="paper", network=name)).key == common(f"{name}-mnist")
        assert cost.job(cost.Cost(scale="paper", network=name)).key == common(f"{name}-mnist")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: correlation.Correlate(setting="lenet"), "unknown setting 'lenet': did you mean"),
        (lambda: scaling.Scaling(network="fnc"), "unknown network 'fnc': did you mean 'fcn'"),
        (lambda: cost.Cost(network="lenett"), "unknown network 'lenett': did you mean 'lenet'"),
    ],
)
def test_wrong_names_are_named(make: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()


# --------------------------------------------------------------------------------------------------------- correlation


def rows(way: str, values: dict[str, list[float | None]], n: int = 100) -> list[dict[str, Any]]:
    """Rows as of `correlations`: the same r for every quantity, at steps 0, 1, and so on."""
    return [
        {"step": step, "trace": way, "quantity": quantity, "points": points, "r": r, "n": n, "removed": 0}
        for points, column in values.items()
        for quantity in correlation.QUANTITIES
        for step, r in enumerate(column)
    ]


def test_rules_of_correlation() -> None:
    accuracy = dict(enumerate([0.1, 0.5, 0.8, 0.9, 0.95, 1.0]))

    def judged(ours: list[dict[str, Any]], held_out: float = 0.9) -> dict[str, Verdict]:
        return verdicts(correlation.judge(ours + theirs, accuracy, held_out, 0.1))

    good = [0.1, 0.7, 0.85, 0.9, 0.95, 0.99]
    ours = rows("ours", {"correct": good, "incorrect": [0.9, 0.2, -0.2, 0.1, 0.0, None]})
    theirs = rows("pyhessian", {"correct": [0.6, 0.7, 0.5, 0.7, 0.6, 0.7], "incorrect": [0.4] * 6})
    found = judged(ours)
    assert (found["level-aceht"], found["rises"], found["incorrect"]) == (YES, YES, YES)
    assert (found["level-aceht-pyhessian"], found["incorrect-pyhessian"]) == (NO, NO)
    assert set(judged(ours, held_out=0.4).values()) == {OPEN}, "five times chance is 50 %"
    falling = rows("ours", {"correct": [0.4, 0.3, 0.2, 0.1, 0.05, 0.0], "incorrect": [0.9] * 6})
    found = judged(falling)
    assert (found["level-aceht"], found["level-bound"], found["rises"], found["incorrect"]) == (NO, NO, NO, NO)
    none = rows("ours", {"correct": [None] * 6, "incorrect": [0.9] * 6}, n=5)
    found = judged(none)
    assert (found["level-aceht"], found["rises"], found["incorrect"]) == (OPEN, OPEN, OPEN)
    few = rows("ours", {"correct": good, "incorrect": [0.9] * 6}, n=29)
    assert judged(few)["incorrect"] is OPEN, "30 incorrect points are needed"
    untrained = rows("ours", {"correct": good, "incorrect": [0.9731, *[None] * 5]})
    assert judged(untrained)["incorrect"] is OPEN, "the untrained network does not count"


def test_groups_are_correlated_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    aceht = torch.rand(200, generator=generator, dtype=torch.float64)
    noise = torch.rand(200, generator=generator, dtype=torch.float64)
    correct = torch.arange(200) % 2 == 0
    trace = torch.where(correct, 3 * aceht + 1, noise)
    found: dict[str, Any] = {name: aceht.tolist() for name in correlation.QUANTITIES} | {"correct": correct.tolist()}
    table = correlation.correlations(7, found, {"ours": trace.tolist()})
    right, wrong = (next(r for r in table if r["points"] == points) for points in ("correct", "incorrect"))
    assert (right["r"], right["slope"], right["intercept"]) == pytest.approx((1.0, 3.0, 1.0))
    assert abs(wrong["r"]) < 0.4
    assert right["n"] + right["removed"] == wrong["n"] + wrong["removed"] == 100
    assert len(table) == 6


# -------------------------------------------------------------------------------------------------------------- affine


def test_rules_of_affine() -> None:
    def table(exact: float, estimate: float, noise: float) -> list[dict[str, Any]]:
        fixed = {"parameters": "default", "slope": 1.0, "low": 0.0, "high": 1.0, "largest relative error": 0.0}
        name = "error against ACEHT (Spearman)"
        return [
            {**fixed, "way": "trace", "r": exact, name: 0.0},
            {**fixed, "way": "trace by PyHessian", "r": estimate, name: noise},
        ]

    assert set(verdicts(affine.judge(table(1.0, 0.97, 0.5))).values()) == {YES}
    assert set(verdicts(affine.judge(table(0.9995, 0.999, -0.1))).values()) == {NO}
    assert set(verdicts(affine.judge(table(0.9, 0.5, -0.1))).values()) == {NO}


# ---------------------------------------------------------------------------------------------------------- batch-size


def solution(**changes: Any) -> dict[str, Any]:
    small = {
        "steps": 10_000,
        "train_loss": 2e-5,
        "test_loss": 0.07,
        "train_accuracy": 1.0,
        "test_accuracy": 0.983,
        "trace": 1.0,
        "skewness": -0.5,
        "skewness_error": 0.01,
        "minimum": 1.0,
        "minimum_drawn": 2.0,
        "median": 13.7,
        "margins": [1.0, 2.0, 3.0, 4.0],
        "traces": [8.0, 4.0, 2.0, 1.0],
    }
    return small | changes


LARGE = {"train_loss": 4e-5, "test_loss": 0.09, "test_accuracy": 0.979, "trace": 6.0}
LARGE |= {"skewness": -0.3, "minimum": 1.5, "minimum_drawn": 2.5}


def paths(barrier: float) -> dict[str, float]:
    return {"eval": barrier, "batch": barrier + 1}


def test_the_median_of_evenly_many_margins_is_the_mean_of_the_middle_two() -> None:
    """`torch.median` takes the lower of the two."""
    net = nn.Linear(1, 2, bias=False).double()
    nn.init.constant_(net.weight, 0.5)
    net.weight.data[1] = -0.5  # the margin of an input x > 0 of class 0 is x
    pair = torch.tensor([[1.0], [2.0], [4.0], [9.0]], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    history = [{"step": 0, "train_loss": 0.0, "test_loss": 0.0, "test_accuracy": 1.0}]
    (row,) = batch_size.over_time([(0, net)], history, pair, torch.arange(4))
    assert row["median margin"] == pytest.approx(3.0)
    assert batch_size.measure(net, pair, pair, torch.arange(4), 0)["median"] == pytest.approx(3.0)
    assert scaling.measure(net, pair, "last layer", 1.0, 0)["median margin"] == pytest.approx(3.0)


def test_no_median_is_the_lower_of_two() -> None:
    taken = re.compile(r"(?<!np)(?<!statistics)\.median\(")
    for path in sorted(Path(papers.__file__).parent.rglob("*.py")):
        assert not taken.search(path.read_text()), f"{path.name}: results.median takes the mean of the middle two"


def test_rules_of_batch_size() -> None:
    small, large = solution(), solution(**LARGE)
    later = solution(train_loss=2e-5, test_accuracy=0.982, trace=1.2, steps=20_000)
    faster = solution(test_accuracy=0.982, trace=0.5, median=17.3, test_loss=0.09)
    found = {"small": small, "large": large, "longer": later, "faster": faster}
    assert set(verdicts(batch_size.judge(found, paths(0.01), 10)).values()) == {YES}

    worse = solution(**LARGE | {"test_loss": 0.01, "trace": 0.5, "train_loss": 1e-3, "test_accuracy": 0.99})
    worse |= {"skewness": -0.6, "minimum": 0.5, "traces": [4.0, 8.0, 1.0, 2.0], "train_accuracy": 0.995}
    found = {"small": small, "large": worse, "longer": later, "faster": solution(trace=2.0)}
    shown = verdicts(batch_size.judge(found, paths(2.0), 10))
    assert (shown.pop("time"), shown.pop("rate")) == (OPEN, OPEN), "there is no gap to close"
    assert set(shown.values()) == {NO}

    half = solution(trace=5.0, test_accuracy=0.9795)
    found = {"small": small, "large": large, "longer": half, "faster": {"diverged": "training diverged."}}
    shown = verdicts(batch_size.judge(found, paths(0.01), 10))
    assert (shown["time"], shown["rate"], shown["flattest is not best"]) == (NO, OPEN, OPEN)
    unfitted = {"small": solution(train_loss=0.5), "large": large, "longer": later, "faster": later}
    assert set(verdicts(batch_size.judge(unfitted, paths(0.01), 10)).values()) == {OPEN}


def test_more_time_must_reach_the_loss() -> None:
    small, large = solution(), solution(**LARGE)
    slow = solution(train_loss=3e-5, trace=1.1)
    facts = {"undecided": "", "accuracy": 0.98, "chance": 0.1}

    def verdict(statement: Any, later: dict[str, Any], *, same_loss: bool = False) -> Verdict:
        ruling = batch_size.catches_up(statement, small, large, later, facts, same_loss=same_loss)
        return verdicts([ruling])[statement.id]

    assert verdict(batch_size.TIME, slow, same_loss=True) is OPEN
    assert verdict(batch_size.RATE, slow) is YES
    assert verdict(batch_size.RATE, solution(**LARGE)) is NO


# ------------------------------------------------------------------------------------------------------------- scaling


def test_scaling_of_a_layer_agrees_with_dense_hessians() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    pair = inputs, model(inputs).argmax(1)
    found = scaling.measure(model, pair, "last layer", 3.0, seed=0)
    scaled = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    scaled.load_state_dict({k: v * (3.0 if k.startswith("2") else 1.0) for k, v in model.state_dict().items()})
    shapes = {name: p.shape for name, p in scaled.named_parameters()}
    flat = torch.cat([p.detach().reshape(-1) for p in scaled.parameters()])

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(scaled, values, (inputs,)), pair[1])

    dense = torch.autograd.functional.hessian(loss, flat)
    assert torch.allclose(dense, dense.T, atol=1e-12)
    assert found["loss"] == pytest.approx(float(loss(flat)))
    assert found["trace"] == pytest.approx(float(dense.trace()), rel=1e-6)
    assert found["spectral norm"] == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-3)
    error = abs(found["Frobenius norm"] - float(dense.norm()))
    assert error <= 4 * found["Frobenius norm, standard error"] + 1e-9


def test_rules_of_scaling() -> None:
    def table(end: float, *, error: float = 0.0, unmoved: int = 0, wrong: float = 1.0, shift: float = 1.0) -> list[Any]:
        def row(transform: str, points: str, alpha: float, size: float, stretch: float = 1.0) -> dict[str, Any]:
            numbers = dict.fromkeys(("trace", "spectral norm", "Frobenius norm"), size)
            more = {"margins": [alpha * 2.0 * stretch, alpha * 3.0], "outputs' error": error, "layers unmoved": unmoved}
            return {"scaled": transform, "points": points, "α": alpha, **numbers, **more}

        return [
            row(transform, points, alpha, size, stretch)
            for transform, points, last in (
                ("last layer", "correct", end),
                ("all layers", "correct", end),
                ("last layer", "misclassified", wrong),
            )
            for alpha, size, stretch in ((1.0, 1.0, 1.0), (8.0, last, shift))
        ]

    assert set(verdicts(scaling.judge(table(1e-9))).values()) == {YES}
    assert verdicts(scaling.judge(table(1e-9, unmoved=2)))["whole-network"] is NO
    assert set(verdicts(scaling.judge(table(2.0, error=0.1, wrong=0.01, shift=1.1))).values()) == {NO}
    only = [row for row in table(1e-9) if row["points"] == "correct"]
    assert verdicts(scaling.judge(only))["misclassified"] is OPEN


# ---------------------------------------------------------------------------------------------------------------- cost


def test_one_by_one_is_the_package_s_estimate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    inputs, targets = torch.randn(2, 4), torch.randint(0, 3, (2,))
    spread = torch.softmax(model(inputs), 1)
    exact = (inputs.square().sum(1) + 1) * (1 - spread.square().sum(1))
    found = torch.tensor(cost.one_by_one(model, (inputs, targets), seed=0, most=1500, tolerance=0.0))
    assert torch.allclose(found, exact.detach(), rtol=0.1)
    stopped = cost.one_by_one(model, (inputs, targets), seed=0, tolerance=math.inf)
    assert stopped == cost.one_by_one(model, (inputs, targets), seed=0, most=1), "a rule always met stops at once"


def test_rules_of_cost() -> None:
    def table(single: float, batched: float, exact: float) -> dict[str, Any]:
        ratios = {"margins": 1.0, "PyHessian's rule, one by one": single}
        ratios |= {"PyHessian's rule, in batches": batched, "exact traces": exact}
        return {
            way: {"ratio to margins": ratio, "CPU seconds for all points": ratio, "points": 10}
            for way, ratio in ratios.items()
        }

    assert set(verdicts(cost.judge(table(1000, 500, 400))).values()) == {YES}
    assert verdicts(cost.judge(table(5000, 500, 400)))["as-published"] is NO, "too expensive is another result as well"
    assert set(verdicts(cost.judge(table(50, 5, 1))).values()) == {NO}


# ------------------------------------------------------------------------------------------------------------ outliers


def test_first_classes_are_a_subset_of_the_data() -> None:
    targets = torch.arange(60) % 6
    inputs = torch.arange(60.0)[:, None]
    some, labels = outliers.first_classes((inputs, targets), 3, 20, seed=1)
    assert len(labels) == 20
    assert int(labels.max()) == 2
    assert torch.equal(some[:, 0].long() % 6, labels)
    assert len(outliers.first_classes((inputs, targets), 2, 50, seed=1)[1]) == 20


def test_outliers_are_counted_against_the_dense_spectrum(tmp_path: Any) -> None:
    from spiritlevel import data

    config = outliers.Outliers(data="digits", train_size=80, width=0.03, steps=40, factor=2)
    run = Run(tmp_path, cache=tmp_path)
    whole = data.load("digits").train
    found = outliers.measure(config, run, whole, data.load("digits").test, 3)
    pair = outliers.first_classes(whole, 3, 80, 0)
    model = outliers.trained_network(config, run, 3, pair)  # from its folder
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        outputs = torch.func.functional_call(model, values, (pair[0].double(),))
        return nn.functional.cross_entropy(outputs, pair[1])

    dense = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
    assert torch.allclose(torch.as_tensor(found["top"]).double(), dense.flip(0)[:7], rtol=1e-2, atol=1e-3)
    assert found["smallest"] == pytest.approx(float(dense[0]), rel=1e-2, abs=1e-3)


def test_rules_of_outliers() -> None:
    def table(counts: list[int], positive: list[int], loss: float = 0.01, **more: Any) -> list[Any]:
        return [
            {
                "classes": classes,
                "gap": count,
                "mirror": 50,
                "positive (at least)": several,
                "loss": loss,
                "accuracy": 1.0,
                "test accuracy": 0.95,
                "converged": True,
                **more,
            }
            for classes, count, several in zip((2, 4, 6, 8), counts, positive, strict=True)
        ]

    def judged(*arguments: Any, **more: Any) -> dict[str, Verdict]:
        return verdicts(outliers.judge(table(*arguments, **more)))

    assert judged([2, 4, 6, 20], [2, 4, 6, 9]) == {"equal": YES, "one less": NO, "positive": YES}
    assert judged([1, 3, 5, 7], [6, 12, 18, 24]) == {"equal": NO, "one less": YES, "positive": NO}
    for more in ({"loss": 0.2}, {"converged": False}, {"test accuracy": 0.5}, {"test accuracy": None}):
        assert judged([2, 4, 6, 8], [6] * 4, **more)["equal"] is OPEN


def test_points_of_the_chart_keep_seven_digits_of_any_size() -> None:
    numbers = {"trace": 1 / 3, "tiny": 1e-300 / 3, "negative": -2e200 / 3, "zero": 0.0, "infinite": math.inf}
    others = {"step": 2**60 + 1, "none": None, "right": True}
    found = correlation.brief({**numbers, **others})
    assert {name: found.pop(name) for name in others} == others
    assert found == pytest.approx(numbers, rel=2**-24, abs=0)
    assert found["trace"] != 1 / 3
    assert correlation.brief(found) == found
