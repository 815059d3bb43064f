"""Pages of docs/ whose blocks of code run: Python in one namespace, commands of ours in this process."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from spiritlevel import cli

DOCS = Path(__file__).parents[1] / "docs"


class Block(NamedTuple):
    page: Path
    kind: str
    code: str
    line: int

    @property
    def needs(self) -> list[str]:
        first = re.match(r"# needs (.*)\n", self.code)
        return first[1].split() if first else []


def blocks_of(name: str) -> list[Block]:
    page = DOCS / name
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, each[1], each[2], text[: each.start()].count("\n") + 2)
        for each in re.finditer(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    ]
    assert text.count("```") == 2 * len(found)
    return found


def run(blocks: list[Block]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        if block.kind == "python":
            code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
            exec(compile(code, str(block.page), "exec", dont_inherit=True), names)
        else:
            for line in block.code.splitlines():
                if not line.startswith("#"):
                    program, *args = shlex.split(line)
                    assert program == "spiritlevel"
                    assert cli.main(args) == 0, line
