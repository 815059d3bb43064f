"""Per-sample traces by probes on transformers and a smooth ResNet-18, in forward passes per probe, errors included.

Processor time on one thread, a forward pass and a whole call of `sample_traces` in turns, so that other work on the
machine slows both alike.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import FULL, Row, Scale, at_most
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl

WORDS, LENGTH, CLASSES, PROBES = 2000, 64, 10, 64


class Attention(nn.Module):
    """Attention by hand, or by torch's own function; causal or not."""

    def __init__(self, width: int, heads: int, *, fused: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.inward(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if self.causal:
                later = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, torch.finfo(x.dtype).min)
            mixed = scores.softmax(-1) @ v
        return self.outward(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a layer with GELU, each with its norm before (`first`) or after it."""

    def __init__(self, width: int, heads: int, *, first: bool, **options: Any) -> None:
        super().__init__()
        self.first, self.attention = first, Attention(width, heads, **options)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip((self.attention, self.dense), self.norms, strict=True):
            x = x + part(norm(x)) if self.first else norm(x + part(x))
        return x


class Transformer(nn.Module):
    """BERT-, GPT- or ViT-like: post-norm over words, causal pre-norm over words, pre-norm over patches."""

    def __init__(self, kind: str, width: int, layers: int) -> None:
        super().__init__()
        self.kind = kind
        self.into: nn.Module = nn.Embedding(WORDS, width)
        if kind == "ViT":
            self.into = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(1, LENGTH, width))
        options = {"first": kind != "BERT", "fused": kind == "ViT", "causal": kind == "GPT"}
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), **options) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = x.flatten(2).transpose(1, 2) if self.kind == "ViT" else x
        x = self.norm(self.blocks(x + self.places))
        return self.head(x[:, -1] if self.kind == "GPT" else x.mean(1))


def resnet18(width: int = 64, activation: type[nn.Module] = nn.GELU, classes: int = CLASSES) -> nn.Module:
    """ResNet-18 for images of 32 by 32, with GELU for ReLU by default; 11.2 million parameters at full width."""

    def convolution(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]

    layers, inputs = [*convolution(3, width, 3, 1), activation()], width
    for outputs, stride in [
        (2**stage * width, 2 if stage and not again else 1) for stage in range(4) for again in (0, 1)
    ]:
        body = nn.Sequential(
            *convolution(inputs, outputs, 3, stride), activation(), *convolution(outputs, outputs, 3, 1)
        )
        same = stride == 1 and inputs == outputs
        shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))
        layers += [sl.models.Residual(body, shortcut), activation()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def processor_time(function: Callable[[], Any]) -> float:
    gc.collect()
    gc.freeze()  # a collection halfway through would scan everything ever imported
    start = time.process_time()
    function()
    return time.process_time() - start


def row(area: str, model: nn.Module, inputs: Tensor, bar: float) -> Row:
    """One network: a minute or two for all its probes, so one round has to do."""
    model = model.eval()
    targets = torch.arange(len(inputs)) % CLASSES
    few = inputs[:2], targets[:2]
    sl.sample_traces(model, few, method="hutchinson", probes=2)  # what is loaded at the first call

    def forward() -> None:
        with torch.no_grad():
            model(inputs)

    forward()
    before = min(processor_time(forward) for _ in range(3))
    start = time.process_time()
    found = sl.sample_traces(model, (inputs, targets), method="hutchinson", probes=PROBES)
    spent = time.process_time() - start
    ratio = spent / PROBES / min(before, *(processor_time(forward) for _ in range(3)))
    size = sum(parameter.numel() for parameter in model.parameters())
    note = f"{size / 1e6:.1f} M parameters, {len(inputs)} samples, {PROBES} probes in {found.dof + 1:.0f} groups"
    note = "; ".join([note, *found.notes])
    return at_most(area, "forward passes per probe", (ratio, ratio), bar, note)


def probes(scale: Scale) -> list[Row]:
    full = scale is FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples, width, layers = (32, 384, 4) if full else (2, 64, 1)
    rows = []
    try:
        for kind in ("BERT", "GPT", "ViT"):
            words = torch.randint(0, WORDS, (samples, LENGTH))
            inputs = torch.randn(samples, 3, 32, 32) if kind == "ViT" else words
            rows.append(row(f"probes, {kind}-like", Transformer(kind, width, layers), inputs, 3.5))
        network = resnet18(64 if full else 4)
        rows.append(row("probes, ResNet-18, GELU", network, torch.randn(samples, 3, 32, 32), 5.0))
    finally:
        torch.set_num_threads(threads)
    return rows
