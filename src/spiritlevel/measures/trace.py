"""The trace of the Hessian."""

from __future__ import annotations

from torch import Tensor

from spiritlevel.measures.registry import UNSEEN, register
from spiritlevel.measures.sampling import mean_of
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.samples.choosing import CHAIN_COST
from spiritlevel.samples.collecting import DEFAULT_PROBES
from spiritlevel.transforms import Transformed
from spiritlevel.watching.chains import find_chain


def _numbers(transformed: Transformed) -> dict[str, float] | None:
    """The factor of every parameter tensor, if the function stays and each is one number."""
    factors = transformed.certificate.factors
    if factors is None or transformed.certificate.scale != 1.0:
        return None
    if any(isinstance(factor, Tensor) and factor.numel() > 1 for factor in factors.values()):
        return None
    return {name: float(factor) for name, factor in factors.items()}


def predicted_trace(setting: Setting, transformed: Transformed) -> float | None:
    """Σ_l Tr H_ll/τ_l²."""
    factors = _numbers(transformed)
    if factors is None or setting.coupling == "loss" or not (traces := setting.traces).layers:
        return None
    return sum(float(values.mean()) / factors[name] ** 2 for name, values in traces.layers.items())


def _predicted_mean_eigenvalue(setting: Setting, transformed: Transformed) -> float | None:
    value = predicted_trace(setting, transformed)
    return None if value is None else value / setting.problem.size


def trace_passes(setting: Setting, unless_exact: float = 0.0) -> float:
    """One pass for each output, roughly, where that is exact; else a recursion along a chain, or the default probes.

    `unless_exact` is what another measure adds to that.
    """
    problem, structure = setting.problem, setting.structure
    if structure.exact and problem.loss.closed_form:
        return 2.0 + setting.classes
    if problem.loss.closed_form and not structure.failure:
        with problem.active():
            chain = find_chain(problem, problem.place(*setting.batches.first(3))[0])
        if chain is not None and chain.cost <= CHAIN_COST:
            return 1.0 + chain.cost / problem.size + unless_exact
    return 7.0 * DEFAULT_PROBES + unless_exact


@register(
    "trace",
    "sum of the eigenvalues of the Hessian",
    "Tr H",
    "paper A, section 3; paper C",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    passes=trace_passes,
    sampling=mean_of(lambda setting: setting.traces.values),
    also_called=("hessian_trace",),
    invariant_to=UNSEEN,
    predict=predicted_trace,
)
def _trace(setting: Setting) -> Estimate:
    return setting.trace


@register(
    "mean_eigenvalue",
    "mean eigenvalue of the Hessian",
    "Tr H / P",
    "paper C",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    passes=trace_passes,
    sampling=mean_of(lambda setting: setting.traces.values / setting.problem.size),
    invariant_to=UNSEEN,
    predict=_predicted_mean_eigenvalue,
)
def _mean_eigenvalue(setting: Setting) -> Estimate:
    return setting.trace.scaled(1 / setting.problem.size)
