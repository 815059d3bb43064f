"""Paper A, Section 6: how many eigenvalues of the Hessian stand outside its bulk, against the number of classes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from spiritlevel import storage
from spiritlevel.errors import InputError
from spiritlevel.papers.studies.base import Config, Run, Study, not_fitted, reduced
from spiritlevel.papers.studies.rules import Range, Ruling, Statement, least_accuracy

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.papers.training import Pair

_COUNT = "the median over the numbers of classes C of (eigenvalues before the largest ratio of neighbours) − "
EQUAL = Statement(
    "equal",
    "at the end of training as many eigenvalues stand outside the bulk as there are classes",
    "as many as classes (Section 6, after Sagun et al.; 'positive' can only mean outside the bulk)",
    f"{_COUNT}C lies within 0.5 of 0",
    "it lies beyond",
    Range(-0.5, 0.5),
)
ONE_LESS = Statement(
    "one less",
    "not in the paper: one eigenvalue less than there are classes stands outside the bulk",
    "– (C logits have C − 1 differences)",
    f"{_COUNT}(C − 1) lies within 0.5 of 0",
    "it lies beyond",
    Range(-0.5, 0.5),
)
POSITIVE = Statement(
    "positive",
    "taken literally: as many positive eigenvalues as there are classes",
    "as many as classes (Section 6)",
    "the median over C of (eigenvalues above 1e-6 of the largest one) − C lies within 0.5 of 0",
    "it lies beyond",
    Range(-0.5, 0.5),
)
RULES = {"gap": "largest ratio of neighbours", "mirror": "above the mirrored smallest"}


@dataclass(frozen=True, kw_only=True)
class Outliers(Config):
    """A dense network trained on the first classes of a data set."""

    data: str = "mnist"
    """The data set."""
    classes: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10)
    """Numbers of classes, counted from the first of the data set."""
    train_size: int = 5_000
    """Training points of each network, fewer if the classes do not have that many."""
    width: float = 1.0
    """Factor on the 100 units of the hidden layer."""
    steps: int = 5_000
    """Updates by plain SGD, lr 0.1, batches of 128."""
    factor: int = 3
    """Eigenvalues computed at the upper end, in units of the number of classes."""


def first_classes(pair: Pair, classes: int, most: int, seed: int) -> Pair:
    """At most `most` random points of the first classes."""
    import torch

    inputs, targets = pair
    chosen = (targets < classes).nonzero()[:, 0]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    chosen = chosen[order[:most]]
    return inputs[chosen], targets[chosen]


def trained_network(config: Outliers, run: Run, classes: int, pair: Pair) -> nn.Module:
    """The network for one number of classes, kept beside the other trained ones."""
    import torch

    from spiritlevel.binding.state import preserved_random_state
    from spiritlevel.papers import networks as models
    from spiritlevel.papers.training import Recipe, fit

    with preserved_random_state():
        torch.manual_seed(config.seed)
        model = models.mlp(inputs=pair[0][0].numel(), classes=classes, width=config.width)
    recipe = Recipe(lr=0.1, batch_size=128, steps=config.steps)
    key = storage.digest({"config": storage.plain(config) | {"scale": ""}, "classes": classes}, 12)
    fit(
        model,
        pair,
        recipe,
        seed=config.seed,
        evaluate_every=max(1, config.steps),
        checkpoint=(run.cache or storage.cache_folder() / "networks") / f"mlp-{config.data}-{classes}-classes-{key}",
        progress=run.progress,
        label=f"{classes} classes",
    )
    return model


def measure(config: Outliers, run: Run, whole: Pair, test: Pair, classes: int) -> dict[str, Any]:
    """Fit, upper eigenvalues and the smallest one of the Hessian over the training points."""
    from spiritlevel.estimators import eigenvalues
    from spiritlevel.operators.matrices import hessian
    from spiritlevel.papers.training import evaluate

    pair = first_classes(whole, classes, config.train_size, config.seed)
    model = trained_network(config, run, classes, pair)
    run.progress(f"eigenvalues for {classes} classes", 0, 0)
    op = hessian(model, pair)
    top = eigenvalues(op, config.factor * classes + 1, tol=1e-3, vectors=False, seed=config.seed)
    bottom = eigenvalues(op, 1, which="smallest", tol=1e-3, vectors=False, seed=config.seed)
    return {
        **evaluate(model, pair),
        "test accuracy": evaluate(model, first_classes(test, classes, len(test[1]), config.seed))["accuracy"],
        "points": len(pair[1]),
        "top": top.values,
        "smallest": float(bottom.values[0]),
        "converged": top.converged and bottom.converged,
        "parameters": op.size,
    }


def count(top: Sequence[float], smallest: float, rule: str) -> int:
    """How many of the eigenvalues, sorted from the largest, stand outside the bulk.

    "gap": those before the largest ratio of neighbours. "mirror": those above |smallest|, if the bulk is taken to be
    symmetric around zero; all of them if the edge was not reached.

    >>> count([9.0, 8.0, 7.0, 0.5, 0.4], -0.45, "gap"), count([9.0, 8.0, 7.0, 0.5, 0.4], -0.45, "mirror")
    (3, 4)
    """
    if rule == "mirror":
        return sum(value > abs(smallest) for value in top)
    ratios = [a / b if b > 0 else math.inf for a, b in pairwise(top)]
    return 1 + max(range(len(ratios)), key=ratios.__getitem__)


def run(config: Outliers, run: Run) -> None:
    """Train a network for each number of classes and count."""
    from spiritlevel import charts, data

    loaded = data.load(config.data)
    if max(config.classes) > len(loaded.classes) or min(config.classes) < 2:
        raise InputError(
            f"outliers takes 2 to {len(loaded.classes)} classes of {config.data}, got classes={config.classes}."
        )
    rows: list[dict[str, Any]] = []
    spectra: list[dict[str, Any]] = []
    for number, classes in enumerate(config.classes):
        run.progress(f"{classes} classes", number, len(config.classes))
        found = run.once(f"{classes}-classes", partial(measure, config, run, loaded.train, loaded.test, classes))
        spectra += [{"classes": classes, "rank": k + 1, "eigenvalue": value} for k, value in enumerate(found["top"])]
        own = {key: value for key, value in found.items() if key != "top"}
        counts = {rule: count(found["top"], found["smallest"], rule) for rule in RULES}
        positive = sum(value > 1e-6 * found["top"][0] for value in found["top"])
        rows.append({"classes": classes, **counts, "positive (at least)": positive, **own})
    run.table("outliers", rows)
    run.table("eigenvalues", spectra)
    counted = [(row["classes"], row[rule], text) for rule, text in RULES.items() for row in rows]
    counted += [(row["classes"], row["classes"], "as many as classes") for row in rows]
    columns = {
        "classes": [line[0] for line in counted],
        "eigenvalues outside the bulk": [line[1] for line in counted],
        "edge of the bulk": [line[2] for line in counted],
    }
    against = charts.lines(
        columns,
        "classes",
        "eigenvalues outside the bulk",
        series="edge of the bulk",
        points=True,
        title="Eigenvalues outside the bulk",
    )
    listed = {key: [line[key] for line in spectra] for key in ("classes", "rank", "eigenvalue")}
    tops = charts.lines(
        listed, "rank", "eigenvalue", series="classes", log_y=True, points=True, title="The largest eigenvalues"
    )
    run.chart("outliers", charts.panels([[against], [tops]], width=480, height=260))


def judge(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The rulings, from the counts of every number of classes."""
    worst = max(rows, key=lambda row: row["loss"])
    undecided = not_fitted(min(row["accuracy"] for row in rows), worst["loss"])
    if not all(row["converged"] for row in rows):
        undecided = undecided or "not all eigenvalues converged"
    facts: dict[str, Any] = {"undecided": undecided}
    if all(row.get("test accuracy") is not None for row in rows):
        poorest = min(rows, key=lambda row: row["test accuracy"] / least_accuracy(1 / row["classes"]))
        facts |= {"accuracy": poorest["test accuracy"], "chance": 1 / poorest["classes"]}
    texts = []
    for rule, text in RULES.items():
        counts = ", ".join(f"{row[rule]} for {row['classes']} classes" for row in rows)
        texts.append(f"{text}: {counts}")
    above = statistics.median(row["gap"] - row["classes"] for row in rows)
    yield EQUAL.judge(above, remark=f"{'; '.join(texts)}.", **facts)
    yield ONE_LESS.judge(above + 1, **facts)
    positive = "positive (at least)"
    counts = ", ".join(f"{row[positive]} for {row['classes']} classes" for row in rows)
    above = statistics.median(row[positive] - row["classes"] for row in rows)
    yield POSITIVE.judge(above, remark=f"At least {counts}.", **facts)


STUDY = Study(
    name="outliers",
    title="Eigenvalues outside the bulk against the number of classes",
    source="A, Section 6",
    config=Outliers,
    statements=(EQUAL, ONE_LESS, POSITIVE),
    run=run,
    judge=lambda config, tables: judge(tables("outliers")),
    reduced=lambda config: reduced(Outliers(), config, width="width", train_size="images", steps="steps"),
    wanted={"MNIST, seven numbers of classes": {"data": "mnist"}},
    scales={
        "smoke": {
            "data": "digits",
            "classes": (2, 3),
            "train_size": 100,
            "width": 0.05,
            "steps": 60,
            "factor": 2,
        },
        "laptop": {"train_size": 2_000, "width": 0.5, "steps": 3_000},
    },
    revision=2,
)
