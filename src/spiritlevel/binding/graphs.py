"""Graphs as batches: what all samples of a batch share, and the rows of the outputs that belong to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spiritlevel.errors import InputError


class Rows(NamedTuple):
    """The inputs of samples that are nodes of one graph, or graphs of one batch.

    The model sees all of `graph`, whichever samples are asked for; `rows` are their places among its outputs.
    """

    rows: Tensor
    graph: Shared


class Shared:
    """A graph, or parts of it, as the arguments of a model; one leaf, which no slice of a batch cuts."""

    def __init__(self, graph: Any, names: Sequence[str]) -> None:
        self.graph, self.names = graph, tuple(names)
        self._tensors = {name: value for name, value in _stored(graph).items() if isinstance(value, Tensor)}

    def arguments(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """What the model is called with, copied: the named parts, or the graph itself if none are named."""
        placed = {
            name: value.detach().to(device, dtype if value.is_floating_point() else None).clone()
            for name, value in self._tensors.items()
            if name in self.names or not self.names
        }
        if self.names:
            return tuple(placed.get(name, getattr(self.graph, name)) for name in self.names)
        graph = copy.copy(self.graph)
        for name, value in placed.items():
            setattr(graph, name, value)
        return (graph,)

    def mark(self) -> str:
        """What distinguishes it from another one."""
        return ", ".join(f"{name} {float(value.cpu().double().sum())}" for name, value in self._tensors.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shared) or self._tensors.keys() != other._tensors.keys():
            return False
        return all(torch.equal(value, other._tensors[name]) for name, value in self._tensors.items())

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return ", ".join(f"{name}={tuple(value.shape)}" for name, value in self._tensors.items())


def is_graph(thing: Any) -> bool:
    """Whether this is a graph in the form of PyTorch Geometric: nodes, edges and targets as attributes.

    >>> from types import SimpleNamespace
    >>> is_graph(SimpleNamespace(x=0, edge_index=1, y=2)), is_graph((0, 1))
    (True, False)
    """
    if isinstance(thing, Tensor | tuple | list | dict):
        return False
    return any(hasattr(thing, name) for name in ("edge_types", "edge_index", "adj_t"))


def parts_of(graph: Any) -> list[str]:
    """The names of what a graph holds."""
    return sorted(_stored(graph))


def rows_of(graph: Any, count: int, mask: str) -> tuple[Tensor, str]:
    """Which of `count` targets are samples, and a note on it: those of a mask, or the seeds of a neighbourhood."""
    chosen = mask or ("train_mask" if isinstance(getattr(graph, "train_mask", None), Tensor) else "")
    if chosen:
        found = getattr(graph, chosen, None)
        if not isinstance(found, Tensor) or found.shape != (count,):
            shape = f"it has shape {tuple(found.shape)}" if isinstance(found, Tensor) else "there is none"
            raise InputError(
                f"the mask {chosen!r} must say for each of the {count} targets whether it is a sample, but {shape}; "
                f"the graph has {', '.join(parts_of(graph))}."
            )
        rows = found.nonzero()[:, 0] if found.dtype == torch.bool else found.long()
        return rows, "" if mask else f"the samples are the {len(rows)} nodes of train_mask; target='y[…]' names another"
    seeds = getattr(graph, "batch_size", None)
    if isinstance(seeds, int) and hasattr(graph, "input_id") and seeds < count:
        return torch.arange(seeds), "the samples are the seeds of each neighbourhood"
    return torch.arange(count), ""


def _stored(graph: Any) -> dict[str, Any]:
    """What a graph holds, by name: PyTorch Geometric says so, for other objects it is their attributes."""
    to_dict = getattr(graph, "to_dict", None)
    return dict(to_dict()) if callable(to_dict) else dict(vars(graph))
