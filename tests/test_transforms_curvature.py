"""The theorems on flatness as tests: Hessians at the new point, scaled outputs, radial maps (float64, dense)."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacfwd, jacrev
from transform_nets import (
    SMALL,
    all_factors,
    apart,
    blocks,
    cross_entropy,
    flat,
    hessian,
    loss_of,
    mlp,
    norms,
    outputs,
    small_net,
    with_statistics,
)

from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.transforms import (
    RadialMap,
    Transformed,
    input_map,
    radial,
    rescale_all,
    rescale_layers,
    scale_before_batchnorm,
    scale_last_layer,
)


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    return small_net(request.param)


# ---------------------------------------------------------------- theory: Hessians at the new point


def predicted(result: Transformed, before: Tensor) -> Tensor:
    """T⁻¹HT⁻¹ from the certificate's factors."""
    factors = result.certificate.factors
    assert factors is not None
    parts = [
        torch.as_tensor(factors[n], dtype=torch.float64).expand(p.shape).reshape(-1)
        for n, p in result.model.named_parameters()
    ]
    inverse = 1 / torch.cat(parts)
    return inverse[:, None] * before * inverse


@pytest.mark.parametrize("transform", ["scalar", "channels", "all", "last", "radial"])
def test_the_hessian_at_the_new_point_is_predicted_by_the_factors(
    small: tuple[nn.Module, Tensor], transform: str
) -> None:
    model, x = small
    y = torch.arange(len(x)) % outputs(model, x).shape[1]
    result = {
        "scalar": lambda: rescale_layers(model, all_factors(model, x), data=x),
        "channels": lambda: rescale_layers(model, all_factors(model, x, per_channel=True), data=x),
        "all": lambda: rescale_all(model, 3.0, data=x),
        "last": lambda: scale_last_layer(model, 3.0, data=x),
        "radial": lambda: radial(model, delta=1.0, rho=0.1, r_hat=0.5, data=x),
    }[transform]()
    before = hessian(model, x, y, result.certificate.scale)
    after = hessian(result.model, x, y)
    assert apart(after, predicted(result, before)) < 1e-9
    shapes = {name: p.shape for name, p in model.named_parameters()}
    operator = Operator(lambda v: before @ v, len(before), dtype=torch.float64, shapes=shapes)
    assert apart(result.hessian(operator).dense(), after) < 1e-9


def test_the_hessian_before_batch_norm_is_predicted_with_batch_statistics_too() -> None:
    model, x = with_statistics(SMALL["batch norm"]()[0]).double(), torch.randn(6, 3).double()
    result = scale_before_batchnorm(model, {"0": 3.0})
    y = torch.tensor([0, 1] * 3)
    before, after = (naive.mean_hessian(net, x, y, batch_norm="batch") for net in (model, result.model))
    assert apart(after, predicted(result, before)) < 1e-9


def test_a_diagonal_input_map_predicts_the_hessian() -> None:
    model, x, y = mlp(3, 4, 2), torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 0])
    diagonal = torch.tensor([0.5, 2.0, 3.0]).double()
    result = input_map(model, diagonal)
    assert apart(hessian(result.model, x * diagonal, y), predicted(result, hessian(model, x, y))) < 1e-9
    assert input_map(model, diagonal, torch.tensor(1.0)).certificate.factors is None


@pytest.mark.parametrize("alpha", [0.01, 5.0, 1000.0])
def test_block_traces_follow_the_inverse_square(alpha: float) -> None:
    model, x, y = mlp(3, 5, 2), torch.randn(8, 3).double(), torch.arange(8) % 2
    after = rescale_layers(model, {"0": alpha, "2": 1 / alpha}).model
    first, second = (hessian(net, x, y).diagonal() for net in (model, after))
    powers = {"0.weight": alpha**-2, "0.bias": alpha**-2, "2.weight": alpha**2, "2.bias": 1.0}
    for name, part in blocks(model).items():
        assert float(second[part].sum()) == pytest.approx(powers[name] * float(first[part].sum()), rel=1e-10)


@pytest.mark.parametrize("alpha", [1.0, 0.1, 1e-3])
def test_the_gradient_grows_without_bound_at_equal_loss(alpha: float) -> None:
    """Paper B, Theorem 1: ‖∇L(αθ₁, θ₂/α)‖² = α⁻²‖∇₁‖² + α²‖∇₂‖², so L is not Lipschitz."""
    model, x, y = mlp(3, 5, 2, bias=False), torch.randn(8, 3).double(), torch.arange(8) % 2
    after = rescale_layers(model, {"0": alpha, "2": 1 / alpha}).model
    before, new = (naive.gradient(net, x, y, loss_of(y)) for net in (model, after))
    first, second = before[:15].square().sum(), before[15:].square().sum()
    assert float(new.square().sum()) == pytest.approx(float(first / alpha**2 + second * alpha**2), rel=1e-12)


@pytest.mark.parametrize("sizes", [(3, 4, 4, 1), (3, 4, 4, 3), (6, 4, 3), (2, 5, 5, 2)])
def test_as_many_eigenvalues_diverge_as_the_other_layers_have_rank(sizes: tuple[int, ...]) -> None:
    """Paper B, Theorem 2 in the form of mathematics 7.5: rank(H without layer k) of them, at least r − n_k."""
    model, x = mlp(*sizes, bias=False), torch.randn(40, sizes[0]).double()
    y = outputs(model, x)  # its own outputs: a minimum of loss zero
    network, parts = naive.Flat(model), blocks(model)
    jacobian = jacrev(lambda vector: network.outputs(vector, x).reshape(-1))(network.point) / math.sqrt(40)
    assert apart(hessian(model, x, y), jacobian.T @ jacobian) < 1e-12  # ranks are read off its root, far more exactly
    whole = int(torch.linalg.matrix_rank(jacobian))
    for kept, part in parts.items():
        others = [i for i in range(jacobian.shape[1]) if not part.start <= i < part.stop]
        rank = int(torch.linalg.matrix_rank(jacobian[:, others]))
        assert whole - (part.stop - part.start) <= rank <= whole
        spectra = []
        for beta in (1e3, 1e4):
            factors = {name.removesuffix(".weight"): 1 / beta for name in parts}
            factors[kept.removesuffix(".weight")] = beta ** (len(parts) - 1)
            taus = rescale_layers(model, factors).certificate.factors
            assert taus is not None
            inverse = torch.cat([torch.full((p.numel(),), 1 / taus[n]).double() for n, p in model.named_parameters()])
            spectra.append(torch.linalg.svdvals(jacobian * inverse).square())
        first, second = spectra
        assert bool((second > 90 * first)[:rank].all())  # they grow like β²
        assert bool(((second < 0.1 * first) | (second < 1e-20 * second[0]))[rank:].all())  # the rest goes to zero


# ---------------------------------------------------------------- theory: scaled outputs


def margin(model: nn.Module, x: Tensor, y: int) -> float:
    """φ_y minus the largest other output."""
    phi = outputs(model, x)[0]
    return float(phi[y] - torch.cat([phi[:y], phi[y + 1 :]]).max())


def point(
    *sizes: int, correct: bool, size: float, act: Callable[[], nn.Module] = nn.ReLU
) -> tuple[Any, Tensor, Tensor]:
    """A network, one input and its label, classified rightly or wrongly by a margin of `size`."""
    model, x = mlp(*sizes, act=act), torch.randn(1, sizes[0]).double()
    top = int(outputs(model, x).argmax())
    model = scale_last_layer(model, size / margin(model, x, top), data=x).model
    y = top if correct else int(outputs(model, x).topk(2).indices[0, 1])
    return model, x, torch.tensor([y])


@pytest.mark.parametrize("sizes", [(3, 6, 2), (3, 5, 5, 2)])
def test_correct_points_become_flat_at_the_rate_of_their_margin(sizes: tuple[int, ...]) -> None:
    """H(T_αθ) → e^{−αΔ} D⁻¹(α²ddᵀ)D⁻¹: α²e^{−αΔ} hidden, e^{−αΔ} last; trace and norms all go to zero."""
    model, x, y = point(*sizes, correct=True, size=0.05)
    network = naive.Flat(model)
    slope = torch.func.grad(lambda v: network.outputs(v, x)[0] @ torch.tensor([1.0, -1.0]).double())(network.point)
    last = torch.zeros_like(slope)
    last[list(blocks(model).values())[-2].start :] = 1
    ratios, sizes_seen = [], []
    for alpha in (100.0, 200.0, 400.0):
        new = scale_last_layer(model, alpha, data=x).model
        found = norms(hessian(new, x, y))
        leading = math.exp(-alpha * 0.05) * float((slope * torch.where(last > 0, 1.0, alpha)).square().sum())
        ratios.append([value / leading for value in found])
        sizes_seen.append(found)
    assert abs(ratios[-1][0] - 1) < 1e-8  # trace: what is left is of order e^{−αΔ}
    assert all(abs(ratio - 1) < 0.5 for ratio in ratios[-1])  # norms: of order 1/α
    for first, second in itertools.pairwise(ratios):
        assert all(abs(b - 1) < abs(a - 1) for a, b in zip(first, second, strict=True))
    assert all(b < 1e-2 * a for a, b in zip(sizes_seen[0], sizes_seen[-1], strict=True))


def test_the_last_block_goes_to_zero_fastest() -> None:
    model, x, y = point(3, 6, 2, correct=True, size=0.05)
    matrix = hessian(scale_last_layer(model, 300.0, data=x).model, x, y)
    base = hessian(model, x, y, alpha=1.0)
    split = 24
    exact = hessian(model, x, y, alpha=300.0)  # reading 1: the Hessian in θ of ℓ(αφ)
    assert torch.allclose(matrix[:split, :split], exact[:split, :split], rtol=1e-9)
    assert torch.allclose(matrix[:split, split:], exact[:split, split:] / 300, rtol=1e-9)
    assert torch.allclose(matrix[split:, split:], exact[split:, split:] / 300**2, rtol=1e-9)
    hidden, last = (
        float(matrix[part, part].norm() / base[part, part].norm()) for part in (slice(split), slice(split, 99))
    )
    assert last < 1e-3 * hidden


def test_misclassified_points_of_one_hidden_layer_keep_their_spectral_norm() -> None:
    """ReLU: the trace goes to zero although ‖H(T_αθ)‖ tends to a constant (mathematics 7.6)."""
    model, x, y = point(3, 6, 3, correct=False, size=0.5)
    found = [norms(hessian(scale_last_layer(model, alpha, data=x).model, x, y)) for alpha in (10.0, 50.0, 100.0)]
    assert found[1][0] < 1e-5 * found[0][0]
    assert found[2][0] < 1e-12
    assert found[2][1] == pytest.approx(found[1][1], rel=1e-6)
    assert found[2][1] > 0.1


def test_misclassified_points_of_deeper_networks_diverge_at_trace_zero() -> None:
    model, x, y = point(3, 6, 6, 3, correct=False, size=0.5)
    found = [norms(hessian(scale_last_layer(model, alpha, data=x).model, x, y)) for alpha in (100.0, 200.0, 400.0)]
    assert all(abs(trace) < 1e-12 * norm for trace, norm, _ in found)
    assert found[1][1] / found[0][1] == pytest.approx(2.0, rel=1e-2)  # ∝ α
    assert found[2][1] / found[1][1] == pytest.approx(2.0, rel=1e-2)
    whole = [norms(hessian(rescale_all(model, alpha, data=x).model, x, y))[1] for alpha in (1e2, 8e2)]
    assert whole[1] / whole[0] == pytest.approx(8 ** (1 - 2 / 3), rel=0.05)  # ∝ α^{1−2/K}


def test_misclassified_points_of_a_tanh_network_have_a_trace_like_alpha() -> None:
    model, x, y = point(3, 6, 3, correct=False, size=0.5, act=nn.Tanh)
    traces = [norms(hessian(scale_last_layer(model, alpha, data=x).model, x, y))[0] for alpha in (100.0, 200.0)]
    assert abs(traces[0]) > 1e-3
    assert traces[1] / traces[0] == pytest.approx(2.0, rel=1e-6)


def test_a_tied_argmax_has_no_limit_zero() -> None:
    model, x, _ = point(3, 6, 3, correct=True, size=0.5)
    with torch.no_grad():
        hidden = model[:2](x)[0]
        phi = outputs(model, x)[0]
        first, second, _ = phi.argsort(descending=True).tolist()
        model[2].bias[second] += phi[first] - phi[second]
        model[2].bias[second] += outputs(model, x)[0, first] - outputs(model, x)[0, second]
    slope = (model[2].weight[first] - model[2].weight[second]).detach()
    active = (hidden > 0).double()
    squared = float((slope * active).square().sum() * (x.square().sum() + 1))  # hidden part of ‖∂(φ_y − φ_j)‖²
    lasts = []
    for alpha in (50.0, 100.0):
        matrix = hessian(scale_last_layer(model, alpha, data=x).model, x, torch.tensor([first]))
        assert float(matrix[:24, :24].trace()) / alpha**2 == pytest.approx(squared / 4, rel=1e-6)
        lasts.append(float(matrix[24:, 24:].trace()))
    assert lasts[0] == pytest.approx(lasts[1], rel=1e-6)
    assert lasts[1] == pytest.approx(0.5 * float(hidden.square().sum() + 1), rel=1e-6)


def test_a_general_scaling_may_diverge_while_the_loss_vanishes() -> None:
    """Last layer ×αβ, first ×1/β, β = e^{αΔ}: outputs αφ, but H grows (mathematics 7.6, against A, Proposition 5.1)."""
    model, x, y = point(3, 6, 3, correct=True, size=1.0)
    losses, sizes = [], []
    for alpha in (2.0, 4.0, 8.0):
        beta = math.exp(alpha)
        result = rescale_layers(model, {"0": 1 / beta, "2": alpha * beta}, data=x, allow_output_scale=True)
        assert result.certificate.scale == pytest.approx(alpha, rel=1e-12)
        losses.append(float(cross_entropy(outputs(result.model, x), y)))
        sizes.append(float(hessian(result.model, x, y).abs().max()))
    assert losses[2] < 1e-2 * losses[0]
    assert sizes[0] < sizes[1] / 5 < sizes[2] / 100


# ---------------------------------------------------------------- theory: radial maps

MAP = RadialMap(torch.randn(4, generator=torch.Generator().manual_seed(0)).double(), delta=2.0, rho=0.4, r_hat=1.1)
RADII = {"center": 0.0, "inner": 0.3, "middle": 1.3, "near the rim": 1.99, "outside": 2.5}


def at(radius: float) -> Tensor:
    direction = torch.randn(4, generator=torch.Generator().manual_seed(1)).double()
    return MAP.center + radius * direction / direction.norm()


@pytest.mark.parametrize("where", RADII)
@pytest.mark.parametrize("mapping", [MAP, MAP.inverted()], ids=["g", "inverse"])
def test_radial_maps_invert_and_know_their_jacobian(where: str, mapping: RadialMap) -> None:
    eta = at(RADII[where])
    assert torch.allclose(mapping.inverse(mapping(eta)), eta, rtol=1e-13, atol=1e-14)
    jacobian = jacfwd(mapping)(eta)
    assert torch.allclose(mapping.jacobian(eta), jacobian, rtol=1e-12, atol=1e-13)
    assert mapping.log_det(eta) == pytest.approx(float(torch.linalg.slogdet(jacobian).logabsdet), abs=1e-12)
    assert torch.allclose(mapping.jacobian(eta) @ mapping.inverted().jacobian(mapping(eta)), torch.eye(4).double())
    if where == "outside":
        assert torch.equal(mapping(eta), eta)


@pytest.mark.parametrize("where", RADII)
def test_the_printed_jacobian_of_the_inverse_holds_for_row_vectors(where: str) -> None:
    """Paper B, section A, as printed: (θ−θ̂)ᵀ(θ−θ̂) is an outer product."""
    theta, (delta, rho, r_hat) = at(RADII[where]), (MAP.delta, MAP.rho, MAP.r_hat)
    moved = theta - MAP.center
    r = float(moved.norm())
    slope = 1.0 if r > delta else rho / r_hat if r <= r_hat else (rho - delta) / (r_hat - delta)
    printed = slope * torch.eye(4).double()
    if r_hat < r <= delta:
        c = delta * (r_hat - rho) / (r_hat - delta)
        printed = printed - c / r**3 * torch.outer(moved, moved) + c / r * torch.eye(4).double()
    assert torch.allclose(MAP.inverted().jacobian(theta), printed, rtol=1e-12, atol=1e-13)


def quartic(theta: Tensor) -> Tensor:
    weights = torch.arange(1.0, 5.0).double()
    return (weights * theta.square()).sum() + 0.3 * (theta**4).sum() + theta[0] * theta[1] * theta[2]


@pytest.mark.parametrize("where", RADII)
def test_the_curvature_in_radial_parameters_is_an_operator(where: str) -> None:
    eta = at(RADII[where])
    theta = MAP(eta)
    inner = torch.func.hessian(quartic)(theta)
    operator = Operator(lambda block: inner @ block, 4, dtype=torch.float64)
    found = MAP.hessian(operator, at=eta, gradient=torch.func.grad(quartic)(theta)).dense()
    expected = torch.func.hessian(lambda e: quartic(MAP(e)))(eta)
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-11)
    if where == "middle":
        with pytest.raises(InputError, match=r"distance 1.3 .* pass gradient="):
            MAP.hessian(operator, at=eta)


def test_two_minima_change_places_in_flatness_and_nothing_changes_outside() -> None:
    def loss(theta: Tensor) -> Tensor:  # minima at ±e₁ with Hessians diag(8, 1) and diag(8, 3)
        return (theta[0] ** 2 - 1) ** 2 + 0.5 * (2 + theta[0].sign()) * theta[1] ** 2

    sharp, flat_one = torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 0.0]).double()
    g = RadialMap(flat_one, delta=0.5, rho=0.05, r_hat=0.2)

    def mapped(eta: Tensor) -> Tensor:
        return loss(g(eta))

    before = [float(torch.func.hessian(loss)(minimum).trace()) for minimum in (sharp, flat_one)]
    after = [float(torch.func.hessian(mapped)(minimum).trace()) for minimum in (sharp, flat_one)]
    assert before[1] < before[0] < after[1]
    assert after[0] == before[0]
    assert after[1] == pytest.approx(before[1] * (0.2 / 0.05) ** 2, rel=1e-14)
    operator = Operator(lambda block: torch.func.hessian(loss)(flat_one) @ block, 2, dtype=torch.float64)
    assert torch.allclose(g.hessian(operator).dense(), torch.func.hessian(mapped)(flat_one))
    for outside in torch.randn(50, 2).double() * 3:
        if float((outside - flat_one).norm()) > 0.5:
            assert torch.equal(mapped(outside), loss(outside))


def test_a_radial_model_has_the_old_names_and_the_new_curvature() -> None:
    model, x = mlp(3, 4, 2), torch.randn(6, 3).double()
    y = outputs(model, x)
    result = radial(model, delta=1.0, rho=0.1, r_hat=0.4)
    assert [name for name, _ in result.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert apart(hessian(result.model, x, y), 16 * hessian(model, x, y)) < 1e-12  # a minimum: the loss is zero
    assert apart(outputs(copy.deepcopy(result.model), x), y) == 0.0
    far = flat(model) + 10
    assert torch.equal(naive.Flat(result.model).outputs(far, x), naive.Flat(model).outputs(far, x))
    middle = radial(model, delta=1.0, rho=0.1, r_hat=0.4, center=flat(model) + 0.6 / math.sqrt(26))
    assert middle.certificate.factors is None
    assert middle.certificate.relative_difference < 1e-14
    assert radial(model, delta=1.0, rho=0.1, r_hat=0.4, center=far).certificate.factors["0.weight"] == 1.0


def test_only_linear_maps_predict_what_becomes_of_the_parameters() -> None:
    """At the center a radial map leaves the parameters as they are and changes the curvature by T all the same."""
    model = mlp(3, 4, 2)
    inside = radial(model, delta=1.0, rho=0.1, r_hat=0.4)
    near = radial(model, delta=1.0, rho=0.1, r_hat=0.4, center=flat(model) + 0.3 / math.sqrt(26))
    for result in (inside, near):
        assert {float(factor) for factor in (result.certificate.factors or {}).values()} == {0.25}
        assert not result.linear
        assert not torch.allclose(flat(result.model), 0.25 * flat(model))
    outside = radial(model, delta=1.0, rho=0.1, r_hat=0.4, center=flat(model) + 10)
    scaled = rescale_layers(model, {"0": 2.0, "2": 0.5})
    mapped = input_map(model, torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3))
    for result in (outside, scaled, mapped, scale_last_layer(model, 3.0)):
        assert result.linear
        factors = result.certificate.factors
        assert factors is not None
        after = dict(result.model.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.allclose(after[name], torch.as_tensor(factors[name]).double() * parameter)


class Named(nn.Module):
    """Children with names that a wrapper might take for its own attributes."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x


def test_a_radial_model_takes_no_name_from_the_model() -> None:
    names = ("inner", "mapping", "names", "_inner", "model", "center", "weights")
    model, x = Named(*names).double(), torch.randn(6, 3).double()
    result = radial(model, delta=1.0, rho=0.1, r_hat=0.4, data=x).model
    for model_now in (result, copy.deepcopy(result)):
        assert apart(outputs(model_now, x), outputs(model, x)) == 0.0
        assert all(isinstance(model_now.get_submodule(name), nn.Linear) for name in names)
    assert list(result.state_dict()) == list(model.state_dict())
