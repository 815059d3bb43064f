"""Devices other than the CPU, all through the one interface of `torch.accelerator`: CUDA, ROCm, XPU, MPS and others."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


@functools.cache
def _makes_double(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def has_double(device: torch.device) -> bool:
    """Whether a device has float64: MPS does not, nor do some XPUs.

    >>> has_double(torch.device("cpu"))
    True
    """
    return device.type == "cpu" or _makes_double(device)


def doubled(tensor: Tensor) -> Tensor:
    """A tensor in float64, on its own device if that has such numbers, otherwise on the CPU."""
    return tensor.double() if has_double(tensor.device) else tensor.cpu().double()


def with_double(device: torch.device) -> torch.device:
    """The device itself, or the CPU in place of one without float64."""
    return device if has_double(device) else CPU


def generators() -> range:
    """The numbers of the accelerators whose random state may have been used."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not _begun(torch.get_device_module(accelerator)):
        return range(0)
    return range(torch.accelerator.device_count())


def _begun(module: Any) -> bool:
    """Whether a device is in use; asking an idle one for its state would start it."""
    return bool(getattr(module, "is_initialized", lambda: True)())


def random_state(device: torch.device) -> Tensor | None:
    """The state of an accelerator's own generator; None for the CPU."""
    if device.type in ("cpu", "meta"):
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Give an accelerator's generator this state."""
    torch.get_device_module(device).set_rng_state(state, device)


def present() -> str:
    """The devices of this machine, for a sentence.

    >>> present().startswith("cpu")
    True
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu alone"
    return ", ".join(["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))])
