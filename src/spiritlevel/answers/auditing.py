"""Which numbers survive when the function does not change: measures × transforms, and how far a measure can be moved.

Every transform is applied for real and every measure taken again on the new network; theory only adds a prediction.
Nothing is printed here: `Audit` shows itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from spiritlevel import transforms as maps
from spiritlevel.answers.searching import (
    PROBES,
    SINGLE,
    equal_within,
    furthest,
    moved_to,
    sample_of,
    scaled,
    searches,
)
from spiritlevel.answers.sharing import shared
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.measures import TRANSFORMS, Measure, Setting, select
from spiritlevel.measures.registry import affordable
from spiritlevel.operators.footprint import suited_threads
from spiritlevel.results import SYMMETRIES, Audit, AuditRow, Estimate, WorstFactor, figure, standard_error
from spiritlevel.transforms import ScalingGroup, Transformed
from spiritlevel.watching.factors import Factor

__all__ = ["DEFAULT_TRANSFORMS", "audit"]

DEFAULT_TRANSFORMS = (*SYMMETRIES, "scale_last_layer")
"""What `audit` applies unless told otherwise; "rescale_all" comes with transforms="all"."""

_BETA = 8.0  # powers of 2 change no digit of a weight
_ALPHA = 2.0
_DECLARED = 5  # standard errors by which two estimates of a value that in theory stays the same may differ
_BOUND = 0.02  # lower bounds that an optimiser found are compared to 2%

Progress = Callable[[str, int, int], None]
"""Called with what comes next, the steps done, and the steps in all."""


@torch.inference_mode(False)  # measures add up in place, which inference tensors do not allow outside that mode
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
    """Measure a network before and after transforms that preserve its function or its predictions.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader, or batches.
        measures: names from `measures.MEASURES`, "all", or "default", which is what None means.
        transforms: names from `measures.TRANSFORMS`, "all", the default set, or transforms of your own: a dict from
            names to `Transformed`. Transforms that the network does not allow are listed in `skipped` with the reason.
        search: whether to look for what moves each measure furthest: scalings of layers, and for every continuous
            symmetry the end of a climb along a slope.
        progress: called with (what comes next, done, total) before every measurement and before the search.
        loss: a name, a `torch.nn` loss or a callable.
        params: names, prefixes or globs of the parameters to measure; by default all that require grad.
        batch_norm: "eval" or "batch"; transforms that do not hold in that mode are skipped.
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        group: a `torch.distributed` group whose ranks all make this same call and share the measurements.
        seed: for everything random.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    The predicted ratio is 1 for a declared invariance; for spectra, traces and norms it comes from H(Tθ) = T⁻¹H(θ)T⁻¹
    and the transform's own factors. The search scales every group of layers by up to 32 either way, guided by the
    prediction, and measures the network it ends at: the factor it reports was reached, and so is a lower bound on what
    is possible. The other transforms are drawn with condition 10, or as long as what they are added to. The search
    allows condition 100, and shifts of ten times that length: it draws once more, and climbs from the network in three
    steps along the exact slope of what the measure names as its stand-in (`Measure.guide`): the length of the
    parameters, or vᵀGv for one sign vector v, G the Gauss-Newton matrix, with every parameter in its own unit. Each end
    is certified and measured like any other network.

    Values count as equal up to 1e-6 in double precision and 1e-3 in single; lower bounds that an optimiser found, up
    to 2% if in theory the value stays the same, and otherwise nothing can be told of so small a difference. Two
    estimates count as different if they are 3 standard errors of their difference apart, or 5 if in theory the value
    stays the same. Both are taken along the same random vectors, and where there are as many parameters as before, the
    error is that of the paired differences. A larger reach would move a measure further, so the size of one that moves
    at all does not tell two networks apart.
    A trace that must be estimated takes 10 products here, by "hutch++" of `operator_trace`, where `measure` takes 64
    probes: a few large eigenvalues, which make up most of its error, are taken out.
    Cost: the measures, once for the model and once per transform. The search adds, for each continuous symmetry, up to
    nine products with G and, once, the measures that take at most 60 forward passes; those of at most 25, twice.
    References: paper B, section E; mathematics 7.1, 7.10.

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
        probes=PROBES,
        **reading,
    )
    here.check()  # data that cannot be measured fail before anything is transformed
    chosen, expensive = affordable(measures, chosen, here)
    with suited_threads(here):
        found = audit_in(here, chosen, transforms=transforms, search=search, progress=progress)
    return dataclasses.replace(found, skipped={**found.skipped, **expensive}) if expensive else found


def audit_in(
    here: Setting,
    chosen: Sequence[Measure],
    *,
    transforms: str | Iterable[str] | Mapping[str, Transformed] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> Audit:
    """The audit in a setting that is already bound and checked: what has been measured there is not measured again.

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
    order = {measure.name: index for index, measure in enumerate(chosen)}
    worst: list[WorstFactor] = []
    if search:
        done = total - 1
        announce("the search for the worst scaling")
        found = shared(here.ranks, one.searches(whole.certificates))
        every = furthest(functools.reduce(_plus, found, one.part()).worst)
        worst = sorted(every, key=lambda factor: order[factor.measure])  # whichever of two equal ones came first
    rows = sorted(whole.rows, key=lambda row: order[row.measure])
    return dataclasses.replace(whole, rows=tuple(rows), worst=tuple(worst), skipped={**whole.skipped, **undefined})


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
    """The parts of an audit, each for any rank that is free: nothing here needs another rank."""

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
            notes=(*here.notes, *filter(None, [here.chosen])),
        )

    def column(self, name: str, make: Callable[[Setting], Transformed]) -> Audit:
        """All measures after one transform, or why it does not apply to the model."""
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
        there, rows = moved_to(here, transformed), []
        if certificate.keeps == "probabilities" and not _same_losses(here, there):
            return self._without(
                name, f"keeps the probabilities, but the loss {here.problem.loss.name!r} sees the logits"
            )
        with there.problem.active():  # once, not in each measure
            for measure in self.chosen:
                self.announce(f"{measure.name} after {name}")
                if measure.name in self.before:
                    after = measure.attempt(there)
                    rows.append(_row(measure, name, self.before[measure.name], after, (here, there), transformed))
        return self.part(rows=tuple(rows), certificates={name: certificate})

    def _without(self, name: str, reason: str) -> Audit:
        self.announce("", len(self.chosen))
        return self.part(skipped={name: reason})

    def searches(self, applied: Collection[str]) -> list[Callable[[], Audit]]:
        """How far each measure can be moved, by scaling layers or by further draws of what was applied."""
        measured = [measure for measure in self.chosen if measure.name in self.before]
        found = searches(self.here, measured, self.before, applied)
        return [functools.partial(self._search, search) for search in found]

    def _search(self, search: Callable[[], Iterable[WorstFactor]]) -> Audit:
        return self.part(worst=tuple(search()))


def _same_losses(here: Setting, there: Setting) -> bool:
    before, after = here.losses, there.losses
    return torch.allclose(before, after, rtol=SINGLE, atol=SINGLE * float(before.abs().max()))


# ---------------------------------------------------------------- one row


def _row(
    measure: Measure,
    name: str,
    before: Estimate,
    after: Estimate,
    both: tuple[Setting, Setting],
    transformed: Transformed,
) -> AuditRow:
    here = both[0]
    declared = name in measure.invariant_to
    predicted = 1.0 if declared else math.nan
    if not declared and measure.predict is not None and before.sign:
        value = measure.predict(here, transformed)
        predicted = math.nan if value is None else value / before.value
    certificate = transformed.certificate
    mapped = certificate.factors is not None or (transformed.map is not None and transformed.start is None)
    linear = mapped and certificate.scale == 1.0  # the Hessian becomes T⁻ᵀHT⁻¹
    paired = _paired(measure, *both)
    keeps_sign = measure.keeps_sign and linear
    found = _BOUND if measure.lower_bound else 0.0
    verdict, note = _verdict(before, after, equal_within(here), keeps_sign, declared, paired[0], found)
    one_sign = before.sign * after.sign > 0 or verdict == "invariant"
    ratio = after.value / before.value if one_sign and before.value else math.nan
    return AuditRow(measure.name, name, before, after, ratio, predicted, verdict, declared, note, paired[1])


def _paired(measure: Measure, here: Setting, there: Setting) -> tuple[float, float]:
    """The errors of difference and ratio of two estimates along the same random vectors; NaN if the vectors differ.

    What both matrices have in common drops out of every difference, whatever it adds to the error of each.
    """
    one, two = (setting.draws.get(measure.name) for setting in (here, there))
    shapes = [{name: tensor.shape for name, tensor in setting.problem.params.items()} for setting in (here, there)]
    if one is None or two is None or len(one) != len(two) or shapes[0] != shapes[1]:
        return math.nan, math.nan
    mean = float(one.mean())
    ratio = float(two.mean()) / mean if mean else math.nan
    apart, scaled_apart = float(standard_error(two - one)), float(standard_error(two - ratio * one))
    return apart, scaled_apart / abs(mean) if mean else math.nan


def _verdict(
    before: Estimate,
    after: Estimate,
    tolerance: float,
    keeps_sign: bool = False,
    declared: bool = False,
    paired: float = math.nan,
    found: float = 0.0,
) -> tuple[str, str]:
    """What the two values say, or why they say nothing; `keeps_sign` where theory forbids a change of sign.

    `declared` says that in theory the value stays: then two estimates that agree within their errors are the same, and
    they may differ a little more, since no small change is suspected. `paired` is the error of the difference
    where both are taken along the same random vectors. `found` is how closely, relatively, an optimiser finds a lower
    bound: two that differ by less are the same where theory says so, and tell nothing elsewhere.

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
    if difference <= found * max(abs(before.value), abs(after.value)):
        note = f"two lower bounds within {found:.0%} of each other, which is as closely as they are found"
        return ("invariant", f"{note}, and in theory it stays") if declared else ("unstable", note)
    error, tolerances = math.hypot(before.stderr, after.stderr), before.tolerance + after.tolerance
    error = error if math.isnan(paired) else paired
    if not difference > (_DECLARED if declared else 3) * error + tolerances:
        within = f"the tolerances of the two values, {figure(tolerances, 2)}"
        within = f"{'five' if declared else 'three'} times its error {figure(error, 2)}" if error else within
        note = f"the difference {figure(difference, 2)} is within {within}"
        return ("invariant", f"{note}, and in theory it stays") if declared and error < math.inf else ("unstable", note)
    if keeps_sign and before.sign * after.sign < 0:
        return "unstable", "the signs differ, which no linear map of the parameters can cause, so one value is wrong"
    note = "" if before.sign and after.sign else "the sign of a value is not known, so neither is the ratio"
    return "changes", note if before.value and after.value else ""


# ---------------------------------------------------------------- the transforms


def _named(
    wanted: str | Iterable[str] | Mapping[str, Transformed] | None,
) -> dict[str, Callable[[Setting], Transformed]]:
    """The transforms asked for, by name: how each is made for a model."""
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
    groups = [group for group in maps.scaling_groups(here.model, data=sample_of(here)) if group.readers]
    if not groups:
        raise InputError(f"{who}: {maps.why_no_groups(here.model, data=sample_of(here))}.")
    return groups


def _rescale_layers(here: Setting) -> Transformed:
    groups = _groups(here, "rescale_layers")
    return scaled(here, [(group, _BETA if index % 2 == 0 else 1 / _BETA) for index, group in enumerate(groups)])


def _rescale_channels(here: Setting) -> Transformed:
    groups = [group for group in _groups(here, "rescale_channels") if group.channels]
    if not groups:
        raise InputError("rescale_channels: the layers of this network differ in their channels.")
    generator = torch.Generator().manual_seed(here.seed)
    factors: dict[str, Factor] = {}
    for group in groups:
        exponents = torch.randint(-3, 4, (group.channels or 1,), generator=generator)
        factors |= group.factors(2.0 ** exponents.double())
    return maps.rescale_layers(here.model, factors, data=sample_of(here))


def _scale_before_batchnorm(here: Setting) -> Transformed:
    found = maps.scaling_groups(here.model, data=sample_of(here))
    writers = [name for group in found if group.absorbers and not group.readers for name in group.writers]
    if not writers:
        raise InputError("scale_before_batchnorm: no layer of this network is read by batch norms alone.")
    return maps.scale_before_batchnorm(here.model, dict.fromkeys(writers, _BETA), data=sample_of(here))


def _drawn(transform: Callable[..., Transformed]) -> Callable[[Setting], Transformed]:
    """A transform that finds its places in the network and draws its numbers by itself."""
    return lambda here: transform(here.model, data=sample_of(here), seed=here.seed)


_APPLY: dict[str, Callable[[Setting], Transformed]] = {
    "rescale_layers": _rescale_layers,
    "rescale_channels": _rescale_channels,
    "scale_before_batchnorm": _scale_before_batchnorm,
    "fold_batchnorm": lambda here: maps.fold_batchnorm(here.model, data=sample_of(here)),
    "shift_logits": _drawn(maps.shift_logits),
    "mix_heads": _drawn(maps.mix_heads),
    "shift_attention_biases": _drawn(maps.shift_attention_biases),
    "shift_norm_gain": _drawn(maps.shift_norm_gain),
    "scale_gate": _drawn(maps.scale_gate),
    "mix_linear": _drawn(maps.mix_linear),
    "rotate_stream": _drawn(maps.rotate_stream),
    "split_units": _drawn(maps.split_units),
    "permute_units": _drawn(maps.permute_units),
    "scale_last_layer": lambda here: maps.scale_last_layer(here.model, _ALPHA, data=sample_of(here)),
    "rescale_all": lambda here: maps.rescale_all(here.model, _ALPHA, data=sample_of(here)),
}
