"""Differences of gradients in place of products, on problems whose derivatives are known, without any process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spiritlevel.binding import shards
from spiritlevel.estimators.space import Space
from spiritlevel.operators.differences import DifferencedHessian

SIZE = 40


class Known(DifferencedHessian):
    """L = Σ f(aᵢᵀθ) for known f, whose gradients carry noise of a known size."""

    def __init__(self, noise: float, cubic: float, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) / math.sqrt(SIZE)
        self.theta = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        self.sigma, self.cubic, self.generator = noise, cubic, generator
        super(DifferencedHessian, self).__init__(self._multiply, SIZE, dtype=dtype)
        self.space, self._decay = Space(SIZE), 0.0
        self._gradients = self._products = 0
        self._error = self._form_error = 0.0
        self.noise, self.step = noise, 1e-3
        unit = self.unit(5)
        self._begin(unit, self._difference(unit, self.step)[1], float(self.theta.norm()))

    def unit(self, seed: int) -> Tensor:
        draw = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return draw / draw.norm()

    def _gradient(self, unit: Tensor, step: float) -> tuple[float, Tensor]:
        point = self.theta + step * unit
        z = self.rows @ point  # f = z²/2 + c z⁴/24
        gradient = self.rows.T @ (z + self.cubic * z**3 / 6)
        noise = torch.randn(SIZE, generator=self.generator, dtype=torch.float64) * self.sigma / math.sqrt(SIZE)
        return float((z**2 / 2 + self.cubic * z**4 / 24).sum()), gradient + noise

    def exact(self, vector: Tensor) -> Tensor:
        z = self.rows @ self.theta
        return self.rows.T @ ((1 + self.cubic * z**2 / 2) * (self.rows @ vector))


@pytest.mark.parametrize(("noise", "cubic"), [(1e-6, 1.0), (1e-8, 30.0), (1e-3, 0.1), (1e-7, 0.0)])
def test_the_stated_error_holds_and_the_step_is_near_the_best(noise: float, cubic: float) -> None:
    op = Known(noise, cubic)
    units = [op.unit(seed) for seed in range(20, 28)]
    off = [float((op @ unit - op.exact(unit)).norm()) for unit in units]
    assert max(off) <= op.error
    assert op.form_error <= op.error
    forms = [abs(float(unit @ (op @ unit - op.exact(unit)))) for unit in units]
    assert max(forms) <= op.form_error
    if cubic:  # no other step would be far better
        found, errors = op.step, []
        for factor in (0.05, 0.2, 1.0, 5.0, 20.0):
            op.step = factor * found
            errors.append(max(float((op._difference(unit, op.step)[1] - op.exact(unit)).norm()) for unit in units))
        assert errors[2] <= 4 * min(errors)


def test_the_parts_of_a_draw_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CHUNK", 64)
    size, cuts = 333, (0, 10, 11, 140, 333)

    def streams() -> Iterator[Callable[[int], Any]]:
        generator, numbers = torch.Generator().manual_seed(3), np.random.default_rng((1, 2))
        yield lambda count: torch.randn(count, generator=generator, dtype=torch.float64)
        yield lambda count: numbers.integers(0, 2, count, dtype=np.int8)
        yield lambda count: numbers.standard_normal(count, dtype=np.float32)

    for index in range(3):
        whole = torch.as_tensor(list(streams())[index](size))
        for first in (0, 1):  # every other run belongs to this rank
            runs = [shards.Run(a, b - a) for a, b in itertools.pairwise(cuts)][first::2]
            rank = SimpleNamespace(size=size, runs=runs)
            found = shards.ShardedProblem.drawn(rank, list(streams())[index])  # type: ignore[arg-type]
            assert torch.equal(found, torch.cat([whole[run.start : run.start + run.length] for run in runs]))


def test_the_step_shrinks_for_a_direction_that_is_more_strongly_curved() -> None:
    op = Known(1e-9, 1.0)
    op.step *= 100
    before = op.step
    unit = op.unit(7)
    off = float((op @ unit - op.exact(unit)).norm())
    assert op.step < before / 10
    assert off <= op.error < 1e-4
