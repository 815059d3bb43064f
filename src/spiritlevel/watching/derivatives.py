"""Are the derivatives that autograd returns those of the forward pass? One finite difference per call shows.

A tensor hook, a gradient reversal, a straight-through rounding or `scale_grad_by_freq` give the gradient of something
other than the outputs; some operations have a wrong forward derivative (`scatter_reduce` with "prod" returns 0 in
torch 2.13). What is computed from such derivatives looks like curvature but is not. So every method first
compares first derivatives with differences of the outputs, and second ones with differences of the gradient, along one
random direction, on a few samples and in float64 if the model allows it.

A kink must not look like a fault. The comparison is made where no value sits exactly on one: at the model's own
parameters if none is seen there and derivatives and differences agree, at a point nearby otherwise. The step is so
small that hardly any value crosses a kink, at first so small that none of a million does; and a fault is only called
one if differences of two step sizes agree with each other, which a kink between them would prevent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spiritlevel.binding.batches import resized
from spiritlevel.binding.coupling import usual_size
from spiritlevel.binding.losses import CallableLoss
from spiritlevel.binding.parameters import Params, along, as_leaves, in_precision
from spiritlevel.binding.problem import LARGE, Problem
from spiritlevel.binding.tables import few_rows
from spiritlevel.errors import InputError, first_line
from spiritlevel.watching.operations import Kink, aten_name, dispatched
from spiritlevel.watching.watchers import DispatchWatch, FunctionWatch

_STEPS = (
    1e-9,
    1e-7,
    1e-8,
)  # of differences in float64, one per try: fewer kinks are crossed, or less is lost to rounding
VERY_LARGE = 10**7  # from this many parameters, one sample must suffice (from LARGE, two),
_HUGE = 10**8  # and from this many, a copy in float64 is too much
_LONG = 256  # from this many positions of a sequence, a quarter of them must suffice, except for gradients
_SEEN = 2**20  # numbers of a tensor whose second derivatives are compared

Verdicts = dict[str, bool | None]
"""Whether the derivatives of one kind are right: "reverse", "forward", or "second"; `None` if undecided."""


def check_derivatives(problem: Problem, inputs: Any, targets: Tensor, *, twice: bool, forward: bool = True) -> float:
    """Raise `InputError` if autograd's derivatives in the parameters are not those of the forward pass.

    Returns the share of the samples looked at that sit on a kink, where they have no Hessian, only one on either side:
    some ReLU-like function is given exactly 0 there but not on either side, and the loss depends on it.

    If only forward mode is wrong, `problem.reverse_only` is set instead, and what follows does without it. With
    `twice`, second derivatives are compared as well; without `forward`, reverse mode alone. What cannot be run in this
    way is left to the next step, which says why. Cost: some ten forward passes of five samples (two from a million
    parameters, one from ten million), once for each problem. Call inside `problem.active()`.
    """
    wanted = {kind for kind, needed in (("second", twice), ("forward", forward)) if needed}
    known = problem.facts.get("derivatives")
    if known is None or not wanted <= known[0]:
        wanted |= set() if known is None else known[0]
        small, labels = problem.thinned(targets)
        found = _right(small, inputs, labels, wanted)
        known = problem.facts["derivatives"] = frozenset(wanted), found.kinks
        problem.facts["gradient of a sample"] = problem.params, found.gradient
        problem.reverse_only |= small.reverse_only
    return float(known[1])


class SampleGradient(NamedTuple):
    """The gradient of ⟨weights, φ⟩ at one sample: as autograd returned it in float64 and differences confirmed it."""

    inputs: Any
    """The sample, alone in its batch."""
    weights: Tensor
    """Of its outputs."""
    squares: dict[str, Tensor]
    """The squared norm of the gradient in each parameter."""


def known_gradient(problem: Problem) -> SampleGradient | None:
    """The gradient that `check_derivatives` looked at, if it was that of one sample at these very parameters."""
    params, gradient = problem.facts.get("gradient of a sample", (None, None))
    return gradient if params is problem.params else None


def _right(problem: Problem, inputs: Any, targets: Tensor, kinds: set[str]) -> _Found:
    found = _compared(problem, inputs, targets, kinds)
    if found.broken and "reverse" not in found.broken and not problem.reverse_only:
        problem.reverse_only = True
        found = _compared(problem, inputs, targets, kinds)
    if found.broken and found.refusal is not None:
        raise found.refusal
    if found.broken:
        order = "gradient" if "reverse" in found.broken else "second derivative"
        raise InputError(
            f"the {order} that autograd returns for the model {type(problem.model).__name__} is not the derivative of "
            "its forward pass: a tensor hook, a gradient reversal or straight-through function, scale_grad_by_freq, a "
            "part of its forward under torch.no_grad() or behind .detach(), or an operation with a wrong derivative "
            "changes it; measure the model without that, or freeze the parameters it concerns by requires_grad_(False)."
        )
    return found


def check_input_derivatives(problem: Problem, inputs: Any, targets: Tensor, way_out: str = "") -> None:
    """Raise `InputError` if autograd's gradient in the inputs is not that of the forward pass.

    A hook before the first layer changes no derivative in a parameter. `way_out` is what the caller can do besides
    changing the model. Cost and the rest as in `check_derivatives`.
    """
    if "reverse" in _compared(problem, inputs, targets, set(), _ByInputs).broken:
        raise InputError(
            f"autograd's gradient with respect to the inputs of the model {type(problem.model).__name__} is not the "
            "derivative of its forward pass: a tensor hook, a gradient reversal or straight-through function, or a "
            "part of its forward under torch.no_grad() or behind .detach() changes it; measure the model without that"
            f"{way_out and ', or '}{way_out}."
        )


def _few(problem: Problem, inputs: Any, targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Five samples from all over a batch, or two of a large network; or one of a very large one, then two.

    The second time counts where a single sample cannot be run: a squeeze may take its axis away.
    """
    counts = [5 if problem.size <= LARGE else 2] if problem.size <= VERY_LARGE else [1, 2]
    for count in dict.fromkeys(min(len(targets), count) for count in counts):
        chosen = torch.linspace(0, len(targets) - 1, count).round().long().to(targets.device)
        yield resized(inputs, chosen), targets[chosen]


class _Found(NamedTuple):
    broken: set[str]
    """The kinds of derivatives that are certainly wrong."""
    kinks: float
    """The share of samples on a kink."""
    refusal: InputError | None
    """What the model itself says about its forward derivatives."""
    gradient: SampleGradient | None = None


def _compared(
    problem: Problem, inputs: Any, targets: Tensor, kinds: set[str], kind: type[_Comparison] | None = None
) -> _Found:
    """On a few samples; if these decide nothing, they must at least run."""
    few = inputs
    for few, labels in _few(problem, inputs, targets):
        if (found := _compared_on(problem, few, labels, kinds, kind)) is not None:
            return found
    _check_runs(problem, few)
    return _Found(set(), 0.0, None)


def _compared_on(
    problem: Problem, inputs: Any, targets: Tensor, kinds: set[str], kind: type[_Comparison] | None
) -> _Found | None:
    """The gradient of whole samples; forward and second derivatives of parts of them where that is possible."""
    part = _beginning(problem, inputs, targets) if kinds else None
    if part is not None and (others := _looked_at(problem, *part, kinds, kind)) is not None:
        found = _looked_at(problem, inputs, targets, set(), kind)
        if found is not None:
            return others._replace(broken=found.broken | others.broken, kinks=found.kinks, gradient=found.gradient)
    return _looked_at(problem, inputs, targets, kinds, kind)


def _beginning(problem: Problem, inputs: Any, targets: Tensor) -> tuple[Any, Tensor] | None:
    """The first quarter of long sequences with large outputs, whose attention, norms and layers are the same there.

    Whether an operation has right forward and second derivatives does not depend on its place. What a pass does only
    further on (a part that is detached) shows in the gradient, which is looked at in the whole sequence.
    """
    length = targets.shape[1] if targets.ndim == 2 and problem.words is not None else 0
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if length < _LONG or any(leaf.shape != targets.shape for leaf in leaves):
        return None
    length //= 4
    return tree_map(lambda leaf: leaf[:, :length] if isinstance(leaf, Tensor) else leaf, inputs), targets[:, :length]


def _looked_at(
    problem: Problem, inputs: Any, targets: Tensor, kinds: set[str], kind: type[_Comparison] | None
) -> _Found | None:
    """In float64, or in the model's own precision if that leaves it open; in the rows of large tables that are read.

    `None` if both leave it open.
    """
    for small in dict.fromkeys([few_rows(problem, inputs), problem]):
        precisions = [torch.float64] if problem.size <= _HUGE else []
        for dtype in dict.fromkeys([*precisions, problem.dtype]):
            comparison = (kind or _Comparison)(small, inputs, targets, dtype)
            try:
                verdicts = comparison.verdicts(kinds)
            except _TooCoarse as coarse:
                if dtype == problem.dtype:
                    problem.facts["rounding"] = coarse.rounding
                continue
            except Exception:  # it computes in one precision only, coarsely, or not at all: reported elsewhere
                continue
            if verdicts["reverse"] is not None:
                broken = {kind for kind, right in verdicts.items() if right is False}
                return _Found(broken, comparison.kinks, comparison.refusal, comparison.gradient)
    return None


def _check_runs(problem: Problem, inputs: Any) -> None:
    """Raise `InputError` if the model runs only while it is not differentiated, or has no backward pass."""
    try:
        with torch.enable_grad():
            leaves = as_leaves(problem.params)
            total = problem.outputs(leaves, inputs).sum()
            if total.requires_grad:
                torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        if isinstance(error, InputError | torch.OutOfMemoryError):
            raise
        raise InputError(
            f"the model {type(problem.model).__name__} cannot be differentiated: {first_line(error)}; write that part "
            "in other operations."
        ) from error


class _TooCoarse(Exception):
    """The model rounds its values to fewer digits than differences need."""

    def __init__(self, rounding: float) -> None:
        self.rounding = rounding


class _Comparison:
    """Derivatives and differences of one model on a few samples, in one precision."""

    def __init__(self, problem: Problem, inputs: Any, targets: Tensor, dtype: torch.dtype) -> None:
        self.problem = problem.converted(dtype)
        self.inputs, self.targets = in_precision((inputs, targets), dtype)
        self.moving = self._moving()
        self.scale = _scales(self.moving)
        self.precise = dtype == torch.float64
        self.tolerance = 1e-4 if self.precise else 5e-2
        self.kinks, self.refusal = 0.0, cast(InputError | None, None)
        self.gradient, self._spare = cast(SampleGradient | None, None), dict[str, Tensor]()

    def _moving(self) -> Params:
        """What moves: the parameters."""
        return self.problem.params

    def verdicts(self, kinds: set[str]) -> Verdicts:
        """The first verdict of each kind from a few random directions."""
        verdicts: Verdicts = {}
        for seed, step in enumerate(_STEPS):
            self.steps = dict.fromkeys(("reverse", "forward"), step if self.precise else 3e-3)
            self.steps["second"] = 1e-7 if self.precise else 3e-3  # of gradients, which lose more to rounding
            found = self._from(seed, kinds, aside=bool(seed))
            if False in found.values() and not seed:  # unless it is a kink that goes unseen
                found = self._from(seed, kinds, aside=True)
            verdicts = {kind: found[kind] if verdicts.get(kind) is None else verdicts[kind] for kind in found}
            if None not in verdicts.values():
                break
        return verdicts

    def _from(self, seed: int, kinds: set[str], *, aside: bool) -> Verdicts:
        """The verdicts along one random direction: at the parameters, if no kink is seen there, or a step `aside`."""
        generator = torch.Generator().manual_seed(seed)
        padding, here, leaves = _Padding(), _Zeros(), as_leaves(self.moving)
        with padding, here, torch.enable_grad():
            values = self._function(leaves)
        if here.rounding > torch.finfo(self.problem.dtype).eps:
            raise _TooCoarse(here.rounding)
        signs = torch.randint(0, 2, values.shape, generator=generator).mul(2).sub(1)
        self.signs = (signs * (1 + torch.rand(values.shape, generator=generator))).to(values)  # so that none cancel
        self.signs *= _weights(values.detach())
        self.direction, self.differences = self._draw(generator, kinds), dict[float, Tensor]()
        padding.freeze(self.direction, leaves)
        aside |= here.any()
        self.point = self.moving
        if aside:
            del values  # and its graph
            self.point = {n: p.add(self.direction[n], alpha=1e-3) for n, p in self.moving.items()}
            leaves = as_leaves(self.point)
            with torch.enable_grad():
                values = self._function(leaves)
        slope, self.values = self._slope(leaves, values)
        values = self.values
        if not seed:
            self.kinks = self._share_on_kinks(here, self.direction)
        if not aside and len(self.targets) == 1 and not isinstance(self.problem.loss, CallableLoss):
            squares = {n: torch.linalg.vector_norm(g, dtype=torch.float64).square() for n, g in slope.items()}
            self.gradient = SampleGradient(self.inputs, self.signs[0], squares)
        products = (torch.dot(slope[n].reshape(-1), d.reshape(-1).to(slope[n])) for n, d in self.direction.items())
        claims = {"reverse": sum(products, values.new_zeros(()))}
        self.slope = self._weighed(slope) if "second" in kinds else values.new_zeros(0)
        # a large network has no room for more than a few of these, and fresh memory takes as long as a pass
        self._spare = slope if not kinds and _apart(slope.values()) else {}
        del slope
        if "forward" in kinds and not self.problem.reverse_only:
            try:
                with torch.no_grad():
                    claims["forward"] = along(self._function, self.point, self.direction)[1]
            except RuntimeError as error:  # an operation has none; whatever needs it will find out
                self.problem.reverse_only = True
                self.refusal = error if isinstance(error, InputError) else None
        if "second" in kinds:
            with contextlib.suppress(RuntimeError):  # likewise
                claims["second"] = self._weighed(self._second())
        return {kind: self._verdict(kind, claim) for kind, claim in claims.items()}

    def _share_on_kinks(self, here: _Zeros, direction: Params) -> float:
        """The share of samples with a zero that is not one a step to either side, and whose loss bends there.

        A zero alone is not a kink: what a ReLU has cut off is 0 at the next one, and a step may bring it back, but not
        on both sides; or nothing may read it. The loss bends where its second difference falls with the step, not
        with its square.
        """
        samples = len(self.targets)
        if not here.any():
            return 0.0
        rounding = 1e-14 if self.precise else 1e-6
        bends = []
        with torch.no_grad():
            values, size = self._losses(self.moving)
            for step in (1e-6, 1e-7) if self.precise else (1e-3, 1e-4):
                aside, bend = [_Zeros(), _Zeros()], -2 * values
                for sign, watch in zip((1, -1), aside, strict=True):
                    with watch:
                        bend += self._losses({n: p + sign * step * direction[n] for n, p in self.moving.items()})[0]
                bends.append(bend.abs())
            found = here.moved(aside, samples)
        felt = (bends[1] > rounding * (1 + size) * values.abs()) & (bends[0] < 30 * bends[1])
        return float((found & felt.cpu()).double().mean()) if samples else 0.0

    def _losses(self, params: Params) -> tuple[Tensor, float]:
        """The loss of every sample, and the size of the outputs, which decides how it is rounded."""
        outputs = self._function(params)
        if isinstance(self.problem.loss, CallableLoss):
            return outputs.double(), 0.0
        values = self.problem.loss.values(outputs.double(), self.targets)
        return values, float(outputs.abs().max()) if outputs.numel() else 0.0

    def _function(self, params: Params) -> Tensor:
        """The outputs, or the losses where their derivatives come from autograd too."""
        if isinstance(self.problem.loss, CallableLoss):
            return self.problem.losses(params, self.inputs, self.targets)
        return self.problem.outputs(params, self.inputs)

    def _draw(self, generator: torch.Generator, kinds: set[str]) -> Params:
        """In half the memory where no derivative is taken along it: it need not be precise, but the same throughout."""
        half = self.precise and not kinds
        return dict(self._drawn(generator, torch.float32 if half else self.problem.dtype))

    def _drawn(self, generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.moving.items():
            most = math.sqrt(3) * self.scale[name]  # a mean square of 1
            words = torch.empty(-(-tensor.numel() // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
            steps = words.view(torch.int8)[: tensor.numel()].view(tensor.shape)  # a byte each: a seventh of the time
            yield name, steps.to(tensor.device, dtype).add_(0.5).mul_(most / 128)

    def _scalar(self, params: Params) -> Tensor:
        return (self.signs * self._function(params)).sum()

    def _gradient_and_values(self, params: Params) -> tuple[Params, Tensor]:
        leaves = as_leaves(params)
        with torch.enable_grad():
            return self._slope(leaves, self._function(leaves))

    def _slope(self, leaves: Params, values: Tensor) -> tuple[Params, Tensor]:
        with torch.enable_grad():
            total = (self.signs * values).sum()
        if not total.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}, values
        parts = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, parts, strict=True)), values.detach()

    def _second(self) -> Params:
        """The derivative of the gradient along the direction, by the mode that the measurement will take."""
        if not self.problem.reverse_only:
            with contextlib.suppress(RuntimeError):
                found: Params = along(grad(self._scalar), self.point, self.direction)[1]
                return found
        leaves = as_leaves(self.point)
        with torch.enable_grad():
            total = self._scalar(leaves)
            parts = torch.autograd.grad(total, list(leaves.values()), create_graph=True, materialize_grads=True)
            inner = torch.stack([(p * d).sum() for p, d in zip(parts, self.direction.values(), strict=True)]).sum()
            if not inner.requires_grad:
                return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            twice = torch.autograd.grad(inner, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, twice, strict=True))

    def _weighed(self, parts: Params) -> Tensor:
        """All parts as one vector, each in the units of its tensor; large ones are thinned out."""
        return torch.cat([self.scale[name] * _thin(part.detach()) for name, part in parts.items()])

    def _difference(self, kind: str, step: float) -> Tensor:
        """To one side with the tiny steps of float64, whose error is of the same order; to both with larger ones."""

        def end(sign: int) -> Tensor:
            moved = {
                n: torch.add(p, self.direction[n], alpha=sign * step, out=self._spare.get(n))
                for n, p in self.point.items()
            }
            if kind == "second":
                return self._weighed(self._gradient_and_values(moved)[0])
            with torch.no_grad():
                return self._function(moved)

        def difference() -> Tensor:
            if self.precise:
                return (end(1) - (self.slope if kind == "second" else self.values)) / step
            return (end(1) - end(-1)) / (2 * step)

        if kind == "second":
            return difference()
        if step not in self.differences:  # one for both modes
            self.differences[step] = difference()
        return self.differences[step]

    def _verdict(self, kind: str, claim: Tensor) -> bool | None:
        step, compared = self.steps[kind], self.signs != 0

        def of_outputs(values: Tensor) -> Tensor:
            return values if kind == "second" else (self.signs * values)[compared]

        claim = of_outputs(claim.detach()) if kind == "forward" else claim.detach()
        start = of_outputs(self.slope if kind == "second" else self.values)
        noise = 10 * torch.finfo(start.dtype).eps / step * float(start.norm())

        def fits(values: Tensor) -> bool:
            found = values.sum() if kind == "reverse" else values
            size = max(float(values.norm()), float(claim.norm()))
            return float((found - claim).norm()) <= self.tolerance * size + noise

        first = of_outputs(self._difference(kind, step))
        if fits(first):
            return True
        second = of_outputs(self._difference(kind, 3 * step))
        apart = float((first - second).norm())
        agree = apart <= self.tolerance / 4 * max(float(first.norm()), float(second.norm())) + noise
        return False if agree else None


class _ByInputs(_Comparison):
    """The same in the inputs of the model, of which only floating-point ones move; in reverse mode alone."""

    def _moving(self) -> Params:
        self.problem.reverse_only = True
        leaves = enumerate(tree_leaves(self.inputs))
        return {str(n): x for n, x in leaves if isinstance(x, Tensor) and x.is_floating_point()}

    def _function(self, params: Params) -> Tensor:
        leaves, structure = tree_flatten(self.inputs)
        moved = [params.get(str(n), leaf) for n, leaf in enumerate(leaves)]
        return self.problem.outputs(self.problem.params, tree_unflatten(moved, structure))


def _weights(values: Tensor) -> Tensor:
    """Less for large outputs: the rounding of a logit masked by -1e9 would hide all others; none for infinite ones."""
    usual = usual_size(values)
    return (usual / (usual + values.abs())).nan_to_num(1.0)  # NaN counts, and is refused elsewhere


def _apart(tensors: Iterable[Tensor]) -> bool:
    """Whether each has numbers of its own, all of them, so that any can be overwritten."""
    each = list(tensors)
    distinct = len({tensor.untyped_storage().data_ptr() for tensor in each}) == len(each)
    return distinct and all(tensor.is_contiguous() and not tensor.requires_grad for tensor in each)


def _thin(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in one row; for a large one some from all over it, which say as much."""
    return tensor.reshape(-1)[:: -(-max(tensor.numel(), 1) // _SEEN)]


def _scales(params: Params) -> dict[str, float]:
    """The size of each tensor's numbers, the unit of steps; for a tensor of zeros, that of all."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in params.values()]
    numbers = torch.stack(norms).tolist() if norms else []
    sizes = {name: n / math.sqrt(max(params[name].numel(), 1)) for name, n in zip(params, numbers, strict=True)}
    usual = max(sizes.values(), default=0.0) or 1.0
    return {name: size or usual for name, size in sizes.items()}


class _Zeros(DispatchWatch):
    """Where the ReLU-like functions of one forward pass are given exactly 0, and how coarsely it rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor] = []
        self.rounding = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kink = dispatched(func).kink
        if kink is Kink.ZERO or (kink is Kink.BOUND and args[1] == 0):
            self.places.append(args[0] == 0)
        result = func(*args, **kwargs)
        if aten_name(func) == "_to_copy" and args[0].is_floating_point() and result.is_floating_point():
            self.rounding = max(self.rounding, torch.finfo(result.dtype).eps)
        return result

    def any(self) -> bool:
        return bool(self.places) and bool(torch.stack([zero.any() for zero in self.places]).any())

    def moved(self, aside: list[_Zeros], samples: int) -> Tensor:
        """Which samples have a zero that is nonzero in two other passes; none where these cannot be compared."""
        found = torch.zeros(samples, dtype=torch.bool)
        for zero, *others in zip(self.places, *(other.places for other in aside), strict=False):
            same = all(zero.shape == other.shape for other in others)
            if samples and zero.ndim and same and len(zero) % samples == 0:  # rows may be tokens of samples
                gone = zero & ~torch.stack(others).any(0)
                found |= gone.reshape(samples, -1).any(1).cpu()
        return found


class _Padding(FunctionWatch):
    """Notes which rows of embeddings are padding: autograd gives them no gradient, on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Tensor, int]] = []

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.embedding:
            self._note(*args, **kwargs)
        if func is F.embedding_bag:
            self._note(*args[:2], kwargs.get("padding_idx", args[10] if len(args) > 10 else None))
        return func(*args, **kwargs)

    def _note(self, input: Any, weight: Tensor, padding_idx: int | None = None, *rest: Any, **more: Any) -> None:
        if padding_idx is not None:
            self.rows.append((weight, padding_idx))

    def freeze(self, direction: Params, params: Params) -> None:
        """Keep padding rows from moving."""
        names = {id(tensor): name for name, tensor in params.items()}
        for weight, row in self.rows:
            if id(weight) in names:
                direction[names[id(weight)]][row] = 0
