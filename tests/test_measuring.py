"""One report: its numbers are those of the functions below it, its words follow from its numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.answers import measuring, wording
from spiritlevel.answers.measuring import measure
from spiritlevel.binding.batches import Batches, subset
from spiritlevel.errors import InputError
from spiritlevel.results import Audit, AuditRow, Certificate, Correlation, Estimate, Fit, figure

FAST = ["trace", "weight_norm", "mean_aceht", "margin_mean"]


def net(classes: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, classes)).double()


def points(count: int = 60, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.arange(count) % classes


def test_the_numbers_are_those_of_the_functions() -> None:
    model, data, test = net(), points(), points(20)
    report = measure(model, data, test=test, measures=FAST, parts=["audit", "pictures", "spectrum", "landscape"])
    traces, margins = sl.sample_traces(model, data, per_layer=True), sl.margins(model, data)
    assert report.row("trace").value.value == pytest.approx(float(traces.values.mean()))
    assert report.row("margin_mean").value.value == pytest.approx(float(margins.signed.mean()))
    assert report.traces is not None
    assert report.margins is not None
    assert torch.allclose(report.traces.values, traces.values)
    assert torch.equal(report.margins.signed, margins.signed)
    assert report.predicted is not None
    assert torch.equal(report.predicted, model(data[0]).argmax(1))
    assert report.fits["train"].accuracy.value == pytest.approx(float(margins.correct.double().mean()))
    losses = nn.functional.cross_entropy(model(test[0]), test[1])
    assert report.fits["test"].loss.value == pytest.approx(losses.item())
    assert sum(report.layers.values()) == pytest.approx(1)
    for name, share in report.layers.items():
        assert share == pytest.approx(float(traces.layers[name].mean() / traces.values.mean()))
    found = sl.correlate(traces, margins.output)
    assert report.correlations["trace and margin"].r == pytest.approx(found.r)
    dense = torch.linalg.eigvalsh(sl.hessian(model, data).dense())
    assert report.spectrum is not None
    assert float(report.spectrum.largest.values[0]) == pytest.approx(float(dense[-1]))
    assert report.landscape is not None
    assert report.landscape.losses.shape == (17, 17)
    assert report.audit is not None
    assert report.audit.row("trace", "rescale_layers").verdict == "changes"
    assert report.left_out == {}
    assert (report.indices, report.partial) == (None, "")
    assert "The symmetry rescale_layers moves the trace at least" in " ".join(report.headline)
    assert "its size does not tell two networks apart" in " ".join(report.headline)
    assert sl.Report.from_json(report.to_json()).to_json() == report.to_json()


def test_pictures_are_the_samples_they_claim_to_be() -> None:
    model, data = net(), points()
    report = measure(model, data, measures=["trace"], parts=["pictures"])
    pictures = report.pictures
    assert pictures is not None
    assert report.traces is not None
    assert pictures.images.dtype == torch.uint8
    sharpest = pictures.indices[list(pictures.groups["sharpest"])]
    assert sharpest[0] == report.traces.values.argmax()
    assert torch.equal(pictures.images, (data[0][pictures.indices].float() * 255).round().to(torch.uint8))
    flat = measure(
        nn.Linear(4, 3), (torch.rand(9, 4), torch.arange(9) % 3), measures=["weight_norm"], parts=["pictures"]
    )
    assert flat.pictures is None
    assert "pictures need images" in flat.left_out["pictures"]


def test_a_subset_is_stated_and_its_error_covers_the_whole() -> None:
    model, data = net(), points(400)
    whole = measure(model, data, measures=FAST, parts=[])
    hits = 0
    for seed in range(20):
        report = measure(model, data, measures=FAST, parts=[], samples=100, seed=seed)
        assert report.indices is not None
        assert torch.equal(report.indices, report.indices.unique())
        assert report.settings["samples"] == "a random subset of 100 of 400"
        for name in ("trace", "margin_mean", "mean_aceht"):
            low, high = report.row(name).interval
            hits += low <= whole.row(name).value.value <= high
    assert hits >= 50  # of 60; 57 expected at 95 %
    assert report.row("weight_norm").value.data_stderr is None
    assert report.fits["train"].population == 400


def test_an_unknown_error_stays_unknown_through_json() -> None:
    report = measure(net(), points(), measures=["largest_eigenvalue", "weight_norm"], parts=[], samples=20)
    for each in (report, sl.Report.from_json(report.to_json())):
        assert math.isnan(each.row("largest_eigenvalue").interval[0])
        low, high = each.row("weight_norm").interval
        assert low == high
    assert report.to_json() == sl.Report.from_json(report.to_json()).to_json()


def test_a_subset_of_any_kind_of_data_is_the_same() -> None:
    inputs, targets = points()
    pair, indices, population = subset(Batches((inputs, targets)), 10, 3)
    assert (population, len(pair[1])) == (60, 10)
    assert indices is not None
    assert torch.equal(pair[0], inputs[indices])
    batches = [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]
    again, other, _ = subset(Batches(batches), 10, 3)
    assert torch.equal(again[0], pair[0])
    assert other is not None
    named = [({"x": inputs[:30]}, targets[:30]), ({"x": inputs[30:]}, targets[30:])]
    parts, _, _ = subset(Batches(named), 10, 3)
    assert torch.equal(torch.cat([piece["x"] for piece, _ in parts]), pair[0])
    with pytest.raises(InputError, match="samples= would change the batches"):
        subset(Batches(batches, whole=True), 10, 0)
    with pytest.raises(InputError, match="samples must be a whole number of at least 1, got 0"):
        subset(Batches(batches), 0, 0)


def test_a_row_of_a_subset_says_what_it_is_worth_for_all_of_the_data() -> None:
    row = measure(net(), points(400), measures=["trace"], parts=[], samples=60).row("trace")
    low, high = (figure(limit) for limit in row.interval)
    assert f"(exact) for the samples measured, {low} to {high} for all of the data; " in str(row)
    assert "for all of the data" not in str(measure(net(), points(60), measures=["trace"], parts=[]).row("trace"))


def test_the_error_of_an_accuracy_is_never_nothing() -> None:
    model, (inputs, _) = net(), points(400)
    with torch.no_grad():
        data = inputs, model(inputs).argmax(1)  # all correct
    report = measure(model, data, measures=["trace"], parts=[], samples=60)
    fit = report.fits["train"]
    assert fit.accuracy.data_stderr is not None
    assert fit.accuracy.data_stderr > 0
    low, high = fit.accuracy_limits()
    assert high == pytest.approx(1)
    assert 0.93 < low < 0.97
    assert f"100.0% (at least {low:.1%}) of the 400 train samples (60 measured)" in report.headline[0]
    for count, limit in ((1, 0.6), (2, 0.5)):  # not 50 % ± 98 %
        low, high = Fit(2, 10**6, Estimate(count / 2), Estimate(0.0)).accuracy_limits()
        assert 0 <= low < limit < high <= 1
    whole = measure(model, data, measures=["trace"], parts=[])
    assert "100.0% of the 400 train samples" in whole.headline[0]


def test_the_interval_of_an_accuracy_covers_that_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    correct = torch.zeros(300, dtype=torch.float64)
    correct[:285] = 1.0
    hits = 0
    for _ in range(400):
        drawn = correct[torch.randperm(300, generator=generator)[:80]]
        low, high = Fit(80, 300, Estimate(float(drawn.mean())), Estimate(0.0)).accuracy_limits()
        hits += low <= 0.95 <= high
    assert hits >= 368  # 380 expected; fewer than 368 has a chance below 1 in 100


def test_probabilities_in_place_of_logits_are_told() -> None:
    def sentences(model: nn.Module) -> str:
        return " ".join(measure(model, points(), measures=["weight_norm"], parts=[]).headline)

    assert "look like probabilities, but the loss expects logits" in sentences(nn.Sequential(net(), nn.Softmax(1)))
    assert "probabilities" not in sentences(net())
    assert "probabilities" not in sentences(nn.Sequential(net(), nn.Sigmoid()))


def test_the_median_in_words_is_that_of_the_table() -> None:
    report = measure(net(), points(6), measures=["margin_q50"], parts=[])
    middle = figure(report.row("margin_q50").value.value, 3, typeset=True)
    assert f"{middle} in the median" in " ".join(report.headline)


def test_what_the_audit_could_not_test_and_what_is_undefined_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.GELU(), nn.Linear(6, 3)).double()
    text = " ".join(measure(model, points(), measures=["margin_mean", "path_norm"], parts=["audit"]).headline)
    assert "tried (shift_logits, split_units, permute_units) moved the following" in text
    assert ", though others might: margin_mean." in text
    assert "10 other known symmetries do not apply to this network; the audit says why." in text
    assert "Not defined here: path_norm (" in text


def test_sentences_of_one() -> None:
    report = measure(net(), points(1), measures=["trace"], parts=[])
    assert report.settings["samples"] == "1 of 1"
    assert "of the one train sample" in report.headline[0]
    curved = dataclasses.replace(measure(net(), points(), measures=["trace"], parts=[]), layers={})
    assert curved.traces is not None
    flat = dataclasses.replace(curved.traces, values=torch.ones_like(curved.traces.values))
    alike = wording.about_trace(dataclasses.replace(curved, traces=flat), curved.row("trace"))
    assert re.search(r"; the loss is as curved at the \d+ misclassified samples as at the correct ones\.$", alike)


def test_a_relation_is_claimed_only_where_it_is_certain() -> None:
    report = measure(net(), points(), measures=["trace"], parts=[])
    name = "trace and margin, correct samples"
    found = Correlation(
        r=-0.6, low=-0.8, high=-0.3, n=61, removed=0, r_all=-0.6, spearman=-0.7, slope=-1.0, intercept=0.0
    )
    for change, text in (
        ({}, "the curvature falls with the margin (rank correlation −0.7, 61 samples)."),
        (
            {"removed": 4},
            "the curvature falls with the margin (rank correlation −0.7, 61 samples, 4 outliers left out).",
        ),
        ({"high": 0.2}, "no relation between curvature and margin is certain (rank correlation −0.7, 61 samples)."),
        ({"spearman": 0.1}, "no relation between curvature and margin is certain (rank correlation 0.1, 61 samples)."),
        ({"r": 0.6, "low": 0.3, "high": 0.8, "spearman": 0.7}, "the curvature grows with the margin"),
    ):
        here = dataclasses.replace(report, correlations={name: dataclasses.replace(found, **change)})
        assert wording.about_correlation(here).startswith(f" Among correct samples {text}")


def test_what_does_not_fit_the_time_limit_is_listed() -> None:
    report = measure(net(), points(), time_limit=1e-9)
    assert report.rows == ()
    assert {"trace", "audit", "spectrum", "landscape", "pictures"} <= set(report.left_out)
    assert set(report.left_out.values()) == {"no time for it within the limit of 1e-09 s"}  # one reason, one line
    everything = measure(net(), points(), measures=["trace"], parts=[], time_limit=1e9)
    assert everything.left_out == {}
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 4,000,000,000, got -1"):
        measure(net(), points(), seed=-1)
    with pytest.raises(InputError, match="time_limit must be a positive number of seconds, got 0"):
        measure(net(), points(), time_limit=0)


def test_margins_that_are_known_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0  # by a clock that only the trace moves, however busy the machine is
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: now))

    def slow(what: str, done: int, total: int) -> None:
        nonlocal now
        now += 0.6 * (what == "trace")

    report = measure(net(), points(), measures=["trace", "margin_mean"], parts=[], time_limit=0.5, progress=slow)
    assert report.row("margin_mean").kind == "exact"
    assert list(report.left_out) == ["trace", "correlations"]


def test_an_interrupt_leaves_a_partial_report_that_says_so() -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "mean_aceht":
            raise KeyboardInterrupt

    report = measure(net(), points(), measures=FAST, progress=interrupt)
    assert "interrupted at step" in report.partial
    assert report.row("trace").kind == "exact"
    assert report.left_out["audit"] == "interrupted"
    assert report.headline[0].startswith("This report is not complete")
    assert "PARTIAL" in str(report)


def test_regression_has_no_margins_and_says_so() -> None:
    model = nn.Linear(4, 2)
    data = torch.rand(12, 4), torch.rand(12, 2)
    report = measure(model, data, loss="squared_error", measures=["trace", "margin_mean"], parts=["pictures"])
    assert (report.margins, report.predicted) == (None, None)
    assert math.isnan(report.fits["train"].accuracy.value)
    assert report.row("margin_mean").kind == "undefined"
    assert report.row("trace").value.value > 0
    assert "margins" in report.left_out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"measures": ["trce"]}, "unknown measure 'trce': did you mean 'trace'"),
        ({"parts": ["spectra"]}, "unknown part 'spectra': did you mean 'spectrum'"),
        ({"test": (torch.rand(2, 16), torch.tensor([0, 7]))}, "target 7"),
        ({"loss": "crossentropy"}, "did you mean 'cross_entropy'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_work(options: dict[str, Any], sentence: str) -> None:
    steps: list[str] = []
    with pytest.raises(InputError, match=sentence):
        measure(net(), points(), progress=lambda what, done, total: steps.append(what), **options)
    assert steps == []


def test_what_the_audit_could_not_decide_is_not_said_to_stay() -> None:
    def row(measure: str, transform: str, verdict: str, ratio: float) -> AuditRow:
        return AuditRow(measure, transform, Estimate(1.0), Estimate(ratio), ratio, math.nan, verdict, False)

    def keeps(scale: float) -> Certificate:
        return Certificate("rescale", "outputs", scale, ("eval",), 0.0, 0.0, 2, "noise")

    rows = [row("stays", "same", "invariant", 1.0), row("stays", "doubled", "changes", 2.0)]
    rows += [row("undecided", "same", "invariant", 1.0), row("undecided", "same too", "unstable", 1.1)]
    rows += [row("moves", "same", "unstable", 1.1), row("moves", "same too", "changes", 0.25)]
    rows += [row("vanishes", "same", "changes", 0.0)]
    audit = Audit(tuple(rows), certificates={"same": keeps(1.0), "same too": keeps(1.0), "doubled": keeps(2.0)})
    moved = audit.moved()
    assert math.isnan(moved.pop("undecided"))
    assert moved == {"stays": 1.0, "moves": 4.0, "vanishes": math.inf}
    sentences = list(wording.about_audit(audit))
    assert sentences == [
        "None of the symmetries tried (same, same too) moved the following, though others might: stays."
    ]


def test_half_precision_is_told() -> None:
    report = measure(net().to(torch.bfloat16), points(), measures=["weight_norm"], parts=[])
    assert report.settings["dtype"] == "float32, a copy of a bfloat16 model"


def test_the_factor_of_the_audit_leaves_out_what_changes_the_outputs() -> None:
    audit = sl.audit(net(), points(), measures=["trace", "margin_mean"], search=False)
    factors = audit.moved()
    row = audit.row("trace", "rescale_layers")
    assert factors["trace"] >= max(row.ratio, 1 / row.ratio)
    assert audit.row("margin_mean", "scale_last_layer").verdict == "changes"
    assert factors["margin_mean"] == 1
