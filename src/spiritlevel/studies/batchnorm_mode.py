"""Paper C, Fig. 8: the statistics that batch norm uses change the curvature, and the verdict on sharpness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.studies.base import Config, Ruling, Run, Statement, Study, chance_of_points, not_fitted
from spiritlevel.studies.recipes import BATCH, paper_c, spectrum_row

if TYPE_CHECKING:
    from spiritlevel.training import Job, Trained

EVALUATION = Statement(
    "evaluation mode",
    "in evaluation mode the regularised solution is far sharper",
    "λ₁ nearly 1000 times larger (App. C; the printed sentence has the two exchanged)",
    "λ₁(γ > 0)/λ₁(γ = 0) is at least 100",
    "it is above 1",
)
MEAN_SQUARE = Statement(
    "mean square",
    "so is what the paper calls the Frobenius norm, Tr(H²)/P",
    "4.9e-5 against 9.8e-12: 5e6 times larger",
    "the ratio is at least 1e4",
    "it is above 1",
)
TRAINING = Statement(
    "training mode",
    "in training mode the regularised solution is sharper as well",
    "rises (Fig. 5)",
    "λ₁(γ > 0)/λ₁(γ = 0) is at least 1.5",
    "it is above 1",
)
DIFFERENT = Statement(
    "modes differ",
    "the two modes give a somewhat different curvature profile",
    "stated",
    "for both γ the λ₁ of the two modes differ by more than 10 %",
    "for one γ they do",
)
BETTER = Statement(
    "generalises",
    "the regularised solution generalises better",
    "validation 75.2 against 80.6 %",
    "its validation accuracy is higher by at least 2 percentage points",
    "it is higher",
)
MODES = {"batch": "training mode", "eval": "evaluation mode"}


@dataclass(frozen=True, kw_only=True)
class BatchnormMode(Config):
    """The WideResNet of paper C, with and without L2; the same trainings as in `weight-decay`."""

    network: str = "wide_resnet_28_10"
    """One of the built-in networks with batch norm."""
    data: str = "cifar100"
    """The data set."""
    gammas: tuple[float, ...] = (0.0, 5e-4)
    """Two values of γ."""
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
    curvature_points: int | None = None
    """Training points on which curvature is measured, if not all."""
    steps: int = 100
    """Lanczos steps."""
    probes: int = 2
    """Lanczos runs."""


def job(config: BatchnormMode, gamma: float) -> Job:
    """The training of one γ, as `weight-decay` has it."""
    return paper_c(
        config.network,
        config.data,
        lr=config.lr,
        epochs=config.epochs,
        weight_decay=gamma,
        width=config.width,
        train_size=config.train_size,
        validation=config.validation,
        seed=config.seed,
    )


def run(config: BatchnormMode, run: Run) -> Iterator[Ruling]:
    """Two networks, two modes, four spectra."""
    from spiritlevel import charts
    from spiritlevel.results import Spectrum

    rows: list[dict[str, Any]] = []
    for gamma in config.gammas:
        trained = run.train(job(config, gamma))
        last = trained.history[-1]
        for mode, words in MODES.items():
            run.progress(f"γ = {gamma:g}, {words}", len(rows), 4)
            found = run.once(f"{mode}-{gamma:g}", partial(_curvature, config, trained, mode))
            spectrum = Spectrum.from_dict(found.pop("density"))
            training = {
                name: last[name] for name in ("train_accuracy", "train_loss", "validation_accuracy", "weight_norm")
            }
            rows.append({"γ": gamma, "mode": words, **training, **found})
            title = f"γ = {gamma:g}, batch norm in {words}: λ₁ = {found['λ₁']:.3g}"
            run.chart(f"spectrum-{mode}-{gamma:g}", charts.ritz_values(spectrum, title=title))
    run.table("solutions", rows)

    def ratio(mode: str, what: str) -> float:
        first, second = (row[what] for row in rows if row["mode"] == mode)
        return float(second / first)

    worst = min(rows, key=lambda row: row["train_accuracy"])
    undecided = (
        "" if config.scale == "paper" else not_fitted(worst["train_accuracy"], max(r["train_loss"] for r in rows))
    )
    for statement, mode, what, enough in (
        (EVALUATION, MODES["eval"], "λ₁", 100.0),
        (MEAN_SQUARE, MODES["eval"], "Tr(H²)/P", 1e4),
        (TRAINING, MODES["batch"], "λ₁", 1.5),
    ):
        value = ratio(mode, what)
        yield statement.judge(value, reproduced=value >= enough, direction=value > 1, undecided=undecided)
    by_gamma = [[row["λ₁"] for row in rows if row["γ"] == gamma] for gamma in config.gammas]
    differ = [abs(one - two) > 0.1 * max(one, two) for one, two in by_gamma]
    listing = "; ".join(
        f"γ = {g:g}: {b:.3g} training, {e:.3g} evaluation" for g, (b, e) in zip(config.gammas, by_gamma, strict=True)
    )
    yield DIFFERENT.judge(f"{sum(differ)} of 2", reproduced=all(differ), direction=any(differ), remark=f"{listing}.")
    accuracy = [row["validation_accuracy"] for row in rows if row["mode"] == MODES["eval"]]
    gain = 100 * (accuracy[1] - accuracy[0])
    listing = " and ".join(f"{value:.1%}".replace("%", " %") for value in accuracy)
    remark = f"Percentage points: {listing}. {chance_of_points(accuracy, config.validation)}"
    yield BETTER.judge(gain, reproduced=gain >= 2, direction=gain > 0, undecided=undecided, remark=remark)


def _curvature(config: BatchnormMode, trained: Trained, mode: str) -> dict[str, Any]:
    """The spectrum on the training set."""
    return spectrum_row(
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
    },
)
