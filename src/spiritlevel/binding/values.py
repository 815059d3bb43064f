"""Tensors in disguise: arrays, lists of numbers and columns of tables become tensors, or a sentence says why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.errors import InputError, first_line, shown


def are_numbers(values: Any) -> bool:
    """Whether this is a list of numbers, or of such lists; for a long list, one end decides.

    >>> are_numbers([[1, 2.5], [3, 4]]), are_numbers([]), are_numbers(["a"]), are_numbers((1, 2))
    (True, False, False, False)
    """
    if not isinstance(values, list) or not values:
        return False
    return isinstance(values[0], int | float | np.number) or are_numbers(values[0])


def is_array_like(thing: Any) -> bool:
    """Whether `as_tensor` makes a tensor of this if it holds numbers; true of a column or a frame of a table, too."""
    return isinstance(thing, Tensor | np.ndarray) or hasattr(thing, "to_numpy") or are_numbers(thing)


def as_tensor(thing: Any, role: str) -> Any:
    """An array, a list of numbers or a part of a table as a tensor; anything else as it is.

    `role` is what an error message calls it, such as "the targets".
    """
    if isinstance(thing, Tensor):
        if thing.is_nested or thing.layout is not torch.strided:
            kind, way = ("nested", "to_padded_tensor(0.0)") if thing.is_nested else ("sparse", "to_dense()")
            raise InputError(f"{role} are a {kind} tensor, which cannot be cut into samples; pass its .{way}.")
        return thing
    if are_numbers(thing):
        try:
            return torch.tensor(thing)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{role} are lists that do not form a tensor ({first_line(error)}); pad them to one length, or pass "
                "tensors."
            ) from error
    if not isinstance(thing, np.ndarray) and hasattr(thing, "to_numpy"):
        thing = thing.to_numpy()
    if not isinstance(thing, np.ndarray):
        return thing
    if thing.dtype.kind not in "biufc":
        kind = {"U": "texts", "S": "bytes", "M": "dates", "O": "Python objects"}.get(thing.dtype.kind, str(thing.dtype))
        way = "integer classes, 0 to C - 1" if role == "the targets" else "numbers, e.g. with .astype('float32')"
        raise InputError(f"{role} are an array of {kind}, not of numbers; turn them into {way}.")
    return torch.from_numpy(np.require(thing, requirements=["C", "W"]))


def as_inputs(inputs: Any) -> Any:
    """The inputs of a batch, with tensors for everything that stands for one; inputs without any are refused."""
    if isinstance(inputs, Tensor):
        return as_tensor(inputs, "the inputs")

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            raise InputError(
                "the inputs are a PackedSequence, whose rows are steps and not samples; pass the padded sequences and "
                "their lengths, and pack them inside the model's forward."
            )
        return as_tensor(leaf, "the inputs")

    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    inputs = tree_map(convert, inputs, is_leaf=lambda part: isinstance(part, PackedSequence) or are_numbers(part))
    leaves = tree_leaves(inputs)
    if all(isinstance(leaf, str | bytes | int | float | None) for leaf in leaves):
        texts = "tokenise texts first, or " * any(isinstance(leaf, str) for leaf in leaves)
        raise InputError(
            f"the inputs of a batch hold no tensor, but {said(inputs)}; {texts}make some with batch=, a function from "
            "a batch to (inputs, targets)."
        )
    return inputs


def as_targets(targets: Any) -> Tensor:
    """The targets of a batch as a tensor."""
    found = as_tensor(targets, "the targets")
    if isinstance(found, Tensor):
        return found
    if isinstance(targets, int | float):
        way = "if these are single samples, pass DataLoader(data, batch_size=64), which makes batches"
    elif isinstance(targets, tuple | list) and targets and isinstance(targets[0], str):
        way = "turn texts into integer classes, 0 to C - 1"
    else:
        way = "batch= takes a function from a batch to the pair (inputs, targets)"
    raise InputError(f"the targets of a batch must be a tensor, got {said(targets)}; {way}.")


def fields_of(thing: Any) -> dict[str, Any] | None:
    """What a dataclass or a plain object holds, by name, if tensors are among it; None for anything else.

    What can be iterated or indexed is not such an object: a data set may well keep its tensors as attributes.

    >>> from types import SimpleNamespace
    >>> sorted(fields_of(SimpleNamespace(x=torch.zeros(2), id=3))), fields_of((1, 2)), fields_of(SimpleNamespace(x=3))
    (['id', 'x'], None, None)
    """
    if isinstance(thing, type) or hasattr(thing, "__iter__") or hasattr(thing, "__getitem__"):
        return None
    if dataclasses.is_dataclass(thing):
        held = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    else:
        held = dict(getattr(thing, "__dict__", {}))
    return held if any(isinstance(value, Tensor | np.ndarray) for value in held.values()) else None


def said(thing: Any) -> str:
    """What was passed, in words: the keys of a dict, the number of items, the shape of a tensor.

    >>> said({"ids": 0, "labels": 1}), said((1, "a")), said(torch.zeros(2, 3)), said("mnist")
    ("a dict with the keys 'ids', 'labels'", '2 items (int, str)', 'a tensor of shape (2, 3)', "the string 'mnist'")
    """
    if isinstance(thing, Tensor | np.ndarray):
        return f"{'a tensor' if isinstance(thing, Tensor) else 'an array'} of shape {tuple(thing.shape)}"
    if isinstance(thing, Mapping):
        keys = f"the key{'s' * (len(thing) != 1)} {', '.join(map(repr, thing))}" if thing else "no keys"
        return f"{_an(type(thing).__name__)} with {keys}"
    if isinstance(thing, tuple | list):
        kinds = ", ".join(_kind(item) for item in thing[:6]) + (", ..." if len(thing) > 6 else "")
        return f"{len(thing)} item{'s' * (len(thing) != 1)} ({kinds})"
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if isinstance(thing, str):
        return f"the string {shown(thing)}"
    if isinstance(thing, bool | int | float) or thing is None:
        return f"{thing!r}"
    held = fields_of(thing)
    if held is None and dataclasses.is_dataclass(thing):
        held = {field.name: None for field in dataclasses.fields(thing)}
    if held:
        return f"{_an(type(thing).__name__)} with {', '.join(held)}"
    return _an(type(thing).__name__)


def _an(name: str) -> str:
    return f"a{'n' * (name[:1].lower() in 'aeio')} {name}"  # a UserDict: of the types that come, none has a short u


def _kind(item: Any) -> str:
    return f"tensor {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__


def leaves_of(inputs: Any) -> list[Any]:
    """What inputs consist of; for one tensor without the cost of looking for others, which is that of a small layer."""
    return [inputs] if isinstance(inputs, Tensor) else tree_leaves(inputs)


def tensors_of(inputs: Any) -> list[Tensor]:
    """The tensors that inputs consist of."""
    return [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor)]
