"""Writes the tables of docs/perturb.md between their marks: `make perturb-doc`.

How often the 95% intervals of `perturb` hold what a change does, over random changes of a LeNet, a small ResNet and a
small transformer; and what chosen bits are worth, from the kept runs of the study `layer-bits`. Changes are counted in
pieces that are kept under build/, so that it can be run with `--seconds 300` until nothing is left; if the code that
predicts has changed, counting starts afresh.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import inspect
import json
import math
import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from fitted import fitted
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.answers import changes, expanding, perturbing
from spiritlevel.measures import Setting
from spiritlevel.papers.networks import lenet5
from spiritlevel.results import Perturbation
from spiritlevel.results.perturbations import COSTS
from spiritlevel.storage import write_atomically

ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "perturb.md", ROOT / "build" / "changes"
CASES, PIECE = 1_002, 6  # changes in all, and in a piece
LOW, HIGH = 0.92, 0.98


# ---------------------------------------------------------------- networks and their changes


class Block(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, Block(8), nn.AvgPool2d(2), Block(8), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 10))


class Rows(nn.Module):
    """A transformer that reads a digit row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.places = nn.Parameter(0.1 * torch.randn(8, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.embedding(x[:, 0]) + self.places).mean(1))
        return found


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LeNet": (lenet5, "fashion-mini"),
    "ResNet": (resnet, "digits"),
    "transformer": (Rows, "digits"),
}
NOISE, BITS = (0.001, 0.05), (5, 6, 7, 8)  # smallest and largest relative size; numbers of bits
KINDS = ("noise", "random rounding", "rounding, from a subset")


@functools.cache
def trained(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A fitted network, and the first 300 images of the test set."""
    make, data_set = NETWORKS[name]
    data = sl.data.load(data_set)
    return fitted(make, *data.train, rate=3e-3), (data.test[0][:300], data.test[1][:300])


@functools.cache
def bound(name: str, count: int) -> Setting:
    """A network on its first so many samples, bound once for all changes."""
    net, (inputs, labels) = trained(name)
    return perturbing.floating(Setting(net, (inputs[:count], labels[:count])))


def changed(name: str, kind: str, case: int) -> Perturbation:
    """One random change: its size, its draw, its samples and all probes follow from the number of the case."""
    generator = np.random.default_rng((case, list(NETWORKS).index(name)))
    size = math.exp(generator.uniform(*(math.log(limit) for limit in NOISE)))
    width = int(generator.choice(BITS))
    text = {"noise": f"noise:{size:.5f}", "random rounding": f"int{width}:random"}.get(kind, f"int{width}")
    part = kind == KINDS[2]
    setting = copy.copy(bound(name, 300 if part else 20))
    setting.seed = case
    return perturbing.perturb_in(setting, changes.as_change(text), layers=False, samples=60 if part else None)


def counted(name: str, kind: str, case: int) -> dict[str, Any]:
    """Whether the second order holds by `perturb`'s own word, and whether both intervals hold the truth."""
    found = changed(name, kind, case)
    pairs = ((found.predicted, found.measured), (found.flips_predicted, found.flips_measured))
    inside = []
    for predicted, measured in pairs:
        low, high = predicted.interval()
        inside.append(bool(low <= measured.value <= high))
    return {"change": found.change, "suffices": found.suffices, "loss": inside[0], "flips": inside[1]}


@functools.cache
def version() -> str:
    """A hash of the code that predicts, and of what is counted here."""
    here = (Block, resnet, Rows, fitted, trained.__wrapped__, bound.__wrapped__, changed, counted)
    texts = [inspect.getsource(each) for each in (changes, expanding, perturbing, *here)]
    return hashlib.sha256("".join([*texts, str((NOISE, BITS))]).encode()).hexdigest()[:12]


def piece(name: str, kind: str, first: int) -> Path:
    return KEPT / f"{version()}-{name}-{KINDS.index(kind)}-{first}.json"


def pieces(cases: int) -> list[tuple[str, str, int]]:
    """All pieces, the kinds of changes in turn, so that a stopped run has some of each."""
    each = math.ceil(cases / (len(NETWORKS) * len(KINDS)))
    return [(name, kind, first) for first in range(0, each, PIECE) for name in NETWORKS for kind in KINDS]


def count(cases: int, seconds: float) -> int:
    """Count what has not been counted yet until time runs out; returns how many pieces are left."""
    begin, todo = time.monotonic(), [each for each in pieces(cases) if not piece(*each).exists()]
    KEPT.mkdir(parents=True, exist_ok=True)
    for done, (name, kind, first) in enumerate(todo):
        if time.monotonic() - begin > seconds:
            return len(todo) - done
        if piece(name, kind, first).exists():  # another process has counted it
            continue
        rows = [counted(name, kind, case) for case in range(first, first + PIECE)]
        write_atomically(piece(name, kind, first), json.dumps(rows))
    return 0


# ---------------------------------------------------------------- the tables


def share(rows: Sequence[dict[str, Any]], key: str = "loss") -> str:
    return f"{sum(row[key] for row in rows) / len(rows):.1%} of {len(rows):,}" if rows else "–"


def coverage(cases: int) -> tuple[str, dict[tuple[str, str], list[dict[str, Any]]]]:
    """The table of what was counted, and the counts."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name, kind, first in pieces(cases):
        if piece(name, kind, first).exists():
            found[name, kind] += json.loads(piece(name, kind, first).read_text())
    lines = [
        "| network | change | changes | interval of the loss holds, where the second order does | where it is flagged "
        "| interval of the flips holds |",
        "|---|---|---|---|---|---|",
    ]
    every = [row for rows in found.values() for row in rows]
    for (name, kind), rows in [*sorted(found.items()), (("all", ""), every)]:
        good, flagged = ([row for row in rows if row["suffices"] is whether] for whether in (True, False))
        cells = (name, kind, f"{len(rows):,}", share(good), share(flagged), share(rows, "flips"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), found


ORDERS = {"unrounded": "not rounded", "uniform": "the same for all", **COSTS}


def chosen() -> str:
    """Held-out loss and accuracy with chosen bits and with the same bits for all, from the kept runs."""
    import polars

    kept: dict[tuple[str, float, str], list[tuple[float, float, float]]] = defaultdict(list)
    for path in sorted((ROOT / "results" / "layer-bits").glob("*/summary.json")):
        network = json.loads(path.read_text())["config"]["network"]
        for row in polars.read_parquet(path.parent / "budgets.parquet").to_dicts():
            kept[network, row["budget"], row["by"]].append((row["mean bits"], row["loss"], row["accuracy"]))
    lines = [
        "| network | bits per weight, at most | bits chosen by | bits used | held-out loss | accuracy | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for (network, budget, by), rows in sorted(kept.items(), key=lambda each: each[0][0]):
        used, loss, accuracy = (statistics.mean(column) for column in zip(*rows, strict=True))
        spread = f" ± {100 * statistics.stdev(row[2] for row in rows):.1f}" if len(rows) > 1 else ""
        cells = (network, f"{budget:g}" if budget else "–", ORDERS[by], f"{used:.3g}", f"{loss:.3f}")
        lines.append(f"| {' | '.join(cells)} | {100 * accuracy:.1f}%{spread} | {len(rows)} |")
    return "\n".join([*lines, "", *against_uniform(kept)])


def against_uniform(kept: dict[tuple[str, float, str], list[tuple[float, float, float]]]) -> list[str]:
    """In how many runs each order chose better than the same bits for all, size by size."""
    said, orders = [], [by for by in COSTS if any(order == by for _, _, order in kept)]
    for budget in sorted({budget for _, budget, _ in kept if budget}):
        parts = []
        for by in orders:
            gains = [
                row[2] - alike[2]
                for (network, size, order), rows in kept.items()
                if (size, order) == (budget, by)
                for row, alike in zip(rows, kept[network, budget, "uniform"], strict=True)
            ]
            better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
            mean = f"{100 * statistics.mean(gains):+.1f}".replace("-", "−")
            parts.append(f"{ORDERS[by]}: more accurate in {better}, less in {worse}, {mean} points on average")
        said.append(
            f"At {budget:g} bits per weight, over {len(gains)} networks, bits chosen layer by layer against the same "
            f"for all. Chosen by {'; by '.join(parts)}."
        )
    return ["  \n".join(said)] if said else []


def written(text: str, mark: str, table: str) -> str:
    """A page with what stands between the marks of that name replaced by a table."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{PAGE.name} has no place for the table: the marks {begin} and {end} are missing.")
    return pattern.sub(lambda _: f"{begin}\n\n{table}\n\n{end}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--bits", action="store_true", help="only the table of chosen bits, from kept runs; no counts")
    options = parser.parse_args()
    if options.bits:
        write_atomically(PAGE, written(PAGE.read_text(encoding="utf-8"), "bits", chosen()))
        return 0
    left = count(options.cases, options.seconds)
    table, found = coverage(options.cases)
    print(table)
    if left:
        print(f"{left} pieces of {PIECE} changes are left; run it again.")
        return 0
    text = written(PAGE.read_text(encoding="utf-8"), "changes", table)
    write_atomically(PAGE, written(text, "bits", chosen()))
    good = [row["loss"] for rows in found.values() for row in rows if row["suffices"]]
    return 0 if LOW <= sum(good) / len(good) <= HIGH else 1


if __name__ == "__main__":
    sys.exit(main())
