"""Stated 95 % intervals hold the truth in 95 % of simulated cases: a quick look; docs/coverage.md has the table."""

from __future__ import annotations

import pytest
from scripts import script

coverage = script("make_coverage_doc")

QUICK = ["means fitted 30", "means of few 20", "probes rank one", "noise adaptive sharpness average", "correlation 3"]
"""Where intervals used to cover 55 to 86 %."""
LEAST = 0.88  # of 200 cases: 3 standard errors below 93 %


def check(name: str, cases: int) -> None:
    for row in coverage.rows([name], cases):
        assert not row.stated or row.covered >= LEAST * row.stated, row


@pytest.mark.parametrize("name", QUICK)
def test_intervals_hold(name: str) -> None:
    check(name, 200)


def test_one_draw_makes_no_interval() -> None:
    (row,) = coverage.rows(["passes 1"], 4)
    assert row.stated == 0


def test_the_page_is_about_every_setting() -> None:
    text = coverage.PAGE.read_text(encoding="utf-8")
    for name in coverage.SIMULATIONS:
        assert f"| {name} |" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(coverage.SIMULATIONS) - set(QUICK)))
def test_all_intervals_hold(name: str) -> None:
    check(name, 200)
