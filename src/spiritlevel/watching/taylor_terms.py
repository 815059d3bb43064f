"""How second-order Taylor terms pass through an operation, with the sum over the probes of a group collapsed.

While the parameters move along θ + t·v, a value x(t) has a first derivative ẋ and a second one ẍ at t = 0. A trace
needs ẋ of every probe v_k, but of ẍ only the sum s = Σ_k ẍ_k over a group of probes, and s obeys the same rule as any ẋ
plus the bend of the ẋ_k: for z = f(x), ż_k = Df ẋ_k and s_z = Df s + Σ_k D²f[ẋ_k, ẋ_k] (mathematics 4.10). So a rule
applies the first derivative Df of its operation to all terms together, stacked as rows, and adds the bend to the last.

Rules are functions of a `Step`, what was executed, and of `Terms`, what moves. They return the rows of the step's
result, or a list of rows if it has several results, with `None` for one that does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Step:
    """One ATen operation that was executed, and what a rule works out once for all probes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def argument(self, name: str) -> Any:
        """An argument by its name in the operation's schema, or its default."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if position < len(self.args) and not argument.kwarg_only:
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        return None

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What depends on the values but not on the probes, computed when first needed."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]


class Terms:
    """The terms of all values that move, for `groups` groups of `members` probes.

    Those of one value lie in a tensor of one dimension more: first ẋ of the first probes of all groups, then of the
    second ones, and so on, then s of every group. The last part is missing where it is zero.
    """

    def __init__(self, members: int, groups: int) -> None:
        self.members, self.groups, self.firsts = members, groups, members * groups
        self.rows: dict[int, Tensor] = {}

    def of(self, value: Any) -> Tensor | None:
        """The rows of a value; `None` for what does not move."""
        return self.rows.get(id(value)) if isinstance(value, Tensor) else None

    def still(self, *values: Any) -> bool:
        """Whether none of these moves."""
        return all(self.of(value) is None for value in values)

    def each(self, rows: Tensor) -> Iterator[Tensor]:
        """ẋ of the first probes of all groups, then of the second ones, and so on."""
        return (rows[start : start + self.groups] for start in range(0, self.firsts, self.groups))

    def dots(self, rows: Tensor, others: Tensor) -> Tensor:
        """Σ_k ẋ_k ẏ_k of every group, number by number."""
        total: Tensor | None = None
        for one, other in zip(self.each(rows), self.each(others), strict=True):
            total = one * other if total is None else total.addcmul_(one, other)
        assert total is not None
        return total

    def summed(self, firsts: Tensor) -> Tensor:
        """Σ_k of what was computed for every probe."""
        return firsts.unflatten(0, (self.members, self.groups)).sum(0)

    def bent(self, rows: Tensor, bend: Tensor) -> Tensor:
        """The rows with the bend added to s; nothing else may use them."""
        if len(rows) == self.firsts:
            return torch.cat([rows, bend.expand(self.groups, *rows.shape[1:])])
        rows[self.firsts :] += bend
        return rows

    def whole(self, rows: Tensor) -> Tensor:
        """The rows with s written out."""
        if len(rows) > self.firsts:
            return rows
        return torch.cat([rows, rows.new_zeros(self.groups, *rows.shape[1:])])


TaylorRule = Callable[[Step, Terms], Any]


class NoRule(Exception):
    """An operation was called in a form for which there is no rule."""


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two sets of rows, in the memory of neither."""
    if one is None or other is None:
        return other if one is None else one
    if len(one) == len(other):
        return one + other
    long, short = (one, other) if len(one) > len(other) else (other, one)
    total = long.clone()
    total[: len(short)] += short
    return total


def aligned(rows: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Rows whose numbers broadcast to a shape as those of their value do."""
    if rows is None:
        return None
    missing = len(shape) + 1 - rows.ndim
    return rows[(slice(None), *[None] * missing)] if missing else rows


def spread(rows: Tensor | None, shape: torch.Size) -> Tensor | None:
    """The same, with every number copied to wherever it is broadcast."""
    found = aligned(rows, shape)
    return None if found is None else found.expand(len(found), *shape)


def moves(tensor: Any) -> bool:
    """Whether a value can have derivatives at all."""
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def from_the_end(dim: int, value: Tensor) -> int:
    """A dimension of a value counted from its last one, so that rows in front of it do not matter."""
    return dim - value.ndim if dim >= 0 else dim
