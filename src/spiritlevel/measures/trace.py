"""The trace of the Hessian."""

from __future__ import annotations

from torch import Tensor

from spiritlevel.measures.ends import PROBES
from spiritlevel.measures.registry import UNSEEN, register
from spiritlevel.measures.sampling import mean_of
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.samples.choosing import CHAIN_COST, MANY_CLASSES, SAMPLED_PASSES
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
    if factors is None or not setting.by_norms or not setting.traces.layers:
        return None
    layers = setting.traces.layers
    means = setting.once("mean traces", lambda: {name: float(values.mean()) for name, values in layers.items()})
    return sum(mean / factors[name] ** 2 for name, mean in means.items())


def _predicted_mean_eigenvalue(setting: Setting, transformed: Transformed) -> float | None:
    value = predicted_trace(setting, transformed)
    return None if value is None else value / setting.problem.size


def trace_passes(setting: Setting, unless_exact: float = 0.0) -> float:
    """Roughly one pass for each output where that is exact; else a recursion along a chain, or the default probes.

    `unless_exact` is what another measure adds otherwise.
    """
    exact = _exact_passes(setting)
    if exact is None:
        if setting.probes is not None:  # an audit takes fewer
            return setting.probes * max(3.0, unless_exact / PROBES)
        return 3.0 * DEFAULT_PROBES + unless_exact
    return exact if setting.structure.exact else exact + unless_exact


def _exact_passes(setting: Setting) -> float | None:
    """What an exact trace takes; `None` if it must be estimated."""
    problem, structure = setting.problem, setting.structure
    if setting.by_norms:
        return 2.0 + (setting.classes if setting.classes <= MANY_CLASSES else SAMPLED_PASSES + 1)
    if problem.loss.closed_form and not structure.failure:
        with problem.active():
            chain = find_chain(problem, problem.place(*setting.batches.first(3))[0])
        if chain is not None and chain.cost <= CHAIN_COST:
            return 1.0 + chain.cost / problem.size
    return None


def _mean_trace(setting: Setting) -> Estimate:
    """Tr H: of every sample, or, for the few probes of an audit, by products that the spectrum needs anyway."""
    by_samples = setting.probes is None or setting.coupling == "loss" or _exact_passes(setting) is not None
    if by_samples and not setting.problem.sharded:
        return setting.trace
    return setting.once(
        "trace by products",
        lambda: setting.trace_of(setting.hessian),
    )


@register(
    "trace",
    "sum of the eigenvalues of the Hessian",
    "Tr H",
    "paper A, section 3; paper C",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature",
    passes=trace_passes,
    sampling=mean_of(lambda setting: setting.traces.values),
    also_called=("hessian_trace",),
    in_shards=True,
    invariant_to=UNSEEN,
    predict=predicted_trace,
)
def _trace(setting: Setting) -> Estimate:
    return _mean_trace(setting)


@register(
    "mean_eigenvalue",
    "mean eigenvalue of the Hessian",
    "Tr H / P",
    "paper C",
    family="curvature",
    worth="exact or estimated",
    cost="backward",
    guide="curvature",
    passes=trace_passes,
    sampling=mean_of(lambda setting: setting.traces.values / setting.problem.size),
    in_shards=True,
    invariant_to=UNSEEN,
    predict=_predicted_mean_eigenvalue,
)
def _mean_eigenvalue(setting: Setting) -> Estimate:
    return _mean_trace(setting).scaled(1 / setting.problem.size)
