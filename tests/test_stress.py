"""Numerics under stress: half precision, huge logits, tiny losses, very many classes, degenerate data.

The references are exact twins: mpmath with many digits, or closed forms of an affine classifier, where the trace of a
sample's Hessian is (‖x‖² + 1)(1 − ΣS²).
"""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import mpmath
import naive
import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel import measures
from spiritlevel.errors import InputError


def affine(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def exact_trace(inputs: Tensor, logits: Tensor) -> list[float]:
    """(‖x‖² + 1)(1 − ΣS²) with 400 digits: the sum cancels all but the last ones."""
    with mpmath.workdps(400):
        result = []
        for row, values in zip(inputs.double().tolist(), logits.double().tolist(), strict=True):
            top = max(values)
            weights = [mpmath.exp(mpmath.mpf(value) - mpmath.mpf(top)) for value in values]
            total = mpmath.fsum(weights)
            gap = 1 - mpmath.fsum((weight / total) ** 2 for weight in weights)
            result.append(float((mpmath.fsum(mpmath.mpf(x) ** 2 for x in row) + 1) * gap))
        return result


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_measured_as_their_float32_copies(dtype: torch.dtype, untouched: Any) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
    inputs, targets = torch.randn(6, 5).to(dtype), torch.randint(0, 3, (6,))
    expected = naive.per_sample_traces(net, inputs, targets)
    with untouched(net):
        traces = sl.sample_traces(net, (inputs, targets))
        product = sl.hessian(net, (inputs, targets)) @ torch.ones(39)
        margins = sl.margins(net, (inputs, targets), distance=2)
    assert traces.exact
    torch.testing.assert_close(traces.values, expected, rtol=1e-5, atol=1e-9)
    dense = naive.mean_hessian(net, inputs, targets)
    torch.testing.assert_close(product.double(), dense.sum(1), rtol=1e-4, atol=1e-6)
    logits = net.double()(inputs.double())
    torch.testing.assert_close(margins.signed, sl.margins(net, (inputs.double(), targets)).signed, rtol=1e-5, atol=1e-6)
    assert torch.equal(margins.correct, logits.argmax(1) == targets)


def test_half_precision_weights_whose_outputs_would_overflow_half_precision() -> None:
    """In float16 the logits would be infinite; the float32 copy holds them."""
    net = affine(torch.full((3, 4), 200.0) * torch.tensor([[1.0], [0.9], [0.5]]), torch.zeros(3)).half()
    inputs, targets = torch.full((2, 4), 100.0).half(), torch.tensor([0, 1])
    found = sl.margins(net, (inputs, targets))
    weight = net.weight.double()
    logits = inputs.double() @ weight.T
    torch.testing.assert_close(found.signed, torch.stack([logits[0, 0] - logits[0, 1], logits[1, 1] - logits[1, 0]]))
    assert sl.sample_traces(net, (inputs, targets)).values.tolist() == [0.0, 0.0]  # exp(-8000) is below float64


# ---------------------------------------------------------------- huge logits, tiny losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [1e-6, 1.0, 30.0, 69.0, 300.0, 700.0])  # 69: a loss of 1e-30; 700: 1e-304
def test_traces_stay_right_from_equal_logits_to_losses_beyond_all_epsilons(margin: float, dtype: torch.dtype) -> None:
    weight = torch.tensor([[0.0], [-margin], [-margin - 1.0]], dtype=dtype)
    net, inputs = affine(weight, torch.zeros(3, dtype=dtype)), torch.ones(1, 1, dtype=dtype)
    targets = torch.tensor([0])
    (expected,) = exact_trace(inputs, net(inputs).detach())
    assert expected > 0
    found = sl.sample_traces(net, (inputs, targets))
    assert found.values.item() == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-12)
    probed = sl.sample_traces(net, (inputs, targets), method="hutchinson", probes=64, seed=1)
    assert probed.values.item() == pytest.approx(expected, abs=5 * probed.stderr.item())
    assert 0 < probed.stderr.item() < expected
    product = sl.hessian(net, (inputs, targets)).dense().double()
    if expected > torch.finfo(dtype).tiny / torch.finfo(dtype).eps:  # below that the dtype itself has no digits
        assert product.trace().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_ten_thousand(dtype: torch.dtype) -> None:
    """Confidently right, confidently wrong, and two huge logits that are nearly equal."""
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, 1e4, 0.0], [1e4, 1e4 - 2.0, 0.0]], dtype=dtype)
    net, inputs = affine(logits.T.contiguous(), torch.zeros(3, dtype=dtype)), torch.eye(3, dtype=dtype)
    targets = torch.tensor([0, 0, 1])
    found = sl.sample_traces(net, (inputs, targets))
    expected = torch.tensor(exact_trace(inputs, logits), dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, rtol=1e-6, atol=1e-300)
    margins = sl.margins(net, (inputs, targets))
    assert margins.signed.tolist() == [1e4, -2e4, -2.0]
    assert margins.correct.tolist() == [True, False, False]
    assert bool(torch.isfinite(sl.hessian(net, (inputs, targets)).dense()).all())


def test_outputs_that_overflow_are_refused_by_name() -> None:
    net = affine(torch.full((2, 2), 3e38), torch.zeros(2))
    data = torch.ones(3, 2), torch.tensor([0, 1, 0])
    for measure in (sl.sample_traces, sl.margins, sl.hessian):
        with pytest.raises(InputError, match=r"output for sample 0 is NaN or infinite although its input is finite"):
            measure(net, data)


def test_binary_and_exponential_losses_at_both_ends() -> None:
    for logit in (-500.0, -69.0, 0.0, 69.0, 500.0):
        net = affine(torch.tensor([[logit]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        data = torch.ones(1, 1, dtype=torch.float64), torch.tensor([1])
        with mpmath.workdps(60):
            sigma = 1 / (1 + mpmath.exp(-mpmath.mpf(logit)))
            binary, exponential = float(2 * sigma * (1 - sigma)), float(2 * mpmath.exp(-mpmath.mpf(logit)))
        found = sl.sample_traces(net, data, loss="binary_cross_entropy").values.item()
        assert found == pytest.approx(binary, rel=1e-12)
        assert sl.sample_traces(net, data, loss="exponential").values.item() == pytest.approx(exponential, rel=1e-12)


def test_an_exponential_loss_beyond_float64_is_refused() -> None:
    net = affine(torch.tensor([[-800.0]]), torch.zeros(1))
    for measure in (sl.sample_traces, sl.hessian):
        with pytest.raises(InputError, match=r"exponential loss of sample 0, exp\(800\), is beyond"):
            measure(net, (torch.ones(1, 1), torch.tensor([1])), loss="exponential")


# ---------------------------------------------------------------- degenerate data


def test_one_sample() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 4)).double()
    data = torch.randn(1, 3, dtype=torch.float64), torch.tensor([2])
    traces = sl.sample_traces(net, data)
    torch.testing.assert_close(traces.values, naive.per_sample_traces(net, *data))
    assert traces.mean().value == pytest.approx(traces.values.item())
    assert sl.margins(net, data, distance="inf").distance is not None
    torch.testing.assert_close(sl.hessian(net, data).dense(), naive.mean_hessian(net, *data))
    lonely = sl.correlate(traces.values, traces.values)
    assert lonely.r != lonely.r
    assert lonely.reason


def test_duplicated_samples_change_no_mean_and_no_spectrum() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 4)).double()
    inputs, targets = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    many = inputs.repeat(5, 1), targets.repeat(5)
    traces = sl.sample_traces(net, many).values.reshape(5, 4)
    torch.testing.assert_close(traces, traces[:1].expand(5, 4), rtol=1e-12, atol=0)
    torch.testing.assert_close(sl.hessian(net, many).dense(), sl.hessian(net, (inputs, targets)).dense())
    same = inputs[:1].repeat(30, 1), targets[:1].repeat(30)
    constant = sl.sample_traces(net, same).values
    found = sl.correlate(constant, sl.margins(net, same).output)
    assert found.r != found.r
    assert found.reason
    pairs = sl.correlate(sl.sample_traces(net, many).values, sl.margins(net, many).output)
    assert -1 <= pairs.r <= 1


def test_a_class_that_never_occurs() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 6)).double()
    data = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 2, 0, 2])  # classes 1, 3, 4, 5 are never seen
    torch.testing.assert_close(sl.sample_traces(net, data).values, naive.per_sample_traces(net, *data))
    torch.testing.assert_close(sl.hessian(net, data).dense(), naive.mean_hessian(net, *data), rtol=1e-9, atol=1e-12)
    assert sl.margins(net, data).targets.tolist() == [0, 2, 2, 0, 2]


# ---------------------------------------------------------------- very many classes

MANY_CLASSES = """
import sys, torch
from torch import nn
import spiritlevel as sl
from spiritlevel.memory import peak_memory

classes, samples = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))
data = torch.randn(samples, 8), torch.randint(0, classes, (samples,))
small = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
sl.sample_traces(small, (data[0], data[1] % 12), passes=3)  # what is loaded once is not counted
before = peak_memory()
found = sl.sample_traces(net, data, passes=3)
peak = peak_memory() - before
size = sum(p.numel() for p in net.parameters())
floats = 4 * (samples * classes + size)
with torch.no_grad():
    hidden = net[1](net[0](data[0]))
    probabilities = net[2](hidden).double().softmax(1)
    gap = 1 - probabilities.square().sum(1)
    last = (hidden.double().square().sum(1) + 1) * gap
    weight = net[2].weight.double()
    mean = probabilities @ weight
    second = probabilities @ weight.square()
    active = (hidden > 0).double()
    first = (data[0].double().square().sum(1) + 1) * (active * (second - mean.square())).sum(1)
exact = last + first
ratio = float((found.values.sum() - exact.sum()).abs() / found.stderr.square().sum().sqrt())
print(found.method, peak / floats, ratio, float(found.values.sum() / exact.sum()))
"""


@pytest.mark.parametrize(("classes", "samples"), [(100_000, 32), pytest.param(100_000, 256, marks=pytest.mark.slow)])
def test_a_hundred_thousand_classes_with_three_passes_in_little_memory(classes: int, samples: int) -> None:
    """Peak memory at most 12·(N·C + P) floats, and the sum over samples within its stated error of the closed form."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_CLASSES, str(classes), str(samples)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    method, times, sigmas, share = done.stdout.split()
    assert method == "passes=3"
    assert float(times) <= 12, f"peak memory of {float(times):.1f} · (N·C + P) floats"
    assert float(sigmas) < 4
    assert float(share) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(("factor", "largest"), [(30.0, 1e-8), (70.0, 1e-25)])
def test_a_network_that_is_very_sure_is_as_sharp_in_float32_as_in_float64(factor: float, largest: float) -> None:
    """Its curvature is far below what float32 can square."""
    torch.manual_seed(0)
    inputs = torch.rand(40, 6)
    targets = inputs[:, :3].argmax(1)
    inputs[torch.arange(40), targets] += 1.0
    single = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    with torch.no_grad():
        for layer, size in ((single[0], 1.0), (single[2], factor)):
            layer.weight.zero_().fill_diagonal_(size)
            layer.bias.zero_()
    found = []
    for dtype in (torch.float32, torch.float64):
        model, data = copy.deepcopy(single).to(dtype), (inputs.to(dtype), targets)
        op = sl.hessian(model, data)
        (ball,) = measures.evaluate(model, data, measures=["ball_sharpness"])
        found.append([sl.spectral_norm(op).value, sl.frobenius_norm(op, probes=16).value, ball["value"]])
    assert 0 < found[1][0] < largest
    assert found[0] == pytest.approx(found[1], rel=1e-3)
