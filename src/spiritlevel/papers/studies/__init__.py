"""The papers' experiments as commands, one file each; none imports another.

What they share is in `base`, `league`, `recipes` and `rules`.

>>> studies = catalogue()
>>> studies["confidence"].source
'A, Fig. 1'
"""

from __future__ import annotations

import importlib
import pkgutil

from spiritlevel.errors import unknown_name
from spiritlevel.papers.studies.base import SCALES, Config, Run, Study, combine, execute
from spiritlevel.papers.studies.rules import Range, Ruling, Statement, Verdict, decide

__all__ = [
    "SCALES",
    "Config",
    "Range",
    "Ruling",
    "Run",
    "Statement",
    "Study",
    "Verdict",
    "catalogue",
    "combine",
    "decide",
    "execute",
    "find",
]


def catalogue() -> dict[str, Study]:
    """Every study by name: each module of this package but the four that studies share holds one as `STUDY`."""
    modules = sorted(
        info.name for info in pkgutil.iter_modules(__path__) if info.name not in ("base", "league", "recipes", "rules")
    )
    found = [importlib.import_module(f"{__name__}.{name}").STUDY for name in modules]
    return {study.name: study for study in found}


def find(name: str) -> Study:
    """The study of that name.

    >>> find("confidense")
    Traceback (most recent call last):
    spiritlevel.errors.InputError: unknown study 'confidense': did you mean 'confidence'? Known: ...
    """
    known = catalogue()
    if name not in known:
        raise unknown_name("study", name, known)
    return known[name]
