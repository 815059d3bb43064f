"""Paper A, Table 1 and Fig. 4: a small and a large batch seen through losses, traces and margins."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel import storage
from spiritlevel.data import describe
from spiritlevel.papers.studies.base import Config, Run, Study, Tables, not_fitted, reduced
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.papers.training import History, Job, Pair, Row, Trained

PAPER = {  # column: batch 256, batch 4096
    "train_loss": (2.1e-5, 3.4e-5),
    "test_loss": (7.28e-2, 9.45e-2),
    "train_accuracy": (1.0, 1.0),
    "test_accuracy": (0.9834, 0.9794),
    "trace": (1.01, 6.62),
}


ENDS = ("small", "large")  # the two solutions of the paper


def _table(column: str, text: str, reproduced: str, fails: str, within: Range) -> Statement:
    small, large = PAPER[column]
    text = f"Table 1, {column.replace('_', ' ')}: {text}"
    return Statement(
        column.replace("_", "-"), text, f"{small:g} (batch 256), {large:g} (batch 4096)", reproduced, fails, within
    )


TABLE = {
    "train_loss": _table(
        "train_loss",
        "comparable, lower for the small batch",
        "large / small lies above 1 and below 4",
        "it lies below 1 or above 4",
        Range(1.0, 4.0, ratio=True),
    ),
    "test_loss": _table(
        "test_loss", "lower for the small batch", "large / small lies above 1", "it lies below 1", Range.RISES
    ),
    "train_accuracy": _table(
        "train_accuracy", "the same", "they differ by less than 0.05 points", "they differ by more", Range(high=0.05)
    ),
    "test_accuracy": _table(
        "test_accuracy",
        "higher for the small batch",
        "small − large is positive (percentage points)",
        "it is negative",
        Range.POSITIVE,
    ),
    "trace": _table(
        "trace",
        "the small batch is in a flatter place",
        "large / small lies above 1",
        "it lies below 1",
        Range.RISES,
    ),
}
FOLLOWS = Statement(
    "margin-trace",
    "the output margin and the trace of a point are strongly related",
    "a strong relationship for both batch sizes (Fig. 4a, 4b)",
    "Spearman's coefficient is below −0.8 for both",
    "it is above for one of them",
    Range(high=-0.8),
    limits=(-1, 1),
)
SKEWNESS = Statement(
    "skewness",
    "the margins of the small batch are more left-skewed",
    "more left-skewed (Fig. 4c)",
    "the skewness is lower for the small batch",
    "it is higher",
    Range.NEGATIVE,
)
MINIMUM = Statement(
    "minimum",
    "the small batch has the smallest margin",
    "the smallest margin (Fig. 4c)",
    "its smallest margin among all training points is the smaller one",
    "it is the larger one",
    Range.NEGATIVE,
)
_CLOSES: tuple[str, str, dict[str, Range]] = (
    "more than half of both gaps to the small batch, in log trace and in test accuracy, closes",
    "less than half of one of the two closes",
    {"of log trace": Range(low=0.5), "of test accuracy": Range(low=0.5)},
)
TIME = Statement(
    "time",
    "the large batch did not have enough time: trained further, to the training loss of the small one, it catches up",
    "expected to (Section 4.2)",
    *_CLOSES,
)
RATE = Statement(
    "rate",
    "the large batch did not have enough time: with a learning rate as many times higher as the batch, it catches up",
    "a smaller batch is similar to a higher learning rate (Section 4.2)",
    *_CLOSES,
)
BASIN = Statement(
    "basin",
    "both solutions lie in the same basin",
    "the same basin (Section 4, after Sagun et al. and others)",
    "the barrier on the straight line between them is below 0.05, so that the line is fitted throughout; of the two "
    "treatments of batch norm, running statistics interpolated or taken from the batch, the lower barrier counts",
    "it is above",
    Range(high=0.05),
)
FLATTEST = Statement(
    "flattest is not best",
    "not in the paper: with the higher learning rate the large batch is flattest, has the widest margins and the "
    "worst test loss",
    "– (flatness and margins are to tell generalisation)",
    "against the small batch its trace is smaller, its median margin larger and its test loss higher",
    "one of the three is the other way round",
    {"trace": Range.FALLS, "median margin": Range.RISES, "test loss": Range.RISES},
)


@dataclass(frozen=True, kw_only=True)
class BatchSize(Config):
    """Two batch sizes, the same number of steps, and two ways to give the large one more time."""

    data: str = "mnist"
    """The data set."""
    train_size: int | None = None
    """Train on this many points only."""
    width: float = 1.0
    """Factor on the 512 units of every hidden layer."""
    pixels: str = "unit"
    """unit: in [0, 1]; standard: standardised."""
    small: int = 256
    """The small batch."""
    large: int = 4096
    """The large batch."""
    lr: float = 0.1
    """The learning rate for both."""
    steps: int = 10_000
    """Updates for both."""
    checkpoints: int = 21
    """Evaluations from step 0 to the last one."""
    max_steps: int = 30_000
    """Updates after which the large batch is stopped even if its loss is still above that of the small one."""
    points: int = 1_000
    """Training points in the charts, drawn at random. The numbers are those of all training points."""


def job(config: BatchSize, batch_size: int, factor: float = 1.0) -> Job:
    """The training of one row: plain SGD, for Table 1 the same as in the study of correlations."""
    from spiritlevel.papers.training import Job, Recipe

    every = _every(config)
    return Job(
        network="fcn_bn",
        options={"width": config.width} if config.width != 1.0 else {},
        data=config.data,
        train_size=config.train_size,
        pixels=config.pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(lr=config.lr * factor, batch_size=batch_size, steps=config.steps),
        seed=config.seed,
        keep=tuple(range(0, config.steps + 1, every)),
        evaluate=("train", "test"),
        evaluate_every=every,
    )


def _every(config: BatchSize) -> int:
    """Steps from one look at a training run to the next."""
    return max(1, config.steps // (config.checkpoints - 1))


def measure(model: nn.Module, train: Pair, test: Pair, chosen: Any, steps: int) -> dict[str, Any]:
    """A row of Table 1, the distribution of the margins, and margin and trace of the chosen points."""
    import numpy as np

    from spiritlevel.papers.training import evaluate
    from spiritlevel.results import median
    from spiritlevel.samples.margins import margins
    from spiritlevel.samples.traces import sample_traces
    from spiritlevel.statistics.correlation import skewness

    row = {
        f"{name}_{key}": value
        for name, pair in (("train", train), ("test", test))
        for key, value in evaluate(model, pair).items()
    }
    traces = sample_traces(model, train, method="exact").values
    found = margins(model, train).output
    draws = np.random.default_rng(0)
    column = found.numpy()
    again = [skewness(column[draws.integers(0, len(column), len(column))]) for _ in range(50)]
    return {
        "steps": steps,
        **row,
        "trace": float(traces.mean()),
        "skewness": skewness(column),
        "skewness_error": float(np.std(again, ddof=1)),
        "minimum": float(found.min()),
        "median": median(found),
        "minimum_drawn": float(found[chosen].min()),
        "skewness_drawn": skewness(found[chosen]),
        "margins": found[chosen],
        "traces": traces[chosen],
    }


def trained_on(config: BatchSize, run: Run, start: Trained, goal: float) -> tuple[nn.Module, History]:
    """The large batch, trained on from `start` until its training loss is at most `goal`; the network and its course.

    SGD without momentum has no state but the weights, so this is the same training with the data in another order.
    """
    from spiritlevel.papers.training import Recipe, fit

    model = start.model()
    rest = config.max_steps - config.steps
    recipe = Recipe(lr=config.lr, batch_size=config.large, steps=rest, until_loss=goal)
    root = run.cache or storage.cache_folder() / "networks"
    history = fit(
        model,
        start.train,
        recipe,
        seed=config.seed + 1,
        keep=tuple(range(0, rest + 1, _every(config))),
        evaluate={"train": start.train, "test": start.test},
        evaluate_every=max(1, config.steps // 100),
        checkpoint=root / f"{start.folder.name}-on-{storage.digest(recipe, 8)}",
        progress=run.progress,
        label=f"batch {config.large:,}, trained on",
    )
    return model, history


def barriers(one: nn.Module, other: nn.Module, train: Pair, chosen: Any) -> dict[str, Any]:
    """The loss on the straight line between two networks, with both treatments of batch norm."""
    from spiritlevel.answers.surface import landscape

    pair = train[0][chosen], train[1][chosen]
    found: dict[str, Any] = {}
    for mode in ("eval", "batch"):
        path = landscape(one, pair, directions=other, points=21, batch_norm=mode, batch_size=min(1000, len(pair[1])))
        found[mode] = {"barrier": path.barrier, "steps": path.steps[0], "losses": path.losses}
    return found


def run(config: BatchSize, run: Run) -> None:
    """Train both, measure, give the large batch more time in two ways, and walk from one solution to the other.

    Once its numbers are kept, a network is no longer needed: each is trained only when it is first asked for.
    """
    import torch

    from spiritlevel.papers.training import parts

    data = parts(job(config, config.small))
    order = torch.randperm(len(data.train[1]), generator=torch.Generator().manual_seed(config.seed))
    chosen = order[: config.points]

    @functools.cache
    def trained(key: str) -> Trained:
        size, factor = (config.small if key == "small" else config.large), (_factor(config) if key == "faster" else 1.0)
        return run.train(job(config, size, factor))

    def way() -> dict[str, Any]:
        return barriers(trained("small").model(), trained("large").model(), data.train, order[:10_000])

    measured = partial(measure, train=data.train, test=data.test, chosen=chosen)
    found = {key: run.once(f"solution-{key}", partial(solution, trained, key, measured, chosen)) for key in ENDS}
    path = run.once("solution-path", way)
    found["longer"] = run.once("solution-longer", partial(longer, config, run, trained, found, measured, chosen))
    found["faster"] = run.once("solution-faster", partial(faster, trained, measured, chosen))
    names = {
        "small": f"batch {config.small:,}",
        "large": f"batch {config.large:,}",
        "longer": f"batch {config.large:,}, trained on",
        "faster": f"batch {config.large:,}, lr × {_factor(config):g}",
    }
    keep(run, names, found, path)
    run.report(classes=len(data.classes))


Network = Callable[[str], "Trained"]
"""A training run of this study, by name."""


def solution(trained: Network, key: str, measured: Callable[..., dict[str, Any]], chosen: Any) -> dict[str, Any]:
    """What is measured at the end of a training run, and its course."""
    ended = trained(key)
    models = ((step, ended.model(step)) for step in ended.steps)
    course = over_time(models, ended.history, ended.train, chosen)
    return {**measured(ended.model(), steps=ended.steps[-1]), "time": course}


def longer(
    config: BatchSize,
    run: Run,
    trained: Network,
    found: Mapping[str, dict[str, Any]],
    measured: Callable[..., dict[str, Any]],
    chosen: Any,
) -> dict[str, Any]:
    """The large batch at the training loss of the small one, and its course from where it was trained on."""
    goal, large = found["small"]["train_loss"], found["large"]
    if large["train_loss"] <= goal:
        return {name: value for name, value in large.items() if name != "time"}
    start = trained("large")
    model, history = trained_on(config, run, start, goal)
    row = measured(model, steps=config.steps + history.step)

    def models() -> Iterator[tuple[int, nn.Module]]:
        for step, weights in sorted(history.weights.items()):
            model.load_state_dict(weights)
            yield step, model

    course = over_time(models(), history.rows, start.train, chosen)
    return {**row, "time": [{**each, "step": config.steps + each["step"]} for each in course]}


def faster(trained: Network, measured: Callable[..., dict[str, Any]], chosen: Any) -> dict[str, Any]:
    """The large batch with the higher learning rate, or how it diverged."""
    from spiritlevel.papers.training import Diverged

    try:
        return solution(trained, "faster", measured, chosen)
    except Diverged as error:
        return {"diverged": str(error)}


def keep(run: Run, names: Mapping[str, str], found: Mapping[str, Mapping[str, Any]], path: Mapping[str, Any]) -> None:
    """The tables and charts of a run."""
    from spiritlevel import charts

    lists = ("margins", "traces", "time")
    times = [{"run": names[key], **row} for key in names for row in found[key].get("time", ())]
    run.table("time", times)
    run.table(
        "table-1",
        [{"run": names[key], **{k: v for k, v in row.items() if k not in lists}} for key, row in found.items()],
    )
    run.table(
        "points",
        [
            {"run": names[key], "output margin": margin, "trace": trace}
            for key, row in found.items()
            if "diverged" not in row
            for margin, trace in zip(row["margins"], row["traces"], strict=True)
        ],
    )
    run.table(
        "path",
        [
            {"batch norm": mode, "step": step, "loss": loss}
            for mode, line in path.items()
            for step, loss in zip(line["steps"], line["losses"], strict=True)
        ],
    )
    run.chart("batch-size", figure(names, found, path))
    title = "Median output margin while training"
    columns = {key: [row[key] for row in times] for key in ("run", "step", "median margin")}
    run.chart("margins-over-time", charts.lines(columns, "step", "median margin", series="run", title=title))


def over_time(
    models: Iterable[tuple[int, nn.Module]], history: Iterable[Row], train: Pair, chosen: Any
) -> list[dict[str, float]]:
    """Losses and the margins of the chosen points at every kept step."""
    from spiritlevel.results import median
    from spiritlevel.samples.margins import margins

    pair = train[0][chosen], train[1][chosen]
    known = {int(row["step"]): row for row in history}
    rows = []
    for step, model in models:
        found = margins(model, pair).output
        losses = {key.replace("_", " "): known[step][key] for key in ("train_loss", "test_loss", "test_accuracy")}
        rows.append({"step": step, "median margin": median(found), "smallest margin": float(found.min())})
        rows[-1] |= losses
    return rows


def _factor(config: BatchSize) -> float:
    return config.large / config.small


def figure(names: Mapping[str, str], found: Mapping[str, Mapping[str, Any]], path: Mapping[str, Any]) -> Any:
    """Fig. 4: trace against margin, and the margins, for both; below, the line from one solution to the other."""
    from spiritlevel import charts

    pairs = [(names[key], found[key]) for key in ("small", "large")]
    clouds = [
        charts.scatter(
            {"output margin": row["margins"], "trace": row["traces"]}, "output margin", "trace", log_y=True, title=name
        )
        for name, row in pairs
    ]
    histograms = [
        charts.distribution(row["margins"], "output margin", skewness=row["skewness_drawn"], title=f"{name}: margins")
        for name, row in pairs
    ]
    treatments = {"eval": "statistics interpolated", "batch": "statistics of the batch"}
    line = {
        "step from small to large batch": [step for way in path.values() for step in way["steps"]],
        "training loss": [loss for way in path.values() for loss in way["losses"]],
        "batch norm": [treatments[mode] for mode, way in path.items() for _ in way["steps"]],
    }
    walk = charts.lines(
        line, "step from small to large batch", "training loss", series="batch norm", title="On the straight line"
    )
    ends = [row for row in found.values() if "diverged" not in row]
    order = [name for key, name in names.items() if "diverged" not in found[key]]
    columns = {"run": order, "mean trace": [row["trace"] for row in ends]}
    traces = charts.bars(columns, "run", "mean trace", title="Mean trace over the training set")
    return charts.panels([clouds, histograms, [walk, traces]], width=380, height=240)


def from_tables(config: BatchSize, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run."""
    rows, points = tables("table-1"), tables("points")
    found: dict[str, dict[str, Any]] = {}
    for key, row in zip(("small", "large", "longer", "faster"), rows, strict=True):
        own = [point for point in points if point["run"] == row["run"]]
        lists = {"margins": [p["output margin"] for p in own], "traces": [p["trace"] for p in own]}
        kept = {name: value for name, value in row.items() if value is not None}
        found[key] = kept if "diverged" in kept else kept | lists
    path: dict[str, list[tuple[float, float]]] = {}
    for row in tables("path"):
        path.setdefault(row["batch norm"], []).append((row["step"], row["loss"]))
    heights = {
        mode: max(loss - (1 - t) * line[0][1] - t * line[-1][1] for t, loss in line) for mode, line in path.items()
    }
    (listing,) = (row for row in describe() if row.name == config.data)
    yield from judge(found, heights, listing.classes)


def judge(found: Mapping[str, Mapping[str, Any]], barriers: Mapping[str, float], classes: int) -> Iterator[Ruling]:
    """The rulings, from the rows of `measure` and the height of the barrier in each mode of batch norm."""
    small, large = found["small"], found["large"]
    reasons = [not_fitted(row["train_accuracy"], row["train_loss"]) for row in (small, large)]
    held_out = {"accuracy": min(small["test_accuracy"], large["test_accuracy"]), "chance": 1 / classes}
    facts: dict[str, Any] = {"undecided": next(filter(None, reasons), ""), **held_out}
    for column, statement in TABLE.items():
        ours = (small[column], large[column])
        remark = f"{ours[0]:.4g} (small) and {ours[1]:.4g} (large)."
        difference = 100 * (ours[0] - ours[1])
        number = ours[1] / ours[0] if not column.endswith("accuracy") else difference
        yield statement.judge(abs(number) if column == "train_accuracy" else number, remark=remark, **facts)
    yield follows(small, large, facts)
    yield SKEWNESS.judge(
        small["skewness"] - large["skewness"],
        remark=f"{small['skewness']:.3f} (small) and {large['skewness']:.3f} (large).",
        **facts,
    )
    yield MINIMUM.judge(
        small["minimum"] - large["minimum"],
        remark=f"{small['minimum']:.3g} and {large['minimum']:.3g}; among the drawn points "
        f"{small['minimum_drawn']:.3g} and {large['minimum_drawn']:.3g}.",
        **facts,
    )
    yield catches_up(TIME, small, large, found["longer"], facts, same_loss=True)
    yield catches_up(RATE, small, large, found["faster"], facts)
    mode, barrier = min(barriers.items(), key=lambda item: item[1])
    other = ", ".join(f"{name}: {height:.3g}" for name, height in barriers.items() if name != mode)
    yield BASIN.judge(barrier, remark=f"Batch norm in mode {mode}; {other}. A curved path may be lower.", **facts)
    faster = found["faster"]
    if "diverged" in faster:
        yield FLATTEST.judge(None, undecided="the training with the higher learning rate diverged")
        return
    names = {"trace": "trace", "median margin": "median", "test loss": "test_loss"}
    yield FLATTEST.judge({name: faster[key] / small[key] for name, key in names.items()}, **facts)


def follows(small: Mapping[str, Any], large: Mapping[str, Any], facts: Mapping[str, Any]) -> Ruling:
    """The verdict on margin against trace."""
    from spiritlevel.statistics.correlation import correlate

    ranks = [correlate(row["margins"], row["traces"], outliers="none", resamples=100) for row in (small, large)]
    worst = max(rank.spearman for rank in ranks)
    linear = " and ".join(f"{rank.r:.2f}" for rank in ranks)
    remark = f"The higher of the two; Pearson's r is {linear} (small, large)."
    return FOLLOWS.judge(worst, remark=remark, **facts)


def catches_up(
    statement: Statement,
    small: Mapping[str, Any],
    large: Mapping[str, Any],
    later: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    same_loss: bool = False,
) -> Ruling:
    """The share of the gaps in log trace and in test accuracy that more time closes."""
    if "diverged" in later:
        return statement.judge(None, undecided=later["diverged"].rstrip("."))
    undecided = facts["undecided"]
    if same_loss and later["train_loss"] > small["train_loss"]:
        undecided = undecided or f"the loss of the small batch was not reached in {later['steps']:,} steps"
    gaps = (math.log(large["trace"] / small["trace"]), small["test_accuracy"] - large["test_accuracy"])
    if min(gaps) <= 0:
        undecided = undecided or "there is no gap to close"
        return statement.judge(None, **{**facts, "undecided": undecided})
    left = (math.log(later["trace"] / small["trace"]), small["test_accuracy"] - later["test_accuracy"])
    closed = [1 - after / before for before, after in zip(gaps, left, strict=True)]
    remark = (
        f"After {later['steps']:,} steps trace {later['trace']:.3g}, test accuracy {later['test_accuracy']:.4f}, "
        f"training loss {later['train_loss']:.2g}; small batch {small['trace']:.3g}, {small['test_accuracy']:.4f}, "
        f"{small['train_loss']:.2g}; large batch {large['trace']:.3g}, {large['test_accuracy']:.4f}, "
        f"{large['train_loss']:.2g}."
    )
    return statement.judge(
        dict(zip(("of log trace", "of test accuracy"), closed, strict=True)),
        remark=remark,
        **{**facts, "undecided": undecided},
    )


STUDY = Study(
    name="batch-size",
    title="A small and a large batch: losses, traces, margins, and the way between them",
    source="A, Table 1 and Fig. 4",
    config=BatchSize,
    statements=(*TABLE.values(), FOLLOWS, SKEWNESS, MINIMUM, TIME, RATE, BASIN, FLATTEST),
    run=run,
    judge=from_tables,
    reduced=lambda config: reduced(BatchSize(), config, width="width", train_size="images", steps="steps"),
    renamed={"most": "max_steps"},
    wanted={"Table 1, four runs": {"scale": "paper"}},
    scales={
        "smoke": {
            "data": "fashion-mini",
            "train_size": 256,
            "width": 0.05,
            "small": 32,
            "large": 256,
            "steps": 30,
            "checkpoints": 3,
            "max_steps": 60,
            "points": 100,
        },
        "laptop": {"train_size": 5_000, "small": 64, "large": 1024, "width": 0.5, "steps": 2_000, "max_steps": 6_000},
    },
)
