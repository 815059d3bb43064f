"""Thirty kinds of wrong value for every argument of everything public, taken from the signatures.

`tries()` yields one try after the other: a call that is right but for one argument. A try passes if it is answered with
one sentence (`InputError`, `NotExactError`) or with a result, and a result only where the argument's declared type
admits the value. A new public function, argument or method is covered by itself; one that needs an argument of a name
that `GOOD` does not know fails in `test_wrong_values`, which says so.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import decimal
import enum
import functools
import inspect
import io
import math
import operator
import random
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reports import report as made_up_report
from torch import nn

import spiritlevel as sl
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.results import Result, TrainingCurves


class Colour(enum.Enum):
    """Something that is not a number and not a text."""

    RED = 1


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "minus infinity": lambda: -math.inf,
    "zero": lambda: 0,
    "minus one": lambda: -1,
    "a half": lambda: 0.5,
    "a negative fraction": lambda: -2.5,
    "a huge whole number": lambda: 10**30,
    "a number beyond 64 bits as float": lambda: 1e300,
    "a complex number": lambda: 1j,
    "a decimal NaN": lambda: decimal.Decimal("nan"),
    "an empty text": lambda: "",
    "an unknown name": lambda: "nonsense",
    "a number as text": lambda: "1",
    "half a character": lambda: "\udcff",
    "bytes": lambda: b"\xff",
    "a path": lambda: Path("nowhere") / "at" / "all",
    "an empty list": list,
    "a list of a number": lambda: [1],
    "a list of names": lambda: ["nonsense", "nonsense"],
    "a list of nothing": lambda: [None],
    "an empty dict": dict,
    "a dict": lambda: {"nonsense": 1},
    "a dict of numbers": lambda: {1: None},
    "a generator": lambda: (each for each in ()),
    "an object": object,
    "a class": lambda: int,
    "a function": lambda: len,
    "an enumeration": lambda: Colour.RED,
    "a whole tensor of one": lambda: torch.tensor(2),
    "a tensor NaN": lambda: torch.tensor(math.nan),
    "a tensor": lambda: torch.tensor([1.0, 2.0]),
    "an empty tensor": lambda: torch.empty(0),
    "a complex tensor": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "a large tensor of no values": lambda: torch.empty(4, 3, device="meta"),
    "a NumPy NaN": lambda: np.float64("nan"),
    "an array of objects": lambda: np.array([None, {}], dtype=object),
    "a model": lambda: nn.Linear(1, 1),
}
"""The kinds of wrong value, by what they are called; each is made anew, as some can be used once only."""


def network() -> nn.Module:
    """A tiny network with batch norm, so that most transforms find something."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval()


def _pair(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 3


def _optimizer() -> torch.optim.Optimizer:
    model = network()
    inputs, targets = _pair()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _matrix() -> sl.Operator:
    diagonal = torch.arange(1.0, 6.0)
    return sl.Operator(lambda v: diagonal[:, None] * v, 5)


def _recorder() -> sl.Recorder:
    recorder = sl.Recorder(6)
    recorder.record(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), _pair()[1], torch.arange(6), step=1)
    return recorder


def _job() -> sl.training.Job:
    return sl.training.Job(network="mlp", data="fashion-mini", recipe=_recipe())


def _recipe() -> sl.training.Recipe:
    return sl.training.Recipe(steps=1, batch_size=2)


EMPTY = inspect.Parameter.empty

# What a required argument of that name may be.
GOOD: dict[str, Callable[[], Any]] = {
    "model": network,
    "model_a": network,
    "model_b": network,
    "data": _pair,
    "train": _pair,
    "pair": _pair,
    "op": _matrix,
    "inputs": lambda: torch.randn(6, 3),
    "logits": lambda: torch.randn(6, 3),
    "y": lambda: torch.arange(6) % 3,
    "targets": lambda: torch.arange(6) % 3,
    "ids": lambda: torch.arange(6),
    "a": lambda: torch.randn(30, generator=torch.Generator().manual_seed(1)),
    "b": lambda: torch.randn(30, generator=torch.Generator().manual_seed(2)),
    "values": lambda: torch.randn(30),
    "closure": lambda: lambda: torch.tensor(1.0),
    "optimizer": _optimizer,
    "samples": lambda: 6,
    "matmat": lambda: lambda v: v,
    "size": lambda: 5,
    "v": lambda: torch.ones(5),
    "name": lambda: "mlp",
    "alpha": lambda: 2.0,
    "delta": lambda: 0.5,
    "rho": lambda: 0.2,
    "r_hat": lambda: 0.7,
    "recipe": _recipe,
    "job": _job,
    "claim": lambda: sl.claims.select(id="C-4-softmax")[0],
    "rulings": list,
    "measure": lambda: "trace",
    "transform": lambda: "rescale_layers",
    "level": lambda: 0.9,
    "change": lambda: "int8",
    "factor": lambda: 2.0,
    "k": lambda: 1,
    "label": lambda: 0,
    "by": lambda: "aum",
    "step": lambda: 1,
    "function": lambda: torch.square,
    "draws": lambda: torch.randn(8),
    "text": lambda: sl.Estimate(1.0).to_json(),
    "state": lambda: _recorder().state_dict(),
    "of": lambda: made_up_report(12),
    "models": lambda: {"a": network(), "b": network()},
    "trainer": object,  # transformers is not installed here; where it is, this is the wrong one
}

# Calls that `GOOD` would get wrong, and options that make one quick.
SPECIAL: dict[str, dict[str, Callable[[], Any]]] = {
    "audit": {"measures": lambda: ["margin_mean"], "transforms": lambda: ["scale_last_layer"]},
    "compare": {"measures": lambda: ["margin_mean"], "audit": lambda: False},
    "measure": {"measures": lambda: ["margin_mean"], "parts": lambda: ["margins"]},
    "landscape": {"directions": lambda: "random", "points": lambda: 3},
    "measures.evaluate": {"measures": lambda: ["margin_mean"]},
    "transforms.rescale_layers": {"factors": lambda: {"3": 2.0}, "allow_output_scale": lambda: True},
    "transforms.scale_before_batchnorm": {"factors": lambda: {"0": 2.0}},
    "data.load": {"name": lambda: "digits"},
    "data.fetch": {"name": lambda: "digits"},
    "data.path": {"name": lambda: "digits"},
    "correlate": {"resamples": lambda: 9},
    "plot.training": {"of": lambda: TrainingCurves(({"step": 1, "loss": 0.5},), (), {"loss": "loss"})},
    "plot.save": {"chart": lambda: sl.plot.margins(made_up_report(12)), "path": lambda: "figure.svg"},
    "claims.run": {"id": lambda: "C-4-softmax"},
}

# What would download or train for minutes if the wrong value were admitted, or has no arguments of its own to check.
LEFT_OUT = {
    "claims.decide": "takes what a check of ours has found",
    "claims.decided": "takes the rulings that run() returned",
    "claims.tally": "takes the rulings that run() returned",
    "claims.run(id=None)": "is right, and checks all claims",
    "data.fetch": "would download",
    "training.train": "is called with a whole job",
    "training.parts": "is called with a whole job",
    "models.count": "counts whatever has parameters",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Something public that takes arguments: its name, how it is called, and a right call."""

    name: str
    function: Callable[..., Any]
    good: dict[str, Callable[[], Any]]
    parameters: dict[str, Any]
    hints: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Try:
    """A call that is right but for one argument."""

    target: Target
    argument: str
    kind: str

    def __str__(self) -> str:
        return f"{self.target.name}({self.argument}={self.kind})"

    def failure(self) -> str:
        """Nothing if it is answered as it should be, else what happened instead."""
        value, hint = WRONG[self.kind](), self.target.hints.get(self.argument, Any)
        given = {name: make() for name, make in self.target.good.items() if name != self.argument}
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                self.target.function(**given, **{self.argument: value})
            except (InputError, NotExactError) as error:
                return fault_of_sentence(str(error))
            except Exception as error:
                if callable(value) and takes_functions(hint):
                    return ""  # a function of the caller's own may fail as it likes
                return f"{type(error).__name__}: {str(error)[:150]}"
        drawn = self.argument == "seed" and self.kind == "a whole tensor of one"  # as generators give them
        return "" if drawn or admitted(value, hint) else "taken without a word"


def fault_of_sentence(text: str) -> str:
    """What keeps a message from being one sentence, if anything does."""
    if not text.rstrip().endswith((".", ")", "?", "`")) or "\n" in text.strip() or len(text) > 1500:
        return f"not one sentence: {text[:150]!r}"
    return ""


def takes_functions(hint: Any) -> bool:
    """Whether a declared type is that of a function, or may be."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return any(typing.get_origin(kind) is collections.abc.Callable for kind in kinds)


def admitted(value: Any, hint: Any) -> bool:
    """Whether a declared type takes a value: NaN is no number, no tensor for a number, no truth value for a count.

    >>> admitted(math.nan, float), admitted(3, int | None), admitted(True, int), admitted("a", int | str)
    (False, True, False, True)
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if not set(kinds) <= {int, float, bool, str, type(None)}:
        return True
    found = []
    for kind in kinds:
        if kind in (int, float):
            plain = not isinstance(value, bool | torch.Tensor | np.ndarray)
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                found.append(
                    plain
                    and (operator.index(value) is not None if kind is int else not math.isnan(float(value)))
                    and not isinstance(value, str)
                )
        else:
            found.append(isinstance(value, kind))
    return any(found)


# ---------------------------------------------------------------- what there is


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and every class that users build, by name."""
    for name in sl._HOME:
        value = getattr(sl, name)
        built = inspect.isclass(value) and not issubclass(value, Result | Exception) and not typing.is_typeddict(value)
        if inspect.isfunction(value) or built:
            yield name, value
        elif inspect.ismodule(value):
            names = getattr(value, "__all__", None) or [each for each in vars(value) if not each.startswith("_")]
            for inner in names:
                found = getattr(value, inner)
                if inspect.isfunction(found) and found.__module__.startswith(value.__name__):
                    yield f"{name}.{inner}", found


@functools.cache
def objects() -> dict[str, Any]:
    """A small one of every public kind of object that has methods."""
    from reports import report

    model, data = network(), _pair()
    matrix = _matrix()
    traces = sl.sample_traces(model, data)
    whole = report(40, pictured=4)
    return {
        "Estimate": sl.Estimate(1.0, 0.1, 5),
        "SampleTraces": traces,
        "Margins": sl.margins(model, data),
        "Eigenpairs": sl.eigenvalues(matrix, 2),
        "SpectralDensity": sl.spectral_density(matrix, probes=2, steps=4),
        "SmoothedDensity": sl.spectral_density(matrix, probes=2, steps=4).density(),
        "Correlation": sl.correlate(*torch.randn(2, 30)),
        "Landscape": whole.landscape,
        "Report": whole,
        "Audit": whole.audit,
        "SpectrumSummary": whole.spectrum,
        "Operator": matrix,
        "Recorder": _recorder(),
        "SuspiciousSamples": _recorder().suspects(3),
    }


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public method of every public object."""
    for name, thing in objects().items():
        for method in sorted(dir(type(thing))):
            found = inspect.getattr_static(type(thing), method)
            if not method.startswith("_") and (inspect.isfunction(found) or isinstance(found, classmethod)):
                yield f"{name}.{method}", getattr(thing, method)


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The named parameters of a function or of a class that is built, and their defaults (`EMPTY` where required)."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[name] = parameter.default
        elif parameter.kind is parameter.VAR_KEYWORD:  # options that several functions share
            found |= dict.fromkeys(_shared(_hints(function).get(name)))
    return found


def _shared(hint: Any) -> dict[str, Any]:
    return typing.get_type_hints(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Unpack else {}


def targets() -> list[Target]:
    """All that is public and takes arguments."""
    found = []
    for name, function in [*functions(), *methods()]:
        parameters = parameters_of(function)
        if not parameters or name in LEFT_OUT:
            continue
        required = [each for each, default in parameters.items() if default is EMPTY]
        good = {each: GOOD[each] for each in required if each in GOOD} | SPECIAL.get(name, {})
        hints = _hints(function)
        for hint in [*hints.values()]:
            hints |= _shared(hint)
        found.append(Target(name, function, good, parameters, hints))
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except NameError:  # a type that exists for the type checker only
        return {}


def tries(count: int | None = None, seed: int = 0) -> list[Try]:
    """Every argument with every kind of wrong value, or as many of them, spread evenly over all functions."""
    every = [Try(target, argument, kind) for target in targets() for argument in target.parameters for kind in WRONG]
    every = [each for each in every if str(each) not in LEFT_OUT]
    return every if count is None or count >= len(every) else random.Random(seed).sample(every, count)
