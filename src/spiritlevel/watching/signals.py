"""The outputs of a network's layers while it runs, channel by channel, ready for differentiation.

A *layer* is a product with parameters: a linear layer, a convolution, a bare matrix. Its output is a *signal*, with one
number for each channel at each of many places (samples, positions). Which axis the samples are on does not matter
here, only which one the channels are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.parameters import depth
from spiritlevel.binding.problem import Problem
from spiritlevel.watching.graph import written_attention
from spiritlevel.watching.operations import Degree, Layer, Operation, called
from spiritlevel.watching.watchers import FunctionWatch

_NUMBERS = 2**22  # turned into rows of float64 at once


@dataclass(frozen=True, eq=False)
class Signal:
    """The output of one call of a layer, and its axes of channels, counted from the last."""

    value: Tensor
    axes: tuple[int, ...]

    def rows(self, tensor: Tensor) -> Iterator[Tensor]:
        """A tensor shaped like the output as rows (places, channels) in float64, a few places at a time."""
        moved = tensor.detach().movedim(self.axes, tuple(range(-len(self.axes), 0)))
        if moved.ndim == len(self.axes):
            moved = moved[None]
        step = max(1, _NUMBERS // max(1, moved[0].numel()))
        for part in moved.split(step):
            yield part.double().flatten(-len(self.axes)).reshape(-1, self.channels)

    @property
    def channels(self) -> int:
        """How many there are."""
        count = 1
        for axis in self.axes:
            count *= self.value.shape[axis]
        return count


class Signals(FunctionWatch):
    """A context that keeps the output of every layer run inside; the network's outputs can be differentiated in them.

    Parameters are recognised by their tensors, `problem.params` and `problem.constants`; a weight that is computed from
    others is recognised in a linear layer or a convolution, not in a bare product. What runs inside a call of
    PyTorch's own (an LSTM) or under `vmap` is not seen; attention of `nn.MultiheadAttention` is written out and is.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.found: list[Signal] = []
        self._weights = {id(tensor) for tensor in (*problem.params.values(), *problem.constants.values())}
        self._level = depth()

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if depth() != self._level:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return written_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        operation = called(func)
        axes = self._channels(operation, args, kwargs) if operation.layer is not None else None
        if axes is None or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if torch.is_grad_enabled() and not result.requires_grad:
            result = result.detach().requires_grad_()
        self.found.append(Signal(result, axes))
        return result.clone()  # what comes next may write into it

    def _is_weight(self, value: Any) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        if not isinstance(value, Tensor):
            return False
        return id(value) in self._weights or (value._base is not None and id(value._base) in self._weights)

    def _channels(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
        """The axes of channels in the result, `None` if this call is not a layer."""
        given = [*args, *(kwargs[key] for key in ("input", "weight", "other", "mat2") if key in kwargs)]
        if operation.layer in (Layer.DENSE, Layer.CONVOLUTION, Layer.TRANSPOSED):
            if self._is_weight(given[0]):  # a product of two weights
                return None
            return (-1,) if operation.layer is Layer.DENSE else (1 - given[1].ndim,)
        if operation.name == "einsum":
            return self._letters(*args)
        reverse = operation.name == "rmatmul"
        if operation.degree is Degree.ADDED_BILINEAR:
            given = given[1:]
        elif operation.degree is not Degree.BILINEAR and not reverse:
            return None
        if len(given) < 2:
            return None
        first, second = given[1::-1] if reverse else given[:2]
        if min(first.ndim, second.ndim) < 2 or self._is_weight(first) == self._is_weight(second):
            return None
        return (-1,) if self._is_weight(second) else (-2,)

    def _letters(self, equation: Any, *operands: Any) -> tuple[int, ...] | None:
        """The same for a sum over indices of a weight and something else."""
        operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
        known = [self._is_weight(value) for value in operands]
        if not isinstance(equation, str) or known not in ([True, False], [False, True]) or "." in equation:
            return None
        left, _, right = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        weight, other = terms[known.index(True)], terms[known.index(False)]
        return tuple(n - len(right) for n, letter in enumerate(right) if letter in weight and letter not in other)
