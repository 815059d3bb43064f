"""Tables as inputs and targets: numbers as they are, texts and categories as codes, nothing filled in or dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spiritlevel.binding.failures import not_multiplied
from spiritlevel.errors import InputError, counted, first_line, needs, unknown_name
from spiritlevel.loading.arrays import Samples, check_size

if TYPE_CHECKING:
    import polars as pl

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
KINDS = (*_SEPARATORS, ".parquet")
_MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"]  # in the fields of a .csv or .tsv file
_INDEX = ("", "Unnamed: 0", "__index_level_0__")  # what pandas calls the numbers of its rows
_NAMED = 12  # names in a sentence
_HEADING = 2**20  # characters of the first line


def read_table(path: Path, target: str | None, like: Samples | None = None) -> Samples:
    """The samples of a `.csv`, `.tsv` or `.parquet` table, one per row; `notes` says what became of each column.

    Numbers and truth values become one float32 tensor, in the order of the columns. Texts and categories become codes
    from 0, in alphabetical order (an Enum keeps its own), as a second tensor of integers: the model is then called
    as `model(numbers, categories)`. An integer target column is taken as classes as it stands, floats as
    numbers to predict. Values that are missing or infinite are refused, since whatever was done about them in
    training cannot be known here.

    Args:
        path: the file.
        target: the column to predict.
        like: samples of another table, whose columns and codes are taken over (a code must mean the same in a test set
            as in its training set).
    """
    frame = _read(path)
    names = [name for name in frame.columns if name not in _INDEX]
    if target is None:
        raise InputError(f"the table {path.name} needs --target, the column to predict: one of {_listed(names)}.")
    if target not in names:
        raise unknown_name(f"column of {path.name}", target, names)
    if not len(frame):
        raise InputError(f"the table {path.name} has columns but no rows.")
    if like is not None and like.codes:
        names = _same_columns(path, names, like)
    _check_complete(path, frame.select(names))
    codes: dict[str, tuple[str, ...]] = {}
    columns: dict[str, Tensor] = {}
    for name in names:
        known = None if like is None or not like.codes else like.codes[name]
        columns[name], codes[name] = _column(path, frame[name], name == target, known)
    targets = columns.pop(target)
    numbers = [name for name in columns if not codes[name]]
    categories = [name for name in columns if codes[name]]
    parts = [torch.stack([columns[name] for name in group], 1) for group in (numbers, categories) if group]
    if not parts:
        raise InputError(f"the table {path.name} has no column besides the target {target!r}.")
    notes = _notes(target, targets, numbers, categories, codes)
    dropped = [name for name in frame.columns if name in _INDEX]
    notes += (f"left out: {dropped[0]!r}, the row numbers",) if dropped else ()
    inputs = parts[0] if len(parts) == 1 else tuple(parts)
    return Samples((inputs, targets), codes[target], f"{path.name} (target {target})", notes, codes=codes)


def _read(path: Path) -> pl.DataFrame:
    with needs(f"the table {path.name}"):
        import polars as pl
    try:
        if (separator := _SEPARATORS.get(path.suffix)) is not None:
            check_size(path.stat().st_size, path)
            _check_separated(path, separator)
            return pl.read_csv(path, separator=separator, infer_schema_length=None, null_values=_MISSING)
        rows = pl.scan_parquet(path).select(pl.len()).collect().item()
        check_size(8 * rows * len(pl.read_parquet_schema(path)), path)
        return pl.read_parquet(path)
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost anything
        raise InputError(f"{path} is not a readable {path.suffix} table: {first_line(error)}.") from error


def _check_separated(path: Path, separator: str) -> None:
    """Refuse other separators than the usual one: where semicolons are usual, numbers have decimal commas too."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        heading = stream.readline(_HEADING)
    used = [mark for mark in (";", "\t", "|", ",") if mark in heading and separator not in heading]
    if used:
        marks = {",": "commas", "\t": "tabs"}[separator]
        raise InputError(f"{path.name} separates its columns by {used[0]!r}; save it with {marks}.")


def _same_columns(path: Path, names: Sequence[str], like: Samples) -> list[str]:
    differing = [
        *(name for name in like.codes if name not in names),
        *(name for name in names if name not in like.codes),
    ]
    if differing:
        where = "lacks" if differing[0] in like.codes else "also has"
        raise InputError(f"{path.name} {where} the column {differing[0]!r}; it must have the columns of {like.name}.")
    return list(like.codes)


def _check_complete(path: Path, frame: pl.DataFrame) -> None:
    for name in frame.columns:
        column = frame[name]
        missing = column.null_count()
        if column.dtype.is_float():
            missing += int(column.is_nan().sum())
        if missing:
            raise InputError(
                f"{path.name}: {missing:,} of {len(column):,} values of {name!r} are missing; fill them in or leave "
                "those rows out, as was done for training."
            )
        if column.dtype.is_float() and not bool(column.is_finite().all()):
            raise InputError(f"{path.name}: the column {name!r} holds infinite numbers; clean the table first.")


def _column(
    path: Path, column: pl.Series, target: bool, known: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """A column as a tensor, and the names of its codes where it has codes."""
    import polars as pl

    kind = column.dtype
    if kind == pl.Boolean and target:
        column, kind = column.cast(pl.String), pl.String()
    text = kind == pl.String or isinstance(kind, pl.Categorical | pl.Enum)
    if known is not None and text != bool(known):
        got, before = ("texts", "numbers") if text else ("numbers", "texts")
        raise InputError(f"{path.name}: the column {column.name!r} holds {got}, but {before} in the training data.")
    if text:
        return _coded(path, column, known)
    if not (kind.is_numeric() or kind == pl.Boolean):
        raise InputError(
            f"{path.name}: the column {column.name!r} holds {str(kind).lower()}, which is neither a number nor a "
            "category; turn it into numbers, or leave it out."
        )
    whole = target and kind.is_integer()
    numbers = column.cast(pl.Int64 if whole else pl.Float32).to_numpy()
    return torch.from_numpy(np.require(numbers, requirements=["C", "W"])), ()


def _coded(path: Path, column: pl.Series, known: tuple[str, ...] | None) -> tuple[Tensor, tuple[str, ...]]:
    import polars as pl

    texts = column.cast(pl.String)
    if known is None:
        held = sorted(texts.unique().to_list())
        names = tuple(column.dtype.categories) if isinstance(column.dtype, pl.Enum) else tuple(held)
        if len(held) > max(20, len(column) // 2):
            raise InputError(
                f"{path.name}: the column {column.name!r} holds {len(held):,} different texts in {len(column):,} rows, "
                "too many for categories; leave it out, or turn it into numbers."
            )
    else:
        names = known
        if other := sorted(set(texts.unique().to_list()) - set(names)):
            raise InputError(
                f"{path.name}: the column {column.name!r} holds {other[0]!r}, but the training data hold only "
                f"{_listed(names)}."
            )
    places = texts.replace_strict(list(names), list(range(len(names))), return_dtype=pl.Int64)
    return torch.from_numpy(np.require(places.to_numpy(), requirements=["C", "W"])), names


def misfit(found: Samples, path: Path, target: str, model: nn.Module, error: BaseException) -> str:
    """What to say about a table that a model fails on: which columns it was given, how many it takes if that is known.

    There is no option that leaves columns out: which ones a network was trained on is for its table to say.
    """
    columns = [name for name in found.codes if name != target]
    given = _listed([f"{name} (codes)" if found.codes[name] else name for name in columns])
    said = first_line(error)
    shapes = not_multiplied(said)
    way_out = "save it with the columns that the network was trained on, in their order"
    takes = f"fails on them: {said}"
    if shapes and shapes[1] == len(columns) and isinstance(found.data[0], Tensor):
        takes = f"takes {shapes[2]:,} numbers a row"
        counts = [name for name, column in zip(columns, found.data[0].T, strict=True) if _counts(name, column)]
        if shapes[2] < len(columns) and counts:
            way_out += f", which {counts[0]!r} hardly is: it numbers the rows"
    return (
        f"the table {path.name} has {counted(len(columns), 'column')} besides the target {target!r} ({given}), but the "
        f"model {type(model).__name__} {takes}; {way_out}."
    )


def _counts(name: str, column: Tensor) -> bool:
    """Whether a column numbers the rows."""
    return name.casefold() in ("id", "index") or (len(column) > 2 and bool((column.diff() == 1).all()))


def _notes(
    target: str, targets: Tensor, numbers: list[str], categories: list[str], codes: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    said: list[str] = []
    if numbers:
        said.append(f"columns taken as numbers: {_listed(numbers)}")
    if categories:
        called = "model(numbers, categories)" if numbers else "model(categories)"
        said.append(
            f"columns taken as codes, for {called}: {_listed([_code(name, codes[name]) for name in categories])}"
        )
    if codes[target]:
        said.append(f"target {_code(target, codes[target])}")
    else:
        kind = "numbers" if targets.is_floating_point() else "classes, as they stand"
        said.append(f"target {target} as {kind}")
    return tuple(said)


def _code(name: str, names: Sequence[str]) -> str:
    listed = [f"{text!r} {code}" for code, text in enumerate(names[:_NAMED])]
    return f"{name} ({', '.join(listed)}{', ...' if len(names) > _NAMED else ''})"


def _listed(names: Sequence[Any]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(map(str, names[:_NAMED])) + (f" and {rest} more" if rest > 0 else "")
