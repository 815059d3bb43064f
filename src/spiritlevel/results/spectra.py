"""Eigenvalues, diagonals and densities of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, shown, whole_number
from spiritlevel.results.codec import Misfit, same_length
from spiritlevel.results.estimates import Estimate
from spiritlevel.results.formatting import figure
from spiritlevel.results.intervals import errors_off, mean_skewness, median
from spiritlevel.results.tables import Columns, Table, of_estimates

_ROUNDING = 1e-5  # of a weight, in float32


@dataclass(frozen=True)
class Eigenpairs(Table):
    """Eigenvalues from the wanted end inwards, with their vectors as columns and their residuals ‖Hv − λv‖.

    Each residual bounds the distance from its value to an eigenvalue. `converged` is true if every residual is at most
    tol · max|Ritz value| and repeated eigenvalues were ruled out or found; otherwise `reason` says what is missing.
    `reach` is how far beyond the outermost value an eigenvalue may still lie: further out there is none, except with
    probability 0.001; `None` where that is not known.
    """

    values: Tensor
    vectors: Tensor | None
    residuals: Tensor
    converged: bool
    matvecs: int
    which: str = "largest"
    tol: float = 1e-4
    seed: int | None = None
    reason: str = ""
    reach: float | None = None

    def _check(self) -> None:
        same_length(values=self.values, residuals=self.residuals)
        if self.values.ndim != 1 or not len(self.values):
            raise Misfit("it needs a row of at least one eigenvalue")

    def __len__(self) -> int:
        return self.values.numel()

    def outermost(self) -> Estimate:
        """The first value ± its uncertainty: the larger of its residual and `reach`.

        A residual alone is not enough. It shows that some eigenvalue is near, not that it is the outermost one. Where
        nothing is excluded (`reach` is infinite) this value is a lower bound on the largest eigenvalue.
        """
        tolerance = max(float(self.residuals[0]), self.reach or 0.0)
        if self.converged and math.isinf(tolerance):
            reason = "an eigenvalue further out was not ruled out"
            status = "lower bound" if self.which == "largest" else "not converged"
            return Estimate(float(self.values[0]), matvecs=self.matvecs, seed=self.seed, reason=reason, status=status)
        return Estimate(
            float(self.values[0]),
            matvecs=self.matvecs,
            seed=self.seed,
            reason=self.reason,
            tolerance=tolerance if self.converged else 0.0,
            status="converged" if self.converged else "not converged",
        )

    def _columns(self) -> Columns:
        """One row per eigenvalue, from the wanted end inwards."""
        return {
            "rank": (int, range(1, len(self) + 1)),
            "eigenvalue": (float, self.values.tolist()),
            "residual": (float, self.residuals.tolist()),
        }

    def __str__(self) -> str:
        pairs = zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        listed = ", ".join(f"{figure(value, 6)} (residual {figure(residual, 1)})" for value, residual in pairs)
        state = "converged" if self.converged else f"not converged: {self.reason}"
        return f"{len(self)} eigenvalues, {self.which}: {listed}; {self.matvecs} products, {state}"


@dataclass(frozen=True)
class BatchEigenvalues(Table):
    """The largest eigenvalues of the Hessian of every mini-batch: `values` (batches, k), the largest first.

    `residuals` has the same shape; `converged` (batches,) says in which batches all values are within the tolerance.
    """

    values: Tensor
    residuals: Tensor
    converged: Tensor
    batch_size: int
    samples: int
    matvecs: int = 0
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    weight_decay: float = 0.0
    seed: int | None = None
    notes: tuple[str, ...] = ()

    def _check(self) -> None:
        same_length(values=self.values, residuals=self.residuals, converged=self.converged)
        if self.values.ndim != 2 or not self.values.numel() or self.values.shape != self.residuals.shape:
            raise Misfit("it needs a row of eigenvalues for every batch")

    def __len__(self) -> int:
        return len(self.values)

    def _columns(self) -> Columns:
        """One row per batch and eigenvalue."""
        batches, k = self.values.shape
        return {
            "batch": (int, [batch for batch in range(batches) for _ in range(k)]),
            "rank": (int, [rank + 1 for _ in range(batches) for rank in range(k)]),
            "eigenvalue": (float, self.values.reshape(-1).tolist()),
            "residual": (float, self.residuals.reshape(-1).tolist()),
        }

    def __str__(self) -> str:
        batches, k = self.values.shape
        top = self.values[:, 0]
        low, middle, high = (figure(each) for each in (float(top.min()), median(top), float(top.max())))
        missing = int((~self.converged).sum())
        state = "all converged" if not missing else f"{missing} batches not converged"
        return (
            f"{k} largest eigenvalues of {batches} mini-batches of {self.batch_size} samples: the largest from {low} "
            f"to {high}, median {middle}; {self.matvecs} products, {state}"
        )


@dataclass(frozen=True)
class DiagonalEstimate(Table):
    """The diagonal of a matrix: one value and one standard error per entry.

    `status` is "exact" or "estimated"; probes that agree in every entry, as those of a diagonal matrix do, have a
    standard error of 0 but prove nothing. All entries share their probes, so their errors are correlated: the error of
    a sum of entries is not the root of the summed squares.
    """

    values: Tensor
    stderr: Tensor
    dof: float = math.inf
    matvecs: int = 0
    seed: int | None = None
    status: str = ""

    def __post_init__(self) -> None:
        if not self.status:  # version 0.1 did not say
            object.__setattr__(self, "status", "estimated" if bool(self.stderr.any()) else "exact")
        if self.status not in ("exact", "estimated"):
            raise InputError(f"the status of a diagonal must be exact or estimated, got {self.status!r}.")

    @property
    def exact(self) -> bool:
        """Whether every entry is free of error but for rounding."""
        return self.status == "exact"

    def __len__(self) -> int:
        return self.values.numel()

    def _columns(self) -> Columns:
        """One row per entry."""
        return {
            "entry": (int, range(len(self))),
            "value": (float, self.values.tolist()),
            "stderr": (float, self.stderr.tolist()),
        }

    def __str__(self) -> str:
        how = "exact" if self.exact else f"standard errors up to {figure(float(self.stderr.max()), 2)}"
        low, high = float(self.values.min()), float(self.values.max())
        return f"diagonal of {len(self)} entries from {figure(low)} to {figure(high)}, {how}"


@dataclass(frozen=True)
class SmoothedDensity(Table):
    """A spectral density smoothed by a Gaussian of standard deviation `width`, on the points of `grid`.

    `stderr` is the error of the random probes at every point, 0 where all eigenvalues are known, and `skew` its
    skewness. It does not include the error of the quadrature, which is small once `width` exceeds the distance between
    neighbouring nodes.
    """

    grid: Tensor
    values: Tensor
    stderr: Tensor
    width: float
    dof: float = math.inf
    skew: Tensor | None = None

    @checked
    def band(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval of `skewed_limits` at every point (not for the curve as a whole), cut off at 0."""
        if not 0 < level < 1:
            raise InputError(f"band needs a level between 0 and 1, got {level}.")
        skew = torch.zeros_like(self.stderr) if self.skew is None else self.skew
        below, above = (torch.from_numpy(off) for off in errors_off(skew.double().numpy(), self.dof, level))
        return (self.values - below * self.stderr).clamp(min=0.0), self.values + above * self.stderr

    def _columns(self) -> Columns:
        """One row per point of the grid, with the 95% band."""
        low, high = self.band()
        columns = {"eigenvalue": self.grid, "density": self.values, "stderr": self.stderr, "low": low, "high": high}
        return {name: (float, values.tolist()) for name, values in columns.items()}

    def __str__(self) -> str:
        if not self.grid.numel():
            return "spectral density at 0 points"
        low, high, top = float(self.grid.min()), float(self.grid.max()), int(self.values.argmax())
        where = f"at {self.grid.numel()} points from {figure(low)} to {figure(high)}, width {figure(self.width, 3)}"
        return f"spectral density {where}: largest {figure(float(self.values[top]))} at {figure(float(self.grid[top]))}"


@dataclass(frozen=True)
class SpectralDensity(Table):
    """Stochastic Lanczos quadrature: the spectral distribution μ = (1/P) Σᵢ δ(λᵢ) as weighted nodes.

    Row i of `nodes` and `weights` (probes, steps) comes from probe i alone; the weights of each row sum to 1/probes,
    all weights to 1. Each row is a Gauss quadrature, exact for polynomials up to degree 2·steps − 1 under its own
    probe, so every integral is unbiased for those and its error follows from the spread over the rows. `exact` means
    that the nodes are the eigenvalues themselves, in one row.

    >>> two_probes = SpectralDensity(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), torch.full((2, 2), 0.25), size=9)
    >>> print(two_probes.moment(1))
    1.5 ± 0.5
    """

    nodes: Tensor
    weights: Tensor
    size: int
    exact: bool = False
    matvecs: int = 0
    seed: int | None = None

    def _check(self) -> None:
        if self.nodes.ndim != 2 or self.nodes.shape != self.weights.shape or not self.nodes.numel():
            raise Misfit("it needs as many weights as nodes, in at least one row")
        if not bool(torch.isfinite(self.nodes).all() & torch.isfinite(self.weights).all()) or self.size < 1:
            raise Misfit("its nodes and weights are not all numbers")
        if float(self.weights.min()) < -_ROUNDING or float(self.weights.max()) > 1 + _ROUNDING:
            raise Misfit("its weights, the shares of a spectrum, do not all lie between 0 and 1")

    @checked
    def integrate(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """∫ f dμ = Tr f(H)/P for an elementwise `function`; multiply by `size` for the trace."""
        rows = (self.weights.double() * function(self.nodes.double())).sum(1) * self.weights.shape[0]
        if self.exact:
            return Estimate(float(rows.mean()), matvecs=self.matvecs, seed=self.seed)
        return Estimate.from_draws(rows, matvecs=self.matvecs, seed=self.seed)

    @checked
    def moment(self, k: int) -> Estimate:
        """∫ λᵏ dμ = Tr(Hᵏ)/P."""
        if k < 0:
            raise InputError(f"moment needs k >= 0, got {k}.")
        whole_number(k, "k", 0, 1000)
        return self.integrate(lambda nodes: nodes**k)

    @checked
    def density(self, grid: Tensor | None = None, width: float | None = None) -> SmoothedDensity:
        """The density smoothed by a Gaussian of standard deviation `width`, with its error at every point of `grid`.

        By default `width` is 1/100 of the span of the nodes, and `grid` 512 points that reach 4 widths beyond the
        nodes.
        """
        nodes, weights = self.nodes.double(), self.weights.double()
        low, high = float(nodes.min()), float(nodes.max())
        if width is None:
            width = (high - low) / 100 or max(abs(high), 1.0) / 100
        if not (width > 0 and math.isfinite(width)):
            raise InputError(f"density needs a width > 0, got {width}.")
        if grid is None:
            grid = torch.linspace(low - 4 * width, high + 4 * width, 512, dtype=torch.float64)
        if grid.ndim != 1 or grid.is_complex():
            raise InputError(f"density needs a grid of real numbers in one row, got {shown(grid)}.")
        grid = grid.double().cpu()
        rows = torch.zeros(grid.numel(), nodes.shape[0], dtype=torch.float64)
        for i, (node, weight) in enumerate(zip(nodes, weights, strict=True)):
            bells = torch.exp(-0.5 * ((grid[:, None] - node) / width).square()) / (width * math.sqrt(2 * math.pi))
            rows[:, i] = bells @ weight * nodes.shape[0]
        values = rows.mean(1)
        if self.exact:
            return SmoothedDensity(grid, values, torch.zeros_like(values), width)
        skew = torch.tensor([mean_skewness(row) for row in rows], dtype=torch.float64)
        return SmoothedDensity(
            grid, values, rows.std(1) / math.sqrt(rows.shape[1]), width, float(rows.shape[1] - 1), skew
        )

    def _columns(self) -> Columns:
        """One row per node."""
        probes, steps = self.nodes.shape
        return {
            "probe": (int, [probe for probe in range(probes) for _ in range(steps)]),
            "node": (float, self.nodes.reshape(-1).tolist()),
            "weight": (float, self.weights.reshape(-1).tolist()),
        }

    def __str__(self) -> str:
        low, high = float(self.nodes.min()), float(self.nodes.max())
        how = "all eigenvalues" if self.exact else f"{self.nodes.shape[0]} probes of {self.nodes.shape[1]} nodes"
        return f"spectrum of size {self.size} from {figure(low)} to {figure(high)}: {how}, mean {self.moment(1)}"


@dataclass(frozen=True)
class SpectrumSummary(Table):
    """Both ends of a spectrum, its trace, norms and density, from one set of Lanczos runs.

    `mean_square` is Tr(H²)/P. `layers` holds the trace of every parameter's diagonal block; the layers share their
    probes, so their errors are correlated and do not add up like independent ones.
    """

    largest: Eigenpairs
    smallest: Eigenpairs
    trace: Estimate
    frobenius_norm: Estimate
    mean_square: Estimate
    density: SpectralDensity
    layers: dict[str, Estimate]
    size: int
    matvecs: int
    seed: int | None = None

    @property
    def spectral_norm(self) -> float:
        """The largest absolute value of an eigenvalue, from the two ends."""
        return max(abs(float(self.largest.values[0])), abs(float(self.smallest.values[0])))

    def _columns(self) -> Columns:
        """One row per number: both ends, trace, norms, and the trace of every parameter tensor."""
        named = {
            "largest eigenvalue": self.largest.outermost(),
            "smallest eigenvalue": self.smallest.outermost(),
            "trace": self.trace,
            "Frobenius norm": self.frobenius_norm,
            "mean square": self.mean_square,
            **{f"trace of {name}": estimate for name, estimate in self.layers.items()},
        }
        return {"quantity": (str, list(named)), **of_estimates(list(named.values()))}

    def __str__(self) -> str:
        return (
            f"spectrum of size {self.size}: from {self.smallest.outermost()} to {self.largest.outermost()}, "
            f"trace {self.trace}, Frobenius norm {self.frobenius_norm}, {self.matvecs} products"
        )
