"""Paper A, Fig. 3 and App. B: per-sample traces against ACEHT and the margin bound while a network is trained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from spiritlevel.data import describe
from spiritlevel.errors import unknown_name
from spiritlevel.papers.studies.base import Config, Run, Study, Tables, reduced
from spiritlevel.papers.studies.recipes import paper_a
from spiritlevel.papers.studies.rules import Range, Ruling, Statement, least_accuracy

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained

ENOUGH = 30  # misclassified points that a checkpoint needs for a meaningful correlation among them

ONE_CHECKPOINT = "So this rests on a single checkpoint."


class Setting(NamedTuple):
    """One of the networks of Fig. 3 and App. B; the learning rate is that of its kind."""

    network: str
    data: str
    batch_size: int = 256
    grey: bool = False
    activation: str = "relu"


SETTINGS = {
    "lenet-mnist": Setting("lenet5", "mnist"),
    "lenet-tanh-mnist": Setting("lenet5", "mnist", activation="tanh"),
    "fcn-mnist": Setting("fcn_bn", "mnist"),
    "fcn-mnist-4096": Setting("fcn_bn", "mnist", batch_size=4096),
    "lenet-cifar10": Setting("lenet5", "cifar10"),
    "fcn-cifar10-grey": Setting("fcn_bn", "cifar10", grey=True),
    "fcn-cifar10": Setting("fcn_bn", "cifar10"),
}


SWEEP = {"lr": (0.02, 0.1), "batch_size": (64, 1024)}
"""Hyper-parameters other than the paper's, for its statement that the results hold for different ones."""


def _level(name: str, quantity: str, way: str, figure: str) -> Statement:
    return Statement(
        name,
        f"for most of training r(trace, {quantity}) of the correctly classified points lies between 0.8 and 1 ({way})",
        f"0.8 to 1 ({figure})",
        "the median r over the checkpoints is above 0.8",
        "it is below",
        Range(low=0.8),
        limits=(-1, 1),
    )


def _rises(name: str, way: str) -> Statement:
    return Statement(
        name,
        f"r(trace, ACEHT) of the correctly classified points rises with the training accuracy ({way})",
        "rises (Fig. 3a, 3c)",
        "Kendall's τ between r and the training accuracy over the checkpoints, of which 5 are needed, is positive",
        "it is negative",
        Range.POSITIVE,
        limits=(-1, 1),
    )


def _incorrect(name: str, way: str) -> Statement:
    return Statement(
        name,
        f"r(trace, ACEHT) of the incorrectly classified points shows no correlation ({way})",
        "no correlation (Fig. 3a)",
        f"the median of r over the checkpoints of a trained network (five times as good as chance) with at least "
        f"{ENOUGH} such points is below 0.3 in size",
        "it is larger in size",
        Range(-0.3, 0.3),
        limits=(-1, 1),
    )


WAYS = {"ours": "our traces", "pyhessian": "PyHessian's rule"}
LEVEL = {
    ("ours", "aceht"): _level("level-aceht", "ACEHT", WAYS["ours"], "Fig. 3a"),
    ("pyhessian", "aceht"): _level("level-aceht-pyhessian", "ACEHT", WAYS["pyhessian"], "Fig. 3a"),
    ("ours", "bound"): _level("level-bound", "margin bound", WAYS["ours"], "Fig. 3b"),
    ("pyhessian", "bound"): _level("level-bound-pyhessian", "margin bound", WAYS["pyhessian"], "Fig. 3b"),
}
RISES = {"ours": _rises("rises", WAYS["ours"]), "pyhessian": _rises("rises-pyhessian", WAYS["pyhessian"])}
INCORRECT = {
    "ours": _incorrect("incorrect", WAYS["ours"]),
    "pyhessian": _incorrect("incorrect-pyhessian", WAYS["pyhessian"]),
}
QUANTITIES = {"aceht": "ACEHT", "bound": "margin bound", "printed_bound": "margin bound as printed"}


@dataclass(frozen=True, kw_only=True)
class Correlate(Config):
    """A network, how long it is trained, how often it is measured, and on how many points."""

    setting: str = "lenet-mnist"
    """One of the networks of Fig. 3 and App. B."""
    data: str | None = None
    """A data set other than the setting's."""
    train_size: int | None = None
    """Train on this many points only."""
    width: float = 1.0
    """Factor on the units of every hidden layer."""
    pixels: str = "unit"
    """unit: in [0, 1]; standard: standardised."""
    lr: float | None = None
    """The learning rate, if not the setting's: the paper says that its results hold for other hyper-parameters."""
    batch_size: int | None = None
    """Samples per update, if not the setting's."""
    steps: int = 10_000
    """Updates."""
    checkpoints: int = 21
    """Measurements from step 0 to the last one; odd, so that one lies in the middle."""
    points: int = 1_000
    """Training points measured, drawn at random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.setting not in SETTINGS:
            raise unknown_name("setting", self.setting, SETTINGS)


def job(config: Correlate) -> Job:
    """The training of a config."""
    setting = SETTINGS[config.setting]
    return paper_a(
        setting.network,
        config.data or setting.data,
        steps=config.steps,
        checkpoints=config.checkpoints,
        batch_size=config.batch_size or setting.batch_size,
        lr=config.lr,
        options={"activation": setting.activation} if setting.activation != "relu" else None,
        width=config.width,
        train_size=config.train_size,
        pixels=config.pixels,
        grey=setting.grey,
        seed=config.seed,
    )


def measure(trained: Trained, step: int, chosen: Any, *, ours: bool, seed: int) -> dict[str, Any]:
    """Traces of the chosen training points at a step: ours, with ACEHT and the bounds beside them, or PyHessian's."""
    import torch

    from spiritlevel.binding.losses import aceht
    from spiritlevel.samples.margins import margin_bound, printed_margin_bound, signed_margin
    from spiritlevel.samples.traces import sample_traces

    model = trained.model(step)
    inputs, targets = (part[chosen] for part in trained.train)
    if not ours:  # one batch: the probes are shared, and each is a product with all weights
        found = sample_traces(model, (inputs, targets), method="pyhessian", batch_size=len(targets), seed=seed)
        return {"trace": found.values, "probes": found.probes, "negative_stops": found.negative_stops}
    smooth = any(isinstance(module, torch.nn.Tanh) for module in model.modules())
    found = sample_traces(model, (inputs, targets), method="auto" if smooth else "exact", seed=seed)
    with torch.no_grad():
        logits = model(inputs)
    return {
        "trace": found.values,
        "method": found.method,
        "aceht": aceht(inputs, logits),
        "bound": margin_bound(inputs, logits, targets),
        "printed_bound": printed_margin_bound(inputs, logits, targets),
        "correct": signed_margin(logits, targets) > 0,
    }


def correlations(step: int, found: Mapping[str, Any], traces: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row for each kind of trace, quantity and group of points; in b = slope·a + intercept, b is the trace."""
    from spiritlevel.statistics.correlation import correlate

    rows = []
    for way, trace in traces.items():
        for quantity in QUANTITIES:
            for group in (True, False):
                mask = [correct is group for correct in found["correct"]]
                a, b = (
                    [value for value, in_it in zip(v, mask, strict=True) if in_it] for v in (found[quantity], trace)
                )
                r = correlate(a, b)
                row = {name: getattr(r, name) for name in ("r", "low", "high", "n", "removed", "r_all", "spearman")}
                line = {"slope": r.slope, "intercept": r.intercept, "reason": r.reason or ""}
                group_name = "correct" if group else "incorrect"
                rows.append({"step": step, "trace": way, "quantity": quantity, "points": group_name, **row, **line})
    return rows


def run(config: Correlate, run: Run) -> None:
    """Train, measure the same random points at every checkpoint, correlate."""
    import torch

    trained = run.train(job(config))
    chosen = torch.randperm(len(trained.train[1]), generator=torch.Generator().manual_seed(config.seed))
    chosen = chosen[: config.points]
    history = {int(row["step"]): row for row in trained.history}
    steps = list(trained.steps)
    shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    training: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        run.progress(f"measuring step {step:,} of {config.setting}", number, len(steps))
        measured = partial(measure, trained, step, chosen, seed=config.seed)
        ours = run.once(f"step-{step}", partial(measured, ours=True))
        theirs = run.once(f"step-{step}-pyhessian", partial(measured, ours=False))
        traces = {"ours": ours["trace"], "pyhessian": theirs["trace"]}
        rows += run.once(f"step-{step}-r", partial(correlations, step, ours, traces))
        training.append(
            {
                "step": step,
                "training accuracy": history[step]["train_accuracy"],
                "training loss": history[step]["train_loss"],
                "test accuracy": history[step]["test_accuracy"],
                "mean trace": statistics.fmean(ours["trace"]),
                "mean ACEHT": statistics.fmean(ours["aceht"]),
                "mean probes of PyHessian": statistics.fmean(theirs["probes"]),
                "stopped on a negative mean": theirs["negative_stops"],
            }
        )
        if step in shown:
            columns = {
                "ACEHT": ours["aceht"],
                "margin bound": ours["bound"],
                "margin bound as printed": ours["printed_bound"],
            }
            columns |= {"trace": ours["trace"], "trace by PyHessian": theirs["trace"], "correct": ours["correct"]}
            points += [
                {"step": step, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)
            ]
    run.table("correlations", rows)
    run.table("training", training)
    run.table("points", [brief(point) for point in points])
    run.report(traces=ours["method"], setting=config.setting, **training[-1])
    run.chart("correlation", figure(config.setting, rows, training, points))


def brief(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point of the chart with seven significant digits, which take half the space; correlations are taken before."""
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in point.items()}


def _rounded(value: float, bits: int = 24) -> float:
    if not math.isfinite(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def figure(
    setting: str,
    rows: Sequence[Mapping[str, Any]],
    training: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, Any]],
) -> Any:
    """Fig. 3: r over the steps for ACEHT and the bound, the accuracy; below, the points of three steps both ways."""
    import polars

    from spiritlevel import charts

    def over_steps(quantity: str) -> Any:
        lines = [
            {"step": row["step"], "r": row["r"], "points": f"{row['points']}, {WAYS[row['trace']]}"}
            for row in rows
            if row["quantity"] == quantity
        ]
        title = f"r(trace, {QUANTITIES[quantity]})"
        frame = polars.DataFrame(lines, schema={"step": polars.Int64, "r": polars.Float64, "points": polars.String})
        return charts.lines(frame, "step", "r", series="points", points=True, title=title)

    def at_step(step: int, trace: str, way: str) -> Any:
        here = [
            {"ACEHT": p["ACEHT"], trace: p[trace], "points": "correct" if p["correct"] else "incorrect"}
            for p in sorted(points, key=lambda p: not p["correct"])
            if p["step"] == step
        ]
        (row,) = (
            row
            for row in rows
            if (row["step"], row["trace"], row["quantity"], row["points"]) == (step, way, "aceht", "correct")
        )
        known = row["r"] is not None
        title = f"Step {step:,}: " + (f"r = {row['r']:.3f}" if known else "r undefined")
        fit = (row["slope"], row["intercept"]) if known else None
        return charts.scatter(polars.DataFrame(here), "ACEHT", trace, colour="points", fit=fit, title=title)

    steps = sorted({point["step"] for point in points})
    accuracy = charts.lines(
        polars.DataFrame(training), "step", "training accuracy", points=True, title="Training accuracy"
    )
    return charts.panels(
        [
            [over_steps("aceht"), over_steps("bound"), accuracy],
            [at_step(step, "trace", "ours") for step in steps],
            [at_step(step, "trace by PyHessian", "pyhessian") for step in steps],
        ],
        title=f"{setting}: per-sample traces, ACEHT and margins during training (fits: correct points, no outliers)",
    )


def from_tables(config: Correlate, tables: Tables) -> Iterator[Ruling]:
    """The rulings on a kept run."""
    training = tables("training")
    accuracy = {row["step"]: row["training accuracy"] for row in training}
    (listing,) = (row for row in describe() if row.name == (config.data or SETTINGS[config.setting].data))
    yield from judge(tables("correlations"), accuracy, training[-1]["test accuracy"], 1 / listing.classes)


def judge(
    rows: Sequence[Mapping[str, Any]], accuracy: Mapping[int, float], held_out: float, chance: float
) -> Iterator[Ruling]:
    """The rulings, from the rows of `correlations`, the training accuracy at each step and the last test accuracy."""
    from spiritlevel.statistics.correlation import kendall

    facts: dict[str, Any] = {"accuracy": held_out, "chance": chance}

    def series(way: str, quantity: str, points: str, least: int = 3) -> dict[int, float]:
        wanted = (way, quantity, points)
        found = [row for row in rows if (row["trace"], row["quantity"], row["points"]) == wanted]
        return {
            row["step"]: row["r"]
            for row in found
            if row["r"] is not None and math.isfinite(row["r"]) and row["n"] + row["removed"] >= least
        }

    for (way, quantity), statement in LEVEL.items():
        r = series(way, quantity, "correct")
        if not r:
            yield statement.judge(None, undecided="r is undefined at every checkpoint", **facts)
            continue
        middle, share = statistics.median(r.values()), sum(value >= 0.8 for value in r.values()) / len(r)
        remark = f"r is at least 0.8 at {share:.0%} of {len(r)} checkpoints, from {min(r.values()):.2f} to "
        remark = remark.replace("%", " %") + f"{max(r.values()):.2f}."
        if quantity == "bound" and (printed := series(way, "printed_bound", "correct")):
            remark += f" With the bound as printed the median is {statistics.median(printed.values()):.2f}."
        yield statement.judge(middle, remark=remark, **facts)
    for way, statement in RISES.items():
        r = series(way, "aceht", "correct")
        tau = kendall([accuracy[step] for step in r], list(r.values()))
        undecided = "" if len(r) >= 5 and math.isfinite(tau) else f"{len(r)} checkpoints with an r are too few"
        yield statement.judge(tau, undecided=undecided, **facts)
    for way, statement in INCORRECT.items():
        wrong, right = series(way, "aceht", "incorrect", ENOUGH), series(way, "aceht", "correct")
        common = sorted(step for step in wrong.keys() & right.keys() if accuracy[step] >= least_accuracy(chance))
        if not common:
            reason = f"no checkpoint of a trained network has {ENOUGH} such points"
            yield statement.judge(None, undecided=reason, **facts)
            continue
        middle, other = (statistics.median(of[step] for step in common) for of in (wrong, right))
        remark = f"Checkpoints with enough of them: {len(common)}; correct points have a median of {other:.2f} there."
        if len(common) == 1:
            remark += f" {ONE_CHECKPOINT}"
        yield statement.judge(middle, remark=remark, **facts)


STUDY = Study(
    name="correlation",
    title="Per-sample traces against ACEHT and the margin bound during training",
    source="A, Fig. 3 and App. B",
    config=Correlate,
    statements=(*LEVEL.values(), *RISES.values(), *INCORRECT.values()),
    run=run,
    judge=from_tables,
    reduced=lambda config: reduced(
        Correlate(), config, width="width", train_size="images", steps="steps", points="points", data="data"
    ),
    wanted={
        **{name: {"setting": name, "scale": "paper", "lr": None, "batch_size": None} for name in SETTINGS},
        **{
            f"lenet-mnist, lr {lr:g}, batch {size}": {"setting": "lenet-mnist", "lr": lr, "batch_size": size}
            for lr in SWEEP["lr"]
            for size in SWEEP["batch_size"]
        },
    },
    later={"lr": None, "batch_size": None},
    scales={
        "smoke": {
            "setting": "lenet-mnist",
            "data": "fashion-mini",
            "width": 0.25,
            "train_size": 300,
            "steps": 8,
            "checkpoints": 2,
            "points": 40,
        },
        "laptop": {"train_size": 5_000, "steps": 1_000, "checkpoints": 11, "points": 500},
    },
    sweep={"setting": tuple(SETTINGS)},
)
