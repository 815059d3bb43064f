"""What several studies share: training (the same call gives the same job, so the same cached network) and spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained

BATCH = 128
MOMENTUM = 0.9
LAST_RATE = 0.01  # relative to the first, by the schedule of Eq. 14


class Network(NamedTuple):
    """A network of paper C, its recipe, and the numbers that the paper prints for γ = 0, 1e-4, 5e-4."""

    builder: str
    data: str
    lr: float
    epochs: int
    figure: str
    batch_norm: str = "eval"
    augment: bool = False
    pixels: tuple[str, ...] = ("unit",)
    spectral_norm: tuple[float, ...] = ()
    validation: tuple[float, ...] = ()
    gap: tuple[float, ...] = ()


NETWORKS = {
    "softmax": Network(
        "softmax_regression",
        "mnist",
        0.01,
        1000,
        "Fig. 1",
        pixels=("unit", "standard"),
        spectral_norm=(12.26, 14.17, 15.84),
        validation=(93.48, 94.0, 94.08),
    ),
    "mlp": Network("mlp", "mnist", 0.01, 50, "Fig. 2", validation=(94.4, 96.46, 96.7), gap=(0.48, 0.51, 0.04)),
    "printed-mlp": Network(
        "printed_mlp", "mnist", 0.01, 50, "Fig. 2", validation=(94.4, 96.46, 96.7), gap=(0.48, 0.51, 0.04)
    ),
    "cnn": Network(
        "all_cnn_c",
        "cifar100",
        0.01,
        300,
        "Fig. 3",
        augment=True,
        pixels=("standard",),
        validation=(53.9, 55.4, 54.9),
        gap=(32.4, 32.5, 31.1),
    ),
    "preresnet": Network(
        "preresnet164",
        "cifar100",
        0.1,
        300,
        "Fig. 4",
        batch_norm="batch",
        augment=True,
        pixels=("standard",),
        validation=(72.78, 75.56, 76.76),
        gap=(27.21, 24.43, 23.11),
    ),
    "wideresnet": Network(
        "wide_resnet_28_10",
        "cifar100",
        0.1,
        300,
        "Fig. 5",
        batch_norm="batch",
        augment=True,
        pixels=("standard",),
        validation=(75.2, 79.5, 80.6),
        gap=(24.78, 20.48, 19.38),
    ),
}


def paper_a(
    network: str,
    data: str,
    *,
    steps: int,
    checkpoints: int,
    batch_size: int = 256,
    lr: float | None = None,
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
        batch_size: Samples per update.
        lr: The learning rate, if not the paper's.
        options: Options of the network.
        width: Factor on the network's widths.
        train_size: Training points, if not all.
        pixels: "unit" or "standard".
        grey: Colour images as one channel.
        seed: For weights and order.
    """
    from spiritlevel.papers.training import Job, Recipe

    every = max(1, steps // (checkpoints - 1))
    return Job(
        network=network,
        options={**(options or {}), **({} if width == 1.0 else {"width": width})},
        data=data,
        train_size=train_size,
        pixels=pixels,  # type: ignore[arg-type]  # checked there
        grey=grey,
        recipe=Recipe(lr=lr or (0.05 if network == "lenet5" else 0.1), batch_size=batch_size, steps=steps),
        seed=seed,
        keep=tuple(range(0, steps + 1, every)),
        evaluate=("train", "test"),
        evaluate_every=every,
    )


def spectrum_row(
    trained: Trained, *, points: int | None, batch_norm: str, batch_size: int | None, probes: int, steps: int, seed: int
) -> dict[str, Any]:
    """The spectrum of the unregularised loss on the first `points` training points, as plain values for a table."""
    from spiritlevel.estimators import spectrum
    from spiritlevel.operators.matrices import hessian

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


def sharpness_row(
    trained: Trained,
    *,
    points: int | None,
    batch_norm: str,
    batch_size: int | None,
    probes: int,
    steps: int,
    seed: int,
    exact_trace: bool = False,
) -> dict[str, Any]:
    """λ₁, Tr H and Tr H² of the unregularised loss on the first `points` training points, without a density.

    The four largest eigenvalues λ_i with their eigenvectors are found first (`steps` products at most). Probes v
    orthogonal to those then see the rest alone: Tr H ≈ Σλ_i + mean vᵀHv and Tr H² ≈ Σλ_i² + mean ‖Hv‖², so that ‖H‖_F
    is never below λ₁ and its largest part has no error. Cost: `steps` + `probes` products at most.
    """
    import torch

    from spiritlevel.estimators import eigenvalues
    from spiritlevel.operators.matrices import hessian
    from spiritlevel.results import Estimate
    from spiritlevel.samples.traces import sample_traces

    data = (trained.train[0][:points], trained.train[1][:points])
    operator = hessian(trained.model(), data, batch_norm=batch_norm, batch_size=batch_size)
    top = eigenvalues(operator, 4, tol=1e-2, max_matvecs=steps, seed=seed)
    vectors = torch.as_tensor(top.vectors)
    generator = torch.Generator().manual_seed(seed)
    forms, squares = [], []
    for _ in range(probes):
        signs = torch.randint(0, 2, (operator.size,), generator=generator).to(vectors.dtype) * 2 - 1
        signs -= vectors @ (vectors.T @ signs)
        product = operator @ signs
        forms.append(float(signs.double() @ product.double()))
        squares.append(float(product.double().square().sum()))
    values = torch.as_tensor(top.values).double()
    form, square = (
        Estimate.from_draws(torch.tensor(draws, dtype=torch.float64), seed=seed) for draws in (forms, squares)
    )
    trace, error = form.value + float(values.sum()), form.stderr
    if exact_trace:
        trace, error = float(sample_traces(trained.model(), data, method="exact").values.double().mean()), 0.0
    total = square.value + float(values.square().sum())
    return {
        "λ₁": float(values[0]),
        "λ₁ to λ₄": values.tolist(),
        "trace": trace,
        "trace stderr": error,
        "Frobenius norm": total**0.5,
        "Frobenius norm stderr": square.stderr / (2 * total**0.5),
        "Tr(H²)/P": total / operator.size,
        "converged": top.converged,
        "parameters": operator.size,
        "curvature points": len(data[1]),
    }


def exposure(job: Job) -> float:
    """Σαγ/(1 − ρ) over a training run: by how many powers of e its decay alone would shrink the weights.

    About 37 for γ = 5e-4 in paper C's recipe (300 epochs of 45,000 images from lr 0.1, momentum 0.9).
    """
    recipe = job.recipe
    per_epoch, epochs = -(-(job.train_size or 0) // recipe.batch_size), recipe.epochs or 0
    rates = sum(recipe.rate(epoch, epochs) for epoch in range(epochs))
    return per_epoch * rates * recipe.weight_decay / (1 - recipe.momentum)


def training_row(trained: Trained) -> dict[str, Any]:
    """Losses, accuracies, gap and weight norm at the end of a training run, and its exposure to decay."""
    last = trained.history[-1]
    return {
        "train loss": last["train_loss"],
        "train accuracy": last["train_accuracy"],
        "validation accuracy": last["validation_accuracy"],
        "test accuracy": last["test_accuracy"],
        "gap": last["train_accuracy"] - last["validation_accuracy"],
        "weight norm": last["weight_norm"],
        "exposure": exposure(trained.job),
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
    small: bool = False,
    pool: int = 1,
    seed: int = 0,
) -> Job:
    """Paper C's training: batch 128; SGD with momentum 0.9 and L2, or Adam with decoupled decay; Eq. 14's or 15's rate.

    With fewer than the paper's 45,000 training points there are no crops and flips, which would take a narrow network
    hundreds of epochs to fit; and as evaluating the network would cost more than training it, that is done 12 times
    instead of 50, and on as many test points as validation points. At the scale `small` there are crops and flips, and
    all test points, evaluated 6 times. The split into training and validation points changes with the seed.

    Args:
        network: One of `models.NAMES`.
        data: One of `data.names()`.
        lr: The first learning rate.
        epochs: Passes over the training set.
        weight_decay: L2 for SGD, decoupled for Adam.
        adam: Adam in place of SGD.
        average_from: The epoch from which iterates are averaged, with Eq. 15's schedule; None: no averaging, Eq. 14.
        width: Factor on the network's widths.
        train_size: Training points.
        validation: Validation points, split off the training set.
        pixels: "unit" or "standard".
        augment: Crops and flips, with all training points.
        small: Whether this is the scale `small`.
        pool: Every pool × pool pixels averaged to one.
        seed: For weights, order and split.
    """
    from spiritlevel.papers.training import Job, Recipe

    whole = train_size >= 45_000
    options: dict[str, Any] = {} if width == 1.0 else {"width": width}
    averaging: dict[str, Any] = {} if average_from is None else {"average_from": average_from, "schedule": "averaging"}
    kind: dict[str, Any] = {"optimizer": "adam", "decoupled": True} if adam else {"momentum": MOMENTUM}
    settings: dict[str, Any] = {
        "schedule": "paper_c",
        "batch_size": BATCH,
        "augment": augment and (whole or small),
        "crop": max(1, 4 // pool),
        **kind,
        **averaging,
    }
    return Job(
        network=network,
        options=options,
        data=data,
        train_size=train_size,
        validation=validation,
        test_size=None if whole or small else validation,
        pixels=pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(lr=lr, weight_decay=weight_decay, epochs=epochs, **settings),
        seed=seed,
        split_seed=seed,
        pool=pool,
        channels_last=small and network != "all_cnn_c",
        evaluate_every=max(1, epochs // (50 if whole else 6 if small else 12)) * -(-train_size // BATCH),
    )
