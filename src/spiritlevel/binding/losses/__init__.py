"""Losses as functions of the network's outputs, with everything that curvature needs, free of cancellation.

A loss gives each sample's value, its gradient g in the outputs φ, products with its output Hessian A = ∂²ℓ/∂φ², and
A = Σ_j d_j v_j v_jᵀ as *factors*: weights d_j (any size, float64) and vectors v_j (of order 1). Autodiff through a
cross entropy returns half the curvature, or none, once 1 − S_y is below machine epsilon; the forms here use only sums
of positive terms and stay right to rounding at any margin (mathematics 2.2).

One file per idea: `base` what every loss offers, `scalars` of the softmax, `elimination` of its classes,
`cross_entropy` for one choice or one at every position, `in_pieces` the same for outputs that are not multiplied out
(`heads`), `units` single positions as samples, `elementwise` losses with a diagonal Hessian, `exponential`, `callables`
of users, `resolving` names and losses of torch.
"""

from spiritlevel.binding.losses.base import Decisions, Factor, Loss
from spiritlevel.binding.losses.callables import CallableLoss
from spiritlevel.binding.losses.cross_entropy import IGNORED, CausalLM, CrossEntropy, TokenCrossEntropy
from spiritlevel.binding.losses.elementwise import BinaryCrossEntropy, Elementwise, Huber, Poisson, SquaredError
from spiritlevel.binding.losses.exponential import Exponential
from spiritlevel.binding.losses.heads import Head
from spiritlevel.binding.losses.in_pieces import HeadLoss, can_be_in_pieces, decisions_of
from spiritlevel.binding.losses.resolving import NAMED, resolve
from spiritlevel.binding.losses.scalars import aceht, confidence_gap, softmax_parts
from spiritlevel.binding.losses.units import OfPositions, Unit, of_units, unit_batches

__all__ = [
    "IGNORED",
    "NAMED",
    "BinaryCrossEntropy",
    "CallableLoss",
    "CausalLM",
    "CrossEntropy",
    "Decisions",
    "Elementwise",
    "Exponential",
    "Factor",
    "Head",
    "HeadLoss",
    "Huber",
    "Loss",
    "OfPositions",
    "Poisson",
    "SquaredError",
    "TokenCrossEntropy",
    "Unit",
    "aceht",
    "can_be_in_pieces",
    "confidence_gap",
    "decisions_of",
    "of_units",
    "resolve",
    "softmax_parts",
    "unit_batches",
]
