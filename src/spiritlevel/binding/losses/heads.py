"""Outputs that are not multiplied out: the logits h Wᵀ + b of a last linear layer, of which only pieces ever exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PIECE = 2**22  # logits that exist at once


class Head(NamedTuple):
    """Outputs h Wᵀ + b that are not multiplied out; for motions and cotangents, the parts that exist."""

    hidden: Tensor  # (N, …, d)
    weight: Tensor  # (V, d)
    bias: Tensor | None = None  # (V,)

    @property
    def shape(self) -> torch.Size:
        """Of the outputs."""
        return torch.Size((*self.hidden.shape[:-1], len(self.weight)))

    def stand_in(self) -> Tensor:
        """Zeros in the shape of the outputs without their memory: one number, expanded."""
        return self.hidden.new_zeros(()).expand(self.shape)

    def detach(self) -> Head:
        return Head(self.hidden.detach(), self.weight.detach(), None if self.bias is None else self.bias.detach())

    def thinned(self, words: Tensor, rows: Tensor | None = None) -> Tensor:
        """Some of the outputs, multiplied out; `rows` are those of the weight, if it does not hold all."""
        bias = None if self.bias is None else self.bias[words]
        return F.linear(self.hidden, self.weight[words if rows is None else rows], bias)

    def largest(self) -> Tensor:
        """The largest absolute value in each row of the outputs, (N, …)."""
        found = [logits.abs().amax(1) for _, logits in self.pieces()]
        return torch.cat(found).reshape(self.hidden.shape[:-1]) if found else self.hidden.new_zeros(0)

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows (R, V) of logits, a piece at a time: which they are, and the logits."""
        flat = self.hidden.reshape(-1, self.hidden.shape[-1])
        size = rows_at_once(len(self.weight))
        for start in range(0, len(flat), size):
            some = slice(start, start + size)
            yield some, F.linear(flat[some], self.weight, self.bias)


def rows_at_once(words: int) -> int:
    """How many rows of logits are a piece."""
    return max(1, PIECE // max(1, words))
