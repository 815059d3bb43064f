"""What every public function of a model promises: it leaves no trace, repeats with its seed, ignores the batch size.

A new function that is called as `f(model, data)` is found automatically. One line in `CALLS` holds a further way of
calling to the same promises.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.answers.surface import landscape
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian, hessian_variance
from spiritlevel.results import Result


@dataclasses.dataclass(frozen=True)
class Call:
    """One way of calling a function of a model and data."""

    function: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    random: bool = False  # whether the seed changes the result
    splits: bool = True  # whether the result is the same for all batch sizes
    smooth: bool = False  # measured on a network with layer norm, attention and weight norm instead of the ReLU one
    slow: bool = False  # left to the long run of the tests

    def __call__(self, model: nn.Module, data: Any, **more: Any) -> Any:
        known = inspect.signature(self.function).parameters
        wanted = {key: value for key, value in more.items() if key in known}
        return self.function(model, data, **{**wanted, **self.options})


def _compared(model: nn.Module, data: Any, *, loss: Any = "cross_entropy", seed: int = 0) -> Any:
    """A model beside a second one of the same kind."""
    other = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    return sl.compare(model, other, data, loss=loss, measures=["margin_mean"], audit=False, seed=seed)


CALLS: dict[str, Call] = {
    "sample_traces": Call(sl.sample_traces, {"per_layer": True}),
    "sample_traces, passes": Call(sl.sample_traces, {"passes": 1}, random=True),
    "sample_traces, hutchinson": Call(sl.sample_traces, {"method": "hutchinson", "probes": 3}, random=True),
    "sample_traces, pyhessian": Call(sl.sample_traces, {"method": "pyhessian"}, random=True, slow=True),
    "sample_traces, smooth": Call(sl.sample_traces, {"probes": 3}, random=True, smooth=True),
    "trace": Call(sl.trace),
    "trace, rel_err": Call(sl.trace, {"method": "hutchinson", "rel_err": 9.0}, random=True, slow=True),
    "margins": Call(sl.margins),
    "margins, distance": Call(sl.margins, {"distance": 2}),
    "margins, layer": Call(sl.margins, {"distance": "inf", "layer": "0"}),
    "margins, batch statistics": Call(sl.margins, {"batch_norm": "batch"}, splits=False),
    "hessian": Call(hessian),
    "hessian, smooth": Call(hessian, smooth=True),
    "hessian, batch statistics": Call(hessian, {"batch_norm": "batch"}, splits=False),
    "gauss_newton": Call(gauss_newton),
    "empirical_fisher": Call(empirical_fisher),
    "hessian_variance": Call(hessian_variance, {"batch_size": 4}, splits=False),
    "audit": Call(
        sl.audit, {"measures": ["trace", "path_norm", "ball_sharpness"], "transforms": ["rescale_layers"]}, splits=False
    ),
    "measure": Call(sl.measure, {"measures": ["trace", "margin_mean"], "parts": ["pictures"]}, random=True),
    "compare": Call(_compared),
    "perturb": Call(sl.perturb, {"change": "int2"}),
    "perturb, noise": Call(sl.perturb, {"change": "noise:0.3", "layers": False}, random=True, smooth=True),
    "choose_bits": Call(sl.choose_bits, {"choices": (2, 3), "bits": 2.5}),
    "landscape, random": Call(landscape, {"directions": "random", "points": 5}, random=True),
    "batch_eigenvalues": Call(sl.batch_eigenvalues, {"k": 1, "batch_size": 3, "count": 2}, random=True, splits=False),
    "landscape, eigenvectors": Call(landscape, {"points": 5}, slow=True),
}


def found_by_themselves() -> Iterator[tuple[str, Call]]:
    listed = {call.function for call in CALLS.values()}
    for name in sl._HOME:
        value = getattr(sl, name)
        parameters = inspect.signature(value).parameters if inspect.isfunction(value) else {}
        if next(iter(parameters), "") == "model" and value not in listed:
            yield name, Call(value)


CALLS |= dict(found_by_themselves())
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * call.slow) for name, call in CALLS.items()]
SPLIT = [pytest.param(name, marks=[pytest.mark.slow] * call.slow) for name, call in CALLS.items() if call.splits]


class Mixture(nn.Module):
    """Smooth, with everything that must be rewritten or switched to be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([self.first(x), x], 1)
        return self.last(self.norm(F.scaled_dot_product_attention(tokens, tokens, tokens).sum(1)))


def make_model(smooth: bool, training: bool) -> nn.Module:
    """A float64 network with statistics, gradients, hooks, one frozen parameter and a mode of its own in one layer."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 4))
    model = (Mixture() if smooth else plain).double().train()
    model(torch.rand(8, 4, dtype=torch.float64)).sum().backward()
    model.train(training)
    norm, last = (model.norm, model.last[2]) if isinstance(model, Mixture) else (plain[1], plain[4])
    norm.train(not training)
    last.bias.requires_grad_(False)
    last.register_forward_hook(lambda *_: None)
    last.register_full_backward_hook(lambda *_: None)
    last.weight.register_hook(lambda grad: grad)
    return model


def make_data(count: int = 7, wrong: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    targets = torch.arange(count) % 4
    if wrong:
        targets[-1] = 99
    return inputs, targets


def numbers(result: Any) -> dict[str, Tensor]:
    """All numbers of a result, as tensors, without what tells its cost."""
    if isinstance(result, Tensor):
        return {"": result.detach().double()}
    if isinstance(result, bool | int | float):
        return {"": torch.tensor(float(result), dtype=torch.float64)}
    if isinstance(result, Operator):
        vectors = torch.randn(result.size, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return {"products": (result @ vectors.to(result.dtype)).double()}
    if isinstance(result, Result):
        names = [f.name for f in dataclasses.fields(result)]  # type: ignore[arg-type]
        result = {name: getattr(result, name) for name in names if name not in ("matvecs", "seed", "seconds")}
    if isinstance(result, list | tuple):
        result = {str(index): item for index, item in enumerate(result)}
    if isinstance(result, dict):
        return {f"{key}.{name}": value for key, item in result.items() for name, value in numbers(item).items()}
    return {}


def differs(a: Any, b: Any, tolerance: float) -> list[str]:
    first, second = numbers(a), numbers(b)
    assert first, "nothing to compare"
    both = first.keys() & second.keys()  # how well flips were told is there only where there are some
    assert {key for key in first.keys() ^ second.keys() if not key.startswith("agreement.")} == set()
    return [
        key
        for key in both
        if first[key].shape != second[key].shape
        or not torch.allclose(
            first[key],
            second[key],
            rtol=0,
            atol=tolerance * float(first[key].abs().nan_to_num(posinf=0).max() if first[key].numel() else 0),
            equal_nan=True,
        )
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_no_trace_is_left(name: str, training: bool, fails: bool, untouched: Untouched) -> None:
    """In the model, the data, the random states and the switches of torch; also if the data turn out to be bad."""
    call = CALLS[name]
    model, data = make_model(call.smooth, training), make_data(wrong=fails)
    before = [tensor.clone() for tensor in data]
    with untouched(model), pytest.raises(InputError, match="99") if fails else nullcontext():
        result = call(model, DataLoader(TensorDataset(*data), batch_size=4))
        numbers(result)  # an operator is used as well
    assert all(map(torch.equal, data, before))


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_outlives_its_use(name: str) -> None:
    """In objects that refer to each other in circles it would, until the collector of Python comes by."""
    call, data = CALLS[name], DataLoader(TensorDataset(*make_data()), batch_size=4)
    model = make_model(call.smooth, training=False)
    numbers(call(model, data))  # what is loaded at the first use stays
    gc.collect()
    gc.disable()
    try:
        numbers(call(model, data))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(item.shape) for item in gc.garbage if isinstance(item, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.parametrize("name", NAMES)
def test_the_mode_of_the_model_and_of_the_caller_do_not_matter(name: str) -> None:
    call, data = CALLS[name], make_data()
    model = make_model(call.smooth, training=False)
    usual = call(model.eval(), data)
    with torch.inference_mode():
        assert not differs(usual, call(model.train(), data), 0)


class Refilled:
    """Batches that all lie in the same memory, one after the other."""

    def __init__(self, data: tuple[Tensor, Tensor], size: int) -> None:
        self.data, self.size = data, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        memory = [torch.empty_like(tensor[: self.size]) for tensor in self.data]
        for start in range(0, len(self.data[1]), self.size):
            pair = [tensor[start : start + self.size] for tensor in self.data]
            yield tuple(own[: len(new)].copy_(new) for own, new in zip(memory, pair, strict=True))


@pytest.mark.parametrize("name", SPLIT)
def test_batches_may_all_lie_in_the_same_memory(name: str) -> None:
    call, data = CALLS[name], make_data(20)
    model = make_model(call.smooth, training=False)
    batches = list(zip(data[0].split(4), data[1].split(4), strict=True))
    assert not differs(call(model, batches), call(model, Refilled(data, 4)), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name: str) -> None:
    """Equal seeds give equal bits, whatever the global random states; another seed matters only if it should."""
    call, data = CALLS[name], make_data()
    model = make_model(call.smooth, training=False)
    torch.manual_seed(3)
    first = call(model, data, seed=0)
    torch.manual_seed(4)
    assert not differs(first, call(model, data, seed=0), 0)
    assert bool(differs(first, call(model, data, seed=1), 1e-9)) == call.random


@pytest.mark.parametrize("name", SPLIT)
def test_the_split_into_batches_does_not_matter(name: str) -> None:
    """Beyond rounding: neither `batch_size`, nor ragged batches, nor the kind of data."""
    call, data = CALLS[name], make_data()
    model = make_model(call.smooth, training=False)
    whole = call(model, data)
    ragged = [(data[0][:1], data[1][:1]), (data[0][1:], data[1][1:])]
    assert not differs(whole, call(model, DataLoader(TensorDataset(*data), batch_size=4), batch_size=1), 1e-9)
    assert not differs(whole, call(model, ragged, batch_size=4), 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_models_are_measured_as_float32(name: str, untouched: Untouched) -> None:
    call, (inputs, targets) = CALLS[name], make_data()
    half = make_model(call.smooth, training=False).to(torch.bfloat16)
    with untouched(half):
        found = call(half, (inputs, targets))
    single = make_model(call.smooth, training=False).to(torch.bfloat16).float()
    assert not differs(call(single, (inputs, targets)), found, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)), "the data are empty"),
        (iter([make_data()]), "read only once"),
        ((make_data()[0], make_data()[1][:3]), "do not fit targets"),
        ((torch.full((7, 4), torch.nan), make_data()[1]), "the input of sample 0 is NaN or infinite"),
        (make_data(wrong=True), "target 99 .* is outside the model's 4 classes"),
        ((torch.zeros(7, 3), make_data()[1]), r"fails on inputs of shape \(\d, 3\)"),
        (None, "data must be a pair of tensors"),
    ],
    ids=["empty", "iterator", "lengths", "nan", "label", "shape", "none"],
)
def test_bad_data_are_refused_in_one_sentence(name: str, data: Any, message: str) -> None:
    call = CALLS[name]
    with pytest.raises(InputError, match=message) as caught:
        call(make_model(call.smooth, training=False), data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_bad_models_and_losses_are_refused_in_one_sentence(name: str) -> None:
    call = CALLS[name]
    with pytest.raises(InputError, match=r"the model must be a torch\.nn\.Module, got str"):
        call("model", make_data())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown loss 'cross entropy': did you mean 'cross_entropy'"):
        call(make_model(call.smooth, training=False), make_data(), loss="cross entropy")


def test_the_battery_notices(untouched: Untouched) -> None:
    """A function that breaks every promise fails every test."""

    def bad(model: nn.Module, data: Any, *, batch_size: int = 7, seed: int = 0) -> float:
        model.eval()
        return float(torch.rand(())) + batch_size

    model, data = make_model(smooth=False, training=True), make_data()
    with pytest.raises(AssertionError, match="left a trace in"), untouched(model):
        Call(bad)(model, data)
    assert differs(Call(bad)(model, data), Call(bad)(model, data), 0)
    assert differs(bad(model, data), Call(bad)(model, data, batch_size=1), 1e-9)
    assert not differs(1.0, 1.0, 0)
