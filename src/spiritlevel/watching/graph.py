"""The forward pass as a graph: which operation made each value, from what, and who reads it.

The network is run once, on two samples, and every operation of PyTorch that it calls is written down with the values
that it read and wrote. A tensor that is overwritten in place is a new value from then on. Attention of
`nn.MultiheadAttention` is written out in the operations that it consists of. What a transform looks for (a linear map
that only linear maps read, a gate, the heads of an attention) is found in that graph, not in the classes of modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError

_ALIASES = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add",
    "__sub__": "sub",
    "__isub__": "sub",
    "__rsub__": "rsub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul",
    "__div__": "div",
    "__truediv__": "div",
    "__itruediv__": "div",
    "__rtruediv__": "rdiv",
    "__rdiv__": "rdiv",
    "__matmul__": "matmul",
    "__rmatmul__": "rmatmul",
    "__neg__": "neg",
    "__pow__": "pow",
    "__ipow__": "pow",
    "__abs__": "abs",
    "linalg_norm": "vector_norm",
}
TAKES_NUMBERS = frozenset(
    "item tolist numpy __bool__ __float__ __int__ __index__ __array__ is_nonzero equal allclose".split()
)
"""What takes numbers out of a tensor: a value that leaves this way can no longer be followed."""


@dataclass(eq=False)
class Value:
    """A tensor at one moment of the forward pass; `name` is that of its parameter or buffer, if it is one.

    `given` says that it is an input of the network; a value without maker, name and `given` is a constant.
    """

    tensor: Tensor
    maker: Operation | None = None
    name: str = ""
    given: bool = False
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.tensor._version

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


@dataclass(eq=False)
class Operation:
    """One call: its arguments, with values in place of tensors, and the values that came out."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: str
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The operation's plain name: that of its out-of-place form, and not an alias."""
        name = getattr(self.func, "__name__", str(self.func))
        name = _ALIASES.get(name, name)
        return name if name.endswith("__") else name.rstrip("_")

    @property
    def described(self) -> str:
        """The operation and where it stands, for messages."""
        return f"'{self.name}' at {self.place}"

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, passed by position or by name."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def again(self, tensors: dict[Value, Tensor]) -> Any:
        """The result of the same call with other tensors in place of some values."""

        def filled(leaf: Any) -> Any:
            return tensors.get(leaf, leaf.tensor) if isinstance(leaf, Value) else leaf

        args, kwargs = tree_map(filled, (self.args, self.kwargs))
        return self.func(*args, **kwargs)


@dataclass
class Graph:
    """All operations of one forward pass in their order, the tensors of the model by name, and the outputs."""

    state: dict[str, Tensor]
    parameters: tuple[str, ...]
    operations: list[Operation]
    output: Value

    @property
    def unread(self) -> list[str]:
        """The parameters that no operation read: experts to which no sample was sent, for example."""
        read = {value.name for operation in self.operations for value in operation.inputs}
        return [name for name in self.parameters if name not in read]

    def readers(self) -> dict[Value, list[Operation]]:
        """The operations that read each value."""
        found: dict[Value, list[Operation]] = {}
        for operation in self.operations:
            for value in dict.fromkeys(operation.inputs):
                found.setdefault(value, []).append(operation)
        return found


def record(who: str, problem: Problem, inputs: Any, count: int = 2) -> Graph:
    """Run a model, bound with all its parameters, on the first samples of a batch and write down what it did.

    Messages begin with `who`.
    """
    recorder = _Recorder(who)
    inputs = tree_map(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) else leaf, inputs)
    handles = list(recorder.watch(problem.model))
    try:
        with problem.active(), torch.no_grad():
            outputs = problem.outputs(problem.params, problem.place(inputs, torch.empty(0))[0])
            return Graph(recorder.state, tuple(problem.params), recorder.operations, recorder.value(outputs))
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who
        self.operations: list[Operation] = []
        self.state: dict[str, Tensor] = {}
        self.values: dict[int, Value] = {}  # by id; every value keeps its tensor, so that no id is used twice
        self.memory: dict[int, list[Value]] = {}  # by the address of the memory they live in
        self.names: dict[nn.Module, str] = {}
        self.stack: list[nn.Module] = []
        self.running = contextlib.ExitStack()

    def watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks that begin and end the recording with the model's own forward, and know which module is running."""
        self.names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module is model and not self.stack:
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    self.state[name] = tensor
                    self._keep(Value(tensor, name=name))
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor):
                        self._keep(Value(leaf, given=True))
                self.running.enter_context(self)
            self.stack.append(module)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self.stack.pop()
            if module is model and not self.stack:
                self.running.close()

        for module in model.modules():
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if cast(Any, torch._C)._functorch.maybe_current_level() is not None:
            raise InputError(
                f"{self.who}: {self._place()} runs inside a transformation of torch.func (vmap, grad, jvp …), which "
                "cannot be followed; write it in batched operations."
            )
        if func is F.multi_head_attention_forward:
            with self:
                return written_attention(*args, **kwargs)
        read = tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        inputs = list(dict.fromkeys(leaf for leaf in tree_leaves(read) if isinstance(leaf, Value)))
        result = func(*args, **kwargs)
        operation = Operation(func, read[0], read[1], self._place(), inputs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func is Tensor.__setitem__:
            tensors = [args[0]]
        for tensor in tensors:
            known = self.values.get(id(tensor))
            if known is None or known.version != tensor._version:
                operation.outputs.append(self._keep(Value(tensor, operation)))
        if operation.outputs or getattr(func, "__name__", "") in TAKES_NUMBERS:
            self.operations.append(operation)
        return result

    def value(self, tensor: Tensor) -> Value:
        """The value that a tensor holds now."""
        known = self.values.get(id(tensor))
        if known is None:  # a constant
            return self._keep(Value(tensor))
        if known.version != tensor._version:  # overwritten through another tensor that shares its memory
            sharing = self.memory[tensor.untyped_storage().data_ptr()]
            operation = Operation(_overwritten, (), {}, self._place(), list(sharing))
            operation.outputs.append(self._keep(Value(tensor, operation)))
            self.operations.append(operation)
            return operation.outputs[0]
        return known

    def _keep(self, value: Value) -> Value:
        self.values[id(value.tensor)] = value
        with contextlib.suppress(RuntimeError):  # a tensor without memory of its own
            self.memory.setdefault(value.tensor.untyped_storage().data_ptr(), []).append(value)
        return value

    def _place(self) -> str:
        if not self.stack or not self.names.get(self.stack[-1]):
            return "the network's own forward"
        return f"{self.names[self.stack[-1]]!r} ({type(self.stack[-1]).__name__})"


def _overwritten() -> None:
    """Stands for a write into memory that other values share."""


def written_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` in eval mode, in operations that can be followed one by one."""
    if static_k is not None or static_v is not None:
        raise InputError("attention with static keys or values cannot be followed; compute them from the input.")
    batched = query.ndim == 3
    if not batched:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights: tuple[Any, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    biases: tuple[Any, ...] = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    length, batch, width = q.shape
    (k, v), before = _extended(k, v, bias_k, bias_v, add_zero_attn), len(k)
    extra = len(k) - before
    q, k, v = (x.reshape(-1, batch, num_heads, width // num_heads).permute(1, 2, 0, 3) for x in (q, k, v))
    scores = (q * (width // num_heads) ** -0.5) @ k.transpose(-2, -1)
    if attn_mask is not None:
        shape = (1, 1) if attn_mask.ndim == 2 else (batch, num_heads)
        scores = scores + _as_summand(F.pad(attn_mask, (0, extra)), q).view(*shape, length, -1)
    elif is_causal:
        raise InputError("attention with is_causal=True cannot be followed without its attn_mask; pass both.")
    if key_padding_mask is not None:
        scores = scores + _as_summand(F.pad(key_padding_mask, (0, extra)), q)[:, None, None]
    shares = torch.softmax(scores, -1)
    mixed = (shares @ v).permute(2, 0, 1, 3).reshape(length, batch, width)
    output = F.linear(mixed, out_proj_weight, out_proj_bias)
    if average_attn_weights:
        shares = shares.mean(1)
    if not batched:
        output, shares = output.squeeze(1), shares.squeeze(0)
    return output, shares if need_weights else None


def _extended(k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, zero: bool) -> tuple[Tensor, Tensor]:
    """Keys and values, extended by those that are the same for every sequence: learnt ones, and zeros."""
    batch, width = k.shape[1:]
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
    if zero:
        k, v = (torch.cat([x, x.new_zeros(1, batch, width)]) for x in (k, v))
    return k, v


def _as_summand(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
