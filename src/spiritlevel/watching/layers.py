"""The linear layers and convolutions that a forward pass runs, and what goes into them and comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from spiritlevel.binding.batches import resized
from spiritlevel.binding.problem import Problem
from spiritlevel.watching.operations import called
from spiritlevel.watching.watchers import FunctionWatch, hooked, tensors_in

WATCHED = 2  # samples on which the layers are found
LAYERS = (nn.Linear, _ConvNd)
_PLAIN: tuple[Any, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLAIN += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Call:
    """A layer that ran: its module, or None for a bare operation, and the parameter that is its weight, if one is."""

    name: str
    module: Any
    weight: str
    value: Tensor
    inputs: torch.Size

    @property
    def plain(self) -> bool:
        """Whether it is a module with a weight of its own that does what its class does, and nothing else."""
        if self.module is None or not self.weight or self.module._forward_hooks or self.module._forward_pre_hooks:
            return False
        return type(self.module).forward in [kind.forward for kind in _PLAIN]


class _LayerWatch(FunctionWatch):
    """Lists the layers that run: modules by their hooks, and bare uses of a matrix of parameters."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.calls, self.inside = names, list[Call](), 0

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        for name, module in model.named_modules():
            if isinstance(module, LAYERS):
                yield module.register_forward_pre_hook(self.enter)
                yield module.register_forward_hook(functools.partial(self.leave, name=name), with_kwargs=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        self.inside += 1

    def leave(self, module: Any, args: Any, kwargs: Any, output: Any, name: str) -> None:
        self.inside -= 1
        shape = next(leaf.shape for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        weight = module.weight
        self.calls.append(Call(name, module, self.names.get(id(weight), ""), weight.detach(), shape))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.inside and called(func).layer is not None:
            for leaf in tensors_in((args, kwargs)):
                for tensor in (leaf, leaf._base):  # itself, or transposed
                    if tensor is not None and tensor.ndim > 1 and id(tensor) in self.names:
                        name = self.names[id(tensor)]
                        self.calls.append(Call(func.__name__, None, name, tensor.detach(), torch.Size()))
        return func(*args, **kwargs)


def layer_calls(problem: Problem, inputs: Any) -> list[Call]:
    """The linear layers and convolutions in the order in which they run on a few samples, however they are called."""
    tensors = {**problem.constants, **problem.params}
    watch = _LayerWatch({id(tensors[name]): name for name, _ in problem.model.named_parameters()})
    with hooked(watch.hooks(problem.model)), problem.active(), torch.no_grad(), watch:
        problem.outputs(problem.params, resized(inputs, WATCHED))
    return watch.calls


class Tapped(nn.Module):
    """The model, with the input of its last layer passed through a module that gives this place a name."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        super().__init__()
        self.model, self.layer, self.input_of_last_layer = model, layer, nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def through_tap(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if args:
                return (self.input_of_last_layer(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "input": self.input_of_last_layer(kwargs["input"])}

        layer = self.model.get_submodule(self.layer)
        with layer.register_forward_pre_hook(through_tap, with_kwargs=True):
            return self.model(*args, **kwargs)


def matrices(module: Any, tensor: Tensor) -> Tensor:
    """A tensor shaped like a layer's weight as (…, groups, outputs, inputs, positions), channels counted by group.

    The outputs of a group see only the inputs of that group. A transposed convolution keeps its inputs first.
    """
    groups, transposed = getattr(module, "groups", 1), getattr(module, "transposed", False)
    lead = tensor.shape[: tensor.ndim - module.weight.ndim]
    first, second = module.weight.shape[:2]
    found = tensor.reshape(*lead, groups, first // groups, second, -1)
    return found.transpose(-3, -2) if transposed else found


@contextlib.contextmanager
def recorded(modules: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """A list of (weight, input, output) of the modules, which a forward pass inside fills."""
    ran: list[tuple[str, Tensor, Tensor]] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str) -> Tensor:
        ran.append((name, (args[0] if args else kwargs["input"]).detach(), output))
        return output.clone()  # what comes next may write into it

    with hooked(
        module.register_forward_hook(functools.partial(hook, name=name), with_kwargs=True)
        for name, module in modules.items()
    ):
        yield ran


INPUTS = -1  # stands for the network's inputs among its layers

Wiring = dict[int, tuple[Call, frozenset[int]]]
"""Layers by their numbers in the order in which they ran: each with what it reads, other layers or `INPUTS`."""


def wiring(problem: Problem, inputs: Any, seen: list[Call]) -> tuple[Wiring, frozenset[int]]:
    """The layers that the outputs depend on, of those that were `seen` to run, and what the outputs read.

    Read from autograd's graph of a pass of a few samples, which knows what views share and what is written in place.
    """
    known = {call.name: call for call in seen}
    calls: list[Call] = []
    marks: list[Any] = []  # a node of the graph behind every layer

    def mark(module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str) -> Tensor:
        shape = next(leaf.shape for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))
        output = output.clone()  # a node of its own, whatever writes into the output later
        calls.append(dataclasses.replace(known[name], inputs=shape))
        marks.append(output.grad_fn)
        return output

    handles = (
        module.register_forward_hook(functools.partial(mark, name=name), with_kwargs=True)
        for name, module in problem.model.named_modules()
        if isinstance(module, LAYERS)
    )
    with hooked(handles), problem.active():
        start = resized(inputs, WATCHED).detach().requires_grad_().clone()
        outputs = problem.outputs({name: tensor.detach() for name, tensor in problem.params.items()}, start)
    numbers = {node: index for index, node in enumerate(marks) if node is not None} | {start.grad_fn: INPUTS}
    ends, found = _read_by([outputs.grad_fn], numbers), Wiring()
    waiting = list(ends)
    while waiting:
        index = waiting.pop()
        if index not in found and index != INPUTS:
            found[index] = calls[index], _read_by([node for node, _ in marks[index].next_functions], numbers)
            waiting += found[index][1]
    return dict(sorted(found.items())), ends


def _read_by(nodes: list[Any], numbers: dict[Any, int]) -> frozenset[int]:
    """The numbered nodes of autograd's graph that these are, or lead to with no other in between."""
    found, seen = set(), {None}
    while nodes:
        node = nodes.pop()
        if node in numbers:
            found.add(numbers[node])
        elif node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return frozenset(found)
