"""Models, weights and data from what a user writes on the command line; every misfit is one `InputError`.

Files are read as data, never as programs: no pickle is executed, and sizes are checked before memory is taken. Only
what is written as `file.py:function` or `package.module:function` runs, because the user names it to be run.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import pickle
import random
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spiritlevel import data as named_data
from spiritlevel.binding.memory import available_memory
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, checked_seed, printable, unknown_name
from spiritlevel.papers import networks as models
from spiritlevel.storage import check_readable, digest

__all__ = ["Samples", "about_weights", "check_classes", "load_model", "load_samples", "load_weights"]

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
_PAIRS = (
    ("x", "y"),
    ("X", "Y"),
    ("inputs", "targets"),
    ("images", "labels"),
    ("data", "targets"),
    ("x_train", "y_train"),
)
_FAINT = 17  # images of bytes that stay below were counted on another scale, like the 16 levels of scanned digits
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts keep the weights
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile


class Samples(NamedTuple):
    """Data to measure: what `measure` takes, the names of the classes (empty if unknown), and where they came from.

    `name` also says, in brackets, what was done to the numbers of a file: a network that was trained on other numbers
    would be measured wrongly without a sign.
    """

    data: Any
    classes: tuple[str, ...]
    name: str
    notes: tuple[str, ...] = ()
    """What was done to the numbers of the file on the way, as sentences."""


# ---------------------------------------------------------------- models


def load_model(
    spec: str,
    weights: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """The model that `spec` names, with its weights, on its device and in its number format.

    Args:
        spec: a built-in name (`lenet5`, or with options `lenet5:channels=3,width=0.5`), `package.module:callable` or
            `file.py:callable`, where the callable takes no arguments and returns the module.
        weights: a `.safetensors` file, or a `.pt` file that holds nothing but tensors.
        device: as torch names it; where the module is unless given.
        dtype: "float32" or "float64"; as the module is unless given.
        seed: of the weights that the model starts with, so that two runs without `weights` measure the same network.
            The global random states are left as they were.

    >>> models.count(load_model("lenet5:channels=3"))
    62006
    """
    with preserved_random_state():
        torch.manual_seed(checked_seed(seed))
        np.random.seed(seed % 2**32)
        random.seed(seed)
        model = _built_in(spec) if spec.partition(":")[0] in models.NAMES else _own_model(spec)
    if weights is not None:
        load_weights(model, weights)
    kind = None if dtype is None else _float(dtype)
    try:
        moved = model.to(device=device, dtype=kind)
        torch.zeros(1, device=device)  # a model without parameters is moved anywhere
    except Exception as error:  # ModuleNotFoundError for a device that only an extension knows
        raise InputError(f"the model cannot be moved to device {device!r}: {_first_line(error)}.") from error
    if torch.device(device or "cpu").type == "meta":
        raise InputError("the model cannot be measured on the device 'meta', which keeps shapes and no numbers.")
    return moved


def about_weights(spec: str, weights: str | Path | None) -> str:
    """A sentence where no weights were loaded, since the numbers are then those of an untrained network, or may be.

    >>> about_weights("lenet5", None), about_weights("lenet5", "lenet5.pt")
    ('Weights: as built, not trained.', '')
    """
    if weights is not None:
        return ""
    if spec.partition(":")[0] in models.NAMES:
        return "Weights: as built, not trained."
    return f"Weights: as {spec} built them, not trained unless it loads some itself."


def _float(name: str) -> torch.dtype:
    kinds = {"float32": torch.float32, "float64": torch.float64}
    if name not in kinds:
        raise unknown_name("dtype", name, kinds)
    return kinds[name]


def _built_in(spec: str) -> nn.Module:
    name, _, text = spec.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"options of {name} are written as {name}:channels=3,width=0.5, got {item!r}.")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    try:
        return models.build(name, **options)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{name} cannot be built with {text}: {_first_line(error)}.") from error


def _own_model(spec: str) -> nn.Module:
    if ":" not in spec:
        if spec.endswith(".py"):
            raise InputError(f"the model {spec!r} lacks the function that makes it: write {spec}:function.")
        near = difflib.get_close_matches(spec, models.NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"the model {spec!r} is neither file.py:function nor package.module:function nor a built-in name "
            f"({', '.join(models.NAMES)}){hint}" + ("" if hint else ".")
        )
    made = _call(spec)
    if not isinstance(made, nn.Module):
        raise InputError(f"{spec} must be or return a torch.nn.Module, got {type(made).__name__}.")
    return made


def _call(spec: str) -> Any:
    """What `file.py:name` or `package.module:name` returns; something that is no function is taken as it is."""
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
            raise InputError(f"{place} fails while it is imported: {_named(error)}.") from error
        if not hasattr(module, name):
            names = [each for each in vars(module) if not each.startswith("_")]
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise InputError(f"{place} has no {name!r}{hint}")
        found = getattr(module, name)
        if isinstance(found, nn.Module) or not callable(found):
            return found
        try:
            return found()
        except (Exception, SystemExit) as error:
            raise InputError(f"{spec}, called without arguments, fails: {_named(error)}.") from error


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
_INSTALLED = sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The user's own modules can be imported from `folder`, as if Python had been started there, and from there only.

    `v1/net.py` and `v2/net.py` may each have a `layers.py` beside them, and Python keeps one module under a name: the
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
    with suppress(OSError):  # a folder that can be entered and not listed
        beside = {path.stem for path in Path(place).iterdir() if path.suffix == ".py" or path.is_dir()}
    names = (theirs | beside) - sys.stdlib_module_names - {"__main__", __package__}
    families: dict[str, _Modules] = {name: {} for name in names if name in sys.modules}
    for name, module in sys.modules.items():
        if (head := name.partition(".")[0]) in families:
            families[head][name] = module
    others: _Modules = {}
    for head, family in families.items():
        if any(_lies_in(module, _INSTALLED) for module in family.values()):
            continue  # as for every program that Python runs: what is installed and imported stays what it is
        found = PathFinder.find_spec(head, sys.path)
        places: list[str] = []  # and none where the folder of that name is no package, but holds other things
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


def _named(error: BaseException) -> str:
    text = _first_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


# ---------------------------------------------------------------- weights


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill a model with the weights of a file; `InputError` names the first differences and the nearest names."""
    path = Path(path)
    expected = model.state_dict()
    size = sum(tensor.nbytes for tensor in expected.values() if not is_lazy(tensor))
    found = _read_tensors(path) if path.suffix == ".safetensors" else _read_checkpoint(path, size)
    found = _without_prefix(found, expected)
    missing = [key for key in expected if key not in found]
    unknown = [key for key in found if key not in expected]
    misfits = [text for key in expected if key in found and (text := _misfit(key, found[key], expected[key]))]
    if missing or unknown or misfits:
        listed = _other_prefix(missing, unknown) or _first_differences(missing, unknown, misfits)
        raise InputError(f"the weights in {path.name} do not fit the model {type(model).__name__}: {listed}.")
    model.load_state_dict(found)


_COMPARED = 100  # names: difflib takes a second for some thousands, and a model may have ten thousand


def _first_differences(missing: Sequence[str], unknown: Sequence[str], misfits: Sequence[str]) -> str:
    spare, wanted = unknown[:_COMPARED], missing[:_COMPARED]
    first = [f"{key} is missing{_nearest(key, spare, 'the file has')}" for key in missing[:3]]
    first += [f"the model has no {key}{_nearest(key, wanted, 'it needs')}" for key in unknown[: 3 - len(first)]]
    first += misfits[: 3 - len(first)]
    rest = len(missing) + len(unknown) + len(misfits) - len(first)
    return "; ".join(first) + (f", and {rest:,} more differences" if rest else "")


def _other_prefix(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """In words: all names differ by what stands before them, as where the whole of a larger model was saved."""
    for few, many, whose, other in ((missing, unknown, "file's", "model's"), (unknown, missing, "model's", "file's")):
        names, tail = set(many), f".{few[0]}" if few else ""
        for prefix in {name.removesuffix(tail[1:]) for name in many if tail and name.endswith(tail)}:
            if all(prefix + name in names for name in few):
                return (
                    f"the {whose} names begin with {prefix!r}, as {prefix}{few[0]}, and the {other} do not; save the "
                    "state_dict() of that part, or rename its keys"
                )
    return ""


def _misfit(key: str, found: Tensor, expected: Tensor) -> str:
    """What keeps a tensor from taking another's place, or would be lost on the way; nothing if it fits."""
    if is_lazy(expected):
        return ""
    if found.shape != expected.shape:
        return f"{key} has shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (found, expected)]
    if found.device.type == "meta":
        return f"{key} has a shape and no numbers (it was on the device 'meta' when it was saved)"
    if found.layout != torch.strided or found.is_quantized:
        return f"{key} is {'quantised' if found.is_quantized else 'sparse'}; save it as dense floats"
    if found.is_complex() and not expected.is_complex():
        return f"{key} holds {kinds[0]} and the model {kinds[1]}: the imaginary part would be lost"
    if expected.is_floating_point() and not found.is_floating_point():
        return f"{key} holds {kinds[0]} and the model {kinds[1]}: whole numbers have lost their scale, save floats"
    if found.is_floating_point() and not expected.is_floating_point() and bool((found != found.trunc()).any()):
        return f"{key} holds {kinds[0]} and the model {kinds[1]}: the fractions would be lost"
    return ""


def _nearest(key: str, keys: Sequence[str], how: str) -> str:
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    return f" ({how} {near[0]})" if near else ""


def _without_prefix(found: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _PREFIXES:
        if found and all(key.startswith(prefix) for key in found) and not any(key in expected for key in found):
            found = {key.removeprefix(prefix): tensor for key, tensor in found.items()}
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_readable(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a safetensors file: {_first_line(error)}.") from error


def _check_unpacked(path: Path, size: int) -> None:
    """Refuse a file that unpacks to far more than a model of `size` bytes can take, by the sizes in its directory.

    PyTorch packs nothing, so only what another program has packed is much larger inside than outside.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError):  # an old checkpoint, or a damaged one, which PyTorch will say
        return
    packed = unpacked > path.stat().st_size and unpacked > _ROOM * size + 2**26
    if packed or unpacked > available_memory():
        raise InputError(
            f"{path.name} unpacks to {unpacked / 1e9:,.1f} GB, and the model's weights take {size / 1e9:,.3f} GB: it "
            "holds other weights or much else; save model.state_dict() alone."
        )


_ROOM = 16  # times the model's own size: weights in double precision beside what an optimiser keeps


def _read_checkpoint(path: Path, size: int) -> dict[str, Tensor]:
    check_readable(path)
    _check_unpacked(path, size)
    try:
        with warnings.catch_warnings():  # a user needs our sentence alone
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds more than tensors, or is no checkpoint, and is not opened, because that could run a "
            "program; save model.state_dict() alone, as .pt or .safetensors."
        ) from error
    except Exception as error:  # a damaged file can raise almost anything
        kind = "" if path.suffix in (".pt", ".pth", ".ckpt", ".bin") else " as .pt or .safetensors"
        raise InputError(
            f"{path} is no checkpoint of PyTorch, or damaged; save model.state_dict() again{kind}."
        ) from error
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        kind = type(found).__name__
        raise InputError(f"{path} must hold a dict of tensors, as model.state_dict() gives it, got a {kind}.")
    if odd := [key for key in found if not isinstance(key, str)]:
        raise InputError(f"{path} must name its tensors as model.state_dict() does, and one is called {odd[0]!r}.")
    return found


# ---------------------------------------------------------------- data


def load_samples(spec: str, split: str = "train") -> Samples:
    """The samples that `spec` names.

    Args:
        spec: a built-in name (`fashion-mini`; `fashion-mini:test` for its other part), an `.npz` or `.safetensors`
            file with x and y, a folder of images with one subfolder per class, or `file.py:function` that returns a
            pair of tensors, a data set or a loader.
        split: the part of a built-in data set, "train" or "test", where `spec` does not say it.

    Images become float32 in [0, 1] and (N, C, H, W), by the range of their kind; `notes` says so.

    >>> load_samples("digits", "test").data[0].shape
    torch.Size([360, 1, 8, 8])
    """
    head, _, tail = spec.partition(":")
    if head in named_data.names() and tail in ("", "train", "test"):
        found = named_data.load(head)
        part = tail or split
        return Samples(found.test if part == "test" else found.train, found.classes, f"{head} ({part})")
    path = Path(spec)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix in (".npz", ".safetensors"):
        check_readable(path)
        arrays = _read_npz(path) if path.suffix == ".npz" else _read_tensors(path)
        pair, notes = _as_pair(arrays, path)
        return Samples(pair, (), f"{path.name} ({'; '.join(notes)})" if notes else path.name, notes)
    if ":" in spec and (head.endswith(".py") or "." in head or head.isidentifier()):
        return _from_function(spec, split)
    if path.exists():
        raise InputError(f"data {spec!r}: expected an .npz or .safetensors file or a folder of images.")
    near = difflib.get_close_matches(spec, named_data.names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"Known names: {', '.join(named_data.names())}."
    raise InputError(f"data {spec!r} is no file, no folder, no file.py:function and no built-in name: {hint}")


def check_classes(train: Samples, test: Samples | None, model: nn.Module) -> None:
    """Refuse class names that differ between two data sets, or that are more than the model's outputs."""
    if test is not None and train.classes and test.classes and train.classes != test.classes:
        first = next(
            (name for name in test.classes if name not in train.classes),
            next((name for name in train.classes if name not in test.classes), test.classes[0]),
        )
        here, there = (test, train) if first in test.classes else (train, test)
        raise InputError(
            f"the classes of {train.name} ({len(train.classes)}) and {test.name} ({len(test.classes)}) differ: "
            f"only {here.name} has {first!r}{_nearest(first, there.classes, 'the other has')}."
        )
    outputs = _outputs(model, train.data) if train.classes else None
    if outputs is not None and outputs > 1 and outputs < len(train.classes):
        names = ", ".join(train.classes[:3])
        raise InputError(
            f"{train.name} has {len(train.classes)} classes ({names}, ...) and the model {outputs} outputs; "
            "one of the two is not the right one."
        )


def _outputs(model: nn.Module, data: Any) -> int | None:
    if not (isinstance(data, tuple) and isinstance(data[0], Tensor)):
        return None
    problem = Problem(model)
    with problem.active(), torch.no_grad():
        inputs, _ = problem.place(data[0][:2], data[1][:2])
        outputs = problem.outputs(problem.params, inputs)
    return outputs.shape[1] if outputs.ndim == 2 else None


def _from_function(spec: str, split: str) -> Samples:
    found = _call(spec)
    if isinstance(found, named_data.Data):
        return Samples(found.test if split == "test" else found.train, found.classes, spec)
    classes = getattr(found, "classes", ())
    names = tuple(str(name) for name in classes) if isinstance(classes, list | tuple) else ()
    return Samples(found, names, spec)


def _as_pair(arrays: Mapping[str, Any], path: Path) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    for first, second in _PAIRS:
        if first in arrays and second in arrays:
            break
    else:
        listed = ", ".join(sorted(arrays)) or "nothing"
        raise InputError(f"{path.name} must hold the inputs as x and the targets as y, it holds {listed}.")
    inputs, targets = torch.as_tensor(arrays[first]), torch.as_tensor(arrays[second])
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise InputError(f"{path.name} must hold as many targets as inputs, it holds shapes {shapes}.")
    if targets.ndim == 2 and targets.shape[1] == 1 and not targets.is_floating_point():
        targets = targets[:, 0]
    converted, notes = _as_inputs(inputs)
    return (converted, targets.float() if targets.is_floating_point() else targets.long()), notes


def _as_inputs(inputs: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Bytes are pictures, channels last or first; anything else stays as it is, floats in single precision.

    Also what was done, in words.
    """
    if inputs.dtype != torch.uint8:
        return inputs.float() if inputs.is_floating_point() else inputs.long(), ()
    notes, before = ["bytes divided by 255"], tuple(inputs.shape[1:])
    highest = int(inputs.max()) if inputs.numel() else 255
    if 0 < highest < _FAINT:
        reach = f"the largest byte is {highest}, so all inputs lie in [0, {highest / 255:.2g}]"
        notes.append(f"{reach}: save floats if the network was trained on others")
    if inputs.ndim == 3:
        inputs = inputs[:, None]
        notes.append(f"a channel axis added, {before} to {tuple(inputs.shape[1:])}")
    elif inputs.ndim == 4 and inputs.shape[3] in (1, 3) and inputs.shape[1] not in (1, 3):
        inputs = inputs.permute(0, 3, 1, 2)
        notes.append(f"channels moved to the front, {before} to {tuple(inputs.shape[1:])}")
    return inputs.contiguous().float() / 255, tuple(notes)


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of the file; none is read before its size, as the file states it, is known to fit the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            wanted = {name for pair in _PAIRS for name in pair}
            sizes = 0
            for member in members:
                with archive.open(member) as stream:
                    _check_member(member, stream, path)
                sizes += member.file_size if member.filename.removesuffix(".npy") in wanted else 0
            _check_size(sizes, path)
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in wanted:
                    with archive.open(member) as stream:
                        array = npy.read_array(stream, allow_pickle=False)
                        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
            return arrays or {member.filename.removesuffix(".npy"): np.empty(0) for member in members}
    except InputError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        raise InputError(f"{path} is not an .npz file that can be read: {_named(error)}.") from error


def _check_member(member: zipfile.ZipInfo, stream: IO[bytes], path: Path) -> None:
    """Refuse arrays of Python objects, and headers that promise another size than the archive holds."""
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise InputError(f"{path.name}: {member.filename} holds Python objects, which are not opened; save numbers.")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InputError(f"{path.name}: {member.filename} holds {dtype}, which is no real number of at most 64 bits.")
    promised = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if promised != member.file_size - stream.tell():
        raise InputError(
            f"{path.name} is damaged: {member.filename} says it holds {promised:,} bytes of shape {shape}, "
            f"and the archive has {member.file_size - stream.tell():,}."
        )


def _check_size(size: int, path: Path) -> None:
    limit = available_memory() // 4  # the numbers are held twice while they are converted, and the work needs memory
    if size > limit:
        raise InputError(
            f"{path.name} unpacks to {size / 1e9:,.1f} GB, and {limit / 1e9:,.1f} GB of memory can be spared for it; "
            "pass fewer samples, or a function that returns a loader (file.py:function)."
        )


def _from_folder(folder: Path) -> Samples:
    """One folder a class, in the order of their names; all images of one size, all grey or all in colour.

    If one of them is coloured, so are all: the grey of the others has three equal channels.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    files = [
        (path, number)
        for number, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _PICTURES and path.is_file()
    ]
    if len(classes) < 2 or not files:
        loose = sum(path.suffix.lower() in _PICTURES for path in folder.iterdir())
        raise InputError(
            f"the folder {folder} must hold one folder of images for every class, at least two; it holds "
            f"{len(classes)} folders with {len(files)} images, and {loose} images beside them."
        )
    empty = sorted(set(range(len(classes))) - {number for _, number in files})
    if empty:
        raise InputError(f"the folder {folder / classes[empty[0]]} holds no image.")
    grey = all([_is_grey(path) for path, _ in files])  # all are looked at: a damaged one is named at once
    first = _picture(files[0][0], grey)
    _check_size(4 * first.pixels.size * len(files), folder)
    images = np.empty((len(files), *first.pixels.shape), dtype=np.float32)
    notes: dict[str, None] = {}
    brightest = 0.0
    for index, (path, _) in enumerate(files):
        image = _picture(path, grey)
        if image.pixels.shape != first.pixels.shape:
            raise InputError(
                f"all images must have one size: {files[0][0]} has {_size(first)} and {path} {_size(image)}."
            )
        images[index] = image.pixels
        images[index] /= image.top
        notes[image.note] = None
        brightest = max(brightest, float(images[index].max()))
    if 0 < brightest < _FAINT / 255:
        notes[f"the brightest pixel is {brightest:.2g} of white: save floats if the network was trained on others"] = (
            None
        )
    targets = torch.tensor([number for _, number in files])
    inputs = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    return Samples((inputs, targets), tuple(map(printable, classes)), printable(folder.name), tuple(notes))


# What Pillow may open: it knows fifty formats, and for one of them it starts another program.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_COLOURED = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


class _Image(NamedTuple):
    """Pixels of shape (H, W, 1 or 3), the value that is white, and what is done to them, in words."""

    pixels: np.ndarray[Any, Any]
    top: float
    note: str


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                yield image
    except InputError:
        raise
    except Exception as error:  # a damaged image can raise almost anything
        raise InputError(f"the image {path} cannot be read: {_first_line(error) or type(error).__name__}.") from error


def _is_grey(path: Path) -> bool:
    with _opened(path) as image:
        if image.mode not in (*_GREY, *_COLOURED):
            raise InputError(f"the image {path} is of the kind {image.mode!r}; save it as an 8-bit PNG.")
        return image.mode in _GREY


def _picture(path: Path, grey: bool) -> _Image:
    """One image in the depth that it has: asked for bytes, Pillow would clip the others at 255."""
    with _opened(path) as image:
        deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))  # as in a file
        if deep or image.mode == "F":
            pixels = np.asarray(image).astype(np.float32)
            found = _Image(pixels, 65535.0, "16-bit images divided by 65,535")
            if not deep:
                found = _Image(pixels, 1.0, "images of floats in [0, 1] taken as they are")
            if not bool((pixels >= 0).all() and (pixels <= found.top).all()):
                raise InputError(
                    f"the image {path} holds numbers outside [0, {found.top:g}], and nobody says which of them is "
                    "white; save arrays of floats as .npz instead."
                )
        elif image.mode == "I":
            raise InputError(
                f"the image {path} has 32 bits a pixel, and nobody says which number is white; save it with 8 or 16 "
                "bits, or arrays of floats as .npz."
            )
        else:
            cut = any(";16" in str(tile[3]) for tile in image.tile)
            note = "16-bit colours read to 8 bits and divided by 255" if cut else "bytes divided by 255"
            found = _Image(np.asarray(image.convert("L" if grey else "RGB")), 255.0, note)
    pixels = found.pixels if found.pixels.ndim == 3 else found.pixels[..., None]
    return found._replace(pixels=pixels if grey or pixels.shape[2] == 3 else pixels.repeat(3, axis=2))


def _size(image: _Image) -> str:
    return f"{image.pixels.shape[1]}×{image.pixels.shape[0]} pixels"
