"""Follows channels through a recorded network, operation by operation, by the rules in the table of operations."""

from __future__ import annotations

from spiritlevel.watching import channel_moves, channel_sums
from spiritlevel.watching.channels import Channels, Passing
from spiritlevel.watching.graph import Graph, Operation
from spiritlevel.watching.operations import called_by_name

_MOVE = (
    channel_moves.same,
    channel_moves.move,
    channel_moves.stack,
    channel_moves.join,
    channel_moves.write,
    channel_moves.attribute,
)


_NORMS = (
    channel_sums.layer_norm,
    channel_sums.rms_norm,
    channel_sums.group_norm,
    channel_sums.batch_norm,
    channel_sums.normalize,
)


def follow_channels(graph: Graph, passing: Passing) -> Channels:
    """The channels of a recorded network, and where a map of them passes."""
    found = Channels(graph, passing)
    for operation in graph.operations:
        entry = called_by_name(operation.name)
        varies = any(value.given or value in found.varying for value in operation.inputs)
        if varies and entry.channels is not channel_moves.shapes_only:
            found.varying.update(operation.outputs)
        known = [value for value in operation.inputs if value in found.atoms or found.view(value) is not None]
        if known and not _follow(found, operation):
            found.stop(operation)
            if passing.attention and passing.functions == "none" and entry.channels in _NORMS:
                channel_moves.again(found, operation)  # stopped, but known where they meet, to give the reason
    if not passing.outputs:
        found.forest.stop(found.atoms.get(graph.output), "the outputs of the network")
    found.share()
    return found


def _follow(found: Channels, operation: Operation) -> bool:
    """Whether the channels pass, by the rule of the operation; only moves and linear sums know about squares."""
    rule = called_by_name(operation.name).channels
    if rule is None:
        return False
    if rule in (*_MOVE, channel_moves.shapes_only, channel_sums.linear_sum):
        return rule(found, operation)
    return not any(value in found.squared for value in operation.inputs) and rule(found, operation)
