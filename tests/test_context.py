"""One context of a measurement: bound once, shared by all that is measured together."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import spiritlevel as sl
from spiritlevel.answers.changes import as_change
from spiritlevel.binding.batches import Batches
from spiritlevel.binding.context import Context
from spiritlevel.binding.modules import in_double
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.reading import Form, Reading
from spiritlevel.errors import InputError
from spiritlevel.measures import Setting, select
from spiritlevel.operators import averaging, replay
from spiritlevel.transforms import (
    input_map,
    permute_units,
    radial,
    rescale_all,
    rescale_layers,
    scale_last_layer,
    shift_logits,
    split_units,
)
from spiritlevel.transforms.certificates import Sample
from spiritlevel.watching import derivatives, recording
from spiritlevel.watching.structure import Watch

Data = tuple[torch.Tensor, torch.Tensor]


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 4, generator=generator), torch.arange(40) % 3


def counted(monkeypatch: pytest.MonkeyPatch, *kinds: type) -> Counter[str]:
    """How often each class is built from here on."""
    counts: Counter[str] = Counter()
    for kind in kinds:

        def built(self: Any, *args: Any, before: Callable[..., None] = kind.__init__, **kwargs: Any) -> None:
            counts[type(self).__name__] += 1
            before(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", built)
    return counts


def test_measures_of_one_model_copy_it_once_and_check_the_data_once(
    monkeypatch: pytest.MonkeyPatch, data: Data
) -> None:
    model = net()
    counts = counted(monkeypatch, Problem, Batches)
    report = sl.measure(model, data, parts=["spectrum", "landscape"])
    assert len(report.rows) == len(select())
    assert counts == {"Problem": 1, "Batches": 1}


def test_a_whole_report_binds_each_different_model_once(monkeypatch: pytest.MonkeyPatch, data: Data) -> None:
    model = net()
    bound: Counter[str] = Counter()
    moved = Context.moved

    def counting(self: Context, model: nn.Module, **options: Any) -> Context:
        bound["moved"] += 1
        return moved(self, model, **options)

    monkeypatch.setattr(Context, "moved", counting)
    counts = counted(monkeypatch, Context, Batches, Watch)
    report = sl.measure(model, data)
    assert report.audit is not None
    assert counts["Setting"] == 1
    tried = len(report.audit.certificates)
    searched = 2 * len(report.audit.worst)
    assert bound["moved"] <= tried + searched
    assert counts["Batches"] <= 6  # version 0.1: 46


def test_a_whole_report_binds_no_network_more_than_twice(monkeypatch: pytest.MonkeyPatch, data: Data) -> None:
    """Once with the parameters that are measured, once with all of them, to follow and to certify it."""
    bound: Counter[tuple[Any, ...]] = Counter()
    before = Problem.__init__

    def counting(self: Problem, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        values = torch.cat([tensor.double().reshape(-1) for tensor in {**self.params, **self.constants}.values()])
        bound[self.dtype, self.batch_norm, tuple(values.tolist())] += 1

    monkeypatch.setattr(Problem, "__init__", counting)
    report = sl.measure(net(), data)
    assert report.audit is not None
    assert len(report.audit.certificates) >= 5
    assert max(bound.values()) <= 2  # before: 15 times the network itself


def test_what_an_original_returns_is_kept_and_a_large_one_is_not() -> None:
    """Its outputs are small; a copy in float64 and a recorded pass of a large one are not, and it may go."""
    large, small, x = nn.Linear(1_000, 1_001), nn.Linear(1_000, 10), torch.randn(3, 1_000)
    for model, kept in ((large, False), (small, True)):
        sample = Sample.of(model, x)
        assert sample.outputs(model, "eval") is sample.outputs(model, "eval")
        assert (sample.problem(model) is sample.problem(model)) == kept
    held, sample = weakref.ref(large), Sample.of(large, x)
    sample.outputs(large, "eval")
    del model, large
    assert held() is None
    other = nn.Linear(1_000, 1_001)  # which may have the same id
    assert torch.allclose(sample.outputs(other, "eval"), other(x).double())


def count_calls(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], owner: Any, name: str) -> None:
    """Count under its name how often a function is called from here on."""
    function = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)


def test_a_whole_report_does_the_work_of_a_code_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes are measured here: the network, and that with split units, which has more of them."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(60, 8, generator=generator), torch.arange(60) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 3))
    counts: Counter[str] = Counter()
    for owner, name in (
        (derivatives, "_right"),  # the check of derivatives
        (recording.GradientNorms, "_try_rules"),
        (averaging, "try_to_trace"),
        (replay, "try_to_trace"),
        (replay.Tape, "multiply"),  # products with one vector, or with many at once
    ):
        count_calls(monkeypatch, counts, owner, name)
    report = sl.measure(model, (inputs, targets))
    assert report.audit is not None
    tried = len(report.audit.certificates)
    assert tried >= 5
    assert report.spectrum is not None
    assert report.spectrum.matvecs == report.parameters  # every column once
    assert report.spectrum.trace.status == report.spectrum.frobenius_norm.status == "exact"
    assert counts["_right"] <= 4  # twice a code at most: once for gradients, once for the Hessian
    assert counts["_try_rules"] <= 4  # for traces, and for the blocks of layers
    assert counts["try_to_trace"] <= 3  # Hessian, Gauss-Newton matrix, and that of the search
    assert counts["multiply"] <= 60 * tried  # some 25 a transformed model; the report needed 375 for itself


def test_losses_at_many_points_are_those_at_each(data: Data) -> None:
    setting = Setting(net(), data)
    thetas = setting.theta + 0.1 * torch.randn(5, setting.problem.size, generator=torch.Generator().manual_seed(1))
    together = setting.losses_at_each(5, lambda some: thetas[list(some)])
    one_by_one = torch.stack([setting.losses_at(theta) for theta in thetas])
    assert together.shape == (5, 40)
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
    assert setting.problem.facts.get("points at once", True)


class Looks(nn.Module):
    """Branches on a number, which `vmap` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if bool(self.layer.weight.sum() > 0) else -self.layer(x)


def test_a_model_that_cannot_run_at_many_points_at_once_runs_at_one_after_the_other(data: Data) -> None:
    setting = Setting(Looks(), data)
    thetas = setting.theta + torch.randn(6, setting.problem.size, generator=torch.Generator().manual_seed(1))
    found = setting.losses_at_each(6, lambda some: thetas[list(some)])
    assert setting.problem.facts["points at once"] is False
    torch.testing.assert_close(found, torch.stack([setting.losses_at(theta) for theta in thetas]))


def test_a_hessian_that_is_written_down_is_the_one_of_the_products(data: Data) -> None:
    inputs, targets = data[0].double(), data[1]
    plain, written = (Setting(net().double(), (inputs, targets)) for _ in range(2))
    written.writes = True
    assert plain.hessian.entries is None
    matrix = plain.hessian.dense()
    assert written.hessian.entries is not None
    vector = torch.randn(plain.problem.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(written.hessian @ vector, matrix @ vector, rtol=1e-10, atol=1e-12)
    summary, ends = sl.spectrum(written.hessian, k=2), torch.linalg.eigvalsh(matrix)
    torch.testing.assert_close(summary.largest.values, ends[-2:].flip(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(summary.smallest.values, ends[:2], rtol=1e-8, atol=1e-12)
    assert summary.density.exact
    assert abs(written.spectrum.largest.value - float(ends[-1])) <= max(written.spectrum.largest.tolerance, 1e-12)
    pairs = sl.eigenvalues(written.hessian, k=2, which="magnitude")
    assert pairs.vectors is not None
    torch.testing.assert_close(matrix @ pairs.vectors, pairs.vectors * pairs.values, rtol=1e-8, atol=1e-10)


def test_the_audit_takes_what_the_report_has_measured(monkeypatch: pytest.MonkeyPatch, data: Data) -> None:
    setting = Setting(net(), data)
    trace = sl.measures.MEASURES["trace"]
    first = trace.attempt(setting)
    monkeypatch.setattr(Setting, "traces", property(lambda self: pytest.fail("measured again")))
    assert trace.attempt(setting) is first


def test_other_data_keep_the_model_and_forget_the_rest(data: Data) -> None:
    context = Context(net(), data)
    assert context.count == 40
    other = context.on((data[0][:7], data[1][:7]))
    assert other.count == 7
    assert other.problem is context.problem
    assert context.count == 40


def test_a_part_is_drawn_without_replacement_and_in_order(data: Data) -> None:
    context = Context(net(), data, seed=3)
    part, indices = context.drawn(10)
    assert indices is not None
    assert part.count == 10
    assert indices.tolist() == sorted(set(indices.tolist()))
    torch.testing.assert_close(part.data[0], data[0][indices])
    assert context.drawn(40) == (context, None)
    assert context.drawn(None) == (context, None)


def test_another_model_on_the_same_data_keeps_the_chosen_parameters(data: Data) -> None:
    context = Context(net(), data, params="0")
    other = context.moved(net(1))
    assert list(other.problem.params) == ["0.weight", "0.bias"]
    assert other.batches is context.batches
    assert not torch.equal(other.theta, context.theta)
    with pytest.raises(InputError, match="unknown parameter '0'"):
        context.moved(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))


def test_what_is_known_of_a_model_serves_models_of_the_same_code_alone(data: Data) -> None:
    context = Context(net(), data)
    context.problem.facts["derivatives"] = True, 0.0
    assert context.moved(net(1)).problem.facts
    assert not context.moved(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).problem.facts
    hooked = net(1)
    hooked[0].register_forward_hook(lambda *_: None)
    assert not context.moved(hooked).problem.facts


def test_an_adopted_trace_gives_the_products_of_the_new_model(data: Data) -> None:
    model, other = net().double(), net(1).double()
    inputs, targets = data[0].double(), data[1]
    setting = Setting(model, (inputs, targets))
    _ = setting.hessian @ torch.ones(setting.problem.size, dtype=torch.float64)
    moved = setting.moved(other)
    expected = sl.hessian(other, (inputs, targets)).dense()
    torch.testing.assert_close(moved.hessian.dense(), expected, rtol=1e-10, atol=1e-12)


class Branching(nn.Module):
    """Takes another path where its weights are large."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        nn.init.constant_(self.layer.weight, size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found.tanh() if bool(self.layer.weight.sum() > 1) else found


@pytest.mark.parametrize("large", [False, True])
def test_degrees_are_inherited_unless_numbers_decide_which_operations_run(data: Data, large: bool) -> None:
    setting, other = Setting(net(), data), net(1)
    assert setting.moved(other).structure == Setting(other, data).structure
    assert setting.structure is setting.moved(other).structure
    assert setting.classes == setting.moved(other).classes == 3
    branching = Setting(Branching(0.1 * large), data)
    assert branching.structure.failure
    assert branching.moved(Branching(0.2)).structure.failure


def test_a_reverse_mode_product_is_what_an_adopted_trace_is_held_against(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where plain autograd refuses, forward over reverse mode takes its place; where they differ, a new trace."""
    setting, ones = Setting(net(), data), torch.ones(Setting(net(), data).problem.size)
    expected, asked = sl.hessian(net(1), data) @ ones, list[str]()
    _ = setting.hessian @ ones

    def refusing(*_: Any) -> Any:
        asked.append("refused")
        raise RuntimeError("no double backward")

    def wrong(*args: Any) -> Any:
        asked.append("wrong")
        return {name: 2 * part for name, part in args[1].items()}

    for instead in (refusing, wrong):
        monkeypatch.setattr(averaging, "in_reverse", lambda product, instead=instead: instead)
        torch.testing.assert_close(setting.moved(net(1)).hessian @ ones, expected)
    assert asked == ["refused", "wrong"]


def _seeded(data: Data) -> dict[str, Callable[[Any], object]]:
    """Every public function with a seed, as a function of it; and the transforms that this network has."""
    model, op, values = net(), sl.hessian(net(), data), torch.rand(30)
    few: dict[str, Any] = {"measures": ["trace"]}
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "audit": ((model, data), few | {"transforms": ["rescale_layers"]}),
        "batch_eigenvalues": ((model, data), {"batch_size": 4, "count": 1}),
        "choose_bits": ((model, data, 4), {}),
        "compare": ((model, net(), data), few | {"audit": False}),
        "correlate": ((values, values.sin()), {}),
        "landscape": ((model, data), {"points": 3}),
        "measure": ((model, data), few | {"parts": []}),
        "perturb": ((model, data, "int8"), {}),
        "rank": (({"a": model, "b": net()}, data), few),
        "stability": ((torch.optim.SGD(model.parameters(), 0.1), model, data), {}),
        "Tracker": ((model, data), {}),
    }
    named = {name: getattr(sl, name) for name in sl._HOME}
    known = {name for name, value in named.items() if inspect.isfunction(value) or name == "Tracker"}
    known = {name for name in known if "seed" in inspect.signature(named[name]).parameters}
    for name in known - given.keys():
        given[name] = ((op,) if "op" in inspect.signature(named[name]).parameters else (model, data)), {}
    transforms = {
        name: lambda seed, name=name: getattr(sl.transforms, name)(model, data=data[0], seed=seed)  # type: ignore[misc]
        for name in ("permute_units", "shift_logits", "split_units")
    }
    return transforms | {
        name: lambda seed, name=name: named[name](*given[name][0], **given[name][1], seed=seed)  # type: ignore[misc]
        for name in known
    }


def test_a_seed_is_any_kind_of_whole_number_everywhere(data: Data) -> None:
    functions = _seeded(data)
    assert {"spectrum", "rank", "Tracker", "split_units"} <= functions.keys()
    for function in functions.values():
        for seed in (np.int64(3), np.uint8(3), torch.tensor(3)):
            function(seed)
        for seed in (0.5, -1, True, 5_000_000_000, "3"):
            with pytest.raises(InputError, match=r"^seed must be a whole number from 0 to 4,000,000,000"):
                function(seed)


COMMON = ("loss", "params", "batch_norm", "batch_size", "memory", "group", "seed")
EVERYWHERE = ("audit", "compare", "landscape", "measure", "sample_traces", "trace")
BINDING = (
    *EVERYWHERE,
    "batch_eigenvalues",
    "choose_bits",
    "empirical_fisher",
    "gauss_newton",
    "hessian",
    "hessian_variance",
    "input_curvature",
    "margins",
    "perturb",
    "stability",
    "Tracker",
)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_common_options_are_there_in_one_order(name: str) -> None:
    options = list(inspect.signature(getattr(sl, name)).parameters)
    assert [option for option in options if option in COMMON] == list(COMMON)


@pytest.mark.parametrize("name", BINDING)
def test_every_function_of_model_and_data_takes_the_same_options_of_reading_last(name: str) -> None:
    options = inspect.signature(getattr(sl, name)).parameters
    assert [option for option in options if option in COMMON] == [option for option in COMMON if option in options]
    last = list(options.values())[-1]
    assert (last.name, last.kind, last.annotation) == ("reading", last.VAR_KEYWORD, "Unpack[Reading]")


def test_no_function_of_model_and_data_is_forgotten() -> None:
    functions = {
        name: getattr(sl, name) for name in sl._HOME if inspect.isfunction(getattr(sl, name)) or name == "Tracker"
    }
    found = {name: inspect.signature(function).parameters.keys() for name, function in functions.items()}
    assert {name for name, known in found.items() if known & {"model", "model_a"} and "loss" in known} == set(BINDING)


def test_the_options_of_reading_have_one_order() -> None:
    assert tuple(Reading.__annotations__) == ("target", "batch", "output", "unit", "batches")
    assert tuple(Form().options()) == tuple(Reading.__annotations__)


@pytest.mark.parametrize("name", BINDING)
def test_an_unknown_option_is_one_for_python(name: str, data: Data) -> None:
    model: Any = net()
    first = (torch.optim.SGD(model.parameters(), lr=0.1), model) if name == "stability" else (model,)
    first = (model, model) if name == "compare" else first
    with pytest.raises(TypeError, match=rf"^{name}\(\) got .* 'targte'; did you mean 'target'\?$"):
        getattr(sl, name)(*first, data, *{"perturb": ("int8",), "choose_bits": (4,)}.get(name, ()), targte="labels")


@pytest.mark.parametrize("name", BINDING)
def test_a_budget_that_is_none_is_refused_before_anything_is_measured(name: str, data: Data) -> None:
    """A report went on, and called measures undefined for it; a comparison said nothing."""
    function, model = getattr(sl, name), net()
    if "memory" not in inspect.signature(function).parameters:
        assert name in {"margins", "Tracker"}
        return
    first = (torch.optim.SGD(model.parameters(), lr=0.1), model) if name == "stability" else (model,)
    first = (model, net(1)) if name == "compare" else first
    for memory in ("lots", 0, -1):
        with pytest.raises(InputError, match=r"^memory must be"):
            function(*first, data, *{"perturb": ("int8",)}.get(name, ()), memory=memory)


def test_results_say_which_parameters_were_chosen(data: Data) -> None:
    """The same number of some parameters and of all is not the same number."""
    model, said = net(), "18 of 51 parameters (2.weight)"
    report = sl.measure(model, data, params="2.weight", measures=["trace"], parts=[])
    assert report.settings["parameters"] == said
    assert str(report).startswith(f"Sequential: {said}\n")
    assert said in report.to_html()
    audit = sl.audit(model, data, params="2.weight", measures=["trace"], transforms=["shift_logits"])
    assert said in audit.notes
    assert said in str(audit)
    found = sl.compare(model, net(1), data, params="2.weight", measures=["trace"], audit=False)
    assert found.settings["parameters"] == f"{said} and {said}"
    whole = sl.measure(model, data, params=["0", "2"], measures=["trace"], parts=[])
    assert "parameters" not in whole.settings
    assert str(whole).startswith("Sequential: 51 parameters\n")
    frozen = net()
    frozen[0].requires_grad_(False)  # type: ignore[index]
    assert "parameters" not in sl.measure(frozen, data, measures=["trace"], parts=[]).settings


def test_rank_refuses_a_budget_that_is_none(data: Data) -> None:
    with pytest.raises(InputError, match=r"^checkpoint 'a': memory must be"):
        sl.rank({"a": net(), "b": net(1)}, data, memory="lots")


@pytest.mark.parametrize("name", ["measure", "audit", "compare"])
def test_chosen_parameters_are_those_that_are_measured(name: str, data: Data) -> None:
    model = net()
    found = sl.trace(model, data, params="2").value
    if name == "compare":
        rows = sl.compare(model, net(1), data, params="2", measures=["trace"], audit=False).rows
        value = next(row.a.value for row in rows if row.name == "trace")
    elif name == "audit":
        value = (
            sl.audit(model, data, params="2", measures=["trace"], transforms=["rescale_layers"]).rows[0].before.value
        )
    else:
        value = (
            sl.measure(model, data, params="2", measures=["trace"], parts=[], memory="1GB", batch_size=7)
            .rows[0]
            .value.value
        )
    assert value == pytest.approx(found, rel=1e-5)


def test_threads_take_turns_and_leave_the_process_as_it_was(data: Data) -> None:
    def switches() -> tuple[Any, ...]:
        return torch.utils.checkpoint.CheckpointFunction, torch.backends.mha.get_fastpath_enabled()  # type: ignore[attr-defined]

    inside, over = threading.Event(), threading.Event()
    found: list[float] = []
    models = [net(), net()]
    expected, before = sl.trace(net(), data).value, switches()
    other = threading.Thread(target=lambda: found.append(sl.trace(models[1], data).value))

    def first(module: nn.Module, args: Any) -> None:
        if not other.ident:
            other.start()
            inside.wait(0.5)  # it does not get that far

    def second(module: nn.Module, args: Any) -> None:
        inside.set()
        over.wait(30)  # leaves after the one that came first

    models[0].register_forward_pre_hook(first)
    models[1].register_forward_pre_hook(second)
    found.append(sl.trace(models[0], data).value)
    over.set()
    other.join()
    assert found == [expected, expected]
    assert switches() == before


COPIED: dict[str, Callable[[nn.Module], Any]] = {
    "rescale_layers": lambda model: rescale_layers(model, {"0": 2.0, "2": 0.5}).model,
    "rescale_all": lambda model: rescale_all(model, 2.0).model,
    "scale_last_layer": lambda model: scale_last_layer(model, 2.0).model,
    "permute_units": lambda model: permute_units(model, data=torch.ones(4, 4)).model,
    "split_units": lambda model: split_units(model, data=torch.ones(4, 4)).model,
    "shift_logits": lambda model: shift_logits(model, data=torch.ones(4, 4)).model,
    "input_map": lambda model: input_map(model, 2.0, 1.0).model,
    "radial": lambda model: radial(model, delta=1.0, rho=0.25, r_hat=0.5).model,
    "in_double": in_double,
    "another model": lambda model: as_change(model).other,
}
"""What copies a model, or reads its parameters."""


@pytest.mark.parametrize("name", COPIED)
def test_a_model_is_copied_as_it_is_while_another_thread_measures_it(name: str, data: Data) -> None:
    """Points of a surface stand in the place of the model's own parameters during each pass."""
    model, found = net(), list[Any]()
    expected, own = state(COPIED[name](net())), [*model.parameters()]
    other = threading.Thread(target=lambda: found.append(state(COPIED[name](model))))

    def hook(module: nn.Module, args: Any) -> None:
        moved = any(a is not b and not torch.equal(a, b) for a, b in zip(model.parameters(), own, strict=True))
        if moved and not other.ident:
            other.start()
            other.join(0.3)  # it waits for its turn

    model.register_forward_pre_hook(hook)
    sl.landscape(model, data, directions="random", points=3)
    assert other.ident
    other.join()
    assert found
    assert found[0].keys() == expected.keys()
    assert all(torch.equal(found[0][key], expected[key]) for key in expected)


def state(copied: Any) -> dict[str, torch.Tensor]:
    return dict(copied.state_dict() if isinstance(copied, nn.Module) else copied)


def test_a_model_is_not_measured_while_another_thread_moves_it_along_an_update(data: Data) -> None:
    model, found = net(), list[float]()
    expected = sl.trace(model, data).value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = threading.Thread(target=lambda: found.append(sl.trace(model, data).value))
    before = model[0].weight.detach().clone()  # type: ignore[index,union-attr]

    def closure() -> torch.Tensor:
        if not torch.equal(model[0].weight, before) and not other.ident:  # type: ignore[index,union-attr]
            other.start()
            other.join(0.3)
        return nn.functional.cross_entropy(model(data[0]), data[1])

    closure().backward()
    sl.critical_sharpness(closure, optimizer)
    assert other.ident
    other.join()
    assert found == [expected]


def test_one_model_in_several_threads_is_measured_once_in_each(data: Data) -> None:
    model, found = net(), list[float]()
    expected = sl.trace(model, data).value
    threads = [threading.Thread(target=lambda: found.append(sl.trace(model, data).value)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
    assert model.training
