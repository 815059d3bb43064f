"""Softmax cross entropy for one choice per sample, or one at each position: images, tagged tokens, language models.

A sample's outputs are *rows* of C logits, one for each position; its loss is Σ_t s_t ℓ_t, the mean over the positions
that count. So gradient, product and factors are those of single rows times the share s_t of the row, and A is block
diagonal: T·(C−1) factors for T positions. Rows are worked on in pieces (`elimination`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.losses.base import Decisions, Factor, Loss, class_targets, way_to_classes, within
from spiritlevel.binding.losses.elimination import by_rows, combined, eliminated, most_probable, rows_in_double
from spiritlevel.errors import InputError

IGNORED = -100
"""The label of positions that do not count, as in torch."""


class Rows(NamedTuple):
    """Outputs as rows of logits, and what each row counts for."""

    logits: Tensor  # (N, T, C)
    labels: Tensor  # (N, T), 0 where the position is ignored; for soft labels the most probable class
    soft: Tensor | None  # (N, T, C): probabilities of the classes
    share: Tensor  # (N, T) float64: the factor of the row's loss in its sample's, 0 where the position is ignored


class CrossEntropy(Loss):
    """Softmax cross entropy ℓ = −log S_y of outputs (N, C), (N, C, d…) or (N, T, C).

    With positions (d… of an image, T of a sequence) a sample's loss is the *mean over its own positions* that count:
    those whose target is not `ignore_index`. torch takes the mean over all positions of a batch, in which a sample
    counts for more the longer it is and the shorter the others are; for samples of equal length both are the same.
    Classes are in dimension 1, or in the last one if only that fits the targets; `classes` says which.

    Targets are classes, or probabilities shaped like the outputs (soft labels). `weight` holds the weights of the
    classes; with `weighted_mean` they are divided by the sum of the sample's own, as torch does for a batch of one.
    Class c has the weight of its target in A: for hard labels (1−ε)w_y + (ε/C)Σw, for soft ones Σ w_c ỹ_c, ỹ = (1−ε)y
    + ε/C.

    The output Hessian of a row is c·A, A = diag(S) − SSᵀ. A is eliminated class by class with the top one last
    (mathematics 2.3): with q_j = Σ_{i≥j} S_i, d_j = S_j q_{j+1}/q_j and v_j = e_j − Σ_{i>j} (S_i/q_{j+1}) e_i, only
    sums of positive numbers.
    """

    name = "cross_entropy"
    can_sample = True
    shifted: ClassVar[bool] = False  # whether the logits of a position are those of the next label

    def __init__(
        self,
        weight: Tensor | None = None,
        label_smoothing: float = 0.0,
        *,
        ignore_index: int = IGNORED,
        classes: str = "",
        weighted_mean: bool = False,
    ) -> None:
        self.weight, self.label_smoothing, self.ignore_index = weight, label_smoothing, ignore_index
        self.classes, self.weighted_mean = classes, weighted_mean
        self.divisor: float | None = None  # used instead of the number of a sample's own positions

    # ------------------------------------------------------------ outputs and targets

    def axis(self, shape: torch.Size, positions: tuple[int, ...]) -> int:
        """The dimension of the classes in outputs of this shape: 1, or the last one if told or if only that fits."""
        if len(shape) <= 2 or self.classes in ("first", "last"):
            return len(shape) - 1 if self.classes == "last" else 1
        if not self.classes and positions == shape[2:] == shape[1:-1]:
            raise InputError(
                f"outputs of shape {tuple(shape)} may have their classes in dimension 1, as in torch, or in the last "
                "one; say which: loss=torch.nn.CrossEntropyLoss() or loss='token_cross_entropy'."
            )
        return len(shape) - 1 if positions != shape[2:] and positions == shape[1:-1] else 1

    def class_axis(self, outputs: Tensor, targets: Tensor) -> int:
        if targets.is_floating_point():  # soft labels look like outputs
            return outputs.ndim - 1 if self.classes == "last" and outputs.ndim > 1 else 1
        return self.axis(outputs.shape, targets.shape[1:])

    def per(self, positions: float) -> CrossEntropy:
        """The same with the sum over a sample's positions divided by this number instead of the number of its own.

        With the mean number of positions per sample, the mean over samples is the mean over all positions of the data.
        """
        other = copy.copy(self)
        other.divisor = positions
        return other

    def rows(self, outputs: Tensor, targets: Tensor) -> Rows:
        """The outputs as rows of logits, with what each counts for."""
        axis, count = self.class_axis(outputs, targets), len(outputs)
        classes = outputs.shape[axis]
        logits = outputs.movedim(axis, -1).reshape(count, -1, classes)
        if targets.is_floating_point():
            soft = targets.movedim(axis, -1).reshape(count, -1, classes)
            each = 1 / (self.divisor or soft.shape[1])
            share = torch.full(soft.shape[:2], each, dtype=torch.float64, device=outputs.device)
            return Rows(logits, soft.argmax(-1), soft, share)
        labels = targets.long().reshape(count, -1)
        if self.shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=self.ignore_index)
        counted = labels != self.ignore_index
        labels = torch.where(counted, labels, 0)
        if outputs.ndim == 2:  # the sample is what is counted
            return Rows(logits, labels, None, torch.ones_like(labels, dtype=torch.float64))
        if self.divisor:
            return Rows(logits, labels, None, counted.double() / self.divisor)
        total = counted.double()
        if self.weight is not None and self.weighted_mean:
            total = total * self._weights(outputs, classes)[labels]
        return Rows(logits, labels, None, counted / total.sum(1, keepdim=True))

    def at_few(self, targets: Tensor, count: int) -> Tensor:
        """Class indices of which at most `count` positions of each sample are left, the last that counts among them."""
        if targets.is_floating_point() or targets.ndim < 2 or self.weight is not None:
            return targets
        flat = targets.reshape(len(targets), -1)
        counted = flat != self.ignore_index
        if self.shifted:
            counted[:, 0] = False
        order = counted.cumsum(1)
        total = order[:, -1:]
        kept = counted & ((total - order) % (-(-total // count)).clamp(min=1) == 0)
        return torch.where(kept, flat, self.ignore_index).reshape(targets.shape)

    def _rows_back(self, found: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Rows (N·T, C) in the shape of the outputs."""
        axis = self.class_axis(outputs, targets)
        moved = [size for dimension, size in enumerate(outputs.shape) if dimension != axis]
        return found.reshape(*moved, outputs.shape[axis]).movedim(-1, axis)

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if outputs.ndim < 2:
            super().check(outputs, targets, start)
        axis = self.class_axis(outputs, targets)
        classes = outputs.shape[axis]
        if classes < 2:
            numbers = targets.is_floating_point() and bool(((targets != 0) & (targets != 1)).any())
            way = "'squared_error' for a number to predict" if numbers else "'binary_cross_entropy' for a single logit"
            raise InputError(f"{self.name} needs at least 2 outputs per sample, got 1; use loss={way}.")
        if self.weight is not None and self.weight.numel() != classes:
            raise InputError(f"the loss has {self.weight.numel()} class weights for a model of {classes} outputs.")
        if targets.is_floating_point():
            self._check_soft(outputs, targets, axis, start)
        elif outputs.ndim == 2:
            self._check_one(outputs, targets, start)
        else:
            self._check_positions(outputs, targets, axis, start)

    def _check_one(self, outputs: Tensor, targets: Tensor, start: int) -> None:
        ignored = targets.long() == self.ignore_index
        if targets.ndim == 1 and bool(ignored.any()):
            raise InputError(
                f"{self.name}: the target of sample {start + int(ignored.nonzero()[0])} is the ignored label "
                f"{self.ignore_index}, which leaves the sample out of the mean; leave it out of the data instead."
            )
        class_targets(self.name, outputs, targets, start)
        self._check_mean()

    def _check_mean(self) -> None:
        """Where the mean is not that over a sample's own positions, the sum of their weights cannot divide it."""
        if self.weight is not None and self.weighted_mean:
            raise InputError(
                "CrossEntropyLoss(weight=…, reduction='mean') divides by the sum of the weights of a batch, which "
                "depends on the batches; use reduction='none' for the mean of the weighted losses."
            )

    def _check_soft(self, outputs: Tensor, targets: Tensor, axis: int, start: int) -> None:
        if targets.shape != outputs.shape or self.shifted:
            wanted = "integer labels" if self.shifted else "one integer class per sample or position, or probabilities"
            raise InputError(
                f"{self.name} needs {wanted}, got targets of shape {tuple(targets.shape)} and type "
                f"{str(targets.dtype).removeprefix('torch.')} for outputs of shape {tuple(outputs.shape)}"
                f"{way_to_classes(outputs, targets)}."
            )
        wrong = ~((targets >= 0) & (targets <= 1)).all(axis) | ((targets.double().sum(axis) - 1).abs() > 1e-3)
        if bool(wrong.any()):
            sample = start + int(wrong.reshape(len(targets), -1).any(1).nonzero()[0])
            other = "" if outputs.ndim == 2 or self.classes else "; with the classes last pass 'token_cross_entropy'"
            raise InputError(
                f"{self.name} needs soft labels that are probabilities, summing to 1 over the {outputs.shape[axis]} "
                f"classes of dimension {axis}; those of sample {sample} do not{other}."
            )

    def _check_positions(self, outputs: Tensor, targets: Tensor, axis: int, start: int) -> None:
        wanted = (*outputs.shape[:axis], *outputs.shape[axis + 1 :])
        if targets.shape != wanted:
            raise InputError(
                f"{self.name} of outputs {tuple(outputs.shape)} needs one integer class for each position, "
                f"{wanted}, got targets of shape {tuple(targets.shape)}."
            )
        labels = targets.long()
        counted = labels != self.ignore_index
        within(self.name, outputs.shape[axis], labels, counted, start)
        if self.divisor:
            self._check_mean()
        if self.shifted:
            labels, counted = labels[:, 1:], counted[:, 1:]
        empty = ~counted.reshape(len(targets), -1).any(1)
        if bool(empty.any()) and not self.divisor:
            raise InputError(
                f"{self.name}: sample {start + int(empty.nonzero()[0])} has no label that counts, all are "
                f"{self.ignore_index}{' after the first' if self.shifted else ''}, so it has no loss; leave it out."
            )
        if self.weight is not None and self.weighted_mean:
            classes = outputs.shape[axis]
            weightless = ~(self._weights(outputs, classes)[torch.where(counted, labels, 0)] * counted).flatten(1).any(1)
            if bool(weightless.any()):
                raise InputError(
                    f"{self.name}: all labels of sample {start + int(weightless.nonzero()[0])} have the class weight "
                    "0, by the sum of which torch divides; leave it out, or use reduction='none'."
                )

    # ------------------------------------------------------------ values and derivatives

    def _weights(self, outputs: Tensor, classes: int) -> Tensor:
        if self.weight is None:
            return torch.ones(classes, dtype=torch.float64, device=outputs.device)
        return self.weight.detach().to(outputs.device).double()

    def _smoothed(self, rows: Rows) -> Tensor | None:
        """w_c ỹ_c of soft labels, (N·T, C) float64."""
        if rows.soft is None:
            return None
        classes, ease = rows.logits.shape[-1], self.label_smoothing
        soft = (1 - ease) * rows.soft.detach().double() + ease / classes
        return (soft * self._weights(rows.logits, classes)).reshape(-1, classes)

    def scale(self, rows: Rows) -> Tensor:
        """What multiplies A of every row, (N·T,)."""
        soft = self._smoothed(rows)
        share = rows.share.reshape(-1)
        if soft is not None:
            return share * soft.sum(1)
        if self.weight is None:
            return share
        weight = self._weights(rows.logits, rows.logits.shape[-1])
        ease = self.label_smoothing
        return share * ((1 - ease) * weight[rows.labels.reshape(-1)] + ease * weight.mean())

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = self.rows(outputs, targets)
        flat = rows.logits.reshape(-1, rows.logits.shape[-1])
        found = by_rows(self._values, flat, rows.labels.reshape(-1), self._smoothed(rows))
        if outputs.ndim == 2:
            return found
        return (found.reshape(rows.share.shape) * rows.share.to(found)).sum(1)

    def _values(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        weight = None if self.weight is None else self.weight.detach().to(logits)
        if soft is not None:
            return -(soft.to(logits) * logits.log_softmax(1)).sum(1)
        if self.label_smoothing:
            ease = self.label_smoothing
            return F.cross_entropy(logits, labels, weight=weight, reduction="none", label_smoothing=ease)
        label = labels[:, None]
        others = (logits - logits.gather(1, label)).scatter(1, label, -math.inf)
        values = F.softplus(others.logsumexp(1), threshold=40)  # log(1 + Σ_{j≠y} exp(φ_j − φ_y)), right even if tiny
        return values if weight is None else weight[labels] * values

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = self.rows(outputs, targets)
        flat = rows.logits.reshape(-1, rows.logits.shape[-1])
        share = rows.share.reshape(-1) if outputs.ndim > 2 else None
        found = by_rows(self.gradient_of_rows, flat, rows.labels.reshape(-1), self._smoothed(rows), share)
        return self._rows_back(found, outputs, targets)

    def slope_along(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        rows = self.rows(outputs, targets)
        flat, along = (self._flat(tensor, outputs, targets) for tensor in (outputs, direction))

        def piece(logits: Tensor, along: Tensor, labels: Tensor, soft: Tensor | None, share: Tensor) -> Tensor:
            return (self.gradient_of_rows(logits, labels, soft, share) * along).sum(1)

        columns = rows.labels.reshape(-1), self._smoothed(rows), rows.share.reshape(-1)
        return by_rows(piece, flat, along, *columns).reshape(len(outputs), -1).sum(1)

    def _flat(self, tensor: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is shaped like the outputs, as rows (N·T, C)."""
        axis = self.class_axis(outputs, targets)
        return tensor.reshape(outputs.shape).movedim(axis, -1).reshape(-1, outputs.shape[axis])

    def gradient_of_rows(
        self,
        logits: Tensor,
        labels: Tensor,
        soft: Tensor | None,
        share: Tensor | None,
        probabilities: Tensor | None = None,
    ) -> Tensor:
        """The gradient of every row, (R, C), times its share, float64; their softmax may be given."""
        if probabilities is None:
            probabilities = torch.softmax(logits.double(), 1)
        if soft is not None:  # the slopes sum to 0, so that of the top class follows from the others
            label = probabilities.argmax(1, keepdim=True)
            others = (soft.sum(1, keepdim=True) * probabilities - soft).scatter(1, label, 0.0)
            gradient = others.scatter(1, label, -others.sum(1, keepdim=True))
        else:
            label = labels[:, None]
            others = probabilities.scatter(1, label, 0.0)
            gradient = others.scatter(1, label, -others.sum(1, keepdim=True))
            if self.weight is not None or self.label_smoothing:
                weight, ease = self._weights(logits, logits.shape[1]), self.label_smoothing
                gradient = (1 - ease) * weight[label] * gradient
                gradient = gradient + ease * (weight.mean() * probabilities - weight / len(weight))
        return gradient if share is None else share[:, None] * gradient

    @staticmethod
    def centred(logits: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """S, and the direction minus its mean over S."""
        probabilities, direction = torch.softmax(logits.double(), 1), direction.double()
        top = probabilities.argmax(1, keepdim=True)
        shifted = direction - direction.gather(1, top)  # zero at the top class: nothing large cancels
        return probabilities, shifted - (probabilities * shifted).sum(1, keepdim=True)

    def product(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        flat, along = (self._flat(tensor, outputs, targets) for tensor in (outputs, direction))
        found = by_rows(self.product_of_rows, flat, along, self.scale(self.rows(outputs, targets)))
        return self._rows_back(found, outputs, targets)

    def product_of_rows(self, logits: Tensor, direction: Tensor, scale: Tensor) -> Tensor:
        """scale·A·u of every row, (R, C), float64."""
        probabilities, centred = self.centred(logits, direction)
        return scale[:, None] * probabilities * centred

    def quadratic(self, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
        flat, along = (self._flat(tensor, outputs, targets) for tensor in (outputs, direction))
        found = by_rows(self.quadratic_of_rows, flat, along, self.scale(self.rows(outputs, targets)))
        return found.reshape(len(outputs), -1).sum(1)

    def quadratic_of_rows(self, logits: Tensor, direction: Tensor, scale: Tensor) -> Tensor:
        """scale·uᵀA u of every row, (R,), float64."""
        probabilities, centred = self.centred(logits, direction)
        return scale * (probabilities * centred.square()).sum(1)

    def hessian_sum(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Σ c (diag(S) − SSᵀ); S_j(1 − S_j) from the other classes of the row, so that nothing cancels."""
        if outputs.ndim != 2:
            return None
        scale = self.scale(self.rows(outputs, targets))
        total = torch.zeros(outputs.shape[1], outputs.shape[1], dtype=torch.float64, device=outputs.device)
        diagonal, size = total.new_zeros(len(total)), rows_in_double(outputs.shape[1])
        for logits, share in zip(outputs.detach().split(size), scale.split(size), strict=True):
            found = torch.softmax(logits.double(), 1)
            top = found.argmax(1, keepdim=True)
            rest = (1 - found).scatter_(1, top, found.scatter(1, top, 0.0).sum(1, keepdim=True))
            diagonal += share @ (found * rest)
            total -= (share[:, None] * found).T @ found
        total.diagonal().copy_(diagonal)
        return total

    # ------------------------------------------------------------ factors

    def _places(self, rows: Rows) -> Tensor:
        """The positions that count, (N, M), every sample's own first; shorter samples are padded."""
        counted = rows.share > 0
        most = int(counted.sum(1).max()) if len(counted) else 0
        return counted.int().argsort(dim=1, descending=True, stable=True)[:, :most]

    def rank(self, outputs: Tensor, targets: Tensor) -> int:
        rows = self.rows(outputs, targets)
        return self._places(rows).shape[1] * (rows.logits.shape[-1] - 1)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[Factor]:
        rows = self.rows(outputs, targets)
        scale, count = self.scale(rows).reshape(rows.share.shape), len(outputs)
        everyone = torch.arange(count, device=outputs.device)
        for place in self._places(rows).unbind(1):
            for weight, vector in eliminated(rows.logits[everyone, place], scale[everyone, place]):
                if outputs.ndim > 2:
                    whole = torch.zeros(rows.logits.shape, dtype=torch.float64, device=outputs.device)
                    whole[everyone, place] = vector
                    vector = self._rows_back(whole, outputs, targets)
                yield weight, vector

    def sampled_factors(self, outputs: Tensor, targets: Tensor, exact: int, signs: Tensor) -> Iterator[Factor]:
        self._check_exact(exact, outputs, targets)
        rows = self.rows(outputs, targets)
        count, length, classes = rows.logits.shape
        flat, scale = rows.logits.reshape(-1, classes), self.scale(rows)
        chosen = most_probable(flat, scale, (count, length), exact)
        taken = torch.zeros(count * length, classes, dtype=torch.bool, device=outputs.device)
        everyone = torch.arange(count, device=outputs.device) * length
        for step in range(exact):
            where, label = everyone + chosen[:, step, 0], chosen[:, step, 1:]
            taken[where, label[:, 0]] = True
            probabilities = torch.softmax(flat[where].double(), 1)
            left = probabilities.masked_fill(taken[where], 0.0)
            own, mass = probabilities.gather(1, label), left.sum(1, keepdim=True)  # of the classes that remain
            vector = (left / -mass).scatter_(1, label, 1.0)
            if outputs.ndim > 2:
                whole = torch.zeros(count * length, classes, dtype=outputs.dtype, device=outputs.device)
                whole[where] = vector.to(whole)
                vector = self._rows_back(whole, outputs, targets)
            yield scale[where] * (own * mass / (mass + own))[:, 0], vector

        signs = self._flat(signs, outputs, targets)
        sizes: list[Tensor] = []

        def piece(logits: Tensor, taken: Tensor, signs: Tensor) -> Tensor:
            size, vector = combined(logits, taken, signs)
            sizes.append(size)
            return vector if outputs.ndim == 2 else vector.to(outputs.dtype)

        vector = by_rows(piece, flat, taken, signs)
        weight = (scale * torch.cat(sizes)).reshape(count, length)
        total = weight.sum(1)
        if outputs.ndim > 2:
            part = (weight / total.clamp_min(torch.finfo(torch.float64).tiny)[:, None]).sqrt_().reshape(-1, 1)
            vector = self._rows_back(vector.mul_(part.to(vector)), outputs, targets)
        yield total, vector

    def decisions(self, outputs: Tensor, targets: Tensor, start: int = 0) -> Decisions:
        self.check(outputs, targets, start)
        rows = self.rows(outputs, targets)
        if outputs.ndim == 2:
            return Decisions(outputs, rows.labels[:, 0])
        counted = rows.share > 0
        return Decisions(rows.logits[counted], rows.labels[counted], counted.sum(1))


class TokenCrossEntropy(CrossEntropy):
    """Cross entropy of outputs (N, T, C), or (N, d…, C): the classes come last, as for tagged tokens."""

    name = "token_cross_entropy"

    def __init__(self, weight: Tensor | None = None, label_smoothing: float = 0.0, **options: object) -> None:
        super().__init__(weight, label_smoothing, classes="last", **options)  # type: ignore[arg-type]


class CausalLM(TokenCrossEntropy):
    """The loss of a language model: logits (N, T, V) of each token's successor, labels (N, T) with −100 ignored.

    The logits at position t are compared with the label at t + 1, as `transformers` does; the first label and the last
    logits do not count. A sample is a sequence, and its loss the mean over its own tokens that count. The loss that
    models return is the mean over the tokens of the *batch*, which gives long sequences more weight and couples
    the samples; `unit="token"` measures that mean, whatever the batches.
    """

    name = "causal_lm"
    shifted = True

    def check(self, outputs: Tensor, targets: Tensor, start: int = 0) -> None:
        if outputs.ndim != 3:
            raise InputError(
                f"causal_lm needs logits of shape (samples, tokens, vocabulary), got {tuple(outputs.shape)}; use "
                "loss='cross_entropy' for one class per sample."
            )
        super().check(outputs, targets, start)
