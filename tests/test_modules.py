"""Modules in unusual forms: exported, packed, sparse, of half precision inside, quantised, sharded."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Untouched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import spiritlevel as sl
from spiritlevel.errors import InputError

N = 9
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(N) % 3

ALL: dict[str, Callable[[nn.Module, Any], Any]] = {
    "sample_traces": lambda model, data: sl.sample_traces(model, data, probes=2).values,
    "margins": lambda model, data: sl.margins(model, data).signed,
    "hessian": lambda model, data: sl.hessian(model, data).dense(),
    "gauss_newton": lambda model, data: sl.gauss_newton(model, data).dense(),
    "landscape": lambda model, data: sl.landscape(model, data, points=3).losses,
    "measure": lambda model, data: sl.measure(model, data, measures=["largest_eigenvalue"], parts=["audit"]),
    "Tracker": lambda model, data: sl.Tracker(model, data).measure(),
}


def plain() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def dense(model: nn.Module, inputs: Any) -> Tensor:
    own = dict(model.named_parameters())

    def loss(vector: Tensor) -> Tensor:
        parts = zip(own, vector.split([p.numel() for p in own.values()]), strict=True)
        params = {name: part.reshape(own[name].shape) for name, part in parts}
        return F.cross_entropy(torch.func.functional_call(model, params, inputs), Y)

    return torch.autograd.functional.hessian(loss, torch.cat([p.detach().reshape(-1) for p in own.values()]))


# ---------------------------------------------------------------- exported programs


@functools.cache
def exported(*, any_size: bool = True) -> nn.Module:
    shapes = ({0: torch.export.Dim.DYNAMIC},) if any_size else None
    return torch.export.export(plain().eval(), (X,), dynamic_shapes=shapes).module()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
@pytest.mark.parametrize("name", ALL)
def test_an_exported_program_is_measured_as_the_model_it_was_made_from(name: str) -> None:
    found, wanted = ALL[name](exported(), (X, Y)), ALL[name](plain(), (X, Y))
    if isinstance(found, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    elif name == "Tracker":
        assert found["trace"] == pytest.approx(wanted["trace"])
    else:
        assert found.rows[0].value.value == pytest.approx(wanted.rows[0].value.value)


def test_an_exported_program_comes_back_as_it_was() -> None:
    program = exported()
    before = {name: tensor.clone() for name, tensor in program.state_dict().items()}
    modes = [module.training for module in program.modules()]
    sl.trace(program, (X, Y))
    assert [module.training for module in program.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict().items())


@pytest.mark.parametrize("name", ALL)
def test_a_program_for_batches_of_one_size_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(InputError, match=r"Guard failed: .* \(it was exported for inputs of one shape; expor"):
        ALL[name](exported(any_size=False), (X, Y))


def test_a_program_itself_is_not_its_module() -> None:
    program: Any = torch.export.export(plain().eval(), (X,))
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got ExportedProgram; pass its \.module\(\)"):
        sl.trace(program, (X, Y))


# ---------------------------------------------------------------- packed sequences, graphs in buffers


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner, self.last = nn.LSTM(2, 2, batch_first=True).double(), nn.Linear(2, 3).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.last(self.inner(packed)[1][0][-1])


class Unpacked(Packed):
    """The same step by step, in operations that can be differentiated in all ways."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        state = cell = x.new_zeros(len(x), 2)
        ih, hh = self.inner.weight_ih_l0, self.inner.weight_hh_l0
        for step in range(x.shape[1]):
            gates = F.linear(x[:, step], ih, self.inner.bias_ih_l0) + F.linear(state, hh, self.inner.bias_hh_l0)
            i, f, g, o = gates.chunk(4, 1)
            fresh = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            goes_on = (step < lengths)[:, None]
            state = torch.where(goes_on, o.sigmoid() * fresh.tanh(), state)
            cell = torch.where(goes_on, fresh, cell)
        return self.last(state)


def test_packed_sequences_are_measured_by_every_function(untouched: Untouched) -> None:
    model = Packed()
    inputs = torch.randn(N, 3, 2, generator=torch.Generator().manual_seed(1)).double(), torch.arange(N) % 3 + 1
    wanted = dense(Unpacked(), inputs)
    with untouched(model):
        torch.testing.assert_close(sl.hessian(model, (inputs, Y)).dense(), wanted, rtol=1e-8, atol=1e-11)
        traces = sl.sample_traces(model, (inputs, Y), probes=16)
    assert abs(float(traces.values.mean()) - float(wanted.trace())) < 5 * traces.mean().stderr
    same = sl.gauss_newton(Unpacked(), (inputs, Y)).dense()
    torch.testing.assert_close(sl.gauss_newton(model, (inputs, Y)).dense(), same, rtol=1e-8, atol=1e-11)
    ALL["Tracker"](model, (inputs, Y))


class Held(nn.Module):
    """A graph network that holds its graph, dense or sparse, and takes the numbers of nodes."""

    def __init__(self, form: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        edges = torch.randint(0, N, (2, 20), generator=torch.Generator().manual_seed(1))
        matrix = torch.sparse_coo_tensor(edges, torch.ones(20).double(), (N, N)).coalesce()
        self.form = form
        forms = {"edges": edges, "dense": matrix.to_dense(), "sparse": matrix, "csr": matrix.to_sparse_csr()}
        self.register_buffer("edges", forms[form])
        self.register_buffer("x", X)

    def spread(self, values: Tensor) -> Tensor:
        edges: Any = self.edges
        if self.form == "edges":
            return torch.zeros_like(values).index_add_(0, edges[0], values[edges[1]])
        return edges @ values

    def forward(self, nodes: Tensor) -> Tensor:
        x: Any = self.x
        return self.last(self.spread(torch.relu(self.spread(self.first(x)))))[nodes]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("form", ["edges", "csr", "sparse"])
def test_graphs_in_buffers_are_measured_by_every_function(form: str) -> None:
    model, data = Held(form), (torch.arange(N), Y)
    wanted = dense(Held("dense"), (data[0],))
    torch.testing.assert_close(sl.hessian(model, data).dense(), wanted, rtol=1e-9, atol=1e-12)
    traces = sl.sample_traces(model, data, probes=16)
    assert abs(float(traces.values.mean()) - float(wanted.trace())) <= 5 * traces.mean().stderr + 1e-9
    for name in ("margins", "gauss_newton", "landscape", "measure", "Tracker") if form == "sparse" else ():
        ALL[name](model, data)


# ---------------------------------------------------------------- precision inside, integers, shards


class Coarse(nn.Module):
    """Rounds its values to bfloat16 on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner[0](x)).to(torch.bfloat16)
        return self.inner[3](hidden.to(x.dtype)).to(torch.bfloat16)


class Fine(Coarse):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner[3](torch.tanh(self.inner[0](x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_rounds_to_bfloat16_inside_is_measured_to_that_precision(dtype: torch.dtype) -> None:
    model, fine, data = Coarse().to(dtype), Fine().to(dtype), (X.to(dtype), Y)
    wanted = sl.hessian(fine, data).dense()
    found = sl.hessian(model, data).dense()
    assert float((found - wanted).abs().max()) < 0.03 * float(wanted.abs().max())
    traces = sl.sample_traces(model, data, probes=64)
    assert any("rounds its values on the way, to about 0.008 of their size" in note for note in traces.notes)
    assert not any("rounds" in note for note in sl.sample_traces(fine, data, probes=2).notes)
    for name in ("margins", "gauss_newton", "landscape", "measure", "Tracker") if dtype == torch.float32 else ():
        ALL[name](model, data)


@pytest.mark.parametrize("name", ALL)
def test_a_half_precision_model_with_a_type_of_its_own_is_refused_in_a_sentence(name: str) -> None:
    class Casts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.bfloat16))

    with pytest.raises(InputError, match=r"same dtype.*measured as a float32 copy, .* x\.to\(self\.weight\.dtype\)\)"):
        ALL[name](Casts(4, 3).to(torch.bfloat16), (X, Y))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_quantised_models_are_refused_in_a_sentence(name: str) -> None:
    for model in (plain(), nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(4, 3))):
        quantised = torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear})
        with pytest.raises(InputError, match=r"is quantised \(\d is a torch\.ao\.nn\.quantized\..*Linear\): .*b"):
            ALL[name](quantised, (X, Y))


SHARDED = "the parameter 0.weight is sharded over processes (a DTensor, as FSDP2 makes them)"


@pytest.fixture(scope="module")
def sharded() -> Iterator[nn.Module]:
    """A model that FSDP2 has sharded, over this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    yield fully_shard(plain().float(), mesh=init_device_mesh("cpu", (1,)))
    torch.distributed.destroy_process_group()


MORE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "trace": sl.trace,
    "audit": sl.audit,
    "compare": lambda model, data: sl.compare(model, model, data),
    "input_curvature": sl.input_curvature,
}


IN_SHARDS = ("margins", "hessian", "measure")  # tests/test_sharded.py


@pytest.mark.parametrize("name", {*ALL, *MORE} - {*IN_SHARDS})
def test_sharded_models_are_refused_in_a_sentence_by_what_needs_them_whole(name: str, sharded: nn.Module) -> None:
    with pytest.raises(InputError, match=re.escape(SHARDED)):
        {**ALL, **MORE}[name](sharded, (X, Y))
