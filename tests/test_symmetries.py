"""Transforms found in the running network: certificates on nets of every kind, what moves, what is refused and why."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import random_networks
import torch
import zoo
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transform_nets import SMALL, outputs, small_net
from zoo_transformers import (
    ADAPTERS,
    TRANSFORMERS,
    BertLike,
    Gated,
    GptLike,
    LlamaLike,
    OneAttention,
    TorchLike,
    images,
    lora,
    sequences,
    settled,
    tokens,
    transformer,
    vectors,
)

from spiritlevel.errors import InputError
from spiritlevel.results import Certificate
from spiritlevel.transforms import (
    Transformed,
    mix_heads,
    mix_linear,
    permute_units,
    rotate_stream,
    scale_gate,
    shift_attention_biases,
    shift_logits,
    shift_norm_gain,
    split_units,
)

Transform = Callable[..., Transformed]


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    with torch.no_grad():
        yield


ALL: tuple[Transform, ...] = (
    shift_logits,
    permute_units,
    split_units,
    shift_norm_gain,
    scale_gate,
    mix_linear,
    mix_heads,
    shift_attention_biases,
    rotate_stream,
)
UNITS = {shift_logits, permute_units, split_units}
ENCODER = UNITS | {shift_norm_gain, mix_heads, shift_attention_biases}
LLAMA = UNITS | {shift_norm_gain, scale_gate, mix_heads, rotate_stream}

# What every kind of network has; everything else must be refused.
PLAIN: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], set[Transform]]] = {
    **{
        name: (lambda name=name: small_net(name), UNITS | more)
        for name, more in {
            "mlp": set(),
            "batch norm": {shift_norm_gain},
            "residual": {shift_norm_gain},
        }.items()
    },
    "joined": (lambda: small_net("joined"), {shift_logits, permute_units}),  # groups of two cannot be split
    **{
        name: (lambda name=name: zoo_net(name), UNITS | more)
        for name, more in {
            "without bias": set(),
            "prelu": set(),
            "residual": {shift_norm_gain},
            "same depth twice": set(),
            "bare matrices": set(),
            "sequence first": set(),
            "grouped, circular": set(),
            "depthwise": set(),
            "reflected, batch norm": {shift_norm_gain},
            "transposed, grouped": set(),
            "conv 3d": set(),
            "upsampled": set(),
            "gelu, batch norm": set(),
        }.items()
    },
    "linear": (lambda: zoo_net("linear"), {shift_logits}),
    "tied": (lambda: zoo_net("tied"), {shift_logits}),
    "layer norm": (lambda: zoo_net("layer norm"), {shift_logits, permute_units, shift_norm_gain}),
}
EXPECTED: dict[str, set[Transform]] = {
    **dict.fromkeys((name for name in TRANSFORMERS if not name.startswith("llama")), ENCODER),
    **dict.fromkeys((name for name in TRANSFORMERS if name.startswith("llama")), LLAMA),
    "gpt, tied": ENCODER - {shift_logits},
    "lora": UNITS | {mix_linear},
    "lora, merged": {mix_linear},
}


def zoo_net(name: str) -> tuple[nn.Module, Tensor]:
    build, shape, *_ = {**zoo.EXACT, **zoo.CHAINS, **zoo.PROBED}[name]
    torch.manual_seed(0)
    return zoo.randomised(build()), zoo.sample_data(shape)[0]


def distance(result: Transformed, model: nn.Module, x: Tensor) -> float:
    """How far two models are apart, relative to the outputs; of their probabilities if only these are promised."""
    before, after = outputs(model, x), outputs(result.model, x)
    if result.certificate.keeps == "probabilities":
        before, after = before.log_softmax(-1), after.log_softmax(-1)
    return float((after - before).abs().max() / before.abs().max())


def check(model: nn.Module, x: Tensor, fresh: Tensor, transform: Transform, expected: set[Transform]) -> None:
    if transform not in expected:
        with pytest.raises(InputError, match=rf"^{transform.__name__}: (this network|no |the logits)") as refusal:
            transform(model, data=x)
        assert "changed by" not in str(refusal.value)  # refused for what is there, not for what came out
        return
    result = transform(model, data=x)
    bound = 1e-14 * 10  # times the condition of the maps
    assert result.certificate.relative_difference <= bound
    assert distance(result, model, fresh) <= bound
    before, after = list(model.parameters()), list(result.model.parameters())
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, after, strict=False))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_networks_keep_their_function_and_lack_what_they_lack(name: str) -> None:
    build, expected = PLAIN[name]
    torch.manual_seed(0)
    model, x = build()
    for transform in ALL:
        check(model, x, x.flip(0) if not x.is_floating_point() else 3 * x.flip(0) + 1, transform, expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_transformers_keep_their_function_and_lack_what_they_lack(name: str) -> None:
    model, x = transformer(name)
    fresh = {**TRANSFORMERS, **ADAPTERS}[name][1](12, seed=7)  # type: ignore[call-arg]
    for transform in ALL:
        check(model, x, fresh, transform, EXPECTED[name])


@pytest.mark.parametrize("transform", [permute_units, mix_heads, shift_attention_biases, shift_norm_gain])
def test_words_and_positions_that_the_data_lack_are_mapped_too(transform: Transform) -> None:
    torch.manual_seed(0)
    model = settled(GptLike())
    result = transform(model, data=tokens(4, 3).clamp(max=4))
    assert distance(result, model, tokens(9, 8)) < 1e-13  # longer, with other words


def test_a_rotated_stream_turns_words_that_the_data_lack() -> None:
    torch.manual_seed(0)
    model = settled(LlamaLike())
    result = rotate_stream(model, data=tokens(4, 3).clamp(max=4))
    assert distance(result, model, tokens(9, 8)) < 1e-13


@pytest.mark.filterwarnings("ignore")  # what the networks themselves say
@pytest.mark.parametrize("index", range(25))
def test_random_networks_are_refused_or_keep_their_function(index: int) -> None:
    """Nothing is invented: a network is never refused because its outputs turned out to be others."""
    program = random_networks.draw(5, index) | {"dtype": "float64"}
    model, data = random_networks.network(program), random_networks.data(program)
    said: list[str] = []
    for transform in ALL:
        try:
            result = transform(model, data=data)
        except InputError as error:
            said.append(str(error))
        else:
            assert result.certificate.relative_difference < 1e-12
    assert not any("changed by" in text for text in said)


# ---------------------------------------------------------------- what is promised about every one of them

HAS: dict[Transform, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **dict.fromkeys((shift_logits, permute_units, split_units, shift_norm_gain), (GptLike, tokens)),
    **dict.fromkeys((mix_heads, shift_attention_biases), (BertLike, tokens)),
    **dict.fromkeys((scale_gate, rotate_stream), (LlamaLike, tokens)),
    mix_linear: (lora, vectors),
}


def has(transform: Transform) -> tuple[nn.Module, Tensor]:
    build, data = HAS[transform]
    torch.manual_seed(0)
    return settled(build()), data()


@pytest.mark.parametrize("transform", ALL)
def test_the_original_is_untouched_and_the_copy_keeps_its_state(transform: Transform, untouched: Untouched) -> None:
    model, x = has(transform)
    model.train()
    next(model.parameters()).requires_grad_(False)
    handle = model.register_forward_hook(lambda *_: None)
    with untouched(model):
        result = transform(model, data=x)
    assert result.model is not model
    assert result.model.training
    assert not next(result.model.parameters()).requires_grad
    assert type(result.model) is type(model)
    handle.remove()


@pytest.mark.parametrize("transform", ALL)
def test_a_seed_decides_everything(transform: Transform) -> None:
    model, x = has(transform)
    state = torch.get_rng_state()
    first, again, other = (transform(model, data=x, seed=seed).model for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(a.shape == c.shape and torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("transform", ALL)
def test_float32_models_are_certified_as_they_are_rounded(transform: Transform) -> None:
    model, x = has(transform)
    result = transform(model.float(), data=x)
    assert all(p.dtype == torch.float32 for p in result.model.parameters())
    rounded = result.certificate.relative_difference
    assert rounded < 1e-14 if transform is permute_units else 1e-9 < rounded < 1e-4
    assert result.certificate.samples == len(x)


def test_half_precision_models_are_certified() -> None:
    model, x = has(shift_norm_gain)
    result = shift_norm_gain(model.to(torch.bfloat16), data=x, size=2.0)
    assert all(p.dtype == torch.bfloat16 for p in result.model.parameters())
    assert result.certificate.relative_difference < 0.1


class Answer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return types.SimpleNamespace(logits=self.last(torch.tanh(self.first(x) * scale)))


def test_data_and_outputs_come_in_all_their_forms() -> None:
    model, x, y = Answer().double(), torch.randn(6, 3).double(), torch.zeros(6, dtype=torch.int64)
    scale = torch.rand(6, 1).double()
    batches = DataLoader(TensorDataset(x, scale), batch_size=4)
    for data in ([({"x": a, "scale": b}, y[: len(a)]) for a, b in batches], ({"x": x, "scale": scale}, y)):
        result = permute_units(model, data=data)
        assert torch.allclose(result.model(x, scale).logits, model(x, scale).logits)
    assert result.certificate.samples == 6


def test_a_certificate_says_what_stays_and_is_kept_as_json() -> None:
    model, x = small_net("mlp")
    kept, moved = mix_free(model, x), shift_logits(model, data=x).certificate
    assert (kept.keeps, kept.preserves, kept.scale) == ("outputs", "function", 1.0)
    assert (moved.keeps, moved.scale) == ("probabilities", 1.0)
    assert "cross entropy" in moved.preserves
    assert "log probabilities differ by at most" in str(moved)
    assert Certificate.from_json(moved.to_json()) == moved


def mix_free(model: nn.Module, x: Tensor) -> Certificate:
    return permute_units(model, data=x).certificate


SIZES = {
    mix_linear: ("condition number", (0.5, -1, math.inf, math.nan, True, "10")),
    shift_norm_gain: ("condition number", (0.9,)),
    scale_gate: ("condition number", (0,)),
    mix_heads: ("condition number", (0.1,)),
    shift_logits: ("length of the shift", (0, -1, math.nan, True)),
    shift_attention_biases: ("length of the shift", (0.0,)),
    split_units: ("share of units", (0, 1.5)),
}


@pytest.mark.parametrize("transform", SIZES)
def test_sizes_that_mean_nothing_are_refused(transform: Transform) -> None:
    model, x = has(transform)
    words, sizes = SIZES[transform]
    for size in sizes:
        with pytest.raises(InputError, match=f"{transform.__name__}: size= is .*{words}|size must be a finite number"):
            transform(model, data=x, size=size)


def test_data_and_seed_must_be_there() -> None:
    model, x = small_net("mlp")
    with pytest.raises(InputError, match="permute_units needs data="):
        permute_units(model, data=None)
    with pytest.raises(InputError, match="seed must be a whole number"):
        permute_units(model, data=x, seed=-1)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got str"):
        permute_units("net", data=x)  # type: ignore[arg-type]


# ---------------------------------------------------------------- logits


def test_every_logit_takes_the_same_shift_of_the_length_asked_for() -> None:
    model, x = small_net("mlp")
    result = shift_logits(model, data=x, size=2.0)
    added = outputs(result.model, x) - outputs(model, x)
    assert torch.allclose(added, added[:, :1].expand_as(added))
    assert float(added.abs().max()) > 0.1
    last = [torch.cat([net[-1].weight, net[-1].bias[:, None]], 1) for net in (model, result.model)]
    assert math.isclose(float((last[1] - last[0]).norm()), 2 * float(last[0].norm()))
    assert set(result.certificate.factors.values()) == {1.0}
    assert not result.linear


def test_log_softmax_at_the_end_keeps_the_outputs_themselves() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(-1)).double()
    result = shift_logits(model, data=torch.randn(5, 4))
    assert result.certificate.keeps == "outputs"
    assert not torch.equal(result.model[0].weight, model[0].weight)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Conv2d(1, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + 0.5 * self.b(x.view(-1, 1, 2, 2)).mean((2, 3))


def test_layers_that_are_added_are_all_shifted() -> None:
    model = TwoHeads().double()
    result = shift_logits(model, data=torch.randn(5, 4))
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), result.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Linear(4, 1), "at least two logits"),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), "ends in the operation 'tanh' at '1'"),
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.Flatten()), "'flatten' at '2'"),
    ],
)
def test_logits_that_cannot_be_shifted(model: nn.Module, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        shift_logits(model.double(), data=torch.randn(5, 4))


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("name", ["mlp", "batch norm", "residual", "joined"])
def test_permuted_parameters_are_the_old_ones_in_another_order(name: str) -> None:
    model, x = small_net(name)
    result = permute_units(model, data=x)
    for (key, before), after in zip(model.state_dict().items(), result.model.state_dict().values(), strict=True):
        assert torch.equal(before.flatten().sort().values, after.flatten().sort().values), key
    assert result.linear


def test_a_split_unit_becomes_two_that_share_its_outgoing_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    new = split_units(model, data=torch.randn(5, 3), size=1.0).model
    assert torch.equal(new[0].weight, model[0].weight.repeat_interleave(2, 0))
    assert torch.equal(new[0].bias, model[0].bias.repeat_interleave(2))
    assert torch.allclose(new[2].weight[:, ::2] + new[2].weight[:, 1::2], model[2].weight)
    shares = new[2].weight[:, ::2] / model[2].weight
    assert torch.allclose(shares, shares[:1].expand_as(shares))
    assert float(shares.min()) > 0.2
    assert float(shares.max()) < 0.8


@pytest.mark.parametrize(("size", "count"), [(0.01, 1), (0.25, 2), (0.5, 4), (1, 8)])
def test_the_share_of_split_units(size: float, count: int) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    result = split_units(model, data=torch.randn(5, 3), size=size)
    assert result.model[0].out_features == result.model[2].in_features == 8 + count
    noun = "1 unit" if count == 1 else f"{count} units"
    assert result.certificate.notes == (f"{noun} became two; 50 parameters became {50 + 6 * count}",)


class _Concatenated(nn.Module):
    """Two layers side by side, which one layer reads together with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, 4), nn.Linear(3, 2), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, torch.tanh(self.a(x)), torch.relu(self.b(x))], 1))


def test_units_are_split_that_one_layer_reads_side_by_side() -> None:
    model = _Concatenated().double()
    result = split_units(model, data=torch.randn(5, 3), size=1.0)
    assert tuple(result.model.last.weight.shape) == (2, 3 + 8 + 4)
    points = torch.randn(20, 3).double()
    assert torch.allclose(result.model(points), model(points), rtol=1e-12)


def test_channels_are_split_with_all_their_positions_and_statistics() -> None:
    model, x = small_net("residual")
    grown = split_units(model, data=x, size=1.0).model
    assert sum(p.numel() for p in grown.parameters()) > sum(p.numel() for p in model.parameters())
    deep = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 4, 1, groups=4), nn.ReLU(), nn.Flatten()
    ).append(nn.Linear(64, 3))
    deep = zoo.randomised(deep)
    new = split_units(deep, data=torch.randn(5, 2, 6, 6), size=0.5).model
    shapes = [new[0].out_channels, new[1].num_features, new[2].num_parameters, new[3].groups, new[6].in_features]
    assert shapes == [6, 6, 6, 6, 96]
    fresh = torch.randn(3, 2, 6, 6).double()
    assert torch.allclose(new(fresh), deep(fresh))


class FixedWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).view(-1, 2, 2).flatten(1))


def test_a_width_that_only_later_samples_fix_is_left_as_it_is() -> None:
    """Layers are tried on two samples, and all that work there together on all of them."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.first(x))
            if len(x) > 2:
                hidden = hidden.view(-1, 4)
            return self.last(torch.relu(self.second(hidden)))

    torch.manual_seed(0)
    split = split_units(Late(), data=torch.randn(6, 3)).model
    assert split.first.out_features == 4
    assert split.second.out_features == 6


def test_a_width_in_the_networks_own_code_is_refused() -> None:
    with pytest.raises(InputError, match=r"no layer of this network can change its width, which its own code"):
        split_units(FixedWidth(), data=torch.randn(5, 3))


# ---------------------------------------------------------------- norms, gates, linear maps


class WrittenOut(nn.Module):
    """A layer norm in its elementary operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.gain, self.shift = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        centred = h - h.mean(-1, keepdim=True)
        normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.last(F.relu(self.gain * normed + self.shift))


def test_a_norm_that_is_written_out_has_a_gain() -> None:
    model, x = WrittenOut().double(), torch.randn(5, 3).double()
    factors = shift_norm_gain(model, data=x, size=7.0).certificate.factors
    assert factors is not None
    c = factors["gain"]
    assert torch.equal(factors["shift"], c)
    assert torch.allclose(factors["last.weight"] * c, torch.ones(2, 4).double())
    assert factors["first.weight"] == 1.0
    assert math.isclose(float(c.max() / c.min()), 7.0)
    assert float(c.min()) > 0


@pytest.mark.parametrize("fused", [True, False])
def test_gates_of_either_layout(fused: bool) -> None:
    for activation in (F.gelu, F.silu, torch.sigmoid):
        model, x = Gated(activation, fused).double(), vectors()
        result = scale_gate(model, data=x)
        factors = result.certificate.factors
        assert factors is not None
        up = factors["both.weight"][4:] if fused else factors["up.weight"]
        gate = factors["both.weight"][:4] if fused else factors["gate.weight"]
        assert torch.allclose(factors["down.weight"] * up[:, 0], torch.ones(3, 4).double())
        assert bool((torch.as_tensor(gate) == 1).all())
        assert math.isclose(float(up.abs().max() / up.abs().min()), 10.0)
    signs = [scale_gate(model, data=x, seed=seed).model.down.weight.sign() for seed in range(4)]
    assert any(not torch.equal(sign, signs[0]) for sign in signs)


def test_the_matrix_between_two_linear_maps_has_the_condition_asked_for() -> None:
    model, x = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double(), torch.randn(8, 9)
    new = mix_linear(model, data=x, size=30.0).model
    between = new[0].weight @ torch.linalg.pinv(model[0].weight)
    assert math.isclose(float(torch.linalg.cond(between)), 30.0, rel_tol=1e-9)
    assert torch.allclose(new[0].bias, between @ model[0].bias)
    assert torch.allclose(new[1].weight @ between, model[1].weight)
    assert torch.equal(new[3].weight, model[3].weight)


class Streams(nn.Module):
    """Two linear maps that a sum ties, with a stride, a mean and a bare bias on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.bias = nn.Conv1d(2, 4, 3), nn.Conv1d(2, 4, 3), nn.Parameter(torch.randn(4, 1))
        self.one, self.two = nn.Conv1d(4, 3, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.a(x) + 2 * self.b(x))[:, :, ::2] + self.bias
        return self.one(F.avg_pool1d(h, 2)).mean(-1) + self.two(h.mean(-1))


def test_linear_maps_that_a_sum_ties_take_the_same_matrix() -> None:
    model, x = Streams().double(), torch.randn(5, 2, 11).double()
    result = mix_linear(model, data=x)
    assert distance(result, model, x) < 1e-13
    between = result.model.bias @ torch.linalg.pinv(model.bias)
    assert torch.allclose(between @ model.bias, result.model.bias)
    for a, b in zip(model.parameters(), result.model.parameters(), strict=True):
        assert a.shape == (3,) or not torch.equal(a, b)  # all but the last biases


def test_an_embedding_is_a_linear_map() -> None:
    model = nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 4), nn.Flatten(), nn.Linear(20, 3)).double()
    result = mix_linear(model, data=tokens())
    assert not torch.equal(result.model[0].weight, model[0].weight)
    assert distance(result, model, tokens(20, seed=3)) < 1e-13


# ---------------------------------------------------------------- attention


def test_heads_take_any_invertible_matrix_between_queries_and_keys_and_behind_values() -> None:
    torch.manual_seed(0)
    model, x = settled(OneAttention()), sequences()
    new = mix_heads(model, data=x, size=20.0).model
    for rows in (slice(0, 3), slice(3, 6)):
        matrices = {
            name: getattr(new, name).weight[rows] @ torch.linalg.pinv(getattr(model, name).weight[rows])
            for name in "qkv"
        }
        assert torch.allclose(matrices["q"].T @ matrices["k"], torch.eye(3).double())
        for name, matrix in matrices.items():
            assert math.isclose(float(torch.linalg.cond(matrix)), 20.0, rel_tol=1e-6)
            assert torch.allclose(getattr(new, name).bias[rows], matrix @ getattr(model, name).bias[rows])
        assert torch.allclose(new.o.weight[:, rows] @ matrices["v"], model.o.weight[:, rows])
    assert torch.equal(new.o.bias, model.o.bias)


def test_grouped_heads_share_their_matrices() -> None:
    torch.manual_seed(0)
    model = settled(LlamaLike(width=8, heads=4, groups=2, layers=1, style=""))
    new = mix_heads(model, data=tokens()).model
    old_layer, layer = model.layers[0], new.layers[0]

    def matrix(name: str, head: int) -> Tensor:
        rows = slice(2 * head, 2 * head + 2)
        return getattr(layer, name).weight[rows] @ torch.linalg.pinv(getattr(old_layer, name).weight[rows])

    for group in range(2):
        first, second, key = matrix("q_proj", 2 * group), matrix("q_proj", 2 * group + 1), matrix("k_proj", group)
        assert torch.allclose(first, second)
        assert torch.allclose(first.T @ key, torch.eye(2).double())
    assert not torch.allclose(matrix("k_proj", 0), matrix("k_proj", 1))


PAIRS = {
    "half": lambda i: (i, i + 4),
    "interleaved": lambda i: (2 * i, 2 * i + 1),
    "complex": lambda i: (2 * i, 2 * i + 1),
}


@pytest.mark.parametrize("style", ["half", "interleaved", "complex", "written"])
def test_rotary_embeddings_leave_scaled_rotations_of_each_pair(style: str) -> None:
    torch.manual_seed(0)
    model = settled(LlamaLike(width=16, heads=2, groups=1, layers=1, style=style))
    new = mix_heads(model, data=tokens()).model
    maps = {
        name: getattr(new.layers[0], name).weight[:8] @ torch.linalg.pinv(getattr(model.layers[0], name).weight[:8])
        for name in ("q_proj", "k_proj", "v_proj")
    }
    rest = maps["q_proj"].clone()
    for index in range(4):
        pair = [index, index + 4] if style == "half" else [2 * index, 2 * index + 1]
        block = maps["q_proj"][pair][:, pair]
        factor, angle = torch.linalg.det(block).sqrt(), torch.atan2(block[1, 0], block[0, 0])
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
        assert torch.allclose(block, factor * turn)
        assert abs(float(angle)) > 1e-3
        assert torch.allclose(maps["k_proj"][pair][:, pair], turn / factor)
        rest[torch.tensor(pair)[:, None], torch.tensor(pair)] = 0
    assert float(rest.abs().max()) < 1e-12
    assert float((maps["v_proj"] - torch.diag(maps["v_proj"].diagonal())).abs().max()) > 0.1  # values take any matrix


def test_partial_rotary_embeddings_leave_any_matrix_on_the_rest() -> None:
    torch.manual_seed(0)
    model = settled(LlamaLike(width=16, heads=2, groups=1, layers=1, style="partial"))
    new = mix_heads(model, data=tokens()).model
    q = new.layers[0].q_proj.weight[:8] @ torch.linalg.pinv(model.layers[0].q_proj.weight[:8])
    assert float(q[:4, 4:].abs().max()) < 1e-12
    assert float(q[4:, :4].abs().max()) < 1e-12
    assert bool((q[4:, 4:].abs() > 1e-6).all())
    assert math.isclose(float(torch.linalg.cond(q[4:, 4:])), 10.0, rel_tol=1e-6)
    assert torch.allclose(torch.linalg.cond(q[[0, 2]][:, [0, 2]]), torch.ones(()).double())


def moved(result: Transformed, model: nn.Module) -> set[str]:
    pairs = zip(model.named_parameters(), result.model.parameters(), strict=True)
    return {name for (name, before), after in pairs if not torch.equal(before, after)}


QK, VO = {"q.weight", "q.bias", "k.weight", "k.bias"}, {"v.weight", "v.bias", "o.weight"}


@pytest.mark.parametrize(
    ("change", "names", "note"),
    [
        ("", QK | VO, ""),
        ("normalised", VO, "the operation 'normalize'"),
        ("shared", VO, "one layer that stands on both sides of a product"),
        ("capped", QK | VO, ""),
        ("sink", QK | VO, ""),
        ("sigmoid", QK | VO, ""),
        ("also read", QK, "the operation 'tanh'"),
    ],
)
def test_what_breaks_the_symmetry_of_heads_is_left_alone_and_named(change: str, names: set[str], note: str) -> None:
    torch.manual_seed(0)
    model, x = settled(OneAttention(change=change)), sequences()
    result = mix_heads(model, data=x)
    assert moved(result, model) == names
    assert note in " ".join(result.certificate.notes)
    assert bool(result.certificate.notes) == bool(note)
    assert distance(result, model, sequences(seed=5)) < 1e-13


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("", {"k.bias", "v.bias", "o.bias"}),
        ("capped", {"v.bias", "o.bias"}),
        ("sink", set()),
        ("sigmoid", set()),
        ("normalised", {"v.bias", "o.bias"}),
        ("also read", {"k.bias"}),
    ],
)
def test_biases_are_free_where_a_softmax_over_all_keys_makes_them_so(change: str, names: set[str]) -> None:
    torch.manual_seed(0)
    model, x = settled(OneAttention(change=change)), sequences()
    if not names:
        with pytest.raises(InputError, match=r"no attention of this network has a free key bias.* in the way: "):
            shift_attention_biases(model, data=x)
        return
    result = shift_attention_biases(model, data=x)
    assert moved(result, model) == names
    assert distance(result, model, sequences(seed=5)) < 1e-13


class MaskedAfterwards(nn.Module):
    """An attention that leaves padding, positions of zeros, out of its shares once they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = (self.q(x) @ self.k(x).mT).softmax(-1) * x.any(-1)[:, None]
        return self.o(shares @ self.v(x))  # type: ignore[no-any-return]


def test_shares_that_sum_to_one_on_these_data_only_leave_the_values_alone() -> None:
    torch.manual_seed(0)
    model, x = settled(MaskedAfterwards()), sequences()
    padded = x.clone()
    padded[:, 2:] = 0
    result = shift_attention_biases(model, data=x)
    assert not torch.equal(result.model.k.bias, model.k.bias)
    assert torch.equal(result.model.v.bias, model.v.bias)
    assert torch.allclose(result.model(padded), model(padded), atol=1e-12)


def test_shifted_biases_have_the_length_asked_for_also_where_they_were_zero() -> None:
    torch.manual_seed(0)
    model, x = settled(OneAttention(heads=1)), sequences()
    result = shift_attention_biases(model, data=x, size=3.0)
    for name in ("k", "v"):
        before, after = getattr(model, name).bias, getattr(result.model, name).bias
        assert math.isclose(float((after - before).norm()), 3 * float(before.norm()))
    shift = result.model.v.bias - model.v.bias
    assert torch.allclose(result.model.o.bias, model.o.bias - model.o.weight @ shift)
    fresh = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).double()
    assert not fresh.self_attn.in_proj_bias.any()
    bias = shift_attention_biases(fresh, data=x).model.self_attn.in_proj_bias
    assert not bias[:6].any()
    assert bool((bias[6:] != 0).all())


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, "in_proj_bias out_proj.bias"),
        ({"add_zero_attn": True}, ""),
        ({"add_bias_kv": True}, ""),
        ({"kdim": 8, "vdim": 8}, "in_proj_bias out_proj.bias"),
        ({"bias": False}, ""),
    ],
)
def test_multihead_attention_with_all_its_options(options: dict[str, Any], parts: str) -> None:
    torch.manual_seed(0)
    model, x = settled(TorchLike(**options)), tokens()
    heads = mix_heads(model, data=x)
    assert distance(heads, model, tokens(12, seed=5)) < 1e-13
    assert not heads.certificate.notes
    wanted = {f"encoder.layers.0.self_attn.{part}" for part in parts.split()}
    if not wanted:
        with pytest.raises(InputError, match=r"add_zero_attn|without bias"):
            shift_attention_biases(model, data=x)
        return
    assert moved(shift_attention_biases(model, data=x), model) == wanted


class Cross(nn.Module):
    """Attention of one sequence to another, with a mask for each head and weights that are read as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        query, key = x[:, :2].transpose(0, 1), x.transpose(0, 1)
        mask = torch.triu(torch.ones(2, 4, dtype=torch.bool), 3).expand(2 * len(x), -1, -1)
        mixed, shares = self.attention(query, key, key, attn_mask=mask)
        return self.head(mixed.mean(0)) + shares.sum((1, 2))[:, None]


def test_cross_attention_with_a_mask_for_each_head() -> None:
    torch.manual_seed(0)
    model, x = settled(Cross()), sequences()
    for transform in (mix_heads, shift_attention_biases, permute_units):
        assert distance(transform(model, data=x), model, sequences(seed=5)) < 1e-13


# ---------------------------------------------------------------- the residual stream


def test_a_rotated_stream_has_no_gains_left_and_norms_of_the_folded_model() -> None:
    torch.manual_seed(0)
    model, x = settled(LlamaLike()), tokens()
    result = rotate_stream(model, data=x)
    names = [name for name, _ in result.model.named_parameters()]
    assert not any("norm" in name for name in names)
    assert bool((result.model.norm.weight == 1).all())
    assert result.start is not None
    assert distance(Transformed(result.start, result.certificate), model, x) < 1e-13
    folded = dict(result.start.named_parameters())
    assert list(folded) == names
    for name, parameter in result.model.named_parameters():
        assert math.isclose(float(parameter.norm()), float(folded[name].norm()), rel_tol=1e-12), name
    heads = result.model.layers[0].q_proj.weight
    assert torch.allclose(heads @ heads.T, folded["layers.0.q_proj.weight"] @ folded["layers.0.q_proj.weight"].T)


def test_a_stream_is_rotated_again_and_gains_in_buffers_fold() -> None:
    """The gains that a first rotation leaves as buffers of ones ended in an `AttributeError`."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 3)).double(), torch.randn(9, 4).double()
    gain = torch.rand(6, dtype=torch.float64) + 0.5
    del model[1].weight
    model[1].register_buffer("weight", gain)
    once = rotate_stream(model, data=x, seed=1)
    twice = rotate_stream(once.model, data=x, seed=2)
    for result in (once, twice):
        assert distance(result, model, x) < 1e-13
    assert torch.equal(once.model[1].weight, torch.ones_like(gain))
    assert torch.equal(model[1].weight, gain)
    assert not torch.allclose(twice.model[0].weight, once.model[0].weight)


def test_gains_that_cannot_be_folded_and_layer_norm_are_refused() -> None:
    torch.manual_seed(0)
    model = settled(LlamaLike(layers=1))
    model.head = nn.Linear(16, 11, bias=False).double()
    model.head.weight = model.embed.weight
    with pytest.raises(InputError, match=r"rotate_stream: this network has no stream .* in the way: "):
        rotate_stream(model, data=tokens())
    with pytest.raises(InputError, match=r"'layer_norm' at"):
        rotate_stream(settled(GptLike()), data=tokens())


def test_built_in_rms_norm_with_and_without_a_gain() -> None:
    for affine in (True, False):
        model = nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, elementwise_affine=affine), nn.Linear(6, 3)).double()
        result = rotate_stream(model, data=torch.randn(5, 4))
        assert distance(result, model, torch.randn(9, 4).double()) < 1e-13
        turn = result.model[0].weight @ torch.linalg.pinv(model[0].weight)
        assert torch.allclose(turn @ model[0].bias, result.model[0].bias) or turn.shape[0] > 4


def test_images_go_through_a_copy_of_the_model_without_a_trace() -> None:
    model, x = transformer("vit")
    before = copy.deepcopy(model.state_dict())
    mix_heads(model, data=images(3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert len(SMALL) == 4
    assert x.shape[0] == 8


class Experts(nn.Module):
    """Sends every sample through one of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        shares = (3 * self.gate(hidden)).softmax(-1)
        found, chosen = torch.zeros_like(hidden), shares.argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, expert(hidden[rows]) * shares[rows, number, None])
        return self.last(found.relu())


@pytest.mark.parametrize("transform", [mix_linear, permute_units])
def test_experts_that_two_samples_do_not_reach_are_followed_or_named(transform: Any) -> None:
    torch.manual_seed(0)
    model, inputs = Experts().double(), torch.randn(400, 6, dtype=torch.float64)
    with torch.no_grad():
        chosen = model.gate(model.first(inputs)).argmax(-1)
    assert len(chosen[:2].unique()) < 4
    whole = transform(model, data=inputs)
    torch.testing.assert_close(whole.model(inputs), model(inputs), rtol=1e-9, atol=1e-12)
    assert not any("unread" in note for note in whole.certificate.notes)
    part = transform(model, data=inputs[chosen == chosen[0]])
    assert not torch.allclose(part.model(inputs), model(inputs))  # what cannot be known is said
    assert "6 parameters unread on the samples that were followed" in str(part.certificate)
