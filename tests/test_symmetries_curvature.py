"""What symmetries do to gradient and Hessian: predicted from the old ones and measured densely, in float64."""

from __future__ import annotations

from collections.abc import Callable

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transform_nets import mlp, small_net
from zoo_transformers import (
    CLASSES,
    BertLike,
    Gated,
    LlamaLike,
    OneAttention,
    lora,
    sequences,
    settled,
    tokens,
    vectors,
)

from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.operators.matrices import hessian
from spiritlevel.transforms import (
    LinearMap,
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
from spiritlevel.transforms.maps import Step, generator, rotation


class Normed(nn.Module):
    """A layer norm and an RMS norm in elementary operations, whose derivatives are right in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(3, CLASSES)
        self.gain, self.shift, self.scale = (nn.Parameter(torch.rand(n) + 0.5) for n in (4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h - h.mean(-1, keepdim=True)
        h = self.second(h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.gain + self.shift)
        return self.last(self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)))


class Untrained(nn.Module):
    """An attention with gains of 1 and biases of 0 of its own, as they are before a training run."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.query, self.key, self.value = (nn.Linear(6, 4) for _ in range(3))
        self.gain, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.whole = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = {"query": self.query(x), "key": self.key(x), "value": self.value(x)}
        if self.place in parts:
            parts[self.place] = parts[self.place] * self.gain + self.shift
        mixed = (parts["query"] @ parts["key"].mT).softmax(-1) @ parts["value"]
        if self.place == "mixed":
            mixed = mixed * self.gain + self.shift
        return self.last(mixed * self.whole).mean(1)


def low_rank() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def llama(style: str) -> nn.Module:
    return LlamaLike(width=8, heads=2, groups=1, layers=1, style=style)


CASES: dict[str, tuple[Callable[..., Transformed], Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "shift_logits": (shift_logits, low_rank, vectors),
    "permute_units": (permute_units, low_rank, vectors),
    "permute_units, norms": (permute_units, Normed, vectors),
    "permute_units, attention": (permute_units, OneAttention, sequences),
    "shift_norm_gain": (shift_norm_gain, Normed, vectors),
    "scale_gate": (scale_gate, lambda: Gated(F.silu), vectors),
    "mix_linear": (mix_linear, low_rank, vectors),
    "mix_linear, merged": (mix_linear, lambda: lora(merged=True), vectors),
    "mix_heads": (mix_heads, OneAttention, sequences),
    "mix_heads, rotary": (mix_heads, lambda: llama("half"), tokens),
    "mix_heads, part rotary": (mix_heads, lambda: llama("partial"), tokens),
    "shift_attention_biases": (shift_attention_biases, OneAttention, sequences),
    "rotate_stream": (rotate_stream, lambda: llama("interleaved"), tokens),
}


def labels(x: Tensor) -> Tensor:
    return torch.arange(len(x)) % CLASSES


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in named.values()])


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}


def split(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    parts = vector.split([shape.numel() for shape in shapes(model).values()])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes(model).items(), strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_hessian_at_the_new_parameters_are_predicted(case: str) -> None:
    transform, build, data = CASES[case]
    torch.manual_seed(0)
    model, x = settled(build()), data()
    result, y = transform(model, data=x, seed=2), labels(x)
    start = result.start or model
    before, after = naive.mean_hessian(start, x, y), naive.mean_hessian(result.model, x, y)
    operator = Operator(lambda block: before @ block, len(before), dtype=torch.float64, shapes=shapes(start))
    predicted = result.hessian(operator).dense()
    scale = float(after.abs().max())
    assert float((predicted - after).abs().max()) < 1e-12 * scale
    slope = naive.gradient(start, x, y)
    moved = flat(result.gradient(split(start, slope)))
    assert torch.allclose(moved, naive.gradient(result.model, x, y), rtol=1e-10, atol=1e-13)
    if case.partition(",")[0] not in ("shift_logits", "permute_units", "rotate_stream"):
        assert float((after - before).abs().max()) > 1e-3 * scale  # it did move


@pytest.mark.parametrize(
    ("transform", "place"),
    [
        *[
            (transform, place)
            for transform in (mix_heads, permute_units)
            for place in ("query", "key", "value", "mixed")
        ],
        *[(shift_attention_biases, place) for place in ("value", "mixed")],
    ],
)
def test_parameters_that_are_equal_for_now_are_no_constants(transform: Callable[..., Transformed], place: str) -> None:
    torch.manual_seed(0)
    model, x = Untrained(place).double(), sequences()
    result, y = transform(model, data=x, seed=2), labels(x)
    before, after = naive.mean_hessian(model, x, y), naive.mean_hessian(result.model, x, y)
    operator = Operator(lambda block: before @ block, len(before), dtype=torch.float64, shapes=shapes(model))
    assert float((result.hessian(operator).dense() - after).abs().max()) < 1e-12 * float(after.abs().max())


@pytest.mark.parametrize("transform", [permute_units, rotate_stream])
def test_orthogonal_maps_keep_the_spectrum(transform: Callable[..., Transformed]) -> None:
    torch.manual_seed(0)
    model, x = settled(llama("half")), tokens()
    result = transform(model, data=x)
    spectra = [
        torch.linalg.eigvalsh(naive.mean_hessian(net, x, labels(x))) for net in (result.start or model, result.model)
    ]
    assert torch.allclose(*spectra, rtol=1e-10, atol=1e-12 * float(spectra[0].abs().max()))


def test_folding_gains_is_what_moves_the_trace_of_a_rotated_stream() -> None:
    torch.manual_seed(0)
    model, x = settled(llama("half")), tokens()
    result = rotate_stream(model, data=x)
    assert result.start is not None
    traces = [float(naive.mean_hessian(net, x, labels(x)).trace()) for net in (model, result.start, result.model)]
    assert abs(traces[0] / traces[1] - 1) > 1e-2
    assert abs(traces[2] / traces[1] - 1) < 1e-11


@pytest.mark.parametrize("transform", [shift_logits, shift_attention_biases])
def test_shifts_that_nobody_sees_are_null_directions(transform: Callable[..., Transformed]) -> None:
    """For keys and logits; the shift of values turns the outputs' bias against it, and is not one by itself."""
    torch.manual_seed(0)
    model, x = settled(OneAttention()), sequences()
    if transform is shift_attention_biases:
        model.v.bias.data.zero_()
        model.o.bias.requires_grad_(False)
        model.v.bias.requires_grad_(False)
    result = transform(model, data=x)
    before, after = dict(model.named_parameters()), dict(result.model.named_parameters())
    shift = flat({name: (after[name] - before[name]).detach() for name in shapes(model)})
    matrix = naive.mean_hessian(model, x, labels(x))
    assert float(shift.norm()) > 0.1
    assert float((matrix @ shift).abs().max()) < 1e-12 * float(matrix.abs().max()) * float(shift.norm())
    assert abs(float(naive.gradient(model, x, labels(x)) @ shift)) < 1e-12


@pytest.mark.parametrize("sizes", [(4, 5, 3), (4, 5, 6, 3)])
def test_the_traces_of_split_units(sizes: tuple[int, ...]) -> None:
    """Piecewise linear networks, per sample: incoming weights times t² + (1−t)², outgoing weights times 2."""
    model, x = mlp(*sizes), torch.randn(4, sizes[0]).double()
    y = torch.tensor([0, 1, 2, 0])
    new = split_units(model, data=x, size=0.4).model
    before, after = diagonals(model, x, y), diagonals(new, x, y)
    columns = torch.ones(sizes[0]).double()
    for index in range(0, len(model), 2):
        rows = torch.ones(model[index].out_features).double()
        last = index + 1 == len(model)
        shares = torch.full_like(rows, torch.nan) if last else shares_of(model[index + 2], new[index + 2])
        rows[~shares.isnan()] = (shares**2 + (1 - shares) ** 2)[~shares.isnan()]
        assert last or bool((~shares.isnan()).sum() == int(0.4 * len(rows)))
        weight, bias = before[f"{index}.weight"] * rows[:, None] * columns, before[f"{index}.bias"] * rows
        assert torch.allclose(after[f"{index}.weight"].sum((1, 2)), weight.sum((1, 2)), rtol=1e-10)
        assert torch.allclose(after[f"{index}.bias"].sum(1), bias.sum(1), rtol=1e-10)
        columns = torch.where(shares.isnan(), 1.0, 2.0)


def shares_of(narrow: nn.Linear, wide: nn.Linear) -> Tensor:
    """The share t of each input of a layer that became two, NaN for the others."""
    shares, place = torch.full((narrow.in_features,), torch.nan).double(), 0
    for unit in range(narrow.in_features):
        ratio = (
            wide.weight[0, place].detach() / narrow.weight[0, unit].detach()
        )  # the first of two copies, or the row itself
        split = abs(float(ratio) - 1) > 1e-9
        shares[unit] = ratio if split else torch.nan
        place += 2 if split else 1
    return shares


def diagonals(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The diagonal of every sample's Hessian, by parameter."""
    whole = naive.dense_hessian(model, x, y).diagonal(dim1=1, dim2=2)
    parts = whole.split([parameter.numel() for parameter in model.parameters()], dim=1)
    named = zip(model.named_parameters(), parts, strict=True)
    return {name: part.reshape(len(x), *parameter.shape) for (name, parameter), part in named}


# ---------------------------------------------------------------- operators


def test_real_operators_and_some_of_the_parameters() -> None:
    torch.manual_seed(0)
    model, x = settled(lora()), vectors()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    result, y = mix_linear(model, data=x), labels(x)
    before, after = (hessian(net, (x, y)) for net in (model, result.model))
    assert len(before.names) == 4
    predicted = result.hessian(before).dense()
    assert torch.allclose(predicted, after.dense(), rtol=1e-9, atol=1e-12)
    few = hessian(model, (x, y), params=["0.lora_a"])
    assert torch.allclose(result.hessian(few).dense(), hessian(result.model, (x, y), params=["0.lora_a"]).dense())


def test_a_map_that_mixes_measured_parameters_with_others_is_refused() -> None:
    torch.manual_seed(0)
    model, x = settled(OneAttention()), sequences()
    result, y = shift_attention_biases(model, data=x), labels(x)
    with pytest.raises(InputError, match="mixes parameters that are measured with others"):
        _ = result.hessian(hessian(model, (x, y), params=["o.bias"])).dense()
    with pytest.raises(InputError, match="unknown parameter 'gain'"):
        result.hessian(Operator(lambda v: v, 2, shapes={"gain": torch.Size([2])}))


def test_no_prediction_where_the_number_of_parameters_changes() -> None:
    model, x = small_net("mlp")
    result = split_units(model, data=x)
    with pytest.raises(InputError, match="split_units is not a linear map of the parameters"):
        result.hessian(Operator(lambda v: v, 1))
    with pytest.raises(InputError, match="split_units is not a linear map of the parameters"):
        result.gradient({})


ACTIONS: dict[str, Callable[[int], Tensor]] = {
    "a diagonal": lambda count: torch.rand(count).double() + 0.5,
    "a matrix": lambda count: torch.randn(count, count).double(),
    "a permutation": lambda count: torch.arange(count).roll(1),
}


@pytest.mark.parametrize("kind", ACTIONS)
def test_actions_of_a_linear_map_belong_together(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"a": torch.Size([3, 2]), "b": torch.Size([4])}
    entries = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[5, 6], [0, 9]])
    mapping = LinearMap(sizes, [Step(rows, ACTIONS[kind](len(rows))) for rows in entries])
    eye = torch.eye(10, dtype=torch.float64)
    forward, inverse, turned = (
        mapping.on_rows(("a", "b"), eye, how) for how in ("forward", "inverse", "inverse transposed")
    )
    assert torch.allclose(forward @ inverse, eye)
    assert torch.allclose(turned, inverse.T)
    assert (mapping.factors(sizes) is not None) == (kind == "a diagonal")
    point = {"a": torch.randn(3, 2).double(), "b": torch.randn(4).double()}
    assert torch.allclose(flat(mapping(point)), forward @ flat(point))
    assert torch.allclose(flat(mapping.inverse(mapping(point))), flat(point))
    assert mapping({}) == {}


def test_a_permutation_is_what_its_matrix_does_without_its_size() -> None:
    """100,000 units would take 80 GB."""
    torch.manual_seed(0)
    sizes, order, rows = {"a": torch.Size([6, 2])}, torch.tensor([2, 0, 1]), torch.tensor([[0, 1], [4, 5], [2, 3]])
    short, long = (LinearMap(sizes, [Step(rows, m)]) for m in (order, torch.eye(3, dtype=torch.float64)[order]))
    block = torch.randn(12, 3, dtype=torch.float64)
    for how in ("forward", "inverse", "inverse transposed"):
        assert torch.equal(short.on_rows(("a",), block, how), long.on_rows(("a",), block, how))
    wide = nn.Sequential(nn.Linear(2, 100_000), nn.ReLU(), nn.Linear(100_000, 2))
    result = permute_units(wide, data=torch.randn(4, 2))
    moved = result.gradient({name: parameter.detach() for name, parameter in wide.named_parameters()})
    assert torch.equal(moved["0.weight"], result.model[0].weight)  # its own inverse transpose
    with pytest.raises(InputError, match="not enough memory for a rotation of 100,000,000 units"):
        rotation(10**8, generator(0))


def test_a_deep_encoder_is_found_at_the_size_that_people_own() -> None:
    """Four layers of width 64 with 4 heads: every transform it has, in float32."""
    torch.manual_seed(0)
    model, x = settled(BertLike(64, 4, 4)).float(), tokens(16)
    for transform in (shift_logits, permute_units, split_units, shift_norm_gain, mix_heads, shift_attention_biases):
        assert transform(model, data=x).certificate.relative_difference < 1e-5
