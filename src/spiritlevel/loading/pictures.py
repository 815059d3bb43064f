"""Folders of images as arrays, in the depth that the files have."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spiritlevel.errors import InputError, first_line, needs, printable
from spiritlevel.loading.arrays import FAINT, Samples, check_size
from spiritlevel.results import figure

_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})


def images_in(folder: Path) -> Samples:
    """One subfolder per class, in the order of their names; all images of one size, all grey or all in colour.

    If one of them is in colour, all are: grey ones get three equal channels.
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
            f"the folder {folder} must hold one subfolder of images per class, at least two; it holds "
            f"{len(classes)} folders with {len(files)} images, and {loose} images beside them."
        )
    empty = sorted(set(range(len(classes))) - {number for _, number in files})
    if empty:
        raise InputError(f"the folder {folder / classes[empty[0]]} holds no image.")
    inputs, notes = stacked([(path, path) for path, _ in files], folder)
    targets = torch.tensor([number for _, number in files])
    return Samples((inputs, targets), tuple(map(printable, classes)), printable(folder.name), notes)


def stacked(files: Sequence[tuple[Any, Path | bytes]], place: Path) -> tuple[Tensor, tuple[str, ...]]:
    """The images of files, or of the bytes of files, by their names, as (N, C, H, W); what was done to them, in words.

    `place` is where they come from.
    """
    grey = all([_is_grey(name, file) for name, file in files])  # all are looked at: a damaged one is named at once
    first = _picture(*files[0], grey)
    check_size(4 * first.pixels.size * len(files), place)
    images = np.empty((len(files), *first.pixels.shape), dtype=np.float32)
    notes: dict[str, None] = {}
    brightest = 0.0
    for index, (name, file) in enumerate(files):
        image = _picture(name, file, grey)
        if image.pixels.shape != first.pixels.shape:
            raise InputError(
                f"all images must have the same size: {files[0][0]} has {_size(first)} and {name} has {_size(image)}."
            )
        images[index] = image.pixels
        images[index] /= image.top
        notes[image.note] = None
        brightest = max(brightest, float(images[index].max()))
    if 0 < brightest < FAINT / 255:
        notes[
            f"the brightest pixel is {figure(brightest, 2)} of white: save floats if the network was trained on "
            "another scale"
        ] = None
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy()), tuple(notes)


# What Pillow may open: it knows fifty formats, and starts another program for one of them.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_COLOURED = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


class _Image(NamedTuple):
    """Pixels of shape (H, W, 1 or 3), the value that is white, and what is done to them, in words."""

    pixels: np.ndarray[Any, Any]
    top: float
    note: str


@contextmanager
def _opened(path: Any, file: Path | bytes) -> Iterator[Any]:
    with needs("a folder of images"):
        from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_FORMATS) as image:
                yield image
    except InputError:
        raise
    except Exception as error:  # a damaged image can raise almost anything
        raise InputError(f"the image {path} cannot be read: {first_line(error) or type(error).__name__}.") from error


def _is_grey(path: Any, file: Path | bytes) -> bool:
    with _opened(path, file) as image:
        if image.mode not in (*_GREY, *_COLOURED):
            raise InputError(f"the image {path} has the mode {image.mode!r}; save it as an 8-bit PNG.")
        return image.mode in _GREY


def _picture(path: Any, file: Path | bytes, grey: bool) -> _Image:
    """One image in its own depth: asked for bytes, Pillow would clip deeper ones at 255."""
    with _opened(path, file) as image:
        deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))  # as in a file
        if deep or image.mode == "F":
            pixels = np.asarray(image).astype(np.float32)
            found = _Image(pixels, 65535.0, "16-bit images divided by 65,535")
            if not deep:
                found = _Image(pixels, 1.0, "images of floats in [0, 1] taken as they are")
            if not bool((pixels >= 0).all() and (pixels <= found.top).all()):
                raise InputError(
                    f"the image {path} holds numbers outside [0, {found.top:g}], and nothing says which of them is "
                    "white; save arrays of floats as .npz instead."
                )
        elif image.mode == "I":
            raise InputError(
                f"the image {path} has 32 bits per pixel, and nothing says which number is white; save it with 8 or 16 "
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
