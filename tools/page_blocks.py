"""The code blocks of a page: found, run in order in a folder of their own, and what they print kept beside them.

Python blocks of a page share their names; lines of `sh` blocks that begin with `spiritlevel` are run by the command
line's own main function, other lines must be on the list of those that are shown only.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN_ONLY = ("pip install", "make ", "torchrun ", "git clone", "cd ", "#", "spiritlevel demo")


@dataclass(frozen=True)
class Block:
    """A fenced block: `kind` is its language, `line` where its first line stands."""

    kind: str
    code: str
    line: int

    @property
    def key(self) -> str:
        return hashlib.sha256(self.code.encode()).hexdigest()[:12]

    @property
    def needs(self) -> list[str]:
        first = re.match(r"# needs (.*)\n", self.code)
        return first[1].split() if first else []


def blocks_of(text: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Block(each[1], each[2], text[: each.start()].count("\n") + 2) for each in found]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_page(page: Path, folder: Path) -> dict[str, str]:
    """Run the blocks of a page that need no other package; what each printed, by the key of the block."""
    names: dict[str, Any] = {"__name__": "page"}
    printed = {}
    with inside(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.kind not in ("python", "sh") or block.needs:
                continue
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                run_block(block, page, names)
            printed[block.key] = said.getvalue().rstrip()
    return {key: text for key, text in printed.items() if text}


def run_block(block: Block, page: Path, names: dict[str, Any]) -> None:
    if block.kind == "python":
        code = "\n" * (block.line - 1) + block.code  # so that a traceback names the line of the page
        exec(compile(code, str(page), "exec", dont_inherit=True), names)
        return
    from spiritlevel import cli

    for line in block.code.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "spiritlevel" and words[:1] != ["demo"]:  # it trains a network, and tests of its own run it
            code = cli.main(words)
            if code:
                raise AssertionError(f"{page.name}, line {block.line}: {line!r} ended with {code}")
        elif line.strip() and not line.startswith(SHOWN_ONLY):
            raise AssertionError(f"{page.name}, line {block.line}: {line!r} is neither run nor known to be shown only")
