"""Both ends of a spectrum, and the Hessian in units of the norms of the parameter tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spiritlevel.estimators import Operator, norm_around, outermost_pair
from spiritlevel.results import Eigenpairs, Estimate

if TYPE_CHECKING:
    from spiritlevel.measures.setting import Setting

PROBES = 32
_EXACT = 64  # up to this many parameters there are as many probes, which makes estimates exact


def probe_count(size: int) -> int:
    """How many random probes an estimate takes for a matrix of this size."""
    return size if 2 <= size <= _EXACT else PROBES


class Ends:
    """Both ends of an operator's spectrum and its Frobenius norm, each computed when first asked for."""

    def __init__(self, op: Operator, seed: int) -> None:
        self.op, self.seed = op, seed
        self._pairs: dict[str, Eigenpairs] = {}

    def _pair(self, which: str) -> Eigenpairs:
        if which not in self._pairs:
            self._pairs[which] = outermost_pair(self.op, which, seed=self.seed)
        return self._pairs[which]

    def vector(self, which: str) -> Tensor:
        """The eigenvector of an end, "largest" or "magnitude"."""
        found = self._pair("magnitude" if which == "largest" and self.dominant.sign > 0 else which).vectors
        assert found is not None
        return found[:, 0]

    @functools.cached_property
    def dominant(self) -> Estimate:
        """The eigenvalue of largest magnitude: depending on its sign, it is also the largest or the smallest."""
        return self._pair("magnitude").outermost()

    @functools.cached_property
    def largest(self) -> Estimate:
        """λ₁."""
        return self.dominant if self.dominant.sign > 0 else self._pair("largest").outermost()

    @functools.cached_property
    def smallest(self) -> Estimate:
        """λ_P."""
        return self.dominant if self.dominant.sign < 0 else self._pair("smallest").outermost()

    @functools.cached_property
    def norm(self) -> Estimate:
        """max|λ|."""
        return dataclasses.replace(self.dominant, value=abs(self.dominant.value))

    @functools.cached_property
    def frobenius(self) -> Estimate:
        """√Σλ², around the eigenvector that the largest of them belongs to, and so not below its magnitude."""
        return norm_around(self.op, self.vector("magnitude"), probes=probe_count(self.op.size), seed=self.seed)


def layer_norms(setting: Setting) -> Tensor:
    """‖w_l‖ of the tensor that each parameter belongs to, (P,)."""
    return torch.cat([tensor.norm().expand(tensor.numel()) for tensor in setting.problem.params.values()])


def in_layer_norms(setting: Setting) -> Operator:
    """N H N with N = blockdiag(‖w_l‖ I)."""
    op, size = setting.hessian, layer_norms(setting)[:, None]
    return Operator(
        lambda block: size * (op @ (size * block)), op.size, dtype=op.dtype, device=op.device, shapes=op.shapes
    )
