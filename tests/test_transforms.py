"""Transforms against the networks they must not change, and what they refuse."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from conftest import Untouched
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transform_nets import (
    BATCH_NORM,
    SMALL,
    Joined,
    all_factors,
    apart,
    mlp,
    outputs,
    residual_net,
    small_net,
    with_statistics,
)

from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.papers import networks as models
from spiritlevel.results import Certificate, Result
from spiritlevel.transforms import (
    AffineMap,
    RadialMap,
    ScalingGroup,
    Transformed,
    fold_batchnorm,
    input_map,
    radial,
    rescale_all,
    rescale_layers,
    scale_before_batchnorm,
    scale_last_layer,
    scaling_groups,
    standardisation,
    whitening,
    why_no_groups,
)


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return small_net(request.param)


# ---------------------------------------------------------------- the function stays


NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "lenet5": (models.lenet5, (1, 28, 28)),
    "fcn_bn": (models.fcn_bn, (1, 28, 28)),
    "all_cnn_c": (models.all_cnn_c, (3, 16, 16)),
    "preresnet164": (models.preresnet164, (3, 8, 8)),
    "vgg16_bn": (models.vgg16_bn, (3, 32, 32)),
}


def check_network(name: str, dtype: torch.dtype, width: float) -> None:
    """Transforms of one of the papers' networks, on inputs that they have not seen."""
    build, shape = NETWORKS[name]
    model = with_statistics(build(width=width, classes=10)).to(dtype).eval()
    x, fresh = torch.randn(2, 4, *shape, dtype=dtype)
    normed = any(isinstance(module, BATCH_NORM) for module in model.modules())
    mapping = standardisation(x + torch.rand(shape[0], 1, 1, dtype=dtype))
    results = [
        rescale_layers(model, all_factors(model, x), data=x),
        rescale_layers(model, all_factors(model, x, per_channel=True), data=x),
    ]
    if normed:
        groups = scaling_groups(model, data=x)
        before = {g.writers[0]: 5.0 for g in groups if g.absorbers and not g.readers and len(g.writers) == 1}
        results += [scale_before_batchnorm(model, before, data=x), fold_batchnorm(model, data=x)]
    if width == 1.0 or name != "preresnet164":
        results += [
            rescale_all(model, 7.0, data=x),
            scale_last_layer(model, 7.0, data=x),
            input_map(model, mapping.matrix, mapping.shift, data=x),
            radial(model, delta=1.0, rho=0.1, r_hat=0.5, data=x),
        ]
    modes = ("eval", "batch") if normed else ("eval",)
    expected = {mode: outputs(model, fresh, mode == "batch") for mode in modes}
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for new, certificate, inputs in ((r.model, r.certificate, r.inputs) for r in results):
        assert certificate.relative_difference < 10 * tolerance
        mapped = fresh if inputs is None else inputs(fresh)
        for mode in set(modes) & set(certificate.modes):
            allowed = tolerance if mode == "eval" else 10 * tolerance  # statistics of few samples amplify rounding
            difference = apart(outputs(new, mapped, mode == "batch"), certificate.scale * expected[mode])
            assert difference < allowed, (certificate.transform, mode)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "preresnet164" else name for name in NETWORKS]
)
def test_the_papers_networks_keep_their_outputs(name: str) -> None:
    check_network(name, torch.float64, 0.125)
    check_network(name, torch.float32, 0.125)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_papers_networks_keep_their_outputs_at_full_size(name: str, dtype: torch.dtype) -> None:
    check_network(name, dtype, 1.0)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(3, 3, 3, padding=1),
    "circular": lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", bias=False),
    "depthwise": lambda: nn.Conv2d(3, 3, 1, groups=3),
    "norm": lambda: nn.BatchNorm2d(3),
    "plain norm": lambda: nn.BatchNorm2d(3, affine=False),
    "relu": lambda: nn.ReLU(inplace=True),
    "prelu": lambda: nn.PReLU(),
    "tanh": lambda: nn.Tanh(),
    "max": lambda: nn.MaxPool2d(3, 1, padding=1),
    "average": lambda: nn.AvgPool2d(3, 1, padding=1),
    "dropout": lambda: nn.Dropout2d(),
    "residual": lambda: models.Residual(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 1)), nn.Identity()),
    "projected": lambda: models.Residual(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1, bias=False)),
}


@given(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=7), st.booleans(), st.integers(0, 99))
def test_any_factors_of_the_groups_keep_any_network(names: list[str], per_channel: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(BLOCKS[name]() for name in names), nn.Flatten(), nn.Linear(75, 4))
    model, x = with_statistics(model).double().eval(), torch.randn(3, 3, 5, 5).double()
    result = rescale_layers(model, all_factors(model, x, per_channel=per_channel, seed=seed), data=x)
    for mode in result.certificate.modes:
        assert apart(outputs(result.model, x, mode == "batch"), outputs(model, x, mode == "batch")) < 1e-12
    assert outputs(
        rescale_layers(model, {str(len(names) + 1): 2.0}, data=x, allow_output_scale=True).model, x
    ).allclose(2 * outputs(model, x))


TRANSFORMS: dict[str, Callable[[nn.Module], Transformed]] = {
    "rescale_layers": lambda m: rescale_layers(m, {"0": 2.0, "3": 3.0, "5": 1 / 3}),
    "per channel": lambda m: rescale_layers(m, {"0": torch.tensor([1.0, 2.0, 3.0, 4.0])}),
    "rescale_all": lambda m: rescale_all(m, 3.0),
    "scale_last_layer": lambda m: scale_last_layer(m, 3.0),
    "scale_before_batchnorm": lambda m: scale_before_batchnorm(m, {"0": 3.0}),
    "fold_batchnorm": fold_batchnorm,
    "input_map": lambda m: input_map(m, torch.tensor([1.0, 2.0, 3.0]), torch.tensor(1.0)),
    "radial": lambda m: radial(m, delta=1.0, rho=0.2, r_hat=0.4),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_original_is_untouched_and_the_copy_keeps_its_state(
    name: str, training: bool, untouched: Untouched
) -> None:
    model, x = SMALL["batch norm"]()
    with_statistics(model).train(training)
    model[0].bias.requires_grad_(False)
    model(x).sum().backward()
    with untouched(model):
        result = TRANSFORMS[name](model)
    new = result.model
    assert new.training is training
    assert not dict(new.named_parameters())["0.bias"].requires_grad
    assert not {id(p) for p in model.parameters()} & {id(p) for p in new.parameters()}
    assert result.certificate.transform == name.replace("per channel", "rescale_layers")
    assert Result.from_json(result.certificate.to_json()).to_json() == result.certificate.to_json()
    with untouched(new):
        copy.deepcopy(new).eval()(x)


def test_a_certificate_says_what_was_checked_and_on_what() -> None:
    model, x = SMALL["batch norm"]()
    certificate = scale_last_layer(model, 2.0, data=TensorDataset(x, torch.zeros(6))).certificate
    assert isinstance(certificate, Certificate)
    assert (certificate.preserves, certificate.scale, certificate.samples) == ("outputs scaled by 2", 2.0, 6)
    assert str(certificate).startswith("scale_last_layer preserves: outputs scaled by 2 (batch norm: eval and batch)")
    assert str(certificate).endswith("on 6 given inputs of shape (3,)")
    loader = DataLoader(TensorDataset(x, torch.zeros(6)), batch_size=4)
    assert rescale_layers(model, {"0": 2.0}, data=loader).certificate.samples == 4
    absorbed = rescale_layers(model, {"0": 2.0}, data=(x, torch.zeros(6))).certificate
    assert absorbed.notes == ("the statistics and eps of batch norm '1' follow its scaled input",)
    assert scale_last_layer(models.lenet5(), 2.0).certificate.data == "8 normal random inputs of shape (1, 28, 28)"


def test_inputs_and_outputs_need_not_be_single_tensors() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(2, 3), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, left: Tensor, right: Tensor) -> Any:
            return type("Output", (), {"logits": self.head(torch.relu(self.a(left) + self.b(right)))})()

    inputs = torch.randn(5, 2), torch.randn(5, 4)
    model, data = Pair(), (inputs, torch.zeros(5))
    result = rescale_layers(model, {"a": 4.0, "b": 4.0, "head": 0.25}, data=data)
    assert torch.allclose(result.model(*inputs).logits, model(*inputs).logits, atol=1e-6)
    assert scaling_groups(model, data=data) == (ScalingGroup(("a", "b"), ("head",), (), 3),)


def test_parameters_outside_modules_are_layers_too() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(F.linear(x, self.first)), self.second)

    result = rescale_layers(Bare(), {"first": 2.0, "second": 0.5}, data=torch.randn(5, 3))
    assert result.certificate.factors == {"first": 2.0, "second": 0.5}


class Products(nn.Module):
    """Products with bare matrices, the second one turned in one of the ways that Python offers."""

    TURNS: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "t": lambda matrix: matrix.t(),
        "T": lambda matrix: matrix.T,
        "mT": lambda matrix: matrix.mT,
        "transpose": lambda matrix: matrix.transpose(0, 1),
        "permute": lambda matrix: matrix.permute(1, 0),
    }

    def __init__(self, turn: str, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
        self.turn, self.again = self.TURNS[turn], again

    def forward(self, x: Tensor) -> Tensor:
        result = torch.matmul(F.relu(x @ self.first), self.turn(self.second))
        return result + self.turn(self.second).sum() if self.again else result


@pytest.mark.parametrize("turn", Products.TURNS)
def test_products_with_a_matrix_of_parameters_are_layers(turn: str) -> None:
    model, x = Products(turn).double(), torch.randn(5, 3).double()
    assert scaling_groups(model, data=x) == (ScalingGroup(("first",), ("second",), (), 4),)
    channels = 2.0 ** torch.tensor([9.0, -9, 4, -1])
    result = rescale_layers(model, {"first": channels}, data=x)
    assert result.certificate.relative_difference == 0
    assert torch.equal(result.model.second, model.second / channels)  # type: ignore[arg-type, operator]
    assert scale_last_layer(model, 4.0, data=x).certificate.factors == {"first": 1.0, "second": 4.0}
    assert not scaling_groups(Products(turn, again=True).double(), data=x)  # its second use takes no factor


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_take_factors_and_fold_batch_norm(dims: int, groups: int) -> None:
    conv = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    layers = [conv(4, 8, 2, groups=groups), nn.ReLU(), conv(8, 4, 3, stride=2, groups=groups, bias=False), norm(4)]
    model = with_statistics(nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9**dims, 2))).double()
    x = torch.randn(3, 4, *[3] * dims).double()
    channels = {name: 2.0 ** torch.randint(-9, 10, (size,)).double() for name, size in (("0", 8), ("2", 4), ("3", 4))}
    assert rescale_layers(model, {"0": 64.0, "2": 2.0**-6}, data=x).certificate.relative_difference < 1e-14
    assert rescale_layers(model, channels, data=x).certificate.relative_difference < 1e-14
    folded = fold_batchnorm(model, data=x)
    assert folded.certificate.relative_difference < 1e-13
    assert not any(isinstance(module, norm) for module in folded.model.modules())


def test_numbers_keep_their_precision() -> None:
    model, x = mlp(3, 4, 2), torch.randn(5, 3).double()
    assert apart(outputs(input_map(model, 0.1, 0.7).model, 0.1 * x + 0.7), outputs(model, x)) < 1e-14
    assert rescale_layers(model, {"0": 0.1, "2": 10.0}).certificate.relative_difference < 1e-14


def test_half_precision_is_followed_and_certified() -> None:
    model = mlp(3, 4, 2).bfloat16()
    result = rescale_layers(model, {"0": 4.0, "2": 0.25})
    assert result.model[0].weight.dtype == torch.bfloat16
    assert result.certificate.largest_difference == 0.0


# ---------------------------------------------------------------- rules of the factors


def test_each_bias_takes_the_product_of_the_factors_so_far() -> None:
    alphas = {"0": 2.0, "2": 5.0, "4": 0.3, "6": 0.7, "8": 1 / (2 * 5 * 0.3 * 0.7)}
    factors = rescale_layers(mlp(3, 4, 4, 4, 4, 2), alphas).certificate.factors
    assert factors is not None
    product = 1.0
    for name, alpha in alphas.items():
        product *= alpha
        assert factors[f"{name}.weight"] == alpha
        assert factors[f"{name}.bias"] == pytest.approx(product, rel=1e-15)


def test_rescaling_and_its_inverse_are_the_identity(small: tuple[nn.Module, Tensor]) -> None:
    model, x = small
    for per_channel in (False, True):
        factors = all_factors(model, x, per_channel=per_channel)
        there = rescale_layers(model, factors, data=x).model
        back = rescale_layers(there, {name: 1 / factor for name, factor in factors.items()}, data=x).model
        assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), there.parameters(), strict=True))
        for (name, before), after in zip(model.named_parameters(), back.parameters(), strict=True):
            assert torch.allclose(before, after, rtol=1e-13, atol=0), name
        for before, after in zip(model.modules(), back.modules(), strict=True):
            if isinstance(before, BATCH_NORM):
                assert torch.allclose(before.running_mean, after.running_mean, rtol=1e-13, atol=0)
                assert torch.allclose(before.running_var + before.eps, after.running_var + after.eps, rtol=1e-13)
                assert per_channel or after.eps == pytest.approx(before.eps, rel=1e-13)


@pytest.mark.parametrize("alpha", [1e-4, 1e4])
def test_scaling_before_batch_norm_is_exact_in_both_modes(alpha: float) -> None:
    model = with_statistics(SMALL["batch norm"]()[0]).double()
    x = torch.randn(6, 3).double()
    result = scale_before_batchnorm(model, {"0": alpha})
    norm = result.model[1]
    assert norm.eps == pytest.approx(1e-5 * alpha**2, rel=1e-14)
    assert torch.allclose(norm.running_var, alpha**2 * model[1].running_var, rtol=1e-14)
    for batch in (False, True):
        assert apart(outputs(result.model, x, batch), outputs(model, x, batch)) < 1e-12
    kept = copy.deepcopy(result.model)
    kept[1].eps = model[1].eps  # the same scaling without eps is no symmetry
    assert apart(outputs(kept, x, True), outputs(model, x, True)) > (1e-8 if alpha > 1 else 0.1)


def test_channels_before_batch_norm_share_one_eps() -> None:
    model = with_statistics(SMALL["batch norm"]()[0]).double()
    model[1].running_var[0] = 1e-7  # where eps rules
    x = torch.randn(6, 3).double()
    result = rescale_layers(model, {"0": torch.tensor([0.01, 1.0, 2.0, 30.0])})
    assert result.certificate.modes == ("eval",)
    assert apart(outputs(result.model, x), outputs(model, x)) < 1e-12
    assert bool((result.model[1].running_var > 0).all())


def test_the_groups_of_a_residual_network_tie_its_stream() -> None:
    assert scaling_groups(residual_net(), data=torch.randn(2, 2, 4, 4)) == (
        ScalingGroup(("0", "1.body.4"), ("5",), ("1.body.0",), 4),
        ScalingGroup(("1.body.0",), ("1.body.2",), (), 4),
        ScalingGroup(("1.body.2",), ("1.body.4",), (), 4),
    )


def test_a_layer_may_write_the_group_it_reads() -> None:
    model = nn.Sequential(nn.Linear(3, 4), models.Residual(nn.Linear(4, 4), nn.Identity()), nn.Linear(4, 2)).double()
    (group,) = scaling_groups(model)
    assert group == ScalingGroup(("0", "1.body"), ("1.body", "2"), (), 4)
    assert group.factors(3.0) == {"0": 3.0, "1.body": 1.0, "2": 1 / 3}
    for beta in (3.0, torch.tensor([1.0, 2.0, 3.0, 4.0])):
        assert rescale_layers(model, group.factors(beta)).certificate.relative_difference < 1e-14


def test_concatenated_channels_need_one_number() -> None:
    model, x = Joined(), torch.randn(4, 2, 6, 6)
    groups = scaling_groups(model, data=x)
    assert groups[0] == ScalingGroup(("left", "right"), ("deep",), (), None)
    assert groups[1] == ScalingGroup(("deep",), ("head",), (), 10)
    factors = {"left": torch.tensor([1.0, 2.0, 3.0]), "right": torch.tensor([4.0, 5.0])}
    assert rescale_layers(model, factors, data=x).certificate.relative_difference < 1e-5


def test_rescale_all_shares_the_factor_between_the_layers() -> None:
    factors = rescale_all(mlp(3, 4, 4, 4, 2), 16.0).certificate.factors
    assert factors is not None
    for index, name in enumerate(["0", "2", "4", "6"], start=1):
        assert factors[f"{name}.weight"] == pytest.approx(2.0, rel=1e-14)
        assert factors[f"{name}.bias"] == pytest.approx(2.0**index, rel=1e-14)
    stream = nn.Sequential(nn.Linear(3, 4), models.Residual(mlp(4, 5, 4), nn.Identity()), nn.Linear(4, 2)).double()
    result = rescale_all(stream, 16.0)
    assert result.certificate.scale == 16.0
    shares = {name: factor for name, factor in result.certificate.factors.items() if name.endswith("weight")}
    assert shares["0.weight"] * shares["2.weight"] == pytest.approx(16.0)
    assert shares["1.body.0.weight"] * shares["1.body.2.weight"] == pytest.approx(1.0)
    normed = rescale_all(SMALL["batch norm"]()[0], 8.0).certificate.factors
    assert normed["0.weight"] == normed["0.bias"] == 1.0  # in front of the batch norm
    assert [normed[f"{name}.weight"] for name in "135"] == pytest.approx([2.0, 2.0, 2.0], rel=1e-14)


def test_one_layer_is_all_layers_and_the_last() -> None:
    model = nn.Linear(3, 2)
    wrapped = nn.Sequential(model)
    for transform in (rescale_all, scale_last_layer):
        assert transform(wrapped, 5.0).certificate.factors == {"0.weight": 5.0, "0.bias": 5.0}
    assert scaling_groups(wrapped) == ()


def test_scale_last_layer_finds_what_the_outputs_are_made_of() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.stem(x))
            return self.a(x) - 2 * self.b(x)

    factors = scale_last_layer(Ends(), 3.0).certificate.factors
    assert factors == {
        "stem.weight": 1.0,
        "stem.bias": 1.0,
        **dict.fromkeys(("a.weight", "a.bias"), 3.0),
    } | dict.fromkeys(("b.weight", "b.bias"), 3.0)
    folded = scale_last_layer(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 3.0).certificate.factors
    assert folded == {"0.weight": 1.0, "0.bias": 1.0, "1.weight": 3.0, "1.bias": 3.0}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.twice(F.relu(self.twice(F.relu(self.first(x)))))))


class Reads(nn.Module):
    """A network that looks at its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x))) / (1 + self.first.weight.norm())


class Fractious(nn.Module):
    """A network whose dependence on its weights cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x))) * float(self.first.weight.detach().norm().item())


class Overwrites(Reads):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(len(x), 4)
        hidden[:, 1:] = self.first(x)[:, 1:]
        return self.last(hidden)


class Hyper(Reads):
    """A layer whose weight is the output of another."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x @ torch.ones(3, 4), self.first(x)[:2])


class Constant(Reads):
    """A layer whose weight is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.linear(F.relu(self.first(x)), self.table)))


class Rounds(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(10 * x).to(torch.int64).to(x.dtype))


class Sloped(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.prelu(x @ torch.ones(3, 4), self.first(x)[0]))


def norm_twice() -> nn.Sequential:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 2))


def statistics_free() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))


X = torch.randn(4, 3)
TANH = mlp(3, 4, 4, 2, act=nn.Tanh).float()
LAYER_NORM = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
PLAIN = mlp(3, 4, 2).float()
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "tanh": (
        lambda: rescale_layers(TANH, {"0": 2.0, "2": 0.5}),
        r"'tanh' at '1' \(Tanh\) passes no factor on, but .* 2;",
    ),
    "layer norm": (lambda: rescale_layers(LAYER_NORM, {"0": 2.0, "2": 0.5}), r"at '1' \(LayerNorm\) passes no factor"),
    "sum": (
        lambda: rescale_layers(residual_net(), {"0": 2.0, "5": 0.5}, data=torch.randn(2, 2, 4, 4)),
        r"'add' at '1' \(Residual\) joins values scaled by .* and by .*; the products of the factors",
    ),
    "input": (
        lambda: rescale_layers(models.Residual(nn.Linear(3, 3), nn.Identity()), {"body": 2.0}, data=X),
        r"joins values scaled by 2 and by 1",
    ),
    "tied": (lambda: rescale_layers(Tied(), {"twice": 2.0, "last": 0.25}), r"'twice.weight' is used 2 times \(tied"),
    "tied behind": (lambda: rescale_layers(Tied(), {"first": 2.0, "last": 0.5}), r"'twice.bias' is used 2 times"),
    "read elsewhere": (lambda: rescale_layers(Reads(), {"first": 2.0, "last": 0.5}), r"'first.weight' is used 2 times"),
    "unseen": (lambda: rescale_layers(Fractious(), {"first": 2.0, "last": 0.5}), "is used 2 times"),
    "overwritten": (
        lambda: rescale_layers(Overwrites(), {"first": 2.0, "last": 0.5}),
        "'__setitem__' at the network's own forward passes no factor on",
    ),
    "computed weight": (
        lambda: rescale_layers(Hyper(), {"first": 2.0}),
        "'linear' at the network's own forward passes",
    ),
    "constant weight": (lambda: rescale_layers(Constant(), {"table": 2.0, "last": 0.5}), "unknown layer .* 'table'"),
    "constant": (
        lambda: rescale_layers(Constant(), {"first": 2.0, "last": 0.5}),
        "'linear' at the network's own forward",
    ),
    "rounding": (lambda: rescale_layers(Rounds(), {"first": 2.0}), "'to' at the network's own forward passes no"),
    "computed slope": (lambda: rescale_layers(Sloped(), {"first": 2.0}), "'prelu' at the network's own forward passes"),
    "empty": (lambda: rescale_layers(PLAIN, {}, data=X[:0]), "data= holds no samples"),
    "weight norm": (
        lambda: rescale_layers(
            nn.Sequential(nn.Linear(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))),
            {"0": torch.ones(4).mul(2)},
        ),
        "a tensor that is not a parameter .* scaled by a factor per channel",
    ),
    "product": (lambda: rescale_layers(PLAIN, {"0": 2.0}), "multiply the outputs by 2; choose factors whose product"),
    "channels of the output": (
        lambda: rescale_layers(PLAIN, {"2": torch.tensor([1.0, 2.0])}, allow_output_scale=True),
        "scale the output channels differently",
    ),
    "name": (lambda: rescale_layers(PLAIN, {"1": 2.0}), "unknown layer that can be scaled '1'. Known: 0, 2"),
    "negative": (lambda: rescale_layers(PLAIN, {"0": -1.0}), "positive, finite factor of layer '0', got -1.0"),
    "not a number": (lambda: rescale_layers(PLAIN, {"0": torch.tensor([1.0, math.nan])}), "must be a positive, finite"),
    "matrix": (lambda: rescale_layers(PLAIN, {"0": torch.ones(4, 3)}), r"tensor of shape \(4, 3\) that is not"),
    "number of channels": (lambda: rescale_layers(PLAIN, {"0": torch.ones(3)}), "has 4 output channels, but 3 factors"),
    "overflow": (lambda: rescale_layers(PLAIN, {"0": 1e39, "2": 1e-39}), "too extreme for torch.float32"),
    "norm twice": (lambda: rescale_layers(norm_twice(), {"0": 2.0}), "batch norm '1' is used more than once"),
    "plain norm": (
        lambda: rescale_layers(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), {"1": 2.0}),
        "batch norm '1' has no affine part to scale",
    ),
    "no statistics": (
        lambda: rescale_layers(statistics_free(), {"0": torch.tensor([1.0, 2.0, 3.0, 4.0])}),
        "'1' keeps no running statistics",
    ),
    "pixels": (
        lambda: rescale_layers(
            nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)), nn.MaxPool1d(3), nn.Flatten(), nn.Linear(2, 2)),
            {"0": torch.arange(1.0, 7.0)},
        ),
        r"at '2' \(MaxPool1d\) different factors meet",
    ),
    "input shape": (lambda: rescale_layers(nn.Sequential(nn.Embedding(3, 4)), {}), "pass data=, a batch of inputs"),
    "all, tanh": (
        lambda: rescale_all(TANH, 2.0),
        r"rescale_all: the operation 'tanh' at '1' \(Tanh\) passes no factor",
    ),
    "all, alpha": (lambda: rescale_all(PLAIN, 0.0), "positive, finite alpha, got 0.0"),
    "last, softmax": (
        lambda: scale_last_layer(nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), 2.0),
        r"'softmax' at '1' \(Softmax\) passes no factor on; the network must end in a linear layer",
    ),
    "last, tied": (
        lambda: scale_last_layer(nn.Sequential(*[nn.Linear(3, 3)] * 2), 2.0),
        "layer '0' is used more than once",
    ),
    "before, no norm": (lambda: scale_before_batchnorm(PLAIN, {"0": 2.0}), "layer '0' are read by the layer '2'"),
    "before, output": (lambda: scale_before_batchnorm(PLAIN, {"2": 2.0}), "layer '2' are read by no batch norm"),
    "before, channels": (lambda: scale_before_batchnorm(norm_twice(), {"0": torch.ones(4)}), "one number per layer"),
    "before, name": (lambda: scale_before_batchnorm(PLAIN, {"relu": 2.0}), "unknown layer that can be scaled 'relu'"),
    "fold": (lambda: fold_batchnorm(PLAIN), "there is nothing to fold"),
    "fold, tied": (lambda: fold_batchnorm(norm_twice()), "there is nothing to fold"),
    "map, singular": (lambda: input_map(PLAIN, torch.zeros(3, 3)), "is not invertible"),
    "map, shape": (lambda: input_map(PLAIN, torch.ones(4)), "4 features does not fit inputs of shape"),
    "map, sides": (lambda: input_map(PLAIN, torch.ones(3), torch.ones(4)), r"got shapes \(3,\) and \(4,\)"),
    "map, features": (
        lambda: input_map(models.lenet5(), torch.ones(784)),
        "'0' is a convolution, which can only undo maps of its 1 channels, not of 784 features",
    ),
    "map, tokens": (
        lambda: input_map(nn.Linear(3, 2), torch.ones(5), data=torch.randn(2, 5, 3)),
        "without flattening",
    ),
    "map, first operation": (
        lambda: input_map(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), torch.tensor(2.0)),
        r"the operation 'relu' at '0' \(ReLU\) reads the network's input",
    ),
    "map, first norm": (
        lambda: input_map(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.tensor(2.0)),
        "the batch norm '0' reads the network's input",
    ),
    "map, tied": (lambda: input_map(nn.Sequential(*[nn.Linear(3, 3)] * 2), torch.tensor(2.0)), "used once"),
    "whitening": (lambda: whitening(torch.ones(5, 3)), "covariance of the 3 features is singular; pass ridge="),
    "per": (lambda: standardisation(X, per="pixel"), "unknown value of per 'pixel'"),
    "radii": (lambda: RadialMap(torch.zeros(2), 1.0, 2.0, 0.5), "needs 0 < rho < delta"),
    "center": (lambda: RadialMap(torch.zeros(2, 2), 1.0, 0.5, 0.5), "a flat center"),
    "radial center": (lambda: radial(PLAIN, delta=1.0, rho=0.1, r_hat=0.5, center=torch.zeros(3)), r"shape \(26,\)"),
    "no prediction": (lambda: fold_batchnorm(statistics()).hessian(Operator(lambda v: v, 1)), "not a linear map"),
    "nameless": (lambda: rescale_layers(PLAIN, {}).hessian(Operator(lambda v: v, 1)), "names and shapes"),
}


def statistics() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_transformed_is_refused_with_its_place(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(InputError, match=message):
        call()


def test_a_last_layer_that_shares_its_weight_is_told_how_to_be_scaled() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(InputError, match=r"is used more than once.*; give the last layer a copy of its own"):
        scale_last_layer(model, 2.0)


class Limited(nn.Module):
    """A network that looks at the size of its hidden values, and cuts them off where one is large."""

    def __init__(self, size: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.size, self.first, self.last = size, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        return self.last(hidden.clamp(max=50.0) if self.size(hidden) > 50 else hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "size",
    [
        lambda h: h.amax().item(),
        lambda h: float(h.sum()),
        lambda h: max(h.reshape(-1).tolist()),
        lambda h: h.detach().numpy().max(),
    ],
)
def test_values_whose_size_decides_what_comes_next_take_no_factor(size: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputError, match="passes no factor on, but its input is scaled by 8"):
        rescale_layers(Limited(size), {"first": 8.0, "last": 0.125})
    assert scaling_groups(Limited(size)) == ()


def test_an_operation_that_passes_no_factor_on_may_stand_where_there_is_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(1))
    assert scaling_groups(model) == (ScalingGroup(("2",), ("4",), (), 4),)
    assert rescale_layers(model, {"2": 2.0, "4": 0.5}).certificate.largest_difference == 0.0


# ---------------------------------------------------------------- folding, inputs


def test_a_batch_norm_with_a_gain_in_a_buffer_absorbs_folds_and_takes_no_factor() -> None:
    """As frozen batch norms of detectors have; it ended in a `KeyError`."""
    torch.manual_seed(0)
    net = with_statistics(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))).double()
    x, gain = torch.randn(20, 3).double(), net[1].weight.detach()
    del net[1].weight
    net[1].register_buffer("weight", gain)
    assert apart(outputs(scale_before_batchnorm(net, {"0": 3.0}).model, x), outputs(net, x)) < 1e-12
    assert apart(outputs(fold_batchnorm(net).model, x), outputs(net, x)) < 1e-12
    with pytest.raises(InputError, match="the batch norm '1' has a gain or bias that is no parameter"):
        rescale_layers(net, {"1": 2.0, "3": 0.5}, data=x)
    assert not any("1" in group.writers for group in scaling_groups(net, data=x))


def test_folding_leaves_what_follows_no_layer_directly() -> None:
    model = with_statistics(models.preresnet164(width=0.125)).double()
    result = fold_batchnorm(model, data=torch.randn(2, 3, 8, 8))
    count = [sum(isinstance(module, nn.BatchNorm2d) for module in m.modules()) for m in (model, result.model)]
    assert count == [163, 55]  # the first of each block reads the sum, and the last one of all
    assert len(result.certificate.notes) == 55
    assert result.certificate.modes == ("eval",)


def test_folding_looks_at_the_axis_of_the_channels() -> None:
    tokens = with_statistics(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))  # the norm acts on the middle axis
    with pytest.raises(InputError, match="nothing to fold"):
        fold_batchnorm(tokens, data=torch.randn(2, 4, 3))
    bare = with_statistics(nn.Sequential(nn.Conv1d(3, 4, 2, bias=False), nn.BatchNorm1d(4, affine=False))).double()
    folded = fold_batchnorm(bare, data=torch.randn(2, 3, 5)).model
    assert folded[0].bias is not None
    x = torch.randn(2, 3, 5).double()
    assert apart(outputs(folded, x), outputs(bare, x)) < 1e-13


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
@pytest.mark.parametrize("padding", [0, 1, "same"])
@pytest.mark.parametrize("kind", ["number", "channels", "colours"])
def test_maps_of_channels_are_undone_also_at_the_border(kind: str, padding: int | str, padding_mode: str) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=padding, padding_mode=padding_mode, bias=kind != "number")
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    images = torch.rand(6, 3, 5, 5).double() * torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    model(images)
    mapping = {
        "number": AffineMap(torch.tensor(2.0), torch.tensor(-3.0)),
        "channels": standardisation(images),
        "colours": whitening(images, per="channel"),
    }[kind]
    result = input_map(model, mapping.matrix, mapping.shift, data=images)
    assert apart(outputs(result.model, mapping(images)), outputs(model, images)) < 1e-12
    assert [name for name, _ in result.model.named_parameters()][:2] == ["0.weight", "0.bias"]
    again = scale_last_layer(result.model, 2.0, data=mapping(images))  # what comes out can be transformed again
    assert apart(outputs(again.model, mapping(images)), 2 * outputs(model, images)) < 1e-12


@pytest.mark.parametrize("per", ["channel", "feature"])
def test_a_linear_first_layer_undoes_any_map(per: str) -> None:
    images = torch.rand(40, 2, 2, 3).double()
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)).double()
    for mapping in (standardisation(images, per=per), whitening(images, per=per)):
        mapped = mapping(images)
        rows = mapped.flatten(1) if per == "feature" else mapped.movedim(1, -1).flatten(0, -2)
        assert rows.mean(0).abs().max() < 1e-12
        assert torch.allclose(rows.std(0, correction=0), torch.ones(rows.shape[1]).double())
        result = input_map(model, mapping.matrix, mapping.shift, data=images)
        assert result.inputs is not None
        assert torch.equal(result.inputs(images), mapped)
        assert apart(outputs(result.model, mapped), outputs(model, images)) < 1e-12


def test_standardisation_keeps_constant_features_and_whitening_takes_a_ridge() -> None:
    points = torch.cat([torch.randn(20, 2), torch.ones(20, 1)], 1).double()
    mapped = standardisation(points, per="feature")(points)
    assert torch.equal(mapped[:, 2], torch.zeros(20).double())
    assert float(whitening(points, ridge=0.1)(points).T.cov(correction=0).diagonal().max()) < 1


class Viewing(nn.Module):
    """Flattens and shuffles its feature maps by `view`, which needs the strides of the real tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 4, 3), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(x)), 2)
        shuffled = hidden.view(-1, 2, 2, 3, 3).transpose(1, 2).contiguous().view(-1, 4, 3, 3)
        return self.last(shuffled.view(-1, 36))


def test_factors_of_channels_go_through_views() -> None:
    torch.manual_seed(0)
    model, x = Viewing().double(), torch.randn(6, 1, 8, 8, dtype=torch.float64)
    result = rescale_layers(model, {"first": torch.tensor([1.0, 2.0, 3.0, 4.0])}, data=x)
    assert result.certificate.relative_difference < 1e-12
    assert torch.allclose(result.model(x), model(x))


def test_a_certificate_names_only_the_modes_that_were_compared() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    for count, modes in ((1, ("eval",)), (5, ("eval", "batch"))):
        x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
        assert rescale_layers(model, {"0": 2.0}, data=x).certificate.modes == modes


# ---------------------------------------------------------------- layers that are no nn.Linear


class BareProducts(nn.Module):
    """x @ W in its usual forms, with a bare bias."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.w = nn.Parameter(torch.randn(4, 6) if form in ("mm", "operator") else torch.randn(6, 4))
        self.b, self.v = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 3))

    def hidden(self, x: Tensor) -> Tensor:
        return {
            "mm": lambda: torch.mm(x, self.w) + self.b,
            "operator": lambda: x @ self.w - self.b,
            "transposed": lambda: x @ self.w.T + self.b,
            "t": lambda: self.b + torch.matmul(x, self.w.t()),
            "transpose": lambda: torch.relu(x) @ self.w.transpose(0, 1) + self.b,
            "linear": lambda: F.linear(x, self.w) + self.b,
            "einsum": lambda: torch.einsum("ni,oi->no", x, self.w) + self.b,
        }[self.form]()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)) @ self.v


@pytest.mark.parametrize("form", ["mm", "operator", "transposed", "t", "transpose", "linear"])
def test_factors_pass_bare_matrix_products(form: str) -> None:
    torch.manual_seed(0)
    model, data = BareProducts(form).double(), (torch.randn(5, 4).double(), torch.zeros(5).long())
    (group,) = scaling_groups(model, data=data)
    assert (group.writers, group.readers, group.channels) == (("w",), ("v",), 6)
    for beta in (3.0, 2.0 ** torch.arange(-3, 3).double()):
        result = rescale_layers(model, group.factors(beta), data=data)  # certified on the data
        assert not torch.allclose(result.model.w, model.w)
        assert torch.allclose(result.model(data[0]), model(data[0]), rtol=1e-12)


def test_a_product_that_is_not_followed_is_named() -> None:
    torch.manual_seed(0)
    model, data = BareProducts("einsum"), (torch.randn(5, 4), torch.zeros(5).long())
    assert scaling_groups(model, data=data) == ()
    reason = why_no_groups(model, data=data)
    assert reason == "factors are not followed through the operation 'einsum' at the network's own forward"
    with pytest.raises(InputError, match="unknown layer that can be scaled 'w'"):
        rescale_layers(model, {"w": 2.0}, data=data)


def test_a_bare_bias_that_is_used_twice_takes_no_factor() -> None:
    class Twice(BareProducts):
        def forward(self, x: Tensor) -> Tensor:
            return (torch.relu(self.hidden(x)) + self.b) @ self.v

    torch.manual_seed(0)
    assert scaling_groups(Twice("mm"), data=(torch.randn(5, 4), torch.zeros(5).long())) == ()


@pytest.mark.parametrize("groups", [1, 2])
def test_factors_pass_transposed_convolutions(groups: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ConvTranspose2d(2, 4, 2, groups=groups),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups),
        nn.LeakyReLU(),
        nn.Conv2d(6, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.ConvTranspose2d(2, 2, 1),
        nn.Flatten(),
        nn.Linear(72, 3),
    ).double()
    data = torch.randn(4, 2, 3, 3).double(), torch.zeros(4).long()
    found = scaling_groups(model, data=data)
    assert [group.writers[0] for group in found] == ["0", "2", "4", "5", "7"]
    for group in found:
        assert group.channels is not None
        for beta in (3.0, 2.0 ** torch.arange(group.channels).double()):
            result = rescale_layers(model, group.factors(beta), data=data)
            assert torch.allclose(result.model.eval()(data[0]), model.eval()(data[0]), rtol=1e-10)
