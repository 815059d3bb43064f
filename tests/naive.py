"""Slow, obvious twins of what the library computes cleverly: dense Hessians in float64, one sample at a time.

Nothing here imports spiritlevel, so that a test which compares the two has two independent sides.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

with warnings.catch_warnings():  # torch deprecates what it uses itself when it loads its forward mode
    warnings.simplefilter("ignore", DeprecationWarning)
    jvp(torch.clone, (torch.zeros(()),), (torch.zeros(()),))

LossLike = str | Callable[[Tensor, Tensor], Tensor]


def one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.one_hot(targets, outputs.shape[1]).to(outputs)


def exponential(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.reshape(len(targets), -1).shape[1] == 1:
        sign = torch.where(targets.reshape(-1) > 0, 1.0, -1.0).to(outputs)
        return torch.exp(-sign * outputs.reshape(-1))
    others = 1 - one_hot(outputs, targets)
    label = outputs.gather(1, targets[:, None])
    return (others * torch.exp(outputs - label)).sum(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    numbers = targets.is_floating_point() or outputs.shape[1] == 1
    wanted = targets.reshape(outputs.shape).to(outputs) if numbers else one_hot(outputs, targets)
    return 0.5 * (outputs - wanted).square().sum(1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    logits = outputs.reshape(len(targets))
    return F.binary_cross_entropy_with_logits(logits, targets.reshape(-1).to(logits), reduction="none")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared_error": squared_error,
    "exponential": exponential,
}


class Flat:
    """The mean loss of a float64 copy of a model in eval mode, as a function of one vector of its parameters.

    With `batch_norm="batch"` its batch norm layers use the statistics of the batch that they get.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossLike = "cross_entropy",
        params: Iterable[str] | None = None,
        batch_norm: str = "eval",
    ) -> None:
        self.model = copy.deepcopy(model).double().eval()
        if batch_norm == "batch":
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean = module.running_var = None  # nothing to read, so the batch is used
        self.loss = LOSSES[loss] if isinstance(loss, str) else loss
        wanted = None if params is None else set(params)
        self.shapes = {
            name: parameter.shape
            for name, parameter in self.model.named_parameters()
            if (parameter.requires_grad if wanted is None else name in wanted)
        }
        chosen = dict(self.model.named_parameters())
        self.point = torch.cat([chosen[name].detach().reshape(-1) for name in self.shapes])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)}

    def outputs(self, vector: Tensor, inputs: Any) -> Tensor:
        arguments: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else (inputs,)
        keywords: dict[str, Any] = {}
        if isinstance(inputs, dict):
            arguments, keywords = (), inputs
        result = functional_call(self.model, self.split(vector), arguments, keywords)
        return getattr(result, "logits", result)

    def __call__(self, vector: Tensor, inputs: Any, targets: Tensor) -> Tensor:
        return self.loss(self.outputs(vector, inputs), targets).mean()


def double(inputs: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def rows(inputs: Any, start: int, stop: int) -> Any:
    return tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) else x, inputs)


def symmetric(matrix: Tensor) -> Tensor:
    """The matrix, after making sure that it is a Hessian: some double backwards are silently wrong, and asymmetric."""
    error, scale = float((matrix - matrix.T).abs().max()), float(matrix.abs().max())
    assert error <= 1e-9 * max(scale, 1e-30), f"this dense Hessian is off its transpose by {error:.1e} of {scale:.1e}"
    return matrix


def _hessian(flat: Flat, inputs: Any, targets: Tensor) -> Tensor:
    """Forward over reverse, column by column.

    `torch.func.hessian` does the same through a vmap of the backward pass, which is wrong for batch norm with batch
    statistics (torch 2.13: 10 % off and asymmetric).
    """
    first = grad(lambda vector: flat(vector, inputs, targets))
    basis = torch.eye(len(flat.point), dtype=torch.float64)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path of encoder layers has no second derivatives
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return symmetric(vmap(lambda column: jvp(first, (flat.point,), (column,))[1])(basis).detach())
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def dense_hessian(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
) -> Tensor:
    """∇²ℓₙ of every sample in float64, (N, P, P), parameters in the order of `named_parameters()`."""
    flat, inputs = Flat(model, loss, params), double(inputs)
    each = [_hessian(flat, rows(inputs, n, n + 1), targets[n : n + 1]) for n in range(len(targets))]
    return torch.stack(each)


def mean_hessian(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
    batch_norm: str = "eval",
) -> Tensor:
    """∇²L of the mean loss of one batch in float64, (P, P); also for batch statistics, which couple the samples."""
    return _hessian(Flat(model, loss, params, batch_norm), double(inputs), targets)


def gradient(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
    batch_norm: str = "eval",
) -> Tensor:
    """∇L of the mean loss of one batch in float64, (P,)."""
    flat = Flat(model, loss, params, batch_norm)
    return grad(flat)(flat.point, double(inputs), targets).detach()


def finite_difference_hessian(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
    batch_norm: str = "eval",
    step: float = 1e-4,
) -> Tensor:
    """∇²L of the mean loss from differences of gradients (fourth order), (P, P): no second derivative is taken."""
    flat, inputs = Flat(model, loss, params, batch_norm), double(inputs)
    first = grad(flat)

    def row(direction: Tensor) -> Tensor:
        def at(t: float) -> Tensor:
            return first(flat.point + t * direction, inputs, targets).detach()

        return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)

    return torch.stack([row(direction) for direction in torch.eye(len(flat.point), dtype=torch.float64)])


def per_sample_traces(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
) -> Tensor:
    """Tr ∇²ℓₙ of every sample, (N,)."""
    return dense_hessian(model, inputs, targets, loss, params).diagonal(dim1=1, dim2=2).sum(1)


def block_traces(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: LossLike = "cross_entropy",
    params: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """The trace of the diagonal block of every parameter tensor, name -> (N,)."""
    names = None if params is None else list(params)
    diagonals = dense_hessian(model, inputs, targets, loss, names).diagonal(dim1=1, dim2=2)
    return {name: part.reshape(len(targets), -1).sum(1) for name, part in _columns(Flat(model, loss, names), diagonals)}


def _columns(flat: Flat, matrix: Tensor) -> Iterable[tuple[str, Tensor]]:
    sizes = [shape.numel() for shape in flat.shapes.values()]
    return zip(flat.shapes, matrix.split(sizes, dim=1), strict=True)


def total_traces(model: nn.Module, inputs: Any, targets: Tensor, loss: Any = "cross_entropy") -> Tensor:
    """The trace of each sample's Hessian: the sum of its blocks."""
    return torch.stack(list(block_traces(model, inputs, targets, loss).values())).sum(0)
