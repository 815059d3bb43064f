"""The Hessian as training steps meet it: the largest eigenvalues of one mini-batch after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from spiritlevel.arguments import checked
from spiritlevel.binding.batches import picked
from spiritlevel.binding.context import Context
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, whole_number
from spiritlevel.estimators import eigenvalues
from spiritlevel.operators.matrices import hessian_in
from spiritlevel.results import BatchEigenvalues

__all__ = ["batch_eigenvalues"]


@checked
def batch_eigenvalues(
    model: nn.Module,
    data: Any,
    *,
    k: int = 5,
    count: int = 16,
    tol: float = 1e-2,
    loss: Any = "cross_entropy",
    params: Any = None,
    weight_decay: float = 0.0,
    batch_norm: str = "eval",
    batch_size: int = 16,
    memory: int | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> BatchEigenvalues:
    """The k largest eigenvalues of ∇²L_B for `count` mini-batches B, drawn at random without replacement.

    A training step sees the curvature of its batch, which is larger than that of all data: the largest eigenvalue
    is convex in the matrix, so the mean over batches is at least the value for the mean loss. Networks with and
    without convolutions have been compared by the spectra of mini-batches.

    Each eigenvalue is found to a residual of `tol` times the largest, or `converged` says for which batches it was not.
    Cost: 10 to 40 Hessian products per batch.

    Args:
        model: any module; it is left as it was.
        data: as in `hessian`.
        k: eigenvalues per batch.
        count: mini-batches, fewer if the data do not hold that many.
        tol: relative residual.
        loss: as in `hessian`, like `params`, `weight_decay` and `memory`.
        params: the parameters to measure.
        weight_decay: γ of a penalty ½γ‖θ‖²; adds γ to every eigenvalue.
        batch_norm: "eval", or "batch" for the statistics of each mini-batch.
        batch_size: samples in a mini-batch; part of the definition.
        memory: for the products.
        progress: called with (what, done, total) before every batch.
        seed: of the batches and of the eigenvectors' start.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: see `Reading`.

    Reference: Park & Kim, ICLR 2022, arXiv:2202.06709.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    >>> sorted(batch_eigenvalues(net, data, k=1, batch_size=1, loss="squared_error").values.flatten().tolist())
    [1.0, 9.0]
    """
    k, batch_size = whole_number(k, "k", 1), whole_number(batch_size, "batch_size", 1)
    count = whole_number(count, "count", 1)
    whole = Context(
        model, data, loss=loss, params=params, batch_norm=batch_norm, memory=memory, seed=seed, ordered=False, **reading
    )
    if whole.problem.size < k:
        raise InputError(f"k={k} eigenvalues need as many parameters, got {whole.problem.size}.")
    notes = tuple(whole.notes)
    if whole.count < batch_size:
        notes += (f"the data hold {whole.count:,} samples, fewer than a batch of {batch_size:,}: they are one batch",)
        batch_size = whole.count
    order = np.random.default_rng((seed, 2)).permutation(whole.count)
    count = min(count, whole.count // batch_size)
    rows, residuals, converged, products = [], [], [], 0
    for number in range(count):
        if progress is not None:
            progress("mini-batches", number, count)
        chosen = torch.from_numpy(np.sort(order[number * batch_size : (number + 1) * batch_size]))
        one = whole.on(picked(whole.batches, chosen), read=True)
        pairs = eigenvalues(hessian_in(one, weight_decay), k=k, tol=tol, vectors=False, seed=seed)
        rows.append(pairs.values.double().cpu())
        residuals.append(pairs.residuals.double().cpu())
        converged.append(pairs.converged)
        products += pairs.matvecs
    return BatchEigenvalues(
        values=torch.stack(rows),
        residuals=torch.stack(residuals),
        converged=torch.tensor(converged),
        batch_size=batch_size,
        samples=whole.count,
        matvecs=products,
        loss=whole.problem.loss.name,
        batch_norm=batch_norm,
        weight_decay=weight_decay,
        seed=seed,
        notes=notes,
    )
