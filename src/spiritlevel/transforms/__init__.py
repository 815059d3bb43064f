"""Maps that change a network's parameters but keep its function, each with a certificate that says so.

A ReLU network computes the same function at many points in weight space, and its curvature differs between them
without bound (paper B). Every transform here returns `Transformed`: a new model and a `Certificate` of what is
preserved, checked on data. The original is never touched. A certificate's diagonal map T predicts the new Hessian,
H(Tθ) = T⁻¹H(θ)T⁻¹ (mathematics 7.1); `Transformed.hessian` applies it.

Model classes play no role: what may be changed is found by running the network on two samples and following the factor
of every value (`watching.scalings`), or the channels through the recorded operations (`watching.graph`,
`watching.channels`).
"""

from spiritlevel.transforms.attention import bias_shifts, head_mixings, mix_heads, shift_attention_biases
from spiritlevel.transforms.batch_norm import fold_batchnorm
from spiritlevel.transforms.certificates import Transformed
from spiritlevel.transforms.inputs import AffineMap, input_map, standardisation, whitening
from spiritlevel.transforms.logits import logit_shifts, shift_logits
from spiritlevel.transforms.maps import LinearMap
from spiritlevel.transforms.pairs import gains, gates, linear_mixings, mix_linear, scale_gate, shift_norm_gain
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
from spiritlevel.transforms.stream import rotate_stream, stream_rotations
from spiritlevel.transforms.units import permute_units, split_units

FAMILIES = {
    "shift_logits": logit_shifts,
    "mix_heads": head_mixings,
    "shift_attention_biases": bias_shifts,
    "shift_norm_gain": gains,
    "scale_gate": gates,
    "mix_linear": linear_mixings,
    "rotate_stream": stream_rotations,
}
"""The maps of each continuous symmetry, for a network on the bench and a size: for the audit's search."""

__all__ = [
    "AffineMap",
    "LinearMap",
    "RadialMap",
    "ScalingGroup",
    "Transformed",
    "fold_batchnorm",
    "input_map",
    "mix_heads",
    "mix_linear",
    "permute_units",
    "radial",
    "rescale_all",
    "rescale_layers",
    "rotate_stream",
    "scale_before_batchnorm",
    "scale_gate",
    "scale_last_layer",
    "scaling_groups",
    "shift_attention_biases",
    "shift_logits",
    "shift_norm_gain",
    "split_units",
    "standardisation",
    "whitening",
]
