"""Products of language models with a large vocabulary: peak memory, and time in forward passes, beside the peers.

One sequence of 512 tokens, the loss of the next token, random weights. Every library works in a fresh process: its peak
is that of the process, with Python and torch (0.3 GB), the model, the vector and the product. Times are processor time
of one thread, the best of two products after the first, over a forward pass in the same process; attention is written
out for the peers, whose second derivatives need that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import FULL, Row, Scale, alone, at_most
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import spiritlevel as sl
from spiritlevel.memory import peak_memory

VOCABULARY, LENGTH = 50_304, 512
LARGE, SMALL, TINY = (12, 768), (4, 256), (1, 64)  # layers and width
KINDS = {"hessian": "Hessian product", "gauss_newton": "Gauss-Newton product"}
PEERS = {"curvlinops": "curvlinops", "eigenthings": "hessian-eigenthings"}


class NeoX(nn.Module):
    """A language model like GPT-NeoX: rotary positions on a quarter of a head, attention and MLP side by side, a head
    with weights of its own. Twelve layers of width 768 are the 162 million parameters of Pythia-160m.
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


# ---------------------------------------------------------------- the same product by each library


class NextTokens(nn.Module):
    """Logits as one row for every token that is predicted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)[:, :-1].flatten(0, 1)


def ours(kind: str, model: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    operator = getattr(sl, kind)(model, (ids, ids), loss="causal_lm")
    return lambda v: operator @ v


def curvlinops(kind: str, model: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    import curvlinops as library

    make = library.HessianLinearOperator if kind == "hessian" else library.GGNLinearOperator
    network, batch = NextTokens(model), (ids, ids[:, 1:].flatten())
    parameters = list(network.parameters())
    operator = make(network, nn.CrossEntropyLoss(), parameters, [batch], check_deterministic=False, num_data=1)
    return lambda v: operator @ v


def eigenthings(kind: str, model: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    import hessian_eigenthings as library

    network, labels = NextTokens(model), ids[:, 1:].flatten()
    if kind == "hessian":
        operator = library.HessianOperator(network, [ids], lambda net, x: F.cross_entropy(net(x), labels))
    else:
        operator = library.GGNOperator(
            network, [ids], lambda net, x: net(x), lambda outputs, x: F.cross_entropy(outputs, labels)
        )
    return operator.matvec


def measure(who: str, kind: str, layers: int, width: int, vocabulary: int, length: int) -> dict[str, Any]:
    """In this process: the peak, the cost of a product in forward passes, and two numbers to compare products by."""
    torch.manual_seed(0)
    model = NeoX(layers, width, max(1, width // 64), vocabulary).eval()
    ids = torch.randint(0, vocabulary, (1, length))
    vector = torch.randn(sum(parameter.numel() for parameter in model.parameters()))

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    forwards = [_seconds(forward) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        start = time.process_time()
        product = {"ours": ours, "curvlinops": curvlinops, "eigenthings": eigenthings}[who](kind, model, ids)
        found = product(vector)
        first = time.process_time() - start
        pieces = zip(found.split(2**22), vector.split(2**22), strict=True)  # a copy in float64 would be the peak
        along = sum(float(a.double() @ b.double()) for a, b in pieces)
        form = along, float(torch.linalg.vector_norm(found, dtype=torch.float64))
        del found
        times = [_seconds(lambda: product(vector)) for _ in range(2)]
    return {
        "peak": peak_memory() / 1e9,
        "parameters": len(vector),
        "product": min(times) / min(forwards),
        "first": first / min(forwards),
        "form": form,
    }


def _seconds(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _failed(last: str) -> dict[str, Any]:
    """A row without a number, from the last line that a process printed."""
    missing = last.removeprefix("ModuleNotFoundError: No module named ")
    return {"failed": f"{missing} is not installed" if missing != last else f"failed: {last[:200]}"}


def here(who: str, kind: str, *sizes: int) -> dict[str, Any]:
    """The same in this process, whose peak then says nothing."""
    try:
        return measure(who, kind, *sizes)
    except ModuleNotFoundError as error:
        return _failed(f"ModuleNotFoundError: {error}")


def in_a_process(who: str, kind: str, *sizes: int) -> dict[str, Any]:
    """What `measure` finds in a fresh process; kept in the folder BENCH_PIECES, if that is set, for a run in parts."""
    arguments = [who, kind, *map(str, sizes)]
    folder = os.environ.get("BENCH_PIECES")
    kept = Path(folder) / f"{'-'.join(arguments)}.json" if folder else None
    if kept is not None and kept.exists():
        return json.loads(kept.read_text())
    command, environment = [sys.executable, __file__, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return _failed((done.stderr.strip().splitlines() or ["killed: out of memory?"])[-1])
    found = done.stdout.splitlines()[-1]
    if kept is not None:
        kept.write_text(found)
    return json.loads(found)


def language_models(scale: Scale) -> list[Row]:
    """The large model with our library alone, and a smaller one, which does not take hours, beside the peers."""
    if scale is not FULL:
        return rows_of(TINY, 499, 32, peers=True, find=here)
    return [*rows_of(LARGE, VOCABULARY, LENGTH, bar=12.0), *rows_of(SMALL, VOCABULARY, LENGTH, peers=True)]


def rows_of(
    size: tuple[int, int],
    vocabulary: int,
    length: int,
    *,
    bar: float | None = None,
    peers: bool = False,
    find: Callable[..., dict[str, Any]] = in_a_process,
) -> list[Row]:
    rows = []
    for kind, name in KINDS.items():
        mine = find("ours", kind, *size, vocabulary, length)
        if "failed" in mine:
            rows.append(Row("language models", name, None, note=mine["failed"]))
            continue
        area = f"language model, {mine['parameters'] / 1e6:.0f} M parameters, {vocabulary:,} words"
        note = f"{length} tokens; the first, with its set-up, takes {mine['first']:.0f}"
        peak = (mine["peak"],) * 2
        rows.append(
            alone(area, f"{name}, peak GB", peak)
            if bar is None
            else at_most(area, f"{name}, peak GB", peak, bar, "peak of the whole process")
        )
        rows.append(alone(area, f"{name}, forward passes", (mine["product"],) * 2, note))
        for who, called in PEERS.items() if peers else ():
            rows += peer_rows(area, name, called, find(who, kind, *size, vocabulary, length), mine)
    return rows


def peer_rows(area: str, name: str, called: str, theirs: dict[str, Any], mine: dict[str, Any]) -> list[Row]:
    whats = [f"{called}, {name}, {what}" for what in ("peak GB", "forward passes")]
    if "failed" in theirs:
        return [Row(area, what, None, note=theirs["failed"]) for what in whats]
    error = max(abs(a / b - 1) for a, b in zip(theirs["form"], mine["form"], strict=True))
    note = f"its product differs from ours by {error:.1e}, in size or along v"
    return [alone(area, whats[0], (theirs["peak"],) * 2, note), alone(area, whats[1], (theirs["product"],) * 2)]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
