"""Which numbers survive when the function does not change: measures × transforms, and how far a measure can be moved.

Every transform is applied for real and every measure taken again on the new network; theory only adds a prediction.
Nothing is printed here: `Audit` shows itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from spiritlevel import transforms as maps
from spiritlevel.answers.sharing import shared
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.measures import TRANSFORMS, Measure, Setting, select
from spiritlevel.results import SYMMETRIES, Audit, AuditRow, Certificate, Estimate, WorstFactor, figure
from spiritlevel.transforms import ScalingGroup, Transformed
from spiritlevel.transforms.certificates import Sample
from spiritlevel.watching.factors import Factor

__all__ = ["DEFAULT_TRANSFORMS", "audit"]

DEFAULT_TRANSFORMS = (*SYMMETRIES, "scale_last_layer")
"""What `audit` applies unless told otherwise; "rescale_all" comes with transforms="all"."""

_PROBES = 8  # of an estimated trace, an eighth of the usual: it is taken again for every transform
_BETA = 8.0  # powers of 2 change no digit of a weight
_ALPHA = 2.0
_FURTHER: dict[str, tuple[float, ...]] = {  # sizes of the draws in the search, beyond those that all measures see
    "shift_logits": (3.0, 10.0),
    "mix_heads": (30.0, 100.0),
    "mix_linear": (30.0, 100.0),
}
_AFFORDABLE = 60  # forward passes of a measure that the search takes again for each of these draws
_REACHES = (32.0, 8.0, 2.0)  # largest factor of a group in the search, the next one if numbers get too extreme
_TOLERANCE = {torch.float64: 1e-6}  # relative difference that still counts as equal; 1e-3 in single precision
_DECLARED = 5  # errors that two estimates of a value may be apart of which theory says that it stays
_SINGLE, _BOUND = 1e-3, 0.02  # lower bounds that an optimiser found are compared to 2 %

Progress = Callable[[str, int, int], None]
"""Called with what comes next, the steps done, and the steps in all."""


@torch.inference_mode(False)  # measures add up in place, which tensors of that mode do not allow outside it
@checked
def audit(
    model: nn.Module,
    data: Any,
    *,
    measures: str | Iterable[str] | None = None,
    transforms: str | Iterable[str] | Mapping[str, Transformed] | None = None,
    search: bool = True,
    progress: Progress | None = None,
    loss: Any = "cross_entropy",
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    group: Any = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Audit:
    """Measure a network before and after transforms that keep its function or its predictions.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader, or batches.
        measures: names of `measures.MEASURES`, "all", or "default", which is what None means.
        transforms: names of `measures.TRANSFORMS`, "all", the default set, or transforms of your own: a dict of name →
            `Transformed`. Transforms that the network does not allow are listed in `skipped` with the reason.
        search: whether to look for the scaling of layers that moves the trace, and like measures, furthest, and to draw
            larger shifts of the logits and matrices of higher condition for the measures that are quick to take.
        progress: called with (what comes next, done, total) before every measurement and before the search.
        loss: a name, a `torch.nn` loss or a callable.
        params: names, prefixes or globs of the parameters to measure; all that require grad unless given.
        batch_norm: "eval" or "batch"; transforms that do not hold in that mode are skipped.
        batch_size: samples to take at once; chosen unless given.
        memory: bytes, or a text such as "2GB"; half of what is available unless given.
        group: a `torch.distributed` group whose ranks all make this same call and share the measurements.
        seed: of everything random.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    The predicted ratio is 1 for a declared invariance; for spectra, traces and norms it comes from
    H(Tθ) = T⁻¹H(θ)T⁻¹ and the transform's own factors. The search scales every group of layers by up to 32 either way,
    guided by the prediction, and measures the network it ends at: the factor it reports is reached, hence a lower bound
    of what is possible. Matrices are drawn with condition 10, in the search also 30 and 100, and shifts of the logits
    once, 3 and 10 times as long as what they are added to.

    Values count as equal up to 1e-6 in double precision, 1e-3 in single, 2 % where an optimiser found them. Two
    estimates count as different if they are 3 of their errors apart; 5 if theory has the value stay. A larger reach
    would move it further, so what moves at all has no size that tells two networks apart.
    A trace that must be estimated takes 8 probes here, where `measure` takes 64.
    Cost: the measures, once for the model and once a transform. References: paper B, section E; mathematics 7.1.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    >>> points = torch.randn(8, 2, dtype=torch.float64), torch.tensor([0, 1] * 4)
    >>> found = audit(net, points, measures=["trace", "path_norm"], transforms=["rescale_layers"])
    >>> found.row("trace", "rescale_layers").verdict, found.row("path_norm", "rescale_layers").verdict
    ('changes', 'invariant')
    """
    chosen = select(measures)
    here = Setting(
        model,
        data,
        loss=loss,
        params=params,
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        group=group,
        seed=seed,
        probes=_PROBES,
        **reading,
    )
    here.check()  # data that cannot be measured fail before anything is transformed
    return audit_in(here, chosen, transforms=transforms, search=search, progress=progress)


def audit_in(
    here: Setting,
    chosen: Sequence[Measure],
    *,
    transforms: str | Iterable[str] | Mapping[str, Transformed] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """The audit in a setting that is bound and checked already: what it has measured is not measured again.

    All ranks measure the model together. Every transform, and every search, is the work of one of them.
    """
    names = _named(transforms)
    total, done = len(chosen) * (1 + len(names)) + search, 0

    def announce(what: str, steps: int = 1) -> None:
        nonlocal done
        if progress is not None and what:
            progress(what, done, total)
        done += steps

    before, undefined = dict[str, Estimate](), dict[str, str]()
    for measure in chosen:
        announce(measure.name)
        value = measure.attempt(here)
        if math.isnan(value.value):
            undefined[measure.name] = value.reason
        else:
            before[measure.name] = value

    one = _Audit(here.alone(), before, chosen, announce)
    parts = shared(here.ranks, [functools.partial(one.column, name, make) for name, make in names.items()])
    whole = functools.reduce(_plus, parts, one.part())
    worst: tuple[WorstFactor, ...] = ()
    if search:
        done = total - 1
        announce("the search for the worst scaling")
        found = functools.reduce(_plus, shared(here.ranks, one.searches(whole.certificates)), one.part()).worst
        furthest: dict[str, WorstFactor] = {}
        for item in found:
            last = furthest.setdefault(item.measure, item)
            furthest[item.measure] = item if item.factor > last.factor or math.isnan(last.factor) else last
        worst = tuple(furthest.values())
    order = {measure.name: index for index, measure in enumerate(chosen)}
    rows = sorted(whole.rows, key=lambda row: order[row.measure])
    return dataclasses.replace(whole, rows=tuple(rows), worst=worst, skipped={**whole.skipped, **undefined})


def _plus(one: Audit, other: Audit) -> Audit:
    """Two parts of one audit."""
    return dataclasses.replace(
        one,
        rows=one.rows + other.rows,
        worst=one.worst + other.worst,
        certificates={**one.certificates, **other.certificates},
        skipped={**one.skipped, **other.skipped},
    )


@dataclasses.dataclass
class _Audit:
    """The parts of an audit, each of them for whoever has time: nothing here needs another rank."""

    here: Setting
    before: dict[str, Estimate]
    chosen: Sequence[Measure]
    announce: Callable[..., None]

    def part(self, **found: Any) -> Audit:
        here = self.here
        return Audit(
            **{"rows": (), "worst": (), "certificates": {}, "skipped": {}, **found},
            samples=here.count,
            parameters=here.problem.size,
            loss=here.problem.loss.name,
            batch_norm=here.batch_norm,
            seed=here.seed,
            notes=here.notes,
        )

    def column(self, name: str, make: Callable[[Setting], Transformed]) -> Audit:
        """All measures after one transform; or why the model has none."""
        here = self.here
        try:
            transformed = make(here)
        except InputError as error:
            reason = str(error).removeprefix(f"{name}: ").removeprefix("scaling_groups: ")
            return self._without(name, reason)
        certificate = transformed.certificate
        if here.batch_norm not in certificate.modes:
            modes = " and ".join(certificate.modes)
            reason = f"keeps the function with batch norm in mode {modes} only, not {here.batch_norm!r}"
            return self._without(name, reason)
        there, rows = _moved(here, transformed), []
        for measure in self.chosen:
            self.announce(f"{measure.name} after {name}")
            if measure.name in self.before:
                after = measure.attempt(there)
                rows.append(_row(measure, name, self.before[measure.name], after, here, transformed))
        return self.part(rows=tuple(rows), certificates={name: certificate})

    def _without(self, name: str, reason: str) -> Audit:
        self.announce("", len(self.chosen))
        return self.part(skipped={name: reason})

    def searches(self, applied: Collection[str]) -> list[Callable[[], Audit]]:
        """How far each measure can be moved, by scaling layers or by further draws of what was applied."""
        here, before = self.here, self.before
        measured = [measure for measure in self.chosen if measure.name in before]
        scalings = [functools.partial(self._search, found) for found in _worst(here, measured, before)]
        drawn = (_drawn_worst(here, measured, before, name) for name in _FURTHER if name in applied)
        return [*scalings, *(functools.partial(self._search, found) for found in drawn)]

    def _search(self, found: Iterable[WorstFactor]) -> Audit:
        return self.part(worst=tuple(found))


def _sample(here: Setting) -> Sample:
    """The inputs on which all transforms of this model are found and compared."""
    return here.once("sample of transforms", lambda: Sample.of(here.model, here.data, here.form))


def _moved(here: Setting, transformed: Transformed) -> Setting:
    """The transformed model on the same data, mapped if its inputs are."""
    there = here.moved(transformed.model)
    there.probes = _PROBES if here.probes is None else here.probes
    mapping = transformed.inputs
    if mapping is None:
        return there
    return there.on([(mapping(inputs), targets) for inputs, targets in here.batches], read=True)


# ---------------------------------------------------------------- one row


def _row(
    measure: Measure, name: str, before: Estimate, after: Estimate, here: Setting, transformed: Transformed
) -> AuditRow:
    declared = name in measure.invariant_to
    predicted = 1.0 if declared else math.nan
    if not declared and measure.predict is not None and before.sign:
        value = measure.predict(here, transformed)
        predicted = math.nan if value is None else value / before.value
    certificate = transformed.certificate
    mapped = certificate.factors is not None or (transformed.map is not None and transformed.start is None)
    linear = mapped and certificate.scale == 1.0  # the Hessian becomes T⁻ᵀHT⁻¹
    verdict, note = _verdict(before, after, _tolerance(measure, here), measure.keeps_sign and linear, declared)
    one_sign = before.sign * after.sign > 0 or verdict == "invariant"
    ratio = after.value / before.value if one_sign and before.value else math.nan
    return AuditRow(measure.name, name, before, after, ratio, predicted, verdict, declared, note)


def _tolerance(measure: Measure, setting: Setting) -> float:
    tolerance = _TOLERANCE.get(setting.problem.dtype, _SINGLE)
    return max(tolerance, _BOUND) if measure.lower_bound else tolerance


def _verdict(
    before: Estimate, after: Estimate, tolerance: float, keeps_sign: bool = False, declared: bool = False
) -> tuple[str, str]:
    """What the two values say, and why if they say nothing; `keeps_sign` where theory forbids a change of sign.

    `declared` tells that theory has the value stay: then two estimates that agree within their errors are the same, and
    they may be a little further apart, since nobody looks for a small change.

    >>> _verdict(Estimate(1.0), Estimate(2.0), 1e-6), _verdict(Estimate(1.0, 1.0), Estimate(2.0, 1.0), 1e-6)[0]
    (('changes', ''), 'unstable')
    """
    for value in (before, after):
        if value.status == "not converged":
            return "not converged", value.reason
    if not math.isfinite(after.value) or not math.isfinite(before.value):
        return "unstable", after.reason or "the value is not finite"
    difference = abs(after.value - before.value)
    if difference <= tolerance * max(abs(before.value), abs(after.value)):
        return "invariant", ""
    error, tolerances = math.hypot(before.stderr, after.stderr), before.tolerance + after.tolerance
    if not difference > (_DECLARED if declared else 3) * error + tolerances:
        within = f"the tolerances of the two values, {figure(tolerances, 2)}"
        within = f"{'five' if declared else 'three'} times its error {figure(error, 2)}" if error else within
        note = f"the difference {figure(difference, 2)} is within {within}"
        return ("invariant", f"{note}, and theory has it stay") if declared and error < math.inf else ("unstable", note)
    if keeps_sign and before.sign * after.sign < 0:
        return "unstable", "the signs differ, which no linear map of the parameters can do, so one value is wrong"
    note = "" if before.sign and after.sign else "the sign of a value is not known, so neither is the ratio"
    return "changes", note if before.value and after.value else ""


# ---------------------------------------------------------------- the transforms


def _named(
    wanted: str | Iterable[str] | Mapping[str, Transformed] | None,
) -> dict[str, Callable[[Setting], Transformed]]:
    """The transforms that are asked for, by name: how each is made for a model."""
    if isinstance(wanted, Mapping):
        for name, each in wanted.items():
            if not isinstance(name, str) or not isinstance(each, Transformed):
                raise InputError(
                    "transforms= takes names, or a dict from names to what a function of sl.transforms returned, got "
                    f"{shown(name)}: {shown(each)}."
                )
        return {name: functools.partial(_given, each) for name, each in wanted.items()}
    names = DEFAULT_TRANSFORMS if wanted is None else tuple(TRANSFORMS) if wanted == "all" else wanted
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in TRANSFORMS:
            raise unknown_name("transform", name, TRANSFORMS)
    return {name: _APPLY[name] for name in names}


def _given(transformed: Transformed, here: Setting) -> Transformed:
    return transformed


def _groups(here: Setting, who: str) -> list[ScalingGroup]:
    """The groups of layers that other layers undo."""
    groups = [group for group in maps.scaling_groups(here.model, data=_sample(here)) if group.readers]
    if not groups:
        raise InputError(f"{who}: {maps.why_no_groups(here.model, data=_sample(here))}.")
    return groups


def _rescale_layers(here: Setting) -> Transformed:
    groups = _groups(here, "rescale_layers")
    return _scaled(here, [(group, _BETA if index % 2 == 0 else 1 / _BETA) for index, group in enumerate(groups)])


def _scaled(here: Setting, pairs: Iterable[tuple[ScalingGroup, float]], data: Any = None) -> Transformed:
    """Every group scaled by its number; factors of a layer in two groups multiply."""
    factors: dict[str, Factor] = {}
    for group, beta in pairs:
        for layer, factor in group.factors(beta).items():
            factors[layer] = factors.get(layer, 1.0) * factor
    return maps.rescale_layers(here.model, factors, data=_sample(here) if data is None else data)


def _rescale_channels(here: Setting) -> Transformed:
    groups = [group for group in _groups(here, "rescale_channels") if group.channels]
    if not groups:
        raise InputError("rescale_channels: the layers of this network differ in their channels.")
    generator = torch.Generator().manual_seed(here.seed)
    factors: dict[str, Factor] = {}
    for group in groups:
        exponents = torch.randint(-3, 4, (group.channels or 1,), generator=generator)
        factors |= group.factors(2.0 ** exponents.double())
    return maps.rescale_layers(here.model, factors, data=_sample(here))


def _scale_before_batchnorm(here: Setting) -> Transformed:
    found = maps.scaling_groups(here.model, data=_sample(here))
    writers = [name for group in found if group.absorbers and not group.readers for name in group.writers]
    if not writers:
        raise InputError("scale_before_batchnorm: no layer of this network is read by batch norms alone.")
    return maps.scale_before_batchnorm(here.model, dict.fromkeys(writers, _BETA), data=_sample(here))


def _shift_logits(here: Setting) -> Transformed:
    found = maps.shift_logits(here.model, data=_sample(here), seed=here.seed)
    before, after = here.losses, _moved(here, found).losses
    if not torch.allclose(before, after, rtol=_SINGLE, atol=_SINGLE * float(before.abs().max())):
        raise InputError(
            f"shift_logits: keeps the probabilities, and the loss {here.problem.loss.name!r} sees the logits."
        )
    return found


def _drawn(transform: Callable[..., Transformed]) -> Callable[[Setting], Transformed]:
    """A transform that finds its places in the network and draws its numbers by itself."""
    return lambda here: transform(here.model, data=_sample(here), seed=here.seed)


_APPLY: dict[str, Callable[[Setting], Transformed]] = {
    "rescale_layers": _rescale_layers,
    "rescale_channels": _rescale_channels,
    "scale_before_batchnorm": _scale_before_batchnorm,
    "fold_batchnorm": lambda here: maps.fold_batchnorm(here.model, data=_sample(here)),
    "shift_logits": _shift_logits,
    "mix_heads": _drawn(maps.mix_heads),
    "shift_attention_biases": _drawn(maps.shift_attention_biases),
    "shift_norm_gain": _drawn(maps.shift_norm_gain),
    "scale_gate": _drawn(maps.scale_gate),
    "mix_linear": _drawn(maps.mix_linear),
    "rotate_stream": _drawn(maps.rotate_stream),
    "split_units": _drawn(maps.split_units),
    "permute_units": _drawn(maps.permute_units),
    "scale_last_layer": lambda here: maps.scale_last_layer(here.model, _ALPHA, data=_sample(here)),
    "rescale_all": lambda here: maps.rescale_all(here.model, _ALPHA, data=_sample(here)),
}


# ---------------------------------------------------------------- the worst scaling


def _worst(here: Setting, chosen: list[Measure], before: dict[str, Estimate]) -> list[Iterator[WorstFactor]]:
    """For every measure whose change the factors alone predict: the furthest values found, and measured, when asked."""
    searched = [
        measure
        for measure in chosen
        if measure.predict is not None
        and measure.cost in ("forward", "backward")
        and "rescale_layers" not in measure.invariant_to
        and before[measure.name].sign > 0
    ]
    if not searched:
        return []
    few = here.batches.first(2)
    try:
        groups = maps.scaling_groups(here.model, data=few)
        units = [_scaled(here, [(group, 2.0)], few).certificate for group in groups]
    except InputError:
        return []
    return [_between(here, measure, groups, units, before[measure.name]) for measure in searched] if groups else []


def _between(
    here: Setting, measure: Measure, groups: tuple[ScalingGroup, ...], units: list[Certificate], start: Estimate
) -> Iterator[WorstFactor]:
    """The furthest values of one measure, if it moves at all."""
    ends = [_furthest(here, measure, groups, units, sign) for sign in (-1, 1)]
    (low, low_factors, low_difference), (high, high_factors, high_difference) = ends
    worst = max(low_difference, high_difference)
    low, high = min(low, start, key=float), max(high, start, key=float)
    if high.value > low.value:
        errors = (_half(start), _half(low), _half(high))
        values = (start.value, low.value, high.value)
        yield WorstFactor(measure.name, *values, low_factors, high_factors, worst, errors)


def _drawn_worst(here: Setting, chosen: list[Measure], before: dict[str, Estimate], name: str) -> Iterator[WorstFactor]:
    """The furthest values among a few draws of growing size, of a transform that has one."""
    movable = [
        measure
        for measure in chosen
        if name not in measure.invariant_to
        and before[measure.name].sign > 0
        and measure.forward_passes(here) <= _AFFORDABLE
    ]
    values: dict[str, list[tuple[Estimate, dict[str, float]]]] = {measure.name: [] for measure in movable}
    apart = 0.0
    for size in _FURTHER[name] if movable else ():
        try:
            drawn = getattr(maps, name)(here.model, data=here.data, size=size, seed=here.seed)
        except InputError:
            continue  # too extreme for the number format
        apart = max(apart, drawn.certificate.relative_difference)
        there = _moved(here, drawn)
        for measure in movable:
            value = measure.attempt(there)
            if math.isfinite(value.value) and value.sign > 0:
                values[measure.name].append((value, {"size": size, "seed": float(here.seed)}))
    for measure in movable:
        start = before[measure.name]
        ends = [*values[measure.name], (start, {})]
        (low, low_draw), (high, high_draw) = (of(ends, key=lambda end: end[0].value) for of in (min, max))
        if high.value > low.value:
            errors = (_half(start), _half(low), _half(high))
            numbers = (start.value, low.value, high.value)
            yield WorstFactor(measure.name, *numbers, low_draw, high_draw, apart, errors, name)


def _half(value: Estimate) -> float:
    """The half-width of the 95 % interval on the given data; of a lower bound that of the value that was found."""
    low, high = value.interval()
    return 0.0 if value.status == "lower bound" else (high - low) / 2


def _furthest(
    here: Setting, measure: Measure, groups: tuple[ScalingGroup, ...], units: list[Certificate], sign: int
) -> tuple[Estimate, dict[str, float], float]:
    """The value furthest in one direction, by two sweeps over the groups; measured where the search ends."""
    predict = measure.predict
    assert predict is not None
    exponents = [{name: _exponent(factor) for name, factor in (unit.factors or {}).items()} for unit in units]

    def predicted(betas: list[float]) -> float:
        factors = {
            name: math.prod(beta ** each[name] for beta, each in zip(betas, exponents, strict=True))
            for name in exponents[0]
        }
        value = predict(here, Transformed(here.model, dataclasses.replace(units[0], factors=factors)))
        return -math.inf if value is None else sign * value

    start = measure.attempt(here)
    for reach in _REACHES:
        betas = [1.0] * len(groups)
        best = predicted(betas)
        for _ in range(2):
            for index in range(len(groups)):
                for beta in (1 / reach, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, reach):
                    trial = [*betas[:index], beta, *betas[index + 1 :]]
                    value = predicted(trial)
                    if value > best:
                        best, betas = value, trial
        if best == -math.inf or all(beta == 1.0 for beta in betas):
            break
        try:
            result = _scaled(here, zip(groups, betas, strict=True))
            found = measure.compute(_moved(here, result))
        except InputError:
            continue  # too extreme for the number format
        if math.isfinite(found.value):
            layers = _layer_factors(groups, betas)
            return found, layers, result.certificate.relative_difference
    return start, {}, 0.0


def _exponent(factor: Any) -> float:
    return math.log2(float(factor))


def _layer_factors(groups: tuple[ScalingGroup, ...], betas: list[float]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for group, beta in zip(groups, betas, strict=True):
        for layer, factor in group.factors(beta).items():
            factors[layer] = factors.get(layer, 1.0) * float(factor)
    return {layer: factor for layer, factor in factors.items() if factor != 1.0}
