"""What a model says about every sample, how much of the targets this explains, and small pictures of samples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spiritlevel.binding.context import IDLE
from spiritlevel.binding.losses import CrossEntropy
from spiritlevel.binding.ranks import Ranks
from spiritlevel.errors import InputError
from spiritlevel.measures import Setting
from spiritlevel.results import Estimate

_SIDE = 64  # pixels of a picture, at most


class Outcomes(NamedTuple):
    """What a model says about every sample, and whether all of it looks like probabilities instead of logits."""

    classes: Tensor | None  # None where the outputs are not classes
    losses: Tensor
    probabilities: bool
    r_squared: Estimate | None = None  # of a regression


def outcomes(setting: Setting) -> Outcomes:
    """Every sample's predicted class and loss."""
    problem, ranks = setting.problem, setting.ranks
    columns: list[tuple[int, Tensor]] = []
    every = {"probabilities": isinstance(problem.loss, CrossEntropy), "one": True, "labelled": True}
    with ranks.together(), problem.active(), torch.no_grad():
        explained = _Explained(setting.first(1)[1])
        for start, inputs, targets in setting.mine():
            with setting.each_together():
                outputs = problem.outputs(problem.params, inputs)
            if start == IDLE:
                continue
            flat, one = outputs.reshape(len(targets), -1), outputs.ndim <= 2
            explained.update(problem.loss.prediction(outputs.double(), targets), targets)
            if every["probabilities"]:
                axis = problem.loss.class_axis(outputs, targets)
                within = bool(((flat >= 0) & (flat <= 1)).all())
                every["probabilities"] = within and bool((outputs.sum(axis) - 1).abs().max() < 1e-3)
            every["one"] &= one and targets.ndim <= 1
            every["labelled"] &= not targets.is_floating_point() or flat.shape[1] == 1
            classes = flat.argmax(1) if flat.shape[1] > 1 else flat[:, 0] > 0
            columns.append((start, torch.stack([problem.loss.values(outputs, targets).double(), classes.double()], 1)))
    explained.over(ranks)
    sure = {name: bool(ranks.least(int(flag))) for name, flag in every.items()}
    losses, classes = ranks.joined(columns, setting.count, 2).unbind(1)
    found = classes.long() if sure["labelled"] and sure["one"] and explained.count == 0 else None
    return Outcomes(found, losses, sure["probabilities"], explained.r_squared())


class _Explained:
    """How much of the variance of the targets predictions explain, from sums over batches."""

    def __init__(self, targets: Tensor) -> None:
        self.first = self._rows(targets)[0]  # sums are taken relative to this, so that little cancels
        self.count, self.left = 0, 0.0
        self.mean, self.squares = torch.zeros_like(self.first), torch.zeros_like(self.first)

    @staticmethod
    def _rows(targets: Tensor) -> Tensor:
        return targets.double().reshape(len(targets), -1).cpu()

    def update(self, predicted: Tensor | None, targets: Tensor) -> None:
        if predicted is None:
            return
        wanted = self._rows(targets)
        self.left += float((wanted - predicted.reshape(len(targets), -1).cpu()).square().sum())
        moved = wanted - self.first
        self.count += len(wanted)
        self.mean, self.squares = self.mean + moved.sum(0), self.squares + moved.square().sum(0)

    def over(self, ranks: Ranks) -> None:
        """The sums over the batches of all ranks."""
        known = torch.tensor([self.count, self.left], dtype=torch.float64)
        ranks.add([known, self.mean, self.squares])
        self.count, self.left = int(known[0]), float(known[1])

    def r_squared(self) -> Estimate | None:
        if not self.count:
            return None
        total = float((self.squares - self.mean.square() / self.count).sum())
        if not total > 0:
            return Estimate(math.nan, reason="all targets are equal, so there is no variance to explain")
        return Estimate(1 - self.left / total)


def thumbnails(samples: Any) -> Tensor:
    """Small uint8 pictures of samples that are images; one range of grey for all."""
    inputs = samples[0] if isinstance(samples, tuple) else None
    if not isinstance(inputs, Tensor) or inputs.is_complex():
        raise InputError("pictures need inputs that are one tensor per sample.")
    images = inputs.detach().float().cpu()
    images = images[:, None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 4:
        raise InputError(f"pictures need images of 1 or 3 channels, got samples of shape {tuple(inputs.shape[1:])}.")
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:  # standardised inputs have a range of their own
        images = (images - low) / ((high - low) or 1.0)
    if max(images.shape[2:]) > _SIDE:
        scale = _SIDE / max(images.shape[2:])
        sides = [max(1, round(side * scale)) for side in images.shape[2:]]
        images = F.interpolate(images, size=sides, mode="area")
    return (images * 255).round().to(torch.uint8)
