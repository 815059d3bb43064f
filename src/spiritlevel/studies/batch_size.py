"""Paper A, Table 1 and Fig. 4: a small and a large batch seen through losses, traces and margins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel import storage
from spiritlevel.errors import InputError
from spiritlevel.studies.base import Config, Ruling, Run, Statement, Study, not_fitted

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.training import Job, Pair

PAPER = {  # column: batch 256, batch 4096
    "train_loss": (2.1e-5, 3.4e-5),
    "test_loss": (7.28e-2, 9.45e-2),
    "train_accuracy": (1.0, 1.0),
    "test_accuracy": (0.9834, 0.9794),
    "trace": (1.01, 6.62),
}


def _number(column: str, wanted: str) -> Statement:
    small, large = PAPER[column]
    return Statement(
        column.replace("_", "-"),
        f"Table 1, {column.replace('_', ' ')}: {wanted}",
        f"{small:g} (batch 256), {large:g} (batch 4096)",
        "both numbers lie within a factor of 2 of the paper's and are in its order",
        "they are in the paper's order",
    )


def _accuracy(column: str, wanted: str) -> Statement:
    small, large = PAPER[column]
    return Statement(
        column.replace("_", "-"),
        f"Table 1, {column.replace('_', ' ')}: {wanted}",
        f"{small:g} (batch 256), {large:g} (batch 4096)",
        "both numbers lie within 0.003 of the paper's and are in its order",
        "they are in the paper's order",
    )


TABLE = {
    "train_loss": _number("train_loss", "comparable, that of the small batch lower"),
    "test_loss": _number("test_loss", "lower for the small batch"),
    "train_accuracy": _accuracy("train_accuracy", "the same"),
    "test_accuracy": _accuracy("test_accuracy", "higher for the small batch"),
    "trace": _number("trace", "the small batch is in a flatter place"),
}
FOLLOWS = Statement(
    "margin-trace",
    "the output margin and the trace of a point are strongly related",
    "a strong relationship for both batch sizes (Fig. 4a, 4b)",
    "Spearman's coefficient is at most −0.8 for both",
    "it is at most −0.5 for both",
)
SKEWNESS = Statement(
    "skewness",
    "the margins of the small batch are more left-skewed",
    "more left-skewed (Fig. 4c)",
    "the skewness is lower for the small batch by more than two standard errors",
    "it is lower",
)
MINIMUM = Statement(
    "minimum",
    "the small batch has the smallest margin",
    "the smallest margin (Fig. 4c)",
    "its smallest margin is the smaller one, both among the drawn points and among all training points",
    "it is for one of the two",
)
_CLOSES = (
    "at least half of both gaps to the small batch, in log trace and in test accuracy, close",
    "at least half of one of the two gaps closes",
)
TIME = Statement(
    "time",
    "the large batch had not enough time: trained on to the training loss of the small one, it catches up",
    "expected to (Section 4.2)",
    *_CLOSES,
)
RATE = Statement(
    "rate",
    "the large batch had not enough time: with a learning rate as many times higher as the batch, it catches up",
    "a smaller batch is similar to a higher learning rate (Section 4.2)",
    *_CLOSES,
)
BASIN = Statement(
    "basin",
    "both solutions lie in the same basin",
    "the same basin (Section 4, after Sagun et al. and others)",
    "the barrier on the straight line between them is below 0.05, so that the line is fitted throughout; of the two "
    "treatments of batch norm, running statistics interpolated or taken from the batch, the lower barrier counts",
    "it is below half the loss of guessing",
)


@dataclass(frozen=True, kw_only=True)
class BatchSize(Config):
    """Two batch sizes, equally many steps, and two ways to give the large one more time."""

    data: str = "mnist"
    """The data set."""
    train_size: int | None = None
    """Train on so many points only."""
    width: float = 1.0
    """Factor on the 512 units of every hidden layer."""
    pixels: str = "unit"
    """unit: in [0, 1]; standard: standardised."""
    small: int = 256
    """The small batch."""
    large: int = 4096
    """The large batch."""
    lr: float = 0.1
    """The learning rate of both."""
    steps: int = 10_000
    """Updates of both."""
    checkpoints: int = 21
    """Evaluations from step 0 to the last one."""
    most: int = 30_000
    """Updates after which the large batch is stopped even if its loss is still above that of the small one."""
    points: int = 1_000
    """Training points in the charts, drawn at random. The numbers are those of all training points."""


def job(config: BatchSize, batch_size: int, factor: float = 1.0) -> Job:
    """The training of one row: plain SGD. That of Table 1 is the same as in the study of correlations."""
    from spiritlevel.training import Job, Recipe

    every = max(1, config.steps // (config.checkpoints - 1))
    return Job(
        network="fcn_bn",
        options={"width": config.width} if config.width != 1.0 else {},
        data=config.data,
        train_size=config.train_size,
        pixels=config.pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(lr=config.lr * factor, batch_size=batch_size, steps=config.steps),
        seed=config.seed,
        keep=tuple(range(0, config.steps + 1, every)) if factor == 1.0 else (),
        evaluate=("train", "test"),
        evaluate_every=every,
    )


def measure(model: nn.Module, train: Pair, test: Pair, chosen: Any, steps: int) -> dict[str, Any]:
    """A row of Table 1, the distribution of the margins, and margin and trace of the chosen points."""
    import numpy as np

    from spiritlevel.margins import margins
    from spiritlevel.per_sample import sample_traces
    from spiritlevel.stats import skewness
    from spiritlevel.training import evaluate

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
        "median": float(found.median()),
        "minimum_drawn": float(found[chosen].min()),
        "skewness_drawn": skewness(found[chosen]),
        "margins": found[chosen],
        "traces": traces[chosen],
    }


def trained_on(config: BatchSize, run: Run, start: Any, goal: float) -> tuple[Any, int]:
    """The large batch trained on from `start` until its training loss is at most `goal`; the network and its steps.

    SGD without momentum has no state but the weights, so this is the same training with another order of the data.
    """
    from spiritlevel.training import Recipe, fit

    model = start.model()
    rest = config.most - config.steps
    recipe = Recipe(lr=config.lr, batch_size=config.large, steps=rest, until_loss=goal)
    root = run.cache or storage.cache_folder() / "networks"
    history = fit(
        model,
        start.train,
        recipe,
        seed=config.seed + 1,
        evaluate={"train": start.train},
        evaluate_every=max(1, config.steps // 100),
        checkpoint=root / f"{start.folder.name}-on-{storage.digest(recipe, 8)}",
        progress=run.progress,
        label=f"batch {config.large:,}, trained on",
    )
    return model, config.steps + history.step


def barriers(one: nn.Module, other: nn.Module, train: Pair, chosen: Any) -> dict[str, Any]:
    """The loss on the straight line between two networks, both ways to treat batch norm on it."""
    from spiritlevel.landscape import landscape

    pair = train[0][chosen], train[1][chosen]
    found: dict[str, Any] = {}
    for mode in ("eval", "batch"):
        path = landscape(one, pair, directions=other, points=21, batch_norm=mode, batch_size=min(1000, len(pair[1])))
        found[mode] = {"barrier": path.barrier, "steps": path.steps[0], "losses": path.losses}
    return found


def run(config: BatchSize, run: Run) -> Iterator[Ruling]:
    """Train both, measure, give the large batch more time in two ways, and walk from one solution to the other."""
    import torch

    small, large = run.train(job(config, config.small)), run.train(job(config, config.large))
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(small.train[1]), generator=generator)
    chosen = order[: config.points]
    measured = partial(measure, train=small.train, test=small.test, chosen=chosen)
    names = {"small": f"batch {config.small:,}", "large": f"batch {config.large:,}"}
    names |= {
        "longer": f"batch {config.large:,}, trained on",
        "faster": f"batch {config.large:,}, lr × {_factor(config):g}",
    }
    found = {
        "small": run.once("small", lambda: measured(small.model(), steps=config.steps)),
        "large": run.once("large", lambda: measured(large.model(), steps=config.steps)),
    }
    goal = found["small"]["train_loss"]

    def longer() -> dict[str, Any]:
        if found["large"]["train_loss"] <= goal:
            return found["large"]
        model, steps = trained_on(config, run, large, goal)
        return measured(model, steps=steps)

    def faster() -> dict[str, Any]:
        try:
            return measured(run.train(job(config, config.large, _factor(config))).model(), steps=config.steps)
        except InputError as error:
            if "diverged" not in str(error):
                raise
            return {"diverged": str(error)}

    found["longer"] = run.once("longer", longer)
    found["faster"] = run.once("faster", faster)
    path = run.once("path", lambda: barriers(small.model(), large.model(), small.train, order[:10_000]))
    lists = ("margins", "traces")
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
    yield from judge(found, path, classes=len(small.classes))


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


def judge(
    found: Mapping[str, Mapping[str, Any]], path: Mapping[str, Mapping[str, Any]], classes: int
) -> Iterator[Ruling]:
    """The verdicts, from the rows of `measure` and the barriers."""
    small, large = found["small"], found["large"]
    reasons = [not_fitted(row["train_accuracy"], row["train_loss"]) for row in (small, large)]
    unfitted = next(filter(None, reasons), "")
    for column, statement in TABLE.items():
        ours, paper = (small[column], large[column]), PAPER[column]
        if column == "train_accuracy":
            ordered = abs(ours[0] - ours[1]) < 5e-4
        else:
            ordered = (ours[0] < ours[1]) == (paper[0] < paper[1]) and ours[0] != ours[1]
        if column.endswith("accuracy"):
            near = all(abs(a - b) <= 0.003 for a, b in zip(ours, paper, strict=True))
        else:
            near = all(a > 0 and 0.5 <= a / b <= 2 for a, b in zip(ours, paper, strict=True))
        text = f"{ours[0]:.4g} and {ours[1]:.4g}"
        yield statement.judge(text, reproduced=near and ordered, direction=ordered, undecided=unfitted)
    yield follows(small, large, unfitted)
    difference = small["skewness"] - large["skewness"]
    error = math.hypot(small["skewness_error"], large["skewness_error"])
    yield SKEWNESS.judge(
        difference,
        reproduced=difference < -2 * error,
        direction=difference < 0,
        undecided=unfitted,
        low=difference - 2 * error,
        high=difference + 2 * error,
        remark=f"{small['skewness']:.3f} (small) and {large['skewness']:.3f} (large).",
    )
    lower = [small[key] < large[key] for key in ("minimum_drawn", "minimum")]
    yield MINIMUM.judge(
        f"{small['minimum']:.3g} and {large['minimum']:.3g}",
        reproduced=all(lower),
        direction=any(lower),
        undecided=unfitted,
        remark=f"Among the drawn points {small['minimum_drawn']:.3g} and {large['minimum_drawn']:.3g}.",
    )
    yield catches_up(TIME, small, large, found["longer"], unfitted, same_loss=True)
    yield catches_up(RATE, small, large, found["faster"], unfitted)
    mode, line = min(path.items(), key=lambda item: item[1]["barrier"])
    other = ", ".join(f"{name}: {way['barrier']:.3g}" for name, way in path.items() if name != mode)
    yield BASIN.judge(
        line["barrier"],
        reproduced=line["barrier"] < 0.05,
        direction=line["barrier"] < math.log(classes) / 2,
        undecided=unfitted,
        remark=f"Batch norm in mode {mode}; {other}. A curved path may be lower.",
    )


def follows(small: Mapping[str, Any], large: Mapping[str, Any], unfitted: str) -> Ruling:
    """The verdict on margin against trace."""
    from spiritlevel.stats import correlate

    ranks = [correlate(row["margins"], row["traces"], outliers="none", resamples=100) for row in (small, large)]
    worst = max(rank.spearman for rank in ranks)
    linear = " and ".join(f"{rank.r:.2f}" for rank in ranks)
    remark = f"The higher of the two; Pearson's r is {linear} (small, large)."
    return FOLLOWS.judge(worst, reproduced=worst <= -0.8, direction=worst <= -0.5, undecided=unfitted, remark=remark)


def catches_up(
    statement: Statement,
    small: Mapping[str, Any],
    large: Mapping[str, Any],
    later: Mapping[str, Any],
    undecided: str,
    *,
    same_loss: bool = False,
) -> Ruling:
    """Whether more time closes the gaps in log trace and in test accuracy by half or more."""
    if "diverged" in later:
        return statement.judge(None, reproduced=False, undecided=later["diverged"].rstrip("."))
    if same_loss and later["train_loss"] > small["train_loss"]:
        undecided = undecided or f"the loss of the small batch was not reached in {later['steps']:,} steps"
    gaps = (math.log(large["trace"] / small["trace"]), small["test_accuracy"] - large["test_accuracy"])
    if min(gaps) <= 0:
        undecided = undecided or "there is no gap to close"
    left = (math.log(later["trace"] / small["trace"]), small["test_accuracy"] - later["test_accuracy"])
    closed = [after <= before / 2 for before, after in zip(gaps, left, strict=True)]
    remark = (
        f"After {later['steps']:,} steps trace {later['trace']:.3g}, test accuracy {later['test_accuracy']:.4f}, "
        f"training loss {later['train_loss']:.2g}; small batch {small['trace']:.3g}, {small['test_accuracy']:.4f}, "
        f"{small['train_loss']:.2g}; large batch {large['trace']:.3g}, {large['test_accuracy']:.4f}, "
        f"{large['train_loss']:.2g}."
    )
    return statement.judge(
        later["trace"] / small["trace"],
        reproduced=all(closed),
        direction=any(closed),
        undecided=undecided,
        remark=remark,
    )


STUDY = Study(
    name="batch-size",
    title="A small and a large batch: losses, traces, margins, and the way between them",
    source="A, Table 1 and Fig. 4",
    config=BatchSize,
    statements=(*TABLE.values(), FOLLOWS, SKEWNESS, MINIMUM, TIME, RATE, BASIN),
    run=run,
    scales={
        "smoke": {
            "data": "fashion-mini",
            "train_size": 256,
            "width": 0.05,
            "small": 32,
            "large": 256,
            "steps": 30,
            "checkpoints": 3,
            "most": 60,
            "points": 100,
        },
        "laptop": {"train_size": 5_000, "small": 64, "large": 1024, "width": 0.5, "steps": 2_000, "most": 6_000},
    },
)
