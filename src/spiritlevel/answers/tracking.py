"""Curvature and margins while a network trains, for a fixed share of the training time."""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from spiritlevel.answers.outcomes import outcomes
from spiritlevel.answers.quantities import Quantities
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.errors import InputError, first_line, needs, whole_number
from spiritlevel.measures import Setting
from spiritlevel.results import Estimate, figure, in_short
from spiritlevel.results.tables import as_csv
from spiritlevel.results.training import TrainingCurves
from spiritlevel.storage import check_readable, write_atomically

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Tracker"]

_FORWARDS = 60  # what a measurement costs before one has been timed, in forward passes
_REFRESH = 15  # seconds after which the page of a running training reloads itself
_CURVES = {
    "trace": "mean Hessian trace",
    "largest_eigenvalue": "largest eigenvalue",
    "critical_sharpness": "critical sharpness",
    "stability_ratio": "curvature / limit of stability",
    "margin_mean": "mean output margin",
    "accuracy": "accuracy",
    "loss": "mean loss",
}


class Tracker:
    """Watches a network while it trains: call `step()` after every step of the optimiser.

    Every `every` steps it measures, on the same random subset of `samples` samples or on the batch that `step` is
    given, the `quantities`:

    - "loss"; "margins": accuracy, mean and median output margin;
    - "trace": the mean Hessian trace (`sample_traces`: exact where that is possible); "layers": the same by tensor;
    - "largest_eigenvalue": λ₁ of the Hessian, by Lanczos, to 2% or 24 products (`converged` says which). A look starts
      from the eigenvector of the last one and takes a few products; every fourth begins `afresh`, from a random vector,
      and only these rule out that another eigenvalue has become the largest: the others are lower bounds;
    - "critical_sharpness": see `critical_sharpness`, along the update for the loss of these samples, for 7 forward
      passes and a backward pass; "stability": see `stability`, started in the same way.

    What cannot be measured at some step, say because the weights have become NaN or the memory is full, is NaN there,
    and `reason` says why; rows that cannot be written are kept. A warning says so once, and training continues. The
    model, its mode and gradients, the optimiser and all random states are left as they were, so training continues as
    it would without a tracker.

    A measurement waits until all of them together, including what they write, fit into the `share` of the training
    time, so rows may lie further apart than `every`; `overhead` is the share actually spent. A tracker that has not
    measured yet prints what it is waiting for.

    Args:
        model: the module that is being trained.
        data: a pair of tensors, a data set, a loader, or batches; None for the batches that
            `step(batch=(inputs, targets))` gets.
        every: steps between two measurements, at least.
        quantities: their names; by default loss, margins, trace and largest eigenvalue, and critical sharpness if there
            is an optimiser.
        optimizer: needed for critical sharpness and stability.
        samples: how many samples, drawn once; batches as they are with batch_norm="batch" or batches="fixed".
        share: the share of the training time that may be spent, by default 0.08; `math.inf` never waits.
        path: a Parquet file, or a CSV file if it ends in .csv, rewritten as a whole after every measurement.
        page: an HTML file of the curves, likewise; a browser that shows it reloads it automatically.
        logger: an object with `add_scalar(name, value, step)`, as TensorBoard's writer has, or with
            `log(dict, step=step)`, as runs of Weights & Biases have: it gets the numbers of every row.
        loss: a name, a `torch.nn` loss or a callable.
        batch_norm: "eval" or "batch".
        seed: of the subset, the probes and the starts of Lanczos.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.randn(8, 2), torch.tensor([0, 1] * 4)
    >>> tracker = Tracker(net, data, every=10, share=math.inf)
    >>> for _ in range(20):  # with the steps of your optimiser
    ...     row = tracker.step()
    >>> [row["step"] for row in tracker.rows], sorted(tracker.rows[0])[:3]
    ([10, 20], ['accuracy', 'afresh', 'converged'])
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        data: Any = None,
        every: int = 500,
        *,
        quantities: str | Iterable[str] | None = None,
        optimizer: Optimizer | None = None,
        samples: int = 256,
        share: float = 0.08,
        path: str | Path | None = None,
        page: str | Path | None = None,
        logger: Any = None,
        loss: Any = "cross_entropy",
        batch_norm: str = "eval",
        seed: int = 0,
        **reading: Unpack[Reading],
    ) -> None:
        if not share > 0:
            raise InputError(f"Tracker needs a share of the training time above 0, got {share}.")
        self.model, self.every, self.share, self.path = model, whole_number(every, "every", 1), share, path
        self.page, self.logger = page, logger
        for file, what in ((path, "rows"), (page, "page")):
            if file is not None and Path(file).is_dir():
                raise InputError(f"Tracker needs the path of a file for its {what}, but {str(file)!r} is a folder.")
        if logger is not None and not (hasattr(logger, "add_scalar") or hasattr(logger, "log")):
            raise InputError(
                f"Tracker needs a logger with add_scalar(name, value, step) or log(dict, step=step), got "
                f"{type(logger).__name__}."
            )
        self.quantities = Quantities(quantities, model, optimizer)
        self._options: dict[str, Any] = {"loss": loss, "batch_norm": batch_norm, "seed": seed, **reading}
        self._cost = 0.0
        self.data: Any = None
        self._form = self._form_of_batches = form_of(reading)
        if data is not None:
            setting = Setting(model, data, **self._options)
            drawn = setting if setting.whole else setting.drawn(samples)[0]
            self.data, self._form = drawn.data, drawn.form
            self._cost = self._tried(drawn)
        self._warned: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        """One dict per measurement."""
        self.steps = 0
        self.spent = 0.0
        self._begin = time.perf_counter()

    def _tried(self, setting: Setting) -> float:
        """Roughly what a measurement will take; what cannot be measured is refused here, before the training."""
        setting.check()
        size, dtype, device = setting.problem.size, setting.problem.dtype, setting.problem.device
        _ = setting.hessian @ torch.zeros(size, dtype=dtype, device=device)
        passes = []
        for _ in range(3):  # first calls of libraries, and whatever else is running, may slow one of them down
            begin = time.perf_counter()
            outcomes(setting)
            passes.append(time.perf_counter() - begin)
        return _FORWARDS * min(passes)

    def step(self, batch: Any = None) -> dict[str, Any] | None:
        """Count a step of the training; the new row if a measurement was due and affordable, else `None`.

        If given, `batch`, a pair (inputs, targets), is measured in place of the data.
        """
        if batch is None and self.data is None:
            raise InputError("a Tracker without data measures the current batch: call step(batch=(inputs, targets)).")
        self.steps += 1
        last = self.rows[-1]["step"] if self.rows else 0
        if self.steps - last < self.every or self.spent + self._cost > self.share * self.training_seconds:
            return None
        return self.measure(batch)

    def measure(self, batch: Any = None) -> dict[str, Any]:
        """Measure now, whatever the interval and the time, and return the row."""
        trained, begin = self.training_seconds, time.perf_counter()
        nothing = {**self.quantities.nothing(), "reason": ""}
        row: dict[str, Any] = {"step": self.steps, "training_seconds": trained, **nothing}
        data = self.data if batch is None else [batch]
        reasons: list[str] = []
        try:
            with torch.inference_mode(False):
                form = self._form if batch is None else self._form_of_batches
                setting = Setting(self.model, data, **{**self._options, **form.options()})
                for found, reason in self.quantities.measured(setting):
                    row |= found
                    reasons += [reason] if reason else []
        except Exception as error:  # out of memory, or a fault here or in the model: no reason to end the training
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
            self._warn("measure", reasons[-1])
        row["reason"] = "; ".join(dict.fromkeys(reasons))
        row["seconds"] = self._cost = time.perf_counter() - begin
        self.spent += self._cost
        self.rows.append(row)
        if self.path is not None or self.page is not None or self.logger is not None:
            begin = time.perf_counter()
            self._tell(row)
            self._cost += time.perf_counter() - begin
            self.spent += time.perf_counter() - begin
        return row

    def resume(self, step: int) -> None:
        """Continue a training run that has made `step` steps: the rows up to there are read from `path`, if it exists.

        >>> tracker = Tracker(nn.Linear(2, 2), (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])), every=10)
        >>> tracker.resume(25)
        >>> print(tracker)
        tracker after 25 steps: nothing measured yet; it waits, ...
        """
        self.steps = whole_number(step, "step", 0)
        rows = _read(Path(self.path)) if step and self.path is not None else []
        self.rows = [row for row in rows if row["step"] <= step]

    def _tell(self, row: dict[str, Any]) -> None:
        """Write the files and the log; what fails is tried again with the next row."""
        try:
            if self.path is not None:
                (self.to_csv if str(self.path).endswith(".csv") else self.to_parquet)(self.path)
            if self.page is not None:
                self.curves(_REFRESH).to_html(self.page)
        except Exception as error:  # a full disk, a folder that is gone
            self._warn("write", f"{type(error).__name__}: {first_line(error)}")
        numbers = {
            f"spiritlevel/{name}": float(value)
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        try:
            if hasattr(self.logger, "add_scalar"):
                for name, value in numbers.items():
                    self.logger.add_scalar(name, value, row["step"])
            elif self.logger is not None:
                self.logger.log(numbers, step=row["step"])
        except Exception as error:
            self._warn("log", f"{type(error).__name__}: {first_line(error)}")

    def _warn(self, what: str, reason: str) -> None:
        """Say once what cannot be done; training continues."""
        if what not in self._warned:
            self._warned.add(what)
            after = "numbers that are missing are NaN" if what == "measure" else "the rows are kept in memory"
            text = f"Tracker could not {what} at step {self.steps:,}: {reason}; the training goes on, {after}."
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    @property
    def training_seconds(self) -> float:
        """Time since the tracker was made, not counting what the tracker itself took."""
        return time.perf_counter() - self._begin - self.spent

    @property
    def overhead(self) -> float:
        """The time spent here, in units of the training time."""
        return self.spent / self.training_seconds

    def frame(self) -> pl.DataFrame:
        """The rows as a Polars frame."""
        with needs("a table"):
            import polars as pl

        return pl.DataFrame(self.rows, infer_schema_length=None)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV; with `path` also written there, atomically."""
        return as_csv(self.frame(), path)

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows, whole or not at all."""
        content = io.BytesIO()
        self.frame().write_parquet(content)
        write_atomically(path, content.getvalue())

    def curves(self, refresh: int = 0) -> TrainingCurves:
        """The rows for a page, which reloads itself after `refresh` seconds if that is not 0."""
        said = [*(self.quantities.sentences.values() if self.rows else ()), *self._reasons()]
        layers = {name: f"trace of {name[6:]}" for row in self.rows[:1] for name in row if name.startswith("trace/")}
        text = str(self)
        sentences = (f"{text[:1].upper()}{text[1:]}.", *said)
        return TrainingCurves(tuple(self.rows), sentences, {**_CURVES, **layers}, refresh)

    def _reasons(self) -> list[str]:
        """What the last row lacks, in a sentence."""
        reason = self.rows[-1]["reason"] if self.rows else ""
        return [f"Not everything could be measured at the last step: {reason.rstrip('.')}."] if reason else []

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page of the curves that does not reload; with `path` also written there, atomically."""
        return self.curves().to_html(path)

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as strict JSON that names its format, like all results, with undefined numbers as null.

        With `path` it is also written there.

        `Result.from_json` reads it back, as `TrainingCurves`.
        """
        return self.curves().to_json(path)

    def chart(self) -> Any:
        """Curves of what was measured against the step, as an Altair chart."""
        from spiritlevel.charts import lines, panels

        if not self.rows:
            raise InputError("the tracker has no rows yet; train on, or call measure() first.")
        table = self.frame()
        table = table.rename({name: label for name, label in _CURVES.items() if name in table.columns})
        wanted = [name for name in _CURVES.values() if name in table.columns and not table[name].is_nan().all()]
        curves = [lines(table.select("step", name), "step", name, points=True) for name in wanted]
        return panels([curves[start : start + 2] for start in range(0, len(curves), 2)])

    def save(self, stem: str | Path) -> tuple[Path, Path]:
        """Draw the curves to `stem`.svg and `stem`.png."""
        from spiritlevel.charts import save

        return save(self.chart(), stem)

    def _repr_html_(self) -> str | None:
        """What a notebook shows; where the packages of a chart are missing, it shows the text."""
        try:
            from spiritlevel.charts import svg
        except InputError:
            return None
        return svg(self.chart()) if self.rows else str(self)

    def _waits(self) -> str:
        """What the next measurement is waiting for."""
        if self.steps < self.every:
            return f"as the first measurement comes after {self.every:,} steps"
        trained = self.training_seconds
        cost, time_so_far, free = figure(self._cost, 2), figure(trained, 3), figure(self.share * trained, 2)
        return (
            f"as a measurement takes about {cost} s and {self.share:.0%} of {time_so_far} s of training are {free} s: "
            "train on, raise share=, or call measure()"
        )

    def __str__(self) -> str:
        if not self.rows:
            return f"tracker after {self.steps:,} steps: nothing measured yet; it waits, {self._waits()}"
        last = self.rows[-1]
        changes = ", ".join(  # rows of an earlier run may hold fewer quantities
            f"{name} {_value(next(row for row in self.rows if key in row), key)} → {_value(last, key)}"
            for key, name in (
                ("trace", "trace"),
                ("largest_eigenvalue", "λ₁"),
                ("critical_sharpness", "critical sharpness"),
                ("margin_mean", "margin"),
                ("loss", "loss"),
            )
            if key in last
        )
        return (
            f"tracker after {self.steps:,} steps: {len(self.rows)} measurements, {changes}; "
            f"{self.overhead:.1%} of the training time"
        )


def curves_in(path: str | Path) -> TrainingCurves:
    """The curves of a tracker from the Parquet or CSV file of its rows."""
    check_readable(path)
    rows = _read(Path(path))
    layers = {name: f"trace of {name[6:]}" for row in rows[:1] for name in row if name.startswith("trace/")}
    return TrainingCurves(tuple(rows), (), {**_CURVES, **layers})


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows that an earlier run wrote; none if there is no such file."""
    if not path.exists():
        return []
    with needs("a table"):
        import polars as pl

    try:
        if path.suffix == ".csv":
            table = pl.read_csv(path, infer_schema_length=None)
            table = table.with_columns(pl.col(pl.String).fill_null(""))  # an empty string is written as an empty field
        else:
            table = pl.read_parquet(path)
        for name, column in table.select(pl.col(pl.String)).to_dict().items():
            if name != "reason" and (column != "").any():
                raise ValueError(f"its column {name!r} holds texts")
        rows = table.with_columns(pl.col(pl.Float64).fill_null(math.nan)).to_dicts()
        return [{**row, "step": int(row["step"])} for row in rows]
    except (pl.exceptions.PolarsError, OSError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{str(path)!r} holds no rows of a tracker: {first_line(error)}.") from error


def _value(row: dict[str, Any], key: str) -> str:
    """One number of a row with its error: that of the probes for a trace, that of the iteration for λ₁."""
    value = row[key]
    if math.isnan(value):
        return "undefined"
    if key == "trace":
        return in_short(Estimate(value, row["trace_stderr"]))
    if key == "largest_eigenvalue":
        status = "not converged" if not row["converged"] else "converged" if row.get("afresh", True) else "lower bound"
        return in_short(Estimate(value, tolerance=row["tolerance"], status=status))
    return figure(value, typeset=True)
