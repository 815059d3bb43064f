"""Hidden margins in units of how far apart two halves of a class lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from torch import Tensor, nn

from spiritlevel.errors import InputError
from spiritlevel.measures.margins import check_one_space, quantile
from spiritlevel.measures.registry import BY_TENSOR, SCALED, register
from spiritlevel.measures.sampling import not_known
from spiritlevel.measures.setting import HIDDEN, Setting
from spiritlevel.results import Estimate
from spiritlevel.samples.distances import own
from spiritlevel.samples.margins import layout_in

SPLITS = 8  # random splits of every class
LARGEST = 256  # samples in one half; the optimal pairing of n takes n³


def half_distance(points: np.ndarray, generator: np.random.Generator) -> float:
    """W₁ between two random halves of the points: the mean distance of the best pairing, exact for that split."""
    order = generator.permutation(len(points))
    half = min(len(points) // 2, LARGEST)
    costs = cdist(points[order[:half]], points[order[half : 2 * half]])
    return float(costs[linear_sum_assignment(costs)].mean())


def _features(setting: Setting) -> tuple[Tensor, Tensor]:
    """What the last layer reads for every sample, (N, d), for a position at its own place, and the labels."""
    tapped = setting.tapped
    layout = layout_in(tapped, HIDDEN)
    rows, labels = [], []
    batch: list[Any] = []

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        found = own(output.detach(), batch[-1], layout)
        assert found is not None  # as when the distances were measured
        rows.append(found.double().cpu())

    handle = tapped.model.get_submodule(HIDDEN).register_forward_hook(keep)
    try:
        with tapped.problem.active(), torch.no_grad():
            for inputs, targets in tapped.each():
                batch[:] = [inputs]
                tapped.problem.outputs(tapped.problem.params, inputs)
                labels.append(targets.cpu())
    finally:
        handle.remove()
    return torch.cat(rows), torch.cat(labels)


@register(
    "variance_margin",
    "median distance to the boundary at the last layer's input, over how far apart two halves of a class lie there",
    "median of min_{j≠y} (φ_y−φ_j)/‖∇_h(φ_y−φ_j)‖₂ / E_c E W₁(half of class c, other half)",
    "Chuang, Mroueh, Greenewald, Torralba & Jegelka 2021, arXiv:2106.03314",
    family="margin",
    worth="estimated",
    cost="backward",
    passes=4,
    sampling=not_known("halves with more samples lie nearer to each other, so the value rises with their number"),
    direction="wider",
    invariant_to=BY_TENSOR | SCALED | {"fold_batchnorm", "shift_logits", "shift_attention_biases"},
)
def _variance_margin(setting: Setting) -> Estimate:
    """The margin function has Lipschitz constant 1 in h, as the least of signed distances to half-spaces."""
    found = setting.hidden
    assert found.distance is not None
    check_one_space(found)
    features, labels = _features(setting)
    if labels.ndim != 1 or labels.is_floating_point():
        raise InputError("splitting classes into halves needs one class for each sample.")
    classes, counts = labels.unique(return_counts=True)
    if not bool((counts >= 2).any()):
        raise InputError("splitting classes into halves needs a class with at least two samples.")
    generator = np.random.default_rng(setting.seed)
    shares = counts.double() / counts[counts >= 2].sum()
    splits = np.zeros(SPLITS)
    for label, count, share in zip(classes, counts.tolist(), shares.tolist(), strict=True):
        if count >= 2:
            points = features[labels == label].numpy()
            splits += share * np.array([half_distance(points, generator) for _ in range(SPLITS)])
    apart = float(splits.mean())
    if apart == 0:
        raise InputError("all samples of a class are the same to the last layer, so its halves do not differ.")
    value = quantile(0.5)(found.distance) / apart
    error = abs(value) * float(splits.std(ddof=1)) / apart / SPLITS**0.5
    return Estimate(value, stderr=error, dof=SPLITS - 1, seed=setting.seed)
