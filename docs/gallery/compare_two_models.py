"""Which of two models should I trust? Paired differences on data that neither has seen.

Run: python docs/gallery/compare_two_models.py   (seconds)
"""
# ruff: noqa: T201

import torch
from torch import nn

import spiritlevel as sl

digits = sl.data.load("digits")


def trained(steps: int) -> nn.Module:
    """The same network, trained for longer or shorter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in torch.randint(len(digits.train[1]), (steps, 64)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
        optimiser.step()
    return model


short, long = trained(20), trained(300)
measures = ["trace", "input_distance", "margin_mean"]
comparison = sl.compare(short, long, digits.test, names=("short", "long"), measures=measures)
print(comparison)

# The same function in other coordinates: its trace is different, and the comparison is not fooled.
data = digits.test
scaled = sl.transforms.rescale_layers(long, {"1": 8.0, "3": 1 / 8}, data=data).model
comparison = sl.compare(long, scaled, data, names=("long", "rescaled"), measures=measures)
print(comparison.row("trace"))
print(comparison.advice)
