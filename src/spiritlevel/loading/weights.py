"""Weights from a file into a model; what does not fit is named."""

from __future__ import annotations

import difflib
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spiritlevel.errors import InputError, first_line
from spiritlevel.memory import available_memory
from spiritlevel.storage import check_readable

_WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts keep the weights
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile


def load_weights(model: nn.Module, path: str | Path) -> str:
    """Fill a model with the weights of a file; `InputError` names the first differences and the nearest names.

    A Lightning checkpoint (`.ckpt`) holds a model as part of another, under a prefix such as `net.`: only that part is
    taken, and the sentence returned says so; otherwise it is empty.
    """
    path = Path(path)
    expected = model.state_dict()
    size = sum(tensor.nbytes for tensor in expected.values() if not is_lazy(tensor))
    found = read_tensors(path) if path.suffix == ".safetensors" else _read_checkpoint(path, size)
    found = _without_prefix(found, expected)
    note = ""
    if path.suffix == ".ckpt":
        found, note = _part(found, expected, path)
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected]
    misfits = [text for key in expected if key in found and (text := _misfit(key, found[key], expected[key]))]
    if missing or unknown or misfits:
        listed = _other_prefix(missing, unknown) or _first_differences(missing, unknown, misfits)
        raise InputError(f"the weights in {path.name} do not fit the model {type(model).__name__}: {listed}.")
    model.load_state_dict(found)
    return note


def _part(found: dict[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Tensor], str]:
    """The weights under the one prefix that turns the model's names into the file's, and what is left out, in words."""
    first = next(iter(expected), "")
    prefixes = [
        prefix
        for prefix in (name.removesuffix(first) for name in found if first and name.endswith(f".{first}"))
        if {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == expected.keys()
    ]
    if len(prefixes) != 1 or expected.keys() <= found.keys():
        return found, ""
    (prefix,) = prefixes
    rest = [name for name in found if not name.startswith(prefix)]
    also = f"; left out: {', '.join(rest[:3])}{' and more' if len(rest) > 3 else ''}" if rest else ""
    taken = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
    return taken, f"Weights: those under {prefix!r} in {path.name}{also}."


_COMPARED = 100  # names: difflib takes a second for a few thousand, and a model may have ten thousand


def _first_differences(missing: Sequence[str], unknown: Sequence[str], misfits: Sequence[str]) -> str:
    spare, wanted = unknown[:_COMPARED], missing[:_COMPARED]
    first = [f"{key} is missing{nearest_name(key, spare, 'the file has')}" for key in missing[:3]]
    first += [f"the model has no {key}{nearest_name(key, wanted, 'it needs')}" for key in unknown[: 3 - len(first)]]
    first += misfits[: 3 - len(first)]
    rest = len(missing) + len(unknown) + len(misfits) - len(first)
    return "; ".join(first) + (f", and {rest:,} more differences" if rest else "")


def _other_prefix(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """In words, if all names differ by a prefix, as when the whole of a larger model was saved."""
    for few, many, whose, other in ((missing, unknown, "file's", "model's"), (unknown, missing, "model's", "file's")):
        names, tail = set(many), f".{few[0]}" if few else ""
        for prefix in {name.removesuffix(tail[1:]) for name in many if tail and name.endswith(tail)}:
            if all(prefix + name in names for name in few):
                return (
                    f"the {whose} names begin with {prefix!r}, as {prefix}{few[0]}, but the {other} do not; save the "
                    "state_dict() of that part, or rename its keys"
                )
    return ""


def _misfit(key: str, found: Tensor, expected: Tensor) -> str:
    """What keeps a tensor from taking another's place, or would be lost in doing so; nothing if it fits."""
    if is_lazy(expected):
        return ""
    if found.shape != expected.shape:
        return f"{key} has shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (found, expected)]
    if found.device.type == "meta":
        return f"{key} has a shape but no numbers (it was on the device 'meta' when it was saved)"
    if found.layout != torch.strided or found.is_quantized:
        return f"{key} is {'quantised' if found.is_quantized else 'sparse'}; save it as dense floats"
    if found.is_complex() and not expected.is_complex():
        return f"{key} holds {kinds[0]} but the model {kinds[1]}: the imaginary part would be lost"
    if expected.is_floating_point() and not found.is_floating_point():
        return f"{key} holds {kinds[0]} but the model {kinds[1]}: whole numbers have lost their scale; save floats"
    if found.is_floating_point() and not expected.is_floating_point() and bool((found != found.trunc()).any()):
        return f"{key} holds {kinds[0]} but the model {kinds[1]}: the fractions would be lost"
    return ""


def nearest_name(key: str, keys: Sequence[str], how: str) -> str:
    """In brackets, the name that `key` may stand for; nothing if none is near."""
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f" ({how} {near[0]})" if near else ""


def _without_prefix(found: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if found and all(key.startswith(prefix) for key in found) and not any(key in expected for key in found):
            found = {key.removeprefix(prefix): tensor for key, tensor in found.items()}
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    check_readable(path)
    try:
        return load(path.read_bytes())  # at once: `load_file` opens it twice, and it may be replaced in between
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a safetensors file: {first_line(error)}.") from error


def _check_unpacked(path: Path, size: int) -> None:
    """Refuse a file that unpacks to far more than a model of `size` bytes can take, by the sizes in its directory.

    PyTorch compresses nothing, so only a file packed by another program is much larger inside than outside.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):  # an old checkpoint, or a damaged one: PyTorch will say
        return
    packed = unpacked > path.stat().st_size and unpacked > _ROOM * size + 2**26
    if packed or unpacked > available_memory():
        raise InputError(
            f"{path.name} unpacks to {unpacked / 1e9:,.1f} GB, but the model's weights take {size / 1e9:,.3f} GB: it "
            "holds other weights or much else; save model.state_dict() alone."
        )


_ROOM = 16  # times the model's own size: weights in double precision beside what an optimiser keeps


def _read_checkpoint(path: Path, size: int) -> dict[str, Tensor]:
    check_readable(path)
    _check_unpacked(path, size)
    try:
        found = _read_plain(path)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than tensors{_strangers(path)}; it is not opened, because that could run a program: "
            "save model.state_dict() alone, as .pt or .safetensors."
        ) from error
    except Exception as error:  # a damaged file can raise almost anything
        kind = "" if path.suffix in (".pt", ".pth", ".ckpt", ".bin") else " as .pt or .safetensors"
        raise InputError(
            f"{path} is not a PyTorch checkpoint, or is damaged; save model.state_dict() again{kind}."
        ) from error
    found = _unwrapped(found, path)
    expected = f"{path} must hold a dict of tensors, as model.state_dict() gives it"
    if not isinstance(found, dict):
        raise InputError(f"{expected}, got an object of type {type(found).__name__}.")
    for key, value in found.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{expected}, but its {key!r} is of type {type(value).__name__}; save the tensors alone.")
    if odd := [key for key in found if not isinstance(key, str)]:
        raise InputError(f"{path} must name its tensors as model.state_dict() does, but one is called {odd[0]!r}.")
    return found


def _unwrapped(found: Any, path: Path) -> Any:
    """The part of a checkpoint that is nothing but named tensors, under a usual key or as the only such part."""
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        return found
    parts = [key for key, value in found.items() if isinstance(value, dict) and _only_tensors(value)]
    if len(parts) > 1:
        names = " and ".join(map(repr, parts[:3]))
        raise InputError(f"{path} holds weights under {names}; save the state_dict() to measure alone.")
    return found[parts[0]] if parts else found


def _only_tensors(value: dict[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and isinstance(item, Tensor) for key, item in value.items())


def _strangers(path: Path) -> str:
    """In brackets, the first objects besides tensors that a checkpoint names, read off without looking for them."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # an old format, or no checkpoint
        return ", or is not a checkpoint"
    first = [name for name in names if not name.startswith(("torch.nn.", "builtins."))] or names
    return f" ({', '.join(sorted(first)[:3])})" if first else ""


class _Unread:
    """Stands in for every object of a checkpoint that is not a tensor: made, filled and forgotten without effect."""

    def __new__(cls, *_: object, **__: object) -> _Unread:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _read_plain(path: Path) -> Any:
    """What a checkpoint holds: only tensors, numbers, strings, lists and dicts.

    Other objects are refused; in a `.ckpt` they become `_Unread`, such as the settings that Lightning keeps beside the
    weights: whatever class the file names, it is never looked for.
    """
    with warnings.catch_warnings():  # a user needs our sentence alone
        warnings.simplefilter("ignore")
        strangers = torch.serialization.get_unsafe_globals_in_checkpoint(path) if path.suffix == ".ckpt" else []
        stand_ins: list[Any] = [(_Unread, name) for name in strangers]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True)
