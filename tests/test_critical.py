"""Critical sharpness against line searches and closed forms, for every optimiser; and the limits of stability."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Untouched, same
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.errors import InputError
from spiritlevel.results import Result
from spiritlevel.results.training import CriticalSharpness, Stability

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMISERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.01),
    "fused": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3), capturable=False, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "adamax": lambda p: torch.optim.Adamax(p, lr=3e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "own": lambda p: InPlace(p, lr=0.02),
}


class InPlace(torch.optim.Optimizer):
    """Sign descent with momentum that writes into the gradients, as some implementations of Muon do, and counts."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.1)
                p.grad.lerp_(buffer, 0.9)
                p.add_(p.grad.sign(), alpha=-group["lr"])


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs.to(dtype), inputs[:, :3].argmax(1)


def prepared(
    make: Make, steps: int = 5, model: nn.Module | None = None, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A network some steps into its training, its gradients in place, and the closure."""
    model = net(dtype) if model is None else model
    optimizer, (inputs, targets) = make(model.parameters()), batch(dtype)

    def closure() -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    for step in range(steps + 1):
        optimizer.zero_grad()
        closure().backward()
        if step < steps:
            optimizer.step()
    return model, optimizer, closure


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that an optimiser holds, with copies of tensors and their identities."""
    found: dict[str, Any] = {"keys": [id(p) for p in optimizer.state]}
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            found[f"{number} {key}"] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            found[f"{number} {key} id"] = id(value)
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group {number} {key}": copy.deepcopy(v) for key, v in group.items() if key != "params"}
        found[f"group {number} params"] = [id(p) for p in group["params"]]
    found["attributes"] = {k: id(v) for k, v in vars(optimizer).items()}
    return found


def brute_force(
    model: nn.Module, optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor], rate: float
) -> float:
    """The first η on a fine grid at which the loss is no longer lower, by really making the optimiser's step."""
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    here = closure().item()
    optimizer.step()
    after = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(state)
    scale, found = 2.0**-6, math.inf
    with torch.no_grad():
        while scale < 2.0**14:
            for name, tensor in model.state_dict().items():
                tensor.copy_(saved[name] + scale * (after[name] - saved[name]))
            if not closure().item() < here:
                found = scale * rate
                break
            scale *= 1.005
    model.load_state_dict(saved)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    return found


@pytest.mark.parametrize("name", OPTIMISERS)
def test_equal_to_a_brute_force_line_search_and_nothing_moves(name: str, untouched: Untouched) -> None:
    model, optimizer, closure = prepared(OPTIMISERS[name])
    before = state_of(optimizer)
    torch.rand(3)
    with untouched(model):
        cold = sl.critical_sharpness(closure, optimizer)
        warm = sl.critical_sharpness(closure, optimizer, start=cold.step * 1.4)
    after = state_of(optimizer)
    assert before.keys() == after.keys()
    assert all(same(before[key], after[key]) for key in before), "the optimiser's state is the same, bit by bit"
    rate = float(optimizer.param_groups[0]["lr"])
    step = brute_force(model, optimizer, closure, rate)
    for found, most in ((cold, 12), (warm, 6)):
        assert found.status == "converged", found
        assert found.forwards <= most
        assert found.high / found.low <= 1.0625 * (1 + 1e-12)
        assert found.low <= found.value <= found.high
        assert found.low * 0.994 <= 2 / step <= found.high * 1.006
        assert found.step == pytest.approx(2 / found.value)
        assert found.scale == pytest.approx(found.step / rate)


def quadratic(size: int = 8) -> tuple[Tensor, nn.Parameter, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = root @ root.T + 0.1 * torch.eye(size, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))
    return matrix, weight, lambda: 0.5 * weight @ matrix @ weight


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "muon", "own"])
def test_on_a_quadratic_it_is_the_curvature_along_the_update_over_the_slope(name: str) -> None:
    matrix, weight, closure = quadratic()
    optimizer = OPTIMISERS[name]([weight]) if name != "muon" else muon([weight])
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 1e-2  # few steps of any optimiser stay downhill
    for _ in range(4):
        optimizer.zero_grad()
        closure().backward()
        optimizer.step()
    optimizer.zero_grad()
    closure().backward()
    found = sl.critical_sharpness(closure, optimizer)
    gradient, old = weight.grad.clone(), weight.detach().clone()
    optimizer.step()
    update = (old - weight.detach()) / optimizer.param_groups[0]["lr"]
    exact = float(update @ matrix @ update) / float(gradient @ update)
    assert found.low * (1 - 1e-9) <= exact <= found.high * (1 + 1e-9)


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Orthogonalised momentum, of a vector: momentum of unit length."""

    class Muon(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.02})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.95).add_(p.grad)
                p.sub_(self.param_groups[0]["lr"] * buffer / buffer.norm())

    return Muon(params)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_the_muon_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    model, optimizer, closure = prepared(lambda p: torch.optim.Muon(p, lr=0.01), model=model, dtype=torch.float32)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    found = sl.critical_sharpness(closure, optimizer)
    warm = sl.critical_sharpness(closure, optimizer, start=found)
    assert (found.forwards <= 12, warm.forwards <= 6) == (True, True)
    assert max(found.high / found.low, warm.high / warm.low) <= 1.0625 * (1 + 1e-6)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[k][name], after[k][name]) for k in before for name in before[k])
    step = brute_force(model, optimizer, closure, 0.01)
    assert found.low * 0.99 <= 2 / step <= found.high * 1.01


def test_along_an_eigenvector_it_is_the_eigenvalue() -> None:
    matrix, weight, closure = quadratic()
    values, vectors = torch.linalg.eigh(matrix)
    with torch.no_grad():
        weight.copy_(vectors[:, -1])
    closure().backward()
    found = sl.critical_sharpness(closure, torch.optim.SGD([weight], lr=1e-3))
    assert found.low <= float(values[-1]) <= found.high


def test_before_the_first_step_no_state_is_made() -> None:
    _, optimizer, closure = prepared(OPTIMISERS["adam"], steps=0)
    sl.critical_sharpness(closure, optimizer)
    assert not optimizer.state
    optimizer.step()
    assert int(next(iter(optimizer.state.values()))["step"]) == 1


def test_training_goes_on_as_without_it() -> None:
    models = [net(), net()]
    inputs, targets = batch()
    for watched, model in enumerate(models):
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)  # it replaces optimizer.step
        last = None
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(model(F.dropout(inputs, 0.2)), targets).backward()
            if watched:
                last = sl.critical_sharpness(lambda m=model: F.cross_entropy(m(inputs), targets), optimizer, start=last)
            optimizer.step()
            schedule.step()
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


def test_dropout_and_batch_norm_in_training_mode(untouched: Untouched) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3))
    model, optimizer, closure = prepared(OPTIMISERS["momentum"], model=model, dtype=torch.float32)
    with untouched(model):  # running statistics and the count of batches among it
        first = sl.critical_sharpness(closure, optimizer)
        second = sl.critical_sharpness(closure, optimizer)
    assert first == second, "every pass sees the same random numbers"
    assert model.training


def test_inside_autocast_the_steps_are_seen_and_gradients_still_flow() -> None:
    model, optimizer, closure = prepared(lambda p: torch.optim.SGD(p, lr=0.05), dtype=torch.float32)
    outside = sl.critical_sharpness(closure, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sl.critical_sharpness(closure, optimizer)
        loss = closure()  # by casts of its own, which lead to the parameters
    assert found.status == "converged"
    assert found.value == pytest.approx(outside.value, rel=0.3)
    assert all(slope is not None for slope in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def test_hooks_are_not_run_and_a_graph_stays_usable() -> None:
    _, optimizer, closure = prepared(OPTIMISERS["adam"])
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    loss = closure()
    sl.critical_sharpness(closure, optimizer)
    assert not calls
    loss.backward()  # would fail if the parameters had been written to
    optimizer.step()
    assert calls == [1, 2]


def test_attributes_of_an_optimiser_stay() -> None:
    _, optimizer, closure = prepared(OPTIMISERS["own"])
    assert isinstance(optimizer, InPlace)
    calls = optimizer.calls
    sl.critical_sharpness(closure, optimizer)
    assert optimizer.calls == calls


def test_several_learning_rates_scale_the_whole_update() -> None:
    model, optimizer, closure = prepared(
        lambda p: torch.optim.SGD([{"params": [q], "lr": lr} for q, lr in zip(p, (0.1, 0.05, 0.02, 0.01), strict=True)])
    )
    found = sl.critical_sharpness(closure, optimizer)
    step = brute_force(model, optimizer, closure, 1.0)
    assert found.scale == pytest.approx(step, rel=0.04)
    assert found.value == pytest.approx(2 / (0.1 * found.scale))


def test_an_update_that_goes_uphill_is_undefined_and_says_so() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([-10.0])
    optimizer.step()
    with torch.no_grad():
        weight.fill_(0.5)
    weight.grad = torch.tensor([1.0])
    found = sl.critical_sharpness(lambda: weight.square().sum(), optimizer)
    assert math.isnan(found.value)
    assert found.status == "undefined"
    assert found.forwards == 0
    assert found.reason == "the update does not go downhill: gᵀu = -8"
    still = sl.critical_sharpness(lambda: weight.square().sum(), torch.optim.SGD([weight], lr=0.0))
    assert still.reason == "the update of SGD is zero"
    lost = sl.critical_sharpness(lambda: weight.sum() * math.nan, torch.optim.SGD([weight], lr=0.1))
    assert lost.reason == "the loss is nan"


def test_ends_that_are_not_met_are_said() -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def line() -> Tensor:
        return weight.sum()

    line().backward()
    found = sl.critical_sharpness(line, optimizer)
    assert found.status == "not converged"
    assert found.low == 0
    assert found.high > 0
    assert found.forwards == 12
    assert "the loss is still lower at" in found.reason
    assert "start=" not in found.reason, "there was none"
    flat = sl.critical_sharpness(lambda: weight.sum() * 0 + 1, optimizer)
    assert math.isinf(flat.high)
    assert flat.forwards <= 12
    assert "the loss is not lower at" in flat.reason
    off = sl.critical_sharpness(lambda: 0.5 * 4 * (weight - 0.75).square().sum(), optimizer, start=50.0)
    assert off.status == "not converged"
    assert off.forwards == 6
    assert off.reason.endswith("; call again without start=")
    again = sl.critical_sharpness(lambda: 0.5 * 4 * (weight - 0.75).square().sum(), optimizer, start=off)
    assert again.status == "converged", "a start that found nothing is none"
    assert again.low <= 4 <= again.high


def test_the_result_goes_to_json_and_back() -> None:
    _, optimizer, closure = prepared(OPTIMISERS["sgd"])
    found = sl.critical_sharpness(closure, optimizer)
    assert Result.from_json(found.to_json()) == found
    assert json.loads(found.to_json())["forwards"] == found.forwards
    code = "import sys, spiritlevel as sl; print(sl.Result.from_json(sys.stdin.read()).forwards)"
    fresh = subprocess.run([sys.executable, "-c", code], input=found.to_json(), capture_output=True, text=True)
    assert fresh.stdout.strip() == str(found.forwards), "in a process that has not measured any"
    double = found.scaled(2.0)
    assert isinstance(double, CriticalSharpness)
    assert (double.low, double.high, double.step) == (2 * found.low, 2 * found.high, found.step / 2)


def test_what_is_refused(untouched: Untouched) -> None:
    model, optimizer, closure = prepared(OPTIMISERS["sgd"])
    with pytest.raises(InputError, match="LBFGS calls its closure inside a step"):
        sl.critical_sharpness(closure, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(InputError, match="optimizer must be a torch optimizer, got an object of type Sequential"):
        sl.critical_sharpness(closure, model)
    with pytest.raises(InputError, match="needs a start above 0, the last η_c, got -1"):
        sl.critical_sharpness(closure, optimizer, start=-1)

    def with_backward() -> Tensor:
        loss = closure()
        loss.backward()
        return loss

    def usual() -> Tensor:
        optimizer.zero_grad()
        return closure()

    def zeroes() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        return closure()

    with untouched(model):
        with pytest.raises(InputError, match="calls backward; it should only return the loss"):
            sl.critical_sharpness(with_backward, optimizer)
        for wrong in (usual, zeroes):
            with pytest.raises(InputError, match="changes the gradients"):
                sl.critical_sharpness(wrong, optimizer)
        with pytest.raises(ZeroDivisionError):
            sl.critical_sharpness(lambda: 1 / 0, optimizer)
    model.zero_grad()
    with pytest.raises(InputError, match=r"no parameter of the optimiser has a gradient; call loss\.backward"):
        sl.critical_sharpness(closure, optimizer)


def test_an_optimiser_that_cannot_be_copied_is_refused_and_moves_nothing(untouched: Untouched) -> None:
    model, _, closure = prepared(OPTIMISERS["sgd"])

    class Elsewhere(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            held = list(self.param_groups[0]["params"])
            self.move = lambda: [p.data.sub_(p.grad) for p in held]

        def step(self, closure: Any = None) -> None:
            self.move()

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no process group")

    with untouched(model):
        with pytest.raises(InputError, match="moves the parameters of the original"):
            sl.critical_sharpness(closure, Elsewhere(model.parameters()))
        with pytest.raises(InputError, match="Fails cannot make a step, RuntimeError: no process group"):
            sl.critical_sharpness(closure, Fails(model.parameters(), lr=0.1))


# ---------------------------------------------------------------- limits of stability


def hold(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> None:
    """Make the optimiser divide by 1, now and later: its average of squares hardly moves."""
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    state["exp_avg_sq" if "exp_avg_sq" in state else "square_avg"].fill_(1.0)
    state["step"].fill_(1e15)  # the average is corrected no more


def settles(make: Callable[[nn.Parameter], torch.optim.Optimizer], curvature: float, frozen: bool) -> bool:
    """Whether the optimiser's own steps on curvature/2 · w² stay small."""
    weight = nn.Parameter(torch.tensor([1e-6], dtype=torch.float64))
    optimizer = make(weight)
    if frozen:
        hold(optimizer, weight)
    for _ in range(800):
        weight.grad = curvature * weight.detach()
        optimizer.step()
        if weight.detach().abs().item() > 1e-3:
            return False
    return True


LIMITS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "sgd": (lambda p: torch.optim.SGD([p], lr=0.1), "2/η"),
    "momentum": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), "2(1+β)/η"),
    "damped": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, dampening=0.5), "2(1+β)/((1−τ)η)"),
    "nesterov": (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True), "2(1+β)/(η(1+2β))"),
    "adam": (lambda p: torch.optim.Adam([p], lr=0.1, eps=1e-12, betas=(0.8, 1.0 - 1e-12)), "2(1+β₁)/((1−β₁)η)"),
    "rmsprop": (lambda p: torch.optim.RMSprop([p], lr=0.1, momentum=0.5, alpha=1.0 - 1e-12, eps=1e-12), "2(1+β)/η"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_is_where_the_optimisers_own_steps_begin_to_grow(name: str) -> None:
    make, formula = LIMITS[name]
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = make(model.weight)
    if name in ("adam", "rmsprop"):
        hold(optimizer, model.weight)
    data = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    found = sl.stability(optimizer, model, data, loss="squared_error")
    assert found.formula == formula
    assert found.curvature.value == pytest.approx(1.0, rel=1e-6)
    frozen = name in ("adam", "rmsprop")
    assert settles(make, 0.99 * found.limit, frozen)
    assert not settles(make, 1.01 * found.limit, frozen)


def test_the_preconditioned_hessian_is_that_of_dense_autodiff() -> None:
    model, optimizer, _ = prepared(lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3))
    data = batch(torch.float64)
    found = sl.stability(optimizer, model, data, tol=1e-6, max_matvecs=400)
    in_pieces = sl.stability(optimizer, model, data, tol=1e-6, max_matvecs=400, batch_size=2, memory="1GB")
    assert in_pieces.curvature.value == pytest.approx(found.curvature.value, rel=1e-6)
    dense = sl.hessian(model, data).dense() + 0.3 * torch.eye(sl.hessian(model, data).size, dtype=torch.float64)
    group = optimizer.param_groups[0]
    divisors = [
        (optimizer.state[p]["exp_avg_sq"] / (1 - group["betas"][1] ** 5)).sqrt().reshape(-1) + group["eps"]
        for p in model.parameters()
    ]
    root = ((1 - group["betas"][0] ** 5) * torch.cat(divisors)).rsqrt()
    exact = float(torch.linalg.eigvalsh(root[:, None] * dense * root)[-1])
    assert found.curvature.value == pytest.approx(exact, rel=1e-6)
    assert found.matrix == "D^(-1/2) H D^(-1/2)"
    assert found.limit == pytest.approx(38 / 0.5 * 0.5 / 1e-2)
    assert isinstance(Result.from_json(found.to_json()), Stability)


@pytest.mark.parametrize("number", [1, 3, 1000])
def test_the_limit_of_adam_is_that_of_its_step_of_this_number(number: int) -> None:
    """The step as a linear map of weight and average, the divisor held: it grows beyond the limit and not below."""
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.95), eps=0.3)
    hold(optimizer, model.weight)
    state, beta = optimizer.state[model.weight], 0.95

    def stepped(weight: float, average: float, curvature: float) -> list[float]:
        model.weight.data.fill_(weight)
        state["step"].fill_(number - 1)
        state["exp_avg"].fill_(average)
        model.weight.grad = curvature * model.weight.detach()
        state["exp_avg_sq"].copy_((2.0 - (1 - beta) * model.weight.grad**2) / beta)  # 2 after the step
        optimizer.step()
        return [model.weight.item(), state["exp_avg"].item()]

    def growth(curvature: float) -> float:
        map = torch.tensor([stepped(1e-6, 0.0, curvature), stepped(0.0, 1e-6, curvature)]) / 1e-6
        return float(torch.linalg.eigvals(map).abs().max())

    stepped(1e-6, 0.0, 1.0)
    data = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    limit = 1 / sl.stability(optimizer, model, data, loss="squared_error").ratio
    assert growth(0.99 * limit) <= 1.001
    assert growth(1.01 * limit) > 1.001


def test_stability_of_a_wrapped_model_is_that_of_the_model() -> None:
    model, data = net(torch.float64), batch(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = sl.stability(optimizer, model, data)
    assert sl.stability(optimizer, nn.DataParallel(model), data).curvature.value == plain.curvature.value


def test_sides_warm_starts_and_several_rates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    data = batch(torch.float64)
    top = float(torch.linalg.eigvalsh(sl.hessian(model, data).dense())[-1])
    below = sl.stability(torch.optim.SGD(model.parameters(), lr=1.9 / top), model, data)
    above = sl.stability(torch.optim.SGD(model.parameters(), lr=2.2 / top), model, data)
    assert (below.side, above.side) == ("stable", "unstable")
    assert "settle" in str(below)
    assert "steps on this quadratic grow" in str(above)
    edge = sl.stability(torch.optim.SGD(model.parameters(), lr=2.0 / top), model, data)
    assert edge.side == "open"
    assert "to tell which side" in str(edge)
    warm = sl.stability(torch.optim.SGD(model.parameters(), lr=2.2 / top), model, data, start=below)
    assert warm.side == "unstable"
    assert warm.curvature.status == "lower bound"
    assert warm.curvature.matvecs < below.curvature.matvecs
    assert sl.stability(torch.optim.SGD(model.parameters(), lr=1 / top), model, data, start=below).side == "open"
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.02}])
    scale = (
        torch.cat([torch.full((first.numel(),), 1.0), torch.full((sum(p.numel() for p in rest),), 0.2)]).double().sqrt()
    )
    exact = float(torch.linalg.eigvalsh(scale[:, None] * sl.hessian(model, data).dense() * scale)[-1])
    found = sl.stability(optimizer, model, data, tol=1e-5, max_matvecs=300)
    assert found.curvature.value == pytest.approx(exact, rel=1e-5)
    assert found.limit == pytest.approx(20)


def test_what_stability_refuses() -> None:
    model, data = net(torch.float64), batch(torch.float64)
    parameters = list(model.parameters())
    with pytest.raises(InputError, match="known for SGD, RMSprop, Adam and AdamW, not for Adagrad"):
        sl.stability(torch.optim.Adagrad(parameters), model, data)
    with pytest.raises(InputError, match=r"has made no step with the parameter 0\.weight yet.*freeze it with"):
        sl.stability(torch.optim.Adam(parameters), model, data)
    groups = [{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}]
    with pytest.raises(InputError, match="differ in momentum"):
        sl.stability(torch.optim.SGD(groups, lr=0.1), model, data)
    with pytest.raises(InputError, match="ascends"):
        sl.stability(torch.optim.SGD(parameters, lr=0.1, maximize=True), model, data)
    with pytest.raises(InputError, match="learning rate of SGD is 0, as at the start of a warm-up"):
        sl.stability(torch.optim.SGD(parameters, lr=0.0), model, data)
    with pytest.raises(InputError, match=r"SGD\(dampening=1\) takes no step along the gradient"):
        sl.stability(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=1.0), model, data)

    class SignDescent(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad.sign(), alpha=self.param_groups[0]["lr"])

    with pytest.raises(InputError, match=r"and SignDescent has a step\(\) of its own"):
        sl.stability(SignDescent(parameters, lr=0.1), model, data)
    with pytest.raises(InputError, match="optimizer must be a torch optimizer, got an object of type Sequential"):
        sl.stability(model, model, data)


def test_a_start_vector_that_does_not_fit_is_refused() -> None:
    matrix = torch.diag(torch.linspace(0, 1, 300, dtype=torch.float64))
    with pytest.raises(InputError, match="needs a start of 300 finite numbers, not all of them 0, got 3 of length"):
        sl.eigenvalues(matrix, start=torch.ones(3))
    with pytest.raises(InputError, match="takes a start for one eigenvalue, got k=2"):
        sl.eigenvalues(matrix, 2, start=torch.ones(300))


def test_a_start_orthogonal_to_the_largest_eigenvector_claims_a_lower_bound_only() -> None:
    values = torch.linspace(0, 1, 300, dtype=torch.float64)
    values[:2] = torch.tensor([3.0, 2.0])
    start = torch.zeros(300)
    start[1] = 1.0
    found = sl.eigenvalues(torch.diag(values), start=start)
    assert float(found.values[0]) == pytest.approx(2.0)
    assert found.outermost().status == "lower bound"
    assert found.outermost().interval()[1] == math.inf
    low = sl.eigenvalues(torch.diag(values), which="smallest", start=torch.ones(300))
    assert low.outermost().status == "not converged"
