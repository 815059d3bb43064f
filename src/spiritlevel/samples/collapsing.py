"""Second derivatives of every sample's loss along many directions: by collapsed Taylor terms, or one by one.

The terms of a few groups of probes at a time follow the tape of a batch (`watching.taylor`). A group gives the mean
of vᵀHₙv over its probes, and the spread of the groups is the error. Where an operation has no rule, or the terms
disagree with autograd on a few samples, each direction is differentiated by itself, and a note says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.batches import resized
from spiritlevel.binding.last_layer import trunk
from spiritlevel.binding.losses import CrossEntropy, Head, HeadLoss
from spiritlevel.binding.parameters import Params, in_precision
from spiritlevel.binding.problem import Problem
from spiritlevel.samples.probing import as_direction, differentiator, parts_along, probe, signs
from spiritlevel.watching.taylor import Tape, Untaught, Way, taped

MOST_MEMBERS = 4
LEAST_GROUPS = 16  # the error comes from their spread: Student's t with 15 degrees of freedom
ROW_BYTES = 5e7  # for the terms of a few groups: no more than it takes to hide the cost of calls
LARGE = 10**6  # from this many parameters, two samples must suffice for a comparison

Direction = Callable[[Problem, int], Params]
"""(problem, number) → the direction with that number in its parameters, zero where a name is missing."""
Cut = Callable[[Any, Any, "int | Tensor"], tuple[Any, Any]]
"""(problem, inputs, number of samples or their indices) → the problem and inputs of these samples alone."""


def _cut(problem: Problem, inputs: Any, rows: int | Tensor) -> tuple[Problem, Any]:
    return problem, resized(inputs, rows)


def members_of(probes: int) -> int:
    """Probes per group: up to four, as long as 16 groups of equal size remain.

    >>> [members_of(probes) for probes in (16, 32, 48, 50, 64, 67, 100)]
    [1, 2, 3, 2, 4, 1, 4]
    """
    sizes = range(MOST_MEMBERS, 1, -1)
    return next((size for size in sizes if probes % size == 0 and probes >= size * LEAST_GROUPS), 1)


class Prober:
    """Computes vᵀHₙv of every sample along many directions v, in the quickest way that can be trusted.

    Built on a few samples inside `problem.active()`. `collapses` says whether groups of probes are cheaper than the
    same number of single ones; if they are not, `notes` say why.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Any,
        count: int,
        *,
        seed: int,
        memory: int,
        cut: Cut = _cut,
        coupled: bool = False,
    ) -> None:
        self.seed, self.memory, self._cut = seed, memory, cut
        whole = coupled or problem.batch_norm == "batch"
        few = min(count, 2 if _size(problem.params) > LARGE else 8)
        problem, inputs = (problem, inputs) if whole else cut(problem, inputs, few)
        self.differentiate, self._slow = differentiator(_seen(problem), inputs, seed)
        self.notes: tuple[str, ...] = ()
        self.collapses = True
        self._whole = whole
        self._trusted: frozenset[Any] = frozenset()  # the operations that had run when the terms agreed with autograd
        try:
            self._compare(problem, inputs)
        except Untaught as error:
            self._give_up(error)

    def _give_up(self, error: Untaught, where: str = "") -> None:
        self.collapses = False
        self.notes += (f"one probe after the other{where}, because {error}", *self._slow)

    def members(self, probes: int) -> int:
        """Probes per group, given how many there are in all."""
        return members_of(probes) if self.collapses else 1

    def forms(
        self,
        problem: Problem,
        inputs: Any,
        targets: Tensor,
        direction: Direction,
        indices: range,
        *,
        members: int = 1,
        names: Iterable[str] | None = None,
        start: int = 0,
    ) -> Tensor:
        """The mean of vᵀHₙv over the directions of every group: Gauss-Newton part and remainder, (N, groups, 2).

        `names` are the parameters that the directions move, by default all; `members` consecutive directions make a
        group; `start` is the number of the first sample.
        """
        names = [*problem.params] if names is None else [*names]
        if self.collapses:
            try:
                found = []
                for part, tape, some in self._pieces(problem, inputs, targets, start):
                    way = tape.along(names)
                    found.append(self._collapsed(part, way, some, direction, indices, members))
                return torch.cat(found)
            except Untaught as error:
                self._give_up(error, f" from sample {start} on" if start else "")
        rows = []
        for index in indices:
            parts = {name: part for name, part in direction(problem, index).items() if name in names}
            derivatives = self.differentiate(problem, inputs, as_direction(parts, problem.params))
            if index == indices[0]:
                problem.checked(derivatives[0], inputs, targets, start)
            rows.append(parts_along(problem, derivatives, targets))
        return torch.stack(rows, 1).unflatten(1, (-1, members)).mean(2)

    def _pieces(
        self, problem: Problem, inputs: Any, targets: Tensor, start: int
    ) -> Iterator[tuple[Problem, Tape, Tensor]]:
        """The tapes of a batch, each of as many samples as fit into memory."""
        count = len(targets)
        size = count if self._whole else max(1, min(count, int(self._room / self._sample_bytes)))
        for first in range(0, count, size):
            some, part, given = targets[first : first + size], problem, inputs
            if size < count:
                rows = torch.arange(first, first + len(some), device=targets.device)
                part, given = self._cut(problem, inputs, rows)
            tape = taped(_seen(part), given)
            part.checked(_whole(part, tape.outputs), given, some, start + first)
            if not tape.operations <= self._trusted:  # the values in this batch took another branch
                self._compare(*((part, given) if self._whole else self._cut(part, given, min(len(some), 8))))
            yield part, tape, some

    def _collapsed(
        self,
        problem: Problem,
        way: Way,
        targets: Tensor,
        direction: Direction,
        indices: range,
        members: int,
    ) -> Tensor:
        row = way.floats * way.outputs.element_size() * (members + 1)
        at_once = max(1, min(len(indices) // members, int(min(ROW_BYTES, self.memory / 2) / row)))
        columns = []
        for first in range(0, len(indices), at_once * members):
            some = indices[first : first + at_once * members]
            order = [index for member in range(members) for index in some[member::members]]
            rows = _stacked(functools.partial(direction, problem), order, way)
            columns.append(_forms(problem, way.outputs, rows, *way.follow(rows, members), targets) / members)
        return torch.cat(columns).transpose(0, 1)

    def _compare(self, problem: Problem, few: Any) -> None:
        """Raise `Untaught` unless the terms of two probes agree with autograd on these samples.

        In float64 if the model can run in it: there only a wrong rule can make a difference.
        """
        problem, double = _seen(problem), torch.float64
        for precise in (True, False):
            try:
                twin, some = (problem.converted(double), in_precision(few, double)) if precise else (problem, few)
                tape = taped(twin, some)
                way = tape.along(twin.params)
                rows = _stacked(functools.partial(signs, twin.params, self.seed), [0, 1], way)
                firsts, seconds = way.follow(rows, 2)
                wanted = [self.differentiate(twin, some, probe(twin.params, self.seed, index)) for index in (0, 1)]
            except (Untaught, RuntimeError, TypeError, ValueError):
                if not precise:
                    raise
                continue
            tolerance = 1e-6 if twin.dtype == torch.float64 else 1e-2
            for found, right in (
                (firsts, torch.stack([each[1] for each in wanted])),
                (seconds[0], wanted[0][2] + wanted[1][2]),
            ):
                size = max(float(found.norm()), float(right.norm()), 1e-30)
                if not float((found - right).norm()) <= tolerance * size:
                    raise Untaught("the rules for second-order terms disagree with autograd on this model")
            break
        plain = taped(problem, few)
        self._trusted |= tape.operations | plain.operations
        self._measure(problem, plain)

    def _measure(self, problem: Problem, tape: Tape) -> None:
        """How much memory a sample takes, and how much the probes leave for samples."""
        item, count, size = tape.outputs.element_size(), max(1, len(tape.outputs)), _size(problem.params)
        rows = MOST_MEMBERS + 1
        self._sample_bytes = item * (tape.floats + rows * (tape.along(problem.params).floats - size)) / count
        self._room = self.memory - rows * size * item
        if self._room < self._sample_bytes:
            raise Untaught("the memory does not hold even one sample's terms")


def _size(params: Params) -> int:
    return sum(tensor.numel() for tensor in params.values())


def _stacked(direction: Callable[[int], Params], order: list[int], way: Way) -> Params:
    """These directions, stacked as rows."""
    rows = {name: tensor.new_empty(len(order), *tensor.shape) for name, tensor in way.moving.items()}
    for place, index in enumerate(order):
        for name, part in direction(index).items():
            if name in rows:
                rows[name][place] = part
    return rows


def _seen(problem: Problem) -> Problem:
    """What the terms follow: the whole network, or the part before outputs that are taken in pieces."""
    parts = trunk(problem) if isinstance(problem, Problem) else None
    return problem if parts is None else parts[0]


def _whole(problem: Problem, seen: Tensor) -> Tensor | Head:
    """The outputs, computed from the part that was followed."""
    parts = trunk(problem) if isinstance(problem, Problem) else None
    return seen if parts is None else parts[1](seen)


def _forms(
    problem: Problem, seen: Tensor, directions: Params, firsts: Tensor, seconds: Tensor, targets: Tensor
) -> Tensor:
    """Σ_k φ̇_kᵀAφ̇_k and gᵀΣ_k φ̈_k for every group and sample, by the loss's closed forms in float64."""
    loss, outputs = problem.loss, _whole(problem, seen)
    if isinstance(outputs, Head):
        assert isinstance(loss, CrossEntropy)
        own = [directions.get(name) for name in problem.facts["head names"]]
        with torch.no_grad():
            return torch.stack(HeadLoss(loss, outputs, targets).forms(outputs, firsts, seconds, *own), 2).cpu()
    gradient = loss.gradient(outputs, targets).reshape(outputs.shape)
    remainder = (gradient * seconds.double()).reshape(len(seconds), len(targets), -1).sum(2)
    curved = torch.zeros_like(remainder)
    for index, first in enumerate(firsts):
        curved[index % len(seconds)] += loss.quadratic(outputs, targets, first)
    return torch.stack([curved, remainder], 2).detach().cpu()
