"""What several studies share: trainings (the same call gives the same job, and so the same cached network), spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spiritlevel.training import Job, Trained

BATCH = 128
MOMENTUM = 0.9
LAST_RATE = 0.01  # of the first, by the schedule of Eq. 14


def paper_a(
    network: str,
    data: str,
    *,
    steps: int,
    checkpoints: int,
    batch_size: int = 256,
    options: Mapping[str, Any] | None = None,
    width: float = 1.0,
    train_size: int | None = None,
    pixels: str = "unit",
    grey: bool = False,
    seed: int = 0,
) -> Job:
    """Paper A's training: plain SGD, lr 0.05 for LeNet and 0.1 for the dense network, kept at evenly spaced steps.

    Args:
        network: One of `models.NAMES`.
        data: One of `data.names()`.
        steps: Updates.
        checkpoints: Kept and evaluated steps, from 0 to the last one.
        batch_size: Samples an update.
        options: Of the network.
        width: Factor on the network's widths.
        train_size: Training points, if not all.
        pixels: "unit" or "standard".
        grey: Colour images as one channel.
        seed: Of weights and order.
    """
    from spiritlevel.training import Job, Recipe

    every = max(1, steps // (checkpoints - 1))
    return Job(
        network=network,
        options={**(options or {}), **({} if width == 1.0 else {"width": width})},
        data=data,
        train_size=train_size,
        pixels=pixels,  # type: ignore[arg-type]  # checked there
        grey=grey,
        recipe=Recipe(lr=0.05 if network == "lenet5" else 0.1, batch_size=batch_size, steps=steps),
        seed=seed,
        keep=tuple(range(0, steps + 1, every)),
        evaluate=("train", "test"),
        evaluate_every=every,
    )


def spectrum_row(
    trained: Trained, *, points: int | None, batch_norm: str, batch_size: int | None, probes: int, steps: int, seed: int
) -> dict[str, Any]:
    """The spectrum of the unregularised loss on the first `points` training points, as plain values for a table."""
    from spiritlevel.curvature import hessian
    from spiritlevel.estimators import spectrum

    data = tuple(part[:points] for part in trained.train)
    operator = hessian(trained.model(), data, batch_norm=batch_norm, batch_size=batch_size)
    found = spectrum(operator, probes=probes, steps=steps, tol=1e-3, seed=seed)
    return {
        "λ₁": float(found.largest.values[0]),
        "λ_min": float(found.smallest.values[0]),
        "trace": found.trace.value,
        "trace stderr": found.trace.stderr,
        "Frobenius norm": found.frobenius_norm.value,
        "Frobenius norm stderr": found.frobenius_norm.stderr,
        "Tr(H²)/P": found.mean_square.value,
        "converged": found.largest.converged and found.smallest.converged,
        "density": found.density.to_dict(),
    }


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

    With fewer than the paper's 45,000 training points there are no crops and flips, which would take a narrow network
    hundreds of epochs to fit; and as looking at the network would cost more than training it, that is done 12 times
    instead of 50, and on as many test points as validation points.

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
        augment: Crops and flips, with all training points.
        seed: Of weights and order.
    """
    from spiritlevel.training import Job, Recipe

    whole = train_size >= 45_000
    options: dict[str, Any] = {} if width == 1.0 else {"width": width}
    averaging: dict[str, Any] = {} if average_from is None else {"average_from": average_from, "schedule": "averaging"}
    kind: dict[str, Any] = {"optimizer": "adam", "decoupled": True} if adam else {"momentum": MOMENTUM}
    settings: dict[str, Any] = {
        "schedule": "paper_c",
        "batch_size": BATCH,
        "augment": augment and whole,
        **kind,
        **averaging,
    }
    return Job(
        network=network,
        options=options,
        data=data,
        train_size=train_size,
        validation=validation,
        test_size=None if whole else validation,
        pixels=pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(lr=lr, weight_decay=weight_decay, epochs=epochs, **settings),
        seed=seed,
        evaluate_every=max(1, epochs // (50 if whole else 12)) * -(-train_size // BATCH),
    )
