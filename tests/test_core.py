"""What `pip install spiritlevel` brings is enough to measure; what the extras bring is named where it is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import spiritlevel as sl
from spiritlevel.errors import OPTIONAL, InputError, needs

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"scikit-learn": "sklearn"}  # where the name for pip is not the one to import

# In place of the optional packages stands a finder that knows none of them, as in an environment without the extras.
WITHOUT = f"""
import importlib.abc, os, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(OPTIONAL)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""

MEASURED = """
import torch
from torch import nn
import spiritlevel as sl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
data = torch.rand(30, 4), torch.randint(3, (30,))
assert sl.sample_traces(model, data).exact
assert len(sl.margins(model, data)) == 30
assert sl.eigenvalues(sl.hessian(model, data)).converged
report = sl.measure(model, data)
assert len(report.rows) > 5, report
assert report.rows[0].name in str(report)
audit = sl.audit(model, data)
assert audit.rows
comparison = sl.compare(model, sl.transforms.rescale_all(model, 2.0).model, data)
assert comparison.advice
assert sl.data.load("digits").classes and sl.data.load("fashion-mini").classes
history = sl.training.fit(model, data, sl.training.Recipe(steps=3))
assert history.step == 3
assert sl.claims.run(id="C-4-split")
for result in (report, audit, comparison):
    sl.Result.from_json(result.to_json())
"""

ASKED = """
tracker = sl.Tracker(model, data)
tracker.measure()
recorder = sl.Recorder(1)
recorder.record(torch.zeros(1, 2), torch.tensor([1]), [0])
optional = {
    "to_html": lambda: report.to_html(),
    "compared": lambda: comparison.to_html(),
    "frame": tracker.frame,
    "rows": report.frame,
    "samples": recorder.frame,
    "visits": recorder.history,
    "suspects": recorder.to_html,
    "chart": tracker.chart,
}
assert report._repr_html_() is None, "a notebook shows the text"
assert tracker._repr_html_() is None
for name, ask in optional.items():
    try:
        ask()
    except sl.InputError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: nothing is missing")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_everything_can_be_measured_without_the_extras_and_the_rest_is_named() -> None:
    done = run(WITHOUT + MEASURED + ASKED)
    assert done.returncode == 0, done.stderr
    install = r", which is not installed: run pip install 'spiritlevel\[report\]'\."
    asked = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert asked.keys() == {"to_html", "compared", "frame", "rows", "samples", "visits", "suspects", "chart"}
    assert re.fullmatch(f"a page needs [a-z-]+{install}", asked["to_html"])
    assert asked["compared"] == asked["suspects"] == asked["to_html"]
    assert re.fullmatch(f"a table needs polars{install}", asked["frame"])
    assert asked["rows"] == asked["samples"] == asked["visits"] == asked["frame"]
    assert re.fullmatch(f"a chart needs [a-z-]+{install}", asked["chart"])


def test_the_finder_of_the_test_above_hides_what_is_installed() -> None:
    done = run(WITHOUT + "import polars.testing")
    assert "ModuleNotFoundError: No module named 'polars'" in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["measure", "lenet5", "--data", "digits"]])
def test_the_command_names_what_it_lacks(arguments: list[str]) -> None:
    done = run(WITHOUT + "from spiritlevel.__main__ import main; sys.exit(main())", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    install = "which is not installed: run pip install 'spiritlevel[cli]'."
    assert sentence in [f"spiritlevel: the command needs {name}, {install}" for name in ("tyro", "rich")]


def test_a_download_a_folder_of_images_and_a_cluster_name_what_they_lack(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(b"not looked at")
    code = """
from spiritlevel import InputError, data
from spiritlevel.loading import load_samples
from spiritlevel.papers.cluster import run_jobs
for ask in (lambda: data.load("mnist"), lambda: load_samples(sys.argv[1]), lambda: run_jobs("affine", [], ".")):
    try:
        ask()
    except InputError as error:
        print(error)
"""
    environment = {"SPIRITLEVEL_CACHE": str(tmp_path / "cache"), "SPIRITLEVEL_DATA": ""}
    setting = f"os.environ.update({environment!r})\n"
    done = run(WITHOUT + setting + code, str(tmp_path / "images"))
    assert done.stdout.splitlines() == [
        "a download needs pooch, which is not installed: run pip install 'spiritlevel[cli]'.",
        "a folder of images needs pillow, which is not installed: run pip install 'spiritlevel[report]'.",
        "--cluster needs ray, which is not installed: run pip install 'spiritlevel[cluster]'.",
    ], done.stderr


def test_what_is_missing_inside_a_package_is_no_sentence_about_extras() -> None:
    with pytest.raises(ModuleNotFoundError), needs("a table"):
        raise ModuleNotFoundError(name="polars_runtime")
    with pytest.raises(InputError, match=r"a page needs vl-convert-python, .*'spiritlevel\[report\]'"), needs("a page"):
        raise ModuleNotFoundError(name="vl_convert")


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", item)[0] for item in requirements} - {"spiritlevel"}


def test_extras_and_sentences_agree() -> None:
    extras = PROJECT["optional-dependencies"]
    for package, extra in OPTIONAL.values():
        assert package in names_of(extras[extra])
    named = {package for package, extra in OPTIONAL.values()}
    imported_by_users_alone = {
        "accelerate",
        "peft",
        "tensorboard",
        "torch_geometric",
        "wandb",
    }  # which docs/models.md is about, and loggers
    all_extras = ("report", "cli", "cluster", "integrations", "timm")
    assert named == {name for extra in all_extras for name in names_of(extras[extra])} - imported_by_users_alone
    assert "spiritlevel[report]" in extras["cli"]  # the command writes pages
    assert extras["all"] == ["spiritlevel[report,cli]"]
    assert "spiritlevel[all]" in extras["dev"]


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def test_the_package_imports_what_it_asks_for_and_nothing_else() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(sl.__file__).parent.rglob("*.py")]
    found = set[str]().union(*map(imported, trees)) - {*sys.stdlib_module_names, "spiritlevel", "__future__"}
    core = {MODULES.get(name, name) for name in names_of(PROJECT["dependencies"])}
    assert found == {*core, *OPTIONAL, "markupsafe"}  # which jinja2 brings


_FIRST_CALL = """
import random, torch
import spiritlevel as sl
before = random.getstate()
generator = torch.Generator().manual_seed(0)
x = torch.randn(60, generator=generator)
sl.correlate(x, x + torch.randn(60, generator=generator), outliers="lof")
assert random.getstate() == before, "correlate"
sl.data.load("digits")
assert random.getstate() == before, "data.load"
"""


def test_the_first_call_of_a_process_leaves_the_random_state_alone_too() -> None:
    """Packages are imported then, and some draw random numbers while they are."""
    done = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
