"""Paper A, Section 5: a network that fits its data becomes as flat as one likes, at the same predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.errors import InputError, unknown_name
from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.recipes import paper_a
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.papers.training import Job, Pair

PREDICTIONS = Statement(
    "predictions",
    "scaling the last layer by α keeps every prediction and multiplies every margin by α",
    "follows from φ → αφ (Section 5)",
    "no prediction changes and every margin is α times the first to 1e-6 of the largest, correct points or not",
    "a margin deviates by more",
    Range(high=1e-6),
    kind="identity",
)


def _vanishes(name: str, what: str) -> Statement:
    return Statement(
        name,
        f"{what} of correctly classified points goes to zero as α grows (last layer scaled)",
        "goes to zero (Prop. 5.1, Cor. 5.2)",
        "at the largest α it is below 1e-6 of its value at α = 1",
        "it is not",
        Range(high=1e-6),
        kind="identity",
    )


VANISHES = {
    "trace": _vanishes("trace", "the trace of the Hessian"),
    "spectral norm": _vanishes("spectral-norm", "the spectral norm of the Hessian"),
    "Frobenius norm": _vanishes("frobenius-norm", "the Frobenius norm of the Hessian"),
}
WHOLE = Statement(
    "whole-network",
    "scaling each layer of a ReLU network is a valid transformation as well",
    "valid for fully connected and convolutional networks (Section 5)",
    "with W → α^{1/K} W and b → α^{k/K} b in layer k of K all layers take part, the outputs are α times the first to "
    "1e-6, and the trace of correct points at the largest α is below 1e-6 of that at α = 1",
    "one of the three is not so; where a layer must stay as it is, as before a batch norm, the number is 1",
    Range(high=1e-6),
    kind="identity",
)
NEEDED = Statement(
    "misclassified",
    "the Hessian goes to zero only where every point is predicted correctly",
    "assumed by Cor. 5.2",
    "on misclassified test points the spectral norm at the largest α is at least a tenth of that at α = 1",
    "it is smaller",
    Range(low=0.1),
    kind="identity",
)
FLOOR = 1e-30  # of the chart: beyond it a logarithmic axis would show nothing else
NETWORKS = {"fcn": "fcn_bn", "lenet": "lenet5"}


@dataclass(frozen=True, kw_only=True)
class Scaling(Config):
    """Which trained network is scaled, and by how much."""

    network: str = "fcn"
    """fcn (three hidden layers with batch norm) or lenet."""
    data: str = "mnist"
    """The data set."""
    train_size: int | None = None
    """Train on this many points only."""
    width: float = 1.0
    """Factor on the units of every hidden layer."""
    pixels: str = "unit"
    """unit: in [0, 1]; standard: standardised."""
    steps: int = 10_000
    """Updates, batches of 256."""
    checkpoints: int = 21
    """Evaluations from step 0 to the last one."""
    points: int = 1_000
    """Correctly classified training points, drawn at random."""
    alphas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0)
    """The factors, which must include 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in NETWORKS:
            raise unknown_name("network", self.network, NETWORKS)
        if 1.0 not in self.alphas or len(self.alphas) < 2:
            raise InputError(f"scaling compares factors with 1, so alphas needs 1 and another, got {self.alphas}.")


def job(config: Scaling) -> Job:
    """The training, as in the study of correlations."""
    return paper_a(
        NETWORKS[config.network],
        config.data,
        steps=config.steps,
        checkpoints=config.checkpoints,
        width=config.width,
        train_size=config.train_size,
        pixels=config.pixels,
        seed=config.seed,
    )


def measure(model: nn.Module, pair: Pair, transform: str, alpha: float, seed: int) -> dict[str, Any]:
    """Loss, margins, predictions and three sizes of the Hessian after scaling, all in float64."""
    from spiritlevel import transforms
    from spiritlevel.estimators import frobenius_norm, spectral_norm
    from spiritlevel.operators.matrices import hessian
    from spiritlevel.papers.training import evaluate
    from spiritlevel.results import median
    from spiritlevel.samples.margins import margins
    from spiritlevel.samples.traces import sample_traces

    scale = transforms.scale_last_layer if transform == "last layer" else transforms.rescale_all
    scaled = scale(model, alpha, data=pair)
    found = margins(scaled.model, pair)
    op = hessian(scaled.model, pair)
    frobenius = frobenius_norm(op, probes=16, seed=seed)
    unmoved = [name for name, factor in (scaled.certificate.factors or {}).items() if factor == 1.0 and alpha != 1.0]
    return {
        "loss": evaluate(scaled.model, pair)["loss"],
        "trace": float(sample_traces(scaled.model, pair, method="exact").mean().value),
        "spectral norm": float(spectral_norm(op, seed=seed).value),
        "Frobenius norm": float(frobenius.value),
        "Frobenius norm, standard error": float(frobenius.stderr),
        "smallest margin": float(found.signed.min()),
        "median margin": median(found.signed),
        "margins": found.signed,
        "outputs' error": scaled.certificate.relative_difference,
        "layers unmoved": len(unmoved),
    }


def run(config: Scaling, run: Run) -> Iterator[Ruling]:
    """Scale the trained network by every α in two ways, on correct training and on misclassified test points."""
    import torch

    from spiritlevel import charts
    from spiritlevel.samples.margins import margins

    trained = run.train(job(config))
    model = trained.model().double()
    order = torch.randperm(len(trained.train[1]), generator=torch.Generator().manual_seed(config.seed))
    sets: dict[str, Pair] = {}
    for name, (inputs, targets), right in (
        ("correct", tuple(part[order] for part in trained.train), True),
        ("misclassified", trained.test, False),
    ):
        chosen = (margins(trained.model(), (inputs, targets)).correct == right).nonzero()[: config.points, 0]
        if len(chosen):
            sets[name] = inputs[chosen].double(), targets[chosen]
    ways = [("last layer", "correct"), ("all layers", "correct"), ("last layer", "misclassified")]
    ways = [(transform, points) for transform, points in ways if points in sets]
    rows: list[dict[str, Any]] = []
    total = len(ways) * len(config.alphas)
    for transform, points in ways:
        for alpha in config.alphas:
            run.progress(f"{transform} × {alpha:g}, {points} points", len(rows), total)
            compute = partial(measure, model, sets[points], transform, alpha, config.seed)
            piece = f"{transform}-{points}-{alpha:g}".replace(" ", "-")
            rows.append({"scaled": transform, "points": points, "α": alpha, **run.once(piece, compute)})
    run.table("scaling", [{key: value for key, value in row.items() if key != "margins"} for row in rows])
    run.report(points={name: len(pair[1]) for name, pair in sets.items()}, **_last(trained.history))
    panels = []
    for transform, points in ways:
        lines = [
            {"α": row["α"], "value": row[quantity] if row[quantity] > FLOOR else None, "quantity": quantity}
            for quantity in ("loss", "trace", "spectral norm", "Frobenius norm", "smallest margin")
            if not (quantity == "smallest margin" and points == "misclassified")
            for row in rows
            if (row["scaled"], row["points"]) == (transform, points)
        ]
        columns = {key: [line[key] for line in lines] for key in ("α", "value", "quantity")}
        title = f"{transform.capitalize()} scaled, {points} points"
        panels.append(
            charts.lines(columns, "α", "value", series="quantity", log_x=True, log_y=True, points=True, title=title)
        )
    title = f"Scaling at unchanged predictions (values below {FLOOR:g} are not drawn)"
    run.chart("scaling", charts.panels([panels], title=title, width=340, height=300))
    yield from judge(rows)


def _last(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: history[-1][key] for key in ("train_loss", "train_accuracy", "test_accuracy")}


def judge(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ruling]:
    """The verdicts, from the rows of `measure`."""

    def series(transform: str, points: str, quantity: str) -> dict[float, Any]:
        chosen = [row for row in rows if (row["scaled"], row["points"]) == (transform, points)]
        return {row["α"]: row[quantity] for row in sorted(chosen, key=lambda row: row["α"])}

    worst = 0.0
    for points in ("correct", "misclassified"):
        found = series("last layer", points, "margins")
        for alpha, margins in found.items():
            size = max(map(abs, margins))
            differences = (abs(m - alpha * first) / size for m, first in zip(margins, found[1.0], strict=True))
            worst = max(worst, *differences)
    yield PREDICTIONS.judge(worst, remark="The largest deviation of a margin from α times.")
    for quantity, statement in VANISHES.items():
        ratio = _factor(series("last layer", "correct", quantity))
        yield statement.judge(ratio)
    ratio = _factor(series("all layers", "correct", "trace"))
    error = max(series("all layers", "correct", "outputs' error").values())
    unmoved = max(series("all layers", "correct", "layers unmoved").values())
    remark = f"Outputs differ from α times by at most {error:.1e}; {unmoved} parameter tensors stay as they are."
    yield WHOLE.judge(1.0 if unmoved else max(ratio, error), remark=f"{remark} The trace falls to {ratio:.2g}.")
    wrong = series("last layer", "misclassified", "spectral norm")
    if not wrong:
        yield NEEDED.judge(None, undecided="no test point is misclassified")
        return
    ratio, trace = _factor(wrong), _factor(series("last layer", "misclassified", "trace"))
    yield NEEDED.judge(ratio, remark=f"Their trace changes by the factor {trace:.2g}.")


def _factor(values: Mapping[float, float]) -> float:
    """The value at the largest α in units of that at α = 1."""
    return values[max(values)] / values[1.0]


STUDY = Study(
    name="scaling",
    title="Flatness of a fitted network under scaling, at the same predictions",
    source="A, Section 5",
    config=Scaling,
    statements=(PREDICTIONS, *VANISHES.values(), WHOLE, NEEDED),
    run=run,
    scales={
        "smoke": {
            "network": "lenet",
            "data": "fashion-mini",
            "train_size": 200,
            "width": 0.25,
            "steps": 60,
            "checkpoints": 2,
            "points": 20,
            "alphas": (1.0, 4.0),
        },
        "laptop": {"train_size": 5_000, "width": 0.25, "steps": 2_000, "checkpoints": 2, "points": 500},
    },
    sweep={"network": tuple(NETWORKS)},
    revision=2,
)
