"""What the executed operations say about a network: in which degree does each output depend on each parameter?

The forward pass is watched down to its ATen operations and every value gets, for every parameter tensor, a degree 0, 1
or 'more'. Linear and piecewise linear operations keep the largest degree of their arguments, bilinear ones add degrees,
anything else makes 'more' of each parameter it touches. If no output has more than degree 1 in any one parameter
tensor, then ∂²φ/∂θᵢ² = 0 almost everywhere, every within-tensor block of the Hessian equals that of the Gauss-Newton
matrix, and Tr H = Tr GGN exactly (MATH 4.1). What cannot be traced, or is not known here, counts as 'more': the
analysis may miss an exact network, it never invents one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spiritlevel.functional import Params, Problem

MORE = 2

_LINEAR = frozenset(
    """
    add sub rsub neg sum mean cumsum clone alias copy lift lift_fresh lift_fresh_copy _to_copy
    view _unsafe_view _reshape_alias expand expand_copy permute transpose t squeeze unsqueeze
    view_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy as_strided slice select split
    split_with_sizes unbind stack cat index index_select gather take roll flip diagonal diag_embed tril triu
    repeat repeat_interleave constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d scatter scatter_add index_add index_put slice_scatter select_scatter
    masked_fill masked_scatter where trace im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d embedding
    _fft_r2c _fft_c2c _fft_c2r view_as_real view_as_complex
    relu leaky_relu threshold hardtanh clamp clamp_min clamp_max abs hardshrink softshrink hardsigmoid
    maximum minimum fmax fmin max min amax amin topk sort kthvalue median nanmedian max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d mkldnn_max_pool2d
    """.split()
)
_CONSTANT = frozenset(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    new_empty_strided
    """.split()
)  # they look at the shape and type of their argument only
_BILINEAR = frozenset("mul mm bmm mv dot vdot linear _prelu_kernel".split())
_ADDED_BILINEAR = frozenset("addmm baddbmm addbmm addmv addr".split())  # first argument + product of the next two
_CONVOLUTION = frozenset("convolution _convolution mkldnn_convolution".split())
_BATCH_NORM = frozenset(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm".split()
)
_NORMALISATION = {"native_layer_norm": (2, 3), "native_group_norm": (1, 2)}  # where weight and bias stand
SMOOTH = frozenset(
    """
    tanh sigmoid gelu silu softplus elu celu mish hardswish log_sigmoid_forward exp expm1 log1p sin cos erf pow atan
    mul div
    """.split()
)
"""Elementwise operations that curve: where only these stand in the way, Gauss-Newton part and remainder split well."""

Degrees = dict[str, int]


@dataclass(frozen=True)
class Structure:
    """Degrees of the outputs in every parameter tensor, and the operation that made the first 'more' of each.

    `uses` counts the operations that read a parameter; `floats_per_sample` is the size of all intermediate values
    that take memory of their own.
    """

    degrees: Degrees = field(default_factory=dict)
    obstacles: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    floats_per_sample: int = 0
    uses: dict[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether Tr H = Tr GGN is certain."""
        return not self.failure and all(degree <= 1 for degree in self.degrees.values())

    @property
    def smooth(self) -> bool:
        """Whether nothing but elementwise functions stands in the way of exactness."""
        return not self.failure and all(operation in SMOOTH for operation in self.obstacles.values())

    @property
    def reason(self) -> str:
        """One clause that names what is in the way of exactness; empty if nothing is."""
        if self.failure:
            return self.failure
        for name, degree in self.degrees.items():
            if degree > 1:
                operation = self.obstacles.get(name, "")
                return f"the operation '{operation}' makes the outputs more than linear in parameter '{name}'"
        return ""


def analyse(problem: Problem, inputs: Any, count: int) -> Structure:
    """Run one small batch of `count` samples inside `problem.active()` and read off the degrees.

    Cost: one forward pass of that batch, a few milliseconds.
    """
    watch = _Watch(problem.params, inputs)
    # what is written in place becomes an operation of its own
    forward = functionalize(problem.outputs)
    try:
        # name layer norm as such, not the operations it is rewritten to
        with torch.no_grad(), torch._C.DisableTorchFunction(), watch:
            outputs = forward(problem.params, inputs)
    except Exception as error:  # whatever stops the run, the network is simply not known to be exact
        reason = str(error).strip().split("\n", 1)[0][:200]
        return Structure(failure=f"the forward pass cannot be traced ({type(error).__name__}: {reason})")
    return watch.structure(outputs, count)


class _Watch(TorchDispatchMode):
    """Gives every value that an operation returns its degrees, and keeps it, so that it stays known by its id."""

    def __init__(self, params: Params, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters = {id(tensor): name for name, tensor in params.items()}
        self.known: dict[int, Degrees] = {id(leaf): {} for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
        self.known |= {id(tensor): {name: 1} for name, tensor in params.items()}
        self.kept: list[Tensor] = []  # alive, so that no id is given twice
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
        self.uses = dict.fromkeys(params, 0)
        self.obstacles: dict[str, str] = {}
        self.floats = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        met = [self.known[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.known]
        values = tree_leaves(result)
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        self.floats += sum(tensor.numel() for tensor in tensors if not self._is_view(tensor))
        if not met:
            return result  # constant
        if not all(isinstance(value, Tensor | None) for value in values):
            raise RuntimeError(
                f"the operation '{_name(func)}' makes a Python value of one that parameters or inputs decide"
            )
        for leaf in tree_leaves((args, kwargs)):
            name = self.parameters.get(id(leaf))
            if name:
                self.uses[name] += 1
        degrees = _degrees(func, args, met, self.known)
        before = _largest(*met)
        for value in values:
            if isinstance(value, Tensor) and id(value) not in self.parameters:
                self.known[id(value)] = {}  # integers and booleans are constant almost everywhere
                self.kept.append(value)
                if value.is_floating_point() or value.is_complex():
                    self.known[id(value)] = degrees
                    for name, degree in degrees.items():
                        if degree >= MORE > before.get(name, 0):
                            self.obstacles.setdefault(name, _name(func))
        return result

    def _is_view(self, value: Tensor) -> bool:
        """Whether it takes no memory of its own, such as a weight that is transposed for its product."""
        storage = value.untyped_storage().data_ptr()
        seen = storage in self.storages
        self.storages.add(storage)
        return seen

    def structure(self, outputs: Any, count: int) -> Structure:
        """What was seen, for the outputs that the watched run returned."""
        if id(outputs) not in self.known:
            return Structure(failure="the outputs do not depend on the traced operations")
        degrees = {name: self.known[id(outputs)].get(name, 0) for name in self.uses}
        hit = {name: operation for name, operation in self.obstacles.items() if degrees[name] >= MORE}
        return Structure(degrees, hit, "", self.floats // max(count, 1), self.uses)


def _name(func: Callable[..., Any]) -> str:
    packet = getattr(func, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(func, "__name__", func)))


def _largest(*several: Degrees) -> Degrees:
    result: Degrees = {}
    for degrees in several:
        for name, degree in degrees.items():
            result[name] = max(degree, result.get(name, 0))
    return result


def _sum(first: Degrees, second: Degrees) -> Degrees:
    return {name: min(MORE, first.get(name, 0) + second.get(name, 0)) for name in {**first, **second}}


def _degrees(
    func: Callable[..., Any], arguments: tuple[Any, ...], met: list[Degrees], known: dict[int, Degrees]
) -> Degrees:
    args = [known.get(id(argument), {}) for argument in arguments]
    name = _name(func)
    if name in _CONSTANT:
        return {}
    if name in _LINEAR and not (name == "abs" and arguments[0].is_complex()):  # |z| = √(x² + y²) is curved
        return _largest(*met)
    if name in _BILINEAR:
        return _largest(_sum(args[0], args[1]), *args[2:])
    if name in _ADDED_BILINEAR:
        return _largest(args[0], _sum(args[1], args[2]))
    if name in _CONVOLUTION:
        return _largest(_sum(args[0], args[1]), args[2])
    if name == "div" and not args[1]:
        return args[0]
    if name in _BATCH_NORM and not any(args[3:5]) and not _normalises_by_batch(name, arguments):
        return _largest(_sum(args[0], args[1]), args[2])
    if name in _NORMALISATION:
        weight, bias = (args[position] for position in _NORMALISATION[name])
        return _largest(dict.fromkeys(args[0], MORE), weight, bias)
    return dict.fromkeys(_largest(*met), MORE)


def _normalises_by_batch(name: str, arguments: tuple[Any, ...]) -> bool:
    return name != "_native_batch_norm_legit_no_training" and arguments[5] is not False
