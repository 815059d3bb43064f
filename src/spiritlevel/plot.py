"""Figures in one call, under their public name: `import spiritlevel.plot` is `spiritlevel.answers.plotting`."""

import sys

from spiritlevel.answers import plotting
from spiritlevel.answers.plotting import *  # noqa: F403

sys.modules[__name__] = plotting
