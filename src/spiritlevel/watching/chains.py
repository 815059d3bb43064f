"""Exact per-sample Hessian traces of chains: linear layers, batch norm in eval mode and elementwise functions.

No second-order autodiff: the Hessian of the loss in the values before each activation follows from the next one,
H_z = D Wᵀ H_next W D + diag(act″(z) ⊙ Wᵀ g_next), D = diag(act′), and a linear layer's share is (‖a‖² + 1) Tr H_z
(mathematics 4.6). Everything is in float64, so tiny losses stay right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.problem import Problem
from spiritlevel.watching.operations import Degree, Layer, called
from spiritlevel.watching.watchers import FunctionWatch, tensors_in


@dataclass(frozen=True)
class _Linear:
    weight: str
    bias: str | None


@dataclass(frozen=True)
class _BatchNorm:
    weight: str | None
    bias: str | None
    mean: Tensor
    scale: Tensor  # 1/√(var + eps)


Step = _Linear | _BatchNorm | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Chain:
    """The steps from a flat input to the outputs, and what the recursion costs per sample.

    That is `cost` multiply-adds, and matrices of `width`² numbers.
    """

    steps: tuple[Step, ...]
    cost: int
    width: int


class _Call(NamedTuple):
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    versions: list[int]  # of these tensors at the time of the call: a write in place raises them
    result: Tensor
    version: int


class _Log(FunctionWatch):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in tensors]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.calls.append(_Call(func, args, kwargs, tensors, versions, result, result._version))
        return result


def find_chain(problem: Problem, inputs: Any) -> Chain | None:
    """The network as a chain, or `None` if it is anything else. Call inside `problem.active()`."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return None
    log = _Log()
    params = {name: tensor.detach().requires_grad_() for name, tensor in problem.params.items()}
    try:
        with log:
            outputs = problem.outputs(params, inputs)
    except RuntimeError:  # what autograd does not allow, such as writes into one of several views, is not a chain
        return None
    names = {id(tensor): name for name, tensor in {**problem.constants, **params}.items()}
    current, version, differentiable = inputs, inputs._version, False
    cost = width = 0
    steps: list[Step] = []
    used: set[str | None] = set()
    for func, args, kwargs, tensors, versions, result, result_version in log.calls:
        operation = called(func)
        if not tensors or tensors[0] is not current or versions[0] != version:
            return None
        own = [names.get(id(tensor)) for tensor in tensors[1:]]
        new = None not in own and not used.intersection(own)
        if operation.keeps_order and not own and _keeps(result, current, not steps):
            pass
        elif operation.layer is Layer.DENSE and current.ndim == 2 and own and new:
            weight = tensors[1]
            fan_out, fan_in = weight.shape
            cost += fan_out * fan_out * fan_in + fan_out * fan_in * fan_in if steps else fan_out * fan_out
            width = max(width, fan_out, fan_in if steps else 0)
            steps.append(_Linear(str(own[0]), own[1] if len(own) > 1 else None))
            used.update(own)
        elif operation.degree is Degree.BATCH_NORM and current.ndim == 2 and steps and new:
            step = _batch_norm_step(names, *args, **kwargs)
            if step is None:
                return None
            steps.append(step)
            used.update(own)
        elif operation.elementwise == 1 and not own and steps:
            steps.append(_elementwise(func, args, kwargs))
        else:
            return None
        differentiable |= not problem.params.keys().isdisjoint(own)
        if differentiable and not result.requires_grad:
            return None  # a part under no_grad, which the recursion would differentiate
        current, version = result, result_version
    if not steps or current is not outputs or current._version != version or outputs.ndim != 2:
        return None
    return Chain(tuple(steps), cost, width)


def _keeps(result: Tensor, before: Tensor, at_first: bool) -> bool:
    """Whether a copy or view leaves the numbers as they are: their type, and after a first layer their shape too."""
    return result.dtype == before.dtype and (at_first or result.shape == before.shape)


def _batch_norm_step(
    names: dict[int, str],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> _BatchNorm | None:
    if training or running_mean is None or running_var is None:
        return None
    scale = (running_var.double() + eps).rsqrt()
    return _BatchNorm(names.get(id(weight)), names.get(id(bias)), running_mean.double(), scale)


def _elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    options = {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}
    rest = args[1:]

    def call(values: Tensor) -> Tensor:
        return func(values.clone(), *rest, **options)  # a clone, because the function may work in place

    return call


def _derivatives(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f, f′ and f″ of an elementwise function."""
    with torch.enable_grad():
        point = values.detach().requires_grad_()
        result = function(point)
        (first,) = torch.autograd.grad(result.sum(), point, create_graph=True)
        second = torch.zeros_like(values)
        if first.requires_grad:
            (found,) = torch.autograd.grad(first.sum(), point, allow_unused=True)
            second = second if found is None else found
    return result.detach(), first.detach(), second.detach()


def chain_traces(
    problem: Problem, chain: Chain, inputs: Tensor, targets: Tensor, start: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs (N, C) and, for every measured parameter, the exact trace of its block of each sample's Hessian.

    `start` is the number of the first sample. The outputs are those of the steps, in float64: if the model gives
    different ones, it is not this chain.
    """
    state = {name: tensor.double() for name, tensor in {**problem.constants, **problem.params}.items()}
    current = inputs.double().reshape(len(inputs), -1)
    entering: list[Tensor] = []
    curves: dict[int, tuple[Tensor, Tensor]] = {}
    for index, step in enumerate(chain.steps):
        entering.append(current)
        if isinstance(step, _Linear):
            current = F.linear(current, state[step.weight], None if step.bias is None else state[step.bias])
        elif isinstance(step, _BatchNorm):
            current = (current - step.mean) * step.scale
            entering[-1] = current  # the normalised values are what its parameters multiply
            current = current * state[step.weight] if step.weight else current
            current = current + state[step.bias] if step.bias else current
        else:
            current, first, second = _derivatives(step, current)
            curves[index] = first, second
    outputs = current
    problem.checked(outputs, inputs, targets, start)
    hessian = problem.loss.hessian(outputs, targets)
    gradient = problem.loss.gradient(outputs, targets)

    traces: dict[str, Tensor] = {}
    for index in reversed(range(len(chain.steps))):
        step = chain.steps[index]
        diagonal = hessian.diagonal(dim1=1, dim2=2)
        if isinstance(step, _Linear):
            total, weight = diagonal.sum(1), state[step.weight]
            traces[step.weight] = total * entering[index].square().sum(1)
            if step.bias:
                traces[step.bias] = total
            if index:
                hessian = weight.mT @ hessian @ weight
                gradient = gradient @ weight
        elif isinstance(step, _BatchNorm):
            if step.weight:
                traces[step.weight] = (diagonal * entering[index].square()).sum(1)
            if step.bias:
                traces[step.bias] = diagonal.sum(1)
            factor = step.scale * state[step.weight] if step.weight else step.scale
            hessian = hessian * factor[:, None] * factor
            gradient = gradient * factor
        else:
            first, second = curves[index]
            hessian = first[:, :, None] * hessian * first[:, None, :]
            hessian.diagonal(dim1=1, dim2=2).add_(second * gradient)
            gradient = gradient * first
    return outputs, {name: traces[name] for name in problem.params if name in traces}
