"""Whatever a user may name on the command line: it is loaded, or refused in one sentence, and nothing of it is run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import spiritlevel as sl
from spiritlevel import loading
from spiritlevel.errors import InputError
from spiritlevel.loading import arrays, check_classes, load_model, load_samples, load_weights
from spiritlevel.loading.weights import read_tensors

NET = """
import torch
from torch import nn
from helper import WIDTH
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
def broken():
    raise RuntimeError("no luck\\nand more")
def exits():
    raise SystemExit(3)
number = 3
def points():
    return torch.zeros(4, 1, 8, 8), torch.arange(4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "helper.py").write_text("WIDTH = 5\n")
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    (tmp_path / "worse.py").write_text("1 / 0\n")
    return tmp_path


def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))


# ---------------------------------------------------------------- models and weights


def test_a_model_without_weights_is_the_same_in_every_run(folder: Path) -> None:
    for spec in ("net.py:make", "lenet5:width=0.5"):
        torch.manual_seed(1)
        one, before = load_model(spec).state_dict(), torch.get_rng_state()
        torch.manual_seed(2)
        two, other = load_model(spec).state_dict(), load_model(spec, seed=3).state_dict()
        assert all(map(torch.equal, one.values(), two.values()))
        assert not all(map(torch.equal, one.values(), other.values()))
        torch.manual_seed(1)
        assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(InputError, match="seed must be a whole number from 0 to 4,000,000,000, got -1"):
        load_model("lenet5", seed=-1)


def test_weights_that_were_not_loaded_are_told() -> None:
    assert loading.about_weights("lenet5:width=0.5", None) == "Weights: as built, not trained."
    assert "net.py:make built them, not trained unless" in loading.about_weights("net.py:make", None)
    assert loading.about_weights("lenet5", "w.pt") == ""


def test_what_was_done_to_bytes_is_told(tmp_path: Path) -> None:
    def kept(name: str, array: np.ndarray) -> loading.Samples:
        np.savez(tmp_path / name, x=array, y=np.zeros(len(array), dtype=np.int64))
        return load_samples(str(tmp_path / name))

    bright = np.full((3, 8, 8), 200, dtype=np.uint8)
    found = kept("grey.npz", bright)
    assert found.notes == ("bytes divided by 255", "a channel axis added, (8, 8) to (1, 8, 8)")
    assert found.name == "grey.npz (bytes divided by 255; a channel axis added, (8, 8) to (1, 8, 8))"
    last = kept("last.npz", np.repeat(bright[..., None], 3, axis=3))
    assert last.notes[1] == "channels moved to the front, (8, 8, 3) to (3, 8, 8)"
    faint = kept("faint.npz", np.full((3, 1, 8, 8), 16, dtype=np.uint8))
    assert "the largest byte is 16, so all inputs lie in [0, 0.063]" in faint.notes[1]
    floats = kept("floats.npz", bright.astype(np.float32))
    assert (floats.name, floats.notes) == ("floats.npz", ())


def test_models_from_files_modules_and_names(folder: Path) -> None:
    path = list(sys.path)
    assert isinstance(load_model("net.py:make"), nn.Sequential)
    assert isinstance(load_model(f"{folder}/net.py:make"), nn.Sequential)
    assert isinstance(load_model("net:make"), nn.Sequential)
    assert sl.models.count(load_model("lenet5:channels=3,classes=7,activation=tanh")) < 62006
    assert next(load_model("mlp", dtype="float64").parameters()).dtype == torch.float64
    assert sys.path == path


def versions(folder: Path, *, layers: str = "layers", head: str = "") -> None:
    """v1 and v2, each with a network and, beside it, a module of the same name with another width."""
    for name, width in (("v1", 3), ("v2", 7)):
        (folder / name).mkdir()
        (folder / name / "net.py").write_text(
            f"{head}\nfrom {layers} import make\nfrom {layers} import WIDTH\n"
            f"def late():\n    from torch import nn\n    class Late(nn.Module):\n        def forward(self, x):\n"
            f"            from {layers} import WIDTH\n            return x[:, :WIDTH]\n    return Late()\n"
        )
        file = (folder / name).joinpath(*layers.split(".")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"from torch import nn\nWIDTH = {width}\ndef make():\n    return nn.Linear(2, WIDTH)\n")


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ("layers", ""),
        ("parts.layers", ""),  # a package without __init__.py
        ("src.layers", "import src"),
        ("layers_of_mine", "import sys, pathlib; sys.path.append(str(pathlib.Path(__file__).parent))"),
    ],
)
def test_two_files_do_not_share_the_modules_beside_them(tmp_path: Path, layers: str, head: str) -> None:
    versions(tmp_path, layers=layers, head=head)
    before = set(sys.modules)
    for name, width in [("v1", 3), ("v2", 7), ("v1", 3), ("v2", 7)]:
        assert load_model(f"{tmp_path}/{name}/net.py:make").out_features == width
    assert not {name for name in set(sys.modules) - before if name.endswith("layers")}, "a name of two means neither"


def test_a_model_that_imports_while_it_runs_never_gets_the_modules_of_another(tmp_path: Path) -> None:
    versions(tmp_path)
    first = load_model(f"{tmp_path}/v1/net.py:late")
    assert first(torch.zeros(1, 9)).shape == (1, 3)
    second = load_model(f"{tmp_path}/v2/net.py:late")
    for model in (first, second):
        with pytest.raises(ModuleNotFoundError, match="layers"):
            model(torch.zeros(1, 9))


def test_a_module_of_the_calling_program_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "v1")
    import layers

    monkeypatch.setitem(sys.modules, "layers", layers)
    assert load_model(f"{tmp_path}/v2/net.py:make").out_features == 7
    assert sys.modules["layers"] is layers
    assert load_model(f"{tmp_path}/v1/net.py:make").out_features == 3
    assert sys.modules["layers"] is layers


def test_what_is_installed_or_built_in_is_never_put_aside(tmp_path: Path) -> None:
    for name in ("sys", "random", "numpy", "__main__"):
        (tmp_path / f"{name}.py").write_text("1 / 0\n")
    for name in ("spiritlevel", "torch"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.py").write_text("import numpy, random, sys\nfrom torch import nn\nnet = nn.Linear(2, 3)\n")
    before = dict(sys.modules)
    assert load_model(f"{tmp_path}/net.py:net").out_features == 3
    assert {name: sys.modules.get(name) for name in before} == before


def test_what_two_files_import_from_one_place_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "shared_parts.py").write_text("from torch import nn\nclass Part(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "common")
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text("from shared_parts import Part\ndef make():\n    return Part(2, 2)\n")
    one, two = (load_model(f"{tmp_path}/{name}/net.py:make") for name in ("v1", "v2"))
    assert type(one) is type(two)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lenet", r"neither file\.py:function nor .* did you mean 'lenet5'\?"),
        ("lenet5:chanels=3", "unknown option of lenet5 'chanels': did you mean 'channels'"),
        ("lenet5:3", "options of lenet5 are written as lenet5:channels=3,width=0.5, got '3'"),
        ("lenet5:channels=x", "channels must be a whole number, got 'x'"),
        ("net.py:mak", r"net\.py has no 'mak'; did you mean 'make'"),
        ("net.py:broken", r"called without arguments, fails: RuntimeError: no luck \(net\.py, line 8\)\."),
        ("net.py:exits", "fails: SystemExit: 3"),
        ("net.py:number", r"must be or return a torch\.nn\.Module, got int"),
        ("none.py:make", r"there is no file 'none\.py'"),
        ("nowhere/none.py:make", r"there is no file 'nowhere/none\.py'"),
        (":make", "':make' names no file; write file.py:function"),
        ("net.py:", "'net.py:' names no function; write file.py:function"),
        ("net.py:make:width=8", "options such as width=8 are for built-in networks and timm; in place of net.py:make"),
        ("bad.py:make", "cannot be imported: No module named 'no_such_module'"),
        ("worse.py:make", "fails while it is imported: ZeroDivisionError"),
        ("no.such.module:make", "cannot be imported"),
    ],
)
def test_models_that_cannot_be_had(folder: Path, spec: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cuda:99"}, "cannot be moved to device 'cuda:99'"),
        ({"device": "hpu"}, "cannot be moved to device 'hpu'"),
        ({"device": "privateuseone"}, "cannot be moved to device 'privateuseone'"),
        ({"device": ""}, "cannot be moved to device ''"),
        ({"device": "meta"}, "cannot be measured on the device 'meta', which keeps shapes"),
        ({"dtype": "float46"}, "unknown dtype 'float46'"),
    ],
)
def test_devices_and_dtypes_that_do_not_exist(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_model("mlp", **options)  # type: ignore[arg-type]


def test_weights_in_every_form(tmp_path: Path) -> None:
    source = make()
    state = source.state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "c.pt")
    for name in ("a.safetensors", "b.pt", "c.pt"):
        target = make()
        load_weights(target, tmp_path / name)
        assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())


def test_weights_that_do_not_fit_name_the_first_differences_and_the_nearest_names(tmp_path: Path) -> None:
    renamed = {key.replace("1.weight", "1.weigth"): value for key, value in make().state_dict().items()}
    save_file(renamed, tmp_path / "renamed.safetensors")
    with pytest.raises(
        InputError, match=r"1\.weight is missing \(the file has 1\.weigth\); the model has no 1\.weigth"
    ):
        load_weights(make(), tmp_path / "renamed.safetensors")
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    torch.save(wide.state_dict(), tmp_path / "wide.pt")
    with pytest.raises(InputError, match=r"1\.weight has shape \(6, 64\) instead of \(5, 64\)"):
        load_weights(make(), tmp_path / "wide.pt")


def test_weights_with_another_prefix_are_refused_at_once(tmp_path: Path) -> None:
    """Every missing name was compared with every name of the file: 140 seconds for a network of some size."""
    whole = nn.Module()
    for block in range(15):
        for layer in range(10):
            whole.add_module(f"encoder_block_{block}_layer_{layer}", nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    torch.save({f"backbone.{key}": value for key, value in whole.state_dict().items()}, tmp_path / "w.pt")
    torch.save({f"{key}.v{key[::-1]}": value for key, value in whole.state_dict().items()}, tmp_path / "other.pt")
    assert len(whole.state_dict()) == 1050
    begin = time.process_time()
    with pytest.raises(InputError, match=r"the file's names begin with 'backbone\.', as backbone\.encoder_block_0_"):
        load_weights(whole, tmp_path / "w.pt")
    with pytest.raises(InputError, match="and 2,097 more differences"):
        load_weights(whole, tmp_path / "other.pt")
    assert time.process_time() - begin < 5
    part = nn.ModuleDict({"net": make()})
    torch.save(make().state_dict(), tmp_path / "part.pt")
    with pytest.raises(
        InputError, match=r"the model's names begin with 'net\.', as net\.1\.weight, but the file's do not"
    ):
        load_weights(part, tmp_path / "part.pt")


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.zeros(1, 2, dtype=torch.complex64), "weight holds complex64 but the model float32: the imaginary part"),
        (torch.ones(1, 2, dtype=torch.int8), "weight holds int8 but the model float32: whole numbers have lost"),
        (torch.ones(1, 2, dtype=torch.bool), "weight holds bool but the model float32"),
        (torch.zeros(1, 2).to_sparse(), "weight is sparse; save it as dense floats"),
        (torch.zeros(1, 2, device="meta"), "weight has a shape but no numbers"),
    ],
)
def test_weights_that_would_lose_something_are_refused(tmp_path: Path, tensor: torch.Tensor, sentence: str) -> None:
    torch.save({"weight": tensor, "bias": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=sentence):
        load_weights(nn.Linear(2, 1), tmp_path / "w.pt")


def test_counts_that_were_saved_as_floats_must_be_whole(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(2)
    for count in (3.0, 3.5):
        torch.save({**norm.state_dict(), "num_batches_tracked": torch.tensor(count)}, tmp_path / "w.pt")
        if count == 3:
            load_weights(norm, tmp_path / "w.pt")
            assert int(norm.num_batches_tracked or 0) == 3
            continue
        with pytest.raises(InputError, match="num_batches_tracked holds float32 but the model int64: the fractions"):
            load_weights(norm, tmp_path / "w.pt")


@pytest.mark.parametrize("keys", [(0, 1), ("weight", 1)])
def test_weights_without_names_are_refused(tmp_path: Path, keys: tuple[object, object]) -> None:
    torch.save(dict(zip(keys, nn.Linear(2, 1).state_dict().values(), strict=True)), tmp_path / "w.pt")
    with pytest.raises(
        InputError, match=r"must name its tensors as model\.state_dict\(\) does, but one is called [01]\."
    ):
        load_weights(nn.Linear(2, 1), tmp_path / "w.pt")


def test_a_packed_checkpoint_is_refused_by_the_size_that_it_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"weight": torch.zeros(2**24 + 2**20)}, tmp_path / "plain.pt")  # 71 MB
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    assert (tmp_path / "w.pt").stat().st_size < 2**20
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("nothing is unpacked"))
    with pytest.raises(InputError, match=r"w\.pt unpacks to 0\.1 GB, but the model's weights take 0\.000 GB"):
        load_weights(nn.Linear(2, 1), tmp_path / "w.pt")


@pytest.mark.parametrize("key", ["net", "weights", "model_ema"])
def test_weights_are_found_under_any_key_of_a_training_script(tmp_path: Path, key: str) -> None:
    saved, model = make(), make()
    state = {f"module.{name}": tensor for name, tensor in saved.state_dict().items()}
    optimiser = torch.optim.Adam(saved.parameters()).state_dict()
    torch.save({key: state, "acc": 91.2, "epoch": 3, "optimizer": optimiser}, tmp_path / "w.pth")
    load_weights(model, tmp_path / "w.pth")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"generator": {"w": torch.ones(1)}, "critic": {"w": torch.ones(1)}}, "weights under 'generator' and 'critic'"),
        ({"weight": torch.ones(1), "epoch": 3}, "but its 'epoch' is of type int; save the tensors alone"),
        ([torch.ones(1)], r"as model\.state_dict\(\) gives it, got an object of type list"),
        (
            {"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=1)},
            r"more than tensors \(argparse\.Namespace\)",
        ),
        (nn.Linear(1, 1), r"more than tensors \(torch\.nn\.modules\.linear\.Linear\)"),
    ],
)
def test_checkpoints_without_weights_that_can_be_read_name_what_they_hold(
    tmp_path: Path, content: object, sentence: str
) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(InputError, match=sentence):
        load_weights(make(), tmp_path / "w.pt")


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('sprung').touch()",)


def test_no_program_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Trap()}, "trap.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Trap()))
    np.savez("trap.npz", x=np.array([Trap()], dtype=object), y=np.zeros(1))
    for name in ("trap.pt", "plain.pt"):
        with pytest.raises(InputError, match="holds more than tensors"):
            load_weights(make(), name)
    with pytest.raises(InputError, match="holds Python objects, which are not opened"):
        load_samples("trap.npz")
    assert not Path("sprung").exists()


def test_weights_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced between two looks at it would give the header of one and the numbers of the other."""
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    opened = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read(path))
    assert torch.equal(read_tensors(tmp_path / "a.safetensors")["weight"], torch.ones(2, 3))
    assert opened == [tmp_path / "a.safetensors"]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 half a zip"])
def test_damaged_weights(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_weights(make(), tmp_path / name)
    assert name in str(caught.value)
    with pytest.raises(InputError, match="there is no file"):
        load_weights(make(), tmp_path / f"no-{name}")


# ---------------------------------------------------------------- data


def test_data_that_is_nothing_we_know_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"or a built-in name: did you mean 'mnist'\?"):
        load_samples("MNIST")
    with pytest.raises(InputError, match=r"or a built-in name: one of digits, fashion-mini, "):
        load_samples("zzz")
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"or file\.py:function that reads it and returns \(inputs, targets\)\."):
        load_samples(str(tmp_path / "x.npy"))


def test_built_in_data_and_functions(folder: Path) -> None:
    assert len(load_samples("digits").data[0]) == 1437
    assert len(load_samples("digits:test").data[0]) == 360
    assert load_samples("digits", "test").name == "digits (test)"
    assert load_samples("net.py:points").data[1].tolist() == [0, 1, 2, 3]


def test_arrays_become_inputs_and_targets(tmp_path: Path) -> None:
    bytes_last = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x=bytes_last, y=np.array([[0], [1], [2]]))
    inputs, targets = load_samples(str(tmp_path / "a.npz")).data
    assert inputs.shape == (3, 3, 8, 8)
    assert torch.equal(inputs[1, 2], torch.from_numpy(bytes_last[1, :, :, 2] / np.float32(255)))
    assert targets.tolist() == [0, 1, 2]
    save_file(
        {"images": torch.zeros(2, 4, dtype=torch.float64), "labels": torch.tensor([1, 0])}, tmp_path / "b.safetensors"
    )
    inputs, targets = load_samples(str(tmp_path / "b.safetensors")).data
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": np.zeros(2), "b": np.zeros(2)}, r"must hold the inputs as x and the targets as y; it holds a, b\."),
        (
            {"x": np.zeros(2), "y": np.array(["cat", "dog"])},
            r"y\.npy holds texts; save classes as whole numbers from 0\.",
        ),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, r"as many targets as inputs; it holds shapes \(3, 2\) and \(2,\)"),
    ],
)
def test_arrays_that_are_no_data(tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=sentence):
        load_samples(str(tmp_path / "a.npz"))


def member(shape: tuple[int, ...], content: bytes) -> bytes:
    stream = io.BytesIO()
    npy.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return stream.getvalue() + content


def test_bombs_are_refused_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", member((10**15,), b""))
        archive.writestr("y.npy", member((1,), bytes(8)))
    with pytest.raises(InputError, match=r"x\.npy says it holds 8,000,000,000,000,000 bytes .* the archive has 0"):
        load_samples(str(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", member((10**6,), bytes(8 * 10**6)))  # honest, and 1000 times its packed size
        archive.writestr("y.npy", member((10**6,), bytes(8 * 10**6)))
    assert path.stat().st_size < 10**5
    monkeypatch.setattr(arrays, "available_memory", lambda: 10**7)
    with pytest.raises(InputError, match=r"unpacks to 0\.0 GB, but only 0\.0 GB of memory can be spared"):
        load_samples(str(path))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.csv"])
def test_files_that_hold_no_data(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"a\."):
        load_samples(str(tmp_path / name))


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'fashion-mini'"):
        load_samples("fashion-minni")
    with pytest.raises(InputError, match=r"there is no file '.*none\.npz'"):
        load_samples(str(tmp_path / "none.npz"))


def draw(path: Path, size: tuple[int, int] = (8, 6), mode: str = "L", value: int = 51) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_a_folder_of_images(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(2):
            draw(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    samples = load_samples(str(tmp_path))
    inputs, targets = samples.data
    assert inputs.shape == (4, 1, 6, 8)
    assert float(inputs.max()) == pytest.approx(0.2)
    assert (targets.tolist(), samples.classes) == ([0, 0, 1, 1], ("cat", "dog"))
    draw(tmp_path / "dog" / "2.png", size=(9, 6))
    with pytest.raises(InputError, match=r"the same size: .* has 8×6 pixels and .*2\.png has 9×6 pixels"):
        load_samples(str(tmp_path))
    (tmp_path / "dog" / "2.png").write_bytes(b"nonsense")
    with pytest.raises(InputError, match=r"the image .*2\.png cannot be read"):
        load_samples(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "pixels", "top"),
    [
        ("a.png", np.uint16([[0, 256, 1000, 65535]]), 65535),
        ("a.tif", np.uint16([[0, 256, 1000, 65535]]), 65535),
        ("a.pgm", np.uint16([[0, 256, 1000, 65535]]), 65535),
        ("a.tiff", np.float32([[0, 0.001, 0.25, 1]]), 1),
        ("a.bmp", np.uint8([[0, 1, 100, 255]]), 255),
    ],
)
def test_images_of_every_depth_keep_their_numbers(tmp_path: Path, name: str, pixels: np.ndarray, top: int) -> None:
    for place in ("cat", "dog"):
        (tmp_path / place).mkdir()
        if name.endswith("pgm"):  # as the standard has it: two bytes a pixel, the higher first
            (tmp_path / place / name).write_bytes(b"P5 4 1 65535 " + pixels.astype(">u2").tobytes())
        else:
            Image.fromarray(pixels).save(tmp_path / place / name)
    samples = load_samples(str(tmp_path))
    assert samples.data[0][1, 0].numpy() == pytest.approx(pixels.astype(np.float32) / np.float32(top), abs=0)
    assert (samples.notes == ("images of floats in [0, 1] taken as they are",)) == (top == 1)
    assert any(f"divided by {top:,}" in note for note in samples.notes) == (top > 1)


def test_images_that_use_few_of_their_bits_are_remarked(tmp_path: Path) -> None:
    for place in ("cat", "dog"):
        (tmp_path / place).mkdir()
        Image.fromarray(np.full((6, 8), 4095, dtype=np.uint16)).save(tmp_path / place / "0.png")  # of a 12-bit camera
    assert "the brightest pixel is 0.062 of white" in load_samples(str(tmp_path)).notes[1]


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (np.int32([[0, 256, 100000, 2**30]]), r"has 32 bits per pixel, and nothing says which number is white"),
        (np.float32([[0, 1, 255, 7]]), r"holds numbers outside \[0, 1\], and nothing says which of them is white"),
        (np.float32([[0, 1, np.nan, 1]]), r"holds numbers outside \[0, 1\]"),
    ],
)
def test_images_without_a_scale_are_refused(tmp_path: Path, pixels: np.ndarray, sentence: str) -> None:
    for place in ("cat", "dog"):
        (tmp_path / place).mkdir()
        Image.fromarray(pixels).save(tmp_path / place / "a.tif")
    with pytest.raises(InputError, match=sentence):
        load_samples(str(tmp_path))


def test_one_coloured_image_makes_all_coloured_wherever_it_stands(tmp_path: Path) -> None:
    draw(tmp_path / "cat" / "0.png", value=51)
    draw(tmp_path / "dog" / "0.png", mode="RGB", value=255)
    (tmp_path / "dog" / "1.png").parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((6, 8), 6553, dtype=np.uint16)).save(tmp_path / "dog" / "1.png")
    inputs, _ = load_samples(str(tmp_path)).data
    assert inputs.shape == (3, 3, 6, 8)
    for image, colour in zip(inputs, [(0.2, 0.2, 0.2), (1, 0, 0), (0.1, 0.1, 0.1)], strict=True):
        assert image[:, 0, 0].tolist() == pytest.approx(colour, abs=1e-5)


def test_a_file_is_opened_only_as_one_of_seven_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow starts Ghostscript for an EPS file, whatever its name."""
    from PIL import EpsImagePlugin

    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **_: started.append(args))
    for place in ("cat", "dog"):
        (tmp_path / place).mkdir()
        Image.new("RGB", (8, 6)).save(tmp_path / place / "0.png", format="EPS")
    with pytest.raises(InputError, match=r"the image .*0\.png cannot be read: cannot identify image file"):
        load_samples(str(tmp_path))
    assert started == []


def test_folders_with_names_that_are_no_text(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"tea"):
        place = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
        draw(Path(place) / "0.png")
    assert load_samples(str(tmp_path)).classes == ("caf\\xe9", "tea")


def test_folders_that_hold_no_classes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one subfolder of images per class"):
        load_samples(str(tmp_path))
    draw(tmp_path / "cat" / "0.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(InputError, match=r"dog holds no image"):
        load_samples(str(tmp_path))


def test_classes_that_differ(tmp_path: Path) -> None:
    for folder, names in (("train", ("cat", "dog", "eel")), ("test", ("cat", "dogs", "eel"))):
        for name in names:
            draw(tmp_path / folder / name / "0.png", size=(8, 8))
    train, test = load_samples(str(tmp_path / "train")), load_samples(str(tmp_path / "test"))
    with pytest.raises(InputError, match=r"only test has 'dogs' \(the other has dog\)"):
        check_classes(train, test, make())
    two = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(InputError, match=r"train has 3 classes .* but the model has 2 outputs"):
        check_classes(train, None, two)
    check_classes(train, train, make())
