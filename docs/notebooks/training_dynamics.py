# %% [markdown]
# # Training dynamics
#
# Curvature while a network learns, the path that it takes, and the samples that it learns last.

# %%
import math

import torch
from torch import nn

import spiritlevel as sl

data = sl.data.load("digits")
labels = data.train[1].clone()
wrong = torch.arange(0, len(labels), 20)
labels[wrong] = (labels[wrong] + 3) % 10  # every 20th label is wrong

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tracker = sl.Tracker(model, (data.train[0], labels), every=40, optimizer=optimiser, samples=200, share=math.inf)
recorder = sl.Recorder((data.train[0], labels), classes=data.classes)
checkpoints = []
for epoch in range(12):
    checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for ids in torch.randperm(len(labels)).split(64):
        optimiser.zero_grad()
        logits = model(data.train[0][ids])
        nn.functional.cross_entropy(logits, labels[ids]).backward()
        optimiser.step()
        recorder.record(logits, labels[ids], ids)
        tracker.step()
print(tracker)

# %%
sl.plot.training(tracker)

# %% [markdown]
# The checkpoints span a plane; the loss on it, with the path that the training took:

# %%
few = data.train[0][:300], labels[:300]
sl.plot.landscape(model, few, trajectory=checkpoints, points=21)

# %% [markdown]
# A step sees the curvature of its batch, which is larger than that of all data:

# %%
print(sl.eigenvalues(sl.hessian(model, few), k=1))
sl.plot.spectrum(sl.batch_eigenvalues(model, few, batch_size=32))

# %% [markdown]
# Samples that were learnt late and against their neighbours come first; every 20th label is wrong here.

# %%
first = recorder.order("aum")[: len(wrong)]
print(f"{int((first % 20 == 0).sum())} of {len(wrong)} wrong labels are among the first {len(wrong)}")
print(recorder.suspects(5))
