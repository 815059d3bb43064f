"""Norms of the parameters and of the paths through the network; they need no data."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import functionalize

from spiritlevel.errors import InputError, first_line
from spiritlevel.measures.registry import DIAGONAL, register
from spiritlevel.measures.sampling import NO_DATA
from spiritlevel.measures.setting import Setting
from spiritlevel.results import Estimate
from spiritlevel.transforms import Transformed
from spiritlevel.watching.paths import Paths


def check_one_shape(setting: Setting, what: str) -> None:
    """Refuse data whose samples differ in shape, for what is a number of the network as a map of one space of inputs.

    A convolution is another matrix for images of another size, and longer sequences have more paths.
    """

    def find() -> set[tuple[int, ...]]:
        if setting.batches.samples is not None:  # in one tensor
            return set()
        pairs = (pair for pair in setting.batches if len(pair[1]) and isinstance(pair[0], Tensor))
        return {tuple(inputs.shape[1:]) for inputs, _ in pairs}

    shapes = sorted(setting.once("shapes of the inputs", find))
    if len(shapes) > 1:
        raise InputError(
            f"{what} is defined for inputs of one shape, and these have {len(shapes)}, from {shapes[0]} to "
            f"{shapes[-1]}; measure those of one shape alone."
        )


def _predicted_paths(setting: Setting, transformed: Transformed) -> float | None:
    """Biases are scaled with the paths that they start; a map of the inputs changes where paths start."""
    if transformed.inputs is not None or transformed.certificate.factors is None or not transformed.linear:
        return None
    return _path_norm(setting).value * transformed.certificate.scale


def _predicted_norm(setting: Setting, transformed: Transformed) -> float | None:
    factors = transformed.certificate.factors
    if factors is None or not transformed.linear:
        return None
    params = setting.problem.params
    own = setting.once("squares", lambda: {name: float(t.double().square().sum()) for name, t in params.items()})
    squares = 0.0
    for name, tensor in params.items():
        factor = factors[name]
        if isinstance(factor, Tensor) and factor.ndim:
            squares += float((factor.double().cpu() * tensor.double().cpu()).square().sum())
        else:
            squares += float(factor) ** 2 * own[name]
    return math.sqrt(squares)


@register(
    "weight_norm",
    "length of the parameter vector",
    "‖θ‖₂",
    "Neyshabur, Bhojanapalli, McAllester & Srebro 2017, arXiv:1706.08947",
    family="norm",
    worth="exact",
    cost="forward",
    passes=0,
    sampling=NO_DATA,
    direction="larger",
    invariant_to=frozenset({"permute_units"}),
    predict=_predicted_norm,
)
def _weight_norm(setting: Setting) -> Estimate:
    return Estimate(float(setting.theta.double().norm()), seed=setting.seed)


@register(
    "path_norm",
    "root of the sum of squared products of the weights along all paths; biases start paths too",
    "√Σ_paths Π w²",
    "Neyshabur, Bhojanapalli, McAllester & Srebro 2017, arXiv:1706.08947",
    family="norm",
    worth="exact",
    cost="forward",
    passes=0,
    sampling=NO_DATA,
    direction="larger",
    invariant_to=DIAGONAL | {"fold_batchnorm"},
    predict=_predicted_paths,
)
def _path_norm(setting: Setting) -> Estimate:
    """Batch norm folded first; `Paths` has the rules. Max pooling passes on the largest of its sums of paths.

    More positions mean more paths, so inputs of several shapes have no norm in common.
    """
    check_one_shape(setting, "path_norm")
    folded = setting.folded
    problem = folded.problem
    inputs, _ = problem.place(*folded.batches.first(1))
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise InputError("path_norm needs inputs that are one tensor of floats.")
    paths = Paths(inputs)
    # in-place writes become operations of their own; layer norm keeps its name
    forward = functionalize(lambda inputs: problem.outputs(problem.params, inputs))
    try:
        with problem.active(), torch.no_grad(), torch._C.DisableTorchFunction(), paths:
            outputs = forward(inputs)
    except RuntimeError as error:
        first = first_line(error)
        raise InputError(f"path_norm could not follow the operations of the network: {first}.") from error
    if not paths.knows(outputs):
        raise InputError("path_norm: no path leads from the inputs to the outputs.")
    return Estimate(math.sqrt(float(paths.squares(outputs).sum())), seed=setting.seed)
