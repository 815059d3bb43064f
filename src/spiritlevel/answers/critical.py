"""How far the optimiser could go before the loss stops falling, and whether its steps can follow the curvature.

Critical sharpness needs forward passes alone: along the update that the optimiser would make now, the first step at
which the loss of the batch is no longer lower. `stability` compares an eigenvalue with what the optimiser allows.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from spiritlevel.arguments import checked
from spiritlevel.binding.devices import doubled
from spiritlevel.binding.modules import is_parted, managed_modules, part_here, state_of, unwrapped
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.reading import Reading
from spiritlevel.binding.state import in_turn, preserved_random_state
from spiritlevel.errors import InputError, first_line
from spiritlevel.estimators import Operator, eigenvalues
from spiritlevel.operators.matrices import hessian
from spiritlevel.results import figure
from spiritlevel.results.training import CriticalSharpness, Stability

__all__ = ["critical_sharpness", "stability"]

_CELL = 1.0625  # steps that are distinguished differ by this factor
_WARM = 16  # cells on either side of a start: a factor of 2.6
_JUMP, _JUMPS = 23, 5  # cells, a factor of 4, and how often, from the optimiser's own step


@checked
@in_turn()  # it moves the parameters themselves
def critical_sharpness(
    closure: Callable[[], Any], optimizer: Optimizer, *, start: float | CriticalSharpness | None = None
) -> CriticalSharpness:
    """2/η_c: η_c is the first step along the optimiser's own update at which the loss is no longer lower.

    The update θ − ηu is what `optimizer.step()` would do now, with momentum, preconditioning and weight decay, for any
    optimiser of `torch.optim` and those built on it; gradients are in place (unscaled, if a scaler is used). If
    fully_shard has sharded the model, all ranks call this, and the loss is the mean of theirs. On a quadratic loss
    2/η_c = uᵀHu/gᵀu, and λ₁ if u = g lies along its eigenvector. While 2/η_c is below 2/η, a step with the learning
    rate η lowers the loss of its own batch.

    The loss is compared at steps that differ by 6.25%, by bisection, and the bracket is returned: `low` ≤ value ≤
    `high`. The search assumes that the loss, once it is no longer lower, stays so as far as it looks.
    Undefined, with a reason, where the update does not go downhill (gᵀu ≤ 0), as momentum may. Optimiser, parameters,
    gradients, buffers and random states are left bit for bit as they were; every pass sees the same random numbers.

    Args:
        closure: returns the loss of the batch, in one forward pass, without `zero_grad` or `backward`.
        optimizer: any except those that call the closure themselves (L-BFGS). Its hooks are not run.
        start: η_c of the last call, or its result: the search stays within a factor of 2.6. Without it the search
            begins at the optimiser's own step and reaches a factor of 4,000 either way.

    Cost: at most 6 forward passes with `start`, 12 without, no backward pass; memory for three to five copies of the
    parameters. Reference: mathematics 9.4.

    >>> weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> def closure():  # a quadratic with curvature 3 along its gradient
    ...     return 1.5 * (weight**2).sum()
    >>> closure().backward()
    >>> found = critical_sharpness(closure, optimizer)
    >>> found.low <= 3 <= found.high, critical_sharpness(closure, optimizer, start=found).forwards
    (True, 6)
    """
    line = _Line(optimizer)
    last = start.step if isinstance(start, CriticalSharpness) else start
    if last is not None and not (isinstance(last, int | float) and last > 0 and math.isfinite(last)):
        if isinstance(start, CriticalSharpness):
            last = None  # nothing was found last time
        else:
            raise InputError(f"critical_sharpness needs a start above 0, the last η_c, got {last!r}.")
    if reason := line.obstacle():
        return CriticalSharpness(math.nan, reason=reason)
    first = 1.0 if last is None else last / line.rate
    with line.walked(closure) as loss_at:
        here = loss_at(0.0)
        if not math.isfinite(here):
            return CriticalSharpness(math.nan, reason=f"the loss is {here}", forwards=line.forwards, matvecs=1)

        def lower(cell: int) -> bool:
            return loss_at(first * _CELL**cell) < here  # False where it is NaN

        ends = _bracket(lower, *((_WARM, 0) if last is not None else (_JUMP, _JUMPS)))
    below, above = (None if end is None else first * _CELL**end for end in ends)
    way_out = "" if last is None else "; call again without start="
    return _found(below, above, line, way_out)


def _bracket(lower: Callable[[int], bool], jump: int, jumps: int) -> tuple[int | None, int | None]:
    """The neighbouring cells a, a + 1 with lower(a) and not lower(a + 1); None for an end that was not reached."""
    falls = lower(0)
    away = 1 if falls else -1
    near, far, met = 0, away * jump, False
    for _ in range(jumps):
        met = lower(far) != falls
        if met:
            break
        near, far = far, far + away * jump
    while abs(far - near) > 1:
        middle = (near + far) // 2
        if lower(middle) == falls:
            near = middle
        else:
            far, met = middle, True
    ends = (near, far if met else None)
    return ends if falls else (ends[1], ends[0])


def _found(below: float | None, above: float | None, line: _Line, way_out: str) -> CriticalSharpness:
    """The result for the last step, in units of the optimiser's, that lowers the loss and the first that does not."""
    low = 0.0 if above is None else 2 / (line.rate * above)
    high = math.inf if below is None else 2 / (line.rate * below)
    cost: dict[str, Any] = {"low": low, "high": high, "forwards": line.forwards, "matvecs": line.forwards}
    if below is not None and above is not None:
        scale = math.sqrt(below * above)
        value = 2 / (line.rate * scale)
        return CriticalSharpness(value, tolerance=high - value, step=2 / value, scale=scale, **cost)
    if below is not None:
        reason = f"the loss is still lower at {figure(below, 3)} times the optimiser's step{way_out}"
        return CriticalSharpness(high, status="not converged", reason=reason, **cost)
    assert above is not None, "one end at least is tried"
    reason = f"the loss is not lower at {figure(above, 3)} times the optimiser's step"
    reason += way_out or ", where that may be mere rounding"
    return CriticalSharpness(low, status="not converged", reason=reason, **cost)


class _Line:
    """The line θ − sΔ from the parameters along the update Δ that the optimiser would make now."""

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"critical_sharpness needs a torch.optim optimiser, got {type(optimizer).__name__}.")
        self.name = type(optimizer).__name__
        known = inspect.signature(type(optimizer).step).parameters.get("closure")
        if isinstance(optimizer, torch.optim.LBFGS) or (known and known.default is inspect.Parameter.empty):
            raise InputError(
                f"{self.name} calls its closure inside a step, so it has no single update to follow; use "
                "critical_sharpness with an optimiser whose step() needs no closure."
            )
        moving = [
            (parameter, float(group.get("lr", math.nan)))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not moving:
            raise InputError("no parameter of the optimiser has a gradient; call loss.backward() first.")
        self.parameters = [parameter for parameter, _ in moving]
        self.rate = max(rate for _, rate in moving)
        if not math.isfinite(self.rate):
            raise InputError(f"the groups of {self.name} have no learning rate 'lr', the unit of its steps.")
        parted = next((parameter for parameter in self.parameters if is_parted(parameter)), None)
        group = None if parted is None else cast(Any, parted).device_mesh.get_group()
        self.ranks = Ranks(group, part_here(self.parameters[0]).device)
        self.before = [part_here(parameter.detach()).clone() for parameter in self.parameters]
        after = self._stepped(optimizer)
        self.update = [old - new for old, new in zip(self.before, after, strict=True)]
        self.forwards = 0

    def _stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters after a step of a copy of the optimiser, on copies of parameters and gradients."""
        twins: dict[int, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                copied.grad = None if parameter.grad is None else parameter.grad.detach().clone()
                twins[id(parameter)] = copied
        after = [twins[id(parameter)] for parameter in self.parameters]
        try:
            twin: Any = object.__new__(type(optimizer))
            own = {name: value for name, value in vars(optimizer).items() if name != "step" and "hooks" not in name}
            vars(twin).update(copy.deepcopy(own, twins))
            vars(twin).update({name: OrderedDict() for name in vars(optimizer) if "hooks" in name})
            with preserved_random_state():
                type(twin).step(twin)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
            raise InputError(
                f"a copy of the optimiser {self.name} cannot make a step, {type(error).__name__}: {first_line(error)}; "
                "critical_sharpness needs one that keeps its state as torch does."
            ) from error
        finally:
            pairs = zip(self.parameters, self.before, strict=True)
            moved = bool(torch.stack([(part_here(p.detach()) != old).any() for p, old in pairs]).any())
            self.restore()
        if moved:
            raise InputError(
                f"a copy of the optimiser {self.name} moves the parameters of the original, to which it holds "
                "references outside its groups; they have been put back."
            )
        return [part_here(each.detach()) for each in after]

    def restore(self) -> None:
        for parameter, old in zip(self.parameters, self.before, strict=True):
            part_here(parameter.data).copy_(old)  # by .data: a graph that the loop still holds stays usable

    def obstacle(self) -> str:
        """Why there is nothing to search for along this line; empty if there is."""
        pairs = zip(self.parameters, self.update, strict=True)
        moved = self._over_ranks(float(torch.stack([part.any() for part in self.update]).any()))
        slope = self._over_ranks(float(torch.stack([_dot(parameter.grad, part) for parameter, part in pairs]).sum()))
        if not moved:
            return f"the update of {self.name} is zero"
        if not slope > 0:
            return f"the update does not go downhill: gᵀu = {figure(slope / self.rate, 3)}"
        return ""

    def _over_ranks(self, number: float) -> float:
        """The sum over the ranks of a sharded model; the number itself elsewhere."""
        total = torch.tensor(number, dtype=torch.float64)
        self.ranks.add([total])
        return float(total)

    @contextmanager
    def walked(self, closure: Callable[[], Any]) -> Iterator[Callable[[float], float]]:
        """A function that gives the loss at s; all that moved is put back at the end."""
        gradients = [parameter.grad for parameter in self.parameters]
        copies = [None if gradient is None else gradient.detach().clone() for gradient in gradients]

        def loss_at(scale: float) -> float:
            if scale:
                for parameter, old, part in zip(self.parameters, self.before, self.update, strict=True):
                    torch.add(old, part, alpha=-scale, out=part_here(parameter.data))
            self.forwards += 1
            with preserved_random_state(), torch.no_grad(), Ranks.contact(self.ranks.group), _fresh_casts():
                value = float(closure())
            for module in ran:  # what one pass has gathered would not see the next step
                module.reshard()
            return self._over_ranks(value) / self.ranks.count

        with _kept_buffers() as ran:
            try:
                yield loss_at
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                raise InputError(
                    "the closure of critical_sharpness calls backward; it should only return the loss of the batch."
                ) from error
            finally:
                self.restore()
                touched = False
                for parameter, gradient, values in zip(self.parameters, gradients, copies, strict=True):
                    if parameter.grad is not gradient or not _equal(gradient, values):
                        touched = True
                        parameter.grad = gradient
                        if gradient is not None and values is not None:
                            gradient.data.copy_(values)
        if touched:
            raise InputError(
                "the closure of critical_sharpness changes the gradients (zero_grad?); it should only return the loss "
                "of the batch. They have been put back."
            )


def _dot(gradient: Tensor | None, part: Tensor) -> Tensor:
    assert gradient is not None
    gradient = part_here(gradient)
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return (doubled(gradient.detach()) * doubled(part)).sum()


def _equal(gradient: Tensor | None, values: Tensor | None) -> bool:
    if gradient is None or values is None or gradient.is_sparse:
        return True
    gradient, values = part_here(gradient), part_here(values)
    return bool(((gradient == values) | (gradient.isnan() & values.isnan())).all())


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Keep autocast from reusing casts of the parameters, which would not see them move, or from keeping its own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _kept_buffers() -> Iterator[list[Any]]:
    """Restore the buffers of every module that runs inside, such as the statistics of batch norm.

    Yields the modules that have run and hold sharded parameters.
    """
    saved: dict[int, list[tuple[nn.Module, str, Tensor, Tensor]]] = {}
    ran: list[Any] = []

    def keep(module: nn.Module, args: Any) -> None:
        if id(module) in saved:
            return
        ran.extend(inner for inner in managed_modules(module) if id(inner) not in saved)
        for inner in module.modules():
            held = [(name, tensor) for name, tensor in inner._buffers.items() if tensor is not None]
            saved.setdefault(id(inner), [(inner, name, tensor, tensor.detach().clone()) for name, tensor in held])

    handle = register_module_forward_pre_hook(keep)
    try:
        yield ran
    finally:
        handle.remove()
        for module, name, tensor, values in (item for items in saved.values() for item in items):
            tensor.data.copy_(values)
            module._buffers[name] = tensor


# ---------------------------------------------------------------- the limits of stability


class _Rule(NamedTuple):
    """What an optimiser's steps allow: curvature below `factor`/η of D^(-1/2) H D^(-1/2)."""

    factor: float
    formula: str
    divides: bool


def _rule(optimizer: Optimizer, group: dict[str, Any]) -> _Rule:
    name = type(optimizer).__name__
    known = isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.RMSprop)
    if known and not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        raise InputError(
            f"the limit of stability is known for the steps of SGD, RMSprop, Adam and AdamW, and {name} has a step() "
            "of its own; if that does the same, pass one of torch.optim with its settings and state."
        )
    if group.get("maximize"):
        raise InputError(f"{name}(maximize=True) ascends; stability is about steps that descend.")
    if isinstance(optimizer, torch.optim.SGD):
        momentum = float(group["momentum"])
        if not momentum:
            return _Rule(2.0, "2/η", False)
        if group["nesterov"]:
            return _Rule(2 * (1 + momentum) / (1 + 2 * momentum), "2(1+β)/(η(1+2β))", False)
        damping = float(group["dampening"])
        if not damping < 1:
            raise InputError(
                f"SGD(dampening={damping:g}) takes no step along the gradient; stability needs it below 1."
            )
        formula = "2(1+β)/((1−τ)η)" if damping else "2(1+β)/η"
        return _Rule(2 * (1 + momentum) / (1 - damping), formula, False)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW too
        beta = float(group["betas"][0])
        return _Rule(2 * (1 + beta) / (1 - beta), "2(1+β₁)/((1−β₁)η)", True)
    if isinstance(optimizer, torch.optim.RMSprop):
        momentum = float(group["momentum"])
        return _Rule(2 * (1 + momentum), "2(1+β)/η" if momentum else "2/η", True)
    raise InputError(f"the limit of stability is known for SGD, RMSprop, Adam and AdamW, not for {name}.")


def _divisor(group: dict[str, Any], state: dict[str, Any], name: str) -> Tensor:
    """D, the diagonal by which Adam and RMSprop divide, as the last step left it."""
    moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq", state.get("square_avg")))
    if moment is None:
        raise InputError(
            f"the optimiser has made no step with the parameter {name} yet, and stability needs its averages; make a "
            "step first or, if the model does not use it, freeze it with requires_grad_(False)."
        )
    moment, share = doubled(moment.detach()), 1.0
    if "betas" in group:
        steps = float(state["step"])
        share, seen = (1 - float(beta) ** steps for beta in group["betas"])  # what both averages are corrected by
        moment = moment / seen
    elif group.get("centered"):
        moment = moment - doubled(state["grad_avg"].detach()).square()
    return share * (moment.clamp_min(0.0).sqrt() + float(group["eps"]))


@checked
def stability(
    optimizer: Optimizer,
    model: nn.Module,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    batch_norm: str = "eval",
    start: Stability | None = None,
    tol: float = 0.02,
    max_matvecs: int = 60,
    batch_size: int | None = None,
    memory: int | str | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Stability:
    """On which side of its limit of stability a training run is: the largest eigenvalue against what the steps allow.

    On a quadratic, steps settle while the largest eigenvalue of the Hessian H is below 2/η for gradient descent,
    2(1+β)/η with momentum β, 2(1+β)/(η(1+2β)) with Nesterov's; for RMSprop and Adam it is that of D^(-1/2) H D^(-1/2),
    D = √v + ε held fixed, below 2(1+β)/η and 2(1+β₁)/((1−β₁)η), 38/η at β₁ = 0.9; Adam's D holds the corrections of
    both averages, (1−β₁ᵗ)(√(v/(1−β₂ᵗ)) + ε). Weight decay that enters the gradient is part of H; that of AdamW is left
    out. Where learning rates differ, η is the largest and the others scale their part of H.

    With `start`, the last result, a few products suffice, but no larger eigenvalue is excluded: the curvature is then a
    lower bound, which can show that steps are unstable but not that they are stable.

    `batch_size` and `memory`: as in `hessian`. `reading`: how batches and outputs are read; see `Reading`.

    Cost: 8 to 20 products with H (2 to 6 with `start`), each about two gradients of `data`. References: Cohen et al.
    2021, arXiv:2103.00065, and 2022, arXiv:2207.14484; mathematics 9.1 and 9.5.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> data = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]])
    >>> print(stability(torch.optim.SGD(net.parameters(), lr=0.5), net, data, loss="squared_error"))
    largest eigenvalue of H 5, limit 2/η = 4: 1.25 of it, above: steps on this quadratic grow, ...
    """
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"stability needs a torch.optim optimiser first, got {type(optimizer).__name__}.")
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    rules = {_rule(optimizer, group) for group in optimizer.param_groups}
    if len(rules) > 1:
        raise InputError("the groups of the optimiser differ in momentum, so there is no single limit of stability.")
    (rule,) = rules
    rate = max(float(group["lr"]) for group in optimizer.param_groups)
    if not 0 < rate < math.inf:
        name = type(optimizer).__name__
        raise InputError(
            f"the learning rate of {name} is {rate:g}, as at the start of a warm-up, so its steps have no limit of "
            "stability; call this when it is positive."
        )
    op = hessian(model, data, loss=loss, batch_norm=batch_norm, batch_size=batch_size, memory=memory, **reading)
    own = dict(state_of(unwrapped(model)))
    roots, decays = [], []
    for name in op.names:
        parameter = own[name]
        group = groups.get(id(parameter))
        part = torch.zeros(parameter.numel(), dtype=torch.float64)
        if group is not None:
            part += float(group["lr"]) / rate
            if rule.divides:
                part /= _divisor(group, optimizer.state.get(parameter, {}), name).reshape(-1).cpu()
        coupled = group is not None and not _decoupled(optimizer, group)
        roots.append(part.sqrt())
        decays.append(torch.full_like(part, float(group["weight_decay"]) if group is not None and coupled else 0.0))
    root, decay = (torch.cat(parts).to(op.device, op.dtype)[:, None] for parts in (roots, decays))

    def multiply(block: Tensor) -> Tensor:
        inner = root * block
        return root * (op @ inner + decay * inner)

    scaled = Operator(multiply, op.size, dtype=op.dtype, device=op.device, shapes=op.shapes)
    vector = None if start is None else start.vector
    pairs = eigenvalues(scaled, tol=tol, max_matvecs=max(max_matvecs, 1), seed=seed, start=vector)
    curvature, limit = pairs.outermost(), rule.factor / rate
    low, high = curvature.interval()
    side = "unstable" if low > limit else "stable" if high < limit else "open"
    matrix = "D^(-1/2) H D^(-1/2)" if rule.divides else "H"
    found = None if pairs.vectors is None else pairs.vectors[:, 0]
    return Stability(curvature, limit, rule.formula, matrix, side, found)


def _decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
