"""The model that a user names, with its weights, on its device."""

from __future__ import annotations

import ast
import difflib
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from spiritlevel.binding.devices import present
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, checked_seed, first_line, unknown_name
from spiritlevel.loading.calling import call_spec
from spiritlevel.loading.exported import archived, exported_program
from spiritlevel.loading.libraries import saved_transformer, timm_model
from spiritlevel.loading.weights import load_weights
from spiritlevel.papers import networks as models


class Loaded(NamedTuple):
    """A model, and what a reader of its numbers should know about its weights, in a sentence if need be."""

    model: nn.Module
    note: str


def load_model(
    spec: str,
    weights: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """The model that `spec` names, as `read_model` reads it.

    >>> models.count(load_model("lenet5:channels=3"))
    62006
    """
    return read_model(spec, weights, device=device, dtype=dtype, seed=seed).model


def read_model(
    spec: str,
    weights: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> Loaded:
    """The model that `spec` names, with its weights, on its device and in its number format.

    Args:
        spec: a built-in name (`lenet5`, or with options `lenet5:channels=3,width=0.5`), `package.module:callable` or
            `file.py:callable`, where the callable takes no arguments and returns the module; `hf:FOLDER`, a model that
            transformers saved; `timm:NAME`, a network of timm, options likewise (`timm:resnet18:num_classes=10`); or
            the `.pt2` file of a program that `torch.export.save` wrote.
        weights: a `.safetensors` file, a `.pt` file that holds nothing but tensors, or a `.ckpt` file of Lightning.
        device: as torch names it; by default where the module is.
        dtype: "float32" or "float64"; by default that of the module.
        seed: for the weights that the model starts with, so that two runs without `weights` measure the same network.
            The global random states are left as they were.
    """
    with preserved_random_state():
        torch.manual_seed(checked_seed(seed))
        np.random.seed(seed % 2**32)
        random.seed(seed)
        model = _named(spec)
    note = load_weights(model, weights) if weights is not None else about_weights(spec, None)
    kind = None if dtype is None else _float(dtype)
    try:
        moved = model.to(device=device, dtype=kind)
        torch.zeros(1, device=device)  # a model without parameters is moved anywhere
    except Exception as error:  # ModuleNotFoundError for a device known only to an extension
        reason = f"{first_line(error)}; this machine has {present()}"
        raise InputError(f"the model cannot be moved to device {device!r}: {reason}.") from error
    if torch.device(device or "cpu").type == "meta":
        raise InputError("the model cannot be measured on the device 'meta', which keeps shapes but no numbers.")
    return Loaded(moved, note)


def about_weights(spec: str, weights: str | Path | None) -> str:
    """A sentence if no weights were loaded, since the numbers are then, or may be, those of an untrained network.

    >>> about_weights("lenet5", None), about_weights("lenet5", "lenet5.pt")
    ('Weights: as built, not trained.', '')
    """
    if weights is not None:
        return ""
    if spec.startswith("hf:") or is_program(spec):
        return ""
    if spec.partition(":")[0] in (*models.NAMES, "timm"):
        return "Weights: as built, not trained."
    return f"Weights: as {spec} built them, not trained unless it loads some itself."


def _float(name: str) -> torch.dtype:
    kinds = {"float32": torch.float32, "float64": torch.float64}
    if name not in kinds:
        raise unknown_name("dtype", name, kinds)
    return kinds[name]


def _named(spec: str) -> nn.Module:
    head, _, rest = spec.partition(":")
    if head in models.NAMES:
        return _built_in(head, rest)
    if head == "hf" and rest:
        return saved_transformer(Path(rest))
    if head == "timm" and rest:
        name, _, options = rest.partition(":")
        return timm_model(name, _options(f"timm:{name}", options))
    if is_program(spec):
        return exported_program(Path(spec))
    return _own_model(spec)


def is_program(spec: str) -> bool:
    """Whether a model is named by the file of an exported program, which holds its weights as well."""
    return spec.endswith(".pt2") or (is_file_of_weights(spec) and archived(Path(spec), "models/model.json"))


def is_file_of_weights(spec: str) -> bool:
    """Whether a model is named by what looks like a file of weights; a `.pt` may hold an exported program instead.

    >>> is_file_of_weights("last.safetensors"), is_file_of_weights("net.py:make")
    (True, False)
    """
    return ":" not in spec and Path(spec).suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def _options(name: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"options of {name} are written as {name}:channels=3,width=0.5, got {item!r}.")
        try:
            options[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[key.strip()] = value.strip()
    return options


def _built_in(name: str, text: str) -> nn.Module:
    try:
        return models.build(name, **_options(name, text))
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{name} cannot be built with {text}: {first_line(error)}.") from error


def _without_network(spec: str) -> str:
    """Why a file alone is no model, and what to write."""
    if archived(Path(spec), "code/"):
        return (
            f"{spec} is a TorchScript program, which is not opened, because that could run a program; save it with "
            "torch.export.save()."
        )
    return (
        f"the model {spec!r} is a file of weights, which do not say what network they belong to; name the network, as "
        "file.py:function, and give this file as its weights."
    )


def _own_model(spec: str) -> nn.Module:
    if ":" not in spec:
        if spec.endswith(".py"):
            raise InputError(f"the model {spec!r} lacks the function that makes it: write {spec}:function.")
        if is_file_of_weights(spec):
            raise InputError(_without_network(spec))
        near = difflib.get_close_matches(spec, models.NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"the model {spec!r} is neither file.py:function nor package.module:function nor hf:FOLDER nor timm:NAME "
            f"nor a .pt2 file nor a built-in name ({', '.join(models.NAMES)}){hint}" + ("" if hint else ".")
        )
    place, _, options = spec.rpartition(":")
    if "=" in options and ":" in place:
        raise InputError(
            f"options such as {options} are for built-in networks and timm; in place of {place}, name a function that "
            "takes no arguments and calls it with them."
        )
    made = call_spec(spec)
    if not isinstance(made, nn.Module):
        raise InputError(f"{spec} must be or return a torch.nn.Module, got {type(made).__name__}.")
    return made
