"""The blocks that random networks are made of: every one takes whatever it is given, reshaped, cut or filled.

A block says which kind of input it wants and which options it has, the simplest first; `random_networks` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

Shape = tuple[int, ...]

# ---------------------------------------------------------------- reshaping


def fit(x: Tensor, shape: Shape) -> Tensor:
    """The numbers of every sample in another shape, cut or filled with zeros."""
    flat, size = x.flatten(1), math.prod(shape)
    if flat.shape[1] < size:
        flat = F.pad(flat, (0, size - flat.shape[1]))
    return flat[:, :size].reshape(-1, *shape)


def as_kind(x: Tensor, kind: str) -> Tensor:
    """A batch of vectors (N, D), of sequences (N, T, D) or of images (N, C, H, W), without a number lost."""
    if kind == "flat":
        return x.flatten(1)
    if kind == "sequence":
        if x.ndim == 4:
            return x.flatten(2).transpose(1, 2)
        length = _divisor(x.shape[1]) if x.ndim == 2 else 1
        return x if x.ndim == 3 else x.reshape(len(x), length, -1)
    if kind == "image":
        if x.ndim == 3:
            return x.transpose(1, 2).unsqueeze(2)
        return x if x.ndim == 4 else x.reshape(len(x), 1, _divisor(x.shape[1]), -1)
    return x


def _divisor(size: int) -> int:
    """The largest divisor up to the square root."""
    return max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)


class With(nn.Module):
    """A function of a module's own parameters and parts, and of the input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Fitted(nn.Module):
    """A block behind the reshaping that it needs."""

    def __init__(self, kind: str, inner: nn.Module) -> None:
        super().__init__()
        self.kind, self.inner = kind, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(as_kind(x, self.kind))


# ---------------------------------------------------------------- the table of blocks

BLOCKS: dict[str, tuple[str, dict[str, list[Any]], Callable[..., Any], float]] = {}
"""By name: the kind of its input, the choices for its options (the simplest first), its builder, how often."""


def block(kind: str, /, often: float = 1.0, **choices: list[Any]) -> Callable[[Any], Any]:
    def add(build: Callable[..., Any]) -> Callable[..., Any]:
        BLOCKS[build.__name__.strip("_")] = kind, choices, build, often
        return build

    return add


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "softsign": F.softsign,
    "softshrink": lambda x: F.softshrink(x, 0.1),
    "hardshrink": lambda x: F.hardshrink(x, 0.1),
    "tanhshrink": F.tanhshrink,
    "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, -0.2),
    "relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "elu in place": lambda x: F.elu(x + 0, inplace=True),
    "square": torch.square,
    "cube": lambda x: x**3,
    "sin": torch.sin,
    "abs": torch.abs,
    "exp": lambda x: torch.exp(x.clamp(max=2)),
    "log1p of abs": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.square() + 0.1),
    "reciprocal": lambda x: 1 / (1.5 + x.square()),
    "erf": torch.erf,
    "atan": torch.atan,
    "sinc": torch.sinc,
    "xlogy": lambda x: torch.xlogy(x.square() + 0.1, x.square() + 0.1),
    "hypot": lambda x: torch.hypot(x, torch.ones_like(x)),
    "logaddexp": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "lerp": lambda x: torch.lerp(x, x.square(), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.2),
    "addcdiv": lambda x: torch.addcdiv(x, x, 2 + x.square()),
    "copysign": lambda x: torch.copysign(x, x.detach().roll(1, -1)),
    "where": lambda x: torch.where(x > 0, x.square(), 0.3 * x),
    "where tanh": lambda x: torch.where(x > 0, torch.tanh(x), x),
    "clamp": lambda x: x.clamp(-0.7, 0.9),
    "float power": lambda x: (x.abs() + 0.2) ** 1.5,
    "nan_to_num": torch.nan_to_num,
    "ldexp": lambda x: torch.ldexp(x, torch.ones_like(x)),
    "expm1": lambda x: torch.expm1(x.clamp(max=2)),
    "lgamma": lambda x: torch.lgamma(x.square() + 1),
    "i0": torch.special.i0,
    "floor added": lambda x: x + x.detach().floor(),
    "fmod": lambda x: torch.fmod(x, 1.7),
    "remainder": lambda x: torch.remainder(x, 1.7),
    "masked_fill": lambda x: x.masked_fill(x < -0.2, 0.5),
    "complex": lambda x: (x * torch.exp(1j * x)).real,
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "double and back": lambda x: x.double().square().to(x.dtype),
}


@block("any", often=12, name=list(ELEMENTWISE))
def elementwise(shape: Shape, name: str) -> nn.Module:
    return With(lambda own, x: ELEMENTWISE[name](x))


@block(
    "any", often=3, name=["ReLU", "Tanh", "PReLU", "GELU", "SiLU", "Softplus", "Hardswish", "ELU", "Dropout", "ReLU6"]
)
def activation(shape: Shape, name: str) -> nn.Module:
    return getattr(nn, name)()


@block("any", where=["last", "all", "one"])
def scale_and_shift(shape: Shape, where: str) -> nn.Module:
    size = {"last": (shape[-1],), "all": shape, "one": (1,)}[where]
    return With(lambda own, x: x * own.scale + own.shift, scale=torch.ones(size), shift=torch.ones(size))


def _padded_into(x: Tensor) -> Tensor:
    result = x.new_zeros(len(x), x.shape[1] + 2)
    result[:, 1:-1] = x
    return result


def _into_slices(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    result = torch.empty_like(x)
    result[:, :half] = x[:, :half].tanh()
    result[:, half:].copy_(x[:, half:])
    return result


def _wrapped(x: Tensor) -> Tensor:
    """Circular padding by hand: the ends are copied out of the tensor that they are written to."""
    result = x.new_empty(len(x), x.shape[1] + 2)
    result[:, 1:-1] = x
    result[:, :1] = result[:, -2:-1]
    result[:, -1:] = result[:, 1:2]
    return result


def _through_view(x: Tensor) -> Tensor:
    result = x.clone()
    view = result.view(-1)
    view.mul_(0.5).add_(1)
    return result


def _through_column(x: Tensor) -> Tensor:
    result = x.clone()
    result[:, 0].tanh_()
    result.t()[-1].sub_(result[:, 0])
    return result


def _through_chunks(x: Tensor) -> Tensor:
    result = x.clone()
    for part in result.chunk(2, 1):
        part.mul_(part.detach().sum(1, keepdim=True).sign() + 2)
    return result


def _by_flag(x: Tensor) -> Tensor:
    result = x.clone()
    result[x > 0] = 0.2 * x[x > 0]
    return result


def _by_index(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    places = torch.arange(x.shape[1] - 1, -1, -1)
    result[:, places] = x.square()
    return result


def _accumulated(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1]) % 2
    rows = torch.arange(len(x))[:, None].expand(-1, x.shape[1])
    result = x.new_zeros(len(x), 2)
    return result.index_put_((rows, places.expand_as(rows)), x, accumulate=True)


def _columns_twice(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).floor_divide(2).expand(x.shape)


def _scatter_reduced(how: str) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        start = torch.ones_like(x)
        return start.scatter_reduce(1, _columns_twice(x), x, how)

    return reduce


def _sample_loop(x: Tensor) -> Tensor:
    return torch.stack([row.tanh() if float(row.detach().sum()) > 0 else row for row in x])


def _ragged(x: Tensor) -> Tensor:
    """Rows of different lengths, padded to one."""
    lengths = [1 + int(row.detach().sum() > 0) * (x.shape[1] - 1) for row in x]
    padded = pad_sequence([row[:length].tanh() for row, length in zip(x, lengths, strict=True)], batch_first=True)
    return fit(padded, (x.shape[1],))


def _set_data(x: Tensor) -> Tensor:
    result = torch.zeros(x.shape, dtype=x.dtype)
    for index in range(x.shape[1]):
        result[..., index] = x[..., index] * (index + 1)
    return result


def _unfolded(x: Tensor) -> Tensor:
    return x.unfold(1, min(2, x.shape[1]), 1).prod(-1)


def _strided(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.as_strided((len(x), (x.shape[1] + 1) // 2), (x.shape[1], 2))


def _resorted(x: Tensor) -> Tensor:
    """The rows grouped by what they contain, handled together, and put back into their places."""
    chosen = x.detach().sum(1) > 0
    result = torch.empty_like(x)
    result[chosen] = x[chosen].square()
    result[~chosen] = x[~chosen]
    return result


def _out(x: Tensor) -> Tensor:
    return torch.cat([x, x.detach().mul(0.1)], 1)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "written into zeros": _padded_into,
    "written into slices": _into_slices,
    "wrapped by hand": _wrapped,
    "in place through a view": _through_view,
    "in place through a column": _through_column,
    "in place through chunks": _through_chunks,
    "written where a flag is": _by_flag,
    "written by an index": _by_index,
    "accumulated by an index": _accumulated,
    "column by column": _set_data,
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.arange(x.shape[1]).flip(0), x.tanh()),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(1, torch.arange(x.shape[1]).flip(0), x),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([0]), 0.3),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, torch.arange(x.shape[1]).flip(0).expand(x.shape), x),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, _columns_twice(x), x),
    "scatter_reduce sum": _scatter_reduced("sum"),
    "scatter_reduce mean": _scatter_reduced("mean"),
    "scatter_reduce amax": _scatter_reduced("amax"),
    "scatter_reduce prod": _scatter_reduced("prod"),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x.flip(1)),
    "masked_select": lambda x: torch.zeros_like(x).masked_scatter(x > 0, torch.masked_select(x, x > 0).tanh()),
    "slice_scatter": lambda x: torch.zeros_like(x).slice_scatter(x[:, 1:].tanh(), 1, 1),
    "select_scatter": lambda x: x.select_scatter(x[:, 0].square(), 1, 0),
    "diagonal_scatter": lambda x: torch.diag_embed(x).diagonal(dim1=1, dim2=2).tanh(),
    "as_strided": _strided,
    "unfold": _unfolded,
    "roll": lambda x: x.roll(1, 1) * 0.5 + x,
    "flip": lambda x: x.flip(1),
    "expand": lambda x: (x[:, :, None].expand(-1, -1, 2) * torch.tensor([1.0, -0.5], dtype=x.dtype)).flatten(1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "narrow": lambda x: x.narrow(1, 0, max(1, x.shape[1] - 1)),
    "gather": lambda x: x.gather(1, x.detach().argsort(1)),
    "take_along_dim": lambda x: x.take_along_dim(torch.arange(x.shape[1]).flip(0)[None], 1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(max(1, x.shape[1] - 1), 1).values,
    "kthvalue": lambda x: torch.cat([x, x.kthvalue(1, 1, keepdim=True).values], 1),
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "quantile": lambda x: x - torch.quantile(x, 0.5, dim=1, keepdim=True),
    "max and min": lambda x: torch.cat([x.amax(1, keepdim=True), x.amin(1, keepdim=True), x], 1),
    "argmax of one hot": lambda x: x * F.one_hot(x.detach().argmax(1), x.shape[1]).to(x) + 0.2 * x,
    "maximum": lambda x: torch.maximum(x, 0.5 * x.flip(1)),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: (1 + 0.3 * x).cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "diff": lambda x: F.pad(x.diff(dim=1), (0, 1)),
    "prod": lambda x: torch.cat([x, (1 + 0.2 * x).prod(1, keepdim=True)], 1),
    "softmax": lambda x: x.softmax(1),
    "softmin": lambda x: F.softmin(x, 1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "normalize": lambda x: F.normalize(x + 0.1, dim=1),
    "norm": lambda x: x / (0.5 + x.norm(dim=1, keepdim=True)),
    "norm of order 3": lambda x: x / (0.5 + x.norm(3, dim=1, keepdim=True)),
    "standardised": lambda x: (x - x.mean(1, keepdim=True)) / (0.3 + x.var(1, correction=0, keepdim=True)),
    "std": lambda x: torch.cat([x, (x + torch.arange(x.shape[1])).std(1, correction=0, keepdim=True)], 1),
    "outer": lambda x: (x[:, :2, None] * x[:, None, :2]).flatten(1),
    "einsum": lambda x: torch.einsum("ni,nj->nij", x[:, :3], x[:, :2]).flatten(1),
    "matmul with itself": lambda x: (x[:, :, None] @ x[:, None, :2]).flatten(1),
    "cdist": lambda x: torch.cdist(
        x[:, :, None], x[:, :2, None] + 3, compute_mode="donot_use_mm_for_euclid_dist"
    ).flatten(1),
    "cosine_similarity": lambda x: torch.cat([x, F.cosine_similarity(x + 0.1, x.flip(1) + 0.2, 1)[:, None]], 1),
    "pairwise_distance": lambda x: torch.cat([x, F.pairwise_distance(x, x.flip(1) + 1)[:, None]], 1),
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)).flatten(1),
    "fft filtered": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=x.shape[1]),
    "glu": lambda x: F.glu(fit(x, (2 * ((x.shape[1] + 1) // 2),)), 1),
    "split and multiplied": lambda x: x[:, : x.shape[1] // 2 + 1] * x.flip(1)[:, : x.shape[1] // 2 + 1],
    "chunked": lambda x: torch.cat([part.tanh() if i else part for i, part in enumerate(x.chunk(2, 1))], 1),
    "unbound and stacked": lambda x: torch.stack([c * (i + 1) for i, c in enumerate(x.unbind(1))], 1),
    "sample by sample": _sample_loop,
    "ragged": _ragged,
    "rows by group": _resorted,
    "detached copy beside": _out,
    "tril": lambda x: torch.diag_embed(x).tril().sum(2),
    "solve": lambda x: torch.linalg.solve(
        torch.eye(2, dtype=x.dtype) * 3 + 0.1 * fit(x, (2, 2)), fit(x, (2, 1))
    ).flatten(1),
    "inverse": lambda x: torch.linalg.inv(torch.eye(2, dtype=x.dtype) * 3 + 0.1 * fit(x, (2, 2))).flatten(1),
    "determinant": lambda x: torch.cat(
        [x, torch.linalg.det(torch.eye(2, dtype=x.dtype) * 2 + fit(x, (2, 2)))[:, None]], 1
    ),
    "svdvals": lambda x: torch.linalg.svdvals(
        torch.diag(torch.tensor([5.0, 2.0], dtype=x.dtype)) + 0.1 * fit(x, (2, 2))
    ),
    "cholesky": lambda x: torch.linalg.cholesky(
        torch.eye(2, dtype=x.dtype) * 3 + 0.1 * (fit(x, (2, 2)) + fit(x, (2, 2)).mT)
    ).flatten(1),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(0.2 * fit(x, (2, 2))).flatten(1),
    "bucketize": lambda x: x * (1 + torch.bucketize(x.detach(), torch.tensor([-0.5, 0.5], dtype=x.dtype))),
    "renorm": lambda x: x.renorm(2, 0, 1.5),
    "pixel_shuffle": lambda x: F.pixel_shuffle(fit(x, (4, 1, 1)), 2).flatten(1),
    "mean of the batch": lambda x: x - x.mean(0, keepdim=True),
    "fill of the diagonal": lambda x: torch.diag_embed(x).fill_diagonal_(0.3).flatten(1) if len(x) < 0 else x * 1.5,
    "in place on the way": lambda x: x.clone().mul_(2).clamp_(min=-1).add_(x),
    "swapped": lambda x: x.clone().swapaxes(0, 1).mul_(torch.arange(len(x)).mul(0).add(2)).swapaxes(0, 1),
    "put": lambda x: torch.zeros_like(x).put(torch.arange(x.numel()).reshape(x.shape), x.tanh()),
    "take": lambda x: x.take(torch.arange(x.numel()).reshape(x.shape).flip(1)),
    "bmm": lambda x: torch.bmm(fit(x, (2, 2)), fit(x.tanh(), (2, 1))).flatten(1),
    "kron": lambda x: torch.stack([torch.kron(row[:2], row[:2]) for row in x]),
    "vander": lambda x: torch.linalg.vander(x[:, :2], N=3).flatten(1),
    "trapezoid": lambda x: torch.cat([x, torch.trapezoid(x, dim=1)[:, None]], 1),
    "vmap": lambda x: torch.func.vmap(torch.tanh)(x),
}


@block("flat", often=14, name=list(OPERATIONS))
def operation(shape: Shape, name: str) -> nn.Module:
    return With(lambda own, x: OPERATIONS[name](x))


# ---------------------------------------------------------------- layers of vectors


@block("flat", often=8, width=[2, 1, 3, 4], bias=[True, False])
def linear(shape: Shape, width: int, bias: bool) -> nn.Module:
    return nn.Linear(shape[0], width, bias)


@block("flat", width=[2, 3], form=["matmul", "transposed", "einsum", "addmm", "weight used twice", "square of weight"])
def bare_matrix(shape: Shape, width: int, form: str) -> nn.Module:
    size = (width, shape[0]) if form == "transposed" else (shape[0], width)
    forms: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "matmul": lambda own, x: x @ own.weight,
        "transposed": lambda own, x: x @ own.weight.t(),
        "einsum": lambda own, x: torch.einsum("nd,dw->nw", x, own.weight),
        "addmm": lambda own, x: torch.addmm(own.bias, x, own.weight, beta=0.5, alpha=2),
        "weight used twice": lambda own, x: (x @ own.weight) @ own.weight.t(),
        "square of weight": lambda own, x: x @ own.weight.square(),
    }
    parts = {"bias": torch.ones(width)} if form == "addmm" else {}
    return With(forms[form], weight=torch.ones(size), **parts)


@block("flat", width=[2], of=["linear", "softmax", "masked", "normed", "low rank", "norm library", "orthogonal-like"])
def made_weights(shape: Shape, width: int, of: str) -> nn.Module:
    """A layer whose weight is computed from its parameters."""
    if of == "norm library":
        return nn.utils.parametrizations.weight_norm(nn.Linear(shape[0], width))
    forms: dict[str, Callable[[Any], Tensor]] = {
        "linear": lambda own: 2 * own.raw,
        "softmax": lambda own: own.raw.softmax(1),
        "masked": lambda own: own.raw * (torch.arange(own.raw.numel()).reshape(own.raw.shape) % 2),
        "normed": lambda own: own.raw / (0.1 + own.raw.norm(dim=1, keepdim=True)),
        "low rank": lambda own: own.raw[:, :1] @ own.other,
        "orthogonal-like": lambda own: own.raw - own.raw @ own.raw.t() @ own.raw * 0.1,
    }
    parts = {"other": torch.ones(1, shape[0])} if of == "low rank" else {}
    return With(lambda own, x: F.linear(x, forms[of](own)), raw=torch.ones(width, shape[0]), **parts)


@block("flat", width=[2])
def bilinear(shape: Shape, width: int) -> nn.Module:
    return With(
        lambda own, x: own.inner(x[:, :2], x[:, :2].tanh()),
        inner=nn.Bilinear(min(2, shape[0]), min(2, shape[0]), width),
    )


@block("flat", name=["relu", "tanh"])
def tied_autoencoder(shape: Shape, name: str) -> nn.Module:
    function = ELEMENTWISE[name]
    return With(lambda own, x: function(x @ own.weight) @ own.weight.t(), weight=torch.ones(shape[0], 2))


@block("flat", pieces=[2, 3])
def maxout(shape: Shape, pieces: int) -> nn.Module:
    return With(lambda own, x: own.inner(x).view(len(x), 2, pieces).amax(2), inner=nn.Linear(shape[0], 2 * pieces))


@block("flat", name=["sigmoid", "gelu", "silu", "relu"])
def gated_unit(shape: Shape, name: str) -> nn.Module:
    def forward(own: Any, x: Tensor) -> Tensor:
        value, gate = own.inner(x).chunk(2, -1)
        return value * ELEMENTWISE[name](gate)

    return With(forward, inner=nn.Linear(shape[0], 4))


@block("flat", often=2, kind=["layer", "rms", "group", "batch", "layer, bare", "local response"])
def norm(shape: Shape, kind: str) -> nn.Module:
    size = shape[0]
    if kind == "batch":
        return nn.BatchNorm1d(size)
    if kind == "group":
        return With(lambda own, x: own.inner(x) if x.shape[1] > 1 else x, inner=nn.GroupNorm(1, size))
    if kind == "local response":
        return With(lambda own, x: F.local_response_norm(x[:, :, None], 2, k=1.0).flatten(1))
    return {
        "layer": nn.LayerNorm(size),
        "rms": nn.RMSNorm(size),
        "layer, bare": nn.LayerNorm(size, elementwise_affine=False),
    }[kind]


@block("flat", buckets=[2, 3], pad=[False, True])
def codebook(shape: Shape, buckets: int, pad: bool) -> nn.Module:
    """Numbers looked up in a table, which adds the table's rows."""
    table = nn.Embedding(buckets, 2, padding_idx=0 if pad else None)

    def forward(own: Any, x: Tensor) -> Tensor:
        places = (x.detach()[:, :2] * 2).floor().long() % buckets
        return torch.cat([x, own.table(places).flatten(1)], 1)

    return With(forward, table=table)


@block("flat", often=0.7, form=["not reentrant", "reentrant"])
def checkpointed(shape: Shape, form: str) -> nn.Module:
    inner = nn.Sequential(nn.Linear(shape[0], 2), nn.Tanh())
    return With(lambda own, x: checkpoint(own.inner, x, use_reentrant=form == "reentrant"), inner=inner)


class _Cube(torch.autograd.Function):
    """x³ with a derivative of its own, which is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _hooked(x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: 0.5 * grad)
    return x


OWN_GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cube": lambda x: _Cube.apply(x),
    "reversed": lambda x: _Reversed.apply(x),
    "hooked": _hooked,
    "straight through": lambda x: x + (x.round() - x).detach(),
    "detached": lambda x: x.detach(),
    "half detached": lambda x: x * x.detach().tanh(),
}
"""Gradients of somebody's own, of which all but the first are not the derivative of the forward pass."""


@block("any", often=0.7, name=list(OWN_GRADIENTS))
def own_gradient(shape: Shape, name: str) -> nn.Module:
    return With(lambda own, x: OWN_GRADIENTS[name](x))


@block("flat", often=0.3, how=["no_grad", "buffer", "list"])
def constant_part(shape: Shape, how: str) -> nn.Module:
    inner = nn.Linear(shape[0], 2)
    if how == "buffer":
        inner.requires_grad_(False)

    def forward(own: Any, x: Tensor) -> Tensor:
        if how == "no_grad":
            with torch.no_grad():
                extra = own.inner(x)
            return torch.cat([x, extra], 1)
        return torch.cat([x, own.inner(x)], 1)

    return With(forward, inner=inner)


# ---------------------------------------------------------------- layers of sequences


@block(
    "sequence",
    often=2,
    form=["by hand", "scaled_dot_product", "causal", "masked", "MultiheadAttention", "need weights"],
)
def attention(shape: Shape, form: str) -> nn.Module:
    width = shape[1]
    if form in ("MultiheadAttention", "need weights"):
        inner = nn.MultiheadAttention(width, 1, batch_first=True)
        return With(lambda own, x: own.inner(x, x, x, need_weights=form == "need weights")[0], inner=inner)

    def forward(own: Any, x: Tensor) -> Tensor:
        query, key, value = (x @ weight for weight in (own.query, own.key, own.value))
        if form == "by hand":
            return torch.softmax(query @ key.mT / math.sqrt(width), -1) @ value
        mask = None
        if form == "masked":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=form == "causal")

    return With(forward, query=torch.ones(width, 2), key=torch.ones(width, 2), value=torch.ones(width, 2))


@block("sequence", often=0.7, norm_first=[False, True], name=["relu", "gelu"])
def encoder_layer(shape: Shape, norm_first: bool, name: str) -> nn.Module:
    return nn.TransformerEncoderLayer(shape[1], 1, 2, batch_first=True, norm_first=norm_first, activation=name)


@block("sequence", often=2, kind=["RNN", "GRU", "LSTM", "RNN relu"], both=[False, True], packed=[False, True])
def recurrent(shape: Shape, kind: str, both: bool, packed: bool) -> nn.Module:
    more = {"nonlinearity": "relu"} if kind == "RNN relu" else {}
    inner = getattr(nn, kind.split()[0])(shape[1], 2, batch_first=True, bidirectional=both, **more)

    def forward(own: Any, x: Tensor) -> Tensor:
        if not packed:
            return own.inner(x)[0]
        lengths = torch.tensor([1 + n % x.shape[1] for n in [x.shape[1] - 1] * len(x)])
        found = own.inner(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
        return pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]

    return With(forward, inner=inner)


@block("sequence", often=1.5, kind=["RNNCell", "GRUCell", "LSTMCell", "by hand"], collected=["last", "list", "slices"])
def cell(shape: Shape, kind: str, collected: str) -> nn.Module:
    inner = nn.Linear(shape[1] + 2, 2) if kind == "by hand" else getattr(nn, kind)(shape[1], 2)

    def forward(own: Any, x: Tensor) -> Tensor:
        state: Any = x.new_zeros(len(x), 2)
        memory = state
        outputs = x.new_zeros(len(x), x.shape[1], 2)
        each = []
        for t in range(x.shape[1]):
            if kind == "by hand":
                state = torch.tanh(own.inner(torch.cat([x[:, t], state], 1)))
            elif kind == "LSTMCell":
                state, memory = own.inner(x[:, t], (state, memory))
            else:
                state = own.inner(x[:, t], state)
            each.append(state)
            if collected == "slices":
                outputs[:, t] = state
        return {"last": lambda: state, "list": lambda: torch.stack(each, 1), "slices": lambda: outputs}[collected]()

    return With(forward, inner=inner)


PADDINGS = ["zeros", "circular", "reflect", "replicate"]


@block("sequence", often=1.5, mode=PADDINGS, kernel=[3, 1, 2], dilation=[1, 2], first=[False, True])
def conv_over_time(shape: Shape, mode: str, kernel: int, dilation: int, first: bool) -> nn.Module:
    length, width = shape
    padding = min(dilation * (kernel - 1) // 2 + 1, length - 1 if mode == "reflect" else length)
    kernel = kernel if dilation * (kernel - 1) < length + 2 * padding else 1
    inner = nn.Conv1d(width, 2, kernel, padding=padding, padding_mode=mode, dilation=dilation)
    return With(lambda own, x: own.inner(x.mT).mT, inner=inner)


@block("sequence", how=["mean", "max", "last", "sum", "weighted"])
def over_time(shape: Shape, how: str) -> nn.Module:
    forms: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "mean": lambda own, x: x.mean(1),
        "max": lambda own, x: x.max(1).values,
        "last": lambda own, x: x[:, -1],
        "sum": lambda own, x: x.sum(1),
        "weighted": lambda own, x: (x @ own.weight).softmax(1).mT.matmul(x)[:, 0],
    }
    return With(forms[how], **({"weight": torch.ones(shape[1], 1)} if how == "weighted" else {}))


@block("sequence", width=[2])
def token_wise(shape: Shape, width: int) -> nn.Module:
    return nn.Linear(shape[1], width)


@block("sequence")
def positions(shape: Shape) -> nn.Module:
    return With(lambda own, x: x + own.table[: x.shape[1]], table=torch.ones(shape))


@block("sequence", often=0.7)
def padded_rows(shape: Shape) -> nn.Module:
    """Sequences cut to lengths that depend on the sample, gone through a layer, and padded again."""

    def forward(own: Any, x: Tensor) -> Tensor:
        rows = [own.inner(row[: 1 + int(row.detach().sum() > 0) * (len(row) - 1)]).tanh() for row in x]
        return fit(pad_sequence(rows, batch_first=True), (x.shape[1], 2))

    return With(forward, inner=nn.Linear(shape[1], 2))


# ---------------------------------------------------------------- layers of images


def _padding(mode: str, wanted: int, sides: Shape) -> tuple[int, int]:
    """As much as the mode allows: a reflection needs more than it pads, a circle at least as much."""
    height, width = (min(wanted, side - 1 if mode == "reflect" else side) for side in sides)
    return height, width


@block(
    "image", often=5, mode=PADDINGS, kernel=[3, 1, 2], padding=[1, 0, 2], stride=[1, 2], dilation=[1, 2],
    groups=[1, 2], width=[2, 1], bias=[True, False],
)  # fmt: skip
def conv(shape: Shape, mode: str, kernel: int, padding: int, stride: int, dilation: int, groups: int, width: int,
         bias: bool) -> nn.Module:  # fmt: skip
    channels, *sides = shape
    pads = _padding(mode, padding, tuple(sides))
    kernels = tuple(
        kernel if dilation * (kernel - 1) < side + 2 * pad else 1 for side, pad in zip(sides, pads, strict=True)
    )
    groups = groups if channels % groups == 0 and width % groups == 0 else 1
    return nn.Conv2d(channels, width, kernels, stride, pads, dilation, groups, bias, mode)


@block("image", often=1.5, kernel=[2, 3, 1], stride=[1, 2], padding=[0, 1], groups=[1, 2], extra=[0, 1])
def transposed_conv(shape: Shape, kernel: int, stride: int, padding: int, groups: int, extra: int) -> nn.Module:
    groups = groups if shape[0] % groups == 0 else 1
    padding = padding if kernel > 2 * padding else 0
    extra = extra if extra < stride else 0
    return nn.ConvTranspose2d(shape[0], 2, kernel, stride, padding, output_padding=extra, groups=groups)


@block("image", often=2, kind=["max", "avg", "adaptive avg", "adaptive max", "lp", "max with stride", "unpool"])
def pool(shape: Shape, kind: str) -> nn.Module:
    sides = tuple(min(2, side) for side in shape[1:])
    if kind == "unpool":

        def forward(own: Any, x: Tensor) -> Tensor:
            found, places = F.max_pool2d(x, sides, return_indices=True)
            return F.max_unpool2d(found, places, sides, output_size=x.shape[2:])

        return With(forward)
    return {
        "max": nn.MaxPool2d(sides),
        "avg": nn.AvgPool2d(sides),
        "adaptive avg": nn.AdaptiveAvgPool2d(2),
        "adaptive max": nn.AdaptiveMaxPool2d(2),
        "lp": With(lambda own, x: F.lp_pool2d(x.square() + 0.1, 2, sides)),
        "max with stride": nn.MaxPool2d(sides, 1),
    }[kind]


@block("image", mode=["constant", "circular", "reflect", "replicate"], amount=[1, 2])
def pad(shape: Shape, mode: str, amount: int) -> nn.Module:
    height, width = _padding(mode, amount, shape[1:])
    return With(lambda own, x: F.pad(x, (width, width, height, height), mode=mode))


@block("image", often=1.5, kind=["batch", "group", "instance", "instance, affine", "layer", "local response"])
def image_norm(shape: Shape, kind: str) -> nn.Module:
    channels = shape[0]
    several = math.prod(shape[1:]) > 1
    if kind.startswith("instance"):
        return nn.InstanceNorm2d(channels, affine=kind.endswith("affine")) if several else nn.Identity()
    if kind == "layer":
        return nn.LayerNorm(list(shape))
    if kind == "local response":
        return nn.LocalResponseNorm(2, k=1.0)
    if kind == "group":
        return nn.GroupNorm(1, channels) if math.prod(shape) > 1 else nn.Identity()
    return nn.BatchNorm2d(channels)


@block(
    "image",
    often=1.5,
    kind=["nearest", "bilinear", "bicubic", "shuffle", "unfold", "excite", "depthwise", "channels last"],
)
def image_operation(shape: Shape, kind: str) -> nn.Module:
    channels = shape[0]
    if kind == "excite":
        inner = nn.Linear(channels, channels)
        return With(lambda own, x: x * torch.sigmoid(own.inner(x.mean((2, 3))))[:, :, None, None], inner=inner)
    if kind == "depthwise":
        return nn.Conv2d(channels, channels, 1, groups=channels)
    if kind == "shuffle":
        return With(lambda own, x: F.channel_shuffle(x, 2) if x.shape[1] % 2 == 0 else x)
    if kind == "unfold":
        sides = tuple(min(2, side) for side in shape[1:])
        return With(lambda own, x: F.fold(F.unfold(x, sides).tanh(), x.shape[2:], sides))
    if kind == "channels last":
        return With(
            lambda own, x: x.to(memory_format=torch.channels_last).permute(0, 2, 3, 1).square().permute(0, 3, 1, 2)
        )
    smooth = {} if kind == "nearest" else {"align_corners": False}
    return With(lambda own, x: F.interpolate(x, size=tuple(side + 1 for side in x.shape[2:]), mode=kind, **smooth))


# ---------------------------------------------------------------- words


@block(
    "tokens",
    words=[5],
    width=[2, 3],
    pad=[None, 0],
    by_frequency=[False, True],
    form=["table", "bag mean", "bag sum", "bag max", "max_norm", "tied"],
)
def embedding(shape: Shape, words: int, width: int, pad: int | None, by_frequency: bool, form: str) -> nn.Module:
    if form.startswith("bag"):
        mode = form.split()[1]
        inner = nn.EmbeddingBag(
            words, width, mode=mode, scale_grad_by_freq=by_frequency and mode != "max", padding_idx=pad
        )
        return With(lambda own, x: own.inner(x), inner=inner)
    pad = None if form == "tied" else pad  # a row that is constant in one place only is no function's parameter
    table = nn.Embedding(
        words, width, padding_idx=pad, scale_grad_by_freq=by_frequency, max_norm=1.0 if form == "max_norm" else None
    )
    if form == "tied":
        return With(lambda own, x: F.relu(own.table(x)) @ own.table.weight.t(), table=table)
    return table
