"""Training: a recipe says how, a job says what, `fit` runs a recipe on any model, `train` runs a job once and keeps it.

Tensors stay in memory and batches are cut out of them, so a step costs what it costs in a bare PyTorch loop. A run is
a function of its config and its seed: the order of an epoch and the crops of a step are drawn from generators that are
seeded by the run's seed and the epoch or step, dropout from a forked global state that is part of every checkpoint. So
a run that was killed and started again ends bitwise where the uninterrupted one ends (the same machine and number of
threads given: both may change the rounding of a sum). Nothing global is changed.

Trained networks are kept in a folder named by the digest of their job. `state.json` there names every other file
with its SHA-256 and is replaced last, atomically. So whatever moment a process dies, the folder holds a whole state,
and what is damaged later is found out and trained again.

>>> job = Job(network="softmax_regression", data="digits", recipe=Recipe(lr=0.5, steps=100), keep=(0,))
>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     trained = train(job, cache=folder)
...     trained.steps, trained.history[-1]["train_accuracy"] > 0.9
((0, 100), True)
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from spiritlevel import data as data_sets
from spiritlevel.binding import losses
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, first_line, unknown_name, whole_number
from spiritlevel.papers import networks as models
from spiritlevel.storage import cache_folder, digest, lock, plain, write_atomically

Pair = tuple[Tensor, Tensor]
Row = dict[str, float]
Progress = Callable[[str, int, int], None]
"""Called with what is under way (with loss, accuracy and speed), the steps done, and the steps in all."""

_LATER = {"pool": 1, "channels_last": False, "crop": 4}  # fields that keys do not have, with their defaults
_VERSION = 1  # part of every key: to be raised when the same job would give another network
_CHECKPOINT_SECONDS = 20.0
_CHECKPOINT_SHARE = 0.05  # of the time at most goes into checkpoints
_REPORT_SECONDS = 0.2
_EVALUATION_BATCH = 1000
_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601, the usual weights of red, green, blue


# ---------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. Every field is part of the key of a job.

    Weights are updated `steps` times, or for `epochs` passes over the data, each in a new random order. The last
    batch of a pass is smaller where the batch size does not divide the data; one of a single sample is left out, since
    batch norm cannot take it. A batch size beyond the data means all of the data.

    Schedules, with the epoch t from 0, the number of epochs T, and α₀ = `lr` (paper C, Eq. 14 and 15; mathematics 9.3):

    - "constant": α₀.
    - "paper_c": with u = t/T and r = 0.01: α₀ for u ≤ 0.5, then linear down to α₀r at u = 0.9, then α₀r.
    - "averaging": the same with u = t/`average_from` and r = `averaged_lr`. The paper prints 2α₀ for the last rate; a
      decay cannot end there, and ½α₀ is taken to be meant. `averaged_lr=2.0` is what is printed.

    >>> Recipe(lr=0.1, momentum=0.9, weight_decay=5e-4, epochs=300, schedule="paper_c").rate(270, 300)
    0.001
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    """"adam" has β = (0.9, 0.999) and ε = 1e-8."""
    lr: float = 0.1
    momentum: float = 0.0
    """Heavy ball, without dampening; for "sgd" only."""
    weight_decay: float = 0.0
    """γ of the penalty ½γ‖w‖² on all parameters, as PyTorch's `weight_decay`."""
    decoupled: bool = False
    """Decay the weights by the factor 1 − lr·γ beside the step instead of through the gradient (AdamW)."""
    batch_size: int = 128
    steps: int | None = None
    epochs: int | None = None
    schedule: Literal["constant", "paper_c", "averaging"] = "constant"
    average_from: int | None = None
    """Average the weights of this epoch (from 0) and all later ones; the network is then that average, with its
    batch-norm statistics taken anew over the training set."""
    average_every: Literal["step", "epoch"] = "step"
    """Average over the weights after every step, or at the end of every epoch."""
    averaged_lr: float = 0.5
    """The learning rate of schedule "averaging" from 0.9·`average_from` on, in units of `lr`."""
    augment: bool = False
    """Crop (after `crop` zeros on every side) and flip each image at random, anew in every step."""
    crop: int = 4
    """Pixels of zeros around an image before it is cropped back to its size."""
    loss: str = "cross_entropy"
    until_loss: float | None = None
    """Stop at the first evaluation at which the loss over the training set is at most this."""
    until_step: int = 0
    """Before this step, `until_loss` does not stop anything."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("optimizer", ("sgd", "adam")),
            ("schedule", ("constant", "paper_c", "averaging")),
            ("average_every", ("step", "epoch")),
            ("loss", tuple(losses.NAMED)),
        ):
            if getattr(self, name) not in choices:
                raise unknown_name(name, getattr(self, name), choices)
        for name in ("lr", "averaged_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"a recipe needs a positive {name}, got {getattr(self, name)}.")
        if not 0 <= self.momentum < 1:
            raise InputError(f"a recipe needs a momentum in [0, 1), got {self.momentum}.")
        if self.momentum and self.optimizer != "sgd":
            raise InputError(
                f"momentum={self.momentum} is for optimizer='sgd'; Adam has moments of its own, leave it 0."
            )
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"a recipe needs a weight_decay >= 0, got {self.weight_decay}.")
        whole_number(self.batch_size, "batch_size", 1)
        whole_number(self.crop, "crop", 0)
        if (self.steps is None) == (self.epochs is None):
            raise InputError(f"a recipe needs either steps or epochs, got steps={self.steps}, epochs={self.epochs}.")
        whole_number(*((self.steps, "steps") if self.epochs is None else (self.epochs, "epochs")), 0)
        if self.average_from is not None:
            whole_number(self.average_from, "average_from", 0)
        elif self.schedule == "averaging":
            raise InputError("schedule='averaging' needs average_from, the epoch from which the weights are averaged.")

    def rate(self, epoch: int, epochs: float) -> float:
        """The learning rate in `epoch` (from 0) of `epochs`."""
        if self.schedule == "constant":
            return self.lr
        ratio, length = (0.01, epochs) if self.schedule == "paper_c" else (self.averaged_lr, self.average_from or 0)
        done = epoch / length if length else 1.0
        if done <= 0.5:
            return self.lr
        return self.lr * (ratio + (1 - ratio) * max(0.9 - done, 0.0) / 0.4)


# ------------------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which network, on which data, by which recipe: all that decides what `train` returns.

    The training set is shuffled by `split_seed`; its first `validation` points are the validation set, the next
    `train_size` (default: all others) the training set. Points of the test set are drawn likewise.

    >>> job = Job(network="lenet5", options={"activation": "tanh"}, data="mnist", recipe=Recipe(lr=0.05, steps=10_000))
    >>> job.options
    (('activation', 'tanh'),)
    >>> job.key == Job(**{**vars(job), "seed": 1}).key
    False
    """

    network: str
    """One of `models.NAMES`."""
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Of the network. `channels`, `inputs`, `size` and `classes` come from the data unless given."""
    data: str
    """One of `data.names()`."""
    train_size: int | None = None
    validation: int = 0
    test_size: int | None = None
    pixels: Literal["unit", "standard"] = "unit"
    """"unit": in [0, 1]. "standard": minus the mean and by the standard deviation of each channel of the training
    set."""
    grey: bool = False
    """Colour images as one channel, 0.299 R + 0.587 G + 0.114 B."""
    pool: int = 1
    """Every pool × pool pixels averaged to one: 2 makes images of 32² images of 16², at a quarter of the cost."""
    channels_last: bool = False
    """Weights and images in the memory format that convolutions on a CPU take less time with."""
    recipe: Recipe
    seed: int = 0
    """Of the first weights, the order of the data, crops and dropout."""
    split_seed: int = 0
    keep: tuple[int, ...] = ()
    """Steps whose weights are kept, 0 for the first ones. Those of the last step always are. Not part of the key: a
    training that kept other steps is run again if one is missing, and then keeps both."""
    evaluate: tuple[str, ...] = ("train", "validation", "test")
    """The sets whose loss and accuracy go into the history."""
    evaluate_every: int | None = None
    """Steps between two rows of the history. Default: an epoch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(dict(self.options).items())))
        object.__setattr__(self, "keep", tuple(sorted(set(self.keep))))
        if self.network not in models.NAMES:
            raise unknown_name("network", self.network, models.NAMES)
        if self.data not in data_sets.names():
            raise unknown_name("data set", self.data, data_sets.names())
        if self.pixels not in ("unit", "standard"):
            raise unknown_name("form of the pixels", self.pixels, ("unit", "standard"))
        for name in self.evaluate:
            if name not in Parts._fields[:3]:
                raise unknown_name("set to evaluate", name, Parts._fields[:3])
        whole_number(self.validation, "validation", 0)
        whole_number(self.pool, "pool", 1)
        for name in ("train_size", "test_size", "evaluate_every"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, 1)

    @property
    def key(self) -> str:
        """The digest of all fields but `keep`, which changes nothing about the training.

        Fields that came later count only where they are not at their defaults, so that older networks are still found.
        """
        return digest({"version": _VERSION, "job": {**_of_key(self), "keep": None, "recipe": _of_key(self.recipe)}})


def _of_key(config: Job | Recipe) -> dict[str, Any]:
    """The fields that decide a key: all but those that came later and are at their defaults."""
    fields: dict[str, Any] = plain(config)
    return {name: value for name, value in fields.items() if name not in _LATER or value != _LATER[name]}


class Parts(NamedTuple):
    """The sets of a job, each a pair (inputs, targets), mapped by its `grey` and `pixels`."""

    train: Pair
    validation: Pair | None
    test: Pair
    classes: tuple[str, ...]


def parts(job: Job) -> Parts:
    """The training, validation and test set of a job as the network sees them, unaugmented.

    >>> found = parts(Job(network="mlp", data="digits", train_size=1000, validation=400, recipe=Recipe(steps=1)))
    >>> [tuple(inputs.shape) for inputs, _ in (found.train, found.validation, found.test)]
    [(1000, 1, 8, 8), (400, 1, 8, 8), (360, 1, 8, 8)]
    """
    whole = data_sets.load(job.data)
    total = len(whole.train[1])
    size = total - job.validation if job.train_size is None else job.train_size
    if not 0 < size <= total - job.validation:
        raise InputError(
            f"{job.data} has {total:,} training points, which is too few for train_size={size} and "
            f"validation={job.validation}: ask for fewer."
        )
    tests = len(whole.test[1])
    if job.test_size is not None and job.test_size > tests:
        raise InputError(f"{job.data} has {tests:,} test points, test_size={job.test_size} asks for more.")
    order = torch.randperm(total, generator=_generator(job.split_seed, "split"))
    test_order = torch.randperm(tests, generator=_generator(job.split_seed, "test"))[: job.test_size]

    def cut(pair: Pair, indices: Tensor) -> Pair:
        indices = indices.sort().values  # the original order, whatever the part
        inputs = pair[0].index_select(0, indices)
        if job.grey and inputs.shape[1] == 3:
            inputs = torch.einsum("nchw,c->nhw", inputs, torch.tensor(_GREY))[:, None].contiguous()
        if job.pool > 1:
            inputs = nn.functional.avg_pool2d(inputs, job.pool)
        return inputs, pair[1].index_select(0, indices)

    train = cut(whole.train, order[job.validation : job.validation + size])
    validation = cut(whole.train, order[: job.validation]) if job.validation else None
    test = cut(whole.test, test_order)
    if job.pixels == "standard":
        std, mean = torch.std_mean(train[0], dim=(0, 2, 3), keepdim=True, correction=0)
        std[std == 0] = 1.0
        for inputs, _ in filter(None, (train, validation, test)):
            inputs.sub_(mean).div_(std)
    return Parts(train, validation, test, whole.classes)


def _build(job: Job) -> nn.Module:
    """The network of a job with its first weights. What the data decides is filled in."""
    (listing,) = (row for row in data_sets.describe() if row.name == job.data)
    channels, height, width = listing.shape
    height, width = height // job.pool, width // job.pool
    channels = 1 if job.grey else channels
    facts = {"channels": channels, "inputs": channels * height * width, "size": height, "classes": listing.classes}
    known = inspect.signature(getattr(models, job.network)).parameters
    options = {name: value for name, value in facts.items() if name in known} | dict(job.options)
    with preserved_random_state():
        torch.manual_seed(job.seed)
        network = models.build(job.network, **options)
    if job.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # PyTorch's types do not know it
    return network


# -------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True, eq=False)
class History:
    """What `fit` returns.

    `rows` hold, at step 0, at every evaluation and at the end: `step`, `epoch`, `lr` (of the last
    update), `loss` (mean over the batches since the last row, NaN-free; absent at step 0), `weight_norm` ‖θ‖₂, and for
    each evaluated set its `_loss` and, for classes, `_accuracy`. `weights` has the state dict of every kept step and of
    the last one.
    """

    rows: list[Row]
    weights: dict[int, dict[str, Tensor]]
    step: int
    """The last step."""
    stopped: bool
    """Whether a stopping rule ended the run before its last step."""
    seconds: float
    """Of training, over all resumed runs."""


def _generator(seed: int, purpose: str, number: int = 0) -> torch.Generator:
    """A generator for one purpose. Hashed, since the generator itself looks only at the lower 32 bits of its seed."""
    text = f"{purpose} {number} {seed}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))


def _augmented(images: Tensor, crop: int, generator: torch.Generator) -> Tensor:
    """Each image cropped out of its zero-padded self at a random place and, half of the time, mirrored."""
    count, channels, height, width = images.shape
    shifts = torch.randint(2 * crop + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows, columns = torch.arange(height) + shifts[0], torch.arange(width)
    columns = torch.where(mirrored, columns.flip(0), columns) + shifts[1]
    padded = nn.functional.pad(images, (crop,) * 4)
    where = (torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None])
    rows, columns = rows[:, None, :, None], columns[:, None, None, :]
    return padded[tuple(index.to(images.device) for index in (*where, rows, columns))]


class _Run:
    """The moving parts of a training: model, optimiser, average, step, history."""

    def __init__(self, model: nn.Module, train: Pair, recipe: Recipe, seed: int) -> None:
        self.model, self.recipe, self.seed = model, recipe, seed
        self.parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.parameters:
            raise InputError(f"{type(model).__name__} has no parameter that requires grad; nothing can be trained.")
        self.device = self.parameters[0].device
        self.inputs, self.targets = _fitted(model, *train)
        self.loss = losses.resolve(recipe.loss)
        # PyTorch's own cross entropy is what everybody trains with, and one operation instead of five.
        self.objective = nn.functional.cross_entropy if recipe.loss == "cross_entropy" else self._mean_loss
        count, size = len(self.targets), recipe.batch_size
        _check_pair("training", (self.inputs, self.targets))
        if recipe.augment and self.inputs.ndim != 4:
            raise InputError(f"augment needs images (N, C, H, W), got inputs of shape {tuple(self.inputs.shape)}.")
        self.per_epoch = max(1, math.ceil(count / size) - (count % size == 1))
        self.total = recipe.steps if recipe.steps is not None else (recipe.epochs or 0) * self.per_epoch
        self.epochs = self.total / self.per_epoch
        if recipe.average_from is not None:
            first = recipe.average_from * self.per_epoch + (1 if recipe.average_every == "step" else self.per_epoch)
            if first > self.total:
                raise InputError(
                    f"average_from={recipe.average_from} would take its first weights after {first} steps, but the "
                    f"training has {self.total}: choose an earlier epoch (they count from 0)."
                )
        self.optimizer = self._make_optimizer()
        self.labels = _sealed(train[1])[:16]
        self.step, self.rows, self.loss_sum, self.loss_count = 0, list[Row](), 0.0, 0
        self.average: list[Tensor] = []
        self.averaged = 0
        self.seconds = 0.0

    def _mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.values(outputs, targets).mean()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        # One call for all parameters instead of a loop in Python: up to a third less time a step for dense networks.
        fused = self.device.type in ("cpu", "cuda") and all(p.is_floating_point() for p in self.parameters)
        decay = 0.0 if self.recipe.decoupled else self.recipe.weight_decay
        common: dict[str, Any] = {"lr": self.recipe.lr, "weight_decay": decay, "fused": fused or None}
        if self.recipe.optimizer == "sgd":
            return torch.optim.SGD(self.parameters, momentum=self.recipe.momentum, **common)
        return torch.optim.Adam(self.parameters, betas=(0.9, 0.999), eps=1e-8, **common)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Train to the end, handing out the outputs and targets of each batch after its update."""
        recipe, optimizer, (group,), checked = self.recipe, self.optimizer, self.optimizer.param_groups, False
        while self.step < self.total:
            epoch, first = divmod(self.step, self.per_epoch)
            order = torch.randperm(len(self.targets), generator=_generator(self.seed, "order", epoch)).to(self.device)
            group["lr"] = rate = recipe.rate(epoch, self.epochs)
            for number in range(first, min(self.per_epoch, self.total - epoch * self.per_epoch)):
                batch = order[number * recipe.batch_size : (number + 1) * recipe.batch_size]
                inputs, targets = self.inputs.index_select(0, batch), self.targets.index_select(0, batch)
                if recipe.augment:
                    inputs = _augmented(inputs, recipe.crop, _generator(self.seed, "augment", self.step))
                try:
                    outputs = self.model(inputs)
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    if checked or isinstance(error, InputError | torch.OutOfMemoryError):
                        raise
                    raise InputError(
                        f"the model {type(self.model).__name__} fails on inputs of shape {tuple(inputs.shape)}: "
                        f"{first_line(error)}."
                    ) from error
                if not checked:  # all targets at once, so that no batch has to be checked
                    self.loss.check(outputs[:1].expand(len(self.targets), *outputs.shape[1:]), self.targets)
                    checked = True
                loss = self.objective(outputs, targets)
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise self.diverged(f"the loss of its batch is {value}", rate)
                optimizer.zero_grad()
                loss.backward()
                if recipe.decoupled and recipe.weight_decay:
                    with torch.no_grad():
                        torch._foreach_mul_(self.parameters, 1 - rate * recipe.weight_decay)
                optimizer.step()
                self.step += 1
                self.loss_sum += value
                self.loss_count += 1
                self._average(epoch, last=number + 1 == self.per_epoch)
                yield outputs.detach(), targets

    def _average(self, epoch: int, *, last: bool) -> None:
        start = self.recipe.average_from
        if start is None or epoch < start or (self.recipe.average_every == "epoch" and not last):
            return
        with torch.no_grad():
            self.averaged += 1
            # a mean of many in half precision would stand still
            now = [parameter.to(torch.promote_types(parameter.dtype, torch.float32)) for parameter in self.parameters]
            if not self.average:
                self.average = [tensor.clone() for tensor in now]
            else:
                torch._foreach_lerp_(self.average, now, 1 / self.averaged)

    def describe(self, outputs: Tensor, targets: Tensor) -> str:
        """Loss and accuracy of a batch in words."""
        text = f"loss {float(self.objective(outputs, targets)):.3g}"
        if _classifies(outputs, targets):
            text += f", accuracy {float((outputs.argmax(1) == targets).double().mean()):.0%}"
        return text

    def diverged(self, what: str, rate: float) -> InputError:
        if self.step == 0:
            return InputError(f"training cannot begin: {what} before any update; look for NaN in inputs and weights.")
        return InputError(
            f"training diverged after {self.step} steps: {what} at learning rate {rate:g}; lower lr, for example to "
            f"{self.recipe.lr / 10:g}."
        )

    def network(self) -> nn.Module:
        """The network at this step, in eval mode: the model itself, or a copy that has the average of the weights."""
        if not self.averaged:
            return self.model.eval()
        try:
            network = copy.deepcopy(self.model)
        except RuntimeError as error:
            raise InputError(
                f"averaging needs a copy of {type(self.model).__name__}, which cannot be copied "
                f"({first_line(error)}); of torch.nn.utils.weight_norm and the like, take the form in "
                "torch.nn.utils.parametrizations."
            ) from error
        with torch.no_grad(), preserved_random_state():
            trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
            for parameter, average in zip(trainable, self.average, strict=True):
                parameter.copy_(average)
            order = torch.randperm(len(self.targets), generator=_generator(self.seed, "statistics")).to(self.device)
            batches = order.tensor_split(self.per_epoch)  # of equal size: the statistics are means over batches
            update_bn((self.inputs.index_select(0, batch) for batch in batches), network)
        return network.eval()

    def evaluate(self, network: nn.Module, sets: Mapping[str, Pair]) -> None:
        """Append a row to the history."""
        rate = self.recipe.rate(max(self.step - 1, 0) // self.per_epoch, self.epochs)
        row: Row = {"step": self.step, "epoch": self.step / self.per_epoch, "lr": rate}
        if self.loss_count:
            row["loss"] = self.loss_sum / self.loss_count
        squares = [float(p.detach().double().square().sum()) for p in network.parameters() if p.requires_grad]
        row["weight_norm"] = math.sqrt(sum(squares))
        for name, pair in sets.items():
            row.update({f"{name}_{key}": value for key, value in evaluate(network, pair, self.loss).items()})
        for name, value in row.items():
            if not math.isfinite(value):
                raise self.diverged(f"{name} is {value}", rate)
        self.rows.append(row)
        self.loss_sum, self.loss_count = 0.0, 0

    def tensors(self) -> dict[str, Tensor]:
        """All that is needed to go on from here, with `facts`."""
        found = {f"model.{name}": tensor for name, tensor in _weights(self.model).items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": value for name, value in state.items() if value is not None}
        found |= {f"average.{index}": tensor for index, tensor in enumerate(self.average)}
        found |= {f"buffer.{name}": buffer for name, buffer in _passing_buffers(self.model).items()}
        found["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            found["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def facts(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total": self.total,
            "rows": self.rows,
            "seconds": self.seconds,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "averaged": self.averaged,
            "labels": self.labels,
        }

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go back to where `tensors` and `facts` were taken."""
        for name in ("step", "rows", "seconds", "loss_sum", "loss_count", "averaged"):
            setattr(self, name, facts[name])
        weights, states = dict[str, Tensor](), dict[int, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "model":
                weights[rest] = tensor
            elif kind == "optimizer":
                index, _, entry = rest.partition(".")
                states.setdefault(int(index), {})[entry] = _laid_out_as(self.parameters[int(index)], tensor)
        self.model.load_state_dict(weights)
        for name, buffer in _passing_buffers(self.model).items():
            buffer.copy_(tensors[f"buffer.{name}"])
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": states})
        count = len(self.parameters) if self.averaged else 0
        self.average = [tensors[f"average.{index}"].to(self.device, copy=True) for index in range(count)]
        torch.set_rng_state(tensors["random.cpu"].clone())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"].clone(), self.device)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as copies on the CPU."""
    state = model.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _passing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are no part of the `state_dict`, which a forward pass may change all the same."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def _laid_out_as(parameter: Tensor, state: Tensor) -> Tensor:
    """A copy of an optimiser's state in the memory format of its parameter: fused optimisers walk both in step."""
    if state.shape != parameter.shape:
        return state.clone()
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device, requires_grad=False).copy_(state)


def _classifies(outputs: Tensor, targets: Tensor) -> bool:
    return not targets.is_floating_point() and outputs.ndim == 2 and outputs.shape[1] > 1


def _check_pair(what: str, pair: Pair) -> None:
    inputs, targets = pair
    if len(inputs) != len(targets):
        raise InputError(f"{what} needs as many inputs as targets, got {len(inputs)} and {len(targets)}.")
    if not len(targets):
        raise InputError(f"{what} needs at least one sample, got none; look at how the data were chosen.")


def _fitted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Pair:
    """A pair on the model's device: inputs in its number format, classes as the integers that every loss takes."""
    first = next(iter(model.parameters()), inputs)
    if inputs.is_floating_point() and first.is_floating_point():
        inputs = inputs.to(first.dtype)
    whole = not targets.is_floating_point() and targets.dtype is not torch.bool
    return inputs.to(first.device), (targets.long() if whole else targets).to(first.device)


def evaluate(model: nn.Module, pair: Pair, loss: str | losses.Loss = "cross_entropy") -> dict[str, float]:
    """The mean loss (of the outputs in float64) and, for classes, the accuracy, of `model` as it is, in its mode.

    >>> evaluate(nn.Identity(), (torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])))
    {'loss': 1.126928..., 'accuracy': 0.5}
    """
    _check_pair("evaluate", pair)
    chosen, total, right = losses.resolve(loss), 0.0, 0
    inputs, targets = pair
    classes = False
    with torch.no_grad():
        batches = zip(inputs.split(_EVALUATION_BATCH), targets.split(_EVALUATION_BATCH), strict=True)
        for some, wanted in batches:
            some, wanted = _fitted(model, some, wanted)
            outputs = model(some).double()
            chosen.check(outputs, wanted)
            total += float(chosen.values(outputs, wanted).sum())
            classes = _classifies(outputs, wanted)
            if classes:
                right += int((outputs.argmax(1) == wanted).sum())
    count = len(targets)
    return {"loss": total / count} | ({"accuracy": right / count} if classes else {})


# ------------------------------------------------------------------------------------------------ on the disk


# What a training may remove from its folder, where the files of others may lie: its checkpoints, and what
# `write_atomically` leaves of a file that a killed process was writing.
_OWN = re.compile(
    r"checkpoint-\d+-[0-9a-f]{8}\.safetensors|\.(?:state\.json|(?:step|checkpoint)-[0-9a-f-]+\.safetensors)\.[0-9a-f]{16}"
)


class _Folder:
    """One training on the disk: `state.json`, and the tensor files that it names with their SHA-256."""

    def __init__(self, path: Path, key: str, config: Any) -> None:
        self.path, self.key, self.config = path, key, config
        self.files: dict[str, str] = {}
        self.last_write, self.cost = time.monotonic(), 0.0

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"cannot keep the training in {self.path} ({error.strerror or error}): free some space, or name "
                "a folder that can be written in SPIRITLEVEL_CACHE."
            ) from error

    def read(self) -> dict[str, Any] | None:
        """The state, if all of it is there and undamaged."""
        try:
            state = json.loads((self.path / "state.json").read_bytes())
            seal = state.pop("sha256")
            if seal != digest(state, 64) or state["key"] != self.key:
                return None
            for name, sha256 in state["files"].items():
                with (self.path / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                        return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None
        self.files = dict(state["files"])
        return dict(state)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file, which is compared with its SHA-256 first."""
        try:
            content = (self.path / name).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != self.files[name]:
            raise InputError(f"{self.path / name} is gone or was changed after it was written; train again.")
        return safetensors.torch.load(content)

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        content = safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
        with self.speaking():
            write_atomically(self.path / name, content)
        self.files[name] = hashlib.sha256(content).hexdigest()

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Make the files written so far, with `facts`, the state."""
        versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        state = {**facts, "key": self.key, "config": plain(self.config), "files": self.files, "versions": versions}
        with self.speaking():
            write_atomically(self.path / "state.json", json.dumps({"sha256": digest(state, 64), **state}, indent=1))
            self.clean()

    def clean(self) -> None:
        """Remove old checkpoints and what a killed process left half-written."""
        for file in self.path.iterdir():
            if _OWN.fullmatch(file.name) and file.name not in self.files:
                file.unlink(missing_ok=True)

    def checkpoint(self, run: _Run) -> None:
        """Write a checkpoint and forget the last one, if it is time."""
        now = time.monotonic()
        if now - self.last_write < max(_CHECKPOINT_SECONDS, self.cost / _CHECKPOINT_SHARE):
            return
        self.suspend(run)
        self.last_write = time.monotonic()
        self.cost = self.last_write - now

    def suspend(self, run: _Run) -> None:
        """Write a checkpoint, from which another call can go on."""
        self._forget_checkpoint()
        name = f"checkpoint-{run.step}-{secrets.token_hex(4)}.safetensors"  # never the name of the one in use
        self.write(name, run.tensors())
        self.commit({**run.facts(), "checkpoint": name, "finished": False})

    def finish(self, run: _Run) -> None:
        self._forget_checkpoint()
        self.commit({**run.facts(), "finished": True})

    def _forget_checkpoint(self) -> None:
        self.files = {name: seal for name, seal in self.files.items() if not name.startswith("checkpoint-")}


def _sealed(tensor: Tensor) -> str:
    content = safetensors.torch.save({"": tensor.detach().cpu().contiguous()})
    return hashlib.sha256(content).hexdigest()


def _kept_name(step: int) -> str:
    return f"step-{step}.safetensors"


def _kept_steps(files: Iterable[str]) -> set[int]:
    return {int(name[len("step-") : -len(".safetensors")]) for name in files if name.startswith("step-")}


# --------------------------------------------------------------------------------------------------- training


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
    """Train `model` in place by `recipe`; it is left in eval mode with its last (or averaged) weights.

    The model keeps its device and dtype; batches are moved to the device. Global random states are untouched.

    Args:
        model: Any module that maps a batch of inputs to outputs that the recipe's loss takes.
        train: Inputs and targets, tensors of equal length.
        recipe: How to train.
        seed: Of the order of the data, of crops and of dropout. The first weights are those of `model`.
        keep: Steps whose weights are kept, 0 for the first ones; those of the last step always are.
        evaluate: Sets whose loss and accuracy go into the history, by name.
        evaluate_every: Steps between two rows of the history. Default: an epoch.
        checkpoint: A folder for checkpoints. A run that finds one of its own there goes on from it. Its own is one with
            the same modules (as the model prints itself), trainable parameters, first weights, data, sets to evaluate,
            recipe, seed and `evaluate_every`. That a `forward` was rewritten is not seen: take another folder then.
        until: Asked about every row of the history whether to stop there; has to depend on that row alone. Rows that
            are found in `checkpoint` are asked about too: a run that `until` has ended goes on if it does not end it
            now, and one that has gone further begins again.
        progress: Called a few times a second with what is under way, the steps done and the steps in all.
        label: What is under way, for `progress`.

    Raises:
        InputError: the arguments do not fit; the training diverged; `checkpoint` cannot be written. The model is then
            in the mode it had, with the weights of its last step.

    >>> from spiritlevel import data, models
    >>> digits, _ = data.load("digits"), torch.manual_seed(0)
    >>> model = models.softmax_regression(inputs=64)
    >>> history = fit(model, digits.train, Recipe(lr=0.5, epochs=5), evaluate={"test": digits.test})
    >>> history.step, len(history.rows), history.rows[-1]["test_accuracy"] > 0.85
    (60, 6, True)
    """
    folder = None
    if checkpoint is not None:
        facts = {"recipe": recipe, "seed": seed, "evaluate_every": evaluate_every}
        folder = _Folder(
            Path(checkpoint), _key(model, train, evaluate or {}, facts | {"recipe": _of_key(recipe)}), facts
        )
    with _owned(folder, progress, label):
        return _fit(
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
    """The digest of what decides what `fit` computes, but the code of a forward; `until` is asked again."""
    network = {
        "modules": str(model),
        "trainable": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "weights": {name: _sealed(tensor) for name, tensor in _weights(model).items()},
    }
    sets = {name: [_sealed(tensor) for tensor in pair] for name, pair in evaluate.items()}
    data = [_sealed(tensor) for tensor in train]
    return digest({"version": _VERSION, **facts, "network": network, "data": data, "evaluate": sets})


@contextlib.contextmanager
def _owned(folder: _Folder | None, progress: Progress | None, label: str) -> Iterator[None]:
    """Keep other processes away from `folder`, if there is one, after waiting for one that is at work there."""

    def waiting() -> None:
        if progress:
            progress(f"{label}: waiting for another process that does the same", 0, 0)

    with contextlib.ExitStack() as stack:
        if folder:
            with folder.speaking():
                stack.enter_context(lock(folder.path, waiting=waiting))
        yield


@contextlib.contextmanager
def _in_training(run: _Run) -> Iterator[None]:
    """The model in training mode, then in eval mode; after an error in the mode it had. It keeps no gradients."""
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


def _fit(
    model: nn.Module,
    train: Pair,
    recipe: Recipe,
    folder: _Folder | None,
    *,
    seed: int,
    keep: Sequence[int],
    evaluate: Mapping[str, Pair],
    evaluate_every: int | None,
    until: Callable[[Row], bool] | None = None,
    progress: Progress | None,
    label: str,
) -> History:
    run = _Run(model, train, recipe, seed)
    sets = dict(evaluate)
    if recipe.until_loss is not None:
        own = sets.setdefault("train", (run.inputs, run.targets))
        if own is not train and not all(torch.equal(a, b) for a, b in zip(own, train, strict=True)):
            raise InputError(
                "until_loss reads the loss over the training set, but the set to evaluate that is called 'train' is "
                "another one; give that another name."
            )
    for name, pair in sets.items():
        _check_pair(f"the evaluation on {name!r}", pair)
    for step in keep:
        if not 0 <= step <= run.total:
            raise InputError(f"keep asks for step {step} of a training of {run.total} steps.")
    wanted = set(keep)
    every = run.per_epoch if evaluate_every is None else whole_number(evaluate_every, "evaluate_every", 1)
    weights: dict[int, dict[str, Tensor]] = {}

    def complete(row: Row) -> bool:
        """Whether the recipe ends here."""
        goal = recipe.until_loss
        fitted = goal is not None and row["step"] >= recipe.until_step and row["train_loss"] <= goal
        return fitted or row["step"] == run.total

    def asked_to_stop(row: Row) -> bool:
        """Whether the caller ends it here."""
        return until is not None and until(dict(row))

    def take(network: nn.Module) -> None:
        weights[run.step] = _weights(network)
        if folder:
            folder.write(_kept_name(run.step), weights[run.step])

    def ends() -> bool:
        """Evaluate and keep what is due at this step, and say whether it is the last one."""
        last, due = run.step == run.total, run.step % every == 0
        if not (last or due or run.step in wanted):
            return False
        network = run.network()
        if last or due:
            run.evaluate(network, sets)
            last = complete(run.rows[-1]) or asked_to_stop(run.rows[-1])
        if last or run.step in wanted:
            take(network)
        model.train()
        return last

    def history(rows: list[Row], step: int, seconds: float) -> History:
        model.load_state_dict(weights[step])  # differs from what the model has if the weights were averaged
        chosen = {kept: weights[kept] for kept in sorted(weights) if kept in keep or kept == step}
        return History(rows, chosen, step, step < run.total, seconds)

    with preserved_random_state(), torch.enable_grad(), _in_training(run):
        torch.manual_seed(seed)
        ended = False
        if folder and (state := folder.read()) and state.get("labels", run.labels) == run.labels:
            step, rows, kept = state["step"], state["rows"], _kept_steps(folder.files)
            stop = next((row["step"] for row in rows if asked_to_stop(row)), step + 1)
            ended = complete(rows[-1]) or stop == step
            # begin again if steps were passed that had to be kept, or the one to stop at, or there is no way on
            again = any(missed <= step for missed in wanted - kept) or stop < step
            if again or not (ended or "checkpoint" in state):
                wanted |= kept
                ended, folder.files = False, {}
            else:
                weights = {found: folder.tensors(_kept_name(found)) for found in kept & {*wanted, step}}
                if ended and step in kept:
                    return history(rows, step, state["seconds"])
                run.restore(state, folder.tensors(state["checkpoint"]))
                if ended:  # it only passed here, without its weights being kept
                    take(run.network())
        if folder:
            with folder.speaking():
                folder.clean()
        first, begin, reported, earlier = run.step, time.monotonic(), 0.0, run.seconds
        ended = ended or (not run.rows and ends())
        for outputs, targets in () if ended else run.batches():
            now = time.monotonic()
            run.seconds = earlier + now - begin
            if progress and now - reported > _REPORT_SECONDS:
                reported = now
                speed = (run.step - first) / (now - begin)
                progress(f"{label}: {run.describe(outputs, targets)}, {speed:.3g} steps/s", run.step, run.total)
            if ends():
                break
            if folder:
                folder.checkpoint(run)
        if folder and complete(run.rows[-1]):
            folder.finish(run)
        elif folder:
            folder.suspend(run)  # the next call may want to go on
        return history(run.rows, run.step, run.seconds)


@dataclass(frozen=True, eq=False)
class Trained:
    """A job that was trained: its networks at the kept steps, its data and its history."""

    job: Job
    folder: Path
    history: list[Row]
    """As `History.rows`, with `train_loss`, `test_accuracy` and so on for the sets that the job evaluates."""
    steps: tuple[int, ...]
    """The steps whose weights are kept; the last one is the end of the training."""
    stopped: bool
    """Whether `until_loss` ended it before the recipe's last step."""
    seconds: float
    _files: _Folder = field(repr=False)
    _labels: str | None = field(default=None, repr=False)  # what the labels of the training set looked like

    @cached_property
    def _parts(self) -> Parts:
        found = parts(self.job)
        if self._labels not in (None, _sealed(found.train[1])[:16]):
            raise InputError(
                f"the network in {self.folder} was trained on {self.job.data} in another order, as it can come from "
                "several places, so its training and validation sets are not known any more; remove that folder."
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
        network = _build(self.job)
        network.load_state_dict(self._files.tensors(_kept_name(step)))
        return network.eval()


def train(job: Job, *, cache: str | Path | None = None, progress: Progress | None = None) -> Trained:
    """Train a job, or find what an earlier call, in this process or another, has trained already.

    A training that was killed goes on from its last checkpoint, which is some 20 seconds old, or older where writing
    one takes more than a second. Two processes that want the same job do not both train it: the second waits, and takes
    over if the first one dies. A damaged entry of the cache is trained again.

    Args:
        job: What to train.
        cache: The folder of trained networks. Default: `networks` in `SPIRITLEVEL_CACHE` or the platform's cache.
        progress: Called a few times a second with what is under way, the steps done and the steps in all.

    Raises:
        InputError: the job does not fit its data; the training diverged; the cache cannot be written.
    """
    root = cache_folder() / "networks" if cache is None else Path(cache)
    folder = _Folder(root / f"{job.network}-{job.data}-{job.key}", job.key, job)
    state = folder.read()
    found: Parts | None = None
    if not (
        state
        and state["finished"]
        and {step for step in job.keep if step <= state["step"]} <= _kept_steps(state["files"])
    ):
        label = f"training {job.network} on {job.data}"
        found = parts(job)
        model = _build(job)
        sets = {name: pair for name in job.evaluate if (pair := getattr(found, name)) is not None}
        with _owned(folder, progress, label):
            _fit(
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
        raise InputError(f"{folder.path} was changed while it was written; call train again.")
    steps = sorted(_kept_steps(state["files"]) & {*job.keep, state["step"]})
    stopped = bool(state["step"] < state["total"])
    labels = state.get("labels")
    trained = Trained(job, folder.path, state["rows"], tuple(steps), stopped, state["seconds"], folder, labels)
    if found:
        vars(trained)["_parts"] = found
    return trained
