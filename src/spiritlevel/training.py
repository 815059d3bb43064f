"""Training as in the papers, under its public name: `import spiritlevel.training` is `spiritlevel.papers.training`."""

import sys

from spiritlevel.papers import training
from spiritlevel.papers.training import *  # noqa: F403

sys.modules[__name__] = training
