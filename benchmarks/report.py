"""A whole report about a tiny network, where a call costs overhead: time spent in code, not in arithmetic."""

from __future__ import annotations

import torch
from harness import Row, Scale, alone, dense_net, forward, ratio, take_turns, trained

import spiritlevel as sl


def reports(scale: Scale) -> list[Row]:
    """The default `measure` of 818 parameters on 200 samples: over forward passes, and in products of its Hessian."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(200, 20, generator=generator), torch.randint(0, 3, (200,), generator=generator)
    model = trained(dense_net(20, 25, 10, 3), inputs, targets, 60)
    found = [sl.measure(model, (inputs, targets))]  # once for what libraries do on their first call
    rows = []
    for what, parts in (("all of it", None), ("without the audit", ["spectrum", "landscape", "pictures"])):
        ours, passes = take_turns(
            scale.rounds,
            lambda parts=parts: sl.measure(model, (inputs, targets), parts=parts),
            lambda: [forward(model, inputs) for _ in range(1_000)],
        )
        rows.append(
            alone("818 parameters", f"a report, {what} / 1,000 forward passes of its 200 samples", ratio(ours, passes))
        )
    assert found[0].spectrum is not None
    products = float(found[0].spectrum.matvecs)
    rows.append(
        alone("818 parameters", "products of the Hessian for spectrum, ends and landscape", (products, products))
    )
    return rows
