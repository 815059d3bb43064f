"""Many independent runs over many machines, by Ray (the extra `cluster`).

A job is a plain function of a config that keeps its state in the run folder and in the cache of networks, so a worker
that dies is replaced by another that goes on from the last checkpoint, and a driver that was killed is simply started
again: what is finished is read, not run. Several machines must share `out` and the cache (SPIRITLEVEL_CACHE) by a
common file system.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spiritlevel.errors import InputError, needs
from spiritlevel.papers.studies import Config, execute, find
from spiritlevel.storage import cache_folder

RETRIES = 5  # of a job whose worker died; an error of the job itself is not retried


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
        out: As in `execute`; on several machines a folder that all of them see.
        address: "ray" starts a cluster on this machine for the time of the call; "ray://host:10001" joins one.
        progress: Called with `(what, done, total)` whenever a job has ended.
    """
    ray = _ray()
    local = address == "ray"
    if not local and not address.startswith("ray://"):
        raise InputError(f"--cluster takes ray, or the address of a running cluster, ray://HOST:PORT, got {address!r}.")
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {name: os.environ[name] for name in ("SPIRITLEVEL_CACHE", "SPIRITLEVEL_DATA") if name in os.environ}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours reports to nobody
    options: dict[str, Any] = {"address": "local", "include_dashboard": False} if local else {"address": address}
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says the same
            ray.init(log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": environment}, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(
            f"no cluster could be had at {address} ({reason}); check that it runs there, and that RAY_AUTH_MODE and "
            "RAY_AUTH_TOKEN are set as they were for it."
        ) from error
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_job)
        where = (str(Path(out).absolute()), str(cache_folder() / "networks"))
        waiting = {task.remote(study, config, *where): index for index, config in enumerate(configs)}
        summaries: dict[int, dict[str, Any]] = {}
        while waiting:
            (done, *_), _rest = ray.wait(list(waiting), num_returns=1)
            summaries[waiting.pop(done)] = ray.get(done)
            if progress:
                progress(f"{study}: jobs on the cluster", len(summaries), len(configs))
        return [summaries[index] for index in range(len(configs))]
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    except ray.exceptions.WorkerCrashedError as error:
        raise InputError(
            f"a worker died {RETRIES + 1} times in the same job of {study}; what it finished is kept, so give the "
            "machines more memory or run fewer jobs at once, and start the command again."
        ) from error
    finally:
        ray.shutdown()


def _job(study: str, config: Config, out: str, cache: str) -> dict[str, Any]:
    """What a worker does."""
    return execute(find(study), config, out, cache=Path(cache))


def _ray() -> Any:
    with needs("--cluster"):
        import ray
    return ray
