"""The table of operations: what is declared of each is checked by calls, and no other module keeps one of its own."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spiritlevel as sl
from spiritlevel.binding.problem import Problem
from spiritlevel.watching import operations, path_rules
from spiritlevel.watching.operations import OPERATIONS, Chooses, Degree, Kind, Operation, called, dispatched
from spiritlevel.watching.paths import Paths
from spiritlevel.watching.recording import GradientNorms, analyse_few
from spiritlevel.watching.structure import analyse

ROOT = Path(sl.__file__).parent
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


def cases(condition: Callable[[Operation], Any]) -> Any:
    """The calls of the operations of which something is declared."""
    chosen = [case for case in CASES if condition(case.values[0])]
    return pytest.mark.parametrize(("operation", "function", "shapes"), chosen)


def draw(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def flat(function: Callable[..., Any], tensors: list[Tensor]) -> Tensor:
    """All numbers that a call returns, and nothing that it writes."""
    torch.manual_seed(0)
    result = function(*(tensor.clone() for tensor in tensors))
    return torch.cat([leaf.double().reshape(-1) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])


def jacobian(function: Callable[..., Any], tensors: list[Tensor], index: int, step: float = 1e-6) -> Tensor:
    """By differences, (numbers of the result, numbers of a tensor)."""
    columns = []
    for place in range(tensors[index].numel()):
        ends = []
        for sign in (1, -1):
            moved = [tensor.clone() for tensor in tensors]
            moved[index].view(-1)[place] += sign * step
            ends.append(flat(function, moved))
        columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, 1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- names


class Seen:
    """The functions and ATen operations that calls inside meet, at either level."""

    def __init__(self) -> None:
        seen = self

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.functions.add(func)
                return func(*args, **(kwargs or {}))

        class Dispatches(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.dispatches.add(func)
                return func(*args, **(kwargs or {}))

        self.functions, self.dispatches = set[Any](), set[Any]()
        self.modes = Functions(), Dispatches()

    def run(self, function: Callable[..., Any], tensors: list[Tensor]) -> None:
        with self.modes[0], self.modes[1]:
            function(*tensors)

    @property
    def operations(self) -> list[Operation]:
        return [*map(called, self.functions), *map(dispatched, self.dispatches)]


def test_every_operation_has_calls() -> None:
    assert sorted(CALLS) == sorted(operation.name for operation in OPERATIONS)


def test_no_name_has_two_meanings() -> None:
    functions = [function for op in OPERATIONS for name in op.functions for function in {*operations.spellings(name)}]
    assert len(functions) == len(set(functions))
    names = [name for operation in OPERATIONS for name in operation.aten]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_calls_of_an_operation_meet_it(operation: Operation) -> None:
    if not (operation.functions or operation.aten):  # an attribute, which every tensor has as a function of its own
        assert operations.called_by_name(operation.name) is operation
        return
    for function, shapes in CALLS[operation.name]:
        seen = Seen()
        seen.run(function, draw(shapes))
        assert operation in seen.operations


def test_every_name_is_met_by_a_call() -> None:
    """Some ATen operations are taken apart before they are dispatched, except in inference mode."""
    seen = Seen()
    for function, shapes in itertools.chain(*CALLS.values()):
        seen.run(function, draw(shapes))
        with torch.inference_mode():
            seen.run(function, draw(shapes))
    met = {name for op in OPERATIONS for name in op.functions if seen.functions & {*operations.spellings(name)}}
    assert {name for operation in OPERATIONS for name in operation.functions} - met <= UNSEEN
    names = {operations.aten_name(func) for func in seen.dispatches}
    assert {name for operation in OPERATIONS for name in operation.aten} - names <= UNSEEN
    assert all(hasattr(ATEN, name) for operation in OPERATIONS for name in operation.aten)


def test_an_operation_of_another_library_is_not_believed_by_its_name() -> None:
    """A library may call anything `relu`; what it does is not known."""
    with torch.library._scoped_library("spiritlevel_test", "DEF") as library:
        library.define("relu(Tensor x) -> Tensor")
        library.impl("relu", lambda x: x.square(), "CompositeExplicitAutograd")
        mine = torch.ops.spiritlevel_test.relu
        assert dispatched(mine.default) is operations.UNKNOWN
        assert called(mine) is called(mine.default) is operations.UNKNOWN

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 2)

            def forward(self, x: Tensor) -> Tensor:
                return mine(self.layer(x))

        problem = Problem(Net())
        with problem.active():
            structure = analyse(problem, torch.randn(4, 3), 4)
        assert "spiritlevel_test::relu" in structure.reason


# ---------------------------------------------------------------- degrees


@cases(lambda operation: operation.degree is Degree.LINEAR and operation.homogeneous)
def test_what_is_linear_is_additive_and_homogeneous(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x, y = draw(shapes, 1), draw(shapes, 2)
    mixed = [2 * a - 3 * b for a, b in zip(x, y, strict=True)]
    rounding = 1e-5 if operation.name == "convert" else 1e-10  # to float32 and back
    close(flat(function, mixed), 2 * flat(function, x) - 3 * flat(function, y), rounding)


@cases(lambda operation: operation.degree is Degree.PIECEWISE)
def test_what_is_piecewise_linear_is_linear_nearby(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x, direction = draw(shapes, 1), draw(shapes, 2)
    left, right = ([a + sign * 1e-3 * d for a, d in zip(x, direction, strict=True)] for sign in (-1, 1))
    close(flat(function, left) + flat(function, right), 2 * flat(function, x))
    far = [20 * d for d in direction]  # but is not linear on the whole, which would be a stronger thing to say
    whole = flat(function, [a + f for a, f in zip(x, far, strict=True)])
    opposite = flat(function, [a - f for a, f in zip(x, far, strict=True)])
    assert not torch.allclose(whole + opposite, 2 * flat(function, x))


@cases(lambda operation: operation.homogeneous)
def test_what_is_homogeneous_passes_a_positive_factor_on(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    together = operation.degree in (Degree.LINEAR, Degree.PIECEWISE)
    scaled = [3.5 * a if together or not index else a for index, a in enumerate(x)]
    if operation.name == "linear":  # without its bias
        x, scaled = x[:2], scaled[:2]
    close(flat(function, scaled), 3.5 * flat(function, x), 1e-5 if operation.name == "convert" else 1e-10)


def check_linear_in(function: Callable[..., Any], x: list[Tensor], index: int) -> None:
    """Affine in one tensor, the others held."""
    values = []
    for factor in (0.0, 1.0, -2.0):
        moved = [*x]
        moved[index] = draw([tuple(x[index].shape)], 5)[0] * factor + x[index]
        values.append(flat(function, moved))
    close(values[2] - values[0], -2 * (values[1] - values[0]))


def curves_in_both(function: Callable[..., Any], x: list[Tensor], first: int, second: int) -> bool:
    both = [*x]
    values = []
    for factor in (-1.0, 0.0, 1.0):
        for index in (first, second):
            both[index] = x[index] + factor
        values.append(flat(function, both))
    return not torch.allclose(values[0] + values[2], 2 * values[1])


BILINEAR = {Degree.BILINEAR: (0, 1), Degree.BATCH_NORM: (0, 1), Degree.ADDED_BILINEAR: (1, 2)}


@cases(lambda operation: operation.degree in BILINEAR)
def test_what_is_bilinear_is_linear_in_each_tensor_and_in_no_two_factors_together(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    assert operation.degree is not None
    factors = BILINEAR[operation.degree]
    for index in range(len(x)):
        if index or operation.kink is None:  # a slope has a kink in its input
            check_linear_in(function, x, index)
    assert curves_in_both(function, x, *factors)
    for index in set(range(len(x))) - {*factors}:  # what is added
        for factor in factors:
            assert not curves_in_both(function, x, index, factor)


@cases(lambda operation: operation.degree is Degree.QUOTIENT)
def test_a_quotient_is_linear_above_and_curved_below(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    check_linear_in(function, x, 0)
    with pytest.raises(AssertionError):
        check_linear_in(function, x, 1)


@cases(lambda operation: operation.degree is Degree.NORMALISED)
def test_normalisations_are_linear_in_weight_and_bias_only(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    for index in (1, 2):
        check_linear_in(function, x, index)
    with pytest.raises(AssertionError):
        check_linear_in(function, x, 0)


@cases(lambda operation: operation.degree is Degree.CONSTANT)
def test_a_constant_does_not_look_at_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    assert torch.equal(flat(function, draw(shapes, 1)), flat(function, draw(shapes, 2)))


@cases(lambda operation: operation.degree is Degree.SMOOTH)
def test_what_is_called_curved_is_curved(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    with pytest.raises(AssertionError):
        check_linear_in(function, draw(shapes, 1), 0)


# ---------------------------------------------------------------- numbers and places


@cases(lambda operation: operation.elementwise)
def test_what_is_elementwise_has_a_diagonal_jacobian(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    for index in range(min(operation.elementwise, len(x))):
        found = jacobian(function, x, index)
        assert found.shape[0] == found.shape[1]
        assert torch.equal(found, found.diagonal().diag())
        assert bool(found.any())


@cases(lambda operation: operation.vanishes)
def test_what_vanishes_is_zero_where_one_tensor_is(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    for index in range(len(shapes)):
        x = draw(shapes, 1)
        assert bool(flat(function, x).any())
        x[index].zero_()
        assert not flat(function, x).any()


@cases(lambda operation: operation.keeps_order)
def test_copies_and_views_keep_numbers_and_their_order(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    found, expected = flat(function, x), x[0].reshape(-1)
    close(found, expected, 1e-6) if operation.name == "convert" else close(found, expected, 0.0)


@cases(lambda operation: operation.kind is Kind.ALIAS)
def test_an_alias_is_the_same_memory(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    (x,) = draw(shapes, 1)
    assert function(x).data_ptr() == x.data_ptr()


@cases(lambda operation: operation.kind in (Kind.MOVING, Kind.JOIN))
def test_what_moves_numbers_takes_them_from_its_tensors(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    there = {float(number) for tensor in x for number in tensor.reshape(-1)}
    if operation.name == "col2im":  # which adds what falls on one place
        there |= {a + b for a, b in itertools.product(there, repeat=2)}
        there |= {float(n) for n in flat(function, x)[4::9]}
    assert {float(number) for number in flat(function, x)} <= {*there, 0.0}
    if operation.kind is Kind.JOIN:
        assert flat(function, x).numel() == sum(tensor.numel() for tensor in x)


@cases(lambda operation: operation.kind is Kind.SUM)
def test_what_meets_carries_a_common_factor_of_each_place(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    factor = draw(shapes[:1], 2)[0].exp()
    close(flat(function, [factor * tensor for tensor in x]), factor.reshape(-1) * flat(function, x))


@cases(lambda operation: operation.kind is Kind.MASK)
def test_a_mask_replaces_numbers_at_some_places(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    found = function(*x)
    kept = torch.stack([found == tensor for tensor in x]).any(0)
    assert bool(kept.any())
    assert not bool((found == x[0]).all())


@cases(lambda operation: operation.kind is Kind.REDUCTION)
def test_a_reduction_leaves_fewer_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    assert flat(function, draw(shapes)).numel() < math.prod(shapes[0])


@cases(lambda operation: operation.kind is Kind.SPATIAL)
def test_what_is_spatial_treats_every_channel_by_itself_and_alike(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    (x,) = draw(shapes, 1)
    order = torch.arange(x.shape[1]).flip(0)
    close(function(x[:, order]), function(x)[:, order])
    changed = x.clone()
    changed[:, 0] += 1
    before, after = function(x), function(changed)
    assert torch.equal(before[:, 1:], after[:, 1:])
    assert not torch.equal(before[:, :1], after[:, :1])


@cases(lambda operation: operation.by_memory)
def test_what_reads_memory_gives_other_numbers_for_another_layout(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes, 1)
    laid_out = [x[0].T.contiguous().T, *x[1:]]
    assert not torch.equal(function(*x), function(*laid_out))


@cases(lambda operation: operation.chooses is Chooses.SIZE and operation.degree is None)
def test_numbers_decide_the_size(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    sizes = {flat(function, draw(shapes, seed)).numel() for seed in range(20)}
    assert len(sizes) > 1


@cases(lambda operation: operation.chooses is Chooses.ROWS)
def test_rows_are_chosen_by_whole_numbers(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    given: list[Any] = []

    class Arguments(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if dispatched(func) is operation:
                given.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return func(*args, **(kwargs or {}))

    with Arguments():
        function(*draw(shapes))
    assert any(not tensor.is_floating_point() for tensor in given)


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3]).double()),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0),
    "clamp": lambda x: x.clamp_min(0.0),
}


def test_kinks_are_where_they_are_said_to_be() -> None:
    assert {operation.name for operation in OPERATIONS if operation.kink} == {*KINKS}
    for function in KINKS.values():
        left, middle, right = function(torch.tensor([-1e-3, 0.0, 1e-3]).double())
        assert abs((right - middle) - (middle - left)) > 1e-4


# ---------------------------------------------------------------- rules


@cases(lambda op: op.path not in (None, path_rules.unreached) and op.degree is Degree.LINEAR and op.aten)
def test_the_rule_of_paths_squares_the_jacobian_of_a_linear_operation(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    """Of a linear operation J, with sums s behind each number that comes in, the sums behind the result are J² s."""
    check_paths(function, draw(shapes, 1), len(shapes))


@cases(lambda op: op.path is not None and op.degree in (Degree.BILINEAR, Degree.QUOTIENT) and op.kink is None)
def test_the_rule_of_paths_squares_the_weights_of_a_product(
    operation: Operation, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    x = draw(shapes[:2], 1)
    check_paths(function, x, 1)


def check_paths(function: Callable[..., Any], x: list[Tensor], reached: int) -> None:
    sums = [tensor.square() + 0.1 for tensor in draw([tuple(tensor.shape) for tensor in x], 3)]
    paths = Paths(x[0])
    for tensor, behind in list(zip(x, sums, strict=True))[:reached]:
        paths.known[id(tensor)] = behind
        paths.kept.append(tensor)
    with paths:
        result = torch.func.functionalize(function)(*x)
    found = torch.cat([paths.squares(leaf).reshape(-1) for leaf in tree_leaves(result)])
    parts = [jacobian(function, x, index, 0.5).square() @ sums[index].reshape(-1) for index in range(reached)]
    close(found, torch.stack(parts).sum(0), 1e-6)


WITH_NORMS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = {
    # what is called with the values and the parameters; shapes of a sample's values, of the result, of the parameters
    "add": (lambda x, b: x + b, (4,), (4,), [(4,)]),
    "sub": (lambda x, b: x - b, (4,), (4,), [(4,)]),
    "rsub": (lambda x, b: Tensor.__rsub__(x, b), (4,), (4,), [(4,)]),
    "mul": (lambda x, w: w * x, (4,), (4,), [(4,)]),
    "matmul": (torch.matmul, (4,), (5,), [(4, 5)]),
    "mm": (torch.mm, (4,), (5,), [(4, 5)]),
    "addmm": (lambda x, b, w: torch.addmm(b, x, w), (4,), (5,), [(5,), (4, 5)]),
    "linear": (F.linear, (4,), (5,), [(5, 4), (5,)]),
    "convolution": (F.conv1d, (2, 6), (3, 4), [(3, 2, 3), (3,)]),
    "transposed_convolution": (F.conv_transpose1d, (2, 6), (3, 8), [(2, 3, 3), (3,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double(), w, b),
        (3, 4),
        (3, 4),
        [(3,), (3,)],
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (4, 3), (4, 3), [(4,), (4,)]),
    "prelu": (F.prelu, (3, 4), (3, 4), [(3,)]),
    "embedding": (F.embedding, (6,), (6, 2), [(5, 2)]),
}


def test_the_rules_of_norms_are_taken_and_fit() -> None:
    """`GradientNorms` compares each rule with autograd, and names the parameters whose rule does not fit."""
    assert {operation.name for operation in OPERATIONS if operation.norm} == {*WITH_NORMS}
    for name, (function, before, after, shapes) in WITH_NORMS.items():

        class Net(nn.Module):
            def __init__(self, function: Any, after: Any, shapes: Any) -> None:
                super().__init__()
                self.function = function
                self.own = nn.ParameterList([nn.Parameter(tensor) for tensor in draw(shapes, 1)])
                self.head = nn.Linear(math.prod(after), 2).double()

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.function(x, *self.own).flatten(1))

        inputs = draw([(5, *before)], 2)[0]
        if name == "embedding":
            inputs = torch.randint(0, 5, (5, *before), generator=torch.Generator().manual_seed(0))
        problem = Problem(Net(function, after, shapes))
        with problem.active():
            assert not GradientNorms(problem, inputs, analyse_few(problem, inputs), 2).without_rule, name


# ---------------------------------------------------------------- what is not known


def lacks(operation: Operation) -> Iterator[str]:
    """The columns that an operation could have, and has not."""
    if not operation.functions:
        yield "functions"
    if not operation.aten:
        yield "aten"
    if operation.degree is None:
        yield "degree"
    if operation.path is None and operation.aten and operation.degree not in (Degree.SMOOTH, Degree.NORMALISED):
        yield "path"
    if operation.norm is None and (operation.layer or operation.degree in (*BILINEAR, Degree.QUOTIENT)):
        yield "norm"
    if operation.channels is None and operation.functions:
        yield "channels"
    if operation.taylor is None and operation.aten:
        yield "taylor"


LACKING = {
    "functions": """
        __get__ _fft_c2c _fft_c2r _fft_r2c _unique _unique2 as_strided_scatter bincount index
        interpolate_otherwise lift masked_select nonzero pad_by_copies unique_consecutive unique_dim
    """,
    "degree": """
        __get__ _unique _unique2 as_strided_scatter attention bilinear bincount compared cumprod detach einsum
        glu gru instance_norm linalg_vector_norm log_softmax logcumsumexp logsumexp lp_pool lstm masked_select
        multi_head_attention_forward nonzero normalize prod rdiv requires_grad rmatmul rms_norm rnn_relu
        rnn_tanh rot90 rounded setitem softmax statistics std steps tensordot unique_consecutive unique_dim var
    """,
    "aten": """
        __get__ attention bilinear compared dropout einsum glu gru instance_norm lp_pool lstm
        multi_head_attention_forward normalize rdiv requires_grad rmatmul rms_norm rnn_relu rnn_tanh rot90
        rounded setitem softsign square statistics tanhshrink tensordot transposed_convolution
    """,
    "path": """
        _fft_c2c _fft_c2r _fft_r2c _unique _unique2 addbmm amin as_strided as_strided_scatter avg_pool1d
        batch_norm bincount clamp_max cumprod diag_embed drawn embedding fill fmax gather hardshrink hardsigmoid
        hardtanh index_add index_copy index_fill index_put interpolate_otherwise kthvalue linalg_vector_norm
        log_softmax logcumsumexp logsumexp masked_fill masked_scatter masked_select median min minimum nanmedian
        nonzero prod repeat_interleave scatter scatter_add softmax softshrink sort std steps take topk trace
        unique_consecutive unique_dim var vdot view_as_complex view_as_real where
    """,
    "taylor": """
        _unique _unique2 as_strided as_strided_scatter bincount masked_select nonzero unique_consecutive unique_dim
    """,
    "norm": """
        addbmm addmv baddbmm bilinear bmm div dot einsum gru lstm multi_head_attention_forward mv rmatmul
        rnn_relu rnn_tanh tensordot vdot
    """,
    "channels": """
        addbmm addmv as_strided bilinear col2im copy cumprod cumsum dot fill fmax gru index_add index_copy
        index_fill index_put kthvalue log_softmax logcumsumexp lstm masked_scatter multi_head_attention_forward
        mv nanmedian rnn_relu rnn_tanh scatter scatter_add select_scatter slice_scatter softmax sort tensordot
        topk trace vdot
    """,
}


def test_what_operations_lack_is_listed() -> None:
    """Whoever teaches an operation strikes it out here; whoever adds one says what it lacks."""
    found: dict[str, list[str]] = {}
    for operation in OPERATIONS:
        for column in lacks(operation):
            found.setdefault(column, []).append(operation.name)
    assert {column: sorted(names) for column, names in found.items()} == {
        column: sorted(names.split()) for column, names in LACKING.items()
    }


# ---------------------------------------------------------------- one table, and no other

EXEMPT = {
    "watching/operations.py",
    "binding/rewrites.py",  # what PyTorch's derivatives get wrong, below everything that watches
    "loading/exported.py",  # arithmetic of sizes that a file may ask for: Python's own, not of tensors
}
NAMES = {name.removeprefix("F.") for operation in OPERATIONS for name in (*operation.functions, *operation.aten)}
OTHER_MEANINGS = {"mean", "sum", "max", "min", "median", "trace", "float", "double", "index", "copy", "sort", "linear"}
OTHER_MEANINGS |= {"cpu", "cuda", "all", "any", "to", "type", "norm", "half", "median"}
"""Words that name more than operations: reductions of a loss, measures, columns."""


def operation_named(node: ast.expr) -> str:
    """The operation that an element of a collection names: "relu", F.relu, torch.relu, torch.ops.aten.relu.default."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value in NAMES - OTHER_MEANINGS else ""
    parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
    known = [part for part in parts[1:] if part in NAMES]
    return known[0] if known and parts[0] in ("F", "torch", "Tensor", "_aten", "aten") else ""


def collections_of(tree: ast.AST) -> Iterator[tuple[int, list[ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Set):
            yield node.lineno, node.elts
        elif isinstance(node, ast.Tuple | ast.List):  # of functions, perhaps to be called one after the other
            yield node.lineno, [element for element in node.elts if isinstance(element, ast.Constant)]
        elif isinstance(node, ast.Dict):
            yield node.lineno, [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n\n" not in node.value:
            words = node.value.split()
            if all(word.isidentifier() for word in words):
                yield node.lineno, [ast.Constant(word) for word in words]


def tables(code: str) -> list[str]:
    """Collections in which most elements name operations, two or more."""
    found = []
    for line, elements in collections_of(ast.parse(code)):
        named = {operation_named(element) for element in elements} - {""}
        if len(named) > 1 and 2 * len(named) > len(elements):
            found.append(f"line {line}: {', '.join(sorted(named))}")
    return found


def test_no_other_module_keeps_a_table_of_operations() -> None:
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith("papers/"):  # which name the activations of networks
            continue
        if path not in EXEMPT and (lines := tables(file.read_text(encoding="utf-8"))):
            found[path] = lines
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        'KNOWN = frozenset("relu leaky_relu abs".split())',
        'KNOWN = {"relu": 1, "tanh": 2}',
        'if name in ("add", "add_", "sub"): pass',
        "RULES = {F.linear: rule, torch.conv2d: other}",
        "SAME = {_aten.alias.default, torch.ops.aten.detach.default}",
    ],
)
def test_the_search_for_tables_finds_them(code: str) -> None:
    assert tables(code)


def test_the_search_for_tables_lets_other_words_pass() -> None:
    assert not tables('"""Take the mean of a sum, or add it."""')
    assert not tables('if reduction in ("mean", "sum"): pass')
    assert not tables("x = F.relu(torch.tanh(y))")


def test_python_knows_a_function_by_the_entry_of_its_plain_name() -> None:
    for operation in OPERATIONS:
        for name in operation.functions:
            assert operations.called_by_name(operations.plain_name(name)) is operation, name
    assert operations.called_by_name("no_such_function") is operations.UNKNOWN
