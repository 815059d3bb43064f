"""A shift of every logit that leaves the probabilities unchanged."""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.families import Family, Shifting
from spiritlevel.transforms.maps import length
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.channels import Block, Channels, Passing, constant
from spiritlevel.watching.following import follow_channels
from spiritlevel.watching.graph import Graph

_SHIFTED = Passing(outputs=True)


@checked
@in_turn()
def shift_logits(
    model: nn.Module, *, data: Any, size: float = 1.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Add the same random linear function of the last hidden layer to every logit: W → W + 1uᵀ, b → b + c1.

    A softmax does not see it: probabilities, cross entropy and margins stay, logits and squared error do not. With
    such a loss it is a translation along directions in which nothing ever changes, so gradient and Hessian stay as they
    are, while everything weighted by the size of parameters moves. Where several layers are added to make the logits,
    all of them are shifted. Refused where the last layer is shared with an embedding, or where there is only one logit.
    Exact up to rounding.

    Args:
        model: any module that ends in a linear layer or a convolution, and possibly a softmax; it is left as it was.
        data: as in `mix_linear`.
        size: length of the shift over that of the last layer's weight and bias.
        seed: for u and c.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = shift_logits(net, data=torch.randn(8, 3))
    >>> print(result.certificate)
    shift_logits preserves: probabilities, and with them the cross entropy and the margins (batch norm: eval ...
    >>> moved = result.model[2].weight - net[2].weight
    >>> torch.allclose(moved[0], moved[1]), bool(moved.norm() > net[2].weight.norm() / 10)
    (True, True)
    """
    return logit_shifts(Watched("shift_logits", model, data, seed, form_of(reading)), size).drawn()


def logit_shifts(watched: Watched, size: float) -> Family:
    """The maps of `shift_logits`."""
    size = length(watched.who, size)
    graph, normalised = _before_softmax(watched.graph)
    last = _last(watched, follow_channels(graph, _SHIFTED))
    columns = tuple(entries for slot in last.slots for entries in slot.entries.T)
    state = torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in graph.state.values()])
    reach = float(state[torch.cat(columns).unique()].norm())
    move = Shifting(columns, size * reach, lengths=tuple(slot.entries.shape[1] for slot in last.slots))
    return Family(watched, [move], keeps="outputs" if normalised else "probabilities")


def _before_softmax(graph: Graph) -> tuple[Graph, bool]:
    """The graph up to a softmax at its very end, and whether there was one."""
    maker = graph.output.maker
    if maker is None or maker.name.removeprefix("log_") != "softmax":
        return graph, False
    axis = maker.argument(1, "dim")
    if axis is None or axis % graph.output.tensor.ndim != graph.output.tensor.ndim - 1:
        return graph, False
    operations = [operation for operation in graph.operations if operation is not maker]
    return dataclasses.replace(graph, operations=operations, output=maker.inputs[0]), True


def _last(watched: Watched, channels: Channels) -> Block:
    """The block of the logits: all exchangeable, and read by nothing."""
    output = channels.graph.output
    if output.tensor.ndim < 2 or output.shape[-1] < 2:
        raise watched.refused("it takes at least two logits to shift them all equally")
    atoms: Tensor | None = channels.atoms.get(output)
    what = "the logits are not the values of a linear layer that nothing else reads"
    if atoms is None or not constant(atoms, range(atoms.ndim - 1)):
        raise watched.refused(f"{what}: the network ends in {_end(channels.graph)}")
    logits = [channels.forest.root(atom)[0] for atom in atoms.reshape(-1, atoms.shape[-1])[0].tolist() if atom >= 0]
    stopped = channels.reasons()
    for block in channels.blocks():
        written = all(slot.side > 0 for slot in block.slots)
        if written and len(set(logits)) == output.shape[-1] and sorted(block.atoms.tolist()) == sorted(logits):
            return block
    reason = next((stopped[root] for root in logits if root in stopped), _end(channels.graph))
    raise watched.refused(what, reason)


def _end(graph: Graph) -> str:
    return f"the operation {graph.output.maker.described}" if graph.output.maker else "its own input"
