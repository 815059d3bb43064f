"""What to train: a network, its data, and the recipe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spiritlevel import data as data_sets
from spiritlevel.arguments import checked
from spiritlevel.binding.state import preserved_random_state
from spiritlevel.errors import InputError, unknown_name, whole_number
from spiritlevel.papers import networks as models
from spiritlevel.papers.training.recipe import Pair, Recipe, deciding_fields
from spiritlevel.papers.training.running import seeded_generator
from spiritlevel.storage import digest

KEY_VERSION = 1  # part of every key: raise it when the same job would give a different network
_PARTS = ("train", "validation", "test")
_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601, the usual weights of red, green, blue


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which network, on which data, by which recipe: everything that determines what `train` returns.

    The training set is shuffled by `split_seed`; its first `validation` points are the validation set, the next
    `train_size` (default: all others) the training set. Points of the test set are drawn in the same way.

    >>> job = Job(network="lenet5", options={"activation": "tanh"}, data="mnist", recipe=Recipe(lr=0.05, steps=10_000))
    >>> job.options
    (('activation', 'tanh'),)
    >>> job.key == Job(**{**vars(job), "seed": 1}).key
    False
    """

    network: str
    """One of `models.NAMES`."""
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Options of the network. `channels`, `inputs`, `size` and `classes` come from the data unless given."""
    data: str
    """One of `data.names()`."""
    train_size: int | None = None
    validation: int = 0
    test_size: int | None = None
    pixels: Literal["unit", "standard"] = "unit"
    """"unit": in [0, 1]. "standard": minus the mean, divided by the standard deviation of each channel of the training
    set."""
    grey: bool = False
    """Colour images as one channel, 0.299 R + 0.587 G + 0.114 B."""
    pool: int = 1
    """Every pool × pool pixels averaged to one: 2 turns 32² images into 16² ones, at a quarter of the cost."""
    channels_last: bool = False
    """Weights and images in the memory format in which convolutions on a CPU are faster."""
    recipe: Recipe
    seed: int = 0
    """For the first weights, the order of the data, crops and dropout."""
    split_seed: int = 0
    keep: tuple[int, ...] = ()
    """Steps whose weights are kept, 0 for the first ones. Those of the last step always are. Not part of the key: a
    training run that kept other steps is repeated if one is missing, and then keeps both."""
    evaluate: tuple[str, ...] = ("train", "validation", "test")
    """The sets whose loss and accuracy go into the history."""
    evaluate_every: int | None = None
    """Steps between two rows of the history. Default: one epoch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(dict(self.options).items())))
        object.__setattr__(self, "keep", tuple(sorted(set(self.keep))))
        if self.network not in models.NAMES:
            raise unknown_name("network", self.network, models.NAMES)
        if self.data not in data_sets.names():
            raise unknown_name("data set", self.data, data_sets.names())
        if self.pixels not in ("unit", "standard"):
            raise unknown_name("form of pixels", self.pixels, ("unit", "standard"))
        for name in self.evaluate:
            if name not in _PARTS:
                raise unknown_name("set to evaluate", name, _PARTS)
        whole_number(self.validation, "validation", 0)
        whole_number(self.pool, "pool", 1)
        for name in ("train_size", "test_size", "evaluate_every"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, 1)

    @property
    def key(self) -> str:
        """The digest of all fields but `keep`, which changes nothing about the training.

        Fields added later count only where they are not at their defaults, so that older networks are still found.
        """
        job = {**deciding_fields(self), "keep": None, "recipe": deciding_fields(self.recipe)}
        return digest({"version": KEY_VERSION, "job": job})


@dataclass(frozen=True, eq=False)
class Parts:
    """The sets of a job, each a pair (inputs, targets), mapped by its `grey` and `pixels`."""

    train: Pair
    validation: Pair | None
    test: Pair
    classes: tuple[str, ...]


@checked
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
        raise InputError(f"{job.data} has {tests:,} test points, too few for test_size={job.test_size}: ask for fewer.")
    order = torch.randperm(total, generator=seeded_generator(job.split_seed, "split"))
    test_order = torch.randperm(tests, generator=seeded_generator(job.split_seed, "test"))[: job.test_size]

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


def build_network(job: Job) -> nn.Module:
    """The network of a job with its first weights. Options that the data determine are filled in."""
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
