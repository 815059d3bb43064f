"""Write the reference pages, one for the package and one for each public module; run by `make docs`.

`spiritlevel.models`, `.training` and `.claims` are other names of modules inside `spiritlevel.papers`. Pdoc goes by the
name that a module has itself, so each gets a page as the user writes it: a module of that name with the same contents.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pdoc

import spiritlevel


def main(folder: Path) -> None:
    """Write the pages below `folder`."""
    public = [name for name in spiritlevel._HOME if isinstance(getattr(spiritlevel, name), ModuleType)]
    for name in public:
        inner, outer = getattr(spiritlevel, name), f"spiritlevel.{name}"
        if inner.__name__ != outer:
            own = [key for key, value in vars(inner).items() if getattr(value, "__module__", "") == inner.__name__]
            shown = getattr(inner, "__all__", [key for key in own if not key.startswith("_")])
            door = ModuleType(outer, inner.__doc__)
            vars(door).update({**vars(inner), "__name__": outer, "__all__": list(shown)})
            sys.modules[outer] = door
            vars(spiritlevel)[name] = door
    pdoc.render.configure(docformat="google")
    pdoc.pdoc("spiritlevel", output_directory=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
