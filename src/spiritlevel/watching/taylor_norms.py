"""How second-order Taylor terms (`taylor_terms`) pass softmax, lengths and normalisations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spiritlevel.watching.taylor_products import plus_bias
from spiritlevel.watching.taylor_rules import by_forward_mode
from spiritlevel.watching.taylor_terms import NoRule, Step, Terms, aligned, from_the_end, plus


def vector_norm(step: Step, terms: Terms) -> Any:
    """The root n of a sum of squares: ṅ = xᵀẋ/n, and s_n = (xᵀs + Σ ẋ_k² − Σ ṅ_k²)/n; zero where n is."""
    x, rows = step.args[0], terms.of(step.args[0])
    if step.argument("ord") != 2 or x.is_complex() or rows is None or rows.dtype != step.result.dtype:
        return by_forward_mode(curved=True)(step, terms)
    given = step.argument("dim")
    dims = [from_the_end(dim, x) for dim in (range(x.ndim) if given is None else given)]
    sizes = step.result if step.argument("keepdim") else x.norm(dim=dims, keepdim=True)
    inverse = torch.where(sizes > 0, 1 / sizes, 0.0)
    moved = (rows * x).sum(dims, keepdim=True).mul_(inverse)
    bend = terms.dots(rows, rows).sum(dims, keepdim=True) - terms.dots(moved, moved)
    return terms.bent(moved, bend.mul_(inverse)).reshape(-1, *step.result.shape)


def softmax(step: Step, terms: Terms) -> Any:
    """Shares p of a softmax: with e_k = ẋ_k − pᵀẋ_k, ṗ_k = p e_k; s_p = p(s − pᵀs) + p(Σe_k² − pᵀΣe_k²)."""
    rows, shares = terms.of(step.args[0]), step.result
    if rows is None:
        return None
    if rows.dtype != shares.dtype:
        raise NoRule
    dim = from_the_end(step.args[1], shares)
    moved = rows * shares
    means = moved.sum(dim, keepdim=True)
    moved.addcmul_(shares, means, value=-1)
    squares = terms.dots(moved, rows)  # Σ p e_k² = Σ ṗ_k (ẋ_k − pᵀẋ_k)
    for one, mean in zip(terms.each(moved), terms.each(means), strict=True):
        squares.addcmul_(one, mean, value=-1)
    bend = squares.addcmul_(shares, squares.sum(dim, keepdim=True), value=-1)
    return terms.bent(moved, bend)


def log_softmax(step: Step, terms: Terms) -> Any:
    """Its logarithm, x − log Σ exp x: e_k = ẋ_k − pᵀẋ_k, and s − pᵀs − pᵀΣe_k²."""
    rows, shares = terms.of(step.args[0]), step.result.exp()
    if rows is None:
        return None
    if rows.dtype != shares.dtype:
        raise NoRule
    dim = from_the_end(step.args[1], shares)
    moved = rows - (rows * shares).sum(dim, keepdim=True)
    return terms.bent(moved, -terms.dots(moved, moved).mul_(shares).sum(dim, keepdim=True))


def _standardised(rows: Tensor, unit: Tensor, inverse: Tensor, dims: list[int], terms: Terms) -> Tensor:
    """The rows of x̂ = (x − mean)·r, r = (variance + ε)^(−1/2), over dimensions counted from the end.

    With c_k = ẋ_k − mean ẋ_k and u_k = mean(x̂ c_k) the first derivative is r(c_k − x̂u_k), and what bends is
    r²(x̂(3Σu_k² − Σ mean c_k²) − 2Σ u_k c_k) (mathematics 4.10).
    """
    centred = rows - rows.mean(dims, keepdim=True)
    along = (rows * unit).mean(dims, keepdim=True)
    moved = torch.addcmul(centred, unit, along, value=-1).mul_(inverse)
    count = unit.numel() // inverse.numel()
    squares = torch.linalg.vector_norm(centred[: terms.firsts], dim=dims, keepdim=True).square_().div_(count)
    factor = 3 * terms.dots(along, along) - terms.summed(squares)
    bend = terms.dots(centred, along.expand_as(centred)).mul_(-2).addcmul_(unit, factor).mul_(inverse.square())
    return terms.bent(moved, bend)


def _scaled(rows: Tensor | None, unit: Tensor, weight: Any, bias: Any, shape: list[int], terms: Terms) -> Tensor | None:
    """The rows of x̂·weight + bias, both in a shape that broadcasts."""
    rows_w, rows_b = (
        None if (own := terms.of(item)) is None else aligned(own.reshape(len(own), *shape), unit.shape)
        for item in (weight, bias)
    )
    total = rows if weight is None or rows is None else rows * weight.reshape(shape)
    if rows_w is not None:
        total = plus(total, rows_w * unit)
        if rows is not None and total is not None:
            total = terms.bent(total, terms.dots(rows, rows_w).mul_(2))
    return plus_bias(total, rows_b, 1, unit.shape)


def layer_norm(step: Step, terms: Terms) -> Any:
    """Over the last dimensions; mean and deviation, which it also returns, have no rule."""
    x, sizes, weight, bias = step.args[:4]
    mean, inverse = step.result[1:]
    dims = list(range(-len(sizes), 0))
    unit = step.once("unit", lambda: (x - mean) * inverse)
    rows = terms.of(x)
    rows = None if rows is None else _standardised(rows, unit, inverse, dims, terms)
    return [_scaled(rows, unit, weight, bias, list(sizes), terms)]


def group_norm(step: Step, terms: Terms) -> Any:
    """Over the numbers of a group of channels."""
    x, weight, bias = step.args[:3]
    groups = step.args[6]
    mean, inverse = (item.reshape(len(x), groups, 1) for item in step.result[1:])
    inside = step.once("inside", lambda: (x.reshape(len(x), groups, -1) - mean) * inverse)
    rows = terms.of(x)
    if rows is not None:
        rows = _standardised(rows.reshape(len(rows), *inside.shape), inside, inverse, [-1], terms)
        rows = rows.reshape(len(rows), *x.shape)
    return [_scaled(rows, inside.reshape(x.shape), weight, bias, _channels(x), terms)]


def batch_norm(step: Step, terms: Terms) -> Any:
    """By running statistics; those of the batch are written out elsewhere (`binding.rewrites`)."""
    x, weight, bias, running, variance = step.args[:5]
    if step.argument("training") or step.argument("train") or not terms.still(running, variance):
        raise NoRule
    shape = _channels(x)
    inverse = (variance + step.argument("eps")).rsqrt().reshape(shape)
    unit = step.once("unit", lambda: (x - running.reshape(shape)) * inverse)
    rows = terms.of(x)
    return [_scaled(None if rows is None else rows * inverse, unit, weight, bias, shape, terms)]


def _channels(x: Tensor) -> list[int]:
    return [x.shape[1], *[1] * (x.ndim - 2)]
