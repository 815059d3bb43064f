"""The processes that share one measurement: who takes which batch, and how all end with the same numbers.

Every one of R ranks passes the same model and data and takes every R-th batch. It learns only sums of what the others'
batches gave. Only tensors travel, never pickled objects. A process on its own does not communicate, even where a
process group exists.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spiritlevel.errors import InputError

PATIENCE = 25.0
"""Seconds that a rank waits for another before it gives up, unless `SPIRITLEVEL_PATIENCE` says otherwise.

torchrun gives a process that hangs another 30 seconds to end, so the job ends within a minute.
"""


@contextmanager
def job() -> Iterator[Any]:
    """The group of the processes that `torchrun` has started, this one among them; None for a process on its own.

    Gloo carries what lies on the CPU, and the matching backend of PyTorch (NCCL, XCCL) what lies on an accelerator;
    "cuda" or "xpu" then means the device with this process's local rank. torchrun stops all processes as soon as one
    has died: that, too, becomes a `ConnectionError` here.

    >>> with job() as group:
    ...     group is None
    True
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    carriers = "gloo"
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        carriers = f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
    try:
        patience = float(os.environ.get("SPIRITLEVEL_PATIENCE", PATIENCE))
        timeout = datetime.timedelta(seconds=patience)
        dist.init_process_group(carriers, timeout=timeout)
    except ValueError as error:
        raise InputError(f"WORLD_SIZE asks for several processes, but {error}; start them with torchrun.") from error
    except RuntimeError as error:
        raise ConnectionError(f"the processes of this job did not find each other ({_reason(error)}).") from error

    def stop(*_: object) -> None:
        raise ConnectionError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} was told to stop, as happens when another rank has "
            "died; see what that one said last, and start the job again."
        )

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        yield dist.group.WORLD
    except ConnectionError as error:
        if "timed out" not in str(error).lower():
            raise
        more = f"Set SPIRITLEVEL_PATIENCE to more than its {patience:g} seconds if the other rank was only slow."
        raise ConnectionError(f"{error} {more}") from error
    finally:
        dist.destroy_process_group()  # its threads would abort an interpreter that exits before them
        if main:
            signal.signal(signal.SIGTERM, before)


class Ranks:
    """This process among those of a `torch.distributed` group; alone if there is none.

    What travels lies on `device`, the model's: Gloo takes tensors on the CPU, NCCL those on its GPU. A rank that does
    not answer causes a `ConnectionError`: at once if its process died, after the group's own timeout if it hangs.

    >>> ranks = Ranks(None)
    >>> ranks.rank, ranks.count, ranks.takes(7), ranks.least(3)
    (0, 1, True, 3)
    """

    def __init__(self, group: Any = None, device: torch.device | str = "cpu") -> None:
        self.group, self.device = group, torch.device(device)
        self.rank, self.count = 0, 1
        if group is None:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError("group= needs torch.distributed.init_process_group first; leave it out to measure alone.")
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not a member of group=; only its ranks may take part in the measurement.")

    def takes(self, index: int) -> bool:
        """Whether the batch with this number is for this rank."""
        return index % self.count == self.rank

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks."""
        for tensor in tensors if self.group is not None else ():
            moved = tensor.to(self.device)
            with self._contact():
                dist.all_reduce(moved, group=self.group)
            if moved is not tensor:
                tensor.copy_(moved)

    def joined(self, pieces: Iterable[tuple[int, Tensor]], *shape: int) -> Tensor:
        """One float64 tensor of this shape, each piece of each rank at the row where it begins; zero elsewhere.

        >>> Ranks(None).joined([(2, torch.tensor([5.0]))], 3)
        tensor([0., 0., 5.], dtype=torch.float64)
        """
        whole = torch.zeros(shape, dtype=torch.float64)
        for start, piece in pieces:
            whole[start : start + len(piece)] = piece
        self.add([whole])
        return whole

    def first(self, tensor: Tensor) -> Tensor:
        """The tensor as rank 0 has it."""
        if self.group is None:
            return tensor
        received = tensor.contiguous() if self.rank == 0 else tensor.clone(memory_format=torch.contiguous_format)
        with self._contact():
            dist.broadcast(received, group=self.group, group_src=0)
        return received

    def told(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order.

        >>> Ranks(None).told(b"alone")
        [b'alone']
        """
        if self.group is None:
            return [message]
        sizes = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(message)
        self.add([sizes])
        table = torch.zeros(self.count, int(sizes.max()), dtype=torch.uint8, device=self.device)
        table[self.rank, : len(message)] = torch.frombuffer(bytearray(message or b" "), dtype=torch.uint8)[
            : len(message)
        ].to(self.device)
        self.add([table])
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(table, sizes.tolist(), strict=True)]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return self._least(number)[0] if self.group is not None else number

    def same(self, value: object, what: str) -> None:
        """Raise `InputError` on every rank unless all have the same `value`."""
        if self.group is None:
            return
        mark = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
        low, minus_high = self._least(mark, -mark)
        if low != -minus_high:
            raise InputError(
                f"the ranks of group= differ in {what}; every rank must pass the same, and takes its share."
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error on one rank inside becomes an error on all, so that none waits for a rank that has given up.

        Inside, nothing may communicate.
        """
        if self.group is None:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        culprit = self.least(self.count if failure is None else self.rank)
        if culprit == self.count:
            return
        text = (str(failure) or type(failure).__name__).encode() if self.rank == culprit else b""
        content = torch.zeros(-self.least(-len(text)), dtype=torch.uint8, device=self.device)
        content[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self.add([content])
        if failure is not None:
            raise failure
        raise InputError(f"rank {culprit} of group= had to stop: {bytes(content.tolist()).decode(errors='replace')}")

    def _least(self, *numbers: int) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with self._contact():
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return tensor.tolist()

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _lost(self.rank, self.count, error) from error

    @staticmethod
    @contextmanager
    def contact(group: Any) -> Iterator[None]:
        """Around passes of a model that communicates by itself: a lost rank is reported in the same words."""
        try:
            yield
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            raise _lost(dist.get_rank(group), dist.get_world_size(group), error) from error


_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe", re.IGNORECASE)


def _lost(rank: int, count: int, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"rank {rank} of {count} has lost another rank, which died or does not answer ({_reason(error)}); see what "
        "that one said last, and start the job again."
    )


def _reason(error: Exception) -> str:
    """The first sentence of a torch.distributed error, without its place in the source."""
    return re.sub(r"^\[[^\]]*\] *", "", str(error)).split(". ")[0].split("\n")[0]
