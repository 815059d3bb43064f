"""Pictures of the loss surface as numbers: loss and accuracy along one or two directions through a model."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spiritlevel.answers.directions import Directions, Wanted, difference, inner, wanted
from spiritlevel.answers.keeping import Keeper, Progress, fingerprint_of, remembered
from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Batches, Fingerprint, sliced
from spiritlevel.binding.context import Context
from spiritlevel.binding.graphs import Rows
from spiritlevel.binding.losses import Unit
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.points import at_points, points_at_once, samples_at_once
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Reading
from spiritlevel.binding.rewrites import by_channel, normalised
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.operators.footprint import activation_bytes
from spiritlevel.operators.products import hessian_product, loss_gradient
from spiritlevel.results import Landscape
from spiritlevel.samples.margins import share_right
from spiritlevel.storage import digest

__all__ = ["landscape"]

Watched = Callable[[Operator], Operator]

_AT_ONCE = 512  # samples in a piece of work, unless the caller says otherwise
_OUTPUTS = 2**21  # outputs whose decisions are looked at together
_FEW = 16  # samples whose losses tell one loss from another


@torch.inference_mode(False)  # it adds up in place, which tensors of that mode do not allow outside it
@checked
def landscape(
    model: nn.Module,
    data: Any,
    *,
    directions: Any = "eigenvectors",
    trajectory: Any = None,
    dimensions: int | None = None,
    points: int | None = None,
    radius: float | None = None,
    keep: str | Path | None = None,
    progress: Progress | None = None,
    loss: Any = "cross_entropy",
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Landscape:
    """Loss and accuracy at θ + t·d₁ (+ s·d₂), with the parabola that slope and curvature at θ predict.

    Directions:

    - "eigenvectors": the unit eigenvectors of the Hessian's largest eigenvalues, the largest component positive.
    - "random": Gaussian directions, each filter (or row) of a weight scaled to the norm of that filter of the model,
      and zero for biases and other vectors, so that the picture does not change when a ReLU layer is rescaled.
    - another model of the same architecture, or a pair of them: d = θ' − θ for all parameters, and for the running
      statistics of batch norm and other buffers, so that step 1 *is* the other model; beyond the two, a running
      variance stops at zero. The result then has the `barrier` between them.
    - with `trajectory`, the checkpoints of a training: the principal directions of θᵢ − θ, the plane through the model
      that comes nearest to them all. The result then has their places in the plane, `track`, and how much of their
      distances from the model it `explained`.

    Exact at every grid point, with the standard deviation of a sample's loss beside it (`spread`); slope and curvature
    are exact derivatives; the eigenvectors have a relative residual of at most 1e-3, or `notes` says so. Cost: one
    forward pass over the data per grid point, about 4 gradients per direction, and for eigenvectors some 30 Hessian
    products.

    Args:
        model: any module; it is left as it was.
        data: as in `hessian`.
        directions: see above.
        trajectory: models or state dicts in the order of the training; the model itself need not be among them.
        dimensions: 1 or 2; by default 1, and 2 for two models or a trajectory.
        points: grid points per direction, odd so that the model is the one in the middle; 41 on a line, 21 on a plane.
            To another model: the points from step 0 to step 1, of any number. Along a whole trajectory: any number.
        radius: the largest step, to both sides: 1 for random directions, √(2/|λ₁|) for eigenvectors, where the parabola
            along the first has risen by 1. To another model: how far the path continues beyond both ends, 0 unless
            given. Along a trajectory: all of it unless given, with some room around it.
        keep: a folder in which the work so far is kept every few seconds. After a kill the same call resumes there
            and ends at the same numbers, bit for bit; when all is done it returns at once. A call for another surface
            is refused. The search for eigenvectors keeps each product that takes more than a second, as large as the
            parameters, until the search is over.
        progress: called with (what, done, total) while it works; `total` is 0 where it is not known.
        loss: as in `hessian`, like the next four.
        params: the parameters that move; not for a path to another model, which moves them all.
        batch_norm: "eval" or "batch".
        batch_size: how many samples to take at once.
        memory: for the eigenvectors' Hessian.
        group: a `torch.distributed` group whose ranks all make this same call and share the work; as in `hessian`.
        seed: of random directions and of the eigenvectors' start.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    References: Li, Xu, Taylor, Studer & Goldstein, NeurIPS 2018, arXiv:1712.09913 (filter normalisation); Frankle,
    Dziugaite, Roy & Carbin, ICML 2020, arXiv:1912.05671 (barriers; theirs subtracts the mean of both ends, here the
    line between them is subtracted, as in Entezari et al., ICLR 2022, arXiv:2110.06296).

    >>> net = nn.Linear(1, 1, bias=False).double()  # whatever its weight is
    >>> data = torch.tensor([[2.0]]), torch.tensor([[0.0]])
    >>> line = landscape(net, data, loss="squared_error", points=5, radius=1.0)  # ½(2w)², curvature 4
    >>> torch.allclose(line.losses, line.quadratic), round(float(line.curvatures), 6)
    (True, 4.0)
    """
    context = Context(
        model,
        data,
        loss=loss,
        params=params,
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        group=group,
        seed=seed,
        ordered=False,
        **reading,
    )
    asked = wanted(directions, trajectory, dimensions, points, radius)
    if asked.others and params is not None:
        raise InputError("params= does not go with a path to another model, which moves all parameters; leave it out.")
    if keep is not None and group is not None:
        raise InputError("keep= is for one process; leave it out with group=.")
    keeper = None if keep is None else Keeper(keep, _key(context, asked))
    return landscape_in(context, asked, keeper=keeper, progress=progress)


def landscape_in(
    context: Context, asked: Wanted, *, keeper: Keeper | None = None, progress: Progress | None = None
) -> Landscape:
    """The surface in a context that is already bound; see `landscape`."""
    if keeper is not None and (finished := keeper.result(Landscape)) is not None:
        return finished
    batches = context.batches.cut(context.batch_size if context.batch_size or context.whole else context.fair(_AT_ONCE))
    watched = functools.partial(remembered, keeper=keeper, progress=progress)
    progress = progress or _silent
    there = asked.find(context, watched) if keeper is None else _kept_directions(keeper, context, asked, watched)
    grid = torch.cartesian_prod(*there.steps).reshape(-1, len(there.steps))
    shape = tuple(len(steps) for steps in there.steps)
    sums = _evaluate(context, batches, there.moves, grid, keeper, progress)
    losses = (sums.losses / context.count).reshape(shape)
    slopes, curvatures = _derivatives(context, batches, there.moves, keeper, progress)
    barrier = None
    if there.to_model:
        inside = (there.steps[0] >= 0) & (there.steps[0] <= 1)
        path, t = losses[inside], there.steps[0][inside]
        barrier = float((path - (1 - t) * path[0] - t * path[-1]).max())
    only = (f"the directions are in {context.chosen}",) if context.chosen else ()
    found = Landscape(
        directions=there.labels,
        steps=there.steps,
        losses=losses,
        accuracies=None if sums.other else (sums.correct / context.count).reshape(shape),
        value=float(losses[(grid == 0).all(1).reshape(shape)][0]),
        slopes=slopes,
        curvatures=curvatures,
        lengths=torch.tensor([inner(move, move) for move in there.moves], dtype=torch.float64).sqrt(),
        barrier=barrier,
        samples=context.count,
        loss=context.problem.loss.name,
        batch_norm=context.batch_norm,
        seed=None if asked.others else context.seed,
        spread=None if context.coupling else sums.spread(context.count, shape),
        track=there.track,
        explained=there.explained,
        notes=(*there.notes, *only, *context.notes),
    )
    if keeper is not None:
        keeper.finish(found)
    return found


# ---------------------------------------------------------------- what a kill must not cost


def _key(context: Context, asked: Wanted) -> str:
    """What distinguishes this surface from any other: everything that determines its numbers.

    A loss and the code of a model have no name that tells their settings; what they make of a few samples does. To four
    digits, since the last ones may depend on the number of threads.
    """
    problem = context.problem
    state = {**problem.params, **problem.constants}
    few, their = context.first(_FEW)
    with problem.active(), torch.no_grad():
        outputs = problem.outputs(problem.params, few)
        problem.checked(outputs, few, their)
        values = problem.loss.values(outputs, their).flatten().tolist()
    data = Fingerprint()
    sizes = []
    for inputs, targets in context.batches:
        data.update(inputs, targets)
        sizes.append(len(targets))
    others = [fingerprint_of(dict(difference(problem, other))) for other in asked.others]
    return digest(
        {
            "model": fingerprint_of(state),
            "data": str(data),
            "batches": sizes,
            "at once": context.batch_size,
            "others": others,
            "asked": [asked.kind, asked.dimensions, asked.points, asked.radius],
            "moving": list(problem.params),
            "loss": [problem.loss.name, *(f"{value:.4g}" for value in values)],
            "batch norm": context.batch_norm,
            "seed": context.seed,
        }
    )


def _kept_directions(keeper: Keeper, context: Context, asked: Wanted, watched: Watched) -> Directions:
    """The directions of an earlier run, since eigenvectors found anew may differ in their last digits."""
    kept = keeper.read("directions")
    if kept is None:
        found = asked.find(context, watched)
        tensors = {f"move {i} {name}": part for i, move in enumerate(found.moves) for name, part in move.items()}
        tensors |= {f"steps {i}": steps for i, steps in enumerate(found.steps)}
        tensors |= {} if found.track is None else {"track": found.track}
        words = [found.labels, found.notes, found.to_model, found.explained]
        keeper.write("directions", tensors, json.dumps(words))
        keeper.forget("product *")
        return found
    tensors, text = kept
    labels, notes, to_model, explained = json.loads(text)
    here = {**context.problem.params, **context.problem.constants}
    moves: list[Params] = [
        {name: tensors[f"move {i} {name}"].to(here[name]) for name in here if f"move {i} {name}" in tensors}
        for i in range(len(labels))
    ]
    steps = tuple(tensors[f"steps {i}"] for i in range(len(labels)))
    return Directions(moves, tuple(labels), steps, tuple(notes), to_model, tensors.get("track"), tuple(explained))


# ---------------------------------------------------------------- evaluation


@dataclass
class _Sums:
    """Sums over samples at every point of the grid, float64; `done` counts the pieces of work that are in them."""

    losses: Tensor
    squares: Tensor
    correct: Tensor
    other: Tensor  # how many batches had targets that are not classes
    done: Tensor

    @classmethod
    def none(cls, points: int) -> _Sums:
        losses, squares, correct = (torch.zeros(points, dtype=torch.float64) for _ in range(3))
        other, done = (torch.zeros(1, dtype=torch.float64) for _ in range(2))
        return cls(losses, squares, correct, other, done)

    def spread(self, count: int, shape: tuple[int, ...]) -> Tensor | None:
        """The standard deviation of a sample's loss; where rounding hides it, 0."""
        if count < 2:
            return None
        variance = (self.squares - self.losses.square() / count) / (count - 1)
        return torch.where(variance.isnan(), variance, variance.clamp(min=0)).sqrt().reshape(shape)


def _evaluate(
    context: Context,
    batches: Batches,
    moves: Sequence[Params],
    grid: Tensor,
    keeper: Keeper | None,
    progress: Progress,
) -> _Sums:
    """Sums of loss, its square and what is right at every point of the grid.

    The work comes in pieces, some points on one batch, always in the same order: a sum that resumes where a killed
    run left it ends at the same number, bit for bit. Even a single batch that must not be cut is shared by all ranks.
    """
    problem, ranks = context.problem, context.ranks
    sums, piece = _Sums.none(len(grid)), 0
    if keeper is not None and (kept := keeper.read("sums")) is not None:
        sums = _Sums(**kept[0])
    activation, rounds = activation_bytes(context)[1], sum(1 for _ in batches)
    with ranks.together(), problem.active(), torch.no_grad():
        start, done = 0, 0
        for inputs, targets in batches:
            size, at_hand = len(targets), False
            few = min(size, _samples_at_once(context, inputs))
            at_once = points_at_once(problem, activation * few)
            for some in torch.arange(len(grid)).split(min(at_once, -(-len(grid) // ranks.count))):
                piece += 1
                done += len(some)
                if piece <= int(sums.done) or not ranks.takes(piece - 1):
                    continue
                if not at_hand:
                    inputs, targets = problem.place(inputs, targets)
                    pieces = [sliced(inputs, at, at + few) for at in range(0, size, few)] if few < size else [inputs]
                    problem.checked(_outputs(problem, problem.params, pieces), inputs, targets, start)
                    at_hand = True
                progress("points of the surface", (done - len(some)) // rounds, len(grid))
                points = _points(problem, moves, grid[some])
                found, values = _outputs_and_losses(problem, points, pieces, targets, at_once)
                values = values.double().flatten(1)
                sums.losses[some] += values.sum(1).cpu()
                sums.squares[some] += values.square().sum(1).cpu()
                right = _correct(problem, found, targets)
                if right is None:
                    sums.other += 1
                else:
                    sums.correct[some] += right.cpu()
                sums.done.fill_(piece)
                if keeper is not None:
                    keeper.now_and_then("sums", vars(sums))
            start += size
    if keeper is not None:
        keeper.write("sums", vars(sums))
    ranks.add([sums.losses, sums.squares, sums.correct, sums.other])
    return sums


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def _samples_at_once(context: Context, inputs: Any) -> int:
    """How many samples of a batch a forward pass takes; all of those that share one, as nodes and tokens do."""
    if context.whole or isinstance(inputs, Rows | Unit):
        return sys.maxsize
    return samples_at_once(context.problem, activation_bytes(context)[1])


def _outputs(problem: Problem, point: Params, pieces: Sequence[Any]) -> Tensor:
    """The outputs of a batch that is given in pieces."""
    found = [problem.outputs(point, piece) for piece in pieces]
    return found[0] if len(found) == 1 else torch.cat(found)


def _outputs_and_losses(
    problem: Problem, points: Params, pieces: Sequence[Any], targets: Tensor, at_once: int
) -> tuple[Tensor, Tensor]:
    """The outputs and the losses of a batch at every point, (points, N, …) and (points, N)."""
    outputs = at_points(problem, lambda point: _outputs(problem, point, pieces), points, at_once)

    def losses(point: Params) -> Tensor:
        return problem.loss.values(point["outputs"], targets)

    return outputs, at_points(problem, losses, {"outputs": outputs}, at_once)


def _points(problem: Problem, moves: Sequence[Params], grid: Tensor) -> Params:
    """What moves, at each of these points of the grid: tensors (points, …)."""
    here = {**problem.params, **problem.constants}
    points = {}
    for name, tensor in here.items():
        if name in moves[0]:
            steps = grid.to(tensor).reshape(*grid.shape, *[1] * tensor.ndim)
            points[name] = sum((steps[:, i] * move[name] for i, move in enumerate(moves)), start=tensor)
            if name.endswith("running_var"):  # beyond the ends of a path it could fall below zero
                points[name] = points[name].clamp(min=0)
    return points


def _correct(problem: Problem, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """How many samples each of (points, N, …) outputs classifies correctly; shares for samples with many decisions.

    `None` if there are no classes.
    """
    found = []
    for some in outputs.split(max(1, _OUTPUTS // outputs[0].numel())):
        repeated = targets.repeat(len(some), *[1] * (targets.ndim - 1))
        try:
            shares = share_right(problem.loss.decisions(some.flatten(0, 1), repeated))
        except InputError:
            return None
        found.append(shares.reshape(len(some), -1).sum(1))
    return torch.cat(found).cpu()


class MovingStatistics(TorchFunctionMode):
    """Norms by running statistics written out, because the built-in ones have no derivative in these."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm or func is F.instance_norm:
            call = inspect.signature(func).bind(*args, **kwargs)
            call.apply_defaults()
            input, *of_channels, by_input, _, eps = call.arguments.values()
            if not by_input:
                shaped: list[Any] = [None if item is None else by_channel(item, input) for item in of_channels]
                mean, variance, weight, bias = shaped
                return normalised(input - mean, variance, weight, bias, eps)
        return func(*args, **kwargs)


def _derivatives(
    context: Context, batches: Batches, moves: Sequence[Params], keeper: Keeper | None, progress: Progress
) -> tuple[Tensor, Tensor]:
    """First derivatives (d,) and second derivatives (d, d) of the mean loss along the directions, float64."""
    problem, ranks, count = context.problem, context.ranks, len(moves)
    here = {name: tensor for name, tensor in {**problem.params, **problem.constants}.items() if name in moves[0]}
    sums = {"slopes": torch.zeros(count, dtype=torch.float64), "done": torch.zeros(1, dtype=torch.float64)}
    sums["curvatures"] = torch.zeros(count, count, dtype=torch.float64)
    if keeper is not None and (kept := keeper.read("derivatives")) is not None:
        sums = kept[0]
    if not context.batch_size:
        few = _samples_at_once(context, next(iter(batches))[0])
        batches = batches.cut(context.fair(few)) if few < _AT_ONCE else batches
    with ranks.together(), problem.active(), MovingStatistics():
        for number, (start, inputs, targets) in enumerate(context.mine(batches), 1):
            if number <= int(sums["done"]):
                continue
            progress("slope and curvature, samples", start, context.count)
            gradient = loss_gradient(problem, here, inputs, targets)
            for i, move in enumerate(moves):
                sums["slopes"][i] += inner(gradient, move)
                product = hessian_product(problem, move, here, inputs, targets)
                for j, other in enumerate(moves):
                    part = inner(other, {name: part.detach() for name, part in product.items()})
                    sums["curvatures"][i, j] += part
            sums["done"].fill_(number)
            if keeper is not None:
                keeper.now_and_then("derivatives", sums)
    slopes, curvatures = sums["slopes"], sums["curvatures"]
    ranks.add([slopes, curvatures])
    return slopes / context.count, (curvatures + curvatures.T) / (2 * context.count)
