"""What happens to channels where many numbers become one: sums, pooling, padding, and norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spiritlevel.watching.channels import Channels, constant, vector
from spiritlevel.watching.graph import Operation, Value


def linear_sum(found: Channels, operation: Operation) -> bool:
    """A sum or mean: linear over positions; over squares of all channels, their squared length."""
    return _reduce(found, operation, linear=True)


def extreme(found: Channels, operation: Operation) -> bool:
    """The largest or smallest of some numbers."""
    return _reduce(found, operation, homogeneous=True)


def reduction(found: Channels, operation: Operation) -> bool:
    """Any other reduction of many numbers to one."""
    return _reduce(found, operation)


def length(found: Channels, operation: Operation) -> bool:
    """A norm, which is the length of the channels if it is the Euclidean one over all of them."""
    order = operation.argument(1, "p", operation.kwargs.get("ord", 2))
    return _reduce(found, operation, dims=2, euclidean=order in (2, None, "fro"))


def _reduce(
    found: Channels,
    operation: Operation,
    *,
    dims: int = 1,
    linear: bool = False,
    homogeneous: bool = False,
    euclidean: bool = False,
) -> bool:
    value, passing = operation.inputs[0], found.passing
    atoms = found.atoms.get(value)
    if atoms is None or len(operation.inputs) > 1:
        return False
    axes = operation.argument(dims, "dim")
    if axes is None or isinstance(axes, bool):
        axes = range(atoms.ndim)
    axes = [axes] if isinstance(axes, int) else [axis % atoms.ndim for axis in axes]
    axes = [axis % atoms.ndim for axis in axes]
    keep = {axis: 1 if axis in axes else size for axis, size in enumerate(atoms.shape)}
    if constant(atoms, axes) and not found.squared.intersection(operation.inputs):
        if not (linear or passing.functions == "any" or (passing.functions == "homogeneous" and homogeneous)):
            return False
        least = atoms.amin(axes) if axes else atoms
        for output in operation.outputs:
            found.atoms[output] = least.reshape(output.shape)
        return True
    squared = value in found.squared and linear
    if not (passing.symmetric or (passing.squares and (squared or euclidean))):
        return False
    if not all(constant(atoms, [axis]) for axis in range(atoms.ndim) if axis not in axes) and not passing.symmetric:
        return False
    sums = torch.arange(math.prod(keep.values())).reshape(list(keep.values()))
    found.mark(atoms, sums.expand(atoms.shape), "length")
    return True


def other_pool(found: Channels, operation: Operation) -> bool:
    """Pooling that is not linear."""
    return found.passing.functions != "none" and linear_pool(found, operation)


def pad(found: Channels, operation: Operation) -> bool:
    """Padding, with the numbers at the edge or with a number of its own."""
    value, output, passing = operation.inputs[0], operation.outputs[0], found.passing
    atoms = found.atoms.get(value)
    if atoms is None or len(operation.inputs) > 1:
        return False
    mode, filled = operation.argument(2, "mode", "constant"), operation.argument(3, "value", 0)
    if mode == "constant" and filled and not passing.offsets:
        return False
    if output.shape[-1] == value.shape[-1] and atoms.ndim == 3 and constant(atoms, [0, 1]):
        found.atoms[output] = atoms[:1, :1].expand(output.shape)  # tokens are padded, not channels
        return True
    return linear_pool(found, operation)


def linear_pool(found: Channels, operation: Operation) -> bool:
    """Pooling, padding and interpolation: each channel by itself, all in the same way."""
    value = operation.inputs[0]
    atoms, output = found.atoms.get(value), operation.outputs[0]
    if atoms is None or len(operation.inputs) > 1:
        return False
    if atoms.ndim < 3 or output.shape[1] != value.shape[1]:
        return False
    which, agree = vector(atoms, 1)
    if not bool(agree.all()):
        return False
    for result in operation.outputs:
        found.atoms[result] = which.reshape(1, -1, *[1] * (atoms.ndim - 2)).expand(result.shape)
    return True


# ---------------------------------------------------------------- norms

Place = tuple[int, str]
"""Where an argument stands, and its name."""
_AFFINE: tuple[Place, ...] = ((2, "weight"), (3, "bias"))
_STATISTICS: tuple[Place, ...] = ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias"))


def layer_norm(found: Channels, operation: Operation) -> bool:
    """Over the last axes of every position."""
    return _norm(found, operation, _AFFINE, last=True)


def rms_norm(found: Channels, operation: Operation) -> bool:
    """By the length of the channels, which a rotation keeps."""
    return _norm(found, operation, _AFFINE[:1], last=True, by_length=True)


def group_norm(found: Channels, operation: Operation) -> bool:
    """Over groups of channels."""
    return _norm(found, operation, _AFFINE, groups=operation.argument(1, "num_groups"))


def batch_norm(found: Channels, operation: Operation) -> bool:
    """Every channel by itself."""
    return _norm(found, operation, _STATISTICS, each=True)


def _norm(
    found: Channels,
    operation: Operation,
    places: tuple[Place, ...],
    *,
    last: bool = False,
    each: bool = False,
    by_length: bool = False,
    groups: int = 1,
) -> bool:
    """Normalisation with a gain and a bias for each channel, over the last axes or with channels on the second."""
    passing, result = found.passing, operation.outputs[0]
    state = {key: operation.argument(index, key) for index, key in places}
    tensors = {key: value for key, value in state.items() if isinstance(value, Value)}
    atoms = found.atoms.get(operation.inputs[0])

    def in_place(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape) if last else [1, -1] + [1] * (result.tensor.ndim - 2)
        return tensor.reshape(shape).expand(result.shape)

    affine = {key: found.view(value) for key, value in tensors.items() if key in ("weight", "bias")}
    if passing.gains == "write":
        found.forest.stop(atoms, f"the operation {operation.described}")
        own = _written(found, operation, list(affine.values()))
        if own is None:
            return atoms is not None
        found.atoms[result] = in_place(own)
        return True
    if atoms is None:
        return False
    if passing.squares and by_length:
        if affine and not _one(found, tensors["weight"]):
            return False
        found.tag(atoms, "length")
        found.atoms[result] = atoms
        return True
    if passing.gains != "tied" or not (each or passing.symmetric):
        return False
    for value in tensors.values():
        if found.view(value) is None:
            return False
        found.adopt(operation, in_place(found.view(value)), atoms)  # type: ignore[arg-type]
    if not each:
        if groups == 1:
            found.mark(atoms, torch.zeros((), dtype=torch.int64))
        else:
            count = atoms.shape[1]
            found.mark(atoms, in_place(torch.arange(count) // (count // groups)))
    found.atoms[result] = atoms
    return True


def _written(found: Channels, operation: Operation, affine: list[Tensor | None]) -> Tensor | None:
    """The channels that gain and bias of a norm write; none if they are not parts of the state."""
    known = [entries for entries in affine if entries is not None]
    if not known or len(known) < len(affine):
        return None
    own = found.forest.new(known[0].numel())
    for entries in known:
        found.use(operation, 1, entries.reshape(-1, 1), own)
    found.tag(own, "gain")
    return own.reshape(known[0].shape)


def _one(found: Channels, value: Value) -> bool:
    """Whether a gain is 1 and not a parameter."""
    return value.name not in found.graph.parameters and bool((value.tensor == 1).all())


def normalize(found: Channels, operation: Operation) -> bool:
    """Division by a length."""
    atoms = found.atoms.get(operation.inputs[0])
    length = operation.argument(1, "p", 2.0) == 2 and found.passing.squares
    if atoms is None or not length or constant(atoms, [operation.argument(2, "dim", 1)]):
        return False
    found.tag(atoms, "length")
    found.atoms[operation.outputs[0]] = atoms
    return True
