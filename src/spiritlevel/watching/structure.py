"""What the executed operations say about a network: in which degree does each output depend on each parameter?

The forward pass is watched down to its ATen operations and every value gets, for every parameter tensor, a degree 0, 1
or 'more'. Linear and piecewise linear operations keep the largest degree of their arguments, bilinear ones add degrees,
anything else gives 'more' to each parameter it touches. If no output has more than degree 1 in any one parameter
tensor, then ∂²φ/∂θᵢ² = 0 almost everywhere, every within-tensor block of the Hessian equals that of the Gauss-Newton
matrix, and Tr H = Tr GGN exactly (mathematics 4.2). What cannot be traced, or is not known here, counts as 'more': the
analysis may miss an exact network, but never invents one.

Degrees belong to memory, not to tensors: a write into a slice of a fresh tensor, as circular padding does below the
level of Python, raises the degrees of the whole tensor and of every view of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import first_line
from spiritlevel.watching.operations import Chooses, Degree, aten_name, dispatched, named
from spiritlevel.watching.watchers import DispatchWatch

MORE = 2


class Degrees(NamedTuple):
    """The degrees of a value in all parameters, one bit each: those of degree at least 1, and those of 'more'.

    As dicts they would be as long as the network is deep and copied at every operation: quadratic in its depth.
    """

    some: int = 0
    more: int = 0

    def __bool__(self) -> bool:
        return bool(self.some)

    def all_more(self) -> Degrees:
        """The same parameters, each in degree 'more'."""
        return Degrees(self.some, self.some)


NONE = Degrees()


@dataclass(frozen=True)
class Structure:
    """Degrees of the outputs in every parameter tensor, and the operation that made the first 'more' of each.

    `uses` counts the operations that read a parameter; `floats_per_sample` is the size of all intermediate values
    that take memory of their own; `by_data` says whether numbers, not shapes alone, decide which rows an operation
    takes or how many, so that another batch may take another path.
    """

    degrees: dict[str, int] = field(default_factory=dict)
    obstacles: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    floats_per_sample: int = 0
    uses: dict[str, int] = field(default_factory=dict)
    by_data: bool = False

    @property
    def exact(self) -> bool:
        """Whether Tr H = Tr GGN is certain."""
        return not self.failure and all(degree <= 1 for degree in self.degrees.values())

    @property
    def smooth(self) -> bool:
        """Whether only elementwise functions stand in the way of exactness."""
        return not self.failure and all(named(operation).smooth for operation in self.obstacles.values())

    @property
    def reason(self) -> str:
        """One clause that names what is in the way of exactness; empty if nothing is."""
        if self.failure:
            return self.failure
        for name, degree in self.degrees.items():
            if degree > 1:
                operation = self.obstacles.get(name, "")
                return f"the operation '{operation}' makes the outputs more than linear in parameter '{name}'"
        return ""


def analyse(problem: Problem, inputs: Any, count: int) -> Structure:
    """Run one small batch of `count` samples inside `problem.active()` and read the degrees.

    Cost: one forward pass of that batch, a few milliseconds.
    """
    watch = Watch(problem.params, inputs)
    # in-place writes become operations of their own
    forward = functionalize(problem.outputs)
    try:
        # name layer norm as such, not the operations it is rewritten to
        with torch.no_grad(), torch._C.DisableTorchFunction(), watch:
            outputs = forward(problem.params, inputs)
    except Exception as error:  # whatever stops the run, the network is simply not known to be exact
        return Structure(failure=f"the forward pass cannot be traced ({type(error).__name__}: {first_line(error)})")
    return watch.structure(outputs, count)


def joined(first: Structure, second: Structure) -> Structure:
    """What holds for two batches together: the larger degrees, the more frequent uses, the first failure."""
    uses = {name: max(first.uses.get(name, 0), count) for name, count in second.uses.items()}
    degrees = {name: max(first.degrees.get(name, 0), degree) for name, degree in second.degrees.items()}
    return Structure(
        {**first.degrees, **degrees},
        {**second.obstacles, **first.obstacles},
        first.failure or second.failure,
        max(first.floats_per_sample, second.floats_per_sample),
        {**first.uses, **uses},
        first.by_data or second.by_data,
    )


class Watch(DispatchWatch):
    """Gives degrees to every piece of memory that an operation fills; a context for one forward pass.

    Degrees are kept by storage, so that a view and its base have the same. They only grow: what is overwritten later
    counts as if it were still there, which may cost exactness but never invents it. A storage is known by its address,
    which no other gets while a weak reference to it is held.
    """

    def __init__(self, params: Params, inputs: Any) -> None:
        super().__init__()
        self.parameters = {id(tensor): name for name, tensor in params.items()}
        self._bits = {name: 1 << place for place, name in enumerate(params)}
        self._known: dict[int, Degrees] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self.uses = dict.fromkeys(params, 0)
        self.obstacles: dict[str, str] = {}
        self.floats = 0
        self.failure = ""
        self.by_data = False
        self._paused = False
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self._give(leaf, NONE)
        for name, tensor in params.items():
            self._give(tensor, Degrees(self._bits[name]))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For operations that are not the model's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def multiplied(self, result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Record that `result`, made while the watch was paused, is bilinear in input and weight, plus a bias."""
        parts = [self._of(item) or NONE for item in (input, weight, bias)]
        self._give(result, _largest(_sum(parts[0], parts[1]), parts[2]))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        met = [degrees for leaf in leaves if (degrees := self._of(leaf)) is not None]  # before anything is written
        positional = [self._of(argument) or NONE for argument in args]
        result = func(*args, **kwargs)
        values = tree_leaves(result)
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and self._is_fresh(value):
                self.floats += value.numel()
        if not met:
            return result  # constant
        name, operation = aten_name(func), dispatched(func)
        if not all(isinstance(value, Tensor | None) for value in values):
            self._fail(f"the operation '{name}' makes a Python value out of one that depends on parameters or inputs")
            return result
        if name == "view" and getattr(func, "_overloadname", "") == "dtype":
            self._fail("the operation 'view' reads the bits of a number as another type")
        self.by_data |= operation.chooses is Chooses.SIZE
        self.by_data |= operation.chooses is Chooses.ROWS and self._chosen_by_data(leaves)
        for leaf in leaves:
            own = self.parameters.get(id(leaf))
            if own:
                self.uses[own] += 1
        degrees = _degrees(func, args, positional, met)
        new = degrees.more & ~_largest(*met).more
        for value in [*values, *_written(func, args, kwargs)]:
            if isinstance(value, Tensor):
                curved = value.is_floating_point() or value.is_complex()
                self._give(value, degrees if curved else NONE)  # integers and booleans are constant almost everywhere
                for own in self._named(new) if curved else ():
                    self.obstacles.setdefault(own, name)
        return result

    def _named(self, bits: int) -> list[str]:
        return [name for name, bit in self._bits.items() if bits & bit] if bits else []

    def _of(self, leaf: Any) -> Degrees | None:
        """The degrees of a tensor; `None` for a constant that nothing known has been written into."""
        return self._known.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None

    def _give(self, tensor: Tensor, degrees: Degrees) -> None:
        self._is_fresh(tensor)
        key = tensor.untyped_storage()._cdata
        self._known[key] = _largest(self._known.get(key, NONE), degrees)

    def _is_fresh(self, value: Tensor) -> bool:
        """Whether its memory is seen for the first time, unlike that of a weight transposed for its product."""
        storage = value.untyped_storage()
        seen = storage._cdata in self._alive
        if not seen:
            self._alive[storage._cdata] = StorageWeakRef(storage)
        return not seen

    def _chosen_by_data(self, leaves: list[Any]) -> bool:
        indices = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point())
        return any(self._of(index) is not None for index in indices)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or f"the forward pass cannot be traced ({reason})"

    def structure(self, outputs: Any, count: int) -> Structure:
        """What was seen, for the outputs that the watched run returned."""
        if self.failure:
            return Structure(failure=self.failure, uses=self.uses, by_data=self.by_data)
        found = self._of(outputs)
        if found is None:
            return Structure(failure="the outputs do not depend on the traced operations")
        degrees = {name: bool(found.some & bit) + bool(found.more & bit) for name, bit in self._bits.items()}
        hit = {name: operation for name, operation in self.obstacles.items() if degrees[name] >= MORE}
        return Structure(degrees, hit, "", self.floats // max(count, 1), self.uses, self.by_data)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What an operation writes into, by its own declaration."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tree_leaves(found)


def _largest(*several: Degrees) -> Degrees:
    some = more = 0
    for degrees in several:
        some, more = some | degrees.some, more | degrees.more
    return Degrees(some, more)


def _sum(first: Degrees, second: Degrees) -> Degrees:
    return Degrees(first.some | second.some, first.more | second.more | (first.some & second.some))


def _degrees(func: Any, arguments: tuple[Any, ...], args: list[Degrees], met: list[Degrees]) -> Degrees:
    """For the result, from the degrees of the positional arguments and of everything that came in."""
    operation, everything = dispatched(func), _largest(*met)
    if aten_name(func) == "detach" and torch.is_grad_enabled():  # autograd detaches what it saves
        return everything
    if "reduce" in func._overloadname or (operation.real and arguments[0].is_complex()):  # a scatter that may multiply
        return everything.all_more()
    match operation.degree:
        case Degree.CONSTANT:
            return NONE
        case Degree.LINEAR | Degree.PIECEWISE:
            return everything
        case Degree.BILINEAR:
            return _largest(_sum(args[0], args[1]), *args[2:])
        case Degree.ADDED_BILINEAR:
            return _largest(args[0], _sum(args[1], args[2]))
        case Degree.QUOTIENT if not args[1]:
            return args[0]
        case Degree.BATCH_NORM if not any(args[3:5]) and not _normalises_by_batch(func, arguments):
            return _largest(_sum(args[0], args[1]), args[2])
        case Degree.NORMALISED:
            weight, bias = (args[position] for position in operation.affine or ())
            return _largest(args[0].all_more(), weight, bias)
    return everything.all_more()


def _normalises_by_batch(func: Any, arguments: tuple[Any, ...]) -> bool:
    return aten_name(func) != "_native_batch_norm_legit_no_training" and arguments[5] is not False
