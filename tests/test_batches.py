"""Data as batches that repeat, their fingerprints, and the memory they may take."""

from __future__ import annotations

import functools
import math
import os
import platform
import random
import re
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_states, same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import spiritlevel as sl
from spiritlevel import memory
from spiritlevel.binding.batches import Batches, Fingerprint
from spiritlevel.errors import InputError
from spiritlevel.memory import available_memory, parse_memory

# ---------------------------------------------------------------- data


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(Dataset[Any]):
    def __init__(self, count: int = 6, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.count, self.change = count, change

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.count:
            raise IndexError
        return self.change(X[index]), int(Y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((x, int(y)) for x, y in zip(X, Y, strict=True))


class Again:
    """Batches that can be read again, of uneven sizes, one empty."""

    def __iter__(self) -> Iterator[Any]:
        yield X[:1], Y[:1]
        yield X[:0], Y[:0]
        yield X[1:], Y[1:]


class Once:
    """Can be iterated, but only once."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self.batches


SOURCES: dict[str, Callable[[], Any]] = {
    "pair": lambda: (X, Y),
    "list of two tensors": lambda: [X, Y],
    "pair of arrays": lambda: (X.numpy(), Y.numpy()),
    "reversed arrays": lambda: (X.numpy()[::-1][::-1], Y.numpy()),
    "data set": lambda: Pairs(),
    "tensor data set": lambda: TensorDataset(X, Y),
    "stream": lambda: Stream(),
    "loader": lambda: DataLoader(Pairs(), batch_size=4),
    "loader of a stream": lambda: DataLoader(Stream(), batch_size=4),
    "loader, batch sampler": lambda: DataLoader(Pairs(), batch_sampler=BatchSampler(range(6), 4, drop_last=False)),
    "list of batches": lambda: [(X[:4], Y[:4]), (X[4:], Y[4:])],
    "two batches": lambda: ((X[:5], Y[:5]), (X[5:], Y[5:])),
    "one batch": lambda: [(X, Y)],
    "ragged, one empty": lambda: Again(),
}


@pytest.mark.parametrize("size", [None, 1, 4, 100])
@pytest.mark.parametrize("name", SOURCES)
def test_all_kinds_of_data_give_the_same_samples(name: str, size: int | None) -> None:
    before = random_states()
    batches = Batches(SOURCES[name](), size=size)
    for _ in range(2):
        pieces = list(batches)
        assert torch.equal(torch.cat([inputs for inputs, _ in pieces]), X)
        assert torch.equal(torch.cat([targets for _, targets in pieces]), Y)
        assert all(0 < len(targets) <= (size or 6) for _, targets in pieces)
    first = batches.first(2)
    assert 1 <= len(first[1]) <= 2
    assert torch.equal(first[0], X[: len(first[1])])
    after = random_states()
    assert all(same(before[key], after[key]) for key in before)


@pytest.mark.parametrize("size", [None, 4])
def test_whole_batches_are_not_split(size: int | None) -> None:
    """With batch statistics a loader's batches are part of the definition; a pair in memory has none of its own."""
    for data in (DataLoader(Pairs(), batch_size=4), [(X[:4], Y[:4]), (X[:0], Y[:0]), (X[4:], Y[4:])]):
        assert [len(y) for _, y in Batches(data, size=size, whole=True)] == [4, 2]
    assert [len(y) for _, y in Batches((X, Y), size=size, whole=True)] == ([6] if size is None else [4, 2])
    assert [len(y) for _, y in Batches(Pairs(), size=size, whole=True)] == ([6] if size is None else [4, 2])
    assert [len(y) for _, y in Batches([(X, Y)], size=100, whole=True)] == [6]


@pytest.mark.parametrize(("size", "own"), [(2, 4), (1, 4), (5, 4), (100, 4)])
def test_a_batch_size_that_whole_batches_do_not_have_is_refused(size: int, own: int) -> None:
    message = f"batch_size={size} does not fit data that come in batches of {own}, .*; leave batch_size out, or pass a"
    for data in (DataLoader(Pairs(), batch_size=own), [(X[:own], Y[:own]), (X[own:], Y[own:])]):
        with pytest.raises(InputError, match=message):
            list(Batches(data, size=size, whole=True))
        assert sum(len(y) for _, y in Batches(data, size=size)) == 6
    with pytest.raises(InputError, match=message):
        sl.hessian_variance(nn.Linear(4, 3), DataLoader(Pairs(), batch_size=own), batch_size=size)
    with pytest.raises(InputError, match=message):
        sl.hessian(nn.Linear(4, 3), DataLoader(Pairs(), batch_size=own), batch_size=size, batch_norm="batch")


@pytest.mark.parametrize("inputs", [{"a": X, "b": X[:, 0]}, (X, X[:, 0]), UserDict(a=X, b=X[:, 0])])
def test_structured_inputs_are_sliced(inputs: Any) -> None:
    for data in ((inputs, Y), [(inputs, Y)]):
        for part, targets in Batches(data, size=4):
            leaves = list(part.values()) if isinstance(part, dict) else list(part)
            assert [len(leaf) for leaf in leaves] == [len(targets)] * 2


def test_what_is_not_a_tensor_goes_to_every_batch() -> None:
    for part, targets in Batches([({"x": X, "flag": True}, Y)], size=4):
        assert part["flag"] is True
        assert len(part["x"]) == len(targets)


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    fixed = X.numpy().copy()
    fixed.flags.writeable = False
    backwards = X.numpy()[::-1]
    assert torch.equal(torch.cat([x for x, _ in Batches((fixed, Y.numpy()), size=4)]), X)
    assert torch.equal(torch.cat([x for x, _ in Batches((backwards, Y.numpy()), size=4)]), X.flip(0))


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data),
        lambda data: SubsetRandomSampler(range(3)),
        lambda data: WeightedRandomSampler([0.5] * 6, 6),
        lambda data: RandomSampler(data, replacement=True),
        lambda data: RandomSampler(data, num_samples=3),
    ],
    ids=["random", "subset", "weighted", "with replacement", "some"],
)
def test_shuffling_loaders(sampler: Callable[[Any], Any]) -> None:
    """One that only changes the order is read in order, with a note where the order matters; others are refused."""
    data = Pairs()
    for loader in (
        DataLoader(data, batch_size=4, sampler=sampler(data)),
        DataLoader(data, batch_sampler=BatchSampler(sampler(data), 4, drop_last=False)),
    ):
        found = sampler(data)
        if type(found) is RandomSampler and not found.replacement and found.num_samples == 6:
            before = torch.get_rng_state()
            batches = Batches(loader, ordered=False)
            assert [len(y) for _, y in batches] == [4, 2]
            assert torch.equal(torch.cat([x for x, _ in batches]), X)
            assert torch.equal(torch.get_rng_state(), before)
            assert not batches.notes
            in_order = "the data loader shuffles; its samples were read in the order of its data set"
            assert Batches(loader).notes == [in_order]
        elif isinstance(found, SubsetRandomSampler):
            batches = Batches(loader)
            assert torch.equal(torch.cat([x for x, _ in batches]), X[:3])
            assert batches.notes
        else:
            with pytest.raises(InputError, match=f"the data loader draws with {type(found).__name__}, which may leave"):
                Batches(loader, ordered=False)


class Pieces(BatchSampler):
    """A batch sampler of the user's, about which nothing is known."""


def test_shuffling_batch_samplers() -> None:
    data = Pairs()
    part = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(range(4)), 3, drop_last=False))
    assert torch.equal(torch.cat([x for x, _ in Batches(part, ordered=False)]), X[:4])
    batches_in_data = DataLoader([(X[:4], Y[:4]), (X[4:], Y[4:])], batch_size=None, shuffle=True)  # type: ignore[arg-type]
    assert [len(y) for _, y in Batches(batches_in_data, ordered=False)] == [4, 2]
    unknown = DataLoader(data, batch_sampler=Pieces(RandomSampler(data), 4, drop_last=False))
    with pytest.raises(InputError, match="the data loader draws with Pieces, which may leave out samples"):
        Batches(unknown, ordered=False)


@pytest.mark.parametrize("size", [4, 3])
def test_a_last_batch_that_a_shuffling_loader_drops(size: int) -> None:
    """It is another one in every pass: all samples are measured, unless the batches themselves matter."""
    loaders = {
        shuffle: DataLoader(Pairs(), batch_size=size, shuffle=shuffle, drop_last=True) for shuffle in (False, True)
    }
    assert [len(y) for _, y in Batches(loaders[False], whole=True)] == ([4] if size == 4 else [3, 3])
    assert [len(y) for _, y in Batches(loaders[True], ordered=False)] == ([4, 2] if size == 4 else [3, 3])
    if size == 3:
        assert [len(y) for _, y in Batches(loaders[True], ordered=False, whole=True)] == [3, 3]
    else:
        with pytest.raises(
            InputError, match=r"shuffles and drops its last batch, .*; pass a loader with shuffle=False"
        ):
            Batches(loaders[True], ordered=False, whole=True)


class Shuffles:
    """A sampler of the user's, which torch's classes do not give away."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(6).tolist()


NOISE: dict[str, Callable[[], Any]] = {
    "torch": lambda: Pairs(change=lambda x: x + torch.rand(4)),
    "numpy": lambda: Pairs(change=lambda x: x + float(np.random.random())),
    "python": lambda: Pairs(change=lambda x: x + random.random()),
    "own generator": lambda: Pairs(change=functools.partial(lambda g, x: x + g.random(), random.Random(0))),
    "sampler": lambda: DataLoader(Pairs(), batch_size=6, sampler=Shuffles()),
    "other length": lambda: Once([(X[:4], Y[:4]), (X[4:], Y[4:])]),
}


@pytest.mark.parametrize("name", NOISE)
def test_data_that_change_are_refused(name: str) -> None:
    before = random_states()
    with pytest.raises(InputError, match="the data change between two passes"):
        Batches(NOISE[name]())
    after = random_states()
    assert all(same(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (iter([(X, Y)]), "data can be read only once (an iterator); pass a list of batches"),
        ((pair for pair in [(X, Y)]), "only once (an iterator)"),
        (zip([X], [Y], strict=True), "only once (an iterator)"),
        (Once([(X, Y)]), "data can be read only once; pass a list of batches"),
        ((X[:0], Y[:0]), "the data are empty"),
        ([], "the data are empty"),
        ([(X[:0], Y[:0])], "the data are empty"),
        (Pairs(0), "the data are empty"),
        (DataLoader(Pairs(0)), "the data are empty"),
        ((X, Y[:5]), "inputs of shape (6, 4) do not fit targets of shape (5,)"),
        (((X, X[:5]), Y), "inputs of shape (5, 4) do not fit targets of shape (6,)"),
        ([(X, Y[0])], "inputs of shape (6, 4) do not fit targets of shape ()"),
        ([X, X, X], "a batch has 3 items (tensor (6, 4), tensor (6, 4), tensor (6, 4)), and it is unclear"),
        ([(X, Y, Y)], "a batch has 3 items (tensor (6, 4), tensor (6,), tensor (6,)), and it is unclear"),
        ([(X, [0, 1])], "inputs of shape (6, 4) do not fit targets of shape (2,)"),
        (X, "batches of (inputs, targets), got a tensor of shape (6, 4); pass a pair (inputs, targets)."),
        ({"x": X}, "a batch is a dict with the key 'x' and holds none of labels, label, targets, target, y; name the"),
        ("mnist", "data must be a pair of tensors, a Dataset, a DataLoader or batches of (inputs, targets), got the s"),
        (3, "got 3."),
        (None, "got None."),
    ],
)
def test_other_data_are_refused_in_a_sentence(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        list(Batches(data))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_batch_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(InputError, match="batch_size must be a whole number of at least 1, got"):
        Batches((X, Y), size=size)


def test_a_loaders_own_generator_stays_as_it_was() -> None:
    """A training run may draw its order from the same one."""
    own = torch.Generator().manual_seed(1)
    before = own.get_state()
    batches = Batches(DataLoader(TensorDataset(X, Y), batch_size=4, generator=own))
    assert [len(targets) for _, targets in batches] == [4, 2]
    assert torch.equal(own.get_state(), before)

    class Shuffled(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(6, generator=own).tolist())

    with pytest.raises(InputError, match="change between two passes"):
        Batches(DataLoader(TensorDataset(X, Y), batch_size=4, sampler=Shuffled(), generator=own))


def test_workers_change_nothing() -> None:
    loader = DataLoader(Pairs(), batch_size=4, num_workers=1)
    before = random_states()
    assert torch.equal(torch.cat([x for x, _ in Batches(loader)]), X)
    after = random_states()
    assert all(same(before[key], after[key]) for key in before)


# ---------------------------------------------------------------- fingerprints


def fingerprint(batches: Any) -> str:
    result = Fingerprint()
    for inputs, targets in batches:
        result.update(inputs, targets)
    return str(result)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.sampled_from([(1,), (15,), (16,), (47,), (3, 11)]))
def test_fingerprints_do_not_depend_on_the_split(sizes: list[int], shape: tuple[int, ...]) -> None:
    count = sum(sizes)
    generator = torch.Generator().manual_seed(count)
    inputs, targets = torch.rand(count, *shape, generator=generator), torch.arange(count)
    pieces = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    assert fingerprint(pieces) == fingerprint([(inputs, targets)])


def test_fingerprints_tell_data_apart() -> None:
    order = torch.tensor([1, 0, 2, 3, 4, 5])
    other = X.clone()
    other[5, 0] += 1
    variants = [
        [(X, Y)],
        [(X[order], Y)],
        [(X, Y[order])],
        [(X[order], Y[order])],
        [(other, Y)],
        [(X[:5], Y[:5])],
        [(X + 1, Y)],
    ]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)
    kinds = [X, X.double(), {"x": X}, (X, Y), (Y.float().new_zeros(6, 0), X)]
    assert len({fingerprint([(kind, Y)]) for kind in kinds}) == 1  # the same numbers in other clothes


def test_fingerprints_read_at_most_16_numbers_of_a_sample() -> None:
    for width in (1, 15, 16, 17, 31, 32, 47, 784):
        read: list[int] = []
        made = Fingerprint()
        made._inputs = SimpleNamespace(update=lambda data, read=read: read.append(memoryview(data).nbytes // 8))  # type: ignore[assignment]
        made.update(torch.rand(1, width), Y[:1])
        assert min(width, 8) <= read[0] <= 16


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (1.5e9, 1_500_000_000),
        ("100", 100),
        ("2GB", 2 * 10**9),
        ("2 gib", 2 * 2**30),
        (" .5k ", 500),
        ("1.5MB", 1_500_000),
        ("3T", 3 * 10**12),
        ("7b", 7),
        (np.int64(9), 9),
        (np.float32(8.5), 8),
    ],
)
def test_memory_in_words_and_numbers(text: Any, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2 PB", "-1GB", "1e9", "two", "2GBs", True, [1], math.nan, math.inf])
def test_other_memory_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"memory must be a number of bytes or a string such as '2GB', got"):
        parse_memory(text)


@pytest.mark.parametrize("memory", [0, -5, "0", "0.0001kb"])
def test_memory_is_positive(memory: Any) -> None:
    with pytest.raises(InputError, match="memory must be positive"):
        parse_memory(memory)


@pytest.mark.parametrize("memory", [10**19, 10**400, "9" * 400, "99999999T", 1e300])
def test_memory_is_not_more_than_any_machine_has(memory: Any) -> None:
    """Numbers beyond floating point ended in an OverflowError."""
    with pytest.raises(InputError, match=r"^memory must be at most 1,000,000,000,000,000,000 bytes, got .{1,80}$"):
        parse_memory(memory)


def test_memory_that_is_not_given_is_half_of_what_is_there() -> None:
    assert 2**26 <= available_memory() < 2**50
    assert 2**25 <= parse_memory(None) < 2**49


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  4194304 kB\n"}, 2**32),
        (
            {
                "/proc/meminfo": "MemAvailable: 4194304 kB",
                "/sys/fs/cgroup/memory.max": f"{2**31}\n",
                "/sys/fs/cgroup/memory.current": f"{2**30}\n",
            },
            2**30,
        ),
        (  # files in the cache are not in the way
            {
                "/proc/meminfo": "MemAvailable: 4194304 kB",
                "/sys/fs/cgroup/memory.max": f"{2**31}",
                "/sys/fs/cgroup/memory.current": f"{2**31}",
                "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2**30}\nactive_file 3\n",
            },
            2**30,
        ),
        (
            {
                "/proc/meminfo": "MemAvailable: 4194304 kB",
                "/sys/fs/cgroup/memory.max": "max",
                "/sys/fs/cgroup/memory.current": "5",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**29}",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            },
            2**29,
        ),
        ({"/proc/meminfo": "MemAvailable: 1 kB"}, 2**26),
    ],
)
def test_available_memory(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int) -> None:
    def read(path: Path) -> str:
        if str(path) in files:
            return files[str(path)]
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(memory, "_last", (-math.inf, 0))
    assert available_memory() == expected


def test_available_memory_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(memory.os, "sysconf", missing)
    monkeypatch.setattr(memory, "_last", (-math.inf, 0))
    assert available_memory() == 2**32


def test_available_memory_is_asked_for_again_once_the_answer_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([3, 2, 1])
    clock = iter([10.0, 10.04, 10.06])
    monkeypatch.setattr(memory, "_of_machine", lambda: next(answers))
    monkeypatch.setattr(memory.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(memory, "_last", (-math.inf, 0))
    assert [available_memory() for _ in range(3)] == [3, 3, 2]


_BLOCKS = """
import ctypes, resource, sys
from spiritlevel.memory import keep_freed_memory
if "keep" in sys.argv:
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
for _ in range(20):  # 64 MB each, which glibc would map and give back
    block = library.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    library.free(ctypes.c_void_p(block))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept() -> None:
    """Every block but the first finds its pages where the one before left them, at run time and by the environment."""

    def faults(*arguments: str, **environment: str) -> int:
        command = [sys.executable, "-c", _BLOCKS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
        return int(done.stdout)

    given_back = faults(MALLOC_MMAP_MAX_="65536", MALLOC_TRIM_THRESHOLD_="131072")
    assert faults("keep") < given_back / 4
    assert faults(**memory.KEPT_BY_MALLOC) < given_back / 4


@pytest.mark.parametrize("missing", [OSError, TypeError, AttributeError])
def test_nothing_is_kept_where_the_library_has_no_such_setting(
    monkeypatch: pytest.MonkeyPatch, missing: type[Exception]
) -> None:
    def no_library(_: None) -> Any:
        raise missing

    monkeypatch.setattr(memory.ctypes, "CDLL", no_library)
    memory.keep_freed_memory()
