"""Numbers and tables as people read them: the one place that decides how a number is written.

`figure` writes a number, `with_error` a number and its error, `in_short` an estimate short enough for a cell, `times`
a factor. Tables, sentences, charts and pages all use these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spiritlevel.results.estimates import Estimate

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def figure(value: float, digits: int = 4, *, typeset: bool = False) -> str:
    """A number to that many digits, without those that say nothing; a whole number (`int`) keeps all its digits.

    From 0.001 to 10 million it is written out, beyond that with a power of ten. `typeset` is for pages and sentences:
    a true minus sign, ×10ⁿ and ∞ in place of what a program could read.

    >>> figure(2267.4, 3), figure(0.000507), figure(-0.0346), figure(3.2e12), figure(1234.5678, 6), figure(60_000)
    ('2,270', '5.07e-4', '-0.0346', '3.2e12', '1,234.57', '60,000')
    >>> figure(3.2e-7, typeset=True), figure(-0.5, typeset=True), figure(-math.inf, typeset=True), figure(math.nan)
    ('3.2 × 10⁻⁷', '−0.5', '−∞', 'undefined')
    """
    if math.isnan(value):
        return "undefined"
    if math.isinf(value):
        text = f"{value}"
        return text.replace("-", "−").replace("inf", "∞") if typeset else text
    if isinstance(value, int) or value == 0:
        text = f"{value:,.0f}"
    else:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        exponent = int(power)
        written_out = -4 < exponent < 7
        text = f"{float(f'{mantissa}e{power}'):,.{max(0, digits - 1 - exponent)}f}" if written_out else mantissa
        text = text.rstrip("0").rstrip(".") if "." in text else text
        if not written_out:
            text += f" × 10{str(exponent).translate(_SUPERSCRIPTS)}" if typeset else f"e{exponent}"
    return text.replace("-", "−") if typeset else text


def with_error(value: float, error: float, digits: int = 8, *, typeset: bool = False) -> str:
    """A number and its error: two digits of the error and as many of the number as that warrants, at most `digits`.

    >>> with_error(64.5312, 10.6), with_error(1234.5678, 0.012), with_error(0.0123, 0.0), with_error(-2.5, math.nan)
    ('65 ± 11', '1,234.568 ± 0.012', '0.0123', '-2.5 ± unknown')
    """
    if not error or math.isnan(error):
        text = figure(value, min(digits, 6), typeset=typeset)
        return f"{text} ± unknown" if error else text
    left = 2 + _magnitude(abs(value) or error) - _magnitude(error)
    shown = figure(value, max(2, min(digits, left)), typeset=typeset)
    return f"{shown} ± {figure(error, 2, typeset=typeset)}"


def with_limits(value: float, error: float, *, typeset: bool = False) -> str:
    """A value in four digits, with its error where that is more than a hundredth of it.

    >>> with_limits(1.443e-4, 5e-5), with_limits(20.47, 0.001)
    ('1.443e-4 ± 5e-5', '20.47')
    """
    shown = figure(value, typeset=typeset)
    return f"{shown} ± {figure(error, 2, typeset=typeset)}" if error > abs(value) / 100 else shown


def _magnitude(number: float) -> int:
    return math.floor(math.log10(number)) if number > 0 and math.isfinite(number) else 0


def times(factor: float) -> str:
    """A factor to three digits, or to as many as show that it is not 1.

    >>> times(327886.0), times(3.14159), times(2.5e12), times(1.00021), times(math.inf)
    ('328,000', '3.14', '2.5e12', '1.0002', 'infinitely')
    """
    if math.isinf(factor):
        return "infinitely"
    return figure(factor, max(3, 1 - _magnitude(abs(factor - 1)))) if 0.9 < factor < 1.1 else figure(factor, 3)


def at_least(factor: float) -> str:
    """How far, at least, something was moved, in words: as a percentage where a factor would be close to 1.

    >>> at_least(523.6), at_least(1.0021), at_least(1.0)
    ('at least 524-fold', 'by at least 0.21%', 'at least 1-fold')
    """
    if 1 < factor < 1.1:
        return f"by at least {figure(100 * (factor - 1), 2)}%"
    return f"at least {times(factor)}-fold"


def in_short(estimate: Estimate) -> str:
    """A number short enough for a cell: value and error, relative where that is shorter.

    >>> from spiritlevel.results import Estimate
    >>> in_short(Estimate(0.00065, 5.7e-05)), in_short(Estimate(139.898)), in_short(Estimate(-1.5e-7))
    ('6.5e-4 ± 9%', '139.9', '-1.5e-7')
    >>> in_short(Estimate(2.5e-3, tolerance=0.03)), in_short(Estimate(309.1, tolerance=0.002))
    ('0.0025 ± 0.03', '309.1')
    >>> in_short(Estimate(0.5, status="lower bound")), in_short(Estimate(0.5, status="not converged"))
    ('≥ 0.5', '0.5 …')
    """
    if estimate.status in ("lower bound", "not converged", "undefined"):
        text = figure(estimate.value)
        return {"lower bound": f"≥ {text}", "not converged": f"{text} …"}.get(estimate.status, "undefined")
    error, size = estimate.stderr + estimate.tolerance, abs(estimate.value)
    if estimate.status == "converged" and error < 5e-4 * size:  # invisible in four digits
        return figure(estimate.value)
    if not 0 < error <= 0.5 * size:  # also NaN
        return with_error(estimate.value, error, 4)
    return f"{figure(estimate.value, 3)} ± {f'{error / size:.0%}' if error >= 0.01 * size else '<1%'}"


def left_out_lines(left_out: dict[str, str]) -> list[str]:
    """What was left out, one line per reason.

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
