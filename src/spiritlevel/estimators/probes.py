"""Random vectors, keyed by (seed, stream, index): the same for every chunking; and checks of the arguments for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from spiritlevel.errors import InputError, checked_seed
from spiritlevel.estimators.operator import Product, columns_at_once

_SIGNS, SKETCH, _STARTS = range(3)  # independent streams of random numbers


def signs(product: Product, seed: int, index: int, stream: int = _SIGNS) -> Tensor:
    """Sign vector number `index`, the same whatever else is drawn."""
    generator = np.random.default_rng((seed, stream, index))
    bits = product.space.drawn(lambda count: generator.integers(0, 2, count, dtype=np.int8))
    return torch.from_numpy(2 * bits - 1).to(product.device, product.dtype)


def sign_blocks(product: Product, indices: range, seed: int, stream: int = _SIGNS) -> Iterator[Tensor]:
    """These sign vectors as columns, as many at once as fit."""
    width = columns_at_once(product.size)
    for first in range(0, len(indices), width):
        yield torch.stack([signs(product, seed, index, stream) for index in indices[first : first + width]]).T


def gaussian(product: Product, seed: int, index: int) -> Tensor:
    """Start vector number `index`, whose direction is uniform on the sphere."""
    kind = np.float64 if product.dtype == torch.float64 else np.float32
    generator = np.random.default_rng((seed, _STARTS, index))
    draws = product.space.drawn(lambda count: generator.standard_normal(count, dtype=kind))
    return torch.from_numpy(draws).to(product.device)


def check_probes(who: str, probes: int, rel_err: float | None, seed: int, least: int = 2) -> None:
    """Raise `InputError` if this many probes give no standard error, or for a relative error of 0 or less."""
    if probes < least:
        raise InputError(f"{who} needs probes >= {least} to report a standard error, got {probes}.")
    if rel_err is not None and not rel_err > 0:
        raise InputError(f"{who} needs rel_err > 0, got {rel_err}.")
    checked_seed(seed)
