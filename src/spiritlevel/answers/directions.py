"""Directions through a model: eigenvectors, filter-normalised draws, paths to other models, trajectories."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.binding.context import Context
from spiritlevel.binding.modules import state_of, unwrapped
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.estimators import Operator, eigenvalues
from spiritlevel.operators.matrices import hessian_in

_NAMED = ("eigenvectors", "random")
_ROOM = 0.15  # of the extent of a trajectory, left free on each side


@dataclass(frozen=True)
class Directions:
    """Where a landscape goes: one or two moves of the parameters with their names and steps.

    `track` (checkpoints, d) has the places of a training trajectory in the plane, and `explained` the share of their
    squared distances from the model that lies along each direction. `to_model` is true for a path whose step 1 is
    another model.
    """

    moves: list[Params]
    labels: tuple[str, ...]
    steps: tuple[Tensor, ...]
    notes: tuple[str, ...] = ()
    to_model: bool = False
    track: Tensor | None = None
    explained: tuple[float, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What the caller asked for, after it has been checked; `find` makes it into directions."""

    kind: str  # "eigenvectors", "random", "models" or "trajectory"
    others: Sequence[nn.Module | Mapping[str, Tensor]]
    dimensions: int
    points: int
    radius: float | None

    def find(self, context: Context, watched: Callable[[Operator], Operator] | None = None) -> Directions:
        """The directions themselves, and the steps along them; `watched` is put around the Hessian."""
        ways: dict[str, Callable[[Context, Wanted], Directions]] = {
            "models": _to_models,
            "trajectory": _along,
            "random": _random,
            "eigenvectors": functools.partial(_eigenvectors, watched=watched),
        }
        return ways[self.kind](context, self)


def wanted(
    directions: Any, trajectory: Any, dimensions: int | None, points: int | None, radius: float | None
) -> Wanted:
    """The arguments of `landscape`, checked."""
    others = _models(directions, "directions", "'eigenvectors', 'random', a model or two models")
    kind = "models" if others else str(directions)
    if trajectory is not None:
        if others or directions != "eigenvectors":
            raise InputError("trajectory= chooses the directions itself; leave directions= out.")
        kind = "trajectory"
        others = _models(trajectory, kind, "the checkpoints of a training run, models or state dicts")
    elif len(others) > 2:
        raise InputError(f"a landscape takes one or two directions, got {len(others)} models.")
    if kind == "models" and dimensions not in (None, len(others)):
        raise InputError(
            f"a landscape to other models has a direction for each of them, here {len(others)}, and dimensions= asks "
            f"for {dimensions!r}; leave it out."
        )
    dimensions = len(others) if kind == "models" else dimensions or (2 if kind == "trajectory" else 1)
    if not isinstance(dimensions, int) or dimensions not in (1, 2):
        raise InputError(f"a landscape takes dimensions=1 or 2, got {dimensions!r}.")
    _check_points(points, odd=kind != "models" and not (kind == "trajectory" and radius is None))
    if radius is not None and not (math.isfinite(radius) and (radius > 0 or (kind == "models" and radius == 0))):
        raise InputError(f"landscape needs a positive radius, got {radius}.")
    return Wanted(kind, others, dimensions, points or (41 if dimensions == 1 else 21), radius)


def _check_points(points: int | None, odd: bool) -> None:
    """Between −radius and radius, an even number of equal steps would leave out the model or reach beyond."""
    if points is not None and (not isinstance(points, int) or points < 3 or (odd and points % 2 == 0)):
        article, why = ("an odd", ", so that the model is the one in the middle") if odd else ("a", "")
        way = f"; take {points + 1}" if odd and isinstance(points, int) and points > 3 else ""
        raise InputError(f"landscape needs {article} whole number of points, at least 3{why}, got {points!r}{way}.")


def _models(given: Any, name: str, expected: str) -> list[nn.Module | Mapping[str, Tensor]]:
    """A list of models or state dicts, empty where directions are given by name."""
    if isinstance(given, str):
        if given not in _NAMED or name != "directions":
            raise unknown_name("kind of directions", given, _NAMED)
        return []
    alone = isinstance(given, nn.Module) or _is_state(given)
    found = [given] if alone else list(given) if isinstance(given, list | tuple) else []
    if not found or not all(isinstance(each, nn.Module) or _is_state(each) for each in found):
        raise InputError(f"{name} must be {expected}, got {shown(given)}.")
    return [unwrapped(each) if isinstance(each, nn.Module) else each for each in found]


def _is_state(given: Any) -> bool:
    return isinstance(given, Mapping) and bool(given) and all(isinstance(each, Tensor) for each in given.values())


def inner(a: Params, b: Params) -> float:
    """The inner product of two moves."""
    return float(torch.stack([(a[name].double() * b[name].double()).sum() for name in a]).sum())


# ---------------------------------------------------------------- to other models


def _to_models(context: Context, asked: Wanted) -> Directions:
    moves = [_towards(context.problem, other) for other in asked.others]
    count = len(moves)
    labels = tuple("to the other model" if count == 1 else f"to model {i + 1}" for i in range(count))
    steps = _path_steps(asked.points, asked.radius or 0.0)
    return Directions(moves, labels, (steps,) * count, to_model=count == 1)


def _path_steps(points: int, beyond: float) -> Tensor:
    """Equal steps that include 0 and 1 and continue beyond both as far as asked."""
    extra = math.floor(beyond * (points - 1) + 1e-9)
    return torch.arange(-extra, points + extra, dtype=torch.float64) / (points - 1)


def _towards(problem: Problem, other: nn.Module | Mapping[str, Tensor]) -> Params:
    """Other minus this, for all parameters and floating-point buffers; for a state dict, those that it holds."""
    move = difference(problem, other)
    if not any(bool(tensor.any()) for tensor in move.values()):
        raise InputError("the other model has the same parameters as this one; there is no path between them.")
    return move


def difference(problem: Problem, other: nn.Module | Mapping[str, Tensor]) -> Params:
    """Other minus this, which may be zero; see `_towards`."""
    here = {**problem.params, **problem.constants}
    there = dict(other) if isinstance(other, Mapping) else dict(state_of(other))
    unsaved: set[str] = set()
    if isinstance(other, Mapping):  # it holds tied parameters twice, and may lack what was not trained
        twice = problem.model.state_dict().keys() - here.keys()
        there = {name: tensor for name, tensor in there.items() if name not in twice}
        unsaved = problem.constants.keys() - there.keys()
    for name in {**here, **there}:
        shapes = [tuple(state[name].shape) if name in state else "absent" for state in (here, there)]
        if shapes[0] != shapes[1] and name not in unsaved:
            raise InputError(
                f"the other model must have the same architecture, but {name!r} is {shapes[0]} here and "
                f"{shapes[1]} there."
            )
    move = {}
    for name, tensor in here.items():
        if tensor.is_floating_point():
            goal = tensor if name in unsaved else there[name].detach().to(tensor)
            move[name] = torch.where(goal == tensor, 0.0, goal - tensor)  # a mask of −∞ stays where it is
    return move


# ---------------------------------------------------------------- along a training


def _along(context: Context, asked: Wanted) -> Directions:
    """The plane, or line, through the model that comes nearest to the checkpoints.

    Rows of M are the checkpoints minus the model. Its right singular vectors for the largest singular values span the
    subspace through the model with the least sum of squared distances to the checkpoints; they are Mᵀu/√λ for
    eigenpairs (λ, u) of the small matrix MMᵀ. Buffers follow with the same combination, but do not count.
    """
    problem, count = context.problem, asked.dimensions
    rows = [difference(problem, other) for other in asked.others]
    trained = [{name: row[name] for name in problem.params if name in row} for row in rows]
    gram = torch.tensor([[inner(a, b) for b in trained] for a in trained], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if not len(values) >= count or not float(values[count - 1]) > 1e-12 * float(values[0]):
        raise InputError(
            f"a trajectory of {count} directions needs checkpoints that differ from the model in as many directions, "
            f"got {len(rows)}: give more of them, or dimensions=1."
        )
    weights = vectors[:, :count] / values[:count].sqrt()
    weights = weights * (weights.T @ gram)[:, 0].sign().masked_fill_((weights.T @ gram)[:, 0] == 0, 1.0)
    moves = [
        {
            name: sum(
                (float(w) * row[name] for w, row in zip(column, rows, strict=True)), start=torch.zeros_like(first)
            )
            for name, first in rows[0].items()
        }
        for column in weights.T
    ]
    track = gram @ weights
    if asked.radius is None:
        steps = tuple(_around(track[:, k], asked.points) for k in range(count))
    else:
        steps = (_centred(asked.points, asked.radius),) * count
    labels = tuple(f"principal direction {k + 1}" for k in range(count))
    explained = tuple((values[:count] / values.sum()).tolist())
    return Directions(moves, labels, steps, track=track, explained=explained)


def _around(places: Tensor, points: int) -> Tensor:
    """Equal steps that include 0 and reach beyond all places."""
    low, high = min(0.0, float(places.min())), max(0.0, float(places.max()))
    room = _ROOM * (high - low)
    low, high = low - room, high + room
    size = (high - low) / (points - 1)
    if not math.isclose(low / size, round(low / size), abs_tol=1e-9):  # a little wider, so that 0 is a step
        size = (high - low) / (points - 2)
    return (torch.arange(points, dtype=torch.float64) + math.floor(low / size + 1e-9)) * size


# ---------------------------------------------------------------- around the model


def _centred(points: int, radius: float) -> Tensor:
    steps = torch.linspace(-radius, radius, points, dtype=torch.float64)
    steps[points // 2] = 0.0
    return steps


def _random(context: Context, asked: Wanted) -> Directions:
    generator = torch.Generator().manual_seed(context.seed)
    moves = [_filter_normalised(context.problem, generator) for _ in range(asked.dimensions)]
    labels = tuple(f"random {i + 1}" for i in range(asked.dimensions))
    return Directions(moves, labels, (_centred(asked.points, asked.radius or 1.0),) * asked.dimensions)


def _filter_normalised(problem: Problem, generator: torch.Generator) -> Params:
    """A Gaussian direction whose filters have the norms of the model's; zero for biases and other vectors."""
    move: Params = {}
    for name, tensor in problem.params.items():
        draw = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.ndim < 2:
            draw.zero_()
        else:
            norms = tensor.double().cpu().flatten(1).norm(dim=1) / draw.flatten(1).norm(dim=1)
            draw *= norms.reshape(-1, *[1] * (tensor.ndim - 1))
        move[name] = draw.to(tensor)
    if not any(bool(tensor.any()) for tensor in move.values()):
        raise InputError("random directions move only weights with filters, and none of the chosen parameters has any.")
    return move


def _eigenvectors(context: Context, asked: Wanted, watched: Callable[[Operator], Operator] | None) -> Directions:
    op, count = hessian_in(context), asked.dimensions
    if op.size < count:
        raise InputError(f"a landscape of {count} eigenvectors needs as many parameters, got {op.size}.")
    pairs = eigenvalues(watched(op) if watched else op, k=count, tol=1e-3, seed=context.seed)
    assert pairs.vectors is not None
    signs = pairs.vectors.gather(0, pairs.vectors.abs().argmax(0, keepdim=True)).sign()
    vectors = (pairs.vectors * signs).to(op.device, op.dtype)
    notes = () if pairs.converged else (f"the eigenvectors have not converged: {pairs.reason}",)
    top = abs(float(pairs.values[0]))
    radius = asked.radius or (math.sqrt(2 / top) if top else 1.0)
    labels = tuple(f"eigenvector {i + 1}" for i in range(count))
    return Directions(
        [op.split(column) for column in vectors.T], labels, (_centred(asked.points, radius),) * count, notes
    )
