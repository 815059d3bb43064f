"""What is looked at before a language model is measured is a part of it: few rows, few positions, parts of sequences.

The parts must show the faults that the whole would, and leave every number as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.binding import last_layer, tables
from spiritlevel.binding import problem as problems
from spiritlevel.binding.losses import CausalLM, TokenCrossEntropy
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.tables import few_rows
from spiritlevel.errors import InputError
from spiritlevel.operators import averaging
from spiritlevel.watching import derivatives

WORDS, LENGTH, WIDTH = 40, 16, 4


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].clone()


class LM(nn.Module):
    """A small language model, of some kind: right, or with a fault."""

    def __init__(self, kind: str = "right") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.kind = kind
        padding, by_frequency = 3 if kind == "padding" else None, kind == "by frequency"
        self.embed = nn.Embedding(WORDS, WIDTH, padding, scale_grad_by_freq=by_frequency)
        self.mix, self.inner = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.kind == "normed":
            x = F.normalize(self.embed.weight)[input_ids]
        query, key, value = self.mix(x).chunk(3, -1)
        x = x + (query @ key.mT).softmax(-1) @ value
        if self.kind == "reversed":
            x = Reversed.apply(x)  # type: ignore[no-untyped-call]
        if self.kind == "detached late":  # behind the part of which second derivatives are looked at
            x = torch.cat([x[:, : LENGTH // 2], x[:, LENGTH // 2 :].detach()], 1)
        return self.head(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 1)
    monkeypatch.setattr(problems, "FEW_OUTPUTS", 5)
    monkeypatch.setattr(problems, "FEW_POSITIONS", 3)
    monkeypatch.setattr(tables, "LARGE_TABLE", 1)
    monkeypatch.setattr(derivatives, "_LONG", LENGTH)


def tokens(count: int = 2) -> Tensor:
    ids = torch.randint(0, WORDS // 2, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, 1:3] = 3, 7  # a word that is padding, and one that comes twice
    return ids


def bound(kind: str) -> Problem:
    found = Problem(LM(kind).double(), loss="causal_lm")
    with found.active():
        last_layer.find_head(found, tokens(), tokens())
        assert found.facts["head"]
    return found


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton", "empirical_fisher"])
@pytest.mark.parametrize("fault", ["by frequency", "reversed", "detached late"])
def test_faults_are_seen(fault: str, kind: str) -> None:
    with pytest.raises(InputError, match="is not the derivative of its forward pass"):
        getattr(sl, kind)(LM(fault), (tokens(), tokens()), loss="causal_lm")


@pytest.mark.parametrize("kind", ["right", "bias", "tied", "padding", "normed"])
def test_products_are_those_of_autodiff(kind: str) -> None:
    model, ids = LM(kind).double(), tokens()
    vector = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found = sl.hessian(model, (ids, ids), loss="causal_lm") @ vector
    params = list(model.parameters())
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    along = torch.cat([slope.reshape(-1) for slope in slopes]) @ vector
    expected = torch.cat([part.reshape(-1) for part in torch.autograd.grad(along, params)])
    if kind == "padding":  # that row is no parameter
        row = slice(3 * WIDTH, 4 * WIDTH)
        assert not expected[row].any()
        assert not found[row].any()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["right", "bias", "tied", "padding"])
def test_rows_that_are_read_have_the_derivatives_of_the_whole(kind: str) -> None:
    whole, ids = bound(kind), tokens()
    with whole.active():
        thin, _ = whole.thinned(ids)
        small = few_rows(thin, ids)
        read = {name: len(tensor) for name, tensor in small.params.items() if len(tensor) < len(whole.params[name])}
        words = len(ids.unique())
        assert set(read) == ({"embed.weight"} if kind == "tied" else {"embed.weight", "head.weight"})
        assert read["embed.weight"] <= words + 5 < WORDS
        slopes = []
        for each in (thin, small):
            point = {name: tensor.detach().requires_grad_() for name, tensor in each.params.items()}
            outputs = each.outputs(point, ids)
            total = (outputs * torch.arange(outputs.numel()).reshape(outputs.shape)).sum()
            slopes.append(dict(zip(point, torch.autograd.grad(total, list(point.values())), strict=True)))
    for name, slope in slopes[0].items():
        rows = slope.reshape(len(slope), -1).any(1) if name in read else torch.ones(len(slope), dtype=torch.bool)
        few = slopes[1][name]
        some = few[few.reshape(len(few), -1).any(1)] if name in read else few
        torch.testing.assert_close(some, slope[rows])


def test_a_table_that_is_read_in_another_way_keeps_its_rows() -> None:
    whole, ids = bound("normed"), tokens()
    with whole.active():
        small = few_rows(whole.thinned(ids)[0], ids)
    assert len(small.params["embed.weight"]) == WORDS
    assert len(small.params["head.weight"]) == 5


def test_other_words_than_those_looked_up_are_refused() -> None:
    whole, ids = bound("right"), tokens()
    with whole.active():
        small = few_rows(whole.thinned(ids)[0], ids)
        with pytest.raises(RuntimeError, match="other rows"):
            small.outputs(small.params, torch.full_like(ids, WORDS - 1))


def test_few_positions_are_left_and_the_last_is_among_them() -> None:
    targets = torch.arange(24).reshape(2, 12)
    targets[0, 5:], targets[1, 11] = -100, -100
    found = TokenCrossEntropy().at_few(targets, 3)
    assert [row[row != -100].tolist() for row in found] == [[0, 2, 4], [14, 18, 22]]
    shifted = CausalLM().at_few(targets, 30)
    assert shifted[0, 0] == -100
    assert torch.equal(shifted[:, 1:], targets[:, 1:])
    soft = torch.rand(2, 5, 3)
    assert TokenCrossEntropy().at_few(soft, 1) is soft


def test_several_vectors_after_one_are_tried_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Any) -> Any:
        return lambda *parts: [2 * result for result in real(function)(*parts)]

    real = averaging.vmap
    model, ids = LM().double(), tokens()
    expected = sl.hessian(model, (ids, ids), loss="causal_lm").dense()
    monkeypatch.setattr(averaging, "vmap", wrong)
    matrix = sl.hessian(model, (ids, ids), loss="causal_lm")
    eye = torch.eye(len(expected), dtype=torch.float64)
    torch.testing.assert_close(matrix @ eye[:, 0], expected[:, 0])
    torch.testing.assert_close(matrix @ eye[:, :3], expected[:, :3])
