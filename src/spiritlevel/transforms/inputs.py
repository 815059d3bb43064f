"""Affine maps of the inputs, undone in the first layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from spiritlevel.arguments import checked
from spiritlevel.binding.devices import doubled
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.results import figure
from spiritlevel.transforms.batch_norm import set_bias
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.watching.factors import Factor
from spiritlevel.watching.scalings import follow_factors


@dataclass(frozen=True, eq=False)
class AffineMap:
    """The map x ↦ A x + s of inputs.

    `matrix` A is a number, a vector (a diagonal) or a square matrix, `shift` s a number or a vector. They act on the
    channels of an image batch (N, C, …) if they have C entries, and on the flattened input otherwise.

    >>> AffineMap(torch.tensor(2.0), torch.tensor([0.0, 1.0]))(torch.ones(1, 2))
    tensor([[2., 3.]])
    """

    matrix: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        sides = {*self.matrix.shape, *self.shift.shape}
        if self.matrix.ndim > 2 or self.shift.ndim > 1 or len(sides) > 1:
            raise InputError(
                "an affine map needs a number, a vector or a square matrix, and a number or a vector of the same "
                f"length; got shapes {tuple(self.matrix.shape)} and {tuple(self.shift.shape)}."
            )

    @property
    def size(self) -> int:
        """The number of channels or features the map acts on, 0 if it treats all the same."""
        return max([*self.matrix.shape, *self.shift.shape], default=0)

    def __call__(self, inputs: Tensor) -> Tensor:
        """The mapped inputs."""
        numbers = doubled(inputs)
        matrix, shift = (doubled(tensor).to(numbers.device) for tensor in (self.matrix, self.shift))
        if not self.size:
            return (matrix * numbers + shift).to(inputs)
        channels = self._by_channel(inputs.shape)
        rows = numbers.movedim(1, -1) if channels else numbers.flatten(1)
        rows = (rows @ matrix.T if matrix.ndim == 2 else rows * matrix) + shift
        return (rows.movedim(-1, 1) if channels else rows.reshape(inputs.shape)).to(inputs)

    def _by_channel(self, shape: torch.Size) -> bool:
        if len(shape) > 2 and shape[1] == self.size:
            return True
        if shape[1:].numel() != self.size:
            raise InputError(
                f"an affine map of {self.size} features does not fit inputs of shape {tuple(shape[1:])}: it needs as "
                "many features as there are channels, or as there are numbers in all."
            )
        return False

    def _inverse_applied(self, weight: Tensor) -> Tensor:
        """W A⁻¹ for a weight whose second axis holds the features."""
        if self.matrix.ndim < 2:
            return weight / self.matrix.reshape(-1, *[1] * (weight.ndim - 2))
        flat = weight.movedim(1, -1)
        solved: Tensor = torch.linalg.solve(self.matrix, flat.reshape(-1, flat.shape[-1]), left=False)
        return solved.reshape(flat.shape).movedim(-1, 1)

    def _on(self, features: int) -> AffineMap:
        """The same map in float64 with one entry for each of `features`; channels are repeated for their positions."""
        matrix, shift = self.matrix.detach().cpu().double(), self.shift.detach().cpu().double()
        repeats = features // (self.size or features)
        if matrix.ndim == 2:
            matrix = torch.kron(matrix, torch.eye(repeats, dtype=torch.float64))
        elif matrix.ndim == 1:
            matrix = matrix.repeat_interleave(repeats)
        return AffineMap(matrix, shift.repeat_interleave(repeats) if shift.ndim else shift.expand(features))


@checked
def standardisation(inputs: Tensor, *, per: str = "channel") -> AffineMap:
    """The map to zero mean and unit variance of each channel, or of each feature (`per="feature"`).

    Features that never change keep their scale. Reference: paper B, section D.

    >>> images = torch.rand(10, 3, 4, 4)
    >>> mapped = standardisation(images)(images)
    >>> torch.allclose(mapped.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    True
    """
    rows = _rows(inputs, per)
    std = rows.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return AffineMap(1 / std, -rows.mean(0) / std)


@checked
def whitening(inputs: Tensor, *, per: str = "feature", ridge: float = 0.0) -> AffineMap:
    """The symmetric map to zero mean and unit covariance (ZCA), A = (Σ + ridge·I)^{−1/2}.

    Σ is the covariance of the features, or of the channels (`per="channel"`). Exact for ridge 0, which needs an
    invertible Σ. Cost: O(N d² + d³). Reference: paper B, section D.

    >>> points = torch.randn(50, 3, dtype=torch.float64) @ torch.tensor([[2.0, 0, 0], [1, 1, 0], [0, 3, 1]]).double()
    >>> torch.allclose(whitening(points)(points).T.cov(correction=0), torch.eye(3).double())
    True
    """
    rows = _rows(inputs, per)
    values, vectors = torch.linalg.eigh(rows.T.cov(correction=0).reshape(rows.shape[1], -1))
    values = values + ridge
    if not bool(values[0] > 1e-12 * values[-1]):
        raise InputError(
            f"whitening: the covariance of the {rows.shape[1]} features is singular; pass ridge=, for example "
            f"{figure(1e-3 * float(values.mean()), 1)}, or per='channel'."
        )
    matrix = (vectors / values.sqrt()) @ vectors.T
    return AffineMap(matrix, -matrix @ rows.mean(0))


def _rows(inputs: Tensor, per: str) -> Tensor:
    if per not in ("channel", "feature"):
        raise unknown_name("value of per", per, ("channel", "feature"))
    if inputs.ndim < 2 or inputs.is_complex() or not len(inputs):
        raise InputError(f"inputs must be real numbers with one row per sample, got {shown(inputs)}.")
    return (inputs.movedim(1, -1).flatten(0, -2) if per == "channel" else inputs.flatten(1)).cpu().double()


@checked
@in_turn()
def input_map(
    model: nn.Module,
    matrix: Tensor | float | None = None,
    shift: Tensor | float | None = None,
    *,
    data: Any = None,
    **reading: Unpack[Reading],
) -> Transformed:
    """Undo an invertible affine map of the inputs in the first layer: new_model(A x + s) = model(x).

    W → W A⁻¹ and b → b − W A⁻¹ s; a missing bias is added if s ≠ 0. A linear first layer (after a flattening) takes
    any map of the flattened input or of its channels, a convolution any map of its channels. Where a convolution pads
    with zeros, the new one pads with s, the place of the old zero, so the border is exact as well. Exact up to
    rounding, in both batch-norm modes. Cost: a solve in the number of features; `data` (old inputs) as in
    `rescale_layers`. `standardisation` and `whitening` make such maps. Reference: paper B, section D.

    Args:
        model: any module whose input is read only by linear layers or convolutions; it is left as it was.
        matrix: A, a number, a vector (diagonal) or a square matrix; by default 1.
        shift: s, a number or a vector; by default 0.
        data: inputs of the old model to compare outputs on.

    >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(20, 3)
    >>> whiten = whitening(x)
    >>> result = input_map(net, whiten.matrix, whiten.shift)
    >>> torch.allclose(result.model(whiten(x)), net(x), atol=1e-5)
    True
    """
    mapping = AffineMap(
        torch.as_tensor(1.0 if matrix is None else matrix, dtype=torch.float64),
        torch.as_tensor(0.0 if shift is None else shift, dtype=torch.float64),
    )
    square = mapping.matrix if mapping.matrix.ndim == 2 else torch.diag(mapping.matrix.reshape(-1))
    if (
        not bool(torch.isfinite(mapping.shift).all() & torch.isfinite(square).all())
        or not float(torch.linalg.cond(square)) < 1e15
    ):
        raise InputError(
            "input_map: the map of the inputs is not invertible; pass an invertible matrix and a finite shift."
        )
    if mapping.shift.ndim > 1 or not mapping.shift.numel():
        raise InputError(f"input_map: the shift must be a number or a vector, got {shown(mapping.shift)}.")
    sample = Sample.of(model, data, form_of(reading))
    if not isinstance(sample.inputs, Tensor):
        raise InputError("input_map: the network must have one tensor as input.")
    new = copy.deepcopy(model)
    walk = follow_factors("input_map", sample.problem(model), sample.inputs, {})
    first = [name for name, layer in walk.layers.items() if layer.shape is not None]
    if walk.obstacle or not first:
        raise InputError(
            f"input_map: {walk.obstacle or 'no known layer'} reads the network's input, so the map cannot be "
            "undone in a first layer; apply it before the network yourself."
        )
    factors: dict[str, Factor] | None = dict.fromkeys(walk.parameters, 1.0)
    for name in first:
        module, layer = walk.module(name, new), walk.layers[name]
        if module is None:
            raise InputError(f"input_map: the first layer {name!r} must be a module that is used once.")
        local = _first_layer_map(name, module, layer.shape, mapping, sample.inputs.shape)
        _fold_input(module, local)
        if factors is not None and local.matrix.ndim < 2 and not bool(local.shift.any()):
            factors[layer.params[0]] = local._inverse_applied(
                torch.ones(1, local.size, *module.weight.shape[2:]).double()
            )
        else:
            factors = None
    notes = ("the new model takes mapped inputs",)
    certificate = sample.certify("input_map", model, new, factors=factors, notes=notes, inputs=mapping)
    return Transformed(new, certificate, mapping)


def _first_layer_map(name: str, module: Any, shape: Any, mapping: AffineMap, whole: torch.Size) -> AffineMap:
    """The map of the features that this first layer reads."""
    if mapping.size:
        by_channel = mapping._by_channel(whole)
        if isinstance(module, _ConvNd) and not (by_channel and shape[1] == whole[1]):
            raise InputError(
                f"input_map: the first layer {name!r} is a convolution, which can only undo maps of its "
                f"{module.in_channels} channels, not of {mapping.size} features; use per='channel'."
            )
        if isinstance(module, nn.Linear) and len(shape) != 2:
            raise InputError(
                f"input_map: the first layer {name!r} reads inputs of shape {tuple(shape[1:])} without flattening "
                "them, so it can only undo a single number."
            )
    if isinstance(module, _ConvNd) and (module.groups != 1 or module.transposed):
        raise InputError(
            f"input_map: the first layer {name!r} is a grouped or transposed convolution, which cannot undo the map; "
            "apply it before the network yourself."
        )
    return mapping._on(module.in_channels if isinstance(module, _ConvNd) else module.in_features)


def _fold_input(module: Any, mapping: AffineMap) -> None:
    """W → W A⁻¹, b → b − W A⁻¹ s, zero padding → padding with s."""
    device = module.weight.device
    weight = mapping._inverse_applied(module.weight.detach().cpu().double())
    with torch.no_grad():
        module.weight.copy_(weight)
    if not bool(mapping.shift.any()):
        return
    moved = torch.einsum("oc...,c->o", weight, mapping.shift)
    bias = 0.0 if module.bias is None else module.bias.detach().cpu().double()
    set_bias(module, (bias - moved).to(device))
    if isinstance(module, _ConvNd) and module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice):
        if type(module) not in _BORDERED:
            raise InputError(
                f"input_map: a {type(module).__name__} with padding cannot be given the border that a shift needs; use "
                "a map without a shift, or apply it before the network yourself."
            )
        module.__class__ = _BORDERED[type(module)]
        module.padding = (0,) * len(module.kernel_size)
        module.register_buffer("border", mapping.shift.to(module.weight))


class _Bordered(_ConvNd):
    """A convolution whose border is a value per channel instead of zero."""

    border: Tensor
    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        border = self.border.reshape(-1, *[1] * len(self.kernel_size))
        padded = F.pad(input - border, self._reversed_padding_repeated_twice) + border
        return self._conv_forward(padded, self.weight, self.bias)


class _Conv1d(_Bordered, nn.Conv1d):
    pass


class _Conv2d(_Bordered, nn.Conv2d):
    pass


class _Conv3d(_Bordered, nn.Conv3d):
    pass


_BORDERED: dict[type, type] = {nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d}
