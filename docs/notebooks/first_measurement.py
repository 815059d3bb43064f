# %% [markdown]
# # A first measurement
#
# A small network on handwritten digits: how flat is its minimum, how wide are its margins, and what are these numbers worth?

# %%
import torch
from torch import nn

import spiritlevel as sl

data = sl.data.load("digits")
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
for batch in torch.randint(len(data.train[1]), (400, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(data.train[0][batch]), data.train[1][batch]).backward()
    optimiser.step()
print(sl.margins(model, data.test))

# %% [markdown]
# One call measures it. It takes 300 random training samples, and every number carries the error of doing so.

# %%
report = sl.measure(model, data.train, test=data.test, samples=300)
print(report)

# %% [markdown]
# Every sample has a curvature of its own. It falls with the margin, over many orders of magnitude:

# %%
sl.plot.traces(report)

# %% [markdown]
# The loss on the plane of the two sharpest directions; the cross is the model.

# %%
sl.plot.landscape(report)

# %% [markdown]
# And what the numbers are worth: each column changes the parameters and keeps what the network computes.

# %%
sl.plot.audit(report)
