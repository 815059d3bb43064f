"""Second-order Taylor terms: every rule of the table against autograd and differences, networks, groups, fallbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zoo
import zoo_transformers
from test_operations import CALLS, CASES, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.problem import Problem
from spiritlevel.samples.probing import along_reverse, probe
from spiritlevel.watching import taylor_rules
from spiritlevel.watching.operations import Operation
from spiritlevel.watching.taylor import Untaught, taped

# ---------------------------------------------------------------- rules, one by one


class Call:
    """A call of an operation as a problem: its tensors are the parameters, all numbers it returns are the outputs."""

    def __init__(self, function: Callable[..., Any], tensors: list[Tensor]) -> None:
        self.function, self.params = function, {str(k): tensor for k, tensor in enumerate(tensors)}

    def outputs(self, params: dict[str, Tensor], inputs: Any = None) -> Tensor:
        torch.manual_seed(0)
        found = tree_leaves(self.function(*(tensor.clone() for tensor in params.values())))
        return torch.cat([leaf.reshape(-1).double() for leaf in found if leaf.is_floating_point()])


def terms(problem: Any, directions: list[dict[str, Tensor]], members: int, inputs: Any = None) -> tuple[Tensor, Tensor]:
    """φ̇ of every direction, and Σφ̈ of every group of `members` in a row."""
    groups = len(directions) // members
    order = [index for member in range(members) for index in range(member, len(directions), members)]
    rows = {name: torch.stack([directions[index][name] for index in order]) for name in problem.params}
    firsts, seconds = taped(problem, inputs).along(problem.params).follow(rows, members)
    assert len(seconds) == groups
    return firsts[[order.index(index) for index in range(len(directions))]], seconds


def compared(problem: Any, members: int = 2, groups: int = 2, inputs: Any = None) -> None:
    directions = [
        {name: draw([tuple(tensor.shape)], 7 + 10 * index)[0].to(tensor) for name, tensor in problem.params.items()}
        for index in range(members * groups)
    ]
    firsts, seconds = terms(problem, directions, members, inputs)
    tolerance = 1e-10
    try:
        wanted = [along_reverse(problem, inputs, direction) for direction in directions]
    except RuntimeError:  # what has no second derivative backwards; these are straight
        wanted = [by_differences(problem, inputs, direction) for direction in directions]
        tolerance = 1e-6
    torch.testing.assert_close(firsts, torch.stack([each[1] for each in wanted]), rtol=tolerance, atol=tolerance)
    sums = torch.stack([each[2] for each in wanted]).unflatten(0, (groups, members)).sum(1)
    torch.testing.assert_close(seconds, sums, rtol=tolerance, atol=10 * tolerance)


def by_differences(problem: Any, inputs: Any, direction: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    step = 1e-4
    ends = [{n: p + sign * step * direction[n] for n, p in problem.params.items()} for sign in (1, 0, -1)]
    right, here, left = (problem.outputs(end, inputs) for end in ends)
    return here, (right - left) / (2 * step), (right - 2 * here + left) / step**2


OTHERWISE = {
    *(("leaky_relu", function) for function, _ in CALLS["leaky_relu"][2:]),  # rrelu draws its slopes
    *(("batch_norm", function) for function, _ in CALLS["batch_norm"][2:]),  # an operation of its own without writes
}
"""Calls that meet other operations once they are made free of in-place writes."""
RULED = [case for case in CASES if case.values[0].taylor is not None]


@pytest.mark.parametrize(("operation", "function", "shapes"), RULED)
def test_every_rule_gives_the_derivatives_of_its_operation(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    """The calls are those by which the table is tested, so that a new operation is covered by itself."""
    problem = Call(function, draw(shapes, 3))
    if operation.taylor is taylor_rules.still and operation.name != "steps":  # zeros, or cut off from its gradient
        with contextlib.suppress(Untaught):  # where nothing is taped at all
            assert not any(found.any() for found in terms(problem, [problem.params], 1))
        return
    if (operation.name, function) in OTHERWISE:
        with pytest.raises(Untaught, match=r"has no rule|cannot be taped"):
            compared(problem)
        return
    compared(problem)
    compared(problem, members=1, groups=3)
    direction = {name: tensor.cos() for name, tensor in problem.params.items()}
    if operation.name == "convert":  # in float32 differences say nothing
        return
    found = terms(problem, [direction], 1)
    for one, other in zip(found, by_differences(problem, None, direction)[1:], strict=True):
        torch.testing.assert_close(one[0], other, rtol=1e-4, atol=1e-4)


FORMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "a number minus": (lambda x: 3 - x, [(3, 4)]),
    "a number divided": (lambda x: 3 / (2 + x.square()), [(3, 4)]),
    "a power of a number": (lambda x: 2.0**x, [(3, 4)]),
    "a square that is a product": (lambda x: x * x, [(3, 4)]),
    "a matrix times itself": (lambda x: x @ x, [(4, 4)]),
    "broadcast products": (lambda x, y: x * y, [(3, 1, 4), (5, 1)]),
    "broadcast quotients": (lambda x, y: x / (2 + y.square()), [(4,), (5, 3, 1)]),
    "broadcast sums": (lambda x, y: x - 2 * y, [(4,), (5, 3, 1)]),
    "a softmax": (lambda x: F.softmax(x, 0), [(3, 4)]),
    "a softmax with a mask": (
        lambda x: F.softmax(x.masked_fill(torch.eye(3, 4, dtype=torch.bool), -torch.inf), -1),
        [(3, 4)],
    ),
    "a fused attention": (F.scaled_dot_product_attention, [(2, 3, 4), (2, 5, 4), (2, 5, 6)]),
    "layer norm without weights": (lambda x: F.layer_norm(x, (3, 4)), [(2, 3, 4)]),
    "layer norm, only weights move": (
        lambda w, b: F.layer_norm(torch.arange(8.0).reshape(2, 4).double().sin(), (4,), w, b),
        [(4,), (4,)],
    ),
    "group norm, no weights": (lambda x: F.group_norm(x, 2), [(2, 4, 3)]),
    "wide matrices": (lambda x, w, b: F.linear(x.tanh(), w, b), [(130, 129), (5, 129), (5,)]),
    "wide matrices, both curved": (lambda x, w: x.tanh() @ w.sin(), [(130, 129), (129, 5)]),
    "one norm": (lambda x: torch.linalg.vector_norm(x), [(3, 4)]),
    "norms that stay": (lambda x: torch.linalg.vector_norm(x.sin(), dim=(0, 2), keepdim=True), [(3, 4, 2)]),
    "normalised": (lambda x: F.normalize(x, dim=-1), [(3, 4)]),
    "rms norm": (lambda x, w: F.rms_norm(x, (4,), w), [(3, 4), (4,)]),
    "a scatter with a number": (lambda x: x.scatter(0, torch.tensor([[0, 2, 1, 0]]), 2.0), [(3, 4)]),
    "where with numbers": (lambda x: torch.where(x > 0, x.exp(), 0.5), [(3, 4)]),
    "padded with a number": (lambda x: F.pad(x, (1, 2), value=3.0).square(), [(3, 4)]),
    "written into slices": (
        lambda x, y: torch.zeros(3, 4).double().index_put((torch.tensor([0, 1]),), x)[:2].mul(y),
        [(2, 4), (2, 4)],
    ),
    "scaled sums of products": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2.0),
        [(5,), (3, 4), (4, 5)],
    ),
    "scaled sums of stacks": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=-2.0),
        [(2, 3, 5), (2, 3, 4), (2, 4, 5)],
    ),
    "a convolution with a bias, curved": (
        lambda x, w, b: F.conv2d(x.tanh(), w.tanh(), b.exp(), padding=1).sin(),
        [(2, 3, 4, 4), (2, 3, 3, 3), (2,)],
    ),
    "a strided transposed convolution": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1),
        [(2, 3, 4, 4), (3, 2, 3, 3), (2,)],
    ),
    "a curved class token": (
        lambda x, c: torch.cat([c.expand(2, -1, -1), x.tanh()], 1).exp(),
        [(2, 3, 4), (1, 1, 4)],
    ),
    "log softmax": (lambda x: F.log_softmax(x.sin(), 1), [(3, 4)]),
    "curved norms": (lambda x, w, b: F.layer_norm(x.sin(), (4,), w.exp(), b.tanh()).tanh(), [(3, 4), (4,), (4,)]),
}


@pytest.mark.parametrize(("function", "shapes"), FORMS.values(), ids=FORMS)
def test_forms_in_which_operations_are_called(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    compared(Call(function, draw(shapes, 5)), members=3, groups=2)


# ---------------------------------------------------------------- networks


def networks() -> Iterator[Any]:
    for name in (*zoo_transformers.TRANSFORMERS, *zoo_transformers.ADAPTERS):
        yield pytest.param(lambda name=name: zoo_transformers.transformer(name), id=name)
    for table in (zoo.EXACT, zoo.CHAINS, zoo.PROBED):
        for name, (make, shape, *_) in table.items():  # type: ignore[attr-defined]
            yield pytest.param(
                lambda make=make, shape=shape: (zoo.randomised(make()), zoo.sample_data(shape)[0]), id=name
            )


@pytest.mark.parametrize("make", [*networks()])
def test_terms_of_networks_are_those_of_autograd(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, inputs = make()
    problem = Problem(model)
    with problem.active():
        directions = [probe(problem.params, 0, index) for index in range(4)]
        firsts, seconds = terms(problem, directions, 2, inputs)
        wanted = [along_reverse(problem, inputs, direction) for direction in directions]
    torch.testing.assert_close(firsts, torch.stack([each[1] for each in wanted]), rtol=1e-10, atol=1e-10)
    sums = torch.stack([each[2] for each in wanted]).unflatten(0, (2, 2)).sum(1)
    torch.testing.assert_close(seconds, sums, rtol=1e-10, atol=1e-10 * float(sums.abs().max()))
