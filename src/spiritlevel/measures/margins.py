"""Margins of the outputs, and distances to the decision boundary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from spiritlevel.binding.losses import aceht
from spiritlevel.errors import InputError
from spiritlevel.measures.registry import BY_TENSOR, SAME, SCALED, Compute, register
from spiritlevel.measures.sampling import mean_of, not_known, quantile_of, recomputed
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate, Margins
from spiritlevel.samples.margins import margin_bound, printed_margin_bound
from spiritlevel.statistics.correlation import skewness
from spiritlevel.transforms import Transformed


def _times_scale(compute: Compute) -> Callable[[Setting, Transformed], float | None]:
    """A quantity that is proportional to the outputs."""
    return lambda setting, transformed: compute(setting).value * transformed.certificate.scale


def _logit_values(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Setting], Tensor]:
    return lambda setting: setting.column(function.__name__, function)


def _mean_over_samples(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Compute:
    values = _logit_values(function)
    return lambda setting: Estimate(float(values(setting).mean()), seed=setting.seed)


def _aceht(inputs: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
    return aceht(inputs, outputs)


def acehts(setting: Setting) -> Tensor:
    """ACEHT of every sample."""
    return _logit_values(_aceht)(setting)


register(
    "mean_aceht",
    "mean affine cross-entropy Hessian trace",
    "E (‖x‖²+1)(1−ΣS²)",
    "paper A, Proposition 3.1",
    family="curvature",
    worth="exact",
    cost="forward",
    passes=1,
    sampling=mean_of(acehts),
    invariant_to=SAME,
)(_mean_over_samples(_aceht))
register(
    "margin_bound",
    "mean upper bound on ACEHT by the softmax margin γ",
    "E (‖x‖²+1)(1−γ²)",
    "paper A, section 3.2, in the form of mathematics 3.2",
    family="curvature",
    worth="exact",
    cost="forward",
    passes=1,
    sampling=mean_of(_logit_values(margin_bound)),
    invariant_to=SAME,
)(_mean_over_samples(margin_bound))
register(
    "printed_margin_bound",
    "the margin bound as printed, in fact a lower bound on ACEHT; for comparison only",
    "E ‖x‖(1−γ²)",
    "paper A, section 3.2",
    family="curvature",
    worth="exact",
    cost="forward",
    passes=1,
    sampling=mean_of(_logit_values(printed_margin_bound)),
    invariant_to=SAME,
)(_mean_over_samples(printed_margin_bound))


def _statistic(function: Callable[[Tensor], float]) -> Compute:
    return lambda setting: Estimate(function(setting.margins.signed), seed=setting.seed)


def quantile(share: float) -> Callable[[Tensor], float]:
    """The function that takes this quantile, and refuses one that lies between infinities."""

    def compute(values: Tensor) -> float:
        with np.errstate(invalid="ignore"):
            found = float(np.quantile(values.double().cpu().numpy(), share))
        if math.isnan(found):
            raise InputError(
                f"the {share:.0%} quantile lies among infinite distances: no boundary is within reach of these "
                "samples, as their outputs do not depend on what the distance is measured in."
            )
        return found

    return compute


def _signed(setting: Setting) -> Tensor:
    return setting.margins.signed


def _register_margin(name: str, meaning: str, formula: str, function: Callable[[Tensor], float], **more: Any) -> None:
    compute = _statistic(function)
    more.setdefault("invariant_to", SAME)
    more.setdefault("predict", _times_scale(compute))
    more |= {"family": "margin", "worth": "exact", "cost": "forward", "passes": 1, "direction": "wider"}
    register(name, meaning, formula, "paper A, section 4", of_margins=True, **more)(compute)


_register_margin(
    "margin_mean",
    "mean output margin",
    "E Δ, Δ = φ_y − max_{j≠y} φ_j",
    lambda v: float(v.mean()),
    sampling=mean_of(_signed),
    also_called=("margin",),
)
_register_margin(
    "margin_min",
    "smallest output margin",
    "min Δ",
    lambda v: float(v.min()),
    sampling=not_known("a sample that was not measured may have a margin smaller by any amount"),
)
for _share in (0.1, 0.25, 0.5, 0.75, 0.9):
    _register_margin(
        f"margin_q{round(100 * _share)}",
        f"{_share:.0%} quantile of the output margins",
        f"Q_{_share:g}(Δ)",
        quantile(_share),
        sampling=quantile_of(_signed, _share),
    )
_register_margin(
    "margin_skewness",
    "standardised skewness of the output margins",
    "E ((Δ−μ)/σ)³",
    skewness,
    invariant_to=SAME | SCALED,
    predict=None,
    sampling=not_known("rare samples decide the skewness, and a subset may miss them: the interval would not hold"),
)


def _distance(setting: Setting, norm: int | str) -> Estimate:
    return Estimate(quantile(0.5)(setting.distances(norm)), seed=setting.seed)


_ELSAYED = "Elsayed, Krishnan, Mobahi, Regan & Bengio 2018, arXiv:1803.05598"
register(
    "input_distance",
    "median linearised distance of the inputs to the decision boundary, Euclidean",
    "median of min_{j≠y} (φ_y−φ_j)/‖∇_x(φ_y−φ_j)‖₂",
    _ELSAYED,
    family="margin",
    worth="exact",
    cost="backward",
    passes=lambda setting: setting.classes,
    sampling=quantile_of(lambda setting: setting.distances(2), 0.5),
    advice="its samples lie further towards the correct side of the decision boundary",
    direction="wider",
    invariant_to=SAME | SCALED,
)(functools.partial(_distance, norm=2))
register(
    "input_distance_inf",
    "median linearised distance of the inputs to the decision boundary, maximum norm",
    "median of min_{j≠y} (φ_y−φ_j)/‖∇_x(φ_y−φ_j)‖₁",
    _ELSAYED,
    family="margin",
    worth="exact",
    cost="backward",
    passes=lambda setting: setting.classes,
    sampling=quantile_of(lambda setting: setting.distances("inf"), 0.5),
    direction="wider",
    invariant_to=SAME | SCALED,
)(functools.partial(_distance, norm="inf"))


def check_one_space(found: Margins) -> None:
    """Refuse hidden margins of points that have no space, and with it no spread, in common."""
    if not math.isnan(found.spread):
        return
    if found.unit == "token":
        raise InputError(
            "the outputs at a position read other places of the last layer's input too, so positions have no points "
            "there whose spread could be the unit; `sl.margins` with distance=2 and layer= gives the distances alone."
        )
    raise InputError(
        "the inputs of the last layer differ in shape from sample to sample, so they have no spread that could be the "
        "unit; measure the samples of one shape alone."
    )


def _hidden(setting: Setting, lower: float, upper: float) -> Estimate:
    """lower·Q1 + upper·Q3 of the hidden margins, or their median where both are 0."""
    found = setting.hidden
    assert found.distance is not None
    check_one_space(found)
    if found.spread == 0:
        raise InputError("all samples are the same to the last layer, so they have no spread that could be the unit.")
    values = found.distance / found.spread
    if lower == upper == 0:
        return Estimate(quantile(0.5)(values), seed=setting.seed)
    value = (lower * quantile(0.25)(values) if lower else 0.0) + (upper * quantile(0.75)(values) if upper else 0.0)
    return Estimate(value, seed=setting.seed)


for _name, _meaning, _formula, _lower, _upper in (
    ("median", "median", "Q2", 0.0, 0.0),
    ("q1", "first quartile", "Q1", 1.0, 0.0),
    ("q3", "third quartile", "Q3", 0.0, 1.0),
    ("low_fence", "lower fence", "Q1 − 1.5 (Q3 − Q1)", 2.5, -1.5),
    ("high_fence", "upper fence", "Q3 + 1.5 (Q3 − Q1)", -1.5, 2.5),
):
    register(
        f"hidden_margin_{_name}",
        f"{_meaning} of the distances to the boundary at the last layer's input, in units of its spread",
        f"{_formula} of min_{{j≠y}} (φ_y−φ_j)/‖∇_h(φ_y−φ_j)‖₂ / √(total variance of h)",
        "Jiang, Krishnan, Mobahi & Bengio 2018, arXiv:1810.00113",
        family="margin",
        worth="exact",
        cost="backward",
        passes=3,
        sampling=recomputed(),
        direction="wider",
        invariant_to=BY_TENSOR | SCALED | {"fold_batchnorm", "shift_logits", "shift_attention_biases"},
    )(functools.partial(_hidden, lower=_lower, upper=_upper))
