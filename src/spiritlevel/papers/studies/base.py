"""What every study shares: a config, statements with their rules, a run folder that survives anything, a summary.

A study is a plain function of a frozen config. It says before it runs what it will call *reproduced*; `execute` runs it
in a folder keyed by the config's hash and writes, in this order, the pieces it has measured, its tables (Parquet), its
charts (SVG and PNG), and last `summary.json`, which alone makes a run finished. A run that was killed continues from
its pieces and from the checkpoints of its networks and ends with the same numbers; a finished one is not run again.
Only numbers are kept; verdicts are drawn from them, over all seeds, whenever they are shown (`rules`).
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
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spiritlevel import __version__, storage
from spiritlevel.arguments import by_type, number
from spiritlevel.errors import InputError, checked_seed, needs, unknown_name
from spiritlevel.papers.studies.rules import Ruling, Statement, Verdict, decide

if TYPE_CHECKING:
    from spiritlevel.papers.training import Job, Trained

SCALES = ("smoke", "laptop", "small", "paper")
SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of every study. A study's own config adds fields, whose defaults are the paper's recipe."""

    scale: str = "smoke"
    """smoke (seconds, for tests), laptop (minutes, real data, narrowed), small (hours, narrowed networks that
    generalise) or paper (the full recipe)."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown_name("scale", self.scale, SCALES)
        checked_seed(self.seed)
        hints = typing.get_type_hints(type(self))
        for each in dataclasses.fields(self):
            found = by_type(getattr(self, each.name), hints[each.name], each.name)
            for value in found if isinstance(found, tuple) else (found,):
                if isinstance(value, int | float) and not isinstance(value, bool):  # no setting may be negative
                    number(value, each.name, least=0, most=1e36)
            if found == () and each.default != ():
                raise InputError(f"{each.name} must name at least one value, got none.")


@dataclass(frozen=True)
class Study:
    """One experiment of the papers as a command.

    Attributes:
        name: The name on the command line.
        title: One line: what is shown.
        source: Paper and figure.
        config: The study's config class.
        statements: What it will judge.
        run: The experiment: measures, adds tables and charts to the run, and returns one ruling per statement, unless
            `judge` does.
        judge: The rulings from the tables alone, given by name, so that kept runs are judged by today's rules. Without
            it the numbers of the run itself count.
        reduced: How a config falls short of the paper's experiment, for the row of its results; empty if it is that
            experiment.
        wanted: What there is to run, by name: the fields of the config that a run must have to count for it.
        scales: Fields that differ from the config's defaults, for each scale.
        adapted: The same for single values of a swept field: scale, field, value, fields. They take precedence over
            `scales`.
        sweep: Values that a field takes, one job each, if neither the caller nor the scale gives one.
        only: The same for single scales: scale, field, values.
        seeds: How many seeds each scale runs if the caller gives none.
        pieces: The pieces of a run that are independent of each other, by name; a cluster computes them separately, and
            `run` finds them done.
        renamed: Fields that were renamed, old name to new: kept runs are still found and read, and the old name works
            with a warning.
        later: Fields that were added later, with their defaults: at these they are not part of a run's key, so that
            older runs are still found.
        revision: Part of a run's key; raise it when the same config would give different numbers.
    """

    name: str
    title: str
    source: str
    config: type[Config]
    statements: tuple[Statement, ...]
    run: Callable[[Any, Run], Iterable[Ruling] | None]
    judge: Callable[[Any, Tables], Iterable[Ruling]] | None = None
    reduced: Callable[[Any], str] = lambda config: ""
    wanted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    adapted: Mapping[str, Mapping[str, Mapping[Any, Mapping[str, Any]]]] = field(default_factory=dict)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    only: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=lambda: {"laptop": 5, "small": 3})
    pieces: Callable[[Any], Mapping[str, Callable[[Run], Any]]] = lambda config: {}
    renamed: Mapping[str, str] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 1

    def at(self, scale: str = "smoke", **given: Any) -> Config:
        """The config of a scale; given values take precedence."""
        for old in given.keys() & self.renamed.keys():
            new = self.renamed[old]
            warnings.warn(f"{old}= of {self.name} is deprecated, use {new}=.", DeprecationWarning, stacklevel=2)
            given[new] = given.pop(old)
        known = {f.name for f in dataclasses.fields(self.config)}
        for name in given:
            if name not in known:
                raise unknown_name(f"option of {self.name}", name, known)
        if scale == "small" and scale not in self.scales:
            raise InputError(f"{self.name} has no scale small; choose smoke, laptop or paper.")
        preset = dict(self.scales.get(scale, {}))
        for name, values in self.adapted.get(scale, {}).items():
            preset |= values.get(given.get(name), {})
        return self.config(**{**preset, **given, "scale": scale})

    def jobs(self, scale: str = "smoke", *, seeds: Sequence[int] | None = None, **given: Any) -> list[Config]:
        """One config for every seed and every combination of the listed values: independent jobs.

        Args:
            scale: One of the scales.
            seeds: Seeds; by default as many as the scale runs, from 0.
            given: Fields; a list of values makes that many jobs.
        """
        fixed = {**self.scales.get(scale, {}), **given}
        swept = {**self.sweep, **self.only.get(scale, {})}
        lists: dict[str, Sequence[Any]] = {name: values for name, values in swept.items() if name not in fixed}
        lists |= {name: value if isinstance(value, list) else [value] for name, value in given.items()}
        lists["seed"] = range(self.seeds.get(scale, 1)) if seeds is None else seeds
        if not all(len(values) for values in lists.values()):
            raise InputError(f"{self.name}: each list of values needs at least one value.")
        for name, values in lists.items():
            twice = [value for value in values if list(values).count(value) > 1]
            if twice:  # the same run would count as two independent ones
                raise InputError(f"{self.name}: {name} {twice[0]} is given twice; give each value once.")
        configs: list[dict[str, Any]] = [{}]
        for name, values in lists.items():
            configs = [{**config, name: value} for config in configs for value in values]
        return [self.at(scale, **config) for config in configs]

    def key(self, config: Config) -> str:
        """The hash that names the run folder."""
        earlier = {new: old for old, new in self.renamed.items()}  # a new name does not make it a new run
        fields = {
            earlier.get(name, name): value
            for name, value in storage.plain(config).items()
            if name not in self.later or value != storage.plain(self.later[name])
        }
        return storage.digest({"study": self.name, "revision": self.revision, "config": fields}, 12)

    def folder(self, config: Config, out: str | Path) -> Path:
        """Where a run of this config lies below `out`."""
        return Path(out) / self.name / f"{config.scale}-{self.key(config)}"

    def restored(self, kept: Mapping[str, Any]) -> Config:
        """The config kept in a summary; fields added later have their defaults."""
        known = {f.name for f in dataclasses.fields(self.config)}
        named = {self.renamed.get(name, name): value for name, value in kept.items()}
        return self.config(**{name: _frozen(value) for name, value in named.items() if name in known})

    def today(self, summary: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """A kept summary as it would be written today: with the fields added later, and its numbers judged now."""
        config = json.loads(json.dumps(storage.plain(self.restored(summary["config"]))))
        return {**summary, "config": config, "rulings": self.rulings(summary, folder)}

    def rulings(self, summary: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
        """What a kept run says about every statement, from its tables where the study can."""
        if self.judge is None:
            known = {statement.id: statement for statement in self.statements}
            return [_of_today(ruling, known[ruling["id"]]) for ruling in summary["rulings"] if ruling["id"] in known]
        try:
            found = list(self.judge(self.restored(summary["config"]), lambda name: _read_table(folder, name)))
        except (KeyError, OSError):  # its tables lack what today's rules need
            return [
                {"id": ruling["id"], "ours": None, "undecided": "kept without the number that decides"}
                for ruling in summary["rulings"]
            ]
        return [ruling.record() for ruling in found]


Tables = Callable[[str], list[dict[str, Any]]]
"""The rows of a table, by its name."""


class Run:
    """A run folder while its study runs: pieces to resume from, tables, charts, networks from the shared cache.

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
        self.earlier = 0.0  # seconds taken by pieces that an earlier, killed run has kept

    def once(self, piece: str, compute: Callable[[], Any]) -> Any:
        """The plain value of `compute()`, from the folder if an earlier, killed run has kept it.

        The value always goes through JSON, so that a resumed run sees exactly the numbers of an uninterrupted one. NaN
        and infinities become None.
        """
        content, seconds = self._kept(piece)
        if content is not None:
            self.earlier += seconds
            return json.loads(content)
        begin = time.monotonic()
        value = json.dumps(_strict(compute()), allow_nan=False)
        beside = f"{time.monotonic() - begin:.3f} {_sha256(value.encode())}"
        storage.write_atomically(self.folder / "pieces" / f"{piece}.seconds", beside)
        storage.write_atomically(self.folder / "pieces" / f"{piece}.json", value)
        return json.loads(value)

    def has(self, piece: str) -> bool:
        """Whether the folder holds this piece, undamaged."""
        return self._kept(piece)[0] is not None

    def _kept(self, piece: str) -> tuple[str | None, float]:
        """A piece and the seconds it took; None if it is missing, or was changed after it was written."""
        try:
            content = (self.folder / "pieces" / f"{piece}.json").read_text(encoding="utf-8")
            json.loads(content)
            beside = self.folder / "pieces" / f"{piece}.seconds"
            seconds, *seal = beside.read_text(encoding="utf-8").split() if beside.exists() else ("0",)
            whole = not seal or seal == [_sha256(content.encode())]  # pieces of version 0.1 have no seal
            return (content, float(seconds)) if whole else (None, 0.0)
        except (OSError, ValueError):
            return None, 0.0

    def train(self, job: Job) -> Trained:
        """The network that a training config describes: from the cache, resumed, or trained now."""
        from spiritlevel.papers.training import train

        return train(job, cache=self.cache, progress=self.progress)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Keep rows as `name.parquet` and return them as a Polars frame for the charts."""
        with needs("the table of a study"):
            import polars

        frame = polars.DataFrame([_strict(row) for row in rows], infer_schema_length=None)
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        self._write(f"{name}.parquet", buffer.getvalue())
        return frame

    def chart(self, name: str, chart: Any) -> None:
        """Keep a chart of `spiritlevel.charts` as `name.svg`."""
        from spiritlevel import charts

        self._write(f"{name}.svg", charts.svg_file(chart).encode())

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
    waiting = (lambda: progress("another process is running this study; waiting", 0, 0)) if progress else None
    try:
        with storage.lock(folder, waiting=waiting):
            done = read_summary(folder)
            if done is not None:
                return study.today(done, folder)
            storage.write_atomically(folder / "config.json", _json(storage.plain(config)))
            run = Run(folder, progress, cache)
            begin = time.monotonic()
            found = study.run(config, run) or ()
            if study.judge is not None:
                list(found)
                found = study.judge(config, partial(_read_table, folder))
            rulings = [ruling.record() for ruling in found]
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
            "kept, so free some space or give another --out, and start it again."
        ) from error


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run; None if the run is not finished or one of its files is missing or damaged."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        whole = all(_sha256((folder / name).read_bytes()) == sha for name, sha in summary["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return summary if whole else None


def combine(summaries: Sequence[Mapping[str, Any]], statements: Sequence[Statement]) -> list[dict[str, Any]]:
    """One row for each setting and statement over the seeds: the statement, our numbers, and the verdict on them.

    Rulings on statements that the study no longer has are left out.
    """
    groups: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for summary in summaries:
        setting = {name: value for name, value in summary["config"].items() if name not in ("seed", "class")}
        for ruling in summary["rulings"]:
            groups.setdefault(json.dumps([summary["study"], setting, ruling["id"]]), []).append((summary, ruling))
    known = {statement.id: statement for statement in statements}
    return [_combined(pairs, known[pairs[0][1]["id"]]) for pairs in groups.values() if pairs[0][1]["id"] in known]


def _combined(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], statement: Statement) -> dict[str, Any]:
    summary, first = pairs[0]
    rulings = [ruling for _, ruling in pairs]
    decision = decide(statement, rulings)
    said = dataclasses.asdict(statement)
    del said["within"], said["limits"]  # the text says it
    return {
        **said,
        "study": summary["study"],
        "config": summary["config"],
        "ours": first["ours"] if len(rulings) == 1 or not decision.parts else None,
        "parts": {name: part._asdict() for name, part in decision.parts.items()},
        "verdict": str(decision.verdict),
        "reason": decision.reason,
        "seeds": decision.seeds,
        "agree": decision.agree,
        "remark": first.get("remark", ""),
    }


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


def reduced(full: Config, config: Config, **fields: str) -> str:
    """How a config differs from the full experiment: the fields in words, then the values.

    >>> reduced(Config(), Config(seed=1), seed="seed")
    'seed 1 (paper 0)'
    """
    texts = []
    for name, word in fields.items():
        ours, paper = getattr(config, name), getattr(full, name)
        if ours != paper:
            said = f"{ours:,}" if isinstance(ours, int) else str(ours)
            known = "all" if paper is None else f"{paper:,}" if isinstance(paper, int) else str(paper)
            texts.append(f"{word} {said} (paper {known})")
    return ", ".join(texts)


def versions() -> dict[str, str | None]:
    """What a number may depend on: the code, the libraries, the kind of machine."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")}
    return {"spiritlevel": __version__, "commit": _commit(), "python": platform.python_version(), **packages}


def _commit() -> str | None:
    """The commit of the source tree, if this package runs from one."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    with needs("the table of a study"):
        import polars

    return polars.read_parquet(folder / f"{name}.parquet").to_dicts()


def _of_today(ruling: Mapping[str, Any], statement: Statement) -> dict[str, Any]:
    """A ruling as it is kept today. Older ones kept a verdict, which counts only if it was undecided.

    Where an identity's number and that verdict disagree, the number meant something else then.
    """
    if "verdict" not in ruling:
        return dict(ruling)
    reason = ruling["remark"].split(". ")[0].rstrip(".") if ruling["verdict"] == "undecided" else ""
    kept = {name: ruling[name] for name in ("id", "ours", "remark")}
    if statement.kind == "identity":
        now = decide(statement, [kept]).verdict
        if (now == Verdict.REPRODUCED) != (ruling["verdict"] == Verdict.REPRODUCED):
            kept["ours"], reason = None, "kept with another number than is judged today"
    return {**kept, "undecided": reason}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _strict(value: Any) -> Any:
    """Plain values for strict JSON: tensors and NumPy numbers become numbers and lists, non-finite ones None."""
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
