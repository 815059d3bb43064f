"""Operations on tensors in a row, written down and run again as one Python function.

`torch.fx` does this too, and checks, prints and copies its graphs as well: a recording of a small network then takes
longer than the products that it spares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


class Node:
    """A value: what function of which others gives it. An input has no function, and a tensor from outside none."""

    __slots__ = ("args", "dtype", "function", "inputs", "kwargs", "moves", "shape", "tensor", "value")

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        moves: bool = False,
        tensor: Tensor | None = None,
    ) -> None:
        self.function, self.args, self.kwargs, self.tensor = function, args, kwargs, tensor
        self.inputs = [*_nodes_in(args), *_nodes_in(list(kwargs.values()))]
        self.moves: bool = moves or any(node.moves for node in self.inputs)  # whether it follows from the vector
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.value: int | None = None  # its number among the values that were kept

    def on(self, image: Mapping[Node, Node]) -> Node:
        """The same function of other nodes."""
        args, kwargs = _mapped(self.args, image), {key: _mapped(value, image) for key, value in self.kwargs.items()}
        return self.replaced_by(Node(self.function, args, kwargs))

    def replaced_by(self, node: Node) -> Node:
        """A node with this one's value."""
        node.shape, node.dtype, node.value = self.shape, self.dtype, self.value
        return node

    def key(self) -> Any:
        """Equal for nodes that give the same."""
        return self.function, _key(self.args), _key(list(self.kwargs.items()))


class Program:
    """The operations behind some results, as a function of the inputs; values are let go after their last use."""

    def __init__(self, inputs: Sequence[Node], nodes: Iterable[Node], results: Sequence[Node]) -> None:
        self.nodes = [node for node in live(nodes, results) if node.function is not None]
        self._run = _compiled(inputs, self.nodes, results)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._run(*tensors)


def live(nodes: Iterable[Node], results: Iterable[Node]) -> list[Node]:
    """The nodes that the results follow from."""
    needed, found = set(results), list[Node]()
    for node in reversed(list(nodes)):
        if node in needed:
            needed.update(node.inputs)
            found.append(node)
    return found[::-1]


def nested(change: Callable[[Any], Any], value: Any) -> Any:
    """Each item of a list or tuple changed; anything else as it is."""
    return [change(item) for item in value] if isinstance(value, list | tuple) else value


def _nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [node for item in value for node in _nodes_in(item)] if isinstance(value, list | tuple) else []


def _mapped(value: Any, image: Mapping[Node, Node]) -> Any:
    return image[value] if isinstance(value, Node) else nested(lambda item: _mapped(item, image), value)


def _key(value: Any) -> Any:
    """What tells arguments apart: 1 and 1.0, or 0.0 and -0.0, are not the same."""
    if isinstance(value, Node):
        return value
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else (type(value), repr(value))


def _compiled(inputs: Sequence[Node], nodes: Sequence[Node], results: Sequence[Node]) -> Callable[..., Any]:
    """Python code that carries out the operations: a loop over them would take as long as a small one of them."""
    known, names = dict[str, Any](), dict[Node, str]()
    last = {argument: node for node in nodes for argument in node.inputs}
    kept, lines = {*results}, list[str]()
    for index, node in enumerate(inputs):
        names[node] = f"i{index}"
    head = f"def run({', '.join(names.values())}):"
    for index, node in enumerate(nodes):
        arguments = [_written(item, known, names) for item in node.args]
        arguments += [f"{key}={_written(item, known, names)}" for key, item in node.kwargs.items()]
        names[node] = f"v{index}"
        lines.append(f" v{index} = {_constant(node.function, known)}({', '.join(arguments)})")
        done = dict.fromkeys(a for a in node.inputs if last[a] is node and a not in kept and a.tensor is None)
        if done:
            lines.append(f" del {', '.join(names[argument] for argument in done)}")
    lines.append(f" return ({''.join(f'{_written(result, known, names)}, ' for result in results)})")
    exec("\n".join([head, *lines]), known)  # only names of our own: what the model calls is among the constants
    run: Callable[..., Any] = known.pop("run")
    return run


def _written(value: Any, known: dict[str, Any], names: dict[Node, str]) -> str:
    """A value as code. No function inside `_compiled`: one that calls itself would keep its tensors in a circle."""
    if isinstance(value, Node):
        if value not in names:
            names[value] = _constant(value.tensor, known)
        return names[value]
    if isinstance(value, list | tuple) and _nodes_in(value):
        return f"[{', '.join(_written(item, known, names) for item in value)}]"
    return _constant(value, known)


def _constant(value: Any, known: dict[str, Any]) -> str:
    name = f"c{len(known)}"
    known[name] = value
    return name
