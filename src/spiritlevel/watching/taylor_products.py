"""How second-order Taylor terms (`taylor_terms`) pass products: of numbers, of matrices, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from spiritlevel.watching.taylor_terms import NoRule, Step, Terms, aligned, plus


def multiplied(step: Step, terms: Terms) -> Any:
    """a·b number by number: ȧb + aḃ, and s_a b + a s_b + 2Σ ȧ_k ḃ_k."""
    (a, b), shape = step.args[:2], step.result.shape
    rows_a, rows_b = (aligned(terms.of(factor), shape) for factor in (a, b))
    if rows_a is None or rows_b is None:
        one = rows_b * a if rows_a is None and rows_b is not None else rows_a * b if rows_a is not None else None
        return one if one is None else one.expand(len(one), *shape)
    both = plus(rows_a * b, rows_b * a)
    assert both is not None
    return terms.bent(both, terms.dots(rows_a, rows_b).mul_(2))


def divided(step: Step, terms: Terms) -> Any:
    """The quotient z = a/b, from zb = a: ż = (ȧ − zḃ)/b, and s_z = (s_a − z s_b − 2Σ ż_k ḃ_k)/b."""
    if step.kwargs.get("rounding_mode") is not None:
        raise NoRule
    (a, b), z = step.args[:2], step.result
    rows_a, rows_b = (aligned(terms.of(factor), z.shape) for factor in (a, b))
    if rows_b is None:
        return None if rows_a is None else (rows_a / b).expand(-1, *z.shape)
    moved = plus(None if rows_a is None else rows_a / b, rows_b * (-z / b))
    assert moved is not None
    return terms.bent(moved, terms.dots(moved, rows_b).mul_(-2 / b))


def product(step: Step, terms: Terms) -> Any:
    """Any bilinear operation of two arguments alone."""
    a, b = step.args[:2]
    return _product(lambda x, y: step.func(x, y), a, b, terms.of(a), terms.of(b), terms)


def added_product(step: Step, terms: Terms) -> Any:
    """β·c + α·(a times b)."""
    c, a, b = step.args[:3]
    alpha, beta = (step.kwargs.get(name, 1) for name in ("alpha", "beta"))
    plain = torch.zeros_like(c)

    def times(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = step.func(plain, x, y, alpha=alpha, beta=0)
        return found

    rows = _product(times, a, b, terms.of(a), terms.of(b), terms)
    return plus_bias(rows, terms.of(c), beta, step.result.shape)


def plus_bias(rows: Tensor | None, bias: Tensor | None, beta: Any, shape: torch.Size) -> Tensor | None:
    """A copy of the rows, with those of what is added to the product."""
    bias = aligned(bias, shape)
    if rows is None or bias is None:
        return rows if bias is None else (bias * beta).expand(-1, *shape)
    if len(bias) > len(rows):
        return plus(rows, bias * beta)
    rows[: len(bias)].add_(bias, alpha=beta)
    return rows


def _product(
    times: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    rows_a: Tensor | None,
    rows_b: Tensor | None,
    terms: Terms,
) -> Tensor | None:
    """The rows of a bilinear map, by `vmap`."""
    one = None if rows_a is None else vmap(times, (0, None))(rows_a, b)
    other = None if rows_b is None else vmap(times, (None, 0))(a, rows_b)
    total = plus(one, other)
    if rows_a is None or rows_b is None or total is None:
        return total
    both = vmap(times)(rows_a[: terms.firsts], rows_b[: terms.firsts])
    return terms.bent(total, terms.summed(both).mul_(2))


def matrix_product(step: Step, terms: Terms) -> Any:
    """A product of two matrices, or of two stacks of them."""
    a, b = step.args[:2]
    return _matrices(step, a, b, terms)


def added_matrix_product(step: Step, terms: Terms) -> Any:
    """β·c + α·ab for matrices, or stacks of them."""
    c, a, b = step.args[:3]
    rows = _matrices(step, a, b, terms)
    alpha = step.kwargs.get("alpha", 1)
    if rows is not None and alpha != 1:
        rows.mul_(alpha)
    return plus_bias(rows, terms.of(c), step.kwargs.get("beta", 1), step.result.shape)


def _matrices(step: Step, a: Tensor, b: Tensor, terms: Terms) -> Tensor | None:
    """The rows of ab, each product added to them where they lie: no row is read again to be summed."""
    rows_a, rows_b = terms.of(a), terms.of(b)
    if rows_a is None and rows_b is None:
        return None
    if rows_a is not None and rows_b is not None and a.ndim == 2 and min(a.shape) >= _WIDE:
        return _two_for_three(step, torch.mm, a, b, terms)
    lengths = [len(rows) for rows in (rows_a, rows_b) if rows is not None]
    count = terms.firsts + terms.groups if len(lengths) == 2 else lengths[0]
    total = step.result.new_empty(count, *step.result.shape)
    filled = 0
    if rows_a is not None:
        filled = len(rows_a)
        if a.ndim == 2:
            torch.mm(rows_a.reshape(-1, a.shape[1]), b, out=total[:filled].view(-1, b.shape[1]))
        else:
            for row, out in zip(rows_a, total, strict=False):
                torch.bmm(row, b, out=out)
    total[filled:].zero_()
    if rows_b is not None:
        if a.ndim == 2:
            total[: len(rows_b)].baddbmm_(a.expand(len(rows_b), *a.shape), rows_b)
        else:
            for row, out in zip(rows_b, total, strict=False):
                out.baddbmm_(a, row)
    if rows_a is not None and rows_b is not None:
        bends = total[terms.firsts :]
        for one, other in zip(terms.each(rows_a), terms.each(rows_b), strict=True):
            if a.ndim == 2:
                bends.baddbmm_(one, other, alpha=2)
            else:
                for x, y, out in zip(one, other, bends, strict=True):
                    out.baddbmm_(x, y, alpha=2)
    return total


_WIDE = 128  # rows and columns beyond which a product costs more than reading its arguments and result five times


def _two_for_three(step: Step, times: Callable[..., Tensor], a: Tensor, b: Tensor, terms: Terms) -> Tensor:
    """The rows of a product in which both factors move, by two products per probe instead of three.

    (a/c + ȧ)(b + cḃ) = ab/c + (aḃ + ȧb) + cȧḃ for any number c, ab is computed once for all, and ȧḃ is needed by
    itself: what remains is the first derivative. The c that makes the outer terms equal in size keeps them below the
    middle one, so that rounding loses nothing.
    """
    rows_a, rows_b = terms.of(a), terms.of(b)
    assert rows_a is not None
    assert rows_b is not None
    firsts, groups = terms.firsts, terms.groups
    plain, size = step.once("plain", lambda: (times(a, b), float(a.norm()) * float(b.norm())))
    moving = float(rows_a[:firsts].norm()) * float(rows_b[:firsts].norm()) / firsts
    c = math.sqrt(size / moving) if size > 0 and moving > 0 else 1.0
    total = plain.new_empty(firsts + groups, *plain.shape)
    bends, known = total[firsts:], plain / c
    bends.zero_()
    for bend, row in zip(bends, rows_a[firsts:], strict=False):
        bend += times(row, b)
    for bend, row in zip(bends, rows_b[firsts:], strict=False):
        bend += times(a, row)
    moved, mixed, both = torch.empty_like(a), torch.empty_like(b), torch.empty_like(plain)
    for index in range(firsts):
        one, other, out = rows_a[index], rows_b[index], total[index]
        found = times(torch.add(one, a, alpha=1 / c, out=moved), torch.add(b, other, alpha=c, out=mixed), out=out)
        torch.sub(found, known, out=out)
        found = times(one, other, out=both)
        out.sub_(found, alpha=c)
        bends[index % groups].add_(found, alpha=2)
    return total


def convolution(step: Step, terms: Terms) -> Any:
    """The input times the kernel, plus a bias per channel; the rows of the input are samples to it."""
    (x, kernel, bias), rest = step.args[:3], step.args[3:]
    rows_x, rows_k = terms.of(x), terms.of(kernel)

    def times(x: Tensor, kernel: Tensor, out: Tensor | None = None) -> Tensor:  # `out` is not used
        found: Tensor = step.func(x, kernel, None, *rest)
        return found

    total: Tensor | None = None
    if rows_x is not None and rows_k is not None:
        total = _two_for_three(step, times, x, kernel, terms)
    elif rows_x is not None:
        total = times(rows_x.flatten(0, 1), kernel).unflatten(0, (len(rows_x), len(x)))
    elif rows_k is not None:
        total = torch.stack([times(x, row) for row in rows_k])
    rows_b = terms.of(bias)
    if rows_b is not None:
        rows_b = rows_b.reshape(*rows_b.shape, *[1] * (x.ndim - 2))
    return plus_bias(total, rows_b, 1, step.result.shape)


def prelu(step: Step, terms: Terms) -> Any:
    """The input where it is positive, else the input times a slope."""
    x, slope = step.args[:2]
    rows_x, rows_s = terms.of(x), aligned(terms.of(slope), step.result.shape)
    one = None if rows_x is None else rows_x * torch.where(x > 0, torch.ones_like(x), slope)
    below = torch.where(x > 0, torch.zeros_like(x), x)
    total = plus(one, None if rows_s is None else rows_s * below)
    if rows_x is None or rows_s is None or total is None:
        return total
    return terms.bent(total, terms.dots(rows_x, rows_s.expand(-1, *x.shape)).mul_(2 * (x <= 0)))
