"""The audit: verdicts, predictions against measured ratios, the search for the worst scaling, table and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn

from spiritlevel import transforms
from spiritlevel.answers.auditing import DEFAULT_TRANSFORMS, _verdict, audit
from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, TRANSFORMS
from spiritlevel.results import Audit, Estimate, Result

Data = tuple[Tensor, Tensor]
QUICK = ["trace", "largest_eigenvalue", "fisher_rao_norm", "weight_norm", "path_norm", "margin_mean", "mean_aceht"]


# of `network(norm=True)`
ABSENT = {"mix_heads", "shift_attention_biases", "scale_gate", "mix_linear", "rotate_stream"}
PRESENT = set(TRANSFORMS) - ABSENT


def network(*, norm: bool) -> nn.Module:
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def points(net: nn.Module) -> Data:
    inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        return inputs, net.eval()(inputs).argmax(1)


@pytest.fixture(scope="module")
def normed() -> Audit:
    net = network(norm=True)
    return audit(net, points(net), measures=QUICK, transforms="all")


def test_rows_cover_measures_and_transforms(normed: Audit) -> None:
    assert {(row.measure, row.transform) for row in normed.rows} == {(m, t) for m in QUICK for t in PRESENT}
    assert set(normed.skipped) == ABSENT == set(normed.absent)
    assert set(normed.certificates) == PRESENT
    assert (normed.samples, normed.parameters) == (30, 95)


def test_verdicts_follow_the_declarations(normed: Audit) -> None:
    for row in normed.rows:
        assert row.declared == (row.transform in MEASURES[row.measure].invariant_to)
        assert row.verdict == ("invariant" if row.declared else "changes"), str(row)


def test_predictions_hold(normed: Audit) -> None:
    predicted = [row for row in normed.rows if not math.isnan(row.predicted)]
    assert {"trace", "largest_eigenvalue", "weight_norm", "margin_mean", "path_norm"} <= {r.measure for r in predicted}
    for row in predicted:
        assert row.ratio == pytest.approx(row.predicted, rel=1e-5), str(row)
    assert normed.row("margin_mean", "scale_last_layer").predicted == pytest.approx(2.0)
    assert math.isnan(normed.row("trace", "scale_last_layer").predicted)


def test_the_worst_factor_is_measured_on_a_network_of_the_same_outputs(normed: Audit) -> None:
    net = network(norm=True)
    worst = {item.measure: item for item in normed.worst}
    assert set(worst) == {"trace", "weight_norm", "path_norm"}
    assert (worst["trace"].transform, worst["path_norm"].transform) == ("rescale_layers", "shift_logits")
    assert worst["trace"].factor > 100
    assert worst["trace"].difference < 1e-12
    net_data = points(net)
    moved = transforms.rescale_layers(net, worst["trace"].highest_factors, data=net_data).model
    again = MEASURES["trace"](moved, net_data).value
    assert again == pytest.approx(worst["trace"].highest, rel=1e-9)
    assert "at the same outputs" in str(worst["trace"])
    assert "at the same probabilities" in str(replace(worst["trace"], transform="shift_logits"))


def test_a_search_finds_no_factor_in_rounding() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(20, 4), torch.arange(20) % 3
    found = audit(net, data, measures=["relative_flatness", "weight_norm"], transforms=["mix_linear"])
    row = found.row("relative_flatness", "mix_linear")
    assert row.verdict == "invariant"
    assert row.before.value != row.after.value  # float32
    assert [item.measure for item in found.worst] == ["weight_norm"]


def test_json_round_trip_and_table(normed: Audit, tmp_path: Path) -> None:
    text = normed.to_json(tmp_path / "audit.json")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))
    again = Result.from_json(tmp_path / "audit.json")
    assert isinstance(again, Audit)
    assert str(again) == str(normed)
    lines = str(normed).splitlines()
    heading = " ".join(lines[:3])
    assert all(heading.count(word) >= 1 for name in PRESENT for word in name.split("_"))
    line = next(line for line in lines if line.startswith("path_norm"))
    cells = dict(zip([name for name in TRANSFORMS if name in PRESENT], line.split()[2:], strict=True))
    assert {name for name, cell in cells.items() if cell == "="} == MEASURES["path_norm"].invariant_to & PRESENT
    assert cells["scale_last_layer"] == cells["rescale_all"] == "×2"


def test_what_a_network_does_not_allow_is_left_out_with_a_reason() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    found = audit(net, points(net), measures=["weight_norm", "path_norm"], search=False)
    applied = {"shift_logits", "split_units", "permute_units", "scale_last_layer"}
    assert set(found.skipped) == {*DEFAULT_TRANSFORMS, "path_norm"} - applied
    assert "no two layers" in found.skipped["rescale_layers"]
    assert "ReLU networks only" in found.skipped["path_norm"]
    assert {(row.measure, row.transform) for row in found.rows} == {("weight_norm", name) for name in applied}
    assert not found.worst
    assert "left out: path_norm" in str(found)


def test_transforms_of_the_other_batch_norm_mode_are_left_out() -> None:
    net = network(norm=True)
    found = audit(net, points(net), measures="weight_norm", batch_norm="batch", search=False)
    assert "eval only, not 'batch'" in found.skipped["fold_batchnorm"]
    assert "fold_batchnorm" not in found.certificates


def test_own_transforms_with_mapped_inputs() -> None:
    net = network(norm=False)
    data = points(net)
    mapped = transforms.input_map(net, torch.tensor([2.0, 4.0, 0.5, 1.0]), data=data)
    found = audit(net, data, measures=["margin_mean", "mean_aceht"], transforms={"units": mapped}, search=False)
    assert found.row("margin_mean", "units").verdict == "invariant"
    assert found.row("mean_aceht", "units").verdict == "changes"


def test_lower_bounds_are_called_so() -> None:
    net = network(norm=False)
    found = audit(net, points(net), measures="adaptive_sharpness_linf", transforms="rescale_layers", search=False)
    assert found.rows[0].lower_bound
    assert found.rows[0].verdict == "invariant"
    assert "≥ " in str(found)
    assert "(lower bound)" in str(found.rows[0])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (Estimate(1.0), Estimate(1.0 + 1e-9), "invariant"),
        (Estimate(1.0), Estimate(1.1), "changes"),
        (Estimate(1.0, 0.01), Estimate(1.1, 0.01), "changes"),
        (Estimate(1.0, 0.05), Estimate(1.1, 0.05), "unstable"),
        (Estimate(1.0, math.inf), Estimate(9.0, 0.05), "unstable"),
        (Estimate(1.0), Estimate(math.nan, reason="gone"), "unstable"),
        (Estimate(1.0), Estimate(math.inf), "unstable"),
        (Estimate(1.0), Estimate(1.0, reason="500 products", status="not converged"), "not converged"),
        (Estimate(0.0), Estimate(0.0), "invariant"),
    ],
)
def test_verdict(before: Estimate, after: Estimate, verdict: str) -> None:
    assert _verdict(before, after, 1e-6)[0] == verdict


def test_lower_bounds_that_differ_little_are_the_same_only_where_theory_says_so() -> None:
    before, near, far = (Estimate(value, status="lower bound") for value in (1.0, 1.013, 1.03))
    assert _verdict(before, near, 1e-6, found=0.02)[0] == "unstable"
    assert _verdict(before, near, 1e-6, declared=True, found=0.02)[0] == "invariant"
    assert _verdict(before, far, 1e-6, found=0.02)[0] == "changes"
    assert _verdict(before, before, 1e-6, found=0.02) == ("invariant", "")


def test_unknown_names_are_refused() -> None:
    net = network(norm=False)
    with pytest.raises(InputError, match="unknown measure 'trase'"):
        audit(net, points(net), measures="trase")
    with pytest.raises(InputError, match="unknown transform 'rescale'"):
        audit(net, points(net), transforms="rescale")
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 4,000,000,000, got -1"):
        audit(net, points(net), measures="trace", seed=-1)  # not an empty table
    with pytest.raises(InputError, match="no row for measure 'trace'"):
        Audit(rows=()).row("trace", "rescale_layers")


def test_the_audit_repeats_reports_progress_and_leaves_no_trace(untouched: Untouched) -> None:
    net = network(norm=True)
    data = points(net)
    net.train()
    steps: list[tuple[str, int, int]] = []
    chosen = ["frobenius_norm", "adaptive_sharpness_average"]
    with untouched(net):
        first = audit(net, data, measures=chosen, progress=lambda *step: steps.append(step), seed=4)
    assert first.to_json() == audit(net, data, measures=chosen, seed=4).to_json()
    done, totals = [done for _, done, _ in steps], {total for *_, total in steps}
    assert done == sorted(set(done)), "never back"
    assert (done[0], totals) == (0, {done[-1] + 1}), "what the model has no transform for is skipped over"
    assert steps[0][0] == "frobenius_norm"
    assert steps[2][0] == "frobenius_norm after rescale_layers"
    assert steps[-1][0] == "the search for the worst scaling"
    assert first.row("adaptive_sharpness_average", "rescale_channels").verdict == "invariant"


class DividedByItsLargest(nn.Module):
    """A number leaves the tensors, so that no factor is seen to pass here."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(hidden / self.first.weight.amax().item())


def test_a_network_whose_certificate_fails_is_audited_without_that_transform() -> None:
    torch.manual_seed(0)
    data = torch.randn(12, 4), torch.arange(12) % 3
    result = audit(DividedByItsLargest(), data, measures=["weight_norm"], transforms=["rescale_layers"])
    assert "rescale_layers" in result.skipped
    assert not result.worst
