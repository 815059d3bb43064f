"""The product of one batch's curvature matrix with one vector, by forward over reverse mode or by reverse mode alone.

The loss enters through its closed-form gradient and output Hessian, so products stay right at tiny losses, where
autodiff through a cross entropy returns half the curvature or none (mathematics 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from spiritlevel.binding.failures import ReadsMemory
from spiritlevel.binding.losses import CallableLoss, Loss
from spiritlevel.binding.parameters import Params, along, as_leaves, depth
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, first_line
from spiritlevel.operators import headed
from spiritlevel.operators.headed import or_whole

Product = Callable[[Problem, Params, Params, Any, Tensor], Params]
"""(problem, v, θ, x, y) → the matrix of the batch's summed loss, times v."""


def hessian_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The Hessian of the batch's summed loss at `params`, times v; use it inside `problem.active()`."""
    return _in_either_mode(
        or_whole(headed.hessian, _hessian_forward), _hessian_in_reverse, problem, v, params, inputs, targets
    )


def gauss_newton_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The same for the Gauss-Newton matrix."""
    return _in_either_mode(
        or_whole(headed.gauss_newton, _gauss_newton_forward),
        _gauss_newton_in_reverse,
        problem,
        v,
        params,
        inputs,
        targets,
    )


def fisher_product(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The same for the empirical Fisher matrix."""
    return _in_either_mode(
        or_whole(headed.fisher, _fisher_forward), _fisher_in_reverse, problem, v, params, inputs, targets
    )


def in_reverse(product: Product) -> Product | None:
    """The same product by reverse mode alone, at a third of the time for a small network; `None` if it has no name.

    For comparisons: where the model allows no such derivatives, it raises an error of any kind.
    """
    known: dict[Product, Product] = {
        hessian_product: _hessian_in_reverse,
        gauss_newton_product: _gauss_newton_in_reverse,
        fisher_product: _fisher_in_reverse,
    }
    return known.get(product)


def _in_either_mode(forward: Product, reverse: Product, problem: Problem, *args: Any) -> Params:
    """By forward over reverse mode, or by reverse mode alone if the model has no forward derivatives.

    A user's own `torch.autograd.Function`, for one, usually has none.
    """
    if not problem.reverse_only:
        try:
            return forward(problem, *args)
        except RuntimeError as error:
            refused = isinstance(error, InputError | torch.OutOfMemoryError) and not isinstance(error, ReadsMemory)
            if depth() is not None or refused:
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
    """For every sample, g (gᵀu) with g = ∂ℓ/∂φ, typed like φ."""
    slope = output_slope(loss, outputs, targets)
    rows = slope.ndim - 1  # outputs may be one number a sample, (N,)
    along = (slope * direction).reshape(len(slope), -1).sum(1).reshape(-1, *[1] * rows)
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
            refused = isinstance(error, InputError | torch.OutOfMemoryError) and not isinstance(error, ReadsMemory)
            if refused:
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
    return or_whole(headed.gradient, _loss_gradient)(problem, params, inputs, targets)


def _loss_gradient(problem: Problem, params: Params, inputs: Any, targets: Tensor) -> Params:
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
