"""Sums over the paths of a network from its inputs to its outputs, followed while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.errors import InputError
from spiritlevel.watching.operations import aten_name, dispatched
from spiritlevel.watching.path_rules import as_tensor, unreached
from spiritlevel.watching.watchers import DispatchWatch


class Paths(DispatchWatch):
    """Σ_paths Π w² of every value that the inputs reach, while the network runs: one rule for each known operation.

    The squares of a path's weights multiply and those of paths that meet add up. A value that no input reaches is a
    weight where it multiplies, and a bias, which starts paths of its own, where it is added. Positively homogeneous
    activations pass paths on as they are. Every other operation is refused: any number for it would be a guess.
    """

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.known: dict[int, Tensor | None] = {id(inputs): torch.ones_like(inputs, dtype=torch.float64)}
        self.kept: list[Any] = [inputs]  # kept alive, so that no id is reused
        self.written: dict[int, Tensor] = {}  # the same for all the memory of a tensor that was written into

    def squares(self, value: Any) -> Any:
        """The sums of squared paths that end in these entries; other arguments as they are."""
        memory = self._memory(value)
        if memory is not None:
            return memory.clone()
        if id(value) in self.known:
            return self.known[id(value)]
        return value.double().square() if isinstance(value, Tensor) and value.is_floating_point() else value

    def knows(self, value: Any) -> bool:
        """Whether the inputs reach it."""
        return id(value) in self.known or self._memory(value) is not None

    def _memory(self, value: Any) -> Tensor | None:
        """The part of `written` that a tensor sees."""
        if not self.written or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        memory = self.written.get(value.untyped_storage().data_ptr())
        return None if memory is None else memory.as_strided(value.shape, value.stride(), value.storage_offset())

    def _write(self, target: Tensor, source: Tensor) -> None:
        """A tensor is written into, below what `functionalize` sees: all that shares its memory changes with it."""
        storage, new = target.untyped_storage(), self.squares(as_tensor(source, target))

        def seen_by(value: Tensor) -> Tensor:
            return self.written[storage.data_ptr()].as_strided(value.shape, value.stride(), value.storage_offset())

        if storage.data_ptr() not in self.written:
            everything = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)
            self.written[storage.data_ptr()] = everything.double().square()
            for value in self.kept:
                known = self.known.get(id(value))
                if known is not None and value.untyped_storage().data_ptr() == storage.data_ptr():
                    seen_by(value).copy_(known)
            self.kept.append(target)
        seen_by(target).copy_(new)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        rule = None if func._schema.is_mutable else dispatched(func).path
        reached = [leaf for leaf in tree_leaves((args, kwargs)) if self.knows(leaf)]
        if not reached or rule is unreached:
            return result
        if func is torch.ops.aten.copy_.default:
            self._write(*args[:2])
            return result
        values, found = tree_leaves(result), None
        if all(self.known.get(id(leaf), leaf) is not None for leaf in reached):
            found = rule(self, func, args, kwargs, result) if rule else None
        elif not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
            found = values  # indices, made from others
        if found is None:
            raise InputError(
                f"path_norm is defined for ReLU networks only: it has no rule for the operation '{aten_name(func)}' in "
                "the form that this network uses."
            )
        for value, squares in zip(values, tree_leaves(found), strict=True):
            # None for a choice that depends on the inputs, such as the places of a max pooling: nothing may use it
            self.known[id(value)] = squares if value.is_floating_point() else None
            self.kept.append(value)
        return result
