"""Write docs/claims.md from a run of all claims (seed 0). Part of `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from spiritlevel.papers.claims import decided, run
from spiritlevel.papers.claims.show import to_markdown
from spiritlevel.results import write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"


def main() -> int:
    rulings = run()
    write_atomically(PAGE, to_markdown([ruling.record() for ruling in rulings]))
    print(f"{PAGE.name}: {len(rulings)} claims")
    return 0 if decided(rulings) else 1


if __name__ == "__main__":
    sys.exit(main())
