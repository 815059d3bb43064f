"""The recorded forward pass, and channels followed through it past everything that could fool it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from transform_nets import outputs

from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError
from spiritlevel.transforms import (
    Transformed,
    mix_heads,
    mix_linear,
    permute_units,
    rotate_stream,
    scale_gate,
    shift_norm_gain,
    split_units,
)
from spiritlevel.watching.channels import Passing
from spiritlevel.watching.following import follow_channels
from spiritlevel.watching.graph import Graph, record


def recorded(model: nn.Module, inputs: Any) -> Graph:
    return record("test", Problem(model, params="*"), inputs)


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Two layers, or more, and what a test puts between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], width: int = 4, **more: Any) -> None:
        super().__init__()
        self.between = between
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        for name, item in more.items():
            setattr(self, name, item)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


def points(*shape: int) -> Tensor:
    return torch.randn(6, *(shape or (3,)), generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def names(graph: Graph) -> list[str]:
    return [operation.name for operation in graph.operations]


# ---------------------------------------------------------------- the record


def test_operations_are_written_down_with_what_they_read_and_wrote() -> None:
    graph = recorded(Net(lambda net, x: net.last(torch.tanh(net.first(x)) + 1)), points())
    assert names(graph) == ["linear", "tanh", "add", "linear"]
    first, tanh, add, last = graph.operations
    assert [value.name for value in first.inputs] == ["", "first.weight", "first.bias"]
    assert first.inputs[0].given
    assert tanh.inputs == first.outputs
    assert add.inputs[0].maker is tanh
    assert graph.output is last.outputs[0]
    assert graph.output.shape == (2, 2)
    assert (first.place, add.place) == ("'first' (Linear)", "the network's own forward")
    assert graph.readers()[tanh.outputs[0]] == [add]
    assert set(graph.state) == set(graph.parameters) == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_what_is_written_in_place_is_a_new_value() -> None:
    graph = recorded(Net(lambda net, x: net.last(net.first(x).relu_().mul_(2))), points())
    assert names(graph) == ["linear", "relu", "mul", "linear"]
    values = [operation.outputs[0] for operation in graph.operations]
    assert values[0].tensor is values[1].tensor
    assert len(set(values)) == 4


def test_a_write_by_way_of_another_tensor_is_noticed() -> None:
    def between(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden[:, :2].mul_(hidden[:, 2:])
        return net.last(hidden)

    graph = recorded(Net(between), points())
    assert "overwritten" in "".join(names(graph))
    with pytest.raises(InputError, match="no two linear maps"):
        mix_linear(Net(between), data=points())


def test_a_recording_leaves_no_trace_also_if_the_network_fails(untouched: Untouched) -> None:
    model = Net(lambda net, x: net.last(net.first(x)))
    with untouched(model):
        recorded(model, points())
        with pytest.raises(RuntimeError):
            recorded(model, points(7))
    broken = Net(lambda net, x: vmap(net.last)(net.first(x)))
    with untouched(broken), pytest.raises(InputError, match=r"test: .* runs inside a transformation of torch\.func"):
        recorded(broken, points())


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "mask": ({}, {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1)}),
    "float mask": ({}, {"attn_mask": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()}),
    "mask of each head": ({}, {"attn_mask": torch.randn(2 * 3, 4, 4, generator=torch.Generator().manual_seed(0))}),
    "padding": ({}, {"key_padding_mask": torch.arange(4) > torch.tensor([[3], [1], [2]])}),
    "additional keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "additional keys and masks": (
        {"add_bias_kv": True},
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "key_padding_mask": torch.zeros(3, 4).bool()},
    ),
    "other widths": ({"kdim": 6, "vdim": 6}, {}),
    "without bias": ({"bias": False, "batch_first": True}, {}),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_that_is_written_out_is_the_built_in_one(case: str) -> None:
    torch.manual_seed(0)
    options, arguments = ATTENTIONS[case]
    layer = nn.MultiheadAttention(6, 2, **options).double().eval()
    layer.in_proj_bias = None if layer.in_proj_bias is None else nn.Parameter(torch.randn(18).double())
    arguments = {
        key: item.double() if isinstance(item, Tensor) and item.is_floating_point() else item
        for key, item in arguments.items()
    }
    x = torch.randn(3, 4, 6) if options.get("batch_first") else torch.randn(4, 3, 6)
    x = x.double()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, rows: Tensor) -> Tensor:
            mixed, shares = self.layer(x, x, x, **arguments)
            shares = torch.zeros(1).double() if shares is None else shares
            return torch.cat([mixed.flatten(), shares.flatten()])[None] + 0 * rows.sum()

    model = Both()
    seen = recorded(model, torch.ones(2, 1).double()).output.tensor
    assert torch.allclose(seen, model(torch.ones(2, 1).double()), rtol=0, atol=1e-14)


def test_attention_without_a_batch_is_written_out_too() -> None:
    layer = nn.MultiheadAttention(6, 2).double().eval()
    model = Net(lambda net, x: net.layer(x, x, x)[0], layer=layer)
    x = points(6)
    graph = recorded(model, x)
    assert "softmax" in names(graph)
    assert torch.allclose(graph.output.tensor, model(x[:2]))


# ---------------------------------------------------------------- layers in all their forms

FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "einsum": lambda net, x: torch.einsum("bh,oh->bo", torch.einsum("bi,ih->bh", x, net.inner), net.outer),
    "einsum over two axes": lambda net, x: torch.einsum(
        "bhd,hdo->bo", torch.einsum("bi,ihd->bhd", x, net.inner.view(3, 2, 2)), net.outer.T.reshape(2, 2, 2)
    ),
    "from the left": lambda net, x: (net.outer @ (net.inner.T @ x.T)).T,
    "addmm": lambda net, x: torch.addmm(net.shift, torch.addmm(net.bias, x, net.inner), net.outer.T),
    "mm": lambda net, x: torch.mm(x.mm(net.inner), net.outer.t()) - net.shift,
    "linear": lambda net, x: F.linear(F.linear(x, net.inner.transpose(0, 1), net.bias), net.outer, bias=net.shift),
    "fused": lambda net, x: F.linear(F.linear(x, *(part[:4] for part in (net.fused, net.many))), net.outer),
    "merged": lambda net, x: F.linear(x, 0.5 * net.outer @ net.inner.mT),
    "convolution": lambda net, x: F.conv1d(F.conv1d(x[..., None], net.inner.T[..., None]), net.outer[..., None])[
        ..., 0
    ],
    "turned convolution": lambda net, x: F.conv_transpose1d(
        F.conv_transpose1d(x[..., None], net.inner[..., None]), net.outer.T[..., None]
    )[..., 0],
}


def forms(form: str) -> Net:
    torch.manual_seed(0)
    more = {"inner": (3, 4), "outer": (2, 4), "bias": (4,), "shift": (2,), "fused": (9, 3), "many": (9,)}
    return Net(FORMS[form], **{name: nn.Parameter(torch.randn(shape)) for name, shape in more.items()})


@pytest.mark.parametrize("form", FORMS)
def test_linear_maps_are_found_in_every_form(form: str) -> None:
    model, x = forms(form), points()
    result = mix_linear(model, data=x)
    assert float((outputs(result.model, x) - outputs(model, x)).abs().max()) < 1e-12
    moved = {
        name for name, before in model.named_parameters() if not torch.equal(before, result.model.get_parameter(name))
    }
    bias = {"addmm", "linear"}
    wanted = (
        {"fused", "many", "outer"} if form == "fused" else {"inner", "outer"} | ({"bias"} if form in bias else set())
    )
    assert moved == wanted


def test_only_the_part_of_a_fused_weight_that_is_read_moves() -> None:
    model = forms("fused")
    result = mix_linear(model, data=points())
    assert torch.equal(result.model.fused[4:], model.fused[4:])
    assert not torch.equal(result.model.fused[:4], model.fused[:4])


PASSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[..., Transformed]]] = {
    "number": (lambda net, h: 3 * h / 2, mix_linear),
    "mask of samples": (lambda net, h: h.masked_fill(net.mask, 0.0), mix_linear),
    "factor of samples": (lambda net, h: h * h.new_ones(len(h), 1).cumsum(0), mix_linear),
    "minus": (lambda net, h: -h, mix_linear),
    "copies": (lambda net, h: h.clone().contiguous().to(torch.float64).view(-1, 2, 2).flatten(1), mix_linear),
    "written into": (lambda net, h: _written(h), mix_linear),
    "padded rows": (lambda net, h: F.pad(h[None], (0, 0, 1, 0))[0, 1:], mix_linear),
    "joined rows": (lambda net, h: torch.cat([torch.zeros_like(h[:1]), h])[1:], mix_linear),
    "an empty part": (lambda net, h: torch.cat([torch.cat([h.new_empty(0), h]), h.new_empty(0)]), mix_linear),
    "numbers added": (lambda net, h: 1 - torch.relu(h + 2), permute_units),
    "where": (lambda net, h: torch.where(h > 0, h, 0.1 * h), permute_units),
    "clamp, power": (lambda net, h: h.clamp(-1, 1) ** 3, split_units),
    "product": (lambda net, h: h * torch.sigmoid(h), split_units),
    "spread": (lambda net, h: (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True), permute_units),
    "largest": (lambda net, h: h / h.abs().amax(1, keepdim=True), permute_units),
    "gate": (lambda net, h: h * torch.sigmoid(h.new_ones(len(h), 4).cumsum(0)), mix_linear),
    "length": (lambda net, h: F.normalize(h, dim=-1), rotate_stream),
    "norm": (lambda net, h: h / h.norm(dim=-1, keepdim=True), rotate_stream),
    "vector norm": (lambda net, h: h / torch.linalg.vector_norm(h, dim=1, keepdim=True), rotate_stream),
    "squares": (lambda net, h: h * torch.rsqrt((h * h).sum(-1, keepdim=True)), rotate_stream),
}


def _written(h: Tensor) -> Tensor:
    result = torch.empty_like(h)
    result[:, ::2] = h[:, ::2]
    result[:, 1::2] = h[:, 1::2]
    return result


@pytest.mark.parametrize("case", PASSED)
def test_what_a_map_passes(case: str) -> None:
    step, transform = PASSED[case]
    torch.manual_seed(0)
    mask = torch.tensor([[True], [False]]).repeat(3, 1)
    model = Net(lambda net, x: net.last(step(net, net.first(x))))
    model.mask = mask
    x = points()
    if case == "mask of samples":
        model = Net(lambda net, x: net.last(net.first(x).masked_fill(x[:, :1] > 0, 0.0)))
    if case == "gate":
        with pytest.raises(InputError, match="'mul'"):
            transform(model, data=x)
        return
    result = transform(model, data=x)
    assert result.certificate.relative_difference < 1e-13
    assert not torch.equal(result.model.first.weight, model.first.weight)


# ---------------------------------------------------------------- what could fool it


STOPPED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[..., Transformed], str]] = {
    "relu": (lambda net, h: F.relu(h), mix_linear, "'relu'"),
    "bias that is computed": (lambda net, h: h + torch.tanh(h.new_ones(4)), mix_linear, "'add'"),
    "number taken": (lambda net, h: h * (2.0 if h.sum().item() > 0 else 1.0), mix_linear, "'sum'"),
    "whole numbers": (lambda net, h: h.to(torch.int64).to(h.dtype) + h, mix_linear, "'to'"),
    "mask of channels": (lambda net, h: h * torch.tensor([1.0, 0, 1, 0]).double(), mix_linear, "'mul'"),
    "softmax": (lambda net, h: h.softmax(1), permute_units, "'softmax'"),
    "order": (lambda net, h: h.sort(1).values, permute_units, "'sort'"),
    "sums": (lambda net, h: h.cumsum(1), permute_units, "'cumsum'"),
    "channels apart": (lambda net, h: h * torch.arange(4.0).double(), permute_units, "'mul'"),
    "mean of channels": (lambda net, h: h - h.mean(1, keepdim=True), split_units, "'mean'"),
    "one norm": (lambda net, h: F.normalize(h, p=1.0, dim=-1), rotate_stream, "'normalize'"),
    "fourth powers": (lambda net, h: h * h.pow(4).mean(1, keepdim=True), rotate_stream, "'pow'"),
    "root of squares": (lambda net, h: h.square().sqrt(), rotate_stream, "'sqrt'"),
}


@pytest.mark.parametrize("case", STOPPED)
def test_what_stops_a_map_is_named(case: str) -> None:
    step, transform, reason = STOPPED[case]
    torch.manual_seed(0)
    model = Net(lambda net, x: net.last(step(net, net.first(x))))
    with pytest.raises(InputError, match=reason) as refusal:
        transform(model, data=points())
    assert "changed by" not in str(refusal.value)


def test_a_value_with_a_second_reader_is_not_mapped() -> None:
    for read in (
        lambda net, x: net.last(net.first(x)) + torch.tanh(net.first(x)[:, :2]),
        lambda net, x: (lambda h: net.last(h) + torch.tanh(h[:, :2]))(net.first(x)),
    ):
        model = Net(read)
        result = mix_linear(model, data=points())  # two of the channels are free
        assert torch.equal(result.model.first.weight[:2], model.first.weight[:2])
        assert not torch.equal(result.model.first.weight[2:], model.first.weight[2:])


def test_channels_that_are_added_to_each_other_have_one_factor() -> None:
    model = Net(lambda net, x: (lambda h: net.last(h[:, [0, 0, 1, 2]].flip(0) + h))(net.first(x)))
    result = mix_linear(model, data=points())
    ratio = result.model.first.weight / model.first.weight
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio))


def test_code_that_no_recording_sees_is_caught_by_the_certificate() -> None:
    def unseen(h: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return h.square()

    model = Net(lambda net, x: (lambda h: net.last(h) + unseen(h)[:, :2])(net.first(x)))
    with pytest.raises(InputError, match=r"mix_linear: the outputs changed by .* in a hidden way"):
        mix_linear(model, data=points())


def test_weights_that_are_computed_take_no_map() -> None:
    model = Net(lambda net, x: net.last(net.first(x)))
    weight_norm(model.last)
    with pytest.raises(InputError, match="no two linear maps"):
        mix_linear(model, data=points())


@pytest.mark.parametrize("times", [1, 2])
def test_a_weight_that_is_used_twice_is_mapped_only_if_both_uses_agree(times: int) -> None:
    """W W x: between the two stands a matrix, but it would have to act on both sides of the same weight."""
    square = nn.Linear(3, 3)
    model = Net(lambda net, x: net.last(net.square(net.square(x)) if times == 2 else net.square(x)), 3, square=square)
    if times == 1:
        assert mix_linear(model, data=points()).certificate.relative_difference < 1e-13
        return
    with pytest.raises(InputError, match="more than once"):
        mix_linear(model, data=points())


def test_recurrence_is_permuted_in_common() -> None:
    """The same layers at every step: all uses of a weight agree on the order of the units."""

    def between(net: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for _ in range(3):
            state = torch.tanh(net.first(x) + net.again(state))
        return net.last(state)

    model = Net(between, again=nn.Linear(4, 4))
    result = permute_units(model, data=points())
    assert result.certificate.relative_difference < 1e-14
    assert not torch.equal(result.model.again.weight, model.again.weight)


def test_lstm_stops_what_it_reads() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(torch.tanh(self.embed(x)))[0][:, -1])

    with pytest.raises(InputError, match="'lstm' at 'lstm'"):
        permute_units(Recurrent(), data=torch.randn(4, 5, 3))


def test_groups_of_a_norm_and_of_a_convolution_keep_their_channels() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 6, 1, groups=3), nn.GELU(), nn.Flatten()
    ).append(nn.Linear(24, 3))
    model, x = model.double(), torch.randn(5, 2, 4, 4).double()
    graph = recorded(model, x)
    channels = follow_channels(graph, Passing(functions="any", offsets=True, gains="tied", symmetric=True))
    first = [block for block in channels.blocks() if any(slot.operation.name == "group_norm" for slot in block.slots)]
    assert sorted(block.units for block in first) == [1, 1, 2, 2]  # 2 groups of 3 channels meet 3 groups of 2
    assert permute_units(model, data=x).certificate.relative_difference < 1e-13


def test_a_norm_behind_which_others_read_takes_no_factor() -> None:
    norm = nn.LayerNorm(4)
    model = Net(lambda net, x: (lambda h: net.last(h) + h.sum(1, keepdim=True))(net.norm(net.first(x))), norm=norm)
    with pytest.raises(InputError, match="'sum'"):
        shift_norm_gain(model, data=points())


def test_both_factors_of_a_bilinear_gate_are_linear_and_one_of_them_is_scaled() -> None:
    model = Net(lambda net, x: net.last(net.first(x) * net.other(x)), other=nn.Linear(3, 4))
    result = scale_gate(Net(lambda net, x: net.last(net.first(x) * x.sum(1, keepdim=True)[:, [0] * 4])), data=points())
    assert result.certificate.relative_difference < 1e-13
    both = scale_gate(model, data=points())
    moved = [
        not torch.equal(getattr(both.model, name).weight, getattr(model, name).weight) for name in ("first", "other")
    ]
    assert sorted(moved) == [False, True]


def test_heads_of_attention_never_mix() -> None:
    layer = nn.MultiheadAttention(8, 4, batch_first=True).double()
    model = Net(lambda net, x: net.layer(x, x, x)[0].mean(1), layer=layer)
    x = torch.randn(3, 5, 8).double()
    result = mix_heads(model, data=x)
    old, new = layer.in_proj_weight[:8], result.model.layer.in_proj_weight[:8]
    matrix = new @ torch.linalg.inv(old)
    inside = torch.kron(torch.eye(4), torch.ones(2, 2)).bool()
    assert float(matrix[~inside].abs().max()) < 1e-12
    assert bool((matrix[inside].abs() > 1e-9).all())
    assert math.isclose(float(torch.linalg.cond(matrix[:2, :2])), 10, rel_tol=1e-6)
