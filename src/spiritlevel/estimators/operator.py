"""A symmetric matrix known through its products, which estimators request: checked, counted, in full precision."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, first_line
from spiritlevel.estimators.entries import Entries
from spiritlevel.estimators.space import Space
from spiritlevel.memory import check_room
from spiritlevel.results import figure

_Arguments = ParamSpec("_Arguments")
_Found = TypeVar("_Found")


@functools.cache
def _reducible() -> tuple[str, ...]:
    """The kinds of devices here that may compute in reduced precision."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    return tuple(filter(torch.amp.is_autocast_available, kinds))


def full_precision() -> contextlib.AbstractContextManager[None]:
    """No reduced precision inside, whatever the caller has switched on."""
    reduced = [kind for kind in _reducible() if torch.is_autocast_enabled(kind)]
    return _without(reduced) if reduced else contextlib.nullcontext()


@contextlib.contextmanager
def _without(reduced: Sequence[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in reduced:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def in_full_precision(function: Callable[_Arguments, _Found]) -> Callable[_Arguments, _Found]:
    """A function whose calls happen inside `full_precision`."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Found:
        with full_precision():
            return function(*args, **kwargs)

    return call


class Operator:
    """A symmetric matrix H known through its products, over named parameters laid end to end.

    `matmat` maps a (P, k) tensor to H times it. `shapes` gives the parameters' names and shapes in order; without it
    the operator has no names and cannot `split`. `notes` say what is not obvious about the products. Exact; `op @ v`
    costs one product per column.

    >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> op = Operator(lambda block: matrix @ block, 2, dtype=torch.float32, shapes={"weight": (1, 1), "bias": (1,)})
    >>> op @ torch.tensor([1.0, 0.0])
    tensor([2., 1.])
    >>> op.split(op @ torch.tensor([1.0, 0.0]))
    {'weight': tensor([[2.]]), 'bias': tensor([1.])}
    """

    @checked
    def __init__(
        self,
        matmat: Callable[[Tensor], Tensor],
        size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shapes: Mapping[str, Sequence[int]] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.size, self.notes = size, tuple(notes)
        self.shape = (size, size)
        self.dtype = dtype
        try:
            self.device = torch.device(device)
            self.shapes = {name: torch.Size(shape) for name, shape in (shapes or {}).items()}
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"an operator needs a torch device, and for each name a shape of whole numbers: {first_line(error)}."
            ) from error
        self._matmat = matmat
        self.space = Space(size)
        self.entries: Entries | None = None  # once they are written down
        total = sum(shape.numel() for shape in self.shapes.values())
        if self.shapes and total != size:
            raise InputError(f"the parameters' shapes hold {total} numbers, but the operator has size {size}.")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names in the order of the vector."""
        return tuple(self.shapes)

    @property
    def error(self) -> float:
        """The largest error of a product with a unit vector, where products are not exact to rounding."""
        return 0.0

    @property
    def form_error(self) -> float:
        """The same of vᵀHv."""
        return 0.0

    def __matmul__(self, v: Tensor) -> Tensor:
        if not isinstance(v, Tensor):
            raise InputError(f"an operator multiplies tensors, got {type(v).__name__}; use .to_scipy() for arrays.")
        length = self.space.length
        if v.ndim not in (1, 2) or v.shape[0] != length:
            here = f" with {length} entries here" if self.space.parted else ""
            raise InputError(
                f"an operator of size {self.size}{here} multiplies vectors of shape ({length},) or ({length}, k), "
                f"got {tuple(v.shape)}."
            )
        if v.dtype != self.dtype or v.device.type != self.device.type:
            raise InputError(
                f"the operator is {self.dtype} on {self.device}, the vector {v.dtype} on {v.device}; "
                f"convert it with v.to(op.device, op.dtype)."
            )
        block = v[:, None] if v.ndim == 1 else v
        with full_precision():
            return _checked(self._matmat(block), block, self.space).reshape(v.shape)

    def dense(self) -> Tensor:
        """The matrix itself, by `size` products."""
        if self.device.type == "cpu":
            check_room(
                2 * self.size**2 * self.dtype.itemsize,
                f"a dense matrix of {self.size:,} × {self.size:,} numbers",
                "multiply by vectors instead, or take some of the layers (params=)",
            )
        width = max(1, min(128, 2**25 // self.size))
        blocks = identity_blocks(self.space, self.dtype, self.device, width)
        return torch.cat([self.space.whole(self @ block) for block in blocks], dim=1)

    def materialise(self) -> None:
        """Keep all entries, from `size` products: estimators then read them, exactly, and make no further products."""
        if self.entries is None and not self.space.parted:
            matrix = self.dense()
            self.entries = Entries(matrix.double().cpu().numpy())
            self._matmat = matrix.__matmul__

    @checked
    def split(self, v: Tensor) -> dict[str, Tensor]:
        """A vector cut into the parameters' shapes, as views."""
        if not self.shapes:
            raise InputError("this operator was built without parameter shapes, so it cannot split a vector.")
        if v.shape != (self.space.length,):
            raise InputError(f"split needs a vector of shape ({self.space.length},), got {tuple(v.shape)}.")
        parts = v.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def to_scipy(self) -> LinearOperator:
        """The operator for SciPy, for example `scipy.sparse.linalg.eigsh(op.to_scipy(), k=3)`."""

        def multiply(x: NDArray[Any]) -> NDArray[Any]:
            return (self @ torch.tensor(x, dtype=self.dtype, device=self.device)).cpu().numpy()

        dtype = np.float64 if self.dtype == torch.float64 else np.float32
        return LinearOperator(
            self.shape, matvec=multiply, rmatvec=multiply, matmat=multiply, rmatmat=multiply, dtype=dtype
        )

    def __repr__(self) -> str:
        return f"Operator(size={self.size}, dtype={self.dtype}, device={self.device}, parameters={len(self.shapes)})"


def _checked(product: Tensor, v: Tensor, space: Space) -> Tensor:
    if product.shape != v.shape:
        raise InputError(
            f"a product with the operator must keep the shape of the vectors, {tuple(v.shape)}, "
            f"got {tuple(product.shape)}."
        )
    largest = torch.linalg.vector_norm(product, ord=math.inf) if product.numel() else torch.zeros(())
    if not math.isfinite(space.sum(largest)):  # the quickest way to check every number
        raise InputError(
            "a product with the operator holds NaN or infinity; check the data, the model's outputs and the loss, or "
            "use float64."
        )
    return product


class Product:
    """Anything with `shape` and `@` as checked and counted products with (P,) or (P, k) tensors."""

    def __init__(self, op: Any) -> None:
        shape = getattr(op, "shape", None)
        if shape is None or not hasattr(op, "__matmul__"):
            raise InputError(f"estimators need an operator with `shape` and `@`, got {type(op).__name__}.")
        if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
            raise InputError(f"estimators need a square operator, got shape {tuple(shape)}.")
        given = getattr(op, "dtype", None)
        self._speaks_torch = isinstance(given, torch.dtype)
        known = {"float32": torch.float32, "float64": torch.float64, "None": torch.float64}
        dtype = known.get(str(given).removeprefix("torch."))
        if dtype is None:
            raise InputError(f"estimators need a float32 or float64 operator, got {given}; convert it first.")
        self.op = op
        self.size = int(shape[0])
        self.space = op.space if isinstance(op, Operator) else Space(self.size)
        self.dtype = dtype
        self.device = torch.device(op.device) if self._speaks_torch else torch.device("cpu")
        self.count = 0
        self.written = op.entries if isinstance(op, Operator) else None
        if isinstance(op, np.ndarray) or (isinstance(op, Tensor) and op.layout == torch.strided):
            entries: Any = op.detach() if isinstance(op, Tensor) else op
            difference, largest = float(abs(entries - entries.T).max()), float(abs(entries).max())
            if difference > 1e-4 * largest:
                raise InputError(
                    "estimators need a symmetric matrix, got one with entries that differ by "
                    f"{figure(difference, 2)} from their mirror images; use (A + A.T)/2 if that is what you mean."
                )

    @property
    def error(self) -> float:
        """The largest error of a product with a unit vector that is known so far, beyond rounding."""
        return self.op.error if isinstance(self.op, Operator) else 0.0

    @property
    def form_error(self) -> float:
        """The same of vᵀHv."""
        return self.op.form_error if isinstance(self.op, Operator) else 0.0

    def __call__(self, v: Tensor) -> Tensor:
        first = not self.count
        self.count += 1 if v.ndim == 1 else v.shape[1]
        if isinstance(self.op, Operator):
            product = self.op @ v  # has checked it
        elif self._speaks_torch:
            product = _checked((self.op @ v).detach(), v, self.space)
        else:
            product = _checked(torch.tensor(np.asarray(self.op @ v.numpy()), dtype=self.dtype), v, self.space)
        if first:
            size = float(self.space.norm(product.reshape(-1), torch.float64))
            if size and not 1e-140 < size < 1e140:
                raise InputError(
                    f"the products with this operator are of size {figure(size, 1)}, beyond what can be squared in "
                    "float64; multiply the loss by a constant and divide the results by it."
                )
        return product


def entries_of(product: Product) -> Entries:
    """The entries of a matrix: those that its operator has written down, or by `size` products."""
    if (written := product.written) is not None:
        product.count = written.size
        return written
    columns = identity_blocks(product.space, product.dtype, product.device)
    blocks = [product.space.whole(product(block)).double().cpu() for block in columns]
    return Entries(torch.cat(blocks, dim=1).numpy())


def columns_at_once(size: int) -> int:
    """How many vectors to multiply at once: up to 16, and fewer where they would fill more than 2²⁵ numbers."""
    return max(1, min(16, 2**25 // size))


def identity_blocks(
    space: Space, dtype: torch.dtype, device: torch.device, width: int | None = None
) -> Iterator[Tensor]:
    """The columns of the identity, this many at once, or as many as fit."""
    size = space.size
    width = width or columns_at_once(size)
    for first in range(0, size, width):
        block = torch.zeros(size, min(width, size - first), dtype=dtype, device=device)
        block[first : first + width].fill_diagonal_(1.0)
        yield space.part(block)
