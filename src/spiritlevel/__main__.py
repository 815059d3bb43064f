"""`python -m spiritlevel` is the command `spiritlevel`."""

import sys

from spiritlevel.cli import main

if __name__ == "__main__":
    sys.exit(main())
