"""Pictures of the loss surface as numbers: loss and accuracy along one or two directions through a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spiritlevel.arguments import checked
from spiritlevel.binding.batches import Batches
from spiritlevel.binding.context import Context
from spiritlevel.binding.modules import unwrapped
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.points import at_points, points_at_once
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Reading
from spiritlevel.binding.rewrites import by_channel, normalised
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.estimators import eigenvalues
from spiritlevel.operators.averaging import activation_bytes
from spiritlevel.operators.matrices import hessian_in
from spiritlevel.operators.products import hessian_product, loss_gradient
from spiritlevel.results import Landscape
from spiritlevel.samples.margins import share_right

__all__ = ["landscape"]

_NAMED = ("eigenvectors", "random")
_AT_ONCE = 512  # samples in a forward pass, unless the caller says so


@torch.inference_mode(False)  # it adds up in place, which tensors of that mode do not allow outside it
@checked
def landscape(
    model: nn.Module,
    data: Any,
    *,
    directions: Any = "eigenvectors",
    dimensions: int = 1,
    points: int | None = None,
    radius: float | None = None,
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
      statistics of batch norm and other buffers, so that step 1 *is* the other model; beyond the two a running
      variance ends at zero. The result then has the `barrier` between them.

    Exact at every grid point; slope and curvature are exact derivatives; the eigenvectors have a relative residual of
    at most 1e-3, or `notes` says so. Cost: one forward pass over the data a grid point, about 4 gradients a
    direction, and for eigenvectors some 30 Hessian products.

    Args:
        model: any module; it is left as it was.
        data: as in `hessian`.
        directions: see above.
        dimensions: 1 or 2; of two models it is 2.
        points: grid points a direction, odd so that the model is one of them; 41 on a line, 21 on a plane. To another
            model: the points from step 0 to step 1.
        radius: the largest step: 1 for random directions, √(2/|λ₁|) for eigenvectors, where the parabola along the
            first has risen by 1. To another model: how far the path goes on beyond both ends, 0 unless given.
        loss: as in `hessian`, and so are the next four.
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
    if _other_models(directions) and params is not None:
        raise InputError("params= does not go with a path to another model, which moves all parameters; leave it out.")
    return landscape_in(context, directions=directions, dimensions=dimensions, points=points, radius=radius)


def landscape_in(
    context: Context,
    *,
    directions: Any = "eigenvectors",
    dimensions: int = 1,
    points: int | None = None,
    radius: float | None = None,
) -> Landscape:
    """The surface in a context that is bound already; see `landscape`."""
    problem, seed = context.problem, context.seed
    batches = context.batches.cut(context.batch_size if context.batch_size or context.whole else context.fair(_AT_ONCE))
    others = _other_models(directions)
    if others:
        dimensions = len(others)
    _check(dimensions, points, radius, others)
    points = points or (41 if dimensions == 1 else 21)

    notes: tuple[str, ...] = ()
    if others:
        moves = [_path(problem, other) for other in others]
        labels = tuple("to the other model" if dimensions == 1 else f"to model {i + 1}" for i in range(dimensions))
        steps = _path_steps(points, radius or 0.0)
    else:
        if directions == "random":
            generator = torch.Generator().manual_seed(seed)
            moves = [_filter_normalised(problem, generator) for _ in range(dimensions)]
            radius = radius or 1.0
        else:
            moves, radius, notes = _eigenvectors(context, dimensions, radius)
        labels = tuple(f"{directions.removesuffix('s')} {i + 1}" for i in range(dimensions))
        steps = torch.linspace(-radius, radius, points, dtype=torch.float64)
        steps[points // 2] = 0.0

    axes = (steps,) * dimensions
    grid = torch.cartesian_prod(*axes).reshape(-1, dimensions)
    losses, accuracies = _evaluate(context, batches, moves, grid)
    shape = (len(steps),) * dimensions
    losses, accuracies = losses.reshape(shape), None if accuracies is None else accuracies.reshape(shape)
    slopes, curvatures = _derivatives(context, batches, moves)
    barrier = None
    if others and dimensions == 1:
        inside = (steps >= 0) & (steps <= 1)
        path, t = losses[inside], steps[inside]
        barrier = float((path - (1 - t) * path[0] - t * path[-1]).max())
    return Landscape(
        directions=labels,
        steps=axes,
        losses=losses,
        accuracies=accuracies,
        value=float(losses[(grid == 0).all(1).reshape(shape)][0]),
        slopes=slopes,
        curvatures=curvatures,
        lengths=torch.tensor([_inner(move, move) for move in moves], dtype=torch.float64).sqrt(),
        barrier=barrier,
        samples=context.count,
        loss=problem.loss.name,
        batch_norm=context.batch_norm,
        seed=None if others else seed,
        notes=(*notes, *context.notes),
    )


# ---------------------------------------------------------------- directions


def _other_models(directions: Any) -> list[nn.Module]:
    if isinstance(directions, str):
        if directions not in _NAMED:
            raise unknown_name("kind of directions", directions, _NAMED)
        return []
    models = [directions] if isinstance(directions, nn.Module) else directions
    if not isinstance(models, list | tuple) or not all(isinstance(model, nn.Module) for model in models):
        raise InputError(
            f"directions must be 'eigenvectors', 'random', a model or two models, got {shown(directions)}."
        )
    if len(models) not in (1, 2):
        raise InputError(f"a landscape has one or two directions, got {len(models)} models.")
    return [unwrapped(model) for model in models]


def _check(dimensions: int, points: int | None, radius: float | None, others: list[nn.Module]) -> None:
    if not isinstance(dimensions, int) or dimensions not in (1, 2):
        raise InputError(f"a landscape has dimensions=1 or 2, got {dimensions!r}.")
    if points is not None and (not isinstance(points, int) or points < 3 or (not others and points % 2 == 0)):
        kind, why = ("a", "") if others else ("an odd", ", so that the model is one of them")
        raise InputError(f"landscape needs {kind} whole number of points, at least 3{why}, got {points!r}.")
    if radius is not None and not (math.isfinite(radius) and (radius > 0 or (others and radius == 0))):
        raise InputError(f"landscape needs a positive radius, got {radius}.")


def _path_steps(points: int, beyond: float) -> Tensor:
    """Equal steps that hold 0 and 1, going on beyond both as far as asked."""
    extra = math.floor(beyond * (points - 1) + 1e-9)
    return torch.arange(-extra, points + extra, dtype=torch.float64) / (points - 1)


def towards(problem: Problem, there: Mapping[str, Tensor]) -> Params:
    """Other minus this, for all parameters and for buffers of floating point."""
    here = {**problem.params, **problem.constants}
    for name in {**here, **there}:
        shapes = [tuple(state[name].shape) if name in state else "absent" for state in (here, there)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"the other model must have the same architecture, but {name!r} is {shapes[0]} here and "
                f"{shapes[1]} there."
            )
    move = {}
    for name, tensor in here.items():
        if tensor.is_floating_point():
            goal = there[name].detach().to(tensor)
            move[name] = torch.where(goal == tensor, 0.0, goal - tensor)  # a mask of −∞ stays where it is
    return move


def _path(problem: Problem, other: nn.Module) -> Params:
    move = towards(problem, dict([*other.named_parameters(), *other.named_buffers()]))
    if not any(bool(tensor.any()) for tensor in move.values()):
        raise InputError("the other model has the same parameters as this one; there is no path between them.")
    return move


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


def _eigenvectors(context: Context, count: int, radius: float | None) -> tuple[list[Params], float, tuple[str, ...]]:
    op = hessian_in(context)
    if op.size < count:
        raise InputError(f"a landscape of {count} eigenvectors needs as many parameters, got {op.size}.")
    pairs = eigenvalues(op, k=count, tol=1e-3, seed=context.seed)
    assert pairs.vectors is not None
    signs = pairs.vectors.gather(0, pairs.vectors.abs().argmax(0, keepdim=True)).sign()
    vectors = (pairs.vectors * signs).to(op.device, op.dtype)
    notes = () if pairs.converged else (f"the eigenvectors have not converged: {pairs.reason}",)
    top = abs(float(pairs.values[0]))
    return [op.split(column) for column in vectors.T], radius or (math.sqrt(2 / top) if top else 1.0), notes


# ---------------------------------------------------------------- evaluation


def _inner(a: Params, b: Params) -> float:
    return float(torch.stack([(a[name].double() * b[name].double()).sum() for name in a]).sum())


def _evaluate(
    context: Context, batches: Batches, moves: Sequence[Params], grid: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Mean loss and accuracy at every point of the grid, (points,), float64.

    Some points with one batch are one piece of work: also a single batch that must not be cut is shared by all ranks.
    """
    problem, ranks = context.problem, context.ranks
    losses, correct = torch.zeros(len(grid), dtype=torch.float64), torch.zeros(len(grid), dtype=torch.float64)
    other = torch.zeros(1, dtype=torch.float64)  # batches whose targets are not classes
    with ranks.together(), problem.active(), torch.no_grad():
        start, piece = 0, 0
        for inputs, targets in batches:
            size, at_hand = len(targets), False
            at_once = points_at_once(problem, activation_bytes(context)[1] * size)
            for some in torch.arange(len(grid)).split(min(at_once, -(-len(grid) // ranks.count))):
                piece += 1
                if not ranks.takes(piece - 1):
                    continue
                if not at_hand:
                    inputs, targets = problem.place(inputs, targets)
                    problem.checked(problem.outputs(problem.params, inputs), inputs, targets, start)
                    at_hand = True
                points = _points(problem, moves, grid[some])
                found, values = _outputs_and_losses(problem, points, inputs, targets, at_once)
                losses[some] += values.double().flatten(1).sum(1).cpu()
                right = _correct(problem, found, targets)
                if right is None:
                    other += 1
                else:
                    correct[some] += right.cpu()
            start += size
    ranks.add([losses, correct, other])
    return losses / context.count, None if other else correct / context.count


def _outputs_and_losses(
    problem: Problem, points: Params, inputs: Any, targets: Tensor, at_once: int
) -> tuple[Tensor, Tensor]:
    """The outputs and the losses of a batch at every point, (points, N, …) and (points, N)."""
    outputs = at_points(problem, lambda point: problem.outputs(point, inputs), points, at_once)

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
    """How many samples each of (points, N, …) outputs classifies correctly; of many decisions their shares.

    `None` if there are no classes.
    """
    try:
        shares = [share_right(problem.loss.decisions(each, targets)).sum() for each in outputs]
    except InputError:
        return None
    return torch.stack(shares).double().cpu()


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


def _derivatives(context: Context, batches: Batches, moves: Sequence[Params]) -> tuple[Tensor, Tensor]:
    """First derivatives (d,) and second derivatives (d, d) of the mean loss along the directions, float64."""
    problem, ranks, count = context.problem, context.ranks, len(moves)
    slopes, curvatures = torch.zeros(count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    here = {name: tensor for name, tensor in {**problem.params, **problem.constants}.items() if name in moves[0]}
    with ranks.together(), problem.active(), MovingStatistics():
        for _, inputs, targets in context.mine(batches):
            gradient = loss_gradient(problem, here, inputs, targets)
            for i, move in enumerate(moves):
                slopes[i] += _inner(gradient, move)
                product = hessian_product(problem, move, here, inputs, targets)
                for j, other in enumerate(moves):
                    curvatures[i, j] += _inner(other, {name: part.detach() for name, part in product.items()})
    ranks.add([slopes, curvatures])
    return slopes / context.count, (curvatures + curvatures.T) / (2 * context.count)
