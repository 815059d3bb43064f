"""Paper C, Fig. 8: the statistics that batch norm uses change the curvature, and the verdict on sharpness."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.papers.studies.base import Config, Run, Study, chance_of_points, reduced
from spiritlevel.papers.studies.recipes import BATCH, exposure, paper_c, sharpness_row, spectrum_row, training_row
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained

EVALUATION = Statement(
    "evaluation mode",
    "in evaluation mode the regularised solution is far sharper",
    "λ₁ nearly 1000 times larger (App. C; the printed sentence has the two exchanged)",
    "λ₁(γ > 0)/λ₁(γ = 0) is above 1",
    "it is below 1",
    Range.RISES,
)
MEAN_SQUARE = Statement(
    "mean square",
    "so is what the paper calls the Frobenius norm, Tr(H²)/P",
    "4.9e-5 against 9.8e-12: 5e6 times larger",
    "the ratio is above 1",
    "it is below 1",
    Range.RISES,
)
TRAINING = Statement(
    "training mode",
    "in training mode the regularised solution is sharper as well",
    "rises (Fig. 5)",
    "λ₁(γ > 0)/λ₁(γ = 0) is above 1",
    "it is below 1",
    Range.RISES,
)
DIFFERENT = Statement(
    "modes differ",
    "the two modes give a somewhat different curvature profile",
    "stated",
    "for every γ the λ₁ of the two modes differ by more than 10 %: the smallest |log ratio| is above 0.095",
    "for one γ they differ by less",
    Range(low=math.log(1.1)),
)
BETTER = Statement(
    "generalises",
    "the regularised solution generalises better",
    "validation 75.2 against 80.6 %",
    "its validation accuracy is higher (percentage points)",
    "it is lower",
    Range.POSITIVE,
)
MODES = {"batch": "training mode", "eval": "evaluation mode"}


@dataclass(frozen=True, kw_only=True)
class BatchnormMode(Config):
    """The WideResNet of paper C, with and without L2; the same training runs as in `weight-decay`."""

    network: str = "wide_resnet_28_10"
    """One of the built-in networks with batch norm."""
    data: str = "cifar100"
    """The data set."""
    gammas: tuple[float, ...] = (0.0, 5e-4)
    """Values of γ; the first and the last are compared."""
    matched: tuple[float, ...] = ()
    """Values of the paper's γ; the larger γ that give the same exposure Σαγ/(1−ρ) here are run as well."""
    lr: float = 0.1
    """The first learning rate."""
    epochs: int = 300
    """Training epochs."""
    width: float = 1.0
    """Factor on the network's widths."""
    train_size: int = 45_000
    """Training points."""
    validation: int = 5_000
    """Validation points, split off the training set."""
    pool: int = 1
    """Every pool × pool pixels averaged to one."""
    density: bool = True
    """Whether to compute the whole spectra; otherwise only λ₁, Tr H and Tr H²."""
    curvature_points: int | None = None
    """Training points on which curvature is measured, if not all."""
    steps: int = 100
    """Lanczos steps."""
    probes: int = 2
    """Lanczos runs."""


def job(config: BatchnormMode, gamma: float) -> Job:
    """The training for one γ, as in `weight-decay`."""
    return paper_c(
        config.network,
        config.data,
        lr=config.lr,
        epochs=config.epochs,
        weight_decay=gamma,
        width=config.width,
        train_size=config.train_size,
        validation=config.validation,
        small=config.scale == "small",
        pool=config.pool,
        seed=config.seed,
    )


def strengths(config: BatchnormMode) -> list[float]:
    """Every γ, matched ones to three digits, as in `weight-decay`."""
    ratio = exposure(job(BatchnormMode(), 1.0)) / exposure(job(config, 1.0))
    return sorted({*config.gammas, *(float(f"{gamma * ratio:.3g}") for gamma in config.matched)})


def run(config: BatchnormMode, run: Run) -> None:
    """One network for each γ, and one spectrum for each of the two modes."""
    from spiritlevel import charts
    from spiritlevel.results import SpectralDensity

    rows: list[dict[str, Any]] = []
    gammas = strengths(config)
    for gamma, (mode, words) in itertools.product(gammas, MODES.items()):
        run.progress(f"γ = {gamma:g}, {words}", len(rows), 2 * len(gammas))
        found = run.once(f"solution-{mode}-{gamma:g}", partial(_solution, config, run, gamma, mode))
        density = found.pop("density", None)
        rows.append({"γ": gamma, "mode": words, **found})
        if density is not None:
            title = f"γ = {gamma:g}, batch norm in {words}: λ₁ = {found['λ₁']:.3g}"
            run.chart(f"spectrum-{mode}-{gamma:g}", charts.ritz_values(SpectralDensity.from_dict(density), title=title))
    frame = run.table("solutions", rows)
    title = "λ₁ in both modes of batch norm"
    run.chart("modes", charts.lines(frame, "γ", "λ₁", series="mode", points=True, title=title))


def judge(config: BatchnormMode, table: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The rulings on the table of solutions."""
    rows = [{key.replace("_", " "): value for key, value in row.items()} for row in table]
    gammas = sorted({row["γ"] for row in rows})
    classes = next(listing.classes for listing in describe() if listing.name == config.data)
    facts: dict[str, Any] = {"accuracy": min(row["validation accuracy"] for row in rows), "chance": 1 / classes}

    def of(gamma: float, mode: str, what: str) -> float:
        (found,) = (row[what] for row in rows if row["γ"] == gamma and row["mode"] == MODES[mode])
        return float(found)

    def listing(what: str) -> str:
        return "; ".join(
            f"γ = {g:g}: {of(g, 'batch', what):.3g} training, {of(g, 'eval', what):.3g} evaluation" for g in gammas
        )

    for statement, mode, what in (
        (EVALUATION, "eval", "λ₁"),
        (MEAN_SQUARE, "eval", "Tr(H²)/P"),
        (TRAINING, "batch", "λ₁"),
    ):
        ratio = of(gammas[-1], mode, what) / of(gammas[0], mode, what)
        yield statement.judge(ratio, remark=f"{listing(what)}.", **facts)
    apart = min(abs(math.log(of(g, "batch", "λ₁") / of(g, "eval", "λ₁"))) for g in gammas)
    yield DIFFERENT.judge(apart, **facts)
    accuracy = [of(gamma, "eval", "validation accuracy") for gamma in gammas]
    said = " and ".join(f"{value:.1%}".replace("%", " %") for value in accuracy)
    noise = chance_of_points(accuracy, config.validation)
    yield BETTER.judge(100 * (accuracy[-1] - accuracy[0]), remark=f"{said}. {noise}", **facts)


def reduced_by(config: BatchnormMode) -> str:
    """How the config falls short of the paper, with the exposure to decay."""
    words = {
        "width": "width",
        "train_size": "images",
        "epochs": "epochs",
        "pool": "pixels pooled",
        "network": "network",
    }
    said = reduced(BatchnormMode(), config, **words)
    if not said:
        return ""
    ours = ", ".join(f"{exposure(job(config, gamma)):.2g}" for gamma in strengths(config))
    return f"{said}, exposure {ours} (paper up to {exposure(job(BatchnormMode(), 5e-4)):.2g})"


def _solution(config: BatchnormMode, run: Run, gamma: float, mode: str) -> dict[str, Any]:
    """Training and curvature of one γ in one mode: all that is kept."""
    trained = run.train(job(config, gamma))
    run.progress(f"curvature of {trained.job.network} on {trained.job.data}", 0, 0)
    return {**training_row(trained), **_curvature(config, trained, mode)}


def _curvature(config: BatchnormMode, trained: Trained, mode: str) -> dict[str, Any]:
    """The spectrum on the training set."""
    measure = spectrum_row if config.density else sharpness_row
    return measure(
        trained,
        points=config.curvature_points,
        batch_norm=mode,
        batch_size=BATCH,
        probes=config.probes,
        steps=config.steps,
        seed=config.seed,
    )


STUDY = Study(
    name="batchnorm-mode",
    title="Batch norm's mode changes the curvature",
    source="C, Fig. 8",
    config=BatchnormMode,
    statements=(EVALUATION, MEAN_SQUARE, TRAINING, DIFFERENT, BETTER),
    run=run,
    judge=lambda config, tables: judge(config, tables("solutions")),
    reduced=reduced_by,
    wanted={"Fig. 8": {"scale": ("small", "paper")}},
    scales={
        "smoke": {
            "network": "fcn_bn",
            "data": "digits",
            "epochs": 1,
            "width": 0.1,
            "train_size": 256,
            "validation": 100,
            "steps": 8,
        },
        "laptop": {"width": 0.05, "train_size": 256, "validation": 1000, "steps": 20},  # as in `weight-decay`
        "small": {
            "width": 0.1,
            "epochs": 60,
            "train_size": 10_000,
            "pool": 2,
            "gammas": (0.0,),
            "matched": (5e-4,),
            "density": False,
            "curvature_points": 1280,
            "steps": 48,
            "probes": 8,
        },
    },
)
