"""How second-order Taylor terms (`taylor_terms`) pass what is linear, and functions of single numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spiritlevel.watching.taylor_terms import NoRule, Step, TaylorRule, Terms, from_the_end, moves, plus, spread

# ---------------------------------------------------------------- linear


def still(step: Step, terms: Terms) -> Any:
    """A constant: zeros, ones, what is cut off from its gradient."""
    return [None for _ in tree_leaves(step.result)]


def copied(step: Step, terms: Terms) -> Any:
    """The same numbers at the same places."""
    rows = terms.of(step.args[0])
    return rows if rows is None else rows.to(step.result)


def reshaped(step: Step, terms: Terms) -> Any:
    """The same numbers in another shape; rows may lie in memory differently from the values."""
    rows = terms.of(step.args[0])
    if step.result.dtype != step.args[0].dtype:
        raise NoRule
    return rows if rows is None else rows.reshape(len(rows), *step.result.shape)


def linear(*written: str) -> TaylorRule:
    """Linear in all tensors together; `written` names arguments whose numbers enter the result unchanged."""

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
        rest = [torch.zeros_like(leaf) if moves(leaf) else leaf for leaf in leaves]

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
    """The second argument in place of the first, perhaps in another type."""
    rows = spread(terms.of(step.args[1]), step.result.shape)
    return rows if rows is None else rows.to(step.result)


def written_into(step: Step, terms: Terms) -> Any:
    """The second argument in place of a slice of the first, along the dimension given third."""
    own = [terms.of(arg) for arg in step.args[:2]]
    count = max(len(rows) for rows in own if rows is not None)
    pair = []
    for rows, value in zip(own, step.args[:2], strict=True):
        if rows is None:
            rows = value.new_zeros(count, *value.shape)
        pair.append(rows if len(rows) == count else terms.whole(rows))
    dim = step.argument("dim")
    return step.func(*pair, from_the_end(dim, step.args[0]), *step.args[3:], **step.kwargs)


def added(sign: int, reverse: bool = False) -> TaylorRule:
    """X ± αy, or y − αx."""

    def rule(step: Step, terms: Terms) -> Any:
        alpha, shape = step.kwargs.get("alpha", 1), step.result.shape
        x, y = (spread(terms.of(arg), shape) for arg in step.args[:2])
        x, y = (y, x) if reverse else (x, y)
        return plus(x, None if y is None else y if sign * alpha == 1 else y * (sign * alpha))

    return rule


def embedding(step: Step, terms: Terms) -> Any:
    """Rows of the weight."""
    return None if (rows := terms.of(step.args[0])) is None else rows[:, step.args[1]]


# ---------------------------------------------------------------- number by number


def elementwise(curved: bool = True) -> TaylorRule:
    """Some elementwise f: f′ẋ_k, and f″Σẋ_k² + f′s; with the derivatives that autograd has for it."""

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
    """Any operation whose own forward derivatives are right, one probe at a time: for what is rare."""

    def rule(step: Step, terms: Terms) -> Any:
        leaves, form = tree_flatten((step.args, step.kwargs))
        places = [place for place, leaf in enumerate(leaves) if terms.of(leaf) is not None]
        values = tuple(leaves[place] for place in places)
        rows = [terms.whole(found) for leaf in leaves if (found := terms.of(leaf)) is not None]

        def function(*moved: Tensor) -> tuple[Tensor, ...]:
            mixed = dict(enumerate(leaves)) | dict(zip(places, moved, strict=True))
            args, kwargs = tree_unflatten(list(mixed.values()), form)
            return tuple(leaf for leaf in tree_leaves(step.func(*args, **kwargs)) if moves(leaf))

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
        return [next(given) if moves(leaf) else None for leaf in tree_leaves(step.result)]

    return rule


def selected(step: Step, terms: Terms) -> Any:
    """Values chosen along a dimension, and where they stood; by forward mode where that is not given."""
    rows = terms.of(step.args[0])
    if isinstance(step.result, Tensor) or step.argument("dim") is None or rows is None:
        return by_forward_mode(curved=False)(step, terms)
    values, places = step.result
    dim = from_the_end(step.argument("dim"), step.args[0])
    if places.ndim < step.args[0].ndim:
        places = places.unsqueeze(dim)
    found = rows.gather(dim, places.expand(len(rows), *places.shape))
    return [found.reshape(len(rows), *values.shape), None]
