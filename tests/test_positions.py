"""Sequences, images, many labels and counts, measured as a whole: dense Hessians in float64 say what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.samples import choosing


class LanguageModel(nn.Module):
    """A transformer of one block, in operations whose dense derivatives can be trusted."""

    def __init__(self, vocabulary: int = 7, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.Linear(width, 3 * width)
        self.inner, self.outer = nn.Linear(width, 6), nn.Linear(6, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.embedding(tokens)
        query, key, value = self.attention(found).chunk(3, -1)
        ahead = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        weights = (query @ key.mT / 2).masked_fill(ahead, -1e9).softmax(-1)
        found = found + weights @ value
        found = found - found.mean(-1, keepdim=True)
        found = found / (found.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return self.head(found + self.outer(F.gelu(self.inner(found))))


class Tagger(nn.Module):
    """A ReLU network over tokens, exact: a convolution over time lets neighbours in."""

    def __init__(self, vocabulary: int = 7, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.mixed = nn.Conv1d(4, 5, 3, padding=1)
        self.head = nn.Linear(5, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.mixed(self.embedding(tokens).mT)).mT)


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def tokens(vocabulary: int, *shape: int, ignored: bool = False, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, vocabulary, shape, generator=generator)
    if ignored:  # each sample keeps other positions, and another number of them
        found[1, 2:], found[2, 1], found[3, :3] = -100, -100, -100
    return found


COUNT, LENGTH = 4, 5
TEXT = tokens(7, COUNT, LENGTH)
TAGS = tokens(3, COUNT, LENGTH, ignored=True, seed=1)
NEXT = tokens(7, COUNT, LENGTH, ignored=True, seed=2)
IMAGES = torch.randn(COUNT, 1, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
MASKS = tokens(3, COUNT, 2, 4, seed=4)
MASKS[1, 0], MASKS[2, 1, 1:] = -100, -100
POINTS = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def token_loss(outputs: Tensor, targets: Tensor, shift: bool = False) -> Tensor:
    """The losses of the tokens that count of one sequence."""
    if shift:
        outputs, targets = outputs[:-1], targets[1:]
    kept = targets != -100
    return F.cross_entropy(outputs[kept], targets[kept], reduction="none")


class Case:
    def __init__(self, make: Callable[[], nn.Module], data: tuple[Tensor, Tensor], loss: Any, one: Any) -> None:
        self.model, self.data, self.loss, self.one = seeded(make), data, loss, one

    def hessians(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Of every entry of a function of the model's outputs on all data, dense: (entries, P, P)."""
        names = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        sizes = [parameter.numel() for parameter in names.values()]

        def of(flat: Tensor) -> Tensor:
            parts = zip(names.items(), flat.split(sizes), strict=True)
            params = {name: part.view_as(parameter) for (name, parameter), part in parts}
            return function(torch.func.functional_call(self.model, params, (self.data[0],)))

        flat = torch.cat([parameter.reshape(-1) for parameter in names.values()])
        found = torch.func.jacrev(torch.func.jacrev(of))(flat).detach()
        return torch.stack([naive.symmetric(each) for each in found])

    def of_samples(self) -> Tensor:
        targets = self.data[1]
        return self.hessians(
            lambda outputs: torch.stack([self.one(o, t) for o, t in zip(outputs, targets, strict=True)])
        )


CASES = {
    "tagger": Case(Tagger, (TEXT, TAGS), "cross_entropy", lambda o, t: token_loss(o, t).mean()),
    "language model": Case(LanguageModel, (TEXT, NEXT), "causal_lm", lambda o, t: token_loss(o, t, True).mean()),
    "segmentation": Case(segmenter, (IMAGES, MASKS), "cross_entropy", lambda o, t: F.cross_entropy(o[None], t[None])),
    "soft labels": Case(
        lambda: nn.Linear(3, 3), (POINTS, POINTS.softmax(1)), "cross_entropy", lambda o, t: F.cross_entropy(o, t)
    ),
    "many labels": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
        (POINTS, (POINTS > 0).double()),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
        lambda o, t: F.binary_cross_entropy_with_logits(
            o, t, pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        ),
    ),
    "one number": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0)),
        (POINTS, POINTS.sum(1)),
        "squared_error",
        lambda o, t: (o - t).square() / 2,
    ),
    "huber": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        (POINTS, 2 * POINTS[:, :2]),
        nn.HuberLoss(),
        F.huber_loss,
    ),
    "counts": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten(0)),
        (POINTS, torch.tensor([0, 3, 1, 2])),
        nn.PoissonNLLLoss(),
        lambda o, t: o.exp() - t * o,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_traces_and_operators_are_those_of_dense_hessians(name: str, untouched: Any) -> None:
    case = CASES[name]
    hessians = case.of_samples()
    exact = name not in ("language model",)
    with untouched(case.model):
        traces = sl.sample_traces(case.model, case.data, loss=case.loss, probes=150, per_layer=exact)
        operator = sl.hessian(case.model, case.data, loss=case.loss)
        dense = operator.dense()
    wanted = hessians.diagonal(dim1=1, dim2=2).sum(1)
    assert traces.exact == exact
    if exact:
        assert torch.allclose(traces.values, wanted, rtol=1e-10, atol=1e-12)
        assert sum(traces.layers.values()).tolist() == pytest.approx(traces.values.tolist())
    else:
        assert bool(((traces.values - wanted).abs() < 5 * traces.stderr).all())
    assert torch.allclose(dense, hessians.mean(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["tagger", "segmentation", "language model"])
def test_a_token_is_a_sample_by_itself_if_asked(name: str, untouched: Any) -> None:
    """Trace and margin of every position that counts; operators are those of the mean over all of them."""
    case = CASES[name]
    shift = name == "language model"

    def rows(outputs: Tensor) -> tuple[Tensor, Tensor]:
        flat = outputs.movedim(1, -1) if name == "segmentation" else outputs
        labels = case.data[1]
        if shift:
            flat, labels = flat[:, :-1], labels[:, 1:]
        return flat[labels != -100], labels[labels != -100]

    labels = rows(case.model(case.data[0]).detach())[1]
    hessians = case.hessians(lambda o: F.cross_entropy(rows(o)[0], labels, reduction="none"))
    options: dict[str, Any] = {"loss": case.loss, "unit": "token"}
    with untouched(case.model):
        traces = sl.sample_traces(case.model, case.data, probes=150, **options)
        dense = sl.hessian(case.model, case.data, **options).dense()
        fisher = sl.gauss_newton(case.model, case.data, **options)
        found = sl.margins(case.model, case.data, **options)
    wanted = hessians.diagonal(dim1=1, dim2=2).sum(1)
    assert traces.targets.tolist() == labels.tolist() == found.targets.tolist()
    if traces.exact:
        assert torch.allclose(traces.values, wanted, rtol=1e-10, atol=1e-12)
        assert fisher.dense().trace().item() == pytest.approx(wanted.mean().item(), rel=1e-9)
    else:
        assert shift
        assert bool(((traces.values - wanted).abs() < 5 * traces.stderr + 1e-12).all())
    assert torch.allclose(dense, hessians.mean(0), rtol=1e-9, atol=1e-11)
    logits = rows(case.model(case.data[0]).detach())[0]
    assert torch.allclose(found.signed, sl.signed_margin(logits, labels))
    assert found.fingerprint == traces.fingerprint  # so that they can be correlated
    assert found.unit == traces.unit == "token"


def test_traces_of_a_sequence_are_the_mean_of_those_of_its_tokens() -> None:
    case = CASES["tagger"]
    of_tokens = sl.sample_traces(case.model, case.data, loss=case.loss, unit="token").values
    counts = (TAGS != -100).sum(1).tolist()
    means = torch.stack([part.mean() for part in of_tokens.split(counts)])
    assert torch.allclose(means, sl.sample_traces(case.model, case.data, loss=case.loss).values, rtol=1e-10)


def test_many_positions_are_sampled_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` samples where factors are many, and says so; the mean of many draws is the exact trace."""
    case = CASES["segmentation"]
    exact = sl.sample_traces(case.model, case.data, loss=case.loss)
    assert exact.exact
    assert exact.matvecs == 8 * 2
    monkeypatch.setattr(choosing, "MANY_POSITIONS", 10)
    found = sl.sample_traces(case.model, case.data, loss=case.loss)
    assert (found.exact, found.method) == (False, "passes=8")
    assert "16 factors: 8 taken exactly" in found.notes[0]
    assert found.mean().status == "estimated"
    with pytest.raises(InputError, match=r"exact traces of 24 outputs take 16 backward passes per batch"):
        sl.sample_traces(case.model, case.data, loss=case.loss, method="exact")
    draws = torch.stack(
        [sl.sample_traces(case.model, case.data, loss=case.loss, passes=1, seed=s).values for s in range(40)]
    )
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - exact.values).abs() < 4 * error).all())
    one = sl.sample_traces(case.model, case.data, loss=case.loss, passes=1, seed=0, batch_size=1)
    assert torch.allclose(one.values, draws[0])  # signs belong to samples, not to batches


def test_sequences_of_unequal_length_are_measured_in_their_batches() -> None:
    case = CASES["tagger"]
    long = tokens(7, 2, 6, seed=8), tokens(3, 2, 6, seed=9)
    batches = [(TEXT, TAGS), long]
    traces = sl.sample_traces(case.model, batches, loss=case.loss)
    assert torch.allclose(traces.values[4:], sl.sample_traces(case.model, long, loss=case.loss).values)
    assert traces.targets.shape == (6, 6)
    assert traces.targets[0, 5] == -100
    sampled = sl.sample_traces(case.model, batches, loss=case.loss, passes=2)
    assert len(sampled) == 6
    assert len(sl.margins(case.model, batches, loss=case.loss, unit="token")) == int((TAGS != -100).sum()) + 12


def test_an_empty_batch_of_sequences_changes_nothing() -> None:
    case = CASES["tagger"]
    batches = [(TEXT[:0], TAGS[:0]), (TEXT, TAGS), (TEXT[:0], TAGS[:0])]
    measures: list[Callable[[Any], Tensor]] = [
        lambda data: sl.sample_traces(case.model, data, loss=case.loss, unit="token").values,
        lambda data: sl.margins(case.model, data, loss=case.loss, unit="token").signed,
        lambda data: sl.hessian(case.model, data, loss=case.loss, unit="token").dense(),
        lambda data: sl.empirical_fisher(case.model, data, loss=case.loss, unit="token").dense(),
    ]
    for measure in measures:
        assert torch.allclose(measure(batches), measure(case.data))
    with pytest.raises(InputError, match="the data are empty"):
        sl.margins(case.model, (TEXT[:0], TAGS[:0]), loss=case.loss, unit="token")


def test_margins_of_many_decisions_are_means() -> None:
    for name in ("tagger", "many labels"):
        case = CASES[name]
        found = sl.margins(case.model, case.data, loss=case.loss)
        outputs, targets = case.model(case.data[0]).detach(), case.data[1]
        for n in range(COUNT):
            if name == "tagger":
                kept = targets[n] != -100
                own = sl.signed_margin(outputs[n][kept], targets[n][kept])
            else:
                own = outputs[n] * (2 * targets[n] - 1)
            assert found.signed[n].item() == pytest.approx(own.mean().item())
            assert found.shares[n].item() == pytest.approx(float((own > 0).double().mean()))
            assert bool(found.correct[n]) == bool((own > 0).all())
            assert found.decisions is not None
            assert int(found.decisions[n]) == len(own)
        assert "of a sample's decisions are right on average" in str(found)
    with pytest.raises(InputError, match="a distance needs one decision for each sample"):
        sl.margins(case.model, case.data, loss=case.loss, distance=2)


def test_units_are_refused_where_there_are_none() -> None:
    case = CASES["soft labels"]
    with pytest.raises(InputError, match=r"unit='token' measures single positions .* leave unit= out"):
        sl.sample_traces(case.model, (POINTS, torch.tensor([0, 1, 2, 0])), unit="token")
    with pytest.raises(InputError, match=r"the loss squared_error is one number for each sample"):
        sl.trace(case.model, case.data, loss="squared_error", unit="token")
    with pytest.raises(InputError, match=r"unit='token' takes samples apart"):
        sl.hessian(CASES["tagger"].model, CASES["tagger"].data, unit="token", batch_norm="batch")


def test_tokens_that_torch_would_weigh_by_their_batch_are_refused_by_all() -> None:
    """Operators took the plain mean of the weighted losses where traces refused; `reduction="none"` asks for it."""
    case, weight = CASES["tagger"], torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    for measure in (sl.hessian, sl.gauss_newton, sl.sample_traces):
        with pytest.raises(InputError, match="divides by the sum of the weights of a batch"):
            measure(case.model, case.data, loss=nn.CrossEntropyLoss(weight), unit="token")
    loss = nn.CrossEntropyLoss(weight, reduction="none")
    traces = sl.sample_traces(case.model, case.data, loss=loss, unit="token")
    diagonal = sl.hessian(case.model, case.data, loss=loss, unit="token").dense().diag()
    assert traces.exact
    assert float(traces.values.mean()) == pytest.approx(float(diagonal.sum()), rel=1e-9)


def test_exact_traces_of_a_language_model_are_refused_as_ever() -> None:
    case = CASES["language model"]
    with pytest.raises(NotExactError):
        sl.sample_traces(case.model, case.data, loss=case.loss, method="exact")


def test_float32_stays_right_for_confident_tokens() -> None:
    """Heads times 30 make margins beyond float32's resolution of 1 − S; traces agree with float64 to 1e-4."""
    case = CASES["tagger"]
    model = seeded(Tagger)
    with torch.no_grad():
        model.head.weight *= 2000
        outputs = model(TEXT)
    labels = outputs.argmax(-1)
    assert float(sl.margins(model, (TEXT, labels), loss="cross_entropy", unit="token").signed.median()) > 12
    precise = sl.sample_traces(model, (TEXT, labels), loss=case.loss, unit="token")
    rough = sl.sample_traces(model.float(), (TEXT, labels), loss=case.loss, unit="token")
    assert torch.allclose(rough.values, precise.values, rtol=1e-3, atol=0)


QUALITY = {
    "tagger": "accuracy of positions",
    "segmentation": "accuracy of positions",
    "many labels": "accuracy of labels",
    "soft labels": "accuracy",
    "one number": "R²",
    "counts": "R²",
}


@pytest.mark.parametrize("name", QUALITY)
def test_reports_and_pages_say_what_makes_sense(name: str, untouched: Any, tmp_path: Path) -> None:
    """All default measures run or say in a sentence why not; no percentage is NaN."""
    case = CASES[name]
    with untouched(case.model):
        report = sl.measure(case.model, case.data, test=case.data, loss=case.loss, parts=["audit"])
    quality, value = report.fits["train"].quality()
    assert quality == report.fits["test"].quality()[0] == QUALITY[name]
    said = f"{value} on the {COUNT} train samples and {value} on the" if quality == "R²" else "It classifies "
    assert said in " ".join(report.headline)
    assert (f"of the {QUALITY[name].rpartition(' ')[2]} of" in " ".join(report.headline)) == (" of " in quality)
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for text in (str(report), page[page.index("<body") :]):
        assert "nan%" not in text.lower()
        assert "nan %" not in text.lower()
    assert ("Hessian traces: median" in page) == (quality == "R²")  # without margins, traces alone
    undefined = [row for row in report.rows if row.kind == "undefined"]
    for reason in [*report.left_out.values(), *(row.value.reason for row in undefined)]:
        assert reason.endswith(".")
        assert "\n" not in reason
    values = {row.name: row.value.value for row in report.rows}
    wanted = case.of_samples().diagonal(dim1=1, dim2=2).sum(1).mean().item()
    assert values["trace"] == pytest.approx(wanted, rel=1e-9)
    assert math.isnan(values["margin_mean"]) == (QUALITY[name] == "R²")


def test_sentences_about_tokens_call_them_tokens() -> None:
    case = CASES["tagger"]
    report = sl.measure(
        case.model, case.data, loss=case.loss, unit="token", measures=["trace", "margin_mean"], parts=[]
    )
    text = " ".join(report.headline)
    assert " train tokens correctly" in text
    assert "misclassified tokens" in text
    assert "samples" not in text


def test_r_squared_is_that_of_scikit_learn() -> None:
    r2_score = pytest.importorskip("sklearn.metrics").r2_score
    case = CASES["one number"]
    report = sl.measure(case.model, case.data, loss=case.loss, measures=["path_norm"], parts=())
    found = report.fits["train"].r_squared
    assert found is not None
    assert found.value == pytest.approx(r2_score(case.data[1].numpy(), case.model(case.data[0]).detach().numpy()))


@pytest.mark.parametrize("name", ["language model", "segmentation"])
def test_rows_of_tokens_tell_their_sample_and_position(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    options: dict[str, Any] = {"loss": case.loss, "unit": "token"}
    labels = case.data[1].reshape(COUNT, -1)
    if name == "language model":
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    wanted = [tuple(place) for place in (labels != -100).nonzero().tolist()]
    tables = [
        sl.margins(case.model, case.data, batch_size=3, **options),
        sl.margins(case.model, [(case.data[0][:1], case.data[1][:1]), (case.data[0][1:], case.data[1][1:])], **options),
        sl.sample_traces(case.model, case.data, batch_size=5, probes=2, **options),
    ]
    for table in tables:
        frame = table.frame()
        assert frame.columns[:2] == ["sample", "position"]
        assert list(zip(frame["sample"], frame["position"], strict=True)) == wanted
        assert frame["target"].to_list() == [int(labels[place]) for place in wanted]
        table.to_json(tmp_path / "table.json")
        again = type(table).from_json(tmp_path / "table.json")
        assert again.position is not None
        assert again.position.tolist() == [position for _, position in wanted]
    report = sl.measure(case.model, case.data, samples=5, measures=["trace"], parts=[], **options)
    assert report.indices is not None
    assert report.traces is not None
    assert report.traces.sample is not None
    assert report.traces.sample.tolist() == [wanted[index][0] for index in report.indices.tolist()]
    assert f"of the {len(wanted)} train tokens (5 measured)" in report.headline[0]
    assert sl.margins(case.model, case.data, loss=case.loss).position is None


def test_models_of_tokens_are_compared_and_tracked() -> None:
    case, other = CASES["tagger"], seeded(lambda: Tagger()).requires_grad_()
    with torch.no_grad():
        other.head.bias += 0.5
    for unit in ("sample", "token"):
        found = sl.compare(case.model, other, case.data, loss=case.loss, unit=unit, measures=["trace"], audit=False)
        accuracy = next(row for row in found.rows if row.name == "accuracy")
        assert ("share of a sample's decisions" in accuracy.meaning) == (unit == "sample")
        tracker = sl.Tracker(case.model, case.data, every=1, loss=case.loss, unit=unit, quantities=["loss", "margins"])
        row = tracker.measure()
        right = sl.margins(case.model, case.data, loss=case.loss, unit=unit).shares.mean().item()
        assert row["accuracy"] == pytest.approx(right)
