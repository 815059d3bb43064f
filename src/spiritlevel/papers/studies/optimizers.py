"""Paper C, Fig. 6–7: Adam with decoupled decay and averaging is sharper, better and of higher norm than SGD."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from spiritlevel.data import describe
from spiritlevel.papers.studies.base import Config, Run, Study, chance_of_points, reduced
from spiritlevel.papers.studies.recipes import BATCH, exposure, paper_c, sharpness_row, spectrum_row, training_row
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained


class Method(NamedTuple):
    """An optimiser of the comparison; its decay depends on the data set."""

    adam: bool
    averaged: bool


METHODS = {
    "SGD": Method(adam=False, averaged=False),
    "Adam, averaged": Method(adam=True, averaged=True),
    "Adam": Method(adam=True, averaged=False),
    "SGD, averaged": Method(adam=False, averaged=True),
}
SGD, ADAM = "SGD", "Adam, averaged"  # the paper's two; the other two show which part is responsible
DECAY = {"cifar10": {False: 3e-4, True: 0.35}, "cifar100": {False: 5e-4, True: 0.25}}

TOGETHER = Statement(
    "sharper and better",
    "the Adam solution is sharper than the SGD solution and generalises better",
    "sharper by any measure, and better (Fig. 6, 7)",
    "Adam, averaged / SGD: λ₁ and Tr(H²)/P are larger, and its gap between training and validation accuracy is smaller",
    "λ₁ or Tr(H²)/P is smaller, or the gap larger",
    {"λ₁": Range.RISES, "Tr(H²)/P": Range.RISES, "gap": Range.NEGATIVE},
)
SHARPER = Statement(
    "sharper",
    "the Adam solution is sharper than the SGD solution",
    "CIFAR-100: λ₁ 387.8 against 10.11, 38 times",
    "the ratio of λ₁ is above 1",
    "it is below 1",
    Range.RISES,
)
BETTER = Statement(
    "better",
    "the validation accuracy of the Adam solution is higher",
    "validation 75.8 against 73.5 % (CIFAR-100), 95.1 against 94.3 % (CIFAR-10)",
    "its validation accuracy is higher (percentage points)",
    "it is lower",
    Range.POSITIVE,
)
HEAVIER = Statement(
    "higher norm",
    "and has a higher weight norm",
    "higher (Fig. 6c, 7c)",
    "the ratio of weight norms is above 1",
    "it is below 1",
    Range.RISES,
)
FROBENIUS = Statement(
    "mean square",
    "so is what the paper calls the Frobenius norm, Tr(H²)/P",
    "CIFAR-100: 0.02 against 1e-4; CIFAR-10: 1.55e-3 against 1.43e-5",
    "the ratio is above 1",
    "it is below 1",
    Range.RISES,
)
ENDS = Statement(
    "ends of the spectra",
    "the largest and smallest eigenvalues",
    "CIFAR-100: SGD 10.11 / −1.43, Adam 387.8 / −62.2",
    "each of ours is within a factor of two: the largest |log ratio| is below 0.69",
    "one is further off, or has the other sign",
    Range(high=math.log(2)),
)
FITTED = Statement(
    "training",
    "both fit the training set equally well",
    "training accuracy 99.81 (Adam) and 99.64 % (SGD)",
    "they differ by less than 1 percentage point",
    "they differ by more",
    Range(high=1.0),
)
PILOT_SEED = 1000  # of the runs that choose a learning rate: no run that is judged has it
PAPER_ENDS = {SGD: (10.11, -1.43), ADAM: (387.8, -62.2)}


@dataclass(frozen=True, kw_only=True)
class Optimizers(Config):
    """VGG-16 with batch norm by four optimisers."""

    network: str = "vgg16_bn"
    """One of the built-in networks with batch norm."""
    data: str = "cifar100"
    """cifar100 or cifar10 for the paper's decays."""
    epochs: int = 300
    """Training epochs."""
    average_from: float = 0.54
    """Averaging starts after this share of the epochs; the paper does not print it."""
    sgd_lr: float = 0.1
    """SGD's first learning rate."""
    adam_lr: float = 5e-4
    """Adam's first learning rate."""
    matched: bool = False
    """Strengthen decay by the factor by which training is shorter, so that its exposure is the paper's."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which of the four methods are run."""
    width: float = 1.0
    """Factor on the network's widths."""
    train_size: int = 45_000
    """Training points."""
    validation: int = 5_000
    """Validation points, split off the training set."""
    curvature_points: int | None = None
    """Training points on which curvature is measured, if not all."""
    steps: int = 100
    """Lanczos steps."""
    probes: int = 2
    """Lanczos runs."""
    density: bool = True
    """Whether to compute the whole spectrum; otherwise only λ₁, Tr H and Tr H²."""
    grid: bool = False
    """Choose each learning rate from App. A.1's grid by validation accuracy."""
    pilot_epochs: int | None = None
    """Choose it by runs of this length with their own seed; methods with averaging take the rate of those without."""


def job(config: Optimizers, name: str, lr: float | None = None, gamma: float | None = None) -> Job:
    """The training by one optimiser; `gamma` is its decay if not the config's."""
    method = METHODS[name]
    return paper_c(
        config.network,
        config.data,
        lr=lr or (config.adam_lr if method.adam else config.sgd_lr),
        epochs=config.epochs,
        weight_decay=decay(config, adam=method.adam) if gamma is None else gamma,
        adam=method.adam,
        average_from=max(1, round(config.average_from * config.epochs)) if method.averaged else None,
        width=config.width,
        train_size=config.train_size,
        validation=config.validation,
        small=config.scale == "small",
        seed=config.seed,
    )


def decay(config: Optimizers, *, adam: bool) -> float:
    """The paper's decay, or the one that matches it in exposure, to three digits."""
    printed = DECAY.get(config.data, DECAY["cifar100"])[adam]
    if not config.matched:
        return printed
    steps, paper = (-(-size // BATCH) * epochs for size, epochs in ((config.train_size, config.epochs), (45_000, 300)))
    return float(f"{printed * paper / steps:.3g}")


def run(config: Optimizers, run: Run) -> None:
    """One training run and one spectrum for each method, and the curves of test error and weight norm."""
    from spiritlevel import charts
    from spiritlevel.results import SpectralDensity

    rows: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for name in config.methods:
        run.progress(name, len(rows), len(config.methods))
        lr = _chosen_rate(config, run, name) if config.grid else None
        found = run.once(f"solution-{name}", partial(_solution, config, run, name, lr))
        density, history = found.pop("density", None), found.pop("history")
        rows.append({"optimiser": name, **found})
        curves += [{"optimiser": name, **row} for row in history]
        stem = name.lower().replace(", ", "-")
        if density is not None:
            title = f"{name}: validation {found['validation accuracy']:.1%}, λ₁ = {found['λ₁']:.3g}"
            run.chart(f"spectrum-{stem}", charts.ritz_values(SpectralDensity.from_dict(density), title=title))
    run.table("solutions", rows)
    frame = run.table("curves", curves)
    for what in ("test error", "weight norm"):
        run.chart(
            what.replace(" ", "-"),
            charts.lines(frame, "epoch", what, series="optimiser", title=f"{what.capitalize()} while training"),
        )


def judge(config: Optimizers, table: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The rulings on the table of solutions."""
    rows = {row["optimiser"]: {_words(key): value for key, value in row.items()} for row in table}
    for row in rows.values():
        row.setdefault("gap", row["train accuracy"] - row["validation accuracy"])
    sgd, adam = rows[SGD], rows[ADAM]
    classes = next(listing.classes for listing in describe() if listing.name == config.data)
    facts: dict[str, Any] = {"accuracy": min(row["validation accuracy"] for row in (sgd, adam)), "chance": 1 / classes}

    def others(what: str) -> str:
        return " ".join(f"{name}: {row[what]:.4g}." for name, row in rows.items())

    ratios = {what: adam[what] / sgd[what] for what in ("λ₁", "Tr(H²)/P", "weight norm")}
    gap = 100 * (adam["gap"] - sgd["gap"])
    numbers = {"λ₁": ratios["λ₁"], "Tr(H²)/P": ratios["Tr(H²)/P"], "gap": gap}
    said = f"Gap in points. Training accuracy: {others('train accuracy')}"
    if all("exposure" in row for row in rows.values()):
        said += f" Learning rate: {others('lr')} Exposure with it: {others('exposure')}"
    if adam["validation accuracy"] < sgd["validation accuracy"]:
        said += " Its validation accuracy is lower: it generalises better by the gap alone."
    yield TOGETHER.judge(numbers, remark=said, **facts)
    for statement, what in ((SHARPER, "λ₁"), (HEAVIER, "weight norm"), (FROBENIUS, "Tr(H²)/P")):
        yield statement.judge(ratios[what], remark=others(what), **facts)
    gain = 100 * (adam["validation accuracy"] - sgd["validation accuracy"])
    noise = chance_of_points([row["validation accuracy"] for row in rows.values()], config.validation)
    yield BETTER.judge(gain, remark=f"{others('validation accuracy')} {noise}", **facts)
    ends = [
        (rows[name].get(end), paper)
        for name, pair in PAPER_ENDS.items()
        for end, paper in zip(("λ₁", "λ_min"), pair, strict=True)
    ]
    full = config.data == "cifar100" and not reduced_by(config)
    off = [abs(math.log(ours / paper)) if ours and ours * paper > 0 else math.inf for ours, paper in ends]
    listing = ", ".join("–" if ours is None else f"{ours:.3g}" for ours, _ in ends)
    yield ENDS.judge(
        min(max(off), 99.0),
        undecided="" if full else "not the paper's network and data",
        remark=f"{listing}: SGD's two, then Adam's.",
        **facts,
    )
    apart = 100 * abs(adam["train accuracy"] - sgd["train accuracy"])
    yield FITTED.judge(apart, remark=f"Training accuracy: {others('train accuracy')}", **facts)


def _words(key: str) -> str:
    """A column's name; runs kept earlier had underscores in the columns of their history."""
    return key.replace("_", " ") if key.startswith(("train_", "validation_", "test_")) else key


def reduced_by(config: Optimizers) -> str:
    """How the config falls short of the paper, with the exposure to decay."""
    words = {"width": "width", "train_size": "images", "epochs": "epochs", "network": "network"}
    said = reduced(Optimizers(), config, **words)
    if not said:
        return ""
    pairs = [
        (name, exposure(job(config, name)), exposure(job(Optimizers(data=config.data), name))) for name in (SGD, ADAM)
    ]
    return f"{said}, exposure " + ", ".join(f"{name} {ours:.2g} (paper {full:.2g})" for name, ours, full in pairs)


def _solution(config: Optimizers, run: Run, name: str, lr: float | None) -> dict[str, Any]:
    """Training and curvature for one method: all that is kept of its network."""
    trained = run.train(job(config, name, lr))
    run.progress(f"curvature of {trained.job.network} on {trained.job.data}", 0, 0)
    history = [
        {"epoch": row["epoch"], "test error": 1 - row["test_accuracy"], "weight norm": row["weight_norm"]}
        for row in trained.history
    ]
    facts = {**training_row(trained), "lr": trained.job.recipe.lr, "decay": trained.job.recipe.weight_decay}
    return {**facts, **_curvature(config, trained), "history": history}


def _curvature(config: Optimizers, trained: Trained) -> dict[str, Any]:
    """The spectrum on the training set, in batch norm's training mode, as in the paper's figures."""
    measure = spectrum_row if config.density else sharpness_row
    return measure(
        trained,
        points=config.curvature_points,
        batch_norm="batch",
        batch_size=BATCH,
        probes=config.probes,
        steps=config.steps,
        seed=config.seed,
    )


def _chosen_rate(config: Optimizers, run: Run, name: str) -> float:
    """The learning rate of App. A.1's grid with the best validation accuracy."""
    adam = METHODS[name].adam
    grid = (1e-4, 3e-4, 1e-3) if adam else (0.01, 0.03, 0.1)  # 3e-4: the printed 3e-3 is out of order
    tried, gamma = config, decay(config, adam=adam)
    if config.pilot_epochs is not None:
        tried = replace(config, epochs=config.pilot_epochs, seed=PILOT_SEED)
        name = "Adam" if adam else SGD

    def score(lr: float) -> float:
        trial = job(tried, name, lr, gamma)
        if tried is not config:  # nobody looks at its history: one evaluation, at the end
            trial = replace(trial, evaluate=("validation",), evaluate_every=10**9)
        return float(run.train(trial).history[-1]["validation_accuracy"])

    def scores() -> dict[str, float]:
        return {f"{lr:g}": score(lr) for lr in grid}

    found: dict[str, float] = run.once(f"grid-{name}", scores)
    run.report(**{f"grid of {name}": found})
    return float(max(found, key=found.__getitem__))


STUDY = Study(
    name="optimizers",
    title="Adam with averaging against SGD: sharper, better, and of higher norm",
    source="C, Fig. 6–7",
    config=Optimizers,
    statements=(TOGETHER, SHARPER, HEAVIER, FROBENIUS, BETTER, ENDS, FITTED),
    run=run,
    judge=lambda config, tables: judge(config, tables("solutions")),
    reduced=reduced_by,
    wanted={
        "Fig. 6 (CIFAR-100)": {"data": "cifar100", "scale": ("small", "paper")},
        "Fig. 7 (CIFAR-10)": {"data": "cifar10", "scale": ("small", "paper")},
        "the grid of learning rates of App. A.1": {"grid": True},
    },
    scales={
        "smoke": {
            "network": "fcn_bn",
            "data": "digits",
            "epochs": 3,
            "width": 0.1,
            "train_size": 256,
            "validation": 100,
            "steps": 6,
        },
        "laptop": {"epochs": 600, "width": 0.25, "train_size": 256, "validation": 1000, "steps": 40},
        "small": {
            "epochs": 60,
            "width": 0.25,
            "train_size": 10_000,
            "matched": True,
            "density": False,
            "curvature_points": 1280,
            "steps": 48,
            "probes": 8,
            "grid": True,
            "pilot_epochs": 15,
        },
    },
    # 100 classes are not learnt under the paper's exposure to decay in so few steps: docs/results.md has the pilot
    adapted={"small": {"data": {"cifar100": {"methods": (SGD, ADAM), "matched": False}}}},
    sweep={"data": ("cifar100", "cifar10")},
    only={"small": {"data": ("cifar10", "cifar100")}},
)
