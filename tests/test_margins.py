"""Margins against high precision arithmetic, the proofs of mathematics 3.2, and distances found by hand."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.binding.losses import aceht, confidence_gap
from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, Setting
from spiritlevel.results import Margins
from spiritlevel.samples.margins import (
    margin_bound,
    margins,
    output_margin,
    printed_margin_bound,
    signed_margin,
    softmax_gap,
    softmax_margin,
)

# ---------------------------------------------------------------- scalars


def precise(logits: Tensor, y: int) -> tuple[float, float, float]:
    """Signed margin, softmax margin and 1−γ² of one row, by 200 digits."""
    with mpmath.workdps(200):
        phi = [mpmath.mpf(float(value)) for value in logits]
        total = mpmath.fsum(mpmath.exp(value) for value in phi)
        shares = [mpmath.exp(value) / total for value in phi]
        gamma = abs(shares[y] - max(s for j, s in enumerate(shares) if j != y))
        signed = phi[y] - max(value for j, value in enumerate(phi) if j != y)
        return float(signed), float(gamma), float(1 - gamma**2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 1e-6, 0.3, 8.0, 15.0, 18.0, 25.0, 40.0, 80.0, 300.0])
@pytest.mark.parametrize("label", ["top", "second", "lowest"])
def test_scalars_against_high_precision(margin: float, label: str, dtype: torch.dtype) -> None:
    logits = torch.randn(1, 10).to(dtype)
    order = logits[0].argsort(descending=True)
    logits[0, order[0]] = logits[0, order[1]] + margin
    y = int(order[{"top": 0, "second": 1, "lowest": 9}[label]])
    target = torch.tensor([y])
    signed, gamma, gap = precise(logits[0], y)
    found = [f(logits, target) for f in (signed_margin, output_margin, softmax_margin, softmax_gap)]
    assert all(value.dtype == torch.float64 for value in found)
    for value, expected in zip(found, (signed, abs(signed), gamma, gap), strict=True):
        assert float(value) == pytest.approx(expected, rel=1e-13, abs=0.0)


def test_the_naive_form_fails_where_the_safe_one_holds() -> None:
    logits, y = torch.tensor([[25.0, 0.0, -1.0]]), torch.tensor([0])
    naive = 1 - (torch.softmax(logits, 1)[0, 0] - torch.softmax(logits, 1)[0, 1]) ** 2
    assert float(naive) == 0.0
    assert float(softmax_gap(logits, y)) == pytest.approx(precise(logits[0], 0)[2], rel=1e-14)


rows = st.integers(2, 12).flatmap(
    lambda classes: st.tuples(
        arrays(np.float64, classes, elements=st.floats(-60, 60)),
        st.integers(0, classes - 1),
        arrays(np.float64, 5, elements=st.floats(-30, 30)),
    )
)


@given(rows)
def test_bounds_by_the_softmax_margin(row: tuple[np.ndarray, int, np.ndarray]) -> None:
    logits, y, x = torch.from_numpy(row[0])[None], torch.tensor([row[1]]), torch.from_numpy(row[2])[None]
    lack, gap = float(confidence_gap(logits)), float(softmax_gap(logits, y))
    slack = 1 + 1e-12
    assert gap / 2 <= lack * slack
    assert lack <= gap * slack
    if float(signed_margin(logits, y)) > 0:
        assert lack <= (1 - 1 / logits.shape[1]) * gap * slack
    assert float(printed_margin_bound(x, logits, y)) <= float(aceht(x, logits)) * slack
    assert float(aceht(x, logits)) <= float(margin_bound(x, logits, y)) * slack
    assert gap == pytest.approx(1 - float(softmax_margin(logits, y)) ** 2, abs=1e-14)


def test_two_classes_make_the_upper_bound_twice_aceht() -> None:
    logits, x = torch.randn(50, 2) * 20, torch.randn(50, 3, 2)
    y = torch.randint(0, 2, (50,))
    torch.testing.assert_close(margin_bound(x, logits, y), 2 * aceht(x, logits), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("logits", "y", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(3).long(), r"softmax_gap needs logits of shape \(samples, classes >= 2\)"),
        (torch.zeros(3), torch.zeros(3).long(), "softmax_gap needs logits of shape"),
        (torch.zeros(3, 2), torch.zeros(2).long(), "one integer class for each of the 3 rows"),
        (torch.zeros(3, 2), torch.zeros(3), "labels of shape .* and type float32"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "label 2 of sample 2 is outside the classes 0 to 1"),
        (torch.zeros(3, 2), torch.tensor([0, -1, 1]), "label -1 of sample 1 is outside"),
    ],
)
def test_bad_logits_are_named(logits: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        softmax_gap(logits, y)


@pytest.mark.parametrize("bound", [margin_bound, printed_margin_bound])
def test_bounds_need_one_input_per_row(bound) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        InputError, match=r"margin_bound needs one input per row of logits, got inputs of shape \(2, 5\)"
    ):
        bound(torch.zeros(2, 5), torch.zeros(3, 2), torch.zeros(3).long())


# ---------------------------------------------------------------- models


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )


def images(count: int = 11) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1, 6, 6), torch.randint(0, 4, (count,))


def test_margins_of_a_model_equal_those_of_its_logits(untouched) -> None:  # type: ignore[no-untyped-def]
    net, (x, y) = conv_net(), images()
    with untouched(net):
        found = margins(net, (x, y), batch_size=4)
    logits = net.eval()(x).detach()
    torch.testing.assert_close(found.signed, signed_margin(logits, y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.output, found.signed.abs())
    torch.testing.assert_close(found.softmax, softmax_margin(logits, y), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.softmax_gap, softmax_gap(logits, y), rtol=1e-5, atol=1e-6)
    assert torch.equal(found.correct, logits.argmax(1) == y)
    assert torch.equal(found.targets, y)
    assert found.distance is None
    assert "11 output margins" in str(found)


def test_a_tie_is_not_correct() -> None:
    net = nn.Linear(2, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    found = margins(net, (torch.ones(2, 2), torch.tensor([0, 1])), distance=2)
    assert not found.correct.any()
    assert found.distance is not None
    assert found.distance.tolist() == [0.0, 0.0]  # on the boundary, though the gradient is zero


def test_all_kinds_of_data_give_the_same_result_and_fingerprint() -> None:
    net, (x, y) = conv_net().double(), images()
    expected = margins(net, (x, y), distance=2)
    ragged = [(x[:1], y[:1]), (x[1:8], y[1:8]), (x[8:], y[8:])]
    for data in (TensorDataset(x, y), DataLoader(TensorDataset(x, y), batch_size=4), ragged, (x.numpy(), y.numpy())):
        for batch_size in (None, 1, 3):
            found = margins(net, data, distance=2, batch_size=batch_size)
            assert found.fingerprint == expected.fingerprint
            torch.testing.assert_close(found.signed, expected.signed)
            torch.testing.assert_close(found.distance, expected.distance)
            assert found.spread == pytest.approx(expected.spread, rel=1e-12)
    swapped = torch.arange(11).roll(1)
    assert margins(net, (x[swapped], y[swapped])).fingerprint != expected.fingerprint


def test_frozen_half_precision_and_training_models_are_measured(untouched) -> None:  # type: ignore[no-untyped-def]
    net, (x, y) = conv_net().requires_grad_(False).train(), images()
    with untouched(net):
        found = margins(net, (x, y), distance=2, layer="2")
    half = conv_net().to(torch.bfloat16)
    half.load_state_dict(net.state_dict())
    with untouched(half):
        coarse = margins(half, (x, y), distance=2, layer="2")
    torch.testing.assert_close(coarse.signed, found.signed, rtol=0.05, atol=0.05)


def test_plain_margins_build_no_graph() -> None:
    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            assert not output.requires_grad
            return output

    margins(Spy(3, 2), (torch.randn(5, 3), torch.zeros(5).long()))


def test_batch_statistics_use_whole_batches() -> None:
    net, (x, y) = conv_net(), images()
    found = margins(net, [(x, y)], batch_norm="batch")
    torch.testing.assert_close(found.signed, signed_margin(net.train()(x), y), rtol=1e-5, atol=1e-6)


def test_single_logit_models_are_two_classes() -> None:
    net = nn.Linear(3, 1)
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    logit = net(x)[:, 0].detach().double()
    for targets in (y, y.bool(), y.to(torch.uint8), y.float(), y.float()[:, None]):
        found = margins(net, (x, targets), loss="binary_cross_entropy", distance=2)
        torch.testing.assert_close(found.signed, logit * (2 * y - 1))
        torch.testing.assert_close(found.softmax, (2 * torch.sigmoid(logit) - 1).abs(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.softmax_gap, 4 * torch.sigmoid(logit) * torch.sigmoid(-logit))
        torch.testing.assert_close(found.distance, found.signed / net.weight.detach().double().norm())
        assert torch.equal(found.targets, y)
    signs = margins(net, (x, 2 * y - 1), loss="exponential")
    torch.testing.assert_close(signs.signed, found.signed)


def test_results_survive_json() -> None:
    net, data = conv_net(), images()
    found = margins(net, data, distance="inf", layer="0")
    again = Margins.from_json(found.to_json())
    assert torch.equal(again.distance, found.distance)
    assert (again.norm, again.layer, again.spread, again.fingerprint) == ("inf", "0", found.spread, found.fingerprint)
    assert "at layer '0' (inf-norm)" in str(again)


# ---------------------------------------------------------------- distance


@pytest.mark.parametrize("distance", [2, "2", "inf", math.inf])
def test_distance_of_a_linear_classifier_is_exact(distance: int | float | str) -> None:
    net = nn.Linear(5, 4).double()
    x, y = torch.randn(30, 5).double(), torch.randint(0, 4, (30,))
    found = margins(net, (x, y), distance=distance, batch_size=7)
    dual = 2 if float(distance) == 2 else 1
    expected = []
    for row, label in zip(x, y.tolist(), strict=True):
        scores = []
        for other in range(4):
            if other != label:
                normal = net.weight[label] - net.weight[other]
                scores.append(((normal @ row) + net.bias[label] - net.bias[other]) / normal.norm(dual))
        expected.append(min(scores).detach())
    torch.testing.assert_close(found.distance, torch.stack(expected), rtol=1e-12, atol=1e-13)
    assert found.norm == ("2" if dual == 2 else "inf")
    assert torch.equal(found.distance > 0, found.correct)


def test_moving_by_the_distance_reaches_the_boundary() -> None:
    net = nn.Linear(5, 3).double()
    x = torch.randn(10, 5).double()
    y = net(x).argmax(1)
    for distance in (2, "inf"):
        found = margins(net, (x, y), distance=distance)
        directions = net.weight.detach()[y][:, None] - net.weight.detach()[None]
        if distance == 2:
            unit = directions / directions.norm(dim=2, keepdim=True).clamp_min(1e-300)
        else:
            unit = directions.sign()
        moved = x[:, None] - found.distance[:, None, None] * unit
        logits = net(moved.reshape(30, 5)).reshape(10, 3, 3)
        reached = torch.stack([signed_margin(logits[:, j], y) for j in range(3)], 1)
        reached[torch.arange(10), y] = math.inf
        torch.testing.assert_close(reached.amin(1), torch.zeros(10).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [None, "0", "2", "4", "5"])
@pytest.mark.parametrize("distance", [2, "inf"])
def test_distance_against_one_sample_at_a_time(layer: str | None, distance: int | str, untouched) -> None:  # type: ignore[no-untyped-def]
    net, (x, y) = conv_net().double().eval(), images(7)
    x = x.double()
    with untouched(net):
        found = margins(net, (x, y), distance=distance, layer=layer, batch_size=3)
    cut = 0 if layer is None else int(layer) + 1
    points, tail = net[:cut](x).detach(), net[cut:]
    expected = []
    for point, label in zip(points, y.tolist(), strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda p: tail(p[None])[0], point).reshape(4, -1)
        phi = tail(point[None])[0].detach()
        norms = (jacobian[label] - jacobian).norm(2 if distance == 2 else 1, dim=1)
        expected.append(min(float((phi[label] - phi[j]) / norms[j]) for j in range(4) if j != label))
    torch.testing.assert_close(found.distance, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert found.spread == pytest.approx(float(points.flatten(1).var(0, unbiased=False).sum().sqrt()), rel=1e-12)


def test_the_minimum_is_over_all_classes_not_the_runner_up() -> None:
    net = nn.Linear(2, 3, bias=False).double()
    net.weight.data = torch.tensor([[1.0, 0.0], [0.9, 0.0], [-20.0, 0.0]]).double()
    found = margins(net, (torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0])), distance=2)
    assert float(found.signed) == pytest.approx(0.1)
    assert float(found.distance) == pytest.approx(1.0)  # 0.1/0.1 and 21/21: equal here, though 21 > 0.1
    net.weight.data[2, 1] = 50.0
    found = margins(net, (torch.tensor([[1.0, 0.1]]).double(), torch.tensor([0])), distance=2)
    assert float(found.distance) == pytest.approx(16 / math.hypot(21, 50))  # not the runner-up's 1


def test_flat_regions_are_infinitely_far_with_the_sign() -> None:
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    net[0].weight.data.fill_(1.0)
    net[0].bias.data.fill_(-10.0)  # dead units: the outputs are the last bias
    net[2].bias.data = torch.tensor([1.0, 0.0])
    found = margins(net, (torch.zeros(2, 1), torch.tensor([0, 1])), distance=2)
    assert found.distance is not None
    assert found.distance.tolist() == [math.inf, -math.inf]


def test_distance_over_several_inputs_and_in_place_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.a, self.b = nn.LeakyReLU(0.5, inplace=True), nn.Linear(2, 2), nn.Linear(3, 2)

        def forward(self, left: Tensor, right: Tensor, index: Tensor) -> Tensor:
            return self.a(self.act(left)) + self.b(right) + index[:, None]

    net = Two().double()
    left, right, index = torch.rand(4, 2).double(), torch.rand(4, 3).double(), torch.arange(4)
    y = torch.tensor([0, 1, 0, 1])
    normal = torch.cat([net.a.weight[0] - net.a.weight[1], net.b.weight[0] - net.b.weight[1]]).detach()
    for distance, dual in ((2, 2), ("inf", 1)):
        found = margins(net, ({"left": left, "right": right, "index": index}, y), distance=distance)
        torch.testing.assert_close(found.distance, found.signed / normal.norm(dual))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unused, self.twice = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.twice(self.twice(self.embed(tokens))))
        return self.head(hidden.mean(1))


def test_distance_of_token_models_is_at_a_layer(untouched) -> None:  # type: ignore[no-untyped-def]
    net, data = Tokens(), (torch.randint(0, 7, (5, 6)), torch.randint(0, 3, (5,)))
    with untouched(net):
        found = margins(net, data, distance=2, layer="embed")
        logits = margins(net, data, distance=2, layer="head")
    assert found.layer == "embed"
    assert found.distance is not None
    assert torch.isfinite(found.distance).all()
    assert logits.distance is not None
    torch.testing.assert_close(logits.distance, logits.signed / math.sqrt(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"distance": 2},
            r"got int64; `sl.margins\(model, data, distance=2, layer='embed'\)` measures it at the output of a layer",
        ),
        ({"distance": 2, "layer": "embd"}, "unknown layer 'embd': did you mean 'embed'?"),
        ({"distance": 2, "layer": ""}, "unknown layer ''"),
        ({"layer": "embed"}, "pass distance=2 or distance='inf' as well"),
        ({"distance": 3}, "unknown distance norm '3'"),
        ({"distance": 2, "layer": "unused"}, "layer 'unused' needs a module that runs once .* it ran 0 times"),
        ({"distance": 2, "layer": "twice"}, "it ran 2 times for 5 samples; name another layer"),
        ({"distance": 2, "layer": "lstm"}, "layer 'lstm' must return a floating-point tensor .* got tuple"),
        ({"distance": 2, "batch_norm": "batch"}, "has no distance of its own; use batch_norm='eval'"),
        ({"batch_norm": "train"}, "unknown batch_norm mode 'train'"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"loss": "binary_cross_entropy"}, "binary_cross_entropy needs one logit per sample"),
    ],
)
def test_bad_arguments_are_named(options: dict, message: str, untouched) -> None:  # type: ignore[no-untyped-def, type-arg]
    net, data = Tokens(), (torch.randint(0, 7, (5, 6)), torch.randint(0, 3, (5,)))
    with untouched(net), pytest.raises(InputError, match=message):
        margins(net, data, **options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.randn(3, 2), torch.tensor([0, 1, 5]), "target 5 .* outside the model's 3 classes"),
        (torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.tensor([0, 1]), "input of sample 1 is NaN or infinite"),
        (torch.zeros(0, 2), torch.zeros(0).long(), "the data are empty"),
        (torch.zeros(3, 2), torch.zeros(3), "one integer class per sample"),
    ],
)
def test_bad_data_are_named(x: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        margins(nn.Linear(2, 3), (x, y), batch_size=1)


def test_margins_need_classes_an_order_and_finite_gradients() -> None:
    x = torch.randn(3, 2)
    with pytest.raises(InputError, match="a regression has no margins"):
        margins(nn.Linear(2, 3), (x, torch.zeros(3, 3)), loss="squared_error")
    net, set_of_pairs = nn.Linear(2, 3), TensorDataset(x, torch.zeros(3).long())
    shuffled = margins(net, DataLoader(set_of_pairs, shuffle=True))
    assert torch.equal(shuffled.signed, margins(net, set_of_pairs).signed)
    assert "the data loader shuffles" in shuffled.notes[0]

    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.abs().sqrt())

    with pytest.raises(InputError, match="the gradient of the outputs is NaN or infinite for sample 1"):
        margins(Root(2, 3), (torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.zeros(2).long()), distance=2)


def test_default_batches_shrink_with_the_samples() -> None:
    seen: list[int] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x[:, :4])

    margins(Spy(4, 2), (torch.randn(600, 4), torch.zeros(600).long()))
    assert [size for size in seen if size > 5] == [512, 88]  # a few samples are looked at by themselves
    seen.clear()
    margins(Spy(4, 2), (torch.randn(3, 1).expand(3, 2**21), torch.zeros(3).long()))
    assert (max(seen), seen[-1]) == (2, 1)


# ---------------------------------------------------------------- what once gave a margin that means nothing


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.head(y - y.mean(0))


@pytest.mark.parametrize(
    "net",
    [
        Centred(),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
    ],
)
@pytest.mark.parametrize("distance", [None, 2])
def test_outputs_that_depend_on_other_samples_have_no_margins(net: nn.Module, distance: int | None) -> None:
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        margins(net, (torch.randn(6, 3), torch.zeros(6).long()), distance=distance)
    assert len(margins(net, (torch.randn(6, 3), torch.zeros(6).long()), batch_norm="batch").signed) == 6


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.flatten(1).square().sum(1)


@pytest.mark.parametrize(
    ("net", "targets", "loss", "message"),
    [
        (
            nn.Linear(3, 1),
            torch.tensor([-1.0, 1, 1, -1, -2.5, 0]),
            "squared_error",
            "got -2.5 for sample 4; a regression",
        ),
        (
            nn.Linear(3, 1),
            torch.tensor([1, 1, 1, 0, 1, 1]),
            "squared_error",
            "need labels -1 and 1, got 0 for sample 3: predictions of 0 and 1 are told apart at 1/2",
        ),
        (
            nn.Linear(3, 3),
            torch.tensor([0, 1, 2, 0, 7, 1]),
            square,
            "target 7 of sample 4 is outside the model's 3 classes 0 to 2",
        ),
        (nn.Linear(3, 3), torch.tensor([0, 1, 2, 0, -100, 1]), square, "target -100 of sample 4 is outside"),
        (nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3))), torch.zeros(6).long(), square, r"got \(2, 2, 3\)"),
    ],
)
def test_what_is_not_a_class_is_refused(net: nn.Module, targets: Tensor, loss: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        margins(net, (torch.randn(6, 3), targets), loss=loss, batch_size=2)


def test_a_batch_size_of_numpy_is_a_number() -> None:
    data = torch.randn(6, 3), torch.zeros(6).long()
    assert len(margins(nn.Linear(3, 2), data, batch_size=np.int64(4)).signed) == 6  # type: ignore[arg-type]


def test_checkpoints_change_no_distance() -> None:
    class Recomputing(nn.Module):
        def __init__(self, checkpoints: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.checkpoints = nn.Linear(4, 5), nn.Linear(5, 3), checkpoints

        def forward(self, x: Tensor) -> Tensor:
            hidden = (lambda x: self.first(x).relu()) if not self.checkpoints else self.recomputed
            return self.last(hidden(x))

        def recomputed(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)

    data = torch.randn(6, 4), torch.arange(6) % 3
    found, wanted = (margins(Recomputing(flag), data, distance=2).distance for flag in (True, False))
    torch.testing.assert_close(found, wanted)


def test_distances_need_gradients_that_are_derivatives() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: 2 * gradient)
            return self.last(hidden)

    data = torch.randn(6, 4), torch.arange(6) % 3
    margins(Hooked(), data)
    with pytest.raises(InputError, match="not the derivative of its forward pass"):
        margins(Hooked(), data, distance=2)


def test_a_distance_is_refused_where_the_gradient_by_the_inputs_is_none() -> None:
    """A hook in front of the first layer changes no derivative by a parameter, and doubled every distance."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = 1 * x
            if x.requires_grad:
                x.register_hook(lambda grad: grad / 2)
            return self.head(x)

    data = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    with pytest.raises(InputError, match=r"gradient with respect to the inputs.*, or leave out distance="):
        margins(Hooked(), data, distance=2)
    with pytest.raises(InputError, match=r"gradient with respect to the inputs.*measure the model without that\.$"):
        sl.input_curvature(Hooked(), data)
    margins(Hooked(), data)  # without a distance there is nothing to differentiate


def test_distances_of_a_model_without_a_backward_pass_are_refused_in_a_sentence() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x.clone()
            hidden[:, 0].tanh_()
            hidden.t()[-1].sub_(hidden[:, 0])
            hidden[:, 0].add_(1)
            return self.last(hidden)

    with pytest.raises(InputError, match="cannot be differentiated with respect to the inputs: one of the variables"):
        margins(Overwrites(), (torch.randn(6, 4), torch.arange(6) % 3), distance=2)


# ---------------------------------------------------------------- points of single positions


class Tagger(nn.Module):
    """Classes at every position of a sequence from what came before it."""

    def __init__(self, last: int = -1) -> None:
        super().__init__()
        self.body, self.head, self.last = nn.Linear(3, 5), nn.Linear(5, 4), last

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x).cumsum(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x)).movedim(-1, self.last)


class Segmenter(nn.Module):
    """Classes at every pixel; as many channels as an image is high and wide, so that shapes alone say nothing."""

    def __init__(self, kernel: int = 1) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 3, kernel, padding=kernel // 2)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def tagged(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tags = torch.randint(-1, 4, (count, length), generator=generator)
    tags[:, 0] = 1
    return torch.randn(count, length, 3, generator=generator, dtype=torch.float64), tags.masked_fill(tags < 0, -100)


def segmented(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 2, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (count, 4, 4), generator=generator)


def as_rows(model: Tagger | Segmenter, batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A twin: the last layer behind an identity, on what it reads at every position that counts, without sequences."""
    rows, labels = [], []
    for x, y in batches:
        hidden = model.hidden(x).detach()
        rows.append((hidden if isinstance(model, Tagger) else hidden.movedim(1, -1))[y != -100])
        labels.append(y[y != -100])
    head = nn.Linear(rows[0].shape[1], model.head.weight.shape[0]).double()
    identity = nn.Linear(rows[0].shape[1], rows[0].shape[1], bias=False).double()
    with torch.no_grad():
        head.weight.copy_(model.head.weight.reshape(head.weight.shape))
        head.bias.copy_(model.head.bias)
        nn.init.eye_(identity.weight)
    return nn.Sequential(identity, head), (torch.cat(rows), torch.cat(labels))


POSITIONS: dict[str, tuple[Tagger | Segmenter, list[tuple[Tensor, Tensor]], str]] = {
    "sequences": (Tagger(), [tagged(6, 7, 0)], "token_cross_entropy"),
    "ragged sequences": (Tagger(), [tagged(6, 4, 0), tagged(5, 9, 1)], "token_cross_entropy"),
    "classes first": (Tagger(1), [tagged(6, 7, 0)], "cross_entropy"),
    "images": (Segmenter(), [segmented(5)], "cross_entropy"),
}


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("name", POSITIONS)
def test_points_of_positions_are_those_without_their_sequences(name: str, size: int | None) -> None:
    """Their spread was that of whole sequences, padding included, and NaN where sequences differ in length."""
    model, batches, loss = POSITIONS[name]
    model = model.double()
    twin, rows = as_rows(model, batches)
    wanted = margins(twin, rows, distance=2, layer="0")
    setting = Setting(model, batches, loss=loss, unit="token", batch_size=size)
    found = setting.hidden
    assert len(found) == len(wanted)
    torch.testing.assert_close(found.distance, wanted.distance, rtol=1e-10, atol=1e-12)
    centred = rows[0] - rows[0].mean(0)
    assert found.spread == pytest.approx(math.sqrt(float(centred.square().sum(1).mean())), rel=1e-12)
    assert found.spread == pytest.approx(wanted.spread, rel=1e-12)
    for measure in ("hidden_margin_median", "hidden_margin_q1", "hidden_margin_high_fence", "variance_margin"):
        value = MEASURES[measure].attempt(setting)
        assert float(value) == pytest.approx(MEASURES[measure](twin, rows).value, rel=1e-9), measure


def test_padding_has_no_say_in_the_spread_of_positions() -> None:
    model = Tagger().double()
    x, y = tagged(6, 7, 0)
    padded = torch.cat([x, 100 * torch.ones(6, 4, 3).double()], 1), torch.cat([y, torch.full((6, 4), -100)], 1)
    for name in ("hidden_margin_median", "variance_margin"):
        found = [
            MEASURES[name](model, data, loss="token_cross_entropy", unit="token").value for data in ((x, y), padded)
        ]
        assert found[0] == pytest.approx(found[1], rel=1e-10)


def test_positions_that_read_each_other_have_no_spread() -> None:
    before = margins(
        Tagger().double(), tagged(6, 7, 0), loss="token_cross_entropy", unit="token", distance=2, layer="body"
    )
    assert math.isnan(before.spread)
    assert before.distance is not None
    assert bool(before.distance.isfinite().all())
    wide = Segmenter(kernel=3).double()
    for name in ("hidden_margin_median", "variance_margin"):
        with pytest.raises(InputError, match="the outputs at a position read other places of the last layer's input"):
            MEASURES[name](wide, segmented(5), unit="token")


def test_hidden_margins_need_one_space_and_some_spread() -> None:
    whole = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), Mean()).double()
    batches = [(torch.randn(6, 2, size, size).double(), torch.arange(6) % 3) for size in (5, 7)]
    for name in ("hidden_margin_median", "variance_margin"):
        with pytest.raises(InputError, match="the inputs of the last layer differ in shape from sample to sample"):
            MEASURES[name](whole, batches)
    x, y = batches[0]
    with pytest.raises(InputError, match="all samples are the same to the last layer"):
        MEASURES["hidden_margin_median"](whole, (x[:1].expand_as(x), y))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))
