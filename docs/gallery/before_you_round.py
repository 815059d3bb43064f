"""What will rounding the weights cost, which samples will flip, and which layers should keep their bits?

Run: python docs/gallery/before_you_round.py [FOLDER]   (seconds)
"""
# ruff: noqa: T201

import sys
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl

digits = sl.data.load("digits")


def trained(steps: int) -> nn.Module:
    """A network with three layers, trained for longer or shorter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.005)
    for batch in torch.randint(len(digits.train[1]), (steps, 64)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
        optimiser.step()
    return model


# One change, predicted and then made: the loss, the flips, every layer alone.
model = trained(300)
found = sl.perturb(model, digits.test, "int3", name="digits", classes=tuple(digits.classes))
print(found)
page = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "int3.html"
found.to_html(page)
print(f"The page: {page}")

# The layers that cost the most keep their bits; the size is that of three bits for all.
print(sl.choose_bits(model, digits.train, 3.0, test=digits.test))

# Which checkpoint to take, as it is and after rounding.
print(sl.rank({f"step {steps}": trained(steps) for steps in (60, 300, 900)}, digits.test, under="int3"))
