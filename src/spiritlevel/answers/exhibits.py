"""The training data beside their record: places as ids, and the pictures or texts of some samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spiritlevel.answers.outcomes import thumbnails
from spiritlevel.binding.batches import is_pair_of_tensors
from spiritlevel.errors import InputError
from spiritlevel.results import Pictures


class Numbered(Dataset[Any]):
    """A data set whose items end in their place; see `Recorder.numbered`."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        item = self.data[index]
        if isinstance(item, Mapping):
            return {**item, "id": index}
        return (*item, index) if isinstance(item, tuple | list) else (item, index)


def length(data: Any) -> int:
    """How many samples these data are."""
    if is_pair_of_tensors(data):
        return len(data[1])
    try:
        return len(data)
    except TypeError as error:
        raise InputError(
            f"Recorder needs the number of training samples, or data that have a length, got {type(data).__name__}."
        ) from error


def exhibits(data: Any, ids: Tensor, samples: int) -> tuple[Pictures | None, tuple[str, ...]]:
    """Pictures or texts of these samples, if the data hold any."""
    if data is None:
        return None, ()
    if length(data) != samples:
        raise InputError(
            f"the data hold {length(data):,} samples, but the record holds {samples:,}; pass those that were recorded, "
            "in the order of their ids."
        )
    if is_pair_of_tensors(data):
        items = [data[0][i] if isinstance(data[0], Tensor | np.ndarray) else None for i in ids.tolist()]
    else:
        items = [_input(data[i]) for i in ids.tolist()]
    texts = tuple(item for item in items if isinstance(item, str))
    if texts and len(texts) == len(items):
        return None, texts
    pixels = [_pixels(item) for item in items]
    try:
        images = thumbnails((torch.stack([item for item in pixels if item is not None]), None))
    except (InputError, RuntimeError):  # no images, or of several sizes
        return None, ()
    if len(images) != len(ids):
        return None, ()
    return Pictures(ids, images, {"to look at": tuple(range(len(ids)))}), ()


def _input(item: Any) -> Any:
    if isinstance(item, Mapping):
        texts = [value for value in item.values() if isinstance(value, str)]
        return texts[0] if texts else next(iter(item.values()), None)
    return item[0] if isinstance(item, tuple | list) else item


def _pixels(item: Any) -> Tensor | None:
    """A picture as a tensor (C, H, W): a tensor as it is, a picture of Pillow in colour."""
    if hasattr(item, "convert"):
        return torch.from_numpy(np.array(item.convert("RGB"))).permute(2, 0, 1) / 255
    tensor = torch.from_numpy(np.ascontiguousarray(item)) if isinstance(item, np.ndarray) else item
    return tensor if isinstance(tensor, Tensor) and tensor.ndim in (2, 3) else None
