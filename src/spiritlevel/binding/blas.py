"""Products of matrices by the library that multiplies faster on this processor.

PyTorch leaves them to MKL, which keeps to AVX2 on processors that are not Intel's. NumPy comes with OpenBLAS, which
takes AVX-512 where it is there: twice as fast, and a tenth faster without it. Only on one thread: the two libraries
have threads of their own, which would wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spiritlevel.binding.parameters import depth

_WORTH = 2**15  # multiplications of one product below which calling costs more than is gained


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.bmm`, to rounding; nothing can be differentiated through it where NumPy multiplies."""
    if not _by_numpy(a, b):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    out = a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.mm` in the same way."""
    if not _by_numpy(a, b):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


def _by_numpy(a: Tensor, b: Tensor) -> bool:
    if not _single.entered or torch.get_num_threads() > 1 or a.shape[-2] * b.shape[-2:].numel() < _WORTH:
        return False
    plain = all(
        type(one) is Tensor and one.dtype == torch.float32 and one.device.type == "cpu" and not one.requires_grad
        for one in (a, b)
    )
    watched = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() > 0 or depth() is not None
    return plain and not watched and _single.ready()


class _Single:
    """How many callers have asked for one thread. NumPy gets it at its first product, and the others back at the end.

    Looking for its library takes 10 ms, which a small network would notice.
    """

    def __init__(self) -> None:
        self.entered, self._lock = 0, threading.Lock()
        self._before: int | None = None

    def enter(self) -> None:
        with self._lock:
            self.entered += 1

    def ready(self) -> bool:
        """Whether there is a faster library, which then has one thread."""
        library = _openblas()
        if library is None:
            return False
        with self._lock:
            if self._before is None:
                self._before = library.get_num_threads()
                library.set_num_threads(1)
        return True

    def leave(self) -> None:
        with self._lock:
            self.entered -= 1
            if not self.entered and self._before is not None:
                _openblas().set_num_threads(self._before)
                self._before = None


_single = _Single()


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Inside, whatever runs on one thread of PyTorch's may have NumPy multiply, on one thread as well; nothing else."""
    _single.enter()
    try:
        yield
    finally:
        _single.leave()


@functools.cache
def _openblas() -> Any:
    """The handle of NumPy's OpenBLAS where it is the faster library, else `None`."""
    if not torch.backends.mkl.is_available() or "AuthenticAMD" not in _processor():
        return None
    from threadpoolctl import ThreadpoolController

    found = [each for each in ThreadpoolController().lib_controllers if each.internal_api == "openblas"]
    return next((each for each in found if Path(each.filepath).parent.name.startswith("numpy")), None)


def _processor() -> str:
    """What the system says of the processor, its maker among it."""
    described = Path("/proc/cpuinfo")
    with contextlib.suppress(OSError):
        return described.read_text(encoding="utf-8", errors="replace")[:4096]
    return platform.processor()
