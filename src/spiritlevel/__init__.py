"""A spirit level for loss surfaces: curvature of every sample, margins, spectra, and what each number is worth.

`import spiritlevel as sl` is quick: PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names, by the module that defines them. A new name goes here and, for type checkers, into the block below.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "errors": ("InputError", "NotExactError"),
    "results": ("Correlation", "Eigenpairs", "Estimate", "Margins", "Result", "SampleTraces"),
}
# Modules that users reach as `sl.data` and so on.
_SUBMODULES = ("data", "models")

if TYPE_CHECKING:
    from spiritlevel import data as data
    from spiritlevel import models as models
    from spiritlevel.errors import InputError as InputError
    from spiritlevel.errors import NotExactError as NotExactError
    from spiritlevel.results import Correlation as Correlation
    from spiritlevel.results import Eigenpairs as Eigenpairs
    from spiritlevel.results import Estimate as Estimate
    from spiritlevel.results import Margins as Margins
    from spiritlevel.results import Result as Result
    from spiritlevel.results import SampleTraces as SampleTraces
else:
    _HOME = {name: module for module, names in _EXPORTS.items() for name in names}
    __all__ = sorted([*_HOME, *_SUBMODULES, "__version__"])

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name in _HOME:
            value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])

    def __dir__() -> list[str]:
        return __all__

    class _Package(ModuleType):
        """Keeps `sl.margins` the function: importing the submodule of that name would put the module in its place."""

        def __setattr__(self, name: str, value: object) -> None:
            if not (name in _HOME and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package
