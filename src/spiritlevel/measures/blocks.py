"""The blocks of the Gauss-Newton matrix that belong to the weights of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from spiritlevel.binding.parameters import Params
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError
from spiritlevel.operators.footprint import activation_bytes
from spiritlevel.watching.layers import matrices, recorded
from spiritlevel.watching.recording import GradientNorms

if TYPE_CHECKING:
    from spiritlevel.measures.setting import Setting

Item = TypeVar("Item")

_OUTPUTS = 2**22  # for all classes and all samples taken at once
_SAVED = 2**23  # bytes that a forward pass saves for its derivative
_GRADIENTS = 2**25  # numbers that per-sample gradients hold at once


@dataclass
class Block:
    """The block G of the Gauss-Newton matrix that belongs to a weight with rows w_s."""

    diagonal: Tensor  # of G, in the weight's shape
    relative: Tensor  # Σ_{s,s'} ⟨w_s, w_s'⟩ Tr G_{s,s'} of every sample, s and s' in one group


def gauss_newton_blocks(setting: Setting, weights: Sequence[str]) -> dict[str, Block]:
    """Diagonals and relative flatness of the weights' blocks, exactly, from at most C−1 backward passes.

    G = E Σ_j d_j vec(g_j)vec(g_j)ᵀ with the per-sample gradients g_j of v_jᵀφ in the weight W: the diagonal is
    E Σ_j d_j g_j², the other sum E Σ_j d_j ‖Wᵀg_j‖². A backward pass gives δ = ∂(v_jᵀφ)/∂z at a layer's output z; for a
    linear layer with one row per sample, g = δaᵀ, so both follow from δ and its input a, and no gradient is formed.
    That needs a weight with one use, in a module whose rows are the samples; others get gradients sample by sample.
    """
    problem = setting.problem
    if setting.coupling:
        raise InputError(f"{setting.why_coupled}, so a sample has no gradient of its own.")
    if not problem.loss.closed_form:
        raise InputError("the Gauss-Newton matrix of the weights needs a loss that offers its output factors.")
    found = {
        name: Block(torch.zeros_like(problem.params[name]).double(), torch.zeros(setting.count, dtype=torch.float64))
        for name in weights
    }
    structure = setting.structure
    with setting.ranks.together(), problem.active():
        few, _ = problem.place(*setting.batches.first(3))
        without_rule = GradientNorms(problem, few, structure, 1).without_rule
        modules = {}
        for name in weights:
            calls = [call for call in setting.calls if call.weight == name]
            if name not in without_rule and len(calls) == 1 and calls[0].plain:
                modules[name] = calls[0].module
        alone = {name: problem.params[name] for name in weights if name not in modules}
        # how many samples at once, so that their outputs and factors, one per class, and what a pass saves stay small
        fitting = min(_OUTPUTS // max(setting.classes, 1), _SAVED // activation_bytes(setting)[0])
        size = None if setting.whole else setting.fair(max(1, fitting))
        for start, inputs, targets in setting.mine(setting.batches if size is None else setting.batches.cut(size)):
            params = {name: tensor.detach().requires_grad_() for name, tensor in problem.params.items()}
            with recorded(modules) as ran:
                outputs = problem.outputs(params, inputs)
            if len(ran) != len(modules):
                raise InputError("the layers of this network run more often for some samples than for others.")
            for (scale, vector), more in _with_more(problem.loss.factors(outputs.detach(), targets)):
                vector = vector.reshape(outputs.shape).to(outputs)
                slopes: Sequence[Tensor] = ()
                if ran:
                    taps = [output for *_, output in ran]
                    slopes = torch.autograd.grad(outputs, taps, vector, retain_graph=more, materialize_grads=True)
                for (name, points, _), slope in zip(ran, slopes, strict=True):
                    _add_call(found[name], modules[name], problem.params[name], points, slope, scale, start)
                for part, gradients in _sample_by_sample(problem, alone, inputs, vector):
                    for name, gradient in gradients.items():
                        owner, weight = setting.owners[name], problem.params[name]
                        _add_gradients(found[name], owner, weight, gradient, scale[part], start + part.start)
    for block in found.values():
        setting.ranks.add([block.diagonal, block.relative])
        block.diagonal /= setting.count
    return found


def _with_more(items: Iterator[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item, with whether another follows; only one is held at a time."""
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        yield item, following is not None
        item = following


def _add_call(
    block: Block, module: nn.Module, weight: Tensor, points: Tensor, slope: Tensor, scale: Tensor, start: int
) -> None:
    """Add one factor's Σ_n d g², and d ‖Wᵀg‖² of every sample from `start` on, from a layer's inputs and slopes."""
    if isinstance(module, nn.Linear) and points.ndim == 2:
        block.diagonal += (scale[:, None] * slope.double().square()).T @ points.double().square()
        sizes = (slope @ weight).double().square().sum(1) * points.double().square().sum(1)
        block.relative[start : start + len(scale)] += (scale * sizes).cpu()
        return

    def form(weight: Tensor, point: Tensor, slope: Tensor) -> Tensor:
        return (functional_call(module, {"weight": weight}, (point[None],))[0] * slope).sum()

    samples = max(1, _GRADIENTS // weight.numel())
    for begin in range(0, len(scale), samples):
        part = slice(begin, begin + samples)
        gradients = vmap(grad(form), in_dims=(None, 0, 0))(weight.detach(), points[part], slope[part])
        _add_gradients(block, module, weight, gradients.detach(), scale[part], start + begin)


def _add_gradients(
    block: Block, module: nn.Module, weight: Tensor, gradients: Tensor, scale: Tensor, start: int
) -> None:
    """The same from the gradients g of every sample, (N, …)."""
    block.diagonal += torch.einsum("n,n...->...", scale, gradients.double().square())
    rows, flat = matrices(module, weight).flatten(2), matrices(module, gradients).flatten(3)
    forms = flat * (rows @ rows.mT @ flat) if rows.shape[1] < rows.shape[2] else (rows.mT @ flat).square()
    block.relative[start : start + len(scale)] += (scale * forms.double().sum((1, 2, 3))).cpu()


def _sample_by_sample(problem: Problem, chosen: Params, inputs: Any, vectors: Tensor) -> Iterator[tuple[slice, Params]]:
    """The gradients of vᵀφ in the chosen parameters, every use of them included, for a few samples at a time."""
    if not chosen:
        return
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]

    def one(vector: Tensor, *sample: Tensor) -> Params:
        rest = iter(sample)
        single = tree_map(lambda leaf: next(rest)[None] if isinstance(leaf, Tensor) else leaf, inputs)

        def forward(chosen: Params) -> Tensor:
            return problem.outputs({**problem.params, **chosen}, single)[0]

        gradients: Params = vjp(forward, chosen)[1](vector)[0]
        return gradients

    samples = max(1, _GRADIENTS // sum(tensor.numel() for tensor in chosen.values()))
    for begin in range(0, len(vectors), samples):
        part = slice(begin, begin + samples)
        rows = [vectors[part], *(leaf[part] for leaf in leaves)]
        try:
            gradients = vmap(one)(*rows)
        except RuntimeError:  # an operation without a batching rule
            each = [one(*(row[n] for row in rows)) for n in range(len(rows[0]))]
            gradients = {name: torch.stack([sample[name] for sample in each]) for name in chosen}
        yield part, {name: gradient.detach() for name, gradient in gradients.items()}
