"""`python -m spiritlevel` is the command `spiritlevel`."""

from __future__ import annotations

import sys

from spiritlevel.errors import InputError, needs


def main() -> int:
    """Import the command line and run it; a missing package is named; an interrupt meanwhile is not an error."""
    try:
        with needs("the command"):
            from spiritlevel.cli import main as run
    except InputError as error:
        sys.stderr.write(f"spiritlevel: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("spiritlevel: interrupted.\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
