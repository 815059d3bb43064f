"""The quantiles that intervals are made of, and ranks: `scipy.stats` has them too, but takes 0.3 s to import."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special


def normal(share: float) -> float:
    """The value below which this share of a standard normal law lies.

    >>> round(normal(0.975), 4)
    1.96
    """
    return float(special.ndtri(share))


def student(share: float, dof: Any) -> Any:
    """The same for Student's t, for each number of degrees of freedom; infinitely many make it normal.

    >>> [round(float(student(0.975, dof)), 4) for dof in (5, np.inf)]
    [2.5706, 1.96]
    """
    dof = np.asarray(dof, dtype=float)
    endless = np.isinf(dof)
    return np.where(endless, special.ndtri(share), special.stdtrit(np.where(endless, 1.0, dof), share))[()]


def beta(share: float, a: float, b: float) -> float:
    """The same for a beta law.

    >>> round(beta(0.5, 2, 2), 4)
    0.5
    """
    return float(special.betaincinv(a, b, share))


def chi_squared(share: float, dof: float) -> float:
    """The same for the sum of `dof` squared standard normal numbers.

    >>> round(chi_squared(0.95, 1), 4)
    3.8415
    """
    return float(special.chdtri(dof, 1 - share))


def ranks(values: Any) -> NDArray[np.float64]:
    """The place of each number in their order, from 1; equal ones share the mean of theirs.

    >>> ranks([0.3, 0.1, 0.3]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, count = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place.reshape(-1)]
