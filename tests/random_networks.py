"""Random networks as plain data: programs of small steps, made from a seed, that can be shrunk and kept as JSON.

A program says everything about a measurement: the network, its weights (a seed), the data, the loss, the dtype. Every
step takes whatever it is given: it reshapes, cuts or fills its input to what it needs, so that a program is still one
after any step was left out, and a counterexample can be shrunk blindly.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from random_blocks import BLOCKS, Fitted, Shape, With, as_kind, embedding, fit
from torch import Tensor, nn
from torch.nn import functional as F

Program = dict[str, Any]
Step = dict[str, Any]
MOST_PARAMETERS = 60

# ---------------------------------------------------------------- blocks of blocks


class Builder:
    """Makes the modules of a program, each for the shape that arrives at it."""

    def __init__(self) -> None:
        self.made: list[tuple[nn.Module, Shape]] = []

    def path(self, steps: list[Step], shape: Shape) -> tuple[nn.Module, Shape]:
        modules = []
        for step in steps:
            module, shape = self.step(step, shape)
            modules.append(module)
        return nn.Sequential(*modules), shape

    def step(self, step: Step, shape: Shape) -> tuple[nn.Module, Shape]:
        options = {key: value for key, value in step.items() if key != "do"}
        if step["do"] in NESTED:
            module = NESTED[step["do"]](self, shape, **options)
        else:
            kind, _, build, _ = BLOCKS[step["do"]]
            inside = tuple(as_kind(torch.zeros(2, *shape), kind).shape[1:])
            module = Fitted(kind, build(inside, **options))
            self.made.append((module, shape))
        return module, _shape_after(module, shape)


def _shape_after(module: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        twin = copy.deepcopy(module).double().eval()
        example = torch.randn(3, *shape, dtype=torch.float64)
        return tuple(twin(example).shape[1:])


def _residual(builder: Builder, shape: Shape, path: list[Step]) -> nn.Module:
    inner, _ = builder.path(path, shape)
    return With(lambda own, x: x + fit(own.inner(x), x.shape[1:]), inner=inner)


def _branch(builder: Builder, shape: Shape, how: str, paths: list[list[Step]]) -> nn.Module:
    made = [builder.path(path, shape) for path in paths]
    size = max(math.prod(after) for _, after in made)

    def forward(own: Any, x: Tensor) -> Tensor:
        parts = [path(x).flatten(1) for path in own.paths]
        if how == "cat":
            return torch.cat(parts, 1)
        parts = [fit(part, (size,)) for part in parts]
        if how == "written":
            result = x.new_empty(len(x), len(parts) * size)
            for index, part in enumerate(parts):
                result[:, index * size : (index + 1) * size] = part
            return result
        if how == "product":
            return torch.stack(parts).prod(0) if len(parts) != 2 else parts[0] * parts[1]
        if how == "max":
            return torch.stack(parts).amax(0)
        if how == "gate":
            return parts[0] * torch.sigmoid(parts[-1])
        if how == "where":
            chosen = x.detach().flatten(1).sum(1, keepdim=True) > 0
            return torch.where(chosen, parts[0], parts[-1])
        return torch.stack(parts, 2).sum(2)

    return With(forward, paths=nn.ModuleList(path for path, _ in made))


def _repeat(builder: Builder, shape: Shape, times: int, path: list[Step]) -> nn.Module:
    """The same weights several times in a row."""
    inner, _ = builder.path(path, shape)

    def forward(own: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = fit(own.inner(x), shape)
        return x

    return With(forward, inner=inner)


def _again(builder: Builder, shape: Shape, of: int) -> nn.Module:
    """An earlier block once more, with the same weights."""
    if not builder.made:
        return nn.Identity()
    module, wanted = builder.made[of % len(builder.made)]
    if wanted == ("tokens",):
        return nn.Identity()
    return With(lambda own, x: own.inner(fit(x, wanted)), inner=module)


def _experts(builder: Builder, shape: Shape, form: str, weighted: bool, paths: list[list[Step]]) -> nn.Module:
    """A mixture of experts: every sample goes to one of them."""
    made = [builder.path(path, shape) for path in paths]
    size = max(math.prod(after) for _, after in made)
    router = nn.Linear(math.prod(shape), len(paths))

    def forward(own: Any, x: Tensor) -> Tensor:
        scores = own.router(x.flatten(1))
        chosen = scores.argmax(1)
        result = x.new_zeros(len(x), size)
        for index, expert in enumerate(own.paths):
            if form == "mask":
                result = result + (chosen == index)[:, None] * fit(expert(x), (size,))
                continue
            places = (chosen == index).nonzero()[:, 0]
            rows = x[places]
            if rows.shape[0] == 0:
                continue
            found = fit(expert(rows), (size,))
            if form == "index_add":
                result = result.index_add(0, places, found)
            else:
                result[places] = found
        return result * scores.softmax(1).amax(1, keepdim=True) if weighted else result

    return With(forward, paths=nn.ModuleList(path for path, _ in made), router=router)


NESTED: dict[str, Callable[..., nn.Module]] = {
    "residual": _residual,
    "branch": _branch,
    "repeat": _repeat,
    "again": _again,
    "experts": _experts,
}
NESTED_CHOICES: dict[str, dict[str, list[Any]]] = {
    "residual": {},
    "branch": {"how": ["cat", "sum", "product", "max", "gate", "where", "written"]},
    "repeat": {"times": [2, 3, 1]},
    "again": {"of": list(range(6))},
    "experts": {"form": ["write", "index_add", "mask"], "weighted": [False, True]},
}


# ---------------------------------------------------------------- losses


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - F.one_hot(targets, outputs.shape[1])).square().sum(1)


def _exponential(outputs: Tensor, targets: Tensor) -> Tensor:
    others = 1 - F.one_hot(targets, outputs.shape[1])
    return (others * torch.exp(outputs - outputs.gather(1, targets[:, None]))).sum(1)


def _focal(outputs: Tensor, targets: Tensor) -> Tensor:
    logs = outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]
    return -((1 - logs.exp()) ** 2) * logs


class _WithFactors:
    """A squared error that says how it curves."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum(1)

    def factors(self, outputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(outputs.shape[1]):
            yield (
                torch.full_like(outputs[:, 0], 2, dtype=torch.float64),
                F.one_hot(torch.full_like(outputs[:, 0], index).long(), outputs.shape[1]).double(),
            )


def _elementwise(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: function(outputs, targets, reduction="none", **options).sum(1)


Function = Callable[[Tensor, Tensor], Tensor]
_mse = _elementwise(F.mse_loss)
_huber = _elementwise(F.huber_loss)
_smooth = _elementwise(F.smooth_l1_loss)
_poisson = _elementwise(F.poisson_nll_loss)
LOSSES: dict[str, tuple[str, Any, Function]] = {
    "cross_entropy": ("classes", "cross_entropy", _cross_entropy),
    "squared_error": ("classes", "squared_error", _squared_error),
    "squared_error of numbers": ("numbers", "squared_error", lambda o, t: 0.5 * (o - t).square().sum(1)),
    "exponential": ("classes", "exponential", _exponential),
    "binary_cross_entropy": ("binary", "binary_cross_entropy", lambda o, t: F.softplus(o[:, 0]) - t * o[:, 0]),
    "CrossEntropyLoss smoothed": (
        "classes",
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda o, t: 0.8 * _cross_entropy(o, t) - 0.2 * o.log_softmax(1).mean(1),
    ),
    "MSELoss": ("numbers", nn.MSELoss(), lambda o, t: (o - t).square().mean(1)),
    "F.cross_entropy": ("classes", lambda o, t: F.cross_entropy(o, t, reduction="none"), _cross_entropy),
    "F.mse_loss": ("numbers", _mse, lambda o, t: (o - t).square().sum(1)),
    "F.huber_loss": ("numbers", _huber, _huber),
    "F.smooth_l1_loss": ("numbers", _smooth, _smooth),
    "F.poisson_nll_loss": ("numbers", _poisson, _poisson),
    "F.nll_loss": ("classes", lambda o, t: F.nll_loss(o.log_softmax(1), t, reduction="none"), _cross_entropy),
    "F.kl_div": (
        "numbers",
        lambda o, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="none").sum(1),
        lambda o, t: (t.softmax(1) * (t.log_softmax(1) - o.log_softmax(1))).sum(1),
    ),
    "F.binary_cross_entropy_with_logits": (
        "numbers",
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="none").mean(1),
        lambda o, t: (F.softplus(o) - t.sigmoid() * o).mean(1),
    ),
    "F.multi_margin_loss": (
        "classes",
        lambda o, t: F.multi_margin_loss(o, t, p=2, reduction="none"),
        lambda o, t: (
            ((1 - o.gather(1, t[:, None]) + o).clamp(min=0).square() * (1 - F.one_hot(t, o.shape[1]))).sum(1)
            / o.shape[1]
        ),
    ),
    "F.soft_margin_loss": (
        "numbers",
        lambda o, t: F.soft_margin_loss(o, t.sign(), reduction="none").sum(1),
        lambda o, t: F.softplus(-t.sign() * o).sum(1),
    ),
    "F.gaussian_nll_loss": (
        "numbers",
        lambda o, t: F.gaussian_nll_loss(o, t, torch.ones_like(o) * 0.5, reduction="none").sum(1),
        lambda o, t: (math.log(0.5) / 2 + (o - t).square()).sum(1),
    ),
    "log cosh": (
        "numbers",
        lambda o, t: torch.log(torch.cosh(o - t)).sum(1),
        lambda o, t: torch.log(torch.cosh(o - t)).sum(1),
    ),
    "focal": ("classes", _focal, _focal),
    "with factors": ("numbers", _WithFactors(), lambda o, t: (o - t).square().sum(1)),
    "linear": ("numbers", lambda o, t: (o * t).sum(1), lambda o, t: (o * t).sum(1)),
}
"""By name: the kind of targets, what is passed to the library, and an independent way to compute it."""


# ---------------------------------------------------------------- from a program to a problem


class Network(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        builder, shape = Builder(), tuple(program["inputs"]["shape"])
        outputs = 1 if LOSSES[program["loss"]][0] == "binary" else program["outputs"]
        steps = list(program["steps"])
        self.first: nn.Module = nn.Identity()
        if program["inputs"]["kind"] == "tokens":
            options = {key: value for key, value in program["inputs"]["embedding"].items() if key != "do"}
            self.first = embedding(shape, **options)
            with torch.no_grad():
                shape = tuple(copy.deepcopy(self.first)(torch.zeros(2, *shape, dtype=torch.long)).shape[1:])
        self.body, shape = builder.path(steps, shape)
        self.head: nn.Module = nn.Linear(math.prod(shape), outputs)
        if program["head"] == "none":
            self.head = With(lambda own, x: fit(x, (outputs,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)).flatten(1))


def network(program: Program) -> nn.Module:
    """The network of a program in its dtype, in eval mode, with random weights, biases and running statistics."""
    net = Network(program)
    generator = torch.Generator().manual_seed(program["seed"])
    with torch.no_grad():
        for tensor in [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]:
            size = 1.2 / math.sqrt(max(1, tensor[0].numel())) if tensor.ndim > 1 else 0.6
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                module.running_var.abs_().add_(0.3)
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return net.to(getattr(torch, program["dtype"])).eval()


def data(program: Program) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(program["seed"] + 1)
    count, shape = program["samples"], program["inputs"]["shape"]
    dtype = getattr(torch, program["dtype"])
    if program["inputs"]["kind"] == "tokens":
        inputs = torch.randint(0, program["inputs"]["embedding"]["words"], (count, *shape), generator=generator)
    else:
        inputs = torch.randn(count, *shape, generator=generator).mul(program["inputs"]["scale"]).to(dtype)
    kind = LOSSES[program["loss"]][0]
    if kind == "numbers":
        return inputs, torch.randn(count, program["outputs"], generator=generator).to(dtype)
    return inputs, torch.randint(0, 2 if kind == "binary" else program["outputs"], (count,), generator=generator)


# ---------------------------------------------------------------- drawing programs


def draw(seed: int, index: int) -> Program:
    """The program number `index` of a seed: small enough to be compared with dense matrices, and one that runs."""
    chance = random.Random(f"{seed} {index}")
    while True:
        program = _drawn(chance)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                net = network(program)
                found = net(data(program)[0].clone())
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            continue
        size = sum(parameter.numel() for parameter in net.parameters())
        if 2 <= size <= MOST_PARAMETERS and bool(torch.isfinite(found).all()) and float(found.abs().max()) < 20:
            return program


PIECEWISE: dict[str, set[str]] = {
    "elementwise": {
        "relu", "leaky_relu", "hardtanh", "relu6", "softshrink", "hardshrink", "threshold", "relu in place", "abs",
        "clamp", "hardsigmoid", "masked_fill", "dropout", "nan_to_num", "where tanh",
    },
    "activation": {"ReLU", "PReLU", "Dropout", "ReLU6"},
    "operation": {
        "identity", "written into zeros", "written into slices", "wrapped by hand", "in place through a view",
        "in place through chunks", "written where a flag is", "accumulated by an index", "column by column",
        "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce sum", "scatter_reduce mean",
        "scatter_reduce amax", "masked_scatter", "as_strided", "roll", "flip", "expand", "repeat_interleave", "narrow",
        "gather", "take_along_dim", "sort", "topk", "kthvalue", "median", "quantile", "max and min",
        "argmax of one hot", "maximum", "cumsum", "cummax", "diff", "rfft", "fft filtered", "chunked",
        "unbound and stacked", "sample by sample", "ragged", "rows by group", "detached copy beside", "tril",
        "bucketize", "pixel_shuffle", "in place on the way", "swapped", "take", "trapezoid", "renorm",
    },
    "conv": set(), "conv_over_time": set(), "transposed_conv": set(), "linear": set(), "token_wise": set(),
    "maxout": set(), "scale_and_shift": set(), "pad": set(), "positions": set(), "bare_matrix": set(),
    "made_weights": {"linear", "masked", "low rank"}, "codebook": set(), "checkpointed": set(),
    "pool": {"max", "avg", "adaptive avg", "adaptive max", "max with stride", "unpool"},
    "norm": {"batch"}, "image_norm": {"batch"}, "over_time": {"mean", "max", "last", "sum"},
    "image_operation": {"nearest", "bilinear", "bicubic", "shuffle", "depthwise"}, "padded_rows": set(),
}  # fmt: skip
"""Steps that are linear or piecewise linear, or nearly: most networks with exact traces consist of these alone."""


def _drawn(chance: random.Random) -> Program:
    inputs: dict[str, Any] = {
        "kind": "numbers",
        "shape": chance.choice([[4], [3], [6], [1, 3, 3], [2, 4, 2], [1, 4, 4], [3, 2]]),
        "scale": chance.choice([1.0, 1.0, 1.0, 0.01, 3.0]),
    }
    if chance.random() < 0.15:
        inputs = {"kind": "tokens", "shape": [chance.choice([3, 2, 4])], "embedding": _step(chance, "embedding")}
    return {
        "seed": chance.randrange(10**6),
        "dtype": "float32" if chance.random() < 0.2 else "float64",
        "samples": chance.choice([3, 4, 5, 2, 1, 6]),
        "outputs": chance.choice([3, 2, 4]),
        "inputs": inputs,
        "loss": "cross_entropy" if chance.random() < 0.5 else chance.choice(list(LOSSES)),
        "head": "linear" if chance.random() < 0.85 else "none",
        "steps": _steps(chance, chance.choice([1, 2, 3, 4, 5, 6]), 0, chance.random() < 0.5),
    }


def _steps(chance: random.Random, count: int, depth: int, piecewise: bool) -> list[Step]:
    return [_random_step(chance, depth, piecewise and chance.random() < 0.95) for _ in range(count)]


def _random_step(chance: random.Random, depth: int, piecewise: bool) -> Step:
    if chance.random() < (0.25 if depth == 0 else 0.1 if depth == 1 else 0):
        name = chance.choice(list(NESTED))
        step: Step = {"do": name} | {key: chance.choice(values) for key, values in NESTED_CHOICES[name].items()}
        wanted = inspect.signature(NESTED[name]).parameters
        if "path" in wanted:
            step["path"] = _steps(chance, chance.choice([1, 2, 3]), depth + 1, piecewise)
        if "paths" in wanted:
            count = chance.choice([2, 2, 3])
            step["paths"] = [_steps(chance, chance.choice([1, 2]), depth + 1, piecewise) for _ in range(count)]
        return step
    names = [name for name, (kind, *_) in BLOCKS.items() if kind != "tokens" and (not piecewise or name in PIECEWISE)]
    while True:
        step = _step(chance, chance.choices(names, [BLOCKS[name][3] for name in names])[0])
        allowed = PIECEWISE.get(step["do"], set()) if piecewise else set()
        if not allowed or not allowed.isdisjoint(str(value) for key, value in step.items() if key != "do"):
            return step


def _step(chance: random.Random, name: str) -> Step:
    return {"do": name} | {key: chance.choice(values) for key, values in BLOCKS[name][1].items()}


# ---------------------------------------------------------------- shrinking


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are one step simpler, the boldest simplifications first."""
    for steps in _simpler_steps(program["steps"]):
        yield program | {"steps": steps}
    if program["inputs"]["kind"] == "tokens":
        for step in _simpler_options(program["inputs"]["embedding"]):
            yield program | {"inputs": program["inputs"] | {"embedding": step}}
        yield program | {"inputs": {"kind": "numbers", "shape": [4], "scale": 1.0}}
    elif program["inputs"]["shape"] != [2]:
        for shape in ([2], [3], [4], [1, 2, 2], [1, 3, 3]):
            if math.prod(shape) < math.prod(program["inputs"]["shape"]):
                yield program | {"inputs": program["inputs"] | {"shape": shape}}
    for key, simple in (
        ("dtype", "float64"),
        ("loss", "squared_error of numbers"),
        ("loss", "cross_entropy"),
        ("head", "linear"),
    ):
        if program[key] != simple and not (key == "loss" and program[key] == "squared_error of numbers"):
            yield program | {key: simple}
    for key, least in (("samples", 1), ("outputs", 2)):
        for value in range(least, program[key]):
            yield program | {key: value}
    for seed in range(3):
        if program["seed"] >= 3:
            yield program | {"seed": seed}


def _simpler_steps(steps: list[Step]) -> Iterator[list[Step]]:
    for size in sorted({len(steps), len(steps) // 2, 1}, reverse=True):
        for start in range(0, len(steps), max(size, 1)):
            if size:
                yield steps[:start] + steps[start + size :]
    for index, step in enumerate(steps):
        before, after = steps[:index], steps[index + 1 :]
        for inner in [step["path"]] if "path" in step else step.get("paths", []):
            yield [*before, *inner, *after]
        for other in _simpler_options(step):
            yield [*before, other, *after]
        if "path" in step:
            for path in _simpler_steps(step["path"]):
                yield [*before, step | {"path": path}, *after]
        for place, path in enumerate(step.get("paths", [])):
            paths = step["paths"]
            if len(paths) > 2:
                yield [*before, step | {"paths": paths[:place] + paths[place + 1 :]}, *after]
            for shorter in _simpler_steps(path):
                yield [*before, step | {"paths": [*paths[:place], shorter, *paths[place + 1 :]]}, *after]


def _simpler_options(step: Step) -> Iterator[Step]:
    """Each option at one of its simpler choices; functions of a table are left or replaced by the first two."""
    choices = NESTED_CHOICES[step["do"]] if step["do"] in NESTED else BLOCKS[step["do"]][1]
    for key, values in choices.items():
        if step.get(key) in values:
            for value in values[: min(values.index(step[key]), 2)]:
                yield step | {key: value}


def words(program: Program) -> list[str]:
    """The names of all steps and of what they were chosen to be, sorted: what two counterexamples have in common."""
    found: set[str] = set()

    def visit(steps: list[Step]) -> None:
        for step in steps:
            named = [str(step[key]) for key in ("name", "form", "kind", "mode", "how", "of") if key in step]
            found.add(" ".join([step["do"], *named]))
            visit(step.get("path", []))
            for path in step.get("paths", []):
                visit(path)

    visit(program["steps"])
    if program["inputs"]["kind"] == "tokens":
        visit([program["inputs"]["embedding"]])
    return sorted(found)
