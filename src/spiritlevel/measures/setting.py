"""One model on one data set, and what its measures share."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spiritlevel.binding.batches import Batches, picked
from spiritlevel.binding.context import Context
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.modules import state_of, twin_of
from spiritlevel.binding.parameters import Params
from spiritlevel.binding.points import at_points, points_at_once
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.shards import ShardedProblem
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator, operator_trace
from spiritlevel.measures.blocks import Block, gauss_newton_blocks
from spiritlevel.measures.ends import Ends, in_layer_norms, probe_count
from spiritlevel.operators.footprint import activation_bytes
from spiritlevel.operators.matrices import gauss_newton_in, hessian_in
from spiritlevel.results import Estimate, Margins, SampleTraces
from spiritlevel.samples.margins import margins_in, share_right
from spiritlevel.samples.traces import sample_forms, trace_in, traces_in
from spiritlevel.statistics.subsets import groups
from spiritlevel.transforms import Transformed, fold_batchnorm
from spiritlevel.watching.derivatives import check_derivatives
from spiritlevel.watching.layers import LAYERS, Call, Tapped, layer_calls
from spiritlevel.watching.structure import Structure, analyse, joined

_WRITTEN = 1_024  # parameters up to which all columns, and all eigenvalues, cost less than the products of a spectrum
HIDDEN = "input_of_last_layer"  # what `Tapped` calls that place
_BATCH = 500  # samples that a perturbed network sees at once
_ANALYSED = "structure"
_KEPT_DRAWS = 2**12  # numbers of a random vector that is kept for models of the same size: drawing it takes longer
_LOSSES = 2**22  # losses of all samples at several points, held at once


class Setting(Context):
    """A bound context, and what its measures have in common, computed when first needed.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> setting = Setting(net, (torch.ones(4, 2), torch.tensor([0, 1, 0, 1])))
    >>> setting.problem.size
    17
    """

    writes = False  # whether enough products are expected to make writing a small matrix down worthwhile

    def __init__(self, *args: Any, probes: int | None = None, **options: Any) -> None:
        """As a context; `probes` is how many probes a trace that must be estimated takes, if not the usual number."""
        super().__init__(*args, **options)
        self.probes = probes
        self._normal: dict[Any, Tensor] = {}  # of random vectors, which depend on no model

    def _forget(self) -> None:
        super()._forget()
        self._after: tuple[Transformed, Ends] | None = None
        self.kept: dict[str, Tensor] = {}  # what measures learned about every sample along the way, by name
        self.draws: dict[str, Tensor] = {}  # random draws whose mean a measure is, by its name
        self.along: dict[str, list[Tensor]] = {}  # probes that they used

    @property
    @in_turn()
    def model(self) -> nn.Module:
        """The model, while it is still the one that `problem` copied: a setting never mixes two states of a model."""
        if self.problem.sharded:
            raise InputError("this needs the whole model, which is sharded over processes.")
        model, copied = self.problem.model, {**self.problem.params, **self.problem.constants}
        state, device = dict(state_of(model)), self.problem.device
        if all(_equal(tensor, copied[name]) for name, tensor in state.items()):
            return model
        changed = torch.stack([_differ(tensor.detach(), copied[name]).to(device) for name, tensor in state.items()])
        if bool(changed.any()):
            name = list(state)[int(changed.nonzero()[0])]
            raise InputError(
                f"{name} of the model has changed since this Setting first looked at it, so its measures would mix "
                "two models; make a new Setting after every change."
            )
        return model

    @functools.cached_property
    def pieces(self) -> Batches:
        """The data in batches that a perturbed network sees at once."""
        return self.batches if self.whole else self.batches.cut(self.batch_size or self.fair(self.fitting(_BATCH)))

    def each(self, batches: Batches | None = None) -> Iterator[tuple[Any, Tensor]]:
        """The pieces on the model's device, except empty ones."""
        return super().each(self.pieces if batches is None else batches)

    def mine(self, batches: Batches | None = None) -> Iterator[tuple[int, Any, Tensor]]:
        """The pieces for this rank, each with the number of its first sample."""
        return super().mine(self.pieces if batches is None else batches)

    def check(self) -> None:
        """Raise `InputError` unless every sample fits the model and the loss: one forward pass, shared by the ranks."""
        with self.ranks.together(), self.problem.active():
            if self.problem.sharded:  # all ranks look at the same samples: all must make the same passes
                check_independence(self.problem, self.first(64)[0])
            else:
                check_derivatives(self.problem, *self.first(64), twice=False)
            with torch.no_grad():
                for start, inputs, targets in self.mine():
                    with self.each_together():
                        outputs = self.problem.outputs(self.problem.params, inputs)
                        self.problem.checked(outputs, inputs, targets, max(start, 0))
                    if not start and not self.whole and not self.problem.sharded:
                        check_independence(self.problem, inputs, outputs)

    def losses_at(self, theta: Tensor) -> Tensor:
        """The loss of every sample at other parameters."""
        params = self.split(theta)
        return self.of_samples(lambda inputs, targets: self.problem.losses(params, inputs, targets))

    def losses_at_each(self, count: int, points: Callable[[range], Tensor]) -> Tensor:
        """The loss of every sample at each of `count` points, (count, N); `points` gives some of them, (k, P)."""
        return self._at_each(self.problem.losses, count, points, self.at_once)

    def wrong_at_each(self, count: int, points: Callable[[range], Tensor]) -> Tensor:
        """1 for every sample that is misclassified at each of `count` points, else 0, (count, N); as `wrong_at`."""
        return self._at_each(self._wrong, count, points, 1)

    def _at_each(
        self,
        function: Callable[[Params, Any, Tensor], Tensor],
        count: int,
        points: Callable[[range], Tensor],
        at_once: int,
    ) -> Tensor:
        """`function` of every sample at each of `count` points, (count, N).

        A few points on one batch are one piece of work, and every rank takes a run of pieces, so that few ranks make
        the same points.
        """
        if self.problem.sharded:  # one point after the other: each is spread over all ranks
            each = (self.split(points(range(index, index + 1))[0]) for index in range(count))
            return torch.stack([self.of_samples(functools.partial(function, point)) for point in each])
        ranks, found = self.ranks, torch.zeros(count, self.count, dtype=torch.float64)
        batches = sum(1 for _ in self.pieces) if ranks.count > 1 else 0
        width = max(2, at_once)
        if ranks.count > 1:
            width = max(1, min(width, count * batches // ranks.count))
        chunks = torch.arange(count).split(width)
        total = len(chunks) * batches
        mine = range(total * ranks.rank // ranks.count, total * (ranks.rank + 1) // ranks.count)
        with ranks.together(), self.problem.active(), torch.no_grad():
            for number, chunk in enumerate(chunks):
                params: Params | None = None
                start = 0
                for index, (inputs, targets) in enumerate(self.pieces):
                    stop = start + len(targets)
                    if start < stop and (ranks.count == 1 or number * batches + index in mine):
                        params = params or self._split_each(points(range(int(chunk[0]), int(chunk[-1]) + 1)))
                        batch = self.problem.place(inputs, targets)
                        of_batch = functools.partial(_swapped, function, batch)
                        values = at_points(self.problem, of_batch, params, at_once)
                        found[chunk, start:stop] = values.double().cpu().reshape(len(chunk), -1)
                    start = stop
        ranks.add([found])
        return found

    def _split_each(self, thetas: Tensor) -> Params:
        """Points (k, P) cut into the parameters' shapes, (k, …)."""
        parts = thetas.split([tensor.numel() for tensor in self.problem.params.values()], dim=1)
        return {
            name: part.reshape(len(thetas), *tensor.shape)
            for part, (name, tensor) in zip(parts, self.problem.params.items(), strict=True)
        }

    @functools.cached_property
    def at_once(self) -> int:
        """How many perturbed networks to run at once: each has a loss for every sample."""
        if self.problem.sharded:
            return 1
        fitting = points_at_once(self.problem, activation_bytes(self)[1] * min(self.count, _BATCH))
        return max(1, min(fitting, _LOSSES // self.count))

    def loss_at(self, theta: Tensor) -> float:
        """L at other parameters."""
        return float(self.of_means.losses_at(theta).mean())

    def gradient_at(self, theta: Tensor) -> tuple[float, Tensor]:
        """L and ∇L at other parameters."""
        if self.of_means is not self:
            return self.of_means.gradient_at(theta)
        if self.problem.sharded:
            raise InputError("an ascent along gradients needs the whole model, which is sharded over processes.")
        total, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(theta)
        with self.ranks.together(), self.problem.active():
            for _, inputs, targets in self.mine():
                leaf = theta.detach().clone().requires_grad_()
                value = self.problem.losses(self.split(leaf), inputs, targets).sum()
                gradient += torch.autograd.grad(value, leaf)[0]
                total += value.detach().double().cpu()
        self.ranks.add([total, gradient])
        return float(total) / self.count, gradient / self.count

    def wrong_at(self, theta: Tensor) -> Tensor:
        """1 for every sample that is misclassified at other parameters, else 0; for several decisions, the share."""
        params = self.split(theta)
        return self.of_samples(lambda inputs, targets: self._wrong(params, inputs, targets))

    def _wrong(self, params: Params, inputs: Any, targets: Tensor) -> Tensor:
        return 1 - share_right(self.problem.loss.decisions(self.problem.outputs(params, inputs), targets))

    def of_samples(
        self, function: Callable[[Any, Tensor], Tensor], *shape: int, batches: Batches | None = None
    ) -> Tensor:
        """One or more numbers for every sample, from the pieces."""
        return super().of_samples(function, *shape, batches=self.pieces if batches is None else batches)

    @functools.cached_property
    def losses(self) -> Tensor:
        """The loss of every sample."""
        return self.losses_at(self.theta)

    def alone(self) -> Self:
        """The same without the other ranks; what measures keep from here on belongs to it alone."""
        other = super().alone()
        if other is not self:
            other.kept, other.along, other._after = dict(self.kept), dict(self.along), None
        return other

    def _of_ranks(self) -> tuple[str, ...]:
        hessian = self.__dict__.get("hessian")
        written = hessian is not None and hessian.entries is not None  # then it needs no other rank
        mine = ("gauss_newton", "quotient", "folded") + (() if written else ("hessian", "spectrum"))
        return (*super()._of_ranks(), *mine)

    def moved(self, model: nn.Module, *, params: Any = ()) -> Self:
        """Another model on the same data, for which no spectrum is expected."""
        other = super().moved(model, params=params)
        other.writes, other._normal = False, self._normal
        return other

    def part(self, indices: Tensor) -> Setting:
        """The same on the samples at these sorted places alone."""
        return self.on(picked(self.pieces, indices), read=True)

    def forms(self, *vectors: Tensor) -> Tensor:
        """vᵀHₙv of every sample along each of these vectors, (N, vectors)."""
        directions = [self.split(vector.to(self.theta).reshape(-1)) for vector in vectors]
        return sample_forms(self, self.pieces, directions)

    def group_products(self, vector: Tensor) -> Iterator[Tensor]:
        """H_g v of the mean loss over each of ten random groups of the samples; together about one product."""
        vector = vector.to(self.theta).reshape(-1)
        for chosen in groups(self.count, self.seed):
            total, some = torch.zeros_like(self.theta), self.part(chosen)
            with self.ranks.together(), self.problem.active(), torch.enable_grad():
                for _, inputs, targets in some.mine(some.batches.cut(some.fair(_BATCH))):
                    leaf = self.theta.detach().clone().requires_grad_()
                    value = self.problem.losses(self.split(leaf), inputs, targets).sum()
                    (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
                    if slope.requires_grad:  # not so where the loss is linear
                        total += torch.autograd.grad(slope @ vector, leaf, materialize_grads=True)[0]
            self.ranks.add([total])
            yield total / len(chosen)

    @functools.cached_property
    def start(self) -> tuple[float, Tensor]:
        """L and ∇L at the model."""
        return self.gradient_at(self.theta)

    @property
    def structure(self) -> Structure:
        """The degrees of the outputs in every parameter, over all samples: one forward pass of the data."""
        return self.once("structure", self._structure)

    def _structure(self) -> Structure:
        """Found out once for models that differ in their values alone: which operations run does not depend on those.

        Where it does, the analysis fails or says so.
        """
        if self.coupling or self.problem.sharded:
            return Structure(failure=self.why_coupled if self.coupling else "the model is sharded over processes")
        batches, known = self.problem.facts.get(_ANALYSED, (None, Structure()))
        if batches is self.batches and known.uses.keys() == self.problem.params.keys():
            return cast(Structure, known)
        found = self._analysed()
        if not (found.failure or found.by_data):
            self.problem.facts[_ANALYSED] = self.batches, found
        return found

    def _analysed(self) -> Structure:
        with self.ranks.together(), self.problem.active():
            found = (analyse(self.problem, inputs, len(targets)) for _, inputs, targets in self.mine())
            seen = functools.reduce(joined, found, Structure())
        every = self.ranks.told(json.dumps(dataclasses.asdict(seen)).encode())
        return functools.reduce(joined, (Structure(**json.loads(text)) for text in every))

    @functools.cached_property
    def hessian(self) -> Operator:
        """H as an operator, with its entries where they are few and many products are expected."""
        op = hessian_in(self)
        if self.writes and op.size <= _WRITTEN and 16 * op.size**2 <= self.budget() // 4:
            op.materialise()
        return op

    @functools.cached_property
    def gauss_newton(self) -> Operator:
        """The Gauss-Newton matrix as an operator."""
        return gauss_newton_in(self)

    @functools.cached_property
    def traces(self) -> SampleTraces:
        """Per-sample traces of H, split by parameter where that is free."""
        return traces_in(self, per_layer=self.by_norms, probes=self.probes)

    @property
    def by_norms(self) -> bool:
        """Whether norms of gradients give exact traces, and with them those of every parameter by itself."""
        return self.structure.exact and self.problem.loss.closed_form

    @property
    def probe_count(self) -> int:
        """How many probes the trace of a matrix over all parameters takes."""
        usual = probe_count(self.problem.size)
        return usual if self.probes is None or usual == self.problem.size else min(self.probes, usual)

    def trace_of(self, op: Operator) -> Estimate:
        """The trace of a matrix over all parameters; where products are few, its large eigenvalues are taken out."""
        method = "hutchinson" if self.probes is None else "hutch++"
        return operator_trace(op, probes=self.probe_count, method=method, seed=self.seed)

    @property
    def exact_traces(self) -> SampleTraces | None:
        """The traces of the samples where they are those of the Gauss-Newton matrix; None elsewhere."""
        return self.traces if self.by_norms and self.traces.method == "exact" else None

    @functools.cached_property
    def trace(self) -> Estimate:
        """Tr H; from the traces of the samples, unless the loss couples them."""
        return trace_in(self, probes=self.probes) if self.coupling == "loss" else self.traces.mean()

    @functools.cached_property
    def spectrum(self) -> Ends:
        """The ends and the Frobenius norm of H."""
        return Ends(self.hessian, self.seed)

    def spectrum_after(self, transformed: Transformed) -> Ends | None:
        """The same for T⁻¹HT⁻¹, which H becomes in theory if the transform is a diagonal T that keeps the function."""
        certificate = transformed.certificate
        if certificate.factors is None or certificate.scale != 1.0:
            return None
        if self._after is None or self._after[0] is not transformed:  # measures of one transform come one after another
            self._after = transformed, Ends(transformed.hessian(self.hessian), self.seed)
        return self._after[1]

    @functools.cached_property
    def quotient(self) -> Ends:
        """The ends of N H N, N = blockdiag(‖w_l‖ I)."""
        return Ends(in_layer_norms(self), self.seed)

    @functools.cached_property
    def margins(self) -> Margins:
        """Output margins of all samples."""
        return margins_in(self)

    def distances(self, norm: int | str) -> Tensor:
        """The linearised distance of every sample to the decision boundary."""
        key = f"distance in norm {norm}"
        if key not in self.kept:
            found = margins_in(self, distance=norm).distance
            assert found is not None
            self.kept[key] = found
        return self.kept[key]

    @functools.cached_property
    def tapped(self) -> Self:
        """The model with a module named `input_of_last_layer` where its last layer reads, on the same data."""
        last = self.last
        own = {id(parameter) for parameter in last.module.parameters()}
        if all(id(parameter) in own for parameter in self.model.parameters()):
            raise InputError("a hidden-layer margin needs a network with a layer in front of its last one.")
        if sum(call.module is last.module for call in self.calls) > 1:
            raise InputError(f"a hidden-layer margin needs a last layer that runs once; {last.name!r} runs repeatedly.")
        return self.moved(Tapped(self.model, last.name), params=None)

    @functools.cached_property
    def hidden(self) -> Margins:
        """Distances at the input of the last layer."""
        return margins_in(self.tapped, distance=2, layer=HIDDEN)

    @functools.cached_property
    def classes(self) -> int:
        """The number of classes where the loss tells them, else of outputs in the last dimension; seen on a sample."""
        return self.once_for_code("classes", self._classes)

    def _classes(self) -> int:
        with self.problem.active(), torch.no_grad():
            inputs, targets = self.first(2)
            outputs = self.problem.outputs(self.problem.params, inputs)
            axis = self.problem.loss.class_axis(outputs, targets)
            return outputs.shape[-1 if axis is None else axis]

    def column(self, name: str, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """A number for every sample, (N,) float64, from its inputs (n, d), outputs (n, C) and label, kept by name.

        The function is called for a few samples at a time, so that neither inputs nor outputs are ever held for
        all of them.
        """
        if name in self.kept:
            return self.kept[name]

        def numbers(inputs: Any, targets: Tensor) -> Tensor:
            if not (isinstance(inputs, Tensor) and inputs.is_floating_point()):
                raise InputError("this measure needs the norms of the inputs: one tensor of floats per sample.")
            outputs, labels = as_classes(self.problem, self.problem.outputs(self.problem.params, inputs), targets)
            return function(inputs.reshape(len(labels), -1).cpu(), outputs.cpu(), labels.cpu())

        self.kept[name] = self.of_samples(numbers)
        return self.kept[name]

    @functools.cached_property
    def calls(self) -> list[Call]:
        """The linear layers and convolutions in the order in which they ran on a few samples, however called."""
        with self.problem.active():
            return layer_calls(self.problem, self.first(2)[0])

    @property
    def last(self) -> Call:
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
            weight = module._parameters.get("weight") if isinstance(module, LAYERS) else None
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
    @in_turn()
    def folded(self) -> Setting:
        """The same model, every batch norm folded into the layer in front of it and no parameter frozen.

        What is said about the network as a function must not depend on what an optimiser may move.
        """
        model = self.model
        frozen = any(p.is_floating_point() and not p.requires_grad for p in model.parameters())
        normed = any(isinstance(module, _BatchNorm) for module in model.modules())
        if not normed and not frozen:
            return self
        model = self._without_batch_norm() if normed else twin_of(model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        return self.moved(model, params=None)

    def _without_batch_norm(self) -> nn.Module:
        if self.batch_norm == "batch":
            raise InputError("batch norm can be folded in eval mode only; use batch_norm='eval'.")
        model = fold_batchnorm(self.model, data=self.data).model
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise InputError("a batch norm of this network does not directly follow a layer, so it cannot be folded.")
        return model

    @functools.cached_property
    def blocks(self) -> dict[str, Block]:
        """What the Gauss-Newton matrix says about the weights of every layer."""
        return gauss_newton_blocks(self, self.layers)

    def generator(self, index: int, purpose: int) -> torch.Generator:
        """A random generator of its own for the draw with this index, for this purpose."""
        state = np.random.SeedSequence([self.seed, purpose, index]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state))

    def normal(self, index: int, purpose: int) -> Tensor:
        """The draw of standard normal numbers with this index, (P,), for this purpose."""
        problem, key = self.problem, (index, purpose, self.problem.size)
        if key in self._normal:
            return self._normal[key].to(self.theta)
        generator = self.generator(index, purpose)

        def draw(count: int) -> Tensor:
            return torch.randn(count, generator=generator, dtype=torch.float64)

        found = problem.drawn(draw) if isinstance(problem, ShardedProblem) else draw(problem.size)
        if problem.size <= _KEPT_DRAWS and not problem.sharded:
            self._normal[key] = found
        return found.to(self.theta)


def _swapped(function: Callable[[Params, Any, Tensor], Tensor], batch: tuple[Any, Tensor], params: Params) -> Tensor:
    return function(params, *batch)


def _equal(now: Tensor, then: Tensor) -> bool:
    """Whether two tensors on the CPU are alike to the bit: the usual case, seen at once."""
    plain = now.device.type == "cpu" and now.layout == then.layout == torch.strided
    return plain and (now.device, now.dtype) == (then.device, then.dtype) and torch.equal(now.detach(), then)


def _differ(now: Tensor, then: Tensor) -> Tensor:
    """Whether two tensors hold different numbers, NaN in the same places not counted; a truth value on their device."""
    if now.shape != then.shape:
        return torch.ones((), dtype=torch.bool, device=then.device)
    now = now.to(then)
    if now.layout != torch.strided:  # sparse, say
        now, then = now.to_dense(), then.to_dense()
    return ((now != then) & ((now == now) | (then == then))).any()


def as_classes(problem: Problem, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, C ≥ 2), a single logit φ as (0, φ), and integer labels, for samples that make one decision each."""
    found = problem.loss.decisions(outputs, targets)
    if found.counts is not None:
        raise InputError("this measure needs samples that make one decision each, between classes.")
    assert isinstance(found.logits, Tensor)  # as the outputs were
    return found.logits, found.labels
