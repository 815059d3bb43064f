"""Benchmarks: ratios against a forward pass, a gradient or a peer, measured in one run, interleaved.

`make bench` runs all of it in an environment that holds the peers; `python benchmarks/run.py --smoke` takes seconds and
needs none. Absolute times are noise, so every row is a ratio: best and median over several rounds, in which both sides
take turns. A row whose peer is not installed says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from audit import audits
from compiled import compiled
from convolutions import convolutions
from growth import growth
from harness import FULL, SMOKE, Row, Scale
from language_models import language_models
from large import large
from operators import operators
from per_sample import per_sample
from probes import probes
from recorder import recorder
from report import reports
from spectra import spectra

from spiritlevel.storage import write_atomically

PARTS: dict[str, Callable[[Scale], list[Row]]] = {
    "per-sample": per_sample,
    "convolutions": convolutions,
    "probes": probes,
    "operators": operators,
    "spectra": spectra,
    "language models": language_models,
    "audit": audits,
    "report": reports,
    "growth": growth,
    "a million samples": large,
    "watching a training": recorder,
    "torch.compile": compiled,
}
PICTURE = "benchmarks"
PEERS = ("pyhessian", "backpack-for-pytorch", "curvlinops-for-pytorch", "hessian-eigenthings")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in ("torch", "spiritlevel", *PEERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def as_markdown(parts: dict[str, dict[str, Any]]) -> str:
    """The page docs/benchmarks.md, from the last run of every part."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` from `benchmarks/last_run.json`. Ratios within one run, both sides in turns: best "
        "over best, and the median of the rounds. A row that misses its bar says so; what limits it and what was "
        "tried stands in [architecture.md](architecture.md).",
        "",
        f"![How many times longer the other libraries take](pictures/{PICTURE}.svg)",
        "",
    ]
    for name, part in parts.items():
        missed = sum(row["met"] is False for row in part["rows"])
        barred = sum(row["met"] is not None for row in part["rows"])
        lines += [f"## {name}", ""]
        lines += [f"{barred - missed} of {barred} bars met.", ""] if barred else []
        lines += ["| | what | best | median | bar | met | |", "|---|---|---:|---:|---|---|---|"]
        for row in part["rows"]:
            value, median = (("–" if row[item] is None else f"{row[item]:.3g}") for item in ("value", "median"))
            met = {True: "yes", False: "**no**", None: "–"}[row["met"]]
            cells = (row["area"], row["what"], value, median, row["bar"], met, row["note"])
            lines.append(f"| {' | '.join(cells)} |")
        about = ", ".join(f"{package} {version}" for package, version in part["versions"].items())
        took = f"Took {part['seconds']:.0f} s, load of the machine before it {part['load']:.1f}"
        if part["seconds"] < 1:
            took = "Put together from pieces that were run one by one, on a busy machine"
        lines += ["", f"{took}; {about}.", ""]
    return "\n".join(lines)


def draw(parts: dict[str, dict[str, Any]], folder: Path) -> None:
    """The peers' times over ours as bars."""
    from spiritlevel import charts

    rows = [row for part in parts.values() for row in part["rows"] if row["value"] and "/ ours" in row["what"]]
    columns = {
        "what": [f"{row['what'].split(' / ours')[0]} ({row['area'].split(', ')[-1]})" for row in rows],
        "time of the other library / ours": [row["value"] for row in rows],
    }
    if rows:
        chart = charts.bars(
            columns, "what", "time of the other library / ours", log=True, title="The same work by other libraries"
        )
        charts.save(chart, folder / PICTURE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that the benchmarks still run")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="these parts alone; the others keep their last run")
    parser.add_argument("--json", type=Path, help="keep the last run of every part there")
    parser.add_argument("--page", type=Path, help="also write the page docs/benchmarks.md there")
    arguments = parser.parse_args()
    scale = SMOKE if arguments.smoke else FULL
    torch.set_num_threads(1 if arguments.smoke else 2)
    kept: dict[str, dict[str, Any]] = {}
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))
    for name in arguments.only or PARTS:
        load, begin = os.getloadavg()[0], time.monotonic()
        rows = [asdict(row) for row in PARTS[name](scale)]
        kept[name] = {"rows": rows, "versions": versions(), "seconds": time.monotonic() - begin, "load": load}
        kept = {part: kept[part] for part in PARTS if part in kept}
        if arguments.json:  # after every part: a run that is cut short loses one part
            write_atomically(arguments.json, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(as_markdown(kept))
    if arguments.page:
        write_atomically(arguments.page, as_markdown(kept))
        draw(kept, arguments.page.parent / "pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
