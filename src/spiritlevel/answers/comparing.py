"""`compare`: which of two models to trust on given data, sample by sample, and what may not be compared at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from spiritlevel import __version__
from spiritlevel.answers.advising import Sides, advise
from spiritlevel.answers.auditing import audit_in
from spiritlevel.answers.changes import Change, wanted
from spiritlevel.answers.measuring import FEW, Progress, kind, silent
from spiritlevel.answers.outcomes import outcomes
from spiritlevel.answers.pairing import KEEP_FUNCTION, Pairing, Plain, owners_of, precision_of
from spiritlevel.answers.perturbing import changed
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.measures import TRANSFORMS, Measure, Setting, select
from spiritlevel.measures.registry import affordable
from spiritlevel.operators.footprint import suited_threads
from spiritlevel.results import (
    Comparison,
    ComparisonRow,
    at_least,
    figure,
    kept_by,
    largest,
)
from spiritlevel.results.comparisons import UNDER

__all__ = ["compare"]

_KEEP_CLASSES = tuple(TRANSFORMS)
_TRIED = tuple(name for name in KEEP_FUNCTION if name != "permute_units")  # which in theory and in tests moves nothing


@torch.inference_mode(False)
@checked
def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    data: Any,
    *,
    names: tuple[str, str] = ("a", "b"),
    loss: Any = "cross_entropy",
    measures: str | Iterable[str] | None = None,
    samples: int | None = None,
    audit: bool = True,
    under: Any = (),
    level: float = 0.95,
    progress: Progress | None = None,
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Comparison:
    """Which of two models to trust on these data, and why.

    What every sample has (whether it is classified correctly, its loss, margin, distance to the boundary, trace) is
    compared sample by sample: the interval of a mean is Student's t of the paired differences, widened where their
    skewness asks for it; for the accuracy two samples are added, one in favour of each model (Bonett & Price 2012),
    since a few may decide it; that of a quantile is a percentile bootstrap of the pairs (999 resamples). A number for
    the whole data set, such as the largest eigenvalue, is compared by the influence that every sample has on it. All
    intervals are statements about other samples of the same kind, so pass data that neither model was trained on, and
    at least 30 of them. With `unit="token"` they are statements about other sequences, whose positions are not
    independent, and where batches couple their samples, about other batches, so pass at least 30 of those. What has no
    influence function has the error of its probes only, or none; without an interval there is no verdict. Values that
    differ by no more than rounding (1e-5 of their size in single precision, 1e-10 in double) are equal.

    Rows that no parametrisation of the same function can move come first. For the others both models are audited, and
    what the audit moves at the same outputs is *not comparable*, however large the difference (the factor that it
    reached is not a limit, since a larger scaling moves the measure further); nor is what could not be tested.
    The advice rests on the first of accuracy, distance to the boundary and loss whose difference is sure: it looks at
    up to three numbers, so each of their intervals must exclude 0 at a third of the chance of error (98.3% for 95%);
    `ComparisonRow.sure` says whether it does. Equal models are then told apart in at most 5% of all cases. There is
    no advice where the outputs of a model look like probabilities, since the loss takes logits.

    Args:
        model_a: any module.
        model_b: another module, of the same or another architecture, for the same data and loss.
        data: a pair of tensors, a data set, a loader, or batches.
        names: what to call the two models.
        loss: a name, a `torch.nn` loss or a callable.
        measures: names from `measures.MEASURES`, "all", or the default set.
        samples: compare on a random subset of this many.
        audit: whether to audit; without it, what a parametrisation can move is not comparable at all.
        under: changes of the weights as `perturb` takes them, several in a list or separated by commas in a string:
            "int4,prune:0.5". Both models are changed, and rows say which is better afterwards; `Comparison.under` says
            it in words. These rows hold for these weights: another parametrisation of the same function may
            round differently.
        level: confidence level of the intervals.
        progress: called with (what, done, total) before every step.
        params: names, prefixes or globs of the parameters to measure, in both models; by default all that require
            grad.
        batch_norm: "eval" or "batch".
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        group: a `torch.distributed` group whose ranks all make this same call and share the measurements.
        seed: for everything random.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: the measures for both models, and an audit of both on at most 500 samples.

    >>> torch.manual_seed(0), (x := torch.randn(60, 2)), (y := (x[:, 0] > 0).long())
    (...)
    >>> good, bad = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with torch.no_grad():
    ...     _ = good.weight.copy_(torch.tensor([[-3.0, 0.0], [3.0, 0.0]])), good.bias.zero_()
    >>> print(compare(bad, good, (x, y), names=("random", "trained"), measures=["margin_mean"]).advice)
    Trust trained: it classifies ...
    """
    if not 0 < level < 1:
        raise InputError(f"compare needs a level between 0 and 1, got {level}.")
    if len(names) != 2 or names[0] == names[1]:
        raise InputError(f"compare needs two different names, got {names!r}.")
    changes = wanted(under)
    chosen = [each for each in select(measures) if measures is not None or each.direction != "larger"]
    everything = Setting(
        model_a,
        data,
        loss=loss,
        params=params,
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        group=group,
        seed=seed,
        **reading,
    )
    population, first = everything.count, everything.drawn(samples)[0]
    pair = first, first.moved(model_b)
    for setting, name in zip(pair, names, strict=True):
        try:
            setting.check()
        except InputError as error:
            raise InputError(f"model {name!r}: {error}") from error
    kept, expensive = affordable(measures, chosen, first)
    made = _Pair(pair[0], pair[1], names, list(kept), audit, level, progress or silent, first.seed)
    made.left_out |= expensive
    with suited_threads(*pair):
        return made.comparison(population, changes)


_LOSS = Plain("loss", "mean loss", "sharper", KEEP_FUNCTION, "its mean loss is lower by {difference}")
_ACCURACY = Plain(
    "accuracy",
    "share of the samples that are classified correctly",
    "wider",
    _KEEP_CLASSES,
    "it classifies {count:,.0f} more of the {samples:,} samples correctly",
)
_SHARES = Plain(
    "accuracy",
    "mean share of a sample's decisions (at its positions or for its labels) that are right",
    "wider",
    _KEEP_CLASSES,
    "the mean share of a sample's decisions that it gets right is higher by {difference}",
)


def _once(values: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(values))


class _Pair:
    """Two models on the same samples."""

    def __init__(
        self,
        a: Setting,
        b: Setting,
        names: tuple[str, str],
        chosen: list[Measure],
        audit: bool,
        level: float,
        progress: Progress,
        seed: int,
    ) -> None:
        self.a, self.b, self.names, self.chosen, self.level, self.seed = a, b, names, chosen, level, seed
        self.progress, self.audited = progress, audit
        self.left_out: dict[str, str] = {}
        self.accuracy = _ACCURACY

    def comparison(self, population: int, changes: Sequence[Change] = ()) -> Comparison:
        total = len(self.chosen) + 3 + len(changes)
        self.progress("accuracy and loss", 0, total)
        seen = outcomes(self.a), outcomes(self.b)
        self.twice = [name for name, each in zip(self.names, seen, strict=True) if each.probabilities]
        self.same = self._same_outputs()
        self.movers: dict[str, str] = {}
        losses = seen[0].losses, seen[1].losses
        found = self._both(lambda setting: setting.margins, "margins")
        looks = 1 + (found is not None) + sum(bool(each.advice) for each in self.chosen)
        self.pairing = Pairing(self.a, self.b, self.level, self.seed, self.same, looks, *owners_of(self.a, self.b))
        rows = [self.pairing.plain(_LOSS, *losses)]
        if found is not None:
            self.accuracy = _ACCURACY if found[0].right is None else _SHARES
            rows.append(self.pairing.plain(self.accuracy, found[0].shares, found[1].shares, exact=True))
        for number, each in enumerate(self.chosen):
            self.progress(each.name, number + 1, total)
            rows.append(self.pairing.row(each))
        rows = self._of_logits(self._judged(rows))
        rows.sort(key=lambda row: (row.name != "accuracy", self._movable(row), row.name != "loss"))
        said = []
        for number, change in enumerate(changes):
            self.progress(change.name, len(self.chosen) + 2 + number, total)
            after = self._under(change)
            rows += after
            said.append(self._better(change, after))
        traces = None
        if "traces" in vars(self.a) and "traces" in vars(self.b):
            traces = (dataclasses.replace(self.a.traces, layers={}), dataclasses.replace(self.b.traces, layers={}))
        count = self.a.count
        phrases = {each.name: each.advice for each in self.chosen}
        phrases |= {each.name: each.advice for each in (self.accuracy, _LOSS)}
        whole = self.accuracy is _ACCURACY
        sides = Sides(self.names, count, whole, self.level, self.twice, self.same, self.movers)
        advice, reasons = advise(rows, phrases, sides)
        return Comparison(
            names=self.names,
            rows=tuple(rows),
            advice=advice,
            reasons=tuple(reasons),
            under=tuple(said),
            margins=found,
            traces=traces,
            losses=losses,
            samples=count,
            population=population,
            level=self.level,
            settings=self._settings(population),
            left_out=self.left_out,
        )

    def _settings(self, population: int) -> dict[str, str]:
        count = self.a.count
        return {
            "spiritlevel": __version__,
            "torch": torch.__version__,
            "seed": str(self.seed),
            "loss": self.a.problem.loss.name,
            "batch norm": self.a.batch_norm,
            "models": " and ".join(f"{name}: {type(setting.model).__name__}" for name, setting in self._sides),
            "device": _once(str(setting.problem.device) for _, setting in self._sides),
            "dtype": _once(kind(setting.problem.dtype) for _, setting in self._sides),
            "samples": f"{count:,} of {population:,}" + (", drawn at random" if count < population else ""),
            "parameters": " and ".join(each.chosen or f"{each.problem.size:,}" for _, each in self._sides),
            **({"data": "; ".join(self.a.notes)} if self.a.notes else {}),
        }

    @property
    def _sides(self) -> tuple[tuple[str, Setting], tuple[str, Setting]]:
        return (self.names[0], self.a), (self.names[1], self.b)

    def _same_outputs(self) -> str:
        """What both models share for every sample, up to rounding: "outputs", "probabilities" or nothing.

        Probabilities count where the loss says which outputs are classes, and only where the loss of every sample is
        also the same: a squared error sees the logits.
        """
        apart, size, likely, log_size, precision = 0.0, 0.0, 0.0, 0.0, precision_of(self.a, self.b)
        loss = self.a.problem.loss
        for inputs, targets in self.a.batches:
            found = []
            for _, setting in self._sides:
                problem = setting.problem
                with problem.active(), torch.no_grad():
                    found.append(problem.outputs(problem.params, problem.place(inputs, targets)[0]).double().cpu())
            a, b = found
            if a.shape != b.shape:
                return ""
            if a.numel():
                apart, size = max(apart, float((b - a).abs().max())), max(size, float(a.abs().max()))
                axis = loss.class_axis(a, targets)
                if axis is None:
                    likely = math.inf
                    continue
                a, b = a.log_softmax(axis), b.log_softmax(axis)
                likely, log_size = max(likely, float((b - a).abs().max())), max(log_size, float(a.abs().max()))
        if apart <= precision * size:
            return "outputs"
        losses = self.a.losses, self.b.losses
        close = precision * max(1.0, size)  # a shift of the logits rounds like the logits
        alike = float((losses[1] - losses[0]).abs().max()) <= close * max(1.0, float(losses[0].abs().max()))
        return "probabilities" if alike and likely <= close * max(1.0, log_size) else ""

    def _both(self, compute: Callable[[Setting], Any], name: str) -> tuple[Any, Any] | None:
        try:
            return compute(self.a), compute(self.b)
        except (InputError, NotExactError) as error:
            self.left_out[name] = str(error)
            return None

    def _movable(self, row: ComparisonRow) -> int:
        """0: nothing that keeps the classes moves it; 1: nothing that keeps the function does; 2: something may."""
        kept = next((each.invariant_to for each in self.chosen if each.name == row.name), frozenset())
        return 0 if row.name == "accuracy" or kept.issuperset(_KEEP_CLASSES) else 1 if row.invariant else 2

    # ------------------------------------------------------------ after a change

    def _under(self, change: Change) -> list[ComparisonRow]:
        """Both models after a change of their weights, sample by sample."""
        a, b = (changed(setting, change) for _, setting in self._sides)
        where, pairing = f"{UNDER}{change.name}", dataclasses.replace(self.pairing, looks=2)
        kinds = [
            ("loss", f"mean loss after {change.meaning}", "sharper"),
            ("rise of the loss", f"what {change.meaning} adds to the mean loss", "sharper"),
        ]
        columns = [(a["after"], b["after"]), (a["after"] - a["before"], b["after"] - b["before"])]
        if "right_after" in a and "right_after" in b:
            kinds.insert(0, ("accuracy", f"share that is classified correctly after {change.meaning}", "wider"))
            columns.insert(0, (a["right_after"], b["right_after"]))
        note = "of these weights; another parametrisation of the same function may change differently"
        rows = []
        for (name, meaning, direction), (first, second) in zip(kinds, columns, strict=True):
            plain = Plain(f"{name}{where}", meaning, direction, (), "")
            row = pairing.plain(plain, first, second, exact=name == "accuracy")
            rows.append(dataclasses.replace(row, note=row.note or note))
        return self._of_logits(rows)

    def _better(self, change: Change, rows: list[ComparisonRow]) -> str:
        """Which model is better after the change, by whichever of accuracy and loss is first sure at half the error."""
        for row in rows[:-1]:
            if row.sure and row.verdict in ("a", "b"):
                better = self.names[0] if row.verdict == "a" else self.names[1]
                what = row.name.removesuffix(f"{UNDER}{change.name}")
                values = f"{figure(row.a.value, 4)} ({self.names[0]}) and {figure(row.b.value, 4)} ({self.names[1]})"
                limits = f"{figure(row.low, 3)} to {figure(row.high, 3)}"
                return (
                    f"Under {change.name}, {better} is better: {what} {values}, a difference of "
                    f"{figure(row.difference, 3)} ({self.level:.0%} interval {limits})."
                )
        return f"Under {change.name}, neither is clearly better."

    # ------------------------------------------------------------ what the parametrisation moves

    def _judged(self, rows: list[ComparisonRow]) -> list[ComparisonRow]:
        """The rows, with what the parametrisation moves excluded from the comparison: its size says nothing."""
        movable = [row.name for row in rows if not row.invariant and row.verdict != "undefined"]
        factors = self._moved(movable) if self.audited and movable else {}
        judged = []
        for row in rows:
            if row.name in movable:
                factor = factors.get(row.name, math.nan)
                row = dataclasses.replace(row, factor=factor, invariant=factor == 1.0)
                if factor != 1.0:
                    note = self._why(row.name, factor, bool(factors))
                    row = dataclasses.replace(row, verdict="not comparable", note=note)
            judged.append(row)
        return judged

    def _moved(self, names: list[str]) -> dict[str, float]:
        """How far the audits of both models moved these measures at the same outputs; nothing where none applies."""
        factors: dict[str, float] = {}
        for side, setting in self._sides:

            def forward(what: str, done: int, total: int, side: str = side) -> None:
                self.progress(f"audit of {side}: {what}", done, total)

            few = setting if setting.whole else setting.drawn(FEW)[0]
            found = audit_in(few, select(names), transforms=_TRIED, progress=forward)
            for name, factor in found.moved().items():
                if factor > max(1.0, factors.get(name, 1.0)):
                    self.movers[name] = found.moved_by(name)
                factors[name] = largest((factors.get(name, 1.0), factor))
        if not factors:
            self.left_out["audit"] = "none of the transforms that keep the function applies to these networks"
        return factors

    def _why(self, name: str, factor: float, tested: bool) -> str:
        if not self.audited:
            return "the audit was left out, so nothing is known about what the parametrisation does"
        if not tested:
            return "not tested: none of the transforms that keep the function applies to these networks"
        if math.isnan(factor):
            return "the audit could not decide whether the parametrisation moves it"
        if math.isinf(factor):
            return "the audit moved it to or from 0, or to the other sign, at the same outputs or probabilities"
        by = self.movers[name]
        return f"the audit moved it {at_least(factor)} by {by} at the same {kept_by(by)}, and no limit is known"

    def _of_logits(self, rows: list[ComparisonRow]) -> list[ComparisonRow]:
        """Exclude all rows but the accuracy where a model gives probabilities instead of logits."""
        if not self.twice:
            return rows
        note = f"the outputs of {' and '.join(self.twice)} look like probabilities"
        return [
            dataclasses.replace(row, verdict="not comparable", factor=math.nan, note=note)
            if row.name != "accuracy" and row.verdict in ("a", "b", "no preference", "no interval")
            else row
            for row in rows
        ]
