"""Paper C, section 2: the exponential loss of a deep linear network, small where its Hessian is flat, or is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import Tensor

MEASURES = ("trace", "λ₁", "‖H‖_F")
RAYS = Statement(
    "rays",
    "smaller losses imply flatter Hessians, here along rays w → tw",
    "all three go to zero with the loss (section 2)",
    "at the end of every ray trace, λ₁ and ‖H‖_F are below 1e-6 of their largest values",
    "one of them is not",
    Range(high=1e-6),
    kind="identity",
)
ONE_VALUE = Statement(
    "one eigenvalue",
    "the trace is the largest eigenvalue (Eq. 4)",
    "Tr H = λ₁",
    "λ₁/Tr H is 1 to 1e-9 at the end of every ray",
    "it is not",
    Range(1 - 1e-9, 1 + 1e-9),
    kind="identity",
)
IN_GENERAL = Statement(
    "in general",
    "smaller losses imply flatter Hessians, on any path",
    "implied by section 2 and Theorem 1",
    "along w = (e^t, −te^{−t}, 1) with X = 1, where the loss falls, all three measures fall",
    "one of them rises",
    Range(high=1.0),
    kind="identity",
)
DESCENT = Statement(
    "descent",
    "gradient descent without L2 drives the loss, and with it the Hessian, to zero",
    "overfitting gives flat minima (sections 2, 6)",
    "trace, λ₁ and ‖H‖_F all fall from the step of largest λ₁ to the end",
    "one of them rises",
    Range.FALLS,
    trained=False,
)
DECAY = Statement(
    "L2",
    "L2 keeps the weights small, and the solution sharper",
    "L2 increases sharpness (section 4)",
    "at the end of descent with L2 trace, λ₁ and ‖H‖_F are all larger than without, the weights smaller",
    "one of the three is smaller, or the weights are larger",
    {"trace, λ₁, ‖H‖_F": Range.RISES, "‖w‖": Range.FALLS},
    trained=False,
)


@dataclass(frozen=True, kw_only=True)
class DeepLinear(Config):
    """The loss exp(w₁w₂w₃X) of three scalar weights, and how far it is followed."""

    farthest: float = 4.0
    """The end of the rays."""
    path_end: float = 20.0
    """The end of the counterexample's path."""
    steps: int = 20_000
    """Steps of gradient descent."""
    lr: float = 0.05
    """The learning rate of gradient descent."""
    gamma: float = 5e-4
    """γ, the strength of the L2 term γ‖w‖²/2."""


def loss(w: Tensor, x: float) -> Tensor:
    """exp(w₁w₂w₃X): small where the product has the sign opposite to X."""
    return (w.prod() * x).exp()


def measure(w: Tensor, x: float) -> dict[str, float]:
    """Loss, weight norm, and trace, λ₁ and Frobenius norm of the Hessian, by autodiff in float64."""
    import torch

    hessian = torch.func.jacrev(torch.func.grad(partial(loss, x=x)))(w)
    values = torch.linalg.eigvalsh(hessian)
    return {
        "loss": float(loss(w, x)),
        "‖w‖": float(w.norm()),
        "trace": float(values.sum()),
        "λ₁": float(values[-1]),
        "‖H‖_F": float(values.norm()),
    }


def run(config: DeepLinear, run: Run) -> Iterator[Ruling]:
    """Rays, the counterexample, and gradient descent with and without L2."""
    yield from along_rays(config, run)
    yield from along_counterexample(config, run)
    yield from down_the_gradient(config, run)


def _curves(run: Run, name: str, rows: Sequence[dict[str, Any]], x: str, title: str, *, log_x: bool = False) -> None:
    """Loss and curvature along a path, as a table and as a chart."""
    from spiritlevel import charts

    run.table(name, rows)
    measured = ("loss", *MEASURES)
    long = [{x: row[x], "value": row[what], "measure": what} for row in rows for what in measured if row[what] > 0]
    frame = run.table(f"{name} curves", long)
    chart = charts.lines(frame, x, "value", series="measure", log_x=log_x, log_y=True, title=title)
    run.chart(name.replace(" ", "-"), chart)


def along_rays(config: DeepLinear, run: Run) -> Iterator[Ruling]:
    """Three rays on which the loss falls to 0."""
    import torch

    starts = {"(1, 1, 1)": (1.0, 1.0, 1.0), "(1, 2, 0.5)": (1.0, 2.0, 0.5), "(−1, −1, 2)": (-1.0, -1.0, 2.0)}
    times = torch.linspace(0.25, config.farthest, 61, dtype=torch.float64)
    rays = {
        name: [{"t": float(t), **measure(t * torch.tensor(start, dtype=torch.float64), -1.0)} for t in times]
        for name, start in starts.items()
    }
    _curves(run, "ray", rays["(1, 1, 1)"], "t", "Along the ray t·(1, 1, 1), X = −1")
    run.table("rays", [{"ray": name, **row} for name, rows in rays.items() for row in rows])
    shrunk = max(rows[-1][what] / max(row[what] for row in rows) for rows in rays.values() for what in MEASURES)
    yield RAYS.judge(shrunk, remark="The largest share that is left.")
    shares = {name: [row["λ₁"] / row["trace"] for row in rows] for name, rows in rays.items()}
    ends = [values[-1] for values in shares.values()]
    rising = all(values[-1] > values[len(values) // 2] for values in shares.values())
    yield ONE_VALUE.judge(
        max(ends, key=lambda share: abs(share - 1)),
        remark="The λ₁/Tr H at a ray's end that is furthest from 1."
        + (" It rises towards 1 along every ray." if rising else ""),
    )


def along_counterexample(config: DeepLinear, run: Run) -> Iterator[Ruling]:
    """A path on which the loss vanishes and the Hessian explodes."""
    import torch

    path = []
    for t in torch.linspace(0.5, config.path_end, 61, dtype=torch.float64).tolist():
        w = torch.tensor([math.exp(t), -t * math.exp(-t), 1.0], dtype=torch.float64)
        path.append({"t": t, **measure(w, 1.0)})
    _curves(run, "counterexample", path, "t", "Along w = (e^t, −te^{−t}, 1): the loss vanishes, the Hessian explodes")
    last = path[-1]
    yield IN_GENERAL.judge(
        max(last[what] / path[0][what] for what in MEASURES),
        remark=f"The largest growth; at the end the loss is {last['loss']:.2g} and λ₁ = {last['λ₁']:.2g}.",
    )


def down_the_gradient(config: DeepLinear, run: Run) -> Iterator[Ruling]:
    """Gradient descent, with and without L2."""
    found = {
        "without L2": run.once("descent", lambda: descend(config, 0.0)),
        "with L2": run.once("descent-l2", lambda: descend(config, config.gamma)),
    }
    for name, rows in found.items():
        shown = [row for row in rows if row["step"] > 0]
        _curves(run, f"descent {name}", shown, "step", f"Gradient descent {name}", log_x=True)
    free, kept = found["without L2"], found["with L2"]
    top = max(range(len(free)), key=lambda k: free[k]["λ₁"])
    left = {what: free[-1][what] / free[top][what] for what in MEASURES}
    yield DESCENT.judge(
        max(left.values()),
        remark=f"Share left of the peak; the loss ends at {free[-1]['loss']:.2g}.",
    )
    ratios = {what: kept[-1][what] / free[-1][what] for what in (*MEASURES, "‖w‖")}
    yield DECAY.judge(
        {"trace, λ₁, ‖H‖_F": min(ratios[what] for what in MEASURES), "‖w‖": ratios["‖w‖"]},
        remark=f"With / without L2, the smallest of the three; λ₁ × {ratios['λ₁']:.3g}.",
    )


def descend(config: DeepLinear, gamma: float) -> list[dict[str, float]]:
    """Gradient descent on exp(−w₁w₂w₃) + γ‖w‖²/2 from near (1, 1, 1), measured at about 60 steps."""
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    w = 1 + 0.1 * torch.randn(3, dtype=torch.float64, generator=generator)
    shown = sorted({0, *(round(config.steps ** (k / 60)) for k in range(61))})
    rows = []
    for step in range(config.steps + 1):
        if step in shown:
            rows.append({"step": step, **measure(w, -1.0)})
        product = w.prod()
        w = w - config.lr * (-(product / w) * torch.exp(-product) + gamma * w)
    return rows


STUDY = Study(
    name="deep-linear",
    title="A deep linear network: small loss and flat Hessian, on some paths",
    source="C, section 2",
    config=DeepLinear,
    statements=(RAYS, ONE_VALUE, IN_GENERAL, DESCENT, DECAY),
    run=run,
    scales={"smoke": {"steps": 500}},
    seeds={},
    revision=2,
)
