"""Scaling layers by positive factors that cancel along every path, and the outputs by a number."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.devices import doubled
from spiritlevel.binding.modules import twin_of
from spiritlevel.binding.reading import Form, Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.results import figure
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.watching.factors import Factor, is_one, same
from spiritlevel.watching.scalings import INPUT, UNFOLLOWED, Walk, follow_factors


@dataclass(frozen=True)
class ScalingGroup:
    """Layers whose factors are tied: all `writers` output the same scaled values, all `readers` must undo the factor.

    `absorbers` are batch norms that undo it in their statistics. `channels` is the number of output channels of the
    writers, `None` if they differ (after a concatenation), where only one number for all channels is possible.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    absorbers: tuple[str, ...]
    channels: int | None

    def factors(self, beta: Factor) -> dict[str, Factor]:
        """The factors for `rescale_layers` that scale this group by β and keep the function.

        A single number needs the readers' factors 1/β; one number per channel is undone in the readers' input channels
        anyway.
        """
        if isinstance(beta, Tensor) and beta.ndim:
            return dict.fromkeys(self.writers, beta)
        result: dict[str, Factor] = dict.fromkeys(self.writers, float(beta))
        for reader in self.readers:
            result[reader] = 1.0 if reader in result else 1 / float(beta)
        return result


def _groups_walk(model: nn.Module, data: Any, form: Form) -> Walk:
    sample = Sample.of(model, data, form)
    follow = lambda: follow_factors("scaling_groups", sample.problem(model), sample.inputs, {})  # noqa: E731
    return sample.once("walk", model, follow)


@checked
@in_turn()
def scaling_groups(model: nn.Module, *, data: Any = None, **reading: Unpack[Reading]) -> tuple[ScalingGroup, ...]:
    """The groups of layers that may be scaled without changing the function, found by running the network.

    Every combination of numbers that `rescale_layers` accepts is a product of these. Layers next to an operation that
    passes no factor on (tanh, softmax, a weight used twice) and the output layer are in no group. Cost: one forward
    pass of two samples. `data` as in `rescale_layers`. Reference: paper B, section E; mathematics 7.1.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> scaling_groups(net)
    (ScalingGroup(writers=('0',), readers=('2',), absorbers=(), channels=4),)
    """
    walk = _groups_walk(model, data, form_of(reading))
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


@in_turn()
def why_no_groups(model: nn.Module, *, data: Any = None, **reading: Unpack[Reading]) -> str:
    """Why `scaling_groups` finds nothing: no factor passes, or there is an operation that it cannot follow."""
    walk = _groups_walk(model, data, form_of(reading))
    unknown = next((reason for reason in walk.reasons.values() if reason.startswith(UNFOLLOWED)), "")
    return unknown or "the network has no two layers between which a factor passes"


@checked
@in_turn()
def rescale_layers(
    model: nn.Module,
    factors: Mapping[str, Factor],
    *,
    data: Any = None,
    allow_output_scale: bool = False,
    **reading: Unpack[Reading],
) -> Transformed:
    """Multiply the weights of chosen layers by positive factors that cancel along every path to the output.

    θ_k → α_k θ_k and b_k → (Π_{j≤k} α_j) b_k with Π α_k = 1: each factor multiplies its layer's weight, and each bias
    is multiplied by the product of the factors so far. A batch norm undoes a factor c at its input exactly, by
    running_mean·c, running_var·c² and eps·c², so the product starts again at 1 after it; if it is named itself, its
    affine part takes a factor (γ → αγ, β → αβ). A tensor with one factor for each output channel multiplies the rows
    of the weight and is undone in the input channels of the next layers, which therefore need no factor. (A batch norm
    has one eps for all channels, so after such a tensor it is exact only in eval mode.) The two sides of a residual sum
    must carry the same product.

    Args:
        model: any module; it is left as it was.
        factors: layer names (as in `named_modules`) and their factors.
        data: inputs to follow and compare outputs on: a tensor, or data of any accepted kind (the first 128 samples are
            used). By default 8 normal random inputs of the shape that the first layer demands.
        allow_output_scale: whether the outputs may be multiplied by a number other than 1.
        reading: `target=`, `batch=`, `output=`: how batches and outputs are read; see `Reading`. As in all transforms.

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
    return _rescale(
        "rescale_layers", model, factors, Sample.of(model, data, form_of(reading)), None if allow_output_scale else 1.0
    )


@checked
@in_turn()
def rescale_all(model: nn.Module, alpha: float, *, data: Any = None, **reading: Unpack[Reading]) -> Transformed:
    """Multiply the outputs by α, spread evenly over the layers: W_k → α^{1/K} W_k and b_k → α^{k/K} b_k.

    Where branches meet, equal shares are impossible; the shares (logarithms of the factors) are then those with the
    smallest sum of squares that keep the branches of every sum equal. Layers before the last batch norm have no
    influence on the scale of the outputs and stay as they are. Refused where an operation between the layers passes no
    factor on. Exact up to rounding; cost and `data` as in `rescale_layers`. Reference: paper A, section 5, in the form
    of mathematics 7.3.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> {name: round(factor, 9) for name, factor in rescale_all(net, 9.0).certificate.factors.items()}
    {'0.weight': 3.0, '0.bias': 3.0, '2.weight': 3.0, '2.bias': 9.0}
    """
    sample = Sample.of(model, data, form_of(reading))
    _positive("rescale_all", "alpha", alpha)
    walk = follow_factors("rescale_all", sample.problem(model), sample.inputs, {})
    output = walk.root(walk.output.group)
    for group, reason in walk.fixed().items():
        scaled = any(walk.layers[name].params for name in walk.adjacent(group, "writes"))
        if group == output or (scaled and reason != INPUT):
            raise InputError(f"rescale_all: {reason}; use scale_last_layer if the network ends in a layer.")
    # a layer's share is the exponent of the group it writes minus that of the group it reads; the output's is 1
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


@checked
@in_turn()
def scale_last_layer(model: nn.Module, alpha: float, *, data: Any = None, **reading: Unpack[Reading]) -> Transformed:
    """Multiply the outputs by α through the last layer alone, weights and bias.

    The predictions stay, the margins grow by α, and on correctly classified points with a unique argmax the whole
    Hessian goes to zero as α grows: its hidden block like α²e^{−αΔ}, the last layer's like e^{−αΔ}, Δ the margin.
    Works for any network that ends in a linear layer, a convolution or a batch norm. Exact up to rounding; cost and
    `data` as in `rescale_layers`. Reference: paper A, section 5 and Proposition 5.1, in the form of mathematics 7.6.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> scale_last_layer(net, 10.0).certificate.factors
    {'0.weight': 1.0, '0.bias': 1.0, '2.weight': 10.0, '2.bias': 10.0}
    """
    sample = Sample.of(model, data, form_of(reading))
    _positive("scale_last_layer", "alpha", alpha)
    walk = follow_factors("scale_last_layer", sample.problem(model), sample.inputs, {})
    output = walk.root(walk.output.group)
    if reason := walk.fixed().get(output):
        way_out = "the network must end in a linear layer, a convolution or a batch norm, so pass it without what "
        way_out += "comes after that"
        if "used more than once" in reason:
            way_out = "give the last layer a copy of its own"
        raise InputError(f"scale_last_layer: {reason}; {way_out}.")
    last = ScalingGroup(
        tuple(walk.adjacent(output, "writes")),
        tuple(name for name in walk.adjacent(output, "reads") if not walk.layers[name].norm),
        (),
        None,
    )
    return _rescale("scale_last_layer", model, last.factors(float(alpha)), sample, float(alpha))


@checked
@in_turn()
def scale_before_batchnorm(
    model: nn.Module, factors: Mapping[str, Factor], *, data: Any = None, **reading: Unpack[Reading]
) -> Transformed:
    """Multiply weights and bias of layers before a batch norm by positive factors.

    The batch norm's running_mean·α, running_var·α² and eps·α² keep the function exactly in both batch-norm modes.
    (Keeping eps instead needs running_var' = α²(var + eps) − eps, which turns negative for small α and holds only in
    eval mode.) Exact up to rounding; cost and `data` as in `rescale_layers`. Reference: mathematics 7.4.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    >>> result = scale_before_batchnorm(net, {"0": 100.0})
    >>> result.certificate.modes, round(result.model[1].eps, 9)
    (('eval', 'batch'), 0.1)
    """
    who = "scale_before_batchnorm"
    sample = Sample.of(model, data, form_of(reading))
    walk = follow_factors(who, sample.problem(model), sample.inputs, {})
    for name, alpha in factors.items():
        if name not in walk.layers:
            raise unknown_name("layer that can be scaled", name, walk.layers)
        if isinstance(alpha, Tensor) and alpha.ndim:
            raise InputError(f"{who} takes one number per layer; use rescale_layers for a factor per channel.")
        group = walk.root(walk.layers[name].writes)
        readers = walk.adjacent(group, "reads")
        others = [reader for reader in readers if not walk.layers[reader].norm]
        if others or not readers or group == walk.root(walk.output.group):
            where = f"by the layer {others[0]!r}" if others else "by no batch norm"
            raise InputError(f"{who}: the values of layer {name!r} are read {where}; use rescale_layers for it.")
    return _rescale(who, model, factors, sample, 1.0)


def demanded(model: nn.Module, factors: Mapping[str, Factor], sample: Sample) -> dict[str, Factor]:
    """The factor of every parameter that these factors of layers demand, followed on two samples."""
    return follow_factors("rescale_layers", sample.problem(model), sample.inputs, factors).changes()


def _rescale(
    who: str, model: nn.Module, factors: Mapping[str, Factor], sample: Sample, expected: float | None
) -> Transformed:
    """The one place where factors are followed, checked and applied; the outputs must be scaled by `expected`."""
    checked = {name: _checked_factor(who, name, factor) for name, factor in factors.items()}
    walk = follow_factors(who, sample.problem(model), sample.inputs, checked)
    new = twin_of(model)
    changes, scale = walk.changes(), walk.output.scale
    if walk.output.channels is not None and not is_one(walk.output.channels):
        raise InputError(
            f"{who}: these factors scale the output channels differently; give the output layer one number."
        )
    if expected is not None:
        if not same(scale, expected):
            raise InputError(
                f"{who}: these factors multiply the outputs by {figure(scale, 6)}; choose factors whose product "
                "along every path is 1 (a batch norm starts it again), or pass allow_output_scale=True."
            )
        scale = expected
    modules = dict(new.named_modules())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if not is_one(changes[name]):
                before = doubled(parameter)
                change = torch.as_tensor(changes[name], dtype=torch.float64, device=before.device)
                parameter.copy_(change * before)  # rounded once
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
    """Make a batch norm give for c·x what it gave for x: running_mean·c, running_var·c², eps·c².

    Factors per channel share one eps, so the running variance takes up the difference: running_var' + eps' =
    c²(running_var + eps) with the smallest eps·c².
    """
    c = torch.as_tensor(factor, dtype=torch.float64)
    eps = norm.eps * float(c.min()) ** 2
    if norm.running_mean is not None:
        mean, variance = doubled(norm.running_mean), doubled(norm.running_var)
        c = c.to(mean.device)
        variance = c**2 * variance + (c**2 * norm.eps - eps)
        norm.running_mean.copy_(c * mean)
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
        return factor.detach().cpu().double() if factor.ndim else float(factor)
    _positive(who, f"factor of layer {name!r}", factor)
    return float(factor)
