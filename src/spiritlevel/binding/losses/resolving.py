"""The loss that a name, a `torch.nn` loss or a callable stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from spiritlevel.binding.losses.base import Loss
from spiritlevel.binding.losses.callables import CallableLoss
from spiritlevel.binding.losses.cross_entropy import CausalLM, CrossEntropy, TokenCrossEntropy
from spiritlevel.binding.losses.elementwise import BinaryCrossEntropy, Huber, Poisson, SquaredError
from spiritlevel.binding.losses.exponential import Exponential
from spiritlevel.errors import InputError, shown, unknown_name

NAMED: dict[str, Callable[[], Loss]] = {
    "cross_entropy": CrossEntropy,
    "token_cross_entropy": TokenCrossEntropy,
    "causal_lm": CausalLM,
    "binary_cross_entropy": BinaryCrossEntropy,
    "squared_error": SquaredError,
    "huber": Huber,
    "poisson": Poisson,
    "exponential": Exponential,
}


def resolve(loss: str | nn.Module | Callable[[Tensor, Tensor], Tensor] | Loss, *, fixed: bool = False) -> Loss:
    """The `Loss` that a name, a `torch.nn` loss or a callable stands for.

    `torch.nn` losses keep their class weights and label smoothing. The loss of a data set is always the mean over its
    samples, so a reduction that means something else is refused. A loss that computes something of its own, even one
    derived from those of `torch.nn`, is called and must return one value per sample, or their mean. `fixed` says that
    the batches are part of what is measured: then it may couple their samples.

    The names, each with what a sample's loss is (mathematics 2.1, 2.5 and 2.6):

    - "cross_entropy": −log S_y; for outputs (N, C, d…), or (N, T, C) where only that fits the targets, the mean over
      the sample's own positions that are not −100; for soft labels −Σ y log S;
    - "token_cross_entropy": the same with the classes in the last dimension;
    - "causal_lm": the same for logits (N, T, V), each compared with the next label;
    - "binary_cross_entropy": the logistic loss of one logit, or its mean over many labels;
    - "squared_error": ½‖φ − y‖²; "huber" and "poisson": as `torch.nn.HuberLoss()` and `torch.nn.PoissonNLLLoss()`;
    - "exponential": Σ_{j≠y} exp(φ_j − φ_y).

    >>> resolve("cross_entropy").name, resolve(nn.MSELoss()).name
    ('cross_entropy', 'squared_error')
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in NAMED:
            raise unknown_name("loss", loss, NAMED)
        return NAMED[loss]()
    if isinstance(loss, type):
        raise InputError(f"the loss is the class {loss.__name__}; pass an instance, e.g. {loss.__name__}().")
    if isinstance(loss, nn.modules.loss._Loss) and type(loss).forward.__module__.startswith("torch."):
        return _translate(loss)
    if callable(loss):
        return CallableLoss(loss, fixed)
    raise InputError(f"loss must be a name, a torch.nn loss or a callable, got {shown(loss)}.")


def _translate(loss: Any) -> Loss:
    kind = type(loss).__name__
    if loss.reduction == "sum":
        mean = "none" if isinstance(loss, nn.CrossEntropyLoss) and loss.weight is not None else "mean"
        raise InputError(
            f"{kind}(reduction='sum') is not a mean over samples; use reduction={mean!r} and multiply by their number."
        )
    for known, translation in _TRANSLATIONS.items():
        if isinstance(loss, known):
            return translation(loss)
    way = _INSTEAD.get(kind, f"pass one of {', '.join(NAMED)}, or a callable (outputs, targets) -> (N,)")
    raise InputError(f"torch.nn.{kind} is not known; {way}.")


_INSTEAD = {
    "NLLLoss": "pass loss='cross_entropy', which is the same for log-probabilities",
    "BCELoss": "pass loss='binary_cross_entropy' and a model that returns logits, without its sigmoid",
}


def _cross_entropy(loss: nn.CrossEntropyLoss) -> Loss:
    return CrossEntropy(
        loss.weight,
        loss.label_smoothing,
        ignore_index=loss.ignore_index,
        classes="torch",
        weighted_mean=loss.reduction == "mean",
    )


def _binary(loss: nn.BCEWithLogitsLoss) -> Loss:
    pos_weight, weight = loss.pos_weight, loss.weight
    return BinaryCrossEntropy(1.0 if pos_weight is None else pos_weight, 1.0 if weight is None else weight)


def _squared(loss: nn.MSELoss) -> Loss:
    _one_value(loss)
    return SquaredError(mean=True)


def _huber(loss: nn.HuberLoss) -> Loss:
    _one_value(loss)
    return Huber(loss.delta)


def _smooth_l1(loss: nn.SmoothL1Loss) -> Loss:
    _one_value(loss)
    if not loss.beta > 0:
        raise InputError("SmoothL1Loss(beta=0) is the absolute error, which has no curvature; use a beta above 0.")
    return Huber(loss.beta, smooth_l1=True)


def _poisson(loss: nn.PoissonNLLLoss) -> Loss:
    _one_value(loss)
    if not loss.log_input:
        raise InputError(
            "PoissonNLLLoss(log_input=False) takes rates, not their logarithms; make the model return logarithms, or "
            "pass a callable (outputs, targets) -> (N,)."
        )
    return Poisson(full=loss.full)


def _one_value(loss: Any) -> None:
    if loss.reduction != "mean":
        raise InputError(
            f"{type(loss).__name__}(reduction='none') has no single value per sample; use reduction='mean'."
        )


_TRANSLATIONS: dict[type[nn.Module], Callable[[Any], Loss]] = {
    nn.CrossEntropyLoss: _cross_entropy,
    nn.BCEWithLogitsLoss: _binary,
    nn.MSELoss: _squared,
    nn.HuberLoss: _huber,
    nn.SmoothL1Loss: _smooth_l1,
    nn.PoissonNLLLoss: _poisson,
}
