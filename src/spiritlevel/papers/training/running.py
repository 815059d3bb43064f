"""The moving parts of a training run, and how a network does on a set."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from spiritlevel.arguments import checked
from spiritlevel.binding import losses
from spiritlevel.binding.devices import random_state, set_random_state
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, first_line, is_out_of_memory, shown
from spiritlevel.papers.training.checkpoints import sealed
from spiritlevel.papers.training.recipe import Pair, Recipe, Row

_EVALUATION_BATCH = 250  # more overflow the cache: VGG-16 at a quarter of its width takes 1.6 times as long with 1,000
_FEW = 64  # samples: their losses often show already that a goal is not reached


class Diverged(InputError):
    """A training run whose loss or weights are no longer numbers."""


def seeded_generator(seed: int, purpose: str, number: int = 0) -> torch.Generator:
    """A generator for one purpose. Hashed, since the generator itself looks only at the lower 32 bits of its seed."""
    text = f"{purpose} {number} {seed}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:4], "big"))


def _augmented(images: Tensor, crop: int, generator: torch.Generator) -> Tensor:
    """Each image cropped from its zero-padded self at a random place and, half of the time, mirrored."""
    count, channels, height, width = images.shape
    shifts = torch.randint(2 * crop + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows, columns = torch.arange(height) + shifts[0], torch.arange(width)
    columns = torch.where(mirrored, columns.flip(0), columns) + shifts[1]
    padded = nn.functional.pad(images, (crop,) * 4)
    where = (torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None])
    rows, columns = rows[:, None, :, None], columns[:, None, None, :]
    return padded[tuple(index.to(images.device) for index in (*where, rows, columns))]


class Run:
    """The moving parts of a training run: model, optimiser, average, step, history."""

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
        check_pair("training", (self.inputs, self.targets))
        if recipe.augment and self.inputs.ndim != 4:
            raise InputError(f"augment needs images (N, C, H, W), got inputs of shape {tuple(self.inputs.shape)}.")
        self.per_epoch = max(1, math.ceil(count / size) - (count % size == 1))
        self.total = recipe.steps if recipe.steps is not None else (recipe.epochs or 0) * self.per_epoch
        self.epochs = self.total / self.per_epoch
        if recipe.average_from is not None:
            first = recipe.average_from * self.per_epoch + (1 if recipe.average_every == "step" else self.per_epoch)
            if first > self.total:
                raise InputError(
                    f"average_from={recipe.average_from} would average its first weights after {first} steps, but "
                    f"the training run has {self.total}: choose an earlier epoch (they count from 0)."
                )
        self.optimizer = self._make_optimizer()
        self.labels = sealed(train[1])[:16]
        self.step, self.rows, self.loss_sum, self.loss_count = 0, list[Row](), 0.0, 0
        self.average: list[Tensor] = []
        self.averaged = 0
        self.seconds = 0.0

    def _mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.values(outputs, targets).mean()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        # One call for all parameters instead of a loop in Python: up to a third less time per step for dense networks.
        fused = self.device.type in ("cpu", "cuda") and all(p.is_floating_point() for p in self.parameters)
        decay = 0.0 if self.recipe.decoupled else self.recipe.weight_decay
        common: dict[str, Any] = {"lr": self.recipe.lr, "weight_decay": decay, "fused": fused or None}
        if self.recipe.optimizer == "sgd":
            return torch.optim.SGD(self.parameters, momentum=self.recipe.momentum, **common)
        return torch.optim.Adam(self.parameters, betas=(0.9, 0.999), eps=1e-8, **common)

    def _order(self, purpose: str, number: int = 0) -> Tensor:
        generator = seeded_generator(self.seed, purpose, number)
        return torch.randperm(len(self.targets), generator=generator).to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Train to the end, yielding the outputs and targets of each batch after its update."""
        recipe, optimizer, (group,), checked = self.recipe, self.optimizer, self.optimizer.param_groups, False
        while self.step < self.total:
            epoch, first = divmod(self.step, self.per_epoch)
            order = self._order("order", epoch)
            group["lr"] = rate = recipe.rate(epoch, self.epochs)
            for number in range(first, min(self.per_epoch, self.total - epoch * self.per_epoch)):
                batch = order[number * recipe.batch_size : (number + 1) * recipe.batch_size]
                inputs, targets = self.inputs.index_select(0, batch), self.targets.index_select(0, batch)
                if recipe.augment:
                    inputs = _augmented(inputs, recipe.crop, seeded_generator(self.seed, "augment", self.step))
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
            # in half precision a mean of many would stop moving
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
        """What to raise if a number of this run is not finite."""
        if self.step == 0:
            return InputError(f"training cannot begin: {what} before any update; look for NaN in inputs and weights.")
        return Diverged(
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
                f"({first_line(error)}); for torch.nn.utils.weight_norm and the like, use the form in "
                "torch.nn.utils.parametrizations."
            ) from error
        with torch.no_grad(), preserved_random_state():
            trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
            for parameter, average in zip(trainable, self.average, strict=True):
                parameter.copy_(average)
            order = self._order("statistics")
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

    def checks(self) -> bool:
        """Whether the loss over the training set is checked here, evaluation or not."""
        every = self.recipe.check_every
        wanted = every is not None and self.recipe.until_loss is not None and self.step >= self.recipe.until_step
        return wanted and self.step % (every or 1) == 0

    def reaches_goal(self, network: nn.Module) -> bool:
        """Whether the loss over the training set is at most `until_loss`.

        No loss of a recipe is negative, so a sum over some samples that exceeds the goal for all of them decides it.
        """
        left = (self.recipe.until_loss or 0.0) * len(self.targets)
        with torch.no_grad():
            for some, wanted in zip(self.inputs.split(_FEW), self.targets.split(_FEW), strict=True):
                left -= float(self.loss.values(_outputs(network, some).double(), wanted).sum())
                if not left >= 0:  # NaN is left to the next evaluation
                    return False
        return True

    def tensors(self) -> dict[str, Tensor]:
        """All that is needed, together with `facts`, to continue from here."""
        found = {f"model.{name}": tensor for name, tensor in weights_of(self.model).items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": value for name, value in state.items() if value is not None}
        found |= {f"average.{index}": tensor for index, tensor in enumerate(self.average)}
        found |= {f"buffer.{name}": buffer for name, buffer in _passing_buffers(self.model).items()}
        found["random.cpu"] = torch.get_rng_state()
        if (state := random_state(self.device)) is not None:
            found[f"random.{self.device.type}"] = state
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
        if self.device.type != "cpu":
            set_random_state(tensors[f"random.{self.device.type}"].clone(), self.device)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, as copies on the CPU."""
    state = model.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _passing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are not part of the `state_dict`, which a forward pass may nevertheless change."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def _laid_out_as(parameter: Tensor, state: Tensor) -> Tensor:
    """A copy of an optimiser's state in the memory format of its parameter: fused optimisers walk both in step."""
    if state.shape != parameter.shape:
        return state.clone()
    return torch.empty_like(parameter, dtype=state.dtype, device=state.device, requires_grad=False).copy_(state)


def _classifies(outputs: Tensor, targets: Tensor) -> bool:
    return not targets.is_floating_point() and outputs.ndim == 2 and outputs.shape[1] > 1


def check_pair(what: str, pair: Pair) -> None:
    """Refuse a set that is empty, or whose inputs and targets differ in number."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        raise InputError(f"{what} needs a pair of tensors (inputs, targets), got {shown(pair)}.")
    inputs, targets = pair
    if not inputs.ndim or not targets.ndim:
        raise InputError(f"{what} needs inputs and targets with one row per sample, got single numbers.")
    if len(inputs) != len(targets):
        raise InputError(f"{what} needs as many inputs as targets, got {len(inputs)} and {len(targets)}.")
    if not len(targets):
        raise InputError(f"{what} needs at least one sample, got none; check how the data were chosen.")


def _fitted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Pair:
    """A pair on the model's device: inputs in its number format, classes as the integers that every loss takes."""
    first = next(iter(model.parameters()), inputs)
    if inputs.is_floating_point() and first.is_floating_point():
        inputs = inputs.to(first.dtype)
    whole = not targets.is_floating_point() and targets.dtype is not torch.bool
    return inputs.to(first.device), (targets.long() if whole else targets).to(first.device)


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    try:
        found: Tensor = model(inputs)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the model {type(model).__name__} fails on inputs of shape {tuple(inputs.shape)}: {first_line(error)}."
        ) from error
    return found


@checked
def evaluate(model: nn.Module, pair: Pair, loss: str | losses.Loss = "cross_entropy") -> dict[str, float]:
    """The mean loss (of the outputs in float64) and, for classes, the accuracy, of `model` in its current mode.

    >>> evaluate(nn.Identity(), (torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])))
    {'loss': 1.126928..., 'accuracy': 0.5}
    """
    check_pair("evaluate", pair)
    chosen, total, right = losses.resolve(loss), 0.0, 0
    inputs, targets = pair
    classes = False
    with torch.no_grad():
        batches = zip(inputs.split(_EVALUATION_BATCH), targets.split(_EVALUATION_BATCH), strict=True)
        for some, wanted in batches:
            some, wanted = _fitted(model, some, wanted)
            outputs = _outputs(model, some).double()
            chosen.check(outputs, wanted)
            total += float(chosen.values(outputs, wanted).sum())
            classes = _classifies(outputs, wanted)
            if classes:
                right += int((outputs.argmax(1) == wanted).sum())
    count = len(targets)
    return {"loss": total / count} | ({"accuracy": right / count} if classes else {})
