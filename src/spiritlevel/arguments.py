"""Arguments are checked once, where they enter: by the types that a signature declares, and by a few ranges.

`@checked` on a public function reads its declared types: a whole number where `int` is declared, a finite number for
`float`, True or False for `bool`, a string for `str`, strings for `Iterable[str]`, an instance of any other class, and
so on through `X | None`, `tuple[float, ...]` and `Literal`. What it does not know, it lets pass. So a new argument is
checked automatically; the function itself has only ranges and names left to check, for which it calls `number`,
`whole_number`, `one_of` or `names`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from spiritlevel.errors import InputError, checked_seed, is_array, shown, unknown_name, whole_number

F = TypeVar("F", bound=Callable[..., Any])


def number(
    value: object,
    name: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    infinite: bool = False,
) -> float:
    """A finite number of any kind, NumPy's too, as a `float`; a tensor is not a number.

    >>> number(-1, "weight_decay", least=0)
    Traceback (most recent call last):
    spiritlevel.errors.InputError: weight_decay must be a finite number of at least 0, got -1.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):
            found = float(value)
            if (
                (math.isfinite(found) or (infinite and not math.isnan(found)))
                and (least is None or found >= least)
                and (above is None or found > above)
                and (most is None or found <= most)
            ):
                return found
    limits = [
        f" {word} {limit:g}"
        for word, limit in (("of at least", least), ("above", above), ("of at most", most))
        if limit is not None
    ]
    kind = "a number" if infinite else "a finite number"
    raise InputError(f"{name} must be {kind}{' and'.join(limits)}, got {shown(value)}.")


def one_of(value: object, kind: str, choices: Iterable[str]) -> str:
    """A string that is one of the choices.

    >>> one_of("egal", "batch_norm mode", ["eval", "batch"])
    Traceback (most recent call last):
    spiritlevel.errors.InputError: unknown batch_norm mode 'egal': did you mean 'eval'? Known: batch, eval.
    """
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise unknown_name(kind, value, known)


def names(value: object, name: str, example: str = "") -> tuple[str, ...]:
    """One name, or several, as a tuple of strings; an empty list is refused.

    >>> names("trace", "measures"), names(iter(["trace", "path_norm"]), "measures")
    (('trace',), ('trace', 'path_norm'))
    >>> names(0.5, "measures", "'trace'")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: measures must be a name or a list of names such as 'trace', got 0.5.
    """
    found = (value,) if isinstance(value, str) else ()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not is_array(value):
        found = tuple(value)
    if found and all(isinstance(each, str) for each in found):
        return cast(tuple[str, ...], found)
    such = f" such as {example}" if example else ""
    raise InputError(f"{name} must be a name or a list of names{such}, got {shown(value)}.")


# ---------------------------------------------------------------- by declared type


def checked(function: F) -> F:
    """A function whose arguments are compared with their declared types before it runs.

    >>> @checked
    ... def half(x: float, *, times: int = 1) -> float:
    ...     return x / 2**times
    >>> half(3), half(3, times=True)
    Traceback (most recent call last):
    spiritlevel.errors.InputError: times must be a whole number, got True.
    >>> half(3, time=2)
    Traceback (most recent call last):
    TypeError: half() got an unexpected keyword argument 'time'; did you mean 'times'?
    """
    signature = inspect.signature(function)
    positional = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        hints = _hints(function)
        if kwargs and (known := _keywords(function)) is not None:
            _check_keywords(function.__qualname__.removesuffix(".__init__"), kwargs, known)
        found = [
            by_type(value, hints.get(name, Any), name)
            for name, value in zip([*positional, *[""] * len(args)], args, strict=False)
        ]
        return function(*found, **{name: by_type(value, hints.get(name, Any), name) for name, value in kwargs.items()})

    return cast(F, call)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The declared types of a function's arguments; nothing is known of those that only a type checker imports."""
    space = getattr(inspect.unwrap(function), "__globals__", {})
    found: dict[str, Any] = {}
    for name, hint in function.__annotations__.items():
        with contextlib.suppress(NameError, AttributeError, TypeError):
            found |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: hint}), space)
        if typing.get_origin(found.get(name)) is typing.Unpack:
            del found[name]  # options that several functions share: they are checked where they are bound
    return found


@functools.cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The keywords that a function takes, or None if it passes on whatever it is given."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for each in parameters:
        if each.kind is each.VAR_KEYWORD:
            space, hint = getattr(inspect.unwrap(function), "__globals__", {}), function.__annotations__.get(each.name)
            with contextlib.suppress(NameError, AttributeError, TypeError):
                hint = typing.get_type_hints(types.SimpleNamespace(__annotations__={"": hint}), space)[""]
            if typing.get_origin(hint) is not typing.Unpack:
                return None
            known += typing.get_args(hint)[0].__annotations__
    return tuple(known)


def _check_keywords(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """A `TypeError` for an unknown keyword, as Python has it, with the nearest known one."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def by_type(value: Any, hint: Any, name: str) -> Any:
    """The value as its declared type has it, or an `InputError`; what the type does not settle is let through.

    >>> by_type(2, float, "alpha"), by_type(None, int | None, "samples"), by_type((1, 2), tuple[float, ...], "gammas")
    (2.0, None, (1.0, 2.0))
    """
    if hint is Any:  # the commonest, and a class to Python
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, Union):
        return _of_union(value, inner, name)
    if origin is Literal:
        return one_of(value, name.replace("_", " "), [str(each) for each in inner])
    if hint is int and name == "seed":
        return checked_seed(value)
    if hint in _PLAIN:
        return _PLAIN[hint](value, name)
    if origin in (Iterable, Sequence, tuple, list) and inner and inner[0] in (str, int, float):
        return _several(value, origin, inner, name)
    if isinstance(hint, type) and not isinstance(value, hint):
        if hint.__name__ == "Module":
            what = "model" if name.startswith("model") else name
            way = "; pass its .module()" if callable(getattr(value, "module", None)) else ""
            raise InputError(f"the {what} must be a torch.nn.Module, got {type(value).__name__}{way}.")
        raise InputError(f"{name} must be a {_called(hint)}, got {shown(value)}.")
    if getattr(value, "is_meta", False) is True and hint is not Any:
        raise InputError(f"{name} must be a tensor with values, got one on the meta device.")
    if origin is Callable:
        _check_callable(value, inner, name)
    if origin in (Mapping, dict) and not isinstance(value, Mapping):
        raise InputError(f"{name} must be a dict, got {shown(value)}.")
    return value


def _of_union(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    """The value as the first of several types that takes it."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if len(kinds) == 1:
        return by_type(value, kinds[0], name)
    wanted = []
    for kind in kinds:
        try:
            return by_type(value, kind, name)
        except InputError as error:
            wanted.append(str(error).removeprefix(f"{name} must be ").rpartition(", got ")[0])
    raise InputError(f"{name} must be {' or '.join(dict.fromkeys(wanted))}, got {shown(value)}.")


def _several(value: Any, origin: Any, inner: tuple[Any, ...], name: str) -> Any:
    """Several strings or numbers, as a tuple; a tuple of fixed length must have that length."""
    kind, fixed = inner[0], origin is tuple and Ellipsis not in inner
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not is_array(value):
        found = tuple(value)
        if not fixed or len(found) == len(inner):
            with contextlib.suppress(InputError):
                return tuple(by_type(each, kind, name) for each in found)
    count = f"{len(inner)} " if fixed else ""
    what = {str: "strings", int: "whole numbers", float: "finite numbers"}[kind]
    raise InputError(f"{name} must be a list of {count}{what}, got {shown(value)}.")


def _check_callable(value: Any, inner: tuple[Any, ...], name: str) -> None:
    """Refuse what is not a function, or cannot take as many arguments as it will be called with."""
    count = len(inner[0]) if inner and isinstance(inner[0], list) else None
    if callable(value):
        try:
            inspect.signature(value).bind(*[None] * (count or 0)) if count is not None else None
        except ValueError:  # a builtin without a signature
            return
        except TypeError as error:
            raise InputError(f"{name} must be a function of {count} arguments, got {shown(value)}: {error}.") from None
        return
    raise InputError(f"{name} must be a function, got {shown(value)}.")


def _called(kind: type) -> str:
    return {"Tensor": "tensor", "Optimizer": "torch optimizer"}.get(kind.__name__, kind.__name__)


def _true_or_false(value: Any, name: str) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise InputError(f"{name} must be True or False, got {shown(value)}.")


def _float(value: Any, name: str) -> float:
    infinite = isinstance(value, numbers.Real) and math.isinf(value)  # it means "no limit" in some places
    return float(value) if infinite else number(value, name)


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    raise InputError(f"{name} must be a string, got {shown(value)}.")


def _path(value: Any, name: str) -> Any:
    if isinstance(value, os.PathLike):
        return value
    raise InputError(f"{name} must be a path, got {shown(value)}.")


_PLAIN: dict[Any, Callable[[Any, str], Any]] = {
    int: lambda value, name: whole_number(value, name),
    float: _float,
    bool: _true_or_false,
    str: _text,
    Path: _path,
}
