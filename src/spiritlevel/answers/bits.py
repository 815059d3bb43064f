"""`choose_bits`: how many bits each layer gets, so that all together keep to a size and the loss rises least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from spiritlevel.answers.changes import Change, Moved, as_change, rounded
from spiritlevel.answers.perturbing import changed, perturb_in
from spiritlevel.arguments import checked, number, one_of
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError, whole_number
from spiritlevel.measures import Setting
from spiritlevel.results import BitPlan, Estimate, LayerBits
from spiritlevel.results.perturbations import PREDICTORS

__all__ = ["choose_bits"]


@torch.inference_mode(False)
@checked
def choose_bits(
    model: nn.Module,
    data: Any,
    bits: float = 4.0,
    *,
    choices: tuple[int, ...] = (2, 3, 4, 6, 8),
    by: str = "second_order",
    channel: bool = False,
    loss: Any = "cross_entropy",
    test: Any = None,
    samples: int | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> BitPlan:
    """How many bits each matrix and kernel gets, with at most `bits` a weight on average, so that the loss rises least.

    Each layer is rounded alone to each number of bits, and `by` says what that is taken to cost: "second_order",
    g·δ + ½ δᵀHδ of that rounding, not below 0; or one of the plainer orders, "curvature", "trace_times_square"
    (HAWQ's) and "square". The bits are those of the least cost in all that keep to the size, by an integer program.
    What layers do to each other is left out of that cost, and far from the model, at 2 bits, say, the second order may
    be wrong. So the plan is made and compared with the same number of bits for all.

    Args:
        model: any module; it is left as it was.
        data: the samples that costs are computed on.
        bits: a weight, on average over all matrices and kernels; others are not rounded.
        choices: numbers of bits that a layer may get, 2 to 16.
        by: what a rounding is taken to cost.
        channel: whether every output channel has a scale of its own, as "int4:channel" has.
        loss: a name, a `torch.nn` loss or a callable.
        test: other samples on which the plan is compared with uniform bits; `data` unless given.
        samples: compute costs on a random subset of so many.
        seed: of that subset and of probes.
        reading: how batches and outputs are read; see `Reading`.

    Cost: for each of the choices one product with H a layer, and its trace where `by` needs it. Reference: Dong et al.
    2019, arXiv:1905.03696.

    >>> torch.manual_seed(0), (x := torch.randn(60, 8)), (y := (x[:, 0] > 0).long())
    (...)
    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> plan = choose_bits(net, (x, y), 3.0)
    >>> plan.mean_bits <= 3.0, list(plan.bits)
    (True, ['0.weight', '2.weight'])
    """
    one_of(by, "by", PREDICTORS)
    number(bits, "bits", above=0)
    widths = sorted({whole_number(width, "choices", 2, 16) for width in choices})
    if not widths:
        raise InputError("choices= is empty; name the numbers of bits that a layer may get, such as (2, 4, 8).")
    if bits < widths[0]:
        raise InputError(f"{bits:g} bits a weight are fewer than the {widths[0]} that a layer gets at least.")
    names = [name for name, parameter in model.named_parameters() if parameter.is_floating_point()]
    setting = Setting(model, data, loss=loss, params=names, seed=seed, **reading)
    way = ":channel" if channel else ""
    costs: dict[str, dict[int, float]] = {}
    sizes: dict[str, int] = {}
    for width in widths:
        found = perturb_in(setting, as_change(f"int{width}{way}"), samples=samples, apply=False)
        for row in found.layers:
            costs.setdefault(row.name, {})[width] = max(0.0, float(getattr(row, by)))
            sizes[row.name] = row.size
    chosen = _cheapest(costs, sizes, widths, bits)
    uniform = max(width for width in widths if width <= bits)
    where = setting if test is None else setting.on(test)
    plan = changed(where, _mixed(chosen, channel))
    alike = changed(where, _mixed(dict.fromkeys(chosen, uniform), channel))
    rows = [
        LayerBits(name, sizes[name], chosen[name], costs[name][chosen[name]], costs[name].get(uniform, 0.0))
        for name in chosen
    ]
    nothing = Estimate(float("nan"), reason="the outputs are not classes")
    accuracies = [
        Estimate(float(columns[key].mean())) if key in columns else nothing
        for columns, key in ((plan, "right"), (plan, "right_after"), (alike, "right_after"))
    ]
    losses = [plan["before"], plan["after"], alike["after"]]
    return BitPlan(
        rows=tuple(rows),
        budget=float(bits),
        by=by,
        uniform=uniform,
        losses=_three(Estimate(float(column.mean())) for column in losses),
        accuracies=_three(accuracies),
        samples=where.count,
    )


def _three(values: Any) -> tuple[Estimate, Estimate, Estimate]:
    first, second, third = values
    return first, second, third


def _cheapest(
    costs: Mapping[str, Mapping[int, float]], sizes: Mapping[str, int], widths: list[int], bits: float
) -> dict[str, int]:
    """Bits for each layer of the least cost in all that keep to the size: a knapsack, solved as an integer program.

    The layer that saves most for its size is not always the one to serve first: small ones would use up what a large
    one needs.
    """
    names = list(costs)
    places = [(row, width) for row in range(len(names)) for width in widths]
    prices = np.array([costs[names[row]].get(width, 0.0) for row, width in places])  # what moved nothing has no row
    weights = np.array([sizes[names[row]] * width for row, width in places], dtype=float)
    one_each = np.array([[float(row == layer) for row, _ in places] for layer in range(len(names))])
    total = float(sum(sizes.values()))
    found = milp(
        prices / max(float(prices.max()), 1e-300) + 1e-9 * weights / weights.max(),  # of equal costs the smaller size
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(weights[None] / total, -np.inf, bits + 1e-9)],
        integrality=np.ones(len(places)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise InputError(f"no choice of bits keeps to {bits:g} bits a weight ({found.message}); allow fewer bits.")
    chosen = {}
    for (row, width), share in zip(places, found.x, strict=True):
        if share > 0.5:
            chosen[names[row]] = width
    return chosen


def _mixed(bits: Mapping[str, int], channel: bool) -> Change:
    """The change that rounds each tensor to its own number of bits."""

    def move(params: Params, generator: torch.Generator) -> Moved:
        return Moved({name: rounded(params[name], width, channel) for name, width in bits.items()})

    return Change("mixed bits", "weights rounded, each layer to its own number of bits", move)
