"""Models and data of other libraries, the real ones, in tiny configurations drawn at random; nothing is fetched.

Each is compared with a dense Hessian in float64 of the loss that the library itself computes, where it computes one.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Untouched
from naive import per_sample_traces
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.errors import InputError
from spiritlevel.loading import load_model, load_samples, load_weights

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of other libraries among each other
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
os.environ["HF_HUB_OFFLINE"] = "1"

SMALL = {
    **{"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 9},
    **{"max_position_embeddings": 8},
}
Batch = dict[str, Tensor]


def tokens(classes: int = 3, count: int = 4) -> Batch:
    """Sequences of different lengths, with a class each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 9, (count, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(count) % classes}


def text() -> Batch:
    """Sequences to continue; the labels of what is padded do not count."""
    batch = tokens()
    return {**batch, "labels": torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)}


def images(channels: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.rand(4, channels, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 0])}


def double(batch: Any) -> Any:
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


def dense(model: nn.Module, loss: Callable[[nn.Module], Tensor], rtol: float = 1e-7) -> Tensor:
    """The Hessian of a scalar that the model computes, one row of autodiff at a time, for its parameters that train."""
    params = {
        name: each.detach().clone().requires_grad_() for name, each in model.named_parameters() if each.requires_grad
    }

    class Bound(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return functional_call(model, params, args, kwargs)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = loss(Bound())
        first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(params.values()), create_graph=True)])
        rows = []
        for each in first:
            second = torch.autograd.grad(each, list(params.values()), retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat(
                    [
                        torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                        for g, p in zip(second, params.values(), strict=True)
                    ]
                )
            )
    matrix = torch.stack(rows)
    close(matrix, matrix.T, rtol)
    return matrix


def close(found: Tensor, wanted: Tensor, rtol: float = 1e-7) -> None:
    """Equal up to a share of the largest entry."""
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=rtol * float(wanted.abs().max()))


def signed_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of the label less the largest other one."""
    own = logits.gather(1, labels[:, None])
    return (own - logits.scatter(1, labels[:, None], -torch.inf).max(1, keepdim=True).values)[:, 0]


def check(model: nn.Module, batch: Batch, loss: str = "cross_entropy", rtol: float = 1e-7, **options: Any) -> None:
    """Hessian, traces, margins and a report of a model on one batch, all against slow twins in float64.

    `rtol` is larger for models that cast to float32 inside, as the norms of Llama and T5 do.
    """
    model = copy.deepcopy(model).double().eval()
    batch = double(batch)
    data = [batch]
    whole = dense(model, lambda bound: _mean_loss(bound, batch, loss), rtol)
    close(sl.hessian(model, data, loss=loss, **options).dense(), whole, rtol)
    traces = sl.sample_traces(model, data, loss=loss, seed=3, **options)
    assert len(traces.values) == len(batch["labels"])
    mean = traces.mean()
    assert abs(mean.value - float(whole.trace())) <= 5 * mean.stderr + rtol * abs(float(whole.trace()))
    with torch.no_grad():
        logits = model(**batch).logits
    margins = sl.margins(model, data, loss=loss, **options)
    if logits.ndim == 2:
        torch.testing.assert_close(margins.signed, signed_margins(logits, batch["labels"]), rtol=rtol, atol=1e-9)
    report = sl.measure(model, data, loss=loss, measures=["trace", "weight_norm"], parts=[], **options)
    assert [row.name for row in report.rows] == ["trace", "weight_norm"]
    assert "nan" not in " ".join(report.headline)


def _mean_loss(model: nn.Module, batch: Batch, loss: str) -> Tensor:
    """The mean over samples; a sample that is a sequence counts the mean over its tokens."""
    given = {key: value for key, value in batch.items() if key != "labels"}
    logits, labels = model(**given).logits, batch["labels"]
    if loss == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.ndim == 2:
        return F.cross_entropy(logits, labels)
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return (each.sum(1) / (labels != -100).sum(1)).mean()


# ---------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def network(transformers: Any, name: str) -> nn.Module:
    torch.manual_seed(0)
    small = {**SMALL, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**small, num_labels=3)).eval()
    if name == "bert tokens":
        return transformers.BertForTokenClassification(transformers.BertConfig(**small, num_labels=3)).eval()
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=4, n_layer=1, n_head=2, vocab_size=9, n_positions=8, bos_token_id=None, eos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, num_key_value_heads=1)).eval()
    if name == "vit":
        config = transformers.ViTConfig(
            hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
            image_size=8, patch_size=4, num_channels=1, num_labels=3,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config).eval()
    config = transformers.T5Config(
        vocab_size=9, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def test_bert_classifies_sequences(transformers: Any, untouched: Untouched) -> None:
    model, batch = network(transformers, "bert"), tokens()
    with untouched(model):
        check(model, batch)
    exact, twin = copy.deepcopy(model).double(), double(batch)
    whole = dense(exact, lambda bound: bound(**twin).loss)  # as transformers computes it
    close(sl.hessian(exact, [batch]).dense(), whole)
    pair = ({key: value for key, value in batch.items() if key != "labels"}, batch["labels"])
    assert sl.trace(model, pair).value == sl.trace(model, [batch]).value
    assert (
        sl.trace(model, pair, probes=8).value
        == sl.trace(model, [batch], probes=8, target="labels", output="logits").value
    )


def test_bert_tags_tokens(transformers: Any) -> None:
    batch = tokens()
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    check(network(transformers, "bert tokens"), batch)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models(transformers: Any, name: str) -> None:
    model, batch = network(transformers, name), text()
    check(model, batch, "causal_lm", 1e-4 if name == "llama" else 1e-7)
    rtol = 1e-4 if name == "llama" else 1e-5  # transformers computes the loss of a language model in float32
    even = {
        key: value[[0, 2, 3]] for key, value in batch.items()
    }  # equally many tokens: the mean of all is that of means
    exact, twin = copy.deepcopy(model).double(), double(even)
    whole = dense(exact, lambda bound: bound(**twin).loss, rtol)
    found = sl.hessian(exact, [even], loss="causal_lm").dense()
    close(found, whole, rtol)


def test_labels_that_are_the_inputs_are_not_taken_for_targets(transformers: Any) -> None:
    model, batch = network(transformers, "gpt2"), text()
    for function in (sl.sample_traces, sl.margins, sl.hessian, sl.measure):
        with pytest.raises(InputError, match=r"the labels of GPT2LMHeadModel are its own inputs, .* loss='causal_lm'"):
            function(model, [batch])
    shifted = {**batch, "labels": batch["labels"].roll(-1, 1)}
    assert len(sl.margins(model, [shifted]).output) == 4


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_as_the_unit(transformers: Any, name: str) -> None:
    model, batch = network(transformers, name), text()
    counted = int((batch["labels"][:, 1:] != -100).sum())
    margins = sl.margins(model, [batch], loss="causal_lm", unit="token")
    assert len(margins.output) == counted
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1]
    kept = batch["labels"][:, 1:] != -100
    expected = signed_margins(logits[kept], batch["labels"][:, 1:][kept])
    torch.testing.assert_close(margins.signed, expected.double(), rtol=1e-4, atol=1e-6)
    traces = sl.sample_traces(model, [batch], loss="causal_lm", unit="token", probes=4)
    assert len(traces.values) == counted
    exact, twin = copy.deepcopy(model).double(), double(batch)
    rtol = 1e-4 if name == "llama" else 1e-5  # transformers computes the loss of a language model in float32
    whole = dense(exact, lambda bound: bound(**twin).loss, rtol)  # divided by the tokens of the batch: their mean
    found = sl.hessian(exact, [batch], loss="causal_lm", unit="token").dense()
    close(found, whole, rtol)


def test_vit_classifies_images(transformers: Any) -> None:
    check(network(transformers, "vit"), images())


def test_t5_needs_what_its_collator_makes(transformers: Any) -> None:
    model, batch = network(transformers, "t5"), text()
    with pytest.raises(InputError, match=r"a batch needs decoder_input_ids, which DataCollatorForSeq2Seq\(.*\) makes"):
        sl.trace(model, [batch])
    shifted = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    check(model, {**batch, "decoder_input_ids": shifted}, rtol=1e-4)


def test_a_trainer_gives_its_batches(transformers: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    batch = tokens(count=7)
    data = datasets.Dataset.from_dict({key: value.tolist() for key, value in batch.items()})
    model = network(transformers, "bert")
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=3, report_to=[], use_cpu=True
    )
    loader = transformers.Trainer(model=model, args=settings, eval_dataset=data).get_eval_dataloader()
    found = sl.margins(model, loader)
    torch.testing.assert_close(found.signed, sl.margins(model, [batch]).signed)
    assert sl.trace(model, loader, probes=4).value == pytest.approx(sl.trace(model, [batch], probes=4).value, rel=1e-4)
    torch.testing.assert_close(sl.margins(model, data.with_format("torch")).signed, found.signed)


# ---------------------------------------------------------------- peft, lightning, accelerate


def test_lora_measures_what_it_trains(transformers: Any) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=2, target_modules=["query", "value"], init_lora_weights=False, modules_to_save=["classifier"]
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(network(transformers, "bert"), settings).eval()
    check(model, tokens())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert sl.hessian(model, [tokens()]).size == trained < sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "rank-stabilised", "dora", "bias", "merged already", "two adapters"])
def test_what_merging_adapters_does(transformers: Any, untouched: Untouched, kind: str) -> None:
    """The prediction beside peft's own merging: the loss of its merged model, and the terms by differences."""
    peft = pytest.importorskip("peft")
    options = {"rank-stabilised": {"use_rslora": True}, "dora": {"use_dora": True}, "bias": {"lora_bias": True}}
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=2, target_modules=["query", "value", "dense"], init_lora_weights=False, **options.get(kind, {})
    )
    model = peft.get_peft_model(network(transformers, "bert"), settings).double().eval()
    if kind == "two adapters":
        model.add_adapter("second", settings)
        model.double()
        model.base_model.set_adapter(["default", "second"])
    if kind == "merged already":
        model.merge_adapter()
    batch = tokens()
    whole = copy.deepcopy(model).merge_and_unload()
    bare = copy.deepcopy(model)
    if kind == "merged already":
        bare.unmerge_adapter()
    bare = bare.unload()
    with untouched(model):
        found = sl.perturb(model, [batch], "lora")
    losses = [float(each(**batch).loss.detach()) for each in (bare, whole)]
    assert found.loss.value == pytest.approx(losses[0], rel=1e-9)
    assert found.measured.value == pytest.approx(losses[1] - losses[0], rel=1e-8)
    assert abs(found.measured.value) > 1e-4
    first, last = bare.state_dict(), whole.state_dict()
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert {row.name.removeprefix("base_model.model.") for row in found.layers} == moved

    def at(step: float) -> float:
        there = {name: torch.lerp(first[name], last[name], step) for name in moved}
        return float(functional_call(bare, there, kwargs=batch).loss.detach())

    width = 2e-4
    up, here, down = (at(step) for step in (width, 0.0, -width))
    assert found.slope == pytest.approx((up - down) / (2 * width), rel=1e-4)
    assert found.curvature == pytest.approx((up - 2 * here + down) / (2 * width**2), rel=1e-3)


def lightning_module() -> Any:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 3))
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]), reduction="none")

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.criterion(self(batch[0]), batch[1]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return lightning, Net()


def points() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


def test_a_lightning_module_and_its_checkpoint(tmp_path: Path, untouched: Untouched) -> None:
    lightning, model = lightning_module()
    inputs, targets = points()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with untouched(model):
        traces = sl.sample_traces(model, loader)
    assert traces.exact
    torch.testing.assert_close(traces.values, per_sample_traces(model.net, inputs, targets), rtol=1e-4, atol=1e-6)
    exact = copy.deepcopy(model).double()
    whole = dense(exact, lambda bound: F.cross_entropy(bound(inputs.double()), targets))
    close(sl.hessian(exact, (inputs, targets)).dense(), whole)
    weighted = sl.trace(model, loader, loss=model.criterion)
    assert weighted.status == "exact"
    core = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    assert load_weights(core, tmp_path / "last.ckpt").startswith(
        "Weights: those under 'net.' in last.ckpt; left out: crit"
    )
    assert all(map(torch.equal, core.state_dict().values(), model.net.state_dict().values()))
    assert {row.name for row in sl.measure(model, loader, measures=["trace"], parts=[]).rows} == {"trace"}


def test_what_accelerate_prepared(untouched: Untouched) -> None:
    accelerate = pytest.importorskip("accelerate")
    inputs, targets = points()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)
    prepared, batches = accelerate.Accelerator(cpu=True).prepare(copy.deepcopy(plain), loader)
    with untouched(prepared):
        found = sl.sample_traces(prepared, batches)
    torch.testing.assert_close(found.values, sl.sample_traces(plain, (inputs, targets)).values)
    torch.testing.assert_close(sl.margins(prepared, batches).signed, sl.margins(plain, (inputs, targets)).signed)
    whole = dense(copy.deepcopy(plain).double(), lambda bound: F.cross_entropy(bound(inputs.double()), targets))
    close(sl.hessian(prepared.double(), batches).dense(), whole)
    assert sl.measure(prepared, batches, measures=["trace"], parts=[]).rows


# ---------------------------------------------------------------- torch_geometric


@pytest.fixture(scope="module")
def geometric() -> Any:
    pytest.importorskip("torch_geometric")
    import torch_geometric.data
    import torch_geometric.loader
    import torch_geometric.nn

    return torch_geometric


def graph_network(geometric: Any, convolution: str = "GCNConv", pooled: bool = False, whole: bool = False) -> nn.Module:
    """Two convolutions; `pooled` decides about graphs and not about nodes, `whole` takes a graph as one argument."""
    make = getattr(geometric.nn, convolution)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(3, 4), make(4, 3)

        def nodes(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    class OfNodes(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.nodes(x, edge_index)

    class OfGraphs(Net):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return geometric.nn.global_mean_pool(self.nodes(x, edge_index), batch)

    class OfData(Net):
        def forward(self, data: Any) -> Tensor:
            nodes = self.nodes(data.x, data.edge_index)
            return geometric.nn.global_mean_pool(nodes, data.batch) if pooled else nodes

    torch.manual_seed(0)
    return (OfData() if whole else OfGraphs() if pooled else OfNodes()).double().eval()


def a_graph(geometric: Any, nodes: int = 8, seed: int = 4, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(nodes, (2, 2 * nodes), generator=generator)
    x = torch.randn(nodes, 3, generator=generator).double()
    return geometric.data.Data(x=x, edge_index=edges, **more)


@pytest.mark.parametrize(
    ("convolution", "whole", "exact"),
    [("GCNConv", False, True), ("GCNConv", True, True), ("SAGEConv", False, True), ("GATConv", False, False)],
)
def test_nodes_of_a_graph_are_samples(
    geometric: Any, convolution: str, whole: bool, exact: bool, untouched: Untouched
) -> None:
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 0, 1]).bool()
    data = a_graph(geometric, y=torch.arange(8) % 3, train_mask=mask, test_mask=~mask)
    model, given = graph_network(geometric, convolution, whole=whole), (data,) if whole else (data.x, data.edge_index)
    matrix = dense(model, lambda bound: F.cross_entropy(bound(*given)[mask], data.y[mask]))
    with untouched(model):
        close(sl.hessian(model, data).dense(), matrix)
        traces = sl.sample_traces(model, data, seed=1)
    assert traces.exact == exact
    assert len(traces) == 5
    mean = traces.mean()
    assert abs(mean.value - float(matrix.trace())) <= 5 * mean.stderr + 1e-9
    margins = sl.margins(model, data, target="y[test_mask]")
    with torch.no_grad():
        expected = signed_margins(model(*given)[~mask], data.y[~mask])
    torch.testing.assert_close(margins.signed, expected)
    assert sl.measure(model, data, measures=["trace"], parts=[]).row("trace").kind == (
        "exact" if exact else "estimated"
    )


@pytest.mark.parametrize("whole", [False, True])
def test_graphs_of_a_loader_are_samples(geometric: Any, whole: bool) -> None:
    graphs = [a_graph(geometric, 3 + k, k, y=torch.tensor([k % 3])) for k in range(5)]
    model = graph_network(geometric, pooled=True, whole=whole)
    loaders = [geometric.loader.DataLoader(graphs, batch_size=size) for size in (5, 2, 1)]
    (batch,) = loaders[0]
    given = (batch,) if whole else (batch.x, batch.edge_index, batch.batch)
    matrix = dense(model, lambda bound: F.cross_entropy(bound(*given), batch.y))
    for loader in loaders:
        close(sl.hessian(model, loader).dense(), matrix)
        traces = sl.sample_traces(model, loader)
        assert traces.exact
        assert traces.mean().value == pytest.approx(float(matrix.trace()))
    shuffled = sl.sample_traces(model, geometric.loader.DataLoader(graphs, batch_size=2, shuffle=True))
    torch.testing.assert_close(shuffled.values, traces.values)
    assert shuffled.notes[-1].startswith("the data loader shuffles; its samples were read in the order")
    if not whole:
        with pytest.raises(InputError, match=r"torch_geometric.loader.DataLoader\(graphs\) makes batches"):
            sl.trace(model, graphs)


def test_graphs_that_are_refused(geometric: Any) -> None:
    with pytest.raises(InputError, match="a HeteroData has several kinds of nodes, and it is unclear which"):
        sl.trace(graph_network(geometric), geometric.data.HeteroData())
    with pytest.raises(InputError, match=r"not Data .*it was given the graph as one argument, as its for"):
        sl.trace(nn.Linear(3, 3).double(), a_graph(geometric, y=torch.arange(8) % 3))


# ---------------------------------------------------------------- timm

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """timm, with a stand-in for torchvision where there is none, which is gone afterwards: others ask for it too."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        monkeypatch.syspath_prepend(STAND_INS)
    before = set(sys.modules)
    yield pytest.importorskip("timm")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("torchvision", "timm"):
            del sys.modules[name]


def test_networks_of_timm(timm: Any, untouched: Untouched) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(3, 1, 32, 32), torch.arange(3)
    convolutional = timm.create_model("test_resnet", num_classes=3, in_chans=1).eval()
    with untouched(convolutional):
        traces = sl.sample_traces(convolutional, (inputs, targets))
    assert traces.exact
    fresh = timm.create_model("resnet18", num_classes=3, in_chans=1).eval()  # whole branches are 0 before a ReLU
    notes = sl.sample_traces(fresh, (inputs[:2], targets[:2]), params=["layer4.1.bn2.*", "fc.*"]).notes
    assert any("100% of the samples looked at sit exactly on a kink of a ReLU" in note for note in notes)
    tiny = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, depth=1, embed_dim=4, num_heads=2, num_classes=3, in_chans=1
    ).eval()
    small = torch.randn(3, 1, 8, 8).double()
    tiny = tiny.double()
    whole = dense(tiny, lambda bound: F.cross_entropy(bound(small), targets))
    found = sl.hessian(tiny, (small, targets)).dense()
    close(found, whole)
    mean = sl.trace(tiny, (small, targets))
    assert abs(mean.value - float(whole.trace())) <= 5 * mean.stderr
    assert len(sl.margins(tiny, (small, targets)).output) == 3
    assert sl.measure(tiny, (small, targets), measures=["trace"], parts=[]).rows


def test_timm_by_name_with_weights(timm: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(5)
    model = timm.create_model("test_resnet", num_classes=3)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    found = load_model("timm:test_resnet:num_classes=3", tmp_path / "w.safetensors")
    assert all(map(torch.equal, found.state_dict().values(), model.state_dict().values()))
    with pytest.raises(InputError, match="unknown timm network 'test_resnett': did you mean 'test_resnet"):
        load_model("timm:test_resnett")
    with pytest.raises(InputError, match=r"unknown timm network 'hf-hub'\. Known: aimv2_1b.* and 1,\d\d\d more\.$"):
        load_model("timm:hf-hub:someone/something=1")
    with pytest.raises(InputError, match=r"timm:test_resnet cannot be built with \{'depht': 3\}"):
        load_model("timm:test_resnet:depht=3")


def test_timm_without_torchvision_says_so() -> None:
    pytest.importorskip("timm" if "torchvision" in sys.modules else "transformers")
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(InputError, match=r"needs torchvision, .* run pip install 'spiritlevel\[timm\]'"):
            load_model("timm:resnet18")


# ---------------------------------------------------------------- folders: hf:FOLDER and data sets on disk


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    for name in ("bert", "gpt2", "vit", "t5"):
        network(transformers, name).save_pretrained(folder / name)
    batch = {key: value.tolist() for key, value in tokens(count=12).items()}
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int64")),
            "attention_mask": datasets.Sequence(datasets.Value("int8")),
            "labels": datasets.ClassLabel(names=["bad", "fair", "good"]),
            "text": datasets.Value("string"),
            "row": datasets.Value("int64"),
        }
    )
    data = datasets.Dataset.from_dict({**batch, "text": ["a"] * 12, "row": list(range(12))}, features=features)
    data.save_to_disk(folder / "data")
    datasets.DatasetDict({"train": data, "validation": data.select(range(4))}).save_to_disk(folder / "parts")
    flat = datasets.Dataset.from_dict({key: value.tolist() for key, value in text().items()})
    flat.save_to_disk(folder / "text")
    return folder


def test_a_saved_transformer_and_a_saved_data_set(saved: Path, transformers: Any) -> None:
    model = load_model(f"hf:{saved}/bert")
    same = network(transformers, "bert")
    batch = tokens()
    assert type(model) is type(same)
    torch.testing.assert_close(model(**batch).logits, same(**batch).logits)
    samples = load_samples(str(saved / "data"), model=model)
    inputs, targets = samples.data
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert targets.tolist() == tokens(count=12)["labels"].tolist()
    assert samples.classes == ("bad", "fair", "good")
    assert samples.notes == (
        "columns input_ids, attention_mask as inputs, labels as target",
        "columns left out because they hold no numbers: text",
        "columns left out because the model has no argument for them: row",
    )
    assert len(load_samples(f"{saved}/parts:validation", model=model).data[1]) == 4
    assert len(load_samples(f"{saved}/parts", model=model).data[1]) == 12
    with pytest.raises(InputError, match=r"has no part 'test'; write one of .*parts:train, .*parts:validation"):
        load_samples(f"{saved}/parts", "test", model=model)
    with pytest.raises(InputError, match=r"unknown column of .* 'lables': did you mean 'labels'"):
        load_samples(f"{saved}/data", target="lables", model=model)


def test_folders_from_the_command_line(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--measures", "weight_norm,trace", "--json", "r.json"]
    assert cli.main(["measure", f"hf:{saved}/bert", "--data", f"{saved}/data", "--samples", "6", *args]) == 0
    report = json.loads(Path("r.json").read_text())["report"]
    assert [row["name"] for row in report["rows"]] == ["weight_norm", "trace"]
    assert any("labels as target" in line for line in report["headline"])
    assert cli.main(["audit", f"hf:{saved}/bert", "--data", f"{saved}/data", "--measures", "weight_norm"]) == 0
    assert cli.main(["compare", f"hf:{saved}/bert", f"hf:{saved}/bert", "--data", f"{saved}/data", *args]) == 0
    text_args = ["--data", f"{saved}/text", "--loss", "causal_lm", *args]
    assert cli.main(["measure", f"hf:{saved}/gpt2", *text_args]) == 0
    assert cli.main(["measure", f"hf:{saved}/gpt2", *text_args, "--unit", "token"]) == 0
    assert cli.main(["measure", f"hf:{saved}/t5", "--data", f"{saved}/text", *args]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "decoder_input_ids made from labels" in said
    assert cli.main(["measure", f"hf:{saved}/vit", "--data", f"{saved}/data"]) == 2
    assert "the model's forward takes pixel_values" in capsys.readouterr().err


def test_no_code_of_a_folder_is_run(saved: Path, tmp_path: Path, transformers: Any) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(saved / "bert", folder)
    settings = json.loads((folder / "config.json").read_text())
    trace = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    settings |= {
        "auto_map": {"AutoModel": "modeling_own.Own"},
        "_attn_implementation": "someone/kernels",
        "attn_implementation": "someone/kernels",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    assert load_model(f"hf:{folder}").config._attn_implementation == "eager"
    for name in ("Own", "pipeline", "os.system", "BertConfig"):
        (folder / "config.json").write_text(json.dumps({**settings, "architectures": [name]}))
        with pytest.raises(InputError, match=f"asks for {name} .*; code in the folder is not run"):
            load_model(f"hf:{folder}")
    (folder / "config.json").write_text(json.dumps({**settings, "num_labels": 3, "num_hidden_layers": 2}))
    with pytest.raises(
        InputError, match=r"lack bert.encoder.layer.1\.\S+ and \d+ more, which Bert.* would draw at random"
    ):
        load_model(f"hf:{folder}")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=f"hf:{folder} cannot be read"):
        load_model(f"hf:{folder}")
    assert not trace.exists()


def test_columns_that_are_refused(tmp_path: Path, transformers: Any) -> None:
    datasets = pytest.importorskip("datasets")
    model = network(transformers, "bert")
    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [0, 1]}).save_to_disk(tmp_path / "ragged")
    with pytest.raises(InputError, match=r"the samples of the column 'input_ids' of .* differ in length; pad them"):
        load_samples(str(tmp_path / "ragged"), model=model)
    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "answer": ["a", "b"]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(InputError, match="needs --target, the column to predict: one of input_ids, answer"):
        load_samples(str(tmp_path / "texts"), model=model)
    with pytest.raises(InputError, match="the target 'answer' of the data set holds no numbers; turn it into classes"):
        load_samples(str(tmp_path / "texts"), target="answer", model=model)
    (tmp_path / "texts" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"is not a data set that save_to_disk\(\) wrote, or is damaged"):
        load_samples(str(tmp_path / "texts"), target="answer", model=model)


def test_images_in_a_data_set_are_read_and_never_fetched(tmp_path: Path, transformers: Any) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pixels = (images()["pixel_values"][:, 0] * 255).byte().numpy()
    kept = {"image": [Image.fromarray(each) for each in pixels], "label": [0, 1, 2, 0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    datasets.Dataset.from_dict(kept, features=features).save_to_disk(tmp_path / "images")
    samples = load_samples(str(tmp_path / "images"), model=network(transformers, "vit"))
    assert samples.classes == ("a", "b", "c")
    torch.testing.assert_close(samples.data[0], torch.from_numpy(pixels)[:, None].float() / 255)
    assert "bytes divided by 255" in samples.notes
    named = {"image": [{"bytes": None, "path": "http://127.0.0.1:9/x.png"}], "label": [0]}
    plain = {"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}, "label": features["label"]}
    datasets.Dataset.from_dict(named, features=datasets.Features(plain)).save_to_disk(tmp_path / "named")
    about = json.loads((tmp_path / "named" / "dataset_info.json").read_text())
    about["features"]["image"] = {"_type": "Image"}
    (tmp_path / "named" / "dataset_info.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"the image 0 of .* is not in the data set, which only says where it is"):
        load_samples(str(tmp_path / "named"), model=network(transformers, "vit"))
