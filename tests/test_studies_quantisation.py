"""The studies of rounding: what decides them, on tables whose outcome is known."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from spiritlevel.cli.reproduce import parse
from spiritlevel.errors import InputError
from spiritlevel.papers.studies import Run, Verdict, decide, generalisation, layer_bits, quantisation
from spiritlevel.papers.studies.layer_bits import LayerBitsConfig
from spiritlevel.papers.studies.league import job
from spiritlevel.papers.studies.quantisation import CHEAP, FLATNESS, SECOND, Quantisation

CONFIG = Quantisation(scale="laptop", width=(0.7, 1.5))


def networks(**telling: float) -> list[dict[str, Any]]:
    """A grid in which the numbers named tell the loss after rounding, the others are noise; 1 tells it exactly."""
    generator = np.random.default_rng(0)
    found = []
    for cell in quantisation.cells(CONFIG):
        rise = float(generator.normal())
        numbers = {name: float(generator.normal()) for name in (*FLATNESS, *CHEAP, SECOND)}
        for name, share in telling.items():
            sign = -1 if name == "margin_mean" else 1
            numbers[name] = sign * (share * rise + (1 - share) * float(generator.normal()))
        found.append({**cell, "excluded": "", "accuracy": 0.8, **numbers, "loss after": rise, "rise": rise})
    return found


def verdicts(nets: list[dict[str, Any]]) -> dict[str, Verdict]:
    rulings = quantisation.from_tables(CONFIG, lambda _: nets)
    return {ruling.statement.id: decide(ruling.statement, [ruling.record()]).verdict for ruling in rulings}


def test_a_field_by_the_name_that_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    """`foretell_on` of 0.2.0 is `predict_on`: kept runs keep their folder and are read, the old name warns."""
    study = quantisation.STUDY
    assert study.key(study.at("smoke")) == "999e9cf5bf78"  # the folder's name in 0.2.0
    assert study.restored({"scale": "smoke", "foretell_on": 250}) == Quantisation(predict_on=250)
    with pytest.warns(DeprecationWarning, match=r"^foretell_on= of quantisation is deprecated, use predict_on=\.$"):
        assert study.at("smoke", foretell_on=250) == study.at("smoke", predict_on=250)
    for words in (["--foretell-on", "250"], ["--foretell_on=250"]):
        command = parse(["quantisation", *words])
        assert command.predict_on == "250"  # type: ignore[attr-defined]
        assert "--foretell-on is deprecated, use --predict-on." in capsys.readouterr().err


def test_flatness_is_found_to_tell_where_it_does() -> None:
    found = verdicts(networks(trace=0.9, loss=0.1))
    assert found["loss-after-rounding"] == found["rise-by-rounding"] == Verdict.REPRODUCED
    assert found["second-order"] == Verdict.NOT
    found = verdicts(networks(margin_mean=0.9, **{SECOND: 0.9}))
    assert found["loss-after-rounding"] == Verdict.NOT
    assert found["second-order"] == Verdict.REPRODUCED


def test_few_networks_decide_nothing() -> None:
    nets = networks(trace=1.0)
    for net in nets[20:]:
        net["excluded"] = "not fitted"
    assert set(verdicts(nets).values()) == {Verdict.UNDECIDED}
    assert set(verdicts([{**net, "excluded": "diverged"} for net in nets]).values()) == {Verdict.UNDECIDED}
    assert set(verdicts([{**net, "accuracy": 0.2} for net in networks(trace=1.0)]).values()) == {Verdict.UNDECIDED}


def test_taus_are_kendalls() -> None:
    nets = networks(trace=0.5)
    rows = {row["measure"]: row for row in quantisation.taus(CONFIG, nets) if row["target"] == "rise"}
    for name, sign in (("trace", 1), ("margin_mean", -1)):
        values = [sign * net[name] for net in nets]
        expected = stats.kendalltau(values, [net["rise"] for net in nets]).statistic
        assert rows[name]["τ"] == pytest.approx(expected)
        assert rows[name]["low"] <= rows[name]["τ"] <= rows[name]["high"]


def test_a_network_of_the_study(tmp_path: Path) -> None:
    """One network as the study rounds it: the loss after, by hand."""
    smoke = quantisation.STUDY.at("smoke", replicas=1, lr=(0.04,), held_out=100)
    assert isinstance(smoke, Quantisation)
    run = Run(tmp_path / "run", cache=tmp_path / "networks")
    found = quantisation.network(smoke, quantisation.cells(smoke)[0], run)
    assert found["excluded"] == ""
    assert found["rise"] == pytest.approx(found["loss after"] - found["loss"], abs=1e-9)
    assert all(math.isfinite(found[name]) for name in (*FLATNESS, *CHEAP, SECOND))
    assert found[SECOND] == pytest.approx(found["rise"], abs=1.0)


def test_the_networks_are_those_of_the_league(tmp_path: Path) -> None:
    """The very trainings of the study `generalisation` at the scale small, found in the cache and not made again."""
    small, league = quantisation.STUDY.at("small"), generalisation.STUDY.at("small")
    own, theirs = quantisation.cells(small), generalisation.cells(league)
    assert [job(small, cell).key for cell in own] == [job(league, cell).key for cell in theirs]
    assert len({job(small, cell).key for cell in own}) == len(own) == 384
    fields = {**_TINY, "replicas": 1}
    first, second = (each.STUDY.at("small", **fields) for each in (generalisation, quantisation))
    cells = generalisation.cells(first)
    Run(tmp_path / "a", cache=tmp_path / "networks").train(job(first, cells[0]))
    said: list[str] = []
    run = Run(tmp_path / "b", progress=lambda what, *_: said.append(what), cache=tmp_path / "networks")
    found = quantisation.network(second, quantisation.cells(second)[0], run)
    assert found["network"] == "mlp"
    assert not [what for what in said if "training" in what]


_TINY = {
    "networks": ("mlp",),
    "depth": (2,),
    "train_sizes": (60,),
    "held_out": 60,
    "lr": (0.04,),
    "batch_size": (30,),
    "width": (0.5,),
    "weight_decay": (0.0,),
    "epochs": 40,
    "until_loss": 0.05,
}


def test_one_seed_decides_nothing() -> None:
    nets = [net for net in networks(trace=1.0) if net["replica"] == 0] * 3  # as many as are needed, of one seed
    assert set(verdicts(nets).values()) == {Verdict.UNDECIDED}


def tables(second: float, trace: float, square: float, gain: float, accuracy: float = 0.9) -> Any:
    kept = {
        "ranks": [{"bits": 4, "second_order": second, "trace_times_square": trace, "square": square}],
        "outcome": [
            {"bits": "unrounded", "loss": 0.1, "accuracy": accuracy},
            {"bits": "chosen", "loss": 0.2, "accuracy": 0.8},
            {"bits": "uniform", "loss": 0.2 + gain, "accuracy": 0.7},
        ],
    }
    return lambda name: kept[name]


def test_the_rules_of_layers() -> None:
    config = LayerBitsConfig(scale="laptop")
    seeds = [tables(0.9, 0.5 + 0.01 * k, 0.6, 0.1 + 0.01 * k) for k in range(3)]
    rulings = [list(layer_bits.from_tables(config, each)) for each in seeds]
    found = [
        decide(same[0].statement, [ruling.record() for ruling in same]).verdict for same in zip(*rulings, strict=True)
    ]
    assert found == [Verdict.NOT, Verdict.REPRODUCED, Verdict.REPRODUCED]
    rulings = [list(layer_bits.from_tables(config, tables(0.9, 0.5, 0.6, 0.1, accuracy=0.3))) for _ in range(3)]
    found = [
        decide(same[0].statement, [ruling.record() for ruling in same]).verdict for same in zip(*rulings, strict=True)
    ]
    assert set(found) == {Verdict.UNDECIDED}
    with pytest.raises(InputError, match="network"):
        dataclasses.replace(config, network="vgg")


def test_the_three_networks_run() -> None:
    import torch

    for name, shape in (("lenet", (2, 1, 28, 28)), ("resnet", (2, 3, 16, 16)), ("transformer", (2, 1, 28, 28))):
        assert layer_bits.build(LayerBitsConfig(network=name)).eval()(torch.zeros(shape)).shape == (2, 10)


def test_each_order_chooses_bits_within_the_size() -> None:
    """The plans of the study from known costs: those of the least sum, and uniform bits beside them."""
    import torch

    from spiritlevel.measures import Setting

    config = LayerBitsConfig(scale="small", budget=3.0, budgets=(4.0,))
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    data = torch.randn(20, 4), torch.randint(0, 2, (20,))
    layers = []
    for name, size, cost in (("0.weight", 16, 1.0), ("1.weight", 8, 10.0)):
        for bits in (2, 3, 4, 6):
            costs = dict.fromkeys(("second_order", "trace_times_square", "square", "measured"), cost * 2.0**-bits)
            layers.append({"layer": name, "size": size, "bits": bits, **costs})
    found = layer_bits.planned(config, Setting(net, data), layers)
    chosen = {row["layer"]: row["bits"] for row in found["plan"] if (row["budget"], row["by"]) == (3.0, "square")}
    assert chosen == {"0.weight": 2, "1.weight": 4}  # 16·2 + 8·4 = 64 ≤ 72; 3 and 3 cost more
    rows = {(row["budget"], row["by"]): row for row in found["budgets"]}
    assert rows[0.0, "unrounded"]["loss"] > 0
    assert rows[3.0, "uniform"]["mean bits"] == 3
    assert all(row["mean bits"] <= row["budget"] for key, row in rows.items() if key[0])
    assert {by for _, by in rows} == {"unrounded", "uniform", *layer_bits.ORDERS}
