"""What timm imports of torchvision before any of its networks can be built, for an environment without torchvision.

Its networks use one class of it, and only to recognise it; the rest belongs to data loading, which is not called here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

from torch import nn


class _Any(type):
    """A class in which every name is a class that does nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Any(name, (), {})
        setattr(cls, name, made)
        return made


class _Empty(ModuleType):
    """A module in which every name is such a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Any(name, (), {})
        setattr(self, name, made)
        return made


for _name in ("datasets", "models", "ops", "transforms", "utils", "ops.misc", "transforms.functional"):
    _module = _Empty(f"torchvision.{_name}")
    sys.modules[f"torchvision.{_name}"] = _module
    setattr(sys.modules[f"torchvision.{_name}".rpartition(".")[0]], _name.rpartition(".")[2], _module)


class FrozenBatchNorm2d(nn.Module):
    """None of the networks has one."""


sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d  # type: ignore[attr-defined]
