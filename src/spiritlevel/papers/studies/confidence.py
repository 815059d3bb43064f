"""Paper A, Fig. 1: one minus the confidence measure over the probability simplex of three classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spiritlevel.errors import InputError
from spiritlevel.papers.studies.base import Config, Run, Study
from spiritlevel.papers.studies.rules import Range, Ruling, Statement

CORNERS = Statement(
    "corners",
    "1 − η is zero where one class has all the probability",
    "zero at the corners (Fig. 1)",
    "the largest value at the three corners is below 1e-12",
    "it is not",
    Range(high=1e-12),
    kind="identity",
)
MIDDLE = Statement(
    "middle",
    "1 − η is largest where all classes are equally probable",
    "maximum in the middle (Fig. 1)",
    "the largest value of the grid lies at (1/3, 1/3, 1/3) and is 2/3, both to 1e-12",
    "it lies elsewhere, or is another",
    Range(high=1e-12),
    kind="identity",
)


@dataclass(frozen=True, kw_only=True)
class Confidence(Config):
    """How finely the triangle is drawn."""

    divisions: int = 120
    """Steps along a side of the triangle, a multiple of 3 so that the middle is on the grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divisions < 3 or self.divisions % 3:
            raise InputError(
                "confidence needs a multiple of 3 as divisions=, so that the middle is on the grid, got "
                f"{self.divisions}."
            )


def run(config: Confidence, run: Run) -> Iterator[Ruling]:
    """Evaluate 1 − Σ S² on a grid, from logits, by the same function that measures networks."""
    import torch

    from spiritlevel import charts
    from spiritlevel.binding.losses import confidence_gap

    n = config.divisions
    counts = [(i, j, n - i - j) for i in range(n + 1) for j in range(n + 1 - i)]
    probabilities = torch.tensor(counts, dtype=torch.float64) / n
    gaps = confidence_gap(probabilities.log().clamp(min=-745.0))
    rows = [
        {"a": a, "b": b, "c": c, "gap": gap}
        for (a, b, c), gap in zip(probabilities.tolist(), gaps.tolist(), strict=True)
    ]
    frame = run.table("simplex", rows)
    run.chart(
        "simplex", charts.triangle(frame, ("a", "b", "c"), "gap", title="1 − η over the probabilities of three classes")
    )

    corners = max(row["gap"] for row in rows if max(row["a"], row["b"], row["c"]) == 1.0)
    yield CORNERS.judge(corners)
    top = max(rows, key=lambda row: row["gap"])
    distance = max(abs(top[name] - 1 / 3) for name in "abc")
    off = max(distance, abs(top["gap"] - 2 / 3))
    yield MIDDLE.judge(off, remark=f"The largest deviation; the value is {top['gap']:.4g}.")


STUDY = Study(
    name="confidence",
    title="One minus the confidence measure over the simplex",
    source="A, Fig. 1",
    config=Confidence,
    statements=(CORNERS, MIDDLE),
    run=run,
    scales={"smoke": {"divisions": 30}},
    seeds={},
    revision=2,
)
