"""One number for every sample, and how two such numbers correlate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from spiritlevel.errors import counted
from spiritlevel.results.codec import Misfit, Result, same_length
from spiritlevel.results.estimates import Estimate
from spiritlevel.results.formatting import figure
from spiritlevel.results.intervals import mean_skewness, median, standard_error, subset_mean
from spiritlevel.results.tables import Columns, Table


@dataclass(frozen=True)
class SampleTraces(Table):
    """The trace of the Hessian of every sample's own loss.

    `values[n]` = Tr ∇²ℓ(θ; xₙ, yₙ) and `stderr[n]` its error (0 where exact). `layers` splits the values by parameter
    tensor if that was asked for. `probes` counts the random probes a sample got. Where all samples shared their probes,
    their errors are correlated: `draws` (N, groups) keeps what each of the `dof` + 1 groups of probes said, so that
    `mean` and `correlate` can take the error from their spread. `fingerprint` identifies the order of the data. With
    batch statistics the batches are part of the definition: `batches` then holds their sizes in order. `wrt` says what
    moves: the parameters, or the input of the sample (`input_curvature`). With `unit` "token" each position of a
    sequence or an image is a sample of its own: row n belongs to `position[n]` of `sample[n]` in the data, positions of
    an image counted row by row.
    """

    values: Tensor
    stderr: Tensor
    exact: bool
    method: str
    targets: Tensor
    layers: dict[str, Tensor] = field(default_factory=dict)
    probes: Tensor | None = None
    dof: float = math.inf
    draws: Tensor | None = None
    matvecs: int = 0
    seed: int | None = None
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    fingerprint: str = ""
    population: int | None = None
    negative_stops: float | None = None
    notes: tuple[str, ...] = ()
    batches: tuple[int, ...] | None = None
    wrt: str = "parameters"
    unit: str = "sample"
    sample: Tensor | None = None
    position: Tensor | None = None

    def _check(self) -> None:
        places = {"sample": self.sample, "position": self.position}
        same_length(
            values=self.values, stderr=self.stderr, targets=self.targets, draws=self.draws, **places, **self.layers
        )
        if self.values.ndim != 1 or not self.values.is_floating_point():
            raise Misfit("it needs one number per sample")

    def __len__(self) -> int:
        return self.values.numel()

    def mean(self) -> Estimate:
        """The trace of the mean loss, Tr ∇²L = mean of the per-sample traces, with the error of the probes.

        With shared probes the standard error is that of the probe-wise means; with independent ones (`passes=`), the
        root of the summed squares, and NaN where fewer than 8 samples make up that sum, since a single draw says no
        more about its error than about its value. If these samples are a random subset of `population` points,
        `data_stderr` and `data_limits` are the subset's error (NaN below 30 samples).
        """
        value, spread = float(self.values.mean()), subset_mean(self.values, self.population)
        error: dict[str, Any] = {"stderr": 0.0}
        if self.draws is not None and not self.exact:
            means = self.draws.mean(0)
            error = {
                "status": "estimated",
                "stderr": float(standard_error(means)),
                "dof": means.numel() - 1,
                "skew": mean_skewness(means),
            }
        elif not self.exact:
            error = self._independent_errors()
        return Estimate(
            value, matvecs=self.matvecs, seed=self.seed, data_stderr=spread[0], data_limits=spread[1], **error
        )

    def _independent_errors(self) -> dict[str, Any]:
        """The error of the mean of samples that each had a draw of their own: nothing is known about its distribution.

        The worst case is a multiple of χ²₁, whose third cumulant is that of 0.98 error³; and as the errors are taken
        from the draws themselves, there are only as many degrees of freedom as samples that count.
        """
        largest = float(self.stderr.max())
        if not largest:
            return {"stderr": 0.0, "status": "estimated"}
        shares = (self.stderr / largest).double()
        squares = float(shares.square().sum())
        counted = squares**2 / float(shares.pow(4).sum())
        if not counted >= 8:  # also NaN
            return {"status": "estimated", "stderr": math.nan}
        skew = float(shares.pow(3).sum()) / squares**1.5
        return {"status": "estimated", "stderr": largest * math.sqrt(squares) / len(self), "dof": counted, "skew": skew}

    def _columns(self) -> Columns:
        """One row per sample, in the order of the data; the traces by parameter tensor last."""
        columns: dict[str, tuple[type, Any]] = {
            **_places(self),
            "trace": (float, self.values.tolist()),
            "stderr": (float, self.stderr.tolist()),
            **_targets(self.targets),
        }
        if self.probes is not None:
            columns["probes"] = (int, self.probes.tolist())
        return columns | {f"trace of {name}": (float, values.tolist()) for name, values in self.layers.items()}

    def __str__(self) -> str:
        how = "exact" if self.exact else f"estimated ({self.method})"
        ends = (float(self.values.min()), float(self.values.max())) if len(self) else (math.nan, math.nan)
        low, high = (figure(end, 3) for end in ends)
        of = "" if self.wrt == "parameters" else f" in the {self.wrt}"
        return f"{len(self)} per-sample Hessian traces{of}, {how}: mean {self.mean()}, from {low} to {high}"


def _places(rows: SampleTraces | Margins) -> dict[str, tuple[type, Any]]:
    """Where in the data each row belongs: a sample, or a position of one."""
    if rows.sample is None or rows.position is None:
        return {"sample": (int, range(len(rows)))}
    return {"sample": (int, rows.sample.tolist()), "position": (int, rows.position.tolist())}


def _targets(targets: Tensor) -> dict[str, tuple[type, Any]]:
    """Labels as a column; targets of other shapes have no place in a table of samples."""
    kind = float if targets.is_floating_point() else int
    return {"target": (kind, targets.tolist())} if targets.ndim == 1 else {}


@dataclass(frozen=True)
class Margins(Table):
    """Margins of every sample.

    `signed` = φ_y − max_{j≠y} φ_j, `output` its absolute value, `softmax` the absolute value of the same for the
    softmax probabilities (γ), `softmax_gap` = 1−γ² computed without cancellation, `correct` whether the label's output
    is strictly the largest. `targets` are the labels, 0 and 1 for a single logit. `distance` is the signed linearised
    distance to the decision boundary, if that was asked for, in the space `layer` (the input where empty) and the norm
    `norm`; `spread` is the root of the total variance of the points in that space, a unit for such distances. With
    `unit` "token" these are the points that `layer` holds at the positions themselves; it is NaN where a position's
    outputs read other places of it too, or where samples differ in shape there.

    A sample that decides more than once, at every position or for every label, has the *mean* of its margins, is
    `correct` if all its `decisions` are, and `right` is the share of those that are; it has no label (-1). With `unit`
    "token" each position is a sample: row n belongs to `position[n]` of `sample[n]` in the data.
    """

    output: Tensor
    signed: Tensor
    softmax: Tensor
    softmax_gap: Tensor
    correct: Tensor
    targets: Tensor
    distance: Tensor | None = None
    norm: str = ""
    layer: str = ""
    spread: float = math.nan
    fingerprint: str = ""
    right: Tensor | None = None
    decisions: Tensor | None = None
    unit: str = "sample"
    notes: tuple[str, ...] = ()
    sample: Tensor | None = None
    position: Tensor | None = None

    def _check(self) -> None:
        columns = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        same_length(**columns)
        for name, column in columns.items():
            wanted = "booleans" if name == "correct" else "numbers"
            if column.ndim != 1 or (name == "correct") != (column.dtype == torch.bool) or column.is_complex():
                raise Misfit(f"{name} needs one row of {wanted}")

    def __len__(self) -> int:
        return self.signed.numel()

    @property
    def shares(self) -> Tensor:
        """The share of every sample's decisions that are right; 0 or 1 where it makes one."""
        return self.correct.double() if self.right is None else self.right

    def _columns(self) -> Columns:
        """One row per sample, in the order of the data."""
        numbers = {name: getattr(self, name) for name in ("signed", "output", "softmax", "softmax_gap")}
        if self.right is not None:
            numbers["right"] = self.right
        columns: dict[str, tuple[type, Any]] = _places(self)
        columns |= {name: (float, values.tolist()) for name, values in numbers.items()}
        columns |= {"correct": (bool, self.correct.tolist())}
        if self.decisions is None:
            columns |= _targets(self.targets)
        else:
            columns["decisions"] = (int, self.decisions.tolist())
        return columns if self.distance is None else columns | {"distance": (float, self.distance.tolist())}

    def __str__(self) -> str:
        if not len(self):
            return "0 output margins"
        mean, smallest = figure(float(self.signed.mean())), figure(float(self.signed.min()))
        right = float(self.shares.mean())
        what = "classified correctly" if self.right is None else "of a sample's decisions are right on average"
        text = f"{len(self)} output margins: mean {mean}, smallest {smallest}; {right:.2%} {what}"
        if self.distance is not None:
            where = f"at layer {self.layer!r}" if self.layer else "in input space"
            text += f"; median distance {figure(median(self.distance))} {where} ({self.norm}-norm)"
        return text


@dataclass(frozen=True)
class Correlation(Result):
    """Pearson's r of two per-sample quantities after removal of outliers, with a bootstrap interval.

    `n` points were kept and `removed` were outliers; `r_all` is r of all points. `low` and `high` bound r at `level`.
    b = slope·a + intercept by least squares. `disattenuated` is r without the noise of random probes, NaN unless the
    probes' draws were given. Where r is not defined it is NaN (never 0) and `reason` says why.
    """

    r: float
    low: float
    high: float
    n: int
    removed: int
    r_all: float
    spearman: float
    slope: float
    intercept: float
    level: float = 0.95
    outliers: str = "lof"
    seed: int | None = None
    reason: str = ""
    disattenuated: float = math.nan
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if math.isnan(self.r):
            return f"r undefined ({self.reason})"
        outliers = f"({counted(self.removed, 'outlier')} removed)"
        r, low, high = (figure(value, 3) for value in (self.r, self.low, self.high))
        return f"r = {r} [{low}, {high}] over {counted(self.n, 'point')} {outliers}"
