"""The one table of PyTorch's operations: all that is known of each, for everything that watches a forward pass.

An operation appears under two kinds of names: those of Python's functions, which a `TorchFunctionMode` sees, and those
of ATen's operations, to which the dispatcher breaks them down and which a `TorchDispatchMode` sees. What both mean is
one entry. `called(func)` finds the entry of a function, `dispatched(func)` that of an ATen operation; an operation that
is not here is not known to anybody, and each watcher then says the safe thing: more than linear, no factor passes, no
rule. So a new operation is taught here and nowhere else, and `tests/test_operations.py` checks by calls that what is
declared is so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.watching import norm_rules, path_rules, taylor_rules
from spiritlevel.watching.norm_rules import Rule
from spiritlevel.watching.path_rules import PathRule
from spiritlevel.watching.taylor_rules import TaylorRule


class Degree(Enum):
    """In which degree the result depends on the arguments; what has none of these is taken for more than linear."""

    CONSTANT = "a constant: it looks at the shape and type of its argument only"
    LINEAR = "linear in all its tensors together, or affine where it is given numbers besides"
    PIECEWISE = "the same between kinks"
    BILINEAR = "the first argument times the second, plus the others"
    ADDED_BILINEAR = "the first argument, plus the second times the third"
    QUOTIENT = "linear in the first argument if the second is constant"
    BATCH_NORM = "the first argument times the second, plus the third, if the statistics are constant"
    NORMALISED = "more than linear in the first argument, linear in the weight and bias that follow"
    SMOOTH = "more than linear, number by number"


class Kind(Enum):
    """What it does with the places of numbers."""

    ALIAS = "the same tensor again"
    COPY = "the same numbers at the same places"
    RESHAPING = "the same numbers in the same order, in another shape"
    MOVING = "numbers at other places, some perhaps left out or repeated"
    JOIN = "several tensors side by side"
    SUM = "several tensors laid over each other, of which each number of the result is one, or their sum"
    REDUCTION = "one number of many"
    SPATIAL = "the same for every channel: pooling, padding, interpolation"


class Layer(Enum):
    """How a matrix of parameters makes a layer of it."""

    DENSE = "a linear layer: weight (outputs, inputs)"
    MATRIX = "a product of two matrices, of which the second may be a weight (inputs, outputs)"
    CONVOLUTION = "weight (outputs, inputs of a group, …)"
    TRANSPOSED = "weight (inputs, outputs of a group, …)"
    PRODUCT = "a product in which no parameter is known for the weight"
    SEVERAL = "layers inside of one call"


class Kink(Enum):
    """Where it has a kink."""

    ZERO = "at 0"
    BOUND = "at its second argument"


class Chooses(Enum):
    """What numbers, and not shapes alone, decide."""

    ROWS = "which rows are taken or written, if an argument of whole numbers comes from the data"
    SIZE = "how many there are"


@dataclass(frozen=True)
class Operation:
    """What is known of one operation. A column that is empty is not known, or does not apply.

    `functions` are names in `torch.nn.functional`, `torch` and `Tensor`, in-place forms written out; one that begins
    with "F." is that function alone, because another of the same name takes its arguments in another order. `aten` are
    the names that the dispatcher knows, each for its in-place form too. `elementwise` counts the tensors that it takes
    number by number; `homogeneous` says that f(cx) = c f(x) for c > 0, with x all tensors of a linear operation and the
    first of any other; `vanishes` that it is 0 wherever one of its tensors is; `by_memory` that it reads memory as it
    lies; `real` that the degree holds of real numbers only; `affine` where weight and bias of a normalisation stand.
    """

    name: str
    functions: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    degree: Degree | None = None
    kind: Kind | None = None
    elementwise: int = 0
    homogeneous: bool = False
    vanishes: bool = False
    real: bool = False
    by_memory: bool = False
    chooses: Chooses | None = None
    kink: Kink | None = None
    layer: Layer | None = None
    affine: tuple[int, int] | None = None
    norm: Callable[..., Rule | None] | None = None
    path: PathRule | None = None
    taylor: TaylorRule | None = None

    @property
    def smooth(self) -> bool:
        """Whether it curves, without a kink and number by number."""
        curved = self.degree in (Degree.SMOOTH, Degree.BILINEAR, Degree.QUOTIENT)
        return curved and self.elementwise > 0 and self.kink is None

    @property
    def keeps_order(self) -> bool:
        """Whether the result holds the same numbers in the same order."""
        return self.kind in (Kind.ALIAS, Kind.COPY, Kind.RESHAPING)


_TAYLOR: dict[Degree, TaylorRule] = {
    Degree.CONSTANT: taylor_rules.still,
    Degree.LINEAR: taylor_rules.linear(),
    Degree.PIECEWISE: taylor_rules.elementwise(curved=False),  # by forward mode where it is not
    Degree.BILINEAR: taylor_rules.product,
    Degree.ADDED_BILINEAR: taylor_rules.added_product,
    Degree.QUOTIENT: taylor_rules.divided,
    Degree.BATCH_NORM: taylor_rules.batch_norm,
    Degree.SMOOTH: taylor_rules.elementwise(),
}
"""The rules for second-order terms that follow from a degree, where no better one is named."""


def _operation(name: str, functions: str = "", aten: str = "", **columns: Any) -> Operation:
    if aten and not columns.get("by_memory") and "degree" in columns:
        columns.setdefault("taylor", _TAYLOR.get(columns["degree"]))
    return Operation(name, tuple(functions.split()), tuple(aten.split()), **columns)


_LINEAR: dict[str, Any] = {"degree": Degree.LINEAR, "homogeneous": True}
_PIECEWISE: dict[str, Any] = {"degree": Degree.PIECEWISE, "homogeneous": True}
_RESHAPED: dict[str, Any] = {"path": path_rules.reshaped, "taylor": taylor_rules.reshaped}
_SHAPED: dict[str, Any] = {**_LINEAR, **_RESHAPED, "kind": Kind.RESHAPING, "vanishes": True}
_COPIED: dict[str, Any] = {**_SHAPED, "kind": Kind.COPY, "taylor": taylor_rules.copied}
_MOVED: dict[str, Any] = {**_LINEAR, "kind": Kind.MOVING, "path": path_rules.moved}
_CHOSEN: dict[str, Any] = {**_LINEAR, "kind": Kind.MOVING, "chooses": Chooses.ROWS}
_POOLED: dict[str, Any] = {"kind": Kind.SPATIAL}
_CURVED: dict[str, Any] = {"degree": Degree.SMOOTH, "elementwise": 1}
_PRODUCT: dict[str, Any] = {"degree": Degree.BILINEAR, "homogeneous": True, "path": path_rules.product}
_ADDED: dict[str, Any] = {"degree": Degree.ADDED_BILINEAR, "path": path_rules.added_product}


def _copies() -> Iterator[Operation]:
    """The same numbers again, in their own or another shape."""
    again = {"homogeneous": True, "kind": Kind.ALIAS, "path": path_rules.reshaped}
    yield _operation("alias", "", "alias", degree=Degree.LINEAR, taylor=taylor_rules.copied, **again)
    # no degree: what is cut off from its gradient is found by `structure`, which knows when autograd itself does so
    yield _operation("detach", "detach", "detach", taylor=taylor_rules.still, **again)
    yield _operation("clone", "clone contiguous", "clone contiguous", **_COPIED)
    yield _operation("convert", "to float double", "_to_copy", **_COPIED)
    yield _operation("lift", "", "lift lift_fresh lift_fresh_copy", **{**_COPIED, "vanishes": False})
    # nothing but the same numbers where a network is measured, in eval mode
    yield _operation("dropout", "dropout dropout_ dropout1d dropout2d dropout3d", **_LINEAR, kind=Kind.COPY)
    views = "view view_copy _unsafe_view _reshape_alias reshape"
    yield _operation("view", "view reshape flatten unflatten", views, **_SHAPED)
    yield _operation("squeeze", "squeeze", "squeeze squeeze_copy", **_SHAPED)
    yield _operation("unsqueeze", "unsqueeze", "unsqueeze unsqueeze_copy", **_SHAPED)
    yield _operation("view_as_real", "", "view_as_real view_as_complex", **_LINEAR)


def _moves() -> Iterator[Operation]:
    """Numbers at other places."""
    yield _operation("expand", "expand", "expand expand_copy", **_MOVED, vanishes=True)
    yield _operation("permute", "permute movedim", "permute permute_copy", **_MOVED, vanishes=True)
    transposed = "transpose transpose_copy t t_copy"
    yield _operation("transpose", "t transpose swapaxes", transposed, **_MOVED, vanishes=True)
    yield _operation("slice", "__getitem__ narrow", "slice narrow", **_MOVED)
    yield _operation("select", "select", "select", **_MOVED)
    yield _operation("split", "split chunk", "split split_with_sizes chunk", **_MOVED)
    yield _operation("unbind", "unbind", "unbind", **_MOVED)
    for name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        yield _operation(name, name, name, **_MOVED)
    for name in ("roll", "flip", "repeat", "diagonal", "tril", "triu", "im2col", "col2im"):
        yield _operation(name, "", name, **_MOVED)
    for name in ("diag_embed", "repeat_interleave"):
        yield _operation(name, "", name, **_LINEAR, kind=Kind.MOVING)
    yield _operation("as_strided", "", "as_strided", **_LINEAR, kind=Kind.MOVING, by_memory=True)
    for name in ("index", "index_select"):
        yield _operation(name, "", name, **_CHOSEN, path=path_rules.chosen)
    for name in ("gather", "take"):
        yield _operation(name, "", name, **_CHOSEN)
    rules: dict[str, Any] = {"norm": norm_rules.embedding, "taylor": taylor_rules.embedding}
    yield _operation("embedding", "F.embedding", "embedding", **_LINEAR, **rules)
    yield _operation("cat", "cat concat concatenate", "cat", **_LINEAR, kind=Kind.JOIN, path=path_rules.moved)
    yield _operation("stack", "stack", "stack", **_LINEAR, kind=Kind.JOIN, path=path_rules.moved)


def _writes() -> Iterator[Operation]:
    """One tensor written into another, or numbers into a tensor."""
    yield _operation("copy", "", "copy", **_LINEAR, path=path_rules.moved, taylor=taylor_rules.overwritten)
    for name in ("slice_scatter", "select_scatter"):
        yield _operation(name, "", name, **_LINEAR, path=path_rules.moved, taylor=taylor_rules.written_into)
    for name in ("scatter", "scatter_add", "index_add", "index_copy", "index_fill", "index_put"):
        yield _operation(name, "", name, **_LINEAR, chooses=Chooses.ROWS, taylor=taylor_rules.linear("value"))
    yield _operation("masked_scatter", "", "masked_scatter", **_LINEAR, chooses=Chooses.SIZE)
    yield _operation("masked_fill", "", "masked_fill", **_LINEAR, taylor=taylor_rules.linear("value"))
    yield _operation("where", "", "where", **_LINEAR, taylor=taylor_rules.linear("self", "other"))
    yield _operation("fill", "", "fill zero", degree=Degree.LINEAR, taylor=taylor_rules.linear("value"))
    yield _operation("as_strided_scatter", "", "as_strided_scatter", by_memory=True)


def _sums() -> Iterator[Operation]:
    """Values that meet, and one number of many."""
    over = {"kind": Kind.SUM, "elementwise": 2}
    plus = {**_LINEAR, **over, "norm": norm_rules.broadcast(scales=False)}
    yield _operation("add", "add add_", "add", **plus, path=path_rules.added, taylor=taylor_rules.added(1))
    yield _operation("sub", "sub sub_", "sub", **plus, path=path_rules.added, taylor=taylor_rules.added(-1))
    other_way = {"path": path_rules.subtracted_from, "taylor": taylor_rules.added(-1, reverse=True)}
    yield _operation("rsub", "__rsub__", "rsub", **plus, **other_way)
    yield _operation("maximum", "maximum", "maximum", **_PIECEWISE, **over, path=path_rules.larger)
    yield _operation("minimum", "minimum", "minimum", **_PIECEWISE, **over)
    yield _operation("fmax", "", "fmax fmin", **_PIECEWISE, elementwise=2)
    yield _operation("sum", "sum", "sum", **_LINEAR, kind=Kind.REDUCTION, path=path_rules.summed)
    yield _operation("mean", "mean", "mean", **_LINEAR, kind=Kind.REDUCTION, path=path_rules.averaged)
    yield _operation("trace", "", "trace", **_LINEAR)
    yield _operation("cumsum", "", "cumsum", **_LINEAR, path=path_rules.moved)
    yield _operation("amax", "amax", "amax", **_PIECEWISE, kind=Kind.REDUCTION, path=path_rules.moved)
    yield _operation("amin", "amin", "amin", **_PIECEWISE, kind=Kind.REDUCTION)
    yield _operation("max", "", "max", **_PIECEWISE, path=path_rules.larger, taylor=taylor_rules.selected)
    for name in ("min", "median", "nanmedian", "kthvalue", "topk", "sort"):
        yield _operation(name, "", name, **_PIECEWISE, taylor=taylor_rules.selected)
    for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r"):
        yield _operation(name, "", name, **_LINEAR)


def _spatial() -> Iterator[Operation]:
    """Pooling, padding, interpolation."""
    averages = "avg_pool2d avg_pool3d"
    yield _operation("avg_pool", averages, averages, **_LINEAR, **_POOLED, path=path_rules.pooled)
    yield _operation("avg_pool1d", "avg_pool1d", "avg_pool1d", **_LINEAR, **_POOLED)  # mostly taken apart to the other
    to_size = "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
    pools = "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d"
    yield _operation("adaptive_avg_pool", to_size, pools, **_LINEAR, **_POOLED, path=path_rules.pooled_to_size)
    pools = "max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d"
    most = {**_PIECEWISE, **_POOLED, "path": path_rules.moved}
    yield _operation("max_pool", "max_pool1d max_pool2d max_pool3d", pools, **most)
    to_size = "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
    yield _operation("adaptive_max_pool", to_size, "adaptive_max_pool2d adaptive_max_pool3d", **most)
    yield _operation("lp_pool", "lp_pool1d lp_pool2d lp_pool3d", homogeneous=True, **_POOLED)
    padded: dict[str, Any] = {"path": path_rules.padded, "taylor": taylor_rules.linear("value")}
    yield _operation("pad", "pad", "constant_pad_nd", **_LINEAR, **_POOLED, **padded)
    pads = [f"{mode}_pad{dims}d" for mode in ("reflection", "replication") for dims in (1, 2, 3)]
    yield _operation("pad_by_copies", "", " ".join(pads), **_LINEAR, **_POOLED, path=path_rules.moved)
    nearest = "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    yield _operation("interpolate", "interpolate", nearest, **_LINEAR, **_POOLED, path=path_rules.moved)
    others = "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d"
    others += " upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
    yield _operation("interpolate_otherwise", "", others, **_LINEAR, **_POOLED)


def _activations() -> Iterator[Operation]:
    """Number by number: first what is straight between kinks, then what curves."""
    straight = {**_PIECEWISE, "elementwise": 1}
    yield _operation("relu", "relu relu_", "relu", **straight, kink=Kink.ZERO, path=path_rules.activation)
    leaky = "leaky_relu leaky_relu_ rrelu rrelu_"  # in eval mode the slope of rrelu is not random
    yield _operation("leaky_relu", leaky, "leaky_relu", **straight, kink=Kink.ZERO, path=path_rules.sloped)
    slopes = {"degree": Degree.BILINEAR, "homogeneous": True, "elementwise": 1, "kink": Kink.ZERO}
    rules: dict[str, Any] = {"norm": norm_rules.prelu, "path": path_rules.sloped, "taylor": taylor_rules.prelu}
    yield _operation("prelu", "prelu", "_prelu_kernel", **slopes, **rules)
    yield _operation("abs", "abs", "abs", **straight, real=True, path=path_rules.activation)
    yield _operation("neg", "neg", "neg", **_LINEAR, elementwise=1, vanishes=True, path=path_rules.activation)
    straight = {"degree": Degree.PIECEWISE, "elementwise": 1}
    yield _operation("threshold", "", "threshold", **straight, kink=Kink.BOUND, path=path_rules.activation)
    yield _operation("clamp", "", "clamp clamp_min", **straight, kink=Kink.BOUND, path=path_rules.clamped)
    yield _operation("clamp_max", "", "clamp_max", **straight)
    yield _operation("hardtanh", "hardtanh relu6", "hardtanh", **straight)
    for name in ("hardshrink", "softshrink", "hardsigmoid"):
        yield _operation(name, "", name, **straight)
    for name in "tanh sigmoid gelu silu softplus celu mish hardswish exp sin cos erf".split():
        yield _operation(name, name, name, **_CURVED)
    for name in "expm1 log1p atan sqrt rsqrt reciprocal log log2 log10 exp2 tan sinh cosh asinh asin acos erfc".split():
        yield _operation(name, "", name, **_CURVED)
    yield _operation("steps", "", "sign floor ceil round trunc", taylor=taylor_rules.still)
    yield _operation("elu", "elu elu_ selu", "elu", **_CURVED)
    yield _operation("log_sigmoid", "log_sigmoid", "log_sigmoid_forward", **_CURVED)
    for name in ("softsign", "tanhshrink", "square"):
        yield _operation(name, name, "", **_CURVED)
    yield _operation("pow", "", "pow", degree=Degree.SMOOTH, elementwise=2)


def _products() -> Iterator[Operation]:
    """What multiplies two tensors."""
    times, scales = "mul mul_ multiply", norm_rules.broadcast(scales=True)
    by_number = {**_PRODUCT, "elementwise": 2, "vanishes": True, "path": path_rules.scaled}
    yield _operation("mul", times, "mul", **by_number, norm=scales, taylor=taylor_rules.multiplied)
    divided = {"degree": Degree.QUOTIENT, "homogeneous": True, "elementwise": 2, "path": path_rules.divided}
    yield _operation("div", "div div_ true_divide", "div", **divided)
    matrix = {**_PRODUCT, "layer": Layer.MATRIX, "norm": norm_rules.matmul}
    yield _operation("matmul", "matmul", "matmul", **matrix)
    yield _operation("mm", "mm", "mm", **matrix, vanishes=True, taylor=taylor_rules.matrix_product)
    yield _operation("rmatmul", "__rmatmul__", layer=Layer.PRODUCT)
    stacks: dict[str, Any] = {"layer": Layer.PRODUCT, "taylor": taylor_rules.matrix_product}
    yield _operation("bmm", "bmm", "bmm", **_PRODUCT, **stacks, vanishes=True)
    yield _operation("mv", "mv", "mv", **_PRODUCT, layer=Layer.PRODUCT)
    yield _operation("dot", "", "dot", **_PRODUCT)
    yield _operation("vdot", "", "vdot", degree=Degree.BILINEAR, homogeneous=True)
    for name in ("einsum", "tensordot", "bilinear"):
        yield _operation(name, name, layer=Layer.PRODUCT)
    stacks["taylor"] = taylor_rules.added_matrix_product
    yield _operation("addmm", "addmm", "addmm", **_ADDED, **stacks, norm=norm_rules.addmm)
    yield _operation("baddbmm", "baddbmm", "baddbmm", **_ADDED, **stacks)
    yield _operation("addmv", "", "addmv", **_ADDED)
    yield _operation("addbmm", "", "addbmm addr", degree=Degree.ADDED_BILINEAR)


def _layers() -> Iterator[Operation]:
    """Layers that come in one call."""
    yield _operation("linear", "linear", "linear", **_PRODUCT, layer=Layer.DENSE, norm=norm_rules.linear)
    convolved = {**_PRODUCT, "vanishes": True}
    kinds = "convolution _convolution mkldnn_convolution"
    options: dict[str, Any] = {"layer": Layer.CONVOLUTION, "norm": norm_rules.convolution}
    rule = taylor_rules.convolution
    yield _operation("convolution", "conv1d conv2d conv3d", kinds, **convolved, **options, taylor=rule)
    kinds = "conv_transpose1d conv_transpose2d conv_transpose3d"  # to the dispatcher, a convolution too
    options = {"layer": Layer.TRANSPOSED, "norm": norm_rules.transposed_convolution}
    yield _operation("transposed_convolution", kinds, degree=Degree.BILINEAR, homogeneous=True, **options)
    for name in ("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield _operation(name, name, layer=Layer.SEVERAL)
    kinds = "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
    yield _operation("batch_norm", "F.batch_norm", kinds, degree=Degree.BATCH_NORM, norm=norm_rules.batch_norm)
    normalised = {"degree": Degree.NORMALISED, "affine": (1, 2), "norm": norm_rules.group_norm}
    yield _operation("group_norm", "F.group_norm", "native_group_norm", **normalised, taylor=taylor_rules.group_norm)
    normalised = {"degree": Degree.NORMALISED, "affine": (2, 3), "taylor": taylor_rules.layer_norm}
    yield _operation("layer_norm", "", "native_layer_norm", **normalised)
    yield _operation("softmax", "", "_softmax _safe_softmax", taylor=taylor_rules.softmax)
    yield _operation("log_softmax", "", "_log_softmax", taylor=taylor_rules.log_softmax)
    yield _operation("linalg_vector_norm", "", "linalg_vector_norm", taylor=taylor_rules.vector_norm)
    for name in "logsumexp var std prod cumprod logcumsumexp".split():
        yield _operation(name, "", name, taylor=taylor_rules.by_forward_mode(curved=True))


def _constants() -> Iterator[Operation]:
    """What looks at shapes only, and what takes its shape from numbers."""
    blank = {"degree": Degree.CONSTANT, "path": path_rules.unreached}
    yield _operation("zeros", "", "zeros_like new_zeros zeros _efficientzerotensor", **blank)
    filled = "ones_like full_like empty_like new_ones new_full new_empty"
    yield _operation("filled", "", filled, **blank)
    yield _operation("drawn", "", "rand_like randn_like new_empty_strided", degree=Degree.CONSTANT)
    for name in ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"):
        yield _operation(name, "", name, chooses=Chooses.SIZE)


_GROUPS = (_copies, _moves, _writes, _sums, _spatial, _activations, _products, _layers, _constants)
OPERATIONS: tuple[Operation, ...] = tuple(operation for group in _GROUPS for operation in group())
"""The table."""


def spellings(name: str) -> Iterator[Any]:
    """The functions that a name in `Operation.functions` stands for."""
    spaces: tuple[Any, ...] = (F,) if name.startswith("F.") else (F, torch, Tensor, torch._C._nn)
    for space in spaces:
        if hasattr(space, name.removeprefix("F.")):
            yield getattr(space, name.removeprefix("F."))


_CALLED: dict[Any, Operation] = {
    function: operation for operation in OPERATIONS for name in operation.functions for function in spellings(name)
}
_DISPATCHED: dict[str, Operation] = {name: operation for operation in OPERATIONS for name in operation.aten}
UNKNOWN = Operation("")
"""What stands for an operation that is not in the table."""


def called(func: Any) -> Operation:
    """The entry of a function of PyTorch's; `UNKNOWN` if there is none."""
    return _CALLED.get(func, UNKNOWN)


def is_in_place(func: Any) -> bool:
    """Whether a function of PyTorch's writes into its first argument, as its name tells."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


@functools.cache
def aten_name(func: Any) -> str:
    """The name of an operation that was dispatched, with its library if that is not PyTorch's own.

    An operation in place has the name of what it writes.
    """
    name = str(func.overloadpacket.__name__)
    name = name.removesuffix("_") if func._schema.is_mutable else name
    return name if func.namespace == "aten" else f"{func.namespace}::{name}"


def dispatched(func: Any) -> Operation:
    """The entry of an operation that was dispatched; `UNKNOWN` if there is none."""
    return named(aten_name(func))


def named(name: str) -> Operation:
    """The entry of an operation of this name in ATen; `UNKNOWN` if there is none."""
    return _DISPATCHED.get(name, UNKNOWN)
