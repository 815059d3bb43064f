"""Statistics of per-sample quantities: correlation with outliers removed and an interval, Kendall's tau, skewness."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, checked_seed, counted, unknown_name, whole_number
from spiritlevel.results import Correlation, Margins, Result, SampleTraces
from spiritlevel.results.quantiles import ranks, student
from spiritlevel.statistics.outliers import inliers

Array = NDArray[Any]
OUTLIER_RULES = ("lof", "lof-standardised", "none")
_MANY = 50_000  # points beyond which resampled means are drawn from their normal limit
_FEWEST = 4  # different points that an interval needs: Fisher's error of z is 1/√(n−3)


class _Column(NamedTuple):
    """One quantity: a value per sample and, if it was estimated with shared probes, what each probe said."""

    name: str
    values: Array
    draws: Array | None = None
    fingerprint: str = ""
    owners: Array | None = None
    """The sequences to which samples belong where these are single positions."""

    def pick(self, chosen: Array) -> _Column:
        draws, owners = (None if each is None else each[chosen] for each in (self.draws, self.owners))
        return self._replace(values=self.values[chosen], draws=draws, owners=owners)


def _numbers(data: Any) -> Array:
    if isinstance(data, torch.Tensor):
        if data.is_meta:
            raise InputError("a tensor on the meta device holds no numbers; pass one with values.")
        data = data.detach().cpu()
        return np.asarray(data.double() if data.is_floating_point() else data)  # NumPy has no bfloat16
    return np.asarray(data)


def _column(name: str, data: Any) -> _Column:
    if isinstance(data, SampleTraces | Margins):
        owners = None if data.sample is None else _numbers(data.sample)
        values = _numbers(data.values if isinstance(data, SampleTraces) else data.signed).astype(np.float64)
        found = _Column(name, values, None, data.fingerprint, owners)
        if isinstance(data, Margins) or data.exact or data.draws is None:
            return found
        draws = _numbers(data.draws).astype(np.float64)  # of the whole value, or of the part that was estimated
        return found._replace(draws=draws - draws.mean(1, keepdims=True) + values[:, None])
    if isinstance(data, Result):
        raise InputError(f"{name} must hold one number per sample, got a result of type {type(data).__name__}.")
    try:
        numbers = _numbers(data)
        values = numbers.real.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must hold one number per sample, got {type(data).__name__}.") from None
    if np.iscomplexobj(numbers):
        raise InputError(f"{name} holds complex numbers; pass their real parts, or their magnitudes.")
    if values.ndim != 1:
        raise InputError(f"{name} must hold one number per sample, got an array of shape {values.shape}.")
    return _Column(name, values)


def _pair(a: Any, b: Any) -> tuple[_Column, _Column]:
    x, y = _column("a", a), _column("b", b)
    if len(x.values) != len(y.values):
        raise InputError(f"a and b must describe the same samples, got {len(x.values)} and {len(y.values)} values.")
    if x.fingerprint and y.fingerprint and x.fingerprint != y.fingerprint:
        raise InputError(
            "a and b come from different data or in a different order (their fingerprints differ); "
            "measure both on the same data in the same order."
        )
    owners = x.owners if y.owners is None else y.owners
    return x._replace(owners=owners), y._replace(owners=owners)


def _centred(values: Array) -> tuple[Array, float]:
    """Deviations from the mean in units of their root mean square, and that unit; 0 where constant to rounding."""
    size = float(np.abs(values).max())
    if size == 0.0:
        return values, 0.0
    scaled = values / size  # squares neither overflow nor underflow
    deviations = scaled - scaled.mean()
    spread = float(np.linalg.norm(deviations))
    if spread <= 1e-13 * float(np.linalg.norm(scaled)):
        return deviations, 0.0
    unit = spread / math.sqrt(len(values))
    return deviations / unit, unit * size


def _undefined(x: _Column, y: _Column, kind: str = "") -> str:
    """Why Pearson's r of two columns is undefined; empty where it is defined."""
    for column in (x, y):
        wrong = ~np.isfinite(column.values)
        if wrong.any():
            count, first = int(wrong.sum()), int(wrong.argmax())
            return f"{column.name} is NaN or infinite for {count} of the samples, the first being number {first}"
    count = len(x.values)
    if count < 3:
        return f"r needs at least 3 points, and there {'is' if count == 1 else 'are'} {count}{kind}"
    for column in (x, y):
        if _centred(column.values)[1] == 0.0:
            return f"all values of {column.name} are equal{kind}"
    return ""


def _pearson(x: Array, y: Array) -> float:
    return float(np.clip(_centred(x)[0] @ _centred(y)[0] / len(x), -1.0, 1.0))


def _inliers(x: Array, y: Array, rule: str) -> tuple[Array, str]:
    """Which points a rule keeps, and a remark on how that was found."""
    if rule == "none":
        return np.ones(len(x), dtype=bool), ""
    return inliers(np.stack([x, y], 1) if rule == "lof" else np.stack([_centred(x)[0], _centred(y)[0]], 1))


def _counts(generator: np.random.Generator, rows: int, size: int) -> Array:
    """How often each of `size` items is drawn in `rows` samples of that size with replacement, as shares."""
    chosen = generator.integers(0, size, (rows, size))
    chosen += np.arange(rows)[:, None] * size
    return np.bincount(chosen.reshape(-1), minlength=rows * size).reshape(rows, size) / size


def _resampled(x: _Column, y: _Column, resamples: int, seed: int) -> Array:
    """Fisher's z of r over resampled points, and over resampled probes at the same time where there are any."""
    generator = np.random.default_rng(seed)
    columns = []
    for column in (x, y):
        values, unit = _centred(column.values)
        noise = None if column.draws is None else (column.draws - column.values[:, None]).T / unit
        columns.append((values, noise))
    size = len(x.values)
    owners = np.arange(size) if x.owners is None else np.unique(x.owners, return_inverse=True)[1]
    if size > _MANY and all(noise is None for _, noise in columns):
        return _by_their_limit(columns[0][0], columns[1][0], owners, resamples, generator)
    results = []
    chunk = max(1, 2**21 // size)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        weights = _counts(generator, rows, owners.max() + 1)
        if x.owners is not None:  # all points of a sequence that is drawn
            weights = weights[:, owners] / weights[:, owners].sum(1, keepdims=True)
        shares: dict[int, Array] = {}  # equal numbers of probes are resampled as pairs: right if shared, and if not
        moved = []
        for values, noise in columns:
            if noise is None:
                moved.append(np.broadcast_to(values, (rows, size)))
                continue
            if len(noise) not in shares:
                shares[len(noise)] = _counts(generator, rows, len(noise))
            moved.append(values + shares[len(noise)] @ noise)
        if all(noise is None for _, noise in columns):
            terms = _terms(*(values for values, _ in columns))
            results.append(_of_moments(*(np.einsum("kn,n->k", weights, term) for term in terms)))
            continue
        left, right = moved
        mean_l, mean_r = (np.einsum("kn,kn->k", weights, side) for side in moved)
        square_l, square_r = (np.einsum("kn,kn,kn->k", weights, side, side) for side in moved)
        product = np.einsum("kn,kn,kn->k", weights, left, right)
        results.append(_of_moments(mean_l, mean_r, square_l, square_r, product))
    return np.concatenate(results)


def _terms(x: Array, y: Array) -> tuple[Array, ...]:
    """What the moments of r are means of."""
    return x, y, x * x, y * y, x * y


def _of_moments(mean_x: Array, mean_y: Array, square_x: Array, square_y: Array, product: Array) -> Array:
    """Fisher's z of r from the moments of each resample, where both columns vary."""
    spread_x, spread_y = square_x - mean_x**2, square_y - mean_y**2
    usable = (spread_x > 1e-20) & (spread_y > 1e-20)
    r = (product - mean_x * mean_y)[usable] / np.sqrt(spread_x[usable] * spread_y[usable])
    return np.asarray(_fisher(r))


def _by_their_limit(x: Array, y: Array, owners: Array, resamples: int, generator: np.random.Generator) -> Array:
    """The same for so many points that the means of x, y, x², y², xy over resampled ones are practically normal.

    Resamples are then drawn from that normal law: its covariance is that of the sums over the points of each owner.
    """
    terms = np.stack(_terms(x, y))
    mean = terms.mean(1)
    sums = np.stack([np.bincount(owners, each - middle) for each, middle in zip(terms, mean, strict=True)])
    covariance = sums @ sums.T / len(x) ** 2
    return _of_moments(
        *generator.multivariate_normal(mean, covariance, resamples, check_valid="ignore", method="eigh").T
    )


def _fisher(r: Any) -> Any:
    return np.arctanh(np.clip(r, -1 + 1e-15, 1 - 1e-15))


def _disattenuated(x: _Column, y: _Column) -> float:
    """Pearson's r without the noise of the probes: moments from products of *different* probes, which are unbiased."""

    def moment(p: _Column, q: _Column, *, paired: bool) -> float:
        total = float(np.cov(p.values, q.values, ddof=0)[0, 1])
        if not paired or p.draws is None or q.draws is None:
            return total
        probes = p.draws.shape[1]
        left, right = p.draws - p.draws.mean(0), q.draws - q.draws.mean(0)
        return (probes * total - float(np.einsum("nm,nm->", left, right)) / left.size) / (probes - 1)

    if x.draws is None and y.draws is None:
        return math.nan
    if any(column.draws is not None and column.draws.shape[1] < 2 for column in (x, y)):
        return math.nan
    shared = x.draws is not None and y.draws is not None and x.draws.shape == y.draws.shape
    spread_x, spread_y = moment(x, x, paired=True), moment(y, y, paired=True)
    if not (spread_x > 0 and spread_y > 0):
        return math.nan  # the noise exceeds the spread
    return float(np.clip(moment(x, y, paired=shared) / math.sqrt(spread_x * spread_y), -1.0, 1.0))


def _in_group(x: _Column, y: _Column, where: Any) -> tuple[_Column, _Column]:
    mask = _numbers(where)
    if mask.dtype != np.bool_ or mask.shape != x.values.shape:
        raise InputError(
            f"where must be a mask of {len(x.values)} booleans, got {mask.dtype} values of shape {mask.shape}."
        )
    return x.pick(mask), y.pick(mask)


@checked
def correlate(
    a: Any,
    b: Any,
    *,
    where: Any = None,
    outliers: str = "lof",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Correlation:
    """Pearson's r of two per-sample quantities after removal of outliers, with a bootstrap interval.

    `a` and `b` are tensors, arrays or lists with one number per sample, or results: `SampleTraces` stand for their
    values, `Margins` for their signed output margins. Two results must come from the same data in the same order.
    `where`, a mask, picks a group (say the correct points): all steps then see that group alone. Points of results with
    `unit="token"` are resampled by whole sequences, since the positions of one are not independent.

    `outliers`: "lof" removes what scikit-learn's LocalOutlierFactor (20 neighbours) rejects in the raw cloud, where
    the quantity with the larger spread decides, as in the paper; "lof-standardised" scales both to unit variance
    first, and suits tiny values (to that routine, distances below 1e-10 are equal); "none" keeps all.
    Where more than 20 points coincide, neighbours are counted among distinct points, as Breunig et al. advise.

    The interval is tanh(z ± t·s), z = artanh r: s is half the width of the central 68.3% of z over resampled points
    (outliers stay removed), t Student's. With `SampleTraces` that carry their probes' draws, points and probes are
    resampled together, which is conservative; the interval is then one for r *as measured with that many probes*, and
    `disattenuated` is the estimate of r without their noise. Slope and intercept are those of b = slope·a + intercept
    by least squares, and Spearman's coefficient is that of the same points; `r_all` keeps the outliers.

    Where r is undefined (fewer than 3 points, equal or NaN values) it is NaN, and `reason` says why. Cost: 0.1 s for
    1,000 points, O(resamples·N); beyond 50,000 points the moments of the resamples are drawn from their normal limit,
    O(N). Coverage of the 95% interval in simulation: 94-95% for normal data of 15 to 200 points, 90-93% for heavy
    tails, if none are removed. With "lof" the interval is for the r of the points kept, which is nearer to zero: it
    covers the r of a whole normal cloud (0.6, 50 to 200 points) in 83-87% of cases.
    References: paper A, section 3.2; Breunig et al. 2000; Owen 2007 (points and probes); Spearman 1904 (attenuation).

    >>> a = torch.arange(50.0)
    >>> print(correlate(a, a + 10 * torch.sin(a), outliers="none"))
    r = 0.891 [0.847, 0.923] over 50 points (0 outliers removed)
    >>> correlate([1, 1, 1], [1, 2, 3]).reason
    'all values of a are equal'
    """
    resamples, seed = _checked_options(outliers, level, resamples, seed)
    x, y = _pair(a, b)
    group = "" if where is None else " in this group"
    if where is not None:
        x, y = _in_group(x, y, where)
    fixed: dict[str, Any] = {"level": level, "outliers": outliers, "seed": seed}
    undefined: dict[str, Any] = dict.fromkeys(("r", "low", "high", "spearman", "slope", "intercept"), math.nan)
    if reason := _undefined(x, y, group):
        return Correlation(n=len(x.values), removed=0, r_all=math.nan, reason=reason, **undefined, **fixed)
    r_all = _pearson(x.values, y.values)
    kept, remark = _inliers(x.values, y.values, outliers)
    notes = [remark] if remark else []
    removed = int((~kept).sum())
    if removed:
        x, y = x.pick(kept), y.pick(kept)
        if reason := _undefined(x, y, f" after removal of {removed} outliers"):
            return Correlation(n=len(x.values), removed=removed, r_all=r_all, reason=reason, **undefined, **fixed)

    for column in (x, y):
        if column.draws is not None and not np.isfinite(column.draws).all():
            notes.append(f"the probes of {column.name} are not all finite: only the points were resampled")
            x, y = (c._replace(draws=None) if c.name == column.name else c for c in (x, y))
    r = _pearson(x.values, y.values)
    distinct = len(np.unique(np.stack([x.values, y.values], 1), axis=0))
    independent = len(x.values) if x.owners is None else len(np.unique(x.owners))
    if distinct < _FEWEST:
        notes.append(f"with {distinct} different points, r may lie anywhere between -1 and 1")
    elif independent < _FEWEST:
        notes.append(f"with {counted(independent, 'sequence')}, r may lie anywhere between -1 and 1")
    fewest = min([independent, *(c.draws.shape[1] for c in (x, y) if c.draws is not None and c.draws.shape[1] > 1)])
    lower, upper = np.quantile(_resampled(x, y, resamples, seed), ndtr([-1.0, 1.0]))
    half = student(0.5 + level / 2, fewest - 1) * (upper - lower) / 2
    half = math.inf if min(distinct, independent) < _FEWEST else half
    slope = r * _centred(y.values)[1] / _centred(x.values)[1]
    return Correlation(
        r=r,
        low=float(np.tanh(_fisher(r) - half)),
        high=float(np.tanh(_fisher(r) + half)),
        n=len(x.values),
        removed=removed,
        r_all=r_all,
        spearman=_pearson(ranks(x.values), ranks(y.values)),
        slope=slope,
        intercept=float(y.values.mean() - slope * x.values.mean()),
        disattenuated=_disattenuated(x, y),
        notes=tuple(notes),
        **fixed,
    )


def _checked_options(outliers: str, level: float, resamples: int, seed: int) -> tuple[int, int]:
    """The resamples and the seed as plain numbers."""
    if outliers not in OUTLIER_RULES:
        raise unknown_name("outlier rule", outliers, OUTLIER_RULES)
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise InputError(f"correlate needs a level between 0 and 1, got {level!r}.")
    return whole_number(resamples, "resamples", 100, 10**6), checked_seed(seed)


@checked
def kendall(a: Any, b: Any) -> float:
    """Kendall's rank correlation τ_b: concordant minus discordant pairs, as a share, corrected for ties.

    The usual measure of how well a sharpness *ranks* models. Takes what `correlate` takes. NaN where undefined: fewer
    than 2 points, equal values, NaN. Cost: O(N log N). Exact. References: Kendall 1945; Jiang et al. 2019.

    >>> kendall([1, 2, 3, 4], [1, 2, 4, 3])
    0.666...
    """
    x, y = _pair(a, b)
    if len(x.values) < 2 or np.ptp(x.values) == 0 or np.ptp(y.values) == 0:
        return math.nan
    from scipy import stats  # 0.3 s, and only this function needs it

    return float(stats.kendalltau(x.values, y.values).statistic)


@checked
def skewness(values: Any) -> float:
    """The standardised third moment E[((v − μ)/σ)³], negative for a long tail to the left.

    NaN where undefined: no values, equal values, NaN. Cost: O(N). Exact for the given values (moments divide by N).
    Reference: paper A, section 4.2, whose caption says "standardized" and whose text omits it.

    >>> skewness([0.0, 0.0, 0.0, 4.0])
    1.154...
    """
    numbers = _column("values", values).values
    if not len(numbers) or not np.isfinite(numbers).all():
        return math.nan
    deviations, unit = _centred(numbers)
    return float((deviations**3).mean()) if unit else math.nan
