"""Whether the samples of a batch depend on each other: alone, in pairs and in the batch.

A number for a data set must not depend on how the set is cut into batches. It does where the model's output for a
sample, or its loss, depends on the other samples of the batch; then nothing is defined per sample either, and the
batches must be part of the definition (`batches="fixed"`), or the number is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.batches import resized, spread
from spiritlevel.binding.losses import Head
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
            if not same_outputs(problem.outputs(problem.params, resized(inputs, few)), outputs[few]):
                return True
    return False


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
