"""A network on the bench: recorded in float64, changed by a map of its parameters, and compared with what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.binding.batches import resized
from spiritlevel.binding.modules import in_double, state_of, twin_of, unwrapped
from spiritlevel.binding.reading import Form
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError, checked_seed, counted
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.transforms.maps import LinearMap, Step, generator
from spiritlevel.watching.channels import Channels, Passing
from spiritlevel.watching.following import follow_channels
from spiritlevel.watching.graph import Graph, record
from spiritlevel.watching.structure import analyse

_MORE = 16, 128  # samples to follow where two leave parameters unread
_EXACT = 1e-9  # relative difference of the outputs in float64 beyond which a map is not the symmetry it was taken for
_ROUNDED = 1e-3  # the same where the network itself computes with fewer digits, or the parameters are rounded to fewer


class Watched:
    """A model under a transform's inspection: a float64 copy, its recorded forward pass, data and random numbers."""

    @in_turn()  # while another thread measures the model, it holds other tensors
    def __init__(self, who: str, model: nn.Module, data: Any, seed: int, form: Form) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"{who}: the model must be a torch.nn.Module, got {type(model).__name__}.")
        if data is None:
            raise InputError(f"{who} needs data=: inputs to follow the network on, and to compare its outputs on.")
        self.who, self.model = who, unwrapped(model)
        for name, tensor in state_of(self.model):
            if tensor.layout != torch.strided:
                raise self.refused(f"this network holds the sparse tensor {name}, which cannot be followed")
        self.source = generator(checked_seed(seed))
        exact = data.once("in float64", self.model, self._in_double) if isinstance(data, Sample) else self._in_double()
        self.exact = self.original = exact
        self.sample = Sample.of(exact, data, form)
        self.graph, self.unread = self.sample.once("recorded", exact, self._recorded)

    def _in_double(self) -> nn.Module:
        return in_double(self.model)

    def _recorded(self) -> tuple[Graph, list[str]]:
        """A forward pass, and the parameters that other samples may read though these did not."""
        graph = self.recorded(self.exact)
        if not graph.unread or not self._chosen_by_numbers():
            return graph, []
        for count in _MORE if self.sample.count > 2 else ():
            more = self.recorded(self.exact, count)
            if len(more.unread) == len(graph.unread):
                break
            graph = more
            if not graph.unread:
                break
        return graph, graph.unread

    def recorded(self, model: nn.Module, count: int = 2) -> Graph:
        """The forward pass of a model in float64 on the first samples."""
        return record(self.who, self.sample.problem(model), self.sample.inputs, count)

    def _chosen_by_numbers(self) -> bool:
        """Whether other samples may run through parts that two do not reach."""
        problem = self.sample.problem(self.exact)
        inputs = problem.place(resized(self.sample.inputs, 2), torch.empty(0))[0]
        with problem.active():
            found = analyse(problem, inputs, 2)
        return found.by_data or bool(found.failure)

    def channels(self, passing: Passing) -> Channels:
        """The network's channels under one kind of map."""
        return follow_channels(self.graph, passing)

    def refused(self, what: str, why: str = "") -> InputError:
        """The error for a network that has nothing of what a transform looks for."""
        return InputError(f"{self.who}: {what}{f'; in the way: {why}' if why else ''}.")

    def mapped(
        self,
        steps: Iterable[Step],
        *,
        shift: dict[str, Tensor] | None = None,
        notes: tuple[str, ...] = (),
        keeps: str = "outputs",
        start: nn.Module | None = None,
    ) -> Transformed:
        """The model after θ → Tθ + shift, certified; T is all that gradient and Hessian need."""
        shapes = {name: tensor.shape for name, tensor in self.graph.state.items()}
        mapping = LinearMap(shapes, steps)
        new = twin_of(self.exact)
        state = dict([*new.named_parameters(), *new.named_buffers()])
        moved = mapping({name: tensor for name, tensor in state.items() if tensor.is_floating_point()})
        with torch.no_grad():
            for name, tensor in moved.items():
                state[name].copy_(tensor + shift[name] if shift and name in shift else tensor)
        names = [name for name, _ in new.named_parameters()]
        factors = mapping.factors(names)
        return self.certified(
            new,
            factors=factors,
            map=None if factors is not None else mapping,
            linear=not shift,
            notes=notes,
            keeps=keeps,
            start=start,
        )

    @in_turn()
    def certified(
        self,
        new: nn.Module,
        *,
        factors: dict[str, Any] | None = None,
        map: LinearMap | None = None,
        linear: bool = True,
        notes: tuple[str, ...] = (),
        keeps: str = "outputs",
        start: nn.Module | None = None,
        fit: Callable[[nn.Module], None] | None = None,
    ) -> Transformed:
        """Compare a changed copy in float64 with the original, round it to the model's own precision, and certify that.

        Two comparisons: the first shows that the map is a symmetry, the second what rounding its result costs. `fit`
        makes the modules of the rounded copy match the shapes of their tensors.
        """
        if unread := self.unread:
            notes += (
                f"{counted(len(unread), 'parameter')} unread on the samples that were followed ({unread[0]}, say): "
                "where other data run through such a part, the function may change",
            )
        tolerance = _ROUNDED if self._computes_in_fewer_digits() else _EXACT
        self.sample.certify(self.who, self.original, new, keeps=keeps, tolerance=tolerance)
        rounded = twin_of(self.model)
        take_state(rounded, new)
        if fit is not None:
            fit(rounded)
        again = in_double(rounded)
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if dtypes != {torch.float64}:
            tolerance = 0.1 if dtypes & {torch.float16, torch.bfloat16} else _ROUNDED
        certificate = self.sample.certify(
            self.who, self.original, again, keeps=keeps, tolerance=tolerance, factors=factors, notes=notes
        )
        return Transformed(rounded, certificate, linear=linear, map=map, start=start)

    def _computes_in_fewer_digits(self) -> bool:
        values = (value.tensor for operation in self.graph.operations for value in operation.outputs)
        return any(tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) for tensor in values)


def take_state(model: nn.Module, other: nn.Module) -> None:
    """Give a model the parameters and buffers of another one with the same modules, in its own precision."""
    theirs = dict(other.named_modules(remove_duplicate=False))
    known: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor that several modules share, and what was made for it
    for name, module in model.named_modules(remove_duplicate=False):
        for own, source in ((module._parameters, theirs[name]._parameters), (module._buffers, theirs[name]._buffers)):
            for key, tensor in source.items():
                before = own.get(key)
                if tensor is None or before is None:
                    continue
                if id(before) not in known:
                    fresh = tensor.detach().to(before).clone()
                    if isinstance(before, nn.Parameter):
                        fresh = nn.Parameter(fresh, requires_grad=before.requires_grad)
                    if fresh.shape == before.shape:
                        with torch.no_grad():
                            before.copy_(fresh)
                        fresh = before
                    known[id(before)] = before, fresh
                own[key] = known[id(before)][1]
