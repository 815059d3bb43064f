"""Every invariance that a measure declares, held to it on networks of every wiring, with factors far apart.

The factors are found by the transforms themselves in the running network. A measure either is the same after each
transform that it declares itself invariant to, or is undefined before and after, for the networks listed as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from measured import labelled, normal, randomised
from torch import Tensor, nn
from torch.nn import functional as F

from spiritlevel import transforms
from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, Setting
from spiritlevel.transforms import Transformed

# ---------------------------------------------------------------- the networks


class Branches(nn.Module):
    """Two branches of different depth behind a first layer, which meet in one of several ways."""

    JOINS: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "concatenation": lambda a, b: torch.cat([a, b], 1),
        "sum": lambda a, b: a + b,
        "difference": lambda a, b: a - b,
        "maximum": torch.maximum,
    }

    def __init__(self, join: str) -> None:
        super().__init__()
        self.first, self.short = nn.Linear(4, 5), nn.Linear(5, 4)
        self.long = nn.Sequential(nn.Linear(5, 3), nn.ReLU(inplace=True), nn.Linear(3, 4))
        self.join, self.head = join, nn.Linear(8 if join in ("concatenation", "written") else 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu_()
        join = self.JOINS.get(self.join, _written)
        return self.head(join(self.short(x).relu(), self.long(x).relu()))


def _written(a: Tensor, b: Tensor) -> Tensor:
    """A concatenation as some write it."""
    both = torch.empty(len(a), a.shape[1] + b.shape[1], dtype=a.dtype)
    both[:, : a.shape[1]] = a
    both[:, a.shape[1] :] = b
    return both


class Maxout(nn.Module):
    """The largest of two maps, as one layer of twice as many units or as two layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(nn.Linear(4, 10 // layers) for _ in range(layers))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part for piece in self.pieces for part in piece(x).split(5, 1)]
        return self.head(torch.maximum(*parts))


class Shortcut(nn.Module):
    """Two residual blocks: past the first the stream goes as it is, past the second through a convolution."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda channels: nn.Identity()) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), norm(3))
        self.first = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), norm(2), nn.ReLU(), nn.Conv2d(2, 3, 1), norm(3))
        self.second = nn.Sequential(nn.Conv2d(3, 2, 3, 2, padding=1), norm(2), nn.ReLU(), nn.Conv2d(2, 4, 1))
        self.past, self.head = nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), norm(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.first(x)).relu()
        x = (self.past(x) + self.second(x)).relu()
        return self.head(x.mean((2, 3)))


class Shared(nn.Module):
    """One layer at two depths, or twice at the same depth, between others."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.first, self.shared, self.second, self.head = (
            nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3),
        )  # fmt: skip
        self.deep = deep

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = self.shared(self.shared(x).relu()) if self.deep else self.shared(x).relu() + self.shared(-x).relu()
        return self.head(self.second(x.relu()).relu())


class Unused(nn.Module):
    """A layer that runs and that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        self.aside(x)
        return self.head(x)


class Halves(nn.Module):
    """Half of the channels go past a convolution, and two heads are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 1), nn.Conv2d(2, 2, 2)
        self.heads = nn.ModuleList(nn.Linear(50, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        past, through = self.first(x).relu().chunk(2, 1)
        both = torch.cat([past.flatten(1), self.second(through).relu().flatten(1)], 1)
        return self.heads[0](both) + 0.5 * self.heads[1](both)


class Dense(nn.Module):
    """Every layer reads all the layers before it, and perhaps the inputs, too."""

    def __init__(self, inputs: bool) -> None:
        super().__init__()
        self.inputs, more = inputs, 4 if inputs else 0
        self.first, self.second, self.third = nn.Linear(4, 3), nn.Linear(3 + more, 3), nn.Linear(6 + more, 2)
        self.head = nn.Linear(8 + more, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.first(x).relu()] + [x] * self.inputs
        for layer in (self.second, self.third):
            seen.append(layer(torch.cat(seen, 1)).relu())
        return self.head(torch.cat(seen, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.lstm(x.view(-1, 2, 2))[0][:, -1]).relu())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(2, 1, 3, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 2, 2)).mean(1))


class Bare(nn.Module):
    """Matrices without modules, one of them turned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.inner) @ self.outer.t()


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    net[2].requires_grad_(False)
    return net


def between(*layers: nn.Module, channels: int, features: int, dims: int = 2) -> nn.Module:
    """A convolution in front of these layers, and one behind them, so that factors enter and leave."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return nn.Sequential(
        conv(1, channels, 1), nn.ReLU(), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(features, 4), nn.ReLU(),
        nn.Linear(4, 3),
    )  # fmt: skip


RELU_ONLY = {"path_norm", "spectral_margin_mean", "spectral_margin_median"}
DISTANCES = {name for name in MEASURES if name.startswith(("hidden_margin_", "input_distance", "variance_m"))}
SIGNALS = {"signal_sharpness", "signal_sharpness_max", "input_sensitivity"}
LAST_LAYER = {name for name in MEASURES if name.startswith(("hidden_margin_", "relative_flatness", "variance_m"))}
SCALINGS = {"rescale_layers", "rescale_channels", "scale_last_layer", "rescale_all"}
NORMED = {*SCALINGS, "scale_before_batchnorm", "fold_batchnorm"}  # others: tests/test_audit_symmetries.py
BATCH_STATISTICS = NORMED - {"rescale_channels", "fold_batchnorm"}
BUT_ALL = SCALINGS - {"rescale_all"}


@dataclass(frozen=True)
class Case:
    """A network, the shape of its inputs, the transforms that it allows and the measures that it does not."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    allows: frozenset[str] | set[str] = frozenset(SCALINGS)
    undefined: frozenset[str] | set[str] = frozenset()
    batch_norm: str = "eval"
    seed: int = 4  # of the weights; where most samples meet no living unit, distances are infinite


IMAGE, LINE, VOLUME = (1, 4, 4), (1, 5), (1, 2, 2, 2)
PADDED = {
    f"{mode}, padded by {padding}": Case(
        lambda mode=mode, padding=padding, size=size: between(
            nn.Conv2d(2, 2, 3, padding=padding, padding_mode=mode), channels=2, features=2 * size * size
        ),
        IMAGE,
    )
    for mode in ("zeros", "circular", "reflect", "replicate")
    for padding, size in ((1, 4), (2, 6))
}
CASES = {
    "dense": Case(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))),
    "convolutions": Case(
        lambda: between(nn.Conv2d(2, 3, 3), nn.LeakyReLU(), nn.Conv2d(3, 2, 2), channels=2, features=2), IMAGE
    ),
    "grouped": Case(lambda: between(nn.Conv2d(4, 6, 2, groups=2), channels=4, features=54), IMAGE),
    "depthwise": Case(
        lambda: between(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1), channels=3, features=8), IMAGE
    ),
    "transposed": Case(
        lambda: between(nn.ConvTranspose2d(2, 3, 3, 2, padding=1, output_padding=1), channels=2, features=192), IMAGE
    ),
    "transposed, grouped": Case(
        lambda: between(nn.ConvTranspose2d(4, 6, 2, groups=2, dilation=2), channels=4, features=216), IMAGE
    ),
    **PADDED,
    "strided, dilated": Case(
        lambda: between(
            nn.Conv2d(2, 2, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 2), padding_mode="reflect"),
            channels=2, features=24,
        ),
        IMAGE,
        seed=6,
    ),
    "replicate, same, 1d": Case(
        lambda: between(
            nn.Conv1d(4, 2, 4, padding="same", groups=2, padding_mode="replicate"), channels=4, features=10, dims=1
        ),
        LINE,
    ),
    "circular, 3d": Case(
        lambda: between(nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular"), channels=2, features=16, dims=3),
        VOLUME,
    ),
    **{join: Case(lambda join=join: Branches(join)) for join in Branches.JOINS},
    "concatenation, written": Case(lambda: Branches("written"), allows=BUT_ALL),
    "shortcuts": Case(Shortcut, IMAGE),
    "shortcuts, batch norm": Case(lambda: Shortcut(nn.BatchNorm2d), IMAGE, NORMED),
    "halves": Case(Halves, IMAGE),
    "shuffled groups": Case(
        lambda: between(
            nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(4, 4, 3, groups=2),
            channels=4, features=16,
        ),
        IMAGE,
    ),
    "maxout of one layer": Case(lambda: Maxout(1), allows=SCALINGS - {"rescale_channels"}),
    "maxout of two layers": Case(lambda: Maxout(2)),
    "every layer reads all": Case(lambda: Dense(False)),
    "every layer reads the inputs": Case(lambda: Dense(True), allows={"scale_last_layer", "rescale_all"}),
    "unused layer": Case(Unused),
    "batch norm": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
        ),
        allows=NORMED,
    ),
    "batch statistics": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        allows=BATCH_STATISTICS,
        undefined=RELU_ONLY | DISTANCES | SIGNALS | {"normalised_sharpness"},
        batch_norm="batch",
    ),
    "batch norm, grouped, transposed": Case(
        lambda: between(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6), channels=4, features=150),
        IMAGE,
        NORMED,
    ),
    "prelu": Case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 3))
    ),
    "frozen": Case(frozen),
    "tied": Case(lambda: Shared(deep=True), allows=BUT_ALL, undefined=RELU_ONLY - {"path_norm"}),
    "same depth twice": Case(lambda: Shared(deep=False), allows=BUT_ALL),
    "smooth": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)
        ),
        allows=BUT_ALL,
        undefined=RELU_ONLY,
    ),
    "bare matrices": Case(Bare, undefined=(RELU_ONLY - {"path_norm"}) | LAST_LAYER | {"normalised_sharpness"}),
    "lstm": Case(Recurrent, undefined=RELU_ONLY),
    "attention": Case(Attention, allows=BUT_ALL, undefined=RELU_ONLY),
}  # fmt: skip


def outputs_of(module: nn.Module) -> int:
    for name in ("out_channels", "out_features", "num_features"):
        if hasattr(module, name):
            return int(getattr(module, name))
    raise AssertionError(module)


def rescaled(net: nn.Module, inputs: Tensor, per_channel: bool) -> Transformed:
    """All groups that the network has, scaled far apart: by up to 2¹⁰, channel by channel or layer by layer."""
    factors: dict[str, transforms.Factor] = {}
    generator = torch.Generator().manual_seed(7)
    groups = transforms.scaling_groups(net, data=inputs)
    if not groups:
        raise InputError("no groups")
    for index, group in enumerate(groups):
        if per_channel:
            sizes = {name: group.channels or outputs_of(net.get_submodule(name)) for name in group.writers}
            exponents = {size: torch.randint(-10, 11, (size,), generator=generator) for size in set(sizes.values())}
            factors |= {name: 2.0 ** exponents[size].double() for name, size in sizes.items()}
            continue
        for name, factor in group.factors((64.0, 2.0**-10, 3.0, 0.125)[index % 4]).items():
            factors[name] = factors.get(name, 1.0) * factor
    return transforms.rescale_layers(net, factors, data=inputs)


def before_norms(net: nn.Module, inputs: Tensor) -> Transformed:
    groups = transforms.scaling_groups(net, data=inputs)
    writers = [name for group in groups if group.absorbers and not group.readers for name in group.writers]
    return transforms.scale_before_batchnorm(net, dict.fromkeys(writers, 2.0**-8) or {"": 1.0}, data=inputs)


APPLY: dict[str, Callable[[nn.Module, Tensor], Transformed]] = {
    "rescale_layers": lambda net, x: rescaled(net, x, False),
    "rescale_channels": lambda net, x: rescaled(net, x, True),
    "scale_before_batchnorm": before_norms,
    "fold_batchnorm": lambda net, x: transforms.fold_batchnorm(net, data=x),
    "scale_last_layer": lambda net, x: transforms.scale_last_layer(net, 64.0, data=x),
    "rescale_all": lambda net, x: transforms.rescale_all(net, 2.0**-12, data=x),
}


def transformed(net: nn.Module, inputs: Tensor) -> Iterator[tuple[str, Transformed]]:
    for name, apply in APPLY.items():
        try:
            yield name, apply(net, inputs)
        except InputError:
            continue


LONG = {"difference", "every layer reads the inputs", *(name for name in CASES if "padded by 2" in name)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES])
def test_what_is_declared_invariant_stays(name: str) -> None:
    case = CASES[name]
    net = randomised(case.make(), seed=case.seed, size=0.6)
    inputs, targets = labelled(net, normal(10, *case.shape, seed=9))
    changed = {key: new for key, new in transformed(net, inputs) if case.batch_norm in new.certificate.modes}
    assert set(changed) == case.allows
    assert all(item.certificate.relative_difference < 1e-12 for item in changed.values())
    here = Setting(net, (inputs, targets), batch_norm=case.batch_norm)
    there = {key: Setting(new.model, (inputs, targets), batch_norm=case.batch_norm) for key, new in changed.items()}
    faults, undefined = [], set()
    for measure in MEASURES.values():
        declared = sorted(measure.invariant_to & set(changed))
        if not declared:
            continue
        before = measure.attempt(here)
        if math.isnan(before.value):
            undefined.add(measure.name)
        for transform in declared:
            after = measure.attempt(there[transform])
            if math.isnan(before.value):
                same = math.isnan(after.value) and bool(after.reason)
            else:
                same = not after.reason and abs(after.value - before.value) <= 1e-6 * abs(before.value)
            if not same:
                faults.append(f"{measure.name} after {transform}: {before} became {after}")
    assert not faults, "\n".join(faults)
    assert undefined == case.undefined
