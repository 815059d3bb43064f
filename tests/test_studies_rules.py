"""The rules for verdicts: each can come out each way, on numbers that must pass and on numbers that must fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spiritlevel.errors import InputError
from spiritlevel.papers.studies import Range, Statement, Verdict, catalogue, combine, decide, find
from spiritlevel.papers.studies.base import Study, reduced
from spiritlevel.papers.studies.rules import SEEDS, least_accuracy

SHARPER = Statement("sharper", "it is sharper", "38 times", "the ratio is above 1", "it is below 1", Range.RISES)
BOTH = Statement("both", "sharper and better", "stated", "both", "one", {"λ₁": Range.RISES, "gap": Range.NEGATIVE})
SAME = Statement("same", "equal", "equal", "below 1e-9", "above", Range(high=1e-9), kind="identity")
EVERY = [(study, statement) for study in catalogue().values() for statement in study.statements]
NAMES = [f"{study.name}: {statement.id}" for study, statement in EVERY]


def seeds(statement: Statement, *numbers: Any, accuracy: float | None = 0.5, **more: Any) -> list[dict[str, Any]]:
    return [statement.judge(number, accuracy=accuracy, chance=0.01, **more).record() for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((1.8, 2.0, 2.2), Verdict.REPRODUCED),
        ((0.5, 0.4, 0.45), Verdict.NOT),
        ((1.1, 2.0, 9.0), Verdict.SIGN),  # all above 1, but too far apart
        ((0.9, 0.5, 0.1), Verdict.SIGN),
        ((8.7 / 18, 47.8 / 13.1, 63 / 25), Verdict.UNDECIDED),  # the sign turns
        ((1.8, 2.0), Verdict.UNDECIDED),
        ((1.8, 2.0, None), Verdict.UNDECIDED),
        ((1.8, 2.0, float("nan")), Verdict.UNDECIDED),
        ((1.8, 2.0, -1.0), Verdict.UNDECIDED),  # no ratio
        ((1.0, 1.0, 1.0), Verdict.UNDECIDED),
    ],
)
def test_an_experiment_is_decided_by_its_seeds(numbers: tuple[float | None, ...], verdict: Verdict) -> None:
    assert decide(SHARPER, seeds(SHARPER, *numbers)).verdict is verdict


def test_the_interval_is_students_t_on_the_scale_of_the_number() -> None:
    part = decide(SHARPER, seeds(SHARPER, 1.8, 2.0, 2.2)).parts[""]
    logs = torch.tensor([1.8, 2.0, 2.2], dtype=torch.float64).log()
    half = 4.302652729749464 * float(logs.std() / math.sqrt(3))
    assert part.mean == pytest.approx(math.exp(float(logs.mean())))
    assert (part.low, part.high) == pytest.approx(
        (math.exp(float(logs.mean()) - half), math.exp(float(logs.mean()) + half))
    )


def test_reasons_not_to_decide() -> None:
    good = (1.8, 2.0, 2.2)
    assert "only 2 of the 3 seeds needed" in decide(SHARPER, seeds(SHARPER, *good[:2])).reason
    poor = decide(SHARPER, seeds(SHARPER, *good, accuracy=0.035))
    assert (poor.verdict, poor.reason) == (
        Verdict.UNDECIDED,
        "held-out accuracy 3.5 %, below 5.0 % (chance is 1.0 %)",
    )
    assert "not kept" in decide(SHARPER, seeds(SHARPER, *good, accuracy=None)).reason
    one = [*seeds(SHARPER, *good[:2]), *seeds(SHARPER, 2.2, undecided="diverged")]
    assert (decide(SHARPER, one).verdict, decide(SHARPER, one).reason) == (Verdict.UNDECIDED, "diverged")


def test_several_numbers_are_judged_together() -> None:
    def verdict(*pairs: tuple[float, float]) -> Verdict:
        return decide(BOTH, seeds(BOTH, *({"λ₁": a, "gap": b} for a, b in pairs))).verdict

    assert verdict((1.8, -2.0), (2.0, -2.1), (2.2, -1.9)) is Verdict.REPRODUCED
    assert verdict((1.8, 2.0), (2.0, 2.1), (2.2, 1.9)) is Verdict.NOT, "sharper but worse"
    assert verdict((0.8, -2.0), (0.7, -2.1), (0.75, -1.9)) is Verdict.NOT, "better but flatter"
    assert verdict((1.8, -0.1), (2.0, -5.0), (2.2, -1.0)) is Verdict.SIGN
    assert verdict((1.8, -1.0), (2.0, 5.0), (2.2, -1.0)) is Verdict.UNDECIDED


def test_an_identity_holds_only_if_it_was_tried_with_every_seed() -> None:
    tried, not_tried = SAME.judge(1e-12).record(), SAME.judge(None, undecided="it could not be tried").record()
    assert decide(SAME, [tried, not_tried])[:2] == (Verdict.UNDECIDED, "it could not be tried")
    assert decide(SAME, [tried, {**not_tried, "undecided": ""}])[:2] == (
        Verdict.UNDECIDED,
        "not every seed has a number",
    )
    assert decide(SAME, [SAME.judge(1.0).record(), not_tried]).verdict is Verdict.NOT, "one that fails is enough"


def test_an_identity_needs_no_seeds() -> None:
    assert decide(SAME, seeds(SAME, 1e-12)).verdict is Verdict.REPRODUCED
    assert decide(SAME, seeds(SAME, 1e-12, 1e-3)).verdict is Verdict.NOT, "one counterexample is enough"
    assert decide(SAME, seeds(SAME, None)).verdict is Verdict.UNDECIDED


def test_a_run_that_holds_several_seeds_gives_a_number_for_each() -> None:
    assert decide(SHARPER, seeds(SHARPER, [1.8, 2.0, 2.2])).verdict is Verdict.REPRODUCED
    found = decide(SHARPER, seeds(SHARPER, [1.8, 2.0]))
    assert (found.verdict, found.seeds, found.reason) == (Verdict.UNDECIDED, 2, "only 2 of the 3 seeds needed")
    assert decide(SHARPER, seeds(SHARPER, [1.8, 2.0], [2.2, 2.1])).seeds == 4
    assert decide(SHARPER, seeds(SHARPER, [1.8, 2.0, None])).verdict is Verdict.UNDECIDED


def inside(range_: Range) -> float:
    low, high = (end if math.isfinite(end) else None for end in (range_.low, range_.high))
    if low is not None and high is not None:
        return math.sqrt(low * high) if range_.ratio else (low + high) / 2
    if range_.ratio:
        return 2 * low if low else high / 2  # type: ignore[operator]
    return low + 1 if low is not None else high - 1  # type: ignore[operator]


def outside(range_: Range) -> list[float]:
    ends = [(range_.low, -1.0, 0.5), (range_.high, 1.0, 2.0)]
    return [end * times if range_.ratio else end + step for end, step, times in ends if math.isfinite(end)]


@pytest.mark.parametrize(("study", "statement"), EVERY, ids=NAMES)
def test_the_rule_of_every_statement_can_pass_and_fail(study: Study, statement: Statement) -> None:
    """With numbers inside all ranges it is reproduced; with one number outside its range, at either end, it fails."""
    assert statement.fails, "a rule says what would make it fail"
    ranges = statement.ranges
    good = {name: inside(range_) for name, range_ in ranges.items()}

    def verdict(numbers: dict[str, float], count: int = SEEDS, accuracy: float = 0.99) -> Verdict:
        ours: Any = numbers.get("", numbers)
        return decide(statement, seeds(statement, *[ours] * count, accuracy=accuracy)).verdict

    assert verdict(good) is Verdict.REPRODUCED
    failing = [(name, number) for name, range_ in ranges.items() for number in outside(range_)]
    assert failing, "a range that holds everything cannot fail"
    for name, number in failing:
        assert verdict({**good, name: number}) is Verdict.NOT
    if statement.kind == "experiment":
        assert verdict(good, count=SEEDS - 1) is Verdict.UNDECIDED
        if statement.trained:
            assert verdict(good, accuracy=0.01) is Verdict.UNDECIDED


def test_kept_runs_are_judged_by_the_rules_of_today() -> None:
    """The runs kept before the rules have one seed, so no experiment of theirs is decided, whatever they once said."""
    import json

    root = Path(__file__).parents[1] / "results"
    seen = 0
    for study in catalogue().values():
        for path in sorted((root / study.name).glob("*/summary.json")):
            summary = json.loads(path.read_text(encoding="utf-8"))
            rows = combine([{**summary, "rulings": study.rulings(summary, path.parent)}], study.statements)
            assert len(rows) > 0
            for row in rows:
                if row["kind"] == "experiment" and "replicas" not in summary["config"]:
                    seen += 1
                    assert row["verdict"] in (Verdict.UNDECIDED, Verdict.SIGN), (path, row["id"])
    assert seen > 50


def test_the_least_accuracy_can_be_reached_with_few_classes() -> None:
    assert [least_accuracy(1 / classes) for classes in (2, 10, 100)] == pytest.approx([0.75, 0.5, 0.05])


def test_a_reduced_run_says_so() -> None:
    for name in ("weight-decay", "optimizers", "batchnorm-mode"):
        study = catalogue()[name]
        for config in study.jobs("small"):
            said = study.reduced(config)
            assert all(word in said for word in ("width", "images", "epochs", "exposure")), said
        assert all(not study.reduced(config) for config in study.jobs("paper"))
    config = catalogue()["weight-decay"].at("small", network="wideresnet")
    assert "pixels pooled 2" in catalogue()["weight-decay"].reduced(config)
    assert reduced(config, config, seed="seed") == ""


def test_matched_strengths_have_the_exposure_of_the_paper() -> None:
    from spiritlevel.papers.studies import weight_decay
    from spiritlevel.papers.studies.recipes import exposure

    full = weight_decay.WeightDecay(network="wideresnet")
    assert exposure(weight_decay.job(full, 5e-4, "standard")) == pytest.approx(37, rel=0.02)
    for network in ("wideresnet", "preresnet", "cnn"):
        config = weight_decay.STUDY.at("small", network=network)
        for name, gamma in weight_decay.strengths(config).items():  # type: ignore[arg-type]
            if name.startswith("exposure of "):
                ours = exposure(weight_decay.job(config, gamma, "standard"))  # type: ignore[arg-type]
                paper = weight_decay.WeightDecay(network=network)
                theirs = exposure(weight_decay.job(paper, float(name.split()[-1]), "standard"))
                assert ours == pytest.approx(theirs, rel=0.005)


def test_the_frobenius_norm_is_never_below_the_largest_eigenvalue(tmp_path: Path) -> None:
    """Against the dense Hessian: λ₁ to its tolerance, the exact trace, Tr H² within its error and above λ₁²."""
    from spiritlevel.papers.studies.recipes import sharpness_row
    from spiritlevel.papers.training import Job, Recipe, train

    job = Job(network="mlp", options={"width": 0.05}, data="digits", train_size=200, recipe=Recipe(lr=0.5, steps=60))
    trained = train(job, cache=tmp_path)
    row = sharpness_row(
        trained, points=None, batch_norm="eval", batch_size=None, probes=2, steps=60, seed=0, exact_trace=True
    )
    model = trained.model().double()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def loss(vector: torch.Tensor) -> torch.Tensor:
        parts = vector.split([shape.numel() for shape in shapes.values()])
        values = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        outputs = torch.func.functional_call(model, values, (trained.train[0].double(),))
        return nn.functional.cross_entropy(outputs, trained.train[1])

    dense = torch.autograd.functional.hessian(loss, flat)
    values = torch.linalg.eigvalsh(dense)
    assert row["λ₁"] == pytest.approx(float(values[-1]), rel=2e-2)
    assert row["trace"] == pytest.approx(float(dense.trace()), rel=1e-4)
    assert row["Frobenius norm"] >= row["λ₁"]
    error = abs(row["Frobenius norm"] - float(dense.norm()))
    assert error <= 4 * row["Frobenius norm stderr"] + 0.02 * float(dense.norm())
    assert row["Tr(H²)/P"] == pytest.approx(row["Frobenius norm"] ** 2 / len(flat))


@pytest.mark.parametrize(
    ("study", "options", "message"),
    [
        ("scaling", {"alphas": (2.0, 4.0)}, r"alphas needs 1 and another, got \(2\.0, 4\.0\)"),
        ("scaling", {"alphas": (1.0,)}, r"alphas needs 1 and another"),
        (
            "weight-decay",
            {"matched": (2e-4,)},
            r"matched takes the paper's values of γ, .*, got \(0\.0002,\)",
        ),
    ],
)
def test_options_that_could_not_be_judged_are_refused_before_anything_is_trained(
    study: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        find(study).config(scale="smoke", seed=0, **options)
