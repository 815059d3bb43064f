"""What the curvature operators promise: of data, parameters, precision, memory, processes, and of bad input."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
import zoo
from scipy.sparse.linalg import eigsh
from small_networks import assert_close, mean_hessian, network, not_traceable, products, rows, some_data
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spiritlevel import estimators
from spiritlevel.binding.losses import CrossEntropy
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.state import _load_forward_mode
from spiritlevel.errors import InputError
from spiritlevel.operators import averaging, replay
from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian, hessian_variance
from spiritlevel.operators.products import _slope
from spiritlevel.samples import traces as per_sample
from spiritlevel.samples.margins import margins

_load_forward_mode()  # torch warns where its forward derivatives are first used


# ---------------------------------------------------------------- data


class Pairs:
    """Batches that can be read again; `change` edits what comes in later passes."""

    def __init__(self, batches: list[Any], change: Callable[[int, list[Any]], list[Any]] = lambda _, b: b) -> None:
        self.batches, self.change, self.passes = batches, change, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.change(self.passes, self.batches))


def test_batches_are_weighted_by_their_size() -> None:
    net, data = network("tanh"), some_data()
    expected = naive.mean_hessian(net, *data)
    for batches in (rows(*data, 3, 4), rows(*data, 6, 1), rows(*data, 2, 2, 3)):
        assert_close(hessian(net, batches).dense(), expected)
    for batch_size in (1, 2, 3, 100):
        assert_close(hessian(net, data, batch_size=batch_size).dense(), expected)
        assert_close(hessian(net, rows(*data, 3, 4), batch_size=batch_size).dense(), expected)


def test_kinds_of_data() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    expected = naive.mean_hessian(net, inputs, targets)
    dataset = TensorDataset(inputs, targets)
    for data in (
        dataset,
        DataLoader(dataset, batch_size=3),
        DataLoader(dataset, batch_size=3, shuffle=True),  # read in the order of its data set
        (inputs.numpy(), targets.numpy()),
        Pairs(rows(inputs, targets, 3, 4)),
    ):
        assert_close(hessian(net, data).dense(), expected)
        assert_close(hessian(net, data, memory=1).dense(), expected)


def test_inputs_with_names_and_with_settings() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor, power: int = 1, mask: Tensor | None = None) -> Tensor:
            hidden = torch.tanh(self.layer(x))
            return hidden**power if mask is None else hidden * mask

    net, (inputs, targets) = Named().double(), some_data()

    def cube(weight: Tensor, bias: Tensor) -> Tensor:
        return naive.cross_entropy(torch.tanh(F.linear(inputs, weight, bias)) ** 3, targets).mean()

    blocks = torch.func.hessian(cube, (0, 1))(net.layer.weight.detach(), net.layer.bias.detach())
    expected = torch.cat(
        [torch.cat([b.reshape(n, -1) for b in row], 1) for row, n in zip(blocks, (36, 3), strict=True)]
    )
    batches = [({"x": x, "power": 3, "mask": None}, y) for x, y in rows(inputs, targets, 3, 3, 1)]
    assert_close(hessian(net, batches).dense(), expected)
    mixed = [({"x": x, "power": power}, y) for power, (x, y) in zip((3, 1), rows(inputs, targets, 3, 4), strict=True)]
    assert not torch.allclose(hessian(net, mixed).dense(), expected)


def test_data_are_read_once_if_they_fit() -> None:
    data = Pairs(rows(*some_data(), 3, 4))
    op = hessian(network("tanh"), data)
    op @ torch.ones(op.size, dtype=op.dtype)
    passes = data.passes
    op @ torch.ones(op.size, dtype=op.dtype)
    assert data.passes == passes


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda n, b: b if n < 6 else b[:-1], r"the data changed between two passes \(7 samples, then 3\)"),
        (lambda n, b: [b[0], (b[1][0] + n, b[1][1])], r"the data changed between two passes \(7 samples, then 7\)"),
        (lambda n, b: [(b[0][0] + n, b[0][1]), b[1]], "the data change between two passes"),
    ],
)
def test_data_that_change_are_refused(change: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):  # noqa: PT012
        op = hessian(network("tanh"), Pairs(rows(*some_data(), 3, 4), change), memory=1)
        for _ in range(3):
            op @ torch.ones(op.size, dtype=op.dtype)


# ---------------------------------------------------------------- parameters, precision, decay


def test_parameters_can_be_chosen() -> None:
    net, data = network("tanh"), some_data()
    full = naive.mean_hessian(net, *data)
    assert_close(hessian(net, data, params="2").dense(), full[-18:, -18:])
    assert_close(
        hessian(net, data, params=["*.bias"]).dense(), naive.mean_hessian(net, *data, params=["0.bias", "2.bias"])
    )
    net[2].weight.requires_grad_(False)
    assert hessian(net, data).names == ("0.weight", "0.bias", "2.bias")


def test_the_operator_keeps_its_point() -> None:
    net, data = network("tanh"), some_data()
    expected = naive.mean_hessian(net, *data)
    op = hessian(net, data)
    with torch.no_grad():
        net[0].weight.add_(1)
    assert_close(op.dense(), expected)


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
def test_weight_decay_adds_to_the_diagonal(kind: Any) -> None:
    net, data = network("tanh"), some_data()
    plain, decayed = kind(net, data).dense(), kind(net, data, weight_decay=0.3).dense()
    assert_close(decayed, plain + 0.3 * torch.eye(len(plain), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_as_float32(dtype: torch.dtype) -> None:
    net, (inputs, targets) = network("tanh").to(dtype), some_data()
    op = hessian(net, (inputs.to(dtype), targets))
    assert op.dtype == torch.float32
    assert_close(op.dense(), naive.mean_hessian(net, inputs.to(dtype), targets), 1e-5)


def test_float32_sums_over_many_batches_do_not_drift() -> None:
    net, (inputs, targets) = network("tanh"), some_data(500)
    expected = naive.mean_hessian(net, inputs, targets)
    op = hessian(copy.deepcopy(net).float(), (inputs.float(), targets), batch_size=1)
    assert_close(op @ torch.ones(op.size), expected @ torch.ones(op.size, dtype=torch.float64), 2e-6)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return torch.tanh(hidden) if hidden.sum() > 0 else hidden


def test_a_model_that_branches_is_differentiated_every_time() -> None:
    net, data = Branching().double(), some_data()
    with torch.no_grad():
        net.layer.bias.fill_(5.0)
    expected = naive.mean_hessian(nn.Sequential(net.layer, nn.Tanh()), *data)
    matrix = mean_hessian(net, data)
    assert_close(matrix.multiply(torch.eye(39, dtype=torch.float64)), expected)
    assert list(matrix.traces.values()) == [None]  # a branch holds for one batch only


def test_batches_of_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "_MOST_SHAPES", 2)
    net, data = network("tanh"), some_data(15)
    batches = rows(*data, 1, 2, 3, 4, 5)
    matrix = mean_hessian(net, batches)
    assert_close(matrix.multiply(torch.eye(83, dtype=torch.float64)), naive.mean_hessian(net, *data))
    assert [trace is not None for trace in matrix.traces.values()] == [True, True, False, False, False]


def test_operations_that_cannot_be_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no batching rule")

    monkeypatch.setattr(averaging, "vmap", fail)
    net, data = network("tanh"), some_data()
    assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data))


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class WithFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unused, self.function = nn.Linear(12, 4), nn.Linear(4, 3), nn.Linear(2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
@pytest.mark.parametrize("loss", ["cross_entropy", lambda o, t: F.cross_entropy(o, t, reduction="none")])
def test_functions_without_forward_derivatives(kind: Any, loss: Any) -> None:
    net, data = WithFunction(zoo.ReverseOnly.apply).double(), some_data()
    op = kind(net, data, batch_size=3, loss=loss)
    assert_close(op.dense(), kind(WithFunction(torch.square).double(), data, loss=loss).dense(), 1e-12)
    if kind is hessian:
        assert_close(op.dense(), naive.mean_hessian(WithFunction(torch.square).double(), *data))


def test_a_function_that_cannot_be_differentiated_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"the (gradient|second derivative) that autograd returns .* is not the deriv"):
        _ = hessian(WithFunction(OnceOnly.apply).double(), some_data()).dense()


def test_autocast_of_the_caller_does_not_lower_the_precision() -> None:
    net = WithFunction(torch.tanh)
    inputs, targets = some_data()
    op = hessian(net, (inputs.float(), targets))
    vector = torch.randn(op.size, generator=torch.Generator().manual_seed(0))
    expected = [op @ vector, *(find(op) for find in FINDERS)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [op @ vector, *(find(op) for find in FINDERS)]
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


FINDERS: list[Any] = [
    lambda op: estimators.eigenvalues(op, max_matvecs=20).values,
    lambda op: torch.tensor(estimators.operator_trace(op, probes=20).value),
    lambda op: torch.tensor(estimators.frobenius_norm(op, probes=20).value),
    lambda op: estimators.diagonal(op, probes=20).values,
    lambda op: estimators.spectral_density(op, probes=2, steps=8).nodes,
]


def test_a_model_that_reads_its_data_is_not_traced() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(torch.tensor(x.tolist(), dtype=x.dtype) ** 2))

    net, (inputs, targets) = Hidden().double(), some_data(8)
    expected = naive.mean_hessian(nn.Sequential(net.layer, nn.Tanh()), inputs**2, targets)
    matrix = mean_hessian(net, (inputs, targets), batch_size=2)
    assert_close(matrix.multiply(torch.eye(39, dtype=torch.float64)), expected)
    assert list(matrix.traces.values()) == [None]


# ---------------------------------------------------------------- batch norm


def test_batch_statistics() -> None:
    net, (inputs, targets) = network("batch norm"), some_data(8)
    whole = naive.mean_hessian(net, inputs, targets, batch_norm="batch")
    assert_close(products(hessian(net, (inputs, targets), batch_norm="batch")), whole)
    assert_close(hessian(net, (inputs, targets), batch_norm="batch", memory=1).dense(), whole)
    batches = rows(inputs, targets, 3, 5)
    parts = [naive.mean_hessian(net, *batch, batch_norm="batch") * len(batch[1]) / 8 for batch in batches]
    assert_close(hessian(net, batches, batch_norm="batch").dense(), parts[0] + parts[1])
    with pytest.raises(InputError, match="batch_size=2 does not fit data that come in batches of 3"):
        hessian(net, batches, batch_norm="batch", batch_size=2)


def test_batch_statistics_of_gauss_newton_and_fisher() -> None:
    net, (inputs, targets) = network("batch norm"), some_data(8)
    flat = naive.Flat(net, batch_norm="batch")
    outputs = flat.outputs(flat.point, inputs)
    jacobian = jacrev(lambda point: flat.outputs(point, inputs))(flat.point)
    s = torch.softmax(outputs, 1)
    bend = torch.diag_embed(s) - s[:, :, None] * s[:, None, :]
    expected = torch.einsum("ncp,ncd,ndq->pq", jacobian, bend, jacobian) / 8
    assert_close(gauss_newton(net, (inputs, targets), batch_norm="batch").dense(), expected)
    gradients = jacrev(lambda point: naive.cross_entropy(flat.outputs(point, inputs), targets))(flat.point)
    assert_close(empirical_fisher(net, (inputs, targets), batch_norm="batch").dense(), gradients.T @ gradients / 8)


def test_eval_mode_equals_the_folded_network() -> None:
    net, data = network("batch norm"), some_data()
    convolution, norm = net[1], net[2]
    folded = copy.deepcopy(nn.Sequential(*[layer for layer in net if layer is not norm]))
    scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    with torch.no_grad():
        folded[1].weight.mul_(scale[:, None, None, None])
        folded[1].bias.copy_(scale * (convolution.bias - norm.running_mean) + norm.bias)
    expected = hessian(folded, data)
    d = torch.cat([scale.repeat_interleave(4), scale, torch.ones(9, dtype=torch.float64)])  # dθ'/dθ
    assert_close(hessian(net, data, params=["1", "6"]).dense(), d[:, None] * expected.dense() * d)


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize("kind", [hessian, gauss_newton, empirical_fisher])
@pytest.mark.parametrize("batch_norm", ["eval", "batch"])
def test_nothing_is_touched(kind: Any, batch_norm: str, untouched: Any) -> None:
    net, data = network("batch norm").train(), some_data(8)
    net[1].register_forward_hook(lambda *_: None)
    net[1].weight.grad = torch.ones_like(net[1].weight)
    net[1].bias.requires_grad_(False)
    with untouched(net):
        op = kind(net, data, batch_norm=batch_norm)
        for memory in (None, 1):
            op = kind(net, DataLoader(TensorDataset(*data), batch_size=4), batch_norm=batch_norm, memory=memory)
            op @ torch.ones(op.size, 2, dtype=op.dtype)


def test_inside_no_grad_and_with_inputs_that_require_grad() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    expected = naive.mean_hessian(net, inputs, targets)
    with torch.no_grad():
        assert_close(hessian(net, (inputs, targets)).dense(), expected)
    with torch.inference_mode():
        assert_close(hessian(net, (inputs.clone(), targets)).dense(), expected)
    op = hessian(net, (inputs.requires_grad_(), targets))
    result = op @ torch.ones(op.size, dtype=op.dtype, requires_grad=True)
    assert not result.requires_grad


def test_scipy_finds_the_same_eigenvalues() -> None:
    op = hessian(network("tanh"), some_data())
    expected = torch.linalg.eigvalsh(op.dense())
    found = eigsh(op.to_scipy(), k=3, which="LA", return_eigenvectors=False)
    assert_close(torch.as_tensor(found), expected[-3:], 1e-8)


def test_both_ends_of_the_spectrum() -> None:
    net, data = network("attention"), some_data()
    expected = torch.linalg.eigvalsh(naive.mean_hessian(net, *data))
    op = hessian(net, data)
    for which, index in (("largest", -1), ("smallest", 0)):
        value = estimators.eigenvalues(op, which=which, tol=1e-6).values[0]
        assert abs(float(value - expected[index])) <= 1e-8 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["relu in place", "convolutions", "batch norm"])
def test_the_trace_is_that_of_the_samples(name: str) -> None:
    net, data = network(name), some_data()
    exact = per_sample.trace(net, data)
    assert exact.exact
    assert float(hessian(net, data).dense().trace()) == pytest.approx(exact.value, rel=1e-10)
    estimate = estimators.operator_trace(hessian(net, data), probes=20)
    assert abs(estimate.value - exact.value) <= 4 * estimate.stderr + 1e-10 * exact.value


def test_the_variance_of_the_batches() -> None:
    net, data = network("tanh"), some_data()
    batches = rows(*data, 3, 4)
    parts = [naive.mean_hessian(net, *batch) for batch in batches]
    mean = (3 * parts[0] + 4 * parts[1]) / 7
    expected = (3 * parts[0] @ parts[0] + 4 * parts[1] @ parts[1]) / 7 - mean @ mean
    for op in (hessian_variance(net, batches), hessian_variance(net, batches, memory=1)):
        assert_close(op.dense(), expected)
        assert_close(products(op), expected)


def test_the_variance_of_batches_drawn_without_replacement() -> None:
    """Averaged over all partitions it is (n − B)/(B(n − 1)) times that of single samples."""
    net, (inputs, targets) = nn.Linear(12, 3, bias=False).double(), some_data(4)
    single = hessian_variance(net, (inputs, targets), batch_size=1).dense()
    orders = [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]]
    pairs = [hessian_variance(net, (inputs[order], targets[order]), batch_size=2).dense() for order in orders]
    assert_close(sum(pairs) / 3, (4 - 2) / (2 * 3) * single)  # type: ignore[arg-type]


def test_memory_decides_how_much_is_kept() -> None:
    net, data = network("tanh"), some_data(64)
    problem = Problem(net)
    vector = torch.ones(1, problem.size, dtype=torch.float64)

    def kept(memory: int | None) -> tuple[int, int, Tensor]:
        matrix = mean_hessian(net, data, batch_size=8, memory=memory)
        result = matrix.multiply(vector)
        return len(matrix.kept), sum(tape.size(matrix.owned) for tape in matrix.kept.values()), result

    everything, size, first = kept(None)
    assert everything == 8
    some, half, second = kept(size)
    assert 2 <= some <= 4
    assert half <= size / 2
    assert torch.equal(first, second)


PEAK = """
import sys, torch
from torch import nn
from spiritlevel.memory import peak_memory
from spiritlevel.operators.matrices import hessian

class Stream:
    def __iter__(self):
        for seed in range(int(sys.argv[1])):
            generator = torch.Generator().manual_seed(seed)
            yield torch.rand(100, 784, generator=generator), torch.randint(0, 10, (100,), generator=generator)

net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
vector = torch.ones(sum(parameter.numel() for parameter in net.parameters()))
hessian(net, (torch.rand(4, 784), torch.zeros(4, dtype=torch.long))) @ vector
before = peak_memory() / 1e6
op = hessian(net, Stream(), memory="60MB")
op @ vector
op @ vector
print(peak_memory() / 1e6 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_the_data() -> None:
    """Far beyond the budget, ten times the data take at most 1.2 times the memory, and never more than the budget."""
    small, large = (
        float(subprocess.run([sys.executable, "-c", PEAK, batches], capture_output=True, text=True, check=True).stdout)
        for batches in ("100", "1000")
    )
    assert small < 60
    assert large < min(60, 1.2 * small)


# ---------------------------------------------------------------- bad input


def test_bad_input_in_one_sentence() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    with pytest.raises(InputError, match="weight_decay must be at least 0, got -1"):
        hessian(net, (inputs, targets), weight_decay=-1)
    with pytest.raises(InputError, match="weight_decay must be a finite number, got nan"):
        hessian(net, (inputs, targets), weight_decay=math.nan)
    with pytest.raises(InputError, match="unknown loss 'cross_entrop': did you mean 'cross_entropy'"):
        hessian(net, (inputs, targets), loss="cross_entrop")
    with pytest.raises(InputError, match="unknown batch_norm mode 'train'"):
        hessian(net, (inputs, targets), batch_norm="train")
    with pytest.raises(InputError, match="batch_size must be a whole number of at least 1, got 0"):
        hessian(net, (inputs, targets), batch_size=0)
    with pytest.raises(InputError, match="memory must be a number of bytes"):
        hessian(net, (inputs, targets), memory="much")
    with pytest.raises(InputError, match="the data are empty"):
        hessian(net, (inputs[:0], targets[:0]))
    with pytest.raises(InputError, match=r"target 7 .* is outside the model's 3 classes"):
        hessian(net, (inputs, targets * 0 + 7))
    with pytest.raises(InputError, match="hessian_variance needs to know the batches: pass batch_size="):
        hessian_variance(net, (inputs, targets))
    with pytest.raises(InputError, match=r"group= needs torch\.distributed\.init_process_group first"):
        hessian(net, (inputs, targets), group=object())


def test_numbers_that_are_none() -> None:
    net, (inputs, targets) = network("tanh"), some_data()
    spoilt = inputs.clone()
    spoilt[5, 2] = math.nan
    with pytest.raises(InputError, match="the input of sample 5 is NaN or infinite"):
        hessian(net, (spoilt, targets), batch_size=3)
    with torch.no_grad():
        net[2].weight[0, 0] = math.inf
    with pytest.raises(InputError, match="the model's output for sample 0 is NaN or infinite although"):
        hessian(net, (inputs, targets))
    with torch.no_grad():
        net[2].weight[0, 0] = 1e300
    op = hessian(net, (inputs, targets))
    with pytest.raises(InputError, match="holds NaN or infinity"):
        op @ torch.full((op.size,), 1e300, dtype=op.dtype)


def test_losses_of_ones_own_may_be_loss_objects() -> None:
    net, data = network("tanh"), some_data()
    assert_close(hessian(net, data, loss=CrossEntropy()).dense(), naive.mean_hessian(net, *data))
    assert_close(
        hessian(net, data, loss=lambda out, y: F.cross_entropy(out, y, reduction="none")).dense(),
        naive.mean_hessian(net, *data),
    )


# ---------------------------------------------------------------- the page


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """The code blocks of a page, with the label in their first line."""
    blocks = re.findall(r"```python\n# (\w+)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == page.read_text(encoding="utf-8").count("```python")
    return blocks


def test_the_page_for_those_who_come_from_other_libraries() -> None:
    names: dict[str, Any] = {}
    for label, code in blocks_of(Path(__file__).parent.parent / "docs" / "coming-from.md"):
        if label in ("all", "spiritlevel"):
            exec(code, names)
    model, batches = names["model"], names["batches"]
    parts = [naive.mean_hessian(model, *batch) * len(batch[1]) / 100 for batch in batches]
    expected = parts[0] + parts[1]
    assert_close(names["product"], expected.sum(1), 1e-5)
    assert float(names["largest"]) == pytest.approx(float(torch.linalg.eigvalsh(expected)[-1]), rel=1e-4)
    assert abs(names["trace"] - float(expected.trace())) < 4 * names["error"]


# ---------------------------------------------------------------- several processes


WORKER = """
import sys, torch, torch.distributed as dist
from torch import nn
from spiritlevel.operators.matrices import hessian, hessian_variance

rank, file = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
inputs, targets = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 3, (7,))
alone = hessian(net, (inputs, targets))
apart = hessian_variance(net, (inputs, targets), batch_size=3)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
group = dist.group.WORLD
vector = torch.randn(27, 2, dtype=torch.float64)
for kind in ({}, {"memory": 1}, {"batch_size": 100}, {"batch_size": 2}):
    op = hessian(net, (inputs, targets), group=group, weight_decay=0.5, **kind)
    torch.testing.assert_close(op @ vector, alone @ vector + 0.5 * vector, rtol=1e-12, atol=1e-14)
op = hessian_variance(net, (inputs, targets), batch_size=3, group=group)
torch.testing.assert_close(op @ vector, apart @ vector, rtol=1e-10, atol=1e-13)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_the_data(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors


def test_a_gradient_of_the_reference_agrees() -> None:
    """The slope that the products differentiate is the gradient of the loss."""
    net, (inputs, targets) = network("tanh"), some_data()
    for name in ("cross_entropy", "squared_error", "exponential"):
        problem = Problem(net, loss=name)
        outputs = net(inputs).detach()
        expected = grad(lambda out, name=name: naive.LOSSES[name](out, targets).sum())(outputs)
        assert_close(_slope(problem.loss, outputs, targets), expected)


def test_a_circular_convolution_is_multiplied_by_several_vectors_at_once() -> None:
    """Its backward pass views memory by strides, which `vmap` lays out otherwise: it was 0.6 off, one by one right."""
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1, padding_mode="circular"), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    data = torch.randn(2, 1, 1, 2, dtype=torch.float64), torch.tensor([0, 1])
    torch.testing.assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data), atol=1e-12, rtol=0)


@pytest.mark.parametrize("traced", [True, False])
def test_a_wrong_rule_of_vmap_is_noticed(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with several vectors are compared with one of them alone before any is believed."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    right = averaging.vmap

    def wrong(function: Any) -> Any:
        return lambda *parts: [1.1 * part for part in right(function)(*parts)]

    monkeypatch.setattr(averaging, "vmap", wrong)
    if not traced:
        monkeypatch.setattr(replay, "_cut", not_traceable)
    torch.testing.assert_close(hessian(net, data).dense(), naive.mean_hessian(net, *data), atol=1e-12, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_samples_that_depend_on_each_other_are_refused_in_small_batches_too(batch_size: int) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x - x.mean(0))

    data = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    for measure in (hessian, per_sample.sample_traces):
        with pytest.raises(InputError, match="other samples"):
            measure(Centred(), data, batch_size=batch_size)


def test_a_model_that_overwrites_its_parameters_is_refused() -> None:
    """An embedding with max_norm cuts its rows in the forward pass: there is no fixed point to measure at."""
    net = nn.Sequential(nn.Embedding(5, 2, max_norm=0.5), nn.Flatten(), nn.Linear(6, 2))
    data = torch.arange(9).reshape(3, 3) % 5, torch.tensor([0, 1, 0])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for measure in (hessian, per_sample.sample_traces, margins):
        with pytest.raises(InputError, match=r"overwrites its own parameter 0\.weight"):
            measure(net, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
