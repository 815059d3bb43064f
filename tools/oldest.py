"""Print the oldest versions that pyproject.toml promises, as constraints for pip; `make test-versions` tests with them.

What has no lower bound (the tools, and what a dependency brings along) stays as constraints.txt has it. So
does torch unless another is asked for (TORCH in the environment), since its lower bound is what we test with.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def promised() -> dict[str, str]:
    """The lower bound of every package that the library itself needs, with or without its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["report"], *extras["cli"]]
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)", item) for item in needed if not item.startswith("spiritlevel")]
    return {bound[1].lower(): bound[2] for bound in bounds if bound}


def constraints() -> list[str]:
    """The lines of a constraints file."""
    oldest = promised()
    if "TORCH" in os.environ:
        oldest["torch"] = os.environ["TORCH"]
    kept = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()]
    others = [line for line in kept if line and re.split("[=<]", line)[0].lower() not in oldest]
    return [*others, *(f"{name}=={version}" for name, version in oldest.items())]


if __name__ == "__main__":
    print("\n".join(constraints()))
