"""Figures in one call: every kind from every source, print sizes, fonts; surfaces that survive a kill."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel import charts, cli
from spiritlevel.answers import keeping, plotting
from spiritlevel.answers.directions import wanted
from spiritlevel.answers.keeping import Keeper
from spiritlevel.binding.context import Context
from spiritlevel.binding.state import _load_forward_mode
from spiritlevel.charts import publishing
from spiritlevel.cli import plot as plot_command
from spiritlevel.errors import InputError
from spiritlevel.results import Landscape, Report, TrainingCurves

_load_forward_mode()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def some_data(samples: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 4, generator=generator).double(), torch.randint(0, 3, (samples,), generator=generator)


NET, DATA = network(), some_data()


@pytest.fixture(scope="module")
def report() -> Report:
    return sl.measure(NET, DATA, test=some_data(12), measures=["trace", "largest_eigenvalue"])


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def rows(chart: Any) -> list[dict[str, Any]]:
    """The rows of all data in a chart, without repetition."""
    found: list[dict[str, Any]] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            found.extend(part.get("values", ()) if isinstance(part.get("values"), list) else ())
            for key, value in part.items():
                if key == "datasets":
                    found.extend(row for values in value.values() for row in values)
                else:
                    walk(value)
        elif isinstance(part, list):
            for value in part:
                walk(value)

    walk(json.loads(json.dumps(chart.to_dict(), allow_nan=False)))
    return found


# ---------------------------------------------------------------- surfaces


def test_the_spread_is_the_standard_deviation_of_a_samples_loss() -> None:
    line = sl.landscape(NET, DATA, directions="random", points=5, batch_size=7)
    with torch.no_grad():
        here = naive.cross_entropy(NET(DATA[0]), DATA[1])
    assert line.spread is not None
    assert float(line.spread[2]) == pytest.approx(float(here.std()), rel=1e-10)
    assert float(line.losses[2]) == pytest.approx(float(here.mean()), rel=1e-12)
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    assert sl.landscape(norm, DATA, directions="random", points=3, batch_norm="batch").spread is None


@pytest.mark.parametrize("states", [False, True])
def test_a_trajectory_lies_in_the_nearest_plane_through_the_model(states: bool) -> None:
    others = [network(seed) for seed in (1, 2, 3, 4)]
    matrix = torch.stack([flat(other) - flat(NET) for other in others])
    _, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    given = [other.state_dict() for other in others] if states else others
    plane = sl.landscape(NET, DATA, trajectory=given, points=9)
    assert plane.directions == ("principal direction 1", "principal direction 2")
    expected = matrix @ right[:2].T
    assert plane.track is not None
    assert torch.allclose(plane.track.abs(), expected.abs(), rtol=1e-8)
    assert plane.explained == pytest.approx((singular[:2] ** 2 / (singular**2).sum()).tolist())
    assert torch.allclose(plane.lengths, torch.ones(2, dtype=torch.float64))
    for k in (0, 1):  # every checkpoint is on the picture, and so is the model
        assert float(plane.steps[k][0]) <= float(plane.track[:, k].min())
        assert float(plane.steps[k][-1]) >= float(plane.track[:, k].max())
        assert 0.0 in plane.steps[k].tolist()
        assert plane.track[0, k] >= 0
    again = Landscape.from_json(plane.to_json())
    assert isinstance(again, Landscape)
    assert torch.equal(again.track, plane.track)


@pytest.mark.parametrize("points", [3, 5, 6, 20, 21])
def test_the_steps_of_a_trajectory_hold_it_or_end_at_the_radius(points: int) -> None:
    others, context = [network(1), network(2), network(3)], Context(NET, DATA)
    found = wanted("eigenvectors", others, None, points, None).find(context)
    assert found.track is not None
    for k, steps in enumerate(found.steps):
        reach = max(0.0, float(found.track[:, k].max())) - min(0.0, float(found.track[:, k].min()))
        assert len(steps) == points
        assert 0.0 in steps.tolist()
        assert float(steps[0]) <= float(found.track[:, k].min())
        assert float(steps[-1]) >= float(found.track[:, k].max())
        assert float(steps[-1] - steps[0]) <= 1.3 * reach * (points - 1) / (points - 2) + 1e-12
    if points % 2 == 0:
        with pytest.raises(InputError, match=f"an odd whole number of points, .*, got {points}; take {points + 1}"):
            wanted("eigenvectors", others, None, points, 0.5)
        return
    for steps in wanted("eigenvectors", others, None, points, 0.5).find(context).steps:
        assert steps.tolist() == pytest.approx(torch.linspace(-0.5, 0.5, points).tolist(), abs=1e-6)
        assert (float(steps[0]), float(steps[points // 2]), float(steps[-1])) == (-0.5, 0.0, 0.5)


@pytest.mark.parametrize("points", [3, 4, 5, 20])
@pytest.mark.parametrize("radius", [0.0, 0.25, 0.4, 1.0])
def test_a_path_continues_no_further_than_asked(points: int, radius: float) -> None:
    (steps,) = wanted(network(1), None, None, points, radius).find(Context(NET, DATA)).steps
    assert {0.0, 1.0} <= set(steps.tolist())
    assert float(steps[0]) >= -radius
    assert float(steps[-1]) <= 1 + radius


def test_a_plane_through_two_checkpoints_holds_both() -> None:
    others = [network(1), network(2)]
    found = wanted("eigenvectors", others, None, 5, None).find(Context(NET, DATA))
    assert found.track is not None
    for place, other in zip(found.track, others, strict=True):
        reached = flat(NET) + sum(
            t * torch.cat([move[name].reshape(-1) for name in dict(NET.named_parameters())])
            for t, move in zip(place, found.moves, strict=True)
        )
        assert torch.allclose(reached, flat(other), rtol=1e-8, atol=1e-10)


def test_state_dicts_of_tied_and_normalised_networks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
            self.b.weight = self.a.weight
            self.register_buffer("unsaved", torch.ones(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x))) * self.unsaved

    torch.manual_seed(0)
    net, other = Tied().double(), Tied().double()
    targets = some_data()[1]
    path = sl.landscape(net, (DATA[0], targets), directions=[other.state_dict()], points=3)
    assert torch.equal(path.losses, sl.landscape(net, (DATA[0], targets), directions=other, points=3).losses)


_CHILD = """
import sys, os, signal, torch
sys.path.insert(0, {tests!r})
from test_plot import NET, DATA
import spiritlevel as sl
from spiritlevel.answers import keeping
keeping._WORTH = 0.0
keeping.Keeper.__init__.__defaults__ = (0.0,)
calls = 0
def progress(what, done, total):
    global calls
    calls += what.startswith({phase!r})
    if calls == 3:
        os.kill(os.getpid(), signal.{how})
sl.landscape(NET, DATA, dimensions=2, points=11, batch_size=5, keep={folder!r}, progress=progress)
"""


@pytest.mark.parametrize(
    ("phase", "how", "left"),
    [
        pytest.param("eigenvectors", "SIGTERM", {"product 1", "product 2"}, marks=pytest.mark.slow),
        ("points", "SIGKILL", {"directions", "sums"}),
        pytest.param("slope", "SIGTERM", {"directions", "sums", "derivatives"}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_surface_goes_on_to_the_same_numbers(tmp_path: Path, phase: str, how: str, left: set[str]) -> None:
    kept = tmp_path / "kept"
    code = _CHILD.format(tests=str(Path(__file__).parent), folder=str(kept), phase=phase, how=how)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=os.environ, capture_output=True, timeout=120
    )
    assert done.returncode == -signal.Signals[how], done.stderr
    assert {path.stem for path in kept.iterdir()} == left

    calls: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"dimensions": 2, "points": 11, "batch_size": 5}
    resumed = sl.landscape(NET, DATA, keep=kept, progress=lambda *call: calls.append(call), **options)
    whole: list[tuple[str, int, int]] = []
    plain = sl.landscape(NET, DATA, progress=lambda *call: whole.append(call), **options)
    first = [index for index, call in enumerate(whole) if call[0].startswith(phase)][2]
    assert calls == whole[first:]  # two pieces of this phase were done, and all before it
    reached = [(done, total) for what, done, total in whole if what.startswith("points")]
    assert {total for _, total in reached} == {121}
    assert reached == sorted(reached)
    assert 100 < reached[-1][0] < 121
    for field in ("losses", "accuracies", "spread", "slopes", "curvatures"):
        assert torch.equal(getattr(resumed, field), getattr(plain, field)), field

    calls.clear()  # a third time there is nothing left to do
    again = sl.landscape(NET, DATA, keep=kept, progress=lambda *call: calls.append(call), **options)
    assert not calls
    assert torch.equal(again.losses, plain.losses)
    assert {path.name for path in kept.iterdir()} == {"result.safetensors"}
    with pytest.raises(InputError, match=r"keeps another surface .* name another folder, or delete it"):
        sl.landscape(network(1), DATA, keep=kept, **options)
    (kept / "result.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"cannot be read: .* Delete it to start again"):
        sl.landscape(NET, DATA, keep=kept, **options)


def test_a_kept_surface_is_not_taken_for_one_of_other_parameters_or_another_loss(tmp_path: Path) -> None:
    options: dict[str, Any] = {"directions": "random", "points": 3}
    settings: list[dict[str, Any]] = [
        {"params": "0.*"},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"output": lambda outputs: 2 * outputs},
    ]
    for number, setting in enumerate(settings):
        kept = tmp_path / str(number)
        found = sl.landscape(NET, DATA, keep=kept, **options, **setting)
        assert torch.equal(sl.landscape(NET, DATA, keep=kept, **options, **setting).losses, found.losses)
        with pytest.raises(InputError, match="keeps another surface"):
            sl.landscape(NET, DATA, keep=kept, **options)


def test_products_of_an_interrupted_search_belong_to_its_surface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_WORTH", 0.0)

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("eigenvectors: product 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sl.landscape(NET, DATA, points=3, keep=tmp_path, progress=interrupt)
    assert {path.stem for path in tmp_path.iterdir()} == {"product 1", "product 2"}
    with pytest.raises(InputError, match="keeps another surface"):
        sl.landscape(NET, DATA, directions="random", points=3, keep=tmp_path)
    sl.landscape(NET, DATA, points=3, keep=tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"result"}


def test_a_batch_in_pieces_gives_the_same_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()
    data = torch.randn(20, 1, 6, 6).double(), torch.randint(0, 3, (20,))
    options: dict[str, Any] = {"directions": "random", "dimensions": 2, "points": 3}
    whole = sl.landscape(net, data, **options)
    seen: list[int] = []
    net[0].register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    monkeypatch.setattr("spiritlevel.answers.surface.samples_at_once", lambda *_: 7)
    pieces = sl.landscape(net, data, **options)
    assert 7 in seen
    assert 20 not in seen
    for field in ("losses", "accuracies", "spread", "slopes", "curvatures"):
        assert torch.allclose(getattr(pieces, field), getattr(whole, field), rtol=1e-12, atol=1e-14), field


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_surface_of_a_resnet_survives_two_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, 1,000 images and all layers of ResNet-18, narrow and on few points so that it ends."""
    monkeypatch.chdir(tmp_path)
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    Path("net.py").write_text(
        f"import sys, torch\nsys.path.insert(0, {str(benchmarks)!r})\nfrom probes import resnet18\n"
        "def make():\n    torch.manual_seed(0)\n    return resnet18(2, torch.nn.ReLU)\n"
    )
    generator = torch.Generator().manual_seed(0)
    images, classes = torch.randn(1000, 3, 32, 32, generator=generator), torch.arange(1000) % 10
    np.savez("data.npz", x=images.numpy(), y=classes.numpy())
    base = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "spiritlevel",
        "plot",
        "landscape",
        "net.py:make",
        "--data",
        "data.npz",
    ]
    words = ["--dimensions", "2", "--points", "11", "--directions", "random"]

    def sums_written() -> float:
        kept = Path("cut.kept/0/sums.safetensors")
        return kept.stat().st_mtime if kept.exists() else 0.0

    for how in (signal.SIGKILL, signal.SIGTERM):
        before = sums_written()
        running = subprocess.Popen([*base, *words, "--out", "cut.svg"], stderr=subprocess.DEVNULL)
        while running.poll() is None and sums_written() == before:
            time.sleep(0.2)
        running.send_signal(how)
        assert running.wait() != 0
        assert not Path("cut.svg").exists()
    for name in ("cut", "whole"):
        done = subprocess.run([*base, *words, "--out", f"{name}.svg", "--json", f"{name}.json"], capture_output=True)
        assert done.returncode == 0, done.stderr
        assert not Path(f"{name}.kept").exists()
    numbers = [json.loads(Path(f"{name}.json").read_text())["result"] for name in ("cut", "whole")]
    assert numbers[0] == numbers[1]


def test_what_is_kept_is_written_now_and_then(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "kept", "key", between=1e9)
    keeper.now_and_then("sums", {"a": torch.ones(1)})
    assert keeper.read("sums") is None
    keeper.between = 0.0
    keeper.now_and_then("sums", {"a": torch.ones(1)})
    held = keeper.read("sums")
    assert held is not None
    assert torch.equal(held[0]["a"], torch.ones(1))


def test_eigenvalues_of_mini_batches_are_those_of_their_hessians() -> None:
    found = sl.batch_eigenvalues(NET, DATA, k=2, batch_size=6, count=9, tol=1e-6, weight_decay=0.25)
    assert found.values.shape == (4, 2)  # 24 samples hold four batches
    order = np.random.default_rng((0, 2)).permutation(24)
    for number in range(4):
        chosen = torch.from_numpy(np.sort(order[6 * number : 6 * number + 6]))
        dense = naive.mean_hessian(NET, DATA[0][chosen], DATA[1][chosen])
        top = torch.linalg.eigvalsh(dense).flip(0)[:2] + 0.25
        assert torch.allclose(found.values[number], top, rtol=1e-5)
    whole = torch.linalg.eigvalsh(naive.mean_hessian(NET, *DATA))[-1] + 0.25
    assert float(found.values[:, 0].mean()) >= float(whole)
    assert bool(found.converged.all())
    assert "2 largest eigenvalues of 4 mini-batches of 6 samples" in str(found)
    assert "fewer than a batch of 99" in sl.batch_eigenvalues(NET, DATA, k=1, batch_size=99).notes[0]


# ---------------------------------------------------------------- charts


def test_every_kind_is_drawn_from_every_source(report: Report, tmp_path: Path) -> None:
    plot, few = sl.plot, {"probes": 2, "steps": 5}
    tracker = sl.Tracker(NET, DATA, every=1, share=math.inf)
    tracker.step()
    batches = sl.batch_eigenvalues(NET, DATA, k=2, batch_size=6)
    drawn = {
        "landscape": [report, report.landscape, [report, report]],
        "spectrum": [report, report.spectrum, report.spectrum.density, batches, {"a": batches, "b": batches}],  # type: ignore[union-attr]
        "density": [report, report.spectrum, report.spectrum.density.density(), {"a": report, "b": report}],  # type: ignore[union-attr]
        "margins": [report, report.margins, {"a": report, "b": report.margins}],
        "traces": [report, report.traces, {"a": report, "b": report.traces}],
        "layers": [report, sl.sample_traces(NET, DATA, per_layer=True), report.spectrum],
        "audit": [report, report.audit],
        "training": [tracker, tracker.curves(), {"a": tracker, "b": tracker.curves()}],
    }
    assert {*drawn, "save"} == set(plot.__all__)
    for kind, sources in drawn.items():
        for source in sources:
            chart = getattr(plot, kind)(source, title="heading")
            assert rows(chart), kind
            assert "heading" in str(chart.to_dict()["title"])
            assert publishing.drawing(chart).startswith("<svg")
    of_model: dict[str, dict[str, Any]] = {
        "landscape": {"points": 3},
        "spectrum": few,
        "density": few,
        "margins": {},
        "traces": {},
        "layers": {},
        "audit": {"measures": ["trace"], "transforms": ["rescale_layers"]},
    }
    for kind, options in of_model.items():
        assert rows(getattr(plot, kind)(NET, DATA, **options)), kind
    assert isinstance(tracker.curves(), TrainingCurves)


def test_a_line_shows_its_numbers() -> None:
    line = sl.landscape(NET, DATA, directions="random", points=5)
    assert line.spread is not None
    middle = next(row for row in rows(sl.plot.landscape(line)) if row["x"] == 0)
    half = 1.96 * float(line.spread[2]) / math.sqrt(24)
    assert middle["high"] - middle["y"] == pytest.approx(half, rel=1e-5)
    middle = next(row for row in rows(sl.plot.landscape(line, band=4)) if row["x"] == 0)
    assert middle["high"] - middle["y"] == pytest.approx(float(line.spread[2]) / 2, rel=1e-5)
    right = [row["y"] for row in rows(sl.plot.landscape(line, accuracy=True)) if set(row) == {"x", "y", "series"}]
    assert right[:5] == pytest.approx(line.accuracies.tolist(), rel=1e-6)  # type: ignore[union-attr]
    text = str(sl.plot.landscape({"one": line, "two": line}, band=4).to_dict())
    assert "mini-batches of 4 samples" in text
    assert "'one'" in text


def test_two_planes_have_the_same_colours() -> None:
    one = sl.landscape(NET, DATA, directions="random", points=5, dimensions=2)
    two = sl.landscape(network(1), DATA, directions="random", points=5, dimensions=2)
    chart = sl.plot.landscape([one, two], accuracy=True).to_dict()
    domains = {str(found) for found in re.findall(r"'domain': (\[[^\]]*\])", str(chart))}
    ends = [float(min(one.losses.min(), two.losses.min())), float(max(one.losses.max(), two.losses.max()))]
    assert domains == {str(ends)}


def test_a_trajectory_is_drawn_to_the_model() -> None:
    plane = sl.landscape(NET, DATA, trajectory=[network(1), network(2), network(3)], points=5)
    track = [(row["x"], row["y"]) for row in rows(sl.plot.landscape(plane)) if "order" in row]
    assert track[:3] == [tuple(place) for place in plane.track.tolist()]  # type: ignore[union-attr]
    assert track[3] == (0.0, 0.0)


def smooth() -> Any:
    return sl.spectral_density(sl.hessian(NET, DATA), probes=2, steps=5).density()


def test_traces_and_margins_of_a_model_read_the_data_alike() -> None:
    """Options of reading went to the traces alone, and the margins were those of another output."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = NET

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": -self.net(x), "others": self.net(x)}

    drawn = sorted(row["x"] for row in rows(sl.plot.traces(Two(), DATA, output="others")) if "series" in row)
    assert drawn == pytest.approx(sorted(sl.margins(NET, DATA).signed.tolist()), rel=1e-5)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: sl.plot.landscape(NET), "a model needs data="),
        (lambda: sl.plot.landscape(5), "landscape draws a Landscape, a Report or a model with its data, got"),
        (lambda: sl.plot.landscape([]), "needs something to draw, got nothing"),
        (lambda: sl.plot.audit([NET, NET], DATA), "audit draws one model at a time, got 2"),
        (lambda: sl.plot.training(NET), "training draws a Tracker or its curves"),
        (lambda: sl.plot.layers(sl.sample_traces(NET, DATA)), "holds no traces by layer"),
        (lambda: sl.plot.layers(3), "layers draws a Report, SampleTraces"),
        (lambda: sl.plot.margins(sl.margins(NET, DATA), loss="exponential"), "the result is already there"),
        (lambda: sl.plot.margins(sl.margins(NET, DATA), DATA), "data= is an option of a measurement, but the result"),
        (lambda: sl.plot.layers(sl.sample_traces(NET, DATA, per_layer=True), seed=1), "seed= is an option of a measur"),
        (lambda: sl.plot.traces(sl.measure(NET, DATA, measures="trace"), probes=9), "probes= is an option of a measur"),
        (lambda: sl.plot.spectrum(sl.batch_eigenvalues(NET, DATA, batch_size=9), steps=3), "steps= is an option"),
        (lambda: sl.plot.density(smooth(), steps=3), "steps= is an option of a measurement"),
        (lambda: sl.plot.density(smooth(), width=0.1), "this one is smooth already; leave it out"),
        (lambda: sl.plot.landscape(NET, DATA, dimensions=2, points=3, band=4), "band= is drawn along a line, and this"),
        (lambda: sl.plot.landscape(NET, DATA, points=3, band=10**400), "band must be a whole number from 1 to 1,000"),
        (lambda: sl.plot.landscape(NET, DATA, dimensions=2, points=3, quadratic=True), "quadratic= is drawn along a"),
        (lambda: sl.plot.save("chart", "figure.svg"), "save needs an Altair chart, got"),
        (lambda: sl.plot.save(sl.plot.margins(NET, DATA), "figure.gif"), "needs the ending .svg, .pdf or .png"),
        (lambda: sl.plot.save(sl.plot.margins(NET, DATA), "x.svg", size="poster"), "unknown figure size 'poster'"),
        (lambda: sl.landscape(NET, DATA, trajectory=[NET]), "checkpoints that differ from the model"),
        (lambda: sl.landscape(NET, DATA, directions=network(1), dimensions=2), "here 1, and dimensions= asks for 2"),
        (lambda: sl.landscape(NET, DATA, trajectory=5), "trajectory must be the checkpoints of a training"),
        (lambda: sl.landscape(NET, DATA, trajectory=[NET], directions="random"), "leave directions= out"),
        (lambda: sl.landscape(NET, DATA, keep=__file__), "keep= needs a folder, but"),
        (lambda: sl.batch_eigenvalues(nn.Linear(1, 2), DATA, k=9), "k=9 eigenvalues need as many parameters, got 4"),
    ],
)
def test_bad_input_in_one_sentence(draw: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        draw()


def test_a_report_without_the_part_says_why() -> None:
    short = sl.measure(NET, DATA, measures=["margin_mean"], parts=[])
    with pytest.raises(InputError, match="the report of Sequential holds no landscape"):
        sl.plot.landscape(short)


def test_lines_and_planes_do_not_mix(report: Report) -> None:
    with pytest.raises(InputError, match="lines and planes cannot be drawn on one scale"):
        sl.plot.landscape([report, sl.landscape(NET, DATA, points=3)])


# ---------------------------------------------------------------- print


@pytest.mark.parametrize(("size", "millimetres"), [("column", 85), ("page", 178)])
@pytest.mark.parametrize("kind", ["margins", "audit", "training"])
def test_a_figure_has_its_size_and_its_fonts(
    report: Report, tmp_path: Path, size: str, millimetres: float, kind: str
) -> None:
    curves = TrainingCurves(
        tuple({"step": k, "loss": 1 / k, "trace": k} for k in (1, 2, 3)), (), {"loss": "loss", "trace": "trace"}
    )
    chart = getattr(sl.plot, kind)(curves if kind == "training" else report, title="A heading")
    files = sl.plot.save(chart, tmp_path / "figure", size=size)
    assert [file.suffix for file in files] == [".svg", ".pdf", ".png"]
    points = millimetres / 25.4 * 72
    svg, pdf = files[0].read_text(encoding="utf-8"), files[1].read_bytes()
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) == pytest.approx(points, abs=0.01)  # type: ignore[index]
    assert svg.count("@font-face") == 2  # the heading is bold
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
    assert {family for family in re.findall(r'font-family="([^"]*)"', svg)} <= {
        "'DejaVu Sans Condensed'",
        "DejaVu Sans Condensed",
    }
    box = re.search(rb"MediaBox *\[0 0 ([\d.]+)", pdf)
    assert box is not None
    assert float(box[1]) == pytest.approx(points, abs=0.1)
    assert b"DejaVuSansCondensed" in pdf
    assert b"FontFile" in pdf
    image = Image.open(io.BytesIO(files[2].read_bytes()))
    assert image.width == pytest.approx(millimetres / 25.4 * 300, abs=2)
    plain = publishing.drawing(chart, size=size, titles=False)
    assert "A heading" in publishing.drawing(chart, size=size)
    assert "A heading" not in plain


def test_few_bars_have_as_much_room_as_many() -> None:
    heights = []
    for bars in (2, 12):
        columns = {"layer": [f"{k}.weight" for k in range(bars)], "share": [1.0] * bars}
        found = re.search(r'height="([\d.]+)"', publishing.drawing(charts.bars(columns, "layer", "share")))
        assert found is not None
        heights.append(float(found[1]))
    step = (heights[1] - heights[0]) / 10
    assert step > 12  # points, for letters of 7
    assert heights[0] - 2 * step > 20  # and the axis has its own


def test_long_headings_are_broken_into_lines() -> None:
    line = sl.landscape(NET, DATA, directions="random", points=3)
    words = "A heading that is much longer than a column of a paper is wide, as people write them"
    text = publishing.drawing(sl.plot.landscape(line, band=1000, title=words))
    assert f">{words}<" not in text
    parts = [part.strip() for part in re.findall(r">([^<>]+)</t(?:ext|span)>", text)]
    assert " ".join(part for part in parts if part and part in words) == words
    note = next(part for part in parts if part.startswith("band:"))
    assert len(note) < 66
    assert f">{words}<" in publishing.drawing(sl.plot.landscape(line, title=words), size="page")


def test_only_the_file_asked_for_is_written(tmp_path: Path) -> None:
    sl.plot.save(sl.plot.margins(NET, DATA), tmp_path / "figure.v2.pdf", titles=False, dark=True)
    assert [file.name for file in tmp_path.iterdir()] == ["figure.v2.pdf"]


# ---------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import safetensors.torch

    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\ndef make():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))\n"
    )
    np.savez("data.npz", x=DATA[0].float().numpy(), y=DATA[1].numpy())
    (tmp_path / "steps").mkdir()
    for seed in (1, 2, 10):
        state = copy.deepcopy(network(seed)).float().state_dict()
        safetensors.torch.save_file(state, tmp_path / "steps" / f"step-{seed}.safetensors")
    return tmp_path


def test_the_command_draws_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["net.py:make", "--data", "data.npz", "--samples", "20"]
    other = "steps/step-2.safetensors"
    lines = {
        "line.svg": ["landscape", *on, "--points", "5", "--accuracy", "--band", "4"],
        "two.pdf": ["landscape", *on, "--points", "5", "--beside", other, "--directions", "random", "--log"],
        "path.svg": ["landscape", *on, "--points", "5", "--to", other],
        "track.svg": ["landscape", *on, "--points", "5", "--along", "steps", "--size", "page"],
        "batches.svg": ["spectrum", *on, "--batch", "5"],
        "density.png": ["density", *on, "--beside", other],
        "margins.svg": ["margins", *on, "--no-titles"],
        "traces.svg": ["traces", *on],
        "layers.svg": ["layers", *on],
        "audit.svg": ["audit", *on, "--measures", "trace"],
    }
    for name, words in lines.items():
        assert cli.main(["plot", *words, "--out", name, "--json", "numbers.json"]) == 0, capsys.readouterr().err
        assert capsys.readouterr().out.strip() == f"The figure: {name}"
        assert (folder / name).stat().st_size > 1000
        assert not list(folder.glob("*.kept"))
    assert cli.main(["plot", "audit", "numbers.json"]) == 0  # what was written can be drawn again
    assert (folder / "audit.svg").is_file()


def test_two_checkpoints_of_one_name_are_both_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, seed in (("one", 1), ("two", 2)):
        (folder / place).mkdir()
        (folder / "steps" / f"step-{seed}.safetensors").rename(folder / place / "net.safetensors")
    drawn: list[list[str]] = []
    whole = plotting.margins
    monkeypatch.setattr(plotting, "margins", lambda found, **more: drawn.append(list(found)) or whole(found, **more))
    weights = ["--weights", "one/net.safetensors", "--beside", "two/net.safetensors"]
    assert cli.main(["plot", "margins", "net.py:make", "--data", "data.npz", *weights, "--out", "two.svg"]) == 0
    assert drawn == [["one/net.safetensors", "two/net.safetensors"]]


def test_a_figure_removes_only_the_points_that_it_has_kept(folder: Path) -> None:
    kept = folder / "figure.kept" / "0" / "sums.safetensors"  # of a surface that was interrupted
    kept.parent.mkdir(parents=True)
    kept.touch()
    on = ["net.py:make", "--data", "data.npz", "--samples", "20", "--out"]
    assert cli.main(["plot", "margins", *on, "figure.svg"]) == 0
    assert kept.exists()
    notes = folder / "surface.kept" / "notes.txt"
    notes.parent.mkdir()
    notes.touch()
    assert cli.main(["plot", "landscape", *on, "surface.svg", "--points", "3"]) == 0
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_checkpoints_come_in_the_order_of_their_numbers(folder: Path) -> None:
    from spiritlevel.cli.plot import _checkpoints

    assert [path.stem for path in _checkpoints("steps")] == ["step-1", "step-2", "step-10"]
    assert _checkpoints("b.pt, a.pt") == [Path("b.pt"), Path("a.pt")]
    (folder / "empty").mkdir()
    for given in ("", ",", "empty"):
        with pytest.raises(InputError, match=f"--along needs files of weights, or a folder of them .*, got '{given}'"):
            _checkpoints(given)


def test_options_of_a_figure_that_contradict_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["net.py:make", "--data", "data.npz"]
    both = ["--to", "steps/step-2.safetensors", "--along", "steps"]
    assert cli.main(["plot", "landscape", *on, *both]) == 2
    assert "--to and --along each choose the directions" in capsys.readouterr().err
    assert cli.main(["plot", "landscape", *on, "--directions", "random", *both[2:]]) == 2
    assert "--directions and --along each choose the directions" in capsys.readouterr().err
    for kind in ("audit", "layers"):
        assert cli.main(["plot", kind, *on, "--beside", both[1]]) == 2
        assert f"--beside puts two on one scale, and {kind} draws one at a time" in capsys.readouterr().err
    assert cli.main(["plot", "landscape", *on, *both[:2], "--dimensions", "2"]) == 2
    assert "--to draws a line, so it does not go with --dimensions 2" in capsys.readouterr().err
    for plane in (["--dimensions", "2"], both[2:]):
        assert cli.main(["plot", "landscape", *on, *plane, "--band", "4"]) == 2
        assert "--band is drawn along a line, and this landscape is a plane" in capsys.readouterr().err
    assert cli.main(["plot", "spectrum", *on, "--batch", "0"]) == 2
    assert "--batch takes a number of samples, at least 1, got 0." in capsys.readouterr().err
    assert cli.main(["plot", "spectrum", *on, "--batch", "5", "--batch-size", "5"]) == 2
    assert "--batch says how large the mini-batches are that are measured" in capsys.readouterr().err


def test_figures_of_the_parameters_that_are_named(folder: Path) -> None:
    net, (x, y) = network().float(), DATA
    on = ["net.py:make", "--data", "data.npz", "--params", "*.bias", "--batch-size", "16", "--memory", "1GB", "--json"]
    for kind in ("layers", "density", "landscape", "audit", "traces"):
        assert cli.main(["plot", kind, *on, f"{kind}.part", *(["--points", "3"] if kind == "landscape" else [])]) == 0
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8"))["result"] for file in folder.glob("*.part")}
    assert set(kept["layers"]["layers"]) == {"0.bias", "2.bias"}
    wanted = sl.trace(net, (x.float(), y), params="*.bias").value
    assert kept["audit"]["rows"][0]["before"]["value"] > 0
    (row,) = (row for row in kept["traces"]["rows"] if row["name"] == "trace")
    assert row["value"]["value"] == pytest.approx(wanted, rel=1e-5)
    op = sl.hessian(net, (x.float(), y), params="*.bias")
    assert kept["density"]["size"] == op.size == 8
    assert "the directions are in 8 of 43 parameters (0.bias, 2.bias)" in kept["landscape"]["notes"]


def test_the_command_draws_kept_runs(folder: Path, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run").mkdir()
    report.to_json(folder / "run" / "report.json")
    for kind in ("landscape", "spectrum", "density", "margins", "traces", "layers", "audit"):
        assert cli.main(["plot", kind, "run"]) == 0, capsys.readouterr().err
        assert (folder / f"{kind}.svg").is_file()
    assert cli.main(["plot", "landscape", "run", "--beside", "run", "--out", "two", "--size", "page"]) == 0
    assert {path.suffix for path in folder.glob("two.*")} == {".svg", ".pdf", ".png"}
    tracker = sl.Tracker(NET, DATA, every=1, share=math.inf, path=folder / "rows.parquet")
    tracker.step()
    tracker.to_json(folder / "rows.json")
    for file in ("rows.parquet", "rows.json"):
        assert cli.main(["plot", "training", file]) == 0, capsys.readouterr().err


def test_options_of_other_figures_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were ignored."""
    of_landscape = {
        "--directions": "random", "--to": "steps/step-2.safetensors", "--along": "steps", "--dimensions": "2",
        "--points": "5", "--radius": "0.5", "--band": "4", "--accuracy": "",
    }  # fmt: skip
    for kind in plot_command.KINDS:
        options = {} if kind == "landscape" else dict(of_landscape)
        options |= {} if kind in ("landscape", "training") else {"--log": ""}
        options |= {} if kind == "spectrum" else {"--batch": "5"}
        options |= {} if kind == "audit" else {"--measures": "trace"}
        options |= {"--params": "0.weight", "--memory": "1GB"} if kind in ("margins", "training") else {}
        for option, value in options.items():
            words = [kind, "net.py:make", "--data", "data.npz", option, *([value] if value else [])]
            assert cli.main(["plot", *words]) == 2, words
            sentence = capsys.readouterr().err
            assert f"{option} belongs to " in sentence, words
            assert f"not to {kind}; leave it out." in sentence, words
    assert not list(folder.glob("*.svg"))


def test_options_of_a_measurement_are_refused_for_a_kept_run(
    folder: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    report.to_json(folder / "report.json")
    for option, value in (
        ("--weights", "steps/step-2.safetensors"), ("--samples", "5"), ("--points", "5"), ("--loss", "exponential"),
        ("--batch-norm", "batch"), ("--seed", "3"), ("--dtype", "float64"), ("--along", "steps"),
        ("--params", "*.bias"), ("--batch-size", "5"), ("--memory", "1GB"),
    ):  # fmt: skip
        assert cli.main(["plot", "landscape", "report.json", option, value]) == 2, option
        assert f"{option} belongs to a model, but a kept run already holds its numbers" in capsys.readouterr().err
    assert cli.main(["plot", "landscape", "report.json", "--accuracy", "--log"]) == 0
    assert cli.main(["plot", "landscape", "report.json", "--band", "4"]) == 2  # a report has a plane
    assert "--band is drawn along a line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["margin", "run"], "unknown figure 'margin': did you mean 'margins'?"),
        (["margins", "net.py:make"], "--data must be given to measure the model 'net.py:make'"),
        (["training", "net.py:make"], "training draws what a Tracker wrote"),
        (["margins", "steps"], "'steps' is not a run folder"),
        (["margins", "steps", "--data", "data.npz"], "--data belongs to a model"),
        (["margins", "net.py:make", "--data", "data.npz", "--out", "a.gif"], "--out needs the ending .svg, .pdf"),
        (["margins", "net.py:make", "--data", "data.npz", "--size", "wall"], "unknown figure size 'wall'"),
        (["landscape", "net.py:make", "--data", "data.npz", "--band", "0"], "--band takes a number of samples"),
        (["training", "nowhere.csv"], "there is no file 'nowhere.csv'"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert cli.main(["plot", *words]) == 2
    assert sentence in capsys.readouterr().err
