"""A module and a loss as pure functions of a dict of parameters.

Nothing is mutated: `Problem.active()` puts the module into the state in which it is measured (eval mode, batch norm
as asked, forms of attention, layer norm and weight norm that can be differentiated twice) and restores every
attribute of its submodules (lists, dicts and sets with their contents), buffers, modes and random states afterwards,
even after an exception.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding import losses
from spiritlevel.binding.batches import resized
from spiritlevel.binding.devices import has_double
from spiritlevel.binding.failures import check_differentiable, explained
from spiritlevel.binding.graphs import Rows
from spiritlevel.binding.last_layer import FEW_POSITIONS, Removing
from spiritlevel.binding.losses import Head
from spiritlevel.binding.modules import called_with, measurable, state_of, to_eval_mode
from spiritlevel.binding.parameters import Params, depth, in_precision, select_parameters
from spiritlevel.binding.ranks import Ranks
from spiritlevel.binding.reading import PLAIN, Form
from spiritlevel.binding.rewrites import Elementary
from spiritlevel.binding.state import (
    advance_random_states,
    in_turn,
    preserved_module,
    preserved_random_state,
    random_states,
    twice_differentiable,
    without_autocast,
)
from spiritlevel.binding.values import leaves_of, tensors_of
from spiritlevel.errors import InputError, first_line, unknown_name

BATCH_NORM_MODES = ("eval", "batch")
FEW_OUTPUTS = 64  # of large outputs, for a quick look
LARGE = 10**6  # from this many parameters, a look at a model takes fewer samples


class Problem:
    """A model and a loss at one point: pure functions of a dict of parameters.

    `params` holds the chosen parameters, detached copies; everything else in the model's state is constant. Use the
    functions inside `with problem.active():`.
    """

    sharded = False  # whether each rank holds a part of every parameter

    @in_turn()  # what another thread measures holds other tensors until it is done
    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Any = "cross_entropy",
        params: str | Iterable[str] | None = None,
        batch_norm: str = "eval",
        form: Form = PLAIN,
    ) -> None:
        model = measurable(model)
        if batch_norm not in BATCH_NORM_MODES:
            raise unknown_name("batch_norm mode", batch_norm, BATCH_NORM_MODES)
        names, self._half = select_parameters(model, params), False
        whole = dict(model.named_parameters())
        if (name := next((name for name in names if whole[name].is_complex()), None)) is not None:
            raise InputError(
                f"the parameter {name} is complex, and this needs real ones; hold it as pairs of real numbers "
                "(torch.view_as_complex in forward), or, for curvature, leave it out by requires_grad_(False) or by "
                "naming the others with params=."
            )
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if dtypes & {torch.float16, torch.bfloat16}:
            model = copy.deepcopy(model).float()  # half precision holds no curvature: measured as a float32 copy
            dtypes, self._half = {torch.float32}, True
        homes = {tensor.device for _, tensor in state_of(model)}
        self.left = ", ".join(sorted(str(device) for device in homes if not has_double(device)))
        if self.left:  # float64 keeps errors and cancellation in check: measured as a copy on the CPU
            model = copy.deepcopy(model).cpu()
        if len(dtypes) > 1:
            kinds = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise InputError(f"the model mixes parameters of {kinds}; convert it to one of them, e.g. model.double().")
        self.model, self.form = model, form.of(model)
        self.loss = losses.resolve(loss, fixed=form.batches == "fixed")
        if form.unit == "token":
            self.loss = losses.of_units(self.loss)
        self.batch_norm = batch_norm
        with torch.inference_mode(False):  # tensors made in inference mode could not be differentiated
            state = {name: tensor.detach().clone() for name, tensor in state_of(model)}
        self.params: Params = {name: state.pop(name) for name in names}
        self.constants: Params = state
        floating = [tensor for tensor in self.params.values() if tensor.is_floating_point()]
        first = next(iter(floating or self.params.values()))
        self.device, self.dtype = first.device, first.dtype
        self.buffers = {name for name, _ in model.named_buffers()}
        # known after one plain pass: does the model work in place on inputs or buffers, does it keep something in its
        # attributes (merged weights, say), does it draw random numbers?
        self._overwrites: bool | None = None
        self._keeps = False
        self._reads_by_name = False  # whether it reads its parameters as attributes, once known
        self._draws = False
        self._part: Any = None  # the part of what the model returns that is the outputs, once known
        self.reverse_only = False  # set if the model turns out to have no forward derivatives
        self.facts: dict[Any, Any] = {}  # what was found out about the model once and for all, by those who need it
        self.look: Callable[[Head], Tensor] | None = None  # a function of the head that takes the outputs' place
        self.words: Tensor | None = None  # the outputs that it takes, if only a few
        self.around: Callable[[Params], contextlib.AbstractContextManager[Any]] | None = None  # calls of the model
        self._active = False
        self._has_data = False  # whether inputs came with targets: if the model fails on those, the caller must know

    @property
    def size(self) -> int:
        """The number of measured parameters."""
        return sum(tensor.numel() for tensor in self.params.values())

    @property
    def keeps_state(self) -> bool:
        """Whether the model is known to keep something from a pass, or to write to its inputs or buffers."""
        return self._keeps or bool(self._overwrites)

    @property
    def rounding(self) -> float:
        """The relative precision to which the model rounds its values inside, where that is coarser than its type."""
        return float(self.facts.get("rounding", 0.0))

    def inherit(self, other: Problem) -> None:
        """Take over what is known about another problem, if only the values of parameters and buffers differ."""
        if self.loss is other.loss and self.batch_norm == other.batch_norm and _same_code(self.model, other.model):
            self.facts, self.reverse_only = {**other.facts}, other.reverse_only
            if other._overwrites is False and not (other._keeps or other._draws):  # as usual: nothing to watch for
                self._overwrites = False

    def converted(self, dtype: torch.dtype) -> Problem:
        """The same problem in another precision, for a look at it inside `active()`; facts are shared."""
        twin = copy.copy(self)
        twin.params, twin.constants = in_precision((self.params, self.constants), dtype)
        twin.dtype = dtype
        return twin

    def shared_by(self, group: Any) -> Ranks:
        """The ranks of a process group, after making sure that all measure this problem; alone without a group."""
        ranks = Ranks(group, self.device)
        if group is not None:
            ranks.same(self.fingerprint(), "their models, losses or batch norm modes")
        return ranks

    def fingerprint(self) -> str:
        """A hash of everything that fixes the function: names, values of parameters and constants, loss, mode."""
        content = hashlib.blake2b(f"{self.loss.name} {self.batch_norm}".encode(), digest_size=16)
        for name, tensor in [*self.params.items(), *self.constants.items()]:
            content.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            content.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The state in which the model is measured; all of it is undone on leaving.

        Forward hooks run as they always do. Backward hooks do not: they see no gradients of a measurement. Nested,
        it only makes sure that derivatives can be taken. Other threads wait.
        """
        nested = contextlib.nullcontext
        with (
            in_turn(),
            torch.inference_mode(False),
            torch.enable_grad(),
            (nested if self._active else self._measured)(),
        ):
            yield

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        with (
            preserved_random_state(),
            preserved_module(self.model),
            without_autocast(self.device),
            twice_differentiable(self.model),
        ):
            to_eval_mode(self.model)
            for module in self.model.modules():
                for hooks in ("_backward_hooks", "_backward_pre_hooks"):  # torch.func does not know them
                    if vars(module).get(hooks):
                        vars(module)[hooks] = OrderedDict()
                if self.batch_norm == "batch" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = True
                    module.track_running_stats = False  # batch statistics, and no running ones are written
            self._active = True
            try:
                yield
            finally:
                self._active = False

    def outputs(self, params: Params, inputs: Any) -> Tensor:
        """φ(θ, x): the model's outputs for one batch; for units, the rows of their own positions."""
        if self.look is not None and (head := self.head(params, inputs)) is not None:
            return self.look(head)
        if isinstance(inputs, losses.Unit):
            outputs = self._outputs(params, inputs.inputs)
            return self.loss.pick(outputs, inputs) if isinstance(self.loss, losses.OfPositions) else outputs
        return self._outputs(params, inputs)

    def head(self, params: Params, inputs: Any) -> Head | None:
        """The outputs before the last linear layer, and that layer, where `last_layer.find_head` has found one."""
        if not (place := self.facts.get("head", 0)):
            return None
        unit = inputs if isinstance(inputs, losses.Unit) else None
        with Removing(place) as removing:
            head = removing.taken(self._outputs(params, inputs if unit is None else unit.inputs))
        if head is None or unit is None or not isinstance(self.loss, losses.OfPositions):
            return head
        return self.loss.pick_head(head, unit)

    def head_or_outputs(self, params: Params, inputs: Any) -> Head | Tensor:
        """The outputs, not yet multiplied out where that is possible."""
        head = self.head(params, inputs)
        return self.outputs(params, inputs) if head is None else head

    def looking(self, look: Callable[[Head], Tensor]) -> Problem:
        """The same with this function of the head in place of the outputs; facts are shared."""
        twin = copy.copy(self)
        twin.look = look
        return twin

    def thinned(self, targets: Tensor) -> tuple[Problem, Tensor]:
        """The same with a few of the outputs, where there is a head, to look at what comes before it.

        Facts are shared.
        """
        if not self.facts.get("head", 0) or self.look is not None:
            return self, targets
        few = min(FEW_OUTPUTS, self.facts["words"])
        words = torch.linspace(0, self.facts["words"] - 1, few).long().to(self.device)
        twin = self.looking(lambda head: head.thinned(words))
        twin.words = words
        assert isinstance(self.loss, losses.CrossEntropy)
        if self.loss.weight is not None:
            twin.loss = copy.copy(self.loss)
            twin.loss.weight = self.loss.weight[words.to(self.loss.weight.device)]
        return twin, torch.where(targets == self.loss.ignore_index, targets, targets % few)

    def with_rows(self, rows: Mapping[str, Tensor]) -> Problem:
        """The same with only some of the rows of these parameters; `around` must read them accordingly.

        Facts are shared.
        """
        twin = copy.copy(self)
        twin.params = {name: t[rows[name]] if name in rows else t for name, t in self.params.items()}
        weight, words = self.facts["head names"][0] if self.facts.get("head", 0) else None, self.words
        if words is not None and weight is not None and weight in rows:
            places = torch.searchsorted(rows[weight], words)
            twin.look = lambda head: head.thinned(words, places)
        return twin

    def at_few_positions(self, targets: Tensor) -> Tensor:
        """Targets of which only a few positions count, where there is a head, which multiplies out those alone."""
        if not self.facts.get("head", 0) or not isinstance(self.loss, losses.CrossEntropy):
            return targets
        return self.loss.at_few(targets, FEW_POSITIONS)

    def _outputs(self, params: Params, inputs: Any) -> Tensor:
        before = None if self._overwrites is not None else random_states(self.device)
        plain = depth() is None
        constants, given = self.constants, inputs
        if plain or self._overwrites is not False:  # copies, so that no pass changes the data or the function
            inputs = copies_of(inputs)
        if self._overwrites is not False:
            constants = {name: t.clone() if name in self.buffers else t for name, t in constants.items()}
        keeps: Any = contextlib.nullcontext(lambda: False)
        if before is not None or self._keeps:
            keeps = preserved_module(self.model)
        moving = [*params.values(), *tensors_of(inputs)]
        detached = not self._reads_by_name and not torch.is_grad_enabled() and plain
        detached = detached and not any(tensor.requires_grad for tensor in moving)
        args, kwargs = self._arguments(inputs)
        nothing = contextlib.nullcontext()
        around = nothing if self.around is None else self.around(params)
        try:
            with Elementary(), keeps as changed, torch.enable_grad() if detached else nothing, around:
                result = called_with(self.model, {**constants, **params}, args, kwargs)
                self._keeps |= changed()
        except (Exception, SystemExit) as error:
            if "mutate a captured Tensor" in first_line(error) and self._overwrites is False:
                self._overwrites = True  # in this batch, if not in the first one
                return self._outputs(params, given)
            first = plain and self._has_data
            told = explained(self.model, error, inputs, form=self.form, half=self._half, first=first)
            if told is None:
                raise
            raise told from error
        if plain:
            copies = leaves_of(inputs)
            if self._overwrites is not False:
                copies += [constants[name] for name in self.buffers & constants.keys()]
            overwrites = any(leaf._version for leaf in copies if isinstance(leaf, Tensor))
            if before is not None or overwrites:
                self._overwrites = overwrites
            self._check_own_parameters()
        if before is not None:
            self._draws = before != random_states(self.device)
        if plain and self._part is None:
            self._part = self._only_part(result, params, given)
        result = self.form.outputs(result, self._part)
        if isinstance(inputs, Rows):
            result = result[inputs.rows]
        check_differentiable(self.model, result)
        if detached and result.requires_grad and self._reads_elsewhere(result, params, given):
            raise InputError(
                f"the model {type(self.model).__name__} reads parameters that it does not hold under their "
                "names (in a list, a cache or a closure, say), so a measurement cannot move them; read them as "
                "attributes of their modules in the forward pass."
            )
        self._reads_by_name |= detached
        return result

    def _only_part(self, result: Any, params: Params, inputs: Any) -> Any:
        """The key or number of the only part of a model's result with a row per sample; None if there is no doubt.

        Other parts may have as many rows by chance (as many layers as samples, say): the model is run again with one
        more sample.
        """
        leaves = [leaf for leaf in tensors_of(inputs) if leaf.ndim]
        if not leaves or not (found := self.form.candidates(result, len(leaves[0]))):
            return None
        if len(found) > 1:
            more = len(leaves[0]) + 1
            args, kwargs = self._arguments(resized(inputs, more))
            with torch.no_grad(), Elementary():
                again = called_with(self.model, {**self.constants, **params}, args, kwargs)
            found = [key for key in found if key in self.form.candidates(again, more)]
        return found[0] if len(found) == 1 else None

    def _reads_elsewhere(self, result: Tensor, params: Params, inputs: Any) -> bool:
        """Whether the outputs lead to a tensor with a gradient that outlives the pass, although no parameter has one.

        A model that differentiates in its forward pass (forces are slopes of an energy) makes such tensors anew.
        """
        args, kwargs = self._arguments(copies_of(inputs))
        with preserved_module(self.model), torch.enable_grad(), Elementary():
            again = called_with(self.model, {**self.constants, **params}, args, kwargs)
        kept = {id(leaf) for leaf in _leaves_of(self.form.outputs(again, self._part))}
        return any(id(leaf) in kept for leaf in _leaves_of(result))

    def _arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""
        if isinstance(inputs, Rows):
            return inputs.graph.arguments(self.device, self.dtype), {}
        if isinstance(inputs, Mapping) and not self.form.takes.takes_one_dict(inputs):
            return (), dict(inputs)
        return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}

    def _check_own_parameters(self) -> None:
        """Raise `InputError` if a forward pass has changed the point at which the model is measured."""
        if not any(tensor._version for tensor in self.params.values()):
            return
        for name, tensor in self.model.named_parameters():
            if name in self.params and not torch.equal(self.params[name], tensor.detach().to(self.params[name])):
                raise InputError(
                    f"the model {type(self.model).__name__} overwrites its own parameter {name} in its forward pass, "
                    "as an embedding with max_norm= does, so there is no fixed point to measure at; run it once on all "
                    "data, then switch that off (max_norm=None)."
                )

    def losses(self, params: Params, inputs: Any, targets: Tensor) -> Tensor:
        """ℓ(φ(θ, x), y) of every sample of a batch."""
        return self.loss.values(self.outputs(params, inputs), targets)

    def place(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """A batch on the model's device, its floats in the model's dtype, ready for differentiation."""

        def move(tensor: Any, dtype: torch.dtype | None = None) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            tensor = tensor.detach().to(self.device, dtype if tensor.is_floating_point() else None)
            return tensor.clone() if tensor.is_inference() else tensor

        self._has_data |= len(targets) > 0
        with torch.inference_mode(False):
            return _each(lambda leaf: move(leaf, self.dtype), inputs), move(targets)

    def checked(self, outputs: Tensor | Head, inputs: Any, targets: Tensor, start: int = 0) -> None:
        """Raise `InputError` unless the outputs fit the loss, are finite and repeat.

        `start` is the number of the first sample in the data.
        """
        shape = outputs.stand_in() if isinstance(outputs, Head) else outputs
        fits = shape.ndim > 0 and shape.shape[0] == targets.shape[0]
        if not fits and not (self.form.batches == "fixed" and isinstance(self.loss, losses.CallableLoss)):
            ending = "the first dimension must be the samples."
            if shape.ndim == 0:
                ending = (
                    "a loss of its own? Have it return its logits (output=) and pass the loss as loss=; or measure "
                    "that number itself, with loss=lambda value, targets: value and batches='fixed', and with batch= "
                    "if the model needs the targets."
                )
            raise InputError(
                f"the model returned outputs of shape {tuple(shape.shape)} for {targets.shape[0]} samples; {ending}"
            )
        if shape.is_complex() and not isinstance(self.loss, losses.CallableLoss):
            raise InputError(
                f"the model {type(self.model).__name__} returns complex numbers, but {self.loss.name} needs real ones; "
                "return their .abs() or .real, or pass a loss of your own."
            )
        self.loss.check(shape, targets, start)
        _check_shift(self.model, self.loss.name, inputs, targets)
        values = _values(outputs)
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            refuse_infinite(inputs, start)
            masked = bool((values == -math.inf).any() & ~values.isnan().any() & (values != math.inf).all())
            way_out = (
                "check the weights, or, if it masks classes, have it write −1e9" if masked else "check the weights"
            )
            raise InputError(
                f"the model's output for sample {start + _first_not_finite(values)} is NaN or infinite although its "
                f"input is finite; {way_out}."
            )
        if self._draws:
            with self.active(), torch.no_grad():
                advance_random_states()
                whole = isinstance(outputs, Tensor)
                again = (self.outputs if whole else self.head_or_outputs)(self.params, inputs)
                change = (_values(again) - values).abs().max()
            if change > 1e-3 * values.abs().max():
                raise InputError(
                    "the model's outputs change from one pass to the next (dropout or noise that ignores eval mode?); "
                    "make them repeat, e.g. with F.dropout(x, training=self.training)."
                )
            self._draws = False  # it turned out to have no effect


def _check_shift(model: nn.Module, loss: str, inputs: Any, targets: Tensor) -> None:
    """Refuse the labels of a transformers language model, its own inputs, as targets for the same positions."""
    given = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if given is None or loss != "cross_entropy" or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return
    if given.shape == targets.shape and bool(((given == targets) | (targets < 0)).all()):
        raise InputError(
            f"the labels of {type(model).__name__} are its own inputs, each to be predicted one position earlier; "
            "pass loss='causal_lm', which shifts them."
        )


_HELD = ("_parameters", "_buffers", "_modules")  # what a module holds under names, beside its plain attributes


def _same_code(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models are built of the same modules with the same attributes, and hold parameters of equal names."""
    if [name for name, _ in first.named_modules()] != [name for name, _ in second.named_modules()]:
        return False
    for one, other in zip(first.modules(), second.modules(), strict=True):
        if type(one) is not type(other) or any(vars(one)[held].keys() != vars(other)[held].keys() for held in _HELD):
            return False
        plain = [{key: value for key, value in vars(each).items() if key not in _HELD} for each in (one, other)]
        try:
            if plain[0].keys() != plain[1].keys() or not all(plain[0][key] == plain[1][key] for key in plain[0]):
                return False
        except (RuntimeError, ValueError, TypeError):  # tensors among the attributes, which cannot be compared at once
            return False
    return True


def copies_of(inputs: Any) -> Any:
    """Inputs that a model may write to."""
    return _each(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


def _each(change: Callable[[Any], Any], inputs: Any) -> Any:
    return change(inputs) if isinstance(inputs, Tensor) else tree_map(change, inputs)


def _leaves_of(result: Tensor) -> list[Tensor]:
    """The tensors to which autograd leads from a result."""
    nodes, seen, found = [result.grad_fn], set[Any](), [result] if result.is_leaf else []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += [node.variable] if hasattr(node, "variable") else []
            nodes += [following for following, _ in node.next_functions]
    return found


def _values(outputs: Tensor | Head) -> Tensor:
    """The outputs without a graph; where they are not multiplied out, the largest in every row."""
    return outputs.detach() if isinstance(outputs, Tensor) else outputs.detach().largest()


def refuse_infinite(inputs: Any, start: int = 0) -> None:
    """Raise `InputError` for the first sample whose input is NaN or infinite, once something has come out like that.

    Not before: a mask may hold −∞, and a network may clamp what it reads.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            where = start + _first_not_finite(leaf)
            raise InputError(f"the input of sample {where} is NaN or infinite; clean the data first.")


def _first_not_finite(tensor: Tensor) -> int:
    wrong = ~torch.isfinite(tensor.detach())
    return int(wrong.reshape(len(tensor), -1).any(1).nonzero()[0]) if tensor.ndim else 0
