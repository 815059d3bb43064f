"""Operations that are written out: the same values as built in, and derivatives that second differences confirm."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vmap
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel import transforms
from spiritlevel.binding.rewrites import Elementary
from spiritlevel.errors import InputError

ROOT = Path(__file__).parents[1]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Function(nn.Module):
    """Two linear layers with a function of the hidden values between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, 6), function, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


# ---------------------------------------------------------------- what killed the interpreter

_DEADLY = """
import sys
sys.path.insert(0, {tests!r})
import naive, torch, spiritlevel as sl
from test_elementary import X, Function
from torch.nn import functional as F

torch.manual_seed(0)
wanted = torch.randn(6, 3, dtype=torch.float64)
loss = lambda outputs, targets: F.mse_loss(outputs, targets, reduction="none").sum(1)
plain = lambda outputs, targets: (outputs - targets).square().sum(1)
for function, own, same in (
    (torch.tanh, loss, plain),
    (lambda h: h + F.mse_loss(h, torch.zeros_like(h), reduction="none"), "squared_error", "squared_error"),
    (lambda h: torch.ldexp(torch.tanh(h), torch.tensor(2)), "squared_error", "squared_error"),
):
    net = Function(function).double()
    dense = naive.finite_difference_hessian(net, X, wanted, same)
    print(float((sl.hessian(net, (X, wanted), loss=own).dense() - dense).abs().max() / dense.abs().max()))
"""


def test_zero_tangents_do_not_kill_the_interpreter() -> None:
    """In a child, for it died: a tangent that torch keeps without memory was read below our dispatch mode."""
    script = _DEADLY.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(float, done.stdout.split())) < 1e-7


_ONCE_BAD = ("ldexp", "nn.functional.mse_loss", "cdist", "scatter_reduce (prod)", "corrcoef")


@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        pytest.param(["--only", "ldexp", "mse_loss", "cdist", "corrcoef", "scatter_reduce (prod)"], 5, id="some"),
        pytest.param(["--quick"], 31, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_census_finds_no_fault_in_what_was_once_bad(tmp_path: Path, chosen: list[str], least: int) -> None:
    kept = tmp_path / "census.json"
    command = [sys.executable, "tools/census.py", *chosen, "--samples", "1", "--json", str(kept)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads(kept.read_text())
    assert len(found) >= least
    for name in _ONCE_BAD:
        assert set(found[name]["hessian"]) <= {"right", "no truth"}, (name, found[name]["hessian"])
        assert found[name]["hessian"]["right"][0] > 0


# ---------------------------------------------------------------- the same values


def both(call: Callable[[], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a call returns as built in, and written out."""
    results = []
    for mode in (None, Elementary()):
        torch.manual_seed(3)
        if mode is None:
            result = call()
        else:
            with mode:
                result = call()
        results.append(list(result) if isinstance(result, tuple) else [result])
    return results[0], results[1]


def unpool(dims: int, **options: Any) -> Callable[[], Tensor]:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
    back = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[dims - 1]
    size = 7 if options["kernel_size"] == 3 else 6
    values, indices = pool(random(2, 3, *[size] * dims), return_indices=True, **options)
    return lambda: back(values, indices, **options)


TOKENS = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0], [6, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
PLACES = torch.tensor([[0, 1, 1], [2, 1, 1]])


def triangle(**options: Any) -> Callable[[], Any]:
    return lambda: torch.triangular_solve(random(4, 2), random(4, 4) + 3 * torch.eye(4), **options)


VALUES: dict[str, Callable[[], Any]] = {
    "native layer norm": lambda: torch.native_layer_norm(random(3, 4), (4,), random(4), None, 1e-5),
    "native batch norm": lambda: torch.native_batch_norm(random(5, 4, 2), random(4), None, None, None, True, 0.1, 1e-5),
    "native batch norm, eval": lambda: torch.native_batch_norm(
        random(5, 4), None, random(4), random(4), random(4).exp(), False, 0.1, 1e-5
    ),
    "batch norm, low level": lambda: torch.batch_norm(
        random(5, 4), random(4), random(4), None, None, True, 0.1, 1e-5, False
    ),
    "instance norm, low level": lambda: torch.instance_norm(
        random(5, 4, 3), random(4), random(4), None, None, True, 0.1, 1e-5, False
    ),
    "hard sigmoid": lambda: F.hardsigmoid(4 * random(9)),
    "max unpool 1d": unpool(1, kernel_size=2),
    "max unpool 2d": unpool(2, kernel_size=2, stride=2),
    "max unpool 2d, overlapping": unpool(2, kernel_size=3, stride=2),
    "max unpool 3d": unpool(3, kernel_size=2),
    **{f"cdist {p}": lambda p=p: torch.cdist(random(2, 3, 4), random(2, 5, 4), p) for p in (0, 1, 1.5, 2, 3, math.inf)},
    "cdist, to itself": lambda: torch.cdist(random(3, 4), random(3, 4)),
    "cdist, broadcast": lambda: torch.cdist(random(2, 1, 3, 4), random(5, 2, 4)),
    **{f"pdist {p}": lambda p=p: F.pdist(random(5, 4), p) for p in (1, 2, math.inf)},
    **{
        f"triangular solve {options}": triangle(**options)
        for options in ({}, {"upper": False}, {"transpose": True}, {"unitriangular": True, "upper": False})
    },
    "cholesky inverse": lambda: torch.cholesky_inverse(random(3, 3).tril() + 2 * torch.eye(3)),
    "cholesky inverse, upper": lambda: torch.cholesky_inverse(random(2, 3, 3).triu() + 2 * torch.eye(3), upper=True),
    "scatter reduce": lambda: torch.scatter_reduce(random(2, 3), 1, PLACES, random(2, 3), "prod"),
    "scatter reduce, without self": lambda: random(3, 4).scatter_reduce(
        0, PLACES, random(2, 5), "prod", include_self=False
    ),
    "scatter reduce, in place": lambda: random(3, 4).scatter_reduce_(-1, PLACES, random(2, 5), reduce="prod"),
    "scatter reduce, sum": lambda: random(2, 3).scatter_reduce(1, PLACES, random(2, 3), "sum"),
    "normal": lambda: torch.normal(random(4), random(4).exp()),
    "normal, number": lambda: torch.normal(random(4), 0.5),
    "normal, of a size": lambda: torch.normal(0.0, 1.0, (3,)),
    "embedding, padded": lambda: F.embedding(TOKENS, random(7, 2), padding_idx=0),
    "embedding, padded from behind": lambda: F.embedding(TOKENS, random(7, 2), padding_idx=-1),
    **{
        f"bag, {mode}, {padding}": lambda mode=mode, padding=padding: F.embedding_bag(
            TOKENS, random(7, 2), mode=mode, padding_idx=padding
        )
        for mode in ("sum", "mean", "max")
        for padding in (None, 0, -3)
    },
    "bag, weighted": lambda: F.embedding_bag(TOKENS, random(7, 2), mode="sum", per_sample_weights=random(4, 5)),
    **{
        f"bag, offsets, {mode}": lambda mode=mode: F.embedding_bag(
            TOKENS[2], random(7, 2), torch.tensor([0, 3, 3]), mode=mode, padding_idx=3
        )
        for mode in ("sum", "mean", "max")
    },
    "bag, last offset": lambda: F.embedding_bag(
        TOKENS[0], random(7, 2), torch.tensor([0, 3, 5]), mode="sum", include_last_offset=True
    ),
    "multi margin of one": lambda: F.multi_margin_loss(random(3), torch.tensor(1)),
    "multi margin of one, none": lambda: F.multi_margin_loss(random(3), torch.tensor([1]), reduction="none"),
    **{
        f"multi margin, {p}, {reduction}": lambda p=p, reduction=reduction: F.multi_margin_loss(
            random(4, 3), Y[:4], p=p, margin=0.7, weight=random(3).exp(), reduction=reduction
        )
        for p in (1, 2)
        for reduction in ("none", "mean", "sum")
    },
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve")
@pytest.mark.parametrize("name", VALUES)
def test_what_is_written_out_has_the_values_of_the_built_in(name: str) -> None:
    built_in, written = both(VALUES[name])
    assert len(built_in) == len(written)
    for first, second in zip(built_in, written, strict=True):
        assert first.shape == second.shape
        assert first.dtype == second.dtype
        assert torch.allclose(first, second, rtol=1e-12, atol=1e-12), (first, second)


def test_a_hard_sigmoid_in_place_is_in_place() -> None:
    values = random(5)
    with Elementary():
        result = F.hardsigmoid(values, inplace=True)
    assert result is values
    assert torch.allclose(values, F.hardsigmoid(random(5)))


def test_distances_from_a_point_to_itself_have_derivatives() -> None:
    net = Function(lambda h: h + torch.cdist(h[:, :, None], h[:, :, None]).sum(1)).double()
    dense = naive.finite_difference_hessian(net, X, Y)
    found = sl.hessian(net, (X, Y)).dense()
    assert torch.allclose(found, dense, atol=1e-8)


def test_wrong_derivatives_that_cannot_be_written_out_are_refused() -> None:
    net = Function(lambda h: h.as_strided_scatter(h[:, :1], (len(h), 1), (6, 1))).double()
    for measured in (sl.hessian, sl.sample_traces):
        with pytest.raises(InputError, match=r"the derivatives of as_strided_scatter are wrong .*; use slices"):
            measured(net, (X, Y))


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.multi_margin_loss(o, t, p=2, reduction="none"),
        lambda o, t: F.hardsigmoid(o).square().sum(1),
        lambda o, t: F.layer_norm(o, (3,)).gather(1, t[:, None])[:, 0].square() + o.square().sum(1),
        lambda o, t: torch.cdist(o[:, None], torch.eye(3).to(o)[None])[:, 0].gather(1, t[:, None])[:, 0],
    ],
    ids=["multi margin", "hard sigmoid", "layer norm", "distance"],
)
def test_a_callable_loss_runs_in_the_same_forms(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = Function(torch.tanh).double()
    dense = naive.finite_difference_hessian(net, X, Y, loss)
    assert torch.allclose(sl.hessian(net, (X, Y), loss=loss).dense(), dense, atol=1e-7)
    traces = sl.sample_traces(net, (X, Y), loss=loss, probes=400)
    assert abs(float(traces.values.mean()) - float(dense.trace())) < 5 * float(traces.mean().stderr)


def test_a_loss_may_hold_parameters_of_its_own() -> None:
    torch.manual_seed(0)
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        kept = torch.stack([row.masked_select(row > -100).sum() for row in outputs])  # which cannot be traced
        return scale * kept.square()

    net = Function(torch.tanh).double()
    dense = naive.finite_difference_hessian(net, X, Y, lambda o, t: 1.5 * o.sum(1).square())
    operator = sl.hessian(net, (X, Y), loss=loss)
    one = torch.eye(operator.size, dtype=torch.float64)[:, 0]
    assert torch.allclose(operator @ one, dense[0], atol=1e-8)
    assert scale.grad is None


# ---------------------------------------------------------------- padding


class Words(nn.Module):
    """Words in a row, the padding among them unmasked; its row is held fixed, or is a parameter like the others."""

    def __init__(self, body: str, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.embedding.weight.data[0] = torch.tensor([0.3, -0.2, 0.5, 0.1])
        self.hidden = nn.GRU(4, 5, batch_first=True) if body == "gru" else nn.Linear(4, 5)
        self.last, self.act = nn.Linear(5, 3), act

    def rows(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.rows(tokens)
        values = self.hidden(rows)[0][:, -1] if isinstance(self.hidden, nn.GRU) else self.hidden(rows.mean(1))
        return self.last(self.act(values))


class Constant(Words):
    """The same with the padding's row as a constant: what is left can be differentiated by anything."""

    def rows(self, tokens: Tensor) -> Tensor:
        weight = torch.cat([self.embedding.weight[:1].detach(), self.embedding.weight[1:]])
        return weight[tokens]


SENTENCES = torch.cat([TOKENS[:3], torch.tensor([[2, 0, 0, 0, 0], [3, 3, 1, 0, 0], [5, 4, 6, 2, 0]])])


@pytest.mark.parametrize("body", ["mean", "gru"])
@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
def test_padding_is_held_fixed(body: str, act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, same = Words(body, act).double(), Constant(body, act).double()
    same.load_state_dict(model.state_dict())
    flat = naive.Flat(same)
    dense = torch.autograd.functional.hessian(lambda point: flat(point, SENTENCES, Y), flat.point)
    assert not dense[:4].any()  # the row of the padding
    assert torch.allclose(sl.hessian(model, (SENTENCES, Y)).dense(), naive.symmetric(dense), atol=1e-12)
    exact = sl.sample_traces(model, (SENTENCES, Y))
    probed = sl.sample_traces(model, (SENTENCES, Y), method="hutchinson", probes=400)
    for traces in (exact, probed):
        assert abs(float(traces.values.mean() - dense.trace())) <= 5 * float(traces.mean().stderr) + 1e-10
    assert exact.exact == (body == "mean" and act is torch.relu)
    assert sl.margins(model, (SENTENCES, Y)) is not None


@pytest.mark.parametrize("padding", [None, 0])
def test_embeddings_with_sparse_gradients(padding: int | None) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 4, padding_idx=padding)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(20, 3)).double()
    dense = sl.hessian(model, (SENTENCES, Y)).dense()
    table.sparse = True
    assert torch.equal(sl.hessian(model, (SENTENCES, Y)).dense(), dense)
    assert sl.sample_traces(model, (SENTENCES, Y)).exact


def test_bags_with_padding() -> None:
    torch.manual_seed(0)
    for mode in ("sum", "mean", "max"):
        model = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode, padding_idx=0), nn.Tanh(), nn.Linear(4, 3)).double()
        dense = naive.finite_difference_hessian(model, SENTENCES, Y)
        assert torch.allclose(sl.hessian(model, (SENTENCES, Y)).dense(), dense, atol=1e-8)


# ---------------------------------------------------------------- products that vanish


class Signs(nn.Module):
    """Values divided by their own size: the outputs are constant but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.normalize(self.first(x).unsqueeze(-1), dim=-1).squeeze(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_curvature_that_is_all_rounding_is_not_called_asymmetric(dtype: torch.dtype) -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        model, data = Signs().to(dtype), (X.to(dtype), Y)
        product = sl.hessian(model, data) @ torch.ones(15, dtype=dtype)
        assert float(product.abs().max()) < 1e5 * torch.finfo(dtype).eps
        traces = sl.sample_traces(model, data, method="hutchinson", probes=4)
        assert float(traces.values.abs().max()) < 1e5 * torch.finfo(dtype).eps


def test_a_real_asymmetry_is_refused_still() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h * Half.apply(h))

    torch.manual_seed(0)
    model = Cut().double()
    for measured in (lambda: sl.hessian(model, (X, Y)).dense(), lambda: sl.trace(model, (X, Y), method="hutchinson")):
        with pytest.raises(InputError, match=r"not symmetric|not the derivative"):
            measured()


class Half(torch.autograd.Function):
    """The identity, whose derivative is declared to be its value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


# ---------------------------------------------------------------- transformations in the user's own forward


class Transforming(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], outer: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.act, self.outer = nn.Linear(4, 5), nn.Linear(5, 3), act, outer

    def one(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.one, x)


OUTER: dict[str, Callable[..., Tensor]] = {
    "vmap": lambda f, x: vmap(f)(x),
    "gradient": lambda f, x: vmap(grad(lambda row: f(row).square().sum()))(x)[:, :3],
    "jacobian": lambda f, x: vmap(jacrev(f))(x).sum(-1),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
def test_a_model_may_use_transformations_itself(outer: str, act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Transforming(act, OUTER[outer]).double()
    dense = naive.finite_difference_hessian(model, X, Y)
    assert torch.allclose(sl.hessian(model, (X, Y)).dense(), dense, atol=1e-8)
    traces = sl.sample_traces(model, (X, Y))
    assert traces.exact == (outer == "vmap" and act is torch.relu)
    assert abs(float(traces.values.mean() - dense.trace())) <= 5 * float(traces.mean().stderr) + 1e-10
    for matrix in (sl.gauss_newton, sl.empirical_fisher):
        assert torch.isfinite(matrix(model, (X, Y)).dense()).all()
    sl.margins(model, (X, Y))


def test_factors_are_not_followed_through_a_vmap() -> None:
    model = Transforming(torch.relu, OUTER["vmap"]).double()
    message = r"'a' \(Linear\) runs inside a transformation of torch.func .*; write it in batched operations"
    for call in (
        lambda: transforms.scaling_groups(model, data=(X, Y)),
        lambda: transforms.rescale_layers(model, {"a": 2.0, "b": 0.5}, data=(X, Y)),
        lambda: transforms.scale_last_layer(model, 2.0, data=(X, Y)),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinc_bends_at_zero(dtype: torch.dtype) -> None:
    """The built-in second derivatives at 0 are NaN backwards and 0 forwards; −π²/3 is right."""

    class Sinc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sinc(x + self.shift)

    points = torch.tensor([[0.0], [1e-4], [0.2], [0.5], [2.3]], dtype=dtype)
    op = sl.hessian(Sinc().to(dtype), (points, points), loss=lambda outputs, targets: outputs[:, 0])
    x = points[1:, 0].double() * math.pi
    wanted = math.pi**2 * (-x.sin() / x - 2 * x.cos() / x**2 + 2 * x.sin() / x**3)
    wanted[0] = -(math.pi**2) / 3  # where the closed form cancels
    wanted = torch.cat([torch.tensor([-(math.pi**2) / 3]), wanted]).mean()
    assert float(op.dense()) == pytest.approx(float(wanted), rel=1e-5)
    one = sl.hessian(Sinc().to(dtype), (points[:1], points[:1]), loss=lambda outputs, targets: outputs[:, 0])
    assert float(one.dense()) == pytest.approx(-(math.pi**2) / 3, rel=1e-6)


# ---------------------------------------------------------------- max pooling without derivatives


def _pooled(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with Elementary():
        return F.max_pool2d(x, *args, **kwargs)


@pytest.mark.parametrize("shape", [(3, 4, 8, 6), (2, 1, 7, 9), (4, 6, 6)])
@pytest.mark.parametrize("kernel", [1, 2, 3, (2, 3), (1, 2), 5])
@pytest.mark.parametrize("options", [{}, {"stride": 1}, {"ceil_mode": True}, {"padding": 1}, {"dilation": 2}])
def test_pooled_values_are_those_of_pytorch(shape: tuple[int, ...], kernel: Any, options: dict[str, Any]) -> None:
    x = random(*shape)
    x.view(-1)[5] = math.nan
    x.view(-1)[9] = -math.inf
    wide = kernel if isinstance(kernel, int) else max(kernel)
    if ("dilation" in options and 2 * wide > min(shape[-2:])) or ("padding" in options and kernel in (1, (1, 2))):
        options = {}  # PyTorch takes no such cells
    wanted = F.max_pool2d(x, kernel, **options)
    torch.testing.assert_close(_pooled(x, kernel, **options), wanted, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        found = _pooled(x.requires_grad_(), kernel, **options)
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=0, equal_nan=True)
    assert found.is_contiguous()
    assert found.data_ptr() != x.data_ptr()


def test_ties_have_the_derivatives_of_pytorch() -> None:
    """All of the slope goes to the first of equal values; written out, it would be shared among them."""
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    direction = random(1, 1, 4, 4)
    wanted = torch.autograd.grad(F.max_pool2d(leaf := x.clone().requires_grad_(), 2).sum(), leaf)[0]
    assert wanted.sum() == 4
    assert set(wanted.flatten().tolist()) == {0.0, 1.0}
    found = torch.autograd.grad(_pooled(leaf := x.clone().requires_grad_(), 2).sum(), leaf)[0]
    assert torch.equal(found, wanted)
    along = F.max_pool2d(direction * wanted, 2) + -F.max_pool2d(-direction * wanted, 2)  # the one that is not 0
    assert torch.equal(jvp(lambda x: _pooled(x, 2), (x,), (direction,))[1], along)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(_pooled(dual, 2)).tangent, along)


def test_pooling_is_written_out_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in channels-last order have a fast kernel, and whoever watches operations sees the one that is called."""
    calls: list[str] = []
    built_in = torch.max_pool2d
    monkeypatch.setattr(torch, "max_pool2d", lambda *args: (calls.append("built in"), built_in(*args))[1])
    x = random(2, 3, 4, 4)
    assert torch.equal(_pooled(x, 2), _pooled(x.contiguous(memory_format=torch.channels_last), 2))
    assert calls == ["built in"]  # the second
    _pooled(x, 2, 1)
    vmap(lambda x: _pooled(x, 2))(x)
    with torch.overrides.BaseTorchFunctionMode():
        _pooled(x, 2)
    assert calls == ["built in"] * 4
