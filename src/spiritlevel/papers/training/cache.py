"""`train` runs a job once and keeps its networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import nn

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError
from spiritlevel.papers.training.checkpoints import Folder, kept_name, kept_steps, sealed
from spiritlevel.papers.training.fitting import owned, run_recipe
from spiritlevel.papers.training.jobs import Job, Parts, build_network, parts
from spiritlevel.papers.training.recipe import Pair, Progress, Row
from spiritlevel.storage import cache_folder


@dataclass(frozen=True, eq=False)
class Trained:
    """A job that was trained: its networks at the kept steps, its data and its history."""

    job: Job
    folder: Path
    history: list[Row]
    """As `History.rows`, with `train_loss`, `test_accuracy` and so on for the sets that the job evaluates."""
    steps: tuple[int, ...]
    """The steps whose weights are kept; the last one is the end of training."""
    stopped: bool
    """Whether `until_loss` ended it before the recipe's last step."""
    seconds: float
    _files: Folder = field(repr=False)
    _labels: str | None = field(default=None, repr=False)  # what the labels of the training set looked like

    @cached_property
    def _parts(self) -> Parts:
        found = parts(self.job)
        if self._labels not in (None, sealed(found.train[1])[:16]):
            raise InputError(
                f"the network in {self.folder} was trained on {self.job.data} in another order (copies from different "
                "sources can differ), so its training and validation sets are no longer known; remove that folder."
            )
        return found

    @property
    def train(self) -> Pair:
        """The training set, as the network sees it, unaugmented."""
        return self._parts.train

    @property
    def validation(self) -> Pair | None:
        """The validation set, None if the job has none."""
        return self._parts.validation

    @property
    def test(self) -> Pair:
        """The test set."""
        return self._parts.test

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self._parts.classes

    def model(self, step: int | None = None) -> nn.Module:
        """A new copy of the network at a kept step (default: the last), in eval mode on the CPU."""
        step = self.steps[-1] if step is None else step
        if step not in self.steps:
            raise InputError(f"the weights of step {step} were not kept; kept: {', '.join(map(str, self.steps))}.")
        network = build_network(self.job)
        network.load_state_dict(self._files.tensors(kept_name(step)))
        return network.eval()


@checked
def train(job: Job, *, cache: str | Path | None = None, progress: Progress | None = None) -> Trained:
    """Train a job, or find what an earlier call, in this process or another, has already trained.

    A training run that was killed resumes from its last checkpoint, which is about 20 seconds old, or older where
    writing one takes more than a second. Two processes that want the same job do not both train it: the second waits,
    and takes over if the first one dies. A damaged entry of the cache is trained again.

    Args:
        job: What to train.
        cache: The folder of trained networks. Default: `networks` in `SPIRITLEVEL_CACHE` or the platform's cache.
        progress: Called a few times a second with what is under way, the steps done and the total number of steps.

    Raises:
        InputError: the job does not fit its data; the training diverged; the cache cannot be written.
    """
    root = cache_folder() / "networks" if cache is None else Path(cache)
    folder = Folder(root / f"{job.network}-{job.data}-{job.key}", job.key, job)
    state = folder.read()
    found: Parts | None = None
    if not (
        state
        and state["finished"]
        and {step for step in job.keep if step <= state["step"]} <= kept_steps(state["files"])
    ):
        label = f"training {job.network} on {job.data}"
        found = parts(job)
        model = build_network(job)
        sets = {name: pair for name in job.evaluate if (pair := getattr(found, name)) is not None}
        with owned(folder, progress, label):
            run_recipe(
                model,
                found.train,
                job.recipe,
                folder,
                seed=job.seed,
                keep=job.keep,
                evaluate=sets,
                evaluate_every=job.evaluate_every,
                progress=progress,
                label=label,
            )
            state = folder.read()
    if not state:
        raise InputError(f"{folder.path} was changed while it was being written; call train again.")
    steps = sorted(kept_steps(state["files"]) & {*job.keep, state["step"]})
    stopped = bool(state["step"] < state["total"])
    labels = state.get("labels")
    trained = Trained(job, folder.path, state["rows"], tuple(steps), stopped, state["seconds"], folder, labels)
    if found:
        vars(trained)["_parts"] = found
    return trained
