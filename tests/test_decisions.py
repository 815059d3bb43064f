"""Decisions that rest on changes of the weights: `compare(under=)`, `rank`, their commands and pages."""

from __future__ import annotations

import copy
import itertools
import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import Untouched
from doc_blocks import blocks_of, run
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.answers.bits import at_least_of_more_bits, cheapest
from spiritlevel.answers.changes import rounded
from spiritlevel.cli import main
from spiritlevel.errors import InputError
from spiritlevel.page import page
from spiritlevel.results import Checkpoints, Comparison, Perturbation

NET = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))

def scaled(weight):
    return 1.05 * weight

number = 7
"""


def make() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def trained(seed: int, steps: int) -> nn.Module:
    inputs, targets = sl.data.load("digits").train
    torch.manual_seed(seed)
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (64,))
        optimizer.zero_grad()
        F.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return net.eval()


MODELS = {f"step {steps}": trained(0, steps) for steps in (20, 80, 250)}
OPTIONS: dict[str, Any] = {"names": ("early", "late"), "measures": ["margin_mean"], "audit": False}
TEST: tuple[Tensor, Tensor] = sl.data.load("digits").test


def after(net: nn.Module, bits: int) -> nn.Module:
    other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.copy_(rounded(parameter, bits))
    return other


def losses(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(net(TEST[0]).double(), TEST[1], reduction="none")


# ---------------------------------------------------------------- two models


def test_two_models_after_a_change(untouched: Untouched) -> None:
    a, b = MODELS["step 80"], MODELS["step 250"]
    with untouched(a, b):
        found = sl.compare(
            a, b, TEST, names=("early", "late"), measures=["margin_mean"], audit=False, under="int3,prune:0.3"
        )
    apart = losses(after(b, 3)) - losses(after(a, 3))
    row = found.row("loss under int3")
    assert row.difference == pytest.approx(float(apart.mean()), rel=1e-6)
    plain = stats.t.interval(0.95, len(apart) - 1, float(apart.mean()), float(apart.std()) / math.sqrt(len(apart)))
    assert row.low == pytest.approx(plain[0], abs=0.3 * (plain[1] - plain[0]))  # corrected for skewness
    rise = (losses(after(b, 3)) - losses(b)) - (losses(after(a, 3)) - losses(a))
    assert found.row("rise of the loss under int3").difference == pytest.approx(float(rise.mean()), rel=1e-5)
    right = [(after(net, 3)(TEST[0]).argmax(1) == TEST[1]).double().mean() for net in (a, b)]
    assert found.row("accuracy under int3").a.value == pytest.approx(float(right[0]))
    assert found.row("accuracy under int3").b.value == pytest.approx(float(right[1]))
    assert found.row("accuracy under int3").verdict in ("a", "b", "equal")
    assert "parametrisation" in found.row("loss under int3").note
    assert len(found.under) == 2
    assert all(sentence.startswith("Under ") for sentence in found.under)
    assert found.under[0] in str(found)
    assert Comparison.from_json(found.to_json()).under == found.under
    assert "Under int3" in found.to_html()
    before = sl.compare(a, b, TEST, **OPTIONS)
    assert before.advice == found.advice
    assert [row.name for row in found.rows[: len(before.rows)]] == [row.name for row in before.rows]


def test_equal_models_are_equal_after_a_change() -> None:
    net = MODELS["step 80"]
    found = sl.compare(
        net, copy.deepcopy(net), TEST, measures=["margin_mean"], audit=False, under=["int4", "noise:0.01"]
    )
    assert found.row("loss under int4").verdict == "equal"
    assert found.row("loss under noise:0.01").verdict == "equal"  # the same draw for both
    assert found.under == ("Under int4, neither is clearly better.", "Under noise:0.01, neither is clearly better.")


# ---------------------------------------------------------------- many checkpoints


def test_a_few_large_differences_leave_a_checkpoint_tied() -> None:
    here, there = (torch.zeros(60, 2, dtype=torch.float64) for _ in range(2))
    there[:3, 0] = 4.0
    pair = {name: nn.Embedding.from_pretrained(table, freeze=False) for name, table in (("a", here), ("b", there))}
    found = sl.rank(pair, (torch.arange(60), torch.zeros(60).long()), measures=["margin_mean"], under=())
    assert found.order("loss") == ["b", "a"]
    assert found.row("a").behind_low < 0 < found.row("a").behind_high
    assert found.row("a").tied


def test_many_checkpoints(untouched: Untouched) -> None:
    with untouched(*MODELS.values()):
        found = sl.rank(MODELS, TEST, under="int3")
    assert set(found.measures) == {"signal_sharpness", "mean_aceht", "margin_mean", "input_distance"}
    values = [float(losses(net).mean()) for net in MODELS.values()]
    assert found.values("loss") == pytest.approx(values, rel=1e-6)
    order = [name for _, name in sorted(zip(values, MODELS, strict=True))]
    assert found.order("loss") == order
    assert found.order("margin_mean")[0] == max(
        MODELS, key=lambda name: float(sl.margins(MODELS[name], TEST).signed.mean())
    )
    for name, net in MODELS.items():
        alone = sl.perturb(net, TEST, "int3", layers=False)
        row = found.row(name)
        assert row.predicted["int3"].value == pytest.approx(alone.predicted.value, rel=1e-6)
        assert row.measured["int3"].value == pytest.approx(alone.measured.value, rel=1e-6)
        apart = losses(net) - losses(MODELS[order[0]])
        assert row.behind == pytest.approx(float(apart.mean()), rel=1e-5, abs=1e-12)
        assert row.behind_low <= row.behind <= row.behind_high
    assert not found.row("step 20").tied
    assert found.row(order[0]).tied
    assert found.sentences()[0].startswith(f"{order[0]} has the lowest loss")
    first, *_ = found.order("accuracy")
    assert f"{first} has the highest accuracy" in found.sentences()[1]
    twice = replace(found, rows=(found.row(first), replace(found.row(first), name="z")))
    assert f"{first} and z have the highest accuracy" in twice.sentences()[1]
    assert f"After int3, {first} and z have the lowest loss" in twice.sentences()[2]
    back = Checkpoints.from_json(found.to_json())
    assert back.frame().equals(found.frame())
    assert back.frame()["checkpoint"].to_list() == list(MODELS)
    assert "signal_sharpness" in str(found)
    assert "Which checkpoint" in found.to_html()


def test_checkpoints_are_taken_one_after_the_other_and_need_no_classes() -> None:
    data = torch.randn(40, 3), torch.randn(40, 1)
    pairs = ((str(number), nn.Linear(3, 1)) for number in range(2))
    found = sl.rank(pairs, data, loss="squared_error", measures=["weight_norm"], under=["int8"], apply=False)
    assert math.isnan(found.values("accuracy")[0])
    assert found.row("0").measured["int8"].status == "undefined"
    assert any("predicted" in sentence for sentence in found.sentences())


def test_checkpoints_are_measured_in_the_parameters_that_are_named() -> None:
    """The changes move all of them, as in a comparison."""
    nets = {name: MODELS[name] for name in ("step 20", "step 250")}
    found = sl.rank(nets, TEST, measures=["trace"], under="int4", params="*.bias", batch_size=30, memory="1GB")
    for name, net in nets.items():
        row, wanted = found.row(name), sl.trace(net, TEST, params="*.bias")
        assert row.measures["trace"].value == pytest.approx(wanted.value, rel=1e-5)
        alone = sl.perturb(net, TEST, "int4", layers=False)
        assert row.measured["int4"].value == pytest.approx(alone.measured.value, rel=1e-5)
    assert "(1.bias, 3.bias)" in found.settings["parameters"]
    assert "parameters" not in sl.rank(nets, TEST, measures=["trace"], under=()).settings


def test_bad_checkpoints() -> None:
    data = torch.randn(40, 3), torch.zeros(40, dtype=torch.long)
    with pytest.raises(InputError, match="at least one checkpoint"):
        sl.rank({}, data)
    with pytest.raises(InputError, match="pairs of a name and a model"):
        sl.rank([nn.Linear(3, 2)], data)
    with pytest.raises(InputError, match="pairs of a name and a model"):
        sl.rank(7, data)
    with pytest.raises(InputError, match="two checkpoints named 'a'"):
        sl.rank([("a", nn.Linear(3, 2)), ("a", nn.Linear(3, 2))], data, measures=["margin_mean"], under=())
    with pytest.raises(InputError, match="checkpoint 'b'"):
        sl.rank({"b": nn.Linear(4, 2)}, data)
    found = sl.rank({"a": nn.Linear(3, 2)}, data, measures=["margin_mean"], under=())
    with pytest.raises(InputError, match="no checkpoint 'z'"):
        found.row("z")
    with pytest.raises(InputError, match="column 'x'"):
        found.values("x")


# ---------------------------------------------------------------- commands and pages


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    for number, net in enumerate(MODELS.values()):
        safetensors.torch.save_file(net.state_dict(), tmp_path / f"w{number}.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_perturb_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["perturb", "net.py:make", "--weights", "w2.safetensors", "--data", "digits"]
    assert main([*words, "--change", "int3", "--out", "run", "--json", "found.json"]) == 0
    said = capsys.readouterr().out
    assert "predictions should flip" in said
    assert "rank correlation" not in said  # of two layers
    found = Perturbation.from_json(folder / "run" / "report.json")
    assert json.loads((folder / "found.json").read_text())["perturbation"]["change"] == "int3"
    truth = losses(after(MODELS["step 250"], 3)).mean() - losses(MODELS["step 250"]).mean()
    assert found.measured.value == pytest.approx(float(truth), rel=1e-5)
    text = (folder / "run" / "report.html").read_text()
    for part in ("Predicted and measured", "The loss along the way", "Layer by layer", "Which samples", "AUROC"):
        assert part in text
    assert main([*words, "--change", "w1.safetensors", "--no-layers", "--predict-only"]) == 0
    assert "was not made" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--change", "w1.safetensors", "--no-layers", "--foretell"]) == 0  # its name in 0.2.0
    shown = capsys.readouterr()
    assert "was not made" in " ".join(shown.out.split())
    assert "spiritlevel: --foretell is deprecated, use --predict-only." in shown.err
    assert main([*words, "--change", "net.py:scaled", "--no-layers", "--params", "1, 3"]) == 0
    assert "scaled" in capsys.readouterr().out
    assert main(["report", "run", "--out", "page.html"]) == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("int99", "2 to 16 are possible"),
        ("nowhere.pt", "does not exist"),
        ("net.py:number", "must be a function from tensor to tensor, got int"),
    ],
)
def test_bad_changes_on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str], change: str, sentence: str
) -> None:
    assert main(["perturb", "net.py:make", "--data", "digits", "--change", change]) == 2
    assert sentence in capsys.readouterr().err


def test_rank_and_compare_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"w{number}.safetensors" for number in range(3)]
    words = ["--data", "digits", "--measures", "margin_mean", "--under", "int3"]
    assert main(["rank", *files, "--model", "net.py:make", *words, "--out", "ranks", "--json", "ranks.json"]) == 0
    assert "has the lowest loss" in capsys.readouterr().out
    found = Checkpoints.from_json(folder / "ranks" / "report.json")
    assert [row.name for row in found.rows] == ["w0", "w1", "w2"]
    text = (folder / "ranks" / "report.html").read_text()
    for part in ("Curves", "After each change of the weights", "What int3 adds to the loss"):
        assert part in text
    assert main(["report", "ranks", "ranks.json", "--out", "page.html"]) == 0
    capsys.readouterr()
    assert main(["compare", "net.py:make", "net.py:make", "--weights", *files[:2], *words]) == 0
    assert "Under int3, w1 is better" in capsys.readouterr().out
    assert main(["rank", *files, "--model", "net.py:make", "--data", "digits", "--under", "int"]) == 2
    assert "there is no change 'int'" in capsys.readouterr().err


def test_files_alone_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare a.pt b.pt --under …`: state dicts with the network named once, exported programs by themselves."""
    nets = dict(zip("ab", list(MODELS.values())[:2], strict=True))
    for name, net in nets.items():
        torch.save(net.state_dict(), f"{name}.pt")
        batch = torch.export.Dim("batch", min=1)
        torch.export.save(torch.export.export(net.eval(), (TEST[0][:3],), dynamic_shapes=({0: batch},)), f"{name}2.pt2")
        (folder / f"{name}2.pt2").rename(folder / f"{name}3.pt")
    words = ["--under", "int3,noise:0.01,prune:0.5", "--data", "digits", "--measures", "margin_mean"]
    said = []
    for files, more in ((("a.pt", "b.pt"), ["--model", "net.py:make"]), (("a3.pt", "b3.pt"), [])):
        assert main(["compare", *files, *words, *more]) == 0
        said.append(capsys.readouterr().out)
    assert "Under int3, b is better" in said[0]
    assert "Under int3, b3.pt is better" in said[1]
    assert all("Under prune:0.5" in text and "Under noise:0.01" in text for text in said)
    assert main(["compare", "a.pt", "b3.pt", "--model", "net.py:make", *words]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a.pt", "b.pt"], "name it once for both: spiritlevel compare a.pt b.pt --model file.py:function"),
        (["a.pt", "net.py:make", "--weights", "a.pt", "b.pt"], "a.pt is already a file of weights"),
        (["net.py:make", "net.py:make", "--model", "net.py:make"], "neither A nor B is one"),
        (["script.pt", "script.pt", "--model", "script.pt"], "a TorchScript program, which is not opened"),
    ],
)
def test_files_that_are_no_models(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    for name in "ab":
        torch.save(MODELS["step 20"].state_dict(), f"{name}.pt")
    with zipfile.ZipFile("script.pt", "w") as archive:
        archive.writestr("script/code/net.py", "")
    assert main(["compare", *words, "--data", "digits", "--under", "int4"]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert main(["measure", "a.pt", "--data", "digits"]) == 2
    assert "give this file as its weights" in " ".join(capsys.readouterr().err.split())


def test_names_from_elsewhere_are_escaped_on_the_page() -> None:
    found = sl.perturb(MODELS["step 80"], TEST, "int4", name="<script>alert(1)</script>", classes=("<b>zero",) * 10)
    text = page(found)
    assert "<script>alert" not in text
    assert "<b>zero" not in text
    plain = sl.perturb(
        nn.Linear(3, 1), (torch.randn(9, 3), torch.randn(9, 1)), "int4", loss="squared_error", apply=False
    )
    assert "Which samples" not in page(plain)
    assert "second order" in page(plain)


def test_pictures_show_the_flips() -> None:
    found = sl.perturb(MODELS["step 80"], TEST, "int2")
    assert found.pictures is not None
    groups: dict[str, Any] = found.pictures.groups
    assert list(groups) == ["predicted to flip", "flipped, not predicted", "least left, not flipped"]
    rows = found.pictures.indices[list(groups["predicted to flip"])]
    assert bool((found.samples["flips_predicted"][rows] > 0).all())
    rows = found.pictures.indices[list(groups["least left, not flipped"])]
    assert not bool((found.samples["flips_measured"][rows] > 0).any())


def test_changes_that_share_a_name_are_all_made() -> None:
    """Two functions without a name, or two models, were one change: the last."""
    nets = {name: MODELS[name] for name in ("step 20", "step 250")}
    under = [lambda w: 0.9 * w, lambda w: 0.1 * w]
    found = sl.rank(nets, TEST, measures=["margin_mean"], under=under)
    assert found.changes == ("function", "function 2")
    for name, net in nets.items():
        for change, function in zip(found.changes, under, strict=True):
            row = next(row for row in found.rows if row.name == name)
            assert row.measured[change].value == sl.perturb(net, TEST, function, layers=False).measured.value
    a, b = nets.values()
    said = sl.compare(a, b, TEST, measures=["margin_mean"], audit=False, under=[a, b, "int4", a, "int4"]).under
    assert [sentence.split(",")[0] for sentence in said] == [
        "Under another model",
        "Under another model 2",
        "Under int4",
    ]


# ---------------------------------------------------------------- bits


def test_bits_are_chosen_within_the_size_and_compared_with_uniform_ones(untouched: Untouched) -> None:
    net = MODELS["step 250"]
    with untouched(net):
        plan = sl.choose_bits(net, TEST, 3.2, choices=(2, 3, 4, 8), by="second_order")
    assert plan.mean_bits <= 3.2
    assert plan.uniform == 3
    names = [name for name, parameter in net.named_parameters() if parameter.ndim > 1]
    assert list(plan.bits) == names
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, bits in plan.bits.items():
            parameter = other.get_parameter(name)
            parameter.copy_(rounded(parameter, bits))
    assert plan.losses[1].value == pytest.approx(float(losses(other).mean()), rel=1e-6)
    assert plan.losses[2].value == pytest.approx(float(losses(after(net, 3)).mean()), rel=1e-6)
    assert plan.losses[0].value == pytest.approx(float(losses(net).mean()), rel=1e-6)
    alone = sl.perturb(net, TEST, f"int{plan.bits['3.weight']}").layer("3.weight").second_order
    assert plan.rows[1].cost == pytest.approx(max(0.0, alone), rel=1e-5)
    assert plan.rows[1].bits >= plan.rows[0].bits  # the small layer costs much and is cheap to keep
    assert "bits per weight" in str(plan)
    assert "unrounded" in str(plan)
    assert "the same" not in str(plan)
    generous = sl.choose_bits(net, TEST, 8.0, choices=(2, 8), by="square")
    assert set(generous.bits.values()) == {8}
    assert "It gives all layers the same 8 bits" in str(generous)
    assert set(sl.choose_bits(net, TEST, 2.0, choices=(2, 8)).bits.values()) == {2}


def test_bits_by_what_each_layer_costs_alone() -> None:
    """The default: the costs are those of copies in which one layer is rounded, on a part of the data too."""
    net = MODELS["step 250"]
    plan = sl.choose_bits(net, TEST, 3.2, choices=(2, 3, 4, 8))
    assert plan.by == "measured"
    for row in plan.rows:
        rises = []
        for bits in (width for width in (2, 3, 4, 8) if width >= row.bits):
            other = copy.deepcopy(net)
            with torch.no_grad():
                other.get_parameter(row.name).copy_(rounded(net.get_parameter(row.name), bits))
            rises.append(float((losses(other) - losses(net)).mean()))
        assert row.cost == pytest.approx(max(0.0, *rises), rel=1e-4, abs=1e-7)
    assert sl.choose_bits(net, TEST, 3.2, choices=(2, 3, 4, 8), samples=len(TEST[1])).bits == plan.bits
    assert sl.choose_bits(net, TEST, 3.2, samples=50).mean_bits <= 3.2
    steps: list[tuple[str, int, int]] = []
    options = {"batch_size": 30, "memory": "1GB", "progress": lambda *step: steps.append(step)}
    assert sl.choose_bits(net, TEST, 3.2, choices=(2, 3, 4, 8), **options).bits == plan.bits
    assert [done for _, done, total in steps if total == 5] == [0, 1, 2, 3, 4]


def test_bits_of_the_layers_that_are_named() -> None:
    """The others stay as they are: the size is that of those named."""
    net = MODELS["step 250"]
    plan = sl.choose_bits(net, TEST, 3.0, choices=(2, 3, 8), params="3.*")
    assert list(plan.bits) == ["3.weight"]
    assert plan.bits["3.weight"] == 3
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.get_parameter("3.weight").copy_(rounded(net.get_parameter("3.weight"), 3))
    assert plan.losses[1].value == pytest.approx(float(losses(other).mean()), rel=1e-6)
    with pytest.raises(InputError, match="rounds matrices and kernels, and params= names none"):
        sl.choose_bits(net, TEST, 3.0, params="*.bias")
    with pytest.raises(InputError, match="rounds matrices and kernels, and the model has none"):
        sl.choose_bits(nn.LayerNorm(64), (torch.randn(20, 64), torch.zeros(20).long()), 3.0)


def test_no_other_choice_of_bits_costs_less() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = {name: int(torch.randint(1, 50, (), generator=generator)) for name in "abcd"}
        costs = {name: {b: float(torch.rand((), generator=generator)) for b in (2, 3, 4)} for name in "abcd"}
        found = cheapest(costs, sizes, [2, 3, 4], 3.0)
        every = [dict(zip("abcd", widths, strict=True)) for widths in itertools.product((2, 3, 4), repeat=4)]
        fitting = [bits for bits in every if sum(sizes[n] * b for n, b in bits.items()) <= 3 * sum(sizes.values())]
        least = min(sum(costs[n][b] for n, b in bits.items()) for bits in fitting)
        assert found in fitting
        assert sum(costs[n][b] for n, b in found.items()) == pytest.approx(least, abs=1e-7)


def test_costs_may_span_orders_of_magnitude() -> None:
    """The solver's own tolerance, relative to the 100 that 2 bits cost, would hide all that 6 and 8 bits do."""
    costs = {
        "a": {2: 100.0, 6: 4e-5, 8: 1e-5},
        "b": {2: 80.0, 6: 3e-5, 8: 2e-5},
        "c": {2: 90.0, 6: 9e-5, 8: 1e-6},
    }
    assert cheapest(costs, {"a": 10, "b": 10, "c": 10}, [2, 6, 8], 7.0) == {"a": 6, "b": 6, "c": 8}
    nothing = {name: dict.fromkeys((2, 4, 8), 0.0) for name in "ab"}
    assert cheapest(nothing, {"a": 10, "b": 20}, [2, 4, 8], 6.0) == {"a": 2, "b": 8}, "of equal costs more bits"


def test_plans_of_many_layers_keep_to_the_size_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """With the solver's presolve some were 1e-6 bits too large, some refused as impossible, and lines were printed."""
    numbers, widths = np.random.default_rng(5), [2, 3, 4, 6, 8]
    for layers in (60, 160):
        base = 10 ** (1 - 3 * numbers.random(layers))
        costs = {
            f"{i}": {w: float(base[i] * 4.0**-w * np.exp(0.3 * numbers.normal())) for w in widths}
            for i in range(layers)
        }
        sizes = {name: int(10 ** numbers.uniform(2, 6)) for name in costs}
        found = cheapest({name: at_least_of_more_bits(each) for name, each in costs.items()}, sizes, widths, 4.0)
        assert (
            3.99 * sum(sizes.values())
            < sum(sizes[name] * bits for name, bits in found.items())
            <= 4 * sum(sizes.values())
        )
    few = np.random.default_rng(10)
    for _ in range(106):  # the last one was refused
        count, span = int(few.integers(2, 7)), few.uniform(0, 14)
        costs = {
            f"{i}": dict(zip(widths, np.sort(10 ** (-span * few.random(5)))[::-1].tolist(), strict=True))
            for i in range(count)
        }
        sizes, bits = {name: int(10 ** few.uniform(0, 6)) for name in costs}, few.uniform(2.5, 7)
    assert sum(sizes[name] * width for name, width in cheapest(costs, sizes, widths, bits).items()) <= bits * sum(
        sizes.values()
    )
    assert capfd.readouterr() == ("", "")


def test_a_layer_that_rounding_does_not_move_counts_in_the_size() -> None:
    """Its bits were left out of the plan, and the others did not get what it does not need."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(net[2].weight)
    data = torch.randn(80, 6), torch.randint(0, 2, (80,))
    for by in ("measured", "second_order", "square"):
        plan = sl.choose_bits(net, data, 4.0, by=by)
        assert list(plan.bits) == ["0.weight", "2.weight", "4.weight"]
        assert plan.rows[1].cost == 0
        assert plan.mean_bits <= 4
    assert sl.choose_bits(net, data, 4.0, choices=(2, 8), by="square").bits == {
        "0.weight": 2,
        "2.weight": 2,
        "4.weight": 8,
    }


class Logarithm(nn.Module):
    """The smallest of its gains is rounded to 0 below 6 bits, and its logarithm is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.last = nn.Parameter(torch.tensor([[1.0, 0.3, 0.5, 0.04]])), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * (self.gain * self.gain.log()))


def test_bits_that_make_the_loss_nan_are_not_chosen() -> None:
    torch.manual_seed(0)
    net, data = Logarithm(), (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    plan = sl.choose_bits(net, data, 4.0)
    assert plan.bits["gain"] >= 6
    assert math.isfinite(plan.losses[1].value)
    with pytest.raises(InputError, match=r"NaN or infinite when gain is rounded to any of 2, 3 bits; allow more"):
        sl.choose_bits(net, data, 4.0, choices=(2, 3))
    found = sl.perturb(net, data, "int2")
    assert "; the loss is NaN after the change." in str(found), "it was made"
    assert "; the change was not made." in str(sl.perturb(net, data, "int2", apply=False))


@pytest.mark.parametrize("by", ["measured", "second_order", "curvature", "square"])
def test_no_order_prefers_bits_that_make_the_loss_nan(by: str) -> None:
    """Derivatives at the model do not see it: plans by them gave the gains 3 bits."""
    torch.manual_seed(0)
    net, data = Logarithm(), (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    with torch.no_grad():
        net.last.weight.mul_(5)
    plan = sl.choose_bits(net, data, 3.0, choices=(2, 3, 6), by=by)
    assert plan.bits == {"gain": 6, "last.weight": 2}
    assert math.isfinite(plan.losses[1].value)
    with pytest.raises(
        InputError, match=r"no choice of bits keeps the loss finite within 2\.5 bits per weight; allow more"
    ):
        sl.choose_bits(net, data, 2.5, choices=(2, 3, 6), by=by)


def test_bad_bits() -> None:
    net = MODELS["step 20"]
    with pytest.raises(InputError, match="fewer than 3, the least that a layer gets"):
        sl.choose_bits(net, TEST, 2.0, choices=(3, 4))
    with pytest.raises(InputError, match="choices= is empty"):
        sl.choose_bits(net, TEST, 2.0, choices=())
    with pytest.raises(InputError, match="from 2 to 16"):
        sl.choose_bits(net, TEST, 2.0, choices=(1,))
    with pytest.raises(InputError, match="by"):
        sl.choose_bits(net, TEST, 2.0, by="luck")


def test_every_line_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = blocks_of("perturb.md")
    assert {block.kind for block in blocks} == {"python", "sh"}
    monkeypatch.chdir(tmp_path)
    run(blocks)
    shown = capsys.readouterr().out
    assert "predictions should flip" in shown
    assert (tmp_path / "int4" / "report.html").is_file()
