"""What a forward pass keeps for its derivatives: the bytes by which batches are cut, and whether it is small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.batches import resized
from spiritlevel.binding.context import Context
from spiritlevel.binding.cores import threads
from spiritlevel.binding.modules import bytes_of, memory_of
from spiritlevel.binding.parameters import as_leaves
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError
from spiritlevel.watching.watchers import DispatchWatch, tensors_in

_SMALL = 2**22  # multiply-adds in a pass over all samples, at a place each: a tenth of a millisecond,
_KEPT = 2**22  # bytes that it keeps: hardly more


def activation_bytes(context: Context) -> tuple[int, int]:
    """Bytes per sample that a forward pass saves for its derivative, all and the largest, from at most 16 samples."""
    return context.once_for_code("activation bytes", lambda: _activation_bytes(context))


def _activation_bytes(context: Context) -> tuple[int, int]:
    inputs, targets = context.first(16)
    if targets.ndim > 1:  # sequences and images, of which one is enough
        inputs, targets = resized(inputs, 1), targets[:1]
    problem, targets = context.problem.thinned(targets)
    params = as_leaves(problem.params)
    own = {memory_of(tensor) for tensor in [*params.values(), *problem.constants.values()]}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        pointer = memory_of(tensor)
        if pointer not in own:
            saved[pointer] = max(saved.get(pointer, 0), bytes_of(tensor))
        return tensor.detach()  # the tensor itself, kept by the operation that made it, would never be freed

    with problem.active():
        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                outputs = problem.outputs(params, inputs)
        except (InputError, RuntimeError):  # a model that differentiates by itself, for one, allows no hooks
            with _Sizes(saved):
                outputs = problem.outputs(params, inputs)
    problem.checked(outputs, inputs, targets)
    sizes = [*saved.values(), outputs.nbytes]
    return max(1, sum(sizes) // len(targets)), max(1, max(sizes) // len(targets))


@contextlib.contextmanager
def suited_threads(*contexts: Context) -> Iterator[None]:
    """One thread while measuring these, if waking others takes longer than a pass over all samples."""
    with contextlib.ExitStack() as stack:
        if all(map(_is_small, contexts)):
            stack.enter_context(in_turn())  # another thread would take the number for its own
            stack.enter_context(threads(1))
        yield


def _is_small(context: Context) -> bool:
    problem = context.problem
    if problem.sharded or problem.device.type != "cpu":
        return False
    numbers = sum(tensor.numel() for tensor in [*problem.params.values(), *problem.constants.values()])
    return numbers * context.count <= _SMALL and activation_bytes(context)[0] * context.count <= _KEPT


class _Sizes(DispatchWatch):
    """Counts the bytes of everything that operations return, instead of what they save."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not func.is_view:
            self.sizes[-len(self.sizes) - 1] = sum(bytes_of(tensor) for tensor in tensors_in(result))
        return result
