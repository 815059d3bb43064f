"""What every study shares: a config, statements with their rules, a run folder that survives anything, a summary.

A study is a plain function of a frozen config. It says before it runs what it will call *reproduced*; `execute` runs it
in a folder keyed by the config's hash and writes, in this order, the pieces it has measured, its tables (Parquet), its
charts (SVG and PNG), and last `summary.json`, which alone makes a run finished. A run that was killed goes on from its
pieces and from the checkpoints of its networks and ends with the same numbers; a finished one is not run again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import io
import itertools
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spiritlevel import __version__, storage
from spiritlevel.errors import InputError, check_seed, unknown_name

if TYPE_CHECKING:
    from spiritlevel.training import Job, Trained

SCALES = ("smoke", "laptop", "paper")
SUMMARY = "summary.json"


class Verdict(StrEnum):
    """How a statement of a paper fared here."""

    REPRODUCED = "reproduced"
    DIRECTION = "reproduced in direction"
    NOT = "not reproduced"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Statement:
    """What a paper says, and what will be called reproduced, both fixed before the run.

    Attributes:
        id: A short name, unique in its study.
        text: The paper's statement in a few words.
        paper: The paper's own number or picture, as text.
        reproduced: When it counts as reproduced.
        direction: When it counts as reproduced in direction; empty if there is no such middle.
        limits: Between which our number must lie, where it is a correlation or a share.
    """

    id: str
    text: str
    paper: str
    reproduced: str
    direction: str = ""
    limits: tuple[float, float] | None = None

    def judge(
        self,
        ours: float | str | None,
        *,
        reproduced: bool,
        direction: bool = False,
        undecided: str = "",
        low: float | None = None,
        high: float | None = None,
        remark: str = "",
    ) -> Ruling:
        """The verdict on our number; `undecided` names a reason why the run cannot tell, for example `not fitted`.

        >>> high_r = Statement("r", "the trace follows the margin", "0.97", "r is at least 0.9", "r is at least 0.5")
        >>> str(high_r.judge(0.7, reproduced=0.7 >= 0.9, direction=0.7 >= 0.5).verdict)
        'reproduced in direction'
        """
        verdict = (
            Verdict.UNDECIDED
            if undecided
            else Verdict.REPRODUCED
            if reproduced
            else Verdict.DIRECTION
            if direction and self.direction
            else Verdict.NOT
        )
        remarks = [f"{undecided}." if undecided else "", remark]
        number = ours if isinstance(ours, str) else _finite(ours)
        return Ruling(self, number, verdict, _finite(low), _finite(high), " ".join(filter(None, remarks)))


class Ruling(NamedTuple):
    """A statement with our number beside it; `low` and `high` bound the number where it has an interval."""

    statement: Statement
    ours: float | str | None
    verdict: Verdict
    low: float | None = None
    high: float | None = None
    remark: str = ""

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON and tables."""
        own = {"ours": self.ours, "low": self.low, "high": self.high, "verdict": str(self.verdict)}
        said = dataclasses.asdict(self.statement)
        del said["limits"]  # a fact about the statement, not about the run
        return {**said, **own, "remark": self.remark}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every study can be asked for. A study's own config adds fields, whose defaults are the paper's recipe."""

    scale: str = "smoke"
    """smoke (seconds, for tests), laptop (minutes, real data, narrowed) or paper (the full recipe)."""
    seed: int = 0
    """Start of everything random."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown_name("scale", self.scale, SCALES)
        check_seed(self.seed)


@dataclass(frozen=True)
class Study:
    """One experiment of the papers as a command.

    Attributes:
        name: The name on the command line.
        title: One line: what is shown.
        source: Paper and figure.
        config: The study's config class.
        statements: What it will judge.
        run: The experiment: measures, adds tables and charts to the run, and returns one ruling a statement.
        scales: Fields that differ from the config's defaults, for each scale.
        adapted: The same for single values of a swept field: scale, field, value, fields. They go before `scales`.
        sweep: Values that a field takes, one job each, where neither the caller nor the scale gives one.
        seeds: How many seeds each scale runs where the caller gives none.
        revision: Part of a run's key; raise it when the same config would give other numbers.
    """

    name: str
    title: str
    source: str
    config: type[Config]
    statements: tuple[Statement, ...]
    run: Callable[[Any, Run], Iterable[Ruling]]
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adapted: Mapping[str, Mapping[str, Mapping[Any, Mapping[str, Any]]]] = field(default_factory=dict)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=lambda: {"laptop": 5})
    revision: int = 1

    def at(self, scale: str = "smoke", **given: Any) -> Config:
        """The config of a scale; what is given goes first."""
        known = {f.name for f in dataclasses.fields(self.config)}
        for name in given:
            if name not in known:
                raise unknown_name(f"option of {self.name}", name, known)
        preset = dict(self.scales.get(scale, {}))
        for name, values in self.adapted.get(scale, {}).items():
            preset |= values.get(given.get(name), {})
        return self.config(**{**preset, **given, "scale": scale})

    def jobs(self, scale: str = "smoke", *, seeds: Sequence[int] | None = None, **given: Any) -> list[Config]:
        """One config for every seed and every combination of the listed values: independent jobs.

        Args:
            scale: One of the scales.
            seeds: Seeds; by default as many as the scale runs, from 0.
            given: Fields; a list of values makes as many jobs.
        """
        fixed = {**self.scales.get(scale, {}), **given}
        lists: dict[str, Sequence[Any]] = {name: values for name, values in self.sweep.items() if name not in fixed}
        lists |= {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        lists["seed"] = range(self.seeds.get(scale, 1)) if seeds is None else seeds
        if not all(len(values) for values in lists.values()):
            raise InputError(f"{self.name}: each list of values needs at least one value.")
        for name, values in lists.items():
            twice = [value for value in values if list(values).count(value) > 1]
            if twice:  # the same run would count as two independent ones
                raise InputError(f"{self.name}: {name} {twice[0]} is given twice; every value is one job.")
        configs: list[dict[str, Any]] = [{}]
        for name, values in lists.items():
            configs = [{**config, name: value} for config in configs for value in values]
        return [self.at(scale, **config) for config in configs]

    def key(self, config: Config) -> str:
        """The hash that names the run folder."""
        return storage.digest({"study": self.name, "revision": self.revision, "config": storage.plain(config)}, 12)

    def folder(self, config: Config, out: str | Path) -> Path:
        """Where a run of this config lies below `out`."""
        return Path(out) / self.name / f"{config.scale}-{self.key(config)}"


class Run:
    """A run folder while its study runs: pieces for resume, tables, charts, networks from the shared cache.

    Args:
        folder: The run folder.
        progress: Called with `(what, done, total)`.
        cache: Folder of trained networks; by default the common one.
    """

    def __init__(
        self, folder: Path, progress: Callable[[str, int, int], None] | None = None, cache: Path | None = None
    ) -> None:
        self.folder = folder
        self.progress = progress or (lambda what, done, total: None)
        self.cache = cache
        self.files: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}
        self.earlier = 0.0  # seconds that pieces took which an earlier, killed run has kept

    def once(self, piece: str, compute: Callable[[], Any]) -> Any:
        """The plain value of `compute()`, from the folder if an earlier, killed run has kept it.

        The value always goes through JSON, so that a resumed run sees the very numbers of an uninterrupted one. NaN
        and infinities become None.
        """
        path = self.folder / "pieces" / f"{piece}.json"
        took = path.with_suffix(".seconds")
        if path.exists():
            if took.exists():
                self.earlier += float(took.read_text(encoding="utf-8"))
            return json.loads(path.read_text(encoding="utf-8"))
        begin = time.monotonic()
        value = json.dumps(_strict(compute()), allow_nan=False)
        storage.write_atomically(took, f"{time.monotonic() - begin:.3f}")
        storage.write_atomically(path, value)
        return json.loads(value)

    def train(self, job: Job) -> Trained:
        """The network that a training config describes: from the cache, resumed, or trained now."""
        from spiritlevel.training import train

        return train(job, cache=self.cache, progress=self.progress)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Keep rows as `name.parquet` and return them as a Polars frame for the charts."""
        import polars

        frame = polars.DataFrame([_strict(row) for row in rows], infer_schema_length=None)
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        self._write(f"{name}.parquet", buffer.getvalue())
        return frame

    def chart(self, name: str, chart: Any) -> None:
        """Keep a chart of `spiritlevel.charts` as `name.svg` and `name.png`."""
        from spiritlevel import charts

        for path in charts.save(chart, self.folder / name):
            self.files[path.name] = _sha256(path.read_bytes())

    def report(self, **numbers: Any) -> None:
        """Add numbers to the summary that belong to no statement."""
        self.numbers |= _strict(numbers)

    def _write(self, name: str, content: bytes) -> None:
        storage.write_atomically(self.folder / name, content)
        self.files[name] = _sha256(content)


def execute(
    study: Study,
    config: Config,
    out: str | Path = "results",
    *,
    progress: Callable[[str, int, int], None] | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Run a study in its folder, or read its summary if it is finished there.

    Two processes that ask for the same run take turns; the second finds it finished. Cost: that of the study.

    Returns:
        The summary: study, config, rulings, numbers, versions, commit, seconds, and the hash of every file.
    """
    folder = study.folder(config, out)
    waiting = (lambda: progress("another process runs this study; waiting", 0, 0)) if progress else None
    try:
        with storage.lock(folder, waiting=waiting):
            done = read_summary(folder)
            if done is not None:
                return done
            storage.write_atomically(folder / "config.json", _json(storage.plain(config)))
            run = Run(folder, progress, cache)
            begin = time.monotonic()
            rulings = [ruling.record() for ruling in study.run(config, run)]
            summary = {
                "study": study.name,
                "title": study.title,
                "source": study.source,
                "config": storage.plain(config),
                "rulings": rulings,
                "numbers": run.numbers,
                "files": run.files,
                "versions": versions(),
                "seconds": round(time.monotonic() - begin + run.earlier, 1),
            }
            storage.write_atomically(folder / SUMMARY, _json(summary))
            return summary
    except OSError as error:
        raise InputError(
            f"{study.name} could not write to {str(folder)!r}: {error.strerror or error}; what it had finished is "
            "kept, so give it room or another --out and start it again."
        ) from error


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if the run is not finished or one of its files is missing or damaged."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        whole = all(_sha256((folder / name).read_bytes()) == sha for name, sha in summary["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return summary if whole else None


def combine(summaries: Sequence[Mapping[str, Any]], statements: Sequence[Statement] = ()) -> list[dict[str, Any]]:
    """One row for each statement and setting over the seeds: mean, 95 % interval, and the median verdict.

    The interval is Student's t over seeds, cut at the limits that one of the `statements` has (a correlation cannot
    exceed 1), and then the remark says so; the verdict is the middle one of the seeds' verdicts (the lower of two), and
    `agree` tells how many seeds have it. Runs that could not decide count only if none could.
    """
    groups: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for summary in summaries:
        setting = {name: value for name, value in summary["config"].items() if name not in ("seed", "class")}
        for ruling in summary["rulings"]:
            groups.setdefault(json.dumps([summary["study"], setting, ruling["id"]]), []).append((summary, ruling))
    limits = {statement.id: statement.limits for statement in statements}
    return [_combined(pairs, limits.get(pairs[0][1]["id"])) for pairs in groups.values()]


_RANK = [Verdict.NOT, Verdict.DIRECTION, Verdict.REPRODUCED]


def _combined(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], limits: tuple[float, float] | None
) -> dict[str, Any]:
    (summary, first), rulings = pairs[0], [ruling for _, ruling in pairs]
    decided = sorted((r["verdict"] for r in rulings if r["verdict"] != Verdict.UNDECIDED), key=_RANK.index)
    verdict = decided[(len(decided) - 1) // 2] if decided else str(Verdict.UNDECIDED)
    row = {**first, "study": summary["study"], "config": summary["config"], "verdict": verdict, "seeds": len(rulings)}
    row["agree"] = sum(r["verdict"] == verdict for r in rulings)
    ours = [r["ours"] for r in rulings if isinstance(r["ours"], int | float)]
    if len(ours) > 1:
        from scipy import stats

        mean = math.fsum(ours) / len(ours)
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in ours) / (len(ours) - 1) / len(ours))
        half = float(stats.t.ppf(0.975, len(ours) - 1)) * spread
        row |= {"ours": mean, "low": mean - half, "high": mean + half}
    row["remark"] = next((r["remark"] for r in rulings if r["verdict"] == verdict), "")
    if limits is not None and len(ours) > 1:
        low, high = limits
        cut = [f"{end:g}" for end, beyond in ((low, row["low"] < low), (high, row["high"] > high)) if beyond]
        if cut:
            row |= {"low": max(row["low"], low), "high": min(row["high"], high)}
            said = f"The interval over the seeds is cut at {' and '.join(cut)}, the end of what is possible."
            row["remark"] = " ".join(filter(None, [row["remark"], said]))
    return row


FITTED = 0.99, 0.05
"""The least training accuracy and the largest loss of a network that fits its training data."""


def not_fitted(accuracy: float, loss: float, least: float = FITTED[0], most: float = FITTED[1]) -> str:
    """The reason to call a run undecided if its network does not fit its training data, otherwise nothing.

    >>> not_fitted(0.95, 0.01)
    'not fitted (training accuracy 95.0 %, loss 0.01)'
    """
    if accuracy >= least and loss <= most:
        return ""
    return f"not fitted (training accuracy {accuracy:.1%}, loss {loss:.2g})".replace("%", " %")


def chance_of_points(accuracies: Sequence[float], points: int) -> str:
    """How far two of these accuracies may lie apart by the choice of the points they were measured on.

    Standard error of the difference of two independent shares, at most; the networks share their points.

    >>> chance_of_points([0.03, 0.04], 1000)
    'By the choice of the 1,000 validation points alone two accuracies differ by 0.82 points (standard error).'
    """
    most = max(a * (1 - a) + b * (1 - b) for a, b in itertools.combinations(accuracies, 2))
    error = 100 * math.sqrt(most / points)
    return (
        f"By the choice of the {points:,} validation points alone two accuracies differ by {error:.2g} points "
        "(standard error)."
    )


def versions() -> dict[str, str | None]:
    """What a number may depend on: the code, the libraries, the machine's kind."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")}
    return {"spiritlevel": __version__, "commit": _commit(), "python": platform.python_version(), **packages}


def _commit() -> str | None:
    """The commit of the source tree, if this package runs from one."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _strict(value: Any) -> Any:
    """Plain values for strict JSON: tensors and NumPy numbers become numbers and lists, what is not finite None."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
