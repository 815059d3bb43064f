"""Paper B, section D: Euclidean scores rank models differently in new coordinates; likelihoods and divergences do not.

Every model is a normal mixture. It can be sampled (Earth-mover distance), its density is known in any coordinates
(log-likelihood, divergences), and its posterior mean denoises (mean square error), so one set of models serves all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spiritlevel.errors import needs
from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import Tensor

EUCLIDEAN = ("mean square error", "Earth-mover distance")
CASES = {"constructed": "constructed models", "images": "models of images"}
INVARIANT = ("Kullback–Leibler divergence", "squared Hellinger distance", "log-likelihood")


def _euclidean(score: str, case: str) -> Statement:
    return Statement(
        f"{score}, {case}",
        f"the {score} ranks models differently in other coordinates ({CASES[case]})",
        "very differently (stated)",
        "standardisation, whitening and the nonlinear bijection each reverse more than 5 % of the pairs of models",
        "one of the three reverses fewer",
        Range(low=0.05),
        trained=False,
        limits=(0, 1),
    )


def _invariant(score: str, case: str) -> Statement:
    return Statement(
        f"{score}, {case}",
        f"the ranking by {score} is not perturbed by bijections ({CASES[case]})",
        "not perturbed (stated)",
        "no pair is reversed in any coordinates, and differences between models agree to 1e-8 of their range",
        "a pair is reversed, or a difference changes",
        Range(high=1e-8),
        kind="identity",
    )


STATEMENTS = {
    (score, case): rule(score, case)
    for case in CASES
    for rule, scores in ((_euclidean, EUCLIDEAN), (_invariant, INVARIANT))
    for score in scores
}


@dataclass(frozen=True, kw_only=True)
class InputRepresentation(Config):
    """How many models, and how many points score them."""

    models: int = 24
    """Models to rank in each case."""
    points: int = 300
    """Held-out points, and samples of each model."""
    draws: int = 5000
    """Samples of the target for the divergences."""
    noise: float = 0.5
    """Noise that the models remove, in units of the data's spread."""


def run(config: InputRepresentation, run: Run) -> None:
    """Score all models in four coordinate systems, twice."""
    from spiritlevel import charts

    scores: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        run.progress(f"the {case} case", number, len(CASES))
        scores += run.once(case, lambda case=case: _scores(case, config))  # type: ignore[misc]
    run.table("scores", scores)
    flips = _flips(scores)
    frame = run.table("reversed pairs", flips)
    for case in CASES:
        rows = frame.filter(frame["case"] == case)
        columns = {"score and coordinates": [f"{r['score']}: {r['coordinates']}" for r in rows.to_dicts()]}
        columns["share of pairs reversed"] = rows["reversed"].to_list()
        title = f"How often new coordinates reverse the order of two models ({case})"
        run.chart(
            f"reversed-{case}", charts.bars(columns, "score and coordinates", "share of pairs reversed", title=title)
        )


def judge(flips: list[dict[str, Any]]) -> Iterator[Ruling]:
    """The rulings, from the pairs reversed."""
    for (score, case), statement in STATEMENTS.items():
        rows = [row for row in flips if row["score"] == score and row["case"] == case]
        shares = [row["reversed"] for row in rows]
        listing = ", ".join(f"{row['coordinates']} {row['reversed']:.1%}" for row in rows).replace("%", " %")
        if score in EUCLIDEAN:
            yield statement.judge(
                min(shares),
                remark=f"The smallest share. Pairs reversed: {listing}.",
            )
        else:
            change = max(row["change"] for row in rows)
            yield statement.judge(
                max(*shares, change),
                remark="The share of pairs reversed or the change of a difference, in units of their range.",
            )


def _flips(scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case, score and coordinate system: pairs ordered differently than in the given coordinates."""
    from spiritlevel.papers.coordinates import reversed_pairs

    rows = []
    for score, case in STATEMENTS:
        found = [row for row in scores if row["case"] == case and row["score"] == score]
        by_system = {name: [r["value"] for r in found if r["coordinates"] == name] for name in SYSTEMS}
        given = by_system["given"]
        spread = max(given) - min(given)
        for name, values in by_system.items():
            if name == "given":
                continue
            shift = [after - before for before, after in zip(given, values, strict=True)]
            change = (max(shift) - min(shift)) / spread
            row = {"case": case, "score": score, "coordinates": name}
            rows.append({**row, "reversed": reversed_pairs(given, values), "change": change})
    return rows


class Mixture(NamedTuple):
    """A normal mixture: weights (K,), means (K, d), covariances (K, d, d)."""

    weights: Tensor
    means: Tensor
    covariances: Tensor

    def parts(self, points: Tensor, noise: float = 0.0) -> Tensor:
        """log(w_k N(x; μ_k, Σ_k + σ²I)) for every point and component."""
        import torch

        eye = torch.eye(self.means.shape[1], dtype=points.dtype)
        root = torch.linalg.cholesky(self.covariances + noise**2 * eye)
        away = torch.linalg.solve_triangular(root[None], (points[:, None] - self.means)[..., None], upper=False)
        volume = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * points.shape[1] * math.log(2 * math.pi)
        return self.weights.log() - volume - away.square().sum((-1, -2)) / 2

    def log_density(self, points: Tensor) -> Tensor:
        """Log p(x)."""
        return self.parts(points).logsumexp(1)

    def sample(self, count: int, generator: Any) -> Tensor:
        """Independent points."""
        import torch

        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        normal = torch.randn(count, self.means.shape[1], dtype=self.means.dtype, generator=generator)
        root = torch.linalg.cholesky(self.covariances)[which]
        return self.means[which] + (root @ normal[..., None])[..., 0]

    def denoised(self, noisy: Tensor, noise: float) -> Tensor:
        """The posterior mean of x given x plus normal noise of standard deviation `noise`."""
        import torch

        eye = torch.eye(self.means.shape[1], dtype=noisy.dtype)
        gain = torch.linalg.solve(self.covariances + noise**2 * eye, self.covariances)  # symmetric factors commute
        means = self.means + torch.einsum("nkd,kde->nke", noisy[:, None] - self.means, gain)
        return (self.parts(noisy, noise).softmax(1)[..., None] * means).sum(1)

    def mapped(self, matrix: Tensor, shift: Tensor) -> Mixture:
        """The mixture of Ax + b."""
        return Mixture(self.weights, self.means @ matrix.T + shift, matrix @ self.covariances @ matrix.T)


class Coordinates(NamedTuple):
    """A bijection u(x), and the log-density of a mixture at u, taken in the new coordinates."""

    forward: Callable[[Tensor], Tensor]
    log_density: Callable[[Mixture, Tensor], Tensor]


SYSTEMS = ("given", "standardisation", "whitening", "x + x³/3")


def coordinates(reference: Tensor) -> dict[str, Coordinates]:
    """The four coordinate systems, with the affine ones fitted to reference points."""
    import torch

    from spiritlevel.papers.coordinates import bend, unbend
    from spiritlevel.transforms import standardisation, whitening

    eye = torch.eye(reference.shape[1], dtype=reference.dtype)
    systems = {
        "given": _affine(lambda x: x, eye),
        "standardisation": _affine(standardisation(reference, per="feature"), eye),
        "whitening": _affine(whitening(reference), eye),
    }
    unit = reference.std()

    def bent_density(model: Mixture, u: Tensor) -> Tensor:
        x = unbend(u / unit) * unit
        return model.log_density(x) - (1 + (x / unit).square()).log().sum(1)

    systems["x + x³/3"] = Coordinates(lambda x: bend(x / unit) * unit, bent_density)
    return systems


def _affine(mapping: Any, eye: Tensor) -> Coordinates:
    """An affine map of the transforms as coordinates: its matrix is read from the unit vectors."""
    shift = mapping(0 * eye[:1])[0]
    matrix = (mapping(eye) - shift).T
    return Coordinates(mapping, lambda model, u: model.mapped(matrix, shift).log_density(u))


def _scores(case: str, config: InputRepresentation) -> list[dict[str, Any]]:
    import torch

    from spiritlevel.papers.coordinates import earth_mover

    target, models, held_out = (_constructed if case == "constructed" else _images)(config)
    generator = torch.Generator().manual_seed(config.seed + 1)
    draws = target.sample(config.draws, generator)
    noise = config.noise * float(held_out.std(0).log().mean().exp())
    noisy = held_out + noise * torch.randn(held_out.shape, dtype=held_out.dtype, generator=generator)
    rows = []
    systems = coordinates(draws)
    samples = [model.sample(len(held_out), generator) for model in models]
    repaired = [model.denoised(noisy, noise) for model in models]
    for name, system in systems.items():
        u, points = system.forward(draws), system.forward(held_out)
        truth = system.log_density(target, u)
        for number, model in enumerate(models):
            ratio = system.log_density(model, u) - truth
            values: dict[str, Any] = {
                "mean square error": (points - system.forward(repaired[number])).square().sum(1).mean(),
                "Earth-mover distance": earth_mover(points, system.forward(samples[number])),
                "Kullback–Leibler divergence": -ratio.mean(),
                "squared Hellinger distance": 1 - (ratio / 2).exp().mean(),
                "log-likelihood": system.log_density(model, points).mean(),
            }
            for score, value in values.items():
                rows.append({"case": case, "coordinates": name, "model": number, "score": score, "value": float(value)})
    return rows


def _constructed(config: InputRepresentation) -> tuple[Mixture, list[Mixture], Tensor]:
    """A target with very different spreads, and models each wrong in a direction of its own."""
    import torch

    generator = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    spreads = torch.tensor([10.0, 1.0, 0.1], dtype=torch.float64)
    mixing = torch.eye(3, dtype=torch.float64) + 0.02 * normal(3, 3)
    base = mixing @ torch.diag(spreads.square()) @ mixing.T
    weights = torch.tensor([0.4, 0.6], dtype=torch.float64)
    target = Mixture(weights, normal(2, 3) * spreads, torch.stack([base, 0.5 * base]))
    models = []
    for _ in range(config.models):
        wrong = spreads * 0.5 * normal(3) * (0.7 * normal(3)).exp()
        stretch = torch.diag((0.3 * normal(3)).exp())
        models.append(Mixture(weights, target.means + wrong, stretch @ target.covariances @ stretch))
    return target, models, target.sample(config.points, generator)


def _images(config: InputRepresentation) -> tuple[Mixture, list[Mixture], Tensor]:
    """Fashion-MNIST images as 4 × 4 grey values; mixtures of several sizes and shapes, fitted to few or many images.

    The data's own density is not known: a mixture of ten components fitted to all training images stands for it in the
    divergences. Log-likelihood, mean square error and Earth-mover distance use held-out images.
    """
    import torch

    with needs("a mixture of Gaussians"):
        from sklearn.mixture import GaussianMixture

    from spiritlevel import data

    images = data.load("fashion-mini")

    def features(inputs: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(inputs, 7).flatten(1).double()

    train, test = features(images.train[0]), features(images.test[0])

    def fitted(components: int, kind: str, count: int, seed: int) -> Mixture:
        generator = torch.Generator().manual_seed(seed)
        chosen = train[torch.randperm(len(train), generator=generator)[:count]].numpy()
        found = GaussianMixture(components, covariance_type=kind, reg_covar=1e-4, random_state=seed, max_iter=50).fit(
            chosen
        )
        size = chosen.shape[1]
        covariances = {
            "full": lambda c: torch.from_numpy(c),
            "tied": lambda c: torch.from_numpy(c).expand(components, size, size),
            "diag": lambda c: torch.diag_embed(torch.from_numpy(c)),
            "spherical": lambda c: torch.from_numpy(c)[:, None, None] * torch.eye(size, dtype=torch.float64),
        }[kind](found.covariances_)
        return Mixture(torch.from_numpy(found.weights_), torch.from_numpy(found.means_), covariances.contiguous())

    kinds = itertools.cycle(itertools.product((200, 1000), ("full", "tied", "diag", "spherical"), (1, 2, 4, 8)))
    models = [fitted(k, kind, n, config.seed + i) for i, (n, kind, k) in zip(range(config.models), kinds, strict=False)]
    target = fitted(10, "full", len(train), config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    return target, models, test[torch.randperm(len(test), generator=generator)[: config.points]]


STUDY = Study(
    name="input-representation",
    title="Which scores of a model depend on the coordinates of the data",
    source="B, D",
    config=InputRepresentation,
    statements=tuple(STATEMENTS.values()),
    run=run,
    judge=lambda config, tables: judge(tables("reversed pairs")),
    scales={"smoke": {"models": 8, "points": 60, "draws": 500}},
    seeds={},
)
