"""Maps that change a network's parameters and keep its function, each with a certificate that says so.

A ReLU network computes the same function with its weights in many places, and its curvature differs between them
without bound (paper B). Every transform here returns `Transformed`: a new model and a `Certificate` of what is
preserved, checked on data. The original is never touched. A certificate's diagonal map T predicts the new Hessian,
H(Tθ) = T⁻¹H(θ)T⁻¹ (mathematics 7.1); `Transformed.hessian` applies it.

The layers that may be scaled are found by running the network on two samples and following the factor of every value
(`watching.scalings`).
"""

from spiritlevel.transforms.batch_norm import fold_batchnorm
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.inputs import AffineMap, input_map, standardisation, whitening
from spiritlevel.transforms.radial_maps import RadialMap, radial
from spiritlevel.transforms.scaling import (
    ScalingGroup,
    rescale_all,
    rescale_layers,
    scale_before_batchnorm,
    scale_last_layer,
    scaling_groups,
)
from spiritlevel.transforms.scaling import why_no_groups as why_no_groups  # for the audit

__all__ = [
    "AffineMap",
    "RadialMap",
    "ScalingGroup",
    "Transformed",
    "fold_batchnorm",
    "input_map",
    "radial",
    "rescale_all",
    "rescale_layers",
    "scale_before_batchnorm",
    "scale_last_layer",
    "scaling_groups",
    "standardisation",
    "whitening",
]
