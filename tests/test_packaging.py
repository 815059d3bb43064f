"""What is handed out: the source distribution, the settings of a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import spiritlevel

ROOT = Path(__file__).parents[1]
# What is no part of the project, and what the tests and a build leave behind.
OTHERS = (".git", ".venv*", "build", "dist", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "*.pyc", ".lock")
OTHERS += ("step-*.json", "step-*.seconds")  # of a run under way


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this tree, built in a copy of it, without a network."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*OTHERS))
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", build, str(folder)]
    subprocess.run(command, cwd=folder / "tree", check=True, capture_output=True, timeout=120)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def files(folder: Path) -> Iterator[str]:
    skipped = shutil.ignore_patterns(*OTHERS, ".gitignore", "report", ".coverage*")
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - skipped(place, folders))
        for name in sorted(set(names) - skipped(place, names)):
            yield str((Path(place) / name).relative_to(folder))


def test_the_source_distribution_holds_all_files(source: Path) -> None:
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(set(files(ROOT)) - held) == []
    assert not any(re.search(r"__pycache__|\.pyc$|\.venv|\.parquet\.", name) for name in held)
    assert source.stat().st_size < 12e6


@pytest.mark.slow
def test_the_source_distribution_runs_its_own_tests(source: Path, tmp_path: Path) -> None:
    """A short part of them: what reads documents, results, tools and assets, and the example of the README."""
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    where = [sys.executable, "-c", "import spiritlevel; print(spiritlevel.__file__)"]
    found = subprocess.run(where, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(folder)
    names = ("architecture", "core", "data", "gallery", "mathematics", "models", "studies_rules", "training")
    part = [f"tests/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *part]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{3} passed", done.stdout)


def test_the_readme_of_a_package_index_has_no_relative_link(source: Path) -> None:
    """There it stands alone. Every link leads into the repository that the project names, to a file of this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = project["urls"]["Source"]
    with tarfile.open(source) as archive:
        (member,) = [name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        file = archive.extractfile(member)
        assert file is not None
        text = file.read().decode("utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme)) > 15
    for link in links:
        if not link.startswith("#"):
            kind, _, path = link.removeprefix(f"{home}/").partition("/main/")
            assert kind == ("raw" if re.search(r"\.(svg|png)$", path) else "blob"), link
            assert (ROOT / path.partition("#")[0]).is_file(), link
    assert all(address.startswith(home) for address in project["urls"].values())
    assert f'repository-code: "{home}"' in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of the source distribution, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", build, str(folder)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_the_package_and_what_it_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (about,) = [name for name in held if name.endswith("/METADATA")]
        metadata = archive.read(about).decode("utf-8")
    package = {f"spiritlevel/{name}" for name in files(ROOT / "src" / "spiritlevel")}
    assert sorted(package - held) == []
    assert {name.partition("/")[0] for name in held - package} == {about.partition("/")[0]}
    assert wheel.name.startswith(f"spiritlevel-{spiritlevel.__version__}-py3-none-any")
    core = re.findall(r"^Requires-Dist: ([A-Za-z_-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert core == ["torch", "numpy", "scipy", "scikit-learn", "threadpoolctl", "safetensors", "platformdirs"]


def test_an_unpacked_wheel_measures_and_draws(wheel: Path, tmp_path: Path) -> None:
    """As in a clean environment, but for the packages that it needs; nothing is taken from the source tree."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import torch, spiritlevel as sl; print(sl.__file__); net = torch.nn.Linear(3, 2); "
        "data = torch.rand(8, 3), torch.arange(8) % 2; print(sl.sample_traces(net, data)); "
        "print(sl.plot.save(sl.plot.margins(net, data), 'figure'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(tmp_path) in done.stdout
    assert "8 per-sample Hessian traces, exact" in done.stdout
    assert {path.suffix for path in tmp_path.glob("figure.*")} == {".svg", ".pdf", ".png"}


def test_recipe_citation_and_changelog_are_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert f'version: "{spiritlevel.__version__}"' in recipe
    run = re.search(r"  run:\n((?:    - .*\n)+)", recipe)
    assert run is not None
    listed = {line.strip("- ").replace(" ", "").replace("pytorch", "torch") for line in run[1].splitlines()}
    assert listed == {f"python{project['requires-python']}", *project["dependencies"]}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {spiritlevel.__version__}\n" in citation
    assert all(re.search(rf"^{key}:", citation, re.MULTILINE) for key in ("cff-version", "message", "title", "authors"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    date = re.search(r"date-released: (\S+)", citation)
    assert date is not None
    release = changes.partition(f"## [{spiritlevel.__version__}] - {date[1]}\n")[2].partition("\n## [")[0]
    assert "### Numbers that moved" in release


def test_hooks_run_what_the_clone_has() -> None:
    """No hook fetches anything: each is local, and calls a program of .venv that the extra `dev` brings."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", text) == ["local"]
    assert set(re.findall(r"language: (\S+)", text)) == {"system"}
    tools = re.findall(r"entry: \.venv/bin/(\w+)", text)
    assert tools == ["ruff", "ruff", "mypy"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {*tools} <= {*extras["dev"]}
