"""What a number is worth is a value that it carries: from the estimators to the report, the audit and the page."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from io import StringIO

import pytest
import torch
from reports import report as made_up
from rich.console import Console
from torch import nn

import spiritlevel as sl
from spiritlevel.answers.auditing import _verdict
from spiritlevel.cli.show import show_comparison, show_report
from spiritlevel.errors import InputError
from spiritlevel.estimators import outermost
from spiritlevel.measures import MEASURES
from spiritlevel.page import page
from spiritlevel.results import (
    STATUSES,
    Audit,
    AuditRow,
    Certificate,
    Comparison,
    ComparisonRow,
    Eigenpairs,
    Estimate,
    Report,
    ReportRow,
    WorstFactor,
    figure,
    in_short,
)


def row(name: str, value: Estimate, cost: str = "matvecs") -> ReportRow:
    return ReportRow(name, value, "sharper", "curvature", "what it means", "λ", "paper C", (), cost)


def on_the_terminal(report: Report) -> str:
    """What `spiritlevel measure` prints."""
    out = StringIO()
    settings = {"samples": "all 8", **report.settings}
    show_report(dataclasses.replace(report, settings=settings), Console(file=out, width=120, highlight=False))
    return out.getvalue()


# ---------------------------------------------------------------- the value


@pytest.mark.parametrize(
    ("estimate", "status", "shown"),
    [
        (Estimate(2.5), "exact", "2.5"),
        (Estimate(2.5, 0.1), "estimated", "2.5 ± 0.1"),
        (Estimate(2.5, tolerance=0.01), "converged", "2.5 ± 0.01"),
        (Estimate(2.5, tolerance=1e-9), "converged", "2.5"),
        (Estimate(2.5, status="lower bound"), "lower bound", "≥ 2.5"),
        (
            Estimate(2.5, reason="5 products", status="not converged"),
            "not converged",
            "2.5 (not converged: 5 products)",
        ),
        (Estimate(2.5, tolerance=math.nan), "converged", "2.5 ± unknown"),
        (Estimate(math.nan, reason="no layer"), "undefined", "undefined (no layer)"),
        (Estimate(math.nan, status="exact"), "undefined", "undefined"),
        (dataclasses.replace(Estimate(2.5), stderr=0.1), "estimated", "2.5 ± 0.1"),
        (dataclasses.replace(Estimate(math.nan), value=2.5), "exact", "2.5"),
    ],
)
def test_the_status_follows_the_number_and_goes_to_json_and_back(estimate: Estimate, status: str, shown: str) -> None:
    assert (estimate.status, str(estimate)) == (status, shown)
    assert estimate.exact == (status == "exact")
    again = Estimate.from_json(estimate.to_json())
    assert (again.status, str(again)) == (status, shown)
    assert status in STATUSES


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(InputError, match="must be one of exact"):
        Estimate(1.0, status="nearly exact")


def test_intervals_hold_what_the_status_allows() -> None:
    assert Estimate(2.0, tolerance=0.5).interval() == (1.5, 2.5)
    low, high = Estimate(2.0, 0.1, 9).interval()
    wide = Estimate(2.0, 0.1, 9, tolerance=0.5).interval()
    assert wide == pytest.approx((low - 0.5, high + 0.5))
    assert Estimate(2.0, status="lower bound").interval() == (2.0, math.inf)
    assert all(map(math.isnan, Estimate(2.0, status="not converged").interval()))


def test_a_sign_is_known_only_where_the_interval_is_on_one_side_of_zero() -> None:
    assert Estimate(0.0025, tolerance=0.03).sign == 0
    assert Estimate(-0.0029, tolerance=0.001).sign == -1
    assert Estimate(0.1, 0.1, 9).sign == 0
    assert Estimate(0.1, status="lower bound").sign == 1
    assert Estimate(5.0, status="not converged").sign == 0


def test_files_of_the_first_version_get_the_status_that_they_did_not_say() -> None:
    def old(value: Estimate) -> dict[str, object]:
        return {key: item for key, item in value.to_dict().items() if key not in ("status", "tolerance")}

    open_end = {**old(Estimate(3.0)), "reason": "not converged: 5 products"}
    found = Estimate.from_dict(open_end)
    assert (found.status, found.reason) == ("not converged", "5 products")
    rows = [
        {**row("ball_sharpness", Estimate(0.5)).to_dict(), "value": old(Estimate(0.5)), "kind": "lower bound"},
        {**row("largest_eigenvalue", Estimate(0.5)).to_dict(), "value": old(Estimate(0.5)), "kind": "exact"},
        {**row("largest_eigenvalue", Estimate(0.5)).to_dict(), "value": open_end, "kind": "exact"},
        {**row("trace", Estimate(0.5), "backward").to_dict(), "value": old(Estimate(0.5)), "kind": "exact"},
        {**row("trace", Estimate(0.5), "backward").to_dict(), "value": old(Estimate(0.5, 0.1)), "kind": "estimate"},
    ]
    read = [ReportRow.from_dict(each) for each in rows]
    assert [each.kind for each in read] == ["lower bound", "converged", "not converged", "exact", "estimated"]
    assert math.isnan(read[1].value.tolerance)  # it was not kept
    assert all(map(math.isnan, read[1].interval))
    given = (0.1, math.nan, math.nan, "exact", 1.0, 1.0, "no interval", "sharper", "what it means", False)
    for name, how in (("ball_sharpness", "lower bounds"), ("largest_eigenvalue", "tolerance"), ("path_norm", "exact")):
        pair = ComparisonRow(name, Estimate(1.0), Estimate(1.1), *given)
        data = {**pair.to_dict(), "a": old(Estimate(1.0)), "b": old(Estimate(1.1))}
        assert ComparisonRow.from_dict(data).how == how
        assert (ComparisonRow.from_dict(data).b.status == "exact") == (how == "exact")
    audit = AuditRow("ball_sharpness", "rescale_layers", Estimate(1.0), Estimate(2.0), 2.0, math.nan, "changes", False)
    data = {**audit.to_dict(), "before": old(Estimate(1.0)), "after": old(Estimate(2.0)), "lower_bound": True}
    again = AuditRow.from_dict(data)
    assert again.lower_bound
    assert again.after.status == "lower bound"
    comparison = Comparison(("a", "b"), (), "none", samples=500, settings={"samples": "500 of 1,797, drawn at random"})
    data = {key: item for key, item in comparison.to_dict().items() if key != "population"}
    assert Comparison.from_dict(data).population == 1797


# ---------------------------------------------------------------- the ends of a spectrum


def bulk(seed: int, size: int = 600, top: float = 300.0) -> torch.Tensor:
    """A few large eigenvalues, and very many near 0 on both sides, as a rescaled network has them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, generator=generator, dtype=torch.float64) ** 4 * 0.05
    values[:20] = -torch.rand(20, generator=generator, dtype=torch.float64) * 0.003
    values[-5:] = torch.linspace(0.1, 1, 5, dtype=torch.float64) * top
    return values


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("which", ["smallest", "largest", "magnitude"])
def test_an_end_lies_within_its_tolerance_and_has_the_right_sign(seed: int, which: str) -> None:
    values = bulk(seed)
    q = torch.linalg.qr(torch.randn(600, 600, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).Q
    found = outermost((q * values) @ q.T, which, seed=seed)
    true = float(values.min() if which == "smallest" else values.max())
    assert found.status == "converged"
    assert abs(found.value - true) <= found.tolerance
    assert found.sign * true > 0
    assert found.matvecs <= 128
    if which != "smallest":
        assert found.tolerance <= 1e-4 * true


def test_a_residual_alone_would_have_lied_about_the_smallest_eigenvalue() -> None:
    missed = 0
    for seed in range(10):
        values = bulk(seed)
        pair = sl.eigenvalues(torch.diag(values), which="smallest", seed=seed)
        end = pair.outermost()
        missed += abs(end.value - float(values.min())) > float(pair.residuals[0])
        assert abs(end.value - float(values.min())) <= end.tolerance, seed
    assert missed  # so that the test above can fail


def test_a_matrix_without_negative_eigenvalues_gets_no_negative_sign() -> None:
    values = torch.linspace(0, 1, 400, dtype=torch.float64).square()
    found = outermost(torch.diag(values), "smallest")
    assert found.sign >= 0
    assert found.tolerance < 1e-3


def test_a_spectrum_says_how_far_its_ends_are_known() -> None:
    values = bulk(3)
    found = sl.spectrum(torch.diag(values), probes=4, steps=50)
    for pair, true in ((found.smallest, values.min()), (found.largest, values.max())):
        assert abs(pair.outermost().value - float(true)) <= pair.outermost().tolerance
    assert f"from {found.smallest.outermost()} to" in str(found)


def test_an_open_iteration_is_not_exact() -> None:
    found = sl.spectral_norm(torch.diag(bulk(0)), max_matvecs=1)
    assert not found.exact
    assert found.status == "not converged"
    assert "not converged" in str(found)


@pytest.fixture(scope="module")
def rescaled() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A network fitted to digits, its layers rescaled by 8 at the same function."""
    inputs, targets = (part[:300] for part in sl.data.load("digits").train)
    inputs = inputs.flatten(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        net[0].weight.mul_(8), net[0].bias.mul_(8), net[2].weight.div_(8)
    return net, (inputs, targets)


def test_the_smallest_eigenvalue_of_a_rescaled_network_has_the_sign_of_the_dense_one(rescaled) -> None:
    net, (inputs, targets) = rescaled
    double = sl.hessian(copy.deepcopy(net).double(), (inputs.double(), targets)).dense()
    true = torch.linalg.eigvalsh((double + double.T) / 2)
    found = sl.measure(
        net, (inputs, targets), measures=["smallest_eigenvalue", "largest_eigenvalue"], parts=["spectrum"]
    )
    low, high = found.row("smallest_eigenvalue"), found.row("largest_eigenvalue")
    assert low.kind == high.kind == "converged"
    for each, value in ((low, true[0]), (high, true[-1])):
        assert abs(each.value.value - float(value)) <= each.value.tolerance + 1e-5 * float(true[-1])
        assert each.value.sign * float(value) >= 0
    line = next(line for line in str(found).splitlines() if line.startswith("smallest_eigenvalue"))
    assert "± " in line
    assert " exact " not in line
    assert "smallest" in page(found)


def test_the_audit_reports_no_change_of_sign_of_an_eigenvalue(rescaled) -> None:
    net, data = rescaled
    found = sl.audit(net, data, measures=["smallest_eigenvalue"], transforms=["rescale_layers", "rescale_channels"])
    for each in found.rows:
        assert not each.before.sign * each.after.sign < 0
        assert not each.ratio < 0
    assert not math.isinf(found.moved()["smallest_eigenvalue"])


# ---------------------------------------------------------------- the audit


def test_a_forbidden_change_of_sign_is_an_error_and_not_a_finding() -> None:
    before, after = Estimate(-1.0, tolerance=0.1), Estimate(2.0, tolerance=0.1)
    assert _verdict(before, after, 1e-6)[0] == "changes"
    verdict, note = _verdict(before, after, 1e-6, keeps_sign=True)
    assert verdict == "unstable"
    assert "no linear map" in note
    assert MEASURES["smallest_eigenvalue"].keeps_sign
    assert not MEASURES["trace"].keeps_sign  # diag(1, −2) rescaled has a trace of either sign


def audited(before: Estimate, after: Estimate, ratio: float = math.nan) -> Audit:
    verdict, note = _verdict(before, after, 1e-6)
    each = AuditRow("λ", "rescale_layers", before, after, ratio, math.nan, verdict, False, note)
    kept = Certificate("rescale_layers", "outputs", 1.0, ("eval",), 0.0, 0.0, 8, "8 samples")
    return Audit((each,), certificates={"rescale_layers": kept})


def test_a_difference_within_the_tolerances_is_no_change() -> None:
    found = audited(Estimate(0.0025, tolerance=0.03), Estimate(-0.02, tolerance=0.03))
    assert found.rows[0].verdict == "unstable"
    assert "known to" in found.rows[0].note or "tolerances" in found.rows[0].note
    assert math.isnan(found.moved()["λ"])


def test_a_factor_is_said_as_far_as_the_errors_leave_it() -> None:
    assert audited(Estimate(2.0), Estimate(6.0)).moved()["λ"] == 3.0
    assert audited(Estimate(2.0, tolerance=1.0), Estimate(9.0, tolerance=1.5)).moved()["λ"] == pytest.approx(2.5)
    # the first value may be 0, so that only the larger end of its interval bounds the factor
    assert audited(Estimate(0.1, tolerance=0.2), Estimate(6.0, tolerance=0.1)).moved()["λ"] == pytest.approx(5.9 / 0.3)
    assert audited(Estimate(-1.0), Estimate(1.0)).moved()["λ"] == math.inf
    assert audited(Estimate(1.0), Estimate(0.0)).moved()["λ"] == math.inf


def test_the_search_says_no_factor_that_its_errors_do_not_leave() -> None:
    sure = WorstFactor("trace", 2.0, 1.0, 8.0, {}, {}, 0.0)
    assert sure.factor == 4.0
    assert str(sure).endswith("took it from 2 to anything between 1 and 8")
    rough = dataclasses.replace(sure, errors=(1.0, 0.5, 2.0))
    assert rough.factor == pytest.approx(6 / 3)
    assert str(rough).endswith(
        "at least 2-fold at the same outputs: rescale_layers took it from 2 ± 1 to anything between 1 ± 0.5 and 8 ± 2"
    )
    unsure = dataclasses.replace(sure, errors=(1.5, 3.0, 7.0))
    assert math.isnan(unsure.factor)
    assert "too large to tell" in str(unsure)
    assert "-fold" not in str(unsure)


def test_ratios_of_rows_are_given_only_where_both_signs_are_known() -> None:
    """A tanh network whose trace is nearly 0 within its error."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        data = torch.randn(40, 6), torch.randint(0, 3, (40,))
    for each in sl.audit(net, data, transforms=["scale_last_layer"], search=False).rows:
        known = each.before.sign * each.after.sign > 0 or each.verdict == "invariant"
        assert math.isnan(each.ratio) != known, each.measure


# ---------------------------------------------------------------- what is printed


@pytest.mark.parametrize(
    "value",
    [
        Estimate(0.5, status="lower bound"),
        Estimate(0.5, reason="5 products", status="not converged"),
        Estimate(0.5, tolerance=0.01),
        Estimate(0.5, tolerance=1e-12),
        Estimate(0.5, tolerance=math.nan),
        Estimate(0.5, 0.1, 9),
        Estimate(0.5, 0.0, 9, status="estimated"),
    ],
    ids=lambda value: value.status,
)
def test_only_exact_numbers_are_printed_as_exact(value: Estimate) -> None:
    found = Report("net", (row("box_sharpness", value),), settings={"samples": "all 8"})
    for again in (found, Report.from_json(found.to_json())):
        line = next(line for line in str(again).splitlines() if line.startswith("box_sharpness"))
        shown = next(line for line in on_the_terminal(again).splitlines() if "box_sharpness" in line)
        section = page(again).split('id="r0-measures"', 1)[1].split("</table>", 1)[0]
        for text in (line, shown, section):
            assert "exact" not in text, text
            assert value.status in text or "±" in text or "0.01" in text or "unknown" in text or "0.2" in text, text
    assert "exact" not in in_short(value)


def test_an_iteration_that_was_stopped_is_never_printed_as_exact() -> None:
    """A real one, from the operator to the report, the terminal and the page."""
    found = sl.spectral_norm(torch.diag(bulk(0)), max_matvecs=1)
    assert found.status == "not converged"
    shown = Report("net", (row("largest_eigenvalue", found),), settings={"samples": "all 8"})
    for text in (str(shown), on_the_terminal(shown), page(shown).split("<script", 1)[0].split("</style>")[-1]):
        assert "exact" not in text.replace("exactly", "")
        assert "not converged" in text
    assert f"{figure(found.value)} …" in on_the_terminal(shown)
    assert shown.frame()["status"].to_list() == ["not converged"]


def test_a_comparison_marks_what_did_not_converge_or_is_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    given = (0.1, math.nan, math.nan, "not converged", 1.0, 1.0, "no interval", "sharper", "what it means", False)
    stopped = Estimate(1.5, status="not converged", reason="5 products")
    rows = (
        ComparisonRow("largest_eigenvalue", stopped, Estimate(1.1), *given),
        ComparisonRow("ball_sharpness", Estimate(2.5, status="lower bound"), Estimate(1.1), *given),
    )
    show_comparison(Comparison(("a", "b"), rows, "none", samples=8))
    first, second = (line for line in capsys.readouterr().out.splitlines() if "largest" in line or "ball" in line)
    assert "1.5 …" in first
    assert "≥ 2.5" in second
    assert "≥ 1.1" not in second
    text = str(Comparison(("a", "b"), rows, "none", samples=8))
    assert "not converged" in text
    assert "exact" not in text


def test_exact_numbers_are_called_exact() -> None:
    found = Report("net", (row("trace", Estimate(0.5), "backward"),), settings={"samples": "all 8"})
    assert " exact " in str(found)
    assert " exact " in on_the_terminal(found)


@pytest.mark.parametrize("names", [["ball_sharpness"], ["box_sharpness"], ["adaptive_sharpness_l2"]])
def test_lower_bounds_are_never_exact(names: list[str]) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    data = torch.randn(12, 2), torch.tensor([0, 1] * 6)
    found = sl.measure(net, data, measures=names, parts=["audit"])
    assert [each.kind for each in found.rows] == ["lower bound"]
    assert not found.rows[0].value.exact
    assert all(each.lower_bound for each in found.audit.rows)
    assert "≥ " in str(found.audit)
    assert "exact" not in on_the_terminal(found).split("larger is")[1].split("\n\n")[0].replace("left out", "")
    both = sl.compare(net, nn.Linear(2, 2), data, measures=names, audit=False).row(names[0])
    assert both.how == "lower bounds"


def test_a_page_says_how_far_the_spectrum_reaches_and_claims_no_sign_that_is_open() -> None:
    whole = made_up(20)
    assert whole.spectrum is not None

    def text(value: float, residual: float, reach: float | None, converged: bool = True) -> str:
        low = Eigenpairs(
            torch.tensor([value], dtype=torch.float64),
            None,
            torch.tensor([residual], dtype=torch.float64),
            converged,
            60,
            which="smallest",
            reach=reach,
        )
        found = dataclasses.replace(whole, spectrum=dataclasses.replace(whole.spectrum, smallest=low))
        return page(found).split('id="r0-spectrum"', 1)[1].split("</p>", 1)[0]

    open_end = "Whether the smallest lies below 0 cannot be told"
    assert open_end in text(6.3e-7, 0.03, 0.05)
    assert "± 0.05" in text(6.3e-7, 0.03, 0.05)
    assert open_end in text(6.3e-7, 0.03, None)
    assert open_end not in text(-0.4, 1e-5, 1e-3)
    assert "did not converge" in text(-0.4, 0.3, None, converged=False)
    assert "(not converged)" in text(-0.4, 0.3, None, converged=False)


def test_the_curvature_is_compared_only_as_far_as_its_errors_allow() -> None:
    """A mean within its error of 0 has no multiples, whatever the ratio of the two numbers is."""
    from spiritlevel.answers.wording import about_mistakes

    whole = made_up(60)
    assert whole.traces is not None
    assert whole.margins is not None
    correct = torch.arange(60) < 50
    margins = dataclasses.replace(whole.margins, correct=correct)

    def said(right: float, wrong: float, spread: float, population: int | None = None) -> str:
        generator = torch.Generator().manual_seed(0)
        values = torch.where(correct, right, wrong).double()
        noise = spread * torch.randn(1, 9, generator=generator, dtype=torch.float64)  # shared by all samples
        draws = values[:, None] + noise - noise.mean()
        exact = spread == 0
        traces = dataclasses.replace(
            whole.traces,
            values=values,
            stderr=torch.zeros_like(values) if exact else draws.std(1) / 3,
            draws=None if exact else draws,
            exact=exact,
            population=population,
        )
        return about_mistakes(dataclasses.replace(whole, traces=traces, margins=margins))

    unsure = "cannot be told"
    assert "16 times as curved at the 10 misclassified samples" in said(1.0, 16.0, 0.0)
    assert unsure in said(1.0, -0.0056, 0.1)  # a negative multiple
    assert unsure in said(0.01, 16.0, 1.0)  # a denominator that may be 0
    assert unsure in said(1.0, 1.1, 0.5)  # more or less: the interval holds 1
    assert unsure in said(-1.0, -3.0, 0.0)  # a loss that curves downwards is not "3 times as curved"
    assert "times" not in said(1.0, -0.0056, 0.1)
    known = said(1.0, 16.0, 0.1)
    assert "16 times as curved" in known
    assert "within the errors" in known


def test_the_headline_calls_what_it_does_not_know_by_its_name() -> None:
    from spiritlevel.answers.wording import about_trace

    whole = made_up(40)
    unknown = dataclasses.replace(
        row("trace", Estimate(5.0, data_stderr=math.nan), "backward"), subset_error_unknown=True
    )
    text = about_trace(dataclasses.replace(whole, layers={}), unknown)
    assert text.startswith("The mean Hessian trace of the samples measured is 5")
    near_zero = row("trace", Estimate(0.1, 1.0, 9), "backward")
    assert " of it in " not in about_trace(dataclasses.replace(whole, layers={"a": 0.6, "b": 0.4}), near_zero)
    sure = row("trace", Estimate(5.0), "backward")
    assert "60% of it in a" in about_trace(dataclasses.replace(whole, layers={"a": 0.6, "b": 0.4}), sure)


# ---------------------------------------------------------------- comparisons


def compared(a: Estimate, b: Estimate) -> object:
    """A row of a comparison whose measure says these two numbers."""
    from spiritlevel.answers.pairing import Pairing
    from spiritlevel.measures import Measure, Setting
    from spiritlevel.measures.sampling import not_known

    data = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 3)
    first, second = (Setting(nn.Linear(2, 2), data) for _ in range(2))
    values = {id(first): a, id(second): b}
    made = Measure(
        "made_up",
        "",
        "",
        "",
        cost="matvecs",
        compute=lambda setting: values[id(setting)],
        sampling=not_known("made up"),
        family="curvature",
        worth="to a tolerance",
        passes=1,
    )
    return Pairing(first, second, level=0.95, seed=0).row(made)


def test_a_comparison_claims_nothing_within_the_tolerances() -> None:
    near = compared(Estimate(1.0, tolerance=0.1), Estimate(1.05, tolerance=0.1))
    assert (near.verdict, near.how) == ("equal", "tolerance")
    assert "tolerances" in near.note
    far = compared(Estimate(1.0, tolerance=0.1), Estimate(2.0, tolerance=0.1))
    assert (far.verdict, far.how) == ("no interval", "tolerance")
    exact = compared(Estimate(1.0), Estimate(2.0))
    assert (exact.verdict, exact.how, exact.ratio) == ("no interval", "exact", 2.0)
    bounds = compared(Estimate(1.0, status="lower bound"), Estimate(2.0, status="lower bound"))
    assert (bounds.verdict, bounds.how) == ("no interval", "lower bounds")
    unfinished = compared(Estimate(1.0, status="not converged", reason="5 products"), Estimate(2.0))
    assert (unfinished.verdict, unfinished.how) == ("no interval", "not converged")
    assert "5 products" in unfinished.note


def test_a_comparison_gives_no_ratio_of_what_may_be_zero() -> None:
    assert math.isnan(compared(Estimate(0.01, tolerance=0.1), Estimate(5.0, tolerance=0.1)).ratio)
    assert math.isnan(compared(Estimate(-1.0), Estimate(5.0)).ratio)
    assert math.isnan(compared(Estimate(0.1, 0.2, 9), Estimate(5.0, 0.2, 9)).ratio)
    assert compared(Estimate(1.0, 0.01, 9), Estimate(5.0, 0.01, 9)).ratio == 5.0


def test_a_paired_ratio_needs_means_that_are_not_zero() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(50, 2)
        targets = (inputs[:, 0] > 0).long()
        good, chance = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        good.weight.copy_(torch.tensor([[-3.0, 0.0], [3.0, 0.0]])), good.bias.zero_()
        chance.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]])), chance.bias.zero_()
    found = sl.compare(chance, good, (inputs, targets), measures=["margin_mean"], audit=False)
    assert math.isnan(found.row("margin_mean").ratio)  # the first one's margins are 0 within their error
    assert not math.isnan(found.row("loss").ratio)


def test_estimated_traces_are_no_exact_numbers_in_a_comparison() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3)) for _ in range(2)]
        data = torch.randn(30, 4), torch.randint(0, 3, (30,))
    traces = sl.sample_traces(nets[0], data)
    found = sl.compare(*nets, data, measures=["trace"], audit=False).row("trace")
    assert found.a.status == ("exact" if traces.exact else "estimated")


# ---------------------------------------------------------------- others


def test_a_tracker_prints_its_errors() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    tracker = sl.Tracker(net, (torch.randn(8, 2), torch.tensor([0, 1] * 4)), every=1, share=math.inf)
    tracker.step()
    made = {**tracker.rows[0], "trace": 5.0, "trace_stderr": 1.0, "largest_eigenvalue": 3.0, "tolerance": 0.3}
    tracker.rows[:] = [{**made, "converged": True}, {**made, "converged": False}]
    assert "trace 5 ± 20% → 5 ± 20%, λ₁ 3 ± 10% → 3 …" in str(tracker)


def test_rows_of_many_models_say_tolerance_and_status() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    data = torch.randn(12, 2), torch.tensor([0, 1] * 6)
    rows = sl.measures.evaluate(net, data, measures=["largest_eigenvalue", "trace", "normalised_sharpness"])
    assert [each["kind"] for each in rows] == ["converged", "exact", "converged"]
    assert rows[1]["tolerance"] == 0.0
    json.dumps(rows)


def test_a_page_counts_no_margin_as_wider_that_rounding_explains() -> None:
    from reports import comparison as made_up_comparison

    from spiritlevel.page.several import _wider

    found = made_up_comparison(40)
    assert found.margins is not None
    first, _ = found.margins
    shifted = dataclasses.replace(first, signed=first.signed * (1 + 1e-9))
    same = dataclasses.replace(found, margins=(first, shifted))
    assert _wider(same, shifted.signed - first.signed) == "The margins of all samples are the same up to rounding."
    one = first.signed.clone()
    one[0] += 1.0
    text = _wider(
        dataclasses.replace(found, margins=(first, dataclasses.replace(first, signed=one))), one - first.signed
    )
    assert text.startswith(f"{found.names[1]} has the wider margin on 2.5% of these samples, {found.names[0]} on 0.0%")


def test_a_row_that_says_its_status_is_taken_at_its_word() -> None:
    """Files of version 0.1 called an iterated eigenvalue exact; today's call one exact only if it is."""
    value = Estimate(2.0)
    row = ComparisonRow("largest_eigenvalue", value, value, 0.0, 0.0, 0.0, "exact", 1.0, 1.0, "equal", "", "", True)
    data = row.to_dict()
    assert ComparisonRow.from_dict(data).how == "exact"
    older = {**data, "a": {**data["a"]}, "b": {**data["b"]}}
    for key in ("a", "b"):
        del older[key]["status"]
    assert ComparisonRow.from_dict(older).how == "tolerance"
