"""Folding batch norm into the layer before it."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.devices import doubled
from spiritlevel.binding.modules import twin_of
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.watching.factors import Factor, grid
from spiritlevel.watching.scalings import follow_factors


@checked
@in_turn()
def fold_batchnorm(model: nn.Module, *, data: Any = None, **reading: Unpack[Reading]) -> Transformed:
    """Fold every batch norm into the linear layer or convolution directly before it (eval mode).

    W → diag(γ/σ) W and b → (b − μ)γ/σ + β with σ = √(running_var + eps); the batch norm becomes `nn.Identity`. A batch
    norm that is not the sole, direct reader of a layer (after a sum, before a convolution) stays; the
    certificate's notes name it. Exact up to rounding, in eval mode only. Cost and `data` as in `rescale_layers`.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = fold_batchnorm(net)
    >>> result.model[1], result.certificate.modes
    (Identity(), ('eval',))
    """
    sample = Sample.of(model, data, form_of(reading))
    new = twin_of(model)
    walk = follow_factors("fold_batchnorm", sample.problem(model), sample.inputs, {})
    modules = dict(new.named_modules())
    folded, left = [], []
    for name in walk.norms:
        source = walk.module(walk.source(name), new)
        if modules[name].running_mean is None or source is None:
            left.append(name)
            continue
        _fold(source, modules[name])
        parent, _, child = name.rpartition(".")
        setattr(new.get_submodule(parent), child, nn.Identity())
        folded.append(name)
    if not folded:
        raise InputError(
            "fold_batchnorm: no batch norm with running statistics follows a linear layer or a convolution directly; "
            "there is nothing to fold."
        )
    notes = (f"batch norm {name!r} follows no layer directly and stays" for name in left)
    return Transformed(
        new, sample.certify("fold_batchnorm", model, new, modes=("eval",), factors=None, notes=tuple(notes))
    )


def _fold(layer: Any, norm: Any) -> None:
    def double(tensor: Tensor | None, otherwise: float) -> Tensor:
        return doubled(torch.full_like(norm.running_mean, otherwise) if tensor is None else tensor.detach())

    slope = double(norm.weight, 1.0) / (double(norm.running_var, 1.0) + norm.eps).sqrt()
    bias = (double(layer.bias, 0.0) - double(norm.running_mean, 0.0)) * slope + double(norm.bias, 0.0)
    axes: tuple[Factor, Factor] = (1.0, slope) if getattr(layer, "transposed", False) else (slope, 1.0)
    with torch.no_grad():
        layer.weight.copy_(doubled(layer.weight) * grid(*axes, layer.weight.shape, getattr(layer, "groups", 1)))
    set_bias(layer, bias)


def set_bias(layer: Any, bias: Tensor) -> None:
    """Give a layer this bias, even if it had none."""
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(bias.shape), requires_grad=layer.weight.requires_grad)
    with torch.no_grad():
        layer.bias.copy_(bias)
