"""How batches and outputs are read: the forms in which people have data and models, as inputs, targets and outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from spiritlevel.errors import InputError, is_out_of_memory, named_error, unknown_name

LABELS = ("labels", "label", "targets", "target", "y")
"""Keys under which a dict may hold its targets, if there is only one of them."""
UNITS = ("sample", "token")
BATCHES = ("free", "fixed")


class Reading(TypedDict, total=False):
    """Options that every function of a model and data takes beside its own, in this order and with one meaning.

    - `target`: which part of a batch holds the targets: the key of a dict, the name of a field, the number of an item;
      "y[mask]" for those rows of y that a mask picks. Found by itself where there is no doubt.
    - `batch`: a function from a batch, as the data give it, to the pair (inputs, targets).
    - `output`: which part of what the model returns are its outputs: a key, a name, a number, or a function that
      returns them. A tensor is taken as it is, and of anything else its `logits`.
    - `unit`: "sample", or "token" to count every target of a sequence by itself.
    - `batches`: "free", or "fixed" where a sample's loss depends on the others of its batch, as in contrastive losses:
      the batches are then part of the definition, and are never split.
    """

    target: str | int | None
    batch: Callable[[Any], Any] | None
    output: str | int | Callable[[Any], Any] | None
    unit: str
    batches: str


@dataclasses.dataclass(frozen=True)
class Form:
    """What the options of `Reading` say, checked."""

    target: str | int | None = None
    batch: Callable[[Any], Any] | None = None
    output: str | int | Callable[[Any], Any] | None = None
    unit: str = "sample"
    batches: str = "free"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise unknown_name("unit", self.unit, UNITS)
        if self.batches not in BATCHES:
            raise unknown_name("value of batches=", self.batches, BATCHES)
        if self.batch is not None and not callable(self.batch):
            raise InputError(
                "batch= takes a function from a batch to the pair (inputs, targets), got "
                f"{type(self.batch).__name__}; the number of samples in a batch is batch_size=."
            )
        if self.target is not None and not isinstance(self.target, str | int):
            raise InputError(
                f"target= takes the key or the number of the targets in a batch, got {type(self.target).__name__}."
            )
        if not (self.output is None or isinstance(self.output, str | int) or callable(self.output)):
            raise InputError(
                "output= takes a key, a number or a function that returns the outputs, got "
                f"{type(self.output).__name__}."
            )

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch."""
        if self.batch is not None:
            batch = _called("batch=", self.batch, batch)
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise InputError(
                    f"the function batch= must return the pair (inputs, targets), it returned {said(batch)}."
                )
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InputError(
                f"data must give pairs (inputs, targets), got {said(batch)}; batch= takes a function that makes such a "
                "pair of a batch."
            )
        return self._of_items(batch)

    def _of_mapping(self, batch: Mapping[Any, Any]) -> tuple[Any, Any]:
        target = self.target
        if target is None:
            found = [name for name in LABELS if name in batch]
            if len(found) != 1:
                what = f"several of them ({', '.join(found)})" if found else f"none of {', '.join(LABELS)}"
                raise InputError(f"a batch is {said(batch)}, {what}; name the targets with target=.")
            (target,) = found
        if target not in batch:
            raise InputError(f"a batch has no {target!r} to be its targets (target=): it is {said(batch)}.")
        return {key: value for key, value in batch.items() if key != target}, batch[target]

    def _of_items(self, batch: Sequence[Any]) -> tuple[Any, Any]:
        """Of several items: those before the targets are inputs, those after them are left out."""
        target, names = self.target, getattr(batch, "_fields", None)
        if target is None and len(batch) == 2:
            target = 1
        if isinstance(target, str) and names and target in names:
            target = names.index(target)
        if target is None:
            raise InputError(
                f"a batch has {said(batch)}, and which of them holds the targets cannot be told; pass target=1 for "
                "(inputs, targets, ...), target=-1 for (input, input, ..., targets), or a function with batch=."
            )
        if (
            isinstance(target, str)
            or not 1 <= target % len(batch) < len(batch)
            or not -len(batch) < target < len(batch)
        ):
            raise InputError(f"target={target!r} is no item of a batch behind its inputs: it has {said(batch)}.")
        target %= len(batch)
        return batch[0] if target == 1 else tuple(batch[:target]), batch[target]

    def outputs(self, result: Any) -> Tensor:
        """The outputs in what a model returned."""
        if callable(self.output):
            found = _called("output=", self.output, result)
            if not isinstance(found, Tensor):
                raise InputError(f"the function output= must return a tensor, it returned {said(found)}.")
            return found
        if self.output is not None:
            return self._named(result, self.output)
        if isinstance(result, Tensor):
            return result
        found = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
        if isinstance(found, Tensor):
            return found
        raise InputError(
            f"the model must return a tensor or something with logits, it returned {said(result)}; say with output= "
            "which part of it to measure: a key, a number, or a function."
        )

    @staticmethod
    def _named(result: Any, name: str | int) -> Tensor:
        if isinstance(name, str) and not isinstance(result, Mapping):
            found = getattr(result, name, None)
        else:
            try:
                found = result[name]
            except (KeyError, IndexError, TypeError, ValueError):
                found = None
        if not isinstance(found, Tensor) or isinstance(result, Tensor):
            raise InputError(f"output={name!r} names no tensor of what the model returned: {said(result)}.")
        return found

    def of_pairs(self) -> Form:
        """The same for batches that are pairs of inputs and targets already."""
        return dataclasses.replace(self, target=None, batch=None)

    def options(self) -> Reading:
        """The options that say this."""
        return Reading(target=self.target, batch=self.batch, output=self.output, unit=self.unit, batches=self.batches)


PLAIN = Form()


def _called(name: str, function: Callable[[Any], Any], thing: Any) -> Any:
    """What a function of the caller's own makes of a batch or of outputs; if it fails, it is said whose fault it is."""
    try:
        return function(thing)
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"the function {name} fails on {said(thing)}: {named_error(error)}.") from error


def said(thing: Any) -> str:
    """What was got, in words: the keys of a dict, the number of items, the shape of a tensor.

    >>> import torch
    >>> said({"input_ids": 0, "labels": 1}), said((1, "a")), said(torch.zeros(2, 3))
    ("a dict with the keys 'input_ids', 'labels'", '2 items (int, str)', 'a tensor of shape (2, 3)')
    """
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    if isinstance(thing, Mapping):
        keys = ", ".join(map(repr, thing)) or "none"
        return f"a {type(thing).__name__} with the keys {keys}"
    if isinstance(thing, tuple | list):
        kinds = ", ".join(_kind(item) for item in thing[:6]) + (", ..." if len(thing) > 6 else "")
        return f"{len(thing)} item{'s' * (len(thing) != 1)} ({kinds})"
    if dataclasses.is_dataclass(thing):
        return f"a {type(thing).__name__} with {', '.join(field.name for field in dataclasses.fields(thing))}"
    return f"a {type(thing).__name__}" if thing is not None else "None"


def _kind(item: Any) -> str:
    return f"tensor {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__


def form_of(options: Reading) -> Form:
    """The form that the options say; a `TypeError` as for any other unknown keyword."""
    known = [field.name for field in dataclasses.fields(Form)]
    for name in options:
        if name not in known:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    if options.get("unit") == "token":
        raise InputError("unit='token' is not there yet; leave it out to measure every sample as a whole.")
    return Form(**options)
