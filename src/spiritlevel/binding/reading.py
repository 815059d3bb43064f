"""How batches and outputs are read: the forms in which people have data and models, as inputs, targets and outputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from torch import Tensor, nn

from spiritlevel.binding.graphs import Rows, Shared, is_graph, parts_of, rows_of
from spiritlevel.binding.values import fields_of, said
from spiritlevel.errors import InputError, is_out_of_memory, named_error, unknown_name

LABELS = ("labels", "label", "targets", "target", "y")
"""Keys under which a dict may hold its targets, if there is only one of them."""
UNITS = ("sample", "token")
BATCHES = ("free", "fixed")


class Reading(TypedDict, total=False):
    """Options that every function of a model and data takes besides its own, in this order and with the same meaning.

    - `target`: which part of a batch holds the targets: the key of a dict, the name of a field, the number of an item;
      "y[mask]" for those rows of y that a mask picks. Found automatically where there is no doubt.
    - `batch`: a function from a batch, as the data give it, to the pair (inputs, targets).
    - `output`: which part of what the model returns is its outputs: a key, a name, a number, or a function that
      returns them. A tensor is taken as it is; of anything else, its `logits` are taken.
    - `unit`: "sample", or "token" to count every target of a sequence by itself.
    - `batches`: "free", or "fixed" where a sample's loss depends on the rest of its batch, as in contrastive losses:
      the batches are then part of the definition, and are never split.
    """

    target: str | int | None
    batch: Callable[[Any], Any] | None
    output: str | int | Callable[[Any], Any] | None
    unit: str
    batches: str


class Takes(NamedTuple):
    """What the forward of a model takes, by the names of its parameters."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    more: bool = True  # positional arguments without names
    keywords: bool = True  # keywords without names
    known: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Takes:
        """Read from the signature; nothing is known about forwards that hide it (`*args`)."""
        forward = model.forward
        if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
            return _taken_by(forward.__func__)
        return cls._by(forward)

    @classmethod
    def _by(cls, forward: Any) -> Takes:
        try:
            parameters = inspect.signature(forward).parameters.values()
        except (TypeError, ValueError):
            return ANYTHING
        named = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        more, keywords = (any(one.kind is kind for one in parameters) for kind in (_ARGS, _KEYWORDS))
        required = tuple(one.name for one in named if one.default is one.empty)
        optional = tuple(one.name for one in parameters if one.name not in required and one.kind not in _OPEN)
        return cls(required, optional, more, keywords, not more)

    def may_take(self, count: int) -> bool:
        """Whether this many positional inputs are possible."""
        return len(self.required) <= count and (self.more or count <= len(self.required) + len(self.optional))

    def accepts(self, key: Any) -> bool:
        """Whether a keyword is possible."""
        return self.keywords or key in self.required or key in self.optional

    def takes_one_dict(self, keys: Iterable[Any]) -> bool:
        """Whether a dict with these keys must be meant as the one argument."""
        return self.known and not self.keywords and len(self.required) == 1 and not any(map(self.accepts, keys))

    def remark(self, inputs: Any) -> str:
        """In brackets, how a model that failed was called, where that may be the reason."""
        batch = "pick them with batch=, a function from a batch to (inputs, targets)"
        if isinstance(inputs, Rows):
            parts = ", ".join(inputs.graph.names)
            given = f"the graph's {parts}" if parts else "the graph as one argument"
            return f" (it was given {given}, as its forward takes {self}; parts are found by name)"
        if not isinstance(inputs, Mapping):
            count = len(inputs) if isinstance(inputs, tuple | list) else 1
            wrong = self.known and not self.may_take(count)
            return f" (its forward takes {self}, but the batches have {count} inputs; {batch})" * wrong
        lists = [key for key, value in inputs.items() if isinstance(value, list)]
        if self.takes_one_dict(inputs) or any(name not in inputs for name in self.required):
            return (
                f" (it was given {said(inputs)}, but its forward takes {self}; name the inputs like that, or {batch})"
            )
        if lists:
            return (
                f" (its {lists[0]} was given {said(inputs[lists[0]])}; a Hugging Face data set needs "
                ".with_format('torch') before a DataLoader)"
            )
        return ""

    def __str__(self) -> str:
        names = [*self.required, *(f"{name}=" for name in self.optional)]
        return f"({', '.join(names)})"


_ARGS, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_OPEN = (_ARGS, _KEYWORDS)
ANYTHING = Takes()


@functools.lru_cache(maxsize=32)
def _taken_by(function: types.FunctionType) -> Takes:
    """What a method takes, found out once: an audit binds a hundred models of one class."""
    return Takes._by(types.MethodType(function, object()))


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


@dataclasses.dataclass(frozen=True)
class Form:
    """What the options of `Reading` say, checked."""

    target: str | int | None = None
    batch: Callable[[Any], Any] | None = None
    output: str | int | Callable[[Any], Any] | None = None
    unit: str = "sample"
    batches: str = "free"
    takes: Takes = ANYTHING

    def __post_init__(self) -> None:
        if not isinstance(self.unit, str) or self.unit not in UNITS:
            raise unknown_name("unit", self.unit, UNITS)
        if not isinstance(self.batches, str) or self.batches not in BATCHES:
            raise unknown_name("value of batches=", self.batches, BATCHES)
        if self.batch is not None and not callable(self.batch):
            raise InputError(
                "batch= takes a function from a batch to the pair (inputs, targets), got "
                f"{type(self.batch).__name__}; the number of samples in a batch is batch_size=."
            )
        if self.target is not None and (not isinstance(self.target, str | int) or isinstance(self.target, bool)):
            raise InputError(
                f"target= takes the key or the number of the targets in a batch, got {type(self.target).__name__}."
            )
        if isinstance(self.output, bool) or not (
            self.output is None or isinstance(self.output, str | int) or callable(self.output)
        ):
            raise InputError(
                "output= takes a key, a number or a function that returns the outputs, got "
                f"{type(self.output).__name__}."
            )

    def of(self, model: nn.Module) -> Form:
        """The same for this model: what its forward takes settles what a batch leaves open."""
        return dataclasses.replace(self, takes=Takes.of(model))

    def pair(self, batch: Any, notes: list[str]) -> tuple[Any, Any]:
        """Inputs and targets of a batch; remarks on how it was read are added to `notes`."""
        if self.batch is not None:
            batch = _called("batch=", self.batch, batch)
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise InputError(
                    f"the function batch= must return the pair (inputs, targets); it returned {said(batch)}."
                )
            return batch[0], batch[1]
        if is_graph(batch):
            return self._of_graph(batch, notes)
        held = batch if isinstance(batch, Mapping) else fields_of(batch)
        if held is not None:
            return self._of_mapping(held, batch, notes)
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InputError(
                f"data must give pairs (inputs, targets), got {said(batch)}; batch= takes a function that makes such a "
                "pair from a batch."
            )
        return self._of_items(batch, notes)

    def _of_mapping(self, held: Mapping[Any, Any], batch: Any, notes: list[str]) -> tuple[Any, Any]:
        """From a dict or an object's fields: the targets under their key, and as much of the rest as forward takes."""
        target = self.target
        if target is None:
            found = [name for name in LABELS if name in held]
            if len(found) != 1:
                what = f"several possible targets ({', '.join(found)})" if found else f"none of {', '.join(LABELS)}"
                raise InputError(f"a batch is {said(batch)} and holds {what}; name the targets with target=.")
            (target,) = found
        if target not in held:
            raise InputError(f"a batch has no {target!r} to be its targets (target=): it is {said(batch)}.")
        rest = {key: value for key, value in held.items() if key != target or target in self.takes.required}
        unknown = [] if self.takes.takes_one_dict(rest) else [key for key in rest if not self.takes.accepts(key)]
        if len(unknown) == len(rest):
            raise InputError(
                f"a batch is {said(batch)}, {target!r} its targets, but none of the others is an argument of the "
                f"model's forward, which takes {self.takes}; name the inputs like that, or pick them with batch=, a "
                "function from a batch to (inputs, targets)."
            )
        if unknown:
            rest = {key: value for key, value in rest.items() if key not in unknown}
            _note(notes, f"left out of the batches, as the model's forward does not take them: {', '.join(unknown)}")
        return rest, held[target]

    def _of_items(self, batch: Sequence[Any], notes: list[str]) -> tuple[Any, Any]:
        """From several items: those before the targets are inputs, those after them are left out."""
        count, names, target = len(batch), getattr(batch, "_fields", None), self.target
        if target is None:
            named = [name for name in LABELS if names and name in names]
            target = 1 if count == 2 else named[0] if len(named) == 1 else self._place(batch)
        if isinstance(target, str) and names and target in names:
            target = int(names.index(target))
        if isinstance(target, str) or not 1 <= (target + count if target < 0 else target) < count:
            raise InputError(f"target={target!r} is not an item of a batch after its inputs: it has {said(batch)}.")
        target %= count
        if target < count - 1:
            _note(notes, f"a batch has {count} items: inputs ({target}), then the targets; the rest was left out")
        return batch[0] if target == 1 else tuple(batch[:target]), batch[target]

    def _place(self, batch: Sequence[Any]) -> int:
        """Where the targets must be among three or more items, by how many inputs the model's forward takes."""
        places = [place for place in range(1, len(batch)) if self.takes.may_take(place)]
        if len(places) == 1:
            return places[0]
        what = f"the model's forward takes {self.takes}" if self.takes.known else "it is not known what the model takes"
        raise InputError(
            f"a batch has {said(batch)}, and it is unclear which of them holds the targets, as {what}; pass target=1 "
            "for (inputs, targets, ...), target=-1 for (input, input, ..., targets), or a function with batch=."
        )

    def _of_graph(self, graph: Any, notes: list[str]) -> tuple[Any, Any]:
        """From a graph: the nodes that a mask picks, or the graphs of a batch, are the samples."""
        if hasattr(graph, "edge_types"):
            raise InputError(
                f"a {type(graph).__name__} has several kinds of nodes, and it is unclear which are the samples; let a "
                "module hold it in buffers and take the numbers of its nodes, with data=(numbers, y[numbers])."
            )
        name, mask = str(self.target or "y"), ""
        if name.endswith("]"):
            name, _, mask = name[:-1].partition("[")
        targets = getattr(graph, name, None)
        if not isinstance(targets, Tensor) or not targets.ndim:
            held = ", ".join(parts_of(graph))
            raise InputError(f"a graph needs its targets under {name!r} (target= names another); it has {held}.")
        rows, note = rows_of(graph, len(targets), mask)
        if note:
            _note(notes, note)
        wanted = self.takes.required
        as_parts = bool(wanted) and all(isinstance(getattr(graph, name, None), Tensor) for name in wanted)
        if not as_parts and len(wanted) != 1:
            what, way = f"takes {self.takes}" if self.takes.known else "takes anything", "wrap it in a module whose "
            way += "forward takes those parts by their names, or the graph"
            if "batch" in wanted and not isinstance(getattr(graph, "batch", None), Tensor):
                way = "torch_geometric.loader.DataLoader(graphs) makes batches that know each node's graph"
            raise InputError(
                f"the model's forward {what}, so it is unclear how to call it with a graph of "
                f"{', '.join(parts_of(graph))}; {way}."
            )
        return Rows(rows, Shared(graph, wanted if as_parts else ())), targets[rows.to(targets.device)]

    def outputs(self, result: Any, part: str | int | None = None) -> Tensor:
        """The outputs in what a model returned; `part` of it where nothing else says which."""
        if callable(self.output):
            found = _called("output=", self.output, result)
            if not isinstance(found, Tensor):
                raise InputError(f"the function output= must return a tensor; it returned {said(found)}.")
            return found
        if self.output is not None:
            return self._named(result, self.output)
        found = _logits(result)
        if found is not None:
            return found
        if part is not None:
            return self._named(result, part)
        raise InputError(
            f"the model must return a tensor or something with logits; it returned {said(result)}; say with output= "
            "which part of it to measure: a key, a number, or a function. A model that returns its loss alone is "
            "measured with output=, loss=lambda value, targets: value and batches='fixed'."
        )

    def candidates(self, result: Any, count: int) -> list[Any]:
        """The keys or numbers of the parts that may be the outputs for this many samples, where nothing says which."""
        if self.output is not None or _logits(result) is not None:
            return []
        held = result if isinstance(result, Mapping) else fields_of(result)
        items: Iterable[tuple[Any, Any]] = () if held is None else held.items()
        items = enumerate(result) if isinstance(result, tuple | list) else items
        return [key for key, item in items if _has(item, count)]

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
            raise InputError(f"output={name!r} names no tensor in what the model returned: {said(result)}.")
        return found

    def of_pairs(self) -> Form:
        """The same for batches that are already pairs of inputs and targets."""
        return dataclasses.replace(self, target=None, batch=None)

    def options(self) -> Reading:
        """The options that amount to this form."""
        return Reading(target=self.target, batch=self.batch, output=self.output, unit=self.unit, batches=self.batches)


PLAIN = Form()


def _logits(result: Any) -> Tensor | None:
    if isinstance(result, Tensor):
        return result
    found = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    return found if isinstance(found, Tensor) else None


def _has(item: Any, count: int) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point() and item.ndim > 0 and len(item) == count


def _called(name: str, function: Callable[[Any], Any], thing: Any) -> Any:
    """What the caller's own function makes of a batch or of outputs; if it fails, the error says whose fault it is."""
    try:
        return function(thing)
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"the function {name} fails on {said(thing)}: {named_error(error)}.") from error


def form_of(options: Reading) -> Form:
    """The form that the options describe; a `TypeError` for an unknown one, as for any other keyword."""
    known = [field.name for field in dataclasses.fields(Form)]
    for name in options:
        if name not in known:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return Form(**options)
