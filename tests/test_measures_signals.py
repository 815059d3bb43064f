"""Measures of what layers put out and of the probabilities, against dense autodiff, noise, and all symmetries."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import zoo
from measured import Data, labelled, normal, randomised, value
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from zoo_transformers import ADAPTERS, CLASSES, TRANSFORMERS, sequences, transformer

from spiritlevel import transforms
from spiritlevel.errors import InputError
from spiritlevel.measures import DEFAULT, MEASURES, Setting

BOTH = ("signal_sharpness", "signal_sharpness_max")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
ALL = (*BOTH, "mean_confidence_gap", "input_sensitivity")


# ---------------------------------------------------------------- the formula, by brute force


class Disturbed(nn.Module):
    """A model that adds something to what its layers put out: shifts by the names of modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.names = [name for name, module in self.model.named_modules() if isinstance(module, LAYERS)]

    def forward(self, x: Tensor, shifts: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        seen: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., Tensor]:
            def add(module: nn.Module, args: object, output: Tensor) -> Tensor:
                seen[name] = output.clone()  # a ReLU in place may follow
                return output if shifts is None else output + shifts[name]

            return add

        handles = [self.model.get_submodule(name).register_forward_hook(hook(name)) for name in self.names]
        try:
            return self.model(x), seen
        finally:
            for handle in handles:
                handle.remove()


def channels_last(value: Tensor, module: nn.Module) -> Tensor:
    return value if isinstance(module, nn.Linear) else value.movedim(1, -1)


def dense(model: nn.Module, data: Data) -> dict[str, tuple[Tensor, Tensor]]:
    """C and G of every layer: dense Jacobians of the logits by what a layer puts out, sample by sample."""
    inputs, targets = data
    net = Disturbed(model)
    _, seen = net(inputs)
    found = {}
    for name, signal in seen.items():
        module = net.model.get_submodule(name)
        rows = channels_last(signal, module).detach().flatten(0, -2)
        covariance = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
        curvature = torch.zeros_like(covariance)
        for n in range(len(inputs)):
            zeros = {key: torch.zeros_like(each[n : n + 1]) for key, each in seen.items()}

            def outputs(shift: Tensor, n: int = n, name: str = name, zeros: dict[str, Tensor] = zeros) -> Tensor:
                return net(inputs[n : n + 1], {**zeros, name: shift})[0][0]

            jacobian = jacrev(outputs)(zeros[name]).detach()
            phi = net(inputs[n : n + 1])[0][0].detach()
            inner = torch.func.hessian(lambda phi, n=n: F.cross_entropy(phi[None], targets[n : n + 1]))(phi)
            by_place = channels_last(jacobian.flatten(0, 1), module).reshape(len(phi), -1, len(covariance))
            curvature += torch.einsum("cd,cph,dpk->hk", inner, by_place, by_place) / len(inputs)
        found[name] = covariance, curvature
    return found


def brute(model: nn.Module, data: Data) -> tuple[float, float]:
    parts = list(dense(model, data).values())
    largest = max(float(torch.linalg.eigvals(c @ g).real.max()) for c, g in parts)
    return sum(float((c @ g).trace()) for c, g in parts), largest


NETS = {
    "relu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (4,)),
    "smooth": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), (4,)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (4,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3)
        ),
        (2, 5, 5),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(21, 3)), (2, 5)
    ),
    "tokens": (lambda: nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_signal_sharpness_is_that_of_dense_jacobians(name: str) -> None:
    make, shape = NETS[name]
    net = randomised(make(), seed=2)
    data = labelled(net, normal(9, *shape))
    setting = Setting(net, data)
    assert [value(setting, each) for each in BOTH] == pytest.approx(brute(net, data), rel=1e-9)


def test_every_notation_of_a_layer_is_seen() -> None:
    """Attention in one call, bare matrices from either side and sums over indices are as the same in modules."""

    class Written(nn.Module):
        def __init__(self, style: str) -> None:
            super().__init__()
            self.style = style
            self.inner, self.outer = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            if self.style == "left":
                return (self.outer @ torch.tanh(self.inner @ x.unsqueeze(-1)))[..., 0]
            if self.style == "einsum":
                return torch.einsum("oh,nh->no", self.outer, torch.tanh(torch.einsum("ni,hi->nh", x, self.inner)))
            if self.style == "addmm":
                hidden = torch.addmm(x.new_zeros(5), x, self.inner.T)
                return torch.mm(torch.tanh(hidden), self.outer.t())
            if self.style == "linear":
                return F.linear(torch.tanh(F.linear(x, self.inner)), weight=self.outer)
            return torch.tanh(x @ self.inner.T) @ self.outer.mT

    plain = randomised(nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)), seed=1)
    data = labelled(plain, normal(8, 4))
    expected = brute(plain, data)
    for style in ("left", "einsum", "addmm", "linear", "matmul"):
        net = Written(style).double()
        net.load_state_dict({"inner": plain[0].weight, "outer": plain[2].weight})
        setting = Setting(net, data)
        assert [value(setting, name) for name in BOTH] == pytest.approx(expected, rel=1e-9), style


def test_attention_in_one_call_is_as_the_same_written_out() -> None:
    class Apart(nn.Module):
        """`nn.MultiheadAttention` in modules of its own."""

        def __init__(self, attention: nn.MultiheadAttention, head: nn.Linear) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6).double() for _ in range(3))
            self.o, self.head = attention.out_proj, head
            weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
            for layer, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
                layer.load_state_dict({"weight": weight, "bias": bias})

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            shares = (q @ k.mT / math.sqrt(3)).softmax(-1)
            return self.head(self.o((shares @ v).transpose(1, 2).flatten(2)).mean(1))

    class InOneCall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    one = randomised(InOneCall(), seed=3)
    two = Apart(one.attention, one.head).double()
    data = labelled(one, sequences(8))
    for name in BOTH:
        assert MEASURES[name](one, data).value == pytest.approx(MEASURES[name](two, data).value, rel=1e-10)
    assert MEASURES["signal_sharpness"](two, data).value == pytest.approx(brute(two, data)[0], rel=1e-9)


def test_half_of_it_times_the_variance_is_the_divergence_under_noise() -> None:
    net = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), seed=4)
    data = labelled(net, normal(30, 4))
    disturbed, size, generator = Disturbed(net), 0.03, torch.Generator().manual_seed(0)
    with torch.no_grad():
        before, seen = disturbed(data[0])
        roots = {}
        for name, signal in seen.items():
            values, vectors = torch.linalg.eigh(torch.cov(signal.T, correction=0))
            roots[name] = vectors * values.clamp_min(0).sqrt()
        total = 0.0
        for _ in range(3000):
            noise = {
                name: size * torch.randn(signal.shape, generator=generator, dtype=torch.float64) @ roots[name].T
                for name, signal in seen.items()
            }
            for sign in (1, -1):
                after = disturbed(data[0], {name: sign * each for name, each in noise.items()})[0]
                total += float(F.kl_div(after.log_softmax(1), before.softmax(1), reduction="batchmean")) / 6000
    assert total == pytest.approx(0.5 * size**2 * MEASURES["signal_sharpness"](net, data).value, rel=0.05)


def test_with_one_place_a_sample_it_is_the_trace_in_the_biases_in_units_of_the_signals() -> None:
    """Σ_l Tr(C_l G_bb): the Gauss-Newton matrix of the parameters, in its rows and columns of biases."""
    net = randomised(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), seed=5)
    inputs, targets = data = labelled(net, normal(12, 4))
    params = {name: p.detach() for name, p in net.named_parameters()}
    jacobians = vmap(jacrev(lambda p, x: functional_call(net, p, x[None])[0]), (None, 0))(params, inputs)
    soft = net(inputs).softmax(1).detach()
    inner = torch.diag_embed(soft) - soft[:, :, None] * soft[:, None, :]
    hidden = net[0](inputs).detach()
    total = 0.0
    for name, signal in (("0.bias", hidden), ("2.bias", net(inputs).detach())):
        block = torch.einsum("nci,ncd,ndj->ij", jacobians[name], inner, jacobians[name]) / len(inputs)
        total += float((torch.cov(signal.T, correction=0) * block).sum())
    assert MEASURES["signal_sharpness"](net, data).value == pytest.approx(total, rel=1e-10)
    assert total == pytest.approx(brute(net, data)[0], rel=1e-9)
    assert targets.shape == (12,)


def test_input_sensitivity_is_the_jacobian_of_the_softmax() -> None:
    net = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), seed=6)
    data = labelled(net, normal(10, 4))
    jacobians = vmap(jacrev(lambda x: net(x[None])[0].softmax(0)))(data[0]).detach()
    assert MEASURES["input_sensitivity"](net, data).value == pytest.approx(
        float(jacobians.flatten(1).norm(dim=1).mean()), rel=1e-12
    )
    gap = 1 - net(data[0]).detach().softmax(1).square().sum(1)
    assert MEASURES["mean_confidence_gap"](net, data).value == pytest.approx(float(gap.mean()), rel=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_they_are_right_at_tiny_losses_in_single_precision(name: str) -> None:
    net = nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(normal(3, 4, seed=3))
        net.bias.copy_(torch.tensor([40.0, 0.0, -3.0]))
    inputs = normal(12, 4).float()
    data = inputs, torch.zeros(12, dtype=torch.long)
    expected = MEASURES[name](copy.deepcopy(net).double(), (inputs.double(), data[1])).value
    assert 0 < expected < 1e-12
    assert MEASURES[name](net, data).value == pytest.approx(expected, rel=1e-4)


def test_one_logit_is_as_two() -> None:
    one = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), seed=7)
    two = copy.deepcopy(one)
    two[2] = nn.Linear(5, 2).double()
    with torch.no_grad():
        two[2].weight.copy_(torch.cat([0 * one[2].weight, one[2].weight]))
        two[2].bias.copy_(torch.cat([0 * one[2].bias, one[2].bias]))
    inputs = normal(10, 4)
    targets = (torch.arange(10) % 2).long()
    for name in ALL:
        single = MEASURES[name](one, (inputs, targets.double()), loss="binary_cross_entropy").value
        assert single == pytest.approx(MEASURES[name](two, (inputs, targets)).value, rel=1e-10), name


# ---------------------------------------------------------------- symmetries

SIZES = {
    "shift_logits": 10.0, "mix_heads": 100.0, "shift_attention_biases": 10.0, "shift_norm_gain": 100.0,
    "scale_gate": 100.0, "mix_linear": 100.0, "rotate_stream": 1.0, "split_units": 0.5, "permute_units": 1.0,
}  # fmt: skip


def moved_by(net: nn.Module, data: Data, name: str, seed: int = 0) -> dict[str, float]:
    """The relative change of each of these measures under a symmetry of far-off size; nothing if it has none."""
    try:
        new = getattr(transforms, name)(net, data=data[0], size=SIZES[name], seed=seed).model
    except InputError:
        return {}
    here, there = Setting(net, data), Setting(new, data)
    found = {each: (MEASURES[each].attempt(here).value, MEASURES[each].attempt(there).value) for each in ALL}
    return {each: abs(after / before - 1) for each, (before, after) in found.items() if not math.isnan(before)}


def with_labels(net: nn.Module, inputs: Tensor) -> Data:
    with torch.no_grad():
        return inputs, net(inputs).argmax(-1)


DAILY = ("bert", "gpt", "llama", "vit", "torch, post-norm", "lora")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in DAILY)) for kind in (*TRANSFORMERS, *ADAPTERS)]
)
def test_transformers_with_matrices_of_condition_100(kind: str) -> None:
    net, inputs = transformer(kind)
    data = with_labels(net, inputs)
    moved = {name: moved_by(net, data, name, seed=1) for name in SIZES}
    found = [change for changes in moved.values() for change in changes.values()]
    assert len(found) >= 4
    assert max(found) < 1e-10, moved


PLAIN = {**zoo.EXACT, **zoo.CHAINS, **{name: each[:2] for name, each in zoo.PROBED.items() if name != "branching"}}
PLAIN_DAILY = (
    "batch norm",
    "prelu",
    "residual",
    "bare matrices",
    "grouped, circular",
    "transposed",
    "tanh",
    "layer norm",
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in PLAIN_DAILY)) for kind in PLAIN]
)
def test_plain_networks_with_matrices_of_condition_100(kind: str) -> None:
    make, shape = PLAIN[kind]
    net = zoo.randomised(make(), seed=1)
    data = zoo.sample_data(shape)
    found = [change for name in SIZES for change in moved_by(net, data, name, seed=1).values()]
    assert found, "it has no symmetry of these"
    assert max(found) < 1e-10


def test_several_symmetries_one_after_the_other() -> None:
    """What survives each survives all: the metric comes from the network as it is after each of them."""
    net, inputs = transformer("llama")
    data = with_labels(net, inputs)
    new = net
    for name in ("shift_norm_gain", "mix_heads", "scale_gate", "split_units", "rotate_stream", "shift_logits"):
        new = getattr(transforms, name)(new, data=inputs, size=SIZES[name], seed=2).model
    here, there = Setting(net, data), Setting(new, data)
    for name in BOTH:
        assert value(there, name) == pytest.approx(value(here, name), rel=1e-9)
    assert value(there, "weight_norm") > 1.5 * value(here, "weight_norm")


def test_in_single_precision_a_symmetry_moves_it_by_rounding_only() -> None:
    net, inputs = transformer("gpt")
    data = with_labels(net, inputs)
    single = copy.deepcopy(net).float()
    new = transforms.mix_heads(single, data=inputs, size=100.0, seed=1).model
    for name in BOTH:
        assert MEASURES[name](new, data).value == pytest.approx(MEASURES[name](single, data).value, rel=1e-3)


def test_it_tells_networks_apart_that_are_no_symmetry_of_each_other() -> None:
    net, inputs = transformer("bert")
    data = with_labels(net, inputs)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.layers[0].query.weight *= 1.1
    for name in BOTH:
        assert abs(MEASURES[name](other, data).value / MEASURES[name](net, data).value - 1) > 1e-4


def test_it_is_taken_unless_others_are_named() -> None:
    assert "signal_sharpness" in DEFAULT


# ---------------------------------------------------------------- subsets, and what is refused


@pytest.mark.parametrize("name", BOTH)
def test_the_error_of_a_subset_is_the_jackknife_by_brute_force(name: str) -> None:
    net = randomised(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), seed=8)
    data = labelled(net, normal(120, 4))
    setting = Setting(net, data)
    found = value(setting, name)
    quick = MEASURES[name].subset_error(setting, found, 1000)
    slow = MEASURES[name].sampling._without_groups(MEASURES[name], setting, found, 1000)
    assert quick.stderr == pytest.approx(slow.stderr, rel=1e-6)
    assert quick.low < found < quick.high


def test_what_cannot_be_measured_says_why() -> None:
    net, data = (
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
        (normal(8, 4).float(), torch.arange(8) % 3),
    )
    with pytest.raises(InputError, match="layers' outputs depend on the whole batch"):
        MEASURES["signal_sharpness"](net, data, batch_norm="batch")
    with pytest.raises(InputError, match="depend on the inputs of other samples"):
        MEASURES["input_sensitivity"](net, data, batch_norm="batch")
    with pytest.raises(InputError, match="needs a loss that offers its output factors"):
        MEASURES["signal_sharpness"](net, data, loss=lambda phi, y: phi.square().sum(1))
    tokens, inputs = transformer("bert")
    with pytest.raises(InputError, match="one tensor of floats"):
        MEASURES["input_sensitivity"](tokens, with_labels(tokens, inputs))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with pytest.raises(InputError, match="no linear layer or convolution whose output"):
        MEASURES["signal_sharpness"](Bare(), (normal(8, 4).float(), torch.arange(8) % 3))

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x) if x.shape[1] > 2 else x).mean(1)

    pieces = [(normal(6, 3, 4).float(), torch.arange(6) % 3), (normal(4, 2, 4).float(), torch.arange(4) % 3)]
    with pytest.raises(InputError, match="do not run the same way for all samples"):
        MEASURES["signal_sharpness"](Sometimes(), pieces)
    small = Setting(net, data, memory="100B")
    assert "more than memory= allows" in MEASURES["signal_sharpness"].attempt(small).reason


def test_the_reference_is_symmetric() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)), seed=9)
    data = labelled(net, normal(5, 3))
    for covariance, curvature in dense(net, data).values():
        assert torch.allclose(covariance, covariance.T)
        assert torch.allclose(curvature, curvature.T)
