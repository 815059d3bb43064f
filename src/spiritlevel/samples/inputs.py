"""The curvature of every sample's loss with respect to its input: Tr ∇²ₓℓ, exact where the network allows it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.utils._pytree import tree_flatten, tree_unflatten

from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Batches, Fingerprint, all_targets, resized, spread
from spiritlevel.binding.context import Context
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.graphs import Rows
from spiritlevel.binding.parameters import REAL, Params, in_precision
from spiritlevel.binding.problem import Problem, refuse_infinite
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, NotExactError, first_line, unknown_name, whole_number
from spiritlevel.results import SampleTraces, standard_error
from spiritlevel.samples.collapsing import Prober
from spiritlevel.samples.collecting import DEFAULT_PROBES
from spiritlevel.samples.probing import probe
from spiritlevel.watching.derivatives import check_input_derivatives
from spiritlevel.watching.structure import Structure, Watch

METHODS = ("auto", "exact", "hutchinson")
_NUMBERS = 2**22  # of the inputs of a batch, at most


@checked
def input_curvature(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    method: str = "auto",
    probes: int | None = None,
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> SampleTraces:
    """Tr ∇²ₓℓ(θ; xₙ, yₙ), the trace of the Hessian of each sample's loss in its own input.

    Exact for networks that are piecewise linear in their inputs (linear and convolution layers, batch norm
    in eval mode, ReLU and its relatives, pooling, residual sums): there ∇²ₓℓ = JₓᵀAJₓ, A = ∂²ℓ/∂φ² = Σ_j d_j v_j v_jᵀ,
    and the trace is Σ_j d_j ‖∂(v_jᵀφ)/∂x‖². What counts is the degree of the outputs in the *input*, which is
    checked on every batch. Exact, too, where a sample's input has no more numbers than there are probes: each is then
    moved on its own. Estimated by random signs, with errors, for everything else.

    Args:
        model: Any `torch.nn.Module`; it is measured in eval mode and comes back untouched.
        data: A pair of tensors, a data set, a loader, or re-iterable batches. All floating-point
            inputs count; for texts, measure the part of the model after its embedding.
        loss: A name, a `torch.nn` loss, or a callable that returns one value per sample.
        method: "auto", "exact" (raises `NotExactError` where there is no exact method) or "hutchinson".
        probes: Random probes for what is estimated, 64 by default. All samples share them.
        batch_size: Samples in a batch; changes nothing but speed and memory.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        group: A `torch.distributed` group: every rank passes the same arguments, takes its share of the batches, and
            returns the whole result. `None` never communicates.
        seed: Seed of the probes; the global random states stay untouched.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: *exact* C−1 backward and two forward passes; otherwise two to four forward passes per probe. References:
    Moosavi-Dezfooli et al. 2019, arXiv:1811.09716; mathematics 4.9.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = input_curvature(net, (torch.rand(5, 3), torch.tensor([0, 1, 1, 0, 1])))
    >>> found.exact, found.values.shape, bool((found.values >= 0).all())
    (True, torch.Size([5]), True)
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    count = DEFAULT_PROBES if probes is None else whole_number(probes, "probes", 2)
    everything = REAL if isinstance(model, nn.Module) and next(model.parameters(), None) is not None else None
    context = Context(
        model,
        data,
        loss=loss,
        params=everything,
        batch_size=batch_size,
        memory=memory,
        group=group,
        seed=seed,
        **reading,
    )
    problem, ranks = context.problem, context.ranks
    with problem.active():
        with ranks.together():
            batches = context.batches.cut(context.batch_size)
            first, targets = problem.place(*batches.first(64, 3))
            shadow = _InInputs(problem, first)
            with torch.no_grad():
                problem.checked(problem.outputs(problem.params, first), first, targets)
            check_independence(problem, resized(first, spread(len(targets))))
            check_input_derivatives(problem, first, targets)
            if context.coupling == "loss":
                raise InputError(
                    "the loss of a sample depends on the other samples of its batch, so a sample has no curvature of "
                    "its own in its input; return each sample's own loss."
                )
            if batch_size is None and not context.whole:
                batches.size = max(1, min(512, _NUMBERS // max(1, shadow.size)))
        if batches.size is not None:
            batches.size = ranks.least(batches.size)
        reason = "" if method != "hutchinson" else "method='hutchinson' asks for probes"
        if not reason and not problem.loss.closed_form:
            reason = "the loss offers no output factors"
        reason = reason or _seen(shadow, len(targets)).reason
        look = _Look(problem, batches, ranks, context)
        if not reason:
            try:
                return look.exact()
            except _Curved as error:
                reason = str(error)
        size = math.inf if method == "hutchinson" else look.largest()
        if method == "exact" and size > count:
            raise NotExactError(
                f"the curvature in the input has no exact form here: {reason}; use method='auto' for an estimate with "
                f"its error, or probes={size} to move each of a sample's {size} numbers by itself."
            )
        notes = () if method == "hutchinson" else (f"not exact by factors, because {reason}",)
        return look.moved(int(size), notes) if size <= count else look.probed(count, notes)


class _Curved(NotExactError):
    """The outputs of a batch are more than linear in its inputs."""


class _InInputs:
    """A problem whose parameters are the floating-point inputs of one batch: the same code differentiates both."""

    def __init__(self, problem: Problem, inputs: Any) -> None:
        self.problem, self.loss, self.dtype, self.batch_norm = problem, problem.loss, problem.dtype, "eval"
        self.whole = inputs
        self.leaves, self.form = tree_flatten(inputs)
        kinds = {k: leaf for k, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        self.params: Params = {str(k): leaf for k, leaf in kinds.items() if leaf.is_floating_point()}
        self.reverse_only, self.rounding = problem.reverse_only, problem.rounding
        if isinstance(inputs, Rows):
            raise InputError("where samples share one graph, none has a curvature in an input of its own.")
        if not self.params:
            names = ", ".join(sorted({str(leaf.dtype).removeprefix("torch.") for leaf in kinds.values()}))
            raise InputError(
                f"the curvature in the input needs floating-point inputs, got {names}; convert them, or measure the "
                "part of the model after its embedding."
            )

    def converted(self, dtype: torch.dtype) -> _InInputs:
        """The same in another precision."""
        return _InInputs(self.problem.converted(dtype), in_precision(self.whole, dtype))

    def checked(self, outputs: Tensor, _: None, targets: Tensor, start: int) -> None:
        self.problem.checked(outputs, self.whole, targets, start)

    @property
    def size(self) -> int:
        """How many numbers a sample's inputs hold."""
        return sum(math.prod(leaf.shape[1:]) for leaf in self.params.values())

    def outputs(self, points: Params, _: Any = None) -> Tensor:
        leaves = [points.get(str(k), leaf) for k, leaf in enumerate(self.leaves)]
        return self.problem.outputs(self.problem.params, tree_unflatten(leaves, self.form))

    def signs(self, seed: int, index: int) -> Params:
        """One direction for all samples."""
        one = probe({name: leaf[0] for name, leaf in self.params.items()}, seed, index)
        return {name: one[name].expand_as(leaf) for name, leaf in self.params.items()}

    def axis(self, number: int) -> Params:
        """The direction that moves one number of each sample."""
        found = {}
        for name, leaf in self.params.items():
            size = math.prod(leaf.shape[1:])
            one = torch.zeros(size, dtype=leaf.dtype, device=leaf.device)
            if 0 <= number < size:
                one[number] = 1.0
            number -= size
            found[name] = one.reshape(leaf.shape[1:]).expand_as(leaf)
        return found


def _seen(shadow: _InInputs, count: int) -> Structure:
    """The degree of the outputs in every floating-point input, read off one forward pass."""
    problem = shadow.problem
    watch = Watch(shadow.params, [*problem.params.values(), *shadow.leaves])

    def forward(points: Params, params: Params) -> Tensor:
        leaves = [points.get(str(k), leaf) for k, leaf in enumerate(shadow.leaves)]
        return problem.outputs(params, tree_unflatten(leaves, shadow.form))

    try:
        with torch.no_grad(), torch._C.DisableTorchFunction(), watch:
            outputs = functionalize(forward)(shadow.params, problem.params)
    except Exception as error:  # whatever stopped it, the network is simply not known to be exact
        return Structure(failure=f"the forward pass cannot be traced ({type(error).__name__}: {first_line(error)})")
    return watch.structure(outputs, count)


class _Look:
    """Goes over the batches and assembles the result."""

    def __init__(self, problem: Problem, batches: Batches, ranks: Any, context: Context) -> None:
        self.problem, self.batches, self.ranks, self.seed = problem, batches, ranks, context.seed
        self.notes, self.memory = context.notes, context.budget()

    def largest(self) -> int:
        """How many numbers the inputs of a sample hold at most: later batches may have longer sequences."""
        with self.ranks.together():
            sizes = [_InInputs(self.problem, inputs).size for inputs, targets in self.batches if len(targets)]
        return -self.ranks.least(-max(sizes))

    def _each(self) -> Iterator[tuple[int, _InInputs, Tensor]]:
        self.fingerprint, self.targets = Fingerprint(), list[Tensor]()
        for index, (inputs, targets) in enumerate(self.batches):
            if not len(targets):
                continue
            self.fingerprint.update(inputs, targets)
            start = sum(map(len, self.targets))
            self.targets.append(targets.detach().cpu())
            if self.ranks.takes(index):
                inputs, targets = self.problem.place(inputs, targets)
                yield start, _InInputs(self.problem, inputs), targets

    def _result(self, pieces: list[tuple[int, Tensor]], width: int, **fields: Any) -> SampleTraces:
        sizes = [len(targets) for targets in self.targets]
        self.ranks.same((sizes, str(self.fingerprint)), "their data or batches")
        table = self.ranks.joined(pieces, sum(sizes), width)
        exact, notes = bool(fields["exact"]), (*fields.pop("notes", ()), *self.notes)
        return SampleTraces(
            values=table.sum(1) if exact else table.mean(1),
            stderr=torch.zeros(len(table), dtype=torch.float64) if exact else standard_error(table),
            targets=all_targets(self.targets),
            draws=None if exact else table,
            seed=self.seed,
            loss=self.problem.loss.name,
            fingerprint=str(self.fingerprint),
            **self.fingerprint.places,
            wrt="input",
            unit=self.problem.form.unit,
            notes=notes,
            **fields,
        )

    def exact(self) -> SampleTraces:
        """By the factors of the loss: C−1 backward passes per batch."""
        pieces, passes, curved = [], 0, ""
        with self.ranks.together():
            for start, shadow, targets in self._each():
                curved = curved or _seen(shadow, len(targets)).reason
                if curved:
                    continue
                traces, passes = self._factors(shadow, targets, start)
                pieces.append((start, traces[:, None]))
        if self.ranks.least(0 if curved else 1) == 0:
            raise _Curved(curved or "another rank met a batch in which the outputs are more than linear in the inputs")
        return self._result(pieces, 1, exact=True, method="exact", matvecs=-self.ranks.least(-passes))

    def _factors(self, shadow: _InInputs, targets: Tensor, start: int) -> tuple[Tensor, int]:
        points = {name: leaf.detach().requires_grad_() for name, leaf in shadow.params.items()}
        outputs = shadow.outputs({name: leaf.clone() for name, leaf in points.items()})  # it may work in place
        self.problem.checked(outputs, shadow.whole, targets, start)
        total, passes = torch.zeros(len(targets), dtype=torch.float64), 0
        for weight, vector in self.problem.loss.factors(outputs.detach(), targets):
            passes += 1
            if not outputs.requires_grad:
                continue  # constant outputs
            gradients = torch.autograd.grad(
                outputs,
                list(points.values()),
                vector.to(outputs.dtype).reshape(outputs.shape),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for gradient in gradients:
                total += (weight * gradient.double().reshape(len(targets), -1).square().sum(1)).cpu()
        if not bool(torch.isfinite(total).all()):
            refuse_infinite(shadow.whole, start)
            sample = start + int((~torch.isfinite(total)).nonzero()[0])
            raise InputError(f"the gradient of the outputs with respect to input {sample} is NaN or infinite.")
        return total, passes

    def moved(self, size: int, notes: tuple[str, ...]) -> SampleTraces:
        """Each number of a sample on its own."""
        pieces, prober = self._along(size, lambda shadow, k: shadow.axis(k), grouped=False)
        return self._result(pieces, size, exact=True, method="axes", matvecs=size, notes=notes + prober.notes)

    def probed(self, count: int, notes: tuple[str, ...]) -> SampleTraces:
        """Random signs that all samples share."""
        pieces, prober = self._along(count, lambda shadow, k: shadow.signs(self.seed, k), grouped=True)
        total, groups = sum(map(len, self.targets)), count // prober.members(count)
        fields: dict[str, Any] = {"probes": torch.full((total,), count), "dof": groups - 1, "matvecs": count}
        return self._result(pieces, groups, exact=False, method="hutchinson", notes=notes + prober.notes, **fields)

    def _along(self, count: int, direction: Any, *, grouped: bool) -> tuple[list[tuple[int, Tensor]], Prober]:
        """The second derivative of every sample's loss along each of the directions, or their means in groups."""
        pieces: list[tuple[int, Tensor]] = []
        with self.ranks.together():
            inputs, targets = self.problem.place(*self.batches.first(8))
            few: Any = _InInputs(self.problem, inputs)
            try:
                prober = Prober(few, None, len(targets), seed=self.seed, memory=self.memory, cut=_cut)
            except InputError:
                refuse_infinite(inputs)
                raise
        prober.collapses = bool(self.ranks.least(int(prober.collapses)))
        members = prober.members(count) if grouped else 1
        with self.ranks.together():
            for start, shadow, targets in self._each():
                some: Any = shadow
                table = prober.forms(some, None, targets, direction, range(count), members=members, start=start)
                if not bool(torch.isfinite(table).all()):
                    refuse_infinite(shadow.whole, start)
                pieces.append((start, table.sum(2)))
        return pieces, prober


def _cut(shadow: Any, _: None, rows: int | Tensor) -> tuple[Any, None]:
    return _InInputs(shadow.problem, resized(shadow.whole, rows)), None
