"""Paper C, Fig. 1–5: L2 regularisation makes solutions sharper, and they generalise better."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.papers.studies.base import Config, Run, Study, chance_of_points, reduced
from spiritlevel.papers.studies.recipes import (
    BATCH,
    LAST_RATE,
    MOMENTUM,
    NETWORKS,
    exposure,
    paper_c,
    sharpness_row,
    spectrum_row,
    training_row,
)
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained


STRENGTHS = {
    "exposure of 1e-4": "γ matched in exposure to the paper's 1e-4",
    "exposure of 5e-4": "γ matched in exposure to the paper's 5e-4",
    "5e-4 as printed": "γ = 5e-4 as printed, at the smaller exposure of this scale",
}
"""The strengths that are compared with γ = 0. At the paper's own scale γ and exposure are one and the same."""
PRINTED = {1e-4, 5e-4}  # the paper's values of γ, beside 0


def _together(strength: str) -> Statement:
    return Statement(
        f"sharper and better, {strength}",
        f"solutions with L2 are sharper and generalise better ({STRENGTHS[strength]})",
        "λ₁ rises, the gap falls (Fig. 1–5)",
        "against γ = 0, λ₁ and Tr(H²)/P are larger and the gap between training and validation accuracy is smaller",
        "λ₁ or Tr(H²)/P is smaller, or the gap larger",
        {"λ₁": Range.RISES, "Tr(H²)/P": Range.RISES, "gap": Range.NEGATIVE},
    )


def _last(name: str, text: str, paper: str, what: str, within: Range) -> Statement:
    up = within.low >= 0
    measured = f"the ratio of {what}" if within.ratio else f"the difference of {what} in percentage points"
    end = "1" if within.ratio else "0"
    good, bad = (f"{measured}, largest γ against γ = 0, is {side} {end}" for side in ("above", "below"))
    return Statement(name, text, paper, *((good, bad) if up else (bad, good)), within)


TOGETHER = {strength: _together(strength) for strength in STRENGTHS}
SHARPER = _last("λ₁ rises", "the spectral norm rises with γ", "rises (Fig. 1–5)", "λ₁", Range.RISES)
TRACE = _last("trace rises", "the trace rises with γ", "App. C, without numbers", "Tr H", Range.RISES)
FROBENIUS = _last("‖H‖_F rises", "the Frobenius norm rises with γ", "App. C, without numbers", "‖H‖_F", Range.RISES)
BETTER = _last("validation rises", "validation accuracy rises with γ", "rises", "validation accuracy", Range.POSITIVE)
GAP = _last(
    "gap falls", "the generalisation gap falls with γ", "falls (smallest at the largest γ)", "the gap", Range.NEGATIVE
)
NORM = _last("weights shrink", "L2 reduces the norm of the weights", "presumed", "‖w‖", Range.FALLS)
VALUES = Statement(
    "values of λ₁",
    "the spectral norms that the paper prints",
    "softmax: 12.26, 14.17, 15.84; none printed for the others",
    "each of ours is within 10 % of the paper's: the largest |log ratio| is below 0.095",
    "one is further off",
    Range(high=math.log(1.1)),
)
ACCURACY = Statement(
    "accuracies",
    "the validation accuracies that the paper prints",
    "softmax 93.48, 94, 94.08; MLP 94.4, 96.46, 96.7; PreResNet 72.78, 75.56, 76.76; WideResNet 75.2, 79.5, 80.6",
    "each of ours is within one percentage point",
    "one is further off",
    Range(high=1.0),
)
STABLE = Statement(
    "stability",
    "a minimum that momentum SGD stays at has λ₁ ≤ 2(1+ρ)/α",
    "printed for plain gradient descent: 2/α; the ResNets' exceed 20",
    "λ₁ lies below 2(1+ρ)/α at the last learning rate for every γ",
    "it lies above for one γ",
    Range(high=1.0),
    kind="identity",
)
TIGHT = Statement(
    "not tight",
    "at the last learning rate the bound is not tight",
    "2000 is certainly not tight",
    "λ₁ is below a tenth of 2/α at the last learning rate for every γ",
    "it is above for one γ",
    Range(high=0.1),
    kind="identity",
)
STATEMENTS = (*TOGETHER.values(), SHARPER, BETTER, GAP, NORM, TRACE, FROBENIUS, VALUES, ACCURACY, STABLE, TIGHT)


@dataclass(frozen=True, kw_only=True)
class WeightDecay(Config):
    """A network of paper C and the strengths of its L2 regularisation."""

    network: str = "softmax"
    """softmax, mlp, printed-mlp, cnn, preresnet or wideresnet."""
    data: str | None = None
    """A data set other than the paper's."""
    gammas: tuple[float, ...] = (0.0, 1e-4, 5e-4)
    """Values of γ, PyTorch's weight_decay."""
    matched: tuple[float, ...] = ()
    """Values of the paper's γ; the larger γ that give the same exposure Σαγ/(1−ρ) here are run as well."""
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
    pool: int = 1
    """Every pool × pool pixels averaged to one: 2 turns 32² images into 16² ones."""
    pixels: str | None = None
    """unit or standard, if not the network's usual choice."""
    density: bool = True
    """Whether to compute the whole spectrum; otherwise only λ₁, Tr H (exact without batch norm) and Tr H²."""
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
        if len(self.gammas) + len(self.matched) < 2 or list(self.gammas) != sorted(set(self.gammas)):
            raise InputError(f"weight-decay needs at least two rising values of γ, got {self.gammas}.")
        if not {*self.matched} <= PRINTED:
            raise InputError(f"matched takes the paper's values of γ, 1e-4 and 5e-4, got {self.matched}.")


def job(config: WeightDecay, gamma: float, pixels: str, lr: float | None = None) -> Job:
    """The training for one γ."""
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
        small=config.scale == "small",
        pool=config.pool,
        seed=config.seed,
    )


def whole(config: WeightDecay) -> bool:
    """Whether this is the paper's own training."""
    return not reduced(WeightDecay(), config, width="", train_size="", epochs="", lr="", pool="", data="")


def strengths(config: WeightDecay) -> dict[str, float]:
    """The γ > 0 that are compared with γ = 0, by what they stand for."""
    if whole(config):
        return {f"exposure of {_power(gamma)}": gamma for gamma in config.gammas if gamma in PRINTED}
    found = {f"exposure of {_power(gamma)}": matched(config, gamma) for gamma in config.matched}
    return found | ({"5e-4 as printed": 5e-4} if 5e-4 in config.gammas else {})


def matched(config: WeightDecay, gamma: float) -> float:
    """The γ that exposes this training to as much decay as `gamma` does the paper's, to three digits."""
    network = NETWORKS[config.network]
    full = job(WeightDecay(network=config.network), 1.0, network.pixels[0])
    return float(f"{gamma * exposure(full) / exposure(job(config, 1.0, network.pixels[0])):.3g}")


def _power(gamma: float) -> str:
    return f"{gamma:.0e}".replace("e-0", "e-")


def run(config: WeightDecay, run: Run) -> None:
    """Train with every γ, measure the curvature, show both."""
    from spiritlevel import charts
    from spiritlevel.results import SpectralDensity

    forms = forms_of_pixels(config)
    gammas = sorted({*config.gammas, *strengths(config).values()})
    lr = _chosen_rate(config, run) if config.grid else None
    rows: list[dict[str, Any]] = []
    for pixels, gamma in itertools.product(forms, gammas):
        label = f"γ = {gamma:g}" + (f", {pixels} pixels" if len(forms) > 1 else "")
        run.progress(f"{config.network}, {label}", len(rows), len(gammas) * len(forms))
        found = run.once(f"solution-{pixels}-{gamma:g}", partial(_solution, config, run, gamma, pixels, lr))
        density = found.pop("density", None)
        rows.append({"γ": gamma, "pixels": pixels, **found})
        if density is not None:
            title = f"{config.network}, {label}: validation {found['validation accuracy']:.1%}, λ₁ = {found['λ₁']:.3g}"
            run.chart(
                f"spectrum-{pixels}-{gamma:g}", charts.ritz_values(SpectralDensity.from_dict(density), title=title)
            )
    frame = run.table("solutions", rows)
    for name, what in (("sharpness", "λ₁"), ("gap", "gap"), ("weights", "weight norm")):
        series = "pixels" if len(forms) > 1 else None
        title = f"{config.network}: {what} against γ"
        run.chart(name, charts.lines(frame, "γ", what, series=series, points=True, title=title))


def forms_of_pixels(config: WeightDecay) -> tuple[str, ...]:
    """The forms of pixels that the network is given."""
    return (config.pixels,) if config.pixels else NETWORKS[config.network].pixels


def judge(config: WeightDecay, rows: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The rulings on a table of solutions; of two forms of pixels the one nearer to the paper's λ₁ counts."""
    network = NETWORKS[config.network]
    usual = tuple(config.gammas) == (0.0, 1e-4, 5e-4) and not config.matched
    paper = network.spectral_norm if usual else ()
    groups = {form: [row for row in rows if row["pixels"] == form] for form in dict.fromkeys(r["pixels"] for r in rows)}

    def distance(group: Sequence[Mapping[str, Any]]) -> float:
        ratios = [row["λ₁"] / p for row, p in zip(group, paper, strict=False)]
        return max((abs(math.log(ratio)) if ratio > 0 else math.inf for ratio in ratios), default=0.0)

    form, solutions = min(groups.items(), key=lambda item: distance(item[1]))
    classes = next(row.classes for row in describe() if row.name == (config.data or network.data))

    def facts(*rows: Mapping[str, Any]) -> dict[str, Any]:
        """What decides whether a number that rests on these solutions counts."""
        return {"accuracy": min(row["validation accuracy"] for row in rows), "chance": 1 / classes}

    first, by_gamma = solutions[0], {row["γ"]: row for row in solutions if "γ" in row}
    said = f"Pixels: {form}. " if len(groups) > 1 else ""
    accuracies = (_percent(solutions, f"{part} accuracy", 1) for part in ("train", "validation"))
    said += "Accuracy in training {} %, in validation {} %.".format(*accuracies)
    for strength, gamma in strengths(config).items():
        row = by_gamma[gamma]
        numbers = {what: row[what] / first[what] for what in ("λ₁", "Tr(H²)/P")}
        numbers["gap"] = 100 * (row["gap"] - first["gap"])
        remark = f"γ = {gamma:g} against 0; gap in points. {said}"
        if row["validation accuracy"] < first["validation accuracy"]:
            remark += " Validation accuracy falls: it generalises better by the gap alone."
        yield TOGETHER[strength].judge(numbers, remark=remark, **facts(first, row))
    noise = chance_of_points([row["validation accuracy"] for row in solutions], config.validation)
    for statement, what in (
        (SHARPER, "λ₁"),
        (BETTER, "validation accuracy"),
        (GAP, "gap"),
        (NORM, "weight norm"),
        (TRACE, "trace"),
        (FROBENIUS, "Frobenius norm"),
    ):
        values = [row[what] for row in solutions]
        share = statement in (BETTER, GAP)
        remark = f"For γ = {', '.join(f'{g:g}' for g in by_gamma)}: {', '.join(f'{value:.4g}' for value in values)}."
        yield statement.judge(
            100 * (values[-1] - values[0]) if share else values[-1] / values[0],
            remark=f"{remark} {noise}" if share else remark,
            **facts(first, solutions[-1]),
        )
    yield VALUES.judge(
        distance(solutions) if paper else None,
        undecided="" if paper else "the paper prints no value",
        remark=" ".join(f"{name}: {_listed(group)}." for name, group in groups.items()),
        **facts(*solutions),
    )
    printed = network.validation if usual and whole(config) else ()
    off = [abs(100 * row["validation accuracy"] - p) for row, p in zip(solutions, printed, strict=False)]
    yield ACCURACY.judge(
        max(off, default=None),
        undecided="" if printed else "the paper's recipe was not run in full",
        remark=f"{_percent(solutions, 'validation accuracy', 2)} %.",
        **facts(*solutions),
    )
    yield STABLE.judge(max(row["λ₁"] / row["bound of momentum"] for row in solutions), remark="The largest λ₁ / bound.")
    yield TIGHT.judge(max(row["λ₁"] / row["bound of descent"] for row in solutions), remark="The largest λ₁ / (2/α).")


def reduced_by(config: WeightDecay) -> str:
    """How the config falls short of the paper, with the exposure to decay."""
    network = NETWORKS[config.network]
    said = reduced(
        WeightDecay(network=config.network),
        config,
        width="width",
        train_size="images",
        epochs="epochs",
        pool="pixels pooled",
        data="data",
        lr="lr",
    )
    if not said:
        return ""
    said = said.replace("(paper all)", f"(paper {network.epochs})")
    full = exposure(job(WeightDecay(network=config.network), 5e-4, network.pixels[0]))
    gammas = sorted({*config.gammas, *strengths(config).values()})
    ours = ", ".join(f"{exposure(job(config, gamma, network.pixels[0])):.2g}" for gamma in gammas)
    return f"{said}, exposure {ours} (paper up to {full:.2g})"


def _percent(rows: Sequence[Mapping[str, Any]], what: str, digits: int) -> str:
    return ", ".join(f"{100 * row[what]:.{digits}f}" for row in rows)


def _listed(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['λ₁']:.4g}" for row in rows)


def _solution(config: WeightDecay, run: Run, gamma: float, pixels: str, lr: float | None) -> dict[str, Any]:
    """Training and curvature of one γ: all that is kept of its network."""
    trained = run.train(job(config, gamma, pixels, lr))
    run.progress(f"curvature of {trained.job.network} on {trained.job.data}", 0, 0)
    return {**training_row(trained), **(_curvature if config.density else _sharpness)(config, trained)}


def _how(config: WeightDecay) -> dict[str, Any]:
    """What the curvature of a solution is measured on, and with how much effort."""
    mode = NETWORKS[config.network].batch_norm
    return {
        "points": config.curvature_points,
        "batch_norm": mode,
        "batch_size": BATCH if mode == "batch" else None,
        "probes": config.probes,
        "steps": config.steps,
        "seed": config.seed,
    }


def _bounds(trained: Trained) -> dict[str, float]:
    """The limits that stability sets for λ₁ at the last learning rate, without and with momentum."""
    rate = trained.job.recipe.lr * LAST_RATE
    return {
        "last learning rate": rate,
        "bound of descent": 2 / rate,
        "bound of momentum": 2 * (1 + MOMENTUM) / rate,
    }


def _sharpness(config: WeightDecay, trained: Trained) -> dict[str, Any]:
    """λ₁, Tr H and Tr H² of the unregularised loss, and the limits that stability sets for λ₁."""
    exact = NETWORKS[config.network].batch_norm == "eval"
    return {**sharpness_row(trained, **_how(config), exact_trace=exact), **_bounds(trained)}


def _curvature(config: WeightDecay, trained: Trained) -> dict[str, Any]:
    """The spectrum of the unregularised loss on the training set, and the limits that stability sets for λ₁."""
    from spiritlevel.estimators import eigenvalues
    from spiritlevel.operators.matrices import hessian_variance

    network = NETWORKS[config.network]
    row = spectrum_row(trained, **_how(config))
    data = tuple(part[: config.curvature_points] for part in trained.train)
    variance = 0.0
    if len(data[1]) > BATCH:
        batches = hessian_variance(trained.model(), data, batch_norm=network.batch_norm, batch_size=BATCH)
        spread = eigenvalues(batches, k=1, tol=1e-2, max_matvecs=config.steps, vectors=False, seed=config.seed)
        variance = max(float(spread.values[0]), 0.0)
    bounds = _bounds(trained)
    rate = bounds["last learning rate"]
    inside = 1 - rate**2 * variance
    return {
        **row,
        "largest eigenvalue of the variance": variance,
        **bounds,
        "bound of SGD": (1 + math.sqrt(inside)) / rate if inside >= 0 else None,
    }


def _chosen_rate(config: WeightDecay, run: Run) -> float:
    """The learning rate of App. A.1's grid with the best validation accuracy at γ = 1e-4."""
    pixels = forms_of_pixels(config)[0]
    scores = {
        lr: run.train(job(config, 1e-4, pixels, lr)).history[-1]["validation_accuracy"] for lr in (0.01, 0.03, 0.1)
    }
    run.report(grid={f"{lr:g}": score for lr, score in scores.items()})
    return max(scores, key=scores.__getitem__)


_FEW = {"train_size": 256, "validation": 1000, "steps": 20, "probes": 2}
_ALONE = {"density": False, "probes": 40, "steps": 200}  # MNIST in full: all training points, exact traces

STUDY = Study(
    name="weight-decay",
    title="L2 regularisation: sharper solutions that generalise better",
    source="C, Fig. 1–5",
    config=WeightDecay,
    statements=STATEMENTS,
    run=run,
    judge=lambda config, tables: judge(config, tables("solutions")),
    reduced=reduced_by,
    wanted={
        "Fig. 1, softmax": {"network": "softmax", "scale": "paper"},
        "Fig. 2, MLP": {"network": "mlp", "scale": "paper"},
        "Fig. 2, the printed MLP of 9,960 parameters": {"network": "printed-mlp", "scale": "paper"},
        "Fig. 3, All-CNN": {"network": "cnn", "scale": ("small", "paper")},
        "Fig. 4, PreResNet-164": {"network": "preresnet", "scale": ("small", "paper")},
        "Fig. 5, WideResNet": {"network": "wideresnet", "scale": ("small", "paper")},
        "the grid of learning rates of App. A.1": {"grid": True},
    },
    scales={
        "smoke": {
            "network": "softmax",
            "data": "digits",
            "epochs": 2,
            "train_size": 256,
            "validation": 100,
            "gammas": (0.0, 5e-4),
            "matched": (1e-4, 5e-4),
            "density": False,
            "steps": 8,
            "probes": 2,
        },
        "small": {
            "epochs": 60,
            "width": 0.25,
            "train_size": 10_000,
            "pool": 2,
            "gammas": (0.0, 5e-4),
            "matched": (1e-4, 5e-4),
            "density": False,
            "curvature_points": 1280,
            "steps": 48,
            "probes": 8,
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
        },
        "small": {
            "network": {
                "cnn": {"train_size": 20_000, "epochs": 100},
                "preresnet": {"epochs": 40, "matched": (5e-4,)},
                "wideresnet": {"width": 0.1},
            }
        },
        "paper": {
            "network": {"softmax": {**_ALONE, "pixels": "standard"}, "mlp": _ALONE, "printed-mlp": _ALONE},
        },
    },
    sweep={"network": tuple(NETWORKS)},
    only={"small": {"network": ("wideresnet", "preresnet", "cnn")}},
)
