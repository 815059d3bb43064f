"""Never called exact: degrees that travel through memory, and branches that only some of the samples take."""

from __future__ import annotations

from collections.abc import Callable

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import spiritlevel as sl
from spiritlevel import measures
from spiritlevel.binding.problem import Problem
from spiritlevel.watching.structure import analyse

# ---------------------------------------------------------------- writes into memory


class Net(nn.Module):
    """A layer, what happens to its values by `between`, and a layer that reads them."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.kernel, self.last = nn.Linear(8, 8), nn.Conv1d(2, 2, 3), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)).flatten(1))


def _circular(net: nn.Module, x: Tensor, times: int = 1) -> Tensor:
    x = x.view(-1, 2, 4)
    for _ in range(times):
        x = net.kernel(F.pad(x, (1, 1), mode="circular"))  # type: ignore[operator]
    return x


def _into_slice(net: nn.Module, x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    result[:, :4].copy_(x[:, :4] * x[:, 4:])
    result[:, 4:].copy_(x[:, 4:])
    return result


def _by_data_attribute(net: nn.Module, x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result.data[:, :4] = torch.tanh(x.data[:, :4])
    return result + x


def _bits(net: nn.Module, x: Tensor) -> Tensor:
    kind = torch.int64 if x.dtype == torch.float64 else torch.int32
    return (x * x).view(kind).view(x.dtype) + 0 * x


def _multiplied(net: nn.Module, x: Tensor) -> Tensor:
    return torch.ones_like(x).scatter_(1, torch.arange(8).expand_as(x) // 2, x, reduce="multiply")


CURVED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a circular convolution used three times": lambda net, x: _circular(net, x, 3),
    "tanh before circular padding": lambda net, x: F.relu(_circular(net, torch.tanh(x))),
    "pad_sequence of tanh rows": lambda net, x: pad_sequence(list(torch.tanh(x)), batch_first=True),
    "a product copied into a slice": _into_slice,
    "index_put_ of tanh rows": lambda net, x: torch.zeros_like(x).index_put_((torch.arange(len(x)),), torch.tanh(x)),
    "addcmul_ on a view": lambda net, x: torch.ones_like(x).view(-1).addcmul_(x.view(-1), x.view(-1)).view_as(x),
    "stack with out=": lambda net, x: torch.stack([torch.tanh(x), x], 1).sum(1),
}


@pytest.mark.parametrize("name", CURVED)
def test_values_that_are_written_somewhere_carry_their_degrees(name: str) -> None:
    torch.manual_seed(0)
    net, x, y = Net(CURVED[name]).double(), torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 3
    problem = Problem(net)
    with problem.active():
        assert not analyse(problem, x, 6).exact
    with pytest.raises(sl.NotExactError):
        sl.sample_traces(net, (x, y), method="exact")
    estimate = sl.trace(net, (x, y), probes=200)
    truth = float(naive.mean_hessian(net, x, y).trace())
    assert abs(estimate.value - truth) <= 5 * estimate.stderr + 1e-9


@pytest.mark.parametrize(
    "between",
    [_by_data_attribute, _bits, _multiplied],
    ids=["written through .data", "bits read as integers", "scatter that multiplies"],
)
def test_what_autograd_does_not_see_is_never_exact(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net, x = Net(between).double(), torch.randn(4, 8, dtype=torch.float64)
    problem = Problem(net)
    with problem.active():
        assert not analyse(problem, x, 4).exact


FLAT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "circular padding": lambda net, x: F.relu(_circular(net, x)),
    "pad_sequence": lambda net, x: pad_sequence(list(F.relu(x)), batch_first=True),
    "copied into slices": lambda net, x: torch.cat([x[:, :4], torch.empty_like(x[:, 4:]).copy_(x[:, 4:])], 1),
    "added in place": lambda net, x: x.clone().add_(1).mul_(2).relu_(),
}


@pytest.mark.parametrize("name", FLAT)
def test_copies_of_linear_values_stay_exact(name: str) -> None:
    torch.manual_seed(0)
    net, x, y = Net(FLAT[name]).double(), torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 3
    traces = sl.sample_traces(net, (x, y), method="exact")
    torch.testing.assert_close(traces.values, naive.per_sample_traces(net, x, y), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- branches that the numbers choose


class Experts(nn.Module):
    """Sends every sample to one of two experts, in the usual way, and skips an expert that nobody goes to."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(4, len(functions)), nn.Linear(5, 3)
        self.experts, self.functions = nn.ModuleList(nn.Linear(4, 5) for _ in functions), functions

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = self.gate(x).argmax(1), x.new_zeros(len(x), 5)
        for index, (expert, function) in enumerate(zip(self.experts, self.functions, strict=True)):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.shape[0] == 0:
                continue
            result[rows] = function(expert(x[rows]))
        return self.last(result)


def _dense_trace(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """By reverse mode twice, sample by sample: what `vmap` cannot do where numbers decide shapes."""
    names = [name for name, _ in net.named_parameters()]
    point = tuple(parameter.detach() for parameter in net.parameters())

    def loss(*params: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, dict(zip(names, params, strict=True)), (x,)), y)

    blocks = torch.autograd.functional.hessian(loss, point)
    return sum(float(blocks[i][i].reshape(p.numel(), p.numel()).trace()) for i, p in enumerate(point))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_rare_curved_expert_is_noticed(batch_size: int | None) -> None:
    """Exactness was decided on two samples: in a quarter of such data sets none of them goes to the tanh expert."""
    claimed = 0
    for seed in range(15):
        torch.manual_seed(seed)
        net, x, y = Experts(torch.relu, torch.tanh).double(), torch.randn(10, 4).double(), torch.arange(10) % 3
        traces = sl.sample_traces(net, (x, y), probes=2, batch_size=batch_size)
        if traces.exact:
            claimed += 1
            assert float(traces.mean().value) == pytest.approx(_dense_trace(net, x, y), rel=1e-9)
    assert claimed < 4  # those in which nobody goes there


@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_experts_without_curvature_are_exact(seed: int, batch_size: int | None) -> None:
    torch.manual_seed(seed)
    net, x, y = Experts(torch.relu, torch.relu).double(), torch.randn(12, 4).double(), torch.arange(12) % 3
    traces = sl.sample_traces(net, (x, y), batch_size=batch_size)
    assert traces.exact
    assert float(traces.mean().value) == pytest.approx(_dense_trace(net, x, y), rel=1e-9)


class Sorts(nn.Module):
    """Works on its samples in an order that their numbers decide, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        hidden = torch.relu(self.first(x[order]))
        return self.last(hidden[order.argsort()])


def test_rows_in_an_order_of_the_data_are_found_again_in_every_batch() -> None:
    """The first batch is in order already, so that what is learnt there does not hold for the second."""
    torch.manual_seed(0)
    net, x, y = Sorts().double(), torch.randn(16, 4).double(), torch.arange(16) % 3
    x[:8] = x[:8][x[:8, 0].argsort()]
    traces = sl.sample_traces(net, (x, y), batch_size=8)
    assert traces.exact
    for start in (0, 8):
        part = slice(start, start + 8)
        torch.testing.assert_close(
            traces.values[part], naive.per_sample_traces(net, x[part], y[part]), rtol=1e-9, atol=1e-12
        )


def test_measures_look_at_all_samples_before_they_call_a_network_flat() -> None:
    """The tanh expert is met by the last samples only."""
    torch.manual_seed(0)
    net = Experts(torch.relu, torch.tanh).double()
    x = torch.randn(200, 4).double()
    x = torch.cat([x[net.gate(x).argmax(1) == 0][:40], x[net.gate(x).argmax(1) == 1][:2]])
    setting = measures.Setting(net, (x, torch.arange(len(x)) % 3))
    assert not setting.structure.exact
