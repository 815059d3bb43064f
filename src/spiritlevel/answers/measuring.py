"""`measure`: how flat a model is, how wide its margins are, how sure that is, and what the parametrisation decides.

It calls what the modules below compute and puts the answers together; it adds no estimator. What it says in words
follows from the numbers that it returns, by the rules in `wording`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from spiritlevel import __version__
from spiritlevel.answers.auditing import audit_in
from spiritlevel.answers.directions import wanted
from spiritlevel.answers.outcomes import Outcomes, outcomes, thumbnails
from spiritlevel.answers.sharing import shared
from spiritlevel.answers.surface import landscape_in
from spiritlevel.answers.wording import headline
from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Fingerprint, picked
from spiritlevel.binding.losses import BinaryCrossEntropy
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.reading import Reading
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, NotExactError, first_line, is_out_of_memory, unknown_name
from spiritlevel.estimators import spectrum
from spiritlevel.measures import Measure, Setting, select
from spiritlevel.measures.margins import acehts
from spiritlevel.measures.registry import LEADING, affordable
from spiritlevel.memory import available_memory
from spiritlevel.operators.footprint import suited_threads
from spiritlevel.results import (
    Estimate,
    Fit,
    Margins,
    Pictures,
    Report,
    ReportRow,
    SampleTraces,
)
from spiritlevel.statistics.correlation import correlate
from spiritlevel.statistics.subsets import SubsetError, mean_of, share_of

__all__ = ["measure"]

PARTS = ("audit", "spectrum", "landscape", "pictures")
"""What a report holds beside its measures, unless `parts` says otherwise."""

FEW = 500  # samples, at most, that audit, spectrum and landscape are computed on
_PROBES, _STEPS = 4, 50  # Lanczos runs of the spectrum
_GRID = 17  # points per side of the landscape
_SHOWN = {"sharpest": 24, "least certain": 24, "others": 120}  # pictures of each group, at most
RESAMPLES = 999
_CHEAP = 30  # forward passes: what takes no more is measured before the audit

Progress = Callable[[str, int, int], None]


# ---------------------------------------------------------------- one model


@torch.inference_mode(False)  # measures add up in place, which tensors of that mode do not allow outside it
@checked
def measure(
    model: nn.Module,
    train: Any,
    *,
    test: Any = None,
    loss: Any = "cross_entropy",
    measures: str | Iterable[str] | None = None,
    parts: Iterable[str] | None = None,
    samples: int | None = None,
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    time_limit: float | None = None,
    name: str | None = None,
    classes: Sequence[str] = (),
    progress: Progress | None = None,
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Report:
    """How flat a model is, how wide its margins are, how sure that is, and how much of it the parametrisation decides.

    Every measure with its error and the transforms that leave it unchanged; the trace and the margin of every sample
    and how they correlate; the trace layer by layer; audit, spectrum and landscape (these three on at most 500 of the
    samples, drawn at random; `settings` says so). The model and all random states are left as they were.

    Args:
        model: any module.
        train: the data to measure: a pair of tensors, a data set, a loader, or batches.
        test: other data, for accuracy, loss and margins.
        loss: a name, a `torch.nn` loss or a callable; see `sample_traces`.
        measures: names from `measures.MEASURES`, "all", or the default set.
        parts: which of "audit", "spectrum", "landscape", "pictures" to add; by default all.
        samples: measure a random subset of this many; intervals are then for the value on all of the data, and where
            none is known, `subset_error` of a row says why. This costs a few Hessian products for the default measures;
            `sampling` in `measures.MEASURES` says what each takes.
        params: names, prefixes or globs of the parameters to measure; by default all that require grad.
        batch_norm: "eval" or "batch".
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB", for the whole measurement; by default half of what is available.
        time_limit: seconds. What is expected to fit is measured, cheap things first; `left_out` names the rest. What
            has begun is finished.
        name: what the report calls the model; by default its class.
        classes: names of the classes, for the page.
        progress: called with (what, done, total) before every step.
        group: a `torch.distributed` group whose ranks all make this same call with the same data and share all work:
            the samples, the points of the landscape, the draws of noise, the transforms of the audit. Rank 0 decides
            what fits the time limit; all return the same report.
        seed: for everything random.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: the measures (about 150 forward passes by default), audit, 200 Hessian products and 289 forward passes on
    the 500 samples. An interrupt (Ctrl-C) ends the measurement; the report then holds what had been measured by then
    and says so.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> report = measure(net, (torch.randn(20, 2), torch.tensor([0, 1] * 10)), measures=["trace"], parts=["audit"])
    >>> report.row("trace").kind, report.audit.row("trace", "rescale_layers").verdict
    ('exact', 'changes')
    """
    with preserved_random_state():  # libraries imported on first use may draw from the global states
        device = next((p.device for p in model.parameters()), "cpu") if isinstance(model, nn.Module) else "cpu"
        with Ranks(group, device).together():
            here = Setting(
                model,
                train,
                loss=loss,
                params=params,
                batch_norm=batch_norm,
                batch_size=batch_size,
                memory=memory,
                group=group,
                seed=seed,
                sharded=True,
                **reading,
            )
            run = _Run(here, test, measures, parts, samples, time_limit, progress)
            run.dtype = kind_of(here.problem.dtype, model)
        run.agree()
        run.check()
        with suited_threads(run.here):
            run.threads = torch.get_num_threads()
            run.everything()
    return run.report(name or type(model).__name__, tuple(str(item) for item in classes))


class _Step(NamedTuple):
    name: str
    passes: float  # estimated cost, in forward passes over the data measured
    work: Callable[[], None]
    of_margins: bool = False  # known with the output margins
    vectors: int = 0  # the vectors as long as the parameters that it holds at once


class _Run:
    """One measurement: the steps in their order, and what they have found so far."""

    dtype = ""  # of the numbers that were measured, in words
    threads = 1  # for an operation

    def __init__(
        self,
        everything: Setting,
        test: Any,
        measures: Any,
        parts: Iterable[str] | None,
        samples: int | None,
        time_limit: float | None,
        progress: Progress | None,
    ) -> None:
        self.begin = time.monotonic()
        self.asked, self.chosen = measures, select(measures)
        self.parts = PARTS if parts is None else tuple(parts)
        for part in self.parts:
            if part not in PARTS:
                raise unknown_name("part", part, PARTS)
        if time_limit is not None and not time_limit > 0:
            raise InputError(f"time_limit must be a positive number of seconds, got {time_limit}.")
        self.limit, self.progress, self.seed = time_limit, progress or silent, everything.seed
        self.population = everything.count
        self.here, self.indices = everything.drawn(samples)
        self.there = None if test is None else everything.on(test)
        self.forward = 0.0  # seconds per forward pass over the data, once known
        self.found: dict[str, Any] = {"fits": {}, "correlations": {}, "layers": {}}
        self.values: dict[str, ReportRow] = {}
        self.left_out: dict[str, str] = {}
        self.partial, self.probabilities = "", False
        self.few  # noqa: B018 (may be `here`)

    def agree(self) -> None:
        """Raise `InputError` unless all ranks are about to measure the same: otherwise one would wait for another."""
        ranks = self.here.ranks
        if ranks.count == 1:
            return
        mark = Fingerprint()
        with ranks.together():
            for setting in filter(None, (self.here, self.there)):
                for inputs, targets in setting.batches:
                    mark.update(inputs, targets)
        ranks.same(str(mark), "their data")
        ranks.same(([each.name for each in self.chosen], self.parts, self.limit, self.seed), "their options")

    def check(self) -> None:
        """Make data that cannot be measured fail before anything is measured."""
        self.here.check()
        self.chosen, expensive = affordable(self.asked, self.chosen, self.here)
        self.left_out |= expensive
        begin = time.monotonic()
        if self.limit is not None:  # again: the first calls of libraries would be mistaken for the cost of a step
            self.here.check()
        self.forward = time.monotonic() - begin
        if self.there is not None:
            try:
                self.there.check()
            except InputError as error:
                raise InputError(f"test data: {error}") from error

    # ------------------------------------------------------------ the steps

    def steps(self) -> Iterator[_Step]:
        """All steps, the cheap and telling ones first."""
        count, few = self.here.count, min(FEW, self.here.count)
        share = few / count
        yield _Step("accuracy and margins", 2, self._fit)
        if self.there is not None:
            yield _Step("test accuracy and margins", 2 * self.there.count / count, self._test)
        own = {each.name: each.forward_passes(self.here) for each in self.chosen}
        errors = self.indices is not None  # due to measuring a subset, found along the way
        passes = {each.name: own[each.name] + (each.subset_passes(self.here) if errors else 0) for each in self.chosen}
        order = [self._measuring(each, passes[each.name]) for each in sorted(self.chosen, key=lambda m: passes[m.name])]
        yield from (step for step in order if step.name == "trace")  # which the next two read
        yield _Step("correlations", 1, self._correlations)
        if "pictures" in self.parts:
            yield _Step("pictures", 1, self._pictures)
        rest = [step for step in order if step.name != "trace"]
        yield from (step for step in rest if step.passes <= _CHEAP)
        if "audit" in self.parts:
            vectors = max((_vectors(each) for each in self.chosen), default=0) + 2
            yield _Step("audit", 5 * share * sum(own.values()), self._audit, vectors=vectors)
        yield from (step for step in rest if step.passes > _CHEAP)
        if "spectrum" in self.parts:
            yield _Step("spectrum", 4 * share * _PROBES * _STEPS, self._spectrum, vectors=_STEPS + 2)
        if "landscape" in self.parts:
            yield _Step("landscape", share * (_GRID**2 + 4 * 45), self._landscape, vectors=46)

    def everything(self) -> None:
        """Take the steps one after another, within the time limit and until an interrupt."""
        steps = list(self.steps())
        for number, step in enumerate(steps):
            try:
                self.progress(step.name, number, len(steps))
                if reason := self._too_long(step) or self._too_large(step):
                    self.left_out[step.name] = reason
                    continue
                step.work()
            except (InputError, NotExactError) as error:
                self.left_out[step.name] = str(error)
            except Exception as error:
                if not is_out_of_memory(error) or self.here.ranks.count > 1:  # others may wait for this one
                    raise
                self.left_out[step.name] = f"there was not enough memory for it: {first_line(error) or 'none left'}"
            except KeyboardInterrupt:
                self.partial = f"interrupted at step {number + 1} of {len(steps)}, {step.name}"
                self.left_out |= {later.name: "interrupted" for later in steps[number:]}
                return

    def _too_long(self, step: _Step) -> str:
        """Why a step no longer fits into the time limit, or nothing; by the clock of rank 0."""
        if self.limit is None or (step.of_margins and self.found.get("margins") is not None):
            return ""  # what the margins say is known with them
        left, cost = self.limit - (time.monotonic() - self.begin), step.passes * self.forward
        times = self.here.ranks.first(torch.tensor([left, cost], device=self.here.problem.device))
        left, cost = times.tolist()
        return "" if left >= cost else f"no time for it within the limit of {self.limit:g} s"

    def _too_large(self, step: _Step) -> str:
        """Why a step does not fit into memory, or nothing.

        Asked before it begins: the system lets a process ask for more than there is, and kills it once it uses that.
        """
        size = self.here.problem.size
        need, free = step.vectors * size * self.here.problem.dtype.itemsize, available_memory(self.here.problem.device)
        if need <= free:
            return ""
        return (
            f"it needs about {need / 1e9:,.1f} GB of memory, for {step.vectors} vectors of {size:,} numbers, but "
            f"{free / 1e9:,.1f} GB is free; params= measures some of the layers"
        )

    def _measuring(self, each: Measure, passes: float) -> _Step:
        def work() -> None:
            begin = time.monotonic()
            value = each.attempt(self.here)
            error = self._subset_error(each, value)
            if error is not None:
                value = dataclasses.replace(value, data_stderr=error.stderr, data_limits=(error.low, error.high))
            self.values[each.name] = ReportRow(
                name=each.name,
                value=value,
                direction=each.direction,
                family=each.family,
                meaning=each.meaning,
                formula=each.formula,
                reference=each.reference,
                invariant_to=tuple(sorted(each.invariant_to)),
                cost=each.cost,
                seconds=time.monotonic() - begin,
                subset_error_unknown=error is not None and math.isnan(error.low),
                subset_error=error.reason if error is not None else "",
                needs_data=each.needs_data,
            )

        return _Step(each.name, passes, work, each.of_margins, _vectors(each))

    # ------------------------------------------------------------ what is found

    def _fit(self) -> None:
        seen = outcomes(self.here)
        self.probabilities = seen.probabilities
        found = self._margins(self.here)
        self.found["margins"] = found
        if found is not None and found.decisions is None:
            self.found["predicted"] = seen.classes
        self.found["fits"]["train"] = self._as_fit(found, seen, self.population)

    def _test(self) -> None:
        assert self.there is not None
        seen = outcomes(self.there)
        found = self._margins(self.there)
        self.found["test_margins"] = found
        self.found["fits"]["test"] = self._as_fit(found, seen, len(seen.losses))

    def _margins(self, setting: Setting) -> Margins | None:
        try:
            return setting.margins
        except InputError as error:
            self.left_out["margins"] = str(error)
            return None

    def _as_fit(self, found: Margins | None, seen: Outcomes, population: int) -> Fit:
        accuracy, losses = Estimate(math.nan, reason="the targets are not classes"), seen.losses
        of = "tokens" if self.here.form.unit == "token" else "samples"
        if found is not None and found.right is not None:
            accuracy = mean_of(found.right, population)
            of = "labels" if isinstance(self.here.problem.loss, BinaryCrossEntropy) else "positions"
        elif found is not None:
            accuracy = share_of(found.correct.double(), population)
        loss = mean_of(losses, population)
        return Fit(len(losses), population, accuracy, loss, of=of, r_squared=seen.r_squared)

    def _subset_error(self, each: Measure, found: Estimate) -> SubsetError | None:
        """The error due to measuring a subset; None if all was measured, or if the samples do not enter."""
        if self.indices is None or not each.needs_data or math.isnan(found.value):
            return None
        return each.subset_error(self.here, found.value, self.population)

    def _correlations(self) -> None:
        """How the curvature correlates with the margin, and with what a linear classifier's curvature would be."""
        traces, found = self._traces(), self.found.get("margins")
        if traces is None or found is None:
            raise InputError("correlations need the traces and the margins of the samples.")
        pairs: dict[str, Any] = {"trace and margin": (found.output, None)}
        pairs["trace and margin, correct samples"] = (found.output, found.correct)
        try:
            pairs["trace and ACEHT"] = (acehts(self.here), None)
        except InputError as error:
            self.left_out["trace and ACEHT"] = str(error)
        tasks = [
            functools.partial(correlate, traces, other, where=where, seed=self.seed) for other, where in pairs.values()
        ]
        self.found["correlations"] = dict(zip(pairs, shared(self.here.ranks, tasks), strict=True))

    def _traces(self) -> SampleTraces | None:
        """The traces, if they were measured."""
        return self.here.traces if "trace" in self.values and "traces" in vars(self.here) else None

    def _pictures(self) -> None:
        found, traces = self.found.get("margins"), self._traces()
        groups: dict[str, list[int]] = {}
        if traces is not None:
            groups["sharpest"] = traces.values.argsort(descending=True)[: _SHOWN["sharpest"]].tolist()
        if found is not None:
            groups["least certain"] = found.output.argsort()[: _SHOWN["least certain"]].tolist()
        spread = torch.linspace(0, self.here.count - 1, min(_SHOWN["others"], self.here.count)).long()
        groups["others"] = spread.unique().tolist()
        wanted = sorted({index for group in groups.values() for index in group})
        images = thumbnails(picked(self.here.batches, torch.tensor(wanted)))
        place = {index: position for position, index in enumerate(wanted)}
        self.found["pictures"] = Pictures(
            torch.tensor(wanted), images, {name: tuple(place[i] for i in group) for name, group in groups.items()}
        )

    @functools.cached_property
    def few(self) -> Setting:
        """A limited number of the samples, for what is expensive."""
        few = self.here if self.here.whole else self.here.drawn(FEW)[0]
        few.writes = "spectrum" in self.parts  # which takes so many products that computing few columns is cheaper
        return few

    def _audit(self) -> None:
        def forward(what: str, done: int, total: int) -> None:
            self.progress(f"audit: {what}", done, total)

        if self.here.problem.sharded:
            raise InputError("an audit transforms the whole model, which is sharded over processes.")
        self.found["audit"] = audit_in(self.few, self.chosen, progress=forward)

    def _spectrum(self) -> None:
        self.found["spectrum"] = spectrum(self.few.hessian, k=2, probes=_PROBES, steps=_STEPS, seed=self.seed)

    def _landscape(self) -> None:
        if self.here.problem.sharded:
            raise InputError("a landscape moves the whole model, which is sharded over processes.")
        self.found["landscape"] = landscape_in(self.few, wanted("eigenvectors", None, 2, _GRID, None))

    # ------------------------------------------------------------ the report

    def report(self, name: str, classes: tuple[str, ...]) -> Report:
        """What was found, in the order of the registry, and in words."""
        traces = self._traces()
        if traces is not None and traces.layers:
            totals = {key: float(values.mean()) for key, values in traces.layers.items()}
            whole = sum(totals.values())
            self.found["layers"] = {key: value / whole for key, value in totals.items()} if whole > 0 else {}
        if traces is not None:
            traces = dataclasses.replace(traces, layers={}, population=self.population)
        count, few = self.here.count, min(FEW, self.here.count)
        chosen = f"all {count:,}" if count > 1 else "1 of 1"
        if self.indices is not None:
            chosen = f"a random subset of {count:,} of {self.population:,}"
        settings = {
            "spiritlevel": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, threads: {self.threads}",
            "seed": str(self.seed),
            "device": str(self.here.problem.device),
            "dtype": self.dtype,
            "loss": self.here.problem.loss.name,
            "batch norm": self.here.batch_norm,
            **({"unit": "every position that counts is a sample"} if self.here.form.unit == "token" else {}),
            "samples": chosen,
            "limits": "± and intervals hold 95%",
        }
        known = {"parameters": self.here.chosen, "data": "; ".join(self.here.notes)}
        settings |= {name: text for name, text in known.items() if text}
        if few < count:
            settings["audit, spectrum and landscape"] = f"{few:,} of these samples, drawn at random"
        if self.limit is not None:
            settings["time limit"] = f"{self.limit:g} s"
        wanted = {each.name for each in self.chosen}
        report = Report(
            name=name,
            rows=tuple(self.values[each.name] for each in self.chosen if each.name in self.values),
            traces=traces,
            indices=self.indices,
            classes=classes,
            parameters=self.here.problem.size,
            settings=settings,
            left_out=self.left_out,
            partial=self.partial,
            seconds=time.monotonic() - self.begin,
            leads={family: tuple(n for n in names if n in wanted) for family, names in LEADING.items()},
            **self.found,
        )
        return dataclasses.replace(report, headline=tuple(headline(report, self.probabilities)))


def _vectors(each: Measure) -> int:
    """How many vectors as long as the parameters a measure holds at once: eigenvalues keep a basis."""
    return 42 if each.cost == "matvecs" else 0


def silent(what: str, done: int, total: int) -> None:
    pass


def kind_of(dtype: torch.dtype, model: nn.Module) -> str:
    """The number format that is measured, and whether it is that of the model."""
    half = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
    return kind(dtype) + (f", a copy of a {kind(half.pop())} model" if half else "")


def kind(dtype: torch.dtype) -> str:
    """The name of a number format."""
    return str(dtype).removeprefix("torch.")
