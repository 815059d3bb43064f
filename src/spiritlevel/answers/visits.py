"""The visits of samples while a network trains, as a log in order of time: 14 bytes each.

A call of the recorder is a run of rows with one step, so that steps cost nothing per visit, whatever the order in which
samples come, and however often one of them does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from spiritlevel.binding.ranks import Ranks

_KINDS = {
    "ids": torch.int32,
    "loss": torch.float32,
    "margin": torch.float32,
    "entropy": torch.bfloat16,  # three digits at any size
    "steps": torch.int32,
    "rows": torch.int32,
}


@dataclass(frozen=True)
class Visits:
    """A log: which sample was seen, its loss, margin and entropy then; `rows` of them at each of the `steps`."""

    ids: Tensor
    loss: Tensor
    margin: Tensor
    entropy: Tensor
    steps: Tensor
    rows: Tensor

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> Visits:
        """From tensors, converted to the right kinds."""
        return cls(**{name: columns[name].to(kind) for name, kind in _KINDS.items()})

    @classmethod
    def empty(cls) -> Visits:
        """No visits."""
        return cls(**{name: torch.zeros(0, dtype=kind) for name, kind in _KINDS.items()})

    @classmethod
    def checked(cls, state: Mapping[str, Tensor], samples: int) -> Visits:
        """From a file or a checkpoint; raises `ValueError` if it cannot be a log of this many samples."""
        for name, kind in _KINDS.items():
            if name not in state or state[name].dtype != kind or state[name].ndim != 1:
                raise ValueError(f"its column {name!r} is missing or holds other numbers")
        log = cls(**{name: state[name].clone() for name in _KINDS})
        rows = {len(log.ids), len(log.loss), len(log.margin), len(log.entropy), int(log.rows.sum())}
        if len(rows) > 1 or len(log.steps) != len(log.rows) or bool((log.rows < 0).any()):
            raise ValueError("its columns differ in length")
        if len(log.ids) and not 0 <= int(log.ids.min()) <= int(log.ids.max()) < samples:
            raise ValueError(f"it names samples beyond its {samples:,}")
        if bool((log.steps.diff() < 0).any()) or bool((log.steps[:1] < 0).any()):
            raise ValueError("its steps fall, or begin below 0")
        return log

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def at(self) -> Tensor:
        """The step of every visit."""
        return self.steps.long().repeat_interleave(self.rows)

    def until(self, step: int) -> Visits:
        """The visits before a step."""
        calls = int((self.steps < step).sum())
        rows = int(self.rows[:calls].sum())
        kept = {name: tensor[: calls if name in ("steps", "rows") else rows] for name, tensor in self.columns().items()}
        return Visits(**{name: tensor.clone() for name, tensor in kept.items()})


def appended(logs: Sequence[Visits]) -> Visits:
    """One log from several, each later than the one before."""
    if len(logs) == 1:
        return logs[0]
    return (
        Visits(**{name: torch.cat([getattr(log, name) for log in logs]) for name in _KINDS}) if logs else Visits.empty()
    )


def merged(logs: Sequence[Visits]) -> Visits:
    """One log from several that ran side by side, in the order of the steps."""
    whole = appended(logs)
    if len(logs) < 2 or not len(whole):
        return whole
    at, order = whole.at().sort(stable=True)
    steps, rows = at.unique_consecutive(return_counts=True)
    columns = {name: getattr(whole, name)[order] for name in ("ids", "loss", "margin", "entropy")}
    return Visits.of({**columns, "steps": steps, "rows": rows})


def gathered(state: dict[str, Tensor], ranks: Ranks) -> list[dict[str, Tensor]]:
    """The tensors of all ranks: each adds the bits of its own to zeros of the others. None has more than 32 bits."""
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks.count)]
    for name in sorted(state):
        value = state[name]
        bits = value.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
        sizes = torch.zeros(ranks.count, dtype=torch.int64)
        sizes[ranks.rank] = len(bits)
        ranks.add([sizes])
        table = torch.zeros(
            (ranks.count, int(sizes.max())), dtype=torch.int64 if bits.dtype == torch.int64 else torch.int32
        )
        table[ranks.rank, : len(bits)] = bits
        ranks.add([table])
        for rank, size in enumerate(sizes.tolist()):
            found[rank][name] = table[rank, :size].to(bits.dtype).view(value.dtype)
    return found


def summary(log: Visits, samples: int) -> dict[str, Tensor]:
    """What follows for every sample: its last visit, sums and counts over all, its first success; see `Recorder`."""
    ids = log.ids.long()
    seen = torch.bincount(ids, minlength=samples)

    def total(values: Tensor) -> Tensor:
        return torch.bincount(ids, values.double(), minlength=samples).double()

    order = ids.argsort(stable=True)  # the visits of a sample side by side, in order of time
    sample, correct = ids[order], log.margin[order] > 0
    same = sample[1:] == sample[:-1]
    last = order[torch.cat([~same, torch.ones(min(1, len(ids)), dtype=torch.bool)])]
    now = {name: torch.full((samples,), torch.nan) for name in ("loss", "margin", "entropy")}
    for name, values in now.items():
        values[ids[last]] = getattr(log, name)[last].float()
    forgotten = torch.bincount(sample[1:][same & correct[:-1] & ~correct[1:]], minlength=samples)
    right = sample[correct]
    begin = torch.ones(len(right), dtype=torch.bool)
    begin[1:] = right[1:] != right[:-1]
    first = torch.full((samples,), -1, dtype=torch.int64)
    first[right[begin]] = log.at()[order][correct][begin]
    chance = log.loss.double().neg().exp()
    confidence = total(chance) / seen
    return {
        "seen": seen,
        **now,
        "correct": now["margin"] > 0,
        "aum": total(log.margin) / seen,
        "cumulative_loss": total(log.loss),
        "forgetting": forgotten,
        "first_learned": first,
        "confidence": confidence,
        "variability": (total((chance - confidence[ids]).square()) / seen).sqrt(),
        "accuracy": torch.bincount(right, minlength=samples) / seen,
    }
