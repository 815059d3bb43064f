"""Every way to measure, compared with differences of the loss: of a random network, what is wrong?

The truth never rests on a derivative alone. The dense Hessian of every sample comes from autodiff in float64, and is
believed only where second differences of the loss along random directions confirm it; otherwise differences along
every parameter take its place. Where differences cannot tell either, at a kink, nothing is compared.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from random_networks import LOSSES, Network, Program, data, network
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import spiritlevel as sl
from spiritlevel.errors import InputError, NotExactError, first_line
from spiritlevel.measures import MEASURES, Setting

# ---------------------------------------------------------------- differences

STEPS = (0.06, 0.012, 0.0024, 0.0005, 0.0001)
# of orders 8 and 6: weights of f(kh) and f(-kh) for k = 1 … 4 in h f′, and of f(0), f(±h) … in h² f″
_FIRST = ((4 / 5, -1 / 5, 4 / 105, -1 / 280), (3 / 4, -3 / 20, 1 / 60, 0.0))
_SECOND = ((-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560), (-49 / 18, 3 / 2, -3 / 20, 1 / 90, 0.0))


@dataclass
class Differences:
    """The first and second derivative of a vector function along a line, each with a bound of its error."""

    first: Tensor
    first_error: Tensor
    second: Tensor
    second_error: Tensor


def differences(function: Callable[[float], Tensor]) -> Differences:
    """Central differences of order 8 at several steps, for every entry at the step with the least error.

    The error is what order 6 says otherwise, plus rounding: where a kink lies inside a step the two are far apart.
    """
    middle = function(0.0)
    best: Differences | None = None
    for step in STEPS:
        points = [(function(k * step), function(-k * step)) for k in range(1, 5)]
        size = torch.stack([middle.abs(), *(p.abs() for pair in points for p in pair)]).amax(0) + 1e-3
        odd, even = [a - b for a, b in points], [a + b for a, b in points]
        firsts = [sum(w * d for w, d in zip(weights, odd, strict=True)) / step for weights in _FIRST]
        seconds = [
            (weights[0] * middle + sum(w * d for w, d in zip(weights[1:], even, strict=True))) / step**2
            for weights in _SECOND
        ]
        found = Differences(
            firsts[0],
            (firsts[0] - firsts[1]).abs() + 1e-15 * size / step,
            seconds[0],
            (seconds[0] - seconds[1]).abs() + 1e-15 * size / step**2,
        )
        best = found if best is None else _better(best, found)
    assert best is not None
    return best


def _better(a: Differences, b: Differences) -> Differences:
    one, two = a.first_error <= b.first_error, a.second_error <= b.second_error
    return Differences(
        torch.where(one, a.first, b.first),
        torch.where(one, a.first_error, b.first_error),
        torch.where(two, a.second, b.second),
        torch.where(two, a.second_error, b.second_error),
    )


# ---------------------------------------------------------------- the truth


class Unknown(Exception):
    """Neither autodiff nor differences can be trusted here."""


class Truth:
    """What a program's network really does, in float64: outputs φ (N, C) and losses ℓ (N,) of a parameter vector."""

    def __init__(self, program: Program, batch_statistics: bool = False) -> None:
        self.net = copy.deepcopy(network(program)).double()
        inputs, targets = data(program)
        self.inputs = inputs.double() if inputs.is_floating_point() else inputs
        self.targets = targets.double() if targets.is_floating_point() else targets
        self.loss = LOSSES[program["loss"]][2]
        if batch_statistics:
            for module in self.net.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.running_mean = module.running_var = None
        chosen = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in chosen.items()}
        self.point = torch.cat([p.detach().reshape(-1) for p in chosen.values()])
        self.size = len(self.point)
        self.free = self._free()

    def _free(self) -> Tensor:
        """1 for what may move, 0 for the rows of embeddings that are declared constant by `padding_idx`."""
        free = {name: torch.ones(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        for name, module in self.net.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
                free.get(f"{name}.weight", torch.ones(9, 1))[module.padding_idx] = 0
        return torch.cat([part.reshape(-1) for part in free.values()])

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {n: part.reshape(shape) for part, (n, shape) in zip(parts, self.shapes.items(), strict=True)}

    def outputs(self, vector: Tensor, inputs: Tensor | None = None) -> Tensor:
        inputs = self.inputs if inputs is None else inputs
        net = self.net if not vector.requires_grad else copy.deepcopy(self.net)
        return functional_call(net, self.split(vector.clone()), (inputs.clone(),))

    def both(self, vector: Tensor) -> Tensor:
        """Outputs and losses side by side, (N, C + 1)."""
        outputs = self.outputs(vector)
        return torch.cat([outputs.detach(), self.loss(outputs, self.targets)[:, None].detach()], 1)

    def along(self, direction: Tensor) -> Differences:
        with torch.no_grad():
            return differences(lambda t: self.both(self.point + t * self.free * direction))

    @cached_property
    def coupled(self) -> bool:
        """Whether a sample's outputs depend on the others of its batch."""
        with torch.no_grad():
            together = self.outputs(self.point)
            alone = [self.outputs(self.point, self.inputs[n : n + 1])[0] for n in range(len(self.targets))]
        return not _near(torch.stack(alone), together, 1e-9 * (1 + together.abs()))

    @cached_property
    def _autodiff(self) -> tuple[Tensor, Tensor, Tensor]:
        """J (N, C, P), ∇ℓ (N, P) and ∇²ℓ (N, P, P) by reverse mode, twice."""
        point = self.point.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            outputs = self.outputs(point)
            losses = self.loss(outputs, self.targets)
            jacobian = torch.stack([torch.stack([_rows(o, point)[0] for o in row]) for row in outputs])
            gradients, hessians = [], []
            for value in losses:
                slope = _rows(value, point, create_graph=True)[0]
                gradients.append(slope.detach())
                hessians.append(_rows(slope, point))
        return jacobian.detach(), torch.stack(gradients), torch.stack(hessians)

    @property
    def _believed(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """J, ∇ℓ, the diagonals of ∇²ℓ (N, P), and the dense ∇²ℓ if autodiff is right about it."""
        found = self._known_or_not
        if isinstance(found, Unknown):
            raise found
        return found

    @cached_property
    def _known_or_not(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | Unknown:
        try:
            return self._found_out()
        except Unknown as doubt:  # kept: it takes longest where nothing is known
            return doubt

    def _found_out(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        try:
            jacobian, gradients, hessians = self._autodiff
        except Exception:  # no second derivatives: those of differences will do
            return *self._by_differences(), None
        generator = torch.Generator().manual_seed(0)
        confirmed = torch.zeros(len(self.targets))
        right = bool(torch.isfinite(hessians).all())
        right &= _near(hessians, hessians.mT, 1e-9 * hessians.abs().amax((1, 2), keepdim=True) + 1e-14)
        for index in range(5):
            if not right:
                break
            v = torch.randn(self.size, generator=generator, dtype=torch.float64)
            if index == 4:  # a single parameter: what is lost among many shows here
                v = torch.eye(self.size, dtype=torch.float64)[int(torch.randint(self.size, (), generator=generator))]
            v = v * self.free
            v = v / v.norm().clamp_min(1e-9)
            found = self.along(v)
            slopes = torch.cat([jacobian @ v, (gradients @ v)[:, None]], 1)
            bends = torch.einsum("p,npq,q->n", v, hessians, v)
            scale = (hessians @ v).norm(dim=1) + 1e-6
            right &= _near(found.first, slopes, 1e-6 * (1 + slopes.abs()) + 10 * found.first_error)
            right &= _near(found.second[:, -1], bends, 1e-5 * scale + 10 * found.second_error[:, -1])
            confirmed += found.second_error[:, -1] < 1e-3 * scale
        if right and bool((confirmed >= 2).all()):
            return jacobian, gradients, hessians.diagonal(dim1=1, dim2=2), hessians
        return *self._by_differences(), None

    def _by_differences(self) -> tuple[Tensor, Tensor, Tensor]:
        each = [self.along(v) for v in torch.eye(self.size, dtype=torch.float64)]
        first = torch.stack([e.first for e in each], -1)
        error = torch.stack([e.first_error for e in each], -1)
        diagonal = torch.stack([e.second[:, -1] for e in each], -1)
        doubt = torch.stack([e.second_error[:, -1] for e in each], -1)
        if not _near(error, 0 * error, 1e-7 * (1 + first.abs())):
            raise Unknown("the first differences are not sharp")
        if not _near(doubt.sum(1), 0 * doubt.sum(1), 1e-7 * (1 + diagonal.abs().sum(1))):
            raise Unknown("the second differences are not sharp")
        return first[:, :-1], first[:, -1], diagonal

    jacobian = property(lambda self: self._believed[0])
    gradients = property(lambda self: self._believed[1])
    diagonals = property(lambda self: self._believed[2])

    @property
    def hessians(self) -> Tensor:
        found = self._believed[3]
        if found is None:
            raise Unknown("no dense Hessian")
        return found

    @property
    def dense(self) -> bool:
        return self._believed[3] is not None

    @cached_property
    def hessian(self) -> Tensor:
        return self.hessians.mean(0)

    @cached_property
    def output_hessians(self) -> Tensor:
        """A = ∂²ℓ/∂φ² of every sample, (N, C, C)."""
        result = []
        for row, target in zip(self.outputs(self.point).detach(), self.targets, strict=True):
            result.append(
                torch.autograd.functional.hessian(lambda o, t=target: self.loss(o[None], t[None])[0], row, strict=False)
            )
        return torch.stack(result)

    @cached_property
    def gauss_newton(self) -> Tensor:
        j = self.jacobian
        return (j.mT @ self.output_hessians @ j).mean(0)

    def blocks(self, diagonal: Tensor) -> dict[str, Tensor]:
        """Sums over each parameter tensor of numbers (…, P)."""
        parts = diagonal.split([shape.numel() for shape in self.shapes.values()], -1)
        return dict(zip(self.shapes, (part.sum(-1) for part in parts), strict=True))


def _rows(value: Tensor, point: Tensor, create_graph: bool = False) -> Tensor:
    """The derivative of each entry of `value`, (entries, P)."""
    if not value.requires_grad:
        return torch.zeros(value.numel(), len(point), dtype=point.dtype)
    flat = value.reshape(-1)
    if len(flat) > 1:
        with contextlib.suppress(RuntimeError):
            eye = torch.eye(len(flat), dtype=flat.dtype)
            return torch.autograd.grad(flat, point, eye, retain_graph=True, is_grads_batched=True)[0]
    options: Any = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
    return torch.stack([torch.autograd.grad(entry, point, **options)[0] for entry in flat])


def _near(a: Tensor, b: Tensor, tolerance: Tensor) -> bool:
    return bool(((a - b).abs() <= tolerance).all())


# ---------------------------------------------------------------- comparing

EXACT = {"float64": 1e-6, "float32": 1e-2}
SIGMAS = 6.0
PROBES = 16


@dataclass
class Finding:
    """Something that a way to measure said and that is not so; `kind` is "wrong" or "raised"."""

    way: str
    kind: str
    said: str
    truth: str = ""


@dataclass
class Outcome:
    compared: int = 0
    exact: int = 0
    estimates: list[float] = field(default_factory=list)
    """How many standard errors each estimate was off."""
    refusals: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


class Case:
    """A program's network before the library, with what is true of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.net, self.data = network(program), data(program)
        self.kind, self.loss, _ = LOSSES[program["loss"]]
        self.truth, self.outcome = Truth(program), Outcome()
        self.settings: dict[int, Setting] = {}
        self.way = ""

    @cached_property
    def operator(self) -> Any:
        return sl.hessian(self.net, self.data, loss=self.loss)

    def setting(self, seed: int) -> Setting:
        """What measures share of this network and a seed."""
        if seed not in self.settings:
            setting = Setting(self.net, self.data, loss=self.loss, seed=seed)
            setting.check()  # as whatever measures does first
            self.settings[seed] = setting
        return self.settings[seed]

    def same(
        self, what: str, said: Tensor | float, truth: Tensor | float, scale: Tensor | float, rel: float = 0
    ) -> None:
        """An exact answer: equal, relative to a scale that nothing cancels in."""
        said, truth = torch.as_tensor(said).double(), torch.as_tensor(truth).double()
        rel = max(rel, EXACT[self.program["dtype"]])
        tolerance = rel * torch.as_tensor(scale).double() + 1e-9
        self.outcome.compared += 1
        self.outcome.exact += 1
        if said.shape != truth.shape or not bool(((said - truth).abs() <= tolerance).all()):
            self._wrong(what, said, truth, tolerance)

    def _wrong(self, what: str, said: Tensor, truth: Tensor, tolerance: Tensor) -> None:
        where: Any = ()
        if said.ndim and said.shape == truth.shape:
            excess = ((said - truth).abs() / tolerance).nan_to_num(math.inf)
            where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), said.shape))
        label = f"{self.way}{f', {what}' if what else ''}{list(where) if where else ''}"
        if said.shape != truth.shape:
            self.outcome.findings.append(Finding(label, "wrong", f"shape {tuple(said.shape)}", f"{tuple(truth.shape)}"))
        else:
            self.outcome.findings.append(
                Finding(label, "wrong", f"{float(said[where]):.8g}", f"{float(truth[where]):.8g}")
            )

    def near(
        self, what: str, measure: Callable[[int], tuple[Tensor | float, Tensor | float]], truth: Any, scale: Any
    ) -> None:
        """An estimate (value, standard error) of a seed: unbiased, within its error of the truth.

        One that is far off is drawn twice more, so that a long tail is not taken for a wrong number.
        """
        truth = torch.as_tensor(truth).double()
        floor = EXACT[self.program["dtype"]] * torch.as_tensor(scale).double() + 1e-9
        draws = []
        for seed in range(3):
            value, error = (torch.as_tensor(part).double() for part in measure(seed))
            off = (value - truth).abs() / (error + floor)
            draws.append((value, error))
            if seed == 0:
                self.outcome.compared += 1
                self.outcome.estimates.append(float(off.reshape(-1)[0].nan_to_num(math.inf)))  # entries share probes
            if bool((off <= SIGMAS).all()):
                return
        value = torch.stack([v for v, _ in draws]).mean(0)
        error = torch.stack([e for _, e in draws]).square().mean(0).sqrt()
        if not bool(((value - truth).abs() <= SIGMAS * error / math.sqrt(3) + floor).all()):
            self._wrong(f"{what} (an estimate)".lstrip(), value, truth, SIGMAS * error + floor)

    def value(self, what: str, measure: Callable[[int], Any], truth: float, scale: float, rel: float = 0) -> None:
        """An `Estimate`, exact or not, defined or not."""
        found = measure(0)
        if math.isnan(found.value):
            self.outcome.refusals.append(f"{self.way}: {found.reason}")
        elif found.reason:
            self.outcome.refusals.append(f"{self.way}: (a number with a doubt) {found.reason}")
        elif found.stderr == 0:
            self.same(what, found.value, truth, scale, rel)
        else:
            self.near(what, lambda seed: _pair(measure(seed)), truth, scale)


def _pair(estimate: Any) -> tuple[float, float]:
    return estimate.value, estimate.stderr


WAYS: dict[str, Callable[[Case], None]] = {}
DEAR = (
    "sample traces",
    "traces by probes",
    "trace of some parameters",
    "hessian in small batches",
    "hessian variance",
    "margins",
    "measures of curvature",
    "measures of gradients",
    "relative flatness",
)
"""What takes so long that `compare` tries it on every third network only."""


def way(function: Callable[[Case], None]) -> Callable[[Case], None]:
    WAYS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def _traces(case: Case, **options: Any) -> None:
    truth = case.truth
    scale = truth.diagonals.abs().sum(1)
    wanted = truth.diagonals.sum(1)

    def measure(**more: Any) -> Any:
        return sl.sample_traces(case.net, case.data, loss=case.loss, probes=PROBES, **options, **more)

    found = measure()
    if not found.exact:
        case.near("", lambda seed: _draws(measure(seed=seed) if seed else found), wanted, scale)
        return
    case.same("", found.values, wanted, scale)
    blocks, scales = truth.blocks(truth.diagonals), truth.blocks(truth.diagonals.abs())
    for name, values in measure(per_layer=True).layers.items():
        case.same(f"of {name}", values, blocks[name], scales[name] + 1e-3 * scale)


def _draws(found: Any) -> tuple[Tensor, Tensor]:
    return found.values, found.stderr


@way
def sample_traces(case: Case) -> None:
    _traces(case)


@way
def exact_traces(case: Case) -> None:
    _traces(case, method="exact")


@way
def traces_in_small_batches(case: Case) -> None:
    _traces(case, method="exact", batch_size=2)


@way
def traces_one_by_one(case: Case) -> None:
    _traces(case, method="exact", batch_size=1)


@way
def traces_by_few_passes(case: Case) -> None:
    _traces(case, passes=1)


@way
def traces_by_probes(case: Case) -> None:
    _traces(case, method="hutchinson")


@way
def trace_of_some_parameters(case: Case) -> None:
    truth = case.truth
    name = list(truth.shapes)[case.program["seed"] % len(truth.shapes)]
    values = truth.blocks(truth.diagonals)[name].mean()
    scale = float(truth.blocks(truth.diagonals.abs())[name].mean()) + 1e-3 * float(truth.diagonals.abs().sum(1).mean())
    options = {"loss": case.loss, "params": name, "probes": PROBES}
    case.value(f"of {name}", lambda seed: sl.trace(case.net, case.data, seed=seed, **options), float(values), scale)


def _products(case: Case, op: Any, wanted: Tensor) -> None:
    scale = wanted.norm(dim=1).amax().expand(len(wanted), 1) * 0.1 + wanted.norm(dim=1, keepdim=True)
    case.same("", op.dense(), wanted, scale)


@way
def hessian(case: Case) -> None:
    truth, op = case.truth, case.operator
    if truth.dense:
        _products(case, op, truth.hessian)
        return
    diagonals = truth.diagonals
    case.same("diagonal", op.dense().diagonal(), diagonals.mean(0), diagonals.abs().mean(0) + diagonals.abs().mean())
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        v = torch.randn(truth.size, generator=generator, dtype=torch.float64)
        v /= v.norm()
        found = truth.along(v)
        error = float(found.second_error[:, -1].mean())
        v32 = v.to(op.dtype)
        said = float(v @ (op @ v32).double())
        case.same("along v", said, float(found.second[:, -1].mean()), abs(said) + 1e-2 + 1e7 * error)


@way
def hessian_in_small_batches(case: Case) -> None:
    op = sl.hessian(case.net, case.data, loss=case.loss, batch_size=2, memory=1)
    _products(case, op, case.truth.hessian)


@way
def gauss_newton(case: Case) -> None:
    _products(case, sl.gauss_newton(case.net, case.data, loss=case.loss), case.truth.gauss_newton)


@way
def empirical_fisher(case: Case) -> None:
    wanted = case.truth.gradients.mT @ case.truth.gradients / len(case.truth.gradients)
    _products(case, sl.empirical_fisher(case.net, case.data, loss=case.loss), wanted)


@way
def hessian_variance(case: Case) -> None:
    if case.truth.coupled:
        raise Unknown("batches of one are another function")
    each = case.truth.hessians
    mean = each.mean(0)
    op = sl.hessian_variance(case.net, case.data, loss=case.loss, batch_size=1)
    wanted = (each @ each).mean(0) - mean @ mean
    scale = float((each @ each).mean(0).abs().max())
    case.same("", op.dense(), wanted, scale)


@way
def eigenvalues(case: Case) -> None:
    values = torch.linalg.eigvalsh(case.truth.hessian)
    op = case.operator
    size = float(values.abs().max())
    for which, wanted in (("largest", values[-1]), ("smallest", values[0])):
        found = sl.eigenvalues(op, 1, which=which)
        if found.converged:
            case.same(which, found.values[0], wanted, size + 1e6 * float(found.residuals[0]))


@way
def diagonal(case: Case) -> None:
    wanted = case.truth.diagonals.mean(0)
    op = case.operator
    scale = case.truth.diagonals.abs().mean(0) + case.truth.diagonals.abs().mean()
    if len(wanted) <= 16:
        case.same("", sl.diagonal(op, probes=16).values, wanted, scale)
        return
    case.near("", lambda seed: _draws(sl.diagonal(op, probes=16, seed=seed)), wanted, scale * 10)


@way
def batch_statistics(case: Case) -> None:
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in case.net.modules()):
        return
    truth = Truth(case.program, batch_statistics=True)
    op = sl.hessian(case.net, case.data, loss=case.loss, batch_norm="batch", batch_size=len(case.data[1]))
    found = op.dense().double()
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        v = torch.randn(truth.size, generator=generator, dtype=torch.float64)
        v /= v.norm()
        there = truth.along(v)
        error = float(there.second_error[:, -1].mean())
        if error < 1e-5:
            said = float(v @ found @ v)
            case.same("along v", said, float(there.second[:, -1].mean()), float((found @ v).norm()) + 1e7 * error)


@way
def margins(case: Case) -> None:
    if case.kind != "classes":
        return
    truth, targets = case.truth, case.truth.targets
    outputs = truth.outputs(truth.point).detach()
    label = outputs.gather(1, targets[:, None])
    gaps = (label - outputs).scatter(1, targets[:, None], math.inf)
    floating = truth.inputs.is_floating_point()
    found = sl.margins(case.net, case.data, distance=2 if floating else None, loss=case.loss)
    case.same("signed", found.signed, gaps.amin(1), 1 + outputs.abs().amax(1))
    if not floating:
        return
    slopes, errors = _input_slopes(truth)
    steep = slopes.gather(1, targets[:, None, None].expand(-1, 1, slopes.shape[2])) - slopes
    size = steep.norm(dim=2)
    if bool((errors > 1e-7 * (1 + slopes.abs())).any()) or bool(
        (size + torch.eye(outputs.shape[1])[targets] < 1e-3).any()
    ):
        raise Unknown("the inputs have a kink, or no influence")
    distances = gaps / size.scatter(1, targets[:, None], 1.0)
    said = found.distance
    assert said is not None
    correct, wanted = gaps.amin(1) > 0, distances.amin(1)
    case.same("distance", said[correct], wanted[correct], 1 + wanted[correct].abs())


def _input_slopes(truth: Truth) -> tuple[Tensor, Tensor]:
    """∂φ/∂x by differences, (N, C, D), and their errors."""
    flat = truth.inputs.flatten(1)
    columns = []
    for index in range(flat.shape[1]):
        unit = torch.zeros_like(flat)
        unit[:, index] = 1
        unit = unit.view_as(truth.inputs)
        with torch.no_grad():
            columns.append(
                differences(lambda t, unit=unit: truth.outputs(truth.point, truth.inputs + t * unit).detach())
            )
    return torch.stack([c.first for c in columns], 2), torch.stack([c.first_error for c in columns], 2)


@way
def measures_of_curvature(case: Case) -> None:
    truth = case.truth
    curvature = truth.hessian
    values = torch.linalg.eigvalsh(curvature)
    size = float(values.abs().max())
    lengths = torch.cat([part.norm().expand(part.numel()) for part in truth.split(truth.point).values()])
    scaled = lengths[:, None] * curvature * lengths
    total = float(truth.diagonals.abs().sum(1).mean())
    gauss = truth.gauss_newton
    for name, wanted, scale in (
        ("trace", float(curvature.trace()), total),
        ("mean_eigenvalue", float(values.mean()), total / truth.size),
        ("fisher_trace", float(gauss.trace()), float(gauss.diagonal().abs().sum())),
        ("largest_eigenvalue", float(values[-1]), 100 * size),
        ("smallest_eigenvalue", float(values[0]), 100 * size),
        ("spectral_norm", size, 100 * size),
        ("frobenius_norm", float(curvature.norm()), float(curvature.norm())),
        ("layer_scaled_trace", float(scaled.trace()), float(scaled.diagonal().abs().sum())),
        ("quotient_norm", float(torch.linalg.eigvalsh(scaled).abs().max()), 100 * float(scaled.norm())),
        ("mean_square_eigenvalue", float(values.square().mean()), float(values.square().mean())),
    ):
        _measure(case, name, wanted, scale)


def _measure(case: Case, name: str, wanted: float, scale: float) -> None:
    try:
        case.value(name, lambda seed: MEASURES[name].compute(case.setting(seed)), wanted, scale)
    except (InputError, NotExactError) as error:
        case.outcome.refusals.append(f"{case.way}, {name}: {error}")


@way
def measures_of_gradients(case: Case) -> None:
    truth = case.truth
    gauss, gradients = truth.gauss_newton, truth.gradients
    for name, wanted, scale in (
        ("empirical_fisher_trace", float(gradients.square().sum(1).mean()), float(gradients.square().sum(1).mean())),
        ("fisher_rao_norm", float(truth.point @ gauss @ truth.point), float(gauss.norm() * truth.point.norm() ** 2)),
        ("weight_norm", float(truth.point.norm()), float(truth.point.norm())),
    ):
        _measure(case, name, wanted, scale)


@way
def relative_flatness(case: Case) -> None:
    net = case.net
    assert isinstance(net, Network)
    if not isinstance(net.head, nn.Linear):
        return
    truth = case.truth
    sizes = [shape.numel() for shape in truth.shapes.values()]
    start = sum(sizes[: list(truth.shapes).index("head.weight")])
    weight = truth.split(truth.point)["head.weight"]
    rows, columns = weight.shape
    blocks = truth.hessian[start : start + weight.numel(), start : start + weight.numel()]
    blocks = blocks.reshape(rows, columns, rows, columns)
    traces = torch.einsum("sctc->st", blocks)
    inner = weight @ weight.T
    _measure(case, "relative_flatness", float((inner * traces).sum()), float((inner * traces).abs().sum()))


@way
def nothing_is_touched(case: Case) -> None:
    """Run last by `compare`: what the other ways have left behind."""
    fresh = network(case.program)
    for (name, mine), (_, other) in zip(case.net.state_dict().items(), fresh.state_dict().items(), strict=True):
        if not torch.equal(mine, other):
            case.outcome.findings.append(Finding(case.way, "wrong", f"{name} was changed", "untouched"))
    if any(module.training for module in case.net.modules()):
        case.outcome.findings.append(Finding(case.way, "wrong", "a module was left in training mode", "untouched"))


def compare(
    program: Program, ways: list[str] | None = None, before: Callable[[str], None] = lambda way: None
) -> Outcome:
    """All comparisons of a program, or some; `before` hears each way's name before it is tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(program)
        often = program["seed"] % 3 == 0
        for name in ways or [name for name in WAYS if often or name not in DEAR]:
            case.way = name
            before(name)
            try:
                WAYS[name](case)
            except (InputError, NotExactError) as error:
                case.outcome.refusals.append(f"{name}: {error}")
                if not one_sentence(str(error)):
                    case.outcome.findings.append(Finding(name, "raised", f"no sentence: {error}"))
            except Unknown as doubt:
                case.outcome.unknown.append(f"{name}: {doubt}")
            except Exception as error:
                text = f"{type(error).__name__}: {first_line(error)} ({_innermost(error)})"
                case.outcome.findings.append(Finding(name, "raised", text))
    return case.outcome


def _innermost(error: BaseException) -> str:
    """The last place in the library, or outside it if there is none, where an error came through."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "spiritlevel" in code.co_filename or not found or "comparisons" in found:
            found = f"{code.co_filename.rsplit('/', 1)[-1]}, {code.co_name}"
        trace = trace.tb_next
    return found


def one_sentence(text: str) -> bool:
    return text.endswith((".", ")", "?")) and "\n" not in text


def reason(refusal: str) -> str:
    """A refusal without the names and numbers that make it this network's own."""
    text = re.sub(r"'[^']*'", "'…'", refusal)
    text = re.sub(r"\([^()]*\)", "(…)", text)
    return re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)[:200]
