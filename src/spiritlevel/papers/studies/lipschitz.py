"""Paper B, section C: the loss of a rectified network has no Lipschitz constant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

FORMULA = Statement(
    "formula",
    "‖∇L(αθ₁, α⁻¹θ₂)‖² = α⁻²‖∇₁L‖² + α²‖∇₂L‖²",
    "the formula",
    "the largest relative error along the path is below 1e-9",
    "it is not",
    Range(high=1e-9),
    kind="identity",
)
DIVERGES = Statement(
    "diverges",
    "the gradient's norm grows without bound as α goes to 0",
    "goes to +∞",
    "the norm grows like 1/α: from the second smallest to the smallest α by their ratio, to 1 %",
    "it grows otherwise",
    Range(0.99, 1.01),
    kind="identity",
)
LOSS = Statement(
    "same loss",
    "the loss is the same all along the path",
    "stated",
    "outputs stay equal to 1e-9 relative",
    "they do not",
    Range(high=1e-9),
    kind="identity",
)
DEEPER = Statement(
    "deeper",
    "the result can be generalised to deeper rectified networks",
    "stated",
    "a trained LeNet-5 on real images: the gradient's norm exceeds a thousand times its value at the network",
    "it does not",
    Range(low=1000),
    kind="identity",
)


@dataclass(frozen=True, kw_only=True)
class Lipschitz(Config):
    """A network of one hidden layer on random data, and LeNet-5 on images."""

    hidden: int = 20
    """Width of the hidden layer."""
    samples: int = 200
    """Data points."""
    smallest: float = 1e-5
    """The smallest α."""
    steps: int = 500
    """Training steps of LeNet-5."""


def run(config: Lipschitz, run: Run) -> Iterator[Ruling]:
    """Follow α towards 0 at the same function."""
    import torch
    from torch import nn

    from spiritlevel import charts
    from spiritlevel.papers import networks as models
    from spiritlevel.papers.training import Job, Recipe
    from spiritlevel.transforms import rescale_layers, scaling_groups

    def gradients(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        found = torch.autograd.grad(loss, list(model.parameters()))
        return {name: float(g.norm()) for (name, _), g in zip(model.named_parameters(), found, strict=True)}

    def norm(parts: dict[str, float]) -> float:
        return sum(part**2 for part in parts.values()) ** 0.5

    generator = torch.Generator().manual_seed(config.seed)
    inputs = torch.randn(config.samples, 10, dtype=torch.float64, generator=generator)
    targets = torch.randint(3, (config.samples,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        first, second = nn.Linear(10, config.hidden, bias=False), nn.Linear(config.hidden, 3, bias=False)
        small = nn.Sequential(first, nn.ReLU(), second).double()
    alphas = torch.logspace(0.5, float(torch.log10(torch.tensor(config.smallest))), 21, dtype=torch.float64).tolist()
    start, rows, error, moved_outputs = gradients(small, inputs, targets), [], 0.0, 0.0
    for alpha in alphas:
        moved = rescale_layers(small, {"0": alpha, "2": 1 / alpha}, data=(inputs, targets))
        moved_outputs = max(moved_outputs, moved.certificate.relative_difference)
        found = norm(gradients(moved.model, inputs, targets))
        expected = ((start["0.weight"] / alpha) ** 2 + (start["2.weight"] * alpha) ** 2) ** 0.5
        error = max(error, abs(found / expected - 1))
        rows.append({"α": alpha, "gradient norm": found, "network": "one hidden layer"})
    norms = [row["gradient norm"] for row in rows]
    rate = norms[-1] / norms[-2] / (alphas[-2] / alphas[-1])

    job = Job(network="lenet5", data="fashion-mini", recipe=Recipe(lr=0.1, steps=config.steps), seed=config.seed)
    trained = run.train(job)
    lenet, (images, labels) = trained.model().double(), trained.train
    images, labels = images[: config.samples].double(), labels[: config.samples]
    group = scaling_groups(lenet, data=(images, labels))[0]
    for alpha in alphas:
        moved = rescale_layers(lenet, group.factors(alpha), data=(images, labels))
        moved_outputs = max(moved_outputs, moved.certificate.relative_difference)
        found = norm(gradients(moved.model, images, labels))
        rows.append({"α": alpha, "gradient norm": found, "network": f"LeNet-5 ({models.count(lenet):,} parameters)"})
    frame = run.table("gradients", rows)
    title = "The gradient at the same function, along rescalings"
    chart = charts.lines(frame, "α", "gradient norm", series="network", log_x=True, log_y=True, title=title)
    run.chart("gradients", chart)

    growth = rows[-1]["gradient norm"] / norm(gradients(lenet, images, labels))
    yield FORMULA.judge(error)
    yield DIVERGES.judge(
        rate,
        remark=f"The last step's growth / (1/α); norm {norms[-1]:.3g} at α = {alphas[-1]:.2g}, {norm(start):.3g} at 1.",
    )
    yield LOSS.judge(moved_outputs)
    yield DEEPER.judge(growth, remark="Norm at the smallest α / at 1.")


STUDY = Study(
    name="lipschitz",
    title="No Lipschitz constant: the gradient grows without bound at the same function",
    source="B, C",
    config=Lipschitz,
    statements=(FORMULA, DIVERGES, LOSS, DEEPER),
    run=run,
    scales={"smoke": {"steps": 20, "samples": 50}},
    seeds={},
    revision=2,
)
