"""Losses that users write themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spiritlevel.binding.losses.base import Factor, Loss
from spiritlevel.binding.rewrites import Elementary
from spiritlevel.errors import InputError, first_line


class CallableLoss(Loss):
    """Any function (outputs, targets) → (N,): its output Hessian comes from autodiff, in float64 if it allows that.

    Exact traces need closed-form factors: give the callable a method `factors(outputs, targets)` that yields pairs of
    weights (N,) and vectors (N, C), at most C of them, or as many as its method `rank(C)` says.
    """

    name = "callable"

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.closed_form = hasattr(function, "factors")  # type: ignore[misc]

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        value = self.values(outputs, targets)
        if not isinstance(value, Tensor) or value.shape != outputs.shape[:1]:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"a loss of your own must return one value per sample, shape ({outputs.shape[0]},), got {shape}; "
                "use reduction='none'."
            )

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with Elementary():
            return self.function(outputs, targets)

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
            name = getattr(self.function, "__name__", type(self.function).__name__)
            reason = first_line(error)
            raise InputError(
                f"the loss {name} cannot be differentiated twice ({reason}); write it in operations that can."
            ) from error

    def rank(self, outputs: Tensor, targets: Tensor) -> int:
        own = getattr(self.function, "rank", None)
        classes = outputs.shape[1] if outputs.ndim > 1 else 1
        return int(own(classes)) if callable(own) else super().rank(outputs, targets)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        if not self.closed_form:
            raise InputError(
                "exact traces need the output factors of the loss: give your loss a method "
                "factors(outputs, targets) that yields (weights, vectors), or use method='hutchinson'."
            )
        most = self.rank(outputs, targets)
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


def _in_float64(compute: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """`compute(outputs, targets)` in float64, or in their own type if the loss holds tensors that do not mix."""
    try:
        return compute(outputs.double(), targets.double() if targets.is_floating_point() else targets)
    except RuntimeError:
        if outputs.dtype == torch.float64:
            raise
        return compute(outputs, targets).double()
