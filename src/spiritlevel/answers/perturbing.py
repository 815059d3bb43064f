"""`perturb`: what a change of the weights will do to the loss and to every prediction, and what it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from spiritlevel import __version__
from spiritlevel.answers.changes import Change, Moved, as_change, merged
from spiritlevel.answers.directions import difference
from spiritlevel.answers.expanding import (
    HALF,
    PARTS,
    Spread,
    Way,
    by_layer,
    exact_means,
    expanded,
    flips_of_one_draw,
    outcome,
    reach,
    spread,
)
from spiritlevel.answers.measuring import Progress, kind_of, silent
from spiritlevel.answers.outcomes import thumbnails
from spiritlevel.arguments import checked
from spiritlevel.binding.batches import picked
from spiritlevel.binding.parameters import Params, select_parameters
from spiritlevel.binding.reading import Reading
from spiritlevel.errors import InputError
from spiritlevel.measures import Setting
from spiritlevel.results import Estimate, Pictures, SampleTraces, figure
from spiritlevel.results.intervals import FEWEST, share_limits, subset_mean
from spiritlevel.results.perturbations import HIGHER, RANDOM, SUBSET, LayerChange, Perturbation, Prediction
from spiritlevel.samples.probing import generator_of
from spiritlevel.samples.traces import traces_in
from spiritlevel.statistics.ranking import auroc

__all__ = ["perturb"]

_DRAWS = 8  # of a random change
_PROBES = 16  # of the traces of layers that have no exact form
_ENOUGH = 0.2  # of the largest term: what slope and curvature may leave out
_SHOWN = 24  # pictures of each group, at most


@torch.inference_mode(False)
@checked
def perturb(
    model: nn.Module,
    data: Any,
    change: Any,
    *,
    loss: Any = "cross_entropy",
    samples: int | None = None,
    apply: bool = True,
    layers: bool = True,
    params: Any = None,
    batch_norm: str = "eval",
    batch_size: int | None = None,
    memory: int | str | None = None,
    classes: tuple[str, ...] = (),
    name: str = "",
    progress: Progress | None = None,
    seed: int = 0,
    **reading: Unpack[Reading],
) -> Perturbation:
    """What a change δ of the weights will do to the loss and to every prediction; then what it does, to a copy.

    Predicted, before anything is changed: the change of the mean loss, g·δ + ½ δᵀHδ for the δ that will be applied,
    and the predictions that flip, those whose largest output is another in the linearised outputs φ + Jδ. Both
    have an interval for what will be measured, and `Prediction.sources` says where it comes from: from measuring a
    subset (`samples=`); from chance, if the change is random (the prediction is then the mean over draws, ½ Σ h_ii σ_i²
    for the loss, and the interval that of one draw); from higher orders, as evaluating half of the change shows them.
    Then the change is made, and the prediction compared with the truth. `suffices` is False where the two terms miss it
    by more than a fifth of the largest of them, and of the standard deviation over draws; `losses` has the loss along
    the way.

    Args:
        model: any module; it is left as it was.
        data: a pair of tensors, a data set, a loader or batches.
        change: a string: "int8", "int4", "int4:channel:asymmetric" (2 to 16 bits; one scale for each tensor, or for
            each output channel; round to nearest, or at random with `:random`); "prune:0.5" (the smallest half of all
            weights set to 0, or of each layer with `:layer`); "noise:0.01" (normal, of standard deviation 0.01 times
            the root mean square of each tensor, or 0.01 itself with `:absolute`); "bfloat16", "float16"; "lora" (the
            adapters of a peft model merged, seen from the model without them). Rounding and pruning are for matrices
            and kernels and leave biases, gains and other vectors as they are, unless `params` names them. Or another
            model of the same architecture, or a dict of tensors: the way there, running statistics included. Or a
            function from tensor to tensor, for every parameter. Activations are never rounded.
        loss: a name, a `torch.nn` loss or a callable.
        samples: predict from a random subset of this many; what happens is still measured on all.
        apply: whether to make the change as well.
        layers: whether to look at each tensor that moves by itself: one product with H, one forward pass, its trace.
        params: names, prefixes or globs of the parameters to change; by default all, frozen ones included.
        batch_norm: "eval" or "batch".
        batch_size: samples to take at once; chosen automatically unless given.
        memory: bytes, or a string such as "2GB"; by default half of what is available.
        classes: their names, for the page.
        name: of the model, for the page.
        progress: called with (what, done, total) before every step.
        seed: of a random change, of a subset and of probes.
        reading: `target=`, `batch=`, `output=`, `unit=`, `batches=`: how batches and outputs are read, and what a
            sample is; see `Reading`.

    Cost: about 14 forward passes; with `layers` three gradients and a forward pass for each tensor; for a random change
    64 forward passes and 17 products with H. The terms are exact derivatives, checked against differences; the
    interval of a random change covers its outcome as often as it says where the second order suffices (mathematics
    12.2; docs/perturb.md has the counts). Reference for layers: Dong et al. 2019, arXiv:1905.03696.

    >>> torch.manual_seed(0), (x := torch.randn(60, 4)), (y := (x[:, 0] > 0).long())
    (...)
    >>> found = perturb(nn.Linear(4, 2), (x, y), "int8")
    >>> found.suffices, abs(found.predicted.value - found.measured.value) < 1e-5, len(found.layers)
    (True, True, 1)
    """
    wanted = as_change(change)
    if wanted.name == "lora" and wanted.other is None:
        model, wanted = merged(model)
    named = params is not None
    if wanted.other is not None and named:
        raise InputError("params= does not go with a change to other weights, which moves all of them; leave it out.")
    everything = Setting(
        model,
        data,
        loss=loss,
        params=select_parameters(model, params) if named else floating_names(model),
        batch_norm=batch_norm,
        batch_size=batch_size,
        memory=memory,
        seed=seed,
        **reading,
    )
    return perturb_in(
        everything,
        wanted,
        named=named,
        samples=samples,
        apply=apply,
        layers=layers,
        classes=classes,
        name=name,
        progress=progress,
    )


def floating_names(model: nn.Module) -> list[str]:
    """The parameters that a change may move."""
    found = [name for name, tensor in model.named_parameters() if tensor.is_floating_point()]
    if not found:
        raise InputError(f"the model {type(model).__name__} has no floating-point parameters to change.")
    return found


def perturb_in(
    everything: Setting,
    change: Change,
    *,
    named: bool = False,
    samples: int | None = None,
    apply: bool = True,
    layers: bool = True,
    traces: bool = True,
    classes: tuple[str, ...] = (),
    name: str = "",
    progress: Progress | None = None,
) -> Perturbation:
    """The same in a setting that is already bound; see `perturb`. `traces=False` leaves out those of the layers."""
    if everything.coupling == "loss":
        raise InputError(
            f"perturb needs a loss for every sample, but {everything.why_coupled}; use one that takes them one by one."
        )
    here, indices = everything.drawn(samples)
    here.check()
    made = _Perturbed(everything, here, indices, change, named, apply, layers, traces, progress or silent)
    return made.result(name, classes)


def moved(change: Change, setting: Setting, named: bool, index: int = 0) -> Moved:
    """Where a change puts the parameters of a model; `index` numbers the draws of a random one."""
    problem = setting.problem
    if change.move is not None:
        return change.move(change.chosen(problem.params, named), generator_of(setting.seed, 9_000 + index))
    assert change.other is not None
    here, twice = {**problem.params, **problem.constants}, set(problem.model.state_dict())
    there = {name: tensor for name, tensor in change.other.items() if name in here or name not in twice}
    deltas = difference(problem, {**here, **there} if isinstance(change.other, Mapping) else there)
    goals = {name: tensor for name, tensor in there.items() if name in deltas}
    return Moved({name: torch.where(deltas[name] == 0, here[name], goals[name].to(here[name])) for name in goals})


def floating(setting: Setting) -> Setting:
    """The same model and data, with all floating-point parameters as those that a change may move."""
    names = floating_names(setting.model)
    return setting if names == list(setting.problem.params) else setting.moved(setting.model, params=names)


def changed(setting: Setting, change: Change) -> dict[str, Tensor]:
    """Columns of all samples before and after a change of all weights: losses, whether right, flips."""
    whole = floating(setting)
    return outcome(Way(whole, moved(change, whole, False).after), whole)


class _Perturbed:
    """One change of one model on one data set; `here` are the samples that the prediction is made from."""

    def __init__(
        self,
        everything: Setting,
        here: Setting,
        indices: Tensor | None,
        change: Change,
        named: bool,
        apply: bool,
        layers: bool,
        traces: bool,
        progress: Progress,
    ) -> None:
        self.everything, self.here, self.indices, self.change, self.named = everything, here, indices, change, named
        self.apply, self.layers, self.progress = apply, layers, progress
        self.traces = layers and traces
        self.count, self.population = here.count, everything.count
        self.notes: list[str] = list(here.notes)
        self.total = 4 + layers

    def result(self, name: str, classes: tuple[str, ...]) -> Perturbation:
        self.progress("the change", 0, self.total)
        moves = moved(self.change, self.here, self.named)
        self.way = Way(self.here, moves.after)
        self.progress("slope and curvature of every sample", 1, self.total)
        parts = PARTS if self.apply else HALF
        self.steps = torch.arange(parts + 1, dtype=torch.float64) / PARTS
        self.columns = expanded(self.way, self.steps.tolist())
        self.slope, self.curvature = (float(self.columns[key].mean()) for key in ("slope", "curvature"))
        traces = self._traces()
        self.chance: Spread | None = None
        if moves.spread is not None:
            self.progress("the effect of chance", 2, self.total)
            self.chance = self._spread(moves.spread, traces)
        predicted, flips = self._predicted(), self._flips()
        rows = self._rows(traces)
        self.progress("the truth", self.total - 1, self.total)
        truth = self._truth()
        table = self._table(traces)
        agreement = _agreement(table)
        best = max(agreement, key=lambda key: (agreement[key], key == "linearised gap")) if agreement else ""
        return Perturbation(
            change=self.change.name,
            meaning=self.change.meaning,
            predicted=predicted,
            flips_predicted=flips,
            slope=self.slope,
            curvature=self.curvature,
            suffices=self._suffices(),
            steps=self.steps,
            losses=self.columns["losses"].mean(0),
            samples=table,
            layers=rows,
            agreement=agreement,
            best=best,
            population=self.population,
            classes=classes,
            pictures=self._pictures(table, best),
            settings=self._settings(),
            notes=tuple(self.notes),
            name=name or type(self.here.model).__name__,
            **truth,
        )

    # ------------------------------------------------------------ predictions

    def _left_out(self) -> Tensor:
        """What slope and curvature leave out of the change of the mean loss, at each point of the way."""
        losses = self.columns["losses"]
        came = (losses - losses[:, :1]).mean(0)
        return came - self.steps * self.slope - self.steps.square() * self.curvature

    def _reach(self) -> tuple[float, float]:
        """How far from slope and curvature the end may lie, from the first half of the way."""
        half = slice(1, HALF + 1)
        return reach(self.steps[half].tolist(), self._left_out()[half].tolist())

    def _predicted(self) -> Prediction:
        if self.chance is None:
            values, sources = self.columns["slope"] + self.columns["curvature"], {}
            rest = self._reach()
            stderr = 0.0
        else:
            values, rest, stderr = self.chance.means, self.chance.rest, self.chance.stderr
            sources = {RANDOM: (self.chance.below, self.chance.above)}
        value = float(values.mean())
        error, limits = subset_mean(values, self.population, differences=True)
        if limits is not None:
            sources[SUBSET] = value - limits[0], limits[1] - value
        sources[HIGHER] = rest
        return Prediction(
            value,
            stderr=stderr,
            tolerance=max(rest),
            seed=self.here.seed,
            data_stderr=error,
            data_limits=limits,
            status="estimated",
            sources=sources,
        )

    def _flips(self) -> Prediction:
        if "flips_predicted" not in self.columns:
            return Prediction(math.nan, reason="the outputs are not classes")
        one, sure, possible = (self.columns[f"flips_{key}"] for key in ("predicted", "sure", "possible"))
        sources = {}
        counts, share = one, self.population / self.count
        if self.chance is not None and self.chance.flips is not None:
            counts = self.chance.flips.mean(0)
            sources[RANDOM] = tuple(share * width for width in flips_of_one_draw(self.chance.flips.sum(1)))
        value = float(counts.sum()) * share
        sources[HIGHER] = share * float((one - sure).sum()), share * float((possible - one).sum())
        error, limits = subset_mean(counts, self.population)
        if limits is not None and error is not None:
            if bool((self.columns["decisions"] == 1).all()) and self.count >= FEWEST:
                limits = share_limits(float(counts.mean()), self.count, self.population)
            low, high = (limit * self.population for limit in limits)
            sources[SUBSET] = value - low, high - value
            error, limits = error * self.population, (low, high)
        return Prediction(
            value,
            seed=self.here.seed,
            data_stderr=error,
            data_limits=limits,
            status="estimated",
            sources={name: (below, above) for name, (below, above) in sources.items()},
        )

    def _spread(self, deviation: Params, traces: SampleTraces | None) -> Spread:
        deltas = []
        for index in range(1, _DRAWS + 1):
            after = moved(self.change, self.here, self.named, index).after
            deltas.append(self.way.between({**self.way.problem.params, **after}))
        deviation = {name: deviation[name] for name in self.way.problem.params}
        return spread(self.way, deviation, deltas, exact_means(deviation, traces))

    def _suffices(self) -> bool:
        """Whether slope and curvature explain what happens, to a fifth of the largest term or to rounding.

        The terms of one draw of a random change may be small by chance, and then what they leave out is no sign that
        the second order fails: its standard deviation over draws counts as a term.
        """
        losses = self.columns["losses"]
        if self.apply:
            came, missed = float((losses[:, -1] - losses[:, 0]).mean()), abs(float(self._left_out()[-1]))
        else:
            came, missed = 0.0, max(self._reach()) / 1.5
        rounding = 2 * torch.finfo(self.here.problem.dtype).eps * float(self.columns["size"].mean().sqrt())
        usual = (self.chance.below + self.chance.above) / 4 if self.chance is not None else 0.0
        return missed <= _ENOUGH * max(abs(came), abs(self.slope), abs(self.curvature), usual) + rounding

    # ------------------------------------------------------------ layers

    def _traces(self) -> SampleTraces | None:
        """The traces of every sample and layer, where they have an exact form and somebody needs them."""
        if not (self.traces or self.change.random) or self.here.coupling or not self.here.by_norms:
            return None
        found = traces_in(self.here, per_layer=True)
        return found if found.exact else None

    def _rows(self, traces: SampleTraces | None) -> tuple[LayerChange, ...]:
        if not self.layers:
            return ()
        self.progress("layer by layer", 3, self.total)
        found = by_layer(self.way, self.apply, lambda *_: None)
        of_layers = self._layer_traces(traces) if self.traces else {}
        rows = []
        for i, name in enumerate(found.names):
            rows.append(
                LayerChange(
                    name=name,
                    size=self.way.delta[name].numel(),
                    square=float(self.way.delta[name].double().square().sum()),
                    slope=float(found.slopes[i]),
                    curvature=0.5 * float(found.products[i, i]),
                    with_others=0.5 * float(found.products[i].sum()),
                    trace=of_layers.get(name, math.nan),
                    measured=float(found.measured[i]) if self.apply else math.nan,
                )
            )
        return tuple(rows)

    def _layer_traces(self, traces: SampleTraces | None) -> dict[str, float]:
        """The trace of every layer's block of H: exact, or from random signs with a product each."""
        if traces is not None:
            return {name: float(values.mean()) for name, values in traces.layers.items()}
        setting, totals = self.here, dict.fromkeys(self.here.problem.params, 0.0)
        for index in range(_PROBES):
            generator = generator_of(setting.seed, 7_000 + index)
            signs = torch.randint(0, 2, setting.theta.shape, generator=generator).to(setting.theta) * 2 - 1
            for name, part in setting.split(signs * (setting.hessian @ signs)).items():
                totals[name] += float(part.double().sum()) / _PROBES
        self.notes.append(f"the traces of layers are estimated from {_PROBES} products with random signs")
        return totals

    # ------------------------------------------------------------ the truth

    def _truth(self) -> dict[str, Any]:
        """Loss and accuracy before and after, and the flips, on all of the data."""
        undone = Estimate(math.nan, reason="the change was not made")
        columns = self.columns
        whole = self.count == self.population
        if self.apply and not whole:
            columns = outcome(self.way, self.everything)
        else:
            columns = {**columns, "before": columns["losses"][:, 0], "after": columns["losses"][:, -1]}
        none = Estimate(math.nan, reason="the outputs are not classes")
        classified = "right" in columns
        accuracy = Estimate(float(columns["right"].mean())) if classified else none
        after = none if not classified else undone
        if classified and self.apply:
            after = Estimate(float(columns["right_after"].mean()))
        return {
            "loss": Estimate(float(columns["before"].mean())),
            "measured": _rise(columns) if self.apply else undone,
            "flips_measured": (Estimate(float(columns["flips_measured"].sum())) if self.apply else undone)
            if classified
            else none,
            "accuracy": (accuracy, after),
            "decisions": round(float(columns["decisions"].sum()) * (1 if self.apply or whole else self.scale))
            if classified
            else 0,
        }

    @property
    def scale(self) -> float:
        """How many samples each of those looked at stands for."""
        return self.population / self.count

    # ------------------------------------------------------------ samples

    def _table(self, traces: SampleTraces | None) -> dict[str, Tensor]:
        """What is shown of every sample that was looked at."""
        columns, losses = self.columns, self.columns["losses"]
        table = {"index": torch.arange(self.count) if self.indices is None else self.indices}
        names = ("label", "before", "linearised", "after", "gap", "linearised_gap", "flips_predicted", "flips_measured")
        table |= {name: columns[name] for name in names if name in columns}
        if self.chance is not None and self.chance.flips is not None:
            table["chance"] = self.chance.flips.mean(0)
        table |= {"loss": losses[:, 0], "predicted": columns["slope"] + columns["curvature"]}
        if self.apply:
            table["measured"] = losses[:, -1] - losses[:, 0]
        if traces is not None:
            table["trace"] = traces.values
        return table

    def _pictures(self, table: dict[str, Tensor], best: str) -> Pictures | None:
        """The samples predicted to flip, those that flipped unpredicted, and the next in line, if they are images."""
        if "gap" not in table:
            return None
        order = scores(table)[best or "linearised gap"].argsort(descending=True, stable=True).tolist()
        told, came = table["flips_predicted"] > 0, table.get("flips_measured", table["flips_predicted"]) > 0
        groups = {
            "predicted to flip": [k for k in order if told[k]][:_SHOWN],
            "flipped, not predicted": [k for k in order if came[k] and not told[k]][:_SHOWN],
            "least left, not flipped": [k for k in order if not came[k] and not told[k]][:_SHOWN],
        }
        wanted = sorted({place for group in groups.values() for place in group})
        try:
            images = thumbnails(picked(self.here.batches, torch.tensor(wanted)))
        except InputError:
            return None
        place = {index: position for position, index in enumerate(wanted)}
        return Pictures(
            torch.tensor(wanted), images, {name: tuple(place[k] for k in group) for name, group in groups.items()}
        )

    def _settings(self) -> dict[str, str]:
        size = math.sqrt(sum(float(delta.double().square().sum()) for delta in self.way.delta.values()))
        some = "" if self.count == self.population else f", the prediction from {self.count:,} drawn at random"
        return {
            "spiritlevel": __version__,
            "torch": torch.__version__,
            "seed": str(self.here.seed),
            "change": f"{self.change.name}: {self.change.meaning}",
            "tensors that move": f"{len(self.way.delta):,}, together ‖δ‖ = {figure(size, 4)}",
            "relative change": f"‖δ‖/‖θ‖ = {figure(size / (_norm(self.way.problem.params) or 1.0), 4)}",
            "loss": self.here.problem.loss.name,
            "batch norm": self.here.batch_norm,
            "dtype": kind_of(self.here.problem.dtype, self.here.model),
            "samples": f"{self.population:,}{some}",
        }


def _rise(columns: dict[str, Tensor]) -> Estimate:
    """How much the mean loss has changed."""
    rise = float((columns["after"] - columns["before"]).mean())
    return Estimate(rise, reason="the loss is NaN after the change" if math.isnan(rise) else "")


def _norm(params: Params) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in params.values()))


def scores(table: dict[str, Tensor]) -> dict[str, Tensor]:
    """What may tell which samples flip, larger for those that should."""
    found = {}
    if "gap" in table:
        found = {"gap": -table["gap"], "linearised gap": -table["linearised_gap"]}
        if "trace" in table:
            found["trace"] = table["trace"]
    return found


def _agreement(table: dict[str, Tensor]) -> dict[str, float]:
    """For each score the chance that a sample that flipped has more of it than one that did not."""
    if "flips_measured" not in table:
        return {}
    flipped = table["flips_measured"] > 0
    if bool(flipped.all()) or not bool(flipped.any()):
        return {}
    return {name: auroc(score, flipped) for name, score in scores(table).items()}
