"""Which layers can manage with fewer bits, and does curvature tell? Layers rounded one at a time, in three networks.

Each matrix and kernel of a trained network is rounded alone, and the rise of the loss is what it costs. Three orders of
the layers are compared with that by Spearman's correlation: the second order of that very rounding, g·δ + ½ δᵀHδ of the
layer; Tr H · ‖δ‖² of the layer, as HAWQ orders them (Dong et al. 2019, arXiv:1905.03696); and plain ‖δ‖². Then bits
are chosen by the first within a total size, and compared with the same bits for all layers on held-out images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.errors import unknown_name
from spiritlevel.papers.studies.base import Config, Run, Study, Tables
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import nn

NETWORKS = ("lenet", "resnet", "transformer")
_OURS = "– (HAWQ: layers are to be ordered by curvature times the size of the change)"
_LIMITS = (-2.0, 2.0)
TRACE = Statement(
    "trace-or-norm",
    "Tr H · ‖δ‖² orders the layers by what rounding them costs better than ‖δ‖² does",
    _OURS,
    "Spearman's correlation with the measured rise, averaged over the numbers of bits, is higher",
    "it is lower",
    Range.POSITIVE,
    limits=_LIMITS,
)
EXACT = Statement(
    "second-order-or-trace",
    "g·δ + ½ δᵀHδ of the rounding itself orders them better than Tr H · ‖δ‖²",
    _OURS,
    "Spearman's correlation with the measured rise, averaged over the numbers of bits, is higher",
    "it is lower",
    Range.POSITIVE,
    limits=_LIMITS,
)
BUDGET = Statement(
    "chosen-or-uniform",
    "bits chosen by the second order within a size leave a lower loss than the same bits for all",
    _OURS,
    "the held-out loss with uniform bits minus that with chosen bits, of at most the same size, is positive",
    "it is negative",
    Range.POSITIVE,
)
STATEMENTS = (TRACE, EXACT, BUDGET)
CHOICES = (2, 3, 4, 6)
"""Bits that a layer may be given within a size."""
ORDERS = ("second_order", "trace_times_square", "square", "measured")


@dataclass(frozen=True, kw_only=True)
class LayerBitsConfig(Config):
    """The network, its training, and the numbers of bits."""

    network: str = "lenet"
    """lenet (LeNet-5), resnet (Wide ResNet 28, a twentieth as wide) or transformer (reads an image row by row)."""
    train_size: int = 10_000
    """Training images."""
    steps: int = 2_000
    """Updates."""
    batch_size: int = 64
    """Samples per update."""
    lr: float = 3e-3
    """The learning rate of Adam."""
    bits: tuple[int, ...] = (4, 3)
    """Numbers of bits, 2 to 16, to which each layer alone is rounded."""
    budget: float = 3.0
    """Bits per weight, averaged over all layers."""
    budgets: tuple[float, ...] = (4.0,)
    """Further sizes, shown but not judged."""
    measure_on: int = 1_000
    """Training images on which layers are rounded and curvature is measured."""
    test_size: int = 5_000
    """Held-out images for the loss with chosen bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in NETWORKS:
            raise unknown_name("network", self.network, NETWORKS)

    @property
    def data(self) -> str:
        """The images: small ones in colour for the ResNet."""
        return "cifar10" if self.network == "resnet" else "fashion-mini"


def build(config: LayerBitsConfig) -> nn.Module:
    """The network with its initial weights."""
    import torch
    from torch import Tensor, nn

    from spiritlevel.binding.state import preserved_random_state
    from spiritlevel.papers.networks import lenet5, wide_resnet_28_10

    class Rows(nn.Module):
        """A transformer that reads an image row by row."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Linear(28, 32)
            self.places = nn.Parameter(0.1 * torch.randn(28, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 10)

        def forward(self, images: Tensor) -> Tensor:
            hidden: Tensor = self.blocks(self.embedding(images[:, 0]) + self.places)
            found: Tensor = self.head(hidden.mean(1))
            return found

    with preserved_random_state():
        torch.manual_seed(config.seed)
        if config.network == "lenet":
            return lenet5()
        return wide_resnet_28_10(classes=10, width=0.05) if config.network == "resnet" else Rows()


def trained(config: LayerBitsConfig, run: Run) -> tuple[nn.Module, Any, Any]:
    """The trained network, training and held-out images, standardised."""
    from torch.nn import functional as F

    from spiritlevel import data
    from spiritlevel.papers.training import Recipe, fit

    found = data.load(config.data)
    inputs, targets = found.train[0][: config.train_size], found.train[1][: config.train_size]
    images, labels = found.test[0][: config.test_size], found.test[1][: config.test_size]
    if config.network == "resnet":
        inputs, images = F.avg_pool2d(inputs, 2), F.avg_pool2d(images, 2)
    mean, spread = inputs.mean((0, 2, 3), keepdim=True), inputs.std((0, 2, 3), keepdim=True)
    inputs, images = (inputs - mean) / spread, (images - mean) / spread
    model = build(config)
    recipe = Recipe(optimizer="adam", lr=config.lr, batch_size=config.batch_size, steps=config.steps)
    fit(
        model,
        (inputs, targets),
        recipe,
        seed=config.seed,
        checkpoint=run.folder / "pieces" / "training",
        progress=run.progress,
    )
    return model, (inputs[: config.measure_on], targets[: config.measure_on]), (images, labels)


def measured(config: LayerBitsConfig, run: Run) -> dict[str, Any]:
    """Each layer rounded alone to each number of bits, and the plans within each size."""
    import dataclasses

    from spiritlevel.answers.changes import as_change
    from spiritlevel.answers.perturbing import floating, perturb_in
    from spiritlevel.measures import Setting

    model, few, test = trained(config, run)
    setting = floating(Setting(model, few, seed=config.seed))
    widths = sorted({*config.bits, *CHOICES}, reverse=True)
    layers: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    traces: dict[str, float] = {}
    for number, bits in enumerate(widths):
        run.progress("layers rounded", number, len(widths) + 1)
        found = perturb_in(setting, as_change(f"int{bits}"), traces=not traces)
        traces = traces or {row.name: row.trace for row in found.layers}  # of the model as it is: the same for all
        rows = tuple(dataclasses.replace(row, trace=traces[row.name]) for row in found.layers)
        found = dataclasses.replace(found, layers=rows)
        layers += [{"bits": bits, **row} for row in found.frame().to_dicts()]
        if bits in config.bits:
            ranks.append({"bits": bits, **found.rank_agreement()})
    run.progress("bits chosen", len(widths), len(widths) + 1)
    return {"layers": layers, "ranks": ranks, **planned(config, setting.on(test), layers)}


def planned(config: LayerBitsConfig, test: Any, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The bits that each order of the layers chooses within each size, and what they do on held-out images.

    `measured` is an order that nobody knows in advance: what rounding each layer alone did to the loss.
    """
    from spiritlevel.answers.bits import at_least_of_more_bits, cheapest, mixed
    from spiritlevel.answers.perturbing import changed

    sizes = {row["layer"]: row["size"] for row in layers}
    plan: list[dict[str, Any]] = []
    budgets: list[dict[str, Any]] = []
    for budget in dict.fromkeys((config.budget, *config.budgets)):
        chosen = {"uniform": dict.fromkeys(sizes, max(width for width in CHOICES if width <= budget))}
        for by in ORDERS:
            alone: dict[str, dict[int, float]] = {name: {} for name in sizes}
            for row in layers:
                alone[row["layer"]][row["bits"]] = row[by]
            costs = {name: at_least_of_more_bits(each) for name, each in alone.items()}
            chosen[by] = cheapest(costs, sizes, list(CHOICES), budget)
        for by, bits in chosen.items():
            columns = changed(test, mixed(bits))
            mean = sum(sizes[name] * width for name, width in bits.items()) / sum(sizes.values())
            if not budgets:
                budgets.append(_outcome(0.0, "unrounded", 32.0, columns["before"], columns["right"]))
            budgets.append(_outcome(budget, by, mean, columns["after"], columns["right_after"]))
            plan += [{"budget": budget, "by": by, "layer": name, "bits": width} for name, width in bits.items()]
    return {"plan": plan, "budgets": budgets}


def _outcome(budget: float, by: str, mean: float, losses: Any, right: Any) -> dict[str, Any]:
    numbers = {"mean bits": mean, "loss": float(losses.mean()), "accuracy": float(right.mean())}
    return {"budget": budget, "by": by, **numbers}


def run(config: LayerBitsConfig, run: Run) -> None:
    """Train, round, and keep the numbers."""
    from spiritlevel import charts

    found = run.once("measured", lambda: measured(config, run))
    run.table("layers", found["layers"])
    run.table("ranks", found["ranks"])
    run.table("plan", found["plan"])
    run.table("budgets", found["budgets"])
    names = {"unrounded": "unrounded", "second_order": "chosen", "uniform": "uniform"}
    own = [row for row in found["budgets"] if row["by"] in names and row["budget"] in (0.0, config.budget)]
    run.table("outcome", [{**row, "bits": names[row["by"]]} for row in own])
    run.report(layers=len({row["layer"] for row in found["layers"]}))
    first = [row for row in found["layers"] if row["bits"] == config.bits[0]]
    columns = {"layer": [row["layer"] for row in first], "rise of the loss": [row["measured"] for row in first]}
    title = f"{config.network}: each layer alone rounded to {config.bits[0]} bits"
    run.chart("layers", charts.bars(columns, "layer", "rise of the loss", title=title))


def from_tables(config: LayerBitsConfig, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run."""
    ranks, outcome = tables("ranks"), {row["bits"]: row for row in tables("outcome")}
    (listing,) = (row for row in describe() if row.name == config.data)
    facts: dict[str, Any] = {"accuracy": outcome["unrounded"]["accuracy"], "chance": 1 / listing.classes}

    def mean(column: str) -> float | None:
        values = [row[column] for row in ranks]
        return None if None in values else sum(values) / len(values)

    second, trace, square = (mean(name) for name in ("second_order", "trace_times_square", "square"))
    remark = ", ".join(
        f"{name} {value:.2f}"
        for name, value in (("second order", second), ("Tr H · ‖δ‖²", trace), ("‖δ‖²", square))
        if value is not None
    )
    remark = f"Correlations: {remark}."
    yield TRACE.judge(None if trace is None or square is None else trace - square, remark=remark, **facts)
    yield EXACT.judge(None if second is None or trace is None else second - trace, remark=remark, **facts)
    gain = outcome["uniform"]["loss"] - outcome["chosen"]["loss"]
    accuracies = ", ".join(f"{name} {row['accuracy']:.1%}" for name, row in outcome.items())
    yield BUDGET.judge(gain, remark=f"Accuracies: {accuracies}.", **facts)


STUDY = Study(
    name="layer-bits",
    title="Which layers can take fewer bits, and does curvature tell",
    source="HAWQ (Dong et al. 2019); the question is ours",
    config=LayerBitsConfig,
    statements=STATEMENTS,
    run=run,
    judge=from_tables,
    reduced=lambda config: (
        ""
        if config.steps >= 2_000 and config.measure_on >= 1_000
        else f"{config.steps:,} steps on {config.train_size:,} images, measured on {config.measure_on:,}"
    ),
    sweep={"network": NETWORKS},
    only={"smoke": {"network": ("lenet",)}},
    scales={
        "smoke": {"train_size": 200, "steps": 15, "bits": (3,), "measure_on": 40, "test_size": 100},
        "laptop": {"train_size": 4_000, "steps": 500, "measure_on": 100, "test_size": 2_000},
        "small": {"train_size": 6_000, "measure_on": 100, "test_size": 2_000},
    },
    # from so few images the ResNet learns too little of CIFAR-10 to be judged
    adapted={"small": {"network": {"resnet": {"train_size": 40_000}}}},
    seeds={"laptop": 3, "small": 3},
    revision=3,  # every order chooses bits; revision 1 chose greedily, worse than uniform by its own cost
)
