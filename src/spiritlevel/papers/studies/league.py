"""A league of networks: what is known about each, and how measures rank them by how well they generalise.

A network is a mapping with the values of its hyper-parameters, its gaps and the rows of its measures. Signs are set so
that +1 is what a measure promises: sharper, larger or less wide means a larger gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from spiritlevel.papers.studies.base import Config, not_fitted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spiritlevel.papers.studies.base import Run
    from spiritlevel.papers.training import Job, Pair, Trained
    from spiritlevel.statistics.ranking import Ranking

    Array = NDArray[Any]

SETTINGS = ("network", "depth", "train_size", "lr", "batch_size", "width", "weight_decay")
"""Hyper-parameters by which networks may differ."""
PLAIN = ("trace", "largest_eigenvalue")
LOSS_BASED = ("mean_aceht", "margin_bound", "printed_margin_bound")  # functions of the margins that grow with sharpness


_EPOCHS = 20  # between two rows of a training run's history
SMALL: dict[str, Any] = {
    "networks": ("mlp", "strided_cnn"),
    "depth": (2, 4),
    "train_sizes": (500, 1_000),
    "width": (0.5, 2.0),
    "weight_decay": (0.0, 1e-3),
    "replicas": 3,
}
"""The league of two families: what its studies set at the scale small, so that they share its trained networks."""


@dataclass(frozen=True, kw_only=True)
class Grid(Config):
    """A grid of networks, trained on the same points to the same loss."""

    network: str = "printed_mlp"
    """By default dense with a bottleneck, 784-10w-100w-10: its width w moves the gap."""
    networks: tuple[str, ...] = ()
    """Several families instead of that one."""
    depth: tuple[int, ...] = ()
    """Hidden layers, for networks that take a depth."""
    data: str = "fashion-mini"
    """The data set."""
    train_size: int = 1_000
    """Training points, the same for every network."""
    train_sizes: tuple[int, ...] = ()
    """Several sizes instead of that one; a larger set contains the smaller."""
    held_out: int = 5_000
    """Training points that no network sees; gaps and losses are measured on them and the test set."""
    lr: tuple[float, ...] = (0.01, 0.03)
    """Learning rates of the grid."""
    batch_size: tuple[int, ...] = (32, 128)
    """Batch sizes of the grid."""
    width: tuple[float, ...] = (0.7, 1.5, 5.0)
    """Factors on the units of every hidden layer."""
    weight_decay: tuple[float, ...] = (0.0, 5e-4)
    """Strengths of L2, PyTorch's weight_decay."""
    replicas: int = 5
    """Networks per cell of the grid, each with its own seed."""
    momentum: float = 0.9
    """The momentum of SGD."""
    until_loss: float = 0.02
    """Every network is trained until its training loss is at most this."""
    check_every: int = 8
    """Steps between two checks of the training loss."""
    epochs: int = 400
    """At most; a network that has not reached the loss by then is left out, and counted."""


_G = TypeVar("_G", bound=Grid)


def axes(config: Grid) -> dict[str, tuple[Any, ...]]:
    """The hyper-parameters that make the grid, and their values."""
    more: dict[str, tuple[Any, ...]] = {
        "network": config.networks,
        "depth": config.depth,
        "train_size": config.train_sizes,
    }
    return {
        **{name: values for name, values in more.items() if values},
        **{name: getattr(config, name) for name in ("lr", "batch_size", "width", "weight_decay")},
    }


def cells(config: Grid) -> list[dict[str, Any]]:
    """One entry per network of a grid: the values of its hyper-parameters, and its seed."""
    grid, replicas = axes(config), config.replicas
    return [
        {**dict(zip(grid, cell, strict=True)), "seed": config.seed * replicas + replica, "replica": replica}
        for *cell, replica in itertools.product(*grid.values(), range(replicas))
    ]


def pieces_of(config: _G, network: Callable[[_G, Mapping[str, Any], Run], Any]) -> dict[str, Callable[[Run], Any]]:
    """What is computed for each network alone, by the name of its piece; the first seed of every cell goes first."""
    return {
        _name(cell, axes(config)): partial(network, config, cell)
        for cell in sorted(cells(config), key=lambda cell: cell["replica"])
    }


def _name(cell: Mapping[str, Any], names: Iterable[str]) -> str:
    """The name of a network's piece, from the values of these hyper-parameters and its seed."""
    values = (cell[name] for name in (*names, "seed"))
    return "-".join(("network", *(value if isinstance(value, str) else f"{value:g}" for value in values)))


def job(config: Grid, cell: Mapping[str, Any]) -> Job:
    """The training of one network; studies that ask for the same one share it through the cache."""
    from spiritlevel.papers.training import Job, Recipe

    recipe = Recipe(
        lr=cell["lr"],
        momentum=config.momentum,
        weight_decay=cell["weight_decay"],
        batch_size=cell["batch_size"],
        epochs=config.epochs,
        until_loss=config.until_loss,
        check_every=config.check_every,
    )
    size = cell.get("train_size", config.train_size)
    return Job(
        network=cell.get("network", config.network),
        options={name: cell[name] for name in ("width", "depth") if name in cell},
        data=config.data,
        train_size=size,
        validation=config.held_out,
        recipe=recipe,
        seed=cell["seed"],
        evaluate=("train",),
        evaluate_every=_EPOCHS * -(-size // cell["batch_size"]),
    )


def fitted_network(config: Grid, cell: Mapping[str, Any], run: Run) -> tuple[Trained | None, str]:
    """A network after its training, and why it is left out, if it is; none if the training diverged."""
    from spiritlevel.papers.training import Diverged

    try:
        trained = run.train(job(config, cell))
    except Diverged as error:
        return None, str(error)
    last = trained.history[-1]
    reason = not_fitted(last["train_accuracy"], last["train_loss"])
    if not (reason or trained.stopped):
        reason = f"the loss is still {last['train_loss']:.3g} after {config.epochs} epochs"
    return trained, reason


def held_out(trained: Trained) -> Pair:
    """The points that a network has not seen: those held back, and the test set."""
    import torch

    parts = [pair for pair in (trained.validation, trained.test) if pair is not None]
    return torch.cat([pair[0] for pair in parts]), torch.cat([pair[1] for pair in parts])


def family(name: str) -> str:
    """The kind of a measure: margin, norm, flatness that knows the weights' scale, flatness, or control."""
    from spiritlevel.measures import MEASURES

    if name in CONTROLS:
        return "control"
    if name in PRODUCTS or name == "pac_bayes_magnitude":  # noise relative to the weights, apart from a tiny constant
        return "scale-aware flatness"
    measure = MEASURES[name]
    if measure.direction == "wider" or name in LOSS_BASED:
        return "margin"
    if measure.direction == "larger":
        return "norm"
    return "scale-aware flatness" if "rescale_layers" in measure.invariant_to else "flatness"


FAMILIES = ("margin", "flatness", "scale-aware flatness", "norm", "control")
PRODUCTS = {"trace × ‖θ‖²": "trace", "λ₁ × ‖θ‖²": "largest_eigenvalue"}
CONTROLS = {"loss at stop": "loss", "steps to stop": "steps", "number of parameters": "parameters"}
"""What a measure must beat to be of use: the loss that is left, the time it took, the size of the network."""


def columns(nets: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """For every measure, product and control one number per network, with the sign that makes it grow with the gap."""
    import numpy as np

    tables = [{row["name"]: row for row in net["measures"]} for net in nets]
    found: dict[str, Array] = {}
    for name, first in tables[0].items():
        values = [math.nan if table[name]["value"] is None else table[name]["value"] for table in tables]
        found[name] = np.array(values) * (-1.0 if first["direction"] in ("wider", "flatter") else 1.0)
    if "weight_norm" in found:
        factor = found["weight_norm"] ** 2
        found |= {name: found[base] * factor for name, base in PRODUCTS.items() if base in found}
    return found | {name: np.array([float(net[key]) for net in nets]) for name, key in CONTROLS.items()}


def settings_of(nets: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hyper-parameters known for these networks."""
    return [name for name in SETTINGS if name in nets[0]]


def rankings_of(nets: Sequence[Mapping[str, Any]], resamples: int, seed: int) -> dict[str, Ranking]:
    """The rankings of fitted networks by the gap in error and by that in cross entropy."""
    import numpy as np

    from spiritlevel.statistics.ranking import Ranking

    measures = columns(nets)
    settings = {name: [net[name] for net in nets] for name in settings_of(nets)}
    replicas = [net["replica"] for net in nets]
    return {
        target: Ranking(measures, np.array([net[target] for net in nets]), settings, replicas, resamples, seed)
        for target in ("gap", "loss gap")
    }


def by_family(nets: Sequence[Mapping[str, Any]]) -> list[Ranking]:
    """The rankings by the gap within each family of networks, as PGDL takes them: 100·K, the mean over its tasks.

    Reference: Jiang et al. 2020, NeurIPS competition "Predicting generalization in deep learning", arXiv:2012.07976.
    """
    families = dict.fromkeys(net.get("network") for net in nets)
    groups = [[net for net in nets if net.get("network") == name] for name in families]
    return [rankings_of(group, 0, 0)["gap"] for group in groups if len(group) > 1]


def gap_spread(nets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the gaps lie apart, compared with the binomial error of one; and how much of that is not chance.

    That is τ between the gaps on two halves of the points, and the share of the variance that each hyper-parameter
    explains.

    All networks see the same points, so the error of a difference is smaller than the binomial one suggests. τ of
    the halves is roughly what a perfect measure of the true gap could reach with half of the points.
    """
    import numpy as np

    from spiritlevel.statistics.correlation import kendall

    gaps = np.array([net["gap"] for net in nets])
    errors = np.array([net["test error"] for net in nets])
    noise = float(np.sqrt(np.mean(errors * (1 - errors) / np.array([net["held out"] for net in nets]))))
    sd = float(gaps.std(ddof=1))
    halves = kendall([net["gap on even points"] for net in nets], [net["gap on odd points"] for net in nets])
    shares = {}
    for name in settings_of(nets):
        groups = [gaps[[net[name] == value for net in nets]] for value in {net[name] for net in nets}]
        between = sum(len(group) * (group.mean() - gaps.mean()) ** 2 for group in groups)
        shares[name] = float(between / max(((gaps - gaps.mean()) ** 2).sum(), 1e-300))
    return {
        "gap_mean": float(gaps.mean()),
        "gap_sd": sd,
        "gap_min": float(gaps.min()),
        "gap_max": float(gaps.max()),
        "binomial_error": noise,
        "spread_ratio": sd / noise if noise else math.nan,
        "tau_between_halves": halves,
        "variance_explained": shares,
    }


def ranked(
    rankings: Mapping[str, Ranking], nets: Sequence[Mapping[str, Any]], seconds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One row per measure, the highest τ first."""
    import numpy as np

    from spiritlevel.statistics.ranking import interval

    found = []
    details: dict[str, list[Mapping[str, Any]]] = {}
    for net in nets:
        for entry in net["measures"]:
            details.setdefault(entry["name"], []).append(entry)
    main = rankings["gap"]
    families = by_family(nets)
    for name, values in main.measures.items():
        row: dict[str, Any] = {"measure": name, "family": family(name)}
        for target, ranking in rankings.items():
            draws = ranking.tau(name)
            low, high = interval(draws)
            row |= {f"τ {target}": float(draws[0]), f"τ {target} low": low, f"τ {target} high": high}
        conditional = main.conditional(name)
        low, high = interval(conditional["mean"])
        row |= {"Ψ": float(conditional["mean"][0]), "Ψ low": low, "Ψ high": high}
        row |= {f"ψ {key}": float(draws[0]) for key, draws in conditional.items() if key != "mean"}
        row["K"] = main.information(name)
        row["PGDL score"] = 100 * float(np.mean([one.information(name) for one in families]))
        own = details.get(PRODUCTS.get(name, name), [])
        row["networks"] = int(np.isfinite(values).sum())
        row["not converged"] = sum(entry["kind"] == "not converged" for entry in own)
        row["reason"] = next((entry["reason"] for entry in own if entry["reason"]), "")
        row["CPU seconds"] = seconds.get(PRODUCTS.get(name, name))
        found.append(row)
    return sorted(found, key=lambda row: -_or_least(row["τ gap"]))


def _or_least(value: float) -> float:
    return value if math.isfinite(value) else -2.0


def _label(row: Mapping[str, Any]) -> str:
    return str(row["measure"]) if row["CPU seconds"] is None else f"{row['measure']} ({row['CPU seconds']:.2f} s)"


def draw(
    run: Run,
    rows: Sequence[Mapping[str, Any]],
    measures: Mapping[str, Array],
    nets: Sequence[Mapping[str, Any]],
    number: int,
) -> None:
    """Both rankings, and scatters of the best measure, the trace and λ₁ against the gap."""
    from spiritlevel import charts

    chosen = [name for name in FAMILIES if any(row["family"] == name for row in rows)]
    asked = {"ranking": ("τ gap", "Kendall's τ", "all pairs"), "conditional": ("Ψ", "Ψ", "pairs that differ in one")}
    for chart, (key, symbol, pairs) in asked.items():
        shown = sorted((row for row in rows if math.isfinite(row[key])), key=lambda row: -row[key])
        if not shown:
            continue
        axis = f"{symbol} with the generalisation gap ({pairs}); + is what the measure promises"
        table = {
            "measure": [_label(row) for row in shown],
            axis: [row[key] for row in shown],
            "low": [row[f"{key} low"] for row in shown],
            "high": [row[f"{key} high"] for row in shown],
            "family": [row["family"] for row in shown],
        }
        title = f"How measures rank {len(nets)} fitted networks (95 % over {number} cells; CPU seconds of one network)"
        run.chart(
            chart, charts.intervals(table, "measure", axis, "low", "high", colour="family", order=chosen, title=title)
        )
    tau = {row["measure"]: row["τ gap"] for row in rows}
    whole = [row["measure"] for row in rows if row["family"] != "control" and row["networks"] == len(nets)]
    panels = []
    for name in dict.fromkeys((*whole[:1], *(name for name in PLAIN if name in measures))):
        values = [abs(value) for value in measures[name].tolist()]
        one_sign = all(v > 0 for v in measures[name].tolist()) or all(v < 0 for v in measures[name].tolist())
        table = {
            name: values if one_sign else measures[name].tolist(),
            "gap in error (%)": [100 * net["gap"] for net in nets],
            "width": [f"{net['width']:g}" for net in nets],
        }
        panels.append(
            charts.scatter(
                table,
                name,
                "gap in error (%)",
                colour="width",
                log_x=one_sign,
                title=f"{name}: τ = {tau[name]:.2f}".replace("-", "−"),
            )
        )
    if panels:
        run.chart("gap", charts.panels([panels]))
