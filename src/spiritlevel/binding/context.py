"""The one context of a measurement: model, data, loss, parameters, modes, memory, ranks and seed, bound once.

A public function binds what its caller passed and hands the context down; whatever is measured together shares one.
So the parameters are copied once, the data are checked once, and what one part found out about the model (whether its
derivatives are right, for instance) no other part has to find out again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from spiritlevel.binding.batches import Batches, resized, spread, subset
from spiritlevel.binding.coupling import depends_on_others
from spiritlevel.binding.last_layer import find_head
from spiritlevel.binding.losses import OfPositions
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.shards import ShardedProblem, bound
from spiritlevel.errors import InputError, checked_seed, whole_number
from spiritlevel.memory import parse_memory

Found = TypeVar("Found")
IDLE = -1
"""The sample number of a batch that a rank gets only so that it joins a pass the others need."""

_OUTPUTS = 2**24  # numbers that the outputs of one batch hold at most, where nothing else limits them


class Context:
    """A model, a loss and data, and the options that every measurement shares.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader or batches that can be read again.
        loss: a name, a `torch.nn` loss or a callable.
        params: names, prefixes or globs of the parameters to measure; by default all that require grad.
        batch_norm: "eval", or "batch" for batch statistics; the batches are then part of the definition.
        batch_size: samples to take at once; chosen by the measuring function unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        group: a `torch.distributed` group whose ranks share the work.
        seed: for everything random.
        ordered: whether results belong to samples, so that the data must come in an order that repeats.
        whole: whether batches are part of what is measured and must not be split, as with batch statistics.
        sharded: whether the caller can cope with a model that is sharded over processes.
        reading: how batches and outputs are read, and what a sample is; see `Reading`.

    >>> net = nn.Linear(2, 3)
    >>> context = Context(net, (torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> context.problem.size, context.count
    (9, 4)
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Any = "cross_entropy",
        params: Any = None,
        batch_norm: str = "eval",
        batch_size: int | None = None,
        memory: int | str | None = None,
        group: Any = None,
        seed: int = 0,
        ordered: bool = True,
        whole: bool = False,
        sharded: bool = False,
        **reading: Unpack[Reading],
    ) -> None:
        self.seed = checked_seed(seed)
        make = bound if sharded else Problem
        self.problem = make(model, loss=loss, params=params, batch_norm=batch_norm, form=form_of(reading))
        self.form = self.problem.form
        self.batch_size = None if batch_size is None else whole_number(batch_size, "batch_size", 1)
        if memory is not None:
            parse_memory(memory)  # now, not where a measure first asks for it
        self.batch_norm, self.ordered = batch_norm, ordered
        self.group = self.problem.group if isinstance(self.problem, ShardedProblem) and group is None else group
        self.whole = whole or batch_norm == "batch" or self.form.batches == "fixed"
        if self.whole and self.form.unit == "token":
            raise InputError(
                "unit='token' takes samples apart, but with batch_norm='batch' or batches='fixed' batches must stay as "
                "they are; leave one of them out."
            )
        self._memory, self.data, self._params = memory, data, params
        self._carried: tuple[str, ...] = ()  # notes on the data that these data were drawn from
        self._forget()

    def _forget(self) -> None:
        """Start with nothing known about the data."""
        self._found: dict[Any, Any] = {}

    # ------------------------------------------------------------ others like this one

    def on(self, data: Any, *, read: bool = False) -> Self:
        """The same model on other data: what was found out about data is forgotten, the model is not copied again.

        `read` says that they are already pairs of inputs and targets, whatever the options say about batches.
        """
        other = copy.copy(self)
        if read:
            other.form, other._carried = self.form.of_pairs(), tuple(self.batches.notes)
        for name in _cached(self):
            if name != "ranks":  # they have agreed on the model
                other.__dict__.pop(name, None)
        other.data = data
        other._forget()
        return other

    def alone(self) -> Self:
        """The same without the other ranks, for work that each rank does by itself; what is known stays known."""
        if self.group is None:
            return self
        other = copy.copy(self)
        other.group = None
        for name in self._of_ranks():
            other.__dict__.pop(name, None)
        other._found = {key: fact for key, fact in self._found.items() if not hasattr(fact, "ranks")}
        return other

    def _of_ranks(self) -> tuple[str, ...]:
        """The names of what is computed on first use and then needs all ranks."""
        return "ranks", "_undivided"

    def drawn(self, count: int | None) -> tuple[Self, Tensor | None]:
        """At most `count` of the samples, drawn at random, and where they are; itself and `None` if that is all."""
        data, indices, _ = subset(self.batches, count, self.seed)
        return (self, None) if indices is None else (self.on(data, read=True), indices)

    def moved(self, model: nn.Module, *, params: Any = ()) -> Self:
        """Another model on the same data, such as a transformed one; its measured parameters are those of this context.

        `params` names others.
        """
        other = self.on(self.data)
        chosen = self._params if params == () else params
        other.problem = Problem(
            model, loss=self.problem.loss, params=chosen, batch_norm=self.batch_norm, form=self.form
        )
        other.problem.inherit(self.problem)
        other.__dict__.pop("ranks", None)
        other.__dict__["batches"] = self.batches
        return other

    # ------------------------------------------------------------ the data

    @functools.cached_property
    def batches(self) -> Batches:
        """The data in an order that repeats, in batches as they come; `batches.cut` gives others."""
        loss = self.problem.loss
        return Batches(
            self.data,
            size=self.batch_size,
            ordered=self.ordered,
            whole=self.whole,
            form=self.form,
            units=loss if isinstance(loss, OfPositions) else None,
        )

    @property
    def of_means(self) -> Self:
        """The same, in the form in which means over samples are cheapest.

        Where single positions are samples, their sequences are not taken apart: each counts for as many samples as it
        has positions, so the mean over the data is the same. It must not be asked for anything but means.
        """
        return self if self._undivided is None else self._undivided

    @functools.cached_property
    def _undivided(self) -> Self | None:  # never itself: an object that holds itself outlives its use
        batches, loss = self.batches, self.problem.loss
        if batches.units is None or not isinstance(loss, OfPositions) or batches.taken_apart:
            return None
        other = self.on(self.data)
        other.form = dataclasses.replace(self.form, unit="sample")
        other.problem = copy.copy(self.problem)
        other.problem.form, other.problem.facts = other.form, {}
        sequences = batches.together()
        count = sum(len(targets) for _, targets in sequences)
        other.problem.loss = loss.whole.per(self.count / count)
        other.__dict__["batches"] = sequences
        return other

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """How the data were read, if that is not obvious; and which batches, where they are part of the definition."""
        found = (*self._carried, *self.batches.notes)
        if self.problem.left:
            found += (f"{self.problem.left} has no float64, so a copy of the model was measured on the CPU",)
        if self.form.batches != "fixed":
            return found
        sizes = [len(targets) for _, targets in self.batches]
        runs = [(size, len(list(same))) for size, same in itertools.groupby(sizes)]
        text = ", ".join(f"{count} of {size:,}" for size, count in runs[:4]) + (", ..." if len(runs) > 4 else "")
        return (*found, f"the batches are fixed and part of the definition: {text} samples")

    @functools.cached_property
    def count(self) -> int:
        """The number of samples."""
        return sum(len(targets) for _, targets in self.batches)

    def first(self, count: int, least: int = 1) -> tuple[Any, Tensor]:
        """The first samples, at most `count`, on the model's device."""
        return self.problem.place(*self.batches.first(count, least))

    def each(self, batches: Batches | None = None) -> Iterator[tuple[Any, Tensor]]:
        """The batches on the model's device, except empty ones."""
        for inputs, targets in self.batches if batches is None else batches:
            if len(targets):
                yield self.problem.place(inputs, targets)

    def mine(self, batches: Batches | None = None) -> Iterator[tuple[int, Any, Tensor]]:
        """This rank's batches, all of them without a group, each with the number of its first sample.

        The ranks of a sharded model must make the same passes: a rank with no batch left gets one with the number
        `IDLE`, whose results are discarded.
        """
        start, ranks, index = 0, Ranks(self.group), 0
        for inputs, targets in self.batches if batches is None else batches:
            if not len(targets):
                continue
            if ranks.takes(index):
                yield start, *self.problem.place(inputs, targets)
            start += len(targets)
            index += 1
        if self.problem.sharded and ranks.rank >= (index % ranks.count or ranks.count):
            yield IDLE, *self.first(1)

    def of_samples(
        self, function: Callable[[Any, Tensor], Tensor], *shape: int, batches: Batches | None = None
    ) -> Tensor:
        """One or more numbers for every sample, (N,) float64: every rank takes its batches, and all get all."""
        pieces = []
        with self.ranks.together(), self.problem.active(), torch.no_grad():
            for start, inputs, targets in self.mine(batches):
                with self.each_together():
                    found = function(inputs, targets)
                if start != IDLE:
                    pieces.append((start, found.detach().double().cpu().reshape(len(targets), *shape)))
        return self.ranks.joined(pieces, self.count, *shape)

    def each_together(self) -> contextlib.AbstractContextManager[None]:
        """Around each batch: with a sharded model, what one rank refuses after a pass, all refuse before the next."""
        return self.ranks.together() if self.problem.sharded else contextlib.nullcontext()

    def fair(self, most: int) -> int:
        """At most this many samples at once, equally many batches per rank; no rank may cut them smaller alone."""
        ranks = Ranks(self.group).count
        return most if ranks == 1 else max(1, -(-self.count // (ranks * -(-self.count // (ranks * most)))))

    def find_head(self) -> str:
        """Find out from one sample whether outputs can be taken in pieces; see `last_layer.find_head`."""
        if self.whole:  # a sample says nothing about a batch that must not be cut
            return ""
        with self.problem.active():
            return find_head(self.problem, *self.first(1))

    def fitting(self, most: int, *, in_pieces: bool = False) -> int:
        """How many samples to take at once so that the outputs of long sequences or large images stay within bounds."""
        inputs, targets = self.first(1 if in_pieces else 2)
        if targets.ndim < 2:
            return most
        problem = self.problem.thinned(targets)[0] if in_pieces else self.problem
        with problem.active(), torch.no_grad():
            size = math.prod(problem.outputs(problem.params, inputs).shape[1:])
        return max(1, min(most, _OUTPUTS // max(1, size)))

    @functools.cached_property
    def coupling(self) -> str:
        """What ties the samples of a batch together where batches are meant: "outputs", "loss", or nothing.

        Found out on a few samples of the first batch. Elsewhere nothing may tie them: that is refused.
        """
        if self.form.batches == "fixed":
            inputs, targets = self.first(4096, 3)
            problem, some = self.problem, spread(len(targets))
            with problem.active(), torch.no_grad():
                outputs = problem.outputs(problem.params, inputs)
                if problem.loss.couples(outputs, targets):
                    return "loss"
                if depends_on_others(problem, resized(inputs, some), outputs[some]):
                    return "outputs"
        return "outputs" if self.batch_norm == "batch" else ""

    @property
    def why_coupled(self) -> str:
        """The same in words."""
        if self.batch_norm == "batch" and self.form.batches != "fixed":
            return "batch_norm='batch' couples the samples of a batch"
        return f"the {'loss' if self.coupling == 'loss' else 'model'} couples the samples of a batch"

    # ------------------------------------------------------------ the machine

    @functools.cached_property
    def ranks(self) -> Ranks:
        """The processes that share the work, after making sure that all measure the same."""
        return self.problem.shared_by(self.group)

    def budget(self) -> int:
        """Bytes that may be used."""
        return parse_memory(self._memory, self.problem.device)

    # ------------------------------------------------------------ what is known

    @property
    def model(self) -> nn.Module:
        """The model that is measured; for one in half precision, a float32 copy."""
        return self.problem.model

    @property
    def chosen(self) -> str:
        """How many parameters are measured, of how many, and which; empty unless `params` names some of them."""
        names, whole = [*self.problem.params], sum(each.numel() for each in self.problem.model.parameters())
        if self._params is None or self.problem.size == whole:
            return ""
        some = ", ".join(names if len(names) < 7 else [*names[:5], f"{len(names) - 5} others"])
        return f"{self.problem.size:,} of {whole:,} parameters ({some})"

    def once(self, fact: Any, find: Callable[[], Found]) -> Found:
        """What `find` finds out about this model on these data, the first time; the same again afterwards."""
        if fact not in self._found:
            self._found[fact] = find()
        return cast(Found, self._found[fact])

    def once_for_code(self, fact: Any, find: Callable[[], Found]) -> Found:
        """The same for what models that differ in the values of their parameters alone have in common."""
        known, key = self.problem.facts, (fact, tuple(self.problem.params))

        def inherited() -> Found:
            batches, found = known.get(key, (None, None))
            if batches is not self.batches:
                found = find()
                known[key] = self.batches, found
            return cast(Found, found)

        return self.once(key, inherited)

    @functools.cached_property
    def theta(self) -> Tensor:
        """The measured parameters laid end to end."""
        if isinstance(self.problem, ShardedProblem):
            return self.problem.flat
        return torch.cat([tensor.reshape(-1) for tensor in self.problem.params.values()])

    def split(self, flat: Tensor) -> Params:
        """A vector of P numbers cut into the parameters' shapes."""
        params = self.problem.params
        parts = flat.split([tensor.numel() for tensor in params.values()])
        return {name: part.reshape(params[name].shape) for name, part in zip(params, parts, strict=True)}


def _cached(context: Context) -> tuple[str, ...]:
    """The names of what a context computes on first use."""
    members = ((name, member) for kind in type(context).__mro__ for name, member in vars(kind).items())
    return tuple(name for name, member in members if isinstance(member, functools.cached_property))
