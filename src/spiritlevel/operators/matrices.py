"""Curvature matrices of a loss over a data set, known through their products: Hessian, Gauss-Newton, Fisher, variance.

All are built from one function, the product of one batch's matrix with one vector (`products`), and share the way it is
repeated over a data set (`averaging`).
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.context import Context
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.operators.averaging import MeanMatrix
from spiritlevel.operators.differences import DifferencedHessian
from spiritlevel.operators.products import Product, fisher_product, gauss_newton_product, hessian_product


@checked
def hessian(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    params: Any = None,
    weight_decay: float = 0.0,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    **reading: Unpack[Reading],
) -> Operator:
    """The Hessian H = ∇²L of the mean loss L(θ) = 1/N Σₙ ℓ(φ(θ; xₙ), yₙ), plus weight_decay · I.

    A product is the derivative of the gradient along v, H v = 1/N Σₙ [Jᵀ(A·Jv) + (Σ_c g_c ∇²φ_c) v], where g and A are
    the loss's gradient and Hessian in the outputs φ and J = ∂φ/∂θ. Exact to rounding, even at tiny losses. Cost: about
    two gradients per product when replayed, three when recomputed, and about five for the first one. The parameters are
    copied: later training steps do not change the operator.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader or batches that can be read again; see `memory`.
        loss: a name, a `torch.nn` loss or a callable (outputs, targets) → (N,); see `sample_traces`.
        params: names, prefixes or globs of the parameters to measure; by default all that require grad.
        weight_decay: γ of a penalty ½γ‖θ‖²; adds γ to every eigenvalue.
        batch_norm: "eval", or "batch" for batch statistics with frozen buffers; the batches are then part of the
            definition: L is the mean over batches of each batch's loss, weighted by its size.
        batch_size: how many samples to take at once; chosen from `memory` unless given. Changes results only by
            rounding, except with batch_norm="batch".
        memory: bytes, or a string such as "2GB"; by default half of what is available. Batches are replayed from
            memory as far as half of it allows; the others are read again and recomputed.
        group: a `torch.distributed` group; every rank passes the same model, data and options, makes the same
            products and takes its share of the batches. Vectors are those of rank 0, results the same on all. Where
            the ranks' batch sizes differ, the smallest is used. `None` never communicates, unless the model is sharded.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    For a model that `fully_shard` has sharded, every rank passes the same data, and vectors hold the entries of its own
    shards. Products are differences of gradients with an error of their own, `op.error` for a unit vector, which
    results carry as `tolerance` (mathematics 4.12); cost: two gradients per product, four for some.

    Reference: Pearlmutter, Neural Comput. 6 (1994), doi:10.1162/neco.1994.6.1.147.

    >>> import torch
    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    >>> hessian(net, data, loss="squared_error") @ torch.tensor([1.0])  # mean of x²
    tensor([5.])
    """
    context = _unordered(model, data, loss, params, batch_norm, batch_size, memory, group, reading, sharded=True)
    return hessian_in(context, weight_decay)


@checked
def gauss_newton(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    params: Any = None,
    weight_decay: float = 0.0,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    **reading: Unpack[Reading],
) -> Operator:
    """The generalised Gauss-Newton matrix G = 1/N Σₙ JₙᵀAₙJₙ, plus weight_decay · I.

    J = ∂φ/∂θ, A = ∂²ℓ/∂φ². Positive semidefinite for convex losses; for cross entropy it is the Fisher matrix under
    the model's own labels. Its trace equals the Hessian's for ReLU networks (mathematics 4.2); its eigenvalues in
    general do not. Exact to rounding, even at tiny losses. Cost: about one gradient per product when replayed.
    Arguments as in `hessian`.

    Reference: Schraudolph, Neural Comput. 14 (2002), doi:10.1162/08997660260028683.

    >>> import torch
    >>> net = nn.Linear(2, 3)  # affine: Hessian and Gauss-Newton matrix are the same
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    >>> torch.allclose(gauss_newton(net, data).dense(), hessian(net, data).dense())
    True
    """
    return gauss_newton_in(
        _unordered(model, data, loss, params, batch_norm, batch_size, memory, group, reading), weight_decay
    )


@checked
def empirical_fisher(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    params: Any = None,
    weight_decay: float = 0.0,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    **reading: Unpack[Reading],
) -> Operator:
    """The empirical Fisher matrix F = 1/N Σₙ gₙgₙᵀ of the per-sample gradients gₙ = ∇ℓₙ, plus weight_decay · I.

    The gradients are those of the true labels, so F is the uncentred second moment of the gradients, not the Fisher
    matrix of the model (that is `gauss_newton` for cross entropy), and far from any curvature where the model is wrong.
    A product is F v = 1/N Gᵀ(G v), G the (N, P) matrix of per-sample gradients, without forming G. Exact to rounding,
    even at tiny losses. Cost: about one gradient per product when replayed. Arguments as in `hessian`.

    Reference: Kunstner, Balles & Hennig, NeurIPS 2019, arXiv:1905.12558.

    >>> import torch
    >>> net = nn.Linear(2, 3)
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    >>> float(empirical_fisher(net, data).dense().diagonal().min()) >= 0
    True
    """
    context = _unordered(model, data, loss, params, batch_norm, batch_size, memory, group, reading)
    return empirical_fisher_in(context, weight_decay)


@checked
def hessian_variance(
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    **reading: Unpack[Reading],
) -> Operator:
    """The variance of the batches' Hessians, Σ = E_b[H_b²] − H² with H = E_b[H_b]: what limits the step size of SGD.

    SGD with step α on batches b is stable in mean square if λ_max((I − αH)² + α²Σ) ≤ 1; in one dimension with
    curvature a and variance s² that is a ≤ (1 + √(1 − α²s²))/α (mathematics 9.2; paper C prints it without the 1/α). Σ
    for batches of size B without replacement is (n − B)/(B(n − 1)) times that of single samples, batch_size=1.

    The batches are those of the data, or `batch_size` samples each in order, never split, a larger batch weighing
    more. Exact to rounding; positive semidefinite. Cost: three Hessian products. Weight decay would change nothing.
    Other arguments as in `hessian`.

    Reference: Wu, Ma & E, NeurIPS 2018, "How SGD selects the global minima in over-parameterized learning".

    >>> import torch
    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]])
    >>> hessian_variance(net, data, loss="squared_error", batch_size=1) @ torch.tensor([1.0])  # Hessians 1 and 4
    tensor([2.2500])
    """
    context = _unordered(model, data, loss, params, batch_norm, batch_size, memory, group, reading, whole=True)
    if batch_size is None and context.batches.samples is not None:
        raise InputError(
            "hessian_variance needs to know the batches: pass batch_size=, or data that come in batches, such as a "
            "data loader."
        )
    matrix = MeanMatrix(hessian_product, context)

    def multiply(rows: Tensor) -> Tensor:
        mean, mean_square = matrix.moments(rows, 2)
        return mean_square - matrix.multiply(mean.to(rows.dtype))

    return matrix.operator(multiply)


# ---------------------------------------------------------------- in a context that is already bound


def hessian_in(context: Context, weight_decay: float = 0.0) -> Operator:
    """The Hessian of the mean loss; see `hessian`."""
    if context.problem.sharded:
        return context.once(("differences", weight_decay), lambda: DifferencedHessian(context, weight_decay))
    return _in(context.of_means, hessian_product, weight_decay)


def gauss_newton_in(context: Context, weight_decay: float = 0.0) -> Operator:
    """The Gauss-Newton matrix; see `gauss_newton`."""
    return _in(context.of_means, gauss_newton_product, weight_decay)


def empirical_fisher_in(context: Context, weight_decay: float = 0.0) -> Operator:
    """The empirical Fisher matrix; see `empirical_fisher`."""
    if context.coupling == "loss":
        raise InputError(
            "the empirical Fisher matrix needs the gradient of each sample's own loss, but here the loss "
            "of a sample depends on the rest of its batch; use hessian or gauss_newton."
        )
    return _in(context, fisher_product, weight_decay)


def _in(context: Context, product: Product, weight_decay: float) -> Operator:
    """Built once per context: what it keeps to replay its products serves the next caller too."""
    return context.once(product, lambda: MeanMatrix(product, context)).operator(weight_decay=weight_decay)


def _unordered(
    model: nn.Module,
    data: Any,
    loss: Any,
    params: Any,
    batch_norm: str,
    batch_size: int | None,
    memory: int | str | None,
    group: Any,
    reading: Reading,
    whole: bool = False,
    sharded: bool = False,
) -> Context:
    """A mean over samples has no order: a loader that shuffles is read in the order of its data set."""
    return Context(
        model,
        data,
        loss=loss,
        params=params,
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        group=group,
        ordered=False,
        whole=whole,
        sharded=sharded,
        **reading,
    )
