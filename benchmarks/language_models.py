"""Products of language models with a large vocabulary: peak memory, and time in forward passes, beside the peers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 50_304
LENGTH = 512


class NeoX(nn.Module):
    """A language model like GPT-NeoX: rotary positions on a quarter of a head, attention and MLP side by side, a head
    of its own weights. Twelve layers of width 768 are the 162 million parameters of Pythia-160m.
    """

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(width)
        self.embed_out = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_in(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.embed_out(self.final_layer_norm(x))
        return logits


class Block(nn.Module):
    """x + attention(norm₁(x)) + mlp(norm₂(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)))
        return x + self.attention(self.input_layernorm(x)) + self.dense_4h_to_h(inner)

    def attention(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        parts = self.query_key_value(x).view(count, length, self.heads, 3 * self.size).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        result: Tensor = self.dense(mixed.transpose(1, 2).reshape(count, length, -1))
        return result


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on the first quarter of every head."""
    size = x.shape[-1] // 4
    rates = 10_000.0 ** (-torch.arange(0, size, 2, dtype=x.dtype, device=x.device) / size)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] * rates
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    turned, rest = x[..., :size], x[..., size:]
    half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    return torch.cat([turned * cos + half * sin, rest], -1)
