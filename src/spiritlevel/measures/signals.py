"""Curvature in the outputs of layers and in the inputs, which no symmetry of the parameters can move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.losses import CrossEntropy, Loss, confidence_gap
from spiritlevel.errors import InputError
from spiritlevel.measures.registry import SAME, register
from spiritlevel.measures.sampling import Sampling, mean_of
from spiritlevel.measures.setting import Setting, as_classes
from spiritlevel.results import Estimate, figure
from spiritlevel.statistics.subsets import SubsetError, by_jackknife, groups
from spiritlevel.watching.signals import Signal, Signals

_FEW = 64  # samples from which the mean of a layer's output is guessed

# ---------------------------------------------------------------- the outputs of layers


@dataclass
class _Moments:
    """Sums over the places of a layer's output z: of z and zzᵀ about an origin, and of Σ_j d_j ssᵀ, s its slopes.

    `samples` is the number of samples that the places belong to.
    """

    origin: Tensor
    total: Tensor
    squares: Tensor
    slopes: Tensor
    places: int = 0
    samples: int = 0

    @classmethod
    def empty(cls, origin: Tensor) -> _Moments:
        square = origin.new_zeros(len(origin), len(origin))
        return cls(origin, torch.zeros_like(origin), square, square.clone())

    def plus(self, other: _Moments, sign: int = 1) -> _Moments:
        """The sums over the places of both, which share an origin; with sign −1, without those of the other."""
        return _Moments(
            self.origin,
            self.total + sign * other.total,
            self.squares + sign * other.squares,
            self.slopes + sign * other.slopes,
            self.places + sign * other.places,
            self.samples + sign * other.samples,
        )

    @property
    def covariance(self) -> Tensor:
        """C, of the channels over all places."""
        mean = self.total / self.places
        return self.squares / self.places - torch.outer(mean, mean)

    @property
    def curvature(self) -> Tensor:
        """G, the Gauss-Newton matrix in z, added up over the places of a sample; the mean over samples."""
        return self.slopes / self.samples


def _moments(setting: Setting, origins: list[Tensor] | None = None) -> list[_Moments]:
    """For every layer in the order in which they run: one forward pass, and a backward pass for each factor."""
    problem = setting.problem
    if setting.batch_norm == "batch":
        raise InputError("with batch_norm='batch', layers' outputs depend on the whole batch; use batch_norm='eval'.")
    if not problem.loss.closed_form:
        raise InputError("the Gauss-Newton matrix in the layers' outputs needs a loss that offers its output factors.")
    with setting.ranks.together(), problem.active(), torch.enable_grad():
        found = [_Moments.empty(origin) for origin in origins or _origins(setting)]
        for _, inputs, targets in setting.mine():
            with Signals(problem) as signals:
                outputs = problem.outputs(problem.params, inputs)
            if [signal.channels for signal in signals.found] != [len(layer.origin) for layer in found]:
                raise InputError("the layers of this network do not run the same way for all samples.")
            _add(found, signals.found, problem.loss, outputs, targets)
    for layer in found:
        counts = torch.tensor([layer.places, layer.samples])
        setting.ranks.add([layer.total, layer.squares, layer.slopes, counts])
        layer.places, layer.samples = counts.tolist()
    return found


def _origins(setting: Setting) -> list[Tensor]:
    """A point near the mean of every layer's output, relative to which sums are taken so that no digits cancel."""
    with Signals(setting.problem) as watch:
        setting.problem.outputs(setting.problem.params, setting.first(_FEW)[0])
    signals = watch.found
    if not signals:
        raise InputError("the network has no linear layer or convolution whose output could be disturbed.")
    size = sum(3 * 8 * signal.channels**2 for signal in signals)
    if size > setting.budget():
        raise InputError(
            f"the covariances of the layers' outputs take {figure(size / 1e9, 3)} GB, more than memory= allows; "
            "allow more."
        )
    return [next(signal.rows(signal.value)).mean(0) for signal in signals]


def _add(found: list[_Moments], signals: list[Signal], loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Add a batch. The weight of a factor goes into its vector, so it does not matter which sample a place is of."""
    for layer, signal in zip(found, signals, strict=True):
        layer.samples += len(outputs)
        for rows in signal.rows(signal.value):
            rows = rows - layer.origin
            layer.places += len(rows)
            layer.total += rows.sum(0)
            layer.squares += rows.T @ rows
    values = [signal.value for signal in signals]
    if values and _is_copy(outputs, values[-1]) and (summed := loss.hessian_sum(outputs, targets)) is not None:
        found[-1].slopes += summed  # the layer's output is the network's: C factors of C numbers would take C³ each
        found, values = found[:-1], values[:-1]
    for weight, vector in loss.factors(outputs.detach(), targets) if values else ():
        vector = vector.reshape(len(outputs), -1) * weight.sqrt()[:, None]
        slopes = torch.autograd.grad(
            outputs, values, vector.reshape(outputs.shape).to(outputs), retain_graph=True, allow_unused=True
        )
        for layer, signal, slope in zip(found, signals[: len(found)], slopes, strict=True):
            for rows in () if slope is None else signal.rows(slope):
                layer.slopes += rows.T @ rows


def _is_copy(outputs: Tensor, value: Tensor) -> bool:
    """Whether the outputs are nothing but a copy of a value, such as the watch makes."""
    made = outputs.grad_fn
    if made is None or value.grad_fn is None or made.name() != "CloneBackward0" or outputs.shape != value.shape:
        return False
    return made.next_functions[0] == (value.grad_fn, value.output_nr)


def _of_all(setting: Setting) -> list[_Moments]:
    return setting.once("moments of signals", lambda: _moments(setting))


def _without_groups(statistic: Callable[[list[_Moments]], float]) -> Sampling:
    """From the sums without each of ten groups of samples, which takes the passes once more for all groups together."""

    def parts(setting: Setting) -> list[list[_Moments]]:
        origins = [layer.origin for layer in _of_all(setting)]
        return [_moments(setting.part(group), origins) for group in groups(setting.count, setting.seed)]

    def limits(setting: Setting, value: float, population: int) -> SubsetError:
        every, without = _of_all(setting), []
        for part in setting.once("moments of signals by groups", lambda: parts(setting)):
            without.append(statistic([one.plus(other, -1) for one, other in zip(every, part, strict=True)]))
        return by_jackknife(value, without, setting.count, population)

    return Sampling("jackknife", limits=limits, repeats=1.0)


def _summed(layers: list[_Moments]) -> float:
    return sum(float((layer.covariance * layer.curvature).sum()) for layer in layers)


def _largest(layers: list[_Moments]) -> float:
    """The largest eigenvalue of √C G √C, which is that of CG, over all layers."""
    found = []
    for layer in layers:
        values, vectors = torch.linalg.eigh(layer.covariance)
        root = vectors * values.clamp_min(0).sqrt()
        found.append(float(torch.linalg.eigvalsh(root.T @ layer.curvature @ root)[-1]))
    return max(found)


_INVARIANT = "the invariant metric of da Silva, Dangel & Oore 2025, arXiv:2505.05409, taken from the data"


@register(
    "signal_sharpness",
    "curvature of the loss when every layer's output gets noise with that output's own covariance",
    "Σ_l E Σ_p Tr(C_l G_lp), C_l the covariance of the output of layer l, G_lp the Gauss-Newton matrix in its place p",
    f"mathematics 8.9; Camuto et al. 2020, arXiv:2007.07368; {_INVARIANT}",
    family="curvature",
    worth="exact",
    cost="backward",
    passes=lambda setting: 3.0 * setting.classes,
    sampling=_without_groups(_summed),
    invariant_to=SAME,
)
def _signal_sharpness(setting: Setting) -> Estimate:
    """½σ² times this is the mean rise of the loss to second order, by Gauss-Newton, under noise of covariance σ²C_l.

    For cross entropy that is the Kullback–Leibler divergence between the probabilities before and after. A symmetry
    maps the output of a layer by an affine map with linear part M, so that C becomes MCMᵀ and G becomes M⁻ᵀGM⁻¹: the
    trace of CG stays. Proved for all symmetries, singly and in sequence; tested in float64 with matrices of
    condition 100, where rounding moved it by 1e-13. How the network is cut into layers matters.
    """
    return Estimate(_summed(_of_all(setting)), seed=setting.seed)


@register(
    "signal_sharpness_max",
    "signal_sharpness along the worst direction of the worst layer",
    "max_l λ₁(C_l G_l), G_l = E Σ_p G_lp",
    f"mathematics 8.9; {_INVARIANT}",
    family="curvature",
    worth="exact",
    cost="backward",
    passes=lambda setting: 3.0 * setting.classes,
    sampling=_without_groups(_largest),
    invariant_to=SAME,
)
def _signal_sharpness_max(setting: Setting) -> Estimate:
    """Under a symmetry CG becomes M(CG)M⁻¹, which has the same eigenvalues: proved and tested as `signal_sharpness`."""
    return Estimate(_largest(_of_all(setting)), seed=setting.seed)


# ---------------------------------------------------------------- probabilities


def _gaps(setting: Setting) -> Tensor:
    """1 − ΣS² of every sample."""

    def find() -> Tensor:
        problem = setting.problem
        return setting.of_samples(
            lambda inputs, targets: confidence_gap(
                as_classes(problem, problem.outputs(problem.params, inputs), targets)[0]
            )
        )

    return setting.once("confidence gaps", find)


@register(
    "mean_confidence_gap",
    "mean trace of the Hessian of cross entropy in the logits: how far the probabilities are from certainty",
    "E (1−ΣS²)",
    "paper A, Proposition 3.1, without the inputs",
    family="curvature",
    worth="exact",
    cost="forward",
    passes=1,
    sampling=mean_of(_gaps),
    in_shards=True,
    invariant_to=SAME,
)
def _mean_confidence_gap(setting: Setting) -> Estimate:
    return Estimate(float(_gaps(setting).mean()), seed=setting.seed)


def _sensitivities(setting: Setting) -> Tensor:
    """‖∂S/∂x‖_F of every sample: a backward pass for each class."""
    return setting.once("sensitivities of probabilities", lambda: _find_sensitivities(setting))


def _find_sensitivities(setting: Setting) -> Tensor:
    problem = setting.problem
    if setting.batch_norm == "batch":
        raise InputError("with batch_norm='batch', outputs depend on the inputs of other samples; use 'eval'.")

    @torch.enable_grad()
    def sizes(inputs: Any, targets: Tensor) -> Tensor:
        if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
            raise InputError("input_sensitivity needs inputs that are one tensor of floats.")
        points = inputs.detach().requires_grad_()
        logits, labels = as_classes(problem, problem.outputs(problem.params, points), targets)
        jacobian = CrossEntropy().hessian(logits.detach(), labels)  # ∂S/∂φ, right at tiny probabilities
        size = jacobian.abs().amax((1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
        squares = torch.zeros(len(labels), dtype=torch.float64)
        for rows in (jacobian / size[:, None, None]).unbind(1):  # of order 1, so that all digits are kept
            (slope,) = torch.autograd.grad(logits, points, rows.to(logits), retain_graph=True)
            squares += slope.double().flatten(1).square().sum(1).cpu()
        return size.cpu() * squares.sqrt()

    return setting.of_samples(sizes)


@register(
    "input_sensitivity",
    "mean size of the derivative of the probabilities with respect to the inputs",
    "E ‖∂S/∂x‖_F",
    "Novak, Bahri, Abolafia, Pennington & Sohl-Dickstein 2018, arXiv:1802.08760",
    family="curvature",
    worth="exact",
    cost="backward",
    passes=lambda setting: 1.0 + 2.0 * setting.classes,
    sampling=mean_of(_sensitivities),
    invariant_to=SAME,
)
def _input_sensitivity(setting: Setting) -> Estimate:
    """A property of the function alone: that no symmetry moves it is proved."""
    return Estimate(float(_sensitivities(setting).mean()), seed=setting.seed)
