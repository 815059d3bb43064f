"""Data sets that the library `datasets` saved to disk: columns as tensors, read from Arrow files without any script."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spiritlevel.errors import InputError, first_line, needs, unknown_name
from spiritlevel.loading.arrays import Samples, as_inputs, check_size
from spiritlevel.loading.pictures import stacked

_TARGETS = ("labels", "label", "targets", "target")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_dataset(folder: Path, split: str, target: str | None, model: nn.Module | None) -> Samples:
    """The samples of a data set that `save_to_disk` wrote.

    Columns of numbers that `model.forward` has arguments for become a dict of tensors; a single column of numbers or
    images becomes a tensor by itself. Texts are left out, with a note. Class names come from the target column.

    Args:
        folder: where it was saved.
        split: which part of it, if it has parts.
        target: the column to predict; by default "labels" or "label".
        model: the model that will be called with the columns.
    """
    table = _part(folder, split)
    columns = list(table.column_names)
    wanted = target or next((name for name in _TARGETS if name in columns), None)
    if wanted is None:
        raise InputError(f"the data set {folder} needs --target, the column to predict: one of {', '.join(columns)}.")
    if wanted not in columns:
        raise unknown_name(f"column of {folder}", wanted, columns)
    check_size(int(table.data.nbytes), folder)
    if not len(table):
        raise InputError(f"the data set {folder} has columns but no rows.")
    usable, notes = _usable(table, wanted)
    taken = _taken(folder, usable, model)
    if unused := [name for name in usable if name not in (*taken, wanted)]:
        notes.append(f"columns left out because the model has no argument for them: {', '.join(unused)}")
    tensors = {name: _column(folder, table, name, notes) for name in (*taken, wanted)}
    targets = tensors.pop(wanted)
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shifted is not None and "decoder_input_ids" not in tensors:
        tensors["decoder_input_ids"] = shifted(labels=targets)
        notes.append(f"decoder_input_ids made from {wanted}, as when an encoder with a decoder is trained")
    inputs = tensors if model is None or set(taken) & set(_arguments(model)) else tensors[taken[0]]
    named = f"columns {', '.join(taken)}" if isinstance(inputs, Mapping) else f"column {taken[0]}"
    notes.insert(0, f"{named} as inputs, {wanted} as target")
    classes = getattr(table.features[wanted], "names", None) or ()
    return Samples((inputs, targets), tuple(map(str, classes)), f"{folder.name} ({table.split or split})", tuple(notes))


def _part(folder: Path, split: str) -> Any:
    with needs(f"the data set {folder}"):
        from datasets import DatasetDict, load_from_disk
    try:
        found = load_from_disk(str(folder))
    except Exception as error:  # a damaged file can raise almost anything
        reason = first_line(error) or type(error).__name__
        raise InputError(f"{folder} is not a data set that save_to_disk() wrote, or is damaged: {reason}.") from error
    if not isinstance(found, DatasetDict):
        return found.with_format(None)
    if split not in found:
        raise InputError(f"the data set {folder} has no part {split!r}; write one of {_parts(folder, list(found))}.")
    return found[split].with_format(None)


def _parts(folder: Path, names: Sequence[str]) -> str:
    return ", ".join(f"{folder}:{name}" for name in names)


def _usable(table: Any, target: str) -> tuple[list[str], list[str]]:
    """The columns of numbers and images, and a note on the others."""
    kinds = {name: _kind(table.features[name]) for name in table.column_names}
    if not kinds[target] or kinds[target] == "image":
        raise InputError(
            f"the target {target!r} of the data set holds no numbers; turn it into classes first, with "
            "data.class_encode_column()."
        )
    texts = [name for name, kind in kinds.items() if not kind]
    notes = [f"columns left out because they hold no numbers: {', '.join(texts)}"] if texts else []
    return [name for name, kind in kinds.items() if kind and name != target], notes


def _kind(feature: Any) -> str:
    """What a column holds: "image", "number", or nothing that a model takes."""
    name = type(feature).__name__
    if name == "Image":
        return "image"
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return "number" if _kind(inner) == "number" else ""
    if name == "ClassLabel":
        return "number"
    kind = str(getattr(feature, "dtype", ""))
    return "number" if kind.startswith(("int", "uint", "float", "bool")) else ""


def _arguments(model: nn.Module) -> list[str]:
    return [
        name for name, each in inspect.signature(model.forward).parameters.items() if each.kind is not each.VAR_KEYWORD
    ]


def _taken(folder: Path, usable: Sequence[str], model: nn.Module | None) -> list[str]:
    """The columns that the model is called with."""
    if model is None:
        return list(usable)
    known = [name for name in usable if name in _arguments(model)]
    main = getattr(model, "main_input_name", None)  # of transformers, whose arguments all have defaults
    if main in known or (known and main is None):
        return known
    if len(usable) == 1:
        return list(usable)
    raise InputError(
        f"the model's forward takes {', '.join(_arguments(model)) or 'nothing'}, but the data set {folder} has columns "
        f"of numbers {', '.join(usable) or '(none)'}; rename them, or return batches from file.py:function."
    )


def _column(folder: Path, table: Any, name: str, notes: list[str]) -> Tensor:
    if _kind(table.features[name]) == "image":
        images, said = stacked(_images(folder, table, name), folder)
        notes.extend(said)
        return images
    values = table.with_format("numpy", columns=[name])[:][name]
    if isinstance(values, list) or values.dtype == object:
        raise InputError(
            f"the samples of the column {name!r} of {folder} differ in length; pad them to one length first "
            "(tokenizer(..., padding='max_length')), or return batches from file.py:function."
        )
    if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
        raise InputError(f"the column {name!r} of {folder} holds values that are missing or infinite; clean it first.")
    tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    if tensor.dtype == torch.bool:
        return tensor
    converted, said = as_inputs(tensor)
    notes.extend(said)
    return converted


def _images(folder: Path, table: Any, name: str) -> list[tuple[str, bytes]]:
    """The image files as the table holds them; one that is only named may be anywhere, and is not fetched."""
    from datasets import Image

    files = table.cast_column(name, Image(decode=False))[name]
    found: list[tuple[str, Any]] = [
        (f"{number} of {folder}", file.get("bytes") if file else None) for number, file in enumerate(files)
    ]
    if absent := [label for label, content in found if content is None]:
        raise InputError(
            f"the image {absent[0]} is not in the data set, which only says where it is; save the set with its images."
        )
    return [(label, content) for label, content in found if content is not None]
