"""Every block of docs/models.md runs: without other packages here, all of them by `make test-integrations`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spiritlevel import cli

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    kind: str
    code: str
    line: int

    @property
    def needs(self) -> list[str]:
        first = re.match(r"# needs (.*)\n", self.code)
        return first[1].split() if first else []


BLOCKS = [
    Block(each[1], each[2], PAGE[: each.start()].count("\n") + 2)
    for each in re.finditer(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
]


def run(blocks: list[Block]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        if block.kind == "python":
            code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
            exec(compile(code, str(ROOT / "docs" / "models.md"), "exec", dont_inherit=True), names)
        else:
            for line in block.code.splitlines():
                if not line.startswith("#"):
                    program, *args = shlex.split(line)
                    assert program == "spiritlevel"
                    assert cli.main(args) == 0, line


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {block.kind for block in BLOCKS} == {"python", "sh"}
    assert PAGE.count("```") == 2 * len(BLOCKS)
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
    monkeypatch.syspath_prepend(ROOT / "tests" / "stand_ins")  # of torchvision, which timm asks for
    try:
        run([first, late, *(block for block in BLOCKS if "timm" in block.needs)])
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "timm")]:
            del sys.modules[name]
