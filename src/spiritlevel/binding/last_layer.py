"""The linear layer that a model's outputs come straight from, and the model without it.

The layer may be a module or a call, its weight tied to an embedding or computed, as long as nothing is done to what it
returns: a model that scales or clips its logits keeps them. It is found by running the model once and seeing which
call returned the very tensor that is the output. From then on that call returns a stand-in without memory, and the
outputs count as those of the layer only if they *are* the stand-in, in every single pass.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spiritlevel.binding.batches import resized
from spiritlevel.binding.losses import Head, Unit, can_be_in_pieces
from spiritlevel.binding.parameters import as_leaves
from spiritlevel.errors import InputError, is_out_of_memory

if TYPE_CHECKING:
    from spiritlevel.binding.problem import Problem

LARGE_OUTPUTS = 2**20  # from this many outputs per sample, they are taken in pieces
FEW_POSITIONS = 16  # of a sample, for a quick look at all outputs there


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


def find_head(problem: Problem, inputs: Any, targets: Tensor) -> str:
    """Find out whether large outputs come straight from a linear layer, and if not, why they must be held whole.

    Two forward passes of these samples, once for each problem. The outputs are compared with those of the layer.
    Call inside `active()`.
    """
    facts = problem.facts
    if "head" not in facts:
        facts["head"], facts["why whole"] = 0, ""
        inputs, targets = resized(inputs, 1), targets[:1]
        positions = getattr(inputs, "positions", targets.shape[1:])
        sides = (side for tensor in (*problem.params.values(), *problem.constants.values()) for side in tensor.shape)
        if max(sides, default=1) * math.prod(positions) < LARGE_OUTPUTS:
            return ""  # no layer makes that many
        plain = inputs.inputs if isinstance(inputs, Unit) else inputs
        try:
            with torch.no_grad(), Searching() as searching:
                outputs = problem.outputs(problem.params, plain)
        except InputError:  # a batch may run where one sample does not; if not, that is reported there
            return ""
        if outputs.numel() < LARGE_OUTPUTS:
            return ""
        place = searching.place(outputs)
        whole = f"the {outputs.numel():,} outputs of a sample are held whole, several times, because"
        if not can_be_in_pieces(problem.loss, outputs.shape, targets, positions):
            facts["why whole"] = f"{whole} the loss {problem.loss.name} cannot be taken in pieces"
        elif not place or not _is_head(problem, place, plain, outputs):
            facts["why whole"] = f"{whole} they do not come straight from a linear layer"
        else:
            facts["head"], facts["words"] = place, outputs.shape[-1]
    return str(facts["why whole"])


def _is_head(problem: Problem, place: int, inputs: Any, outputs: Tensor) -> bool:
    """Whether these outputs are those of the linear map with this number."""
    try:
        with torch.enable_grad(), Removing(place) as removing:
            head = removing.taken(problem.outputs(as_leaves(problem.params), inputs))
        if head is None or head.shape != outputs.shape:
            return False
        problem.facts["head moves"] = tuple(part is not None and part.requires_grad for part in head)
        problem.facts["head names"] = [_named_like(problem, part) for part in (head.weight, head.bias)]
        head, flat = head.detach(), outputs.reshape(-1, outputs.shape[-1])
        rows = torch.linspace(0, len(flat) - 1, min(len(flat), FEW_POSITIONS)).long().to(flat.device)
        with torch.no_grad():
            few = F.linear(head.hidden.reshape(-1, head.hidden.shape[-1])[rows], head.weight, head.bias)
            error = float((flat[rows] - few).abs().max())
    except RuntimeError as failed:  # the model writes to its outputs, which then have no memory
        if is_out_of_memory(failed):
            raise
        return False
    largest = float(torch.linalg.vector_norm(outputs, ord=float("inf")))  # without a copy
    return error <= 100 * torch.finfo(outputs.dtype).eps * largest


def _named_like(problem: Problem, part: Tensor | None) -> str | None:
    """The parameter or constant that a part of the head is; "" for none, None for something computed."""
    if part is None:
        return ""
    whole = (part.data_ptr(), part.shape, part.stride())
    held = {**problem.params, **problem.constants}.items()
    return next((name for name, t in held if (t.data_ptr(), t.shape, t.stride()) == whole), None)


def trunk(problem: Problem) -> tuple[Problem, Callable[[Tensor], Head]] | None:
    """The same with what comes before the last layer as outputs, and the function that applies the layer.

    None unless the layer's weight and bias are tensors that the model holds, and what comes before them moves with
    the parameters. Facts are shared.
    """
    facts = problem.facts
    if not facts.get("head", 0) or problem.look is not None or None in facts["head names"]:
        return None
    if not facts["head moves"][0]:
        return None
    held, (weight, bias) = {**problem.params, **problem.constants}, facts["head names"]
    if weight not in held or (bias and bias not in held):
        return None
    seen = problem.looking(operator.attrgetter("hidden"))
    return seen, lambda hidden: Head(hidden, held[weight], held[bias] if bias else None)
