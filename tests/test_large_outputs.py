"""Outputs in pieces: the same numbers as whole ones, and no more than one tensor of tokens × vocabulary at any time."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.binding import last_layer
from spiritlevel.binding.losses import CausalLM, TokenCrossEntropy, heads, in_pieces
from spiritlevel.watching.watchers import DispatchWatch, tensors_in

WORDS, LENGTH, WIDTH = 13, 6, 4


class TinyLM(nn.Module):
    """Embedding, attention with a causal mask, an MLP, a norm and a head of some kind."""

    def __init__(self, head: str = "linear", words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = head
        self.embed, self.mix = nn.Embedding(words, width), nn.Linear(width, 3 * width)
        self.inner, self.outer, self.norm = nn.Linear(width, 6), nn.Linear(6, width), nn.LayerNorm(width)
        if head not in ("tied", "matmul"):
            self.head = nn.Linear(width, words, bias=head == "bias")

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        query, key, value = self.mix(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm(x + self.outer(F.gelu(self.inner(x))))
        if self.kind == "tied":
            return F.linear(x, self.embed.weight)
        if self.kind == "matmul":
            return x @ self.embed.weight.T
        logits = self.head(x)
        if self.kind == "scaled":
            return logits / 2
        if self.kind == "in place":
            return logits.mul_(2)
        return {"logits": logits, "hidden": x} if self.kind == "dict" else logits


def tiny(kind: str, **sizes: int) -> nn.Module:
    torch.manual_seed(3)
    model = TinyLM(kind, **sizes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model


def tokens(count: int = 3, words: int = WORDS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(5)
    ids = torch.randint(0, words, (count, length), generator=source)
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these outputs were large: two rows of logits are a piece."""
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 1)
    monkeypatch.setattr(heads, "PIECE", 2 * WORDS)


def logits_of(model: nn.Module, params: dict[str, Tensor], ids: Tensor) -> Tensor:
    found = functional_call(model, params, (ids,))
    return found["logits"] if isinstance(found, dict) else found


def sample_losses(model: nn.Module, loss: Any, params: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
    """Each sequence's mean over its tokens that count, by torch's own cross entropy."""
    logits = logits_of(model, params, ids)
    if loss.shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        weight=loss.weight,
        label_smoothing=loss.label_smoothing,
        reduction="none",
    ).reshape(labels.shape)
    return each.sum(1) / (labels != -100).sum(1)


def reference(kind: str, model: nn.Module, loss: Any, data: tuple[Tensor, Tensor], v: dict[str, Tensor]) -> Tensor:
    """The product with v by autodiff of whole outputs."""
    params, (ids, labels) = {name: p.detach() for name, p in model.named_parameters()}, data

    def mean(point: dict[str, Tensor]) -> Tensor:
        return sample_losses(model, loss, point, ids, labels).mean()

    if kind == "hessian":
        found = jvp(grad(mean), (params,), (v,))[1]
    elif kind == "empirical_fisher":

        def own(point: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return sample_losses(model, loss, point, x[None], y[None])[0]

        each = vmap(grad(own), (None, 0, 0))(params, ids, labels)
        along = sum((each[name] * v[name]).flatten(1).sum(1) for name in v)
        found = {name: torch.einsum("n,n...->...", along, each[name]) / len(ids) for name in v}  # type: ignore[arg-type]
    else:

        def network(point: dict[str, Tensor]) -> Tensor:
            return logits_of(model, point, ids)

        logits, pull, *_ = vjp(network, params)
        moved = jvp(network, (params,), (v,))[1]

        def bent(point: Tensor) -> Tensor:
            twin = _Given(point)
            return sample_losses(twin, loss, {}, ids, labels).mean()

        found = pull(jvp(grad(bent), (logits,), (moved,))[1])[0]
    return torch.cat([found[name].reshape(-1) for name in v])


class _Given(nn.Module):
    """A model whose outputs are given."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, ids: Tensor) -> Tensor:
        return self.outputs


MATRICES = ("hessian", "gauss_newton", "empirical_fisher")


def agrees(kind: str, model: nn.Module, loss: Any, data: tuple[Tensor, Tensor], **options: Any) -> Any:
    operator = getattr(sl, kind)(model, data, loss=loss, **options)
    source = torch.Generator().manual_seed(9)
    block = torch.randn(operator.size, 2, dtype=torch.float64, generator=source)
    wanted = torch.stack([reference(kind, model, loss, data, operator.split(column)) for column in block.T], 1)
    torch.testing.assert_close(operator @ block, wanted, rtol=1e-10, atol=1e-12 * float(wanted.abs().max()))
    return operator


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("head", ["linear", "bias", "tied", "matmul", "dict"])
def test_products_in_pieces_are_those_of_autodiff(kind: str, head: str, pieces: list[str]) -> None:
    agrees(kind, tiny(head), CausalLM(), tokens())
    assert pieces  # and they were taken in pieces


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", MATRICES)
def test_smoothing_and_weights_of_classes(kind: str, pieces: list[str]) -> None:
    weight = 0.5 + torch.rand(WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    agrees(kind, tiny("bias"), TokenCrossEntropy(weight, 0.2), tokens())
    assert pieces


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of sums that were taken in pieces."""
    seen, original = list[str](), in_pieces.HeadLoss._call

    def noted(self: Any, kind: str, *args: Any) -> Any:
        seen.append(kind)
        return original(self, kind, *args)

    monkeypatch.setattr(in_pieces.HeadLoss, "_call", noted)
    return seen


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("params", ["mix", "head", "embed*"])
def test_some_parameters_alone(kind: str, params: str, pieces: list[str]) -> None:
    model, data = tiny("bias"), tokens()
    some, every = (getattr(sl, kind)(model, data, loss="causal_lm", params=p) for p in (params, None))
    v = torch.randn(some.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in every.shapes.items()}
    whole |= some.split(v)
    wanted = every.split(every @ torch.cat([part.reshape(-1) for part in whole.values()]))
    torch.testing.assert_close(some @ v, torch.cat([wanted[name].reshape(-1) for name in some.names]))
    assert pieces


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", MATRICES)
def test_tokens_as_samples(kind: str, pieces: list[str]) -> None:
    """Every token of the data counts the same: the mean over sequences weighted by their tokens."""
    model, (ids, labels) = tiny("tied"), tokens()
    operator = getattr(sl, kind)(model, (ids, labels), loss="causal_lm", unit="token")
    v = torch.randn(operator.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counted = labels[:, 1:] != -100
    if kind == "empirical_fisher":
        each = []
        for n, t in counted.nonzero().tolist():
            one = torch.full_like(labels[n : n + 1], -100)
            one[0, t + 1] = labels[n, t + 1]
            each.append((1, reference(kind, model, CausalLM(), (ids[n : n + 1], one), operator.split(v))))
    else:
        each = [
            (
                int(counted[n].sum()),
                reference(kind, model, CausalLM(), (ids[n : n + 1], labels[n : n + 1]), operator.split(v)),
            )
            for n in range(len(ids))
        ]
    wanted = sum(weight * product for weight, product in each) / sum(weight for weight, _ in each)
    torch.testing.assert_close(operator @ v, wanted, rtol=1e-10, atol=1e-12)
    assert pieces


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("kind", MATRICES)
def test_many_classes_without_positions(kind: str, pieces: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, WORDS)).double()
    data = torch.randn(7, 5, dtype=torch.float64), torch.arange(7)
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found = getattr(sl, kind)(model, data, loss=nn.CrossEntropyLoss(label_smoothing=0.1)) @ v
    assert pieces
    last_layer.LARGE_OUTPUTS = 2**20  # undone by the fixture
    torch.testing.assert_close(found, getattr(sl, kind)(model, data, loss=nn.CrossEntropyLoss(label_smoothing=0.1)) @ v)


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("unit", ["sample", "token"])
def test_margins_in_pieces(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny("bias"), tokens()
    found = sl.margins(model, data, loss="causal_lm", unit=unit)
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 2**20)
    wanted = sl.margins(model, data, loss="causal_lm", unit=unit)
    for name in ("output", "signed", "softmax", "correct", "targets"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("head", ["scaled", "in place"])
def test_outputs_that_are_changed_after_the_layer_are_held_whole_and_it_is_said(head: str, pieces: list[str]) -> None:
    operator = agrees("hessian", tiny(head), CausalLM(), tokens())
    assert not pieces
    assert "held whole" in operator.notes[-1]
    assert "do not come straight from a linear layer" in operator.notes[-1]
    assert "held whole" in sl.margins(tiny(head), tokens(), loss="causal_lm").notes[-1]


@pytest.mark.usefixtures("in_small_pieces")
def test_a_layer_that_turns_up_in_some_batches_only(pieces: list[str]) -> None:
    """Which call makes the outputs may differ between batches; each pass looks whether it is the one that was seen."""

    class Fickle(TinyLM):
        def forward(self, input_ids: Tensor) -> Any:
            logits = super().forward(input_ids)
            return logits if input_ids.shape[1] < LENGTH else logits * 3

    torch.manual_seed(3)
    model = Fickle("bias").double()
    short, long = tokens(length=LENGTH - 1), tokens()
    both = sl.hessian(model, [short, long], loss="causal_lm")
    v = torch.randn(both.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = sum(reference("hessian", model, CausalLM(), data, both.split(v)) for data in (short, long)) / 2
    torch.testing.assert_close(both @ v, wanted, rtol=1e-10, atol=1e-12)
    assert pieces


PROBED: list[dict[str, Any]] = [{}, {"unit": "token", "probes": 16}, {"params": "mix"}]


@pytest.mark.parametrize(
    ("head", "options"),  # only the first has parameters of its own
    [*itertools.product(("bias", "tied", "matmul"), PROBED), ("bias", {"params": "head"})],
)
def test_probed_traces_in_pieces(head: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same probes give the same numbers as whole outputs, whose traces are compared with dense ones elsewhere."""
    model, data = tiny(head), tokens()
    wanted = sl.sample_traces(model, data, loss="causal_lm", method="hutchinson", **options)
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 1)
    monkeypatch.setattr(heads, "PIECE", 2 * WORDS)
    pieces, original = list[Any](), in_pieces.HeadLoss.forms

    def noted(self: Any, *args: Any) -> Any:
        pieces.append(args)
        return original(self, *args)

    monkeypatch.setattr(in_pieces.HeadLoss, "forms", noted)
    found = sl.sample_traces(model, data, loss="causal_lm", method="hutchinson", **options)
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.stderr, wanted.stderr, rtol=1e-7, atol=1e-12)
    assert bool(pieces) == (options.get("params") != "head")  # then nothing before the layer moves


@pytest.mark.usefixtures("in_small_pieces")
def test_sampled_factors_of_large_outputs_are_what_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, WORDS)).double()
    found = sl.sample_traces(model, tokens(), loss="causal_lm", passes=2)
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 2**20)
    wanted = sl.sample_traces(model, tokens(), loss="causal_lm", passes=2)
    torch.testing.assert_close(found.values, wanted.values)
    torch.testing.assert_close(found.stderr, wanted.stderr)


@pytest.mark.integrations
@pytest.mark.usefixtures("in_small_pieces")
@pytest.mark.parametrize("family", ["GPTNeoX", "GPT2", "Llama"])
def test_language_models_of_transformers(family: str, pieces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = getattr(transformers, f"{family}Config")(vocab_size=WORDS, max_position_embeddings=16, **sizes)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    ids, labels = tokens()
    batches = [{"input_ids": ids, "labels": labels}]
    for kind in MATRICES:
        pieces.clear()
        found = getattr(sl, kind)(model.double().eval(), batches, loss="causal_lm")
        v = torch.randn(found.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        product = found @ v
        assert pieces
        with monkeypatch.context() as undone:
            undone.setattr(last_layer, "LARGE_OUTPUTS", 2**20)
            whole = getattr(sl, kind)(model, batches, loss="causal_lm")
        torch.testing.assert_close(product, whole @ v)


# ---------------------------------------------------------------- how much is held


class Whole(DispatchWatch):
    """Counts the tensors alive that hold as many numbers as tokens × vocabulary."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.most = numbers, 0
        self.alive: list[tuple[weakref.ref[Tensor], int]] = []  # with the addresses of their memory

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.spiritlevel.head.default:  # what happens inside it counts as well
            with self:
                return in_pieces._in_pieces._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.untyped_storage().nbytes() >= self.numbers * tensor.element_size():
                self.alive.append((weakref.ref(tensor), tensor.untyped_storage().data_ptr()))
        self.alive = [(ref, address) for ref, address in self.alive if ref() is not None]
        self.most = max(self.most, len({address for _, address in self.alive}))
        return result


def whole_tensors(work: Callable[[], Any], numbers: int) -> int:
    with Whole(numbers) as counted:
        work()
    return counted.most


LONG, MANY = 64, 2**14  # 2^20 outputs


@pytest.fixture(scope="module")
def large() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return tiny("bias", words=MANY, width=8).float(), tokens(2, MANY, LONG)


@pytest.mark.parametrize("kind", [*MATRICES, "margins", "sample_traces"])
def test_no_two_tensors_of_tokens_times_vocabulary_are_held(
    kind: str, large: tuple[nn.Module, tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = large
    monkeypatch.setattr(heads, "PIECE", 2**17)

    def work() -> None:
        options = {"method": "hutchinson", "probes": 2} if kind == "sample_traces" else {}
        made = getattr(sl, kind)(model, data, loss="causal_lm", batch_size=1, **options)
        if kind in MATRICES:
            for _ in range(2):  # traced, replayed
                made @ torch.ones(made.size)

    assert whole_tensors(work, LONG * MANY) <= 1  # the one with which the pieces are compared
    monkeypatch.setattr(last_layer, "LARGE_OUTPUTS", 2**40)
    assert whole_tensors(work, LONG * MANY) >= 3  # so it would be seen
