"""Several backward passes through one recorded graph at once: every node takes all cotangents together.

A backward pass that autograd makes takes only the samples of one batch, which are too few for convolutions with many
channels; and what several passes share (the values of a kernel, those of an input) is made anew for each. So the
cotangents of several passes go through each node as one batch, channels last, and what arrives at a value is used at
once and need not be kept. Nodes without a rule of their own are called once for every pass, as autograd calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Parcel(NamedTuple):
    """Cotangents on their way to a node, and whether nobody else holds them, so that they may be overwritten."""

    cotangents: Tensor
    owned: bool
    spread: tuple[list[int], torch.Size] | None = None
    """The strides of the places given, all others being zero, and the shape with those: what a shortcut gives."""

    def whole(self) -> _Parcel:
        """With the zeros."""
        if self.spread is None:
            return self
        rows = self.cotangents.permute(0, 1, 3, 4, 2)
        passes, count, channels, height, width = self.spread[1]
        found = rows.new_zeros(passes, count, height, width, channels).permute(0, 1, 4, 2, 3)
        self.places(found).copy_(self.cotangents)
        return _Parcel(found, True)

    def places(self, whole: Tensor) -> Tensor:
        """Those that are not zero on account of the strides."""
        assert self.spread is not None
        down, across = self.spread[0]
        return whole[..., ::down, ::across]


_MANY_PLACES = 256  # from this many, it is worthwhile to transpose an image by itself

_Found = Sequence[_Parcel | None]
Own = Callable[[Tensor, bool, bool], Tensor | None]
"""In place of a node: (its cotangents, whether those of its first argument are wanted, whether its own may be
overwritten) → those of its first argument."""


def pull_back(
    outputs: Tensor,
    values: Sequence[Tensor | GradientEdge],
    vectors: Tensor,
    arrive: Callable[[int, Tensor], None],
    own: Mapping[Any, Own] | None = None,
) -> None:
    """Take cotangents `vectors`, (passes, *outputs), back through the graph to each of `values` that they reach.

    A value may be given as the edge of the graph below it.
    `arrive(position, cotangents)` is called when those of a value are complete, (passes, *value), and must not keep
    them: they are overwritten later. `own` holds functions that take the place of some nodes. Raises whatever a node
    raises that cannot be called in this way; the graph stays as it was. Hooks of tensors are not called.
    """
    places: dict[tuple[Any, int], list[int]] = {}
    for position, value in enumerate(values):
        edge = get_gradient_edge(value) if isinstance(value, Tensor) else value
        places.setdefault((edge.node, edge.output_nr), []).append(position)
    root = get_gradient_edge(outputs)
    waiting: dict[Any, dict[int, _Parcel]] = {root.node: {root.output_nr: _Parcel(vectors, False)}}
    with torch.no_grad():
        for node in _downwards(root.node):
            given = {number: parcel.whole() for number, parcel in waiting.pop(node, {}).items()}
            for number, parcel in given.items():
                for position in places.get((node, number), ()):
                    arrive(position, parcel.cotangents)
            if not given or not node.next_functions:
                continue
            if own and node in own:
                wanted = node.next_functions[0][0] is not None
                parcel = _last(given[0])
                made = own[node](parcel.cotangents, wanted, parcel.owned)
                results: _Found = [None if made is None else _Parcel(made, True)]
            else:
                results = _through(node, given)
            for (below, number), found in zip(node.next_functions, results, strict=False):
                if below is not None and found is not None:
                    inbox = waiting.setdefault(below, {})
                    inbox[number] = _sum_of(found, inbox[number]) if number in inbox else found


def _sum_of(first: _Parcel, second: _Parcel) -> _Parcel:
    if first.spread is None:
        first, second = second, first
    if first.spread is not None and second.spread is None and second.owned:
        first.places(second.cotangents).add_(first.cotangents)
        return second
    first, second = first.whole(), second.whole()
    if not first.owned:
        first, second = second, first
    if first.owned and first.cotangents.shape == second.cotangents.shape:
        return _Parcel(first.cotangents.add_(second.cotangents), True)
    return _Parcel(first.cotangents + second.cotangents, True)


def _last(parcel: _Parcel) -> _Parcel:
    """The same with the channels last, in memory of its own if that takes a copy."""
    cotangents = channels_last(parcel.cotangents)
    return _Parcel(cotangents, parcel.owned or cotangents is not parcel.cotangents)


def channels_last(tensor: Tensor) -> Tensor:
    """(…, C, H, W) with the channels side by side in memory."""
    if tensor.ndim < 4:
        return tensor
    rows = tensor.permute(*range(tensor.ndim - 3), -2, -1, -3)
    if rows.is_contiguous():
        return tensor
    if tensor.is_contiguous() and tensor.shape[-2:].numel() >= _MANY_PLACES:
        made = tensor.new_empty(rows.shape)
        for image, row in zip(tensor.flatten(0, -4).flatten(2), made.flatten(0, -4).flatten(1, 2), strict=True):
            row.copy_(image.T)  # one matrix is turned in blocks, several are not, which takes up to four times as long
    else:
        made = rows.contiguous()
    return made.permute(*range(tensor.ndim - 3), -1, -3, -2)


def _downwards(root: Any) -> Iterator[Any]:
    """All nodes, each after everything that reads it."""
    order, seen, stack = [], {root}, [(root, iter(root.next_functions))]
    while stack:
        node, below = stack[-1]
        following = next((each for each, _ in below if each is not None and each not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(following.next_functions)))
    return reversed(order)


def _through(node: Any, given: dict[int, _Parcel]) -> _Found:
    """What a node makes of the cotangents of its results: one for each of its arguments."""
    rule = _RULES.get(node.name())
    found = rule(node, given[0]) if rule is not None and [*given] == [0] else None
    if found is not None:
        return found
    results, passes = range(len(node._input_metadata)), len(next(iter(given.values())).cotangents)
    each = [node(*(given[n].cotangents[k] if n in given else None for n in results)) for k in range(passes)]
    columns = zip(*(one if isinstance(one, tuple) else (one,) for one in each), strict=True)
    return [
        None if below is None or column[0] is None else _Parcel(_stacked(column, below._input_metadata[number]), True)
        for (below, number), column in zip(node.next_functions, columns, strict=False)
    ]


def _stacked(passes: Sequence[Tensor], wanted: Any) -> Tensor:
    """As one, each summed over what was spread on the way, which autograd does between two nodes."""
    return torch.stack([each.sum_to_size(tuple(wanted.shape)) for each in passes])


def _convolution(node: Any, parcel: _Parcel) -> _Found | None:
    """All passes as one batch, channels last: half the time where a convolution has strides."""
    cotangents = parcel.cotangents
    if node._saved_weight.ndim != 4 or cotangents.ndim != 5:
        return None
    rows = channels_last(cotangents)
    if _is_shortcut(node):
        weight = node._saved_weight[:, :, 0, 0]
        found = torch.matmul(rows.permute(0, 1, 3, 4, 2), weight).permute(0, 1, 4, 2, 3)
        whole = torch.Size([len(rows), *node._saved_input.shape])
        return [_Parcel(found, True, (node._saved_stride, whole)), None, None]
    rows, weight = rows.flatten(0, 1), channels_last(node._saved_weight)
    options = (node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed)
    # only the shape of the input is looked at, so nothing is written there
    shape = len(rows), *node._saved_input.shape[1:]
    sizes = torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=torch.channels_last)
    more = (node._saved_output_padding, node._saved_groups, [True, False, False])
    found = torch.ops.aten.convolution_backward(rows, sizes, weight, None, *options, *more)[0]
    return [_Parcel(found.unflatten(0, cotangents.shape[:2]), True), None, None]


def _is_shortcut(node: Any) -> bool:
    """A kernel of one place that reads some of the places: its cotangents are one product, and zero at the others."""
    plain = node._saved_weight.shape[2:] == (1, 1) and node._saved_groups == 1 and not node._saved_transposed
    return plain and not any(node._saved_padding) and max(node._saved_stride) > 1


def _batch_norm(node: Any, parcel: _Parcel) -> _Found | None:
    """By running statistics: a factor per channel."""
    if node._saved_training:
        return None
    scale = (node._saved_running_var + node._saved_eps).rsqrt()
    if node._saved_weight is not None:
        scale = scale * node._saved_weight
    scale = scale.view(-1, *[1] * (parcel.cotangents.ndim - 3))
    found = parcel.cotangents.mul_(scale) if parcel.owned else parcel.cotangents * scale
    return [_Parcel(found, True), None, None]


def _relu(node: Any, parcel: _Parcel) -> _Found:
    parcel, result = _last(parcel), channels_last(node._saved_result).unsqueeze(0)
    cotangents = parcel.cotangents
    if parcel.owned:
        torch.ops.aten.threshold_backward.grad_input(cotangents, result, 0, grad_input=cotangents)
    else:
        cotangents = torch.ops.aten.threshold_backward(cotangents, result, 0)
    return [_Parcel(cotangents, True)]


def _sum(node: Any, parcel: _Parcel) -> _Found | None:
    """Where nothing is spread over more places."""
    below = [each._input_metadata[number].shape for each, number in node.next_functions if each is not None]
    same = all(tuple(shape) == parcel.cotangents.shape[1:] for shape in below)
    shared = parcel._replace(owned=parcel.owned and len(below) == 1)
    return [shared, shared] if same and node._saved_alpha == 1 else None


_RULES: dict[str, Callable[[Any, _Parcel], _Found | None]] = {
    "ConvolutionBackward0": _convolution,
    "NativeBatchNormBackward0": _batch_norm,
    "ReluBackward0": _relu,
    "AddBackward0": _sum,
}
"""By the name that autograd gives a node: those that an image goes through most often."""
