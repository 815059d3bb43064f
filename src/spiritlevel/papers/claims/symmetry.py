"""Two small networks that between them have every symmetry, and how a measure behaves under each.

Everything is dense: the Hessian of some two hundred parameters by automatic differentiation, nothing estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from spiritlevel import transforms
from spiritlevel.binding.losses import aceht
from spiritlevel.papers.claims.tools import Rng, cross_entropy, dense, generator, normal
from spiritlevel.results import SYMMETRIES
from spiritlevel.samples.margins import margin_bound, signed_margin
from spiritlevel.statistics.correlation import skewness

KEPT = 1e-6  # a value whose relative change under a symmetry is below this has stayed
HESSIAN_STAYS = {"shift_logits", "permute_units"}
"""What leaves the Hessian unchanged, except for the order of its rows."""


class Classifier(nn.Module):
    """One block of a transformer with RMS norms and a gated layer, and a head in two factors."""

    def __init__(self, width: int = 4, heads: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(3, width)
        self.before, self.between, self.behind = (nn.RMSNorm(width) for _ in range(3))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 3), nn.Linear(width, 3), nn.Linear(3, width)
        self.low, self.head = nn.Linear(width, 2, bias=False), nn.Linear(2, classes)

    def attend(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attend(self.before(x))
        y = self.between(x)
        x = x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))
        return self.head(self.low(self.behind(x).mean(1)))


def _plain() -> nn.Module:
    first = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def _drawn(model: nn.Module, rng: Rng) -> nn.Module:
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(normal(rng, *parameter.shape) * 0.7 + (parameter.ndim == 1) * 0.5)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(normal(rng, *buffer.shape).abs() + 0.5)
    return model


class Look(NamedTuple):
    """What measures see of a network: inputs, labels, outputs, parameters, and derivatives with respect to both."""

    x: Tensor
    y: Tensor
    outputs: Tensor
    theta: Tensor
    hessian: Tensor
    slopes: Tensor  # ∂φ/∂x, (N, C, numbers of an input)

    @classmethod
    def at(cls, model: nn.Module, x: Tensor, y: Tensor) -> Look:
        params = {name: p.detach() for name, p in model.named_parameters()}
        theta = torch.cat([tensor.reshape(-1) for tensor in params.values()])

        def split(flat: Tensor) -> dict[str, Tensor]:
            parts = flat.split([tensor.numel() for tensor in params.values()])
            return {name: part.reshape(params[name].shape) for name, part in zip(params, parts, strict=True)}

        outputs = functional_call(model, params, (x,))
        hessian = dense(lambda flat: cross_entropy(functional_call(model, split(flat), (x,)), y), theta)
        slopes = vmap(jacrev(lambda one: functional_call(model, params, (one[None],))[0]))(x)
        return cls(x.flatten(1), y, outputs, theta, hessian, slopes.detach().flatten(2))


class Pair(NamedTuple):
    """A symmetry, and a network before and after it."""

    symmetry: str
    before: Look
    after: Look


@lru_cache(maxsize=4)
def pairs(seed: int) -> tuple[Pair, ...]:
    """Every symmetry, applied to a network that has it; `InputError` if neither network has one of them."""
    rng, found = generator(seed), []
    plain, deep = _drawn(_plain(), rng), _drawn(Classifier(), rng)
    for model, x, names in ((plain, normal(rng, 12, 3), SYMMETRIES[:5]), (deep, normal(rng, 8, 3, 3), SYMMETRIES[5:])):
        y = model(x).detach().argmax(1)
        y[::4] = (y[::4] + 1) % 3
        before = Look.at(model, x, y)
        for name, new in _transformed(model, x, names, seed):
            found.append(Pair(name, before, Look.at(new, x, y)))
    return tuple(found)


def _transformed(model: nn.Module, x: Tensor, names: tuple[str, ...], seed: int) -> Iterator[tuple[str, nn.Module]]:
    groups = transforms.scaling_groups(model, data=x) if "rescale_layers" in names else ()
    read = [group for group in groups if group.readers]
    steps: dict[str, Callable[[], Any]] = {
        "rescale_layers": lambda: transforms.rescale_layers(model, read[-1].factors(4.0), data=x),
        "rescale_channels": lambda: transforms.rescale_layers(
            model, read[-1].factors(2.0 ** torch.arange(-1, 3).double()), data=x
        ),
        "scale_before_batchnorm": lambda: transforms.scale_before_batchnorm(model, {"0": 4.0}, data=x),
        "fold_batchnorm": lambda: transforms.fold_batchnorm(model, data=x),
    }
    for name in names:
        apply = steps.get(name, lambda name=name: getattr(transforms, name)(model, data=x, seed=seed))
        yield name, apply().model


def survival(seed: int, measure: Callable[[Look], float]) -> tuple[dict[str, Any], frozenset[str]]:
    """Evidence of how a measure behaves under every symmetry, and the symmetries that it survives."""
    kept, furthest = [], 1.0
    for pair in pairs(seed):
        before, after = measure(pair.before), measure(pair.after)
        if abs(after - before) <= KEPT * abs(before):
            kept.append(pair.symmetry)
        elif before * after > 0:
            furthest = max(furthest, after / before, before / after)
    evidence = {"symmetries": len(SYMMETRIES), "survived": len(kept), "largest factor": furthest}
    return evidence, frozenset(kept)


# ---------------------------------------------------------------- the measures of the papers


def trace(look: Look) -> float:
    """Tr H."""
    return float(look.hessian.trace())


def largest(look: Look) -> float:
    """λ₁, which paper C calls the spectral norm."""
    return float(torch.linalg.eigvalsh(look.hessian)[-1])


def frobenius(look: Look) -> float:
    """√(Tr H²)."""
    return float(look.hessian.norm())


def log_volume(look: Look) -> float:
    """Logarithm of the product of the five largest eigenvalues."""
    return float(torch.linalg.eigvalsh(look.hessian)[-5:].log().sum())


def box_bound(look: Look) -> float:
    """κλ₁, which bounds the rise of the loss within the box of Keskar et al., ε = 1e-3."""
    return largest(look) * 0.5e-6 * float((look.theta.abs() + 1).square().sum()) / (1 + _loss(look))


def _loss(look: Look) -> float:
    return float(cross_entropy(look.outputs, look.y))


def weight_norm(look: Look) -> float:
    """‖θ‖."""
    return float(look.theta.norm())


def mean_aceht(look: Look) -> float:
    """E (|x|² + 1)(1 − ΣS²)."""
    return float(aceht(look.x, look.outputs).mean())


def mean_bound(look: Look) -> float:
    """E (|x|² + 1)(1 − γ²), γ the margin after the softmax."""
    return float(margin_bound(look.x, look.outputs, look.y).mean())


def mean_margin(look: Look) -> float:
    """E Δ, of the outputs."""
    return float(signed_margin(look.outputs, look.y).mean())


def margin_skewness(look: Look) -> float:
    """E ((Δ − μ)/σ)³."""
    return skewness(signed_margin(look.outputs, look.y))


def distance(look: Look) -> float:
    """The mean linearised distance of an input to the decision boundary."""
    rows = torch.arange(len(look.y))
    gaps = look.outputs[rows, look.y][:, None] - look.outputs
    sizes = (look.slopes[rows, look.y][:, None] - look.slopes).norm(dim=2)
    others = torch.ones_like(gaps, dtype=torch.bool).scatter(1, look.y[:, None], False)
    return float((gaps / sizes.clamp_min(1e-300)).where(others, torch.inf).amin(1).mean())
