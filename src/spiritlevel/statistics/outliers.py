"""Outliers of a cloud of points in the plane by their local outlier factor, in memory that hardly grows with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

Array = NDArray[Any]

NEIGHBOURS = 20  # scikit-learn's default, which the paper used
_LIMIT = 1.5  # the factor above which scikit-learn calls a point an outlier
_AT_ONCE = 2**13  # points whose neighbours are looked for together


def inliers(cloud: Array) -> tuple[Array, str]:
    """Which points LocalOutlierFactor keeps, and a remark if points that coincide made it count distinct ones."""
    if np.abs(cloud).max() > 1e100:  # scaling both by one factor changes no outlier and keeps squared distances finite
        cloud = cloud / np.abs(cloud).max()
    points, index, copies = np.unique(cloud, axis=0, return_inverse=True, return_counts=True)
    crowded = int(copies.max()) > NEIGHBOURS
    if crowded and len(points) < 3:
        return np.ones(len(cloud), dtype=bool), ""
    remark = f"{int(copies.max())} points coincide: neighbours were counted among distinct points" if crowded else ""
    if not crowded:
        del points, index
        return factors(cloud) <= _LIMIT, remark
    return (factors(points) <= _LIMIT)[index.reshape(-1)], remark


def factors(points: Array) -> Array:
    """The local outlier factor of every point (Breunig et al. 2000), as scikit-learn's LocalOutlierFactor has it.

    That one takes 0.3 s to import, and holds six tables of 20 numbers, a kilobyte per point; this one holds a table of
    32-bit places, 80 bytes. With k neighbours b of a and r_k(b) the distance of b to its own k-th one: the density of a
    is 1 / mean_b max(r_k(b), ‖a − b‖), and its factor the mean density of its neighbours in units of its own. Which of
    several points at the distance r_k(a) is the k-th neighbour is up to the tree, here as there.
    """
    if len(points) > _AT_ONCE:  # points of a strip one after the other find their neighbours in the cache
        order = _by_strips(points)
        found = np.empty(len(points))
        found[order] = _factors(points[order])
        return found
    return _factors(points)


def _by_strips(points: Array) -> Array:
    """An order in which neighbours come close to each other: strips of x of equally many points, each along y."""
    strips = max(1, int(np.sqrt(len(points)) / 8))
    strip = np.empty(len(points), dtype=np.int64)
    strip[np.argsort(points[:, 0], kind="stable")] = np.arange(len(points)) * strips // len(points)
    return np.lexsort((points[:, 1], strip))


def _factors(points: Array) -> Array:
    count = min(NEIGHBOURS, len(points) - 1)
    tree = KDTree(points)
    pieces = [slice(start, start + _AT_ONCE) for start in range(0, len(points), _AT_ONCE)]
    near, reach = np.empty((len(points), count), dtype=np.int32), np.empty(len(points))
    for piece in pieces:
        distances, places = tree.query(points[piece], count + 1)
        distances, near[piece] = _without_itself(distances, places, piece.start)
        reach[piece] = distances[:, -1]
    density = np.empty(len(points))
    for piece in pieces:
        apart = np.sqrt(np.square(points[near[piece]] - points[piece, None]).sum(-1))
        density[piece] = 1 / (np.maximum(apart, reach[near[piece]]).mean(1) + 1e-10)  # points that coincide
    return np.concatenate([density[near[piece]].mean(1) / density[piece] for piece in pieces])


def _without_itself(distances: Array, places: Array, start: int) -> tuple[Array, Array]:
    """The neighbours of points without the points themselves, which are among their own nearest.

    A point with more duplicates than neighbours may not be among them: then the first duplicate is dropped.
    """
    others = places != np.arange(start, start + len(places))[:, None]
    others[others.all(1), 0] = False
    shape = len(places), places.shape[1] - 1
    return distances[others].reshape(shape), places[others].reshape(shape)
