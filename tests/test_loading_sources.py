"""Losses of one's own, tables, checkpoints of Lightning and exported programs, as the command line takes them."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import spiritlevel as sl
from spiritlevel import cli
from spiritlevel.errors import InputError
from spiritlevel.loading import load_loss, load_model, load_samples, load_weights, read_model
from spiritlevel.loading.exported import exported_program

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

def half(outputs, targets):
    return 0.5 * F.cross_entropy(outputs, targets, reduction="none")

def none():
    return None

smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
number = 3

def make():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(3, 2)
        self.rest = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    def forward(self, numbers, categories):
        return self.rest(torch.cat([numbers, self.names(categories[:, 0])], 1))

def batches():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(6, 2, generator=generator), "answer": torch.arange(6) % 3}]

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()
    def forward(self, x):
        return {"scores": self.inner(x), "other": x}
"""

PENGUINS = """species,mass,male,island,flipper
gentoo,4.5,true,Biscoe,210
adelie,3.5,false,Dream,190
gentoo,5.0,true,Biscoe,220
adelie,3.7,true,Torgersen,195
gentoo,4.8,false,Dream,215
adelie,3.4,false,Dream,185
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("penguins.csv").write_text(PENGUINS)
    np.savez("train.npz", x=np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32), y=np.arange(12) % 3)
    return tmp_path


# ---------------------------------------------------------------- losses


def test_a_loss_is_a_name_a_function_or_an_object(folder: Path) -> None:
    assert load_loss("squared_error") == "squared_error"
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    expected = 0.5 * nn.functional.cross_entropy(outputs, targets, reduction="none")
    assert torch.equal(load_loss("own.py:half")(outputs, targets), expected)
    assert isinstance(load_loss("own.py:smooth"), nn.CrossEntropyLoss)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("own.py", "the loss 'own.py' names no function: write own.py:function."),
        (
            "own.py:none",
            r"the loss own.py:none must take \(outputs, targets\) and return one number per sample, .* \(\)\.",
        ),
        ("own.py:number", r"must be a function of \(outputs, targets\), got int; name a function\."),
        ("own.py:Mixed", r"got a class; name an instance of it, as loss = Mixed\(\.\.\.\)\."),
        ("own.py:hlf", "own.py has no 'hlf'; did you mean 'half'"),
    ],
)
def test_losses_that_cannot_be_had(folder: Path, spec: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_loss(spec)


def test_a_loss_of_ones_own_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", "train.npz", "--measures", "trace", "--json", "r.json"]
    found = {}
    for loss in ("own.py:half", "own.py:smooth"):
        assert cli.main(["measure", "own.py:make", *common, "--loss", loss]) == 0
        found[loss] = json.loads(Path("r.json").read_text())["report"]["rows"][0]["value"]["value"]
    model, data = load_model("own.py:make"), load_samples("train.npz").data
    assert found["own.py:half"] == pytest.approx(float(sl.trace(model, data).value) / 2, rel=0.2)  # one is estimated
    exact = float(sl.trace(model, data, loss=nn.CrossEntropyLoss(label_smoothing=0.1)).value)
    assert found["own.py:smooth"] == pytest.approx(exact)
    capsys.readouterr()


def test_keys_and_outputs_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["own.py:Named", "--data", "own.py:batches", "--target", "answer", "--measures", "trace", "--json", "r.json"]
    assert cli.main(["measure", *args, "--output", "scores"]) == 0
    found = json.loads(Path("r.json").read_text())["report"]["rows"][0]["value"]["value"]
    (batch,) = load_samples("own.py:batches").data
    expected = sl.trace(load_model("own.py:Named"), [batch], target="answer", output="scores")
    assert found == pytest.approx(float(expected.value))
    assert cli.main(["audit", *args[:5], "--measures", "weight_norm", "--output", "scores", "--samples", "4"]) == 0
    assert cli.main(["compare", "own.py:Named", *args[:5], "--measures", "weight_norm", "--output", "scores"]) == 0
    capsys.readouterr()
    assert cli.main(["measure", *args]) == 2
    assert "it returned a dict with the keys 'scores', 'other'; say with --output" in capsys.readouterr().err


def test_the_model_may_be_given_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["measure", "--model", "own.py:make", "--data", "train.npz", "--measures", "weight_norm"]) == 0
    assert "own.py:make: 27 parameters" in capsys.readouterr().out
    assert cli.main(["compare", "--a", "own.py:make", "--data", "train.npz"]) == 2
    assert "unknown option '--a'" in capsys.readouterr().err


# ---------------------------------------------------------------- tables


def test_a_table_of_numbers_and_categories(folder: Path) -> None:
    found = load_samples("penguins.csv", target="species")
    (numbers, categories), targets = found.data
    assert numbers.dtype == torch.float32
    assert numbers[:2].tolist() == [[4.5, 1.0, 210.0], [3.5, 0.0, 190.0]]
    assert categories[:, 0].tolist() == [0, 1, 0, 2, 1, 1]
    assert targets.tolist() == [1, 0, 1, 0, 1, 0]
    assert found.classes == ("adelie", "gentoo")
    assert found.name == "penguins.csv (target species)"
    assert found.notes == (
        "columns taken as numbers: mass, male, flipper",
        "columns taken as codes, for model(numbers, categories): island ('Biscoe' 0, 'Dream' 1, 'Torgersen' 2)",
        "target species ('adelie' 0, 'gentoo' 1)",
    )


def test_parquet_says_the_same_as_csv(folder: Path) -> None:
    frame = pl.read_csv("penguins.csv")
    frame.with_columns(
        pl.col("island").cast(pl.Categorical), pl.col("species").cast(pl.Enum(["gentoo", "adelie"]))
    ).write_parquet("penguins.parquet")
    (numbers, categories), targets = load_samples("penguins.parquet", target="species").data
    (same, codes), others = load_samples("penguins.csv", target="species").data
    assert torch.equal(numbers, same)
    assert torch.equal(categories, codes)
    assert torch.equal(targets, 1 - others), "an Enum keeps its own order"


def test_targets_of_every_kind(folder: Path) -> None:
    for column, kind in (("flipper", torch.int64), ("mass", torch.float32), ("male", torch.int64)):
        found = load_samples("penguins.csv", target=column)
        assert found.data[1].dtype == kind
        assert found.classes == (("false", "true") if column == "male" else ())
    assert "target flipper as classes, as they stand" in load_samples("penguins.csv", target="flipper").notes
    assert "target mass as numbers" in load_samples("penguins.csv", target="mass").notes
    pl.DataFrame({"": [0, 1, 2], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}).write_csv("index.csv")
    found = load_samples("index.csv", target="y")
    assert found.data[0].shape == (3, 1)
    assert found.notes[-1] == "left out: '', the row numbers"


def test_a_test_table_takes_the_codes_of_its_training_table(folder: Path) -> None:
    train = load_samples("penguins.csv", target="species")
    Path("test.csv").write_text("flipper,island,species,mass,male\n200,Torgersen,gentoo,4,true\n")
    test = load_samples("test.csv", target="species", like=train)
    (numbers, categories), targets = test.data
    assert (numbers.tolist(), categories.tolist(), targets.tolist()) == ([[4.0, 1.0, 200.0]], [[2]], [1])
    for text, sentence in (
        (
            "200,Mars,gentoo,4,true",
            "test.csv: the column 'island' holds 'Mars', but the training data hold only Biscoe",
        ),
        ("200,Dream,chinstrap,4,true", "the column 'species' holds 'chinstrap', but the training data hold only"),
        ("200,Dream,gentoo,fat,true", "test.csv: the column 'mass' holds texts, but numbers in the training data"),
        ("200,1,gentoo,4,true", "test.csv: the column 'island' holds numbers, but texts in the training data"),
    ):
        Path("test.csv").write_text(f"flipper,island,species,mass,male\n{text}\n")
        with pytest.raises(InputError, match=sentence):
            load_samples("test.csv", target="species", like=train)
    for head, sentence in (
        ("flipper,island,species,mass", "lacks the column 'male'"),
        ("x,flipper,island,species,mass,male", "also has the column 'x'"),
    ):
        Path("test.csv").write_text(f"{head}\n{','.join(['1'] * len(head.split(',')))}\n")
        with pytest.raises(InputError, match=f"test.csv {sentence}; it must have the columns of penguins.csv"):
            load_samples("test.csv", target="species", like=train)


@pytest.mark.parametrize(
    ("text", "target", "sentence"),
    [
        ("a,b\n1,2\n", None, "the table t.csv needs --target, the column to predict: one of a, b."),
        ("a,b\n1,2\n", "c", "unknown column of t.csv 'c'"),
        ("a,b\n", "b", "the table t.csv has columns but no rows."),
        ("b\n1\n", "b", "the table t.csv has no column besides the target 'b'."),
        ("a,b\n1,2\nNA,3\n", "b", "t.csv: 1 of 2 values of 'a' are missing; fill them in or leave those rows out"),
        ("a,b\n1.5,2\n,3\n", "b", "t.csv: 1 of 2 values of 'a' are missing"),
        ("a,b\ninf,2\n1.5,3\n", "b", "the column 'a' holds infinite numbers"),
        ("", "b", "t.csv is not a readable .csv table"),
        ("a;b\n1,5;0\n", "b", "t.csv separates its columns by ';'; save it with commas"),
        ("a\tb\n1\t0\n", "b", r"t.csv separates its columns by '\\t'; save it with commas"),
        ("a,b\n" + "".join(f"n{i},1\n" for i in range(60)), "b", "holds 60 different texts in 60 rows, too many for"),
    ],
)
def test_tables_that_are_refused(folder: Path, text: str, target: str | None, sentence: str) -> None:
    Path("t.csv").write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_samples("t.csv", target=target)


def test_a_table_may_have_tabs(folder: Path) -> None:
    Path("t.csv").write_text("a,b,y\n0.5,x,1\n1.5,z,0\n")
    Path("t.tsv").write_text("a\tb\ty\n0.5\tx\t1\n1.5\tz\t0\n")
    commas, tabs = (load_samples(name, target="y") for name in ("t.csv", "t.tsv"))
    for first, second in zip((*commas.data[0], commas.data[1]), (*tabs.data[0], tabs.data[1]), strict=True):
        assert torch.equal(first, second)
    Path("t.tsv").write_text("a,b,y\n0.5,x,1\n")
    with pytest.raises(InputError, match=r"t\.tsv separates its columns by ','; save it with tabs"):
        load_samples("t.tsv", target="y")


def test_other_columns_and_other_files_are_refused(folder: Path) -> None:
    import datetime

    pl.DataFrame({"when": [datetime.date(2020, 1, 1)], "y": [1]}).write_parquet("dates.parquet")
    with pytest.raises(InputError, match="the column 'when' holds date, which is neither a number nor a category"):
        load_samples("dates.parquet", target="y")
    Path("broken.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(InputError, match=r"broken.parquet is not a readable .parquet table"):
        load_samples("broken.parquet", target="y")
    with pytest.raises(InputError, match="there is no file"):
        load_samples("absent.csv", target="y")
    for spec in ("train.npz", "digits"):
        with pytest.raises(InputError, match=f"--target y names a column of a table, but {spec} has its own targets"):
            load_samples(spec, target="y")


@pytest.mark.parametrize(
    ("head", "row", "sentence"),
    [
        (
            "id,a,b,y",
            "{i},0.5,{i}.25,{c}",
            r"the table t.csv has 3 columns besides the target 'y' \(id, a, b\), but the model Sequential takes 2 "
            "numbers a row; save it with the columns that the network was trained on, in their order, which 'id' "
            r"hardly is: it numbers the rows\.$",
        ),
        (
            "a,y",
            "0.5,{c}",
            r"has 1 column besides the target 'y' \(a\), but the model Sequential takes 2 numbers a row; .* order\.$",
        ),
        (
            "a,b,kind,y",
            "0.5,0.25,k{c},{c}",
            r"has 3 columns besides the target 'y' \(a, b, kind \(codes\)\), but the model Sequential fails on them: .*"
            "takes 2 positional arguments but 3 were given; save it with",
        ),
    ],
)
def test_a_table_with_other_columns_than_the_network_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], head: str, row: str, sentence: str
) -> None:
    rows = (row.format(i=i, c=i % 3) for i in range(12))
    Path("t.csv").write_text("\n".join([head, *rows, ""]))
    with pytest.raises(InputError, match=sentence):
        load_samples("t.csv", target="y", model=net())
    Path("plain.py").write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(2, 3))\n")
    assert cli.main(["measure", "plain.py:make", "--data", "t.csv", "--target", "y"]) == 2
    assert re.search(sentence, capsys.readouterr().err.strip())


def test_a_table_from_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["own.py:Mixed", "--data", "penguins.csv", "--test", "penguins.csv", "--target", "species"]
    assert cli.main(["measure", *args, "--measures", "trace", "--json", "r.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "columns taken as numbers: mass, male, flipper" in said
    report = json.loads(Path("r.json").read_text())["report"]
    assert report["settings"]["train data"] == "penguins.csv (target species)"
    first, weights, *_, target = report["headline"]  # what a page shows above its numbers is what was measured
    assert first.startswith("It classifies")
    assert weights.startswith("Weights: as own.py:Mixed built them")
    assert target.startswith("target species (")
    for command in (["audit", "own.py:Mixed"], ["compare", "own.py:Mixed", "own.py:Mixed"]):
        assert cli.main([*command, "--data", "penguins.csv", "--target", "species", "--measures", "weight_norm"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "('Biscoe' 0," in " ".join(lines)
        assert max(len(line) for line in lines if "codes" in line) <= 80  # how a table was read is no table
    expected = sl.trace(load_model("own.py:Mixed"), load_samples("penguins.csv", target="species").data)
    assert report["rows"][0]["value"]["value"] == pytest.approx(float(expected.value))


# ---------------------------------------------------------------- checkpoints of Lightning


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))


def lightning(path: Path, state: dict[str, Any], **more: Any) -> None:
    """A checkpoint as Lightning writes it, with objects beside the weights."""
    torch.save(
        {
            "epoch": 3,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": state,
            "hyper_parameters": {
                "activation": functools.partial(torch.add, alpha=2),
                "args": argparse.Namespace(lr=0.1),
            },
            **more,
        },
        path,
    )


@pytest.mark.parametrize("prefix", ["model.", "net.", "core.backbone."])
def test_the_prefix_of_a_lightning_checkpoint_is_taken_off(tmp_path: Path, prefix: str) -> None:
    trained, model = net(), net()
    state = {prefix + name: tensor for name, tensor in trained.state_dict().items()}
    lightning(tmp_path / "last.ckpt", {**state, "criterion.weight": torch.ones(3)})
    note = load_weights(model, tmp_path / "last.ckpt")
    assert note == f"Weights: those under {prefix!r} in last.ckpt; left out: criterion.weight."
    assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))


def test_a_lightning_checkpoint_that_fits_as_it_is_or_not_at_all(tmp_path: Path) -> None:
    trained, model = net(), net()
    lightning(tmp_path / "whole.ckpt", trained.state_dict())
    assert load_weights(model, tmp_path / "whole.ckpt") == ""
    state = {f"{part}.{name}": t for part in ("student", "teacher") for name, t in trained.state_dict().items()}
    lightning(tmp_path / "two.ckpt", state)
    with pytest.raises(InputError, match=r"the weights in two.ckpt do not fit the model Sequential"):
        load_weights(model, tmp_path / "two.ckpt")


def leave(trace: Path) -> None:
    trace.touch()


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return leave, (self.trace,)


class Command(Payload):
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("kind", [Payload, Command])
def test_what_lies_beside_the_weights_is_never_opened(tmp_path: Path, kind: type[Payload]) -> None:
    trace = tmp_path / "ran"
    path = tmp_path / "last.ckpt"
    lightning(path, net().state_dict(), callbacks={"x": kind(trace)})
    torch.load(path, weights_only=False)
    assert trace.exists(), "the payload is live"
    trace.unlink()
    if kind is Payload:
        load_weights(net(), path)
    else:
        with pytest.raises(InputError, match="not opened, because that could run a program"):
            load_weights(net(), path)
    lightning(path, {**net().state_dict(), "0.weight": kind(trace)})
    with pytest.raises(InputError, match=r"must hold a dict of tensors|could run a program"):
        load_weights(net(), path)
    path.write_bytes(pickle.dumps({"state_dict": kind(trace)}))
    with pytest.raises(InputError, match=r"last.ckpt is not a PyTorch checkpoint, or is damaged"):
        load_weights(net(), path)
    assert not trace.exists()


# ---------------------------------------------------------------- exported programs

ANY = {0: torch.export.Dim.AUTO}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(3 * 16, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.out(self.drop(hidden.view(x.shape[0], -1)))


class Tied(nn.Module):
    """An attention layer, a tied weight, a split, two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(7, 4), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.out = nn.Linear(4, 7)
        self.out.weight = self.embed.weight
        self.register_buffer("place", torch.randn(5, 4))

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(self.embed(ids) + self.place)
        first, second = hidden.mean(1).chunk(2, dim=1)
        return {"logits": self.out(torch.cat([second, first], 1)), "hidden": hidden}


def saved(model: nn.Module, inputs: torch.Tensor, path: Path) -> Path:
    torch.export.save(torch.export.export(model, (inputs,), dynamic_shapes=(ANY,)), path)
    return path


def test_a_program_is_measured_through_its_graph(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Convolutional().eval()
    inputs, targets = torch.randn(9, 1, 6, 6), torch.arange(9) % 3
    loaded = read_model(str(saved(model, inputs[:4], tmp_path / "net.pt2")))
    assert loaded.note == ""
    assert [name for name, _ in loaded.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.equal(loaded.model(inputs), model(inputs))
    there, here = (sl.sample_traces(each, (inputs, targets)) for each in (loaded.model, model))
    assert there.exact
    torch.testing.assert_close(there.values, here.values)
    double = load_model(str(tmp_path / "net.pt2"), dtype="float64")
    torch.testing.assert_close(
        sl.hessian(double, (inputs.double(), targets)).dense(),
        sl.hessian(model.double(), (inputs.double(), targets)).dense(),
        rtol=1e-9,
        atol=1e-12,
    )


def test_a_program_keeps_ties_constants_and_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied().eval()
    ids, targets = torch.randint(7, (6, 5)), torch.arange(6)
    found = exported_program(saved(model, ids[:3], tmp_path / "net.pt2"))
    torch.testing.assert_close(found(ids)["logits"], model(ids)["logits"])
    assert {name for name, _ in found.named_parameters()} == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(sl.trace(found, (ids, targets)).value, sl.trace(model, (ids, targets)).value)


def rewritten(path: Path, change: Any) -> Path:
    """The archive with another graph, or other tables of weights."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for name in files:
        if name.endswith(".json"):
            files[name] = json.dumps(change(name.rsplit("/", 1)[-1], json.loads(files[name]))).encode()
    out = path.with_name("changed.pt2")
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(Convolutional().eval(), torch.randn(4, 1, 6, 6), tmp_path_factory.mktemp("program") / "net.pt2")


def test_programs_that_fit_one_batch_or_train_are_refused(tmp_path: Path) -> None:
    model, inputs = Convolutional(), torch.randn(4, 1, 6, 6)
    torch.export.save(torch.export.export(model.eval(), (inputs,)), tmp_path / "fixed.pt2")
    with pytest.raises(InputError, match=r"fixed.pt2 was exported for batches of exactly 4; .*Dim.AUTO"):
        load_model(str(tmp_path / "fixed.pt2"))
    saved(model.train(), inputs, tmp_path / "train.pt2")
    with pytest.raises(
        InputError, match=r"train.pt2 was exported in training mode \(\w+\); call model.eval\(\) before"
    ):
        load_model(str(tmp_path / "train.pt2"))


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.load",
        "torch.hub.load",
        "torch.ops.aten.from_file.default",
        "#x:y",
        "_operator.methodcaller",
    ],
)
def test_only_operations_of_aten_are_taken_from_a_program(program: Path, target: str) -> None:
    def change(name: str, found: Any) -> Any:
        if name == "model.json":
            found["graph_module"]["graph"]["nodes"][0]["target"] = target
        return found

    with pytest.raises(InputError, match=r"but only operations of torch.ops.aten are run from a file"):
        exported_program(rewritten(program, change))


def test_nothing_of_a_program_is_evaluated_or_unpickled(program: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    hostile = f"__import__('os').system('touch {trace}')"

    def expressions(name: str, found: Any) -> Any:
        if name == "model.json":
            for meta in found["graph_module"]["graph"]["tensor_values"].values():
                for size in meta["sizes"]:
                    if "as_expr" in size:
                        size["as_expr"]["expr_str"] = hostile
            found["guards_code"] = [hostile]
            found["range_constraints"] = {hostile: {"min_val": 0, "max_val": None}}
        return found

    changed = rewritten(program, expressions)
    assert exported_program(changed)(torch.randn(2, 1, 6, 6)).shape == (2, 3)
    assert not trace.exists()
    with pytest.raises(Exception, match=r".*"):  # and PyTorch's own reader evaluates them
        torch.export.load(changed)
    assert trace.exists()
    trace.unlink()

    def pickled(name: str, found: Any) -> Any:
        if name == "model_weights_config.json":
            found["config"]["conv.weight"]["use_pickle"] = True
        return found

    with pytest.raises(InputError, match=r"holds conv.weight as a pickled object, which is not opened"):
        exported_program(rewritten(program, pickled))


def test_names_in_a_program_are_no_code(program: Path) -> None:
    def argument(name: str, found: Any) -> Any:
        text = (
            json.dumps(found)
            .replace('"name": "x"', '"name": "x=print(1)"')
            .replace('"x": {"dtype"', '"x=print(1)": {"dtype"')
        )
        return json.loads(text) if name == "model.json" else found

    with pytest.raises(InputError, match=r"the argument 'x=print\(1\)' does not have a valid Python name"):
        exported_program(rewritten(program, argument))

    def weight(name: str, found: Any) -> Any:
        return json.loads(json.dumps(found).replace("conv.weight", "conv.weight);print(1"))

    with pytest.raises(InputError, match=r"the weight 'conv.weight\);print\(1' does not have a valid Python name"):
        exported_program(rewritten(program, weight))


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 half a zip"])
def test_files_that_are_no_programs(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net.pt2").write_bytes(content)
    with pytest.raises(InputError, match=r"net.pt2 is not a program that torch.export.save\(\) wrote, or is damaged"):
        load_model(str(tmp_path / "net.pt2"))
    with pytest.raises(InputError, match="there is no file"):
        load_model(str(tmp_path / "absent.pt2"))
    buffer = io.BytesIO()
    torch.save({}, buffer)
    (tmp_path / "weights.pt2").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="is not a program"):
        load_model(str(tmp_path / "weights.pt2"))


def test_a_program_of_another_version_is_refused(program: Path) -> None:
    def change(name: str, found: Any) -> Any:
        if name == "model.json":
            found["schema_version"]["major"] = 7
        return found

    with pytest.raises(
        InputError, match=r"was saved by torch 2.*, in a format that torch .* does not write; export the model again"
    ):
        exported_program(rewritten(program, change))


# ---------------------------------------------------------------- folders of transformers: what needs no package


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"must be a folder that save_pretrained\(\) has written: it has no config.json"),
        ({"adapter_config.json": "{}"}, r"holds an adapter \(peft\), without the model that it belongs to"),
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            "has no model.safetensors; other files of weights are not opened",
        ),
        ({"config.json": "{", "model.safetensors": ""}, "config.json is not JSON"),
        ({"config.json": "[]", "model.safetensors": ""}, "must hold a configuration, got a list"),
        ({"config.json": '{"quantization_config": {"bits": 4}}', "model.safetensors": ""}, "holds quantised weights"),
    ],
)
def test_folders_of_transformers_that_are_refused(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_model(f"hf:{tmp_path}")
    with pytest.raises(InputError, match="but it does not exist"):
        load_model(f"hf:{tmp_path}/absent")
