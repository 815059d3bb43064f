"""Margins of a classifier: in its outputs, in its softmax, and as a distance to the decision boundary.

With Δ = φ_y − max_{j≠y} φ_j and S the softmax of the outputs φ, the softmax margin is γ = |S_y − max_{j≠y} S_j|. All
scalars are float64 and free of cancellation, for correct and misclassified points, at any margin (mathematics 2.2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Batches, Fingerprint
from spiritlevel.binding.context import IDLE, Context
from spiritlevel.binding.cores import at_a_time, side_by_side
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.devices import doubled, with_double
from spiritlevel.binding.losses import (
    CrossEntropy,
    Decisions,
    Head,
    decisions_of,
    softmax_parts,
    unit_batches,
)
from spiritlevel.binding.parameters import REAL
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError
from spiritlevel.results import Margins
from spiritlevel.samples.distances import Spreads, distances, linearised, norm_of
from spiritlevel.watching.derivatives import check_derivatives, check_input_derivatives

# ---------------------------------------------------------------- margins of given logits


def _checked(name: str, logits: Tensor, y: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (N, C ≥ 2) in float64 and labels (N, 1) on their device; `start` is the number of the first sample."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(f"{name} needs logits of shape (samples, classes >= 2), got {tuple(logits.shape)}.")
    if y.is_floating_point() or y.shape != logits.shape[:1]:
        raise InputError(
            f"{name} needs one integer class for each of the {logits.shape[0]} rows of logits, got labels of shape "
            f"{tuple(y.shape)} and type {str(y.dtype).removeprefix('torch.')}."
        )
    logits = doubled(logits.detach())
    label = y.to(logits.device, torch.int64)[:, None]
    wrong = (label < 0) | (label >= logits.shape[1])
    if bool(wrong.any()):
        sample = int(wrong[:, 0].nonzero()[0])
        raise InputError(
            f"{name}: label {int(label[sample, 0])} of sample {start + sample} is outside the classes "
            f"0 to {logits.shape[1] - 1}."
        )
    return logits, label


def _signed(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label)[:, 0] - logits.scatter(1, label, -math.inf).amax(1)


def _softmax(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """γ = S_top(1 − e^{−|Δ|}) and 1−γ² from 1−γ = (1 − S_top) + S_top·e^{−|Δ|}, both free of cancellation.

    The label and its best rival are the top class and one other, in either order.
    """
    probabilities, top, q = softmax_parts(logits)
    highest = probabilities.gather(1, top[:, None])[:, 0]
    size = _signed(logits, label).abs()
    lack = q + highest * torch.exp(-size)
    return -highest * torch.expm1(-size), lack * (2 - lack)


@checked
def signed_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The signed output margin φ_y − max_{j≠y} φ_j of every row, positive where the label wins.

    Cost: O(N·C). Exact, float64. Reference: paper A, section 4.

    >>> signed_margin(torch.tensor([[1.0, 3.0, 0.5], [1.0, 3.0, 0.5]]), torch.tensor([1, 0]))
    tensor([ 2., -2.], dtype=torch.float64)
    """
    return _signed(*_checked("signed_margin", logits, y))


@checked
def output_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The output margin |φ_y − max_{j≠y} φ_j| of every row, as paper A defines it.

    An absolute value does not tell right from wrong; `signed_margin` does. Cost: O(N·C). Exact, float64.

    >>> output_margin(torch.tensor([[1.0, 3.0, 0.5]]), torch.tensor([0]))
    tensor([2.], dtype=torch.float64)
    """
    return _signed(*_checked("output_margin", logits, y)).abs()


@checked
def softmax_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The softmax margin γ = |S_y − max_{j≠y} S_j| of every row.

    Computed as S_top(1 − e^{−|Δ|}), so that small margins keep all their digits. Cost: O(N·C). Exact to rounding,
    float64. Reference: paper A, section 3.1.

    >>> softmax_margin(torch.tensor([[0.0, 0.0], [1e-9, 0.0]], dtype=torch.float64), torch.tensor([0, 0]))
    tensor([0.0000e+00, 5.0000e-10], dtype=torch.float64)
    """
    return _softmax(*_checked("softmax_margin", logits, y))[0]


@checked
def softmax_gap(logits: Tensor, y: Tensor) -> Tensor:
    """1 − γ² of every row, the factor of the margin bounds, without cancellation.

    1−γ = (1−S_top) + S_low, S_low the lower of S_y and its best rival; for correct and misclassified points alike. It
    bounds the lack of confidence: ½(1−γ²) ≤ 1−ΣS² ≤ 1−γ² (mathematics 3.2). Cost: O(N·C). Exact to rounding, float64.

    >>> float(softmax_gap(torch.tensor([[40.0, 0.0]]), torch.tensor([0])))  # 1 - gamma**2 gives 0 here
    1.69934170...e-17
    """
    return _softmax(*_checked("softmax_gap", logits, y))[1]


def _square_norms(name: str, inputs: Tensor, logits: Tensor) -> Tensor:
    if inputs.ndim == 0 or inputs.shape[0] != logits.shape[0]:
        raise InputError(
            f"{name} needs one input per row of logits, got inputs of shape {tuple(inputs.shape)} and "
            f"{logits.shape[0]} logits."
        )
    return doubled(inputs.detach()).to(with_double(logits.device)).reshape(len(inputs), -1).square().sum(1)


@checked
def margin_bound(inputs: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """The margin bound (‖x‖² + 1)(1 − γ²) ≥ ACEHT of every sample, correct or not.

    This is the form that holds: 1−ΣS² ≤ 1−γ², as γ ≤ S_max. It is at most twice ACEHT. `printed_margin_bound` is the
    paper's. Cost: O(N·(d + C)). Exact to rounding, float64. Reference: paper A, section 3.2; proof in mathematics 3.2.

    >>> margin_bound(torch.ones(1, 3), torch.zeros(1, 2), torch.tensor([0]))  # ACEHT is 2 here
    tensor([4.], dtype=torch.float64)
    """
    gap = _softmax(*_checked("margin_bound", logits, y))[1]
    return (_square_norms("margin_bound", inputs, logits) + 1) * gap


@checked
def printed_margin_bound(inputs: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """‖x‖(1 − γ²) of every sample, the "margin bound" as printed in paper A: in fact a *lower* bound on ACEHT.

    ‖x‖(1−γ²) ≤ 2‖x‖(1−ΣS²) ≤ (‖x‖²+1)(1−ΣS²). For comparison with the paper only; `margin_bound` is the upper bound.
    Cost: O(N·(d + C)). Exact to rounding, float64. Reference: paper A, section 3.2; mathematics 3.3.

    >>> printed_margin_bound(torch.ones(1, 4), torch.zeros(1, 2), torch.tensor([0]))  # ACEHT is 2.5 here
    tensor([2.], dtype=torch.float64)
    """
    gap = _softmax(*_checked("printed_margin_bound", logits, y))[1]
    return _square_norms("printed_margin_bound", inputs, logits).sqrt() * gap


# ---------------------------------------------------------------- margins of a model on data

_NUMBERS = 2**22  # at most this many numbers in the inputs of a batch; a token stands for many activations
_TOKEN = 2**8


@checked
def margins(
    model: nn.Module,
    data: Any,
    *,
    distance: int | float | str | None = None,
    layer: str | None = None,
    loss: Any = "cross_entropy",
    batch_norm: str = "eval",
    batch_size: int | None = None,
    group: Any = None,
    **reading: Unpack[Reading],
) -> Margins:
    """Margins of every sample, and its linearised distance to the decision boundary if asked for.

    `data`: a pair of tensors, a `Dataset`, a `DataLoader` or batches, in an order that repeats. Models with one logit
    take `loss="binary_cross_entropy"` and are read as two classes with outputs (0, φ): the margin is φ for label 1, −φ
    for label 0, the softmax margin |2σ(φ) − 1|.

    `distance=2` or `"inf"` adds, in that norm, min over *all* other classes j of (φ_y−φ_j)/‖∇(φ_y−φ_j)‖, the gradient
    in the dual norm: the distance to the boundary of the linearised network, negative for misclassified points. The
    space is that of the floating-point inputs, or of the output of the module named `layer`; with `unit="token"` that
    of the whole sequence, in which a position's outputs may read all places. Exact for networks that are affine from
    there on. Where the gradient is zero, no boundary is in sight: ±inf with the sign of φ_y−φ_j.

    `group`: a `torch.distributed` group; every rank passes the same model and data, takes its share of the batches, and
    returns the whole result. `None` never communicates.

    `reading`: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a sample
    is; see `Reading`.

    Cost: one forward pass, no graph; with `distance` another C−1 backward passes, a whole batch at once. Memory: one
    batch, by default at most 512 samples (256 with `distance`), fewer if they are large. Margins are exact to the
    rounding of the outputs. References: paper A, section 4; Elsayed et al. 2018 (distance); Jiang et al. 2018 (layer).

    >>> net = nn.Linear(2, 2)
    >>> _ = nn.init.eye_(net.weight), nn.init.zeros_(net.bias)
    >>> found = margins(net, (torch.tensor([[3.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0])), distance=2)
    >>> found.signed, found.distance
    (tensor([ 2., -2.], dtype=torch.float64), tensor([ 1.4142, -1.4142], dtype=torch.float64))
    """
    everything = REAL if isinstance(model, nn.Module) and next(model.parameters(), None) is not None else None
    context = Context(
        model,
        data,
        loss=loss,
        params=everything,
        batch_norm=batch_norm,
        batch_size=batch_size,
        group=group,
        sharded=True,
        **reading,
    )
    return margins_in(context, distance=distance, layer=layer)


def margins_in(context: Context, *, distance: int | float | str | None = None, layer: str | None = None) -> Margins:
    """The margins of every sample in a context that is already bound; see `margins`."""
    norm, ranks, form = norm_of(distance), context.ranks, context.form
    if layer is not None and not norm:
        raise InputError("layer= says where a distance is measured; pass distance=2 or distance='inf' as well.")
    if norm:
        _check_distances(context)
    else:  # units are rows of outputs that exist anyway
        context = context.of_means
    problem = context.problem
    with ranks.together():
        batches = context.batches.cut(context.batch_size)
        why = "" if norm else context.find_head()
        if context.batch_size is None and not context.whole:
            most = _batch_size(batches.first(1)[0], 256 if norm else 512)
            batches.size = context.fair(context.fitting(most, in_pieces=not norm))
    if batches.size is not None and not context.whole:
        batches.size = ranks.least(batches.size)
    if problem.sharded:  # all ranks look at the same samples, since all must make the same passes
        with ranks.together(), problem.active():
            check_independence(problem, context.first(64)[0])

    found = _Pass(context, norm, layer, units=context.form.unit != form.unit, looked=problem.sharded)
    parts: list[tuple[int, Tensor]] = []
    with ranks.together(), problem.active(), torch.set_grad_enabled(bool(norm)):
        side_by_side(found.each(batches), found.begin, parts.append, at_a_time(problem.device) if norm else 1)
    ranks.same((found.sizes, str(found.fingerprint)), "their data or batches")
    several = ranks.least(0 if found.several else 1) == 0
    layout, spread = found.spreads.over(ranks) if norm else ("", math.nan)
    if norm:
        context.once(_layout_of(layer), lambda: layout)
    columns = ranks.joined(parts, sum(found.sizes), _COLUMNS + bool(norm)).T.contiguous()
    signed, softmax, gap, labels, right, made, *rest = columns
    return Margins(
        output=signed.abs(),
        signed=signed,
        softmax=softmax,
        softmax_gap=gap,
        correct=right == 1,
        targets=labels.long(),
        distance=rest[0] if norm else None,
        norm=norm,
        layer=layer or "",
        spread=spread,
        fingerprint=str(found.fingerprint),
        **found.fingerprint.places,
        right=right if several else None,
        decisions=made.long() if several else None,
        unit=form.unit,
        notes=(*context.notes, why) if why else context.notes,
    )


def layout_in(context: Context, layer: str) -> str:
    """How that layer holds the points of samples or positions, once `margins_in` has measured distances there."""
    return context.once(_layout_of(layer), lambda: "")


def _layout_of(layer: str | None) -> tuple[str, str | None]:
    return "layout of points at", layer


def _check_distances(context: Context) -> None:
    """Refuse to measure distances where a sample has none of its own, or where the model is sharded."""
    if context.problem.sharded:
        raise InputError("distances are not available for a sharded model; leave out distance=.")
    if context.coupling == "outputs":
        raise InputError(
            f"{context.why_coupled}: a sample's outputs depend on the whole batch, so it has no distance of its own; "
            "use batch_norm='eval' and a model without other ties between its samples."
        )


@dataclass
class _Pass:
    """One pass over the data, and what it has found so far."""

    context: Context
    norm: str
    layer: str | None
    units: bool
    """Whether the margins are those of rows of outputs, such as tokens, while the data hold samples."""
    looked: bool
    """Whether the model has been looked at on some samples."""
    several: bool = False
    """Whether a sample makes several decisions."""
    sizes: list[int] = field(default_factory=list)
    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    spreads: Spreads = field(init=False)

    def __post_init__(self) -> None:
        self.spreads = Spreads(self.context.form.unit == "token")

    def each(self, batches: Batches) -> Iterator[tuple[int, Any, Tensor]]:
        """The batches of this rank, each with the number of its first sample."""
        problem, ranks, first = self.context.problem, self.context.ranks, 0
        for index, (inputs, targets) in enumerate(batches):
            start, made = sum(self.sizes), 0
            apart = unit_batches(problem.loss, inputs, targets, first=first) if self.units else [(inputs, targets)]
            for some, labels in apart:
                self.fingerprint.update(some, labels)
                made += len(labels)
            self.sizes.append(made)
            first += len(targets)
            if ranks.takes(index):
                yield start, *problem.place(inputs, targets)
        if problem.sharded and ranks.rank >= (len(self.sizes) % ranks.count or ranks.count):
            yield IDLE, *self.context.first(1)

    def begin(self, batch: tuple[int, Any, Tensor]) -> Callable[[], tuple[int, Tensor]]:
        """The forward pass of a batch; the function that is returned does the rest without the model."""
        problem, (start, inputs, targets) = self.context.problem, batch
        outputs: Tensor | Head
        points: list[Tensor] = []
        with self.context.each_together():
            if self.norm:
                outputs, points = linearised(problem, inputs, self.layer)
            else:
                outputs = problem.head_or_outputs(problem.params, inputs)
            problem.checked(outputs, inputs, targets, max(start, 0))
        if start == IDLE:
            return lambda: (0, torch.zeros(0, _COLUMNS, dtype=torch.float64))
        if not self.looked and len(targets) and not self.context.whole:
            self._look(inputs, targets, outputs.detach())
        found = decided(problem, outputs, targets, start)
        self.several |= found.counts is not None and not self.units
        if self.norm and self.several:
            raise InputError(
                "a distance needs one decision for each sample, but here a sample makes one at every position or for "
                "every label; measure single positions with unit='token', or leave out distance=."
            )
        self.spreads.update(points, inputs)

        def rest() -> tuple[int, Tensor]:
            part = _of_rows(found, self.units)
            if self.norm:
                assert isinstance(found.logits, Tensor)
                watch = functools.partial(self.spreads.watch, inputs=inputs)
                distance = distances(found.logits, found.labels, points, self.norm, start, watch)
                part = torch.cat([part, distance[:, None]], 1)
            return start, part.cpu()

        return rest

    def _look(self, inputs: Any, targets: Tensor, outputs: Tensor | Head) -> None:
        """Make sure, once, that samples have outputs of their own and the right derivatives."""
        problem, self.looked = self.context.problem, True
        check_independence(problem, inputs, outputs)
        if self.norm and self.layer is None:
            if not problem.facts.get(_DERIVATIVES):  # true of the code: models with other values inherit it
                check_input_derivatives(problem, inputs, targets, "leave out distance=")
                problem.facts[_DERIVATIVES] = True
        elif self.norm:
            check_derivatives(problem, inputs, targets, twice=False)


_DERIVATIVES = "derivatives in the inputs"
_COLUMNS = 6  # margin, softmax margin, gap, label, share of decisions that are right, their number
_ROWS = 2**21  # logits in one piece


def decided(problem: Problem, outputs: Tensor | Head, targets: Tensor, start: int = 0) -> Decisions:
    """The choices between classes that the outputs stand for, multiplied out or not."""
    if isinstance(outputs, Tensor):
        return problem.loss.decisions(outputs, targets, start)
    assert isinstance(problem.loss, CrossEntropy)
    return decisions_of(problem.loss, outputs, targets, start)


def share_right(found: Decisions) -> Tensor:
    """The share of every sample's decisions that are right, (N,)."""
    labels = found.labels[:, None]
    right = torch.cat([_signed(some.double(), labels[here]) > 0 for here, some in _pieces(found.logits)]).double()
    return right if found.counts is None else _sums(right, found.counts) / found.counts


def _of_rows(found: Decisions, alone: bool) -> Tensor:
    """What is known about every sample, (N, columns): the means over its decisions, or each decision if `alone`."""
    labels, pieces = found.labels[:, None], []
    for here, piece in _pieces(found.logits):
        some, label = piece.double(), labels[here]
        signed = _signed(some, label)
        known = [signed, *_softmax(some, label), label[:, 0].double(), (signed > 0).double(), torch.ones_like(signed)]
        pieces.append(torch.stack(known, 1))
    rows = torch.cat(pieces)
    if found.counts is None or alone:
        return rows
    means = _sums(rows, found.counts) / found.counts[:, None]
    means[:, 3], means[:, 5] = -1.0, found.counts.double()  # no label of its own
    return means


def _sums(rows: Tensor, counts: Tensor) -> Tensor:
    """The sums over the decisions of every sample, whose rows stand one after the other."""
    sample = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    return rows.new_zeros(len(counts), *rows.shape[1:]).index_add_(0, sample, rows)


def _pieces(logits: Tensor | Head) -> Iterator[tuple[slice, Tensor]]:
    """Rows of logits, a piece at a time, with their indices."""
    if isinstance(logits, Head):
        yield from logits.detach().pieces()
        return
    size = max(1, _ROWS // logits.shape[1])
    for k in range(0, max(1, len(logits)), size):
        yield slice(k, k + size), logits.detach()[k : k + size]


def _batch_size(sample: Any, most: int) -> int:
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    size = sum(leaf.numel() * (1 if leaf.is_floating_point() else _TOKEN) for leaf in leaves)
    return max(1, min(most, _NUMBERS // max(1, size)))
