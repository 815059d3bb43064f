"""The registry of flatness and margin measures: each with its formula, reference, cost and declared invariances.

A measure is a function (model, data, *, loss, batch_norm, seed) → `Estimate`. `MEASURES` holds them by name; `Setting`
holds what several measures of one model share (Hessian operator, traces, margins), so that a set of measures costs
little more than the most expensive of them. A *declared invariance* is the name of a transform that leaves the value
unchanged for every network that it accepts: `TRANSFORMS` lists them. What an optimiser found is a lower bound and is
marked as one. L is the mean loss, θ the P trainable parameters, H = ∇²L without any L2 term. Where a measure is not
defined for a network, `InputError` says why.
"""

from importlib import import_module

from spiritlevel.measures.registry import DEFAULT, MEASURES, TRANSFORMS, Measure, evaluate, select
from spiritlevel.measures.setting import Setting

__all__ = ["DEFAULT", "MEASURES", "TRANSFORMS", "Measure", "Setting", "evaluate", "select"]

# One file for each family registers its measures; they are listed in this order.
for _family in (
    "trace",
    "spectral",
    "fisher",
    "relative",
    "sharpness",
    "pac_bayes",
    "norms",
    "margins",
    "spectral_margin",
    "variance_margin",
    "signals",
):
    import_module(f"{__name__}.{_family}")
