"""Linear maps of all parameters, θ → Tθ, as a list of steps, and random matrices to make them from."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spiritlevel.errors import InputError
from spiritlevel.memory import check_room
from spiritlevel.watching.channels import Layout


@dataclass(frozen=True, eq=False)
class Step:
    """Rows of entries, multiplied by a matrix: θ[entries] → matrix · θ[entries].

    `entries` (m, k) are indices into all parameters and buffers laid end to end, none of them twice; `matrix` is
    (m, m), (m,) for a diagonal, or (m,) whole numbers for a permutation: the places that the rows come from.
    """

    entries: Tensor
    matrix: Tensor

    @property
    def permutes(self) -> bool:
        """Whether it is a permutation."""
        return not self.matrix.is_floating_point()

    def acting(self, rows: Tensor, how: str) -> Tensor:
        """The matrix, its inverse, or its inverse transpose times rows (m, k, n)."""
        if self.permutes:  # its own inverse transpose
            order = self.matrix.argsort() if how == "inverse" else self.matrix
            return rows[order.to(rows.device)]
        matrix = self.matrix
        if how != "forward" and matrix.ndim == 1:
            matrix = 1 / matrix
        elif how != "forward":
            inverse: Tensor = torch.linalg.inv(matrix)
            matrix = inverse if how == "inverse" else inverse.T
        matrix = matrix.to(rows)
        return rows * matrix[:, None, None] if matrix.ndim == 1 else torch.einsum("ij,jkn->ikn", matrix, rows)


class LinearMap:
    """A linear map T of the parameters, through its actions T, T⁻¹ and T⁻ᵀ on dicts of tensors.

    Where the loss stays, L'(Tθ) = L(θ), a gradient becomes T⁻ᵀg and the Hessian T⁻ᵀHT⁻¹ (mathematics 7.1).

    >>> T = LinearMap({"w": torch.Size([2])}, [Step(torch.tensor([[0], [1]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]]))])
    >>> T({"w": torch.tensor([1.0, 2.0])}), T.inverse({"w": torch.tensor([3.0, 2.0])})
    ({'w': tensor([3., 2.])}, {'w': tensor([1., 2.])})
    >>> T.inverse_transposed({"w": torch.tensor([1.0, 2.0])})
    {'w': tensor([1., 1.])}
    """

    def __init__(self, shapes: Mapping[str, torch.Size], steps: Iterable[Step]) -> None:
        self.layout = Layout(shapes)
        self.steps = tuple(steps)

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tθ."""
        return self._on_dict(tensors, "forward")

    def inverse(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """T⁻¹v."""
        return self._on_dict(tensors, "inverse")

    def inverse_transposed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """T⁻ᵀv, what becomes of a gradient."""
        return self._on_dict(tensors, "inverse transposed")

    def factors(self, names: Iterable[str]) -> dict[str, float | Tensor] | None:
        """The diagonal of T for each of these tensors, 1.0 where it is 1; `None` unless T is diagonal."""
        if any(step.permutes or step.matrix.ndim > 1 for step in self.steps):
            return None
        ones = {name: torch.ones(self.layout.shapes[name], dtype=torch.float64) for name in names}
        return {name: 1.0 if bool((factor == 1).all()) else factor for name, factor in self(ones).items()}

    def _on_dict(self, tensors: Mapping[str, Tensor], how: str) -> dict[str, Tensor]:
        if not tensors:
            return {}
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
        parts = self.on_rows(tuple(tensors), flat[:, None], how)[:, 0].split([t.numel() for t in tensors.values()])
        return {name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}

    def on_rows(self, names: Iterable[str], block: Tensor, how: str) -> Tensor:
        """The action on columns of a block (P, n), P the entries of these tensors laid end to end.

        Unnamed tensors are constants; T must not mix them with the named ones.
        """
        where = torch.full((self.layout.size,), -1)
        position = 0
        for name in names:
            count = self.layout.shapes[name].numel()
            start = self.layout.starts[name]
            where[start : start + count] = torch.arange(position, position + count)
            position += count
        result = block.clone()
        for step in reversed(self.steps) if how == "inverse" else self.steps:
            index = where[step.entries]
            inside = index >= 0
            chosen = inside.all(0)
            if bool((inside.any(0) & ~chosen).any()):
                raise InputError(
                    "this map mixes parameters that are measured with others that are not; measure them all."
                )
            index = index[:, chosen].to(block.device)
            result[index] = step.acting(result[index], how)
        return result


# ---------------------------------------------------------------- random draws


def generator(seed: int) -> torch.Generator:
    """A source of random numbers that leaves torch's own alone."""
    return torch.Generator().manual_seed(seed)


def rotation(count: int, source: torch.Generator) -> Tensor:
    """A random orthogonal matrix, uniform over all of them."""
    check_room(32 * count**2, f"a rotation of {count:,} units", "leave this transform out")
    q, r = torch.linalg.qr(torch.randn(count, count, generator=source, dtype=torch.float64))
    return q * r.diagonal().sign()


def spread(count: int, size: float, source: torch.Generator, *, signed: bool = False) -> Tensor:
    """Random factors around 1 whose largest is `size` times the smallest, of either sign if asked."""
    powers = torch.rand(count, generator=source, dtype=torch.float64) - 0.5
    if count > 1:
        low, high = powers.min(), powers.max()
        powers = (powers - low) / (high - low).clamp(min=1e-12) - 0.5
    factors = size**powers
    if signed:
        factors = factors * (2.0 * torch.randint(0, 2, (count,), generator=source) - 1.0)
    return factors


def invertible(count: int, size: float, source: torch.Generator) -> Tensor:
    """A random invertible matrix with condition number `size`."""
    return rotation(count, source) * spread(count, size, source) @ rotation(count, source)


def condition(who: str, size: Any) -> float:
    """`size` as a condition number."""
    if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 1 <= float(size) < math.inf:
        raise InputError(f"{who}: size= is a condition number and must be a finite number of at least 1, got {size!r}.")
    return float(size)


def share(who: str, size: Any) -> float:
    """`size` as a share of a whole."""
    if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 0 < float(size) <= 1:
        raise InputError(f"{who}: size= is the share of units that are split, above 0 and up to 1, got {size!r}.")
    return float(size)


def length(who: str, size: Any) -> float:
    """`size` as the length of a shift over that of what it is added to."""
    if isinstance(size, bool) or not isinstance(size, numbers.Real) or not 0 < float(size) < math.inf:
        raise InputError(
            f"{who}: size= is the length of the shift over that of what it is added to and must be a positive, finite "
            f"number, got {size!r}."
        )
    return float(size)
