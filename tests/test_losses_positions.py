"""Losses of images, sequences, many labels and numbers: what torch returns for each sample alone, and its derivatives.

The reference is always torch's own loss of a batch of one, differentiated densely in float64.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import mpmath
import naive
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel.binding.losses import CausalLM, CrossEntropy, Loss, TokenCrossEntropy, elimination, resolve
from spiritlevel.errors import InputError

Reference = Callable[[Tensor, Tensor], Tensor]
COUNT = 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes: int, *shape: int, ignored: int | None = None, seed: int = 1) -> Tensor:
    """Random classes; about a third of the positions ignored, of the first sample none and of the last all but one."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, classes, shape, generator=generator)
    if ignored is not None:
        gone = torch.rand(shape, generator=generator) < 0.35
        gone[0], gone[-1] = False, True
        gone[-1].view(-1)[-1] = False
        gone[1:-1].flatten(1)[:, -1] = False
        found[gone] = ignored
    return found


def soft(axis: int, *shape: int) -> Tensor:
    return numbers(*shape, seed=2).softmax(axis)


def torch_loss(**options: Any) -> Reference:
    return lambda outputs, targets: F.cross_entropy(outputs, targets, **options)


def last(reference: Reference) -> Reference:
    return lambda outputs, targets: reference(
        outputs.movedim(-1, 1), targets.movedim(-1, 1) if targets.is_floating_point() else targets
    )


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[:, :-1].reshape(-1, outputs.shape[-1]), targets[:, 1:].reshape(-1))


class Case(NamedTuple):
    loss: Any
    outputs: Tensor
    targets: Tensor
    reference: Reference
    smallest: float = 0.0


WEIGHT = torch.tensor([0.3, 1.0, 2.1], dtype=torch.float64)
LABEL_WEIGHT = torch.tensor([0.5, 2.0, 1.5, 3.0], dtype=torch.float64)
KEPT = nn.CrossEntropyLoss(WEIGHT, reduction="none")


def unweighted_divisor(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, WEIGHT, reduction="sum") / (targets != -100).sum()


CASES = {
    "sequence": Case("cross_entropy", numbers(COUNT, 3, 5), labels(3, COUNT, 5), torch_loss()),
    "image": Case("cross_entropy", numbers(COUNT, 3, 2, 4), labels(3, COUNT, 2, 4, ignored=-100), torch_loss()),
    "image, ignored class": Case(
        nn.CrossEntropyLoss(ignore_index=1),
        numbers(COUNT, 3, 2, 4),
        labels(3, COUNT, 2, 4, ignored=1).clamp(min=0),
        torch_loss(ignore_index=1),
    ),
    "image, weighted mean": Case(
        nn.CrossEntropyLoss(WEIGHT), numbers(COUNT, 3, 6), labels(3, COUNT, 6, ignored=-100), torch_loss(weight=WEIGHT)
    ),
    "image, weighted and smoothed": Case(
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2),
        numbers(COUNT, 3, 6),
        labels(3, COUNT, 6, ignored=-100),
        torch_loss(weight=WEIGHT, label_smoothing=0.2),
    ),
    "image, weighted, reduction none": Case(
        KEPT, numbers(COUNT, 3, 6), labels(3, COUNT, 6, ignored=-100), unweighted_divisor
    ),
    "image, smoothed": Case(
        nn.CrossEntropyLoss(label_smoothing=0.1),
        numbers(COUNT, 4, 5),
        labels(4, COUNT, 5, ignored=-100),
        torch_loss(label_smoothing=0.1),
    ),
    "classes last": Case("cross_entropy", numbers(COUNT, 5, 3), labels(3, COUNT, 5, ignored=-100), last(torch_loss())),
    "tokens": Case("token_cross_entropy", numbers(COUNT, 3, 3), labels(3, COUNT, 3, ignored=-100), last(torch_loss())),
    "torch of as many classes as positions": Case(
        nn.CrossEntropyLoss(), numbers(COUNT, 3, 3), labels(3, COUNT, 3), torch_loss()
    ),
    "image, classes last": Case(
        "token_cross_entropy", numbers(COUNT, 2, 3, 4), labels(4, COUNT, 2, 3), last(torch_loss())
    ),
    "causal_lm": Case("causal_lm", numbers(COUNT, 6, 5), labels(5, COUNT, 6, ignored=-100), shifted),
    "soft": Case("cross_entropy", numbers(COUNT, 5), soft(1, COUNT, 5), torch_loss()),
    "soft, weighted and smoothed": Case(
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.3),
        numbers(COUNT, 3),
        soft(1, COUNT, 3),
        torch_loss(weight=WEIGHT, label_smoothing=0.3),
    ),
    "soft image": Case("cross_entropy", numbers(COUNT, 3, 2, 2), soft(1, COUNT, 3, 2, 2), torch_loss()),
    "soft image, weighted": Case(
        nn.CrossEntropyLoss(WEIGHT), numbers(COUNT, 3, 4), soft(1, COUNT, 3, 4), torch_loss(weight=WEIGHT)
    ),
    "soft tokens": Case("token_cross_entropy", numbers(COUNT, 2, 4), soft(2, COUNT, 2, 4), last(torch_loss())),
    "many labels": Case(
        "binary_cross_entropy",
        numbers(COUNT, 4),
        labels(2, COUNT, 4),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.to(o)),
    ),
    "many labels, weighted": Case(
        nn.BCEWithLogitsLoss(LABEL_WEIGHT, pos_weight=LABEL_WEIGHT.flip(0)),
        numbers(COUNT, 4),
        soft(1, COUNT, 4),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, LABEL_WEIGHT, pos_weight=LABEL_WEIGHT.flip(0)),
    ),
    "one label, weighted": Case(
        nn.BCEWithLogitsLoss(torch.tensor(2.0), pos_weight=torch.tensor(0.5)),
        numbers(COUNT),
        labels(2, COUNT),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.to(o), torch.tensor(2.0), pos_weight=torch.tensor(0.5)),
    ),
    "labels of an image": Case(
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([[2.0], [3.0]], dtype=torch.float64)),
        numbers(COUNT, 2, 3),
        labels(2, COUNT, 2, 3).double(),
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.tensor([[2.0], [3.0]], dtype=torch.float64)
        ),
    ),
    "squared error of one number": Case(
        "squared_error", numbers(COUNT), numbers(COUNT, seed=3), lambda o, t: (o - t).square().sum() / 2
    ),
    "squared error of an image": Case(
        "squared_error", numbers(COUNT, 2, 2), numbers(COUNT, 2, 2, seed=3), lambda o, t: (o - t).square().sum() / 2
    ),
    "MSELoss of one number": Case(nn.MSELoss(), numbers(COUNT), labels(9, COUNT), lambda o, t: F.mse_loss(o, t.to(o))),
    "MSELoss of an image": Case(nn.MSELoss(), numbers(COUNT, 2, 2), numbers(COUNT, 2, 2, seed=3), F.mse_loss),
    "huber": Case("huber", numbers(COUNT, 5), numbers(COUNT, 5, seed=3), F.huber_loss),
    "HuberLoss": Case(
        nn.HuberLoss(delta=2.5), numbers(COUNT), numbers(COUNT, seed=3), lambda o, t: F.huber_loss(o, t, delta=2.5)
    ),
    "SmoothL1Loss": Case(
        nn.SmoothL1Loss(beta=3.0),
        numbers(COUNT, 4),
        numbers(COUNT, 4, seed=3),
        lambda o, t: F.smooth_l1_loss(o, t, beta=3.0),
    ),
    "poisson": Case(
        "poisson", numbers(COUNT), labels(9, COUNT), lambda o, t: F.poisson_nll_loss(o, t.to(o), log_input=True)
    ),
    "PoissonNLLLoss": Case(
        nn.PoissonNLLLoss(full=True),
        numbers(COUNT, 3),
        labels(9, COUNT, 3).double(),
        lambda o, t: F.poisson_nll_loss(o, t, full=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_torchs_loss_of_each_sample_alone(name: str) -> None:
    case = CASES[name]
    loss, outputs, targets = resolve(case.loss), case.outputs, case.targets
    loss.check(outputs, targets)
    direction, size = numbers(*outputs.shape, seed=7), outputs[0].numel()
    values, slopes, factors = (
        loss.values(outputs, targets),
        loss.gradient(outputs, targets),
        loss.hessian(outputs, targets),
    )
    product, form = loss.product(outputs, targets, direction), loss.quadratic(outputs, targets, direction)
    along = loss.slope_along(outputs, targets, direction)
    assert slopes.shape == product.shape == outputs.shape
    assert len(list(loss.factors(outputs, targets))) == loss.rank(outputs, targets)
    for n in range(COUNT):

        def one(point: Tensor, n: int = n) -> Tensor:
            return case.reference(point[None], targets[n : n + 1])

        slope = torch.autograd.functional.jacobian(one, outputs[n])
        hessian = naive.symmetric(torch.autograd.functional.hessian(one, outputs[n]).reshape(size, size))
        assert values[n].item() == pytest.approx(one(outputs[n]).item(), rel=1e-12)
        assert torch.allclose(slopes[n], slope, rtol=1e-11, atol=1e-14)
        assert torch.allclose(factors[n], hessian, rtol=1e-10, atol=1e-14)
        moved = hessian @ direction[n].reshape(-1)
        assert torch.allclose(product[n].reshape(-1), moved, rtol=1e-10, atol=1e-13)
        assert form[n].item() == pytest.approx(float(moved @ direction[n].reshape(-1)), rel=1e-10, abs=1e-13)
        assert along[n].item() == pytest.approx(float((slope * direction[n]).sum()), rel=1e-10, abs=1e-13)


def _rank(case: Case) -> int:
    return resolve(case.loss).rank(case.outputs[:2], case.targets[:2])


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        (name, exact)
        for name, case in CASES.items()
        for exact in (0, 1, 4)
        if case.outputs[0].numel() > 1 and exact < _rank(case)  # otherwise all factors are exact
    ],
)
def test_sampled_factors_are_unbiased(name: str, exact: int) -> None:
    """The mean of d·vvᵀ over random signs is A; over all signs where these are few."""
    case = CASES[name]
    loss, outputs, targets = resolve(case.loss), case.outputs[:2], case.targets[:2]
    size = outputs[0].numel()
    wanted = loss.hessian(outputs, targets)
    if size <= 6:
        every = torch.tensor(list(itertools.product([-1, 1], repeat=size)), dtype=torch.int8)
    else:  # columns of a Hadamard matrix are as good as all signs: E σσᵀ = I
        power = 2 ** (size - 1).bit_length()
        every = torch.ones(1, 1, dtype=torch.int8)
        while len(every) < power:
            every = torch.cat([torch.cat([every, every], 1), torch.cat([every, -every], 1)])
        every = every[:, :size]
    total = torch.zeros_like(wanted)
    for signs in every:
        given = signs.expand(2, -1).reshape(outputs.shape)
        found = list(loss.sampled_factors(outputs, targets, exact, given))
        assert len(found) == exact + 1
        for weight, vector in found:
            assert float(vector.abs().max()) < 3  # of order 1
            flat = vector.double().reshape(2, -1)
            total += weight[:, None, None] * flat[:, :, None] * flat[:, None, :] / len(every)
    assert torch.allclose(total, wanted, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [20.0, 40.0, 80.0])
def test_positions_keep_all_digits_at_any_margin(margin: float, dtype: torch.dtype) -> None:
    """Of a sequence of confident and doubtful tokens, each part of the curvature is right, against 40 digits."""
    outputs = torch.zeros(1, 3, 4, dtype=dtype)
    outputs[0, 0, 1], outputs[0, 1, 2], outputs[0, 1, 0] = margin, margin, 3.0
    targets = torch.tensor([[1, 2, -100]])
    loss = TokenCrossEntropy()
    with mpmath.workdps(60):
        for place, label in ((0, 1), (1, 2)):
            row = [mpmath.exp(mpmath.mpf(value)) for value in outputs[0, place].tolist()]
            shares = [value / sum(row) for value in row]
            trace = sum(s * (1 - s) for s in shares) / 2
            hessian = loss.hessian(outputs, targets)[0].reshape(3, 4, 3, 4)[place, :, place]
            assert float(hessian.trace()) == pytest.approx(float(trace), rel=1e-12)
            slope = loss.gradient(outputs, targets)[0, place, label]
            assert float(slope) == pytest.approx(
                float(-sum(s for j, s in enumerate(shares) if j != label) / 2), rel=1e-12
            )
        value = sum(
            mpmath.log(
                sum(
                    mpmath.exp(mpmath.mpf(x) - mpmath.mpf(outputs[0, place, label].item()))
                    for x in outputs[0, place].tolist()
                )
            )
            for place, label in ((0, 1), (1, 2))
        )
    assert float(loss.values(outputs, targets)) == pytest.approx(
        float(value / 2), rel=2e-6 if dtype == torch.float32 else 1e-12
    )
    (weight, vector), *_ = loss.sampled_factors(outputs, targets, 0, torch.ones(1, 3, 4, dtype=torch.int8))
    assert float(weight) == pytest.approx(float(sum(w for w, _ in loss.factors(outputs, targets))), rel=1e-9)
    assert bool(torch.isfinite(vector).all())


def test_many_labels_keep_all_digits_at_any_margin() -> None:
    outputs = torch.tensor([[80.0, -80.0, 1.0]])
    targets = torch.tensor([[1.0, 0.0, 1.0]])
    loss = resolve("binary_cross_entropy")
    diagonal = loss.hessian(outputs, targets)[0].diagonal()
    tiny = float(mpmath.exp(-80) / (1 + mpmath.exp(-80)) ** 2 / 3)
    assert diagonal[:2].tolist() == [pytest.approx(tiny, rel=1e-12)] * 2
    assert float(loss.gradient(outputs, targets)[0, 0]) == pytest.approx(-tiny, rel=1e-12)


def test_soft_labels_that_are_one_hot_keep_all_digits() -> None:
    outputs, targets = torch.tensor([[80.0, 0.0, 1.0]]), torch.tensor([0])
    one_hot = F.one_hot(targets, 3).float()
    hard, easy = (CrossEntropy().gradient(outputs, given) for given in (targets, one_hot))
    assert torch.allclose(hard, easy, rtol=1e-12, atol=0)
    assert torch.allclose(*(CrossEntropy().hessian(outputs, given) for given in (targets, one_hot)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["image", "causal_lm", "soft tokens", "image, weighted and smoothed"])
def test_pieces_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    loss, outputs, targets = resolve(case.loss), case.outputs, case.targets
    direction, signs = numbers(*outputs.shape, seed=9), torch.ones(outputs.shape, dtype=torch.int8)

    def everything() -> list[Tensor]:
        found = [loss.values(outputs, targets), loss.gradient(outputs, targets)]
        for form in (loss.product, loss.quadratic, loss.slope_along):
            found.append(form(outputs, targets, direction))
        return found + [part for factor in loss.sampled_factors(outputs, targets, 3, signs) for part in factor]

    whole = everything()
    monkeypatch.setattr(elimination, "_PIECE", 7)
    for one, other in zip(whole, everything(), strict=True):
        assert torch.allclose(one, other, rtol=1e-14, atol=0)


def test_products_can_be_vectorised_and_differentiated() -> None:
    case = CASES["causal_lm"]
    loss = CausalLM()
    several = numbers(3, *case.outputs.shape, seed=5)
    together = torch.func.vmap(lambda u: loss.product(case.outputs, case.targets, u))(several)
    assert torch.allclose(together, torch.stack([loss.product(case.outputs, case.targets, u) for u in several]))
    slope = torch.func.grad(lambda o: loss.values(o, case.targets).sum())(case.outputs)
    assert torch.allclose(slope, loss.gradient(case.outputs, case.targets), rtol=1e-12, atol=1e-15)


def test_only_positions_that_count_take_factors() -> None:
    """Each sample's m-th counted position shares a pass with the others' m-th one, wherever it is."""
    targets = torch.full((3, 50), -100)
    targets[0, 3], targets[1, 40], targets[2, [7, 9]] = 1, 0, 2
    outputs = numbers(3, 50, 4)
    loss = TokenCrossEntropy()
    assert loss.rank(outputs, targets) == 2 * 3


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "message"),
    [
        ("cross_entropy", torch.zeros(2, 3, 3), labels(3, 2, 3), "may have their classes in dimension 1, as in torch"),
        ("cross_entropy", torch.zeros(2, 3, 5), torch.full((2, 5), 3), "target 3 of sample 0, position 0, is outside"),
        ("cross_entropy", torch.zeros(2, 3, 5, 5), torch.full((2, 5, 5), 3), "sample 0, position (0, 0), is outside"),
        ("cross_entropy", torch.zeros(2, 3, 5), torch.full((2, 5), -100), "sample 0 has no label that counts"),
        ("cross_entropy", torch.zeros(2, 3, 5), torch.zeros(2, 4).long(), "class for each position, (2, 5), got targ"),
        ("cross_entropy", torch.zeros(2, 3, 5), soft(2, 2, 3, 5), "summing to 1 over the 3 classes of dimension 1"),
        ("cross_entropy", torch.zeros(2, 3), torch.full((2, 3), 0.5), "summing to 1 over the 3 classes"),
        ("token_cross_entropy", torch.zeros(2, 5, 1), torch.zeros(2, 5).long(), "needs at least 2 outputs per sample"),
        (
            "causal_lm",
            torch.zeros(2, 5),
            torch.zeros(2).long(),
            "causal_lm needs logits of shape (samples, tokens, voc",
        ),
        ("causal_lm", torch.zeros(2, 5, 3), soft(2, 2, 5, 3), "causal_lm needs integer labels"),
        ("causal_lm", torch.zeros(1, 3, 3), torch.tensor([[1, -100, -100]]), "all are -100 after the first"),
        (
            nn.CrossEntropyLoss(torch.tensor([1.0, 0.0])),  # 0/0
            torch.zeros(2, 2, 3),
            torch.tensor([[0, 1, 1], [1, -100, 1]]),
            "all labels of sample 1 have the class weight 0, by the sum of which torch divides",
        ),
        ("binary_cross_entropy", torch.zeros(2, 3), torch.zeros(2, 2), "needs targets like the outputs (2, 3)"),
        ("binary_cross_entropy", torch.zeros(2, 3), torch.full((2, 3), 1.5), "needs targets from 0 to 1, got 1.5"),
        (
            nn.BCEWithLogitsLoss(torch.ones(2, 1)),
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            "weight of shape (2, 1) does not",
        ),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)),
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            "pos_weight of shape (2,)",
        ),
        ("huber", torch.zeros(2, 3), torch.zeros(2), "huber needs targets like the outputs (2, 3), got (2,)"),
        ("huber", torch.zeros(2), torch.tensor([0.0, torch.nan]), "huber: the target of sample 1 is NaN"),
        (
            "poisson",
            torch.zeros(2),
            torch.tensor([0.0, -1.0]),
            "poisson needs counts, but the target of sample 1 is neg",
        ),
        ("poisson", torch.tensor([0.0, 800.0]), torch.zeros(2), "rate of sample 1, exp(800), is beyond"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(loss: Any, outputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(loss).check(outputs, targets)


def test_a_mean_over_tokens_of_a_batch_is_another_one() -> None:
    """The difference that the documentation states: equal lengths agree with torch, unequal ones do not."""
    outputs, targets = numbers(COUNT, 3, 6), labels(3, COUNT, 6)
    loss: Loss = CrossEntropy()
    assert loss.values(outputs, targets).mean().item() == pytest.approx(F.cross_entropy(outputs, targets).item())
    targets[0, 1:] = -100
    assert loss.values(outputs, targets).mean().item() != pytest.approx(
        F.cross_entropy(outputs, targets).item(), rel=1e-3
    )
