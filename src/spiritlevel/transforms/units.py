"""Hidden units in another order, and hidden units that become two."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from spiritlevel.arguments import checked
from spiritlevel.binding.modules import twin_of
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError, counted
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.transforms.maps import Step, share
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.channels import Block, Layout, Passing, Slot

_EXCHANGED = Passing(
    functions="any",
    offsets=True,
    products=True,
    gains="tied",
    symmetric=True,
    attention=True,
    orthogonal=True,
)
_DOUBLED = Passing(functions="any", offsets=True, products=True, gains="tied")
_TRIED = 2  # samples on which every layer is tried, before all of them together on all samples
_FIXED = InputError, RuntimeError, ValueError, TypeError, IndexError  # what a network raises whose code fixes a width
_NO_UNITS = "this network has no hidden units that only linear layers read"


@checked
@in_turn()
def permute_units(
    model: nn.Module, *, data: Any, size: float = 1.0, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """The hidden units of every layer in a random order.

    It permutes the rows of the layers that write a unit and the columns of those that read it, with everything that
    belongs to it on the way: statistics and gain of norms, slopes, the other half of a gate. Units that are tied by
    sums (a residual stream) are permuted together, those of attention within their head. No measure of a network may
    depend on the order, so nothing may move except by rounding. T is a permutation. Exact up to the order of sums.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: has no meaning here.
        seed: for the permutations.

    Cost: as in `mix_linear`. Reference: mathematics 7.9.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> result = permute_units(net, data=torch.randn(8, 3))
    >>> before, after = net[0].bias.tolist(), result.model[0].bias.tolist()
    >>> before == after, sorted(before) == sorted(after)
    (False, True)
    """
    watched = Watched("permute_units", model, data, seed, form_of(reading))
    channels = watched.channels(_EXCHANGED)
    steps = []
    for block in channels.blocks():
        if block.units > 1 and len({slot.side for slot in block.slots}) == 2:
            order = torch.randperm(block.units, generator=watched.source)
            if bool((order == torch.arange(block.units)).all()):
                order = order.roll(1)
            steps += [Step(slot.entries, order) for slot in block.slots]
    if not steps:
        raise watched.refused(_NO_UNITS, channels.obstacles())
    return watched.mapped(steps)


@checked
@in_turn()
def split_units(
    model: nn.Module, *, data: Any, size: float = 0.25, seed: int = 0, **reading: Unpack[Reading]
) -> Transformed:
    """Random hidden units become two that share their outgoing weights: t of them and 1 − t.

    Both copies have the unit's incoming weights and everything else that belongs to it, so they output the same value,
    and the next layers read t·w and (1 − t)·w; t is drawn between 0.2 and 0.8. The number of parameters grows, so there
    is no map from the old Hessian to the new one. For networks that are piecewise linear in each layer the unit's part
    of a per-sample trace is known: incoming weights × (t² + (1−t)²), outgoing weights × 2. Exact up to rounding.

    Args:
        model: any module; it is left as it was.
        data: as in `mix_linear`.
        size: the share of the units of each layer that are split, at least one unit.
        seed: for the choice of units and their t.

    Layers whose width the network's own code fixes (a view with a fixed number of channels, groups) stay as they are.
    Cost: as in `mix_linear`, with a forward pass of two samples for each layer. Reference: mathematics 7.9.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> split_units(net, data=torch.randn(8, 3)).model
    Sequential(
      (0): Linear(in_features=3, out_features=5, bias=True)
      (1): Tanh()
      (2): Linear(in_features=5, out_features=2, bias=True)
    )
    """
    watched = Watched("split_units", model, data, seed, form_of(reading))
    size = share(watched.who, size)
    channels = watched.channels(_DOUBLED)
    splits = []
    for block in channels.blocks():
        if len({slot.side for slot in block.slots}) == 2 and (cuts := _cuts(block, channels.layout)) is not None:
            count = max(1, math.floor(size * block.units))
            chosen = torch.randperm(block.units, generator=watched.source)[:count]
            shares = torch.full((block.units,), torch.nan, dtype=torch.float64)
            shares[chosen] = 0.2 + 0.6 * torch.rand(count, generator=watched.source, dtype=torch.float64)
            splits.append(_Split(shares, cuts))
    if not splits:
        raise watched.refused(_NO_UNITS, channels.obstacles())
    few = watched.sample.first(_TRIED)
    possible = _possible(watched, splits, few)  # what fails on few fails on all
    if possible and few.count < watched.sample.count:
        with contextlib.suppress(*_FIXED):
            return _result(watched, possible)
        possible = _possible(watched, splits, watched.sample)
    return _result(watched, possible)


def _result(watched: Watched, splits: list[_Split]) -> Transformed:
    """The network with these splits, compared with what it was on all samples."""
    if not splits:
        raise watched.refused("no layer of this network can change its width, which its own code or its groups fix")
    new = twin_of(watched.exact)
    _divide(new, splits)
    split = sum(int((~item.shares.isnan()).sum()) for item in splits)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (watched.exact, new)]
    notes = (f"{counted(split, 'unit')} became two; {sizes[0]:,} parameters became {sizes[1]:,}",)
    return watched.certified(new, notes=notes, fit=_fit)


@dataclass(frozen=True)
class _Cut:
    """Where the units of a block stand on one axis of a tensor: `units` (size of the axis,), -1 where there is none."""

    name: str
    axis: int
    units: Tensor
    side: int


@dataclass(frozen=True)
class _Split:
    """The share t of every unit of a block, NaN for those that stay whole."""

    shares: Tensor
    cuts: tuple[_Cut, ...]


def _cuts(block: Block, layout: Layout) -> tuple[_Cut, ...] | None:
    """The places of a block's units, `None` if a unit is not a whole slice of a tensor."""
    found: dict[tuple[str, int, int], Tensor] = {}
    for slot in block.slots:
        place = _axis(slot, layout)
        if place is None:
            return None
        name, axis, index = place
        units = found.setdefault((name, axis, slot.side), torch.full((layout.shapes[name][axis],), -1))
        units[index] = torch.arange(block.units)
    return tuple(_Cut(name, axis, units, side) for (name, axis, side), units in found.items())


def _axis(slot: Slot, layout: Layout) -> tuple[str, int, Tensor] | None:
    (name, *others) = layout.owners(slot.entries)
    shape = layout.shapes[name]
    for axis, size in enumerate(shape):
        index = (slot.entries - layout.starts[name]) // shape[axis + 1 :].numel() % size
        whole = slot.entries.shape[1] * size == shape.numel() and bool((index == index[:, :1]).all())
        if whole and not others:
            return name, axis, index[:, 0]
    return None


def _divide(model: nn.Module, splits: Iterable[_Split]) -> None:
    """Split units in a model: longer tensors in its modules, and module attributes that fit them."""
    state = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    places: dict[tuple[str, int], Tensor] = {}  # where the entries of an axis stood before other splits made it longer
    for split in splits:
        for cut in split.cuts:
            tensor, before = state[cut.name], places.get((cut.name, cut.axis), torch.arange(len(cut.units)))
            units = cut.units[before]
            # runs of the same unit are doubled as a whole: the positions of one channel after a flattening
            _, lengths = torch.unique_consecutive(units, return_counts=True)
            order: list[Tensor] = []
            factors: list[Tensor] = []
            for run in torch.arange(len(units)).split(lengths.tolist()):
                unit = int(units[run[0]])
                part = split.shares[unit] if unit >= 0 else torch.tensor(torch.nan)
                parts = [torch.ones(())] if bool(part.isnan()) else [part, 1 - part]
                for part in parts:
                    order.append(run)
                    factors.append((part if cut.side < 0 else torch.ones(())).expand(len(run)).double())
            places[cut.name, cut.axis] = before[torch.cat(order)]
            state[cut.name] = tensor.index_select(cut.axis, torch.cat(order).to(tensor.device))
            if cut.side < 0:
                shape = [-1] + [1] * (tensor.ndim - cut.axis - 1)
                state[cut.name] = state[cut.name] * torch.cat(factors).reshape(shape).to(tensor)
    known = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    fresh: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = known[id(parameter)]
                fresh.setdefault(name, nn.Parameter(state[name], requires_grad=parameter.requires_grad))
                module._parameters[key] = fresh[name]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = state[known[id(buffer)]]
    _fit(model)


def _fit(model: nn.Module) -> None:
    """Make the modules' attributes match the shapes of their tensors."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif isinstance(module, _ConvNd):
            if module.groups > 1 and module.groups == module.out_channels and not module.transposed:
                module.groups = weight.shape[0]  # one for each channel
            ends = (weight.shape[0], weight.shape[1] * module.groups)
            if module.transposed:
                ends = (weight.shape[1] * module.groups, weight.shape[0])
            module.out_channels, module.in_channels = ends
        elif isinstance(module, _NormBase):
            module.num_features = len(weight)
        elif isinstance(module, nn.PReLU):
            module.num_parameters = len(weight)


def _possible(watched: Watched, splits: Iterable[_Split], sample: Sample) -> list[_Split]:
    """The splits that work together, those before the others: two that work by themselves need not do so."""
    possible: list[_Split] = []
    for each in splits:
        if _works(watched, [*possible, each], sample):
            possible.append(each)
    return possible


def _works(watched: Watched, splits: Iterable[_Split], sample: Sample) -> bool:
    """Whether the network runs, with the same output, if these layers have a different width."""
    new = twin_of(watched.exact)
    _divide(new, splits)
    try:
        sample.certify(watched.who, watched.exact, new)
    except _FIXED:
        return False
    return True
