"""The walls of the house: which module may import which, what is public, and what `import spiritlevel` may cost."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import Untouched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.errors import InputError

ROOT = Path(sl.__file__).parent

# From the ground up: a room imports only from those named before it. docs/architecture.md gives the reasons.
ORDER = [
    "errors",
    "arguments",
    "memory",
    "storage",
    "results",
    "charts",
    "statistics",
    "data",
    "binding",
    "watching",
    "estimators",
    "operators",
    "samples",
    "transforms",
    "measures",
    "answers",
    "papers",
    "page",
    "loading",
    "cli",
    "__main__",
]
LEVEL = {name: level for level, name in enumerate(ORDER)}
# Doors: public names of modules inside a room, for `import spiritlevel.models`.
DOORS = {"models": "papers", "training": "papers", "claims": "papers", "plot": "answers"}

# Stricter than the order: these rooms, and modules of rooms, know nothing of the package but what is listed.
ONLY = {
    "statistics": {"errors", "arguments", "results"},
    "data": {"errors", "arguments", "storage"},
    "binding": {"errors", "arguments", "memory"},
    "estimators": {"errors", "arguments", "memory", "results"},  # testable on known matrices
    "charts": {"errors", "arguments", "storage", "results"},  # computes nothing
    "page": {"errors", "arguments", "storage", "results", "charts"},  # computes nothing
    "papers/networks": {"errors", "arguments"},
    "papers/training": {"errors", "arguments", "storage", "results", "data", "binding", "papers"},  # measures nothing
}

# The one look upwards: a result that is asked for its page finds the painter then, inside the method.
LATE = {("results", "page")}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names inside spiritlevel that a file imports, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, node.module] if node.module else parents)
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.partition(".")[2] for name in names if name.split(".")[0] == "spiritlevel")


def faults(root: Path) -> Iterator[str]:
    """Every import that points upwards, past the walls, or from or to a module that has no place in the order."""
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).with_suffix("").parts
        layer, package = path[0], ".".join(["spiritlevel", *path[:-1]])
        if layer == "__init__" or layer in DOORS:
            continue  # the front door and its side doors; checked below
        if layer not in LEVEL:
            yield f"{layer} has no place in ORDER"
            continue
        for name in imports(ast.parse(file.read_text(encoding="utf-8")), package):
            target, _, inner = name.partition(".")
            where = f"{'/'.join(path)} imports {name or 'spiritlevel'}"
            if target == "__version__":
                continue
            if target not in LEVEL:
                yield f"{where}: import from the module that defines it"
            elif target == layer:
                study = inner.removeprefix("studies.").split(".")[0] if inner.startswith("studies.") else ""
                if (
                    path[:2] == ("papers", "studies")
                    and study not in ("base", "league", "recipes", "rules", "")
                    and (path[-1] != "__init__")
                ):
                    yield f"{where}: studies never import each other"
            elif LEVEL[target] > LEVEL[layer] and (layer, target) not in LATE:
                yield f"{where}: upwards"
                continue
            for room in (layer, "/".join(path[:2])):
                if (
                    room in ONLY
                    and target not in {*ONLY[room], layer}
                    and target in LEVEL
                    and (layer, target) not in LATE
                ):
                    yield f"{where}: {room} knows only {', '.join(sorted(ONLY[room]))}"


def test_imports_point_downwards() -> None:
    assert list(faults(ROOT)) == []


def test_the_map_of_the_code_has_the_same_order() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/?`", page, flags=re.MULTILINE)
    assert rows[::-1] == [name for name in ORDER if name != "__main__"]


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("data.py", "from spiritlevel.cli import main", "upwards"),
        ("watching/one.py", "def f():\n    import spiritlevel.operators.products", "upwards"),
        ("watching/one.py", "from ..operators import products", "upwards"),
        ("watching/one.py", "from spiritlevel import sample_traces", "import from the module that defines it"),
        ("watching/one.py", "import spiritlevel as sl", "import from the module that defines it"),
        ("watching/one.py", "import spiritlevel.models", "import from the module that defines it"),
        ("wizardry.py", "", "no place in ORDER"),
        (
            "estimators/one.py",
            "from spiritlevel.binding.context import Context",
            "knows only arguments, errors, memory, results",
        ),
        ("papers/networks.py", "from spiritlevel.data import load", "papers/networks knows only arguments, errors"),
        (
            "page/one.py",
            "from spiritlevel.samples.traces import sample_traces",
            "page knows only arguments, charts, errors, results, storage",
        ),
        ("papers/studies/one.py", "from spiritlevel.papers.studies.two import run", "never import each other"),
        ("papers/studies/one.py", "from . import two", "never import each other"),
    ],
)
def test_the_import_check_finds_faults(tmp_path: Path, path: str, code: str, fault: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    (found,) = faults(tmp_path)
    assert fault in found


def test_downward_imports_pass(tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text("import torch\nfrom spiritlevel import __version__, data\nfrom .data import load")
    assert list(faults(tmp_path)) == []


def in_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import spiritlevel as sl, sys; dir(sl); print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    assert in_fresh_python(code) == "[]"


def test_names_resolve_lazily_in_a_fresh_process() -> None:
    assert in_fresh_python("import spiritlevel as sl; print(sl.models.NAMES[0], sl.Estimate(1.0))") == "lenet5 1"


MODULES = ("claims", "data", "measures", "models", "plot", "training", "transforms")
EXPORTS = [(module, name) for name, (module, _) in sl._HOME.items() if name not in MODULES]


def test_every_public_name_is_listed_once_and_no_module_is_named_like_one() -> None:
    listed = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    names = [alias.asname for node in listed.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(names) == sorted(sl._HOME)
    assert set(dir(sl)) == {*names, "__version__"}
    rooms = {path.stem for path in ROOT.iterdir()}
    assert {name for name in names if name in rooms} == set(MODULES)


@pytest.mark.parametrize(("module", "name"), EXPORTS)
def test_every_public_name_resolves_and_is_documented(module: str, name: str) -> None:
    home = importlib.import_module(module)
    value = getattr(sl, name)
    assert value is getattr(home, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isfunction(value):
        assert ">>>" in (inspect.getdoc(value) or ""), f"the docstring of {name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_are_reachable_by_attribute_and_by_import(name: str) -> None:
    assert isinstance(getattr(sl, name), ModuleType)
    assert importlib.import_module(f"spiritlevel.{name}") is getattr(sl, name)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'estimate'"):
        _ = sl.estimate


@pytest.mark.parametrize(
    "disturb",
    [
        lambda m: m.train(),
        lambda m: m[0].weight.data.mul_(2),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m[1].running_mean.add_(1),
        lambda m: m[0].register_forward_hook(lambda *_: None),
        lambda m: m(torch.ones(2, 3)).sum().backward(),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.data)),
        lambda m: torch.rand(1),
        lambda m: torch.set_grad_enabled(False),
    ],
)
def test_the_untouched_fixture_notices(untouched: Untouched, disturb: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    with untouched(model), torch.no_grad():
        model(torch.ones(2, 3))
    try:
        with pytest.raises(AssertionError, match="left a trace in"), untouched(model):
            disturb(model)
    finally:
        torch.set_grad_enabled(True)


def test_the_examples_in_the_readme_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    first, samples, measure = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(samples, {})
    found, wrong = map(int, re.findall(r"(\d+) of (\d+) wrong labels", capsys.readouterr().out)[0])
    assert found > 0.9 * wrong
    assert (tmp_path / "run" / "samples.safetensors").exists()
    assert "data:image/webp" in (tmp_path / "samples.html").read_text(encoding="utf-8")
    inputs, labels = torch.randn(20, 4), torch.arange(20) % 3
    exec(first, {"model": nn.Linear(4, 3), "train": (inputs, labels), "test": (inputs, labels)})
    assert "It classifies" in capsys.readouterr().out
    assert (tmp_path / "landscape.pdf").read_bytes().startswith(b"%PDF")
    kept = Path(__file__).parents[1] / "examples" / "output" / "headline.txt"
    assert f"```text\n{kept.read_text(encoding='utf-8')}```" in readme  # as examples/first_measurement.py printed it
    exec(measure, {})
    shown = capsys.readouterr().out
    assert "1000 output margins" in shown
    assert "1000 per-sample Hessian traces, exact" in shown


def takes_a_model(name: str) -> bool:
    value = getattr(sl, name)
    return inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == "model"


MEASUREMENTS = sorted(name for _, name in EXPORTS if takes_a_model(name))


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_leaves_model_and_random_states_alone(
    name: str, training: bool, fails: bool, untouched: Untouched
) -> None:
    """Every public function of a model, called as `f(model, data)`; one that needs more gets its own case here."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)).train(
        training
    )
    model(torch.rand(8, 4)).sum().backward()
    model[3].train(not training)
    model[0].bias.requires_grad_(False)
    handles = [model[2].register_forward_hook(lambda *_: None), model[4].weight.register_hook(lambda grad: grad)]
    targets = torch.tensor([0, 1, 2, 0, 1, 99 if fails else 2])
    loader = DataLoader(TensorDataset(torch.rand(6, 4), targets), batch_size=4)
    with untouched(model), pytest.raises(InputError) if fails else nullcontext():
        getattr(sl, name)(model, loader, *{"perturb": ("int4",)}.get(name, ()))
    assert handles
