"""Curvature operators, eigenvalues and spectra against a gradient and the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import FULL, Row, Scale, at_least, at_most, dense_net, images, ratio, take_turns, trained, trained_lenet
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl


def operators(scale: Scale) -> list[Row]:
    count, steps = (2000, 200) if scale is FULL else (200, 5)
    _, inputs, targets = images(count)
    mlp = trained(dense_net(784, 512, 512, 512, 10), inputs, targets, steps)
    return [
        *product_rows("MLP 784-512-512-512-10", mlp, (inputs, targets), 1.9, scale),
        *product_rows("LeNet-5", trained_lenet(inputs, targets, steps), (inputs, targets), 1.3, scale),
    ]


def product_rows(label: str, model: nn.Module, batch: tuple[Tensor, Tensor], bar: float, scale: Scale) -> list[Row]:
    area = f"operators, {label}"
    inputs, targets = batch
    operator = sl.hessian(model, batch)
    vector = torch.randn(operator.size)
    parameters = list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(F.cross_entropy(model(inputs), targets), parameters)

    functions: list[Callable[[], Any]] = [gradient, lambda: operator @ vector]
    try:
        from curvlinops import HessianLinearOperator

        theirs = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [batch], check_deterministic=False)
        functions.append(lambda: theirs @ vector)
    except ImportError:
        theirs = None
    times = take_turns(scale.rounds, *functions)
    rows = [at_most(area, "Hessian product / gradient", ratio(times[1], times[0]), bar, f"{len(targets)} points")]
    if theirs is None:
        rows.append(Row(area, "curvlinops product / ours", None, bar="≥ 1.6", note="curvlinops is not installed"))
    else:
        error = float((theirs @ vector - operator @ vector).norm() / (operator @ vector).norm())
        pair = ratio(times[2], times[1])
        rows.append(at_least(area, "curvlinops product / ours", pair, 1.6, f"same product to {error:.1e}"))
    rows += [*largest_eigenvalue(area, model, batch, scale), five_eigenvalues(area, model, batch, scale)]
    return rows


def largest_eigenvalue(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> list[Row]:
    """PyHessian over all points as one batch, whose graph it keeps, and over a loader, which bounds its memory."""
    names = [f"PyHessian ({how}), largest eigenvalue / ours at residual 1e-3" for how in ("one batch", "loader")]
    try:
        from pyhessian import hessian
    except ImportError:
        return [Row(area, what, None, bar="≥ 3", note="PyHessian is not installed") for what in names]
    found: dict[str, list[float]] = {name: [] for name in ("ours", *names)}
    products = 0
    loader = list(zip(batch[0].split(200), batch[1].split(200), strict=True))

    def peer(name: str, **data: Any) -> None:
        torch.manual_seed(len(found[name]))  # of its start vector
        value = hessian(model, nn.CrossEntropyLoss(), cuda=False, **data).eigenvalues()[0][0]
        found[name].append(value)

    def ours() -> None:
        nonlocal products
        pairs = sl.eigenvalues(sl.hessian(model, batch), which="magnitude", tol=1e-3)
        products = pairs.matvecs
        found["ours"].append(float(pairs.values[0]))

    times = take_turns(
        scale.rounds, ours, lambda: peer(names[0], data=batch), lambda: peer(names[1], dataloader=loader)
    )
    right = float(sl.eigenvalues(sl.hessian(model, batch), which="magnitude", tol=1e-6).values[0])
    errors = {name: max(abs(value / right - 1) for value in values) for name, values in found.items()}
    return [
        at_least(
            area,
            what,
            ratio(theirs, times[0]),
            3,
            f"relative error: theirs {errors[what]:.1e}, ours {errors['ours']:.1e} from {products} products",
        )
        for what, theirs in zip(names, times[1:], strict=True)
    ]


def five_eigenvalues(area: str, model: nn.Module, batch: tuple[Tensor, Tensor], scale: Scale) -> Row:
    what = "hessian-eigenthings, top 5 / ours"
    try:
        from hessian_eigenthings.algorithms.lanczos import lanczos
        from hessian_eigenthings.loss_fns import supervised_loss
        from hessian_eigenthings.operators.hessian import HessianOperator
    except ImportError:
        return Row(area, what, None, bar="≥ 1.5", note="hessian-eigenthings is not installed, or has another interface")
    right = sl.eigenvalues(sl.hessian(model, batch), 5, tol=1e-6).values
    accuracy = 1e-4
    state: dict[str, Any] = {}

    def ours() -> None:
        state["ours"] = sl.eigenvalues(sl.hessian(model, batch), 5, tol=state["tol"]).values

    def theirs() -> None:
        operator = HessianOperator(model, [batch], supervised_loss(F.cross_entropy))
        state["theirs"] = lanczos(operator, k=5, which="LA", max_iter=state.get("steps", 20)).eigenvalues

    def error(values: Tensor) -> float:
        return float(((values.double().sort(descending=True).values - right) / right).abs().max())

    try:
        for tol in (1e-2, 5e-3, 2e-3, 1e-3, 1e-4):  # both sides as cheap as the same accuracy allows
            state["tol"] = tol
            ours()
            if error(state["ours"]) <= accuracy:
                break
        for steps in (10, 15, 20, 30, 40, 60, 90, 130):
            state["steps"] = steps
            theirs()
            if error(state["theirs"]) <= accuracy:
                break
        ours_times, theirs_times = take_turns(max(2, scale.rounds // 2), ours, theirs)
    except Exception as problem:
        return Row(
            area, what, None, bar="≥ 1.5", note=f"hessian-eigenthings failed: {type(problem).__name__}: {problem}"
        )
    errors = f"theirs {error(state['theirs']):.1e}, ours {error(state['ours']):.1e}"
    reached = error(state["theirs"]) <= accuracy
    steps = f"{state['steps']} of their steps{'' if reached else ', not converged'}"
    note = f"to {accuracy:g} relative: {steps}, our residual {state['tol']:g}; largest error: {errors}"
    return at_least(area, what, ratio(theirs_times, ours_times), 1.5, note)
