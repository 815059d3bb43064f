"""Results: numbers with their errors, and a JSON form that loses nothing and stays strict."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import spiritlevel as sl
from spiritlevel.errors import InputError
from spiritlevel.results import (
    SYMMETRIES,
    ComparisonRow,
    Correlation,
    DiagonalEstimate,
    Eigenpairs,
    Estimate,
    Fit,
    Margins,
    Pictures,
    ReportRow,
    Result,
    SampleTraces,
    SmoothedDensity,
    SpectralDensity,
    SpectrumSummary,
    codec,
    skewed_limits,
    write_atomically,
)

if TYPE_CHECKING:
    from fractions import Fraction  # stands for a type that does not exist at run time

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Everything(Result):
    """All that a field may hold."""

    number: float = NAN
    maybe: float | None = None
    whole: int = 0
    flag: bool = False
    text: str = ""
    tensor: Tensor | None = None
    inner: Estimate | None = None
    numbers: tuple[float, ...] = ()
    pair: tuple[int, float] = (0, NAN)
    items: list[float] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    estimates: tuple[Estimate, ...] = ()
    rows: tuple[dict[str, float], ...] = ()
    anything: Any = None


@dataclass(frozen=True)
class Unresolved(Result):
    """A field whose type only the type checker knows."""

    number: float = NAN
    odd: Fraction | None = None


def equal(a: Any, b: Any) -> bool:
    """Equality to the last bit and the type, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy().tobytes()
    if isinstance(a, Result):
        return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))  # type: ignore[arg-type]
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def strict(text: str) -> Any:
    """What a reader that knows only the JSON of the standard sees."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def doubles(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


ESTIMATE = Estimate(1.5, 0.25, 7.0, 8, 3, 0.125, "because")
PAIRS = Eigenpairs(doubles(3.0, -1e-300), torch.eye(2, dtype=torch.float64), doubles(0.0, NAN), False, 12, reason="why")
SPECTRUM = SpectralDensity(
    doubles(1, 2, 3, 4).reshape(2, 2), torch.full((2, 2), 0.25, dtype=torch.float64), 9, False, 4, 1
)
EXAMPLES: dict[str, Result] = {
    "estimate": ESTIMATE,
    "estimate, undefined": Estimate(NAN, NAN, INF, reason="no data"),
    "estimate, infinite": Estimate(-INF, INF, 1.0, data_stderr=INF),
    "sample traces": SampleTraces(
        values=doubles(1.0, NAN, INF),
        stderr=doubles(0.1, 0.2, -INF),
        exact=False,
        method="hutchinson",
        targets=torch.tensor([0, 2, 1]),
        layers={"0.weight": doubles(1, 2, 3), "type": doubles(4, 5, 6)},
        probes=torch.full((3,), 2),
        dof=1.0,
        draws=doubles(1, 2, 3, 4, 5, 6).reshape(3, 2),
        population=100,
        notes=("one", "zwei – ü"),
    ),
    "sample traces, none": SampleTraces(
        torch.empty(0, dtype=torch.float64),
        torch.empty(0, dtype=torch.float64),
        True,
        "exact",
        torch.empty(0, dtype=torch.int64),
    ),
    "margins": Margins(
        doubles(1, 2),
        doubles(1, -2),
        doubles(0.5, 0.25),
        doubles(1e-300, 1),
        torch.tensor([True, False]),
        doubles(0, 1),
    ),
    "correlation": Correlation(NAN, NAN, NAN, 1, 0, NAN, NAN, NAN, NAN, reason="one point"),
    "eigenpairs": PAIRS,
    "diagonal": DiagonalEstimate(doubles(1, 2), doubles(0, 0.5), 3.0, 4, 0),
    "density": SmoothedDensity(doubles(0, 1), doubles(1, 2), doubles(0, 0), 0.1),
    "spectrum": SPECTRUM,
    "summary": SpectrumSummary(PAIRS, PAIRS, ESTIMATE, ESTIMATE, ESTIMATE, SPECTRUM, {"0.weight": ESTIMATE}, 9, 4),
    "everything": Everything(
        -0.0,
        1.0,
        3,
        True,
        "Infinity",
        torch.tensor(3.0, dtype=torch.float32),
        ESTIMATE,
        (1.0, NAN, -INF),
        (1, NAN),
        [INF],
        {"a": NAN, "b": INF, "type": 1.0},
        {"half": torch.tensor([1.5, NAN], dtype=torch.float16), "none": torch.empty(0, 3)},
        (ESTIMATE, Estimate(NAN)),
        ({"x": NAN},),
        {"type": "Estimate", "dtype": "float64", "shape": (1,), "data": (1,), "items": {"type": {"deep": None}}},
    ),
    "everything, defaults": Everything(),
    "everything, a dict like a tensor": Everything(anything={"dtype": "float64", "shape": (1,), "data": (1.0,)}),
    "everything, a dict like a dict": Everything(anything={"type": "dict", "items": {"a": 1}}),
    "everything, a dict like a result": Everything(anything=({"type": "Estimate", "value": 1.0},)),
    "unresolved": Unresolved(),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_result_survives_the_round_trip(name: str) -> None:
    result = EXAMPLES[name]
    text = result.to_json()
    strict(text)
    assert equal(Result.from_json(text), result)
    assert equal(type(result).from_dict(strict(text)), result)


def example(hint: Any) -> Any:
    """A value of the declared type that JSON finds hard to keep."""
    inner = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
    if get_origin(hint) in (UnionType, Union):
        return 1.5 if float in inner else example(inner[0])
    if isinstance(hint, type) and issubclass(hint, Result):
        fields = {name: example(kind) for name, kind in codec._hints(hint).items() if not name.startswith("_")}
        return hint(**{**fields, "status": "estimated"} if "status" in fields else fields)
    if get_origin(hint) in (tuple, list, dict):
        kind = get_origin(hint)
        return {"type": example(inner[1])} if kind is dict else kind(example(item) for item in inner)
    return {float: NAN, int: 3, bool: True, str: "Infinity", Tensor: doubles(INF, NAN)}.get(hint)


public = [getattr(sl, name) for name in sl._HOME]
KINDS = [kind for kind in public if isinstance(kind, type) and issubclass(kind, Result) and kind is not Result]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_public_result_is_made_of_what_json_can_keep(kind: type[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spiritlevel.results.codec._fits", lambda found: None)  # made up of fields, each by itself
    result = example(kind)
    text = result.to_json()
    strict(text)
    assert equal(Result.from_json(text), result)


floats = st.floats(allow_nan=True, allow_infinity=True)
keys = st.sampled_from(["type", "dtype", "shape", "data", "items", "value", "a"]) | st.text(max_size=3)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(
    number=floats,
    maybe=st.none() | st.floats(allow_nan=False),
    text=st.text(),
    numbers=st.lists(floats, max_size=4).map(tuple),
    table=st.dictionaries(keys, floats, max_size=4),
    anything=plain,
)
def test_any_result_survives_the_round_trip(**fields: Any) -> None:
    result = Everything(**fields)
    text = result.to_json()
    strict(text)
    assert equal(Everything.from_json(text), result)


@given(st.lists(floats, max_size=6), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_tensors_keep_their_bits(numbers: list[float], dtype: torch.dtype) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    back = Everything.from_json(Everything(tensor=tensor).to_json()).tensor
    assert back is not None
    assert back.dtype == dtype
    assert torch.equal(back.nan_to_num(), tensor.nan_to_num())
    assert torch.equal(back.isnan(), tensor.isnan())


def test_an_absent_number_and_an_undefined_one_are_both_null() -> None:
    data = strict(Everything(number=NAN, maybe=NAN, table={"a": NAN}).to_json())
    assert data["number"] is None
    assert data["maybe"] is None
    assert data["table"] == {"a": None}
    back = Everything.from_dict(data)
    assert math.isnan(back.number)
    assert back.maybe is None  # documented: a number that may be absent comes back as absent


def test_lists_without_a_declared_type_come_back_as_tuples() -> None:
    assert Everything.from_json(Everything(anything=[1, [2]]).to_json()).anything == (1, (2,))


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="results hold tensors, numbers, strings, dicts and lists, got complex"):
        Everything(anything=1j).to_json()
    with pytest.raises(TypeError, match="must have strings as keys, got 3"):
        Everything(anything={3: 1}).to_json()

    @dataclass(frozen=True)
    class Typed(Result):
        type: str = ""

    @dataclass(frozen=True)
    class Formatted(Result):
        format: str = ""

    try:
        with pytest.raises(TypeError, match="Typed has a field named 'type'"):
            Typed().to_json()
        with pytest.raises(TypeError, match="Formatted has a field named 'format'"):
            Formatted().to_json()
    finally:
        del Result._types["Typed"], Result._types["Formatted"]


def test_unreadable_results_say_what_is_wrong() -> None:
    with pytest.raises(InputError, match=r"type 'Estimat', expected one of: .*Estimate"):
        Result.from_dict({"type": "Estimat"})
    with pytest.raises(InputError, match=r"type 'Margins', expected one of: CriticalSharpness, Estimate, Prediction\."):
        Estimate.from_dict({"type": "Margins"})
    with pytest.raises(InputError, match="this is not a spiritlevel result"):
        Result.from_json("[1, 2]")
    with pytest.raises(InputError, match="one of: Audit, ") as refused:
        Result.from_dict({"type": "Unknown"})
    assert "Shown" not in str(refused.value)
    with pytest.raises(InputError, match="type 'Estimate': it lacks value"):
        Result.from_dict({"type": "Estimate"})
    with pytest.raises(InputError, match=r"'results.json' is neither the path of a file nor JSON"):
        Result.from_json("results.json")
    with pytest.raises(InputError, match=r"the text is not JSON"):
        Result.from_json('{"type": "Estimate", ')
    with pytest.raises(InputError, match="is neither the path of a file"):
        Result.from_json("a" * 10_000 + "\0")


def test_a_file_is_named_by_a_path_or_by_a_text(tmp_path: Path) -> None:
    file = str(tmp_path / "estimate.json")
    Estimate(1.5).to_json(file)
    assert Estimate.from_json(file) == Estimate.from_json(Path(file)) == Estimate(1.5)


def test_a_density_prints_in_a_line() -> None:
    density = SpectralDensity(torch.tensor([[0.0, 2.0], [0.0, 4.0]]), torch.full((2, 2), 0.25), size=9).density()
    assert str(density).startswith("spectral density at 512 points from -0.16 to 4.16, width 0.04: largest ")


# ---------------------------------------------------------------- files


def test_the_median_of_evenly_many_is_the_mean_of_the_middle_two() -> None:
    four, found = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([True] * 4)
    margins = Margins(four, four, four, four, found, torch.zeros(4).long(), distance=four, norm="2")
    assert "median distance 3 in input space" in str(margins)
    batches = sl.BatchEigenvalues(four[:, None], torch.zeros(4, 1), found, 4, 9)
    assert "from 1 to 9, median 3;" in str(batches)


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    text = ESTIMATE.to_json(path)
    assert path.read_text(encoding="utf-8") == text + "\n"
    assert Result.from_json(path) == ESTIMATE
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "result.json"
    write_atomically(path, "old")
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    else:
        monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises((OSError, KeyboardInterrupt)):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    usual, path = tmp_path / "usual", tmp_path / "result.json"
    usual.write_text("")
    write_atomically(path, "a")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    path.chmod(0o640)
    write_atomically(path, "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_links_are_followed_and_pipes_are_written_to(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


# ---------------------------------------------------------------- estimates


@given(
    st.floats(-1e6, 1e6),
    st.floats(1e-6, 1e3),
    st.integers(1, 200) | st.just(INF),
    st.floats(0.01, 0.999),
)
def test_intervals_are_those_of_students_t(value: float, stderr: float, dof: float, level: float) -> None:
    found = Estimate(value, stderr, dof).interval(level)
    expected = (stats.norm if dof == INF else stats.t(dof)).interval(level)
    assert found == pytest.approx([value + stderr * end for end in expected], rel=1e-9, abs=1e-9)


def test_the_error_of_the_data_joins_only_if_asked() -> None:
    estimate = Estimate(1.0, 0.3, 5, data_stderr=0.4)
    assert estimate.interval() == Estimate(1.0, 0.3, 5).interval()
    dof = 0.5**4 / (0.3**4 / 5)  # Welch-Satterthwaite, the second variance known
    low, high = estimate.interval(data=True)
    assert (high - low) / 2 == pytest.approx(0.5 * stats.t.ppf(0.975, dof))
    for dof in (INF, 3.0):  # exact on its subset: the degrees of freedom of no probes play no part
        low, high = Estimate(1.0, 0.0, dof, data_stderr=0.4).interval(data=True)
        assert (high - low) / 2 == pytest.approx(0.4 * stats.norm.ppf(0.975))
    assert Estimate(1.0).interval(data=True) == (1.0, 1.0)


def test_degenerate_intervals() -> None:
    assert Estimate(2.0).interval() == (2.0, 2.0)
    assert Estimate(2.0, INF).interval() == (-INF, INF)
    for undefined in (Estimate(NAN), Estimate(1.0, NAN), Estimate(1.0, 0.1, 0.0)):
        assert all(map(math.isnan, undefined.interval()))
    for level in (0.0, 1.0, -1.0, NAN):
        with pytest.raises(InputError, match=r"interval needs a level between 0 and 1|level must be a finite number"):
            ESTIMATE.interval(level)


def test_the_estimate_of_draws() -> None:
    draws = np.random.default_rng(0).normal(3, 2, 17)
    estimate = Estimate.from_draws(torch.from_numpy(draws), seed=4)
    assert estimate.value == pytest.approx(draws.mean())
    assert estimate.stderr == pytest.approx(stats.sem(draws))
    assert (estimate.dof, estimate.matvecs, estimate.seed, estimate.exact) == (16, 17, 4, False)
    plain = dataclasses.replace(estimate, skew=0.0)
    assert plain.interval(0.9) == pytest.approx(stats.t.interval(0.9, 16, draws.mean(), stats.sem(draws)))
    assert estimate.skew == pytest.approx(stats.skew(draws, bias=False) / math.sqrt(17))
    same = Estimate.from_draws(torch.ones(3))
    assert (same.stderr, same.status, same.exact) == (0.0, "estimated", False)  # three equal draws prove nothing
    with pytest.raises(InputError, match="a standard error needs at least 2 draws, got 1"):
        Estimate.from_draws(torch.ones(1))


@pytest.mark.parametrize("count", [3, 10])
def test_intervals_cover_what_they_promise(count: int) -> None:
    """Over 300 seeds; the spread of the count itself is √(0.9·0.1/300) = 1.7 %. A normal interval fails at n = 3.

    Three draws say next to nothing of their skewness: what they state is conservative for normal ones.
    """
    draws = torch.from_numpy(np.random.default_rng(1).normal(5, 2, (300, count)))
    covered = [low <= 5 <= high for low, high in (Estimate.from_draws(row).interval(0.9) for row in draws)]
    assert 0.85 < np.mean(covered) < (0.95 if count > 3 else 1.0)
    normal = [abs(float(row.mean()) - 5) <= stats.norm.ppf(0.95) * stats.sem(row.numpy()) for row in draws]
    assert count > 3 or np.mean(normal) < 0.85


@pytest.mark.parametrize(
    ("estimate", "shown"),
    [
        (Estimate(2.5, 0.65), "2.5 ± 0.65"),
        (Estimate(1234.5678, 0.012), "1,234.568 ± 0.012"),
        (Estimate(1e-9, 1e-3), "1e-9 ± 0.001"),
        (Estimate(1 / 3), "0.333333"),
        (Estimate(0.0, 1.5), "0 ± 1.5"),
        (Estimate(-INF, 1.0), "-inf ± 1"),
        (Estimate(0.0, NAN), "0 ± unknown"),
        (Estimate(1.0, INF), "1 ± inf"),
        (Estimate(NAN, reason="no data"), "undefined (no data)"),
        (Estimate(NAN), "undefined"),
    ],
)
def test_estimates_print_themselves(estimate: Estimate, shown: str) -> None:
    assert str(estimate) == shown
    assert equal(float(estimate), estimate.value)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "everything" not in name])
def test_every_result_prints_on_one_line(name: str) -> None:
    assert "\n" not in str(EXAMPLES[name])


# ---------------------------------------------------------------- means of per-sample traces


def sample_traces(draws: Tensor | None = None, **fields: Any) -> SampleTraces:
    values = doubles(1, 2, 3, 6) if draws is None else draws.mean(1)
    defaults: dict[str, Any] = {
        "stderr": torch.zeros_like(values),
        "exact": draws is None,
        "method": "exact",
        "targets": torch.zeros(len(values), dtype=torch.int64),
        "draws": draws,
    }
    return SampleTraces(values, **{**defaults, **fields})


def test_the_mean_of_exact_traces_is_exact() -> None:
    mean = sample_traces(matvecs=9, seed=1).mean()
    assert mean == Estimate(3.0, 0.0, INF, 9, 1, None)
    assert mean.exact


def test_the_mean_of_a_subset_carries_the_error_of_the_subset() -> None:
    values = torch.linspace(0, 1, 40, dtype=torch.float64)
    zeros, labels = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.int64)
    mean = SampleTraces(values, zeros, True, "exact", labels, population=160).mean()
    assert mean.stderr == 0.0
    assert mean.data_stderr == pytest.approx(stats.sem(values.numpy()) * math.sqrt(1 - 40 / 160))
    expected = stats.t.interval(0.95, 39, 0.5, mean.data_stderr)
    assert mean.interval(data=True) == mean.data_limits == pytest.approx(expected)
    assert sample_traces(population=4).mean().data_stderr is None
    assert sample_traces(population=4).mean().data_limits is None
    assert math.isnan(sample_traces(population=16).mean().interval(data=True)[0])  # four of sixteen tell too little
    single = SampleTraces(doubles(2), doubles(0), True, "exact", torch.tensor([0]), population=5).mean()
    assert single.data_stderr is not None
    assert math.isnan(single.data_stderr)  # one sample says nothing about the others
    assert all(map(math.isnan, single.interval(data=True)))
    assert single.interval() == (2.0, 2.0)


def test_the_error_of_a_subset_is_right_on_average() -> None:
    population = torch.from_numpy(np.random.default_rng(0).gamma(1.0, 1.0, 60))
    picks = [torch.from_numpy(np.random.default_rng(s).choice(60, 30, replace=False)) for s in range(400)]
    means, errors = zip(
        *(
            (estimate.value, estimate.data_stderr)
            for estimate in (
                SampleTraces(population[p], torch.zeros(30), True, "exact", p, population=60).mean() for p in picks
            )
        ),
        strict=True,
    )
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_independent_errors_add_in_squares() -> None:
    few = sample_traces(exact=False, stderr=doubles(3, 4, 0, 0)).mean()
    assert few.value == 3.0
    assert math.isnan(few.stderr)  # two draws cannot tell their own error
    values, labels = torch.ones(20, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)
    mean = SampleTraces(values, 3 * values, False, "passes=1", labels).mean()
    assert mean.stderr == pytest.approx(3 / math.sqrt(20))
    assert (mean.dof, mean.skew) == pytest.approx((20, 1 / math.sqrt(20)))


@pytest.mark.parametrize("skew", [-0.9, -0.2, 0.3, 0.8])
def test_skewed_limits_invert_halls_transformation(skew: float) -> None:
    low, high = skewed_limits(2.0, 0.5, 12, skew, 0.9)
    s = 1.25 * skew
    t = stats.t.ppf(0.95, 12 / (1 + s**2 + 3 / 12))
    for limit, wanted in ((low, t), (high, -t)):
        pivot = (2.0 - limit) / 0.5
        assert pivot + s / 3 * pivot**2 + (s / 3) ** 2 * pivot**3 / 3 + s / 6 == pytest.approx(wanted)
    assert (high - 2.0 > 2.0 - low) == (skew > 0)  # a tail to the right: the truth may be far above
    assert skewed_limits(2.0, 0.5, 12, 0.0) == pytest.approx(stats.t.interval(0.95, 12, 2.0, 0.5))


def test_the_root_of_a_mean_has_the_roots_of_its_limits() -> None:
    square = Estimate(9.0, 2.0, 5, skew=0.4)
    root = Estimate(3.0, 2.0 / 6, 5, skew=0.4, power=2.0)
    assert root.interval() == pytest.approx(tuple(math.sqrt(limit) for limit in square.interval()))
    assert Estimate(1.0, 4.0, 5, power=2.0).interval()[0] == 0.0


def test_limits_of_a_subset_and_of_probes_add_in_squares() -> None:
    both = Estimate(1.0, 0.3, INF, data_stderr=0.4, data_limits=(0.2, 2.6))
    low, high = both.interval(data=True)
    probes = 0.3 * stats.norm.ppf(0.975)
    assert (low, high) == pytest.approx((1 - math.hypot(0.8, probes), 1 + math.hypot(1.6, probes)))
    wide = dataclasses.replace(both, stderr=0.0).interval(0.99, data=True)
    assert wide[1] - 1 == pytest.approx(1.6 * stats.norm.ppf(0.995) / stats.norm.ppf(0.975))
    read = Estimate.from_json(dataclasses.replace(both, data_limits=(NAN, NAN)).to_json())
    assert all(map(math.isnan, read.interval(data=True)))  # unknown stays unknown, and is not absent


def test_shared_probes_take_their_error_from_the_spread_over_probes() -> None:
    generator = np.random.default_rng(0)
    common = generator.normal(size=(1, 50))
    draws = torch.from_numpy(common + 0.1 * generator.normal(size=(400, 50)))  # what is shared dominates
    traces = sample_traces(draws, stderr=draws.std(1) / math.sqrt(50), seed=2)
    mean = traces.mean()
    assert mean.value == pytest.approx(float(draws.mean()))
    assert mean.stderr == pytest.approx(stats.sem(draws.mean(0).numpy()))
    assert mean.dof == 49
    independent = dataclasses.replace(traces, draws=None).mean()
    assert independent.stderr < mean.stderr / 10  # what combining them as independent would have claimed


def test_the_mean_over_shared_probes_covers_the_truth() -> None:
    covered = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        draws = torch.from_numpy(1.0 + generator.normal(size=(1, 8)) + generator.normal(size=(40, 8)))
        low, high = sample_traces(draws).mean().interval(0.95)
        covered += low <= 1 <= high
    assert covered / 300 == pytest.approx(0.95, abs=0.04)


def test_no_traces_have_an_undefined_mean() -> None:
    nothing = EXAMPLES["sample traces, none"]
    assert isinstance(nothing, SampleTraces)
    assert math.isnan(nothing.mean().value)
    assert "0 per-sample Hessian traces" in str(nothing)


# ---------------------------------------------------------------- spectra


def test_integrals_over_a_spectrum_have_the_error_of_the_rows() -> None:
    moment = SPECTRUM.moment(2)
    rows = np.array([(1 + 4) / 2, (9 + 16) / 2])
    assert moment.value == pytest.approx(rows.mean())
    assert moment.stderr == pytest.approx(stats.sem(rows))
    assert moment.dof == 1
    exact = SpectralDensity(doubles(1, 2).reshape(1, 2), torch.full((1, 2), 0.5), 2, exact=True)
    assert exact.moment(1) == Estimate(1.5)
    with pytest.raises(InputError, match="moment needs k >= 0, got -1"):
        SPECTRUM.moment(-1)


def test_a_density_integrates_to_one_and_its_band_is_a_t_interval() -> None:
    density = SPECTRUM.density()
    assert torch.trapezoid(density.values, density.grid).item() == pytest.approx(1, abs=1e-3)
    low, high = density.band(0.9)
    half = density.stderr * stats.t.ppf(0.95, 1)
    assert torch.allclose(high, density.values + half)
    assert torch.allclose(low, (density.values - half).clamp(min=0))
    with pytest.raises(InputError, match="density needs a width > 0, got 0"):
        SPECTRUM.density(width=0.0)
    with pytest.raises(InputError, match="band needs a level between 0 and 1, got 2"):
        density.band(2.0)


def small_report() -> sl.Report:
    exact, unknown = Estimate(2.5, data_stderr=0.5), Estimate(math.nan, reason="no layer of its own")
    texts = {"direction": "sharper", "family": "curvature", "meaning": "m", "formula": "f", "reference": "r"}
    return sl.Report(
        "net",
        rows=(
            ReportRow("trace", exact, invariant_to=(), cost="backward", seconds=0.1, **texts),
            ReportRow("path_norm", unknown, invariant_to=SYMMETRIES, cost="forward", **texts),
        ),
        headline=("A sentence.",),
        fits={"train": Fit(3, 9, Estimate(0.5), Estimate(0.7))},
        layers={"weight": 0.75, "bias": 0.25},
        pictures=Pictures(torch.tensor([2]), torch.zeros(1, 1, 2, 2, dtype=torch.uint8), {"sharpest": (0,)}),
        settings={"seed": "0"},
        left_out={"audit": "the time limit"},
        partial="interrupted",
    )


def test_a_report_comes_back_from_json_and_prints_what_matters() -> None:
    report = small_report()
    again = sl.Report.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert again.pictures is not None
    assert again.pictures.groups == {"sharpest": (0,)}
    assert again.row("trace") == report.row("trace")
    assert not again.row("trace").invariant
    assert again.row("path_norm").invariant
    shown = str(report)
    for text in (
        "PARTIAL: interrupted",
        "3 of 9 samples",
        "undefined",
        "left out: audit: the time limit",
        "A sentence.",
    ):
        assert text in shown
    low, _ = report.row("trace").interval
    assert low == pytest.approx(2.5 - 1.96 * 0.5, abs=1e-3)
    with pytest.raises(InputError, match="no measure 'frob', only trace, path_norm"):
        report.row("frob")


def test_a_comparison_comes_back_from_json() -> None:
    row = ComparisonRow(
        "trace",
        Estimate(1.0),
        Estimate(2.0),
        1.0,
        0.5,
        1.5,
        "paired t",
        2.0,
        8.0,
        "not comparable",
        "sharper",
        "m",
        False,
    )
    comparison = sl.Comparison(("a", "b"), (row,), "No reason to prefer one.", samples=4)
    again = sl.Comparison.from_json(comparison.to_json())
    assert again == comparison
    assert "not comparable" in str(again)
    assert again.row("trace").ratio == 2.0
