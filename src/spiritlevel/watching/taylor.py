"""Second-order Taylor terms of a network's outputs: the forward pass is taped once, and the terms follow the tape.

The tape holds the ATen operations that a batch actually executed, freed of in-place writes, with their values. The
terms of `taylor_terms` pass along it for as many probes as wanted, a few groups at a time, without another look at the
model. What does not move, or does not reach the outputs, is not on it. An operation without a rule raises `Untaught`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem, copies_of
from spiritlevel.binding.rewrites import followed_by_rules
from spiritlevel.errors import first_line
from spiritlevel.watching.operations import aten_name, dispatched
from spiritlevel.watching.taylor_terms import NoRule, Step, Terms
from spiritlevel.watching.watchers import DispatchWatch, tensors_in


class Untaught(Exception):
    """The terms cannot follow this forward pass: it cannot be taped, or an operation has no rule."""


class _Watch(DispatchWatch):
    """Notes every operation that one of the moving values reaches."""

    def __init__(self, moving: Iterable[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.reached = {id(tensor) for tensor in moving}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if any(id(tensor) in self.reached for tensor in tensors_in((args, kwargs))):
            moved = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() or tensor.is_complex()]
            if moved:
                self.steps.append(Step(func, args, kwargs, result))  # this keeps the values, and their ids, alive
                self.reached.update(map(id, moved))
        return result


class Tape:
    """What one batch executed between the moving values and the outputs."""

    def __init__(self, moving: Params, outputs: Tensor, steps: list[Step]) -> None:
        self.moving, self.outputs = moving, outputs
        wanted, kept = {id(outputs)}, []
        for step in reversed(steps):
            if any(id(tensor) in wanted for tensor in tensors_in(step.result)):
                wanted.update(id(tensor) for tensor in tensors_in((step.args, step.kwargs)))
                kept.append(step)
        self.steps = kept[::-1]
        self.operations = frozenset(step.func for step in self.steps)
        for func in self.operations:
            if dispatched(func).taylor is None:
                raise Untaught(f"the operation '{aten_name(func)}' has no rule for second-order terms")

    @property
    def floats(self) -> int:
        """Numbers that the tape keeps: its values and what rules derive from them."""
        return 3 * sum(tensor.numel() for step in self.steps for tensor in tensors_in(step.result))

    def along(self, names: Iterable[str]) -> Way:
        """The part of the tape that matters if only these values move."""
        return Way(self, {name: self.moving[name] for name in names})


class Way:
    """The steps that the terms of some values pass on their way to the outputs, and when each is no longer needed."""

    def __init__(self, tape: Tape, moving: Params) -> None:
        self.moving, self.outputs = moving, tape.outputs
        reached, self.steps = {id(tensor) for tensor in moving.values()}, list[Step]()
        for step in tape.steps:
            if any(id(tensor) in reached for tensor in tensors_in((step.args, step.kwargs))):
                reached.update(map(id, tensors_in(step.result)))
                self.steps.append(step)
        self._last: dict[int, int] = {id(self.outputs): len(self.steps)}
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            for tensor in tensors_in((step.args, step.kwargs)):
                self._last.setdefault(id(tensor), number)
        self._done = [self._done_after(number) for number in range(len(self.steps))]

    @property
    def floats(self) -> int:
        """The largest number of entries, in one row, of all terms needed at the same time."""
        sizes = {id(tensor): tensor.numel() for tensor in self.moving.values()}
        most = total = sum(sizes.values())
        for number, step in enumerate(self.steps):
            for tensor in tensors_in(step.result):
                sizes[id(tensor)] = tensor.numel()
                total += tensor.numel()
            largest = max((tensor.numel() for tensor in tensors_in((step.args, step.result))), default=0)
            most = max(most, total + largest)  # what a rule also needs
            total -= sum(sizes.pop(key, 0) for key in self._done[number])
        return most

    def _done_after(self, number: int) -> list[int]:
        step = self.steps[number]
        given = {id(tensor) for tensor in tensors_in((step.args, step.kwargs, step.result))}
        return [key for key in given if self._last.get(key, number) <= number]

    def follow(self, directions: dict[str, Tensor], members: int) -> tuple[Tensor, Tensor]:
        """φ̇ of every probe and Σ φ̈ of every group.

        `directions` are the probes by name, stacked along the first dimension as in `Terms`: the first ones of all
        groups, then the second ones, and so on.
        """
        count = len(next(iter(directions.values())))
        terms = Terms(members, count // members)
        terms.rows = {id(self.moving[name]): rows for name, rows in directions.items()}
        with torch.no_grad():
            for number, step in enumerate(self.steps):
                self._pass(step, terms)
                for key in self._done[number]:
                    terms.rows.pop(key, None)
        rows = terms.of(self.outputs)
        if rows is None:
            rows = self.outputs.new_zeros(count, *self.outputs.shape)
        rows = terms.whole(rows)
        return rows[:count], rows[count:]

    def _pass(self, step: Step, terms: Terms) -> None:
        results = tree_leaves(step.result)
        if terms.still(*tensors_in((step.args, step.kwargs))):
            return  # cut off further up
        rule = dispatched(step.func).taylor
        assert rule is not None
        try:
            found = rule(step, terms)
        except (NoRule, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            name = aten_name(step.func)
            reason = f" ({first_line(error)})" if str(error) else ""
            raise Untaught(f"the operation '{name}' is called in a form that has no rule{reason}") from error
        rows = found if isinstance(found, list) else [found]
        for place, value in enumerate(results):
            if place < len(rows):
                if rows[place] is not None:
                    terms.rows[id(value)] = rows[place]
            elif id(value) in self._last:
                raise Untaught(f"output {place + 1} of the operation '{aten_name(step.func)}' has no rule")


def taped(problem: Problem, inputs: Any, moving: Params | None = None) -> Tape:
    """One forward pass on the way from the parameters to the outputs; call inside `problem.active()`.

    With `moving`, tensors among the inputs, these move in place of the parameters. Cost: a forward pass whose values
    stay in memory.
    """
    if moving is None:  # `functionalize` writes back to the inputs what a model writes to them
        moving, inputs = problem.params, copies_of(inputs)
    watch = _Watch(moving.values())
    try:
        with torch.no_grad(), followed_by_rules(), watch:
            outputs = functionalize(problem.outputs)(problem.params, inputs)
    except Exception as error:  # whatever stops the run, another method takes over and says what is wrong
        raise Untaught(f"the forward pass cannot be taped ({type(error).__name__}: {first_line(error)})") from error
    if id(outputs) not in watch.reached and not any(outputs is tensor for tensor in moving.values()):
        raise Untaught("the outputs do not depend on the taped operations")
    return Tape(moving, outputs, watch.steps)
