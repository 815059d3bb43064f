"""Losses that are sums over a sample's outputs, each of one output and its target: their output Hessian is diagonal.

Logistic loss of one or many labels, squared error, Huber's loss, Poisson regression. Where torch takes the mean over
all numbers of a batch, a sample's loss is the mean over its own, which is the same, as all samples have equally many.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.losses.base import Decisions, Factor, Loss, class_targets
from spiritlevel.errors import InputError

_LARGEST_RATE = 690.0  # exp(709.8) is the largest float64


class Elementwise(Loss):
    """ℓ = c Σ_j f(φ_j, y_j): A = c·diag f″, one factor e_j for every output.

    With `mean` c is one over the number of a sample's outputs, else 1.
    """

    can_sample = True

    def __init__(self, mean: bool = True) -> None:
        self.mean = mean

    @abstractmethod
    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Values f of every output, differentiable."""

    @abstractmethod
    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """f′, float64 as its arguments are."""

    @abstractmethod
    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """f″ ≥ 0, likewise."""

    def _factor(self, outputs: Tensor) -> float:
        return 1 / max(1, math.prod(outputs.shape[1:])) if self.mean else 1.0

    def _like(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The targets, shaped and typed like the outputs."""
        return targets.detach().reshape(outputs.shape).to(outputs)

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if math.prod(targets.shape[1:]) != math.prod(outputs.shape[1:]) or len(targets) != len(outputs):
            raise InputError(
                f"{self.name} needs targets like the outputs {tuple(outputs.shape)}, got {tuple(targets.shape)}."
            )
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            where = int((~torch.isfinite(targets)).reshape(len(targets), -1).any(1).nonzero()[0])
            raise InputError(f"{self.name}: the target of sample {start + where} is NaN or infinite.")

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = self._value(outputs, self._like(outputs, targets))
        return self._factor(outputs) * found.reshape(len(outputs), -1).sum(1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.double()
        return self._factor(outputs) * self._slope(outputs, self._like(outputs, targets))

    def _diagonal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.double()
        return self._factor(outputs) * self._curvature(outputs, self._like(outputs, targets))

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        return self._diagonal(outputs, targets) * direction.double().reshape(outputs.shape)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        weights = self._diagonal(outputs, targets).reshape(len(outputs), -1)
        for j in range(weights.shape[1]):
            vector = torch.zeros_like(weights)
            vector[:, j] = 1.0
            yield weights[:, j], vector.reshape(outputs.shape)

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        """The outputs of largest curvature exactly, the others in one random combination."""
        self._check_exact(exact, outputs, targets)
        weights = self._diagonal(outputs, targets).reshape(len(outputs), -1)
        chosen = weights.topk(exact, dim=1)
        for step in range(exact):
            vector = torch.zeros_like(weights).scatter_(1, chosen.indices[:, step : step + 1], 1.0)
            yield chosen.values[:, step], vector.reshape(outputs.shape)
        rest = weights.scatter(1, chosen.indices, 0.0)
        total = rest.sum(1)
        vector = (rest / total.clamp_min(torch.finfo(torch.float64).tiny)[:, None]).sqrt_()
        yield total, vector.mul_(signs.reshape(vector.shape)).reshape(outputs.shape)


def _no_margins(name: str) -> NoReturn:
    raise InputError(f"the loss {name} predicts numbers, and a regression has no margins.")


class BinaryCrossEntropy(Elementwise):
    """Logistic loss of one logit, or of many labels that are true or not: f″ = w(p·y + 1 − y)·σ(φ)σ(−φ).

    Targets are 0 and 1, or for many labels also probabilities; w is `weight`, p is `pos_weight`, each a single number
    or one per label. The loss of a sample is the mean over its labels.
    """

    name = "binary_cross_entropy"

    def __init__(self, pos_weight: float | Tensor = 1.0, weight: float | Tensor = 1.0) -> None:
        super().__init__(mean=True)
        self.pos_weight, self.weight = pos_weight, weight

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        single = math.prod(outputs.shape[1:]) == 1
        if not single and targets.ndim == 1:
            raise InputError(
                f"binary_cross_entropy needs one logit per sample, or a target for every label, got outputs of shape "
                f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}; use loss='cross_entropy' for "
                "several classes."
            )
        if single and targets.numel() != outputs.shape[0]:
            raise InputError(f"binary_cross_entropy got {outputs.shape[0]} outputs for {targets.numel()} targets.")
        super().check(outputs, targets, start)
        wrong = ~((targets >= 0) & (targets <= 1)) if not single else (targets != 0) & (targets != 1)
        if bool(wrong.any()):
            kind = "0 and 1" if single else "from 0 to 1"
            raise InputError(f"binary_cross_entropy needs targets {kind}, got {targets[wrong][0].item():g}.")
        for name in ("weight", "pos_weight"):
            given = getattr(self, name)
            fits = not isinstance(given, Tensor) or _fits(given.shape, outputs.shape[1:])
            if not fits:
                raise InputError(
                    f"{name} of shape {tuple(given.shape)} does not fit the outputs {tuple(outputs.shape[1:])} of a "
                    "sample; give one number, or one for every label."
                )

    @staticmethod
    def _number(given: float | Tensor, like: Tensor) -> float | Tensor:
        return given.detach().to(like) if isinstance(given, Tensor) and given.numel() > 1 else float(given)

    def _weights(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What multiplies the loss of a true label, and that of a false one."""
        weight = self._number(self.weight, outputs)
        return weight * self._number(self.pos_weight, outputs) * targets, weight * (1 - targets)

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        true, false = self._weights(outputs, targets)
        # beyond the usual threshold of 20 float64 still sees the curve
        return true * F.softplus(-outputs, threshold=40) + false * F.softplus(outputs, threshold=40)

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        true, false = self._weights(outputs, targets)
        return false * torch.sigmoid(outputs) - true * torch.sigmoid(-outputs)

    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        true, false = self._weights(outputs, targets)
        return (true + false) * torch.sigmoid(outputs) * torch.sigmoid(-outputs)

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        if math.prod(outputs.shape[1:]) == 1:
            return super().decisions(outputs, targets, start)
        self.check(outputs, targets, start)
        if bool(((targets != 0) & (targets != 1)).any()):
            raise InputError("margins of many labels need targets 0 and 1; probabilities in between are not classes.")
        flat = outputs.reshape(-1, 1)
        counts = torch.full((len(outputs),), math.prod(outputs.shape[1:]), device=outputs.device)
        return Decisions(torch.cat([torch.zeros_like(flat), flat], 1), targets.reshape(-1).long(), counts)


def _fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether weights fit one sample's outputs without broadcasting them."""
    if math.prod(given) == 1:
        return True
    return len(given) <= len(wanted) and all(
        a in (1, b) for a, b in zip(reversed(given), reversed(wanted), strict=False)
    )


class SquaredError(Elementwise):
    """ℓ = ½‖φ − y‖², A = I; integer targets of several outputs are classes, one-hot encoded.

    With `mean` it is torch.nn.MSELoss of every sample: (1/C)‖φ − y‖², A = (2/C)·I, and integer targets are numbers.
    """

    name = "squared_error"

    def __init__(self, mean: bool = False) -> None:
        super().__init__(mean)

    def _factor(self, outputs: Tensor) -> float:
        return (2.0 if self.mean else 1.0) * super()._factor(outputs)

    def _are_classes(self, outputs: Tensor, targets: Tensor) -> bool:
        several = outputs.ndim == 2 and outputs.shape[1] > 1
        return not self.mean and several and not targets.is_floating_point()

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if self._are_classes(outputs, targets):
            class_targets(self.name, outputs, targets, start)
        elif math.prod(targets.shape[1:]) != math.prod(outputs.shape[1:]) or len(targets) != len(outputs):
            raise InputError(
                f"{'MSELoss' if self.mean else 'squared_error'} needs targets like the outputs "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}; integer classes are one-hot encoded by "
                "loss='squared_error'."
            )
        else:
            super().check(outputs, targets, start)

    def _like(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self._are_classes(outputs, targets):
            return super()._like(outputs, targets)
        return (targets.long()[:, None] == torch.arange(outputs.shape[1], device=outputs.device)).to(outputs)

    def prediction(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return None if self._are_classes(outputs, targets) else outputs

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        one = outputs.shape[1:] in ((), (1,))
        if self.mean or not (one or self._are_classes(outputs, targets)):
            _no_margins(self.name)
        found, zeros = super().decisions(outputs, targets, start), targets.reshape(-1) == 0
        if one and bool(zeros.any()):  # refused, since a batch of ones alone would not tell where the boundary is
            raise InputError(
                f"margins of one output under {self.name} need labels -1 and 1, got 0 for sample "
                f"{start + int(zeros.nonzero()[0])}: predictions of 0 and 1 are told apart at 1/2, not at 0 as margins "
                "take it; use these labels, or a model with two outputs."
            )
        return found

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).square()

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets

    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.ones_like(outputs)


class Huber(Elementwise):
    """f = ½e² for |e| ≤ δ, else δ(|e| − ½δ), e = φ − y: f″ is 1 inside, 0 outside; over δ if `smooth_l1`.

    As torch.nn.HuberLoss(delta), and with `smooth_l1` as torch.nn.SmoothL1Loss(beta=δ). At |e| = δ the curvature
    jumps, and the inside value is taken.
    """

    name = "huber"

    def __init__(self, delta: float = 1.0, *, smooth_l1: bool = False, mean: bool = True) -> None:
        super().__init__(mean)
        self.delta, self.smooth_l1 = delta, smooth_l1

    def _factor(self, outputs: Tensor) -> float:
        return super()._factor(outputs) / (self.delta if self.smooth_l1 else 1.0)

    def prediction(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return outputs

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        return _no_margins(self.name)

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.huber_loss(outputs, targets, reduction="none", delta=self.delta)

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).clamp(-self.delta, self.delta)

    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).abs() <= self.delta).to(outputs)


class Poisson(Elementwise):
    """f = e^φ − yφ, the negative log likelihood of a count y whose rate is e^φ, up to a constant: f″ = e^φ.

    As torch.nn.PoissonNLLLoss(log_input=True); `full` adds Stirling's approximation of log y!, which is constant.
    """

    name = "poisson"

    def __init__(self, *, full: bool = False, mean: bool = True) -> None:
        super().__init__(mean)
        self.full = full

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        super().check(outputs, targets, start)
        if targets.numel() and bool((targets < 0).any()):
            where = int((targets < 0).reshape(len(targets), -1).any(1).nonzero()[0])
            raise InputError(f"poisson needs counts, but the target of sample {start + where} is negative.")
        if outputs.numel() and float(outputs.detach().max()) > _LARGEST_RATE:
            flat = outputs.detach().reshape(len(outputs), -1).amax(1)
            where = int((flat > _LARGEST_RATE).nonzero()[0])
            raise InputError(
                f"the rate of sample {start + where}, exp({float(flat[where]):.4g}), is beyond floating-point numbers; "
                "the outputs are logarithms of rates."
            )

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().values(outputs.double(), targets)  # float32 ends at exp(88)

    def prediction(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return outputs.exp()

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        return _no_margins(self.name)

    def _value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.poisson_nll_loss(outputs, targets, log_input=True, full=self.full, reduction="none")

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets

    def _curvature(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp()
