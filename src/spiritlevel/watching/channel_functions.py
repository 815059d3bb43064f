"""What elementwise functions do to channels: they tie those that meet, and pass maps that commute with the function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spiritlevel.watching.channels import Channels, constant
from spiritlevel.watching.graph import Operation, Value


def _spread(found: Channels, value: Any, operation: Operation) -> Tensor | None:
    """The atoms of an operand in the shape of the result."""
    atoms = found.atoms.get(value) if isinstance(value, Value) else None
    return None if atoms is None else atoms.expand(operation.outputs[0].shape)


def _alike(found: Channels, value: Value, atoms: Tensor) -> bool:
    """Whether an operand is the same number for all channels, at every position."""
    shape = [1] * (atoms.ndim - value.tensor.ndim) + list(value.shape)
    if constant(atoms, [axis for axis, size in enumerate(shape) if size > 1]):
        return True
    return _fixed(found, value) and bool((value.tensor == value.tensor.reshape(-1)[0]).all())


def _fixed(found: Channels, value: Value) -> bool:
    """Whether a value is a constant: entries of a parameter may be equal, as at the start of a training, but differ."""
    return value.maker is None and not value.given and value.name not in found.graph.parameters


def _meets(found: Channels, operation: Operation, value: Value, atoms: Tensor, *, added: bool = False) -> bool:
    """Tie parameters, or a buffer that is added, to the atoms that they meet entry by entry; whether that applies."""
    entries = found.view(value)
    if entries is None:
        return False
    names = found.layout.owners(entries)
    if not added and not all(name in found.graph.parameters for name in names):
        return False
    found.adopt(operation, entries.expand(operation.outputs[0].shape), atoms)
    return True


def any_function(found: Channels, operation: Operation) -> bool:
    """Any function of each entry: all operands with channels are tied; all others must not distinguish channels."""
    return found.passing.functions == "any" and _elementwise(found, operation)


def homogeneous_function(found: Channels, operation: Operation) -> bool:
    """An elementwise function with f(cx) = c f(x) for c > 0."""
    return found.passing.functions != "none" and _elementwise(found, operation)


def met(found: Channels, operation: Operation) -> bool:
    """Any elementwise function that adds: a buffer of the state may be one of the operands."""
    return found.passing.functions == "any" and _elementwise(found, operation, added=True)


def _elementwise(found: Channels, operation: Operation, *, added: bool = False) -> bool:
    passing = found.passing
    parts = [atoms for value in operation.inputs if (atoms := _spread(found, value, operation)) is not None]
    if not parts or (len(parts) > 1 and not passing.products):
        return False
    for other in parts[1:]:
        _tie(found, parts[0], other, operation)
    for value in operation.inputs:
        if value not in found.atoms and not (
            _alike(found, value, parts[0]) or _meets(found, operation, value, parts[0], added=added)
        ):
            return False
    found.atoms[operation.outputs[0]] = parts[0]
    return True


def _tie(found: Channels, first: Tensor, second: Tensor, operation: Operation) -> None:
    """Tie two values entry by entry; a channel that meets none is stopped."""
    found.forest.tie(first, second)
    alone = (first >= 0) != (second >= 0)
    for atoms in (first, second):
        found.forest.stop(atoms[alone], f"the operation {operation.described}")


def multiply(found: Channels, operation: Operation) -> bool:
    """A product, entry by entry."""
    return _multiply(found, operation) or any_function(found, operation)


def divide(found: Channels, operation: Operation) -> bool:
    """A quotient: a product, unless channels or parameters divide."""
    above, below = operation.argument(0, "input"), operation.argument(1, "other")
    divides = isinstance(below, Value) and (below in found.atoms or found.view(below) is not None)
    product = isinstance(above, Value) and not divides and _multiply(found, operation)
    return product or any_function(found, operation)


def _multiply(found: Channels, operation: Operation) -> bool:
    passing, result = found.passing, operation.outputs[0]
    if len(operation.args) < 2 or len(operation.kwargs) > 0:
        return False
    first, second = operation.args[:2]
    a, b = _spread(found, first, operation), _spread(found, second, operation)
    if first is second and a is not None:
        return _square(found, operation)
    if a is not None and b is not None:
        if passing.products:
            return False  # as any function of both
        if not passing.each:
            return False
        found.forest.stop(a, f"the operation {operation.described}")  # the product carries the second factor's scale
        a = None
    atoms, other = (b, first) if a is None else (a, second)
    if not isinstance(first, Value) or not isinstance(second, Value):
        return _times_number(found, operation, first if isinstance(first, Value) else second)
    if found.view(other) is not None and passing.gains == "write" and other.tensor.numel() > 1:
        found.forest.stop(atoms, f"the operation {operation.described}")
        return _gain(found, operation, other)
    if atoms is None:
        return False
    if not _alike(found, other, atoms):
        if passing.gains == "tied" and _meets(found, operation, other, atoms):
            found.atoms[result] = atoms
            return True
        if not passing.each:
            return False
        if passing.attention:
            found.twisted.update(atoms[atoms >= 0].unique().tolist())
        elif other in found.varying:
            found.tag(atoms, "gate")
    elif not passing.factors and not (_fixed(found, other) and bool((other.tensor == 1).all())):
        return False
    found.atoms[result] = atoms
    return True


def _times_number(found: Channels, operation: Operation, value: Value) -> bool:
    """A multiple of a value, or of parameters: whatever is linear in them continues as before."""
    entries = found.view(value)
    if not found.passing.factors:
        return False
    if entries is not None:
        found.entries[operation.outputs[0]] = entries
    elif value in found.atoms:
        found.atoms[operation.outputs[0]] = found.atoms[value]
    return True


def _gain(found: Channels, operation: Operation, value: Value) -> bool:
    """A parameter that multiplies channel by channel writes channels of its own."""
    entries = found.view(value)
    assert entries is not None
    own, which = entries.reshape(-1).unique(return_inverse=True)
    atoms = found.forest.new(len(own))
    found.use(operation, 1, own[:, None], atoms)
    found.tag(atoms, "gain")
    found.atoms[operation.outputs[0]] = atoms[which].reshape(entries.shape).expand(operation.outputs[0].shape)
    return True


def add(found: Channels, operation: Operation) -> bool:
    """A sum or a difference, entry by entry."""
    return _add(found, operation) or met(found, operation)


def _add(found: Channels, operation: Operation) -> bool:
    passing, result = found.passing, operation.outputs[0]
    if len(operation.args) < 2 or operation.kwargs:
        return False
    first, second = operation.args[:2]
    a, b = _spread(found, first, operation), _spread(found, second, operation)
    if a is not None and b is not None:
        _tie(found, a, b, operation)
        found.twist(a, b)
        found.atoms[result] = torch.where(a >= 0, a, b)
        return True
    atoms, other = (b, first) if a is None else (a, second)
    if atoms is None:
        return False
    found.atoms[result] = atoms
    if not isinstance(other, Value):
        return passing.offsets or not other
    if found.view(other) is not None:
        return (passing.offsets and _alike(found, other, atoms)) or _meets(found, operation, other, atoms, added=True)
    zero = other.maker is None and not other.given and not bool(other.tensor.any())
    return zero or (passing.offsets and _alike(found, other, atoms))


def negate(found: Channels, operation: Operation) -> bool:
    """The number −1 times all channels."""
    if not found.passing.factors:
        return False
    found.atoms[operation.outputs[0]] = found.atoms[operation.inputs[0]]
    return True


def square(found: Channels, operation: Operation) -> bool:
    """A square, whose sum over the channels is a squared length."""
    return _square(found, operation) or any_function(found, operation)


def power(found: Channels, operation: Operation) -> bool:
    """A power: a square if its exponent is 2."""
    even = operation.argument(1, "exponent") == 2
    return (even and _square(found, operation)) or any_function(found, operation)


def _square(found: Channels, operation: Operation) -> bool:
    value = operation.inputs[0]
    if not (found.passing.squares and value in found.atoms):
        return False
    found.atoms[operation.outputs[0]] = found.atoms[value]
    found.squared.add(operation.outputs[0])
    return True


def masked_fill(found: Channels, operation: Operation) -> bool:
    """A number in place of some entries: zeros pass like a linear map."""
    return _zeros(found, operation) or any_function(found, operation)


def _zeros(found: Channels, operation: Operation) -> bool:
    """Zeros in place of some positions: linear, if all channels have them there."""
    value, mask, number = operation.args[:3]
    atoms = found.atoms.get(value)
    if atoms is None or isinstance(number, Value) or number != 0 or not _alike(found, mask, atoms):
        return False
    found.atoms[operation.outputs[0]] = atoms.expand(operation.outputs[0].shape)
    return True


def prelu(found: Channels, operation: Operation) -> bool:
    """A function with a parameter for each channel, or one for all."""
    value, slopes = operation.args[:2]
    atoms, entries = found.atoms.get(value), found.view(slopes)
    if atoms is None or found.passing.functions == "none":
        return False
    if entries is not None and entries.numel() > 1 and found.passing.functions == "any":
        shape = [1, -1] + [1] * (atoms.ndim - 2)
        found.adopt(operation, entries.reshape(shape).expand(atoms.shape), atoms)
    found.atoms[operation.outputs[0]] = atoms
    return True


def glu(found: Channels, operation: Operation) -> bool:
    """The first half of the channels times the sigmoid of the second."""
    atoms = found.atoms.get(operation.inputs[0])
    if atoms is None:
        return False
    up, gate = atoms.chunk(2, operation.argument(1, "dim", -1))
    if found.passing.products:
        _tie(found, up, gate, operation)
    elif found.passing.each and not found.passing.attention:
        found.forest.stop(gate, f"the operation {operation.described}")
        found.tag(up, "gate")
    else:
        return False
    found.atoms[operation.outputs[0]] = up
    return True


def as_complex(found: Channels, operation: Operation) -> bool:
    """Pairs of channels as one complex number, as rotary embeddings write them."""
    atoms = found.atoms.get(operation.inputs[0])
    if atoms is None or not (found.passing.attention and found.passing.each):
        return False
    first, second = atoms.unbind(-1)
    _tie(found, first, second, operation)
    found.twisted.update(atoms[atoms >= 0].unique().tolist())
    found.twist(first, second)
    found.atoms[operation.outputs[0]] = first
    return True


def as_pairs(found: Channels, operation: Operation) -> bool:
    """Complex numbers as pairs of channels again."""
    atoms = found.atoms.get(operation.inputs[0])
    if atoms is None or not (found.passing.attention and found.passing.each):
        return False
    found.atoms[operation.outputs[0]] = atoms[..., None].expand(operation.outputs[0].shape)
    return True
