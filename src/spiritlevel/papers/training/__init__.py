"""Training: a recipe says how, a job says what, `fit` runs a recipe on any model, `train` runs a job once and keeps it.

Tensors stay in memory and batches are cut out of them, so a step costs what it costs in a bare PyTorch loop. A run is
a function of its config and its seed: the order of an epoch and the crops of a step are drawn from generators that are
seeded by the run's seed and the epoch or step, dropout from a forked global state that is part of every checkpoint. So
a run that was killed and started again ends bit for bit where the uninterrupted one ends (given the same machine and
number of threads: both may change the rounding of a sum). Nothing global is changed.

Trained networks are kept in a folder named by the digest of their job. `state.json` there names every other file
with its SHA-256 and is replaced last, atomically. So whenever a process dies, the folder holds a complete
state, and anything damaged later is detected and trained again.

>>> job = Job(network="softmax_regression", data="digits", recipe=Recipe(lr=0.5, steps=100), keep=(0,))
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     trained = train(job, cache=folder)
...     trained.steps, trained.history[-1]["train_accuracy"] > 0.9
((0, 100), True)
"""

from spiritlevel.papers.training.cache import Trained, train
from spiritlevel.papers.training.fitting import History, fit
from spiritlevel.papers.training.jobs import Job, Parts, parts
from spiritlevel.papers.training.recipe import Pair, Progress, Recipe, Row
from spiritlevel.papers.training.running import Diverged, evaluate

__all__ = [
    "Diverged",
    "History",
    "Job",
    "Pair",
    "Parts",
    "Progress",
    "Recipe",
    "Row",
    "Trained",
    "evaluate",
    "fit",
    "parts",
    "train",
]
