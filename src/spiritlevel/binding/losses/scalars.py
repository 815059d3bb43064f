"""Scalars of the softmax that keep all their digits at any margin."""

from __future__ import annotations

import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.binding.devices import doubled
from spiritlevel.errors import InputError


def softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax S in float64, the index of its top entry, and q = 1 − S_top summed from the other entries."""
    probabilities = torch.softmax(doubled(logits), dim=-1)
    top = probabilities.argmax(dim=-1)
    others = probabilities.scatter(-1, top.unsqueeze(-1), 0.0)
    return probabilities, top, others.sum(-1)


def _check_logits(name: str, logits: Tensor) -> None:
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(f"{name} needs logits of shape (samples, classes >= 2), got {tuple(logits.shape)}.")


@checked
def confidence_gap(logits: Tensor) -> Tensor:
    """1 − Σ_c S_c², the lack of confidence of a softmax, in float64 and without cancellation.

    With p the entries except the top one and q = Σp it is 2q − q² − Σp² (mathematics 2.2): zero only for a one-hot
    softmax, 1 − 1/C for a uniform one. Cost: O(N·C). Exact to rounding at any margin. Reference: paper A, section 3.1.

    >>> float(confidence_gap(torch.tensor([[40.0, 0.0]])))  # 1 - (S**2).sum() gives 0 here
    8.49670851...e-18
    """
    _check_logits("confidence_gap", logits)
    probabilities, top, q = softmax_parts(logits)
    others = probabilities.scatter(-1, top.unsqueeze(-1), 0.0)
    return 2 * q - q.square() - others.square().sum(-1)


@checked
def aceht(inputs: Tensor, logits: Tensor) -> Tensor:
    """The affine cross-entropy Hessian trace (‖x‖² + 1)(1 − Σ_c S_c²) of every sample.

    For an affine softmax classifier with bias it *is* the trace of the per-sample Hessian, whatever the label; for the
    last layer of any network it is that layer's share, with x the layer's input. Cost: O(N·(d + C)). Exact.
    Reference: paper A, Proposition 3.1.

    >>> aceht(torch.ones(1, 3), torch.zeros(1, 2))
    tensor([2.], dtype=torch.float64)
    """
    _check_logits("aceht", logits)
    count = len(inputs) if inputs.ndim else 0
    if count != len(logits):
        raise InputError(f"aceht needs one input per row of logits, got {count} inputs and {len(logits)} logits.")
    flat = doubled(inputs).reshape(len(inputs), -1)
    return (flat.square().sum(1) + 1) * confidence_gap(logits)
