"""Seconds for an audit: a fitted LeNet-5 on 1,000 images of MNIST, and a BERT-like classifier on 200 sequences.

`python benchmarks/audit.py` runs it alone, with the most expensive measures and the cells that did not converge.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

import torch
from harness import FULL, Row, Scale, images, trained_lenet
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.results import Audit

BARS, BERT = {"default": 60.0, "all": 300.0}, 180.0
_WORDS = 100
_POINTS = 1000
_FEW = ["trace", "path_norm"]  # of a smoke run, which only shows that all of this still runs
_SILENT = ("not converged", "unstable")


class Clock:
    """A progress callback that adds up the seconds of every measure, over the network and all its transforms."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.name, self.since = "preparation", time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[self.name] += now - self.since
        self.name, self.since = what.split(" after ")[0], now

    def most_expensive(self, count: int) -> str:
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in ordered[:count])


def open_cells(audit: Audit) -> list[str]:
    """The cells that say nothing: not converged, or differences within their errors."""
    return [f"{row.measure} under {row.transform}: {row.verdict}" for row in audit.rows if row.verdict in _SILENT]


class Classifier(nn.Module):
    """A small encoder like BERT's: norms after the sums, GELU, the first token decides."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, width), nn.Embedding(tokens, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.encoder(embedded)[:, 0])


def fitted_classifier(scale: Scale) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Which of four words is the most frequent one: learnt in a few steps, to give the curvature something to show."""
    layers, width, heads, tokens, count = (4, 64, 4, 32, 200) if scale is FULL else (1, 16, 2, 8, 20)
    torch.manual_seed(0)
    model = Classifier(layers, width, heads, tokens)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randint(_WORDS, (number, tokens))
        return inputs, nn.functional.one_hot(inputs, _WORDS)[..., :4].sum(1).argmax(1)

    for _ in range(200 if scale is FULL else 5):
        inputs, targets = draw(64)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
    return model.eval(), draw(count)


def audit_of_transformer(scale: Scale) -> Row:
    """The default measures under all symmetries that the network has."""
    model, data = fitted_classifier(scale)
    clock, start, busy = Clock(), time.perf_counter(), time.process_time()
    audit = sl.audit(model, data, measures=None if scale is FULL else _FEW, progress=clock)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    symmetries = ", ".join(audit.certificates)
    what = f"audit of a BERT-like classifier on {len(data[1])} sequences, default measures: seconds"
    note = (
        f"{len(audit.rows)} cells, {len(open_cells(audit))} of them open; {busy:.0f} processor seconds; symmetries: "
        f"{symmetries}; most expensive: {clock.most_expensive(4)}"
    )
    row = Row("audit", what, seconds, None, f"≤ {BERT:g}", seconds <= BERT if scale is FULL else None, note)
    if __name__ == "__main__":
        print(audit, row, sep="\n", flush=True)
    return row


def audits(scale: Scale) -> list[Row]:
    """One row per set of measures. Wall-clock seconds count; processor seconds tell how busy the machine was."""
    return [*audits_of_lenet(scale), audit_of_transformer(scale)]


def audits_of_lenet(scale: Scale) -> list[Row]:
    """The default measures, and all of them."""
    full = scale is FULL
    name, inputs, targets = images(60_000 if full else _POINTS)
    model = trained_lenet(inputs, targets, steps=1500 if full else 20)
    data = (inputs[:_POINTS], targets[:_POINTS]) if full else (inputs[:100], targets[:100])
    rows = []
    for measures, bar in BARS.items() if full else [("default", BARS["default"])]:
        clock, start, busy = Clock(), time.perf_counter(), time.process_time()
        audit = sl.audit(model, data, measures=measures if full else _FEW, progress=clock)
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        silent = open_cells(audit)
        cells = f"{len(audit.rows)} cells, {len(silent)} of them open"
        what = f"audit of LeNet-5 on {len(data[1]):,} points of {name}, {measures} measures: seconds"
        note = f"{cells}; {busy:.0f} processor seconds; most expensive: {clock.most_expensive(4)}"
        rows.append(Row("audit", what, seconds, None, f"≤ {bar:g}", seconds <= bar if full else None, note))
        if __name__ == "__main__":
            print(audit, *(f"open: {cell}" for cell in silent), rows[-1], sep="\n", flush=True)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(2)
    rows = [audit_of_transformer(FULL)] if sys.argv[1:] == ["bert"] else audits(FULL)
    sys.exit(0 if all(row.met for row in rows) else 1)
