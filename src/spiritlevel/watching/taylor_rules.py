"""How second-order Taylor terms pass through an operation, with the sum over the probes of a group collapsed.

While the parameters move along θ + t·v, a value x(t) has a first derivative ẋ and a second one ẍ at t = 0. A trace
needs ẋ of every probe v_k, but of ẍ only the sum s = Σ_k ẍ_k over a group of probes, and s obeys the same rule as any ẋ
plus what the ẋ_k bend: for z = f(x), ż_k = Df ẋ_k and s_z = Df s + Σ_k D²f[ẋ_k, ẋ_k] (mathematics 4.10). So a rule
applies the first derivative Df of its operation to all terms together, stacked as rows, and adds the bend to the last.

Rules are functions of a `Step`, what was executed, and of `Terms`, what moves. They return the rows of the step's
result, or a list of them where it has several, `None` for one that does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


@dataclass
class Step:
    """One ATen operation that was executed, and what a rule works out once for all probes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def argument(self, name: str) -> Any:
        """An argument by its name in the operation's schema, or its default."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if position < len(self.args) and not argument.kwarg_only:
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        return None

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What depends on the values and not on the probes, computed when it is first needed."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]


class Terms:
    """The terms of all values that move, for `groups` groups of `members` probes.

    Those of one value lie in a tensor of one dimension more: first ẋ of the first probes of all groups, then of the
    second ones, and so on, then s of every group. The last part is missing where it is zero.
    """

    def __init__(self, members: int, groups: int) -> None:
        self.members, self.groups, self.firsts = members, groups, members * groups
        self.rows: dict[int, Tensor] = {}

    def of(self, value: Any) -> Tensor | None:
        """The rows of a value; `None` for what does not move."""
        return self.rows.get(id(value)) if isinstance(value, Tensor) else None

    def still(self, *values: Any) -> bool:
        """Whether none of these moves."""
        return all(self.of(value) is None for value in values)

    def each(self, rows: Tensor) -> Iterator[Tensor]:
        """ẋ of the first probes of all groups, then of the second ones, and so on."""
        return (rows[start : start + self.groups] for start in range(0, self.firsts, self.groups))

    def dots(self, rows: Tensor, others: Tensor) -> Tensor:
        """Σ_k ẋ_k ẏ_k of every group, number by number."""
        total: Tensor | None = None
        for one, other in zip(self.each(rows), self.each(others), strict=True):
            total = one * other if total is None else total.addcmul_(one, other)
        assert total is not None
        return total

    def summed(self, firsts: Tensor) -> Tensor:
        """Σ_k of what was computed for every probe."""
        return firsts.unflatten(0, (self.members, self.groups)).sum(0)

    def bent(self, rows: Tensor, bend: Tensor) -> Tensor:
        """The rows with the bend added to s; they must belong to nobody else."""
        if len(rows) == self.firsts:
            return torch.cat([rows, bend.expand(self.groups, *rows.shape[1:])])
        rows[self.firsts :] += bend
        return rows

    def whole(self, rows: Tensor) -> Tensor:
        """The rows with s written out."""
        if len(rows) > self.firsts:
            return rows
        return torch.cat([rows, rows.new_zeros(self.groups, *rows.shape[1:])])


TaylorRule = Callable[[Step, Terms], Any]


class NoRule(Exception):
    """An operation was called in a form for which there is no rule."""


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two sets of rows, in the memory of neither."""
    if one is None or other is None:
        return other if one is None else one
    if len(one) == len(other):
        return one + other
    long, short = (one, other) if len(one) > len(other) else (other, one)
    total = long.clone()
    total[: len(short)] += short
    return total


def _aligned(rows: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Rows whose numbers broadcast to a shape as those of their value do."""
    if rows is None:
        return None
    missing = len(shape) + 1 - rows.ndim
    return rows[(slice(None), *[None] * missing)] if missing else rows


def _spread(rows: Tensor | None, shape: torch.Size) -> Tensor | None:
    found = _aligned(rows, shape)
    return None if found is None else found.expand(len(found), *shape)


def _moves(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())


# ---------------------------------------------------------------- linear


def still(step: Step, terms: Terms) -> Any:
    """A constant: zeros, ones, what is cut off from its gradient."""
    return [None for _ in tree_leaves(step.result)]


def copied(step: Step, terms: Terms) -> Any:
    """The same numbers at the same places."""
    rows = terms.of(step.args[0])
    return rows if rows is None else rows.to(step.result)


def reshaped(step: Step, terms: Terms) -> Any:
    """The same numbers in another shape; rows may lie in memory otherwise than the values."""
    rows = terms.of(step.args[0])
    if step.result.dtype != step.args[0].dtype:
        raise NoRule
    return rows if rows is None else rows.reshape(len(rows), *step.result.shape)


def linear(*written: str) -> TaylorRule:
    """Linear in all tensors together; `written` names arguments whose numbers go into the result as they are."""

    def rule(step: Step, terms: Terms) -> Any:
        if "reduce" in step.func._overloadname:  # a scatter that may multiply
            raise NoRule
        names = [argument.name for argument in step.func._schema.arguments]
        args = [0 if name in written and _is_number(arg) else arg for name, arg in zip(names, step.args, strict=False)]
        kwargs = {name: 0 if name in written and _is_number(arg) else arg for name, arg in step.kwargs.items()}
        leaves, form = tree_flatten((args, kwargs))
        found = [terms.of(leaf) for leaf in leaves]
        short = all(rows is None or len(rows) == terms.firsts for rows in found)
        moving = [rows if short else terms.whole(rows) for rows in found if rows is not None]
        rest = [torch.zeros_like(leaf) if _moves(leaf) else leaf for leaf in leaves]

        def apply(*rows: Tensor) -> Any:
            given = iter(rows)
            mixed = [leaf if own is None else next(given) for leaf, own in zip(rest, found, strict=True)]
            args, kwargs = tree_unflatten(mixed, form)
            return step.func(*args, **kwargs)

        return tree_leaves(vmap(apply)(*moving))

    return rule


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def overwritten(step: Step, terms: Terms) -> Any:
    """The second argument in the place of the first, perhaps in another type."""
    rows = _spread(terms.of(step.args[1]), step.result.shape)
    return rows if rows is None else rows.to(step.result)


def written_into(step: Step, terms: Terms) -> Any:
    """The second argument in the place of a slice of the first, along the dimension that is the third."""
    own = [terms.of(arg) for arg in step.args[:2]]
    count = max(len(rows) for rows in own if rows is not None)
    pair = []
    for rows, value in zip(own, step.args[:2], strict=True):
        if rows is None:
            rows = value.new_zeros(count, *value.shape)
        pair.append(rows if len(rows) == count else terms.whole(rows))
    dim = step.argument("dim")
    return step.func(*pair, _from_the_end(dim, step.args[0]), *step.args[3:], **step.kwargs)


def added(sign: int, reverse: bool = False) -> TaylorRule:
    """X ± αy, or y − αx."""

    def rule(step: Step, terms: Terms) -> Any:
        alpha, shape = step.kwargs.get("alpha", 1), step.result.shape
        x, y = (_spread(terms.of(arg), shape) for arg in step.args[:2])
        x, y = (y, x) if reverse else (x, y)
        return _plus(x, None if y is None else y if sign * alpha == 1 else y * (sign * alpha))

    return rule


def embedding(step: Step, terms: Terms) -> Any:
    """Rows of the weight."""
    return None if (rows := terms.of(step.args[0])) is None else rows[:, step.args[1]]


# ---------------------------------------------------------------- number by number


def elementwise(curved: bool = True) -> TaylorRule:
    """Some f number by number: f′ẋ_k, and f″Σẋ_k² + f′s; with the derivatives that autograd has for it."""

    def rule(step: Step, terms: Terms) -> Any:
        places = [place for place, arg in enumerate(step.args) if terms.of(arg) is not None]
        if len(places) != 1 or step.args[places[0]].shape != _first(step.result).shape:
            return by_forward_mode(curved)(step, terms)
        (place,) = places
        rows = terms.of(step.args[place])
        assert rows is not None
        slope, bend = step.once("slopes", lambda: _slopes(step, place, curved))
        moved = rows * slope
        return terms.bent(moved, terms.dots(rows, rows).mul_(bend)) if bend is not None else moved

    return rule


def _first(result: Any) -> Tensor:
    found: Tensor = tree_leaves(result)[0]
    return found


def _slopes(step: Step, place: int, curved: bool) -> tuple[Tensor, Tensor | None]:
    """f′ and f″ at every number."""
    value = step.args[place]
    if value.is_complex():
        raise NoRule
    with torch.enable_grad():
        x = value.detach().requires_grad_()
        result = _first(step.func(*step.args[:place], x, *step.args[place + 1 :], **step.kwargs))
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=curved)
        if not curved:
            return slope, None
        if not slope.requires_grad:
            return slope.detach(), torch.zeros_like(slope)
        (bend,) = torch.autograd.grad(slope.sum(), x)
    return slope.detach(), bend


def by_forward_mode(curved: bool) -> TaylorRule:
    """Any operation whose own forward derivatives are right, one probe after the other: for what is rare."""

    def rule(step: Step, terms: Terms) -> Any:
        leaves, form = tree_flatten((step.args, step.kwargs))
        places = [place for place, leaf in enumerate(leaves) if terms.of(leaf) is not None]
        values = tuple(leaves[place] for place in places)
        rows = [terms.whole(found) for leaf in leaves if (found := terms.of(leaf)) is not None]

        def function(*moved: Tensor) -> tuple[Tensor, ...]:
            mixed = dict(enumerate(leaves)) | dict(zip(places, moved, strict=True))
            args, kwargs = tree_unflatten(list(mixed.values()), form)
            return tuple(leaf for leaf in tree_leaves(step.func(*args, **kwargs)) if _moves(leaf))

        def once(*direction: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = jvp(function, values, direction)[1]
            return found

        def twice(*direction: Tensor) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = jvp(lambda *x: jvp(function, x, direction)[1], values, direction)[1]
            return found

        results = list(vmap(once)(*rows))
        if curved:
            bends = vmap(twice)(*(each[: terms.firsts] for each in rows))
            results = [terms.bent(one, terms.summed(bend)) for one, bend in zip(results, bends, strict=True)]
        given = iter(results)
        return [next(given) if _moves(leaf) else None for leaf in tree_leaves(step.result)]

    return rule


def selected(step: Step, terms: Terms) -> Any:
    """Values that were chosen along a dimension, and where they stood; by forward mode where it is not told."""
    rows = terms.of(step.args[0])
    if isinstance(step.result, Tensor) or step.argument("dim") is None or rows is None:
        return by_forward_mode(curved=False)(step, terms)
    values, places = step.result
    dim = _from_the_end(step.argument("dim"), step.args[0])
    if places.ndim < step.args[0].ndim:
        places = places.unsqueeze(dim)
    found = rows.gather(dim, places.expand(len(rows), *places.shape))
    return [found.reshape(len(rows), *values.shape), None]


# ---------------------------------------------------------------- products


def multiplied(step: Step, terms: Terms) -> Any:
    """a·b number by number: ȧb + aḃ, and s_a b + a s_b + 2Σ ȧ_k ḃ_k."""
    (a, b), shape = step.args[:2], step.result.shape
    rows_a, rows_b = (_aligned(terms.of(factor), shape) for factor in (a, b))
    if rows_a is None or rows_b is None:
        one = rows_b * a if rows_a is None and rows_b is not None else rows_a * b if rows_a is not None else None
        return one if one is None else one.expand(len(one), *shape)
    both = _plus(rows_a * b, rows_b * a)
    assert both is not None
    return terms.bent(both, terms.dots(rows_a, rows_b).mul_(2))


def divided(step: Step, terms: Terms) -> Any:
    """The quotient z = a/b, from zb = a: ż = (ȧ − zḃ)/b, and s_z = (s_a − z s_b − 2Σ ż_k ḃ_k)/b."""
    if step.kwargs.get("rounding_mode") is not None:
        raise NoRule
    (a, b), z = step.args[:2], step.result
    rows_a, rows_b = (_aligned(terms.of(factor), z.shape) for factor in (a, b))
    if rows_b is None:
        return None if rows_a is None else (rows_a / b).expand(-1, *z.shape)
    moved = _plus(None if rows_a is None else rows_a / b, rows_b * (-z / b))
    assert moved is not None
    return terms.bent(moved, terms.dots(moved, rows_b).mul_(-2 / b))


def product(step: Step, terms: Terms) -> Any:
    """Any bilinear operation of its first two arguments, without others."""
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
    return _plus_bias(rows, terms.of(c), beta, step.result.shape)


def _plus_bias(rows: Tensor | None, bias: Tensor | None, beta: Any, shape: torch.Size) -> Tensor | None:
    """Rows of our own with those of what is added to the product."""
    bias = _aligned(bias, shape)
    if rows is None or bias is None:
        return rows if bias is None else (bias * beta).expand(-1, *shape)
    if len(bias) > len(rows):
        return _plus(rows, bias * beta)
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
    total = _plus(one, other)
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
    return _plus_bias(rows, terms.of(c), step.kwargs.get("beta", 1), step.result.shape)


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


_WIDE = 128  # rows and columns from which on a product costs more than five looks at its arguments and result


def _two_for_three(step: Step, times: Callable[..., Tensor], a: Tensor, b: Tensor, terms: Terms) -> Tensor:
    """The rows of a product in which both factors move, by two products a probe in the place of three.

    (a/c + ȧ)(b + cḃ) = ab/c + (aḃ + ȧb) + cȧḃ for any number c, ab is known once and for all, and ȧḃ is needed by
    itself: what remains is the first derivative. The c that makes the outer terms equal in size keeps them below the
    middle one, so that rounding takes nothing away.
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
    """The input times the kernel, plus a bias a channel; the rows of the input are samples to it."""
    (x, kernel, bias), rest = step.args[:3], step.args[3:]
    rows_x, rows_k = terms.of(x), terms.of(kernel)

    def times(x: Tensor, kernel: Tensor, out: Tensor | None = None) -> Tensor:  # which it has no use for
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
    return _plus_bias(total, rows_b, 1, step.result.shape)


def prelu(step: Step, terms: Terms) -> Any:
    """X where it is positive, else x times a slope."""
    x, slope = step.args[:2]
    rows_x, rows_s = terms.of(x), _aligned(terms.of(slope), step.result.shape)
    one = None if rows_x is None else rows_x * torch.where(x > 0, torch.ones_like(x), slope)
    below = torch.where(x > 0, torch.zeros_like(x), x)
    total = _plus(one, None if rows_s is None else rows_s * below)
    if rows_x is None or rows_s is None or total is None:
        return total
    return terms.bent(total, terms.dots(rows_x, rows_s.expand(-1, *x.shape)).mul_(2 * (x <= 0)))


# ---------------------------------------------------------------- softmax and normalisations


def vector_norm(step: Step, terms: Terms) -> Any:
    """The root n of a sum of squares: ṅ = xᵀẋ/n, and s_n = (xᵀs + Σ ẋ_k² − Σ ṅ_k²)/n; zero where n is."""
    x, rows = step.args[0], terms.of(step.args[0])
    if step.argument("ord") != 2 or x.is_complex() or rows is None or rows.dtype != step.result.dtype:
        return by_forward_mode(curved=True)(step, terms)
    given = step.argument("dim")
    dims = [_from_the_end(dim, x) for dim in (range(x.ndim) if given is None else given)]
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
    dim = _from_the_end(step.args[1], shares)
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
    dim = _from_the_end(step.args[1], shares)
    moved = rows - (rows * shares).sum(dim, keepdim=True)
    return terms.bent(moved, -terms.dots(moved, moved).mul_(shares).sum(dim, keepdim=True))


def _from_the_end(dim: int, value: Tensor) -> int:
    return dim - value.ndim if dim >= 0 else dim


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
    """The rows of x̂·weight + bias, each of the latter in a shape that broadcasts."""
    rows_w, rows_b = (
        None if (own := terms.of(item)) is None else _aligned(own.reshape(len(own), *shape), unit.shape)
        for item in (weight, bias)
    )
    total = rows if weight is None or rows is None else rows * weight.reshape(shape)
    if rows_w is not None:
        total = _plus(total, rows_w * unit)
        if rows is not None and total is not None:
            total = terms.bent(total, terms.dots(rows, rows_w).mul_(2))
    return _plus_bias(total, rows_b, 1, unit.shape)


def layer_norm(step: Step, terms: Terms) -> Any:
    """Over the last dimensions; mean and deviation, which it returns too, have no rule."""
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
