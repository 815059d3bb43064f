"""Draw how every measure behaves: while a small network learns, and when its layers are rescaled; run by `make docs`.

One network, 64-24-10 with ReLU on the built-in digits, seed 0. Left: the measure at some steps of training by SGD.
Right: the same after rescaling, the first layer by α and the second by 1/α, which changes no output.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import spiritlevel as sl
from spiritlevel.charts import lines, panels, svg_file
from spiritlevel.results import write_atomically

STEPS = (0, 10, 30, 100, 300, 1000)
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
SAMPLES = 200


def measured(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    report = sl.measure(model, data, measures="all", parts=[])
    found = {row.name: row.value.value for row in report.rows}
    return {name: found.get(name, math.nan) for name in sl.measures.MEASURES}


def training() -> tuple[dict[int, dict[str, float]], dict[float, dict[str, float]]]:
    digits = sl.data.load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = digits.train[0][:SAMPLES], digits.train[1][:SAMPLES]
    over_time = {}
    for step in range(max(STEPS) + 1):
        if step in STEPS:
            over_time[step] = measured(model, data)
        batch = torch.randint(len(digits.train[1]), (64,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(digits.train[0][batch]), digits.train[1][batch]).backward()
        optimiser.step()
    rescaled = {}
    for factor in FACTORS:
        moved = sl.transforms.rescale_layers(model, {"1": factor, "3": 1 / factor}, data=data).model
        rescaled[factor] = measured(moved, data)
    return over_time, rescaled


def draw(name: str, over_time: dict[int, dict[str, float]], rescaled: dict[float, dict[str, float]]) -> str:
    left = {"step + 1": [step + 1 for step in over_time], name: [found[name] for found in over_time.values()]}
    right = {"factor α of layer 1": list(rescaled), name: [found[name] for found in rescaled.values()]}
    charts = []
    for whole in (left, right):
        axis = next(iter(whole))
        known = [k for k, value in enumerate(whole[name]) if math.isfinite(value)]
        columns = {key: [values[k] for k in known] for key, values in whole.items()}
        positive = all(value > 0 for value in columns[name])
        spread = positive and max(columns[name]) > 3 * min(columns[name])
        charts.append(lines(columns, axis, name, log_x=True, log_y=spread, points=True))
        if not spread:  # so that equal values are a flat line, not magnified rounding
            low, high = min(columns[name]), max(columns[name])
            room = max(high - low, 0.1 * max(abs(low), abs(high)), 1e-12)
            for layer in charts[-1].layer:
                layer.encoding.y.scale.domain = [low - 0.5 * room, high + 0.5 * room]
    return svg_file(panels([charts], width=230, height=140))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        over_time, rescaled = training()
    for name in sl.measures.MEASURES:
        file = folder / f"{name}.svg"
        known = [sum(math.isfinite(each[name]) for each in found.values()) for found in (over_time, rescaled)]
        if min(known) < 3:
            file.unlink(missing_ok=True)
            print(f"{name} is not defined for this network, so it has no picture")
            continue
        write_atomically(file, draw(name, over_time, rescaled))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures/measures"))
