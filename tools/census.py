"""Every differentiable operation of PyTorch by every mode of differentiation that we use, each in a child process.

The list is PyTorch's own, `op_db`, with its sample inputs. A sample becomes a small network whose parameters move the
operation's arguments, h(θ) = W·op(a + θ + c·θ²/2) at θ = 0, so that what goes in has first and second derivatives.
What is measured is compared with second differences of the loss in float64, which need no derivative at all.

    python tools/census.py --page docs/operations.md  # all of them, about twenty minutes: `make census`
    python tools/census.py --only ldexp mse           # those whose names contain one of these
    python tools/census.py --quick                    # what was once found bad, and every 40th of the rest
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "expecttest" not in sys.modules:  # imported by the tables of PyTorch's own tests, and used by none of them
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stub
warnings.simplefilter("ignore")

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import UnaryUfuncInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import spiritlevel as sl
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.operators.products import _hessian_forward, _hessian_in_reverse
from spiritlevel.samples import probing

# the tables of PyTorch's own tests forbid setting a flag that we set and restore
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

SAMPLES, OUTPUTS = 2, 3
SECONDS = 60  # for one way with one sample
LARGEST = 150, 1500  # the most numbers that move in a sample; the second where no sample meets the first
TOLERANCE = 1e-4  # relative; an error in a derivative is usually of order one

ROUNDS = {"bfloat16", "half", "float", "chalf", "cfloat"}  # casts: what they return is a staircase

# ---------------------------------------------------------------- the cases


@dataclass
class Case:
    """An operation on one sample, with some of its arguments as parameters."""

    operation: str
    form: str
    call: Callable[[list[Any]], Any]
    leaves: list[Any]
    moving: list[int]


def name_of(operation: Any) -> str:
    return operation.name + (f" ({operation.variant_test_name})" if operation.variant_test_name else "")


def operations() -> dict[str, Any]:
    """All that can be differentiated in float64, by name."""
    known = {name_of(op): op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes}
    return {name: op for name, op in known.items() if name not in ROUNDS}


def _moves(leaf: Tensor) -> bool:
    return leaf.requires_grad and leaf.dtype == torch.float64 and leaf.numel() > 0 and leaf.layout == torch.strided


def moving_leaves(leaves: list[Any]) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _moves(leaf)]


def samples(operation: Any, largest: int) -> list[tuple[Any, list[Any], Any, list[int]]]:
    """Sample inputs that differ in shapes or options: the sample, its leaves, their structure, and which can move."""
    found: dict[str, Any] = {}
    for sample in operation.sample_inputs("cpu", torch.float64, requires_grad=True):
        if isinstance(operation, UnaryUfuncInfo):  # hundreds of numbers, some of them at the edge of the domain
            sample.input = sample.input.detach().reshape(-1)[:12].reshape(-1, *[1] * (sample.input.ndim - 1))
            sample.input.requires_grad_()
        leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
        moving = moving_leaves(leaves)
        if moving and sum(leaves[i].numel() for i in moving) <= largest:
            shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            found.setdefault(f"{form} {shapes}", (sample, leaves, form, moving))
    return list(found.values())


def cases(operation: Any, most: int) -> Iterator[Case]:
    """Samples that differ in what they ask for, all arguments moving and each alone; methods and in-place forms."""
    torch.manual_seed(0)
    chosen = samples(operation, LARGEST[0]) or samples(operation, LARGEST[1])
    step = max(1, len(chosen) // most)
    for index, (sample, leaves, form, moving) in enumerate(chosen[::step][:most]):
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def as_function(values: list[Any], sample: Any = sample, form: Any = form) -> Any:
            first, args, kwargs = tree_unflatten(values, form)
            return sample.output_process_fn_grad(operation.gradcheck_wrapper(operation, first, *args, **kwargs))

        yield Case(name_of(operation), "function", as_function, detached, moving)
        for alone in moving if len(moving) > 1 else []:
            yield Case(name_of(operation), f"argument {alone + 1} alone", as_function, detached, [alone])
        if index:
            continue
        for label, variant in (("method", operation.method_variant), ("in place", operation.inplace_variant)):
            if variant is None or not isinstance(sample.input, Tensor):
                continue

            def as_variant(values: list[Any], variant: Any = variant, sample: Any = sample, form: Any = form) -> Any:
                first, args, kwargs = tree_unflatten(values, form)
                wrapped = operation.gradcheck_wrapper(variant, first.clone(), *args, **kwargs)
                return sample.output_process_fn_grad(wrapped)

            yield Case(name_of(operation), label, as_variant, detached, moving)


class Applied(nn.Module):
    """h(θ) = W·op(a + θ + c·θ²/2), times the input."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        generator = torch.Generator().manual_seed(1)
        for index in case.moving:
            shape = case.leaves[index].shape
            self.register_parameter(f"move_{index}", nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
            self.register_buffer(f"bend_{index}", torch.randn(shape, generator=generator, dtype=torch.float64))
        size = len(self.result())
        weight = torch.randn(size, OUTPUTS, generator=generator, dtype=torch.float64) / math.sqrt(max(size, 1))
        self.register_buffer("weight", weight)

    def result(self, offsets: Tensor | None = None) -> Tensor:
        leaves = list(self.case.leaves)
        for index in self.case.moving:
            move, bend = getattr(self, f"move_{index}"), getattr(self, f"bend_{index}")
            if offsets is not None:
                part, offsets = offsets[: move.numel()].reshape(move.shape), offsets[move.numel() :]
                move = move + part
            leaves[index] = leaves[index] + move + bend * move * move / 2
        parts = [item for item in tree_leaves(self.case.call(leaves)) if isinstance(item, Tensor)]
        parts = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in parts]
        parts = [part.to_dense() if part.layout != torch.strided else part for part in parts]
        numbers = [part.reshape(-1).double() for part in parts if part.is_floating_point()]
        return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.result() @ self.weight)


class Offsets(nn.Module):
    """A model whose outputs are its parameters times the input: the operation is then part of the loss."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.offsets


# ---------------------------------------------------------------- the truth


class NotSmooth(Exception):
    """Second differences do not settle: a kink, a jump or random numbers."""


def second_difference(function: Callable[[Tensor], Tensor], direction: Tensor) -> Tensor:
    """d²/dt² of function(t · direction) at 0, from the two step sizes that agree best."""
    here, found = function(torch.zeros_like(direction)), []
    for step in (4e-3, 2e-3, 1e-3, 5e-4, 2.5e-4):
        ahead, behind = function(step * direction), function(-step * direction)
        found.append((ahead - 2 * here + behind) / step**2)
    better = [(4 * fine - coarse) / 3 for coarse, fine in itertools.pairwise(found)]
    gaps = [float((a - b).abs().max()) for a, b in itertools.pairwise(better)]
    best = min(range(len(gaps)), key=lambda i: gaps[i] if math.isfinite(gaps[i]) else math.inf)
    noise = 1e-15 * float(here.abs().max()) / 1e-6
    if not gaps[best] <= 0.1 * TOLERANCE * float(better[best].abs().max()) + noise:
        raise NotSmooth
    return better[best]


class Measured:
    """One case: its model and data, directions, and the second differences along them."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Applied(case)
        generator = torch.Generator().manual_seed(2)
        self.x = torch.tensor([[1.0], [-0.6]], dtype=torch.float64)
        self.y = torch.randn(SAMPLES, OUTPUTS, generator=generator, dtype=torch.float64)
        self.size = sum(parameter.numel() for parameter in self.model.parameters())
        self.u, self.v = torch.randn(2, self.size, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            outputs = self.model(self.x)
        if not bool(torch.isfinite(outputs).all()):
            raise NotSmooth
        self.y *= outputs.abs().max().clamp(min=1e-3)  # so that curvature and slope both count
        self.data = self.x, self.y
        self.forms = self._forms(lambda point: self.losses(self.outputs(point)).mean())

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        parts = vector.split([shape.numel() for shape in shapes.values()])
        return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}

    def outputs(self, point: Tensor) -> Tensor:
        with torch.no_grad():
            return functional_call(self.model, self.split(point), (self.x,))

    def losses(self, outputs: Tensor) -> Tensor:
        return 0.5 * (outputs - self.y).square().sum(1)

    def _forms(self, loss: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
        """uᵀHu, vᵀHv, uᵀHv."""
        along = [float(second_difference(loss, d)) for d in (self.u, self.v, self.u + self.v)]
        return along[0], along[1], (along[2] - along[0] - along[1]) / 2

    def agrees(self, product: Callable[[Tensor], Tensor], forms: tuple[float, float, float] | None = None) -> bool:
        """Whether products with u and v have the right forms, uᵀ(Hv) and vᵀ(Hu) both."""
        uu, vv, uv = forms or self.forms
        along_u, along_v = product(self.u), product(self.v)
        pairs = [(self.u @ along_u, uu), (self.v @ along_v, vv), (self.u @ along_v, uv), (self.v @ along_u, uv)]
        return close([float(found) for found, _ in pairs], [wanted for _, wanted in pairs])


def close(found: Any, wanted: Any) -> bool:
    found, wanted = (torch.as_tensor(item, dtype=torch.float64) for item in (found, wanted))
    scale = float(wanted.abs().max())
    return bool((found - wanted).abs().max() <= TOLERANCE * scale + 1e-7)


# ---------------------------------------------------------------- the ways


def double_backward(m: Measured) -> bool:
    """PyTorch alone, with nothing of ours."""
    point = {name: p.detach().requires_grad_() for name, p in m.model.named_parameters()}
    loss = m.losses(functional_call(m.model, point, (m.x,))).mean()
    gradient = torch.autograd.grad(loss, list(point.values()), create_graph=True, materialize_grads=True)

    def product(vector: Tensor) -> Tensor:
        along = sum((g * part).sum() for g, part in zip(gradient, m.split(vector).values(), strict=True))
        parts = torch.autograd.grad(along, list(point.values()), retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    return m.agrees(product)


def one_batch(m: Measured, way: Callable[..., Any]) -> bool:
    problem = Problem(m.model, loss="squared_error")

    def product(vector: Tensor) -> Tensor:
        with problem.active():
            found = way(problem, m.split(vector), problem.params, m.x, m.y)
        return torch.cat([part.reshape(-1) for part in found.values()]) / SAMPLES

    return m.agrees(product)


def forward_over_reverse(m: Measured) -> bool:
    """`jvp` of `vjp`, with our rewritten operations."""
    return one_batch(m, _hessian_forward)


def reverse_over_reverse(m: Measured) -> bool:
    """The same by reverse mode alone."""
    return one_batch(m, _hessian_in_reverse)


def nested_forward(m: Measured) -> bool:
    """Second derivatives of the outputs by `jvp` of `jvp`, with our rewritten operations."""
    problem = Problem(m.model, loss="squared_error")
    with problem.active():
        outputs, _, second = probing.along_forward(problem, m.x, m.split(m.v))
    return close(outputs, m.outputs(torch.zeros_like(m.v))) and close(second, second_difference(m.outputs, m.v))


def hessian(m: Measured) -> bool:
    """`sl.hessian`, one vector and several at once: traced, replayed and vectorised."""
    operator = sl.hessian(m.model, m.data, loss="squared_error")
    both = operator @ torch.stack([m.u, m.v], 1)
    return m.agrees(lambda d: operator @ d) and m.agrees(lambda d: both[:, 0] if d is m.u else both[:, 1])


def in_the_loss(m: Measured) -> bool:
    """`sl.hessian` of a callable loss that uses the operation."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        results = [m.model.result(row) @ m.model.weight for row in outputs]
        return 0.5 * (torch.stack(results) - targets).square().sum(1)

    model = Offsets(m.size)

    def mean_loss(point: Tensor) -> Tensor:
        with torch.no_grad():
            return loss(m.x * point, m.y).mean()

    forms = m._forms(mean_loss)
    operator = sl.hessian(model, m.data, loss=loss)
    return m.agrees(lambda d: operator @ d, forms)


def probed_traces(m: Measured) -> bool:
    """What `sample_traces` says of each probe and sample."""
    problem = Problem(m.model, loss="squared_error")
    found = sl.sample_traces(m.model, m.data, loss="squared_error", method="hutchinson", probes=2, seed=3).draws
    for index in range(2):
        probe = torch.cat([part.reshape(-1) for part in probing.probe(problem.params, 3, index).values()])
        if not close(found[:, index], second_difference(lambda point: m.losses(m.outputs(point)), probe)):
            return False
    return True


def exact_traces(m: Measured) -> bool:
    """`sample_traces` where it claims to be exact."""
    result = sl.sample_traces(m.model, m.data, loss="squared_error", probes=2)
    if not result.exact:
        return True
    total = torch.zeros(SAMPLES, dtype=torch.float64)
    for direction in torch.eye(m.size, dtype=torch.float64):
        total += second_difference(lambda point: m.losses(m.outputs(point)), direction)
    return close(result.values, total)


INSIDE = (double_backward, forward_over_reverse, reverse_over_reverse, nested_forward)
PUBLIC = (hessian, in_the_loss, probed_traces, exact_traces)
ORDER = ("died", "wrong", "error", "too slow", "refused", "not tried", "right")  # from the worst to the best

# What was once wrong, fatal or needlessly refused: `--quick` tries all of it.
ONCE_BAD = frozenset(
    """
    ldexp nn.functional.mse_loss nn.functional.layer_norm native_layer_norm native_batch_norm cdist corrcoef
    cholesky_inverse triangular_solve as_strided_scatter nn.functional.normalize nn.functional.rms_norm
    nn.functional.max_unpool2d nn.functional.embedding nn.functional.embedding_bag nn.functional.multi_margin_loss
    nn.functional.hardsigmoid nn.functional.glu normal nn.functional.pdist
    """.split()
) | {"scatter_reduce (prod)", "nn.functional.linear_cross_entropy (chunked)"}

# ---------------------------------------------------------------- children


def verdict(way: Callable[[Measured], bool], measured: Measured) -> tuple[str, str]:
    try:
        with torch.random.fork_rng():
            return ("right" if way(measured) else "wrong"), ""
    except (InputError, NotExactError) as error:
        return "refused", str(error)
    except NotSmooth:
        return "no truth", ""
    except Exception as error:
        return "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"


def child(operation: Any, most: int, skip: set[tuple[int, str]], write: Callable[[Any], None]) -> None:
    for index, case in enumerate(cases(operation, most)):
        ways = (*INSIDE, *PUBLIC) if case.form == "function" else PUBLIC
        todo = [way for way in ways if (index, way.__name__) not in skip]
        if not todo:
            continue
        try:
            measured = Measured(case)
        except Exception:  # the operation does not run in this form, or has no second differences here
            continue
        for way in todo:
            write([index, case.form, way.__name__])
            signal.alarm(SECONDS)
            write([index, case.form, way.__name__, *verdict(way, measured)])
            signal.alarm(0)


@dataclass
class Result:
    """What was found for one operation: verdicts by way, each with how often and the first example."""

    name: str
    found: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def add(self, way: str, kind: str, form: str, detail: str) -> None:
        entry = self.found.setdefault(way, {}).setdefault(kind, [0, form, detail])
        entry[0] += 1

    def kinds(self, way: str) -> set[str]:
        return set(self.found.get(way, {}))

    @property
    def public(self) -> str:
        """The worst of the verdicts of the public functions."""
        kinds = set().union(*(self.kinds(way.__name__) for way in PUBLIC))
        return next((kind for kind in ORDER if kind in kinds), "not tried")


def census(operation: Any, most: int) -> Result:
    """All ways with all cases of an operation, in as many children as it takes."""
    result, seen = Result(name_of(operation)), set[tuple[int, str]]()
    while True:
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(source)
            with os.fdopen(sink, "w", buffering=1) as stream:
                child(operation, most, seen, lambda item: stream.write(json.dumps(item) + "\n"))
            os._exit(0)
        os.close(sink)
        last: list[Any] | None = None
        with os.fdopen(source) as stream:
            for line in stream:
                item = json.loads(line)
                if len(item) == 3:
                    last = item
                else:
                    result.add(item[2], item[3], item[1], item[4])
                    seen.add((item[0], item[2]))
                    last = None
        _, status = os.waitpid(pid, 0)
        if last is None:
            return result
        slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status}"
        result.add(last[2], "too slow" if slow else "died", last[1], "" if slow else how)
        seen.add((last[0], last[2]))


# ---------------------------------------------------------------- the result


def listed(result: Result) -> str:
    """What is not simply right, in one line for each way."""
    lines = []
    for way in (*INSIDE, *PUBLIC):
        for kind, (count, form, detail) in result.found.get(way.__name__, {}).items():
            if kind not in ("right", "no truth") and (way in PUBLIC or kind in ("wrong", "died")):
                lines.append(f"    {way.__name__}: {kind}, {count} × ({form}) {detail}")
    return "\n".join(lines)


def page(results: list[Result], samples: int, left: list[str]) -> str:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.public, []).append(result)
    counts = ", ".join(f"{len(groups[kind])} {kind}" for kind in ORDER if kind in groups)
    lines = [
        "# Operations",
        "",
        "Generated by `tools/census.py` (`make census`); do not edit.",
        "",
        f"Every differentiable operation in PyTorch's own table (`op_db` of torch {torch.__version__}), {samples} of "
        "its sample inputs each, all arguments together and one by one, as function, method and in place, in a child "
        "process: what `hessian` (products, one and several at once; with the operation in the model, and in a "
        "callable loss) and `sample_traces` (probed, and where they say exact) return, compared with second "
        f"differences of the loss in float64, to a relative {TOLERANCE:g}. Of {len(results)} operations: {counts}.",
        "",
        "*right*: every number is. *refused*: some form of it is refused with a sentence, and what is not refused is "
        "right. *wrong*, *died*, *error* (anything but a sentence): faults. *not tried*: no sample has second "
        "differences (random numbers, sizes, kinks everywhere).",
    ]
    if left:
        lines += ["", f"**{len(left)} more were not reached in the time that this run was given:** {code(left)}."]
    for kind in ORDER[:-1]:
        if kind not in groups:
            continue
        lines += ["", f"## {kind.capitalize()}", ""]
        if kind == "not tried":
            lines.append(code(result.name for result in groups[kind]))
            continue
        for result in groups[kind]:
            lines.append(f"- `{result.name}`: {reasons(result)}")
    lines += ["", "## What PyTorch itself gets wrong", ""]
    lines.append(
        "Without what `spiritlevel.binding.rewrites` writes out, plain double backward is wrong, or missing, in some "
        "form of these; `hessian` and `sample_traces` are right or refuse, as above."
    )
    for kind in ("wrong", "error"):
        names = [result.name for result in results if kind in result.kinds("double_backward")]
        lines += ["", f"- {'wrong' if kind == 'wrong' else 'missing'}: {code(names)}"]
    for way in INSIDE[1:]:
        text = code(result.name for result in results if "wrong" in result.kinds(way.__name__)) or "nothing"
        lines += ["", f"Still wrong in our forms by `{way.__name__}` alone, and noticed by a check: {text}."]
    lines += ["", "## Right", "", code(result.name for result in groups.get("right", [])), ""]
    return "\n".join(lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def reasons(result: Result) -> str:
    """The first sentence for each verdict of a public function that is not right."""
    texts = {}
    for way in PUBLIC:
        for kind, (_, form, detail) in result.found.get(way.__name__, {}).items():
            if kind not in ("right", "no truth"):
                texts.setdefault(kind, f"{kind} ({form}, `{way.__name__}`){': ' if detail else ''}{detail}")
    return "; ".join(texts.values())


def chosen_names(options: argparse.Namespace) -> list[str]:
    names = list(operations())
    if options.after:
        names = names[names.index(options.after) + 1 :]
    if options.quick:
        return [name for index, name in enumerate(names) if name in ONCE_BAD or index % 40 == 0]
    if options.only:
        return [name for name in names if any(part in name for part in options.only)]
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="only operations whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="only what was once found bad, and a sample of the rest")
    parser.add_argument("--after", help="only what follows this operation in the table")
    parser.add_argument("--samples", type=int, default=2, help="sample inputs per operation")
    parser.add_argument("--json", type=Path, help="file to keep the verdicts in")
    parser.add_argument("--page", type=Path, help="file to write the page to")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing new after this many minutes")
    parser.add_argument("--resume", action="store_true", help="reuse the verdicts already in --json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options.resume and options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    known, results, left, start = operations(), [], [], time.monotonic()
    for name in chosen_names(options):
        if name not in found and time.monotonic() - start > 60 * options.minutes:
            left.append(name)
            continue
        result = Result(name, found[name]) if name in found else census(known[name], options.samples)
        results.append(result)
        found[name] = result.found
        print(f"{result.public:10} {name}", flush=True)
        if text := listed(result):
            print(text, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.page:
        options.page.write_text(page(results, options.samples, left))
    if bad := [result.name for result in results if result.public in ("died", "wrong", "error")]:
        sys.exit(f"faults: {', '.join(bad)}")


if __name__ == "__main__":
    main()
