"""Small transformers of every kind in plain torch: BERT-, GPT-, Llama- and ViT-like ones, and low-rank adapters.

Each is written the way its family is usually written (attention by hand, fused weights, rotary embeddings in their
several notations), so that what is found in them is found in the real ones. All are classifiers of `CLASSES` classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH, CLASSES = 11, 5, 3


def tokens(count: int = 8, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(seed))


def images(count: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(count, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def vectors(count: int = 8, width: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in float64 and eval mode, with every parameter random, gains and biases too."""
    source = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            gain = parameter.ndim == 1 and "bias" not in name
            parameter.copy_(1 + 0.3 * noise if gain else noise / math.sqrt(parameter.shape[-1]))
    return model


# ---------------------------------------------------------------- BERT


class BertLike(nn.Module):
    """Post-norm encoder with separate projections and attention by hand; a pooler with tanh; a padding mask."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2, masked: bool = True) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(LENGTH + 3, width)
        self.norm, self.masked = nn.LayerNorm(width), masked
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.norm(self.word(ids) + self.position(places))
        mask = torch.zeros(ids.shape, dtype=x.dtype)
        if self.masked:
            mask = (ids == 0).to(x.dtype) * torch.finfo(x.dtype).min
            mask = mask.index_fill(1, torch.tensor([0]), 0.0)  # there is always something to look at
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        return self.classifier(F.dropout(torch.tanh(self.pooler(x[:, 0])), 0.1, self.training))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.inner, self.outer, self.norm2 = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )
        self.drop = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size)
        shares = self.drop(F.softmax(scores + mask, dim=-1))
        mixed = torch.matmul(shares, v).permute(0, 2, 1, 3).contiguous()
        mixed = mixed.view(*mixed.size()[:-2], self.heads * self.size)
        x = self.norm1(self.drop(self.dense(mixed)) + x)
        return self.norm2(self.drop(self.outer(F.gelu(self.inner(x)))) + x)


# ---------------------------------------------------------------- GPT


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2 has it."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(into, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.size()[:-1], self.weight.shape[1])


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, alibi: bool) -> None:
        super().__init__()
        self.heads, self.alibi = heads, alibi
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
        self.c_fc, self.c_out = Conv1D(2 * width, width), Conv1D(width, 2 * width)
        causal = torch.tril(torch.ones(LENGTH + 3, LENGTH + 3, dtype=torch.bool))
        self.register_buffer("causal", causal[None, None], persistent=False)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=x.dtype)
        if self.alibi:
            places = torch.arange(length, dtype=x.dtype)
            slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=x.dtype)
            scores = scores + slopes[:, None, None] * (places[None, :] - places[:, None])
        scores = torch.where(self.causal[:, :, :length, :length], scores, torch.finfo(x.dtype).min)
        mixed = torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GptLike(nn.Module):
    """Pre-norm decoder with fused projections; the last position is classified, or `tied` to the words."""

    def __init__(
        self, width: int = 8, heads: int = 2, layers: int = 2, tied: bool = False, alibi: bool = False
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(LENGTH + 3, width)
        self.h = nn.ModuleList(GptBlock(width, heads, alibi) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x)[:, -1])


# ---------------------------------------------------------------- Llama


class RMSNorm(nn.Module):
    """As in Llama: the mean of squares, then the gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotary(x: Tensor, angles: Tensor, style: str) -> Tensor:
    """x (batch, heads, positions, size), angles (positions, size / 2)."""
    cos, sin = angles.cos(), angles.sin()
    if style == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return (x * cos) + (rotate_half(x) * sin)
    if style == "interleaved":
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    if style == "written":
        out = torch.empty_like(x)
        out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
        return out
    if style == "complex":
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    kept = x.shape[-1] // 2  # partial: the rest is not turned
    turned = rotary(x[..., :kept], angles[:, : kept // 2], "half")
    return torch.cat([turned, x[..., kept:]], dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, style: str, attention: str, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.style, self.attention = style, attention
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, width + 2, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width + 2, width, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q_norm, self.k_norm = ((RMSNorm(self.size) if qk_norm else nn.Identity()) for _ in range(2))

    def mix(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.groups, self.size)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        if self.style:
            q, k = rotary(q, angles, self.style), rotary(k, angles, self.style)
        if self.attention == "gqa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            again = self.heads // self.groups
            k, v = (t[:, :, None].expand(-1, -1, again, -1, -1).reshape(batch, -1, length, self.size) for t in (k, v))
            if self.attention == "sdpa":
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            elif self.attention == "einsum":
                mask = torch.triu(torch.full((length, length), -torch.inf, dtype=x.dtype), 1)
                shares = (torch.einsum("bhid,bhjd->bhij", q, k) * self.size**-0.5 + mask).softmax(-1)
                mixed = torch.einsum("bhij,bhjd->bhid", shares, v)
            else:
                mask = torch.triu(torch.full((length, length), -torch.inf, dtype=x.dtype), 1)
                mixed = F.softmax(q @ k.transpose(2, 3) * self.size**-0.5 + mask, dim=-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x), angles)
        inner = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))


class LlamaLike(nn.Module):
    """Pre-norm decoder with RMS norms, rotary embeddings, grouped heads and SwiGLU, without biases."""

    def __init__(
        self,
        width: int = 16,
        heads: int = 4,
        groups: int = 2,
        layers: int = 2,
        style: str = "half",
        attention: str = "by hand",
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed, size = nn.Embedding(WORDS, width), width // heads
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, style, attention, qk_norm) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, CLASSES, bias=False)
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, size, 2) / size))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.outer(torch.arange(ids.shape[1], dtype=x.dtype), self.frequencies)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x)[:, -1])


# ---------------------------------------------------------------- ViT


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.scale * self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class VitLike(nn.Module):
    """Patches by a convolution, a class token, learned positions, fused projections, a scale on each branch."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, width, 2, stride=2)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 5, width))
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class TorchLike(nn.Module):
    """What torch offers: `nn.TransformerEncoder` around `nn.MultiheadAttention`."""

    def __init__(self, width: int = 8, heads: int = 2, layers: int = 1, first: bool = True, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True, norm_first=first)
        if options:
            layer.self_attn = nn.MultiheadAttention(width, heads, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        padding = (ids == 0) & (torch.arange(ids.shape[1]) > 0)
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding).mean(1))


# ---------------------------------------------------------------- attention of other kinds


class OneAttention(nn.Module):
    """One layer of attention on a sequence of vectors; `change` may alter scores, shares or values on the way."""

    def __init__(self, width: int = 6, heads: int = 2, change: str = "", bias: bool = True) -> None:
        super().__init__()
        self.heads, self.change = heads, change
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.sink, self.head = nn.Parameter(torch.zeros(heads)), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.change == "normalised":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.change == "shared":
            k = q
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.change == "capped":
            scores = 5 * torch.tanh(scores / 5)
        if self.change == "sink":
            sink = self.sink.view(1, -1, 1, 1).expand(batch, -1, length, 1)
            shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        elif self.change == "sigmoid":
            shares = torch.sigmoid(scores)
        else:
            shares = scores.softmax(-1)
        mixed = (shares @ v).transpose(1, 2).reshape(batch, length, width)
        if self.change == "also read":
            mixed = mixed + torch.tanh(self.v(x))
        return self.head(self.o(mixed).mean(1))


def sequences(count: int = 8, width: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(count, 4, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- low-rank adapters


class LoraLinear(nn.Module):
    """A frozen layer with a trainable product of two thin matrices beside it, or `merged` into its weight."""

    def __init__(self, into: int, out: int, rank: int = 2, merged: bool = False) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(into, out), merged
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(rank, into)), nn.Parameter(torch.randn(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * (self.lora_b @ self.lora_a), self.base.bias)
        return self.base(x) + F.dropout(x, 0.1, self.training) @ self.lora_a.T @ self.lora_b.T * 0.5


def lora(merged: bool = False) -> nn.Module:
    return nn.Sequential(LoraLinear(6, 5, merged=merged), nn.ReLU(), LoraLinear(5, CLASSES, merged=merged))


class Gated(nn.Module):
    """A gated layer: gate and up fused or apart, with any activation."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu, fused: bool = True) -> None:
        super().__init__()
        self.fused, self.activation = fused, activation
        self.both, self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        self.down = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(up * self.activation(gate))


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "bert": (BertLike, tokens),
    "gpt": (GptLike, tokens),
    "gpt, tied": (lambda: GptLike(tied=True), tokens),
    "gpt, alibi": (lambda: GptLike(alibi=True), tokens),
    "llama": (LlamaLike, tokens),
    "llama, interleaved, sdpa": (lambda: LlamaLike(style="interleaved", attention="sdpa"), tokens),
    "llama, complex, gqa": (lambda: LlamaLike(style="complex", attention="gqa"), tokens),
    "llama, partial, einsum": (lambda: LlamaLike(style="partial", attention="einsum"), tokens),
    "llama, written, one group": (lambda: LlamaLike(style="written", groups=1), tokens),
    "llama, no positions": (lambda: LlamaLike(style=""), tokens),
    "llama, qk norm": (lambda: LlamaLike(qk_norm=True), tokens),
    "vit": (VitLike, images),
    "torch, pre-norm": (TorchLike, tokens),
    "torch, post-norm": (lambda: TorchLike(first=False), tokens),
}
ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "lora": (lora, vectors),
    "lora, merged": (lambda: lora(merged=True), vectors),
}


def transformer(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network of the zoo with random parameters, and inputs for it."""
    build, data = {**TRANSFORMERS, **ADAPTERS}[name]
    torch.manual_seed(seed)
    return settled(build(), seed), data()
