"""What moves numbers about moves channels: the rules for copies, views, selections and joins.

A rule answers whether it has dealt with the operation. If not, or where there is none, the channels stop there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.watching.channels import NONE, Channels, constant, moved
from spiritlevel.watching.graph import Operation, Value


def _alike_in_kind(source: Value, result: Value) -> bool:
    """Whether at most digits can have been lost: the same shape, and no conversion to whole numbers."""
    return source.shape == result.shape and source.tensor.is_floating_point() == result.tensor.is_floating_point()


def same(found: Channels, operation: Operation) -> bool:
    """The same numbers again: the channels stay where they are."""
    source, result = operation.inputs[0], operation.outputs[0]
    if not _alike_in_kind(source, result):
        return False
    return again(found, operation)


def again(found: Channels, operation: Operation) -> bool:
    """The result has the channels of the first value."""
    source, result = operation.inputs[0], operation.outputs[0]
    if source in found.atoms:
        found.atoms[result] = found.atoms[source]
    elif (entries := found.view(source)) is not None:
        found.entries[result] = entries
    if source in found.squared:
        found.squared.add(result)
    return True


def shapes_only(found: Channels, operation: Operation) -> bool:
    """What looks only at the shape of a value."""
    return True


def move(found: Channels, operation: Operation) -> bool:
    """The entries of the first value at other places; other values are indices."""
    return _move(found, operation, operation.inputs[:1])


def stack(found: Channels, operation: Operation) -> bool:
    """The entries of all values side by side."""
    return _move(found, operation, operation.inputs)


def write(found: Channels, operation: Operation) -> bool:
    """One value written into part of another, as `x[…] = y` does."""
    return _move(found, operation, [item for item in (operation.args[0], operation.args[2]) if isinstance(item, Value)])


def attribute(found: Channels, operation: Operation) -> bool:
    """An attribute such as `.T` or `.mT`, if it holds all the entries."""
    whole = operation.outputs[0].tensor.numel() == operation.inputs[0].tensor.numel()
    return whole and move(found, operation)


def _move(found: Channels, operation: Operation, contents: list[Value]) -> bool:
    views = {value: found.view(value) for value in contents}
    if all(entries is not None for entries in views.values()):
        results = moved(operation, {value: entries for value, entries in views.items() if entries is not None})
        if results is None:
            return False
        found.entries.update(zip(operation.outputs, results, strict=True))
        return True
    if any(entries is not None for entries in views.values()):
        return False
    return _carry(found, operation, {value: _labels(found, value) for value in contents})


def _carry(found: Channels, operation: Operation, labels: dict[Value, Tensor]) -> bool:
    results = moved(operation, labels)
    if results is None:
        return False
    if any(value in found.squared for value in labels):
        found.squared.update(operation.outputs)
    found.atoms.update(zip(operation.outputs, results, strict=True))
    return True


def _labels(found: Channels, value: Value) -> Tensor:
    atoms = found.atoms.get(value)
    return torch.full(value.shape, NONE) if atoms is None else atoms


def join(found: Channels, operation: Operation) -> bool:
    """A concatenation, of positions or of channels.

    With positions, parts of the state such as a class token join the channels of the rest, and zeros fit any channel.
    """
    known = [value for value in operation.inputs if value in found.atoms]
    if not known:
        return stack(found, operation)
    dim = operation.argument(1, "dim", operation.kwargs.get("axis", 0)) % known[0].tensor.ndim
    labels = {value: _labels(found, value) for value in operation.inputs}
    template = next((found.atoms[value] for value in known if constant(found.atoms[value], [dim])), None)
    for value in operation.inputs:
        entries = found.view(value)
        if value in found.atoms or not value.tensor.numel():  # torch.cat takes a part without entries in any shape
            continue
        zero = entries is None and value not in found.varying and not bool(value.tensor.any())
        if template is not None and (zero or entries is not None):
            labels[value] = template.narrow(dim, 0, 1).expand(value.shape)
            found.tag(labels[value], "joined")
        if entries is not None and template is not None:
            found.adopt(operation, entries, labels[value])
        elif entries is not None:
            found.loose.append((entries.reshape(-1), f"the operation {operation.described}"))
    return _carry(found, operation, labels)
