"""Margins, distances to the boundary and spectral margins against brute force."""

from __future__ import annotations

import copy
import itertools
import math

import measured
import numpy as np
import pytest
import torch
from measured import Data, FunctionalHead, Recurrent, Tokens, close, labelled, normal, randomised, value
from torch import Tensor, nn
from torch.func import jacrev

from spiritlevel.errors import InputError
from spiritlevel.measures import MEASURES, Setting, spectral_margin, variance_margin
from spiritlevel.watching.layers import Call

mlp, data, here = measured.mlp, measured.data, measured.here  # fixtures


def test_margin_measures_sample_by_sample(here: Setting, mlp: nn.Module, data: Data) -> None:
    signed, gaps, bounds, printed = [], [], [], []
    for x, logits, y in zip(data[0], mlp(data[0]).detach(), data[1], strict=True):
        others = [logits[j] for j in range(3) if j != y]
        signed.append(float(logits[y] - max(others)))
        softmax = logits.softmax(0)
        gamma = abs(float(softmax[y] - max(softmax[j] for j in range(3) if j != y)))
        gaps.append((float(x @ x) + 1) * (1 - float(softmax @ softmax)))
        bounds.append((float(x @ x) + 1) * (1 - gamma**2))
        printed.append(float(x.norm()) * (1 - gamma**2))
    margin = np.array(signed)
    assert close(value(here, "mean_aceht"), np.mean(gaps))
    assert close(value(here, "margin_bound"), np.mean(bounds))
    assert close(value(here, "printed_margin_bound"), np.mean(printed))
    assert close(value(here, "margin_mean"), margin.mean())
    assert close(value(here, "margin_min"), margin.min())
    for share in (10, 25, 50, 75, 90):
        assert close(value(here, f"margin_q{share}"), np.quantile(margin, share / 100))
    assert close(value(here, "margin_skewness"), (((margin - margin.mean()) / margin.std()) ** 3).mean())


def test_distances_to_the_boundary(here: Setting, mlp: nn.Module, data: Data) -> None:
    def distances(head: nn.Module, points: Tensor, dual: float) -> np.ndarray:
        found = []
        for x, y in zip(points, data[1], strict=True):
            rows = jacrev(lambda x: head(x[None])[0])(x).detach()
            logits = head(x[None])[0].detach()
            ratios = [
                float((logits[y] - logits[j]) / torch.linalg.vector_norm(rows[y] - rows[j], dual))
                for j in range(3)
                if j != y
            ]
            found.append(min(ratios))
        return np.array(found)

    assert close(value(here, "input_distance"), np.quantile(distances(mlp, data[0], 2), 0.5))
    assert close(value(here, "input_distance_inf"), np.quantile(distances(mlp, data[0], 1), 0.5))
    hidden = mlp[:4](data[0]).detach()  # type: ignore[index]
    spread = math.sqrt(float(hidden.var(0, correction=0).sum()))
    margins = distances(mlp[4], hidden, 2) / spread  # type: ignore[index]
    low, middle, high = np.quantile(margins, [0.25, 0.5, 0.75])
    for name, wanted in (
        ("median", middle),
        ("q1", low),
        ("q3", high),
        ("low_fence", low - 1.5 * (high - low)),
        ("high_fence", high + 1.5 * (high - low)),
    ):
        assert close(value(here, f"hidden_margin_{name}"), wanted), name


class Functional(nn.Module):
    """The same network without a module for the activation."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.a, self.b = net[0], net[2]  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=torch.relu(self.a(x)))


def test_hidden_margins_are_taken_at_the_last_layers_input() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    points = labelled(net, normal(20, 3))
    wanted = value(Setting(net, points), "hidden_margin_median")  # the output of the module nn.ReLU is that input
    assert close(value(Setting(Functional(net), points), "hidden_margin_median"), wanted)
    head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Identity(), nn.ReLU(), nn.Linear(4, 3)).double()
    head.append(nn.Softplus())  # what follows the last layer does not move the place
    assert value(Setting(head, labelled(head, normal(20, 3))), "hidden_margin_q1")
    again = randomised(Recurrent())
    with pytest.raises(InputError, match="runs repeatedly"):
        MEASURES["hidden_margin_median"](again, labelled(again, normal(6, 3)))


def test_the_variance_margin_of_pairs_is_a_closed_form() -> None:
    """With two samples a class each half is one point, and nothing is random."""
    net = randomised(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)))
    inputs, targets = normal(8, 3), torch.arange(8) % 4
    hidden = net[:2](inputs).detach()  # type: ignore[index]
    apart = np.mean([float((hidden[c] - hidden[c + 4]).norm()) for c in range(4)])
    weight, logits = net[2].weight.detach(), net(inputs).detach()
    distances = [
        min(float((logits[n, y] - logits[n, j]) / (weight[y] - weight[j]).norm()) for j in range(4) if j != y)
        for n, y in enumerate(targets.tolist())
    ]
    found = MEASURES["variance_margin"](net, (inputs, targets))
    assert close(found.value, np.quantile(distances, 0.5) / apart)
    assert found.stderr == pytest.approx(0, abs=1e-12)


def test_halves_are_paired_in_the_best_way() -> None:
    points = normal(10, 2, seed=4).numpy()
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(10)
        one, other = points[order[:5]], points[order[5:]]
        pairings = itertools.permutations(range(5))
        best = min(np.linalg.norm(one - other[list(pairing)], axis=1).mean() for pairing in pairings)
        assert variance_margin.half_distance(points, np.random.default_rng(seed)) == pytest.approx(best, rel=1e-12)


def test_the_variance_margin_falls_as_a_class_spreads_and_says_when_it_cannot_be_had() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    for layer in net:
        nn.init.eye_(layer.weight)
    centres = torch.tensor([[2.0, 0.0], [0.0, 2.0]]).double().repeat(20, 1)
    targets = torch.arange(40) % 2
    narrow, wide = (
        MEASURES["variance_margin"](net, (centres + size * normal(40, 2, seed=1), targets)).value for size in (0.1, 0.4)
    )
    assert narrow > 2 * wide > 0
    with pytest.raises(InputError, match="all samples of a class are the same"):
        MEASURES["variance_margin"](net, (centres, targets))
    with pytest.raises(InputError, match="a class with at least two samples"):
        MEASURES["variance_margin"](net, (centres[:2], targets[:2]))


def test_spectral_margin_counts_frozen_layers() -> None:
    net = randomised(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    points = labelled(net, normal(20, 3))
    wanted = value(Setting(net, points), "spectral_margin_mean")
    net[0].requires_grad_(False)  # type: ignore[index]
    assert close(value(Setting(net, points), "spectral_margin_mean"), wanted)
    assert not net[0].weight.requires_grad  # type: ignore[index]
    smooth = randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    smooth[0].requires_grad_(False)  # type: ignore[index]
    for name in ("spectral_margin_mean", "path_norm"):  # a frozen layer makes no ReLU network of it
        with pytest.raises(InputError, match="ReLU networks only"):
            MEASURES[name](smooth, points)
    with pytest.raises(InputError, match="plain nn"):
        MEASURES["spectral_margin_mean"](randomised(FunctionalHead()), points)


@pytest.mark.parametrize("count", [1, 7])
def test_spectral_margin_counts_the_tokens_of_a_sample_wherever_they_stand(count: int) -> None:
    forms = [randomised(Tokens(form)) for form in ("behind", "in front", "folded")]
    points = labelled(forms[0], normal(count, 6))
    wanted, *others = (value(Setting(net, points), "spectral_margin_mean") for net in forms)
    assert all(close(other, wanted) for other in others)
    first, last = (net.weight.detach() for net in (forms[0].a, forms[0].o))  # type: ignore[union-attr]
    first = torch.block_diag(*[first] * 3)
    sizes = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (first, last)]
    ratios = [float(matrix.norm(dim=1).sum()) / size for matrix, size in zip((first, last), sizes, strict=True)]
    complexity = math.prod(sizes) * sum(ratio ** (2 / 3) for ratio in ratios) ** 1.5
    margin = value(Setting(forms[0], points), "margin_mean")
    assert close(wanted, margin / (complexity * float(points[0].norm()) / count))


def test_spectral_margin_takes_convolutions_as_matrices_and_folds_batch_norm() -> None:
    layers = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4), nn.BatchNorm1d(4), nn.ReLU()]
    net = randomised(nn.Sequential(*layers, nn.Linear(4, 3)))
    inputs, targets = labelled(net, normal(10, 1, 3, 3))
    conv, norm = copy.deepcopy(net[0]), net[4]  # type: ignore[index]
    conv.bias = None
    units = torch.eye(9).double().reshape(9, 1, 3, 3)
    matrices = [
        conv(units).detach().reshape(9, -1).T,
        (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None] * net[3].weight,  # type: ignore[index]
        net[6].weight,  # type: ignore[index]
    ]
    matrices = [matrix.detach() for matrix in matrices]
    sizes = [float(torch.linalg.matrix_norm(matrix, 2)) for matrix in matrices]
    ratios = [float(m.norm(dim=1).sum()) / size for m, size in zip(matrices, sizes, strict=True)]
    complexity = math.prod(sizes) * sum(ratio ** (2 / 3) for ratio in ratios) ** 1.5
    logits = net(inputs).detach()
    rivals = logits.scatter(1, targets[:, None], -math.inf).amax(1)
    margin = (logits.gather(1, targets[:, None])[:, 0] - rivals) / (complexity * float(inputs.norm()) / 10)
    found = {name: MEASURES[f"spectral_margin_{name}"](net, (inputs, targets)).value for name in ("mean", "median")}
    assert close(found["mean"], margin.mean(), 1e-6)
    assert close(found["median"], np.quantile(margin.numpy(), 0.5), 1e-6)


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    **{
        f"{mode}, padded by {padding}": (nn.Conv2d(2, 3, 3, padding=padding, padding_mode=mode), (2, 4, 4))
        for mode in ("zeros", "circular", "reflect", "replicate")
        for padding in (1, 2, "same")
    },
    "1d": (nn.Conv1d(2, 3, 4, padding=3, padding_mode="reflect"), (2, 5)),
    "3d": (nn.Conv3d(1, 2, 3, padding=1, padding_mode="circular"), (1, 2, 2, 3)),
    "3d, replicate": (nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate", groups=2), (2, 2, 3, 2)),
    "strided": (nn.Conv2d(2, 2, (3, 2), stride=(2, 3), padding=(2, 1), padding_mode="replicate"), (2, 5, 4)),
    "dilated": (nn.Conv2d(2, 2, 3, dilation=(2, 1), padding=(3, 2), padding_mode="reflect"), (2, 5, 4)),
    "grouped": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", groups=2), (4, 3, 3)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 3, 3)),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, dilation=2, groups=2), (4, 4)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_norms_of_a_convolution_are_those_of_its_matrix(name: str) -> None:
    conv, shape = randomised(CONVOLUTIONS[name][0]), CONVOLUTIONS[name][1]
    matrix = torch.func.jacrev(lambda x: conv(x[None]).flatten())(normal(*shape)).flatten(1).detach()
    call = Call("conv", conv, "weight", conv.weight.detach(), torch.Size((2 * 3, *shape)))  # 3 in a sample
    norm, rows = spectral_margin._operator_norms(call, seed=0)
    assert norm.status in ("exact", "converged")
    assert close(norm.value, torch.linalg.matrix_norm(matrix, 2), 1e-6)
    assert close(rows, 3 * float(matrix.norm(dim=1).sum()), 1e-9)


class Diamond(nn.Module):
    """Paths of one, two and three layers from a first layer to a head, and past both."""

    PATHS = ("first short head", "first long deep head", "first head", "aside")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(8, 3)
        self.long, self.deep, self.aside = nn.Linear(4, 2), nn.Linear(2, 4, bias=False), nn.Linear(3, 3)
        self.unused = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu_()
        self.unused(y)
        z = self.deep(self.long(y).relu()).view(-1, 2, 2)
        z[:, 1].relu_()  # writes into a view
        both = torch.cat([torch.maximum(self.short(y), z.flatten(1)), y], 1)
        return self.head(both) - self.aside(x)


def test_spectral_margin_adds_up_what_parallel_paths_stretch() -> None:
    net = randomised(Diamond())
    inputs, targets = labelled(net, normal(10, 3))
    matrices = {name: module.weight.detach() for name, module in net.named_children()}
    sizes = {name: float(torch.linalg.matrix_norm(matrix, 2)) for name, matrix in matrices.items()}
    paths = [path.split() for path in Diamond.PATHS]
    total = 0.0
    for name in {name for path in paths for name in path}:
        through = [path for path in paths if name in path]
        before = {tuple(path[: path.index(name)]) for path in through}
        behind = {tuple(path[path.index(name) + 1 :]) for path in through}
        stretch = [sum(math.prod(sizes[each] for each in part) for part in parts) for parts in (before, behind)]
        total += (math.prod(stretch) * float(matrices[name].norm(dim=1).sum())) ** (2 / 3)
    margin = value(Setting(net, (inputs, targets)), "margin_mean")
    wanted = margin / (total**1.5 * float(inputs.norm()) / 10)
    assert close(value(Setting(net, (inputs, targets)), "spectral_margin_mean"), wanted, 1e-6)
    bound = sum(math.prod(sizes[name] for name in path) for path in paths)
    for row in inputs:  # no path sum means anything unless it bounds the slope of the network
        slope = jacrev(lambda x: net(x[None])[0])(row).detach()
        assert float(torch.linalg.matrix_norm(slope, 2)) <= bound


def test_a_branch_of_zeros_leaves_the_spectral_margin() -> None:
    """As residual networks are often initialised."""
    net = randomised(Diamond())
    points = labelled(net, normal(10, 3))
    nn.init.zeros_(net.deep.weight)  # type: ignore[union-attr, arg-type]
    assert math.isfinite(value(Setting(net, points), "spectral_margin_mean"))
