"""Per-sample traces of networks that once were called exact and were not, crashed, or said something else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import naive
import numpy as np
import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.samples import collecting
from spiritlevel.samples.traces import sample_traces
from spiritlevel.watching import chains
from spiritlevel.watching.recording import analyse_few

# ---------------------------------------------------------------- what once was called exact and was not


class Written(nn.Module):
    """A forward pass written out in a test."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def dense_in_reverse(model: nn.Module, inputs: Any, targets: Tensor, loss: Any = F.cross_entropy) -> Tensor:
    """Tr ∇²ℓₙ by reverse over reverse mode of the module itself, one sample and one parameter after the other."""
    values = []
    for n in range(len(targets)):
        outputs = model(*(leaf[n : n + 1] for leaf in (inputs if isinstance(inputs, tuple) else (inputs,))))
        params = list(model.parameters())
        gradients = torch.autograd.grad(loss(outputs, targets[n : n + 1]), params, create_graph=True, allow_unused=True)
        total = 0.0
        for parameter, gradient in zip(params, gradients, strict=True):
            for index, slope in enumerate(() if gradient is None else gradient.reshape(-1)):
                if slope.requires_grad:
                    (row,) = torch.autograd.grad(slope, parameter, retain_graph=True, allow_unused=True)
                    total += 0.0 if row is None else float(row.reshape(-1)[index])
        values.append(total)
    return torch.tensor(values, dtype=torch.float64)


def flat_net(activation: nn.Module, first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(6, 5), activation, nn.Linear(5, 3)).double()


def layers() -> dict[str, nn.Module]:
    return {"a": nn.Linear(6, 5), "b": nn.Linear(5, 3)}


def agrees(result: Any, expected: Tensor) -> bool:
    """To rounding if the result calls itself exact, within its errors otherwise."""
    if result.exact:
        return bool(torch.allclose(result.values, expected, rtol=1e-9, atol=1e-12))
    return float(((result.values - expected) / result.stderr.clamp_min(1e-12)).abs().max()) < 5


def _tanh_(x: Tensor) -> Tensor:
    return x.tanh_()


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3))


with warnings.catch_warnings():  # deprecated, and still in many a model
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_tanh_, scripted_mean = torch.jit.script(_tanh_), torch.jit.script(_mean)


def part_overwritten(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, :2] = 0.5
    return self.b(torch.tanh(h))


def foreach_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    torch._foreach_tanh_([h])
    return self.b(h)


def partly_without_graph(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.tanh(self.a(x))
    return self.b(h)


@pytest.mark.parametrize(
    "forward",
    [part_overwritten, foreach_in_place, lambda self, x: self.b(scripted_tanh_(self.a(x)))],
    ids=["part overwritten", "foreach", "scripted"],
)
def test_a_chain_that_is_written_to_in_place_is_not_taken_for_one(forward: Callable[..., Tensor]) -> None:
    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets), probes=300)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))


def test_a_hook_that_ablates_in_place_is_part_of_the_network() -> None:
    def ablate(module: nn.Module, arguments: Any, output: Tensor) -> None:
        output[:, [0, 3]] = 0

    (inputs, targets) = zoo.sample_data(zoo.FLAT)
    for activation in (nn.GELU(), nn.LeakyReLU()):
        model = flat_net(activation)
        model[1].register_forward_hook(ablate)
        result = sample_traces(model, (inputs, targets), probes=300)
        assert result.exact == isinstance(activation, nn.LeakyReLU)
        assert agrees(result, dense_in_reverse(model, inputs, targets))


def test_a_chain_that_ends_on_a_later_batch() -> None:
    """Only large batches pass another layer: seen in the outputs, not in the first few samples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h if len(x) <= 5 else h * h)

    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets))
    assert not result.exact
    assert any("sample 0 the model's outputs are not those of the layers" in note for note in result.notes)
    with pytest.raises(NotExactError, match="outputs are not those of the layers that were seen at first"):
        sample_traces(model, (inputs, targets), method="exact")


def test_a_chain_partly_under_no_grad_is_refused_by_name() -> None:
    model, batch = Written(partly_without_graph, **layers()), zoo.sample_data(zoo.FLAT)
    for method in ("auto", "hutchinson"):
        with pytest.raises(InputError, match=r"forward under torch.no_grad\(\)"):
            sample_traces(model, batch, method=method)


def test_the_size_of_a_complex_number_is_curved() -> None:
    model = Written(lambda self, x: self.b(torch.fft.rfft(self.a(x)).abs()), a=nn.Linear(6, 5), b=nn.Linear(3, 3))
    model, (inputs, targets) = model.double(), zoo.sample_data(zoo.FLAT)
    result = sample_traces(model, (inputs, targets), probes=600)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))
    split = Written(
        lambda self, x: self.b(torch.view_as_real(torch.fft.rfft(self.a(x))).flatten(1)),
        a=nn.Linear(6, 5),
        b=nn.Linear(6, 3),
    ).double()
    assert agrees(sample_traces(split, (inputs, targets), method="exact"), dense_in_reverse(split, inputs, targets))


class Recurrent(nn.Module):
    """Linear in every weight for one step, of degree two and more in `again` for three."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x[:, 0]))
        for t in range(1, x.shape[1]):
            h = torch.relu(self.enter(x[:, t]) + self.again(h))
        return self.head(h)


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
def test_batches_of_another_length_are_looked_at_anew(lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, targets = Recurrent().double(), torch.tensor([0, 1, 2, 1, 0, 2])
    pieces = [torch.randn(6, length, 2, dtype=torch.float64) for length in lengths]
    result = sample_traces(model, [(piece, targets) for piece in pieces], probes=400)
    assert not result.exact
    assert agrees(result, torch.cat([dense_in_reverse(model, piece, targets) for piece in pieces]))
    with pytest.raises(NotExactError):
        sample_traces(model, [(piece, targets) for piece in pieces], method="exact")


def test_lengths_that_change_nothing_stay_exact() -> None:
    torch.manual_seed(0)
    model = Written(lambda self, x: self.b(torch.relu(self.a(x)).mean(1)), a=nn.Linear(2, 4), b=nn.Linear(4, 3))
    model, targets = model.double(), torch.tensor([0, 1, 2, 1, 0, 2])
    pieces = [torch.randn(6, length, 2, dtype=torch.float64) for length in (1, 3, 20, 2)]
    result = sample_traces(model, [(piece, targets) for piece in pieces], method="exact")
    assert agrees(result, torch.cat([dense_in_reverse(model, piece, targets) for piece in pieces]))


def test_another_branch_on_a_later_batch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if float(x.abs().max()) < 3 else torch.tanh(h))

    torch.manual_seed(0)
    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    inputs = inputs.clamp(-2, 2)
    inputs[6:] *= 4
    inputs[6:, 0] = 5
    pieces = [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])]
    result = sample_traces(model, pieces, probes=400)
    assert not result.exact
    assert agrees(result, dense_in_reverse(model, inputs, targets))
    with pytest.raises(NotExactError, match="makes a Python value out of one that depends on parameters or inputs"):
        sample_traces(model, pieces, method="exact")


def test_another_branch_for_batches_of_another_size() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.relu(h) if len(x) < 6 else torch.tanh(h))

    model, (inputs, targets) = Written(forward, **layers()).double(), zoo.sample_data(zoo.FLAT)
    assert sample_traces(model, (inputs, targets), batch_size=5).exact
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sample_traces(model, (inputs, targets), batch_size=6)


def sorted_by_length(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = torch.argsort(lengths, descending=True, stable=True)
    return self.b(torch.relu(self.a(x[order]))[torch.argsort(order)])


def test_rows_in_another_order_than_the_samples() -> None:
    model, (inputs, targets) = Written(sorted_by_length, **layers()).double(), zoo.sample_data(zoo.FLAT)
    lengths = torch.tensor([5, 5, 5, 2, 7, 9, 1, 4, 4, 8, 3, 6])  # the first three are in order
    result = sample_traces(model, ((inputs, lengths), targets), method="exact")
    assert agrees(result, dense_in_reverse(model, (inputs, lengths), targets))
    pieces = [((inputs[:1], lengths[:1]), targets[:1]), ((inputs[1:], lengths[1:]), targets[1:])]
    torch.testing.assert_close(sample_traces(model, pieces, method="exact").values, result.values)


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "earlier samples": lambda h: h.cumsum(0),
    "later samples": lambda h: h.flip(0).cumsum(0).flip(0),
    "the place": lambda h: h + torch.arange(len(h))[:, None],
    "batch statistics": nn.BatchNorm1d(5, track_running_stats=False, affine=False),
    "the mean": lambda h: torch.softmax(h, 1) - h.mean(0),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("method", ["auto", "hutchinson", "pyhessian"])
def test_outputs_that_depend_on_other_samples_have_no_traces(name: str, method: str) -> None:
    model = Written(lambda self, x: self.b(torch.relu(COUPLED[name](self.a(x)))), **layers()).double()
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sample_traces(model, zoo.sample_data(zoo.FLAT), method=method)


def test_pyhessian_with_batch_statistics_keeps_the_batch() -> None:
    model = flat_net(nn.Sequential(nn.BatchNorm1d(5), nn.ReLU()))
    batch = zoo.sample_data(zoo.FLAT, 20)
    found = sample_traces(model, batch, method="pyhessian", batch_norm="batch")
    draws = sample_traces(model, batch, method="hutchinson", batch_norm="batch", probes=101).draws  # no groups
    assert draws is not None
    assert found.probes is not None
    assert len(found.probes.unique()) > 1
    wanted = torch.stack([row[: int(count)].mean() for row, count in zip(draws, found.probes, strict=True)])
    torch.testing.assert_close(found.values, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("alpha", [1e10, 1e20, 1e25])
@pytest.mark.parametrize("kind", ["dense", "conv", "pooled"])
def test_float32_norms_of_rescaled_layers_neither_overflow_nor_vanish(kind: str, alpha: float) -> None:
    torch.manual_seed(0)
    model, shape = {
        "dense": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (6,)),
        "conv": lambda: (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 4), nn.Flatten()), (2, 6, 6)),
        "pooled": lambda: (
            nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)),
            (2, 6, 6),
        ),
    }[kind]()
    first, second = (module for module in model if hasattr(module, "weight"))
    with torch.no_grad():
        first.weight *= alpha
        first.bias *= alpha
        second.weight /= alpha
    batch = torch.randn(5, *shape), torch.tensor([0, 1, 2, 1, 0])
    single = sample_traces(model, batch, per_layer=True)
    double = sample_traces(model.double(), batch, per_layer=True)
    for name, values in double.layers.items():
        torch.testing.assert_close(single.layers[name], values, rtol=1e-5, atol=0)


def test_norms_beyond_float32_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        for module, factor in zip((model[0], model[2], model[3]), (1e-30, 1e25, 1e25), strict=True):
            module.weight *= factor
        model[0].bias *= 1e-30
    with pytest.raises(InputError, match=r"beyond float32 for sample \d+; measure model.double\(\)"):
        sample_traces(model, (torch.randn(9, 6), torch.zeros(9).long()), batch_size=3)


@pytest.mark.parametrize("kind", ["tokens", "conv"])
def test_float32_inputs_far_from_zero_keep_their_digits(kind: str) -> None:
    """Gradients of differences: the inputs cancel in them, and products of the inputs would cancel twice as much."""
    torch.manual_seed(0)
    signs = torch.tensor([1.0, -1, 1, -1])
    if kind == "tokens":
        inputs, layer, dim = torch.randn(30, 4, 40), nn.Linear(40, 50), 1
    else:
        inputs, layer, dim = torch.randn(30, 40, 3, 3), nn.Conv2d(40, 50, 2), 2

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x) if dim == 1 else self.a(x).flatten(2)
        return self.b((h * (signs[:, None] if dim == 1 else signs).to(h)).sum(dim))

    model = Written(forward, a=layer, b=nn.Linear(50, 5))
    inputs, targets = inputs + 100, torch.randint(0, 5, (30,))
    single = sample_traces(model, (inputs, targets), method="exact")
    double = sample_traces(model.double(), (inputs, targets), method="exact")
    assert not single.notes
    torch.testing.assert_close(single.values, double.values, rtol=1e-5, atol=0)


def test_mse_of_whole_numbers_is_that_of_torch() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    inputs, targets = zoo.sample_data(zoo.FLAT)[0], torch.arange(12) % 3
    result = sample_traces(model, (inputs, targets), loss=nn.MSELoss())
    expected = dense_in_reverse(model, inputs, targets, lambda o, t: F.mse_loss(o, t.to(o)[:, None]))
    assert result.exact
    assert agrees(result, expected)


# ---------------------------------------------------------------- what once crashed, or said something else


def test_memory_holds_for_the_recursion_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def spy(problem: Problem, chain: Any, inputs: Tensor, *rest: Any) -> Any:
        sizes.append(len(inputs))
        return chains.chain_traces(problem, chain, inputs, *rest)

    monkeypatch.setattr(collecting, "chain_traces", spy)
    model, batch = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3)), zoo.sample_data(zoo.FLAT, 64)
    sample_traces(model, batch, memory="20MB")
    assert max(sizes) * 200**2 * 8 <= 5e6  # three more of these exist at a time
    assert sum(sizes) == 64


def test_no_error_needs_no_more_probes() -> None:
    result = sample_traces(nn.Linear(6, 3), zoo.sample_data(zoo.FLAT), loss=lambda o, t: o.sum(1), rel_err=0.1)
    assert result.probes is not None
    assert int(result.probes.max()) == 16
    assert not result.values.any()


def test_samples_are_numbered_through_all_batches() -> None:
    inputs, targets = zoo.sample_data(zoo.FLAT, 18)
    inputs[13] = math.nan
    for model in (flat_net(nn.Tanh()), flat_net(nn.ReLU()), zoo.Tied().double()):
        with pytest.raises(InputError, match="input of sample 13 is NaN"):
            sample_traces(model, (inputs, targets), batch_size=4)
    inputs, targets = zoo.sample_data(zoo.FLAT, 18)
    targets[13] = 7
    with pytest.raises(InputError, match="target 7 of sample 13 is outside"):
        sample_traces(flat_net(nn.ReLU()), (inputs, targets), batch_size=4)


def pooled_with_a_script(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.cat([F.max_pool2d(h, 2).flatten(1), scripted_mean(h)], 1))


def frozen_and_written_to(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h += torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    return self.b(F.max_pool2d(h, 2).flatten(1))


@pytest.mark.parametrize(
    ("forward", "modules", "shape"),
    [
        (lambda self, x: self.b(torch.relu(input=self.a(x))), layers, (6,)),
        (lambda self, x: self.b(torch.where((h := self.a(x)) > 0, h, torch.zeros_like(h))), layers, (6,)),
        (lambda self, x: self.b(F.max_pool2d(input=self.a(x), kernel_size=2).flatten(1)),
         lambda: {"a": nn.Conv2d(2, 3, 3), "b": nn.Linear(12, 3)}, (2, 6, 6)),
        (pooled_with_a_script, lambda: {"a": nn.Conv2d(2, 3, 3), "b": nn.Linear(15, 3)}, (2, 6, 6)),
        (frozen_and_written_to,
         lambda: {"a": nn.Conv2d(2, 3, 3).requires_grad_(False), "b": nn.Linear(12, 3)}, (2, 6, 6)),
    ],
    ids=["keyword", "where", "pooling by keyword", "script", "frozen"],
)  # fmt: skip
def test_unusual_ways_to_write_an_exact_network(
    forward: Callable[..., Tensor], modules: Callable[[], dict[str, nn.Module]], shape: tuple[int, ...]
) -> None:
    model, (inputs, targets) = Written(forward, **modules()).double(), zoo.sample_data(shape)
    expected = naive.total_traces(model, inputs, targets)
    assert agrees(sample_traces(model, (inputs, targets), method="exact"), expected)


def test_forward_hooks_see_what_the_layers_return() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3))
    for module in model[:2]:
        module.register_forward_hook(lambda module, arguments, output: seen.append(output))
    sample_traces(model, (torch.randn(4, 2, 6, 6), torch.zeros(4).long()))
    assert {output.shape[1:] for output in seen} == {(3, 4, 4)}


def test_one_number_a_sample_is_an_input() -> None:
    model = Written(lambda self, x: self.b(torch.tanh(self.a(x.view(-1, 1)))), a=nn.Linear(1, 5), b=nn.Linear(5, 3))
    model, (inputs, targets) = model.double(), (torch.randn(7, dtype=torch.float64), torch.arange(7) % 3)
    assert agrees(sample_traces(model, (inputs, targets), method="exact"), dense_in_reverse(model, inputs, targets))


def test_many_outputs_of_any_loss() -> None:
    model, batch = nn.Linear(3, 2300), (torch.randn(4, 3), torch.arange(4))
    assert sample_traces(model, batch, loss="exponential", probes=2).method == "hutchinson"
    with pytest.raises(InputError, match="of 2300 outputs take 2299 backward passes per batch; pass passes=2299 to"):
        sample_traces(model, batch, loss="exponential", method="exact")
    with pytest.raises(InputError, match="of 2300 outputs take 2300 backward passes per batch; pass passes=8 to sam"):
        sample_traces(model, batch, loss="squared_error", method="exact")


def ranked(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.relu(h)) * F.multilabel_margin_loss(h, (h > 0).long(), reduction="none")[:, None]


def writes_into_chunks(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.chunk(2, 1)[0].mul_(2)
    return self.b(torch.tanh(h))


def test_what_cannot_be_differentiated_is_named() -> None:
    with pytest.raises(InputError, match=r"the model Written fails on inputs of shape .*: Output 0 of Split"):
        sample_traces(Written(writes_into_chunks, **layers()).double(), zoo.sample_data(zoo.FLAT))
    with pytest.raises(InputError, match=r"no forward derivative .*multilabel.* and no second derivative either"):
        sample_traces(Written(ranked, **layers()).double(), zoo.sample_data(zoo.FLAT))

    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multilabel_margin_loss(outputs, targets[:, None].expand(outputs.shape), reduction="none")

    with pytest.raises(InputError, match="the loss hinge cannot be differentiated twice"):
        sample_traces(nn.Linear(6, 3).double(), zoo.sample_data(zoo.FLAT), loss=hinge)

    def overwrites(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        h += 1
        return self.b(h)

    with pytest.raises(InputError, match="the model Written cannot be differentiated: one of the variables"):
        sample_traces(Written(overwrites, **layers()).double(), zoo.sample_data(zoo.FLAT))


def test_whole_numbers_of_numpy_are_numbers() -> None:
    model, batch = zoo.many_classes()
    three: Any = np.int64(3)
    found = sample_traces(model, batch, passes=three, seed=three, batch_size=three)
    torch.testing.assert_close(found.values, sample_traces(model, batch, passes=3, seed=3).values)
    assert sample_traces(model, batch, method="hutchinson", probes=three).probes.unique().tolist() == [3]
    with pytest.raises(InputError, match="seed must be"):
        sample_traces(model, batch, seed=0.5)  # type: ignore[arg-type]


def test_a_comparison_does_not_stand_in_the_way() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.where(h > 0, torch.tanh(h), h).flatten(1))

    model = Written(forward, a=nn.Conv1d(2, 3, 3), b=nn.Linear(21, 3)).double()
    batch = zoo.sample_data(zoo.LINE)
    problem = Problem(model)
    with problem.active():
        assert analyse_few(problem, batch[0]).smooth
    with pytest.raises(NotExactError, match="'tanh'"):
        sample_traces(model, batch, method="exact")
