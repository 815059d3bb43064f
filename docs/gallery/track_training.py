"""Curvature and margins while a network trains, in a plain loop.

Run: python docs/gallery/track_training.py [FOLDER]   (seconds; writes curves.parquet, curves.svg and curves.png)
"""
# ruff: noqa: T201

import math
import sys
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/gallery/track_training")

torch.manual_seed(0)
digits = sl.data.load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

# share=math.inf: this training takes a second, too short to hide eight measurements in a tenth of it.
tracker = sl.Tracker(model, digits.train, every=50, share=math.inf, path=folder / "curves.parquet")
for batch in torch.randint(len(digits.train[1]), (400, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
    optimiser.step()
    tracker.step()

print(tracker)
print(tracker.frame().select("step", "loss", "trace", "largest_eigenvalue", "margin_mean"))
tracker.save(folder / "curves")
