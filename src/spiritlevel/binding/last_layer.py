"""The linear layer that a model's outputs come straight from, and the model without it.

The layer may be a module or a call, its weight tied to an embedding or computed, as long as nothing is done to what it
returns: a model that scales or clips its logits keeps them. It is found by running the model once and seeing which
call returned the very tensor that is the output. From then on that call returns a stand-in without memory, and the
outputs count as those of the layer only if they *are* the stand-in, in every single pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spiritlevel.binding.losses import Head


def _of_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Head | None:
    return Head(input, weight, bias) if weight.ndim == 2 else None


def _of_product(input: Tensor, other: Any, *rest: Any, **more: Any) -> Head | None:
    fits = isinstance(other, Tensor) and other.ndim == 2 and input.ndim > 1 and not rest and not more
    return Head(input, other.T) if fits else None


LINEAR: dict[Any, Callable[..., Head | None]] = {
    F.linear: _of_linear,
    torch.matmul: _of_product,
    Tensor.matmul: _of_product,
    Tensor.__matmul__: _of_product,
}


class Searching(TorchFunctionMode):
    """Remembers what every linear map of a forward pass returns."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in LINEAR:
            self.results.append(weakref.ref(result))
        return result

    def place(self, outputs: Tensor) -> int:
        """The number of the call that returned the outputs, from 1; 0 if none did, or if they were changed since."""
        changed = outputs._version > 0
        return next((n for n, ref in enumerate(self.results, 1) if ref() is outputs and not changed), 0)


class Removing(TorchFunctionMode):
    """Makes one of the linear maps return a stand-in, and keeps what it was given."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.calls = place, 0
        self.head: Head | None = None
        self.stand_in: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LINEAR:
            self.calls += 1
            if self.calls == self.place:
                self.head = LINEAR[func](*args, **kwargs)
                if self.head is not None:
                    self.stand_in = self.head.stand_in()
                    return self.stand_in
        return func(*args, **kwargs)

    def taken(self, outputs: Tensor) -> Head | None:
        """The head, if the outputs are those of the layer as it returned them."""
        return self.head if outputs is self.stand_in and not outputs._version else None
