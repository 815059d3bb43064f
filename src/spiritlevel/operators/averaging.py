"""The mean over a data set of a matrix that is known by its products with each batch.

A batch's product is traced once to a list of operations and cut in two: what follows from the parameters and the data
alone, and what follows from the vector. The first part is kept for as many batches as fit the memory budget
(*replayed*) and computed again for the others (*recomputed*); both give the same bits. Where tracing fails, the
product is differentiated afresh each time; where the model has no forward derivatives, by reverse mode alone.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spiritlevel.binding.batches import Batches, Fingerprint, is_pair_of_tensors, sliced
from spiritlevel.binding.context import Context
from spiritlevel.binding.cores import at_a_time, batches_that_fit, even_size, side_by_side
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.losses import Head
from spiritlevel.binding.modules import memory_of
from spiritlevel.binding.parameters import nearby
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.operators.footprint import activation_bytes
from spiritlevel.operators.products import Product, hessian_product, in_reverse
from spiritlevel.operators.replay import Flat, Tape, Trace, Traced, checked_trace, try_to_trace
from spiritlevel.operators.symmetry import check_symmetry, random_pair, turned
from spiritlevel.watching.derivatives import check_derivatives

_OfVector = Callable[..., Sequence[Tensor]]
"""A vector in the parameters' shapes → a matrix times it, likewise."""
_BatchProduct = Callable[[Tensor], Sequence[Tensor]]
"""Vectors (k, P) → the matrix of the batch's summed loss times each, in the parameters' shapes (k, …)."""


class _Batch(NamedTuple):
    samples: int
    product: _BatchProduct
    calls_model: bool = False


_CACHE = 10 * 2**20  # bytes of the largest activation of a batch, and of that times vectors; more makes nothing faster
_FOOTPRINT = 8  # bytes that a product takes for each byte of activations
_VECTORS = 6  # of the parameters' size that a product takes: motions, slopes, sums in float64
_MOST_VECTORS = 128  # multiplied at once
_MOST_SHAPES = 16  # of batches that are traced
_FEW = 16  # samples on which a trace is tried,
_SMALL = 2**22  # unless the batch takes no more than this many bytes: then it is tried on all of them
_TENSOR = object()  # marks the place of a tensor among a batch's leaves


class MeanMatrix:
    """The mean over a data set of a matrix that is known by its products with each batch."""

    def __init__(
        self,
        product: Product,
        context: Context,
    ) -> None:
        self.problem, self.product = context.problem, product  # not the context itself, which keeps this
        with context.ranks.together():
            why = context.find_head()
        self.notes = (*context.notes, why) if why else context.notes
        problem, whole = self.problem, context.whole
        self.ranks, self.whole = context.ranks, whole
        self.params = list(problem.params.values())
        self.sizes, self.shapes = [p.numel() for p in self.params], [p.shape for p in self.params]
        with self.ranks.together():
            self.batches = context.batches.cut(context.batch_size)
            budget = context.budget()
            saved, largest_tensor = self.saved, _ = activation_bytes(context)
        self.at_a_time = at_a_time(problem.device)
        vector = sum(tensor.nbytes for tensor in self.params)
        spare = max(0, budget - _VECTORS * vector)  # besides the vectors that any product needs
        limit = max(1, spare // (2 * max(2, self.at_a_time) * _FOOTPRINT * saved))  # samples times vectors
        if context.batch_size is None and not whole:
            self.batches.size = self._batch_size(min(limit, _CACHE // largest_tensor))
        if self.batches.size is not None and not whole:
            self.batches.size = self.ranks.least(self.batches.size)
        with self.ranks.together():
            sizes, self.fingerprint = self._inspect()
        self.ranks.same((sizes, self.fingerprint), "their data or batches")
        self.held = [tensor for tensor in _held(self.batches) if not tensor.is_inference()]
        self.versions = [tensor._version for tensor in self.held]
        self.total, self.count, largest = sum(sizes), len(sizes), max(1, *sizes)
        most = spare // (_VECTORS * vector)
        self.chunk = max(1, min(_MOST_VECTORS, limit // largest, _CACHE // (largest_tensor * largest), most))
        self.budget, self.room = budget, spare // 2  # in all, and for what is kept between products
        self.kept: dict[int, Tape] = {}
        self.keeping, self.deciding = threading.Lock(), threading.Lock()
        self.traceable: bool | None = None  # not known yet
        self.traces: dict[Any, Trace | None] = {}  # by the shape of the batch; None: not to be traced
        self.others: dict[Any, Trace] = problem.facts.setdefault(("traces", product), {})  # of models with other values
        anyway = [*self.params, *problem.constants.values(), *_held(self.batches)]
        self.owned = {memory_of(tensor) for tensor in anyway}

    def _batch_size(self, most: int) -> int:
        """Samples to take at once: batches of one size if possible, so that one trace serves all; some per rank."""
        held = _held(self.batches)
        if not held:
            return max(1, most)
        samples, ranks = len(held[-1]), self.ranks.count
        most = max(1, min(most, -(-samples // ranks)))
        if most * ranks < samples:  # several per rank: as many for each core
            most = even_size(most, samples, ranks * self.at_a_time)
        equal = (size for size in range(most, most // 2, -1) if samples % size == 0)
        return next(equal, -(-samples // -(-samples // most)))

    @property
    def vectorised(self) -> bool | None:
        """Whether several vectors can be multiplied at once, by `vmap`; `None` if not known yet."""
        known: bool | None = self.problem.facts.get(("vectorised", self.product))
        return known

    @vectorised.setter
    def vectorised(self, known: bool) -> None:
        self.problem.facts["vectorised", self.product] = known

    def operator(self, multiply: Callable[[Tensor], Tensor] | None = None, *, weight_decay: float = 0.0) -> Operator:
        """This matrix, or another `multiply` of rows, plus weight_decay · I as an operator on columns."""
        if not weight_decay >= 0:
            raise InputError(f"weight_decay must be at least 0, got {weight_decay}.")
        multiply = multiply or self.multiply

        def matmat(block: Tensor) -> Tensor:
            rows = self.ranks.first(block.detach().T.contiguous())
            result = multiply(rows).to(block.dtype)
            return (result.add_(rows, alpha=weight_decay) if weight_decay else result).T

        problem = self.problem
        return Operator(
            matmat,
            problem.size,
            dtype=problem.dtype,
            device=problem.device,
            shapes={name: tensor.shape for name, tensor in problem.params.items()},
            notes=self.notes,
        )

    def multiply(self, rows: Tensor) -> Tensor:
        """The matrix times each row of (k, P)."""
        if len(rows) == self.count == self.ranks.count == 1 and (tape := self.kept.get(0)):
            self._check_versions()  # one vector and one batch: the sum of `moments` without its loops
            with torch.no_grad():
                parts = tape.multiply(*self._shaped(rows[0]))
                return torch.cat([part.reshape(-1) for part in parts]).mul_(1 / self.total)[None]
        return self.moments(rows, 1)[0]

    def moments(self, rows: Tensor, order: int) -> list[Tensor]:
        """The means over the batches, weighted by their sizes, of H_b v, H_b² v … up to `order`, for each row v.

        Sums over several batches are taken in float64.
        """
        dtype = torch.float64 if self.count > 1 else rows.dtype
        totals = [torch.zeros(rows.shape, dtype=dtype, device=rows.device) for _ in range(order)]
        sizes = self.sizes

        def begin(batch: _Batch) -> Callable[[], list[list[Tensor]]]:
            def powers() -> list[list[Tensor]]:
                found, vectors = list[list[Tensor]](), rows
                with torch.no_grad():
                    for power in range(order):
                        found.append([part.reshape(len(rows), -1) for part in batch.product(vectors)])
                        if power < order - 1:
                            vectors = torch.cat(found[-1], dim=1) / batch.samples
                return found

            if not batch.calls_model:
                return powers
            known = powers()
            return lambda: known

        def add(found: list[list[Tensor]]) -> None:
            for total, parts in zip(totals, found, strict=True):
                for piece, part in zip(total.split(sizes, dim=1), parts, strict=True):
                    piece.add_(part, alpha=1 / self.total)

        with self.ranks.together():
            batches = self._pass(rows)
            if self.count == 1:  # without the overhead of sharing, which a small network would notice
                for batch in batches:
                    add(begin(batch)())
            else:
                first = list(itertools.islice(batches, 1))  # after it, whether the product can be traced is known
                cores = batches_that_fit(self.at_a_time, rows.nbytes, self.budget // 4) if self.traceable else 1
                side_by_side(itertools.chain(first, batches), begin, add, cores)
        self.ranks.add(totals)
        return totals

    def _pass(self, rows: Tensor) -> Iterator[_Batch]:
        """Each batch of this rank; the data are read only if some are not kept.

        `rows` are what is multiplied first: a batch that has to be traced is traced along them.
        """
        mine = range(self.ranks.rank, self.count, self.ranks.count)
        if all(index in self.kept for index in mine):
            self._check_versions()
            yield from (self._replayed(self.kept[index]) for index in mine)
            return
        seen, fingerprint = 0, Fingerprint()
        for index, (inputs, targets) in enumerate(self.batches):
            seen += len(targets)
            fingerprint.update(inputs, targets)
            if self.ranks.takes(index):
                kept = self.kept.get(index)
                yield self._replayed(kept) if kept else self._batch(index, inputs, targets, rows)
        if seen != self.total or str(fingerprint) != self.fingerprint:
            raise InputError(
                f"the data changed between two passes ({self.total} samples, then {seen}); products need data that "
                "repeat: pass the unaugmented set, unshuffled."
            )

    def _check_versions(self) -> None:
        if [tensor._version for tensor in self.held] != self.versions:  # some have been written to
            raise InputError(
                "the data were written to in place after the operator was made; products need data that stay as they "
                "are: build a new operator for the new data."
            )

    def _inspect(self) -> tuple[list[int], str]:
        """Read and check all data once: the sizes of the batches, and a fingerprint."""
        sizes, total, fingerprint = list[int](), 0, Fingerprint()
        with self.problem.active(), torch.no_grad():
            for index, (inputs, targets) in enumerate(self.batches):
                fingerprint.update(inputs, targets)
                if self.ranks.takes(index):
                    placed = self.problem.place(inputs, targets)
                    outputs = self.problem.head_or_outputs(self.problem.params, placed[0])
                    self.problem.checked(outputs, *placed, start=total)
                    if not index and not self.whole:
                        self._check_independence(placed[0], outputs)
                    del outputs
                    if not index:
                        check_derivatives(self.problem, *placed, twice=self.product is hessian_product)
                sizes.append(len(targets))
                total += len(targets)
        return sizes, str(fingerprint)

    def _check_independence(self, inputs: Any, outputs: Tensor | Head) -> None:
        """Refuse a network whose output for a sample depends on the rest of the batch, unless batches are meant."""
        if outputs.shape[0] < 3:
            more, targets = self.problem.place(*self.batches.first(3, 3))
            if len(targets) > outputs.shape[0]:
                inputs, outputs = more, self.problem.head_or_outputs(self.problem.params, more)
        check_independence(self.problem, inputs, outputs)

    def _batch(self, index: int, inputs: Any, targets: Tensor, rows: Tensor) -> _Batch:
        """A batch: recomputed from a trace when it is multiplied, and kept if there is room; or differentiated."""
        flat, fixed, shape = self._flat(inputs, targets)
        constants, known = None, None
        if shape not in self.traces:
            traced = self._adopted(flat, fixed, shape, rows[0], inputs, targets)
            if traced is None and len(self.traces) < _MOST_SHAPES:
                traced = self._trace(flat, fixed, inputs, targets, rows)
            self.traces[shape], constants, known = traced or (None, None, None)
            if traced is not None and traced.trace.pure:
                self.others[shape] = traced.trace
        trace, samples = self.traces[shape], len(targets)
        if trace is None:
            return _Batch(samples, lambda vectors: self._differentiate(flat, fixed, vectors), calls_model=True)
        tape: Tape | None = None

        def product(vectors: Tensor) -> Sequence[Tensor]:
            nonlocal tape
            if tape is None:
                prepared = trace.prepare(*self.params, *fixed) if constants is None else constants
                tape = Tape(trace.multiply, prepared, samples)
                self._keep(index, tape)
            if vectors is rows and len(rows) == 1 and known is not None:
                return [part[None] for part in known]
            return self._for_each(tape.multiply, vectors)

        return _Batch(samples, product)

    def _replayed(self, tape: Tape) -> _Batch:
        return _Batch(tape.samples, lambda vectors: self._for_each(tape.multiply, vectors))

    def _keep(self, index: int, tape: Tape) -> None:
        size = tape.size(self.owned)
        with self.keeping:
            if size <= self.room:
                self.room -= size
                self.kept[index] = tape

    def _flat(self, inputs: Any, targets: Tensor) -> tuple[Flat, list[Tensor], tuple[Any, ...]]:
        """A batch's product as a function of tensors alone, the batch's own tensors, and what a trace depends on."""
        leaves, form = tree_flatten(self.problem.place(inputs, targets))
        fixed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        names = list(self.problem.params)

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            vector, point = (dict(zip(names, tensors[start:], strict=False)) for start in (0, len(names)))
            data = iter(tensors[2 * len(names) :])
            x, y = tree_unflatten([next(data) if leaf is _TENSOR else leaf for leaf in rest], form)
            return tuple(self.product(self.problem, vector, point, x, y).values())

        return flat, fixed, (str(form), repr(rest), tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in fixed))

    def _adopted(
        self, flat: Flat, fixed: list[Tensor], shape: Any, row: Tensor, inputs: Any, targets: Tensor
    ) -> Traced | None:
        """The trace of a model that differs in the values of its parameters alone, if its product is this one's."""
        if shape not in self.others or self.problem.reverse_only:
            return None
        trace = self.others[shape]
        expected = self._in_reverse(row, inputs, targets)
        if expected is None:
            (expected,) = zip(*self._differentiate(flat, fixed, row[None]), strict=True)
        with torch.no_grad():
            constants = tuple(trace.prepare(*self.params, *fixed))
            product = trace.multiply(*self._shaped(row), *constants)
        error = math.hypot(*(float((a - b).norm()) for a, b in zip(product, expected, strict=True)))
        scale = math.hypot(*(float(part.norm()) for part in expected))
        if not error <= math.sqrt(torch.finfo(row.dtype).eps) * scale:
            return None
        self.traceable = True
        return Traced(trace, constants, tuple(product))

    def _in_reverse(self, row: Tensor, inputs: Any, targets: Tensor) -> tuple[Tensor, ...] | None:
        """The product with a vector, to compare another with: by plain autograd, unless that cannot give it."""
        product, problem = in_reverse(self.product), self.problem
        if product is None or problem.facts.get("head"):  # large outputs are never multiplied out
            return None
        vector = dict(zip(problem.params, self._shaped(row), strict=True))
        try:
            with problem.active():
                return tuple(product(problem, vector, problem.params, *problem.place(inputs, targets)).values())
        except RuntimeError:  # a function of the user's own may have forward derivatives only
            return None

    def _trace(self, flat: Flat, fixed: list[Tensor], inputs: Any, targets: Tensor, rows: Tensor) -> Traced | None:
        """The trace of a batch's product, along the first row; `None` if there is none."""
        few = len(targets) if len(targets) <= 8 * _FEW or len(targets) * self.saved <= _SMALL else _FEW
        if self.traceable is None:
            tried = self._try(inputs, targets, few, together=len(rows) > 1)
            if few == len(targets):
                return tried
        if not self.traceable:
            return None
        with self.problem.active():
            return try_to_trace(flat, self._shaped(rows[0]), self.params, fixed)

    def _try(self, inputs: Any, targets: Tensor, few: int, together: bool) -> Traced | None:
        """Find out on a few samples, along random vectors, whether the product is symmetric and can be traced.

        Also, if asked, whether it can be taken for several vectors `together`.
        """
        these = targets[:few]
        counted = self.problem.at_few_positions(these)
        flat, fixed, _ = self._flat(sliced(inputs, 0, few), counted)
        pair = random_pair(self.problem)
        leaves = tree_leaves((inputs, targets))
        plain = all(isinstance(leaf, Tensor | bool | int | float | str | None) for leaf in leaves)
        traced = None
        if plain and not self.problem.reverse_only:
            with self.problem.active():
                traced = checked_trace(flat, self._shaped(pair[0]), self.params, fixed)
        self.traceable = traced is not None
        known: list[Tensor] = []
        if traced is None:
            function: _OfVector = lambda *vector: flat(*vector, *self.params, *fixed)  # noqa: E731
        else:
            function = Tape(traced.trace.multiply, cast(tuple[Tensor, ...], traced.constants), few).multiply
            known.extend(traced.product or ())
            # along a vector that was not asked for, and perhaps of other targets
            traced = traced._replace(product=None, constants=traced.constants if counted is these else None)
        turned(pair)
        with self.problem.active() if traced is None else torch.no_grad():
            products = self._each(function, pair, known, together=together)
        del function

        def elsewhere() -> Iterator[Tensor]:
            for params in nearby(self.problem.params):
                yield _rows(self._differentiate(flat, fixed, pair, list(params.values())))

        check_symmetry(pair, products, elsewhere, rounding=self.problem.rounding)
        return traced

    def _each(self, function: _OfVector, rows: Tensor, known: list[Tensor], *, together: bool = True) -> Tensor:
        """The products with some vectors (k, P) one by one; if asked, finds out whether `vmap` gives the same.

        If the first is `known`, it is moved, as such vectors may be large. Not every rule of `vmap` can be trusted.
        """
        each = torch.empty_like(rows)
        for index, row in enumerate(rows.split(1)):
            parts = known or self._in_chunks(function, row, 1)
            torch.cat([part.detach().reshape(-1) for part in parts], out=each[index])
            known.clear()
        if together:
            try:
                found = _rows(self._in_chunks(function, rows, len(rows)))
            except Exception:  # not every operation can be vectorised; if it fails alone too, that says why
                self.vectorised = False
            else:
                error, scale = float((found - each).norm()), float(each.norm())
                self.vectorised = error <= math.sqrt(torch.finfo(rows.dtype).eps) * scale
        return each

    def _shaped(self, row: Tensor) -> list[Tensor]:
        """A vector cut into the parameters' shapes."""
        return list(map(_in_shape, torch.split_with_sizes(row, self.sizes), self.shapes))

    def _differentiate(
        self, flat: Flat, fixed: list[Tensor], vectors: Tensor, params: list[Tensor] | None = None
    ) -> Sequence[Tensor]:
        point = self.params if params is None else params
        with self.problem.active():
            results = self._for_each(lambda *vector: flat(*vector, *point, *fixed), vectors)
        return [result.detach() for result in results]  # a loss may hold parameters of its own

    def _for_each(self, function: _OfVector, rows: Tensor) -> Sequence[Tensor]:
        """`function`, of a vector in the parameters' shapes, applied to each row of (k, P), several at once."""
        if len(rows) > 1 and self.chunk > 1:
            with self.deciding:
                if self.vectorised is None:
                    self._each(function, turned(random_pair(self.problem)), [])
            if self.vectorised:
                try:
                    return self._in_chunks(function, rows, self.chunk)
                except Exception:  # as above, for other shapes
                    self.vectorised = False
        return self._in_chunks(function, rows, 1)

    def _in_chunks(self, function: _OfVector, rows: Tensor, chunk: int) -> Sequence[Tensor]:
        results: list[Sequence[Tensor]] = []
        for some in rows.split(chunk):
            pieces = zip(some.split(self.sizes, dim=1), self.shapes, strict=True)
            parts = [_in_shape(piece, (len(some), *shape)) for piece, shape in pieces]
            if len(some) == 1:
                results.append([result[None] for result in function(*(part[0] for part in parts))])
            else:
                results.append(vmap(function)(*parts))
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*results, strict=True)]


def _in_shape(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """A part of a vector in a parameter's shape; pairs of numbers as a copy, since a model may read them as complex.

    `view_as_complex` needs them to begin at an even place in memory.
    """
    part = piece.reshape(shape)
    return part.clone(memory_format=torch.contiguous_format) if part.shape[-1:] == (2,) else part


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Some vectors in the parameters' shapes as the rows of one matrix."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


def _held(batches: Batches) -> list[Tensor]:
    """The tensors of data that lie in memory as one pair, the targets last."""
    return tree_leaves(batches.data) if is_pair_of_tensors(batches.data) else []
