"""Batches side by side: the order that models and data rely on, the threads, and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.binding.cores import at_a_time, even_size, in_memory, side_by_side


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 7, 20])
def test_all_is_done_once_and_begun_and_ended_in_order(items: int, count: int) -> None:
    calling, begun, ended, alive, most = threading.current_thread(), [], [], 0, 0

    def numbers() -> Iterator[int]:
        for number in range(items):
            assert threading.current_thread() is calling
            yield number

    def begin(number: int) -> Callable[[], int]:
        nonlocal alive, most
        assert threading.current_thread() is calling
        begun.append(number)
        alive += 1
        most = max(most, alive)
        return lambda: number * number

    def end(square: int) -> None:
        nonlocal alive
        assert threading.current_thread() is calling
        alive -= 1
        ended.append(square)

    side_by_side(numbers(), begin, end, count)
    assert begun == list(range(items))
    assert ended == [number**2 for number in range(items)]
    assert most <= in_memory(count)


def test_so_many_at_a_time_and_each_with_its_share_of_the_cores() -> None:
    running: set[int] = set()
    most, seen = 0, set()

    def work() -> None:
        nonlocal most
        running.add(threading.get_ident())
        most = max(most, len(running))
        seen.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        time.sleep(0.05)
        running.discard(threading.get_ident())

    side_by_side(range(8), lambda _: work, lambda _: None, 2)
    assert most == 2
    assert seen == {(True, 2), (False, 2)}
    assert torch.get_num_threads() == 4
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [4]  # new threads are not left with a share


def test_a_single_batch_has_all_cores() -> None:
    seen: list[int] = []
    side_by_side(range(1), lambda _: torch.get_num_threads, seen.append, 4)
    assert seen == [4]


@pytest.mark.parametrize("where", ["items", "begin", "work", "end"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_error_anywhere_is_raised_and_nothing_after_it_is_handed_on(where: str, count: int) -> None:
    ended: list[int] = []

    def fail(here: str, number: int) -> None:
        if here == where and number >= 5:
            raise ValueError(f"number {number}")

    def numbers() -> Iterator[int]:
        for number in range(20):
            fail("items", number)
            yield number

    def begin(number: int) -> Callable[[], int]:
        fail("begin", number)

        def work() -> int:
            fail("work", number)
            return number

        return work

    def end(number: int) -> None:
        fail("end", number)
        ended.append(number)

    with pytest.raises(ValueError, match="number 5"):
        side_by_side(numbers(), begin, end, count)
    assert ended == list(range(len(ended)))
    assert len(ended) <= 5
    assert torch.get_num_threads() == 4


def test_an_interrupt_leaves_no_thread_behind() -> None:
    before = threading.active_count()

    def begin(number: int) -> Callable[[], int]:
        if number == 3:
            raise KeyboardInterrupt
        return lambda: number

    with pytest.raises(KeyboardInterrupt):
        side_by_side(range(9), begin, lambda _: None, 2)
    assert threading.active_count() == before


def test_without_a_thread_to_be_had_the_calling_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    ended: list[int] = []
    side_by_side(range(9), lambda number: lambda: number, ended.append, 4)
    assert ended == list(range(9))


def test_an_item_is_begun_before_the_next_one_is_read() -> None:
    """Data may fill the same memory again for the next batch."""
    shared, ended = [0], list[int]()

    def numbers() -> Iterator[list[int]]:
        for number in range(7):
            shared[0] = number
            yield shared

    def begin(item: list[int]) -> Callable[[], int]:
        own = item[0]
        return lambda: own

    side_by_side(numbers(), begin, ended.append, 2)
    assert ended == list(range(7))


def test_batches_are_equal_and_every_core_gets_as_many() -> None:
    for samples in (100, 1000, 6000, 60_000, 59_999):
        for most in (1, 64, 1024, 4096):
            for count in (1, 2, 3, 4):
                size = even_size(most, samples, count)
                assert 1 <= size <= most
                if samples >= 32 * count:
                    rounds = -(-samples // size // count)
                    assert rounds * size <= 1.05 * samples / count  # of the core that has most to do
    assert even_size(1024, 6000, 2) == 1000
    assert even_size(1024, 20, 2) == 1024  # too few to be divided


def test_how_many_at_a_time() -> None:
    assert at_a_time(torch.device("cpu")) == 4
    assert at_a_time(torch.device("meta")) == 1
    torch.set_num_threads(64)
    assert at_a_time(torch.device("cpu")) == 4
    torch.set_num_threads(1)
    assert at_a_time(torch.device("cpu")) == 1


@pytest.mark.parametrize(("samples", "width", "used"), [(60, 5, 1), (60, 100_000, 4), (30_000, 50, 4)])
def test_a_small_network_is_measured_on_one_thread(samples: int, width: int, used: int) -> None:
    """Small is both few parameters and few samples; afterwards all is as it was, also after an error."""
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))
    data = torch.randn(samples, 3), torch.arange(samples) % 2
    seen = set()

    def progress(what: str, done: int, total: int) -> None:
        seen.add(torch.get_num_threads())

    for function in (sl.measure, sl.audit):
        options = {"parts": []} if function is sl.measure else {"transforms": ["permute_units"], "search": False}
        function(model, data, measures=["margin_mean"], progress=progress, **options)
        assert seen == {used}
        assert torch.get_num_threads() == 4
    seen.clear()
    sl.compare(model, model, data, measures=["margin_mean"], audit=False, progress=progress)
    assert seen == {used}

    def fail(what: str, done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sl.measure(model, data, measures=["margin_mean"], parts=[], progress=fail)
    assert torch.get_num_threads() == 4


def test_a_small_network_of_many_values_is_not_small() -> None:
    """A convolution has few parameters and uses each at every place."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = torch.randn(300, 1, 64, 64), torch.arange(300) % 4
    assert sum(parameter.numel() for parameter in model.parameters()) * len(data[1]) < 2**14
    seen = set()
    sl.measure(model, data, measures=["margin_mean"], parts=[], progress=lambda *_: seen.add(torch.get_num_threads()))
    assert seen == {4}
