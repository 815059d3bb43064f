"""The search for what moves a measure furthest at the same outputs.

Scalings of layers are chosen by what theory predicts for them. For every other continuous symmetry a few steps are
taken along an exact slope. Whatever is found is applied, certified and measured: a reported factor was reached.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spiritlevel import transforms as maps
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.measures import Measure, Setting
from spiritlevel.results import Certificate, Estimate, WorstFactor
from spiritlevel.transforms import ScalingGroup, Transformed
from spiritlevel.transforms.certificates import Sample
from spiritlevel.transforms.families import Family, Objective
from spiritlevel.transforms.maps import LinearMap
from spiritlevel.transforms.scaling import demanded
from spiritlevel.transforms.watched import Watched
from spiritlevel.watching.factors import Factor

PROBES = 10  # products for an estimated trace: few, since it is taken again for every transform
_REACHES = (32.0, 8.0, 2.0)  # largest factor of a group in the search; the next one if numbers get too extreme
_LIMIT = 100.0  # condition of matrices and spread of factors in the search
_LONGEST = 10.0  # length of shifts in it
_SHIFTS = ("shift_logits", "shift_attention_biases")
_STEPS = 3  # uphill
_DRAWN, _AFFORDABLE = 25, 60  # forward passes of measures that are taken at a random point, and at the end of a climb
_PURPOSE = 11  # of the random signs that stand for all parameters
_EQUAL = {torch.float64: 1e-6}  # relative difference that still counts as equal; 1e-3 in single precision
SINGLE = 1e-3


def equal_within(here: Setting) -> float:
    """The relative difference of two values that still counts as none, in the precision of the parameters."""
    return _EQUAL.get(here.problem.dtype, SINGLE)


def sample_of(here: Setting) -> Sample:
    """The inputs on which all transforms of this model are found and compared."""
    return here.once("sample of transforms", lambda: Sample.of(here.model, here.data, here.form))


def _two_of(here: Setting) -> Sample:
    """Two of them, for certificates of which only the factors are wanted."""
    return here.once("two samples of transforms", lambda: sample_of(here).first(2))


def moved_to(here: Setting, transformed: Transformed) -> Setting:
    """The transformed model on the same data, mapped if its inputs are."""
    there = here.moved(transformed.model)
    there.probes = PROBES if here.probes is None else here.probes
    mapping = transformed.inputs
    if mapping is None:
        return there
    return there.on([(mapping(inputs), targets) for inputs, targets in here.batches], read=True)


def scaled(here: Setting, pairs: Iterable[tuple[ScalingGroup, float]], data: Sample | None = None) -> Transformed:
    """Every group scaled by its number; factors of a layer in two groups multiply."""
    factors: dict[str, Factor] = {}
    for group, beta in pairs:
        for layer, factor in group.factors(beta).items():
            factors[layer] = factors.get(layer, 1.0) * factor
    return maps.rescale_layers(here.model, factors, data=sample_of(here) if data is None else data)


def searches(
    here: Setting, chosen: list[Measure], before: dict[str, Estimate], applied: Collection[str]
) -> list[Callable[[], Iterable[WorstFactor]]]:
    """The searches that there are, each for any rank that is free; `applied` names the transforms that apply."""
    climbs = [partial(_climbed, here, chosen, before, name) for name in maps.FAMILIES if name in applied]
    return [partial(_worst, here, chosen, before), *climbs]


def furthest(found: Iterable[WorstFactor]) -> tuple[WorstFactor, ...]:
    """What moved each measure furthest, among all that the searches found."""
    best: dict[str, WorstFactor] = {}
    for item in found:
        last = best.setdefault(item.measure, item)
        best[item.measure] = item if item.factor > last.factor or math.isnan(last.factor) else last
    return tuple(best.values())


# ---------------------------------------------------------------- uphill in the other symmetries


def _climbed(here: Setting, chosen: list[Measure], before: dict[str, Estimate], name: str) -> Iterator[WorstFactor]:
    """The most extreme values at one random point and at the end of a climb, in a continuous symmetry."""
    movable = [
        measure
        for measure in chosen
        if name not in measure.invariant_to
        and before[measure.name].sign > 0
        and measure.forward_passes(here) <= _AFFORDABLE
    ]
    if not movable:
        return
    size = _LONGEST if name in _SHIFTS else _LIMIT
    family = maps.FAMILIES[name](Watched(name, here.model, sample_of(here), here.seed, here.form), size)
    ends: dict[str, list[tuple[Estimate, dict[str, float]]]] = {measure.name: [] for measure in movable}
    apart = 0.0
    for guide in dict.fromkeys(["", *(measure.guide for measure in movable)]):
        wanted = [measure for measure in movable if _taken(measure, guide, here)]
        there = _end(here, family, guide) if wanted else None
        if there is None:
            continue
        apart = max(apart, there.certificate.relative_difference)
        setting, how = moved_to(here, there), {"steps": float(_STEPS)} if guide else {"seed": float(here.seed)}
        with setting.problem.active():
            for measure in wanted:
                value = measure.attempt(setting)
                if math.isfinite(value.value) and value.sign > 0:
                    ends[measure.name].append((value, {"size": size, **how}))
    for measure in movable:
        start = before[measure.name]
        found = [*ends[measure.name], (start, {})]
        (low, low_end), (high, high_end) = (of(found, key=lambda end: end[0].value) for of in (min, max))
        if high.value - low.value > equal_within(here) * high.value:
            errors = (_half(start), _half(low), _half(high))
            numbers = (start.value, low.value, high.value)
            yield WorstFactor(measure.name, *numbers, low_end, high_end, apart, errors, name)


def _taken(measure: Measure, guide: str, here: Setting) -> bool:
    """Whether to take a measure at the end of the climb that this guide led, or at a random point if there is none."""
    return measure.guide == guide if guide else measure.forward_passes(here) <= _DRAWN


def _end(here: Setting, family: Family, guide: str) -> Transformed | None:
    """The network at a random point of a family, or at the end of a climb; `None` if numbers get too extreme."""
    try:
        return family.at(family.climb(_objective(here, family, guide), _STEPS)) if guide else family.drawn()
    except InputError:
        return None


def _objective(here: Setting, family: Family, guide: str) -> Objective:
    """The stand-in for a measure: its logarithm, as a function of the map, whose slope is exact."""
    base = here if family.start is None else here.moved(family.start)
    names, theta = tuple(base.problem.params), base.theta.double().cpu()
    counts = [tensor.numel() for tensor in base.problem.params.values()]
    signs = torch.randint(0, 2, theta.shape, generator=base.generator(0, _PURPOSE)).double() * 2 - 1

    def moved(mapping: LinearMap, shift: Tensor) -> Tensor:
        added = torch.cat([shift[mapping.layout.entries(name).reshape(-1)] for name in names])
        return mapping.on_rows(names, theta[:, None], "forward")[:, 0] + added

    if guide == "length":
        return lambda mapping, shift: moved(mapping, shift).square().sum().log()

    op = _curvature(base)

    def objective(mapping: LinearMap, shift: Tensor) -> Tensor:
        """The logarithm of vᵀW T⁻ᵀGT⁻¹ W v, W the units that the measure has; G u is constant along its own slope."""
        after = moved(mapping, shift)
        units = torch.ones_like(after)
        if guide == "curvature in sizes":
            units = after.abs()
        elif guide == "curvature in norms":
            units = torch.cat([part.norm().expand(len(part)) for part in after.split(counts)])
        u = mapping.on_rows(names, (units * signs)[:, None], "inverse")[:, 0]
        image = (op @ u.detach().to(op.device, op.dtype)).double().cpu()
        form = float(u.detach() @ image)
        return 2 * (image @ u) / abs(form) if form else 0 * u.sum()

    return objective


def _curvature(setting: Setting) -> Operator:
    """The Gauss-Newton matrix, whose forms are positive, or the Hessian where the loss allows no other."""
    return setting.gauss_newton if setting.problem.loss.closed_form else setting.hessian


# ---------------------------------------------------------------- scalings of layers


def _worst(here: Setting, chosen: list[Measure], before: dict[str, Estimate]) -> tuple[WorstFactor, ...]:
    """For every measure whose change the factors alone predict: the most extreme values found, as measured."""
    searched = [
        measure
        for measure in chosen
        if measure.predict is not None
        and measure.cost in ("forward", "backward")
        and "rescale_layers" not in measure.invariant_to
        and before[measure.name].sign > 0
    ]
    if not searched:
        return ()
    try:
        few = _two_of(here)
        groups = maps.scaling_groups(here.model, data=few)
        if not groups:
            return ()
        one = scaled(here, [(groups[0], 2.0)], few).certificate
        powers = [_powers(demanded(here.model, group.factors(2.0), few)) for group in groups]
    except InputError:
        return ()
    found = []
    for measure in searched:
        ends = [_furthest(here, measure, groups, powers, one, sign) for sign in (-1, 1)]
        (low, low_factors, low_difference), (high, high_factors, high_difference) = ends
        worst = max(low_difference, high_difference)
        start = before[measure.name]
        low, high = min(low, start, key=float), max(high, start, key=float)
        if high.value - low.value > equal_within(here) * high.value:
            errors = (_half(start), _half(low), _half(high))
            values = (start.value, low.value, high.value)
            found.append(WorstFactor(measure.name, *values, low_factors, high_factors, worst, errors))
    return tuple(found)


def _half(value: Estimate) -> float:
    """The half-width of the 95% interval on the given data; for a lower bound, that of the value found."""
    low, high = value.interval()
    return 0.0 if value.status == "lower bound" else (high - low) / 2


def _powers(factors: Mapping[str, Factor]) -> dict[str, float]:
    """The power of β that scales each parameter which a group moves, from its factors for β = 2."""
    found = {name: math.log2(float(factor)) for name, factor in factors.items()}
    return {name: power for name, power in found.items() if power}


def _furthest(
    here: Setting,
    measure: Measure,
    groups: tuple[ScalingGroup, ...],
    powers: list[dict[str, float]],
    one: Certificate,
    sign: int,
) -> tuple[Estimate, dict[str, float], float]:
    """The most extreme value in one direction, by two sweeps over the groups; measured where the search ends."""
    predict = measure.predict
    assert predict is not None
    model = here.model  # which makes sure that nobody has changed it: once, not for every prediction

    def predicted(factors: dict[str, Factor]) -> float:
        value = predict(here, Transformed(model, dataclasses.replace(one, factors=factors)))
        return -math.inf if value is None else sign * value

    start = measure.attempt(here)
    for reach in _REACHES:
        betas = [1.0] * len(groups)
        factors: dict[str, Any] = dict.fromkeys(one.factors or {}, 1.0)
        best = predicted(factors)
        for _ in range(2):
            for index, own in enumerate(powers):
                for beta in (1 / reach, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, reach):
                    step = beta / betas[index]  # a power of 2: nothing is rounded
                    trial = {**factors, **{name: factors[name] * step**power for name, power in own.items()}}
                    value = predicted(trial)
                    if value > best:
                        best, factors, betas[index] = value, trial, beta
        if best == -math.inf or all(beta == 1.0 for beta in betas):
            break
        try:
            result = scaled(here, zip(groups, betas, strict=True))
            found = measure.compute(moved_to(here, result))
        except InputError:
            continue  # too extreme for the number format
        if math.isfinite(found.value):
            layers = _layer_factors(groups, betas)
            return found, layers, result.certificate.relative_difference
    return start, {}, 0.0


def _layer_factors(groups: tuple[ScalingGroup, ...], betas: list[float]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for group, beta in zip(groups, betas, strict=True):
        for layer, factor in group.factors(beta).items():
            factors[layer] = factors.get(layer, 1.0) * float(factor)
    return {layer: factor for layer, factor in factors.items() if factor != 1.0}
