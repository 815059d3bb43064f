"""What symmetries of classifiers and transformers do to measures, and what audit and comparison say of it."""

from __future__ import annotations

import copy
import functools
import math
import runpy
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from zoo_transformers import CLASSES, Gated, OneAttention, sequences, tokens, transformer, vectors

import spiritlevel as sl
from spiritlevel import transforms
from spiritlevel.answers import searching
from spiritlevel.answers.auditing import audit
from spiritlevel.measures import MEASURES, Setting
from spiritlevel.measures.registry import GUIDES
from spiritlevel.results import SYMMETRIES, Audit, AuditRow, ReportRow
from spiritlevel.transforms.families import Family, Mixing, Scaling, Shifting
from spiritlevel.transforms.maps import LinearMap
from spiritlevel.transforms.watched import Watched

Data = tuple[Tensor, Tensor]

# exact ones of every kind, and a few of each other status
FEW = (
    "fisher_rao_norm", "empirical_fisher_trace", "relative_flatness", "layer_scaled_trace", "weight_norm", "path_norm",
    "signal_sharpness", "margin_mean", "mean_aceht", "input_distance", "hidden_margin_median", "adaptive_sharpness_l2",
    "adaptive_sharpness_average", "normalised_sharpness",
)  # fmt: skip


class Recurrent(nn.Module):
    """An LSTM, of whose inside nothing is known, and two layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.lstm(x.unflatten(1, (3, 2)))[0][:, -1]).relu())


def small(name: str) -> tuple[nn.Module, Data]:
    """A network with random parameters, and samples that it classifies correctly."""
    net: nn.Module
    torch.manual_seed(3)
    if name == "plain":
        net, inputs = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, CLASSES)), vectors(12)
    elif name == "batch norm":
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
        inputs = vectors(12)
    elif name == "prelu":
        net, inputs = nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, CLASSES)), vectors(12)
    elif name == "grouped":
        net = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))
        inputs = torch.randn(12, 2, 4, 4, dtype=torch.float64)
    elif name == "residual":
        net, inputs = zoo.Residual(), vectors(12)
    elif name == "lstm":
        net, inputs = Recurrent(), vectors(12)
    elif name == "gated":
        net, inputs = Gated(), vectors(12)
    elif name == "attention":
        net, inputs = OneAttention(), sequences(12)
    else:
        net, inputs = transformer(name)
    net = net.double().eval()
    with torch.no_grad():
        return net, (inputs, net(inputs).argmax(-1))


HAS = {
    "plain": {"shift_logits", "mix_linear", "rescale_layers", "rescale_channels", "split_units", "permute_units"},
    "batch norm": {"fold_batchnorm", "scale_before_batchnorm", "shift_norm_gain", "shift_logits", "permute_units"},
    "prelu": {"rescale_layers", "shift_logits", "split_units", "permute_units"},
    "grouped": {"rescale_channels", "shift_logits", "permute_units"},
    "residual": {"shift_logits", "shift_norm_gain", "split_units", "permute_units"},
    "lstm": {"rescale_layers", "rescale_channels", "shift_logits", "split_units", "permute_units"},
    "gated": {"scale_gate", "shift_logits", "split_units", "permute_units"},
    "attention": {"mix_heads", "mix_linear", "shift_attention_biases", "shift_logits", "permute_units"},
    "bert": {"mix_heads", "shift_attention_biases", "shift_logits", "split_units", "permute_units"},
    "gpt": {"mix_heads", "shift_attention_biases", "shift_norm_gain", "shift_logits", "permute_units"},
    "llama": {"mix_heads", "shift_norm_gain", "scale_gate", "rotate_stream", "shift_logits", "permute_units"},
    "vit": {"mix_heads", "shift_attention_biases", "shift_norm_gain", "shift_logits", "permute_units"},
    "lora": {"mix_linear", "shift_logits", "permute_units"},
}


@functools.cache
def audited(name: str, every: bool = False) -> Audit:
    net, data = small(name)
    return audit(net, data, measures="all" if every else FEW, transforms=SYMMETRIES, search=False)


def wrong(row: AuditRow) -> bool:
    """Whether a declared invariance does not hold: to 1e-6, 1e-10 under permutations, or within the error."""
    if row.verdict == "not converged":
        return False
    bound = row.lower_bound or row.before.status == "converged" or row.before.stderr or row.after.stderr
    if bound:
        return row.verdict != "invariant"
    limit = 1e-10 if row.transform == "permute_units" else 1e-6
    return not abs(row.after.value - row.before.value) <= limit * abs(row.before.value)


def check(found: Audit, name: str) -> None:
    assert HAS[name] <= set(found.tried), found.skipped
    assert set(found.tried) | set(found.absent) == set(SYMMETRIES)
    faults = [str(row) for row in found.rows if row.declared and wrong(row)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", HAS)
def test_what_is_declared_to_survive_a_symmetry_does(name: str) -> None:
    check(audited(name), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", HAS)
def test_what_is_declared_to_survive_a_symmetry_does_for_every_measure(name: str) -> None:
    check(audited(name, every=True), name)


SURVIVES_WHERE_TRIED = {  # not declared, since a network can be built that moves it; none of those above does
    ("relative_flatness", "mix_heads"), ("relative_flatness", "shift_attention_biases"),
    ("hidden_margin_median", "mix_heads"), ("normalised_sharpness", "split_units"),
}  # fmt: skip


def test_what_is_not_declared_to_survive_a_symmetry_is_moved_by_it_somewhere() -> None:
    rows = [row for name in HAS for row in audited(name).rows]
    seen = {(row.measure, row.transform) for row in rows}
    moved = {(row.measure, row.transform) for row in rows if row.verdict == "changes"}
    undeclared = {pair for pair in seen if pair[1] not in MEASURES[pair[0]].invariant_to}
    exact = {(row.measure, row.transform) for row in rows if not row.before.stderr}
    assert exact & undeclared - moved <= SURVIVES_WHERE_TRIED
    assert not {pair for pair in moved if pair[1] in MEASURES[pair[0]].invariant_to}


def test_every_symmetry_is_declared_for_every_measure_that_sees_outputs_only() -> None:
    for name in ("margin_mean", "margin_q50", "mean_aceht", "margin_bound", "input_distance", "input_distance_inf"):
        assert set(SYMMETRIES) <= MEASURES[name].invariant_to
    for measure in MEASURES.values():
        assert ("permute_units" in measure.invariant_to) == (measure.name != "box_sharpness_subspace")


def test_the_page_of_symmetries_is_up_to_date() -> None:
    root = Path(__file__).parents[1]
    made = runpy.run_path(str(root / "tools" / "make_symmetries_doc.py"))["to_markdown"]()
    assert (root / "docs" / "symmetries.md").read_text(encoding="utf-8") == made


# ---------------------------------------------------------------- one row for every logit


@functools.cache
def digits() -> tuple[nn.Module, Data]:
    """A network 64-32-10, trained on handwritten digits."""
    torch.manual_seed(0)
    (inputs, targets), net = (
        sl.data.load("digits").train,
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    inputs, net = inputs.flatten(1).double(), net.double()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for batch in torch.randint(len(targets), (150, 64)):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()
        optimiser.step()
    return net, (inputs[:150], targets[:150])


def test_one_row_added_to_every_row_of_the_last_layer_moves_what_weighs_by_size() -> None:
    net, data = digits()
    shifted = copy.deepcopy(net)
    with torch.no_grad():
        shifted[2].weight += 2 * torch.randn(32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        apart = net(data[0]).softmax(1) - shifted(data[0]).softmax(1)
    assert float(apart.abs().max()) < 1e-12
    seen = {  # on another network of this kind
        "adaptive_sharpness_l2": 68.0,
        "adaptive_sharpness_average": 18.0,
        "pac_bayes_magnitude": 16.0,
        "path_norm": 4.0,
    }
    for name, factor in seen.items():
        before, after = (MEASURES[name](each, data).value for each in (net, shifted))
        assert factor / 4 < after / before < factor * 4, name
        assert "shift_logits" not in MEASURES[name].invariant_to
    for name in ("trace", "fisher_rao_norm", "relative_flatness", "signal_sharpness", "margin_mean", "mean_aceht"):
        before, after = (MEASURES[name](each, data).value for each in (net, shifted))
        assert after == pytest.approx(before, rel=1e-9), name


def test_the_audit_finds_that_row_by_itself_and_says_so() -> None:
    net, data = digits()
    chosen = ["adaptive_sharpness_average", "path_norm", "fisher_rao_norm", "margin_mean"]
    found = audit(net, data, measures=chosen, transforms=["shift_logits"])
    moved = found.moved()
    assert moved["path_norm"] > 3
    assert moved["adaptive_sharpness_average"] > 3
    assert moved["fisher_rao_norm"] == moved["margin_mean"] == 1
    assert found.moved_by("path_norm") == "shift_logits"
    (worst,) = (item for item in found.worst if item.measure == "path_norm")
    assert (worst.transform, worst.highest_factors["size"]) == ("shift_logits", 10.0)
    assert worst.difference < 1e-12
    assert worst.factor > found.row("path_norm", "shift_logits").factor
    assert found.scope == "Tried, outputs or probabilities kept: shift_logits."
    assert found.scope in str(found)
    both = audit(net, data, measures=["margin_mean"], transforms=["shift_logits", "scale_last_layer"])
    assert both.scope == f"{found.scope} Changes the outputs, so what it moves does not count: scale_last_layer."


def test_a_loss_that_sees_the_logits_is_not_audited_under_their_shift() -> None:
    net, (inputs, _) = small("plain")
    targets = torch.randn(12, CLASSES, dtype=torch.float64)
    found = audit(
        net, (inputs, targets), measures="weight_norm", transforms=["shift_logits"], loss="squared_error", search=False
    )
    assert "sees the logits" in found.skipped["shift_logits"]


# ---------------------------------------------------------------- the search

LIMITS = {name: 10.0 if name in searching._SHIFTS else 100.0 for name in transforms.FAMILIES}
WHERE = {
    "shift_logits": "attention", "mix_heads": "attention", "shift_attention_biases": "attention",
    "shift_norm_gain": "llama", "scale_gate": "gated", "mix_linear": "lora", "rotate_stream": "llama",
}  # fmt: skip


def family(name: str) -> tuple[Setting, Family]:
    net, data = small(WHERE[name])
    here = Setting(net, data, probes=8)
    return here, transforms.FAMILIES[name](Watched(name, net, data[0], 0, here.form), LIMITS[name])


@pytest.mark.parametrize("name", transforms.FAMILIES)
def test_a_climb_stays_within_the_size_and_beats_draws_of_that_size(name: str) -> None:
    here, found = family(name)
    points = found.climb(searching._objective(here, found, "length"), 3)
    for move, point in zip(found.moves, points, strict=True):
        if isinstance(move, Mixing):
            assert torch.linalg.cond(point) <= 100 * (1 + 1e-9)
        elif isinstance(move, Scaling):
            assert point.abs().max() / point.abs().min() <= 100 * (1 + 1e-9)
        elif isinstance(move, Shifting):
            entries, values = move.shift(point)
            assert values.norm() <= move.limit * (1 + 1e-9)
            assert len(entries) == len(values)
    end = found.at(points)
    assert end.certificate.relative_difference < 1e-11
    reached, *drawn = (
        MEASURES["weight_norm"].attempt(here.moved(each.model)).value
        for each in (end, *(found.drawn() for _ in range(5)))
    )
    if name == "rotate_stream":  # which keeps all lengths
        assert reached == pytest.approx(max(drawn), rel=1e-9)
    else:
        assert reached > max(drawn)


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("name", ["mix_heads", "shift_attention_biases", "scale_gate"])
def test_the_slope_of_a_climb_is_that_of_what_it_stands_for(name: str, guide: str) -> None:
    """Against differences of log vᵀW'T⁻ᵀGT⁻¹W'v, with the matrix itself."""
    here, found = family(name)
    generator = torch.Generator().manual_seed(5)
    points = [move.identity + 0.2 * torch.rand(move.identity.shape, generator=generator) for move in found.moves]
    along = [torch.randn(point.shape, generator=generator, dtype=torch.float64) for point in points]
    signs = torch.randint(0, 2, here.theta.shape, generator=here.generator(0, searching._PURPOSE)).double() * 2 - 1
    matrix, names = here.gauss_newton.dense(), tuple(here.problem.params)

    def number(size: float) -> float:
        steps, shift = found._made([p + size * d for p, d in zip(points, along, strict=True)])
        mapping = LinearMap(found.shapes, steps)
        after = mapping.on_rows(names, here.theta[:, None], "forward")[:, 0]
        if shift is not None:
            after = after + torch.cat([shift[mapping.layout.entries(each).reshape(-1)] for each in names])
        if guide == "length":
            return 2 * math.log(float(after.norm()))
        weights = {"curvature": torch.ones_like(after), "curvature in sizes": after.abs()}.get(guide)
        if weights is None:
            parts = after.split([tensor.numel() for tensor in here.problem.params.values()])
            weights = torch.cat([part.norm().expand(len(part)) for part in parts])
        u = mapping.on_rows(names, (weights * signs)[:, None], "inverse")[:, 0]
        return math.log(float(u @ matrix @ u))

    leaves = [point.clone().requires_grad_() for point in points]
    steps, shift = found._made(leaves)
    mapping = LinearMap(found.shapes, steps)
    nothing = torch.zeros(mapping.layout.size, dtype=torch.float64)
    value = searching._objective(here, found, guide)(mapping, nothing if shift is None else shift)
    slopes = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    slope = sum(float((s * d).sum()) for s, d in zip(slopes, along, strict=True))
    assert slope == pytest.approx((number(1e-5) - number(-1e-5)) / 2e-5, rel=1e-5, abs=1e-9)


def test_the_audit_reports_what_its_search_reached_and_no_less_than_a_draw() -> None:
    for kind, name in (("attention", "mix_heads"), ("lora", "mix_linear"), ("gated", "scale_gate")):
        net, data = small(kind)
        found = audit(net, data, measures=["weight_norm", "empirical_fisher_trace"], transforms=[name])
        drawn = getattr(transforms, name)(net, data=data[0], size=100.0, seed=0).model
        for item in found.worst:  # layers can be scaled in most networks, too
            before, after = (MEASURES[item.measure](each, data).value for each in (net, drawn))
            assert item.transform == "rescale_layers" or item.highest_factors["size"] == 100.0
            assert item.highest >= after * (1 - 1e-9)
            assert item.factor >= after / before * (1 - 1e-9)
        assert {item.measure for item in found.worst} == {"weight_norm", "empirical_fisher_trace"}
        assert any(item.transform == name and "steps" in item.highest_factors for item in found.worst)


# ---------------------------------------------------------------- words and comparisons


def test_a_row_survives_only_if_it_survives_every_symmetry() -> None:
    net, data = small("plain")
    report = sl.measure(net, data, measures=["path_norm", "margin_mean"], parts=["audit"])
    rows: dict[str, ReportRow] = {row.name: row for row in report.rows}
    assert (rows["path_norm"].invariant, rows["margin_mean"].invariant) == (False, True)
    text = " ".join(report.headline)
    assert "though others might: margin_mean." in text
    assert "7 other known symmetries do not apply" in text
    assert "wherever the function" not in text


@pytest.mark.parametrize("name", ["mix_heads", "shift_logits"])
def test_two_transformers_that_differ_by_a_symmetry_are_the_same_function(name: str) -> None:
    net, (inputs, _) = small("attention")
    inputs = torch.cat([inputs + 0.1 * shift for shift in range(4)])
    with torch.no_grad():
        data = inputs, net(inputs).argmax(-1)
    other = getattr(sl.transforms, name)(net, data=data).model
    found = sl.compare(net, other, data, measures=["weight_norm", "margin_mean", "fisher_rao_norm"])
    same = "probabilities" if name == "shift_logits" else "outputs"
    assert (
        f"both give the same {same}, up to rounding. Numbers that differ describe the parametrisation" in found.advice
    )
    row = found.row("weight_norm")
    assert row.verdict == "not comparable"
    assert row.factor > 1
    assert any(mover in row.note for mover in SYMMETRIES)
    assert found.row("margin_mean").verdict == "equal"
    assert math.isfinite(row.factor)


@functools.cache
def fine_tuned() -> tuple[nn.Module, nn.Module, Data]:
    """A small BERT, tuned from the same start for a few and for many steps."""
    start, _ = transformer("bert")
    inputs = tokens(60)
    targets = (inputs == 3).sum(1).clamp(max=CLASSES - 1)
    found = []
    for steps in (5, 60):
        net = copy.deepcopy(start)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimiser.step()
        found.append(net.eval())
    return found[0], found[1], (inputs, targets)


OF_BOTH = ["largest_eigenvalue", "weight_norm", "signal_sharpness", "margin_mean"]


@pytest.mark.parametrize(
    "name",
    [
        "mix_heads",
        pytest.param("shift_norm_gain", marks=pytest.mark.slow),
        pytest.param("shift_attention_biases", marks=pytest.mark.slow),
    ],
)
def test_a_bert_and_its_image_are_told_to_be_the_same_function(name: str) -> None:
    _, net, data = fine_tuned()
    image = getattr(transforms, name)(net, data=data[0], seed=1).model
    found = sl.compare(net, image, data, names=("tuned", "image"), measures=OF_BOTH)
    same = "both give the same outputs, up to rounding. Numbers that differ describe the parametrisation."
    assert found.advice.endswith(same)
    for measure in ("largest_eigenvalue", "weight_norm"):
        row = found.row(measure)
        assert row.verdict == "not comparable"
        assert 1 < row.factor < math.inf
        assert f"-fold by {found.row(measure).note.split('-fold by ')[1].split()[0]}" in " ".join(found.reasons)
    assert found.row("signal_sharpness").verdict == found.row("margin_mean").verdict == "equal"
    assert found.row("loss").verdict == found.row("accuracy").verdict == "equal"


@pytest.mark.slow
def test_two_berts_tuned_differently_are_compared_by_what_no_symmetry_moves() -> None:
    early, late, data = fine_tuned()
    found = sl.compare(early, late, data, names=("early", "late"), measures=OF_BOTH)
    assert found.advice.startswith("Trust late: it classifies")
    assert "describe the parametrisation" not in found.advice
    assert found.row("accuracy").verdict == found.row("margin_mean").verdict == "b"
    for measure in ("largest_eigenvalue", "weight_norm"):
        row = found.row(measure)
        assert (row.verdict, row.factor > 1) == ("not comparable", True)
        assert "mix_heads" in row.note or "shift_" in row.note or "split_units" in row.note
    assert found.row("signal_sharpness").invariant
    assert "Not comparable, because the parametrisation alone moves them" in " ".join(found.reasons)
