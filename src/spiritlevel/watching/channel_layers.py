"""What layers and matrix products do to channels: they read some, write others, and tie both sides of a product."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spiritlevel.watching.channels import NONE, Channels, Mixture, Product, constant, vector
from spiritlevel.watching.graph import Operation, Value


def linear(found: Channels, operation: Operation) -> bool:
    """A linear layer."""
    weight = found.view(operation.argument(1, "weight"))
    x, bias = operation.argument(0, "input"), operation.argument(2, "bias")
    return weight is not None and _layer(found, operation, x, weight, bias, -1)


def convolution(found: Channels, operation: Operation) -> bool:
    """A convolution, perhaps in groups."""
    return _convolution(found, operation)


def transposed_convolution(found: Channels, operation: Operation) -> bool:
    """A transposed convolution, whose weight begins with what it reads."""
    return _convolution(found, operation, transposed=True)


def _convolution(found: Channels, operation: Operation, *, transposed: bool = False) -> bool:
    weight = found.view(operation.argument(1, "weight"))
    if weight is None:
        return False
    groups = operation.argument(6, "groups", 1)
    x, bias, axis = operation.argument(0, "input"), operation.argument(2, "bias"), 1 - weight.ndim
    if transposed:
        split = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
        weight = split.reshape(-1, *split.shape[2:])
    return _layer(found, operation, x, weight, bias, axis, groups)


def _layer(
    found: Channels, operation: Operation, x: Value, weight: Tensor, bias: Any, axis: int, groups: int = 1
) -> bool:
    """A linear map: reads the channels of its input, and writes channels of its own.

    `weight` are the entries of its weight (out, in of one group, kernel …), `axis` that of the channels.
    """
    shift = None if bias is None else found.view(bias)
    if bias is not None and shift is None:
        return False
    count_out, count_in, result = weight.shape[0], weight.shape[1] * groups, operation.outputs[0]
    by_group = weight.reshape(groups, -1, weight.shape[1], weight[0, 0].numel())
    columns = by_group.transpose(1, 2).reshape(count_in, -1)
    if found.view(x) is not None:
        return _factors(found, operation, x, columns, bias, axis)
    atoms = found.atoms.get(x)
    read = torch.full((count_in,), NONE)
    if atoms is None and x not in found.varying and not x.given and not bool(x.tensor.any()):
        read = found.forest.new(count_in)  # zeros, as in the first state of a recurrence: what is read there stays zero
    if atoms is not None:
        read, agree = vector(atoms, axis)
        if not bool(agree.all()):
            mixed = atoms.movedim(axis, 0)[~agree]
            found.forest.stop(mixed, f"the operation {operation.described}, which mixes what it reads")
            read = torch.where(agree, read, NONE)
    single = groups == count_in == count_out > 1 and found.passing.products
    written = read if single else found.forest.new(count_out)
    if not single:
        found.use(operation, -1, columns, read)
        if groups > 1:
            found.mark(read, torch.arange(count_in) // (count_in // groups))
            found.mark(written, torch.arange(count_out) // (count_out // groups))
    found.use(operation, 1, weight.reshape(count_out, -1), written)
    if shift is not None:
        found.use(operation, 1, shift.reshape(count_out, 1), written, "bias")
    shape = [1] * result.tensor.ndim
    shape[axis] = count_out
    found.atoms[result] = written.reshape(shape).expand(result.shape)
    return True


def _factors(found: Channels, operation: Operation, x: Value, columns: Tensor, bias: Any, axis: int) -> bool:
    """The product of two matrices of parameters: any invertible matrix may stand between them."""
    left = found.view(x)
    if found.passing.functions != "none" or left is None or left.ndim != 2 or axis != -1 or bias is not None:
        return False
    atoms = found.forest.new(len(columns))
    found.use(operation, 1, columns, atoms)
    found.use(operation, -1, left.T, atoms)
    return True


def matmul(found: Channels, operation: Operation) -> bool:
    """A product of two matrices, one of which may be a weight."""
    if len(operation.args) > 1:
        return _matmul(found, operation, *operation.args[:2])
    return _matmul(found, operation, operation.argument(0, "input"), operation.kwargs["mat2"])


def rmatmul(found: Channels, operation: Operation) -> bool:
    """The same in the other order."""
    return _matmul(found, operation, operation.args[1], operation.args[0])


def _matmul(found: Channels, operation: Operation, first: Value, second: Value) -> bool:
    left, right = found.view(first), found.view(second)
    if right is not None and right.ndim == 2:
        return _layer(found, operation, first, right.T, None, -1)
    if left is not None and left.ndim == 2 and second.tensor.ndim > 1:
        return _layer(found, operation, second, left, None, -2)
    return left is None and right is None and _product(found, operation, first, second)


def addmm(found: Channels, operation: Operation) -> bool:
    """A bias plus a product with a weight, or what `baddbmm` does."""
    bias, first, second = operation.args[:3]
    weight = found.view(second)
    if weight is None or found.view(bias) is None:
        return baddbmm(found, operation)
    scaled = any(operation.kwargs.get(key, 1) != 1 for key in ("alpha", "beta"))
    return not scaled and _layer(found, operation, first, weight.T, bias, -1)


def baddbmm(found: Channels, operation: Operation) -> bool:
    """Something added to the scores of attention, such as a mask."""
    bias, first, second = operation.args[:3]
    if any(operation.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")) and found.view(bias) is not None:
        return False
    if bias in found.atoms or any(found.view(value) is not None for value in (first, second)):
        return False
    return _product(found, operation, first, second)


def _product(found: Channels, operation: Operation, first: Value, second: Value) -> bool:
    if min(first.tensor.ndim, second.tensor.ndim) < 2:
        return False
    a, b = (found.atoms.get(value) for value in (first, second))
    shares = (first, -1) if a is None else (second, -2)
    done, atoms = _contract(found, operation, a, b, operation.outputs[0].shape, (-2, -1), shares)
    if done and atoms is not None:
        found.atoms[operation.outputs[0]] = atoms
    return done


def _contract(
    found: Channels,
    operation: Operation,
    first: Tensor | None,
    second: Tensor | None,
    shape: torch.Size,
    axes: tuple[int, int] | None,
    shares: tuple[Value | None, int],
) -> tuple[bool, Tensor | None]:
    """The product of two values (…, i, k) and (…, k, j): done or not, and the atoms of the result.

    Where the sum goes over channels of both, as in the scores of attention, the map of one is undone by the inverse
    transpose in the other. Where it goes over positions, the channels of the one that has them stay.
    """
    if not found.passing.attention:
        return False, None
    heads = torch.arange(shape[:-2].numel()).reshape(*shape[:-2], 1)
    if first is not None and second is not None:
        if not (constant(first, [-2]) and constant(second, [-1])):
            return False, None
        a, b = (x.expand(*shape[:-2], x.shape[-1]) for x in (first[..., 0, :], second[..., :, 0]))
        found.forest.tie(a, b, flip=True)
        for atoms, other in ((a, b), (b, a)):
            found.forest.stop(atoms[other < 0], "a product of values with something else")
            found.mark(atoms, heads, "scores")
        found.products.append(Product(operation, a, b, axes))
        return True, None
    if second is not None and constant(second, [-2]):
        rows = second[..., 0, :].expand(*shape[:-2], shape[-1])
        found.mark(rows, heads, "mixed")
        found.mixtures.append(Mixture(operation, rows, *shares))
        return True, rows[..., None, :].expand(shape)
    if first is not None and constant(first, [-1]):
        rows = first[..., :, 0].expand(*shape[:-2], shape[-2])
        found.mark(rows, heads, "mixed")
        found.mixtures.append(Mixture(operation, rows, *shares))
        return True, rows[..., None].expand(shape)
    return False, None


def einsum(found: Channels, operation: Operation) -> bool:
    """A sum over indices of two operands, brought into the form of a product of matrices."""
    equation, *operands = operation.args
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    equation = equation.replace(" ", "")
    if len(operands) != 2 or "..." in equation or "->" not in equation:
        return False
    (first, second), result = equation.split("->")[0].split(","), equation.split("->")[1]
    summed = [letter for letter in first if letter in second and letter not in result]
    batch = [letter for letter in first if letter in second and letter in result]
    lone = [[letter for letter in own if letter not in summed + batch] for own in (first, second)]
    whole = all(letter in result for letter in lone[0] + lone[1])
    if not whole or not summed or any(len(set(own)) < len(own) for own in (first, second, result)):
        return False
    sizes = {letter: size for own, value in zip((first, second), operands, strict=True)
             for letter, size in zip(own, value.shape, strict=True)}  # fmt: skip

    def folded(labels: Tensor, own: str, *groups: list[str]) -> Tensor:
        order = labels.permute([own.index(letter) for group in groups for letter in group])
        return order.reshape([math.prod(sizes[letter] for letter in group) for group in groups])

    for turn, (weight, other) in enumerate((operands[::-1], operands)):
        entries, (mine, theirs) = found.view(weight), ((second, first), (first, second))[turn]
        if entries is not None:
            if batch or found.view(other) is not None:
                return False
            return _folded_layer(found, operation, folded(entries, mine, lone[1 - turn], summed), other, theirs, summed)
    labels = [found.atoms.get(value) for value in operands]
    a = None if labels[0] is None else folded(labels[0], first, batch, lone[0], summed)
    b = None if labels[1] is None else folded(labels[1], second, batch, summed, lone[1])
    counts = [math.prod(sizes[letter] for letter in group) for group in (batch, *lone)]
    single = all(len(group) == 1 for group in (*lone, summed))
    axes = (result.index(lone[0][0]), result.index(lone[1][0])) if single else (0, 0)
    shares = (operands[0], first.index(summed[0])) if labels[0] is None else (operands[1], second.index(summed[0]))
    done, atoms = _contract(found, operation, a, b, torch.Size(counts), axes, shares)
    if done and atoms is not None:
        order = batch + lone[0] + lone[1]
        found.atoms[operation.outputs[0]] = atoms.reshape([sizes[letter] for letter in order]).permute(
            [order.index(letter) for letter in result]
        )
    return done


def _folded_layer(
    found: Channels, operation: Operation, weight: Tensor, x: Value, letters: str, summed: list[str]
) -> bool:
    """A product with a parameter, its axes in any order: a layer that reads the summed indices as one axis."""
    equation = operation.args[0].replace(" ", "")
    result = equation.split("->")[1]
    kept = [letter for letter in letters if letter not in summed]
    new = [letter for letter in result if letter not in kept]
    sizes = dict(zip(result, operation.outputs[0].shape, strict=True))
    atoms, read = found.atoms.get(x), torch.full((weight.shape[1],), NONE)
    if atoms is not None:
        order = atoms.permute([letters.index(letter) for letter in kept + summed]).flatten(len(kept))
        if not constant(order, range(len(kept))):
            return False
        read = order.reshape(-1, weight.shape[1])[0]
    found.use(operation, -1, weight.T, read)
    written = found.forest.new(len(weight))
    source = [letter for own in equation.split("->")[0].split(",") for letter in own if letter in new]
    found.use(operation, 1, weight, written)
    shaped = written.reshape([sizes[letter] for letter in source])
    shaped = shaped.permute([source.index(letter) for letter in new])
    view = [sizes[letter] if letter in new else 1 for letter in result]
    found.atoms[operation.outputs[0]] = shaped.reshape(view).expand(operation.outputs[0].shape)
    return True


def attention(found: Channels, operation: Operation) -> bool:
    """`F.scaled_dot_product_attention`."""
    query, key, value = (operation.argument(index, name) for index, name in enumerate(("query", "key", "value")))
    q, k, v = (found.atoms.get(item) for item in (query, key, value))
    if any(found.view(item) is not None for item in (query, key, value)):
        return False
    if operation.argument(7, "enable_gqa", False):
        k, v = (None if x is None else x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (k, v))
    shape = operation.outputs[0].shape
    if q is None or k is None:
        found.forest.stop(k if q is None else q, f"the operation {operation.described}")  # the other is not known
    else:
        scores = torch.Size([*shape[:-1], key.shape[-2]])
        done, _ = _contract(found, operation, q, k.transpose(-2, -1), scores, None, (None, 0))
        if not done:
            return False
    if v is not None:
        done, atoms = _contract(found, operation, None, v, shape, None, (None, 0))
        if not done or atoms is None:
            return False
        found.atoms[operation.outputs[0]] = atoms
    return True


def embedding(found: Channels, operation: Operation) -> bool:
    """A table in which every row is a value of all channels."""
    table = found.view(operation.argument(1, "weight"))
    if table is None or operation.argument(3, "max_norm") is not None:
        return False
    atoms = found.forest.new(table.shape[1])
    found.use(operation, 1, table.T, atoms)
    found.atoms[operation.outputs[0]] = atoms.expand(operation.outputs[0].shape)
    return True
