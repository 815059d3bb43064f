"""Factors of values and parameters, and one call of an operation that they meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.watching.operations import Degree, Operation, called

Factor = float | Tensor
"""A positive number, or one for each channel (for a parameter: a tensor that broadcasts to its shape)."""

_EQUAL = 1e-12  # relative difference up to which two factors count as equal


def is_one(factor: Factor) -> bool:
    """Whether a factor changes nothing."""
    return same(factor, 1.0)


def same(first: Factor, second: Factor) -> bool:
    """Whether two factors are equal up to rounding."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        a, b = torch.as_tensor(first, dtype=torch.float64), torch.as_tensor(second, dtype=torch.float64)
        return bool(((a - b).abs() <= _EQUAL * a.abs()).all())
    return abs(first - second) <= _EQUAL * abs(first)


@dataclass(frozen=True)
class Value:
    """What is known about a value: the group of values tied to it, its factor, and whether it is the input itself.

    The factor is `scale` times `channels`, a tensor of the value's own shape (`None`: all 1).
    """

    group: int
    scale: float = 1.0
    channels: Tensor | None = None
    raw: bool = False

    @property
    def factor(self) -> Factor:
        return self.scale if self.channels is None else self.scale * self.channels


@dataclass(frozen=True)
class ScaledLayer:
    """A layer that takes a factor: the groups it reads and writes, its parameters and output channels."""

    reads: int
    writes: int
    params: tuple[str, ...]
    channels: int
    norm: bool = False
    shape: torch.Size | None = None  # of the input, if that is the network's own


@dataclass(frozen=True)
class Call:
    """One operation: its tensors in and out, and what is known about those that came in."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    values: list[Value]
    outputs: list[Tensor]

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def operation(self) -> Operation:
        return called(self.func)

    @property
    def linear(self) -> bool:
        """Whether it multiplies its only tensor by a number, or adds nothing to it."""
        summands = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, int | float)]
        multiplies = self.operation.degree in (Degree.BILINEAR, Degree.QUOTIENT) and self.operation.elementwise == 2
        scales = multiplies and "rounding_mode" not in self.kwargs
        return len(self.tensors) == 1 and (scales or (self.operation.name == "add" and not any(summands)))

    @property
    def pads_with_a_number(self) -> bool:
        return self.operation.name == "pad" and self.kwargs.get("mode", "constant") == "constant"

    def again(self, replacements: list[Tensor]) -> Any:
        """The same call with other tensors."""
        table = {id(old): new for old, new in zip(self.tensors, replacements, strict=True)}
        args, kwargs = tree_map(lambda leaf: table.get(id(leaf), leaf), (self.args, self.kwargs))
        return self.func(*args, **kwargs)


def grid(first: Factor, second: Factor, shape: torch.Size, groups: int) -> Factor:
    """The factor of every entry of a weight, from those of the indices on its first axis and on its second.

    The second axis counts the channels of one group, so the same index is a different channel in each group.
    """
    rest = [1] * (len(shape) - 2)
    if isinstance(first, Tensor):
        first = first.reshape(-1, 1, *rest)
    if isinstance(second, Tensor):
        second = second.reshape(groups, 1, -1).expand(-1, shape[0] // groups, -1).reshape(*shape[:2], *rest)
    return first * second


def text(factor: Factor) -> str:
    """A factor in words."""
    return "a factor per channel" if isinstance(factor, Tensor) else f"{factor:.6g}"
