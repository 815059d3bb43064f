"""Run the notebooks and write them with their output; run by `make docs`, and by `make test-full` into another folder.

A notebook is kept as a script with cells (docs/notebooks/*.py), which is what people edit, and as an .ipynb file with
output, which is what people open and the site shows. Cells are run in one namespace as Jupyter would: what the last
expression of a cell returns is shown, a chart as SVG.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"


def cells_of(script: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) for every cell."""
    cells = []
    for part in script.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = ["" if line == "#" else line.removeprefix("# ") for line in body.strip().splitlines()]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip()))
    return cells


def run_cell(code: str, names: dict[str, Any], file: str) -> list[dict[str, Any]]:
    """The output of a cell in the form of a notebook."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not _prints(tree.body[-1]) else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, file, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": said.getvalue().splitlines(keepends=True)})
    if value is not None:
        outputs.append({"output_type": "display_data", "metadata": {}, "data": _shown(value)})
    return outputs


def _prints(node: ast.stmt) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print"  # type: ignore[attr-defined]


def _shown(value: Any) -> dict[str, Any]:
    if hasattr(value, "to_dict") and hasattr(value, "properties"):
        from spiritlevel.charts import svg_file

        return {"image/svg+xml": svg_file(value), "text/plain": f"{type(value).__name__}"}
    return {"text/plain": str(value).splitlines(keepends=True)}


def run(path: Path) -> dict[str, Any]:
    """The whole notebook, in the format of Jupyter 4.5."""
    names: dict[str, Any] = {"__name__": "notebook"}
    cells, count = [], 0
    for number, (kind, text) in enumerate(cells_of(path.read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"{path.stem.replace('_', '-')}-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": run_cell(text, names, str(path))}
        cells.append(cell)
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(FOLDER.glob("*.py")):
        begin = time.perf_counter()
        text = json.dumps(run(path), indent=1, ensure_ascii=False)
        (folder / f"{path.stem}.ipynb").write_text(text + "\n", encoding="utf-8")
        print(f"{path.stem}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
