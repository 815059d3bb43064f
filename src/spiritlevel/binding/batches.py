"""Data as batches in an order that repeats, whatever form they come in."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from spiritlevel.binding.graphs import Shared, is_graph
from spiritlevel.binding.losses import OfPositions, Unit, unit_batches
from spiritlevel.binding.reading import PLAIN, Form
from spiritlevel.binding.state import advance_random_states, preserved_random_state
from spiritlevel.binding.values import are_numbers, as_inputs, as_targets, fields_of, is_array_like, said
from spiritlevel.errors import (
    InputError,
    checked_seed,
    first_line,
    is_out_of_memory,
    named_error,
    whole_number,
)

Pair = tuple[Any, Tensor]
_ROWS = 2**16  # hashed at once


def _count(inputs: Any, targets: Tensor) -> int:
    count = targets.shape[0] if targets.ndim else -1
    if targets.is_complex():
        raise InputError("the targets are complex numbers; losses need real ones, or integer classes.")
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != count):
            single = "; if these are single samples, pass DataLoader(data, batch_size=64), which makes batches"
            raise InputError(
                f"inputs of shape {tuple(leaf.shape)} do not fit targets of shape {tuple(targets.shape)}"
                f"{single * (count < 0)}."
            )
    return count


def _as_pair(batch: Any, form: Form, notes: list[str]) -> Pair:
    inputs, targets = form.pair(batch, notes)
    return as_inputs(inputs), as_targets(targets)


def sliced(inputs: Any, start: int, stop: int) -> Any:
    """The samples from `start` to `stop` of a batch's inputs, whatever tensors they consist of."""
    return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, inputs)


SPREAD = 5
"""Samples on which rules and independence are tested: enough for a wrong order to show."""


def spread(count: int) -> Tensor:
    """At most `SPREAD` numbers from 0 to count − 1, the first and the last among them."""
    return torch.linspace(0, count - 1, min(SPREAD, count)).round().long()


def resized(inputs: Any, count: int | Tensor) -> Any:
    """The first `count` samples, repeated if there are fewer; or the samples with the given indices."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf[count if isinstance(count, Tensor) else torch.arange(count, device=leaf.device) % leaf.shape[0]]

    return tree_map(resize, inputs)


def is_pair_of_tensors(data: Any) -> bool:
    """Whether data lie in memory as one pair (inputs, targets) rather than as batches."""
    if not (isinstance(data, tuple | list) and len(data) == 2 and is_array_like(data[1])):
        return False
    leaves = tree_leaves(dict(data[0]) if isinstance(data[0], Mapping) else data[0], is_leaf=are_numbers)
    return bool(leaves) and all(map(is_array_like, leaves))


def _is_one_batch(data: Any) -> bool:
    """Whether data are one batch in memory, tensors in a tuple or a dict, rather than something that gives batches."""
    if is_pair_of_tensors(data) or isinstance(data, Mapping) or fields_of(data) is not None:
        return True
    items = data if isinstance(data, tuple | list) else []
    return len(items) > 1 and all(map(is_array_like, items))


def _is_table(data: Any) -> bool:
    """Whether this is a data set of Hugging Face's `datasets`, which is not a torch one."""
    return hasattr(data, "column_names") and hasattr(data, "with_format") and not isinstance(data, Mapping)


def _check_one_set(data: Any) -> None:
    """Refuse several data sets at once, as `random_split` or a Lightning data module gives them."""
    if not isinstance(data, Mapping | tuple | list):
        return
    sets: dict[Any, Any] = dict(data) if isinstance(data, Mapping) else dict(enumerate(data))
    for key, item in sets.items():
        if isinstance(item, DataLoader | Dataset) or _is_table(item):
            raise InputError(
                f"data are {said(data)}, which are data sets themselves; pass one of them, e.g. data[{key!r}]."
            )


def _way_to_data(data: Any) -> str:
    """What to pass instead of something that is not data."""
    if isinstance(data, str | os.PathLike):
        return "; sl.data.load(name).train is a data set by name, and files are for the command line (--data)"
    if callable(getattr(data, "train_dataloader", None)):
        return "; pass its train_dataloader(), or val_dataloader()"
    if is_array_like(data):
        table = hasattr(data, "columns")
        return "; pass a pair (table[inputs], table[target])" if table else "; pass a pair (inputs, targets)"
    if callable(data):
        return "; call it, and pass what it returns"
    return ""


def _collate(samples: list[Any]) -> Any:
    """A batch of samples as torch makes it, with lists of numbers in dicts taken as tensors."""

    def tensors(sample: Any) -> Any:
        sample = sample if (held := fields_of(sample)) is None else held
        if not isinstance(sample, Mapping):
            return sample
        return {key: torch.tensor(value) if are_numbers(value) else value for key, value in sample.items()}

    try:
        samples = [tensors(sample) for sample in samples]
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        first = samples[0]
        sizes = [f"{key!r} {tuple(value.shape)}" for key, value in _tensors_by_name(first)]
        way = "pad them to one length, or pass a DataLoader that does"
        if isinstance(error, TypeError):
            way = "have the data set return tensors, or pass a DataLoader whose collate_fn makes some"
        raise InputError(
            f"the samples cannot be put into one batch ({first_line(error)}): the first is {said(first)}"
            f"{' of ' * bool(sizes)}{', '.join(sizes)}; {way}."
        ) from error


def _tensors_by_name(sample: Any) -> Iterator[tuple[Any, Tensor]]:
    pairs = sample.items() if isinstance(sample, Mapping) else ()
    yield from ((key, value) for key, value in pairs if isinstance(value, Tensor))


def _in_order(loader: DataLoader[Any], *, ordered: bool, whole: bool, notes: list[str]) -> DataLoader[Any]:
    """The loader, if its order repeats; if it shuffles, one that reads the same samples in order.

    Results that belong to samples say so in a note.
    """
    batched: Any = loader.batch_sampler
    sampler: Any = getattr(batched, "sampler", loader.sampler)
    if not isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return loader
    known = batched is None or type(batched) is BatchSampler
    samples: Any = getattr(sampler, "data_source", ())
    once = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(samples)
    if isinstance(sampler, SubsetRandomSampler):
        samples, once = sampler.indices, True
    if not (known and once):
        raise InputError(
            f"the data loader draws with {type(sampler if known else batched).__name__}, which may leave out samples "
            "or repeat them, differently in every pass; pass its data set, or a loader with shuffle=False."
        )
    size = None if batched is None else batched.batch_size
    if whole and size and batched.drop_last and len(samples) % size:
        raise InputError(
            "the data loader shuffles and drops its last batch, so different samples are left out in every pass, and "
            "batches are part of what is measured here; pass a loader with shuffle=False or with drop_last=False."
        )
    if ordered or whole:
        notes.append("the data loader shuffles; its samples were read in the order of its data set")
    plain = isinstance(sampler, RandomSampler)
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=SequentialSampler(samples) if plain else list(samples),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Around the code of a data set: if it fails, the error says whose fault that is."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(f"reading the data fails: {named_error(error)}.") from error


class Batches:
    """Data as batches in an order that repeats: a pair of tensors, a data set, a loader or re-iterable batches.

    Batches larger than `size` are split, unless `whole` (batch statistics make them part of the definition): then
    data that come in batches of another size are refused. A shuffling loader is read in the order of its data set, and
    completely, since `drop_last` leaves out different samples in every pass (and is refused if `whole`). `form` says
    how a batch is read, and `notes` what was not obvious about it.
    """

    def __init__(
        self,
        data: Any,
        *,
        size: int | None = None,
        ordered: bool = True,
        whole: bool = False,
        form: Form = PLAIN,
        units: OfPositions | None = None,
    ) -> None:
        self.form, self.units, self.notes = form, units, list[str]()
        self.size, self.whole = None if size is None else whole_number(size, "batch_size", 1), whole
        _check_one_set(data)
        if is_graph(data):
            data = [data]
        if _is_one_batch(data):
            data = _as_pair(data, form, self.notes)
            _count(*data)
            self.form = form.of_pairs()
        elif isinstance(data, DataLoader):
            data = _in_order(data, ordered=ordered, whole=whole, notes=self.notes)
        elif isinstance(data, Dataset):
            data = DataLoader(data, batch_size=size or 256, collate_fn=_collate)
        elif _is_table(data):
            data = DataLoader(data.with_format("torch"), batch_size=size or 256, collate_fn=_collate)
        elif isinstance(data, Iterator):
            raise InputError(
                "data can be read only once (an iterator); pass a list of batches, a data set or a data loader."
            )
        elif not isinstance(data, Iterable) or isinstance(data, str | bytes | type) or is_array_like(data):
            raise InputError(
                "data must be a pair of tensors, a Dataset, a DataLoader or batches of (inputs, targets), "
                f"got {said(data)}{_way_to_data(data)}."
            )
        self.data, self._in_memory = data, is_pair_of_tensors(data)
        if not self._in_memory:
            self._check_repeats()

    def cut(self, size: int | None) -> Batches:
        """The same data in batches of another size; they are not checked again."""
        other = copy.copy(self)
        other.size = size
        return other

    @property
    def samples(self) -> int | None:
        """How many samples there are, if they lie in memory as one pair of tensors."""
        return len(self.data[1]) if self._in_memory and self.units is None else None

    @property
    def _generators(self) -> list[torch.Generator]:
        """A loader's own source of random numbers, which the caller may share with a training run."""
        own = self.data.generator if isinstance(self.data, DataLoader) else None
        return [] if own is None else [own]

    def _check_repeats(self) -> None:
        """Read the first batch twice, from different random states, so that whatever depends on them shows."""
        first = tree_leaves(next(iter(self)))
        with preserved_random_state(*self._generators):
            advance_random_states(*self._generators)
            second = tree_leaves(next(self._pieces(), None))
        if second == [None]:
            raise InputError("data can be read only once; pass a list of batches, a data set or a data loader instead.")
        same = len(first) == len(second) and all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or bool(a == b)
            for a, b in zip(first, second, strict=True)
        )
        if not same:
            raise InputError(
                "the data change between two passes (random augmentation or shuffling?); "
                "pass data that repeat, such as the unaugmented set."
            )

    def __iter__(self) -> Iterator[Pair]:
        empty = True
        for piece in self._pieces():
            empty = False
            yield piece
        if empty:
            raise InputError("the data are empty; there is nothing to measure.")

    def _pieces(self) -> Iterator[Pair]:
        if self.units is not None:
            yield from self._unit_pieces(self.units)
            return
        fixed, last = self.whole and not self._in_memory, None
        for inputs, targets in self._raw():
            count = _count(inputs, targets)
            if fixed and self.size is not None and (count > self.size or last not in (None, self.size)):
                raise InputError(
                    f"batch_size={self.size} does not fit data that come in batches of {max(count, last or 0)}, and "
                    "batches are part of what is measured here; leave batch_size out, or pass a data set or a pair of "
                    "tensors."
                )
            last = count or last
            size = count if self.size is None or fixed else self.size
            for start in range(0, count, max(size, 1)):
                stop = min(start + size, count)
                yield (sliced(inputs, start, stop), targets[start:stop]) if stop - start < count else (inputs, targets)

    def _unit_pieces(self, loss: OfPositions) -> Iterator[Pair]:
        """Every position that counts, as a sample of its own; data that were already taken apart stay as they are."""
        first = 0
        for inputs, targets in self._raw():
            if not _count(inputs, targets):
                continue
            if isinstance(inputs, Unit):
                size = self.size or len(targets)
                for start in range(0, len(targets), size):
                    yield sliced(inputs, start, start + size), targets[start : start + size]
            else:
                yield from unit_batches(loss, inputs, targets, self.size, first)
            first += len(targets)

    @property
    def taken_apart(self) -> bool:
        """Whether the data themselves are units already."""
        return isinstance(next(self._raw())[0], Unit)

    def together(self) -> Batches:
        """The same data with samples as they are, and not taken apart into units."""
        other = copy.copy(self)
        other.units = None
        return other

    def _raw(self) -> Iterator[Pair]:
        if self._in_memory:
            yield self.data
            return
        batches = None
        while True:
            # even a sequential loader draws from the global generator, or from its own
            with preserved_random_state(*self._generators), _reading():
                batches = iter(self.data) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            # a copy: some data fill the same memory again for the next batch
            yield tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, _as_pair(batch, self.form, self.notes)
            )

    def first(self, count: int, least: int = 1) -> Pair:
        """The first samples, at most `count`, of the first batch that has any.

        For data in memory, at least `least` if there are that many: batches of one do not show whether samples depend
        on each other.
        """
        if self.units is not None and self.size is not None and self.size < least:
            return self.cut(least).first(count)
        if self._in_memory and self.size is not None and self.size < least:
            inputs, targets = self.data
            if len(targets):
                return sliced(inputs, 0, least), targets[:least]
        for inputs, targets in self:
            if len(targets):
                return sliced(inputs, 0, count), targets[:count]
        raise InputError("the data are empty; there is nothing to measure.")


def all_targets(targets: list[Tensor]) -> Tensor:
    """The targets of all batches; those of shorter sequences are padded with -100, which stands for no label."""
    shapes = {each.shape[1:] for each in targets}
    if len(shapes) < 2 or len({len(shape) for shape in shapes}) > 1:
        return torch.cat(targets)
    sizes = [max(side) for side in zip(*shapes, strict=True)]
    whole = [targets[0].new_full((len(each), *sizes), -100) for each in targets]
    for full, each in zip(whole, targets, strict=True):
        full[tuple(slice(side) for side in each.shape)] = each
    return torch.cat(whole)


def picked(batches: Batches, indices: Tensor) -> Any:
    """The samples at these sorted places: a pair of tensors where the inputs are one tensor, else batches."""
    start, pieces = 0, []
    for inputs, targets in batches:
        here = indices[(indices >= start) & (indices < start + len(targets))] - start
        if len(here):

            def pick(leaf: Any, here: Tensor = here) -> Any:
                return leaf[here.to(leaf.device)] if isinstance(leaf, Tensor) else leaf

            pieces.append((tree_map(pick, inputs), pick(targets)))
        start += len(targets)
    if all(isinstance(inputs, Tensor) for inputs, _ in pieces) and len({inputs.shape[1:] for inputs, _ in pieces}) == 1:
        return torch.cat([inputs for inputs, _ in pieces]), torch.cat([targets for _, targets in pieces])
    return pieces


def subset(batches: Batches, count: int | None, seed: int) -> tuple[Any, Tensor | None, int]:
    """At most `count` of the samples, drawn without replacement and in order; their places; how many there are."""
    seed = checked_seed(seed)
    if count is not None:
        count = whole_number(count, "samples", 1)
    if count is not None and batches.whole:
        raise InputError(
            "samples= would change the batches, which are part of what batch_norm='batch' and batches='fixed' measure; "
            "leave it out."
        )
    population = sum(len(targets) for _, targets in batches)
    if count is None or count >= population:
        return batches.data, None, population
    generator = np.random.default_rng((seed, 1))
    indices = torch.from_numpy(np.sort(generator.choice(population, count, replace=False)))
    return picked(batches, indices), indices, population


def _take_in(mark: Any, numbers: Tensor) -> None:
    """Hash numbers in float64, a few rows at a time: a batch may be all of the data."""
    for some in numbers.detach().split(_ROWS) if numbers.ndim else ():
        mark.update(some.cpu().double().contiguous().numpy())


class Places(TypedDict):
    """Which position of which sample each row of a result belongs to."""

    sample: Tensor | None
    position: Tensor | None


class Fingerprint:
    """A hash of the order of the data that does not depend on how they are split into batches.

    It reads the targets and at most 16 numbers of each input, enough to distinguish two orders or two data sets.
    """

    def __init__(self) -> None:
        self._inputs, self._targets = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        self._units: list[Tensor] = []

    def update(self, inputs: Any, targets: Tensor) -> None:
        """Take in the next batch."""
        if isinstance(inputs, Unit):
            self._units.append(torch.stack([inputs.sample, inputs.place]).cpu())
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Shared):
                self._inputs.update(leaf.mark().encode())
            if isinstance(leaf, Tensor) and leaf.numel():
                flat = leaf.reshape(leaf.shape[0], -1)
                sample = flat[:, :: max(1, -(-flat.shape[1] // 16))]
                sample = torch.view_as_real(sample) if sample.is_complex() else sample
                _take_in(self._inputs, sample)
                break
        _take_in(self._targets, targets)

    @property
    def places(self) -> Places:
        """The sample and the position in it of every unit that was taken in; nothing where samples are whole."""
        sample, position = torch.cat(self._units, 1) if self._units else (None, None)
        return Places(sample=sample, position=position)

    def __str__(self) -> str:
        return self._inputs.hexdigest() + self._targets.hexdigest()
