"""Curvature and margins while a network trains, for a fixed share of the training time."""

from __future__ import annotations

import io
import json
import math
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spiritlevel.answers.measuring import median, outcomes
from spiritlevel.binding.batches import subset
from spiritlevel.errors import InputError, NotExactError, first_line, needs, whole_number
from spiritlevel.estimators import eigenvalues, operator_trace
from spiritlevel.measures import Setting
from spiritlevel.results import Estimate, figure, in_short
from spiritlevel.results.tables import as_csv
from spiritlevel.storage import write_atomically

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Tracker"]

_TOL, _PRODUCTS = 0.02, 24  # of the largest eigenvalue
_NUMBERS = (
    "loss",
    "accuracy",
    "margin_mean",
    "margin_median",
    "trace",
    "trace_stderr",
    "largest_eigenvalue",
    "residual",
    "tolerance",
)
_NOTHING: dict[str, Any] = {**dict.fromkeys(_NUMBERS, math.nan), "converged": False, "products": 0, "reason": ""}
_FORWARDS = 60  # what a measurement costs before one has been timed, in forward passes


class Tracker:
    """Watches a network while it trains: call `step()` after every step of the optimiser.

    Every `every` steps it measures, on the same random subset of `samples` samples: mean loss, accuracy, mean and
    median output margin, the mean Hessian trace (`sample_traces`: exact where that is possible) and the largest
    eigenvalue λ₁ of the Hessian, by Lanczos, to 2 % or 24 products (`converged` says which). What cannot be measured at
    some step, say because the weights have become NaN or the memory is full, is NaN there, and `reason` says why; rows
    that cannot be written are kept. A warning says so once, and the training goes on. The model, its mode and gradients
    and all random states are left as they were, so training goes on as without.

    A measurement waits until all of them together fit into the `share` of the training time, so rows may lie further
    apart than `every`; `overhead` is the share that was really spent. A tracker that has not measured yet prints what
    it waits for.

    Args:
        model: the module that is being trained.
        data: a pair of tensors, a data set, a loader that does not shuffle, or batches.
        every: steps between two measurements, at least.
        samples: how many samples, drawn once; batches as they are with batch_norm="batch".
        share: of the training time that may be spent, 0.08 unless given; `math.inf` never waits.
        path: a Parquet file that is written anew, whole, after every measurement.
        loss: a name, a `torch.nn` loss or a callable.
        batch_norm: "eval" or "batch".
        seed: of the subset, the probes and the starts of Lanczos.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.randn(8, 2), torch.tensor([0, 1] * 4)
    >>> tracker = Tracker(net, data, every=10, share=math.inf)
    >>> for _ in range(20):  # with the steps of your optimiser
    ...     row = tracker.step()
    >>> [row["step"] for row in tracker.rows], sorted(tracker.rows[0])[:3]
    ([10, 20], ['accuracy', 'converged', 'largest_eigenvalue'])
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        every: int = 500,
        *,
        samples: int = 256,
        share: float = 0.08,
        path: str | Path | None = None,
        loss: Any = "cross_entropy",
        batch_norm: str = "eval",
        seed: int = 0,
    ) -> None:
        if not share > 0:
            raise InputError(f"Tracker needs a share of the training time above 0, got {share}.")
        self.model, self.every, self.share, self.path = model, whole_number(every, "every", 1), share, path
        if path is not None and Path(path).is_dir():
            raise InputError(f"Tracker needs the path of a file for its rows, and {str(path)!r} is a folder.")
        self._options: dict[str, Any] = {"loss": loss, "batch_norm": batch_norm, "seed": seed}
        self.data = subset(data, None if batch_norm == "batch" else samples, seed, batch_norm)[0]
        setting = Setting(model, self.data, **self._options)
        setting.check()  # what cannot be measured is refused before the training
        _ = setting.hessian @ torch.zeros(
            setting.problem.size, dtype=setting.problem.dtype, device=setting.problem.device
        )
        passes = []
        for _ in range(3):  # what libraries do on their first call, and what else runs, may make one of them slow
            begin = time.perf_counter()
            outcomes(setting)
            passes.append(time.perf_counter() - begin)
        self._cost = _FORWARDS * min(passes)
        self._warned: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        """One dict a measurement."""
        self.steps = 0
        self.spent = 0.0
        self._begin = time.perf_counter()

    def step(self) -> dict[str, Any] | None:
        """Count a step of the training; the new row if a measurement was due and affordable, else `None`."""
        self.steps += 1
        last = self.rows[-1]["step"] if self.rows else 0
        if self.steps - last < self.every or self.spent + self._cost > self.share * self.training_seconds:
            return None
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """Measure now, whatever the interval and the time, and return the row."""
        trained, begin = self.training_seconds, time.perf_counter()
        row: dict[str, Any] = {"step": self.steps, "training_seconds": trained, **_NOTHING}
        try:
            with torch.inference_mode(False):
                setting = Setting(self.model, self.data, **self._options)
                row["loss"] = float(outcomes(setting)[1].mean())
                row |= self._margins(setting) | self._curvature(setting)
        except InputError as error:
            row["reason"] = str(error)
        except Exception as error:  # out of memory, or a fault here or in the model: no reason to end a training
            row["reason"] = f"{type(error).__name__}: {first_line(error)}"
            self._warn("measure", row["reason"])
        self._cost = time.perf_counter() - begin
        self.spent += self._cost
        row["seconds"] = self._cost
        self.rows.append(row)
        if self.path is not None:
            try:
                self.to_parquet(self.path)
            except Exception as error:  # a full disk, a folder that has gone; the next row is another chance for all
                self._warn("write", f"{type(error).__name__}: {first_line(error)}")
        return row

    def _warn(self, what: str, reason: str) -> None:
        """Say once what cannot be done; the training that is watched goes on."""
        if what not in self._warned:
            self._warned.add(what)
            after = {"measure": "numbers that are missing are NaN", "write": "the rows are kept in memory"}[what]
            text = f"Tracker could not {what} at step {self.steps:,}: {reason}; the training goes on, {after}."
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _margins(self, setting: Setting) -> dict[str, Any]:
        try:
            signed = setting.margins.signed
        except InputError:  # no classes
            return {}
        return {
            "accuracy": float((signed > 0).double().mean()),
            "margin_mean": float(signed.mean()),
            "margin_median": median(signed),
        }

    def _curvature(self, setting: Setting) -> dict[str, Any]:
        try:
            trace = setting.traces.mean()
        except (InputError, NotExactError):  # batch statistics: a sample has no trace of its own
            trace = operator_trace(setting.hessian, probes=16, seed=setting.seed)
        top = eigenvalues(setting.hessian, tol=_TOL, max_matvecs=_PRODUCTS, vectors=False, seed=setting.seed)
        found = top.outermost()
        return {
            "trace": trace.value,
            "trace_stderr": trace.stderr,
            "largest_eigenvalue": found.value,
            "residual": float(top.residuals[0]),
            "tolerance": found.tolerance if top.converged else math.nan,
            "converged": top.converged,
            "products": top.matvecs,
        }

    @property
    def training_seconds(self) -> float:
        """Time since the tracker was made, without its own."""
        return time.perf_counter() - self._begin - self.spent

    @property
    def overhead(self) -> float:
        """The time spent here, in units of the training time."""
        return self.spent / self.training_seconds

    def frame(self) -> pl.DataFrame:
        """The rows as a Polars frame."""
        with needs("a table"):
            import polars as pl

        return pl.DataFrame(self.rows)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV; with `path` also written there, atomically."""
        return as_csv(self.frame(), path)

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows, whole or not at all."""
        content = io.BytesIO()
        self.frame().write_parquet(content)
        write_atomically(path, content.getvalue())

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as strict JSON, an undefined number as null; with `path` also written there."""
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in self.rows
        ]
        text = json.dumps(rows, allow_nan=False)
        if path is not None:
            write_atomically(path, text + "\n")
        return text

    def chart(self) -> Any:
        """Curves of trace, λ₁, margin and loss against the step, as an Altair chart."""
        from spiritlevel.charts import lines, panels

        if not self.rows:
            raise InputError("the tracker has no rows yet; train on, or call measure() first.")
        columns = {
            "trace": "mean Hessian trace",
            "largest_eigenvalue": "largest eigenvalue",
            "margin_mean": "mean output margin",
            "loss": "mean loss",
        }
        table = self.frame().rename(columns)
        wanted = [name for key, name in columns.items() if not table[name].is_nan().all()]
        curves = [lines(table.select("step", name), "step", name, points=True) for name in wanted]
        return panels([curves[start : start + 2] for start in range(0, len(curves), 2)])

    def save(self, stem: str | Path) -> tuple[Path, Path]:
        """Draw the curves to `stem`.svg and `stem`.png."""
        from spiritlevel.charts import save

        return save(self.chart(), stem)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from spiritlevel.charts import svg

        return svg(self.chart()) if self.rows else str(self)

    def _waits(self) -> str:
        """What the next measurement waits for."""
        if self.steps < self.every:
            return f"measuring first after {self.every:,} steps"
        trained = self.training_seconds
        cost, time_so_far, free = figure(self._cost, 2), figure(trained, 3), figure(self.share * trained, 2)
        return (
            f"as a measurement takes about {cost} s and {self.share:.0%} of {time_so_far} s of training are {free} s: "
            "train on, raise share=, or call measure()"
        )

    def __str__(self) -> str:
        if not self.rows:
            return f"tracker after {self.steps:,} steps: nothing measured yet; it waits, {self._waits()}"
        first, last = self.rows[0], self.rows[-1]
        changes = ", ".join(
            f"{name} {_value(first, key)} → {_value(last, key)}"
            for key, name in (
                ("trace", "trace"),
                ("largest_eigenvalue", "λ₁"),
                ("margin_mean", "margin"),
                ("loss", "loss"),
            )
        )
        return (
            f"tracker after {self.steps:,} steps: {len(self.rows)} measurements, {changes}; "
            f"{self.overhead:.1%} of the training time"
        )


def _value(row: dict[str, Any], key: str) -> str:
    """One number of a row with its error: that of the probes of a trace, that of the iteration for λ₁."""
    value = row[key]
    if math.isnan(value):
        return "undefined"
    if key == "trace":
        return in_short(Estimate(value, row["trace_stderr"]))
    if key == "largest_eigenvalue":
        return in_short(
            Estimate(value, tolerance=row["tolerance"], status="converged" if row["converged"] else "not converged")
        )
    return figure(value)
