"""Losses and models that tie the samples of a batch together: found out, refused, or measured with fixed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import spiritlevel as sl
from spiritlevel.binding import coupling
from spiritlevel.binding.context import Context
from spiritlevel.binding.coupling import check_independence
from spiritlevel.binding.losses import CallableLoss
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.measures import Setting
from spiritlevel.results import mean_skewness, signed_limits, standard_error

N = 12


def net(*, tanh: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh() if tanh else nn.ReLU(), nn.Linear(5, 3)).double()


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 4, generator=generator, dtype=torch.float64), torch.arange(N) % 3


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """As in CLIP, each sample beside the others of its batch."""
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(2 * z @ z.roll(1, 1).T, torch.arange(len(z)), reduction="none")


def by_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mild form: divided by something of the whole batch, as by its tokens."""
    weights = 1.0 + targets
    return weights * F.cross_entropy(outputs, targets, reduction="none") / weights.sum()


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - outputs.mean(0)).square().sum(1)


COUPLED = [contrastive, by_the_batch, centred]


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none", weight=torch.tensor([1.0, 2.0, 3.0]).to(outputs))


def mean_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def squeezing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Makes a batch of one special, as people's losses do."""
    return (outputs.squeeze() - F.one_hot(targets, 3).squeeze()).square().sum(-1)


SEPARATE = [per_sample, weighted, mean_of_all, squeezing]


def dense(model: nn.Module, loss: Callable[..., Tensor], size: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """∇² of the mean over batches of each batch's mean loss, weighted by its size."""
    own = dict(model.named_parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in own.values()])

    def mean(vector: Tensor) -> Tensor:
        parts = zip(own, vector.split([p.numel() for p in own.values()]), strict=True)
        params = {name: part.reshape(own[name].shape) for name, part in parts}
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(targets), size):
            outputs = torch.func.functional_call(model, params, (inputs[start : start + size],))
            value = loss(outputs, targets[start : start + size])
            total = total + (value.sum() if value.ndim else value * len(outputs))
        return total / len(targets)

    return torch.autograd.functional.hessian(mean, flat)


def compared(model: nn.Module, data: Any, **options: Any) -> Any:
    return sl.compare(model, net(tanh=False), data, audit=False, measures=["trace"], **options)


ALL: dict[str, Callable[..., Any]] = {
    "sample_traces": sl.sample_traces,
    "hutchinson": functools.partial(sl.sample_traces, method="hutchinson"),
    "trace": sl.trace,
    "margins": sl.margins,
    "input_curvature": sl.input_curvature,
    "hessian": sl.hessian,
    "gauss_newton": sl.gauss_newton,
    "empirical_fisher": sl.empirical_fisher,
    "hessian_variance": functools.partial(sl.hessian_variance, batch_size=4),
    "measure": functools.partial(sl.measure, measures=["trace"], parts=[]),
    "audit": functools.partial(sl.audit, measures=["trace"], transforms=["permute_units"]),
    "compare": compared,
    "landscape": functools.partial(sl.landscape, points=3),
    "Tracker": sl.Tracker,
}


@pytest.mark.parametrize("name", ALL)
def test_a_coupled_loss_is_refused_everywhere(name: str, untouched: Untouched) -> None:
    model = net()
    message = r"the loss contrastive of a sample depends on the other samples .*\(\S+ in its batch of \d+, .* alone\)"
    with untouched(model), pytest.raises(InputError, match=message) as caught:
        ALL[name](model, points(), loss=contrastive)
    assert "batches='fixed'" in str(caught.value)
    assert "\n" not in str(caught.value)


def mean_over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """As training scripts have it: one number, divided by the tokens of the batch."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)


def share_of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same as one number a sequence."""
    each = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none").sum(1)
    return each * len(targets) / (targets != -100).sum()


@pytest.mark.parametrize("name", ["sample_traces", "trace", "hessian", "measure", "compare", "Tracker"])
@pytest.mark.parametrize("loss", [mean_over_tokens, share_of_tokens])
def test_a_loss_divided_by_the_tokens_of_a_batch_is_refused(name: str, loss: Callable[..., Tensor]) -> None:
    """Only the last sequence is shorter: the first few samples say nothing of it."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    tokens = torch.randint(5, (N, 4), generator=torch.Generator().manual_seed(2))
    targets = tokens.roll(-1, 1)
    function = ALL[name] if name != "compare" else lambda model, data, loss: sl.compare(model, model, data, loss=loss)
    if loss is mean_over_tokens:
        sl.hessian(model, (tokens, targets), loss=loss)  # all of one length: a mean over samples
    targets[-1, 1:] = -100
    message = r"not the mean over them \(.*batches='fixed'|depends on the other samples .*batches='fixed'"
    with pytest.raises(InputError, match=message):
        function(model, (tokens, targets), loss=loss)


@pytest.mark.parametrize("loss", COUPLED)
@pytest.mark.parametrize("size", [2, 5])
def test_every_kind_of_coupling_shows(loss: Callable[..., Tensor], size: int) -> None:
    for function in (sl.trace, sl.hessian):
        with pytest.raises(InputError, match="depends on the other samples of its batch"):
            function(net(), DataLoader(TensorDataset(*points()), batch_size=size), loss=loss)
        with pytest.raises(InputError, match=r"one number for \d+ samples, not the mean over them.*batches='fixed'"):
            function(net(), points(), loss=lambda outputs, targets: loss(outputs, targets).mean())


@pytest.mark.parametrize("loss", SEPARATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_losses_are_not_taken_for_coupled(loss: Any, dtype: torch.dtype) -> None:
    model, (inputs, targets) = net().to(dtype), points()
    data = DataLoader(TensorDataset(inputs.to(dtype), targets), batch_size=5)
    found = sl.hessian(model, data, loss=loss).dense()
    wanted = dense(net(), loss, 1, inputs, targets)
    scale = max(float(wanted.abs().max()), 1e-6)
    assert float((found.double() - wanted).abs().max()) < (1e-12 if dtype == torch.float64 else 1e-5) * scale
    assert len(sl.sample_traces(model, data, loss=loss, probes=2)) == N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [0.0, 8.0, 17.0, 40.0, 90.0])
def test_losses_below_the_rounding_of_their_logits_are_not_taken_for_coupled(margin: float, dtype: torch.dtype) -> None:
    outputs, targets = torch.randn(257, 3, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(257) % 3
    outputs += margin * F.one_hot(targets, 3)
    assert CallableLoss(per_sample).couples(outputs, targets) == ""
    CallableLoss(mean_of_all).check(outputs, targets)
    assert "in its batch of 257" in CallableLoss(contrastive).couples(outputs, targets)


def test_a_loss_that_returns_the_mean_is_taken_apart() -> None:
    for batches in (points(), DataLoader(TensorDataset(*points()), batch_size=5)):
        found = sl.sample_traces(net(), batches, loss=mean_of_all, probes=4)
        wanted = sl.sample_traces(net(), batches, loss=per_sample, probes=4)
        torch.testing.assert_close(found.values, wanted.values)
    with pytest.raises(InputError, match=r"one number for \d+ samples, the sum over them; return one value per sample"):
        sl.trace(net(), points(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"))


def test_a_loss_that_cannot_be_vectorised_is_taken_sample_by_sample() -> None:
    def branching(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        return value if int(targets.sum()) >= 0 else -value  # `vmap` cannot look at a number

    found = sl.hessian(net(), points(), loss=branching).dense()
    torch.testing.assert_close(found, sl.hessian(net(), points()).dense(), rtol=1e-10, atol=1e-14)


def test_losses_that_draw_or_hold_the_whole_batch_are_refused() -> None:
    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return per_sample(outputs, targets) * torch.rand(len(targets))

    with pytest.raises(InputError, match="it draws random numbers"):
        sl.hessian(net(), points(), loss=noisy)
    weights = torch.rand(N, dtype=torch.float64)
    with pytest.raises(InputError, match="cannot be called with two samples of a batch"):
        sl.hessian(net(), points(), loss=lambda outputs, targets: weights * per_sample(outputs, targets))


class Normed(nn.Module):
    """A norm across the samples, which no mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.tanh(hidden - hidden.mean(0)))


@pytest.mark.parametrize("name", [name for name in ALL if name != "hessian_variance"])
def test_a_model_that_couples_its_samples_is_refused_everywhere(name: str) -> None:
    model, message = Normed(), "the model's output for a sample depends on the other samples of its batch"
    if name == "Tracker":
        with pytest.raises(InputError, match=message):
            sl.Tracker(model, points())
        return
    with pytest.raises(InputError, match=message):
        ALL[name](model, points())


class Experts(nn.Module):
    """A mixture of experts: rows are sorted to experts and put back, which couples nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(1), x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Masked(nn.Module):
    """Attention with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed, _ = self.inner(x, x, x, key_padding_mask=mask)
        return self.last(mixed.masked_fill(mask[..., None], 0).sum(1) / (~mask).sum(1, keepdim=True))


def test_other_models_are_not_taken_for_coupled() -> None:
    torch.manual_seed(0)
    inputs, targets = points()
    normed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3)).double()
    normed(inputs)  # running statistics
    tokens, mask = torch.randn(N, 6, 4).double(), torch.arange(6) >= torch.randint(2, 7, (N, 1))
    for model, data in (
        (normed.train(), inputs),
        (Experts().double(), inputs),
        (Masked().double(), {"x": tokens, "mask": mask}),
    ):
        whole = sl.hessian(model, (data, targets)).dense()
        ragged = sl.hessian(model, (data, targets), batch_size=5).dense()
        torch.testing.assert_close(ragged, whole, rtol=1e-9, atol=1e-12)
        sl.sample_traces(model, (data, targets), batch_size=5, probes=2)
        assert Context(model, (data, targets), batches="fixed").coupling == ""


class Mixing(nn.Module):
    """Adds a share of the batch's mean to every sample, before some of the logits are masked."""

    def __init__(self, share: float, mask: float, masked: int, classes: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, classes)
        self.share = share
        self.register_buffer("mask", torch.where(torch.arange(classes) < classes - masked, 0.0, mask))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        outputs: Tensor = self.last(hidden + self.share * hidden.mean(0)) + self.mask
        return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("masked", "classes"), [(1, 5), (9, 10), (198, 200)])
@pytest.mark.parametrize("mask", [-1e2, -1e4, -1e6, -1e9])
def test_masked_logits_do_not_hide_that_samples_are_mixed(
    mask: float, masked: int, classes: int, dtype: torch.dtype
) -> None:
    data = points()[0].to(dtype), torch.zeros(N, dtype=torch.long)
    with pytest.raises(InputError, match="depends on the other samples of its batch"):
        sl.trace(Mixing(0.01, mask, masked, classes).to(dtype), data)
    assert sl.trace(Mixing(0.0, mask, masked, classes).to(dtype), data).exact


def test_a_part_in_single_precision_is_not_taken_for_a_mixture() -> None:
    """As the routers of some mixtures of experts have it: its rounding depends on the size of the batch."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.first, self.last = nn.Linear(20, 300), nn.Linear(300, 10)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.linear(x.float(), self.first.weight.float()).relu()
            hidden = F.linear(hidden, hidden.new_ones(300, 300) / 300 + torch.eye(300))
            outputs: Tensor = self.last(hidden.to(x.dtype))
            return outputs

    inputs = torch.randn(64, 20, generator=torch.Generator().manual_seed(0)).double()
    found = sl.margins(Single().double(), (inputs, torch.arange(64) % 10))
    assert len(found.output) == 64


# ---------------------------------------------------------------- fixed batches


@pytest.mark.parametrize(
    ("loss", "scalar", "size"),
    [(contrastive, False, 5), (contrastive, True, 2), (by_the_batch, True, 3), (centred, False, 2)],
)
def test_fixed_batches_are_part_of_the_definition(
    loss: Callable[..., Tensor], scalar: bool, size: int, untouched: Untouched
) -> None:
    model, (inputs, targets) = net(), points()

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets).mean() if scalar else loss(outputs, targets)

    wanted = dense(model, loss, size, inputs, targets)
    for data in ((inputs, targets), DataLoader(TensorDataset(inputs, targets), batch_size=size, shuffle=True)):
        options: dict[str, Any] = {"loss": total, "batches": "fixed", "batch_size": size}
        with untouched(model):
            found = sl.hessian(model, data, **options).dense()
            trace = sl.trace(model, data, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert trace.value == pytest.approx(float(wanted.trace()), rel=1e-9)  # 43 parameters, 64 probes: exact
    with pytest.raises(NotExactError, match="the loss couples the samples of a batch"):
        sl.trace(model, (inputs, targets), method="exact", **options)


def test_with_fixed_batches_the_batches_matter_and_are_recorded() -> None:
    model, data = net(), points()
    options: dict[str, Any] = {"loss": contrastive, "batches": "fixed"}
    traces = [sl.trace(model, data, batch_size=size, **options).value for size in (2, 3, 6)]
    assert max(traces) > 2 * min(traces)
    report = sl.measure(model, data, batch_size=5, measures=["trace", "largest_eigenvalue"], parts=[], **options)
    wanted = dense(model, contrastive, 5, *data)
    assert report.row("trace").value.value == pytest.approx(float(wanted.trace()))
    assert report.row("largest_eigenvalue").value.value == pytest.approx(float(torch.linalg.eigvalsh(wanted)[-1]))
    assert report.settings["data"] == "the batches are fixed and part of the definition: 2 of 5, 1 of 2 samples"
    audit = sl.audit(model, data, batch_size=5, measures=["trace"], transforms=["permute_units"], **options)
    assert audit.notes == (report.settings["data"],)
    assert audit.row("trace", "permute_units").verdict == "invariant"
    other = sl.compare(model, net(tanh=False), data, audit=False, measures=["trace"], batch_size=5, **options)
    assert other.settings["data"] == report.settings["data"]
    assert sl.landscape(model, data, points=3, batch_size=5, **options).notes[-1] == report.settings["data"]
    tracker = sl.Tracker(model, list(zip(data[0].split(5), data[1].split(5), strict=True)), **options)
    assert tracker.measure()["trace"] == pytest.approx(float(wanted.trace()))
    with pytest.raises(InputError, match=r"samples= would change the batches, which are part of .* batches='fixed'"):
        sl.measure(model, data, batch_size=5, samples=6, **options)


def test_nothing_is_defined_per_sample_under_a_coupled_loss() -> None:
    options: dict[str, Any] = {"loss": contrastive, "batches": "fixed", "batch_size": 4}
    with pytest.raises(InputError, match=r"a sample has no trace of its own; .* sl\.trace\(\.\.\., batches='fixed'\)"):
        sl.sample_traces(net(), points(), **options)
    with pytest.raises(InputError, match="needs the gradient of each sample's own loss"):
        sl.empirical_fisher(net(), points(), **options)
    with pytest.raises(InputError, match="a sample has no curvature of its own in its input"):
        sl.input_curvature(net(), points(), **options)
    assert Context(net(), points(), **options).coupling == "loss"


@pytest.mark.parametrize("options", [{"loss": contrastive, "batches": "fixed"}, {"batch_norm": "batch"}])
def test_intervals_are_those_of_other_batches_where_these_couple_their_samples(options: dict[str, Any]) -> None:
    """They took the samples of one batch to be independent, and one batch of 60 samples could decide."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(120, 4, generator=generator, dtype=torch.float64)
    data, models = (inputs, torch.arange(120) % 3), (net(), nn.Sequential(nn.BatchNorm1d(4), net()).double())
    models[1][1][0].weight.data.mul_(2)
    few = sl.compare(*models, data, measures=[], audit=False, batch_size=6, **options)
    assert {(row.how, row.verdict) for row in few.rows} == {("too few batches", "no interval")}
    assert few.advice.startswith("These samples give no reason")
    row = sl.compare(*models, data, measures=[], audit=False, batch_size=3, **options).row("loss")
    losses = [Setting(model, data, batch_size=3, **options).losses.reshape(40, 3).mean(1) for model in models]
    apart = losses[1] - losses[0]
    limits = signed_limits(float(apart.mean()), float(standard_error(apart)), 39, mean_skewness(apart))
    assert (row.low, row.high) == pytest.approx(limits)
    rows = sl.rank({"a": models[0], "b": models[1]}, data, measures=[], under=(), batch_size=3, **options).rows
    (found,) = ([each.behind_low, each.behind_high] for each in rows if each.behind)
    assert found == pytest.approx(limits if rows[1].behind else [-limits[1], -limits[0]])


def test_a_coupled_model_has_traces_of_its_samples_in_fixed_batches() -> None:
    """As with batch statistics: the loss of a sample is its own, its outputs are those in its batch."""
    model, (inputs, targets) = Normed(), points()
    found = sl.sample_traces(model, (inputs, targets), batches="fixed", batch_size=4, probes=60, method="hutchinson")
    assert found.batches == (4, 4, 4)
    wanted = float(dense(model, per_sample, 4, inputs, targets).trace())
    assert abs(float(found.values.mean()) - wanted) < 4 * found.mean().stderr
    assert "part of the definition" in found.notes[-1]
    matrix = sl.hessian(model, (inputs, targets), batches="fixed", batch_size=4).dense()
    torch.testing.assert_close(matrix, dense(model, per_sample, 4, inputs, targets), rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="it has no distance of its own"):
        sl.margins(model, (inputs, targets), batches="fixed", batch_size=4, distance=2)


def test_fixed_batches_of_samples_that_have_nothing_to_do_with_each_other_stay_exact() -> None:
    model, data = net(tanh=False), points()
    found = sl.sample_traces(model, data, batches="fixed", batch_size=5)
    assert found.exact
    torch.testing.assert_close(found.values, sl.sample_traces(model, data).values)
    batches = list(zip(data[0].split(5), data[1].split(5), strict=True))
    curved = sl.input_curvature(model, batches, batches="fixed").values
    torch.testing.assert_close(curved, sl.input_curvature(model, data).values)


class OwnLoss(nn.Module):
    """Returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.inner(x), labels)}


def test_a_model_that_returns_its_loss_alone_is_measured_by_that_as_the_sentence_says() -> None:
    (inputs, targets), model = points(), OwnLoss()
    batches = [{"x": inputs[start : start + 4], "labels": targets[start : start + 4]} for start in (0, 4, 8)]
    for function in (sl.trace, sl.hessian, sl.margins):
        with pytest.raises(InputError, match=r"a dict with the key 'loss'; say with output=.*batches='fixed'"):
            function(model, batches)
        with pytest.raises(
            InputError, match=r"outputs of shape \(\) for \d+ samples; a loss of its own\? .*batches='fix"
        ):
            function(model, batches, output="loss")
    options: dict[str, Any] = {"output": "loss", "loss": lambda value, targets: value, "batches": "fixed"}
    found = sl.hessian(model, batches, **options).dense()
    torch.testing.assert_close(found, dense(model.inner, mean_of_all, 4, inputs, targets), rtol=1e-9, atol=1e-12)
    assert sl.trace(model, batches, **options).value == pytest.approx(float(found.trace()))
    with pytest.raises(InputError, match="a sample has no trace of its own"):
        sl.sample_traces(model, batches, **options)


def test_the_check_costs_next_to_nothing() -> None:
    """A handful of calls with one or two samples a batch, whatever its size."""
    sizes: list[int] = []

    def counting(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return per_sample(outputs, targets)

    context = Context(net(), points(), loss=counting)
    with context.problem.active():
        inputs, targets = context.first(N)
        context.problem.checked(context.problem.outputs(context.problem.params, inputs), inputs, targets)
    assert sorted(sizes) == [1, 1, 2, N, N]


class _Crowded(nn.Module):
    """Samples that get in each other's way as soon as there are more than four."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        return outputs - outputs.mean(0) if len(inputs) > 4 else outputs


def test_a_second_look_is_taken_only_where_it_could_show_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a larger batch, or at other parameters."""
    inputs, looks = points()[0], list[int]()
    problem = Context(_Crowded(), points()).problem
    look = coupling.depends_on_others
    monkeypatch.setattr(coupling, "depends_on_others", lambda *given: bool(looks.append(1)) or look(*given))
    with problem.active():
        for some in (inputs[:4], inputs[:4].flip(0), inputs[:3]):
            check_independence(problem, some)
        assert len(looks) == 1
        for _ in range(2):  # nothing is known of a batch that was refused
            with pytest.raises(InputError, match="depends on the other samples"):
                check_independence(problem, inputs)
        problem.params = {name: 2 * tensor for name, tensor in problem.params.items()}
        check_independence(problem, inputs[:4])
        assert len(looks) == 4


def test_all_that_is_measured_of_a_network_looks_once_whether_its_samples_depend_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    look = coupling.depends_on_others
    monkeypatch.setattr(coupling, "depends_on_others", lambda *given: bool(looks.append(1)) or look(*given))
    sl.measure(net(tanh=False), points(), parts=["spectrum", "landscape"])
    assert len(looks) == 1
