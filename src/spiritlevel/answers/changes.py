"""Changes of the weights that practitioners make: rounding, pruning, noise, casts, another checkpoint, a LoRA merge.

A change is a string such as `int4:channel` or `prune:0.5`, another model, a dict of tensors, or a function from tensor
to tensor. Here it becomes values of parameters; nothing is known about losses or samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from spiritlevel.binding.modules import state_of, unwrapped
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError, first_line, named_error, shown
from spiritlevel.results import figure

GRAMMAR = (
    "int8, int4:channel, int4:asymmetric, int4:random, prune:0.5, prune:0.5:layer, noise:0.01, noise:0.01:absolute, "
    "bfloat16, float16 or lora"
)
_CASTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = range(2, 17)


@dataclass(frozen=True)
class Moved:
    """Where a change puts the parameters.

    `after` has the new values of those that it touches. For a random change these are one draw, and `spread` holds the
    standard deviation of every weight, around values that do not move on average; otherwise it is None.
    """

    after: Params
    spread: Params | None = None


@dataclass(frozen=True)
class Change:
    """A change of the weights by its name.

    `weights_only`: whether it applies to matrices and kernels and leaves biases, gains and other vectors as they are.
    `move` takes the parameters to change and a generator. `other` is the state of another model instead.
    """

    name: str
    meaning: str
    move: Callable[[Params, torch.Generator], Moved] | None = None
    weights_only: bool = False
    random: bool = False
    other: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def chosen(self, params: Params, named: bool) -> Params:
        """Those of these parameters that the change moves; all, if somebody has named them."""
        if not self.weights_only or named:
            return params
        found = matrices_of(params)
        if not found:
            raise InputError(
                f"the change {self.name} applies to matrices and kernels, but the model has none; name the parameters "
                "to change with params=."
            )
        return found


def matrices_of(params: Params) -> Params:
    """The matrices and kernels, which rounding and pruning are for."""
    return {name: tensor for name, tensor in params.items() if tensor.ndim >= 2}


# ---------------------------------------------------------------- how a change is written


def as_change(change: Any) -> Change:
    """The change that somebody wrote.

    >>> as_change("int4:channel").meaning
    'weights rounded to 4 bits, symmetric, a scale for every output channel'
    >>> as_change("int3:wide")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: the change 'int3:wide' has the option 'wide', but int takes tensor, channel, ...
    """
    if isinstance(change, Change):
        return change
    if isinstance(change, str):
        return _named(change)
    if isinstance(change, nn.Module):
        other = unwrapped(change)
        state = {name: tensor.detach() for name, tensor in state_of(other)}
        return Change("another model", f"the way to another {type(other).__name__}", other=state)
    if isinstance(change, Mapping):
        if not change or not all(isinstance(tensor, Tensor) for tensor in change.values()):
            raise InputError(
                "a change that is a dict needs a tensor under the name of each parameter, as state_dict() has."
            )
        return Change("other weights", "the way to other weights", other=dict(change))
    if callable(change):
        name = getattr(change, "__name__", type(change).__name__)
        name = "function" if name == "<lambda>" else name
        return Change(name, f"every parameter through {name}", lambda params, _: Moved(_through(change, name, params)))
    raise InputError(
        f"a change must be a string such as {GRAMMAR}, a model, a dict of tensors or a function, got {shown(change)}."
    )


def wanted(under: Any) -> list[Change]:
    """The changes that were named, if any."""
    nothing = under is None or (isinstance(under, str | list | tuple) and not under)
    return [] if nothing else several(under)


def several(changes: Any) -> list[Change]:
    """The changes of a list, or of a string in which commas separate them, or a single one; each once.

    >>> [each.name for each in several(["int4", torch.abs, "int4", lambda w: 0.9 * w, lambda w: 0.5 * w])]
    ['int4', 'abs', 'function', 'function 2']
    """
    parts = [changes]
    if isinstance(changes, str):
        parts = [part.strip() for part in changes.split(",")]
    elif isinstance(changes, list | tuple | set | frozenset | Iterator):
        parts = list(changes)
    distinct = {
        part if isinstance(part, str) else id(part): part for part in parts if not isinstance(part, str) or part
    }
    if not distinct:
        raise InputError(f"there is no change to make; name some, separated by commas, of {GRAMMAR}.")
    found: dict[str, Change] = {}
    for each in map(as_change, distinct.values()):
        named, number = each, 1
        while named.name in found:  # two functions without a name, or two other models
            number += 1
            named = replace(each, name=f"{each.name} {number}")
        found[named.name] = named
    return list(found.values())


def _named(text: str) -> Change:
    kind, *options = text.strip().split(":")
    if kind.startswith("int") and kind[3:].isdigit():
        return _rounding(text, int(kind[3:]), options)
    if kind == "prune":
        share, options = _size(text, options, "the share of the weights to remove, as in prune:0.5", 1.0)
        flags = _flags(text, kind, options, ("global", "layer"))
        where = "in every layer" if "layer" in flags else "of all weights"
        meaning = f"the smallest {figure(share, 4)} {where} set to 0"
        return Change(text, meaning, lambda params, _: Moved(_pruned(params, share, "layer" in flags)), True)
    if kind == "noise":
        size, options = _size(text, options, "its size, as in noise:0.01", math.inf)
        flags = _flags(text, kind, options, ("relative", "absolute"))
        absolute = "absolute" in flags
        of = "" if absolute else " times the root mean square of each tensor"
        meaning = f"normal noise of standard deviation {figure(size, 4)}{of}"
        return Change(text, meaning, lambda params, generator: _noisy(params, size, absolute, generator), random=True)
    if kind in _CASTS and not options:
        return Change(text, f"parameters rounded to {kind}", lambda params, _: Moved(_cast(params, _CASTS[kind])))
    if text == "lora":
        return Change(text, "LoRA adapters merged into the layers that they belong to")
    raise InputError(f"there is no change {shown(text)}; write {GRAMMAR}.")


def _rounding(text: str, bits: int, options: list[str]) -> Change:
    if bits not in _BITS:
        raise InputError(f"the change {text!r} rounds to {bits} bits; 2 to 16 are possible.")
    known = ("tensor", "channel", "symmetric", "asymmetric", "nearest", "random")
    flags = _flags(text, "int", options, known)
    channel, asymmetric, random = "channel" in flags, "asymmetric" in flags, "random" in flags
    meaning = (
        f"weights rounded {'at random ' if random else ''}to {bits} bits, {'a' * asymmetric}symmetric, "
        f"a scale for every {'output channel' if channel else 'tensor'}"
    )

    def move(params: Params, generator: torch.Generator) -> Moved:
        if random:
            return _randomly_rounded(params, bits, channel, asymmetric, generator)
        return Moved({name: rounded(tensor, bits, channel, asymmetric) for name, tensor in params.items()})

    return Change(text, meaning, move, True, random)


def _flags(text: str, kind: str, options: list[str], known: tuple[str, ...]) -> set[str]:
    """Options that come in pairs, the first of each pair being the default."""
    for option in options:
        if option not in known:
            raise InputError(f"the change {text!r} has the option {option!r}, but {kind} takes {', '.join(known)}.")
    found = set(options)
    for pair in zip(known[::2], known[1::2], strict=True):
        if found.issuperset(pair):
            raise InputError(f"the change {text!r} cannot be both {pair[0]} and {pair[1]}.")
    return found


def _size(text: str, options: list[str], what: str, most: float) -> tuple[float, list[str]]:
    try:
        size = float(options[0])
    except (IndexError, ValueError):
        size = math.nan
    if not (0 <= size <= most and math.isfinite(size)):
        limits = "a number from 0 to 1" if most == 1 else "a number of at least 0"
        raise InputError(f"the change {text!r} needs {what}: {limits}.")
    return size, options[1:]


# ---------------------------------------------------------------- what they do


def _grid(
    weight: Tensor, bits: int, channel: bool, asymmetric: bool, around: bool = False
) -> tuple[Tensor, Tensor, int, int]:
    """Steps and zero points, float64 and ready to be broadcast, and the least and largest whole number.

    A grid `around` the weights has points beyond both ends, so that all can be rounded either way.
    """
    values = weight.double()
    over = tuple(range(1, values.ndim)) if channel and values.ndim > 1 else tuple(range(values.ndim))
    if not asymmetric:
        top = 2 ** (bits - 1) - 1
        step = values.abs().amax(over, keepdim=True) / top if values.numel() else values
        return torch.where(step > 0, step, 1.0), torch.zeros_like(step), -top, top
    low, high = values.amin(over, keepdim=True).clamp(max=0), values.amax(over, keepdim=True).clamp(min=0)
    top = 2**bits - 1
    step = (high - low) / top
    step = torch.where(step > 0, step, 1.0)
    if around:
        points = (high / step).ceil() + (-low / step).ceil()
        step = torch.where(points > top, (high - low) / (top - 1), step)
    return step, (-low / step).round(), 0, top


def rounded(weight: Tensor, bits: int, channel: bool = False, asymmetric: bool = False) -> Tensor:
    """A weight on the grid of that many bits, as numbers of its own type; 0 stays 0.

    Symmetric: w' = s·round(w/s), s = max|w|/(2^(b−1)−1). Asymmetric: s = (max − min)/(2^b−1) for a range that holds 0,
    and w' = s·(clamp(round(w/s) + z, 0, 2^b−1) − z) with the zero point z = round(−min/s). The maximum is that of the
    tensor, or of every output channel, the first dimension.

    >>> rounded(torch.tensor([[-1.0, 0.3, 0.9]]), 2)
    tensor([[-1.,  0.,  1.]])
    """
    if not weight.numel():
        return weight.clone()
    step, zero, low, high = _grid(weight, bits, channel, asymmetric)
    whole = ((weight.double() / step).round() + zero).clamp(low, high) - zero
    return (whole * step).to(weight.dtype)


def _randomly_rounded(params: Params, bits: int, channel: bool, asymmetric: bool, generator: torch.Generator) -> Moved:
    """Up or down at random, with probabilities that on average leave every weight where it is: variance s²f(1−f).

    An asymmetric grid that goes through 0 and ends between two of its points gets s = (max − min)/(2^b−2), so that no
    weight needs a point too many.
    """
    after, spread = {}, {}
    for name, tensor in params.items():
        step, *_ = _grid(tensor, bits, channel, asymmetric, around=True) if tensor.numel() else (torch.ones(()),)
        places = tensor.double() / step
        rest = places - places.floor()
        up = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(rest.device) < rest
        after[name] = ((places.floor() + up) * step).to(tensor.dtype)
        spread[name] = step * (rest * (1 - rest)).sqrt()
    return Moved(after, spread)


def _noisy(params: Params, size: float, absolute: bool, generator: torch.Generator) -> Moved:
    after, spread = {}, {}
    for name, tensor in params.items():
        deviation = size if absolute else size * root_mean_square(tensor)
        draw = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        after[name] = (tensor.double() + deviation * draw.to(tensor.device)).to(tensor.dtype)
        spread[name] = torch.full_like(tensor, deviation, dtype=torch.float64)
    return Moved(after, spread)


def root_mean_square(tensor: Tensor) -> float:
    """√(mean of squares), 0 for an empty tensor."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def _pruned(params: Params, share: float, by_layer: bool) -> Params:
    """The smallest magnitudes set to 0: as many as the share, rounded down; of equal ones the first."""
    groups = [[name] for name in params] if by_layer else [list(params)]
    after: Params = {}
    for names in groups:
        flat = torch.cat([params[name].reshape(-1) for name in names])
        count = math.floor(share * flat.numel() + 1e-9)
        flat = flat.clone()
        flat[flat.abs().argsort(stable=True)[:count]] = 0.0
        parts = flat.split([params[name].numel() for name in names])
        after |= {name: part.reshape(params[name].shape) for name, part in zip(names, parts, strict=True)}
    return after


def _cast(params: Params, dtype: torch.dtype) -> Params:
    after = {name: tensor.to(dtype).to(tensor.dtype) for name, tensor in params.items()}
    for name, tensor in after.items():
        if not bool(tensor.isfinite().all()):
            raise InputError(f"the parameter {name} does not fit into {str(dtype).removeprefix('torch.')}.")
    return after


def _through(function: Callable[[Tensor], Any], name: str, params: Params) -> Params:
    """Every parameter through somebody's function, each as a copy."""
    after = {}
    for key, tensor in params.items():
        try:
            found = function(tensor.clone())
        except Exception as error:
            raise InputError(f"the change {name} fails on the parameter {key}: {named_error(error)}.") from error
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"the change {name} must return a tensor of the shape {tuple(tensor.shape)} of the parameter {key}, "
                f"got {got}."
            )
        after[key] = found.detach().to(tensor)
        if not bool(after[key].isfinite().all()):
            raise InputError(f"the change {name} makes the parameter {key} NaN or infinite.")
    return after


# ---------------------------------------------------------------- LoRA


@in_turn()  # while another thread measures the model, it holds other tensors
def merged(model: nn.Module) -> tuple[nn.Module, Change]:
    """The model without its LoRA adapters, and the change that merging them makes: W + s·BA for every layer.

    Layers with adapters are those that hold a `base_layer`, `lora_A`, `lora_B` and `scaling`, as peft makes them. A
    copy of a layer that can `merge` is asked to, since not every adapter is s·BA (DoRA's is not); others are added up.
    """
    plain = copy.deepcopy(unwrapped(model))
    found = [(name, module) for name, module in plain.named_modules() if _has_adapter(module)]
    if not found:
        raise InputError(
            "the change lora needs a model with LoRA layers (modules with base_layer, lora_A, lora_B and scaling, as "
            "peft makes them), but this one has none; pass the merged model as the change instead."
        )
    after: Params = {}
    for name, module in found:
        with torch.no_grad():
            try:
                base, there = _without_adapter(module)
            except (RuntimeError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise InputError(f"the LoRA layer {name!r} cannot be merged: {first_line(error)}.") from error
        after |= {_inside(name, key): tensor for key, tensor in there.items()}
        parent, _, last = name.rpartition(".")
        if not name:
            plain = base
        else:
            setattr(plain.get_submodule(parent), last, base)
    return plain, Change("lora", f"LoRA adapters of {len(found)} layers merged", other=after)


def _without_adapter(module: Any) -> tuple[nn.Module, Params]:
    """The layer that adapters were added to, and its parameters once they are merged."""
    if not (hasattr(module, "merge") and hasattr(module, "unmerge")):
        base = module.base_layer
        return base, {"weight": base.weight + _delta(module).to(base.weight)}
    if getattr(module, "merged", False):
        module.unmerge()
    other = copy.deepcopy(module)
    other.merge()
    return module.base_layer, {name: tensor.detach() for name, tensor in other.base_layer.named_parameters()}


def _inside(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _has_adapter(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B", "scaling"))


def _delta(module: Any) -> Tensor:
    """s·BA of a layer, summed over its adapters."""
    adapters: list[str | None] = list(module.lora_A.keys()) if isinstance(module.lora_A, nn.ModuleDict) else [None]
    total = torch.zeros_like(module.base_layer.weight)
    for name in adapters:
        a, b, scale = (each if name is None else each[name] for each in (module.lora_A, module.lora_B, module.scaling))
        a, b = (cast(Tensor, each.weight) if isinstance(each, nn.Module) else each for each in (a, b))
        total = total + float(scale) * (b @ a)
    return total
