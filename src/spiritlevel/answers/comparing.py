"""`compare`: which of two models to trust on given data, sample by sample, and what may not be compared at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from spiritlevel import __version__
from spiritlevel.answers.advising import Sides, advise
from spiritlevel.answers.auditing import audit_in
from spiritlevel.answers.changes import Change, several
from spiritlevel.answers.measuring import FEW, RESAMPLES, Progress, kind, silent
from spiritlevel.answers.outcomes import outcomes
from spiritlevel.answers.perturbing import changed
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.measures import TRANSFORMS, Measure, Setting, select
from spiritlevel.measures.registry import SAME, affordable
from spiritlevel.results import (
    FEWEST,
    Comparison,
    ComparisonRow,
    Estimate,
    figure,
    largest,
    mean_skewness,
    ratio_of,
    skewed_limits,
    standard_error,
    times,
)
from spiritlevel.results.comparisons import UNDER

__all__ = ["compare"]

KEEP_FUNCTION = frozenset(name for name in TRANSFORMS if name in SAME)
_KEEP_CLASSES = tuple(TRANSFORMS)
_TRIED = tuple(name for name in KEEP_FUNCTION if name != "permute_units")  # which in theory and in tests moves nothing
_ROUNDING = {torch.float64: 1e-10}  # what counts as rounding, relative to the values; 1e-5 in single precision
_ENDLESS = 10**12  # the population from which samples of the same kind come
_BETTER = {"wider": 1, "flatter": 1, "sharper": -1, "larger": 0}  # the sign of a difference b - a that favours b


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
    compared sample by sample: the interval of a mean is Student's t of the paired differences, corrected for their
    skewness; that of a quantile a percentile bootstrap of the pairs (999 resamples). A number for the whole data set,
    such as the largest eigenvalue, is compared by the influence that every sample has on it. All intervals are about
    other samples of the same kind, so pass data that neither model was trained on, and at least 30 of them. What has no
    influence function has the error of its probes only, or none; without an interval there is no verdict. Values that
    differ by no more than rounding (1e-5 of their size in single precision, 1e-10 in double) are equal.

    Rows that no parametrisation of the same function can move come first. For the others both models are audited, and
    what the audit moves at the same outputs is *not comparable*, however large the difference; the factor that it
    reached is not a limit, since a larger scaling moves the measure further. Nor is what could not be tested.
    The advice rests on the first of accuracy, distance to the boundary and loss whose difference is sure: it looks at
    up to three numbers, so each of their intervals must exclude 0 at a third of the chance of error (98.3 % for 95 %);
    `ComparisonRow.sure` says whether it does. Equal models are then told apart in at most 5 % of all cases. There is
    no advice where the outputs of a model look like probabilities, since the loss takes logits.

    Args:
        model_a: any module.
        model_b: another one, of the same or another architecture, for the same data and loss.
        data: a pair of tensors, a data set, a loader, or batches.
        names: what to call the two models.
        loss: a name, a `torch.nn` loss or a callable.
        measures: names from `measures.MEASURES`, "all", or the default set.
        samples: compare on a random subset of this many.
        audit: whether to audit; without it, what a parametrisation can move is not comparable at all.
        under: changes of the weights as `perturb` takes them, several in a list or separated by commas in a string:
            "int4,prune:0.5". Both models are changed, and rows say which is better afterwards; `Comparison.under` says
            it in words. They are about these weights: another parametrisation of the same function may round
            differently.
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
    changes = several(under) if under else []
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
    kept, dear = affordable(measures, chosen, first)
    made = _Pair(pair[0], pair[1], names, list(kept), audit, level, progress or silent, first.seed)
    made.left_out |= dear
    return made.comparison(population, changes)


class _Plain(NamedTuple):
    """What a row needs to know about a number that is not in the registry of measures."""

    name: str
    meaning: str
    direction: str
    invariant_to: Collection[str]
    advice: str  # as `Measure.advice`; with the size of the difference


_LOSS = _Plain("loss", "mean loss", "sharper", KEEP_FUNCTION, "its mean loss is lower by {difference}")
_ACCURACY = _Plain(
    "accuracy",
    "share of the samples that are classified correctly",
    "wider",
    _KEEP_CLASSES,
    "it classifies {count:,.0f} more of the {samples:,} samples correctly",
)
_SHARES = _Plain(
    "accuracy",
    "mean share of a sample's decisions (at its positions or for its labels) that are right",
    "wider",
    _KEEP_CLASSES,
    "a share of {difference} more of a sample's decisions is right",
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
        self.looks = 1 + (found is not None) + sum(bool(each.advice) for each in self.chosen)
        rows = [self._plain(_LOSS, *losses)]
        if found is not None:
            self.accuracy = _ACCURACY if found[0].right is None else _SHARES
            rows.append(self._plain(self.accuracy, found[0].shares, found[1].shares, exact=True))
        for number, each in enumerate(self.chosen):
            self.progress(each.name, number + 1, total)
            rows.append(self._row(each))
        self.progress("audit", len(self.chosen) + 1, total)
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
            settings={
                "spiritlevel": __version__,
                "torch": torch.__version__,
                "seed": str(self.seed),
                "loss": self.a.problem.loss.name,
                "batch norm": self.a.batch_norm,
                "models": " and ".join(f"{name}: {type(setting.model).__name__}" for name, setting in self._sides),
                "device": _once(str(setting.problem.device) for _, setting in self._sides),
                "dtype": _once(kind(setting.problem.dtype) for _, setting in self._sides),
                "samples": f"{count:,} of {population:,}" + (", drawn at random" if count < population else ""),
                "parameters": f"{self.a.problem.size:,} and {self.b.problem.size:,}",
                **({"data": "; ".join(self.a.notes)} if self.a.notes else {}),
            },
            left_out=self.left_out,
        )

    @property
    def _sides(self) -> tuple[tuple[str, Setting], tuple[str, Setting]]:
        return (self.names[0], self.a), (self.names[1], self.b)

    @property
    def _precision(self) -> float:
        """What counts as rounding, relative to the values."""
        return max(_ROUNDING.get(setting.problem.dtype, 1e-5) for _, setting in self._sides)

    def _same_outputs(self) -> str:
        """What both models have in common for every sample, up to rounding: "outputs", "probabilities" or nothing.

        Probabilities count only where the loss of every sample is also the same: a squared error sees the logits.
        """
        apart, size, likely, log_size = 0.0, 0.0, 0.0, 0.0
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
                a, b = a.log_softmax(-1), b.log_softmax(-1)
                likely, log_size = max(likely, float((b - a).abs().max())), max(log_size, float(a.abs().max()))
        if apart <= self._precision * size:
            return "outputs"
        losses = self.a.losses, self.b.losses
        close = self._precision * max(1.0, size)  # a shift of the logits rounds like the logits
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
        where, looks, self.looks = f"{UNDER}{change.name}", self.looks, 2
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
            plain = _Plain(f"{name}{where}", meaning, direction, (), "")
            row = self._plain(plain, first, second, exact=name == "accuracy")
            rows.append(dataclasses.replace(row, note=row.note or note))
        self.looks = looks
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

    # ------------------------------------------------------------ rows

    def _row(self, each: Measure) -> ComparisonRow:
        a, b = each.attempt(self.a), each.attempt(self.b)
        if not math.isnan(b.value - a.value) and {a.status, b.status}.isdisjoint(("lower bound", "not converged")):
            of_a, of_b = each.parts(self.a, _ENDLESS), each.parts(self.b, _ENDLESS)
            if of_a is not None and of_b is not None:
                biases = of_a.bias, of_b.bias
                return self._paired(each, (a, b), of_a.values, of_b.values, of_a.share, biases)
        limits, how, note = self._known(a, b)
        ratio = ratio_of(b.interval(self.level), a.interval(self.level))
        rounding = self._precision * max(abs(a.value), abs(b.value))
        return self._verdict(each, a, b, limits, how, rounding, note, not math.isnan(ratio[0]))

    def _known(self, a: Estimate, b: Estimate) -> tuple[tuple[float, float], str, str]:
        """The interval of the difference of two numbers for the whole data set, where it comes from, and a remark."""
        nothing = math.nan, math.nan
        statuses = {a.status, b.status}
        if "not converged" in statuses:
            return nothing, "not converged", f"not converged: {a.reason or b.reason}"
        if "lower bound" in statuses:
            return nothing, "lower bounds", "both are lower bounds that an optimiser found"
        difference, spread, tolerance = b.value - a.value, math.hypot(a.stderr, b.stderr), a.tolerance + b.tolerance
        if "estimated" in statuses:
            half = spread * float(stats.t.ppf(0.5 + self.level / 2, max(1.0, min(a.dof, b.dof)))) + tolerance
            note = "the interval is that of the probes, on these samples"
            return (difference - half, difference + half), "probes", note
        if tolerance and abs(difference) <= tolerance:
            note = "they differ by no more than the tolerances to which they are known"
            return (difference - tolerance, difference + tolerance), "tolerance", note
        return nothing, "tolerance" if tolerance else "exact", ""

    def _plain(self, each: _Plain, a: Tensor, b: Tensor, exact: bool = False) -> ComparisonRow:
        """A mean over the samples that is not in the registry of measures."""
        return self._paired(each, (Estimate(float(a.mean())), Estimate(float(b.mean()))), a, b, exact=exact)

    def _paired(
        self,
        each: Measure | _Plain,
        values: tuple[Estimate, Estimate],
        a: Tensor,
        b: Tensor,
        share: float = math.nan,
        biases: tuple[float, float] = (0.0, 0.0),
        exact: bool = False,
    ) -> ComparisonRow:
        """One number over all samples for both models, from each sample's value; `exact` ones have no rounding."""
        difference, tolerance = values[1].value - values[0].value, values[0].tolerance + values[1].tolerance
        strict = 1 - (1 - self.level) / self.looks
        if math.isnan(share):
            limits, how = self._of_means(values, b - a), "paired t"
        else:
            limits, how = self._of_quantiles(a, b, share), "bootstrap of the pairs"
        if len(a) < FEWEST:
            found, sure, how, in_proportion = (math.nan, math.nan), False, "too few samples", False
        else:
            low, high = limits(self.level)
            found = low - biases[1] - tolerance, high + biases[0] + tolerance
            least, most = limits(strict)
            sure = bool(difference) and (least - tolerance) * (most + tolerance) > 0
            own = [self._alone(value, of, share) for value, of in zip(values, (a, b), strict=True)]
            in_proportion = not math.isnan(ratio_of(own[1], own[0])[0])
        both = torch.cat((a, b))
        size = float(both[both.isfinite()].abs().mean())  # per sample: in a mean they cancel, their rounding does not
        rounding = 0.0 if exact else self._precision * size
        return dataclasses.replace(self._verdict(each, *values, found, how, rounding, "", in_proportion), sure=sure)

    def _of_means(self, values: tuple[Estimate, Estimate], apart: Tensor) -> Callable[[float], tuple[float, float]]:
        """The interval of a difference of means, at a level; with the error of the probes, if there were any."""
        difference, dof = values[1].value - values[0].value, len(apart) - 1
        error, probes = float(standard_error(apart)), math.hypot(*(value.stderr for value in values))
        both = math.hypot(error, probes)
        skew = mean_skewness(apart) * (error / both) ** 3 if both else 0.0
        return lambda level: skewed_limits(difference, both, dof, skew, level)

    def _alone(self, value: Estimate, samples: Tensor, share: float) -> tuple[float, float]:
        """The interval of one of the two numbers by itself, which shows whether their ratio means anything."""
        if math.isnan(share):
            error = math.hypot(float(standard_error(samples)), value.stderr)
            return skewed_limits(value.value, error, len(samples) - 1, mean_skewness(samples), self.level)
        draws = self._quantiles(samples, share)
        low, high = np.quantile(draws, [0.5 - self.level / 2, 0.5 + self.level / 2]).tolist()
        return low, high

    def _of_quantiles(self, a: Tensor, b: Tensor, share: float) -> Callable[[float], tuple[float, float]]:
        """The interval of a difference of quantiles, at a level."""
        with np.errstate(invalid="ignore"):  # infinite distances
            draws = self._quantiles(b, share) - self._quantiles(a, share)

        def limits(level: float) -> tuple[float, float]:
            low, high = np.quantile(draws, [0.5 - level / 2, 0.5 + level / 2]).tolist()
            return low, high

        return limits

    def _quantiles(self, samples: Tensor, share: float) -> Any:
        """Of resampled samples, the same ones for both models."""
        generator, values = np.random.default_rng((self.seed, 2)), samples.numpy()
        with np.errstate(invalid="ignore"):  # one at a time: all at once would be a thousand times the data
            rows = (generator.integers(len(values), size=len(values)) for _ in range(RESAMPLES))
            return np.array([np.quantile(values[row], share) for row in rows])

    def _verdict(
        self,
        each: Measure | _Plain,
        a: Estimate,
        b: Estimate,
        limits: tuple[float, float],
        how: str,
        rounding: float,
        note: str,
        in_proportion: bool,
    ) -> ComparisonRow:
        difference, sign = b.value - a.value, _BETTER[each.direction]
        invariant = frozenset(each.invariant_to).issuperset(KEEP_FUNCTION)
        if math.isnan(difference):
            verdict, note = "undefined", a.reason or b.reason or "the values are not finite"
        elif math.isfinite(difference) and abs(difference) <= rounding:
            verdict, note = "equal", "they differ by rounding only" if difference else ""
        elif math.isnan(limits[0]):
            verdict = "no interval"
        elif not limits[0] * limits[1] > 0 or (self.same and how == "probes"):
            verdict = "equal"
        elif sign == 0:
            verdict = "no preference"
        else:
            verdict = "b" if difference * sign > 0 else "a"
        if verdict in ("undefined", "no interval"):
            limits = math.nan, math.nan
        return ComparisonRow(
            name=each.name,
            a=a,
            b=b,
            difference=difference,
            low=limits[0],
            high=limits[1],
            how=how,
            ratio=b.value / a.value if in_proportion and a.value else math.nan,
            factor=1.0 if invariant else math.nan,
            verdict=verdict,
            direction=each.direction,
            meaning=each.meaning,
            invariant=invariant,
            note=note,
            decides=bool(each.advice),
        )

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
        for _, setting in self._sides:
            few = setting if setting.whole else setting.drawn(FEW)[0]
            found = audit_in(few, select(names), transforms=_TRIED)
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
            return "the audit moved it to or from 0, or to the other sign, at the same outputs"
        by, kept = self.movers[name], "probabilities" if self.movers[name] == "shift_logits" else "outputs"
        return f"the audit moved it {times(factor)}-fold by {by} at the same {kept}, and more is possible"

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
