"""The one table of PyTorch's operations: all that is known about each, for everything that watches a forward pass.

An operation appears under two kinds of names: those of Python's functions, which a `TorchFunctionMode` sees, and those
of ATen's operations, to which the dispatcher breaks them down and which a `TorchDispatchMode` sees. What both mean is
one entry. `called(func)` finds the entry of a function, `dispatched(func)` that of an ATen operation; an operation that
is not here is unknown everywhere, and each watcher then says the safe thing: more than linear, no factor passes, no
rule. So a new operation is taught here and nowhere else, and `tests/test_operations.py` checks what is declared by
calling it.
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

from spiritlevel.watching import channel_functions as functions
from spiritlevel.watching import channel_layers as layers
from spiritlevel.watching import channel_moves as moves
from spiritlevel.watching import channel_sums as sums
from spiritlevel.watching import convolution_norms, norm_rules, path_rules, taylor_norms, taylor_products, taylor_rules
from spiritlevel.watching.channels import Channels
from spiritlevel.watching.graph import Operation as Call
from spiritlevel.watching.norm_rules import Rule
from spiritlevel.watching.path_rules import PathRule
from spiritlevel.watching.taylor_terms import TaylorRule

ChannelRule = Callable[[Channels, Call], bool]
"""Follows channels through a call: whether it has dealt with them; else they stop there."""


class Degree(Enum):
    """In which degree the result depends on the arguments; what has none of these is taken as more than linear."""

    CONSTANT = "a constant: it looks only at the shape and type of its argument"
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
    SUM = "several tensors laid over each other: each number of the result is one of theirs, or their sum"
    REDUCTION = "one number from many"
    MASK = "numbers replaced at some places"
    SPATIAL = "the same for every channel: pooling, padding, interpolation"


class Layer(Enum):
    """How a matrix of parameters makes it a layer."""

    DENSE = "a linear layer: weight (outputs, inputs)"
    MATRIX = "a product of two matrices, the second of which may be a weight (inputs, outputs)"
    CONVOLUTION = "weight (outputs, inputs of a group, …)"
    TRANSPOSED = "weight (inputs, outputs of a group, …)"
    PRODUCT = "a product in which no parameter is known to be the weight"
    SEVERAL = "layers inside one call"


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
    """What is known about one operation. An empty column is unknown, or does not apply.

    `functions` are names in `torch.nn.functional`, `torch` and `Tensor`, in-place forms written out; one that begins
    with "F." is that function alone, because another of the same name takes its arguments in a different order. `aten`
    are the names that the dispatcher knows, each for its in-place form too. `elementwise` counts the tensors that it
    takes number by number; `homogeneous` says that f(cx) = c f(x) for c > 0, with x all tensors of a linear operation
    and the first of any other; `vanishes` that it is 0 wherever one of its tensors is; `by_memory` that it reads
    memory as it lies; `real` that the degree holds only for real numbers; `affine` where the weight and bias of a
    normalisation stand.
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
    channels: ChannelRule | None = None
    taylor: TaylorRule | None = None

    @property
    def smooth(self) -> bool:
        """Whether it is curved, elementwise and without a kink."""
        curved = self.degree in (Degree.SMOOTH, Degree.BILINEAR, Degree.QUOTIENT)
        return curved and self.elementwise > 0 and self.kink is None

    @property
    def keeps_order(self) -> bool:
        """Whether the result holds the same numbers in the same order."""
        return self.kind in (Kind.ALIAS, Kind.COPY, Kind.RESHAPING)


_TAYLOR: dict[Degree, TaylorRule] = {
    Degree.CONSTANT: taylor_rules.still,
    Degree.LINEAR: taylor_rules.linear(),
    Degree.PIECEWISE: taylor_rules.elementwise(curved=False),  # by forward mode where it is not elementwise
    Degree.BILINEAR: taylor_products.product,
    Degree.ADDED_BILINEAR: taylor_products.added_product,
    Degree.QUOTIENT: taylor_products.divided,
    Degree.BATCH_NORM: taylor_norms.batch_norm,
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
_SHAPED: dict[str, Any] = {**_LINEAR, **_RESHAPED, "kind": Kind.RESHAPING, "vanishes": True, "channels": moves.move}
_COPIED: dict[str, Any] = {**_SHAPED, "kind": Kind.COPY, "taylor": taylor_rules.copied, "channels": moves.same}
_MOVED: dict[str, Any] = {**_LINEAR, "kind": Kind.MOVING, "path": path_rules.moved, "channels": moves.move}
_CHOSEN: dict[str, Any] = {**_LINEAR, "kind": Kind.MOVING, "chooses": Chooses.ROWS, "channels": moves.move}
_POOLED: dict[str, Any] = {"kind": Kind.SPATIAL, "channels": sums.linear_pool}
_MOST: dict[str, Any] = {"kind": Kind.SPATIAL, "channels": sums.other_pool}
_CURVED: dict[str, Any] = {"degree": Degree.SMOOTH, "elementwise": 1, "channels": functions.any_function}
_PRODUCT: dict[str, Any] = {"degree": Degree.BILINEAR, "homogeneous": True, "path": path_rules.product}
_ADDED: dict[str, Any] = {"degree": Degree.ADDED_BILINEAR, "path": path_rules.added_product}


def _copies() -> Iterator[Operation]:
    """The same numbers again, in their own or another shape."""
    again = {"homogeneous": True, "kind": Kind.ALIAS, "path": path_rules.reshaped, "channels": moves.same}
    rules: dict[str, Any] = {"degree": Degree.LINEAR, "taylor": taylor_rules.copied}
    yield _operation("alias", "positive", "alias", **rules, **again)
    # no degree: `structure` finds what is cut off from its gradient, and knows when autograd itself does that
    yield _operation("detach", "detach", "detach", taylor=taylor_rules.still, **again)
    yield _operation("clone", "clone contiguous", "clone contiguous", **_COPIED)
    yield _operation("convert", "to float double type type_as cpu cuda", "_to_copy", **_COPIED)
    yield _operation("lift", "", "lift lift_fresh lift_fresh_copy", **{**_COPIED, "vanishes": False})
    # simply the same numbers in eval mode, where networks are measured
    kinds = "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
    yield _operation("dropout", kinds, **_LINEAR, kind=Kind.COPY, channels=moves.same)
    views = "view view_copy _unsafe_view _reshape_alias reshape"
    yield _operation("view", "view reshape flatten unflatten view_as reshape_as", views, **_SHAPED)
    yield _operation("squeeze", "squeeze", "squeeze squeeze_copy", **_SHAPED)
    yield _operation("unsqueeze", "unsqueeze", "unsqueeze unsqueeze_copy", **_SHAPED)
    yield _operation("view_as_real", "view_as_real", "view_as_real", **_LINEAR, channels=functions.as_pairs)
    yield _operation("view_as_complex", "view_as_complex", "view_as_complex", **_LINEAR, channels=functions.as_complex)
    yield _operation("rounded", "half bfloat16", channels=moves.same)
    yield _operation("requires_grad", "requires_grad_", channels=moves.same)
    yield _operation("__get__", channels=moves.attribute)  # .T, .mT and the like


def _moves() -> Iterator[Operation]:
    """Numbers at other places."""
    yield _operation("expand", "expand expand_as broadcast_to", "expand expand_copy", **_MOVED, vanishes=True)
    yield _operation("permute", "permute movedim moveaxis", "permute permute_copy", **_MOVED, vanishes=True)
    transposed = "transpose transpose_copy t t_copy"
    yield _operation("transpose", "t transpose swapaxes swapdims", transposed, **_MOVED, vanishes=True)
    yield _operation("slice", "__getitem__ narrow", "slice narrow", **_MOVED)
    yield _operation("select", "select", "select", **_MOVED)
    yield _operation("split", "split chunk tensor_split split_with_sizes", "split split_with_sizes chunk", **_MOVED)
    yield _operation("unbind", "unbind", "unbind", **_MOVED)
    for name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        yield _operation(name, name, name, **_MOVED)
    yield _operation("flip", "flip", "flip", **_MOVED)
    yield _operation("rot90", "rot90", channels=moves.move)
    yield _operation("repeat", "repeat tile", "repeat", **_MOVED)
    for name in ("roll", "diagonal", "tril", "triu"):
        yield _operation(name, name, name, **_MOVED)
    yield _operation("im2col", "unfold", "im2col", **_MOVED)
    yield _operation("col2im", "fold", "col2im", **{**_MOVED, "channels": None})  # adds up what falls on one place
    for name in ("diag_embed", "repeat_interleave"):
        yield _operation(name, name, name, **_LINEAR, kind=Kind.MOVING, channels=moves.move)
    yield _operation("as_strided", "as_strided", "as_strided", **_LINEAR, kind=Kind.MOVING, by_memory=True)
    yield _operation("index", "", "index", **_CHOSEN, path=path_rules.chosen)
    yield _operation("index_select", "index_select", "index_select", **_CHOSEN, path=path_rules.chosen)
    yield _operation("gather", "gather take_along_dim", "gather", **_CHOSEN)
    yield _operation("take", "take", "take", **_CHOSEN)
    rules: dict[str, Any] = {"norm": norm_rules.embedding, "taylor": taylor_rules.embedding}
    rules["channels"] = layers.embedding
    yield _operation("embedding", "F.embedding", "embedding", **_LINEAR, **rules)
    beside = {**_LINEAR, "kind": Kind.JOIN, "path": path_rules.moved}
    yield _operation("cat", "cat concat concatenate", "cat", **beside, channels=moves.join)
    yield _operation("stack", "stack hstack vstack dstack", "stack", **beside, channels=moves.stack)


def _writes() -> Iterator[Operation]:
    """One tensor written into another, or numbers into a tensor."""
    yield _operation("setitem", "__setitem__", channels=moves.write)
    yield _operation("copy", "copy_", "copy", **_LINEAR, path=path_rules.moved, taylor=taylor_rules.overwritten)
    for name in ("slice_scatter", "select_scatter"):
        yield _operation(name, name, name, **_LINEAR, path=path_rules.moved, taylor=taylor_rules.written_into)
    for name in ("scatter", "scatter_add", "index_add", "index_copy", "index_fill", "index_put"):
        rows = {**_LINEAR, "chooses": Chooses.ROWS, "taylor": taylor_rules.linear("value")}
        yield _operation(name, f"{name} {name}_", name, **rows)
    names = "masked_scatter masked_scatter_"
    yield _operation("masked_scatter", names, "masked_scatter", **_LINEAR, chooses=Chooses.SIZE)
    masked = {**_LINEAR, "kind": Kind.MASK}
    filled: dict[str, Any] = {"taylor": taylor_rules.linear("value"), "channels": functions.masked_fill}
    yield _operation("masked_fill", "masked_fill masked_fill_", "masked_fill", **masked, **filled)
    either: dict[str, Any] = {"taylor": taylor_rules.linear("self", "other"), "channels": functions.any_function}
    yield _operation("where", "where", "where", **masked, **either)
    yield _operation("fill", "fill_ zero_", "fill zero", degree=Degree.LINEAR, taylor=taylor_rules.linear("value"))
    yield _operation("as_strided_scatter", "", "as_strided_scatter", by_memory=True)


def _sums() -> Iterator[Operation]:
    """Values that meet, and reductions of many numbers to one."""
    over = {"kind": Kind.SUM, "elementwise": 2, "channels": functions.any_function}
    plus = {**_LINEAR, **over, "channels": functions.add, "norm": norm_rules.broadcast(scales=False)}
    yield _operation("add", "add add_", "add", **plus, path=path_rules.added, taylor=taylor_rules.added(1))
    yield _operation("sub", "sub sub_ subtract", "sub", **plus, path=path_rules.added, taylor=taylor_rules.added(-1))
    other_way = {"path": path_rules.subtracted_from, "taylor": taylor_rules.added(-1, reverse=True)}
    plus["channels"] = functions.any_function
    yield _operation("rsub", "__rsub__ rsub", "rsub", **plus, **other_way)
    yield _operation("maximum", "maximum", "maximum", **_PIECEWISE, **over, path=path_rules.larger)
    yield _operation("minimum", "minimum", "minimum", **_PIECEWISE, **over)
    yield _operation("fmax", "fmax fmin", "fmax fmin", **_PIECEWISE, elementwise=2)
    one = {**_LINEAR, "kind": Kind.REDUCTION, "channels": sums.linear_sum}
    yield _operation("sum", "sum", "sum", **one, path=path_rules.summed)
    yield _operation("mean", "mean", "mean", **one, path=path_rules.averaged)
    yield _operation("trace", "trace", "trace", **_LINEAR)
    yield _operation("cumsum", "cumsum", "cumsum", **_LINEAR, path=path_rules.moved)
    one = {**_PIECEWISE, "kind": Kind.REDUCTION, "channels": sums.extreme}
    yield _operation("amax", "amax", "amax", **one, path=path_rules.moved)
    yield _operation("amin", "amin", "amin", **one)
    chosen = {**_PIECEWISE, "taylor": taylor_rules.selected}
    yield _operation("max", "max", "max", **chosen, path=path_rules.larger, channels=sums.extreme)
    yield _operation("min", "min", "min", **chosen, channels=sums.extreme)
    yield _operation("median", "median", "median", **chosen, channels=sums.reduction)
    for name in ("nanmedian", "kthvalue", "topk", "sort"):
        yield _operation(name, name, name, **chosen)
    for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r"):
        yield _operation(name, "", name, **_LINEAR)


def _spatial() -> Iterator[Operation]:
    """Pooling, padding, interpolation."""
    averages = "avg_pool2d avg_pool3d"
    yield _operation("avg_pool", averages, averages, **_LINEAR, **_POOLED, path=path_rules.pooled)
    yield _operation("avg_pool1d", "avg_pool1d", "avg_pool1d", **_LINEAR, **_POOLED)  # mostly decomposed to the other
    to_size = "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
    pools = "adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d"
    yield _operation("adaptive_avg_pool", to_size, pools, **_LINEAR, **_POOLED, path=path_rules.pooled_to_size)
    pools = "max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d"
    most = {**_PIECEWISE, **_MOST, "path": path_rules.moved}
    yield _operation("max_pool", "max_pool1d max_pool2d max_pool3d", pools, **most)
    to_size = "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
    yield _operation("adaptive_max_pool", to_size, "adaptive_max_pool2d adaptive_max_pool3d", **most)
    yield _operation("lp_pool", "lp_pool1d lp_pool2d lp_pool3d", homogeneous=True, **_MOST)
    padded: dict[str, Any] = {"path": path_rules.padded, "taylor": taylor_rules.linear("value")}
    padded |= {"kind": Kind.SPATIAL, "channels": sums.pad}
    yield _operation("pad", "pad constant_pad_nd", "constant_pad_nd", **_LINEAR, **padded)
    pads = [f"{mode}_pad{dims}d" for mode in ("reflection", "replication") for dims in (1, 2, 3)]
    yield _operation("pad_by_copies", "", " ".join(pads), **_LINEAR, **_POOLED, path=path_rules.moved)
    nearest = "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    yield _operation("interpolate", "interpolate", nearest, **_LINEAR, **_POOLED, path=path_rules.moved)
    others = "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d"
    others += " upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
    yield _operation("interpolate_otherwise", "", others, **_LINEAR, **_POOLED)


def _activations() -> Iterator[Operation]:
    """Elementwise: first what is straight between kinks, then what is curved."""
    straight = {**_PIECEWISE, "elementwise": 1, "channels": functions.homogeneous_function}
    yield _operation("relu", "relu relu_", "relu", **straight, kink=Kink.ZERO, path=path_rules.activation)
    leaky = "leaky_relu leaky_relu_ rrelu rrelu_"  # in eval mode the slope of rrelu is not random
    yield _operation("leaky_relu", leaky, "leaky_relu", **straight, kink=Kink.ZERO, path=path_rules.sloped)
    slopes = {"degree": Degree.BILINEAR, "homogeneous": True, "elementwise": 1, "kink": Kink.ZERO}
    rules: dict[str, Any] = {"norm": norm_rules.prelu, "path": path_rules.sloped, "taylor": taylor_products.prelu}
    rules["channels"] = functions.prelu
    yield _operation("prelu", "prelu", "_prelu_kernel", **slopes, **rules)
    yield _operation("abs", "abs absolute", "abs", **straight, real=True, path=path_rules.activation)
    rules = {"path": path_rules.activation, "channels": functions.negate}
    yield _operation("neg", "neg negative", "neg", **_LINEAR, elementwise=1, vanishes=True, **rules)
    straight = {"degree": Degree.PIECEWISE, "elementwise": 1, "channels": functions.any_function}
    bent = {**straight, "kink": Kink.BOUND}
    yield _operation("threshold", "threshold threshold_", "threshold", **bent, path=path_rules.activation)
    from_below = "clamp clamp_ clip clamp_min clamp_min_"
    yield _operation("clamp", from_below, "clamp clamp_min", **bent, path=path_rules.clamped)
    yield _operation("clamp_max", "clamp_max clamp_max_", "clamp_max", **straight)
    yield _operation("hardtanh", "hardtanh hardtanh_ relu6", "hardtanh", **straight)
    for name in ("hardshrink", "softshrink", "hardsigmoid"):
        yield _operation(name, name, name, **straight)
    for name in "tanh sigmoid gelu silu softplus celu mish hardswish exp sin cos erf".split():
        yield _operation(name, name, name, **_CURVED)
    for name in "expm1 log1p atan sqrt rsqrt reciprocal log log2 log10 exp2 tan sinh cosh asinh asin acos erfc".split():
        yield _operation(name, name, name, **_CURVED)
    steps = "sign floor ceil round trunc"
    yield _operation("steps", steps, steps, taylor=taylor_rules.still, channels=functions.any_function)
    compared = "gt ge lt le eq ne __gt__ __ge__ __lt__ __le__ isnan logical_not"
    yield _operation("compared", compared, channels=functions.any_function)
    others = "lerp addcmul addcdiv remainder fmod nan_to_num __rtruediv__"
    yield _operation("rdiv", others, channels=functions.any_function)
    yield _operation("elu", "elu elu_ selu", "elu", **_CURVED)
    yield _operation("log_sigmoid", "log_sigmoid", "log_sigmoid_forward", **_CURVED)
    for name in ("softsign", "tanhshrink"):
        yield _operation(name, name, "", **_CURVED)
    yield _operation("square", "square", "", **{**_CURVED, "channels": functions.square})
    yield _operation("pow", "pow __pow__", "pow", degree=Degree.SMOOTH, elementwise=2, channels=functions.power)
    yield _operation("glu", "glu", channels=functions.glu)


def _products() -> Iterator[Operation]:
    """What multiplies two tensors."""
    times, scales = "mul mul_ multiply", norm_rules.broadcast(scales=True)
    by_number = {**_PRODUCT, "elementwise": 2, "vanishes": True, "path": path_rules.scaled}
    by_number["channels"] = functions.multiply
    yield _operation("mul", times, "mul", **by_number, norm=scales, taylor=taylor_products.multiplied)
    divided = {"degree": Degree.QUOTIENT, "homogeneous": True, "elementwise": 2, "path": path_rules.divided}
    yield _operation("div", "div div_ true_divide divide", "div", **divided, channels=functions.divide)
    matrix = {**_PRODUCT, "layer": Layer.MATRIX, "norm": norm_rules.matmul, "channels": layers.matmul}
    yield _operation("matmul", "matmul", "matmul", **matrix)
    yield _operation("mm", "mm", "mm", **matrix, vanishes=True, taylor=taylor_products.matrix_product)
    yield _operation("rmatmul", "__rmatmul__", layer=Layer.PRODUCT, channels=layers.rmatmul)
    stacks: dict[str, Any] = {"layer": Layer.PRODUCT, "taylor": taylor_products.matrix_product}
    stacks["channels"] = layers.matmul
    yield _operation("bmm", "bmm", "bmm", **_PRODUCT, **stacks, vanishes=True)
    yield _operation("mv", "mv", "mv", **_PRODUCT, layer=Layer.PRODUCT)
    yield _operation("dot", "dot", "dot", **_PRODUCT)
    yield _operation("vdot", "vdot", "vdot", degree=Degree.BILINEAR, homogeneous=True)
    yield _operation("einsum", "einsum", layer=Layer.PRODUCT, channels=layers.einsum)
    for name in ("tensordot", "bilinear"):
        yield _operation(name, name, layer=Layer.PRODUCT)
    stacks |= {"taylor": taylor_products.added_matrix_product, "channels": layers.baddbmm}
    own = {**stacks, "channels": layers.addmm}
    yield _operation("addmm", "addmm", "addmm", **_ADDED, **own, norm=norm_rules.addmm)
    yield _operation("baddbmm", "baddbmm", "baddbmm", **_ADDED, **stacks)
    yield _operation("addmv", "addmv", "addmv", **_ADDED)
    yield _operation("addbmm", "addbmm addr", "addbmm addr", degree=Degree.ADDED_BILINEAR)


def _layers() -> Iterator[Operation]:
    """Layers that come in one call."""
    dense: dict[str, Any] = {"layer": Layer.DENSE, "norm": norm_rules.linear, "channels": layers.linear}
    yield _operation("linear", "linear", "linear", **_PRODUCT, **dense)
    convolved = {**_PRODUCT, "vanishes": True}
    kinds = "convolution _convolution mkldnn_convolution"
    options: dict[str, Any] = {"layer": Layer.CONVOLUTION, "norm": convolution_norms.convolution}
    options["channels"] = layers.convolution
    rule = taylor_products.convolution
    yield _operation("convolution", "conv1d conv2d conv3d", kinds, **convolved, **options, taylor=rule)
    kinds = "conv_transpose1d conv_transpose2d conv_transpose3d"  # to the dispatcher, a convolution too
    options = {"layer": Layer.TRANSPOSED, "norm": convolution_norms.transposed_convolution}
    options["channels"] = layers.transposed_convolution
    yield _operation("transposed_convolution", kinds, degree=Degree.BILINEAR, homogeneous=True, **options)
    for name in ("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"):
        yield _operation(name, name, layer=Layer.SEVERAL)
    kinds = "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
    rules = {"norm": norm_rules.batch_norm, "channels": sums.batch_norm}
    yield _operation("batch_norm", "F.batch_norm", kinds, degree=Degree.BATCH_NORM, **rules)
    yield _operation("instance_norm", "F.instance_norm", channels=sums.batch_norm)
    normalised = {"degree": Degree.NORMALISED, "affine": (1, 2), "norm": norm_rules.group_norm}
    normalised["channels"] = sums.group_norm
    yield _operation("group_norm", "F.group_norm", "native_group_norm", **normalised, taylor=taylor_norms.group_norm)
    normalised = {"degree": Degree.NORMALISED, "affine": (2, 3), "taylor": taylor_norms.layer_norm}
    normalised["channels"] = sums.layer_norm
    yield _operation("layer_norm", "F.layer_norm", "native_layer_norm", **normalised)
    yield _operation("rms_norm", "F.rms_norm", channels=sums.rms_norm)
    yield _operation("normalize", "normalize", channels=sums.normalize)
    yield _operation("attention", "scaled_dot_product_attention", channels=layers.attention)
    yield _operation("softmax", "softmax", "_softmax _safe_softmax", taylor=taylor_norms.softmax)
    yield _operation("log_softmax", "log_softmax", "_log_softmax", taylor=taylor_norms.log_softmax)
    curved = taylor_rules.by_forward_mode(curved=True)
    for name in "logsumexp var std prod".split():
        yield _operation(name, name, name, taylor=curved, channels=sums.reduction)
    lengths = {"taylor": taylor_norms.vector_norm, "channels": sums.length}
    yield _operation("linalg_vector_norm", "norm vector_norm", "linalg_vector_norm", **lengths)
    for name in ("cumprod", "logcumsumexp"):
        yield _operation(name, name, name, taylor=curved)
    yield _operation("statistics", "std_mean var_mean argmax argmin all any", channels=sums.reduction)


def _constants() -> Iterator[Operation]:
    """What looks only at shapes, and what takes its shape from numbers."""
    blank = {"degree": Degree.CONSTANT, "path": path_rules.unreached, "channels": moves.shapes_only}
    yield _operation("zeros", "zeros_like new_zeros", "zeros_like new_zeros zeros _efficientzerotensor", **blank)
    filled = "ones_like full_like empty_like new_ones new_full new_empty"
    yield _operation("filled", f"{filled} new_tensor", filled, **blank)
    drawn = "rand_like randn_like new_empty_strided"
    yield _operation("drawn", drawn, drawn, degree=Degree.CONSTANT, channels=moves.shapes_only)
    for name in ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"):
        yield _operation(name, "", name, chooses=Chooses.SIZE)


_GROUPS = (_copies, _moves, _writes, _sums, _spatial, _activations, _products, _layers, _constants)
OPERATIONS: tuple[Operation, ...] = tuple(operation for group in _GROUPS for operation in group())
"""The table."""


def plain_name(name: str) -> str:
    """The name of a function without its module and the sign of its in-place form."""
    name = name.removeprefix("F.")
    return name if name.endswith("__") else name.rstrip("_")


def spellings(name: str) -> Iterator[Any]:
    """The functions that a name in `Operation.functions` stands for."""
    spaces: tuple[Any, ...] = (F,) if name.startswith("F.") else (F, torch, Tensor, torch.linalg, torch._C._nn)
    for space in spaces:
        if hasattr(space, name.removeprefix("F.")):
            yield getattr(space, name.removeprefix("F."))


_CALLED: dict[Any, Operation] = {
    function: operation for operation in OPERATIONS for name in operation.functions for function in spellings(name)
}
_DISPATCHED: dict[str, Operation] = {name: operation for operation in OPERATIONS for name in operation.aten}
_BY_NAME: dict[str, Operation] = {
    plain_name(name): operation
    for operation in OPERATIONS
    for name in (operation.name, *operation.functions)
    if operation.functions or operation.channels
}
UNKNOWN = Operation("")
"""What stands for an operation that is not in the table."""


def called(func: Any) -> Operation:
    """The entry of a PyTorch function; `UNKNOWN` if there is none."""
    return _CALLED.get(func, UNKNOWN)


def called_by_name(name: str) -> Operation:
    """The entry of a function by its plain name, that of its out-of-place form; `UNKNOWN` if there is none."""
    return _BY_NAME.get(name, UNKNOWN)


def is_in_place(func: Any) -> bool:
    """Whether a PyTorch function writes into its first argument, judging by its name."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


@functools.cache
def aten_name(func: Any) -> str:
    """The name of an operation that was dispatched, with its library if that is not PyTorch's own.

    An in-place operation has the name of what it writes.
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
