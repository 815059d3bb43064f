"""Make docs/pictures/overview.svg and .png from the network that `spiritlevel demo` trains, and pictures of its run.

Usage: python tools/make_pictures.py [FOLDER [RUN]]   (offline, about a minute)

With RUN, a folder that `spiritlevel demo --data fashion-mini --out RUN` wrote, terminal.svg shows what it prints, and
page-light.png, page-dark.png and page-phone.png its page in Chromium.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import altair as alt
import numpy as np
import polars as pl
import torch
from rich.console import Console

import spiritlevel as sl
from spiritlevel.cli.base import ProgressBar
from spiritlevel.cli.demo import demo_network
from spiritlevel.cli.show import show_report

SHOWN = 1400  # points of the scatter plot; more would only make the file larger
COLOURS = {"correct": "#3a6ea5", "misclassified": "#d1603d"}
FONT = "DejaVu Sans, Verdana, sans-serif"


def measure(model: torch.nn.Module, data: Any) -> tuple[pl.DataFrame, dict[str, float]]:
    """One row per sample, and the share of the mean trace that each layer holds."""
    traces = sl.sample_traces(model, data, method="exact", per_layer=True)
    margins = sl.margins(model, data)
    group = ["correct" if correct else "misclassified" for correct in margins.correct.tolist()]
    table = pl.DataFrame({"margin": margins.signed.numpy(), "trace": traces.values.numpy(), "group": group})
    layers: dict[str, float] = {}
    for name, values in traces.layers.items():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = "conv" if isinstance(module, torch.nn.Conv2d) else "dense"
        label = f"{kind} {name.split('.')[0]}"
        layers[label] = layers.get(label, 0.0) + float(values.sum() / traces.values.sum())
    kinds = [label.split()[0] for label in layers]
    names = [f"{kind} {kinds[: place + 1].count(kind)}" for place, kind in enumerate(kinds)]
    return table, dict(zip(names, layers.values(), strict=True))


def overview(table: pl.DataFrame, shares: dict[str, float]) -> alt.HConcatChart:
    """Curvature against margin, the margins, and where in the network the curvature sits."""
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    legend = alt.Legend(title=None, orient="none", legendX=12, legendY=290, symbolOpacity=1, symbolSize=110)
    rows = table.sample(min(SHOWN, len(table)), seed=0).with_columns(
        pl.col("margin").round(2), pl.col("trace").round_sig_figs(3)
    )
    lowest, highest = np.log10(np.percentile(rows["trace"].to_numpy(), [0, 100]))
    powers = [10.0**power for power in range(math.floor(lowest), math.ceil(highest) + 1)]
    scatter = (
        alt.Chart(rows)
        .mark_circle(size=26, opacity=0.55)
        .encode(
            x=alt.X(
                "margin:Q",
                title="output margin (negative: misclassified)",
                scale=alt.Scale(padding=10, nice=False),
                axis=alt.Axis(tickCount=6),
            ),
            y=alt.Y(
                "trace:Q",
                title="Hessian trace of the image's loss",
                scale=alt.Scale(type="log", domain=[powers[0], powers[-1]]),
                axis=alt.Axis(format="~g", values=powers),
            ),
            color=alt.Color("group:N", scale=scale, legend=legend),
        )
        .properties(width=430, height=360, title=f"Exact curvature at {len(rows):,} training images")
    )
    histogram = (
        alt.Chart(pl.DataFrame(_bins(table)))
        .mark_bar(binSpacing=0)
        .encode(
            x=alt.X("low:Q", bin="binned", title="output margin"),
            x2="high:Q",
            y=alt.Y("count:Q", title="images", stack=True),
            color=alt.Color("group:N", scale=scale, legend=None),
        )
        .properties(width=300, height=140, title=f"All {len(table):,} margins: skewness {_skewness(table):.2f}")
    )
    base = alt.Chart(pl.DataFrame({"layer": list(shares), "share": list(shares.values())})).encode(
        y=alt.Y("layer:N", sort=list(shares), title=None),
        x=alt.X("share:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1.15 * max(shares.values())])),
    )
    bars = base.mark_bar(color="#7a8b99", size=16)
    labels = base.mark_text(align="left", dx=5, fontSize=13).encode(text=alt.Text("share:Q", format=".0%"))
    where = (bars + labels).properties(width=300, height=140, title="The mean trace, layer by layer")
    return (
        alt.hconcat(scatter, alt.vconcat(histogram, where, spacing=22), spacing=34)
        .resolve_scale(color="independent")
        .configure(background="white", font=FONT, padding=14, aria=False)
        .configure_axis(labelFontSize=13, titleFontSize=13, titleFontWeight="normal", gridColor="#e6e6e6")
        .configure_legend(labelFontSize=14, fillColor="white", padding=4)
        .configure_title(fontSize=15, anchor="start", frame="group", fontWeight="bold", offset=8)
        .configure_view(stroke="#cccccc")
    )


def _bins(table: pl.DataFrame, width: float = 1.0) -> list[dict[str, Any]]:
    counts = table.group_by((pl.col("margin") / width).floor().alias("bin"), "group").len().sort("bin", "group")
    return [
        {"low": width * row["bin"], "high": width * (row["bin"] + 1), "group": row["group"], "count": row["len"]}
        for row in counts.to_dicts()
    ]


def _skewness(table: pl.DataFrame) -> float:
    return sl.skewness(table["margin"].to_numpy())


def terminal(run: str, target: Path) -> None:
    """What the command prints about a run, as it looks on a terminal of 80 columns."""
    report = sl.Report.from_json(Path(run) / "report.json")
    console = Console(record=True, width=80, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print("$ spiritlevel demo")
    show_report(report, console)
    drawing = console.export_svg(title="spiritlevel demo")
    local = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)  # these would be fetched from the network
    (target / "terminal.svg").write_text(local, encoding="utf-8")


def pages(run: str, target: Path) -> None:
    """The top of a run's page as a browser shows it, light, dark and on a phone."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from browser import chromium

    views: dict[str, dict[str, Any]] = {
        "light": {"width": 1200, "height": 1560},
        "dark": {"width": 1200, "height": 1560, "dark": True},
        "phone": {"width": 390, "height": 1700, "phone": True},
    }
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        for name, view in views.items():
            browser.show(Path(run) / "report.html", **view)
            browser.picture(target / f"page-{name}.png", whole=False)


def main(folder: str = "docs/pictures", run: str | None = None) -> None:
    """Train, measure, draw."""
    if run is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        terminal(run, Path(folder))
        pages(run, Path(folder))
    with ProgressBar() as progress:
        model, images = demo_network(progress=progress)
    chart = overview(*measure(model, images.train))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    chart.save(target / "overview.svg")
    drawing = (target / "overview.svg").read_text(encoding="utf-8")
    # a hundredth of a pixel is enough, and half the size; the labels of the axes stay as they are
    short = re.sub(r"(\d\.\d\d)\d+(?![^<>]*</text>)", r"\1", drawing)
    (target / "overview.svg").write_text(short + "\n", encoding="utf-8")
    chart.save(target / "overview.png", scale_factor=1.4)


if __name__ == "__main__":
    main(*sys.argv[1:])
