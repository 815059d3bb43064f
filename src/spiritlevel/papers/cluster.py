"""Many independent runs on many machines, by way of Ray (the extra `cluster`).

A job is a plain function of a config that keeps its state in the run folder and in the cache of networks, so a worker
that dies is replaced by another that continues from the last checkpoint, and a driver that was killed is simply started
again: what is finished is read, not run. Several machines must share `out` and the cache (SPIRITLEVEL_CACHE) on a
common file system.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from spiritlevel.errors import InputError, first_line, needs
from spiritlevel.memory import KEPT_BY_MALLOC
from spiritlevel.papers.studies import Config, Run, execute, find
from spiritlevel.papers.studies.base import read_summary
from spiritlevel.storage import cache_folder

RETRIES = 5  # of a job whose worker died; an error in the job itself is not retried


def run_jobs(
    study: str,
    configs: Sequence[Config],
    out: str | Path,
    *,
    address: str = "ray",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """The summaries of all jobs, in the order of the configs, as `execute` gives them one by one.

    Args:
        study: The name of the study.
        configs: One for each job.
        out: As in `execute`; with several machines, a folder that all of them can see.
        address: "ray" starts a cluster on this machine for the duration of the call; "ray://host:10001" joins one.
        progress: Called with `(what, done, total)` whenever a job, or a piece of one, has ended.
    """
    ray = _ray()
    local = address == "ray"
    if not local and not address.startswith("ray://"):
        raise InputError(f"--cluster takes ray, or the address of a running cluster, ray://HOST:PORT, got {address!r}.")
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= KEPT_BY_MALLOC
    environment |= {name: os.environ[name] for name in ("SPIRITLEVEL_CACHE", "SPIRITLEVEL_DATA") if name in os.environ}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # our own cluster reports to no one
    options: dict[str, Any] = {"address": "local", "include_dashboard": False} if local else {"address": address}
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says the same
            ray.init(log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": environment}, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise InputError(
            f"no cluster could be reached at {address} ({reason}); check that one is running there, and that "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN are set as they were when it was started."
        ) from error
    try:
        where = (str(Path(out).absolute()), str(cache_folder() / "networks"))
        return _Schedule(ray, study, configs, where, progress).results()
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    except ray.exceptions.WorkerCrashedError as error:
        raise InputError(
            f"a worker died {RETRIES + 1} times in the same job of {study}; what it finished is kept, so give the "
            "machines more memory or run fewer jobs at once, and start the command again."
        ) from error
    finally:
        ray.shutdown()


class _Schedule:
    """The tasks of all jobs: first the pieces that a study computes separately, then what is left of each job."""

    def __init__(
        self,
        ray: Any,
        study: str,
        configs: Sequence[Config],
        where: tuple[str, str],
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.ray, self.study, self.configs, self.where, self.progress = ray, study, configs, where, progress
        self.piece, self.job = (ray.remote(num_cpus=1, max_retries=RETRIES)(task) for task in (_piece, _job))
        self.pieces = [_missing_pieces(study, config, where[0]) for config in configs]
        self.waiting: dict[Any, tuple[int, bool]] = {}

    def results(self) -> list[dict[str, Any]]:
        """The summaries, in the order of the configs."""
        for index, (config, names) in enumerate(zip(self.configs, self.pieces, strict=True)):
            for name in names:
                self.waiting[self.piece.remote(self.study, config, name, *self.where)] = (index, True)
            if not names:
                self._begin(index)
        left = [len(names) for names in self.pieces]
        total, done = sum(left) + len(left), 0
        summaries: dict[int, dict[str, Any]] = {}
        while self.waiting:
            (ended, *_), _rest = self.ray.wait(list(self.waiting), num_returns=1)
            index, is_piece = self.waiting.pop(ended)
            found = self.ray.get(ended)
            if is_piece:
                left[index] -= 1
                if not left[index]:
                    self._begin(index)
            else:
                summaries[index] = found
            done += 1
            if self.progress:
                self.progress(f"{self.study}: {'tasks' if total > len(left) else 'jobs'} on the cluster", done, total)
        return [summaries[index] for index in range(len(self.configs))]

    def _begin(self, index: int) -> None:
        self.waiting[self.job.remote(self.study, self.configs[index], *self.where)] = (index, False)


def _missing_pieces(study: str, config: Config, out: str) -> list[str]:
    """The pieces to compute before the job itself; none if it is finished."""
    found = find(study)
    folder = found.folder(config, out)
    run = Run(folder)
    return [] if read_summary(folder) else [name for name in found.pieces(config) if not run.has(name)]


def _piece(study: str, config: Config, name: str, out: str, cache: str) -> None:
    """What a worker does for one piece; the result goes into the folder of the run, not through the network."""
    found = find(study)
    run = Run(found.folder(config, out), cache=Path(cache))
    run.once(name, partial(found.pieces(config)[name], run))


def _job(study: str, config: Config, out: str, cache: str) -> dict[str, Any]:
    """What a worker does for a whole job."""
    return execute(find(study), config, out, cache=Path(cache))


def _ray() -> Any:
    with needs("--cluster"):
        import ray
    return ray
