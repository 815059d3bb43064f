"""Convolutions in tiles against the library's in float64, and traces by them against those of a float64 model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_networks import with_statistics
from torch import Tensor, nn
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel.watching import tiles
from spiritlevel.watching.tiles import Kernels, Misfit, Tiles, fits


def _library(cotangents: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the input and squared norms (N, passes), one image after the other in float64."""
    back, norms = torch.empty(len(cotangents), *input.shape, dtype=torch.float64), []
    for n in range(len(input)):
        for k in range(len(cotangents)):
            x, w = (t.double().requires_grad_() for t in (input[n : n + 1], weight))
            found = torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), cotangents[k, n : n + 1].double())
            back[k, n] = found[0][0]
            norms.append(found[1].square().sum())
    return back, torch.stack(norms).view(len(input), len(cotangents))


@pytest.mark.parametrize(
    ("passes", "count", "channels", "size"),
    [(1, 1, (64, 64), (4, 4)), (3, 2, (64, 128), (8, 4)), (2, 5, (128, 64), (4, 12)), (9, 1, (64, 64), (16, 16))],
)
@pytest.mark.parametrize("near", [1, tiles._NEAR])
def test_tiles_give_what_the_library_gives(
    passes: int,
    count: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    near: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "_NEAR", near)  # chunks of one image, of some passes, or of several samples
    torch.manual_seed(0)
    input, weight = torch.randn(count, channels[0], *size).relu(), torch.randn(*reversed(channels), 3, 3)
    cotangents = torch.randn(passes, count, *size, channels[1]).permute(0, 1, 4, 2, 3)
    assert fits(input, weight, (1, 1), (1, 1), 1)
    found, norms = Tiles("weight", input, weight, Kernels()).through(cotangents, True, True)
    wanted, squares = _library(cotangents, input, weight)
    assert found is not None
    assert norms is not None
    assert float((found - wanted).norm() / wanted.norm()) < 5e-6
    torch.testing.assert_close(norms, squares, rtol=2e-5, atol=0)


@pytest.mark.parametrize("channels", [64, 128])
def test_cotangents_that_nobody_else_holds_are_overwritten(channels: int) -> None:
    torch.manual_seed(0)
    input, weight = torch.randn(3, channels, 8, 8), torch.randn(64, channels, 3, 3)
    cotangents = torch.randn(2, 3, 8, 8, 64).permute(0, 1, 4, 2, 3)
    wanted, squares = _library(cotangents, input, weight)
    found, norms = Tiles("weight", input, weight, Kernels()).through(cotangents, True, True, True)
    assert found is not None
    assert norms is not None
    assert (found.data_ptr() == cotangents.data_ptr()) == (channels == 64)  # if they have its shape
    assert float((found - wanted).norm() / wanted.norm()) < 5e-6
    torch.testing.assert_close(norms, squares, rtol=2e-5, atol=0)


def test_only_convolutions_of_the_form_meant_are_taken() -> None:
    input, weight = torch.zeros(2, 64, 8, 8), torch.zeros(64, 64, 3, 3)
    assert fits(input, weight, (1, 1), (1, 1), 1)
    assert not fits(input, weight, (2, 2), (1, 1), 1)
    assert not fits(input, weight, (1, 1), (2, 2), 1)
    assert not fits(input, torch.zeros(64, 32, 3, 3), (1, 1), (1, 1), 2)
    assert not fits(input, torch.zeros(64, 64, 5, 5), (1, 1), (1, 1), 1)
    assert not fits(input[:, :, :7], weight, (1, 1), (1, 1), 1)
    assert not fits(input.double(), weight.double(), (1, 1), (1, 1), 1)
    assert not fits(torch.zeros(2, 3, 8, 8), torch.zeros(64, 3, 3, 3), (1, 1), (1, 1), 1)


def test_a_first_image_that_differs_is_a_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    input, weight, cotangents = torch.randn(2, 64, 4, 4), torch.randn(64, 64, 3, 3), torch.randn(2, 2, 64, 4, 4)
    for name, wrong in (("PLACES", tiles.PLACES * 1.01), ("GRADIENTS", tiles.GRADIENTS * 1.01)):
        with monkeypatch.context() as patch:
            patch.setattr(tiles, name, wrong)
            with pytest.raises(Misfit):
                Tiles("weight", input, weight, Kernels()).through(cotangents, True, True)


class Net(nn.Module):
    """Convolutions in tiles with and without a bias, one with strides, a first one that is neither, and a shortcut."""

    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.body = nn.Sequential(
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace),
            nn.Conv2d(64, 64, 3, padding=1),
        )
        self.down, self.shortcut = nn.Conv2d(64, 96, 3, 2, 1), nn.Conv2d(64, 96, 1, 2)
        self.last, self.head = nn.Conv2d(96, 64, 3, padding=1), nn.Linear(64, 4)
        with_statistics(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(x + self.body(x))
        x = F.relu(self.last(F.relu(self.down(x) + self.shortcut(x))))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    through = Tiles.through

    def counted(self: Tiles, *args: Any) -> Any:
        calls.append(self.name)
        return through(self, *args)

    monkeypatch.setattr(Tiles, "through", counted)
    return calls


@pytest.mark.parametrize("inplace", [False, True])
def test_traces_in_tiles_are_those_of_a_float64_model(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net(inplace=inplace).eval()
    inputs, targets = torch.randn(6, 3, 16, 16), torch.arange(6) % 4
    calls = _counted(monkeypatch)
    found = sl.sample_traces(model, (inputs, targets), per_layer=True, batch_size=4)
    assert set(calls) == {"body.0.weight", "body.3.weight", "last.weight"}
    calls.clear()
    wanted = sl.sample_traces(model.double(), (inputs.double(), targets), per_layer=True)
    assert not calls
    assert found.exact
    torch.testing.assert_close(found.values, wanted.values, rtol=2e-5, atol=0)
    for name, values in wanted.layers.items():
        torch.testing.assert_close(found.layers[name], values, rtol=5e-5, atol=0, msg=name)


def test_tiles_keep_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = Net().eval(), (torch.randn(4, 3, 16, 16), torch.arange(4))
    calls = _counted(monkeypatch)
    whole = sl.sample_traces(model, data, batch_size=2)
    many = len(calls)
    calls.clear()
    tight = sl.sample_traces(model, data, batch_size=2, memory="12MB")  # an eighth holds two kernels of three
    assert 0 < len(calls) < many
    torch.testing.assert_close(tight.values, whole.values, rtol=2e-5, atol=0)


def test_tiles_that_do_not_fit_leave_the_passes_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = Net().eval(), (torch.randn(3, 3, 16, 16), torch.arange(3))
    wanted = sl.sample_traces(model, data)
    monkeypatch.setattr(tiles, "PLACES", tiles.PLACES * 1.01)
    calls = _counted(monkeypatch)
    found = sl.sample_traces(model, data)
    assert len(calls) == 1  # and never again
    torch.testing.assert_close(found.values, wanted.values, rtol=2e-5, atol=0)
