"""Output margins in units of the network's spectral complexity."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator, spectral_norm
from spiritlevel.measures.margins import quantile
from spiritlevel.measures.norms import check_one_shape
from spiritlevel.measures.registry import BY_TENSOR, SCALED, register
from spiritlevel.measures.sampling import Sampling
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.watching.layers import INPUTS, WATCHED, Call, Wiring, wiring


def _operator_norms(layer: Call, seed: int) -> tuple[Estimate, float]:
    """‖A‖_σ and ‖Aᵀ‖_{2,1} of a layer as a linear map of its actual input."""
    module, weight = layer.module, layer.value.double()
    if isinstance(module, nn.Linear):
        times = math.prod(layer.inputs[:-1]) / WATCHED  # a sample's tokens, whichever their dimension
        rows = weight.square().sum(1).sqrt().sum() * times
        return Estimate(float(torch.linalg.matrix_norm(weight, 2))), float(rows)
    shape = layer.inputs[1:]
    kernel = copy.deepcopy(module).double()
    kernel.bias = None

    def run(values: Tensor, tensor: Tensor) -> Tensor:
        return functional_call(kernel, {"weight": tensor}, (values,))

    def gram(block: Tensor) -> Tensor:
        with torch.enable_grad():
            values = block.T.reshape(-1, *shape).detach().requires_grad_()
            outputs = run(values, weight)
            (back,) = torch.autograd.grad(outputs, values, outputs.detach())
        return back.reshape(block.shape[1], -1).T

    found = spectral_norm(Operator(gram, math.prod(shape), dtype=torch.float64, device=weight.device), seed=seed)
    if module.padding_mode == "zeros":  # a row of A holds the weights that one output reads: on ones, squares add up
        with torch.no_grad():
            squares = run(torch.ones(1, *shape, dtype=torch.float64, device=weight.device), weight.square())
        rows = squares.clamp_min(0).sqrt().sum()
    else:
        rows = _padded_rows(module, weight, shape[1:])
    root = math.sqrt(found.value)
    norm = dataclasses.replace(found, value=root, tolerance=found.tolerance / (2 * root) if root else 0.0)
    return norm, float(rows) * layer.inputs[0] / WATCHED


def _padded_rows(module: Any, weight: Tensor, size: torch.Size) -> Tensor:
    """Σ‖row‖₂ of a convolution whose padding repeats entries of its input: weights that read the same entry add up.

    With q(k) the entry that the weight w_k reads for one output, ‖row‖² = Σ_{k,l} [q(k) = q(l)] ⟨w_k, w_l⟩.
    """
    count, dims = math.prod(module.kernel_size), len(size)
    entries = torch.arange(math.prod(size), dtype=torch.float64, device=weight.device).reshape(1, 1, *size)
    padded = nn.functional.pad(entries, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    each = torch.eye(count, dtype=torch.float64, device=weight.device).reshape(count, 1, *module.kernel_size)
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[dims - 1]
    read = convolve(padded, each, stride=module.stride, dilation=module.dilation).flatten(2)[0].T.round()
    twice = (read.sort(1).values.diff(dim=1) == 0).any(1)  # outputs near the border
    flat = weight.reshape(len(weight), -1, count)
    total = flat.square().sum((1, 2)).sqrt().sum() * (~twice).sum()
    if bool(twice.any()):
        same = (read[twice, :, None] == read[twice, None, :]).flatten(1)
        patterns, times = torch.unique(same, dim=0, return_counts=True)
        products = (flat.mT @ flat).flatten(1)
        total = total + ((products @ patterns.double().T).clamp_min(0).sqrt() * times).sum()
    return total


def _path_complexity(wired: Wiring, ends: frozenset[int], norms: dict[int, tuple[float, float]]) -> float:
    """R = (Σ_l (p_l ‖A_lᵀ‖_{2,1} q_l)^{2/3})^{3/2}: p and q are Π‖A‖_σ of what comes before and after, over all paths.

    Bartlett, Foster & Telgarsky cover a chain of layers. Their argument needs to know by how much the layers before l
    can stretch the inputs, p_l, and those after it an error, q_l: allowing the error ε_l at l costs
    (p_l ‖A_lᵀ‖_{2,1}‖X‖/ε_l)², and the least cost at a given Σ q_l ε_l is R²‖X‖² over its square. In a chain p_l q_l is
    Π_{k≠l} ‖A_k‖_σ, which makes R the printed one. Where branches meet, in a sum, a maximum or a concatenation, their
    stretches at most add up: p and q are sums over paths, and a factor that moves along a path leaves them unchanged.
    """
    before, reach = {}, {INPUTS: 1.0}
    for index, (_, reads) in wired.items():
        before[index] = sum(reach[other] for other in reads)
        reach[index] = before[index] * norms[index][0]
    behind = {index: float(index in ends) for index in wired}
    for index, (_, reads) in reversed(wired.items()):
        for other in reads - {INPUTS}:
            behind[other] += norms[index][0] * behind[index]
    return sum((before[index] * norms[index][1] * behind[index]) ** (2 / 3) for index in wired) ** 1.5


def _spectral_complexity(setting: Setting) -> Estimate:
    """R·‖X‖_F/n of the network with batch norm folded; what lies between the layers is assumed not to stretch.

    A layer's matrix, and with it R, belongs to inputs of one shape.
    R grows with every ‖A_l‖_σ by a power between 0 and 1, so its relative tolerance is at most the sum of theirs.
    """
    check_one_shape(setting, "the spectrally normalised margin")
    folded, squares = setting.folded, _square_norms(setting)
    if not folded.structure.exact:
        raise InputError(
            f"the spectrally normalised margin is defined for ReLU networks only: {folded.structure.reason}."
        )
    with folded.problem.active():
        few, _ = folded.problem.place(*folded.batches.first(2))
        wired, ends = wiring(folded.problem, few, folded.calls)
    for call in [call for call in folded.calls if call.module is None] + [call for call, _ in wired.values()]:
        if not call.plain:
            raise InputError(
                f"the spectrally normalised margin needs layers that are plain nn.Linear or convolutions, but "
                f"{call.name!r} is not; write it as one."
            )
    norms, found, relative = {}, [], 0.0
    for index, (call, _) in wired.items():
        norm, rows = _operator_norms(call, setting.seed)
        norms[index] = norm.value, rows
        found.append(norm)
        relative += norm.tolerance / norm.value if norm.value else 0.0
    complexity = _path_complexity(wired, ends, norms)
    zero = [call.name for index, (call, _) in wired.items() if norms[index][0] == 0]
    if complexity == 0 and zero:
        raise InputError(
            f"the spectrally normalised margin is not defined: all weights of layer {zero[0]!r} are zero, so the "
            "outputs do not depend on the inputs through it."
        )
    scale = complexity * math.sqrt(float(squares.sum())) / len(squares)
    if not 0 < scale < math.inf:
        raise InputError(
            f"the spectrally normalised margin is not defined: the spectral complexity times the size of the inputs "
            f"is {scale:g}."
        )
    worst = max(found, key=lambda norm: ("exact", "converged", "not converged").index(norm.status))
    return Estimate(scale, tolerance=scale * relative, reason=worst.reason, status=worst.status)


def _spectral_margin(setting: Setting, statistic: Callable[[Tensor], float]) -> Estimate:
    scale = _spectral_complexity(setting)
    setting.kept["spectral scale"] = torch.tensor(scale.value, dtype=torch.float64)
    value = statistic(setting.margins.signed) / scale.value
    tolerance = abs(value) * scale.tolerance / scale.value
    return Estimate(value, seed=setting.seed, reason=scale.reason, tolerance=tolerance, status=scale.status)


def _scaled_margins(setting: Setting) -> Tensor:
    return setting.margins.signed.cpu() / setting.kept["spectral scale"]


def _input_sizes(setting: Setting) -> Tensor:
    """‖xₙ‖² relative to their mean: the influence on ‖X‖_F², for equally many samples."""
    squares = _square_norms(setting)
    return squares / squares.mean()


def _square_norms(setting: Setting) -> Tensor:
    """‖xₙ‖² of every sample."""
    return setting.column("square norm", lambda inputs, outputs, labels: inputs.double().square().sum(1))


def _scaled_mean_values(setting: Setting) -> Tensor:
    found = _scaled_margins(setting)
    return found - found.mean() * _input_sizes(setting) / 2


for _name, _meaning, _function, _sampling in (
    ("mean", "mean", lambda v: float(v.mean()), Sampling("influence", _scaled_mean_values, grows=True)),
    ("median", "median", quantile(0.5), Sampling("order", _scaled_margins, 0.5, grows=True)),
):
    register(
        f"spectral_margin_{_name}",
        f"{_meaning} output margin in units of the network's spectral complexity, batch norm folded; grows as √n with "
        "the number of samples, so comparable only for equally many",
        f"{_meaning} Δ / (R ‖X‖_F/n), R = (Σ_l (p_l ‖A_lᵀ‖_{{2,1}} q_l)^(2/3))^(3/2), p_l and q_l the products of "
        "‖A_k‖_σ before and after layer l, summed over parallel paths",
        "Bartlett, Foster & Telgarsky 2017, arXiv:1706.08498",
        family="margin",
        worth="to a tolerance",
        cost="matvecs",
        passes=3,
        sampling=_sampling,
        direction="wider",
        invariant_to=BY_TENSOR | SCALED | {"fold_batchnorm"},
    )(functools.partial(_spectral_margin, statistic=_function))
