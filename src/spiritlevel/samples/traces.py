"""The trace of the Hessian of every single sample's loss: exact where the network allows it, with errors elsewhere.

Four methods, from the best to the last resort:

- *exact*: outputs at most linear in each parameter tensor (ReLU networks): Tr Hₙ = Tr GGNₙ = Σ_j d_j ‖v_jᵀJₙ‖², at most
  C−1 backward passes for a whole batch, gradient norms only;
- *recursion*: chains of linear layers and smooth elementwise functions, exact (`chains`);
- *split*: any smooth network, the Gauss-Newton part exact and the remainder Σ_c g_c Tr ∇²φ_c by probes, where their
  spread shows that this reaches the same error sooner;
- *hutchinson*: any network, the whole trace by probes, for a whole batch at once by Taylor terms, collapsed in groups.

The loss is never differentiated by autodiff: its gradient and Hessian in the outputs come from `losses` in float64, so
the results stay right where the loss is tiny.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Batches, resized
from spiritlevel.binding.context import Context
from spiritlevel.binding.cores import even_size
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.losses.heads import Head
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, NotExactError, unknown_name, whole_number
from spiritlevel.estimators import operator_trace
from spiritlevel.operators.matrices import hessian_in
from spiritlevel.results import Estimate, SampleTraces, figure
from spiritlevel.samples.choosing import Plan, batch_size_for, choose, cores_for
from spiritlevel.samples.collapsing import Prober
from spiritlevel.samples.collecting import DEFAULT_PROBES, Collector, OtherFunction
from spiritlevel.watching.derivatives import check_derivatives
from spiritlevel.watching.recording import analyse_few, few_of
from spiritlevel.watching.structure import Structure

METHODS = ("auto", "exact", "hutchinson", "pyhessian")


@checked
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
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> SampleTraces:
    """Tr ∇²ℓ(θ; xₙ, yₙ), the trace of the Hessian of each sample's own loss.

    Exact for networks whose outputs are at most linear in each parameter tensor (linear and convolution layers, batch
    norm in eval mode, ReLU and its relatives, pooling, residual sums, no weight used at two depths): there
    Tr H = Tr GGN = Σ_j d_j ‖v_jᵀJ‖² with A = ∂²ℓ/∂φ² = Σ_j d_j v_j v_jᵀ. Exact as well for chains of linear layers and
    smooth elementwise functions. Estimated, with errors, for everything else.

    Args:
        model: Any `torch.nn.Module`; it is measured in eval mode and comes back untouched.
        data: A pair of tensors, a data set, a loader, or re-iterable batches.
        loss: A name: "cross_entropy" (of one class per sample, or of one at every position of an image or a sequence;
            soft labels too), "token_cross_entropy" (classes last), "causal_lm" (shifts the labels itself),
            "binary_cross_entropy" (one logit or many labels), "squared_error", "huber", "poisson", "exponential"; the
            `torch.nn` losses of these with their options; or a callable that returns one value per sample. With
            positions a sample's loss is the mean over its own; `unit="token"` makes each position a sample.
        method: "auto" takes the best method available. "exact" raises `NotExactError`, naming the operation in the
            way, where there is no exact one. "hutchinson" probes the whole trace. "pyhessian" repeats that package's
            stopping rule, which stops by luck: for comparison only.
        passes: k exact terms of A (the k most probable classes after the top one) and one random combination of the
            rest, k + 1 backward passes in all: unbiased, for many classes. The square of its stderr is on average at
            least the variance, but comes from the same single draw: it gives an interval for the mean over many
            samples (`SampleTraces.mean`), and none for a single sample's trace.
        probes: Random probes for what is estimated, 64 by default. All samples share them. Up to four make a group,
            of which only the mean is known: errors come from the spread of at least 16 groups.
        rel_err: Instead of `probes`: the relative standard error wanted for the *mean*; a pilot of 16 probes
            determines how many are needed, then all are run.
        params: Names, prefixes or globs of the parameters to measure; all that require grad by default.
        per_layer: Also split the values by parameter tensor.
        batch_norm: "eval", or "batch" for batch statistics; the batches are then part of the definition.
        batch_size: Samples per batch, chosen automatically; changes nothing but speed and memory. As many batches as
            there are cores, at most 4, are worked on at once if `memory` allows.
        memory: Bytes that may be used, or a string such as "2GB".
        group: A `torch.distributed` group: every rank passes the same model, data and options, takes its share of the
            batches, and returns the whole result. `None` never communicates.
        seed: Seed of all random numbers; the global random states stay untouched.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: *exact* C−1 backward passes and one forward pass; *hutchinson* two to four forward passes per probe by Taylor
    terms, which need memory for five copies of the parameters, and about ten where an operation has no rule.
    References: paper A, section 3; Hutchinson 1989, doi:10.1080/03610918908812806; mathematics 2 and 4.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> from spiritlevel import data
    >>> inputs, targets = data.load("digits").train
    >>> traces = sample_traces(net, (inputs[:100], targets[:100]))
    >>> traces.exact, traces.values.shape
    (True, torch.Size([100]))
    """
    context = Context(
        model,
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
    return traces_in(context, method=method, passes=passes, probes=probes, rel_err=rel_err, per_layer=per_layer)


def traces_in(
    context: Context,
    *,
    method: str = "auto",
    passes: int | None = None,
    probes: int | None = None,
    rel_err: float | None = None,
    per_layer: bool = False,
) -> SampleTraces:
    """The traces of every sample in a context that is already bound; see `sample_traces`."""
    passes = None if passes is None else whole_number(passes, "passes", 0)
    probes = None if probes is None else whole_number(probes, "probes", 2)  # one probe has no error
    _check_arguments(method, passes, probes, rel_err)
    problem, ranks = context.problem, context.ranks
    with problem.active():
        with ranks.together():
            plan, batches, cores = _prepared(context, method, passes)
        if batches.size is not None and not context.whole:
            batches.size = ranks.least(batches.size)
        collect = Collector(context, batches, per_layer, cores)
        try:
            if plan.name in ("exact", "passes"):
                return collect.exact(plan)
            if plan.name == "recursion":
                return collect.recursion(plan)
        except OtherFunction as error:
            if method == "exact" or passes is not None or ranks.count > 1:
                raise
            notes, plan = plan.notes, Plan("hutchinson")
            plan.notes = (*notes, f"estimated, because {error.reason}")
        if method == "pyhessian":
            return collect.pyhessian()
        return collect.probed(plan, probes, rel_err)


def _prepared(context: Context, method: str, passes: int | None) -> tuple[Plan, Batches, int]:
    """How the traces are found, in which batches and on how many cores, after a look at a few samples."""
    problem, ranks = context.problem, context.ranks
    batches = context.batches.cut(context.batch_size)
    why = context.find_head()
    few, targets, places = (*batches.first(3), None) if context.coupling else _few(problem, batches)
    inputs, targets = problem.place(few, targets)
    with torch.no_grad():
        outputs = problem.head_or_outputs(problem.params, inputs)
    _check_few(problem, outputs, inputs, targets, places)
    plain = outputs if isinstance(outputs, Tensor) else None
    outputs = outputs if isinstance(outputs, Tensor) else outputs.stand_in()
    if problem.form.batches == "fixed" and context.coupling == "loss":
        raise InputError(
            "the loss of a sample depends on the other samples of its batch, so a sample has no trace of its "
            "own; the trace of the mean over the fixed batches is sl.trace(..., batches='fixed')."
        )
    structure = context.once("structure", lambda: _structure(context, inputs))
    smooth = not structure.exact  # otherwise gradients are all that is needed
    kinks = check_derivatives(problem, *context.first(64), twice=smooth, forward=smooth)
    plan = choose(problem, structure, inputs, outputs, targets, method, passes, plain)
    if kinks:
        plan.notes += (
            f"{kinks:.0%} of the samples looked at sit exactly on a kink of a ReLU (a pre-activation of 0): "
            "they have no Hessian there, and the values are those on one side of it",
        )
    plan.notes += (why,) if why else ()
    if problem.rounding:
        plan.notes += (f"the model rounds its values on the way, to about {figure(problem.rounding, 1)} of their size",)
    if not context.coupling and plan.norms is None:  # norms check that themselves
        check_independence(problem, inputs)
    budget = context.budget()
    if plan.norms is not None:
        plan.norms.kernels.restrict(budget)
    cores = cores_for(problem, structure, plan, outputs, context.batch_size, budget)
    if context.batch_size is None and not context.whole:
        most = batch_size_for(problem, structure, plan, outputs, budget, cores)
        batches.size = even_size(most, batches.samples, cores * ranks.count) if batches.samples else most
    return plan, batches, cores


def _structure(context: Context, few: Any) -> Structure:
    if context.coupling:
        return Structure(failure=context.why_coupled)
    return analyse_few(context.problem.thinned(torch.zeros(0))[0], few)


def _few(problem: Problem, batches: Batches) -> tuple[Any, Tensor, Tensor]:
    """A few samples from all over the first batch, to try everything on; and their places in it."""
    inputs, targets = batches.first(4096, 3)
    chosen = few_of(problem, inputs)
    return resized(inputs, chosen), targets[chosen], chosen


def _check_few(
    problem: Problem, outputs: Tensor | Head, inputs: Any, targets: Tensor, places: Tensor | None = None
) -> None:
    """`problem.checked`, where a message names a sample by its place in the data and not by that among the few."""
    try:
        problem.checked(outputs, inputs, targets)
    except InputError:
        for row, place in enumerate([] if places is None else places.tolist()):
            one, label = resized(inputs, torch.tensor([row], device=targets.device)), targets[row : row + 1]
            with torch.no_grad():
                found = problem.head_or_outputs(problem.params, one)
            problem.checked(found, one, label, place)
        raise


@checked
def trace(
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
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Estimate:
    """Tr ∇²L of the mean loss over a data set: `sample_traces(...).mean()`, with the same options.

    Exact (stderr 0) wherever `sample_traces` is, an estimate with its error elsewhere. Cost: as `sample_traces`.
    Reference: paper A, section 3.

    >>> net = nn.Linear(2, 2)
    >>> estimate = trace(net, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)))
    >>> estimate.exact
    True
    """
    context = Context(
        model,
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
    return trace_in(context, method=method, passes=passes, probes=probes, rel_err=rel_err, per_layer=per_layer)


def trace_in(
    context: Context,
    *,
    method: str = "auto",
    passes: int | None = None,
    probes: int | None = None,
    rel_err: float | None = None,
    per_layer: bool = False,
) -> Estimate:
    """The trace of the mean loss in a context that is already bound; see `trace`.

    Where the loss couples the samples of a batch, none has a trace of its own: probes of the whole Hessian give it.
    """
    if context.coupling != "loss":
        found = traces_in(context, method=method, passes=passes, probes=probes, rel_err=rel_err, per_layer=per_layer)
        return found.mean()
    _check_arguments(method, passes, probes, rel_err)
    if method == "exact" or passes is not None:
        raise NotExactError(f"the trace has no exact form here: {context.why_coupled}; use method='hutchinson'.")
    return operator_trace(hessian_in(context), probes=probes or DEFAULT_PROBES, rel_err=rel_err, seed=context.seed)


def sample_forms(context: Context, batches: Batches, directions: Sequence[Params]) -> Tensor:
    """vᵀHₙv of every sample for some directions v, (N, directions): how strongly each sample curves the loss along v.

    About four forward passes per direction by Taylor terms, more where an operation has no rule. Exact to rounding.
    """
    problem = context.problem
    prober, rows = None, []
    with context.ranks.together(), problem.active():
        for start, inputs, targets in context.mine(batches):
            if prober is None:
                prober = Prober(
                    problem,
                    inputs,
                    len(targets),
                    seed=context.seed,
                    memory=context.budget(),
                    coupled=context.coupling != "",
                )
            every = range(len(directions))
            forms = prober.forms(problem, inputs, targets, lambda _, index: directions[index], every)
            rows.append((start, forms.sum(2)))
    return context.ranks.joined(rows, context.count, len(directions))


def _check_arguments(method: str, passes: int | None, probes: int | None, rel_err: float | None) -> None:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if passes is not None and method in ("hutchinson", "pyhessian"):
        raise InputError(f"passes= belongs to exact traces; leave it out with method={method!r}.")
    if rel_err is not None and not (isinstance(rel_err, int | float) and rel_err > 0):
        raise InputError(f"rel_err must be a positive number such as 0.01, got {rel_err!r}.")
    if rel_err is not None and probes is not None:
        raise InputError("give probes= or rel_err=, not both: rel_err fixes the number of probes by itself.")
