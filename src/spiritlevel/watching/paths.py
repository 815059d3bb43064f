"""Sums over the paths of a network from its inputs to its outputs, followed while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.errors import InputError

_MOVED = frozenset(
    """
    expand expand_copy permute permute_copy transpose transpose_copy t t_copy squeeze squeeze_copy unsqueeze
    unsqueeze_copy slice select narrow split split_with_sizes chunk unbind cat stack index index_select roll flip repeat
    diagonal tril triu copy slice_scatter select_scatter im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d cumsum
    max amax maximum max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
    """.split()
)
"""Operations that copy, add or choose among values, so that they do the same with sums of paths."""
_RESHAPED = frozenset("view view_copy _unsafe_view reshape clone alias detach lift_fresh contiguous _to_copy".split())
_ACTIVATIONS = frozenset("relu abs neg leaky_relu _prelu_kernel threshold clamp clamp_min".split())
_MULTIPLIED = frozenset("mul mm bmm mv dot matmul linear".split())
_ADDED = frozenset("addmm addmv baddbmm".split())
_EMPTY = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
_AVERAGES = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


class Paths(TorchDispatchMode):
    """Σ_paths Π w² of every value that the inputs reach, while the network runs: one rule for each known operation.

    The squares of a path's weights multiply and those of paths that meet add up. A value that no input reaches is a
    weight where it multiplies, and a bias, which starts paths of its own, where it is added. Positively homogeneous
    activations pass paths on as they are. Every other operation is refused: a number for it would be a guess.
    """

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, Tensor | None] = {id(inputs): torch.ones_like(inputs, dtype=torch.float64)}
        self.kept: list[Any] = [inputs]  # alive, so that no id is given twice
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
        storage, new = target.untyped_storage(), self.squares(_as_tensor(source, target))

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        reached = [leaf for leaf in tree_leaves((args, kwargs)) if self.knows(leaf)]
        if not reached or name in _EMPTY:
            return result
        if name == "copy_":
            self._write(*args[:2])
            return result
        values, found = tree_leaves(result), None
        if all(self.known.get(id(leaf), leaf) is not None for leaf in reached):
            found = self._rule(name, func, args, kwargs, result)
        elif not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
            found = values  # indices, made from others
        if found is None:
            raise InputError(
                f"path_norm is defined for ReLU networks only: it has no rule for the operation '{name}' in the form "
                "that this network uses."
            )
        for value, squares in zip(values, tree_leaves(found), strict=True):
            # None for a choice that depends on the inputs, such as the places of a max pooling: nothing may use it
            self.known[id(value)] = squares if value.is_floating_point() else None
            self.kept.append(value)
        return result

    def _rule(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The sums of paths behind an operation, None where no rule is known."""
        squares = self.squares
        if name in _MOVED:
            constants = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not self.knows(leaf)]
            if name in ("max", "maximum") and any(bool(constant.any()) for constant in constants):
                return None  # a clip, not homogeneous
            if "index" not in name and not all(constant.is_floating_point() for constant in constants):
                return None
            return func(*tree_map(squares, args), **tree_map(squares, kwargs))
        if name in _RESHAPED:
            return squares(args[0]).reshape(result.shape).to(result.device) if result.is_floating_point() else None
        if name in _ACTIVATIONS:
            return squares(args[0]) if _is_homogeneous(name, args, kwargs) else None
        if name in ("add", "sub", "rsub"):
            first, second = (squares(_as_tensor(argument, result)) for argument in args[:2])
            alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1) ** 2
            return first * alpha + second if name == "rsub" else first + second * alpha
        if name == "sum":
            return func(squares(args[0]), *args[1:], **{**kwargs, "dtype": torch.float64})
        if name == "mean":
            averaged = args[0].numel() / max(1, result.numel())
            return func(squares(args[0]), *args[1:], **{**kwargs, "dtype": torch.float64}) / averaged
        if name == "constant_pad_nd":
            value = args[2] if len(args) > 2 else kwargs.get("value", 0)
            return func(squares(args[0]), args[1], value**2)
        if name in _MULTIPLIED | _ADDED | {"div", "convolution"}:
            return self._product(name, func, args, kwargs, result)
        if name in ("avg_pool2d", "avg_pool3d"):
            options = dict(zip(_AVERAGES, args[1:], strict=False)) | kwargs
            ones = torch.ones_like(squares(args[0]))
            divisor = func(ones, **{**options, "divisor_override": 1}) / func(ones, **options)
            return func(squares(args[0]), **options) / divisor
        if name in ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
            pooled = func(squares(args[0]), args[1])
            for dim in range(-len(args[1]), 0):
                size, cells = args[0].shape[dim], torch.arange(result.shape[dim], device=result.device)
                ends = -(-(cells + 1) * size // len(cells))
                widths = ends - cells * size // len(cells)
                pooled = pooled / widths.reshape(-1, *[1] * (-1 - dim))
            return pooled
        return None

    def _product(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Of a value with weights, plus a bias; a product of two values that the inputs reach has no paths."""
        factors = args[1:3] if name in _ADDED else args[:2]
        if all(self.knows(factor) for factor in factors) or kwargs.get("rounding_mode"):
            return None
        if name in ("mul", "div"):
            first, second = (self.squares(_as_tensor(argument, result)) for argument in args[:2])
            if name == "mul":
                return first * second
            return None if self.knows(args[1]) else first / second
        scales = {key: number**2 for key, number in kwargs.items()}  # alpha and beta
        return func(*(self.squares(argument) for argument in args), **scales)


def _as_tensor(argument: Any, like: Tensor) -> Tensor:
    """A number, or a tensor of integers, as a tensor of floats, so that it is squared like one."""
    if isinstance(argument, Tensor):
        return argument if argument.is_floating_point() else argument.double()
    return torch.tensor(float(argument), dtype=torch.float64, device=like.device)


def _is_homogeneous(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an activation f has f(cx) = c f(x) for c > 0, and no slope above 1."""
    options = [option for option in (*args[1:], *kwargs.values()) if option is not None]
    if name in ("leaky_relu", "_prelu_kernel"):
        return all(bool(torch.as_tensor(slope).abs().le(1).all()) for slope in options)
    one_bound = not name.startswith("clamp") or len(options) == 1
    return one_bound and all(isinstance(bound, int | float) and bound == 0 for bound in options)
