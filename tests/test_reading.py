"""Batches and outputs as people have them: dicts, named tuples, several items, graphs, data sets of other libraries."""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import spiritlevel as sl
from spiritlevel.binding.batches import Batches
from spiritlevel.binding.context import Context
from spiritlevel.binding.reading import Takes
from spiritlevel.errors import InputError

N = 9
GENERATOR = torch.Generator().manual_seed(0)
X, Z = torch.randn(N, 4, generator=GENERATOR).double(), torch.randn(N, 2, generator=GENERATOR).double()
Y = torch.arange(N) % 3


class One(nn.Module):
    """Takes one input."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Two(One):
    """Takes numbers and categories."""

    def forward(self, x: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        return self.inner(x) * z.sum(1, keepdim=True)


class Open(One):
    """Takes one input, or two."""

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.inner(x) if z is None else self.inner(x) * z.sum(1, keepdim=True)


class Hidden(One):
    """Does not say what it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@functools.cache
def of_one() -> tuple[Tensor, Tensor]:
    """Traces and Hessian of the network of one input, read plainly."""
    return plain(One(), X), sl.hessian(One(), (X, Y)).dense()


def plain(model: nn.Module, *inputs: Tensor) -> Tensor:
    return sl.sample_traces(model, (inputs[0] if len(inputs) == 1 else inputs, Y)).values


def loader(data: Dataset[Any], size: int = 4) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size)


class Dicts(Dataset[Any]):
    """A data set whose samples are dicts, of tensors or of lists as tokenisers leave them."""

    def __init__(self, key: str = "labels", lists: bool = False, **more: Any) -> None:
        self.key, self.lists, self.more = key, lists, more

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index].tolist() if self.lists else X[index], self.key: int(Y[index]), **self.more}


Named = namedtuple("Named", ["x", "y"])


class Three(NamedTuple):
    image: Tensor
    label: Tensor
    weight: Tensor


READ: dict[str, tuple[Any, dict[str, Any]]] = {
    "a dict in memory": ({"x": X, "labels": Y}, {}),
    "a mapping": (UserDict({"x": X, "labels": Y}), {}),
    "dicts": ([{"x": X[:4], "label": Y[:4]}, {"x": X[4:], "label": Y[4:]}], {}),
    "a named key": ({"x": X, "class": Y}, {"target": "class"}),
    "one of two keys": ({"x": X, "y": Y, "labels": 9 - Y}, {"target": "y"}),
    "a dict with more": ({"x": X, "labels": Y, "idx": torch.arange(N)}, {}),
    "a data set of dicts": (Dicts(), {}),
    "a data set of lists": (Dicts(lists=True), {}),
    "a loader of dicts": (loader(Dicts("target", text="a sentence")), {}),
    "three items": ((X, Y, torch.arange(N)), {}),
    "a loader of three": (loader(TensorDataset(X, Y, torch.arange(N))), {}),
    "three items, the second": ([[X, Y, Y]], {"target": 1}),
    "a named pair": ([Named(X, Y)], {}),
    "three names": ([Three(X, Y, Z)], {}),
    "three names, one of them": ([Three(X, Y, Z)], {"target": "label"}),
    "a function": ([("id", {"deep": X}, [Y])], {"batch": lambda b: (b[1]["deep"], b[2][0])}),
    "a function of tensors in memory": ((Y, X), {"batch": lambda b: (b[1], b[0])}),
    "a function of a dict in memory": ({"a": X, "b": Y}, {"batch": lambda b: (b["a"], b["b"])}),
    "arrays": ({"x": X.numpy(), "labels": Y.numpy()}, {}),
}


@pytest.mark.parametrize("name", READ)
def test_batches_in_all_their_forms_are_the_same_samples(name: str, untouched: Untouched) -> None:
    data, options = READ[name]
    model = One()
    with untouched(model):
        found = sl.sample_traces(model, data, **options)
    torch.testing.assert_close(found.values, of_one()[0])
    assert torch.equal(found.targets, Y)


EVERYWHERE: dict[str, Callable[..., Any]] = {
    "trace": lambda *args, **options: sl.trace(*args, **options).value,
    "margins": lambda *args, **options: sl.margins(*args, **options).signed,
    "input_curvature": lambda *args, **options: sl.input_curvature(*args, **options).values,
    "hessian": lambda *args, **options: sl.hessian(*args, **options).dense(),
    "gauss_newton": lambda *args, **options: sl.gauss_newton(*args, **options).dense(),
    "empirical_fisher": lambda *args, **options: sl.empirical_fisher(*args, **options).dense(),
    "hessian_variance": lambda *args, **options: sl.hessian_variance(*args, **options).dense(),
    "landscape": lambda *args, **options: sl.landscape(*args, points=3, **options).losses,
    "measure": lambda *args, **options: (
        sl.measure(*args, measures=["trace"], parts=[], samples=6, **options).rows[0].value.value
    ),
    "audit": lambda *args, **options: (
        sl.audit(*args, measures=["trace"], transforms=["rescale_layers"], **options).rows[0].after.value
    ),
    "compare": lambda model, *args, **options: (
        sl.compare(model, model, *args, measures=["trace"], audit=False, **options).rows[0].a.value
    ),
    "perturb": lambda *args, **options: sl.perturb(*args, "int4", layers=False, **options).predicted.value,
    "Tracker": lambda *args, **options: sl.Tracker(*args, samples=6, **options).measure()["trace"],
    "stability": lambda model, data, **options: (
        sl.stability(torch.optim.SGD(model.parameters(), lr=0.1), model, data, **options).curvature.value
    ),
    "evaluate": lambda *args, **options: sl.measures.evaluate(*args, measures=["largest_eigenvalue"], **options)[0][
        "value"
    ],
}


class Returns(One):
    """Returns more than its outputs."""

    def forward(self, x: Tensor) -> Any:
        return {"features": x, "scores": self.inner(x)}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_every_function_reads_alike(name: str) -> None:
    """One key of the targets and one of the outputs, which nobody could guess."""
    batches = [{"x": X[:4], "class": Y[:4], "labels": Z[:4]}, {"x": X[4:], "class": Y[4:], "labels": Z[4:]}]
    found = EVERYWHERE[name](Returns(), batches, target="class", output="scores")
    wanted = EVERYWHERE[name](One(), [(X[:4], Y[:4]), (X[4:], Y[4:])])
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["hessian", "trace", "measure", "Tracker", "margins"])
def test_a_function_reads_batches_everywhere(name: str) -> None:
    def batch(given: Any) -> tuple[Any, Any]:
        assert given[0] == "mark"  # never what was read already
        return given[2], given[1]

    data = [("mark", Y[:4], X[:4]), ("mark", Y[4:], X[4:])]
    found = EVERYWHERE[name](One(), data, batch=batch)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(EVERYWHERE[name](One(), (X, Y))))


def test_a_tracker_reads_the_batches_of_its_steps() -> None:
    tracker = sl.Tracker(One(), every=1, share=1e9, target="class")
    row = tracker.step({"x": X, "class": Y})
    assert row is not None
    assert row["trace"] == pytest.approx(sl.trace(One(), (X, Y)).value)


def test_the_forward_settles_which_of_several_items_are_inputs() -> None:
    first = sl.sample_traces(One(), (X, Y, Z))
    torch.testing.assert_close(first.values, of_one()[0])
    assert first.notes == ("a batch has 3 items: inputs (1), then the targets; the rest was left out",)
    for data in ((X, Z, Y), loader(TensorDataset(X, Z, Y)), [[X, Z, Y]]):
        last = sl.sample_traces(Two(), data)
        torch.testing.assert_close(last.values, plain(Two(), X, Z))
        assert not any("items" in note for note in last.notes)
    assert torch.equal(sl.sample_traces(Open(), (X, Z, Y), target=-1).values, plain(Open(), X, Z))
    assert torch.equal(sl.sample_traces(Open(), (X, Y, Z), target=1).values, plain(Open(), X))
    takes = {Open: r"takes \(x, z=\)", Hidden: "it is not known what the model takes"}
    for model, what in takes.items():
        message = rf"a batch has 3 items \(tensor \(9, 4\), tensor \(9,\), tensor \(9, 2\)\), .*{what}; pass target=1"
        with pytest.raises(InputError, match=message):
            sl.hessian(model(), (X, Y, Z))


def test_what_the_forward_does_not_take_is_left_out_with_a_note() -> None:
    found = sl.sample_traces(One(), {"x": X, "labels": Y, "idx": torch.arange(N), "weight": Z})
    assert found.notes == ("left out of the batches, as the model's forward does not take them: idx, weight",)
    report = sl.measure(One(), Dicts(idx=3), samples=6, measures=["trace"], parts=[])
    assert report.settings["data"].endswith("does not take them: idx")


class Whole(One):
    """Takes a dict as its one argument."""

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch["x"])


class Required(One):
    """Must be given the labels, for a loss of its own."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


def test_a_dict_is_one_argument_where_the_forward_takes_but_one() -> None:
    for data in ({"x": X, "labels": Y}, ({"x": X}, Y)):
        torch.testing.assert_close(sl.sample_traces(Whole(), data).values, of_one()[0])
    assert Takes.of(Whole()).takes_one_dict(["x"])
    assert not Takes.of(One()).takes_one_dict(["x"])


def test_labels_that_the_forward_needs_are_given_to_it() -> None:
    torch.testing.assert_close(sl.sample_traces(Required(), {"x": X, "labels": Y}).values, of_one()[0])


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"x": X}, {}, "a batch is a dict with the key 'x' and holds none of labels, label, targets, target, y; name"),
        ({"x": X, "y": Y, "label": Y}, {}, r"holds several possible targets \(label, y\); name the targets with"),
        ({"x": X, "y": Y}, {"target": "z"}, "has no 'z' to be its targets .*: it is a dict with the keys 'x', 'y'"),
        ([(X, Y)], {"target": 2}, r"target=2 is not an item of a batch after its inputs: it has 2 items \(tensor"),
        ([(X, Y)], {"target": 0}, "target=0 is not an item of a batch after its inputs"),
        ([(X, Y)], {"target": "labels"}, "target='labels' is not an item of a batch"),
        ([(X,)], {}, r"data must give pairs \(inputs, targets\), got 1 item \(tensor \(9, 4\)\); batch= takes a"),
        ([(X, Y)], {"batch": lambda b: b[0]}, r"batch= must return the pair \(inputs, targets\); it returned a tensor"),
        (
            [(X, Y)],
            {"batch": 32},
            r"batch= takes a function .*, got int; the number of samples in a",
        ),
        ([(X, Y)], {"target": 1.5}, "target= takes the key or the number of the targets in a batch, got float"),
        ([(X, Y)], {"output": 1.5}, "output= takes a key, a number or a function"),
        ([(X, Y)], {"unit": "tokens"}, "unknown unit 'tokens'"),
        ([(X, Y)], {"batches": "whole"}, "unknown value of batches= 'whole'"),
    ],
)
def test_what_was_got_is_said(data: Any, options: dict[str, Any], message: str) -> None:
    for function in (sl.hessian, sl.sample_traces, sl.margins):
        with pytest.raises(InputError, match=message) as caught:
            function(One(), data, **options)
        assert "\n" not in str(caught.value)


def test_samples_that_fit_no_batch_are_refused_in_a_sentence() -> None:
    class Ragged(Dicts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": [1.0] * (1 + index % 3), "labels": 0}

    with pytest.raises(InputError, match=r"cannot be put into one batch .* 'x' \(1,\); pad them to one length"):
        sl.trace(One(), Ragged())


class Table:
    """Stands in for a data set of Hugging Face's library: no data set of torch, with a format to choose."""

    column_names = ("x", "label", "text")

    def __init__(self, torch_format: bool = False) -> None:
        self.torch_format = torch_format

    def with_format(self, kind: str) -> Table:
        assert kind == "torch"
        return Table(True)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = X[index] if self.torch_format else X[index].tolist()
        return {"x": row, "label": Y[index] if self.torch_format else int(Y[index]), "text": "words"}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(N))


def test_a_table_of_another_library_is_read() -> None:
    found = sl.sample_traces(One(), Table())
    torch.testing.assert_close(found.values, of_one()[0])
    assert "does not take them: text" in found.notes[0]
    assert len(list(Batches(Table(), size=4, form=Context(One(), (X, Y)).form))) == 3


# ---------------------------------------------------------------- outputs


@dataclasses.dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None


class Wrapped(One):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.inner(x))


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "a dataclass": (Result, {}),
    "an object": (lambda out: SimpleNamespace(logits=out, loss=out.sum()), {}),
    "a dict": (lambda out: {"logits": out, "hidden": 2 * out}, {}),
    "a mapping": (lambda out: UserDict(logits=out), {}),
    "a tuple of one": (lambda out: (out,), {}),
    "loss and outputs": (lambda out: (out.sum(), out), {}),
    "outputs and states": (lambda out: (out, (out, out), torch.zeros(2, N, 3), None), {}),
    "a dict of one": (lambda out: {"scores": out}, {}),
    "an object of one": (lambda out: SimpleNamespace(scores=out, time=3.0), {}),
    "the second": (lambda out: (2 * out, out), {"output": 1}),
    "the last": (lambda out: [2 * out, out], {"output": -1}),
    "a key": (lambda out: {"logits": 2 * out, "scores": out}, {"output": "scores"}),
    "an attribute": (lambda out: SimpleNamespace(logits=2 * out, scores=out), {"output": "scores"}),
    "a function": (lambda out: {"deep": [out]}, {"output": lambda result: result["deep"][0]}),
    "a function of a tensor": (lambda out: torch.cat([out, out], 1), {"output": lambda result: result[:, :3]}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_in_all_their_forms(name: str) -> None:
    wrap, options = OUTPUTS[name]
    model = Wrapped(wrap)
    torch.testing.assert_close(sl.sample_traces(model, (X, Y), **options).values, of_one()[0])
    torch.testing.assert_close(sl.hessian(model, (X, Y), **options).dense(), of_one()[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("wrap", "options", "message"),
    [
        (
            lambda out: (out, out),
            {},
            r"it returned 2 items \(tensor \(\d, 3\), tensor \(\d, 3\)\); say with",
        ),
        (lambda out: {"a": out, "b": out}, {}, "it returned a dict with the keys 'a', 'b'; say with output="),
        (lambda out: "text", {}, "it returned the string 'text'; say with output="),
        (lambda out: None, {}, "it returned None; say with output="),
        (
            Result,
            {"output": "scores"},
            "output='scores' names no tensor in .*: a Result with logits",
        ),
        (lambda out: (out,), {"output": 3}, "output=3 names no tensor in what the model returned: 1 item"),
        (lambda out: out, {"output": "logits"}, "output='logits' names no tensor .*: a tensor of shape"),
        (lambda out: out, {"output": lambda result: [result]}, "output= must return a tensor; it returned 1 item"),
    ],
)
def test_other_outputs_are_refused_in_a_sentence(wrap: Any, options: dict[str, Any], message: str) -> None:
    for function in (sl.hessian, sl.sample_traces, sl.margins):
        with pytest.raises(InputError, match=message) as caught:
            function(Wrapped(wrap), (X, Y), **options)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- graphs


class Graph(SimpleNamespace):
    """Stands in for a graph of PyTorch Geometric."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Convolution(nn.Module):
    """Takes the nodes and the edges, and sums over the neighbours twice."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        def spread(values: Tensor) -> Tensor:
            return values.index_add(0, edge_index[1], values[edge_index[0]])

        return self.last(spread(torch.relu(spread(self.first(x)))))


class OfGraph(Convolution):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index)


def graph(**more: Any) -> Graph:
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(0, N, (2, 20), generator=generator)
    return Graph(x=X.float(), edge_index=edges, y=Y, **more)


MASK = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 0]).bool()


def dense(model: nn.Module, given: Graph, rows: list[int]) -> Tensor:
    own = dict(model.named_parameters())

    def loss(vector: Tensor) -> Tensor:
        parts = zip(own, vector.split([p.numel() for p in own.values()]), strict=True)
        params = {name: part.reshape(own[name].shape) for name, part in parts}
        outputs = torch.func.functional_call(model, params, (given.x.double(), given.edge_index))
        return F.cross_entropy(outputs[rows], given.y[rows])

    return torch.autograd.functional.hessian(loss, torch.cat([p.detach().reshape(-1) for p in own.values()]))


@pytest.mark.parametrize("kind", [Convolution, OfGraph])
def test_nodes_that_a_mask_picks_are_the_samples(kind: type[Convolution], untouched: Untouched) -> None:
    model, given = kind(), graph(train_mask=MASK, test_mask=~MASK)
    rows = MASK.nonzero()[:, 0].tolist()
    with untouched(model):
        found = sl.sample_traces(model, given)
    each = torch.stack([dense(Convolution(), given, [row]).trace() for row in rows])
    torch.testing.assert_close(found.values, each)
    assert found.exact
    assert "the samples are the 4 nodes of train_mask" in found.notes[-1]
    torch.testing.assert_close(
        sl.hessian(model, given).dense(), dense(Convolution(), given, rows), rtol=1e-9, atol=1e-12
    )
    others = (~MASK).nonzero()[:, 0].tolist()
    part = sl.hessian(model, [given], target="y[test_mask]", batch_size=2).dense()
    torch.testing.assert_close(part, dense(Convolution(), given, others), rtol=1e-9, atol=1e-12)
    assert torch.equal(sl.margins(model, given, target="y[test_mask]").targets, Y[~MASK])
    assert given.x.dtype == torch.float32
    report = sl.measure(model, given, measures=["trace"], parts=["audit"], samples=3)
    assert report.row("trace").kind == "exact"


class Pooled(Convolution):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:  # type: ignore[override]
        nodes = super().forward(x, edge_index)
        return nodes.new_zeros(int(batch.max()) + 1, 3).index_add(0, batch, nodes)


def test_graphs_of_a_batch_and_seeds_of_neighbourhoods_are_samples() -> None:
    one, two = graph(), graph()
    two.x, joined = two.x.flip(0), graph(batch=torch.tensor([0] * N + [1] * N))
    joined.x, joined.y = torch.cat([one.x, two.x]), torch.tensor([0, 2])
    joined.edge_index = torch.cat([one.edge_index, two.edge_index + N], 1)
    alone = [
        Graph(x=g.x, edge_index=g.edge_index, y=y, batch=torch.zeros(N).long())
        for g, y in ((one, torch.tensor([0])), (two, torch.tensor([2])))
    ]
    torch.testing.assert_close(sl.sample_traces(Pooled(), [joined]).values, sl.sample_traces(Pooled(), alone).values)
    seeds = graph(batch_size=3, input_id=torch.arange(3))
    assert len(sl.sample_traces(Convolution(), [seeds])) == 3
    assert len(sl.sample_traces(Convolution(), [graph()])) == N


class Other(Convolution):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a, b)


@pytest.mark.parametrize(
    ("model", "given", "options", "message"),
    [
        (Convolution, Graph(x=X, edge_index=MASK), {}, "a graph needs its targets under 'y' .*; it has edge_index, x"),
        (
            Convolution,
            graph(),
            {"target": "y[mask]"},
            "the mask 'mask' must say .* 9 targets .*, but there is none",
        ),
        (Convolution, graph(train_mask=Z > 0), {}, r"the mask 'train_mask' must say .* but it has shape \(9, 2\)"),
        (
            Pooled,
            [graph(), graph()],
            {},
            r"takes \(x, edge_index, batch\), .*; torch_geometric.loader.DataLoader\(graphs\) makes batches",
        ),
        (
            Other,
            graph(),
            {},
            r"forward takes \(a, b\), so it is unclear how to call it with a graph of edge_index, x, y",
        ),
    ],
)
def test_graphs_that_cannot_be_read_are_refused_in_a_sentence(
    model: Any, given: Graph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sl.trace(model(), given, **options)


def test_transforms_read_alike() -> None:
    data = [{"x": X, "class": Y, "labels": Z}]
    found = sl.transforms.rescale_layers(
        Returns(), {"inner.0": 2.0, "inner.2": 0.5}, data=data, target="class", output="scores"
    )
    assert found.certificate.relative_difference < 1e-12
    mixed = sl.transforms.permute_units(Returns(), data=data, target="class", output="scores")
    assert mixed.certificate.relative_difference < 1e-12
    with pytest.raises(InputError, match="output='score' names no tensor"):
        sl.transforms.scale_last_layer(Returns(), 2.0, data=data, target="class", output="score")
