"""Made-up reports of any size, for tests of the page: every part is there, and the numbers are consistent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from spiritlevel.results import (
    Audit,
    AuditRow,
    Certificate,
    Comparison,
    ComparisonRow,
    Correlation,
    Eigenpairs,
    Estimate,
    Fit,
    Landscape,
    Margins,
    Pictures,
    Report,
    ReportRow,
    SampleTraces,
    SpectralDensity,
    SpectrumSummary,
    WorstFactor,
)

MARKUP = '<img src=x onerror="throw 1">&\'</script>'


def samples(count: int, seed: int = 0) -> tuple[SampleTraces, Margins, torch.Tensor]:
    """Traces and margins that belong together, and the predicted classes."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, count, generator=generator, dtype=torch.float64)
    signed = 6 + 4 * noise[0]
    traces = torch.exp(4 - 0.9 * signed.abs() + 0.4 * noise[1])
    targets = torch.randint(0, 10, (count,), generator=generator)
    correct = signed > 0
    predicted = torch.where(correct, targets, (targets + 1) % 10)
    softmax = torch.tanh(signed.abs() / 2)
    margins = Margins(signed.abs(), signed, softmax, 1 - softmax**2, correct, targets, fingerprint="made up")
    return SampleTraces(traces, torch.zeros_like(traces), True, "exact", targets), margins, predicted


def _row(name: str, value: Estimate, family: str, **more: Any) -> ReportRow:
    given = {
        "direction": "wider" if family == "margin" else "sharper",
        "meaning": f"the {name.replace('_', ' ')}",
        "formula": "Tr H",
        "reference": "paper A",
        "invariant_to": (),
        "cost": "backward",
        "seconds": 0.25,
        **more,
    }
    return ReportRow(name, value, family=family, **given)


def report(count: int = 400, *, name: str = "lenet5 on made-up digits", pictured: int = 60, **changes: Any) -> Report:
    """A whole report of `count` samples; `changes` replaces fields."""
    traces, margins, predicted = samples(count)
    generator = torch.Generator().manual_seed(1)
    eigenvalues = torch.tensor([12.5, 8.1, 4.0, 2.2], dtype=torch.float64)
    nodes = torch.rand(4, 30, generator=generator, dtype=torch.float64) ** 8 * 12.5
    weights = (1 / (1 + 40 * nodes)) ** 3
    pairs = Eigenpairs(eigenvalues, None, eigenvalues * 1e-5, True, 60)
    low = Eigenpairs(torch.tensor([-0.4], dtype=torch.float64), None, torch.tensor([1e-5]), True, 60, which="smallest")
    spectrum = SpectrumSummary(
        largest=pairs,
        smallest=low,
        trace=Estimate(61.0, 1.2, 7, 64, 0),
        frobenius_norm=Estimate(15.4, 0.3, 7, 64, 0),
        mean_square=Estimate(0.01, 0.001, 7, 64, 0),
        density=SpectralDensity(nodes, weights / weights.sum(1, keepdim=True) / 4, size=61_706),
        layers={},
        size=61_706,
        matvecs=180,
    )
    steps = torch.linspace(-0.5, 0.5, 17, dtype=torch.float64)
    t, s = torch.meshgrid(steps, steps, indexing="ij")
    surface = Landscape(
        ("eigenvector 1", "eigenvector 2"),
        (steps, steps),
        0.02 + 6.2 * t**2 + 4 * s**2 + 2 * t**3,
        None,
        0.02,
        torch.zeros(2, dtype=torch.float64),
        torch.diag(torch.tensor([12.5, 8.1], dtype=torch.float64)),
        torch.ones(2, dtype=torch.float64),
        samples=count,
    )
    shown = torch.linspace(0, count - 1, min(pictured, count)).long().unique()
    images = torch.randint(0, 255, (len(shown), 1, 28, 28), generator=generator, dtype=torch.uint8)
    half = min(12, len(shown))
    audit = Audit(
        tuple(
            AuditRow(measure, transform, Estimate(2.0), Estimate(2.0 * ratio), ratio, math.nan, verdict, False)
            for measure, transform, ratio, verdict in [
                ("trace", "rescale_layers", 486.0, "changes"),
                ("trace", "scale_last_layer", 0.042, "changes"),
                ("trace", "fold_batchnorm", math.nan, "not converged"),
                ("relative_flatness", "rescale_layers", 1.0, "invariant"),
                ("relative_flatness", "scale_last_layer", 0.0448, "changes"),
                ("relative_flatness", "fold_batchnorm", 1.01, "unstable"),
                ("margin_mean", "rescale_layers", 1.0, "invariant"),
                ("margin_mean", "scale_last_layer", 2.0, "changes"),
                ("margin_mean", "fold_batchnorm", 1.0, "invariant"),
            ]
        ),
        worst=(WorstFactor("trace", 2.0, 0.01, 972.0, {"conv1": 0.1}, {"conv1": 10.0}, 1e-6),),
        certificates={"rescale_layers": Certificate("rescale_layers", "outputs", 1, ("eval",), 0, 0, 8, "8 samples")},
        skipped={"input_map": "the network has no first linear layer"},
    )
    mean = float(traces.values.mean())
    whole = Report(
        name=name,
        rows=(
            _row("trace", Estimate(mean, data_stderr=0.02 * mean), "curvature", meaning="sum of the eigenvalues"),
            _row("largest_eigenvalue", Estimate(12.5), "curvature", formula="λ₁"),
            _row("ball_sharpness", Estimate(math.nan, reason="it did not converge"), "curvature"),
            _row("relative_flatness", Estimate(31.5, 1.5, 15), "curvature", invariant_to=("rescale_layers",)),
            _row("margin_q50", Estimate(float(margins.signed.median())), "margin", formula="Q_0.5(Δ)"),
            _row("margin_skewness", Estimate(0.12), "margin"),
        ),
        headline=("The minimum is sharp for a few samples and flat for most.", "Margins are wide."),
        fits={"train": Fit(count, count, Estimate(0.93), Estimate(0.21))},
        traces=traces,
        margins=margins,
        test_margins=samples(count // 2, seed=5)[1],
        predicted=predicted,
        correlations={
            "trace and margin": Correlation(-0.61, -0.66, -0.55, count - 12, 12, -0.5, -0.93, -1.0, 4.0),
            "trace and ACEHT": Correlation(*[math.nan] * 3, 0, 0, *[math.nan] * 4, reason="ACEHT needs flat inputs"),
        },
        layers={"conv1.weight": 0.31, "conv1.bias": 0.02, "fc1.weight": 0.45, "fc2.weight": 0.22},
        spectrum=spectrum,
        landscape=surface,
        audit=audit,
        pictures=Pictures(
            shown,
            images,
            {"sharpest": tuple(range(half)), "least certain": tuple(range(half)), "others": tuple(range(len(shown)))},
        ),
        classes=tuple(f"digit {k}" for k in range(10)),
        parameters=61_706,
        settings={"seed": "0", "torch": "2.13", "device": "cpu", "batch norm": "eval"},
        left_out={"path_norm": "the network is not a chain"},
        seconds=12.3,
    )
    return dataclasses.replace(whole, **changes)


def comparison(count: int = 200) -> Comparison:
    first, second = samples(count)[1], samples(count, seed=3)[1]
    rows = (
        ComparisonRow(
            *("margin_mean", Estimate(5.0), Estimate(6.0), 1.0, 0.8, 1.2, "paired t", 1.2, 1.0, "b", "wider"),
            *("mean output margin", True),
        ),
        ComparisonRow(
            *(
                "trace",
                Estimate(9.0),
                Estimate(3.0),
                -6.0,
                -7.0,
                -5.0,
                "exact",
                0.33,
                486.0,
                "not comparable",
                "sharper",
            ),
            *("sum of the eigenvalues", False, "the audit moves it 486-fold"),
        ),
    )
    return Comparison(
        ("small", "large"), rows, "Trust large: its margins are wider.", margins=(first, second), samples=count
    )
