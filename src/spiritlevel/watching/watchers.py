"""What watchers of a forward pass share: a base for each level at which operations are seen, their tensors, hooks."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class FunctionWatch(TorchFunctionMode, abc.ABC):
    """A context in which `run` is called in place of every PyTorch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    @abc.abstractmethod
    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, and note what matters."""


class DispatchWatch(TorchDispatchMode, abc.ABC):
    """A context in which `run` is called in place of every ATen operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch hides what it calls here from its compiler, for which it would load it: 0.7 s."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    @abc.abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute the operation, and note what matters."""


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among arguments, results or inputs, in their order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """A context after which these hooks are gone."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
