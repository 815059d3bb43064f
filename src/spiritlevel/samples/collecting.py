"""Go over the batches, compute every sample's trace by the chosen method, and assemble the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.batches import Batches, Fingerprint, all_targets, resized
from spiritlevel.binding.context import Context
from spiritlevel.binding.cores import side_by_side
from spiritlevel.binding.coupling import same_outputs
from spiritlevel.binding.losses import Factor
from spiritlevel.binding.problem import refuse_infinite
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.results import SampleTraces, standard_error
from spiritlevel.samples.choosing import Plan, splitting_pays
from spiritlevel.samples.collapsing import LEAST_GROUPS, Direction, Prober
from spiritlevel.samples.probing import Differentiate, differentiator, form_along, generator_of, probe, signs
from spiritlevel.watching.chains import chain_traces
from spiritlevel.watching.recording import Recording

DEFAULT_PROBES = 64
PILOT_PROBES = 16
MAX_PROBES = 100_000
PASSES_AT_ONCE = 10  # backward passes whose norms are taken together,
_NUMBERS_AT_ONCE = 2**25  # unless their vectors hold more numbers than this


class OtherFunction(NotExactError):
    """On a later batch the model did something for which the chosen method is not exact."""

    def __init__(self, start: int, reason: str) -> None:
        self.reason = f"on the batch that begins with sample {start} {reason}"
        super().__init__(f"the per-sample traces have no exact form here: {self.reason}; use method='hutchinson'.")


_Values = dict[str, Tensor]  # of the samples of a batch, by name
_Begin = Callable[[int, Any, Tensor], Callable[[], _Values]]
"""(number of the first sample, inputs, targets) → a function that gives the values without calling the model again."""
_ERROR = ""  # the name of a column that is not a parameter


def _at_once(values: _Values) -> Callable[[], _Values]:
    """Values that are already there: work that calls the model must be done in turn."""
    return lambda: values


def _weighted_norms(
    recording: Recording, factors: Iterator[Factor], count: int, names: Sequence[str], inputs: Any, start: int
) -> tuple[_Values, Tensor]:
    """Σ_j d_j ‖v_jᵀJ‖² of a batch by parameter, over `count` factors (d, v); and all that the last of them adds."""
    samples, dtype = len(recording.outputs), recording.outputs.dtype
    totals = dict.fromkeys(names, torch.zeros(samples, dtype=torch.float64, device=recording.outputs.device))
    last = torch.zeros_like(next(iter(totals.values())))
    few = ((weight, vector.to(dtype)) for weight, vector in factors)  # in half the memory
    done = 0
    together = max(1, min(PASSES_AT_ONCE, _NUMBERS_AT_ONCE // max(1, recording.outputs.numel())))
    while some := list(itertools.islice(few, together)):
        done += len(some)
        found = recording.squared_norms([vector for _, vector in some], last=done == count)
        for (weight, _), norms in zip(some, found, strict=True):
            last = torch.zeros_like(last)
            for name, norm in norms.items():
                term = weight * norm
                totals[name] = totals[name] + term
                last += term
    *found_totals, last = torch.stack([*totals.values(), last]).cpu()  # all at once: an accelerator would stall on each
    totals = dict(zip(totals, found_totals, strict=True))
    for name, total in totals.items():
        if not bool(torch.isfinite(total).all()):
            refuse_infinite(inputs, start)
            sample = start + int((~torch.isfinite(total)).nonzero()[0])
            raise InputError(
                f"the gradient of the outputs with respect to {name} is beyond {str(dtype).removeprefix('torch.')} "
                f"for sample {sample}; measure model.double()."
            )
    return totals, last


def _wanted(draws: dict[str, Tensor], remainder: bool) -> Tensor:
    """The draws summed over all parts, (N, groups): the whole, or the remainder alone."""
    table = torch.stack(list(draws.values())).sum(0)
    return table[..., 1] if remainder else table.sum(2)


def _needed(error: float, mean: float, rel_err: float) -> float:
    """How many probes a relative error takes if this is the error of the pilot's mean."""
    return 0.0 if not error else PILOT_PROBES * (error / (rel_err * abs(mean))) ** 2 if mean else math.inf


def _in_groups(count: int) -> tuple[int, int]:
    """At least this many probes, and how many make a group: a size that divides the pilot, too."""
    size = next((size for size in (4, 2) if count >= size * LEAST_GROUPS), 1)
    return -(-count // size) * size, size


class Collector:
    """Goes over the batches and assembles the result."""

    def __init__(self, context: Context, batches: Batches, per_layer: bool, cores: int) -> None:
        self.problem, self.ranks, self.seed = context.problem, context.ranks, context.seed
        self.batches, self.per_layer, self.cores, self.memory = batches, per_layer, cores, context.budget()
        self.whole, self.coupled, self.notes = context.whole, context.coupling != "", context.notes
        self.fingerprint = Fingerprint()
        self.targets: list[Tensor] = []

    def each(self) -> Iterator[tuple[int, Any, Tensor]]:
        """This rank's batches on the model's device, each with the number of its first sample; records all targets."""
        self.fingerprint, self.targets = Fingerprint(), []
        start = 0
        for index, (inputs, targets) in enumerate(self.batches):
            if not len(targets):
                continue
            self.fingerprint.update(inputs, targets)
            self.targets.append(targets.detach().cpu())
            if self.ranks.takes(index):
                yield start, *self.problem.place(inputs, targets)
            start += len(targets)

    def columns(self, names: Sequence[str], begin: _Begin, *width: int, cores: int = 1) -> dict[str, Tensor]:
        """The values by name, (samples, *width), of all batches and ranks; missing ones are zero."""
        pieces: list[tuple[int, Tensor]] = []

        def begin_batch(batch: tuple[int, Any, Tensor]) -> Callable[[], tuple[int, Tensor]]:
            values, (start, inputs, targets) = begin(*batch), batch

            def stacked() -> tuple[int, Tensor]:
                found, nothing = values(), torch.zeros(len(targets), *width, dtype=torch.float64)
                piece = torch.stack([found.get(name, nothing).cpu() for name in names], 1)
                if not bool(torch.isfinite(piece).all()):
                    refuse_infinite(inputs, start)
                return start, piece

            return stacked

        with self.ranks.together():
            side_by_side(self.each(), begin_batch, pieces.append, cores)
        sizes = [len(targets) for targets in self.targets]
        self.ranks.same((sizes, str(self.fingerprint)), "their data or batches")
        table = self.ranks.joined(pieces, sum(sizes), len(names), *width)
        return dict(zip(names, table.unbind(1), strict=True))

    def result(self, layers: dict[str, Tensor], stderr: Tensor | None = None, **fields: Any) -> SampleTraces:
        values, notes = fields.pop("values", None), (*fields.pop("notes", ()), *self.notes)
        if values is None:
            values = torch.stack(list(layers.values())).sum(0)
        return SampleTraces(
            values=values,
            stderr=torch.zeros_like(values) if stderr is None else stderr,
            targets=all_targets(self.targets),
            layers=layers if self.per_layer else {},
            seed=self.seed,
            loss=self.problem.loss.name,
            batch_norm=self.problem.batch_norm,
            unit=self.problem.form.unit,
            fingerprint=str(self.fingerprint),
            **self.fingerprint.places,
            batches=tuple(map(len, self.targets)) if self.whole else None,
            notes=notes,
            **fields,
        )

    def gauss_newton(self, plan: Plan) -> tuple[dict[str, Tensor], Tensor | None, int]:
        """Tr GGNₙ by parameter; the error bound of the sampled part, if there is one; the number of passes."""
        assert plan.norms is not None
        problem, norms = self.problem, plan.norms
        count = drawn = 0
        generator = generator_of(self.seed, 0)  # one for all batches: their sizes must not matter

        def own_signs(number: int, classes: int, own: torch.Generator = generator) -> Tensor:
            return torch.randint(0, 2, (number, classes), generator=own, dtype=torch.int8).mul_(2).sub_(1)

        def signs_of(start: int, outputs: Tensor) -> Tensor:
            nonlocal drawn
            if outputs.ndim > 2:  # sequences may differ in length: each sample draws from its own stream
                streams = (generator_of(self.seed, start + n + 1) for n in range(len(outputs)))
                return torch.cat([own_signs(1, outputs[0].numel(), stream) for stream in streams]).view(outputs.shape)
            width = outputs[0].numel()
            own_signs(start - drawn, width)  # skip those of the samples on other ranks
            drawn = start + len(outputs)
            return own_signs(len(outputs), width).view(outputs.shape)

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            nonlocal count
            recording = norms.record(inputs)
            outputs = recording.outputs.detach()
            problem.checked(outputs, inputs, targets, start)
            if plan.name != "split" and not norms.structure.exact:  # a split is right for any network
                raise OtherFunction(start, norms.structure.reason)
            rank = problem.loss.rank(outputs, targets)
            variance = 0.0
            if plan.name == "passes":
                exact = min(plan.passes, max(rank - 1, 0))  # a batch of short sequences may have fewer
                own = signs_of(start, outputs).to(outputs.device)
                factors = problem.loss.sampled_factors(outputs, targets, exact, own)
                count, variance = max(count, exact + 1), 2 * (1 - 1 / max(1, rank - exact))
            else:
                factors, exact = problem.loss.factors(outputs, targets), rank - 1
                count = max(count, rank)

            def values() -> _Values:
                totals, last = _weighted_norms(recording, factors, exact + 1, [*problem.params], inputs, start)
                return {**totals, _ERROR: last * math.sqrt(variance / (1 + variance))}

            return _at_once(values()) if recording.calls_model else values

        layers = self.columns([*problem.params, _ERROR], begin, cores=self.cores)
        error = layers.pop(_ERROR)
        return layers, error if plan.name == "passes" else None, -self.ranks.least(-count)

    def exact(self, plan: Plan) -> SampleTraces:
        layers, stderr, count = self.gauss_newton(plan)
        notes = plan.notes
        if plan.norms is not None and plan.norms.without_rule:
            names = ", ".join(sorted(plan.norms.without_rule))
            notes += (f"gradients computed sample by sample for: {names}",)
        method = "exact" if plan.name == "exact" else f"passes={plan.passes}"
        return self.result(layers, stderr, exact=stderr is None, method=method, matvecs=count, notes=notes)

    def recursion(self, plan: Plan) -> SampleTraces:
        chain = plan.chain
        assert chain is not None

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            outputs, traces = chain_traces(self.problem, chain, inputs, targets, start)
            with torch.no_grad():
                wanted = self.problem.outputs(self.problem.params, inputs)
            if not same_outputs(wanted, outputs):
                raise OtherFunction(start, "the model's outputs are not those of the layers that were seen at first")
            return _at_once(traces)

        layers = self.columns([*self.problem.params], begin)
        return self.result(layers, exact=True, method="recursion", notes=plan.notes)

    def probed(self, plan: Plan, probes: int | None, rel_err: float | None) -> SampleTraces:
        """The whole trace, or what the Gauss-Newton part leaves of it, by probes that all samples share.

        Every probe gives both parts, so the spread of the first ones shows whether it pays to have one of them exactly.
        """
        prober = self._prober()
        notes: tuple[str, ...] = plan.notes
        count = PILOT_PROBES if rel_err is not None else DEFAULT_PROBES if probes is None else probes
        members = 1 if rel_err is not None else prober.members(count)
        draws = self._draws(prober, range(count), members)
        base: dict[str, Tensor] = {}
        passes, need = 0, 0.0
        if plan.name == "split" and self._pays(plan, draws, count, rel_err, prober):
            base, _, passes = self.gauss_newton(plan)
        known = torch.stack(list(base.values())).sum(0) if base else None
        if rel_err is not None:
            means = _wanted(draws, known is not None).mean(0)
            mean = float(means.mean()) + (float(known.mean()) if known is not None else 0.0)
            need = _needed(float(standard_error(means)), mean, rel_err)
            count = max(PILOT_PROBES, min(MAX_PROBES, math.ceil(min(need, MAX_PROBES))))
            if need > MAX_PROBES:
                notes += (f"rel_err={rel_err:g} would take more than {MAX_PROBES} probes; {MAX_PROBES} were run",)
            count, members = _in_groups(count) if prober.collapses else (count, 1)
            if count > PILOT_PROBES:
                more = self._draws(prober, range(PILOT_PROBES, count), members)
                pilot = {name: table.unflatten(1, (-1, members)).mean(2) for name, table in draws.items()}
                draws = {name: torch.cat([pilot[name], more[name]], 1) for name in draws}
        total = _wanted(draws, known is not None)
        if known is not None:
            total = total + known[:, None]
        if rel_err is not None and need <= MAX_PROBES:
            means = total.mean(0)
            if float(standard_error(means)) > rel_err * abs(float(means.mean())):
                notes += (f"rel_err={rel_err:g} was missed: {count} probes, as a pilot asked for, were too few",)
        layers = {}
        if self.per_layer:
            parts = {name: _wanted({name: table}, known is not None) for name, table in draws.items()}
            layers = {name: base.get(name, 0.0) + rows.mean(1) for name, rows in parts.items()}
        return self.result(
            layers,
            standard_error(total),
            values=total.mean(1),
            exact=False,
            method="gauss-newton + remainder" if known is not None else "hutchinson",
            probes=torch.full((len(total),), count),
            dof=total.shape[1] - 1,
            draws=total,
            matvecs=passes + count,
            notes=notes + prober.notes,
        )

    def _pays(self, plan: Plan, draws: dict[str, Tensor], count: int, rel_err: float | None, prober: Prober) -> bool:
        """Whether the exact Gauss-Newton part reduces the error more than the same time spent on probes."""
        means = [_wanted(draws, remainder).mean(0) for remainder in (False, True)]
        whole, rest = (float(standard_error(each)) for each in means)
        few, many = float(count), count * (whole / rest) ** 2 if rest else math.inf
        if rel_err is not None:
            few, many = (max(count, _needed(error, float(means[0].mean()), rel_err)) for error in (rest, whole))
        return splitting_pays(plan.rank, few, many, collapsed=prober.collapses)

    def _prober(self) -> Prober:
        """Made from the first samples, which every rank has."""
        with self.ranks.together():
            inputs, targets = self.problem.place(*self.batches.first(4096 if self.coupled else 8))
            with self._blaming(inputs, targets):
                prober = Prober(
                    self.problem, inputs, len(targets), seed=self.seed, memory=self.memory, coupled=self.coupled
                )
        prober.collapses = bool(self.ranks.least(int(prober.collapses)))
        return prober

    def _draws(self, prober: Prober, indices: range, members: int) -> dict[str, Tensor]:
        """What every group of probes says about every sample, (N, groups, 2): Gauss-Newton part and remainder.

        One table, or one per parameter if layers are wanted: probes within a parameter see only its diagonal block.
        """
        problem = self.problem
        parts: list[str | None] = [*problem.params] if self.per_layer else [None]

        def inside(part: str | None) -> Direction:
            return lambda problem, index: signs(problem.params, self.seed, index, part)

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            tables: dict[str, Tensor] = {}
            options: dict[str, Any] = {"members": members, "start": start}
            for part in parts:
                names = None if part is None else [part]
                tables[part or ""] = prober.forms(
                    problem, inputs, targets, inside(part), indices, names=names, **options
                )
            return _at_once(tables)

        return self.columns([part or "" for part in parts], begin, len(indices) // members, 2)

    def _differentiator(self, inputs: Any, targets: Tensor, start: int) -> tuple[Differentiate, tuple[str, ...]]:
        few = inputs if self.coupled else resized(inputs, min(8, len(targets)))
        with self._blaming(inputs, targets, start):
            return differentiator(self.problem, few, self.seed, start)

    @contextmanager
    def _blaming(self, inputs: Any, targets: Tensor, start: int = 0) -> Iterator[None]:
        """Where derivatives do not agree, a sample that is no number, if there is one, is named in their place."""
        try:
            yield
        except InputError:
            with torch.no_grad():
                outputs = self.problem.head_or_outputs(self.problem.params, inputs)
                self.problem.checked(outputs, inputs, targets, start)
            raise

    def pyhessian(self, most: int = 100, tolerance: float = 1e-3) -> SampleTraces:
        """PyHessian 0.1's `trace()`, batched.

        A sample stops when its running mean has moved by less than `tolerance` relative to the *signed* previous mean,
        and so at once if that is negative.
        """
        problem = self.problem
        differentiate = None

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            nonlocal differentiate
            if differentiate is None:
                differentiate, _ = self._differentiator(inputs, targets, start)
            total = torch.zeros(len(targets), dtype=torch.float64)
            mean, count, negative = torch.zeros_like(total), torch.zeros_like(total), torch.zeros_like(total)
            running = torch.arange(len(targets))
            for index in range(most):
                some, some_targets = inputs, targets
                if not self.coupled and len(running) < len(targets):  # coupled samples need the others too
                    chosen = running.to(problem.device)
                    some, some_targets = resized(inputs, chosen), targets[chosen]
                derivatives = differentiate(problem, some, probe(problem.params, self.seed, index))
                if not index:
                    problem.checked(derivatives[0], inputs, targets, start)
                draw = form_along(problem, derivatives, some_targets)
                total[running] += draw if len(draw) == len(running) else draw[running]
                count[running] += 1
                updated, previous = total[running] / (index + 1), mean[running]
                stop = (updated - previous).abs() / (previous + 1e-6) < tolerance
                mean[running] = updated
                negative[running[stop & (previous + 1e-6 < 0)]] = 1
                running = running[~stop]
                if not len(running):
                    break
            return _at_once({"mean": mean, "count": count, "negative": negative})

        columns = self.columns(["mean", "count", "negative"], begin)
        traces, probes, share = columns["mean"], columns["count"].long(), float(columns["negative"].mean())
        return self.result(
            {},
            torch.full_like(traces, math.nan),
            values=traces,
            exact=False,
            method="pyhessian",
            probes=probes,
            matvecs=int(probes.max()),
            negative_stops=share,
            notes=(f"PyHessian's stopping rule, for comparison only: {share:.1%} stopped on a negative mean",),
        )
