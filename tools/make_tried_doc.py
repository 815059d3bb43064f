"""Tries wrong arguments, command lines and files, and writes how many were tried into SECURITY.md between its marks.

All that `tests/test_wrong.py` draws from, in pieces: what was tried so far is kept in build/tried.json, so that
`--seconds 300` can be called until nothing is left. What was answered badly is tried again each time, until it is
fixed. The table says for each kind how many tries there are, how many were made and how many were answered badly.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import wrong_commands
import wrong_files
import wrong_values

from spiritlevel.storage import write_atomically

PAGE, STATE = ROOT / "SECURITY.md", ROOT / "build" / "tried.json"
BEGIN, END = "<!-- tried: begin -->", "<!-- tried: end -->"

Answer = tuple[int, str, str]
"""The number of a try, what was tried, and what was wrong with the answer (empty if nothing was)."""


def arguments(count: int, numbers: Sequence[int]) -> Iterator[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        every = wrong_values.tries(count)
        for number in numbers:
            place = Path(folder) / str(number)
            place.mkdir()
            os.chdir(place)
            yield number, str(every[number]), every[number].failure()
        os.chdir(ROOT)


def lines(count: int, numbers: Sequence[int]) -> Iterator[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        wrong_commands.prepare(Path(folder))
        os.chdir(folder)
        every = wrong_commands.tries(count)
        for number in numbers:
            yield number, str(every[number]), every[number].failure()
        os.chdir(ROOT)


def files(count: int, numbers: Sequence[int]) -> Iterator[Answer]:
    with tempfile.TemporaryDirectory() as folder:
        wanted = set(numbers)
        for number, each in enumerate(wrong_files.tries(count)):
            if number in wanted:
                yield number, str(each), each.failure(Path(folder))


KINDS: dict[str, tuple[Callable[[int, Sequence[int]], Iterator[Answer]], Callable[[], str], str]] = {
    "arguments": (
        arguments,
        lambda: (
            f"the {len(wrong_values.tries()):,} pairs of an argument of {len(wrong_values.targets())} public functions "
            f"and methods and one of {len(wrong_values.WRONG)} kinds of wrong value"
        ),
        "`InputError` or `NotExactError` of one sentence, or a result where the declared type admits the value",
    ),
    "lines": (
        lines,
        lambda: (
            f"the {len(wrong_commands.tries()):,} pairs of an option of {len(list(wrong_commands.commands()))} "
            f"commands and studies and one of {len(wrong_commands.WRONG)} wrong words"
        ),
        "exit code 2 and one sentence, or the command runs",
    ),
    "files": (
        files,
        lambda: "reports, comparisons, weights, arrays and images with values or bytes changed at random",
        "one sentence, or a page is drawn, weights fit, samples are tensors",
    ),
}


def table(state: dict[str, dict[str, object]]) -> str:
    rows = ["| what is tried | tried | answered badly | a right answer |", "|---|---:|---:|---|"]
    for kind, (_, what, right) in KINDS.items():
        found = state[kind]
        rows.append(f"| {what()} | {found['tried']:,} | {len(found['failures'])} | {right} |")  # type: ignore[arg-type]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5000, help="tries of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; the next call continues")
    parser.add_argument("--only", choices=list(KINDS), help="try this kind alone")
    options = parser.parse_args()
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    end = time.monotonic() + options.seconds
    for kind, (tries, _, _) in KINDS.items():
        found = state.setdefault(kind, {"tried": 0, "failures": {}})
        numbers = [*map(int, found["failures"]), *range(found["tried"], options.tries)]
        if options.only not in (None, kind) or not numbers:
            continue
        for number, what, fault in tries(options.tries, numbers):
            found["tried"] = max(found["tried"], number + 1)
            found["failures"].pop(str(number), None)
            if fault:
                found["failures"][str(number)] = f"{what}: {fault}"
                print(f"{kind} {number}: {what}: {fault}", flush=True)
            if time.monotonic() > end:
                break
        os.chdir(ROOT)
    STATE.parent.mkdir(exist_ok=True)
    write_atomically(STATE, json.dumps(state, indent=1))
    print(collections.Counter({kind: found["tried"] for kind, found in state.items()}))
    text, inside = PAGE.read_text(), f"{BEGIN}\n{table(state)}\n{END}"
    write_atomically(PAGE, re.sub(f"{BEGIN}.*{END}", lambda _: inside, text, flags=re.DOTALL))
    return 1 if any(found["failures"] for found in state.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
