"""Make the kept runs under `results/` small: equal marks of a chart written once, no second copy of it in pixels.

Run it after adding runs of an older version; running it twice changes nothing more. The points of the chart of
`correlation` keep seven digits, as new runs write them; all other numbers and tables stay as they are. The summary of
a run lists its files with their SHA-256, and is rewritten where a file has changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from pathlib import Path

import polars

from spiritlevel.charts.drawing import compact
from spiritlevel.papers.studies.base import SUMMARY, read_summary
from spiritlevel.papers.studies.correlation import brief
from spiritlevel.storage import write_atomically

DESCRIPTION = re.compile(r' aria-label="[^"]*" role="[^"]*" aria-roledescription="[^"]*"(?= (?:transform|d|x))')


def shrink(folder: Path) -> int:
    """Shrink one run; returns how many bytes were saved. An incomplete or damaged run stays as it is."""
    summary = read_summary(folder)
    if summary is None:
        return 0
    before = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    files: dict[str, str] = {}
    for name, sha in summary["files"].items():
        path = folder / name
        if path.suffix == ".png" and path.with_suffix(".svg").name in summary["files"]:
            path.unlink()
            continue
        if path.suffix == ".svg":
            content = compact(DESCRIPTION.sub("", path.read_text(encoding="utf-8"))).encode()
            write_atomically(path, content)
            sha = hashlib.sha256(content).hexdigest()
        if name == "points.parquet" and summary["study"] == "correlation":
            frame = polars.read_parquet(path)
            short = polars.DataFrame([brief(row) for row in frame.iter_rows(named=True)], frame.schema)
            if not short.equals(frame):
                buffer = io.BytesIO()
                short.write_parquet(buffer)
                write_atomically(path, buffer.getvalue())
                sha = hashlib.sha256(buffer.getvalue()).hexdigest()
        files[name] = sha
    if files != summary["files"]:
        text = json.dumps({**summary, "files": files}, allow_nan=False, ensure_ascii=False, indent=1)
        write_atomically(folder / SUMMARY, text + "\n")
    return before - sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main() -> None:
    """Shrink all runs below the folder given, by default `results`."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "results")
    saved = sum(shrink(path.parent) for path in sorted(root.rglob(SUMMARY)))
    print(f"{saved / 1e6:.1f} MB saved")


if __name__ == "__main__":
    main()
