"""Kept reports, weights and data files, changed at random in the ways in which files are edited and damaged.

A try passes if the file is refused with one sentence, or is read and what was read can be used: a page is drawn from a
report, weights fit the model, samples are tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from reports import comparison, report
from torch import nn
from wrong_values import fault_of_sentence

from spiritlevel.errors import InputError
from spiritlevel.loading import load_samples, load_weights
from spiritlevel.page import page
from spiritlevel.results import Result

_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    7,
    2**40,
    10**30,
    0.5,
    1e308,
    -1e308,
    "Infinity",
    "",
    "nonsense",
    "\udce9",
    "<script>",
    "\x1b[31m\u202e",
    [],
    [None],
    [1, 2, 3],
    ["a"],
    {},
    {"a": 1},
    {"type": "tensor", "dtype": "float64", "shape": [2], "data": [1.0, 2.0]},
    {"type": "Estimate", "value": 1.0},
)


@dataclasses.dataclass(frozen=True)
class Try:
    """One changed file."""

    name: str
    change: str
    write: Callable[[Path], Path]
    use: Callable[[Path], Any]

    def __str__(self) -> str:
        return f"{self.name}: {self.change}".encode("unicode_escape").decode()

    def failure(self, folder: Path) -> str:
        """Nothing if it is answered as it should be, else what happened instead."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.use(self.write(folder))
            except InputError as error:
                return fault_of_sentence(str(error))
            except Exception as error:
                return f"{type(error).__name__}: {str(error)[:150]}"
        return ""


# ---------------------------------------------------------------- reports


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value; of a long list the first two and the last."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    items = list(items)
    for key, inner in items if isinstance(value, dict) or len(items) < 4 else [*items[:2], items[-1]]:
        yield from _leaves(inner, (*path, key))


def _changed(content: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    whole = copy.deepcopy(content)
    place = whole
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return json.dumps(whole)


def _remove(place: Any, key: Any) -> None:
    del place[key]


def _shorten(place: Any, key: Any) -> None:
    place[key] = place[key][:-1] if isinstance(place[key], list | str) else None


def _double(place: Any, key: Any) -> None:
    place[key] = [*place[key], *place[key]] if isinstance(place[key], list) else place[key]


def _read(path: Path) -> str:
    return page(Result.from_json(path))


def reports(count: int, seed: int) -> Iterator[Try]:
    """Kept reports with one value replaced, removed, cut short or doubled."""
    kept = {"report": report(24, pictured=4).to_dict(), "comparison": comparison().to_dict()}
    draw = random.Random(seed)
    places = {name: list(_leaves(content)) for name, content in kept.items()}
    for _ in range(count):
        name = draw.choice(["report", "report", "comparison"])
        path = draw.choice(places[name])
        change: Callable[[Any, Any], None]
        if draw.random() < 0.3:
            change, what = draw.choice([(_remove, "removed"), (_shorten, "cut"), (_double, "doubled")])
        else:
            value = draw.choice(_VALUES)
            change, what = (lambda place, key, value=value: place.__setitem__(key, value)), f"= {value!r}"
        text = _changed(kept[name], path, change)

        def write(folder: Path, text: str = text) -> Path:
            (folder / "report.json").write_text(text)
            return folder / "report.json"

        yield Try(name, f"{'.'.join(map(str, path))} {what}", write, _read)


# ---------------------------------------------------------------- weights and data


def _saved(thing: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream, **options)
    return stream.getvalue()


def strange_weights() -> dict[str, Callable[[], bytes]]:
    """Weights files that are whole, and hold something else than they should."""
    state = nn.Linear(3, 2).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to leave them out, files will hold them for years
        quantised = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    return {
        "whole-number keys": lambda: _saved({0: state["weight"], 1: state["bias"]}),
        "mixed keys": lambda: _saved({**state, 0: state["bias"], None: state["bias"], ("a", 1): state["bias"]}),
        "meta tensors": lambda: _saved({name: tensor.to("meta") for name, tensor in state.items()}),
        "sparse tensors": lambda: _saved({**state, "weight": state["weight"].to_sparse()}),
        "quantised tensors": lambda: _saved({**state, "weight": quantised}),
        "complex tensors": lambda: _saved({**state, "weight": state["weight"] * 1j}),
        "int8 tensors": lambda: _saved({**state, "weight": state["weight"].to(torch.int8)}),
        "boolean tensors": lambda: _saved({**state, "weight": state["weight"] > 0}),
        "NaN": lambda: _saved({**state, "weight": state["weight"] * float("nan")}),
        "a list": lambda: _saved([state["weight"]]),
        "a tensor": lambda: _saved(state["weight"]),
        "numbers": lambda: _saved({"weight": 1.0, "bias": "text"}),
        "nested": lambda: _saved({"model": {"state_dict": {"module": state}}}),
        "other shapes": lambda: _saved({"weight": torch.zeros(5, 5), "bias": torch.zeros(0)}),
        "0-d tensors": lambda: _saved({"weight": torch.tensor(1.0), "bias": torch.tensor(1.0)}),
        "nothing": lambda: _saved({}),
        "a name that is half a character": lambda: _saved({"\udce9": state["weight"], **state}),
        "an empty file": lambda: b"",
        "noise": lambda: bytes(range(256)) * 8,
    }


def _files() -> dict[str, bytes]:
    """A small whole file of every kind that the readers take."""
    numbers = np.random.default_rng(0)
    x, y = numbers.standard_normal((4, 3)).astype(np.float32), np.arange(4)
    packed, plain = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, x=x, y=y)
    np.savez(plain, x=x, y=y)
    found = {
        "packed.npz": packed.getvalue(),
        "plain.npz": plain.getvalue(),
        "weights.pt": _saved(nn.Linear(3, 2).state_dict()),
        "old.pt": _saved(nn.Linear(3, 2).state_dict(), _use_new_zipfile_serialization=False),
        "data.safetensors": safetensors.torch.save({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}),
        "weights.safetensors": safetensors.torch.save(nn.Linear(3, 2).state_dict()),
    }
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        stream = io.BytesIO()
        Image.fromarray(numbers.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(stream, kind)
        found[f"image.{kind}"] = stream.getvalue()
    return found


def _open(path: Path) -> None:
    if path.suffix == ".pt" or path.name.startswith("weights"):
        load_weights(nn.Linear(3, 2), path)
    elif path.suffix in (".npz", ".safetensors"):
        found = load_samples(str(path)).data
        assert all(isinstance(part, torch.Tensor) for part in found)
    else:
        load_samples(str(path.parent.parent))


def _damaged(raw: bytes, draw: random.Random) -> tuple[bytes, str]:
    changed, what = bytearray(raw), []
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(max(1, len(changed)))
        harm = draw.choice(["flip", "set", "cut", "remove", "insert"])
        what.append(f"{harm} at {place}")
        if harm == "cut":
            del changed[place:]
        elif harm == "remove":
            del changed[place : place + draw.randint(1, 8)]
        elif harm == "insert":
            changed[place:place] = draw.randbytes(draw.randint(1, 8))
        elif changed:
            changed[min(place, len(changed) - 1)] = draw.randrange(256)
    return bytes(changed), ", ".join(what)


def binaries(count: int, seed: int) -> Iterator[Try]:
    """Weights that hold strange things, then weights, arrays and images with bytes changed."""
    for name, made in strange_weights().items():

        def strange(folder: Path, made: Callable[[], bytes] = made) -> Path:
            (folder / "strange.pt").write_bytes(made())
            return folder / "strange.pt"

        yield Try("weights", name, strange, _open)
    kept, draw = _files(), random.Random(seed)
    for _ in range(count - len(strange_weights())):
        name = draw.choice(sorted(kept))
        raw, what = _damaged(kept[name], draw)

        def write(folder: Path, name: str = name, raw: bytes = raw) -> Path:
            place = folder / "pictures" / "a" / name if name.startswith("image") else folder / name
            if name.startswith("image"):
                for each in ("a", "b"):
                    (folder / "pictures" / each).mkdir(parents=True, exist_ok=True)
                for left in (folder / "pictures").rglob("*.*"):
                    left.unlink()
                (folder / "pictures" / "b" / name).write_bytes(kept[name])
            place.write_bytes(raw)
            return place

        yield Try(name, what, write, _open)


def tries(count: int, seed: int = 0) -> Iterator[Try]:
    """Half of them reports, half weights and data."""
    yield from reports(count // 2, seed)
    yield from binaries(count - count // 2, seed)
