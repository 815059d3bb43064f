"""Squared norms of per-sample gradients, ‖∇_p (vᵀφₙ)‖² for every sample n and parameter p, without the gradients.

One forward pass is recorded: every operation that uses a measured parameter keeps its input and becomes a *tap*. One
backward pass to all taps then serves the whole batch, and each tap turns what arrives there, δ, into norms by a rule of
its own (`norm_rules`). A parameter that is used twice, or in an operation without a rule, gets the gradients of its own
tensor alone, sample by sample under `vmap`: slower, but still exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.batches import resized, spread
from spiritlevel.binding.coupling import check_independence, same_outputs
from spiritlevel.binding.parameters import Params, as_leaves
from spiritlevel.binding.problem import LARGE, Problem
from spiritlevel.errors import InputError, first_line
from spiritlevel.watching.convolution_norms import ConvolutionRule
from spiritlevel.watching.derivatives import VERY_LARGE, SampleGradient, known_gradient
from spiritlevel.watching.norm_rules import Norms, Stacking
from spiritlevel.watching.pullbacks import Own, pull_back
from spiritlevel.watching.structure import Structure, Watch, analyse, joined
from spiritlevel.watching.taps import Recorder
from spiritlevel.watching.tiles import Kernels, Tiles
from spiritlevel.watching.watchers import tensors_in

_FEWEST = 3  # samples that a rule is tried on: with fewer, tokens or channels could be taken for samples


class Recording:
    """One recorded forward pass: `outputs` (N, C) and, for any cotangents v (N, C), the squared gradient norms."""

    def __init__(
        self, outputs: Tensor, recorder: Recorder, slow: Callable[[Tensor], Norms] | None, kernels: Kernels
    ) -> None:
        self.outputs = outputs
        self.calls_model = slow is not None  # for the gradients of some parameters
        self._rules = [tap.rule for tap in recorder.taps]
        self._taps = [tap.edge for tap in recorder.taps]
        self._slow, self._kernels = slow, kernels
        self._tiles = {  # by position
            position: rule.tiled(kernels)
            for position, (rule, _, leaf) in enumerate(recorder.taps)
            if isinstance(rule, ConvolutionRule) and rule.tiled is not None and leaf is None
        }

    def squared_norms(self, vectors: Sequence[Tensor], *, last: bool = False) -> list[Norms]:
        """‖∇_p (vᵀφₙ)‖² of every sample and parameter, float64, for each v of `vectors`; `last` frees the recording.

        The vectors are of order 1. Entries below the square of the machine epsilon are dropped: they add nothing, but
        as denormal numbers would slow the pass down severalfold.
        """
        vectors = [vector.to(self.outputs) for vector in vectors]
        least = torch.finfo(self.outputs.dtype).eps ** 2
        vectors = [vector.masked_fill(vector.abs() < least, 0.0) for vector in vectors]
        results: list[Norms] = [{} if self._slow is None else self._slow(vector) for vector in vectors]
        if not self._taps or not self.outputs.requires_grad or not vectors:
            return results
        if self._kernels.usable and any(tiles.worthwhile(len(vectors)) for tiles in self._tiles.values()):
            try:
                found = self._together(torch.stack(vectors))
            except (RuntimeError, TypeError, AttributeError):  # a node that autograd alone can call
                self._kernels.usable = False
            else:
                return [{**slow, **norms} for slow, norms in zip(results, found, strict=True)]
        self._one_by_one(vectors, results, last)
        return results

    def _one_by_one(self, vectors: Sequence[Tensor], results: list[Norms], last: bool) -> None:
        waiting: dict[int, list[Tensor]] = {}
        for index, (vector, norms) in enumerate(zip(vectors, results, strict=True)):
            keep = not (last and index == len(vectors) - 1)
            cotangents: Sequence[Tensor | None] = torch.autograd.grad(
                self.outputs, self._taps, vector, retain_graph=keep, allow_unused=True
            )
            with torch.no_grad():
                for position, delta in enumerate(cotangents):
                    rule = self._rules[position]
                    if delta is None:
                        continue
                    if isinstance(rule, Stacking) and rule.stacks and len(vectors) > 1:
                        waiting.setdefault(position, []).append(delta)
                    else:
                        norms.update(rule(delta))
        with torch.no_grad():
            for position, deltas in waiting.items():
                rule = self._rules[position]
                assert isinstance(rule, Stacking)
                _add(results[-len(deltas) :], rule.several(deltas))

    def _together(self, vectors: Tensor) -> list[Norms]:
        """All passes at once, the norms of a tap as soon as its cotangents are there; convolutions in tiles."""
        results: list[Norms] = [{} for _ in vectors]
        tiles = {position: each for position, each in self._tiles.items() if each.worthwhile(len(vectors))}

        def arrive(position: int, cotangents: Tensor) -> None:
            rule, deltas = self._rules[position], list(cotangents.unbind(0))
            if position in tiles and tiles[position].norms_pay:
                assert isinstance(rule, ConvolutionRule)
                _add(results, rule.bias_norms(deltas))
            elif isinstance(rule, Stacking):
                _add(results, rule.several(deltas))
            else:
                for norms, delta in zip(results, deltas, strict=True):
                    norms.update(rule(delta))

        def in_tiles(each: Tiles, node: Any) -> Own:
            def own(cotangents: Tensor, back: bool, owned: bool) -> Tensor | None:
                node._saved_input  # noqa: B018 (which autograd refuses to give if it was overwritten)
                found, table = each.through(cotangents, back, each.norms_pay, owned)
                if table is not None:
                    _add(results, [(each.name, table)])
                return found

            return own

        own = {self._taps[position].node: in_tiles(each, self._taps[position].node) for position, each in tiles.items()}
        pull_back(self.outputs, self._taps, vectors, arrive, own)
        return results


def _add(results: Sequence[Norms], found: Iterable[tuple[str, Tensor]]) -> None:
    """Give each pass its column of the squared norms (N, passes) of each parameter."""
    for name, table in found:
        for norms, column in zip(results, table.unbind(1), strict=True):
            norms[name] = column


def _weights(count: int, like: Tensor) -> list[Tensor]:
    """Two weights for every sample, from 1 to 2, whose ratio distinguishes one sample from another."""
    pair = torch.rand(2, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    return list(pair.to(like))


def _tolerance(tensor: Tensor) -> float:
    return 1e-8 if tensor.dtype == torch.float64 else 1e-3


def few_of(problem: Problem, inputs: Any) -> Tensor:
    """Which of these samples everything is tried on: some from all over them, three for a large network."""
    count = _samples(inputs)
    return spread(count) if problem.size <= LARGE else torch.linspace(0, count - 1, min(_FEWEST, count)).round().long()


def analyse_few(problem: Problem, inputs: Any) -> Structure:
    """The degrees as these samples show them, only two for a large network: every batch is watched as well.

    One sample is taken twice, since a batch of one may be special.
    """
    count = max(2, _samples(inputs) if problem.size <= LARGE else 2)
    return analyse(problem, resized(inputs, count), count)


class GradientNorms:
    """Records forward passes of a problem; knows which parameters have a rule and which need their own gradients.

    Made once for a data set from a few of its samples, inside `problem.active()`. It checks that the outputs of one
    sample do not depend on another (otherwise per-sample gradients do not exist), and every rule against autograd on
    each of these samples: a parameter whose rule does not fit the way it is used falls back to its own gradients. All
    of this is repeated for a batch with inputs of another shape, or on which the model calls different functions, and
    for every batch whose numbers decide which rows go where. `structure` is that of the last batch as it was executed.
    """

    def __init__(
        self, problem: Problem, inputs: Any, structure: Structure, passes: int, outputs: Tensor | None = None
    ) -> None:
        self.problem, self.passes = problem, passes
        self.without_rule: set[str] = set()
        self.copies = False  # whether operations in place get copies of the taps
        self.pooled: set[str] = set()
        self.kernels = Kernels()
        self._path: list[tuple[str, ...]] = []
        self._learn(inputs, structure, outputs)

    def _learn(self, inputs: Any, structure: Structure, outputs: Tensor | None = None) -> None:
        """Find out on these samples what can be done by rules, and keep what they looked like.

        Rules belong to the code: a model that differs only in the values of its parameters inherits them, unless
        numbers decide which rows go where.
        """
        self._shapes, self._known = _shapes(inputs), _samples(inputs)
        self.structure = self._learned = structure
        uses = tuple(structure.uses.get(name, 2) for name in self.problem.params)
        fact = ("rules of norms", self.passes, str(self._shapes), self._known, tuple(self.problem.params), uses)
        if fact not in self.problem.facts or structure.by_data:
            self._try_rules(inputs, outputs)
            self.problem.facts[fact] = frozenset(self.without_rule), self.copies, frozenset(self.pooled), self._path
        without_rule, self.copies, pooled, self._path = self.problem.facts[fact]
        self.without_rule, self.pooled = set(without_rule), set(pooled)

    def _try_rules(self, inputs: Any, plain: Tensor | None) -> None:
        """`plain` are the outputs for these samples, where they are known."""
        if self._known < _FEWEST or (self.problem.size > LARGE and self._known > _FEWEST):
            inputs, plain = resized(inputs, torch.linspace(0, self._known - 1, _FEWEST).round().long()), None
        self.without_rule = {name for name in self.problem.params if self.structure.uses.get(name, 2) > 1}
        self.copies, self.pooled = False, set()
        try:
            if plain is None:
                with torch.no_grad():
                    plain = self.problem.outputs(self.problem.params, inputs)
            check_independence(self.problem, inputs, plain)
            self._find_rules(inputs, plain)
        except RuntimeError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"autograd cannot differentiate the model {type(self.problem.model).__name__}: {first_line(error)}; "
                "fix that, or use method='hutchinson'."
            ) from error

    def _find_rules(self, inputs: Any, plain: Tensor) -> None:
        try:
            outputs, recorder = self._forward(inputs, keeps=True)
            self.copies = any(value._version != version for value, version in recorder.kept)
        except RuntimeError:  # autograd refuses to work in place on a leaf
            self.copies = True
        if self.copies:
            _, recorder = self._forward(inputs)
        elif not _has_forward_hooks(self.problem.model):  # a hook would see the promise of an output
            self.pooled = recorder.poolable
        recorded = None if self.copies or self.pooled or recorder.without_rule else (outputs, recorder)
        self.without_rule |= recorder.without_rule
        misfits, self._path = self._misfits(inputs, plain, recorded)
        if misfits:
            self.pooled = set()
            self.without_rule |= self._misfits(inputs, plain)[0]
            self._path = self._forward(inputs)[1].path

    def _misfits(
        self, inputs: Any, plain: Tensor, recorded: tuple[Tensor, Recorder] | None = None
    ) -> tuple[set[str], list[tuple[str, ...]]]:
        """The parameters whose rule disagrees with autograd on one of the samples; and the functions that were called.

        `plain` are the outputs as the model gives them, without any rule. The rules take all samples at once, each
        with a weight of its own, so that a sample in another's row shows; and do so twice, because the norms of several
        backward passes may be taken together.
        """
        outputs, recorder = recorded or self._forward(inputs)
        if not same_outputs(outputs, plain):  # something read a value that is not there, or no longer what it was
            self.pooled, self.copies = set(), True
            outputs, recorder = self._forward(inputs)
        count, params = len(plain), self.problem.params
        known, where = self._known_row(inputs, plain)
        base = torch.linspace(1, 2, plain[0].numel()).view_as(plain[0]) if known is None else known.weights
        base = base.to(plain)
        both = _weights(count, plain)
        vectors = [each.view(-1, *[1] * base.ndim) * base for each in both]
        found = Recording(outputs, recorder, None, self.kernels).squared_norms(vectors)
        rows, nothing = spread(count), plain.new_zeros(count)
        if known is not None:
            rows = torch.tensor([where])
            expected = torch.stack([known.squares[name] for name in params])[:, None]
        else:
            if self.problem.size > LARGE:
                rows = rows[[-1] if self.problem.size > VERY_LARGE else [0, -1]].unique()
            expected = self._by_autograd(inputs, plain, rows.tolist(), base)
        misfits = {name for name in params if any(len(result.get(name, nothing)) != count for result in found)}
        if len(misfits) == len(params):
            return misfits - self.without_rule, recorder.path
        # all numbers in one table, so that an accelerator is asked once
        columns = [[nothing if name in misfits else result.get(name, nothing) for name in params] for result in found]
        table = torch.stack([torch.stack([column.double() for column in each]) for each in columns])
        squares, tolerance = torch.stack([each.double().square() for each in both]), _tolerance(plain)
        ratio = squares[0] / squares[1]
        right = ((table[0] - ratio * table[1]).abs() <= tolerance * table[0]).all(1)  # whose row is it?
        rows = rows.to(plain.device)
        wanted = expected * squares[:, None, rows]
        right &= ((table[:, :, rows] - wanted).abs() <= tolerance * wanted).all(2).all(0)
        misfits |= {name for name, fits in zip(params, right.tolist(), strict=True) if not fits}
        return misfits - self.without_rule, recorder.path

    def _known_row(self, inputs: Any, plain: Tensor) -> tuple[SampleGradient | None, int]:
        """A gradient of one of these samples that need not be computed again, and the sample's row."""
        known = known_gradient(self.problem) if self.problem.size > VERY_LARGE else None
        if known is None or known.weights.shape != plain.shape[1:]:
            return None, 0
        for row in range(len(plain)):
            pairs = zip(tree_leaves(resized(inputs, torch.tensor([row]))), tree_leaves(known.inputs), strict=True)
            if all(torch.equal(a.to(b), b) if isinstance(b, Tensor) else True for a, b in pairs):
                return known, row
        return None, 0

    def _by_autograd(self, inputs: Any, plain: Tensor, rows: list[int], base: Tensor) -> Tensor:
        """The squared norms of the gradients of ⟨base, φₙ⟩ of some samples, (parameters, samples)."""
        params, together, found = as_leaves(self.problem.params), None, []
        for row in rows:
            outputs = None
            if self.problem.size > LARGE:  # a sample alone takes fewer backward passes than it does among others
                with contextlib.suppress(InputError, RuntimeError):  # but may be too few
                    outputs = self.problem.outputs(params, resized(inputs, torch.tensor([row])))[0]
            if outputs is None or not same_outputs(outputs, plain[row]):
                together = self.problem.outputs(params, inputs) if together is None else together
                outputs = together[row]
            gradients: Sequence[Tensor] = [plain.new_zeros(1)] * len(params)
            if outputs.requires_grad:
                gradients = torch.autograd.grad(
                    (outputs * base).sum(), list(params.values()), retain_graph=True, materialize_grads=True
                )
            found.append(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]))
        return torch.stack(found, 1)

    def _forward(self, inputs: Any, *, keeps: bool = False) -> tuple[Tensor, Recorder]:
        params = self.problem.params
        names = {id(tensor): name for name, tensor in params.items() if name not in self.without_rule}
        watch = Watch(params, inputs)
        recorder = Recorder(names, self.passes, self.copies, self.pooled, watch, keeps)
        try:
            with recorder, watch:
                outputs = self.problem.outputs(params, inputs)
        except RuntimeError:
            if not self.pooled:
                raise
            recorder.spoiled = True  # a scripted function was given the promise of an output
        recorder.rectified = None
        recorder.pending.clear()  # each holds the recorder, which would keep all its tensors until the next collection
        if recorder.spoiled:  # a first convolution has more readers than its pooling
            self.pooled = set()
            return self._forward(inputs)
        return outputs, recorder

    def record(self, inputs: Any) -> Recording:
        """Run the model on one batch."""
        count = _samples(inputs)
        chosen = few_of(self.problem, inputs)
        if _shapes(inputs) != self._shapes or self._known < len(chosen):
            few = resized(inputs, chosen)
            self._learn(few, analyse_few(self.problem, few))
        outputs, recorder = self._forward(inputs)
        # the model may look at more than the shapes: at the number of samples, or at the numbers themselves
        if recorder.path != self._path or recorder.watch.by_data:
            self._learn(inputs, analyse(self.problem, inputs, count))
            outputs, recorder = self._forward(inputs)
        self.structure = joined(self._learned, recorder.watch.structure(outputs, count))
        slow = None
        if self.without_rule:
            params = {name: self.problem.params[name] for name in self.without_rule}

            def slow(vectors: Tensor) -> Norms:
                return _sample_by_sample(self.problem, params, inputs, vectors)

        return Recording(outputs, recorder, slow, self.kernels)


def _has_forward_hooks(model: nn.Module) -> bool:
    everywhere = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
    return bool(everywhere) or any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _samples(inputs: Any) -> int:
    return len(tensors_in(inputs)[0])


def _shapes(inputs: Any) -> list[Any]:
    """All that is known about a batch before the model sees it, except the number of its samples."""
    return [leaf.shape[1:] if isinstance(leaf, Tensor) else str(leaf) for leaf in tree_leaves(inputs)]


def _sample_by_sample(problem: Problem, params: Params, inputs: Any, vectors: Tensor) -> Norms:
    """Norms from the gradients of these parameters themselves, each sample by itself, under `vmap`."""
    leaves = tensors_in(inputs)

    def one(vector: Tensor, *sample: Tensor) -> Norms:
        rest = iter(sample)
        single = tree_map(lambda leaf: next(rest).unsqueeze(0) if isinstance(leaf, Tensor) else leaf, inputs)

        def forward(chosen: Params) -> Tensor:
            return problem.outputs({**problem.params, **chosen}, single).squeeze(0)

        gradients = vjp(forward, params)[1](vector)[0]
        return {name: torch.linalg.vector_norm(gradient, dtype=torch.float64) for name, gradient in gradients.items()}

    size = sum(tensor.numel() for tensor in params.values())
    chunk = max(1, 2**26 // max(size, 1))
    try:
        norms = vmap(one, chunk_size=chunk)(vectors, *leaves)
    except RuntimeError:  # an operation without a batching rule: one sample at a time
        each = [one(vectors[n], *(leaf[n] for leaf in leaves)) for n in range(len(vectors))]
        norms = {name: torch.stack([norm[name] for norm in each]) for name in params}
    return {name: norm.detach().square() for name, norm in norms.items()}
