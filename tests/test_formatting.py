"""How numbers are written: one rule for tables, sentences, charts and pages, which loses no more than it says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import report as made_up

import spiritlevel as sl
from spiritlevel.page import page
from spiritlevel.page.parts import number
from spiritlevel.results import AuditRow, Estimate, figure, in_short, mark, times, with_error

numbers = st.floats(allow_nan=False, allow_infinity=False)


def read(text: str) -> float:
    """The number that a reader sees."""
    plain = text.replace(",", "").replace("−", "-")
    if "×" in plain:
        mantissa, power = plain.split(" × 10")
        plain = f"{mantissa}e{''.join(str('⁰¹²³⁴⁵⁶⁷⁸⁹'.index(c)) if c != '⁻' else '-' for c in power)}"
    return float(plain)


@given(numbers, st.integers(1, 8), st.booleans())
def test_a_figure_is_the_number_to_so_many_digits(value: float, digits: int, typeset: bool) -> None:
    text = figure(value, digits, typeset=typeset)
    assert read(text) == pytest.approx(float(f"{value:.{digits}g}"), rel=1e-12, abs=0)
    assert not re.search(r"\.\d*0($|e| )", text), text  # no zeros that say nothing
    assert "e+" not in text
    assert "e0" not in text
    assert len(text) <= digits + 12


@given(st.integers(-(10**15), 10**15))
def test_a_whole_number_keeps_all_of_its_digits(value: int) -> None:
    assert read(figure(value)) == value


def test_what_is_no_number_has_a_word() -> None:
    assert figure(math.nan) == figure(math.nan, typeset=True) == "undefined"
    assert (figure(-math.inf), figure(math.inf, typeset=True)) == ("-inf", "∞")
    assert float(figure(-math.inf)) == -math.inf  # what is not typeset can be read by a program


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999.96, "1,000"), (0.00099999, "0.001"), (9_999_999.0, "1e7"), (9_999_000.0, "9,999,000"), (-0.0, "-0")],
)
def test_rounding_decides_how_a_number_is_written(value: float, shown: str) -> None:
    assert figure(value) == shown


@given(numbers, st.floats(0, 1e300))
def test_a_number_shows_no_more_digits_than_its_error_leaves(value: float, error: float) -> None:
    text = with_error(value, error)
    if not error:
        assert text == figure(value, 6)
        return
    left, right = text.split(" ± ")
    assert read(right) == pytest.approx(error, rel=0.051)
    if abs(value) > error:
        assert abs(read(left) - value) <= max(0.051 * error, 0.51e-7 * abs(value))


def test_every_way_to_show_a_number_writes_it_alike() -> None:
    """A page, a chart, a sentence, a table, a cell and `print`."""
    for value in (1234.5678, 0.00032, -7.5, 2.5e9):
        plain, typeset = figure(value), figure(value, typeset=True)
        assert number(value) == typeset
        assert in_short(Estimate(value)) == plain
        assert str(Estimate(float(f"{value:.4g}"))) == plain
        row = AuditRow("m", "t", Estimate(1.0), Estimate(abs(value)), abs(value), math.nan, "changes", False)
        assert mark(row, 3) == f"×{times(abs(value))}"
    shown = re.sub(r"<[^>]*>", " ", page(made_up()).split("<script", 1)[0].split("</style>")[-1])
    assert not re.search(r"\de[+-]?\d|\bnan\b|\binf\b", shown)


BELOW = {"arguments", "binding", "errors", "memory", "storage", "watching"}
"""Rooms without a formatter: those below the results do not know it, and watchers write one factor."""
OWN = {
    "answers/observing.py": "an example",
    "answers/surface.py": "part of a key, by which kept points are found",
    "answers/wording.py": "a number that is rounded, and written elsewhere",
    "charts/": "coordinates in a drawing",
    "papers/": "remarks of kept runs, which are text",
    "results/formatting.py": "the formatter itself",
    "cli/reproduce.py": "a power of ten",
}


def test_no_other_module_writes_numbers_in_a_form_of_its_own() -> None:
    root = Path(sl.__file__).parent
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.split("/")[0].removesuffix(".py") not in BELOW and not any(path.startswith(place) for place in OWN):
            lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
            found += [f"{path}:{number}" for number, line in lines if re.search(r":,?\.\d+[ge]\}", line)]
    assert not found
