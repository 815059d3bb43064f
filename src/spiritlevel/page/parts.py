"""What a page is made of: sections with texts, cards, charts, tables and pictures. Knows no HTML and no result."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from spiritlevel.results.formatting import figure

Cell = str | float | int


@dataclass(frozen=True)
class Figure:
    """A chart: `alt` says in words what it shows, for those who cannot see it; `note` what it leaves out."""

    key: str
    title: str
    alt: str
    spec: dict[str, Any]
    note: str = ""
    square: bool = False


@dataclass(frozen=True)
class Table:
    """A table; numbers among the cells are shown with four digits and downloaded with all."""

    key: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False


@dataclass(frozen=True)
class Card:
    """One number that matters: what it is, its value, how sure it is, and what it means."""

    label: str
    value: str
    error: str
    meaning: str


@dataclass(frozen=True)
class Thumbnail:
    """A picture of one sample: its place on the sheet, and the lines below it."""

    place: int
    sample: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Gallery:
    """A named row of pictures."""

    title: str
    pictures: tuple[Thumbnail, ...]


@dataclass
class Section:
    """One heading of the page and what stands below it."""

    key: str
    title: str
    texts: list[str] = field(default_factory=list)
    hint: str = ""  # how to use it on a screen; not printed
    cards: list[Card] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # texts below the figures
    galleries: list[Gallery] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    samples: str = ""  # the run whose per-sample values can be downloaded here


@dataclass(frozen=True)
class Sheet:
    """Small pictures side by side in one image, which a page shows one at a time."""

    image: str
    columns: int
    rows: int
    width: int
    height: int
    places: dict[str, int]


_SIDE = 64  # pixels; larger pictures are scaled down
_MOST = 1000


def sheet(images: Any, samples: Sequence[int]) -> Sheet:
    """(K, C, H, W) bytes on one sheet, each of at most 64 x 64 pixels; `places` finds a sample's picture."""
    array = np.asarray(images, dtype=np.uint8)[:_MOST].transpose(0, 2, 3, 1)
    count, height, width, channels = array.shape
    scale = min(1.0, _SIDE / max(height, width))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    columns = max(1, math.ceil(math.sqrt(count)))
    rows = math.ceil(count / columns)
    mode = "L" if channels == 1 else "RGB"
    whole = Image.new(mode, (columns * size[0], rows * size[1]))
    for k, pixels in enumerate(array):
        picture = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels[:, :, :3], mode)
        whole.paste(picture.resize(size) if scale < 1 else picture, (k % columns * size[0], k // columns * size[1]))
    places = {str(int(sample)): k for k, sample in enumerate(list(samples)[:count])}
    return Sheet(_data_address(whole), columns, rows, *size, places)


def _data_address(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=90)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


def packed(column: Any) -> dict[str, str]:
    """A column of numbers as little-endian bytes in base 64, which a page unpacks without parsing."""
    array = np.asarray(column)
    kind = "f8" if array.dtype.kind == "f" else "i4"
    return {"kind": kind, "data": base64.b64encode(array.astype(f"<{kind}").tobytes()).decode()}


def number(value: Cell, digits: int = 4) -> str:
    """A cell of the page: numbers as `figure` writes them for readers, texts as they are.

    >>> number(1234.5678), number(3.2e-7), number(-0.5), number(60000), number(float("nan")), number("–")
    ('1,235', '3.2 × 10⁻⁷', '−0.5', '60,000', 'undefined', '–')
    """
    if isinstance(value, bool | str):
        return str(value)
    return figure(value, digits, typeset=True)
