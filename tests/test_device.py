"""Everything on a pretend accelerator (`pretend_device.py`): the CPU's numbers, and few waits for the device.

The device stays registered for as long as its process lives, so all checks run in one of their own, which is this file
as a program: `python test_device.py`. It prints a line of JSON for each check; the tests read them.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.binding import cores, devices
from spiritlevel.binding.context import Context
from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES
from spiritlevel.papers.training.running import Run

DEVICE = "pretend"


def relu_net() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
        nn.ReLU(),
        nn.Linear(4, 3),
    )
    return net.double().eval()


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 3), nn.ReLU(), nn.Linear(3, 3)).double()


class Smooth(nn.Module):
    """Attention and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.reshape(len(x), 4, 4)).mean(1))


def smooth_net() -> nn.Module:
    torch.manual_seed(1)
    return Smooth().double().eval()


def samples(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 16, generator=generator).double(), torch.randint(0, 3, (count,), generator=generator)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = samples(4 * count)
    return list(zip(inputs.split(4), targets.split(4), strict=True))


# ---------------------------------------------------------------- what is done on both devices


def _vectors(op: Any) -> Tensor:
    return torch.randn(op.size, 2, generator=torch.Generator().manual_seed(3), dtype=op.dtype).to(op.device)


def _products(operator: Callable[..., Any]) -> Callable[[nn.Module], Any]:
    def products(net: nn.Module) -> Any:
        op = operator(net, batches(3))
        assert op.device == next(net.parameters()).device
        found = op @ _vectors(op)
        assert found.device == op.device, "a product lies where its vectors do"
        return found.cpu()

    return products


def _estimated(net: nn.Module) -> Any:
    op = sl.hessian(net, samples())
    diagonal = sl.diagonal(op, probes=8)
    return diagonal, sl.spectral_norm(op), sl.frobenius_norm(op, probes=8), sl.spectral_density(op, probes=2, steps=5)


def _stable(net: nn.Module) -> Any:
    """Its vector, the start for the next call, lies where the model does; one that a file held will do as well."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    first = sl.stability(optimizer, net, samples())
    assert first.vector is not None
    assert first.vector.device == next(net.parameters()).device
    again = sl.stability(optimizer, net, samples(), start=replace(first, vector=first.vector.cpu()))
    return [(found.curvature, found.limit, found.side) for found in (first, again)]


def moved(net: nn.Module) -> nn.Module:
    """The network with other numbers, of the CPU's generator so that they are the same on both devices."""
    other, generator = copy.deepcopy(net), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.1 * step.to(parameter.device))
    return other


def _trained(net: nn.Module) -> Any:
    """A tracker and a recorder beside a few steps, and the critical sharpness at the end."""
    first = next(net.parameters())
    inputs, targets = samples()[0].to(first.detach()), samples()[1].to(first.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    tracker = sl.Tracker(net, samples(), every=2, share=float("inf"), optimizer=optimizer)
    recorder = sl.Recorder(len(targets))

    def loss() -> Tensor:
        return nn.functional.cross_entropy(net(inputs), targets)

    for _ in range(4):
        optimizer.zero_grad()
        logits = net(inputs)
        recorder.record(logits, targets, torch.arange(len(targets)))
        nn.functional.cross_entropy(logits, targets).backward()
        optimizer.step()
        tracker.step()
    optimizer.zero_grad()
    loss().backward()
    sharpness = sl.critical_sharpness(loss, optimizer)
    rows = [{key: value for key, value in row.items() if key not in ("seconds", "overhead")} for row in tracker.rows]
    return rows, recorder.frame().to_dicts(), sharpness.value


def _transformed(net: nn.Module) -> Any:
    """Every transform that this network has: the parameters afterwards, on the device where they were."""
    inputs, device = samples()[0], next(net.parameters()).device
    transforms = sl.transforms
    made = {
        "rescale_all": transforms.rescale_all(net, 2.0, data=inputs),
        "scale_last_layer": transforms.scale_last_layer(net, 3.0, data=inputs),
        "fold_batchnorm": transforms.fold_batchnorm(net, data=inputs),
        "scale_before_batchnorm": transforms.scale_before_batchnorm(net, {"1": 2.0}, data=inputs),
    }
    for name in ("shift_logits", "permute_units", "split_units"):
        made[name] = getattr(transforms, name)(net, data=inputs)
    for name, found in made.items():
        assert all(p.device == device for p in found.model.parameters()), f"{name} moved the model"
        assert found.certificate.relative_difference < 1e-6
    return {name: [p.detach().cpu() for p in found.model.parameters()] for name, found in made.items()}


def _given_logits(net: nn.Module) -> Any:
    """What is asked of logits alone."""
    device = next(net.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in samples())
    logits = net(inputs).detach()
    functions = [sl.output_margin, sl.signed_margin, sl.softmax_margin]
    found = [function(logits, targets) for function in functions]
    found += [sl.confidence_gap(logits), sl.aceht(inputs, logits), sl.margin_bound(inputs, logits, targets)]
    return [tensor.cpu() for tensor in found]


def _continued(net: nn.Module) -> Any:
    """A training that stops and resumes."""
    recipe = sl.training.Recipe(epochs=2, batch_size=4, lr=0.05, optimizer="sgd", momentum=0.9)
    run = Run(net, samples(), recipe, seed=0)
    for _ in run.batches():
        pass
    return [parameter.detach().cpu() for parameter in net.parameters()], sorted(run.tensors())[-1] != ""


def _measured(name: str) -> Callable[[nn.Module], Any]:
    return lambda net: sl.measure(net, samples(6), measures=[name], parts=[])


ALL_MEASURES = {f"measure {name}": (small_net, _measured(name)) for name in sorted(MEASURES)}
LONG = ("measure pac_bayes_flatness", "measure pac_bayes_magnitude")
CHECKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], int]] = {
    # name: network, what is done, how often the CPU may wait for the device in all
    "margins": (relu_net, lambda net: sl.margins(net, batches(3)), 25),
    "margins, distance": (relu_net, lambda net: sl.margins(net, batches(3), distance=2), 45),
    "given logits": (relu_net, _given_logits, 10),
    "traces, exact": (relu_net, lambda net: sl.sample_traces(net, batches(3), per_layer=True), 60),
    "traces, passes": (relu_net, lambda net: sl.sample_traces(net, batches(3), passes=1), 60),
    "traces, probes": (relu_net, lambda net: sl.sample_traces(net, batches(3), method="hutchinson", probes=16), 60),
    "traces, smooth": (smooth_net, lambda net: sl.sample_traces(net, batches(3), probes=16), 60),
    "input curvature": (relu_net, lambda net: sl.input_curvature(net, batches(3)), 60),
    "hessian": (relu_net, _products(sl.hessian), 60),
    "hessian, smooth": (smooth_net, _products(sl.hessian), 60),
    "gauss_newton": (smooth_net, _products(sl.gauss_newton), 60),
    "empirical_fisher": (smooth_net, _products(sl.empirical_fisher), 60),
    "hessian_variance": (smooth_net, _products(sl.hessian_variance), 60),
    "batch_eigenvalues": (small_net, lambda net: sl.batch_eigenvalues(net, batches(3), k=2), 120),
    "eigenvalues": (small_net, lambda net: sl.eigenvalues(sl.hessian(net, samples()), 2, vectors=False), 80),
    "trace of an operator": (small_net, lambda net: sl.operator_trace(sl.hessian(net, samples()), probes=8), 80),
    "norms and diagonal": (small_net, _estimated, 120),
    "spectrum": (small_net, lambda net: sl.spectrum(sl.hessian(net, samples()), probes=2, steps=10), 300),
    "landscape": (small_net, lambda net: sl.landscape(net, samples(), points=5), 120),
    "landscape, random": (small_net, lambda net: sl.landscape(net, samples(), points=5, directions="random"), 60),
    "compare": (
        small_net,
        lambda net: sl.compare(net, copy.deepcopy(net), samples(), measures=["trace", "margin_mean"], audit=False),
        300,
    ),
    "audit": (
        small_net,
        lambda net: sl.audit(net, samples(), measures=["margin_mean", "path_norm"], transforms=["rescale_layers"]),
        150,
    ),
    "transforms": (relu_net, _transformed, 250),
    "perturb": (small_net, lambda net: sl.perturb(net, samples(), "int4"), 150),
    "perturb, another model": (small_net, lambda net: sl.perturb(net, samples(), moved(net)), 200),
    "choose_bits": (small_net, lambda net: sl.choose_bits(net, samples(), 4), 250),
    "rank": (small_net, lambda net: sl.rank({"a": net, "b": moved(net)}, samples(), under=["int8"]), 250),
    "stability": (small_net, _stable, 200),
    "training watched": (small_net, _trained, 330),
    "training": (small_net, _continued, 20),
}


# ---------------------------------------------------------------- the program


def leaves(result: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All numbers of a result, with where they stand in it."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(result, list | tuple):
        for index, value in enumerate(result):
            yield from leaves(value, f"{path}[{index}]")
    elif is_dataclass(result) and not isinstance(result, type):
        for field in fields(result):
            yield from leaves(getattr(result, field.name), f"{path}.{field.name}")
    elif isinstance(result, Tensor | float | int) and not isinstance(result, bool):
        yield path, result


IGNORED = ("seconds", "settings", "created", "time", "versions")


def numbers(result: Any) -> dict[str, Tensor]:
    found = {}
    for path, value in leaves(result):
        if any(word in path for word in IGNORED):
            continue
        if isinstance(value, Tensor):
            assert value.device.type == "cpu", f"{path} of the result lies on {value.device}"
        found[path] = torch.as_tensor(value)
    return found


def compare(here: Any, there: Any) -> None:
    one, other = numbers(here), numbers(there)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    assert one, "nothing was compared"
    for path in one:
        error = (other[path].double() - one[path].double()).abs()
        close = torch.isclose(other[path].double(), one[path].double(), rtol=1e-6, atol=1e-9, equal_nan=True)
        assert bool(close.all()), f"{path} is off by {float(error.max()):.2g}"


@contextmanager
def no_threads() -> Iterator[None]:
    """Threads of `cores` are for the cores of this machine."""
    before = cores.ThreadPoolExecutor

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a thread was started for an accelerator")

    cores.ThreadPoolExecutor = refuse  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        cores.ThreadPoolExecutor = before  # type: ignore[misc]


def check_both(name: str) -> dict[str, Any]:
    """The same on both devices: equal numbers, few waits, the device's random state as it was."""
    import pretend_device

    make, do = ALL_MEASURES[name] if name in ALL_MEASURES else CHECKS[name][:2]
    here = do(make())
    far = make().to(DEVICE)
    state = pretend_device.generator.get_state()
    with pretend_device.waiting() as waits, no_threads():
        there = do(far)
    compare(here, there)
    assert torch.equal(state, pretend_device.generator.get_state()), "it drew from the device's own random numbers"
    return {"waits": sum(waits.values()), "lines": dict(waits.most_common(8))}


def growth(few: Callable[[], Any], many: Callable[[], Any], by: int) -> dict[str, Any]:
    """How many waits one more of something costs, and in which lines."""
    import pretend_device

    with pretend_device.waiting() as before:
        few()
    with pretend_device.waiting() as after:
        many()
    assert sum(before.values()), "nothing was done on the device"
    return {"waits": (sum(after.values()) - sum(before.values())) / by, "lines": dict(after - before)}


def grow_with_batches(net: Callable[[], nn.Module], do: Callable[..., Any], **options: Any) -> dict[str, Any]:
    far = net().to(DEVICE)
    do(far, batches(2), **options)
    return growth(lambda: do(far, batches(2), **options), lambda: do(far, batches(6), **options), 4)


def grow_with_products() -> dict[str, Any]:
    op = sl.hessian(relu_net().to(DEVICE), batches(3))
    block = _vectors(op)
    return growth(lambda: op @ block, lambda: [op @ block for _ in range(5)], 4)


def grow_with_steps() -> dict[str, Any]:
    op = sl.hessian(small_net().to(DEVICE), batches(1))
    few, many = (lambda steps=steps: sl.spectral_density(op, probes=2, steps=steps) for steps in (8, 16))
    few()
    return growth(few, many, 16)


def grow_with_probes() -> dict[str, Any]:
    far = smooth_net().to(DEVICE)
    few, many = (lambda probes=probes: sl.sample_traces(far, batches(1), probes=probes) for probes in (16, 32))
    return growth(few, many, 16)


def grow_with_classes() -> dict[str, Any]:
    """Backward passes of exact traces."""

    def traces(classes: int) -> Callable[[], Any]:
        net = nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, classes)).double().to(DEVICE)
        return lambda: sl.sample_traces(net, samples())

    return growth(traces(3), traces(23), 20)


def grow_with_layers() -> dict[str, Any]:
    """Parameters of exact traces."""

    def traces(depth: int) -> Callable[[], Any]:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.ReLU())]
        net = nn.Sequential(nn.Linear(16, 4), *hidden, nn.Linear(4, 3)).double().to(DEVICE)
        return lambda: sl.sample_traces(net, samples())

    return growth(traces(1), traces(9), 16)


GROWTH: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    # name: check, how many waits one more costs at most
    "margins, a batch": (lambda: grow_with_batches(relu_net, sl.margins), 7),
    "exact traces, a batch": (lambda: grow_with_batches(relu_net, sl.sample_traces), 7),
    "exact traces, a backward pass": (grow_with_classes, 0),
    "exact traces, a parameter": (grow_with_layers, 0),
    "probed traces, a batch": (lambda: grow_with_batches(smooth_net, sl.sample_traces, probes=8), 5),
    "probed traces, a probe": (grow_with_probes, 0),
    "a product": (grow_with_products, 1),
    "a step of Lanczos": (grow_with_steps, 3),
}


@contextmanager
def without_double() -> Iterator[None]:
    import pretend_device

    try:
        with pretend_device.without_double():
            devices._makes_double.cache_clear()
            yield
    finally:
        devices._makes_double.cache_clear()


def without_float64() -> dict[str, Any]:
    """On a device without float64 a copy of the model is measured on the CPU, and the result says so."""

    def float_net() -> nn.Module:
        return relu_net().float()

    far = float_net().to(DEVICE)
    inputs, targets = (tensor.to(DEVICE) for tensor in (samples()[0].float(), samples()[1]))
    logits = far(inputs).detach()
    wide = far(inputs).detach().cpu()
    with without_double():
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(2, dtype=torch.float64, device=DEVICE)
        found = sl.sample_traces(far, (inputs, targets))
        compare(sl.sample_traces(float_net(), (inputs.cpu(), targets.cpu())).values, found.values)
        said = f"{DEVICE}:0 has no float64, so a copy of the model was measured on the CPU"
        assert any(said in note for note in found.notes), found.notes
        op = sl.hessian(far, (inputs, targets))
        assert op.device.type == "cpu"
        with pytest.raises(InputError, match=r"convert it with v.to\(op.device, op.dtype\)"):
            op @ torch.ones(op.size, device=DEVICE)
        compare(sl.signed_margin(wide, targets.cpu()), sl.signed_margin(logits, targets).cpu())
        compare(sl.aceht(inputs.cpu(), wide), sl.aceht(inputs, logits).cpu())
        assert sl.measure(far, (inputs, targets), measures=["trace", "margin_mean"], parts=[]).rows[0].value.value > 0
        for name in ("rescale_all", "scale_last_layer"):
            made = getattr(sl.transforms, name)(far, 2.0, data=inputs)
            assert next(made.model.parameters()).device.type == DEVICE
        for name in ("fold_batchnorm", "shift_logits", "permute_units", "split_units"):
            made = getattr(sl.transforms, name)(far, data=inputs)
            assert next(made.model.parameters()).device.type == DEVICE
        _trained(copy.deepcopy(far))
    assert next(far.parameters()).device.type == DEVICE
    return {}


def budget() -> dict[str, Any]:
    """Half of what is free on the device, and what the caller says instead."""
    import pretend_device

    far = relu_net().to(DEVICE)
    assert Context(far, samples()).budget() == pretend_device.MEMORY // 2
    assert Context(far, samples(), memory="2MB").budget() == 2_000_000
    assert Context(relu_net(), samples()).budget() != pretend_device.MEMORY // 2
    return {}


def draws_on_the_device() -> dict[str, Any]:
    """A model that draws: the device's own random state is given back, and noise in eval mode is refused."""
    import pretend_device

    class Noisy(nn.Module):
        def __init__(self, size: float) -> None:
            super().__init__()
            self.layer, self.size = nn.Linear(16, 3).double(), size

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.size * torch.randn(len(x), 1, dtype=x.dtype, device=x.device)

    state = pretend_device.generator.get_state()
    quiet = Noisy(0.0).to(DEVICE)
    assert sl.sample_traces(quiet, samples()).exact
    with pytest.raises(InputError, match="change from one pass to the next"):
        sl.sample_traces(Noisy(1.0).to(DEVICE), samples())
    assert torch.equal(state, pretend_device.generator.get_state())
    with pytest.raises(RuntimeError, match="device type for generator"):  # the device can tell
        torch.randn(2, device=DEVICE, generator=torch.Generator())
    return {}


def refuses_to_mix() -> dict[str, Any]:
    """That the pretend device would notice."""
    import pretend_device

    far = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        far + torch.ones(3)
    with pretend_device.waiting() as waits:
        assert (far * 2).sum().item() == 6
        assert bool((far > 0).all())
        assert torch.equal(far.cpu(), torch.ones(3))
    assert sum(waits.values()) == 3
    return {}


def from_the_command_line() -> dict[str, Any]:
    """--device takes it by name, and a sentence says which devices there are."""
    from spiritlevel.loading import load_model

    model = load_model("softmax_regression", device=DEVICE)
    assert next(model.parameters()).device.type == DEVICE
    with pytest.raises(InputError, match=f"'cuda'.*; this machine has cpu, {DEVICE}:0"):
        load_model("softmax_regression", device="cuda")
    return {}


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "refuses to mix": refuses_to_mix,
    "without float64": without_float64,
    "memory": budget,
    "random numbers": draws_on_the_device,
    "command line": from_the_command_line,
}


def main() -> None:
    import pretend_device  # noqa: F401

    torch.get_num_threads = lambda: 2  # so that threads of `cores` would be wanted
    everything: dict[str, Callable[[], dict[str, Any]]] = {**OTHERS}
    everything |= {name: check for name, (check, _) in GROWTH.items()}
    everything |= {name: lambda name=name: check_both(name) for name in [*CHECKS, *ALL_MEASURES]}  # type: ignore[misc]
    for name in sys.argv[1:] or everything:
        begin, found = time.process_time(), {}
        try:
            found = everything[name]()
        except BaseException as error:
            import traceback

            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        seconds = round(time.process_time() - begin, 2)
        sys.stdout.write(json.dumps({"name": name, "seconds": seconds, **found}) + "\n")
        sys.stdout.flush()


# ---------------------------------------------------------------- the tests


def ran(*names: str) -> dict[str, dict[str, Any]]:
    """What the checks of these names found, in a process of their own; faults are told together."""
    done = subprocess.run(
        [sys.executable, __file__, *names],
        capture_output=True,
        text=True,
        timeout=290,
        cwd=Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == set(names)
    faults = {name: line["trace"] for name, line in found.items() if "error" in line}
    assert not faults, "\n".join([", ".join(faults), *faults.values()])
    return found


def assert_bars(found: dict[str, dict[str, Any]], bars: dict[str, float]) -> None:
    over = {name: (line["waits"], line["lines"]) for name, line in found.items() if line["waits"] > bars[name]}
    assert not over, over


def test_as_on_the_cpu() -> None:
    assert_bars(ran(*CHECKS), {name: bar for name, (_, _, bar) in CHECKS.items()})


def test_every_function_of_a_model_is_tried_on_the_device() -> None:
    """A new one gets a line in `CHECKS`."""
    text = Path(__file__).read_text(encoding="utf-8")
    functions = {name: getattr(sl, name) for name in sl._HOME}
    asked = {
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        and {"model", "model_a", "models", "op", "closure"} & inspect.signature(function).parameters.keys()
    }
    assert {"perturb", "rank", "diagonal"} <= asked
    assert {name for name in asked if not re.search(rf"\bsl\.{name}\b", text)} <= {"trace"}  # sample_traces, averaged


def test_every_measure_as_on_the_cpu() -> None:
    names = [name for name in ALL_MEASURES if name not in LONG]
    assert_bars(ran(*names), dict.fromkeys(names, 100))


@pytest.mark.slow
def test_long_measures_as_on_the_cpu() -> None:
    assert_bars(ran(*LONG), dict.fromkeys(LONG, 1000))  # three a forward pass, some 250 times


def test_waits_do_not_grow_and_what_an_accelerator_has_or_lacks() -> None:
    """One more of something costs few waits, or none."""
    found = ran(*OTHERS, *GROWTH)
    assert_bars({name: found[name] for name in GROWTH}, {name: bar for name, (_, bar) in GROWTH.items()})


if __name__ == "__main__":
    main()
