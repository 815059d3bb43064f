"""Per-sample traces against BackPACK and PyHessian; run where they are installed (`make bench` sets that up)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

from spiritlevel.papers import networks as models
from spiritlevel.samples.probing import probe
from spiritlevel.samples.traces import sample_traces

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the peers' warnings are their own


def test_backpack_gives_the_same_values() -> None:
    from backpack import backpack, extend
    from backpack.extensions import BatchDiagGGNExact

    model = models.lenet5(width=0.5).double()
    inputs, targets = torch.rand(12, 1, 28, 28).double(), torch.arange(12) % 10
    layers = [module for module in model.modules() if not list(module.children())]
    sequential, loss = extend(nn.Sequential(*layers)), extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(BatchDiagGGNExact()):
        loss(sequential(inputs), targets).backward()
    result = sample_traces(model, (inputs, targets), per_layer=True)
    for ours, theirs in zip(result.layers.values(), sequential.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.diag_ggn_exact_batch.flatten(1).sum(1), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["tanh conv", "tied"])
def test_pyhessian_rule_equals_the_package_on_shared_probes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyhessian import hessian

    make, shape, _ = zoo.PROBED[name]
    model, (inputs, targets) = zoo.randomised(make()), zoo.sample_data(shape, 8)
    ours = sample_traces(model, (inputs, targets), method="pyhessian", seed=7)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    signs: list[Tensor] = []

    def shared(like: Tensor, **options: Any) -> Tensor:
        """The next parameter's signs of our probes, as PyHessian's bits."""
        nonlocal count
        if not signs:
            signs.extend(probe(params, 7, count).values())
            count += 1
        return (signs.pop(0) + 1) / 2

    monkeypatch.setattr(torch, "randint_like", shared)
    for n in range(len(targets)):
        count = 0
        signs.clear()
        point = inputs[n : n + 1], targets[n : n + 1]
        draws = hessian(model, nn.CrossEntropyLoss(), data=point, cuda=False).trace()
        assert len(draws) == int(ours.probes[n])
        assert sum(draws) / len(draws) == pytest.approx(float(ours.values[n]), rel=1e-8)
