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
    "audit": ("audit",),
    "comparing": ("compare",),
    "curvature": (
        "empirical_fisher",
        "gauss_newton",
        "hessian",
        "hessian_variance",
    ),
    "errors": (
        "InputError",
        "NotExactError",
    ),
    "estimators": (
        "Operator",
        "diagonal",
        "eigenvalues",
        "frobenius_norm",
        "operator_trace",
        "spectral_density",
        "spectral_norm",
        "spectrum",
    ),
    "landscape": ("landscape",),
    "losses": (
        "aceht",
        "confidence_gap",
    ),
    "margins": (
        "margin_bound",
        "margins",
        "output_margin",
        "printed_margin_bound",
        "signed_margin",
        "softmax_gap",
        "softmax_margin",
    ),
    "measuring": ("measure",),
    "per_sample": (
        "sample_traces",
        "trace",
    ),
    "results": (
        "Audit",
        "Certificate",
        "Comparison",
        "Correlation",
        "Density",
        "DiagonalEstimate",
        "Eigenpairs",
        "Estimate",
        "Landscape",
        "Margins",
        "Report",
        "Result",
        "SampleTraces",
        "Spectrum",
        "SpectrumSummary",
    ),
    "stats": (
        "correlate",
        "kendall",
        "skewness",
    ),
    "tracking": ("Tracker",),
}
# Modules that users reach as `sl.data` and so on.
_SUBMODULES = ("claims", "data", "measures", "models", "training", "transforms")

if TYPE_CHECKING:
    from spiritlevel import claims as claims
    from spiritlevel import data as data
    from spiritlevel import measures as measures
    from spiritlevel import models as models
    from spiritlevel import training as training
    from spiritlevel import transforms as transforms
    from spiritlevel.audit import audit as audit
    from spiritlevel.comparing import compare as compare
    from spiritlevel.curvature import empirical_fisher as empirical_fisher
    from spiritlevel.curvature import gauss_newton as gauss_newton
    from spiritlevel.curvature import hessian as hessian
    from spiritlevel.curvature import hessian_variance as hessian_variance
    from spiritlevel.errors import InputError as InputError
    from spiritlevel.errors import NotExactError as NotExactError
    from spiritlevel.estimators import Operator as Operator
    from spiritlevel.estimators import diagonal as diagonal
    from spiritlevel.estimators import eigenvalues as eigenvalues
    from spiritlevel.estimators import frobenius_norm as frobenius_norm
    from spiritlevel.estimators import operator_trace as operator_trace
    from spiritlevel.estimators import spectral_density as spectral_density
    from spiritlevel.estimators import spectral_norm as spectral_norm
    from spiritlevel.estimators import spectrum as spectrum
    from spiritlevel.landscape import landscape as landscape
    from spiritlevel.losses import aceht as aceht
    from spiritlevel.losses import confidence_gap as confidence_gap
    from spiritlevel.margins import margin_bound as margin_bound
    from spiritlevel.margins import margins as margins
    from spiritlevel.margins import output_margin as output_margin
    from spiritlevel.margins import printed_margin_bound as printed_margin_bound
    from spiritlevel.margins import signed_margin as signed_margin
    from spiritlevel.margins import softmax_gap as softmax_gap
    from spiritlevel.margins import softmax_margin as softmax_margin
    from spiritlevel.measuring import measure as measure
    from spiritlevel.per_sample import sample_traces as sample_traces
    from spiritlevel.per_sample import trace as trace
    from spiritlevel.results import Audit as Audit
    from spiritlevel.results import Certificate as Certificate
    from spiritlevel.results import Comparison as Comparison
    from spiritlevel.results import Correlation as Correlation
    from spiritlevel.results import Density as Density
    from spiritlevel.results import DiagonalEstimate as DiagonalEstimate
    from spiritlevel.results import Eigenpairs as Eigenpairs
    from spiritlevel.results import Estimate as Estimate
    from spiritlevel.results import Landscape as Landscape
    from spiritlevel.results import Margins as Margins
    from spiritlevel.results import Report as Report
    from spiritlevel.results import Result as Result
    from spiritlevel.results import SampleTraces as SampleTraces
    from spiritlevel.results import Spectrum as Spectrum
    from spiritlevel.results import SpectrumSummary as SpectrumSummary
    from spiritlevel.stats import correlate as correlate
    from spiritlevel.stats import kendall as kendall
    from spiritlevel.stats import skewness as skewness
    from spiritlevel.tracking import Tracker as Tracker
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
