"""Maps of attention heads: matrices between queries and keys, between values and outputs, and biases without effect."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.families import Family, Mixing, Shifting, Turning
from spiritlevel.transforms.maps import condition, length
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.channels import Block, Channels, Mixture, Passing, Product, Slot
from spiritlevel.watching.graph import Graph, Operation, Value
from spiritlevel.watching.operations import Degree, Kind, called_by_name

_HEADS = Passing(each=True, attention=True)
_KEYS = Passing(attention=True)
_VALUES = Passing(attention=True, factors=False)
_PLACED = (Kind.ALIAS, Kind.COPY, Kind.RESHAPING, Kind.MOVING)


@checked
@in_turn()
def mix_heads(
    model: nn.Module, *, data: Any, size: float = 10.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Random invertible matrices in each attention head: between queries and keys, and between values and outputs.

    W_Q → AW_Q and W_K → A⁻ᵀW_K with their biases leave every score qᵀk as it was; W_V → BW_V with its bias and
    W_O → W_OB⁻¹ in the columns of the head leave its output. Heads that share keys and values share their A and
    B. Under rotary embeddings A must commute with all rotations: a number times a rotation on each pair of channels
    that are turned together, any matrix on channels that are not turned. It finds all products of two projected values
    and all mixtures of projected values in the running network, in `nn.MultiheadAttention`,
    `F.scaled_dot_product_attention` or written out; fused weights are no obstacle. A norm of queries and keys is one:
    then only values and outputs are mixed. T = A ⊗ I on W_Q and so on. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: condition number of every matrix.
        seed: for the matrices.

    Cost: as in `mix_linear`. Reference: mathematics 7.9; da Silva, Dangel and Oore (2025), arXiv 2505.05409.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    >>> result = mix_heads(layer, data=torch.randn(4, 5, 8).double())
    >>> result.certificate.preserves, result.certificate.relative_difference < 1e-12
    ('function', True)
    >>> torch.equal(result.model.self_attn.in_proj_weight, layer.self_attn.in_proj_weight)
    False
    """
    return head_mixings(Watched("mix_heads", model, data, seed, form_of(reading)), size).drawn()


def head_mixings(watched: Watched, size: float) -> Family:
    """The maps of `mix_heads`."""
    size = condition(watched.who, size)
    channels = watched.channels(_HEADS)
    moves = [
        Turning(block, size) if block.turned else Mixing(block, size)
        for block in channels.blocks()
        if block.tags & {"scores", "mixed"} and len({slot.side for slot in block.slots}) == 2
    ]
    why = "; ".join(filter(None, (channels.obstacles("scores"), channels.obstacles("mixed"))))
    if not moves:
        raise watched.refused("this network has no attention whose projections only attention reads", why)
    return Family(watched, moves, (f"some heads stay as they were; in the way: {why}",) if why else ())


# ---------------------------------------------------------------- biases


@checked
@in_turn()
def shift_attention_biases(
    model: nn.Module, *, data: Any, size: float = 1.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Add random vectors to the biases of attention keys and values, where they have no effect.

    b_K → b_K + u adds qᵀu to all scores of a query, which the softmax over keys takes out again: free without rotary
    embeddings, norms of the keys, additional keys (`add_zero_attn`, `add_bias_kv`) and sinks. b_V → b_V + u adds u to
    a head's output, since its shares sum to 1, and b_O → b_O − W_O u removes it again. The keys' part is a
    translation along which nothing ever changes; the values' part is one together with the shear b_O −= W_O u, so
    that gradient and Hessian become T⁻ᵀg and T⁻ᵀHT⁻¹ with that shear T. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: length of u over that of the bias (of the layer's weights for one output, if the bias is 0).
        seed: for the vectors.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    >>> result = shift_attention_biases(layer, data=torch.randn(4, 5, 8).double())
    >>> moved = [name for name, p in result.model.named_parameters() if not torch.equal(p, layer.get_parameter(name))]
    >>> moved, result.linear
    (['self_attn.in_proj_bias', 'self_attn.out_proj.bias'], False)
    """
    return bias_shifts(Watched("shift_attention_biases", model, data, seed, form_of(reading)), size).drawn()


def bias_shifts(watched: Watched, size: float) -> Family:
    """The maps of `shift_attention_biases`."""
    moving = _Moving(watched, length(watched.who, size))
    channels = watched.channels(_KEYS)
    for block in channels.blocks():
        for product in channels.products:
            moving.keys(channels, block, product)
    why = [channels.obstacles("scores")]
    channels = watched.channels(_VALUES)
    for block in channels.blocks():
        for mixture in channels.mixtures:
            moving.values(channels, block, mixture)
    why += [channels.obstacles("mixed"), *moving.reasons]
    if not moving.moves:
        raise watched.refused(
            "no attention of this network has a free key bias, or biases of its values and of the next layer",
            "; ".join(dict.fromkeys(filter(None, why))),
        )
    return Family(watched, list(moving.moves.values()))


class _Moving:
    """The shifts of biases found so far, and the shears that undo them."""

    def __init__(self, watched: Watched, size: float) -> None:
        self.size = size
        self.state = torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in watched.graph.state.values()])
        self.moves: dict[tuple[int, int], Shifting] = {}
        self.reasons: list[str] = []

    def keys(self, channels: Channels, block: Block, product: Product) -> None:
        """Shift the biases of the keys of one head, if the scores' softmax does not see that."""
        axis = _softmax_axis(channels.graph, product)
        if isinstance(axis, str):
            self.reasons.append(axis)
            return
        atoms = product.second if axis == 1 else product.first
        side = _side(channels, block, atoms)
        if not side or "scores" not in block.tags:
            return
        biases = [slot for slot in block.slots if slot.side == side and slot.role == "bias"]
        if "joined" in block.tags:
            self.reasons.append("keys that do not come from the projection (add_zero_attn, add_bias_kv)")
        elif not biases or biases[0].entries.shape[1] != 1:
            self.reasons.append("a projection of keys without bias")
        else:
            self._move(block, biases[0])

    def values(self, channels: Channels, block: Block, mixture: Mixture) -> None:
        """Shift the biases of the values of one head, and undo that in the biases of the layers that read them."""
        if "mixed" not in block.tags or not _side(channels, block, mixture.atoms):
            return
        if "joined" in block.tags:
            self.reasons.append("values that do not come from the projection (add_zero_attn, add_bias_kv)")
            return
        if mixture.shares is not None and not _sum_to_one(channels, mixture.shares, mixture.axis):
            self.reasons.append(f"shares at {mixture.operation.place} that do not always sum to 1")
            return
        biases = [slot for slot in block.slots if slot.side > 0 and slot.role == "bias"]
        readers = [slot for slot in block.slots if slot.side < 0]
        undone = [_bias_of(channels, slot) for slot in readers]
        if not biases or biases[0].entries.shape[1] != 1:
            self.reasons.append("a projection of values without bias")
        elif not readers or any(bias is None for bias in undone):
            self.reasons.append("an output projection without bias")
        else:
            pairs = zip(readers, undone, strict=True)
            self._move(block, biases[0], tuple((slot.entries, bias) for slot, bias in pairs if bias is not None))

    def _move(self, block: Block, slot: Slot, undone: tuple[tuple[Tensor, Tensor], ...] = ()) -> None:
        """Free these biases to move, once for each block."""
        entries = slot.entries[:, 0]
        reach = float(self.state[entries].norm())
        if not reach:  # as just after initialisation
            weights = next(other.entries for other in block.slots if other.operation is slot.operation)
            reach = float(self.state[weights].norm()) / math.sqrt(weights.shape[1])
        move = Shifting(tuple(entries[:, None]), self.size * reach, undone)
        self.moves.setdefault((int(entries[0]), len(entries)), move)


def _sum_to_one(channels: Channels, shares: Value, axis: int) -> bool:
    """Whether shares sum to 1 whatever the data: a softmax made them, and they were only moved since; or constants."""
    source = shares
    while source.maker is not None and called_by_name(source.maker.name).kind in _PLACED:
        source = source.maker.inputs[0]
    made = source.maker is not None and source.maker.name == "softmax"
    constant = not (source.given or source in channels.varying or source.name in channels.graph.parameters)
    return (made or constant) and bool(((shares.tensor.sum(axis) - 1).abs() < 1e-5).all())


def _side(channels: Channels, block: Block, atoms: Tensor) -> int:
    """Which side of a block the writers of these atoms are on; 0 if they are not in it."""
    roots = set(block.atoms.tolist())
    for atom in atoms[atoms >= 0].unique().tolist():
        root, flip = channels.forest.root(atom)
        if root in roots:
            return -1 if flip else 1
    return 0


def _bias_of(channels: Channels, slot: Slot) -> Tensor | None:
    """The entries of the bias of a layer that reads a slot, one for each of the slot's columns."""
    for use in channels.uses:
        if use.operation is slot.operation and use.role == "bias" and len(use.entries) == slot.entries.shape[1]:
            return use.entries[:, 0]
    return None


def _softmax_axis(graph: Graph, product: Product) -> int | str:
    """Which operand of a product of scores holds the keys, 0 or 1; or why a term common to a query's scores matters."""
    if product.axes is None:
        return 1
    readers = graph.readers()
    found: set[int] = set()
    waiting: list[tuple[Value, tuple[int, ...]]] = []
    ndim = product.operation.outputs[0].tensor.ndim
    waiting.append((product.operation.outputs[0], tuple(axis % ndim - ndim for axis in product.axes)))
    while waiting:
        value, axes = waiting.pop()
        if value is graph.output or not readers.get(value):
            continue
        for operation in readers[value]:
            if operation.name == "softmax":
                axis = operation.argument(1, "dim") % value.tensor.ndim - value.tensor.ndim
                if axis not in axes:
                    return f"the operation {operation.described}"
                found.add(axes.index(axis))
            elif _adds_alike(operation, value, axes):
                waiting.append((operation.outputs[0], axes))
            else:
                return f"the operation {operation.described}"
    return found.pop() if len(found) == 1 else "scores without a softmax"


def _adds_alike(operation: Operation, value: Value, axes: tuple[int, ...]) -> bool:
    """Whether a term common to all scores of a query is still one after an operation."""
    result = operation.outputs[0]
    if result.tensor.ndim < 2 or any(result.shape[axis] != value.shape[axis] for axis in axes):
        return False
    entry = called_by_name(operation.name)
    if entry.elementwise == 2 and entry.degree in (Degree.BILINEAR, Degree.QUOTIENT):
        others = [other for other in operation.inputs if other is not value]
        alike = all(other.tensor.ndim < -axis or other.shape[axis] == 1 for other in others for axis in axes)
        return alike and (entry.degree is Degree.BILINEAR or operation.args[0] is value)
    added = entry.kind is Kind.SUM and entry.degree is Degree.LINEAR
    return added or entry.keeps_order or entry.kind is Kind.MASK
