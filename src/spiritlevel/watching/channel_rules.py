"""What every operation does to the channels that it reads: the rules by which `watching.channels` follows them.

A rule answers whether it has dealt with the operation. If not, or where there is none, the channels stop there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spiritlevel.watching.channel_layers import LAYERS
from spiritlevel.watching.channels import NONE, Channels, Passing, constant, moved, vector
from spiritlevel.watching.graph import Graph, Operation, Value

_SAME = frozenset(
    """
    contiguous clone detach to float double half bfloat16 type type_as cpu cuda alias dropout dropout1d dropout2d
    dropout3d alpha_dropout feature_alpha_dropout requires_grad identity positive
    """.split()
)
_SHAPES_ONLY = frozenset(
    """
    empty_like zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    """.split()
)
_MOVES = frozenset(
    """
    view reshape view_as reshape_as flatten unflatten permute transpose t movedim moveaxis squeeze unsqueeze chunk split
    tensor_split split_with_sizes unbind narrow select __getitem__ expand expand_as broadcast_to repeat
    repeat_interleave tile index_select gather take_along_dim roll flip rot90 cat stack hstack vstack dstack
    pixel_shuffle pixel_unshuffle channel_shuffle __setitem__ __get__ unfold
    """.split()
)
_HOMOGENEOUS = frozenset("relu leaky_relu rrelu abs".split())
_ELEMENTWISE = _HOMOGENEOUS | frozenset(
    """
    gelu silu sigmoid tanh softplus elu celu selu mish hardswish hardsigmoid hardtanh relu6 logsigmoid softsign
    tanhshrink softshrink hardshrink threshold exp expm1 log log1p sqrt rsqrt reciprocal sin cos tan sinh cosh asin acos
    atan erf square pow clamp clamp_min clamp_max sign round floor ceil rsub rdiv add sub mul div maximum minimum where
    masked_fill lerp addcmul addcdiv remainder fmod nan_to_num isnan gt ge lt le eq ne __gt__ __lt__ __ge__ __le__
    logical_not
    """.split()
)
_LINEAR_POOLS = frozenset(
    """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate upsample
    pad constant_pad_nd
    """.split()
)
_OTHER_POOLS = frozenset(
    """
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d
    lp_pool3d
    """.split()
)
_LINEAR_SUMS = frozenset("mean sum".split())
_OTHER_SUMS = frozenset(
    "amax amin max min std var norm vector_norm logsumexp prod median argmax argmin all any std_mean var_mean".split()
)


def follow_channels(graph: Graph, passing: Passing) -> Channels:
    """The channels of a recorded network, and where a map of them passes."""
    found = Channels(graph, passing)
    for operation in graph.operations:
        varies = any(value.given or value in found.varying for value in operation.inputs)
        if varies and operation.name not in _SHAPES_ONLY:
            found.varying.update(operation.outputs)
        known = [value for value in operation.inputs if value in found.atoms or found.view(value) is not None]
        if known and not _follow(found, operation):
            found.stop(operation)
            if passing.attention and passing.functions == "none" and operation.name in _NORMS:
                _same(found, operation)  # stopped, but still known where they meet, so that the reason can be told
    if not passing.outputs:
        found.forest.stop(found.atoms.get(graph.output), "the outputs of the network")
    found.share()
    return found


def _follow(found: Channels, operation: Operation) -> bool:
    name = operation.name
    if name in _SHAPES_ONLY:
        return True
    if name in _SAME and _alike_in_kind(operation.inputs[0], operation.outputs[0]):
        return _same(found, operation)
    if name in _MOVES:
        return _join(found, operation) if name == "cat" else _move(found, operation)
    if any(value in found.squared for value in operation.inputs) and name not in _LINEAR_SUMS:
        return False
    rule = _RULES.get(name)
    if rule is not None and rule(found, operation):
        return True
    return name in _ELEMENTWISE and _elementwise(found, operation)


# ---------------------------------------------------------------- moving entries about


def _alike_in_kind(source: Value, result: Value) -> bool:
    """Whether nothing but digits can have been lost: the same shape, and no whole numbers made of others."""
    return source.shape == result.shape and source.tensor.is_floating_point() == result.tensor.is_floating_point()


def _same(found: Channels, operation: Operation) -> bool:
    source, result = operation.inputs[0], operation.outputs[0]
    if source in found.atoms:
        found.atoms[result] = found.atoms[source]
    elif (entries := found.view(source)) is not None:
        found.entries[result] = entries
    if source in found.squared:
        found.squared.add(result)
    return True


def _contents(operation: Operation) -> list[Value]:
    """The values whose entries an operation moves; the others are indices."""
    if operation.name in ("stack", "hstack", "vstack", "dstack", "cat"):
        return operation.inputs
    if operation.name == "__setitem__":
        return [item for item in (operation.args[0], operation.args[2]) if isinstance(item, Value)]
    return operation.inputs[:1]


def _move(found: Channels, operation: Operation) -> bool:
    contents = _contents(operation)
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
    if operation.name == "__get__" and operation.outputs[0].tensor.numel() != operation.inputs[0].tensor.numel():
        return False
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


def _join(found: Channels, operation: Operation) -> bool:
    """A concatenation, of positions or of channels.

    Of positions: parts of the state, a class token say, join the channels of the rest, and zeros fit any channel.
    """
    known = [value for value in operation.inputs if value in found.atoms]
    if not known:
        return _move(found, operation)
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


# ---------------------------------------------------------------- elementwise operations


def _spread(found: Channels, value: Any, operation: Operation) -> Tensor | None:
    """The atoms of an operand in the shape of the result."""
    atoms = found.atoms.get(value) if isinstance(value, Value) else None
    return None if atoms is None else atoms.expand(operation.outputs[0].shape)


def _alike(value: Value, atoms: Tensor) -> bool:
    """Whether an operand is the same number for all channels, at every position."""
    shape = [1] * (atoms.ndim - value.tensor.ndim) + list(value.shape)
    if constant(atoms, [axis for axis, size in enumerate(shape) if size > 1]):
        return True
    fixed = value.maker is None and not value.given
    return fixed and bool((value.tensor == value.tensor.reshape(-1)[0]).all())


def _meets(found: Channels, operation: Operation, value: Value, atoms: Tensor) -> bool:
    """Tie parameters, or a buffer that is added, to the atoms that they meet entry by entry; whether it is such."""
    entries = found.view(value)
    if entries is None:
        return False
    names = found.layout.owners(entries)
    if operation.name not in ("add", "sub") and not all(name in found.graph.parameters for name in names):
        return False
    found.adopt(operation, entries.expand(operation.outputs[0].shape), atoms)
    return True


def _elementwise(found: Channels, operation: Operation) -> bool:
    """Any function of each entry: all operands with channels are tied, all others must not tell channels apart."""
    passing, name = found.passing, operation.name
    if passing.functions == "none" or (passing.functions == "homogeneous" and name not in _HOMOGENEOUS):
        return False
    parts = [atoms for value in operation.inputs if (atoms := _spread(found, value, operation)) is not None]
    if not parts or (len(parts) > 1 and not passing.products):
        return False
    for other in parts[1:]:
        _tie(found, parts[0], other, operation)
    for value in operation.inputs:
        if value not in found.atoms and not _alike(value, parts[0]) and not _meets(found, operation, value, parts[0]):
            return False
    found.atoms[operation.outputs[0]] = parts[0]
    return True


def _tie(found: Channels, first: Tensor, second: Tensor, operation: Operation) -> None:
    """Tie two values entry by entry; a channel that meets none is stopped."""
    found.forest.tie(first, second)
    alone = (first >= 0) != (second >= 0)
    for atoms in (first, second):
        found.forest.stop(atoms[alone], f"the operation {operation.described}")


def _multiply(found: Channels, operation: Operation) -> bool:
    passing, result = found.passing, operation.outputs[0]
    if len(operation.args) < 2 or len(operation.kwargs) > 0:
        return False
    first, second = operation.args[:2]
    a, b = _spread(found, first, operation), _spread(found, second, operation)
    if first is second and a is not None:
        return _square(found, operation)
    if operation.name == "div" and (b is not None or (isinstance(second, Value) and found.view(second) is not None)):
        return False
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
    if not _alike(other, atoms):
        if passing.gains == "tied" and _meets(found, operation, other, atoms):
            found.atoms[result] = atoms
            return True
        if not passing.each:
            return False
        if passing.attention:
            found.twisted.update(atoms[atoms >= 0].unique().tolist())
        elif other in found.varying:
            found.tag(atoms, "gate")
    elif not passing.factors and not bool((other.tensor == 1).all()):
        return False
    found.atoms[result] = atoms
    return True


def _times_number(found: Channels, operation: Operation, value: Value) -> bool:
    """A multiple of a value, or of parameters: whatever is linear in them goes on as before."""
    entries = found.view(value)
    if not found.passing.factors or (operation.name == "div" and operation.args[0] is not value):
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
        return (passing.offsets and _alike(other, atoms)) or _meets(found, operation, other, atoms)
    zero = other.maker is None and not other.given and not bool(other.tensor.any())
    return zero or (passing.offsets and _alike(other, atoms))


def _negate(found: Channels, operation: Operation) -> bool:
    if not found.passing.factors:
        return False
    found.atoms[operation.outputs[0]] = found.atoms[operation.inputs[0]]
    return True


def _square(found: Channels, operation: Operation) -> bool:
    value = operation.inputs[0]
    even = operation.name != "pow" or operation.argument(1, "exponent") == 2
    if not (found.passing.squares and even and value in found.atoms):
        return False
    found.atoms[operation.outputs[0]] = found.atoms[value]
    found.squared.add(operation.outputs[0])
    return True


def _masked_fill(found: Channels, operation: Operation) -> bool:
    """Zeros in the place of some positions: linear, if all channels have them there."""
    value, mask, number = operation.args[:3]
    atoms = found.atoms.get(value)
    if atoms is None or isinstance(number, Value) or number != 0 or not _alike(mask, atoms):
        return False
    found.atoms[operation.outputs[0]] = atoms.expand(operation.outputs[0].shape)
    return True


def _prelu(found: Channels, operation: Operation) -> bool:
    value, slopes = operation.args[:2]
    atoms, entries = found.atoms.get(value), found.view(slopes)
    if atoms is None or found.passing.functions == "none":
        return False
    if entries is not None and entries.numel() > 1 and found.passing.functions == "any":
        shape = [1, -1] + [1] * (atoms.ndim - 2)
        found.adopt(operation, entries.reshape(shape).expand(atoms.shape), atoms)
    found.atoms[operation.outputs[0]] = atoms
    return True


def _glu(found: Channels, operation: Operation) -> bool:
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


def _complex(found: Channels, operation: Operation) -> bool:
    """Pairs of channels as one complex number, as rotary embeddings write them."""
    value = operation.inputs[0]
    atoms = found.atoms.get(value)
    if atoms is None or not (found.passing.attention and found.passing.each):
        return False
    if operation.name == "view_as_real":
        atoms = atoms[..., None].expand(operation.outputs[0].shape)
    else:
        first, second = atoms.unbind(-1)
        _tie(found, first, second, operation)
        found.twisted.update(atoms[atoms >= 0].unique().tolist())
        found.twist(first, second)
        atoms = first
    found.atoms[operation.outputs[0]] = atoms
    return True


# ---------------------------------------------------------------- reductions and pooling


def _reduce(found: Channels, operation: Operation) -> bool:
    value, passing, name = operation.inputs[0], found.passing, operation.name
    atoms = found.atoms.get(value)
    if atoms is None or len(operation.inputs) > 1:
        return False
    axes = operation.argument(2 if name in ("norm", "vector_norm") else 1, "dim")
    if axes is None or isinstance(axes, bool):
        axes = range(atoms.ndim)
    axes = [axes] if isinstance(axes, int) else [axis % atoms.ndim for axis in axes]
    axes = [axis % atoms.ndim for axis in axes]
    keep = {axis: 1 if axis in axes else size for axis, size in enumerate(atoms.shape)}
    if constant(atoms, axes) and not found.squared.intersection(operation.inputs):
        linear = name in _LINEAR_SUMS or passing.functions == "any"
        if not linear and not (passing.functions == "homogeneous" and name in ("amax", "amin", "max", "min")):
            return False
        least = atoms.amin(axes) if axes else atoms
        for output in operation.outputs:
            found.atoms[output] = least.reshape(output.shape)
        return True
    squared = value in found.squared and name in _LINEAR_SUMS
    order = operation.argument(1, "p", operation.kwargs.get("ord", 2))
    length = name in ("norm", "vector_norm") and order in (2, None, "fro")
    if not (passing.symmetric or (passing.squares and (squared or length))):
        return False
    if not all(constant(atoms, [axis]) for axis in range(atoms.ndim) if axis not in axes) and not passing.symmetric:
        return False
    sums = torch.arange(math.prod(keep.values())).reshape(list(keep.values()))
    found.mark(atoms, sums.expand(atoms.shape), "length")
    return True


def _pool(found: Channels, operation: Operation) -> bool:
    """Pooling, padding and interpolation: each channel by itself, in one way for all."""
    value, name, passing = operation.inputs[0], operation.name, found.passing
    atoms, output = found.atoms.get(value), operation.outputs[0]
    if atoms is None or len(operation.inputs) > 1:
        return False
    if name == "pad":
        mode, filled = operation.argument(2, "mode", "constant"), operation.argument(3, "value", 0)
        if mode == "constant" and filled and not passing.offsets:
            return False
        if output.shape[-1] == value.shape[-1] and atoms.ndim == 3 and constant(atoms, [0, 1]):
            found.atoms[output] = atoms[:1, :1].expand(output.shape)  # tokens are padded, not channels
            return True
    elif name in _OTHER_POOLS and passing.functions == "none":
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

_NORMS = frozenset("layer_norm rms_norm group_norm batch_norm instance_norm normalize".split())
_NORM_STATE = {  # where the tensors of a norm stand among its arguments
    "layer_norm": ((2, "weight"), (3, "bias")),
    "rms_norm": ((2, "weight"),),
    "group_norm": ((2, "weight"), (3, "bias")),
    "batch_norm": ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias")),
    "instance_norm": ((1, "running_mean"), (2, "running_var"), (3, "weight"), (4, "bias")),
}


def _norm(found: Channels, operation: Operation) -> bool:
    """Normalisation with a gain and a bias of each channel."""
    passing, name, result = found.passing, operation.name, operation.outputs[0]
    state = {key: operation.argument(index, key) for index, key in _NORM_STATE[name]}
    tensors = {key: value for key, value in state.items() if isinstance(value, Value)}
    atoms = found.atoms.get(operation.inputs[0])
    last = name in ("layer_norm", "rms_norm")

    def in_place(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape) if last else [1, -1] + [1] * (result.tensor.ndim - 2)
        return tensor.reshape(shape).expand(result.shape)

    affine = {key: found.view(value) for key, value in tensors.items() if key in ("weight", "bias")}
    if passing.gains == "write":
        found.forest.stop(atoms, f"the operation {operation.described}")
        if not affine or any(entries is None for entries in affine.values()):
            return atoms is not None
        first = next(iter(affine.values()))
        assert first is not None
        own = found.forest.new(first.numel())
        for entries in affine.values():
            assert entries is not None
            found.use(operation, 1, entries.reshape(-1, 1), own)
        found.tag(own, "gain")
        found.atoms[result] = in_place(own.reshape(first.shape))
        return True
    if atoms is None:
        return False
    if passing.squares and name == "rms_norm":
        if affine and not _one(found, tensors["weight"]):
            return False
        found.tag(atoms, "length")
        found.atoms[result] = atoms
        return True
    each = name in ("batch_norm", "instance_norm")
    if passing.gains != "tied" or not (each or passing.symmetric):
        return False
    for value in tensors.values():
        if found.view(value) is None:
            return False
        found.adopt(operation, in_place(found.view(value)), atoms)  # type: ignore[arg-type]
    if not each:
        groups = operation.argument(1, "num_groups") if name == "group_norm" else 1
        if groups == 1:
            found.mark(atoms, torch.zeros((), dtype=torch.int64))
        else:
            count = atoms.shape[1]
            found.mark(atoms, in_place(torch.arange(count) // (count // groups)))
    found.atoms[result] = atoms
    return True


def _one(found: Channels, value: Value) -> bool:
    """Whether a gain is 1 and no parameter."""
    return value.name not in found.graph.parameters and bool((value.tensor == 1).all())


def _normalize(found: Channels, operation: Operation) -> bool:
    atoms = found.atoms.get(operation.inputs[0])
    length = operation.argument(1, "p", 2.0) == 2 and found.passing.squares
    if atoms is None or not length or constant(atoms, [operation.argument(2, "dim", 1)]):
        return False
    found.tag(atoms, "length")
    found.atoms[operation.outputs[0]] = atoms
    return True


_RULES: dict[str, Callable[[Channels, Operation], bool]] = {
    "mul": _multiply,
    "div": _multiply,
    "add": _add,
    "sub": _add,
    "neg": _negate,
    "square": _square,
    "pow": _square,
    "masked_fill": _masked_fill,
    "prelu": _prelu,
    "glu": _glu,
    "view_as_complex": _complex,
    "view_as_real": _complex,
    "normalize": _normalize,
    **dict.fromkeys(_LINEAR_SUMS | _OTHER_SUMS, _reduce),
    **dict.fromkeys(_LINEAR_POOLS | _OTHER_POOLS, _pool),
    **dict.fromkeys(_NORM_STATE, _norm),
    **LAYERS,
}
