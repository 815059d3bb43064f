"""Try the library as `pip install spiritlevel` installs it, without extras: `make test-versions` runs this there.

The example of the README must run, and what the extras bring must be named where it is missing.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import torch

import spiritlevel as sl
from spiritlevel.errors import OPTIONAL

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = r"needs [a-z-]+, which is not installed: run pip install 'spiritlevel\[(?:report|cli)\]'\."


def main() -> None:
    """Raise an error where something is not as it should be."""
    if Path(sl.__file__).is_relative_to(ROOT / "src"):
        sys.exit("this tries the installed package but found the source tree: install it without -e.")
    extra = [name for name in OPTIONAL if importlib.util.find_spec(name) and name != "jinja2"]  # which torch brings
    if extra:
        sys.exit(f"this tries the core alone but found {', '.join(extra)}: install it without extras.")
    *_, example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(example, {})
    model = torch.nn.Linear(4, 3)
    report = sl.measure(model, (torch.rand(20, 4), torch.randint(3, (20,))))
    print(report)
    said = ""
    try:
        report.to_html()
    except sl.InputError as error:
        said = str(error)
    command = [str(Path(sys.executable).parent / "spiritlevel"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for sentence in (said, done.stderr):
        print(sentence.strip())
        assert re.search(SENTENCE, sentence)
    assert done.returncode == 2


if __name__ == "__main__":
    main()
