"""Whether `torch.compile` pays off for the replayed Hessian product: why the library has no such path."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from harness import FULL, Row, Scale, alone, dense_net, images, ratio, take_turns

import spiritlevel as sl
from spiritlevel.operators import replay


@contextmanager
def compiled_products() -> Iterator[None]:
    """Operators made inside compile the product that they have recorded."""
    plain = replay._cut

    def cut(*arguments: Any, **options: Any) -> Any:
        trace, names = plain(*arguments, **options)
        return dataclasses.replace(trace, multiply=torch.compile(trace.multiply)), names

    replay._cut = cut
    try:
        yield
    finally:
        replay._cut = plain


def compiled(scale: Scale) -> list[Row]:
    """Compiled product over replayed product, with the seconds that compiling took. Only at full scale: it is slow."""
    area = "torch.compile"
    if scale is not FULL:
        return []
    _, inputs, targets = images(2000)
    rows = []
    for name, model in (("MLP 784-512-512-512-10", dense_net(784, 512, 512, 512, 10)), ("LeNet-5", sl.models.lenet5())):
        what = f"compiled product / replayed product, {name}"
        plain = sl.hessian(model.eval(), (inputs, targets))
        vector = torch.ones(plain.size)
        _ = plain @ vector
        try:
            begin = time.perf_counter()
            with compiled_products():
                fast = sl.hessian(model, (inputs, targets))
                _ = fast @ vector
                _ = fast @ vector
            seconds = time.perf_counter() - begin
        except Exception as error:
            note = f"failed: {type(error).__name__}: {str(error).splitlines()[0]} (it needs a C++ compiler)"
            rows.append(Row(area, what, None, note=note))
            continue
        pair = ratio(*take_turns(scale.rounds, lambda fast=fast, v=vector: fast @ v, lambda op=plain, v=vector: op @ v))
        rows.append(alone(area, what, pair, f"first two products: {seconds:.0f} s"))
    return rows
