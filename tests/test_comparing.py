"""Two models on the same samples: intervals that cover, verdicts that the parametrisation cannot turn."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.answers.advising import Sides, advise
from spiritlevel.answers.comparing import compare
from spiritlevel.errors import InputError
from spiritlevel.measures import Setting
from spiritlevel.results import Comparison, mean_skewness, skewed_limits

FAST = ["trace", "margin_mean", "input_distance"]


def trained(steps: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = points(200, seed=9)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()
    return model


def points(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def test_the_better_model_is_advised_whatever_the_order() -> None:
    bad, good, data = trained(2), trained(150), points(200)
    one = compare(bad, good, data, names=("early", "late"), measures=FAST)
    two = compare(good, bad, data, names=("late", "early"), measures=FAST)
    assert one.advice.startswith("Trust late: it classifies")
    assert two.advice == one.advice
    assert one.row("accuracy").verdict == "b"
    assert one.row("accuracy").difference == pytest.approx(-two.row("accuracy").difference)
    assert one.rows[0].name == "accuracy"
    assert [row.name for row in one.rows][-1] == "trace"  # what the parametrisation moves comes last
    assert sl.Comparison.from_json(one.to_json()).to_json() == one.to_json()


def test_no_advice_says_why_rows_that_favour_a_model_are_no_reason() -> None:
    a, b, data = trained(150), trained(170), points(200)
    found = compare(a, b, data, names=("early", "late"), measures=FAST)
    rows = [dataclasses.replace(row, verdict="equal", sure=False) for row in found.rows]
    at = {row.name: number for number, row in enumerate(rows)}
    sides = Sides(("early", "late"), 200, True, 0.95, [], "", {})
    nothing = "These samples give no reason to trust one of the two models more than the other"
    assert advise(rows, {}, sides)[0] == f"{nothing}."
    rows[at["margin_mean"]] = dataclasses.replace(rows[at["margin_mean"]], verdict="b")
    assert advise(rows, {}, sides)[0] == f"{nothing}; only accuracy, input_distance and loss decide that."
    rows[at["loss"]] = dataclasses.replace(rows[at["loss"]], verdict="b")
    assert advise(rows, {}, sides)[0] == f"{nothing}; loss favours late at 95%, but 3 rows decide, each at 98.3%."


def test_the_interval_of_a_mean_is_that_of_the_paired_differences() -> None:
    a, b, data = trained(2), trained(150), points(80)
    row = compare(a, b, data, measures=["margin_mean"]).row("margin_mean")
    first, second = sl.margins(a, data).signed.numpy(), sl.margins(b, data).signed.numpy()
    apart = torch.from_numpy(second - first)
    skewed = skewed_limits(float(apart.mean()), stats.sem(apart.numpy()), 79, mean_skewness(apart))
    student = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((min(skewed[0], student.low), max(skewed[1], student.high)))
    assert (row.low, row.high) == pytest.approx((student.low, student.high), rel=0.03)  # these are little skewed
    assert row.how == "paired t"
    assert row.difference == pytest.approx(second.mean() - first.mean())


def steps(*thresholds: float) -> list[nn.Linear]:
    """Classifiers of a number, each with its own threshold."""
    found = [nn.Linear(1, 2).double() for _ in thresholds]
    for net, threshold in zip(found, thresholds, strict=True):
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[-1.0], [1.0]]))
            net.bias.copy_(torch.tensor([threshold, -threshold]))
    return found


@pytest.mark.parametrize(("apart", "verdict", "sure"), [(3, "equal", False), (6, "b", False), (12, "b", True)])
def test_a_handful_of_samples_is_no_evidence_of_a_higher_accuracy(apart: int, verdict: str, sure: bool) -> None:
    """If the models are equally good, three samples on which they differ all favour one of them in a quarter of all
    cases, six in a 32nd part: less than the 5 % of a row, more than the third of it that advice asks for."""
    inputs = torch.linspace(0.1, 1, 200, dtype=torch.float64) * torch.tensor([-1.0, 1.0]).double().repeat(100)
    inputs[:apart] = 0.01
    labels = (inputs > 0.02).long()
    found = compare(*steps(0.0, 0.02), (inputs[:, None], labels), measures=["margin_mean"], audit=False)
    row = found.row("accuracy")
    assert row.difference == pytest.approx(apart / 200)
    assert (row.verdict, row.sure) == (verdict, sure)
    added = [1.0, -1.0, *[1.0] * apart, *[0.0] * (200 - apart)]
    student = stats.ttest_1samp(added, 0).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((student.low, student.high))


def test_a_few_large_differences_are_no_evidence_of_a_lower_loss() -> None:
    """Three samples of 60 on which the loss differs by much: had others come, they might say the reverse."""
    logits = torch.zeros(60, 2, dtype=torch.float64)
    better = logits.clone()
    better[:3, 0] = 4.0
    pair = [nn.Embedding.from_pretrained(table, freeze=False) for table in (logits, better)]
    data = torch.arange(60), torch.zeros(60).long()
    found = compare(*pair, data, measures=["margin_mean"], audit=False)
    for name in ("loss", "margin_mean"):
        row = found.row(name)
        assert row.low < 0 < row.high
        assert (row.verdict, row.sure) == ("equal", False)
    assert not found.advice.startswith("Trust")


def test_the_same_function_in_other_coordinates_is_no_evidence() -> None:
    model, data = trained(150), points(100)
    scaled = sl.transforms.rescale_layers(model, {"0": 4.0, "2": 0.25}, data=data).model
    found = compare(model, scaled, data, measures=[*FAST, "layer_scaled_trace", "fisher_rao_norm"])
    trace = found.row("trace")
    assert not 0.5 < trace.ratio < 2
    assert trace.verdict == "not comparable"
    assert trace.factor > max(trace.ratio, 1 / trace.ratio)
    assert "no reason to trust one" in found.advice
    for name in ("accuracy", "loss", "margin_mean", "input_distance"):
        assert found.row(name).difference == pytest.approx(0, abs=1e-9)
    assert any(reason.startswith("Not comparable") and "trace (at least" in reason for reason in found.reasons)


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_no_size_of_a_rescaling_makes_the_trace_comparable(scale: float) -> None:
    model, (inputs, targets) = trained(150).float(), points(100)
    data = inputs.float(), targets
    scaled = copy.deepcopy(model)
    with torch.no_grad():  # not a power of 2, so the outputs differ by rounding
        scaled[0].weight *= scale
        scaled[0].bias *= scale
        scaled[2].weight /= scale
    found = compare(model, scaled, data, measures=[*FAST, "weight_norm", "fisher_rao_norm", "margin_q50"])
    verdicts = {row.name: row.verdict for row in found.rows}
    trace = found.row("trace")
    assert max(trace.ratio, 1 / trace.ratio) > trace.factor  # further than the audit went, and no evidence all the same
    assert (verdicts.pop("trace"), verdicts.pop("weight_norm")) == ("not comparable", "not comparable")
    assert set(verdicts.values()) == {"equal"}  # what differs by rounding favours nobody
    assert any(row.difference for row in found.rows if row.verdict == "equal")
    assert "both give the same outputs, up to rounding" in found.advice


def test_numbers_of_the_whole_set_are_compared_by_the_influence_of_every_sample() -> None:
    a, b, data = trained(2), trained(150), points(80)
    found = compare(a, b, data, measures=["fisher_rao_norm", "largest_eigenvalue"], audit=False)
    for name in ("fisher_rao_norm", "largest_eigenvalue"):
        row, values = found.row(name), sl.measures.MEASURES[name].sampling.values
        assert values is not None
        settings = [sl.measures.Setting(model, data) for model in (a, b)]
        numbers = [sl.measures.MEASURES[name].attempt(setting).value for setting in settings]
        apart = values(settings[1]) - values(settings[0])
        assert row.difference == pytest.approx(numbers[1] - numbers[0])
        low, high = skewed_limits(row.difference, stats.sem(apart.numpy()), 79, mean_skewness(apart))
        assert row.low <= low + 1e-9
        assert row.high >= high - 1e-9  # wider where the ends of a spectrum are biased
        assert row.how == "paired t"


def test_advice_needs_a_difference_that_is_sure_after_three_looks() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(200, 2)
    hesitant = 0
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        labels = (inputs.sum(1) + torch.randn(200, generator=generator) > 0).long()
        pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
        for net, weights in zip(pair, ([1.0, 0.55], [0.55, 1.0]), strict=True):
            with torch.no_grad():
                net.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) * torch.tensor(weights))
                net.bias.zero_()
        found = compare(*pair, (inputs, labels), measures=["input_distance"], audit=False)
        strict = [row for row in found.rows if row.verdict in ("a", "b") and row.sure]
        assert found.advice.startswith("Trust") == bool(strict)
        hesitant += any(row.verdict in ("a", "b") for row in found.rows) and not strict
    assert hesitant  # at 95 % each, one of three numbers differs; that is not enough


def test_a_difference_without_an_interval_favours_nobody() -> None:
    a, b, data = trained(2), trained(150), points(80)
    found = compare(a, b, data, measures=["margin_skewness", "margin_min", "margin_q25"])
    assert found.row("margin_skewness").verdict == found.row("margin_min").verdict == "no interval"
    assert found.row("margin_q25").verdict == "b"  # a quantile of the samples has a bootstrap
    assert any(reason.startswith("No verdict") and "margin_min" in reason for reason in found.reasons)
    assert compare(a, b, points(2), measures=["margin_mean"]).row("margin_mean").verdict == "no interval"


def test_the_difference_of_medians_is_that_of_the_measure() -> None:
    a, b, data = trained(2), trained(150), points(80)  # an even number: the lower of the two middle ones is no median
    row = compare(a, b, data, measures=["input_distance"]).row("input_distance")
    expected = [sl.measures.MEASURES["input_distance"](model, data).value for model in (a, b)]
    assert [row.a.value, row.b.value] == pytest.approx(expected)


def test_probabilities_in_place_of_logits_win_nothing() -> None:
    model, data = trained(150), points(100)
    found = compare(model, nn.Sequential(model, nn.Softmax(1)), data, names=("plain", "soft"), measures=FAST)
    assert found.advice.startswith("No advice: the outputs of soft all lie in [0, 1] and sum to 1")
    assert {row.verdict for row in found.rows} <= {"equal", "not comparable"}
    assert "look like probabilities" in found.row("input_distance").note


class Shifted(nn.Module):
    """The same with a number of its own added to the logits of each position, or of each class."""

    def __init__(self, model: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(x) + self.shift
        return outputs


@pytest.mark.parametrize("classes", ["first", "last"])
def test_equal_probabilities_are_looked_for_along_the_classes(classes: str) -> None:
    """Along the last dimension of (N, C, H, W), other probabilities look equal, and equal ones do not."""
    torch.manual_seed(0)
    model, loss = nn.Conv2d(2, 3, 3, padding=1).double(), "cross_entropy"
    x, y = torch.randn(40, 2, 5, 4, dtype=torch.float64), torch.randint(3, (40, 5, 4))
    by_position = torch.randn(1, 5, 4, dtype=torch.float64)
    if classes == "last":
        model, loss = nn.Sequential(model, Last()), "token_cross_entropy"
        by_position = by_position[0, ..., None]
    found = compare(model, Shifted(model, by_position), (x, y), loss=loss, measures=["margin_mean"], audit=False)
    assert "both give the same probabilities" in found.advice
    by_class = torch.randn(3, 1, 1, dtype=torch.float64) if classes == "first" else torch.randn(3, dtype=torch.float64)
    found = compare(model, Shifted(model, by_class), (x, y), loss=loss, measures=["margin_mean"], audit=False)
    assert "both give the same" not in found.advice


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(1, -1)


def test_predictions_on_both_sides_of_the_targets_are_not_the_same() -> None:
    """Their squared errors are equal, and a softmax of one number is 1."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1).double(), torch.randn(40, 2, dtype=torch.float64)
    mirrored = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in mirrored.parameters():
            parameter.neg_()
    y = torch.zeros(40, 1, dtype=torch.float64)
    found = compare(model, mirrored, (x, y), loss="squared_error", measures=["trace"], audit=False)
    assert "both give the same" not in found.advice


def test_probabilities_at_every_position_in_place_of_logits_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1).double()
    data = torch.randn(40, 2, 5, 4, dtype=torch.float64), torch.randint(3, (40, 5, 4))
    soft = nn.Sequential(model, nn.Softmax(1))
    assert compare(model, soft, data, measures=["margin_mean"], audit=False).advice.startswith(
        "No advice: the outputs of b all lie in [0, 1] and sum to 1"
    )
    wrong = nn.Sequential(model, nn.Softmax(-1))  # along the width of the image
    assert "sum to 1" not in compare(model, wrong, data, measures=["margin_mean"], audit=False).advice


def test_classes_are_counted_in_their_own_dimension() -> None:
    data = torch.randn(4, 2, 5, 4), torch.randint(3, (4, 5, 4))
    assert Setting(nn.Conv2d(2, 3, 3, padding=1), data).classes == 3
    assert Setting(nn.Linear(2, 3), (torch.randn(4, 2), torch.randint(3, (4,)))).classes == 3
    assert Setting(nn.Linear(2, 3), (torch.randn(4, 2), torch.randn(4, 3)), loss="squared_error").classes == 3


def test_what_no_transform_could_test_is_not_compared() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double() for _ in range(2))
    row = compare(a, b, points(40), measures=["trace"]).row("trace")
    assert row.verdict == "not comparable"
    assert row.note.startswith("not tested: none of the transforms")


def test_the_settings_name_models_device_and_number_format() -> None:
    settings = compare(trained(1), trained(2), points(8), names=("x", "y"), measures=["margin_mean"]).settings
    assert settings["models"] == "x: Sequential and y: Sequential"
    assert (settings["device"], settings["dtype"]) == ("cpu", "float64")


def test_without_the_audit_nothing_that_can_be_moved_is_compared() -> None:
    a, b, data = trained(2), trained(150), points(60)
    row = compare(a, b, data, measures=["trace"], audit=False).row("trace")
    assert row.verdict == "not comparable"
    assert "the audit was left out" in row.note


def test_progress_names_what_the_audit_measures() -> None:
    said: list[str] = []
    compare(
        trained(2),
        trained(3),
        points(20),
        names=("x", "y"),
        measures=["weight_norm"],
        progress=lambda what, done, total: said.append(what),
    )
    assert {"audit of x: weight_norm", "audit of y: weight_norm after rescale_layers"} <= set(said)


def test_a_model_and_itself_are_equal() -> None:
    model, data = trained(20), points(50)
    found = compare(model, copy.deepcopy(model), data, measures=["margin_mean"])
    assert {row.verdict for row in found.rows} == {"equal"}


def test_paired_intervals_cover_the_truth() -> None:
    a, b, everything = trained(2), trained(30), points(4000)
    truth = float((sl.margins(b, everything).signed - sl.margins(a, everything).signed).mean())
    hits = 0
    for seed in range(40):
        row = compare(a, b, everything, measures=["margin_mean"], samples=60, seed=seed).row("margin_mean")
        hits += row.low <= truth <= row.high
    assert hits >= 33  # 38 expected; fewer than 33 has a chance below 1 in 100


def test_one_sample_has_no_interval_and_no_warning() -> None:
    found = compare(trained(2), trained(30), points(1), measures=["margin_mean"], under="int4")
    assert {row.verdict for row in found.rows if row.difference} == {"no interval"}


def test_models_that_do_not_fit_are_named() -> None:
    with pytest.raises(InputError, match="model 'second': the model Linear fails on inputs"):
        compare(trained(1), nn.Linear(3, 2), points(8), names=("first", "second"))
    with pytest.raises(InputError, match="two different names"):
        compare(trained(1), trained(1), points(8), names=("x", "x"))
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 4,000,000,000, got -1"):
        compare(trained(1), trained(1), points(8), seed=-1)
    with pytest.raises(InputError, match="level between 0 and 1"):
        compare(trained(1), trained(1), points(8), level=95)


class Evidence(nn.Module):
    """Two classes by one of the features of every position."""

    def __init__(self, feature: int) -> None:
        super().__init__()
        self.feature, self.scale = feature, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([-x[..., self.feature], x[..., self.feature]], -1) * self.scale


def test_positions_of_one_sequence_are_not_independent() -> None:
    """Sequences whose positions are all alike say no more than one position each: the same intervals."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 1, 2, generator=generator) + torch.tensor([0.5, 1.0])
    labels = torch.ones(60, 1, dtype=torch.long)
    a, b = Evidence(0), Evidence(1)

    def compared(times: int, samples: int | None = None) -> Comparison:
        data = inputs.expand(60, times, 2).contiguous(), labels.expand(60, times).contiguous()
        names = ["margin_mean", "margin_q50", "trace"]
        return sl.compare(a, b, data, measures=names, audit=False, unit="token", under="noise:0.1", samples=samples)

    alone, repeated = compared(1), compared(20)
    assert repeated.samples == 1200
    for one, many in zip(alone.rows, repeated.rows, strict=True):
        rel = 0.2 if one.name == "margin_q50" else 1e-5  # between two of 60 values, or of 1,200
        assert (many.low, many.high) == pytest.approx((one.low, one.high), rel=rel, abs=1e-7), one.name
    assert compared(20, 400).row("loss").high - compared(20, 400).row("loss").low > 0.7 * (
        alone.row("loss").high - alone.row("loss").low
    )
    few = sl.compare(a, b, (inputs[:20].expand(20, 9, 2), labels[:20].expand(20, 9)), measures=[], unit="token")
    assert {(row.how, row.verdict) for row in few.rows} == {("too few sequences", "no interval")}


def test_equally_good_models_are_told_apart_no_more_often_by_tokens() -> None:
    """They were in 70% of cases where a model does well or badly on whole sequences."""
    told = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        of_sequence = torch.randn(40, 1, 2, generator=generator) + 0.5
        inputs = of_sequence + 0.5 * torch.randn(40, 15, 2, generator=generator)
        data = inputs, torch.ones(40, 15, dtype=torch.long)
        row = sl.compare(Evidence(0), Evidence(1), data, measures=[], unit="token").row("loss")
        told += row.low > 0 or row.high < 0
    assert told <= 6  # of 40 at 5%: a chance of 0.3% for more


def test_the_distance_of_checkpoints_is_that_of_whole_sequences() -> None:
    inputs = torch.randn(60, 1, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.5, 1.0])
    models = {"a": Evidence(0), "b": Evidence(1)}
    rows = []
    for times in (1, 20):
        data = inputs.expand(60, times, 2).contiguous(), torch.ones(60, times, dtype=torch.long)
        rows.append(sl.rank(models, data, measures=["margin_mean"], under=(), unit="token").rows[0])
    assert rows[1].behind_low == pytest.approx(rows[0].behind_low, rel=1e-5)
    assert rows[1].behind_high == pytest.approx(rows[0].behind_high, rel=1e-5)
