"""What every measurement returns: numbers that carry their error, their cost and where they came from.

All results are frozen dataclasses on top of `Result`, which gives them one JSON form and its inverse. Per-sample
values are float64 tensors on the CPU. Nothing here computes on a model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.storage import write_atomically as write_atomically

# In JSON, `null` is an undefined number where a field is declared as one, and an object with the key "type" is a result
# (its class), a tensor, or a dict that happens to have a key of that name.
_TAG, _TENSOR, _DICT = "type", "tensor", "dict"
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def _encode(value: Any) -> Any:
    """To strict JSON: NaN becomes null, infinities become strings, tensors carry their dtype and shape."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1).tolist()
        return {
            _TAG: _TENSOR,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": [_encode(item) for item in flat],
        }
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the dicts of a result have texts as keys, got {key!r}.")
        items = {key: _encode(item) for key, item in value.items()}
        return {_TAG: _DICT, "items": items} if _TAG in items else items
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"results hold tensors, numbers, strings, dicts and lists, got {type(value).__name__}.")


def _number(value: Any) -> float:
    return math.nan if value is None else _INFINITIES.get(value) or float(value)


def _decode(value: Any, hint: Any = Any) -> Any:
    """The inverse of `_encode`; `hint` is the declared type, which alone tells an undefined number from `None`."""
    result = _decoded(value, hint)
    if hint is not Any and isinstance(hint, type) and not isinstance(result, hint):
        raise TypeError(f"expected {hint.__name__}, got {type(result).__name__}")
    return result


def _decoded(value: Any, hint: Any) -> Any:
    if get_origin(hint) in (UnionType, Union):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if value is None and len(kinds) < len(get_args(hint)):
            return None
        hint = kinds[0] if len(kinds) == 1 else Any
    if hint is float:
        return _number(value)
    inner = get_args(hint)
    if isinstance(value, list):
        if get_origin(hint) is tuple and len(inner) == len(value) and Ellipsis not in inner:
            return tuple(_decode(item, kind) for item, kind in zip(value, inner, strict=True))
        items = [_decode(item, inner[0] if inner else Any) for item in value]
        return items if list in (hint, get_origin(hint)) else tuple(items)
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == _TENSOR:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{value['dtype']} is no type of numbers")
        data = [_number(item) for item in value["data"]] if dtype.is_floating_point else value["data"]
        return torch.tensor(data, dtype=dtype).reshape(value["shape"])
    if kind is not None and kind != _DICT:
        return Result.from_dict(value)
    items_hint = inner[1] if get_origin(hint) is dict else Any
    return {key: _decode(item, items_hint) for key, item in (value["items"] if kind else value).items()}


class Result:
    """Base of all results: one JSON form (`to_json`) and its inverse (`from_json`).

    Subclasses are frozen dataclasses whose fields hold numbers, texts, tensors, results, and dicts, tuples or lists of
    those. An undefined number is NaN and becomes null; it comes back as NaN if the field is declared as `float` (also
    inside `dict[str, float]` and the like), and as `None` if it may be absent (`float | None`).
    """

    _types: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Result._types[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values, ready for strict JSON; `from_dict` reads it back."""
        fields = {f.name: _encode(getattr(self, f.name)) for f in _fields(type(self))}
        if _TAG in fields:
            raise TypeError(f"{type(self).__name__} has a field named {_TAG!r}, which results reserve for their class.")
        return {_TAG: type(self).__name__, **fields}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`, for any kind of result."""
        name = data.get(_TAG) if isinstance(data, dict) else None
        if str(name) not in Result._types:
            import_module("spiritlevel.results.training")  # its kinds of results are known from then on
        kind = Result._types.get(str(name))
        if kind is None or not issubclass(kind, cls):
            if name is None:
                raise InputError(
                    "this is no result of spiritlevel, which would say its type; pass a report.json, or what to_json "
                    "wrote."
                )
            known = sorted(name for name, known in Result._types.items() if issubclass(known, cls))
            public = ", ".join(name for name in known if not name.startswith("_"))
            raise InputError(f"cannot read a result of type {name!r}, expected one of: {public}.")
        data = kind._from_older(data)
        hints = _hints(kind)
        present = [f for f in _fields(kind) if f.name in data]
        missing = [f.name for f in _fields(kind) if f not in present and _required(f)]
        if missing:
            raise InputError(f"cannot read a result of type {name!r}: it lacks {', '.join(missing)}.")
        try:
            return kind(**{f.name: _decode(data[f.name], hints.get(f.name, Any)) for f in present})
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).split("\n", 1)[0]
            raise InputError(f"cannot read a result of type {name!r}: it is damaged ({reason}).") from error

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The dict of a result as an earlier version wrote it, with what it did not say yet."""
        return data

    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON text; with `path` also written there, atomically."""
        text = json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)
        if path is not None:
            write_atomically(path, text + "\n")
        return text

    @classmethod
    def from_json(cls, text: str | Path) -> Self:
        """Read what `to_json` wrote, from its file (a `Path`, or the path as a text) or from its text."""
        if isinstance(text, str) and "{" not in text and _is_file(text):  # the text of a result has braces
            text = Path(text)
        where = str(text) if isinstance(text, Path) else "the text"
        try:
            data = json.loads(text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
        except OSError as error:
            raise InputError(
                f"cannot read {where} ({error.strerror or error}); pass a file that to_json wrote."
            ) from error
        except (ValueError, RecursionError) as error:  # also bytes that are no text, and numbers of endless digits
            if isinstance(text, str) and "{" not in text:
                raise InputError(f"{text[:80]!r} is the path of no file and is not JSON ({error}).") from error
            raise InputError(f"{where} is not JSON ({error}); pass a report.json, or what to_json wrote.") from error
        return cls.from_dict(data)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        return False


def _fields(kind: type[Result]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _hints(kind: type[Result]) -> dict[str, Any]:
    """The declared types of the fields."""
    try:
        return get_type_hints(kind)
    except NameError:  # a type that exists for the type checker only
        return {f.name: float if f.type in ("float", float) else Any for f in _fields(kind)}


def standard_error(draws: Tensor) -> Tensor:
    """The standard error of the mean over the last dimension, also of draws so small that their squares vanish."""
    scale = draws.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(draws.dtype).tiny)
    return (draws / scale).std(-1) * scale.squeeze(-1) / math.sqrt(draws.shape[-1])


STATUSES = ("exact", "converged", "estimated", "lower bound", "not converged", "undefined")
"""What a number is worth, see `Estimate`."""


def mean_skewness(draws: Tensor) -> float:
    """The skewness of the error of the mean of draws (one dimension): theirs over √n, from the usual estimate of it."""
    count = draws.numel()
    deviations = draws.double() - draws.double().mean()
    size = float(deviations.abs().max()) if count > 2 else 0.0
    if not 0 < size < math.inf:
        return 0.0
    unit = deviations / size
    spread = float(unit.square().mean())
    return float(unit.pow(3).mean()) / spread**1.5 * math.sqrt(count - 1) / (count - 2)


def skewed_limits(value: float, error: float, dof: float, skew: float, level: float = 0.95) -> tuple[float, float]:
    """Student's t interval of a mean, corrected for the skewness of its error by Hall's transformation.

    T = (mean − truth)/error is not Student's t where the draws are skewed: the interval would lie too low, or too
    high. g(T) = T + aT² + a²T³/3 + s/6, with a = s/3 and s the skewness of the mean, is nearly so, and is monotone. A
    few draws show less skewness than they have, hence the factor 1.25, under which means of exponential, χ² and
    log-normal draws, and of the losses of networks, are covered as they should be (docs/coverage.md); the spread of
    skewed draws is less well known too, and the skewness of few draws hardly at all, so there are fewer degrees of
    freedom, ν/(1+s²+3/ν) in place of ν. Where the skewness is given as 0 this is Student's interval. Reference: Hall,
    On the removal of skewness by transformation, J. R. Stat. Soc. B 54 (1992).

    >>> [round(limit, 3) for limit in skewed_limits(1.0, 0.1, math.inf, 0.0)]
    [0.804, 1.196]
    >>> [round(limit, 3) for limit in skewed_limits(1.0, 0.1, math.inf, 0.4)]
    [0.852, 1.767]
    """
    if not error:
        return value, value
    below, above = _errors_off(np.float64(skew), dof, level)
    return value - float(below) * error, value + float(above) * error


def _errors_off(skew: Any, dof: float, level: float) -> tuple[Any, Any]:
    """How many errors the limits of `skewed_limits` are below and above the value, for every skewness."""
    skew = _SEEN * skew
    a = skew / 3
    flat = np.abs(a) < 1e-9
    t = stats.t.ppf(0.5 + level / 2, dof / (1 + skew**2 + np.where(flat, 0.0, 3 / dof if dof else 0.0)))
    safe = np.where(flat, 1.0, a)
    below, above = (np.where(flat, u, (np.cbrt(1 + 3 * a * (u - skew / 6)) - 1) / safe) for u in (t, -t))
    return below, -above


def subset_mean(values: Tensor, population: int | None) -> tuple[float | None, tuple[float, float] | None]:
    """Standard error and 95 % limits of a mean over the population of which the values are a random subset.

    None for the whole population, NaN for fewer than 30 values: of a fitted network the losses of 20 samples show too
    little of what all of them are for any interval to hold (docs/coverage.md).
    """
    count, mean = len(values), float(values.mean())
    if population is None or population <= count:
        return None, None
    if count < FEWEST:
        return math.nan, (math.nan, math.nan)
    share = math.sqrt(1 - count / population)
    error = float(standard_error(values.double())) * share
    return error, skewed_limits(mean, error, count - 1, mean_skewness(values) * share)


FEWEST = 30  # samples whose subset error is stated
_SEEN = 1.25  # how much larger the skewness of a population is than that of a few draws of it


@dataclass(frozen=True)
class Estimate(Result):
    """A number with its error, cost and seed.

    `status` says what the number is worth on the given data:

    - "exact": no error but rounding;
    - "converged": an iteration found it to ± `tolerance`;
    - "estimated": from random probes, with the standard error `stderr` (and `tolerance` beside it, if there is one);
    - "lower bound": the best that an optimiser found, the true value may be larger;
    - "not converged": an iteration stopped before its tolerance, so the error is not known; `reason` says why;
    - "undefined": the value is NaN, and `reason` says why.

    Unless given it follows from value, `stderr` and `tolerance`. `stderr` is NaN where it is not known; `dof` are its
    degrees of freedom (infinite for a known variance) and `skew` the skewness of that error. `power` is 2 for the root
    of a mean: the limits are then those of the mean, and their roots. Where only a random subset of the data was
    measured, `data_stderr` is the standard error of that and `data_limits` are the 95 % limits that it alone sets to
    the value on all of the data; both are `None` where that does not apply, and NaN where it is not known. `matvecs`
    counts products with the matrix (or passes over the data).

    >>> estimate = Estimate.from_draws(torch.tensor([1.0, 2.0, 3.0, 4.0]), seed=0)
    >>> print(estimate, estimate.status)
    2.5 ± 0.65 estimated
    >>> low, high = estimate.interval(0.95)
    >>> f"{low:.3f} {high:.3f}"
    '0.446 4.554'
    >>> print(Estimate(-0.0012, tolerance=0.03), Estimate(-0.0012, tolerance=0.03).sign)
    -0.0012 ± 0.03 0
    """

    value: float
    stderr: float = 0.0
    dof: float = math.inf
    matvecs: int = 0
    seed: int | None = None
    data_stderr: float | None = None
    reason: str = ""
    tolerance: float = 0.0
    status: str = ""
    skew: float = 0.0
    power: float = 1.0
    data_limits: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.status and self.status not in STATUSES:
            raise InputError(f"an estimate has one of the statuses {', '.join(STATUSES)}, got {self.status!r}.")
        status = self.status
        if math.isnan(self.value):
            status = "undefined"
        elif status in ("", "undefined") or (status == "exact" and (self.stderr or self.tolerance)):
            status = "estimated" if self.stderr else "converged" if self.tolerance else "exact"
        object.__setattr__(self, "status", status)

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        reason = str(data.get("reason", ""))
        if "status" in data or not reason.startswith("not converged"):
            return data
        why = reason.removeprefix("not converged").removeprefix(": ")
        return {**data, "status": "not converged", "reason": why}

    @classmethod
    def from_draws(cls, draws: Tensor, *, matvecs: int | None = None, seed: int | None = None) -> Estimate:
        """The mean of independent, unbiased draws, with the standard error of that mean."""
        draws = draws.detach().double().cpu().reshape(-1)
        count = draws.numel()
        if count < 2:
            raise InputError(f"an estimate needs at least 2 draws to have a standard error, got {count}.")
        cost = count if matvecs is None else matvecs
        error = float(standard_error(draws))
        skew = mean_skewness(draws)
        return cls(float(draws.mean()), error, count - 1, cost, seed, skew=skew, status="estimated")

    @property
    def exact(self) -> bool:
        """Whether the value has no error but rounding on the given data."""
        return self.status == "exact"

    @property
    def sign(self) -> int:
        """1 or -1 where the 95 % interval on the given data lies on one side of 0, else 0: the sign is not known."""
        low, high = self.interval()
        return 1 if low > 0 else -1 if high < 0 else 0

    @property
    def settled(self) -> bool:
        """Whether an iteration found the value to more than the six digits that are printed."""
        return self.status == "converged" and self.tolerance < 5e-7 * abs(self.value)

    def scaled(self, factor: float) -> Estimate:
        """The same number times a constant, with its errors."""
        size = abs(factor)
        return dataclasses.replace(
            self,
            value=self.value * factor,
            stderr=self.stderr * size,
            tolerance=self.tolerance * size,
            data_stderr=None if self.data_stderr is None else self.data_stderr * size,
            skew=math.copysign(1.0, factor) * self.skew,
            data_limits=None if self.data_limits is None else _ordered(*(limit * factor for limit in self.data_limits)),
        )

    def interval(self, level: float = 0.95, *, data: bool = False) -> tuple[float, float]:
        """The value on the given data by `skewed_limits`; `data=True` adds the error of having measured a subset.

        A tolerance widens it on both sides, a lower bound has no upper end, and what did not converge has no interval:
        both ends are NaN. The limits of a subset are kept for 95 %; at other levels they are stretched as those of a
        normal error.
        """
        if not 0 < level < 1:
            raise InputError(f"interval needs a level between 0 and 1, got {level}.")
        error, dof = self.stderr, self.dof
        if data and self.data_limits is None and self.data_stderr:
            error = math.hypot(self.stderr, self.data_stderr)
            # Welch-Satterthwaite with a known second variance
            dof = dof * (error / self.stderr) ** 4 if self.stderr else math.inf
        if self.status == "not converged":
            return math.nan, math.nan
        low, high = self._limits(error, dof, level)
        if data and self.data_limits is not None:
            stretch = float(stats.norm.ppf(0.5 + level / 2) / stats.norm.ppf(0.975))
            below, above = ((limit - self.value) * stretch for limit in self.data_limits)
            low, high = (
                self.value - math.hypot(self.value - low, below),
                self.value + math.hypot(high - self.value, above),
            )
        return low - self.tolerance, math.inf if self.status == "lower bound" else high + self.tolerance

    def _limits(self, error: float, dof: float, level: float) -> tuple[float, float]:
        if self.power == 1.0 or not self.value > 0:
            return skewed_limits(self.value, error, dof, self.skew, level)
        mean = self.value**self.power
        low, high = skewed_limits(mean, error * self.power * mean / self.value, dof, self.skew, level)
        return max(low, 0.0) ** (1 / self.power), high ** (1 / self.power)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.status == "undefined":
            return f"undefined ({self.reason})" if self.reason else "undefined"
        if self.status == "not converged":
            return f"{self.value:.6g} (not converged{self.reason and f': {self.reason}'})"
        bound = "≥ " if self.status == "lower bound" else ""
        error = self.stderr + self.tolerance
        if math.isnan(error):
            return f"{bound}{self.value:.6g} ± unknown"
        if not error or self.settled:
            return f"{bound}{self.value:.6g}"
        digits = max(2, min(8, 2 + _magnitude(abs(self.value) or error) - _magnitude(error)))
        return f"{bound}{self.value:.{digits}g} ± {error:.2g}"


def _ordered(a: float, b: float) -> tuple[float, float]:
    return (b, a) if b < a else (a, b)


def _magnitude(number: float) -> int:
    return math.floor(math.log10(number)) if number > 0 and math.isfinite(number) else 0


@dataclass(frozen=True)
class SampleTraces(Result):
    """The trace of the Hessian of every sample's own loss.

    `values[n]` = Tr ∇²ℓ(θ; xₙ, yₙ) and `stderr[n]` its error (0 where exact). `layers` splits the values by parameter
    tensor if that was asked for. `probes` counts the random probes a sample got. Where all samples shared their probes
    their errors are correlated: `draws` (N, probes) keeps what each probe said, so that `mean` and `correlate` can
    take the error from the spread over probes. `fingerprint` identifies the order of the data. With batch statistics
    the batches are part of the definition: `batches` then holds their sizes in order. `wrt` says what moves: the
    parameters, or the input of the sample (`input_curvature`).
    """

    values: Tensor
    stderr: Tensor
    exact: bool
    method: str
    targets: Tensor
    layers: dict[str, Tensor] = field(default_factory=dict)
    probes: Tensor | None = None
    dof: float = math.inf
    draws: Tensor | None = None
    matvecs: int = 0
    seed: int | None = None
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    fingerprint: str = ""
    population: int | None = None
    negative_stops: float | None = None
    notes: tuple[str, ...] = ()
    batches: tuple[int, ...] | None = None
    wrt: str = "parameters"

    def __len__(self) -> int:
        return self.values.numel()

    def mean(self) -> Estimate:
        """The trace of the mean loss, Tr ∇²L = mean of the per-sample traces, with the error of the probes.

        Shared probes: the standard error is that of the probe-wise means. Independent ones (`passes=`): the root of
        the summed squares, and NaN where fewer than 8 samples make up that sum, since a single draw tells the size of
        its own error no better than that of its value. If these samples are a random subset of `population` points,
        `data_stderr` and `data_limits` are the subset's error (NaN below 30 samples).
        """
        value, spread = float(self.values.mean()), subset_mean(self.values, self.population)
        error: dict[str, Any] = {"stderr": 0.0}
        if self.draws is not None and not self.exact:
            means = self.draws.mean(0)
            error = {
                "status": "estimated",
                "stderr": float(standard_error(means)),
                "dof": means.numel() - 1,
                "skew": mean_skewness(means),
            }
        elif not self.exact:
            error = self._independent_errors()
        return Estimate(
            value, matvecs=self.matvecs, seed=self.seed, data_stderr=spread[0], data_limits=spread[1], **error
        )

    def _independent_errors(self) -> dict[str, Any]:
        """The error of the mean of samples that each had one draw of its own: nothing is known of its distribution.

        The worst case is a multiple of χ²₁, whose third cumulant is that of 0.98 error³; and as the errors are taken
        from the draws themselves, as many degrees of freedom remain as there are samples that count.
        """
        largest = float(self.stderr.max())
        if not largest:
            return {"stderr": 0.0, "status": "estimated"}
        shares = (self.stderr / largest).double()
        squares = float(shares.square().sum())
        counted = squares**2 / float(shares.pow(4).sum())
        if not counted >= 8:  # also NaN
            return {"status": "estimated", "stderr": math.nan}
        skew = float(shares.pow(3).sum()) / squares**1.5
        return {"status": "estimated", "stderr": largest * math.sqrt(squares) / len(self), "dof": counted, "skew": skew}

    def __str__(self) -> str:
        how = "exact" if self.exact else f"estimated ({self.method})"
        low, high = (float(self.values.min()), float(self.values.max())) if len(self) else (math.nan, math.nan)
        of = "" if self.wrt == "parameters" else f" in the {self.wrt}"
        return f"{len(self)} per-sample Hessian traces{of}, {how}: mean {self.mean()}, from {low:.3g} to {high:.3g}"


@dataclass(frozen=True)
class Margins(Result):
    """Margins of every sample.

    `signed` = φ_y − max_{j≠y} φ_j, `output` its absolute value, `softmax` the same of the softmax probabilities in
    absolute value (γ), `softmax_gap` = 1−γ² computed without cancellation, `correct` whether the label's output is the
    strictly largest. `targets` are the labels, 0 and 1 for a single logit. `distance` is the signed linearised distance
    to the decision boundary if it was asked for, in the space `layer` (the input where empty) and the norm `norm`;
    `spread` is the root of the total variance of the points in that space, a unit for such distances.
    """

    output: Tensor
    signed: Tensor
    softmax: Tensor
    softmax_gap: Tensor
    correct: Tensor
    targets: Tensor
    distance: Tensor | None = None
    norm: str = ""
    layer: str = ""
    spread: float = math.nan
    fingerprint: str = ""

    def __len__(self) -> int:
        return self.signed.numel()

    def __str__(self) -> str:
        if not len(self):
            return "0 output margins"
        text = (
            f"{len(self)} output margins: mean {float(self.signed.mean()):.4g}, "
            f"smallest {float(self.signed.min()):.4g}; {float(self.correct.double().mean()):.2%} classified correctly"
        )
        if self.distance is not None:
            where = f"at layer {self.layer!r}" if self.layer else "in input space"
            text += f"; median distance {float(self.distance.median()):.4g} {where} ({self.norm}-norm)"
        return text


@dataclass(frozen=True)
class Correlation(Result):
    """Pearson's r of two per-sample quantities after removal of outliers, with a bootstrap interval.

    `n` points were kept and `removed` were outliers; `r_all` is r of all points. `low` and `high` bound r at `level`.
    b = slope·a + intercept by least squares. `disattenuated` is r without the noise of random probes, NaN unless the
    probes' draws were given. Where r is not defined it is NaN (never 0) and `reason` says why.
    """

    r: float
    low: float
    high: float
    n: int
    removed: int
    r_all: float
    spearman: float
    slope: float
    intercept: float
    level: float = 0.95
    outliers: str = "lof"
    seed: int | None = None
    reason: str = ""
    disattenuated: float = math.nan
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if math.isnan(self.r):
            return f"r undefined ({self.reason})"
        outliers = f"({self.removed} outliers removed)"
        return f"r = {self.r:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.n} points {outliers}"


@dataclass(frozen=True)
class Eigenpairs(Result):
    """Eigenvalues from the wanted end inwards, with their vectors as columns and their residuals ‖Hv − λv‖.

    Each residual bounds the distance from its value to an eigenvalue. `converged` is true if every residual is at most
    tol · max|Ritz value| and repeated eigenvalues were ruled out or found; otherwise `reason` says what is missing.
    `reach` is how far beyond the outermost value an eigenvalue may still lie: further out there is none, but for a
    chance of 0.001; `None` where that is not known.
    """

    values: Tensor
    vectors: Tensor | None
    residuals: Tensor
    converged: bool
    matvecs: int
    which: str = "largest"
    tol: float = 1e-4
    seed: int | None = None
    reason: str = ""
    reach: float | None = None

    def __len__(self) -> int:
        return self.values.numel()

    def outermost(self) -> Estimate:
        """The first value ± what is not known of it: the larger of its residual and `reach`.

        A residual alone is not enough. It tells that some eigenvalue is near, not that it is the outermost one. Where
        nothing is excluded (`reach` is infinite) the largest eigenvalue has this value as a lower bound.
        """
        tolerance = max(float(self.residuals[0]), self.reach or 0.0)
        if self.converged and math.isinf(tolerance):
            reason = "an eigenvalue further out was not ruled out"
            status = "lower bound" if self.which == "largest" else "not converged"
            return Estimate(float(self.values[0]), matvecs=self.matvecs, seed=self.seed, reason=reason, status=status)
        return Estimate(
            float(self.values[0]),
            matvecs=self.matvecs,
            seed=self.seed,
            reason=self.reason,
            tolerance=tolerance if self.converged else 0.0,
            status="converged" if self.converged else "not converged",
        )

    def __str__(self) -> str:
        pairs = zip(self.values.tolist(), self.residuals.tolist(), strict=True)
        listed = ", ".join(f"{value:.6g} (residual {residual:.1g})" for value, residual in pairs)
        state = "converged" if self.converged else f"not converged: {self.reason}"
        return f"{len(self)} eigenvalues, {self.which}: {listed}; {self.matvecs} products, {state}"


@dataclass(frozen=True)
class DiagonalEstimate(Result):
    """The diagonal of a matrix: one value and one standard error an entry, `stderr` 0 where exact.

    All entries share their probes, so their errors are correlated: the error of a sum of entries is not the root of
    the summed squares.
    """

    values: Tensor
    stderr: Tensor
    dof: float = math.inf
    matvecs: int = 0
    seed: int | None = None

    @property
    def exact(self) -> bool:
        """Whether no entry carries a probe error."""
        return not bool(self.stderr.any())

    def __len__(self) -> int:
        return self.values.numel()

    def __str__(self) -> str:
        how = "exact" if self.exact else f"standard errors up to {float(self.stderr.max()):.2g}"
        low, high = float(self.values.min()), float(self.values.max())
        return f"diagonal of {len(self)} entries from {low:.4g} to {high:.4g}, {how}"


@dataclass(frozen=True)
class Density(Result):
    """A spectral density smoothed by a Gaussian of standard deviation `width`, on the points of `grid`.

    `stderr` is the error of the random probes at every point, 0 where all eigenvalues are known, and `skew` its
    skewness. It does not hold the error of the quadrature, which is small once `width` exceeds the distance of
    neighbouring nodes.
    """

    grid: Tensor
    values: Tensor
    stderr: Tensor
    width: float
    dof: float = math.inf
    skew: Tensor | None = None

    def band(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The interval of `skewed_limits` at every point (not for the curve as a whole), cut off at 0."""
        if not 0 < level < 1:
            raise InputError(f"band needs a level between 0 and 1, got {level}.")
        skew = torch.zeros_like(self.stderr) if self.skew is None else self.skew
        below, above = (torch.from_numpy(off) for off in _errors_off(skew.double().numpy(), self.dof, level))
        return (self.values - below * self.stderr).clamp(min=0.0), self.values + above * self.stderr

    def __str__(self) -> str:
        if not self.grid.numel():
            return "spectral density at 0 points"
        low, high, top = float(self.grid.min()), float(self.grid.max()), int(self.values.argmax())
        where = f"at {self.grid.numel()} points from {low:.4g} to {high:.4g}, width {self.width:.3g}"
        return f"spectral density {where}: largest {float(self.values[top]):.4g} at {float(self.grid[top]):.4g}"

    def __repr__(self) -> str:  # not its hundreds of numbers
        return f"<{self}>"


@dataclass(frozen=True)
class Spectrum(Result):
    """Stochastic Lanczos quadrature: the spectral distribution μ = (1/P) Σᵢ δ(λᵢ) as weighted nodes.

    Row i of `nodes` and `weights` (probes, steps) comes from probe i alone; the weights of each row sum to 1/probes,
    all weights to 1. Each row is a Gauss quadrature, exact for polynomials up to degree 2·steps − 1 under its own
    probe, so every integral is unbiased for those and its error follows from the spread over the rows. `exact` means
    that the nodes are the eigenvalues themselves, in one row.

    >>> two_probes = Spectrum(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), torch.full((2, 2), 0.25), size=9)
    >>> print(two_probes.moment(1))
    1.5 ± 0.5
    """

    nodes: Tensor
    weights: Tensor
    size: int
    exact: bool = False
    matvecs: int = 0
    seed: int | None = None

    def integrate(self, function: Callable[[Tensor], Tensor]) -> Estimate:
        """∫ f dμ = Tr f(H)/P for an elementwise `function`; multiply by `size` for the trace."""
        rows = (self.weights.double() * function(self.nodes.double())).sum(1) * self.weights.shape[0]
        if self.exact:
            return Estimate(float(rows.mean()), matvecs=self.matvecs, seed=self.seed)
        return Estimate.from_draws(rows, matvecs=self.matvecs, seed=self.seed)

    def moment(self, k: int) -> Estimate:
        """∫ λᵏ dμ = Tr(Hᵏ)/P."""
        if k < 0:
            raise InputError(f"moment needs k >= 0, got {k}.")
        return self.integrate(lambda nodes: nodes**k)

    def density(self, grid: Tensor | None = None, width: float | None = None) -> Density:
        """The density smoothed by a Gaussian of standard deviation `width`, with its error at every point of `grid`.

        `width` is 1/100 of the span of the nodes unless given, `grid` 512 points that reach 4 widths beyond the nodes.
        """
        nodes, weights = self.nodes.double(), self.weights.double()
        low, high = float(nodes.min()), float(nodes.max())
        if width is None:
            width = (high - low) / 100 or max(abs(high), 1.0) / 100
        if not (width > 0 and math.isfinite(width)):
            raise InputError(f"density needs a width > 0, got {width}.")
        if grid is None:
            grid = torch.linspace(low - 4 * width, high + 4 * width, 512, dtype=torch.float64)
        grid = grid.double().cpu()
        rows = torch.zeros(grid.numel(), nodes.shape[0], dtype=torch.float64)
        for i, (node, weight) in enumerate(zip(nodes, weights, strict=True)):
            bells = torch.exp(-0.5 * ((grid[:, None] - node) / width).square()) / (width * math.sqrt(2 * math.pi))
            rows[:, i] = bells @ weight * nodes.shape[0]
        values = rows.mean(1)
        if self.exact:
            return Density(grid, values, torch.zeros_like(values), width)
        skew = torch.tensor([mean_skewness(row) for row in rows], dtype=torch.float64)
        return Density(grid, values, rows.std(1) / math.sqrt(rows.shape[1]), width, float(rows.shape[1] - 1), skew)

    def __str__(self) -> str:
        low, high = float(self.nodes.min()), float(self.nodes.max())
        how = "all eigenvalues" if self.exact else f"{self.nodes.shape[0]} probes of {self.nodes.shape[1]} nodes"
        return f"spectrum of size {self.size} from {low:.4g} to {high:.4g}: {how}, mean {self.moment(1)}"


@dataclass(frozen=True)
class SpectrumSummary(Result):
    """Both ends of a spectrum, its trace, norms and density, from one set of Lanczos runs.

    `mean_square` is Tr(H²)/P. `layers` holds the trace of every parameter's diagonal block; the layers share their
    probes, so their errors are correlated and do not add up like independent ones.
    """

    largest: Eigenpairs
    smallest: Eigenpairs
    trace: Estimate
    frobenius_norm: Estimate
    mean_square: Estimate
    density: Spectrum
    layers: dict[str, Estimate]
    size: int
    matvecs: int
    seed: int | None = None

    @property
    def spectral_norm(self) -> float:
        """The largest absolute value of an eigenvalue, from the two ends."""
        return max(abs(float(self.largest.values[0])), abs(float(self.smallest.values[0])))

    def __str__(self) -> str:
        return (
            f"spectrum of size {self.size}: from {self.smallest.outermost()} to {self.largest.outermost()}, "
            f"trace {self.trace}, Frobenius norm {self.frobenius_norm}, {self.matvecs} products"
        )


@dataclass(frozen=True)
class Certificate(Result):
    """What a transform of a network keeps, and how that was checked.

    `preserves` says it in words, `scale` is the α of new outputs = α · old outputs (1: the function is the same).
    `modes` are the batch-norm modes in which it holds exactly, "eval" and "batch" (statistics of the batch). The
    outputs of both networks were compared in these modes on `samples` samples, described by `data`: they differ by at
    most `largest_difference`, and by `relative_difference` of the largest output.

    `factors` gives the diagonal map T for which the Hessian H of the loss of α·φ becomes T⁻¹HT⁻¹ (mathematics 7.1): for
    each parameter tensor a number, or a float64 tensor that broadcasts to its shape. It is `None` where the transform
    is no such map.
    """

    transform: str
    preserves: str
    scale: float
    modes: tuple[str, ...]
    largest_difference: float
    relative_difference: float
    samples: int
    data: str
    factors: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.transform} preserves: {self.preserves} (batch norm: {' and '.join(self.modes)}); outputs differ by "
            f"at most {self.largest_difference:.2g}, relatively {self.relative_difference:.2g}, on {self.data}"
        )


@dataclass(frozen=True)
class Landscape(Result):
    """The loss, and the accuracy, on a line or a plane through a model's parameters θ.

    `losses` (n,) or (n, m) holds L(θ + t·d₁) or L(θ + t·d₁ + s·d₂) for t in `steps[0]` and s in `steps[1]`; the model
    itself is at step 0. `lengths` are the norms ‖dᵢ‖, so that t·‖dᵢ‖ is a distance. `value` is L(θ), `slopes` (d,) the
    derivatives ∇L·dᵢ and `curvatures` (d, d) the second derivatives dᵢᵀ∇²L dⱼ there. `accuracies` is `None` where
    the targets are no classes. `barrier` belongs to a path to another model, at step 1: the largest excess of L over
    the straight line between the losses of both ends, max over t in [0, 1] of L(t) − (1−t)·L(0) − t·L(1).
    """

    directions: tuple[str, ...]
    steps: tuple[Tensor, ...]
    losses: Tensor
    accuracies: Tensor | None
    value: float
    slopes: Tensor
    curvatures: Tensor
    lengths: Tensor
    barrier: float | None = None
    samples: int = 0
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    seed: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def quadratic(self) -> Tensor:
        """What slope and curvature at the model predict on the same grid: L(θ) + g·t + ½ tᵀHt."""
        grid = torch.stack(torch.meshgrid(*self.steps, indexing="ij"), dim=-1)
        return self.value + grid @ self.slopes + 0.5 * (grid @ self.curvatures * grid).sum(-1)

    def __str__(self) -> str:
        shape = " x ".join(str(len(steps)) for steps in self.steps)
        axes = ", ".join(
            f"{name} (curvature {float(self.curvatures[i, i]):.4g})" for i, name in enumerate(self.directions)
        )
        low, high = float(self.losses.min()), float(self.losses.max())
        barrier = "" if self.barrier is None else f"; barrier {self.barrier:.4g}"
        return (
            f"loss on {shape} points along {axes}: {self.value:.4g} at the model, from {low:.4g} to {high:.4g}{barrier}"
        )


@dataclass(frozen=True)
class AuditRow(Result):
    """One measure before and after one transform.

    `ratio` is after / before, NaN where that says nothing: where the error of one of them leaves its sign open, or the
    signs differ. `predicted` is the ratio that theory gives, NaN where it gives none; `declared` whether the measure is
    declared invariant. Verdicts: "invariant"; "changes"; "unstable": the difference is within the errors, or the value
    is not defined any more, so nothing can be said; "not converged": an iteration stopped before its tolerance. `note`
    says why.
    """

    measure: str
    transform: str
    before: Estimate
    after: Estimate
    ratio: float
    predicted: float
    verdict: str
    declared: bool
    note: str = ""

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        name = str(data.get("measure"))
        return {**data, **{key: _with_status(data[key], name) for key in ("before", "after") if key in data}}

    @property
    def lower_bound(self) -> bool:
        """Whether the values are the best that an optimiser found."""
        return self.before.status == "lower bound"

    @property
    def factor(self) -> float:
        """How far the transform moved the value, at least.

        1 where it stayed; infinite where it became 0 or changed its sign; NaN where nothing can be said. Values with
        errors count with the ends of their 95 % intervals that lie nearest to each other.
        """
        if self.verdict != "changes":
            return 1.0 if self.verdict == "invariant" else math.nan
        if self.before.sign * self.after.sign < 0:
            return math.inf
        return moved_at_least(_around(self.before), _around(self.after))

    def __str__(self) -> str:
        bound = " (lower bound)" if self.lower_bound else ""
        text = f"{self.measure}{bound} under {self.transform}: {self.before} → {self.after}, {self.verdict}"
        return f"{text} ({self.note})" if self.note else text


# The measures that version 0.1 wrote without saying what they are worth.
_WERE_BOUNDS = frozenset(
    "ball_sharpness adaptive_sharpness_l2 adaptive_sharpness_linf box_sharpness box_sharpness_narrow "
    "box_sharpness_subspace".split()
)
_WERE_ITERATED = frozenset(
    "spectral_norm largest_eigenvalue smallest_eigenvalue log_volume quotient_norm normalised_sharpness "
    "box_sharpness_curvature spectral_margin_mean spectral_margin_median".split()
)


def _with_status(estimate: Any, measure: str) -> Any:
    """The dict of an estimate as version 0.1 wrote it, with the status that it did not say."""
    if not isinstance(estimate, dict) or "status" in estimate or estimate.get("value") is None:
        return estimate
    if measure in _WERE_BOUNDS:
        return {**estimate, "status": "lower bound"}
    if measure in _WERE_ITERATED and not estimate.get("reason"):
        # its tolerance was not kept: null is a number that is not known
        return {**estimate, "status": "converged", "tolerance": None}
    return estimate


def _around(estimate: Estimate) -> tuple[float, float]:
    """The 95 % interval on the given data; of a lower bound the value that was found."""
    return (estimate.value, estimate.value) if estimate.status == "lower bound" else estimate.interval()


def moved_at_least(before: tuple[float, float], after: tuple[float, float]) -> float:
    """The factor between two sizes that are known to lie in intervals, at least; NaN where they overlap.

    >>> moved_at_least((2.0, 2.0), (6.0, 6.0)), moved_at_least((1.0, 2.0), (6.0, 8.0))
    (3.0, 3.0)
    >>> moved_at_least((1.0, 2.0), (0.2, 0.5)), moved_at_least((1.0, 2.0), (1.5, 9.0))
    (2.0, nan)
    """
    (low, high), (new_low, new_high) = _sizes(*before), _sizes(*after)
    if new_low > high:
        return new_low / high if high else math.inf
    if low > new_high:
        return low / new_high if new_high else math.inf
    return math.nan


def _sizes(low: float, high: float) -> tuple[float, float]:
    """The range of |x| for x in an interval."""
    ends = sorted((abs(low), abs(high)))
    return (0.0 if low < 0 < high else ends[0]), ends[1]


def ratio_of(after: tuple[float, float], before: tuple[float, float]) -> tuple[float, float]:
    """The range of after / before for numbers in two intervals; NaN unless both lie on the same side of 0.

    >>> ratio_of((6.0, 8.0), (1.0, 2.0)), ratio_of((6.0, 8.0), (-0.1, 2.0)), ratio_of((-1.0, -1.0), (2.0, 2.0))
    ((3.0, 8.0), (nan, nan), (nan, nan))
    """
    ends = [*after, *before]
    if not (all(end > 0 for end in ends) or all(end < 0 for end in ends)):
        return math.nan, math.nan
    (low, high), (first, last) = _sizes(*before), _sizes(*after)
    return first / high, last / low


@dataclass(frozen=True)
class WorstFactor(Result):
    """How far a measure could be moved by scaling layers at the same outputs: what a short search found, at least.

    `lowest` and `highest` are values that were measured on really rescaled networks, with the factors of their layers
    beside them; `errors` are the half-widths of the 95 % intervals of `before`, `lowest` and `highest`. `difference` is
    the largest relative difference of the outputs.
    """

    measure: str
    before: float
    lowest: float
    highest: float
    lowest_factors: dict[str, float]
    highest_factors: dict[str, float]
    difference: float
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def factor(self) -> float:
        """The larger of highest / before and before / lowest, at least, with the errors taken against it.

        NaN where the errors leave no factor to speak of.
        """
        values = zip((self.before, self.lowest, self.highest), self.errors, strict=True)
        before, lowest, highest = ((value - error, value + error) for value, error in values)
        if not before[0] > 0 or not self.lowest > 0:
            return math.nan
        found = [moved_at_least(before, end) for end in (lowest, highest)]
        return max((factor for factor in found if not math.isnan(factor)), default=math.nan)

    def __str__(self) -> str:
        if math.isnan(self.factor):
            return f"how far {self.measure} can be moved at the same outputs cannot be told within its error"
        return (
            f"{self.measure} can be moved at least {times(self.factor)}-fold at the same outputs: scaling the layers "
            f"took it from {figure(self.before, 4)} to anything between {figure(self.lowest, 4)} and "
            f"{figure(self.highest, 4)}"
        )


@dataclass(frozen=True)
class Audit(Result):
    """Measures × transforms: which numbers survive when the function, or the prediction, does not change.

    `skipped` names the transforms that this network does not allow and the measures that are not defined for it, each
    with the reason. `certificates` says of every transform what it kept. Printed as a table: "=" invariant, "×3.2" the
    ratio of a value that changes, "?" unstable, "…" not converged.
    """

    rows: tuple[AuditRow, ...]
    worst: tuple[WorstFactor, ...] = ()
    certificates: dict[str, Certificate] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    parameters: int = 0
    loss: str = "cross_entropy"
    batch_norm: str = "eval"
    seed: int | None = None

    def row(self, measure: str, transform: str) -> AuditRow:
        """The row of one measure and one transform."""
        for row in self.rows:
            if (row.measure, row.transform) == (measure, transform):
                return row
        raise InputError(f"the audit holds no row of measure {measure!r} under transform {transform!r}.")

    def moved(self) -> dict[str, float]:
        """How far each measure was moved while every output stayed the same, by a transform or by the search.

        1 where it stayed under all of them; infinite where it became 0 or changed its sign; NaN where it was seen to
        move nowhere but something could not be decided. Transforms that change the outputs do not count. Where values
        have errors, this is what is left of the factor when the errors are taken against it.

        >>> Audit(()).moved()
        {}
        """
        factors: dict[str, list[float]] = {}
        for row in self.rows:
            certificate = self.certificates.get(row.transform)
            if certificate is not None and certificate.scale == 1.0:
                factors.setdefault(row.measure, []).append(row.factor)
        for worst in self.worst:
            factors.setdefault(worst.measure, []).append(worst.factor)
        return {name: largest(found) for name, found in factors.items()}

    def __str__(self) -> str:
        measures = list(dict.fromkeys(row.measure for row in self.rows))
        transforms = list(dict.fromkeys(row.transform for row in self.rows))
        cells = {(row.measure, row.transform): row for row in self.rows}
        words = [["measure"], ["value"], *(name.split("_") for name in transforms)]
        height = max(map(len, words))
        table = [list(line) for line in zip(*([""] * (height - len(name)) + name for name in words), strict=True)]
        for name in measures:
            present = [cells[name, transform] for transform in transforms if (name, transform) in cells]
            shown = [_cell(cells[name, t]) if (name, t) in cells else "" for t in transforms]
            table.append([name, in_short(present[0].before), *shown])
        notes = ["= invariant, ×r changes, ? within the error, … not converged, ≥ lower bound found by an optimiser"]
        notes += [str(item) for item in self.worst]
        notes += [f"left out: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(
            [*_table(table, height), *(textwrap.fill(note, 100, subsequent_indent="  ") for note in notes)]
        )


def largest(factors: Iterable[float]) -> float:
    """The largest factor; an undecided one (NaN) counts only if none is above 1.

    >>> largest([1.0, math.nan, 3.0]), largest([1.0, math.nan]), largest([1.0])
    (3.0, nan, 1.0)
    """
    every = list(factors)
    known = [factor for factor in every if not math.isnan(factor)]
    return max(known) if known and (len(known) == len(every) or max(known) > 1) else math.nan


def times(factor: float) -> str:
    """A factor as people read it, in three digits.

    >>> times(327886.0), times(3.14159), times(2.5e12), times(math.inf)
    ('328,000', '3.14', '2.5e12', 'infinitely')
    """
    if math.isinf(factor):
        return "infinitely"
    return f"{float(f'{factor:.3g}'):,.0f}" if 100 <= factor < 1e9 else figure(factor, 3)


def in_short(estimate: Estimate) -> str:
    """A number in the room of a cell: value and error, relative where that is the shorter way to say it.

    >>> in_short(Estimate(0.00065, 5.7e-05)), in_short(Estimate(139.898)), in_short(Estimate(-1.5e-7))
    ('6.5e-4 ± 9%', '139.9', '-1.5e-7')
    >>> in_short(Estimate(2.5e-3, tolerance=0.03)), in_short(Estimate(309.1, tolerance=0.002))
    ('0.0025 ± 0.03', '309.1')
    >>> in_short(Estimate(0.5, status="lower bound")), in_short(Estimate(0.5, status="not converged"))
    ('≥ 0.5', '0.5 …')
    """
    if estimate.status in ("lower bound", "not converged", "undefined"):
        text = figure(estimate.value, 4)
        return {"lower bound": f"≥ {text}", "not converged": f"{text} …"}.get(estimate.status, "undefined")
    error, size = estimate.stderr + estimate.tolerance, abs(estimate.value)
    if math.isnan(error):
        return f"{figure(estimate.value, 4)} ± unknown"
    if not error or (not estimate.stderr and error < 5e-4 * size):  # not to be seen in four digits
        return figure(estimate.value, 4)
    if error > 0.5 * size:
        return f"{figure(estimate.value, 2)} ± {figure(error, 2)}"
    return f"{figure(estimate.value, 3)} ± {f'{error / size:.0%}' if error >= 0.01 * size else '<1%'}"


def figure(value: float, digits: int) -> str:
    """A number in few digits and few characters.

    >>> figure(2267.4, 3), figure(224.0, 2), figure(0.000507, 3), figure(-0.0346, 3), figure(3.2e12, 3)
    ('2,270', '220', '5.07e-4', '-0.0346', '3.2e12')
    """
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e7:
        return f"{rounded:,.0f}" if abs(rounded) >= min(1000, 10**digits) else f"{value:.{digits}g}"
    mantissa, exponent, power = f"{value:.{digits - 1}e}".partition("e")
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{short}e{int(power)}" if exponent else mantissa  # else: not a number


def _cell(row: AuditRow) -> str:
    if row.verdict == "changes":
        return "changes" if math.isnan(row.ratio) else f"×{figure(row.ratio, 2)}"
    return {"invariant": "=", "unstable": "?"}.get(row.verdict, "…")


# ---------------------------------------------------------------- answers: what was measured, as a whole


class _Shown(Result):
    """A result with a page of its own. `report` lies above: it is looked up when a page is asked for, never before."""

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page; with `path` also written there, atomically."""
        from spiritlevel.page import page

        text = page(self)
        if path is not None:
            write_atomically(path, text)
        return text

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from spiritlevel.page import notebook

        return notebook(self)


@dataclass(frozen=True)
class Fit(Result):
    """How well a model fits some samples: `accuracy` and mean `loss`, with the error of a random subset if it was one.

    `samples` were measured out of `population`. `accuracy` is undefined where the targets are no classes.
    """

    samples: int
    population: int
    accuracy: Estimate
    loss: Estimate

    def accuracy_limits(self) -> tuple[float, float]:
        """Clopper and Pearson's 95 % interval of the accuracy on the whole population, of which a subset was measured.

        It covers 95 % or more, also of an accuracy near 0 or 1, where shorter intervals fall below.

        >>> [f"{limit:.3f}" for limit in Fit(60, 10**9, Estimate(1.0), Estimate(0.0)).accuracy_limits()]
        ['0.940', '1.000']
        """
        worth = self.samples / (1 - self.samples / self.population)  # the rest alone is unknown
        right = self.accuracy.value * worth
        low = float(stats.beta.ppf(0.025, right, worth - right + 1)) if right > 0 else 0.0
        high = float(stats.beta.ppf(0.975, right + 1, worth - right)) if right < worth else 1.0
        return low, high

    def __str__(self) -> str:
        return f"accuracy {self.accuracy}, loss {self.loss} on {self.samples:,} of {self.population:,} samples"


@dataclass(frozen=True)
class ReportRow(Result):
    """One measure of a report: its value and all that is known about it.

    `kind` is the status of `value`, see `Estimate`; `direction` what a larger value means: "sharper", "flatter",
    "wider" or "larger". `invariant_to` are the transforms that leave it as it is; `family` is "curvature", "margin" or
    "norm"; `cost` the dearest thing it does and `seconds` what it took, without what other measures had computed. Where
    a subset was measured and the error of that is not known, `subset_error` says why.
    """

    name: str
    value: Estimate
    direction: str
    family: str
    meaning: str
    formula: str
    reference: str
    invariant_to: tuple[str, ...]
    cost: str
    seconds: float = math.nan
    subset_error_unknown: bool = False
    subset_error: str = ""

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "value": _with_status(data["value"], str(data.get("name")))} if "value" in data else data

    @property
    def kind(self) -> str:
        """What the value is worth: its status."""
        return self.value.status

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval, with the error of a random subset where the data were one; NaN where that is not known."""
        return (math.nan, math.nan) if self.subset_error_unknown else self.value.interval(data=True)

    @property
    def invariant(self) -> bool:
        """Whether scaling layers at the same outputs leaves the value as it is."""
        return "rescale_layers" in self.invariant_to

    def __str__(self) -> str:
        return f"{self.name}: {self.value} ({self.kind}); {self.meaning}"


@dataclass(frozen=True)
class Pictures(Result):
    """Some samples as pictures: `images` (K, C, H, W) uint8, C = 1 or 3, of the samples `indices` (K,) of the report.

    `groups` says why: each name ("sharpest", "least certain", "others") has the positions of its pictures in `indices`.
    """

    indices: Tensor
    images: Tensor
    groups: dict[str, tuple[int, ...]]

    def __str__(self) -> str:
        counts = ", ".join(f"{len(places)} {name}" for name, places in self.groups.items())
        return f"{self.indices.numel()} pictures: {counts}"


@dataclass(frozen=True)
class Report(_Shown):
    """Everything that `measure` found about one model: prints as a table, shows itself in a notebook, has a page.

    Per-sample results (`traces`, `margins`, `predicted`) are in the order of the samples measured; `indices` are their
    places in the data if they are a random subset, else `None`. `fits` and `correlations` are by name ("train", "test";
    "trace and margin", "trace and ACEHT"), an undefined correlation says why. `layers` is the share of the trace by
    parameter tensor. `spectrum` holds no vectors. `settings` says how all this was measured: versions, seed, device,
    dtype, data, batch norm. `left_out` names what was not measured, with the reason; `partial` is empty unless the
    measurement was interrupted. `headline` says the most important in words, from the numbers alone.
    """

    name: str
    rows: tuple[ReportRow, ...]
    headline: tuple[str, ...] = ()
    fits: dict[str, Fit] = field(default_factory=dict)
    traces: SampleTraces | None = None
    margins: Margins | None = None
    test_margins: Margins | None = None
    predicted: Tensor | None = None
    indices: Tensor | None = None
    correlations: dict[str, Correlation] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)
    spectrum: SpectrumSummary | None = None
    landscape: Landscape | None = None
    audit: Audit | None = None
    pictures: Pictures | None = None
    classes: tuple[str, ...] = ()
    parameters: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    partial: str = ""
    seconds: float = math.nan

    def row(self, name: str) -> ReportRow:
        """The row of one measure."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"the report holds no measure {name!r}, only {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.parameters:,} parameters"]
        lines += [f"PARTIAL: {self.partial}"] if self.partial else []
        for name, fit in self.fits.items():
            of = f" of {fit.population:,}" if fit.population > fit.samples else ""
            lines.append(
                f"{name}: {fit.samples:,}{of} samples, accuracy {fit.accuracy.value:.2%}, loss {fit.loss.value:.4g}"
            )
        table = [["measure", "value", "95 % interval", "kind", "larger is", "invariant to"]]
        for row in self.rows:
            low, high = row.interval
            interval = "" if row.kind == "undefined" or low == high else f"{low:.4g} .. {high:.4g}"
            if row.kind == "converged":
                interval = "" if row.value.settled and not row.value.data_stderr else f"± {(high - low) / 2:.2g}"
            interval = "unknown" if math.isnan(low) and row.kind != "undefined" else interval
            interval = f"{low:.4g} or more" if math.isinf(high) else interval
            value = "undefined" if row.kind == "undefined" else f"{row.value.value:.6g}"
            table.append([row.name, value, interval, row.kind, row.direction, ", ".join(row.invariant_to) or "-"])
        lines += _table(table)
        lines += [f"{name}: {found}" for name, found in self.correlations.items()]
        lines += left_out_lines(self.left_out)
        return "\n".join([*lines, *self.headline])


def left_out_lines(left_out: dict[str, str]) -> list[str]:
    """What was left out, a line for each reason.

    >>> left_out_lines({"trace": "no time", "margin_mean": "no classes", "flatness": "no time"})
    ['left out: trace, flatness: no time', 'left out: margin_mean: no classes']
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(some)}: {reason}" for reason, some in names.items()]


def _table(rows: list[list[str]], heading: int = 1) -> list[str]:
    """Lines of aligned columns, the first rows a heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines[:heading], "  ".join("-" * width for width in widths), *lines[heading:]]


@dataclass(frozen=True)
class ComparisonRow(Result):
    """One measure of two models: `difference` is b − a, with `low` and `high` its interval where there is one.

    `how` says where the interval comes from: "paired t", "bootstrap of the pairs", "probes"; or why there is none:
    "exact" (no error on the data given), "tolerance" (known to that of an iteration), "lower bounds", "not converged",
    "too few samples". `ratio` is b / a, NaN where the interval of one of them leaves its sign open or the signs differ.
    `factor` is how far the audit moved this measure at the same outputs, 1 for an
    invariant one and NaN where that is not known. Verdicts: "a" or "b", the model that the measure favours; "equal":
    the interval holds 0; "not comparable": the parametrisation moves it, so the difference may be an artefact of that;
    "no interval": nothing tells how sure the difference is; "no preference": neither direction is the better one;
    "undefined". `note` says why. `sure`: whether the difference excludes 0 also at the stricter level that the advice
    needs, which looks at up to three rows.
    """

    name: str
    a: Estimate
    b: Estimate
    difference: float
    low: float
    high: float
    how: str
    ratio: float
    factor: float
    verdict: str
    direction: str
    meaning: str
    invariant: bool
    note: str = ""
    sure: bool = False

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        name, how = str(data.get("name")), data.get("how")
        if how == "exact" and name in _WERE_BOUNDS | _WERE_ITERATED:
            how = "lower bounds" if name in _WERE_BOUNDS else "tolerance"
        return {**data, "how": how, **{key: _with_status(data[key], name) for key in ("a", "b") if key in data}}

    def __str__(self) -> str:
        text = f"{self.name}: {self.a} and {self.b}, difference {self.difference:.4g}, {self.verdict}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Comparison(_Shown):
    """Two models on the same samples: which to trust, and why. Rows that no parametrisation can move come first.

    `margins`, `traces` (where they could be had) and `losses` hold a pair, a and b, in the order of the samples.
    `advice` is one sentence that follows from the rows alone; `reasons` are the rows that it rests on, in words.
    `samples` were compared out of `population`, drawn at random if these are more.
    """

    names: tuple[str, str]
    rows: tuple[ComparisonRow, ...]
    advice: str
    reasons: tuple[str, ...] = ()
    margins: tuple[Margins, Margins] | None = None
    traces: tuple[SampleTraces, SampleTraces] | None = None
    losses: tuple[Tensor, Tensor] | None = None
    samples: int = 0
    level: float = 0.95
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    population: int = 0

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "population" in data:
            return data
        # "500 of 1,797, drawn at random"
        said = str(data.get("settings", {}).get("samples", "")).replace(",", "").split()
        known = len(said) > 2 and said[1] == "of" and said[2].isdigit()
        return {**data, "population": int(said[2]) if known else data.get("samples", 0)}

    def row(self, name: str) -> ComparisonRow:
        """The row of one measure."""
        for row in self.rows:
            if row.name == name:
                return row
        raise InputError(f"the comparison holds no measure {name!r}, only {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        a, b = self.names
        table = [["measure", a, b, "difference", f"{self.level:.0%} interval", "from", "favours"]]
        for row in self.rows:
            interval = "" if math.isnan(row.low) or row.low == row.high else f"{row.low:.3g} .. {row.high:.3g}"
            favours = {"a": a, "b": b, "equal": "neither"}.get(row.verdict, row.verdict)
            values = ["undefined" if math.isnan(v.value) else f"{v.value:.5g}" for v in (row.a, row.b)]
            table.append([row.name, *values, f"{row.difference:.3g}", interval, row.how, favours])
        lines = [f"{a} and {b} on {self.samples:,} samples", *_table(table)]
        lines += left_out_lines(self.left_out)
        return "\n".join([*lines, self.advice])
