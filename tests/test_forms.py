"""Data as a new user passes them: they are read, or one sentence says what was got and what to pass instead."""

from __future__ import annotations

import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

import spiritlevel as sl
from spiritlevel.binding.context import Context
from spiritlevel.errors import InputError

N = 6
X, Z = torch.randn(2, N, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(N) % 3
PAIRS = TensorDataset(X, Y)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Two(One):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(a + b)


class Keys(One):
    def forward(self, **parts: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(parts["x"])


@dataclasses.dataclass
class Sample:
    x: Any
    y: Any


class Samples(Dataset[Any]):
    """A data set that keeps tensors as attributes, and returns whatever it is told to."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.x, self.labels, self.item = X, Y, item

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Again:
    """Batches that can be read again, of an object that holds tensors."""

    def __init__(self) -> None:
        self.x, self.y = X, Y

    def __iter__(self) -> Iterator[Any]:
        yield self.x[:4], self.y[:4]
        yield self.x[4:], self.y[4:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


FRAME = polars.DataFrame({name: X[:, i].numpy() for i, name in enumerate("abcd")} | {"label": Y.numpy()})

READ: dict[str, Any] = {
    "lists": (X.tolist(), Y.tolist()),
    "a tensor and a list": (X, Y.tolist()),
    "a dict of lists": {"x": X.tolist(), "labels": Y.tolist()},
    "batches of lists": [(X[:4].tolist(), Y[:4].tolist()), (X[4:].tolist(), Y[4:].tolist())],
    "arrays": (X.numpy(), Y.numpy().astype(np.uint8)),
    "parts of a table": (FRAME[list("abcd")], FRAME["label"]),
    "a dataclass": Sample(X, Y),
    "batches of dataclasses": [Sample(X[:4], Y[:4]), Sample(X[4:], Y[4:])],
    "a data set of dataclasses": Samples(lambda i: Sample(X[i], Y[i])),
    "an object": SimpleNamespace(x=X, labels=Y, id=7),
    "a data set that holds tensors": Samples(lambda i: (X[i], int(Y[i]))),
    "batches of an object that holds tensors": Again(),
    "a stream": Stream(),
    "a loader of a stream": DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("name", READ)
def test_forms_that_are_read(name: str) -> None:
    found = list(Context(One(), READ[name]).batches)
    torch.testing.assert_close(torch.cat([x if isinstance(x, Tensor) else x["x"] for x, _ in found]).double(), X)
    assert torch.equal(torch.cat([y for _, y in found]).long(), Y)


def _fails() -> Any:
    raise KeyError("filename")


Three = namedtuple("Three", ["image", "mask", "label"])
TAKES = "a function from a batch to (inputs, targets)"
REFUSED: dict[str, tuple[Any, str]] = {
    "another key": (
        {"a": X, "labels": Y},
        "(it was given a dict with the key 'a', but its forward takes (x); name the inputs like that, or pick them "
        "with "
        f"batch=, {TAKES}).",
    ),
    "nothing but labels": (
        {"labels": Y},
        "a batch is a dict with the key 'labels', 'labels' its targets, but none of the others is an argument of the "
        "model's forward, which takes (x); name the inputs like that",
    ),
    "too many inputs": (Three(X, Z, Y), "(its forward takes (x), but the batches have 2 inputs; pick them with batch="),
    "a text": ("mnist", "got the string 'mnist'; sl.data.load(name).train is a data set by name, and files"),
    "a path": (Path("x.npz"), "got a PosixPath; sl.data.load(name).train"),
    "a number": (5, "data must be a pair of tensors, a Dataset, a DataLoader or batches of (inputs, targets), got 5."),
    "a tensor": (X, "got a tensor of shape (6, 4); pass a pair (inputs, targets)."),
    "a table": (FRAME, "got a DataFrame; pass a pair (table[inputs], table[target])."),
    "a class": (DataLoader, "got the class DataLoader; call it, and pass what it returns."),
    "a function": (lambda: PAIRS, "got a function; call it, and pass what it returns."),
    "a Lightning data module": (SimpleNamespace(train_dataloader=list), "; pass its train_dataloader(), or val_"),
    "parts of a split": (
        random_split(PAIRS, [4, 2]),
        "data are 2 items (Subset, Subset), which are data sets themselves; pass one of them, e.g. data[0].",
    ),
    "loaders by name": (
        {"train": DataLoader(PAIRS), "val": DataLoader(PAIRS)},
        "data are a dict with the keys 'train', 'val', which are data sets themselves; pass one of them, e.g. data['tr",
    ),
    "single samples": (
        list(zip(X, Y, strict=True)),
        "inputs of shape (4,) do not fit targets of shape (); if these are single samples, pass DataLoader(data, batch",
    ),
    "samples with numbers": ([(X[0], 1)], "must be a tensor, got 1; if these are single samples, pass DataLoader("),
    "numbered batches": (
        [(0, (X, Y))],
        f"the inputs of a batch hold no tensor, but 0; make some with batch=, {TAKES}.",
    ),
    "texts": (Samples(lambda i: ("word", 1)), "hold no tensor, but 6 items (str, str, str, str, str, str); tokenise"),
    "texts for classes": ([(X, ["cat"] * N)], "; turn texts into integer classes, 0 to C - 1."),
    "an array of texts": (
        (X, np.array(["cat"] * N)),
        "the targets are an array of texts, not of numbers; turn them in",
    ),
    "an array of objects": ((X.numpy().astype(object), Y), "the inputs are an array of Python objects, not of numbers"),
    "several targets": ([(X, (Y, Y))], "got 2 items (tensor (6,), tensor (6,)); batch= takes a function from a batch"),
    "lists of other lengths": (([[1.0], [2.0, 3.0]], [0, 1]), "the inputs are lists that do not form a tensor (expec"),
    "packed": (
        [(nn.utils.rnn.pack_sequence(list(X[:2])), Y[:2])],
        "are a PackedSequence, whose rows are steps and not",
    ),
    "nested": (
        [(torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), Y[:2])],
        "; pass its .to_padded_tensor(0.0).",
    ),
    "sparse": ((X.to_sparse(), Y), "the inputs are a sparse tensor, which cannot be cut into samples; pass its .to_d"),
    "whole numbers": (
        (X.byte(), Y),
        "(its inputs are whole numbers, which are passed as they are: x.float() converts",
    ),
    "a data set that fails": (
        Samples(lambda i: _fails()),
        "reading the data fails: KeyError: 'filename' (te",
    ),
    "pictures": (
        Samples(lambda i: (object(), 1)),
        "; have the data set return tensors, or pass a DataLoader whose col",
    ),
    "columns of classes": ((X, Y[:, None]), "got targets of shape (6, 1) and type int64; pass targets.squeeze(1)."),
    "one-hot classes": ((X, nn.functional.one_hot(Y)), "; pass targets.argmax(1) of one-hot vectors."),
    "numbers to predict": ((X, Y.double()), "are targets.long(), and numbers to predict need loss='squared_error'."),
    "kinds of nodes": (
        SimpleNamespace(edge_types=[]),
        "a SimpleNamespace has several kinds of nodes, and it is unclear which",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forms_that_are_refused_in_a_sentence(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        sl.margins(One(), data)
    assert "\n" not in str(caught.value)


def test_arguments_of_a_model_are_found_by_their_names() -> None:
    assert len(sl.margins(Two(), {"a": X, "b": Z, "labels": Y}).output) == N
    with pytest.raises(InputError, match=r"missing 1 .* 'b'.*given a dict with the key 'a', .* takes \(a, b\); name"):
        sl.margins(Two(), {"a": X, "c": Z, "labels": Y})
    with pytest.raises(InputError, match=r"fails on inputs of shape a=\(6, 4\): KeyError: 'x'"):
        sl.margins(Keys(), {"a": X, "labels": Y})
    rows = Samples(lambda i: {"x": X[i].tolist(), "labels": int(Y[i])})
    with pytest.raises(InputError, match=r"its x was given 4 items .*needs \.with_format\('torch'\) before a DataLoa"):
        sl.margins(One(), DataLoader(rows, batch_size=3))


def test_outputs_that_fit_no_loss() -> None:
    number = nn.Linear(4, 1).double()
    with pytest.raises(InputError, match="got 1; use loss='squared_error' for a number to predict"):
        sl.trace(number, (X, X[:, 0]))
    with pytest.raises(InputError, match="got 1; use loss='binary_cross_entropy' for a single logit"):
        sl.trace(number, (X, Y > 0))
    turned = nn.Sequential(One(), Turned())
    for function in (sl.margins, sl.trace, sl.hessian):
        with pytest.raises(
            InputError, match=r"returns complex numbers, but cross_entropy needs real ones; return their"
        ):
            function(turned, (X, Y))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sample_traces": sl.sample_traces,
    "trace": sl.trace,
    "margins": sl.margins,
    "input_curvature": sl.input_curvature,
    "hessian": sl.hessian,
    "gauss_newton": sl.gauss_newton,
    "landscape": sl.landscape,
    "measure": sl.measure,
    "audit": sl.audit,
    "compare": lambda model, data: sl.compare(model, model, data),
    "perturb": lambda model, data: sl.perturb(model, data, "int8"),
    "Tracker": lambda model, data: sl.Tracker(model, data).measure(),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_says_the_same(function: str) -> None:
    for name in ("another key", "a text", "loaders by name", "numbered batches", "a data set that fails"):
        data, message = REFUSED[name]
        with pytest.raises(InputError) as caught:
            FUNCTIONS[function](One(), data)
        assert message in str(caught.value)
