"""`choose_bits`: how many bits each layer gets, so that together they keep to a size and the loss rises least."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from spiritlevel.answers.changes import Change, Moved, as_change, matrices_of, rounded
from spiritlevel.answers.expanding import Way, rises_alone
from spiritlevel.answers.measuring import Progress, silent
from spiritlevel.answers.perturbing import changed, floating_names, moved, perturb_in
from spiritlevel.arguments import checked, number, one_of
from spiritlevel.binding.parameters import Params, select_parameters
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, whole_number
from spiritlevel.measures import Setting
from spiritlevel.results import BitPlan, Estimate, LayerBits
from spiritlevel.results.perturbations import COSTS

__all__ = ["choose_bits"]


@torch.inference_mode(False)
@checked
def choose_bits(
    model: nn.Module,
    data: Any,
    bits: float = 4.0,
    *,
    choices: tuple[int, ...] = (2, 3, 4, 6, 8),
    by: str = "measured",
    channel: bool = False,
    loss: Any = "cross_entropy",
    test: Any = None,
    samples: int | None = None,
    progress: Progress | None = None,
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> BitPlan:
    """How many bits each matrix and kernel gets, at most `bits` per weight on average, so that the loss rises least.

    Each layer is rounded alone to each number of bits, and `by` says what that is taken to cost: "measured", the rise
    of the loss that it causes; "second_order", g·δ + ½ δᵀHδ of that rounding; or one of the plainer orders,
    "curvature", "trace_times_square" (HAWQ's) and "square". No cost is below 0 or below that of more bits, and a
    rounding that alone makes the loss NaN or infinite is not chosen. An integer program finds the bits of least total
    cost that keep to the size. It leaves out what layers do to each other, so the plan is carried out and compared with
    the same number of bits for all. Far from the model, at 2 bits, the second order may predict a fortieth of what
    happens, and plans by it may be worse than uniform bits.

    Args:
        model: any module; it is left as it was.
        data: the samples that costs are computed on.
        bits: per weight, on average over all matrices and kernels; other parameters are not rounded.
        choices: numbers of bits that a layer may get, 2 to 16.
        by: what a rounding is taken to cost.
        channel: whether every output channel has a scale of its own, as with "int4:channel".
        loss: a name, a `torch.nn` loss or a callable.
        test: other samples on which the plan is compared with uniform bits; `data` unless given.
        samples: compute costs on a random subset of this many.
        progress: called with (what, done, total) before every step.
        params: names, prefixes or globs of the parameters whose matrices and kernels are rounded; by default all.
        batch_norm: "eval" or "batch".
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        seed: of that subset and of probes.
        reading: how batches and outputs are read; see `Reading`.

    Cost: for each of the choices one forward pass per layer; by anything other than "measured" also one product with H
    per layer, and its trace where `by` needs it. Reference: Dong et al. 2019, arXiv:1905.03696.

    >>> torch.manual_seed(0), (x := torch.randn(60, 8)), (y := (x[:, 0] > 0).long())
    (...)
    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> plan = choose_bits(net, (x, y), 3.0)
    >>> plan.mean_bits <= 3.0, list(plan.bits)
    (True, ['0.weight', '2.weight'])
    """
    one_of(by, "by", COSTS)
    number(bits, "bits", above=0)
    widths = sorted({whole_number(width, "choices", 2, 16) for width in choices})
    if not widths:
        raise InputError("choices= is empty; name the numbers of bits that a layer may get, such as (2, 4, 8).")
    if bits < widths[0]:
        raise InputError(f"{bits:g} bits per weight are fewer than {widths[0]}, the least that a layer gets.")
    setting = Setting(
        model,
        data,
        loss=loss,
        params=floating_names(model) if params is None else select_parameters(model, params),
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        seed=seed,
        **reading,
    )
    setting.check()
    changes = {width: as_change(f"int{width}{':channel' if channel else ''}") for width in widths}
    matrices = matrices_of(setting.problem.params)
    if not matrices:
        owner = "the model has" if params is None else "params= names"
        raise InputError(f"choose_bits rounds matrices and kernels, and {owner} none.")
    sizes = {name: tensor.numel() for name, tensor in matrices.items()}
    costs = _costs(setting, list(sizes), changes, by, samples, progress or silent)
    chosen = cheapest(costs, sizes, widths, bits)
    uniform = max(width for width in widths if width <= bits)
    where = setting if test is None else setting.on(test)
    losses, accuracies = _carried_out(where, chosen, uniform, channel)
    rows = [
        LayerBits(name, sizes[name], chosen[name], costs[name][chosen[name]], costs[name][uniform]) for name in chosen
    ]
    return BitPlan(
        rows=tuple(rows),
        budget=float(bits),
        by=by,
        uniform=uniform,
        losses=losses,
        accuracies=accuracies,
        samples=where.count,
    )


_Three = tuple[Estimate, Estimate, Estimate]


def _carried_out(where: Setting, chosen: dict[str, int], uniform: int, channel: bool) -> tuple[_Three, _Three]:
    """Losses and accuracies: unrounded, with these bits, and with the same number of bits for all."""
    plan = changed(where, mixed(chosen, channel))
    alike = changed(where, mixed(dict.fromkeys(chosen, uniform), channel))
    nothing = Estimate(float("nan"), reason="the outputs are not classes")
    accuracies = [
        Estimate(float(columns[key].mean())) if key in columns else nothing
        for columns, key in ((plan, "right"), (plan, "right_after"), (alike, "right_after"))
    ]
    losses = [plan["before"], plan["after"], alike["after"]]
    return _three(Estimate(float(column.mean())) for column in losses), _three(accuracies)


def _three(values: Any) -> _Three:
    first, second, third = values
    return first, second, third


def _costs(
    setting: Setting, names: list[str], changes: dict[int, Change], by: str, samples: int | None, progress: Progress
) -> dict[str, dict[int, float]]:
    """What each number of bits is taken to cost each of these layers."""
    found = {}
    for done, (width, change) in enumerate(changes.items()):
        progress(f"each layer rounded to {width} bits", done, len(changes) + 1)
        found[width] = _alone(setting, change, by, samples)
    progress("the plan, and the same bits for all", len(changes), len(changes) + 1)
    alone = {name: {width: each.get(name, 0.0) for width, each in found.items()} for name in names}  # 0: it stays
    return {name: at_least_of_more_bits(each) for name, each in alone.items()}


def _alone(setting: Setting, change: Change, by: str, samples: int | None) -> dict[str, float]:
    """What the change of each tensor that moves is taken to cost: infinitely much if it alone makes the loss NaN."""
    here, _ = setting.drawn(samples)
    way = Way(here, moved(change, here, False).after)
    rises = dict(zip(way.delta, rises_alone(way).tolist(), strict=True))
    if by == "measured":
        return rises
    found = perturb_in(setting, change, samples=samples, apply=False, traces=by == "trace_times_square")
    return {row.name: float(getattr(row, by)) if math.isfinite(rises[row.name]) else math.inf for row in found.layers}


def at_least_of_more_bits(costs: Mapping[int, float]) -> dict[int, float]:
    """What a layer costs by its number of bits, not below 0 and not below what more bits cost.

    Far from the model the second order may predict a gain, and the layer would be given 2 bits for nothing. A loss
    that is no longer a number costs infinitely much.

    >>> at_least_of_more_bits({2: -3.0, 4: 0.5, 8: -0.1})
    {8: 0.0, 4: 0.5, 2: 0.5}
    >>> at_least_of_more_bits({2: float("nan"), 4: 0.5})
    {4: 0.5, 2: inf}
    """
    found, most = {}, 0.0
    for width in sorted(costs, reverse=True):
        found[width] = most = math.inf if math.isnan(costs[width]) else max(most, costs[width])
    return found


def cheapest(
    costs: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], widths: list[int], bits: float
) -> dict[str, int]:
    """Bits for each layer, of the least total cost that keeps to the size: a knapsack, solved as an integer program.

    The layer that saves most for its size is not always the one to serve first: small ones would use up what a large
    one needs.
    """
    names = list(costs)
    places = [(row, width) for row in range(len(names)) for width in widths]
    prices = np.array([costs[names[row]][width] for row, width in places])
    weights = np.array([sizes[names[row]] * width for row, width in places], dtype=float)
    one_each = np.array([[float(row == layer) for row, _ in places] for layer in range(len(names))])
    total = float(sum(sizes.values()))

    def least(of: Any, most: float, *more: LinearConstraint) -> Any:
        """Which places to take for the least sum, none of them priced above `most`; None if there are none."""
        for spare in (0.0, 1e-6, 1e-5):  # the solver may overstep the size by its own tolerance
            size = LinearConstraint(weights[None] / total, -np.inf, bits + 1e-9 - spare)
            found = milp(
                of,
                constraints=[LinearConstraint(one_each, 1, 1), size, *more],
                integrality=np.ones(len(places)),
                bounds=Bounds(0, prices <= most),
                # what comes back from its presolve may be infeasible, is repaired with a line on stdout, and then fails
                options={"mip_rel_gap": 0.0, "presolve": False},
            )
            if found.x is not None and weights[found.x > 0.5].sum() <= (bits + 1e-9) * total:
                return found.x > 0.5
        return None

    known = np.isfinite(prices)
    possible = known.reshape(len(names), -1).any(1)
    if not possible.all():
        raise InputError(
            f"the loss is NaN or infinite when {names[int(possible.argmin())]} is rounded to any of "
            f"{', '.join(map(str, widths))} bits; allow more bits in choices=."
        )
    prices[~known] = np.inf
    unit = max(float(prices[known].max()), 1e-300)
    taken = least(np.where(known, prices, 0.0) / unit, unit)
    if taken is None:
        raise InputError(f"no choice of bits keeps the loss finite within {bits:g} bits per weight; allow more bits.")
    while 0 < (cost := float(prices[taken].sum())) < unit / 2:
        # the solver stops within a millionth of the unit, and costs span orders of magnitude
        unit = cost  # no layer alone costs more than a plan that was found
        better = least(np.where(known, prices, 0.0) / unit, unit)
        taken = taken if better is None else better
    priced = np.where(prices <= cost, prices, 0.0)[None] / max(cost, 1e-300)
    fuller = least(-weights / weights.max(), cost, LinearConstraint(priced, -np.inf, 1.0))  # of equal costs more bits
    taken = taken if fuller is None else fuller
    return {names[row]: width for (row, width), its in zip(places, taken, strict=True) if its}


def mixed(bits: Mapping[str, int], channel: bool = False) -> Change:
    """The change that rounds each tensor to its own number of bits."""

    def move(params: Params, generator: torch.Generator) -> Moved:
        return Moved({name: rounded(params[name], width, channel) for name, width in bits.items()})

    return Change("mixed bits", "weights rounded, each layer to its own number of bits", move)
