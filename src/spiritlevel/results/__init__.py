"""What every measurement returns: numbers that carry their error, their cost and where they came from.

All results are frozen dataclasses on top of `Result`, which gives them one JSON form and its inverse. Per-sample
values are float64 tensors on the CPU. Nothing here computes on a model.
"""

import warnings
from typing import TYPE_CHECKING, Any

from spiritlevel.results.audits import EFFECTS as EFFECTS
from spiritlevel.results.audits import SYMMETRIES as SYMMETRIES
from spiritlevel.results.audits import Audit as Audit
from spiritlevel.results.audits import AuditRow as AuditRow
from spiritlevel.results.audits import Certificate as Certificate
from spiritlevel.results.audits import WorstFactor as WorstFactor
from spiritlevel.results.audits import fate as fate
from spiritlevel.results.audits import kept_by as kept_by
from spiritlevel.results.audits import largest as largest
from spiritlevel.results.audits import mark as mark
from spiritlevel.results.audits import moved_at_least as moved_at_least
from spiritlevel.results.audits import ratio_of as ratio_of
from spiritlevel.results.checkpoints import Checkpoint as Checkpoint
from spiritlevel.results.checkpoints import Checkpoints as Checkpoints
from spiritlevel.results.codec import RENAMED
from spiritlevel.results.codec import Result as Result
from spiritlevel.results.comparisons import Comparison as Comparison
from spiritlevel.results.comparisons import ComparisonRow as ComparisonRow
from spiritlevel.results.estimates import STATUSES as STATUSES
from spiritlevel.results.estimates import Estimate as Estimate
from spiritlevel.results.formatting import at_least as at_least
from spiritlevel.results.formatting import figure as figure
from spiritlevel.results.formatting import in_short as in_short
from spiritlevel.results.formatting import left_out_lines as left_out_lines
from spiritlevel.results.formatting import times as times
from spiritlevel.results.formatting import with_error as with_error
from spiritlevel.results.formatting import with_limits as with_limits
from spiritlevel.results.intervals import FEWEST as FEWEST
from spiritlevel.results.intervals import mean_skewness as mean_skewness
from spiritlevel.results.intervals import median as median
from spiritlevel.results.intervals import signed_limits as signed_limits
from spiritlevel.results.intervals import skewed_limits as skewed_limits
from spiritlevel.results.intervals import standard_error as standard_error
from spiritlevel.results.intervals import subset_mean as subset_mean
from spiritlevel.results.perturbations import BitPlan as BitPlan
from spiritlevel.results.perturbations import LayerBits as LayerBits
from spiritlevel.results.perturbations import LayerChange as LayerChange
from spiritlevel.results.perturbations import Perturbation as Perturbation
from spiritlevel.results.perturbations import Prediction as Prediction
from spiritlevel.results.reports import Fit as Fit
from spiritlevel.results.reports import Pictures as Pictures
from spiritlevel.results.reports import Report as Report
from spiritlevel.results.reports import ReportRow as ReportRow
from spiritlevel.results.samples import Correlation as Correlation
from spiritlevel.results.samples import Margins as Margins
from spiritlevel.results.samples import SampleTraces as SampleTraces
from spiritlevel.results.spectra import BatchEigenvalues as BatchEigenvalues
from spiritlevel.results.spectra import DiagonalEstimate as DiagonalEstimate
from spiritlevel.results.spectra import Eigenpairs as Eigenpairs
from spiritlevel.results.spectra import SmoothedDensity as SmoothedDensity
from spiritlevel.results.spectra import SpectralDensity as SpectralDensity
from spiritlevel.results.spectra import SpectrumSummary as SpectrumSummary
from spiritlevel.results.surfaces import Landscape as Landscape
from spiritlevel.results.training import CriticalSharpness as CriticalSharpness
from spiritlevel.results.training import Stability as Stability
from spiritlevel.results.training import SuspiciousSamples as SuspiciousSamples
from spiritlevel.results.training import TrainingCurves as TrainingCurves
from spiritlevel.storage import write_atomically as write_atomically

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The classes by their names of version 0.1."""
        if name not in RENAMED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        new = RENAMED[name]
        warnings.warn(f"{__name__}.{name} is deprecated, use {__name__}.{new}.", DeprecationWarning, stacklevel=2)
        return globals()[new]
