"""Messages for a model that fails or returns what cannot be measured: what came, what is expected, the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spiritlevel.binding.reading import Form
from spiritlevel.binding.values import tensors_of
from spiritlevel.errors import InputError, first_line, is_out_of_memory, named_error, place_of


class CannotRun(InputError, RuntimeError):
    """The model raised an error: in its first pass, usually about its inputs' shape, or while being differentiated."""


class ReadsMemory(CannotRun):
    """The model reads the memory of a tensor, which has none inside the transformations of `torch.func`."""


def explained(
    model: nn.Module, error: BaseException, inputs: Any, *, form: Form, half: bool, first: bool
) -> InputError | None:
    """A failure of the model's forward pass in a sentence; None where its own error says more.

    `half` says that it is the float32 copy of a model in half precision, `first` that it was called with data and
    outside every transformation, where whatever it raises is about the data.
    """
    said, name = first_line(error), type(model).__name__
    if "doesn't have storage" in said:  # what torch says about a tensor inside its transformations
        return ReadsMemory(
            f"the model {name} reads the memory of a tensor in its forward (as .numpy() does), which has none while it "
            "is differentiated; write that part in operations of torch."
        )
    guarded = said.startswith("Guard failed")  # what a program of torch.export says about other shapes
    known = isinstance(error, InputError) or is_out_of_memory(error)
    if known or not (guarded or first):
        return None
    told = isinstance(error, RuntimeError | ValueError | TypeError | IndexError | AssertionError) and said
    reason = told + place_of(error) if told else named_error(error)
    remark = _remark(said, inputs, form, half)
    return CannotRun(
        f"the model {name} fails on inputs of shape {_shapes(inputs)}: {reason}{remark}{_lacks(model, inputs)}."
    )


def check_differentiable(model: nn.Module, outputs: Tensor) -> None:
    """Refuse outputs that are sparse or whole numbers."""
    sparse = outputs.layout is not torch.strided
    if not sparse and (outputs.is_floating_point() or outputs.is_complex()):
        return
    what = "sparse outputs" if sparse else f"outputs of {str(outputs.dtype).removeprefix('torch.')}"
    way = "convert them with .to_dense()" if sparse else "return the logits, before they are rounded or counted"
    raise InputError(f"the model {type(model).__name__} returns {what}, which cannot be differentiated; {way}.")


def _remark(said: str, inputs: Any, form: Form, half: bool) -> str:
    """What may be behind an error of the model, in brackets."""
    if said.startswith("Guard failed"):
        return " (it was exported for inputs of one shape; export it with dynamic_shapes= for batches of any size)"
    if half and "dtype" in said:
        return (
            " (models in half precision are measured as a float32 copy, but this one converts its values to "
            "another type inside; convert them to the type of its weights, x.to(self.weight.dtype))"
        )
    if (counts := _counts(said, inputs)) is not None:
        return f" (the data have {counts[0]:,} numbers for each sample, and the model takes {counts[1]:,})"
    given = form.takes.remark(inputs)
    whole = not given and "dtype" in said and not any(leaf.is_floating_point() for leaf in tensors_of(inputs))
    return " (its inputs are whole numbers, which are passed as they are: x.float() converts them)" * whole + given


def not_multiplied(said: str) -> tuple[int, int, int] | None:
    """Rows, numbers in each, and how many a matrix takes, if PyTorch says that it could not multiply the two."""
    shapes = re.search(r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", said)
    return None if shapes is None else (int(shapes[1]), int(shapes[2]), int(shapes[3]))


def _counts(said: str, inputs: Any) -> tuple[int, int] | None:
    """How many numbers each sample has and how many a matrix of the model takes, if the product of both has failed."""
    shapes = not_multiplied(said)
    if shapes is None or not isinstance(inputs, Tensor) or inputs.ndim < 2:
        return None
    samples, numbers, taken = shapes
    return (numbers, taken) if inputs.shape[0] == samples and inputs[0].numel() == numbers else None


def _lacks(model: nn.Module, inputs: Any) -> str:
    """What a transformers encoder-decoder lacks once its labels are targets, since it makes that from them."""
    wanted = "decoder_input_ids"
    if not (isinstance(inputs, Mapping) and hasattr(model, f"prepare_{wanted}_from_labels")) or wanted in inputs:
        return ""
    return f"; a batch needs {wanted}, which DataCollatorForSeq2Seq(tokenizer, model=model) makes from the labels"


def _shapes(inputs: Any) -> str:
    """The shapes of inputs, with their names where they have some."""
    if isinstance(inputs, Mapping):
        return ", ".join(f"{key}={_shapes(value)}" for key, value in inputs.items() if tensors_of(value)) or "none"
    return ", ".join(str(tuple(leaf.shape)) for leaf in tensors_of(inputs)) or "none"
