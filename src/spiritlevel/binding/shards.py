"""A model whose parameters are sharded over processes by FSDP2 (`fully_shard`), as a problem of this process's shards.

Every rank holds a part of each parameter and of each vector like it. A pass gathers the parameters layer by layer, so
all ranks must make the same passes at the same time, each on a batch of its own (`Context.mine` sees to that). Points
other than the model's are written into the shards in place, and undone bit for bit at the end.

The hooks that gather parameters have no double backward, and `torch.func` does not reach through them: first
derivatives are those of a plain backward pass, second ones are differences of them (`operators/differences`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spiritlevel.binding import losses
from spiritlevel.binding.modules import is_parted, is_sharded, managed_modules, to_eval_mode, unwrapped
from spiritlevel.binding.parameters import Params, select_parameters
from spiritlevel.binding.problem import Problem, copies_of
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.reading import PLAIN, Form
from spiritlevel.binding.state import preserved_random_state, without_autocast
from spiritlevel.errors import InputError

_CHUNK = 2**20  # numbers of a random vector drawn at once; each rank keeps its own


class Run(NamedTuple):
    """A run of entries of the whole vector of parameters that this rank holds."""

    start: int
    length: int


def _checked_placements(model: nn.Module, managed: list[Any]) -> Any:
    """The process group of the shards; `InputError` unless all parameters are cut in rows by `fully_shard` alone."""
    under = {id(parameter) for module in managed for parameter in module.parameters()}
    mesh: Any = None
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    for name, parameter in parameters:
        if not is_parted(parameter):
            if parameter.requires_grad:
                raise InputError(
                    f"the parameter {name} is whole on every rank while others are sharded, so its gradient would be "
                    "that of one rank; call fully_shard on the whole model, too, or freeze the parameter."
                )
            continue
        placements = tuple(parameter.placements)
        rows = len(placements) == 1 and placements[0].is_shard(0)
        if not rows or id(parameter) not in under:
            raise InputError(
                f"the parameter {name} is a DTensor placed as {placements}: a sharded model can be measured if "
                "fully_shard alone has cut it, on a mesh of one dimension and by rows, but not with tensor-parallel "
                "plans, replicated shards (HSDP) or other dimensions. Load the full state dict into such a model, or "
                "into one that is not sharded."
            )
        if mesh is not None and parameter.device_mesh != mesh:
            raise InputError(f"the parameter {name} is sharded over different ranks from those before; use one mesh.")
        mesh = parameter.device_mesh
        if parameter.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"the parameter {name} is sharded in {str(parameter.dtype).removeprefix('torch.')}, which is too "
                "coarse for curvature, and no float32 copy fits beside it; call model.float() before fully_shard."
            )
    for module in managed:
        policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
        if getattr(policy, "param_dtype", None) in (torch.float16, torch.bfloat16):
            raise InputError(
                "the model is sharded with a MixedPrecisionPolicy that computes in half precision, where small "
                "steps change nothing; call fully_shard without param_dtype to measure it."
            )
    assert mesh is not None
    return mesh.get_group()


class ShardedProblem(Problem):
    """A sharded model and a loss; `params` are this rank's shards of the chosen parameters, copies laid end to end.

    Use it inside `active()`, on all ranks at once.
    """

    sharded = True

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Any = "cross_entropy",
        params: str | Iterable[str] | None = None,
        batch_norm: str = "eval",
        form: Form = PLAIN,
    ) -> None:
        model = unwrapped(model)
        self._managed = managed_modules(model)
        self._reshard()
        self.group = _checked_placements(model, self._managed)
        if batch_norm != "eval":
            raise InputError("a sharded model can only be measured with batch_norm='eval'.")
        if form.batches == "fixed" or form.unit == "token":
            raise InputError(
                "a sharded model can only be measured with batches='free' and unit='sample'; leave them out."
            )
        own = dict(model.named_parameters())
        names = [name for name in select_parameters(model, params) if is_parted(own[name])]
        self.model, self.form, self.batch_norm = model, form.of(model), batch_norm
        self.loss = losses.resolve(loss, fixed=False)
        self._held: dict[str, Any] = {name: own[name] for name in names}
        shards = {name: tensor.detach().to_local() for name, tensor in self._held.items()}
        self.flat = torch.cat([shard.reshape(-1) for shard in shards.values()])
        parts = self.flat.split([shard.numel() for shard in shards.values()])
        self.params = {name: part.reshape(shards[name].shape) for name, part in zip(shards, parts, strict=True)}
        self.constants = {}
        first = next(iter(self.params.values()))
        self.device, self.dtype = first.device, first.dtype
        self.runs = list(self._runs())
        self._at: Params = self.params  # what the shards hold now
        self._part: Any = None
        self._overwrites, self._keeps, self._draws, self._half = False, False, False, False
        self.reverse_only, self._active, self._has_data = True, False, False
        self.look, self.buffers, self.left = None, set(), ""
        self.facts = {"head": 0, "why whole": ""}  # outputs are taken as they come

    def _runs(self) -> Iterator[Run]:
        """Where the entries of this rank's shards are in the whole vector: rows of a parameter follow each other."""
        before = 0
        for tensor in self._held.values():
            mesh = tensor.device_mesh
            rows = -(-tensor.shape[0] // mesh.size()) if tensor.ndim else 1
            row = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.shape[0] else 1
            first = min(mesh.get_local_rank() * rows, tensor.shape[0] if tensor.ndim else 1)
            yield Run(before + first * row, tensor.to_local().numel())
            before += tensor.numel()

    @property
    def size(self) -> int:
        """The number of measured parameters, on all ranks together."""
        return sum(tensor.numel() for tensor in self._held.values())

    def drawn(self, draw: Callable[[int], Any]) -> Tensor:
        """This rank's entries of a random vector; `draw` gives the next numbers, all of which every rank draws.

        No rank ever holds more than a small piece of the rest.
        """
        kept: list[Tensor] = []
        size, start = self.size, 0
        while start < size:
            stop = size if size - start < 2 * _CHUNK else start + _CHUNK  # torch draws the last few differently
            piece = torch.as_tensor(draw(stop - start))
            for run in self.runs:
                low, high = max(run.start, start), min(run.start + run.length, stop)
                if low < high:
                    kept.append(piece[low - start : high - start].clone())
            start = stop
        return torch.cat(kept) if kept else torch.as_tensor(draw(0))

    def shared_by(self, group: Any) -> Ranks:
        """The ranks that hold the shards, whether `group` names them or not."""
        if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(self.group):
            raise InputError("group= names ranks other than those that the model is sharded over; leave it out.")
        ranks = Ranks(self.group, self.device)
        ranks.same(self.fingerprint(), "their models, losses or options")
        return ranks

    def fingerprint(self) -> str:
        """A hash of what all ranks have in common: names, shapes, loss; every rank has values of its own."""
        names = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self._held.items()]
        return hashlib.blake2b(f"{self.loss.name} {names}".encode(), digest_size=16).hexdigest()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Eval mode, without the caller's gradients; on exit shards, gradients, modes and buffers are as they were."""
        if self._active:
            with torch.inference_mode(False), torch.enable_grad():
                yield
            return
        modes = [(module, module.training) for module in self.model.modules()]
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        buffers = [(tensor, tensor.detach().clone()) for tensor in self.model.buffers()]
        with (
            preserved_random_state(),
            torch.inference_mode(False),
            torch.enable_grad(),
            without_autocast(self.device),
        ):
            for parameter, _ in gradients:
                parameter.grad = None
            to_eval_mode(self.model)
            self._active = True
            try:
                yield
            finally:
                self._active = False
                self._reshard()
                self._write(self.params)
                for module, mode in modes:
                    module.training = mode
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                for tensor, values in buffers:
                    if not torch.equal(tensor, values):
                        tensor.data.copy_(values)

    def _reshard(self) -> None:
        """Make every parameter its shard again: a gathered one would not see what is written into the shards."""
        for module in self._managed:
            module.reshard()

    def _write(self, params: Params) -> None:
        if params is self._at:
            return
        with torch.no_grad():
            for name, tensor in self._held.items():
                tensor.to_local().copy_(params[name])
        self._at = params

    def _outputs(self, params: Params, inputs: Any) -> Tensor:
        self._write({**self.params, **params} if params is not self.params else params)
        args, kwargs = self._arguments(copies_of(inputs))
        try:
            with Ranks.contact(self.group):
                result = self.model(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                self._reshard()
        if self._part is None and (found := self.form.candidates(result, len(args[0]) if args else 0)):
            self._part = found[0] if len(found) == 1 else None
        return self.form.outputs(result, self._part)

    def gradient(self, params: Params, batches: Iterable[tuple[float, Any, Tensor]]) -> tuple[Tensor, Tensor]:
        """The sum of weight · loss over this rank's batches, and its part of the gradient of the sum over all ranks.

        fully_shard takes the mean over the ranks, which this turns into the sum. Inside `active()`.
        """
        total, ranks = torch.zeros((), dtype=torch.float64), dist.get_world_size(self.group)
        held = list(self._held.values())
        try:
            for weight, inputs, targets in batches:
                value = (self.losses(params, inputs, targets) * weight).sum()
                total += value.detach().double().cpu()
                with Ranks.contact(self.group):
                    (value * ranks).backward()
                self._reshard()
            found = [
                torch.zeros_like(shard) if parameter.grad is None else parameter.grad.to_local().detach()
                for parameter, shard in zip(held, self.params.values(), strict=True)
            ]
        finally:
            for parameter in self.model.parameters():
                parameter.grad = None
        return total, torch.cat([part.reshape(-1) for part in found])


def bound(model: nn.Module, **options: Any) -> Problem:
    """The problem of a model: for a sharded one, that of this rank's shards."""
    return ShardedProblem(model, **options) if is_sharded(model) else Problem(model, **options)
