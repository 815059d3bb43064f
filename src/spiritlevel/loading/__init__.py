"""Models, weights and data from what a user writes on the command line; what does not fit raises one `InputError`.

Files are read as data, never as programs: no pickle is executed, and sizes are checked before memory is taken. Only
what is written as `file.py:function` or `package.module:function` runs, because the user names it to be run.
"""

from __future__ import annotations

from spiritlevel.loading.arrays import Samples
from spiritlevel.loading.calling import load_change, load_loss
from spiritlevel.loading.models import about_weights, is_file_of_weights, is_program, load_model, read_model
from spiritlevel.loading.samples import check_classes, load_samples
from spiritlevel.loading.weights import load_weights

__all__ = [
    "Samples",
    "about_weights",
    "check_classes",
    "is_file_of_weights",
    "is_program",
    "load_change",
    "load_loss",
    "load_model",
    "load_samples",
    "load_weights",
    "read_model",
]
