"""How measures rank many networks against a gap: Kendall's τ, the same along each hyper-parameter, and information.

References: Jiang, Neyshabur, Mobahi, Krishnan & Bengio 2019, arXiv:1912.02178.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from spiritlevel.results.quantiles import ranks

Array = NDArray[Any]


class Ranking:
    """How measures rank networks against a gap. Answers have one entry per resample of the cells; entry 0 is the data.

    Args:
        measures: One number per network for each name; NaN where there is none.
        gap: One number per network.
        settings: Hyper-parameters of the networks, without the seed.
        replicas: The seed's number within its cell.
        resamples: How many resamples of cells, with replacement.
        seed: For the resamples.
    """

    def __init__(
        self,
        measures: Mapping[str, Array],
        gap: Array,
        settings: Mapping[str, Sequence[Any]],
        replicas: Sequence[int],
        resamples: int = 1_000,
        seed: int = 0,
    ) -> None:
        self.measures = dict(measures)
        self.gap_signs, _ = _signs(gap)
        self.codes = {name: np.unique(values, return_inverse=True)[1] for name, values in settings.items()}
        self.replicas = np.asarray(replicas)
        _, cell = np.unique(np.stack(list(self.codes.values())), axis=1, return_inverse=True)
        cell = cell.reshape(-1)
        number = int(cell.max()) + 1
        drawn = np.random.default_rng(seed).multinomial(number, np.full(number, 1 / number), resamples)
        self.weights = np.concatenate([np.ones((1, len(gap))), drawn[:, cell]])
        self.cells = number

    def tau(self, name: str, pairs: Array | None = None, *, corrected: bool = True) -> Array:
        """Kendall's τ_b over all pairs or the masked ones; τ_a, where a tie counts as 0, if not `corrected`."""
        signs, known = _signs(self.measures[name])
        if pairs is not None:
            known = known & pairs

        def total(matrix: Array) -> Array:
            return np.asarray(((self.weights @ matrix) * self.weights).sum(1))

        both = total(signs * self.gap_signs * known)
        if corrected:
            size = np.sqrt(total(np.abs(signs) * known) * total(np.abs(self.gap_signs) * known))
        else:
            size = total(known.astype(float))
        return np.divide(both, size, out=np.full(len(both), np.nan), where=size > 0)

    @cached_property
    def lines(self) -> dict[str, Array]:
        """The pairs that differ in one hyper-parameter alone (the seed among them), for each that varies."""
        axes = {**self.codes, "seed": self.replicas}
        same = {name: values[:, None] == values[None, :] for name, values in axes.items()}
        found = {}
        for name in axes:
            others = [same[other] for other in axes if other != name]
            mask = ~same[name]
            for other in others:
                mask = mask & other
            if mask.any():
                found[name] = mask
        return found

    def conditional(self, name: str) -> dict[str, Array]:
        """ψ for every hyper-parameter and the seed; Ψ, the mean over the hyper-parameters without the seed.

        Every pair along a line counts the same, which is Jiang's mean over lines if no network is missing.
        """
        found = {key: self.tau(name, mask, corrected=False) for key, mask in self.lines.items()}
        own = [values for key, values in found.items() if key != "seed"]
        return {**found, "mean": np.mean(own, axis=0) if own else np.full(len(self.weights), np.nan)}

    def information(self, name: str) -> float:
        """Jiang's K in [0, 1]: min over at most two known hyper-parameters S of I(V_μ; V_g | U_S) / H(V_g | U_S).

        V are the signs of the differences over ordered pairs of networks, U_S the values of S for both networks.
        """
        return self._information(self.measures[name])

    def _information(self, values: Array) -> float:
        signs, known = _signs(values)
        if not known.any():
            return math.nan
        varying = [codes for codes in self.codes.values() if codes.max()]
        shares = []
        for size in range(3):
            for chosen in itertools.combinations(varying, size):
                group = np.zeros(len(signs), dtype=np.int64)
                for codes in chosen:
                    group = group * (int(codes.max()) + 1) + codes
                both = (group[:, None] * (int(group.max()) + 1) + group[None, :])[known]
                table = np.zeros((int(both.max()) + 1, 3, 3))
                np.add.at(table, (both, signs[known].astype(int) + 1, self.gap_signs[known].astype(int) + 1), 1.0)
                uncertain = _entropy(table.sum(1)) - _entropy(table.sum((1, 2)))
                shared = uncertain - (_entropy(table) - _entropy(table.sum(2)))
                shares.append(shared / uncertain if uncertain > 0 else math.nan)
        return float(np.clip(np.nanmin(shares), 0.0, 1.0)) if np.isfinite(shares).any() else math.nan

    def noise(self, draws: int = 20) -> float:
        """The mean K of random numbers: what the finite number of networks alone gives."""
        generator = np.random.default_rng(0)
        return float(np.mean([self._information(generator.random(len(self.replicas))) for _ in range(draws)]))

    def by_seed(self) -> Iterator[tuple[Array, Array]]:
        """For each seed, which networks belong to it, and which pairs of networks do."""
        for replica in np.unique(self.replicas):
            here = self.replicas == replica
            yield here, here[:, None] & here[None, :]

    def advantages(self, names: Sequence[str], rivals: Sequence[str]) -> tuple[list[Array], list[Array], str]:
        """For each seed, how much better the best of `names` ranks than the best of `rivals`, and its own τ; its name.

        Each best is chosen on the networks of the other seeds and judged on those of one, so that a long list has no
        advantage over a short one. Without a second seed both happen on the same networks.
        """
        gains, owns, chosen = [], [], Counter[str]()
        for here, inside in self.by_seed():
            outside = inside if here.all() else ~here[:, None] & ~here[None, :]
            best = []
            for group in (names, rivals):
                judged = np.nan_to_num([self.tau(name, inside) for name in group], nan=-1.0)
                order = np.nan_to_num([self.tau(name, outside) for name in group], nan=-1.0).argmax(0)
                best.append(np.take_along_axis(judged, order[None], 0)[0])
                if group is names:
                    chosen[group[order[0]]] += 1
            gains.append(best[0] - best[1])
            owns.append(best[0])
        return gains, owns, ", ".join(name for name, _ in chosen.most_common())


def _signs(values: Array) -> tuple[Array, Array]:
    """Signs of all differences, 0 where a value is missing; and which pairs of two networks are known."""
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)
    pairs = known[:, None] & known[None, :] & ~np.eye(len(values), dtype=bool)
    return np.sign(filled[:, None] - filled[None, :]) * pairs, pairs


def _entropy(counts: Array) -> float:
    return float(entr(counts / counts.sum()).sum())


def interval(draws: Array) -> tuple[float, float]:
    """The central 95% of the resamples, entry 0 left out; NaN if fewer than 90% of them are defined."""
    finite = draws[1:][np.isfinite(draws[1:])]
    if len(finite) < 0.9 * (len(draws) - 1) or not len(finite):
        return math.nan, math.nan
    low, high = np.quantile(finite, [0.025, 0.975])
    return float(low), float(high)


def auroc(scores: Any, positive: Any) -> float:
    """The chance that a positive scores above one of the others, a tie counting half; NaN unless there are both.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True])
    0.75
    """
    scores, positive = np.asarray(scores, dtype=float), np.asarray(positive, dtype=bool)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others or np.isnan(scores).any():
        return math.nan
    total = ranks(scores)[positive].sum()
    return float((total - count * (count + 1) / 2) / (count * others))
