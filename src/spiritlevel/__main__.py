"""`python -m spiritlevel` is the command `spiritlevel`."""

from __future__ import annotations

import sys


def main() -> int:
    """Import the command line and run it; an interrupt while it is imported is no error."""
    try:
        from spiritlevel.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("spiritlevel: interrupted.\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
