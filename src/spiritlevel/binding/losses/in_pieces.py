"""Cross entropy of outputs that are not multiplied out: logits h Wᵀ + b of a last linear layer, in pieces of rows.

A language model with 50,000 words has 50,000 outputs at every position: its logits, their tangents and the cotangents
of one sequence take more memory than all that comes before them. Given what the last layer is applied to, nothing of
that size is needed (mathematics 2.7). With z = W h + b of a row, g = ∂ℓ/∂z, A = ∂²ℓ/∂z², and ż = W ḣ + Ẇ h + ḃ for a
motion (ḣ, Ẇ, ḃ),

- the slopes are (Wᵀg, Σ g hᵀ, Σ g),
- the Gauss-Newton product is (Wᵀu, Σ u hᵀ, Σ u) with u = A ż, and the Hessian's (Wᵀu + Ẇᵀg, Σ u hᵀ + g ḣᵀ, Σ u),
- the empirical Fisher matrix's is the slopes with u = g·a, a = Σ gᵀż over the rows of the sample,

sums over rows, which are taken a piece at a time. To whatever records operations each is one operation, so that no tape
holds logits either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.losses.base import Decisions
from spiritlevel.binding.losses.cross_entropy import CrossEntropy
from spiritlevel.binding.losses.elimination import by_rows, rows_in_double
from spiritlevel.binding.losses.heads import Head, rows_at_once


class HeadLoss:
    """A cross entropy of a batch of such outputs: slopes and products in the shape of its head."""

    def __init__(self, loss: CrossEntropy, head: Head, targets: Tensor) -> None:
        rows = loss.rows(head.stand_in(), targets)
        scale = loss.scale(rows).reshape(-1)
        count, length = rows.labels.shape
        sample = torch.arange(count, device=targets.device).repeat_interleave(length)
        weight = None if loss.weight is None else loss.weight.detach().to(head.hidden.device).double()
        self.rows = rows.labels.reshape(-1), rows.share.reshape(-1), scale, sample
        self.options = weight, loss.label_smoothing

    def slopes(self, head: Head) -> Head:
        """∂L/∂(h, W, b)."""
        return self._call("slopes", head)

    def product(self, kind: str, head: Head, moved: _Motion) -> Head:
        """The cotangents (h, W, b) of "hessian", "gauss_newton" or "fisher" times a motion."""
        return self._call(kind, head, moved)

    def forms(
        self, head: Head, firsts: Tensor, seconds: Tensor, weights: Tensor | None, biases: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Σ_k ż_kᵀAż_k and gᵀΣ_k z̈_k of every group of directions and sample, both (G, N), float64.

        `firsts` ḣ_k (K, N, …, d) and `seconds` Σ_k ḧ_k (G, N, …, d) are the terms before the layer, `weights` and
        `biases` those of the layer itself, Ẇ_k and ḃ_k: z̈ = W ḧ + 2 Ẇ ḣ. Direction k belongs to group k mod G.
        """
        labels, share, scale, sample = self.rows
        loss, groups = CrossEntropy(*self.options), len(seconds)
        hidden, width = head.hidden.reshape(-1, head.hidden.shape[-1]), head.hidden.shape[-1]
        firsts, seconds = firsts.reshape(len(firsts), -1, width), seconds.reshape(groups, -1, width)
        curved, rest = torch.zeros(2, groups, len(head.hidden), dtype=torch.float64, device=hidden.device)
        for rows in share.nonzero()[:, 0].split(rows_at_once(len(head.weight))):
            here, where = hidden[rows], sample[rows]
            logits = F.linear(here, head.weight, head.bias)
            slope = _slope(loss, logits, labels[rows], share[rows])
            pulled = slope @ head.weight
            for group, second in enumerate(seconds):
                rest[group].index_add_(0, where, (pulled.double() * second[rows]).sum(1))
            for index, first in enumerate(firsts):
                moved = first[rows] @ head.weight.T
                if weights is not None:
                    moved += here @ weights[index].T
                    along = ((slope @ weights[index]).double() * first[rows]).sum(1)
                    rest[index % groups].index_add_(0, where, 2 * along)
                if biases is not None:
                    moved += biases[index]
                form = by_rows(loss.quadratic_of_rows, logits, moved, scale[rows])
                curved[index % groups].index_add_(0, where, form)
        return curved, rest

    def _call(self, kind: str, head: Head, moved: _Motion = (None, None, None)) -> Head:
        flat = head.hidden.flatten(0, -2)
        along = None if moved[0] is None else moved[0].flatten(0, -2)
        found = _in_pieces(kind, flat, head.weight, head.bias, along, moved[1], moved[2], *self.rows, *self.options)
        return Head(found[0].reshape(head.hidden.shape), found[1], None if head.bias is None else found[2])


_Motion = tuple[Tensor | None, Tensor | None, Tensor | None]


def can_be_in_pieces(loss: Any, shape: torch.Size, targets: Tensor, positions: tuple[int, ...]) -> bool:
    """Whether outputs of this shape are rows of logits in their last dimension, with one target class for each."""
    if not isinstance(loss, CrossEntropy) or targets.is_floating_point() or len(shape) < 2:
        return False
    whole: CrossEntropy = getattr(loss, "whole", loss)  # of units
    return whole.axis(shape, positions) == len(shape) - 1


def decisions_of(loss: CrossEntropy, head: Head, targets: Tensor, start: int = 0) -> Decisions:
    """The choices that count, for outputs that are not multiplied out; see `Loss.decisions`."""
    shape = head.stand_in()
    loss.check(shape, targets, start)
    rows = loss.rows(shape, targets)
    counted = rows.share > 0
    hidden = head.hidden.reshape(*counted.shape, -1)[counted]
    counts = None if shape.ndim == 2 else counted.sum(1)
    return Decisions(head._replace(hidden=hidden), rows.labels[counted], counts)


def _slope(loss: CrossEntropy, logits: Tensor, labels: Tensor, share: Tensor) -> Tensor:
    """∂ℓ/∂z of some rows, typed like them."""
    return by_rows(lambda z, y, s: loss.gradient_of_rows(z, y, None, s).to(logits.dtype), logits, labels, share)


def _output_hessian_product(
    loss: CrossEntropy, logits: Tensor, direction: Tensor, scale: Tensor, own: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """A·u of some rows, typed like them, and ∂ℓ/∂z from the same softmax if their labels and shares are given."""
    size = rows_in_double(logits.shape[1])
    bend = torch.empty_like(logits)
    slope = bend if own is None else torch.empty_like(logits)
    for start in range(0, len(logits), size):
        here = slice(start, start + size)
        probabilities, centred = loss.centred(logits[here], direction[here])
        if own is not None:
            labels, share = own
            slope[here] = loss.gradient_of_rows(logits[here], labels[here], None, share[here], probabilities)
        bend[here] = centred.mul_(probabilities).mul_(scale[here, None])
    return bend, slope


@torch.library.custom_op("spiritlevel::head", mutates_args=())
def _in_pieces(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden_moved: Tensor | None,
    weight_moved: Tensor | None,
    bias_moved: Tensor | None,
    labels: Tensor,
    share: Tensor,
    scale: Tensor,
    sample: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of hidden (R, d), weight and bias, from the rows that count; see the top of this file."""
    loss = CrossEntropy(class_weight, smoothing)
    found = torch.zeros_like(hidden), torch.zeros_like(weight), weight.new_zeros(len(weight))
    counted = share.nonzero()[:, 0].split(rows_at_once(len(weight)))

    def moved(rows: Tensor, here: Tensor) -> Tensor:
        total = torch.zeros((), dtype=here.dtype, device=here.device) if bias_moved is None else bias_moved
        if hidden_moved is not None:
            total = total + hidden_moved[rows] @ weight.T
        return total if weight_moved is None else total + here @ weight_moved.T

    def slope(rows: Tensor, logits: Tensor) -> Tensor:
        return _slope(loss, logits, labels[rows], share[rows])

    along = share.new_zeros(int(sample[-1]) + 1 if len(sample) else 0)
    if kind == "fisher":
        for rows in counted:
            here = hidden[rows]
            each = slope(rows, F.linear(here, weight, bias)).mul_(moved(rows, here)).sum(1, dtype=torch.float64)
            along.index_add_(0, sample[rows], each)
    for rows in counted:
        here = hidden[rows]
        logits = F.linear(here, weight, bias)
        if kind in ("slopes", "fisher"):
            cotangent = slope(rows, logits)
            if kind == "fisher":
                cotangent *= along[sample[rows], None].to(cotangent)
        else:
            direction = moved(rows, here).expand_as(logits)
            own = (labels[rows], share[rows]) if kind == "hessian" else None
            cotangent, gradient = _output_hessian_product(loss, logits, direction, scale[rows], own)
            del direction
        part = cotangent @ weight
        if kind == "slopes" or weight_moved is not None:  # not needed for a weight that does not move
            found[1].addmm_(cotangent.T, here)
        found[2].add_(cotangent.sum(0))
        if kind == "hessian" and weight_moved is not None:
            del cotangent, logits  # a piece is large
            part.addmm_(gradient, weight_moved)
            if hidden_moved is not None:
                found[1].addmm_(gradient.T, hidden_moved[rows])
        found[0][rows] = part
    return found


@_in_pieces.register_vmap
def _one_by_one(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    each = [
        _in_pieces(*(arg if dim is None else arg.select(dim, k) for arg, dim in zip(args, in_dims, strict=True)))
        for k in range(info.batch_size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*each, strict=True)), (0, 0, 0)
