"""Losses against autodiff in float64, and against 60 digits where autodiff fails."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import naive
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.binding.losses import (
    NAMED,
    BinaryCrossEntropy,
    CallableLoss,
    CrossEntropy,
    Exponential,
    Loss,
    SquaredError,
    aceht,
    confidence_gap,
    resolve,
    softmax_parts,
)
from spiritlevel.errors import InputError

Function = Callable[[Tensor, Tensor], Tensor]


def class_weights(classes: int) -> Tensor:
    return torch.linspace(0.3, 2.1, classes)  # float32, as users have them


def weighted(smoothing: float) -> tuple[Callable[[int], Loss], Function]:
    def reference(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = class_weights(outputs.shape[1]).to(outputs)
        return F.cross_entropy(outputs, targets, weight, reduction="none", label_smoothing=smoothing)

    return lambda classes: CrossEntropy(class_weights(classes), smoothing), reference


class Cubic:
    """Not convex, so some weights are negative: Σ φ³/6 − φ_y, with factors φ_j e_j e_jᵀ."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.pow(3).sum(1) / 6 - outputs.gather(1, targets[:, None])[:, 0]

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for j in range(outputs.shape[1]):
            yield outputs[:, j], torch.eye(outputs.shape[1])[j].expand(outputs.shape)


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sin() * (targets[:, None] + 1)).prod(1)


# loss for a number of outputs, the same by other means, numbers of outputs
CASES: dict[str, tuple[Callable[[int], Loss], Function, tuple[int, ...]]] = {
    "cross_entropy": (lambda _: CrossEntropy(), naive.cross_entropy, (2, 3, 5, 10)),
    "cross_entropy, weighted": (*weighted(0.0), (2, 5)),
    "cross_entropy, smoothed": (
        lambda _: CrossEntropy(label_smoothing=0.1),
        lambda o, t: F.cross_entropy(o, t, reduction="none", label_smoothing=0.1),
        (2, 5),
    ),
    "cross_entropy, weighted and smoothed": (*weighted(0.2), (2, 5)),
    "binary_cross_entropy": (lambda _: BinaryCrossEntropy(), naive.binary_cross_entropy, (1,)),
    "binary_cross_entropy, pos_weight": (
        lambda _: BinaryCrossEntropy(3.5),
        lambda o, t: F.binary_cross_entropy_with_logits(
            o.reshape(-1), t.to(o), pos_weight=torch.tensor(3.5), reduction="none"
        ),
        (1,),
    ),
    "squared_error": (lambda _: SquaredError(), naive.squared_error, (1, 2, 5)),
    "MSELoss of whole numbers": (
        lambda _: resolve(nn.MSELoss()),
        lambda o, t: F.mse_loss(o, t.to(o)[:, None], reduction="none").mean(1),
        (1,),
    ),
    "exponential": (lambda _: Exponential(), naive.exponential, (1, 2, 5)),
    "callable": (lambda _: CallableLoss(smooth), smooth, (2, 5)),
    "callable with factors": (lambda _: CallableLoss(Cubic()), Cubic(), (2, 5)),
}
GRID = [pytest.param(name, classes, id=f"{name} {classes}") for name, case in CASES.items() for classes in case[2]]
CLOSED = [item for item in GRID if item.values[0] != "callable"]


def draw(classes: int, count: int = 7, scale: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, targets and directions."""
    generator = torch.Generator().manual_seed(seed)
    outputs, direction = scale * torch.randn(2, count, classes, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(0, max(2, classes), (count,), generator=generator) % max(2, classes), direction


def sane(name: str, targets: Tensor, classes: int) -> Tensor:
    return targets % classes if classes > 1 or name.startswith("squared") else targets


def autodiff(function: Function, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values (N,), gradients (N, C) and Hessians (N, C, C), sample by sample."""
    values, gradients, hessians = [], [], []
    for output, target in zip(outputs, targets, strict=True):

        def one(point: Tensor, target: Tensor = target) -> Tensor:
            return function(point[None], target[None])[0]

        values.append(one(output))
        gradients.append(torch.autograd.functional.jacobian(one, output))
        hessians.append(naive.symmetric(torch.autograd.functional.hessian(one, output)))
    return torch.stack(values), torch.stack(gradients), torch.stack(hessians)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    assert a.shape == b.shape
    assert a.dtype == torch.float64
    return bool((a - b).abs().max() <= tolerance * max(1e-300, float(b.abs().max())))


@pytest.mark.parametrize(("name", "classes"), GRID)
def test_derivatives_are_those_of_autodiff(name: str, classes: int) -> None:
    make, function, _ = CASES[name]
    loss = make(classes)
    outputs, targets, direction = draw(classes)
    targets = sane(name, targets, classes)
    loss.check(outputs, targets)
    values, gradient, hessian = autodiff(function, outputs, targets)
    product = (hessian @ direction[:, :, None])[:, :, 0]
    assert close(loss.values(outputs, targets), values)
    assert close(loss.gradient(outputs, targets), gradient)
    assert close(loss.product(outputs, targets, direction), product)
    assert close(loss.quadratic(outputs, targets, direction), (product * direction).sum(1))
    if loss.closed_form:
        factors = list(loss.factors(outputs, targets))
        assert len(factors) == loss.rank(outputs, targets)
        assert close(loss.hessian(outputs, targets), hessian)
        for weight, vector in factors:
            assert weight.shape == (len(outputs),)
            assert vector.shape == outputs.shape
            assert weight.dtype == torch.float64
            assert vector.abs().max() <= 1
    for dtype in (torch.int32, torch.uint8):  # labels as NumPy or images have them
        assert close(loss.gradient(outputs, targets.to(dtype)) if "callable" not in name else gradient, gradient)


@pytest.mark.parametrize(("name", "classes"), GRID)
def test_values_differentiate_like_any_function(name: str, classes: int) -> None:
    """`values` is what autodiff sees where a closed form is not used: also its second derivatives must be right."""
    make, function, _ = CASES[name]
    outputs, targets, _ = draw(classes)
    targets = sane(name, targets, classes)
    _, gradient, hessian = autodiff(function, outputs, targets)
    _, own_gradient, own_hessian = autodiff(make(classes).values, outputs, targets)
    assert close(own_gradient, gradient)
    assert close(own_hessian, hessian)


@pytest.mark.parametrize(("name", "classes"), CLOSED)
@given(data=st.data())
def test_hessians_are_those_of_autodiff_anywhere(name: str, classes: int, data: st.DataObject) -> None:
    make, function, _ = CASES[name]
    numbers = st.lists(st.floats(-8, 8, width=32), min_size=classes, max_size=classes)
    outputs = torch.tensor([data.draw(numbers)], dtype=torch.float64)
    targets = torch.tensor([data.draw(st.integers(0, max(1, classes - 1)))])
    targets = sane(name, targets, classes)
    loss = make(classes)
    _, gradient, hessian = autodiff(function, outputs, targets)
    scale = max(1e-6, float(hessian.abs().max()))
    assert float((loss.gradient(outputs, targets) - gradient).abs().max()) <= 1e-12 * max(
        1, float(gradient.abs().max())
    )
    assert float((loss.hessian(outputs, targets) - hessian).abs().max()) <= 1e-9 * scale


@pytest.mark.parametrize("loss", [BinaryCrossEntropy(2.0), Exponential()], ids=["binary", "exponential"])
@pytest.mark.parametrize("columns", [(), (1,)], ids=["(N,)", "(N, 1)"])
def test_a_single_output_may_have_no_column(loss: Loss, columns: tuple[int, ...]) -> None:
    outputs, targets, direction = draw(1)
    flat = loss.product(outputs, targets, direction)
    outputs, direction = outputs.reshape(-1, *columns), direction.reshape(-1, *columns)
    for shape in ((-1,), (-1, 1)):
        wanted = targets.reshape(shape)
        loss.check(outputs, wanted)
        assert loss.values(outputs, wanted).shape == targets.shape
        assert loss.gradient(outputs, wanted).shape == outputs.shape
        assert torch.equal(loss.product(outputs, wanted, direction), flat.reshape(outputs.shape))
        quadratic = (flat * direction.reshape(-1, 1)).sum(1)
        assert torch.allclose(loss.quadratic(outputs, wanted, direction), quadratic, rtol=1e-14)
        ((weight, vector),) = loss.factors(outputs, wanted)
        assert weight.shape == targets.shape
        assert vector.shape == outputs.shape
        assert torch.equal(loss.hessian(outputs, wanted)[:, 0, 0], weight)


# ---------------------------------------------------------------- where float64 autodiff fails


class Digits:
    """Cross entropy with 60 digits for one sample: value, gradient and Hessian in the outputs."""

    def __init__(self, logits: list[float], target: int) -> None:
        with mpmath.workdps(400):
            exps = [mpmath.exp(mpmath.mpf(x)) for x in logits]
            total = mpmath.fsum(exps)
            s = [e / total for e in exps]
            others = mpmath.fsum(e for i, e in enumerate(exps) if i != target)
            classes = range(len(s))
            self.value = float(mpmath.log1p(others / exps[target]))
            self.gradient = [float(s[i] if i != target else -others / total) for i in classes]
            self.hessian = [[float(s[i] * ((i == j) - s[j])) for j in classes] for i in classes]
            self.gap = float(mpmath.fsum(s[i] * (1 - s[i]) for i in classes))


def precise(found: Tensor, expected: Any, tolerance: float) -> bool:
    """Every entry to relative precision, however small."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    return bool(((found - wanted).abs() <= tolerance * wanted.abs() + 1e-300).all())


def _summed(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    found = loss.hessian_sum(outputs, targets)
    assert found is not None
    return found


LOGITS = [[1.0, -2.0, 0.25, 0.5], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, -1.0, -1.0]]


@pytest.mark.parametrize("margin", [0, 8, 18, 25, 40, 80, 150, 300])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_stays_right_at_any_margin(margin: float, top: int, dtype: torch.dtype) -> None:
    """Entry by entry, relative to the entry. The outputs are given, in their own precision."""
    loss = CrossEntropy()
    for logits, target in itertools.product(LOGITS, [0, 1, 3]):
        row = list(logits)
        row[top] += margin
        outputs, targets = torch.tensor([row], dtype=dtype), torch.tensor([target])
        exact = Digits(outputs[0].tolist(), target)
        assert precise(loss.gradient(outputs, targets)[0], exact.gradient, 1e-12)
        assert precise(loss.hessian(outputs, targets)[0], exact.hessian, 1e-12)
        assert precise(_summed(loss, outputs, targets), exact.hessian, 1e-12)
        assert precise(confidence_gap(outputs), [exact.gap], 1e-12)
        assert precise(loss.values(outputs.double(), targets), [exact.value], 1e-12)
        assert precise(loss.values(outputs, targets).double(), [exact.value], 1e-5) or exact.value < 1e-30
        for direction in ([1.0, -1.0, 0.5, 2.0], [1.0, 1.0, 1.0, 0.0]):
            u = torch.tensor([direction], dtype=torch.float64)
            product = torch.tensor(exact.hessian, dtype=torch.float64) @ u[0]
            size = torch.tensor(exact.hessian, dtype=torch.float64).abs() @ u[0].abs()  # what cancels of itself
            assert bool(((loss.product(outputs, targets, u)[0] - product).abs() <= 1e-12 * size).all())
            # uᵀAu = Σ_{i<j} S_i S_j (u_i − u_j)², a sum of positive terms
            pairs = -sum(
                exact.hessian[i][j] * (direction[i] - direction[j]) ** 2 for i, j in itertools.combinations(range(4), 2)
            )
            assert precise(loss.quadratic(outputs, targets, u), [pairs], 1e-11)


def test_summed_hessians_are_those_of_the_samples_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(7, 4, dtype=torch.float64), torch.arange(7) % 4
    loss = CrossEntropy(class_weights(4), 0.1)
    whole = _summed(loss, outputs, targets)
    assert close(whole, loss.hessian(outputs, targets).sum(0))
    monkeypatch.setattr("spiritlevel.binding.losses.elimination._PIECE", 12)
    assert close(_summed(loss, outputs, targets), whole)
    assert loss.hessian_sum(outputs[None], targets[None]) is None


def test_autodiff_fails_where_the_closed_form_does_not() -> None:
    """The reason for all of this: float64 autodiff sees half the curvature at margin 40, or none."""
    outputs, targets = torch.tensor([[40.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    _, _, hessian = autodiff(lambda o, t: F.cross_entropy(o, t, reduction="none"), outputs, targets)
    exact = Digits([40.0, 0.0], 0)
    assert not precise(hessian[0], exact.hessian, 0.1)
    assert precise(CrossEntropy().hessian(outputs, targets)[0], exact.hessian, 1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("margin", [0.0, 40.0, 300.0])
def test_weights_and_smoothing_keep_the_precision(smoothing: float, margin: float) -> None:
    weight = class_weights(4)
    loss = CrossEntropy(weight, smoothing)
    row = [1.0 + margin, -2.0, 0.25, 0.5]
    outputs, targets = torch.tensor([row], dtype=torch.float64), torch.tensor([0])
    digits = [Digits(row, target) for target in range(4)]
    share = [(smoothing / 4 + (1 - smoothing) * (c == 0)) * float(weight[c]) for c in range(4)]
    gradient = [sum(w * d.gradient[i] for w, d in zip(share, digits, strict=True)) for i in range(4)]
    assert precise(loss.gradient(outputs, targets)[0], gradient, 1e-12)
    hessian = sum(share) * torch.tensor(digits[0].hessian, dtype=torch.float64)
    assert precise(loss.hessian(outputs, targets)[0], hessian.tolist(), 1e-12)
    assert precise(_summed(loss, outputs, targets), hessian.tolist(), 1e-12)
    value = sum(w * d.value for w, d in zip(share, digits, strict=True))
    assert precise(loss.values(outputs, targets), [value], 1e-12)


@pytest.mark.parametrize("margin", [-300.0, -80.0, -30.0, -21.0, 0.0, 5.0, 21.0, 30.0, 80.0, 300.0])
@pytest.mark.parametrize("target", [0, 1])
def test_the_binary_loss_stays_right_at_any_margin(margin: float, target: int) -> None:
    loss, outputs, targets = BinaryCrossEntropy(), torch.tensor([[margin]]), torch.tensor([target])
    exact = Digits([0.0, margin], target)  # one logit is a softmax over (0, φ)
    assert precise(loss.values(outputs.double(), targets), [exact.value], 1e-14)
    assert precise(loss.gradient(outputs, targets)[0], exact.gradient[1:], 1e-14)
    assert precise(loss.hessian(outputs, targets)[0], [[exact.hessian[1][1]]], 1e-14)


def test_huge_outputs_neither_overflow_nor_invent_curvature() -> None:
    outputs = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 1e4]], dtype=torch.float64)
    targets = torch.tensor([1, 1])
    loss = CrossEntropy()
    assert torch.equal(loss.values(outputs, targets), torch.tensor([1e4, math.log(2)], dtype=torch.float64))
    assert torch.equal(loss.gradient(outputs, targets)[0], torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64))
    hessian = loss.hessian(outputs, targets)
    assert not hessian[0].any()
    assert torch.allclose(hessian[1, 1:, 1:], torch.tensor([[0.25, -0.25], [-0.25, 0.25]], dtype=torch.float64))
    weight, vector = zip(*loss.factors(outputs, targets), strict=True)
    assert bool(torch.isfinite(torch.stack(weight)).all())
    assert bool(torch.isfinite(torch.stack(vector)).all())
    for weight_, vector_ in loss.sampled_factors(outputs, targets, 1, torch.ones(2, 3, dtype=torch.int8)):
        assert bool(torch.isfinite(weight_).all())
        assert bool(torch.isfinite(vector_).all())


def test_the_exponential_loss_at_the_extremes() -> None:
    outputs, targets = torch.tensor([[-800.0, 0.0]], dtype=torch.float64), torch.tensor([1])
    exponential = Exponential()
    assert not exponential.hessian(outputs, targets).any()
    assert exponential.values(outputs, targets).item() == 0.0
    exact = [[math.exp(-300), -math.exp(-300)], [-math.exp(-300), math.exp(-300)]]
    assert precise(exponential.hessian(outputs * 300 / 800, targets)[0], exact, 1e-14)
    assert precise(exponential.gradient(outputs * 300 / 800, targets)[0], exact[0], 1e-14)


# ---------------------------------------------------------------- factors


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=10), st.integers(0, 9))
def test_cross_entropy_factors(row: list[float], label: int) -> None:
    outputs, targets = torch.tensor([row], dtype=torch.float64), torch.tensor([label % len(row)])
    probabilities, top, q = softmax_parts(outputs)
    assert q.item() == pytest.approx(1 - probabilities.max().item(), abs=1e-15)
    factors = list(CrossEntropy().factors(outputs, targets))
    assert len(factors) == len(row) - 1
    for weight, vector in factors:
        assert weight.item() >= 0
        assert vector.sum().item() == pytest.approx(0, abs=1e-12)  # A does not see a shift of all outputs
        assert vector.abs().max().item() == 1.0
        assert vector[0, top].item() < 0  # the top class is eliminated last, so it is in every vector
    trace = sum(weight.item() * vector.square().sum().item() for weight, vector in factors)
    assert trace == pytest.approx(confidence_gap(outputs).item(), rel=1e-10, abs=1e-300)


def test_ties_for_the_top_class_do_no_harm() -> None:
    outputs = torch.tensor([[2.0, 2.0, 2.0], [2.0, -1.0, 2.0], [-1.0, 2.0, 2.0]], dtype=torch.float64)
    targets = torch.tensor([0, 1, 2])
    _, _, hessian = autodiff(naive.cross_entropy, outputs, targets)
    assert close(CrossEntropy().hessian(outputs, targets), hessian)


@pytest.mark.parametrize("scale", [1.0, 20.0, 60.0])
@pytest.mark.parametrize(("classes", "exact"), [(2, 0), (3, 0), (3, 1), (5, 0), (5, 1), (5, 2), (5, 3), (7, 2)])
@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy, weighted", "squared_error"])
def test_sampled_factors_are_unbiased(name: str, classes: int, exact: int, scale: float) -> None:
    """The mean over *all* sign patterns is the whole output Hessian, so any trace built on it is unbiased."""
    loss = CASES[name][0](classes)
    (row,), (target,), _ = draw(classes, 1, scale, seed=classes)
    target = target % classes
    signs = torch.tensor(list(itertools.product([-1, 1], repeat=classes)), dtype=torch.int8)
    count = len(signs)
    outputs, targets = row.expand(count, -1), target.expand(count)
    mean = torch.zeros(classes, classes, dtype=torch.float64)
    factors = list(loss.sampled_factors(outputs, targets, exact, signs))
    assert len(factors) == exact + 1
    for index, (weight, vector) in enumerate(factors):
        assert bool((weight >= 0).all())
        assert vector.abs().max().item() <= (1 if index < exact else math.sqrt(classes))
        mean += torch.einsum("n,ni,nj->ij", weight, vector, vector) / count
    wanted = loss.hessian(row[None], target[None])[0]
    size = wanted.diagonal().sqrt()
    assert bool(((mean - wanted).abs() <= 1e-12 * torch.outer(size, size)).all())
    assert mean.trace().item() == pytest.approx(wanted.trace().item(), rel=1e-12)


def test_the_most_probable_classes_are_taken_exactly() -> None:
    outputs = torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    factors = list(CrossEntropy().sampled_factors(outputs, torch.tensor([0]), 2, torch.ones(1, 5, dtype=torch.int8)))
    assert [int(vector.argmax()) for _, vector in factors[:2]] == [3, 2]
    assert float(factors[2][1][0, [2, 3]].abs().max()) == 0  # eliminated: not in what is sampled


def test_nothing_can_be_sampled_if_all_is_exact() -> None:
    outputs, targets, signs = torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int8)
    with pytest.raises(InputError, match=r"cross_entropy of 3 outputs has 2 factors; at least one .* but 2 are"):
        list(CrossEntropy().sampled_factors(outputs, targets, 2, signs))
    with pytest.raises(InputError, match="squared_error of 3 outputs has 3 factors"):
        list(SquaredError().sampled_factors(outputs, targets, 3, signs))
    for loss in (Exponential(), CallableLoss(smooth)):
        with pytest.raises(InputError, match=f"passes= is for .*; {loss.name} is measured without it"):
            loss.sampled_factors(outputs, targets, 0, signs)


# ---------------------------------------------------------------- callables


def test_a_callable_may_be_linear_or_constant_in_its_gradient() -> None:
    outputs, targets, direction = draw(3)
    for function in (lambda o, t: o.sum(1), lambda o, t: F.relu(1 - o.gather(1, t[:, None]))[:, 0]):
        loss = CallableLoss(function)
        assert not loss.product(outputs, targets % 3, direction).any()
        assert not loss.quadratic(outputs, targets % 3, direction).any()


def test_a_callable_may_hold_float32_tensors() -> None:
    weight = class_weights(3)
    loss = CallableLoss(lambda o, t: F.cross_entropy(o, t, weight, reduction="none"))
    outputs, targets, direction = draw(3)
    targets = targets % 3
    reference = CrossEntropy(weight)
    outputs = outputs.float()
    assert loss.gradient(outputs, targets).dtype == torch.float64
    assert torch.allclose(loss.gradient(outputs, targets), reference.gradient(outputs, targets), atol=1e-6)
    found = loss.product(outputs, targets, direction)
    assert torch.allclose(found, reference.product(outputs, targets, direction), atol=1e-5)
    with pytest.raises(RuntimeError, match="Float"):  # nothing to fall back to
        loss.gradient(outputs.double(), targets)


def test_a_callable_may_have_outputs_of_any_shape() -> None:
    outputs = torch.randn(4, 3, 5, dtype=torch.float64)
    targets = torch.randint(0, 3, (4, 5))
    loss = CallableLoss(lambda o, t: F.cross_entropy(o, t, reduction="none").mean(1))
    loss.check(outputs, targets)
    direction = torch.randn_like(outputs)
    each = [CrossEntropy().quadratic(outputs[:, :, p], targets[:, p], direction[:, :, p]) for p in range(5)]
    assert torch.allclose(loss.quadratic(outputs, targets, direction), torch.stack(each).mean(0))


@pytest.mark.parametrize(
    ("value", "shape"),
    [(lambda o, t: o, r"\(4, 3\)"), (lambda o, t: 1.0, "float")],
)
def test_a_callable_must_return_one_value_a_sample(value: Function, shape: str) -> None:
    message = rf"must return one value per sample, shape \(4,\), got {shape}; use reduction='none'"
    with pytest.raises(InputError, match=message):
        CallableLoss(value).check(torch.zeros(4, 3), torch.zeros(4))


def test_factors_of_a_callable() -> None:
    outputs, targets, _ = draw(3)

    class Offers:
        def __init__(self, terms: list[tuple[Tensor, Tensor]], **more: Any) -> None:
            self.factors = lambda outputs, targets: iter(terms)
            vars(self).update(more)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.sum(1)

    term = (torch.ones(7), torch.ones(7, 3))
    assert not CallableLoss(smooth).closed_form
    with pytest.raises(InputError, match=r"give your loss a method factors\(outputs, targets\)"):
        list(CallableLoss(smooth).factors(outputs, targets))
    few = CallableLoss(Offers([term]))
    assert few.closed_form
    assert len(list(few.factors(outputs, targets))) == few.rank(outputs, targets) == 3  # the others are zero
    assert torch.equal(few.hessian(outputs, targets), torch.ones(7, 3, 3, dtype=torch.float64))
    many = CallableLoss(Offers([term] * 5, rank=lambda classes: classes + 2))
    assert len(list(many.factors(outputs, targets))) == many.rank(outputs, targets) == 5
    with pytest.raises(InputError, match=r"more factors than its 3 terms; give it a method rank\(outputs\)"):
        list(CallableLoss(Offers([term] * 4)).factors(outputs, targets))
    with pytest.raises(InputError, match=r"must be weights \(7,\) and vectors \(7, 3\), got \(7, 1\) and \(7, 3\)"):
        list(CallableLoss(Offers([(torch.ones(7, 1), term[1])])).factors(outputs, targets))


# ---------------------------------------------------------------- names and torch.nn


@pytest.mark.parametrize("name", NAMED)
def test_names_resolve(name: str) -> None:
    loss = resolve(name)
    assert loss.name == name
    assert resolve(loss) is loss


@pytest.mark.parametrize(
    ("module", "kind", "classes"),
    [
        (nn.CrossEntropyLoss(), CrossEntropy, 5),
        (nn.CrossEntropyLoss(label_smoothing=0.1), CrossEntropy, 5),
        (nn.CrossEntropyLoss(reduction="none", weight=class_weights(5)), CrossEntropy, 5),
        (nn.CrossEntropyLoss(reduction="none", weight=class_weights(5), label_smoothing=0.3), CrossEntropy, 5),
        (nn.BCEWithLogitsLoss(), BinaryCrossEntropy, 1),
        (nn.BCEWithLogitsLoss(reduction="none"), BinaryCrossEntropy, 1),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.5])), BinaryCrossEntropy, 1),
        (nn.MSELoss(), SquaredError, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_torch_losses_are_translated(module: Any, kind: type[Loss], classes: int) -> None:
    """The mean of the translated values is what the module returns."""
    loss = resolve(module)
    assert type(loss) is kind
    outputs, targets, _ = draw(classes)
    wanted: Tensor = targets
    if kind is BinaryCrossEntropy:
        wanted = targets[:, None].double()
    elif kind is SquaredError:
        wanted = torch.randn(len(targets), classes, dtype=torch.float64)
    loss.check(outputs, wanted)
    assert loss.values(outputs, wanted).mean().item() == pytest.approx(float(module.double()(outputs, wanted).mean()))


class Focal(nn.CrossEntropyLoss):
    """A loss of the user's that only looks like one of torch."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).square()


class Named(nn.CrossEntropyLoss):
    """The same loss under another name."""


def test_a_derived_loss_counts_for_what_it_computes() -> None:
    outputs, targets, _ = draw(3)
    targets = targets % 3
    focal = resolve(Focal(reduction="none"))
    assert isinstance(focal, CallableLoss)
    focal.check(outputs, targets)
    assert torch.allclose(focal.values(outputs, targets), naive.cross_entropy(outputs, targets).square())
    assert isinstance(resolve(Named()), CrossEntropy)
    with pytest.raises(InputError, match="one value per sample"):
        resolve(Focal()).check(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("cross_entrpy", "unknown loss 'cross_entrpy': did you mean 'cross_entropy'"),
        (3, "must be a name, a torch.nn loss or a callable, got 3."),
        (None, "must be a name, a torch.nn loss or a callable, got None."),
        (nn.CrossEntropyLoss, "is the class CrossEntropyLoss; pass an instance"),
        (nn.CrossEntropyLoss(reduction="sum"), "CrossEntropyLoss(reduction='sum') is not a mean over samples"),
        (nn.CrossEntropyLoss(torch.ones(3), reduction="sum"), "use reduction='none' and multiply by their number"),
        (nn.MSELoss(reduction="sum"), "MSELoss(reduction='sum') is not a mean over samples"),
        (nn.MSELoss(reduction="none"), "MSELoss(reduction='none') has no single value per sample"),
        (nn.NLLLoss(), "torch.nn.NLLLoss is not known; pass loss='cross_entropy', which is the same for log-prob"),
        (nn.BCELoss(), "torch.nn.BCELoss is not known; pass loss='binary_cross_entropy' and a model that returns lo"),
        (nn.L1Loss(), "torch.nn.L1Loss is not known; pass one of cross_entropy"),
        (nn.HuberLoss(reduction="none"), "HuberLoss(reduction='none') has no single value per sample"),
        (nn.SmoothL1Loss(beta=0.0), "SmoothL1Loss(beta=0) is the absolute error, which has no curvature"),
        (nn.PoissonNLLLoss(log_input=False), "PoissonNLLLoss(log_input=False) takes rates, not their logarithms"),
        (nn.PoissonNLLLoss(reduction="sum"), "PoissonNLLLoss(reduction='sum') is not a mean over samples"),
    ],
)
def test_other_losses_are_refused_in_a_sentence(loss: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(loss)


LABELS = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "message"),
    [
        ("cross_entropy", torch.zeros(4, 1), LABELS, "at least 2 outputs per sample, got 1; use loss='binary_cross_en"),
        ("cross_entropy", torch.zeros(4), LABELS, "outputs of shape (samples, outputs), got (4,)"),
        ("cross_entropy", torch.zeros(4, 3, 2), LABELS, "of outputs (4, 3, 2) needs one integer class for each posit"),
        ("cross_entropy", torch.zeros(4, 3), LABELS.double(), "one integer class per sample or position, or probabil"),
        (
            "cross_entropy",
            torch.zeros(4, 3),
            LABELS - 100,
            "target of sample 0 is the ignored label -100, which leaves",
        ),
        (nn.CrossEntropyLoss(ignore_index=0), torch.zeros(4, 3), LABELS, "the ignored label 0, which leaves the sampl"),
        (
            nn.CrossEntropyLoss(weight=torch.ones(3)),
            torch.zeros(4, 3),
            LABELS,
            "divides by the sum of the weights of a",
        ),
        ("cross_entropy", torch.zeros(4, 3), LABELS[:, None], "targets of shape (4, 1) and type int64"),
        ("cross_entropy", torch.zeros(3, 3), LABELS, "3 outputs for 4 targets"),
        ("cross_entropy", torch.zeros(4, 2), LABELS, "target 2 of sample 2 is outside the model's 2 class"),
        ("cross_entropy", torch.zeros(4, 3), LABELS - 1, "target -1 of sample 0 is outside the model's 3"),
        (CrossEntropy(torch.ones(2)), torch.zeros(4, 3), LABELS, "2 class weights for a model of 3 outputs"),
        ("binary_cross_entropy", torch.zeros(4, 2), LABELS, "target for every label, got outputs of shape (4, 2)"),
        ("binary_cross_entropy", torch.zeros(4, 1), LABELS, "needs targets 0 and 1, got 2"),
        ("binary_cross_entropy", torch.zeros(4, 1), torch.tensor([0.0, 1, 0.5, 1]), "got 0.5"),
        ("binary_cross_entropy", torch.zeros(4, 1), torch.zeros(3), "4 outputs for 3 targets"),
        ("squared_error", torch.zeros(4), LABELS[:3], "needs targets like the outputs (4,), got (3,)"),
        ("squared_error", torch.zeros(4, 3), torch.zeros(4, 2), "squared_error needs targets like the outputs (4, 3)"),
        (
            SquaredError(mean=True),
            torch.zeros(4, 3),
            LABELS,
            "MSELoss needs targets like the outputs (4, 3), got (4,); int",
        ),
        ("squared_error", torch.zeros(4, 2), LABELS, "target 2 of sample 2"),
        ("squared_error", torch.zeros(2, 1), torch.tensor([[0.0], [math.nan]]), "sample 1 is NaN"),
        ("exponential", torch.zeros(4, 2), LABELS, "target 2 of sample 2"),
        ("exponential", torch.zeros(4, 3, 2), LABELS, "got (4, 3, 2)"),
        ("exponential", torch.zeros(4), LABELS, "needs targets 0 and 1, or -1 and 1, got 2"),
        ("exponential", torch.zeros(4), LABELS[:3], "exponential got 4 outputs for 3 targets"),
    ],
)
def test_targets_that_do_not_fit_are_refused_in_a_sentence(
    loss: Any, outputs: Tensor, targets: Tensor, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(loss).check(outputs, targets)


def test_squared_error_takes_targets_of_any_float_type_and_shape() -> None:
    outputs = torch.randn(4, 1)
    for targets in (torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, dtype=torch.float64), torch.zeros(4).half()):
        loss = SquaredError()
        loss.check(outputs, targets)
        assert torch.allclose(loss.values(outputs, targets), outputs[:, 0].square() / 2)
        assert loss.values(outputs, targets).dtype == outputs.dtype


def test_squared_error_of_one_output_takes_whole_numbers_as_numbers() -> None:
    """A column of outputs is no single class: 0 was one-hot encoded as 1, and any other number was refused."""
    outputs = torch.randn(4, 1)
    for targets in (torch.zeros(4).long(), torch.tensor([0, 1, 1, 0]), torch.tensor([[3], [-1], [0], [7]])):
        loss = SquaredError()
        loss.check(outputs, targets)
        wanted = (outputs[:, 0] - targets.reshape(-1)).square() / 2
        assert torch.allclose(loss.values(outputs, targets), wanted)
        assert torch.equal(loss.values(outputs, targets), loss.values(outputs[:, 0], targets))


# ---------------------------------------------------------------- the scalars


def test_the_confidence_gap_of_known_softmaxes() -> None:
    for classes in (2, 3, 10, 1000):
        assert confidence_gap(torch.zeros(1, classes)).item() == pytest.approx(1 - 1 / classes, rel=1e-12)
    assert confidence_gap(torch.tensor([[1e4, 0.0]])).item() == 0.0


@pytest.mark.parametrize("logits", [torch.randn(4), torch.randn(4, 1), torch.randn(4, 3, 2), torch.tensor(1.0)])
def test_a_softmax_needs_a_row_of_classes_a_sample(logits: Tensor) -> None:
    """One logit has a sigmoid, not a softmax; a vector would be read as one sample."""
    with pytest.raises(InputError, match=r"confidence_gap needs logits of shape \(samples, classes >= 2\)"):
        confidence_gap(logits)
    with pytest.raises(InputError, match=r"aceht needs logits of shape \(samples, classes >= 2\)"):
        aceht(torch.randn(4, 3), logits)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2, 2)])
def test_aceht_is_the_trace_of_an_affine_classifier(shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, dtype=torch.float64)
    flat = inputs.reshape(5, -1)
    model = nn.Sequential(nn.Linear(flat.shape[1], 4)).double()
    logits, targets = model(flat).detach(), torch.tensor([0, 1, 2, 3, 0])
    assert torch.allclose(aceht(inputs, logits), naive.per_sample_traces(model, flat, targets), rtol=1e-12)
    assert torch.equal(aceht(inputs.float(), logits).isfinite(), torch.ones(5, dtype=torch.bool))


def test_aceht_needs_one_input_a_row() -> None:
    with pytest.raises(InputError, match="one input per row of logits, got 3 inputs and 2 logits"):
        aceht(torch.zeros(3, 2), torch.zeros(2, 2))


# ---------------------------------------------------------------- what once gave a wrong number or a raw error


def test_large_exponentials_are_finite_wherever_they_are_admitted() -> None:
    outputs, targets = torch.tensor([[0.0, 100.0]]), torch.tensor([0])
    Exponential().check(outputs, targets)
    assert float(Exponential().values(outputs, targets)) == pytest.approx(math.exp(100.0))  # inf in float32


@pytest.mark.parametrize("name", ["cross_entropy", "squared_error", "exponential"])
def test_classes_may_be_unsigned_short_integers(name: str) -> None:
    loss, outputs, targets = resolve(name), torch.randn(3, 4), torch.tensor([0, 3, 1])
    short = targets.to(torch.uint16)
    loss.check(outputs, short)
    assert torch.equal(loss.gradient(outputs, short), loss.gradient(outputs, targets))
    assert torch.equal(loss.values(outputs, short), loss.values(outputs, targets))
    with pytest.raises(InputError, match=r"target 4 .* outside the model's 4 classes"):
        loss.check(outputs, torch.tensor([0, 4, 0], dtype=torch.uint16))


def test_a_loss_without_a_second_derivative_is_named() -> None:
    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.multilabel_margin_loss(outputs, targets[:, None].expand(outputs.shape), reduction="none")

    with pytest.raises(InputError, match=r"the loss hinge cannot be differentiated twice \(derivative for aten"):
        resolve(hinge).product(torch.randn(2, 3), torch.tensor([0, 1]), torch.randn(2, 3))
