"""Rotations of the residual stream of transformers with RMS norms."""

from __future__ import annotations

import copy
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.modules import twin_of
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.families import Family, Rotating
from spiritlevel.transforms.maps import LinearMap, Step
from spiritlevel.transforms.pairs import SCALED
from spiritlevel.transforms.watched import Watched, take_state
from spiritlevel.watching.channels import Block, Passing

_ROTATED = Passing(squares=True, orthogonal=True)


@checked
@in_turn()
def rotate_stream(
    model: nn.Module, *, data: Any, size: float = 1.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """A random rotation of the residual stream of a pre-norm transformer with RMS norms.

    Everything that writes into the stream is rotated, W → QW, including embeddings and biases, and everything that
    reads it rotates back, W → WQᵀ; an RMS norm does not see a rotation. Its gain does, so gains are first folded into
    the layers that read them, W → W diag(γ), and are from then on buffers of ones, not parameters. From that folded
    model, `start` of the result, T is orthogonal: trace and spectrum of the Hessian stay, and everything that looks at
    single parameters moves. (From the model itself there is no linear map: folding multiplies parameters.) Refused
    where a gain cannot be folded, as before a head that shares its weight with the embedding, and for layer norm,
    which subtracts a mean. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: has no meaning here.
        seed: for the rotation.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, 2))
    >>> result = rotate_stream(net, data=torch.randn(8, 3))
    >>> [name for name, _ in result.model.named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> torch.allclose(result.model[0].weight.norm(), net[0].weight.norm())
    True
    """
    return stream_rotations(Watched("rotate_stream", model, data, seed, form_of(reading)), size).drawn()


def stream_rotations(watched: Watched, size: float) -> Family:
    """The maps of `rotate_stream`."""
    del size  # rotations have none
    folded = _folded(watched)
    channels = folded.channels(_ROTATED)
    moves = [
        Rotating(block)
        for block in channels.blocks()
        if "length" in block.tags and block.units > 1 and len({slot.side for slot in block.slots}) == 2
    ]
    if not moves:
        raise watched.refused(
            "this network has no stream that is read only through RMS norms, by layers into which their gains fold",
            channels.obstacles("length") or channels.obstacles(),
        )
    start = twin_of(folded.model)
    take_state(start, folded.exact)
    return Family(folded, moves, start=start)


@in_turn()  # while another thread measures the model, it holds other tensors
def _folded(watched: Watched) -> Watched:
    """The network with the gains of its RMS norms in the layers that read them, and ones in their place."""
    channels = watched.channels(SCALED)
    state = torch.cat([tensor.detach().double().reshape(-1) for tensor in watched.graph.state.values()]).cpu()
    steps: list[Step] = []
    names: list[str] = []
    for block in channels.blocks():
        gain = _gain(block)
        owners = [] if gain is None else channels.layout.owners(gain)
        if gain is not None and len(owners) == 1 and channels.layout.shapes[owners[0]].numel() == gain.numel():
            steps += [Step(slot.entries, state[gain[:, 0]]) for slot in block.slots if slot.side < 0]
            names += owners
    if not steps:
        return watched
    folded = copy.copy(watched)
    folded.exact, folded.model = twin_of(watched.exact), twin_of(watched.model)
    moved = LinearMap(channels.layout.shapes, steps)(dict(folded.exact.named_parameters()))
    with torch.no_grad():
        for name, parameter in folded.exact.named_parameters():
            parameter.copy_(moved[name])
    for name in names:
        for module in (folded.exact, folded.model):
            _retire(module, name)
    folded.graph = watched.recorded(folded.exact)
    return folded


def _gain(block: Block) -> Tensor | None:
    """The entries of the one gain that writes a block, without a bias; `None` if anything else writes it."""
    written = [slot for slot in block.slots if slot.side > 0]
    read = any(slot.side < 0 for slot in block.slots)
    if "gain" not in block.tags or len(written) != 1 or not read or written[0].entries.shape[1] != 1:
        return None
    return written[0].entries


def _retire(model: nn.Module, name: str) -> None:
    """Put a buffer of ones in the place of a parameter, or of a buffer."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    ones = torch.ones_like(getattr(module, key)).detach()
    module._parameters.pop(key, None)
    module.register_buffer(key, ones)
