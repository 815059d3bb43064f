"""Maps that one layer makes and the next undoes: between two linear maps, after a norm, through a gate."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.families import Family, Mixing, Scaling
from spiritlevel.transforms.maps import condition
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.channels import Passing

_MIXED = Passing()
SCALED = Passing(functions="homogeneous", each=True, gains="write")
_GATED = Passing(each=True)


def _family(watched: Watched, moves: list[Scaling] | list[Mixing], refused: str, why: str) -> Family:
    """The moves of the blocks that are both written and read."""
    both = [move for move in moves if len({slot.side for slot in move.block.slots}) == 2]
    if not both:
        raise watched.refused(refused, why)
    return Family(watched, both)


@checked
@in_turn()
def mix_linear(
    model: nn.Module, *, data: Any, size: float = 10.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """A random invertible matrix between any two linear maps that follow each other directly, undone in the second.

    W₂W₁ = (W₂G⁻¹)(GW₁), and G acts on W₁'s bias too. It finds linear layers, convolutions, embeddings and products
    with parameters, with nothing between them but reshaping, numeric factors, means and average pooling; where sums
    tie several of them, all take the same G. The factors of a low-rank adaptation (LoRA) are such maps, whether applied
    one after another or multiplied first. Gradient and Hessian become T⁻ᵀg and T⁻ᵀHT⁻¹ with T = G ⊗ I on W₁ and
    G⁻ᵀ ⊗ I on W₂. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: inputs to follow the network on and compare outputs on: a tensor, or other accepted data (128 samples).
        size: condition number of every G.
        seed: for the random matrices.
        reading: `target=`, `batch=`, `output=`: how batches and outputs are read; see `Reading`. As in all transforms.

    Cost: a few forward passes in float64 and copies of the model. Reference: mathematics 7.9.

    >>> import torch
    >>> low_rank = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> result = mix_linear(low_rank, data=torch.randn(8, 6))
    >>> result.certificate.preserves, torch.allclose(result.model[3].weight, low_rank[3].weight)
    ('function', True)
    """
    return linear_mixings(Watched("mix_linear", model, data, seed, form_of(reading)), size).drawn()


def linear_mixings(watched: Watched, size: float) -> Family:
    """The maps of `mix_linear`."""
    size = condition(watched.who, size)
    channels = watched.channels(_MIXED)
    return _family(
        watched,
        [Mixing(block, size) for block in channels.blocks()],
        "no two linear maps of this network follow each other with nothing between them",
        channels.obstacles(),
    )


@checked
@in_turn()
def shift_norm_gain(
    model: nn.Module, *, data: Any, size: float = 10.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Random positive factors on the gain and bias of each channel of the norms, undone in the layers that read them.

    γ → cγ, β → cβ, W → W diag(1/c) in every layer that reads the channel: layer norm, RMS norm, group norm, batch norm,
    instance norm, built in or written out, and any other parameter that multiplies channel by channel. Whatever passes
    a positive factor on (ReLU, pooling, reshaping) may stand between norm and layer. A norm whose output is also read
    by anything else, such as a residual sum or a head that shares its weight with the embedding, takes no factor. The
    map of the parameters is diagonal, and the certificate's factors give it. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: ratio of the largest factor of a norm to the smallest.
        seed: of the random factors.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    >>> factors = shift_norm_gain(net, data=torch.randn(8, 4)).certificate.factors
    >>> factors["0.weight"], torch.allclose(factors["1.weight"] * factors["2.weight"][0], torch.ones(6).double())
    (1.0, True)
    """
    return gains(Watched("shift_norm_gain", model, data, seed, form_of(reading)), size).drawn()


def gains(watched: Watched, size: float) -> Family:
    """The maps of `shift_norm_gain`."""
    size = condition(watched.who, size)
    channels = watched.channels(SCALED)
    return _family(
        watched,
        [Scaling(block, size) for block in channels.blocks() if "gain" in block.tags],
        "no norm of this network has a gain that only linear layers read",
        channels.obstacles("gain"),
    )


@checked
@in_turn()
def scale_gate(
    model: nn.Module, *, data: Any, size: float = 10.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Random factors of either sign on each unit of a gated layer's linear half, undone in the layer after the gate.

    In W_down(act(W_gate x) ⊙ W_up x), as SwiGLU and GEGLU have it, W_up → diag(c) W_up and W_down → W_down diag(1/c);
    the gate stays. The map of the parameters is diagonal, and the certificate's factors give it. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: ratio of the largest factor of a layer to the smallest, signs aside.
        seed: of the random factors.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 12), nn.GLU(), nn.Linear(6, 3))
    >>> factors = scale_gate(net, data=torch.randn(8, 4)).certificate.factors
    >>> bool((factors["0.weight"][6:] == 1).all()), bool((factors["0.weight"][:6] == 1).any())
    (True, False)
    """
    return gates(Watched("scale_gate", model, data, seed, form_of(reading)), size).drawn()


def gates(watched: Watched, size: float) -> Family:
    """The maps of `scale_gate`."""
    size = condition(watched.who, size)
    channels = watched.channels(_GATED)
    return _family(
        watched,
        [Scaling(block, size, signed=True) for block in channels.blocks() if "gate" in block.tags],
        "no layer of this network is multiplied by a gate and then read by linear layers only",
        channels.obstacles("gate"),
    )
