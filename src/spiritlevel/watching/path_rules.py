"""Sums over paths of squared weights after an operation: one rule for each way in which operations pass paths on.

A rule is called as (paths, func, args, kwargs, result), where `paths` gives the sums that end in each argument. It
returns those that end in each result, or `None` where the operation has none in the form that was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from spiritlevel.watching.watchers import tensors_in


class Sums(Protocol):
    """What a rule may ask."""

    def squares(self, value: Any) -> Any:
        """The sums of squared paths that end in these entries; other arguments as they are."""

    def knows(self, value: Any) -> bool:
        """Whether the inputs reach it."""


PathRule = Callable[[Sums, Any, Any, Any, Any], Any]

_AVERAGES = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def unreached(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """For a constant: no path ends in it, whatever it takes its shape from."""
    return tree_map(lambda value: None, result)


def moved(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """For what copies, adds or chooses values: it does the same with sums of paths."""
    if not all(constant.is_floating_point() for constant in _constants(paths, args)):
        return None
    return chosen(paths, func, args, kwargs, result)


def chosen(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same for what takes whole numbers as places."""
    return func(*tree_map(paths.squares, args), **tree_map(paths.squares, kwargs))


def larger(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same for the larger of two; with a constant other than 0 it is a clip, which is not homogeneous."""
    if any(bool(constant.any()) for constant in _constants(paths, args)):
        return None
    return moved(paths, func, args, kwargs, result)


def _constants(paths: Sums, args: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(args) if not paths.knows(tensor)]


def reshaped(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same numbers in another shape, type or place."""
    return paths.squares(args[0]).reshape(result.shape).to(result.device) if result.is_floating_point() else None


def activation(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """An activation f passes paths on as they are if f(cx) = c f(x) for c > 0, and no slope is above 1."""
    bounds = [option for option in (*args[1:], *kwargs.values()) if option is not None]
    return paths.squares(args[0]) if all(isinstance(b, int | float) and b == 0 for b in bounds) else None


def clamped(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same for what is clipped on one side."""
    bounds = [option for option in (*args[1:], *kwargs.values()) if option is not None]
    return activation(paths, func, args, kwargs, result) if len(bounds) == 1 else None


def sloped(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same for an activation with slopes of its own."""
    slopes = [option for option in (*args[1:], *kwargs.values()) if option is not None]
    return paths.squares(args[0]) if all(bool(torch.as_tensor(s).abs().le(1).all()) for s in slopes) else None


def added(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Paths that meet add up, those of the second summand after its factor."""
    first, second, alpha = _summands(paths, args, kwargs, result)
    return first + second * alpha


def subtracted_from(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same where the factor belongs to the first."""
    first, second, alpha = _summands(paths, args, kwargs, result)
    return first * alpha + second


def _summands(paths: Sums, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, Any]:
    first, second = (paths.squares(as_tensor(argument, result)) for argument in args[:2])
    return first, second, kwargs.get("alpha", args[2] if len(args) > 2 else 1) ** 2


def summed(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A sum over axes."""
    return func(paths.squares(args[0]), *args[1:], **{**kwargs, "dtype": torch.float64})


def averaged(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A mean over axes: each of its n summands has the weight 1/n."""
    return summed(paths, func, args, kwargs, result) / (args[0].numel() / max(1, result.numel()))


def padded(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Padding with a number other than 0 starts paths there."""
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    return func(paths.squares(args[0]), args[1], value**2)


def pooled(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """An average pooling."""
    options = dict(zip(_AVERAGES, args[1:], strict=False)) | kwargs
    ones = torch.ones_like(paths.squares(args[0]))
    divisor = func(ones, **{**options, "divisor_override": 1}) / func(ones, **options)
    return func(paths.squares(args[0]), **options) / divisor


def pooled_to_size(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """An average pooling whose cells follow from the size asked for."""
    means = func(paths.squares(args[0]), args[1])
    for dim in range(-len(args[1]), 0):
        size, cells = args[0].shape[dim], torch.arange(result.shape[dim], device=result.device)
        ends = -(-(cells + 1) * size // len(cells))
        widths = ends - cells * size // len(cells)
        means = means / widths.reshape(-1, *[1] * (-1 - dim))
    return means


def product(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """A value times weights, plus a bias; a product of two values that the inputs reach has no paths."""
    return _multiplied(paths, func, args, kwargs) if not all(map(paths.knows, args[:2])) else None


def added_product(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The same where the bias comes first."""
    return _multiplied(paths, func, args, kwargs) if not all(map(paths.knows, args[1:3])) else None


def _multiplied(paths: Sums, func: Any, args: Any, kwargs: Any) -> Any:
    scales = {key: number**2 for key, number in kwargs.items()}  # alpha and beta
    return func(*(paths.squares(argument) for argument in args), **scales)


def scaled(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Number times number."""
    if all(map(paths.knows, args[:2])):
        return None
    first, second = (paths.squares(as_tensor(argument, result)) for argument in args[:2])
    return first * second


def divided(paths: Sums, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Number divided by number."""
    if paths.knows(args[1]) or kwargs.get("rounding_mode"):
        return None
    first, second = (paths.squares(as_tensor(argument, result)) for argument in args[:2])
    return first / second


def as_tensor(argument: Any, like: Tensor) -> Tensor:
    """A number, or a tensor of integers, as a tensor of floats, so that it is squared like one."""
    if isinstance(argument, Tensor):
        return argument if argument.is_floating_point() else argument.double()
    return torch.tensor(float(argument), dtype=torch.float64, device=like.device)
