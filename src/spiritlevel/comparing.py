"""`compare`: which of two models to trust on given data, sample by sample, and what may not be compared at all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from spiritlevel import __version__
from spiritlevel.audit import audit as run_audit
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.functional import Problem
from spiritlevel.losses import aceht
from spiritlevel.margins import margins
from spiritlevel.measures import Measure, Setting, select
from spiritlevel.measuring import FEW, RESAMPLES, Progress, outcomes, silent, subset
from spiritlevel.results import Comparison, ComparisonRow, Estimate, largest, times

__all__ = ["compare"]

_KEEP_FUNCTION = ("rescale_layers", "rescale_channels", "scale_before_batchnorm", "fold_batchnorm")
_KEEP_CLASSES = (*_KEEP_FUNCTION, "scale_last_layer", "rescale_all")
_BETTER = {"wider": 1, "flatter": 1, "sharper": -1, "larger": 0}  # the sign of a difference b - a that favours b


@torch.inference_mode(False)
def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    data: Any,
    *,
    names: tuple[str, str] = ("a", "b"),
    loss: Any = "cross_entropy",
    measures: str | Iterable[str] | None = None,
    samples: int | None = None,
    batch_norm: str = "eval",
    audit: bool = True,
    level: float = 0.95,
    progress: Progress | None = None,
    seed: int = 0,
) -> Comparison:
    """Which of two models to trust on these data, and why.

    What every sample has (whether it is classified correctly, its loss, margin, distance to the boundary, trace) is
    compared sample by sample: the interval of a mean is Student's t of the paired differences, that of a median a
    percentile bootstrap of the pairs (999 resamples). Both speak of other samples of the same kind, so pass data that
    neither model was trained on. Numbers of the whole data set have the error of their probes only, or none.

    Rows that no parametrisation of the same function can move come first. For the others both models are audited, and
    a ratio within the factor that the audit reached at the same outputs is *not comparable*, whatever its interval.
    The advice rests on the first of accuracy, distance to the boundary and loss whose interval excludes 0.

    Args:
        model_a: any module.
        model_b: another one, of the same or another architecture, for the same data and loss.
        data: a pair of tensors, a data set, a loader that does not shuffle, or batches.
        names: what to call the two.
        loss: a name, a `torch.nn` loss or a callable.
        measures: names of `measures.MEASURES`, "all", or the default set.
        samples: compare on a random subset of so many.
        batch_norm: "eval" or "batch".
        audit: whether to audit; without it, what a parametrisation can move is not comparable at all.
        level: of the intervals.
        progress: called with (what, done, total) before every step.
        seed: of everything random.

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
    chosen = [each for each in select(measures) if measures is not None or each.direction != "larger"]
    data, _, population = subset(data, samples, seed, batch_norm)
    pair = []
    for model in (model_a, model_b):
        inner = Problem(model, loss=loss, batch_norm=batch_norm).model  # half precision becomes a float32 copy
        pair.append(Setting(inner, data, loss=loss, batch_norm=batch_norm, seed=seed))
    for setting, name in zip(pair, names, strict=True):
        try:
            setting.check()
        except InputError as error:
            raise InputError(f"model {name!r}: {error}") from error
    return _Pair(pair[0], pair[1], names, chosen, audit, level, progress or silent, seed).comparison(population)


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

    def comparison(self, population: int) -> Comparison:
        total = len(self.chosen) + 3
        self.progress("accuracy and loss", 0, total)
        losses = outcomes(self.a)[1], outcomes(self.b)[1]
        rows = [self._paired("loss", *losses, torch.mean, -1, "mean loss", "sharper", _KEEP_FUNCTION)]
        found = self._both(lambda setting: setting.margins, "margins")
        if found is not None:
            correct = [each.correct.double() for each in found]
            meaning = "share of the samples that are classified correctly"
            rows.append(
                self._paired("accuracy", correct[0], correct[1], torch.mean, 1, meaning, "wider", _KEEP_CLASSES)
            )
        for number, each in enumerate(self.chosen):
            self.progress(each.name, number + 1, total)
            rows.append(self._row(each))
        self.progress("audit", total - 2, total)
        rows = self._judged(rows)
        rows.sort(key=lambda row: (row.name != "accuracy", self._movable(row), row.name != "loss"))
        traces = None
        if "traces" in vars(self.a) and "traces" in vars(self.b):
            traces = (dataclasses.replace(self.a.traces, layers={}), dataclasses.replace(self.b.traces, layers={}))
        count = self.a.count
        advice, reasons = self._advice({row.name: row for row in rows})
        return Comparison(
            names=self.names,
            rows=tuple(rows),
            advice=advice,
            reasons=tuple(reasons),
            margins=found,
            traces=traces,
            losses=losses,
            samples=count,
            level=self.level,
            settings={
                "spiritlevel": __version__,
                "torch": torch.__version__,
                "seed": str(self.seed),
                "loss": self.a.problem.loss.name,
                "batch norm": self.a.batch_norm,
                "samples": f"{count:,} of {population:,}" + (", drawn at random" if count < population else ""),
                "parameters": f"{self.a.problem.size:,} and {self.b.problem.size:,}",
            },
            left_out=self.left_out,
        )

    def _both(self, compute: Callable[[Setting], Any], name: str) -> tuple[Any, Any] | None:
        try:
            return compute(self.a), compute(self.b)
        except (InputError, NotExactError) as error:
            self.left_out[name] = str(error)
            return None

    def _movable(self, row: ComparisonRow) -> int:
        """0: nothing that keeps the classes moves it; 1: nothing that keeps the function does; 2: that may."""
        kept = next((each.invariant_to for each in self.chosen if each.name == row.name), frozenset())
        return 0 if row.name == "accuracy" or kept.issuperset(_KEEP_CLASSES) else 1 if row.invariant else 2

    # ------------------------------------------------------------ rows

    def _row(self, each: Measure) -> ComparisonRow:
        sign, kept = _BETTER[each.direction], each.invariant_to
        samples = self._per_sample(each)
        if samples is not None:
            return self._paired(each.name, *samples, sign, each.meaning, each.direction, kept)
        values = []
        for setting in (self.a, self.b):
            try:
                values.append(each.compute(setting))
            except (InputError, NotExactError) as error:
                values.append(Estimate(math.nan, reason=str(error)))
        a, b = values
        difference, spread = b.value - a.value, math.hypot(a.stderr, b.stderr)
        half = spread * float(stats.t.ppf(0.5 + self.level / 2, max(1.0, min(a.dof, b.dof)))) if spread else 0.0
        note = "both are lower bounds that an optimiser found" if each.lower_bound else ""
        how = "probes" if spread else "exact"
        return self._verdict(each.name, a, b, (difference - half, difference + half), how, sign, each, kept, note)

    def _per_sample(self, each: Measure) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None:
        """What both models say of every sample, and which number of all samples the measure is."""
        try:
            if each.name == "trace":
                return self.a.traces.values, self.b.traces.values, torch.mean
            if each.name == "margin_mean":
                return self.a.margins.signed, self.b.margins.signed, torch.mean
            if each.name == "mean_aceht":
                values = [aceht(setting.logits[0], setting.logits[1]) for setting in (self.a, self.b)]
                return values[0], values[1], torch.mean
            if each.name in ("input_distance", "input_distance_inf"):
                norm = 2 if each.name == "input_distance" else "inf"
                found = [margins(s.model, s.data, distance=norm, **s.options).distance for s in (self.a, self.b)]
                return (found[0], found[1], torch.median) if found[0] is not None and found[1] is not None else None
        except (InputError, NotExactError):
            pass  # the measure itself says why
        return None

    def _paired(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        statistic: Callable[[Tensor], Tensor],
        sign: int,
        meaning: str,
        direction: str,
        kept: Iterable[str],
    ) -> ComparisonRow:
        values = Estimate(float(statistic(a))), Estimate(float(statistic(b)))
        difference = values[1].value - values[0].value
        if len(a) < 3:
            limits, how = (math.nan, math.nan), "too few samples"
        elif statistic is torch.mean:
            error = float((b - a).std()) / math.sqrt(len(a))
            half = error * float(stats.t.ppf(0.5 + self.level / 2, len(a) - 1))
            limits, how = (difference - half, difference + half), "paired t"
        else:
            rows = torch.from_numpy(np.random.default_rng((self.seed, 2)).integers(len(a), size=(RESAMPLES, len(a))))
            draws = torch.stack([statistic(b[row]) - statistic(a[row]) for row in rows]).double()
            ends = torch.tensor([0.5 - self.level / 2, 0.5 + self.level / 2], dtype=torch.float64)
            low, high = draws.quantile(ends).tolist()
            limits, how = (low, high), "bootstrap of the pairs"
        each = (meaning, direction)
        return self._verdict(name, values[0], values[1], limits, how, sign, each, kept, "")

    def _verdict(
        self,
        name: str,
        a: Estimate,
        b: Estimate,
        limits: tuple[float, float],
        how: str,
        sign: int,
        each: Measure | tuple[str, str],
        kept: Iterable[str],
        note: str,
    ) -> ComparisonRow:
        meaning, direction = each if isinstance(each, tuple) else (each.meaning, each.direction)
        difference, invariant = b.value - a.value, frozenset(kept).issuperset(_KEEP_FUNCTION)
        if math.isnan(difference):
            verdict, note = "undefined", a.reason or b.reason or "the values are not finite"
        elif not limits[0] * limits[1] > 0:
            verdict = "equal"
        elif sign == 0:
            verdict = "no preference"
        else:
            verdict = "b" if difference * sign > 0 else "a"
        return ComparisonRow(
            name=name,
            a=a,
            b=b,
            difference=difference,
            low=limits[0],
            high=limits[1],
            how=how,
            ratio=b.value / a.value if a.value else math.nan,
            factor=1.0 if invariant else math.nan,
            verdict=verdict,
            direction=direction,
            meaning=meaning,
            invariant=invariant,
            note=note,
        )

    def _judged(self, rows: list[ComparisonRow]) -> list[ComparisonRow]:
        """The rows that the parametrisation can move, judged by how far the audit moved them."""
        movable = [row.name for row in rows if not row.invariant and row.verdict != "undefined"]
        if not movable:
            return rows
        factors: dict[str, float] = {}
        reason = "the audit was left out, so nothing is known of what the parametrisation does"
        if self.audited:
            reason = ""
            for setting in (self.a, self.b):
                few = setting.data
                if setting.batch_norm == "eval":
                    few = subset(setting.data, min(FEW, setting.count), self.seed, "eval")[0]
                found = run_audit(
                    setting.model,
                    few,
                    measures=movable,
                    transforms=_KEEP_FUNCTION,
                    seed=self.seed,
                    **setting.options,
                )
                if found.rows:
                    for name, factor in found.moved().items():
                        factors[name] = largest((factors.get(name, 1.0), factor))
            if not factors:
                self.left_out["audit"] = "none of the transforms that keep the function applies to these networks"
        judged = []
        for row in rows:
            if row.name in movable:
                factor = factors.get(row.name, math.nan if reason or factors else 1.0)
                size = max(abs(row.ratio), 1 / abs(row.ratio)) if row.ratio else math.inf
                note, verdict = row.note, row.verdict
                if factor == 1.0:
                    pass  # the audit left it as it is
                elif row.ratio < 0 or math.isnan(row.ratio):
                    verdict, note = "not comparable", reason or "the values differ in sign, or one is 0"
                elif math.isnan(factor):
                    verdict = "not comparable"
                    note = reason or "the audit could not decide whether the parametrisation moves it"
                elif size <= factor:
                    verdict, note = "not comparable", f"the audit moved it {times(factor)}-fold"
                row = dataclasses.replace(row, factor=factor, verdict=verdict, note=note, invariant=factor == 1.0)
            judged.append(row)
        return judged

    # ------------------------------------------------------------ the advice

    def _advice(self, rows: dict[str, ComparisonRow]) -> tuple[str, list[str]]:
        """One sentence, and what it rests on; from the verdicts and intervals of the rows alone."""
        phrases = {
            "accuracy": "it classifies {count:,.0f} more of the {samples:,} samples correctly",
            "input_distance": "its samples lie further from the decision boundary",
            "loss": "its mean loss is lower by {difference:.3g}",
        }
        present = [(rows[key], phrase) for key, phrase in phrases.items() if key in rows]
        decisive = []
        for row, phrase in present:
            if row.verdict in ("a", "b"):
                size, count = abs(row.difference), self.a.count
                decisive.append((row, phrase.format(difference=size, count=size * count, samples=count)))
        reasons = self._reasons(list(rows.values()))
        if not decisive:
            return "These samples give no reason to trust one of the two models more than the other.", reasons
        first, phrase = decisive[0]
        winner = first.verdict
        low, high = sorted((abs(first.low), abs(first.high)))
        if first.name == "accuracy":  # in samples, as the phrase counts
            limits = f"{low * self.a.count:,.0f} to {high * self.a.count:,.0f}"
        else:
            limits = f"{low:.3g} to {high:.3g}"
        text = f"{phrase} ({self.level:.0%} interval {limits})"
        same = [more for row, more in decisive[1:] if row.verdict == winner]
        other = [more for row, more in decisive[1:] if row.verdict != winner]
        text += "".join(f", and {more}" for more in same)
        if other:
            text += f"; for {self.names[winner == 'a']} speaks that " + " and ".join(other)
        return f"Trust {self.names[winner == 'b']}: {text}.", reasons

    def _reasons(self, rows: list[ComparisonRow]) -> list[str]:
        """Which rows speak for which model, and which for none."""
        texts = []
        for side, name in zip("ab", self.names, strict=True):
            favours = [row.name for row in rows if row.verdict == side]
            if favours:
                texts.append(f"For {name}: {', '.join(favours)}.")
        moved = [row for row in rows if row.verdict == "not comparable"]
        if moved:
            sizes = [
                row.name if math.isnan(row.factor) else f"{row.name} (moved {times(row.factor)}-fold)" for row in moved
            ]
            texts.append(
                "Not comparable, because the parametrisation alone may move them as far at the same outputs: "
                f"{', '.join(sizes)}."
            )
        return texts
