"""Measure a model of your own: one call, one page.

Run: python docs/gallery/own_model.py [FOLDER]   (seconds; writes report.html and report.json)
"""
# ruff: noqa: T201

import sys
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/gallery/own_model")

# Your model, trained as you always do.
torch.manual_seed(0)
digits = sl.data.load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in torch.randint(len(digits.train[1]), (200, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
    optimiser.step()

# A random subset of 200 samples is measured; the report says so, and every number carries the error of doing so.
report = sl.measure(
    model,
    digits.train,
    test=digits.test,
    measures=["trace", "largest_eigenvalue", "fisher_rao_norm", "margin_mean"],
    samples=200,
    classes=digits.classes,
    name="a small network",
)
print(report)
report.to_json(folder / "report.json")
report.to_html(folder / "report.html")
print(f"The page: {folder / 'report.html'}")
