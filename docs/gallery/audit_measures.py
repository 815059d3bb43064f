"""Which flatness numbers survive when the function stays the same?

Run: python docs/gallery/audit_measures.py   (seconds)
"""
# ruff: noqa: T201

import torch
from torch import nn

import spiritlevel as sl

torch.manual_seed(0)
digits = sl.data.load("digits")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in torch.randint(len(digits.train[1]), (200, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
    optimiser.step()

data = digits.test[0][:100], digits.test[1][:100]
measures = ["trace", "layer_scaled_trace", "fisher_rao_norm", "path_norm", "margin_mean", "input_distance"]
found = sl.audit(model, data, measures=measures)
print(found)
print(found.certificates["rescale_layers"])
