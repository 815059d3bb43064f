"""A number with its status, error, cost and seed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.results.codec import Misfit, Result
from spiritlevel.results.formatting import figure, with_error
from spiritlevel.results.intervals import mean_skewness, skewed_limits, standard_error
from spiritlevel.results.quantiles import normal

STATUSES = ("exact", "converged", "estimated", "lower bound", "not converged", "undefined")
"""What a number is worth, see `Estimate`."""


@dataclass(frozen=True)
class Estimate(Result):
    """A number with its error, cost and seed.

    `status` says what the number is worth on the given data:

    - "exact": no error but rounding;
    - "converged": an iteration found it to ± `tolerance`;
    - "estimated": from random probes, with the standard error `stderr` (and `tolerance` beside it, if there is one);
    - "lower bound": the best that an optimiser found; the true value may be larger;
    - "not converged": an iteration stopped before its tolerance, so the error is not known; `reason` says why;
    - "undefined": the value is NaN, and `reason` says why.

    Unless given, the status follows from value, `stderr` and `tolerance`. `stderr` is NaN where it is not known; `dof`
    are its degrees of freedom (infinite for a known variance) and `skew` the skewness of that error. `power` is 2 for
    the root of a mean, whose limits are the roots of the mean's limits, and 0 for a positive number whose logarithm has
    the error: its limits are those of the logarithm, so they are positive. Where only a random subset of the data was
    measured, `data_stderr` is the standard error due to that and `data_limits` are the 95% limits it alone sets for
    the value on all of the data; both are `None` where that does not apply, and NaN where it is not known. `matvecs`
    counts products with the matrix (or passes over the data).

    >>> import torch
    >>> estimate = Estimate.from_draws(torch.tensor([1.0, 2.0, 3.0, 4.0]), seed=0)
    >>> print(estimate, estimate.status)
    2.5 ± 0.65 estimated
    >>> low, high = estimate.interval(0.95)
    >>> f"{low:.3f} {high:.3f}"
    '0.446 4.554'
    >>> print(Estimate(-0.0012, tolerance=0.03), Estimate(-0.0012, tolerance=0.03).sign)
    -0.0012 ± 0.03 0
    """

    value: float
    stderr: float = 0.0
    dof: float = math.inf
    matvecs: int = 0
    seed: int | None = None
    data_stderr: float | None = None
    reason: str = ""
    tolerance: float = 0.0
    status: str = ""
    skew: float = 0.0
    power: float = 1.0
    data_limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.status and self.status not in STATUSES:
            raise InputError(f"the status of an estimate must be one of {', '.join(STATUSES)}, got {self.status!r}.")
        status = self.status
        if math.isnan(self.value):
            status = "undefined"
        elif status in ("", "undefined") or (status == "exact" and (self.stderr or self.tolerance)):
            status = "estimated" if self.stderr else "converged" if self.tolerance else "exact"
        object.__setattr__(self, "status", status)

    def _check(self) -> None:
        if self.power not in (0.0, 1.0, 2.0):
            raise Misfit(
                f"an estimate is a mean (power 1), the root of one (power 2) or has a logarithm that is one (power 0), "
                f"and not of power {self.power:g}"
            )
        if self.power == 0 and any(limit <= 0 for limit in self.data_limits or ()):
            raise Misfit("an estimate of power 0 is positive, but its limits are not")

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("data_stderr") is None and data.get("data_limits") is not None:  # null is None and NaN in one
            data = {**data, "data_stderr": math.nan}
        reason = str(data.get("reason", ""))
        if "status" in data or not reason.startswith("not converged"):
            return data
        why = reason.removeprefix("not converged").removeprefix(": ")
        return {**data, "status": "not converged", "reason": why}

    @classmethod
    @checked
    def from_draws(cls, draws: Tensor, *, matvecs: int | None = None, seed: int | None = None) -> Estimate:
        """The mean of independent, unbiased draws, with the standard error of that mean."""
        draws = draws.detach().double().cpu().reshape(-1)
        count = draws.numel()
        if count < 2:
            raise InputError(f"a standard error needs at least 2 draws, got {count}.")
        cost = count if matvecs is None else matvecs
        error = float(standard_error(draws))
        skew = mean_skewness(draws)
        return cls(float(draws.mean()), error, count - 1, cost, seed, skew=skew, status="estimated")

    @property
    def exact(self) -> bool:
        """Whether the value has no error but rounding on the given data."""
        return self.status == "exact"

    @property
    def sign(self) -> int:
        """1 or -1 where the 95% interval on the given data lies on one side of 0; 0 where the sign is not known."""
        low, high = self.interval()
        return 1 if low > 0 else -1 if high < 0 else 0

    @property
    def settled(self) -> bool:
        """Whether an iteration found the value to more digits than the six that are printed."""
        return self.status == "converged" and self.tolerance < 5e-7 * abs(self.value)

    @checked
    def scaled(self, factor: float) -> Estimate:
        """The same number times a constant, with its errors."""
        size = abs(factor)
        return dataclasses.replace(
            self,
            value=self.value * factor,
            stderr=self.stderr * size,
            tolerance=self.tolerance * size,
            data_stderr=None if self.data_stderr is None else self.data_stderr * size,
            skew=math.copysign(1.0, factor) * self.skew,
            data_limits=None if self.data_limits is None else _ordered(*(limit * factor for limit in self.data_limits)),
        )

    @checked
    def interval(self, level: float = 0.95, *, data: bool = False) -> tuple[float, float]:
        """Limits for the value on the given data, by `skewed_limits`; `data=True` adds the error due to the subset.

        A tolerance widens it on both sides, a lower bound has no upper end, and what did not converge has no interval:
        both ends are NaN. The limits of a subset are kept for 95%; at other levels they are stretched like those of a
        normal error.
        """
        if not 0 < level < 1:
            raise InputError(f"interval needs a level between 0 and 1, got {level}.")
        error, dof = self.stderr, self.dof
        if data and self.data_limits is None and self.data_stderr:
            error = math.hypot(self.stderr, self.data_stderr)
            # Welch-Satterthwaite with a known second variance
            dof = dof * (error / self.stderr) ** 4 if self.stderr else math.inf
        if self.status == "not converged":
            return math.nan, math.nan
        low, high = self._limits(error, dof, level)
        if data and self.data_limits is not None:
            stretch = normal(0.5 + level / 2) / normal(0.975)
            there, back = (math.log, _exp) if self._in_logs else (float, float)
            here = there(self.value)
            below, above = ((there(limit) - here) * stretch for limit in self.data_limits)
            low, high = (
                back(here - math.hypot(here - there(low), below)),
                back(here + math.hypot(there(high) - here, above)),
            )
        low = max(low - self.tolerance, 0.0) if self._in_logs else low - self.tolerance
        return low, math.inf if self.status == "lower bound" else high + self.tolerance

    @property
    def _in_logs(self) -> bool:
        return self.power == 0 and self.value > 0

    def _limits(self, error: float, dof: float, level: float) -> tuple[float, float]:
        if self._in_logs:
            low, high = skewed_limits(math.log(self.value), error / self.value, dof, self.skew, level)
            return _exp(low), _exp(high)
        if self.power == 1.0 or not self.value > 0:
            return skewed_limits(self.value, error, dof, self.skew, level)
        mean = self.value**self.power
        low, high = skewed_limits(mean, error * self.power * mean / self.value, dof, self.skew, level)
        return max(low, 0.0) ** (1 / self.power), high ** (1 / self.power)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.status == "undefined":
            return f"undefined ({self.reason})" if self.reason else "undefined"
        if self.status == "not converged":
            return f"{figure(self.value, 6)} (not converged{self.reason and f': {self.reason}'})"
        bound = "≥ " if self.status == "lower bound" else ""
        return bound + with_error(self.value, 0.0 if self.settled else self.stderr + self.tolerance)


def _exp(x: float) -> float:
    """eˣ, at most the largest float."""
    return math.exp(min(x, 709.0))


def _ordered(a: float, b: float) -> tuple[float, float]:
    return (b, a) if b < a else (a, b)


# The measures that version 0.1 wrote without saying what they are worth.
WERE_BOUNDS = frozenset(
    "ball_sharpness adaptive_sharpness_l2 adaptive_sharpness_linf box_sharpness box_sharpness_narrow "
    "box_sharpness_subspace".split()
)
WERE_ITERATED = frozenset(
    "spectral_norm largest_eigenvalue smallest_eigenvalue log_volume quotient_norm normalised_sharpness "
    "box_sharpness_curvature spectral_margin_mean spectral_margin_median".split()
)


def with_status(estimate: Any, measure: str) -> Any:
    """The dict of an estimate as version 0.1 wrote it, with the status that it did not state."""
    if not isinstance(estimate, dict) or "status" in estimate or estimate.get("value") is None:
        return estimate
    if measure in WERE_BOUNDS:
        return {**estimate, "status": "lower bound"}
    if measure in WERE_ITERATED and not estimate.get("reason"):
        # its tolerance was not kept: null is a number that is not known
        return {**estimate, "status": "converged", "tolerance": None}
    return estimate
