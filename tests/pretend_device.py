"""A pretend accelerator, for a machine without one: `import pretend_device` registers the device "pretend".

Its tensors are computed on the CPU, and behave like those of a GPU wherever that shows: they refuse to mix with tensors
of the CPU, take random numbers from a generator of their own and from no generator of the CPU, have a memory of their
own, and whoever asks for a number has to wait for it. Every such wait is counted, with the line that asked.

The registration lasts as long as the process: use it in one of its own, as `test_device.py` does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
CPU = torch.device("cpu")
MEMORY = 2**30  # bytes that it says are free

# What a GPU takes from both sides: copies, and indices that lie on the CPU.
_BOTH_SIDES = {
    f"aten::{name}" for name in ("_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_")
}
# Whose result has a size, or is a number, that depends on values: the CPU has to wait for them.
_WAITED_FOR = {
    f"aten::{name}"
    for name in "_local_scalar_dense equal nonzero masked_select _unique2 unique_consecutive bincount".split()
}


class _Precision:
    """Whether there are float64 numbers; a device of Apple's has none."""

    double = True


precision = _Precision()
waits: Counter[str] = Counter()
"""How often the CPU waited for the device, by the line of spiritlevel that asked."""
generator = torch.Generator().manual_seed(0)


class _Module:
    """What `torch.pretend` is: the functions that `torch.cuda` has too."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return MEMORY, 2 * MEMORY

    def get_rng_state(self, device: Any = None) -> Tensor:
        return generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        generator.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        generator.manual_seed(seed)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class Pretend(Tensor):
    """A tensor on the device; `near` is the one of the CPU that holds its numbers."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Pretend:
        if near.dtype == torch.float64 and not precision.double:
            raise TypeError("Cannot convert a tensor to float64: the device has no such numbers")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=f"{NAME}:0",
        )
        made.near = near
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def untyped_storage(self) -> Any:
        return self.near.untyped_storage()

    def tolist(self) -> Any:  # which torch allows for no class but its own
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"{self.near}, far away"


def _is_here(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _line() -> str:
    """Where spiritlevel asked: file and line."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/spiritlevel/" in file:
            return f"{file.rpartition('/spiritlevel/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    far = [tensor for tensor in tensors if isinstance(tensor, Pretend)]
    if far and name not in _BOTH_SIDES and any(not isinstance(t, Pretend) and t.ndim for t in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu in {name}")
    device = kwargs.get("device")
    goes_far = bool(far) if device is None else _is_here(device)
    if far and (name in _WAITED_FOR or (name != "aten::copy_" and not goes_far)):
        waits[_line()] += 1
    if name == "aten::copy_" and isinstance(args[1], Pretend) and not isinstance(args[0], Pretend):
        waits[_line()] += 1
    options = {key: CPU if key == "device" and _is_here(value) else value for key, value in kwargs.items()}
    if goes_far and any(argument.name == "generator" for argument in func._schema.arguments):
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        options["generator"] = generator
    result = func(*tree_map(_near, args), **tree_map(_near, options))
    if func._schema.is_mutable and args and tree_leaves(result) and tree_leaves(result)[0] is _near(args[0]):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda leaf: Pretend(leaf) if goes_far and type(leaf) is Tensor else leaf, result)


def _near(leaf: Any) -> Any:
    return leaf.near if isinstance(leaf, Pretend) else leaf


def _made_near(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and its like fill the memory themselves, below every dispatcher: for the device, here first."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, Pretend) or not _is_here(device):
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(NAME)

    return made


@contextmanager
def waiting() -> Iterator[Counter[str]]:
    """How often the CPU waited for the device inside, by line."""
    before, found = Counter(waits), Counter[str]()
    yield found
    found.update(waits - before)


@contextmanager
def without_double() -> Iterator[None]:
    """The device has no float64 inside."""
    precision.double = False
    try:
        yield
    finally:
        precision.double = True


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter of another class cannot be filled in place
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
torch.tensor, torch.as_tensor = _made_near(torch.tensor), _made_near(torch.as_tensor)
torch.accelerator.get_memory_info = lambda device=None: (MEMORY, 2 * MEMORY)  # its allocator is the CPU's
