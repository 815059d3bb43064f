"""The public names and where they live: the one list, which Python reads as well (`__init__.py`)."""

from spiritlevel import data as data
from spiritlevel import measures as measures
from spiritlevel import transforms as transforms
from spiritlevel.answers import plotting as plot  # noqa: F401
from spiritlevel.answers.auditing import audit as audit
from spiritlevel.answers.bits import choose_bits as choose_bits
from spiritlevel.answers.callbacks import hugging_face_callback as hugging_face_callback
from spiritlevel.answers.callbacks import lightning_callback as lightning_callback
from spiritlevel.answers.checkpoints import rank as rank
from spiritlevel.answers.comparing import compare as compare
from spiritlevel.answers.critical import critical_sharpness as critical_sharpness
from spiritlevel.answers.critical import stability as stability
from spiritlevel.answers.measuring import measure as measure
from spiritlevel.answers.minibatches import batch_eigenvalues as batch_eigenvalues
from spiritlevel.answers.perturbing import perturb as perturb
from spiritlevel.answers.recorder import Recorder as Recorder
from spiritlevel.answers.surface import landscape as landscape
from spiritlevel.answers.tracking import Tracker as Tracker
from spiritlevel.binding.losses import aceht as aceht
from spiritlevel.binding.losses import confidence_gap as confidence_gap
from spiritlevel.binding.reading import Reading as Reading
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
from spiritlevel.operators.matrices import empirical_fisher as empirical_fisher
from spiritlevel.operators.matrices import gauss_newton as gauss_newton
from spiritlevel.operators.matrices import hessian as hessian
from spiritlevel.operators.matrices import hessian_variance as hessian_variance
from spiritlevel.papers import claims as claims
from spiritlevel.papers import networks as models  # noqa: F401
from spiritlevel.papers import training as training
from spiritlevel.results import Audit as Audit
from spiritlevel.results import BatchEigenvalues as BatchEigenvalues
from spiritlevel.results import BitPlan as BitPlan
from spiritlevel.results import Certificate as Certificate
from spiritlevel.results import Checkpoints as Checkpoints
from spiritlevel.results import Comparison as Comparison
from spiritlevel.results import Correlation as Correlation
from spiritlevel.results import DiagonalEstimate as DiagonalEstimate
from spiritlevel.results import Eigenpairs as Eigenpairs
from spiritlevel.results import Estimate as Estimate
from spiritlevel.results import Landscape as Landscape
from spiritlevel.results import Margins as Margins
from spiritlevel.results import Perturbation as Perturbation
from spiritlevel.results import Prediction as Prediction
from spiritlevel.results import Report as Report
from spiritlevel.results import Result as Result
from spiritlevel.results import SampleTraces as SampleTraces
from spiritlevel.results import SmoothedDensity as SmoothedDensity
from spiritlevel.results import SpectralDensity as SpectralDensity
from spiritlevel.results import SpectrumSummary as SpectrumSummary
from spiritlevel.results.training import CriticalSharpness as CriticalSharpness
from spiritlevel.results.training import Stability as Stability
from spiritlevel.results.training import SuspiciousSamples as SuspiciousSamples
from spiritlevel.samples.inputs import input_curvature as input_curvature
from spiritlevel.samples.margins import margin_bound as margin_bound
from spiritlevel.samples.margins import margins as margins
from spiritlevel.samples.margins import output_margin as output_margin
from spiritlevel.samples.margins import printed_margin_bound as printed_margin_bound
from spiritlevel.samples.margins import signed_margin as signed_margin
from spiritlevel.samples.margins import softmax_gap as softmax_gap
from spiritlevel.samples.margins import softmax_margin as softmax_margin
from spiritlevel.samples.traces import sample_traces as sample_traces
from spiritlevel.samples.traces import trace as trace
from spiritlevel.statistics.correlation import correlate as correlate
from spiritlevel.statistics.correlation import kendall as kendall
from spiritlevel.statistics.correlation import skewness as skewness

__version__: str

# Names of version 0.1, which still work and warn.
Density = SmoothedDensity
Spectrum = SpectralDensity
