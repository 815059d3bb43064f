"""Count how often 95% intervals hold the truth in simulated cases, and write docs/coverage.md: `make coverage-doc`.

A *setting* draws a case by its number (a subset of the data, or probes) and says of each interval in it whether the
truth, which is known, lies inside; None where the library says *unknown*. Takes about ten minutes, and resumes if
it was stopped.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from fitted import fitted
from torch import Tensor, nn
from torch.func import functional_call, vmap

import spiritlevel as sl
from spiritlevel.answers.changes import as_change
from spiritlevel.answers.measuring import Fit
from spiritlevel.answers.perturbing import perturb_in
from spiritlevel.measures import MEASURES, Setting
from spiritlevel.results import Estimate, subset_mean, write_atomically
from spiritlevel.statistics.subsets import SubsetError, by_order

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
LOW, HIGH = 0.92, 0.98  # what a 95% interval may cover in 1,000 cases; above that it is called conservative

KINDS = ("holds", "conservative", "unknown", "undecided", "misses")
KEPT: Path | None = None  # the folder of what is finished, set by `main`

Found = dict[str, bool | None]


class Simulation(NamedTuple):
    name: str
    part: str
    case: Callable[[int], Found]
    share: float = 1.0  # of the cases that are run: expensive ones get fewer


SIMULATIONS: dict[str, Simulation] = {}


def simulation(
    part: str, *options: object, share: float = 1.0
) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """Register a function of the number of a case, once for each of the options, which come before that number."""

    def add(function: Callable[..., Found]) -> Callable[..., Found]:
        for option in options or (None,):
            parts = option if isinstance(option, tuple) else (option,)
            name = " ".join([function.__name__, *(str(part) for part in parts if part is not None)]).replace("_", " ")
            case = function if option is None else functools.partial(function, option)
            SIMULATIONS[name] = Simulation(name, part, case, share)
        return function

    return add


def inside(limits: tuple[float, float] | SubsetError, truth: float) -> bool | None:
    low, high = (limits.low, limits.high) if isinstance(limits, SubsetError) else limits
    return None if math.isnan(low) or math.isnan(high) else bool(low <= truth <= high)


# ---------------------------------------------------------------- networks and data


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = sl.data.load("digits").train
    return images.reshape(len(images), -1).float(), labels


@functools.cache
def coarse() -> tuple[Tensor, Tensor]:
    """The digits in 4×4 pixels."""
    images, labels = digits()
    return nn.functional.avg_pool2d(images.reshape(-1, 1, 8, 8), 2).flatten(1), labels


@functools.cache
def network(name: str) -> nn.Module:
    """Trained for more or fewer steps: the more, the more skewed are losses and traces."""
    steps = {"early": 60, "half-way": 300, "fitted": 1500, "small": 600, "tanh": 400}[name]
    inputs, labels = coarse() if name in ("small", "tanh") else digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = 4 if name in ("small", "tanh") else 16
        act = nn.Tanh() if name == "tanh" else nn.ReLU()
        net = nn.Sequential(nn.Linear(inputs.shape[1], hidden), act, nn.Linear(hidden, 10))
        optimiser = torch.optim.Adam(net.parameters(), 3e-3 if hidden == 16 else 1e-2)
        for _ in range(steps):
            chosen = torch.randint(0, len(inputs), (64,))
            loss = nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net


@functools.cache
def whole(name: str) -> Setting:
    return Setting(network(name), coarse() if name in ("small", "tanh") else digits())


@functools.cache
def truth(name: str, measure: str) -> float:
    return MEASURES[measure].attempt(whole(name)).value


def drawn(case: int, count: int, population: int) -> Tensor:
    """A random subset; the same for the same case."""
    return torch.from_numpy(np.sort(np.random.default_rng((case, count)).choice(population, count, replace=False)))


# ---------------------------------------------------------------- subsets


@functools.cache
def of_samples(name: str, measure: str) -> Tensor:
    """What every sample of the population adds to a measure."""
    truth(name, measure)
    values = MEASURES[measure].sampling.values
    assert values is not None
    return values(whole(name)).double()


SUBSETS = [(net, count) for net in ("early", "half-way", "fitted") for count in (30, 100, 400)]
MEANS = (
    "trace",
    "empirical_fisher_trace",
    "fisher_rao_norm",
    "layer_scaled_trace",
    "relative_flatness",
    "mean_aceht",
    "margin_mean",
    "adaptive_sharpness_average",
)
QUANTILES = ("margin_q10", "margin_q25", "margin_q50", "margin_q75", "margin_q90", "input_distance")


@simulation("a random subset of the data", *SUBSETS)
def means(option: tuple[str, int], case: int) -> Found:
    net, count = option
    setting = whole(net)
    chosen = drawn(case, count, setting.count)
    losses = setting.losses
    found: Found = {"loss": inside(subset_mean(losses[chosen], setting.count)[1] or (0, 0), float(losses.mean()))}
    for name in MEANS:
        values = of_samples(net, name)
        limits = subset_mean(values[chosen], setting.count)[1] or (0, 0)
        stated = count >= MEASURES[name].sampling.least
        found[name] = inside(limits, float(values.mean())) if stated else None
    right = setting.margins.correct[chosen].double().mean()
    fit = Fit(count, setting.count, Estimate(float(right)), Estimate(0.0))
    found["accuracy"] = inside(fit.accuracy_limits(), float(setting.margins.correct.double().mean()))
    return found


@simulation("a random subset of the data", 20)
def means_of_few(count: int, case: int) -> Found:
    setting = whole("fitted")
    chosen = drawn(case, count, setting.count)
    found: Found = {"loss": inside(subset_mean(setting.losses[chosen], setting.count)[1] or (0, 0), 0.0)}
    found["trace"] = inside(subset_mean(setting.traces.values[chosen], setting.count)[1] or (0, 0), 0.0)
    return found


@simulation("a random subset of the data", *SUBSETS)
def quantiles(option: tuple[str, int], case: int) -> Found:
    net, count = option
    chosen = drawn(case, count, whole(net).count)
    found: Found = {}
    for name in QUANTILES:
        values, share = of_samples(net, name), MEASURES[name].sampling.share
        value = float(np.quantile(values[chosen].numpy(), share))
        found[name] = inside(by_order(value, values[chosen], share, len(values)), truth(net, name))
    return found


WHOLE = (
    "largest_eigenvalue",
    "quotient_norm",
    "box_sharpness_curvature",
    "spectral_margin_mean",
    "margin_min",
    "margin_skewness",
    "smallest_eigenvalue",
    "log_volume",
)
SCRATCH = "a random subset of the data, measured from scratch"
NORMS = ("frobenius_norm", "mean_square_eigenvalue")
MAXIMA = ("ball_sharpness", "adaptive_sharpness_l2", "adaptive_sharpness_linf", "box_sharpness")
NOISE = ("pac_bayes_flatness",)
ANEW = ("normalised_sharpness", "hidden_margin_q1", "hidden_margin_high_fence")


def measured(net: str, names: tuple[str, ...], count: int, case: int) -> Found:
    """The measures of a subset from scratch, as `measure(samples=)` computes them."""
    setting = whole(net)
    chosen = drawn(case, count, setting.count)
    part = setting.part(chosen)
    found: Found = {}
    for name in names:
        if MEASURES[name].sampling.how == "unknown":
            found[name] = None
            continue
        right = truth(net, name)
        if math.isnan(right):
            continue
        value = MEASURES[name].attempt(part)
        error = MEASURES[name].subset_error(part, value.value, setting.count)
        both = Estimate(value.value, value.stderr, value.dof, skew=value.skew, power=value.power)
        both = replace(both, data_limits=(error.low, error.high))
        found[name] = inside(both.interval(data=True), right)
    return found


@simulation(SCRATCH, "small", "tanh", share=0.1)
def spectra_of_100(net: str, case: int) -> Found:
    return measured(net, WHOLE, 100, case)


@simulation(SCRATCH, "small", share=0.1)
def norms_of_100(net: str, case: int) -> Found:
    return measured(net, NORMS, 100, case)


@simulation(SCRATCH, "small", share=0.1)
def maxima_of_100(net: str, case: int) -> Found:
    return measured(net, MAXIMA, 100, case)


@simulation(SCRATCH, "small", share=0.1)
def noise_of_100(net: str, case: int) -> Found:
    return measured(net, NOISE, 100, case)


@simulation(SCRATCH, "small", share=0.1)
def anew_of_100(net: str, case: int) -> Found:
    return measured(net, ANEW, 100, case)


# ---------------------------------------------------------------- probes


@functools.cache
def matrix(kind: str) -> tuple[Tensor, np.ndarray]:
    """A symmetric matrix of size 120 with a known spectrum."""
    size = 120
    values = {
        "one outlier": np.r_[10.0, np.linspace(0, 1, size - 1)],
        "rank one": np.r_[10.0, np.zeros(size - 1)],
        "both signs": np.linspace(-1, 1, size),
    }[kind]
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    return torch.from_numpy(vectors * values @ vectors.T), values


@simulation("random probes of a matrix", "one outlier", "rank one", "both signs")
def probes(kind: str, case: int) -> Found:
    dense, values = matrix(kind)
    norm = math.sqrt(float((values**2).sum()))
    found: Found = {}
    for count in (5, 8, 32):
        found[f"operator_trace, {count} probes"] = inside(
            sl.operator_trace(dense, probes=count, seed=case).interval(), float(values.sum())
        )
        found[f"frobenius_norm, {count} probes"] = inside(
            sl.frobenius_norm(dense, probes=count, seed=case).interval(), norm
        )
    density = sl.spectral_density(dense, probes=8, steps=10, seed=case)
    for order in (1, 2, 3):
        found[f"moment {order} of the density, 8 probes"] = inside(
            density.moment(order).interval(), float((values**order).mean())
        )
    width = 0.5
    for point in (0.5, 10.0):
        right = float(np.exp(-0.5 * ((values - point) / width) ** 2).mean()) / (width * math.sqrt(2 * math.pi))
        low, high = density.density(torch.tensor([point]), width=width).band()
        found[f"density at {point:g}, 8 probes"] = inside((float(low), float(high)), right)
    return found


@simulation("random probes of a network", "average_sharpness", "adaptive_sharpness_average")
def noise(measure: str, case: int) -> Found:
    """The draws of the measure, made once for all cases; as in the measure itself, 16 make an estimate."""
    draws = rises(measure)
    first = 16 * case % (len(draws) - 16)
    found = Estimate.from_draws(draws[first : first + 16])
    return {f"{measure}, 16 draws": inside(found.interval(), float(draws.mean()))}


@functools.cache
def rises(measure: str) -> Tensor:
    """Rises of the loss on 100 samples under the noise of a measure and its mirror image, 40,000 draws."""
    setting = whole("small").part(drawn(0, 100, whole("small").count))
    inputs, labels = setting.data
    spread = 0.05 * setting.theta.abs() if measure.startswith("adaptive") else torch.full_like(setting.theta, 0.01)

    def loss(theta: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(setting.model, setting.split(theta), (inputs,)), labels)

    generator, found = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for _ in range(40):
            delta = spread * torch.randn(1000, len(spread), generator=generator)
            pair = vmap(loss)(setting.theta + delta) + vmap(loss)(setting.theta - delta)
            found.append(pair.double() / 2 - loss(setting.theta).double())
    return torch.cat(found)


@simulation("random probes of a network", "tanh", share=0.1)
def traces(net: str, case: int) -> Found:
    data = _rows(net, 50)
    exact = float(_exact_traces(net).mean())
    found = sl.sample_traces(network(net), data, method="hutchinson", probes=8, seed=case).mean()
    return {"mean trace of 50 samples, 8 probes": inside(found.interval(), exact)}


@functools.cache
def _exact_traces(net: str) -> Tensor:
    return sl.sample_traces(network(net), _rows(net, 50)).values


def _rows(net: str, count: int) -> tuple[Tensor, Tensor]:
    inputs, labels = whole(net).data
    return inputs[:count], labels[:count]


@functools.cache
def bottleneck() -> tuple[nn.Module, Tensor, Tensor]:
    """20 classes behind one unit, which alone is trained: all of a sample's sampled terms are one squared number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 20))
        net[1].requires_grad_(False)
        return net, torch.randn(100, 4), torch.randint(0, 20, (100,))


@functools.cache
def _exact_bottleneck(count: int) -> float:
    net, inputs, labels = bottleneck()
    return float(sl.sample_traces(net, (inputs[:count], labels[:count])).values.mean())


@simulation("random probes of a network", 1, 20, 100)
def passes(count: int, case: int) -> Found:
    net, inputs, labels = bottleneck()
    found = sl.sample_traces(net, (inputs[:count], labels[:count]), passes=1, seed=case).mean()
    name = f"passes=1 behind one unit, {count} sample{'s' * (count > 1)}"
    return {name: inside(found.interval(), _exact_bottleneck(count))}


# ---------------------------------------------------------------- correlations and comparisons


@simulation("correlations", 3, 5, 10, 20, 100)
def correlation(count: int, case: int) -> Found:
    rng = np.random.default_rng((case, count))
    a = rng.normal(size=count)
    found: Found = {}
    for rho in (0.0, 0.6, 0.95):
        b = rho * a + math.sqrt(1 - rho**2) * rng.normal(size=count)
        limits = sl.correlate(a, b, outliers="none", resamples=500, seed=case)
        found[f"r = {rho:g} of {count} normal points"] = inside((limits.low, limits.high), rho)
    return found


@functools.cache
def to_be_changed(kind: str) -> nn.Module:
    """A trained smooth network: in a ReLU network a finite change crosses kinks, which no Hessian sees."""

    def make() -> nn.Module:
        convolution = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)]
        networks = {
            "tanh": lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 10)),
            "convolution": lambda: nn.Sequential(*convolution, nn.Flatten(), nn.Linear(16, 10)),
        }
        return networks[kind]()

    return fitted(make, *coarse(), rate=1e-2)


@functools.cache
def changing(kind: str) -> Setting:
    """80 samples and one of these networks, bound once for all changes."""
    inputs, labels = coarse()
    return Setting(to_be_changed(kind), (inputs[:80], labels[:80]))


@simulation("random changes of the weights", "tanh", "convolution", share=0.334)
def random_change(kind: str, case: int) -> Found:
    """Noise of 1% to 5%, or rounding at random: does the prediction cover what the draw did?"""
    setting = copy.copy(changing(kind))
    setting.seed = case
    made = perturb_in(setting, as_change(("noise:0.01", "noise:0.05", "int6:random")[case % 3]), layers=False)
    if not made.suffices:  # it says so itself
        return {"change of the loss": None, "flips": None}
    return {
        "change of the loss": inside(made.predicted.interval(), made.measured.value),
        "flips": inside(made.flips_predicted.interval(), made.flips_measured.value),
    }


@simulation("two models that are equally good", 100, share=0.3)
def comparison(count: int, case: int) -> Found:
    """Two models that are each other's mirror image, on data that are symmetric: no difference is real."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case)
        inputs = torch.randn(count, 2)
        labels = (inputs.sum(1) + torch.randn(count) > 0).long()
    pair = []
    for weights in ([2.0, 0.5], [0.5, 2.0]):
        net = nn.Sequential(nn.Linear(2, 2))
        with torch.no_grad():
            net[0].weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) * torch.tensor(weights))
            net[0].bias.zero_()
        pair.append(net)
    names = ("trace", "fisher_rao_norm", "margin_mean", "margin_q50", "input_distance", "largest_eigenvalue")
    made = sl.compare(pair[0], pair[1], (inputs, labels), measures=names, audit=False, seed=case)
    found = {f"difference of {row.name}": inside((row.low, row.high), 0.0) for row in made.rows}
    found["no advice"] = not made.advice.startswith("Trust")
    return found


@simulation("two models that are equally good", 100, 400, share=0.5)
def rare_differences(count: int, case: int) -> Found:
    """Two tables of outputs that differ in 2% of their rows, by much, as often in favour of either."""
    draw = torch.Generator().manual_seed(case)
    logits, labels = torch.randn(count, 2, generator=draw), torch.randint(0, 2, (count,), generator=draw)
    logits[torch.arange(count), labels] += 2
    pair = [logits.clone(), logits.clone()]
    for row in (torch.rand(count, generator=draw) < 0.02).nonzero()[:, 0].tolist():
        worse = int(torch.randint(0, 2, (), generator=draw))
        pair[worse][row] = 2 * logits[row].flip(0)
    models = [nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False)) for table in pair]
    made = sl.compare(*models, (torch.arange(count), labels), measures=("margin_mean",), audit=False, seed=case)
    found = {f"difference of {row.name}": inside((row.low, row.high), 0.0) for row in made.rows}
    found["no advice"] = not made.advice.startswith("Trust")
    return found


# ---------------------------------------------------------------- the page


class Row(NamedTuple):
    part: str
    setting: str
    interval: str
    covered: int
    stated: int
    cases: int

    @property
    def verdict(self) -> str:
        if not self.stated:
            return "*unknown*"
        share = self.covered / self.stated
        if share >= LOW:
            return "conservative" if share > HIGH else "holds"
        chance = 2 * math.sqrt(LOW * (1 - LOW) / self.stated)  # with few cases a right interval may miss a few more
        return "undecided" if self.cases < 1000 and share >= LOW - chance else "**misses**"


def run(name: str, first: int, last: int) -> dict[str, tuple[int, int]]:
    """(covered, stated) of each interval of a setting in the cases of this range."""
    torch.set_num_threads(1)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for case in range(first, last):
        for interval, hit in SIMULATIONS[name].case(case).items():
            counts[interval][0] += hit is True
            counts[interval][1] += hit is not None
    return {interval: (hits, stated) for interval, (hits, stated) in counts.items()}


def rows(names: list[str], cases: int, workers: int = 1) -> list[Row]:
    """All intervals of these settings."""
    number = {name: max(1, round(SIMULATIONS[name].share * cases)) for name in names}
    jobs = [(name, number[name]) for name in names]
    if workers == 1:
        results = [finished(*job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers) as pool:
            results = list(pool.map(finished, *zip(*jobs, strict=True)))
    return [
        Row(SIMULATIONS[name].part, name, interval, hits, stated, count)
        for (name, count), result in zip(jobs, results, strict=True)
        for interval, (hits, stated) in result.items()
    ]


@functools.cache
def sources() -> str:
    """A hash of all that determines a result: nothing is reused from another version."""
    paths = [Path(__file__), *sorted(Path(sl.__file__).parent.rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def finished(name: str, cases: int) -> dict[str, tuple[int, int]]:
    """`run` from the first case to the last; kept under build/, so that a stopped run can resume."""
    if KEPT is None:
        return run(name, 0, cases)
    file = KEPT / f"{sources()}-{cases}-{name.replace(' ', '-')}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(run(name, 0, cases)))
    return {interval: (hits, stated) for interval, (hits, stated) in json.loads(file.read_text()).items()}


def page(found: list[Row]) -> str:
    cases = max(row.cases for row in found)
    missed = [row for row in found if "misses" in row.verdict]
    kinds = {word: sum(word in row.verdict for row in found) for word in KINDS}
    text = [
        "# Do the intervals hold?",
        "",
        f"Written by `make coverage-doc`. Every 95% interval that the library states, in {cases:,} simulated cases "
        "(fewer where a case is expensive) of each setting whose truth is known. *holds*: the truth lies inside "
        f"in {LOW:.0%} to {HIGH:.0%} of the cases; *conservative*: in more; *unknown*: the library states no interval "
        "and says why; **misses**: in fewer; *undecided*: in fewer, by no more than chance explains among fewer than "
        "1,000 cases. The share is that of the cases in which an interval was stated; with "
        f"{cases:,} cases its own error is about {100 * math.sqrt(0.05 * 0.95 / cases):.1f} points.",
        "",
        f"{len({row.setting for row in found})} settings, {len(found)} intervals: {kinds['holds']} hold, "
        f"{kinds['conservative']} are conservative, {kinds['unknown']} say unknown, "
        f"{kinds['undecided']} {'is' if kinds['undecided'] == 1 else 'are'} undecided, {kinds['misses']} miss.",
        "",
    ]
    if missed:
        text += ["Missed: " + "; ".join(f"{row.interval} ({row.setting})" for row in missed) + ".", ""]
    for part in dict.fromkeys(row.part for row in found):
        text += [f"## {part[0].upper()}{part[1:]}", ""]
        text += ["| setting | interval | covers | cases | stated | |", "|---|---|---|---|---|---|"]
        for row in found:
            if row.part == part:
                share = f"{row.covered / row.stated:.1%}" if row.stated else ""
                stated = f"{row.stated / row.cases:.0%}"
                cells = (row.setting, row.interval, share, f"{row.cases:,}", stated, row.verdict)
                text.append(f"| {' | '.join(cells)} |")
        text.append("")
    text += [NOTES, ""]
    return "\n".join(text)


NOTES = " ".join(
    """## What is simulated

The networks are small ones trained on scikit-learn's digits: *early*, *half-way* and *fitted* with 16 hidden units,
stopped after 60, 300 and 1,500 steps; *small* and *tanh* with 4 on 4×4 pixels. A subset of N of the 1,437 images is
drawn without replacement, and the truth is the number on all of them. `means` and `quantiles` draw from the values of
all samples; what is *measured from scratch* goes through all that `measure(samples=N)` does. A random change is noise
of 1% or 5%, or rounding at random to 6 bits, of a smooth network on 80 samples, drawn anew in each case; where
`perturb` says that the second order does not suffice, no interval counts as stated. The two models that are
compared are mirror images of each other on symmetric data, or tables of outputs of which 2% differ by much, as many
in favour of either (`rare differences`), so that no difference is real: *no advice* counts the cases in which `compare`
does not say "Trust". The standard errors of single entries (`DiagonalEstimate`) make no
interval, and are not in the table.""".replace("simulated\n\n", "simulated\0").split("\n")
).replace("\0", "\n\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="print only the settings that begin so; leave the page as it is")
    options = parser.parse_args()
    global KEPT  # forked processes inherit it
    KEPT = PAGE.parents[1] / "build" / "coverage"
    begin = time.monotonic()
    names = [name for name in SIMULATIONS if not options.only or name.startswith(tuple(options.only))]
    found = rows(names, options.cases, options.workers)
    text = page(found)
    if options.only:
        print(text)
    else:
        write_atomically(PAGE, text)
    missed = [row for row in found if "misses" in row.verdict]
    print(f"{len(found)} intervals, {len(missed)} miss, {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
