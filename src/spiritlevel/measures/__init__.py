"""The registry of flatness and margin measures: each with its formula, reference, cost and declared invariances.

A measure is a function (model, data, *, loss, batch_norm, seed) → `Estimate`. `MEASURES` holds them by name; `Setting`
holds what several measures of one model share (Hessian operator, traces, margins), so that a set of measures costs
little more than its dearest. A *declared invariance* is the name of a transform that leaves the value as it is, for
every network that the transform accepts: `TRANSFORMS` says which. What an optimiser found is a lower bound and is
marked so. L is the mean loss, θ the P trainable parameters, H = ∇²L without any L2 term. Where a measure is not defined
for a network, `InputError` says why.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import Bounds, minimize, toms748
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.batches import Batches, picked
from spiritlevel.binding.losses import aceht
from spiritlevel.binding.parameters import Params, along
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.ranks import Ranks
from spiritlevel.errors import InputError, NotExactError, first_line, unknown_name
from spiritlevel.estimators import (
    Operator,
    eigenvalues,
    frobenius_norm,
    operator_trace,
    outermost,
    spectral_norm,
)
from spiritlevel.operators.matrices import empirical_fisher, gauss_newton, hessian
from spiritlevel.operators.products import outputs_along
from spiritlevel.results import FEWEST, Estimate, Margins, SampleTraces
from spiritlevel.samples.margins import margin_bound, margins, printed_margin_bound, signed_margin
from spiritlevel.samples.traces import sample_forms, sample_traces
from spiritlevel.statistics.correlation import skewness
from spiritlevel.statistics.subsets import (
    GROUPS,
    SubsetError,
    by_influences,
    by_jackknife,
    by_order,
    few,
    groups,
    unknown,
)
from spiritlevel.transforms import Transformed, fold_batchnorm
from spiritlevel.watching.derivatives import check_derivatives
from spiritlevel.watching.recording import GradientNorms, resized
from spiritlevel.watching.structure import Structure, analyse, joined

__all__ = ["DEFAULT", "MEASURES", "TRANSFORMS", "Measure", "Setting", "evaluate", "select"]

TRANSFORMS: dict[str, str] = {
    "rescale_layers": "one factor for each layer, with product 1 along every path; the function stays",
    "rescale_channels": "one factor for each channel, undone in the next layer; the function stays",
    "scale_before_batchnorm": "a factor that the batch norm behind undoes; the function stays",
    "fold_batchnorm": "batch norm folded into the layer in front of it; the function stays in eval mode",
    "scale_last_layer": "outputs times a number, by the last layer; the predictions stay",
    "rescale_all": "outputs times a number, by all layers; the predictions stay",
}
"""The transforms that invariances are declared for (`spiritlevel.transforms`)."""

_SAME = frozenset({"rescale_layers", "rescale_channels", "scale_before_batchnorm", "fold_batchnorm"})
_SCALED = frozenset({"scale_last_layer", "rescale_all"})
_DIAGONAL = _SAME - {"fold_batchnorm"}  # diagonal maps of the parameters
_BY_TENSOR = frozenset({"rescale_layers", "scale_before_batchnorm"})  # one number for each parameter tensor

_BATCH = 500  # samples that a perturbed network sees at once
_WATCHED = 2  # samples on which the layers are found
_TOP = 10  # eigenvalues in the log volume
_RESOLVED = 1e-3  # of an eigenvalue: a residual up to here leaves its logarithm right to as much
_PROBES = 32
_EXACT = 64  # up to so many parameters as many probes, which makes estimates exact
_DRAWS = 16  # random perturbations, each with its mirror image
_STEPS = 20  # of projected ascent
_GAIN = 1e-4  # of a step of ascent, relative; less ends it
_GRADIENTS = 2**25  # numbers that per-sample gradients hold at once
_MORE = 100  # samples that the error of a subset needs where a few of them may hold most of the value
_SHARED = 8  # probes that all samples share where only the error of a subset is wanted


# ---------------------------------------------------------------- what measures share


class Setting:
    """One model on one data set under one loss, and what its measures have in common, computed when first needed.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> setting = Setting(net, (torch.ones(4, 2), torch.tensor([0, 1, 0, 1])))
    >>> setting.problem.size
    17
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        loss: Any = "cross_entropy",
        batch_norm: str = "eval",
        seed: int = 0,
        group: Any = None,
    ) -> None:
        self._given, self.data, self.loss, self.batch_norm, self.seed = model, data, loss, batch_norm, seed
        self.options = {"loss": loss, "batch_norm": batch_norm}
        self.shared = {**self.options, "group": group}  # for what the ranks of a group compute together
        self._after: tuple[Transformed, _Ends] | None = None
        self.kept: dict[str, Tensor] = {}  # what measures learned of every sample on their way, by their names
        self.along: dict[str, list[Tensor]] = {}  # probes that they used

    @functools.cached_property
    def problem(self) -> Problem:
        """The model and the loss as functions of the parameters, which are copied here."""
        return Problem(self._given, loss=self.loss, batch_norm=self.batch_norm)

    @property
    def model(self) -> nn.Module:
        """The model, as long as it is the one that `problem` copied: one setting never mixes two states of a model."""
        model, copied = self.problem.model, {**self.problem.params, **self.problem.constants}
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            if not _same(tensor.detach(), copied[name]):
                raise InputError(
                    f"{name} of the model has changed since this Setting first looked at it, so its measures would mix "
                    "two models; make a new Setting after every change."
                )
        return model

    @functools.cached_property
    def batches(self) -> Batches:
        """The data in an order that repeats."""
        whole = self.batch_norm == "batch"
        return Batches(self.data, size=None if whole else _BATCH, whole=whole)

    @functools.cached_property
    def ranks(self) -> Ranks:
        """The processes that share the sums over the data."""
        return Ranks(self.shared["group"], self.problem.device)

    @functools.cached_property
    def count(self) -> int:
        """The number of samples."""
        return sum(len(targets) for _, targets in self.batches)

    @functools.cached_property
    def theta(self) -> Tensor:
        """The trainable parameters laid end to end."""
        return torch.cat([tensor.reshape(-1) for tensor in self.problem.params.values()])

    def split(self, flat: Tensor) -> Params:
        """A vector of P numbers cut into the parameters' shapes."""
        params = self.problem.params
        parts = flat.split([tensor.numel() for tensor in params.values()])
        return {name: part.reshape(params[name].shape) for name, part in zip(params, parts, strict=True)}

    def each(self) -> Iterator[tuple[Any, Tensor]]:
        """The batches on the model's device."""
        for inputs, targets in self.batches:
            if len(targets):
                yield self.problem.place(inputs, targets)

    def mine(self) -> Iterator[tuple[Any, Tensor]]:
        """Those of the batches that are for this rank: all of them without a group."""
        for index, (inputs, targets) in enumerate(self.batches):
            if self.ranks.takes(index) and len(targets):
                yield self.problem.place(inputs, targets)

    def check(self) -> None:
        """Raise `InputError` unless every sample fits the model and the loss: one forward pass."""
        start = 0
        with self.problem.active():
            check_derivatives(self.problem, *self.problem.place(*self.batches.first(64)), twice=False)
        with self.problem.active(), torch.no_grad():
            for inputs, targets in self.each():
                self.problem.checked(self.problem.outputs(self.problem.params, inputs), inputs, targets, start)
                start += len(targets)

    def losses_at(self, theta: Tensor) -> Tensor:
        """The loss of every sample at other parameters."""
        params = self.split(theta)
        return self._of_samples(lambda inputs, targets: self.problem.losses(params, inputs, targets))

    def _of_samples(self, function: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """A number of every sample, (N,) float64: every rank takes its batches, and all get all."""
        start, pieces = 0, []
        with self.ranks.together(), self.problem.active(), torch.no_grad():
            for index, (inputs, targets) in enumerate(self.batches):
                if self.ranks.takes(index) and len(targets):
                    pieces.append((start, function(*self.problem.place(inputs, targets)).double().cpu().reshape(-1)))
                start += len(targets)
        return self.ranks.joined(pieces, start)

    def loss_at(self, theta: Tensor) -> float:
        """L at other parameters."""
        return float(self.losses_at(theta).mean())

    def gradient_at(self, theta: Tensor) -> tuple[float, Tensor]:
        """L and ∇L at other parameters."""
        total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(theta)
        with self.ranks.together(), self.problem.active():
            for inputs, targets in self.mine():
                leaf = theta.detach().clone().requires_grad_()
                value = self.problem.losses(self.split(leaf), inputs, targets).sum()
                gradient += torch.autograd.grad(value, leaf)[0]
                total += value.detach().double().cpu()
        self.ranks.add([total, gradient])
        return float(total) / self.count, gradient / self.count

    def wrong_at(self, theta: Tensor) -> Tensor:
        """1 for every sample that is misclassified at other parameters, else 0."""
        params = self.split(theta)

        def wrong(inputs: Any, targets: Tensor) -> Tensor:
            logits, labels = _as_classes(self.problem.outputs(params, inputs), targets)
            return signed_margin(logits, labels) <= 0

        return self._of_samples(wrong)

    @functools.cached_property
    def losses(self) -> Tensor:
        """The loss of every sample."""
        return self.losses_at(self.theta)

    def part(self, indices: Tensor) -> Setting:
        """The same on the samples at these sorted places alone."""
        return Setting(self.model, picked(self.batches, indices), seed=self.seed, **self.options)

    def forms(self, *vectors: Tensor) -> Tensor:
        """vᵀHₙv of every sample along each of these vectors, (N, vectors)."""
        directions = [self.split(vector.to(self.theta).reshape(-1)) for vector in vectors]
        return sample_forms(self.problem, self.batches, directions, self.seed)

    def group_products(self, vector: Tensor) -> Iterator[Tensor]:
        """H_g v of the mean loss over each of ten random groups of the samples; together about one product."""
        vector = vector.to(self.theta).reshape(-1)
        for chosen in groups(self.count, self.seed):
            total = torch.zeros_like(self.theta)
            with self.problem.active(), torch.enable_grad():
                for inputs, targets in Batches(picked(self.batches, chosen), size=_BATCH):
                    leaf = self.theta.detach().clone().requires_grad_()
                    value = self.problem.losses(self.split(leaf), *self.problem.place(inputs, targets)).sum()
                    (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
                    if slope.requires_grad:  # not so where the loss is linear
                        total += torch.autograd.grad(slope @ vector, leaf, materialize_grads=True)[0]
            yield total / len(chosen)

    @functools.cached_property
    def start(self) -> tuple[float, Tensor]:
        """L and ∇L at the model."""
        return self.gradient_at(self.theta)

    @functools.cached_property
    def structure(self) -> Structure:
        """The degrees of the outputs in every parameter, over all samples: one forward pass of the data."""
        if self.batch_norm == "batch":
            return Structure(failure="batch_norm='batch' couples the samples of a batch")
        with self.problem.active():
            return functools.reduce(
                joined, (analyse(self.problem, inputs, len(targets)) for inputs, targets in self.each())
            )

    @functools.cached_property
    def hessian(self) -> Operator:
        """H as an operator."""
        return hessian(self.model, self.data, **self.shared)

    @functools.cached_property
    def gauss_newton(self) -> Operator:
        """The Gauss-Newton matrix as an operator."""
        return gauss_newton(self.model, self.data, **self.shared)

    @functools.cached_property
    def traces(self) -> SampleTraces:
        """Per-sample traces of H, split by parameter where that is free."""
        free = self.structure.exact and self.problem.loss.closed_form
        return sample_traces(self.model, self.data, per_layer=free, seed=self.seed, **self.shared)

    @functools.cached_property
    def spectrum(self) -> _Ends:
        """The ends and the Frobenius norm of H."""
        return _Ends(self.hessian, self.seed)

    def spectrum_after(self, transformed: Transformed) -> _Ends | None:
        """The same of T⁻¹HT⁻¹, what H becomes by theory, if the transform is a diagonal T that keeps the function."""
        certificate = transformed.certificate
        if certificate.factors is None or certificate.scale != 1.0:
            return None
        if self._after is None or self._after[0] is not transformed:  # measures of one transform come in a row
            self._after = transformed, _Ends(transformed.hessian(self.hessian), self.seed)
        return self._after[1]

    @functools.cached_property
    def quotient(self) -> _Ends:
        """The ends of N H N, N = blockdiag(‖w_l‖ I)."""
        return _Ends(_in_layer_norms(self), self.seed)

    @functools.cached_property
    def margins(self) -> Margins:
        """Output margins of all samples."""
        return margins(self.model, self.data, **self.shared)

    def distances(self, norm: int | str) -> Tensor:
        """The linearised distance of every sample to the decision boundary."""
        key = f"distance in norm {norm}"
        if key not in self.kept:
            found = margins(self.model, self.data, distance=norm, **self.options).distance
            assert found is not None
            self.kept[key] = found
        return self.kept[key]

    @functools.cached_property
    def hidden(self) -> Margins:
        """Distances at the input of the last layer."""
        last = self.last
        own = {id(parameter) for parameter in last.module.parameters()}
        if all(id(parameter) in own for parameter in self.model.parameters()):
            raise InputError("a hidden-layer margin needs a network with a layer in front of its last one.")
        if sum(call.module is last.module for call in self.calls) > 1:
            raise InputError(f"a hidden-layer margin needs a last layer that runs once; {last.name!r} runs repeatedly.")
        return margins(
            _Tapped(self.model, last.name), self.data, distance=2, layer="input_of_last_layer", **self.shared
        )

    @functools.cached_property
    def logits(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (N, d), outputs (N, C) and labels of all samples."""
        rows = []
        with self.problem.active(), torch.no_grad():
            for inputs, targets in self.each():
                if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
                    raise InputError("this measure needs the norms of the inputs: one tensor of floats per sample.")
                outputs, labels = _as_classes(self.problem.outputs(self.problem.params, inputs), targets)
                rows.append((inputs.reshape(len(labels), -1).cpu(), outputs.cpu(), labels.cpu()))
        found = tuple(torch.cat(column) for column in zip(*rows, strict=True))
        return found[0], found[1], found[2]

    @functools.cached_property
    def calls(self) -> list[_Call]:
        """The linear layers and convolutions in the order in which they ran on a few samples, by whatever way."""
        problem = self.problem
        tensors = {**problem.constants, **problem.params}
        watch = _LayerWatch({id(tensors[name]): name for name, _ in problem.model.named_parameters()})
        handles = []
        for name, module in problem.model.named_modules():
            if isinstance(module, _LAYERS):
                handles.append(module.register_forward_pre_hook(watch.enter))
                leave = functools.partial(watch.leave, name=name)
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            with problem.active(), torch.no_grad(), watch:
                problem.outputs(problem.params, resized(problem.place(*self.batches.first(2))[0], _WATCHED))
        finally:
            for handle in handles:
                handle.remove()
        return watch.calls

    @property
    def last(self) -> _Call:
        """The last layer that ran, frozen or not, among those that the outputs are not known to ignore."""
        calls = [call for call in self.calls if self.structure.degrees.get(call.weight, 1)]
        if not calls:
            raise InputError("the network has no linear layer or convolution.")
        last = calls[-1]
        if last.module is None:
            raise InputError(
                f"the last layer of the network is the bare operation '{last.name}' on parameter {last.weight!r}; "
                "write it as a module, e.g. nn.Linear, to measure at the last layer."
            )
        return last

    @functools.cached_property
    def owners(self) -> dict[str, nn.Module]:
        """The linear layer or convolution that each weight belongs to, the first one if several share it."""
        names = {id(parameter): name for name, parameter in self.problem.model.named_parameters()}
        found: dict[str, nn.Module] = {}
        for module in self.problem.model.modules():
            weight = module._parameters.get("weight") if isinstance(module, _LAYERS) else None
            if weight is not None:
                found.setdefault(names[id(weight)], module)
        return found

    @functools.cached_property
    def layers(self) -> list[str]:
        """The trainable weights of linear layers and convolutions that the outputs use, by the names of parameters."""
        used = [call.weight for call in self.calls] + [name for name in self.owners if self.structure.uses.get(name)]
        found = [name for name in dict.fromkeys(used) if name in self.owners and name in self.problem.params]
        if not found:
            raise InputError("the network has no linear layer or convolution with trainable weights of its own.")
        return found

    @functools.cached_property
    def folded(self) -> Setting:
        """The same model, every batch norm folded into the layer in front of it and no parameter frozen.

        What is said of the network as a function must not depend on what an optimiser may move.
        """
        model = self.model
        frozen = any(p.is_floating_point() and not p.requires_grad for p in model.parameters())
        normed = any(isinstance(module, _BatchNorm) for module in model.modules())
        if not normed and not frozen:
            return self
        model = self._without_batch_norm() if normed else copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return Setting(model, self.data, seed=self.seed, **self.options)

    def _without_batch_norm(self) -> nn.Module:
        if self.batch_norm == "batch":
            raise InputError("batch norm can be folded in eval mode only; use batch_norm='eval'.")
        model = fold_batchnorm(self.model, data=self.data).model
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise InputError("a batch norm of this network does not directly follow a layer, so it cannot be folded.")
        return model

    @functools.cached_property
    def blocks(self) -> dict[str, _Block]:
        """What the Gauss-Newton matrix says of the weights of every layer."""
        return _blocks(self, self.layers)

    def generator(self, index: int, purpose: int) -> torch.Generator:
        """Random numbers of their own for the draw with this index, for this purpose."""
        state = np.random.SeedSequence([self.seed, purpose, index]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state))

    def normal(self, index: int, purpose: int) -> Tensor:
        """The draw of standard normal numbers with this index, (P,), for this purpose."""
        numbers = torch.randn(self.problem.size, generator=self.generator(index, purpose), dtype=torch.float64)
        return numbers.to(self.theta)


def _same(now: Tensor, then: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places included."""
    if now.shape != then.shape:
        return False
    now = now.to(then)
    return not bool(((now != then) & ((now == now) | (then == then))).any())


_LAYERS = (nn.Linear, _ConvNd)
_PLAIN: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = frozenset(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d matmul __matmul__ __rmatmul__ mm bmm
    addmm baddbmm mv einsum tensordot bilinear multi_head_attention_forward lstm gru rnn_tanh rnn_relu
    """.split()
)
"""Operations that make a layer of a matrix of parameters, by the names of their functions."""


@dataclass(frozen=True)
class _Call:
    """A layer that ran: its module, or None for a bare operation, and the parameter that is its weight, if one is."""

    name: str
    module: Any
    weight: str
    value: Tensor
    inputs: torch.Size

    @property
    def plain(self) -> bool:
        """Whether it is a module that does with a weight of its own what its class does, and nothing else."""
        if self.module is None or not self.weight or self.module._forward_hooks or self.module._forward_pre_hooks:
            return False
        return type(self.module).forward in [kind.forward for kind in _PLAIN]


class _LayerWatch(TorchFunctionMode):
    """Lists the layers that run: modules by their hooks, and what uses a matrix of parameters without a module."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.calls, self.inside = names, list[_Call](), 0

    def enter(self, module: nn.Module, args: Any) -> None:
        self.inside += 1

    def leave(self, module: Any, args: Any, kwargs: Any, output: Any, name: str) -> None:
        self.inside -= 1
        shape = next(leaf.shape for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        weight = module.weight
        self.calls.append(_Call(name, module, self.names.get(id(weight), ""), weight.detach(), shape))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = getattr(func, "__name__", "")
        if not self.inside and operation in _PRODUCTS:
            for leaf in tree_leaves((args, kwargs)):
                for tensor in (leaf, getattr(leaf, "_base", None)):  # itself, or transposed
                    if isinstance(tensor, Tensor) and tensor.ndim > 1 and id(tensor) in self.names:
                        name = self.names[id(tensor)]
                        self.calls.append(_Call(operation, None, name, tensor.detach(), torch.Size()))
        return func(*args, **(kwargs or {}))


class _Tapped(nn.Module):
    """The model, with the input of its last layer passed through a module, which gives that place a name."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model, self.layer, self.input_of_last_layer = model, layer, nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def through_tap(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (self.input_of_last_layer(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "input": self.input_of_last_layer(kwargs["input"])}

        layer = self.model.get_submodule(self.layer)
        handle = layer.register_forward_pre_hook(through_tap, with_kwargs=True)
        try:
            return self.model(*args, **kwargs)
        finally:
            handle.remove()


def _matrices(module: Any, tensor: Tensor) -> Tensor:
    """What has the shape of a layer's weight as (…, groups, outputs, inputs, positions), channels counted by group.

    The outputs of a group see the inputs of this group only. A transposed convolution keeps its inputs first.
    """
    groups, transposed = getattr(module, "groups", 1), getattr(module, "transposed", False)
    lead = tensor.shape[: tensor.ndim - module.weight.ndim]
    first, second = module.weight.shape[:2]
    found = tensor.reshape(*lead, groups, first // groups, second, -1)
    return found.transpose(-3, -2) if transposed else found


@dataclass
class _Block:
    """The block G of the Gauss-Newton matrix that belongs to a weight with rows w_s."""

    diagonal: Tensor  # of G, in the weight's shape
    relative: Tensor  # Σ_{s,s'} ⟨w_s, w_s'⟩ Tr G_{s,s'} of every sample, s and s' in one group


def _blocks(setting: Setting, weights: Sequence[str]) -> dict[str, _Block]:
    """Diagonals and relative flatness of the weights' blocks, exactly, from C−1 backward passes at most.

    G = E Σ_j d_j vec(g_j)vec(g_j)ᵀ with the per-sample gradients g_j of v_jᵀφ by the weight W: the diagonal is
    E Σ_j d_j g_j², the other sum E Σ_j d_j ‖Wᵀg_j‖². A backward pass gives δ = ∂(v_jᵀφ)/∂z at a layer's output z; of a
    linear layer with one row per sample g = δaᵀ, so both follow from δ and its input a, and no gradient is formed. That
    needs a weight with one use, in a module whose rows are the samples; others get gradients sample by sample.
    """
    problem = setting.problem
    if setting.batch_norm == "batch":
        raise InputError("with batch_norm='batch' a sample has no gradient of its own; use batch_norm='eval'.")
    if not problem.loss.closed_form:
        raise InputError("the Gauss-Newton matrix of the weights needs a loss that offers its output factors.")
    found = {
        name: _Block(torch.zeros_like(problem.params[name]).double(), torch.zeros(setting.count, dtype=torch.float64))
        for name in weights
    }
    start = 0
    with problem.active():
        few, _ = problem.place(*setting.batches.first(3))
        without_rule = GradientNorms(problem, few, setting.structure, 1).without_rule
        modules = {}
        for name in weights:
            calls = [call for call in setting.calls if call.weight == name]
            if name not in without_rule and len(calls) == 1 and calls[0].plain:
                modules[name] = calls[0].module
        alone = {name: problem.params[name] for name in weights if name not in modules}
        for inputs, targets in setting.each():
            params = {name: tensor.detach().requires_grad_() for name, tensor in problem.params.items()}
            with _recorded(modules) as ran:
                outputs = problem.outputs(params, inputs)
            if len(ran) != len(modules):
                raise InputError("the layers of this network do not run equally often for all samples.")
            factors = list(problem.loss.factors(outputs.detach(), targets))
            for index, (scale, vector) in enumerate(factors):
                vector = vector.reshape(outputs.shape).to(outputs)
                slopes: Sequence[Tensor] = ()
                if ran:
                    taps, more = [output for *_, output in ran], index + 1 < len(factors)
                    slopes = torch.autograd.grad(outputs, taps, vector, retain_graph=more, materialize_grads=True)
                for (name, points, _), slope in zip(ran, slopes, strict=True):
                    _add_call(found[name], modules[name], problem.params[name], points, slope, scale, start)
                for part, gradients in _sample_by_sample(problem, alone, inputs, vector):
                    for name, gradient in gradients.items():
                        owner, weight = setting.owners[name], problem.params[name]
                        _add_gradients(found[name], owner, weight, gradient, scale[part], start + part.start)
            start += len(targets)
    for block in found.values():
        block.diagonal /= setting.count
    return found


@contextlib.contextmanager
def _recorded(modules: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """A list of (weight, input, output) of the modules that a forward pass inside fills."""
    ran: list[tuple[str, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str) -> Tensor:
        ran.append((name, (args[0] if args else kwargs["input"]).detach(), output))
        return output.clone()  # what comes next may write into it

    handles = [
        module.register_forward_hook(functools.partial(hook, name=name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _add_call(
    block: _Block, module: nn.Module, weight: Tensor, points: Tensor, slope: Tensor, scale: Tensor, start: int
) -> None:
    """Add Σ_n d g², and d ‖Wᵀg‖² of every sample from `start` on, of one factor, from inputs and slopes of a layer."""
    if isinstance(module, nn.Linear) and points.ndim == 2:
        block.diagonal += (scale[:, None] * slope.double().square()).T @ points.double().square()
        sizes = (slope @ weight).double().square().sum(1) * points.double().square().sum(1)
        block.relative[start : start + len(scale)] += (scale * sizes).cpu()
        return

    def form(weight: Tensor, point: Tensor, slope: Tensor) -> Tensor:
        return (functional_call(module, {"weight": weight}, (point[None],))[0] * slope).sum()

    samples = max(1, _GRADIENTS // weight.numel())
    for begin in range(0, len(scale), samples):
        part = slice(begin, begin + samples)
        gradients = vmap(grad(form), in_dims=(None, 0, 0))(weight.detach(), points[part], slope[part])
        _add_gradients(block, module, weight, gradients.detach(), scale[part], start + begin)


def _add_gradients(
    block: _Block, module: nn.Module, weight: Tensor, gradients: Tensor, scale: Tensor, start: int
) -> None:
    """The same from the gradients g of every sample, (N, …)."""
    block.diagonal += torch.einsum("n,n...->...", scale, gradients.double().square())
    rows, flat = _matrices(module, weight).flatten(2), _matrices(module, gradients).flatten(3)
    forms = flat * (rows @ rows.mT @ flat) if rows.shape[1] < rows.shape[2] else (rows.mT @ flat).square()
    block.relative[start : start + len(scale)] += (scale * forms.double().sum((1, 2, 3))).cpu()


def _sample_by_sample(problem: Problem, chosen: Params, inputs: Any, vectors: Tensor) -> Iterator[tuple[slice, Params]]:
    """The gradients of vᵀφ by the chosen parameters, every use of them included, for some samples after the other."""
    if not chosen:
        return
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]

    def one(vector: Tensor, *sample: Tensor) -> Params:
        rest = iter(sample)
        single = tree_map(lambda leaf: next(rest)[None] if isinstance(leaf, Tensor) else leaf, inputs)

        def forward(chosen: Params) -> Tensor:
            return problem.outputs({**problem.params, **chosen}, single)[0]

        gradients: Params = vjp(forward, chosen)[1](vector)[0]
        return gradients

    samples = max(1, _GRADIENTS // sum(tensor.numel() for tensor in chosen.values()))
    for begin in range(0, len(vectors), samples):
        part = slice(begin, begin + samples)
        rows = [vectors[part], *(leaf[part] for leaf in leaves)]
        try:
            gradients = vmap(one)(*rows)
        except RuntimeError:  # an operation without a batching rule
            each = [one(*(row[n] for row in rows)) for n in range(len(rows[0]))]
            gradients = {name: torch.stack([sample[name] for sample in each]) for name in chosen}
        yield part, {name: gradient.detach() for name, gradient in gradients.items()}


def _as_classes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, C ≥ 2), a single logit φ as (0, φ), and integer labels."""
    outputs = outputs.reshape(len(targets), -1)
    if outputs.shape[1] == 1:
        return torch.cat([torch.zeros_like(outputs), outputs], 1), (targets.reshape(-1) > 0).long()
    if targets.is_floating_point() or targets.ndim != 1:
        raise InputError("this measure needs one integer class per sample.")
    return outputs, targets.long()


def _probes(size: int) -> int:
    return size if 2 <= size <= _EXACT else _PROBES


class _Ends:
    """Both ends of an operator's spectrum and its Frobenius norm, each computed when first asked for."""

    def __init__(self, op: Operator, seed: int) -> None:
        self.op, self.seed = op, seed
        self._vectors: dict[str, Tensor] = {}

    def vector(self, which: str) -> Tensor:
        """The eigenvector of an end, "largest" or "magnitude"; computed when first asked for."""
        if which not in self._vectors:
            found = eigenvalues(self.op, which=which, seed=self.seed)
            assert found.vectors is not None
            self._vectors[which] = found.vectors[:, 0]
        return self._vectors[which]

    @functools.cached_property
    def dominant(self) -> Estimate:
        """The eigenvalue of largest magnitude: by its sign it is also the largest or the smallest."""
        return outermost(self.op, "magnitude", seed=self.seed)

    @functools.cached_property
    def largest(self) -> Estimate:
        """λ₁."""
        return self.dominant if self.dominant.sign > 0 else outermost(self.op, "largest", seed=self.seed)

    @functools.cached_property
    def smallest(self) -> Estimate:
        """λ_P."""
        return self.dominant if self.dominant.sign < 0 else outermost(self.op, "smallest", seed=self.seed)

    @functools.cached_property
    def norm(self) -> Estimate:
        """max|λ|."""
        return dataclasses.replace(self.dominant, value=abs(self.dominant.value))

    @functools.cached_property
    def frobenius(self) -> Estimate:
        """√Σλ²."""
        return frobenius_norm(self.op, probes=_probes(self.op.size), seed=self.seed)


# ---------------------------------------------------------------- the registry

Compute = Callable[[Setting], Estimate]
Predict = Callable[[Setting, Transformed], float | None]


@dataclass(frozen=True)
class Sampling:
    """How the error of a measure is found if only a random subset of the data was measured.

    `how`: "no data" (the samples do not enter), "influence" (`values` gives what every sample adds, to first order),
    "order" (the quantile at `share` of `values`), "jackknife" (computed anew without each of ten groups: nine times
    the cost of the measure), "bracket" (`limits` finds them) or "unknown", and `reason` says why. `bias` is how far
    the measure is too large on average. `cost` is what finding it takes, in words;
    `least` how many samples an interval needs to hold, which is more where a few of them decide the value. What `grows`
    with the number of samples, as its root, can be compared on equal samples, but speaks of no others.
    """

    how: str
    values: Callable[[Setting], Tensor] | None = None
    share: float = math.nan
    bias: Callable[[Setting, int], float] = lambda setting, population: 0.0
    limits: Callable[[Setting, float, int], SubsetError] | None = None
    reason: str = ""
    cost: str = "nothing"
    least: int = FEWEST
    grows: bool = False

    def error(self, measure: Measure, setting: Setting, value: float, population: int) -> SubsetError:
        """By the way that is declared; of a value that the measure has given on this setting."""
        if self.how == "no data":
            return SubsetError(0.0, value, value)
        if self.how == "unknown":
            return unknown(self.reason)
        if self.grows:
            times = math.sqrt(population / setting.count)
            return unknown(
                f"it grows as the root of the number of samples, by {times:.3g} to all {population:,} of them"
            )
        if too_few := few(setting.count, self.least):
            return too_few
        if self.how == "jackknife":
            return self._without_groups(measure, setting, value, population)
        if self.limits is not None:
            return self.limits(setting, value, population)
        assert self.values is not None
        values = self.values(setting)
        if self.how == "order":
            return by_order(value, values, self.share, population)
        return by_influences(value, values, population, self.bias(setting, population))

    def _without_groups(self, measure: Measure, setting: Setting, value: float, population: int) -> SubsetError:
        found = []
        for group in groups(setting.count, setting.seed):
            kept = torch.ones(setting.count, dtype=torch.bool)
            kept[group] = False
            found.append(measure.compute(setting.part(kept.nonzero()[:, 0])).value)
        return by_jackknife(value, found, setting.count, population)


@dataclass(frozen=True)
class Measure:
    """A number that is said to tell flatness or width, and what is known about it.

    `direction` says what a larger value means: "sharper", "flatter", "wider" (margins) or "larger" (norms). `cost` is
    the dearest thing it does: "forward", "backward", "matvecs" or "optimiser". `invariant_to` are the names of the
    transforms that leave it as it is; `predict` gives the value after a transform where theory knows it. `keeps_sign`
    tells that no linear reparametrisation θ → Tθ can change its sign (Sylvester's law of inertia for T⁻ᵀHT⁻¹).
    `sampling` says how the error of a random subset of the data is found.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    >>> MEASURES["trace"](net, data).exact, sorted(MEASURES["trace"].invariant_to)
    (True, [])
    """

    name: str
    meaning: str
    formula: str
    reference: str
    cost: str
    compute: Compute = field(repr=False)
    sampling: Sampling = field(repr=False)
    direction: str = "sharper"
    invariant_to: frozenset[str] = frozenset()
    predict: Predict | None = field(default=None, repr=False)
    keeps_sign: bool = False

    def __call__(
        self, model: nn.Module, data: Any, *, loss: Any = "cross_entropy", batch_norm: str = "eval", seed: int = 0
    ) -> Estimate:
        """The measure of a model on data, with its error; the model is left as it was."""
        setting = Setting(model, data, loss=loss, batch_norm=batch_norm, seed=seed)
        setting.check()
        return self.compute(setting)

    def attempt(self, setting: Setting) -> Estimate:
        """The measure, or NaN with the reason why there is none.

        A computation that breaks down (a division by zero, an operation that PyTorch refuses, no memory left) makes
        this one number undefined, under the name of its error, and leaves the others of a report. Errors of other
        kinds are mistakes in the program and pass, as does a failure of one among several ranks.
        """
        try:
            found = self.compute(setting)
        except (InputError, NotExactError) as error:
            return Estimate(math.nan, seed=setting.seed, reason=str(error))
        except (ArithmeticError, RuntimeError, ValueError) as error:
            if setting.shared["group"] is not None:  # the other ranks may still wait for this one
                raise
            first = first_line(error)
            return Estimate(math.nan, seed=setting.seed, reason=f"failed with {type(error).__name__}: {first}")
        if math.isnan(found.value) and not found.reason:
            return dataclasses.replace(found, reason="the value is not a number")
        return found

    def subset_error(self, setting: Setting, value: float, population: int) -> SubsetError:
        """The error of `value`, which this setting gave, if its samples are a random subset of so many; see `Sampling`.

        What cannot be found is not known, and says why.
        """
        if setting.batch_norm == "batch":
            return unknown("batch statistics couple the samples")
        try:
            return self.sampling.error(self, setting, value, population)
        except (InputError, NotExactError) as error:
            return unknown(str(error).rstrip("."))
        except (ArithmeticError, RuntimeError, ValueError) as error:
            first = first_line(error)
            return unknown(f"failed with {type(error).__name__}: {first}")

    @property
    def lower_bound(self) -> bool:
        """Whether an optimiser found the value, so that the true one may be larger."""
        return self.cost == "optimiser"

    def __str__(self) -> str:
        bound = " (a lower bound)" if self.lower_bound else ""
        return f"{self.name}{bound}: {self.meaning}; {self.formula} [{self.reference}]"


MEASURES: dict[str, Measure] = {}
"""All measures by name."""

DEFAULT = (
    "trace",
    "largest_eigenvalue",
    "fisher_rao_norm",
    "layer_scaled_trace",
    "quotient_norm",
    "relative_flatness",
    "adaptive_sharpness_average",
    "weight_norm",
    "path_norm",
    "mean_aceht",
    "margin_mean",
    "input_distance",
    "spectral_margin_mean",
)
"""The measures that are taken unless others are named: cheap, and one or two of every kind."""


def select(names: str | Iterable[str] | None = None) -> tuple[Measure, ...]:
    """Measures by their names: "default" (as is None), "all", or the ones listed.

    >>> [measure.name for measure in select(["trace", "path_norm"])]
    ['trace', 'path_norm']
    """
    if names is None or isinstance(names, str):
        sets = {None: DEFAULT, "default": DEFAULT, "all": tuple(MEASURES)}
        names = sets.get(names) or (str(names),)
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in MEASURES:
            raise unknown_name("measure", name, [*MEASURES, "default", "all"])
    return tuple(MEASURES[name] for name in wanted)


@torch.inference_mode(False)  # measures add up in place, which tensors of that mode do not allow outside it
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    measures: str | Iterable[str] | None = None,
    loss: Any = "cross_entropy",
    batch_norm: str = "eval",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Several measures of one model as plain rows, for tables of many models; what they share is computed once.

    A row has name, value, stderr, tolerance, seconds (of what no earlier row had computed), direction, kind (the status
    of the number, see `Estimate`) and reason. The model is left as it was.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> rows = evaluate(net, (torch.ones(4, 2), torch.tensor([0, 1, 0, 1])), measures=["trace", "ball_sharpness"])
    >>> [(row["name"], row["kind"]) for row in rows]
    [('trace', 'exact'), ('ball_sharpness', 'lower bound')]
    """
    chosen = select(measures)
    model = Problem(model, loss=loss, batch_norm=batch_norm).model  # half precision becomes a float32 copy at once
    setting = Setting(model, data, loss=loss, batch_norm=batch_norm, seed=seed)
    setting.check()
    rows = []
    for measure in chosen:
        start = time.perf_counter()
        found = measure.attempt(setting)
        rows.append(
            {
                "name": measure.name,
                "value": found.value,
                "stderr": found.stderr,
                "tolerance": found.tolerance,
                "seconds": time.perf_counter() - start,
                "direction": measure.direction,
                "kind": found.status,
                "reason": found.reason,
            }
        )
    return rows


def _register(name: str, meaning: str, formula: str, reference: str, **fields: Any) -> Callable[[Compute], Compute]:
    def add(compute: Compute) -> Compute:
        MEASURES[name] = Measure(name, meaning, formula, reference, compute=compute, **fields)
        return compute

    return add


# ---------------------------------------------------------------- what every sample adds (mathematics 10.3)

_NO_DATA = Sampling("no data")


def _mean_of(values: Callable[[Setting], Tensor], cost: str = "nothing", least: int = FEWEST) -> Sampling:
    return Sampling("influence", values, cost=cost, least=least)


def _kept(name: str, least: int = FEWEST) -> Sampling:
    return _mean_of(lambda setting: setting.kept[name], least=least)


def _quantile_of(values: Callable[[Setting], Tensor], share: float) -> Sampling:
    return Sampling("order", values, share)


def _anew(cost: str = "nine times the measure") -> Sampling:
    return Sampling("jackknife", cost=cost)


def _not_known(reason: str) -> Sampling:
    return Sampling("unknown", reason=reason)


def _signs(setting: Setting) -> list[Tensor]:
    """Sign vectors that all samples share."""
    size = setting.problem.size
    draws = (torch.randint(0, 2, (size,), generator=setting.generator(i, 11)) for i in range(_SHARED))
    return [draw.mul(2).sub(1).to(setting.theta) for draw in draws]


def _rest(setting: Setting, population: int) -> float:
    """1 − N/M, the share of the population that was not measured."""
    return 1 - setting.count / population


def _end_sampling(get: Callable[[Setting], _Ends], which: str, in_norms: bool = False) -> Sampling:
    """Of an end λ with eigenvector v: ψₙ = vᵀHₙv, one forward-mode pass for all samples.

    The eigenvector fits the noise of the subset, so λ is too large by about Σ_j Var(v_jᵀHₙv)/(N(λ−λ_j)) over the other
    eigenvectors; the variance follows from the products with ten groups of the samples, and λ_j is taken as 0.
    """

    def vectors(setting: Setting) -> tuple[Tensor, Tensor | float]:
        return get(setting).vector(which), _layer_norms(setting) if in_norms else 1.0

    def values(setting: Setting) -> Tensor:
        vector, unit = vectors(setting)
        sign = -1.0 if which == "magnitude" and get(setting).dominant.value < 0 else 1.0
        return sign * setting.forms(unit * vector)[:, 0]

    def bias(setting: Setting, population: int) -> float:
        vector, unit = vectors(setting)
        end = get(setting).norm if which == "magnitude" else get(setting).largest
        if not end.value > 0:
            raise InputError("an end of the spectrum that is not positive has no known bias.")
        noise = 0.0
        for product in setting.group_products(unit * vector):
            moved = (unit * product).double()
            moved -= (moved @ vector.double()) * vector.double()
            noise += float(moved.square().sum())
        return noise / GROUPS / (GROUPS - 1) / end.value * _rest(setting, population)

    return Sampling("influence", values, bias=bias, cost="about two products")


def _squared_norm_values(setting: Setting) -> Tensor:
    """⟨Hₙ, H⟩ of every sample, the mean of vᵀHₙHv over shared probes, by forms along Hv + v and Hv − v."""
    if "squared norm" in setting.kept:
        return setting.kept["squared norm"]
    total = torch.zeros(setting.count, dtype=torch.float64)
    for v in _signs(setting):
        w = setting.hessian @ v
        size = float(w.double().norm()) / math.sqrt(len(v))
        if size > 0:
            above, below = setting.forms(v + w / size, v - w / size).unbind(1)
            total += (above - below) * size / 4
    setting.kept["squared norm"] = total / _SHARED
    return setting.kept["squared norm"]


def _squared_norm_bias(setting: Setting, population: int) -> float:
    """E‖Hₙ − H‖_F²/N, from the products with ten groups of the samples."""
    key = "noise of the squared norm"
    if key in setting.kept:
        return float(setting.kept[key]) * _rest(setting, population)
    noise, probes = 0.0, _signs(setting)[: _SHARED // 2]
    for v in probes:
        products = torch.stack([product.double() for product in setting.group_products(v)])
        noise += float((products - products.mean(0)).square().sum()) / GROUPS / (GROUPS - 1)
    setting.kept[key] = torch.tensor(noise / len(probes), dtype=torch.float64)
    return float(setting.kept[key]) * _rest(setting, population)


def _norm_sampling(factor: Callable[[Setting], float]) -> Sampling:
    """Of a function of ‖H‖_F² with this slope."""
    return Sampling(
        "influence",
        lambda setting: 2 * factor(setting) * _squared_norm_values(setting),
        bias=lambda setting, population: factor(setting) * _squared_norm_bias(setting, population),
        cost="about 24 products",
    )


def _bracket(name: str, compute: Compute) -> Sampling:
    """Of a maximum of the rise of the loss over displacements δ.

    At the maximiser δ* the influence is the rise of every sample (envelope theorem), which gives the upper limit. But
    δ* fits the noise of the subset: the maximum is too large on average. A δ found on one half of the samples is not
    fitted to the other half, where its mean rise is therefore at most the maximum over all data, on average: this gives
    the lower limit. Both hold, so the interval is conservative.
    """

    def parts(setting: Setting, rises: Tensor, value: float) -> Tensor:
        if not name.startswith("box"):
            return rises
        base = float(setting.losses.mean())  # 100 rise/(1+L)
        return (100 * rises - value * setting.losses) / (1 + base)

    def limits(setting: Setting, value: float, population: int) -> SubsetError:
        rises = setting.losses_at(setting.theta + setting.along[name][0]) - setting.losses
        above = by_influences(value, parts(setting, rises, value), population)
        crossed, halves = torch.zeros_like(rises), groups(setting.count, setting.seed, 2)
        for own, other in (halves, halves[::-1]):
            half, rest = setting.part(own), setting.part(other)
            compute(half)
            crossed[other] = rest.losses_at(setting.theta + half.along[name][0]) - rest.losses
        scale = 100 / (1 + float(setting.losses.mean())) if name.startswith("box") else 1.0
        lower = scale * float(crossed.mean())
        below = by_influences(lower, parts(setting, crossed, lower), population)
        low = max(0.0, min(below.low, value))
        return SubsetError((above.high - low) / (2 * 1.96), low, above.high)

    return Sampling("bracket", limits=limits, cost="the measure once more")


# ---------------------------------------------------------------- predictions for T: θ → Tθ (mathematics 7.1)


def _numbers(transformed: Transformed) -> dict[str, float] | None:
    """The factor of every parameter tensor, if the function stays and each is one number."""
    factors = transformed.certificate.factors
    if factors is None or transformed.certificate.scale != 1.0:
        return None
    if any(isinstance(factor, Tensor) and factor.numel() > 1 for factor in factors.values()):
        return None
    return {name: float(factor) for name, factor in factors.items()}


def _predicted_trace(setting: Setting, transformed: Transformed) -> float | None:
    """Σ_l Tr H_ll/τ_l²."""
    factors, traces = _numbers(transformed), setting.traces
    if factors is None or not traces.layers:
        return None
    return sum(float(values.mean()) / factors[name] ** 2 for name, values in traces.layers.items())


def _predicted_mean_eigenvalue(setting: Setting, transformed: Transformed) -> float | None:
    value = _predicted_trace(setting, transformed)
    return None if value is None else value / setting.problem.size


def _times_scale(compute: Compute) -> Callable[[Setting, Transformed], float | None]:
    """A quantity of the outputs that is proportional to them."""
    return lambda setting, transformed: compute(setting).value * transformed.certificate.scale


def _predicted_paths(setting: Setting, transformed: Transformed) -> float | None:
    """Biases are scaled with the paths that they start; a map of the inputs changes where paths start."""
    return None if transformed.inputs is not None else _path_norm(setting).value * transformed.certificate.scale


def _predicted_norm(setting: Setting, transformed: Transformed) -> float | None:
    factors = transformed.certificate.factors
    if factors is None or not transformed.linear:
        return None
    squares = 0.0
    for name, tensor in setting.problem.params.items():
        factor = torch.as_tensor(factors[name], dtype=torch.float64)
        squares += float((factor * tensor.double().cpu()).square().sum())
    return math.sqrt(squares)


# ---------------------------------------------------------------- curvature


@_register(
    "trace",
    "sum of the eigenvalues of the Hessian",
    "Tr H",
    "paper A, section 3; paper C",
    cost="backward",
    sampling=_mean_of(lambda setting: setting.traces.values),
    predict=_predicted_trace,
)
def _trace(setting: Setting) -> Estimate:
    return setting.traces.mean()


@_register(
    "mean_eigenvalue",
    "mean eigenvalue of the Hessian",
    "Tr H / P",
    "paper C",
    cost="backward",
    sampling=_mean_of(lambda setting: setting.traces.values / setting.problem.size),
    predict=_predicted_mean_eigenvalue,
)
def _mean_eigenvalue(setting: Setting) -> Estimate:
    return setting.traces.mean().scaled(1 / setting.problem.size)


def _register_end(name: str, get: Callable[[_Ends], Estimate], meaning: str, formula: str, **fields: Any) -> None:
    def predict(setting: Setting, transformed: Transformed) -> float | None:
        after = setting.spectrum_after(transformed)
        found = None if after is None else get(after)
        # nothing is predicted from an open iteration, nor a ratio from a value that may be 0
        known = found is not None and found.status != "not converged" and found.sign
        return found.value if found is not None and known else None

    add = _register(name, meaning, formula, "paper C", cost="matvecs", predict=predict, **fields)
    add(lambda setting: get(setting.spectrum))


_register_end(
    "spectral_norm",
    lambda ends: ends.norm,
    "largest absolute eigenvalue of the Hessian",
    "max |λ|",
    sampling=_end_sampling(lambda setting: setting.spectrum, "magnitude"),
)
_register_end(
    "largest_eigenvalue",
    lambda ends: ends.largest,
    "largest eigenvalue (paper C's 'spectral norm')",
    "λ₁",
    keeps_sign=True,
    sampling=_end_sampling(lambda setting: setting.spectrum, "largest"),
)
_register_end(
    "smallest_eigenvalue",
    lambda ends: ends.smallest,
    "smallest eigenvalue of the Hessian, negative off a minimum",
    "λ_P",
    direction="flatter",
    keeps_sign=True,
    sampling=_not_known("an eigenvector of the smallest one fits the noise of a subset: the interval would not hold"),
)
_register_end(
    "frobenius_norm",
    lambda ends: ends.frobenius,
    "Frobenius norm of the Hessian",
    "√Tr(H²)",
    sampling=_norm_sampling(lambda setting: 0.5 / setting.spectrum.frobenius.value),
)


@_register(
    "mean_square_eigenvalue",
    "mean square of the eigenvalues (what paper C prints as 'Frobenius norm')",
    "Tr(H²)/P",
    "paper C",
    cost="matvecs",
    sampling=_norm_sampling(lambda setting: 1 / setting.problem.size),
)
def _mean_square_eigenvalue(setting: Setting) -> Estimate:
    norm, size = setting.spectrum.frobenius, setting.problem.size
    error = 2 * norm.value * norm.stderr / size
    return dataclasses.replace(norm, value=norm.value**2 / size, stderr=error, power=1.0)


@_register(
    "log_volume",
    f"log of the product of those of the {_TOP} largest eigenvalues that are positive beyond rounding",
    "Σ_{i≤k} log λ_i",
    "Wu, Zhu & E 2017, arXiv:1706.10239",
    cost="matvecs",
    sampling=_not_known("small eigenvalues of a subset are not those of all data: the interval would not hold"),
)
def _log_volume(setting: Setting) -> Estimate:
    """A logarithm needs a relative accuracy of every value, where eigenvalues promise one relative to the largest."""
    op, size, unit = setting.hessian, setting.problem.size, torch.finfo(setting.problem.dtype).eps
    tol, finest, matvecs = 1e-4, 32 * unit, 0
    while True:
        found = eigenvalues(op, min(_TOP, size), tol=tol, vectors=False, seed=setting.seed)
        matvecs += found.matvecs
        largest = float(found.values.abs().max())
        noise = unit * size * largest
        counted = found.values > noise
        values, residuals = found.values[counted].double(), found.residuals[counted].double()
        if not len(values):
            raise InputError("log_volume: none of the largest eigenvalues is positive.")
        open_ones = int((residuals > _RESOLVED * values).sum())
        if not open_ones or not found.converged or tol <= finest:
            break
        tol = max(finest, min(tol / 10, _RESOLVED * float(values.min()) / largest))
    reasons = [] if found.converged else [found.reason]
    if found.converged and open_ones:
        reasons.append(f"{open_ones} of {len(values)} eigenvalues are not known to {_RESOLVED:.1%} of themselves")
    lost = int((found.values.abs() <= noise).sum())
    if lost:
        reasons.append(f"{lost} of {len(found.values)} cannot be told from zero in this precision and are left out")
    tolerance = float((residuals / values).sum())  # of the sum of the logarithms, to first order
    if reasons:
        status, tolerance = "not converged", 0.0
    else:
        status = "converged"
    return Estimate(
        float(values.log().sum()),
        matvecs=matvecs,
        seed=setting.seed,
        reason="; ".join(reasons),
        tolerance=tolerance,
        status=status,
    )


def _quadratics(setting: Setting, direction: Params) -> Tensor:
    """vᵀGₙv of every sample, G the Gauss-Newton matrix: one forward-mode pass."""
    problem, found = setting.problem, []
    with problem.active():
        for inputs, targets in setting.each():
            outputs, slope = outputs_along(problem, direction, problem.params, inputs)
            found.append(problem.loss.quadratic(outputs, targets, slope).double().cpu())
    return torch.cat(found)


def _fisher_trace_values(setting: Setting) -> Tensor:
    if setting.traces.method == "exact":
        return setting.traces.values
    return torch.stack([_quadratics(setting, setting.split(v)) for v in _signs(setting)]).mean(0)


@_register(
    "fisher_trace",
    "trace of the Fisher matrix under the model's own labels, which is the Gauss-Newton matrix",
    "E_x E_{c~S} ‖∇ℓ(θ; x, c)‖² = Tr GGN",
    "Golatkar, Achille & Soatto 2019, arXiv:1905.13277",
    cost="backward",
    sampling=_mean_of(_fisher_trace_values, "8 forward-mode passes unless exact"),
    predict=lambda setting, transformed: (
        _predicted_trace(setting, transformed) if setting.traces.method == "exact" else None
    ),
)
def _fisher_trace(setting: Setting) -> Estimate:
    if setting.traces.method == "exact":  # there Tr H = Tr GGN (mathematics 4.2)
        return setting.traces.mean()
    return operator_trace(setting.gauss_newton, probes=_probes(setting.problem.size), seed=setting.seed)


def _empirical_fisher_values(setting: Setting) -> Tensor:
    if "empirical_fisher_trace" in setting.kept:
        return setting.kept["empirical_fisher_trace"]
    problem, rows = setting.problem, []
    with problem.active():
        for inputs, targets in setting.each():
            here = functools.partial(lambda batch, params: problem.losses(params, *batch), (inputs, targets))
            slopes = [along(here, problem.params, setting.split(v))[1] for v in _signs(setting)]
            rows.append(torch.stack(slopes, 1).detach().double().square().mean(1).cpu())
    return torch.cat(rows)


@_register(
    "empirical_fisher_trace",
    "mean square norm of the per-sample gradients, true labels",
    "E ‖∇ℓ(θ; x, y)‖²",
    "Golatkar, Achille & Soatto 2019, arXiv:1905.13277",
    cost="backward",
    sampling=_mean_of(_empirical_fisher_values, "8 forward-mode passes unless exact", _MORE),
)
def _empirical_fisher_trace(setting: Setting) -> Estimate:
    problem = setting.problem
    if setting.structure.failure or not problem.loss.closed_form:
        fisher = empirical_fisher(setting.model, setting.data, **setting.options)
        return operator_trace(fisher, probes=_probes(setting.problem.size), seed=setting.seed)
    values = []
    with problem.active():
        inputs, _ = problem.place(*setting.batches.first(3))
        norms = GradientNorms(problem, inputs, setting.structure, 1)
        for inputs, targets in setting.each():
            recording = norms.record(inputs)
            outputs = recording.outputs.detach()
            slope = problem.loss.gradient(outputs, targets).reshape(outputs.shape)
            size = slope.reshape(len(targets), -1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
            unit = slope / size.reshape(-1, *[1] * (slope.ndim - 1))  # vectors of order 1 keep all digits
            (found,) = recording.squared_norms([unit], last=True)
            values.append(size.square().cpu() * sum(square.detach().double().cpu() for square in found.values()))
    setting.kept["empirical_fisher_trace"] = torch.cat(values)
    return Estimate(float(torch.cat(values).mean()), matvecs=1, seed=setting.seed)


# ---------------------------------------------------------------- curvature in the network's own units


@_register(
    "fisher_rao_norm",
    "length of the parameters in the Fisher metric",
    "θᵀFθ, F the Gauss-Newton matrix",
    "Liang, Poggio, Rakhlin & Stokes 2019, arXiv:1711.01530",
    cost="backward",
    sampling=_kept("fisher_rao_norm"),
    invariant_to=_DIAGONAL,
)
def _fisher_rao_norm(setting: Setting) -> Estimate:
    values = _quadratics(setting, setting.problem.params)
    setting.kept["fisher_rao_norm"] = values
    return Estimate(float(values.mean()), matvecs=1, seed=setting.seed)


def _layer_norms(setting: Setting) -> Tensor:
    """‖w_l‖ of the tensor that each parameter belongs to, (P,)."""
    return torch.cat([tensor.norm().expand(tensor.numel()) for tensor in setting.problem.params.values()])


def _in_layer_norms(setting: Setting) -> Operator:
    """N H N with N = blockdiag(‖w_l‖ I)."""
    op, size = setting.hessian, _layer_norms(setting)[:, None]
    return Operator(
        lambda block: size * (op @ (size * block)), op.size, dtype=op.dtype, device=op.device, shapes=op.shapes
    )


def _layer_scaled_values(setting: Setting) -> Tensor:
    traces = setting.traces
    if not traces.layers or not traces.exact:
        return setting.forms(*(_layer_norms(setting) * v for v in _signs(setting))).mean(1)
    squares = {name: float(tensor.double().square().sum()) for name, tensor in setting.problem.params.items()}
    return torch.stack([squares[name] * values for name, values in traces.layers.items()]).sum(0)


@_register(
    "layer_scaled_trace",
    "trace with every tensor in units of its own norm",
    "Σ_l ‖w_l‖² Tr H_ll",
    "from H(Tθ) = T⁻¹H(θ)T⁻¹; mathematics 7.1",
    cost="backward",
    sampling=_mean_of(_layer_scaled_values, "32 forward passes unless exact"),
    invariant_to=_BY_TENSOR,
)
def _layer_scaled_trace(setting: Setting) -> Estimate:
    traces = setting.traces
    if not traces.layers or not traces.exact:
        return operator_trace(_in_layer_norms(setting), probes=_probes(setting.problem.size), seed=setting.seed)
    return Estimate(float(_layer_scaled_values(setting).mean()), matvecs=traces.matvecs, seed=setting.seed)


@_register(
    "quotient_norm",
    "spectral norm of the Hessian with every tensor in units of its own norm",
    "‖N H N‖₂, N = blockdiag(‖w_l‖ I)",
    "Rangamani, Nguyen, Kumar, Phan, Chin & Tran 2019, arXiv:1902.02434",
    cost="matvecs",
    sampling=_end_sampling(lambda setting: setting.quotient, "magnitude", in_norms=True),
    invariant_to=_BY_TENSOR,
)
def _quotient_norm(setting: Setting) -> Estimate:
    return setting.quotient.norm


@_register(
    "relative_flatness",
    "curvature of the last layer relative to its weights",
    "Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}, w_s the rows of the last layer's weight",
    "Petzka, Kamp, Adilova, Sminchisescu & Boley 2021, arXiv:2001.00939",
    cost="forward",
    sampling=_mean_of(
        lambda setting: _flatness_values(setting, [setting.last.weight]), "32 forward passes unless exact"
    ),
    invariant_to=_BY_TENSOR | {"fold_batchnorm"},
)
def _relative_flatness(setting: Setting) -> Estimate:
    last = setting.last
    if last.weight not in setting.problem.params:
        why = "frozen; set its requires_grad" if last.weight else "computed from other parameters (weight norm?)"
        raise InputError(f"relative_flatness is about the last layer, and the weight of {last.name!r} is {why}.")
    return _relative_flatness_of(setting, [last.weight])


@_register(
    "relative_flatness_sum",
    "relative flatness of all trainable linear layers and convolutions, added up",
    "Σ_l Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}",
    "Petzka, Kamp, Adilova, Sminchisescu & Boley 2021, arXiv:2001.00939",
    cost="backward",
    sampling=_mean_of(lambda setting: _flatness_values(setting, setting.layers), "32 forward passes unless exact"),
    invariant_to=_BY_TENSOR | {"fold_batchnorm"},
)
def _relative_flatness_sum(setting: Setting) -> Estimate:
    return _relative_flatness_of(setting, setting.layers)


def _flatness_values(setting: Setting, weights: list[str]) -> Tensor:
    """What every sample adds: exactly, or along some of the probes."""
    key = " ".join(weights)
    return setting.kept[key] if key in setting.kept else setting.forms(*setting.along[key]).mean(1)


def _relative_flatness_of(setting: Setting, weights: list[str]) -> Estimate:
    """Exact where the outputs are of degree 1 in each of these weights: there the blocks of H and GGN are the same.

    Elsewhere from probes v_l = (W_l g) zᵀ with sign vectors g, z: E vᵀHv = Σ_l Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}. The
    groups of a convolution are layers of their own, side by side.
    """
    degrees = setting.structure.degrees  # none if the network cannot be traced
    if setting.problem.loss.closed_form and all(degrees.get(name, 2) <= 1 for name in weights):
        blocks = setting.blocks if weights is setting.layers else _blocks(setting, weights)
        values = torch.stack([block.relative for block in blocks.values()]).sum(0)
        setting.kept[" ".join(weights)] = values
        return Estimate(float(values.mean()), seed=setting.seed)
    op, draws, vectors = setting.hessian, [], []
    params = setting.problem.params
    for index in range(_PROBES):
        generator = setting.generator(index, 5)
        parts = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in params.items()}
        for name in weights:
            rows, vector = (_matrices(setting.owners[name], tensor[name]) for tensor in (params, parts))
            shape = (2, len(rows), rows[0, 0].numel())
            signs = torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).to(rows)
            columns = rows.flatten(2) @ signs[0][:, :, None]
            vector += (columns * signs[1][:, None]).reshape(rows.shape)  # a view of what it fills
        probe = torch.cat([parts[name].reshape(-1) for name in op.names])
        draws.append(float(probe.double() @ (op @ probe).double()))
        vectors.append(probe)
    setting.along[" ".join(weights)] = vectors[:_SHARED]
    return Estimate.from_draws(torch.tensor(draws, dtype=torch.float64), seed=setting.seed)


@_register(
    "normalised_sharpness",
    "sharpness of the weights after the best scaling of every output and input channel",
    "Σ_l min_{r,c>0} Σ_{ij} [h_ij r_i²c_j² + W_ij²/(r_i²c_j²)], h the diagonal of the Gauss-Newton matrix, i and j the "
    "channels of layer l, or of one of its groups",
    "Tsuzuku, Sato & Sugiyama 2020, arXiv:1901.04653",
    cost="backward",
    sampling=_not_known("the best scaling of a subset is not that of all data: the interval would not hold"),
    invariant_to=_SAME,
)
def _normalised_sharpness(setting: Setting) -> Estimate:
    """Over the weights of linear layers and convolutions; no further constant factor.

    Rows are output channels and columns input channels, in a grouped convolution those of each group by themselves: an
    index within a group is another channel in the next, which a rescaling of the network scales by itself. h is the
    diagonal of H itself for ReLU networks (mathematics 4.2), and unlike it never negative elsewhere.
    """
    total, left, open_ones = 0.0, 0.0, []
    for name in setting.layers:
        owner, weight = setting.owners[name], setting.problem.params[name].double()
        sums = [_matrices(owner, tensor).sum(3) for tensor in (setting.blocks[name].diagonal, weight.square())]
        found = [_balanced(h, w) for h, w in zip(*sums, strict=True)]
        total, left = total + sum(value for value, _, _ in found), left + sum(rest for _, rest, _ in found)
        if not all(converged for _, _, converged in found):
            open_ones.append(name)
    if open_ones:
        reason = f"the scalings of {', '.join(open_ones)} still move"
        return Estimate(total, seed=setting.seed, reason=reason, status="not converged")
    return Estimate(total, seed=setting.seed, tolerance=left, status="converged")


def _balanced(h: Tensor, w: Tensor, steps: int = 2000, tol: float = 1e-9) -> tuple[float, float, bool]:
    """Minimum over a, b > 0 of Σ_ij h_ij a_i b_j + w_ij/(a_i b_j), convex in the logarithms: alternating forms.

    Steps gain less and less, in the end by a constant factor: what is left to gain is the rest of that series, the
    second number. The third says whether a step gained as little as `tol`.
    """
    for _ in range(3):  # a row without h or without w can be scaled away
        rows, columns = (h.sum(1) > 0) & (w.sum(1) > 0), (h.sum(0) > 0) & (w.sum(0) > 0)
        h, w = h[rows][:, columns], w[rows][:, columns]
    if not h.numel():
        return 0.0, 0.0, True
    b = torch.ones(h.shape[1], dtype=torch.float64, device=h.device)
    before, last = math.inf, math.inf
    for _ in range(steps):
        a = ((w @ (1 / b)) / (h @ b)).sqrt()
        b = (((1 / a) @ w) / (a @ h)).sqrt()
        value = float(a @ h @ b + (1 / a) @ w @ (1 / b))
        gain = before - value
        if gain <= tol * value:
            rate = min(gain / last, 0.999) if 0 < gain < last < math.inf else 0.5
            return value, max(gain, 0.0) * rate / (1 - rate) + torch.finfo(torch.float64).eps * value, True
        before, last = value, gain
    return before, math.nan, False


# ---------------------------------------------------------------- perturbations


def _ascent(setting: Setting, name: str, unit: Tensor, radius: float, norm: float) -> Estimate:
    """Maximum of L(θ + unit∘u) − L over ‖u‖ ≤ radius: projected ascent along the unit gradient, the best point seen.

    `norm` is 2 or infinity. At most 20 steps, until one gains less than 0.01 %. The iteration knows only u, so scaling
    θ and `unit` alike changes no step.
    """
    base, slope = setting.start

    def uphill(gradient: Tensor) -> Tensor:
        moved = unit * gradient
        if norm == math.inf:
            return radius * moved.sign()
        return moved * (radius / length(moved))

    def length(moved: Tensor) -> float:  # in float64: the squares of a fitted network's gradient leave float32
        return max(float(torch.linalg.vector_norm(moved, dtype=torch.float64)), torch.finfo(moved.dtype).tiny)

    step = uphill(slope)
    if not bool(step.any()):  # a critical point: any direction will do
        step = uphill(setting.normal(0, 7) / unit.clamp_min(torch.finfo(unit.dtype).tiny) * (unit > 0))
    u, best, gradients, where = step, 0.0, 1, step
    for _ in range(_STEPS):
        gradients += 1
        value, gradient = setting.gradient_at(setting.theta + unit * u)
        if 0 < value - base <= best * (1 + _GAIN):
            break
        if value - base > best:
            best, where = value - base, u
        moved = u + uphill(gradient)
        u = moved.clamp(-radius, radius) if norm == math.inf else moved * min(1.0, radius / length(moved))
    else:
        value = setting.loss_at(setting.theta + unit * u)
    if value - base > best:
        best, where = value - base, u
    setting.along[name] = [unit * where]
    return Estimate(best, matvecs=gradients, seed=setting.seed, status="lower bound")


@_register(
    "ball_sharpness",
    "largest rise of the loss within a ball that 20 steps of projected ascent find",
    "max_{‖δ‖₂≤ρ} L(θ+δ) − L, ρ = 0.05",
    "Foret, Kleiner, Mobahi & Neyshabur 2021, arXiv:2010.01412",
    cost="optimiser",
    sampling=_bracket("ball_sharpness", lambda setting: _ball_sharpness(setting)),
)
def _ball_sharpness(setting: Setting) -> Estimate:
    return _ascent(setting, "ball_sharpness", torch.ones_like(setting.theta), 0.05, 2)


@_register(
    "adaptive_sharpness_l2",
    "largest rise of the loss within an ellipsoid of axes ρ|θ_i| that 20 steps of projected ascent find",
    "max_{‖δ/|θ|‖₂≤ρ} L(θ+δ) − L, ρ = 0.5",
    "Kwon, Kim, Park & Choi 2021, arXiv:2102.11600",
    cost="optimiser",
    sampling=_bracket("adaptive_sharpness_l2", lambda setting: _adaptive_sharpness_l2(setting)),
    invariant_to=_DIAGONAL,
)
def _adaptive_sharpness_l2(setting: Setting) -> Estimate:
    return _ascent(setting, "adaptive_sharpness_l2", setting.theta.abs(), 0.5, 2)


@_register(
    "adaptive_sharpness_linf",
    "largest rise of the loss when every weight may move by 1 % that 20 steps of projected ascent find",
    "max_{|δ_i|≤ρ|θ_i|} L(θ+δ) − L, ρ = 0.01",
    "Kwon et al. 2021, arXiv:2102.11600; Andriushchenko et al. 2023, arXiv:2302.07011",
    cost="optimiser",
    sampling=_bracket("adaptive_sharpness_linf", lambda setting: _adaptive_sharpness_linf(setting)),
    invariant_to=_DIAGONAL,
)
def _adaptive_sharpness_linf(setting: Setting) -> Estimate:
    return _ascent(setting, "adaptive_sharpness_linf", setting.theta.abs(), 0.01, math.inf)


def _average(setting: Setting, spread: Tensor | float, purpose: int) -> Estimate:
    """E L(θ+δ) − L, δ = spread∘z, over normal z, each with its mirror image, which cancels the slope."""
    base, rises = setting.losses, torch.zeros(setting.count, dtype=torch.float64)
    draws = []
    for index in range(_DRAWS):
        delta = spread * setting.normal(index, purpose)
        pair = setting.losses_at(setting.theta + delta), setting.losses_at(setting.theta - delta)
        rise = (pair[0] + pair[1]) / 2 - base
        rises += rise / _DRAWS
        draws.append(float(rise.mean()))
    setting.kept[f"average {purpose}"] = rises
    return Estimate.from_draws(torch.tensor(draws, dtype=torch.float64), matvecs=2 * _DRAWS, seed=setting.seed)


@_register(
    "average_sharpness",
    "mean rise of the loss under normal noise on the parameters",
    "E_{δ~N(0,σ²I)} L(θ+δ) − L ≈ ½σ² Tr H, σ = 0.01 the standard deviation",
    "mathematics 8.4",
    cost="forward",
    sampling=_kept("average 1", _MORE),
)
def _average_sharpness(setting: Setting) -> Estimate:
    return _average(setting, 0.01, 1)


@_register(
    "adaptive_sharpness_average",
    "mean rise of the loss when every weight gets 5 % of normal noise",
    "E L(θ+δ) − L, δ_i ~ N(0, ρ²θ_i²), ρ = 0.05",
    "Andriushchenko, Croce, Müller, Hein & Flammarion 2023, arXiv:2302.07011",
    cost="forward",
    sampling=_kept("average 2", _MORE),
    invariant_to=_DIAGONAL,
)
def _adaptive_sharpness_average(setting: Setting) -> Estimate:
    return _average(setting, 0.05 * setting.theta.abs(), 2)


def _box(setting: Setting, name: str, epsilon: float, columns: int | None) -> Estimate:
    """Bounded L-BFGS in the coordinates of the box; the best point seen, which is inside.

    It starts at the corner that the gradient points to, which is far better than a random point unless there is none.
    """
    base, slope = setting.start
    size, basis = setting.problem.size, None
    if columns is not None:
        generator = torch.Generator().manual_seed(setting.seed)
        basis = torch.linalg.qr(torch.randn(size, min(columns, size), generator=generator, dtype=torch.float64)).Q
        basis = basis.to(setting.theta)
    inner = setting.theta if basis is None else basis.T @ setting.theta
    half = epsilon * (inner.abs() + 1)
    best, evaluations, where = base, 0, torch.zeros_like(setting.theta)

    def outward(u: Tensor) -> Tensor:
        return half * u if basis is None else basis @ (half * u)

    def inward(gradient: Tensor) -> Tensor:
        return half * (gradient if basis is None else basis.T @ gradient)

    def negative(u: Any) -> tuple[float, Any]:
        nonlocal best, evaluations, where
        evaluations += 1
        delta = outward(torch.from_numpy(u).to(half))
        value, gradient = setting.gradient_at(setting.theta + delta)
        if value > best:
            best, where = value, delta
        return (base - value) / scale, -(inward(gradient).double() / scale).cpu().numpy()

    uphill, scale = inward(slope).double().cpu().numpy(), 1.0
    start = np.sign(uphill)
    if not np.any(start):
        generator = torch.Generator().manual_seed(setting.seed + 1)
        start = torch.rand(len(half), generator=generator, dtype=torch.float64).mul(2).sub(1).numpy()
        uphill = negative(start)[1]
    scale = max(float(np.abs(uphill).max()), float(torch.finfo(setting.problem.dtype).tiny))
    options = {"maxiter": 10, "maxfun": 30, "ftol": 0.0, "gtol": 0.0}
    minimize(negative, start, jac=True, bounds=Bounds(-1, 1), method="L-BFGS-B", options=options)
    setting.along[name] = [where]
    rise = 100 * (best - base) / (1 + base)
    return Estimate(rise, matvecs=evaluations, seed=setting.seed, status="lower bound")


_KESKAR = "Keskar, Mudigere, Nocedal, Smelyanskiy & Tang 2016, arXiv:1609.04836"


def _register_box(name: str, epsilon: float, columns: int | None) -> None:
    where = "" if columns is None else f" of a random subspace of {columns} dimensions"
    compute = functools.partial(_box, name=name, epsilon=epsilon, columns=columns)
    _register(
        name,
        f"largest rise of the loss within a box{where}, in percent, that bounded L-BFGS finds",
        f"100 (max_{{|y_i|≤ε(|(A⁺θ)_i|+1)}} L(θ+Ay) − L)/(1+L), ε = {epsilon:g}, "
        + ("A = I" if columns is None else f"A orthonormal with {columns} columns"),
        _KESKAR,
        cost="optimiser",
        sampling=_bracket(name, compute),
    )(compute)


_register_box("box_sharpness", 1e-3, None)
_register_box("box_sharpness_narrow", 5e-4, None)
_register_box("box_sharpness_subspace", 1e-3, 100)


def _kappa(setting: Setting) -> float:
    """100 κ."""
    return 0.5e-4 * float((setting.theta.double().abs() + 1).square().sum()) / (1 + setting.start[0])


def _box_curvature_values(setting: Setting) -> Tensor:
    """The influence on κ, by the loss, and on λ₁."""
    curvatures, end = _OF_LARGEST.values, setting.spectrum.largest.value
    assert curvatures is not None
    return _kappa(setting) * (curvatures(setting) - end * setting.losses / (1 + setting.start[0]))


_OF_LARGEST = _end_sampling(lambda setting: setting.spectrum, "largest")
_box_curvature_sampling = Sampling(
    "influence",
    _box_curvature_values,
    bias=lambda setting, population: _kappa(setting) * _OF_LARGEST.bias(setting, population),
    cost="about two products",
)


@_register(
    "box_sharpness_curvature",
    "what the largest eigenvalue allows box_sharpness to be, to second order at a critical point: an upper bound",
    "100 κλ₁, κ = ½ε² Σ(|θ_i|+1)²/(1+L), ε = 1e-3",
    "paper C, Eq. 2, in the form of mathematics 8.4",
    cost="matvecs",
    sampling=_box_curvature_sampling,
)
def _box_sharpness_curvature(setting: Setting) -> Estimate:
    return setting.spectrum.largest.scaled(_kappa(setting))


# ---------------------------------------------------------------- PAC-Bayes

_ALLOWED = 0.1  # rise of the error
_PAC_DRAWS = 10
_PAC_WIDTH = 0.0099  # of the bracket that is left of log σ


def _pac_bayes(setting: Setting, deviation: Callable[[float], Tensor | float], purpose: int) -> Estimate:
    """1/σ² on fixed draws, by doubling or halving σ until the rise is crossed and then enclosing the crossing to 1 %.

    The error follows by the delta method, from the spread of the draws and the slope of the rise in log σ over the
    first bracket. `deviation` maps σ to the standard deviation of every parameter.
    """
    base = setting.wrong_at(setting.theta)
    seen: dict[float, Tensor] = {}

    def rises(sigma: float, index: int) -> Tensor:
        return setting.wrong_at(setting.theta + deviation(sigma) * setting.normal(index, purpose)) - base

    def excess(log_sigma: float) -> float:
        """How far the mean rise is above what is allowed; never 0, so that the search ends at both of its sides."""
        sigma = math.exp(log_sigma)
        found = [rises(sigma, index).mean() for index in range(_PAC_DRAWS)]
        seen[log_sigma] = torch.stack(found)
        return float(seen[log_sigma].mean()) - _ALLOWED - 1e-9

    point = math.log(0.1)
    first = excess(point)
    step = math.log(2) if first < 0 else -math.log(2)
    for _ in range(24):
        before, point = point, point + step
        if excess(point) * first < 0:
            break
    else:
        raise InputError(
            f"the error never crosses the allowed rise of {_ALLOWED}, however {'large' if first < 0 else 'small'} the "
            "noise; the error at the model is too close to chance, or the network too fragile."
        )
    ends = sorted((before, point))  # the points themselves: point − step would round to another number
    slope = float(seen[ends[1]].mean() - seen[ends[0]].mean()) / math.log(2)
    toms748(excess, *ends, xtol=_PAC_WIDTH, rtol=1e-12, k=1)
    sigma = max(point for point, rises in seen.items() if float(rises.mean()) <= _ALLOWED + 1e-9)
    spread = float(seen[sigma].std()) / math.sqrt(_PAC_DRAWS)
    value = math.exp(-2 * sigma)
    of_samples = torch.stack([rises(math.exp(sigma), index) for index in range(_PAC_DRAWS)]).mean(0)
    setting.kept[f"pac-bayes {purpose}"] = 2 * value / slope * of_samples  # more rise, less noise allowed
    return Estimate(
        value,
        2 * value * spread / slope,
        _PAC_DRAWS - 1,
        len(seen) * _PAC_DRAWS,
        setting.seed,
        tolerance=2 * _PAC_WIDTH * value,  # the crossing lies within the bracket that is left
        status="estimated",
    )


@_register(
    "pac_bayes_flatness",
    "how little noise it takes to raise the error by 0.1",
    "1/σ², σ the largest standard deviation with E_{u~N(0,σ²I)} err(θ+u) − err(θ) ≤ 0.1",
    "Neyshabur et al. 2017, arXiv:1706.08947; Jiang et al. 2019, arXiv:1912.02178",
    cost="forward",
    sampling=_kept("pac-bayes 3"),
)
def _pac_bayes_flatness(setting: Setting) -> Estimate:
    return _pac_bayes(setting, lambda sigma: sigma, 3)


@_register(
    "pac_bayes_magnitude",
    "how little relative noise it takes to raise the error by 0.1",
    "1/σ², σ the largest with u_i ~ N(0, σ²θ_i² + ε²), E err(θ+u) − err(θ) ≤ 0.1, ε = 1e-3",
    "Jiang, Neyshabur, Mobahi, Krishnan & Bengio 2019, arXiv:1912.02178",
    cost="forward",
    sampling=_kept("pac-bayes 4"),
)
def _pac_bayes_magnitude(setting: Setting) -> Estimate:
    return _pac_bayes(setting, lambda sigma: (sigma**2 * setting.theta.square() + 1e-6).sqrt(), 4)


# ---------------------------------------------------------------- norms


@_register(
    "weight_norm",
    "length of the parameter vector",
    "‖θ‖₂",
    "Neyshabur, Bhojanapalli, McAllester & Srebro 2017, arXiv:1706.08947",
    cost="forward",
    sampling=_NO_DATA,
    direction="larger",
    predict=_predicted_norm,
)
def _weight_norm(setting: Setting) -> Estimate:
    return Estimate(float(setting.theta.double().norm()), seed=setting.seed)


_MOVED = frozenset(
    """
    expand expand_copy permute permute_copy transpose transpose_copy t t_copy squeeze squeeze_copy unsqueeze
    unsqueeze_copy slice select narrow split split_with_sizes chunk unbind cat stack index index_select roll flip repeat
    diagonal tril triu copy slice_scatter select_scatter im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d cumsum
    max amax maximum max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
    """.split()
)
"""Operations that copy, add or choose among values, so that they do the same with sums of paths."""
_RESHAPED = frozenset("view view_copy _unsafe_view reshape clone alias detach lift_fresh contiguous _to_copy".split())
_ACTIVATIONS = frozenset("relu abs neg leaky_relu _prelu_kernel threshold clamp clamp_min".split())
_MULTIPLIED = frozenset("mul mm bmm mv dot matmul linear".split())
_ADDED = frozenset("addmm addmv baddbmm".split())
_EMPTY = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
_AVERAGES = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


class _Paths(TorchDispatchMode):
    """Σ_paths Π w² of every value that the inputs reach, while the network runs: one rule for each known operation.

    The squares of a path's weights multiply and those of paths that meet add up. A value that no input reaches is a
    weight where it multiplies, and a bias, which starts paths of its own, where it is added. Positively homogeneous
    activations pass paths on as they are. Every other operation is refused: a number for it would be a guess.
    """

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, Tensor | None] = {id(inputs): torch.ones_like(inputs, dtype=torch.float64)}
        self.kept: list[Any] = [inputs]  # alive, so that no id is given twice
        self.written: dict[int, Tensor] = {}  # the same for all the memory of a tensor that was written into

    def squares(self, value: Any) -> Any:
        """The sums of squared paths that end in these entries; other arguments as they are."""
        memory = self._memory(value)
        if memory is not None:
            return memory.clone()
        if id(value) in self.known:
            return self.known[id(value)]
        return value.double().square() if isinstance(value, Tensor) and value.is_floating_point() else value

    def knows(self, value: Any) -> bool:
        """Whether the inputs reach it."""
        return id(value) in self.known or self._memory(value) is not None

    def _memory(self, value: Any) -> Tensor | None:
        """The part of `written` that a tensor sees."""
        if not self.written or not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        memory = self.written.get(value.untyped_storage().data_ptr())
        return None if memory is None else memory.as_strided(value.shape, value.stride(), value.storage_offset())

    def _write(self, target: Tensor, source: Tensor) -> None:
        """A tensor is written into, below what `functionalize` sees: all that shares its memory changes with it."""
        storage, new = target.untyped_storage(), self.squares(_as_tensor(source, target))

        def seen_by(value: Tensor) -> Tensor:
            return self.written[storage.data_ptr()].as_strided(value.shape, value.stride(), value.storage_offset())

        if storage.data_ptr() not in self.written:
            everything = torch.empty(0, dtype=target.dtype, device=target.device).set_(storage)
            self.written[storage.data_ptr()] = everything.double().square()
            for value in self.kept:
                known = self.known.get(id(value))
                if known is not None and value.untyped_storage().data_ptr() == storage.data_ptr():
                    seen_by(value).copy_(known)
            self.kept.append(target)
        seen_by(target).copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        reached = [leaf for leaf in tree_leaves((args, kwargs)) if self.knows(leaf)]
        if not reached or name in _EMPTY:
            return result
        if name == "copy_":
            self._write(*args[:2])
            return result
        values, found = tree_leaves(result), None
        if all(self.known.get(id(leaf), leaf) is not None for leaf in reached):
            found = self._rule(name, func, args, kwargs, result)
        elif not any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
            found = values  # indices, made from others
        if found is None:
            raise InputError(
                f"path_norm is defined for ReLU networks only: it has no rule for the operation '{name}' in the form "
                "that this network uses."
            )
        for value, squares in zip(values, tree_leaves(found), strict=True):
            # None for a choice that depends on the inputs, such as the places of a max pooling: nothing may use it
            self.known[id(value)] = squares if value.is_floating_point() else None
            self.kept.append(value)
        return result

    def _rule(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The sums of paths behind an operation, None where no rule is known."""
        squares = self.squares
        if name in _MOVED:
            constants = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and not self.knows(leaf)]
            if name in ("max", "maximum") and any(bool(constant.any()) for constant in constants):
                return None  # a clip, not homogeneous
            if "index" not in name and not all(constant.is_floating_point() for constant in constants):
                return None
            return func(*tree_map(squares, args), **tree_map(squares, kwargs))
        if name in _RESHAPED:
            return squares(args[0]).reshape(result.shape).to(result.device) if result.is_floating_point() else None
        if name in _ACTIVATIONS:
            return squares(args[0]) if _is_homogeneous(name, args, kwargs) else None
        if name in ("add", "sub", "rsub"):
            first, second = (squares(_as_tensor(argument, result)) for argument in args[:2])
            alpha = kwargs.get("alpha", args[2] if len(args) > 2 else 1) ** 2
            return first * alpha + second if name == "rsub" else first + second * alpha
        if name == "sum":
            return func(squares(args[0]), *args[1:], **{**kwargs, "dtype": torch.float64})
        if name == "mean":
            averaged = args[0].numel() / max(1, result.numel())
            return func(squares(args[0]), *args[1:], **{**kwargs, "dtype": torch.float64}) / averaged
        if name == "constant_pad_nd":
            value = args[2] if len(args) > 2 else kwargs.get("value", 0)
            return func(squares(args[0]), args[1], value**2)
        if name in _MULTIPLIED | _ADDED | {"div", "convolution"}:
            return self._product(name, func, args, kwargs, result)
        if name in ("avg_pool2d", "avg_pool3d"):
            options = dict(zip(_AVERAGES, args[1:], strict=False)) | kwargs
            ones = torch.ones_like(squares(args[0]))
            divisor = func(ones, **{**options, "divisor_override": 1}) / func(ones, **options)
            return func(squares(args[0]), **options) / divisor
        if name in ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"):
            pooled = func(squares(args[0]), args[1])
            for dim in range(-len(args[1]), 0):
                size, cells = args[0].shape[dim], torch.arange(result.shape[dim], device=result.device)
                ends = -(-(cells + 1) * size // len(cells))
                widths = ends - cells * size // len(cells)
                pooled = pooled / widths.reshape(-1, *[1] * (-1 - dim))
            return pooled
        return None

    def _product(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Of a value with weights, plus a bias; a product of two values that the inputs reach has no paths."""
        factors = args[1:3] if name in _ADDED else args[:2]
        if all(self.knows(factor) for factor in factors) or kwargs.get("rounding_mode"):
            return None
        if name in ("mul", "div"):
            first, second = (self.squares(_as_tensor(argument, result)) for argument in args[:2])
            if name == "mul":
                return first * second
            return None if self.knows(args[1]) else first / second
        scales = {key: number**2 for key, number in kwargs.items()}  # alpha and beta
        return func(*(self.squares(argument) for argument in args), **scales)


def _as_tensor(argument: Any, like: Tensor) -> Tensor:
    """A number, or a tensor of integers, as a tensor of floats, so that it is squared like one."""
    if isinstance(argument, Tensor):
        return argument if argument.is_floating_point() else argument.double()
    return torch.tensor(float(argument), dtype=torch.float64, device=like.device)


def _is_homogeneous(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an activation f has f(cx) = c f(x) for c > 0, and no slope above 1."""
    options = [option for option in (*args[1:], *kwargs.values()) if option is not None]
    if name in ("leaky_relu", "_prelu_kernel"):
        return all(bool(torch.as_tensor(slope).abs().le(1).all()) for slope in options)
    one_bound = not name.startswith("clamp") or len(options) == 1
    return one_bound and all(isinstance(bound, int | float) and bound == 0 for bound in options)


@_register(
    "path_norm",
    "root of the summed squares of the weights' products along all paths, biases start paths too",
    "√Σ_paths Π w²",
    "Neyshabur, Bhojanapalli, McAllester & Srebro 2017, arXiv:1706.08947",
    cost="forward",
    sampling=_NO_DATA,
    direction="larger",
    invariant_to=_SAME,
    predict=_predicted_paths,
)
def _path_norm(setting: Setting) -> Estimate:
    """Batch norm folded first; `_Paths` has the rules. Max pooling passes on the largest of its sums of paths."""
    folded = setting.folded
    problem = folded.problem
    inputs, _ = problem.place(*folded.batches.first(1))
    if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
        raise InputError("path_norm needs inputs that are one tensor of floats.")
    paths = _Paths(inputs)
    # what is written in place becomes an operation of its own; layer norm keeps its name
    forward = functionalize(lambda inputs: problem.outputs(problem.params, inputs))
    try:
        with problem.active(), torch.no_grad(), torch._C.DisableTorchFunction(), paths:
            outputs = forward(inputs)
    except RuntimeError as error:
        first = first_line(error)
        raise InputError(f"path_norm follows the operations of the network, which fails: {first}.") from error
    if not paths.knows(outputs):
        raise InputError("path_norm: no path leads from the inputs to the outputs.")
    return Estimate(math.sqrt(float(paths.squares(outputs).sum())), seed=setting.seed)


# ---------------------------------------------------------------- margins


def _logit_values(function: Callable[..., Tensor], labelled: bool) -> Callable[[Setting], Tensor]:
    def values(setting: Setting) -> Tensor:
        inputs, logits, labels = setting.logits
        found: Tensor = function(inputs, logits, labels) if labelled else function(inputs, logits)
        return found

    return values


def _mean_over_samples(function: Callable[..., Tensor], labelled: bool) -> Compute:
    values = _logit_values(function, labelled)
    return lambda setting: Estimate(float(values(setting).mean()), seed=setting.seed)


_register(
    "mean_aceht",
    "mean affine cross-entropy Hessian trace",
    "E (‖x‖²+1)(1−ΣS²)",
    "paper A, Proposition 3.1",
    cost="forward",
    sampling=_mean_of(_logit_values(aceht, False)),
    invariant_to=_SAME,
)(_mean_over_samples(aceht, False))
_register(
    "margin_bound",
    "mean upper bound of ACEHT by the softmax margin γ",
    "E (‖x‖²+1)(1−γ²)",
    "paper A, section 3.2, in the form of mathematics 3.2",
    cost="forward",
    sampling=_mean_of(_logit_values(margin_bound, True)),
    invariant_to=_SAME,
)(_mean_over_samples(margin_bound, True))
_register(
    "printed_margin_bound",
    "the margin bound as printed, in truth a lower bound of ACEHT; for comparison only",
    "E ‖x‖(1−γ²)",
    "paper A, section 3.2",
    cost="forward",
    sampling=_mean_of(_logit_values(printed_margin_bound, True)),
    invariant_to=_SAME,
)(_mean_over_samples(printed_margin_bound, True))


def _statistic(function: Callable[[Tensor], float]) -> Compute:
    return lambda setting: Estimate(function(setting.margins.signed), seed=setting.seed)


def _quantile(share: float) -> Callable[[Tensor], float]:
    def compute(values: Tensor) -> float:
        with np.errstate(invalid="ignore"):
            found = float(np.quantile(values.double().cpu().numpy(), share))
        if math.isnan(found):
            raise InputError(
                f"the {share:.0%} quantile lies among infinite distances: no boundary is in sight of these samples, as "
                "the outputs do not change with what the distance is measured in."
            )
        return found

    return compute


def _signed(setting: Setting) -> Tensor:
    return setting.margins.signed


def _register_margin(name: str, meaning: str, formula: str, function: Callable[[Tensor], float], **more: Any) -> None:
    compute = _statistic(function)
    more.setdefault("invariant_to", _SAME)
    more.setdefault("predict", _times_scale(compute))
    _register(name, meaning, formula, "paper A, section 4", cost="forward", direction="wider", **more)(compute)


_register_margin(
    "margin_mean",
    "mean output margin",
    "E Δ, Δ = φ_y − max_{j≠y} φ_j",
    lambda v: float(v.mean()),
    sampling=_mean_of(_signed),
)
_register_margin(
    "margin_min",
    "smallest output margin",
    "min Δ",
    lambda v: float(v.min()),
    sampling=_not_known("a sample that was not measured may have a smaller margin, by any amount"),
)
for _share in (0.1, 0.25, 0.5, 0.75, 0.9):
    _register_margin(
        f"margin_q{round(100 * _share)}",
        f"{_share:.0%} quantile of the output margins",
        f"Q_{_share:g}(Δ)",
        _quantile(_share),
        sampling=_quantile_of(_signed, _share),
    )
_register_margin(
    "margin_skewness",
    "standardised skewness of the output margins",
    "E ((Δ−μ)/σ)³",
    skewness,
    invariant_to=_SAME | _SCALED,
    predict=None,
    sampling=_not_known("rare samples decide the skewness, and a subset may miss them: the interval would not hold"),
)


def _distance(setting: Setting, norm: int | str) -> Estimate:
    return Estimate(_quantile(0.5)(setting.distances(norm)), seed=setting.seed)


_ELSAYED = "Elsayed, Krishnan, Mobahi, Regan & Bengio 2018, arXiv:1803.05598"
_register(
    "input_distance",
    "median linearised distance of the inputs to the decision boundary, Euclidean",
    "median of min_{j≠y} (φ_y−φ_j)/‖∇_x(φ_y−φ_j)‖₂",
    _ELSAYED,
    cost="backward",
    sampling=_quantile_of(lambda setting: setting.distances(2), 0.5),
    direction="wider",
    invariant_to=_SAME | _SCALED,
)(functools.partial(_distance, norm=2))
_register(
    "input_distance_inf",
    "median linearised distance of the inputs to the decision boundary, maximum norm",
    "median of min_{j≠y} (φ_y−φ_j)/‖∇_x(φ_y−φ_j)‖₁",
    _ELSAYED,
    cost="backward",
    sampling=_quantile_of(lambda setting: setting.distances("inf"), 0.5),
    direction="wider",
    invariant_to=_SAME | _SCALED,
)(functools.partial(_distance, norm="inf"))


def _hidden(setting: Setting, lower: float, upper: float) -> Estimate:
    """lower·Q1 + upper·Q3 of the hidden margins, or their median where both are 0."""
    found = setting.hidden
    assert found.distance is not None
    values = found.distance / found.spread
    if lower == upper == 0:
        return Estimate(_quantile(0.5)(values), seed=setting.seed)
    value = (lower * _quantile(0.25)(values) if lower else 0.0) + (upper * _quantile(0.75)(values) if upper else 0.0)
    return Estimate(value, seed=setting.seed)


for _name, _meaning, _formula, _lower, _upper in (
    ("median", "median", "Q2", 0.0, 0.0),
    ("q1", "first quartile", "Q1", 1.0, 0.0),
    ("q3", "third quartile", "Q3", 0.0, 1.0),
    ("low_fence", "lower fence", "Q1 − 1.5 (Q3 − Q1)", 2.5, -1.5),
    ("high_fence", "upper fence", "Q3 + 1.5 (Q3 − Q1)", -1.5, 2.5),
):
    _register(
        f"hidden_margin_{_name}",
        f"{_meaning} of the distances to the boundary at the last layer's input, in units of its spread",
        f"{_formula} of min_{{j≠y}} (φ_y−φ_j)/‖∇_h(φ_y−φ_j)‖₂ / √(total variance of h)",
        "Jiang, Krishnan, Mobahi & Bengio 2018, arXiv:1810.00113",
        cost="backward",
        sampling=_anew(),
        direction="wider",
        invariant_to=(_SAME | _SCALED) - {"rescale_channels"},
    )(functools.partial(_hidden, lower=_lower, upper=_upper))


def _operator_norms(layer: _Call, seed: int) -> tuple[Estimate, float]:
    """‖A‖_σ and ‖Aᵀ‖_{2,1} of a layer as a linear map of its real input."""
    module, weight = layer.module, layer.value.double()
    if isinstance(module, nn.Linear):
        times = math.prod(layer.inputs[:-1]) / _WATCHED  # a sample's tokens, wherever their dimension is
        rows = weight.square().sum(1).sqrt().sum() * times
        return Estimate(float(torch.linalg.matrix_norm(weight, 2))), float(rows)
    shape = layer.inputs[1:]
    kernel = copy.deepcopy(module).double()
    kernel.bias = None

    def run(values: Tensor, tensor: Tensor) -> Tensor:
        return functional_call(kernel, {"weight": tensor}, (values,))

    def gram(block: Tensor) -> Tensor:
        with torch.enable_grad():
            values = block.T.reshape(-1, *shape).detach().requires_grad_()
            outputs = run(values, weight)
            (back,) = torch.autograd.grad(outputs, values, outputs.detach())
        return back.reshape(block.shape[1], -1).T

    found = spectral_norm(Operator(gram, math.prod(shape), dtype=torch.float64, device=weight.device), seed=seed)
    if module.padding_mode == "zeros":  # a row of A holds the weights that one output reads: ones add up their squares
        with torch.no_grad():
            squares = run(torch.ones(1, *shape, dtype=torch.float64, device=weight.device), weight.square())
        rows = squares.clamp_min(0).sqrt().sum()
    else:
        rows = _padded_rows(module, weight, shape[1:])
    root = math.sqrt(found.value)
    norm = dataclasses.replace(found, value=root, tolerance=found.tolerance / (2 * root) if root else 0.0)
    return norm, float(rows) * layer.inputs[0] / _WATCHED


def _padded_rows(module: Any, weight: Tensor, size: torch.Size) -> Tensor:
    """Σ‖row‖₂ of a convolution whose padding repeats entries of its input: what reads one entry twice adds up.

    With q(k) the entry that the weight w_k reads for one output, ‖row‖² = Σ_{k,l} [q(k) = q(l)] ⟨w_k, w_l⟩.
    """
    count, dims = math.prod(module.kernel_size), len(size)
    entries = torch.arange(math.prod(size), dtype=torch.float64, device=weight.device).reshape(1, 1, *size)
    padded = nn.functional.pad(entries, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    each = torch.eye(count, dtype=torch.float64, device=weight.device).reshape(count, 1, *module.kernel_size)
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[dims - 1]
    read = convolve(padded, each, stride=module.stride, dilation=module.dilation).flatten(2)[0].T.round()
    twice = (read.sort(1).values.diff(dim=1) == 0).any(1)  # outputs near the border
    flat = weight.reshape(len(weight), -1, count)
    total = flat.square().sum((1, 2)).sqrt().sum() * (~twice).sum()
    if bool(twice.any()):
        same = (read[twice, :, None] == read[twice, None, :]).flatten(1)
        patterns, times = torch.unique(same, dim=0, return_counts=True)
        products = (flat.mT @ flat).flatten(1)
        total = total + ((products @ patterns.double().T).clamp_min(0).sqrt() * times).sum()
    return total


_INPUTS = -1  # stands for the network's inputs among its layers

Wiring = dict[int, tuple[_Call, frozenset[int]]]
"""Layers by their numbers in the order in which they ran: each with what it reads, other layers or `_INPUTS`."""


def _wiring(setting: Setting) -> tuple[Wiring, frozenset[int]]:
    """The layers that the outputs depend on, and what the outputs read.

    Read off autograd's graph of a pass of a few samples, which knows what views share and what is written in place.
    """
    problem, known = setting.problem, {call.name: call for call in setting.calls}
    calls: list[_Call] = []
    marks: list[Any] = []  # a node of the graph behind every layer

    def mark(module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str) -> Tensor:
        shape = next(leaf.shape for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        output = output.clone()  # a node of its own, whatever writes into the output later
        calls.append(dataclasses.replace(known[name], inputs=shape))
        marks.append(output.grad_fn)
        return output

    handles = [
        module.register_forward_hook(functools.partial(mark, name=name), with_kwargs=True)
        for name, module in problem.model.named_modules()
        if isinstance(module, _LAYERS)
    ]
    try:
        with problem.active():
            start = resized(problem.place(*setting.batches.first(2))[0], _WATCHED).detach().requires_grad_().clone()
            outputs = problem.outputs({name: tensor.detach() for name, tensor in problem.params.items()}, start)
    finally:
        for handle in handles:
            handle.remove()
    numbers = {node: index for index, node in enumerate(marks) if node is not None} | {start.grad_fn: _INPUTS}
    ends, found = _read_by([outputs.grad_fn], numbers), Wiring()
    waiting = list(ends)
    while waiting:
        index = waiting.pop()
        if index not in found and index != _INPUTS:
            found[index] = calls[index], _read_by([node for node, _ in marks[index].next_functions], numbers)
            waiting += found[index][1]
    return dict(sorted(found.items())), ends


def _read_by(nodes: list[Any], numbers: dict[Any, int]) -> frozenset[int]:
    """The numbered nodes of autograd's graph that these are, or lead to without another one in between."""
    found, seen = set(), {None}
    while nodes:
        node = nodes.pop()
        if node in numbers:
            found.add(numbers[node])
        elif node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return frozenset(found)


def _path_complexity(wiring: Wiring, ends: frozenset[int], norms: dict[int, tuple[float, float]]) -> float:
    """R = (Σ_l (p_l ‖A_lᵀ‖_{2,1} q_l)^{2/3})^{3/2}: p and q are Π‖A‖_σ of what is before and behind, over all paths.

    Bartlett, Foster & Telgarsky cover a chain of layers. Their argument needs to know by how much the layers before l
    can stretch the inputs, p_l, and those behind it an error, q_l: to allow the error ε_l at l costs
    (p_l ‖A_lᵀ‖_{2,1}‖X‖/ε_l)², and the least cost at a given Σ q_l ε_l is R²‖X‖² over its square. In a chain p_l q_l is
    Π_{k≠l} ‖A_k‖_σ, which makes R the printed one. Where branches meet, in a sum, a maximum or a concatenation, their
    stretches add up at most: p and q are sums over paths, and a factor that moves along a path leaves them.
    """
    before, reach = {}, {_INPUTS: 1.0}
    for index, (_, reads) in wiring.items():
        before[index] = sum(reach[other] for other in reads)
        reach[index] = before[index] * norms[index][0]
    behind = {index: float(index in ends) for index in wiring}
    for index, (_, reads) in reversed(wiring.items()):
        for other in reads - {_INPUTS}:
            behind[other] += norms[index][0] * behind[index]
    return sum((before[index] * norms[index][1] * behind[index]) ** (2 / 3) for index in wiring) ** 1.5


def _spectral_complexity(setting: Setting) -> Estimate:
    """R·‖X‖_F/n of the network with batch norm folded; what stands between the layers counts as not stretching.

    R grows with every ‖A_l‖_σ by a power between 0 and 1, so its relative tolerance is at most the sum of theirs.
    """
    folded, inputs = setting.folded, setting.logits[0].double()
    if not folded.structure.exact:
        raise InputError(
            f"the spectrally normalised margin is defined for ReLU networks only: {folded.structure.reason}."
        )
    wiring, ends = _wiring(folded)
    for call in [call for call in folded.calls if call.module is None] + [call for call, _ in wiring.values()]:
        if not call.plain:
            raise InputError(
                f"the spectrally normalised margin needs layers that are plain nn.Linear or convolutions, and "
                f"{call.name!r} is not; write it as one."
            )
    norms, found, relative = {}, [], 0.0
    for index, (call, _) in wiring.items():
        norm, rows = _operator_norms(call, setting.seed)
        norms[index] = norm.value, rows
        found.append(norm)
        relative += norm.tolerance / norm.value if norm.value else 0.0
    complexity = _path_complexity(wiring, ends, norms)
    zero = [call.name for index, (call, _) in wiring.items() if norms[index][0] == 0]
    if complexity == 0 and zero:
        raise InputError(
            f"the spectrally normalised margin is not defined: all weights of layer {zero[0]!r} are zero, so the "
            "outputs do not depend on the inputs through it."
        )
    scale = complexity * float(inputs.norm()) / len(inputs)
    if not 0 < scale < math.inf:
        raise InputError(
            f"the spectrally normalised margin is not defined: the spectral complexity times the size of the inputs "
            f"is {scale:g}."
        )
    worst = max(found, key=lambda norm: ("exact", "converged", "not converged").index(norm.status))
    return Estimate(scale, tolerance=scale * relative, reason=worst.reason, status=worst.status)


def _spectral_margin(setting: Setting, statistic: Callable[[Tensor], float]) -> Estimate:
    scale = _spectral_complexity(setting)
    setting.kept["spectral scale"] = torch.tensor(scale.value, dtype=torch.float64)
    value = statistic(setting.margins.signed) / scale.value
    tolerance = abs(value) * scale.tolerance / scale.value
    return Estimate(value, seed=setting.seed, reason=scale.reason, tolerance=tolerance, status=scale.status)


def _scaled_margins(setting: Setting) -> Tensor:
    return setting.margins.signed.cpu() / setting.kept["spectral scale"]


def _input_sizes(setting: Setting) -> Tensor:
    """‖xₙ‖² relative to their mean: the influence on ‖X‖_F², for as many samples."""
    squares = setting.logits[0].double().square().sum(1)
    return squares / squares.mean()


def _scaled_mean_values(setting: Setting) -> Tensor:
    found = _scaled_margins(setting)
    return found - found.mean() * _input_sizes(setting) / 2


for _name, _meaning, _function, _sampling in (
    ("mean", "mean", lambda v: float(v.mean()), Sampling("influence", _scaled_mean_values, grows=True)),
    ("median", "median", _quantile(0.5), Sampling("order", _scaled_margins, 0.5, grows=True)),
):
    _register(
        f"spectral_margin_{_name}",
        f"{_meaning} output margin in units of the network's spectral complexity, batch norm folded; grows as √n with "
        "the number of samples, so only for as many",
        f"{_meaning} Δ / (R ‖X‖_F/n), R = (Σ_l (p_l ‖A_lᵀ‖_{{2,1}} q_l)^(2/3))^(3/2), p_l and q_l the products of "
        "‖A_k‖_σ before and behind layer l, added up over parallel paths",
        "Bartlett, Foster & Telgarsky 2017, arXiv:1706.08498",
        cost="matvecs",
        sampling=_sampling,
        direction="wider",
        invariant_to=(_SAME | _SCALED) - {"rescale_channels"},
    )(functools.partial(_spectral_margin, statistic=_function))
