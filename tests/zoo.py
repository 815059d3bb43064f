"""Small networks of every kind, in float64: those with exact traces, smooth ones, and those that need probes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode, with random running statistics and affine parameters."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            size = module.num_features
            module.running_mean.copy_(torch.randn(size, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(size, generator=generator))
            if module.affine:
                module.weight.data = torch.randn(size, generator=generator).double()
                module.bias.data = torch.randn(size, generator=generator).double()
    return model


class ReverseOnly(torch.autograd.Function):
    """x² as older code writes it: no forward derivative, and of no use to torch.func."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Residual(nn.Module):
    """Residual sum, concatenation, bare scale and shift, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(10, 3)
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x), inplace=True)
        return self.head(torch.cat([y + self.second(y) * self.scale - self.shift, y], 1))


class SameDepthTwice(nn.Module):
    """One weight used twice at the same depth: linear in it, but the two gradients add up."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.shared(x[:, :3])), F.relu(self.shared(x[:, 3:]))], 1))


class Bare(nn.Module):
    """Matrix products with bare parameters, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.randn(6, 4) / 2), nn.Parameter(torch.randn(3, 4) / 2)
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.inner) @ self.outer.t() + self.offset


class Tokens(nn.Module):
    """Linear layers over tokens, the batch kept as the first dimension or folded into it."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.folded = nn.Linear(2, 4), nn.Linear(4, 3), folded

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 2) if self.folded else x.view(-1, 3, 2)
        return self.outer(F.relu(self.inner(tokens))).view(-1, 3, 3).mean(1)


class SequenceFirst(nn.Module):
    """Tokens in the first dimension, of which there happen to be as many as samples in a small batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x.view(-1, 3, 2).transpose(0, 1)))).mean(0)


class PooledAndSkipped(nn.Module):
    """The first convolution is read by its max pooling and by a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 9 + 3 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x.view(-1, 1, 6, 6))
        return self.head(torch.cat([F.max_pool2d(F.relu(z), 2).flatten(1), z.flatten(1)], 1))


class Words(nn.Module):
    """An embedding with repeated tokens, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.embed(tokens)).sum(1))


class Tied(nn.Module):
    """One weight at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.shared(F.relu(self.shared(x)))))


class Branching(nn.Module):
    """Control flow on the data: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.head(F.relu(y) if y.sum() > 0 else torch.tanh(y))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 3, 4)).mean(1))


def conv_net(first: nn.Module, channels: int, dims: int = 2) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    return nn.Sequential(
        first, nn.ReLU(), conv(channels, 2, 2), nn.ReLU(), pool(2), nn.Flatten(), nn.Linear(2 * 2**dims, 3)
    )


FLAT, IMAGE, LINE, VOLUME, WORDS = (6,), (4, 7, 7), (2, 9), (1, 4, 4, 4), "tokens"

EXACT = {
    "linear": (lambda: nn.Linear(6, 3), FLAT),
    "without bias": (lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)), FLAT),
    "relu in place": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), FLAT),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), FLAT),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 5), nn.PReLU(5), nn.Linear(5, 3)), FLAT),
    "hard functions": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Hardtanh(), nn.Linear(5, 4), nn.Softshrink(0.1), nn.Linear(4, 3)),
        FLAT,
    ),
    "residual": (Residual, FLAT),
    "same depth twice": (SameDepthTwice, FLAT),
    "bare matrices": (Bare, FLAT),
    "tokens": (lambda: Tokens(False), FLAT),
    "tokens in the batch": (lambda: Tokens(True), FLAT),
    "sequence first": (SequenceFirst, FLAT),
    "words": (Words, WORDS),
    "pooled and skipped": (PooledAndSkipped, (36,)),
    "conv": (lambda: conv_net(nn.Conv2d(4, 3, 3), 3), IMAGE),
    "strided, padded": (lambda: conv_net(nn.Conv2d(4, 3, 3, stride=2, padding=1), 3), IMAGE),
    "dilated, same": (lambda: conv_net(nn.Conv2d(4, 3, (3, 2), dilation=(1, 2), padding="same"), 3), IMAGE),
    "grouped, circular": (
        lambda: conv_net(nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="circular"), 4),
        IMAGE,
    ),
    "depthwise": (lambda: conv_net(nn.Conv2d(4, 4, 3, groups=4, bias=False), 4), IMAGE),
    "reflected, batch norm": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(27, 3),
        ),
        IMAGE,
    ),
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(3, 2, 2), nn.MaxPool2d(2),
            nn.ReLU(), nn.Flatten(), nn.Linear(2, 3),
        ),
        IMAGE,
    ),
    "many channels": (lambda: nn.Sequential(
        nn.Conv2d(4, 12, 6), nn.ReLU(), nn.Conv2d(12, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)), IMAGE),
    "transposed": (
        lambda: conv_net(nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1), 3),
        IMAGE,
    ),
    "transposed, grouped": (lambda: conv_net(nn.ConvTranspose2d(4, 4, 2, groups=2, dilation=2), 4), IMAGE),
    "conv 1d": (lambda: conv_net(nn.Conv1d(2, 3, 3, padding=2), 3, 1), LINE),
    "transposed 1d": (lambda: conv_net(nn.ConvTranspose1d(2, 3, 3), 3, 1), LINE),
    "conv 3d": (lambda: conv_net(nn.Conv3d(1, 2, 2, padding=1), 2, 3), VOLUME),
    "upsampled": (
        lambda: nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 3, stride=3), nn.ReLU(), nn.Flatten(),
            nn.Linear(32, 3),
        ),
        IMAGE,
    ),
}  # fmt: skip

CHAINS = {
    "tanh": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 3)), FLAT),
    "gelu, batch norm": (
        lambda: nn.Sequential(
            nn.Linear(6, 5), nn.GELU(), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, 3)
        ),
        FLAT,
    ),
    "elu from images": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.ELU(inplace=True), nn.Dropout(), nn.Linear(4, 3)),
        LINE,
    ),
}

PROBED = {
    "tanh conv": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(21, 3)),
        LINE,
        "tanh",
    ),
    "tied": (Tied, FLAT, "addmm"),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
        FLAT,
        "native_layer_norm",
    ),
    "attention": (Attention, (12,), "bmm"),
    "branching": (Branching, FLAT, "cannot be traced"),
}  # fmt: skip


def sample_data(shape: tuple[int, ...] | str, count: int = 12, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, classes, (count,), generator=generator)
    if shape == WORDS:
        return torch.randint(0, 7, (count, 5), generator=generator), targets
    return torch.randn(count, *shape, generator=generator, dtype=torch.float64), targets


def many_classes(count: int = 30, classes: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes)).double()
    with torch.no_grad():
        model[2].weight *= 4
    return model, sample_data(FLAT, count, classes)
