"""Follows the factors of layers through a running network: what they demand of each parameter, and where they pass.

Linear layers, convolutions (grouped and transposed ones too), products with a matrix of parameters and the affine part
of batch norm take a factor; ReLU, leaky ReLU, PReLU, dropout, pooling, padding with zeros, reshaping and multiplication
by a number pass it on; sums and concatenations tie the layers before them into one group; batch norm absorbs it in
its statistics. Any other operation demands the factor 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.parameters import depth
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, unknown_name
from spiritlevel.watching.factors import Call, Factor, ScaledLayer, Value, grid, is_one, same, text
from spiritlevel.watching.graph import TAKES_NUMBERS
from spiritlevel.watching.operations import Degree, Kind, Layer
from spiritlevel.watching.watchers import FunctionWatch, hooked, tensors_in

_PLACED = (Kind.ALIAS, Kind.COPY, Kind.RESHAPING, Kind.MOVING)  # each number of the result is one that came in
_WEIGHTED = (Layer.DENSE, Layer.CONVOLUTION, Layer.TRANSPOSED)
INPUT = "the input cannot be scaled"
UNFOLLOWED = "factors are not followed through"


class Walk(FunctionWatch):
    """Follows the factor of every value while the network runs, and records what that demands of each parameter."""

    def __init__(self, who: str, problem: Problem, factors: Mapping[str, Factor]) -> None:
        super().__init__()
        self.who, self.factors, self.parameters = who, factors, tuple(problem.params)
        self.names = {id(tensor): name for name, tensor in problem.params.items()}
        self.modules = {id(module): name for name, module in problem.model.named_modules()}
        self.running = contextlib.ExitStack()
        self.stack: list[nn.Module] = []
        self.kept: list[Any] = []  # all tensors seen, so that no id is used twice
        self.values: dict[int, Value] = {}
        self.parents: list[int] = []
        self.reasons: dict[int, str] = {}
        self.layers: dict[str, ScaledLayer] = {}
        self.uses: dict[str, list[Factor]] = {}
        self.flipped: set[int] = set()  # transposed views of parameters
        self.added: list[tuple[str, int]] = []  # parameters that are added to values of a group
        self.absorbed: dict[str, Factor] = {}
        self.norms: dict[str, list[int]] = {}  # what each batch norm reads
        self.makers: dict[int, str] = {}  # what each layer writes
        self.readers: dict[int, int] = {}  # how many operations read a value
        self.obstacle = ""  # what reads the raw input and is not a layer
        self.output = self._fixed("")

    # ---- what the walk found

    def root(self, group: int) -> int:
        while self.parents[group] != group:
            group = self.parents[group]
        return group

    def adjacent(self, group: int, side: str) -> list[str]:
        """The layers that write or read a group."""
        return [name for name, layer in self.layers.items() if self.root(getattr(layer, side)) == group]

    def fixed(self) -> dict[int, str]:
        """The groups that must keep the factor 1, and why."""
        result: dict[int, str] = {}
        for group, reason in self.reasons.items():
            result.setdefault(self.root(group), reason)
        for name, layer in self.layers.items():
            for param in layer.params:
                if len(self.uses[param]) > 1:  # tied weights
                    for group in (self.root(layer.reads), self.root(layer.writes)):
                        result.setdefault(group, f"the parameter {param!r} of layer {name!r} is used more than once")
        for param, group in self.added:
            if len(self.uses[param]) > 1:
                result.setdefault(self.root(group), f"the parameter {param!r} is used more than once")
        return result

    def free(self) -> list[int]:
        """The groups that may take any factor."""
        fixed = {*self.fixed(), self.root(self.output.group)}
        written = dict.fromkeys(self.root(layer.writes) for layer in self.layers.values())
        return [group for group in written if group not in fixed]

    def module(self, name: str, model: nn.Module) -> Any:
        """The linear or convolutional module of a layer, `None` if there is none or its parameters are tied."""
        params = self.layers[name].params if name else ()
        module = model.get_submodule(params[0].rpartition(".")[0]) if params else None
        once = all(len(self.uses[param]) == 1 for param in params)
        return module if once and isinstance(module, nn.Linear | _ConvNd) else None

    def source(self, norm: str) -> str:
        """The layer that only this batch norm reads, "" if there is none."""
        read = self.norms[norm]
        return self.makers.get(read[0], "") if len(read) == 1 and self.readers[read[0]] == 1 else ""

    def changes(self) -> dict[str, Factor]:
        """The factor of every parameter."""
        for name in self.factors:
            if name not in self.layers:
                raise unknown_name("layer that can be scaled", name, self.layers)
        result: dict[str, Factor] = {}
        for name in self.parameters:
            factors = self.uses.get(name, [1.0])
            if len(factors) > 1 and not all(is_one(factor) for factor in factors):
                raise InputError(
                    f"{self.who}: the parameter {name!r} is used {len(factors)} times (tied weights), so one factor "
                    "cannot fit all its uses; scale other layers."
                )
            result[name] = factors[0]
        return result

    # ---- while the network runs

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that follow the values from the network's inputs on, and know which module is running."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is model:
                for tensor in tensors_in((args, kwargs)):
                    self._set(tensor, dataclasses.replace(self._fixed(INPUT), raw=True))
                self.running.enter_context(self)
            self.stack.append(module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self.stack.pop()
            if module is model:
                self.running.close()

        for module in model.modules():
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)

    def finish(self, output: Tensor) -> None:
        self.output = self._of(output)

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if depth() is not None:
            raise InputError(
                f"{self.who}: {self._place()} runs inside a transformation of torch.func (vmap, grad, jvp …), through "
                "which factors are not followed; write it in batched operations."
            )
        tensors = tensors_in((args, kwargs))
        values = [self._of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if func is Tensor.__setitem__:
            outputs = tensors[:1]
        if not outputs and getattr(func, "__name__", "") in TAKES_NUMBERS:  # which may decide what comes next
            self._demand_one(Call(func, args, kwargs, tensors, values, []), *values)
        if outputs:
            self.kept.append((tensors, outputs))
            for tensor in tensors:
                self.readers[id(tensor)] = self.readers.get(id(tensor), 0) + 1
            self._follow(Call(func, args, kwargs, tensors, values, outputs))
        return result

    def _follow(self, call: Call) -> None:
        """The rule for every operation: what becomes of the factors of its inputs."""
        operation, values = call.operation, call.values
        if operation.layer in _WEIGHTED or self._is_product(call):
            return self._layer(call)
        if self._is_flip(call):
            self.names[id(call.outputs[0])] = self.names[id(call.tensors[0])]
            return self.flipped.add(id(call.outputs[0]))
        if (bias := self._bias_of(call)) is not None:
            return self._shift(call, bias)
        if call.func is F.batch_norm and self.stack and isinstance(self.stack[-1], _BatchNorm):
            return self._norm(self.stack[-1], call)
        for tensor in call.tensors:
            self._use(tensor, 1.0)
        alone = len(call.tensors) == 1
        if alone and operation.kind in _PLACED and call.outputs[0].is_floating_point():
            results = self._shaped(call)
        elif call.linear or (values and operation.homogeneous and operation.elementwise == 1):
            for value in values[1:]:
                self._demand_one(call, value)
            results = [dataclasses.replace(values[0], raw=False)]
        elif alone and operation.kind is Kind.SPATIAL and not (call.pads_with_a_number and call.kwargs.get("value")):
            results = [self._spread(call, output) for output in call.outputs]
        elif alone and operation.kind is Kind.REDUCTION:
            results = [self._reduced(call)]
        elif (operation.kind is Kind.SUM and len(values) == 2) or (operation.kind is Kind.JOIN and values):
            results = [self._joined(call)]
        else:
            results = [self._fixed(self._demand_one(call, *values)) for _ in call.outputs]
        if any(value.raw for value in values) and not any(value.raw for value in results):
            self.obstacle = self.obstacle or f"the operation '{call.name}' at {self._place()}"
        for output, value in zip(call.outputs, results, strict=True):
            self._set(output, value)
        return None

    def _demand_one(self, call: Call, *values: Value) -> str:
        """Refuse a factor here, and fix the values' groups; the reason for that."""
        reason = f"the operation '{call.name}' at {self._place()} passes no factor on"
        if call.operation.layer in (Layer.MATRIX, Layer.PRODUCT):
            reason = f"{UNFOLLOWED} the operation '{call.name}' at {self._place()}"
        for value in values:
            if not is_one(value.factor):
                raise InputError(
                    f"{self.who}: {reason}, but its input is scaled by {text(value.factor)}; choose factors that are "
                    "undone before it."
                )
            self.reasons.setdefault(value.group, reason)
        return reason

    def _is_product(self, call: Call) -> bool:
        """Whether it is x @ W with a parameter W and an x that is not one."""
        if call.operation.layer is not Layer.MATRIX or len(call.tensors) != 2:
            return False
        input, weight = call.tensors
        return weight.ndim == 2 and id(weight) in self.names and id(input) not in self.names

    def _is_flip(self, call: Call) -> bool:
        """Whether it is Wᵀ of a parameter W."""
        if len(call.tensors) != 1 or not (call.operation.kind is Kind.MOVING or call.name == "__get__"):
            return False
        tensor, output = call.tensors[0], call.outputs[0]
        known = id(tensor) in self.names and id(tensor) not in self.flipped and tensor.ndim == 2
        same = output is not tensor and output.data_ptr() == tensor.data_ptr() and output.numel() == tensor.numel()
        return known and same and output.shape == tensor.shape[::-1] and output.stride() == tensor.stride()[::-1]

    def _bias_of(self, call: Call) -> int | None:
        """Which of two summands is a bare parameter added to values of the sum's own shape."""
        adds = call.operation.kind is Kind.SUM and call.operation.degree is Degree.LINEAR
        if not adds or len(call.tensors) != 2 or call.kwargs:
            return None
        bare = [id(tensor) in self.names and id(tensor) not in self.flipped for tensor in call.tensors]
        if sum(bare) != 1:
            return None
        return bare.index(True) if call.tensors[1 - bare.index(True)].shape == call.outputs[0].shape else None

    def _shift(self, call: Call, bias: int) -> None:
        """A parameter is added: it takes the factor of what it is added to."""
        parameter, values, value = call.tensors[bias], call.tensors[1 - bias], call.values[1 - bias]
        factor: Factor = value.scale
        if value.channels is not None:
            shape = [1] * (values.ndim - parameter.ndim) + list(parameter.shape)
            shared = [axis for axis, size in enumerate(shape) if size == 1]
            low, high = (reduce(value.channels, shared, keepdim=True) for reduce in (torch.amin, torch.amax))
            if not same(low, high):
                raise self._unlike("values to which one number is added")
            factor = value.scale * high.reshape(parameter.shape)
        self._use(parameter, factor)
        self.added.append((self.names[id(parameter)], value.group))
        if value.raw:
            self.obstacle = self.obstacle or f"the operation '{call.name}' at {self._place()}"
        self._set(call.outputs[0], dataclasses.replace(value, raw=False))

    def _layer(self, call: Call) -> None:
        """A linear layer or convolution: undoes factors per channel, passes a number on, adds its own factor."""
        (input, weight, *bias), value, output = call.tensors, call.values[0], call.outputs[0]
        layer = call.operation.layer
        dense = layer in (Layer.DENSE, Layer.MATRIX)
        axis = -1 if dense else 1 - weight.ndim
        groups = 1 if dense else call.kwargs.get("groups", call.args[6] if len(call.args) > 6 else 1)
        name = self.names.get(id(weight), "")
        key = name.removesuffix(".weight")
        own = self.factors.get(key, 1.0) if name else 1.0
        fan_out = output.shape[axis]
        self._fits(key, own, fan_out)
        undo = 1.0 if value.channels is None else 1 / self._vector(value.channels, axis)
        flipped = (layer in (Layer.TRANSPOSED, Layer.MATRIX)) != (id(weight) in self.flipped)
        shape = torch.Size(reversed(weight.shape)) if id(weight) in self.flipped else weight.shape
        inner = grid(*((undo, own) if flipped else (own, undo)), shape, groups)
        for tensor, factor in ((input, 1.0), (weight, inner), *((tensor, value.scale * own) for tensor in bias)):
            self._use(tensor, factor)
        result = self._scaled(value.scale, own, output, axis)
        self._set(output, result)
        params = tuple(self.names[id(tensor)] for tensor in (weight, *bias) if id(tensor) in self.names)
        if len(params) < 1 + len(bias):  # a computed weight or bias takes no factor
            reason = self._demand_one(call, value, *call.values[1:])
            self.reasons.setdefault(result.group, reason)
        if name:
            reads = input.shape if value.raw and not flipped else None
            if value.raw and flipped:
                self.obstacle = self.obstacle or f"the operation '{call.name}' at {self._place()}"
            self._register(key, ScaledLayer(value.group, result.group, params, fan_out, shape=reads))
            if output.ndim + axis == 1:  # its channels are where a batch norm looks for them
                self.makers[id(output)] = key

    def _norm(self, norm: Any, call: Call) -> None:
        """A batch norm: absorbs the factor of its input, and takes one of its own."""
        key, input, value = self.modules[id(norm)], call.tensors[0], call.values[0]
        self._use(input, 1.0)
        self.norms.setdefault(key, []).append(id(input))
        own = self.factors.get(key, 1.0)
        self._fits(key, own, norm.num_features)
        incoming: Factor = value.scale
        if value.channels is not None:
            vector = value.scale * self._vector(value.channels, 1)
            incoming = float(vector[0]) if same(vector, float(vector[0])) else vector
            if norm.running_mean is None and isinstance(incoming, Tensor):
                raise InputError(
                    f"{self.who}: the batch norm {key!r} keeps no running statistics, so it cannot exactly undo a "
                    "factor per channel; give the layer before it a single number."
                )
        if not is_one(incoming):
            self.absorbed[key] = incoming
        if key in self.absorbed and len(self.norms[key]) > 1:
            raise InputError(
                f"{self.who}: the batch norm {key!r} is used more than once, so it cannot absorb a factor."
            )
        result = self._scaled(1.0, own, call.outputs[0], 1)
        params = [tensor for tensor in (norm.weight, norm.bias) if tensor is not None]
        names = tuple(self.names[id(tensor)] for tensor in params if id(tensor) in self.names)
        if not params or len(names) < len(params):
            what = "a gain or bias that is no parameter" if params else "no affine part to scale"
            reason = f"the batch norm {key!r} has {what}"
            if not is_one(own):
                raise InputError(f"{self.who}: {reason}.")
            self.reasons.setdefault(result.group, reason)
        for tensor in params:
            self._use(tensor, own)
        self._register(key, ScaledLayer(value.group, result.group, names, norm.num_features, norm=True))
        if value.raw:
            self.obstacle = self.obstacle or f"the batch norm {key!r}"
        self._set(call.outputs[0], result)

    def _register(self, key: str, layer: ScaledLayer) -> None:
        if key in self.layers:
            for group in (self.layers[key].reads, self.layers[key].writes, layer.reads, layer.writes):
                self.reasons.setdefault(group, f"the layer {key!r} is used more than once (tied weights)")
            layer = dataclasses.replace(layer, shape=layer.shape or self.layers[key].shape)
        self.layers[key] = layer

    def _scaled(self, scale: float, own: Factor, output: Tensor, axis: int) -> Value:
        if isinstance(own, float):
            return Value(self._group(), scale * own)
        shape = [1] * output.ndim
        shape[axis] = -1
        return Value(self._group(), scale, own.reshape(shape).expand(output.shape))

    def _shaped(self, call: Call) -> list[Value]:
        """Reshaping and copying: the factors go through the same operation."""
        value, tensor, output = call.values[0], call.tensors[0], call.outputs[0]
        channels: list[Any] = [value.channels] * len(call.outputs)
        if value.channels is not None and call.operation.kind in (Kind.RESHAPING, Kind.MOVING):
            laid_out = torch.empty_like(tensor, dtype=torch.float64, device="cpu").copy_(value.channels)
            channels = tree_leaves(call.again([laid_out]))  # a view needs the strides of the tensor itself
        raw = value.raw and torch.equal(output.reshape(-1).to(tensor), tensor.reshape(-1))
        return [dataclasses.replace(value, channels=item, raw=raw) for item in channels]

    def _spread(self, call: Call, output: Tensor) -> Value:
        """Pooling, padding, interpolation: a factor per channel must not differ between positions."""
        value, tensor = call.values[0], call.tensors[0]
        copies = call.operation.name == "pad" and not call.pads_with_a_number  # repeats entries of its input
        value = dataclasses.replace(value, raw=value.raw and copies)
        if value.channels is None:
            return value
        if tensor.ndim < 3 or output.shape[1] != tensor.shape[1]:
            raise self._unlike("channels that are pooled or padded together")
        vector = self._vector(value.channels, 1).reshape(1, -1, *[1] * (output.ndim - 2))
        return dataclasses.replace(value, channels=vector.expand(output.shape))

    def _reduced(self, call: Call) -> Value:
        """Sums and means over axes."""
        value = dataclasses.replace(call.values[0], raw=False)
        if value.channels is None:
            return value
        options = {key: item for key, item in call.kwargs.items() if key in ("dim", "keepdim")}
        low, high = (reduce(value.channels, *call.args[1:3], **options) for reduce in (torch.amin, torch.amax))
        if not same(low, high):
            raise self._unlike("channels that are added up")
        return dataclasses.replace(value, channels=high)

    def _joined(self, call: Call) -> Value:
        """Sums and concatenations: what comes together must carry the same factor."""
        first, *rest = call.values
        shaped = [
            torch.ones(tensor.shape, dtype=torch.float64) if value.channels is None else value.channels
            for tensor, value in zip(call.tensors, call.values, strict=True)
        ]
        added = call.operation.kind is Kind.SUM
        for value, channels in zip(rest, shaped[1:], strict=True):
            if not same(first.scale, value.scale) or (added and not same(shaped[0], channels)):
                raise InputError(
                    f"{self.who}: the operation '{call.name}' at {self._place()} joins values scaled by "
                    f"{text(first.factor)} and by {text(value.factor)}; the products of the factors on its branches "
                    "must agree."
                )
            self._tie(first.group, value.group)
        joined = None
        if any(value.channels is not None for value in call.values):
            joined = shaped[0].expand(call.outputs[0].shape) if added else call.again(shaped)
        return dataclasses.replace(first, channels=joined, raw=False)

    # ---- small parts

    def _of(self, tensor: Tensor) -> Value:
        if id(tensor) not in self.values:  # a parameter, a buffer or a constant
            self.kept.append(tensor)
            self._set(tensor, self._fixed(f"a constant or parameter is read at {self._place()}"))
        return self.values[id(tensor)]

    def _set(self, tensor: Tensor, value: Value) -> None:
        self.kept.append(tensor)
        self.values[id(tensor)] = value

    def _group(self) -> int:
        self.parents.append(len(self.parents))
        return len(self.parents) - 1

    def _fixed(self, reason: str) -> Value:
        group = self._group()
        self.reasons[group] = reason
        return Value(group)

    def _tie(self, first: int, second: int) -> None:
        self.parents[self.root(second)] = self.root(first)

    def _use(self, tensor: Tensor, factor: Factor) -> None:
        """Note that a parameter is read here and must be multiplied by `factor`."""
        name = self.names.get(id(tensor))
        if name is not None:
            self.uses.setdefault(name, []).append(1.0 if is_one(factor) else factor)
        elif not is_one(factor):
            raise InputError(
                f"{self.who}: at {self._place()} a tensor that is not a parameter (computed from others, as by weight "
                f"norm) would have to be scaled by {text(factor)}; scale other layers."
            )

    def _fits(self, key: str, own: Factor, channels: int) -> None:
        if isinstance(own, Tensor) and own.shape != (channels,):
            raise InputError(
                f"{self.who}: layer {key!r} has {channels} output channels, but {own.numel()} factors were given."
            )

    def _vector(self, channels: Tensor, axis: int) -> Tensor:
        """One factor for each channel, from a tensor that must not vary otherwise."""
        flat = channels.movedim(axis, 0).flatten(1)
        if not same(flat, flat[:, :1]):
            raise self._unlike("positions that a layer treats alike")
        return flat[:, 0]

    def _unlike(self, what: str) -> InputError:
        return InputError(
            f"{self.who}: at {self._place()} different factors meet in {what}; use one number instead of a factor "
            "per channel for the layers before it."
        )

    def _place(self) -> str:
        if not self.stack or not self.modules.get(id(self.stack[-1])):
            return "the network's own forward"
        return f"{self.modules[id(self.stack[-1])]!r} ({type(self.stack[-1]).__name__})"


def follow_factors(who: str, problem: Problem, inputs: Any, factors: Mapping[str, Factor]) -> Walk:
    """Run a network, bound with all its parameters, on two samples and follow the factors through it."""
    walk = Walk(who, problem, factors)
    inputs = tree_map(lambda leaf: leaf[:2] if isinstance(leaf, Tensor) else leaf, inputs)
    with hooked(walk.watch(problem.model)), problem.active(), torch.no_grad():
        walk.finish(problem.outputs(problem.params, inputs))
    return walk
