"""The figures of `compare_schemes`: ladders, waste by programs, latencies, use of buckets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullFormatter, NullLocator

from ..bucketing import Ladder
from .simulate import Simulated
from .traces import Trace

Row = Mapping[str, Any]
# Readable in print and by colour-blind people (Okabe and Ito's palette).
COLOURS = {
    "exact": "#000000",
    "single": "#999999",
    "linear": "#e69f00",
    "powers_of_two": "#d55e00",
    "geometric": "#cc79a7",
    "bounded_waste": "#56b4e9",
    "fitted": "#0072b2",
    "packing": "#009e73",
}
LABELS = {
    "powers_of_two": "powers of two",
    "bounded_waste": "bounded waste",
    "packing": "packing, full queue",
}
_PERCENTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def draw_ladders(path: Path, trace: Trace, ladders: Sequence[tuple[str, Ladder, float]]) -> None:
    """Ladders over the histogram of a trace's lengths, one panel a ladder.

    Args:
        path: Where to write.
        trace: The half it was tested on.
        ladders: Name, rungs and waste of each.
    """
    figure, panels = _figure(len(ladders), 1, (9, 2.7 * len(ladders)))
    low = max(1, int(np.percentile(trace.lengths, 0.5)))
    bins = np.unique(np.geomspace(low, trace.limit, 110).astype(int)).tolist()
    for axes, (name, ladder, waste) in zip(panels, ladders, strict=True):
        axes.hist(trace.lengths, bins=bins, color="#b8c9d6", weights=trace.lengths / trace.lengths.sum())
        colour = COLOURS[name.partition(":")[0]]
        for rung in ladder:
            axes.axvline(rung, color=colour, linewidth=1.3)
        axes.set_xscale("log")
        axes.set_xlim(low, trace.limit * 1.06)
        axes.xaxis.set_major_locator(FixedLocator(_doubling(low, trace.limit)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MultipleLocator(0.05))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_ylabel("share of tokens")
        axes.set_title(
            f"{_short(name)}: {len(ladder)} programs, {waste:.1%} padding", loc="left", fontsize=10
        )
    panels[-1].set_xlabel("prompt length, tokens")
    figure.suptitle(f"{trace.name}: sizes that are compiled, over the lengths that come (test half)")
    _save(figure, path)


def draw_waste(path: Path, rows: Sequence[Row]) -> None:
    """Waste out of sample against the number of programs, one panel a trace, both axes logarithmic."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    columns = min(3, len(traces))
    lines = -(-len(traces) // columns)
    figure, panels = _figure(lines, columns, (max(4.1 * columns, 8.0), 3.4 * lines + 1.1))
    for axes, trace in zip(panels, traces, strict=False):
        tested = [row for row in rows if row["trace"] == trace and row["split"] == "test"]
        for scheme, colour in COLOURS.items():
            points = sorted((r["programs"], r["waste"]) for r in tested if r["scheme"] == scheme)
            points = [(k, max(waste, 0.01)) for k, waste in points if k <= 64]
            if scheme == "exact" or not points:
                continue
            mark = "o" if scheme in ("single", "packing") else "."
            width = 2.2 if scheme == "fitted" else 1.0
            axes.plot(*zip(*points, strict=True), marker=mark, color=colour, linewidth=width, markersize=5,
                      label=LABELS.get(scheme, scheme))  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(0.9, 72)
        axes.set_ylim(0.009, 1.15)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_locator(FixedLocator(_PERCENTS))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.set_title(trace, fontsize=10)
        axes.set_xlabel("programs (lengths compiled)")
    for axes in panels[::columns]:
        axes.set_ylabel("padding waste")
    for axes in panels[len(traces) :]:
        axes.set_visible(False)
    figure.suptitle(
        "Padding waste out of sample: fitted on one half, tested on the other\n(below 1 % is drawn at 1 %)"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7 if columns > 2 else 4, frameon=False)
    _save(figure, path)


def draw_latencies(path: Path, runs: Mapping[tuple[str, str], Simulated]) -> None:
    """Cumulative distribution of simulated latencies, one panel a trace.

    Args:
        path: Where to write.
        runs: By trace and name of the scheme.
    """
    traces = list(dict.fromkeys(trace for trace, _ in runs))
    figure, panels = _figure(1, len(traces), (max(4.4 * len(traces), 7.0), 4.6))
    for axes, trace in zip(panels, traces, strict=True):
        for (where, name), run in runs.items():
            if where != trace:
                continue
            scheme = name.partition(":")[0]
            milliseconds = np.sort(run.latency_s) * 1e3
            style = "--" if name.startswith("fitted:8") or name == "packing:single" else "-"
            share = np.arange(1, len(milliseconds) + 1) / len(milliseconds)
            axes.plot(milliseconds, share, style, color=COLOURS[scheme], linewidth=1.5, label=_family(name))
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.xaxis.set_major_formatter(FuncFormatter(_duration))
        axes.grid(alpha=0.3, linewidth=0.5)
        axes.set_title(trace, fontsize=10)
        axes.set_xlabel("latency from arrival to answer")
    panels[0].set_ylabel("share of requests answered")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=6 if len(traces) > 2 else 3, frameon=False
    )
    figure.suptitle("Latency at one arrival rate for all schemes, simulated with the server's batcher")
    _save(figure, path)


def draw_use(path: Path, trace: str, runs: Mapping[str, Simulated]) -> None:
    """Heat maps of the device's time by bucket, batch by length: two columns, one panel a run."""
    lines = -(-len(runs) // 2)
    figure, panels = _figure(lines, 2, (10.5, 3.3 * lines + 0.6))
    image = None
    tables = {name: _time_by_bucket(run) for name, run in runs.items()}
    most = max(float(np.nanmax(table)) for _, _, table in tables.values())
    for axes, (name, (batches, lengths, table)) in zip(panels, tables.items(), strict=True):
        image = axes.imshow(table, cmap="Blues", vmin=0, vmax=most, aspect="auto", origin="lower")
        for y, x in np.argwhere(table >= 0.005).tolist():
            shade = "white" if table[y, x] > 0.55 * most else "black"
            axes.text(x, y, f"{table[y, x]:.0%}", ha="center", va="center", fontsize=8, color=shade)
        axes.set_xticks(range(len(lengths)), [str(one) for one in lengths])
        axes.set_yticks(range(len(batches)), [str(one) for one in batches])
        axes.set_title(
            f"{_short(name)}: {runs[name].waste:.1%} padding, {len(runs[name].launches)} runs", fontsize=10
        )
    for axes in panels[-2:]:
        axes.set_xlabel("length of the bucket, tokens")
    for axes in panels[::2]:
        axes.set_ylabel("batch size of the bucket")
    if image is not None:
        bar = figure.colorbar(image, ax=panels, format=FuncFormatter(lambda value, _: f"{value:.0%}"))
        bar.set_label("share of the device's time")
    figure.suptitle(f"{trace}: which buckets run (blank: less than 0.5 %)")
    _save(figure, path)


def _time_by_bucket(run: Simulated) -> tuple[list[int], list[int], "np.ndarray[Any, Any]"]:
    spent: dict[tuple[int, ...], float] = {}
    for ran in run.launches:
        spent[ran.bucket.sizes] = spent.get(ran.bucket.sizes, 0.0) + ran.end_s - ran.start_s
    batches, lengths = (sorted({sizes[axis] for sizes in spent}) for axis in (0, 1))
    table = np.zeros((len(batches), len(lengths)))
    for (batch, length), seconds in spent.items():
        table[batches.index(batch), lengths.index(length)] = seconds / run.busy_s
    return batches, lengths, table


def draw_scale(path: Path, parts: Mapping[str, Sequence[Row]]) -> None:
    """Latency of fleets by router, and how long a common start takes, both against the number of replicas."""
    figure, (left, right) = _figure(1, 2, (10.5, 3.8))
    routing, start = parts["routing"], parts["start"]
    colours = iter(("#d55e00", "#0072b2", "#009e73", "#cc79a7"))
    for router in dict.fromkeys(row["router"] for row in routing):
        rows = [row for row in routing if row["router"] == router]
        x, colour = [row["replicas"] for row in rows], next(colours)
        left.plot(x, [row["p99_ms"] for row in rows], "o-", color=colour, label=f"{router}, p99")
        left.plot(x, [row["p50_ms"] for row in rows], "o:", color=colour, label=f"{router}, p50")
    left.set_ylabel("latency, ms")
    left.set_title("one load, by router", loc="left", fontsize=10)
    heads = {"compile_s": "compiling", "image_s": "programs in the image", "store_s": "one shared store"}
    for key, label in (heads | {"store_weights_s": "one shared store, weights too"}).items():
        right.plot([row["replicas"] for row in start], [row[key] for row in start], "o-", label=label)
    right.set_ylabel("seconds until all are ready")
    right.set_title("all start at once, the store behind 10 Gbit/s", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("replicas")
        axes.set_ylim(top=axes.get_ylim()[1] * 5)  # room for the legend
        axes.legend(fontsize=7, ncols=2, loc="upper center")
    _save(figure, path)


def _figure(lines: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    # Not pyplot, which holds global state and would look for a display.
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False).ravel().tolist()


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _doubling(low: int, high: int) -> list[int]:
    return [1 << power for power in range(low.bit_length() - 1, high.bit_length()) if 1 << power >= low]


def _short(name: str) -> str:
    family, _, rest = name.partition(":")
    return f"{LABELS.get(family, family)} {'from ' if family == 'powers_of_two' else ''}{rest}".strip()


def _family(name: str) -> str:
    """The label of a scheme whose parameters differ from panel to panel."""
    family, _, rest = name.partition(":")
    if family == "fitted":
        return f"fitted, {rest} programs"
    return {"exact": "exact, compiled on the way", "packing": "packing"}.get(
        family, LABELS.get(family, family)
    )


def _duration(milliseconds: float, _: object) -> str:
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:,.0f} s"
