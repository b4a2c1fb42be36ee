"""The figure of `load`: goodput and latencies against the offered load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_COLOURS = {"poisson": "#0072b2", "trace": "#d55e00"}
_LINES = {"p50_ms": (":", "p50"), "p90_ms": ("--", "p90"), "p99_ms": ("-", "p99")}


def draw_load(path: Path, found: Mapping[str, Any]) -> None:
    """Goodput on the left, percentiles on the right, one colour for each kind of arrivals.

    Args:
        path: where to write.
        found: what `load.measure` gives.
    """
    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    most = max(row["offered_rps"] for row in found["rows"])
    left.plot([0, most], [0, most], color="#bbbbbb", linewidth=1, label="all in time")
    left.axhline(found["capacity_rps"], color="#bbbbbb", linewidth=1, linestyle=":", label="saturated")
    for kind in dict.fromkeys(row["arrivals"] for row in found["rows"]):
        rows = sorted((r for r in found["rows"] if r["arrivals"] == kind), key=lambda r: r["offered_rps"])
        offered = [row["offered_rps"] for row in rows]
        colour = _COLOURS.get(kind, "#009e73")
        left.plot(offered, [row["goodput_rps"] for row in rows], "o-", color=colour, label=kind)
        for key, (line, name) in _LINES.items():
            seen = [(x, row[key]) for x, row in zip(offered, rows, strict=True) if row[key] is not None]
            right.plot(
                *zip(*seen, strict=True), line, color=colour, label=f"{kind}, {name}"
            ) if seen else None
    left.set_ylabel(f"answers a second within {found['slo_ms']:g} ms")
    right.axhline(found["slo_ms"], color="#bbbbbb", linewidth=1)
    right.set_yscale("log")
    right.set_ylabel("latency from when it was due, ms")
    for axes in (left, right):
        axes.set_xlabel("requests a second")
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
