"""Operations written out in elementary ones, because their built-in derivatives are wrong or missing (torch 2.13).

One of them, max pooling without derivatives, is here because the built-in one is slow.

`tools/census.py` compares every differentiable operation with second differences; `docs/operations.md` is its result.
What it finds wrong is written out here, or refused in a sentence where that is impossible.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spiritlevel.binding.parameters import depth
from spiritlevel.binding.recurrent import STEP_BY_STEP
from spiritlevel.errors import InputError


class Elementary(TorchFunctionMode):
    """Inside it, the operations of this module run in forms that can be differentiated in every way.

    Nested forward mode is silently wrong for layer norm (by 10-20%), and for batch norm and instance norm that use the
    statistics of their input (by 30% and more; a `vmap` over their backward pass is off by 10%). Double backward
    through weight norm is off by 24%, and ignores the mean and the deviation that the native norms also return.
    Forward mode moves the row of an embedding that `padding_idx` holds fixed; reverse mode does not. The hard sigmoid,
    `cdist` and bags of embeddings have no second derivative, the gated linear unit no nested forward mode; the second
    derivatives of `sinc` at 0 are NaN or 0. Running statistics are never written.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rewrite = _REWRITES.get(func)
        if _followed.get():
            rewrite = None if rewrite is _layer_norm else rewrite or STEP_BY_STEP.get(func)
        if rewrite is None:
            return func(*args, **kwargs)
        result = rewrite(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


_followed: ContextVar[bool] = ContextVar("operations are followed by rules", default=False)


@contextlib.contextmanager
def followed_by_rules() -> Iterator[None]:
    """Inside, layer norm stays one operation and recurrent layers are written out.

    For a caller that has rules of its own for single operations and does not ask autograd for their derivatives: a
    recurrent layer is one call that writes into its own memory.
    """
    token = _followed.set(True)
    try:
        yield
    finally:
        _followed.reset(token)


# ---------------------------------------------------------------- normalisation


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Tensor:
    return _native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _native_layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(normalized_shape), 0))
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    variance = centred.square().mean(dims, keepdim=True)
    return normalised(centred, variance, weight, bias, eps), mean, (variance + eps).rsqrt()


def normalised(centred: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The end of every normalisation, written out: divide by the standard deviation, scale and shift."""
    result = centred * (variance + eps).rsqrt()
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def by_channel(tensor: Tensor, input: Tensor) -> Tensor:
    """One number per channel, in a shape that broadcasts to the inputs (N, C, …)."""
    return tensor.view([-1] + [1] * (input.ndim - 2))


def _standardised(
    input: Tensor, dims: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero mean and unit variance over `dims`, then the channels' scale and shift; mean and inverse deviation."""
    mean = input.mean(dims, keepdim=True)
    centred = input - mean
    variance = centred.square().mean(dims, keepdim=True)
    weight, bias = (None if item is None else by_channel(item, input) for item in (weight, bias))
    return normalised(centred, variance, weight, bias, eps), mean, (variance + eps).rsqrt()


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not training:
        return None
    return _native_batch_norm(input, weight, bias, None, None, True, momentum, eps)[0]


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not training:
        result = F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return result, input.new_zeros(0), input.new_zeros(0)
    if input.numel() <= input.shape[1]:
        raise InputError(
            f"batch statistics need more than one value per channel, got inputs of shape {tuple(input.shape)} for a "
            "batch norm; pass larger batches (is the last one a single sample?), or batch_norm='eval'."
        )
    result, mean, inverse = _standardised(input, [0, *range(2, input.ndim)], weight, bias, eps)
    return result, mean.reshape(-1), inverse.reshape(-1)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not use_input_stats or math.prod(input.shape[2:]) <= 1:
        return None
    return _standardised(input, list(range(2, input.ndim)), weight, bias, eps)[0]


def _low_level(norm: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`torch.batch_norm` and `torch.instance_norm` take their arguments in another order, and need all of them."""

    def written_out(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        use_input: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor | None:
        return norm(input, running_mean, running_var, weight, bias, use_input, momentum, eps)

    return written_out


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    if dim == -1:
        return v * (g / v.square().sum().sqrt())
    others = [d for d in range(v.ndim) if d != dim]
    return v * (g / v.square().sum(others, keepdim=True).sqrt())


# ---------------------------------------------------------------- activations, pooling, distances


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result = F.relu6(input + 3) / 6
    return input.copy_(result) if inplace else result


def _sinc(input: Tensor) -> Tensor:
    """sin(πx)/(πx), by its series near 0, where the built-in second derivatives are NaN or 0 instead of −π²/3."""
    if input.is_complex():
        return torch.sinc(input)
    y = math.pi * input
    near = y.abs() < 1
    small, large = torch.where(near, y, 0.0).square(), torch.where(near, 1.0, y)
    series = torch.ones_like(small)
    for k in range(8, 0, -1):
        series = 1 - series * small / (2 * k * (2 * k + 1))
    return torch.where(near, series, large.sin() / large)


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """The largest value of each cell, where cells do not overlap and nobody asks for a derivative.

    On a CPU the built-in kernel takes some ten times as long, longer than a small convolution, because it also keeps
    where the maxima were. The values are the same; at ties the derivatives would not be, so those are left to it.
    """
    if _watched():
        return None
    cell = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
    steps = (stride, stride) if isinstance(stride, int) else tuple(stride or cell)
    plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and not ceil_mode and not return_indices
    if steps != cell or len(cell) != 2 or not plain or not _values_alone(input) or input.ndim not in (3, 4):
        return None
    rows, columns = (size // step * step for size, step in zip(input.shape[-2:], cell, strict=True))
    if not rows or not columns or cell == (1, 1):  # of single values, the result would be the input itself
        return None
    input = input[..., :rows, :columns]
    input = reduce(torch.maximum, [input[..., row :: cell[0], :] for row in range(cell[0])])
    return reduce(torch.maximum, [input[..., column :: cell[1]] for column in range(cell[1])]).contiguous()


def _watched() -> bool:
    """Whether derivatives are taken or operations watched. Whoever watches also sees what is asked of a tensor."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return modes > 0 or depth() is not None or forward_ad._current_level >= 0


def _values_alone(input: Tensor) -> bool:
    """Whether this is a plain CPU tensor in the usual order, whose derivatives nobody asks for."""
    wanted = torch.is_grad_enabled() and input.requires_grad
    usual = type(input) is Tensor and input.device.type == "cpu" and input.is_contiguous() and input.is_floating_point()
    return usual and not wanted


def _max_unpool(dims: int) -> Callable[..., Tensor]:
    """Where windows overlap, a place may be written twice; only what remains there has a derivative."""
    original = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}[dims]

    def unpool(input: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        flat = input.flatten(-dims)
        order = torch.arange(1, flat.shape[-1] + 1, dtype=torch.float64, device=input.device)
        stays = original(order.reshape(input.shape[-dims:]).expand(indices.shape), indices, *args, **kwargs).long()
        values = flat.gather(-1, (stays.flatten(-dims) - 1).clamp(min=0)).reshape(stays.shape)
        return torch.where(stays > 0, values, 0.0)

    return unpool


def _norm(difference: Tensor, p: float) -> Tensor:
    """‖·‖_p over the last dimension, with zero derivatives where the difference is zero."""
    if p == 0:
        return (difference != 0).sum(-1).to(difference)
    size = difference.abs()
    if p == 1 or math.isinf(p):
        return size.sum(-1) if p == 1 else size.amax(-1)
    power = difference.square().sum(-1) if p == 2 else torch.where(size > 0, size, 1.0).pow(p).mul(size > 0).sum(-1)
    inside = power > 0
    return torch.where(inside, torch.where(inside, power, 1.0).pow(1 / p), 0.0)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = "") -> Tensor:
    return _norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _norm(input[first] - input[second], p)


def _scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor | None:
    """Products of the entries that meet in one place; forward mode takes their derivative to be zero."""
    if reduce != "prod" or not input.ndim or not index.ndim or not index.numel():
        return None
    there = tuple(slice(size) for size in index.shape)
    region = tuple(slice(None) if axis == dim % input.ndim else part for axis, part in enumerate(there))
    before, index, source = (item.movedim(dim, -1) for item in (input[region], index, src[there]))
    meets = index.unsqueeze(-2) == torch.arange(input.shape[dim], device=input.device).unsqueeze(-1)
    product = torch.where(meets, source.unsqueeze(-2), 1.0).prod(-1)
    product = product * before if include_self else torch.where(meets.any(-1), product, before)
    result = input.clone()
    result[region] = product.movedim(-1, dim).to(input.dtype)
    return result


def _scatter_reduce_(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    result = _scatter_reduce(input, *args, **kwargs)
    return None if result is None else input.copy_(result)


def _cholesky_inverse(input: Tensor, upper: bool = False) -> Tensor:
    """In the built-in one, forward over reverse mode is off by some 1e-5 and not symmetric."""
    unit = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    return torch.cholesky_solve(unit.expand(input.shape), input, upper=upper)


def _triangular_solve(
    input: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    matrix = A.mT if transpose else A
    solution = torch.linalg.solve_triangular(matrix, input, upper=upper != transpose, unitriangular=unitriangular)
    return torch.return_types.triangular_solve((solution, A.clone()))


def _normal(mean: Any, std: Any = 1.0, *size: Any, generator: Any = None, **options: Any) -> Tensor | None:
    """The built-in one has no derivative in the mean and the deviation, and returns zero for it."""
    if size or options or not any(isinstance(item, Tensor) for item in (mean, std)):
        return None
    like = mean + 0 * std
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return mean + std * noise


# ---------------------------------------------------------------- embeddings


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """The row of `padding_idx` is held fixed: it is never trained, and must not move in forward mode either.

    Gradients are dense: the second derivative of a sparse one does not exist, nor can it be flattened.
    """
    if padding_idx is None and not sparse:
        return None
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    if padding_idx is None:
        return rows
    padded = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(padded, rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Bags in the rows of a matrix, or one after another from `offsets`; the padding is in none of them."""
    if max_norm is not None or scale_grad_by_freq or (input.ndim == 2) != (offsets is None):
        return None
    inside = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        inside = input != padding_idx % weight.shape[0]
    rows = F.embedding(input, weight)
    if offsets is not None:
        starts = offsets[:-1] if include_last_offset else offsets
        places, bags = (torch.arange(size, device=input.device) for size in (len(input), len(starts)))
        bag = (places[:, None] >= starts).sum(1) - 1
        inside, rows = inside & (bag == bags[:, None]), rows.expand(len(starts), *rows.shape)
    if mode == "max":
        most = rows.masked_fill(~inside.unsqueeze(-1), -math.inf).max(1).values
        return torch.where(inside.any(1, keepdim=True), most, 0.0)
    share = inside.to(rows)
    if per_sample_weights is not None:
        share = share * per_sample_weights
    if mode == "mean":
        share = share / inside.sum(1, keepdim=True).clamp(min=1)
    return (rows * share.unsqueeze(-1)).sum(1)


# ---------------------------------------------------------------- losses


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    if size_average is not None or reduce is not None:
        return None
    if input.ndim < 2:
        values = _multi_margin_loss(input.reshape(1, -1), target.reshape(1), p, margin, weight, reduction=reduction)
        return None if values is None else values.reshape(target.shape if reduction == "none" else ())
    places = torch.arange(input.shape[1], device=input.device)
    gaps = (margin - input.gather(1, target[:, None]) + input).clamp(min=0) ** p
    if weight is not None:
        gaps = gaps * weight[target][:, None]
    values = torch.where(places == target[:, None], 0.0, gaps).sum(1) / input.shape[1]
    return values if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def _linear_cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """In one piece: in chunks it computes its gradient in advance, which a second derivative takes to be constant."""
    return F.linear_cross_entropy(*args, **{**kwargs, "options": None})


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InputError(f"the derivatives of {name} are wrong in this version of PyTorch; use {instead} instead.")

    return refuse


_REWRITES: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    torch.native_layer_norm: _native_layer_norm,
    torch._weight_norm: _weight_norm,
    F.batch_norm: _batch_norm,
    torch.native_batch_norm: _native_batch_norm,
    torch.batch_norm: _low_level(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _low_level(_instance_norm),
    F.hardsigmoid: _hardsigmoid,
    F.glu: _glu,
    torch.sinc: _sinc,
    torch.special.sinc: _sinc,
    Tensor.sinc: _sinc,
    F.max_pool2d: _max_pool2d,
    F.max_unpool1d: _max_unpool(1),
    F.max_unpool2d: _max_unpool(2),
    F.max_unpool3d: _max_unpool(3),
    torch.cdist: _cdist,
    torch.pdist: _pdist,
    torch.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce: _scatter_reduce,
    Tensor.scatter_reduce_: _scatter_reduce_,
    torch.cholesky_inverse: _cholesky_inverse,
    Tensor.cholesky_inverse: _cholesky_inverse,
    torch.triangular_solve: _triangular_solve,
    Tensor.triangular_solve: _triangular_solve,
    torch.normal: _normal,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.multi_margin_loss: _multi_margin_loss,
    torch.as_strided_scatter: _refused("as_strided_scatter", "slices, torch.where or index_copy"),
    Tensor.as_strided_scatter: _refused("as_strided_scatter", "slices, torch.where or index_copy"),
}
for _name in ("_native_batch_norm_legit", "_batch_norm_with_update"):
    if hasattr(torch, _name):
        _REWRITES[getattr(torch, _name)] = _refused(f"torch.{_name}", "F.batch_norm")
if hasattr(F, "linear_cross_entropy") and "options" in inspect.signature(F.linear_cross_entropy).parameters:
    _REWRITES[F.linear_cross_entropy] = _linear_cross_entropy
