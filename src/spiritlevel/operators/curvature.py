"""Curvature matrices of a loss over a data set, known by their products: Hessian, Gauss-Newton, Fisher, variance.

All are built from one function, the product of one batch's matrix with one vector, and share how it is repeated.
A batch's product is traced once to a list of operations and cut in two: what follows from the parameters and the data
alone, and what follows from the vector. The first part is kept for as many batches as fit the memory budget
(*replayed*) and computed again for the others (*recomputed*); both give the same bits. Where tracing fails the
product is differentiated anew each time; where the model has no forward derivatives, by reverse mode alone.

The loss enters through its closed-form gradient and output Hessian, so products stay right at tiny losses, where
autodiff through a cross entropy returns half the curvature or none (mathematics 2.2).
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize, grad, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from spiritlevel.binding.batches import Batches, Fingerprint, is_pair_of_tensors, sliced
from spiritlevel.binding.cores import at_a_time, batches_that_fit, even_size, side_by_side
from spiritlevel.binding.losses import CallableLoss, Loss
from spiritlevel.binding.memory import parse_memory
from spiritlevel.binding.parameters import Params, along, as_leaves, nearby
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, first_line
from spiritlevel.estimators import Operator
from spiritlevel.watching.derivatives import check_derivatives

__all__ = ["empirical_fisher", "gauss_newton", "hessian", "hessian_variance"]

# ---------------------------------------------------------------- the matrices


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
) -> Operator:
    """The Hessian H = ∇²L of the mean loss L(θ) = 1/N Σₙ ℓ(φ(θ; xₙ), yₙ), plus weight_decay · I.

    A product is the derivative of the gradient along v, H v = 1/N Σₙ [Jᵀ(A·Jv) + (Σ_c g_c ∇²φ_c) v], where g and A are
    the loss's gradient and Hessian in the outputs φ and J = ∂φ/∂θ. Exact to rounding, also at tiny losses. Cost: about
    two gradients a product when replayed, three when recomputed, and some five once for the first. The parameters are
    copied: later training steps do not change the operator.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader or batches that can be read again; see `memory`.
        loss: a name, a `torch.nn` loss or a callable (outputs, targets) → (N,).
        params: names, prefixes or globs of the parameters to measure; all that require grad unless given.
        weight_decay: γ of a penalty ½γ‖θ‖²; adds γ to every eigenvalue.
        batch_norm: "eval", or "batch" for batch statistics with frozen buffers; the batches are then part of the
            definition: L is the mean over batches of each batch's loss, weighted by its size.
        batch_size: how many samples to take at once; chosen from `memory` unless given. Changes no result but for
            rounding, except with batch_norm="batch".
        memory: bytes, or a text such as "2GB"; half of what is available unless given. Batches are replayed from
            memory as far as half of it goes, and read again and recomputed beyond.
        group: a `torch.distributed` group; every rank passes the same model, data and options, makes the same
            products and takes its share of the batches. Vectors are those of rank 0, results the same on all. Where
            the ranks' batch sizes differ the smallest is used. `None` never communicates.

    Reference: Pearlmutter, Neural Comput. 6 (1994), doi:10.1162/neco.1994.6.1.147.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    >>> hessian(net, data, loss="squared_error") @ torch.tensor([1.0])  # mean of x²
    tensor([5.])
    """
    problem = Problem(model, loss=loss, params=params, batch_norm=batch_norm)
    return _Matrix(hessian_product, problem, data, batch_size, memory, group).operator(weight_decay=weight_decay)


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
) -> Operator:
    """The generalised Gauss-Newton matrix G = 1/N Σₙ JₙᵀAₙJₙ, plus weight_decay · I.

    J = ∂φ/∂θ, A = ∂²ℓ/∂φ². Positive semidefinite for convex losses; for cross entropy it is the Fisher matrix under
    the model's own labels. Its trace equals the Hessian's for ReLU networks (mathematics 4.2); its eigenvalues in
    general do not. Exact to rounding, also at tiny losses. Cost: about one gradient a product when replayed. Arguments
    as in `hessian`.

    Reference: Schraudolph, Neural Comput. 14 (2002), doi:10.1162/08997660260028683.

    >>> net = nn.Linear(2, 3)  # affine: Hessian and Gauss-Newton matrix are the same
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    >>> torch.allclose(gauss_newton(net, data).dense(), hessian(net, data).dense())
    True
    """
    problem = Problem(model, loss=loss, params=params, batch_norm=batch_norm)
    return _Matrix(_gauss_newton_product, problem, data, batch_size, memory, group).operator(weight_decay=weight_decay)


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
) -> Operator:
    """The empirical Fisher matrix F = 1/N Σₙ gₙgₙᵀ of the per-sample gradients gₙ = ∇ℓₙ, plus weight_decay · I.

    The gradients are those of the true labels, so F is the uncentred second moment of the gradients, not the Fisher
    matrix of the model (that is `gauss_newton` for cross entropy), and far from a curvature where the model is wrong.
    A product is F v = 1/N Gᵀ(G v), G the (N, P) matrix of per-sample gradients, without forming G. Exact to rounding,
    also at tiny losses. Cost: about one gradient a product when replayed. Arguments as in `hessian`.

    Reference: Kunstner, Balles & Hennig, NeurIPS 2019, arXiv:1905.12558.

    >>> net = nn.Linear(2, 3)
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
    >>> float(empirical_fisher(net, data).dense().diagonal().min()) >= 0
    True
    """
    problem = Problem(model, loss=loss, params=params, batch_norm=batch_norm)
    return _Matrix(_fisher_product, problem, data, batch_size, memory, group).operator(weight_decay=weight_decay)


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
) -> Operator:
    """The variance of the batches' Hessians, Σ = E_b[H_b²] − H² with H = E_b[H_b]: what limits the step size of SGD.

    SGD with step α on batches b is stable in mean square if λ_max((I − αH)² + α²Σ) ≤ 1; in one dimension with
    curvature a and variance s² that is a ≤ (1 + √(1 − α²s²))/α (mathematics 9.2; paper C prints it without the 1/α). Σ
    for batches of size B without replacement is (n − B)/(B(n − 1)) times that of single samples, batch_size=1.

    The batches are those of the data, or `batch_size` samples each in order, never split, a larger batch weighing
    more. Exact to rounding; positive semidefinite. Cost: three Hessian products. Weight decay would change nothing.
    Other arguments as in `hessian`.

    Reference: Wu, Ma & E, NeurIPS 2018, "How SGD selects the global minima in over-parameterized learning".

    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [0.0]])
    >>> hessian_variance(net, data, loss="squared_error", batch_size=1) @ torch.tensor([1.0])  # Hessians 1 and 4
    tensor([2.2500])
    """
    if batch_size is None and is_pair_of_tensors(data):
        raise InputError(
            "hessian_variance needs to know the batches: pass batch_size=, or data that come in batches, such as a "
            "data loader."
        )
    problem = Problem(model, loss=loss, params=params, batch_norm=batch_norm)
    matrix = _Matrix(hessian_product, problem, data, batch_size, memory, group, whole=True)

    def multiply(rows: Tensor) -> Tensor:
        mean, mean_square = matrix.moments(rows, 2)
        return mean_square - matrix.multiply(mean.to(rows.dtype))

    return matrix.operator(multiply)


# ---------------------------------------------------------------- the product of one batch

Product = Callable[[Problem, Params, Params, Any, Tensor], Params]
"""(problem, v, θ, x, y) → the matrix of the batch's summed loss, times v."""


def hessian_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The Hessian of the batch's summed loss at `params`, times v; use it inside `problem.active()`."""
    return _in_either_mode(_hessian_forward, _hessian_in_reverse, problem, v, params, inputs, targets)


def _gauss_newton_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    return _in_either_mode(_gauss_newton_forward, _gauss_newton_in_reverse, problem, v, params, inputs, targets)


def _fisher_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    return _in_either_mode(_fisher_forward, _fisher_in_reverse, problem, v, params, inputs, targets)


def _in_either_mode(forward: Product, reverse: Product, problem: Problem, *args: Any) -> Params:
    """By forward over reverse mode, and if the model has no forward derivatives by reverse mode alone.

    A `torch.autograd.Function` of somebody's own, for one, mostly has none.
    """
    if not problem.reverse_only:
        try:
            return forward(problem, *args)
        except RuntimeError as error:
            inside = cast(Any, torch._C)._functorch.maybe_current_level() is not None  # of vmap or a trace
            if inside or isinstance(error, InputError | torch.OutOfMemoryError):
                raise
            try:
                result = reverse(problem, *args)
            except RuntimeError as again:
                raise _not_twice(problem, again) from error
            problem.reverse_only = True
            return result
    return reverse(problem, *args)


def _hessian_forward(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    def gradient(point: Params) -> Params:
        outputs, pull, *_ = vjp(lambda p: problem.outputs(p, inputs), point)
        return pull(_slope(problem.loss, outputs, targets))[0]

    return jvp(gradient, (params,), (v,))[1]


def _gauss_newton_forward(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    def network(point: Params) -> Tensor:
        return problem.outputs(point, inputs)

    outputs, pull, *_ = vjp(network, params)
    moved = jvp(network, (params,), (v,))[1]
    return pull(_output_hessian_product(problem.loss, outputs, targets, moved))[0]


def _fisher_forward(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    def network(point: Params) -> Tensor:
        return problem.outputs(point, inputs)

    outputs, pull, *_ = vjp(network, params)
    moved = jvp(network, (params,), (v,))[1]
    return pull(_slope_along(problem.loss, outputs, targets, moved))[0]


def _slope_along(loss: Loss, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
    """For every sample g (gᵀu) with g = ∂ℓ/∂φ, typed like φ."""
    slope = output_slope(loss, outputs, targets)
    along = (slope * direction).flatten(1).sum(1).reshape(-1, *[1] * (slope.ndim - 1))
    return (slope * along).to(outputs.dtype)


def _hessian_in_reverse(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    point = as_leaves(params)
    outputs = problem.outputs(point, inputs)
    gradient = _pulled(outputs, point, _slope(problem.loss, outputs, targets), create_graph=True)
    return {name: part.detach() for name, part in _pulled(_along(gradient, v), point).items()}


def _gauss_newton_in_reverse(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    outputs, point, moved = _moved_in_reverse(problem, v, params, inputs)
    return _pulled(outputs, point, _output_hessian_product(problem.loss, outputs.detach(), targets, moved))


def _fisher_in_reverse(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    outputs, point, moved = _moved_in_reverse(problem, v, params, inputs)
    return _pulled(outputs, point, _slope_along(problem.loss, outputs.detach(), targets, moved))


def _moved_in_reverse(problem: Problem, v: Params, params: Params, inputs: Any) -> tuple[Tensor, Params, Tensor]:
    """φ with its graph, the parameters in it, and Jv: the derivative of vᵀJᵀu in dummy weights u."""
    point = as_leaves(params)
    outputs = problem.outputs(point, inputs)
    dummy = torch.zeros_like(outputs, requires_grad=True)
    along = _along(_pulled(outputs, point, dummy, create_graph=True), v)
    return outputs, point, _pulled(along, {"": dummy}, retain_graph=True)[""].detach()


def outputs_along(problem: Problem, v: Params, params: Params, inputs: Any) -> tuple[Tensor, Tensor]:
    """φ and Jv by forward mode, or by reverse mode where the model has no forward derivative or a wrong one."""
    if not problem.reverse_only:
        try:
            outputs, moved = along(lambda point: problem.outputs(point, inputs), params, v)
        except RuntimeError as error:
            if isinstance(error, InputError | torch.OutOfMemoryError):
                raise
        else:
            return outputs.detach(), moved.detach()
    try:
        outputs, _, moved = _moved_in_reverse(problem, v, params, inputs)
    except RuntimeError as error:
        if isinstance(error, InputError | torch.OutOfMemoryError):
            raise
        raise _not_twice(problem, error) from error
    return outputs.detach(), moved


def _not_twice(problem: Problem, error: Exception) -> InputError:
    return InputError(
        f"the model {type(problem.model).__name__} cannot be differentiated twice: {first_line(error)}; "
        "write that part in other operations, or leave it out with params=."
    )


def _along(gradient: Params, v: Params) -> Tensor:
    return torch.stack([(gradient[name] * v[name]).sum() for name in gradient]).sum()


def _pulled(value: Tensor, point: Params, vector: Tensor | None = None, **options: bool) -> Params:
    """The gradient of vectorᵀvalue in `point`, zero where there is none."""
    if not value.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in point.items()}
    parts = torch.autograd.grad(value, list(point.values()), vector, materialize_grads=True, **options)
    return dict(zip(point, parts, strict=True))


def loss_gradient(problem: Problem, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The gradient of the batch's summed loss at `params`; use it inside `problem.active()`."""
    point = as_leaves(params)
    outputs = problem.outputs(point, inputs)
    return _pulled(outputs, point, output_slope(problem.loss, outputs.detach(), targets).to(outputs.dtype))


def output_slope(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """∂ℓ/∂φ, shaped like φ; in float64 where it has a closed form."""
    if isinstance(loss, CallableLoss):
        return grad(lambda point: loss.values(point, targets).sum())(outputs)
    return loss.gradient(outputs, targets).reshape(outputs.shape)


def _output_hessian_product(loss: Loss, outputs: Tensor, targets: Tensor, direction: Tensor) -> Tensor:
    """A·u = ∂²ℓ/∂φ² u, shaped and typed like φ."""
    if isinstance(loss, CallableLoss):
        return jvp(lambda point: output_slope(loss, point, targets), (outputs,), (direction,))[1]
    product = loss.product(outputs, targets, direction.reshape(outputs.shape))
    return product.reshape(outputs.shape).to(outputs.dtype)


def _slope(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """∂ℓ/∂φ, typed like φ, in a form whose derivative along a direction u is the closed form A·u."""
    if isinstance(loss, CallableLoss):
        return output_slope(loss, outputs, targets)
    here = outputs.detach()
    return output_slope(loss, here, targets).to(outputs.dtype) + _output_hessian_product(
        loss, here, targets, outputs - here
    )


# ---------------------------------------------------------------- the product of a data set

_BatchProduct = Callable[[Tensor], Sequence[Tensor]]
"""Vectors (k, P) → the matrix of the batch's summed loss times each, in the parameters' shapes (k, …)."""


class _Batch(NamedTuple):
    samples: int
    product: _BatchProduct
    calls_model: bool = False


_CACHE = 10 * 2**20  # bytes of the largest activation of a batch, and of that times vectors; more makes nothing faster
_FOOTPRINT = 8  # bytes that a product takes for each byte of activations
_MOST_VECTORS = 32  # multiplied at once
_MOST_SHAPES = 16  # of batches that are traced
_FEW = 16  # samples on which a trace is tried
_ROUNDING = 10  # times the change between parameters that are the same but for rounding
_Flat = Callable[..., tuple[Tensor, ...]]  # of a vector, the parameters and a batch, each as tensors
_TENSOR = object()  # marks the place of a tensor among a batch's leaves


class _Matrix:
    """The mean over a data set of a matrix that is known by its products with each batch."""

    def __init__(
        self,
        product: Product,
        problem: Problem,
        data: Any,
        batch_size: int | None,
        memory: int | str | None,
        group: Any = None,
        whole: bool = False,
    ) -> None:
        self.problem, self.product = problem, product
        self.ranks = problem.shared_by(group)
        self.params = list(problem.params.values())
        self.whole = whole = whole or problem.batch_norm == "batch"
        with self.ranks.together():
            self.batches = Batches(data, size=batch_size, ordered=False, whole=whole)
            budget = parse_memory(memory)
            saved, largest_tensor = _activation_bytes(problem, self.batches)
        self.at_a_time = at_a_time(problem.device)
        limit = budget // (2 * max(2, self.at_a_time) * _FOOTPRINT * saved)  # samples times vectors
        if batch_size is None and not whole:
            self.batches.size = self._batch_size(min(limit, _CACHE // largest_tensor))
        if self.batches.size is not None and not whole:
            self.batches.size = self.ranks.least(self.batches.size)
        with self.ranks.together():
            sizes, self.fingerprint = self._inspect()
        self.ranks.same((sizes, self.fingerprint), "their data or batches")
        self.versions = _versions(self.batches)
        self.total, self.count, largest = sum(sizes), len(sizes), max(1, *sizes)
        self.chunk = max(1, min(_MOST_VECTORS, limit // largest, _CACHE // (largest_tensor * largest)))
        self.vectorised = True
        self.budget, self.room = budget, budget // 2  # in all, and for what is kept between products
        self.kept: dict[int, _Tape] = {}
        self.keeping = threading.Lock()
        self.traceable: bool | None = None  # not known yet
        self.traces: dict[Any, _Trace | None] = {}  # by the shape of the batch; None: not to be traced
        anyway = [*self.params, *problem.constants.values(), *_held(self.batches)]
        self.owned = {tensor.untyped_storage().data_ptr() for tensor in anyway}

    def _batch_size(self, most: int) -> int:
        """Samples to take at once: batches of one size if possible, so that one trace serves all; some a rank."""
        held = _held(self.batches)
        if not held:
            return max(1, most)
        samples, ranks = len(held[-1]), self.ranks.count
        most = max(1, min(most, -(-samples // ranks)))
        if most * ranks < samples:  # several a rank: as many for each core
            most = even_size(most, samples, ranks * self.at_a_time)
        equal = (size for size in range(most, most // 2, -1) if samples % size == 0)
        return next(equal, -(-samples // -(-samples // most)))

    def operator(self, multiply: Callable[[Tensor], Tensor] | None = None, *, weight_decay: float = 0.0) -> Operator:
        """This matrix, or another `multiply` of rows, plus weight_decay · I as an operator on columns."""
        if not weight_decay >= 0:
            raise InputError(f"weight_decay must be at least 0, got {weight_decay}.")
        multiply = multiply or self.multiply

        def matmat(block: Tensor) -> Tensor:
            rows = self.ranks.first(block.detach().T.contiguous())
            result = multiply(rows).to(block.dtype)
            return (result.add_(rows, alpha=weight_decay) if weight_decay else result).T

        problem = self.problem
        return Operator(
            matmat,
            problem.size,
            dtype=problem.dtype,
            device=problem.device,
            shapes={name: tensor.shape for name, tensor in problem.params.items()},
        )

    def multiply(self, rows: Tensor) -> Tensor:
        """The matrix times each row of (k, P)."""
        return self.moments(rows, 1)[0]

    def moments(self, rows: Tensor, order: int) -> list[Tensor]:
        """The means over the batches, weighted by their sizes, of H_b v, H_b² v … up to `order`, for each row v.

        Sums over several batches are taken in float64.
        """
        dtype = torch.float64 if self.count > 1 else rows.dtype
        totals = [torch.zeros(rows.shape, dtype=dtype, device=rows.device) for _ in range(order)]
        sizes = [tensor.numel() for tensor in self.params]

        def begin(batch: _Batch) -> Callable[[], list[list[Tensor]]]:
            def powers() -> list[list[Tensor]]:
                found, vectors = list[list[Tensor]](), rows
                with torch.no_grad():
                    for power in range(order):
                        found.append([part.reshape(len(rows), -1) for part in batch.product(vectors)])
                        if power < order - 1:
                            vectors = torch.cat(found[-1], dim=1) / batch.samples
                return found

            if not batch.calls_model:
                return powers
            known = powers()
            return lambda: known

        def add(found: list[list[Tensor]]) -> None:
            for total, parts in zip(totals, found, strict=True):
                for piece, part in zip(total.split(sizes, dim=1), parts, strict=True):
                    piece.add_(part, alpha=1 / self.total)

        with self.ranks.together():
            batches = self._pass(rows)
            first = list(itertools.islice(batches, 1))  # with it is known whether the product can be traced
            cores = batches_that_fit(self.at_a_time, rows.nbytes, self.budget // 4) if self.traceable else 1
            side_by_side(itertools.chain(first, batches), begin, add, cores)
        self.ranks.add(totals)
        return totals

    def _pass(self, rows: Tensor) -> Iterator[_Batch]:
        """Each batch of this rank; the data are read only if some are not kept.

        What is multiplied first are `rows`: a batch that has to be traced is traced along them.
        """
        mine = range(self.ranks.rank, self.count, self.ranks.count)
        if all(index in self.kept for index in mine):
            if _versions(self.batches) != self.versions:
                raise InputError(
                    "the data were written to in place after the operator was made; products need data that stay as "
                    "they are: build a new operator for the new data."
                )
            yield from (self._replayed(self.kept[index]) for index in mine)
            return
        seen, fingerprint = 0, Fingerprint()
        for index, (inputs, targets) in enumerate(self.batches):
            seen += len(targets)
            fingerprint.update(inputs, targets)
            if self.ranks.takes(index):
                kept = self.kept.get(index)
                yield self._replayed(kept) if kept else self._batch(index, inputs, targets, rows)
        if seen != self.total or str(fingerprint) != self.fingerprint:
            raise InputError(
                f"the data changed between two passes ({self.total} samples, then {seen}); products need data that "
                "repeat: pass the unaugmented set, unshuffled."
            )

    def _inspect(self) -> tuple[list[int], str]:
        """Read and check all data once: the sizes of the batches, and a fingerprint."""
        sizes, total, fingerprint = list[int](), 0, Fingerprint()
        with self.problem.active(), torch.no_grad():
            for index, (inputs, targets) in enumerate(self.batches):
                fingerprint.update(inputs, targets)
                if self.ranks.takes(index):
                    placed = self.problem.place(inputs, targets)
                    outputs = self.problem.outputs(self.problem.params, placed[0])
                    self.problem.checked(outputs, *placed, start=total)
                    if not index and not self.whole:
                        self._check_independence(placed[0], outputs)
                    if not index:
                        check_derivatives(self.problem, *placed, twice=self.product is hessian_product)
                sizes.append(len(targets))
                total += len(targets)
        return sizes, str(fingerprint)

    def _check_independence(self, inputs: Any, outputs: Tensor) -> None:
        """Refuse a network whose output for a sample depends on the rest of the batch, unless batches are meant."""
        if len(outputs) < 3:
            inputs, _ = self.problem.place(*self.batches.first(3, 3))
            outputs = self.problem.outputs(self.problem.params, inputs)
        first = len(outputs) - 2
        if first < 1:
            return
        alone = self.problem.outputs(self.problem.params, sliced(inputs, first, first + 2))  # one has no variance
        difference, size = float((alone - outputs[first:]).abs().max()), float(outputs.abs().max())
        if difference > (1e-3 if outputs.dtype == torch.float32 else 1e-8) * size:
            raise InputError(
                "the network's output for a sample depends on the other samples of its batch (batch norm without "
                "running statistics, or an operation across the batch), so this matrix would depend on the batch "
                "size; batch_norm='batch' with a batch_size measures the batches as they are."
            )

    def _batch(self, index: int, inputs: Any, targets: Tensor, rows: Tensor) -> _Batch:
        """A batch: recomputed from a trace when it is multiplied, and kept if there is room; or differentiated."""
        flat, fixed, shape = self._flat(inputs, targets)
        constants, known = None, None
        if shape not in self.traces:
            traced = self._trace(flat, fixed, inputs, targets, rows[0]) if len(self.traces) < _MOST_SHAPES else None
            self.traces[shape], constants, known = traced or (None, None, None)
        trace, samples = self.traces[shape], len(targets)
        if trace is None:
            return _Batch(samples, lambda vectors: self._differentiate(flat, fixed, vectors), calls_model=True)
        tape: _Tape | None = None

        def product(vectors: Tensor) -> Sequence[Tensor]:
            nonlocal tape
            if tape is None:
                prepared = trace.prepare(*self.params, *fixed) if constants is None else constants
                tape = _Tape(trace.multiply, prepared, samples)
                self._keep(index, tape)
            if vectors is rows and len(rows) == 1 and known is not None:
                return [part[None] for part in known]
            return self._for_each(tape.multiply, vectors)

        return _Batch(samples, product)

    def _replayed(self, tape: _Tape) -> _Batch:
        return _Batch(tape.samples, lambda vectors: self._for_each(tape.multiply, vectors))

    def _keep(self, index: int, tape: _Tape) -> None:
        size = tape.size(self.owned)
        with self.keeping:
            if size <= self.room:
                self.room -= size
                self.kept[index] = tape

    def _flat(self, inputs: Any, targets: Tensor) -> tuple[_Flat, list[Tensor], tuple[Any, ...]]:
        """A batch's product as a function of tensors alone, the batch's own tensors, and what a trace depends on."""
        leaves, form = tree_flatten(self.problem.place(inputs, targets))
        fixed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        names = list(self.problem.params)

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            vector, point = (dict(zip(names, tensors[start:], strict=False)) for start in (0, len(names)))
            data = iter(tensors[2 * len(names) :])
            x, y = tree_unflatten([next(data) if leaf is _TENSOR else leaf for leaf in rest], form)
            return tuple(self.product(self.problem, vector, point, x, y).values())

        return flat, fixed, (str(form), repr(rest), tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in fixed))

    def _trace(self, flat: _Flat, fixed: list[Tensor], inputs: Any, targets: Tensor, row: Tensor) -> _Traced | None:
        """The trace of a batch's product, along `row`; `None` if there is none."""
        few = len(targets) if len(targets) <= 8 * _FEW else _FEW
        if self.traceable is None:
            tried = self._try(inputs, targets, few)
            if few == len(targets):
                return tried and tried._replace(product=None)
        if not self.traceable:
            return None
        with self.problem.active():
            return _try_to_trace(flat, self._shaped(row), self.params, fixed)

    def _try(self, inputs: Any, targets: Tensor, few: int) -> _Traced | None:
        """Find out on a few samples, along random vectors, whether the product is symmetric and can be traced."""
        flat, fixed, _ = self._flat(sliced(inputs, 0, few), targets[:few])
        generator = torch.Generator().manual_seed(1)
        pair = torch.randn(2, self.problem.size, generator=generator, dtype=self.problem.dtype).to(self.problem.device)
        leaves = tree_leaves((inputs, targets))
        plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves)
        traced = None
        if plain and not self.problem.reverse_only:
            with self.problem.active():
                traced = _checked_trace(flat, self._shaped(pair[0]), self.params, fixed)
        self.traceable = traced is not None
        if traced is None:
            products = self._one_by_one_and_together(lambda rows: self._differentiate(flat, fixed, rows), pair)
        else:
            assert traced.constants is not None
            tape = _Tape(traced.trace.multiply, traced.constants, few)
            with torch.no_grad():
                products = self._one_by_one_and_together(lambda rows: self._for_each(tape.multiply, rows), pair)

        def elsewhere() -> Iterator[Tensor]:
            for params in nearby(self.problem.params):
                yield _rows(self._differentiate(flat, fixed, pair, list(params.values())))

        self._check_symmetry(pair, products, elsewhere)
        return traced

    def _one_by_one_and_together(self, multiply: Callable[[Tensor], Sequence[Tensor]], rows: Tensor) -> Tensor:
        """The products with some vectors (k, P) one by one, after making sure that `vmap` gives the same.

        Not every rule of `vmap` can be trusted. If one cannot, `vectorised` is false from here on.
        """
        each = torch.cat([_rows(multiply(row)) for row in rows.split(1)])
        if self.vectorised:
            error, scale = float((_rows(multiply(rows)) - each).norm()), float(each.norm())
            self.vectorised &= error <= math.sqrt(torch.finfo(rows.dtype).eps) * scale
        return each

    def _shaped(self, row: Tensor) -> list[Tensor]:
        """A vector cut into the parameters' shapes."""
        parts = row.split([tensor.numel() for tensor in self.params])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, self.params, strict=True)]

    def _check_symmetry(self, pair: Tensor, products: Tensor, elsewhere: Callable[[], Iterator[Tensor]]) -> None:
        """Refuse a product that is not symmetric: uᵀHv = vᵀHu for two random vectors, whose size is about ‖Hv‖.

        Where terms cancel, Hv is nothing but their rounding, and so is its asymmetry: products at parameters that are
        the same but for rounding, `elsewhere`, then differ as much.
        """
        pair, products = pair.double(), products.double()
        largest = float(products.abs().max())
        if largest < 1e8 * torch.finfo(self.problem.dtype).tiny:  # so small that rounding is no longer relative
            return
        products /= largest  # whose squares may be too small for a number
        difference = abs(float(products[0] @ pair[1]) - float(products[1] @ pair[0]))
        size = float(torch.linalg.vector_norm(products, dim=1).max())
        if difference <= (1e-2 if self.problem.dtype == torch.float32 else 1e-6) * size:
            return
        changes = [other.double() / largest - products for other in elsewhere()]
        if difference > _ROUNDING * median(float(torch.linalg.vector_norm(change, dim=1).max()) for change in changes):
            raise InputError(
                "the second derivatives of this model are not symmetric, so no curvature of it can be trusted: a part "
                "of its forward runs under torch.no_grad() or on .data, or an operation has a wrong double backward."
            )

    def _differentiate(
        self, flat: _Flat, fixed: list[Tensor], vectors: Tensor, params: list[Tensor] | None = None
    ) -> Sequence[Tensor]:
        point = self.params if params is None else params
        with self.problem.active():
            results = self._for_each(lambda *vector: flat(*vector, *point, *fixed), vectors)
        return [result.detach() for result in results]  # a loss may hold parameters of its own

    def _for_each(self, function: Callable[..., Sequence[Tensor]], rows: Tensor) -> Sequence[Tensor]:
        """`function`, of a vector in the parameters' shapes, applied to each row of (k, P), several at once."""
        sizes = [tensor.numel() for tensor in self.params]
        results: list[Sequence[Tensor]] = []
        for some in rows.split(self.chunk if self.vectorised else 1):
            pieces = zip(some.split(sizes, dim=1), self.params, strict=True)
            parts = [piece.reshape(len(some), *tensor.shape) for piece, tensor in pieces]
            if len(some) == 1:
                results.append([result[None] for result in function(*(part[0] for part in parts))])
                continue
            try:
                results.append(vmap(function)(*parts))
            except Exception:  # not every operation can be vectorised; if it fails alone too, that says why
                self.vectorised = False
                return self._for_each(function, rows)
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)]


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Some vectors in the parameters' shapes as the rows of one matrix."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


def _held(batches: Batches) -> list[Tensor]:
    """The tensors of data that lie in memory as one pair, the targets last."""
    return tree_leaves(batches.data) if is_pair_of_tensors(batches.data) else []


def _versions(batches: Batches) -> list[int]:
    """How often the tensors of data that lie in memory were written to."""
    return [tensor._version for tensor in _held(batches) if not tensor.is_inference()]


def _activation_bytes(problem: Problem, batches: Batches) -> tuple[int, int]:
    """Bytes a sample that a forward pass saves for its derivative, all and the largest, from at most 16 samples."""
    inputs, targets = problem.place(*batches.first(16))
    params = as_leaves(problem.params)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*params.values(), *problem.constants.values()]}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            saved[pointer] = max(saved.get(pointer, 0), tensor.nbytes)
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


class _Sizes(TorchDispatchMode):
    """Counts the bytes of all that operations return, instead of what they save."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.sizes[-len(self.sizes) - 1] = sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


# ---------------------------------------------------------------- traces


@dataclass(frozen=True)
class _Trace:
    """A product cut in two lists of operations: from the fixed tensors to constants, and from those and v to H v."""

    prepare: fx.GraphModule
    multiply: fx.GraphModule


@dataclass(frozen=True)
class _Tape:
    """One batch's product with its constants at hand."""

    graph: fx.GraphModule
    constants: tuple[Tensor, ...]
    samples: int

    def multiply(self, *vector: Tensor) -> Sequence[Tensor]:
        return cast(Sequence[Tensor], self.graph(*vector, *self.constants))

    def size(self, owned: set[int]) -> int:
        """Bytes of the constants, without the storages that exist anyway."""
        storages = {c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in self.constants}
        return sum(size for pointer, size in storages.items() if pointer not in owned)


class _Untraceable(Exception):
    """What was executed cannot be repeated for other numbers."""


class _Recorder(TorchDispatchMode):
    """Writes down all operations on tensors that are executed inside it, in functional form.

    Where a tensor does not follow from the first `moving` inputs, `values[node.meta["value"]]` is the tensor itself.
    Nodes refer to each other in circles, so that what they held would outlive them.
    """

    def __init__(self, inputs: Sequence[Tensor], moving: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.outside: dict[str, Tensor] = {}  # buffers and the like
        self.values: dict[str, Tensor] = {}
        self.nodes = WeakTensorKeyDictionary()
        self.in_place = False  # whether a value may have been overwritten
        for index, tensor in enumerate(inputs):
            self._name(tensor, self.graph.placeholder(f"input_{index}"), moves=index < moving)

    def _name(self, tensor: Tensor, node: fx.Node, moves: bool = False) -> None:
        node.meta["shape"], node.meta["dtype"] = tensor.shape, tensor.dtype
        if not moves:
            node.meta["value"] = node.name
            self.values[node.name] = tensor
        self.nodes[tensor] = node

    def node(self, tensor: Tensor) -> fx.Node:
        """The node that computed a tensor."""
        if tensor not in self.nodes:
            name = f"outside_{len(self.outside)}"
            self.outside[name] = tensor
            self._name(tensor, self.graph.create_node("get_attr", name))
        return self.nodes[tensor]

    def _nodes(self, value: Any) -> Any:
        """Arguments with nodes in the place of tensors."""
        if isinstance(value, Tensor):
            return self.node(value)
        return [self._nodes(item) for item in value] if isinstance(value, list | tuple) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _UNREPEATABLE.isdisjoint(func.tags):
            raise _Untraceable(str(func))
        kwargs = kwargs or {}
        if func is _aten._efficientzerotensor.default:  # a zero tangent without memory, which operations below a mode
            func = _aten.zeros.default  # read all the same: torch 2.13 dies of that, as in `mse_loss` and `ldexp`
        result = func(*args, **kwargs)
        several = isinstance(result, tuple | list)
        tensors = [
            (index, item) for index, item in enumerate(result if several else [result]) if isinstance(item, Tensor)
        ]
        if not tensors:
            return result
        if func in _BY_MEMORY:
            self._write_by_index(func, result, args, kwargs)
            return result
        function = func
        if func._schema.is_mutable:
            function, self.in_place = _functional(func), True
        arguments = tuple(map(self._nodes, args)), {key: self._nodes(value) for key, value in kwargs.items()}
        node = self.graph.create_node("call_function", function, *arguments)
        moves = any("value" not in argument.meta for argument in node.all_input_nodes)
        if several and not moves:
            node.meta["value"] = None  # the items have values, the list has not
        for index, item in tensors:
            self._name(item, self.graph.call_function(operator.getitem, (node, index)) if several else node, moves)
        return result

    def _write_by_index(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        """A view by strides, or a write to one, as numbers of the flattened tensor: the same in any memory."""
        source, scatters = args[0], func is _aten.as_strided_scatter.default
        place = _places(source, *args[2 if scatters else 1 :], *kwargs.values())
        written = [self.node(args[1])] if scatters else []
        moves = any("value" not in node.meta for node in [self.node(source), *written])
        flat = self.graph.call_function(_aten.reshape.default, (self.node(source), [-1]))
        self._name(source.reshape(-1), flat, moves)
        function = _aten.index_put.default if scatters else _aten.index.Tensor
        node = self.graph.call_function(function, (flat, [self.node(place)], *written))
        if scatters:
            self._name(result.reshape(-1), node, moves)
            node = self.graph.call_function(_aten.reshape.default, (node, list(source.shape)))
        self._name(result, node, moves)


_aten = torch.ops.aten
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,  # a number taken out of a tensor, perhaps to branch on
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


_BY_MEMORY = {_aten.as_strided.default, _aten.as_strided_scatter.default}
"""They read or write memory as it lies, which for several vectors at once is not how it lay when it was recorded."""


def _places(source: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """Which numbers of a tensor, counted in its own order, a view by strides shows."""
    place = torch.tensor(0 if offset is None else offset - source.storage_offset(), device=source.device)
    for length, step in zip(size, stride, strict=True):
        place = place[..., None] + step * torch.arange(length, device=source.device)
    if not source.is_contiguous() or (place.numel() and not 0 <= int(place.min()) <= int(place.max()) < source.numel()):
        raise _Untraceable("as_strided")
    return place


def _functional(func: Any) -> Any:
    """The operation that returns what an in-place one writes."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or func._overloadname not in getattr(packet, "overloads", list)():
        raise _Untraceable(str(func))
    return getattr(packet, func._overloadname)


class _Traced(NamedTuple):
    trace: _Trace
    constants: tuple[Tensor, ...] | None
    """Of this batch, if they are at hand."""
    product: tuple[Tensor, ...] | None
    """With the vector that it was traced along, if that is the one that was asked for."""


def _try_to_trace(
    function: _Flat, vector: Sequence[Tensor], params: Sequence[Tensor], data: Sequence[Tensor]
) -> _Traced | None:
    """`function(*vector, *params, *data)` as operations, cut in two; `None` if that fails.

    A trace depends on nothing but its inputs and the tensors that the model holds: no number can leave a tensor
    unnoticed, since `functionalize` wraps them all and the recorder refuses what reads one.
    """
    recorder = _Recorder([*vector, *params, *data], len(vector))
    try:
        with recorder:
            results = functionalize(function)(*vector, *params, *data)
            nodes = tuple(recorder.node(result) for result in results)
        recorder.graph.output(nodes)
        trace, chosen = _cut(_simplified(recorder.graph), len(vector), recorder.outside)
    except Exception:  # whatever cannot be traced can still be differentiated
        return None
    constants = None if recorder.in_place else tuple(recorder.values[name].detach() for name in chosen)
    return _Traced(trace, constants, tuple(result.detach() for result in results))


def _checked_trace(
    function: _Flat, vector: Sequence[Tensor], params: Sequence[Tensor], data: Sequence[Tensor]
) -> _Traced | None:
    """A trace along a random vector, if it gives the product with the opposite vector as well.

    It does not if a dependence on the vector was lost, or if what was done in place is wrongly written out of place.
    """
    traced = _try_to_trace(function, vector, params, data)
    if traced is None or traced.product is None:
        return None
    try:
        with torch.no_grad():
            constants = traced.trace.prepare(*params, *data)
            opposite = traced.trace.multiply(*(-part for part in vector), *constants)
    except Exception:
        return None
    error, scale = (
        math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))
        for tensors in ([a + b for a, b in zip(opposite, traced.product, strict=True)], traced.product)
    )
    right = error <= math.sqrt(torch.finfo(params[0].dtype).eps) * scale
    return traced._replace(constants=constants) if right else None


_SAME = {_aten.alias.default, _aten.detach.default}
_ZEROS = {_aten.zeros.default, _aten.zeros_like.default, _aten._efficientzerotensor.default, _aten.new_zeros.default}
_LINEAR_IN_EACH = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.neg.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    operator.getitem,
}


def _simplified(graph: fx.Graph) -> fx.Graph:
    """The same operations without aliases, repetitions, and additions of zeros (the tangents of what does not move)."""
    graph.eliminate_dead_code()
    result, image, known = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        arguments = [image[argument] for argument in node.all_input_nodes]
        if node.target in _SAME or (node.target is _aten.copy.default and _alike(node, arguments[-1])):
            image[node] = arguments[-1]
            continue
        if node.target is _aten.add.Tensor and len(arguments) == 2 and not node.kwargs:
            others = [argument for argument in arguments if argument not in zeros]
            if len(others) == 1 and others[0].meta["dtype"] == node.meta["dtype"]:
                image[node] = others[0]
                if not _alike(node, others[0]):
                    image[node] = result.call_function(_aten.expand.default, (others[0], list(node.meta["shape"])))
                    image[node].meta = node.meta
                continue
        copy = result.node_copy(node, lambda argument: image[argument])
        if node.op == "call_function":
            first = known.setdefault(f"{node.target} {copy.args} {copy.kwargs}", copy)
            if first is not copy:
                result.erase_node(copy)
            image[node] = first
            if node.target in _ZEROS or (node.target in _LINEAR_IN_EACH and _vanishes(first, zeros)):
                zeros.add(first)
        else:
            image[node] = copy
    result.eliminate_dead_code()
    return result


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return (a.meta["shape"], a.meta["dtype"]) == (b.meta["shape"], b.meta["dtype"])


def _vanishes(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether an operation that is linear in each of its factors has one that is zero."""
    if node.target is _aten.convolution.default:
        return node.args[2] is None and (node.args[0] in zeros or node.args[1] in zeros)
    if node.target is _aten.convolution_backward.default:
        return node.args[0] in zeros
    return any(argument in zeros for argument in node.all_input_nodes)


def _cut(graph: fx.Graph, vector: int, outside: dict[str, Tensor]) -> tuple[_Trace, list[str]]:
    """The operations that follow from the first `vector` placeholders, those before them, and the values between."""
    placeholders = list(graph.find_nodes(op="placeholder"))[:vector]
    (output,) = graph.find_nodes(op="output")
    moving = set(placeholders)
    for node in graph.nodes:
        if node is not output and not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
    needed = [argument for node in graph.nodes if node in moving or node is output for argument in node.all_input_nodes]
    constants = dict.fromkeys(argument for argument in needed if argument not in moving)

    prepare, image = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node not in moving and node is not output:
            image[node] = prepare.node_copy(node, lambda argument: image[argument])
    prepare.output(tuple(image[node] for node in constants))
    prepare.eliminate_dead_code()

    multiply, moved = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in [*placeholders, *constants]:
        moved[node] = multiply.placeholder(f"given_{node.name}")
    for node in graph.nodes:
        if node in moving and node not in moved:
            moved[node] = multiply.node_copy(node, lambda argument: moved[argument])
    multiply.output(tuple(moved[node] for node in output.args[0]))
    names = [node.meta["value"] for node in constants]
    modules = [fx.GraphModule(outside, operations) for operations in (prepare, multiply)]
    for module in modules:
        module.graph.owning_module = None  # a circle, in which the tensors from outside would outlive it
    return _Trace(*modules), names
