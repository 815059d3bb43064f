"""The state of a module and of the random generators: taken, changed during a measurement, and restored."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from spiritlevel.binding.devices import generators, random_state

_turn = threading.RLock()


def _renew_turn() -> None:
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread that holds the old one may not exist in the child
    os.register_at_fork(after_in_child=_renew_turn)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let one thread at a time measure: meanwhile a model holds other tensors, and switches of the process are set."""
    with _turn:
        yield


@contextlib.contextmanager
def preserved_random_state(*others: torch.Generator) -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python, and those of other generators."""
    python, numpy_state = random.getstate(), np.random.get_state()
    states = [(generator, generator.get_state()) for generator in others]
    with torch.random.fork_rng(devices=generators()):
        try:
            yield
        finally:
            random.setstate(python)
            if not _same_state(np.random.get_state(), numpy_state):  # setting it takes ten times as long as asking
                np.random.set_state(numpy_state)
            for generator, state in states:
                generator.set_state(state)


def _same_state(now: Any, then: Any) -> bool:
    """Whether two states of NumPy's generator are the same; one that is not NumPy's usual kind counts as changed."""
    if not (isinstance(now, tuple) and isinstance(then, tuple)):
        return False
    return bool(now[0] == then[0] and now[2:] == then[2:] and now[1].tobytes() == then[1].tobytes())


_CONTAINERS = {list, deque, dict, OrderedDict, defaultdict, set}  # exactly these: a subclass may refuse to be refilled


@contextlib.contextmanager
def preserved_module(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restore the attributes, mode, parameters and buffers (the same objects) of every submodule.

    Old-style weight norm, for one, leaves a computed `weight` on the module at every call. Lists, dicts and sets that
    can be reached from the attributes get their contents back: a module that collects its activations in one would
    otherwise be left with tensors that are useless outside the transformation that made them. Tensors that are
    plain attributes get their values back. Yields a function that says whether there is anything to restore.
    """
    saved: dict[int, tuple[Any, Sequence[Any]]] = {}
    found: list[Any] = [module.__dict__ for module in model.modules()]
    plain = [item for attributes in found for item in attributes.values() if isinstance(item, Tensor)]
    tensors = [(item, item._version, item.detach().clone()) for item in plain if not item.is_inference()]
    while found:
        container = found.pop()
        if id(container) in saved:
            continue
        if not container:  # as most are: every module has a dozen dicts for hooks
            saved[id(container)] = container, ()
            continue
        saved[id(container)] = container, _content(container)
        inside = container.values() if isinstance(container, dict) else container
        found += [item for item in inside if type(item) in _CONTAINERS]

    def changed() -> bool:
        written = any(item._version != version for item, version, _ in tensors)
        kept = ((now, then) for now, then in saved.values() if now or then)
        return written or any(not _same_content(_content(now), then) for now, then in kept)

    try:
        yield changed
    finally:
        for container, content in saved.values():
            if not (container or content):
                continue
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(content)
        for item, version, values in tensors:
            if item._version != version:
                item.data.copy_(values)


def _content(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _same_content(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects; for pairs, the same second items under equal first ones."""
    if len(now) != len(then):
        return False
    pairs = zip(now, then, strict=True)
    return all(a is b or (type(a) is type(b) is tuple and len(a) == 2 and a[1] is b[1]) for a, b in pairs)


@functools.cache
def _load_forward_mode() -> None:
    """Make torch load its forward-mode rules, and spare the user its deprecation warnings about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.clone, (torch.zeros(()),), (torch.zeros(()),))


class _NotReentrant:
    """Replaces the function behind reentrant checkpoints: runs what it is given, and keeps the activations."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _kept(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces what surrounds other checkpoints: nothing is thrown away, so nothing is recomputed."""
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
def twice_differentiable(model: nn.Module) -> Iterator[None]:
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


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No reduced precision inside, whatever the caller has switched on."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def random_states(device: torch.device) -> tuple[Any, ...] | None:
    """What changes if anything draws from the global generators; `None` inside transformations of `torch.func`."""
    try:
        state = random_state(device)
        own = b"" if state is None else state.numpy().tobytes()
        shared = torch.get_rng_state().numpy().tobytes()
    except RuntimeError:  # a wrapped tensor has no numbers to look at
        return None
    numbers: Any = np.random.get_state()
    return shared, own, numbers[1].tobytes(), numbers[2:], random.getstate()


def advance_random_states(*others: torch.Generator) -> None:
    """Advance the random states, so that whatever draws from them draws something else."""
    torch.rand(1), np.random.random(), random.random()
    for generator in others:
        torch.rand(1, generator=generator, device=generator.device)
