"""Second-order Taylor terms: every rule of the table against autograd and differences, networks, groups, fallbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import naive
import pytest
import torch
import zoo
import zoo_transformers
from conftest import Untouched
from operation_calls import CALLS, CASES, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import spiritlevel as sl
from spiritlevel.binding.problem import Problem
from spiritlevel.samples import collapsing, collecting
from spiritlevel.samples.collapsing import members_of
from spiritlevel.samples.probing import along_reverse, probe
from spiritlevel.watching import taylor_rules, taylor_terms
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
    """The calls are those by which the table is tested, so that a new operation is covered automatically."""
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


class Recurrent(nn.Module):
    """A recurrent layer and a head on all that it returns; with `packed`, on sequences of several lengths."""

    def __init__(self, layer: nn.RNNBase, packed: bool = False) -> None:
        super().__init__()
        self.before, self.layer, self.head, self.packed = nn.Linear(3, 3), layer, nn.LazyLinear(3), packed

    def forward(self, x: Tensor) -> Tensor:
        given: Any = self.before(x)
        if self.packed:
            lengths = 1 + (x[:, 0, :2] > 0).sum(1)
            given = pack_padded_sequence(given, lengths, batch_first=True, enforce_sorted=False)
        found, state = self.layer(given)
        if self.packed:
            found = pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]
        states = [each.transpose(0, 1).flatten(1) for each in (state if isinstance(state, tuple) else [state])]
        return self.head(torch.cat([found.flatten(1), *states], 1))


class Cells(nn.Module):
    """A cell called for every step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM(3, 4, batch_first=True)),
    "gru": lambda: Recurrent(nn.GRU(3, 4, batch_first=True)),
    "rnn": lambda: Recurrent(nn.RNN(3, 4, batch_first=True)),
    "rnn, relu": lambda: Recurrent(nn.RNN(3, 4, batch_first=True, nonlinearity="relu")),
    "lstm, two layers, both ways": lambda: Recurrent(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)),
    "gru, two layers, both ways": lambda: Recurrent(nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)),
    "lstm, projected": lambda: Recurrent(nn.LSTM(3, 4, batch_first=True, proj_size=2)),
    "lstm, no biases": lambda: Recurrent(nn.LSTM(3, 4, batch_first=True, bias=False)),
    "lstm, packed": lambda: Recurrent(nn.LSTM(3, 4, batch_first=True), packed=True),
    "gru, packed, both ways": lambda: Recurrent(nn.GRU(3, 4, batch_first=True, bidirectional=True), packed=True),
    "rnn, packed": lambda: Recurrent(nn.RNN(3, 4, batch_first=True), packed=True),
    "lstm cell": lambda: Cells(nn.LSTMCell(3, 4)),
    "lstm cell, no biases": lambda: Cells(nn.LSTMCell(3, 4, bias=False)),
    "gru cell": lambda: Cells(nn.GRUCell(3, 4)),
    "rnn cell": lambda: Cells(nn.RNNCell(3, 4)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_terms_of_recurrent_networks_are_those_of_autograd(name: str) -> None:
    """Written out where they are followed: they are one call, which writes into its own memory."""
    torch.manual_seed(3)
    model, x = RECURRENT[name](), torch.randn(4, 3, 3).double()
    model.double()(x)  # the head learns its width
    problem = Problem(model)
    with problem.active():
        directions = [probe(problem.params, 0, index) for index in range(4)]
        outputs = problem.outputs(problem.params, x)
        torch.testing.assert_close(taped(problem, x).outputs, outputs, rtol=1e-12, atol=1e-12)
        firsts, seconds = terms(problem, directions, 2, x)
        wanted = [along_reverse(problem, x, direction) for direction in directions]
    torch.testing.assert_close(firsts, torch.stack([each[1] for each in wanted]), rtol=1e-10, atol=1e-10)
    sums = torch.stack([each[2] for each in wanted]).unflatten(0, (2, 2)).sum(1)
    torch.testing.assert_close(seconds, sums, rtol=1e-10, atol=1e-10 * float(sums.abs().max()))
    found = sl.sample_traces(model, (x, torch.arange(4) % 3), method="hutchinson", probes=4)
    assert not found.notes  # no word of one probe after the other


# ---------------------------------------------------------------- traces


def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule for anything: the path of one probe after the other."""

    def nothing(*_: Any) -> Any:
        raise Untaught("nobody may")

    monkeypatch.setattr(collapsing, "taped", nothing)


def of_transformer(name: str, count: int = 5) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model, inputs = zoo_transformers.transformer(name)
    classes = model(inputs[:1]).shape[1]
    return model, (inputs[:count], torch.arange(count) % classes)


@pytest.mark.parametrize(
    ("name", "probes"),
    [("bert", 6), ("gpt, tied", 5), ("llama, complex, gqa", 6), ("vit", 64), ("torch, post-norm", 32)],
)
def test_the_same_probes_give_the_same_traces_as_one_after_the_other(
    name: str, probes: int, monkeypatch: pytest.MonkeyPatch, untouched: Untouched
) -> None:
    model, batch = of_transformer(name, 3)
    with untouched(model):
        quick = sl.sample_traces(model, batch, method="hutchinson", probes=probes, seed=3)
    assert not quick.notes
    slowly(monkeypatch)
    slow = sl.sample_traces(model, batch, method="hutchinson", probes=probes, seed=3)
    assert any("one probe after the other, because nobody may" in note for note in slow.notes)
    torch.testing.assert_close(quick.values, slow.values, rtol=1e-10, atol=1e-10)
    assert slow.draws is not None
    assert quick.draws is not None
    members = members_of(probes)
    assert (quick.draws.shape[1], quick.dof) == (probes // members, probes // members - 1)
    assert (slow.draws.shape[1], slow.dof) == (probes, probes - 1)
    grouped = slow.draws.unflatten(1, (-1, members)).mean(2)
    torch.testing.assert_close(quick.draws, grouped, rtol=1e-9, atol=1e-9)
    error = grouped.std(1) / grouped.shape[1] ** 0.5
    torch.testing.assert_close(quick.stderr, error, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "exponential", "callable"])
def test_traces_of_a_transformer_are_those_of_its_dense_hessians(loss: str) -> None:
    torch.manual_seed(0)
    model = zoo_transformers.settled(zoo_transformers.OneAttention(change="capped"))
    inputs = zoo_transformers.sequences(4)
    batch = inputs, torch.tensor([0, 1, 2, 1])
    given: Any = loss
    if loss == "callable":
        given = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    found = sl.sample_traces(model, batch, loss=given, method="hutchinson", probes=640)
    truth = naive.total_traces(model, *batch, **({} if loss in ("cross_entropy", "callable") else {"loss": loss}))
    assert found.dof == 159
    assert not found.notes
    assert bool(((found.values - truth).abs() < 4.5 * found.stderr).all())
    total = found.mean()
    assert abs(total.value - float(truth.mean())) < 4 * total.stderr


def test_layers_by_probes_inside_of_them() -> None:
    """The diagonal blocks, each by probes that move its parameter alone."""
    model, batch = of_transformer("llama, no positions", 2)
    some = [name for name, _ in model.named_parameters()][:4]
    found = sl.sample_traces(model, batch, params=some, method="hutchinson", probes=400, per_layer=True)
    torch.testing.assert_close(torch.stack([*found.layers.values()]).sum(0), found.values, rtol=1e-10, atol=1e-10)
    truth = naive.block_traces(model, *batch, params=some)
    for name, values in found.layers.items():
        alone = sl.sample_traces(model, batch, params=[name], method="hutchinson", probes=400)
        assert bool(((values - truth[name]).abs() < 5 * alone.stderr + 1e-10).all())


def test_the_remainder_of_a_split_uses_the_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape, _ = zoo.PROBED["tanh conv"]
    model, batch = zoo.randomised(make()), zoo.sample_data(shape, 6)
    monkeypatch.setattr(collecting, "splitting_pays", lambda *_, **__: True)
    quick = sl.sample_traces(model, batch, probes=64)
    assert quick.method == "gauss-newton + remainder"
    assert quick.dof == 15
    slowly(monkeypatch)
    slow = sl.sample_traces(model, batch, probes=64)
    torch.testing.assert_close(quick.values, slow.values, rtol=1e-10, atol=1e-10)


def test_auto_takes_the_way_with_the_smaller_error_for_the_same_work() -> None:
    """Fitted, nearly all spread is that of the Gauss-Newton part, which a split has exactly; untrained, none of it is.

    The work is counted in forward passes: a backward pass with its norms is two, a collapsed probe three.
    """
    inputs, targets = (part[:60] for part in sl.data.load("digits").train)
    torch.manual_seed(0)
    body = nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(512, 32), nn.GELU()
    model = nn.Sequential(*body, nn.Linear(32, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5
    taken = []
    for steps in (0, 150):
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
        taken.append(sl.sample_traces(model, (inputs, targets), probes=64).method)
        errors = {}
        for pays in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(collecting, "splitting_pays", lambda *_, pays=pays, **__: pays)
                found = sl.sample_traces(model, (inputs, targets), probes=64)
            assert (found.method == "gauss-newton + remainder") == pays
            errors[pays] = found.mean().stderr ** 2 * (64 * 3 + 9 * 2 * pays)
        assert (taken[-1] == "gauss-newton + remainder") == (errors[True] < errors[False])
    assert taken == ["hutchinson", "gauss-newton + remainder"]
    assert sl.sample_traces(model, (inputs, targets), rel_err=0.01).method == "gauss-newton + remainder"


def test_groups_of_a_relative_error() -> None:
    make, shape, _ = zoo.PROBED["tied"]
    model, batch = zoo.randomised(make()), zoo.sample_data(shape, 8)
    few = sl.sample_traces(model, batch, method="hutchinson", rel_err=10.0)
    assert few.dof == 15  # the pilot alone: 16 groups of one
    many = sl.sample_traces(model, batch, method="hutchinson", rel_err=0.05)
    assert many.probes is not None
    count = int(many.probes[0])
    assert count % 4 == 0
    assert count > 64
    assert many.dof == count // 4 - 1
    again = sl.sample_traces(model, batch, method="hutchinson", probes=count)
    torch.testing.assert_close(many.stderr, again.stderr, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- where there is no rule


class Unknown(nn.Module):
    """An operation that nobody taught, in every batch or behind a threshold only."""

    def __init__(self, above: float = -1.0) -> None:
        super().__init__()
        self.first, self.last, self.above = nn.Linear(6, 4), nn.Linear(4, 3), above

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if float(x.abs().max()) > self.above:
            hidden = torch.special.bessel_j0(hidden) if self.above < 0 else torch.lgamma(hidden + 3)
        return self.last(hidden)


def test_an_operation_without_a_rule_is_named(untouched: Untouched) -> None:
    model = zoo.randomised(Unknown(above=0.0))
    batch = zoo.sample_data(zoo.FLAT, 6)
    with untouched(model):
        found = sl.sample_traces(model, batch, method="hutchinson", probes=64)
    assert any("'lgamma' has no rule" in note for note in found.notes)
    assert found.dof == 63
    truth = naive.total_traces(model, *batch)
    assert bool(((found.values - truth).abs() < 5 * found.stderr).all())


def test_an_operation_of_a_later_batch() -> None:
    """The groups stay, the batch is measured in the other way, and the note says from where on."""
    model = zoo.randomised(Unknown(above=50.0))
    inputs, targets = zoo.sample_data(zoo.FLAT, 12)
    inputs[9] *= 100
    found = sl.sample_traces(model, (inputs, targets), method="hutchinson", probes=256, batch_size=4)
    assert [note for note in found.notes if "from sample 8 on" in note and "'lgamma'" in note]
    assert found.dof == 63
    whole = [naive.total_traces(model, inputs[k : k + 4], targets[k : k + 4]) for k in (0, 4, 8)]
    assert bool(((found.values - torch.cat(whole)).abs() < 5 * found.stderr + 1e-8).all())


def test_other_operations_of_a_later_batch_are_compared_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(Unknown):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).tanh()
            return self.last(hidden.sigmoid() if float(x.abs().max()) > 50 else hidden)

    counted = []
    compare = collapsing.Prober._compare
    monkeypatch.setattr(collapsing.Prober, "_compare", lambda *args: counted.append(1) or compare(*args))
    inputs, targets = zoo.sample_data(zoo.FLAT, 12)
    inputs[9] *= 100
    model = zoo.randomised(Branching())
    found = sl.sample_traces(model, (inputs, targets), method="hutchinson", probes=4, batch_size=4)
    assert not found.notes
    assert len(counted) == 2


def test_a_wrong_rule_is_found_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bend that is off by one per cent, on a network in float32."""
    model, batch = of_transformer("bert", 4)
    model = model.float()
    right = taylor_terms.Terms.bent
    monkeypatch.setattr(taylor_terms.Terms, "bent", lambda self, rows, bend: right(self, rows, 1.01 * bend))
    found = sl.sample_traces(model, batch, method="hutchinson", probes=4)
    assert any("disagree with autograd" in note for note in found.notes)


def test_terms_in_pieces_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes: one sample at a time, one group at a time; the values stay, and what does not fit at all is said."""
    model, batch = of_transformer("gpt", 4)
    whole = sl.sample_traces(model, batch, method="hutchinson", probes=64)
    tapes = []
    monkeypatch.setattr(collapsing, "taped", lambda *args: tapes.append(args) or taped(*args))
    pieces = sl.sample_traces(model, batch, method="hutchinson", probes=64, batch_size=4, memory="250kB")
    assert len(tapes) > 5
    assert not pieces.notes
    torch.testing.assert_close(pieces.values, whole.values, rtol=1e-10, atol=1e-10)
    tight = sl.sample_traces(model, batch, method="hutchinson", probes=64, batch_size=4, memory="150kB")
    assert any("memory does not hold" in note for note in tight.notes)
    torch.testing.assert_close(tight.values, whole.values, rtol=1e-10, atol=1e-10)


def test_float32_agrees_with_float64() -> None:
    """Two products in the place of three lose nothing, at widths where they are taken."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 3)
    )
    inputs, targets = torch.randn(150, 192), torch.arange(150) % 3
    with torch.no_grad():
        model[1].weight *= 30  # factors of other sizes
        model[3].weight /= 30
    coarse = sl.sample_traces(model, (inputs, targets), method="hutchinson", probes=4)
    fine = sl.sample_traces(model.double(), (inputs.double(), targets), method="hutchinson", probes=4)
    assert not coarse.notes
    assert float((coarse.values - fine.values).norm() / fine.values.norm()) < 2e-5
