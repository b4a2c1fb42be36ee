"""The figure of `dynamic_vs_sequential`: answers a second by batch size, and percentiles by window."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Row = Mapping[str, Any]
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def draw_dynamic(path: Path, rows: Sequence[Row]) -> None:
    """Throughput first, relative to sequential serving; then one panel of latencies for each device.

    Args:
        path: where to write.
        rows: what `dynamic_vs_sequential.measure` gives.
    """
    devices = list(dict.fromkeys(row["device"] for row in rows))
    lines = (2 + len(devices)) // 2
    figure = Figure(figsize=(10, 3.7 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    first, *panels = figure.subplots(lines, 2, squeeze=False).ravel()
    for unused in panels[len(devices) :]:
        unused.set_visible(False)
    for device, colour, axes in zip(devices, _COLOURS, panels, strict=False):
        own = [row for row in rows if row["device"] == device]
        _throughput(first, device, [row for row in own if row["mode"] == "dynamic"], colour)
        _latencies(axes, device, [row for row in own if row["mode"] == "window"])
    first.set_xscale("log", base=2)
    first.set_yscale("log", base=2)
    first.axhline(1, color="#bbbbbb", linewidth=1, label="sequential")
    for axis in (first.xaxis, first.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    first.set_xlabel("largest batch, rows")
    first.set_ylabel("answers a second ÷ sequential")
    first.set_title("throughput, device always busy", loc="left", fontsize=10)
    first.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _throughput(axes: Axes, device: str, rows: Sequence[Row], colour: str) -> None:
    axes.plot(
        [row["max_batch"] for row in rows], [row["gain"] for row in rows], "o-", color=colour, label=device
    )


def _latencies(axes: Axes, device: str, rows: Sequence[Row]) -> None:
    for rate, colour in zip(dict.fromkeys(row["rate"] for row in rows), _COLOURS, strict=False):
        at = [row for row in rows if row["rate"] == rate]
        for key, line in (("p50_ms", ":"), ("p99_ms", "-")):
            points = [(row["window_ms"], row[key]) for row in at]
            label = f"{key[:3]} at {rate:,.0f}/s"
            axes.plot(*zip(*points, strict=True), f"o{line}", color=colour, markersize=4, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("window (max_wait_ms)")
    axes.set_ylabel("latency, ms")
    axes.set_title(f"{device}, batches of {rows[0]['max_batch']} at most", loc="left", fontsize=10)
    axes.legend(fontsize=7)
