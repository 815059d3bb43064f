"""Numbers and tables as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spiritlevel.results.estimates import Estimate


def times(factor: float) -> str:
    """A factor as people read it, in three digits.

    >>> times(327886.0), times(3.14159), times(2.5e12), times(math.inf)
    ('328,000', '3.14', '2.5e12', 'infinitely')
    """
    if math.isinf(factor):
        return "infinitely"
    return f"{float(f'{factor:.3g}'):,.0f}" if 100 <= factor < 1e9 else figure(factor, 3)


def in_short(estimate: Estimate) -> str:
    """A number in the room of a cell: value and error, relative where that is the shorter way to say it.

    >>> from spiritlevel.results import Estimate
    >>> in_short(Estimate(0.00065, 5.7e-05)), in_short(Estimate(139.898)), in_short(Estimate(-1.5e-7))
    ('6.5e-4 ± 9%', '139.9', '-1.5e-7')
    >>> in_short(Estimate(2.5e-3, tolerance=0.03)), in_short(Estimate(309.1, tolerance=0.002))
    ('0.0025 ± 0.03', '309.1')
    >>> in_short(Estimate(0.5, status="lower bound")), in_short(Estimate(0.5, status="not converged"))
    ('≥ 0.5', '0.5 …')
    """
    if estimate.status in ("lower bound", "not converged", "undefined"):
        text = figure(estimate.value, 4)
        return {"lower bound": f"≥ {text}", "not converged": f"{text} …"}.get(estimate.status, "undefined")
    error, size = estimate.stderr + estimate.tolerance, abs(estimate.value)
    if math.isnan(error):
        return f"{figure(estimate.value, 4)} ± unknown"
    if not error or (not estimate.stderr and error < 5e-4 * size):  # not to be seen in four digits
        return figure(estimate.value, 4)
    if error > 0.5 * size:
        return f"{figure(estimate.value, 2)} ± {figure(error, 2)}"
    return f"{figure(estimate.value, 3)} ± {f'{error / size:.0%}' if error >= 0.01 * size else '<1%'}"


def figure(value: float, digits: int) -> str:
    """A number in few digits and few characters.

    >>> figure(2267.4, 3), figure(224.0, 2), figure(0.000507, 3), figure(-0.0346, 3), figure(3.2e12, 3)
    ('2,270', '220', '5.07e-4', '-0.0346', '3.2e12')
    """
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0 or 1e-3 <= abs(rounded) < 1e7:
        return f"{rounded:,.0f}" if abs(rounded) >= min(1000, 10**digits) else f"{value:.{digits}g}"
    mantissa, exponent, power = f"{value:.{digits - 1}e}".partition("e")
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{short}e{int(power)}" if exponent else mantissa  # else: not a number


def left_out_lines(left_out: dict[str, str]) -> list[str]:
    """What was left out, a line for each reason.

    >>> left_out_lines({"trace": "no time", "margin_mean": "no classes", "flatness": "no time"})
    ['left out: trace, flatness: no time', 'left out: margin_mean: no classes']
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"left out: {', '.join(some)}: {reason}" for reason, some in names.items()]


def aligned(rows: list[list[str]], heading: int = 1) -> list[str]:
    """Lines of aligned columns, the first rows a heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines[:heading], "  ".join("-" * width for width in widths), *lines[heading:]]
