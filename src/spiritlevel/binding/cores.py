"""Batches side by side, one per core: most operations on one batch are too short to be shared by all cores.

To share an operation, all threads have to start and end together, hundreds of times per batch, and what cannot be
shared leaves the other cores idle. Batches that each have a core pay neither price, and hardly suffer when another
process takes a core from time to time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from spiritlevel.binding.blas import one_thread_each

Item = TypeVar("Item")
Result = TypeVar("Result")

_WORTHWHILE = 32  # samples in a batch
_MOST = 4  # at a time: each takes its own memory, and they begin one after another


def at_a_time(device: torch.device) -> int:
    """How many batches to work on side by side; 1 where the operations are not those of this machine's cores."""
    return min(torch.get_num_threads(), _MOST) if device.type == "cpu" else 1


def in_memory(count: int) -> int:
    """How many batches exist at once while `count` are worked on: one for each helper is begun ahead."""
    return 2 * count - 1


def batches_that_fit(most: int, batch: int, memory: int) -> int:
    """How many of at most `most` to work on at a time, so that the batches that exist at once fit into `memory`."""
    return next((count for count in range(most, 1, -1) if in_memory(count) * batch <= memory), 1)


def even_size(most: int, samples: int, count: int) -> int:
    """The size of equal batches of at most `most` samples, of which every core gets the same number."""
    if samples < _WORTHWHILE * count:
        return most
    return -(-samples // (-(-samples // (most * count)) * count))


def side_by_side(
    items: Iterable[Item], begin: Callable[[Item], Callable[[], Result]], end: Callable[[Result], None], count: int
) -> None:
    """`end(begin(item)())` for every item, the middle part of `count` items at a time.

    Whatever `begin` and `end` do, and the iteration over the items, happens in the calling thread in the order of the
    items: models and data may rely on it. What `begin` returns may run in another thread, with the cores divided among
    the threads; it must not touch what others write to.
    """
    share = max(1, torch.get_num_threads() // max(1, count))
    jobs: deque[_Job[Result]] = deque()

    def settle(most: int) -> None:
        """Lend a hand until at most this many jobs are left."""
        while len(jobs) > most:
            if not any(job.run() for job in jobs):
                jobs[0].result.exception()  # waits
            while jobs and jobs[0].result.done():
                end(jobs.popleft().result.result())

    begun = (_Job(begin(item)) for item in items)  # a batch is begun before the next is read, which may overwrite it
    jobs.extend(itertools.islice(begun, 1))
    second = list(itertools.islice(begun, 1 if count > 1 else 0))
    if not second:  # all cores for one
        with one_thread_each():
            settle(0)
            for job in begun:
                jobs.append(job)
                settle(0)
        return
    pool = ThreadPoolExecutor(count - 1, initializer=_use_threads, initargs=(share,))
    with one_thread_each(), threads(share), pool as helpers:
        try:
            for job in itertools.chain(second, begun):
                jobs.append(job)
                for waiting in jobs if job is second[0] else [job]:
                    with contextlib.suppress(RuntimeError):  # no thread available, say at the end of the program
                        helpers.submit(waiting.run)
                settle(in_memory(count) - 1)
            settle(0)
        finally:
            helpers.shutdown(wait=False, cancel_futures=True)


class _Job(Generic[Result]):
    """A piece of work for whichever thread is free first."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self.work: Callable[[], Result] | None = work
        self.result: Future[Result] = Future()
        self._free = threading.Lock()

    def run(self) -> bool:
        """Do it, unless another thread has begun it."""
        if not self._free.acquire(blocking=False) or self.work is None:
            return False
        try:
            self.result.set_result(self.work())
        except BaseException as error:  # raised in its turn
            self.result.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.work = None  # and everything it holds
        return True


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """With so many threads for an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _use_threads(number: int) -> None:
    torch.get_num_threads()  # the first call in a thread takes over the common number
    torch.set_num_threads(number)
