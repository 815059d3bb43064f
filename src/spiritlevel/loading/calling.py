"""What a user's own file or package holds or returns, imported as if Python had been started beside it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from spiritlevel.errors import InputError, named_error
from spiritlevel.storage import check_readable, digest


def call_spec(spec: str) -> Any:
    """What `file.py:name` or `package.module:name` returns; something that is not a function is taken as it is."""
    with _named(spec) as found:
        if isinstance(found, nn.Module) or not callable(found):
            return found
        try:
            return found()
        except (Exception, SystemExit) as error:
            raise InputError(f"{spec}, called without arguments, fails: {named_error(error)}.") from error


def load_loss(spec: str) -> Any:
    """A loss as `--loss` names it: a known name as it is, or the callable that `file.py:name` names, itself not called.

    >>> load_loss("cross_entropy")
    'cross_entropy'
    """
    if ":" not in spec:
        if spec.endswith(".py"):
            raise InputError(f"the loss {spec!r} names no function: write {spec}:function.")
        return spec
    with _named(spec) as found:
        if isinstance(found, type) or not callable(found):
            made = f"an instance of it, as loss = {found.__name__}(...)" if isinstance(found, type) else "a function"
            got = "a class" if isinstance(found, type) else type(found).__name__
            raise InputError(f"the loss {spec} must be a function of (outputs, targets), got {got}; name {made}.")
        if not isinstance(found, nn.Module):
            _check_takes_two(spec, found)
        return found


def load_change(spec: str) -> Any:
    """The function from tensor to tensor that `file.py:name` names; it is not called."""
    with _named(spec) as found:
        if isinstance(found, type) or not callable(found):
            got = "a class" if isinstance(found, type) else type(found).__name__
            raise InputError(f"the change {spec} must be a function from tensor to tensor, got {got}.")
        return found


def _check_takes_two(spec: str, loss: Callable[..., Any]) -> None:
    try:
        inspect.signature(loss).bind(0, 0)
    except TypeError as error:
        raise InputError(
            f"the loss {spec} must take (outputs, targets) and return one number per sample, but it takes "
            f"{inspect.signature(loss)}."
        ) from error
    except ValueError:  # a built-in function without a signature
        return


@contextmanager
def _named(spec: str) -> Iterator[Any]:
    """What a name in a file or a package stands for; meanwhile its neighbours can be imported."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise InputError(f"{spec!r} names no {'function' if place else 'file'}; write file.py:function.")
    if place.endswith(".py"):
        check_readable(Path(place))
    with _importable(Path(place).parent if place.endswith(".py") else Path()):
        try:
            module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except InputError:
            raise
        except ModuleNotFoundError as error:
            raise InputError(f"{place} cannot be imported: {error}.") from error
        except (Exception, SystemExit) as error:
            raise InputError(f"{place} fails while it is imported: {named_error(error)}.") from error
        if not hasattr(module, name):
            names = [each for each in vars(module) if not each.startswith("_")]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise InputError(f"{place} has no {name!r}{hint}")
        yield getattr(module, name)


def _import_file(path: Path) -> Any:
    # a name of its own for every file: two files may both be called net.py
    name = f"spiritlevel_user_{path.stem}_{digest(str(path.resolve()), 8)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling of the user's classes look it up
    spec.loader.exec_module(module)
    return module


_Modules = dict[str, ModuleType]
_NEIGHBOURS: dict[str, _Modules] = {}  # what was imported from the folder of a user's file, by folder
# Python's own folders, and those of packages, which may also be a user's, a distribution's or borrowed ones.
_INSTALLED = sorted(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")}
)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the user's own modules be imported from `folder`, as if Python had been started there, and only from there.

    `v1/net.py` and `v2/net.py` may each have a `layers.py` beside them, and Python keeps one module per name: the
    second file would get the first one's, and a model would be compared with itself. So what came from another folder
    is put aside meanwhile. Afterwards a name that two folders have stands for neither of them: an import in the middle
    of a forward pass fails rather than find the wrong one. What the calling program has imported itself is put back.
    """
    place = str(folder.resolve())
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    theirs = {id(module) for modules in _NEIGHBOURS.values() for module in modules.values()}
    others, own = _of_others(place), _NEIGHBOURS.setdefault(place, {})
    for name in others:
        del sys.modules[name]
    for name, module in own.items():
        sys.modules.setdefault(name, module)
    before = set(sys.modules)
    try:
        yield
    finally:
        new = {name: sys.modules[name] for name in set(sys.modules) - before}
        own |= {name: module for name, module in new.items() if _lies_in(module, [place])}
        if place in sys.path:
            sys.path.remove(place)
        for name, module in others.items():
            if name not in sys.modules or id(module) not in theirs:
                sys.modules[name] = module
            else:
                del sys.modules[name]


def _of_others(place: str) -> _Modules:
    """The modules that an import from the folder `place` must not find, because they came from another one."""
    theirs = {name.partition(".")[0] for folder, found in _NEIGHBOURS.items() if folder != place for name in found}
    beside: set[str] = set()
    with suppress(OSError):  # a folder that can be entered but not listed
        beside = {path.stem for path in Path(place).iterdir() if path.suffix == ".py" or path.is_dir()}
    names = (theirs | beside) - sys.stdlib_module_names - {"__main__", __name__.partition(".")[0]}
    families: dict[str, _Modules] = {name: {} for name in names if name in sys.modules}
    for name, module in sys.modules.items():
        if (head := name.partition(".")[0]) in families:
            families[head][name] = module
    others: _Modules = {}
    for head, family in families.items():
        if any(_lies_in(module, _INSTALLED) for module in family.values()):
            continue  # as in every Python program: what is installed and imported stays as it is
        found = PathFinder.find_spec(head, sys.path)
        places: list[str] = []  # none where the folder of that name is not a package but holds other things
        if found is not None and (found.origin or getattr(family[head], "__file__", None) is None):
            places = list(found.submodule_search_locations or [found.origin or ""])
        if head in theirs or places:
            others |= {} if all(_lies_in(module, places) for module in family.values()) else family
    return others


def _lies_in(module: ModuleType, places: Sequence[str]) -> bool:
    """Whether a module is one of these files, or lies in one of these folders.

    A package without a file lies where Python would look for it now, which says nothing about its modules.
    """
    file = getattr(module, "__file__", None)
    files = [file] if file else list(getattr(module, "__path__", ()))
    return any(file == place or file.startswith(place + os.sep) for file in files for place in places)
