"""Whether the samples of a batch depend on each other: alone, in pairs and in the batch.

A number for a data set must not depend on how the set is cut into batches. It does where the model's output for a
sample, or its loss, depends on the other samples of the batch; then nothing is defined per sample either, and the
batches must be part of the definition (`batches="fixed"`), or the number is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.batches import resized, spread
from spiritlevel.binding.losses import Head
from spiritlevel.binding.parameters import nearby
from spiritlevel.binding.problem import LARGE, Problem
from spiritlevel.errors import InputError


def same_outputs(first: Tensor, second: Tensor) -> bool:
    """Whether two runs of a model gave the same outputs, up to rounding in a different order of summation.

    What is large among those that differ says how much rounding may be; a logit masked by -1e9 says nothing about it.
    """
    if first.shape != second.shape:
        return False
    tolerance, first, second = 1e-8 if first.dtype == torch.float64 else 1e-3, first.detach(), second.detach().to(first)
    differing = torch.where(first != second, second.nan_to_num().abs(), 0.0)
    largest = float(differing.max()) if differing.numel() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def usual_size(outputs: Tensor) -> Tensor:
    """What is not small for these outputs: the size of the smaller ones, at most 1, however many a mask makes large."""
    size = outputs.detach().abs().flatten()
    size = torch.where(size > 0, size, math.inf)
    return size.kthvalue(1 + len(size) // 10).values.clamp(max=1) if len(size) else outputs.new_ones(())


def depends_on_others(problem: Problem, inputs: Any, outputs: Tensor | None = None) -> bool:
    """Whether the outputs of the first or the last of these samples depend on the others.

    Each is compared with itself in a batch that holds nothing else, and both with themselves in a batch of two, unless
    the network is large. Call inside `problem.active()`. `outputs` are those of these samples, in whatever batch, where
    they are known.
    """
    small, _ = problem.thinned(torch.zeros(0))
    if small is not problem:  # some of the outputs in pieces are enough to tell
        problem, outputs = small, None
    with torch.no_grad():
        outputs = problem.outputs(problem.params, inputs) if outputs is None else outputs
        last = len(outputs) - 1
        pairs = [(0, 0), (last, last)]  # twice: batch statistics and squeezes make one sample special
        for rows in dict.fromkeys([*pairs, (0, last)] if problem.size <= LARGE else pairs):
            few = torch.tensor(rows)
            some, among = resized(inputs, few), outputs[few]
            apart = problem.outputs(problem.params, some)
            same = same_outputs(apart, among) or _works_in_single(problem, some)
            if not same or _more_than_rounding(problem, some, apart, among):
                return True
    return False


class _Narrowest(TorchDispatchMode):
    """The narrowest floating-point type of the values in a forward pass, by its rounding."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        values = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        self.rounding = max([self.rounding, *(torch.finfo(value.dtype).eps for value in values)])
        return result


def _works_in_single(problem: Problem, inputs: Any) -> bool:
    """Whether a model of float64 does a part of its work in float32, as a router or a norm may."""
    if problem.dtype != torch.float64:
        return False
    with _Narrowest() as narrowest:
        problem.outputs(problem.params, inputs)
    return narrowest.rounding == torch.finfo(torch.float32).eps


def _more_than_rounding(problem: Problem, inputs: Any, apart: Tensor, among: Tensor) -> bool:
    """Whether some outputs differ by more than a move of the weights in their last places makes of them.

    A mask of -1e4, or an output in large units, leaves much room to all others in `same_outputs`. So what is not small
    beside the smaller outputs is held against its own rounding: three more passes of these samples, seldom needed. The
    last places are those of float32, in which a model of float64 may do a part of its work.
    """
    difference = (apart - among).abs()
    doubtful = difference > 1e-4 * (apart.abs() + usual_size(apart))
    if not doubtful.any():
        return False
    weights = {name: t for name, t in problem.constants.items() if t.is_floating_point()}
    weights = {name: t for name, t in weights.items() if name not in problem.buffers} | problem.params
    eps = torch.finfo(torch.float32).eps
    moves = [(problem.outputs(moved, inputs) - apart).abs() for moved in nearby(weights, eps)]
    return bool((doubtful & (difference > 4 * torch.stack(moves).amax(0))).any())


def check_independence(problem: Problem, inputs: Any, outputs: Tensor | Head | None = None) -> None:
    """Raise `InputError` if the outputs of some of these samples depend on the others; see `depends_on_others`.

    Samples of the same shapes in a batch that is no larger than one looked at before need no second look.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    fact = ("independent", *(leaf.shape[1:] for leaf in tensors))
    together = max((len(leaf) for leaf in tensors), default=0)
    looked_at, most = problem.facts.get(fact, (None, 0))
    if looked_at is problem.params and 0 < together <= most:
        return
    if isinstance(outputs, Head):
        inputs, outputs = resized(inputs, spread(len(outputs.hidden))), None
    if outputs is not None:
        some = spread(len(outputs))
        inputs, outputs = resized(inputs, some), outputs[some]
    if depends_on_others(problem, inputs, outputs):
        raise InputError(
            "the model's output for a sample depends on the other samples of its batch (batch norm without running "
            "statistics, or a norm or attention across the samples?), so the result would depend on how the data are "
            "cut into batches, and nothing is defined per sample; batches='fixed' measures the batches as they come, "
            "batch_norm='batch' those of batch norm."
        )
    problem.facts[fact] = problem.params, together
