"""The papers' networks, under their public name: `import spiritlevel.models` is `spiritlevel.papers.networks`."""

import sys

from spiritlevel.papers import networks
from spiritlevel.papers.networks import *  # noqa: F403

sys.modules[__name__] = networks
