"""What all tests share: hypothesis profiles, threads, seeds, and the promise that a measurement leaves no trace."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: waiting threads do not spin
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported: its second thread would

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

torch.set_num_threads(2)  # the same everywhere, so that sums add up in the same order

collect_ignore = [
    "stand_ins",  # would be imported under the names of what they stand in for
    "pretend_device.py",  # whoever imports it has another device
]

Untouched = Callable[..., AbstractContextManager[None]]


def random_states() -> dict[str, Any]:
    """Copies of the global random states of torch, NumPy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "numpy": (kind, keys.tobytes(), *rest), "python": random.getstate()}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a measurement could disturb; tensors are cloned, identities kept."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state[f"{name}: mode"] = module.training
        state[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            if "hooks" in key:
                state[f"{name}: {key}"] = dict(value) if isinstance(value, dict) else value
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                state[f"{name}.{key}"] = None
                continue
            state[f"{name}.{key}: identity"] = (id(tensor), type(tensor), tensor.dtype, tensor.device)
            state[f"{name}.{key}: requires_grad"] = tensor.requires_grad
            state[f"{name}.{key}: value"] = tensor.detach().clone()
            state[f"{name}.{key}: grad"] = None if tensor.grad is None else tensor.grad.clone()
            state[f"{name}.{key}: hooks"] = dict(getattr(tensor, "_backward_hooks", None) or {})
    return state


def global_settings() -> dict[str, Any]:
    """Switches of torch that a measurement may turn and must turn back."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def same(before: Any, after: Any) -> bool:
    """Equality to the last bit, NaN included."""
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        return bool(torch.equal(before.nan_to_num(), after.nan_to_num()) and torch.equal(before.isnan(), after.isnan()))
    return type(before) is type(after) and bool(before == after)


@pytest.fixture
def untouched() -> Untouched:
    """A context manager, `with untouched(model, ...):`, that fails if anything inside it leaves a trace.

    It compares parameters, buffers, gradients, modes, `requires_grad` and hooks of the models, the random states of
    torch, NumPy and Python, and torch's global switches, also if the block raises.
    """

    @contextmanager
    def check(*models: nn.Module) -> Iterator[None]:
        def snapshot() -> dict[str, Any]:
            states = {f"model {i}, {key}": value for i, m in enumerate(models) for key, value in model_state(m).items()}
            return {**states, **random_states(), **global_settings()}

        before = snapshot()
        try:
            yield
        finally:
            after = snapshot()
            changed = [key for key in {**before, **after} if not same(before.get(key), after.get(key))]
            assert not changed, f"left a trace in: {', '.join(changed)}"

    return check


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random states."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """With NO_SKIPS=1, as `make bench` sets it, a package that is missing is a failure and no skip."""
    report: Any = yield
    if report.skipped and os.environ.get("NO_SKIPS") == "1" and not hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"skipped, where nothing may be: {report.longrepr}"
    return report
