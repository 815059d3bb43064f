"""What a transform returns: the new model, and a certificate of what it keeps, checked on data."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.batches import Batches, resized
from spiritlevel.binding.modules import state_of
from spiritlevel.binding.problem import LARGE, Problem
from spiritlevel.binding.reading import PLAIN, Form
from spiritlevel.errors import InputError, shown, unknown_name
from spiritlevel.estimators import Operator
from spiritlevel.results import Certificate, figure
from spiritlevel.transforms.maps import LinearMap
from spiritlevel.watching.factors import Factor

if TYPE_CHECKING:
    from spiritlevel.transforms.inputs import AffineMap

Found = TypeVar("Found")

_PROBLEM = "problem"
_CHECKED = 128  # samples of the caller's data on which outputs are compared
_GUESSED = 8  # random samples where no data are given
_SIZES = (32, 28, 64, 96, 128, 224)  # image sizes to try where no data are given
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative difference of outputs that is a fault, not rounding


@dataclass(frozen=True)
class Transformed:
    """A new model and the certificate of what it keeps.

    `inputs` is the map that must be applied to the new model's inputs, `None` unless the transform is `input_map`.
    `linear` says whether the diagonal map T of the certificate is all that happens to the parameters, θ → Tθ. Inside
    its ball a radial map is θ → θ̂ + T(θ − θ̂), and a translation is θ → θ + u: then T predicts Hessians, but not what
    becomes of ‖θ‖. `map` is T where it is not diagonal. `start` is the model that T starts from, if that is not the
    model itself: `rotate_stream` folds the gains of norms first.
    """

    model: nn.Module
    certificate: Certificate
    inputs: AffineMap | None = None
    linear: bool = True
    map: LinearMap | None = None
    start: nn.Module | None = None

    def gradient(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradient at the new parameters, T⁻ᵀg, from that at the old ones, by parameter names.

        If the outputs are scaled by α, g must be that of θ ↦ ℓ(α·φ(θ)). Exact. Reference: mathematics 7.1.

        >>> from spiritlevel.transforms import rescale_layers
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> rescale_layers(net, {"0": 2.0, "2": 0.5}).gradient({"2.weight": torch.ones(1, 1)})
        {'2.weight': tensor([[2.]])}
        """
        if self.map is not None:
            return self.map.inverse_transposed(gradient)
        factors = self._factors(gradient)
        return {name: tensor / torch.as_tensor(factors[name]).to(tensor) for name, tensor in gradient.items()}

    def hessian(self, operator: Operator) -> Operator:
        """The Hessian at the new parameters, T⁻ᵀHT⁻¹, from the operator H at the old ones.

        If the outputs are scaled by α, H must be that of θ ↦ ℓ(α·φ(θ)). Where only the probabilities stay
        (`shift_logits`), it must be that of a loss of the probabilities. Exact; a product costs one product with H.
        Any matrix that transforms in the same way may be passed, such as the Gauss-Newton matrix. Reference: paper B,
        section E; mathematics 7.1.

        >>> from spiritlevel.transforms import rescale_layers
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
        >>> shapes = {name: p.shape for name, p in net.named_parameters()}
        >>> before = Operator(lambda v: v, 3, shapes=shapes)
        >>> after = rescale_layers(net, {"0": 2.0, "2": 0.5}).hessian(before)
        >>> after.dense().diagonal()
        tensor([0.2500, 0.2500, 4.0000])
        """
        if self.map is None and self.certificate.factors is None:
            self._factors({})  # raises
        if not operator.names:
            raise InputError("hessian needs an operator that knows its parameters' names and shapes.")
        return Operator(
            self._product(operator),
            operator.size,
            dtype=operator.dtype,
            device=operator.device,
            shapes=operator.shapes,
        )

    def _product(self, operator: Operator) -> Callable[[Tensor], Tensor]:
        if self.map is not None:
            mapping, names = self.map, tuple(operator.shapes)
            for name in names:
                if name not in mapping.layout.shapes:
                    raise unknown_name("parameter", name, mapping.layout.shapes)

            def product(block: Tensor) -> Tensor:
                return mapping.on_rows(names, operator @ mapping.on_rows(names, block, "inverse"), "inverse transposed")

            return product
        factors = self._factors(operator.shapes)
        parts = [
            torch.as_tensor(factors[name], dtype=torch.float64).expand(shape).reshape(-1)
            for name, shape in operator.shapes.items()
        ]
        shrink = (1 / torch.cat(parts)).to(operator.device, operator.dtype)[:, None]
        return lambda block: shrink * (operator @ (shrink * block))

    def _factors(self, names: Iterable[str]) -> dict[str, Factor]:
        factors = self.certificate.factors
        if factors is None:
            raise InputError(
                f"{self.certificate.transform} is not a linear map of the parameters, so gradient and Hessian at the "
                "new ones do not follow from those at the old ones; measure the new model instead."
            )
        for name in names:
            if name not in factors:
                raise unknown_name("parameter", name, factors)
        return factors


@dataclass(frozen=True)
class Sample:
    """Inputs on which outputs are compared, and their description."""

    inputs: Any
    count: int
    text: str
    form: Form = PLAIN
    known: dict[Any, tuple[Any, Any]] = field(default_factory=dict, compare=False)
    """What was found out about originals, each with a weak reference to what it was found out about; see `once`."""

    @classmethod
    def of(cls, model: nn.Module, data: Any, form: Form = PLAIN) -> Sample:
        """Some inputs from data of any accepted kind, in the model's precision; a ready sample is used as it is."""
        if isinstance(data, Sample):
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
            return data._in_precision(dtype)
        for name, tensor in state_of(model) if isinstance(model, nn.Module) else ():
            if tensor.layout not in (torch.strided, torch.sparse_coo):  # which PyTorch cannot copy
                raise InputError(f"the model holds the sparse tensor {name} in a form that cannot be copied.")
        problem = _bound_whole(model, form)
        if data is None:
            return cls._guessed(problem)._knowing(model, problem)
        if isinstance(data, Tensor) and (not data.ndim or data.is_meta):
            raise InputError(f"data= must hold inputs, one per row, got {shown(data)}.")
        inputs = data[:_CHECKED] if isinstance(data, Tensor) else None
        if inputs is None:
            inputs = Batches(data, ordered=False, form=problem.form).first(_CHECKED)[0]
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        count = leaves[0].shape[0] if leaves and leaves[0].ndim else 0
        if not count:
            raise InputError("data= holds no samples; pass at least one input, preferably two or more.")
        shapes = ", ".join(str(tuple(leaf.shape[1:])) for leaf in leaves)
        placed = problem.place(inputs, torch.empty(count))[0]
        with problem.active(), torch.no_grad():
            problem.outputs(problem.params, placed)  # raises an error if the model does not run on them
        return cls(placed, count, f"{count} given inputs of shape {shapes}", form)._knowing(model, problem)

    @classmethod
    def _guessed(cls, problem: Problem) -> Sample:
        generator = torch.Generator().manual_seed(0)
        for shape in _likely_shapes(problem.model):
            draws = torch.randn(_GUESSED, *shape, generator=generator, dtype=torch.float64)
            inputs = problem.place(draws, torch.empty(0))[0]
            try:
                with problem.active(), torch.no_grad():
                    problem.outputs(problem.params, inputs)
            except InputError:
                raise
            except Exception:  # whatever the error, this is not the shape the network takes
                continue
            return cls(inputs, _GUESSED, f"{_GUESSED} normal random inputs of shape {shape}", problem.form)
        raise InputError(
            "the shape of the network's inputs cannot be told from its first layer; pass data=, a batch of inputs."
        )

    def _in_precision(self, dtype: torch.dtype) -> Sample:
        """The same inputs in this precision."""
        leaves = [leaf for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if all(leaf.dtype == dtype for leaf in leaves):
            return self
        if dtype not in self.known:
            inputs = tree_map(lambda leaf: leaf.to(dtype) if any(leaf is one for one in leaves) else leaf, self.inputs)
            self.known[dtype] = None, Sample(inputs, self.count, self.text, self.form)
        found: Sample = self.known[dtype][1]
        return found

    def first(self, count: int) -> Sample:
        """The first of these inputs, for models that are bound already."""
        few = min(count, self.count)
        problems = {key: kept for key, kept in self.known.items() if isinstance(kept[1], Problem)}
        return Sample(resized(self.inputs, few), few, f"the first {few} of {self.text}", self.form, problems)

    def _knowing(self, model: nn.Module, problem: Problem) -> Sample:
        """The same, which need not bind this model again."""
        self.once(_PROBLEM, model, lambda: problem)
        return self

    def once(self, fact: str, model: nn.Module, find: Callable[[], Found], *, light: bool = False) -> Found:
        """What `find` says of an original: a model of which several transforms are made, on these inputs.

        Unless it is `light`, it is not kept for a large model, where memory is worth more than the time that finding it
        again takes.
        """
        key = fact, id(model)
        if key in self.known and self.known[key][0]() is model:  # an id may pass on to another
            return cast(Found, self.known[key][1])
        found = find()
        if light or sum(tensor.numel() for _, tensor in state_of(model)) <= LARGE:
            self.known[key] = weakref.ref(model), found
        return found

    def problem(self, model: nn.Module, mode: str = "eval") -> Problem:
        """An original bound, with all its parameters."""
        fact = _PROBLEM if mode == "eval" else f"{_PROBLEM}, {mode}"
        return self.once(fact, model, lambda: _bound_whole(model, self.form, mode))

    def outputs(self, model: nn.Module, mode: str) -> Tensor:
        """What an original returns."""
        find = lambda: _outputs(self.problem(model, mode), self.inputs)  # noqa: E731
        return self.once(f"outputs, {mode}", model, find, light=True)

    def certify(
        self,
        transform: str,
        old: nn.Module,
        new: nn.Module,
        *,
        scale: float = 1.0,
        modes: tuple[str, ...] = ("eval", "batch"),
        factors: dict[str, Factor] | None = None,
        notes: tuple[str, ...] = (),
        inputs: AffineMap | None = None,
        keeps: str = "outputs",
        tolerance: float | None = None,
    ) -> Certificate:
        """Compare the outputs of both models, in every mode that the transform promises.

        `keeps` "probabilities" compares the logarithms of their softmax instead.
        """
        normed = any(isinstance(module, _BatchNorm) for module in old.modules())
        if normed and self.count < 2:  # no statistics to take
            modes = tuple(mode for mode in modes if mode != "batch")
        largest = relative = 0.0
        for mode in modes:
            if mode == "batch" and not normed:
                continue  # the same as eval
            before = scale * self.outputs(old, mode)
            given = self.inputs if inputs is None else inputs(self.inputs)
            after = _outputs(_bound_whole(new, self.form, mode), given)
            if keeps == "probabilities":
                before, after = before.log_softmax(-1), after.log_softmax(-1)
            difference = float((after - before).abs().max()) if before.numel() else 0.0
            size = float(before.abs().max()) if before.numel() else 0.0
            if not math.isfinite(size):
                raise InputError(f"{transform}: the model's outputs are not finite on {self.text}; check its weights.")
            largest = max(largest, difference)
            dtype = next(new.parameters()).dtype
            if not difference <= (tolerance or _TOLERANCE.get(dtype, 0.1)) * size:
                raise InputError(
                    f"{transform}: the {keeps} changed by {figure(difference, 2)} where their size is "
                    f"{figure(size, 2)} (batch norm: {mode}); the factors are too extreme for {dtype}, or the network "
                    "reads its weights in a hidden way. Use milder factors or model.double()."
                )
            relative = max(relative, difference / size if size else 0.0)
        preserves = "function" if scale == 1.0 else f"outputs scaled by {figure(scale, 6)}"
        if keeps == "probabilities":
            preserves = "probabilities, and with them the cross entropy and the margins"
        return Certificate(
            transform, preserves, scale, modes, largest, relative, self.count, self.text, factors, notes, keeps
        )


def _likely_shapes(model: nn.Module) -> Iterable[tuple[int, ...]]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return [(module.in_features,)]
        if isinstance(module, _ConvNd):
            return [(module.in_channels, *[size] * len(module.kernel_size)) for size in _SIZES]
    return []


def _bound_whole(model: nn.Module, form: Form, batch_norm: str = "eval") -> Problem:
    """A model with all its parameters, for which no loss matters."""
    return Problem(model, params="*", batch_norm=batch_norm, form=form)


def _outputs(problem: Problem, inputs: Any) -> Tensor:
    with problem.active(), torch.no_grad():
        return problem.outputs(problem.params, problem.place(inputs, torch.empty(0))[0]).double()
