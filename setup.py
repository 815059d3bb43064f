"""The one thing that pyproject.toml cannot say: on a package index the README stands alone.

Its links and pictures are relative, so that they work in a clone and wherever the repository lies; there they lead to
the repository that `project.urls` names.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def absolute(link: re.Match[str]) -> str:
    """A link of the README as it has to read elsewhere; one inside the page or to another place stays."""
    mark, text, target = link.groups()
    if target.startswith("#") or "://" in target:
        return link[0]
    return f"{mark}[{text}]({HOME}/{'raw' if mark else 'blob'}/main/{target})"


readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
