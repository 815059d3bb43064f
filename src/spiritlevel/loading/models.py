"""The model that a user names, with its weights, on its device."""

from __future__ import annotations

import ast
import difflib
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, checked_seed, first_line, unknown_name
from spiritlevel.loading.calling import call_spec
from spiritlevel.loading.weights import load_weights
from spiritlevel.papers import networks as models


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
        raise InputError(f"the model cannot be moved to device {device!r}: {first_line(error)}.") from error
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
        raise InputError(f"{name} cannot be built with {text}: {first_line(error)}.") from error


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
    made = call_spec(spec)
    if not isinstance(made, nn.Module):
        raise InputError(f"{spec} must be or return a torch.nn.Module, got {type(made).__name__}.")
    return made
