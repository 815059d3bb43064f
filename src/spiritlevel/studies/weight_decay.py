"""Paper C, Fig. 1–5: L2 regularisation makes solutions sharper, and they generalise better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from spiritlevel.errors import InputError, unknown_name
from spiritlevel.studies.base import FITTED, Config, Ruling, Run, Statement, Study, chance_of_points, not_fitted
from spiritlevel.studies.recipes import BATCH, LAST_RATE, MOMENTUM, paper_c, spectrum_row

if TYPE_CHECKING:
    from spiritlevel.training import Job, Trained


class Network(NamedTuple):
    """A network of paper C, its recipe, and the numbers that the paper prints for γ = 0, 1e-4, 5e-4."""

    builder: str
    data: str
    lr: float
    epochs: int
    figure: str
    batch_norm: str = "eval"
    augment: bool = False
    fitted: tuple[float, float] | None = FITTED
    """The least training accuracy and the largest loss that count as fitted; None: any, for there is one minimum."""
    pixels: tuple[str, ...] = ("unit",)
    spectral_norm: tuple[float, ...] = ()
    validation: tuple[float, ...] = ()
    gap: tuple[float, ...] = ()


NETWORKS = {
    "softmax": Network(
        "softmax_regression",
        "mnist",
        0.01,
        1000,
        "Fig. 1",
        fitted=None,  # convex
        pixels=("unit", "standard"),
        spectral_norm=(12.26, 14.17, 15.84),
        validation=(93.48, 94.0, 94.08),
    ),
    "mlp": Network("mlp", "mnist", 0.01, 50, "Fig. 2", validation=(94.4, 96.46, 96.7), gap=(0.48, 0.51, 0.04)),
    "cnn": Network(
        "all_cnn_c",
        "cifar100",
        0.01,
        300,
        "Fig. 3",
        augment=True,
        fitted=(0.86, math.inf),  # the paper's own stopped at 86 to 88 %
        pixels=("standard",),
        validation=(53.9, 55.4, 54.9),
        gap=(32.4, 32.5, 31.1),
    ),
    "preresnet": Network(
        "preresnet164",
        "cifar100",
        0.1,
        300,
        "Fig. 4",
        batch_norm="batch",
        augment=True,
        pixels=("standard",),
        validation=(72.78, 75.56, 76.76),
        gap=(27.21, 24.43, 23.11),
    ),
    "wideresnet": Network(
        "wide_resnet_28_10",
        "cifar100",
        0.1,
        300,
        "Fig. 5",
        batch_norm="batch",
        augment=True,
        pixels=("standard",),
        validation=(75.2, 79.5, 80.6),
        gap=(24.78, 20.48, 19.38),
    ),
}


def _monotone(name: str, text: str, paper: str, what: str, way: str) -> Statement:
    return Statement(
        name, text, paper, f"{what} {way} from every γ to the next", f"{what} {way} from the first γ to the last"
    )


SHARPER = _monotone("λ₁ rises", "the spectral norm rises with γ", "rises (Fig. 1–5)", "λ₁", "rises")
TRACE = _monotone("trace rises", "the trace rises with γ", "App. C, without numbers", "Tr H", "rises")
FROBENIUS = _monotone("‖H‖_F rises", "the Frobenius norm rises with γ", "App. C, without numbers", "‖H‖_F", "rises")
BETTER = _monotone("validation rises", "validation accuracy rises with γ", "rises", "validation accuracy", "rises")
GAP = _monotone(
    "gap falls", "the generalisation gap falls with γ", "falls (smallest at the largest γ)", "the gap", "falls"
)
NORM = _monotone("weights shrink", "L2 reduces the norm of the weights", "presumed", "‖w‖", "falls")
VALUES = Statement(
    "values of λ₁",
    "the spectral norms that the paper prints",
    "softmax: 12.26, 14.17, 15.84; none printed for the others",
    "each of ours is within 10 % of the paper's",
    "each is within a factor of two",
)
ACCURACY = Statement(
    "accuracies",
    "the validation accuracies that the paper prints",
    "softmax 93.48, 94, 94.08; MLP 94.4, 96.46, 96.7; PreResNet 72.78, 75.56, 76.76; WideResNet 75.2, 79.5, 80.6",
    "each of ours is within one percentage point",
    "each is within five",
)
STABLE = Statement(
    "stability",
    "a minimum that momentum SGD stays at has λ₁ ≤ 2(1+ρ)/α",
    "printed for plain gradient descent: 2/α; the ResNets' exceed 20",
    "λ₁ lies below 2(1+ρ)/α at the last learning rate for every γ",
)
TIGHT = Statement(
    "not tight",
    "at the last learning rate the bound is not tight",
    "2000 is certainly not tight",
    "λ₁ is below a tenth of 2/α at the last learning rate for every γ",
    "below a half",
)
STATEMENTS = (SHARPER, BETTER, GAP, NORM, TRACE, FROBENIUS, VALUES, ACCURACY, STABLE, TIGHT)


@dataclass(frozen=True, kw_only=True)
class WeightDecay(Config):
    """A network of paper C and the strengths of its L2 regularisation."""

    network: str = "softmax"
    """softmax, mlp, cnn, preresnet or wideresnet."""
    data: str | None = None
    """Another data set than the paper's."""
    gammas: tuple[float, ...] = (0.0, 1e-4, 5e-4)
    """Values of γ, PyTorch's weight_decay."""
    epochs: int | None = None
    """Training epochs, if not the paper's."""
    lr: float | None = None
    """The first learning rate, if not the paper's."""
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
    probes: int = 4
    """Lanczos runs, each from a random vector."""
    grid: bool = False
    """Choose the first learning rate from 0.01, 0.03, 0.1 by validation accuracy at γ = 1e-4 (App. A.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in NETWORKS:
            raise unknown_name("network", self.network, NETWORKS)
        if len(self.gammas) < 2 or list(self.gammas) != sorted(set(self.gammas)):
            raise InputError(f"weight-decay needs at least two rising values of γ, got {self.gammas}.")


def job(config: WeightDecay, gamma: float, pixels: str, lr: float | None = None) -> Job:
    """The training of one γ."""
    network = NETWORKS[config.network]
    return paper_c(
        network.builder,
        config.data or network.data,
        lr=lr or config.lr or network.lr,
        epochs=config.epochs or network.epochs,
        weight_decay=gamma,
        width=config.width,
        train_size=config.train_size,
        validation=config.validation,
        pixels=pixels,
        augment=network.augment,
        seed=config.seed,
    )


def run(config: WeightDecay, run: Run) -> Iterator[Ruling]:
    """Train every γ, take the spectra, compare."""
    from spiritlevel import charts
    from spiritlevel.results import Spectrum

    network = NETWORKS[config.network]
    lr = _chosen_rate(config, run) if config.grid else None
    rows: list[dict[str, Any]] = []
    for pixels, gamma in itertools.product(network.pixels, config.gammas):
        label = f"γ = {gamma:g}" + (f", {pixels} pixels" if len(network.pixels) > 1 else "")
        run.progress(f"{config.network}, {label}", len(rows), len(config.gammas) * len(network.pixels))
        trained = run.train(job(config, gamma, pixels, lr))
        found = run.once(f"curvature-{pixels}-{gamma:g}", partial(_curvature, config, trained))
        spectrum = Spectrum.from_dict(found.pop("density"))
        rows.append({"γ": gamma, "pixels": pixels, **_training(trained), **found})
        title = f"{config.network}, {label}: validation {rows[-1]['validation accuracy']:.1%}, λ₁ = {found['λ₁']:.3g}"
        run.chart(f"spectrum-{pixels}-{gamma:g}", charts.ritz_values(spectrum, title=title))
    frame = run.table("solutions", rows)
    for name, what in (("sharpness", "λ₁"), ("gap", "gap"), ("weights", "weight norm")):
        series = "pixels" if len(network.pixels) > 1 else None
        title = f"{config.network}: {what} against γ"
        run.chart(name, charts.lines(frame, "γ", what, series=series, points=True, title=title))
    yield from judge(config, rows)


def judge(config: WeightDecay, rows: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The verdicts on a table of solutions; of two forms of pixels the one nearer to the paper's λ₁ decides."""
    network = NETWORKS[config.network]
    groups = {form: [row for row in rows if row["pixels"] == form] for form in network.pixels}
    usual = config.gammas == (0.0, 1e-4, 5e-4)
    paper = network.spectral_norm if usual else ()

    def distance(form: str) -> float:
        return max((abs(math.log(r["λ₁"] / p)) for r, p in zip(groups[form], paper, strict=bool(paper))), default=0.0)

    nearest = min(groups, key=distance)
    solutions = groups[nearest]
    form = f"Pixels: {nearest}." if len(groups) > 1 else ""
    worst = min(solutions, key=lambda row: row["train accuracy"])
    undecided = ""
    if network.fitted and config.scale != "paper":
        undecided = not_fitted(worst["train accuracy"], max(row["train loss"] for row in solutions), *network.fitted)

    noise = chance_of_points([row["validation accuracy"] for row in solutions], config.validation)
    for statement, what, sign in (
        (SHARPER, "λ₁", 1),
        (BETTER, "validation accuracy", 1),
        (GAP, "gap", -1),
        (NORM, "weight norm", -1),
        (TRACE, "trace", 1),
        (FROBENIUS, "Frobenius norm", 1),
    ):
        values = [row[what] for row in solutions]
        steps = [sign * (after - before) for before, after in itertools.pairwise(values)]
        yield statement.judge(
            ", ".join(f"{value:.4g}" for value in values),
            reproduced=min(steps) > 0,
            direction=sign * (values[-1] - values[0]) > 0,
            undecided=undecided if statement in (SHARPER, GAP, TRACE, FROBENIUS) else "",
            remark=" ".join(filter(None, [form, noise if statement in (BETTER, GAP) else ""])),
        )
    yield VALUES.judge(
        _listed(solutions),
        reproduced=bool(paper) and distance(nearest) < math.log(1.1),
        direction=bool(paper) and distance(nearest) < math.log(2),
        undecided="" if paper else "the paper prints no value",
        remark=" ".join(f"{name}: {_listed(group)}." for name, group in groups.items()) if len(groups) > 1 else "",
    )
    printed = network.validation if usual else ()
    off = [abs(100 * row["validation accuracy"] - p) for row, p in zip(solutions, printed, strict=False)]
    yield ACCURACY.judge(
        ", ".join(f"{100 * row['validation accuracy']:.2f}" for row in solutions),
        reproduced=max(off, default=math.inf) <= 1,
        direction=max(off, default=math.inf) <= 5,
        undecided="" if printed and config.scale == "paper" else "the paper's recipe was not run in full",
        remark=form,
    )
    shares = [row["λ₁"] / row["bound of momentum"] for row in solutions]
    yield STABLE.judge(max(shares), reproduced=max(shares) < 1, remark="The largest λ₁ / bound.")
    shares = [row["λ₁"] / row["bound of descent"] for row in solutions]
    yield TIGHT.judge(
        max(shares), reproduced=max(shares) < 0.1, direction=max(shares) < 0.5, remark="The largest λ₁ / (2/α)."
    )


def _listed(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['λ₁']:.4g}" for row in rows)


def _training(trained: Trained) -> dict[str, Any]:
    last = trained.history[-1]
    weights = math.sqrt(sum(float(p.detach().double().square().sum()) for p in trained.model().parameters()))
    return {
        "train loss": last["train_loss"],
        "train accuracy": last["train_accuracy"],
        "validation accuracy": last["validation_accuracy"],
        "test accuracy": last["test_accuracy"],
        "gap": last["train_accuracy"] - last["validation_accuracy"],
        "weight norm": weights,
    }


def _curvature(config: WeightDecay, trained: Trained) -> dict[str, Any]:
    """The spectrum of the unregularised loss on the training set, and the limits that stability sets to λ₁."""
    from spiritlevel.curvature import hessian_variance
    from spiritlevel.estimators import eigenvalues

    network = NETWORKS[config.network]
    row = spectrum_row(
        trained,
        points=config.curvature_points,
        batch_norm=network.batch_norm,
        batch_size=BATCH if network.batch_norm == "batch" else None,
        probes=config.probes,
        steps=config.steps,
        seed=config.seed,
    )
    data = tuple(part[: config.curvature_points] for part in trained.train)
    variance = 0.0
    if len(data[1]) > BATCH:
        batches = hessian_variance(trained.model(), data, batch_norm=network.batch_norm, batch_size=BATCH)
        spread = eigenvalues(batches, k=1, tol=1e-2, max_matvecs=config.steps, vectors=False, seed=config.seed)
        variance = max(float(spread.values[0]), 0.0)
    rate = trained.job.recipe.lr * LAST_RATE
    inside = 1 - rate**2 * variance
    return {
        **row,
        "largest eigenvalue of the variance": variance,
        "last learning rate": rate,
        "bound of descent": 2 / rate,
        "bound of momentum": 2 * (1 + MOMENTUM) / rate,
        "bound of SGD": (1 + math.sqrt(inside)) / rate if inside >= 0 else None,
    }


def _chosen_rate(config: WeightDecay, run: Run) -> float:
    """The learning rate of App. A.1's grid with the best validation accuracy at γ = 1e-4."""
    pixels = NETWORKS[config.network].pixels[0]
    scores = {
        lr: run.train(job(config, 1e-4, pixels, lr)).history[-1]["validation_accuracy"] for lr in (0.01, 0.03, 0.1)
    }
    run.report(grid={f"{lr:g}": score for lr, score in scores.items()})
    return max(scores, key=scores.__getitem__)


_FEW = {"train_size": 256, "validation": 1000, "steps": 20, "probes": 2}

STUDY = Study(
    name="weight-decay",
    title="L2 regularisation: sharper solutions that generalise better",
    source="C, Fig. 1–5",
    config=WeightDecay,
    statements=STATEMENTS,
    run=run,
    scales={
        "smoke": {
            "network": "softmax",
            "data": "digits",
            "epochs": 2,
            "train_size": 256,
            "validation": 100,
            "steps": 8,
            "probes": 2,
        },
        "laptop": {"epochs": 300, "width": 0.25, "train_size": 2000, "validation": 2000, "steps": 60, "probes": 3},
    },
    adapted={
        "laptop": {
            "network": {
                "cnn": {**_FEW, "steps": 40},
                "preresnet": {**_FEW, "train_size": 64, "validation": 500},
                "wideresnet": {**_FEW, "width": 0.05},
            }
        }
    },
    sweep={"network": tuple(NETWORKS)},
)
