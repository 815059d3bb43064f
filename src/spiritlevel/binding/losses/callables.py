"""Losses that users write themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.losses.base import Factor, Loss
from spiritlevel.binding.rewrites import Elementary
from spiritlevel.errors import InputError, first_line, is_out_of_memory, named_error


class CallableLoss(Loss):
    """Any function (outputs, targets) → (N,): its output Hessian comes from autodiff, in float64 if possible.

    A function that returns the mean over the samples, one number, is called for every sample separately. A loss that
    couples the samples of a batch is refused, unless `fixed` makes the batches part of what is measured: then it may
    return one number, the loss of the batch.

    Exact traces need closed-form factors: give the callable a method `factors(outputs, targets)` that yields pairs of
    weights (N,) and vectors (N, C), at most C of them, or as many as its method `rank(C)` returns.
    """

    name = "callable"

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], fixed: bool = False) -> None:
        self.function, self.fixed = function, fixed
        self.closed_form = hasattr(function, "factors")  # type: ignore[misc]
        self.called = getattr(function, "__name__", type(function).__name__)
        self._one_by_one: Callable[[Tensor, Tensor], Tensor] | None = None  # for a function that returns a mean

    def class_axis(self, outputs: Tensor, targets: Tensor) -> int | None:
        return 1 if outputs.ndim == 2 and outputs.shape[1] > 1 else None

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
            if not value.ndim and len(targets) > 1:
                if self._one_by_one is None:
                    self._take_apart(outputs.detach(), targets)
                # in every batch: sequences of equal length hide what a mean over tokens does to others
                whole, each = (_in_float64(of, outputs.detach(), targets) for of in (self._call, self.values))
                self._check_mean(whole, each, outputs)
            how = self.couples(outputs.detach(), targets)
        if how:
            raise InputError(
                f"the loss {self.called} of a sample depends on the other samples of its batch ({how}): is it "
                "contrastive, or divided by something of the whole batch, such as its tokens? Its mean would depend on "
                "how the data are cut into batches; return each sample's own loss, or pass batches='fixed' to make the "
                "batches, as they come, part of the definition."
            )

    def _take_apart(self, outputs: Tensor, targets: Tensor) -> None:
        """Call a loss that returns one number separately for every sample, if that number is their mean."""
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
        self._check_mean(total, each, outputs)
        self._one_by_one = looped
        with contextlib.suppress(RuntimeError, ValueError):  # not everything can be vectorised
            together = torch.func.vmap(single)
            if bool(torch.allclose(together(few, wanted), each, rtol=1e-4, atol=1e-6)):
                self._one_by_one = together

    def _check_mean(self, total: Tensor, each: Tensor, outputs: Tensor) -> None:
        """Raise `InputError` unless the one number of a batch is the mean of its samples' own."""
        if _close(each.mean(), total, outputs):
            return
        summed = _close(each.sum(), total, outputs)
        what = "the sum over them" if summed else "not the mean over them"
        rest = "return the mean" if summed else "for a loss of the batch as a whole pass batches='fixed'"
        if not summed:
            what += f" ({float(total):.4g}, while the mean would be {float(each.mean()):.4g})"
        raise InputError(
            f"the loss {self.called} returns one number for {len(each)} samples, {what}; return one value per sample, "
            f"shape ({len(each)},), or {rest}."
        )

    def couples(self, outputs: Tensor, targets: Tensor) -> str:
        """What a sample's loss is in its batch, beside another one and alone, if these differ.

        A few small calls of the function, in float64 if possible; one that cannot work with so few samples, or holds
        numbers for the whole batch, is taken to couple them.
        """
        count = len(targets)
        if outputs.shape[:1] != targets.shape[:1]:
            return f"outputs of shape {tuple(outputs.shape)} for {count} samples"
        if count < 2:
            return ""
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
                    f"your loss yields more factors than its {most} terms; give it a method rank(outputs) that "
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
    """Whether two values of a loss are the same up to rounding, which grows with the outputs."""
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
