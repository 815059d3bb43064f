"""Numbers → charts: results, Polars frames and plain columns drawn by Altair, in one theme. Computes nothing.

Columns are named as their axis should read. A chart has no colours of its own: `theme` gives them, for a light or dark
background, when the chart is saved or put on a page, so one specification serves both.

>>> curve = lines({"step": [1, 10, 100], "loss": [2.0, 0.5, 0.1]}, "step", "loss", log_x=True)
>>> svg(curve)[:4]
'<svg'
"""

from __future__ import annotations

from spiritlevel.errors import needs

with needs("a chart"):
    from spiritlevel.charts.columns import bars, distribution, intervals, lines, scatter, stems
    from spiritlevel.charts.drawing import save, specification, svg, svg_file, theme
    from spiritlevel.charts.measured import audit_map, density, landscape_contours, landscape_line, ritz_values
    from spiritlevel.charts.surfaces import contours, grid, panels, triangle

__all__ = [
    "audit_map",
    "bars",
    "contours",
    "density",
    "distribution",
    "grid",
    "intervals",
    "landscape_contours",
    "landscape_line",
    "lines",
    "panels",
    "ritz_values",
    "save",
    "scatter",
    "specification",
    "stems",
    "svg",
    "svg_file",
    "theme",
    "triangle",
]
