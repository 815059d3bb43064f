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

# From the ground up: a module imports only from those named before it. docs/architecture.md gives the reasons.
ORDER = [
    "errors",
    "distributed",
    "cores",
    "storage",
    "results",
    "charts",
    "elementary",
    "losses",
    "stats",
    "sampling",
    "models",
    "data",
    "functional",
    "derivatives",
    "structure",
    "chains",
    "gradient_norms",
    "margins",
    "estimators",
    "curvature",
    "landscape",
    "per_sample",
    "transforms",
    "training",
    "measures",
    "audit",
    "measuring",
    "comparing",
    "tracking",
    "claims",
    "studies",
    "cluster",
    "report",
    "loading",
    "cli",
    "__main__",
]
LEVEL = {name: level for level, name in enumerate(ORDER)}

# Stricter than the order: these modules know nothing of the package but the modules listed.
ONLY = {
    "models": {"errors"},
    "data": {"errors", "storage"},
    "estimators": {"errors", "results"},  # testable on known matrices
    "training": {"errors", "storage", "results", "losses", "models", "data", "functional"},  # measures nothing
    "charts": {"errors", "storage", "results"},  # computes nothing
    "report": {"errors", "storage", "results", "charts"},  # computes nothing
}

# The one look upwards: a result that is asked for its page finds the painter then, inside the method.
LATE = {("results", "report")}


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
        if layer == "__init__":
            continue  # the export table; checked below
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
                if (
                    layer == "studies"
                    and path[-1] != "__init__"
                    and inner.split(".")[0] not in ("base", "recipes", "rules", "")
                ):
                    yield f"{where}: studies never import each other"
            elif LEVEL[target] > LEVEL[layer] and (layer, target) not in LATE:
                yield f"{where}: upwards"
            elif layer in ONLY and target not in ONLY[layer]:
                yield f"{where}: {layer} knows only {', '.join(sorted(ONLY[layer]))}"


def test_imports_point_downwards() -> None:
    assert list(faults(ROOT)) == []


def test_the_map_of_the_code_has_the_same_order() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)/?`", page, flags=re.MULTILINE)
    assert rows[::-1] == [name for name in ORDER if name != "__main__"]


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("losses.py", "from spiritlevel.cli import main", "upwards"),
        ("losses.py", "def f():\n    import spiritlevel.report.page", "upwards"),
        ("losses.py", "from .functional import bind", "upwards"),
        ("losses.py", "from spiritlevel import sample_traces", "import from the module that defines it"),
        ("losses.py", "import spiritlevel as sl", "import from the module that defines it"),
        ("wizardry.py", "", "no place in ORDER"),
        ("estimators.py", "from spiritlevel.models import mlp", "estimators knows only errors, results"),
        (
            "report/page.py",
            "from spiritlevel.per_sample import sample_traces",
            "report knows only charts, errors, results, storage",
        ),
        ("studies/one.py", "from spiritlevel.studies.two import run", "never import each other"),
        ("studies/one.py", "from . import two", "never import each other"),
    ],
)
def test_the_import_check_finds_faults(tmp_path: Path, path: str, code: str, fault: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(code)
    (found,) = faults(tmp_path)
    assert fault in found


def test_downward_imports_pass(tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text(
        "import torch\nfrom spiritlevel import __version__, models\nfrom .data import load"
    )
    assert list(faults(tmp_path)) == []


def in_fresh_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import spiritlevel as sl, sys; dir(sl); print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    assert in_fresh_python(code) == "[]"


def test_names_resolve_lazily_in_a_fresh_process() -> None:
    assert in_fresh_python("import spiritlevel as sl; print(sl.models.NAMES[0], sl.Estimate(1.0))") == "lenet5 1"


def test_type_checkers_see_the_same_names_as_python() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    table = {name: f"spiritlevel.{module}" for module, names in sl._EXPORTS.items() for name in names}
    assert seen == {**table, **dict.fromkeys(sl._SUBMODULES, "spiritlevel")}
    assert set(dir(sl)) == {*seen, "__version__"}


EXPORTS = [(module, name) for module, names in sl._EXPORTS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), EXPORTS)
def test_every_public_name_resolves_and_is_documented(module: str, name: str) -> None:
    home = importlib.import_module(f"spiritlevel.{module}")  # must not put the module in the function's place
    value = getattr(sl, name)
    assert value is getattr(home, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isfunction(value):
        assert ">>>" in (inspect.getdoc(value) or ""), f"the docstring of {name} has no example"


@pytest.mark.parametrize("name", sl._SUBMODULES)
def test_submodules_are_reachable(name: str) -> None:
    assert isinstance(getattr(sl, name), ModuleType)


def test_a_submodule_never_hides_a_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sl._HOME, "models", "results")
    before = dict(vars(sl))
    sl.models = ModuleType("models")  # what the import system does after loading spiritlevel.models
    assert dict(vars(sl)) == before


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


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(example, {})
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
        getattr(sl, name)(model, loader)
    assert handles
