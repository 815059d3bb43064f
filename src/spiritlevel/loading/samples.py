"""Data that a user names: a built-in set, a file, a table, a folder of images, a saved data set, a function."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel import data as named_data
from spiritlevel.binding.batches import is_pair_of_tensors, sliced
from spiritlevel.binding.failures import CannotRun
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Form, Reading, form_of
from spiritlevel.errors import InputError
from spiritlevel.loading import tables
from spiritlevel.loading.arrays import Samples, as_pair, read_npz
from spiritlevel.loading.calling import call_spec
from spiritlevel.loading.datasets import is_saved_dataset, saved_dataset
from spiritlevel.loading.pictures import images_in
from spiritlevel.loading.weights import nearest_name, read_tensors
from spiritlevel.storage import check_readable


def load_samples(
    spec: str,
    split: str = "train",
    *,
    target: str | None = None,
    like: Samples | None = None,
    model: nn.Module | None = None,
) -> Samples:
    """The samples that `spec` names.

    Args:
        spec: a built-in name (`fashion-mini`; `fashion-mini:test` for its other part), an `.npz` or `.safetensors`
            file with x and y, a `.csv`, `.tsv` or `.parquet` table, a folder of images with one subfolder per class, a
            folder that `datasets` saved (`folder:test` for one of its parts), or `file.py:function` that returns a pair
            of tensors, a data set or a loader.
        split: the part of a built-in or saved data set, "train" or "test", where `spec` does not say it.
        target: the column of a table or a saved data set to predict, or the key of the targets in batches that are
            dicts.
        like: the training data, whose columns and codes a table of test data must share.
        model: the model that a saved data set is for: its columns are those that `forward` has arguments for.

    Images become float32 in [0, 1] and (N, C, H, W), scaled by the range of their type; `notes` says so.

    >>> load_samples("digits", "test").data[0].shape
    torch.Size([360, 1, 8, 8])
    """
    head, _, tail = spec.partition(":")
    if head in named_data.names() and tail in ("", "train", "test"):
        _refuse_target(target, head)
        found = named_data.load(head)
        part = tail or split
        return Samples(found.test if part == "test" else found.train, found.classes, f"{head} ({part})")
    path = Path(spec)
    folder, part = (
        (path, split) if path.is_dir() or not tail else (Path(spec.rpartition(":")[0]), spec.rpartition(":")[2])
    )
    if folder.is_dir() and is_saved_dataset(folder):
        return saved_dataset(folder, part, target, model)
    if path.is_dir():
        _refuse_target(target, spec)
        return images_in(path)
    if path.suffix in tables.KINDS:
        check_readable(path)
        table = tables.read_table(path, target, like)
        if model is not None:
            _check_columns(table, path, str(target), model)
        return table
    if path.suffix in (".npz", ".safetensors"):
        _refuse_target(target, spec)
        check_readable(path)
        arrays = read_npz(path) if path.suffix == ".npz" else read_tensors(path)
        pair, notes = as_pair(arrays, path)
        return Samples(pair, (), f"{path.name} ({'; '.join(notes)})" if notes else path.name, notes)
    if ":" in spec and (head.endswith(".py") or "." in head or head.isidentifier()):
        return _from_function(spec, split)._replace(target=target)
    if path.exists():
        raise InputError(
            f"data {spec!r}: expected an .npz, .safetensors, .csv, .tsv or .parquet file, a folder of images, a data "
            "set that was saved to disk, or file.py:function that reads it and returns (inputs, targets)."
        )
    near = difflib.get_close_matches(spec.lower(), named_data.names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(named_data.names())}."
    raise InputError(f"data {spec!r} is not a file, a folder, file.py:function or a built-in name: {hint}")


def _refuse_target(target: str | None, spec: str) -> None:
    if target is not None:
        raise InputError(
            f"--target {target} names a column of a table, but {spec} has its own targets (y, or the class); "
            "leave it out."
        )


def _check_columns(found: Samples, path: Path, target: str, model: nn.Module) -> None:
    """Refuse a table that the model fails on: its own error knows shapes, and a user knows columns."""
    try:
        _run(model, found.data, form_of({}))
    except CannotRun as error:
        raise InputError(tables.misfit(found, path, target, model, error.__cause__ or error)) from error
    except InputError:  # not about the columns: what reads the outputs will say
        pass


def check_classes(train: Samples, test: Samples | None, model: nn.Module, reading: Reading | None = None) -> None:
    """Refuse class names that differ between two data sets, or that outnumber the model's outputs.

    `reading` says which part of what the model returns are its outputs.
    """
    if test is not None and train.classes and test.classes and train.classes != test.classes:
        first = next(
            (name for name in test.classes if name not in train.classes),
            next((name for name in train.classes if name not in test.classes), test.classes[0]),
        )
        here, there = (test, train) if first in test.classes else (train, test)
        raise InputError(
            f"the classes of {train.name} ({len(train.classes)}) and {test.name} ({len(test.classes)}) differ: "
            f"only {here.name} has {first!r}{nearest_name(first, there.classes, 'the other has')}."
        )
    outputs = _outputs(model, train.data, form_of(reading or {})) if train.classes else None
    if outputs is not None and outputs > 1 and outputs < len(train.classes):
        names = ", ".join(train.classes[:3])
        raise InputError(
            f"{train.name} has {len(train.classes)} classes ({names}, ...) but the model has {outputs} outputs; "
            "one of the two is wrong."
        )


def _outputs(model: nn.Module, data: Any, form: Form) -> int | None:
    if not (isinstance(data, tuple) and is_pair_of_tensors(data)):
        return None
    outputs = _run(model, data, form)
    return outputs.shape[1] if outputs.ndim == 2 else None


def _run(model: nn.Module, data: Any, form: Form) -> Tensor:
    """The outputs for the first two samples."""
    problem = Problem(model, form=form)
    with problem.active(), torch.no_grad():
        inputs, _ = problem.place(sliced(data[0], 0, 2), data[1][:2])
        return problem.outputs(problem.params, inputs)


def _from_function(spec: str, split: str) -> Samples:
    found = call_spec(spec)
    if isinstance(found, named_data.Data):
        return Samples(found.test if split == "test" else found.train, found.classes, spec)
    classes = getattr(found, "classes", ())
    names = tuple(str(name) for name in classes) if isinstance(classes, list | tuple) else ()
    return Samples(found, names, spec)
