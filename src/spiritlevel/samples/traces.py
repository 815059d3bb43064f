"""The trace of the Hessian of every single sample's loss: exact where the network allows it, with errors elsewhere.

Four ways, from the best to the last resort:

- *exact*: outputs at most linear in each parameter tensor (ReLU networks): Tr Hₙ = Tr GGNₙ = Σ_j d_j ‖v_jᵀJₙ‖², at most
  C−1 backward passes for a whole batch, gradient norms only;
- *recursion*: chains of linear layers and smooth elementwise functions, exact (`chains`);
- *split*: any smooth network, the Gauss-Newton part exact and the remainder Σ_c g_c Tr ∇²φ_c by probes;
- *hutchinson*: any network, all of it by probes, for the whole batch at once by nested forward-mode differentiation.

The loss is never differentiated by autodiff: its gradient and Hessian in the outputs come from `losses` in float64, so
the results stay right where the loss is tiny.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad

from spiritlevel.binding.batches import Batches, Fingerprint
from spiritlevel.binding.cores import at_a_time, batches_that_fit, even_size, in_memory, side_by_side
from spiritlevel.binding.losses import Factor
from spiritlevel.binding.memory import parse_memory
from spiritlevel.binding.parameters import Params, along, as_leaves, nearby
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.ranks import Ranks
from spiritlevel.errors import InputError, NotExactError, first_line, unknown_name, whole_number
from spiritlevel.results import Estimate, SampleTraces, standard_error
from spiritlevel.watching.chains import Chain, chain_traces, find_chain
from spiritlevel.watching.derivatives import check_derivatives
from spiritlevel.watching.recording import (
    GradientNorms,
    Recording,
    analyse_few,
    check_independence,
    resized,
    same_outputs,
    spread,
)
from spiritlevel.watching.structure import Structure

METHODS = ("auto", "exact", "hutchinson", "pyhessian")
DEFAULT_PROBES = 64
PILOT_PROBES = 16
MAX_PROBES = 100_000
MANY_CLASSES = 2_000
CHAIN_COST = 2e7  # multiply-adds per sample up to which the recursion is worth its while
SPLIT_RANK = 128  # beyond so many factors the exact Gauss-Newton part costs more than the probes it saves
PASSES_AT_ONCE = 10  # backward passes whose norms are taken together
BATCH_BYTES = 1e8  # activations of one batch: small enough to stay near the cache, large enough to hide overheads


def sample_traces(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    method: str = "auto",
    passes: int | None = None,
    probes: int | None = None,
    rel_err: float | None = None,
    params: Any = None,
    per_layer: bool = False,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    seed: int = 0,
    group: Any = None,
) -> SampleTraces:
    """Tr ∇²ℓ(θ; xₙ, yₙ), the trace of the Hessian of each sample's own loss.

    Exact for networks whose outputs are at most linear in each parameter tensor (linear and convolution layers, batch
    norm in eval mode, ReLU and its relatives, pooling, residual sums, no weight used at two depths): there
    Tr H = Tr GGN = Σ_j d_j ‖v_jᵀJ‖² with A = ∂²ℓ/∂φ² = Σ_j d_j v_j v_jᵀ. Exact as well for chains of linear layers and
    smooth elementwise functions. Estimated, with errors, for everything else.

    Args:
        model: Any `torch.nn.Module`; it is measured in eval mode and comes back untouched.
        data: A pair of tensors, a data set, a loader that does not shuffle, or re-iterable batches.
        loss: A name, a `torch.nn` loss, or a callable that returns one value per sample.
        method: "auto" takes the best way there is. "exact" raises `NotExactError`, naming the operation in the way,
            where there is no exact one. "hutchinson" probes the whole trace. "pyhessian" repeats that package's
            stopping rule, which stops by luck: for comparison only.
        passes: k exact terms of A (the k most probable classes after the top one) and one random combination of the
            rest, k + 1 backward passes in all: unbiased, for many classes. The square of its stderr is on average at
            least the variance, but comes from the same one draw: it makes an interval of the mean over many samples
            (`SampleTraces.mean`), and none of a single sample's trace.
        probes: Random probes for what is estimated, 64 by default. All samples share them.
        rel_err: Instead of `probes`: the wanted relative standard error of the *mean*; a pilot of 16 probes fixes
            their number, then all are run.
        params: Names, prefixes or globs of the parameters to measure; all that require grad by default.
        per_layer: Also split the values by parameter tensor.
        batch_norm: "eval", or "batch" for batch statistics; the batches are then part of the definition.
        batch_size: Samples in a batch, chosen by itself; changes nothing but speed and memory. As many batches as
            there are cores, 4 at most, are worked on at a time if `memory` suffices.
        memory: Bytes that may be used, or a text such as "2GB".
        seed: Seed of all random numbers; the global random states stay untouched.
        group: A `torch.distributed` group: every rank passes the same model, data and options, takes its share of the
            batches, and returns the whole result. `None` never communicates.

    Cost: *exact* C−1 backward passes and one forward pass; *hutchinson* about 4 forward passes a probe.
    References: paper A, section 3; Hutchinson 1990, doi:10.1080/03610919008812866; mathematics 2 and 4.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> from spiritlevel import data
    >>> inputs, targets = data.load("digits").train
    >>> traces = sample_traces(net, (inputs[:100], targets[:100]))
    >>> traces.exact, traces.values.shape
    (True, torch.Size([100]))
    """
    passes = None if passes is None else whole_number(passes, "passes", 0)
    probes = None if probes is None else whole_number(probes, "probes", 2)  # one has no error
    seed = whole_number(seed, "seed", 0)
    _check_arguments(method, passes, probes, rel_err)
    problem = Problem(model, loss=loss, params=params, batch_norm=batch_norm)
    whole = batch_norm == "batch"
    ranks = problem.shared_by(group)
    with problem.active():
        with ranks.together():
            batches = Batches(data, size=batch_size, whole=whole)
            inputs, targets = problem.place(*batches.first(3))
            with torch.no_grad():
                outputs = problem.outputs(problem.params, inputs)
            problem.checked(outputs, inputs, targets)
            if whole:
                structure = Structure(failure="batch_norm='batch' couples the samples of a batch")
            else:
                inputs = _few_of(problem, batches)
                structure = analyse_few(problem, inputs)
            kinks = check_derivatives(problem, *problem.place(*batches.first(64)), twice=not structure.exact)
            plan = _choose(problem, structure, inputs, outputs, method, passes)
            if kinks:
                plan.notes += (
                    f"{kinks:.0%} of the samples looked at sit exactly on a kink of a ReLU (a pre-activation of 0): "
                    "they have no Hessian there, and the values are those of one side",
                )
            if not whole and plan.norms is None:  # which look for themselves
                check_independence(problem, inputs)
            budget = parse_memory(memory)
            cores = _cores(problem, structure, plan, outputs, batch_size, budget)
            if batch_size is None and not whole:
                most = _batch_size(problem, structure, plan.chain, outputs, budget, cores)
                batches.size = even_size(most, batches.samples, cores * ranks.count) if batches.samples else most
        if batches.size is not None and not whole:
            batches.size = ranks.least(batches.size)
        collect = _Collector(problem, batches, ranks, seed, per_layer, cores)
        try:
            if plan.name in ("exact", "passes"):
                return collect.exact(plan)
            if plan.name == "recursion":
                return collect.recursion(plan)
        except _OtherFunction as error:
            if method == "exact" or passes is not None or ranks.count > 1:
                raise
            notes, plan = plan.notes, _Plan("hutchinson")
            plan.notes = (*notes, f"estimated, because {error.reason}")
        if method == "pyhessian":
            return collect.pyhessian()
        return collect.probed(plan, probes, rel_err)


def _few_of(problem: Problem, batches: Batches) -> Any:
    """A few samples from all over the first batch, on which everything is tried first."""
    inputs, targets = batches.first(4096, 3)
    chosen = spread(len(targets))
    return problem.place(resized(inputs, chosen), targets[chosen])[0]


def trace(model: nn.Module, data: Any, **options: Any) -> Estimate:
    """Tr ∇²L of the mean loss over a data set: `sample_traces(...).mean()`, with the same options.

    Exact (stderr 0) wherever `sample_traces` is, an estimate with its error elsewhere. Cost: as `sample_traces`.
    Reference: paper A, section 3.

    >>> net = nn.Linear(2, 2)
    >>> estimate = trace(net, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)))
    >>> estimate.exact
    True
    """
    return sample_traces(model, data, **options).mean()


def sample_forms(problem: Problem, batches: Batches, directions: Sequence[Params], seed: int = 0) -> Tensor:
    """vᵀHₙv of every sample for some directions v, (N, directions): how strongly each sample curves the loss along v.

    By nested forward mode, about four forward passes a direction; by reverse mode where that fails. Exact to rounding.
    """
    differentiate, rows = None, []
    with problem.active():
        for inputs, targets in batches:
            inputs, targets = problem.place(inputs, targets)
            if not len(targets):
                continue
            if differentiate is None:
                few = inputs if problem.batch_norm == "batch" else resized(inputs, min(8, len(targets)))
                differentiate, _ = _differentiator(problem, few, seed)
            found = [_form(problem, differentiate(problem, inputs, v), targets) for v in directions]
            rows.append(torch.stack(found, 1))
    return torch.cat(rows)


def _form(problem: Problem, derivatives: Derivatives, targets: Tensor, remainder: bool = False) -> Tensor:
    """vᵀHₙv of every sample from the derivatives along v; without the Gauss-Newton part if only the remainder."""
    outputs, first, second = derivatives
    loss = problem.loss
    gradient = loss.gradient(outputs, targets).reshape(outputs.shape)
    form = (gradient * second.double()).reshape(len(targets), -1).sum(1)
    return (form if remainder else form + loss.quadratic(outputs, targets, first)).detach().cpu()


def _check_arguments(method: str, passes: int | None, probes: int | None, rel_err: float | None) -> None:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if passes is not None and method in ("hutchinson", "pyhessian"):
        raise InputError(f"passes= belongs to exact traces; leave it out with method={method!r}.")
    if rel_err is not None and not (isinstance(rel_err, int | float) and rel_err > 0):
        raise InputError(f"rel_err must be a positive number such as 0.01, got {rel_err!r}.")
    if rel_err is not None and probes is not None:
        raise InputError("give probes= or rel_err=, not both: rel_err fixes the number of probes by itself.")


# ---------------------------------------------------------------- choosing a plan


class _OtherFunction(NotExactError):
    """On a later batch the model did something for which what was chosen is not exact."""

    def __init__(self, start: int, reason: str) -> None:
        self.reason = f"on the batch that begins with sample {start} {reason}"
        super().__init__(f"the per-sample traces have no exact form here: {self.reason}; use method='hutchinson'.")


class _Plan:
    """What was chosen, and what it needs."""

    def __init__(
        self, name: str, *, passes: int = 0, norms: GradientNorms | None = None, chain: Chain | None = None
    ) -> None:
        self.name, self.passes, self.norms, self.chain = name, passes, norms, chain
        self.notes: tuple[str, ...] = ()


def _choose(
    problem: Problem, structure: Structure, inputs: Any, outputs: Tensor, method: str, passes: int | None
) -> _Plan:
    if method in ("hutchinson", "pyhessian"):
        return _Plan("hutchinson")
    rank = problem.loss.rank(outputs.shape[1] if outputs.ndim > 1 else 1)
    if structure.exact and problem.loss.closed_form:
        plan = _Plan("exact")
        if passes is not None and passes < rank - 1:
            plan = _Plan("passes", passes=passes)
        elif passes is None and rank >= MANY_CLASSES:
            if method == "exact":
                sampled = "passes=8 for a sampled rest, or " if problem.loss.can_sample else ""
                raise InputError(
                    f"exact traces of {outputs.shape[1]} outputs take {rank} backward passes a batch; "
                    f"pass {sampled}passes={rank} to insist."
                )
            if not problem.loss.can_sample:
                return _Plan("hutchinson")
            plan = _Plan("passes", passes=8)
            plan.notes = (f"{rank} factors: 8 taken exactly, the rest sampled; passes= changes that",)
        plan.norms = GradientNorms(problem, inputs, structure, plan.passes + 1 if plan.name == "passes" else rank)
        return plan
    if passes is not None:
        raise NotExactError(f"passes= needs exact terms, but {_obstacle(problem, structure)}; leave it out.")
    if problem.loss.closed_form and not structure.failure:
        chain = find_chain(problem, inputs)
        if chain is not None and (chain.cost <= CHAIN_COST or method == "exact"):
            return _Plan("recursion", chain=chain)
    if method == "exact":
        raise NotExactError(
            f"the per-sample traces of this model have no exact form here: {_obstacle(problem, structure)}; "
            "use method='auto' or 'hutchinson' for an estimate with its error."
        )
    if problem.loss.closed_form and structure.smooth and rank <= SPLIT_RANK:
        norms = GradientNorms(problem, inputs, structure, rank)
        if not norms.without_rule:
            return _Plan("split", norms=norms)
    return _Plan("hutchinson")


def _obstacle(problem: Problem, structure: Structure) -> str:
    if not problem.loss.closed_form:
        return "the loss offers no output factors"
    return structure.reason


def _cores(
    problem: Problem, structure: Structure, plan: _Plan, outputs: Tensor, batch_size: int | None, memory: int
) -> int:
    """How many batches to work on at a time, those of a given size as far as they fit.

    One where the model is called all the time, and where the classes take more memory than the activations: operations
    on so many are large enough for all cores.
    """
    activations, classes = _bytes_per_sample(problem, structure, outputs)
    if plan.norms is None or classes > activations:
        return 1
    return batches_that_fit(at_a_time(problem.device), (batch_size or 1) * (8 * activations + classes), memory)


def _batch_size(
    problem: Problem, structure: Structure, chain: Chain | None, outputs: Tensor, memory: int, cores: int
) -> int:
    activations, extra = _bytes_per_sample(problem, structure, outputs)
    if chain is not None:
        extra += 4 * 8 * chain.width**2  # the Hessian of a layer, the next one, and what lies between
    wanted = BATCH_BYTES / (activations + extra)
    allowed = memory / in_memory(cores) / (8 * activations + extra)
    return max(1, min(2 ** int(math.log2(max(wanted, 8))), 4096, int(allowed)))


def _bytes_per_sample(problem: Problem, structure: Structure, outputs: Tensor) -> tuple[int, int]:
    """Of the activations, and of the loss's factors, which take some float64 numbers a class."""
    item = problem.params[next(iter(problem.params))].element_size()
    return item * (structure.floats_per_sample or 2**18), 64 * outputs[0].numel()


# ---------------------------------------------------------------- second derivatives along a probe


def _generator(seed: int, index: int) -> torch.Generator:
    """Independent streams for neighbouring seeds, which torch's own seeding does not promise."""
    state = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


def probe(params: Params, seed: int, index: int, only: str | None = None) -> Params:
    """Random signs for every parameter, made anew from (seed, index): nothing has to be kept.

    With `only` the direction lies inside that parameter and is zero elsewhere.
    """
    generator = _generator(seed, index)
    result = {}
    for name, tensor in params.items():
        signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
        chosen = only is None or name == only
        result[name] = signs.to(tensor.device, tensor.dtype).mul_(2).sub_(1) if chosen else torch.zeros_like(tensor)
    return result


Derivatives = tuple[Tensor, Tensor, Tensor]
"""Outputs φ, their first derivative φ̇ = Jv and their second φ̈ = vᵀ∇²φ v along a direction v, each (N, C)."""


Differentiate = Callable[[Problem, Any, Params], Derivatives]


def along_forward(problem: Problem, inputs: Any, direction: Params) -> Derivatives:
    """By nested forward mode: no graph, no loop over samples."""

    def velocity(params: Params) -> tuple[Tensor, Tensor]:
        return along(lambda p: problem.outputs(p, inputs), params, direction)

    with torch.no_grad():
        (outputs, first), (_, second) = along(velocity, problem.params, direction)
    return outputs, first, second


def along_reverse(problem: Problem, inputs: Any, direction: Params) -> Derivatives:
    """By reverse mode alone: derivatives, in dummy weights w of the outputs, of d/dt and d²/dt² of Σ w·φ."""
    params = as_leaves(problem.params)
    leaves, directions = list(params.values()), list(direction.values())

    def forward_derivative(scalar: Tensor) -> Tensor:
        if not scalar.requires_grad:
            return scalar.new_zeros(()).requires_grad_()
        gradients = torch.autograd.grad(scalar, leaves, create_graph=True, allow_unused=True)
        pairs = zip(gradients, directions, strict=True)
        return sum(((g * d).sum() for g, d in pairs if g is not None), scalar.new_zeros(()))

    outputs = problem.outputs(params, inputs)
    weights = torch.ones_like(outputs, requires_grad=True)
    once = forward_derivative((weights * outputs).sum())
    twice = forward_derivative(once)
    found = [
        torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True)[0] if scalar.requires_grad else None
        for scalar in (once, twice)
    ]
    first, second = (torch.zeros_like(outputs) if item is None else item for item in found)
    return outputs.detach(), first.detach(), second.detach()


def _differentiator(problem: Problem, inputs: Any, seed: int) -> tuple[Differentiate, tuple[str, ...]]:
    """Forward mode if this model has it and it agrees with reverse mode; else reverse mode, and a note.

    The checksum (mathematics 4.7): for one batch, one probe v and random weights w, Σ w·φ̇ = v·∇ and Σ w·φ̈ = v·∇²v of Σ
    w·φ by forward-over-reverse, and u·∇²v = v·∇²u.
    """
    v, u = probe(problem.params, seed, 0), probe(problem.params, seed, 1)
    if problem.reverse_only:
        return along_reverse, ("reverse mode, because the forward derivative of an operation is wrong or missing",)
    try:
        outputs, first, second = along_forward(problem, inputs, v)
    except RuntimeError as error:
        missing = first_line(error)
        try:
            along_reverse(problem, inputs, v)
        except RuntimeError as second:
            raise InputError(
                f"the curvature of this model cannot be probed: an operation has no forward derivative ({missing}) and "
                f"no second derivative either ({first_line(second)}); write that part in other operations."
            ) from second
        return along_reverse, (f"reverse mode, because forward derivatives are missing ({missing})",)
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs).to(outputs)

    def scalar(params: Params) -> Tensor:
        return (weights * problem.outputs(params, inputs)).sum()

    def dot(a: Params, b: Params) -> float:
        return sum(float((a[name].double() * b[name].double()).sum()) for name in a)

    def products(params: Params) -> tuple[Params, Params, Params]:
        gradient, product = along(grad(scalar), params, v)
        return gradient, product, along(grad(scalar), params, u)[1]

    try:
        gradient, product, other = products(problem.params)
    except RuntimeError:
        _, first_reverse, second_reverse = along_reverse(problem, inputs, v)
        wanted = [(weights * item).double().sum().item() for item in (first_reverse, second_reverse)]
        symmetric = True
    else:
        wanted = [dot(v, gradient), dot(v, product)]
        scale = math.sqrt(dot(product, product) * dot(u, u))
        difference = abs(dot(u, product) - dot(v, other))
        symmetric = difference <= _tolerance(problem) * max(scale, 1e-30)
        if not symmetric:  # or is all of it rounding, and other at parameters that are the same but for rounding?
            changes = []
            for params in nearby(problem.params):
                _, near, near_other = products(params)
                changes.append(abs(dot(u, near) - dot(u, product)) + abs(dot(v, near_other) - dot(v, other)))
            symmetric = difference <= 10 * median(changes)
    if not symmetric:
        raise InputError(
            "the second derivatives of this model are not symmetric, so no curvature of it can be trusted: is a part "
            "of its forward under torch.no_grad() (then freeze its parameters by requires_grad_(False) instead), or is "
            "the double backward of an operation wrong?"
        )
    for found, right in zip((first, second), wanted, strict=True):
        terms = (weights * found).double()
        if abs(terms.sum().item() - right) > _tolerance(problem) * max(float(terms.norm()), abs(right), 1e-30):
            return along_reverse, ("reverse mode, because nested forward mode disagreed with it on this model",)
    return along_forward, ()


def _tolerance(problem: Problem) -> float:
    return 1e-2 if problem.dtype == torch.float32 else 1e-6


# ---------------------------------------------------------------- going over the data


_Values = dict[str, Tensor]  # of the samples of a batch, by name
_Begin = Callable[[int, Any, Tensor], Callable[[], _Values]]
"""(number of the first sample, inputs, targets) → what gives the values, without calling the model any more."""

_ERROR = ""  # the name of a column that is no parameter


def _at_once(values: _Values) -> Callable[[], _Values]:
    """Values that are there already: all that calls the model has to be done in its turn."""
    return lambda: values


def _weighted_norms(
    recording: Recording, factors: Iterator[Factor], count: int, names: Sequence[str], start: int
) -> tuple[_Values, Tensor]:
    """Σ_j d_j ‖v_jᵀJ‖² of a batch by parameter, over `count` factors (d, v); and what the last of them adds in all."""
    samples, dtype = len(recording.outputs), recording.outputs.dtype
    totals = {name: torch.zeros(samples, dtype=torch.float64) for name in names}
    last = torch.zeros(samples, dtype=torch.float64)
    few = ((weight, vector.to(dtype)) for weight, vector in factors)  # in half the memory
    done = 0
    while some := list(itertools.islice(few, PASSES_AT_ONCE)):
        done += len(some)
        found = recording.squared_norms([vector for _, vector in some], last=done == count)
        for (weight, _), norms in zip(some, found, strict=True):
            last = torch.zeros_like(last)
            for name, norm in norms.items():
                term = (weight * norm).cpu()
                totals[name] += term
                last += term
    for name, total in totals.items():
        if not bool(torch.isfinite(total).all()):
            sample = start + int((~torch.isfinite(total)).nonzero()[0])
            raise InputError(
                f"the gradient of the outputs by {name} is beyond {str(dtype).removeprefix('torch.')} for sample "
                f"{sample}; measure model.double()."
            )
    return totals, last


class _Collector:
    """Goes over the batches and puts the result together."""

    def __init__(
        self, problem: Problem, batches: Batches, ranks: Ranks, seed: int, per_layer: bool, cores: int
    ) -> None:
        self.problem, self.batches, self.ranks, self.cores = problem, batches, ranks, cores
        self.seed, self.per_layer = seed, per_layer
        self.fingerprint = Fingerprint()
        self.targets: list[Tensor] = []

    def each(self) -> Iterator[tuple[int, Any, Tensor]]:
        """This rank's batches on the model's device, each with the number of its first sample; keeps the books."""
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
        """The values by name, (samples, *width), of all batches and ranks; what is left out is zero."""
        pieces: list[tuple[int, Tensor]] = []

        def begin_batch(batch: tuple[int, Any, Tensor]) -> Callable[[], tuple[int, Tensor]]:
            values, (start, _, targets) = begin(*batch), batch

            def stacked() -> tuple[int, Tensor]:
                found, nothing = values(), torch.zeros(len(targets), *width, dtype=torch.float64)
                return start, torch.stack([found.get(name, nothing).cpu() for name in names], 1)

            return stacked

        with self.ranks.together():
            side_by_side(self.each(), begin_batch, pieces.append, cores)
        sizes = [len(targets) for targets in self.targets]
        self.ranks.same((sizes, str(self.fingerprint)), "their data or batches")
        table = self.ranks.joined(pieces, sum(sizes), len(names), *width)
        return dict(zip(names, table.unbind(1), strict=True))

    def result(self, layers: dict[str, Tensor], stderr: Tensor | None = None, **fields: Any) -> SampleTraces:
        values = fields.pop("values", None)
        if values is None:
            values = torch.stack(list(layers.values())).sum(0)
        return SampleTraces(
            values=values,
            stderr=torch.zeros_like(values) if stderr is None else stderr,
            targets=torch.cat(self.targets),
            layers=layers if self.per_layer else {},
            seed=self.seed,
            loss=self.problem.loss.name,
            batch_norm=self.problem.batch_norm,
            fingerprint=str(self.fingerprint),
            batches=tuple(map(len, self.targets)) if self.problem.batch_norm == "batch" else None,
            **fields,
        )

    def gauss_newton(self, plan: _Plan) -> tuple[dict[str, Tensor], Tensor | None, int]:
        """Tr GGNₙ by parameter; the error bound of the sampled part if there is one; the number of passes."""
        assert plan.norms is not None
        problem, norms = self.problem, plan.norms
        count = drawn = 0
        generator = _generator(self.seed, 0)  # one for all batches: their sizes must not matter

        def signs(number: int, classes: int) -> Tensor:
            return torch.randint(0, 2, (number, classes), generator=generator, dtype=torch.int8).mul_(2).sub_(1)

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            nonlocal count, drawn
            recording = norms.record(inputs)
            outputs = recording.outputs.detach()
            problem.checked(outputs, inputs, targets, start)
            if plan.name != "split" and not norms.structure.exact:  # a split is right whatever the network is
                raise _OtherFunction(start, norms.structure.reason)
            rank = problem.loss.rank(outputs.shape[1] if outputs.ndim > 1 else 1)
            variance = 0.0
            if plan.name == "passes":
                signs(start - drawn, outputs.shape[1])  # samples of other ranks have signs of their own
                own = signs(len(targets), outputs.shape[1]).to(outputs.device)
                drawn = start + len(targets)
                factors = problem.loss.sampled_factors(outputs, targets, plan.passes, own)
                count, variance = plan.passes + 1, 2 * (1 - 1 / (rank - plan.passes))
            else:
                factors, count = problem.loss.factors(outputs, targets), rank

            def values() -> _Values:
                totals, last = _weighted_norms(recording, factors, count, [*problem.params], start)
                return {**totals, _ERROR: last * math.sqrt(variance / (1 + variance))}

            return _at_once(values()) if recording.calls_model else values

        layers = self.columns([*problem.params, _ERROR], begin, cores=self.cores)
        error = layers.pop(_ERROR)
        return layers, error if plan.name == "passes" else None, -self.ranks.least(-count)

    def exact(self, plan: _Plan) -> SampleTraces:
        layers, stderr, count = self.gauss_newton(plan)
        notes = plan.notes
        if plan.norms is not None and plan.norms.without_rule:
            names = ", ".join(sorted(plan.norms.without_rule))
            notes += (f"gradients of their own, sample by sample, for: {names}",)
        method = "exact" if plan.name == "exact" else f"passes={plan.passes}"
        return self.result(layers, stderr, exact=stderr is None, method=method, matvecs=count, notes=notes)

    def recursion(self, plan: _Plan) -> SampleTraces:
        chain = plan.chain
        assert chain is not None

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            outputs, traces = chain_traces(self.problem, chain, inputs, targets, start)
            with torch.no_grad():
                wanted = self.problem.outputs(self.problem.params, inputs)
            if not same_outputs(wanted, outputs):
                raise _OtherFunction(start, "the model's outputs are not those of the layers that were seen at first")
            return _at_once(traces)

        layers = self.columns([*self.problem.params], begin)
        return self.result(layers, exact=True, method="recursion", notes=plan.notes)

    def probed(self, plan: _Plan, probes: int | None, rel_err: float | None) -> SampleTraces:
        """All of the trace, or what Gauss-Newton leaves of it, by probes that all samples share."""
        base: dict[str, Tensor] = {}
        matvecs = 0
        if plan.name == "split":
            base, _, matvecs = self.gauss_newton(plan)
        known = torch.stack(list(base.values())).sum(0) if base else None
        notes: tuple[str, ...] = plan.notes
        if rel_err is None:
            count = DEFAULT_PROBES if probes is None else probes
            draws, derived = self._draws(range(count), known is not None)
        else:
            draws, derived = self._draws(range(PILOT_PROBES), known is not None)
            means = torch.stack(list(draws.values())).sum(0).mean(0)
            mean = float(means.mean()) + (float(known.mean()) if known is not None else 0.0)
            error = float(standard_error(means))
            need = 0.0 if not error else PILOT_PROBES * (error / (rel_err * abs(mean))) ** 2 if mean else math.inf
            count = max(PILOT_PROBES, min(MAX_PROBES, math.ceil(min(need, MAX_PROBES))))
            if need > MAX_PROBES:
                notes += (f"rel_err={rel_err:g} would take more than {MAX_PROBES} probes; {MAX_PROBES} were run",)
            if count > PILOT_PROBES:
                more, _ = self._draws(range(PILOT_PROBES, count), known is not None)
                draws = {name: torch.cat([draws[name], more[name]], 1) for name in draws}
        total = torch.stack(list(draws.values())).sum(0)
        if known is not None:
            total = total + known[:, None]
        layers = {}
        if self.per_layer:
            layers = {name: base.get(name, 0.0) + rows.mean(1) for name, rows in draws.items()}
        return self.result(
            layers,
            standard_error(total),
            values=total.mean(1),
            exact=False,
            method="gauss-newton + remainder" if known is not None else "hutchinson",
            probes=torch.full((len(total),), count),
            dof=count - 1,
            draws=total,
            matvecs=matvecs + count,
            notes=notes + derived,
        )

    def _draws(self, indices: range, remainder: bool) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """What every probe says of every sample, (N, probes): one table, or one a parameter if layers are wanted."""
        problem = self.problem
        parts: list[str | None] = [*problem.params] if self.per_layer else [None]
        notes: tuple[str, ...] = ()
        differentiate = None

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            nonlocal differentiate, notes
            tables: dict[str, Tensor] = {}
            if differentiate is None:
                differentiate, notes = self._differentiator(inputs, targets)
            for part in parts:
                rows: list[Tensor] = []
                for index in indices:
                    direction = probe(problem.params, self.seed, index, part)
                    derivatives = differentiate(problem, inputs, direction)
                    if not rows:
                        problem.checked(derivatives[0], inputs, targets, start)
                    rows.append(_form(problem, derivatives, targets, remainder))
                tables[part or ""] = torch.stack(rows, 1)
            return _at_once(tables)

        return self.columns([part or "" for part in parts], begin, len(indices)), notes

    def _differentiator(self, inputs: Any, targets: Tensor) -> tuple[Differentiate, tuple[str, ...]]:
        few = inputs if self.problem.batch_norm == "batch" else resized(inputs, min(8, len(targets)))
        return _differentiator(self.problem, few, self.seed)

    def pyhessian(self, most: int = 100, tolerance: float = 1e-3) -> SampleTraces:
        """PyHessian 0.1's `trace()`, batched.

        A sample stops when its running mean moved by less than `tolerance` relative to the *signed* previous mean, so
        at once when that is negative.
        """
        problem = self.problem
        differentiate = None

        def begin(start: int, inputs: Any, targets: Tensor) -> Callable[[], _Values]:
            nonlocal differentiate
            if differentiate is None:
                differentiate, _ = self._differentiator(inputs, targets)
            total = torch.zeros(len(targets), dtype=torch.float64)
            mean, count, negative = torch.zeros_like(total), torch.zeros_like(total), torch.zeros_like(total)
            running = torch.arange(len(targets))
            for index in range(most):
                some, some_targets = inputs, targets
                if problem.batch_norm == "eval" and len(running) < len(targets):  # batch statistics need the others too
                    chosen = running.to(problem.device)
                    some, some_targets = resized(inputs, chosen), targets[chosen]
                derivatives = differentiate(problem, some, probe(problem.params, self.seed, index))
                if not index:
                    problem.checked(derivatives[0], inputs, targets, start)
                draw = _form(problem, derivatives, some_targets)
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
