"""Losses as functions of the network's outputs, with everything a curvature needs, free of cancellation.

A loss gives each sample's value, its gradient g in the outputs φ, products with its output Hessian A = ∂²ℓ/∂φ², and
A = Σ_j d_j v_j v_jᵀ as *factors*: weights d_j (any size, float64) and vectors v_j (of order 1). Autodiff through a
cross entropy returns half the curvature, or none, once 1 − S_y is below machine epsilon; the forms here use only sums
of positive terms and stay right to rounding at any margin (mathematics 2.2).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.arguments import checked
from spiritlevel.binding.rewrites import Elementary
from spiritlevel.errors import InputError, first_line, is_out_of_memory, named_error, unknown_name

# ---------------------------------------------------------------- safe scalars of the softmax


def softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax S in float64, the index of its top entry, and q = 1 − S_top summed from the other entries."""
    probabilities = torch.softmax(logits.double(), dim=-1)
    top = probabilities.argmax(dim=-1)
    others = probabilities.scatter(-1, top.unsqueeze(-1), 0.0)
    return probabilities, top, others.sum(-1)


def _check_logits(name: str, logits: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(f"{name} needs logits of shape (samples, classes >= 2), got {tuple(logits.shape)}.")


@checked
def confidence_gap(logits: Tensor) -> Tensor:
    """1 − Σ_c S_c², the lack of confidence of a softmax, in float64 and without cancellation.

    With p the entries but the top one and q = Σp it is 2q − q² − Σp² (mathematics 2.2): zero only for a one-hot
    softmax, 1 − 1/C for a uniform one. Cost: O(N·C). Exact to rounding at any margin. Reference: paper A, section 3.1.

    >>> float(confidence_gap(torch.tensor([[40.0, 0.0]])))  # 1 - (S**2).sum() gives 0 here
    8.49670851...e-18
    """
    _check_logits("confidence_gap", logits)
    probabilities, top, q = softmax_parts(logits)
    others = probabilities.scatter(-1, top.unsqueeze(-1), 0.0)
    return 2 * q - q.square() - others.square().sum(-1)


@checked
def aceht(inputs: Tensor, logits: Tensor) -> Tensor:
    """The affine cross-entropy Hessian trace (‖x‖² + 1)(1 − Σ_c S_c²) of every sample.

    For an affine softmax classifier with bias it *is* the trace of the per-sample Hessian, whatever the label; for the
    last layer of any network it is that layer's share, with x the layer's input. Cost: O(N·(d + C)). Exact.
    Reference: paper A, Proposition 3.1.

    >>> aceht(torch.ones(1, 3), torch.zeros(1, 2))
    tensor([2.], dtype=torch.float64)
    """
    _check_logits("aceht", logits)
    count = len(inputs) if inputs.ndim else 0
    if count != len(logits):
        raise InputError(f"aceht needs one input per row of logits, got {count} inputs and {len(logits)} logits.")
    flat = inputs.double().reshape(len(inputs), -1)
    return (flat.square().sum(1) + 1) * confidence_gap(logits)


# ---------------------------------------------------------------- the losses

Factor = tuple[Tensor, Tensor]
"""One term of A: weights d (N,) in float64 and vectors v (N, C) of order 1."""


class Loss(ABC):
    """A per-sample loss ℓ(φ, y) of a network's outputs φ (N, C).

    Losses of a single output also take φ of shape (N,). Gradients, products and vectors are shaped like φ.
    """

    name: ClassVar[str] = ""
    closed_form: ClassVar[bool] = True  # whether `factors` is available
    can_sample: ClassVar[bool] = False  # whether `sampled_factors` is

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        """Raise `InputError` unless outputs and targets, from sample number `start` on, fit this loss."""
        if outputs.ndim != 2:
            raise InputError(
                f"{self.name} needs model outputs of shape (samples, outputs), got {tuple(outputs.shape)}; "
                "flatten them, or pass a loss of your own that returns one value per sample."
            )

    def couples(self, outputs: Tensor, targets: Tensor) -> str:
        """In words, how the loss of a sample depends on the others of its batch; nothing where it does not."""
        return ""

    @abstractmethod
    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """ℓ of every sample, (N,), differentiable."""

    @abstractmethod
    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient ∂ℓ/∂φ, (N, C), float64."""

    @abstractmethod
    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        """A·u of every sample, (N, C), float64, for directions u (N, C)."""

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        """uᵀA u of every sample, (N,), float64."""
        product = self.product(outputs, targets, direction)
        return (direction.double() * product).reshape(len(outputs), -1).sum(1)

    def rank(self, classes: int) -> int:
        """How many factors A has."""
        return classes

    @abstractmethod
    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        """The terms d_j, v_j of A = Σ_j d_j v_j v_jᵀ, one at a time."""

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        """`exact` of the terms as in `factors`, then one random combination Σ_j ±√d_j v_j of all the others.

        `signs` are random ±1, (N, C), independent for every sample, so that d‖vᵀJ‖² of the last term is an unbiased
        estimate of what the others add to the trace.
        """
        raise InputError(f"passes= is for cross_entropy and squared_error; {self.name} is measured without it.")

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A of every sample, (N, C, C), float64."""
        count, size = len(outputs), math.prod(outputs.shape[1:])
        total = outputs.new_zeros((count, size, size), dtype=torch.float64)
        for weight, vector in self.factors(outputs, targets):
            vector = vector.double().reshape(count, size)
            total += weight[:, None, None] * vector[:, :, None] * vector[:, None, :]
        return total

    def _check_exact(self, exact: int, outputs: Tensor) -> None:
        if not 0 <= exact < self.rank(outputs.shape[1]):
            raise InputError(
                f"{self.name} of {outputs.shape[1]} outputs has {self.rank(outputs.shape[1])} factors; "
                f"of those at least one must be left to be sampled, but {exact} are to be exact."
            )


def _class_targets(name: str, outputs: Tensor, targets: Tensor, start: int) -> None:
    classes = outputs.shape[1]
    if targets.is_floating_point() or targets.ndim != 1:
        raise InputError(
            f"{name} needs one integer class per sample, got targets of shape {tuple(targets.shape)} and type "
            f"{str(targets.dtype).removeprefix('torch.')}."
        )
    if targets.shape[0] != outputs.shape[0]:
        raise InputError(f"{name} got {outputs.shape[0]} outputs for {targets.shape[0]} targets.")
    if targets.numel():
        targets = targets.long()  # not all kinds of integers can be compared
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            wrong = high if high >= classes else low
            where = start + int((targets == wrong).nonzero()[0])
            raise InputError(
                f"{name}: target {wrong} of sample {where} is outside the model's {classes} classes "
                f"0 to {classes - 1}; check the labels or the size of the last layer."
            )


class CrossEntropy(Loss):
    """Softmax cross entropy ℓ = −log S_y, with optional class weights and label smoothing.

    The output Hessian is c·A, A = diag(S) − SSᵀ, with c = 1, or the sample's weight; label smoothing leaves it as it
    is. A is eliminated class by class with the top one last (mathematics 2.3): with q_j = Σ_{i≥j} S_i,
    d_j = S_j q_{j+1}/q_j and v_j = e_j − Σ_{i>j} (S_i/q_{j+1}) e_i, only sums of positive numbers.
    """

    name = "cross_entropy"
    can_sample = True

    def __init__(self, weight: Tensor | None = None, label_smoothing: float = 0.0) -> None:
        self.weight = weight
        self.label_smoothing = label_smoothing

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        super().check(outputs, targets, start)
        if outputs.shape[1] < 2:
            raise InputError(
                "cross_entropy needs at least 2 outputs per sample, got 1; "
                "use loss='binary_cross_entropy' for a single logit."
            )
        _class_targets(self.name, outputs, targets, start)
        if self.weight is not None and self.weight.numel() != outputs.shape[1]:
            raise InputError(
                f"the loss has {self.weight.numel()} class weights for a model of {outputs.shape[1]} outputs."
            )

    def _scale(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What multiplies A: 1, or (1−ε)w_y + (ε/C)Σw."""
        if self.weight is None:
            return torch.ones(len(targets), dtype=torch.float64, device=outputs.device)
        weight = self._weights(outputs)
        return (1 - self.label_smoothing) * weight[targets.long()] + self.label_smoothing * weight.mean()

    def _weights(self, outputs: Tensor) -> Tensor:
        if self.weight is None:
            return torch.ones(outputs.shape[1], dtype=torch.float64, device=outputs.device)
        return self.weight.detach().to(outputs.device).double()

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.label_smoothing:
            weight = None if self.weight is None else self.weight.detach().to(outputs)
            return F.cross_entropy(
                outputs, targets.long(), weight=weight, reduction="none", label_smoothing=self.label_smoothing
            )
        label = targets.long()[:, None]
        others = (outputs - outputs.gather(1, label)).scatter(1, label, -math.inf)
        values = F.softplus(others.logsumexp(1), threshold=40)  # log(1 + Σ_{j≠y} exp(φ_j − φ_y)), right if tiny
        return values if self.weight is None else self.weight.detach().to(outputs)[label[:, 0]] * values

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        probabilities = torch.softmax(outputs.double(), 1)
        label = targets.long()[:, None]
        others = probabilities.scatter(1, label, 0.0)
        gradient = others.scatter(1, label, -others.sum(1, keepdim=True))
        if self.weight is None and not self.label_smoothing:
            return gradient
        weight = self._weights(outputs)
        gradient = (1 - self.label_smoothing) * weight[label] * gradient
        return gradient + self.label_smoothing * (weight.mean() * probabilities - weight / len(weight))

    @staticmethod
    def _centred(outputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """S, and the direction minus its mean over S."""
        probabilities, top, _ = softmax_parts(outputs)
        direction = direction.double()
        shifted = direction - direction.gather(1, top[:, None])  # zero at the top class: nothing large cancels
        return probabilities, shifted - (probabilities * shifted).sum(1, keepdim=True)

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        probabilities, centred = self._centred(outputs, direction)
        return self._scale(outputs, targets)[:, None] * probabilities * centred

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        probabilities, centred = self._centred(outputs, direction)
        return self._scale(outputs, targets) * (probabilities * centred.square()).sum(1)

    def rank(self, classes: int) -> int:
        return classes - 1

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        probabilities, top, _ = softmax_parts(outputs)
        top = top[:, None]
        tops = probabilities.gather(1, top)
        weights, after = _elimination(probabilities.scatter(1, top, 0.0), tops)
        weights *= self._scale(outputs, targets)[:, None]
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        for j in range(outputs.shape[1] - 1):
            label = j + (top <= j).long()  # the j-th class but the top one
            later = (classes > label) | (classes == top)
            vector = torch.where(later, -probabilities / after.gather(1, label), 0.0).scatter_(1, label, 1.0)
            yield weights.gather(1, label)[:, 0], vector

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        self._check_exact(exact, outputs)
        probabilities, top, _ = softmax_parts(outputs)
        scale = self._scale(outputs, targets)
        top = top[:, None]
        tops = probabilities.gather(1, top)
        chosen = probabilities.scatter(1, top, -1.0).topk(exact, dim=1).indices
        rest = probabilities.scatter(1, top, 0.0).scatter_(1, chosen, 0.0)
        shares = probabilities.gather(1, chosen)
        # mass that remains after each elimination, again as a sum of positive terms
        remaining = (rest.sum(1, keepdim=True) + tops) + torch.cat(
            [shares[:, 1:].flip(1).cumsum(1).flip(1), torch.zeros_like(tops)], 1
        )
        for step in range(exact):
            label, share, mass = chosen[:, step : step + 1], shares[:, step : step + 1], remaining[:, step : step + 1]
            vector = (probabilities / -mass).scatter_(1, chosen[:, :step], 0.0).scatter_(1, label, 1.0)
            yield scale * (share * mass / (mass + share))[:, 0], vector

        del probabilities  # what follows decides the peak of the memory
        weights, after = _elimination(rest, tops)
        coefficients = weights.sqrt_().mul_(signs)
        size = torch.linalg.vector_norm(coefficients, dim=1, keepdim=True)
        coefficients /= size.clamp_min(torch.finfo(torch.float64).tiny)
        sums = (coefficients / after).cumsum_(1)
        del after
        coefficients[:, 1:] -= rest[:, 1:].mul_(sums[:, :-1])
        yield scale * size[:, 0].square(), coefficients.scatter_(1, top, -tops * sums[:, -1:])


def _elimination(others: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Weights d and the mass q after each class, when the classes of `others` go in order and the top one stays."""
    upto = others.flip(1).cumsum_(1).flip(1).add_(tops)
    after = torch.cat([upto[:, 1:], tops], 1)
    return (others * after).div_(upto), after


class BinaryCrossEntropy(Loss):
    """Logistic loss of a single logit with targets 0 and 1: ∂²ℓ/∂φ² = c·σ(φ)σ(−φ), c the positive weight or 1."""

    name = "binary_cross_entropy"

    def __init__(self, pos_weight: float = 1.0) -> None:
        self.pos_weight = pos_weight

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if outputs.ndim > 2 or (outputs.ndim == 2 and outputs.shape[1] != 1):
            raise InputError(
                f"binary_cross_entropy needs one logit per sample, got outputs of shape {tuple(outputs.shape)}; "
                "use loss='cross_entropy' for several classes."
            )
        if targets.numel() != outputs.shape[0]:
            raise InputError(f"binary_cross_entropy got {outputs.shape[0]} outputs for {targets.numel()} targets.")
        if targets.numel() and not bool(((targets == 0) | (targets == 1)).all()):
            wrong = targets.flatten()[((targets != 0) & (targets != 1)).flatten()][0]
            raise InputError(f"binary_cross_entropy needs targets 0 and 1, got {wrong.item():g}.")

    def _parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """σ(φ), σ(−φ), and 1 for a positive sample, 0 for a negative one."""
        logit = outputs.double()
        return torch.sigmoid(logit), torch.sigmoid(-logit), targets.reshape(outputs.shape).double()

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logit = outputs.reshape(len(outputs))
        positive = targets.reshape(-1).to(logit.dtype)
        # beyond the usual threshold of 20 float64 still sees the curve
        wrong, right = F.softplus(-logit, threshold=40), F.softplus(logit, threshold=40)
        return self.pos_weight * positive * wrong + (1 - positive) * right

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        up, down, positive = self._parts(outputs, targets)
        return (1 - positive) * up - self.pos_weight * positive * down

    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        up, down, positive = self._parts(outputs, targets)
        return (self.pos_weight * positive + 1 - positive) * up * down

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        return self._curvature(outputs, targets) * direction.double().reshape(outputs.shape)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        yield self._curvature(outputs, targets).reshape(-1), torch.ones_like(outputs, dtype=torch.float64)


class SquaredError(Loss):
    """ℓ = ½c‖φ − y‖² with c = 1; integer targets are one-hot encoded. The output Hessian is c·I.

    With `scale=None` it is torch.nn.MSELoss of every sample: c = 2/C, and integer targets are numbers.
    """

    name = "squared_error"
    can_sample = True

    def __init__(self, scale: float | None = 1.0) -> None:
        self.scale = scale

    def _are_classes(self, targets: Tensor) -> bool:
        return self.scale is not None and not targets.is_floating_point()

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        super().check(outputs, targets, start)
        if self._are_classes(targets):
            _class_targets(self.name, outputs, targets, start)
        elif targets.reshape(len(targets), -1).shape != outputs.shape:
            raise InputError(
                f"{'MSELoss' if self.scale is None else 'squared_error'} needs targets like the outputs "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}; integer classes are one-hot encoded by "
                "loss='squared_error'."
            )
        elif not bool(torch.isfinite(targets).all()):
            where = int((~torch.isfinite(targets)).reshape(len(targets), -1).any(1).nonzero()[0])
            raise InputError(f"squared_error: the target of sample {start + where} is NaN or infinite.")

    def _difference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self._are_classes(targets):
            return outputs - targets.reshape(outputs.shape).to(outputs)
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        return outputs - (targets.long()[:, None] == classes).to(outputs)

    def _factor(self, outputs: Tensor) -> float:
        return 2.0 / outputs.shape[1] if self.scale is None else self.scale

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * self._factor(outputs) * self._difference(outputs, targets).square().sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._factor(outputs) * self._difference(outputs.double(), targets)

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        return self._factor(outputs) * direction.double()

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        count, classes = outputs.shape
        weight = torch.full((count,), self._factor(outputs), dtype=torch.float64, device=outputs.device)
        for j in range(classes):
            vector = torch.zeros((count, classes), dtype=torch.float64, device=outputs.device)
            vector[:, j] = 1.0
            yield weight, vector

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        self._check_exact(exact, outputs)
        yield from itertools.islice(self.factors(outputs, targets), exact)
        count, classes = outputs.shape
        vector = signs.double()
        vector[:, :exact] = 0.0
        rest = classes - exact
        weight = torch.full((count,), self._factor(outputs) * rest, dtype=torch.float64, device=outputs.device)
        yield weight, vector / math.sqrt(rest)


_LARGEST_EXPONENT = 690.0  # exp(709.8) is the largest float64; what multiplies it needs room


class Exponential(Loss):
    """ℓ = Σ_{j≠y} exp(φ_j − φ_y); for a single output with targets 0/1 or ±1, ℓ = exp(∓φ)."""

    name = "exponential"

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if outputs.ndim == 2 and outputs.shape[1] > 1:
            _class_targets(self.name, outputs, targets, start)
        else:
            self._check_single(outputs, targets)
        exponents = self._differences(outputs.detach().double(), targets)
        if exponents.numel() and float(exponents.max()) > _LARGEST_EXPONENT:
            where = int((exponents > _LARGEST_EXPONENT).any(1).nonzero()[0])
            raise InputError(
                f"the exponential loss of sample {start + where}, exp({float(exponents[where].max()):.4g}), is "
                "beyond floating-point numbers; scale the outputs down, or use another loss."
            )

    def _check_single(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.ndim > 2:
            super().check(outputs, targets)
        if targets.numel() != outputs.shape[0]:
            raise InputError(f"exponential got {outputs.shape[0]} outputs for {targets.numel()} targets.")
        known = (targets == 0) | (targets == 1) | (targets == -1)
        if not bool(known.all()):
            raise InputError(
                f"exponential with one output needs targets 0 and 1, or -1 and 1, got "
                f"{targets.flatten()[~known.flatten()][0].item():g}."
            )

    @staticmethod
    def _differences(outputs: Tensor, targets: Tensor) -> Tensor:
        """The exponents, (N, C) with −∞ at the label, or (N, 1)."""
        outputs = outputs.reshape(len(outputs), -1)
        if outputs.shape[1] == 1:
            return outputs * _signs(targets).to(outputs)
        label = targets.long()[:, None]
        return (outputs - outputs.gather(1, label)).scatter(1, label, -math.inf)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._differences(outputs.double(), targets).exp().sum(1)  # float32 ends at exp(88)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        if terms.shape[1] == 1:
            return (terms * _signs(targets)).reshape(outputs.shape)
        return terms.scatter(1, targets.long()[:, None], -terms.sum(1, keepdim=True))

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        direction = direction.double().reshape(terms.shape)
        if terms.shape[1] == 1:
            return (terms * direction).reshape(outputs.shape)
        label = targets.long()[:, None]
        moved = terms * (direction - direction.gather(1, label))
        return moved.scatter(1, label, -moved.sum(1, keepdim=True))

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        terms = self._differences(outputs.double(), targets).exp()
        direction = direction.double().reshape(terms.shape)
        if terms.shape[1] > 1:
            direction = direction - direction.gather(1, targets.long()[:, None])
        return (terms * direction.square()).sum(1)

    def rank(self, classes: int) -> int:
        return max(1, classes - 1)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        terms = self._differences(outputs.double(), targets).exp()
        classes = terms.shape[1]
        if classes == 1:
            yield terms[:, 0], torch.ones_like(outputs, dtype=torch.float64)
            return
        label = targets.long()[:, None]
        for j in range(classes - 1):
            other = j + (label <= j).long()
            vector = torch.zeros_like(terms).scatter_(1, other, 1.0).scatter_(1, label, -1.0)
            yield terms.gather(1, other)[:, 0], vector


def _signs(targets: Tensor) -> Tensor:
    """−1 for the label 1, +1 for 0 or −1, (N, 1)."""
    return torch.where(targets.reshape(-1, 1) > 0, -1.0, 1.0)


class CallableLoss(Loss):
    """Any function (outputs, targets) → (N,): its output Hessian comes from autodiff, in float64 if it allows that.

    A function that returns the mean over the samples, one number, is called for every sample by itself. A loss that
    couples the samples of a batch is refused, unless `fixed` makes the batches part of what is measured: then it may
    return one number, the loss of the batch.

    Exact traces need closed-form factors: give the callable a method `factors(outputs, targets)` that yields pairs of
    weights (N,) and vectors (N, C), at most C of them, or as many as its method `rank(C)` says.
    """

    name = "callable"

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], fixed: bool = False) -> None:
        self.function, self.fixed = function, fixed
        self.closed_form = hasattr(function, "factors")  # type: ignore[misc]
        self.called = getattr(function, "__name__", type(function).__name__)
        self._one_by_one: Callable[[Tensor, Tensor], Tensor] | None = None  # of a function that returns a mean

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        with torch.no_grad():
            try:
                value: Any = self._call(outputs.detach(), targets)
            except Exception as error:
                if isinstance(error, InputError) or is_out_of_memory(error):
                    raise
                raise InputError(
                    f"the loss {self.called} fails on outputs of shape {tuple(outputs.shape)} and targets of shape "
                    f"{tuple(targets.shape)}: {named_error(error)}."
                ) from error
            if not isinstance(value, Tensor) or (value.ndim and value.shape != targets.shape[:1]):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"a loss of your own must return one value per sample, shape ({len(targets)},), got {shape}; "
                    "use reduction='none'."
                )
            if self.fixed:
                return
            if not value.ndim and self._one_by_one is None and len(targets) > 1:
                self._take_apart(outputs.detach(), targets)
            how = self.couples(outputs.detach(), targets)
        if how:
            raise InputError(
                f"the loss {self.called} of a sample depends on the other samples of its batch ({how}): is it "
                "contrastive, or divided by something of the whole batch, its tokens, say? Its mean would depend on "
                "how the data are cut into batches; return each sample's own loss, or pass batches='fixed' to make the "
                "batches, as they come, part of the definition."
            )

    def _take_apart(self, outputs: Tensor, targets: Tensor) -> None:
        """Take a loss that returns one number for every sample by itself, if that number is their mean."""
        few, wanted = outputs[:3], targets[:3]

        def single(output: Tensor, target: Tensor) -> Tensor:
            return self._call(output[None], target[None]).reshape(())

        def looped(many: Tensor, labels: Tensor) -> Tensor:
            return torch.stack([single(output, label) for output, label in zip(many, labels, strict=True)])

        try:
            total, each = self._call(few, wanted), looped(few, wanted)
        except RuntimeError as error:
            raise InputError(
                f"the loss {self.called} returns one number for {len(targets)} samples and fails on a single one "
                f"({first_line(error)}); return one value per sample, e.g. with reduction='none'."
            ) from error
        if not _close(each.mean(), total, outputs):
            summed = _close(each.sum(), total, outputs)
            what = "the sum over them" if summed else "not the mean over them"
            rest = "return the mean" if summed else "for a loss of the batch as a whole pass batches='fixed'"
            raise InputError(
                f"the loss {self.called} returns one number for {len(targets)} samples, {what}; return one value per "
                f"sample, shape ({len(targets)},), or {rest}."
            )
        self._one_by_one = looped
        with contextlib.suppress(RuntimeError, ValueError):  # not everything can be vectorised
            together = torch.func.vmap(single)
            if bool(torch.allclose(together(few, wanted), each, rtol=1e-4, atol=1e-6)):
                self._one_by_one = together

    def couples(self, outputs: Tensor, targets: Tensor) -> str:
        """What a sample's loss is in its batch, beside another one and alone, if these differ.

        A few small calls of the function, in float64 if it allows that; one that is given fewer samples than it can
        work with, or holds numbers for the whole batch, is taken for one that couples them.
        """
        count = len(targets)
        if count < 2 or len(outputs) != count:
            return "" if len(outputs) == count else f"{len(outputs)} outputs for {count} samples"
        if self._one_by_one is not None:
            return ""

        def of(rows: list[int]) -> Tensor | None:
            here = torch.tensor(rows, device=outputs.device)
            try:
                found: Tensor = _in_float64(self._call, outputs[here], targets[here]).reshape(-1)
            except (RuntimeError, ValueError, IndexError):
                return None
            return found if len(found) == len(rows) else None

        whole = _in_float64(self._call, outputs, targets)
        if not whole.ndim:
            return f"one number, {float(whole):.4g}, for {count} samples"
        last = count - 1
        pair = of([0, last]) if count > 2 else None
        if pair is None and count > 2:
            return "it cannot be called with two samples of a batch"
        for row, beside in ((0, 0), (last, 1)):
            alone = of([row])
            near = whole[row] if pair is None else pair[beside]
            others = [near] if alone is None else [near, alone[0]]  # a squeeze may make one sample special
            if not all(_close(other, whole[row], outputs) for other in others):
                if not torch.equal(whole, _in_float64(self._call, outputs, targets)):
                    return "it draws random numbers"
                text = f"{float(whole[row]):.4g} in its batch of {count}"
                text += "" if pair is None else f", {float(near):.4g} beside one other"
                return text + ("" if alone is None else f", {float(alone[0]):.4g} alone")
        return ""

    def _call(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with Elementary():
            return self.function(outputs, targets)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._one_by_one is not None:
            return self._one_by_one(outputs, targets)
        value = self._call(outputs, targets)
        return value if value.ndim else value.expand(len(targets))

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        def slope(point: Tensor, wanted: Tensor) -> Tensor:
            return torch.func.grad(lambda out: self.values(out, wanted).sum())(point)

        return _in_float64(slope, outputs, targets)

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        def bend(point: Tensor, wanted: Tensor) -> Tensor:
            with torch.enable_grad():
                point = point.detach().requires_grad_()
                (first,) = torch.autograd.grad(self.values(point, wanted).sum(), point, create_graph=True)
                if not first.requires_grad:
                    return torch.zeros_like(point)  # linear in the outputs
                along = direction.to(point).reshape(point.shape)
                return torch.autograd.grad(first, point, along, materialize_grads=True)[0]

        try:
            return _in_float64(bend, outputs, targets)
        except RuntimeError as error:
            reason = first_line(error)
            raise InputError(
                f"the loss {self.called} cannot be differentiated twice ({reason}); write it in operations that can."
            ) from error

    def rank(self, classes: int) -> int:
        own = getattr(self.function, "rank", None)
        return int(own(classes)) if callable(own) else classes

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        if not self.closed_form:
            raise InputError(
                "exact traces need the output factors of the loss: give your loss a method "
                "factors(outputs, targets) that yields (weights, vectors), or use method='hutchinson'."
            )
        most = self.rank(outputs.shape[1] if outputs.ndim > 1 else 1)
        count = 0
        for weight, vector in self.function.factors(outputs, targets):  # type: ignore[attr-defined]
            count += 1
            if count > most:
                raise InputError(
                    f"the factors of your loss are more than its {most} terms; give it a method rank(outputs) that "
                    "returns their number."
                )
            if weight.shape != outputs.shape[:1] or vector.shape != outputs.shape:
                raise InputError(
                    f"the factors of your loss must be weights {tuple(outputs.shape[:1])} and vectors "
                    f"{tuple(outputs.shape)}, got {tuple(weight.shape)} and {tuple(vector.shape)}."
                )
            yield weight.double(), vector
        for _ in range(count, most):
            yield outputs.new_zeros(len(outputs), dtype=torch.float64), torch.zeros_like(outputs, dtype=torch.float64)


def _close(a: Tensor, b: Tensor, outputs: Tensor) -> bool:
    """Whether two values of a loss are the same but for rounding, which grows with the outputs."""
    coarse = a.dtype != torch.float64
    size = 1.0 + (float(outputs.abs().max()) if outputs.numel() else 0.0)
    return bool(
        torch.isclose(a.double(), b.double(), rtol=1e-3 if coarse else 1e-6, atol=(1e-5 if coarse else 1e-12) * size)
    ) or not bool(torch.isfinite(b))


def _in_float64(compute: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """`compute(outputs, targets)` in float64, or in their own type if the loss holds tensors that do not mix."""
    try:
        return compute(outputs.double(), targets.double() if targets.is_floating_point() else targets)
    except RuntimeError:
        if outputs.dtype == torch.float64:
            raise
        return compute(outputs, targets).double()


NAMED: dict[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "squared_error": SquaredError,
    "exponential": Exponential,
}


def resolve(loss: str | nn.Module | Callable[[Tensor, Tensor], Tensor] | Loss, *, fixed: bool = False) -> Loss:
    """The `Loss` that a name, a `torch.nn` loss or a callable stands for.

    `torch.nn` losses keep their class weights and label smoothing. The loss of a data set is always the mean over its
    samples, so a reduction that means something else is refused. A loss that computes something of its own, also one
    derived from those of `torch.nn`, is called and must return one value per sample, or their mean; `fixed` says that
    the batches are part of what is measured, so that it may couple them.

    >>> resolve("cross_entropy").name, resolve(nn.MSELoss()).name
    ('cross_entropy', 'squared_error')
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in NAMED:
            raise unknown_name("loss", loss, NAMED)
        return NAMED[loss]()
    if isinstance(loss, type):
        raise InputError(f"the loss is the class {loss.__name__}; pass an instance, e.g. {loss.__name__}().")
    if isinstance(loss, nn.modules.loss._Loss) and type(loss).forward.__module__.startswith("torch."):
        return _translate(loss)
    if callable(loss):
        return CallableLoss(loss, fixed)
    raise InputError(f"loss must be a name, a torch.nn loss or a callable, got {type(loss).__name__}.")


def _translate(loss: Any) -> Loss:
    kind = type(loss).__name__
    if loss.reduction == "sum":
        raise InputError(
            f"{kind}(reduction='sum') is not a mean over samples; use reduction='mean' and multiply by their number."
        )
    if isinstance(loss, nn.CrossEntropyLoss):
        if loss.weight is not None and loss.reduction == "mean":
            raise InputError(
                "CrossEntropyLoss(weight=…, reduction='mean') divides by the sum of the weights of a batch, which "
                "depends on the batches; use reduction='none' for the mean of the weighted losses."
            )
        if loss.ignore_index >= 0:
            raise InputError(
                f"CrossEntropyLoss(ignore_index={loss.ignore_index}) leaves samples out of the mean; leave them out "
                "of the data instead."
            )
        return CrossEntropy(loss.weight, loss.label_smoothing)
    if isinstance(loss, nn.BCEWithLogitsLoss):
        if loss.weight is not None or (loss.pos_weight is not None and loss.pos_weight.numel() != 1):
            raise InputError(
                "BCEWithLogitsLoss with weight=, or several positive weights, is not supported; pass a callable "
                "(outputs, targets) -> (N,)."
            )
        return BinaryCrossEntropy(1.0 if loss.pos_weight is None else float(loss.pos_weight))
    if isinstance(loss, nn.MSELoss):
        if loss.reduction != "mean":
            raise InputError("MSELoss(reduction='none') has no single value per sample; use reduction='mean'.")
        return SquaredError(None)
    raise InputError(
        f"torch.nn.{kind} is not known; pass one of {', '.join(NAMED)}, or a callable (outputs, targets) -> (N,)."
    )
