"""`spiritlevel report`: one page from several runs."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from spiritlevel.cli.base import Command, Outcome, ProgressBar, check_writable, say, tell
from spiritlevel.errors import InputError, counted
from spiritlevel.storage import check_readable

if TYPE_CHECKING:
    from spiritlevel.results import Checkpoints, Comparison, Perturbation, Result
    from spiritlevel.results import Report as Found


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Put several runs of `spiritlevel measure`, `compare`, `perturb` or `rank` onto one page.

    For example: spiritlevel report small/ large/ --out page.html

    What two demos left (`spiritlevel demo --out one/`, `--seed 1 --out two/`): spiritlevel report one/ two/
    """

    NAME = "report"

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN ...", help_behavior_hint="(at least one)")]
    """Folders that these commands wrote, their report.json, or what `--json` wrote."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("page.html")
    """The page to write."""

    def run(self) -> Outcome:
        """Read the runs, write the page."""
        if not self.runs:
            raise InputError("report needs at least one run: a folder that `spiritlevel measure` wrote.")
        check_writable(self.out, "--out")
        with ProgressBar() as progress:
            return self._written(progress)

    def _written(self, progress: ProgressBar) -> Outcome:
        from spiritlevel.page import page
        from spiritlevel.results import Comparison
        from spiritlevel.storage import write_atomically

        results = []
        for number, path in enumerate(self.runs):
            progress("reading the runs", number, len(self.runs))
            results.append(_read(path))
        for path in self.runs:
            if self.out.resolve() == _file(path).resolve():
                raise InputError(
                    f"--out {self.out} is the run itself, which the page would overwrite; name another file."
                )
        titles = [_title(result) for result in results]
        for number, (path, result) in enumerate(zip(self.runs, results, strict=True)):
            if titles.count(titles[number]) > 1 and not isinstance(result, Comparison):
                where = path.parent if path.suffix == ".json" else path
                results[number] = dataclasses.replace(result, name=f"{titles[number]} in {where.resolve().name}")
        progress(f"writing the page of {counted(len(results), 'run')}", 0, 0)
        write_atomically(self.out, page(*results))
        tell(f"The page: {self.out}")
        return Outcome({"page": str(self.out), "runs": [_title(result) for result in results]})


def _title(result: Found | Comparison | Perturbation | Checkpoints) -> str:
    from spiritlevel.results import Comparison

    return " and ".join(result.names) if isinstance(result, Comparison) else result.name


def _file(path: Path) -> Path:
    return path / "report.json" if path.is_dir() else path


def _read(path: Path) -> Found | Comparison | Perturbation | Checkpoints:
    from spiritlevel.results import Checkpoints, Comparison, Perturbation
    from spiritlevel.results import Report as Found

    found = read_result(path)
    if not isinstance(found, Found | Comparison | Perturbation | Checkpoints):
        kind = type(found).__name__
        article = "an" if kind[0] in "AEIOU" else "a"
        raise InputError(f"{_file(path)} holds {article} {kind}, but a page shows reports and comparisons.")
    return found


def read_result(path: Path) -> Result:
    """Whatever result a run folder, its report.json or a --json file holds."""
    from spiritlevel.results import Result

    file = _file(path)
    try:
        check_readable(file)
    except InputError as error:
        raise InputError(f"{str(path)!r} is not a run folder: {error} `spiritlevel measure` writes one.") from error
    try:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            found = _inner(file) or Result.from_json(file)
    except InputError as error:
        raise InputError(f"{file} is not a run: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # JSON of another shape
        raise InputError(f"{file} cannot be read as a run: {type(error).__name__} {error}.") from error
    _compare_page(file, found)
    for note in notes:
        say(f"{file}: {note.message}")
    return found


def _compare_page(file: Path, found: Result) -> None:
    """Warn if the page beside the numbers was made from others: a kill between two renames can leave such a pair.

    A page that this command made has the fingerprint of what was read, which may be written otherwise (15.0 for 15).
    """
    import re

    from spiritlevel.storage import fingerprint

    with contextlib.suppress(OSError):
        with file.with_suffix(".html").open(encoding="utf-8", errors="replace") as stream:
            head = stream.read(4000)
        made_from = re.search(r'name="spiritlevel-numbers" content="([0-9a-f]{12})"', head)
        texts = (file.read_text(encoding="utf-8").strip(), found.to_json()) if made_from else ()
        if made_from and made_from[1] not in map(fingerprint, texts):
            say(
                f"{file.with_suffix('.html')} does not match the numbers beside it; "
                "`spiritlevel report` makes a new one."
            )


def _inner(file: Path) -> Any:
    """The result inside what `--json` of a command wrote, or None if the file is not one."""
    import json

    from spiritlevel.results import Result

    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # `from_json` says what is wrong with it
        return None
    if not isinstance(written, dict) or "command" not in written:
        return None
    names = ("report", "comparison", "perturbation", "checkpoints", "audit", "result")
    held = next((written[name] for name in names if name in written), None)
    if held is None:
        raise InputError(f"it is the --json file of {written['command']}, which holds no report.")
    return Result.from_dict(held)
