"""Large embeddings by the rows that some inputs look up.

The table of a language model has 50,000 rows, of which a sequence reads a few hundred, and its last layer as many, of
which a quick look takes a few. The others have no derivative there. Without them a copy in float64 takes a tenth of the
memory, and a step in all parameters a tenth of the time. A table that is read in any other way keeps all of its rows.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spiritlevel.binding.last_layer import LINEAR
from spiritlevel.binding.problem import Problem

LARGE_TABLE = 2**20  # numbers
_HARMLESS = {Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]


def few_rows(problem: Problem, inputs: Any) -> Problem:
    """The same problem with the rows of large tables that these inputs read; one forward pass without derivatives.

    For a look at it inside `active()`, with these inputs. Derivatives are those of the whole problem, in fewer
    parameters. Facts are shared.
    """
    large = [name for name, tensor in problem.params.items() if tensor.ndim == 2 and tensor.numel() >= LARGE_TABLE]
    if not large:
        return problem
    last = problem.facts["head"] if problem.words is not None else 0
    tables = {problem.params[name]: list[Tensor]() for name in large}
    if problem.words is not None and (name := problem.facts["head names"][0]) in large:
        tables[problem.params[name]].append(problem.words)
    watched = problem.with_rows({})
    watched.around = lambda _: _Reading(tables, last)
    try:
        with torch.no_grad():
            watched.outputs(problem.params, inputs)
    except Exception:  # a model that does not run says so elsewhere
        return problem
    read = {name: tables[problem.params[name]] for name in large if tables.get(problem.params[name])}
    rows = {name: torch.cat(found).unique() for name, found in read.items()}
    rows = {name: found for name, found in rows.items() if 2 * len(found) < len(problem.params[name])}
    twin = problem.with_rows(rows)
    twin.around = lambda params: _ByRow({params[name]: found for name, found in rows.items()}, last)
    return twin if rows else problem


class _Tables(TorchFunctionMode, abc.ABC):
    """Sees a forward pass read its tables, and what else it does with them; the last layer's call is left as it is."""

    def __init__(self, tables: dict[Tensor, Any], last: int) -> None:
        super().__init__()
        self.tables, self.last, self.calls = tables, last, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls += func in LINEAR
        if func is F.embedding:
            return self.look_up(*args, **kwargs)
        if func not in _HARMLESS and not (func in LINEAR and self.calls == self.last):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf in self.tables:
                    self.otherwise(leaf)
        return func(*args, **kwargs)

    @abc.abstractmethod
    def look_up(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any) -> Tensor:
        """The rows of a table."""

    @abc.abstractmethod
    def otherwise(self, table: Tensor) -> None:
        """Some other use of it."""


class _Reading(_Tables):
    """Notes which rows are read; a table that is read otherwise is dropped."""

    def look_up(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any) -> Tensor:
        if weight in self.tables:
            self.tables[weight].append(input.detach().reshape(-1).long())
        return F.embedding(input, weight, padding_idx, *rest, **more)

    def otherwise(self, table: Tensor) -> None:
        del self.tables[table]


class _ByRow(_Tables):
    """Reads tables that hold only some of their rows."""

    def look_up(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any) -> Tensor:
        if weight not in self.tables:
            return F.embedding(input, weight, padding_idx, *rest, **more)
        rows = self.tables[weight]
        places = torch.searchsorted(rows, input.long()).clamp(max=len(rows) - 1)
        if not torch.equal(rows[places], input.long()):
            raise RuntimeError("other rows of a table were read before")
        held = None if padding_idx is None else (rows == padding_idx).nonzero()[:, 0].tolist()
        return F.embedding(places, weight, held[0] if held else None, *rest, **more)

    def otherwise(self, table: Tensor) -> None:
        raise RuntimeError("a table was not read in this way before")
