"""The page as text: whole, escaped, honest about what is missing, and free of addresses to load from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import MARKUP, comparison, report

from spiritlevel.errors import InputError
from spiritlevel.page import document, notebook, page, parts
from spiritlevel.results import Estimate, Fit, Report, WorstFactor

VOID = {"meta", "link", "br", "img", "rect", "path", "circle"}


class Reader(HTMLParser):
    """Elements with their attributes and text; complains about tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def data(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found)


@pytest.fixture(scope="module")
def whole() -> str:
    return page(report())


def test_the_page_has_every_part(whole: str) -> None:
    text = Reader(whole).text
    for words in (
        "lenet5 on made-up digits",
        "How sharp",
        "95% interval",
        "× 486",
        "Every sample: trace against margin",
        "Sharpest",
        "Least certain",
        "Spectrum of the Hessian",
        "The loss around the minimum",
        "Which layers hold the trace",
        "Audit: what the numbers are worth",
        "How this was measured",
        "the network is not a chain",
        "r = −0.61",
        "undefined, ACEHT needs flat inputs",
        "it did not converge",
    ):
        assert words in text
    charts = {key.partition("-")[2] for key in data(whole)["charts"]}
    assert charts == {
        *("scatter", "margins-train", "margins-test", "density", "ritz", "landscape-chart", "layers-chart"),
        "audit-map",
    }


def test_nothing_is_loaded_from_anywhere(whole: str) -> None:
    reader = Reader(whole)
    sources = [a.get("src") or a.get("href") for _, a in reader.elements if "src" in a or "href" in a]
    assert all(str(source).startswith(("#", "data:")) for source in sources)
    assert "default-src 'none'" in str(reader.all("meta")[1]["content"])
    assert "url(http" not in whole
    assert "@import" not in whole


def test_landmarks_headings_and_labels_are_there_for_those_who_do_not_see(whole: str) -> None:
    reader = Reader(whole)
    tags = [tag for tag, _ in reader.elements]
    for tag in ("header", "nav", "main", "footer", "h1", "h2"):
        assert tag in tags
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    plots = [a for a in reader.all("div") if a.get("class") == "plot"]
    assert plots
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert len(reader.all("table")) == len(reader.all("caption"))
    identifiers = [a["id"] for _, a in reader.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    targets = {str(a["href"])[1:] for a in reader.all("a")}
    assert targets <= set(identifiers)


def test_every_name_from_outside_is_escaped() -> None:
    made = report(40, name=MARKUP)
    made = dataclasses.replace(
        made,
        classes=(MARKUP,) * 10,
        layers={MARKUP: 1.0},
        settings={MARKUP: MARKUP},
        left_out={MARKUP: MARKUP},
        headline=(MARKUP,),
        partial=MARKUP,
        rows=(dataclasses.replace(made.rows[0], name=MARKUP, meaning=MARKUP), *made.rows),
    )
    text = page(made, dataclasses.replace(comparison(), names=(MARKUP, MARKUP), advice=MARKUP))
    reader = Reader(text)
    assert MARKUP not in text
    assert MARKUP in reader.text
    assert not reader.all("img")
    assert text.count("</script") == 3
    assert MARKUP in json.dumps(data(text)["charts"], ensure_ascii=False).replace('\\"', '"')


PARTS = ["traces", "margins", "test_margins", "predicted", "spectrum", "landscape", "audit", "pictures", "indices"]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_is_said_to_be(name: str) -> None:
    text = page(report(30, **{name: None}))
    Reader(text)
    expected = {
        "traces": "The trace or the margin of every sample was not measured.",
        "margins": "The trace or the margin of every sample was not measured.",
        "spectrum": "The spectrum was not measured.",
        "landscape": "The landscape was not measured.",
        "audit": "The audit was not measured.",
        "pictures": "There are no pictures",
    }
    assert expected.get(name, "") in text


def test_the_reason_for_leaving_a_part_out_is_given() -> None:
    text = page(report(30, spectrum=None, left_out={"spectrum": "the time limit was reached."}))
    assert "The spectrum was left out: the time limit was reached." in text


def test_one_reason_is_given_once() -> None:
    text = Reader(page(report(30, left_out={"trace": "no time", "path_norm": "no chain", "audit": "no time"}))).text
    assert "trace, audit no time" in text
    assert "path_norm no chain" in text


def test_an_empty_report_has_a_page() -> None:
    text = page(Report("nothing yet", (), partial="Interrupted after 3 s."))
    reader = Reader(text)
    assert "Partial. Interrupted after 3 s." in reader.text
    assert data(text)["charts"] == {}


def test_an_unknown_error_of_a_subset_is_never_called_exact() -> None:
    made = report(30)
    fit = dataclasses.replace(made.fits["train"], population=300)
    unknown = dataclasses.replace(made.rows[1], value=Estimate(12.5, data_stderr=math.nan))
    subset = dataclasses.replace(made, fits={"train": fit}, rows=(unknown,))
    for shown in (subset, Report.from_json(subset.to_json())):
        text = Reader(page(shown)).text
        assert "for all data the error is not known" in text
        assert "largest_eigenvalue 12.5 unknown" in text
    assert "exact on the samples measured" in Reader(page(made)).text


def test_the_measures_say_what_moves_them_at_the_same_outputs() -> None:
    text = Reader(page(report(30))).text
    assert "sharper moves at least × 486 sum of the eigenvalues" in text  # the search found as much as the transform
    assert "sharper not tested the largest eigenvalue" in text
    assert "smaller than this factor" not in text
    assert "sharper stays the relative flatness" in text  # ×0.0448 came from a transform that changes the outputs


def test_the_search_is_told_from_the_fixed_scaling() -> None:
    made = report(30)
    assert made.audit is not None
    text = Reader(page(made)).text
    assert (
        "one draw of each. A short search for the worst rescale_layers moved ‘trace’ at least 486-fold at the same "
        in text
    )
    assert "from 2 down to 0.01 and up to 972; larger ones move it further." in text
    upwards = WorstFactor("trace", 10.42, 10.42, 7000.0, {}, {"conv1": 10.0}, 0.0)
    text = Reader(page(dataclasses.replace(made, audit=dataclasses.replace(made.audit, worst=(upwards,))))).text
    assert "from 10.42 up to 7,000;" in text
    rough = dataclasses.replace(upwards, errors=(2.0, 2.0, 900.0))
    text = Reader(page(dataclasses.replace(made, audit=dataclasses.replace(made.audit, worst=(rough,))))).text
    assert "at least 491-fold at the same outputs, from 10.42 ± 2 up to 7,000 ± 900;" in text
    untested = dataclasses.replace(made.audit, worst=(), certificates={})
    text = Reader(page(dataclasses.replace(made, audit=untested))).text
    assert "No symmetry of this network was tried." in text


def test_parts_of_fewer_samples_say_so() -> None:
    words = "500 of these samples, drawn at random"
    text = Reader(page(report(30, settings={"audit, spectrum and landscape": words}))).text
    assert text.count(f"Computed on {words}, so the values differ from those of all samples.") == 2
    assert "Computed on" not in Reader(page(report(30))).text


def test_an_unknown_error_of_a_subset_is_unknown_after_it_was_read_back() -> None:
    made = report(30)
    fit = dataclasses.replace(made.fits["train"], population=300)
    value = Estimate(12.5, tolerance=1e-3, data_stderr=math.nan, data_limits=(math.nan, math.nan))
    bare = dataclasses.replace(value, data_stderr=None, data_limits=None)  # as files of earlier versions have it
    for one in (value, bare):
        row = dataclasses.replace(made.rows[1], value=one, subset_error_unknown=True)
        subset = dataclasses.replace(made, fits={"train": fit}, rows=(row,))
        back = Report.from_json(subset.to_json())
        assert str(back.rows[0].value.data_stderr) == str(one.data_stderr)
        assert "largest_eigenvalue 12.5 unknown" in Reader(page(back)).text


def test_an_accuracy_of_a_subset_always_has_an_interval() -> None:
    def shown(fit: Fit) -> str:
        return Reader(page(report(30, fits={"train": fit}))).text

    assert "train 60 10,000 100 94.1 to 100" in shown(Fit(60, 10_000, Estimate(1.0), Estimate(0.2)))
    assert "train 2 10,000 50 1.26 to 98.7" in shown(Fit(2, 10_000, Estimate(0.5), Estimate(0.2)))
    assert "train 60 60 100 exact" in shown(Fit(60, 60, Estimate(1.0), Estimate(0.2)))


def test_numbers_of_one_and_of_pictures_are_named() -> None:
    made = report(30, classes=())
    one = dataclasses.replace(made.correlations["trace and margin"], removed=1)
    text = Reader(page(dataclasses.replace(made, correlations={"trace and margin": one}))).text
    assert "1 outlier removed" in text
    assert re.search(r"sample 0 class \d", text)


def test_the_outermost_points_lie_inside_the_frame(whole: str) -> None:
    for key, axes in (("r0-scatter", "xy"), ("r0-ritz", "x")):
        layers = data(whole)["charts"][key]["layer"]
        assert all(layer["encoding"][axis]["scale"]["padding"] == 8 for layer in layers for axis in axes)
    assert "Each stem is one Ritz value of a probe" in Reader(whole).text


def test_a_partial_report_says_so_once() -> None:
    why = "interrupted at step 3 of 9, audit"
    text = Reader(page(report(40, partial=why, headline=(f"This report is not complete: {why}.", "It fits.")))).text
    assert text.count(why) == 1
    assert "It fits." in text


def test_several_runs_stand_side_by_side_with_their_comparison() -> None:
    text = page(report(40, name="small"), report(50, name="large"), comparison())
    reader = Reader(text)
    for words in ("All runs", "1: small", "2: large", "Trust large: its margins are wider.", "not comparable"):
        assert words in reader.text
    assert {"r0-scatter", "r1-scatter", "side-margins", "c0-pairs-chart"} <= data(text)["charts"].keys()
    articles = [a["id"] for a in reader.all("article")]
    assert articles == ["side", "r0", "r1", "c0"]  # as they were given
    again = [a["id"] for a in Reader(page(comparison(), report(40), report(40))).all("article")]
    assert again == ["side", "c0", "r0", "r1"]


def test_side_by_side_shows_limits_data_samples_and_accuracy() -> None:
    fit = {"train": Fit(60, 10_000, Estimate(1.0), Estimate(0.2))}
    subset = report(60, name="small", fits=fit, settings={"train data": "mnist (train)"})
    text = Reader(page(subset, report(50, name="large"))).text
    assert "train data mnist (train) not named" in text
    assert "train samples 60 of 10,000 50" in text
    assert "train accuracy (%) 100 (94.1 to 100) 93" in text
    assert "relative_flatness 31.5 ± unknown 31.5 ± 3.2 sharper stays" in text
    assert "only beyond" not in text


def test_a_subset_is_named_by_its_places_in_the_data() -> None:
    text = page(report(30, indices=torch.arange(30) * 10 + 5))
    points = [row for rows in _datasets(data(text)["charts"]["r0-scatter"]) for row in rows if "hover0" in row]
    assert {row["hover0"] for row in points} == {str(10 * k + 5) for k in range(30)}
    assert data(text)["runs"]["r0"]["sheet"]["places"].keys() <= {row["hover0"] for row in points}


def _datasets(spec: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [*spec.get("datasets", {}).values()] + [
        part["data"]["values"] for part in [spec, *spec.get("layer", [])] if "values" in part.get("data", {})
    ]


def test_packed_columns_come_back_bit_by_bit() -> None:
    import base64

    values = np.array([1e-300, math.nan, -math.inf, 0.1])
    column = parts.packed(values)
    assert column["kind"] == "f8"
    assert np.frombuffer(base64.b64decode(column["data"]), "<f8").tobytes() == values.tobytes()


def test_large_colour_pictures_become_small_ones() -> None:
    sheet = parts.sheet(torch.randint(0, 255, (5, 3, 128, 256), dtype=torch.uint8).numpy(), [7, 8, 9, 10, 11])
    assert (sheet.width, sheet.height, sheet.columns, sheet.rows) == (64, 32, 3, 2)
    assert sheet.places["11"] == 4
    assert sheet.image.startswith("data:image/webp;base64,")


def test_a_report_writes_its_own_page_and_shows_itself_in_a_notebook(tmp_path: Path, whole: str) -> None:
    file = tmp_path / "page.html"
    assert report().to_html(file) == file.read_text(encoding="utf-8") == whole
    frame = notebook(report(30))
    assert report(30)._repr_html_() == frame
    assert frame.startswith("<iframe sandbox=")
    assert frame.count("<") == 2
    assert "allow-same-origin" not in frame


def test_only_reports_and_comparisons_have_a_page() -> None:
    with pytest.raises(InputError, match="page shows reports and comparisons, got Estimate"):
        page(Estimate(1.0))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="got nothing"):
        page()


def test_the_page_of_a_large_data_set_stays_small() -> None:
    text = page(report(60_000, pictured=600))
    assert len(text.encode()) < 15e6
    scatter = data(text)["charts"]["r0-scatter"]
    assert "title" not in scatter
    points = [row for rows in _datasets(scatter) for row in rows if "hover0" in row]
    assert len(points) <= 4000
    assert f"{len(points):,} of 60,000 drawn as points" in text


# ---------------------------------------------------------------- the script of the page


def test_the_script_is_pinned_for_the_version_that_is_installed() -> None:
    release = version("vl-convert-python")
    bundled = hashlib.sha256(
        document.vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").encode()
    ).hexdigest()
    assert document._BUNDLES.get(release) == bundled, f'add "{release}": "{bundled}" to _BUNDLES'


@pytest.mark.parametrize("kept", [b"alert('injected')", b"", b"\xff", None])
def test_a_script_in_the_cache_that_is_not_the_pinned_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bytes | None
) -> None:
    release, script, calls = version("vl-convert-python"), "real();", []
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path))
    monkeypatch.setattr(document.vl_convert, "javascript_bundle", lambda _: calls.append(1) or script)
    monkeypatch.setattr(document, "_BUNDLES", {release: hashlib.sha256(script.encode()).hexdigest()}, raising=False)
    file = tmp_path / f"vega-{release}.js"
    if kept is not None:
        file.write_bytes(kept)
    assert document._vega.__wrapped__() == script
    assert file.read_text() == script
    assert document._vega.__wrapped__() == script
    assert len(calls) == 1, "a whole one is taken as it is"
    monkeypatch.setattr(document, "_BUNDLES", {}, raising=False)
    file.write_bytes(b"alert('injected')")
    assert document._vega.__wrapped__() == script, "of a version that is not known nothing is trusted"


def test_names_from_elsewhere_are_shown_harmlessly(tmp_path: Path) -> None:
    name = "C:\\users\\\x1b[31m\u202enet\udce9.py"
    text = page(report(30, name=name), dataclasses.replace(comparison(), names=(name, "b")))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", text.replace(document._vega(), ""))
    assert r"C:\users\\x1b[31m\u202enet\xe9.py" in Reader(text).text
    report(30, name=name).to_html(tmp_path / "page.html")
