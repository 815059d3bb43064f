"""The claims of the papers, under their public name: `import spiritlevel.claims` is `spiritlevel.papers.claims`."""

import sys

from spiritlevel.papers import claims
from spiritlevel.papers.claims import *  # noqa: F403

sys.modules[__name__] = claims
