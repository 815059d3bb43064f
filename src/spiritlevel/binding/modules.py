"""Which modules can be measured; for those that cannot, a sentence that says why and what to do instead."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spiritlevel.binding.devices import has_double
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")  # of modules


def measurable(model: Any) -> nn.Module:
    """The module inside its wrappers, or `InputError`."""
    if not isinstance(model, nn.Module):
        hint = "; pass its .module()" if type(model).__name__ == "ExportedProgram" else ""
        raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}{hint}.")
    model = unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("a TorchScript model cannot be measured; pass the module that it was made from.")
    for name, module in model.named_modules():
        if type(module).__module__.startswith(_QUANTISED):
            what = f"{name or 'the model'} is a {type(module).__module__}.{type(module).__name__}"
            raise InputError(
                f"the model {type(model).__name__} is quantised ({what}): its weights are whole numbers that cannot be "
                "moved, so it has no curvature; measure the model from before quantisation."
            )
    if any(nn.parameter.is_lazy(tensor) for _, tensor in state_of(model)):
        raise InputError(f"the model {type(model).__name__} has lazy parameters; run it on one batch first.")
    refuse_sharded(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"the parameter {name} is on the meta device, without values; there is no curvature to measure."
            )
    return model


def is_sharded(model: Any) -> bool:
    """Whether a parameter is a DTensor, or was one before a pass gathered it."""
    if not isinstance(model, nn.Module):
        return False
    model = unwrapped(model)
    return any(is_parted(p) for p in model.parameters()) or bool(managed_modules(model))


def refuse_sharded(model: Any) -> None:
    """Raise `InputError` for a sharded model, where something needs whole parameters."""
    if is_sharded(model):
        name = next((name for name, p in unwrapped(model).named_parameters() if is_parted(p)), "of a module")
        raise InputError(
            f"the parameter {name} is sharded over processes (a DTensor, as FSDP2 makes them), and this needs it whole "
            "on every rank. Margins, losses, average and adaptive sharpness and the Hessian are measured in shards "
            "(margins, hessian, measure); for the rest load the full state dict "
            "(torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) into an "
            "unsharded model, and measure that; group= shares the work."
        )


def is_parted(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def part_here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: all of it, unless it is sharded. Shares its memory."""
    return tensor.to_local() if is_parted(tensor) else tensor  # type: ignore[attr-defined]


def managed_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` manages."""
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` or a wrapper for several devices, which cannot be differentiated twice."""
    while True:
        parallel = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        inner = model.module if parallel else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def to_eval_mode(model: nn.Module) -> None:
    """Put a model into eval mode; programs of `torch.export` keep the mode they were exported in."""
    try:
        model.eval()
    except NotImplementedError:  # what such a program raises
        for module in model.modules():
            module.training = False


def twin_of(model: nn.Module) -> nn.Module:
    """`copy.deepcopy` of a model in half the time: it takes apart the dozen empty dicts for hooks of each module."""
    held = (value for module in model.modules() for value in vars(module).values())
    return copy.deepcopy(
        model, {id(value): OrderedDict() for value in held if type(value) is OrderedDict and not value}
    )


@in_turn()
def in_double(model: nn.Module) -> nn.Module:
    """A copy of a model in float64; on the CPU, if its own device has no such numbers."""
    twin = twin_of(model)
    if any(not has_double(tensor.device) for _, tensor in state_of(model)):
        twin = twin.cpu()
    return twin.double()


@in_turn()
def state_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, by name: the model's own, not those that another thread measures it with."""
    return [*model.named_parameters(), *model.named_buffers()]


def called_with(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a model returns with these tensors in place of its own, which it holds again afterwards.

    As `torch.func.functional_call`, which looks up every name several times, and so takes longer than a pass of a small
    network: here the modules are walked once. Where a tensor is held under several names, all of them get the new one.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    new: dict[int, Tensor] = {}
    seen, waiting = set[nn.Module](), [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        held: dict[str, Any]
        for held in (module._parameters, module._buffers):
            for key, own in held.items():
                if own is not None:
                    places.append((held, key, own))
                    if (given := tensors.get(prefix + key)) is not None:
                        new[id(own)] = given
        inner = [(f"{prefix}{name}.", part) for name, part in module._modules.items() if part is not None]
        waiting += reversed(inner)  # the names of what is held twice are those met first, in the order of torch
    if len(new) != len(tensors):  # some were held when the names were taken, but are not now
        return functional_call(model, dict(tensors), args, kwargs)
    moved = [place for place in places if id(place[2]) in new]
    try:
        for held, key, own in moved:
            held[key] = new[id(own)]
        return model(*args, **kwargs)
    finally:
        for held, key, own in moved:
            held[key] = own


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory; a sparse one has several, so its own identity stands for all."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -id(tensor)


def bytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's numbers; for a sparse one, of those it holds and their places."""
    if tensor.layout == torch.strided:
        return tensor.nbytes
    return (tensor._nnz() if tensor.is_sparse else tensor.values().numel()) * (tensor.element_size() + 16)
