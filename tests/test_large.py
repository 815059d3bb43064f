"""Long and large: what grows linearly, and what does not grow at all."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reports import report
from torch import nn

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.measures import Setting, registry
from spiritlevel.measures.blocks import gauss_newton_blocks


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    inner = [module for _ in range(layers) for module in (nn.Linear(4, 4), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(4, 3))


DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "trace": lambda model: sl.trace(model, DATA),
    "landscape": lambda model: sl.landscape(model, DATA, directions="random", points=5),
    "margins": lambda model: sl.margins(model, DATA),
}


@pytest.mark.parametrize("way", ["trace", "landscape"])
def test_work_is_linear_in_the_depth(way: str) -> None:
    """Lines of Python run, which no other work on the machine changes; they took twelve times as long once."""

    def lines(layers: int) -> int:
        model, count, before = deep(layers), 0, sys.gettrace()

        def counted(*_: Any) -> Any:
            nonlocal count
            count += 1
            return counted

        sys.settrace(counted)
        try:
            WAYS[way](model)
        finally:
            sys.settrace(before)
        return count

    lines(10)  # what libraries do on their first call
    assert lines(200) < 4.2 * lines(50)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_five_thousand_layers_and_ten_thousand_tensors(way: str) -> None:
    found = WAYS[way](deep(5000))
    if way == "trace":
        assert found.exact


def test_factors_of_many_classes_are_taken_one_at_a_time() -> None:
    """N·C² numbers would be 8 bytes × 200 × 300² = 144 MB here; the outputs alone are half a megabyte."""
    torch.manual_seed(0)
    net, data = nn.Linear(5, 300), (torch.randn(200, 5), torch.arange(200))
    setting = Setting(net, data)
    setting.check()
    assert setting.classes == 300  # and what is found on the way is there
    sizes: list[int] = []
    inner = setting.problem.loss.factors

    def counted(outputs: Any, targets: Any) -> Any:
        alive: list[Any] = []
        for scale, vector in inner(outputs, targets):
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(vector.untyped_storage()))
            sizes.append(sum(not each.expired() for each in alive))
            yield scale, vector
            del vector

    setting.problem.loss.factors = counted  # type: ignore[method-assign]
    gauss_newton_blocks(setting, ["weight"])
    assert max(sizes) <= 4


def test_blocks_do_not_depend_on_how_many_samples_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double(), (torch.randn(7, 3), DATA[1][:7])
    whole = gauss_newton_blocks(Setting(net, data), ["2.weight"])["2.weight"]
    monkeypatch.setattr("spiritlevel.measures.blocks._OUTPUTS", 6)
    cut = gauss_newton_blocks(Setting(net, data), ["2.weight"])["2.weight"]
    assert torch.allclose(whole.diagonal, cut.diagonal, rtol=1e-12)
    assert torch.allclose(whole.relative, cut.relative, rtol=1e-12)


def test_resampled_quantiles_take_no_table_of_all_resamples() -> None:
    """It was 999 numbers of 8 bytes for every sample."""
    torch.manual_seed(0)
    net, data = nn.Linear(4, 3), (torch.randn(4000, 4), torch.arange(4000) % 3)
    other = nn.Linear(4, 3)
    sl.compare(net, other, data, measures=["margin_q50"], audit=False)
    tracemalloc.start()
    sl.compare(net, other, data, measures=["margin_q50"], audit=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 999 * 4000 * 8 / 3


@pytest.mark.parametrize("way", ["measure", "audit", "compare", "rank"])
def test_what_takes_too_many_passes_is_left_out_with_its_need_unless_it_is_named(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact terms of every class: 100,000 classes would take 300,000 passes, and nobody had asked for them."""
    monkeypatch.setattr(registry, "MOST_PASSES", 29)
    torch.manual_seed(0)
    net, data = nn.Linear(4, 10), (torch.randn(12, 4), torch.arange(12) % 10)
    calls: dict[str, Callable[[Any], dict[str, str]]] = {
        "measure": lambda names: sl.measure(net, data, measures=names, parts=[]).left_out,
        "audit": lambda names: sl.audit(net, data, measures=names, transforms=["shift_logits"], search=False).skipped,
        "compare": lambda names: sl.compare(net, nn.Linear(4, 10), data, measures=names, audit=False).left_out,
        "rank": lambda names: sl.rank({"a": net, "b": nn.Linear(4, 10)}, data, measures=names).left_out,
    }
    need = "it takes about 30 forward passes over the data, and more than 29 are made only for a measure that measures"
    assert calls[way](None)["signal_sharpness"].startswith(need)
    assert "signal_sharpness" not in calls[way](["signal_sharpness"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_classes() -> None:
    """All that is measured by default but for the parts, which are products that take no longer for many classes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 100_000))
    found = sl.measure(net, (torch.randn(32, 10), torch.randint(0, 100_000, (32,))), parts=["spectrum"])
    assert "100,000 forward passes" in found.left_out["relative_flatness"]
    assert "300,000 forward passes" in found.left_out["signal_sharpness"]
    assert found.row("trace").kind == "estimated"
    assert found.spectrum is not None


@pytest.mark.slow
def test_a_page_of_two_hundred_runs(tmp_path: Path) -> None:
    kept = report(200, pictured=4)
    folders = []
    for number in range(200):
        folders.append(tmp_path / f"run{number}")
        folders[-1].mkdir()
        kept.to_json(folders[-1] / "report.json")
    assert cli.main(["report", *map(str, folders), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("run199") >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_samples() -> None:
    """Through `measure`, with every measure that it takes by default and every part."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(1_000_000, 10)
    targets = net(inputs).argmax(1)
    found = sl.measure(net, (inputs, targets))
    assert found.fits["train"].samples == 1_000_000
    assert set(found.left_out) == {"pictures"}
