"""One JSON form for every result, and its inverse; one short `repr`."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
import warnings
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, SupportsFloat, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.results.formatting import figure
from spiritlevel.storage import write_atomically

_R = TypeVar("_R", bound="Result")

# In JSON, `null` is an undefined number where a field is declared as one, and an object with the key "type" is a result
# (its class), a tensor, or a dict that happens to have a key of that name.
_TAG, _FORMAT, _TENSOR, _DICT = "type", "format", "tensor", "dict"
_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}

FORMAT = 2
"""The format that is written. It grows when an older reader would misunderstand a file; version 0.1 wrote none (1)."""

RENAMED = {"Spectrum": "SpectralDensity", "Density": "SmoothedDensity"}
"""The classes that had another name in version 0.1: old name → new name."""


def _encode(value: Any) -> Any:
    """To strict JSON: NaN becomes null, infinities become strings, tensors carry their dtype and shape."""
    if isinstance(value, Result):
        return {_TAG: type(value).__name__, **value._plain_fields()}
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
                raise TypeError(f"the dicts of a result must have strings as keys, got {key!r}.")
        items = {key: _encode(item) for key, item in value.items()}
        return {_TAG: _DICT, "items": items} if _TAG in items else items
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"results hold tensors, numbers, strings, dicts and lists, got {type(value).__name__}.")


def _number(value: Any) -> float:
    return math.nan if value is None else _INFINITIES.get(value) or float(value)


def _decode(value: Any, hint: Any, unknown: list[str]) -> Any:
    """The inverse of `_encode`; `hint` is the declared type, which alone tells an undefined number from `None`.

    Fields that no result has are added to `unknown`.
    """
    result = _decoded(value, hint, unknown)
    kind = get_origin(hint) or hint
    known = kind is not Any and isinstance(kind, type) and not issubclass(kind, UnionType)
    if known and (not isinstance(result, kind) or (kind is int and isinstance(result, bool))):
        raise TypeError(f"expected {kind.__name__}, got {type(result).__name__}")
    return result


def _decoded(value: Any, hint: Any, unknown: list[str]) -> Any:
    if get_origin(hint) in (UnionType, Union):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if value is None and len(kinds) < len(get_args(hint)):
            return None
        if len(kinds) == 1:
            return _decode(value, kinds[0], unknown)
        hint = Any
    if hint is float:
        return _number(value)
    inner = get_args(hint)
    if isinstance(value, list):
        if get_origin(hint) is tuple and inner and Ellipsis not in inner:
            if len(inner) != len(value):
                raise TypeError(f"expected {len(inner)} items, got {len(value)}")
            return tuple(_decode(item, kind, unknown) for item, kind in zip(value, inner, strict=True))
        items = [_decode(item, inner[0] if inner else Any, unknown) for item in value]
        return items if list in (hint, get_origin(hint)) else tuple(items)
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind == _TENSOR:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{value['dtype']} is not a number type")
        data = [_number(item) for item in value["data"]] if dtype.is_floating_point else value["data"]
        return torch.tensor(data, dtype=dtype).reshape(value["shape"])
    if kind is not None and kind != _DICT:
        return _read(Result, value, unknown)
    items_hint = inner[1] if get_origin(hint) is dict else Any
    return {key: _decode(item, items_hint, unknown) for key, item in (value["items"] if kind else value).items()}


class Misfit(ValueError):
    """Fields of a file that contradict each other: it was edited, or pieced together from several."""


def same_length(**columns: Any) -> None:
    """Raise `Misfit` unless all columns given have the same number of entries along their first dimension."""
    sizes = {}
    for name, column in columns.items():
        if column is not None:
            sizes[name] = len(column) if not isinstance(column, Tensor) or column.ndim else -1
    if len(set(sizes.values())) > 1:
        raise Misfit("its lists differ in length, " + ", ".join(f"{name} {size}" for name, size in sizes.items()))


class Result:
    """Base of all results: one JSON form (`to_json`) and its inverse (`from_json`).

    Subclasses are frozen dataclasses whose fields hold numbers, strings, tensors, results, and dicts, tuples or lists
    of these. An undefined number is NaN and becomes null; it comes back as NaN if the field is declared as `float`
    (also inside `dict[str, float]` and the like), and as `None` if it may be absent (`float | None`).

    A file states its `format`. A newer format than this version knows is refused; files of version 0.1, which
    name no format, are read. Unknown fields are named in a warning and left out.
    """

    _types: ClassVar[dict[str, type[Result]]] = {}
    _renamed: ClassVar[dict[str, str]] = {}
    """The fields that had another name: old name → new name. Files with the old one are read; the attribute warns."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Result._types[cls.__name__] = cls
        for old, new in vars(cls).get("_renamed", {}).items():
            setattr(cls, old, _alias(cls.__name__, old, new))
        if "__repr__" not in vars(cls):  # `dataclass` would write one that prints every tensor
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The fields that differ from their defaults, with tensors and long values summarised."""
        given = [f for f in _fields(type(self)) if not _is_default(f, getattr(self, f.name))]
        return f"{type(self).__name__}({', '.join(f'{f.name}={_brief(getattr(self, f.name))}' for f in given)})"

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain values, ready for strict JSON; `from_dict` reads it back."""
        return {_TAG: type(self).__name__, _FORMAT: FORMAT, **self._plain_fields()}

    def _plain_fields(self) -> dict[str, Any]:
        fields = {f.name: _encode(getattr(self, f.name)) for f in _fields(type(self))}
        for name in (_TAG, _FORMAT):
            if name in fields:
                raise TypeError(f"{type(self).__name__} has a field named {name!r}, which results reserve.")
        return fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`, for any kind of result."""
        unknown: list[str] = []
        result = _read(cls, data, unknown)
        if unknown:
            names = ", ".join(dict.fromkeys(unknown))
            warnings.warn(f"what was read holds unknown fields, which were left out: {names}.", stacklevel=2)
        return result

    def _check(self) -> None:
        """Raise `Misfit` if fields that were read contradict each other, although each has the right type."""

    @classmethod
    def _from_older(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The dict of a result as an earlier version wrote it, completed by what that version did not say."""
        return data

    @checked
    def to_json(self, path: str | Path | None = None) -> str:
        """Strict JSON text; with `path` also written there, atomically."""
        text = json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)
        if path is not None:
            write_atomically(path, text + "\n")
        return text

    @classmethod
    @checked
    def from_json(cls, text: str | Path) -> Self:
        """Read what `to_json` wrote, from its file (a `Path`, or the path as a string) or from its text."""
        if isinstance(text, str) and "{" not in text and _is_file(text):  # the text of a result has braces
            text = Path(text)
        where = str(text) if isinstance(text, Path) else "the text"
        try:
            data = json.loads(text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
        except OSError as error:
            raise InputError(
                f"cannot read {where} ({error.strerror or error}); pass a file that to_json wrote."
            ) from error
        except (ValueError, RecursionError) as error:  # also bytes that are not text, and numbers with endless digits
            if isinstance(text, str) and "{" not in text:
                raise InputError(f"{text[:80]!r} is neither the path of a file nor JSON ({error}).") from error
            raise InputError(f"{where} is not JSON ({error}); pass a report.json, or what to_json wrote.") from error
        return cls.from_dict(data)


def _read(expected: type[_R], data: Any, unknown: list[str]) -> _R:
    """The result in a dict; fields that it does not have are added to `unknown`."""
    name = data.get(_TAG) if isinstance(data, dict) else None
    kind = Result._types.get(RENAMED.get(str(name), str(name)))
    if kind is None or not issubclass(kind, expected):
        raise _unreadable(expected, name)
    _check_format(name, data.get(_FORMAT, 1))
    data = kind._from_older({kind._renamed.get(key, key): value for key, value in data.items()})
    hints, fields = _hints(kind), {f.name: f for f in _fields(kind)}
    unknown += [f"{key!r} of {kind.__name__}" for key in data if key not in fields and key not in (_TAG, _FORMAT)]
    missing = [f.name for f in fields.values() if f.name not in data and _required(f)]
    if missing:
        raise InputError(f"cannot read a result of type {name!r}: it lacks {', '.join(missing)}.")
    try:
        present = {key: _decode(data[key], hints.get(key, Any), unknown) for key in fields if key in data}
        found = kind(**present)
        _fits(found)
        return found
    except InputError:
        raise
    except Misfit as error:
        raise InputError(f"this is not a whole {kind.__name__}: {error}.") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise InputError(f"cannot read a result of type {name!r}: it is damaged ({reason}).") from error


def _alias(owner: str, old: str, new: str) -> property:
    """A field under its old name."""

    def get(self: Result) -> Any:
        warnings.warn(f"{owner}.{old} is deprecated, use {owner}.{new}.", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get, doc=f"Deprecated: use `{new}`.")


def _fits(found: Result) -> None:
    """Raise `Misfit` if the fields of what was read contradict each other."""
    found._check()


def _unreadable(expected: type[Result], name: object) -> InputError:
    if name is None:
        return InputError(
            "this is not a spiritlevel result, which would state its type; pass a report.json or what to_json wrote."
        )
    known = [kind for kind in Result._types.values() if issubclass(kind, expected) and dataclasses.is_dataclass(kind)]
    names = ", ".join(sorted(kind.__name__ for kind in known))
    return InputError(f"cannot read a result of type {name!r}, expected one of: {names}.")


def _check_format(name: object, found: object) -> None:
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"cannot read a result of type {name!r}: it is damaged (format {found!r}).")
    if found > FORMAT:
        raise InputError(
            f"cannot read a result of type {name!r} in format {found}, which a newer spiritlevel wrote: this one reads "
            f"formats up to {FORMAT}; upgrade it with: pip install --upgrade spiritlevel."
        )


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


# ---------------------------------------------------------------- in short, for `repr`

_ROOM = 40  # characters of one field, about
_MANY = 10**6  # entries of a tensor beyond which only its shape is shown


def _is_default(f: dataclasses.Field[Any], value: Any) -> bool:
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    if isinstance(value, float) and isinstance(default, float) and math.isnan(value):
        return math.isnan(default)
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)


def _brief(value: Any) -> str:
    """A field of a result in a few words."""
    if isinstance(value, Tensor):
        return f"<{_summary(value)}>"
    if isinstance(value, Result):
        text = str(value) if isinstance(value, SupportsFloat) else type(value).__name__
        return f"<{text if len(text) <= _ROOM else type(value).__name__}>"
    if isinstance(value, str):
        return repr(textwrap.shorten(value, _ROOM, placeholder=" …"))
    if isinstance(value, dict | list | tuple) and value:
        items = list(value.values()) if isinstance(value, dict) else value
        plain = all(item is None or isinstance(item, bool | int | float | str) for item in items)
        if plain and len(repr(value)) <= _ROOM:
            return repr(value)
        kinds = {type(item).__name__ for item in items}
        return f"<{len(items)} {kinds.pop() if len(kinds) == 1 else 'items'}>"
    return repr(value)


def _summary(tensor: Tensor) -> str:
    """Shape, mean and range of a tensor."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not 0 < tensor.numel() <= _MANY or tensor.dtype == torch.bool or tensor.is_complex():
        return text
    values = tensor.detach().double()
    mean, low, high = (figure(float(number)) for number in (values.mean(), values.min(), values.max()))
    return f"{text}, mean {mean}, {low} to {high}"
