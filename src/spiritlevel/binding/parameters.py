"""Parameters as a dict from names to tensors: which ones are measured, and how they move."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.utils._pytree import tree_map

from spiritlevel.arguments import names as several_names
from spiritlevel.errors import InputError, is_array, unknown_name

Params = dict[str, Tensor]


class _Real(str):
    """Of the pattern that it is, the parameters that are real: complex ones are constants, without a word."""


REAL = _Real("*")  # for callers that need parameters, but no curvature along each


def select_parameters(model: nn.Module, params: str | Iterable[str] | None = None) -> list[str]:
    """Names of the parameters to measure: all that require grad, or those that a name, prefix or glob picks.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> select_parameters(net, "1"), select_parameters(net, "*.bias")
    (['1.weight', '1.bias'], ['0.bias', '1.bias'])
    """
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    names = list(own.values())
    if params is None:
        chosen = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not chosen:
            reason = "has no parameters; there is no curvature to measure."
            if names:
                reason = "has no parameter that requires grad; set requires_grad, or name the parameters with params=."
            raise InputError(f"the model {type(model).__name__} {reason}")
        return chosen
    if not isinstance(params, str) and isinstance(params, Sized) and not is_array(params) and not len(params):
        raise InputError("params= is empty; name at least one parameter, or leave it out for all that require grad.")
    wanted = several_names(params, "params", "'fc1', 'conv*' or '0.weight'")
    picked: set[str] = set()
    for pattern in wanted:
        hits = [
            own[id(parameter)]  # a shared parameter has several names; the first is its own
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
        ]
        if not hits:
            raise unknown_name("parameter", pattern, names)
        picked.update(hits)
    chosen = [name for name in names if name in picked]
    real = {own[id(parameter)] for parameter in model.parameters() if not parameter.is_complex()}
    return [name for name in chosen if name in real] or chosen if isinstance(params, _Real) else chosen


def as_leaves(params: Params) -> Params:
    """The same values, for plain autograd to differentiate with respect to."""
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def in_precision(tree: Any, dtype: torch.dtype) -> Any:
    """The same with all floating-point tensors in one type, and complex ones in that of such parts."""

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_complex():
            return leaf.to(dtype.to_complex())
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(converted, tree)


def along(function: Callable[[Params], Any], params: Params, direction: Params) -> tuple[Any, Any]:
    """The value of a function of the parameters and its derivative along a direction, by forward mode."""
    result = jvp(function, (params,), (direction,))
    return result[0], result[1]


def depth() -> int | None:
    """How deep we are in transformations of `torch.func` such as `vmap` and `jvp`; `None` outside them all."""
    level: int | None = cast(Any, torch._C)._functorch.maybe_current_level()
    return level


def nearby(params: Params, eps: float = 0.0) -> Iterator[Params]:
    """The parameters moved by a few units in their last places, three times: whatever that changes is rounding.

    `eps` is the unit, relative to a number's size, if it is not that of its type.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        moved = {}
        for name, tensor in params.items():
            size = tensor.abs()
            size = size + (float(size.mean()) or 1.0)
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
            moved[name] = tensor + 64 * (eps or torch.finfo(tensor.dtype).eps) * size * noise
        yield moved
