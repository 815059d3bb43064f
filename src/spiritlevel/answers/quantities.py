"""What a tracker can measure at a step of a training run, each quantity by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spiritlevel.answers.critical import critical_sharpness, stability
from spiritlevel.answers.outcomes import outcomes
from spiritlevel.binding.modules import state_of, unwrapped
from spiritlevel.errors import InputError, NotExactError, unknown_name
from spiritlevel.estimators import eigenvalues, operator_trace
from spiritlevel.measures import Setting
from spiritlevel.results import median
from spiritlevel.results.training import CriticalSharpness, Stability
from spiritlevel.samples.traces import traces_in

TOL, PRODUCTS = 0.02, 24  # of the largest eigenvalue
AFRESH = 4  # one look in this many starts from a random vector, which rules out a larger eigenvalue that was missed
_PROBES = 16

COLUMNS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "margins": ("accuracy", "margin_mean", "margin_median"),
    "trace": ("trace", "trace_stderr"),
    "largest_eigenvalue": ("largest_eigenvalue", "residual", "tolerance", "converged", "products", "afresh"),
    "layers": (),  # "trace/" and the name of each parameter tensor
    "critical_sharpness": ("critical_sharpness", "critical_low", "critical_high", "critical_step", "critical_forwards"),
    "stability": (
        "stability_curvature",
        "stability_limit",
        "stability_ratio",
        "stability_side",
        "stability_products",
    ),
}
"""The quantities, and the columns of each."""

USUAL = ("loss", "margins", "trace", "largest_eigenvalue")
_NOTHING: dict[str, Any] = {
    **{"converged": False, "afresh": False, "stability_side": ""},
    **dict.fromkeys(("products", "critical_forwards", "stability_products"), 0),
}


class Quantities:
    """The chosen quantities; keeps what makes the next look cheaper, and the last one in words."""

    def __init__(self, names: Iterable[str] | None, model: nn.Module, optimizer: Optimizer | None) -> None:
        usual = USUAL if optimizer is None else (*USUAL, "critical_sharpness")
        self.names = usual if names is None else (names,) if isinstance(names, str) else tuple(names)
        for name in self.names:
            if name not in COLUMNS:
                raise unknown_name("quantity", name, COLUMNS)
            if name in ("critical_sharpness", "stability") and optimizer is None:
                raise InputError(f"Tracker needs optimizer= to measure {name!r}.")
        if not self.names:
            raise InputError(f"Tracker needs at least one of the quantities {', '.join(COLUMNS)}.")
        self.model, self.optimizer = model, optimizer
        self.sentences: dict[str, str] = {}
        self._critical: CriticalSharpness | None = None
        self._stability: Stability | None = None
        self._vector: Tensor | None = None
        self._looks = {"largest_eigenvalue": 0, "stability": 0}

    def _afresh(self, name: str, last: Tensor | None, size: int) -> bool:
        """Whether this look starts from a random vector rather than from what the last one found."""
        self._looks[name] += 1
        usable = last is not None and last.numel() == size and bool(torch.isfinite(last).all())
        return not usable or self._looks[name] % AFRESH == 1

    def nothing(self) -> dict[str, Any]:
        """The columns before anything is measured."""
        return {column: _NOTHING.get(column, math.nan) for name in self.names for column in COLUMNS[name]}

    def measured(self, setting: Setting) -> Iterator[tuple[dict[str, Any], str]]:
        """The columns, quantity by quantity, or why there are none."""
        for name in self.names:
            try:
                yield getattr(self, f"_{name}_of")(setting), self._why(name)
            except (InputError, NotExactError) as error:
                yield {}, str(error)

    def _why(self, name: str) -> str:
        found = self._critical
        if name != "critical_sharpness" or found is None or found.status == "converged":
            return ""
        return f"critical sharpness is {found.status}: {found.reason}"

    def _loss_of(self, setting: Setting) -> dict[str, Any]:
        return {"loss": float(outcomes(setting)[1].mean())}

    def _margins_of(self, setting: Setting) -> dict[str, Any]:
        try:
            found = setting.margins
        except InputError:  # no classes; if the model is at fault, the other quantities say so
            return {}
        signed = found.signed
        return {
            "accuracy": float(found.shares.mean()),
            "margin_mean": float(signed.mean()),
            "margin_median": median(signed),
        }

    def _trace_of(self, setting: Setting) -> dict[str, Any]:
        try:
            trace = setting.trace
        except (InputError, NotExactError):  # batch statistics: a sample has no trace of its own
            trace = operator_trace(setting.hessian, probes=_PROBES, seed=setting.seed)
        return {"trace": trace.value, "trace_stderr": trace.stderr}

    def _layers_of(self, setting: Setting) -> dict[str, Any]:
        layers = setting.traces.layers
        if not layers:  # expensive where it is not exact: probes of their own for every tensor
            layers = traces_in(setting, per_layer=True, probes=_PROBES).layers
        return {f"trace/{name}": float(values.mean()) for name, values in layers.items()}

    def _largest_eigenvalue_of(self, setting: Setting) -> dict[str, Any]:
        afresh = self._afresh("largest_eigenvalue", self._vector, setting.problem.size)
        start = None if afresh else self._vector
        top = eigenvalues(setting.hessian, tol=TOL, max_matvecs=PRODUCTS, seed=setting.seed, start=start)
        found = top.outermost()
        self._vector = None if top.vectors is None else top.vectors[:, 0]
        known = found.tolerance if found.status == "converged" else float(top.residuals[0])
        return {
            "largest_eigenvalue": found.value,
            "residual": float(top.residuals[0]),
            "tolerance": known if top.converged else math.nan,
            "converged": top.converged,
            "products": top.matvecs,
            "afresh": found.status != "lower bound",
        }

    def _critical_sharpness_of(self, setting: Setting) -> dict[str, Any]:
        assert self.optimizer is not None
        problem = setting.problem
        own = dict(state_of(unwrapped(self.model)))
        batches = list(setting.each())
        count = sum(len(targets) for _, targets in batches)

        def closure() -> Tensor:
            params = {name: own[name].to(problem.dtype) for name in problem.params}
            return sum((problem.losses(params, *batch).sum() for batch in batches), torch.zeros(())) / count

        with problem.active(), _gradients(self.optimizer, closure):
            found = critical_sharpness(closure, self.optimizer, start=self._critical)
            if found.status == "not converged" and self._critical is not None:  # it has moved on too far
                found = critical_sharpness(closure, self.optimizer)
        self._critical = found
        self.sentences["critical_sharpness"] = f"Critical sharpness {found}."
        return {
            "critical_sharpness": found.value if found.status == "converged" else math.nan,  # no bounds among values
            "critical_low": found.low,
            "critical_high": found.high,
            "critical_step": found.step,
            "critical_forwards": found.forwards,
        }

    def _stability_of(self, setting: Setting) -> dict[str, Any]:
        assert self.optimizer is not None
        model = unwrapped(self.model)
        loss, mode, last = setting.problem.loss, setting.batch_norm, self._stability
        afresh = self._afresh("stability", None if last is None else last.vector, setting.problem.size)
        found = stability(
            self.optimizer,
            model,
            setting.data,
            start=None if afresh else last,
            tol=TOL,
            seed=setting.seed,
            loss=loss,
            batch_norm=mode,
            **setting.form.options(),
        )
        self._stability, text = found, str(found)
        self.sentences["stability"] = f"{text[:1].upper()}{text[1:]}."
        return {
            "stability_curvature": found.curvature.value,
            "stability_limit": found.limit,
            "stability_ratio": found.ratio,
            "stability_side": found.side,
            "stability_products": found.curvature.matvecs,
        }


@contextmanager
def _gradients(optimizer: Optimizer, closure: Callable[[], Tensor]) -> Iterator[None]:
    """Put gradients of this loss in place of the present ones."""
    moving = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.grad for parameter in moving]
    with torch.enable_grad():
        wanted = [parameter for parameter in moving if parameter.requires_grad]
        found = torch.autograd.grad(closure(), wanted, allow_unused=True)
    new = {id(parameter): gradient for parameter, gradient in zip(wanted, found, strict=True)}
    try:
        for parameter in moving:
            parameter.grad = new.get(id(parameter))
        yield
    finally:
        for parameter, gradient in zip(moving, before, strict=True):
            parameter.grad = gradient
