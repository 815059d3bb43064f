"""A spirit level for loss surfaces: curvature of every sample, margins, spectra, and what each number is worth.

`import spiritlevel as sl` is quick: PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import ast
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def _public_names() -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """From the list that type checkers read, `__init__.pyi`: where each public name lives, and what became of old ones.

    The first are imports there, (module, name there); the second are assignments, the name that replaces them.
    """
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    found = [(node.module, alias) for node in listed if isinstance(node, ast.ImportFrom) for alias in node.names]
    homes = {alias.asname or alias.name: (module or __name__, alias.name) for module, alias in found}
    return homes, {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in listed if isinstance(n, ast.Assign)}


_HOME, _RENAMED = _public_names()
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"spiritlevel.{name} is deprecated, use spiritlevel.{new}.", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    module, inner = _HOME[name]
    if module == __name__:
        return import_module(f"{module}.{inner}")
    home = import_module(module)
    value = getattr(home, inner) if hasattr(home, inner) else import_module(f"{module}.{inner}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
