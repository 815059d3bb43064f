"""A module and a loss as pure functions of a dict of parameters, and data as batches in a fixed order.

Nothing is mutated: `Problem.active()` puts the module into the state in which it is measured (eval mode, batch norm
as asked, forms of attention, layer norm and weight norm that can be differentiated twice) and gives back every
attribute of its submodules (lists, dicts and sets with their contents), buffers, modes and random states afterwards,
also after an exception.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import hashlib
import math
import os
import random
import re
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from spiritlevel import losses
from spiritlevel.distributed import Ranks
from spiritlevel.elementary import Elementary
from spiritlevel.errors import InputError, first_line, unknown_name, whole_number

Params = dict[str, Tensor]
BATCH_NORM_MODES = ("eval", "batch")

# ---------------------------------------------------------------- state that must come back


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Give torch, NumPy and Python back the random states they had."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


_CONTAINERS = {list, deque, dict, OrderedDict, defaultdict, set}  # exactly these: a subclass may refuse to be refilled


@contextlib.contextmanager
def preserved_module(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Give every submodule back the attributes, mode, parameters and buffers (the same objects) that it had.

    Old-style weight norm, for one, leaves a computed `weight` on the module at every call. Lists, dicts and sets that
    are reached from the attributes get their contents back: a module that collects its activations in one would
    otherwise be left with tensors that are of no use outside the transformation that made them. Tensors that are
    plain attributes get back their values. Yields a function that tells whether there is anything to give back.
    """
    saved: dict[int, tuple[Any, list[Any]]] = {}
    found: list[Any] = [module.__dict__ for module in model.modules()]
    plain = [item for attributes in found for item in attributes.values() if isinstance(item, Tensor)]
    tensors = [(item, item._version, item.detach().clone()) for item in plain if not item.is_inference()]
    while found:
        container = found.pop()
        if id(container) not in saved:
            saved[id(container)] = container, _content(container)
            inside = container.values() if isinstance(container, dict) else container
            found += [item for item in inside if type(item) in _CONTAINERS]

    def changed() -> bool:
        written = any(item._version != version for item, version, _ in tensors)
        return written or any(not _same_content(_content(now), then) for now, then in saved.values())

    try:
        yield changed
    finally:
        for container, content in saved.values():
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(content)
        for item, version, values in tensors:
            if item._version != version:
                item.data.copy_(values)


def _content(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _same_content(now: list[Any], then: list[Any]) -> bool:
    """Whether two lists hold the same objects; of pairs, the same second ones under equal first ones."""
    if len(now) != len(then):
        return False
    pairs = zip(now, then, strict=True)
    return all(a is b or (type(a) is type(b) is tuple and len(a) == 2 and a[1] is b[1]) for a, b in pairs)


@functools.cache
def _load_forward_mode() -> None:
    """Have torch load its forward-mode rules, and keep its deprecation warnings about itself from the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.clone, (torch.zeros(()),), (torch.zeros(()),))


class _NotReentrant:
    """In place of the function behind reentrant checkpoints: runs what it is given, and keeps the activations."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what surrounds other checkpoints: nothing is thrown away, so nothing is computed again."""
    yield


@contextlib.contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Keep all activations, which changes no result.

    A checkpoint runs its part of the forward pass again while gradients are computed. By then the module holds its own
    parameters again, not those at which it is measured, and derivatives of derivatives do not reach through.
    """
    module: Any = torch.utils.checkpoint
    own = {"CheckpointFunction": _NotReentrant, "_checkpoint_without_reentrant_generator": _kept}
    before = {name: getattr(module, name) for name in own if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, own[name])
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


@contextlib.contextmanager
def _twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Attention, the encoder layer and recurrent layers in forms that have forward and second derivatives."""
    _load_forward_mode()
    attention, onednn = torch.backends.mha, cast(Any, torch.backends.mkldnn)
    before = attention.get_fastpath_enabled(), onednn.enabled
    attention.set_fastpath_enabled(False)
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        onednn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH), _without_checkpoints():
            yield
    finally:
        attention.set_fastpath_enabled(before[0])
        onednn.enabled = before[1]


# ---------------------------------------------------------------- parameters


def select_parameters(model: nn.Module, params: str | Iterable[str] | None = None) -> list[str]:
    """Names of the parameters to measure: all that require grad, or those that a name, prefix or glob picks.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> select_parameters(net, "1"), select_parameters(net, "*.bias")
    (['1.weight', '1.bias'], ['0.bias', '1.bias'])
    """
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    names = list(own.values())
    if params is None:
        chosen = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not chosen:
            reason = "has no parameters; there is no curvature to measure."
            if names:
                reason = "has no parameter that requires grad; set requires_grad, or name the parameters with params=."
            raise InputError(f"the model {type(model).__name__} {reason}")
        return chosen
    wanted = [params] if isinstance(params, str) else list(params) if isinstance(params, Iterable) else [params]
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise InputError(f"params= takes names, prefixes or globs of parameters, got {type(pattern).__name__}.")
    if not wanted:
        raise InputError("params= is empty; name at least one parameter, or leave it out for all that require grad.")
    picked: set[str] = set()
    for pattern in wanted:
        hits = [
            own[id(parameter)]  # a shared parameter has several names, of which the first is its own
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)
        ]
        if not hits:
            raise unknown_name("parameter", pattern, names)
        picked.update(hits)
    return [name for name in names if name in picked]


# ---------------------------------------------------------------- the problem


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` or a wrapper for several devices, which could not be differentiated twice."""
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = model.module if parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class _CannotRun(InputError, RuntimeError):
    """The model raised an error: in its first pass, mostly about the shape of its inputs, or while differentiated."""


class Problem:
    """A model and a loss at one point: pure functions of a dict of parameters.

    `params` holds the chosen parameters, detached copies; everything else of the model's state is constant. Use the
    functions inside `with problem.active():`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Any = "cross_entropy",
        params: str | Iterable[str] | None = None,
        batch_norm: str = "eval",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
        model = unwrapped(model)
        if isinstance(model, torch.jit.ScriptModule):
            raise InputError("a TorchScript model cannot be measured; pass the module that it was made from.")
        if any(nn.parameter.is_lazy(tensor) for _, tensor in _state(model)):
            raise InputError(f"the model {type(model).__name__} has lazy parameters; run it on one batch first.")
        for name, parameter in model.named_parameters():
            if parameter.is_complex() or parameter.is_meta:
                kind = "is complex" if parameter.is_complex() else "is on the meta device, without values"
                raise InputError(f"the parameter {name} {kind}; there is no curvature to measure.")
        if batch_norm not in BATCH_NORM_MODES:
            raise unknown_name("batch_norm mode", batch_norm, BATCH_NORM_MODES)
        names = select_parameters(model, params)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if dtypes & {torch.float16, torch.bfloat16}:
            model = copy.deepcopy(model).float()  # half precision holds no curvature: measured as a float32 copy
            dtypes = {torch.float32}
        if len(dtypes) > 1:
            kinds = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise InputError(f"the model mixes parameters of {kinds}; convert it to one of them, e.g. model.double().")
        self.model = model
        self.loss = losses.resolve(loss)
        self.batch_norm = batch_norm
        with torch.inference_mode(False):  # tensors made in inference mode could not be differentiated
            state = {name: tensor.detach().clone() for name, tensor in _state(model)}
        self.params: Params = {name: state.pop(name) for name in names}
        self.constants: Params = state
        floating = [tensor for tensor in self.params.values() if tensor.is_floating_point()]
        first = next(iter(floating or self.params.values()))
        self.device, self.dtype = first.device, first.dtype
        self._buffers = {name for name, _ in model.named_buffers()}
        # known after one plain pass: does the model work in place on inputs or buffers, does it keep something in its
        # attributes (merged weights, say), does it draw random numbers?
        self._overwrites: bool | None = None
        self._keeps = False
        self._reads_by_name = False  # whether it reads its parameters as attributes, once that is known
        self._draws = False
        self.reverse_only = False  # set where the model turns out to have no forward derivatives
        self._has_data = False  # whether inputs came with targets: that the model fails on those is the caller's news

    @property
    def size(self) -> int:
        """The number of measured parameters."""
        return sum(tensor.numel() for tensor in self.params.values())

    def shared_by(self, group: Any) -> Ranks:
        """The ranks of a process group, after making sure that all measure this problem; alone without a group."""
        ranks = Ranks(group, self.device)
        if group is not None:
            ranks.same(self.fingerprint(), "their models, losses or batch norm modes")
        return ranks

    def fingerprint(self) -> str:
        """A hash of everything that fixes the function: names, values of parameters and constants, loss, mode."""
        content = hashlib.blake2b(f"{self.loss.name} {self.batch_norm}".encode(), digest_size=16)
        for name, tensor in [*self.params.items(), *self.constants.items()]:
            content.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The state in which the model is measured; all of it is undone on leaving.

        Forward hooks run as they always do. Backward hooks do not: they see no gradients of a measurement.
        """
        with (
            preserved_random_state(),
            preserved_module(self.model),
            torch.inference_mode(False),
            torch.enable_grad(),
            _without_autocast(self.device),
            _twice_differentiable(self.model),
        ):
            self.model.eval()
            for module in self.model.modules():
                module._backward_hooks = OrderedDict()  # torch.func does not know them
                module._backward_pre_hooks = OrderedDict()
                if self.batch_norm == "batch" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = True
                    module.track_running_stats = False  # batch statistics, and no running ones are written
            yield

    def outputs(self, params: Params, inputs: Any) -> Tensor:
        """φ(θ, x): the model's outputs for one batch."""
        before = None if self._overwrites is not None else _random_states(self.device)
        plain = cast(Any, torch._C)._functorch.maybe_current_level() is None  # not inside a transformation
        constants, given = self.constants, inputs
        if plain or self._overwrites is not False:  # copies, so that no pass changes the data or the function
            inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        if self._overwrites is not False:
            constants = {name: t.clone() if name in self._buffers else t for name, t in constants.items()}
        keeps: Any = contextlib.nullcontext(lambda: False)
        if before is not None or self._keeps:
            keeps = preserved_module(self.model)
        moving = [*params.values(), *(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))]
        detached = not self._reads_by_name and not torch.is_grad_enabled() and plain
        detached = detached and not any(tensor.requires_grad for tensor in moving)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            kwargs = dict(inputs)
        elif isinstance(inputs, tuple | list):
            args = tuple(inputs)
        else:
            args = (inputs,)
        try:
            with Elementary(), keeps as changed, torch.enable_grad() if detached else contextlib.nullcontext():
                result = functional_call(self.model, {**constants, **params}, args, kwargs)
                self._keeps |= changed()
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if "mutate a captured Tensor" in str(error) and self._overwrites is False:
                self._overwrites = True  # in this batch, if not in the first one
                return self.outputs(params, given)
            if "doesn't have storage" in str(error):  # what torch says of a tensor inside its transformations
                raise _CannotRun(
                    f"the model {type(self.model).__name__} reads the memory of a tensor in its forward (as .numpy() "
                    "does), which has none while it is differentiated; write that part in operations of torch."
                ) from error
            if before is None or not self._has_data or isinstance(error, InputError | torch.OutOfMemoryError):
                raise
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            reason = first_line(error)
            raise _CannotRun(
                f"the model {type(self.model).__name__} fails on inputs of shape {shapes}: {reason}."
            ) from error
        if plain:
            copies = tree_leaves(inputs)
            if self._overwrites is not False:
                copies += [constants[name] for name in self._buffers & constants.keys()]
            overwrites = any(leaf._version for leaf in copies if isinstance(leaf, Tensor))
            if before is not None or overwrites:
                self._overwrites = overwrites
            self._check_own_parameters()
        if before is not None:
            self._draws = before != _random_states(self.device)
        result = getattr(result, "logits", result)
        if not isinstance(result, Tensor):
            raise InputError(
                f"the model must return a tensor or an object with .logits, got {type(result).__name__}; "
                "wrap it in a module that picks the outputs."
            )
        if detached and result.requires_grad:
            raise InputError(
                f"the model {type(self.model).__name__} reads parameters that it holds elsewhere than under their "
                "names, in a list, a cache or a closure, say, so that a measurement cannot move them; read them as "
                "attributes of their modules in the forward pass."
            )
        self._reads_by_name |= detached
        return result

    def _check_own_parameters(self) -> None:
        """Raise `InputError` if a forward pass has changed the point at which the model is measured."""
        if not any(tensor._version for tensor in self.params.values()):
            return
        for name, tensor in self.model.named_parameters():
            if name in self.params and not torch.equal(self.params[name], tensor.detach().to(self.params[name])):
                raise InputError(
                    f"the model {type(self.model).__name__} overwrites its own parameter {name} in its forward pass, "
                    "as an embedding with max_norm= does, so there is no fixed point to measure at; run it once on all "
                    "data, then switch that off (max_norm=None)."
                )

    def losses(self, params: Params, inputs: Any, targets: Tensor) -> Tensor:
        """ℓ(φ(θ, x), y) of every sample of a batch."""
        return self.loss.values(self.outputs(params, inputs), targets)

    def place(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """A batch on the model's device, its floats in the model's dtype, ready for differentiation."""

        def move(tensor: Any, dtype: torch.dtype | None = None) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            tensor = tensor.detach().to(self.device, dtype if tensor.is_floating_point() else None)
            return tensor.clone() if tensor.is_inference() else tensor

        self._has_data |= len(targets) > 0
        with torch.inference_mode(False):
            return tree_map(lambda leaf: move(leaf, self.dtype), inputs), move(targets)

    def checked(self, outputs: Tensor, inputs: Any, targets: Tensor, start: int = 0) -> None:
        """Raise `InputError` unless the outputs fit the loss, are finite and repeat.

        `start` is the number of the first sample in the data.
        """
        if outputs.ndim == 0 or outputs.shape[0] != targets.shape[0]:
            raise InputError(
                f"the model returned outputs of shape {tuple(outputs.shape)} for {targets.shape[0]} samples; "
                "the first dimension must be the samples."
            )
        self.loss.check(outputs, targets, start)
        if not bool(torch.isfinite(outputs.detach().sum())) and not bool(torch.isfinite(outputs).all()):
            for leaf in tree_leaves(inputs):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                    where = start + _first_not_finite(leaf)
                    raise InputError(f"the input of sample {where} is NaN or infinite; clean the data first.")
            raise InputError(
                f"the model's output for sample {start + _first_not_finite(outputs)} is NaN or infinite although its "
                "input is finite; check the weights."
            )
        if self._draws:
            with self.active(), torch.no_grad():
                _advance_random_states()
                change = (self.outputs(self.params, inputs) - outputs.detach()).abs().max()
            if change > 1e-3 * outputs.detach().abs().max():
                raise InputError(
                    "the model's outputs change from one pass to the next (dropout or noise that ignores eval mode?); "
                    "make them repeat, e.g. with F.dropout(x, training=self.training)."
                )
            self._draws = False  # without effect, as it turned out


def as_leaves(params: Params) -> Params:
    """The same values, for plain autograd to differentiate in."""
    return {name: tensor.detach().requires_grad_() for name, tensor in params.items()}


def _first_not_finite(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.detach())).reshape(len(tensor), -1).any(1).nonzero()[0])


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No reduced precision inside, whatever the caller has switched on."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _random_states(device: torch.device) -> tuple[Any, ...] | None:
    """What changes if anything draws from the global generators; `None` inside transformations of `torch.func`."""
    try:
        own = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
        shared = torch.get_rng_state().numpy().tobytes()
    except RuntimeError:  # a wrapped tensor has no numbers to look at
        return None
    numbers: Any = np.random.get_state()
    return shared, own, numbers[1].tobytes(), numbers[2:], random.getstate()


def _advance_random_states() -> None:
    """Move on from the present random states, so that whatever draws from them draws something else."""
    torch.rand(1), np.random.random(), random.random()


def along(function: Callable[[Params], Any], params: Params, direction: Params) -> tuple[Any, Any]:
    """The value of a function of the parameters and its derivative along a direction, by forward mode."""
    result = jvp(function, (params,), (direction,))
    return result[0], result[1]


def nearby(params: Params) -> Iterator[Params]:
    """Three times the parameters moved by some units in their last places: what changes by that is rounding."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        moved = {}
        for name, tensor in params.items():
            size = tensor.abs()
            size = size + (float(size.mean()) or 1.0)
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
            moved[name] = tensor + 64 * torch.finfo(tensor.dtype).eps * size * noise
        yield moved


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


# ---------------------------------------------------------------- data

Pair = tuple[Any, Tensor]


def _count(inputs: Any, targets: Tensor) -> int:
    count = targets.shape[0] if targets.ndim else -1
    if targets.is_complex():
        raise InputError("the targets are complex numbers; losses need real ones, or integer classes.")
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != count):
            raise InputError(f"inputs of shape {tuple(leaf.shape)} do not fit targets of shape {tuple(targets.shape)}.")
    return count


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(np.require(leaf, requirements=["C", "W"])) if isinstance(leaf, np.ndarray) else leaf


def _as_pair(batch: Any) -> Pair:
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise InputError(f"data must give pairs (inputs, targets), got {type(batch).__name__}.")
    inputs, targets = batch
    inputs = tree_map(_as_tensor, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    targets = _as_tensor(targets)
    if not isinstance(targets, Tensor):
        raise InputError(f"the targets of a batch must be a tensor, got {type(targets).__name__}.")
    return inputs, targets


def _slice(inputs: Any, start: int, stop: int) -> Any:
    return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, Tensor) else leaf, inputs)


def _is_pair_of_tensors(data: Any) -> bool:
    if not (isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray)):
        return False
    leaves = tree_leaves(dict(data[0]) if isinstance(data[0], Mapping) else data[0])
    return bool(leaves) and all(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves)


def _in_order(loader: DataLoader[Any], *, ordered: bool, whole: bool) -> DataLoader[Any]:
    """The loader, if its order repeats; one that reads the same samples in order, where that is what is measured."""
    batched: Any = loader.batch_sampler
    sampler: Any = getattr(batched, "sampler", loader.sampler)
    if not isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return loader
    if ordered:
        raise InputError(
            "the data loader shuffles, and per-sample results need an order that repeats; "
            "pass its data set, or a loader with shuffle=False."
        )
    known = batched is None or type(batched) is BatchSampler
    samples: Any = getattr(sampler, "data_source", ())
    once = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(samples)
    if not (known and once):
        raise InputError(
            f"the data loader draws by {type(sampler if known else batched).__name__}, which may leave out samples or "
            "repeat them, others in every pass; pass its data set, or a loader with shuffle=False."
        )
    size = None if batched is None else batched.batch_size
    if whole and size and batched.drop_last and len(samples) % size:
        raise InputError(
            "the data loader shuffles and drops its last batch, so other samples are left out in every pass, and "
            "batches are part of what is measured here; pass a loader with shuffle=False or with drop_last=False."
        )
    return DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=SequentialSampler(samples),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


class Batches:
    """Data as batches in an order that repeats: a pair of tensors, a data set, a loader or re-iterable batches.

    Batches larger than `size` are split, unless `whole` (batch statistics make them part of the definition): then
    data that come in batches of another size are refused. A shuffling loader is refused if `ordered`, and read in the
    order of its data set otherwise; all of it, for `drop_last` leaves out other samples in every pass, and is refused
    if `whole`.
    """

    def __init__(self, data: Any, *, size: int | None = None, ordered: bool = True, whole: bool = False) -> None:
        self.size, self.whole = None if size is None else whole_number(size, "batch_size", 1), whole
        if _is_pair_of_tensors(data):
            data = _as_pair(data)
            _count(*data)
        elif isinstance(data, DataLoader):
            data = _in_order(data, ordered=ordered, whole=whole)
        elif isinstance(data, Dataset):
            data = DataLoader(data, batch_size=size or 256)
        elif isinstance(data, Iterator):
            raise InputError(
                "data can be read only once (an iterator); pass a list of batches, a data set or a data loader."
            )
        elif not isinstance(data, Iterable) or isinstance(data, str | bytes):
            raise InputError(
                "data must be a pair of tensors, a Dataset, a DataLoader or batches of (inputs, targets), "
                f"got {type(data).__name__}."
            )
        self.data = data
        if not self._in_memory:
            self._check_repeats()

    @property
    def _in_memory(self) -> bool:
        return _is_pair_of_tensors(self.data)

    @property
    def samples(self) -> int | None:
        """How many there are, if they lie in memory as one pair of tensors."""
        return len(self.data[1]) if self._in_memory else None

    def _check_repeats(self) -> None:
        """Read the first batch twice, from different random states, so that whatever depends on them shows."""
        first = tree_leaves(next(iter(self)))
        with preserved_random_state():
            _advance_random_states()
            second = tree_leaves(next(self._pieces(), None))
        if second == [None]:
            raise InputError(
                "data can be read only once; pass a list of batches, a data set or a data loader, which start anew."
            )
        same = len(first) == len(second) and all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or bool(a == b)
            for a, b in zip(first, second, strict=True)
        )
        if not same:
            raise InputError(
                "the data change between two passes (random augmentation or shuffling?); "
                "pass data that repeat, such as the unaugmented set."
            )

    def __iter__(self) -> Iterator[Pair]:
        empty = True
        for piece in self._pieces():
            empty = False
            yield piece
        if empty:
            raise InputError("the data are empty; there is nothing to measure.")

    def _pieces(self) -> Iterator[Pair]:
        fixed, last = self.whole and not self._in_memory, None
        for inputs, targets in self._raw():
            count = _count(inputs, targets)
            if fixed and self.size is not None and (count > self.size or last not in (None, self.size)):
                raise InputError(
                    f"batch_size={self.size} does not fit data that come in batches of {max(count, last or 0)}, and "
                    "batches are part of what is measured here; leave batch_size out, or pass a data set or a pair of "
                    "tensors."
                )
            last = count or last
            size = count if self.size is None or fixed else self.size
            for start in range(0, count, max(size, 1)):
                stop = min(start + size, count)
                yield (_slice(inputs, start, stop), targets[start:stop]) if stop - start < count else (inputs, targets)

    def _raw(self) -> Iterator[Pair]:
        if self._in_memory:
            yield self.data
            return
        with preserved_random_state():  # even a sequential loader draws a seed from the global generator
            batches = iter(self.data)
        while True:
            with preserved_random_state():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            # a copy: some data fill the same memory again for the next batch
            yield tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, _as_pair(batch))

    def first(self, count: int, least: int = 1) -> Pair:
        """The first samples, at most `count`, of the first batch that has any.

        Of data in memory at least `least`, if there are so many: whether samples depend on each other does not show in
        batches of one.
        """
        if self._in_memory and self.size is not None and self.size < least:
            inputs, targets = self.data
            if len(targets):
                return _slice(inputs, 0, least), targets[:least]
        for inputs, targets in self:
            if len(targets):
                return _slice(inputs, 0, count), targets[:count]
        raise InputError("the data are empty; there is nothing to measure.")


def picked(batches: Batches, indices: Tensor) -> Any:
    """The samples at these sorted places: a pair of tensors where the inputs are one tensor, else batches."""
    start, pieces = 0, []
    for inputs, targets in batches:
        here = indices[(indices >= start) & (indices < start + len(targets))] - start
        if len(here):

            def pick(leaf: Any, here: Tensor = here) -> Any:
                return leaf[here.to(leaf.device)] if isinstance(leaf, Tensor) else leaf

            pieces.append((tree_map(pick, inputs), pick(targets)))
        start += len(targets)
    if all(isinstance(inputs, Tensor) for inputs, _ in pieces) and len({inputs.shape[1:] for inputs, _ in pieces}) == 1:
        return torch.cat([inputs for inputs, _ in pieces]), torch.cat([targets for _, targets in pieces])
    return pieces


class Fingerprint:
    """A hash of the order of the data that does not depend on how they are split into batches.

    It reads the targets and at most 16 numbers of each input, enough to tell two orders or two data sets apart.
    """

    def __init__(self) -> None:
        self._inputs, self._targets = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)

    def update(self, inputs: Any, targets: Tensor) -> None:
        """Take in the next batch."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.numel():
                flat = leaf.reshape(leaf.shape[0], -1)
                sample = flat[:, :: max(1, -(-flat.shape[1] // 16))]
                sample = torch.view_as_real(sample) if sample.is_complex() else sample
                self._inputs.update(sample.detach().double().cpu().contiguous().numpy().tobytes())
                break
        self._targets.update(targets.detach().double().cpu().contiguous().numpy().tobytes())

    def __str__(self) -> str:
        return self._inputs.hexdigest() + self._targets.hexdigest()


# ---------------------------------------------------------------- memory

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(memory: int | str | None) -> int:
    """Bytes from a number or a text such as "2GB"; `None` is half of what is available now.

    >>> parse_memory("1.5GB"), parse_memory("512 MiB")
    (1500000000, 536870912)
    """
    if memory is None:
        return available_memory() // 2
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", memory.lower())
        if match is None:
            raise InputError(f"memory must be a number of bytes or a text such as '2GB', got {memory!r}.")
        memory = int(float(match[1]) * _UNITS[match[2] or ""])
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not math.isfinite(memory):
        raise InputError(f"memory must be a number of bytes or a text such as '2GB', got {memory!r}.")
    if memory < 1:
        raise InputError(f"memory must be positive, got {memory}.")
    return int(memory)


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its container if that allows less."""
    limits = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # where nothing better is known
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        limits = [int(text.split("MemAvailable:")[1].split()[0]) * 1024]
    for folder, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            root = Path("/sys/fs/cgroup") / folder
            free = int((root / limit).read_text()) - int((root / used).read_text())
            with contextlib.suppress(OSError, ValueError, IndexError):  # what is used holds files that can be dropped
                free += int((root / "memory.stat").read_text().split("inactive_file ")[1].split()[0])
            limits.append(free)
    return max(min(limits, default=2**32), 2**26)
