"""Products for models whose outputs come straight from a linear layer, without these outputs: see `losses.in_pieces`.

What comes before the layer is differentiated as usual; the layer and the loss enter in closed form, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp

from spiritlevel.binding.losses import CrossEntropy, Head, HeadLoss
from spiritlevel.binding.parameters import Params, as_leaves
from spiritlevel.binding.problem import Problem

_Parts = tuple[Tensor, ...]
_Pulled = tuple[_Parts, Callable[[_Parts], tuple[Params]], tuple[Tensor, ...]]


class Whole(Exception):
    """On these inputs the outputs do not come from the layer after all."""


class _Network:
    """A model up to its last layer, as a function from parameters to the parts of the head that they move."""

    def __init__(self, problem: Problem, inputs: Any) -> None:
        self.problem, self.inputs = problem, inputs
        self.moves: tuple[bool, bool, bool] = problem.facts["head moves"]

    def __call__(self, point: Params) -> tuple[_Parts, tuple[Tensor | None, ...]]:
        """The parts that move, and those that do not."""
        head = self.problem.head(point, self.inputs)
        if head is None:
            raise Whole
        still = tuple(part for part, moves in zip(head, self.moves, strict=True) if not moves and part is not None)
        return tuple(part for part, moves in zip(head, self.moves, strict=True) if moves and part is not None), still

    def head(self, parts: _Parts, still: tuple[Tensor | None, ...]) -> Head:
        """All of it."""
        moving, rest = iter(parts), iter((*still, None))
        return Head(*(next(moving) if moves else next(rest) for moves in self.moves))  # type: ignore[arg-type]

    def motion(self, parts: _Parts) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What belongs to moving parts, with nothing for the others."""
        moving = iter(parts)
        hidden, weight, bias = (next(moving) if moves else None for moves in self.moves)
        return hidden, weight, bias

    def moving(self, head: Head) -> _Parts:
        return tuple(part for part, moves in zip(head, self.moves, strict=True) if moves and part is not None)

    def loss(self, head: Head, targets: Tensor) -> HeadLoss:
        assert isinstance(self.problem.loss, CrossEntropy)
        return HeadLoss(self.problem.loss, head, targets)


def hessian(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The Hessian product by forward over reverse mode; the slopes of the head carry their tangents by hand."""
    network = _Network(problem, inputs)

    def gradient(point: Params) -> Params:
        parts, pull, still = cast(_Pulled, vjp(network, point, has_aux=True))
        duals = [forward_ad.unpack_dual(part) for part in parts]
        head, motion = network.head(tuple(dual.primal for dual in duals), still), [dual.tangent for dual in duals]
        loss = network.loss(head, targets)
        slopes = network.moving(loss.slopes(head))
        bends = network.moving(loss.product("hessian", head, network.motion(tuple(motion))))
        return pull(tuple(forward_ad.make_dual(*pair) for pair in zip(slopes, bends, strict=True)))[0]

    return jvp(gradient, (params,), (v,))[1]


def gauss_newton(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The same for the Gauss-Newton matrix."""
    return _first_order("gauss_newton", problem, v, params, inputs, targets)


def fisher(problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The same for the empirical Fisher matrix."""
    return _first_order("fisher", problem, v, params, inputs, targets)


def _first_order(kind: str, problem: Problem, v: Params, params: Params, inputs: Any, targets: Tensor) -> Params:
    network = _Network(problem, inputs)
    parts, pull, still = cast(_Pulled, vjp(network, params, has_aux=True))
    head = network.head(parts, still)
    moved = jvp(network, (params,), (v,), has_aux=True)[1]
    return pull(network.moving(network.loss(head, targets).product(kind, head, network.motion(moved))))[0]


def gradient(problem: Problem, params: Params, inputs: Any, targets: Tensor) -> Params:
    """The gradient of the summed loss, by plain autograd up to the head."""
    network, point = _Network(problem, inputs), as_leaves(params)
    with torch.enable_grad():
        parts, still = network(point)
    head = network.head(parts, still).detach()
    slopes = network.moving(network.loss(head, targets).slopes(head))
    found = torch.autograd.grad(parts, list(point.values()), slopes, materialize_grads=True)
    return dict(zip(point, found, strict=True))


def or_whole(headed: Callable[..., Params], whole: Callable[..., Params]) -> Callable[..., Params]:
    """A product through the head where the model has one, and through whole outputs elsewhere."""

    def product(problem: Problem, *args: Any) -> Params:
        if problem.facts.get("head"):
            try:
                return headed(problem, *args)
            except Whole:
                pass
        return whole(problem, *args)

    return product
