"""The loss along a change of the weights: its expansion for every sample, the way itself, and the role of chance.

With δ the change, a sample's loss is ℓ(θ+tδ) = ℓ + t·g·δ + t²·½δᵀHδ + …; both terms follow from the derivatives of
the sample's outputs along δ (mathematics 12.1). Nothing here knows what kind of change it is.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiritlevel.answers.surface import MovingStatistics
from spiritlevel.binding.losses import CallableLoss
from spiritlevel.binding.losses.base import Decisions
from spiritlevel.binding.parameters import Params
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.measures import Setting
from spiritlevel.operators.products import hessian_product, loss_gradient
from spiritlevel.results import SampleTraces
from spiritlevel.results.quantiles import student
from spiritlevel.samples.margins import share_right
from spiritlevel.samples.probing import differentiator, form_along, generator_of

PARTS = 8  # of the way
HALF = PARTS // 2
_PROBES = 8  # of the matrix that says how a random change spreads


class Way:
    """From the parameters of a model to changed ones: what moves, by how much, and how to get there.

    Only what moves counts as a parameter, buffers such as running statistics among them.
    """

    def __init__(self, setting: Setting, after: Params) -> None:
        problem = setting.problem
        here = {**problem.params, **problem.constants}
        moving = [name for name, value in after.items() if not torch.equal(value, here[name])] or list(after)
        self.setting, self.problem = setting, copy.copy(problem)
        self.problem.params = {name: here[name] for name in moving}
        self.problem.constants = {name: tensor for name, tensor in here.items() if name not in self.problem.params}
        self.after = {name: after[name] for name in moving}
        self.delta = self.between(self.after)
        self.statistics = any(name not in problem.params for name in moving)
        self._differentiate: Callable[..., Any] | None = None

    def between(self, after: Params) -> Params:
        """How far each tensor that moves is from other values of it."""
        return {name: after[name] - tensor for name, tensor in self.problem.params.items()}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The model ready to be measured, with derivatives in what moves."""
        with self.problem.active(), MovingStatistics() if self.statistics else contextlib.nullcontext():
            yield

    def point(self, t: float, delta: Params | None = None) -> Params:
        """θ + tδ; at the end the changed values themselves, not their rounded sum."""
        if delta is None and t == 1:
            return self.after
        delta = self.delta if delta is None else delta
        return {name: tensor + t * delta[name] for name, tensor in self.problem.params.items()}

    def alone(self, name: str) -> Params:
        """The changed values of one tensor, and the others as they are."""
        return {**self.problem.params, name: self.after[name]}

    def along(self, inputs: Any, delta: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of a batch and their first and second derivative along δ."""
        if self._differentiate is None:
            self._differentiate, _ = differentiator(self.problem, inputs, self.setting.seed)
        outputs, first, second = self._differentiate(self.problem, inputs, delta)
        return outputs, first, second

    def losses(self, params: Params, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and the loss of every sample, in float64 as far as the outputs allow."""
        with torch.no_grad():
            outputs = self.problem.outputs(params, inputs)
            return outputs, exact_losses(self.problem.loss, outputs, targets)

    @property
    def flat(self) -> Tensor:
        """δ for all parameters that the setting measures, laid end to end."""
        return laid_out(self.setting, self.delta)


def laid_out(setting: Setting, parts: Params) -> Tensor:
    """A vector over all measured parameters, 0 where there is no part."""
    pieces = [parts.get(name, torch.zeros_like(tensor)) for name, tensor in setting.problem.params.items()]
    return torch.cat([piece.reshape(-1).to(setting.theta) for piece in pieces])


def exact_losses(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """ℓ of every sample, float64; of our own losses right to the rounding of the outputs, however small they are."""
    outputs = outputs if isinstance(loss, CallableLoss) else outputs.double()
    values: Tensor = loss.values(outputs, targets)
    return values.detach().double().cpu()


def reach(steps: Sequence[float], rests: Sequence[float]) -> tuple[float, float]:
    """How far below and above the two terms the end of a change may lie, from what they leave out on the first half.

    `rests` are what is left out, r(t), at `steps` up to ½. Where r keeps its sign and grows at least as t², the last
    two points give its power p, which is kept between 3 and 4; the end is then expected 2^p·r(½) off, and the interval
    reaches to half as much again, and to half of that on the other side. Else nothing is expected: the end may be
    2⁴ times the largest of all r(t)·(½/t)² off, on either side (mathematics 12.1).

    >>> reach([0.25, 0.5], [0.125, 1.0])  # of third order
    (4.0, 12.0)
    """
    half = rests[-1]
    power = 0.0
    if all(rest * half > 0 for rest in rests):
        power = math.log(half / rests[-2]) / math.log(steps[-1] / steps[-2])
    if power < 2:
        most = max(abs(rest) * (0.5 / step) ** 2 for step, rest in zip(steps, rests, strict=True))
        return 16 * most, 16 * most
    expected = 2 ** min(max(power, 3.0), 4.0) * abs(half)
    return (0.5 * expected, 1.5 * expected) if half > 0 else (1.5 * expected, 0.5 * expected)


# ---------------------------------------------------------------- every sample


class Choices(NamedTuple):
    """What a batch decides: the outputs of each choice in float64, its class, and the sample that makes it."""

    logits: Tensor
    top: Tensor
    sample: Tensor
    right: Tensor

    def gap(self, logits: Tensor) -> Tensor:
        """How far the class of each choice lies above the best of the others, in these outputs."""
        own = logits.gather(1, self.top[:, None])[:, 0]
        others = logits.scatter(1, self.top[:, None], -math.inf)
        return own - others.max(1).values

    def flipped(self, logits: Tensor) -> Tensor:
        """Which choices have another class in these outputs."""
        return logits.argmax(1) != self.top


def choices(loss: Any, outputs: Tensor, targets: Tensor) -> Choices | None:
    """The choices between classes that a batch makes; None where it makes none."""
    try:
        found: Decisions = loss.decisions(outputs, targets)
    except InputError:
        return None
    assert isinstance(found.logits, Tensor)  # as the outputs are
    logits = found.logits.detach().double().cpu()
    count = len(targets)
    counts = torch.ones(count, dtype=torch.long) if found.counts is None else found.counts.cpu()
    sample = torch.arange(count).repeat_interleave(counts)
    return Choices(logits, logits.argmax(1), sample, share_right(found).double().cpu())


def again(loss: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs of the same choices elsewhere, float64."""
    logits: Tensor = loss.decisions(outputs, targets).logits
    return logits.detach().double().cpu()


def per_sample(values: Tensor, sample: Tensor, count: int, least: bool = False) -> Tensor:
    """The sum of what belongs to each sample, or the least of it."""
    if least:
        return torch.full((count,), math.inf, dtype=torch.float64).scatter_reduce(0, sample, values, "amin")
    return torch.zeros(count, dtype=torch.float64).index_add_(0, sample, values.double())


def expanded(way: Way, points: Sequence[float]) -> dict[str, Tensor]:
    """Columns of all samples: the two terms, the losses on the way (N, points), and what happens to their choices."""
    batches: list[dict[str, Tensor]] = []
    with way.active():
        for inputs, targets in way.setting.each():
            batches.append(_expanded(way, points, inputs, targets))
    names = [name for name in batches[0] if all(name in batch for batch in batches)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}


def _expanded(way: Way, points: Sequence[float], inputs: Any, targets: Tensor) -> dict[str, Tensor]:
    problem, loss, count = way.problem, way.problem.loss, len(targets)
    outputs, first, second = way.along(inputs, way.delta)
    found = {
        "slope": loss.slope_along(outputs, targets, first).detach().cpu(),
        "curvature": 0.5 * form_along(problem, (outputs, first, second), targets),
        "size": outputs.detach().double().reshape(count, -1).square().mean(1).cpu(),
    }
    chosen = choices(loss, outputs, targets)
    losses = []
    for t in points:
        there, values = way.losses(way.point(t), inputs, targets)
        losses.append(values)
        if chosen is None:
            continue
        if t == 0.5:
            found |= _of_choices(chosen, loss, (outputs, first, there), targets)
        if t == 1:
            logits = again(loss, there, targets)
            found["flips_measured"] = per_sample(chosen.flipped(logits), chosen.sample, count)
            found["right_after"] = share_right(loss.decisions(there, targets)).double().cpu()
            if len(chosen.top) == count:
                found["after"] = logits.argmax(1)
    return {**found, "losses": torch.stack(losses, 1)}


def _of_choices(
    chosen: Choices, loss: Any, derivatives: tuple[Tensor, Tensor, Tensor], targets: Tensor
) -> dict[str, Tensor]:
    """Gaps, flips of the linearised outputs, and which of these half of the change leaves in doubt."""
    outputs, first, half = (item.detach().double() for item in derivatives)
    count = len(targets)
    linear = again(loss, outputs + first, targets)
    beyond = again(loss, outputs + first + 4 * (half - outputs - 0.5 * first), targets)  # a second order term
    gap = chosen.gap(linear)
    doubt = (chosen.gap(beyond) - gap).abs()
    flips = chosen.flipped(linear)
    values = {
        "flips_predicted": flips,
        "flips_sure": flips & (gap + doubt < 0),
        "flips_possible": flips | (gap - doubt < 0),
    }
    found = {name: per_sample(value, chosen.sample, count) for name, value in values.items()}
    found["gap"] = per_sample(chosen.gap(chosen.logits), chosen.sample, count, least=True)
    found["linearised_gap"] = per_sample(gap, chosen.sample, count, least=True)
    found["decisions"] = per_sample(torch.ones_like(gap), chosen.sample, count)
    found["right"] = chosen.right
    if len(chosen.top) == count:
        found["before"], found["linearised"] = chosen.top, linear.argmax(1)
        found["label"] = targets.reshape(count, -1)[:, 0].long().cpu()
    return found


def outcome(way: Way, setting: Setting) -> dict[str, Tensor]:
    """Columns of all samples of a setting before and after the change, by two forward passes."""
    columns: dict[str, list[Tensor]] = {}
    loss = way.problem.loss
    with way.active():
        for inputs, targets in setting.each():
            before, at_first = way.losses(way.problem.params, inputs, targets)
            after, at_last = way.losses(way.after, inputs, targets)
            found = {"before": at_first, "after": at_last}
            chosen = choices(loss, before, targets)
            if chosen is not None:
                flips = per_sample(chosen.flipped(again(loss, after, targets)), chosen.sample, len(targets))
                found |= {"flips_measured": flips, "right": chosen.right}
                found["right_after"] = share_right(loss.decisions(after, targets)).double().cpu()
                found["decisions"] = torch.bincount(chosen.sample, minlength=len(targets)).double()
            for name, column in found.items():
                columns.setdefault(name, []).append(column)
    return {name: torch.cat(parts) for name, parts in columns.items()}


# ---------------------------------------------------------------- every layer


class Layers(NamedTuple):
    """For each tensor that moves: g·δ, the matrix δ_lᵀHδ_m, and the change of the mean loss if it alone moves."""

    names: list[str]
    slopes: Tensor
    products: Tensor
    measured: Tensor


def by_layer(way: Way, measure: bool, progress: Callable[[str, int, int], None]) -> Layers:
    """Each layer by itself: one product with H per layer, and one forward pass if it is to be measured."""
    names, params = list(way.problem.params), way.problem.params
    slopes = torch.zeros(len(names), dtype=torch.float64)
    measured = rises_alone(way) if measure else torch.zeros_like(slopes)
    products = torch.zeros(len(names), len(names), dtype=torch.float64)
    count = way.setting.count
    with way.active():
        for inputs, targets in way.setting.each():
            gradient = loss_gradient(way.problem, params, inputs, targets)
            for i, name in enumerate(names):
                progress(f"layer {name}", i, len(names))
                slopes[i] += _inner(gradient[name], way.delta[name])
                only = {key: way.delta[key] if key == name else torch.zeros_like(params[key]) for key in names}
                product = hessian_product(way.problem, only, params, inputs, targets)
                products[i] += torch.tensor(
                    [_inner(product[key], way.delta[key]) for key in names], dtype=torch.float64
                )
    return Layers(names, slopes / count, (products + products.T) / (2 * count), measured)


def rises_alone(way: Way) -> Tensor:
    """How much the mean loss rises if one tensor moves and the others stay: one forward pass for each."""
    names, params = list(way.problem.params), way.problem.params
    rises = torch.zeros(len(names), dtype=torch.float64)
    with way.active():
        for inputs, targets in way.setting.each():
            _, here = way.losses(params, inputs, targets)
            for i, name in enumerate(names):
                rises[i] += (way.losses(way.alone(name), inputs, targets)[1] - here).sum()
    return rises / way.setting.count


def _inner(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() * b.double()).sum())


# ---------------------------------------------------------------- random changes


class Spread(NamedTuple):
    """What chance makes of a random change δ of mean 0.

    `means` are every sample's mean change of the loss, `exact` whether without error; `below` and `above` the distance
    of the 95% limits for one draw; `rest` how far higher orders may move the mean; `flips` of each draw, by sample.
    """

    means: Tensor
    exact: bool
    stderr: float
    below: float
    above: float
    rest: tuple[float, float]
    flips: Tensor | None


def spread(way: Way, deviation: Params, draws: Sequence[Params], means: Tensor | None) -> Spread:
    """The distribution of L(θ+δ) − L over draws of δ to second order, and what half of some draws says about the rest.

    X = a·z + ½zᵀAz with a = Σ^½g and A = Σ^½HΣ^½ has the mean ½Tr A, the variance a·a + ½Tr A² and the third cumulant
    3aᵀAa + Tr A³; its limits are those of a Pearson curve of type III with these (mathematics 12.2). `means` are the
    samples' ½Tr A where they are known exactly.
    """
    from scipy import stats  # 0.3 s to import

    setting = way.setting
    scale = laid_out(setting, deviation)
    gradient = _gradient(way)
    variance, third = _cumulants(setting.hessian, scale, scale * laid_out(setting, gradient), setting.seed)
    columns = [_drawn(way, delta) for delta in draws]
    curvatures = torch.stack([column["curvature"] for column in columns])  # (draws, N)
    stderr = 0.0
    if means is None:
        means = curvatures.mean(0)
        stderr = math.sqrt(float(curvatures.mean(1).var()) / len(draws))
    odd = torch.stack([column["odd"].mean() for column in columns])
    even = [float(torch.stack([column[key].mean() for column in columns]).mean()) for key in ("even, ¼", "even, ½")]
    third_order = 8 * float(odd.square().mean().sqrt())  # its mean over draws is 0
    deviation_of_one = math.sqrt(variance + stderr**2 + third_order**2)
    skew = third / deviation_of_one**3 if deviation_of_one else 0.0
    low, high = stats.pearson3.ppf([0.025, 0.975], skew) * deviation_of_one
    flips = torch.stack([column["flips"] for column in columns]) if "flips" in columns[0] else None
    return Spread(means, not stderr, stderr, -float(low), float(high), reach((0.25, 0.5), even), flips)


def _cumulants(op: Operator, scale: Tensor, slope: Tensor, seed: int) -> tuple[float, float]:
    """Variance and third cumulant of a·z + ½zᵀAz, A = diag(scale) H diag(scale), from products with random signs."""

    def product(vector: Tensor) -> Tensor:
        return scale * (op @ (scale * vector))

    squares, cubes = [], []
    for index in range(_PROBES):
        signs = torch.randint(0, 2, scale.shape, generator=generator_of(seed, 5_000 + index)).to(scale) * 2 - 1
        once = product(signs)
        squares.append(_inner(once, once))
        cubes.append(_inner(once, product(once)))
    second, third = float(np.mean(squares)), float(np.mean(cubes))
    return _inner(slope, slope) + second / 2, 3 * _inner(slope, product(slope)) + third


def _gradient(way: Way) -> Params:
    total = {name: torch.zeros_like(tensor) for name, tensor in way.problem.params.items()}
    with way.active():
        for inputs, targets in way.setting.each():
            for name, part in loss_gradient(way.problem, way.problem.params, inputs, targets).items():
                total[name] += part.detach()
    return {name: tensor / way.setting.count for name, tensor in total.items()}


def _drawn(way: Way, delta: Params) -> dict[str, Tensor]:
    """Of one draw and every sample: the curvature term, what parts of ±δ leave out, flips of the linearised outputs."""
    parts: dict[str, list[Tensor]] = {}
    loss = way.problem.loss
    with way.active():
        for inputs, targets in way.setting.each():
            outputs, first, second = way.along(inputs, delta)
            slope = loss.slope_along(outputs, targets, first).detach().cpu()
            curvature = 0.5 * form_along(way.problem, (outputs, first, second), targets)
            here = exact_losses(loss, outputs, targets)
            at = {t: way.losses(way.point(t, delta), inputs, targets)[1] - here for t in (0.5, -0.5, 0.25, -0.25)}
            found = {
                "curvature": curvature,
                "even, ½": (at[0.5] + at[-0.5]) / 2 - curvature / 4,
                "even, ¼": (at[0.25] + at[-0.25]) / 2 - curvature / 16,
                "odd": (at[0.5] - at[-0.5]) / 2 - slope / 2,
            }
            chosen = choices(loss, outputs, targets)
            if chosen is not None:
                logits = again(loss, outputs.double() + first.double(), targets)
                found["flips"] = per_sample(chosen.flipped(logits), chosen.sample, len(targets))
            for name, column in found.items():
                parts.setdefault(name, []).append(column)
    return {name: torch.cat(columns) for name, columns in parts.items()}


def exact_means(deviation: Params, traces: SampleTraces | None) -> Tensor | None:
    """½ Σ_l σ_l² Tr H_l of every sample, where traces are exact and the noise of each tensor has one size."""
    if traces is None or not all(bool((size == size.reshape(-1)[:1]).all()) for size in deviation.values()):
        return None
    parts = [0.5 * float(size.reshape(-1)[0]) ** 2 * traces.layers[name] for name, size in deviation.items()]
    return torch.stack(parts).sum(0)


def flips_of_one_draw(totals: Tensor) -> tuple[float, float]:
    """How far below and above their mean the flips of one more draw may lie, from those of a few.

    The wider of two laws: Student's t for draws that vary together, and that of independent flips, which also holds
    where hardly any were seen.
    """
    from scipy import stats  # 0.3 s to import

    draws, mean = len(totals), float(totals.mean())
    half = float(totals.std()) * math.sqrt(1 + 1 / draws) * float(student(0.975, draws - 1))
    law = stats.nbinom(float(totals.sum()) + 0.5, draws / (draws + 1))
    return min(mean, max(half, mean - float(law.ppf(0.025)))), max(half, float(law.ppf(0.975)) - mean)
