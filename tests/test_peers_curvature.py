"""Our operators against other libraries, in an environment that has them; see `make bench`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from test_curvature_promises import blocks_of
from torch import Tensor, nn

from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian
from spiritlevel.papers import networks as models

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)),
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


NETWORKS = {
    "dense": lambda: nn.Sequential(nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)),
    "convolutions": convolutions,
    "gelu": lambda: nn.Sequential(nn.Linear(36, 10), nn.GELU(), nn.Linear(10, 3)),
}
KINDS = {
    "hessian": "HessianLinearOperator",
    "gauss_newton": "GGNLinearOperator",
    "empirical_fisher": "EFLinearOperator",
}
OURS = {"hessian": hessian, "gauss_newton": gauss_newton, "empirical_fisher": empirical_fisher}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_products_agree_with_curvlinops(name: str, kind: str, dtype: torch.dtype) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    net = NETWORKS[name]().to(dtype).eval()
    inputs, targets = torch.randn(7, 36, dtype=dtype), torch.randint(0, 3, (7,))
    batches = list(zip(inputs.split([3, 4]), targets.split([3, 4]), strict=True))
    theirs = getattr(curvlinops, KINDS[kind])(net, nn.CrossEntropyLoss(), list(net.parameters()), batches)
    ours = OURS[kind](net, batches)
    for vector in (torch.randn(ours.size, dtype=dtype), torch.randn(ours.size, 3, dtype=dtype)):
        expected = theirs @ vector
        error = float((ours @ vector - expected).norm() / expected.norm())
        assert error < (1e-6 if dtype == torch.float32 else 1e-10)


def test_theirs_is_wrong_for_layer_norm_and_ours_is_not() -> None:
    """They take forward mode over a `vmap` of the backward pass, which torch 2.13 gets wrong for layer norm."""
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(36, 10), nn.LayerNorm(10), nn.GELU(), nn.Linear(10, 3)).double()
    data = torch.randn(7, 36, dtype=torch.float64), torch.randint(0, 3, (7,))
    expected = naive.finite_difference_hessian(net, *data)
    theirs = curvlinops.HessianLinearOperator(net, nn.CrossEntropyLoss(), list(net.parameters()), [data])
    assert float((hessian(net, data).dense() - expected).norm() / expected.norm()) < 1e-9
    assert float((theirs @ torch.eye(len(expected)).double() - expected).norm() / expected.norm()) > 0.01


def answers(library: str) -> dict[str, Any]:
    """What the blocks of one library on the page leave behind."""
    names: dict[str, Any] = {}
    for label, code in blocks_of(PAGE):
        if label in ("all", library):
            exec(code, names)
    return names


def test_the_page_gives_the_same_answers_in_all_libraries() -> None:
    pytest.importorskip("curvlinops")
    pytest.importorskip("pyhessian")
    ours, curvlinops, pyhessian = (answers(name) for name in ("spiritlevel", "curvlinops", "PyHessian"))

    def close(a: Tensor, b: Tensor) -> bool:
        return float((a - b).norm()) < 1e-5 * float(b.norm())

    assert close(ours["product"], curvlinops["product"])
    assert close(ours["product"], pyhessian["product"].detach())
    assert all(close(a, b) for a, b in zip(ours["products"], curvlinops["products"], strict=True))
    assert float(ours["largest"]) == pytest.approx(float(curvlinops["largest"]), rel=1e-4)
    assert float(ours["largest"]) == pytest.approx(float(pyhessian["largest"]), rel=0.05)
    assert abs(ours["trace"] - float(curvlinops["trace"])) < 6 * ours["error"]  # two estimates
    assert abs(ours["trace"] - pyhessian["trace"]) < 0.5 * abs(ours["trace"])
    assert len(curvlinops["density"]) == 512


def test_density_of_pyhessian_fails() -> None:
    pyhessian = pytest.importorskip("pyhessian")
    net = nn.Linear(3, 2)
    h = pyhessian.hessian(net, nn.CrossEntropyLoss(), data=(torch.ones(2, 3), torch.tensor([0, 1])), cuda=False)
    with pytest.raises(Exception, match="eig"):
        h.density(iter=3)


def test_others_lose_the_curvature_of_tiny_losses() -> None:
    """What the page says of float32: at a margin of 25 theirs is half the curvature, or none."""
    curvlinops = pytest.importorskip("curvlinops")
    net = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[25.0, 0, 0], [0, 0, 0]]))
    data = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0])
    vector = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.0, 1.0])
    expected = hessian(net.double(), (data[0].double(), data[1])) @ vector.double()
    net = net.float()
    ours = hessian(net, data) @ vector
    theirs = curvlinops.HessianLinearOperator(net, nn.CrossEntropyLoss(), list(net.parameters()), [data]) @ vector
    assert float((ours - expected).norm() / expected.norm()) < 1e-6
    assert float((theirs - expected).norm() / expected.norm()) > 0.4


# ---------------------------------------------------------------- speed: ratios within one run, minima of many rounds


def seconds(functions: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """The shortest time of each function, taking turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(rounds + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn > 1:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def deep_mlp() -> nn.Module:
    sizes = [784, 512, 512, 512, 10]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


@pytest.mark.parametrize(("build", "bar"), [(deep_mlp, 1.9), (models.lenet5, 1.3)], ids=["mlp", "lenet5"])
def test_what_a_product_costs(build: Callable[[], nn.Module], bar: float) -> None:
    """A replayed product in gradients, and against curvlinops, on 2,000 points."""
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    net, inputs, targets = build(), torch.rand(2000, 1, 28, 28), torch.randint(0, 10, (2000,))
    loss = nn.CrossEntropyLoss()
    op = hessian(net, (inputs, targets))
    theirs = [
        curvlinops.HessianLinearOperator(net, loss, list(net.parameters()), batches, check_deterministic=False)
        for batches in ([(inputs, targets)], list(zip(inputs.split(500), targets.split(500), strict=True)))
    ]
    vector = torch.randn(op.size)

    def gradient() -> None:
        net.zero_grad()
        loss(net(inputs), targets).backward()

    times = seconds(
        {
            "gradient": gradient,
            "ours": lambda: op @ vector,
            "theirs": lambda: theirs[0] @ vector,
            "theirs, in batches of 500": lambda: theirs[1] @ vector,
        }
    )
    ours = times["ours"]
    figures = f"product/gradient {ours / times['gradient']:.2f}, " + ", ".join(
        f"{name}/ours {times[name] / ours:.2f}" for name in times if name.startswith("theirs")
    )
    print(figures)  # noqa: T201
    assert ours <= bar * times["gradient"], figures
    assert min(times["theirs"], times["theirs, in batches of 500"]) >= 1.6 * ours, figures
