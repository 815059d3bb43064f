"""Every block of docs/models.md runs: without other packages here, all of them by `make test-integrations`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doc_blocks import blocks_of, run

BLOCKS = blocks_of("models.md")


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.kind for block in BLOCKS} == {"python", "sh"}
    wanted = {name for block in BLOCKS for name in block.needs}
    assert wanted == {"accelerate", "datasets", "lightning", "peft", "timm", "torch_geometric", "transformers"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # open("net.py", "w").write(...)
def test_the_blocks_that_need_no_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run([block for block in BLOCKS if not block.needs])
    said = " ".join(capsys.readouterr().out.split())
    assert "columns taken as numbers: f0, f1, f2" in said
    assert "target label ('cat' 0, 'dog' 1, 'fox' 2)" in said


@pytest.mark.integrations
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for block in BLOCKS for name in block.needs} - {"timm"}:
        pytest.importorskip(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    before = [block for block in BLOCKS if "timm" not in block.needs]
    run(before)
    first = next(block for block in BLOCKS if not block.needs)
    late = next(block for block in BLOCKS if "numpy.savez" in block.code)
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins")  # of torchvision, which timm asks for
    try:
        run([first, late, *(block for block in BLOCKS if "timm" in block.needs)])
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
            del sys.modules[name]
