"""Curvature in the network's own units."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.measures.blocks import gauss_newton_blocks
from spiritlevel.measures.ends import PROBES, in_layer_norms, layer_norms
from spiritlevel.measures.registry import BY_TENSOR, DIAGONAL, register
from spiritlevel.measures.sampling import SHARED, end_sampling, mean_of, not_known, shared_signs, unless_exact
from spiritlevel.measures.setting import Setting
from spiritlevel.measures.trace import trace_passes
from spiritlevel.results import Estimate
from spiritlevel.watching.layers import matrices


def _layer_scaled_values(setting: Setting) -> Tensor:
    if not _known_by_layer(setting):
        return setting.forms(*(layer_norms(setting) * v for v in shared_signs(setting))).mean(1)
    squares = {name: float(tensor.double().square().sum()) for name, tensor in setting.problem.params.items()}
    return torch.stack([squares[name] * values for name, values in setting.traces.layers.items()]).sum(0)


def _known_by_layer(setting: Setting) -> bool:
    return setting.by_norms and bool(setting.traces.layers) and setting.traces.exact


@register(
    "layer_scaled_trace",
    "trace with every tensor in units of its own norm",
    "Σ_l ‖w_l‖² Tr H_ll",
    "from H(Tθ) = T⁻¹H(θ)T⁻¹; mathematics 7.1",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature in norms",
    passes=functools.partial(trace_passes, unless_exact=5.0 * PROBES),
    sampling=mean_of(_layer_scaled_values, unless_exact(4.0 * SHARED)),
    invariant_to=BY_TENSOR,
)
def _layer_scaled_trace(setting: Setting) -> Estimate:
    if not _known_by_layer(setting):
        return setting.trace_of(in_layer_norms(setting))
    return Estimate(float(_layer_scaled_values(setting).mean()), matvecs=setting.traces.matvecs, seed=setting.seed)


@register(
    "quotient_norm",
    "spectral norm of the Hessian with every tensor in units of its own norm",
    "‖N H N‖₂, N = blockdiag(‖w_l‖ I)",
    "Rangamani, Nguyen, Kumar, Phan, Chin & Tran 2019, arXiv:1902.02434",
    family="curvature",
    worth="to a tolerance",
    cost="matvecs",
    guide="curvature in norms",
    passes=70,
    sampling=end_sampling(lambda setting: setting.quotient, "magnitude", in_norms=True),
    invariant_to=BY_TENSOR,
)
def _quotient_norm(setting: Setting) -> Estimate:
    return setting.quotient.norm


@register(
    "relative_flatness",
    "curvature of the last layer relative to its weights",
    "Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}, w_s the rows of the last layer's weight",
    "Petzka, Kamp, Adilova, Sminchisescu & Boley 2021, arXiv:2001.00939",
    family="curvature",
    worth="exact or estimated",
    cost="forward",
    guide="curvature in norms",
    passes=lambda setting: _flatness_passes(setting, [setting.last.weight], 1.0),
    sampling=mean_of(lambda setting: _flatness_values(setting, [setting.last.weight]), unless_exact(4.0 * SHARED)),
    invariant_to=BY_TENSOR | {"fold_batchnorm", "shift_logits"},
)
def _relative_flatness(setting: Setting) -> Estimate:
    last = setting.last
    if last.weight not in setting.problem.params:
        why = "frozen; set its requires_grad" if last.weight else "computed from other parameters (weight norm?)"
        raise InputError(f"relative_flatness is about the last layer, but the weight of {last.name!r} is {why}.")
    return _relative_flatness_of(setting, [last.weight])


@register(
    "relative_flatness_sum",
    "sum of the relative flatness of all trainable linear layers and convolutions",
    "Σ_l Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}",
    "Petzka, Kamp, Adilova, Sminchisescu & Boley 2021, arXiv:2001.00939",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature in norms",
    passes=lambda setting: _flatness_passes(setting, setting.layers, 3.0),
    sampling=mean_of(lambda setting: _flatness_values(setting, setting.layers), unless_exact(4.0 * SHARED)),
    invariant_to=BY_TENSOR | {"fold_batchnorm", "shift_logits"},
)
def _relative_flatness_sum(setting: Setting) -> Estimate:
    return _relative_flatness_of(setting, setting.layers)


def _flatness_values(setting: Setting, weights: list[str]) -> Tensor:
    """What every sample contributes: exactly, or along some of the probes."""
    key = " ".join(weights)
    return setting.kept[key] if key in setting.kept else setting.forms(*setting.along[key]).mean(1)


def _in_closed_form(setting: Setting, weights: list[str]) -> bool:
    """Whether the outputs are of degree 1 in each of these weights, and the loss offers its factors."""
    degrees = setting.structure.degrees  # none if the network cannot be traced
    return setting.problem.loss.closed_form and all(degrees.get(name, 2) <= 1 for name in weights)


def _flatness_passes(setting: Setting, weights: list[str], each: float) -> float:
    """This many passes for each output in closed form, else one Hessian product for each probe."""
    return each * setting.classes if _in_closed_form(setting, weights) else 5.0 * PROBES


def _relative_flatness_of(setting: Setting, weights: list[str]) -> Estimate:
    """Exact where the outputs are of degree 1 in each of these weights: there the blocks of H and GGN are the same.

    Elsewhere from probes v_l = (W_l g) zᵀ with sign vectors g, z: E vᵀHv = Σ_l Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}. The
    groups of a convolution are layers of their own, side by side.
    """
    if _in_closed_form(setting, weights):
        blocks = setting.blocks if weights is setting.layers else gauss_newton_blocks(setting, weights)
        values = torch.stack([block.relative for block in blocks.values()]).sum(0)
        setting.kept[" ".join(weights)] = values
        return Estimate(float(values.mean()), seed=setting.seed)
    op, draws, vectors = setting.hessian, [], []
    params = setting.problem.params
    for index in range(PROBES if setting.probes is None else min(PROBES, setting.probes)):
        generator = setting.generator(index, 5)
        parts = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in params.items()}
        for name in weights:
            rows, vector = (matrices(setting.owners[name], tensor[name]) for tensor in (params, parts))
            shape = (2, len(rows), rows[0, 0].numel())
            signs = torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(rows)
            columns = rows.flatten(2) @ signs[0][:, :, None]
            vector += (columns * signs[1][:, None]).reshape(rows.shape)  # a view: this fills parts
        probe = torch.cat([parts[name].reshape(-1) for name in op.names])
        draws.append(float(probe.double() @ (op @ probe).double()))
        vectors.append(probe)
    setting.along[" ".join(weights)] = vectors[:SHARED]
    return Estimate.from_draws(torch.tensor(draws, dtype=torch.float64), seed=setting.seed)


@register(
    "normalised_sharpness",
    "sharpness of the weights after the best scaling of every output and input channel",
    "Σ_l min_{r,c>0} Σ_{ij} [h_ij r_i²c_j² + W_ij²/(r_i²c_j²)], h the diagonal of the Gauss-Newton matrix, i and j the "
    "channels of layer l, or of one of its groups",
    "Tsuzuku, Sato & Sugiyama 2020, arXiv:1901.04653",
    family="curvature",
    worth="to a tolerance",
    cost="backward",
    guide="curvature in sizes",
    passes=lambda setting: 3.0 * setting.classes,
    sampling=not_known("the best scaling of a subset is not that of all data: the interval would not hold"),
    invariant_to=DIAGONAL | {"fold_batchnorm", "split_units"},
)
def _normalised_sharpness(setting: Setting) -> Estimate:
    """Over the weights of linear layers and convolutions; no further constant factor.

    Rows are output channels and columns input channels, in a grouped convolution those of each group by themselves: the
    same index in the next group is another channel, which a rescaling of the network scales separately. h is the
    diagonal of H itself for ReLU networks (mathematics 4.2), and unlike it never negative elsewhere.
    """
    total, left, open_ones = 0.0, 0.0, []
    for name in setting.layers:
        owner, weight = setting.owners[name], setting.problem.params[name].double()
        sums = [matrices(owner, tensor).sum(3) for tensor in (setting.blocks[name].diagonal, weight.square())]
        found = [_balanced(h, w) for h, w in zip(*sums, strict=True)]
        total, left = total + sum(value for value, _, _ in found), left + sum(rest for _, rest, _ in found)
        if not all(converged for _, _, converged in found):
            open_ones.append(name)
    if open_ones:
        reason = f"the scalings of {', '.join(open_ones)} still move"
        return Estimate(total, seed=setting.seed, reason=reason, status="not converged")
    return Estimate(total, seed=setting.seed, tolerance=left, status="converged")


def _balanced(h: Tensor, w: Tensor, steps: int = 2000, tol: float = 1e-9) -> tuple[float, float, bool]:
    """Minimum over a, b > 0 of Σ_ij h_ij a_i b_j + w_ij/(a_i b_j), convex in the logarithms: alternating steps.

    Each step gains less than the one before, in the end by a constant factor: what is left to gain is the rest of that
    series, the second number. The third says whether a step gained as little as `tol`. On the CPU: the steps are many
    and short.
    """
    h, w = h.cpu(), w.cpu()
    whole = None
    while h.numel() and h.shape != whole:  # a row without h or without w can be scaled away, and then others
        whole = h.shape
        rows, columns = (h.sum(1) > 0) & (w.sum(1) > 0), (h.sum(0) > 0) & (w.sum(0) > 0)
        h, w = h[rows][:, columns], w[rows][:, columns]
    if not h.numel():
        return 0.0, 0.0, True
    b = torch.ones(h.shape[1], dtype=torch.float64)
    before, last = math.inf, math.inf
    for _ in range(steps):
        a = ((w @ (1 / b)) / (h @ b)).sqrt()
        b = (((1 / a) @ w) / (a @ h)).sqrt()
        value = float(a @ h @ b + (1 / a) @ w @ (1 / b))
        gain = before - value
        if gain <= tol * value:
            rate = min(gain / last, 0.999) if 0 < gain < last < math.inf else 0.5
            return value, max(gain, 0.0) * rate / (1 - rate) + torch.finfo(torch.float64).eps * value, True
        before, last = value, gain
    return before, math.nan, False
