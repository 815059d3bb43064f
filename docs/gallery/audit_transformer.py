"""Which flatness numbers of a transformer survive the symmetries that it has?

Run: python docs/gallery/audit_transformer.py   (half a minute)
"""
# ruff: noqa: T201

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

data = digits.test[0][:50], digits.test[1][:50]
measures = ["fisher_rao_norm", "adaptive_sharpness_average", "weight_norm", "signal_sharpness", "margin_mean"]
found = sl.audit(model, data, measures=measures)
print(found)
print(found.certificates["mix_heads"])

# the same function with other matrices in its heads: nothing here favours either of the two
other = sl.transforms.mix_heads(model, data=data, size=100.0).model
print(sl.compare(model, other, data, names=("trained", "mixed"), measures=measures).advice)
