"""Wrong arguments against the measurements, and damaged files against the readers.

A measurement of what has a wrong shape or type is finite or refused with a sentence. A reader of a damaged file either
returns something whole or says what is wrong in one sentence. Random networks are in `test_random_networks`.
"""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.loading import load_samples, load_weights
from spiritlevel.results import Result

FEW = settings(max_examples=settings.get_profile("quick").max_examples // 2 if settings().max_examples < 100 else 100)


def one_sentence(error: Exception) -> None:
    text = str(error)
    assert text.endswith((".", ")")), text
    assert "\n" not in text, text


# ---------------------------------------------------------------- wrong arguments

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(max_examples=FEW.max_examples * 3)
@given(
    SHAPES,
    SHAPES,
    st.sampled_from([*DTYPES, torch.complex64]),
    st.sampled_from([*DTYPES, torch.complex64]),
    st.sampled_from(["cross_entropy", "binary_cross_entropy", "squared_error", "exponential", "none"]),
    st.integers(-1, 3),
    st.sampled_from([1.0, math.nan, math.inf, -1e30]),
)
def test_wrong_shapes_and_types_end_as_one_sentence(
    shape: tuple[int, ...],
    target_shape: tuple[int, ...],
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    loss: str,
    label: int,
    value: float,
) -> None:
    """Whatever is thrown at a measurement: a finite result, or an `InputError` of one sentence."""
    net = nn.Linear(2, 3)
    assume(math.isfinite(value) or dtype.is_floating_point or dtype.is_complex)
    inputs = torch.full(shape, value if dtype.is_floating_point else 1).to(dtype)
    targets = torch.full(target_shape, label).to(target_dtype)
    for measure in (sl.sample_traces, sl.margins, sl.hessian):
        try:
            result = measure(net, (inputs, targets), loss=loss)
        except (InputError, NotExactError) as error:
            one_sentence(error)
        else:
            if measure is sl.sample_traces:
                assert bool(torch.isfinite(result.values).all())


# ---------------------------------------------------------------- damaged files of the user


def files() -> dict[str, bytes]:
    """A small whole file of every kind that the readers take."""
    numbers = np.random.default_rng(0)
    x, y = numbers.standard_normal((4, 3)).astype(np.float32), np.arange(4)
    found = {}
    for name, write in {
        "packed.npz": lambda stream: np.savez_compressed(stream, x=x, y=y),
        "plain.npz": lambda stream: np.savez(stream, x=x, y=y),
        "weights.pt": lambda stream: torch.save(nn.Linear(3, 2).state_dict(), stream),
        "old.pt": lambda stream: torch.save(nn.Linear(3, 2).state_dict(), stream, _use_new_zipfile_serialization=False),
    }.items():
        stream = io.BytesIO()
        write(stream)
        found[name] = stream.getvalue()
    tensors = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    found["data.safetensors"] = safetensors.torch.save(tensors)
    found["weights.safetensors"] = safetensors.torch.save(nn.Linear(3, 2).state_dict())
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        stream = io.BytesIO()
        Image.fromarray(numbers.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(stream, kind)
        found[f"image.{kind}"] = stream.getvalue()
    return found


def open_file(path: Path) -> None:
    if path.suffix == ".pt" or path.name.startswith("weights"):
        load_weights(nn.Linear(3, 2), path)
    elif path.suffix in (".npz", ".safetensors"):
        load_samples(str(path))
    else:
        load_samples(str(path.parent.parent))


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_as_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    """Cut, with bytes changed, removed or put in: read as something, or refused; quickly, and in little memory."""
    name = data.draw(st.sampled_from(sorted(FILES)))
    raw = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(raw) - 1)))
        harm = data.draw(st.sampled_from(["flip", "set", "cut", "remove", "insert"]))
        if harm == "cut" and data.draw(st.booleans()):
            del raw[place:]
        elif harm == "remove":
            del raw[place : place + data.draw(st.integers(1, 8))]
        elif harm == "insert":
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif raw:
            raw[place] = raw[place] ^ (1 << data.draw(st.integers(0, 7))) if harm == "flip" else data.draw(BYTES)
    folder = tmp_path / "pictures" / "a" if name.startswith("image") else tmp_path
    for place_of_class in (tmp_path / "pictures" / "a", tmp_path / "pictures" / "b"):
        place_of_class.mkdir(parents=True, exist_ok=True)
    if name.startswith("image"):
        for left in (tmp_path / "pictures").rglob("*.*"):
            left.unlink()
        (tmp_path / "pictures" / "b" / name).write_bytes(FILES[name])
    (folder / name).write_bytes(bytes(raw))
    started = time.monotonic()
    try:
        open_file(folder / name)
    except InputError as error:
        one_sentence(error)
    assert time.monotonic() - started < 20


BYTES = st.integers(0, 255)
FILES = files()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
        np.zeros(2, dtype=np.complex64),
        np.zeros(2, dtype=np.longdouble),
        np.zeros(2, dtype=">f4"),
        np.zeros(2, dtype=np.uint64),
        np.zeros((2, 0)),
        np.zeros(()),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_arrays_of_every_kind_are_read_or_refused(tmp_path: Path, array: Any) -> None:
    for name, pair in {
        "inputs": {"x": array, "y": np.arange(2)},
        "targets": {"x": np.zeros((2, 3)), "y": array},
    }.items():
        np.savez(tmp_path / f"{name}.npz", **pair)
        try:
            found = load_samples(str(tmp_path / f"{name}.npz")).data
        except InputError as error:
            one_sentence(error)
        else:
            assert all(isinstance(part, Tensor) for part in found)


# ---------------------------------------------------------------- damaged results


def results() -> list[Result]:
    net, data = nn.Linear(3, 3), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    traces = sl.sample_traces(net, data)
    op = sl.hessian(net, data)
    return [
        traces,
        traces.mean(),
        sl.margins(net, data, distance=2),
        sl.eigenvalues(op, 2),
        sl.spectral_density(op, probes=2, steps=4),
        sl.correlate(traces.values, traces.values),
    ]


def read(text: Any) -> None:
    """Read, and use what was read; only an `InputError` of one sentence may stop it."""
    try:
        result = Result.from_json(text)
    except InputError as error:
        one_sentence(error)
        return
    json.loads(result.to_json())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_results_are_refused_or_whole(data: st.DataObject) -> None:
    """Any value of a result replaced by any other JSON value, or removed."""
    chosen = data.draw(st.sampled_from(range(len(RESULTS))))
    content = json.loads(RESULTS[chosen])
    place = content
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        break
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(JSON)
    read(json.dumps(content))


@given(st.data())
def test_cut_and_flipped_results_are_refused_or_whole(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    raw = bytearray(RESULTS[data.draw(st.sampled_from(range(len(RESULTS))))].encode())
    del raw[data.draw(st.integers(0, len(raw))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "result.json"
    path.write_bytes(bytes(raw))
    read(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "[" * 100_000,
        '{"type":' * 50_000,
        "9" * 100_000,
        '{"type": "Estimate"}',
        '{"type": "Estimate", "value": ' + "9" * 5000 + "}",
        '{"type": "Estimate", "value": {"type": "tensor", "dtype": "load", "shape": [1], "data": ["x"]}}',
        '{"type": "SampleTraces", "values": {"type": "tensor", "dtype": "float64", "shape": [9999999999], "data": []}}',
    ],
    ids=lambda text: text[:24],
)
def test_hostile_results_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        Result.from_json(text)


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*nowhere\.json"):
        Result.from_json(tmp_path / "nowhere.json")
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"noise.json is not JSON"):
        Result.from_json(tmp_path / "noise.json")


RESULTS = [result.to_json() for result in results()]
