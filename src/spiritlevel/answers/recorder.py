"""What every training sample does while a network trains: its loss, margin and entropy at every visit.

The loop has the logits anyway, so this costs no pass. From the visits follow the quantities that set the samples worth
a look apart from the rest: area under the margin, cumulative loss, forgetting events, variability, the step of first
learning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spiritlevel.answers.exhibits import Numbered, exhibits, length
from spiritlevel.answers.observing import Waiting
from spiritlevel.answers.visits import Visits, appended, gathered, merged, summary
from spiritlevel.arguments import checked
from spiritlevel.binding.ranks import Ranks
from spiritlevel.errors import InputError, counted, first_line, needs, shown, unknown_name, whole_number
from spiritlevel.results import figure
from spiritlevel.results.tables import as_csv
from spiritlevel.results.training import SuspiciousSamples
from spiritlevel.storage import check_readable, write_atomically

if TYPE_CHECKING:
    import polars as pl

__all__ = ["SCORES", "Recorder"]

FORMAT, VERSION = "spiritlevel recorder", 1
FILE = "samples.safetensors"
_OF_A_RUN = re.compile(r"samples(-\d+)?\.safetensors")  # of one process, or of one of several

_UNKNOWN = -1

SCORES: dict[str, bool] = {
    "aum": False,
    "cumulative_loss": True,
    "loss": True,
    "margin": False,
    "entropy": True,
    "forgetting": True,
    "first_learned": True,
    "variability": True,
    "confidence": False,
}
"""What samples can be ordered by, and whether a large value is the suspicious one."""


_MOST_SAMPLES = 2**31 - 1  # ids are kept in 32 bits
_LAST_STEP = 2**31 - 1
_WHOLE = (torch.int8, torch.int16, torch.int32)  # what classes are kept in


def _tensor(name: str, values: Any) -> Tensor:
    """Numbers of any kind as a tensor."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be a tensor or a list of numbers, got {shown(values)}.") from error


class Recorder:
    """Keeps loss, margin, correctness and entropy of every training sample at every visit.

    Call `record` with what the loop has anyway, once per batch, samples in any order. Logits are copied and looked
    at many rows at a time, free of cancellation. The record takes 14 bytes per visit, 8 bytes per call, and for the
    label and prediction of each sample 2 bytes up to 128 classes: less than 16 bytes per sample and epoch from the
    second epoch on, 16.1 after the first (`benchmarks/recorder.py`).

    `frame()` has one row per sample:

    - `loss`, `margin` (logit of the label − largest other logit), `entropy`, `correct`, `predicted`: at its last visit;
    - `aum`: the area under the margin, the mean of its margins (Pleiss et al. 2020, arXiv:2001.10528);
    - `cumulative_loss`: the sum of its losses;
    - `forgetting`: how often it was right at one visit and wrong at the next (Toneva et al. 2019, arXiv:1812.05159);
    - `first_learned`: the step at which it was first right, null if it never was;
    - `confidence`, `variability`: mean and standard deviation of the probability of its label (Swayamdipta et al. 2020,
      arXiv:2009.10795); `accuracy`: the share of visits at which it was right; `seen`: how many there were.

    Augmented inputs, dropout and mixed precision are recorded as the loop sees them. With gradient accumulation every
    piece is a call. Each of several processes records its own samples; `merge` joins them.

    Args:
        samples: how many there are, or the data themselves (a pair of tensors, a data set, a list of texts), which
            are kept to be shown by `to_html`.
        classes: names of the classes, for the page.
        path: where `save` writes, a file or a folder. A record that an earlier run left there is continued.

    >>> recorder = Recorder(3)
    >>> for _ in range(2):
    ...     recorder.record(torch.tensor([[2.0, 0.0], [0.5, 1.0]]), torch.tensor([0, 0]), ids=[2, 0])
    >>> recorder.frame().select("id", "seen", "margin", "aum", "first_learned").rows()
    [(0, 2, -0.5, -0.5, None), (1, 0, None, None, None), (2, 2, 2.0, 2.0, 0)]
    """

    @checked
    def __init__(self, samples: Any, *, classes: Sequence[str] = (), path: str | Path | None = None) -> None:
        self.data = None if isinstance(samples, int | np.integer) else samples
        self.samples = whole_number(samples if self.data is None else length(samples), "samples", 1, _MOST_SAMPLES)
        self.classes = tuple(classes)
        self.path = None if path is None else Path(path)
        self.steps = 0
        """The step of the next call, unless that call names another."""
        self._logs: list[Visits] = []
        self._label = torch.full((self.samples,), _UNKNOWN, dtype=torch.int8)
        self._predicted = self._label.clone()
        self._waiting = Waiting()
        self._gone: list[Path] = []
        if self.path is not None and _file(self.path).exists():
            self.load_state_dict(self._left_by_an_earlier_run(_file(self.path)))

    def _left_by_an_earlier_run(self, file: Path) -> dict[str, Tensor]:
        found = Recorder.load(file)
        if found.samples != self.samples:
            raise InputError(
                f"{str(self.path)!r} holds a record of {found.samples:,} samples, not of {self.samples:,}; name "
                "another path, or remove it to start afresh."
            )
        return found.state_dict()

    # ------------------------------------------------------------ recording

    def record(self, logits: Any, targets: Any, ids: Any, step: int | None = None) -> None:
        """Take in a batch: its logits (B, C), or (B,) for one logit, its classes (B,), and which samples these are.

        `ids` are places in the training data, from 0 on; `Recorder.numbered(data)` makes a data set that hands them
        out. `step` counts the calls unless given; it must not fall. What does not fit is refused at once in the first
        call, and otherwise no later than when the record is read.
        """
        if not isinstance(logits, Tensor):
            logits = _tensor("logits", getattr(logits, "logits", logits))
        targets = targets if isinstance(targets, Tensor) else _tensor("targets", targets)
        ids = ids if isinstance(ids, Tensor) else _tensor("ids", ids)
        step = self.steps if step is None else self._step(step)
        full = self._waiting.add(logits, targets, ids, step)
        self.steps = step + 1
        if full:
            self._look()

    def _step(self, step: int) -> int:
        step = whole_number(step, "step", 0, _LAST_STEP)
        if step < self.steps - 1:
            raise InputError(
                f"record got step {step} after step {self.steps - 1}, but steps must not fall; a training that goes "
                f"on from an older state calls rewind({step}) first."
            )
        return step

    def _look(self) -> None:
        """Turn the logits that wait into visits."""
        found = self._waiting.look(self.samples)
        if found is None:
            return
        log, labels, top = found
        self._logs.append(Visits.of(log))
        kind = torch.promote_types(self._label.dtype, _kind((self._waiting.outputs or 1) - 1))
        self._label, self._predicted = self._label.to(kind), self._predicted.to(kind)
        ids = log["ids"].numpy()
        for kept, new in ((self._label, labels), (self._predicted, top)):
            kept.numpy()[ids] = new.numpy()  # of an id that comes several times NumPy keeps the last

    def _log(self) -> Visits:
        self._look()
        self._logs = [appended(self._logs)]
        return self._logs[0]

    @staticmethod
    def numbered(data: Any) -> Dataset[Any]:
        """The same data set with every sample's place at its end, so that a shuffling loader hands out ids.

        An item (input, target) becomes (input, target, id), a dict gets the key "id".

        >>> from torch.utils.data import TensorDataset
        >>> Recorder.numbered(TensorDataset(torch.tensor([5.0, 6.0]), torch.tensor([1, 0])))[1]
        (tensor(6.), tensor(0), 1)
        """
        return Numbered(data)

    # ------------------------------------------------------------ reading

    def _columns(self) -> dict[str, Tensor]:
        """All columns of `frame`, with meaningless numbers where a sample has not been seen."""
        found = summary(self._log(), self.samples)
        own = {"label": self._label.long(), "predicted": self._predicted.long()}
        return {"id": torch.arange(self.samples), **own, **found}

    def frame(self) -> pl.DataFrame:
        """One row per sample, in the order of their ids; null where a sample has not been seen."""
        with needs("a table"):
            import polars as pl

        columns = self._columns()
        seen = pl.Series(columns["seen"].numpy()) > 0
        known = {"first_learned": pl.Series(columns["first_learned"].numpy()) >= 0}
        known["predicted"] = pl.Series(columns["predicted"].numpy()) >= 0
        found = {}
        for name, values in columns.items():
            column = pl.Series(name, values.numpy())
            found[name] = column if name in ("id", "seen") else column.set(~known.get(name, seen), None)
        return pl.DataFrame(found)

    @checked
    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows of `frame` as CSV; with `path` also written there, atomically."""
        return as_csv(self.frame(), path)

    @checked
    def history(self, ids: Any = None) -> pl.DataFrame:
        """Every visit of the given samples, or of all: id, step, loss, margin, entropy, correct, in order of time.

        >>> recorder = Recorder(1)
        >>> recorder.record(torch.tensor([[0.0, 0.0]]), torch.tensor([1]), [0])
        >>> recorder.history([0]).rows()
        [(0, 0, 0.6931471824645996, 0.0, 0.69140625, False)]
        """
        with needs("a table"):
            import polars as pl

        log = self._log()
        order = log.ids.argsort(stable=True)
        if ids is not None:
            order = order[torch.isin(log.ids[order].long(), self._places(ids))]
        columns = {"id": log.ids.long(), "step": log.at(), "loss": log.loss, "margin": log.margin}
        columns |= {"entropy": log.entropy.float(), "correct": log.margin > 0}
        return pl.DataFrame({name: values[order].numpy() for name, values in columns.items()})

    def _places(self, ids: Any) -> Tensor:
        wanted = _tensor("ids", ids).reshape(-1)
        if wanted.is_floating_point() or wanted.is_complex() or bool(((wanted < 0) | (wanted >= self.samples)).any()):
            raise InputError(f"ids must be whole numbers from 0 to {self.samples - 1:,}, got {shown(ids)}.")
        return wanted.long()

    @checked
    def order(self, by: str = "aum") -> Tensor:
        """The ids of all samples that were seen, the most suspicious first; equal ones in the order of their ids."""
        if by not in SCORES:
            raise unknown_name("score", by, SCORES)
        columns = self._columns()
        score = columns[by].double()
        if by in ("forgetting", "first_learned"):
            score = torch.where(columns["first_learned"] < 0, torch.inf, score)
        score = (score if SCORES[by] else -score).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        seen = columns["seen"].nonzero()[:, 0]
        return seen[score[seen].argsort(descending=True, stable=True)]

    @checked
    def suspects(self, count: int = 48, *, by: str = "aum", data: Any = None) -> SuspiciousSamples:
        """The samples to look at first, those whose labels are most likely wrong, with pictures or texts.

        Ordered by a column of `frame`, the suspicious end first: the smallest `aum` (or `margin`, `confidence`), the
        largest `cumulative_loss` (or `loss`, `entropy`, `forgetting`, `first_learned`, `variability`). A sample that
        was never right counts as forgotten more often, and learnt later, than all others.
        """
        order, columns = self.order(by)[: whole_number(count, "count", 1)], self._columns()
        seen = columns["seen"] > 0
        pictures, texts = exhibits(self.data if data is None else data, order, self.samples)
        names = dict.fromkeys([by, *SCORES, "label", "predicted", "seen"])
        return SuspiciousSamples(
            by=by,
            ids=order,
            table={name: columns[name][order] for name in names},
            everything={name: columns[name][seen].float() for name in ("aum", "confidence", "variability")}
            | {"id": columns["id"][seen]},
            samples=self.samples,
            seen=int(seen.sum()),
            visits=float(columns["seen"].double().mean()),
            steps=self.steps,
            never_learned=int((seen & (columns["first_learned"] < 0)).sum()),
            forgotten=int((columns["forgetting"] > 0).sum()),
            classes=self.classes,
            pictures=pictures,
            texts=texts,
        )

    @checked
    def to_html(self, path: str | Path | None = None, *, count: int = 48, by: str = "aum", data: Any = None) -> str:
        """One self-contained page of the samples to look at; with `path` also written there, atomically."""
        return self.suspects(count, by=by, data=data).to_html(path)

    @property
    def nbytes(self) -> int:
        """Bytes that the record takes, in memory and in its file."""
        return sum(tensor.nbytes for tensor in self._state().values())

    def __str__(self) -> str:
        log = self._log()
        each = len(log) / self.samples
        return (
            f"recorder of {counted(self.samples, 'sample')} after {counted(self.steps, 'step')}: "
            f"{len(log.ids.unique()):,} seen, {figure(each, 3)} times on average, {self.nbytes:,} bytes"
        )

    # ------------------------------------------------------------ keeping

    def _state(self) -> dict[str, Tensor]:
        log = self._log().columns()
        return {**log, "label": self._label, "predicted": self._predicted, "next": torch.tensor([self.steps])}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as tensors, for the checkpoint of a training; `load_state_dict` reads it."""
        return {name: tensor.clone() for name, tensor in self._state().items()}

    @checked
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, bit for bit."""
        try:
            label, predicted, steps = (state[name] for name in ("label", "predicted", "next"))
            log = Visits.checked(state, self.samples)
            _check_beside(log, label, predicted, steps)
        except (KeyError, ValueError) as error:
            raise InputError(f"this is not the state of a recorder: {first_line(error)}.") from error
        if {len(label), len(predicted)} != {self.samples}:
            raise InputError(f"the state is that of {len(label):,} samples, but the recorder has {self.samples:,}.")
        self._logs, self._label, self._predicted = [log], label.clone(), predicted.clone()
        self._waiting.clear()
        self.steps = int(steps)

    @checked
    def rewind(self, step: int) -> None:
        """Forget all visits from this step on: a training that goes on from an older state will make them again."""
        whole_number(step, "step", 0, _LAST_STEP)
        before = self._log()
        kept = before.until(step)
        self._predicted[before.ids[len(kept) :].long()] = _UNKNOWN
        self._logs, self.steps = [kept], min(self.steps, step)

    def resume(self, step: int, rank: int | None = None, ranks: int | None = None) -> None:
        """Go on with a training that has made `step` steps: later visits are forgotten, at step 0 all.

        Each of several processes states its `rank`; `path` is then a folder, in which this process has a file of its
        own: what it left there is read, and `save` will write to it. `ranks` is how many processes there are now: where
        there were more before, or one, the first goes on with the files of those that are gone, and `save` removes
        them.
        """
        if rank is not None:
            rank = whole_number(rank, "rank", 0)
        if rank is not None and self.path is not None:
            before, folder = _file(self.path), _file(self.path).parent
            self.path = folder / f"samples-{rank}.safetensors"
            if before != self.path and before.name == FILE and before.exists():
                self.load_state_dict(type(self)(self.samples).state_dict())  # not every process goes on with all of it
            if self.path.exists():
                self.load_state_dict(self._left_by_an_earlier_run(self.path))
        if ranks is not None and not rank:
            self._take_over(whole_number(ranks, "ranks", 1))
        self.rewind(step)

    def _take_over(self, ranks: int) -> None:
        """Go on with the files of processes that are gone too; `load` of the folder would count their visits again."""
        if self.path is None or (ranks == 1 and self.path.suffix == ".safetensors"):
            return
        folder = self.path if ranks == 1 else self.path.parent
        own = {FILE} if ranks == 1 else {f"samples-{rank}.safetensors" for rank in range(ranks)}
        found = sorted(file for file in folder.glob("samples*.safetensors") if _OF_A_RUN.fullmatch(file.name))
        self._gone = [file for file in found if file.name not in own]
        if self._gone:
            left = (self._left_by_an_earlier_run(file) for file in self._gone)
            self.load_state_dict(_joined([self.state_dict(), *left]))

    @checked
    def save(self, path: str | Path | None = None) -> Path:
        """Write the record whole or not at all: a safetensors file, or `samples.safetensors` in a folder.

        Several processes each write a file of their own into one folder, say `samples-0.safetensors` and so on;
        `load` of the folder joins them.
        """
        where = self.path if path is None else Path(path)
        if where is None:
            raise InputError("save needs a path; give it here or to Recorder(samples, path=...).")
        metadata = {"format": FORMAT, "version": str(VERSION), "classes": json.dumps(self.classes)}
        write_atomically(_file(where), safetensors.torch.save(self._state(), metadata))
        if where == self.path:
            for file in self._gone:
                file.unlink(missing_ok=True)
            self._gone = []
        return _file(where)

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Self:
        """The record in a file, or all those in a folder, joined."""
        folder = Path(path)
        if folder.is_dir():
            files = sorted(folder.glob("samples*.safetensors"))
            if not files:
                raise InputError(f"the folder {str(path)!r} holds no record; Recorder.save writes {FILE} there.")
            first, *others = (cls.load(file) for file in files)
            return first.merge(*others) if others else first
        check_readable(folder)
        try:
            content = folder.read_bytes()  # at once: a training may put another file in its place
            state = safetensors.torch.load(content)
            metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__", {})
            kind, version = metadata.get("format"), int(metadata.get("version", 0))
            classes = [str(name) for name in json.loads(metadata.get("classes", "[]"))]
        except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
            raise InputError(f"{str(path)!r} is not the record of a training: {first_line(error)}.") from error
        if kind != FORMAT:
            raise InputError(f"{str(path)!r} is not the record of a training, but some other safetensors file.")
        if version > VERSION:
            raise InputError(f"{str(path)!r} was written by a later spiritlevel (format {version}); upgrade this one.")
        try:
            recorder = cls(state["label"].numel(), classes=classes)
            recorder.load_state_dict(state)
        except (InputError, KeyError) as error:
            raise InputError(f"{str(path)!r} is damaged: {first_line(error)}.") from error
        return recorder

    def merge(self, *others: Recorder, group: Any = None) -> Self:
        """A new recorder of all visits: of this one, of others, and of all ranks of a `torch.distributed` group.

        Each visit must be in one of them only, as it is where every process records its own batches. All ranks get the
        whole; each goes on recording with its own part.
        """
        parts: list[Any] = [self, *others]
        for place, part in enumerate(parts):
            if not isinstance(part, Recorder):
                kind = type(part).__name__
                raise InputError(f"merge takes recorders, got an object of type {kind}; Recorder.load reads a file.")
            if any(part is other for other in parts[:place]):
                raise InputError("merge got the same recorder twice, and its visits would count twice; name it once.")
        sizes = sorted({part.samples for part in parts})
        if len(sizes) > 1:
            raise InputError(f"records of {' and '.join(f'{size:,}' for size in sizes)} samples cannot be merged.")
        states = [part.state_dict() for part in parts]
        if group is not None:
            ranks = Ranks(group, self._waiting.device)
            ranks.same(self.samples, "the number of samples they record")
            own = _joined(states)
            states = gathered({**own, "label": own["label"].int(), "predicted": own["predicted"].int()}, ranks)
        whole = type(self)(self.samples, classes=self.classes)
        whole.data = self.data
        whole.load_state_dict(_joined(states))
        return whole


def _check_beside(log: Visits, label: Tensor, predicted: Tensor, steps: Tensor) -> None:
    """Raise `ValueError` if what stands beside a log cannot belong to it."""
    for name, tensor in (("label", label), ("predicted", predicted), ("next", steps)):
        if tensor.ndim != 1 or tensor.dtype not in (*_WHOLE, torch.int64):
            raise ValueError(f"its column {name!r} holds other numbers")
    last = int(log.steps[-1]) if len(log.steps) else -1
    if len(steps) != 1 or not last < int(steps) <= _LAST_STEP + 1:
        raise ValueError("its next step is not after the last one")


def _joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One state from several; label and prediction of a sample are those of its last visit."""
    samples = len(states[0]["label"])
    logs = [Visits.checked(state, samples) for state in states]
    label, predicted = (torch.full((samples,), _UNKNOWN, dtype=torch.int32) for _ in range(2))
    latest = torch.full((samples,), _UNKNOWN, dtype=torch.int64)
    for state, log in zip(states, logs, strict=True):
        here = torch.full_like(latest, _UNKNOWN).scatter_reduce_(0, log.ids.long(), log.at(), "amax")
        newer = here >= latest  # of two visits at one step the later state's comes last, as in the merged log
        latest = torch.maximum(latest, here)
        label = torch.where(newer, state["label"].int(), label)
        predicted = torch.where(newer, state["predicted"].int(), predicted)
    kind = _kind(max(int(label.max()), int(predicted.max())))
    steps = torch.stack([state["next"] for state in states]).amax(0)
    return {**merged(logs).columns(), "label": label.to(kind), "predicted": predicted.to(kind), "next": steps}


def _kind(highest: int) -> torch.dtype:
    """The smallest integer type that holds the highest class."""
    return next(kind for kind in _WHOLE if highest <= torch.iinfo(kind).max)


def _file(path: Path) -> Path:
    return path if path.suffix == ".safetensors" else path / FILE
