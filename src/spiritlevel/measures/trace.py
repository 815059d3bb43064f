"""The trace of the Hessian."""

from __future__ import annotations

from torch import Tensor

from spiritlevel.measures.registry import register
from spiritlevel.measures.sampling import mean_of
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.transforms import Transformed


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
    factors, traces = _numbers(transformed), setting.traces
    if factors is None or not traces.layers:
        return None
    return sum(float(values.mean()) / factors[name] ** 2 for name, values in traces.layers.items())


def _predicted_mean_eigenvalue(setting: Setting, transformed: Transformed) -> float | None:
    value = predicted_trace(setting, transformed)
    return None if value is None else value / setting.problem.size


@register(
    "trace",
    "sum of the eigenvalues of the Hessian",
    "Tr H",
    "paper A, section 3; paper C",
    cost="backward",
    sampling=mean_of(lambda setting: setting.traces.values),
    predict=predicted_trace,
)
def _trace(setting: Setting) -> Estimate:
    return setting.traces.mean()


@register(
    "mean_eigenvalue",
    "mean eigenvalue of the Hessian",
    "Tr H / P",
    "paper C",
    cost="backward",
    sampling=mean_of(lambda setting: setting.traces.values / setting.problem.size),
    predict=_predicted_mean_eigenvalue,
)
def _mean_eigenvalue(setting: Setting) -> Estimate:
    return setting.traces.mean().scaled(1 / setting.problem.size)
