"""What counts the intervals of `perturb` and writes the tables of docs/perturb.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import script

doc = script("make_perturb_doc")


def test_changes_are_counted_in_pieces_that_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc, "KEPT", tmp_path)
    monkeypatch.setattr(doc, "NETWORKS", {"transformer": doc.NETWORKS["transformer"]})
    monkeypatch.setattr(doc, "PIECE", 1)
    assert doc.count(6, 0.0) == 6
    assert doc.count(3, 600.0) == 0
    kept = {path: path.read_text() for path in tmp_path.iterdir()}
    assert len(kept) == 3
    rows = [row for text in kept.values() for row in json.loads(text)]
    assert {row["change"].partition(":")[0].rstrip("5678") for row in rows} == {"noise", "int"}
    assert all(isinstance(row[key], bool) for row in rows for key in ("suffices", "loss", "flips"))
    monkeypatch.setattr(doc, "counted", lambda *_: pytest.fail("counted again"))
    monkeypatch.setattr(doc, "version", lambda: next(iter(kept)).name.split("-")[0])
    assert doc.count(3, 600.0) == 0
    table, found = doc.coverage(3)
    assert sum(len(each) for each in found.values()) == 3
    assert table.splitlines()[-1].startswith("| all |  | 3 |")


def test_a_change_is_the_same_for_the_same_number() -> None:
    first, second, other = (doc.changed("transformer", "random rounding", case) for case in (1, 1, 4))
    assert first.measured.value == second.measured.value != other.measured.value


def test_tables_are_written_between_their_marks() -> None:
    page = doc.PAGE.read_text(encoding="utf-8")
    text = doc.written(doc.written(page, "changes", "| a |"), "bits", "| b |")
    assert "<!-- changes: begin -->\n\n| a |\n\n<!-- changes: end -->" in text
    assert "<!-- bits: begin -->\n\n| b |\n\n<!-- bits: end -->" in text
    assert doc.written(text, "changes", "| a |") == text
    with pytest.raises(SystemExit, match="has no place"):
        doc.written(page, "moon", "")
