"""Logits that wait, copied, until many of them are looked at together: the training loop pays only for the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spiritlevel.errors import InputError, counted

_ROWS, _NUMBERS = 8192, 2**20  # what waits at most: rows, and logits
_PIECE = 2**15  # logits that are worked on at once: some arrays of this size stay in a core's own cache
_FAR = 700.0  # exp(−700) is nothing to float32; numbers too small for float64 would take ten times as long


_Call = tuple[Tensor, Tensor, Tensor, int, int]  # logits, targets, ids, step and number of rows


class Waiting:
    """Batches that have been recorded and not yet looked at."""

    def __init__(self) -> None:
        self.outputs: int | None = None
        """Logits per sample, once known."""
        self.device = torch.device("cpu")
        self._calls: list[_Call] = []
        self._shapes: tuple[torch.Size, torch.Size, torch.Size] | None = None
        self._rows = self._room = self._count = 0

    def add(self, logits: Tensor, targets: Tensor, ids: Tensor, step: int) -> bool:
        """Take in a batch; returns whether to look now. The first is looked at alone, so that a mistake shows at once.

        With a small network this is what recording costs: a few operations on small tensors, each of which has left
        the processor's cache since the last step. So shapes are compared with those before, and all else waits.
        """
        shapes = logits.shape, targets.shape, ids.shape
        if shapes != self._shapes:
            self._fit(*shapes)
        if not self._count:
            return False
        # copies, for the loop may write over its own
        self._calls.append((logits.detach().clone(), targets.clone(), ids.clone(), step, self._count))
        self._rows += self._count
        return self._rows >= self._room

    def _fit(self, logits: torch.Size, targets: torch.Size, ids: torch.Size) -> None:
        count = ids[0] if len(ids) == 1 else -1
        if not 0 < len(logits) < 3 or logits[0] != count or targets.numel() != count:
            raise InputError(
                f"record needs logits (samples, classes), one class and one id per sample, got shapes {tuple(logits)}, "
                f"{tuple(targets)} and {tuple(ids)}; flatten the tokens of a sequence and give each an id of its own."
            )
        outputs = logits[1] if len(logits) == 2 else 1
        if self.outputs not in (None, outputs):
            raise InputError(f"record got {outputs} logits per sample, but {self.outputs} before.")
        self._shapes, self._count, self.outputs = (logits, targets, ids), count, outputs

    def clear(self) -> None:
        """Forget what waits."""
        self._calls, self._rows = [], 0

    def look(self, samples: int) -> tuple[dict[str, Tensor], Tensor, Tensor] | None:
        """Columns of a log of what has waited, the labels and the top classes; None if nothing has."""
        calls = self._calls
        self.clear()
        if not calls:
            return None
        logits, targets, numbers, at, sizes = zip(*calls, strict=True)
        self.device, ids = logits[-1].device, _joined_rows(numbers)
        rows = _joined_rows(logits).reshape(len(ids), -1)
        self._room = min(_ROWS, _NUMBERS // rows.shape[1])
        try:
            ids, labels = check_batch(ids, _joined_rows(targets).reshape(-1), samples, rows.shape[1])
        except InputError:
            self._calls = [call for call in calls if _fits(call, samples, rows.shape[1])]  # only the others are lost
            self._rows = sum(size for *_, size in self._calls)
            raise
        loss, margin, entropy, top = observed(rows, labels)
        times = {"steps": torch.tensor(at), "rows": torch.tensor(sizes)}
        found = {"ids": ids, "loss": loss, "margin": margin, "entropy": entropy, **times}
        return found, labels, top


def _fits(call: _Call, samples: int, outputs: int) -> bool:
    try:
        check_batch(call[2].cpu(), call[1].reshape(-1).cpu(), samples, outputs)
    except InputError:
        return False
    return True


def _joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors on the CPU; they are moved as one where they lie together."""
    first = parts[0].device, parts[0].ndim
    if any((part.device, part.ndim) != first for part in parts):
        parts = [part.cpu().reshape(len(part), -1) for part in parts]
    return torch.cat(list(parts)).detach().cpu()


def observed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy, signed margin, entropy of the softmax, and the top class of every row.

    With t the top class and Z = Σ_{j≠t} exp(φ_j − φ_t), the loss is log(1 + Z) + (φ_t − φ_y) and the entropy
    log(1 + Z) + Σ_{j≠t} (φ_t − φ_j) p_j / (1 + Z), p_j = exp(φ_j − φ_t): sums of positive terms, right at any margin.
    Differences of logits are rounded as the logits are (float32 at least), all else is float64. One logit φ is read as
    the two classes (0, φ).

    >>> loss, margin, entropy, top = observed(torch.tensor([[80.0, 0.0]]), torch.tensor([0]))
    >>> f"{float(loss):.3e} {float(margin):g} {float(entropy):.3e} {int(top)}"
    '1.805e-35 80 1.462e-33 0'
    """
    rows = logits if logits.dtype == torch.float64 else logits.float()
    if rows.shape[1] == 1:
        rows = torch.cat([torch.zeros_like(rows), rows], 1)
    top = labels.clone()
    table, classes = rows.numpy(), top.numpy()
    loss, margin, entropy = np.empty(len(table)), np.empty_like(table[:, 0]), np.empty(len(table))
    piece = max(1, _PIECE // table.shape[1])
    with np.errstate(all="ignore"):  # logits may be infinite, or no numbers
        for start in range(0, len(table), piece):
            part = slice(start, start + piece)
            loss[part], margin[part], entropy[part] = _observed(table[part], classes[part])
    return torch.from_numpy(loss), torch.from_numpy(margin), torch.from_numpy(entropy), top


def _observed(table: NDArray[Any], classes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Loss, margin and entropy of rows of logits; the labels in `classes` give way to the top classes."""
    count = len(table)
    columns = np.array(table.T, order="C")  # a class in a row: sums over classes are then quick
    flat, places = columns.reshape(-1), np.arange(count)
    labels = classes * count + places
    own = flat[labels]
    flat[labels] = -np.inf
    rival = columns.max(0)
    margin = own - rival
    wrong = np.flatnonzero(~(margin > 0))
    if len(wrong):  # their top class is another, or as high
        flat[labels[wrong]] = own[wrong]
        classes[wrong] = table[wrong].argmax(1)
        flat[classes[wrong] * count + wrong] = -np.inf
    highest = np.maximum(own, rival)
    columns -= highest
    # in float64, so that the kept float32 does not depend on which samples were looked at together
    below = np.maximum(columns, -_FAR, dtype=np.float64)
    shares = np.exp(below)
    mass = shares.sum(0)
    below *= shares
    lack = np.log1p(mass)
    return lack + (highest - own), margin, lack - below.sum(0) / (1 + mass)


def check_batch(ids: Tensor, labels: Tensor, samples: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Ids and classes as int64, if they are such; `InputError` names the first that is not."""
    for name, tensor in (("ids", ids), ("classes", labels)):
        if tensor.is_complex() or (tensor.is_floating_point() and not (name == "classes" and outputs == 1)):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"record needs whole numbers as {name}, got {kind}.")
    if not _within(ids, samples):
        wrong = ids[(ids < 0) | (ids >= samples)]
        raise InputError(
            f"record got the id {int(wrong[0])}, but the ids of {counted(samples, 'sample')} are 0 to {samples - 1}; "
            "pass places in the training data, not in the batch or in a larger set."
        )
    classes = max(outputs, 2)
    if not _within(labels, classes) or (labels.is_floating_point() and not torch.equal(labels, labels.round())):
        strange = labels[~((labels >= 0) & (labels < classes) & (labels == labels.round()))]
        stand = "one output stands" if outputs == 1 else f"{outputs} outputs stand"
        raise InputError(
            f"record got the class {strange[0].item():g}, but the model's {stand} for the classes 0 to {classes - 1}; "
            "leave out samples without a class."
        )
    return ids.long(), labels.long()


def _within(values: Tensor, limit: int) -> bool:
    """Whether all of them are at least 0 and below the limit."""
    whole = values.long() if values.dtype == torch.bool else values
    return not len(whole) or 0 <= whole.min().item() <= whole.max().item() < limit
