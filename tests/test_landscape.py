"""Loss surfaces: grid values against losses computed one by one, parabolas against dense derivatives."""

from __future__ import annotations

import copy
import math
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn

from spiritlevel.answers.directions import _filter_normalised
from spiritlevel.answers.surface import landscape
from spiritlevel.binding.problem import Problem
from spiritlevel.binding.state import _load_forward_mode
from spiritlevel.errors import InputError
from spiritlevel.results import Landscape, Result

_load_forward_mode()  # torch warns where its forward derivatives are first used


def network(seed: int = 0, batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(5)] if batch_norm else []
    net = nn.Sequential(nn.Linear(4, 5), *norm, nn.Tanh(), nn.Linear(5, 3)).double()
    if batch_norm:
        net[1].running_mean.uniform_(-1, 1)
        net[1].running_var.uniform_(0.5, 2)
    return net


def some_data(samples: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 4, generator=generator).double(), torch.randint(0, 3, (samples,), generator=generator)


def measured(net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        outputs = copy.deepcopy(net).eval()(inputs)
    return float(naive.cross_entropy(outputs, targets).mean()), float((outputs.argmax(1) == targets).double().mean())


def moved(net: nn.Module, vector: Tensor) -> nn.Module:
    other = copy.deepcopy(net)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()) + vector, other.parameters())
    return other


def test_a_line_along_the_top_eigenvector() -> None:
    net, data = network(), some_data()
    values, vectors = torch.linalg.eigh(naive.mean_hessian(net, *data))
    line = landscape(net, data, points=9)
    top = vectors[:, -1] * vectors[:, -1][vectors[:, -1].abs().argmax()].sign()
    assert line.directions == ("eigenvector 1",)
    assert float(line.steps[0][-1]) == pytest.approx(math.sqrt(2 / float(values[-1])))
    for step, loss, accuracy in zip(line.steps[0], line.losses, line.accuracies, strict=True):  # type: ignore[arg-type]
        assert (float(loss), float(accuracy)) == pytest.approx(measured(moved(net, step * top), *data), rel=1e-9)
    assert line.value == pytest.approx(measured(net, *data)[0], rel=1e-12)
    assert float(line.curvatures) == pytest.approx(float(values[-1]), rel=1e-8)
    assert float(line.slopes) == pytest.approx(float(naive.gradient(net, *data) @ top), rel=1e-8)
    assert float(line.lengths) == pytest.approx(1)
    assert line.barrier is None
    assert line.samples == 20


def test_the_parabola_touches_the_loss() -> None:
    """The error of the parabola is of third order in the step."""
    net, data = network(), some_data()
    errors = [
        float((near.losses - near.quadratic).abs().max())
        for near in (landscape(net, data, points=5, radius=radius) for radius in (0.02, 0.01))
    ]
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.1)


def test_a_plane_of_eigenvectors() -> None:
    net, data = network(), some_data()
    hessian = naive.mean_hessian(net, *data)
    plane = landscape(net, data, dimensions=2, points=5, radius=1e-3)
    assert plane.losses.shape == (5, 5)
    assert plane.directions == ("eigenvector 1", "eigenvector 2")
    values = torch.linalg.eigvalsh(hessian).flip(0)[:2]
    assert torch.allclose(plane.curvatures, torch.diag(values), rtol=1e-8, atol=1e-8)
    assert torch.allclose(plane.losses, plane.quadratic, rtol=0, atol=1e-8)
    line = landscape(net, data, points=5, radius=1e-3)
    assert torch.allclose(plane.losses[:, 2], line.losses, rtol=1e-12)


def test_random_directions_are_filter_normalised_and_gaussian() -> None:
    net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 400, 2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
    move = _filter_normalised(Problem(net), torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if parameter.ndim == 1:
            assert not move[name].any()
        else:
            assert torch.allclose(move[name].flatten(1).norm(dim=1), parameter.flatten(1).norm(dim=1), rtol=1e-5)
    draws = move["4.weight"] / move["4.weight"].norm(dim=1, keepdim=True) * 20
    assert abs(float(draws.pow(4).mean()) - 3) < 0.5  # of a uniform distribution it would be 1.8


def test_random_directions_see_through_rescaling() -> None:
    net, (inputs, targets) = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double(), some_data()
    scaled = copy.deepcopy(net)
    with torch.no_grad():
        scaled[0].weight.mul_(10)
        scaled[0].bias.mul_(10)
        scaled[2].weight.div_(10)
    first, second = (landscape(model, (inputs, targets), directions="random", points=5) for model in (net, scaled))
    assert torch.allclose(first.losses, second.losses, rtol=1e-9)
    other = landscape(net, (inputs, targets), directions="random", points=5, seed=1)
    assert not torch.allclose(first.losses, other.losses)
    plane = landscape(net, (inputs, targets), directions="random", dimensions=2, points=3)
    assert float(plane.curvatures[0, 1]) != 0
    assert torch.equal(plane.losses[1, 1], first.losses[2])


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_path_to_another_model(batch_norm: bool) -> None:
    here, there, data = network(0, batch_norm), network(1, batch_norm), some_data()
    path = landscape(here, data, directions=there, points=11, radius=0.25)
    steps = path.steps[0]
    assert len(steps) == 15
    assert {0.0, 1.0} <= set(steps.tolist())
    inside = (steps >= 0) & (steps <= 1)
    first, last = measured(here, *data)[0], measured(there, *data)[0]
    losses = path.losses[inside]
    assert float(losses[0]) == pytest.approx(first, rel=1e-12)
    assert float(losses[-1]) == pytest.approx(last, rel=1e-12)
    line = first + steps[inside] * (last - first)
    assert path.barrier == pytest.approx(float((losses - line).max()), abs=1e-12)
    h = 1e-3
    around = [float(value) for value in _values(here, there, data, (-h, 0.0, h))]
    assert float(path.slopes) == pytest.approx((around[2] - around[0]) / (2 * h), rel=1e-4)
    assert float(path.curvatures) == pytest.approx((around[2] - 2 * around[1] + around[0]) / h**2, rel=1e-4)


def test_a_path_moves_the_running_statistics_of_instance_norm_too() -> None:
    def normed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        net = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), norm, nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
        net.double()(torch.randn(50, 4, dtype=torch.float64))  # statistics of its own
        return net.eval()

    here, there, data = normed(0), normed(1), some_data()
    path = landscape(here, data, directions=there, points=3)
    h = 1e-3
    around = [float(value) for value in _values(here, there, data, (-h, 0.0, h))]
    assert path.value == pytest.approx(around[1], rel=1e-12)
    assert float(path.slopes) == pytest.approx((around[2] - around[0]) / (2 * h), rel=1e-4)
    assert float(path.curvatures) == pytest.approx((around[2] - 2 * around[1] + around[0]) / h**2, rel=1e-4)


class Masked(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -math.inf, dtype=torch.float64), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.softmax(x[:, :, None] + self.mask, 2).sum(1) + x)


def test_a_mask_stays_where_it_is_on_a_path() -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.arange(9) % 3
    path = landscape(Masked(0), data, directions=Masked(1), points=5)
    assert path.losses.isfinite().all()
    assert path.losses[-1] == pytest.approx(landscape(Masked(1), data, directions=Masked(0), points=5).losses[0])


def test_a_variance_does_not_fall_below_zero_beyond_a_path() -> None:
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    nets = [nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)) for _ in range(2)]
    nets[1][1].running_var.fill_(5.0)
    path = landscape(nets[0], data, directions=nets[1], points=5, radius=1.0)
    assert path.losses.isfinite().all()


def test_a_path_to_a_wrapped_model() -> None:
    here, there, data = network(0), network(1), some_data()
    wanted = landscape(here, data, directions=there, points=3).losses
    assert torch.equal(landscape(nn.DataParallel(here), data, directions=there, points=3).losses, wanted)
    assert torch.equal(landscape(here, data, directions=nn.DataParallel(there), points=3).losses, wanted)


def _values(here: nn.Module, there: nn.Module, data: Any, steps: tuple[float, ...]) -> list[float]:
    """The loss at mixtures of all parameters and running statistics."""
    result = []
    for step in steps:
        mixed = copy.deepcopy(here)
        state = {
            name: tensor + step * (there.state_dict()[name] - tensor) if tensor.is_floating_point() else tensor
            for name, tensor in here.state_dict().items()
        }
        mixed.load_state_dict(state)
        result.append(measured(mixed, *data)[0])
    return result


def test_the_plane_of_three_models() -> None:
    models, data = [network(seed) for seed in range(3)], some_data()
    plane = landscape(models[0], data, directions=models[1:], points=3)
    corners = [float(plane.losses[i, j]) for i, j in ((0, 0), (2, 0), (0, 2))]
    assert corners == pytest.approx([measured(model, *data)[0] for model in models], rel=1e-12)
    assert plane.directions == ("to model 1", "to model 2")
    assert plane.barrier is None


def test_a_convex_loss_has_no_barrier() -> None:
    torch.manual_seed(0)
    first, second = (nn.Linear(4, 3).double() for _ in range(2))
    path = landscape(first, some_data(), directions=second)
    assert path.barrier == pytest.approx(0, abs=1e-12)
    assert len(path.steps[0]) == 41


def test_batches_weigh_by_their_size_and_statistics_can_be_theirs() -> None:
    net, (inputs, targets) = network(batch_norm=True), some_data(7)
    batches = list(zip(inputs.split([3, 4]), targets.split([3, 4]), strict=True))
    whole = landscape(net, (inputs, targets), directions="random", points=3)
    assert torch.allclose(landscape(net, batches, directions="random", points=3).losses, whole.losses, rtol=1e-12)
    batch = landscape(net, batches, points=3, radius=0.1, batch_norm="batch")
    expected = sum(len(y) / 7 * naive.mean_hessian(net, x, y, batch_norm="batch") for x, y in batches)
    top = torch.linalg.eigvalsh(expected)[-1]  # type: ignore[arg-type]
    assert float(batch.curvatures) == pytest.approx(float(top), rel=1e-8)


def test_accuracy_where_there_is_one() -> None:
    net, (inputs, targets) = nn.Linear(4, 1).double(), some_data()
    binary = landscape(net, (inputs, targets % 2), loss="binary_cross_entropy", points=3)
    expected = ((net(inputs)[:, 0] > 0) == (targets % 2 == 1)).double().mean()
    assert float(binary.accuracies[1]) == pytest.approx(float(expected))  # type: ignore[index]
    regression = landscape(net, (inputs, torch.randn(20, 1).double()), loss="squared_error", points=3)
    assert regression.accuracies is None


def test_far_away_the_loss_may_be_infinite() -> None:
    net, data = network().float(), (some_data()[0].float(), some_data()[1])
    line = landscape(net, data, loss="exponential", directions="random", points=3, radius=1e30)
    assert not torch.isfinite(line.losses).all()
    assert math.isfinite(line.value)
    assert str(Result.from_json(line.to_json())) == str(line)


def test_it_prints_itself_and_survives_json() -> None:
    net, data = network(), some_data()
    path = landscape(net, data, directions=network(1), points=3)
    again = Landscape.from_json(path.to_json())
    assert torch.equal(again.quadratic, path.quadratic)
    assert (again.directions, again.barrier, again.notes) == (path.directions, path.barrier, path.notes)
    assert str(path).startswith("loss on 3 points along to the other model (curvature ")
    assert f"barrier {path.barrier:.4g}" in str(path)
    assert "loss on 3 x 3 points along random 1" in str(
        landscape(net, data, directions="random", dimensions=2, points=3)
    )


@pytest.mark.parametrize("batch_norm", ["eval", "batch"])
def test_nothing_is_touched(batch_norm: str, untouched: Any) -> None:
    net, other = network(0, True).train(), network(1, True).train()
    with untouched(net, other):
        for directions in ("eigenvectors", "random", other):
            landscape(net, some_data(), directions=directions, points=3, batch_norm=batch_norm)


def test_bad_input_in_one_sentence() -> None:
    net, data = network(), some_data()
    with pytest.raises(InputError, match="unknown kind of directions 'eigenvector': did you mean 'eigenvectors'"):
        landscape(net, data, directions="eigenvector")
    with pytest.raises(InputError, match="directions must be 'eigenvectors', 'random', a model or two models, got 3"):
        landscape(net, data, directions=3)
    with pytest.raises(InputError, match="one or two directions, got 3 models"):
        landscape(net, data, directions=[net, net, net])
    with pytest.raises(InputError, match="dimensions=1 or 2, got 3"):
        landscape(net, data, dimensions=3)
    with pytest.raises(InputError, match=r"needs an odd whole number of points, at least 3, .*, got 4"):
        landscape(net, data, points=4)
    for points in (3.0, "5"):
        with pytest.raises(InputError, match=rf"points must be a whole number, got {points!r}"):
            landscape(net, data, points=points)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs a whole number of points, at least 3, got 2"):
        landscape(net, data, directions=network(1), points=2)
    with pytest.raises(InputError, match=r"dimensions must be a whole number, got 2\.0"):
        landscape(net, data, dimensions=2.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"needs a positive radius, got -1\.0"):
        landscape(net, data, radius=-1.0)
    with pytest.raises(InputError, match="params= does not go with a path to another model"):
        landscape(net, data, directions=network(1), params="0")
    with pytest.raises(InputError, match="the other model has the same parameters"):
        landscape(net, data, directions=copy.deepcopy(net))
    with pytest.raises(InputError, match=r"same architecture, but '0.weight' is \(5, 4\) here and \(6, 4\) there"):
        landscape(net, data, directions=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    with pytest.raises(InputError, match=r"same architecture, but '2.weight' is \(3, 5\) here and absent there"):
        landscape(net, data, directions=network(0, True))
    with pytest.raises(InputError, match="random directions move only weights with filters"):
        landscape(net, data, directions="random", params="*.bias")
    with pytest.raises(InputError, match="a landscape of 2 eigenvectors needs as many parameters, got 1"):
        landscape(nn.Linear(1, 1, bias=False), (torch.ones(1, 1), torch.ones(1, 1)), loss="squared_error", dimensions=2)
