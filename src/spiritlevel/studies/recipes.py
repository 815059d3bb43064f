"""Trainings that several studies share: the same call gives the same job, and so the same cached network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spiritlevel.training import Job

MOMENTUM = 0.9
LAST_RATE = 0.01  # of the first, by the schedule of Eq. 14


def paper_c(
    network: str,
    data: str,
    *,
    lr: float,
    epochs: int,
    weight_decay: float = 0.0,
    adam: bool = False,
    average_from: int | None = None,
    width: float = 1.0,
    train_size: int = 45_000,
    validation: int = 5_000,
    pixels: str = "standard",
    augment: bool = True,
    seed: int = 0,
) -> Job:
    """Paper C's training: batch 128; SGD with momentum 0.9 and L2, or Adam with decoupled decay; Eq. 14's or 15's rate.

    Args:
        network: One of `models.NAMES`.
        data: One of `data.names()`.
        lr: The first learning rate.
        epochs: Passes over the training set.
        weight_decay: L2 for SGD, decoupled for Adam.
        adam: Adam in place of SGD.
        average_from: The epoch from which iterates are averaged, after Eq. 15's schedule; None: no averaging, Eq. 14.
        width: Factor on the network's widths.
        train_size: Training points.
        validation: Validation points, split off the training set.
        pixels: "unit" or "standard".
        augment: Crops and flips.
        seed: Of weights and order.
    """
    from spiritlevel.training import Job, Recipe

    options: dict[str, Any] = {} if width == 1.0 else {"width": width}
    averaging: dict[str, Any] = {} if average_from is None else {"average_from": average_from, "schedule": "averaging"}
    kind: dict[str, Any] = {"optimizer": "adam", "decoupled": True} if adam else {"momentum": MOMENTUM}
    settings: dict[str, Any] = {"schedule": "paper_c", "batch_size": 128, "augment": augment, **kind, **averaging}
    return Job(
        network=network,
        options=options,
        data=data,
        train_size=train_size,
        validation=validation,
        pixels=pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(lr=lr, weight_decay=weight_decay, epochs=epochs, **settings),
        seed=seed,
        evaluate_every=max(1, epochs // 50) * -(-train_size // 128),
    )
