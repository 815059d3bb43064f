"""The table of operations: what is declared of each is checked by calls, and no other module keeps one of its own."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from operation_calls import ATEN, CALLS, CASES, UNSEEN, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spiritlevel as sl
from spiritlevel.binding.problem import Problem
from spiritlevel.watching import operations, path_rules
from spiritlevel.watching.operations import OPERATIONS, Chooses, Degree, Kind, Operation, called, dispatched
from spiritlevel.watching.paths import Paths
from spiritlevel.watching.recording import GradientNorms, analyse_few
from spiritlevel.watching.structure import analyse

ROOT = Path(sl.__file__).parent


def cases(condition: Callable[[Operation], Any]) -> Any:
    """The calls of the operations of which something is declared."""
    chosen = [case for case in CASES if condition(case.values[0])]
    return pytest.mark.parametrize(("operation", "function", "shapes"), chosen)


def flat(function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    """All numbers that a call returns, and nothing that it writes."""
    torch.manual_seed(0)
    result = function(*(tensor.clone() for tensor in tensors))
    return torch.cat([leaf.double().reshape(-1) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])


def jacobian(function: Callable[..., Any], tensors: list[Tensor], index: int, step: float = 1e-6) -> Tensor:
    """By differences, (numbers of the result, numbers of a tensor)."""
    columns = []
    for place in range(tensors[index].numel()):
        ends = []
        for sign in (1, -1):
            moved = [tensor.clone() for tensor in tensors]
            moved[index].view(-1)[place] += sign * step
            ends.append(flat(function, moved))
        columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, 1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- names


class Seen:
    """The functions and ATen operations that calls inside meet, at either level."""

    def __init__(self) -> None:
        seen = self

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.functions.add(func)
                return func(*args, **(kwargs or {}))

        class Dispatches(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.dispatches.add(func)
                return func(*args, **(kwargs or {}))

        self.functions, self.dispatches = set[Any](), set[Any]()
        self.modes = Functions(), Dispatches()

    def run(self, function: Callable[..., Any], tensors: list[Tensor]) -> None:
        with self.modes[0], self.modes[1]:
            function(*tensors)

    @property
    def operations(self) -> list[Operation]:
        return [*map(called, self.functions), *map(dispatched, self.dispatches)]


def test_every_operation_has_calls() -> None:
    assert sorted(CALLS) == sorted(operation.name for operation in OPERATIONS)


def test_no_name_has_two_meanings() -> None:
    functions = [function for op in OPERATIONS for name in op.functions for function in {*operations.spellings(name)}]
    assert len(functions) == len(set(functions))
    names = [name for operation in OPERATIONS for name in operation.aten]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_calls_of_an_operation_meet_it(operation: Operation) -> None:
    if not (operation.functions or operation.aten):  # an attribute, which every tensor has as a function of its own
        assert operations.called_by_name(operation.name) is operation
        return
    for function, shapes in CALLS[operation.name]:
        seen = Seen()
        seen.run(function, draw(shapes))
        assert operation in seen.operations


def test_every_name_is_met_by_a_call() -> None:
    """Some ATen operations are taken apart before they are dispatched, except in inference mode."""
    seen = Seen()
    for function, shapes in itertools.chain(*CALLS.values()):
        seen.run(function, draw(shapes))
        with torch.inference_mode():
            seen.run(function, draw(shapes))
    met = {name for op in OPERATIONS for name in op.functions if seen.functions & {*operations.spellings(name)}}
    assert {name for operation in OPERATIONS for name in operation.functions} - met <= UNSEEN
    names = {operations.aten_name(func) for func in seen.dispatches}
    assert {name for operation in OPERATIONS for name in operation.aten} - names <= UNSEEN
    assert all(hasattr(ATEN, name) for operation in OPERATIONS for name in operation.aten)


def test_an_operation_of_another_library_is_not_believed_by_its_name() -> None:
    """A library may call anything `relu`; what it does is not known."""
    with torch.library._scoped_library("spiritlevel_test", "DEF") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x.square(), "CompositeExplicitAutograd")
        mine = torch.ops.spiritlevel_test.relu
        assert dispatched(mine.default) is operations.UNKNOWN
        assert called(mine) is called(mine.default) is operations.UNKNOWN

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                return mine(self.layer(x))

        problem = Problem(Net())
        with problem.active():
            structure = analyse(problem, torch.randn(4, 3), 4)
        assert "spiritlevel_test::relu" in structure.reason


# ---------------------------------------------------------------- degrees


@cases(lambda operation: operation.degree is Degree.LINEAR and operation.homogeneous)
def test_what_is_linear_is_additive_and_homogeneous(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x, y = draw(shapes, 1), draw(shapes, 2)
    mixed = [2 * a - 3 * b for a, b in zip(x, y, strict=True)]
    rounding = 1e-5 if operation.name == "convert" else 1e-10  # to float32 and back
    close(flat(function, mixed), 2 * flat(function, x) - 3 * flat(function, y), rounding)


@cases(lambda operation: operation.degree is Degree.PIECEWISE)
def test_what_is_piecewise_linear_is_linear_nearby(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x, direction = draw(shapes, 1), draw(shapes, 2)
    left, right = ([a + sign * 1e-3 * d for a, d in zip(x, direction, strict=True)] for sign in (-1, 1))
    close(flat(function, left) + flat(function, right), 2 * flat(function, x))
    far = [20 * d for d in direction]  # but is not linear on the whole, which would be a stronger thing to say
    whole = flat(function, [a + f for a, f in zip(x, far, strict=True)])
    opposite = flat(function, [a - f for a, f in zip(x, far, strict=True)])
    assert not torch.allclose(whole + opposite, 2 * flat(function, x))


@cases(lambda operation: operation.homogeneous)
def test_what_is_homogeneous_passes_a_positive_factor_on(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    together = operation.degree in (Degree.LINEAR, Degree.PIECEWISE)
    scaled = [3.5 * a if together or not index else a for index, a in enumerate(x)]
    if operation.name == "linear":  # without its bias
        x, scaled = x[:2], scaled[:2]
    close(flat(function, scaled), 3.5 * flat(function, x), 1e-5 if operation.name == "convert" else 1e-10)


def check_linear_in(function: Callable[..., Any], x: list[Tensor], index: int) -> None:
    """Affine in one tensor, the others held."""
    values = []
    for factor in (0.0, 1.0, -2.0):
        moved = [*x]
        moved[index] = draw([tuple(x[index].shape)], 5)[0] * factor + x[index]
        values.append(flat(function, moved))
    close(values[2] - values[0], -2 * (values[1] - values[0]))


def curves_in_both(function: Callable[..., Any], x: list[Tensor], first: int, second: int) -> bool:
    both = [*x]
    values = []
    for factor in (-1.0, 0.0, 1.0):
        for index in (first, second):
            both[index] = x[index] + factor
        values.append(flat(function, both))
    return not torch.allclose(values[0] + values[2], 2 * values[1])


BILINEAR = {Degree.BILINEAR: (0, 1), Degree.BATCH_NORM: (0, 1), Degree.ADDED_BILINEAR: (1, 2)}


@cases(lambda operation: operation.degree in BILINEAR)
def test_what_is_bilinear_is_linear_in_each_tensor_and_in_no_two_factors_together(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    assert operation.degree is not None
    factors = BILINEAR[operation.degree]
    for index in range(len(x)):
        if index or operation.kink is None:  # a slope has a kink in its input
            check_linear_in(function, x, index)
    assert curves_in_both(function, x, *factors)
    for index in set(range(len(x))) - {*factors}:  # what is added
        for factor in factors:
            assert not curves_in_both(function, x, index, factor)


@cases(lambda operation: operation.degree is Degree.QUOTIENT)
def test_a_quotient_is_linear_above_and_curved_below(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    check_linear_in(function, x, 0)
    with pytest.raises(AssertionError):
        check_linear_in(function, x, 1)


@cases(lambda operation: operation.degree is Degree.NORMALISED)
def test_normalisations_are_linear_in_weight_and_bias_only(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    for index in (1, 2):
        check_linear_in(function, x, index)
    with pytest.raises(AssertionError):
        check_linear_in(function, x, 0)


@cases(lambda operation: operation.degree is Degree.CONSTANT)
def test_a_constant_does_not_look_at_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    assert torch.equal(flat(function, draw(shapes, 1)), flat(function, draw(shapes, 2)))


@cases(lambda operation: operation.degree is Degree.SMOOTH)
def test_what_is_called_curved_is_curved(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(AssertionError):
        check_linear_in(function, draw(shapes, 1), 0)


# ---------------------------------------------------------------- numbers and places


@cases(lambda operation: operation.elementwise)
def test_what_is_elementwise_has_a_diagonal_jacobian(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    for index in range(min(operation.elementwise, len(x))):
        found = jacobian(function, x, index)
        assert found.shape[0] == found.shape[1]
        assert torch.equal(found, found.diagonal().diag())
        assert bool(found.any())


@cases(lambda operation: operation.vanishes)
def test_what_vanishes_is_zero_where_one_tensor_is(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    for index in range(len(shapes)):
        x = draw(shapes, 1)
        assert bool(flat(function, x).any())
        x[index].zero_()
        assert not flat(function, x).any()


@cases(lambda operation: operation.keeps_order)
def test_copies_and_views_keep_numbers_and_their_order(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    found, expected = flat(function, x), x[0].reshape(-1)
    close(found, expected, 1e-6) if operation.name == "convert" else close(found, expected, 0.0)


@cases(lambda operation: operation.kind is Kind.ALIAS)
def test_an_alias_is_the_same_memory(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    (x,) = draw(shapes, 1)
    assert function(x).data_ptr() == x.data_ptr()


@cases(lambda operation: operation.kind in (Kind.MOVING, Kind.JOIN))
def test_what_moves_numbers_takes_them_from_its_tensors(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    there = {float(number) for tensor in x for number in tensor.reshape(-1)}
    if operation.name == "col2im":  # which adds what falls on one place
        there |= {a + b for a, b in itertools.product(there, repeat=2)}
        there |= {float(n) for n in flat(function, x)[4::9]}
    assert {float(number) for number in flat(function, x)} <= {*there, 0.0}
    if operation.kind is Kind.JOIN:
        assert flat(function, x).numel() == sum(tensor.numel() for tensor in x)


@cases(lambda operation: operation.kind is Kind.SUM)
def test_what_meets_carries_a_common_factor_of_each_place(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    factor = draw(shapes[:1], 2)[0].exp()
    close(flat(function, [factor * tensor for tensor in x]), factor.reshape(-1) * flat(function, x))


@cases(lambda operation: operation.kind is Kind.MASK)
def test_a_mask_replaces_numbers_at_some_places(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    found = function(*x)
    kept = torch.stack([found == tensor for tensor in x]).any(0)
    assert bool(kept.any())
    assert not bool((found == x[0]).all())


@cases(lambda operation: operation.kind is Kind.REDUCTION)
def test_a_reduction_leaves_fewer_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    assert flat(function, draw(shapes)).numel() < math.prod(shapes[0])


@cases(lambda operation: operation.kind is Kind.SPATIAL)
def test_what_is_spatial_treats_every_channel_by_itself_and_alike(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    (x,) = draw(shapes, 1)
    order = torch.arange(x.shape[1]).flip(0)
    close(function(x[:, order]), function(x)[:, order])
    changed = x.clone()
    changed[:, 0] += 1
    before, after = function(x), function(changed)
    assert torch.equal(before[:, 1:], after[:, 1:])
    assert not torch.equal(before[:, :1], after[:, :1])


@cases(lambda operation: operation.by_memory)
def test_what_reads_memory_gives_other_numbers_for_another_layout(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    laid_out = [x[0].T.contiguous().T, *x[1:]]
    assert not torch.equal(function(*x), function(*laid_out))


@cases(lambda operation: operation.chooses is Chooses.SIZE and operation.degree is None)
def test_numbers_decide_the_size(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    sizes = {flat(function, draw(shapes, seed)).numel() for seed in range(20)}
    assert len(sizes) > 1


@cases(lambda operation: operation.chooses is Chooses.ROWS)
def test_rows_are_chosen_by_whole_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    given: list[Any] = []

    class Arguments(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if dispatched(func) is operation:
                given.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return func(*args, **(kwargs or {}))

    with Arguments():
        function(*draw(shapes))
    assert any(not tensor.is_floating_point() for tensor in given)


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3]).double()),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0),
    "clamp": lambda x: x.clamp_min(0.0),
}


def test_kinks_are_where_they_are_said_to_be() -> None:
    assert {operation.name for operation in OPERATIONS if operation.kink} == {*KINKS}
    for function in KINKS.values():
        left, middle, right = function(torch.tensor([-1e-3, 0.0, 1e-3]).double())
        assert abs((right - middle) - (middle - left)) > 1e-4


# ---------------------------------------------------------------- rules


@cases(lambda op: op.path not in (None, path_rules.unreached) and op.degree is Degree.LINEAR and op.aten)
def test_the_rule_of_paths_squares_the_jacobian_of_a_linear_operation(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    """Of a linear operation J, with sums s behind each number that comes in, the sums behind the result are J² s."""
    check_paths(function, draw(shapes, 1), len(shapes))


@cases(lambda op: op.path is not None and op.degree in (Degree.BILINEAR, Degree.QUOTIENT) and op.kink is None)
def test_the_rule_of_paths_squares_the_weights_of_a_product(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes[:2], 1)
    check_paths(function, x, 1)


def check_paths(function: Callable[..., Any], x: list[Tensor], reached: int) -> None:
    sums = [tensor.square() + 0.1 for tensor in draw([tuple(tensor.shape) for tensor in x], 3)]
    paths = Paths(x[0])
    for tensor, behind in list(zip(x, sums, strict=True))[:reached]:
        paths.known[id(tensor)] = behind
        paths.kept.append(tensor)
    with paths:
        result = torch.func.functionalize(function)(*x)
    found = torch.cat([paths.squares(leaf).reshape(-1) for leaf in tree_leaves(result)])
    parts = [jacobian(function, x, index, 0.5).square() @ sums[index].reshape(-1) for index in range(reached)]
    close(found, torch.stack(parts).sum(0), 1e-6)


WITH_NORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = {
    # what is called with the values and the parameters; shapes of a sample's values, of the result, of the parameters
    "add": (lambda x, b: x + b, (4,), (4,), [(4,)]),
    "sub": (lambda x, b: x - b, (4,), (4,), [(4,)]),
    "rsub": (lambda x, b: Tensor.__rsub__(x, b), (4,), (4,), [(4,)]),
    "mul": (lambda x, w: w * x, (4,), (4,), [(4,)]),
    "matmul": (torch.matmul, (4,), (5,), [(4, 5)]),
    "mm": (torch.mm, (4,), (5,), [(4, 5)]),
    "addmm": (lambda x, b, w: torch.addmm(b, x, w), (4,), (5,), [(5,), (4, 5)]),
    "linear": (F.linear, (4,), (5,), [(5, 4), (5,)]),
    "convolution": (F.conv1d, (2, 6), (3, 4), [(3, 2, 3), (3,)]),
    "transposed_convolution": (F.conv_transpose1d, (2, 6), (3, 8), [(2, 3, 3), (3,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b),
        (3, 4),
        (3, 4),
        [(3,), (3,)],
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (4, 3), (4, 3), [(4,), (4,)]),
    "prelu": (F.prelu, (3, 4), (3, 4), [(3,)]),
    "embedding": (F.embedding, (6,), (6, 2), [(5, 2)]),
}


def test_the_rules_of_norms_are_taken_and_fit() -> None:
    """`GradientNorms` compares each rule with autograd, and names the parameters whose rule does not fit."""
    assert {operation.name for operation in OPERATIONS if operation.norm} == {*WITH_NORMS}
    for name, (function, before, after, shapes) in WITH_NORMS.items():

        class Net(nn.Module):
            def __init__(self, function: Any, after: Any, shapes: Any) -> None:
                super().__init__()
                self.function = function
                self.own = nn.ParameterList([nn.Parameter(tensor) for tensor in draw(shapes, 1)])
                self.head = nn.Linear(math.prod(after), 2).double()

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.function(x, *self.own).flatten(1))

        inputs = draw([(5, *before)], 2)[0]
        if name == "embedding":
            inputs = torch.randint(0, 5, (5, *before), generator=torch.Generator().manual_seed(0))
        problem = Problem(Net(function, after, shapes))
        with problem.active():
            assert not GradientNorms(problem, inputs, analyse_few(problem, inputs), 2).without_rule, name


# ---------------------------------------------------------------- what is not known


def lacks(operation: Operation) -> Iterator[str]:
    """The columns that an operation could have, and has not."""
    if not operation.functions:
        yield "functions"
    if not operation.aten:
        yield "aten"
    if operation.degree is None:
        yield "degree"
    if operation.path is None and operation.aten and operation.degree not in (Degree.SMOOTH, Degree.NORMALISED):
        yield "path"
    if operation.norm is None and (operation.layer or operation.degree in (*BILINEAR, Degree.QUOTIENT)):
        yield "norm"
    if operation.channels is None and operation.functions:
        yield "channels"
    if operation.taylor is None and operation.aten:
        yield "taylor"


LACKING = {
    "functions": """
        __get__ _fft_c2c _fft_c2r _fft_r2c _unique _unique2 as_strided_scatter bincount index
        interpolate_otherwise lift masked_select nonzero pad_by_copies unique_consecutive unique_dim
    """,
    "degree": """
        __get__ _unique _unique2 as_strided_scatter attention bilinear bincount compared cumprod detach einsum
        glu gru instance_norm linalg_vector_norm log_softmax logcumsumexp logsumexp lp_pool lstm masked_select
        multi_head_attention_forward nonzero normalize prod rdiv requires_grad rmatmul rms_norm rnn_relu
        rnn_tanh rot90 rounded setitem softmax statistics std steps tensordot unique_consecutive unique_dim var
    """,
    "aten": """
        __get__ attention bilinear compared dropout einsum glu gru instance_norm lp_pool lstm
        multi_head_attention_forward normalize rdiv requires_grad rmatmul rms_norm rnn_relu rnn_tanh rot90
        rounded setitem softsign square statistics tanhshrink tensordot transposed_convolution
    """,
    "path": """
        _fft_c2c _fft_c2r _fft_r2c _unique _unique2 addbmm amin as_strided as_strided_scatter avg_pool1d
        batch_norm bincount clamp_max cumprod diag_embed drawn embedding fill fmax gather hardshrink hardsigmoid
        hardtanh index_add index_copy index_fill index_put interpolate_otherwise kthvalue linalg_vector_norm
        log_softmax logcumsumexp logsumexp masked_fill masked_scatter masked_select median min minimum nanmedian
        nonzero prod repeat_interleave scatter scatter_add softmax softshrink sort std steps take topk trace
        unique_consecutive unique_dim var vdot view_as_complex view_as_real where
    """,
    "taylor": """
        _unique _unique2 as_strided as_strided_scatter bincount masked_select nonzero unique_consecutive unique_dim
    """,
    "norm": """
        addbmm addmv baddbmm bilinear bmm div dot einsum gru lstm multi_head_attention_forward mv rmatmul
        rnn_relu rnn_tanh tensordot vdot
    """,
    "channels": """
        addbmm addmv as_strided bilinear col2im copy cumprod cumsum dot fill fmax gru index_add index_copy
        index_fill index_put kthvalue log_softmax logcumsumexp lstm masked_scatter multi_head_attention_forward
        mv nanmedian rnn_relu rnn_tanh scatter scatter_add select_scatter slice_scatter softmax sort tensordot
        topk trace vdot
    """,
}


def test_what_operations_lack_is_listed() -> None:
    """Whoever teaches an operation strikes it out here; whoever adds one says what it lacks."""
    found: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        for column in lacks(operation):
            found.setdefault(column, []).append(operation.name)
    assert {column: sorted(names) for column, names in found.items()} == {
        column: sorted(names.split()) for column, names in LACKING.items()
    }


# ---------------------------------------------------------------- one table, and no other

EXEMPT = {
    "watching/operations.py",
    "binding/rewrites.py",  # what PyTorch's derivatives get wrong, below everything that watches
    "binding/recurrent.py",  # what it writes out with it, for the tape
    "loading/exported.py",  # arithmetic of sizes that a file may ask for: Python's own, not of tensors
}
NAMES = {name.removeprefix("F.") for operation in OPERATIONS for name in (*operation.functions, *operation.aten)}
OTHER_MEANINGS = {"mean", "sum", "max", "min", "median", "trace", "float", "double", "index", "copy", "sort", "linear"}
OTHER_MEANINGS |= {"cpu", "cuda", "all", "any", "to", "type", "norm", "half", "median"}
"""Words that name more than operations: reductions of a loss, measures, columns."""


def operation_named(node: ast.expr) -> str:
    """The operation that an element of a collection names: "relu", F.relu, torch.relu, torch.ops.aten.relu.default."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value in NAMES - OTHER_MEANINGS else ""
    parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
    known = [part for part in parts[1:] if part in NAMES]
    return known[0] if known and parts[0] in ("F", "torch", "Tensor", "_aten", "aten") else ""


def collections_of(tree: ast.AST) -> Iterator[tuple[int, list[ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Set):
            yield node.lineno, node.elts
        elif isinstance(node, ast.Tuple | ast.List):  # of functions, perhaps to be called one after the other
            yield node.lineno, [element for element in node.elts if isinstance(element, ast.Constant)]
        elif isinstance(node, ast.Dict):
            yield node.lineno, [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n\n" not in node.value:
            words = node.value.split()
            if all(word.isidentifier() for word in words):
                yield node.lineno, [ast.Constant(word) for word in words]


def tables(code: str) -> list[str]:
    """Collections in which most elements name operations, two or more."""
    found = []
    for line, elements in collections_of(ast.parse(code)):
        named = {operation_named(element) for element in elements} - {""}
        if len(named) > 1 and 2 * len(named) > len(elements):
            found.append(f"line {line}: {', '.join(sorted(named))}")
    return found


def test_no_other_module_keeps_a_table_of_operations() -> None:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith("papers/"):  # which name the activations of networks
            continue
        if path not in EXEMPT and (lines := tables(file.read_text(encoding="utf-8"))):
            found[path] = lines
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        'KNOWN = frozenset("relu leaky_relu abs".split())',
        'KNOWN = {"relu": 1, "tanh": 2}',
        'if name in ("add", "add_", "sub"): pass',
        "RULES = {F.linear: rule, torch.conv2d: other}",
        "SAME = {_aten.alias.default, torch.ops.aten.detach.default}",
    ],
)
def test_the_search_for_tables_finds_them(code: str) -> None:
    assert tables(code)


def test_the_search_for_tables_lets_other_words_pass() -> None:
    assert not tables('"""Take the mean of a sum, or add it."""')
    assert not tables('if reduction in ("mean", "sum"): pass')
    assert not tables("x = F.relu(torch.tanh(y))")


def test_python_knows_a_function_by_the_entry_of_its_plain_name() -> None:
    for operation in OPERATIONS:
        for name in operation.functions:
            assert operations.called_by_name(operations.plain_name(name)) is operation, name
    assert operations.called_by_name("no_such_function") is operations.UNKNOWN
