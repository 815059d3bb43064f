"""Products by NumPy in place of PyTorch: where, on how many threads, and the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

import spiritlevel as sl
from spiritlevel.binding import blas
from spiritlevel.binding.cores import side_by_side


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Library:
    """In place of OpenBLAS: notes how many threads it is given."""

    def __init__(self) -> None:
        self.threads, self.given = 7, list[int]()

    def get_num_threads(self) -> int:
        return self.threads

    def set_num_threads(self, number: int) -> None:
        self.threads = number
        self.given.append(number)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    own, before = Library(), torch.get_num_threads()
    monkeypatch.setattr(blas, "_openblas", lambda: own)
    torch.set_num_threads(1)
    yield own
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that NumPy multiplies."""
    found: list[tuple[int, ...]] = []
    before = np.matmul

    def noted(a: Any, b: Any, **options: Any) -> Any:
        found.append(a.shape)
        return before(a, b, **options)

    monkeypatch.setattr(np, "matmul", noted)
    return found


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows, inner, columns = shape[-3:]
    lead = shape[:-3]
    return (
        torch.randn(*lead, rows, inner, generator=generator, dtype=dtype),
        torch.randn(*lead, inner, columns, generator=generator, dtype=dtype),
    )


def test_products_are_those_of_pytorch(library: Library, calls: list[tuple[int, ...]]) -> None:
    a, b = pair(3, 40, 50, 60)
    c, d = pair(40, 50, 60)
    out, wide = torch.empty(3, 40, 60), torch.zeros(3, 90, 60)
    with blas.one_thread_each():
        for found, wanted in (
            (blas.bmm(a, b), torch.bmm(a, b)),
            (blas.bmm(b.mT, a.mT), torch.bmm(b.mT, a.mT)),
            (blas.bmm(a[:1].expand(3, 40, 50), b), torch.bmm(a[:1].expand(3, 40, 50), b)),
            (blas.bmm(a, b, out=out), torch.bmm(a, b)),
            (blas.bmm(a, b, out=wide[:, 20:60]), torch.bmm(a, b)),
            (blas.mm(c, d), c @ d),
            (blas.mm(d.T, c.T), d.T @ c.T),
            (blas.mm(c, d, out=torch.empty(40, 60)), c @ d),
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert len(calls) == 8
    assert torch.equal(wide[:, :20], torch.zeros(3, 20, 60))
    torch.testing.assert_close(wide[:, 20:60], out)


def test_numpy_multiplies_only_what_is_large_single_and_unwatched(
    library: Library, calls: list[tuple[int, ...]]
) -> None:
    a, b = pair(3, 40, 50, 60)
    blas.bmm(a, b)  # nobody has set the threads
    with blas.one_thread_each():
        blas.bmm(a[:, :2, :3], b[:, :3, :4])
        blas.bmm(a.double(), b.double())
        assert blas.bmm(a.requires_grad_(), b).requires_grad
        with torch.no_grad():
            blas.bmm(a, b)
        vmap(blas.bmm)(a.detach()[None], b[None])
        with Watching():
            blas.mm(a.detach()[0], b[0])
        torch.set_num_threads(2)
        blas.mm(a.detach()[0], b[0])
    assert not calls
    assert blas.mm(*pair(40, 50, 60, dtype=torch.float64)).dtype == torch.float64


def test_the_threads_of_the_library_are_given_back(library: Library) -> None:
    """And taken only where there is something to multiply."""
    a, b = pair(3, 40, 50, 60)
    with blas.one_thread_each():
        with blas.one_thread_each():
            assert library.threads == 7
            blas.bmm(a, b)
            assert library.threads == 1
        assert library.threads == 1
    assert library.threads == 7
    with contextlib.suppress(ZeroDivisionError), blas.one_thread_each():
        blas.bmm(a, b)
        _ = 1 / 0
    with blas.one_thread_each():
        pass
    assert library.given == [1, 7, 1, 7]


def test_batches_side_by_side_have_numpy_on_one_thread(library: Library) -> None:
    """Also a single one, where there is one thread for it, but not where it has several."""
    a, b = pair(3, 40, 50, 60)

    def multiplied() -> int:
        blas.bmm(a, b)
        return library.threads

    for threads, count, items, wanted in ((1, 1, 1, 1), (1, 1, 3, 1), (2, 2, 3, 1), (2, 2, 1, 7), (4, 2, 3, 7)):
        torch.set_num_threads(threads)
        seen: list[int] = []
        side_by_side(range(items), lambda _: multiplied, seen.append, count)
        assert seen == [wanted] * items, (threads, count, items)
        assert library.threads == 7


@pytest.mark.parametrize(
    ("processor", "mkl", "wanted"),
    [("vendor_id\t: GenuineIntel", True, False), ("vendor_id\t: AuthenticAMD", False, False), ("arm", True, False)],
)
def test_where_pytorch_is_as_fast_it_multiplies(
    processor: str, mkl: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "_processor", lambda: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    assert (blas._openblas.__wrapped__() is not None) is wanted
    with blas.one_thread_each():  # changes nothing, whatever is there
        blas.bmm(*pair(3, 40, 50, 60))


def test_on_the_processors_concerned_it_is_the_library_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_processor", lambda: "vendor_id\t: AuthenticAMD")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    found = blas._openblas.__wrapped__()
    built_with: Any = np.show_config(mode="dicts")
    openblas = "openblas" in built_with["Build Dependencies"]["blas"]["name"]
    assert (found is not None) == openblas
    if found is not None:
        before = found.get_num_threads()
        found.set_num_threads(1)
        assert found.get_num_threads() == 1
        found.set_num_threads(before)


def two_convolutions() -> nn.Module:
    """Wide enough for tiles."""
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(7), nn.Flatten(), nn.Linear(64 * 16, 10))


@pytest.mark.parametrize("make", [sl.models.lenet5, two_convolutions])
def test_traces_are_the_same_by_both(
    make: Callable[[], nn.Module], library: Library, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, data = make(), (torch.randn(12, 1, 28, 28), torch.arange(12) % 10)
    by_numpy = sl.sample_traces(model, data, per_layer=True)
    assert calls
    calls.clear()
    monkeypatch.setattr(blas, "_openblas", lambda: None)
    wanted = sl.sample_traces(model, data, per_layer=True)
    assert not calls
    assert by_numpy.exact
    torch.testing.assert_close(by_numpy.values, wanted.values, rtol=1e-4, atol=0)
    for name, values in wanted.layers.items():
        torch.testing.assert_close(by_numpy.layers[name], values, rtol=1e-3, atol=1e-6 * float(wanted.values.max()))
