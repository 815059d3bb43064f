"""The generalisation study: rank correlations against brute force, choices that no list can win by length, verdicts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from spiritlevel.measures import MEASURES
from spiritlevel.papers.studies import Run, Verdict, decide, league
from spiritlevel.papers.studies import generalisation as study
from spiritlevel.papers.studies.generalisation import Generalisation
from spiritlevel.statistics.ranking import Ranking

GRID = list(itertools.product((0.1, 0.2), (8, 16), (1.0, 2.0, 4.0), (0.0, 1e-3), range(3)))
NAMES = ("lr", "batch_size", "width", "weight_decay")
SETTINGS = {name: [cell[k] for cell in GRID] for k, name in enumerate(NAMES)}
REPLICAS = [cell[-1] for cell in GRID]
SMOKE = {**study.STUDY.scales["smoke"], "resamples": 50}


def ranking(gap: Any, resamples: int = 200, **measures: Any) -> Ranking:
    return Ranking(measures, np.asarray(gap), SETTINGS, REPLICAS, resamples)


def noise(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(len(GRID))


def test_tau_is_kendalls_on_the_data_and_on_each_resample() -> None:
    gap, values = np.round(noise(0), 1), np.round(noise(1) + 0.5 * noise(0), 1)  # with ties
    found = ranking(gap, 5, a=values)
    for weights, tau in zip(found.weights.astype(int), found.tau("a"), strict=True):
        expected = stats.kendalltau(np.repeat(values, weights), np.repeat(gap, weights)).statistic
        assert tau == pytest.approx(expected, abs=1e-12)


def test_networks_without_a_value_are_left_out() -> None:
    gap, values = noise(0), noise(1)
    values[[3, 10]] = math.nan
    kept = np.isfinite(values)
    found = ranking(gap, 1, a=values, none=np.full(len(GRID), math.nan))
    assert found.tau("a")[0] == pytest.approx(stats.kendalltau(values[kept], gap[kept]).statistic)
    assert math.isnan(found.tau("none")[0])
    assert math.isnan(found.information("none"))


def test_a_resample_keeps_cells_whole() -> None:
    weights = ranking(noise(0), 50, a=noise(1)).weights
    assert (weights[0] == 1).all()
    assert (weights.reshape(len(weights), -1, 3) == weights[:, ::3, None]).all(), "all seeds of a cell together"
    assert (weights.sum(1) == len(GRID)).all()


def test_conditional_tau_is_the_mean_over_lines_of_the_grid() -> None:
    gap, values = np.round(noise(2), 1), np.round(noise(3) + 0.4 * noise(2), 1)
    found = {name: draws[0] for name, draws in ranking(gap, 1, a=values).conditional("a").items()}
    for axis, name in enumerate((*NAMES, "seed")):
        lines: dict[Any, list[int]] = {}
        for k, cell in enumerate(GRID):
            lines.setdefault(cell[:axis] + cell[axis + 1 :], []).append(k)
        taus = [
            np.mean([np.sign((values[i] - values[j]) * (gap[i] - gap[j])) for i, j in itertools.permutations(line, 2)])
            for line in lines.values()
        ]
        assert found[name] == pytest.approx(np.mean(taus), abs=1e-12)
    assert found["mean"] == pytest.approx(np.mean([found[name] for name in NAMES]))


def information(values: Any, gap: Any) -> float:
    """Jiang's K by counting."""
    shares = []
    for size in range(3):
        for known in itertools.combinations(range(4), size):
            groups: dict[Any, list[tuple[float, float]]] = {}
            for i, j in itertools.permutations(range(len(GRID)), 2):
                key = tuple((GRID[i][k], GRID[j][k]) for k in known)
                groups.setdefault(key, []).append((np.sign(values[i] - values[j]), np.sign(gap[i] - gap[j])))
            shared, uncertain = 0.0, 0.0
            for pairs in groups.values():
                joint, left, right = Counter(pairs), Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
                for (a, b), count in joint.items():
                    shared += count * math.log(count * len(pairs) / (left[a] * right[b]))
                uncertain -= sum(count * math.log(count / len(pairs)) for count in right.values())
            shares.append(shared / uncertain)
    return min(shares)


def test_conditional_information() -> None:
    gap = noise(4) + np.array(SETTINGS["width"])
    values = gap + noise(5)
    width = np.array(SETTINGS["width"])
    found = ranking(gap, 1, a=values, same=gap, mirror=-gap, width=width, nothing=noise(6))
    assert found.information("a") == pytest.approx(information(values, gap), abs=1e-12)
    assert found.information("same") == pytest.approx(1.0)
    assert found.information("mirror") == pytest.approx(1.0), "information has no sign"
    assert found.tau("width")[0] > 0.3
    assert found.information("width") == pytest.approx(0.0, abs=1e-12), "a known hyper-parameter tells nothing new"
    assert found.information("nothing") < 0.05
    assert 0 < found.noise() < 0.05


def test_a_long_list_of_noise_has_no_advantage() -> None:
    gains, naive = [], []
    for trial in range(12):
        measures = {f"m{k}": noise(1000 + 50 * trial + k) for k in range(21)}
        found = ranking(noise(trial), 1, **measures)
        names = list(measures)
        gains.append(np.mean(found.advantages(names[:20], names[20:])[0], axis=0)[0])
        naive.append(max(found.tau(name)[0] for name in names[:20]) - found.tau(names[20])[0])
    error = np.std(gains) / math.sqrt(len(gains))
    assert abs(np.mean(gains)) < 3 * error
    assert np.mean(naive) > 0.1, "the best of many on the same networks would seem to win"


def test_the_advantage_of_a_measure_that_knows_the_gap() -> None:
    gap = noise(0)
    gains, owns, best = ranking(gap, 50, good=gap, bad=noise(1), rival=noise(2)).advantages(["bad", "good"], ["rival"])
    assert best == "good"
    assert [own[0] for own in owns] == [1.0] * 3
    rivals = [stats.kendalltau(noise(2)[k::3], gap[k::3]).statistic for k in range(3)]
    assert [gain[0] for gain in gains] == pytest.approx([1 - rival for rival in rivals])


def verdicts(undecided: str = "", **measures: Any) -> dict[str, Verdict]:
    gap = noise(0)
    given = {"margin_mean": noise(1), "trace": noise(2), "largest_eigenvalue": noise(3), "fisher_rao_norm": noise(4)}
    given |= {"trace × ‖θ‖²": noise(5), "λ₁ × ‖θ‖²": noise(6)} | measures
    facts = {"undecided": undecided, "accuracy": 0.8, "chance": 0.1}
    found = list(study.judge({"gap": ranking(gap, **given), "loss gap": ranking(gap, **given)}, facts))
    assert len(found) == len(study.STATEMENTS)
    return {ruling.statement.id: decide(ruling.statement, [ruling.record()]).verdict for ruling in found}


def test_every_verdict_can_occur() -> None:
    gap = noise(0)
    close = {"trace": gap + noise(2), "largest_eigenvalue": gap + noise(3)}
    good = verdicts(**{name: gap for name in ("margin_mean", "fisher_rao_norm", *league.PRODUCTS)})
    assert set(good.values()) == {Verdict.REPRODUCED}
    plain = verdicts(margin_mean=-gap, trace=gap, largest_eigenvalue=gap)
    assert set(plain.values()) == {Verdict.NOT}
    near = {name: gap + 0.9 * noise(15) for name in ("margin_mean", "fisher_rao_norm")}
    near |= {name: close[base] + 0.15 * gap + 0.3 * noise(15) for name, base in league.PRODUCTS.items()}
    assert set(verdicts(**close, **near).values()) == {Verdict.UNDECIDED}
    assert set(verdicts("too few", **close, **near).values()) == {Verdict.UNDECIDED}
    upside_down = verdicts(trace=-gap, largest_eigenvalue=-gap, margin_mean=-0.5 * gap + noise(1))
    assert upside_down["margins"] == Verdict.NOT, "better than a wrong ranking is not enough"
    some = np.where(np.arange(len(GRID)) < 5, math.nan, gap)
    assert verdicts(margin_mean=some)["margins"] == Verdict.UNDECIDED, "a measure of some networks is not chosen"
    assert set(verdicts(trace=some, largest_eigenvalue=some).values()) == {Verdict.UNDECIDED}


def test_every_measure_has_a_family() -> None:
    found = {name: league.family(name) for name in (*MEASURES, *league.PRODUCTS, *league.CONTROLS)}
    assert set(found.values()) == set(league.FAMILIES)
    assert {found[name] for name in league.PLAIN} == {"flatness"}
    assert {found[name] for name in ("margin_mean", "mean_aceht", "hidden_margin_q1")} == {"margin"}
    assert {found[name] for name in ("relative_flatness", "fisher_rao_norm", *league.PRODUCTS)} == {
        "scale-aware flatness"
    }
    assert found["path_norm"] == "norm"


def test_signs_and_products() -> None:
    def net(trace: float | None, norm: float, margin: float) -> dict[str, Any]:
        rows = [("trace", trace, "sharper"), ("weight_norm", norm, "larger"), ("margin_mean", margin, "wider")]
        measures = [{"name": name, "value": value, "direction": direction} for name, value, direction in rows]
        return {"loss": 0.1, "steps": 5, "parameters": 7, "measures": measures}

    found = league.columns([net(2.0, 3.0, 1.0), net(None, 1.0, 4.0)])
    assert found["margin_mean"].tolist() == [-1.0, -4.0]
    assert found["trace × ‖θ‖²"][0] == 18.0
    assert math.isnan(found["trace"][1])
    assert math.isnan(found["trace × ‖θ‖²"][1])
    assert found["number of parameters"].tolist() == [7.0, 7.0]


def test_spread_of_the_gaps() -> None:
    nets = [
        {
            **{"gap": gap, "test error": 0.2, "held out": 1600, "gap on even points": gap, "gap on odd points": odd},
            **{"lr": 0.1, "batch_size": size, "width": gap, "weight_decay": 0.0},
        }
        for gap, odd, size in ((0.10, 0.10, 1), (0.12, 0.13, 1), (0.14, 0.12, 2))
    ]
    found = league.gap_spread(nets)
    assert found["gap_sd"] == pytest.approx(0.02)
    assert found["binomial_error"] == pytest.approx(0.01)
    assert found["spread_ratio"] == pytest.approx(2.0)
    assert found["tau_between_halves"] == pytest.approx(1 / 3)
    expected = {"lr": 0.0, "batch_size": 0.75, "width": 1.0, "weight_decay": 0.0}
    assert found["variance_explained"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("lr", "reason"), [(0.02, "not fitted"), (1e30, "diverged")])
def test_networks_that_do_not_fit_are_counted(tmp_path: Path, lr: float, reason: str) -> None:
    config = Generalisation(**{**SMOKE, "epochs": 1, "lr": (lr,)})
    run = Run(tmp_path, cache=tmp_path / "networks")
    study.run(config, run)
    rulings = list(study.from_tables(config, lambda name: pl.read_parquet(tmp_path / f"{name}.parquet").to_dicts()))
    assert {decide(ruling.statement, [ruling.record()]).verdict for ruling in rulings} == {Verdict.UNDECIDED}
    assert "only 0 of 4 networks" in rulings[0].undecided
    assert run.numbers["fitted"] == 0
    assert sum(run.numbers["excluded"].values()) == 4
    assert all(reason in text for text in run.numbers["excluded"])


def test_a_network_that_is_fitted_has_all_that_was_asked_for(tmp_path: Path) -> None:
    config = Generalisation(**SMOKE)
    cell = study.cells(config)[0]
    found = study.network(config, cell, Run(tmp_path, cache=tmp_path / "networks"))
    assert not found["excluded"]
    assert found["loss"] <= config.until_loss
    assert found["held out"] == 1500, "the points kept back and the test set"
    assert found["gap"] == pytest.approx(found["test error"] - found["error"])
    assert found["gap"] == pytest.approx((found["gap on even points"] + found["gap on odd points"]) / 2)
    assert [row["name"] for row in found["measures"]] == list(config.measures)
    unreached = dataclasses.replace(config, until_loss=1e-6)
    excluded = study.network(unreached, cell, Run(tmp_path, cache=tmp_path / "networks"))["excluded"]
    assert "after 100 epochs" in excluded, "fitted, but not to the common loss"


def test_cells_of_another_seed_share_no_network() -> None:
    seeds = [{cell["seed"] for cell in study.cells(Generalisation(seed=seed, replicas=3))} for seed in (0, 1)]
    assert seeds == [{0, 1, 2}, {3, 4, 5}]


def test_a_league_varies_all_that_may_explain_the_gap_and_runs_whole_seeds_first() -> None:
    config = study.STUDY.at("small")
    cells = study.cells(config)
    varied = {name for name in league.SETTINGS if len({cell[name] for cell in cells}) > 1}
    assert varied == set(league.SETTINGS)
    assert len(cells) >= 200
    asked = list(study.pieces(config))
    assert len(set(asked)) == len(cells), "every network has a piece of its own"
    third = len(cells) // 3
    assert {name.rsplit("-", 1)[1] for name in asked[:third]} == {"0"}, "a run that is cut short has a balanced grid"
    job = study.job(config, cells[-1])
    assert (job.network, job.train_size, dict(job.options)) == ("strided_cnn", 1000, {"width": 2.0, "depth": 4})


def test_the_key_of_an_older_league_is_what_it_was() -> None:
    folder = Path(__file__).parents[1] / "results" / "generalisation"
    kept = json.loads((next(folder.iterdir()) / "summary.json").read_text())
    assert study.STUDY.folder(study.STUDY.restored(kept["config"]), folder.parent).is_dir()


def test_the_score_of_pgdl_is_the_mean_over_families() -> None:
    """A measure that ranks each family perfectly and one that only tells the families apart."""
    nets = []
    draws = np.random.default_rng(0)
    for family, lr, width, seed in itertools.product(("mlp", "cnn"), (0.1, 0.2), (1.0, 2.0), range(3)):
        own = draws.random()
        gap = own + (10 if family == "cnn" else 0)
        rows = [{"name": "trace", "value": own, "direction": "sharper"}]
        rows += [{"name": "weight_norm", "value": float(family == "cnn"), "direction": "larger"}]
        nets.append({"network": family, "lr": lr, "width": width, "replica": seed, "gap": gap, "loss gap": gap})
        nets[-1] |= {"measures": rows, "loss": 0.1, "steps": 1, "parameters": 1}
    first, second = league.by_family(nets)
    assert [one.information("trace") for one in (first, second)] == pytest.approx([1.0, 1.0])
    assert [one.information("weight_norm") for one in (first, second)] == pytest.approx([0.0, 0.0])
    assert league.rankings_of(nets, 0, 0)["gap"].tau("weight_norm")[0] > 0.5, "over all networks it looks good"
