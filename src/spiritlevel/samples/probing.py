"""Second derivatives of the outputs along random directions, by whichever mode of differentiation can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from spiritlevel.binding.parameters import Params, along, as_leaves, nearby
from spiritlevel.binding.problem import Problem, refuse_infinite
from spiritlevel.errors import InputError, first_line


def form_along(problem: Problem, derivatives: Derivatives, targets: Tensor) -> Tensor:
    """vᵀHₙv of every sample from the derivatives along v."""
    return parts_along(problem, derivatives, targets).sum(1)


def parts_along(problem: Problem, derivatives: Derivatives, targets: Tensor) -> Tensor:
    """The Gauss-Newton part φ̇ᵀAφ̇ of that and the remainder gᵀφ̈, (N, 2)."""
    outputs, first, second = derivatives
    loss = problem.loss
    form = loss.slope_along(outputs, targets, second)
    return torch.stack([loss.quadratic(outputs, targets, first), form], 1).detach().cpu()


def generator_of(seed: int, index: int) -> torch.Generator:
    """Independent streams for neighbouring seeds, which torch's own seeding does not promise."""
    state = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


def signs(params: Params, seed: int, index: int, only: str | None = None) -> Params:
    """Random signs for every parameter, as integers, drawn again from (seed, index): nothing has to be kept.

    With `only` the direction lies inside that parameter; the others have no entry.
    """
    generator = generator_of(seed, index)
    result = {}
    for name, tensor in params.items():
        drawn = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
        if only is None or name == only:
            result[name] = drawn.mul_(2).sub_(1)
    return result


def probe(params: Params, seed: int, index: int, only: str | None = None) -> Params:
    """`signs` in the parameters' own dtype and on their device, zero where there are none."""
    return as_direction(signs(params, seed, index, only), params)


def as_direction(parts: Params, params: Params) -> Params:
    """A direction in all parameters, zero in those that are missing."""
    return {
        name: parts[name].to(tensor.device, tensor.dtype) if name in parts else torch.zeros_like(tensor)
        for name, tensor in params.items()
    }


Derivatives = tuple[Tensor, Tensor, Tensor]
"""Outputs φ, their first derivative φ̇ = Jv and their second φ̈ = vᵀ∇²φ v along a direction v, each (N, C)."""
Differentiate = Callable[[Problem, Any, Params], Derivatives]


def along_forward(problem: Problem, inputs: Any, direction: Params) -> Derivatives:
    """By nested forward mode: no graph, no loop over samples."""

    def velocity(params: Params) -> tuple[Tensor, Tensor]:
        return along(lambda p: problem.outputs(p, inputs), params, direction)

    with torch.no_grad():
        (outputs, first), (_, second) = along(velocity, problem.params, direction)
    return outputs, first, second


def along_reverse(problem: Problem, inputs: Any, direction: Params) -> Derivatives:
    """By reverse mode alone: derivatives, in dummy weights w of the outputs, of d/dt and d²/dt² of Σ w·φ."""
    params = as_leaves(problem.params)
    leaves, directions = list(params.values()), list(direction.values())

    def forward_derivative(scalar: Tensor) -> Tensor:
        if not scalar.requires_grad:
            return scalar.new_zeros(()).requires_grad_()
        gradients = torch.autograd.grad(scalar, leaves, create_graph=True, allow_unused=True)
        pairs = zip(gradients, directions, strict=True)
        return sum(((g * d).sum() for g, d in pairs if g is not None), scalar.new_zeros(()))

    outputs = problem.outputs(params, inputs)
    weights = torch.ones_like(outputs, requires_grad=True)
    once = forward_derivative((weights * outputs).sum())
    twice = forward_derivative(once)
    found = [
        torch.autograd.grad(scalar, weights, retain_graph=True, allow_unused=True)[0] if scalar.requires_grad else None
        for scalar in (once, twice)
    ]
    first, second = (torch.zeros_like(outputs) if item is None else item for item in found)
    return outputs.detach(), first.detach(), second.detach()


def differentiator(problem: Problem, inputs: Any, seed: int, start: int = 0) -> tuple[Differentiate, tuple[str, ...]]:
    """Forward mode if this model has it and it agrees with reverse mode; otherwise reverse mode, and a note.

    The checksum (mathematics 4.7): for one batch, one probe v and random weights w, Σ w·φ̇ = v·∇ and Σ w·φ̈ = v·∇²v of Σ
    w·φ by forward-over-reverse, and u·∇²v = v·∇²u.
    """
    v, u = probe(problem.params, seed, 0), probe(problem.params, seed, 1)
    if problem.reverse_only:
        return along_reverse, ("reverse mode, because the forward derivative of an operation is wrong or missing",)
    try:
        outputs, first, second = along_forward(problem, inputs, v)
    except RuntimeError as error:
        missing = first_line(error)
        try:
            along_reverse(problem, inputs, v)
        except RuntimeError as second:
            raise InputError(
                f"the curvature of this model cannot be probed: an operation has no forward derivative ({missing}) and "
                f"no second derivative either ({first_line(second)}); write that part in other operations."
            ) from second
        return along_reverse, (f"reverse mode, because forward derivatives are missing ({missing})",)
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs).to(outputs)

    def scalar(params: Params) -> Tensor:
        return (weights * problem.outputs(params, inputs)).sum()

    def dot(a: Params, b: Params) -> float:
        return sum(float((a[name].double() * b[name].double()).sum()) for name in a)

    def products(params: Params) -> tuple[Params, Params, Params]:
        gradient, product = along(grad(scalar), params, v)
        return gradient, product, along(grad(scalar), params, u)[1]

    try:
        gradient, product, other = products(problem.params)
    except RuntimeError:
        _, first_reverse, second_reverse = along_reverse(problem, inputs, v)
        wanted = [(weights * item).double().sum().item() for item in (first_reverse, second_reverse)]
        symmetric = True
    else:
        wanted = [dot(v, gradient), dot(v, product)]
        scale = math.sqrt(dot(product, product) * dot(u, u))
        difference = abs(dot(u, product) - dot(v, other))
        symmetric = difference <= _tolerance(problem) * max(scale, 1e-30)
        if not symmetric:  # or is it all rounding, and different at parameters that differ by rounding alone?
            changes = []
            for params in nearby(problem.params):
                _, near, near_other = products(params)
                changes.append(abs(dot(u, near) - dot(u, product)) + abs(dot(v, near_other) - dot(v, other)))
            symmetric = difference <= 10 * median(changes)
    if not symmetric:
        if not math.isfinite(difference):
            refuse_infinite(inputs, start)
        raise InputError(
            "the second derivatives of this model are not symmetric, so no curvature of it can be trusted: is a part "
            "of its forward under torch.no_grad() (then freeze its parameters with requires_grad_(False)), or is "
            "the double backward of an operation wrong?"
        )
    for found, right in zip((first, second), wanted, strict=True):
        terms = (weights * found).double()
        if abs(terms.sum().item() - right) > _tolerance(problem) * max(float(terms.norm()), abs(right), 1e-30):
            return along_reverse, ("reverse mode, because nested forward mode disagreed with it on this model",)
    return along_forward, ()


def _tolerance(problem: Problem) -> float:
    return max(1e-2 if problem.dtype == torch.float32 else 1e-6, 10 * problem.rounding)
