"""`rank`: which of many checkpoints to take, as it is and after a change of its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel import __version__
from spiritlevel.answers.changes import Change, wanted
from spiritlevel.answers.measuring import Progress, silent
from spiritlevel.answers.pairing import KEEP_FUNCTION, owners_of
from spiritlevel.answers.perturbing import floating, perturb_in
from spiritlevel.arguments import checked
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError
from spiritlevel.measures import Measure, Setting, select
from spiritlevel.measures.registry import affordable
from spiritlevel.results import Checkpoint, Checkpoints, Estimate, mean_skewness, signed_limits, standard_error
from spiritlevel.results.intervals import FEWEST
from spiritlevel.statistics.subsets import of_owners

__all__ = ["rank"]


@torch.inference_mode(False)
@checked
def rank(
    models: Any,
    data: Any,
    *,
    loss: Any = "cross_entropy",
    measures: str | Iterable[str] | None = None,
    under: Any = "int4",
    samples: int | None = None,
    apply: bool = True,
    progress: Progress | None = None,
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Checkpoints:
    """Which of many checkpoints to take: accuracy, loss, measures, and what a change of the weights will do to each.

    The loss of each is compared with the lowest one, sample by sample: `Checkpoint.behind` has the paired 95% interval,
    with `unit="token"` that for other sequences, and for other batches where these couple their samples. Unless named,
    the measures are those of the default set that no parametrisation of the same function can move, since checkpoints
    of one run differ in that, too. Numbers are exact or estimated as the measures are, and the changes as in `perturb`.

    Args:
        models: a dict of models by name, or pairs of a name and a model, which are taken one after another and need
            not be in memory together.
        data: a pair of tensors, a data set, a loader or batches; the same for all.
        loss: a name, a `torch.nn` loss or a callable.
        measures: names of `measures.MEASURES`, "all", or those above.
        under: changes of the weights as `perturb` takes them, several in a list or separated by commas in a string; ()
            for none.
        samples: measure on a random subset of this many.
        apply: whether to make the changes as well as predict what they do.
        progress: called with (what, done, total) before every step.
        params: names, prefixes or globs of the parameters to measure; by default all that require grad. Changes move
            all of them whatever this names.
        batch_norm: "eval" or "batch".
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        seed: for everything random.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: the measures and one `perturb` without layers for each checkpoint and change.

    >>> x, good, poor = torch.eye(2), nn.Linear(2, 2), nn.Linear(2, 2)
    >>> _ = nn.init.eye_(good.weight), nn.init.constant_(poor.weight, 0.1)
    >>> found = rank({"poor": poor, "good": good}, (x, torch.tensor([0, 1])), measures=["margin_mean"], under="int8")
    >>> found.order("margin_mean")
    ['good', 'poor']
    """
    changes = wanted(under)
    chosen = tuple(each for each in select(measures) if measures is not None or each.invariant_to >= KEEP_FUNCTION)
    pairs = models.items() if isinstance(models, Mapping) else models
    rows: list[Checkpoint] = []
    losses: list[Tensor] = []
    owners: Tensor | None = None
    first: Setting | None = None
    left_out: dict[str, str] = {}
    for name, model in _pairs(pairs):
        (progress or silent)(name, len(rows), 0)
        if any(row.name == name for row in rows):
            raise InputError(f"rank got two checkpoints named {name!r}; give each a name of its own.")
        try:
            if first is None:
                whole = Setting(
                    model,
                    data,
                    loss=loss,
                    params=params,
                    batch_norm=batch_norm,
                    batch_size=batch_size,
                    memory=memory,
                    seed=seed,
                    **reading,
                )
                first = setting = whole.drawn(samples)[0]
            else:
                setting = first.moved(model)
            setting.check()
            chosen, expensive = affordable(measures, chosen, setting)
            left_out |= expensive
        except InputError as error:
            raise InputError(f"checkpoint {name!r}: {error}") from error
        losses.append(setting.losses)
        owners = owners_of(setting)[0] if owners is None else owners
        rows.append(_row(name, setting, chosen, changes, apply, left_out))
    if first is None:
        raise InputError("rank needs at least one checkpoint, got none.")
    return Checkpoints(
        rows=tuple(_behind(rows, [of_owners(each, owners) for each in losses])),
        measures=tuple(each.name for each in chosen),
        changes=tuple(change.name for change in changes),
        directions={each.name: each.direction for each in chosen},
        settings=_settings(first, seed),
        left_out=left_out,
        samples=first.count,
    )


def _settings(setting: Setting, seed: int) -> dict[str, str]:
    return {
        "spiritlevel": __version__,
        "torch": torch.__version__,
        "seed": str(seed),
        "loss": setting.problem.loss.name,
        "batch norm": setting.batch_norm,
        "samples": f"{setting.count:,}",
        **({"parameters": setting.chosen} if setting.chosen else {}),
        **({"data": "; ".join(setting.notes)} if setting.notes else {}),
    }


def _pairs(pairs: Any) -> Iterable[tuple[str, nn.Module]]:
    try:
        for pair in pairs:
            name, model = pair
            if not isinstance(name, str) or not isinstance(model, nn.Module):
                raise TypeError
            yield name, model
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"rank needs a dict of models by name, or pairs of a name and a model, got {type(pairs).__name__}."
        ) from error


def _row(
    name: str,
    setting: Setting,
    chosen: Sequence[Measure],
    changes: list[Change],
    apply: bool,
    left_out: dict[str, str],
) -> Checkpoint:
    try:
        accuracy = Estimate(float(setting.margins.shares.mean()))
    except InputError as error:
        accuracy = Estimate(math.nan, reason=str(error))
    values = {each.name: each.attempt(setting) for each in chosen}
    left_out |= {key: value.reason for key, value in values.items() if math.isnan(value.value)}
    made = {change.name: perturb_in(floating(setting), change, apply=apply, layers=False) for change in changes}
    return Checkpoint(
        name=name,
        loss=Estimate(float(setting.losses.mean())),
        accuracy=accuracy,
        measures=values,
        predicted={key: each.predicted for key, each in made.items()},
        measured={key: each.measured for key, each in made.items()},
        flips={key: each.flips_measured for key, each in made.items()},
    )


def _behind(rows: list[Checkpoint], losses: list[Tensor]) -> Iterable[Checkpoint]:
    """The rows with how far each is behind the lowest loss, and the paired interval of that."""
    best = min(range(len(rows)), key=lambda number: rows[number].loss.value)
    for number, row in enumerate(rows):
        apart = losses[number] - losses[best]
        value, count = float(apart.mean()), len(apart)
        low = high = math.nan
        if number == best:
            low = high = 0.0
        elif count >= FEWEST:
            low, high = signed_limits(value, float(standard_error(apart)), count - 1, mean_skewness(apart))
        yield dataclasses.replace(row, behind=value, behind_low=low, behind_high=high)
