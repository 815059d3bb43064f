"""Calls of every operation in the table, by which its declarations and its rules are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.watching.operations import OPERATIONS

ATEN = torch.ops.aten
Call = tuple[Callable[..., Any], list[tuple[int, ...]]]
"""A call, and the shapes of the tensors of floating point that it is given."""

FLAT, IMAGE, SIGNAL, VOLUME = (3, 4), (2, 4, 6, 6), (2, 3, 8), (2, 3, 4, 4, 4)
ROWS = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[0, 1, 2, 0], [2, 0, 1, 1], [1, 2, 0, 2]])
MASK = torch.tensor([[True, False, True, True], [False, True, False, True], [True, True, False, False]])


def one(*functions: Callable[[Tensor], Any], shape: tuple[int, ...] = FLAT) -> list[Call]:
    """Calls with one tensor."""
    return [(function, [shape]) for function in functions]


def two(*functions: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...] = FLAT) -> list[Call]:
    """Calls with two tensors of the same shape."""
    return [(function, [shape, shape]) for function in functions]


CALLS: dict[str, list[Call]] = {
    # copies
    "alias": one(ATEN.alias),
    "detach": one(lambda x: x.detach()),
    "clone": one(lambda x: x.clone(), lambda x: x.contiguous()),
    "convert": one(lambda x: x.to("cpu"), lambda x: x.float(), lambda x: x.float().double()),
    "lift": one(ATEN.lift, ATEN.lift_fresh, ATEN.lift_fresh_copy),
    "dropout": one(
        lambda x: F.dropout(x, training=False),
        lambda x: torch.dropout_(x, 0.5, False),
        lambda x: F.dropout1d(x, training=False),
        lambda x: F.dropout2d(x[..., None], training=False),
        lambda x: F.dropout3d(x[..., None, None], training=False),
        shape=SIGNAL,
    ),
    "view": one(
        lambda x: x.view(4, 3),
        lambda x: x.reshape(2, 6),
        lambda x: x.flatten(),
        lambda x: x.unflatten(1, (2, 2)),
        lambda x: ATEN.view_copy(x, [4, 3]),
        lambda x: ATEN._unsafe_view(x, [4, 3]),
        lambda x: ATEN._reshape_alias(x, [4, 3], [3, 1]),
    ),
    "squeeze": one(
        lambda x: x.squeeze(1), lambda x: torch.squeeze(x), lambda x: ATEN.squeeze_copy(x, 1), shape=(3, 1, 4)
    ),
    "unsqueeze": one(lambda x: x.unsqueeze(1), lambda x: ATEN.unsqueeze_copy(x, 1)),
    "view_as_real": one(lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(6, 2)))),
    # moves
    "expand": one(lambda x: x.expand(2, 3, 4), lambda x: ATEN.expand_copy(x, [2, 3, 4])),
    "permute": one(lambda x: x.permute(1, 0), lambda x: x.movedim(0, 1), lambda x: ATEN.permute_copy(x, [1, 0])),
    "transpose": one(
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.swapaxes(0, 1),
        lambda x: ATEN.transpose_copy(x, 0, 1),
        ATEN.t_copy,
    ),
    "slice": one(lambda x: x[1:, ::2], lambda x: x.narrow(1, 1, 2)),
    "select": one(lambda x: x.select(1, 2)),
    "split": one(lambda x: x.split(2, 1), lambda x: x.split([1, 3], 1), lambda x: x.chunk(2, 1)),
    "unbind": one(lambda x: x.unbind(1)),
    "pixel_shuffle": one(lambda x: F.pixel_shuffle(x, 2), shape=IMAGE),
    "pixel_unshuffle": one(lambda x: F.pixel_unshuffle(x, 2), shape=IMAGE),
    "channel_shuffle": one(lambda x: F.channel_shuffle(x, 2), shape=IMAGE),
    "roll": one(lambda x: x.roll(1, 1)),
    "flip": one(lambda x: x.flip(1)),
    "repeat": one(lambda x: x.repeat(2, 1)),
    "diagonal": one(lambda x: x.diagonal()),
    "tril": one(lambda x: x.tril()),
    "triu": one(lambda x: x.triu()),
    "im2col": one(lambda x: F.unfold(x, 2), shape=IMAGE),
    "col2im": one(lambda x: F.fold(x, (3, 3), 2), shape=(2, 8, 4)),
    "diag_embed": one(lambda x: torch.diag_embed(x)),
    "repeat_interleave": one(lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 0)),
    "as_strided": one(lambda x: x.as_strided((2, 2), (4, 1))),
    "index": one(lambda x: x[ROWS]),
    "index_select": one(lambda x: x.index_select(0, ROWS)),
    "gather": one(lambda x: x.gather(0, PLACES)),
    "take": one(lambda x: x.take(PLACES)),
    "embedding": one(lambda x: F.embedding(ROWS, x)),
    "cat": two(
        lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.concat([x, y]), lambda x, y: torch.concatenate([x, y])
    ),
    "stack": two(lambda x, y: torch.stack([x, y], 1), lambda x, y: ATEN.stack([x, y], 1)),
    # writes
    "copy": two(lambda x, y: torch.zeros_like(x).copy_(y), lambda x, y: ATEN.copy(x, y)),
    "slice_scatter": [(lambda x, y: x.slice_scatter(y, 1, 0, 2), [FLAT, (3, 2)])],
    "select_scatter": [(lambda x, y: x.select_scatter(y, 1, 0), [FLAT, (3,)])],
    "scatter": two(lambda x, y: x.scatter(0, PLACES[:1], y)),
    "scatter_add": two(lambda x, y: x.scatter_add(0, PLACES, y)),
    "index_add": two(lambda x, y: x.index_add(0, ROWS, y)),
    "index_copy": two(lambda x, y: x.index_copy(0, torch.tensor([2, 0, 1]), y)),
    "index_fill": [(lambda x: x.index_fill(0, ROWS, 0.0), [FLAT])],
    "index_put": two(lambda x, y: x.index_put((torch.tensor([2, 0, 1]),), y)),
    "masked_scatter": two(lambda x, y: x.masked_scatter(MASK, y)),
    "masked_fill": one(lambda x: x.masked_fill(MASK, 0.0)),
    "where": two(lambda x, y: torch.where(MASK, x, y)),
    "fill": one(lambda x: x.fill_(0.0), lambda x: x.zero_()),
    "as_strided_scatter": [(lambda x, y: x.as_strided_scatter(y, (2, 2), (4, 1)), [FLAT, (2, 2)])],
    # sums
    "add": two(lambda x, y: x + y, lambda x, y: x.add_(y, alpha=2)),
    "sub": two(lambda x, y: x - y, lambda x, y: x.sub_(y)),
    "rsub": two(lambda x, y: Tensor.__rsub__(x, y), lambda x, y: torch.rsub(x, y, alpha=2)),
    "maximum": two(torch.maximum),
    "minimum": two(torch.minimum),
    "fmax": two(torch.fmax, torch.fmin),
    "sum": one(lambda x: x.sum(1)),
    "mean": one(lambda x: x.mean(1)),
    "trace": one(lambda x: x.trace()),
    "cumsum": one(lambda x: x.cumsum(1)),
    "amax": one(lambda x: x.amax(1)),
    "amin": one(lambda x: x.amin(1)),
    "max": one(lambda x: x.max(), lambda x: x.max(1).values),
    "min": one(lambda x: x.min(), lambda x: x.min(1).values),
    "median": one(lambda x: x.median(1).values),
    "nanmedian": one(lambda x: x.nanmedian(1).values),
    "kthvalue": one(lambda x: x.kthvalue(2, 1).values),
    "topk": one(lambda x: x.topk(2, 1).values),
    "sort": one(lambda x: x.sort(1).values),
    "_fft_r2c": one(lambda x: torch.view_as_real(torch.fft.rfft(x))),
    "_fft_c2c": one(lambda x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x.reshape(3, 2, 2))))),
    "_fft_c2r": one(lambda x: torch.fft.irfft(torch.view_as_complex(x.reshape(3, 2, 2)))),
    # spatial
    "avg_pool1d": one(lambda x: F.avg_pool1d(x, 2), shape=SIGNAL),
    "avg_pool": [
        *one(lambda x: F.avg_pool2d(x, 3, padding=1, ceil_mode=True), shape=IMAGE),
        *one(lambda x: F.avg_pool3d(x, 2), shape=VOLUME),
    ],
    "adaptive_avg_pool": [
        *one(lambda x: F.adaptive_avg_pool1d(x, 3), shape=SIGNAL),
        *one(lambda x: F.adaptive_avg_pool2d(x, (4, 5)), shape=IMAGE),
        *one(lambda x: F.adaptive_avg_pool3d(x, 3), shape=VOLUME),
    ],
    "max_pool": [
        *one(lambda x: F.max_pool1d(x, 2), shape=SIGNAL),
        *one(lambda x: F.max_pool2d(x, 3, 2, 1), shape=IMAGE),
        *one(lambda x: F.max_pool3d(x, 2), shape=VOLUME),
    ],
    "adaptive_max_pool": [
        *one(lambda x: F.adaptive_max_pool1d(x, 3), shape=SIGNAL),
        *one(lambda x: F.adaptive_max_pool2d(x, (4, 5)), shape=IMAGE),
        *one(lambda x: F.adaptive_max_pool3d(x, 3), shape=VOLUME),
    ],
    "lp_pool": [
        *one(lambda x: F.lp_pool1d(x, 2.0, 2), shape=SIGNAL),
        *one(lambda x: F.lp_pool2d(x, 2.0, 2), shape=IMAGE),
        *one(lambda x: F.lp_pool3d(x, 2.0, 2), shape=VOLUME),
    ],
    "pad": one(lambda x: F.pad(x, (1, 2, 0, 1)), shape=IMAGE),
    "pad_by_copies": [
        *one(*(lambda x, m=mode: F.pad(x, (1, 2), m) for mode in ("reflect", "replicate")), shape=SIGNAL),
        *one(*(lambda x, m=mode: F.pad(x, (1, 2, 0, 1), m) for mode in ("reflect", "replicate")), shape=IMAGE),
        *one(*(lambda x, m=mode: F.pad(x, (1, 2, 0, 1, 1, 1), m) for mode in ("reflect", "replicate")), shape=VOLUME),
    ],
    "interpolate": [
        *one(lambda x: F.interpolate(x, scale_factor=2.0), shape=SIGNAL),
        *one(lambda x: F.interpolate(x, size=(4, 7)), shape=IMAGE),
        *one(lambda x: F.interpolate(x, scale_factor=2.0), shape=VOLUME),
    ],
    "interpolate_otherwise": [
        *one(*(lambda x, m=m: F.interpolate(x, size=11, mode=m) for m in ("nearest-exact", "linear")), shape=SIGNAL),
        *one(
            *(lambda x, m=m: F.interpolate(x, size=(4, 7), mode=m) for m in ("nearest-exact", "bilinear", "bicubic")),
            shape=IMAGE,
        ),
        *one(*(lambda x, m=m: F.interpolate(x, size=5, mode=m) for m in ("nearest-exact", "trilinear")), shape=VOLUME),
    ],
    # number by number
    "relu": one(F.relu, lambda x: x.relu_()),
    "leaky_relu": one(F.leaky_relu, F.leaky_relu_, F.rrelu, torch.rrelu_),
    "prelu": [(F.prelu, [(3, 4), (4,)])],
    "abs": one(torch.abs),
    "neg": one(torch.neg),
    "threshold": one(lambda x: F.threshold(x, 0.1, 0.2)),
    "clamp": one(lambda x: x.clamp(-0.3, 0.4), lambda x: x.clamp_min(0.1)),
    "clamp_max": one(lambda x: x.clamp_max(0.1)),
    "hardtanh": one(F.hardtanh, F.relu6),
    "elu": one(F.elu, torch.nn.functional.elu_, F.selu),
    "log_sigmoid": one(F.logsigmoid),
    "pow": [*one(lambda x: x.square() ** 1.7), *two(lambda x, y: x.exp().pow(y))],
    # products
    "mul": two(lambda x, y: x * y, lambda x, y: x.mul_(y), torch.multiply),
    "div": two(lambda x, y: x / (2 + y.square()), lambda x, y: x.div_(2 + y.square()), torch.true_divide),
    "matmul": [(torch.matmul, [(2, 3, 4), (4, 5)])],
    "mm": [(torch.mm, [(3, 4), (4, 5)])],
    "rmatmul": [(lambda x, y: Tensor.__rmatmul__(x, y), [(4, 5), (3, 4)])],
    "bmm": [(torch.bmm, [(2, 3, 4), (2, 4, 5)])],
    "mv": [(torch.mv, [(3, 4), (4,)])],
    "dot": [(torch.dot, [(4,), (4,)])],
    "vdot": [(torch.vdot, [(4,), (4,)])],
    "einsum": [(lambda x, y: torch.einsum("ij,jk->ik", x, y), [(3, 4), (4, 5)])],
    "tensordot": [(lambda x, y: torch.tensordot(x, y, 1), [(3, 4), (4, 5)])],
    "bilinear": [(F.bilinear, [(3, 4), (3, 5), (2, 4, 5)])],
    "addmm": [(torch.addmm, [(5,), (3, 4), (4, 5)])],
    "baddbmm": [(torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)])],
    "addmv": [(torch.addmv, [(3,), (3, 4), (4,)])],
    "addbmm": [(torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)]), (torch.addr, [(3, 4), (3,), (4,)])],
    # layers
    "linear": [(F.linear, [(3, 4), (5, 4), (5,)])],
    "convolution": [
        (F.conv1d, [SIGNAL, (2, 3, 3)]),
        (lambda x, w: F.conv2d(x, w, padding=1, groups=2), [IMAGE, (4, 2, 3, 3)]),
        (F.conv3d, [VOLUME, (2, 3, 2, 2, 2)]),
    ],
    "transposed_convolution": [
        (F.conv_transpose1d, [SIGNAL, (3, 2, 3)]),
        (F.conv_transpose2d, [IMAGE, (4, 2, 3, 3)]),
        (F.conv_transpose3d, [VOLUME, (3, 2, 2, 2, 2)]),
    ],
    "multi_head_attention_forward": one(
        lambda x: nn.MultiheadAttention(4, 2, dtype=x.dtype)(x, x, x)[0], shape=(2, 3, 4)
    ),
    "lstm": one(lambda x: nn.LSTM(4, 2, dtype=x.dtype)(x)[0], shape=(2, 3, 4)),
    "gru": one(lambda x: nn.GRU(4, 2, dtype=x.dtype)(x)[0], shape=(2, 3, 4)),
    "rnn_tanh": one(lambda x: nn.RNN(4, 2, dtype=x.dtype)(x)[0], shape=(2, 3, 4)),
    "rnn_relu": one(lambda x: nn.RNN(4, 2, nonlinearity="relu", dtype=x.dtype)(x)[0], shape=(2, 3, 4)),
    "batch_norm": [
        (
            lambda x, weight, bias: F.batch_norm(
                x, torch.full((4,), 0.3).double(), torch.full((4,), 1.7).double(), weight, bias
            ),
            [FLAT, (4,), (4,)],
        ),
        (
            lambda x, weight, bias: ATEN._native_batch_norm_legit_no_training(
                x, weight, bias, torch.full((4,), 0.3).double(), torch.full((4,), 1.7).double(), 0.1, 1e-5
            )[0],
            [FLAT, (4,), (4,)],
        ),
        (
            lambda x, weight, bias: ATEN._native_batch_norm_legit(
                x, weight, bias, torch.full((4,), 0.3).double(), torch.full((4,), 1.7).double(), False, 0.1, 1e-5
            )[0],
            [FLAT, (4,), (4,)],
        ),
    ],
    "group_norm": [(lambda x, weight, bias: F.group_norm(x, 2, weight, bias), [IMAGE, (4,), (4,)])],
    "layer_norm": [(lambda x, weight, bias: F.layer_norm(x, (4,), weight, bias), [FLAT, (4,), (4,)])],
    # constants, and sizes that numbers decide
    "zeros": one(torch.zeros_like, lambda x: x.new_zeros(3), lambda x: torch.zeros(3) + 0 * len(x)),
    "filled": one(
        torch.ones_like,
        lambda x: torch.full_like(x, 2.0),
        lambda x: torch.empty_like(x).fill_(1.0),
        lambda x: x.new_ones(2),
        lambda x: x.new_full((2,), 3.0),
        lambda x: x.new_empty(2).fill_(1.0),
    ),
    "drawn": one(
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: x.new_empty_strided((2, 2), (2, 1)).fill_(1.0),
    ),
    "nonzero": one(lambda x: x.relu().nonzero()),
    "masked_select": one(lambda x: x.masked_select(x > 0)),
    "_unique": one(lambda x: ATEN._unique(x.relu())[0]),
    "_unique2": one(lambda x: torch.unique(x.relu())),
    "unique_dim": one(lambda x: torch.unique((x[:, :1] > 0).double(), dim=0)),
    "unique_consecutive": one(lambda x: torch.unique_consecutive(x.relu())),
    "bincount": one(lambda x: torch.bincount((3 + 2 * x).long().clamp(min=0).flatten())),
}
CALLS |= {
    name: one(getattr(F, name, None) or getattr(torch, name))
    for name in (
        *("hardshrink", "softshrink", "hardsigmoid", "tanh", "sigmoid", "gelu", "silu", "softplus", "celu", "mish"),
        *("hardswish", "exp", "sin", "cos", "erf", "expm1", "atan", "softsign", "tanhshrink", "square"),
    )
}
CALLS |= {name: one(getattr(torch, name)) for name in ("exp2", "sinh", "cosh", "asinh", "erfc")}


def behind(name: str, before: Callable[[Tensor], Tensor] = lambda x: x, *rest: Any) -> list[Call]:
    """Calls of a function of torch's behind another one, which leads to where it is defined."""
    return one(lambda x: getattr(torch, name)(before(x), *rest))


CALLS |= {
    name: behind(name, lambda x: 0.5 + x.square()) for name in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log10")
}
CALLS |= {name: behind(name, lambda x: 0.9 * x.sin()) for name in ("tan", "asin", "acos")}
CALLS |= {name: behind(name, lambda x: x, 1) for name in ("logsumexp", "var", "std", "prod", "cumprod", "logcumsumexp")}
CALLS["log1p"] = one(lambda x: torch.log1p(x.sigmoid()))
CALLS["steps"] = one(torch.sign, torch.floor, torch.ceil, torch.round, torch.trunc)
CALLS["softmax"] = one(lambda x: x.softmax(1), lambda x: ATEN._safe_softmax(x, 1))
CALLS["log_softmax"] = one(lambda x: x.log_softmax(1))
CALLS["linalg_vector_norm"] = one(lambda x: torch.linalg.vector_norm(x, dim=1))

# further names of Python's, and what only channels are followed through
CALLS["alias"] += one(torch.positive)
CALLS["requires_grad"] = one(lambda x: x.requires_grad_())
CALLS["rounded"] = one(lambda x: x.half(), lambda x: x.bfloat16())
CALLS["convert"] += one(lambda x: x.type(torch.float32), lambda x: x.cpu(), lambda x: x.type_as(x))
CALLS["dropout"] += one(
    lambda x: F.alpha_dropout(x, training=False), lambda x: F.feature_alpha_dropout(x, training=False), shape=SIGNAL
)
CALLS["view"] += one(lambda x: x.view_as(x.clone()), lambda x: x.reshape_as(x.clone()))
CALLS["view_as_complex"] = CALLS["view_as_real"]
CALLS["__get__"] = one(lambda x: x.T)
CALLS["expand"] += one(lambda x: x.expand_as(x.clone()), lambda x: x.broadcast_to(2, 3, 4))
CALLS["permute"] += one(lambda x: x.moveaxis(0, 1))
CALLS["transpose"] += one(lambda x: x.swapdims(0, 1))
CALLS["split"] += one(lambda x: x.tensor_split(2, 1), lambda x: x.split_with_sizes([1, 3], 1))
CALLS["rot90"] = one(lambda x: x.rot90())
CALLS["repeat"] += one(lambda x: x.tile(2, 1))
CALLS["gather"] += one(lambda x: x.take_along_dim(PLACES, 0))
CALLS["stack"] += two(
    lambda x, y: torch.hstack([x, y]), lambda x, y: torch.vstack([x, y]), lambda x, y: torch.dstack([x, y])
)


def written(x: Tensor, y: Tensor) -> Tensor:
    result = x.clone()
    result[1:] = y[1:]
    return result


CALLS["setitem"] = two(written)
CALLS["sub"] += two(lambda x, y: x.subtract(y))
CALLS["rsub"] += two(lambda x, y: torch.rsub(x, y))
CALLS["abs"] += one(torch.absolute)
CALLS["neg"] += one(torch.negative)
CALLS["div"] += two(lambda x, y: x.divide(y))
CALLS["clamp"] += one(
    lambda x: x.clone().clamp_(-0.3, 0.3), lambda x: x.clip(-0.3, 0.3), lambda x: x.clone().clamp_min_(0.1)
)
CALLS["clamp_max"] += one(lambda x: x.clone().clamp_max_(0.1))
CALLS["hardtanh"] += one(lambda x: F.hardtanh_(x.clone()))
CALLS["threshold"] += one(lambda x: F.threshold_(x.clone(), 0.1, 0.1))
CALLS["pow"] += one(lambda x: x**2)
CALLS["compared"] = two(
    *(torch.gt, torch.ge, torch.lt, torch.le, torch.eq, torch.ne),
    *(lambda x, y: x > y, lambda x, y: x >= y, lambda x, y: x < y, lambda x, y: x <= y),
    *(lambda x, y: torch.isnan(x), lambda x, y: torch.logical_not(x)),
)
CALLS["rdiv"] = two(
    *(lambda x, y: 2 / (x.square() + 1), lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, x, y)),
    *(lambda x, y: torch.addcdiv(x, x, y.square() + 1), lambda x, y: torch.remainder(x, y.square() + 1)),
    *(lambda x, y: torch.fmod(x, y.square() + 1), lambda x, y: torch.nan_to_num(x)),
)
CALLS["glu"] = one(F.glu)
CALLS["instance_norm"] = one(F.instance_norm, shape=IMAGE)
CALLS["rms_norm"] = one(lambda x: F.rms_norm(x, [4]))
CALLS["normalize"] = one(F.normalize)
CALLS["attention"] = two(lambda x, y: F.scaled_dot_product_attention(x, y, y), shape=(2, 3, 4))
CALLS["linalg_vector_norm"] += one(lambda x: x.norm(dim=1))
CALLS["statistics"] = one(
    *(lambda x: torch.std_mean(x, 1), lambda x: torch.var_mean(x, 1), lambda x: x.argmax(1), lambda x: x.argmin(1)),
    *(lambda x: (x > 0).all(1), lambda x: (x > 0).any(1)),
)
CALLS["pad"] += one(lambda x: torch.constant_pad_nd(x, [1, 1]), shape=IMAGE)
CALLS["filled"] += one(lambda x: x.new_tensor([1.0]))
IN_PLACE = "scatter scatter_add index_add index_copy index_fill index_put masked_scatter masked_fill".split()
"""Whose calls above are not in place; the names that are stand in the table beside them."""

UNSEEN = {
    "cuda",
    *("__gt__", "__ge__", "__lt__", "__le__"),  # which hand themselves on
    *(f"{name}_" for name in IN_PLACE),
    *("mkldnn_max_pool2d", "mkldnn_convolution", "_convolution", "cudnn_batch_norm"),  # in other builds
    "_efficientzerotensor",  # inside forward mode
    "dropout_",  # which hands itself on to `dropout`
}
"""Names that no call here meets on this machine."""

CASES = [
    pytest.param(operation, function, shapes, id=f"{operation.name}-{number}")
    for operation in OPERATIONS
    for number, (function, shapes) in enumerate(CALLS.get(operation.name, []))
]


def draw(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
