"""Independent pieces of an answer, shared among ranks: each is worked out by one of them and passed on to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from spiritlevel.binding.ranks import Ranks
from spiritlevel.results import Result

Part = TypeVar("Part", bound=Result)


def shared(ranks: Ranks, tasks: Sequence[Callable[[], Part]]) -> list[Part]:
    """What each task returns, on every rank. Inside a task nothing may communicate; an error in one is raised on all.

    Tasks are dealt out in turn. Results travel in their JSON form, which keeps every digit.

    >>> from spiritlevel.results import Estimate
    >>> [found.value for found in shared(Ranks(None), [lambda: Estimate(1.0), lambda: Estimate(2.0)])]
    [1.0, 2.0]
    """
    if ranks.count == 1:
        return [task() for task in tasks]
    with ranks.together():
        mine = [task().to_dict() for index, task in enumerate(tasks) if ranks.takes(index)]
    told = [json.loads(text) for text in ranks.told(json.dumps(mine, allow_nan=False).encode())]
    every = (told[index % ranks.count][index // ranks.count] for index in range(len(tasks)))
    return [cast(Part, Result.from_dict(found)) for found in every]
