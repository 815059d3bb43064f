"""Paper A, Fig. 2: the trace of an affine classifier against its closed form, exactly and by PyHessian's rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

EXACT = Statement(
    "exact",
    "the trace of an affine classifier is ACEHT, point by point",
    "equal (Prop. 3.1)",
    "r and slope of the exact traces are 1 to 1e-6, whichever parameters are chosen",
    "one of them is not",
    Range(high=1e-6),
    kind="identity",
)
PYHESSIAN = Statement(
    "pyhessian",
    "the trace as estimated by PyHessian correlates with ACEHT, but not perfectly",
    "r = 0.97 (Fig. 2)",
    "r lies between 0.95 and 0.99 for the nearer of the two choices of parameters, which the paper leaves open",
    "it lies below or above",
    Range(0.95, 0.99),
    trained=False,
    limits=(-1, 1),
)
NOISE = Statement(
    "noise",
    "the errors of the estimate are more pronounced the higher the trace is",
    "more pronounced at high traces (Section 3.2)",
    "Spearman's coefficient between |estimate − ACEHT| and ACEHT is positive for both choices of parameters",
    "it is negative for one of them",
    Range.POSITIVE,
    trained=False,
    limits=(-1, 1),
)
CHOICES = {
    "default": "PyTorch's initialisation, U(±1/√d)",
    "normal": "independent N(0, 1)",
}


@dataclass(frozen=True, kw_only=True)
class Affine(Config):
    """Which points the affine classifier sees."""

    data: str = "mnist"
    """The data set."""
    points: int = 1_000
    """Training points, drawn at random."""
    pixels: str = "unit"
    """unit: in [0, 1]; standard: standardised."""


def measure(config: Affine, choice: str) -> dict[str, Any]:
    """ACEHT, exact and PyHessian's traces of the points for one choice of the parameters."""
    import torch

    from spiritlevel.binding.losses import aceht
    from spiritlevel.papers.training import Job, Recipe, parts
    from spiritlevel.samples.traces import sample_traces

    job = Job(
        network="softmax_regression",
        data=config.data,
        train_size=config.points,
        pixels=config.pixels,  # type: ignore[arg-type]  # checked there
        recipe=Recipe(steps=0),
        split_seed=config.seed,
    )
    found = parts(job)
    inputs, targets = found.train
    generator = torch.Generator().manual_seed(config.seed)
    size = inputs[0].numel()
    layer = torch.nn.Linear(size, len(found.classes), device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            if choice == "normal":
                parameter.normal_(generator=generator)
            else:
                parameter.uniform_(-(size**-0.5), size**-0.5, generator=generator)
    model = torch.nn.Sequential(torch.nn.Flatten(), layer)
    ours = sample_traces(model, (inputs, targets), method="exact")
    theirs = sample_traces(model, (inputs, targets), method="pyhessian", batch_size=len(targets), seed=config.seed)
    with torch.no_grad():
        logits = model(inputs)
    return {
        "ACEHT": aceht(inputs, logits),
        "trace": ours.values,
        "trace by PyHessian": theirs.values,
        "probes": theirs.probes,
    }


def run(config: Affine, run: Run) -> None:
    """Measure both choices of parameters both ways."""
    import polars

    from spiritlevel import charts
    from spiritlevel.statistics.correlation import correlate

    points: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    panels: list[list[Any]] = []
    for choice, meaning in CHOICES.items():
        found = run.once(choice, partial(measure, config, choice))
        points += [
            {"parameters": choice, **dict(zip(found, row, strict=True))} for row in zip(*found.values(), strict=True)
        ]
        panels.append([])
        for way in ("trace", "trace by PyHessian"):
            r = correlate(found["ACEHT"], found[way], outliers="none", seed=config.seed)
            errors = [abs(b - a) for a, b in zip(found["ACEHT"], found[way], strict=True)]
            noise = correlate(found["ACEHT"], errors, outliers="none", resamples=100).spearman
            rows.append(
                {
                    "parameters": choice,
                    "way": way,
                    "r": r.r,
                    "low": r.low,
                    "high": r.high,
                    "slope": r.slope,
                    "intercept": r.intercept,
                    "error against ACEHT (Spearman)": noise,
                    "largest relative error": max(e / a for e, a in zip(errors, found["ACEHT"], strict=True) if a > 0),
                }
            )
            panels[-1].append(
                charts.scatter(
                    polars.DataFrame({"ACEHT": found["ACEHT"], way: found[way]}),
                    "ACEHT",
                    way,
                    fit=(r.slope, r.intercept),
                    title=f"{meaning}: r = {r.r:.4f}",
                )
            )
    run.table("points", points)
    run.table("correlations", rows)
    title = f"An affine classifier on {config.points:,} points: trace against ACEHT, exact and by PyHessian's rule"
    run.chart("affine", charts.panels(panels, title=title, width=360, height=240))


def judge(rows: list[dict[str, Any]]) -> Iterator[Ruling]:
    """The verdicts, from the correlations of both choices and both ways."""
    ours = [row for row in rows if row["way"] == "trace"]
    theirs = [row for row in rows if row["way"] != "trace"]
    error = max(row["largest relative error"] for row in ours)
    off = max(abs(row[key] - 1) for row in ours for key in ("r", "slope"))
    yield EXACT.judge(off, remark=f"The largest deviation from 1. Largest relative error of a point {error:.1e}.")
    nearest = min(theirs, key=lambda row: abs(row["r"] - 0.97))
    others = "; ".join(f"{CHOICES[row['parameters']]}: {row['r']:.3f}" for row in theirs)
    yield PYHESSIAN.judge(
        nearest["r"],
        remark=f"{others}. The one nearer to the paper's is judged; over the points of this run its interval is "
        f"[{nearest['low']:.3f}, {nearest['high']:.3f}].",
    )
    least = min(row["error against ACEHT (Spearman)"] for row in theirs)
    yield NOISE.judge(least)


STUDY = Study(
    name="affine",
    title="An affine classifier: the trace against its closed form",
    source="A, Fig. 2",
    config=Affine,
    statements=(EXACT, PYHESSIAN, NOISE),
    run=run,
    judge=lambda config, tables: judge(tables("correlations")),
    scales={"smoke": {"data": "fashion-mini", "points": 60}},
)
