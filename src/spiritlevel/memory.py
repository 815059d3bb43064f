"""How much memory may be used: what a caller says, or what the machine has left."""

from __future__ import annotations

import contextlib
import ctypes
import math
import numbers
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiritlevel.errors import InputError, shown

if TYPE_CHECKING:
    import torch

_FRESH = 0.05  # seconds for which an answer holds: asking takes as long as passes of a small network,
_last = -math.inf, 0  # and no process takes more than some 100 MB of fresh memory in that time
_SMALL = 2**26  # bytes assumed to be free, whatever the machine says
_TRIM_THRESHOLD, _MMAP_MAX, _MOST = -1, -4, 2**31 - 1  # of mallopt(3)
KEPT_BY_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(_MOST)}
"""The environment in which a new process does what `keep_freed_memory` does."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LARGEST = 10**18  # bytes that somebody may mean: more than any machine has, and few enough to count with


def parse_memory(memory: int | str | None, device: torch.device | None = None) -> int:
    """Bytes from a number or a string such as "2GB"; `None` is half of what is available now, where the work is done.

    >>> parse_memory("1.5GB"), parse_memory("512 MiB")
    (1500000000, 536870912)
    """
    if memory is None:
        return available_memory(device) // 2
    number = _bytes(memory)
    if number is None:
        raise InputError(f"memory must be a number of bytes or a string such as '2GB', got {memory!r}.")
    if number < 1:
        raise InputError(f"memory must be positive, got {number}.")
    if number > _LARGEST:
        raise InputError(f"memory must be at most {_LARGEST:,} bytes, got {shown(memory)}.")
    return int(number)


def _bytes(memory: Any) -> float | None:
    """What was written as a number, `None` if it is none."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", memory.lower())
        return float(match[1]) * _UNITS[match[2] or ""] if match else None
    if isinstance(memory, bool) or not isinstance(memory, numbers.Real):
        return None
    if isinstance(memory, numbers.Integral):
        return int(memory)
    return float(memory) if math.isfinite(memory) else None


def peak_memory() -> int:
    """The most bytes that this process has held, on Linux; `getrusage` would start from the peak of its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def check_room(need: int, what: str, way_out: str) -> None:
    """Refuse work that needs more memory than there is, before it is asked for.

    The system lets a process ask for more than there is, and kills it without a word once it uses that much.

    >>> check_room(10**15, "eigenvalues, for 40 vectors of 3,125,000,000,000 numbers", "basis= holds fewer")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: there is not enough memory for eigenvalues, for 40 vectors of 3,125,000,000,000...
    """
    if need > _SMALL and need > (free := available_memory()):
        raise InputError(
            f"there is not enough memory for {what}: it needs about {need / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are "
            f"free; {way_out}."
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes free on an accelerator; None for the CPU, and for a device that shares its memory or does not say."""
    if device.type in ("cpu", "mps", "meta"):  # MPS has the memory of the machine
        return None
    import torch

    with contextlib.suppress(RuntimeError, ValueError, AttributeError):
        return torch.accelerator.get_memory_info(device)[0]
    return None


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that this process may still take: of an accelerator, of the machine, or of a container that allows less."""
    if device is not None and (free := free_memory(device)) is not None:
        return free
    global _last
    now = time.monotonic()
    if not now - _last[0] < _FRESH:
        _last = now, _of_machine()
    return _last[1]


def _of_machine() -> int:
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # if nothing better is known
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        limits = [int(text.split("MemAvailable:")[1].split()[0]) * 1024]
    for folder, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            root = Path("/sys/fs/cgroup") / folder
            free = int((root / limit).read_text()) - int((root / used).read_text())
            with contextlib.suppress(OSError, ValueError, IndexError):  # "used" counts droppable files
                free += int((root / "memory.stat").read_text().split("inactive_file ")[1].split()[0])
            limits.append(free)
    return max(min(limits, default=2**32), 2**26)


def keep_freed_memory() -> None:
    """Have this process keep what it frees, for what it asks for next; only with glibc, and for as long as it runs.

    By default glibc gives every large block back to the system and takes it anew, page by page. Trainings ask for the
    same blocks at every step: LeNet-5 in batches of 1,024 takes 1.6 times as long that way, and no less memory. It
    concerns the whole process, so it is for a process of our own, not for a library.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # other systems have no such function
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _MOST)
