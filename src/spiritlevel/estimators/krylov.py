"""Krylov spaces: an orthonormal basis, extended one product at a time, that knows what it may have missed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spiritlevel.estimators.operator import Product
from spiritlevel.estimators.probes import gaussian
from spiritlevel.memory import check_room

Array = NDArray[np.float64]
_MISS = 1e-3  # chance that an eigenvalue stays hidden
_COARSE = np.geomspace(1, 1e-14, 64)  # in units of the norm: where to look for an eigenvalue
_FINE = np.geomspace(1, _COARSE[1], 52)  # in units of the last step but one


@dataclass
class _Edge:
    """A unit vector outside a Krylov space, and its shares in H times the basis vectors (see `Krylov`)."""

    vector: Tensor
    shares: Array
    shadows: Array


class Krylov:
    """An orthonormal basis q₀, q₁, … (rows of `basis`), extended by one product with H at a time.

    With w = `width`, A = `projected` (float64) and up to rounding, for every i < w

        H qᵢ = Σ_{j<w} A[j, i] q_j + Σ_r c_r[i] u_r,      u_r orthogonal to the basis.

    The u_r and c_r are the vectors and shares of the `edges`. A fresh space has one, the next vector of its Lanczos
    recursion, and A is tridiagonal; every `begin` adds one, a random vector, as the edge number `rounds`.

    `begin(points)` also follows what an eigenvector z that is orthogonal to everything so far would look like, for
    each eigenvalue μ in `points`: as μ zᵀq = zᵀHq, its components along all later vectors are fixed multiples, the
    `shadows`, of zᵀq for the random q. They cannot exceed ‖z‖ = 1 together, so |zᵀq| ≤ 1/‖shadows‖; and for q uniform
    on the sphere P(|zᵀq| ≤ t) ≤ t √(2P/π). So a point is dropped, ruled out except with chance _MISS, once its
    shadows are long enough. The chances of rounds for the same points multiply, since their q are independent.

    `uniform` says that the direction of `first` is uniform on the sphere.
    """

    def __init__(self, product: Product, capacity: int, seed: int, first: Tensor, uniform: bool = False) -> None:
        self.product = product
        self.capacity = capacity
        self.seed = seed
        self.space = product.space
        length = self.space.length
        if product.device.type == "cpu":
            check_room(
                capacity * length * product.dtype.itemsize,
                f"a basis of {capacity} vectors of {length:,} numbers",
                "hold fewer of them (basis=, steps=), or measure some of the layers (params=)",
            )
        self.basis = torch.empty(capacity, length, dtype=product.dtype, device=product.device)
        self.width = 0
        self.projected: Array = np.zeros((capacity, capacity))
        first = first / self.space.norm(first)
        self.edges: dict[int, _Edge] = {0: _Edge(first, np.zeros(capacity), np.zeros(0))}
        self.rounds = 0
        self.points: Array = np.zeros(0)
        self.chances: Array = np.zeros(0)  # that the earlier rounds for these points have missed them
        self.missed: Array = np.zeros(0)  # that these and the present round have
        self.knows_first = uniform  # the basis is still that of a first vector that was uniform on the sphere
        self.shadows: Array = np.zeros((0, capacity))
        self.norm = 0.0  # largest |Ritz value| seen
        self.noise = 0.0  # largest ‖qᵢᵀHq − qᵀHqᵢ‖ seen, or what the operator says: how far products are off
        self._scale = 0.0
        self._eps = torch.finfo(product.dtype).eps
        self._ritz: tuple[Array, Array] | None = None  # of `projected` as it stands

    def _outside(self, v: Tensor) -> tuple[Tensor, Array]:
        """`v` minus its part in the span of the basis, and its coefficients there. Two rounds are enough."""
        basis = self.basis[: self.width]
        first = self.space.sum(basis @ v)
        v = torch.addmv(v, basis.T, first, alpha=-1)
        second = self.space.sum(basis @ v)
        v.addmv_(basis.T, second, alpha=-1)
        return v, (first.double() + second.double()).cpu().numpy()

    def extend(self, number: int = 0) -> Tensor:
        """Take an edge into the basis; what its product leaves outside becomes the new edge. Returns the product."""
        self._ritz = None
        j = self.width
        edge = self.edges.pop(number)
        q = self.basis[j] = edge.vector
        self.shadows[:, j] = edge.shadows
        self.width = j + 1
        expected = edge.shares[:j]  # what the earlier products say about qᵢᵀHq
        for other in list(self.edges):
            expected = expected + self._clear_edge(other, q, edge.shadows)[:j]

        product = self.product(q)
        remainder, h = self._outside(product)
        beta = float(self.space.norm(remainder, torch.float64))  # below 1e-23 float32 would give 0
        self._scale = max(self._scale, beta, float(np.linalg.norm(h)))
        self.noise = max(self.noise, float(np.linalg.norm(h[:j] - expected)), self.product.error)
        self.projected[: j + 1, j] = self.projected[j, : j + 1] = h
        floor = max(self._eps * self._scale, 1e-300)
        following = edge.shadows  # none, unless points are looked at
        if self.points.size:
            following = (self.points * edge.shadows - self.shadows[:, : j + 1] @ h) / max(beta, floor)
        if beta > 10 * floor and self.width < self.product.size:
            shares = np.zeros(self.capacity)
            shares[j] = beta
            self.edges[number] = _Edge(remainder / beta, shares, following)
        else:  # H maps the space of this edge into the basis
            self.noise = max(self.noise, beta)
        if self.points.size:
            self._rule_out(np.square(self.shadows[:, : j + 1]).sum(1) + np.square(following))
        return product

    def _clear_edge(self, number: int, q: Tensor, shadows: Array) -> Array:
        """Make an edge orthogonal to the new basis vector q. Returns its share in H qᵢ along q."""
        edge = self.edges[number]
        overlap = self.space.dot(edge.vector, q)
        given = overlap * edge.shares
        vector = edge.vector - overlap * q
        length = float(self.space.norm(vector))
        if length < 0.5:
            vector, _ = self._outside(vector)
            length = float(self.space.norm(vector))
        if length > 10 * self._eps:
            self.edges[number] = _Edge(
                vector / length, length * edge.shares, (edge.shadows - overlap * shadows) / length
            )
        else:
            del self.edges[number]
        return given

    def _rule_out(self, lengths: Array) -> None:
        """Drop the points whose shadows have grown long enough, and remember the chance of the others."""
        self.missed = self.chances * np.minimum(1.0, math.sqrt(2 * self.product.size / math.pi) / np.sqrt(lengths))
        hidden = self.missed > _MISS
        self.points, self.chances, self.missed = self.points[hidden], self.chances[hidden], self.missed[hidden]
        self.shadows = self.shadows[hidden]
        for edge in self.edges.values():
            edge.shadows = edge.shadows[hidden]

    def overlooks(self, points: Array) -> NDArray[np.bool_]:
        """For each point, whether the first vector may have hidden an eigenvector z of this eigenvalue.

        That is, with a chance above _MISS. For z with components c in the basis and e along the edge u,
        (μ − A) c = e · shares and ‖c‖² + e² ≤ 1: that bounds the component c₀ along the first vector.
        """
        if not self.knows_first:
            return np.ones(points.shape, dtype=bool)
        w = self.width
        shares = np.zeros(w)
        shares[-1] = self.noise
        if 0 in self.edges:
            shares = self.edges[0].shares[:w]
        values, coordinates = self.ritz()
        gaps = points[:, None] - values
        gaps[gaps == 0] = np.finfo(np.float64).eps * self.norm  # at a Ritz value, its own vector decides
        c = (shares @ coordinates) / gaps  # in the basis of the Ritz vectors
        most = np.abs(c @ coordinates[0]) / np.sqrt(1.0 + np.square(c).sum(1))
        return most * math.sqrt(2 * self.product.size / math.pi) > _MISS

    def reach(self, end: Callable[[Array], Array], size: float) -> float:
        """How far beyond `size` an eigenvalue may lie, measured by `end`, with a chance above _MISS; at most the norm.

        To 1%, and to 1e-14 of the norm. Products with H are known up to `noise`, which moves eigenvalues by that much.
        """
        if not self.norm:
            return self.noise
        both = np.array([1.0, -1.0])
        signs = both[end(both) > 0]

        def least(margins: Array) -> float:
            """The last of these decreasing margins before one where an eigenvalue may lie; infinite if none."""
            open_at = self.overlooks(np.outer(signs, size + margins).reshape(-1)).reshape(len(signs), -1).any(0)
            first = int(np.argmax(open_at)) if open_at.any() else len(margins)
            return float(margins[first - 1]) if first else math.inf

        high = least(self.norm * _COARSE)
        return high if high == math.inf else least(high * _FINE) + self.noise

    def begin(self, points: Array) -> bool:
        """Add a random edge, orthogonal to the basis, and look for more eigenvectors with eigenvalues `points`.

        Returns whether that can help: not if the last round for the same points revealed next to nothing about one
        of them, because what it leaves of the edge cannot be distinguished from rounding.
        """
        again = points is self.points
        if again and points.size and self.missed.max() > 0.5 * self.chances.max():
            return False
        self.chances = self.missed if again else np.ones(points.size)
        self.missed = self.chances
        self.knows_first = False
        self.rounds += 1
        self.points = points
        self.shadows = np.zeros((points.size, self.capacity))
        for edge in self.edges.values():
            edge.shadows = np.zeros(points.size)
        v, _ = self._outside(gaussian(self.product, self.seed, self.rounds))
        v /= self.space.norm(v)
        self.edges[self.rounds] = _Edge(v, np.zeros(self.capacity), np.ones(points.size))
        return True

    def ritz(self) -> tuple[Array, Array]:
        """The Ritz values, ascending, and their coordinates in the basis, as columns."""
        if self._ritz is None:
            # PyTorch's, not SciPy's, whose second thread spins: on a busy machine 60 rows take 40 ms there, not 0.2
            found = torch.linalg.eigh(torch.from_numpy(self.projected[: self.width, : self.width]))
            values, coordinates = found.eigenvalues.numpy(), found.eigenvectors.numpy()
            self._ritz = values, coordinates
            self.norm = max(self.norm, -float(values[0]), float(values[-1]))
        return self._ritz

    def leaks(self, coordinates: Array) -> dict[int, Array]:
        """How far H carries each of these vectors along every edge: parts of the residuals of Ritz vectors."""
        return {number: np.abs(edge.shares[: self.width] @ coordinates) for number, edge in self.edges.items()}

    def vectors(self, coordinates: Array) -> Tensor:
        """Combinations of the basis vectors, as rows."""
        return torch.from_numpy(coordinates.T.copy()).to(self.basis) @ self.basis[: self.width]

    def residuals(self, coordinates: Array) -> Array:
        """‖Hy − θy‖ of Ritz vectors y, from the products already made, without their asymmetry (`noise`)."""
        vectors = [edge.vector for edge in self.edges.values()]
        shares = np.array([edge.shares[: self.width] @ coordinates for edge in self.edges.values()])
        if not vectors:
            return np.zeros(coordinates.shape[1])
        if len(vectors) == 1:
            lengths: Array = np.abs(shares[0])
            return lengths
        overlaps = np.eye(len(vectors))  # edges are unit vectors, but not orthogonal to each other
        for i, j in itertools.combinations(range(len(vectors)), 2):
            overlaps[i, j] = overlaps[j, i] = self.space.dot(vectors[i], vectors[j])
        return np.sqrt(np.maximum(np.einsum("ik,ij,jk->k", shares, overlaps, shares), 0.0))

    def restart(self, values: Array, coordinates: Array) -> None:
        """Keep these Ritz vectors and all edges, forget the rest (thick restart)."""
        self.knows_first, self._ritz = False, None
        w, keep = coordinates.shape
        rotation = torch.from_numpy(coordinates.T.copy()).to(self.basis)
        for columns in self.basis.split(2**16, dim=1):
            columns[:keep] = rotation @ columns[:w]
        self.projected[:] = 0.0
        self.projected[range(keep), range(keep)] = values
        self.shadows[:, :keep] = self.shadows[:, :w] @ coordinates
        for edge in self.edges.values():
            edge.shares[:keep], edge.shares[keep:] = edge.shares[:w] @ coordinates, 0.0
        self.width = keep


def lanczos(space: Krylov, steps: int) -> Krylov:
    """The space extended to `steps` vectors, or as far as it goes."""
    while space.width < steps and space.edges:
        space.extend()
    return space
