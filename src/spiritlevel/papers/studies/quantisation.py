"""Does flatness tell what rounding the weights costs? On the networks of the generalisation league.

Every network is trained on the same points to the same loss, then its matrices are rounded to 4 bits, one scale for
each. The flatness measures of papers A and C, taken on the training set, are compared by Kendall's τ with the loss
after the rounding on held-out points, and with what the rounding added to it; so are the loss itself before the
rounding, the weight norm and the mean margin, which cost next to nothing, and the second order of that very rounding,
g·δ + ½ δᵀHδ, on held-out points. A group of measures is judged by the one that ranks best on the networks of the other
seeds, so that a long list has no advantage over a short one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.data import describe
from spiritlevel.papers.studies.base import Run, Study, Tables
from spiritlevel.papers.studies.league import SMALL, Grid, axes, cells, fitted_network, held_out, pieces_of
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from spiritlevel.statistics.ranking import Ranking

LEAST = 24
"""The number of fitted networks below which nothing is decided."""
FLATNESS = ("trace", "mean_aceht", "largest_eigenvalue", "frobenius_norm")
"""Of paper A the trace and its stand-in ACEHT, of paper C the trace, its largest eigenvalue and the Frobenius norm."""
CHEAP = ("loss", "weight_norm", "margin_mean")
SECOND = "second order"
TARGETS = ("loss after", "rise")

BETTER = {"difference of τ": Range.POSITIVE, "τ": Range.POSITIVE}
OURS = "– (our own question: flatness is about small changes of the weights)"
AFTER = Statement(
    "loss-after-rounding",
    "a flatness measure predicts the loss after rounding to 4 bits better than loss, weight norm and mean margin",
    OURS,
    "the flatness measure of papers A and C that ranks best on the networks of the other seeds has a positive τ with "
    "the held-out loss after rounding on a seed's own networks, higher than that of the best of the loss before, the "
    "weight norm and the mean margin, chosen likewise",
    "its τ is negative, or lower",
    BETTER,
)
RISE = Statement(
    "rise-by-rounding",
    "a flatness measure predicts what rounding to 4 bits adds to the loss better than loss, weight norm and mean "
    "margin",
    OURS,
    "by the rule of `loss-after-rounding`, for the held-out loss after the rounding minus that before",
    "its τ is negative, or lower",
    BETTER,
)
ACTUAL = Statement(
    "second-order",
    "the second order of the rounding itself predicts what it adds better than any flatness measure",
    OURS,
    "τ of g·δ + ½ δᵀHδ with the rise is positive on a seed's networks, and higher than that of the flatness measure "
    "that ranks best on the other seeds",
    "its τ is negative, or lower",
    BETTER,
)
STATEMENTS = (AFTER, RISE, ACTUAL)


@dataclass(frozen=True, kw_only=True)
class Quantisation(Grid):
    """The grid of networks, and how their weights are rounded."""

    replicas: int = 3
    """Networks per cell of the grid, each with its own seed."""
    bits: int = 4
    """Bits per weight after rounding, 2 to 16."""
    predict_on: int = 1_000
    """Held-out points, drawn at random, for the second order."""


def pieces(config: Quantisation) -> dict[str, Callable[[Run], Any]]:
    """What can be computed for each network alone, by the name of its piece; the first seed of each cell goes first."""
    return pieces_of(config, network)


def network(config: Quantisation, cell: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """Train one network; if it is fitted, its measures and what rounding does to it, otherwise the reason why not."""
    from spiritlevel.answers.changes import as_change
    from spiritlevel.answers.perturbing import changed, perturb
    from spiritlevel.measures import Setting, evaluate

    trained, reason = fitted_network(config, cell, run)
    found: dict[str, Any] = {**cell}
    if trained is None or reason:
        return {**found, "excluded": reason}
    last, model, data = trained.history[-1], trained.model(), held_out(trained)
    change = f"int{config.bits}"
    columns = changed(Setting(model, data), as_change(change))
    told = perturb(
        model, data, change, samples=min(config.predict_on, len(data[1])), apply=False, layers=False, seed=config.seed
    )
    rows = evaluate(model, trained.train, measures=[*FLATNESS, *CHEAP[1:]], seed=config.seed)
    return {
        **found,
        "excluded": "",
        "training loss": last["train_loss"],
        "accuracy": float(columns["right"].mean()),
        "accuracy after": float(columns["right_after"].mean()),
        "loss": float(columns["before"].mean()),
        "loss after": float(columns["after"].mean()),
        "rise": float((columns["after"] - columns["before"]).mean()),
        "flips": float(columns["flips_measured"].mean()),
        SECOND: told.predicted.value,
        **{row["name"]: row["value"] for row in rows},
    }


def run(config: Quantisation, run: Run) -> None:
    """Train, round and measure the grid, then rank."""
    asked = pieces(config)
    nets = []
    for number, (name, piece) in enumerate(asked.items()):
        run.progress("networks trained and rounded", number, len(asked))
        nets.append(run.once(name, partial(piece, run)))
    run.table("networks", nets)
    fitted = [net for net in nets if not net["excluded"]]
    run.report(networks=len(nets), fitted=len(fitted))
    if len(fitted) < 4:
        return
    rows = taus(config, fitted)
    run.table("measures", rows)
    _draw(run, rows)


def ranking(config: Quantisation, nets: Sequence[Mapping[str, Any]], target: str) -> Ranking:
    """The ranking of fitted networks by a target; signs are such that each number should grow with it."""
    import numpy as np

    from spiritlevel.statistics.ranking import Ranking

    measures = {
        name: np.array([math.nan if net[name] is None else net[name] for net in nets])
        * (-1.0 if name == "margin_mean" else 1.0)
        for name in (*FLATNESS, *CHEAP, SECOND)
    }
    settings = {name: [net[name] for net in nets] for name in axes(config)}
    goal = np.array([net[target] for net in nets], dtype=float)
    return Ranking(measures, goal, settings, [net["replica"] for net in nets], 1_000, config.seed)


def taus(config: Quantisation, nets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kendall's τ of every number with both targets, with its interval over resampled cells of the grid."""
    from spiritlevel.statistics.ranking import interval

    rows = []
    for target in TARGETS:
        ranked = ranking(config, nets, target)
        for name in ranked.measures:
            draws = ranked.tau(name)
            low, high = interval(draws)
            kind = "flatness" if name in FLATNESS else "second order" if name == SECOND else "cheap"
            rows.append(
                {"target": target, "measure": name, "kind": kind, "τ": float(draws[0]), "low": low, "high": high}
            )
    return sorted(rows, key=lambda row: (row["target"], -row["τ"] if math.isfinite(row["τ"]) else 2.0))


def from_tables(config: Quantisation, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run, from its networks."""
    nets = tables("networks")
    fitted = [net for net in nets if not net["excluded"]]
    if len(fitted) < 4:
        for statement in STATEMENTS:
            yield statement.judge(None, undecided=f"only {len(fitted)} of {len(nets)} networks are fitted")
        return
    undecided = f"{len(fitted)} fitted networks of {len(nets)}, {LEAST} are needed" if len(fitted) < LEAST else ""
    (listing,) = (row for row in describe() if row.name == config.data)
    facts = {
        "undecided": undecided,
        "accuracy": min(net["accuracy"] for net in fitted),
        "chance": 1 / listing.classes,
    }
    groups = (
        (AFTER, "loss after", FLATNESS, CHEAP),
        (RISE, "rise", FLATNESS, CHEAP),
        (ACTUAL, "rise", (SECOND,), FLATNESS),
    )
    for statement, target, names, rivals in groups:
        ranked = ranking(config, fitted, target)
        gains, owns, best = ranked.advantages(names, rivals)
        numbers = [
            {"difference of τ": float(gain[0]), "τ": float(own[0])} for gain, own in zip(gains, owns, strict=True)
        ]
        against = max(rivals, key=lambda name: float(ranked.tau(name)[0]))
        remark = f"Chosen: {best}; the best of the others over all networks is {against}."
        yield statement.judge(numbers, remark=remark, **facts)


def _draw(run: Run, rows: list[dict[str, Any]]) -> None:
    from spiritlevel import charts

    for target, name in zip(TARGETS, ("loss-after", "rise"), strict=True):
        chosen = [row for row in rows if row["target"] == target]
        columns = {key: [row[key] for row in chosen] for key in ("measure", "τ", "low", "high", "kind")}
        title = f"Kendall's τ with the {'loss after rounding' if name == 'loss-after' else 'rise by rounding'}"
        run.chart(name, charts.intervals(columns, "measure", "τ", "low", "high", colour="kind", title=title))


STUDY = Study(
    name="quantisation",
    title="Does flatness tell what rounding the weights to 4 bits costs",
    source="A and C, their measures; the question is ours",
    config=Quantisation,
    statements=STATEMENTS,
    run=run,
    judge=from_tables,
    reduced=lambda config: (
        f"{len(cells(config))} networks ({', '.join(config.networks) or config.network}, {config.data}, "
        f"{' or '.join(f'{size:,}' for size in config.train_sizes or (config.train_size,))} images)"
    ),
    pieces=pieces,
    renamed={"foretell_on": "predict_on"},
    later={"networks": (), "depth": (), "train_sizes": ()},
    wanted={"the league of several families": {"networks": ("mlp", "strided_cnn"), "scale": "small"}},
    scales={
        "smoke": {
            "train_size": 60,
            "held_out": 300,
            "lr": (0.02, 0.04),
            "batch_size": (30,),
            "width": (1.0,),
            "weight_decay": (0.0,),
            "replicas": 2,
            "until_loss": 0.05,
            "epochs": 100,
            "predict_on": 200,
        },
        "laptop": {"width": (0.7, 1.5)},
        "small": SMALL,
    },
    seeds={},
)
