"""How to train: optimiser, learning rates, averages, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from spiritlevel.binding import losses
from spiritlevel.errors import InputError, unknown_name, whole_number
from spiritlevel.storage import plain

Pair = tuple[Tensor, Tensor]
Row = dict[str, float]
Progress = Callable[[str, int, int], None]
"""Called with what is under way (with loss, accuracy and speed), the steps done, and the total number of steps."""
_LATER: dict[str, Any] = {"pool": 1, "channels_last": False, "crop": 4, "check_every": None}
"""Fields that were added later, with their defaults: at these they are left out of keys."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Every field is part of the key of a job.

    Weights are updated `steps` times, or for `epochs` passes over the data, each in a new random order. The last
    batch of a pass is smaller if the batch size does not divide the data; one of a single sample is left out, since
    batch norm cannot take it. A batch size larger than the data means all of the data.

    Schedules, with the epoch t from 0, the number of epochs T, and α₀ = `lr` (paper C, Eq. 14 and 15; mathematics 9.3):

    - "constant": α₀.
    - "paper_c": with u = t/T and r = 0.01: α₀ for u ≤ 0.5, then linear down to α₀r at u = 0.9, then α₀r.
    - "averaging": the same with u = t/`average_from` and r = `averaged_lr`. The paper prints 2α₀ for the last rate; a
      decay cannot end there, and ½α₀ is presumably meant. `averaged_lr=2.0` is what is printed.

    >>> Recipe(lr=0.1, momentum=0.9, weight_decay=5e-4, epochs=300, schedule="paper_c").rate(270, 300)
    0.001
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    """"adam" has β = (0.9, 0.999) and ε = 1e-8."""
    lr: float = 0.1
    momentum: float = 0.0
    """Heavy ball, without dampening; for "sgd" only."""
    weight_decay: float = 0.0
    """γ of the penalty ½γ‖w‖² on all parameters, as PyTorch's `weight_decay`."""
    decoupled: bool = False
    """Multiply the weights by 1 − lr·γ at every step instead of adding the decay to the gradient (AdamW)."""
    batch_size: int = 128
    steps: int | None = None
    epochs: int | None = None
    schedule: Literal["constant", "paper_c", "averaging"] = "constant"
    average_from: int | None = None
    """Average the weights of this epoch (from 0) and all later ones; the network is then that average, with its
    batch-norm statistics recomputed over the training set."""
    average_every: Literal["step", "epoch"] = "step"
    """Average over the weights after every step, or at the end of every epoch."""
    averaged_lr: float = 0.5
    """The learning rate of schedule "averaging" from 0.9·`average_from` on, in units of `lr`."""
    augment: bool = False
    """Crop (after `crop` zeros on every side) and flip each image at random, differently in every step."""
    crop: int = 4
    """Pixels of zeros around an image before it is cropped back to its size."""
    loss: str = "cross_entropy"
    until_loss: float | None = None
    """Stop at the first evaluation or check at which the loss over the training set is at most this."""
    until_step: int = 0
    """Before this step, `until_loss` has no effect."""
    check_every: int | None = None
    """Steps between two checks of whether `until_loss` has been reached, besides the evaluations. A check is cheap as
    long as it has not: it stops as soon as the running sum of the losses rules it out."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("optimizer", ("sgd", "adam")),
            ("schedule", ("constant", "paper_c", "averaging")),
            ("average_every", ("step", "epoch")),
            ("loss", tuple(losses.NAMED)),
        ):
            if getattr(self, name) not in choices:
                raise unknown_name(name, getattr(self, name), choices)
        for name in ("lr", "averaged_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"a recipe needs a positive {name}, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"a recipe needs a momentum in [0, 1), got {self.momentum}.")
        if self.momentum and self.optimizer != "sgd":
            raise InputError(
                f"momentum={self.momentum} is for optimizer='sgd'; Adam has moments of its own, so leave it at 0."
            )
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"a recipe needs a weight_decay >= 0, got {self.weight_decay}.")
        whole_number(self.batch_size, "batch_size", 1)
        whole_number(self.crop, "crop", 0)
        if self.check_every is not None:
            whole_number(self.check_every, "check_every", 1)
        if (self.steps is None) == (self.epochs is None):
            raise InputError(f"a recipe needs either steps or epochs, got steps={self.steps}, epochs={self.epochs}.")
        whole_number(*((self.steps, "steps") if self.epochs is None else (self.epochs, "epochs")), 0)
        if self.average_from is not None:
            whole_number(self.average_from, "average_from", 0)
        elif self.schedule == "averaging":
            raise InputError("schedule='averaging' needs average_from, the epoch from which the weights are averaged.")

    def rate(self, epoch: int, epochs: float) -> float:
        """The learning rate in `epoch` (from 0) of `epochs`."""
        if self.schedule == "constant":
            return self.lr
        ratio, length = (0.01, epochs) if self.schedule == "paper_c" else (self.averaged_lr, self.average_from or 0)
        done = epoch / length if length else 1.0
        if done <= 0.5:
            return self.lr
        return self.lr * (ratio + (1 - ratio) * max(0.9 - done, 0.0) / 0.4)


def deciding_fields(config: object) -> dict[str, Any]:
    """The fields of a job or a recipe that determine a key: all but those added later that are at their defaults."""
    fields: dict[str, Any] = plain(config)
    return {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}
