"""Paper A, Section 3.2.1: what the flatness of a whole data set costs, and what its margins cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.errors import unknown_name
from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.recipes import paper_a
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import nn

    from spiritlevel.papers.training import Job, Pair

SINGLE = Statement(
    "as-published",
    "per-sample traces by PyHessian's method, one point at a time, cost far more than margins",
    "1.5 hours against 5 seconds: 1080",
    "the ratio lies within a factor of 3 of 1080",
    "it lies below 360 or above 3240",
    Range(360, 3240, ratio=True),
    trained=False,
)
BATCHED = Statement(
    "batched",
    "the same estimates cost far more than margins even if all points of a batch share a probe",
    "1080 (one point at a time)",
    "the ratio is above 360",
    "it is below",
    Range(low=360, ratio=True),
    trained=False,
)
EXACT = Statement(
    "exact",
    "exact per-sample traces cost far more than margins",
    "1080 (estimated traces)",
    "the ratio is above 360",
    "it is below",
    Range(low=360, ratio=True),
    trained=False,
)
NETWORKS = {"lenet": "lenet5", "fcn": "fcn_bn"}


@dataclass(frozen=True, kw_only=True)
class Cost(Config):
    """Which network, and on how many points the slow methods are timed."""

    network: str = "lenet"
    """lenet or fcn (three hidden layers with batch norm)."""
    data: str = "mnist"
    """The data set; margins and exact traces are timed on all of its training points."""
    train_size: int | None = None
    """Use this many points only."""
    width: float = 1.0
    """Factor on the units of every hidden layer."""
    steps: int = 10_000
    """Updates of the training, batches of 256."""
    checkpoints: int = 21
    """Evaluations from step 0 to the last one."""
    batched: int = 4_000
    """Points on which PyHessian's rule is timed in batches."""
    singly: int = 60
    """Points on which it is timed one by one, as the package is normally used."""
    repeats: int = 3
    """Timings of the margins, of which the median is taken."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network not in NETWORKS:
            raise unknown_name("network", self.network, NETWORKS)


def job(config: Cost) -> Job:
    """The training, as in the study of correlations."""
    return paper_a(
        NETWORKS[config.network],
        config.data,
        steps=config.steps,
        checkpoints=config.checkpoints,
        width=config.width,
        train_size=config.train_size,
        seed=config.seed,
    )


def timed(compute: Callable[[], Any], points: int) -> dict[str, float]:
    """CPU seconds (all threads) and wall-clock seconds; other work on the machine disturbs only the latter."""
    clock, processor = time.perf_counter(), time.process_time()
    compute()
    return {"points": points, "CPU seconds": time.process_time() - processor, "seconds": time.perf_counter() - clock}


def one_by_one(model: nn.Module, pair: Pair, seed: int, most: int = 100, tolerance: float = 1e-3) -> list[float]:
    """Each point's trace as PyHessian computes it: double backward, random signs, its stopping rule."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    values = []
    for x, y in zip(*pair, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), parameters, create_graph=True)
        total = mean = 0.0
        for count in range(1, most + 1):
            signs = [torch.randint(0, 2, p.shape, generator=generator).to(p.dtype) * 2 - 1 for p in parameters]
            # a network that is affine up to ReLU has parameters without second derivatives at a point: None, not zero
            products = torch.autograd.grad(gradients, parameters, signs, retain_graph=True, allow_unused=True)
            total += sum(float((s * h).sum()) for s, h in zip(signs, products, strict=True) if h is not None)
            previous, mean = mean, total / count
            if abs(mean - previous) / (previous + 1e-6) < tolerance:
                break
        values.append(mean)
    return values


def run(config: Cost, run: Run) -> Iterator[Ruling]:
    """Time margins, exact traces, and PyHessian's rule in batches and point by point."""
    from spiritlevel import charts
    from spiritlevel.samples.margins import margins
    from spiritlevel.samples.traces import sample_traces

    trained = run.train(job(config))
    model, train = trained.model(), trained.train
    count = len(train[1])

    def first(points: int) -> Pair:
        return train[0][:points], train[1][:points]

    margins(model, first(100))  # what is done only once, such as imports, is not timed
    sample_traces(model, first(100), method="exact")
    ways = {
        "margins": (count, partial(margins, model, train)),
        "exact traces": (count, partial(sample_traces, model, train, method="exact")),
        "PyHessian's rule, in batches": (
            min(count, config.batched),
            partial(sample_traces, model, first(config.batched), method="pyhessian", batch_size=1000, seed=config.seed),
        ),
        "PyHessian's rule, one by one": (
            min(count, config.singly),
            partial(one_by_one, model, first(config.singly), config.seed),
        ),
    }
    rows: list[dict[str, Any]] = []
    for number, (way, (points, compute)) in enumerate(ways.items()):
        run.progress(f"timing {way}", number, len(ways))
        repeats = config.repeats if way == "margins" else 1
        times = run.once(way, lambda c=compute, p=points, r=repeats: [timed(c, p) for _ in range(r)])  # type: ignore[misc]
        row = {key: statistics.median(entry[key] for entry in times) for key in times[0]}
        whole = row["CPU seconds"] * count / row["points"]
        rows.append({"way": way, **row, "CPU seconds for all points": whole})
    for row in rows:
        row["ratio to margins"] = row["CPU seconds for all points"] / rows[0]["CPU seconds for all points"]
    run.table("cost", rows)
    run.report(points=count, network=config.network)
    columns = {key: [row[key] for row in rows] for key in ("way", "ratio to margins")}
    title = f"Cost of {count:,} points in units of their margins (paper: 1080)"
    run.chart("cost", charts.bars(columns, "way", "ratio to margins", title=title))
    yield from judge({row["way"]: row for row in rows})


def judge(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Ruling]:
    """The verdicts, from the rows of the table."""

    def remark(row: Mapping[str, Any]) -> str:
        text = (
            f"{row['CPU seconds for all points']:.3g} CPU seconds against {margins['CPU seconds for all points']:.3g}"
        )
        return f"{text}, from {row['points']:,.0f} points."

    margins, single = rows["margins"], rows["PyHessian's rule, one by one"]
    ratio = single["ratio to margins"]
    yield SINGLE.judge(ratio, remark=remark(single))
    batched = rows["PyHessian's rule, in batches"]
    ratio = batched["ratio to margins"]
    yield BATCHED.judge(ratio, remark=remark(batched))
    exact = rows["exact traces"]
    ratio = exact["ratio to margins"]
    yield EXACT.judge(ratio, remark=remark(exact))


STUDY = Study(
    name="cost",
    title="What the flatness of all of MNIST costs, and what its margins cost",
    source="A, Section 3.2.1",
    config=Cost,
    statements=(SINGLE, BATCHED, EXACT),
    run=run,
    scales={
        "smoke": {
            "network": "lenet",
            "data": "fashion-mini",
            "train_size": 200,
            "width": 0.25,
            "steps": 4,
            "checkpoints": 2,
            "batched": 20,
            "singly": 2,
        },
        "laptop": {"train_size": 5_000, "steps": 1_000, "checkpoints": 11, "batched": 500, "singly": 30},
    },
    sweep={"network": tuple(NETWORKS)},
    seeds={},
)
