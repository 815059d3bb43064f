"""Maps that change a network's parameters and keep its function, each with a certificate that says so.

A ReLU network computes the same function with its weights in many places, and its curvature differs between them
without bound (paper B). Every transform here returns `Transformed`: a new model and a `Certificate` of what is
preserved, checked on data. The original is never touched. A certificate's diagonal map T predicts the new Hessian,
H(Tθ) = T⁻¹H(θ)T⁻¹ (mathematics 7.1); `Transformed.hessian` applies it.

The layers that may be scaled are found by running the network on two samples and following the factor of every value:
linear layers, convolutions (grouped and transposed ones too), products with a matrix of parameters and the affine part
of batch norm take a factor; ReLU, leaky ReLU, PReLU, dropout, pooling, padding with zeros, reshaping and multiplication
by a number pass it on; sums and concatenations tie the layers in front of them into one group; batch norm absorbs it in
its statistics. Any other operation demands the factor 1.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.batches import Batches
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.estimators import Operator
from spiritlevel.results import Certificate

__all__ = [
    "AffineMap",
    "RadialMap",
    "ScalingGroup",
    "Transformed",
    "fold_batchnorm",
    "input_map",
    "radial",
    "rescale_all",
    "rescale_layers",
    "scale_before_batchnorm",
    "scale_last_layer",
    "scaling_groups",
    "standardisation",
    "whitening",
]

Factor = float | Tensor
"""A positive number, or one for each channel (for a parameter: a tensor that broadcasts to its shape)."""

_EQUAL = 1e-12  # relative difference up to which two factors count as equal
_CHECKED = 128  # samples of the caller's data on which outputs are compared
_GUESSED = 8  # random samples where no data are given
_SIZES = (32, 28, 64, 96, 128, 224)  # image sizes to try where no data are given
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative difference of outputs that is a fault, not rounding


@dataclass(frozen=True)
class Transformed:
    """A new model and the certificate of what it keeps.

    `inputs` is the map that the new model's inputs must have gone through, `None` unless the transform is `input_map`.
    `linear` says whether the diagonal map T of the certificate is all that happens to the parameters, θ → Tθ. Inside
    its ball a radial map is θ → θ̂ + T(θ − θ̂): then T predicts Hessians, but not what becomes of ‖θ‖.
    """

    model: nn.Module
    certificate: Certificate
    inputs: AffineMap | None = None
    linear: bool = True

    def hessian(self, operator: Operator) -> Operator:
        """The Hessian at the new parameters, T⁻¹HT⁻¹, from the operator H at the old ones.

        If the outputs are scaled by α, H must be that of θ ↦ ℓ(α·φ(θ)). Exact; a product costs one product with H.
        Any matrix that transforms alike may be passed, the Gauss-Newton matrix for one. Reference: paper B,
        section E; mathematics 7.1.

        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> shapes = {name: p.shape for name, p in net.named_parameters()}
        >>> before = Operator(lambda v: v, 3, shapes=shapes)
        >>> after = rescale_layers(net, {"0": 2.0, "2": 0.5}).hessian(before)
        >>> after.dense().diagonal()
        tensor([0.2500, 0.2500, 4.0000])
        """
        factors = self.certificate.factors
        if factors is None:
            raise InputError(
                f"{self.certificate.transform} is not a diagonal map of the parameters, so the new Hessian cannot be "
                "read off the old one; measure the new model instead."
            )
        if not operator.names:
            raise InputError("hessian needs an operator that knows its parameters' names and shapes.")
        parts = []
        for name, shape in operator.shapes.items():
            if name not in factors:
                raise unknown_name("parameter", name, factors)
            parts.append(torch.as_tensor(factors[name], dtype=torch.float64).expand(shape).reshape(-1))
        shrink = (1 / torch.cat(parts)).to(operator.device, operator.dtype)[:, None]
        return Operator(
            lambda block: shrink * (operator @ (shrink * block)),
            operator.size,
            dtype=operator.dtype,
            device=operator.device,
            shapes=operator.shapes,
        )


# ---------------------------------------------------------------- scaling layers


@dataclass(frozen=True)
class ScalingGroup:
    """Layers whose factors are tied: all `writers` put out the same scaled values, all `readers` must undo the factor.

    `absorbers` are batch norms that undo it in their statistics. `channels` is the number of output channels of the
    writers, `None` if they differ (behind a concatenation), where only one number for all channels is possible.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    absorbers: tuple[str, ...]
    channels: int | None

    def factors(self, beta: Factor) -> dict[str, Factor]:
        """The factors for `rescale_layers` that scale this group by β and keep the function.

        A number needs the readers' factors 1/β; one number a channel is undone in the readers' input channels anyway.
        """
        if isinstance(beta, Tensor) and beta.ndim:
            return dict.fromkeys(self.writers, beta)
        result: dict[str, Factor] = dict.fromkeys(self.writers, float(beta))
        for reader in self.readers:
            result[reader] = 1.0 if reader in result else 1 / float(beta)
        return result


def scaling_groups(model: nn.Module, *, data: Any = None) -> tuple[ScalingGroup, ...]:
    """The groups of layers that may be scaled without changing the function, found by running the network.

    Every combination of numbers that `rescale_layers` accepts is a product of these. Layers next to an operation that
    passes no factor on (tanh, softmax, a weight used twice) and the output layer are in no group. Cost: one forward
    pass of two samples. `data` as in `rescale_layers`. Reference: paper B, section E; mathematics 7.1.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> scaling_groups(net)
    (ScalingGroup(writers=('0',), readers=('2',), absorbers=(), channels=4),)
    """
    walk = _walk("scaling_groups", copy.deepcopy(model), _Sample.of(model, data).inputs, {})
    found = []
    for group in walk.free():
        writers = walk.adjacent(group, "writes")
        channels = {walk.layers[name].channels for name in writers}
        readers = walk.adjacent(group, "reads")
        found.append(
            ScalingGroup(
                tuple(writers),
                tuple(name for name in readers if not walk.layers[name].norm),
                tuple(name for name in readers if walk.layers[name].norm),
                channels.pop() if len(channels) == 1 else None,
            )
        )
    return tuple(found)


def why_no_groups(model: nn.Module, *, data: Any = None) -> str:
    """Why `scaling_groups` finds nothing: no factor passes, or an operation is not one that it can follow."""
    walk = _walk("scaling_groups", copy.deepcopy(model), _Sample.of(model, data).inputs, {})
    unknown = next((reason for reason in walk.reasons.values() if reason.startswith(_UNFOLLOWED)), "")
    return unknown or "the network has no two layers between which a factor passes"


def rescale_layers(
    model: nn.Module, factors: Mapping[str, Factor], *, data: Any = None, allow_output_scale: bool = False
) -> Transformed:
    """Multiply the weights of chosen layers by positive factors that cancel along every path to the output.

    θ_k → α_k θ_k and b_k → (Π_{j≤k} α_j) b_k with Π α_k = 1: each factor multiplies its layer's weight, each bias the
    product of the factors so far. A batch norm undoes a factor c at its input exactly, by running_mean·c,
    running_var·c² and eps·c², so the product starts again at 1 behind it; named itself, its affine part takes a factor
    (γ → αγ, β → αβ). A tensor with one factor for each output channel multiplies the rows of the weight and is undone
    in the input channels of the layers behind, which therefore need no factor. (A batch norm has one eps for all
    channels, so behind such a tensor it is exact in eval mode only.) The two sides of a residual sum must carry the
    same product.

    Args:
        model: any module; it is left as it was.
        factors: layer names (as in `named_modules`) and their factors.
        data: inputs to follow and compare outputs on: a tensor, or data as everywhere (the first 128 samples are used).
            Unless given, 8 normal random inputs of the shape that the first layer demands.
        allow_output_scale: whether the outputs may be multiplied by a number other than 1.

    The change is exact up to rounding. Cost: a copy of the model and a few forward passes. Reference: paper B, sections
    B and E, in the form of mathematics 7.3.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = rescale_layers(net, {"0": 8.0, "2": 0.125})
    >>> print(result.certificate)
    rescale_layers preserves: function (batch norm: eval and batch); outputs differ by at most 0, relatively 0, on 8 ...
    >>> result.certificate.factors
    {'0.weight': 8.0, '0.bias': 8.0, '2.weight': 0.125, '2.bias': 1.0}
    >>> rescale_layers(net, {"0": 8.0})
    Traceback (most recent call last):
    ...
    spiritlevel.errors.InputError: rescale_layers: these factors multiply the outputs by 8; choose factors whose ...
    """
    return _rescale("rescale_layers", model, factors, _Sample.of(model, data), None if allow_output_scale else 1.0)


def rescale_all(model: nn.Module, alpha: float, *, data: Any = None) -> Transformed:
    """Multiply the outputs by α, spread evenly over the layers: W_k → α^{1/K} W_k and b_k → α^{k/K} b_k.

    Where branches meet, equal shares are impossible; the shares (logarithms of the factors) are then the smallest in
    the sum of squares that keep the branches of every sum alike. Layers in front of the last batch norm have no
    influence on the scale of the outputs and stay as they are. Refused where an operation between the layers passes no
    factor on. Exact up to rounding; cost and `data` as in `rescale_layers`. Reference: paper A, section 5, in the form
    of mathematics 7.3.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> {name: round(factor, 9) for name, factor in rescale_all(net, 9.0).certificate.factors.items()}
    {'0.weight': 3.0, '0.bias': 3.0, '2.weight': 3.0, '2.bias': 9.0}
    """
    sample = _Sample.of(model, data)
    _positive("rescale_all", "alpha", alpha)
    walk = _walk("rescale_all", copy.deepcopy(model), sample.inputs, {})
    output = walk.root(walk.output.group)
    for group, reason in walk.fixed().items():
        scaled = any(walk.layers[name].params for name in walk.adjacent(group, "writes"))
        if group == output or (scaled and reason != _INPUT):
            raise InputError(f"rescale_all: {reason}; use scale_last_layer if the network ends in a layer.")
    # a layer's share is the exponent of the group it writes less that of the group it reads; the output's is 1
    column = {group: index for index, group in enumerate([*walk.free(), output])}
    shares = torch.zeros(len(walk.layers), len(column), dtype=torch.float64)
    for row, layer in zip(shares, walk.layers.values(), strict=True):
        for group, sign in ((layer.writes, 1), (layer.reads, 0 if layer.norm else -1)):
            if walk.root(group) in column:
                row[column[walk.root(group)]] += sign
    exponents = shares[:, -1]
    if len(column) > 1:
        solved = torch.linalg.lstsq(shares[:, :-1], -exponents[:, None], driver="gelsd").solution
        exponents = exponents + (shares[:, :-1] @ solved)[:, 0]
    chosen = {name: alpha**share for name, share in zip(walk.layers, exponents.tolist(), strict=True)}
    return _rescale("rescale_all", model, chosen, sample, float(alpha))


def scale_last_layer(model: nn.Module, alpha: float, *, data: Any = None) -> Transformed:
    """Multiply the outputs by α through the last layer alone, weights and bias.

    The predictions stay, the margins grow by α, and on correctly classified points with a unique argmax the whole
    Hessian goes to zero as α grows: its hidden block like α²e^{−αΔ}, the last layer's like e^{−αΔ}, Δ the margin.
    Works for any network that ends in a linear layer, a convolution or a batch norm. Exact up to rounding; cost and
    `data` as in `rescale_layers`. Reference: paper A, section 5 and Proposition 5.1, in the form of mathematics 7.6.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> scale_last_layer(net, 10.0).certificate.factors
    {'0.weight': 1.0, '0.bias': 1.0, '2.weight': 10.0, '2.bias': 10.0}
    """
    sample = _Sample.of(model, data)
    _positive("scale_last_layer", "alpha", alpha)
    walk = _walk("scale_last_layer", copy.deepcopy(model), sample.inputs, {})
    output = walk.root(walk.output.group)
    if output in walk.fixed():
        raise InputError(
            f"scale_last_layer: {walk.fixed()[output]}; the network must end in a linear layer, a convolution or a "
            "batch norm, so pass it without what follows."
        )
    last = ScalingGroup(
        tuple(walk.adjacent(output, "writes")),
        tuple(name for name in walk.adjacent(output, "reads") if not walk.layers[name].norm),
        (),
        None,
    )
    return _rescale("scale_last_layer", model, last.factors(float(alpha)), sample, float(alpha))


def scale_before_batchnorm(model: nn.Module, factors: Mapping[str, Factor], *, data: Any = None) -> Transformed:
    """Multiply weights and bias of layers in front of a batch norm by positive factors.

    The batch norm's running_mean·α, running_var·α² and eps·α² keep the function exactly in both batch-norm modes.
    (Keeping eps instead needs running_var' = α²(var + eps) − eps, which turns negative for small α and holds in eval
    mode only.) Exact up to rounding; cost and `data` as in `rescale_layers`. Reference: mathematics 7.4.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = scale_before_batchnorm(net, {"0": 100.0})
    >>> result.certificate.modes, round(result.model[1].eps, 9)
    (('eval', 'batch'), 0.1)
    """
    who = "scale_before_batchnorm"
    sample = _Sample.of(model, data)
    walk = _walk(who, copy.deepcopy(model), sample.inputs, {})
    for name, alpha in factors.items():
        if name not in walk.layers:
            raise unknown_name("layer that can be scaled", name, walk.layers)
        if isinstance(alpha, Tensor) and alpha.ndim:
            raise InputError(f"{who} takes one number a layer; use rescale_layers for a factor of each channel.")
        group = walk.root(walk.layers[name].writes)
        readers = walk.adjacent(group, "reads")
        others = [reader for reader in readers if not walk.layers[reader].norm]
        if others or not readers or group == walk.root(walk.output.group):
            where = f"by the layer {others[0]!r}" if others else "by no batch norm"
            raise InputError(f"{who}: the values of layer {name!r} are read {where}; use rescale_layers for it.")
    return _rescale(who, model, factors, sample, 1.0)


def _rescale(
    who: str, model: nn.Module, factors: Mapping[str, Factor], sample: _Sample, expected: float | None
) -> Transformed:
    """The one place where factors are followed, checked and applied; the outputs must be scaled by `expected`."""
    new = copy.deepcopy(model)
    walk = _walk(who, new, sample.inputs, {name: _checked_factor(who, name, a) for name, a in factors.items()})
    changes, scale = walk.changes(), walk.output.scale
    if walk.output.channels is not None and not _is_one(walk.output.channels):
        raise InputError(
            f"{who}: these factors scale the outputs differently in each channel; give the output layer one number."
        )
    if expected is not None:
        if not _same(scale, expected):
            raise InputError(
                f"{who}: these factors multiply the outputs by {scale:.6g}; choose factors whose product along every "
                "path is 1 (a batch norm starts it again), or pass allow_output_scale=True."
            )
        scale = expected
    modules = dict(new.named_modules())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if not _is_one(changes[name]):
                change = torch.as_tensor(changes[name], dtype=torch.float64, device=parameter.device)
                parameter.copy_(change * parameter.double())  # rounded once
        for name, factor in walk.absorbed.items():
            _absorb(modules[name], factor)
    notes = [f"the statistics and eps of batch norm {name!r} follow its scaled input" for name in walk.absorbed]
    uniform = all(isinstance(factor, float) for factor in walk.absorbed.values())
    return Transformed(
        new,
        sample.certify(
            who,
            model,
            new,
            scale=scale,
            modes=("eval", "batch") if uniform else ("eval",),
            factors=changes,
            notes=tuple(notes),
        ),
    )


def _absorb(norm: Any, factor: Factor) -> None:
    """Make a batch norm of c·x what it was of x: running_mean·c, running_var·c², eps·c².

    A factor for each channel shares one eps, so the running variance takes up the difference: running_var' + eps' =
    c²(running_var + eps) with the smallest eps·c².
    """
    c = torch.as_tensor(factor, dtype=torch.float64)
    eps = norm.eps * float(c.min()) ** 2
    if norm.running_mean is not None:
        c = c.to(norm.running_mean.device)
        variance = c**2 * norm.running_var.double() + (c**2 * norm.eps - eps)
        norm.running_mean.copy_(c * norm.running_mean.double())
        norm.running_var.copy_(variance)
    norm.eps = eps


def _positive(who: str, what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise InputError(f"{who} needs a positive, finite {what}, got {value!r}.")


def _checked_factor(who: str, name: str, factor: Any) -> Factor:
    if isinstance(factor, Tensor):
        if factor.ndim > 1 or not bool((factor > 0).all() & factor.isfinite().all()):
            raise InputError(
                f"{who}: the factor of layer {name!r} must be a positive, finite number or a vector of them, one for "
                f"each output channel; got a tensor of shape {tuple(factor.shape)} that is not."
            )
        return factor.detach().double().cpu() if factor.ndim else float(factor)
    _positive(who, f"factor of layer {name!r}", factor)
    return float(factor)


def _is_one(factor: Factor) -> bool:
    return _same(factor, 1.0)


def _same(first: Factor, second: Factor) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        a, b = torch.as_tensor(first, dtype=torch.float64), torch.as_tensor(second, dtype=torch.float64)
        return bool(((a - b).abs() <= _EQUAL * a.abs()).all())
    return abs(first - second) <= _EQUAL * abs(first)


# ---------------------------------------------------------------- following factors through a network

_UNCHANGED = frozenset("dropout dropout_ dropout1d dropout2d dropout3d clone contiguous detach to float double".split())
_HOMOGENEOUS = frozenset("relu relu_ leaky_relu leaky_relu_ prelu rrelu rrelu_ abs neg".split())
_NUMBER = frozenset("mul mul_ div div_ true_divide".split())
_SPATIAL = frozenset(
    """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d
    interpolate pad
    """.split()
)
_REDUCE = frozenset("mean sum amax amin".split())
_SHAPE = frozenset(
    """
    flatten view reshape unflatten permute transpose swapaxes movedim squeeze unsqueeze chunk split unbind narrow select
    __getitem__ expand pixel_shuffle pixel_unshuffle channel_shuffle
    """.split()
)
_SUM = frozenset("add add_ sub sub_ maximum minimum".split())
_JOIN = frozenset("cat concat concatenate stack".split())
_INPUT = "the input cannot be scaled"
_CONVOLUTION = frozenset("conv1d conv2d conv3d".split())
_TRANSPOSED = frozenset("conv_transpose1d conv_transpose2d conv_transpose3d".split())
_PRODUCT = frozenset("matmul __matmul__ mm".split())
_UNFOLLOWED = "factors are not followed through"
_NOT_FOLLOWED = _PRODUCT | frozenset("bmm addmm baddbmm mv einsum tensordot bilinear".split())
"""Products of matrices in forms in which no parameter is known for the weight of a layer."""


@dataclass(frozen=True)
class _Value:
    """What is known of a value: the group of values tied to it, its factor, and whether it is the input itself.

    The factor is `scale` times `channels`, a tensor of the value's own shape (`None`: all 1).
    """

    group: int
    scale: float = 1.0
    channels: Tensor | None = None
    raw: bool = False

    @property
    def factor(self) -> Factor:
        return self.scale if self.channels is None else self.scale * self.channels


@dataclass(frozen=True)
class _Layer:
    """A layer that takes a factor: the groups it reads and writes, its parameters and output channels."""

    reads: int
    writes: int
    params: tuple[str, ...]
    channels: int
    norm: bool = False
    shape: torch.Size | None = None  # of the input, if that is the network's own


@dataclass(frozen=True)
class _Call:
    """One operation: its tensors in and out, and what is known of those that came in."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    values: list[_Value]
    outputs: list[Tensor]

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    @property
    def linear(self) -> bool:
        """Whether it multiplies its only tensor by a number, or adds nothing to it."""
        summands = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, int | float)]
        scales = self.name in _NUMBER and "rounding_mode" not in self.kwargs
        return len(self.tensors) == 1 and (scales or (self.name in ("add", "add_") and not any(summands)))

    @property
    def pads_with_a_number(self) -> bool:
        return self.name == "pad" and self.kwargs.get("mode", "constant") == "constant"

    def again(self, replacements: list[Tensor]) -> Any:
        """The same call with other tensors."""
        table = {id(old): new for old, new in zip(self.tensors, replacements, strict=True)}
        args, kwargs = tree_map(lambda leaf: table.get(id(leaf), leaf), (self.args, self.kwargs))
        return self.func(*args, **kwargs)


class _Walk(TorchFunctionMode):
    """Follows the factor of every value while the network runs, and records what that demands of each parameter."""

    def __init__(self, who: str, problem: Problem, factors: Mapping[str, Factor]) -> None:
        super().__init__()
        self.who, self.factors, self.parameters = who, factors, tuple(problem.params)
        self.names = {id(tensor): name for name, tensor in problem.params.items()}
        self.modules = {id(module): name for name, module in problem.model.named_modules()}
        self.running = contextlib.ExitStack()
        self.stack: list[nn.Module] = []
        self.kept: list[Any] = []  # all tensors seen, so that no id is used twice
        self.values: dict[int, _Value] = {}
        self.parents: list[int] = []
        self.reasons: dict[int, str] = {}
        self.layers: dict[str, _Layer] = {}
        self.uses: dict[str, list[Factor]] = {}
        self.flipped: set[int] = set()  # transposed views of parameters
        self.added: list[tuple[str, int]] = []  # parameters that are added to values of a group
        self.absorbed: dict[str, Factor] = {}
        self.norms: dict[str, list[int]] = {}  # what each batch norm reads
        self.makers: dict[int, str] = {}  # what each layer writes
        self.readers: dict[int, int] = {}  # how many operations read a value
        self.obstacle = ""  # what reads the raw input and is no layer
        self.output = self._fixed("")

    # ---- what the walk found

    def root(self, group: int) -> int:
        while self.parents[group] != group:
            group = self.parents[group]
        return group

    def adjacent(self, group: int, side: str) -> list[str]:
        """The layers that write or read a group."""
        return [name for name, layer in self.layers.items() if self.root(getattr(layer, side)) == group]

    def fixed(self) -> dict[int, str]:
        """The groups that must keep the factor 1, and why."""
        result: dict[int, str] = {}
        for group, reason in self.reasons.items():
            result.setdefault(self.root(group), reason)
        for name, layer in self.layers.items():
            for param in layer.params:
                if len(self.uses[param]) > 1:  # tied weights
                    for group in (self.root(layer.reads), self.root(layer.writes)):
                        result.setdefault(group, f"the parameter {param!r} of layer {name!r} is used more than once")
        for param, group in self.added:
            if len(self.uses[param]) > 1:
                result.setdefault(self.root(group), f"the parameter {param!r} is used more than once")
        return result

    def free(self) -> list[int]:
        """The groups that may take any factor."""
        fixed = {*self.fixed(), self.root(self.output.group)}
        written = dict.fromkeys(self.root(layer.writes) for layer in self.layers.values())
        return [group for group in written if group not in fixed]

    def module(self, name: str, model: nn.Module) -> Any:
        """The linear or convolutional module of a layer, `None` if there is none or its parameters are tied."""
        params = self.layers[name].params if name else ()
        module = model.get_submodule(params[0].rpartition(".")[0]) if params else None
        once = all(len(self.uses[param]) == 1 for param in params)
        return module if once and isinstance(module, nn.Linear | _ConvNd) else None

    def source(self, norm: str) -> str:
        """The layer that only this batch norm reads, "" if there is none."""
        read = self.norms[norm]
        return self.makers.get(read[0], "") if len(read) == 1 and self.readers[read[0]] == 1 else ""

    def changes(self) -> dict[str, Factor]:
        """The factor of every parameter."""
        for name in self.factors:
            if name not in self.layers:
                raise unknown_name("layer that can be scaled", name, self.layers)
        result: dict[str, Factor] = {}
        for name in self.parameters:
            factors = self.uses.get(name, [1.0])
            if len(factors) > 1 and not all(_is_one(factor) for factor in factors):
                raise InputError(
                    f"{self.who}: the parameter {name!r} is used {len(factors)} times (tied weights), so one factor "
                    "cannot fit all its uses; scale other layers."
                )
            result[name] = factors[0]
        return result

    # ---- while the network runs

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that follow the values from the network's inputs on, and tell which module is running."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is model:
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._set(leaf, dataclasses.replace(self._fixed(_INPUT), raw=True))
                self.running.enter_context(self)
            self.stack.append(module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self.stack.pop()
            if module is model:
                self.running.close()

        for module in model.modules():
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)

    def finish(self, output: Tensor) -> None:
        self.output = self._of(output)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if cast(Any, torch._C)._functorch.maybe_current_level() is not None:
            raise InputError(
                f"{self.who}: {self._place()} runs inside a transformation of torch.func (vmap, grad, jvp …), through "
                "which factors are not followed; write it in batched operations."
            )
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func is Tensor.__setitem__:
            outputs = tensors[:1]
        if outputs:
            self.kept.append((tensors, outputs))
            for tensor in tensors:
                self.readers[id(tensor)] = self.readers.get(id(tensor), 0) + 1
            self._follow(_Call(func, args, kwargs, tensors, values, outputs))
        return result

    def _follow(self, call: _Call) -> None:
        """The rule of every operation: what becomes of the factors of its inputs."""
        name, values = call.name, call.values
        if name == "linear" or name in _CONVOLUTION or name in _TRANSPOSED or self._is_product(call):
            return self._layer(call)
        if self._is_flip(call):
            self.names[id(call.outputs[0])] = self.names[id(call.tensors[0])]
            return self.flipped.add(id(call.outputs[0]))
        if (bias := self._bias_of(call)) is not None:
            return self._shift(call, bias)
        if call.func is F.batch_norm and self.stack and isinstance(self.stack[-1], _BatchNorm):
            return self._norm(self.stack[-1], call)
        for tensor in call.tensors:
            self._use(tensor, 1.0)
        alone = len(call.tensors) == 1
        if alone and (name in _UNCHANGED or name in _SHAPE) and call.outputs[0].is_floating_point():
            results = self._shaped(call)
        elif call.linear or (values and name in _HOMOGENEOUS):
            for value in values[1:]:
                self._demand_one(name, value)
            results = [dataclasses.replace(values[0], raw=False)]
        elif alone and name in _SPATIAL and not (call.pads_with_a_number and call.kwargs.get("value")):
            results = [self._spread(call, output) for output in call.outputs]
        elif alone and name in _REDUCE:
            results = [self._reduced(call)]
        elif (name in _SUM and len(call.tensors) == 2) or (name in _JOIN and values):
            results = [self._joined(call)]
        else:
            results = [self._fixed(self._demand_one(name, *values)) for _ in call.outputs]
        if any(value.raw for value in values) and not any(value.raw for value in results):
            self.obstacle = self.obstacle or f"the operation '{name}' at {self._place()}"
        for output, value in zip(call.outputs, results, strict=True):
            self._set(output, value)
        return None

    def _demand_one(self, name: str, *values: _Value) -> str:
        """Refuse a factor here, and fix the values' groups; the reason for that."""
        reason = f"the operation '{name}' at {self._place()} passes no factor on"
        if name in _NOT_FOLLOWED:
            reason = f"{_UNFOLLOWED} the operation '{name}' at {self._place()}"
        for value in values:
            if not _is_one(value.factor):
                raise InputError(
                    f"{self.who}: {reason}, but its input is scaled by {_text(value.factor)}; choose factors that are "
                    "undone in front of it."
                )
            self.reasons.setdefault(value.group, reason)
        return reason

    def _is_product(self, call: _Call) -> bool:
        """Whether it is x @ W with a parameter W and an x that is none."""
        if call.name not in _PRODUCT or len(call.tensors) != 2:
            return False
        input, weight = call.tensors
        return weight.ndim == 2 and id(weight) in self.names and id(input) not in self.names

    def _is_flip(self, call: _Call) -> bool:
        """Whether it is Wᵀ of a parameter W."""
        if call.name not in ("t", "transpose", "swapaxes", "permute", "__get__") or len(call.tensors) != 1:
            return False
        tensor, output = call.tensors[0], call.outputs[0]
        known = id(tensor) in self.names and id(tensor) not in self.flipped and tensor.ndim == 2
        same = output is not tensor and output.data_ptr() == tensor.data_ptr() and output.numel() == tensor.numel()
        return known and same and output.shape == tensor.shape[::-1] and output.stride() == tensor.stride()[::-1]

    def _bias_of(self, call: _Call) -> int | None:
        """Which of two summands is a bare parameter that is added to values of the sum's own shape."""
        if call.name not in ("add", "add_", "sub", "sub_") or len(call.tensors) != 2 or call.kwargs:
            return None
        bare = [id(tensor) in self.names and id(tensor) not in self.flipped for tensor in call.tensors]
        if sum(bare) != 1:
            return None
        return bare.index(True) if call.tensors[1 - bare.index(True)].shape == call.outputs[0].shape else None

    def _shift(self, call: _Call, bias: int) -> None:
        """A parameter is added: it takes the factor of what it is added to."""
        parameter, values, value = call.tensors[bias], call.tensors[1 - bias], call.values[1 - bias]
        factor: Factor = value.scale
        if value.channels is not None:
            shape = [1] * (values.ndim - parameter.ndim) + list(parameter.shape)
            shared = [axis for axis, size in enumerate(shape) if size == 1]
            low, high = (reduce(value.channels, shared, keepdim=True) for reduce in (torch.amin, torch.amax))
            if not _same(low, high):
                raise self._unlike("values that one number is added to")
            factor = value.scale * high.reshape(parameter.shape)
        self._use(parameter, factor)
        self.added.append((self.names[id(parameter)], value.group))
        if value.raw:
            self.obstacle = self.obstacle or f"the operation '{call.name}' at {self._place()}"
        self._set(call.outputs[0], dataclasses.replace(value, raw=False))

    def _layer(self, call: _Call) -> None:
        """A linear layer or convolution: undoes a factor of each channel, passes a number on, adds its own factor."""
        (input, weight, *bias), value, output = call.tensors, call.values[0], call.outputs[0]
        dense = call.name not in _CONVOLUTION and call.name not in _TRANSPOSED
        axis = -1 if dense else 1 - weight.ndim
        groups = 1 if dense else call.kwargs.get("groups", call.args[6] if len(call.args) > 6 else 1)
        name = self.names.get(id(weight), "")
        key = name.removesuffix(".weight")
        own = self.factors.get(key, 1.0) if name else 1.0
        fan_out = output.shape[axis]
        self._fits(key, own, fan_out)
        undo = 1.0 if value.channels is None else 1 / self._vector(value.channels, axis)
        flipped = (call.name in _TRANSPOSED or call.name in _PRODUCT) != (id(weight) in self.flipped)
        shape = torch.Size(reversed(weight.shape)) if id(weight) in self.flipped else weight.shape
        inner = _grid(*((undo, own) if flipped else (own, undo)), shape, groups)
        for tensor, factor in ((input, 1.0), (weight, inner), *((tensor, value.scale * own) for tensor in bias)):
            self._use(tensor, factor)
        result = self._scaled(value.scale, own, output, axis)
        self._set(output, result)
        params = tuple(self.names[id(tensor)] for tensor in (weight, *bias) if id(tensor) in self.names)
        if len(params) < 1 + len(bias):  # a weight or bias that is computed: it takes no factor
            reason = self._demand_one(call.name, value, *call.values[1:])
            self.reasons.setdefault(result.group, reason)
        if name:
            reads = input.shape if value.raw and not flipped else None
            if value.raw and flipped:
                self.obstacle = self.obstacle or f"the operation '{call.name}' at {self._place()}"
            self._register(key, _Layer(value.group, result.group, params, fan_out, shape=reads))
            if output.ndim + axis == 1:  # its channels are where a batch norm looks for them
                self.makers[id(output)] = key

    def _norm(self, norm: Any, call: _Call) -> None:
        """A batch norm: absorbs the factor of its input, and takes one of its own."""
        key, input, value = self.modules[id(norm)], call.tensors[0], call.values[0]
        self._use(input, 1.0)
        self.norms.setdefault(key, []).append(id(input))
        own = self.factors.get(key, 1.0)
        self._fits(key, own, norm.num_features)
        incoming: Factor = value.scale
        if value.channels is not None:
            vector = value.scale * self._vector(value.channels, 1)
            incoming = float(vector[0]) if _same(vector, float(vector[0])) else vector
            if norm.running_mean is None and isinstance(incoming, Tensor):
                raise InputError(
                    f"{self.who}: the batch norm {key!r} keeps no running statistics, so it cannot undo a factor of "
                    "each channel exactly; give the layer in front of it one number."
                )
        if not _is_one(incoming):
            self.absorbed[key] = incoming
        if key in self.absorbed and len(self.norms[key]) > 1:
            raise InputError(
                f"{self.who}: the batch norm {key!r} is used more than once, so it cannot absorb a factor."
            )
        result = self._scaled(1.0, own, call.outputs[0], 1)
        params = [tensor for tensor in (norm.weight, norm.bias) if tensor is not None]
        for tensor in params:
            self._use(tensor, own)
        if not params:
            reason = f"the batch norm {key!r} has no affine part to scale"
            if not _is_one(own):
                raise InputError(f"{self.who}: {reason}.")
            self.reasons.setdefault(result.group, reason)
        names = tuple(self.names[id(tensor)] for tensor in params)
        self._register(key, _Layer(value.group, result.group, names, norm.num_features, norm=True))
        if value.raw:
            self.obstacle = self.obstacle or f"the batch norm {key!r}"
        self._set(call.outputs[0], result)

    def _register(self, key: str, layer: _Layer) -> None:
        if key in self.layers:
            for group in (self.layers[key].reads, self.layers[key].writes, layer.reads, layer.writes):
                self.reasons.setdefault(group, f"the layer {key!r} is used more than once (tied weights)")
            layer = dataclasses.replace(layer, shape=layer.shape or self.layers[key].shape)
        self.layers[key] = layer

    def _scaled(self, scale: float, own: Factor, output: Tensor, axis: int) -> _Value:
        if isinstance(own, float):
            return _Value(self._group(), scale * own)
        shape = [1] * output.ndim
        shape[axis] = -1
        return _Value(self._group(), scale, own.reshape(shape).expand(output.shape))

    def _shaped(self, call: _Call) -> list[_Value]:
        """Reshaping and copying: the factors go through the same operation."""
        value, tensor, output = call.values[0], call.tensors[0], call.outputs[0]
        channels: list[Any] = [value.channels] * len(call.outputs)
        if value.channels is not None and call.name in _SHAPE:
            laid_out = torch.empty_like(tensor, dtype=torch.float64, device="cpu").copy_(value.channels)
            channels = tree_leaves(call.again([laid_out]))  # a view needs the strides of the tensor itself
        raw = value.raw and torch.equal(output.reshape(-1).to(tensor), tensor.reshape(-1))
        return [dataclasses.replace(value, channels=item, raw=raw) for item in channels]

    def _spread(self, call: _Call, output: Tensor) -> _Value:
        """Pooling, padding, interpolation: a factor of each channel must not differ between positions."""
        value, tensor = call.values[0], call.tensors[0]
        copies = call.name == "pad" and not call.pads_with_a_number  # repeats entries of its input
        value = dataclasses.replace(value, raw=value.raw and copies)
        if value.channels is None:
            return value
        if tensor.ndim < 3 or output.shape[1] != tensor.shape[1]:
            raise self._unlike("channels that are pooled or padded together")
        vector = self._vector(value.channels, 1).reshape(1, -1, *[1] * (output.ndim - 2))
        return dataclasses.replace(value, channels=vector.expand(output.shape))

    def _reduced(self, call: _Call) -> _Value:
        """Sums and means over axes."""
        value = dataclasses.replace(call.values[0], raw=False)
        if value.channels is None:
            return value
        options = {key: item for key, item in call.kwargs.items() if key in ("dim", "keepdim")}
        low, high = (reduce(value.channels, *call.args[1:3], **options) for reduce in (torch.amin, torch.amax))
        if not _same(low, high):
            raise self._unlike("channels that are added up")
        return dataclasses.replace(value, channels=high)

    def _joined(self, call: _Call) -> _Value:
        """Sums and concatenations: what comes together must carry the same factor."""
        first, *rest = call.values
        shaped = [
            torch.ones(tensor.shape, dtype=torch.float64) if value.channels is None else value.channels
            for tensor, value in zip(call.tensors, call.values, strict=True)
        ]
        added = call.name in _SUM
        for value, channels in zip(rest, shaped[1:], strict=True):
            if not _same(first.scale, value.scale) or (added and not _same(shaped[0], channels)):
                raise InputError(
                    f"{self.who}: the operation '{call.name}' at {self._place()} joins values scaled by "
                    f"{_text(first.factor)} and by {_text(value.factor)}; the products of the factors on its branches "
                    "must agree."
                )
            self._tie(first.group, value.group)
        joined = None
        if any(value.channels is not None for value in call.values):
            joined = shaped[0].expand(call.outputs[0].shape) if added else call.again(shaped)
        return dataclasses.replace(first, channels=joined, raw=False)

    # ---- small parts

    def _of(self, tensor: Tensor) -> _Value:
        if id(tensor) not in self.values:  # a parameter, a buffer or a constant
            self.kept.append(tensor)
            self._set(tensor, self._fixed(f"a constant or parameter is read at {self._place()}"))
        return self.values[id(tensor)]

    def _set(self, tensor: Tensor, value: _Value) -> None:
        self.kept.append(tensor)
        self.values[id(tensor)] = value

    def _group(self) -> int:
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def _fixed(self, reason: str) -> _Value:
        group = self._group()
        self.reasons[group] = reason
        return _Value(group)

    def _tie(self, first: int, second: int) -> None:
        self.parents[self.root(second)] = self.root(first)

    def _use(self, tensor: Tensor, factor: Factor) -> None:
        """Note that a parameter is read here and must be multiplied by `factor`."""
        name = self.names.get(id(tensor))
        if name is not None:
            self.uses.setdefault(name, []).append(1.0 if _is_one(factor) else factor)
        elif not _is_one(factor):
            raise InputError(
                f"{self.who}: at {self._place()} a tensor that is no parameter (computed from others, as by weight "
                f"norm) would have to be scaled by {_text(factor)}; scale other layers."
            )

    def _fits(self, key: str, own: Factor, channels: int) -> None:
        if isinstance(own, Tensor) and own.shape != (channels,):
            raise InputError(
                f"{self.who}: layer {key!r} has {channels} output channels, but {own.numel()} factors were given."
            )

    def _vector(self, channels: Tensor, axis: int) -> Tensor:
        """One factor for each channel, from a tensor that must not differ otherwise."""
        flat = channels.movedim(axis, 0).flatten(1)
        if not _same(flat, flat[:, :1]):
            raise self._unlike("positions that a layer treats alike")
        return flat[:, 0]

    def _unlike(self, what: str) -> InputError:
        return InputError(
            f"{self.who}: at {self._place()} different factors meet in {what}; use one number instead of a factor of "
            "each channel for the layers in front of it."
        )

    def _place(self) -> str:
        if not self.stack or not self.modules.get(id(self.stack[-1])):
            return "the network's own forward"
        return f"{self.modules[id(self.stack[-1])]!r} ({type(self.stack[-1]).__name__})"


def _grid(first: Factor, second: Factor, shape: torch.Size, groups: int) -> Factor:
    """The factor of every entry of a weight, from those of the indices on its first axis and on its second.

    The second axis counts the channels of one group, so that the same index is another channel in each group.
    """
    rest = [1] * (len(shape) - 2)
    if isinstance(first, Tensor):
        first = first.reshape(-1, 1, *rest)
    if isinstance(second, Tensor):
        second = second.reshape(groups, 1, -1).expand(-1, shape[0] // groups, -1).reshape(*shape[:2], *rest)
    return first * second


def _text(factor: Factor) -> str:
    return "a factor of each channel" if isinstance(factor, Tensor) else f"{factor:.6g}"


def _walk(who: str, model: nn.Module, inputs: Any, factors: Mapping[str, Factor]) -> _Walk:
    """Run a copy of the user's network on two samples and follow the factors through it."""
    problem = Problem(model, params="*")
    walk = _Walk(who, problem, factors)
    inputs = tree_map(lambda leaf: leaf[:2] if isinstance(leaf, Tensor) else leaf, inputs)
    handles = list(walk.watch(problem.model))
    try:
        with problem.active(), torch.no_grad():
            walk.finish(problem.outputs(problem.params, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return walk


# ---------------------------------------------------------------- data to check on


@dataclass(frozen=True)
class _Sample:
    """Inputs on which outputs are compared, and their description."""

    inputs: Any
    count: int
    text: str

    @classmethod
    def of(cls, model: nn.Module, data: Any) -> _Sample:
        problem = Problem(model, params="*")
        if data is None:
            return cls._guessed(problem)
        inputs = data[:_CHECKED] if isinstance(data, Tensor) else Batches(data, ordered=False).first(_CHECKED)[0]
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        count = leaves[0].shape[0] if leaves and leaves[0].ndim else 0
        if not count:
            raise InputError("data= holds no samples; pass at least one input, better two or more.")
        shapes = ", ".join(str(tuple(leaf.shape[1:])) for leaf in leaves)
        return cls(problem.place(inputs, torch.empty(0))[0], count, f"{count} given inputs of shape {shapes}")

    @classmethod
    def _guessed(cls, problem: Problem) -> _Sample:
        generator = torch.Generator().manual_seed(0)
        for shape in _likely_shapes(problem.model):
            draws = torch.randn(_GUESSED, *shape, generator=generator, dtype=torch.float64)
            inputs = problem.place(draws, torch.empty(0))[0]
            try:
                with problem.active(), torch.no_grad():
                    problem.outputs(problem.params, inputs)
            except InputError:
                raise
            except Exception:  # whatever it says, this is not the shape the network takes
                continue
            return cls(inputs, _GUESSED, f"{_GUESSED} normal random inputs of shape {shape}")
        raise InputError(
            "the shape of the network's inputs cannot be told from its first layer; pass data=, a batch of inputs."
        )

    def certify(
        self,
        transform: str,
        old: nn.Module,
        new: nn.Module,
        *,
        scale: float = 1.0,
        modes: tuple[str, ...] = ("eval", "batch"),
        factors: dict[str, Factor] | None = None,
        notes: tuple[str, ...] = (),
        inputs: AffineMap | None = None,
    ) -> Certificate:
        """Compare the outputs of both models, in every mode that the transform promises."""
        normed = any(isinstance(module, _BatchNorm) for module in old.modules())
        if normed and self.count < 2:  # no statistics to take
            modes = tuple(mode for mode in modes if mode != "batch")
        largest = relative = 0.0
        for mode in modes:
            if mode == "batch" and not normed:
                continue  # the same as eval
            before = scale * _outputs(old, self.inputs, mode)
            after = _outputs(new, self.inputs if inputs is None else inputs(self.inputs), mode)
            difference = float((after - before).abs().max()) if before.numel() else 0.0
            size = float(before.abs().max()) if before.numel() else 0.0
            if not math.isfinite(size):
                raise InputError(f"{transform}: the model's outputs are not finite on {self.text}; check its weights.")
            largest = max(largest, difference)
            dtype = next(new.parameters()).dtype
            if not difference <= _TOLERANCE.get(dtype, 0.1) * size:
                raise InputError(
                    f"{transform}: the outputs changed by {difference:.2g} where their size is {size:.2g} (batch norm: "
                    f"{mode}); the factors are too extreme for {dtype}, or the network reads its weights in a way that "
                    "cannot be seen. Use milder factors or model.double()."
                )
            relative = max(relative, difference / size if size else 0.0)
        preserves = "function" if scale == 1.0 else f"outputs scaled by {scale:.6g}"
        return Certificate(transform, preserves, scale, modes, largest, relative, self.count, self.text, factors, notes)


def _likely_shapes(model: nn.Module) -> Iterable[tuple[int, ...]]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return [(module.in_features,)]
        if isinstance(module, _ConvNd):
            return [(module.in_channels, *[size] * len(module.kernel_size)) for size in _SIZES]
    return []


def _outputs(model: nn.Module, inputs: Any, batch_norm: str) -> Tensor:
    problem = Problem(model, params="*", batch_norm=batch_norm)
    with problem.active(), torch.no_grad():
        return problem.outputs(problem.params, problem.place(inputs, torch.empty(0))[0]).double()


# ---------------------------------------------------------------- folding batch norm


def fold_batchnorm(model: nn.Module, *, data: Any = None) -> Transformed:
    """Fold every batch norm into the linear layer or convolution directly in front of it (eval mode).

    W → diag(γ/σ) W and b → (b − μ)γ/σ + β with σ = √(running_var + eps); the batch norm becomes `nn.Identity`. A batch
    norm that does not directly and alone follow a layer (behind a sum, in front of a convolution) stays; the
    certificate's notes name it. Exact up to rounding, in eval mode only. Cost and `data` as in `rescale_layers`.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = fold_batchnorm(net)
    >>> result.model[1], result.certificate.modes
    (Identity(), ('eval',))
    """
    sample = _Sample.of(model, data)
    new = copy.deepcopy(model)
    walk = _walk("fold_batchnorm", new, sample.inputs, {})
    modules = dict(new.named_modules())
    folded, left = [], []
    for name in walk.norms:
        source = walk.module(walk.source(name), new)
        if modules[name].running_mean is None or source is None:
            left.append(name)
            continue
        _fold(source, modules[name])
        parent, _, child = name.rpartition(".")
        setattr(new.get_submodule(parent), child, nn.Identity())
        folded.append(name)
    if not folded:
        raise InputError(
            "fold_batchnorm: no batch norm with running statistics follows a linear layer or a convolution directly; "
            "there is nothing to fold."
        )
    notes = (f"batch norm {name!r} follows no layer directly and stays" for name in left)
    return Transformed(
        new, sample.certify("fold_batchnorm", model, new, modes=("eval",), factors=None, notes=tuple(notes))
    )


def _fold(layer: Any, norm: Any) -> None:
    def double(tensor: Tensor | None, otherwise: float) -> Tensor:
        return torch.full_like(norm.running_mean, otherwise).double() if tensor is None else tensor.detach().double()

    slope = double(norm.weight, 1.0) / (double(norm.running_var, 1.0) + norm.eps).sqrt()
    bias = (double(layer.bias, 0.0) - double(norm.running_mean, 0.0)) * slope + double(norm.bias, 0.0)
    axes: tuple[Factor, Factor] = (1.0, slope) if getattr(layer, "transposed", False) else (slope, 1.0)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.double() * _grid(*axes, layer.weight.shape, getattr(layer, "groups", 1)))
    _set_bias(layer, bias)


def _set_bias(layer: Any, bias: Tensor) -> None:
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_zeros(bias.shape), requires_grad=layer.weight.requires_grad)
    with torch.no_grad():
        layer.bias.copy_(bias)


# ---------------------------------------------------------------- input representation


@dataclass(frozen=True, eq=False)
class AffineMap:
    """The map x ↦ A x + s of inputs.

    `matrix` A is a number, a vector (a diagonal) or a square matrix, `shift` s a number or a vector. They act on the
    channels of an image batch (N, C, …) if they have C entries, and on the flattened input otherwise.

    >>> AffineMap(torch.tensor(2.0), torch.tensor([0.0, 1.0]))(torch.ones(1, 2))
    tensor([[2., 3.]])
    """

    matrix: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        sides = {*self.matrix.shape, *self.shift.shape}
        if self.matrix.ndim > 2 or self.shift.ndim > 1 or len(sides) > 1:
            raise InputError(
                "an affine map needs a number, a vector or a square matrix, and a number or a vector of the same "
                f"length; got shapes {tuple(self.matrix.shape)} and {tuple(self.shift.shape)}."
            )

    @property
    def size(self) -> int:
        """The number of channels or features the map acts on, 0 if it treats all alike."""
        return max([*self.matrix.shape, *self.shift.shape], default=0)

    def __call__(self, inputs: Tensor) -> Tensor:
        """The mapped inputs."""
        matrix, shift = (tensor.to(inputs.device, torch.float64) for tensor in (self.matrix, self.shift))
        if not self.size:
            return (matrix * inputs.double() + shift).to(inputs.dtype)
        channels = self._by_channel(inputs.shape)
        rows = (inputs.movedim(1, -1) if channels else inputs.flatten(1)).double()
        rows = (rows @ matrix.T if matrix.ndim == 2 else rows * matrix) + shift
        return (rows.movedim(-1, 1) if channels else rows.reshape(inputs.shape)).to(inputs.dtype)

    def _by_channel(self, shape: torch.Size) -> bool:
        if len(shape) > 2 and shape[1] == self.size:
            return True
        if shape[1:].numel() != self.size:
            raise InputError(
                f"an affine map of {self.size} features does not fit inputs of shape {tuple(shape[1:])}: it needs as "
                "many features as there are channels, or numbers in all."
            )
        return False

    def _inverse_applied(self, weight: Tensor) -> Tensor:
        """W A⁻¹ for a weight whose second axis are the features."""
        if self.matrix.ndim < 2:
            return weight / self.matrix.reshape(-1, *[1] * (weight.ndim - 2))
        flat = weight.movedim(1, -1)
        solved: Tensor = torch.linalg.solve(self.matrix, flat.reshape(-1, flat.shape[-1]), left=False)
        return solved.reshape(flat.shape).movedim(-1, 1)

    def _on(self, features: int) -> AffineMap:
        """The same map in float64 with one entry for each of `features`; channels are repeated for their positions."""
        matrix, shift = self.matrix.detach().double().cpu(), self.shift.detach().double().cpu()
        repeats = features // (self.size or features)
        if matrix.ndim == 2:
            matrix = torch.kron(matrix, torch.eye(repeats, dtype=torch.float64))
        elif matrix.ndim == 1:
            matrix = matrix.repeat_interleave(repeats)
        return AffineMap(matrix, shift.repeat_interleave(repeats) if shift.ndim else shift.expand(features))


def standardisation(inputs: Tensor, *, per: str = "channel") -> AffineMap:
    """The map to zero mean and unit variance of each channel, or of each feature (`per="feature"`).

    Features that never change keep their scale. Reference: paper B, section D.

    >>> images = torch.rand(10, 3, 4, 4)
    >>> mapped = standardisation(images)(images)
    >>> torch.allclose(mapped.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    True
    """
    rows = _rows(inputs, per)
    std = rows.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return AffineMap(1 / std, -rows.mean(0) / std)


def whitening(inputs: Tensor, *, per: str = "feature", ridge: float = 0.0) -> AffineMap:
    """The symmetric map to zero mean and unit covariance (ZCA), A = (Σ + ridge·I)^{−1/2}.

    Σ is the covariance of the features, or of the channels (`per="channel"`). Exact for ridge 0, which needs an
    invertible Σ. Cost: O(N d² + d³). Reference: paper B, section D.

    >>> points = torch.randn(50, 3, dtype=torch.float64) @ torch.tensor([[2.0, 0, 0], [1, 1, 0], [0, 3, 1]]).double()
    >>> torch.allclose(whitening(points)(points).T.cov(correction=0), torch.eye(3).double())
    True
    """
    rows = _rows(inputs, per)
    values, vectors = torch.linalg.eigh(rows.T.cov(correction=0).reshape(rows.shape[1], -1))
    values = values + ridge
    if not bool(values[0] > 1e-12 * values[-1]):
        raise InputError(
            f"whitening: the covariance of the {rows.shape[1]} features is singular; pass ridge=, for example "
            f"{1e-3 * float(values.mean()):.1g}, or per='channel'."
        )
    matrix = (vectors / values.sqrt()) @ vectors.T
    return AffineMap(matrix, -matrix @ rows.mean(0))


def _rows(inputs: Tensor, per: str) -> Tensor:
    if per not in ("channel", "feature"):
        raise unknown_name("value of per", per, ("channel", "feature"))
    return (inputs.movedim(1, -1).flatten(0, -2) if per == "channel" else inputs.flatten(1)).double().cpu()


def input_map(
    model: nn.Module, matrix: Tensor | float | None = None, shift: Tensor | float | None = None, *, data: Any = None
) -> Transformed:
    """Undo an invertible affine map of the inputs in the first layer: new_model(A x + s) = model(x).

    W → W A⁻¹ and b → b − W A⁻¹ s; a missing bias is added if s ≠ 0. A linear first layer (behind a flattening) takes
    any map of the flattened input or of its channels, a convolution any map of its channels. Where a convolution pads
    with zeros, the new one pads with s, the place of the old zero, so the border is exact too. Exact up to rounding,
    in both batch-norm modes. Cost: a solve in the number of features; `data` (old inputs) as in `rescale_layers`.
    `standardisation` and `whitening` make such maps. Reference: paper B, section D.

    Args:
        model: any module whose input is read by linear layers or convolutions only; it is left as it was.
        matrix: A, a number, a vector (diagonal) or a square matrix; 1 unless given.
        shift: s, a number or a vector; 0 unless given.
        data: inputs of the old model to compare outputs on.

    >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(20, 3)
    >>> whiten = whitening(x)
    >>> result = input_map(net, whiten.matrix, whiten.shift)
    >>> torch.allclose(result.model(whiten(x)), net(x), atol=1e-5)
    True
    """
    mapping = AffineMap(
        torch.as_tensor(1.0 if matrix is None else matrix, dtype=torch.float64),
        torch.as_tensor(0.0 if shift is None else shift, dtype=torch.float64),
    )
    square = mapping.matrix if mapping.matrix.ndim == 2 else torch.diag(mapping.matrix.reshape(-1))
    if (
        not bool(torch.isfinite(mapping.shift).all() & torch.isfinite(square).all())
        or not float(torch.linalg.cond(square)) < 1e15
    ):
        raise InputError(
            "input_map: the map of the inputs is not invertible; pass an invertible matrix and finite shift."
        )
    sample = _Sample.of(model, data)
    if not isinstance(sample.inputs, Tensor):
        raise InputError("input_map: the network must have one tensor as input.")
    new = copy.deepcopy(model)
    walk = _walk("input_map", new, sample.inputs, {})
    first = [name for name, layer in walk.layers.items() if layer.shape is not None]
    if walk.obstacle or not first:
        raise InputError(
            f"input_map: {walk.obstacle or 'no layer that is known'} reads the network's input, so the map cannot be "
            "undone in a first layer; put it in front of the network yourself."
        )
    factors: dict[str, Factor] | None = dict.fromkeys(walk.parameters, 1.0)
    for name in first:
        module, layer = walk.module(name, new), walk.layers[name]
        if module is None:
            raise InputError(f"input_map: the first layer {name!r} must be a module that is used once.")
        local = _first_layer_map(name, module, layer.shape, mapping, sample.inputs.shape)
        _fold_input(module, local)
        if factors is not None and local.matrix.ndim < 2 and not bool(local.shift.any()):
            factors[layer.params[0]] = local._inverse_applied(
                torch.ones(1, local.size, *module.weight.shape[2:]).double()
            )
        else:
            factors = None
    notes = ("the new model takes mapped inputs",)
    certificate = sample.certify("input_map", model, new, factors=factors, notes=notes, inputs=mapping)
    return Transformed(new, certificate, mapping)


def _first_layer_map(name: str, module: Any, shape: Any, mapping: AffineMap, whole: torch.Size) -> AffineMap:
    """The map of the features that this first layer reads."""
    if mapping.size:
        by_channel = mapping._by_channel(whole)
        if isinstance(module, _ConvNd) and not (by_channel and shape[1] == whole[1]):
            raise InputError(
                f"input_map: the first layer {name!r} is a convolution, which can undo maps of its "
                f"{module.in_channels} channels only, not of {mapping.size} features; use per='channel'."
            )
        if isinstance(module, nn.Linear) and len(shape) != 2:
            raise InputError(
                f"input_map: the first layer {name!r} reads inputs of shape {tuple(shape[1:])} without flattening "
                "them, so it can undo a number only."
            )
    if isinstance(module, _ConvNd) and (module.groups != 1 or module.transposed):
        raise InputError(f"input_map: the first layer {name!r} is a grouped or transposed convolution.")
    return mapping._on(module.in_channels if isinstance(module, _ConvNd) else module.in_features)


def _fold_input(module: Any, mapping: AffineMap) -> None:
    """W → W A⁻¹, b → b − W A⁻¹ s, zero padding → padding with s."""
    device = module.weight.device
    weight = mapping._inverse_applied(module.weight.detach().double().cpu())
    with torch.no_grad():
        module.weight.copy_(weight)
    if not bool(mapping.shift.any()):
        return
    moved = torch.einsum("oc...,c->o", weight, mapping.shift)
    bias = 0.0 if module.bias is None else module.bias.detach().double().cpu()
    _set_bias(module, (bias - moved).to(device))
    if isinstance(module, _ConvNd) and module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice):
        if type(module) not in _BORDERED:
            raise InputError(f"input_map: a {type(module).__name__} with padding cannot be given another border.")
        module.__class__ = _BORDERED[type(module)]
        module.padding = (0,) * len(module.kernel_size)
        module.register_buffer("border", mapping.shift.to(module.weight))


class _Bordered(_ConvNd):
    """A convolution whose border is a value of each channel instead of zero."""

    border: Tensor
    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        border = self.border.reshape(-1, *[1] * len(self.kernel_size))
        padded = F.pad(input - border, self._reversed_padding_repeated_twice) + border
        return self._conv_forward(padded, self.weight, self.bias)


class _Conv1d(_Bordered, nn.Conv1d):
    pass


class _Conv2d(_Bordered, nn.Conv2d):
    pass


class _Conv3d(_Bordered, nn.Conv3d):
    pass


_BORDERED: dict[type, type] = {nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d}


# ---------------------------------------------------------------- radial maps of the parameters


@dataclass(frozen=True, eq=False)
class RadialMap:
    """Paper B's radial transformation g of parameter space: it changes flatness at θ̂ and nothing outside a ball.

    g⁻¹(θ) = θ̂ + ψ(r, r̂, δ, ρ)/r · (θ − θ̂), r = ‖θ − θ̂‖, where ψ stretches [0, r̂] linearly to [0, ρ], [r̂, δ] to
    [ρ, δ], and is the identity beyond δ. g is the same map with r̂ and ρ exchanged. A loss L in the new parameters η is
    L(g(η)); at a critical point θ̂ its Hessian is (r̂/ρ)²∇²L. Calling the map gives g. Not differentiable on the spheres
    r = ρ and r = δ, where the inner piece is taken. Each operation costs O(P). Reference: paper B, section A;
    mathematics 7.7.

    >>> g = RadialMap(torch.zeros(2), delta=1.0, rho=0.1, r_hat=0.5)
    >>> g(torch.tensor([0.1, 0.0])), g.inverse(torch.tensor([0.5, 0.0])), g(torch.tensor([3.0, 4.0]))
    (tensor([0.5000, 0.0000]), tensor([0.1000, 0.0000]), tensor([3., 4.]))
    """

    center: Tensor
    delta: float
    rho: float
    r_hat: float

    def __post_init__(self) -> None:
        if self.center.ndim != 1:
            raise InputError(f"a radial map needs a flat center of shape (P,), got {tuple(self.center.shape)}.")
        if not (0 < self.delta < math.inf and 0 < self.rho < self.delta and 0 < self.r_hat < self.delta):
            raise InputError(
                "a radial map needs 0 < rho < delta and 0 < r_hat < delta, got "
                f"rho={self.rho}, r_hat={self.r_hat}, delta={self.delta}."
            )

    def __call__(self, eta: Tensor) -> Tensor:
        """g(η), differentiable."""
        center = self.center.to(eta)
        moved = eta - center
        square = moved @ moved
        middle = (square > self.rho**2) & (square <= self.delta**2)
        radius = torch.where(middle, square, 1.0).sqrt()  # no derivative of a root where it is not used, as at 0
        slope, offset = self._middle
        ratio = torch.where(middle, slope + offset / radius, self.r_hat / self.rho)
        return torch.where(square > self.delta**2, eta, center + ratio * moved)

    def inverted(self) -> RadialMap:
        """g⁻¹ as a map of its own: r̂ and ρ exchanged."""
        return RadialMap(self.center, self.delta, rho=self.r_hat, r_hat=self.rho)

    def inverse(self, theta: Tensor) -> Tensor:
        """g⁻¹(θ), the new parameters of a point θ."""
        return self.inverted()(theta)

    def jacobian(self, eta: Tensor) -> Tensor:
        """∂g/∂η = (ψ/r)·I + (ψ′ − ψ/r)·uuᵀ, u = (η − θ̂)/r; a (P, P) matrix."""
        ratio, slope, unit, _ = self._at(eta)
        eye = torch.eye(self.center.numel(), dtype=unit.dtype, device=unit.device)
        return ratio * eye + (slope - ratio) * torch.outer(unit, unit)

    def log_det(self, eta: Tensor) -> float:
        """The logarithm of the determinant, log det ∂g/∂η = log ψ′ + (P − 1) log(ψ/r)."""
        ratio, slope, _, _ = self._at(eta)
        return math.log(slope) + (self.center.numel() - 1) * math.log(ratio)

    def hessian(self, operator: Operator, *, at: Tensor | None = None, gradient: Tensor | None = None) -> Operator:
        """The Hessian of L∘g at η as an operator: JᵀHJ + Σ_i (∂_iL) ∇²g_i, with H and ∇L taken at g(η).

        Args:
            operator: H, the Hessian of L at g(η).
            at: η; the center unless given.
            gradient: ∇L at g(η); needed between the spheres only, where g is curved.

        Exact; a product costs one product with H and O(P).
        """
        ratio, slope, unit, radius = self._at(self.center if at is None else at)
        unit, bend = unit.to(operator.device, operator.dtype)[:, None], 0.0
        pull = torch.zeros_like(unit)
        if self.rho < radius <= self.delta:
            if gradient is None:
                raise InputError(
                    f"the point is at distance {radius:.6g} from the center, where the radial map is curved: pass "
                    "gradient=, that of the loss at g(at)."
                )
            bend = -self._middle[1] / radius**2  # derivative of ψ/r
            pull = gradient.detach().to(unit)[:, None]
        along = float(pull.mul(unit).sum())

        def jacobian(block: Tensor) -> Tensor:
            return ratio * block + (slope - ratio) * unit * (unit.T @ block)

        def multiply(block: Tensor) -> Tensor:
            result = jacobian(operator @ jacobian(block))
            if bend:
                inner = unit.T @ block
                result = result + bend * (pull * inner + unit * (pull.T @ block) + along * (block - 3 * unit * inner))
            return result

        return Operator(
            multiply, operator.size, dtype=operator.dtype, device=operator.device, shapes=operator.shapes or None
        )

    @property
    def _middle(self) -> tuple[float, float]:
        """ψ(r) = slope·r + offset between the spheres ρ and δ."""
        slope = (self.r_hat - self.delta) / (self.rho - self.delta)
        return slope, self.delta * (1 - slope)

    def _at(self, eta: Tensor) -> tuple[float, float, Tensor, float]:
        """ψ/r, ψ′, the unit vector u and r at a point."""
        moved = eta.detach() - self.center.to(eta)
        radius = float(moved.norm())
        unit = moved / radius if radius else moved
        if radius > self.delta:
            return 1.0, 1.0, unit, radius
        if radius > self.rho:
            slope, offset = self._middle
            return slope + offset / radius, slope, unit, radius
        return self.r_hat / self.rho, self.r_hat / self.rho, unit, radius


class _Radial(nn.Module):
    """A model in the parameters η: its weights are g(η). Names, buffers and submodules are the model's own."""

    def __init__(self, model: nn.Module, mapping: RadialMap, names: list[str]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        # One attribute with a name that no child of the model has. The model stands in a tuple, because its tables are
        # already this module's own.
        self._spiritlevel_radial = model, mapping, names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs at g(η)."""
        model, mapping, names = self._spiritlevel_radial
        model.training = self.training
        own = dict(self.named_parameters())
        flat = mapping(torch.cat([own[name].reshape(-1) for name in names]))
        parts = flat.split([own[name].numel() for name in names])
        weights = {name: part.reshape(own[name].shape) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, weights, args, kwargs)


def radial(
    model: nn.Module, *, delta: float, rho: float, r_hat: float, center: Tensor | None = None, data: Any = None
) -> Transformed:
    """The same function in radially stretched parameters: the Hessian at a minimum becomes (r̂/ρ)²∇²L.

    The new model holds η = g⁻¹(θ) and computes with g(η), see `RadialMap`; parameter names stay. Its loss surface is
    the old one outside the ball of radius δ around the center, and stretched inside, so the flatness of one minimum
    can be changed while all others keep theirs. Exact up to rounding; cost and `data` as in `rescale_layers`.

    Args:
        model: any module; it is left as it was.
        delta: radius δ of the ball.
        rho: radius ρ of the inner ball in the new parameters.
        r_hat: radius r̂ of its image in the old ones.
        center: θ̂, the trainable parameters laid end to end; those of the model unless given.
        data: as in `rescale_layers`.

    Reference: paper B, section A; mathematics 7.7.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> radial(net, delta=1.0, rho=0.25, r_hat=0.5).certificate.factors["0.weight"]
    0.5
    """
    sample = _Sample.of(model, data)
    new = copy.deepcopy(model)
    parameters = {name: p for name, p in new.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("radial: the model has no parameter that requires grad.")
    theta = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
    center = theta if center is None else center.detach()
    if center.shape != theta.shape:
        raise InputError(f"radial needs a center of shape ({theta.numel()},), got {tuple(center.shape)}.")
    mapping = RadialMap(center, delta, rho, r_hat)
    eta = mapping.inverse(theta)
    with torch.no_grad():
        for parameter, part in zip(
            parameters.values(), eta.split([p.numel() for p in parameters.values()]), strict=True
        ):
            parameter.copy_(part.reshape(parameter.shape))
    radius = float((theta - center.to(theta)).norm())
    factors: dict[str, Factor] | None = None
    if radius <= r_hat or radius > delta:
        ratio = rho / r_hat if radius <= r_hat else 1.0
        factors = {name: ratio if name in parameters else 1.0 for name, _ in new.named_parameters()}
    wrapped = _Radial(new, mapping, list(parameters))
    certificate = sample.certify("radial", model, wrapped, factors=factors)
    return Transformed(wrapped, certificate, linear=radius > delta)
