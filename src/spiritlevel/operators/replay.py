"""A batch's product as a list of operations, recorded, simplified and cut in two, to be repeated for other vectors."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize

from spiritlevel.operators.programs import Node, Program, live, nested
from spiritlevel.watching.operations import UNKNOWN, Kind, Layer, Operation, dispatched
from spiritlevel.watching.watchers import DispatchWatch

Flat = Callable[..., tuple[Tensor, ...]]  # of a vector, the parameters and a batch, each as tensors


@dataclass(frozen=True)
class Trace:
    """A product cut in two lists of operations: from the fixed tensors to constants, and from those and v to H v."""

    prepare: Program
    multiply: Program
    pure: bool = False
    """Whether it reads no tensor that the model holds beside its parameters."""


@dataclass(frozen=True)
class Tape:
    """One batch's product with its constants at hand."""

    program: Program
    constants: tuple[Tensor, ...]
    samples: int

    def multiply(self, *vector: Tensor) -> Sequence[Tensor]:
        return self.program(*vector, *self.constants)

    def size(self, owned: set[int]) -> int:
        """Bytes of the constants, without the storages that exist anyway."""
        storages = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in self.constants}
        return sum(size for pointer, size in storages.items() if pointer not in owned)


class _Untraceable(Exception):
    """What was executed cannot be repeated for other numbers."""


class _Recorder(DispatchWatch):
    """Writes down all operations on tensors that are executed inside it, in functional form.

    Where a tensor does not follow from the first `moving` inputs, `values[node.value]` is the tensor itself, if values
    are to be kept.
    """

    def __init__(self, inputs: Sequence[Tensor], moving: int, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.nodes = list[Node]()
        self.outside = False  # whether it met tensors that are not inputs: buffers and the like
        self.values: dict[int, Tensor] = {}
        self.known = dict[int, tuple[weakref.ref[Tensor], Node]]()
        self.in_place = False  # whether a value may have been overwritten
        for index, tensor in enumerate(inputs):
            self._name(tensor, self._write(Node(moves=index < moving)))
        self.inputs = tuple(self.nodes)

    def _write(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def _name(self, tensor: Tensor, node: Node) -> None:
        node.shape, node.dtype = tensor.shape, tensor.dtype
        if not node.moves:
            node.value = len(self.nodes)
            if self.keep:
                self.values[node.value] = tensor
        self.known[id(tensor)] = weakref.ref(tensor), node

    def node(self, tensor: Tensor) -> Node:
        """The node that computed a tensor."""
        found = self.known.get(id(tensor))
        if found is not None and found[0]() is tensor:  # else another tensor had this place in memory before
            return found[1]
        node = self._write(Node(tensor=tensor))
        self.outside = True
        self._name(tensor, node)
        return node

    def _nodes(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors."""
        return self.node(value) if isinstance(value, Tensor) else nested(self._nodes, value)

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        return self._write(Node(function, args))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _UNREPEATABLE.isdisjoint(func.tags):
            raise _Untraceable(str(func))
        if func is _aten._efficientzerotensor.default:  # a zero tangent without memory, which operations below a mode
            func = _aten.zeros.default  # read all the same: torch 2.13 dies of that, as in `mse_loss` and `ldexp`
        result = func(*args, **kwargs)
        several = isinstance(result, tuple | list)
        tensors = [
            (index, item) for index, item in enumerate(result if several else [result]) if isinstance(item, Tensor)
        ]
        if not tensors:
            return result
        if dispatched(func).by_memory and not func._schema.is_mutable:
            self._write_by_index(func, result, args, kwargs)
            return result
        function = func
        if func._schema.is_mutable:
            function, self.in_place = _functional(func), True
        arguments = tuple(map(self._nodes, args)), {key: self._nodes(value) for key, value in kwargs.items()}
        node = self._write(Node(function, *arguments))
        for index, item in tensors:
            self._name(item, self._call(operator.getitem, node, index) if several else node)
        return result

    def _write_by_index(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        """A view by strides, or a write to one, as numbers of the flattened tensor: the same in any memory."""
        source, scatters = args[0], func is _aten.as_strided_scatter.default
        place = self.node(_places(source, *args[2 if scatters else 1 :], *kwargs.values()))
        flat = self._call(_aten.reshape.default, self.node(source), [-1])
        self._name(source.reshape(-1), flat)
        if scatters:
            node = self._call(_aten.index_put.default, flat, [place], self.node(args[1]))
            self._name(result.reshape(-1), node)
            node = self._call(_aten.reshape.default, node, list(source.shape))
        else:
            node = self._call(_aten.index.Tensor, flat, [place])
        self._name(result, node)


_aten = torch.ops.aten
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,  # a number taken out of a tensor, perhaps to branch on
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


def _places(source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """Which numbers of a tensor, counted in its own order, a view by strides shows."""
    place = torch.tensor(0 if offset is None else offset - source.storage_offset(), device=source.device)
    for length, step in zip(size, stride, strict=True):
        place = place[..., None] + step * torch.arange(length, device=source.device)
    if not source.is_contiguous() or (place.numel() and not 0 <= int(place.min()) <= int(place.max()) < source.numel()):
        raise _Untraceable("as_strided")
    return place


def _functional(func: Any) -> Any:
    """The operation that returns what an in-place one writes."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or func._overloadname not in getattr(packet, "overloads", list)():
        raise _Untraceable(str(func))
    return getattr(packet, func._overloadname)


class Traced(NamedTuple):
    """A trace, and what recording it has computed on the way."""

    trace: Trace
    constants: tuple[Tensor, ...] | None
    """Of this batch, if they are at hand."""
    product: tuple[Tensor, ...] | None
    """With the vector that it was traced along, if that is the one that was asked for."""


def try_to_trace(
    function: Flat, vector: Sequence[Tensor], params: Sequence[Tensor], data: Sequence[Tensor], *, keep: bool = True
) -> Traced | None:
    """`function(*vector, *params, *data)` as operations, cut in two; `None` if that fails.

    Keeping (`keep`) the constants computed on the way takes the memory of all values that do not move.

    A trace depends on nothing but its inputs and the tensors that the model holds: no number can leave a tensor
    unnoticed, since `functionalize` wraps them all and the recorder refuses what reads one.
    """
    recorder = _Recorder([*vector, *params, *data], len(vector), keep)
    try:
        with recorder:
            results = functionalize(function)(*vector, *params, *data)
            found = [recorder.node(result) for result in results]
        nodes, found = _simplified(recorder.nodes, found)
        trace, chosen = _cut(recorder.inputs, nodes, found, len(vector), pure=not recorder.outside)
    except Exception:  # whatever cannot be traced can still be differentiated
        return None
    known = keep and not recorder.in_place and None not in chosen
    constants = tuple(recorder.values[value].detach() for value in chosen if value is not None) if known else None
    return Traced(trace, constants, tuple(result.detach() for result in results))


def checked_trace(
    function: Flat, vector: Sequence[Tensor], params: Sequence[Tensor], data: Sequence[Tensor]
) -> Traced | None:
    """A trace along a random vector, if it gives the product with the opposite vector as well.

    It does not if a dependence on the vector was lost, or if an in-place operation was wrongly made out of place.
    """
    traced = try_to_trace(function, vector, params, data, keep=False)
    if traced is None or traced.product is None:
        return None
    try:
        with torch.no_grad():
            constants = traced.trace.prepare(*params, *data)
            opposite = traced.trace.multiply(*(-part for part in vector), *constants)
    except Exception:
        return None
    sums = (a + b for a, b in zip(opposite, traced.product, strict=True))  # one at a time
    error, scale = (
        math.hypot(*torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).tolist())
        for tensors in (sums, traced.product)
    )
    right = error <= math.sqrt(torch.finfo(params[0].dtype).eps) * scale
    return traced._replace(constants=constants) if right else None


def _simplified(recorded: Sequence[Node], results: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The same operations and results without aliases, repetitions, and additions of zeros (tangents of what stays)."""
    nodes, image = list[Node](), dict[Node, Node]()
    known, zeros = dict[Any, Node](), set[Node]()
    for node in live(recorded, results):
        if node.function is None:
            image[node] = node
            continue
        operation = _operation(node)
        arguments = [image[argument] for argument in node.inputs]
        if operation.kind is Kind.ALIAS or (node.function is _aten.copy.default and _alike(node, arguments[-1])):
            image[node] = arguments[-1]
            continue
        if (same := _undone(node, arguments)) is not None:
            image[node] = same
            continue
        if node.function is _aten.add.Tensor and len(arguments) == 2 and not node.kwargs:
            others = [argument for argument in arguments if argument not in zeros]
            if len(others) == 1 and others[0].dtype == node.dtype:
                image[node] = others[0]
                if not _alike(node, others[0]):
                    assert node.shape is not None
                    image[node] = node.replaced_by(Node(_aten.expand.default, [others[0], list(node.shape)]))
                    nodes.append(image[node])
                continue
        copy = node.on(image)
        first = known.setdefault(copy.key(), copy)
        if first is copy:
            nodes.append(copy)
        image[node] = first
        if operation.name == "zeros" or _vanishes(first, zeros):
            zeros.add(first)
    found = [image[result] for result in results]
    return nodes, found


def _operation(node: Node) -> Operation:
    return dispatched(node.function) if isinstance(node.function, torch._ops.OpOverload) else UNKNOWN


def _alike(a: Node, b: Node) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _undone(node: Node, arguments: Sequence[Node]) -> Node | None:
    """The value that this one shows again: as a view in its own shape, or transposed twice."""
    if node.function is _aten.t.default:
        (before,) = arguments
        return before.inputs[0] if before.function is _aten.t.default else None
    if node.function is _aten.permute.default:
        return arguments[0] if list(node.args[1]) == list(range(len(node.args[1]))) else None
    shown = node.function in (_aten.view.default, _aten.reshape.default, _aten.expand.default)
    return arguments[0] if shown and node.shape is not None and _alike(node, arguments[0]) else None


def _vanishes(node: Node, zeros: set[Node]) -> bool:
    """Whether an operation is zero because one of its tensors is."""
    operation = _operation(node)
    if operation.layer is Layer.CONVOLUTION:  # plus a bias
        return node.args[2] is None and (node.args[0] in zeros or node.args[1] in zeros)
    if node.function is _aten.convolution_backward.default:  # of which the first argument is a factor of all results
        return node.args[0] in zeros
    known = operation.vanishes or node.function is operator.getitem
    return known and any(argument in zeros for argument in node.inputs)


def _cut(
    inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node], vector: int, pure: bool
) -> tuple[Trace, list[int | None]]:
    """The operations that depend on the first `vector` inputs, the ones before those, and the values between."""
    nodes = live(nodes, results)
    moving = [node for node in nodes if node.moves]
    needed = [argument for node in moving for argument in node.inputs]
    constants = list(dict.fromkeys(argument for argument in [*needed, *results] if not argument.moves))
    prepare = Program(inputs[vector:], [node for node in nodes if not node.moves], constants)
    multiply = Program([*inputs[:vector], *constants], moving, results)
    return Trace(prepare, multiply, pure), [node.value for node in constants]
