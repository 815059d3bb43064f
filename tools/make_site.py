"""Write the pages of the site to build/pages, from docs/ and from the registry, the docstrings and the notebooks.

`make docs` runs this and then mkdocs. Links that lead out of docs/ become links into the repository, pictures of kept
runs are copied, and what the code of a guide printed is shown below it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from page_blocks import blocks_of

import spiritlevel as sl
from spiritlevel.measures import DEFAULT, MEASURES, TRANSFORMS
from spiritlevel.measures.registry import FAMILIES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
COST = {
    "forward": "forward passes",
    "backward": "forward and backward passes",
    "matvecs": "products with the Hessian or Gauss–Newton matrix",
    "optimiser": "an optimiser that searches, a few dozen gradients",
}
NOTEBOOKS = ("first_measurement", "audit_transformer", "training_dynamics")
SECTIONS = {
    "answers": "Questions about a model",
    "samples": "One number for every sample",
    "operators": "Operators of a data set",
    "estimators": "Estimators of an operator",
    "statistics": "Statistics",
    "binding": "Losses and reading",
    "results": "Results",
    "errors": "Errors",
}


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pages = {
        **{str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))},
        **{f"measures/{family}.md": measures_page(family) for family in FAMILIES},
        **reference_pages(),
        **notebook_pages(folder),
    }
    outputs = json.loads((DOCS / "guides" / "outputs.json").read_text(encoding="utf-8"))
    for name, text in pages.items():
        stem = Path(name).stem
        text = with_outputs(text, outputs.get(stem, {})) if name == "index.md" or name.startswith("guides/") else text
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(linked(text, name, folder), encoding="utf-8")
    for part in ("pictures", "assets"):
        shutil.copytree(DOCS / part, folder / part, dirs_exist_ok=True)
    shutil.copytree(DOCS / "gallery", folder / "gallery", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))


def with_outputs(text: str, printed: dict[str, str]) -> str:
    """The page with what each block printed below it."""
    for block in blocks_of(text):
        if block.key in printed:
            fence = f"```{block.kind}\n{block.code}```\n"
            text = text.replace(fence, f"{fence}\n{as_printed(printed[block.key])}\n", 1)
    return re.sub(r"^```py\n", "```sh\n", text, flags=re.MULTILINE)  # a command that is shown but not run


def as_printed(text: str) -> str:
    """What a program printed, long sentences in several lines; tables, which have two spaces in a row, as they are."""
    lines = (
        line if "  " in line.strip() else textwrap.fill(line, 88, subsequent_indent="  ", drop_whitespace=True)
        for line in text.rstrip().splitlines()
    )
    return '```text title="prints"\n' + "\n".join(lines) + "\n```"


def linked(text: str, name: str, folder: Path) -> str:
    """The page with links that lead somewhere: inside the site, to a copy of a picture, or into the repository."""
    here = (DOCS / name).parent

    def place(match: re.Match[str]) -> str:
        address = match[2]
        path, mark, anchor = address.partition("#")
        if not path or re.match(r"[a-z]+:", address):
            return match[0]
        target = Path(os.path.normpath(here / path))
        if target.is_relative_to(DOCS):
            return match[0]
        if target.suffix in (".svg", ".png") and target.is_file():
            copy = folder / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
            return f"{match[1]}({os.path.relpath(copy, (folder / name).parent)})"
        return f"{match[1]}({HOME}/blob/main/{target.relative_to(ROOT)}{mark}{anchor})"

    return re.sub(r"(\])\(([^)\s]+)\)", place, text)


# ---------------------------------------------------------------- measures


def measures_page(family: str) -> str:
    about = {
        "curvature": "Curvature of the loss around the parameters, or what follows from it.",
        "margin": "How far the samples are from being classified differently.",
        "norm": "Sizes of the weights alone.",
    }[family]
    lines = [
        f"# Measures: {family}",
        "",
        about,
        "",
        "The pictures show one network, 64-24-10 with ReLU on the built-in digits: on the left the measure while it "
        "learns, on the right after rescaling its layers by α and 1/α, which changes no output. A flat line on the "
        "right is a measure that rescaling cannot fool.",
    ]
    for measure in MEASURES.values():
        if measure.family != family:
            continue
        stays = ", ".join(f"`{name}`" for name in TRANSFORMS if name in measure.invariant_to) or "nothing we know of"
        others = f" Also called {', '.join(measure.also_called)}." if measure.also_called else ""
        usual = " Measured by default." if measure.name in DEFAULT else ""
        lines += ["", f"## {measure.name}", "", f"{measure.meaning[:1].upper()}{measure.meaning[1:]}.{others}{usual}"]
        lines += ["", "```text", *textwrap.wrap(measure.formula, 100), "```", ""]
        lines += [
            "| | |",
            "|---|---|",
            f"| larger means | {measure.direction} |",
            f"| the value is | {measure.worth} |",
            f"| cost | {COST[measure.cost]} |",
            f"| stays under | {stays} |",
            f"| reference | {_cell(measure.reference)} |",
        ]
        if (DOCS / "pictures" / "measures" / f"{measure.name}.svg").is_file():
            lines += [
                "",
                f"![{measure.name} while a network learns, and under rescaling]"
                f"(../pictures/measures/{measure.name}.svg)",
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# ---------------------------------------------------------------- reference


def reference_pages() -> dict[str, str]:
    """One page for each section of public names, one for each public module, and a page that lists them all."""
    rooms: dict[str, list[str]] = {}
    modules = []
    for name, (module, _) in sl._HOME.items():
        if isinstance(getattr(sl, name), ModuleType):
            modules.append(name)
        else:
            rooms.setdefault(module.split(".")[1], []).append(name)
    index = ["# Reference", "", "Everything public, from its docstrings; the examples in them are tests.", ""]
    pages = {}
    for room, title in SECTIONS.items():
        names = sorted(rooms.pop(room), key=str.lower)
        index += [f"**[{title}](reference/{room}.md)**: " + listed(room, names), ""]
        entries = [entry(f"sl.{name}", getattr(sl, name)) for name in names]
        pages[f"reference/{room}.md"] = "\n".join([f"# {title}", "", *entries])
    assert not rooms, f"public names of {list(rooms)} have no section in the reference"
    for name in sorted(modules):
        module = getattr(sl, name)
        names = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")
        ]
        inner = [key for key in names if callable(getattr(module, key)) and inspect.getdoc(getattr(module, key))]
        index += [f"**[sl.{name}](reference/{name}.md)**: " + listed(name, inner), ""]
        head = [f"# sl.{name}", "", docstring(inspect.getdoc(module) or ""), ""]
        pages[f"reference/{name}.md"] = "\n".join(
            [*head, *(entry(f"sl.{name}.{key}", getattr(module, key)) for key in inner)]
        )
    return {"reference.md": "\n".join(index), **pages}


def listed(page: str, names: list[str]) -> str:
    return ", ".join(f"[`{name}`](reference/{page}.md#{name})" for name in names)


def entry(name: str, value: Any) -> str:
    """A public name: how it is called, what it is, and the methods of a class."""
    own = name.rpartition(".")[2]
    lines = [
        f"## `{name}` {{ #{own} }}",
        "",
        "```python",
        called(name, value),
        "```",
        "",
        docstring(inspect.getdoc(value) or ""),
    ]
    if inspect.isclass(value):
        for key, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            head = f"`.{key}`" if isinstance(member, property) else f"`.{called(key, function)}`"
            lines += [
                "",
                f"{head}",
                "",
                f": {docstring(inspect.getdoc(function) or '').replace(chr(10), chr(10) + '    ')}",
            ]
    return "\n".join([*lines, ""])


def called(name: str, value: Any) -> str:
    """The call with its defaults, without types, in lines of at most a hundred characters."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return name
    words, starred = [], False
    for each in parameters:
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not starred and not any(word.startswith("*") for word in words):
            words.append("*")
            starred = True
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else f"={short(each.default)}"
        words.append(f"{mark}{each.name}{default}")
    one = f"{name}({', '.join(words)})"
    return (
        one
        if len(one) <= 100
        else f"{name}(\n{textwrap.fill(', '.join(words), 96, initial_indent='    ', subsequent_indent='    ')}\n)"
    )


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 and "<" not in text else "..."


def docstring(text: str) -> str:
    """A docstring of ours as Markdown: arguments as a list, examples as code."""
    lines, section, code = [], False, False
    for line in text.splitlines():
        if line.startswith(">>>") and not code:
            lines += ["", "```pycon"]
            code = True
        elif code and not line.strip():
            lines += ["```", ""]
            code = False
        if not code and re.fullmatch(r"(Args|Returns|Yields|Raises|Attributes):", line):
            lines += ["", f"*{line[:-1]}*", ""]
            section = True
            continue
        if section and line and not line.startswith(" "):
            section = False
            lines.append("")
        found = re.match(r"    (\*{0,2}\w+): (.*)", line) if section else None
        if found:
            lines.append(f"- **`{found[1]}`**: {found[2]}")
        elif section and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join([*lines, "```"] if code else lines)


# ---------------------------------------------------------------- notebooks


def notebook_pages(folder: Path) -> dict[str, str]:
    """The notebooks as pages, with the output kept in them."""
    pages = {}
    index = ["# Notebooks", "", "Each runs from a clean install in less than three minutes on two cores.", ""]
    for stem in NOTEBOOKS:
        path = DOCS / "notebooks" / f"{stem}.ipynb"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        heading, _, about = "".join(cells[0]["source"]).partition("\n")
        title = heading.removeprefix("# ")
        index += [f"## [{title}](notebooks/{stem}.md)", "", about.strip(), ""]
        shown = [cell_text(cell, stem, number, folder) for number, cell in enumerate(cells)]
        first = re.search(r"!\[.*?\]\((.*?)\)", "\n".join(shown))
        if first:
            index += [f"[![{title}: its first chart](notebooks/{first[1]}){{ width=360 }}](notebooks/{stem}.md)", ""]
        index += [f"[Read it](notebooks/{stem}.md) · [the file](notebooks/{path.name})", ""]
        pages[f"notebooks/{stem}.md"] = "\n\n".join(shown)
        (folder / "notebooks").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / "notebooks" / path.name)
    return {**pages, "notebooks.md": "\n".join(index)}


def cell_text(cell: dict[str, Any], stem: str, number: int, folder: Path) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source.rstrip()}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            file = folder / "notebooks" / f"{stem}-{number}.svg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(data["image/svg+xml"]), encoding="utf-8")
            parts.append(f"![The chart that the cell returns]({file.name})")
        else:
            text = "".join(output.get("text", data.get("text/plain", "")))
            parts.append(as_printed(text))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/pages"))
