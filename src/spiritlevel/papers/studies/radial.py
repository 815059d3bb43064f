"""Paper B, section A and Fig. 1: radial maps reorder minima by flatness and change nothing outside a ball."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spiritlevel.errors import InputError
from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

LOCAL = Statement(
    "local",
    "the map has an effect only inside the ball of radius δ",
    "only the coloured area moves (Fig. 1)",
    "no grid point outside the ball moves at all, and every one inside (except the centre) does",
    "one outside moves, or one inside does not",
    Range(0, 0),
    kind="identity",
)
BIJECTION = Statement(
    "bijection",
    "g⁻¹ is a bijection, so every function of θ is one of η",
    "stated",
    "g(g⁻¹(θ)) returns every grid point to 1e-12",
    "it does not",
    Range(high=1e-12),
    kind="identity",
)
FACTOR = Statement(
    "factor",
    "the Hessian at the centre becomes (r̂/ρ)² times what it was",
    "(r̂/ρ)² (by the chain rule)",
    "the largest relative error over both minima and all factors is below 1e-9",
    "it is not",
    Range(high=1e-9),
    kind="identity",
)
TOY = Statement(
    "two minima",
    "the ranking of minima by flatness can be perturbed arbitrarily",
    "stated",
    "the flatter of two minima of a surface in the plane becomes the sharper one, the other keeping its Hessian",
    "it stays the flatter one, or the other changes",
    Range(low=1.0),
    kind="identity",
)
NETWORKS = Statement(
    "two networks",
    "the same for minima of a network's loss",
    "stated",
    "of two trained networks the flatter becomes at least twice as sharp as the other, outputs equal to 1e-5 relative, "
    "and the other network lies outside the ball",
    "it does not",
    Range(low=2.0),
    kind="identity",
)


@dataclass(frozen=True, kw_only=True)
class Radial(Config):
    """The ball of Fig. 1, and the two networks that are reordered."""

    delta: float = 1.0
    """Radius δ of the ball."""
    r_hat: float = 0.5
    """Radius r̂ that is mapped to ρ."""
    rho: float = 0.2
    """Radius ρ of the inner ball in the new parameters."""
    points: int = 41
    """Lines of the grid in each direction."""
    steps: int = 2000
    """Training steps of the two networks."""
    samples: int = 1000
    """Training points on which their curvature is measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.rho < self.delta and 0 < self.r_hat < self.delta):
            raise InputError(
                f"radial needs rho and r_hat between 0 and delta={self.delta:g}, got {self.rho:g} and {self.r_hat:g}."
            )


def run(config: Radial, run: Run) -> Iterator[Ruling]:
    """Draw ψ and the grid, then reorder two minima in the plane and two networks."""
    yield from _figure(config, run)
    yield from _plane(config, run)
    yield _networks(config, run)


def _figure(config: Radial, run: Run) -> Iterator[Ruling]:
    import torch

    from spiritlevel import charts
    from spiritlevel.transforms import RadialMap

    def bent(r_hat: float, rho: float) -> Any:
        return RadialMap(torch.zeros(2, dtype=torch.float64), delta=config.delta, rho=rho, r_hat=r_hat)

    radii = torch.linspace(0, 1.5 * config.delta, 151, dtype=torch.float64)
    curves = [
        {"r": float(r), "ψ(r)": float(bent(config.r_hat, rho).inverse(torch.stack([r, 0 * r])).norm()), "ρ": f"{rho:g}"}
        for rho in (config.rho, config.r_hat, 0.8 * config.delta)
        for r in radii
    ]
    title = f"ψ for r̂ = {config.r_hat:g} and δ = {config.delta:g}"
    run.chart("psi", charts.lines(run.table("psi", curves), "r", "ψ(r)", series="ρ", title=title))

    side = torch.linspace(-1.5 * config.delta, 1.5 * config.delta, config.points, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    mapping = bent(config.r_hat, config.rho)
    moved = torch.stack([mapping.inverse(point) for point in grid])
    shape = (config.points, config.points)
    columns = [moved[:, i].reshape(shape) for i in range(2)]
    run.chart("grid", charts.grid(*columns, names=("θ₁", "θ₂"), title="A regular grid under g⁻¹"))

    radius, shift = grid.norm(dim=1), (moved - grid).norm(dim=1)
    outside = float(shift[radius > config.delta].max())
    inside = float(shift[(radius < 0.999 * config.delta) & (radius > 1e-9)].min())
    yield LOCAL.judge(
        outside if inside > 0 else config.delta,  # a point inside that stays is as wrong as one outside that moves
        remark=f"The largest move outside. Inside, the smallest is {inside:.2g}.",
    )
    back = torch.stack([mapping(point) for point in moved])
    error = float((back - grid).abs().max())
    yield BIJECTION.judge(error)


def _plane(config: Radial, run: Run) -> Iterator[Ruling]:
    """Two bowls in the plane; the flatter is stretched until it is the sharper."""
    import torch

    from spiritlevel import charts
    from spiritlevel.transforms import RadialMap

    centres = torch.tensor([[-2.0, 0.0], [2.0, 0.0]], dtype=torch.float64) * config.delta
    shapes = torch.tensor([[[1.0, 0.3], [0.3, 0.5]], [[6.0, -1.0], [-1.0, 4.0]]], dtype=torch.float64)

    def loss(theta: Any) -> Any:
        away = theta - centres
        bowls = torch.einsum("ni,nij,nj->n", away, shapes, away) / 2
        return bowls.prod() / bowls.sum().clamp(min=1e-12)  # near one centre the other bowl's factor goes to 1

    def sharpness(function: Any, at: Any) -> Any:
        return torch.func.jacrev(torch.func.grad(function))(at)

    flat, sharp = centres
    before = [torch.linalg.eigvalsh(sharpness(loss, centre))[-1] for centre in (flat, sharp)]
    rows: list[dict[str, Any]] = []
    worst = 0.0
    for ratio in (1.0, 2.0, 3.0, 5.0, 8.0):
        mapping = RadialMap(flat, delta=config.delta, rho=config.r_hat / ratio, r_hat=config.r_hat)
        hessians = [sharpness(lambda eta, g=mapping: loss(g(eta)), centre) for centre in (flat, sharp)]
        for name, found, old, factor in (
            ("stretched", hessians[0], sharpness(loss, flat), ratio**2),
            ("untouched", hessians[1], sharpness(loss, sharp), 1.0),
        ):
            worst = max(worst, float((found - factor * old).norm() / (factor * old).norm()))
            rows.append({"r̂/ρ": ratio, "spectral norm": float(torch.linalg.eigvalsh(found)[-1]), "minimum": name})
    frame = run.table("two minima", rows)
    title = "Two minima in the plane: only the stretched one changes"
    run.chart("two-minima", charts.lines(frame, "r̂/ρ", "spectral norm", series="minimum", points=True, title=title))
    yield FACTOR.judge(worst)
    after = [row["spectral norm"] for row in rows[-2:]]
    untouched = bool(before[0] < before[1]) and abs(after[1] / float(before[1]) - 1) < 1e-12
    yield TOY.judge(
        after[0] / after[1] if untouched else 0.0,
        remark=f"Ratio of the two spectral norms, {float(before[0] / before[1]):.3g} before.",
    )


def _networks(config: Radial, run: Run) -> Ruling:
    """Two seeds of one network: which is flatter can be chosen."""
    import torch

    from spiritlevel.estimators import eigenvalues
    from spiritlevel.operators.matrices import hessian
    from spiritlevel.papers.training import Job, Recipe
    from spiritlevel.transforms import radial

    recipe = Recipe(lr=0.1, batch_size=128, steps=config.steps)
    trained = [
        run.train(Job(network="lenet5", data="fashion-mini", recipe=recipe, seed=seed))
        for seed in (config.seed, config.seed + 1)
    ]
    inputs, targets = trained[0].train
    sample = (inputs[: config.samples], targets[: config.samples])
    models = [one.model() for one in trained]

    def flat(model: Any) -> Any:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def top(model: Any) -> float:
        return float(eigenvalues(hessian(model, sample), k=1, tol=1e-3, vectors=False, seed=config.seed).values[0])

    def measure() -> dict[str, float]:
        sharpness = [top(model) for model in models]
        low = min(range(2), key=sharpness.__getitem__)
        distance = float((flat(models[0]) - flat(models[1])).norm())
        ratio = max(2.0, (3 * sharpness[1 - low] / sharpness[low]) ** 0.5)
        delta = distance / 2
        moved = radial(models[low], delta=delta, r_hat=delta / 2, rho=delta / 2 / ratio, data=sample)
        return {
            "flatter": sharpness[low],
            "sharper": sharpness[1 - low],
            "flatter, stretched": top(moved.model),
            "r̂/ρ": ratio,
            "distance": distance,
            "δ": delta,
            "output difference": moved.certificate.relative_difference,
        }

    found = run.once("networks", measure)
    run.table("two networks", [found])
    run.report(networks=found)
    result = found["flatter, stretched"] / found["sharper"]
    fine = found["output difference"] < 1e-5 and found["distance"] > found["δ"]
    remark = (
        f"λ₁ of the flatter network {found['flatter']:.4g}, stretched {found['flatter, stretched']:.4g}; of the other "
        f"{found['sharper']:.4g}; r̂/ρ = {found['r̂/ρ']:.3g}."
    )
    return NETWORKS.judge(result if fine else 0.0, remark=remark)


STUDY = Study(
    name="radial",
    title="Radial maps: any minimum can be made the sharper one",
    source="B, A and Fig. 1",
    config=Radial,
    statements=(LOCAL, BIJECTION, FACTOR, TOY, NETWORKS),
    run=run,
    scales={"smoke": {"points": 21, "steps": 30, "samples": 100}},
    seeds={},
)
