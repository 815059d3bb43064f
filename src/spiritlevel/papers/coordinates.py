"""Scores in other coordinates, for claims and studies: a bijection, a distance of points, pairs that change order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def bend(x: Tensor) -> Tensor:
    """The map x + x³/3: a bijection of the line, far from affine."""
    return x + x.pow(3) / 3


def unbend(u: Tensor) -> Tensor:
    """The inverse of `bend`: x = 2 sinh(asinh(3u/2)/3), since sinh 3t = 4 sinh³ t + 3 sinh t."""
    return 2 * ((1.5 * u).asinh() / 3).sinh()


def earth_mover(first: Tensor, second: Tensor) -> float:
    """The Earth-mover distance of two sets of equally many points: exact, an assignment problem."""
    cost = torch.cdist(first, second).numpy()
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())


def reversed_pairs(before: Sequence[float], after: Sequence[float]) -> float:
    """The share of pairs that two lists of scores order differently.

    >>> reversed_pairs([1.0, 2.0, 3.0], [2.0, 1.0, 3.0])
    0.3333333333333333
    """
    pairs = list(itertools.combinations(range(len(before)), 2))
    return sum((before[i] - before[j]) * (after[i] - after[j]) < 0 for i, j in pairs) / len(pairs)
