"""The question all three papers argue about: which measure ranks fitted networks by how well they generalise?

A grid of small networks is trained on the same points to the same loss. Every measure of the registry is compared with
the generalisation gap by Kendall's τ over all pairs of networks, and by what Jiang et al. 2019 (arXiv:1912.02178) also
ask for: Ψ, the mean over the hyper-parameters of ψ, which is τ over pairs that differ only in that one; and K,
the share of the information about the sign of a difference in gap that the sign of the difference in the measure
holds when up to two hyper-parameters are known. A measure that only mirrors one hyper-parameter has a high τ and a low
Ψ and K.

Signs are set so that +1 is what the measure promises: sharper, larger or less wide means a larger gap. Networks that
share their hyper-parameters are not independent draws, so the bootstrap resamples cells of the grid, with all seeds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.papers.studies.base import Run, Study, Tables
from spiritlevel.papers.studies.league import (
    FAMILIES,
    PLAIN,
    PRODUCTS,
    SMALL,
    Grid,
    axes,
    cells,
    draw,
    family,
    fitted_network,
    gap_spread,
    held_out,
    job,
    pieces_of,
    ranked,
    rankings_of,
    settings_of,
)
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spiritlevel.statistics.ranking import Ranking

    Array = NDArray[Any]

LEAST = 48
"""The number of fitted networks below which nothing is decided."""
SPREAD = 2.0
"""The least ratio of the standard deviation of the gaps to the binomial error of one."""

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
class Generalisation(Grid):
    """The grid of networks, and what is measured on them."""

    measures: tuple[str, ...] = ()
    """Names from the registry; none means all."""
    resamples: int = 1_000
    """Bootstrap resamples behind each interval."""


# ---------------------------------------------------------------------------------------------------- networks


def pieces(config: Generalisation) -> dict[str, Callable[[Run], Any]]:
    """What can be computed for each network alone, by the name of its piece; the first seed of each cell goes first."""
    return pieces_of(config, network)


def network(config: Generalisation, cell: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Train one network; if it is fitted, its gaps and all its measures, otherwise the reason why not."""
    from spiritlevel.measures import evaluate as evaluate_measures
    from spiritlevel.papers.networks import count
    from spiritlevel.papers.training import evaluate

    trained, reason = fitted_network(config, cell, run)
    found: dict[str, Any] = {**cell}
    if trained is None:
        return {**found, "excluded": reason}
    last = trained.history[-1]
    found |= {"loss": last["train_loss"], "error": 1 - last["train_accuracy"], "steps": last["step"]}
    found |= {"epochs": last["epoch"], "training seconds": trained.seconds}
    if reason:
        return {**found, "excluded": reason}
    model = trained.model()
    inputs, targets = held_out(trained)
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
    evaluate(model, trained.train, measures=names[:1])  # absorbs what only a first call costs
    found = {}
    for number, name in enumerate(names):
        run.progress("cost of each measure", number, len(names))
        begin = time.process_time()
        evaluate(model, trained.train, measures=[name], seed=config.seed)
        found[name] = time.process_time() - begin
    return found


_HALVES = (slice(None), slice(0, None, 2), slice(1, None, 2))


# --------------------------------------------------------------------------------------------------- the study


def run(config: Generalisation, run: Run) -> None:
    """Train and measure the grid, then rank."""
    asked = pieces(config)
    found = {}
    for number, (name, piece) in enumerate(asked.items()):
        run.progress("networks trained and measured", number, len(asked))
        found[name] = run.once(name, partial(piece, run))
    grid = axes(config)
    nets = sorted(found.values(), key=lambda net: (*(grid[name].index(net[name]) for name in grid), net["replica"]))
    run.table("networks", [{key: value for key, value in net.items() if key != "measures"} for net in nets])
    fitted = [net for net in nets if not net["excluded"]]
    excluded = Counter(net["excluded"].split(" (")[0] for net in nets if net["excluded"])
    run.report(networks=len(nets), fitted=len(fitted), excluded=dict(excluded))
    if len(fitted) < 4:
        run.table("values", [])
        return
    spread = gap_spread(fitted)
    run.report(**spread)
    rankings = rankings_of(fitted, config.resamples, config.seed)
    measures = rankings["gap"].measures
    seconds = run.once("cost", lambda: costs(config, fitted[-1], run))
    rows = ranked(rankings, fitted, seconds)
    run.table("measures", rows)
    best = {name: next((row for row in rows if row["family"] == name), None) for name in FAMILIES}
    run.report(best_by_family=best, information_of_noise=rankings["gap"].noise())
    values = [
        {**{name: net[name] for name in (*settings_of(fitted), "seed", "gap", "loss gap")}, **row}
        for net in fitted
        for row in net["measures"]
    ]
    run.table("values", values)
    draw(run, rows, measures, fitted, rankings["gap"].cells)


def from_tables(config: Generalisation, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run, from its networks and the values that the measures have on them."""
    nets = tables("networks")
    fitted = [net for net in nets if not net["excluded"]]
    if len(fitted) < 4:
        for statement in STATEMENTS:
            yield statement.judge(None, undecided=f"only {len(fitted)} of {len(nets)} networks are fitted")
        return
    values: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    names = (*settings_of(fitted), "seed")
    for row in tables("values"):
        values.setdefault(tuple(row[name] for name in names), []).append(row)
    fitted = [{**net, "measures": values[tuple(net[name] for name in names)]} for net in fitted]
    undecided, spread = "", gap_spread(fitted)
    if len(fitted) < LEAST:
        undecided = f"{len(fitted)} fitted networks of {len(nets)}, {LEAST} are needed"
    elif not spread["spread_ratio"] >= SPREAD:
        undecided = f"the gaps spread only {spread['spread_ratio']:.2g} times as far as their binomial error"
    (listing,) = (row for row in describe() if row.name == config.data)
    accuracy = 1 - max(net["test error"] for net in fitted)
    facts = {"undecided": undecided, "accuracy": accuracy, "chance": 1 / listing.classes}
    yield from judge(rankings_of(fitted, 0, config.seed), facts)


def judge(rankings: Mapping[str, Ranking], facts: Mapping[str, Any]) -> Iterator[Ruling]:
    """The rulings by the gap in error, a number for each seed; with the gap in cross entropy as a remark."""
    import numpy as np

    main, other = rankings["gap"], rankings["loss gap"]
    # a measure that only some networks have could be chosen for the networks it leaves out
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
    """What any measure must be compared with: the number of parameters ranks without looking at the weights."""
    name = "number of parameters"
    return f"The {name} alone has τ = {ranking.tau(name)[0]:.2f}." if name in ranking.measures else ""


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
        f"{len(cells(config))} networks ({', '.join(config.networks) or config.network}, {config.data}, "
        f"{' or '.join(f'{size:,}' for size in config.train_sizes or (config.train_size,))} images)"
    ),
    pieces=pieces,
    later={"networks": (), "depth": (), "train_sizes": ()},
    wanted={"a league of several families": {"networks": ("mlp", "strided_cnn"), "scale": "small"}},
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
        "small": SMALL,
    },
    seeds={},
)
