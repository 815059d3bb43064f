"""The three lines of the README and the figures that follow from them, on built-in data; a minute on two cores.

Run: python examples/first_measurement.py [FOLDER]   (output as kept in examples/output)
"""
# ruff: noqa: T201

import sys
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/output")
digits = sl.data.load("digits")
train, test = digits.train, digits.test
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
for batch in torch.randint(len(train[1]), (400, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(train[0][batch]), train[1][batch]).backward()
    optimiser.step()

report = sl.measure(model, train, test=test)
text = "\n".join(report.headline)
print(text)

folder.mkdir(parents=True, exist_ok=True)
(folder / "headline.txt").write_text(text + "\n", encoding="utf-8")
(folder / "report.txt").write_text(str(report) + "\n", encoding="utf-8")
sl.plot.save(sl.plot.traces(report), folder / "traces.svg")
sl.plot.save(sl.plot.landscape(report), folder / "landscape.svg")
sl.plot.save(sl.plot.audit(report), folder / "audit.svg", size="page")
