"""Modules as pure functions that can be differentiated twice."""

from __future__ import annotations

import copy
import math
import random
import re
import subprocess
import sys
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import naive
import numpy as np
import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import spiritlevel as sl
from spiritlevel.binding.parameters import Params, along, select_parameters
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


class Around(nn.Module):
    """A layer between two linear ones; its input has the given shape a sample."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.layer, self.shape = nn.Linear(4, math.prod(shape)), layer, shape
        with torch.no_grad():
            size = self.middle(torch.zeros(2, 4)).shape[1]
        self.last = nn.Linear(size, 3)

    def middle(self, x: Tensor) -> Tensor:
        result = self.layer(self.first(x).reshape(-1, *self.shape))
        return (result[0] if isinstance(result, tuple) else result).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(x))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def old_weight_norm(module: nn.Module, **options: Any) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module, **options)


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


def warmed(model: nn.Module) -> nn.Module:
    """In training mode, after two steps, so that running statistics say something."""
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(X)
    return model


# ---------------------------------------------------------------- the tests' own reference


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error", "exponential"])
@pytest.mark.parametrize("batch_norm", ["eval", "batch"])
def test_dense_hessians_are_differences_of_gradients(loss: str, batch_norm: str) -> None:
    """The reference of all other tests, against a way that takes no second derivative."""
    model = warmed(small_net())
    found = naive.mean_hessian(model, X, Y, loss, batch_norm=batch_norm)
    assert torch.allclose(found, naive.finite_difference_hessian(model, X, Y, loss, batch_norm=batch_norm), atol=1e-8)
    if batch_norm == "eval":
        each = naive.dense_hessian(model, X, Y, loss)
        assert torch.allclose(each.mean(0), found, atol=1e-14)
        traces = naive.per_sample_traces(model, X, Y, loss)
        blocks = naive.block_traces(model, X, Y, loss)
        assert list(blocks) == [name for name, _ in model.named_parameters()]
        assert torch.allclose(torch.stack(list(blocks.values())).sum(0), traces)
        assert torch.allclose(naive.block_traces(model, X, Y, loss, ["4.bias"])["4.bias"], blocks["4.bias"])


def test_dense_hessians_of_attention() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(2, 1, 2, batch_first=True), nn.Flatten(), nn.Linear(4, 3))
    inputs = torch.randn(3, 2, 2)
    found = naive.mean_hessian(model, inputs, Y[:3])
    assert torch.allclose(found, naive.finite_difference_hessian(model, inputs, Y[:3]), atol=1e-8)


def test_an_asymmetric_reference_is_noticed() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)))
    with pytest.raises((AssertionError, RuntimeError)):  # its forward mode is missing; were it there, it would be wrong
        naive.dense_hessian(model, X, Y)
    with pytest.raises(AssertionError, match="off its transpose"):
        naive.symmetric(torch.tensor([[1.0, 2.0], [2.1, 1.0]]))


# ---------------------------------------------------------------- parameters


def test_parameters_are_chosen_by_name_prefix_or_glob() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(2, 2), "fc2": nn.Linear(2, 2), "conv": nn.Conv1d(1, 1, 1)})
    everything = ["fc.weight", "fc.bias", "fc2.weight", "fc2.bias", "conv.weight", "conv.bias"]
    assert select_parameters(model) == everything
    assert select_parameters(model, "fc") == ["fc.weight", "fc.bias"]  # a prefix ends at a dot
    assert select_parameters(model, "fc*") == everything[:4]
    assert select_parameters(model, ["*.bias", "fc"]) == ["fc.weight", "fc.bias", "fc2.bias", "conv.bias"]
    assert select_parameters(model, (n for n in ["conv.weight", "conv.weight"])) == ["conv.weight"]
    model["fc"].weight.requires_grad_(False)
    assert select_parameters(model) == everything[1:]
    assert select_parameters(model, "fc") == ["fc.weight", "fc.bias"]  # whoever names it wants it


@pytest.mark.parametrize(
    ("model", "params", "message"),
    [
        (nn.Linear(2, 2), "wieght", "unknown parameter 'wieght': did you mean 'weight'? Known: bias, weight."),
        (nn.Linear(2, 2), ["weight", "x*"], "unknown parameter 'x*'"),
        (nn.Linear(2, 2), [], "params= is empty"),
        (nn.Linear(2, 2), 3, "params must be a name or a list of names"),
        (nn.Linear(2, 2), [torch.ones(1)], "params must be a name or a list of names"),
        (nn.ReLU(), None, "the model ReLU has no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), None, "the model Linear has no parameter that requires grad"),
    ],
)
def test_a_wrong_choice_is_refused(model: nn.Module, params: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Problem(model, params=params)


def test_tied_weights_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    problem = Problem(model)
    assert list(problem.params) == ["0.weight"]
    assert problem.size == 16
    other = torch.randn(4, 4)
    with problem.active():
        assert torch.allclose(problem.outputs({"0.weight": other}, X), torch.tanh(X @ other.T) @ other.T)


# ---------------------------------------------------------------- models that cannot be measured


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("model", "the model must be a torch.nn.Module, got str"),
        (nn.LazyLinear(2), "the model LazyLinear has lazy parameters; run it on one batch first"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "mixes parameters of float32, float64; convert it"),
        (nn.Linear(2, 2, dtype=torch.complex64), "the parameter weight is complex, and this needs real ones"),
        (nn.Linear(2, 2, device="meta"), "the parameter weight is on the meta device, without values"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_cannot_be_measured_are_refused(model: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Problem(model)


class Spectral(nn.Module):
    """A filter in frequency space, as Fourier layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64), requires_grad=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4).relu())
        return outputs


@pytest.mark.parametrize("frozen", [True, False])
def test_complex_parameters_that_are_not_measured_are_constants(frozen: bool) -> None:
    torch.manual_seed(0)
    model, data = Spectral(), (torch.randn(6, 4), torch.arange(6) % 3)
    model.filter.requires_grad_(not frozen)
    with torch.no_grad():
        hidden = torch.fft.irfft(torch.fft.rfft(data[0]) * model.filter, n=4).relu()
    params = None if frozen else "last"
    found = sl.sample_traces(model, data, params=params)
    assert found.exact
    wanted = (hidden, data[1])
    torch.testing.assert_close(found.values, sl.sample_traces(model.last, wanted).values, rtol=1e-5, atol=1e-6)
    for function in (sl.hessian, sl.gauss_newton):
        matrix = function(model, data, params=params).dense()
        torch.testing.assert_close(matrix, function(model.last, wanted).dense(), rtol=1e-4, atol=1e-6)
    margins = sl.margins(model, data, distance=2)
    torch.testing.assert_close(margins.output, sl.margins(model.last, wanted).output)
    assert sl.input_curvature(model, data).exact
    with pytest.raises(InputError, match="the parameter filter is complex, and this needs real ones; hold it as pairs"):
        sl.transforms.shift_logits(model, data=data)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused() -> None:
    with pytest.raises(InputError, match="TorchScript model cannot be measured; pass the module that it was made from"):
        Problem(torch.jit.trace(nn.Linear(4, 3), X))


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, pytest.param(lambda model: nn.DataParallel(torch.compile(model)), marks=pytest.mark.slow)],
    ids=["parallel", "compiled"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch about itself, when it loads its compiler
def test_wrappers_are_opened(wrap: Callable[[nn.Module], nn.Module], untouched: Untouched) -> None:
    inner = nn.Sequential(nn.Linear(4, 3))
    wanted, model = sl.sample_traces(inner, (X, Y), per_layer=True), wrap(inner)
    with untouched(model):
        found = sl.sample_traces(model, (X, Y), per_layer=True)
    assert found.exact
    assert list(found.layers) == list(wanted.layers) == ["0.weight", "0.bias"]
    assert torch.equal(found.values, wanted.values)


def test_unknown_batch_norm_mode() -> None:
    with pytest.raises(InputError, match=r"unknown batch_norm mode 'train'.*Known: batch, eval"):
        Problem(nn.Linear(2, 2), batch_norm="train")


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_everything_is_measured_in_eval_mode(training: bool) -> None:
    model = warmed(small_net()).train(training)
    problem = Problem(model)
    with problem.active():
        found = problem.outputs(problem.params, X)
    with torch.no_grad():
        assert torch.equal(found, model.eval()(X))


def norms(dims: int) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    return nn.ModuleList([kind(3), kind(3, affine=False), kind(3, momentum=None), kind(3, track_running_stats=False)])


@pytest.mark.parametrize("dims", [1, 2])
def test_batch_statistics_are_those_of_training_without_dropout(dims: int, untouched: Untouched) -> None:
    shape = (3,) if dims == 1 else (3, 2, 2)
    for norm in norms(dims):
        model = warmed(nn.Sequential(Around(norm, shape), nn.Dropout(0.5))).eval()
        with untouched(model):  # buffers too, to the last bit
            problem = Problem(model, batch_norm="batch")
            with problem.active():
                found = [problem.outputs(problem.params, X) for _ in range(2)]
        model.train()
        model[1].eval()
        with torch.no_grad():
            assert torch.allclose(found[0], model(X), atol=1e-6)
        assert torch.equal(found[0], found[1])


def test_batch_statistics_need_more_than_one_value() -> None:
    problem = Problem(small_net(), batch_norm="batch")
    message = r"more than one value per channel, got inputs of shape \(1, 5\).*is the last one a single sample"
    with problem.active(), pytest.raises(InputError, match=message):
        problem.outputs(problem.params, X[:1])


# ---------------------------------------------------------------- second derivatives of every kind of layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Around(nn.ReLU(), (4,)),
    "leaky relu": lambda: Around(nn.LeakyReLU(), (4,)),
    "prelu": lambda: Around(nn.PReLU(), (4,)),
    "gelu": lambda: Around(nn.GELU(), (4,)),
    "gelu, tanh": lambda: Around(nn.GELU(approximate="tanh"), (4,)),
    "silu": lambda: Around(nn.SiLU(), (4,)),
    "mish": lambda: Around(nn.Mish(), (4,)),
    "elu": lambda: Around(nn.ELU(), (4,)),
    "selu": lambda: Around(nn.SELU(), (4,)),
    "softplus": lambda: Around(nn.Softplus(), (4,)),
    "hard swish": lambda: Around(nn.Hardswish(), (4,)),
    "hard sigmoid": lambda: Around(nn.Hardsigmoid(), (4,)),
    "gated linear unit": lambda: Around(nn.GLU(), (4,)),
    "gated linear unit, dim": lambda: Around(nn.GLU(1), (4, 2)),
    "softmax": lambda: Around(nn.Softmax(-1), (4,)),
    "log softmax": lambda: Around(nn.LogSoftmax(-1), (4,)),
    "max pool": lambda: Around(nn.MaxPool2d(2), (2, 4, 4)),
    "avg pool": lambda: Around(nn.AdaptiveAvgPool2d(2), (2, 3, 3)),
    "conv": lambda: Around(nn.Conv2d(2, 4, 2, groups=2), (2, 3, 3)),
    "transposed conv": lambda: Around(nn.ConvTranspose2d(2, 2, 2), (2, 2, 2)),
    "upsample": lambda: Around(nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 2)),
    "layer norm": lambda: Around(nn.LayerNorm(4), (3, 4)),
    "layer norm, two dims, no bias": lambda: Around(nn.LayerNorm((2, 2), bias=False), (3, 2, 2)),
    "layer norm, plain": lambda: Around(nn.LayerNorm(4, elementwise_affine=False), (4,)),
    "layer norm, low level": lambda: Around(Function(lambda x: torch.layer_norm(x, (4,))), (4,)),
    "rms norm": lambda: Around(nn.RMSNorm(4), (4,)),
    "group norm": lambda: Around(nn.GroupNorm(2, 4), (4, 3)),
    "instance norm": lambda: Around(nn.InstanceNorm1d(4, affine=True), (4, 3)),
    "instance norm, plain": lambda: Around(nn.InstanceNorm2d(2), (2, 3, 3)),
    "instance norm, running": lambda: Around(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 3)),
    "batch norm": lambda: Around(nn.BatchNorm1d(4), (4,)),
    "batch norm, 2d": lambda: Around(nn.BatchNorm2d(2), (2, 3, 3)),
    "batch norm, plain": lambda: Around(nn.BatchNorm1d(4, affine=False), (4,)),
    "local response norm": lambda: Around(nn.LocalResponseNorm(2), (3, 2, 2)),
    "weight norm": lambda: Around(parametrizations.weight_norm(nn.Linear(4, 4)), (4,)),
    "weight norm, dim 1": lambda: Around(parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=1), (2, 4)),
    "weight norm, whole": lambda: Around(parametrizations.weight_norm(nn.Linear(4, 4), dim=None), (4,)),
    "weight norm, old": lambda: Around(old_weight_norm(nn.Linear(4, 4)), (4,)),
    "weight norm, old, whole": lambda: Around(old_weight_norm(nn.Linear(4, 4), dim=None), (4,)),
    "spectral norm": lambda: Around(parametrizations.spectral_norm(nn.Linear(4, 4)), (4,)),
    "attention": lambda: Around(SelfAttention(), (3, 4)),
    "causal attention": lambda: Around(
        Function(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), (1, 3, 4)
    ),
    "encoder layer": lambda: Around(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), (3, 4)),
    "encoder layer, norm first": lambda: Around(
        nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, activation="gelu", norm_first=True), (3, 4)
    ),
    "lstm": lambda: Around(nn.LSTM(2, 3, batch_first=True), (3, 2)),
    "gru": lambda: Around(nn.GRU(2, 3, batch_first=True), (3, 2)),
    "normalize": lambda: Around(Function(F.normalize), (4,)),
}
MODES = [(name, "eval") for name in LAYERS] + [(name, "batch") for name in LAYERS if name.startswith("batch norm")]


def dot(a: Params, b: Params) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


@pytest.mark.parametrize(("name", "batch_norm"), MODES)
def test_second_derivatives_are_right_in_every_mode_of_differentiation(name: str, batch_norm: str) -> None:
    """vᵀ∇²f v and ∇²f v of f = Σ w·φ, four ways, against differences of gradients in float64."""
    model = warmed(LAYERS[name]()).double()
    problem = Problem(model, batch_norm=batch_norm)
    inputs = X.double()
    weights = torch.randn(6, 3, dtype=torch.float64)
    direction = {key: torch.randn_like(tensor) for key, tensor in problem.params.items()}

    def network(params: Params) -> Tensor:
        return problem.outputs(params, inputs)

    def scalar(params: Params) -> Tensor:
        return (weights * network(params)).sum()

    def moved(step: float) -> Params:
        return {key: tensor + step * direction[key] for key, tensor in problem.params.items()}

    def pulled(params: Params) -> Params:  # what Gauss-Newton products and Jacobians do
        _, pull = vjp(network, params)[:2]
        return vmap(lambda cotangent: pull(cotangent)[0])(torch.stack([weights, -weights]))

    with problem.active():
        ends = [grad(scalar)(moved(step * 1e-4)) for step in (1, -1, 2, -2)]
        wanted = {
            key: ((8 * (ends[0][key] - ends[1][key]) - (ends[2][key] - ends[3][key])) / 12e-4).detach()
            for key in direction
        }
        twice_forward = along(lambda p: along(scalar, p, direction)[1], problem.params, direction)[1]
        forward_over_reverse = along(grad(scalar), problem.params, direction)[1]
        vectorised = along(pulled, problem.params, direction)[1]
        leaves = {key: tensor.clone().requires_grad_() for key, tensor in problem.params.items()}
        first = torch.autograd.grad(scalar(leaves), list(leaves.values()), create_graph=True, materialize_grads=True)
        along_first = sum(((g * direction[key]).sum() for g, key in zip(first, leaves, strict=True)), torch.zeros(()))
        second = torch.autograd.grad(along_first, list(leaves.values()), materialize_grads=True)

    size = max(1e-3, math.sqrt(dot(wanted, wanted)))
    for found in (
        forward_over_reverse,
        {key: tensor[0] for key, tensor in vectorised.items()},
        {key: -tensor[1] for key, tensor in vectorised.items()},
        dict(zip(leaves, second, strict=True)),
    ):
        error = {key: found[key].detach() - wanted[key] for key in wanted}
        assert math.sqrt(dot(error, error)) < 1e-6 * size
    quadratic = dot(direction, wanted)
    assert float(twice_forward) == pytest.approx(quadratic, rel=1e-6, abs=1e-6 * size)


@pytest.mark.parametrize("name", LAYERS)
def test_rewritten_layers_give_the_same_outputs(name: str) -> None:
    model = warmed(LAYERS[name]()).double().eval()
    problem = Problem(model)
    with problem.active():
        found = problem.outputs(problem.params, X.double())
    with torch.no_grad():
        assert torch.allclose(found, model(X.double()), rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- nothing is left behind


def sdpa_flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()


def restless_net() -> nn.Module:
    """A bit of everything that a measurement switches, rewrites or leaves on a module."""
    model = nn.Sequential(
        OrderedDict(
            old=old_weight_norm(nn.Linear(4, 4)),
            new=parametrizations.weight_norm(nn.Linear(4, 4)),
            bn=nn.BatchNorm1d(4),
            drop=nn.Dropout(0.5),
            view=nn.Unflatten(1, (1, 4)),
            encoder=nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
            flat=nn.Flatten(),
            spectral=parametrizations.spectral_norm(nn.Linear(4, 3)),
        )
    )
    warmed(model)
    model(X).sum().backward()
    model.get_submodule("drop").eval()
    model.get_submodule("new").bias.requires_grad_(False)
    model.get_submodule("old").note = ["mine"]
    for name in ("old", "bn", "encoder"):  # torch.func knows nothing of backward hooks
        model.get_submodule(name).register_full_backward_hook(lambda *_: None)
        model.get_submodule(name).register_full_backward_pre_hook(lambda *_: None)
    return model


def attributes(model: nn.Module) -> dict[str, list[tuple[str, int]]]:
    """All attributes of all modules and the identity of their values, also inside the tables of a module."""
    tables = ("_parameters", "_buffers", "_modules")
    return {
        name: [(key, id(value)) for key, value in vars(module).items()]
        + [(f"{table}.{key}", id(value)) for table in tables for key, value in vars(module)[table].items()]
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("batch_norm", ["eval", "batch"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_everything_is_given_back(
    training: bool, batch_norm: str, fast: bool, fails: bool, untouched: Untouched
) -> None:
    model = restless_net().train(training)
    torch.backends.mha.set_fastpath_enabled(fast)
    torch.backends.cuda.enable_flash_sdp(fast)
    try:
        flags, before = sdpa_flags(), attributes(model)
        with untouched(model):
            problem = Problem(model, batch_norm=batch_norm)
            try:
                with problem.active():
                    assert not torch.backends.mha.get_fastpath_enabled()
                    problem.outputs(problem.params, X)
                    along(lambda p: problem.losses(p, X, Y).sum(), problem.params, problem.params)
                    torch.rand(3), np.random.random(), random.random()
                    model.extra = nn.Linear(1, 1)
                    model.get_submodule("bn").running_mean = torch.zeros(4)
                    if fails:
                        raise KeyError("stop")
            except KeyError:
                assert fails
        assert attributes(model) == before
        assert sdpa_flags() == flags
        assert torch.backends.mha.get_fastpath_enabled() == fast
        assert parametrize.is_parametrized(model.get_submodule("new"))
        assert not hasattr(model, "extra")
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_flash_sdp(True)


def test_activity_may_be_nested(untouched: Untouched) -> None:
    model = restless_net()
    problem = Problem(model)
    with untouched(model), problem.active():
        outside = problem.outputs(problem.params, X)
        with problem.active():
            inside = problem.outputs(problem.params, X)
        assert torch.equal(inside, outside)
        assert not model.training


def test_parameters_are_copies() -> None:
    model = nn.Linear(4, 3)
    problem = Problem(model)
    with problem.active():
        before = problem.outputs(problem.params, X)
        with torch.no_grad():
            model.weight.add_(1)
        assert torch.equal(problem.outputs(problem.params, X), before)


class Counter(nn.Module):
    """Counts its calls in a buffer, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


def test_buffers_that_a_model_writes_in_place_stay(untouched: Untouched) -> None:
    model = Counter()
    problem = Problem(model)
    with untouched(model), problem.active():
        problem.outputs(problem.params, X)


class Calls(Counter):
    """Its outputs depend on the buffer that it writes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.calls


class Means(Counter):
    """Writes a value that depends on its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x)
        self.calls.copy_(outputs.detach().mean())
        return outputs


@pytest.mark.parametrize("model", [Counter(), Calls(), Means()], ids=["counts", "reads what it wrote", "means"])
def test_models_that_write_their_buffers_can_be_differentiated(model: Any, untouched: Untouched) -> None:
    """Every pass starts from the buffers as they are, so all give the same outputs: here those of the linear layer."""
    wanted = sl.hessian(model.linear, (X, Y)).dense()
    with untouched(model):
        assert torch.allclose(sl.hessian(model, (X, Y)).dense(), wanted, atol=1e-6)
        found = sl.trace(model, (X, Y), method="hutchinson", probes=4)
    assert found.value == pytest.approx(sl.trace(model.linear, (X, Y), method="hutchinson", probes=4).value, rel=1e-5)
    problem = Problem(model)
    with problem.active():
        first, second = (problem.outputs(problem.params, X) for _ in range(2))
    assert torch.equal(first, second)


class Collects(nn.Module):
    """Keeps what it computes in containers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: list[Any] = ["before"]
        self.recent = deque(["before"], maxlen=2)
        self.named: dict[str, Any] = {"inside": [0], "kept": 1}
        self.shapes = {"before"}
        self.itself: list[Any] = []
        self.itself.append(self.itself)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.linear(x)
        self.seen.append(outputs)
        self.recent.append(outputs)
        self.named["inside"].append(outputs)
        self.named["new"] = outputs
        self.shapes.add(str(outputs.shape))
        self.itself.append(outputs)
        return outputs


def test_containers_get_their_contents_back() -> None:
    model = Collects()
    containers = model.seen, model.recent, model.named, model.shapes
    sl.hessian(model, (X, Y)) @ torch.ones(15)
    assert [id(item) for item in containers] == [
        id(getattr(model, key)) for key in ("seen", "recent", "named", "shapes")
    ]
    assert model.seen == ["before"]
    assert list(model.recent) == ["before"]
    assert model.named == {"inside": [0], "kept": 1}
    assert model.shapes == {"before"}
    assert len(model.itself) == 1
    assert model.itself[0] is model.itself


class Refuses(OrderedDict[str, int]):
    """As the outputs of some libraries are: not to be changed."""

    def clear(self) -> None:
        raise TypeError("frozen")


def test_containers_of_other_kinds_are_left_alone() -> None:
    model = nn.Linear(4, 3)
    model.settings = Refuses(a=1)
    sl.hessian(model, (X, Y)) @ torch.ones(15)
    assert model.settings == {"a": 1}


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = layer(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.stack([x, x.flip(1)], 1))[0][:, -1])


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("enabled", [True, False])
def test_recurrent_layers_in_single_precision(layer: type[nn.RNNBase], enabled: bool, untouched: Untouched) -> None:
    """oneDNN's form of them, which float32 takes on a CPU, has no forward derivative."""
    model, flags = Recurrent(layer), torch.backends.mkldnn
    wanted = sl.hessian(copy.deepcopy(model).double(), (X, Y)).dense().float()
    before = flags.enabled
    try:
        flags.enabled = enabled
        with untouched(model):
            found = sl.hessian(model, (X, Y)).dense()
        assert flags.enabled is enabled
    finally:
        flags.enabled = before
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), Function(lambda x: x.mul_(2))], ids=["relu", "mul"])
def test_data_are_not_overwritten_by_models_that_work_in_place(first: nn.Module) -> None:
    model = nn.Sequential(first, nn.Linear(4, 3))
    problem, inputs = Problem(model), X.clone()
    with problem.active():
        passes = [problem.outputs(problem.params, inputs[:3]) for _ in range(3)]
    assert torch.equal(inputs, X)
    assert torch.equal(passes[0], passes[1])
    assert torch.equal(passes[0], passes[2])
    data = inputs, Y
    assert torch.equal(sl.margins(model, data).signed, sl.margins(model, data).signed)
    assert torch.equal(inputs, X)


def test_a_random_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Function(lambda x: F.dropout(x)))  # always on
    with pytest.raises(InputError, match=r"outputs change from one pass to the next .*training=self\.training"):
        sl.margins(model, (X, Y))
    with pytest.raises(InputError, match="outputs change from one pass to the next"):
        sl.sample_traces(model, (X, Y))
    idle = nn.Sequential(nn.Linear(4, 3), Function(lambda x: x + 0 * torch.rand(1) * random.random()))
    assert len(sl.margins(idle, (X, Y))) == 6  # draws, but to no effect


def test_warnings_of_torch_about_itself_stay_inside() -> None:
    """Also in a process that turns warnings into errors and has not yet loaded forward mode."""
    code = (
        "import warnings, torch, spiritlevel as sl\n"
        "warnings.simplefilter('error')\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1))\n"
        "data = torch.rand(6, 4), torch.arange(6) % 3\n"
        "print(len(sl.sample_traces(net, data, method='hutchinson', probes=2)), len(warnings.filters))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == "6"


# ---------------------------------------------------------------- precision, gradients on and off


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_as_a_float32_copy(dtype: torch.dtype, untouched: Untouched) -> None:
    model = warmed(small_net()).to(dtype)
    with untouched(model):
        problem = Problem(model)
        inputs, _ = problem.place(X.to(dtype), Y)
        with problem.active():
            outputs = problem.outputs(problem.params, inputs)
    assert problem.dtype == inputs.dtype == outputs.dtype == torch.float32
    assert problem.model is not model
    assert all(torch.equal(problem.params[name], p.float()) for name, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_batches_are_placed() -> None:
    problem = Problem(nn.Linear(4, 3).double())
    inputs = {"a": X.clone().requires_grad_(), "b": (torch.ones(6, dtype=torch.int32), "text", None)}
    placed, targets = problem.place(inputs, Y)
    assert placed["a"].dtype == torch.float64
    assert not placed["a"].requires_grad
    assert placed["b"][0].dtype == torch.int32
    assert placed["b"][1:] == ("text", None)
    assert torch.equal(targets, Y)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_gradient_mode_does_not_matter(context: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3))
    wanted = {
        "margins": sl.margins(model, (X, Y), distance=2).distance,
        "traces": sl.sample_traces(model, (X, Y), method="hutchinson", probes=3).values,
    }
    with context():
        inputs = X * 1  # made under inference mode, these could not be differentiated
        found = {
            "margins": sl.margins(model, (inputs, Y), distance=2).distance,
            "traces": sl.sample_traces(model, (inputs, Y), method="hutchinson", probes=3).values,
        }
        assert torch.is_grad_enabled() == (context is torch.enable_grad)
        assert torch.is_inference_mode_enabled() == (context is torch.inference_mode)
    for name, values in wanted.items():
        assert values is not None
        assert torch.equal(values, found[name])  # type: ignore[arg-type]


def test_a_model_made_under_inference_mode_can_be_measured() -> None:
    with torch.inference_mode():
        model, data = nn.Linear(4, 3), (torch.randn(6, 4), Y.clone())
        inside = sl.sample_traces(model, data).values
    assert torch.equal(sl.sample_traces(model, data).values, inside)


def test_autocast_of_the_caller_does_not_lower_the_precision() -> None:
    model = nn.Linear(4, 3)
    problem = Problem(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with problem.active():
            assert problem.outputs(problem.params, X).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        inside = sl.margins(model, (X, Y)).signed
    assert torch.equal(inside, sl.margins(model, (X, Y)).signed)


# ---------------------------------------------------------------- inputs and outputs


def test_inputs_may_be_tuples_or_dicts_and_outputs_may_have_logits() -> None:
    linear = nn.Linear(4, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor, scale: Tensor, flag: bool = False) -> Any:
            logits = self.linear(x) * scale[:, None]
            return SimpleNamespace(logits=logits) if flag else logits

    problem = Problem(Model())
    scale = torch.arange(6.0)
    wanted = linear(X).detach() * scale[:, None]
    with problem.active():
        for inputs in ((X, scale), [X, scale], {"x": X, "scale": scale}, {"scale": scale, "x": X, "flag": True}):
            assert torch.equal(problem.outputs(problem.params, inputs), wanted)
        assert torch.equal(
            problem.losses(problem.params, (X, scale), Y),
            problem.loss.values(problem.outputs(problem.params, inputs), Y),
        )
    for inputs in ((X, scale), {"x": X, "scale": scale}, UserDict(x=X, scale=scale)):
        margins = sl.margins(Model(), (inputs, Y), batch_size=4)
        assert torch.allclose(margins.signed, sl.signed_margin(wanted, Y))


def test_other_outputs_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3), Function(lambda x: (x, x)))
    problem = Problem(model)
    with problem.active(), pytest.raises(InputError, match=r"it returned 2 items .*; say with output= which"):
        problem.outputs(problem.params, X)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.Linear(5, 3), X, r"the model Linear fails on inputs of shape \(6, 4\): mat1 and mat2 shapes cannot be"),
        (nn.Linear(5, 3), X, r"\(the data have 4 numbers for each sample, and the model takes 5\)\.$"),
        (nn.Conv2d(1, 2, 3), X, r"Conv2d fails on inputs of shape \(6, 4\): Expected 3D"),
        (nn.Linear(4, 3), (X, X), r"Linear fails on inputs of shape \(6, 4\), \(6, 4\): .* positional arguments"),
        (nn.Linear(4, 3), {"x": X}, "Linear fails on inputs of shape .* must be Tensor, not dict"),
        (nn.Embedding(3, 2), torch.full((6, 1), 7), r"Embedding fails on inputs of shape \(6, 1\): index out of range"),
        (nn.BatchNorm1d(3), X, "BatchNorm1d fails on inputs"),
    ],
)
def test_inputs_of_the_wrong_shape_are_refused_in_a_sentence(model: nn.Module, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        sl.margins(model, (inputs, Y))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value, RuntimeError)  # whoever expects what torch raises still gets it


@pytest.mark.parametrize("measure", [sl.hessian, sl.gauss_newton, sl.empirical_fisher])
def test_a_model_that_reads_memory_is_measured_in_reverse_mode(measure: Callable[..., Any]) -> None:
    """Inside the transformations of `torch.func` a tensor has none; plain autograd needs no such transformation."""
    torch.manual_seed(0)
    last = Function(lambda x: x * torch.from_numpy(x.detach().numpy() > 0))
    model = nn.Sequential(nn.Linear(4, 3), last)
    twin = nn.Sequential(model[0], nn.ReLU())
    torch.testing.assert_close(measure(model, (X, Y)).dense(), measure(twin, (X, Y)).dense())
    traces = sl.sample_traces(model, (X, Y), method="hutchinson", probes=4)
    torch.testing.assert_close(traces.values, sl.sample_traces(twin, (X, Y), method="hutchinson", probes=4).values)
    assert sl.landscape(model, (X, Y), points=3).value == pytest.approx(sl.landscape(twin, (X, Y), points=3).value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.sum(), r"outputs of shape \(\) for 6 samples; "),
        (lambda x: x.T, r"outputs of shape \(3, 6\) for 6 samples"),
        (lambda x: x[:, :2], "target 2 .* is outside the model's 2 classes"),
        (lambda x: x / 0, "output for sample 10 is NaN or infinite although its input is finite; check the weights"),
        (lambda x: torch.cat([x[:3], x[3:] * math.nan]), "output for sample 13 is NaN"),
        (lambda x: x.masked_fill(x < x.amax(), -math.inf), "if it masks classes, have it write −1e9"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(change: Callable[[Tensor], Tensor], message: str) -> None:
    problem = Problem(nn.Sequential(nn.Linear(4, 3), Function(change)))
    with problem.active():
        outputs = problem.outputs(problem.params, X)
    with pytest.raises(InputError, match=message):
        problem.checked(outputs, X, Y, start=10)


@pytest.mark.parametrize("column", [False, True])
def test_inputs_that_are_not_finite_are_named(column: bool) -> None:
    """Also for inputs and outputs without a second dimension."""
    inputs = torch.arange(6.0)
    inputs[4] = math.nan
    model = Function(lambda x: x[:, None].expand(-1, 3) if column else x)
    model.weight = nn.Parameter(torch.zeros(()))
    problem = Problem(model, loss="cross_entropy" if column else "exponential")
    targets = Y if column else Y % 2
    with problem.active():
        outputs = problem.outputs(problem.params, inputs)
    with pytest.raises(InputError, match="the input of sample 104 is NaN or infinite; clean the data first"):
        problem.checked(outputs, inputs, targets, start=100)


INFINITE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "sample_traces": sl.sample_traces,
    "probes": lambda model, data: sl.sample_traces(model, data, method="hutchinson"),
    "trace": sl.trace,
    "input_curvature": sl.input_curvature,
    "perturb": lambda model, data: sl.perturb(model, data, "int8"),
}


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("what", INFINITE)
def test_an_infinite_input_is_named_where_only_derivatives_are_no_numbers(what: str, value: float) -> None:
    """A sigmoid of infinity is a number, and 0 · ∞ is none: a trace was undefined, or derivatives called wrong."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
    INFINITE[what](net, (x, y))
    x[7, 2] = value
    with pytest.raises(InputError, match="the input of sample 7 is NaN or infinite; clean the data first"):
        INFINITE[what](net, (x, y))


def test_a_mask_may_be_infinite() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            weights = torch.softmax(self.score(x)[..., 0] + mask, dim=1)
            return self.head((weights[..., None] * x).sum(1))

    torch.manual_seed(0)
    net, x, y = Masked(), torch.randn(6, 5, 4), torch.arange(6) % 3
    mask = torch.zeros(6, 5)
    mask[:, 3:] = -math.inf
    found = sl.sample_traces(net, [((x, mask), y)], seed=1)
    alike = sl.sample_traces(net, [((x[:, :3], mask[:, :3]), y)], seed=1)
    assert torch.allclose(found.values, alike.values, rtol=1e-4)
