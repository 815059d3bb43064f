"""A spirit level for loss surfaces: curvature of every sample, margins, spectra, and what each number is worth.

`import spiritlevel as sl` is quick: PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _public_names() -> dict[str, tuple[str, str]]:
    """Where each public name lives, (module, name there), from the list that type checkers read: `__init__.pyi`."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = [(node.module, alias) for node in listed.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name: (module or __name__, alias.name) for module, alias in found}


_HOME = _public_names()
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
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
