"""What a measure declares about itself is true, and nobody but the registry keeps lists of measures."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import spiritlevel as sl
from spiritlevel.answers.measuring import _Run
from spiritlevel.errors import InputError
from spiritlevel.measures import DEFAULT, MEASURES, Setting, select
from spiritlevel.measures.registry import FAMILIES, LEADING, SAME, WORTH, Measure, register
from spiritlevel.measures.sampling import NO_DATA, mean_of
from spiritlevel.results import Estimate

ROOT = Path(sl.__file__).parent
Data = tuple[Tensor, Tensor]


def data(count: int = 40, classes: int = 3, seed: int = 1) -> Data:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    noisy = inputs[:, :classes] if classes <= 4 else inputs @ torch.randn(4, classes, generator=generator).double()
    return inputs, (noisy + torch.randn(noisy.shape, generator=generator)).argmax(1)


class Branching(nn.Module):
    """A network that looks at its inputs before it decides what to do, so that its operations cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.relu() if bool(x.abs().sum() >= 0) else hidden)


def fitted(net: nn.Module, points: Data, steps: int = 60) -> nn.Module:
    torch.manual_seed(2)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    net = net.double()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(points[0]), points[1]).backward()
        optimizer.step()
    return net.eval()


@functools.cache
def network(kind: str, width: int = 10, classes: int = 3, count: int = 40) -> tuple[nn.Module, Data]:
    points = data(count, classes)
    layers: dict[str, Callable[[], list[nn.Module]]] = {
        "relu": lambda: [nn.ReLU()],
        "tanh": lambda: [nn.Tanh()],
        "layer norm": lambda: [nn.LayerNorm(width), nn.GELU()],
    }
    if kind == "branching":
        return fitted(Branching(), points), points
    made = nn.Sequential(nn.Linear(4, width), *layers[kind](), nn.Linear(width, classes))
    return fitted(made, points), points


@functools.cache
def shared(kind: str) -> Setting:
    return Setting(*network(kind))


# ---------------------------------------------------------------- the entries


@pytest.mark.parametrize("name", MEASURES)
def test_every_declaration_is_one_that_is_known(name: str) -> None:
    measure = MEASURES[name]
    assert measure.family in FAMILIES
    assert measure.worth in WORTH
    assert (measure.family == "norm") == (measure.direction == "larger")
    assert (measure.family == "margin") == (measure.direction == "wider")
    assert not set(measure.also_called) & set(MEASURES)


def test_the_sets_of_measures_name_measures() -> None:
    assert set(DEFAULT) <= set(MEASURES)
    for family, names in LEADING.items():
        assert [MEASURES[name].family for name in names] == [family] * len(names)


def test_what_others_call_a_measure_leads_to_it() -> None:
    for measure in MEASURES.values():
        for other in measure.also_called:
            with pytest.raises(InputError, match=f"did you mean '{measure.name}'"):
                select(other.upper())
    assert MEASURES["largest_eigenvalue"].also_called


def test_a_declaration_cannot_be_forgotten() -> None:
    whole = {field.name: getattr(MEASURES["trace"], field.name) for field in dataclasses.fields(Measure)}
    for name in ("family", "worth", "passes", "sampling"):
        with pytest.raises(TypeError, match=name):
            Measure(**{key: value for key, value in whole.items() if key != name})


@pytest.mark.parametrize("kind", ["relu", "tanh", "layer norm", "branching"])
@pytest.mark.parametrize("name", MEASURES)
def test_a_value_is_worth_what_is_declared(name: str, kind: str) -> None:
    found = MEASURES[name].attempt(shared(kind))
    assert found.status in (*WORTH[MEASURES[name].worth], "undefined"), found.reason


def test_what_is_declared_as_exact_or_estimated_is_both() -> None:
    named = [name for name, measure in MEASURES.items() if measure.worth == "exact or estimated"]
    assert "trace" in named
    for name in named:
        statuses = {MEASURES[name].attempt(shared(kind)).status for kind in ("relu", "branching")}
        assert statuses == {"exact", "estimated"}, name


# ---------------------------------------------------------------- means over samples


def alone(measure: Measure, setting: Setting) -> list[float]:
    """The measure of every sample as if it were all of the data."""
    return [measure.attempt(setting.part(torch.tensor([n]))).value for n in range(setting.count)]


@pytest.mark.parametrize("name", [name for name, measure in MEASURES.items() if measure.needs_data])
def test_a_declared_mean_over_samples_is_one_and_no_other_measure_is(name: str) -> None:
    net, (inputs, labels) = network("relu")
    setting, measure = Setting(net, (inputs[:7], labels[:7])), MEASURES[name]
    whole, each = measure.attempt(setting).value, alone(measure, setting)
    is_mean = math.isclose(whole, sum(each) / len(each), rel_tol=1e-9)
    assert is_mean == measure.mean_over_samples, f"{whole} against {sum(each) / len(each)}"


MEANS = [name for name, measure in MEASURES.items() if measure.mean_over_samples]


@pytest.mark.parametrize("name", MEANS)
def test_the_values_of_samples_are_what_each_sample_has_alone(name: str) -> None:
    setting, measure = Setting(*network("relu", count=120)), MEASURES[name]
    value = measure.compute(setting).value
    parts = measure.parts(setting, 10**6)
    assert parts is not None
    assert math.isnan(parts.share)
    assert parts.bias == 0
    assert float(parts.values.mean()) == pytest.approx(value, rel=1e-9)
    some = [measure.compute(setting.part(torch.tensor([n]))).value for n in (0, 50, 119)]
    assert parts.values[[0, 50, 119]].tolist() == pytest.approx(some, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("name", MEANS)
def test_values_of_samples_that_are_estimated_have_the_mean_of_the_measure(name: str) -> None:
    """Other probes than those of the value, eight of them: so only roughly the same mean."""
    setting, measure = Setting(*network("layer norm", width=12, count=120)), MEASURES[name]
    found = measure.compute(setting)
    parts = measure.parts(setting, 10**6)
    assert parts is not None
    assert float(parts.values.mean()) == pytest.approx(found.value, rel=1e-9 if not found.stderr else 0.5)


# ---------------------------------------------------------------- cost


class Work(TorchDispatchMode):
    """Counts the multiplications of matrices that run below it, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        plain = func._overloadpacket.__name__.removesuffix("_")  # `addmm` of `addmm_`
        count = flop_registry.get(getattr(torch.ops.aten, plain, None))
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def work(function: Callable[[], object]) -> int:
    with (counter := Work()):
        function()
    return counter.flops


def test_work_is_counted_forward_and_backward() -> None:
    net, (inputs, _) = network("relu")
    forward = work(lambda: net(inputs))
    assert forward == 2 * len(inputs) * (4 * 10 + 10 * 3)
    gradient = work(lambda: torch.autograd.grad(net(inputs).sum(), list(net.parameters())))
    assert 2 * forward < gradient < 3 * forward + 1  # no gradient by the inputs


@pytest.mark.parametrize(("kind", "classes"), [("relu", 8), ("tanh", 3), ("layer norm", 3)])
@pytest.mark.parametrize("name", MEASURES)
def test_the_declared_cost_is_of_the_right_order(name: str, kind: str, classes: int) -> None:
    net, points = network(kind, width=24, classes=classes, count=400)
    setting, measure = Setting(net, points), MEASURES[name]
    setting.check()
    found: list[Estimate] = []
    passes = work(lambda: found.append(measure.attempt(setting))) / work(lambda: net(points[0]))
    declared = measure.forward_passes(setting)
    if found[0].status == "undefined":
        return
    if declared == 0:
        assert passes < 0.1
    else:
        assert declared / 4 < passes < 4 * declared, f"{passes:.1f} passes, declared {declared:.1f}"


def test_the_cost_of_a_measure_that_is_not_defined_is_nothing() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] * self.w

    setting = Setting(Bare().double(), data())
    assert MEASURES["relative_flatness"].forward_passes(setting) == 0
    assert "no linear layer" in MEASURES["relative_flatness"].attempt(setting).reason


# ---------------------------------------------------------------- data, and margins


class Untouchable(nn.Module):
    """Holds parameters, and must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the network ran")


def test_measures_without_data_do_not_read_the_samples() -> None:
    net, (inputs, labels) = network("relu")
    named = [name for name, measure in MEASURES.items() if not measure.needs_data]
    assert "weight_norm" in named
    others = [(-3 * inputs, (labels + 1) % 3), (inputs * math.nan, labels), (inputs[:1] * 1e9, labels[:1])]
    for name in named:
        values = {MEASURES[name].compute(Setting(net, each)).value for each in [(inputs, labels), *others]}
        assert len(values) == 1, name
        assert math.isfinite(values.pop())


@pytest.mark.parametrize("name", [name for name, measure in MEASURES.items() if measure.needs_data])
def test_measures_with_data_do(name: str) -> None:
    net, (inputs, labels) = network("relu")
    before, after = (MEASURES[name].attempt(Setting(net, (scale * inputs, labels))) for scale in (1.0, 1.1))
    assert math.isfinite(before.value)
    assert before.value != after.value


@pytest.mark.parametrize("name", [name for name, measure in MEASURES.items() if measure.needs_data])
def test_statistics_of_the_output_margins_need_nothing_else(name: str) -> None:
    setting, known = Setting(Untouchable(), data()), Setting(*network("relu"))
    vars(setting)["margins"] = known.margins
    if MEASURES[name].of_margins:
        assert MEASURES[name].compute(setting).value == MEASURES[name].compute(known).value
    else:
        with pytest.raises((AssertionError, InputError, RuntimeError), match=r"the network ran|forward"):
            MEASURES[name].compute(setting)


# ---------------------------------------------------------------- a new measure is one declaration


@pytest.fixture
def largest_output(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The example of CONTRIBUTING.md, a measure that nobody has heard of, with a voice in advice."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(def _largest.*?)```", text, flags=re.DOTALL)
    monkeypatch.setitem(MEASURES, "largest_output", MEASURES["trace"])  # taken out again afterwards, whatever it is
    known = {"register": register, "mean_of": mean_of, "SAME": SAME}
    exec(example, {**known, "Setting": Setting, "Estimate": Estimate, "Tensor": Tensor})
    MEASURES["largest_output"] = dataclasses.replace(MEASURES["largest_output"], advice="its outputs are larger")
    return MEASURES["largest_output"]


def test_a_new_measure_is_measured_compared_audited_and_shown(largest_output: Measure) -> None:
    (net, points), (other, _) = network("relu"), network("tanh")
    wanted = float(net(points[0]).detach().max(1).values.mean())
    report = sl.measure(net, points, measures=["largest_output"], samples=35, parts=["audit"])
    row = report.row("largest_output")
    assert (row.family, row.needs_data, row.subset_error_unknown) == ("margin", True, False)
    assert row.interval[0] < wanted < row.interval[1]
    assert "largest_output" in report.to_html()
    found = sl.compare(net, other, points, measures=["largest_output"], audit=False)
    assert found.row("largest_output").how == "paired t"
    assert {row.name for row in found.rows if row.decides} == {"accuracy", "loss", "largest_output"}
    assert sl.audit(net, points, measures=["largest_output"]).row("largest_output", "rescale_layers").declared


def test_the_order_of_a_measurement_follows_the_declared_costs(
    largest_output: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, points = network("relu")
    names = ["largest_eigenvalue", "largest_output", "trace"]

    def order() -> list[str]:
        run = _Run(Setting(net, points), None, names, ["audit"], None, None, None)
        return [step.name for step in run.steps()]

    first = ["accuracy and margins", "trace", "correlations"]
    assert order() == [*first, "largest_output", "audit", "largest_eigenvalue"]
    monkeypatch.setitem(MEASURES, "largest_output", dataclasses.replace(largest_output, passes=lambda setting: 1e12))
    assert order() == [*first, "audit", "largest_eigenvalue", "largest_output"]
    options: dict[str, Any] = {"measures": names[1:2], "parts": [], "time_limit": 600.0}
    assert "no time for it" in sl.measure(net, points, **options).left_out["largest_output"]
    monkeypatch.setitem(MEASURES, "largest_output", dataclasses.replace(largest_output, passes=1e12, of_margins=True))
    assert "largest_output" not in sl.measure(net, points, **options).left_out


def test_a_norm_that_needs_data_and_a_margin_that_needs_none_are_shown_as_such(
    largest_output: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, points = network("relu")
    constant = dataclasses.replace(largest_output, sampling=NO_DATA, compute=lambda setting: Estimate(4.25))
    monkeypatch.setitem(MEASURES, "largest_output", constant)
    row = sl.measure(net, points, measures=["largest_output"], samples=35, parts=[]).row("largest_output")
    assert (row.needs_data, row.value.data_stderr, row.interval) == (False, None, (4.25, 4.25))


# ---------------------------------------------------------------- nobody else keeps lists

ALLOWED = {
    "estimators/": "functions that are called like measures",
    "results/": "what files of version 0.1 did not say",
    "answers/quantities.py": "columns of the tracker, which it finds in ways of its own",
    "answers/tracking.py": "the names of its curves",
    "page/changes.py": "what tells which samples flip, in words",
    "papers/": "studies and claims name what they are about",
}


def lists_of_measures(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and names of every list, tuple, set, dict, or string to be split, with names of measures among its items."""
    for node in ast.walk(tree):
        items: list[Any] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.Dict):
            items = [item.value for item in [*node.keys, *node.values] if isinstance(item, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            words = node.value.split()
            items = words if all(word in MEASURES for word in words) else []
        if found := [item for item in items if isinstance(item, str) and item in MEASURES]:
            yield node.lineno, found


def test_no_list_of_measures_outside_the_registry() -> None:
    found: dict[str, list[str]] = {where: [] for where in ALLOWED}
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if path.startswith("measures/"):
            continue
        home = next((where for where in ALLOWED if path.startswith(where)), "")
        for line, names in lists_of_measures(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(home, []).append(f"{path}:{line}: {', '.join(names)}")
    assert found.pop("", []) == []
    assert all(found.values()), "an exception that nobody needs"


@pytest.mark.parametrize(
    "code",
    [
        "DEAR = ('pac_bayes_flatness', 'other')",
        "if name in ['trace']: pass",
        "seen = {'margin_mean'}",
        "names = {'margin': 'margin_mean'}",
        "names = {'trace': f}",
        "names = frozenset('trace weight_norm'.split())",
    ],
)
def test_the_search_for_lists_finds_them(code: str) -> None:
    assert list(lists_of_measures(ast.parse(code)))


@pytest.mark.parametrize("code", ["name == 'trace'", "f('trace')", "'trace and margin'", "('loss', 'accuracy')"])
def test_the_search_for_lists_finds_no_single_names(code: str) -> None:
    assert not list(lists_of_measures(ast.parse(code)))


# ---------------------------------------------------------------- files of version 0.1


def without(value: Any, *names: str) -> Any:
    """The dict of a result as it was before these fields."""
    if isinstance(value, dict):
        return {key: without(item, *names) for key, item in value.items() if key not in names}
    return [without(item, *names) for item in value] if isinstance(value, list) else value


def _without_fingerprint(page: str) -> str:
    """A page but for what says which file its numbers belong to."""
    return re.sub(r"(spiritlevel-numbers\" content=\"|fingerprint )[0-9a-f]{12}", "", page)


def test_files_that_carry_less_of_the_registry_are_shown_as_before() -> None:
    (net, points), (other, _) = network("relu"), network("tanh")
    report = sl.measure(net, points, measures=["weight_norm", "trace", "margin_mean"], samples=35, parts=[])
    older = sl.Report.from_dict(without(report.to_dict(), "needs_data", "leads"))
    assert [row.needs_data for row in older.rows] == [row.needs_data for row in report.rows] == [False, True, True]
    assert older.leads == {}
    assert report.leads == {"curvature": ("trace",), "margin": ("margin_mean",)}
    assert _without_fingerprint(older.to_html()) == _without_fingerprint(report.to_html())
    found = sl.compare(net, other, points, audit=False)
    older_found = sl.Comparison.from_dict(without(found.to_dict(), "decides"))
    assert [row.name for row in found.rows if row.decides] == ["accuracy", "input_distance", "loss"]
    again = sl.Comparison.from_dict(found.to_dict())
    assert _without_fingerprint(older_found.to_html()) == _without_fingerprint(again.to_html())


def test_no_two_measures_are_described_alike() -> None:
    meanings = [measure.meaning for measure in MEASURES.values()]
    assert len(set(meanings)) == len(meanings)
