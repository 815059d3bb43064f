"""From the bytes of a file to arrays. Decoders see only bytes that matched their pin, so they check nothing."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spiritlevel.errors import needs

Blob = bytes | memoryview
Bytes = NDArray[np.uint8]
Arrays = tuple[Bytes, Bytes, Bytes, Bytes]  # train images (N, C, H, W), train labels, test images, test labels


def decode_idx(blobs: Sequence[Blob]) -> Arrays:
    """The four idx files of MNIST and Fashion-MNIST."""
    arrays = []
    for blob in blobs:
        rank = blob[3]
        shape = struct.unpack_from(f">{rank}i", blob, 4)
        arrays.append(np.frombuffer(blob, np.uint8, offset=4 + 4 * rank).reshape(shape))
    train, train_targets, test, test_targets = arrays
    return train[:, None], train_targets, test[:, None], test_targets


def decode_records(blobs: Sequence[Blob], *, labels: int) -> Arrays:
    """CIFAR's binary files: rows of `labels` label bytes (the last is the one used) and 3×32×32 pixels; test last."""
    rows = [np.frombuffer(blob, np.uint8).reshape(-1, labels + 3072) for blob in blobs]
    train, test = np.concatenate(rows[:-1]), rows[-1]
    return (
        train[:, labels:].reshape(-1, 3, 32, 32),
        train[:, labels - 1],
        test[:, labels:].reshape(-1, 3, 32, 32),
        test[:, labels - 1],
    )


def decode_sheets(blobs: Sequence[Blob]) -> Arrays:
    """Lossless WebP sheets, each a grid of 32×32 tiles read row by row, and .npy labels, for train and then test."""
    with needs("this data set"):
        from PIL import Image

    def tiles(blob: Blob) -> Bytes:
        sheet = np.asarray(Image.open(io.BytesIO(blob), formats=["WEBP"]).convert("RGB"))
        down, across = sheet.shape[0] // 32, sheet.shape[1] // 32
        return sheet.reshape(down, 32, across, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)

    *train, train_targets, test, test_targets = blobs
    load = partial(np.load, allow_pickle=False)
    return (
        np.concatenate([tiles(blob) for blob in train]),
        load(io.BytesIO(train_targets)),
        tiles(test),
        load(io.BytesIO(test_targets)),
    )


def decode_npz(blobs: Sequence[Blob]) -> Arrays:
    """One file of four arrays."""
    with np.load(io.BytesIO(blobs[0]), allow_pickle=False) as file:
        return file["train_images"], file["train_targets"], file["test_images"], file["test_targets"]


def decode_digits() -> Arrays:
    """Scikit-learn's digits; the last 36 of every class are the test set."""
    with needs("this data set"):
        from sklearn.datasets import load_digits

    bunch = load_digits()
    images, targets = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.uint8)
    test = np.zeros(len(targets), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(targets == label)[-36:]] = True
    return images[~test], targets[~test], images[test], targets[test]


def cifar10_from_png(blobs: Sequence[Blob]) -> list[Blob]:
    """CIFAR-10's six binary batches from six images (one row per image, channels last) and two lists of labels."""
    with needs("this data set"):
        from PIL import Image

    labels = np.array(json.loads(bytes(blobs[6])) + json.loads(bytes(blobs[7])), dtype=np.uint8).reshape(6, -1, 1)
    batches: list[Blob] = []
    for blob, column in zip(blobs[:6], labels, strict=True):
        pixels = (
            np.asarray(Image.open(io.BytesIO(blob), formats=["PNG"])).reshape(len(column), 1024, 3).transpose(0, 2, 1)
        )
        batches.append(np.concatenate([column, pixels.reshape(len(column), 3072)], axis=1).tobytes())
    return batches


def mnist_from_pickle(blobs: Sequence[Blob]) -> list[Blob]:
    """MNIST's four idx files from a pickle of known content: its arrays are cut out where they lie, not unpickled."""

    def cut(offset: int, count: int, dtype: str, scale: int) -> bytes:
        return (np.frombuffer(blobs[0], dtype, count, offset) * scale).astype(np.uint8).tobytes()

    train = cut(133, 50_000 * 784, "<f4", 256) + cut(157_200_236, 10_000 * 784, "<f4", 256)
    targets = cut(156_800_199, 50_000, "<i8", 1) + cut(188_560_267, 10_000, "<i8", 1)
    test, test_targets = cut(188_640_304, 10_000 * 784, "<f4", 256), cut(220_000_335, 10_000, "<i8", 1)
    return [
        struct.pack(">4i", 0x803, 60_000, 28, 28) + train,
        struct.pack(">2i", 0x801, 60_000) + targets,
        struct.pack(">4i", 0x803, 10_000, 28, 28) + test,
        struct.pack(">2i", 0x801, 10_000) + test_targets,
    ]
