"""How to compute the per-sample traces of a network: which method, how many cores, how large a batch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from spiritlevel.binding.cores import at_a_time, batches_that_fit, in_memory
from spiritlevel.binding.problem import Problem
from spiritlevel.errors import InputError, NotExactError
from spiritlevel.watching.chains import Chain, find_chain
from spiritlevel.watching.recording import GradientNorms
from spiritlevel.watching.structure import Structure

MANY_CLASSES = 2_000
SAMPLED_PASSES = 8  # exact passes where there are that many classes; the rest is sampled
MANY_POSITIONS = 256  # the same limit for positions times classes, each of which is a factor
CHAIN_COST = 2e7  # multiply-adds per sample up to which the recursion is worthwhile
SPLIT_RANK = 1_000  # factors up to which an exact Gauss-Newton part may be worth its backward passes
BACKWARD, PROBE, SLOW_PROBE = 2.0, 3.0, 10.0  # cost in forward passes: of a factor, a collapsed probe, any other probe
PASSES_OF_TILES = 9  # that keep convolutions in tiles busy with a batch of BATCH_BYTES
BATCH_BYTES = 1e8  # activations of one batch: small enough to stay near the cache, large enough to hide overheads
PROBED_BYTES = 1e9  # the same for probes, which are drawn again for every batch and read its values from a tape


class Plan:
    """The method that was chosen, and what it needs."""

    def __init__(
        self,
        name: str,
        *,
        passes: int = 0,
        norms: GradientNorms | None = None,
        chain: Chain | None = None,
        rank: int = 0,
    ) -> None:
        self.name, self.passes, self.norms, self.chain, self.rank = name, passes, norms, chain, rank
        self.notes: tuple[str, ...] = ()


def choose(
    problem: Problem,
    structure: Structure,
    inputs: Any,
    outputs: Tensor,
    targets: Tensor,
    method: str,
    passes: int | None,
    plain: Tensor | None = None,
) -> Plan:
    """The best method available; raises `NotExactError` if an exact one was asked for and there is none.

    `outputs` have the shape of the model's outputs for these inputs; `plain` are those outputs, where they are known.
    """
    if method in ("hutchinson", "pyhessian"):
        return Plan("hutchinson")
    rank = problem.loss.rank(outputs, targets)
    if structure.exact and problem.loss.closed_form:
        plan = Plan("exact")
        if passes is not None and passes < rank - 1:
            plan = Plan("passes", passes=passes)
        elif passes is None and rank >= (MANY_CLASSES if outputs.ndim < 3 else MANY_POSITIONS):
            if method == "exact":
                sampled = f"passes={SAMPLED_PASSES} to sample the rest, or " if problem.loss.can_sample else ""
                raise InputError(
                    f"exact traces of {outputs[0].numel()} outputs take {rank} backward passes per batch; "
                    f"pass {sampled}passes={rank} to insist."
                )
            if not problem.loss.can_sample:
                return Plan("hutchinson")
            plan = Plan("passes", passes=SAMPLED_PASSES)
            plan.notes = (f"{rank} factors: {SAMPLED_PASSES} taken exactly, the rest sampled; passes= changes that",)
        together = plan.passes + 1 if plan.name == "passes" else rank
        plan.norms = GradientNorms(problem, inputs, structure, together, plain)
        return plan
    if passes is not None:
        raise NotExactError(f"passes= needs exact terms, but {_obstacle(problem, structure)}; leave it out.")
    if problem.loss.closed_form and not structure.failure:
        chain = find_chain(problem, inputs)
        if chain is not None and (chain.cost <= CHAIN_COST or method == "exact"):
            return Plan("recursion", chain=chain)
    if method == "exact":
        raise NotExactError(
            f"the per-sample traces of this model have no exact form here: {_obstacle(problem, structure)}; "
            "use method='auto' or 'hutchinson' for an estimate with its error."
        )
    if problem.loss.closed_form and structure.smooth and rank <= SPLIT_RANK:
        norms = GradientNorms(problem, inputs, structure, rank, plain)
        if not norms.without_rule:
            return Plan("split", norms=norms, rank=rank)
    return Plan("hutchinson")


def _obstacle(problem: Problem, structure: Structure) -> str:
    if not problem.loss.closed_form:
        return "the loss offers no output factors"
    return structure.reason


def splitting_pays(rank: int, few: float, many: float, *, collapsed: bool) -> bool:
    """Whether `rank` backward passes and `few` probes cost less than the `many` probes that give the same error.

    Near a minimum nearly all of the spread comes from the Gauss-Newton part, and a split is hundreds of times quicker;
    far from one it comes from the remainder, and the backward passes are wasted.
    """
    probe = PROBE if collapsed else SLOW_PROBE
    return rank * BACKWARD + few * probe < many * probe


def cores_for(
    problem: Problem, structure: Structure, plan: Plan, outputs: Tensor, batch_size: int | None, memory: int
) -> int:
    """How many batches to work on at once; if their size is given, as many as fit.

    One where the model is called throughout, and where the classes take more memory than the activations: operations
    on that many classes are large enough for all cores.
    """
    activations, classes = _bytes_per_sample(problem, structure, outputs)
    if plan.norms is None or classes > activations:
        return 1
    return batches_that_fit(at_a_time(problem.device), (batch_size or 1) * (8 * activations + classes), memory)


def batch_size_for(problem: Problem, structure: Structure, plan: Plan, outputs: Tensor, memory: int, cores: int) -> int:
    """Samples per batch: a power of two that keeps the activations close to the cache and within the memory."""
    activations, extra = _bytes_per_sample(problem, structure, outputs)
    if plan.chain is not None:
        extra += 4 * 8 * plan.chain.width**2  # the Hessian of a layer, that of the next, and what lies between
    wanted = (PROBED_BYTES if plan.name == "hutchinson" else BATCH_BYTES) / (activations + extra)
    if plan.name == "passes" and plan.norms is not None and plan.norms.kernels.values:
        wanted *= max(1, PASSES_OF_TILES // (plan.passes + 1))  # convolutions in tiles want many cotangents at once
    allowed = memory / in_memory(cores) / (8 * activations + extra)
    return max(1, min(2 ** int(math.log2(max(wanted, 8))), 4096, int(allowed)))


def _bytes_per_sample(problem: Problem, structure: Structure, outputs: Tensor) -> tuple[int, int]:
    """Bytes of the activations, and of the loss's factors, which take a few float64 numbers per class."""
    item = problem.params[next(iter(problem.params))].element_size()
    return item * (structure.floats_per_sample or 2**18), 64 * outputs[0].numel()
