"""What the executed operations say about a network: in which degree does each output depend on each parameter?

The forward pass is traced to ATen operations and every value gets, for every parameter tensor, a degree 0, 1 or
'more'. Linear and piecewise linear operations keep the largest degree of their arguments, bilinear ones add degrees,
anything else makes 'more' of each parameter it touches. If no output has more than degree 1 in any one parameter
tensor, then ∂²φ/∂θᵢ² = 0 almost everywhere, every within-tensor block of the Hessian equals that of the Gauss-Newton
matrix, and Tr H = Tr GGN exactly (MATH 4.1). What cannot be traced, or is not known here, counts as 'more': the
analysis may miss an exact network, it never invents one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from spiritlevel.functional import Problem

MORE = 2

_LINEAR = frozenset(
    """
    add sub rsub neg sum mean cumsum clone alias contiguous copy lift lift_fresh lift_fresh_copy _to_copy
    view _unsafe_view reshape _reshape_alias flatten unflatten expand expand_copy permute transpose t squeeze unsqueeze
    view_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy as_strided slice select narrow split
    split_with_sizes chunk unbind stack cat index index_select gather take roll flip diagonal diag_embed tril triu
    repeat repeat_interleave constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d scatter scatter_add index_add index_put slice_scatter select_scatter
    masked_fill masked_scatter where trace im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle movedim
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d embedding real imag
    _fft_r2c _fft_c2c _fft_c2r view_as_real view_as_complex dropout
    relu leaky_relu threshold hardtanh relu6 clamp clamp_min clamp_max abs hardshrink softshrink hardsigmoid rrelu
    maximum minimum fmax fmin max min amax amin topk sort kthvalue median nanmedian max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max_pool2d mkldnn_max_pool2d
    """.split()
)
_BILINEAR = frozenset("mul mm bmm mv dot vdot outer matmul linear _prelu_kernel prelu".split())
_ADDED_BILINEAR = frozenset("addmm baddbmm addbmm addmv addr".split())  # first argument + product of the next two
_CONVOLUTION = frozenset("convolution _convolution conv1d conv2d conv3d mkldnn_convolution".split())
_BATCH_NORM = frozenset(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm".split()
)
_NORMALISATION = {"native_layer_norm": (2, 3), "native_group_norm": (1, 2)}  # where weight and bias stand
SMOOTH = frozenset(
    """
    tanh sigmoid gelu silu softplus elu celu selu mish hardswish log_sigmoid log_sigmoid_forward exp expm1 log1p sin
    cos erf square pow atan softsign mul div
    """.split()
)
"""Elementwise operations that curve: where only these stand in the way, Gauss-Newton part and remainder split well."""

Degrees = dict[str, int]


@dataclass(frozen=True)
class Structure:
    """Degrees of the outputs in every parameter tensor, and the operation that made the first 'more' of each.

    `uses` counts the operations that read a parameter; `floats_per_sample` is the size of all intermediate values.
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
    """Trace one small batch of `count` samples inside `problem.active()` and read off the degrees.

    Cost: one forward pass of that batch and its tracing.
    """
    names = list(problem.params)

    def forward(*tensors: Tensor) -> Tensor:
        return problem.outputs(dict(zip(names, tensors, strict=True)), inputs)

    try:
        with torch._C.DisableTorchFunction():  # name layer norm as such, not the operations it is rewritten to
            graph = make_fx(functionalize(forward))(*problem.params.values()).graph
    except Exception as error:  # whatever stops the tracer, the network is simply not known to be exact
        reason = str(error).strip().split("\n", 1)[0][:200]
        return Structure(failure=f"the forward pass cannot be traced ({type(error).__name__}: {reason})")
    return _read(graph, names, count)


def _read(graph: fx.Graph, names: list[str], count: int) -> Structure:
    known: dict[fx.Node, Degrees] = {}
    obstacles: dict[str, str] = {}
    result: Degrees = {}
    floats = 0
    uses: dict[str, int] = {}
    placeholders = iter(names)
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(placeholders)
            known[node], uses[name] = {name: 1}, len(node.users)
        elif node.op == "output":
            if len(node.all_input_nodes) != 1:
                return Structure(failure="the outputs do not depend on the traced operations")
            result = known[node.all_input_nodes[0]]
        elif node.op == "call_function":
            before = _largest(*(known.get(source, {}) for source in node.all_input_nodes))
            degrees = _degrees(node, known)
            operation = _name(node)
            for name, degree in degrees.items():
                if degree >= MORE > before.get(name, 0):
                    obstacles.setdefault(name, operation)
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                floats += value.numel()
                if not (value.is_floating_point() or value.is_complex()):
                    degrees = {}  # integers and booleans are constant almost everywhere
            known[node] = degrees
        else:
            known[node] = {}
    degrees = {name: result.get(name, 0) for name in names}
    hit = {name: operation for name, operation in obstacles.items() if degrees[name] >= MORE}
    return Structure(degrees, hit, "", floats // max(count, 1), uses)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(node.target, "__name__", node.target)))


def _largest(*several: Degrees) -> Degrees:
    result: Degrees = {}
    for degrees in several:
        for name, degree in degrees.items():
            result[name] = max(degree, result.get(name, 0))
    return result


def _sum(first: Degrees, second: Degrees) -> Degrees:
    return {name: min(MORE, first.get(name, 0) + second.get(name, 0)) for name in {**first, **second}}


def _degrees(node: fx.Node, known: dict[fx.Node, Degrees]) -> Degrees:
    def of(argument: Any) -> Degrees:
        return known.get(argument, {}) if isinstance(argument, fx.Node) else {}

    sources = [known.get(source, {}) for source in node.all_input_nodes]
    args = [of(argument) for argument in node.args]
    name = _name(node)
    if name == "getitem" or name in _LINEAR:
        return _largest(*sources)
    if name in _BILINEAR:
        return _largest(_sum(args[0], args[1]), *args[2:])
    if name in _ADDED_BILINEAR:
        return _largest(args[0], _sum(args[1], args[2]))
    if name in _CONVOLUTION:
        return _largest(_sum(args[0], args[1]), args[2])
    if name == "div" and not args[1]:
        return args[0]
    if name in _BATCH_NORM and not any(args[3:5]) and not _normalises_by_batch(name, node):
        return _largest(_sum(args[0], args[1]), args[2])
    if name in _NORMALISATION:
        weight, bias = (args[position] for position in _NORMALISATION[name])
        return _largest(dict.fromkeys(args[0], MORE), weight, bias)
    return dict.fromkeys(_largest(*sources), MORE)


def _normalises_by_batch(name: str, node: fx.Node) -> bool:
    return name != "_native_batch_norm_legit_no_training" and node.args[5] is not False
