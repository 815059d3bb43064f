"""The Fisher matrix, true and empirical, and the length of the parameters in its metric."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from spiritlevel.binding.parameters import Params, along
from spiritlevel.estimators import operator_trace
from spiritlevel.measures.ends import PROBES
from spiritlevel.measures.registry import LINEAR, UNSEEN, register
from spiritlevel.measures.sampling import MORE, SHARED, kept, mean_of, shared_signs, unless_exact
from spiritlevel.measures.setting import Setting
from spiritlevel.measures.trace import predicted_trace, trace_passes
from spiritlevel.operators.matrices import empirical_fisher_in
from spiritlevel.operators.products import outputs_along
from spiritlevel.results import Estimate
from spiritlevel.watching.recording import GradientNorms


def _quadratics(setting: Setting, direction: Params) -> Tensor:
    """vᵀGₙv of every sample, G the Gauss-Newton matrix: one forward-mode pass."""
    problem = setting.problem

    @torch.enable_grad()  # for reverse mode, where an operation has no forward mode
    def quadratic(inputs: Any, targets: Tensor) -> Tensor:
        outputs, slope = outputs_along(problem, direction, problem.params, inputs)
        return problem.loss.quadratic(outputs, targets, slope)

    return setting.of_samples(quadratic)


def _fisher_trace_values(setting: Setting) -> Tensor:
    if setting.exact_traces is not None:
        return setting.exact_traces.values
    return torch.stack([_quadratics(setting, setting.split(v)) for v in shared_signs(setting)]).mean(0)


@register(
    "fisher_trace",
    "trace of the Fisher matrix under the model's own labels, which is the Gauss-Newton matrix",
    "E_x E_{c~S} ‖∇ℓ(θ; x, c)‖² = Tr GGN",
    "Golatkar, Achille & Soatto 2019, arXiv:1905.13277",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature",
    passes=functools.partial(trace_passes, unless_exact=4.0 * PROBES),
    sampling=mean_of(_fisher_trace_values, unless_exact(2.0 * SHARED)),
    invariant_to=UNSEEN,
    predict=lambda setting, transformed: (
        None if setting.exact_traces is None else predicted_trace(setting, transformed)
    ),
)
def _fisher_trace(setting: Setting) -> Estimate:
    if setting.exact_traces is not None:  # there Tr H = Tr GGN (mathematics 4.2)
        return setting.exact_traces.mean()
    return setting.trace_of(setting.gauss_newton)


def _empirical_fisher_values(setting: Setting) -> Tensor:
    if "empirical_fisher_trace" in setting.kept:
        return setting.kept["empirical_fisher_trace"]
    problem = setting.problem

    @torch.enable_grad()  # likewise
    def squares(inputs: Any, targets: Tensor) -> Tensor:
        def here(params: Params) -> Tensor:
            return problem.losses(params, inputs, targets)

        slopes = [along(here, problem.params, setting.split(v))[1] for v in shared_signs(setting)]
        return torch.stack(slopes, 1).detach().double().square().mean(1)

    return setting.of_samples(squares)


@register(
    "empirical_fisher_trace",
    "mean squared norm of the per-sample gradients, with the true labels",
    "E ‖∇ℓ(θ; x, y)‖²",
    "Golatkar, Achille & Soatto 2019, arXiv:1905.13277",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature",
    passes=3,
    sampling=mean_of(_empirical_fisher_values, unless_exact(2.0 * SHARED), MORE),
    invariant_to=UNSEEN,
)
def _empirical_fisher_trace(setting: Setting) -> Estimate:
    problem = setting.problem
    if setting.structure.failure or not problem.loss.closed_form:
        fisher = empirical_fisher_in(setting)
        return operator_trace(fisher, probes=setting.probe_count, seed=setting.seed)
    with problem.active():
        inputs, _ = problem.place(*setting.batches.first(3))
        norms = GradientNorms(problem, inputs, setting.structure, 1)

    @torch.enable_grad()
    def squares(inputs: Any, targets: Tensor) -> Tensor:
        recording = norms.record(inputs)
        outputs = recording.outputs.detach()
        slope = problem.loss.gradient(outputs, targets).reshape(outputs.shape)
        size = slope.reshape(len(targets), -1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        unit = slope / size.reshape(-1, *[1] * (slope.ndim - 1))  # vectors of order 1 keep all digits
        (found,) = recording.squared_norms([unit], last=True)
        return size.square().cpu() * sum(square.detach().double().cpu() for square in found.values())

    values = setting.kept["empirical_fisher_trace"] = setting.of_samples(squares)
    return Estimate(float(values.mean()), matvecs=1, seed=setting.seed)


@register(
    "fisher_rao_norm",
    "length of the parameters in the Fisher metric",
    "θᵀFθ, F the Gauss-Newton matrix",
    "Liang, Poggio, Rakhlin & Stokes 2019, arXiv:1711.01530",
    family="curvature",
    worth="exact",
    cost="backward",
    passes=3,
    sampling=mean_of(kept("fisher_rao_norm")),
    invariant_to=LINEAR | {"shift_logits"},
)
def _fisher_rao_norm(setting: Setting) -> Estimate:
    """It survives linear maps of the parameters and shifts that no loss sees: proved, (Tθ)ᵀT⁻ᵀFT⁻¹(Tθ) = θᵀFθ.

    Affine moves that are undone elsewhere (the biases of values) change it, as does folding parameters into others.
    """
    values = _quadratics(setting, setting.problem.params)
    setting.kept["fisher_rao_norm"] = values
    return Estimate(float(values.mean()), matvecs=1, seed=setting.seed)
