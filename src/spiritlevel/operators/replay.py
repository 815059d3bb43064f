"""A batch's product as a list of operations, recorded, simplified and cut in two, to be repeated for other vectors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.utils.weak import WeakTensorKeyDictionary

from spiritlevel.watching.operations import UNKNOWN, Kind, Layer, Operation, dispatched
from spiritlevel.watching.watchers import DispatchWatch

Flat = Callable[..., tuple[Tensor, ...]]  # of a vector, the parameters and a batch, each as tensors


@dataclass(frozen=True)
class Trace:
    """A product cut in two lists of operations: from the fixed tensors to constants, and from those and v to H v."""

    prepare: fx.GraphModule
    multiply: fx.GraphModule
    pure: bool = False
    """Whether it reads no tensor that the model holds beside its parameters."""


@dataclass(frozen=True)
class Tape:
    """One batch's product with its constants at hand."""

    graph: fx.GraphModule
    constants: tuple[Tensor, ...]
    samples: int

    def multiply(self, *vector: Tensor) -> Sequence[Tensor]:
        return cast(Sequence[Tensor], self.graph(*vector, *self.constants))

    def size(self, owned: set[int]) -> int:
        """Bytes of the constants, without the storages that exist anyway."""
        storages = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in self.constants}
        return sum(size for pointer, size in storages.items() if pointer not in owned)


class _Untraceable(Exception):
    """What was executed cannot be repeated for other numbers."""


class _Recorder(DispatchWatch):
    """Writes down all operations on tensors that are executed inside it, in functional form.

    Where a tensor does not follow from the first `moving` inputs, `values[node.meta["value"]]` is the tensor itself,
    if values are to be kept. Nodes refer to each other in cycles, so what they held themselves would outlive them.
    """

    def __init__(self, inputs: Sequence[Tensor], moving: int, keep: bool) -> None:
        super().__init__()
        self.graph, self.keep = fx.Graph(), keep
        self.outside: dict[str, Tensor] = {}  # buffers and the like
        self.values: dict[str, Tensor] = {}
        self.nodes = WeakTensorKeyDictionary()
        self.in_place = False  # whether a value may have been overwritten
        for index, tensor in enumerate(inputs):
            self._name(tensor, self.graph.placeholder(f"input_{index}"), moves=index < moving)

    def _name(self, tensor: Tensor, node: fx.Node, moves: bool = False) -> None:
        node.meta["shape"], node.meta["dtype"] = tensor.shape, tensor.dtype
        if not moves:
            node.meta["value"] = node.name
            if self.keep:
                self.values[node.name] = tensor
        self.nodes[tensor] = node

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that computed a tensor."""
        if tensor not in self.nodes:
            name = f"outside_{len(self.outside)}"
            self.outside[name] = tensor
            self._name(tensor, self.graph.create_node("get_attr", name))
        return self.nodes[tensor]

    def _nodes(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors."""
        if isinstance(value, Tensor):
            return self.node(value)
        return [self._nodes(item) for item in value] if isinstance(value, list | tuple) else value

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
        node = self.graph.create_node("call_function", function, *arguments)
        moves = any("value" not in argument.meta for argument in node.all_input_nodes)
        if several and not moves:
            node.meta["value"] = None  # the items have values, the list has none
        for index, item in tensors:
            self._name(item, self.graph.call_function(operator.getitem, (node, index)) if several else node, moves)
        return result

    def _write_by_index(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        """A view by strides, or a write to one, as numbers of the flattened tensor: the same in any memory."""
        source, scatters = args[0], func is _aten.as_strided_scatter.default
        place = _places(source, *args[2 if scatters else 1 :], *kwargs.values())
        written = [self.node(args[1])] if scatters else []
        moves = any("value" not in node.meta for node in [self.node(source), *written])
        flat = self.graph.call_function(_aten.reshape.default, (self.node(source), [-1]))
        self._name(source.reshape(-1), flat, moves)
        function = _aten.index_put.default if scatters else _aten.index.Tensor
        node = self.graph.call_function(function, (flat, [self.node(place)], *written))
        if scatters:
            self._name(result.reshape(-1), node, moves)
            node = self.graph.call_function(_aten.reshape.default, (node, list(source.shape)))
        self._name(result, node, moves)


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
            nodes = tuple(recorder.node(result) for result in results)
        recorder.graph.output(nodes)
        trace, chosen = _cut(_simplified(recorder.graph), len(vector), recorder.outside)
    except Exception:  # whatever cannot be traced can still be differentiated
        return None
    constants = None if recorder.in_place or not keep else tuple(recorder.values[name].detach() for name in chosen)
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


def _simplified(graph: fx.Graph) -> fx.Graph:
    """The same operations without aliases, repetitions, and additions of zeros (the tangents of what does not move)."""
    graph.eliminate_dead_code()
    result, image, known = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        arguments = [image[argument] for argument in node.all_input_nodes]
        operation = _operation(node)
        if operation.kind is Kind.ALIAS or (node.target is _aten.copy.default and _alike(node, arguments[-1])):
            image[node] = arguments[-1]
            continue
        if node.target is _aten.add.Tensor and len(arguments) == 2 and not node.kwargs:
            others = [argument for argument in arguments if argument not in zeros]
            if len(others) == 1 and others[0].meta["dtype"] == node.meta["dtype"]:
                image[node] = others[0]
                if not _alike(node, others[0]):
                    image[node] = result.call_function(_aten.expand.default, (others[0], list(node.meta["shape"])))
                    image[node].meta = node.meta
                continue
        copy = result.node_copy(node, lambda argument: image[argument])
        if node.op == "call_function":
            first = known.setdefault(f"{node.target} {copy.args} {copy.kwargs}", copy)
            if first is not copy:
                result.erase_node(copy)
            image[node] = first
            if operation.name == "zeros" or _vanishes(first, zeros):
                zeros.add(first)
        else:
            image[node] = copy
    result.eliminate_dead_code()
    return result


def _operation(node: fx.Node) -> Operation:
    return dispatched(node.target) if isinstance(node.target, torch._ops.OpOverload) else UNKNOWN


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return (a.meta["shape"], a.meta["dtype"]) == (b.meta["shape"], b.meta["dtype"])


def _vanishes(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether an operation is zero because one of its tensors is."""
    operation = _operation(node)
    if operation.layer is Layer.CONVOLUTION:  # plus a bias
        return node.args[2] is None and (node.args[0] in zeros or node.args[1] in zeros)
    if node.target is _aten.convolution_backward.default:  # of which the first argument is a factor of all results
        return node.args[0] in zeros
    known = operation.vanishes or node.target is operator.getitem
    return known and any(argument in zeros for argument in node.all_input_nodes)


def _cut(graph: fx.Graph, vector: int, outside: dict[str, Tensor]) -> tuple[Trace, list[str]]:
    """The operations that depend on the first `vector` placeholders, the ones before those, and the values between."""
    placeholders = list(graph.find_nodes(op="placeholder"))[:vector]
    (output,) = graph.find_nodes(op="output")
    moving = set(placeholders)
    for node in graph.nodes:
        if node is not output and not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
    needed = [argument for node in graph.nodes if node in moving or node is output for argument in node.all_input_nodes]
    constants = dict.fromkeys(argument for argument in needed if argument not in moving)

    prepare, image = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in moving and node is not output:
            image[node] = prepare.node_copy(node, lambda argument: image[argument])
    prepare.output(tuple(image[node] for node in constants))
    prepare.eliminate_dead_code()

    multiply, moved = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in [*placeholders, *constants]:
        moved[node] = multiply.placeholder(f"given_{node.name}")
    for node in graph.nodes:
        if node in moving and node not in moved:
            moved[node] = multiply.node_copy(node, lambda argument: moved[argument])
    multiply.output(tuple(moved[node] for node in output.args[0]))
    names = [node.meta["value"] for node in constants]
    modules = [fx.GraphModule(outside, operations) for operations in (prepare, multiply)]
    for module in modules:
        module.graph.owning_module = None  # a cycle, which would keep the tensors from outside alive
    return Trace(modules[0], modules[1], pure=not outside), names
