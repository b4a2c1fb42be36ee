"""From turns to one row a system and number of clients, a table and a figure."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..reporting import print_table
from .table import OURS

Row = dict[str, Any]
_MEDIANS = ("rate", "p50_ms", "p99_ms", "tokens_per_s", "first_p50_ms", "first_p99_ms")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999", "#f0e442", "#000000")


def summarise(turns: Sequence[Row]) -> list[Row]:
    """Medians over the turns of each system, and how it stands to servax.

    Args:
        turns: rows with `system`, `workload`, `mode`, `rate`, and where there are any `clients`, `against`,
            `turn`; rows of the mode `start` tell a start, or a failure.

    Returns:
        Rows with `system`, `workload`, `mode`, `clients`, medians, and `servax_over`: the median over the
        turns of servax's rate divided by the peer's right after it.
    """
    starts = {row["system"]: row for row in turns if row["mode"] == "start"}
    rows = [row for row in turns if row["mode"] != "start"]
    found = []
    for mode, clients, system in dict.fromkeys((r["mode"], r.get("clients"), r["system"]) for r in rows):
        own = [r for r in rows if (r["mode"], r.get("clients"), r["system"]) == (mode, clients, system)]
        medians = {
            key: statistics.median(values)
            for key in _MEDIANS
            if (values := [row[key] for row in own if row.get(key) is not None])
        }
        start = starts.get(system, {})
        found.append(
            {
                "system": system,
                "workload": own[0]["workload"],
                "mode": mode,
                "clients": clients,
                **medians,
                "turns": len(own),
                "failed": sum(row.get("failed", 0) for row in own),
                "servax_over": None if system == OURS else _ratio(rows, mode, clients, system),
                "start_s": start.get("start_s"),
                "agreement": start.get("cosine_min", start.get("agreement")),
            }
        )
    order = list(dict.fromkeys((row["mode"], row["clients"]) for row in found))
    return sorted(found, key=lambda row: order.index((row["mode"], row["clients"])))


def _ratio(rows: Sequence[Row], mode: str, clients: int | None, system: str) -> float | None:
    def rates(name: str) -> Iterator[tuple[int, float]]:
        for row in rows:
            if (row["mode"], row.get("clients"), row["system"], row["against"]) == (
                mode,
                clients,
                name,
                system,
            ):
                yield row.get("turn", 0), row["rate"]

    ours, theirs = dict(rates(OURS)), dict(rates(system))
    pairs = [ours[turn] / theirs[turn] for turn in theirs if turn in ours and theirs[turn] > 0]
    return statistics.median(pairs) if pairs else None


_COLUMNS = {
    "system": "system",
    "mode": "load",
    "clients": "clients|d",
    "rate": "{unit}/s|,.1f",
    "p50_ms": "p50 ms|,.0f",
    "p99_ms": "p99 ms|,.0f",
    "servax_over": "servax ÷ it|.2f",
    "start_s": "start s|.1f",
    "agreement": "agreement|.5f",
    "failed": "failed|d",
}


def print_summary(workload: str, rows: Sequence[Row], failures: Sequence[Row]) -> None:
    """The table on the terminal, and below it who could not run."""
    unit = {"embed": "answers", "offline": "texts", "decode": "tokens"}[workload]
    columns = {key: heading.format(unit=unit) for key, heading in _COLUMNS.items()}
    if workload == "decode":
        columns |= {"first_p50_ms": "first token p50 ms|,.0f"}
    note = "\n".join(f"{row['system']} did not run: {row['error'].splitlines()[0][:400]}" for row in failures)
    print_table(f"servax against other servers: {workload}", columns, rows, note or None)


# What runs behind a name, in a figure that is seen without its text.
_SHOWN = {
    ("decode", "servax"): "servax float32",
    ("decode", "vllm"): "vLLM bfloat16",
    ("decode", "llama.cpp"): "llama.cpp 4-bit",
    ("embed", "servax"): "servax float32",
    ("embed", "plain"): "ONNX Runtime + FastAPI",
    ("embed", "triton"): "Triton + ONNX Runtime",
    ("embed", "vllm"): "vLLM pooling",
    ("offline", "servax"): "servax float32",
    ("offline", "onnxruntime"): "ONNX Runtime",
    ("offline", "openvino"): "OpenVINO",
}


def draw(path: Path, workload: str, rows: Sequence[Row]) -> None:
    """Rates as bars, one panel a number of clients, servax first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["mode"], row["clients"]) for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    colours = {system: COLOURS[i % len(COLOURS)] for i, system in enumerate(systems)}
    height = 1.4 + 0.36 * len(systems)
    figure = Figure(figsize=(max(3.4 * len(panels), 6.0), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    axes[0].invert_yaxis()
    for panel, (mode, clients) in zip(axes, panels, strict=True):
        shown = [row for row in rows if (row["mode"], row["clients"]) == (mode, clients)]
        names = [_SHOWN.get((workload, row["system"]), row["system"]) for row in shown]
        filled = [colours[row["system"]] for row in shown]
        bars = panel.barh(names, [row["rate"] for row in shown], color=filled)
        panel.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(_heading(mode, clients), fontsize=10)
        panel.set_xlabel(
            {"embed": "answers a second", "offline": "texts a second"}.get(workload, "tokens a second")
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _heading(mode: str, clients: int | None) -> str:
    if mode == "open":
        return "by the clock, p99 within limit"
    if clients is None:
        return "all texts at once"
    return f"{clients} client{'s' if clients > 1 else ''} at once"
