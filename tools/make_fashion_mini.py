"""Make the built-in data set: the first 600 training and the first 100 test images of every class of Fashion-MNIST.

Run `python tools/make_fashion_mini.py`; prints the size and the SHA-256 to pin in `spiritlevel/data.py`. The images
are the same every time, the bytes of the file only with the same version of zlib.
"""

import hashlib
from pathlib import Path

import numpy as np
from torch import Tensor

from spiritlevel import data

TARGET = Path(data.__file__).parent / "assets" / "fashion-mini.npz"


def first_of_each_class(pair: tuple[Tensor, Tensor], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` images of every class, in the order of the original, with pixels as bytes."""
    images, targets = (pair[0] * 255).round().numpy().astype(np.uint8), pair[1].numpy().astype(np.uint8)
    chosen = np.sort(np.concatenate([np.flatnonzero(targets == label)[:count] for label in range(10)]))
    return images[chosen], targets[chosen]


def make(target: Path = TARGET) -> None:
    """Write the file."""
    full = data.load("fashion-mnist")
    train_images, train_targets = first_of_each_class(full.train, 600)
    test_images, test_targets = first_of_each_class(full.test, 100)
    np.savez_compressed(
        target,
        train_images=train_images,
        train_targets=train_targets,
        test_images=test_images,
        test_targets=test_targets,
    )


if __name__ == "__main__":
    make()
    content = TARGET.read_bytes()
    print(f"{TARGET.name}: {len(content):_} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
