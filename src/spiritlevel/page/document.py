"""A report, several reports or comparisons as one HTML file that needs no network, now or later."""

from __future__ import annotations

import functools
import hashlib
import html
import itertools
import json
from contextlib import suppress
from importlib import resources
from importlib.metadata import version
from typing import Any

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from spiritlevel import __version__, charts
from spiritlevel.charts.drawing import unchecked
from spiritlevel.errors import InputError, printable
from spiritlevel.page.parts import Section, Sheet, number
from spiritlevel.page.samples import picture_sheet, sample_columns
from spiritlevel.page.sections import report_sections
from spiritlevel.page.several import comparison_sections, side_by_side
from spiritlevel.results import Checkpoints, Comparison, Perturbation, Report, Result
from spiritlevel.results.training import SuspiciousSamples, TrainingCurves
from spiritlevel.storage import cache_folder, fingerprint, write_atomically

__all__ = ["notebook", "page"]
# The page requests nothing, and this line makes the browser enforce it. Vega compiles its expressions: 'unsafe-eval'.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

_SHOWN = Report | Comparison | Perturbation | Checkpoints | SuspiciousSamples | TrainingCurves


def page(*results: Result) -> str:
    """One self-contained HTML page about one model, several models, comparisons of two, or a training run.

    Everything that came from outside (names of classes, files and layers) is escaped. Charts are drawn by Vega from
    data inside the file. Of very many samples, all are counted and only some are drawn; the page says how many.

    >>> print(page(Report("my net", ()))[:15])
    <!DOCTYPE html>
    """
    if not results or not all(isinstance(result, _SHOWN) for result in results):
        kinds = ", ".join(type(result).__name__ for result in results) or "nothing"
        raise InputError(f"page shows reports and comparisons, got {kinds}.")
    with unchecked():
        return _rendered(_runs(results), results)


def _runs(results: tuple[Result, ...]) -> list[dict[str, Any]]:
    """What the page shows of each result, in the order in which they were given."""
    from spiritlevel.page import changes, checkpoints, training

    reports = [result for result in results if isinstance(result, Report)]
    runs: list[dict[str, Any]] = []
    if len(reports) > 1:
        runs.append(_run("side", "Side by side", [side_by_side(reports)]))
    numbers = {Report: itertools.count(), Comparison: itertools.count(), Result: itertools.count()}
    for result in results:
        if isinstance(result, SuspiciousSamples):
            key = f"s{next(numbers[Result])}"
            runs.append(
                _run(key, result.name, list(training.suspects(result, key)), pictures=training.pictures_of(result))
            )
        elif isinstance(result, TrainingCurves):
            key = f"t{next(numbers[Result])}"
            runs.append(_run(key, result.name, list(training.curves(result, key))))
        elif isinstance(result, Checkpoints):
            key = f"k{next(numbers[Result])}"
            runs.append(_run(key, result.name, list(checkpoints.checkpoint_sections(result, key))))
        elif isinstance(result, Perturbation):
            key, title = f"p{next(numbers[Result])}", f"{result.name}, {result.change}"
            sections, pictures = list(changes.change_sections(result, key)), changes.pictures_of_change(result)
            runs.append(_run(key, title, sections, "", pictures, changes.change_columns(result)))
        elif isinstance(result, Comparison):
            key = f"c{next(numbers[Comparison])}"
            runs.append(_run(key, " and ".join(result.names), list(comparison_sections(result, key))))
        elif isinstance(result, Report):
            key, pictures = f"r{next(numbers[Report])}", picture_sheet(result)
            sections = list(report_sections(result, key, pictures))
            runs.append(_run(key, result.name, sections, result.partial, pictures, sample_columns(result)))
    return runs


def _rendered(runs: list[dict[str, Any]], results: tuple[Result, ...]) -> str:
    figures = {figure.key: figure.spec for run in runs for section in run["sections"] for figure in section.figures}
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=_title(runs),
            runs=runs,
            policy=_POLICY,
            refresh=min((each.refresh for each in results if isinstance(each, TrainingCurves)), default=0),
            style=Markup(_static("page.css")),
            vega=Markup(_vega()),
            script=Markup(_static("page.js")),
            data=_json(
                {
                    "charts": figures,
                    "themes": {"light": charts.theme(), "dark": charts.theme(dark=True)},
                    "runs": {run["key"]: {"samples": run["samples"], "sheet": _places(run["sheet"])} for run in runs},
                }
            ),
            version=__version__,
            numbers=" ".join(fingerprint(result.to_json()) for result in results),
        )
    )


def _title(runs: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(run["title"] for run in runs if run["key"] != "side"))
    return " · ".join(names) if len(names) < 3 else f"{len(names)} runs"


def notebook(result: Result) -> str:
    """The page inside a notebook's cell, in a frame of its own that can neither see nor style the notebook."""
    return (
        '<iframe sandbox="allow-scripts allow-downloads" style="width:100%;height:46rem;border:1px solid #8886" '
        f'title="spiritlevel" srcdoc="{html.escape(page(result))}"></iframe>'
    )


def _run(
    key: str,
    title: str,
    sections: list[Section],
    partial: str = "",
    pictures: Sheet | None = None,
    samples: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "key": key,
        "title": title,
        "sections": sections,
        "partial": partial,
        "sheet": pictures,
        "samples": samples or {},
    }


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("spiritlevel.page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,  # what is Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment


def _static(name: str) -> str:
    return resources.files("spiritlevel.page").joinpath("static", name).read_text(encoding="utf-8")


# What the library bundles, by its version. The cache folder is not part of the program, and what lies there goes into
# every page, so it is first compared with this. A test says which line is missing.
_BUNDLES = {
    "1.8.0": "b66996bb5822b536e6808945330c26223bf890967feb4a7e681b432d3563ea8a",
    "1.9.0.post1": "373b1f84072b31010f15ceb787be6b415c53936411aae267c8c2b2b6ccde46e7",
}


@functools.cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, kept in the cache folder because bundling takes seconds.

    The kept copy is used only if it is what the library would bundle; nothing is kept of a version unknown here. A
    damaged file is replaced.
    """
    release = version("vl-convert-python")
    file, pin = cache_folder() / f"vega-{release}.js", _BUNDLES.get(release)
    with suppress(OSError):
        kept = file.read_bytes()
        if hashlib.sha256(kept).hexdigest() == pin:
            return kept.decode("utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if hashlib.sha256(script.encode("utf-8")).hexdigest() == pin:
        with suppress(OSError):  # a read-only home folder must not prevent a page
            write_atomically(file, script)
    return script


def _json(value: Any) -> Markup:
    """JSON that no browser can mistake for markup, wherever it stands in the file."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _places(pictures: Sheet | None) -> dict[str, Any] | None:
    if pictures is None:
        return None
    return {"columns": pictures.columns, "width": pictures.width, "height": pictures.height, "places": pictures.places}
