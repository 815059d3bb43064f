"""A = diag(S) − SSᵀ of rows of logits as a sum of factors, class by class with the top one last (mathematics 2.3).

Rows are worked on in pieces, so that only a piece is ever held in float64 more than once, however large the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from spiritlevel.binding.losses.base import Factor
from spiritlevel.binding.losses.scalars import softmax_parts

_PIECE = 2**21  # logits that are worked on at once


def rows_in_double(classes: int) -> int:
    """How many rows of this many logits are worked on at once in float64."""
    return max(1, _PIECE // max(1, classes))


def by_rows(function: Callable[..., Tensor], *columns: Tensor | None) -> Tensor:
    """A function of rows, in pieces of them; each column has one entry per row, or is None."""
    first = columns[0]
    assert first is not None
    size = rows_in_double(first.shape[-1])
    if len(first) <= size:
        return function(*columns)
    starts = range(0, len(first), size)
    return torch.cat([function(*(None if c is None else c[k : k + size] for c in columns)) for k in starts])


def eliminated(logits: Tensor, scale: Tensor) -> Iterator[Factor]:
    """The factors of scale·(diag(S) − SSᵀ) of rows (N, C)."""
    probabilities, top, _ = softmax_parts(logits)
    top = top[:, None]
    weights, after = _elimination(probabilities.scatter(1, top, 0.0), probabilities.gather(1, top))
    weights *= scale[:, None]
    classes = torch.arange(logits.shape[1], device=logits.device)
    for j in range(logits.shape[1] - 1):
        label = j + (top <= j).long()  # the j-th class, not counting the top one
        later = (classes > label) | (classes == top)
        vector = torch.where(later, -probabilities / after.gather(1, label), 0.0).scatter_(1, label, 1.0)
        yield weights.gather(1, label)[:, 0], vector


def most_probable(flat: Tensor, scale: Tensor, shape: tuple[int, int], exact: int) -> Tensor:
    """The places and classes (N, exact, 2) of a sample's largest scale·S, except the top class of each row."""
    count, length = shape
    if not exact:
        return torch.zeros(count, 0, 2, dtype=torch.long, device=flat.device)

    def largest(logits: Tensor, scale: Tensor) -> Tensor:
        probabilities, top, _ = softmax_parts(logits)
        most = min(exact, logits.shape[1] - 1)
        found = (scale[:, None] * probabilities).scatter(1, top[:, None], -1.0).topk(most, dim=1)
        return torch.stack([found.values, found.indices.double()], 2)

    found = by_rows(largest, flat, scale).reshape(count, length, -1, 2)
    most = found.shape[2]
    best = found[..., 0].reshape(count, length * most).topk(exact, dim=1).indices
    labels = found[..., 1].reshape(count, length * most).gather(1, best).long()
    return torch.stack([best // most, labels], 2)


def combined(logits: Tensor, taken: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Σ ±√d_j v_j of each row over the classes that are not taken and not the top one: its square size, and its unit.

    The classes that are taken are eliminated first, so what is left of A belongs to the others alone.
    """
    probabilities, top, _ = softmax_parts(logits)
    top = top[:, None]
    tops = probabilities.gather(1, top)
    rest = probabilities.scatter_(1, top, 0.0).masked_fill_(taken, 0.0)
    weights, after = _elimination(rest, tops)
    coefficients = weights.sqrt_().mul_(signs)
    size = torch.linalg.vector_norm(coefficients, dim=1, keepdim=True)
    coefficients /= size.clamp_min(torch.finfo(torch.float64).tiny)
    sums = (coefficients / after).cumsum_(1)
    del after  # what follows sets the peak of memory
    coefficients[:, 1:] -= rest[:, 1:].mul_(sums[:, :-1])
    return size[:, 0].square(), coefficients.scatter_(1, top, -tops * sums[:, -1:])


def _elimination(others: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Weights d and the mass q after each class, when the classes of `others` go in order and the top one stays."""
    upto = others.flip(1).cumsum_(1).flip(1).add_(tops)
    after = torch.cat([upto[:, 1:], tops], 1)
    return (others * after).div_(upto), after
