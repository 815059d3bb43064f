"""Result files: the format that they say, files of version 0.1, fields that nobody knows, names that have changed."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from reports import comparison as made_up_comparison
from reports import report as made_up
from test_results import EXAMPLES, strict

import spiritlevel as sl
from spiritlevel import results
from spiritlevel.cli import main
from spiritlevel.errors import InputError
from spiritlevel.results import Checkpoint, Checkpoints, Estimate, Prediction, Report, Result
from spiritlevel.results.codec import FORMAT, RENAMED

FILES = sorted((Path(__file__).parent / "version_0_1").glob("*.json"))
"""What the code of version 0.1 wrote: before numbers said their status (early), and after (late)."""


def held(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8"))


OLD = [pytest.param(data, id=f"{file.stem} {name}") for file in FILES for name, data in held(file).items()]


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_result_says_its_format_once(name: str) -> None:
    data = strict(EXAMPLES[name].to_json())
    assert data["format"] == FORMAT
    assert list(data)[:2] == ["type", "format"]
    assert json.dumps(data).count('"format": ') == 1  # what lies inside is of the same format


@pytest.mark.parametrize("result", [made_up(8), made_up_comparison(8)], ids=["report", "comparison"])
def test_whole_answers_say_their_format(result: Result, tmp_path: Path) -> None:
    result.to_json(tmp_path / "result.json")
    assert strict((tmp_path / "result.json").read_text(encoding="utf-8"))["format"] == FORMAT
    read = type(result).from_json(tmp_path / "result.json")
    assert strict(read.to_json()) == strict(result.to_json())


def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {**Estimate(1.0).to_dict(), "format": FORMAT + 1}
    said = rf"type 'Estimate' in format {FORMAT + 1}, which a newer spiritlevel wrote: this one reads formats up to"
    with pytest.raises(InputError, match=said) as refused:
        Result.from_dict(data)
    assert "pip install --upgrade spiritlevel" in str(refused.value)
    inner = {**made_up(8).to_dict(), "traces": {**made_up(8).to_dict()["traces"], "format": FORMAT + 1}}
    with pytest.raises(InputError, match="type 'SampleTraces' in format"):
        Report.from_dict(inner)
    file = tmp_path / "report.json"
    file.write_text(json.dumps({**made_up(8).to_dict(), "format": FORMAT + 1}), encoding="utf-8")
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 2
    assert "which a newer spiritlevel wrote" in capsys.readouterr().err


@pytest.mark.parametrize("found", ["2", 0, -1, 1.0, True, None, [2]])
def test_a_format_that_is_no_number_is_damage(found: object) -> None:
    with pytest.raises(InputError, match="it is damaged \\(format "):
        Result.from_dict({**Estimate(1.0).to_dict(), "format": found})


# ---------------------------------------------------------------- what is not known


def test_unknown_fields_are_named_in_one_sentence() -> None:
    data = made_up(8).to_dict()
    data["colour"] = "red"
    data["rows"][0]["value"]["hue"] = 3
    data["rows"][1]["value"]["hue"] = 4
    with pytest.warns(UserWarning, match="unknown fields, which were left out") as said:
        found = Report.from_dict(data)
    (warning,) = said
    assert str(warning.message).endswith(": 'colour' of Report, 'hue' of Estimate.")
    assert strict(found.to_json()) == made_up(8).to_dict()


def test_the_command_line_names_unknown_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps({**made_up(8).to_dict(), "colour": "red"}), encoding="utf-8")
    assert main(["report", str(file), "--out", str(tmp_path / "page.html")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"spiritlevel: {file}: what was read holds unknown fields, which were left out: 'colour' of Report."
    )


# ---------------------------------------------------------------- version 0.1


@pytest.mark.parametrize("data", OLD)
def test_files_of_version_0_1_are_read_without_a_word(data: dict[str, Any]) -> None:
    assert "format" not in data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Result.from_dict(data)
    again = Result.from_json(found.to_json())
    assert again.to_json() == found.to_json()
    assert type(found).__name__ == RENAMED.get(data["type"], data["type"])
    assert str(found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_numbers_of_version_0_1_are_what_was_written(file: Path) -> None:
    data = held(file)
    report = Report.from_dict(data["report"])
    for row, written in zip(report.rows, data["report"]["rows"], strict=True):
        assert row.value.value == written["value"]["value"]
    kinds = {row.name: row.kind for row in report.rows}
    assert kinds["trace"] == "exact"
    assert kinds["largest_eigenvalue"] == "converged"
    assert kinds["ball_sharpness"] == "lower bound"
    assert report.audit is not None
    assert report.audit.row("ball_sharpness", "rescale_layers").lower_bound
    assert Estimate.from_dict(data["unconverged"]).status == "not converged"
    nodes = Result.from_dict(data["density"])
    assert isinstance(nodes, sl.SpectralDensity)
    assert nodes.nodes.reshape(-1).tolist() == data["density"]["nodes"]["data"]
    assert "tiny" in report.to_html()


# ---------------------------------------------------------------- names that have changed


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_work_and_warn(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"spiritlevel\.{old} is deprecated, use spiritlevel\.{new}\."):
        assert getattr(sl, old) is getattr(sl, new)
    with pytest.warns(DeprecationWarning, match=rf"spiritlevel\.results\.{old} is deprecated"):
        assert getattr(results, old) is getattr(sl, new)
    assert old not in dir(sl)
    assert old not in sl.__all__


def test_the_list_of_public_names_and_the_files_agree_on_what_was_renamed() -> None:
    assert sl._RENAMED == RENAMED


def test_fields_by_the_names_that_they_had() -> None:
    """`foretold` and `found` of 0.2.0 are `predicted` and `measured`: in files, as attributes, as columns."""
    row = Checkpoint(
        "a", Estimate(0.5), Estimate(0.9), predicted={"int4": Prediction(0.25)}, measured={"int4": Estimate(0.3)}
    )
    found = Checkpoints((row,), changes=("int4",))
    old = found.to_dict()
    (written,) = old["rows"]
    written["foretold"], written["found"] = written.pop("predicted"), written.pop("measured")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Result.from_dict(old).to_json() == found.to_json()
    with pytest.warns(DeprecationWarning, match=r"^Checkpoint\.foretold is deprecated, use Checkpoint\.predicted\.$"):
        assert row.foretold is row.predicted  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"^Checkpoint\.found is deprecated, use Checkpoint\.measured\.$"):
        assert row.found is row.measured  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"^the column 'int4, foretold' is deprecated, use 'int4, p"):
        assert found.values("int4, foretold") == [0.25]
    assert not {"foretold", "found"} & {*str(found).split(), *found.frame().columns}


def test_no_module_has_a_name_that_nobody_gave_it() -> None:
    with pytest.raises(AttributeError, match=r"module 'spiritlevel.results' has no attribute 'Spectra'"):
        _ = results.Spectra


def test_names_say_what_the_functions_return() -> None:
    matrix = torch.diag(torch.arange(30.0, dtype=torch.float64))
    assert isinstance(sl.spectral_density(matrix, probes=2, steps=4), sl.SpectralDensity)
    assert isinstance(sl.spectrum(matrix, probes=2, steps=8), sl.SpectrumSummary)
    assert isinstance(sl.spectrum(matrix, probes=2, steps=8).density, sl.SpectralDensity)
    assert isinstance(sl.spectral_density(matrix, probes=2, steps=4).density(), sl.SmoothedDensity)


# ---------------------------------------------------------------- in short


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repr_is_short_and_holds_no_tensor(name: str) -> None:
    text = repr(EXAMPLES[name])
    assert text.startswith(f"{type(EXAMPLES[name]).__name__}(")
    assert "tensor(" not in text
    assert "\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize("count", [0, 8, 3000])
def test_the_repr_of_a_whole_answer_does_not_grow_with_the_data(count: int) -> None:
    for result in (made_up(max(count, 1)), made_up_comparison(max(count, 1))):
        inner = [
            result,
            *(
                getattr(result, name)
                for name in ("traces", "margins", "spectrum", "audit", "pictures")
                if isinstance(getattr(result, name, None), Result)
            ),
        ]
        for each in inner:
            assert len(repr(each)) < 700, type(each)
            assert "tensor(" not in repr(each)


def test_a_repr_says_shape_and_size_and_leaves_out_defaults() -> None:
    estimate = Estimate(2.5, 0.65, 3, seed=0)
    assert repr(estimate) == "Estimate(value=2.5, stderr=0.65, dof=3, seed=0, status='estimated')"
    assert eval(repr(estimate)) == estimate
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    traces = sl.SampleTraces(values, 0 * values, True, "exact", torch.tensor([0, 1, 2]), notes=("a" * 99,))
    assert repr(traces) == (
        "SampleTraces(values=<float64 (3,), mean 3, 1 to 6>, stderr=<float64 (3,), mean 0, 0 to 0>, exact=True, "
        "method='exact', targets=<int64 (3,), mean 1, 0 to 2>, notes=<1 str>)"
    )
    assert repr(Estimate(math.nan)) == "Estimate(value=nan, status='undefined')"
    huge = sl.Eigenpairs(values, torch.zeros(1_000_001, 1), values, True, 3)
    assert "vectors=<float32 (1000001, 1)>" in repr(huge)
