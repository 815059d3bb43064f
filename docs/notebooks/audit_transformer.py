# %% [markdown]
# # The audit of a transformer
#
# Attention heads, norms and biases can be changed without changing what a transformer computes. Which of its flatness numbers survive?

# %%
import torch
from torch import nn

import spiritlevel as sl


class Classifier(nn.Module):
    """The rows of a picture are the words of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(pictures.reshape(-1, 8, 8))).mean(1))


torch.manual_seed(0)
digits = sl.data.load("digits")
model = Classifier()
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
for batch in torch.randint(len(digits.train[1]), (150, 64)):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
    optimiser.step()
model.eval()
print(sl.margins(model, digits.test))

# %% [markdown]
# The audit finds the symmetries in the running network, applies each, certifies that the outputs stayed, and measures again.

# %%
few = digits.test[0][:50], digits.test[1][:50]
measures = ["fisher_rao_norm", "adaptive_sharpness_average", "weight_norm", "signal_sharpness", "margin_mean"]
audit = sl.audit(model, few, measures=measures)
print(audit.certificates["mix_heads"])
sl.plot.audit(audit)

# %% [markdown]
# The same function with other matrices in its heads: nothing speaks for one of the two, and the comparison says so.

# %%
other = sl.transforms.mix_heads(model, data=few, size=100.0).model
print(sl.compare(model, other, few, names=("trained", "mixed"), measures=measures).advice)

# %% [markdown]
# Along random directions with normalised filters the two look different, although they are the same function:

# %%
sl.plot.landscape({"trained": model, "mixed": other}, few, directions="random", points=21, radius=0.5)
