"""Benchmarks: ratios against a forward pass, a gradient or a peer, measured in one run, interleaved.

`make bench` runs all of it in an environment that holds the peers; `python benchmarks/run.py --smoke` takes seconds and
needs none. Absolute times are noise, so every row is a ratio: best and median over several rounds, in which both sides
take turns. A row whose peer is not installed says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from growth import growth
from harness import FULL, SMOKE, Row, Scale
from operators import operators
from per_sample import per_sample
from spectra import spectra

PARTS: dict[str, Callable[[Scale], list[Row]]] = {
    "per-sample": per_sample,
    "operators": operators,
    "spectra": spectra,
    "growth": growth,
}
PEERS = ("pyhessian", "backpack-for-pytorch", "curvlinops-for-pytorch", "hessian-eigenthings")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "threads": str(torch.get_num_threads())}
    for package in ("torch", "spiritlevel", *PEERS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def as_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The page docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Ratios within one run, both sides in turns: best over best, and the median of the "
        "rounds. A row that misses its bar says so.",
        "",
        "| | what | best | median | bar | met | |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for row in rows:
        value, median = (("–" if item is None else f"{item:.3g}") for item in (row.value, row.median))
        met = {True: "yes", False: "**no**", None: "–"}[row.met]
        lines.append(f"| {row.area} | {row.what} | {value} | {median} | {row.bar} | {met} | {row.note} |")
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in about.items()) + ".", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that the benchmarks still run")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--page", type=Path, help="also write the page docs/benchmarks.md there")
    arguments = parser.parse_args()
    scale = SMOKE if arguments.smoke else FULL
    torch.set_num_threads(1 if arguments.smoke else 2)
    rows = [row for name, part in PARTS.items() if arguments.only in (None, name) for row in part(scale)]
    text = as_markdown(rows, versions())
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "versions": versions()}, indent=1))
    if arguments.page:
        arguments.page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
