"""A tracker and a recorder in the trainers that people use: Hugging Face's `Trainer` and Lightning.

A loop of your own needs neither: it calls `Tracker.step()` and `Recorder.record(...)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spiritlevel.answers.recorder import Recorder
from spiritlevel.answers.tracking import Tracker
from spiritlevel.errors import InputError, first_line, needs

__all__ = ["hugging_face_callback", "lightning_callback"]

_NO_IDS = (
    "the batches have no key 'id', so a Recorder cannot tell whose logits it sees; train on Recorder.numbered(data) "
    "with TrainingArguments(remove_unused_columns=False) and a collator that keeps ids."
)
_NO_LABELS = (
    "the batches that reach the model have no key 'labels', so a Recorder cannot judge its logits; leave the labels "
    "among the model's inputs (no label smoothing and no loss function of the trainer's)."
)
_NO_LOGITS = (
    "training_step must return a dict with 'loss', 'logits', 'targets' and 'ids' for a Recorder; 'ids' are places in "
    "the training data, as Recorder.numbered(data) hands them out."
)


class _Watch:
    """What both callbacks do, whichever trainer calls them."""

    def __init__(self, data: Any, recorder: Recorder | None, options: dict[str, Any]) -> None:
        if recorder is not None and not isinstance(recorder, Recorder):
            raise InputError(f"recorder= needs a spiritlevel.Recorder, got {type(recorder).__name__}.")
        self.data, self.recorder, self.options = data, recorder, options
        self.tracker: Tracker | None = None
        self.busy = False
        self._kept = -1

    @property
    def tracks(self) -> bool:
        """With a recorder and no options for measurements, nothing is measured."""
        return self.recorder is None or self.data is not None or bool(self.options)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        logger: Any,
        step: int,
        ranks: tuple[int, int],
    ) -> None:
        """Before the first step, or after a checkpoint of `step` steps was loaded; `ranks`: which process of how many.

        The first process measures, and the others wait for it at their next exchange of gradients; each records its own
        samples, to a file of its own.
        """
        rank, count = ranks
        if self.tracks and rank == 0:
            self.tracker = Tracker(model, self.data, **{"optimizer": optimizer, "logger": logger, **self.options})
            self.tracker.resume(step)
        if self.recorder is not None:
            self.recorder.resume(step, rank if count > 1 else None, count)

    def step(self, batch: Any = None) -> None:
        """After a step of the optimiser."""
        if self.tracker is not None:
            self.busy = True  # our own measurements also call the model's hooks
            try:
                self.tracker.step(batch)
            finally:
                self.busy = False

    def keep(self) -> None:
        """Write the record before a checkpoint: anything later is forgotten when the checkpoint is loaded."""
        recorder = self.recorder
        if recorder is not None and recorder.path is not None and recorder.steps != self._kept:
            try:
                recorder.save()
            except OSError as error:  # a full disk is no reason to end a training that can go on
                text = f"the record could not be written at step {recorder.steps:,}: {first_line(error)}"
                warnings.warn(f"{text}; the training goes on, and writing is retried.", RuntimeWarning, stacklevel=2)
                return
            self._kept = recorder.steps


class _Callback:
    """What both callbacks expose."""

    watch: _Watch

    @property
    def tracker(self) -> Tracker | None:
        """The tracker of this training run, once it has begun; None in all processes but the first."""
        return self.watch.tracker

    @property
    def recorder(self) -> Recorder | None:
        """The recorder that was given."""
        return self.watch.recorder


def hugging_face_callback(trainer: Any, data: Any = None, *, recorder: Recorder | None = None, **options: Any) -> Any:
    """A callback for a `transformers.Trainer`, for its `add_callback`.

    >>> trainer.add_callback(hugging_face_callback(trainer, probe, every=200, page="run.html"))  # doctest: +SKIP

    After every step of the optimiser it calls a `Tracker` (`callback.tracker`), made when the training begins, with the
    trainer's optimiser. Rows go through `trainer.log`, and so to everything the trainer reports to: TensorBoard,
    Weights & Biases, its own history. With several processes, the first measures.

    With a `recorder` it also records the logits of every forward pass in training mode. The batches then carry "id":
    train on `Recorder.numbered(data)`, with `TrainingArguments(remove_unused_columns=False)`. The record is written to
    the recorder's `path` before every checkpoint and at the end, by each of several processes to a file of its own in
    that folder; a training run that resumes from a checkpoint continues it from there, one that starts again overwrites
    it.

    Args:
        trainer: the `Trainer`.
        data: what is measured, for `Tracker`: a pair (inputs, targets), inputs as a tensor or as a dict; None for the
            batch of the step (with a recorder and no options: nothing is measured).
        recorder: a `Recorder` of the training data.
        options: of `Tracker`: every, quantities, share, path, page, ...

    Cost: that of `Tracker` and of `Recorder`.
    """
    with needs("a callback for Hugging Face's Trainer"):
        from transformers import Trainer, TrainerCallback
    if not isinstance(trainer, Trainer):
        raise InputError(
            f"hugging_face_callback needs the transformers.Trainer that it is added to, got {type(trainer).__name__}."
        )
    return type("SpiritlevelCallback", (_HuggingFace, TrainerCallback), {})(trainer, _Watch(data, recorder, options))


class _HuggingFace(_Callback):
    """The part of the callback that does not need transformers."""

    def __init__(self, trainer: Any, watch: _Watch) -> None:
        self.trainer, self.watch = trainer, watch
        self._batch: Any = None
        self._ids: Any = None
        self._handles: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        ranks = args.process_index, args.world_size
        self.watch.begin(model, _bare(others.get("optimizer")), _Log(self._log), state.global_step, ranks)
        self._let_go()
        if self.recorder is not None or self.watch.data is None:
            before = model.register_forward_pre_hook(self._before, with_kwargs=True)
            self._handles = [before, model.register_forward_hook(self._after, with_kwargs=True)]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watch.step(None if self.watch.data is not None else self._batch)
        self._batch = None
        self._keep_if_due(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._keep_if_due(control)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watch.keep()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._let_go()
        self.watch.keep()

    def _let_go(self) -> None:
        """Remove the hooks; an interrupted run has left them on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _keep_if_due(self, control: Any) -> None:
        if control.should_save:
            self.watch.keep()

    def _log(self, numbers: dict[str, float]) -> None:
        control = self.trainer.control
        due = control.should_log  # by the trainer itself; a log of ours would count as its own
        self.trainer.log(dict(numbers))
        control.should_log = due

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Take the ids out of what the model is called with."""
        if self.watch.busy:
            return None
        self._ids = kwargs.get("id")
        return args, {name: value for name, value in kwargs.items() if name != "id"}

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.watch.busy or not module.training:
            return
        labels = kwargs.get("labels")
        self._batch = _inputs(kwargs), labels
        if self.recorder is None:
            return
        if self._ids is None:
            raise InputError(_NO_IDS)
        if labels is None:
            raise InputError(_NO_LABELS)
        logits = output["logits"] if isinstance(output, Mapping) else output
        self.recorder.record(logits, labels, self._ids, step=self.trainer.state.global_step)


def _inputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call: neither labels nor the trainer's own numbers."""
    others = ("labels", "num_items_in_batch")
    return {name: value for name, value in kwargs.items() if name not in others and value is not None}


def lightning_callback(data: Any = None, *, recorder: Recorder | None = None, **options: Any) -> Any:
    """A callback for Lightning's `Trainer`.

    >>> trainer = Trainer(callbacks=[lightning_callback(probe, every=200, page="run.html")])  # doctest: +SKIP

    After every step of the optimiser it calls a `Tracker` (`callback.tracker`), made when the training begins, with the
    first optimiser; the module's `forward` gives the logits. Rows go to all of the trainer's loggers. With several
    processes, the first measures.

    With a `recorder` it also records what `training_step` returns: a dict with "loss", "logits", "targets" and "ids",
    the places of the samples (`Recorder.numbered`). The record is written to the recorder's `path` with every
    checkpoint and at the end, by each of several processes to a file of its own in that folder; a training run that
    resumes from a checkpoint continues it from there, one that starts again overwrites it.

    Args:
        data: what is measured, for `Tracker`: a pair (inputs, targets); None for the batch of the step, of which the
            first two entries are taken (with a recorder and no options: nothing is measured).
        recorder: a `Recorder` of the training data.
        options: of `Tracker`: every, quantities, share, path, page, ...

    Cost: that of `Tracker` and of `Recorder`.
    """
    with needs("a callback for Lightning"):
        from lightning import pytorch as lightning
    return type("SpiritlevelCallback", (_Lightning, lightning.Callback), {})(_Watch(data, recorder, options))


class _Lightning(_Callback):
    """The part of the callback that does not need Lightning."""

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def log(numbers: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        logger = _Log(log) if trainer.loggers else None
        ranks = trainer.global_rank, trainer.world_size
        self.watch.begin(pl_module, optimizer, logger, trainer.global_step, ranks)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            if not (isinstance(outputs, Mapping) and {"logits", "targets", "ids"} <= outputs.keys()):
                raise InputError(_NO_LOGITS)
            self.recorder.record(outputs["logits"], outputs["targets"], outputs["ids"], step=self._step)
        if trainer.global_step > self._step:  # not while gradients are only accumulated
            self.watch.step(None if self.watch.data is not None else tuple(batch)[:2])

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.watch.keep()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.keep()


class _Log:
    """A function as a logger for `Tracker`."""

    def __init__(self, log: Callable[[dict[str, float]], None]) -> None:
        self._log = log

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Hand on the numbers; the trainer knows its step."""
        self._log(numbers)


def _bare(optimizer: Any) -> Any:
    """The torch optimiser inside one that accelerate has wrapped."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer
