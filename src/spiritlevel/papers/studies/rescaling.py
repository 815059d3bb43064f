"""Paper B, sections B and E: many eigenvalues can be made as large as one likes, but fewer if there are biases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

if TYPE_CHECKING:
    from torch import Tensor, nn

THEOREM = Statement(
    "theorem 2",
    "at least r − min n_k eigenvalues can be made larger than any bound",
    "r − min n_k",
    "in every network without biases the number of eigenvalues that grow like β² is at least r − min n_k",
    "in one network it is not",
    Range(low=1.0),
    kind="identity",
)
EXACT = Statement(
    "how many",
    "not in the paper: the number is the rank of H without the enlarged layer",
    "– (mathematics 7.5: theorem 2 is conservative)",
    "the number equals that rank in every network",
    "in one network it does not",
    Range(low=1.0),
    kind="identity",
)
BIASES = Statement(
    "biases",
    "biases can decrease the number of eigenvalues that can be influenced",
    "stated (section B)",
    "along the path some eigenvalues neither grow nor vanish in every network with biases, and in none without",
    "in one network that is not so",
    Range(low=1.0),
    kind="identity",
)
SAME = Statement(
    "same outputs",
    "all these parameters are observationally equivalent",
    "stated",
    "outputs stay equal to 1e-9 relative, with and without biases",
    "they do not",
    Range(high=1e-9),
    kind="identity",
)


@dataclass(frozen=True, kw_only=True)
class Rescaling(Config):
    """Small rectified networks at exact zero-loss minima, in float64."""

    networks: tuple[str, ...] = ("3-4-4-1", "3-4-4-3", "6-4-3", "4-3-3-6", "2-5-5-2")
    """Layer widths of the networks, joined by hyphens."""
    samples: int = 60
    """Inputs at which each network teaches itself."""
    betas: tuple[float, ...] = (1.0, 4.0, 16.0, 64.0, 256.0, 512.0, 1024.0)
    """Factors β of the theorem's path. The last two decide what grows: at β = 30 a bounded eigenvalue can still rise
    like β², and much beyond 1000 rounding hides what stays."""


def run(config: Rescaling, run: Run) -> Iterator[Ruling]:
    """Spectra along the path, and how many eigenvalues follow it."""
    from spiritlevel import charts

    cases = list(itertools.product(config.networks, (False, True)))
    found = []
    for number, (widths, bias) in enumerate(cases):
        run.progress(f"network {widths}{' with biases' if bias else ''}", number, len(cases))
        found.append(run.once(f"{widths}{'-biases' if bias else ''}", partial(_measure, config, widths, bias)))
    rows = [{key: value for key, value in case.items() if key != "spectra"} for case in found]
    run.table("counts", rows)

    shown = max(found, key=lambda case: (case["biases"], case["rank"]))
    for case in found:
        if case["network"] != shown["network"]:
            continue
        points = [
            {"β": beta, "eigenvalue": value, "number": float(k + 1)}
            for beta, values in zip(config.betas, case["spectra"], strict=True)
            for k, value in enumerate(values[: case["rank"]])
            if value > 1e-14 * values[0]  # what is left is rounding
        ]
        label = "with biases" if case["biases"] else "without biases"
        frame = run.table(f"spectra {label}", points)
        title = f"Eigenvalues of the network {case['network']} {label} along the path"
        chart = charts.lines(frame, "β", "eigenvalue", series="number", log_x=True, log_y=True, title=title)
        run.chart(f"spectra-{label.replace(' ', '-')}", chart)
    bare, biased = ([case for case in found if case["biases"] is bias] for bias in (False, True))
    kept = [case["growing"] >= case["promised"] for case in bare]
    listing = "; ".join(f"{c['network']}: r = {c['rank']}, promised {c['promised']}, {c['growing']} grow" for c in bare)
    yield THEOREM.judge(
        sum(kept) / len(kept),
        remark=f"The share of networks. {listing}.",
    )
    exact = [case["growing"] == case["rank without layer"] for case in found]
    yield EXACT.judge(sum(exact) / len(exact), remark="The share of networks.")
    right = [case["staying"] > 0 for case in biased] + [case["staying"] == 0 for case in bare]
    yield BIASES.judge(
        sum(right) / len(right),
        remark="The share of networks. Eigenvalues that stay: "
        f"{', '.join(str(case['staying']) for case in biased)} with biases, "
        f"{', '.join(str(case['staying']) for case in bare)} without.",
    )
    worst = max(case["output difference"] for case in found)
    yield SAME.judge(worst)


def _measure(config: Rescaling, widths: str, bias: bool) -> dict[str, Any]:
    """One network at a zero-loss minimum: its own outputs are the targets, so H is the Gauss-Newton matrix exactly."""
    import torch

    from spiritlevel.operators.matrices import gauss_newton
    from spiritlevel.transforms import rescale_layers

    sizes = [int(width) for width in widths.split("-")]
    model = _network(sizes, bias=bias, seed=config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    inputs = torch.randn(config.samples, sizes[0], dtype=torch.float64, generator=generator)
    data = (inputs, model(inputs).detach())
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    counts = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in layers]
    enlarged = counts.index(min(counts))

    spectra, worst = [], 0.0
    for beta in config.betas:
        factors = {n: beta ** (len(layers) - 1) if k == enlarged else 1 / beta for k, n in enumerate(layers)}
        moved = rescale_layers(model, factors, data=data)
        worst = max(worst, moved.certificate.relative_difference)
        matrix = gauss_newton(moved.model, data, loss="squared_error").dense()
        spectra.append(torch.linalg.eigvalsh(matrix).flip(0))
    whole = gauss_newton(model, data, loss="squared_error").dense()
    rank = _rank(whole)
    scaled = rescale_layers(
        model, {n: 2.0 ** (len(layers) - 1) if k == enlarged else 0.5 for k, n in enumerate(layers)}
    )
    growing = torch.cat([torch.full((p.numel(),), _factor(scaled, name) < 1) for name, p in model.named_parameters()])
    rounding = len(whole) * torch.finfo(torch.float64).eps * spectra[-1][0]
    growth = (spectra[-1] / spectra[-2])[:rank] * (spectra[-1][:rank] > rounding)  # below it: vanished
    step = config.betas[-1] / config.betas[-2]
    return {
        "network": widths,
        "biases": bias,
        "rank": rank,
        "promised": rank - min(counts),
        "growing": int((growth > step).sum()),  # β² against β^0 and falling powers
        "staying": int(((growth <= step) & (growth > 1 / step)).sum()),
        "rank without layer": _rank(whole[growing][:, growing]),
        "output difference": worst,
        "spectra": torch.stack(spectra),
    }


def _factor(moved: Any, name: str) -> float:
    return float(moved.certificate.factors[name])


def _network(sizes: list[int], *, bias: bool, seed: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for first, second in itertools.pairwise(sizes):
            linear = nn.Linear(first, second, bias=bias)
            nn.init.normal_(linear.weight, std=(2 / first) ** 0.5)
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1]).double()


def _rank(matrix: Tensor) -> int:
    import torch

    values = torch.linalg.eigvalsh(matrix)
    return int((values > 1e-11 * values[-1]).sum())


STUDY = Study(
    name="rescaling",
    title="Rescaling layers: how many eigenvalues can be made large",
    source="B, B and E",
    config=Rescaling,
    statements=(THEOREM, EXACT, BIASES, SAME),
    run=run,
    revision=2,
    scales={"smoke": {"networks": ("3-4-4-3", "6-4-3")}},
    seeds={},
)
