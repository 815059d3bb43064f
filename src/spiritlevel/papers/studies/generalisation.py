"""The question all three papers argue about: which measure ranks fitted networks by how well they generalise?

A grid of small networks is trained on the same points to the same loss. Every measure of the registry is compared with
the generalisation gap by Kendall's τ over all pairs of networks, and by what Jiang et al. 2019 (arXiv:1912.02178) ask
for beside it: Ψ, the mean over the hyper-parameters of ψ, which is τ over pairs that differ in that one alone; and K,
the share of the information about the sign of a difference in gap that the sign of the difference in the measure
holds when up to two hyper-parameters are known. A measure that only mirrors one hyper-parameter has a high τ and a low
Ψ and K.

Signs are set so that +1 is what the measure promises: sharper, larger or less wide means a larger gap. Networks that
share their hyper-parameters are no independent draws, so the bootstrap resamples cells of the grid, with all seeds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.errors import InputError
from spiritlevel.papers.studies.base import Config, Run, Study, Tables, not_fitted
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spiritlevel.papers.training import Job
    from spiritlevel.statistics.ranking import Ranking

    Array = NDArray[Any]

LEAST = 48
"""Fitted networks below which nothing is decided."""
SPREAD = 2.0
"""The least ratio of the standard deviation of the gaps to the binomial error of one."""
SETTINGS = ("lr", "batch_size", "width", "weight_decay")
PLAIN = ("trace", "largest_eigenvalue")
LOSS_BASED = ("mean_aceht", "margin_bound", "printed_margin_bound")  # functions of the margins that grow with sharpness

BETTER = {"difference of τ": Range.POSITIVE, "τ": Range.POSITIVE}  # better than a wrong ranking is not enough
MARGINS = Statement(
    "margins",
    "to assess generalisability, use a margin measure instead of flatness",
    "a recommendation, without a test on many networks (abstract, Sections 3.2.1 and 6)",
    "the margin measure that ranks best on the networks of the other seeds has a positive τ with the gap on a seed's "
    "own networks, higher than that of Tr H or λ₁, whichever ranks better on the other seeds",
    "its τ is negative, or lower",
    BETTER,
)
OWN_MARGIN = Statement(
    "output-margin",
    "nothing is lost if the output margin replaces the trace",
    "margins are highly correlated to flatness (abstract)",
    "on a seed's networks the mean output margin has a positive τ, and τ(margin) − τ(Tr H) is above −0.1",
    "its τ is negative, or the difference below −0.1",
    {"difference of τ": Range(low=-0.1), "τ": Range.POSITIVE},
)
SCALE = Statement(
    "weight-scale",
    "flatness must be used in conjunction with the weights' scale",
    "a recommendation (abstract, conclusion)",
    "by the rule of `margins`, a measure of flatness that knows the weights' scale ranks better than Tr H and λ₁",
    "its τ is negative, or lower",
    BETTER,
)
TIMES_NORM = Statement(
    "times-norm",
    "flatness times the squared weight norm, the plainest such conjunction, beats flatness alone",
    "a recommendation (abstract, conclusion)",
    "on a seed's networks τ(Tr H·‖θ‖²) > τ(Tr H) and τ(λ₁·‖θ‖²) > τ(λ₁), both products with a positive τ",
    "the smaller difference is negative, or the smaller τ",
    BETTER,
)


@dataclass(frozen=True, kw_only=True)
class Generalisation(Config):
    """The grid of networks, and what is measured on them."""

    network: str = "printed_mlp"
    """Dense with a bottleneck, 784-10w-100w-10: its width w moves the gap."""
    data: str = "fashion-mini"
    train_size: int = 1_000
    """The same points for every network."""
    held_out: int = 5_000
    """Training points that no network sees; the gap is measured on them and the test set."""
    lr: tuple[float, ...] = (0.01, 0.03)
    batch_size: tuple[int, ...] = (32, 128)
    width: tuple[float, ...] = (0.7, 1.5, 5.0)
    weight_decay: tuple[float, ...] = (0.0, 5e-4)
    replicas: int = 5
    """Networks in each cell of the grid, with seeds of their own."""
    momentum: float = 0.9
    until_loss: float = 0.02
    """Every network is trained until its training loss is at most this."""
    check_every: int = 8
    """Steps between two looks at the training loss."""
    epochs: int = 400
    """At most; a network that has not reached the loss by then is left out, and counted."""
    measures: tuple[str, ...] = ()
    """Names of the registry; none means all."""
    resamples: int = 1_000


# ---------------------------------------------------------------------------------------------------- networks


def cells(config: Generalisation) -> list[dict[str, Any]]:
    """One entry per network: the values of its hyper-parameters, and its seed."""
    values = itertools.product(*(getattr(config, name) for name in SETTINGS), range(config.replicas))
    first = config.seed * config.replicas
    return [
        {**dict(zip(SETTINGS, cell, strict=True)), "seed": first + replica, "replica": replica}
        for *cell, replica in values
    ]


def job(config: Generalisation, cell: Mapping[str, Any]) -> Job:
    """The training of one network."""
    from spiritlevel.papers.training import Job, Recipe

    recipe = Recipe(
        lr=cell["lr"],
        momentum=config.momentum,
        weight_decay=cell["weight_decay"],
        batch_size=cell["batch_size"],
        epochs=config.epochs,
        until_loss=config.until_loss,
    )
    return Job(
        network=config.network,
        options={"width": cell["width"]},
        data=config.data,
        train_size=config.train_size,
        validation=config.held_out,
        recipe=recipe,
        seed=cell["seed"],
        evaluate=("train",),
        evaluate_every=config.check_every,
    )


def network(config: Generalisation, cell: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Train one network; if it is fitted, its gaps and all its measures, otherwise the reason why not."""
    import torch

    from spiritlevel.measures import evaluate as evaluate_measures
    from spiritlevel.papers.networks import count
    from spiritlevel.papers.training import evaluate

    found: dict[str, Any] = {**cell}
    try:
        trained = run.train(job(config, cell))
    except InputError as error:
        if "diverged" not in str(error):
            raise
        return {**found, "excluded": str(error)}
    last = trained.history[-1]
    found |= {"loss": last["train_loss"], "error": 1 - last["train_accuracy"], "steps": last["step"]}
    found |= {"epochs": last["epoch"], "training seconds": trained.seconds}
    reason = not_fitted(last["train_accuracy"], last["train_loss"])
    if not (reason or trained.stopped):
        reason = f"the loss is still {last['train_loss']:.3g} after {config.epochs} epochs"
    if reason:
        return {**found, "excluded": reason}
    model = trained.model()
    parts = [pair for pair in (trained.validation, trained.test) if pair is not None]
    inputs, targets = torch.cat([pair[0] for pair in parts]), torch.cat([pair[1] for pair in parts])
    whole, even, odd = (evaluate(model, (inputs[part], targets[part])) for part in _HALVES)
    found |= {
        "excluded": "",
        "parameters": count(model),
        "held out": len(targets),
        "test error": 1 - whole["accuracy"],
        "gap": 1 - whole["accuracy"] - found["error"],
        "loss gap": whole["loss"] - found["loss"],
        "gap on even points": 1 - even["accuracy"] - found["error"],
        "gap on odd points": 1 - odd["accuracy"] - found["error"],
    }
    rows = evaluate_measures(model, trained.train, measures=config.measures or "all", seed=config.seed)
    return {**found, "measures": rows}


def costs(config: Generalisation, cell: Mapping[str, Any], run: Run) -> dict[str, float]:
    """CPU seconds of every measure of one trained network, each on its own with nothing shared."""
    from spiritlevel.measures import evaluate, select

    trained = run.train(job(config, cell))
    model = trained.model()
    names = [measure.name for measure in select(config.measures or "all")]
    evaluate(model, trained.train, measures=names[:1])  # what only a first call costs
    found = {}
    for number, name in enumerate(names):
        run.progress("cost of each measure", number, len(names))
        begin = time.process_time()
        evaluate(model, trained.train, measures=[name], seed=config.seed)
        found[name] = time.process_time() - begin
    return found


_HALVES = (slice(None), slice(0, None, 2), slice(1, None, 2))


# ---------------------------------------------------------------------------------------------------- measures


def family(name: str) -> str:
    """The kind of a measure: margin, norm, flatness that knows the weights' scale, flatness, or control."""
    from spiritlevel.measures import MEASURES

    if name in CONTROLS:
        return "control"
    if name in PRODUCTS or name == "pac_bayes_magnitude":  # noise relative to the weights, but for a tiny constant
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


# --------------------------------------------------------------------------------------------------- the study


def run(config: Generalisation, run: Run) -> None:
    """Train and measure the grid, then rank."""
    nets = []
    grid = cells(config)
    for number, cell in enumerate(grid):
        run.progress("networks trained and measured", number, len(grid))
        label = "-".join(f"{cell[name]:g}" for name in (*SETTINGS, "seed"))
        nets.append(run.once(f"network-{label}", lambda cell=cell: network(config, cell, run)))  # type: ignore[misc]
    run.table("networks", [{key: value for key, value in net.items() if key != "measures"} for net in nets])
    fitted = [net for net in nets if not net["excluded"]]
    excluded = Counter(net["excluded"].split(" (")[0] for net in nets if net["excluded"])
    run.report(networks=len(nets), fitted=len(fitted), excluded=dict(excluded))
    if len(fitted) < 4:
        run.table("values", [])
        return
    spread = gap_spread(fitted)
    run.report(**spread)
    rankings = rankings_of(config, fitted, config.resamples)
    measures = rankings["gap"].measures
    seconds = run.once("cost", lambda: costs(config, fitted[-1], run))
    rows = ranked(rankings, fitted, seconds)
    run.table("measures", rows)
    best = {name: next((row for row in rows if row["family"] == name), None) for name in FAMILIES}
    run.report(best_by_family=best, information_of_noise=rankings["gap"].noise())
    values = [
        {**{name: net[name] for name in (*SETTINGS, "seed", "gap", "loss gap")}, **row}
        for net in fitted
        for row in net["measures"]
    ]
    run.table("values", values)
    _draw(run, rows, measures, fitted, rankings["gap"].cells)


def rankings_of(config: Generalisation, nets: Sequence[Mapping[str, Any]], resamples: int) -> dict[str, Ranking]:
    """The rankings of fitted networks by the gap in error and by that in cross entropy."""
    import numpy as np

    from spiritlevel.statistics.ranking import Ranking

    measures = columns(nets)
    settings = {name: [net[name] for net in nets] for name in SETTINGS}
    replicas = [net["replica"] for net in nets]
    return {
        target: Ranking(measures, np.array([net[target] for net in nets]), settings, replicas, resamples, config.seed)
        for target in ("gap", "loss gap")
    }


def from_tables(config: Generalisation, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run, from its networks and the values that the measures have on them."""
    nets = tables("networks")
    fitted = [net for net in nets if not net["excluded"]]
    if len(fitted) < 4:
        for statement in STATEMENTS:
            yield statement.judge(None, undecided=f"only {len(fitted)} of {len(nets)} networks are fitted")
        return
    values: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in tables("values"):
        values.setdefault(tuple(row[name] for name in (*SETTINGS, "seed")), []).append(row)
    fitted = [{**net, "measures": values[tuple(net[name] for name in (*SETTINGS, "seed"))]} for net in fitted]
    undecided, spread = "", gap_spread(fitted)
    if len(fitted) < LEAST:
        undecided = f"{len(fitted)} fitted networks of {len(nets)}, {LEAST} are needed"
    elif not spread["spread_ratio"] >= SPREAD:
        undecided = f"the gaps spread only {spread['spread_ratio']:.2g} times as far as their binomial error"
    (listing,) = (row for row in describe() if row.name == config.data)
    accuracy = 1 - max(net["test error"] for net in fitted)
    facts = {"undecided": undecided, "accuracy": accuracy, "chance": 1 / listing.classes}
    yield from judge(rankings_of(config, fitted, 0), facts)


def gap_spread(nets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the gaps lie apart, beside the binomial error of one; and what of it is no chance.

    That is τ between the gaps on two halves of the points, and the share of the variance that each hyper-parameter
    explains.

    All networks see the same points, so the error of a difference is smaller than the binomial one suggests. τ of
    the halves is about what a perfect measure of the true gap could reach with half of the points.
    """
    import numpy as np

    from spiritlevel.statistics.correlation import kendall

    gaps = np.array([net["gap"] for net in nets])
    errors = np.array([net["test error"] for net in nets])
    noise = float(np.sqrt(np.mean(errors * (1 - errors) / np.array([net["held out"] for net in nets]))))
    sd = float(gaps.std(ddof=1))
    halves = kendall([net["gap on even points"] for net in nets], [net["gap on odd points"] for net in nets])
    shares = {}
    for name in SETTINGS:
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
        own = details.get(PRODUCTS.get(name, name), [])
        row["networks"] = int(np.isfinite(values).sum())
        row["not converged"] = sum(entry["kind"] == "not converged" for entry in own)
        row["reason"] = next((entry["reason"] for entry in own if entry["reason"]), "")
        row["CPU seconds"] = seconds.get(PRODUCTS.get(name, name))
        found.append(row)
    return sorted(found, key=lambda row: -_or_least(row["τ gap"]))


def _or_least(value: float) -> float:
    return value if math.isfinite(value) else -2.0


def judge(rankings: Mapping[str, Ranking], facts: Mapping[str, Any]) -> Iterator[Ruling]:
    """The rulings by the gap in error, a number for each seed; with the gap in cross entropy as a remark."""
    import numpy as np

    main, other = rankings["gap"], rankings["loss gap"]
    # what only some networks have could be chosen for the networks it leaves out
    names = [name for name, values in main.measures.items() if np.isfinite(values).all()]
    plain = [name for name in PLAIN if name in names]

    def missing(what: str) -> dict[str, Any]:
        return {**facts, "undecided": facts["undecided"] or what}

    for statement, kind in ((MARGINS, "margin"), (SCALE, "scale-aware flatness")):
        group = [name for name in names if family(name) == kind]
        if len(plain) < len(PLAIN):
            yield statement.judge(None, **missing(f"needs the measures {' and '.join(PLAIN)} of every network"))
            continue
        if not group:
            yield statement.judge(None, **missing(f"no {kind} measure was taken"))
            continue
        gains, owns, best = main.advantages(group, plain)
        elsewhere = float(np.mean([gain[0] for gain in other.advantages(group, plain)[0]]))
        yield statement.judge(
            [_numbers(gain[0], own[0]) for gain, own in zip(gains, owns, strict=True)],
            remark=f"Chosen: {best}. By the gap in loss the difference is {elsewhere:+.2f}. {_size_alone(main)}",
            **facts,
        )
    if "margin_mean" in names and "trace" in names:
        pairs = [
            [float(main.tau(name, inside)[0]) for name in ("margin_mean", "trace")] for _, inside in main.by_seed()
        ]
        said = (
            f"Over all networks τ = {main.tau('margin_mean')[0]:.2f} (margin) and {main.tau('trace')[0]:.2f} (trace)."
        )
        yield OWN_MARGIN.judge([_numbers(own - rival, own) for own, rival in pairs], remark=said, **facts)
    else:
        yield OWN_MARGIN.judge(None, **missing("needs the measures margin_mean and trace of every network"))
    if set(PRODUCTS) <= set(names) and len(plain) == len(PLAIN):
        found = []
        for _, inside in main.by_seed():
            tau = {name: float(main.tau(name, inside)[0]) for name in (*PRODUCTS, *PLAIN)}
            gain = min(tau[name] - tau[base] for name, base in PRODUCTS.items())
            found.append(_numbers(gain, min(tau[name] for name in PRODUCTS)))
        text = ", ".join(f"{name} {main.tau(name)[0]:.2f}" for name in (*PRODUCTS, *PLAIN))
        yield TIMES_NORM.judge(found, remark=f"τ over all networks: {text}.", **facts)
    else:
        yield TIMES_NORM.judge(None, **missing("needs weight_norm, trace and largest_eigenvalue of every network"))


def _numbers(difference: float, own: float) -> dict[str, float]:
    return {"difference of τ": float(difference), "τ": float(own)}


def _size_alone(ranking: Ranking) -> str:
    """What any measure has to be held against: the number of parameters ranks without looking at the weights."""
    name = "number of parameters"
    return f"The {name} alone has τ = {ranking.tau(name)[0]:.2f}." if name in ranking.measures else ""


def _label(row: Mapping[str, Any]) -> str:
    return str(row["measure"]) if row["CPU seconds"] is None else f"{row['measure']} ({row['CPU seconds']:.2f} s)"


def _draw(
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


STATEMENTS = (MARGINS, OWN_MARGIN, SCALE, TIMES_NORM)

STUDY = Study(
    name="generalisation",
    title="Which measure ranks fitted networks by how well they generalise",
    source="A, abstract and Section 6; C, abstract; Jiang et al. 2019",
    config=Generalisation,
    statements=STATEMENTS,
    run=run,
    judge=from_tables,
    reduced=lambda config: (
        f"{len(cells(config))} networks ({config.network}, {config.data}, {config.train_size:,} images)"
    ),
    scales={
        "smoke": {
            "train_size": 60,
            "held_out": 500,
            "lr": (0.02, 0.04),
            "batch_size": (30,),
            "width": (1.0, 2.0),
            "weight_decay": (0.0,),
            "replicas": 2,
            "until_loss": 0.05,
            "epochs": 100,
            "measures": ("trace", "largest_eigenvalue", "fisher_rao_norm", "weight_norm", "margin_mean"),
            "resamples": 100,
        },
        "laptop": {"replicas": 3},
    },
    seeds={},
)
