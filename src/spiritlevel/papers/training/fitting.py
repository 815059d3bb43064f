"""`fit` runs a recipe on any model, and resumes from its checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, checked_seed, whole_number
from spiritlevel.papers.training.checkpoints import Folder, kept_name, kept_steps, sealed
from spiritlevel.papers.training.jobs import KEY_VERSION
from spiritlevel.papers.training.recipe import Pair, Progress, Recipe, Row, deciding_fields
from spiritlevel.papers.training.running import Run, check_pair, weights_of
from spiritlevel.storage import digest, lock

_REPORT_SECONDS = 0.2


@dataclass(frozen=True, eq=False)
class History:
    """What `fit` returns.

    `rows` has one row for step 0, each evaluation and the end: `step`, `epoch`, `lr` (of the last update), `loss`
    (mean over the batches since the last row, never NaN; absent at step 0), `weight_norm` ‖θ‖₂, and for each evaluated
    set its `_loss` and, for classes, `_accuracy`. `weights` has the state dict of every kept step and of the last one.
    """

    rows: list[Row]
    weights: dict[int, dict[str, Tensor]]
    step: int
    """The last step."""
    stopped: bool
    """Whether a stopping rule ended the run before its last step."""
    seconds: float
    """Of training, summed over all resumed runs."""


@checked
def fit(
    model: nn.Module,
    train: Pair,
    recipe: Recipe,
    *,
    seed: int = 0,
    keep: Sequence[int] = (),
    evaluate: Mapping[str, Pair] | None = None,
    evaluate_every: int | None = None,
    checkpoint: str | Path | None = None,
    until: Callable[[Row], bool] | None = None,
    progress: Progress | None = None,
    label: str = "training",
) -> History:
    """Train `model` in place, following `recipe`; it is left in eval mode with its last (or averaged) weights.

    The model keeps its device and dtype; batches are moved to the device. Global random states are untouched.

    Args:
        model: Any module that maps a batch of inputs to outputs that the recipe's loss accepts.
        train: Inputs and targets, tensors of equal length.
        recipe: How to train.
        seed: For the order of the data, crops and dropout. The first weights are those of `model`.
        keep: Steps whose weights are kept, 0 for the first ones; those of the last step always are.
        evaluate: Sets whose loss and accuracy go into the history, by name.
        evaluate_every: Steps between two rows of the history. Default: one epoch.
        checkpoint: A folder for checkpoints. A run that finds one of its own there resumes from it: one with the same
            modules (as the model prints itself), trainable parameters, first weights, data, sets to evaluate, recipe,
            seed and `evaluate_every`. A rewritten `forward` goes unnoticed: use another folder then.
        until: Called with every row of the history, to say whether to stop there; must depend on that row alone. It is
            called with the rows found in `checkpoint` too: a run that `until` ended earlier continues if it does not
            end it now, and one that has gone further starts again.
        progress: Called a few times a second with what is under way, the steps done and the total number of steps.
        label: What is under way, for `progress`.

    Raises:
        InputError: the arguments do not fit together; `checkpoint` cannot be written; or, as `Diverged`, the loss or
            the weights are no longer numbers. The model is then in the mode it had, with the weights of its last step.

    >>> from spiritlevel import data, models
    >>> digits, _ = data.load("digits"), torch.manual_seed(0)
    >>> model = models.softmax_regression(inputs=64)
    >>> history = fit(model, digits.train, Recipe(lr=0.5, epochs=5), evaluate={"test": digits.test})
    >>> history.step, len(history.rows), history.rows[-1]["test_accuracy"] > 0.85
    (60, 6, True)
    """
    checked_seed(seed)
    others = {f"the evaluation on {name!r}": pair for name, pair in (evaluate or {}).items()}
    for what, pair in {"training": train, **others}.items():
        check_pair(what, pair)
    folder = None
    if checkpoint is not None:
        facts = {"recipe": recipe, "seed": seed, "evaluate_every": evaluate_every}
        folder = Folder(
            Path(checkpoint), _key(model, train, evaluate or {}, facts | {"recipe": deciding_fields(recipe)}), facts
        )
    with owned(folder, progress, label):
        return run_recipe(
            model,
            train,
            recipe,
            folder,
            seed=seed,
            keep=keep,
            evaluate=evaluate or {},
            evaluate_every=evaluate_every,
            until=until,
            progress=progress,
            label=label,
        )


def _key(model: nn.Module, train: Pair, evaluate: Mapping[str, Pair], facts: Mapping[str, Any]) -> str:
    """The digest of all that determines what `fit` computes, except the code of `forward`; `until` is asked again."""
    network = {
        "modules": str(model),
        "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "weights": {name: sealed(tensor) for name, tensor in weights_of(model).items()},
    }
    sets = {name: [sealed(tensor) for tensor in pair] for name, pair in evaluate.items()}
    data = [sealed(tensor) for tensor in train]
    return digest({"version": KEY_VERSION, **facts, "network": network, "data": data, "evaluate": sets})


@contextlib.contextmanager
def owned(folder: Folder | None, progress: Progress | None, label: str) -> Iterator[None]:
    """Keep other processes out of `folder`, if there is one, after waiting for any that is at work there."""

    def waiting() -> None:
        if progress:
            progress(f"{label}: waiting for another process that is doing the same", 0, 0)

    with contextlib.ExitStack() as stack:
        if folder:
            with folder.speaking():
                stack.enter_context(lock(folder.path, waiting=waiting))
        yield


@contextlib.contextmanager
def _in_training(run: Run) -> Iterator[None]:
    """The model in training mode, then in eval mode, or after an error in the mode it had. It keeps no gradients."""
    modes = [(module, module.training) for module in run.model.modules()]
    run.model.train()
    try:
        yield
        run.model.eval()
    except BaseException:
        for module, mode in modes:
            module.training = mode
        raise
    finally:
        run.optimizer.zero_grad()


class _Fitting:
    """One run of a recipe, which evaluates and keeps what is due, and knows when it is over."""

    def __init__(
        self,
        run: Run,
        folder: Folder | None,
        keep: Sequence[int],
        sets: Mapping[str, Pair],
        every: int,
        until: Callable[[Row], bool] | None,
    ) -> None:
        for step in keep:
            if not 0 <= step <= run.total:
                raise InputError(f"keep asks for step {step}, but the training run has steps 0 to {run.total}.")
        self.run, self.folder, self.sets, self.every, self.until = run, folder, sets, every, until
        self.keep, self.wanted = keep, set(keep)
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.over = False

    def complete(self, row: Row) -> bool:
        """Whether the recipe ends here."""
        recipe = self.run.recipe
        goal = recipe.until_loss
        fitted = goal is not None and row["step"] >= recipe.until_step and row["train_loss"] <= goal
        return fitted or row["step"] == self.run.total

    def asked_to_stop(self, row: Row) -> bool:
        """Whether the caller ends it here."""
        return self.until is not None and self.until(dict(row))

    def take(self, network: nn.Module) -> None:
        """Keep the weights of this step."""
        step = self.run.step
        self.weights[step] = weights_of(network)
        if self.folder:
            self.folder.write(kept_name(step), self.weights[step])

    def ends(self) -> bool:
        """Evaluate and keep what is due at this step, and say whether it is the last one."""
        run = self.run
        last, due = run.step == run.total, run.step % self.every == 0
        if not (last or due or run.checks() or run.step in self.wanted):
            return False
        network = run.network()
        if last or due or (run.checks() and run.reaches_goal(network)):
            run.evaluate(network, self.sets)
            last = self.complete(run.rows[-1]) or self.asked_to_stop(run.rows[-1])
        if last or run.step in self.wanted:
            self.take(network)
        run.model.train()
        return last

    def resume(self, folder: Folder) -> bool:
        """Restore what the folder holds, if that is of use; returns whether it holds the whole run."""
        run = self.run
        if not (state := folder.read()) or state.get("labels", run.labels) != run.labels:
            return False
        step, rows, kept = state["step"], state["rows"], kept_steps(folder.files)
        stop = next((row["step"] for row in rows if self.asked_to_stop(row)), step + 1)
        ended = self.complete(rows[-1]) or stop == step
        # start again if steps were passed that had to be kept, or the one to stop at, or there is no way forward
        again = any(missed <= step for missed in self.wanted - kept) or stop < step
        if again or not (ended or "checkpoint" in state):
            self.wanted |= kept
            folder.files = {}
            return False
        self.weights = {found: folder.tensors(kept_name(found)) for found in kept & {*self.wanted, step}}
        if ended and step in kept:
            run.step, run.rows, run.seconds = step, rows, state["seconds"]
            return True
        run.restore(state, folder.tensors(state["checkpoint"]))
        self.over = ended
        if ended:  # it only passed this step, and its weights were not kept
            self.take(run.network())
        return False

    def go(self, progress: Progress | None, label: str) -> None:
        """Train to the end."""
        run = self.run
        first, begin, reported, earlier = run.step, time.monotonic(), 0.0, run.seconds
        if self.over or (not run.rows and self.ends()):
            return
        for outputs, targets in run.batches():
            now = time.monotonic()
            run.seconds = earlier + now - begin
            if progress and now - reported > _REPORT_SECONDS:
                reported = now
                speed = (run.step - first) / (now - begin)
                progress(f"{label}: {run.describe(outputs, targets)}, {speed:.3g} steps/s", run.step, run.total)
            if self.ends():
                return
            if self.folder:
                self.folder.checkpoint(run)

    def history(self) -> History:
        """The result; the model gets the weights of its last step."""
        run = self.run
        run.model.load_state_dict(self.weights[run.step])  # differs from what it has if the weights were averaged
        chosen = {step: self.weights[step] for step in sorted(self.weights) if step in self.keep or step == run.step}
        return History(run.rows, chosen, run.step, run.step < run.total, run.seconds)


def run_recipe(
    model: nn.Module,
    train: Pair,
    recipe: Recipe,
    folder: Folder | None,
    *,
    seed: int,
    keep: Sequence[int],
    evaluate: Mapping[str, Pair],
    evaluate_every: int | None,
    until: Callable[[Row], bool] | None = None,
    progress: Progress | None,
    label: str,
) -> History:
    """`fit` in a folder of its own, or in none."""
    run = Run(model, train, recipe, seed)
    sets = dict(evaluate)
    if recipe.until_loss is not None:
        own = sets.setdefault("train", (run.inputs, run.targets))
        if own is not train and not all(torch.equal(a, b) for a, b in zip(own, train, strict=True)):
            raise InputError(
                "until_loss reads the loss over the training set, but the evaluation set called 'train' is a "
                "different one; give it another name."
            )
    for name, pair in sets.items():
        check_pair(f"the evaluation on {name!r}", pair)
    every = run.per_epoch if evaluate_every is None else whole_number(evaluate_every, "evaluate_every", 1)
    fitting = _Fitting(run, folder, keep, sets, every, until)
    with preserved_random_state(), torch.enable_grad(), _in_training(run):
        torch.manual_seed(seed)
        if folder:
            if fitting.resume(folder):
                return fitting.history()
            with folder.speaking():
                folder.clean()
        fitting.go(progress, label)
        if folder and fitting.complete(run.rows[-1]):
            folder.finish(run)
        elif folder:
            folder.suspend(run)  # the next call may want to continue
        return fitting.history()
