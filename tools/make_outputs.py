"""Run the code of the guides, and keep what it prints and draws for the site; run by `make docs`.

Output goes to docs/guides/outputs.json under the hash of its block, figures to docs/pictures/guides. A test compares
the hashes with the pages, so that no output can belong to different code.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from page_blocks import run_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
OUTPUTS = ROOT / "docs" / "guides" / "outputs.json"
PICTURES = ROOT / "docs" / "pictures" / "guides"


def main(wanted: list[str]) -> None:
    outputs = json.loads(OUTPUTS.read_text(encoding="utf-8")) if OUTPUTS.exists() else {}
    PICTURES.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        if wanted and page.stem not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs[page.stem] = run_page(page, Path(folder))
            for figure in sorted(Path(folder).glob("*.svg")):
                shutil.copyfile(figure, PICTURES / f"{page.stem}-{figure.name}")
        print(f"{page.stem}: {len(outputs[page.stem])} outputs")
    OUTPUTS.write_text(json.dumps(outputs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
