"""One forward pass, tapped at every operation that uses a measured parameter, by the rule of its norms.

Max pooling is moved before a ReLU, and a first convolution is taken together with the max pooling that follows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.parameters import depth
from spiritlevel.watching.convolution_norms import Cell, ConvolutionRule, cell_of
from spiritlevel.watching.norm_rules import Names, Rule
from spiritlevel.watching.operations import called, is_in_place
from spiritlevel.watching.structure import Watch
from spiritlevel.watching.watchers import FunctionWatch, tensors_in


class _Pending(NamedTuple):
    """A convolution that is deferred, since a max pooling is expected to be its only reader."""

    rule: ConvolutionRule
    call: Callable[[], Tensor]
    operands: tuple[Tensor, Tensor, Tensor | None]
    rectified: bool = False


class _Rectified(NamedTuple):
    """What went into a ReLU and what came out, each with its version, which a write in place raises."""

    input: Tensor
    input_version: int
    output: Tensor
    output_version: int

    def untouched(self) -> bool:
        return self.input._version == self.input_version and self.output._version == self.output_version


class Tap(NamedTuple):
    """Where cotangents are taken: the `edge` of autograd's graph below a value, which itself need not be kept."""

    rule: Rule
    edge: GradientEdge
    leaf: Tensor | None
    """The value, if nothing below it is differentiated."""


class Recorder(FunctionWatch):
    """Taps every operation that uses one of the named parameters.

    `pooled` names the kernels of first convolutions that a max pooling was seen to read. Their call returns a promise;
    the pooling turns it into a `PooledConvolution`, any other operation makes it real. If both happen, the recording
    is `spoiled`, since the two taps then share a kernel.
    """

    def __init__(self, names: Names, passes: int, copies: bool, pooled: set[str], watch: Watch, keeps: bool) -> None:
        super().__init__()
        self.names, self.passes, self.copies, self.pooled, self.watch = names, passes, copies, pooled, watch
        self.keeps, self.kept = keeps, list[tuple[Tensor, int]]()  # the values at taps and their versions, if wanted
        self.taps: list[Tap] = []
        self.path: list[tuple[str, ...]] = []  # every function that was called, and the named parameters it was given
        self.without_rule: set[str] = set()
        self.rectified: _Rectified | None = None  # the last one: its input is not kept for longer
        self.poolable: set[str] = set()  # kernels of first convolutions whose output went into a pooling
        self.pending: dict[int, _Pending] = {}
        self.promises: list[Tensor] = []  # kept, so that no other tensor gets the id of one
        self.made: dict[str, Tensor | None] = {}  # by kernel: the output, None for a pooled one
        self.spoiled = False
        self.level = depth()

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met = [self.names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.names]
        self.path.append((getattr(func, "__name__", ""), *met))
        if depth() != self.level:  # inside a `vmap` or `grad` of the model's own, where rows are not samples
            self.without_rule.update(met)
            args, kwargs = tree_map(self._made, (args, kwargs))
            return func(*args, **kwargs)
        if self.pending:
            first = self.pending.get(id(args[0])) if args else None
            if first is not None and _is_relu(func) and not kwargs.get("inplace"):
                return self._promise(first._replace(rectified=True))
            if first is not None and func is F.max_pool2d and (cell := cell_of(*args[1:], **kwargs)):
                return self._pooled(first, cell)
            args, kwargs = tree_map(self._made, (args, kwargs))
        if func is F.max_pool2d and args and not self.copies:
            before = self.rectified
            if before is not None and before.output is args[0] and before.untouched():
                # max pooling commutes with ReLU, and the backward pass through ReLU is cheaper on the pooled values
                return torch.relu(self._pool(before.input, *args[1:], **kwargs))
            return self._pool(*args, **kwargs)
        if func is torch.conv2d and self.pooled and (promise := self._postponed(func, args, kwargs)) is not None:
            return promise
        result = func(*args, **kwargs)
        if _is_relu(func) and args and result is not args[0]:
            self.rectified = _Rectified(args[0], args[0]._version, result, result._version)
            return result
        if not met or not tensors_in(result):  # only a shape, a flag or a device
            return result
        rule = self._rule(func, args, kwargs) if isinstance(result, Tensor) else None
        if rule is None:
            self.without_rule.update(met)
            return result
        return self._tap(rule, result)

    def _rule(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
        builder = None if is_in_place(func) else called(func).norm
        # a TypeError: called in a form that the rule does not know, such as add(..., alpha=)
        with contextlib.suppress(TypeError), torch.no_grad(), self.watch.pause():
            return builder(self.names, self.passes, *args, **kwargs) if builder else None
        return None

    def _tap(self, rule: Rule, result: Tensor) -> Tensor:
        if not result.requires_grad:
            result = result.detach().requires_grad_()
        self.taps.append(Tap(rule, get_gradient_edge(result), result if result.is_leaf else None))
        if self.keeps:
            self.kept.append((result, result._version))
        return result.clone() if self.copies else result

    def _pool(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        for rule, _, leaf in self.taps:
            if leaf is input and isinstance(rule, ConvolutionRule) and rule.pooled is not None:
                self.poolable.add(rule.name)
        return F.max_pool2d(input, *args, **kwargs)

    def _postponed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A promise in place of the output, if this is the convolution of a kernel in `pooled`."""
        rule = self._rule(func, args, kwargs)
        if not isinstance(rule, ConvolutionRule) or rule.name not in self.pooled or rule.pooled is None:
            return None
        operands = _operands(*args, **kwargs)
        return self._promise(_Pending(rule, lambda: self._tap(rule, func(*args, **kwargs)), operands))

    def _promise(self, pending: _Pending) -> Tensor:
        self.promises.append(torch.empty(0))
        self.pending[id(self.promises[-1])] = pending
        return self.promises[-1]

    def _made(self, leaf: Any) -> Any:
        """What was promised, if this is a promise."""
        pending = self.pending.get(id(leaf))
        if pending is None:
            return leaf
        name = pending.rule.name
        result = self.made.get(name)
        if result is None:
            self.spoiled |= name in self.made
            result = self.made[name] = pending.call()
        return torch.relu(result) if pending.rectified else result

    def _pooled(self, pending: _Pending, cell: Cell) -> Tensor:
        assert pending.rule.pooled is not None
        self.spoiled |= pending.rule.name in self.made
        self.made[pending.rule.name] = None
        with torch.no_grad(), self.watch.pause():
            rule = pending.rule.pooled(cell)
        self.watch.multiplied(rule.output, *pending.operands)
        pooled = self._tap(rule, rule.output)
        return torch.relu(pooled) if pending.rectified else pooled


def _is_relu(func: Any) -> bool:
    return called(func).name == "relu" and not is_in_place(func)


def _operands(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """For a convolution called with these arguments."""
    return input, weight, bias
